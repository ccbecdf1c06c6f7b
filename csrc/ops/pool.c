/* pool.c - max, average and adaptive average pooling over the last 1 to 3 axes, and their gradients.
 *
 * An output element owns a window: per axis an interval of input positions (with a step, for a dilated maximum). Rules
 * are torch's: ceil mode drops a last window that would start beyond input and left padding;
 * padding never wins a maximum (-inf) and NaN always does; the average divides by the window clipped to the padded
 * input (count_include_pad) or to the input.
 */
#include "ops/attr.h"
#include "ops/window.h"

/* --- types --------------------------------------------------------------------------------------------- */

/* Sizes of a pooling with a kernel. */
static om_status pool_shape(om_graph *g, const om_node *n, om_type *y) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    om_window w;
    int axes;
    OM_TRY(om_window_axes(g, n, &axes));
    OM_CHECK(g->cx, x->rank >= axes + 1 && om_is_float(x->dtype),
             "%s: x is %s of rank %d; floats of rank %d or more are needed", n->op->name, om_dtype_name(x->dtype),
             x->rank, axes + 1);
    OM_TRY(om_window_read(g, n, axes, &w));
    *y = *x;
    for (int i = 0; i < axes; i++) {
        const int at = x->rank - axes + i;
        OM_TRY(om_window_count(g, n, &w, i, x->dim[at], w.k[i], &y->dim[at]));
    }
    return OM_OK;
}

static om_status max_pool_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(pool_shape(g, n, &out[0]));
    out[1] = out[0];
    out[1].dtype = OM_I64;
    return OM_OK;
}

static om_status adaptive_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *size;
    OM_TRY(attr_shape(g, n, "size", &size));
    OM_CHECK(
        g->cx, size->n >= 1 && size->n <= OM_WINDOW_AXES && x->rank > (int)size->n && om_is_float(x->dtype),
        "%s: x is %s of rank %d and size has %u entries; floats and 1 to 3 entries, fewer than the rank, are needed",
        n->op->name, om_dtype_name(x->dtype), x->rank, size->n);
    *out = *x;
    for (uint32_t i = 0; i < size->n; i++) out->dim[x->rank - (int)size->n + (int)i] = size->dims[i];
    return OM_OK;
}

static om_status pool_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *dy = om_ty(g, om_ins(g, n)[0]);
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    OM_CHECK(g->cx, (int)shape->n == dy->rank && om_is_float(dy->dtype),
             "%s: dy is %s of rank %d, shape has %u entries", n->op->name, om_dtype_name(dy->dtype), dy->rank,
             shape->n);
    *out = *dy;
    for (int i = 0; i < dy->rank; i++) out->dim[i] = shape->dims[i];
    return OM_OK;
}

/* --- operators ------------------------------------------------------------------------------------------------ */

static om_status max_pool_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    const om_attr *kernel = om_attr_get(n->attr, n->n_attr, "kernel");
    if (dy[0] == OM_NONE || !kernel) return OM_OK;
    dx[0] = om_make(b->g, &om_op_max_pool_grad, OM_IN(dy[0], n->out + 1),
                    OM_ATTRS(OM_AD("shape", x.dim, x.rank), OM_AI("axes", kernel->n)));
    return OM_OK;
}

const om_op om_op_max_pool = {
    OM_OP(max_pool), .kind = OM_K_CONV, .min_in = 1, .max_in = 1, .n_out = 2,
    .infer = max_pool_infer, .grad = max_pool_grad_build,
};

static om_status max_pool_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *dy = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]);
    int64_t axes = om_node_int(n, "axes", dy->rank - 2);
    OM_CHECK(g->cx, idx->dtype == OM_I64 && idx->rank == dy->rank,
             "max_pool_grad: idx is %s of rank %d; i64 of dy's rank %d is needed", om_dtype_name(idx->dtype), idx->rank,
             dy->rank);
    OM_CHECK(g->cx, axes >= 1 && axes <= OM_WINDOW_AXES && axes < dy->rank,
             "max_pool_grad: %lld pooled axes of a tensor of rank %d", (long long)axes, dy->rank);
    return pool_grad_infer(g, n, out);
}

const om_op om_op_max_pool_grad = {
    OM_OP(max_pool_grad), .kind = OM_K_CONV, .min_in = 2, .max_in = 2, .n_out = 1,
    .infer = max_pool_grad_infer,
};

static om_status avg_pool_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    om_attr attr[8];
    int k = 0;
    for (int i = 0; i < n->n_attr && k < 7; i++) attr[k++] = n->attr[i];
    attr[k++] = OM_AD("shape", x.dim, x.rank);
    dx[0] = om_make(b->g, &om_op_avg_pool_grad, OM_IN(dy[0]), attr, k);
    return OM_OK;
}

const om_op om_op_avg_pool = {
    OM_OP(avg_pool), .kind = OM_K_CONV, .min_in = 1, .max_in = 1, .n_out = 1,
    .infer = pool_shape, .grad = avg_pool_grad_build,
};
const om_op om_op_avg_pool_grad = {
    OM_OP(avg_pool_grad),
    .kind = OM_K_CONV,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = pool_grad_infer,
};

static om_status adaptive_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    const om_attr *size;
    OM_TRY(attr_shape(b->g, n, "size", &size));
    dx[0] = om_make(b->g, &om_op_adaptive_avg_pool_grad, OM_IN(dy[0]), OM_ATTRS(OM_AD("shape", x.dim, x.rank), *size));
    return OM_OK;
}

const om_op om_op_adaptive_avg_pool = {
    OM_OP(adaptive_avg_pool),
    .kind = OM_K_CONV,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = adaptive_infer,
    .grad = adaptive_grad_build,
};
const om_op om_op_adaptive_avg_pool_grad = {
    OM_OP(adaptive_avg_pool_grad),
    .kind = OM_K_CONV,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = pool_grad_infer,
};
