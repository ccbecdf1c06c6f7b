/* remat.c - what is cheap to compute again is not kept for backward: gelu from the linear layer's output that its gradient reads anyway, a
 * normalisation from its input, a cast, a dropout (its mask comes from a counter). Such values are most of what a transformer's forward leaves
 * behind, and computing them costs one sweep over memory.
 *
 *   kept         a forward value whose memory backward reads
 *   computable   a graph input, a kept value that stays, or a cheap operator on computable values (at most DEPTH deep)
 *   remat        kept, made by a cheap operator on computable values; outputs, writes and gradients exist anyway: backward reads those
 *
 * The first backward reader of a remat value, through views or directly, is preceded by a clone of its node (phase backward, the same random
 * stream); all backward readers take the clone. The forward value then dies in the forward. A clone only lengthens the lives of kept
 * values, and of those only until a reader of the clone. Casts of graph inputs stay: one low-precision copy of a weight serves the whole step.
 * Kernels are deterministic, so the bits are the same.
 */
#include "passes.h"
#include "sabotage.h"

enum { DEPTH = 4, OPERANDS = 256 };

typedef struct remat {
    const om_graph *g;
    /* per value, at the value whose memory it is: backward reads it; exists anyway; computed again; a graph input that the forward writes */
    uint8_t *kept, *fixed, *again, *written;
    om_id *clone;                  /* per old value: its clone in the new graph, OM_NONE before */
} remat;

static const om_node *remat_node(const om_graph *g, om_id v) {
    om_id n = om_val(g, v)->node;
    return n == OM_NONE ? NULL : &g->nodes.v[n];
}

/* The value whose memory v lies in. */
static om_id remat_source(const om_graph *g, om_id v) {
    const om_node *n;
    while ((n = remat_node(g, v)) && n->op->view) v = om_ins(g, n)[0];
    return v;
}

static bool remat_cheap(const om_node *n) {
    return n->op->kind == OM_K_POINTWISE || om_is(n, layer_norm) || om_is(n, rms_norm) || om_is(n, dropout);
}

static bool remat_computable(const remat *m, om_id v, int depth) {
    const om_graph *g = m->g;
    v = remat_source(g, v);
    const om_node *n = remat_node(g, v);
    if (!n) return !m->written[v] || om_sabotage("remat.written");
    if (n->phase != OM_FORWARD) return false;
    if (m->kept[v] || m->fixed[v] || om_sabotage("remat.computable")) return true;
    if (depth == 0 || v != n->out || !remat_cheap(n)) return false;
    for (int k = 0; k < n->n_in; k++)
        if (om_ins(g, n)[k] != OM_NONE && !remat_computable(m, om_ins(g, n)[k], depth - 1)) return false;
    return true;
}

static bool remat_wanted(const remat *m, const om_node *n) {
    const om_graph *g = m->g;
    if (n->phase != OM_FORWARD || n->op->view || !remat_cheap(n) || !m->kept[n->out]) return false;
    bool act = false;
    for (int k = 0; k < n->n_in; k++) {
        om_id v = om_ins(g, n)[k];
        if (v == OM_NONE) continue;
        if (!remat_computable(m, v, DEPTH)) return false;
        act |= remat_node(g, remat_source(g, v)) != NULL;
    }
    return act;
}

static om_id remat_read(om_rewriter *r, om_id v);

static om_status remat_operands(om_rewriter *r, const om_node *n, om_id *with) {
    if (n->n_in > OPERANDS) return om_fail(r->to->cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OPERANDS);
    for (int k = 0; k < n->n_in; k++)
        with[k] = om_ins(r->from, n)[k] == OM_NONE ? OM_NONE : remat_read(r, om_ins(r->from, n)[k]);
    return r->to->cx->status;
}

/* The value of the new graph that backward reads for the old value v: the forward's, or a clone made now or before. */
static om_id remat_read(om_rewriter *r, om_id v) {
    remat *m = r->arg;
    const om_graph *g = m->g;
    if (m->clone[v] != OM_NONE) return m->clone[v];
    om_id src = remat_source(g, v), with[OPERANDS];
    const om_node *made = remat_node(g, src), *n = remat_node(g, v);
    if (!made || made->phase != OM_FORWARD || m->fixed[src] || (m->kept[src] && !m->again[src])) return r->map[v];
    if (remat_operands(r, n, with) != OM_OK) return OM_NONE;
    r->to->cur_scope = n->scope;
    r->to->cur_phase = OM_BACKWARD;
    m->clone[v] = om_rewrite_node(r, n, with, n->n_in);
    return m->clone[v]; /* v is output 0: views and cheap operators are read there */
}

static om_status remat_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    om_id with[OPERANDS];
    if (n->phase == OM_FORWARD) return om_rewrite_copy(r, id);
    OM_TRY(remat_operands(r, n, with));
    return om_rewrite_copy_with(r, id, with);
}

static om_status remat_run(om_ctx *cx, const om_graph *in, om_graph **out) {
    size_t n = (size_t)in->values.n + 1;
    remat m = {in, om_alloc(cx, n), om_alloc(cx, n), om_alloc(cx, n), om_alloc(cx, n), om_alloc(cx, n * sizeof(om_id))};
    om_status s = m.kept && m.fixed && m.again && m.written && m.clone ? OM_OK : cx->status;
    if (s == OM_OK) {
        memset(m.clone, 0xff, n * sizeof(om_id));
        for (om_id i = 0; i < in->nodes.n; i++) {
            const om_node *x = &in->nodes.v[i];
            if (x->phase == OM_FORWARD) continue;
            for (int k = 0; k < x->n_in; k++)
                if (om_ins(in, x)[k] != OM_NONE) m.kept[remat_source(in, om_ins(in, x)[k])] = 1;
        }
        for (uint32_t i = 0; i < in->outputs.n; i++) m.fixed[remat_source(in, in->outputs.v[i])] = 1;
        for (uint32_t i = 0; i < in->writes.n; i++) {
            m.fixed[remat_source(in, in->writes.v[i].value)] = 1;
            m.written[in->inputs.v[in->writes.v[i].input]] = 1;
        }
        for (uint32_t i = 0; i < in->grads.n; i++)
            if (in->grads.v[i].value != OM_NONE) m.fixed[remat_source(in, in->grads.v[i].value)] = 1;
        for (om_id i = 0; i < in->nodes.n; i++)
            if (remat_wanted(&m, &in->nodes.v[i])) m.again[in->nodes.v[i].out] = 1;
        s = om_rewrite(cx, in, remat_emit, &m, out);
    }
    om_free(cx, m.kept);
    om_free(cx, m.fixed);
    om_free(cx, m.again);
    om_free(cx, m.written);
    om_free(cx, m.clone);
    return s;
}

const om_pass om_pass_remat = {"remat", "what is cheap to compute again is not kept for backward: gelu, norms, casts, dropout",
                               remat_run};
