/* grad.c - reverse-mode differentiation: a copy of the forward graph followed by its gradient.
 *
 * Which values need a gradient is known before anything is built: those on a path from a wanted input to an output whose
 * gradient arrives, through operators that have a rule and through floats. Nodes are then visited backwards; each rule
 * (om_op.grad) is told which of its inputs want a gradient and builds only those from ordinary operators. Contributions
 * are added in the order they arise, so the sum is the same for every run.
 */
#include "sabotage.h"

typedef struct grad_state {
    om_graph *g;
    om_id *dval;       /* per value: its gradient so far */
    uint8_t *need;     /* per value: a wanted input reaches it */
} grad_state;

static void grad_add(grad_state *st, om_id v, om_id d) {
    if (d == OM_NONE || (st->dval[v] != OM_NONE && om_sabotage("grad.sum"))) return;
    st->dval[v] = st->dval[v] == OM_NONE ? d : om_b_bin(st->g, &om_op_add, st->dval[v], d);
}

static om_status grad_node(grad_state *st, om_id id) {
    om_graph *g = st->g;
    om_node n = g->nodes.v[id]; /* a copy: the rule appends nodes, which may move the array */
    om_id dy[64], dx[256], in[256];
    bool want[256], any = false, arrives = false;
    if (n.n_in > 256 || n.n_out > 64) return om_fail(g->cx, OM_UNSUPPORTED, "gradient of %s with %d operands", n.op->name, n.n_in);
    for (int i = 0; i < n.n_out; i++) arrives |= (dy[i] = st->dval[n.out + (om_id)i]) != OM_NONE;
    for (int i = 0; i < n.n_in; i++) {
        in[i] = om_ins(g, &n)[i];
        dx[i] = OM_NONE;
        want[i] = in[i] != OM_NONE && st->need[in[i]] && om_is_float(om_ty(g, in[i])->dtype);
        any |= want[i];
    }
    if (!arrives || !any || !n.op->grad) return OM_OK;
    g->cur_scope = n.scope;
    om_builder b = {g};
    om_id before = g->nodes.n;
    OM_TRY(n.op->grad(&b, &n, dy, want, dx));
    if (g->cx->status != OM_OK) return g->cx->status;
    for (int i = 0; i < n.n_in; i++) {
        if (!want[i] || dx[i] == OM_NONE) continue;
        if (om_sabotage(n.op->name)) dx[i] = om_sabotage_wrong(g, dx[i]);
        const om_type t = *om_ty(g, in[i]), d = *om_ty(g, dx[i]);
        bool wrong = t.dtype != d.dtype || t.rank != d.rank;
        for (int k = 0; k < t.rank && !wrong; k++) {
            int64_t have, need;
            wrong = t.dim[k] != d.dim[k] && om_dim_const(g, t.dim[k], &need) && om_dim_const(g, d.dim[k], &have);
        }
        if (wrong)
            return om_fail(g->cx, OM_INTERNAL, "gradient of %s for operand %d has dtype %s rank %d instead of %s rank %d (or other sizes)",
                           n.op->name, i, om_dtype_name(d.dtype), d.rank, om_dtype_name(t.dtype), t.rank);
        dx[i] = om_b_reshape(g, dx[i], t.dim, t.rank); /* nothing, unless equal sizes are spelt differently (s0 and 7) */
        grad_add(st, in[i], dx[i]);
    }
    for (om_id k = before; k < g->nodes.n; k++) g->nodes.v[k].scope = n.scope;
    return g->cx->status;
}

om_status om_grad_build(om_ctx *cx, const om_graph *fwd, const uint8_t *wanted, const uint8_t *arriving, om_graph **out) {
    om_graph *g;
    *out = NULL;
    OM_TRY(om_rewrite(cx, fwd, om_rewrite_copy, NULL, &g));
    uint32_t n_fwd = g->nodes.n, n_val = g->values.n, n_inputs = g->inputs.n;
    grad_state st = {g, om_alloc(cx, (n_val + 1) * sizeof(om_id)), om_alloc(cx, n_val + 1)};
    om_status s = st.dval && st.need ? OM_OK : cx->status;
    if (s != OM_OK) goto done;
    memset(st.dval, 0xff, n_val * sizeof(om_id));

    for (uint32_t i = 0; i < n_inputs; i++)
        if (wanted[i]) st.need[g->inputs.v[i]] = om_is_float(om_ty(g, g->inputs.v[i])->dtype);
    for (om_id i = 0; i < n_fwd; i++) {
        const om_node *n = &g->nodes.v[i];
        bool need = false;
        for (int k = 0; k < n->n_in && n->op->grad; k++) need |= om_ins(g, n)[k] != OM_NONE && st.need[om_ins(g, n)[k]];
        for (int k = 0; k < n->n_out; k++) {
            int t = om_ty(g, n->out + (om_id)k)->dtype;
            st.need[n->out + (om_id)k] = need && (om_is_float(t) || t == OM_OPAQUE);
        }
    }
    g->cur_phase = OM_BACKWARD;
    for (uint32_t i = 0; i < g->outputs.n && cx->status == OM_OK; i++) {
        om_id o = g->outputs.v[i];
        if (!arriving[i] || !om_is_float(om_ty(g, o)->dtype)) continue;
        om_type t = *om_ty(g, o);
        om_id d = om_input(g, OM_GRAD_IN, NULL, &t);
        if (d != OM_NONE && o < n_val) grad_add(&st, o, d); /* appended for every arriving output: the host passes them by position */
    }
    for (om_id i = n_fwd; i-- > 0 && s == OM_OK;) s = grad_node(&st, i);
    if (s == OM_OK) s = cx->status;
    for (uint32_t i = 0; i < n_inputs && s == OM_OK; i++) {
        if (!wanted[i]) continue;
        om_gradout *w = OM_PUSH(cx, &g->grads);
        if (!w) s = cx->status;
        else *w = (om_gradout){st.dval[g->inputs.v[i]], i};
    }
    if (s == OM_OK) s = om_sabotage_terms(cx, &g);
done:
    om_free(cx, st.dval);
    om_free(cx, st.need);
    if (s == OM_OK) *out = g;
    else om_graph_free(g);
    return s;
}
