/* ctc.c - connectionist temporal classification: -log of the probability that a path through the classes gives the
 * targets, blanks and repetitions left out. Targets are (n, s), a row each; or (s), one after another; or, with
 * `valid`, of any shape, and what is valid of them lies one after another. The gradient is torch's, which belongs to
 * log_probs that are a log_softmax: exp(log_probs) less the share of each class. */
#include "ops/attr.h"

static om_status ctc_check(om_graph *g, const om_node *n, int first) {
    const om_id *in = om_ins(g, n) + first;
    const om_type *x = om_ty(g, in[0]), *t = om_ty(g, in[1]);
    OM_CHECK(g->cx, x->rank == 3 && (x->dtype == OM_F32 || x->dtype == OM_F64),
             "%s: log_probs are %s of rank %d; f32 or f64 (time, n, classes) is needed", n->op->name,
             om_dtype_name(x->dtype), x->rank);
    OM_CHECK(g->cx, t->dtype == OM_I64 && (t->rank == 1 || t->rank == 2),
             "%s: targets are %s of rank %d; i64 (n, s) or (s) is needed", n->op->name,
             om_dtype_name(t->dtype), t->rank);
    if (in[2] != OM_NONE) {
        const om_type *v = om_ty(g, in[2]);
        OM_CHECK(g->cx, v->dtype == OM_BOOL && v->rank == t->rank, "%s: valid must be bool of the targets' shape",
                 n->op->name);
    } else {
        OM_CHECK(g->cx, t->rank == 1 || !attr_differs(g, t->dim[0], x->dim[1]), "%s: %lld rows of targets for %lld",
                 n->op->name, (long long)t->dim[0], (long long)x->dim[1]);
    }
    for (int i = 3; i < 5; i++) {
        const om_type *l = om_ty(g, in[i]);
        OM_CHECK(g->cx, l->dtype == OM_I64 && l->rank == 1 && !attr_differs(g, l->dim[0], x->dim[1]),
                 "%s: lengths must be i64 (n)", n->op->name);
    }
    return OM_OK;
}

static om_status ctc_loss_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(ctc_check(g, n, 0));
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    *out = *x;
    out->rank = 1;
    out->dim[0] = x->dim[1];
    return OM_OK;
}

static om_status ctc_loss_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(ctc_check(g, n, 1));
    *out = *om_ty(g, om_ins(g, n)[1]);
    return OM_OK;
}

static om_status ctc_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    const om_id *in = om_ins(b->g, n);
    const om_id x = in[0], t = in[1], v = in[2], a = in[3], c = in[4];
    if (want[0] && dy[0] != OM_NONE)
        dx[0] = om_make(b->g, &om_op_ctc_loss_grad, OM_IN(dy[0], x, t, v, a, c), n->attr, n->n_attr);
    return b->g->cx->status;
}

const om_op om_op_ctc_loss = {
    OM_OP(ctc_loss), .kind = OM_K_ROW, .min_in = 5, .max_in = 5, .n_out = 1, .optional = 1u << 2,
    .infer = ctc_loss_infer, .grad = ctc_grad_build,
};
const om_op om_op_ctc_loss_grad = {
    OM_OP(ctc_loss_grad), .kind = OM_K_ROW, .min_in = 6, .max_in = 6, .n_out = 1, .optional = 1u << 3,
    .infer = ctc_loss_grad_infer,
};
