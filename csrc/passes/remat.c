/* remat.c - what is cheap to compute again is not kept for backward: gelu from the linear layer's output that its
 * gradient reads anyway, a normalisation from its input, a cast, a dropout (its mask comes from a counter). Such values
 * are most of what a transformer's forward leaves behind, and computing them costs one sweep over memory.
 *
 *   kept         a forward value whose memory backward reads
 *   computable   a graph input, a kept value that stays, or a cheap operator on computable values (at most DEPTH deep)
 *   remat        kept, made by a cheap operator on computable values; outputs, writes and gradients exist anyway:
 *                backward reads those
 *
 * The first backward reader of a remat value, through views or directly, is preceded by a clone of its node (phase
 * backward, the same random stream); all backward readers take the clone. The forward value then dies in the forward. A
 * clone only lengthens the lives of kept values, and of those only until a reader of the clone. Casts of graph inputs
 * stay: one low-precision copy of a weight serves the whole step. Kernels are deterministic, so the bits are the same:
 * node and clone share a number (om_node.again), by which fuse lets both round, or neither, where they stay in
 * registers.
 *
 * Memory level 1 (pass `layers` in place of `remat`) does the same to whole transformer layers, whatever their
 * operators cost:
 *
 *   boundary     the input of a norm whose result reaches an attention before another norm: where a layer begins. It is
 *                kept.
 *   layer        a forward node that reads a boundary, directly or not, and that a later boundary needs. The last layer
 *                is none: backward begins with it, so forgetting its values would save nothing at the peak.
 *
 * What backward reads of a layer is computed again from the boundary before it, when backward comes to the layer;
 * clones are made as they are asked for, so what only the next boundary needs (the last product of a layer) is not
 * computed twice. Left alone: nodes of the host, and nodes that read an input which the forward overwrites. State is
 * written from the forward's own values (the list of writes), never by a clone. This is gradient checkpointing
 * (https://arxiv.org/abs/1604.06174) at the boundaries onnxruntime-training used.
 */
#include "passes/passes.h"
#include "graph/sabotage.h"

enum { DEPTH = 4, OPERANDS = 256 };

typedef struct remat {
    const om_graph *g;
    /* per value, at the value whose memory it is: backward reads it; exists anyway; computed again; a graph input that
     * the forward writes */
    uint8_t *kept, *fixed, *again, *written;
    uint8_t *boundary;             /* per value; level 1 */
    uint8_t *layer;                /* per node: a layer's; level 1 */
    om_id *clone;                  /* per old value: its clone in the new graph, OM_NONE before */
    OM_VEC(om_id) todo;            /* remat_read: values to be cloned, each needed by the one before */
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

/* --- layers ---------------------------------------------------------------------------------------- */

static bool remat_is_norm(const om_node *n) { return om_is(n, layer_norm) || om_is(n, rms_norm); }

static void remat_boundaries(remat *m, uint8_t *attends /* per value: an attention reads it before a norm does */) {
    const om_graph *g = m->g;
    for (om_id i = g->nodes.n; i-- > 0;) {
        const om_node *n = &g->nodes.v[i];
        if (n->phase != OM_FORWARD) continue;
        bool hit = om_is(n, attention) || om_is(n, softmax);
        for (int k = 0; k < n->n_out; k++) hit |= attends[n->out + (om_id)k];
        if (hit && remat_is_norm(n)) m->boundary[remat_source(g, om_ins(g, n)[0])] = 1;
        if (!hit || remat_is_norm(n)) continue;
        for (int k = 0; k < n->n_in; k++)
            if (om_ins(g, n)[k] != OM_NONE) attends[om_ins(g, n)[k]] = 1;
    }
}

static void remat_layers(remat *m, uint8_t *after /* per value: it depends on a boundary */,
                         uint8_t *before /* a boundary depends on it */) {
    const om_graph *g = m->g;
    for (om_id i = g->nodes.n; i-- > 0;) {
        const om_node *n = &g->nodes.v[i];
        bool needed = false;
        for (int k = 0; k < n->n_out; k++) needed |= before[n->out + (om_id)k] || m->boundary[n->out + (om_id)k];
        for (int k = 0; k < n->n_in && needed && n->phase == OM_FORWARD; k++)
            if (om_ins(g, n)[k] != OM_NONE) before[om_ins(g, n)[k]] = 1;
    }
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        bool follows = false, ahead = false, able = n->phase == OM_FORWARD && n->op->kind != OM_K_HOST;
        for (int k = 0; k < n->n_in; k++) {
            om_id v = om_ins(g, n)[k];
            if (v == OM_NONE) continue;
            follows |= after[v] || m->boundary[remat_source(g, v)];
            able &= !m->written[remat_source(g, v)] || om_sabotage("layers.written");
        }
        for (int k = 0; k < n->n_out; k++) {
            after[n->out + (om_id)k] = follows;
            ahead |= before[n->out + (om_id)k];
        }
        m->layer[i] = able && follows && ahead;
    }
}

