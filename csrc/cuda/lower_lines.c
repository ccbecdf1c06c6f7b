/* lower_lines.c - functions of single elements, places in sorted rows, distances, and what is worked off along an axis,
 * on the GPU (each.cu, lines.cu). */
#include "cuda/scratch.h"

static const struct { const om_op *op; int what; } NUMBERS[] = {
    {&om_op_acos, OM_GPU_ACOS}, {&om_op_asin, OM_GPU_ASIN}, {&om_op_atan, OM_GPU_ATAN}, {&om_op_acosh, OM_GPU_ACOSH},
    {&om_op_atanh, OM_GPU_ATANH}, {&om_op_tan, OM_GPU_TAN}, {&om_op_sinh, OM_GPU_SINH}, {&om_op_cosh, OM_GPU_COSH},
    {&om_op_lgamma, OM_GPU_LGAMMA}, {&om_op_digamma, OM_GPU_DIGAMMA}, {&om_op_trigamma, OM_GPU_TRIGAMMA},
    {&om_op_atan2, OM_GPU_ATAN2}, {&om_op_xlogy, OM_GPU_XLOGY}, {&om_op_cumprod, OM_GPU_CUMPROD},
    {&om_op_cumprod_grad, OM_GPU_CUMPROD_GRAD}, {&om_op_logcumsumexp, OM_GPU_LOGS},
    {&om_op_logcumsumexp_grad, OM_GPU_LOGS_GRAD},
};
static int number_of(const om_op *op) {
    size_t i = 0;
    while (NUMBERS[i].op != op) i++;
    return NUMBERS[i].what;
}

