/* gather.c - reading and writing at computed places: gather (embedding), gather_elements, gather_nd, their gradients
 * and their writing counterparts scatter_elements and scatter_nd.
 *
 * An index outside of its axis is an error. Where a "set" writes one place several times, the last one stays; where an
 * "add" does, the terms are added in their order.
 */
#include "ops/attr.h"

static bool is_index(int dtype) { return dtype == OM_I64 || dtype == OM_I32; }

static om_status index_infer(om_graph *g, const om_node *n, int operand) {
    const om_type *t = om_ty(g, om_ins(g, n)[operand]);
    OM_CHECK(g->cx, is_index(t->dtype), "%s: indices are %s; i64 or i32 is needed", n->op->name,
             om_dtype_name(t->dtype));
    return OM_OK;
}

/* --- gather ------------------------------------------------------------------------------------------- */

static om_status gather_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]);
    int axis;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    OM_TRY(index_infer(g, n, 1));
    OM_CHECK(g->cx, x->rank - 1 + idx->rank <= OM_RANK, "gather: the result would have %d dimensions; at most %d",
             x->rank - 1 + idx->rank, OM_RANK);
    *out = *x;
    out->rank = (uint8_t)(x->rank - 1 + idx->rank);
    for (int i = 0; i < idx->rank; i++) out->dim[axis + i] = idx->dim[i];
    for (int i = axis + 1; i < x->rank; i++) out->dim[i - 1 + idx->rank] = x->dim[i];
    return OM_OK;
}

static om_status gather_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    if (!want[0]) return OM_OK;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    dx[0] = om_make(b->g, &om_op_gather_grad, OM_IN(dy[0], om_ins(b->g, n)[1]),
                    OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0)), OM_AD("shape", x.dim, x.rank),
                             OM_AI("padding_idx", om_node_int(n, "padding_idx", -1))));
    return OM_OK;
}

const om_op om_op_gather = {
    OM_OP(gather), .kind = OM_K_GATHER, .min_in = 2, .max_in = 2, .n_out = 1,
    .infer = gather_infer, .grad = gather_grad_build,
};

/* --- gather_grad ---------------------------------------------------------------------------------------- */

static om_status gather_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *dy = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]);
    const om_attr *shape;
    int axis;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    OM_TRY(attr_axis(g, n, (int)shape->n, &axis));
    OM_TRY(index_infer(g, n, 1));
    OM_CHECK(g->cx, om_is_float(dy->dtype), "gather_grad: the gradient is %s; a float is needed",
             om_dtype_name(dy->dtype));
    OM_CHECK(g->cx, dy->rank == (int)shape->n - 1 + idx->rank, "gather_grad: dy has rank %d, shape and idx ask for %d",
             dy->rank, (int)shape->n - 1 + idx->rank);
    for (int i = 0; i < dy->rank; i++) {
        om_dim want = i < axis               ? shape->dims[i]
                      : i < axis + idx->rank ? idx->dim[i - axis]
                                             : shape->dims[i + 1 - idx->rank];
        OM_CHECK(g->cx, !attr_differs(g, want, dy->dim[i]),
                 "gather_grad: dy has size %lld along axis %d, shape and idx ask for %lld", (long long)dy->dim[i], i,
                 (long long)want);
    }
    *out = *dy;
    out->rank = (uint8_t)shape->n;
    for (uint32_t i = 0; i < shape->n; i++) out->dim[i] = shape->dims[i];
    if (n->n_in > 2 && om_ins(g, n)[2] != OM_NONE) {
        const om_type *base = om_ty(g, om_ins(g, n)[2]);
        OM_CHECK(g->cx, base->dtype == out->dtype && base->rank == out->rank,
                 "gather_grad: base is %s of rank %d; %s of rank %d is needed", om_dtype_name(base->dtype), base->rank,
                 om_dtype_name(out->dtype), out->rank);
        for (int i = 0; i < base->rank; i++)
            OM_CHECK(g->cx, !attr_differs(g, base->dim[i], out->dim[i]),
                     "gather_grad: base has size %lld along axis %d, shape says %lld", (long long)base->dim[i], i,
                     (long long)out->dim[i]);
    }
    return OM_OK;
}

const om_op om_op_gather_grad = {
    OM_OP(gather_grad),
    .kind = OM_K_SCATTER,
    .min_in = 2,
    .max_in = 3,
    .n_out = 1,
    .infer = gather_grad_infer,
};

/* --- gather_elements, scatter_elements -------------------------------------------------------------------- */

