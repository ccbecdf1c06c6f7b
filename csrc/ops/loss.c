/* loss.c - cross_entropy and its gradient, the arithmetic of torch.nn.functional.cross_entropy with class indices.
 *
 * For a row with label y that is not ignored, with class weights w (1 when left out), e = label_smoothing, C classes:
 *     loss_i = (1 - e) w_y (lse_i - x_y) + e / C * sum_c w_c (lse_i - x_c)             lse_i = log sum_c exp x_c
 *     mean   = sum_i loss_i / denom,  denom = sum_i w_y over rows not ignored          (NaN when every row is ignored,
 *            as torch)
 *     dx_c   = g_i ((a exp(x_c - lse_i)) - e / C w_c - (1 - e) w_y [c = y]),           a = (1 - e) w_y + e / C sum_c
 *            w_c
 * where g_i is the arriving gradient, over denom for the mean. Ignored rows contribute 0 and get gradient 0.
 * wide: of logits in half precision the loss is f32, and so is the gradient that arrives: as if they had been cast first.
 * The forward keeps only lse; the gradient may write over the logits. Given rows (idx, count of a select_rows), it
 * makes only those, one after the other: the others are known to be zero (passes/label_grads.c).
 */
#include "ops/attr.h"
#include "ops/bounded.h"
#include "ops/loss.h"

#include <math.h>

/* --- what both need ------------------------------------------------------------------------------------ */

static om_status loss_check(om_graph *g, const om_node *n, int first) {
    const om_id *in = om_ins(g, n);
    const om_type *x = om_ty(g, in[first]), *y = om_ty(g, in[first + 1]);
    const om_type *w = n->n_in > first + 2 && in[first + 2] != OM_NONE ? om_ty(g, in[first + 2]) : NULL;
    const char *op = n->op->name;
    double e = om_node_float(n, "label_smoothing", 0);
    int64_t reduction = om_node_int(n, "reduction", OM_LOSS_MEAN);
    OM_CHECK(g->cx, x->rank == 2 && om_is_float(x->dtype),
             "%s: logits are %s of rank %d; floats (n, classes) are needed", op, om_dtype_name(x->dtype), x->rank);
    OM_CHECK(g->cx, y->rank == 1 && (y->dtype == OM_I64 || y->dtype == OM_I32),
             "%s: labels are %s of rank %d; i64 or i32 (n) is needed (class probabilities are not supported)", op,
             om_dtype_name(y->dtype), y->rank);
    OM_CHECK(g->cx, !attr_differs(g, x->dim[0], y->dim[0]), "%s: %lld labels for %lld rows of logits", op,
             (long long)y->dim[0], (long long)x->dim[0]);
    OM_CHECK(g->cx, !w || (w->rank == 1 && om_is_float(w->dtype) && !attr_differs(g, w->dim[0], x->dim[1])),
             "%s: weight must be floats (classes)", op);
    OM_CHECK(g->cx, e >= 0 && e <= 1, "%s: label_smoothing is %g; 0 to 1 is allowed", op, e);
    OM_CHECK(g->cx, reduction >= OM_LOSS_NONE && reduction <= OM_LOSS_SUM,
             "%s: reduction is %lld; 0 none, 1 mean, 2 sum exist", op, (long long)reduction);
    return OM_OK;
}

/* --- forward --------------------------------------------------------------------------------------------- */

static om_status cross_entropy_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(loss_check(g, n, 0));
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    out[0] = out[1] = out[2] = *x;
    out[0].rank = om_node_int(n, "reduction", OM_LOSS_MEAN) == OM_LOSS_NONE;
    if (om_node_int(n, "wide", 0) && om_is_half(x->dtype)) out[0].dtype = OM_F32;
    out[1].rank = 1;
    out[2].rank = 0;
    out[1].dtype = out[2].dtype = OM_F64; /* two numbers a row: what is lost here is lost for every logit of the row */
    return OM_OK;
}

static om_status cross_entropy_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want,
                                          om_id *dx) {
    om_graph *g = b->g;
    const om_id *in = om_ins(g, n);
    OM_CHECK(g->cx, dy[1] == OM_NONE && dy[2] == OM_NONE,
             "cross_entropy: only the loss can be differentiated, not lse or denom");
    if (!want[0] || dy[0] == OM_NONE) return OM_OK;
    om_id w = n->n_in > 2 ? in[2] : OM_NONE, x = in[0], y = in[1];
    dx[0] = om_make(g, &om_op_cross_entropy_grad, OM_IN(dy[0], x, y, w, n->out + 1, n->out + 2), n->attr, n->n_attr);
    return OM_OK;
}

const om_op om_op_cross_entropy = {
    OM_OP(cross_entropy),
    .kind = OM_K_ROW,
    .min_in = 2,
    .max_in = 3,
    .n_out = 3,
    .infer = cross_entropy_infer,
    .grad = cross_entropy_grad_build,
};

/* --- gradient --------------------------------------------------------------------------------------------- */

static om_status cross_entropy_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(loss_check(g, n, 1));
    out[0] = *om_ty(g, om_ins(g, n)[1]);
    if (n->n_in == 6) return OM_OK;
    OM_CHECK(g->cx, n->n_in == 8 && om_node_int(n, "reduction", OM_LOSS_MEAN) != OM_LOSS_NONE,
             "cross_entropy_grad of some rows needs idx and count, and a reduction");
    om_dim size;
    OM_TRY(bounded_operands(g, n, 6, 7, &size));
    OM_CHECK(g->cx, g->syms.v[g->exprs.v[~size].a].bound == out[0].dim[0],
             "cross_entropy_grad: idx is not of as many rows as the logits have");
    out[0].dim[0] = size;
    return OM_OK;
}

const om_op om_op_cross_entropy_grad = {
    OM_OP(cross_entropy_grad),
    .kind = OM_K_ROW,
    .min_in = 6,
    .max_in = 8,
    .n_out = 1,
    .optional = 1u << 3,
    .infer = cross_entropy_grad_infer,
};
