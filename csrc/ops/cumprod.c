/* cumprod.c - running products along an axis, and logarithms of running sums of exponentials. The gradient of the first
 * is exact where elements are zero: with P_i the product
 * before element i and g_i = dy_i + x_(i+1) g_(i+1), it is P_i g_i, no division. That of the second is
 * g_i e^(x_i - y_i) with g_i = dy_i + e^(y_i - y_(i+1)) g_(i+1), no exponent above 0. */
#include "ops/attr.h"

static om_status cumprod_infer(om_graph *g, const om_node *n, om_type *out) {
    int axis;
    *out = *om_ty(g, om_ins(g, n)[n->n_in - 1]);
    OM_CHECK(g->cx, om_is_float(out->dtype) || (om_is_int(out->dtype) && out->dtype != OM_BOOL && om_is(n, cumprod)),
             "%s: operand of dtype %s; floats and integers are allowed", n->op->name, om_dtype_name(out->dtype));
    const om_type *t = om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, t->rank == out->rank && t->dtype == out->dtype, "%s: operands of different types", n->op->name);
    return attr_axis(g, n, out->rank, &axis);
}

static om_status cumprod_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    if (want[0])
        dx[0] = om_make(b->g, &om_op_cumprod_grad, OM_IN(dy[0], om_ins(b->g, n)[0]),
                        OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0))));
    return b->g->cx->status;
}

static om_status logcumsumexp_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want,
                                         om_id *dx) {
    if (want[0])
        dx[0] = om_make(b->g, &om_op_logcumsumexp_grad, OM_IN(dy[0], om_ins(b->g, n)[0], n->out),
                        OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0))));
    return b->g->cx->status;
}

const om_op om_op_logcumsumexp = {
    OM_OP(logcumsumexp), .kind = OM_K_REDUCE, .min_in = 1, .max_in = 1, .n_out = 1, .infer = cumprod_infer,
    .grad = logcumsumexp_grad_build,
};
const om_op om_op_logcumsumexp_grad = {
    OM_OP(logcumsumexp_grad), .kind = OM_K_REDUCE, .min_in = 3, .max_in = 3, .n_out = 1, .infer = cumprod_infer,
};
const om_op om_op_cumprod = {
    OM_OP(cumprod), .kind = OM_K_REDUCE, .min_in = 1, .max_in = 1, .n_out = 1, .infer = cumprod_infer,
    .grad = cumprod_grad_build,
};
const om_op om_op_cumprod_grad = {
    OM_OP(cumprod_grad), .kind = OM_K_REDUCE, .min_in = 2, .max_in = 2, .n_out = 1, .infer = cumprod_infer,
};
