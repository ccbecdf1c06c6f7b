/* reduce.c - reductions over any axes, arg-extrema, and cumulative sums. */
#include "ops/attr.h"

static om_status reduce_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "axes");
    const bool keep = om_node_int(n, "keepdims", 0);
    OM_CHECK(g->cx, om_is_float(x->dtype) || om_is_int(x->dtype), "%s: operand of dtype %s; numbers are allowed",
             n->op->name, om_dtype_name(x->dtype));
    for (uint32_t i = 0; a && a->kind == OM_ATTR_DIMS && i < a->n; i++)
        OM_CHECK(g->cx, a->dims[i] >= 0 && a->dims[i] < x->rank,
                 "%s: axis %lld of a tensor of rank %d; 0 to %d are allowed", n->op->name, (long long)a->dims[i],
                 x->rank, x->rank - 1);
    const uint32_t mask = attr_axes_mask(n->attr, n->n_attr, x->rank);
    *out = *x;
    out->rank = 0;
    for (int i = 0; i < x->rank; i++)
        if (!(mask >> i & 1) || keep) out->dim[out->rank++] = mask >> i & 1 ? 1 : x->dim[i];
    return OM_OK;
}

/* --- gradients ----------------------------------------------------------------------------------------------- */

/* v (the result's shape) with the reduced axes back as 1, so that it broadcasts against x */
static om_id keep_axes(om_graph *g, const om_node *n, om_id v) {
    om_type x = *om_ty(g, om_ins(g, n)[0]);
    const uint32_t mask = attr_axes_mask(n->attr, n->n_attr, x.rank);
    for (int i = 0; i < x.rank; i++)
        if (mask >> i & 1) x.dim[i] = 1;
    return om_b_reshape(g, v, x.dim, x.rank);
}

static om_id expand_like(om_graph *g, om_id v, om_id like) {
    const om_type t = *om_ty(g, like);
    return om_b_expand(g, v, t.dim, t.rank);
}

static om_status sum_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    dx[0] = expand_like(b->g, keep_axes(b->g, n, dy[0]), om_ins(b->g, n)[0]);
    return b->g->cx->status;
}

static om_status mean_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_type x = *om_ty(g, om_ins(g, n)[0]);
    const uint32_t mask = attr_axes_mask(n->attr, n->n_attr, x.rank);
    const int wide = om_compute_dtype(x.dtype); /* the count may not be a bf16 */
    om_dim count = 1;
    int64_t known;
    for (int i = 0; i < x.rank; i++)
        if (mask >> i & 1) count = om_dim_mul(g, count, x.dim[i]);
    const om_id c = om_dim_const(g, count, &known)
                        ? om_scalar(g, wide, (double)known)
                        : om_make(g, &om_op_fill, NULL, 0,
                                  OM_ATTRS(OM_AD("shape", NULL, 0), OM_AI("dtype", wide), OM_AD("value", &count, 1)));
    const om_id d = om_b_cast(g, om_b_bin(g, &om_op_div, om_b_cast(g, dy[0], wide), c), x.dtype);
    return sum_grad(b, n, &d, want, dx);
}

/* shared equally among the elements that attain the extremum, as torch.amax: NaN for all where it is NaN */
static om_status extremum_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id x = om_ins(g, n)[0], y = keep_axes(g, n, n->out), d = keep_axes(g, n, dy[0]);
    const int t = om_ty(g, x)->dtype, wide = om_compute_dtype(t);
    (void)want;
    const om_id hit = om_b_bin(g, &om_op_eq, x, y);
    const om_id count = om_b_sum(g, om_b_cast(g, hit, wide), attr_axes_mask(n->attr, n->n_attr, om_ty(g, x)->rank),
                                 true);
    const om_id at = om_b_bin(g, &om_op_mul, om_b_cast(g, d, wide), om_b_cast(g, hit, wide));
    dx[0] = om_b_cast(g, om_b_bin(g, &om_op_div, at, count), t);
    return g->cx->status;
}

/* The product of the others: y / x when nothing is zero; with one zero only that element gets a gradient; with more,
 * none does. */
