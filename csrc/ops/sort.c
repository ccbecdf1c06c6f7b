/* sort.c - the first k elements of an axis in order: topk, and sort with k = all of them.
 *
 * Order is total: NaN is the largest, -0 equals 0, and of equal elements the one at the smaller index comes first,
 * ascending and descending. So sort is stable, which torch promises on request, and topk has one result.
 */
#include "ops/attr.h"

static om_status topk_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int axis;
    int64_t k, size;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    OM_CHECK(g->cx, om_is_float(x->dtype) || om_is_int(x->dtype), "topk: operand of dtype %s; numbers are allowed",
             om_dtype_name(x->dtype));
    const om_dim want = attr_dim(n, "k", OM_DIM_BAD);
    OM_CHECK(g->cx, want != OM_DIM_BAD, "topk: attribute k (a size) is missing");
    OM_CHECK(g->cx, !om_dim_const(g, want, &k) || !om_dim_const(g, x->dim[axis], &size) || k <= size,
             "topk: k = %lld of %lld elements", (long long)k, (long long)size);
    out[0] = *x;
    out[0].dim[axis] = want;
    out[1] = out[0];
    out[1].dtype = OM_I64;
    return OM_OK;
}

static om_status topk_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    if (!want[0] || dy[0] == OM_NONE) return OM_OK;
    dx[0] = om_make(b->g, &om_op_scatter_elements, OM_IN(om_b_zeros_like(b->g, om_ins(b->g, n)[0]), n->out + 1, dy[0]),
                    OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0)), OM_AI("reduce", 0)));
    return b->g->cx->status;
}

const om_op om_op_topk = {
    OM_OP(topk), .kind = OM_K_GATHER, .min_in = 1, .max_in = 1, .n_out = 2, .infer = topk_infer, .grad = topk_grad,
};