static bool remat_layer_value(const remat *m, om_id v) { /* made inside a layer and not where the next begins */
    om_id n = om_val(m->g, v)->node;
    return m->layer && n != OM_NONE && m->layer[n] && !m->boundary[v];
}

/* --- rewriting ------------------------------------------------------------------------------------- */

/* Does the new graph have what backward reads for the old value v: the forward's own, or a clone made before? */
static bool remat_found(const om_rewriter *r, om_id v, om_id *found) {
    const remat *m = r->arg;
    if ((*found = m->clone[v]) != OM_NONE) return true;
    om_id src = remat_source(m->g, v);
    const om_node *made = remat_node(m->g, src);
    *found = r->map[v];
    return !made || made->phase != OM_FORWARD || m->fixed[src] || (m->kept[src] && !m->again[src]) ||
           /* kept from now on */
           (m->layer && !m->again[src] && !remat_layer_value(m, src) && !remat_computable(m, src, DEPTH));
}

/* The value of the new graph that backward reads for the old value v, cloned now if need be, after the operands it
 * needs: as deep as the graph is, so with a stack of its own. */
static om_id remat_read(om_rewriter *r, om_id v) {
    remat *m = r->arg;
    om_ctx *cx = r->to->cx;
    om_id found, with[OPERANDS];
    if (remat_found(r, v, &found)) return found;
    m->todo.n = 0;
    om_id *todo = OM_PUSH(cx, &m->todo);
    if (!todo) return OM_NONE;
    *todo = v;
    while (m->todo.n) {
        const om_node *n = remat_node(m->g, m->todo.v[m->todo.n - 1]);
        int k = 0;
        if (n->n_in > OPERANDS)
            return om_fail(cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OPERANDS),
                   OM_NONE;
        for (; k < n->n_in; k++) {
            om_id x = om_ins(r->from, n)[k];
            with[k] = OM_NONE;
            if (x == OM_NONE || remat_found(r, x, &with[k])) continue;
            if (!(todo = OM_PUSH(cx, &m->todo))) return OM_NONE;
            *todo = x;
            break;
        }
        if (k < n->n_in) continue;
        r->to->cur_scope = n->scope;
        r->to->cur_phase = OM_BACKWARD;
        om_id out = om_rewrite_node(r, n, with, n->n_in);
        if (out == OM_NONE) return OM_NONE;
        if (r->map[n->out] != OM_NONE) {
            const om_id first = om_val(r->to, r->map[n->out])->node;
            r->to->nodes.v[first].again = om_last(r->to)->again = first + 1;
        }
        for (k = 0; k < n->n_out; k++) m->clone[n->out + (om_id)k] = out + (om_id)k;
        m->todo.n--;
    }
    return m->clone[v];
}

static om_status remat_operands(om_rewriter *r, const om_node *n, om_id *with) {
    if (n->n_in > OPERANDS)
        return om_fail(r->to->cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OPERANDS);
    for (int k = 0; k < n->n_in; k++)
        with[k] = om_ins(r->from, n)[k] == OM_NONE ? OM_NONE : remat_read(r, om_ins(r->from, n)[k]);
    return r->to->cx->status;
}