/* idx addresses `x` along axis; every other axis of idx fits into x's. */
static om_status elements_check(om_graph *g, const om_node *n, const om_type *x, const om_type *idx) {
    int axis;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    OM_TRY(index_infer(g, n, 1));
    OM_CHECK(g->cx, x->rank == idx->rank, "%s: data of rank %d, indices of rank %d; both must be equal", n->op->name,
             x->rank, idx->rank);
    for (int i = 0; i < x->rank; i++) {
        int64_t d, e;
        OM_CHECK(g->cx, i == axis || !om_dim_const(g, x->dim[i], &d) || !om_dim_const(g, idx->dim[i], &e) || e <= d,
                 "%s: indices have size %lld along axis %d, data only %lld", n->op->name, (long long)e, i,
                 (long long)d);
    }
    return OM_OK;
}

static om_status gather_elements_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]);
    OM_TRY(elements_check(g, n, x, idx));
    *out = *idx;
    out->dtype = x->dtype;
    return OM_OK;
}

static om_status gather_elements_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    if (!want[0]) return OM_OK;
    om_id in0 = om_ins(b->g, n)[0], in1 = om_ins(b->g, n)[1];
    dx[0] = om_make(b->g, &om_op_scatter_elements, OM_IN(om_b_zeros_like(b->g, in0), in1, dy[0]),
                    OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0)), OM_AI("reduce", 1)));
    return OM_OK;
}

const om_op om_op_gather_elements = {
    OM_OP(gather_elements), .kind = OM_K_GATHER, .min_in = 2, .max_in = 2, .n_out = 1,
    .infer = gather_elements_infer, .grad = gather_elements_grad,
};

static om_status reduce_check(om_graph *g, const om_node *n, int dtype) {
    int64_t reduce = om_node_int(n, "reduce", 0);
    const int most = om_is(n, scatter_elements) ? 3 : 1;
    OM_CHECK(g->cx, reduce >= 0 && reduce <= most, "%s: reduce is %lld; 0 (set), 1 (add)%s exist", n->op->name,
             (long long)reduce, most > 1 ? ", 2 (max) and 3 (min)" : "");
    OM_CHECK(g->cx, reduce == 0 || dtype != OM_BOOL, "%s: bool cannot be added; cast to an integer first", n->op->name);
    return OM_OK;
}

static om_status scatter_elements_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]), *src = om_ty(g, om_ins(g, n)[2]);
    OM_TRY(elements_check(g, n, x, idx));
    OM_TRY(reduce_check(g, n, x->dtype));
    OM_CHECK(g->cx, src->dtype == x->dtype && src->rank == idx->rank,
             "scatter_elements: source is %s of rank %d; %s of rank %d is needed", om_dtype_name(src->dtype), src->rank,
             om_dtype_name(x->dtype), idx->rank);
    for (int i = 0; i < idx->rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, src->dim[i], idx->dim[i]),
                 "scatter_elements: source has size %lld along axis %d, indices %lld; slice it",
                 (long long)src->dim[i], i, (long long)idx->dim[i]);
    *out = *x;
    return OM_OK;
}

/* max, min: shared equally among all that attain it, the element of x that was there included, as torch does */
static om_status scatter_further_grad(om_graph *g, const om_node *n, om_id dy, const bool *want, om_id *dx) {
    const om_id x = om_ins(g, n)[0], idx = om_ins(g, n)[1], src = om_ins(g, n)[2];
    const int t = om_ty(g, x)->dtype, wide = om_compute_dtype(t);
    const om_attr axis = OM_AI("axis", om_node_int(n, "axis", 0)), add[2] = {axis, OM_AI("reduce", 1)};
    const om_id hit = om_b_bin(g, &om_op_eq, x, n->out),
                src_hit = om_b_bin(g, &om_op_eq, src,
                                   om_make(g, &om_op_gather_elements, OM_IN(n->out, idx), &axis, 1));
    const om_id count = om_make(g, &om_op_scatter_elements,
                                OM_IN(om_b_cast(g, hit, wide), idx, om_b_cast(g, src_hit, wide)), add, 2);
    const om_id share = om_b_cast(g, om_b_bin(g, &om_op_div, om_b_cast(g, dy, wide), count), t),
                zero = om_scalar(g, t, 0);
    if (want[0]) dx[0] = om_make(g, &om_op_where, OM_IN(hit, share, zero), NULL, 0);
    if (want[2])
        dx[2] = om_make(g, &om_op_where,
                        OM_IN(src_hit, om_make(g, &om_op_gather_elements, OM_IN(share, idx), &axis, 1), zero), NULL, 0);
    return g->cx->status;
}

