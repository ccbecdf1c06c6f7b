/* grad.c - reverse-mode differentiation: a copy of the forward graph followed by its gradient.
 *
 * Which values need a gradient is known before anything is built: those on a path from a wanted input to an output
 * whose gradient arrives, through operators that have a rule and through floats. Nodes are then visited backwards; each
 * rule (om_op.grad) is told which of its inputs want a gradient and builds only those from ordinary operators.
 * Contributions are added in the order they arise, so the sum is the same for every run. om_flow notes beside it what
 * each gradient is a sum over.
 */
#include "graph/sabotage.h"

typedef struct grad_state {
    om_graph *g;
    om_id *dval;       /* per value: its gradient so far */
    uint8_t *need;     /* per value: a wanted input reaches it */
    om_flow *flow;     /* NULL: not asked for */
    uint32_t *term;    /* per value of the forward: what its gradient comes from */
    om_id n_val;       /* values of the forward */
} grad_state;

static uint32_t flow_term(grad_state *st, om_flow_kind kind, uint32_t a, uint32_t b, uint64_t outputs) {
    if (!st->flow) return 0;
    om_flow_term *t = OM_PUSH(st->g->cx, &st->flow->terms);
    if (!t) return 0;
    *t = (om_flow_term){(uint8_t)kind, a, b, outputs};
    return st->flow->terms.n - 1;
}

static uint32_t flow_any(grad_state *st, uint32_t a, uint32_t b) {
    if (!st->flow || a == b || !b) return a;
    if (!a) return b;
    const om_flow_term *t = st->flow->terms.v;
    for (uint32_t n = st->flow->terms.n, i = n; i-- > 1 && i + 32 > n;)
        if (t[i].kind == OM_FLOW_ANY && ((t[i].a == a && t[i].b == b) || (t[i].a == b && t[i].b == a))) return i;
    for (int k = 0; k < 2; k++) { /* a + (a or b) */
        uint32_t whole = k ? b : a, part = k ? a : b;
        if (t[whole].kind == OM_FLOW_ANY && (t[whole].a == part || t[whole].b == part)) return whole;
    }
    return flow_term(st, OM_FLOW_ANY, a, b, t[a].outputs | t[b].outputs);
}

static void grad_add(grad_state *st, om_id v, om_id d, uint32_t term) {
    if (d == OM_NONE || (st->dval[v] != OM_NONE && om_sabotage("grad.sum"))) return;
    st->dval[v] = st->dval[v] == OM_NONE ? d : om_b_bin(st->g, &om_op_add, st->dval[v], d);
    if (st->term) st->term[v] = flow_any(st, st->term[v], term);
}

/* The gradient of node n has been built, from node `before` on. PyTorch keeps something of such a node's forward if its
 * gradient reads a value of the forward; masks that only we can draw again count, and what a host node keeps is
 * unknown. */
static void flow_node(grad_state *st, const om_node *n, om_id before, uint32_t term) {
    const om_graph *g = st->g;
    bool reads = n->op == &om_op_host || n->rng != 0;
    for (om_id i = before; i < g->nodes.n && !reads; i++)
        for (int k = 0; k < g->nodes.v[i].n_in && !reads; k++) {
            om_id v = om_ins(g, &g->nodes.v[i])[k];
            reads = v < st->n_val; /* a constant counts: it is a saved tensor, too */
        }
    uint64_t outputs = st->flow->terms.v[term].outputs;
    for (uint32_t i = 0; i < g->outputs.n && reads; i++)
        if (outputs >> (i < 63 ? i : 63) & 1) st->flow->shares[i] |= outputs;
}

static om_status grad_node(grad_state *st, om_id id) {
    om_graph *g = st->g;
    om_node n = g->nodes.v[id]; /* a copy: the rule appends nodes, which may move the array */
    om_id dy[OM_MAX_OUT], dx[OM_MAX_IN], in[OM_MAX_IN];
    bool want[OM_MAX_IN], any = false, arrives = false;
    if (n.n_in > OM_MAX_IN || n.n_out > OM_MAX_OUT)
        return om_fail(g->cx, OM_UNSUPPORTED, "gradient of %s with %d operands and %d outputs: at most %d and %d",
                       n.op->name, n.n_in, n.n_out, OM_MAX_IN, OM_MAX_OUT);
    uint32_t term = 0, places = 0;
    for (int i = 0; i < n.n_out; i++) {
        om_id v = n.out + (om_id)i;
        arrives |= (dy[i] = st->dval[v]) != OM_NONE;
        if (st->term) term = flow_any(st, term, st->term[v]);
    }
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
    if (st->flow) flow_node(st, &n, before, term);
    for (int i = 0; i < n.n_out && st->flow && n.op == &om_op_host; i++) {
        if (!om_is_float(om_ty(g, n.out + (om_id)i)->dtype)) continue;
        om_flow_in *f = OM_PUSH(g->cx, &st->flow->host);
        if (f) *f = (om_flow_in){(uint32_t)om_node_int(&n, "index", 0), places++, st->term[n.out + (om_id)i]};
    }
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
            return om_fail(g->cx, OM_INTERNAL,
                           "gradient of %s for operand %d has dtype %s rank %d instead of %s rank %d (or other sizes)",
                           n.op->name, i, om_dtype_name(d.dtype), d.rank, om_dtype_name(t.dtype), t.rank);
        /* nothing, unless equal sizes are spelt differently (s0 and 7) */
        dx[i] = om_b_reshape(g, dx[i], t.dim, t.rank);
        uint32_t from = term;
        if (st->flow && n.op == &om_op_host)
            from = flow_term(st, OM_FLOW_HOST, (uint32_t)om_node_int(&n, "index", 0), (uint32_t)i,
                             st->flow->terms.v[term].outputs);
        grad_add(st, in[i], dx[i], from);
    }
    for (om_id k = before; k < g->nodes.n; k++) g->nodes.v[k].scope = n.scope;
    return g->cx->status;
}

