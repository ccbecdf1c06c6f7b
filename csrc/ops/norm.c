/* norm.c - layer norm and RMS norm over the axes from `axis` on, forward and backward.
 *
 * The normalised axes are one row. Statistics and arithmetic are in the compute type (f32 for bf16 and f16), weights of
 * any float dtype. Of an f32 x the result may be in half precision, and so may what arrives for its gradient: rounded
 * where a cast would (passes/norm_casts.c).
 */
#include "ops/attr.h"

/* --- types and gradients ------------------------------------------------------------------------------------------ */

static om_status weight_check(om_graph *g, const om_node *n, int i, const om_type *x, int axis) {
    if (i >= n->n_in || om_ins(g, n)[i] == OM_NONE) return OM_OK;
    const om_type *w = om_ty(g, om_ins(g, n)[i]);
    OM_CHECK(g->cx, om_is_float(w->dtype) && w->rank == x->rank - axis,
             "%s: operand %d is %s of rank %d; a float with the %d normalised axes is allowed", n->op->name, i,
             om_dtype_name(w->dtype), w->rank, x->rank - axis);
    for (int k = 0; k < w->rank; k++)
        OM_CHECK(g->cx, !attr_differs(g, w->dim[k], x->dim[axis + k]),
                 "%s: operand %d differs from x in the size of axis %d", n->op->name, i, axis + k);
    return OM_OK;
}

static bool half_of(int dtype, int x) { return dtype == x || (x == OM_F32 && om_is_half(dtype)); }

static om_status forward_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int axis;
    OM_CHECK(g->cx, om_is_float(x->dtype), "%s: x is %s; floats are allowed", n->op->name, om_dtype_name(x->dtype));
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    for (int i = 1; i < 3; i++) OM_TRY(weight_check(g, n, i, x, axis));
    out[0] = *x;
    out[0].dtype = (uint8_t)om_node_int(n, "to", x->dtype);
    OM_CHECK(g->cx, half_of(out[0].dtype, x->dtype), "%s: the result is %s, x %s; the same, or a half of f32, is "
             "allowed", n->op->name, om_dtype_name(out[0].dtype), om_dtype_name(x->dtype));
    out[1] = *x;
    out[1].dtype = (uint8_t)om_compute_dtype(x->dtype);
    out[1].rank = (uint8_t)axis;
    if (om_is(n, layer_norm)) out[2] = out[1];
    return OM_OK;
}

static om_status backward_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[1]), *dy = om_ty(g, om_ins(g, n)[0]);
    int axis;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    OM_CHECK(g->cx, om_is_float(x->dtype) && half_of(dy->dtype, x->dtype) && dy->rank == x->rank,
             "%s: dy is %s of rank %d, x %s of rank %d; they must agree, or dy be a half of f32", n->op->name,
             om_dtype_name(dy->dtype), dy->rank, om_dtype_name(x->dtype), x->rank);
    OM_TRY(weight_check(g, n, 2, x, axis));
    const om_id w = om_ins(g, n)[2];
    om_type p = *x;
    p.rank = (uint8_t)(x->rank - axis);
    for (int i = 0; i < p.rank; i++) p.dim[i] = x->dim[axis + i];
    if (w != OM_NONE) p.dtype = om_ty(g, w)->dtype;
    if (!om_node_int(n, "params", 1)) p.rank = 1, p.dim[0] = 0;
    out[0] = *x;
    out[1] = p;
    if (om_is(n, layer_norm_grad)) out[2] = p;
    return OM_OK;
}

static om_status norm_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const bool rms = om_is(n, rms_norm);
    const om_id w = n->n_in > 1 ? om_ins(g, n)[1] : OM_NONE, bias = n->n_in > 2 ? om_ins(g, n)[2] : OM_NONE;
    if (dy[1] != OM_NONE || (!rms && dy[2] != OM_NONE))
        return om_fail(g->cx, OM_UNSUPPORTED, "%s: a gradient arrives for its statistics; only y is differentiable",
                       n->op->name);
    if (dy[0] == OM_NONE) return OM_OK;
    const bool want_w = n->n_in > 1 && want[1], want_b = n->n_in > 2 && want[2];
    const om_attr attr[2] = {OM_AI("axis", om_node_int(n, "axis", 0)), OM_AI("params", want_w || want_b)};
    const om_id x = om_ins(g, n)[0];
    const om_id d = rms ? om_make(g, &om_op_rms_norm_grad, OM_IN(dy[0], x, w, n->out + 1), attr, 2)
                        : om_make(g, &om_op_layer_norm_grad, OM_IN(dy[0], x, w, n->out + 1, n->out + 2), attr, 2);
    if (d == OM_NONE) return g->cx->status;
    if (want[0]) dx[0] = d;
    if (want_w) dx[1] = d + 1;
    if (want_b) dx[2] = om_b_cast(g, d + 2, om_ty(g, bias)->dtype);
    return g->cx->status;
}
static om_status second_order(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)dy, (void)want, (void)dx;
    return om_fail(b->g->cx, OM_UNSUPPORTED,
                   "%s has no gradient of its own: second derivatives run in PyTorch (create_graph=True)", n->op->name);
}

const om_op om_op_layer_norm = {
    OM_OP(layer_norm),
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 3,
    .n_out = 3,
    .infer = forward_infer,
    .grad = norm_grad,
};
const om_op om_op_rms_norm = {
    OM_OP(rms_norm),
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 2,
    .n_out = 2,
    .infer = forward_infer,
    .grad = norm_grad,
};
const om_op om_op_layer_norm_grad = {
    OM_OP(layer_norm_grad),
    .kind = OM_K_ROW,
    .min_in = 5,
    .max_in = 5,
    .n_out = 3,
    .optional = 4,
    .infer = backward_infer,
    .grad = second_order,
};
const om_op om_op_rms_norm_grad = {
    OM_OP(rms_norm_grad),
    .kind = OM_K_ROW,
    .min_in = 4,
    .max_in = 4,
    .n_out = 2,
    .optional = 4,
    .infer = backward_infer,
    .grad = second_order,
};