static om_status remat_layers_find(om_ctx *cx, remat *m) {
    size_t n = (size_t)m->g->values.n + 1;
    uint8_t *attends = om_alloc(cx, n), *after = om_alloc(cx, n), *before = om_alloc(cx, n);
    m->boundary = om_alloc(cx, n);
    m->layer = om_alloc(cx, (size_t)m->g->nodes.n + 1);
    om_status s = attends && after && before && m->boundary && m->layer ? OM_OK : cx->status;
    if (s == OM_OK) {
        remat_boundaries(m, attends);
        remat_layers(m, after, before);
        for (om_id v = 0; v < m->g->values.n; v++) {
            if (m->kept[v] && remat_layer_value(m, v)) m->again[v] = 1;
            if (m->boundary[v]) m->kept[v] = 1, m->again[v] = 0;
        }
    }
    om_free(cx, attends);
    om_free(cx, after);
    om_free(cx, before);
    return s;
}

static om_status remat_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    om_id with[OPERANDS];
    if (n->phase == OM_FORWARD) return om_rewrite_copy(r, id);
    OM_TRY(remat_operands(r, n, with));
    return om_rewrite_copy_with(r, id, with);
}

/* v is handed out. Of a view of a part (keys and values inside a joint projection) a copy is; what it is a part of need
 * not stay. */
static void remat_fix(remat *m, om_id v) {
    om_graph *g = (om_graph *)m->g; /* may intern sizes */
    om_id src = remat_source(g, v);
    if (om_dim_numel(g, om_ty(g, v)) == om_dim_numel(g, om_ty(g, src))) m->fixed[src] = 1;
}

static om_status remat_level(om_ctx *cx, const om_graph *in, int level, om_graph **out) {
    size_t n = (size_t)in->values.n + 1;
    remat m = {.g = in,
               .kept = om_alloc(cx, n),
               .fixed = om_alloc(cx, n),
               .again = om_alloc(cx, n),
               .written = om_alloc(cx, n),
               .clone = om_alloc(cx, n * sizeof(om_id))};
    om_status s = m.kept && m.fixed && m.again && m.written && m.clone ? OM_OK : cx->status;
    if (s == OM_OK) {
        memset(m.clone, 0xff, n * sizeof(om_id));
        for (om_id i = 0; i < in->nodes.n; i++) {
            const om_node *x = &in->nodes.v[i];
            if (x->phase == OM_FORWARD) continue;
            for (int k = 0; k < x->n_in; k++)
                if (om_ins(in, x)[k] != OM_NONE) m.kept[remat_source(in, om_ins(in, x)[k])] = 1;
        }
        for (uint32_t i = 0; i < in->outputs.n; i++) remat_fix(&m, in->outputs.v[i]);
        for (uint32_t i = 0; i < in->writes.n; i++) {
            remat_fix(&m, in->writes.v[i].value);
            m.written[in->inputs.v[in->writes.v[i].input]] = 1;
        }
        for (uint32_t i = 0; i < in->grads.n; i++)
            if (in->grads.v[i].value != OM_NONE) remat_fix(&m, in->grads.v[i].value);
        for (om_id i = 0; i < in->nodes.n; i++)
            if (remat_wanted(&m, &in->nodes.v[i])) m.again[in->nodes.v[i].out] = 1;
    }
    if (s == OM_OK && level > 0) s = remat_layers_find(cx, &m);
    if (s == OM_OK) s = om_rewrite(cx, in, remat_emit, &m, out);
    om_free(cx, m.todo.v);
    om_free(cx, m.boundary);
    om_free(cx, m.layer);
    om_free(cx, m.kept);
    om_free(cx, m.fixed);
    om_free(cx, m.again);
    om_free(cx, m.written);
    om_free(cx, m.clone);
    return s;
}

static om_status remat_run(om_ctx *cx, const om_graph *in, om_graph **out) { return remat_level(cx, in, 0, out); }
static om_status layers_run(om_ctx *cx, const om_graph *in, om_graph **out) { return remat_level(cx, in, 1, out); }

const om_pass om_pass_remat = {
    "remat", "what is cheap to compute again is not kept for backward: gelu, norms, casts, dropout", remat_run};
const om_pass om_pass_layers = {
    "layers", "remat, and transformer layers are computed again from their inputs (memory level 1)", layers_run};