void om_flow_free(om_ctx *cx, om_flow *flow) {
    om_free(cx, flow->terms.v);
    om_free(cx, flow->host.v);
    om_free(cx, flow->grads);
    om_free(cx, flow->shares);
    om_free(cx, flow->reach);
    memset(flow, 0, sizeof *flow);
}

static om_status flow_begin(om_ctx *cx, grad_state *st) {
    const om_graph *g = st->g;
    om_flow *f = st->flow;
    memset(f, 0, sizeof *f);
    f->grads = om_alloc(cx, (g->inputs.n + 1) * sizeof *f->grads);
    f->shares = om_alloc(cx, (g->outputs.n + 1) * sizeof *f->shares);
    f->reach = om_alloc(cx, g->outputs.n + 1);
    st->term = om_alloc(cx, (st->n_val + 1) * sizeof *st->term);
    if (f->grads && f->shares && f->reach && st->term) flow_term(st, OM_FLOW_NEVER, 0, 0, 0);
    return cx->status;
}

/* What stood there for the gradient's sake alone: values whose gradient went elsewhere, and the computation of what was
 * overwritten. */
static bool grad_only(const om_node *n) {
    return om_is(n, zero_grad) || om_is(n, straight_through) || om_is(n, stop_grad);
}

static om_status strip_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    if (!grad_only(n)) return om_rewrite_copy(r, id);
    r->map[n->out] = r->map[om_ins(r->from, n)[0]];
    return OM_OK;
}

static om_status strip(om_ctx *cx, om_graph **g) {
    om_graph *next;
    bool any = false;
    for (om_id i = 0; i < (*g)->nodes.n && !any; i++) any = grad_only(&(*g)->nodes.v[i]);
    if (!any) return OM_OK;
    OM_TRY(om_rewrite(cx, *g, strip_emit, NULL, &next));
    om_graph_free(*g);
    *g = next;
    return OM_OK;
}

om_status om_grad_build(om_ctx *cx, const om_graph *fwd, const uint8_t *wanted, const uint8_t *arriving,
                        om_graph **out) {
    return om_grad_flow(cx, fwd, wanted, arriving, NULL, out);
}

om_status om_grad_flow(om_ctx *cx, const om_graph *fwd, const uint8_t *wanted, const uint8_t *arriving, om_flow *flow,
                       om_graph **out) {
    om_graph *g;
    *out = NULL;
    OM_TRY(om_rewrite(cx, fwd, om_rewrite_copy, NULL, &g));
    uint32_t n_fwd = g->nodes.n, n_val = g->values.n, n_inputs = g->inputs.n;
    grad_state st = {g, om_alloc(cx, (n_val + 1) * sizeof(om_id)), om_alloc(cx, n_val + 1), .flow = flow,
                     .n_val = n_val};
    om_status s = st.dval && st.need ? OM_OK : cx->status;
    if (s == OM_OK && flow) s = flow_begin(cx, &st);
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
    for (uint32_t i = 0; i < g->outputs.n && flow; i++)
        flow->reach[i] = st.need[g->outputs.v[i]] && om_is_float(om_ty(g, g->outputs.v[i])->dtype);
    g->cur_phase = OM_BACKWARD;
    for (uint32_t i = 0; i < g->outputs.n && cx->status == OM_OK; i++) {
        om_id o = g->outputs.v[i];
        if (!arriving[i] || !om_is_float(om_ty(g, o)->dtype)) continue;
        om_type t = *om_ty(g, o);
        om_id d = om_input(g, OM_GRAD_IN, NULL, &t);
        /* appended for every arriving output: the host passes them by position */
        if (d != OM_NONE && o < n_val)
            grad_add(&st, o, d, flow_term(&st, OM_FLOW_OUTPUT, i, 0, (uint64_t)1 << (i < 63 ? i : 63)));
    }
    for (om_id i = n_fwd; i-- > 0 && s == OM_OK;) s = grad_node(&st, i);
    if (s == OM_OK) s = cx->status;
    for (uint32_t i = 0; i < n_inputs && s == OM_OK; i++) {
        if (!wanted[i]) continue;
        om_gradout *w = OM_PUSH(cx, &g->grads);
        if (!w) s = cx->status;
        else *w = (om_gradout){st.dval[g->inputs.v[i]], i};
        if (flow) flow->grads[i] = st.term[g->inputs.v[i]];
    }
    if (s == OM_OK) s = om_sabotage_terms(cx, &g);
    if (s == OM_OK) s = strip(cx, &g);
done:
    om_free(cx, st.dval);
    om_free(cx, st.need);
    om_free(cx, st.term);
    if (s == OM_OK) *out = g;
    else om_graph_free(g);
    return s;
}