static om_status prod_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id x = om_ins(g, n)[0], d = keep_axes(g, n, dy[0]);
    const int t = om_ty(g, x)->dtype, wide = om_compute_dtype(t);
    const uint32_t mask = attr_axes_mask(n->attr, n->n_attr, om_ty(g, x)->rank);
    (void)want;
    const om_id w = om_b_cast(g, x, wide), zero = om_scalar(g, wide, 0), one = om_scalar(g, wide, 1);
    const om_id is0 = om_b_bin(g, &om_op_eq, w, zero), safe = om_make(g, &om_op_where, OM_IN(is0, one, w), NULL, 0);
    om_dim axes[OM_RANK];
    int n_axes = 0;
    for (int i = 0; g->cx->status == OM_OK && i < om_ty(g, x)->rank; i++)
        if (mask >> i & 1) axes[n_axes++] = i;
    const om_id rest = om_make(g, &om_op_reduce_prod, OM_IN(safe),
                               OM_ATTRS(OM_AD("axes", axes, n_axes), OM_AI("keepdims", 1)));
    /* zeros among the others */
    const om_id others0 = om_b_bin(g, &om_op_sub, om_b_sum(g, om_b_cast(g, is0, wide), mask, true),
                                   om_b_cast(g, is0, wide));
    const om_id p = om_make(g, &om_op_where,
                            OM_IN(om_b_bin(g, &om_op_eq, others0, zero), om_b_bin(g, &om_op_div, rest, safe), zero),
                            NULL, 0);
    dx[0] = om_b_cast(g, om_b_bin(g, &om_op_mul, om_b_cast(g, d, wide), p), t);
    return g->cx->status;
}

#define REDUCE(nm, grad_)             \
    const om_op om_op_reduce_##nm = { \
        OM_OP(reduce_##nm),           \
        .kind = OM_K_REDUCE,          \
        .min_in = 1,                  \
        .max_in = 1,                  \
        .n_out = 1,                   \
        .infer = reduce_infer,        \
        .grad = grad_,                \
    };
REDUCE(sum, sum_grad)
REDUCE(mean, mean_grad)
REDUCE(max, extremum_grad)
REDUCE(min, extremum_grad)
REDUCE(prod, prod_grad)

/* --- argmax, argmin -------------------------------------------------------------------------------------------- */

static om_status arg_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int axis;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    OM_CHECK(g->cx, om_is_float(x->dtype) || om_is_int(x->dtype), "%s: operand of dtype %s; numbers are allowed",
             n->op->name, om_dtype_name(x->dtype));
    *out = *x;
    out->dtype = OM_I64;
    out->dim[axis] = 1;
    if (om_node_int(n, "keepdims", 0)) return OM_OK;
    for (int i = axis; i + 1 < x->rank; i++) out->dim[i] = x->dim[i + 1];
    out->rank--;
    return OM_OK;
}

const om_op om_op_argmax = {
    OM_OP(argmax),
    .kind = OM_K_REDUCE,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = arg_infer,};
const om_op om_op_argmin = {
    OM_OP(argmin),
    .kind = OM_K_REDUCE,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = arg_infer,};

/* --- cumsum ------------------------------------------------------------------------------------------------------ */

static om_status cumsum_infer(om_graph *g, const om_node *n, om_type *out) {
    int axis;
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, om_is_float(out->dtype) || (om_is_int(out->dtype) && out->dtype != OM_BOOL),
             "cumsum: operand of dtype %s; floats and integers are allowed", om_dtype_name(out->dtype));
    return attr_axis(g, n, out->rank, &axis);
}

static om_status cumsum_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    dx[0] = om_make(b->g, &om_op_cumsum, OM_IN(dy[0]),
                    OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0)),
                             OM_AI("exclusive", om_node_int(n, "exclusive", 0)),
                             OM_AI("reverse", !om_node_int(n, "reverse", 0))));
    return b->g->cx->status;
}

const om_op om_op_cumsum = {
    OM_OP(cumsum),
    .kind = OM_K_REDUCE,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = cumsum_infer,
    .grad = cumsum_grad,};
