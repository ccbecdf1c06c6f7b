/* lower_scatter.c - elements and rows by index, written, and rows by tuples of them, on the GPU. */
#include "cuda/scratch.h"

/* --- sums of rows by index (index.cu) -------------------------------------------------------------------------- */

enum { ADD_THREADS = 256 }; /* of scatter_add and scatter_join, at most */

/* Sums of the parts that sources are cut into (scatter_add). */
static int64_t add_sums(int64_t m, int64_t rows_size) {
    return m > OM_GPU_SCATTER_PART ? om_gpu_blocks(m, OM_GPU_SCATTER_PART) * 2 * rows_size * 8 : 0;
}
static int64_t add_scratch(int64_t m, int64_t rows_size) { return om_gpu_sort_scratch(m) + add_sums(m, rows_size); }

/* Into y along `axis`: false: nothing that the kernels can add. */
static bool add_of(const om_tensor *y, int axis, const om_tensor *idx, int64_t m, om_gpu_scatter *p) {
    int64_t outer = 1, inner = 1;
    for (int i = 0; i < y->rank; i++)
        if (i != axis) *(i < axis ? &outer : &inner) *= y->dim[i];
    *p = (om_gpu_scatter){.outer = outer, .n = y->dim[axis], .m = m, .inner = inner, .skip = -1, .place = 1,
                          .wide = idx->dtype == OM_I64};
    const int64_t most = 16 / (int64_t)om_dtype_size(y->dtype);
    p->each = inner % most ? 1 : (int32_t)most;
    return om_is_dense(y) && om_is_float(y->dtype) && outer <= 65535 && m <= INT32_MAX && p->n < INT32_MAX &&
           om_gpu_blocks(inner, ADD_THREADS) <= 65535;
}

/* Operand src, (outer, m, inner) dense, added to what y has, at operand 1. */
static om_status add_lower(om_lower *l, int src, const om_gpu_scatter *p) {
    const int dtype = l->a->out[0].dtype;
    const int64_t places = p->inner / p->each;
    const uint32_t threads = places > ADD_THREADS ? ADD_THREADS : (uint32_t)(32 * om_gpu_blocks(places, 32));
    const int64_t chunks = threads ? om_gpu_blocks(places, threads) : 0;
    om_gpu_scatter *g = om_gpu_add(l, OM_GPU_scatter_words, om_gpu_grid(p->m, 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    *g = *p;
    om_gpu_in(l, &g->idx, 1);
    om_gpu_scratch_at(l, &g->words, 0, 8 * p->m, OM_GPU_WRITE);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    const int64_t words = om_gpu_sort_lower(l, p->m, p->n);
    const int64_t sums = om_gpu_sort_scratch(p->m), size = add_sums(p->m, p->outer * p->inner);
    const int64_t parts = om_gpu_blocks(p->m, OM_GPU_SCATTER_PART);
    for (int join = 0; join < (size ? 2 : 1); join++) {
        const int64_t blocks = join ? om_gpu_blocks(p->inner, ADD_THREADS) : chunks;
        g = om_gpu_add(l, join ? OM_GPU_OF(scatter_join, dtype) : OM_GPU_OF(scatter_add, dtype), parts, blocks,
                       p->outer, join ? ADD_THREADS : threads, join ? 0 : 8 * (OM_GPU_SCATTER_PART + 2), sizeof *g);
        if (!g) return l->cx->status;
        *g = *p;
        if (!join) om_gpu_in(l, &g->dy, src);
        om_gpu_scratch_at(l, &g->words, words, 8 * p->m, OM_GPU_READ);
        if (size) om_gpu_scratch_at(l, &g->sums, sums, size, join ? OM_GPU_READ : OM_GPU_WRITE);
        om_gpu_out(l, &g->y, 0, OM_GPU_READ | OM_GPU_WRITE);
    }
    return OM_OK;
}

int64_t om_gpu_scratch_gather_grad(om_ctx *cx, const om_args *a) {
    const int64_t m = om_numel(&a->in[1]);
    (void)cx;
    return add_scratch(m, m ? om_numel(&a->in[0]) / m : 0);
}

om_status om_lower_gather_grad(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *y = &a->out[0];
    const bool base = a->n_in > 2 && a->in[2].dtype;
    om_gpu_scatter p;
    if (!add_of(y, (int)om_args_int(a, "axis", 0), &a->in[1], om_numel(&a->in[1]), &p)) return om_gpu_host(l);
    p.skip = om_args_int(a, "padding_idx", -1), p.fresh = !base;
    if (base) OM_TRY(om_gpu_copy_lower(l, 2, &a->in[2], 0, a->n_in, y, 0));
    else OM_TRY(om_gpu_fill_lower(l, a->n_in, y, 0, 0));
    return add_lower(l, 0, &p);
}

/* --- elements by index (scatter.cu) ---------------------------------------------------------------------------- */

/* An index of rows that was expanded over them, as a sum of rows: by lines only one thread would work at each. */
static bool elements_are_rows(const om_args *a, om_gpu_scatter *p) {
    const om_tensor *y = &a->out[0], *idx = &a->in[1];
    const int axis = (int)om_args_int(a, "axis", 0);
    if (om_args_int(a, "reduce", 0) != 1 || !idx->rank || !om_numel(idx) || !om_is_dense(&a->in[2])) return false;
    for (int i = 0; i < idx->rank; i++) {
        const int64_t step = idx->dim[i] > 1 ? idx->stride[i] : i == axis;
        if (i == axis ? step != 1 : step || idx->dim[i] != y->dim[i]) return false;
    }
    if (!add_of(y, axis, idx, idx->dim[axis], p)) return false;
    p->place = p->inner;
    return true;
}

int64_t om_gpu_scratch_scatter_elements(om_ctx *cx, const om_args *a) {
    om_gpu_scatter p;
    (void)cx;
    return elements_are_rows(a, &p) ? add_scratch(p.m, p.outer * p.inner) : 0;
}

om_status om_lower_scatter_elements(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *y = &a->out[0], *idx = &a->in[1], *src = &a->in[2];
    const int axis = (int)om_args_int(a, "axis", 0);
    om_gpu_scatter rows;
    OM_TRY(om_gpu_check(l));
    if (elements_are_rows(a, &rows)) {
        OM_TRY(om_gpu_copy_lower(l, 0, &a->in[0], 0, a->n_in, y, 0));
        return add_lower(l, 2, &rows);
    }
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
