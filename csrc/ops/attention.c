/* attention.c - y = softmax(q k^T * scale + mask) v with dropout on the probabilities, and its gradient.
 *
 * q (..., hq, tq, d), k (..., hk, tk, d), v (..., hk, tk, dv); rank >= 3; hq a multiple of hk (query head h uses
 * key/value head h / (hq / hk)). Operands after v: mask, kv_start, kv_end, frozen; any of them may be left out.
 *   mask            bool (true = visible) or float (added to the scaled scores), broadcast to (..., hq, tq, tk)
 *   kv_start/end    i64, one entry per batch entry: key j is visible when kv_start <= j < kv_end
 *   frozen          bool, broadcast as mask: where it is true a score takes no gradient (it was replaced: masked_fill,
 *                   where); the mask's own gradient is not touched by it, and forward does not read it
 * Attributes
 *   scale           multiplies q k^T; absent: 1 / sqrt(d)
 *   causal          1: key j is visible to query i when j <= i + causal_offset (absent: 0, torch's top-left rule)
 *   window          w > 0: key j is visible only when j > i - w
 *   seq_first       1: y is (..., tq, hq, dv), as the layer after it reads it; its gradient then takes dy and y and
 *                   gives dq, dk, dv so too
 *   dropout         probability; words of the node's random stream at the row-major index of (batch, hq, tq, tk)
 *   nan_rows        0: a query that sees no key gives y = 0 and no gradient; 1: it gives NaN, as the softmax of nothing
 *                   but -inf does, and its scores take NaN; 2: NaN too, but what hid its keys replaced the scores,
 *                   which take no gradient
 * All conditions hold together. A query that sees no key has lse = -inf; a finite additive mask is plain arithmetic
 * (all keys at the lowest float: their mean).
 */

#include "ops/attr.h"

#include <math.h>
#include <stdatomic.h>

/* --- types ------------------------------------------------------------------------------------------ */

/* Shared by both operators: operand positions are those of q in `in`. */
static om_status attention_check(om_graph *g, const char *name, const om_id *q_k_v, om_id mask, om_id start, om_id end,
                                 om_id frozen) {
    const om_type *q = om_ty(g, q_k_v[0]), *k = om_ty(g, q_k_v[1]), *v = om_ty(g, q_k_v[2]);
    om_ctx *cx = g->cx;
    OM_CHECK(cx, om_is_float(q->dtype), "%s of %s: only f32, f64, bf16 and f16", name, om_dtype_name(q->dtype));
    OM_CHECK(cx, q->dtype == k->dtype && q->dtype == v->dtype, "%s: q is %s, k is %s, v is %s; one dtype is needed",
             name, om_dtype_name(q->dtype), om_dtype_name(k->dtype), om_dtype_name(v->dtype));
    OM_CHECK(cx, q->rank >= 3 && k->rank == q->rank && v->rank == q->rank,
             "%s: q, k, v have ranks %d, %d, %d; equal ranks of at least 3 are needed: (..., heads, time, size)", name,
             q->rank, k->rank, v->rank);
    int r = q->rank;
    for (int i = 0; i < r - 3; i++)
        OM_CHECK(cx, !attr_differs(g, q->dim[i], k->dim[i]) && !attr_differs(g, q->dim[i], v->dim[i]),
                 "%s: batch axis %d of q, k, v differs; expand them first", name, i);
    OM_CHECK(cx, !attr_differs(g, k->dim[r - 3], v->dim[r - 3]) && !attr_differs(g, k->dim[r - 2], v->dim[r - 2]),
             "%s: k and v must have the same heads and length", name);
    OM_CHECK(cx, !attr_differs(g, q->dim[r - 1], k->dim[r - 1]),
             "%s: q has heads of %lld numbers, k of %lld; they must be equal", name, (long long)q->dim[r - 1],
             (long long)k->dim[r - 1]);
    int64_t hq, hk;
    if (om_dim_const(g, q->dim[r - 3], &hq) && om_dim_const(g, k->dim[r - 3], &hk))
        OM_CHECK(cx, hk > 0 ? hq % hk == 0 : hq == 0,
                 "%s: %lld query heads over %lld key/value heads; the first must be a multiple of the second", name,
                 (long long)hq, (long long)hk);
    if (frozen != OM_NONE)
        OM_CHECK(cx, om_ty(g, frozen)->dtype == OM_BOOL, "%s: frozen is %s; bool is needed", name,
                 om_dtype_name(om_ty(g, frozen)->dtype));
    for (int which = 0; which < 2; which++) {
        om_id given = which ? frozen : mask;
        if (given == OM_NONE) continue;
        const om_type *m = om_ty(g, given);
        OM_CHECK(cx, m->dtype == OM_BOOL || om_is_float(m->dtype), "%s: mask is %s; bool or a float type is allowed",
                 name, om_dtype_name(m->dtype));
        OM_CHECK(cx, m->rank <= r, "%s: mask has rank %d, q has %d", name, m->rank, r);
        for (int i = 0; i < m->rank; i++) {
            int at = r - m->rank + i;
            om_dim want = at == r - 1 ? k->dim[r - 2] : q->dim[at];
            OM_CHECK(cx, m->dim[i] == 1 || !attr_differs(g, m->dim[i], want),
                     "%s: axis %d of the mask has %lld entries; 1 or %lld is allowed", name, i, (long long)m->dim[i],
                     (long long)want);
        }
    }
    for (int i = 0; i < 2; i++) {
        om_id s = i ? end : start;
        if (s != OM_NONE)
            OM_CHECK(cx, om_ty(g, s)->dtype == OM_I64 && om_ty(g, s)->rank == 1,
                     "%s: %s must be i64 of rank 1, one entry per batch entry", name, i ? "kv_end" : "kv_start");
    }
    return OM_OK;
}

