/* lower_conv.c - convolution and its gradients on the GPU (conv.cu). */
#include "cuda/scratch.h"
#include "cuda/torch_conv.h"
#include "ops/attr.h"
#include "ops/window.h"

/* The spatial axes, aligned to the last of three; missing ones have size 1. k, out NULL: attribute kernel, as many
 * windows as fit. */
static void axes_of(const om_args *a, int nd, const int64_t *in, const int64_t *k, const int64_t *out, om_gpu_conv *p) {
    om_window w;
    om_window_args(a, nd, k, &w);
    p->taps = p->pixels = p->plane = 1;
    for (int i = 0; i < 3; i++) {
        const int s = i - (3 - nd);
        p->in[i] = s < 0 ? 1 : in[s];
        p->k[i] = w.k[i], p->stride[i] = w.stride[i], p->dil[i] = w.dil[i], p->lo[i] = w.lo[i];
        p->out[i] = s >= 0 && out ? out[s] : om_window_fits(&w, i, p->in[i]);
        p->taps *= p->k[i], p->pixels *= p->out[i], p->plane *= p->in[i];
    }
}

static om_status conv_of(om_lower *l, const om_tensor *x, const om_tensor *w, const om_tensor *y, om_gpu_conv *p) {
    const om_args *a = l->a;
    const int64_t groups = om_args_int(a, "groups", 1);
    *p = (om_gpu_conv){.n = x->dim[0], .c = x->dim[1], .o = w->dim[0], .cg = w->dim[1], .og = w->dim[0] / groups};
    OM_CHECK(l->cx, p->cg * groups == p->c && p->og * groups == p->o,
             "%s: %lld channels in, %lld out, %lld per filter, %lld groups do not fit", a->node->op->name,
             (long long)p->c, (long long)p->o, (long long)p->cg, (long long)groups);
    axes_of(a, x->rank - 2, x->dim + 2, w->dim + 2, y->dim + 2, p);
    return OM_OK;
}

static om_gpu_conv *conv_add(om_lower *l, om_gpu_kernel k, int64_t blocks, const om_gpu_conv *p) {
    om_gpu_conv *g = om_gpu_add(l, k, blocks, 1, 1, 256, 32 * 8, sizeof *g);
    if (g) *g = *p;
    return g;
}

/* By torch's kernels, where there are any and padding is the same on both sides of an axis. What was lowered to kernels
 * of our own stays for when they cannot. */
static om_status torch_add(om_lower *l, const om_gpu_conv *p, int nd) {
    const om_args *a = l->a;
    int n_want = 0;
    const int64_t *want = attr_values(a, "want", &n_want);
    om_window w;
    if (!om_torch_conv_open() || !om_cuda_memory_of_torch(l->cx)) return OM_OK;
    for (int i = 0; i < a->n_in + a->n_out; i++) {
        const om_tensor *t = i < a->n_in ? &a->in[i] : &a->out[i - a->n_in];
        if (t->dtype && i < a->n_in && !om_numel(t)) return OM_OK;
    }
    om_window_args(a, nd, p->k + 3 - nd, &w);
    if (memcmp(w.lo, w.hi, sizeof w.lo) != 0) return OM_OK;
    om_torch_conv *t = om_arena_alloc(l->mem, sizeof *t);
    if (!t) return l->cx->status;
    *t = (om_torch_conv){.transposed = om_is(a->node, conv_transpose), .grad = om_is(a->node, conv_grad), .nd = nd,
                         .groups = om_args_int(a, "groups", 1)};
    for (int i = 0; i < nd; i++) {
        const int k = i + 3 - nd;
        t->stride[i] = p->stride[k], t->pad[i] = p->lo[k], t->dil[i] = p->dil[k];
        t->out_pad[i] = t->transposed ? attr_entry(a, "out_pad", i, 0) : 0;
    }
    for (int i = 0; i < 3 && t->grad; i++) t->want[i] = i < a->n_out && (i >= n_want || want[i]) && a->out[i].dtype;
    l->call->torch = t;
    return OM_OK;
}

om_status om_lower_conv(om_lower *l) {
    const om_args *a = l->a;
    om_gpu_conv p, *g;
    OM_TRY(conv_of(l, &a->in[0], &a->in[1], &a->out[0], &p));
    g = conv_add(l, OM_GPU_OF(conv_y, a->in[0].dtype), om_gpu_grid(p.n * p.o * p.pixels, 256), &p);
    if (!g) return l->cx->status;
    om_gpu_in(l, &g->x, 0);
    om_gpu_in(l, &g->w, 1);
    om_gpu_in(l, &g->bias, 2);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return torch_add(l, &p, a->in[0].rank - 2);
}

/* The gradient of a convolution for its x: x in the place of dy, y in that of dx. */
om_status om_lower_conv_transpose(om_lower *l) {
    const om_args *a = l->a;
    om_gpu_conv p, *g;
    OM_TRY(om_gpu_check(l));
    OM_TRY(conv_of(l, &a->out[0], &a->in[1], &a->in[0], &p));
    g = conv_add(l, OM_GPU_OF(conv_dx, a->in[0].dtype), om_gpu_grid(p.n * p.c * p.plane, 256), &p);
    if (!g) return l->cx->status;
    om_gpu_in(l, &g->dy, 0);
    om_gpu_in(l, &g->w, 1);
    om_gpu_out(l, &g->dx, 0, OM_GPU_WRITE);
    return torch_add(l, &p, a->in[0].rank - 2);
}

om_status om_lower_patches(om_lower *l) {
    const om_args *a = l->a;
    const bool to = om_is(a->node, im2col);
    const om_tensor *x = to ? &a->in[0] : &a->out[0];
    const int dtype = x->dtype;
    om_gpu_conv p = {.n = x->dim[0], .c = x->dim[1]}, *g;
    OM_TRY(om_gpu_check(l));
    axes_of(a, x->rank - 2, x->dim + 2, NULL, NULL, &p);
    g = conv_add(l, to ? OM_GPU_OF(unfold, dtype) : OM_GPU_OF(fold, dtype),
                 om_gpu_grid(p.n * p.c * (to ? p.taps * p.pixels : p.plane), 256), &p);
    if (!g) return l->cx->status;
    om_gpu_in(l, to ? &g->x : &g->dy, 0);
    om_gpu_out(l, to ? &g->y : &g->dx, 0, OM_GPU_WRITE);
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
        const om_gpu_kernel k = i == 0   ? OM_GPU_OF(conv_dx, dtype)
                                : i == 1 ? OM_GPU_OF(conv_dw, dtype)
                                         : OM_GPU_OF(conv_db, dtype);
        g = conv_add(l, k, i == 0 ? om_gpu_grid(p.n * p.c * p.plane, 256) : i == 1 ? p.o * p.cg * p.taps : p.o, &p);
        if (!g) return l->cx->status;
        om_gpu_in(l, &g->dy, 0);
        if (i == 1) om_gpu_in(l, &g->x, 1);
        if (i == 0) om_gpu_in(l, &g->w, 2);
        om_gpu_out(l, i == 0 ? &g->dx : i == 1 ? &g->dw : &g->db, i, OM_GPU_WRITE);
    }
    return torch_add(l, &p, a->in[1].rank - 2);
}