static om_status scatter_elements_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_id idx = om_ins(g, n)[1], src = om_ins(g, n)[2];
    int64_t axis = om_node_int(n, "axis", 0);
    if (om_node_int(n, "reduce", 0) > 1) return scatter_further_grad(g, n, dy[0], want, dx);
    if (want[0])
        dx[0] = om_node_int(n, "reduce", 0)
                    ? dy[0]
                    : om_make(g, &om_op_scatter_elements, OM_IN(dy[0], idx, om_b_zeros_like(g, src)),
                              OM_ATTRS(OM_AI("axis", axis), OM_AI("reduce", 0)));
    if (want[2]) dx[2] = om_make(g, &om_op_gather_elements, OM_IN(dy[0], idx), OM_ATTRS(OM_AI("axis", axis)));
    return OM_OK;
}

const om_op om_op_scatter_elements = {
    OM_OP(scatter_elements), .kind = OM_K_SCATTER, .min_in = 3, .max_in = 3, .n_out = 1,
    .infer = scatter_elements_infer, .grad = scatter_elements_grad,
};

/* --- gather_nd, scatter_nd ---------------------------------------------------------------------------------- */

static om_status nd_depth(om_graph *g, const om_node *n, int *k) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]);
    int64_t depth = 0;
    *k = 0;
    OM_TRY(index_infer(g, n, 1));
    OM_CHECK(g->cx, idx->rank >= 1 && om_dim_const(g, idx->dim[idx->rank - 1], &depth) && depth <= x->rank,
             "%s: the last axis of the indices must have a known size of at most %d (the rank of the data)",
             n->op->name, x->rank);
    OM_CHECK(g->cx, idx->rank - 1 + x->rank - depth <= OM_RANK, "%s: more than %d dimensions", n->op->name, OM_RANK);
    *k = (int)depth;
    return OM_OK;
}

static om_status gather_nd_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *idx = om_ty(g, om_ins(g, n)[1]);
    int k;
    OM_TRY(nd_depth(g, n, &k));
    *out = *x;
    out->rank = 0;
    for (int i = 0; i < idx->rank - 1; i++) out->dim[out->rank++] = idx->dim[i];
    for (int i = k; i < x->rank; i++) out->dim[out->rank++] = x->dim[i];
    return OM_OK;
}

static om_status gather_nd_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    if (!want[0]) return OM_OK;
    om_id in0 = om_ins(b->g, n)[0], in1 = om_ins(b->g, n)[1];
    dx[0] = om_make(b->g, &om_op_scatter_nd, OM_IN(om_b_zeros_like(b->g, in0), in1, dy[0]),
                    OM_ATTRS(OM_AI("reduce", 1)));
    return OM_OK;
}

const om_op om_op_gather_nd = {
    OM_OP(gather_nd),
    .kind = OM_K_GATHER,
    .min_in = 2,
    .max_in = 2,
    .n_out = 1,
    .infer = gather_nd_infer,
    .grad = gather_nd_grad,
};

static om_status scatter_nd_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *src = om_ty(g, om_ins(g, n)[2]);
    om_type rows = {0};
    OM_TRY(gather_nd_infer(g, n, &rows));
    OM_TRY(reduce_check(g, n, x->dtype));
    OM_CHECK(g->cx, src->dtype == x->dtype && src->rank == rows.rank,
             "scatter_nd: source is %s of rank %d; %s of rank %d is needed", om_dtype_name(src->dtype), src->rank,
             om_dtype_name(x->dtype), rows.rank);
    for (int i = 0; i < rows.rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, src->dim[i], rows.dim[i]),
                 "scatter_nd: source has size %lld along axis %d; %lld is needed", (long long)src->dim[i], i,
                 (long long)rows.dim[i]);
    *out = *x;
    return OM_OK;
}

static om_status scatter_nd_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_id idx = om_ins(g, n)[1], src = om_ins(g, n)[2];
    if (want[0])
        dx[0] = om_node_int(n, "reduce", 0) ? dy[0]
                                            : om_make(g, &om_op_scatter_nd, OM_IN(dy[0], idx, om_b_zeros_like(g, src)),
                                                      OM_ATTRS(OM_AI("reduce", 0)));
    if (want[2]) dx[2] = om_make(g, &om_op_gather_nd, OM_IN(dy[0], idx), NULL, 0);
    return OM_OK;
}

const om_op om_op_scatter_nd = {
    OM_OP(scatter_nd),
    .kind = OM_K_SCATTER,
    .min_in = 3,
    .max_in = 3,
    .n_out = 1,
    .infer = scatter_nd_infer,
    .grad = scatter_nd_grad,
};