/* Axes of heads and time of what seq_first turns. */
static void attention_turn_type(om_type *t) {
    om_dim heads = t->dim[t->rank - 3];
    t->dim[t->rank - 3] = t->dim[t->rank - 2];
    t->dim[t->rank - 2] = heads;
}

static om_status attention_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    OM_TRY(attention_check(g, "attention", in, n->n_in > 3 ? in[3] : OM_NONE, n->n_in > 4 ? in[4] : OM_NONE,
                           n->n_in > 5 ? in[5] : OM_NONE, n->n_in > 6 ? in[6] : OM_NONE));
    out[0] = *om_ty(g, in[0]);
    out[0].dim[out[0].rank - 1] = om_ty(g, in[2])->dim[out[0].rank - 1];
    out[1] = *om_ty(g, in[0]);
    out[1].rank--;
    out[1].dtype = (uint8_t)om_compute_dtype(out[0].dtype);
    if (om_node_int(n, "seq_first", 0)) attention_turn_type(&out[0]);
    return OM_OK;
}

static om_status attention_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    OM_TRY(attention_check(g, "attention_grad", in + 1, in[4], n->n_in > 7 ? in[7] : OM_NONE,
                           n->n_in > 8 ? in[8] : OM_NONE, n->n_in > 9 ? in[9] : OM_NONE));
    OM_CHECK(g->cx,
             om_ty(g, in[0])->dtype == om_ty(g, in[1])->dtype && om_ty(g, in[5])->dtype == om_ty(g, in[1])->dtype,
             "attention_grad: dy and y must have q's dtype");
    OM_CHECK(g->cx, om_ty(g, in[6])->dtype == om_compute_dtype(om_ty(g, in[1])->dtype),
             "attention_grad: lse must be in the compute dtype");
    for (int i = 0; i < 3; i++) {
        out[i] = *om_ty(g, in[i + 1]);
        if (om_node_int(n, "seq_first", 0)) attention_turn_type(&out[i]);
    }
    bool dmask = in[4] != OM_NONE && om_is_float(om_ty(g, in[4])->dtype) && om_node_int(n, "want_dmask", 0);
    if (dmask) out[3] = *om_ty(g, in[4]);
    else out[3] = (om_type){.dtype = out[0].dtype, .rank = 1};
    return OM_OK;
}

/* --- gradient ------------------------------------------------------------------------------------------- */

static om_status attention_grad_rule(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_id in[7] = {OM_NONE, OM_NONE, OM_NONE, OM_NONE, OM_NONE, OM_NONE, OM_NONE};
    for (int i = 0; i < n->n_in; i++) in[i] = om_ins(g, n)[i];
    if (dy[1] != OM_NONE)
        return om_fail(g->cx, OM_UNSUPPORTED, "attention: a gradient arrives for lse, which only backward may read");
    if (dy[0] == OM_NONE) return OM_OK;
    bool dmask = n->n_in > 3 && want[3];
    om_attr attr[16];
    int n_attr = 0;
    OM_CHECK(g->cx, n->n_attr < 16, "attention: %d attributes; at most 15 are known", n->n_attr);
    for (int i = 0; i < n->n_attr; i++) attr[n_attr++] = n->attr[i];
    if (dmask) attr[n_attr++] = OM_AI("want_dmask", 1);
    om_id ops[10] = {dy[0], in[0], in[1], in[2], in[3], n->out, n->out + 1, in[4], in[5], in[6]};
    int n_ops = in[6] != OM_NONE ? 10 : in[5] != OM_NONE ? 9 : in[4] != OM_NONE ? 8 : 7;
    om_id d = om_make(g, &om_op_attention_grad, ops, n_ops, attr, n_attr);
    if (d == OM_NONE) return g->cx->status;
    om_last(g)->rng = n->rng; /* the same words as forward */
    for (int i = 0; i < 3; i++)
        if (want[i]) dx[i] = om_node_int(n, "seq_first", 0) ? om_b_transpose(g, d + (om_id)i, -3, -2) : d + (om_id)i;
    if (dmask) dx[3] = d + 3;
    return OM_OK;
}

const om_op om_op_attention = {
    OM_OP(attention),
    .kind = OM_K_ATTENTION,
    .min_in = 3,
    .max_in = 7,
    .n_out = 2,
    .random = true,
    .infer = attention_infer,
    .grad = attention_grad_rule,
};

const om_op om_op_attention_grad = {
    OM_OP(attention_grad),
    .kind = OM_K_ATTENTION,
    .min_in = 7,
    .max_in = 10,
    .n_out = 4,
    .optional = 1u << 4,
    .random = true,
    .infer = attention_grad_infer,
};
