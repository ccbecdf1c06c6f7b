/* cdist.c - distances between all rows of x and all rows of y: the p-norm of their difference. Where two rows are equal
 * the gradient is 0, and a maximum (p infinite) gives all of it to every element that attains it, as torch does. */
#include "ops/attr.h"

static om_status cdist_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *y = om_ty(g, om_ins(g, n)[1]);
    const double p = om_node_float(n, "p", 2);
    OM_CHECK(g->cx, (x->dtype == OM_F32 || x->dtype == OM_F64) && y->dtype == x->dtype,
             "cdist: operands are %s and %s; f32 or f64 both are needed", om_dtype_name(x->dtype),
             om_dtype_name(y->dtype));
    OM_CHECK(g->cx, x->rank >= 2 && y->rank == x->rank && !attr_differs(g, x->dim[x->rank - 1], y->dim[x->rank - 1]),
             "cdist: operands of rank %d and %d; one rank of 2 or more, and rows of one length are needed", x->rank,
             y->rank);
    for (int i = 0; i < x->rank - 2; i++)
        OM_CHECK(g->cx, !attr_differs(g, x->dim[i], y->dim[i]), "cdist: batch axis %d has sizes %lld and %lld", i,
                 (long long)x->dim[i], (long long)y->dim[i]);
    OM_CHECK(g->cx, p >= 0 || p == -1, "cdist: p is %g; at least 0, or -1 for infinity", p);
    *out = *x;
    out->dim[x->rank - 1] = y->dim[x->rank - 2];
    return OM_OK;
}

static om_status cdist_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id x = om_ins(g, n)[0], y = om_ins(g, n)[1];
    const om_attr p = OM_AF("p", om_node_float(n, "p", 2));
    const int rank = om_ty(g, x)->rank;
    if (want[0]) dx[0] = om_make(g, &om_op_cdist_grad, OM_IN(dy[0], x, y, n->out), &p, 1);
    if (want[1]) /* the same, sides changed */
        dx[1] = om_make(g, &om_op_cdist_grad,
                        OM_IN(om_b_transpose(g, dy[0], rank - 1, rank - 2), y, x,
                              om_b_transpose(g, n->out, rank - 1, rank - 2)), &p, 1);
    return g->cx->status;
}

static om_status cdist_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[1]);
    for (int i = 0; i < 4; i++)
        OM_CHECK(g->cx, om_ty(g, om_ins(g, n)[i])->rank == out->rank && om_ty(g, om_ins(g, n)[i])->dtype == out->dtype,
                 "cdist_grad: operand %d has another rank or type", i);
    return OM_OK;
}

const om_op om_op_cdist = {
    OM_OP(cdist), .kind = OM_K_GEMM, .min_in = 2, .max_in = 2, .n_out = 1, .infer = cdist_infer,
    .grad = cdist_grad_build,
};
const om_op om_op_cdist_grad = {
    OM_OP(cdist_grad), .kind = OM_K_GEMM, .min_in = 4, .max_in = 4, .n_out = 1, .infer = cdist_grad_infer,
};
