/* lower_bounded.c - rows that only the data chooses, on the GPU (bounded.cu). */
#include "cuda/scratch.h"

static int64_t tiles_of(const om_args *a) { return om_gpu_blocks(a->in[0].dim[0], OM_GPU_SELECT_TILE); }

int64_t om_gpu_scratch_select_rows(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 4 * tiles_of(a);
}

/* Without rows one block still tells the count. */
om_status om_lower_select_rows(om_lower *l) {
    const om_args *a = l->a;
    const om_gpu_select p = {.n = a->in[0].dim[0], .tiles = tiles_of(a), .most = om_args_float(a, "most", 1)};
    OM_CHECK(l->cx, a->out[0].dim[0] == p.n, "select_rows: room for %lld rows, the mask has %lld",
             (long long)a->out[0].dim[0], (long long)p.n);
    om_gpu_select *g = om_gpu_add(l, OM_GPU_select_count, p.tiles, 1, 1, OM_GPU_SELECT_THREADS, 256, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->mask, 0);
    om_gpu_scratch_at(l, &g->counts, 0, 4 * p.tiles, OM_GPU_WRITE);
    g = om_gpu_add(l, OM_GPU_select_place, p.tiles ? p.tiles : 1, 1, 1, OM_GPU_SELECT_THREADS, 256, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->mask, 0);
    om_gpu_scratch_at(l, &g->counts, 0, 4 * p.tiles, OM_GPU_READ);
    om_gpu_out(l, &g->idx, 0, OM_GPU_WRITE);
    om_gpu_out(l, &g->count, 1, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_counted(om_lower *l) {
    const om_args *a = l->a;
    const om_node *n = a->node;
    const om_tensor *x = &a->in[0], *y = &a->out[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    om_gpu_counted p = {.outer = 1, .n = x->dim[axis], .limit = y->dim[0], .row = 1, .past = om_args_int(a, "past", 0),
                        .size = (int32_t)om_dtype_size(x->dtype),
                        .what = om_is(n, compress)  ? OM_GPU_COMPRESS
                                : om_is(n, restore) ? OM_GPU_RESTORE
                                                    : OM_GPU_TRIM};
    for (int i = 0; i < x->rank; i++)
        if (i != axis) *(i < axis ? &p.outer : &p.row) *= x->dim[i];
    if (p.what == OM_GPU_RESTORE) OM_TRY(om_gpu_fill_lower(l, a->n_in, y, 0, 0));
    const int64_t rows = p.what == OM_GPU_COMPRESS ? p.limit : p.n;
    om_gpu_counted *g =
        om_gpu_add(l, OM_GPU_counted, om_gpu_grid(p.outer * rows * p.row, 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->x, 0);
    if (p.what != OM_GPU_TRIM) om_gpu_in(l, &g->idx, 1);
    om_gpu_in(l, &g->count, a->n_in - 1);
    if (p.what != OM_GPU_TRIM) g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}
