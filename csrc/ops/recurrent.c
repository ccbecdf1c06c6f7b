/* recurrent.c - the part of RNN, LSTM and GRU layers that goes from one time step to the next, for one direction of one
 * layer. The other half, gx = x W_ih^T + biases, is one matrix product over the whole sequence before it.
 *
 *   kind 0, 1  RNN (relu, tanh)   h' = f(gx + h w^T)
 *   kind 2     LSTM (i, f, g, o)  c' = f c + i g,  h' = o tanh c';   i, f, o = sigmoid, g = tanh of gx + h w^T
 *   kind 3     GRU (r, z, n)      h' = (1 - z) n + z h;   r, z = sigmoid of gx + h w^T + b,
 *                                 n = tanh(gx_n + r (h w_n^T + b_n))
 *
 * Gates, and the LSTM's cell states, are kept for backward in the compute type. Its operator goes through time once and
 * gives the gradient of gx; those of w and b are one product and one sum over the whole sequence.
 */
#include "ops/attr.h"
#include "ops/recurrent.h"

static om_status recurrent_kind(om_graph *g, const om_node *n, int64_t *kind, int64_t *gates) {
    *kind = om_node_int(n, "kind", -1);
    OM_CHECK(g->cx, *kind >= OM_RNN_RELU && *kind <= OM_GRU, "%s: kind %lld; 0 relu, 1 tanh, 2 LSTM, 3 GRU",
             n->op->name, (long long)*kind);
    *gates = om_rnn_gates(*kind);
    return OM_OK;
}

static om_status recurrent_shape(om_graph *g, const om_node *n, om_id v, const char *name, int dtype, int rank,
                                 om_dim d0, om_dim d1) {
    const om_type *t = om_ty(g, v);
    OM_CHECK(g->cx, t->dtype == dtype && t->rank == rank && !attr_differs(g, t->dim[0], d0) &&
                        (rank < 2 || !attr_differs(g, t->dim[1], d1)),
             "%s: %s is %s of rank %d and does not fit gx and w", n->op->name, name, om_dtype_name(t->dtype), t->rank);
    return OM_OK;
}

static om_status recurrent_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *x = om_ty(g, in[0]), *w = om_ty(g, in[1]);
    int64_t kind, gates, size, rows;
    OM_TRY(recurrent_kind(g, n, &kind, &gates));
    OM_CHECK(g->cx, om_is_float(x->dtype) && x->rank == 3 && w->rank == 2 && w->dtype == x->dtype,
             "recurrent: gx is %s of rank %d, w %s of rank %d; floats of one type, ranks 3 and 2 are needed",
             om_dtype_name(x->dtype), x->rank, om_dtype_name(w->dtype), w->rank);
    OM_CHECK(g->cx, om_dim_const(g, w->dim[1], &size) && om_dim_const(g, w->dim[0], &rows) && rows == gates * size &&
                        !attr_differs(g, x->dim[2], rows),
             "recurrent: w (%lld, %lld) and %lld columns of gx; %lld times the hidden size is needed",
             (long long)w->dim[0], (long long)w->dim[1], (long long)x->dim[2], (long long)gates);
    OM_CHECK(g->cx, (in[2] != OM_NONE) <= (kind == OM_GRU) && (in[4] != OM_NONE) == (kind == OM_LSTM),
             "recurrent: b is for GRU, c0 for LSTM");
    if (in[2] != OM_NONE) OM_TRY(recurrent_shape(g, n, in[2], "b", x->dtype, 1, rows, 0));
    OM_TRY(recurrent_shape(g, n, in[3], "h0", x->dtype, 2, x->dim[1], size));
    if (kind == OM_LSTM) OM_TRY(recurrent_shape(g, n, in[4], "c0", x->dtype, 2, x->dim[1], size));
    for (int i = 0; i < 4; i++) out[i] = *x;
    out[0].dim[2] = out[3].dim[2] = size;
    out[2].dim[2] = 4 * size;
    out[1].rank = 2, out[1].dim[0] = x->dim[1], out[1].dim[1] = size;
    out[2].dtype = out[3].dtype = (uint8_t)om_compute_dtype(x->dtype);
    for (int i = 1; i < 4; i++)
        if (kind != OM_LSTM && !(kind == OM_GRU && i == 2)) out[i].rank = 1, out[i].dim[0] = 0;
    return OM_OK;
}

