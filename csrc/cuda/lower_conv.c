/* lower_conv.c - convolution and its gradients on the GPU (conv.cu). */
#include "cuda/scratch.h"
#include "ops/attr.h"

#define OF(name, dtype) ((om_gpu_kernel)(OM_GPU_##name##_f32 + (dtype) - OM_F32))

static int64_t setting(const om_args *a, const char *name, int axis, int64_t otherwise) {
    int count = 0;
    const int64_t *v = attr_values(a, name, &count);
    return v && count ? v[count == 1 ? 0 : axis] : otherwise;
}

static om_status conv_of(om_lower *l, const om_tensor *x, const om_tensor *w, const om_tensor *y, om_gpu_conv *p) {
    const om_args *a = l->a;
    const int64_t groups = om_args_int(a, "groups", 1);
    const int nd = x->rank - 2;
    *p = (om_gpu_conv){.n = x->dim[0], .c = x->dim[1], .o = w->dim[0], .cg = w->dim[1], .og = w->dim[0] / groups,
                       .taps = 1, .pixels = 1, .plane = 1};
    OM_CHECK(l->cx, p->cg * groups == p->c && p->og * groups == p->o,
             "%s: %lld channels in, %lld out, %lld per filter, %lld groups do not fit", a->node->op->name,
             (long long)p->c, (long long)p->o, (long long)p->cg, (long long)groups);
    for (int i = 0; i < 3; i++) {
        const int s = i - (3 - nd); /* spatial axis, or < 0 */
        p->in[i] = s < 0 ? 1 : x->dim[2 + s];
        p->k[i] = s < 0 ? 1 : w->dim[2 + s];
        p->out[i] = s < 0 ? 1 : y->dim[2 + s];
        p->stride[i] = s < 0 ? 1 : setting(a, "stride", s, 1);
        p->dil[i] = s < 0 ? 1 : setting(a, "dilation", s, 1);
        p->lo[i] = s < 0 ? 0 : setting(a, "pad", s, 0);
        p->taps *= p->k[i], p->pixels *= p->out[i], p->plane *= p->in[i];
    }
    return OM_OK;
}

static int64_t blocks_for(int64_t n) {
    const int64_t blocks = om_gpu_blocks(n, 256);
    return blocks < 1 << 20 ? blocks : 1 << 20;
}

static om_gpu_conv *conv_add(om_lower *l, om_gpu_kernel k, int64_t blocks, const om_gpu_conv *p) {
    om_gpu_conv *g = om_gpu_add(l, k, blocks, 1, 1, 256, 32 * 8, sizeof *g);
    if (g) *g = *p;
    return g;
}

om_status om_lower_conv(om_lower *l) {
    const om_args *a = l->a;
    om_gpu_conv p, *g;
    OM_TRY(conv_of(l, &a->in[0], &a->in[1], &a->out[0], &p));
    if (!(g = conv_add(l, OF(conv_y, a->in[0].dtype), blocks_for(p.n * p.o * p.pixels), &p))) return l->cx->status;
    om_gpu_in(l, &g->x, 0);
    om_gpu_in(l, &g->w, 1);
    om_gpu_in(l, &g->bias, 2);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_conv_grad(om_lower *l) {
    const om_args *a = l->a;
    const int dtype = a->in[0].dtype;
    int count = 0;
    const int64_t *want = attr_values(a, "want", &count);
    om_gpu_conv p, *g;
    OM_TRY(conv_of(l, &a->in[1], &a->in[2], &a->in[0], &p));
    if (p.o * p.cg * p.taps > INT32_MAX) return om_gpu_host(l);
    for (int i = 0; i < 3 && i < a->n_out; i++) {
        if (i < count && !want[i]) continue;
        const om_gpu_kernel k = i == 0 ? OF(conv_dx, dtype) : i == 1 ? OF(conv_dw, dtype) : OF(conv_db, dtype);
        g = conv_add(l, k, i == 0 ? blocks_for(p.n * p.c * p.plane) : i == 1 ? p.o * p.cg * p.taps : p.o, &p);
        if (!g) return l->cx->status;
        om_gpu_in(l, &g->dy, 0);
        if (i == 1) om_gpu_in(l, &g->x, 1);
        if (i == 0) om_gpu_in(l, &g->w, 2);
        om_gpu_out(l, i == 0 ? &g->dx : i == 1 ? &g->dw : &g->db, i, OM_GPU_WRITE);
    }
    return OM_OK;
}