om_status om_lower_special(om_lower *l) {
    const om_args *a = l->a;
    const int64_t n = om_numel(&a->out[0]);
    OM_TRY(om_gpu_check(l));
    if (!om_is_dense(&a->out[0])) return om_gpu_host(l);
    om_gpu_special *g = om_gpu_add(l, OM_GPU_special, om_gpu_grid(n, 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->n = n, g->what = number_of(a->node->op), g->dtype = a->in[0].dtype;
    om_gpu_in(l, &g->x, 0);
    om_gpu_in(l, &g->y, 1);
    om_gpu_out(l, &g->out, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_search(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0], *v = &a->in[1];
    OM_TRY(om_gpu_check(l));
    if (!om_is_dense(&a->out[0])) return om_gpu_host(l);
    const int64_t count = om_numel(v);
    om_gpu_search *g = om_gpu_add(l, OM_GPU_search, om_gpu_grid(count, 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->row = x->dim[x->rank - 1], g->count = count, g->per_row = x->rank == 1 ? count : v->dim[v->rank - 1];
    g->dtype = x->dtype, g->right = om_args_int(a, "right", 0) != 0;
    om_gpu_in(l, &g->sorted, 0);
    om_gpu_in(l, &g->values, 1);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_cdist(om_lower *l) {
    const om_args *a = l->a;
    const bool grad = a->n_in == 4;
    const om_tensor *x = &a->in[grad], *y = &a->in[grad + 1];
    OM_TRY(om_gpu_check(l));
    if (!om_is_dense(&a->out[0])) return om_gpu_host(l);
    const om_gpu_kernel k = grad ? x->dtype == OM_F64 ? OM_GPU_cdist_grad_f64 : OM_GPU_cdist_grad_f32
                                 : x->dtype == OM_F64 ? OM_GPU_cdist_f64 : OM_GPU_cdist_f32;
    om_gpu_cdist *g = om_gpu_add(l, k, om_gpu_grid(om_numel(&a->out[0]), 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->rows = x->dim[x->rank - 2], g->r = y->dim[y->rank - 2], g->m = x->dim[x->rank - 1];
    g->p = om_args_float(a, "p", 2), g->items = g->rows;
    for (int i = 0; i < x->rank - 2; i++) g->items *= x->dim[i];
    om_gpu_in(l, &g->x, grad);
    om_gpu_in(l, &g->y, grad + 1);
    if (grad) om_gpu_in(l, &g->dd, 0), om_gpu_in(l, &g->d, 3);
    om_gpu_out(l, &g->out, 0, OM_GPU_WRITE);
    return OM_OK;
}

/* --- lines ---------------------------------------------------------------------------------------------- */

/* Sizes and strides; outputs may have lost the axis (argmax without keepdims). */
static void lines_of(const om_args *a, om_gpu_lines *p) {
    const om_tensor *x = &a->in[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    *p = (om_gpu_lines){.lines = 1, .len = x->dim[axis], .dtype = x->dtype};
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        p->lines *= x->dim[i];
        p->dim[p->rank] = x->dim[i];
        for (int k = 0; k < a->n_in; k++) p->stride[k][p->rank] = a->in[k].stride[i];
        for (int k = 0; k < a->n_out; k++)
            p->stride[3 + k][p->rank] = a->out[k].stride[a->out[k].rank == x->rank || i < axis ? i : i - 1];
        p->rank++;
    }
    for (int k = 0; k < a->n_in; k++) p->step[k] = a->in[k].stride[axis];
    for (int k = 0; k < a->n_out; k++) p->step[3 + k] = a->out[k].rank == x->rank ? a->out[k].stride[axis] : 0;
}

static om_gpu_lines *lines_add(om_lower *l, om_gpu_kernel k, const om_gpu_lines *p, int64_t gx, int64_t gy,
                               uint32_t threads, size_t shared) {
    om_gpu_lines *g = om_gpu_add(l, k, p->len ? gx : 0, gy, 1, threads, shared, sizeof *g);
    if (!g) return NULL;
    *g = *p;
    for (int i = 0; i < l->a->n_in; i++) om_gpu_in(l, &g->x[i], i);
    for (int i = 0; i < l->a->n_out; i++) om_gpu_out(l, &g->y[i], i, OM_GPU_WRITE);
    return g;
}

/* Threads for a line of n. */
static uint32_t threads_for(int64_t n) { return n <= 32 ? 32 : n <= 128 ? 64 : n <= 512 ? 128 : 256; }

om_status om_lower_cumsum(om_lower *l) {
    om_gpu_lines p;
    lines_of(l->a, &p);
    p.exclusive = om_args_int(l->a, "exclusive", 0) != 0, p.reverse = om_args_int(l->a, "reverse", 0) != 0;
    if (p.lines > INT32_MAX) return om_gpu_host(l);
    const uint32_t threads = threads_for(p.len);
    return lines_add(l, OM_GPU_cumsum, &p, p.lines, 1, threads, threads * 8) ? OM_OK : l->cx->status;
}

int64_t om_gpu_scratch_products(om_ctx *cx, const om_args *a) {
    (void)cx;
    return om_is(a->node, cumprod_grad) ? 8 * om_numel(&a->in[0]) : 0;
}

om_status om_lower_products(om_lower *l) {
    om_gpu_lines p, *g;
    lines_of(l->a, &p);
    p.what = number_of(l->a->node->op);
    if (!(g = lines_add(l, OM_GPU_products, &p, om_gpu_grid(p.lines, 128), 1, 128, 0))) return l->cx->status;
    if (p.what == OM_GPU_CUMPROD_GRAD)
        om_gpu_scratch_at(l, &g->space, 0, 8 * p.lines * p.len, OM_GPU_READ | OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_arg(om_lower *l) {
    om_gpu_lines p;
    lines_of(l->a, &p);
    p.largest = om_is(l->a->node, argmax);
    if (p.lines > INT32_MAX || !p.len) return om_gpu_host(l);
    const uint32_t threads = threads_for(p.len);
    return lines_add(l, OM_GPU_arg, &p, p.lines, 1, threads, threads * 16) ? OM_OK : l->cx->status;
}

/* Candidates are compared with each other: all of a short line, the k picked of a long one. What has more is the
 * CPU's. */
static void topk_of(const om_args *a, om_gpu_lines *p, bool *picks) {
    enum { SHORT = 1 << 10 };
    lines_of(a, p);
    p->k = a->out[0].dim[om_args_int(a, "axis", 0)], p->largest = om_args_int(a, "largest", 1) != 0;
    *picks = p->len > SHORT && p->k <= p->len / 4;
}

int64_t om_gpu_scratch_topk(om_ctx *cx, const om_args *a) {
    om_gpu_lines p;
    bool picks;
    (void)cx;
    topk_of(a, &p, &picks);
    return picks ? 16 * p.lines * p.k : 0;
}

om_status om_lower_topk(om_lower *l) {
    enum { MOST = 1 << 15 };
    om_gpu_lines p, *g;
    bool picks;
    OM_TRY(om_gpu_check(l));
    topk_of(l->a, &p, &picks);
    const int64_t n = picks ? p.k : p.len, room = 16 * p.lines * p.k;
    if (p.lines > INT32_MAX || n > MOST) return om_gpu_host(l);
    const uint32_t threads = threads_for(n);
    if (picks) {
        if (!(g = lines_add(l, OM_GPU_topk_pick, &p, p.k ? p.lines : 0, 1, 256, 256))) return l->cx->status;
        om_gpu_scratch_at(l, &g->space, 0, room, OM_GPU_WRITE);
    }
    g = lines_add(l, OM_GPU_topk, &p, p.k ? p.lines : 0, om_gpu_blocks(n, threads), threads, threads * 8);
    if (g && picks) om_gpu_scratch_at(l, &g->space, 0, room, OM_GPU_READ);
    return g ? OM_OK : l->cx->status;
}
