/* lower_scatter.c - elements and rows by index, read and written, on the GPU (scatter.cu). */
#include "cuda/scratch.h"

om_status om_lower_scatter_elements(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *y = &a->out[0], *idx = &a->in[1], *src = &a->in[2];
    const int axis = (int)om_args_int(a, "axis", 0);
    OM_TRY(om_gpu_check(l));
    om_tensor place = *idx; /* strides of positions */
    om_dense_strides(&place);
    om_gpu_put p = {.lines = 1, .len = idx->dim[axis], .n = y->dim[axis], .dtype = y->dtype,
                    .size = (int32_t)om_dtype_size(y->dtype), .wide = idx->dtype == OM_I64,
                    .reduce = (int32_t)om_args_int(a, "reduce", 0)};
    const om_tensor *t[4] = {y, idx, src, &place};
    for (int i = 0; i < idx->rank; i++) {
        if (i != axis) p.lines *= p.dim[p.rank] = idx->dim[i];
        for (int k = 0; k < 4; k++) *(i == axis ? &p.step[k] : &p.stride[k][p.rank]) = t[k]->stride[i];
        p.rank += i != axis;
    }
    OM_TRY(om_gpu_copy_lower(l, 0, &a->in[0], 0, a->n_in, y, 0));
    om_gpu_put *g = om_gpu_add(l, OM_GPU_put, p.len ? om_gpu_grid(p.lines, 128) : 0, 1, 1, 128, 0, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->idx, 1);
    om_gpu_in(l, &g->src, 2);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    om_gpu_out(l, &g->y, 0, OM_GPU_READ | OM_GPU_WRITE);
    return OM_OK;
}

/* Tuples of indices into the first axes of x. */
static void tuples_of(const om_args *a, const om_tensor *x, om_gpu_nd *p) {
    const om_tensor *idx = &a->in[1];
    *p = (om_gpu_nd){.count = 1, .k = idx->dim[idx->rank - 1], .inner = 1, .targets = 1, .dtype = x->dtype,
                     .size = (int32_t)om_dtype_size(x->dtype), .wide = idx->dtype == OM_I64,
                     .reduce = (int32_t)om_args_int(a, "reduce", 0)};
    for (int i = 0; i < idx->rank - 1; i++) p->count *= idx->dim[i];
    for (int i = x->rank - 1; i >= 0; i--) {
        if (i >= p->k) {
            p->inner *= x->dim[i];
        } else {
            p->limit[i] = x->dim[i], p->step[i] = p->targets;
            p->targets *= x->dim[i];
        }
    }
}

om_status om_lower_gather_nd(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0];
    om_gpu_nd p, *g;
    tuples_of(a, x, &p);
    if (!om_is_dense(&a->out[0])) return om_gpu_host(l);
    for (int i = 0; i < x->rank; i++) {
        if (i < p.k) p.step[i] = x->stride[i];
        else p.dim[p.rank] = x->dim[i], p.stride[p.rank++] = x->stride[i];
    }
    if (!(g = om_gpu_add(l, OM_GPU_gather_nd, om_gpu_grid(p.count * p.inner, 256), 1, 1, 256, 0, sizeof *g)))
        return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->x, 0);
    om_gpu_in(l, &g->idx, 1);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

int64_t om_gpu_scratch_scatter_nd(om_ctx *cx, const om_args *a) {
    om_gpu_nd p;
    (void)cx;
    tuples_of(a, &a->out[0], &p);
    return om_gpu_sort_scratch(p.count);
}

om_status om_lower_scatter_nd(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *y = &a->out[0];
    om_gpu_nd p, *g;
    tuples_of(a, y, &p);
    const int64_t threads = p.inner >= 256 ? 256 : 32 * om_gpu_blocks(p.inner, 32);
    const int64_t chunks = threads ? om_gpu_blocks(p.inner, threads) : 0;
    if (!om_is_dense(y) || chunks > 65535 || p.count > INT32_MAX || p.targets >= INT32_MAX) return om_gpu_host(l);
    OM_TRY(om_gpu_copy_lower(l, 0, &a->in[0], 0, a->n_in, y, 0));
    if (!p.count || !p.inner) return OM_OK;
    if (!(g = om_gpu_add(l, OM_GPU_nd_words, om_gpu_grid(p.count, 256), 1, 1, 256, 0, sizeof *g))) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->idx, 1);
    om_gpu_scratch_at(l, &g->words, 0, 8 * p.count, OM_GPU_WRITE);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    const int64_t words = om_gpu_sort_lower(l, p.count, p.targets);
    if (!(g = om_gpu_add(l, OM_GPU_nd_put, p.count, chunks, 1, (uint32_t)threads, 0, sizeof *g))) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->x, 2);
    om_gpu_scratch_at(l, &g->words, words, 8 * p.count, OM_GPU_READ);
    om_gpu_out(l, &g->y, 0, OM_GPU_READ | OM_GPU_WRITE);
    return OM_OK;
}