/* y one step earlier: h0, then all steps but the last; reversed: all but the first, then h0 */
static om_id recurrent_before(om_graph *g, om_id y, om_id h0, bool reverse) {
    const om_type t = *om_ty(g, y);
    const om_id first = om_b_reshape(g, h0, (om_dim[]){1, t.dim[1], t.dim[2]}, 3);
    const om_id rest = reverse ? om_b_slice(g, y, 0, 1, t.dim[0], 1)
                               : om_b_slice(g, y, 0, 0, om_dim_sub(g, t.dim[0], 1), 1);
    return om_make(g, &om_op_concat, reverse ? (om_id[]){rest, first} : (om_id[]){first, rest}, 2,
                   OM_ATTRS(OM_AI("axis", 0)));
}

static om_status recurrent_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id w = om_ins(g, n)[1], h0 = om_ins(g, n)[3], c0 = om_ins(g, n)[4], y = n->out;
    const int64_t kind = om_node_int(n, "kind", 0), reverse = om_node_int(n, "reverse", 0);
    const om_id d = dy[0] == OM_NONE ? om_b_zeros_like(g, y) : dy[0];
    const om_id r = om_make(g, &om_op_recurrent_grad,
                            (om_id[]){d, kind == OM_LSTM ? dy[1] : OM_NONE, w, h0, c0, y,
                                      kind >= OM_LSTM ? y + 2 : OM_NONE, kind == OM_LSTM ? y + 3 : OM_NONE},
                            8, OM_ATTRS(OM_AI("kind", kind), OM_AI("reverse", reverse)));
    if (r == OM_NONE) return g->cx->status;
    const om_id dgh = kind == OM_GRU ? r + 1 : r;
    if (want[0]) dx[0] = r;
    if (want[1]) {
        const om_type t = *om_ty(g, dgh), yt = *om_ty(g, y);
        const om_dim rows = om_dim_mul(g, t.dim[0], t.dim[1]);
        const om_id h = om_b_reshape(g, recurrent_before(g, y, h0, reverse), (om_dim[]){rows, yt.dim[2]}, 2);
        const om_id m = om_b_transpose(g, om_b_reshape(g, dgh, (om_dim[]){rows, t.dim[2]}, 2), 0, 1);
        dx[1] = om_make(g, &om_op_matmul, OM_IN(m, h), NULL, 0);
    }
    if (om_ins(g, n)[2] != OM_NONE && want[2]) dx[2] = om_b_sum(g, dgh, 3, false);
    if (want[3]) dx[3] = r + 2;
    if (kind == OM_LSTM && want[4]) dx[4] = r + 3;
    return g->cx->status;
}

static om_status recurrent_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *dy = om_ty(g, in[0]), *w = om_ty(g, in[2]), *h0 = om_ty(g, in[3]);
    int64_t kind, gates;
    OM_TRY(recurrent_kind(g, n, &kind, &gates));
    OM_CHECK(g->cx, dy->rank == 3 && w->rank == 2 && h0->rank == 2 && (kind < OM_LSTM || in[6] != OM_NONE) &&
                        (kind != OM_LSTM || (in[4] != OM_NONE && in[7] != OM_NONE)),
             "recurrent_grad: an operand is missing or of another rank");
    for (int i = 0; i < 2; i++) out[i] = *dy, out[i].dim[2] = w->dim[0];
    out[2] = out[3] = *h0;
    if (kind != OM_GRU) out[1].rank = 1, out[1].dim[0] = 0;
    if (kind != OM_LSTM) out[3].rank = 1, out[3].dim[0] = 0;
    return OM_OK;
}

const om_op om_op_recurrent = {
    OM_OP(recurrent), .kind = OM_K_GEMM, .min_in = 5, .max_in = 5, .n_out = 4, .optional = 1u << 2 | 1u << 4,
    .infer = recurrent_infer, .grad = recurrent_grad_build,
};
const om_op om_op_recurrent_grad = {
    OM_OP(recurrent_grad), .kind = OM_K_GEMM, .min_in = 8, .max_in = 8, .n_out = 4,
    .optional = 1u << 1 | 1u << 4 | 1u << 6 | 1u << 7, .infer = recurrent_grad_infer,
};
