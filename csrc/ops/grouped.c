/* grouped.c - products of groups of rows, each with a matrix of its own: the experts of a layer, rows sorted by expert.
 * offs[e] is where the rows of group e end; a row behind the last group gives zeros. */
#include "ops/attr.h"

static om_status grouped_check(om_graph *g, const om_node *n, int rank) {
    const om_id *in = om_ins(g, n);
    const om_type *x = om_ty(g, in[0]), *w = om_ty(g, in[1]), *o = om_ty(g, in[2]);
    OM_CHECK(g->cx, x->rank == 2 && w->rank == rank && om_is_float(x->dtype) && w->dtype == x->dtype,
             "%s: operands are %s of rank %d and %s of rank %d; floats of one type and of ranks 2 and %d are needed",
             n->op->name, om_dtype_name(x->dtype), x->rank, om_dtype_name(w->dtype), w->rank, rank);
    OM_CHECK(g->cx, o->rank == 1 && o->dtype == OM_I64,
             "%s: the groups' ends are %s of rank %d; i64 (groups) is needed", n->op->name,
             om_dtype_name(o->dtype), o->rank);
    return OM_OK;
}

static om_status grouped_matmul_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(grouped_check(g, n, 3));
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *w = om_ty(g, om_ins(g, n)[1]), *o = om_ty(g, om_ins(g, n)[2]);
    OM_CHECK(g->cx, !attr_differs(g, x->dim[1], w->dim[1]) && !attr_differs(g, o->dim[0], w->dim[0]),
             "grouped_matmul: x has %lld columns and the matrices %lld rows, %lld ends for %lld groups",
             (long long)x->dim[1], (long long)w->dim[1], (long long)o->dim[0], (long long)w->dim[0]);
    *out = *x;
    out->dim[1] = w->dim[2];
    return OM_OK;
}

static om_status grouped_outer_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(grouped_check(g, n, 2));
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *y = om_ty(g, om_ins(g, n)[1]), *o = om_ty(g, om_ins(g, n)[2]);
    OM_CHECK(g->cx, !attr_differs(g, x->dim[0], y->dim[0]), "grouped_outer: operands of %lld and %lld rows",
             (long long)x->dim[0], (long long)y->dim[0]);
    *out = *x;
    out->rank = 3;
    out->dim[0] = o->dim[0], out->dim[1] = x->dim[1], out->dim[2] = y->dim[1];
    return OM_OK;
}

static om_status grouped_matmul_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id x = om_ins(g, n)[0], w = om_ins(g, n)[1], o = om_ins(g, n)[2];
    if (want[0]) dx[0] = om_make(g, &om_op_grouped_matmul, OM_IN(dy[0], om_b_transpose(g, w, 1, 2), o), NULL, 0);
    if (want[1]) dx[1] = om_make(g, &om_op_grouped_outer, OM_IN(x, dy[0], o), NULL, 0);
    return g->cx->status;
}

static om_status grouped_outer_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id x = om_ins(g, n)[0], y = om_ins(g, n)[1], o = om_ins(g, n)[2];
    if (want[0]) dx[0] = om_make(g, &om_op_grouped_matmul, OM_IN(y, om_b_transpose(g, dy[0], 1, 2), o), NULL, 0);
    if (want[1]) dx[1] = om_make(g, &om_op_grouped_matmul, OM_IN(x, dy[0], o), NULL, 0);
    return g->cx->status;
}

const om_op om_op_grouped_matmul = {
    OM_OP(grouped_matmul), .kind = OM_K_GEMM, .min_in = 3, .max_in = 3, .n_out = 1, .infer = grouped_matmul_infer,
    .grad = grouped_matmul_grad,
};
const om_op om_op_grouped_outer = {
    OM_OP(grouped_outer), .kind = OM_K_GEMM, .min_in = 3, .max_in = 3, .n_out = 1, .infer = grouped_outer_infer,
    .grad = grouped_outer_grad,
};
