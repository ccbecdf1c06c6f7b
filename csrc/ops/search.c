/* search.c - places of values in sorted rows: torch's searchsorted and bucketize. No gradient. */
#include "ops/attr.h"

static om_status search_sorted_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *v = om_ty(g, om_ins(g, n)[1]);
    OM_CHECK(g->cx, v->dtype == x->dtype && x->dtype != OM_BOOL && !om_is_half(x->dtype),
             "search_sorted: operands are %s and %s; one type of integers, f32 or f64 is needed",
             om_dtype_name(x->dtype), om_dtype_name(v->dtype));
    OM_CHECK(g->cx, x->rank == 1 || (x->rank >= 1 && x->rank == v->rank),
             "search_sorted: rows of rank %d for values of rank %d; rank 1, or one rank is needed", x->rank, v->rank);
    for (int i = 0; i < x->rank - 1; i++)
        OM_CHECK(g->cx, !attr_differs(g, x->dim[i], v->dim[i]), "search_sorted: axis %d has sizes %lld and %lld", i,
                 (long long)x->dim[i], (long long)v->dim[i]);
    *out = *v;
    out->dtype = OM_I64;
    return OM_OK;
}

const om_op om_op_search_sorted = {
    OM_OP(search_sorted), .kind = OM_K_GATHER, .min_in = 2, .max_in = 2, .n_out = 1, .infer = search_sorted_infer,
};
