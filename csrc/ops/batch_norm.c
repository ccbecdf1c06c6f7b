/* batch_norm.c - batch normalisation over every axis but the channel (axis 1), as torch.nn.functional.batch_norm.
 *
 *   training   mean, var (biased) of the batch;  new_mean = (1 - m) running_mean + m mean,  new_var with the unbiased
 *              variance
 *   eval       mean, var = the running ones, which come out unchanged
 *   y = (x - mean) rstd w + b,  rstd = 1 / sqrt(var + eps)
 *   gradient   db = sum dy,  dw = rstd sum dy (x - mean);
 *              training: dx = rstd w (dy - db / N - (x - mean) rstd dw / N),   eval: dx = rstd w dy
 *
 * w, b and the statistics may be of any float type.
 */
#include "ops/attr.h"

#include <math.h>

static om_status channel_check(om_graph *g, const om_node *n, int operand, const om_type *x, const char *what) {
    if (operand >= n->n_in || om_ins(g, n)[operand] == OM_NONE) return OM_OK;
    const om_type *t = om_ty(g, om_ins(g, n)[operand]);
    OM_CHECK(g->cx, t->rank == 1 && om_is_float(t->dtype) && !attr_differs(g, t->dim[0], x->dim[1]),
             "%s: %s is %s of rank %d with size %lld; floats with one entry per channel (%lld) are needed", n->op->name,
             what, om_dtype_name(t->dtype), t->rank, (long long)t->dim[0], (long long)x->dim[1]);
    return OM_OK;
}

static om_type channel_type(const om_type *x, int dtype) {
    return (om_type){.dtype = (uint8_t)dtype, .rank = 1, .dim = {x->dim[1]}};
}

static om_status batch_norm_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *x = om_ty(g, in[0]);
    const bool mean = n->n_in > 3 && in[3] != OM_NONE, var = n->n_in > 4 && in[4] != OM_NONE;
    static const char *const names[] = {"x", "weight", "bias", "running_mean", "running_var"};
    OM_CHECK(g->cx, x->rank >= 2 && om_is_float(x->dtype),
             "batch_norm: x is %s of rank %d; floats (n, c, ...) are needed", om_dtype_name(x->dtype), x->rank);
    for (int i = 1; i < 5; i++) OM_TRY(channel_check(g, n, i, x, names[i]));
    OM_CHECK(g->cx, mean == var, "batch_norm: running_mean and running_var must both be given or both left out");
    OM_CHECK(g->cx, mean || om_node_int(n, "training", 0),
             "batch_norm: without running statistics only training = 1 is possible");
    int compute = om_compute_dtype(x->dtype);
    out[0] = *x;
    out[1] = channel_type(x, mean ? om_ty(g, in[3])->dtype : compute);
    out[2] = channel_type(x, var ? om_ty(g, in[4])->dtype : compute);
    out[3] = out[4] = channel_type(x, compute);
    return OM_OK;
}

static om_status batch_norm_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id *in = om_ins(g, n);
    om_id x = in[0], w = n->n_in > 1 ? in[1] : OM_NONE, bias = n->n_in > 2 ? in[2] : OM_NONE;
    if (dy[0] == OM_NONE) return OM_OK;
    om_id first = om_make(g, &om_op_batch_norm_grad, OM_IN(dy[0], x, w, n->out + 3, n->out + 4),
                          OM_ATTRS(OM_AI("training", om_node_int(n, "training", 0))));
    if (first == OM_NONE) return g->cx->status;
    if (want[0]) dx[0] = first;
    if (w != OM_NONE && want[1]) dx[1] = om_b_cast(g, first + 1, om_ty(g, w)->dtype);
    if (bias != OM_NONE && want[2]) dx[2] = om_b_cast(g, first + 2, om_ty(g, bias)->dtype);
    return OM_OK;
}

const om_op om_op_batch_norm = {
    OM_OP(batch_norm),
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 5,
    .n_out = 5,
    .infer = batch_norm_infer,
    .grad = batch_norm_grad_build,
};

/* --- gradient ------------------------------------------------------------------------------------------ */

static om_status batch_norm_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *dy = om_ty(g, in[0]), *x = om_ty(g, in[1]);
    OM_CHECK(
        g->cx, x->rank >= 2 && om_is_float(x->dtype) && dy->dtype == x->dtype && dy->rank == x->rank,
        "batch_norm_grad: dy is %s of rank %d, x %s of rank %d; both must be floats of one type and rank, 2 or more",
        om_dtype_name(dy->dtype), dy->rank, om_dtype_name(x->dtype), x->rank);
    for (int i = 0; i < x->rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, x->dim[i], dy->dim[i]),
                 "batch_norm_grad: dy and x differ in size along axis %d", i);
    OM_TRY(channel_check(g, n, 2, x, "weight"));
    OM_TRY(channel_check(g, n, 3, x, "mean"));
    OM_TRY(channel_check(g, n, 4, x, "rstd"));
    out[0] = *x;
    out[1] = out[2] = channel_type(x, in[2] != OM_NONE ? om_ty(g, in[2])->dtype : om_compute_dtype(x->dtype));
    return OM_OK;
}

const om_op om_op_batch_norm_grad = {
    OM_OP(batch_norm_grad),
    .kind = OM_K_ROW,
    .min_in = 5,
    .max_in = 5,
    .n_out = 3,
    .optional = 1u << 2,
    .infer = batch_norm_grad_infer,
};
