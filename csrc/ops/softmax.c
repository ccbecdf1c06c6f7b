/* softmax.c - softmax and log-softmax along one axis, and their gradients from the result.
 *
 * y = e^(x - max) / sum, and x - max - log(sum e^(x - max)); f32 for bf16 and f16. Scores of -inf give exactly 0; a row
 * of nothing else gives NaN, as torch.
 */
#include "ops/attr.h"

static om_status softmax_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int axis;
    *out = *x;
    for (int i = 0; i < n->n_in; i++) {
        const om_type *t = om_ty(g, om_ins(g, n)[i]);
        OM_CHECK(g->cx, om_is_float(t->dtype) && t->dtype == x->dtype && t->rank == x->rank,
                 "%s: operand %d is %s of rank %d; floats of one dtype and shape are allowed", n->op->name, i,
                 om_dtype_name(t->dtype), t->rank);
        for (int k = 0; k < x->rank; k++)
            OM_CHECK(g->cx, !attr_differs(g, t->dim[k], x->dim[k]), "%s: operands differ in size on axis %d",
                     n->op->name, k);
    }
    if (x->rank == 0) return OM_OK; /* one element: axis 0 by courtesy */
    return attr_axis(g, n, x->rank, &axis);
}

static om_status softmax_grad_(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    dx[0] = om_make(b->g, om_is(n, softmax) ? &om_op_softmax_grad : &om_op_log_softmax_grad, OM_IN(dy[0], n->out),
                    OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0))));
    return b->g->cx->status;
}
static om_status second_order(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)dy, (void)want, (void)dx;
    return om_fail(b->g->cx, OM_UNSUPPORTED,
                   "%s has no gradient of its own: second derivatives run in PyTorch (create_graph=True)", n->op->name);
}

#define OP_(nm, n_operands, gradient)               \
    const om_op om_op_##nm = {                      \
        OM_OP(nm),                                  \
        .kind = OM_K_ROW,                           \
        .min_in = n_operands,                       \
        .max_in = n_operands,                       \
        .n_out = 1,                                 \
        .infer = softmax_infer,                     \
        .grad = gradient,                           \
    };
OP_(softmax, 1, softmax_grad_)
OP_(softmax_grad, 2, second_order)
OP_(log_softmax, 1, softmax_grad_)
OP_(log_softmax_grad, 2, second_order)
