/* remat.c - backward computes again what a set of flags says (remat.h), and the passes that do what a policy wants.
 *
 * The first backward reader of a flagged value, through views or directly, is preceded by a clone of its node (phase
 * backward, the same random stream), after clones of what that needs and is flagged; all later backward readers take
 * the clone, also of the node's other outputs. The forward value then dies in the forward. A clone only lengthens the
 * lives of kept values, and of those only until a reader of the clone. What nobody in the backward asks for is not
 * computed, whatever its flag.
 *
 * Checkpoints within checkpoints: what lies in an inner one is computed once for readers in the outer one, and anew for
 * its own, so that it need not lie there from the first to the last. So a value has a clone for each number of
 * checkpoints that it shares with who reads it; one is enough where that is 0 or 1, or there are none.
 *
 * Kernels are deterministic, so the bits are the same: node and clone share a number (om_node.again), by which fuse
 * lets both round, or neither, where they stay in registers. State is written from the forward's own values (the list
 * of writes), never by a clone.
 */
#include "graph/sabotage.h"
#include "passes/passes.h"
#include "passes/remat.h"

#include <stdio.h>

typedef struct remat {
    const om_facts *f;
    const uint8_t *again;
    om_id *clone;                  /* per shared checkpoints and old value: the clone, OM_NONE before */
    const char *region;            /* of who reads: checkpoints */
    OM_VEC(om_id) todo;            /* remat_read: values to be cloned, each needed by the one before */
} remat;

/* --- what may be flagged ---------------------------------------------------------------------------- */

/* Does operand k of the node matter to a clone? The running statistics of a batch_norm that trains go into the new ones
 * alone; where no node reads those, nothing that is taken from a clone depends on them. */
static bool remat_matters(const om_facts *f, const om_node *n, int k) {
    if (!om_is(n, batch_norm) || !om_node_int(n, "training", 0) || k < 3) return true;
    for (om_id v = n->out + 1; v <= n->out + 2; v++) {
        const om_span s = om_holders(f, v);
        for (uint32_t i = 0; i < s.n; i++)
            if (f->live[s.node[i]] && !f->g->nodes.v[s.node[i]].op->view) return true;
    }
    return false;
}

const char *om_remat_illegal(const om_facts *f, om_id v) {
    const om_graph *g = f->g;
    const om_node *n = om_maker(g, v);
    if (!n) return "no node computes it: it is a graph input or a constant";
    if (n->phase != OM_FORWARD) return n->phase == OM_UPDATE ? "it is an update" : "it is a value of the backward";
    if (n->op->view) return "it is a view: the flag belongs to the value whose memory it is";
    if (n->op->kind == OM_K_HOST) return "the host computes it";
    const bool draws = n->op->random && (om_node_float(n, "p", 0) > 0 || om_node_float(n, "dropout", 0) > 0);
    if (draws && !n->rng) return "it is random and has no stream";
    if (f->held[v] & OM_HELD_WRITE) return "a write stores it: state is computed once";
    for (int k = 0; k < n->n_in; k++) {
        const om_id in = om_ins(g, n)[k] == OM_NONE ? OM_NONE : f->root[om_ins(g, n)[k]];
        for (uint32_t i = 0; i < g->writes.n && in != OM_NONE && remat_matters(f, n, k); i++)
            if (g->inputs.v[g->writes.v[i].input] == in) return "it is computed from what the forward overwrites";
    }
    return NULL;
}

static om_status remat_check(om_ctx *cx, const om_facts *f, const uint8_t *again) {
    const om_graph *g = f->g;
    for (om_id v = 0; v < g->values.n; v++) {
        const char *why = again[v] ? om_remat_illegal(f, v) : NULL;
        if (!why) continue;
        const om_value *x = om_val(g, v);
        const om_node *n = om_maker(g, v);
        char number[16];
        snprintf(number, sizeof number, "v%u", v);
        return om_fail(cx, OM_INVALID, "%s (output %d of %s) cannot be computed again in backward: %s; leave it kept",
                       x->name ? x->name : number, x->out, n ? n->op->name : "none", why);
    }
    return OM_OK;
}

/* --- rewriting ------------------------------------------------------------------------------------- */

/* The clone of the old value v that m->region reads. */
static om_id *remat_clone(const remat *m, om_id v) {
    const om_graph *g = m->f->g;
    const int shared = om_region_common(om_region(g, om_maker(g, m->f->root[v])), m->region);
    return &m->clone[(shared > 1 && !om_sabotage("remat.nested") ? (size_t)shared - 1 : 0) * g->values.n + v];
}

/* Does the new graph have what backward reads for the old value v: the forward's own, or a clone made before? */
static bool remat_found(const om_rewriter *r, om_id v, om_id *found) {
    const remat *m = r->arg;
    if ((*found = *remat_clone(m, v)) != OM_NONE) return true;
    *found = r->map[v];
    return !m->again[m->f->root[v]];
}

/* The value of the new graph that backward reads for the old value v, cloned now if need be, after the operands it
 * needs: as deep as the graph is, so with a stack of its own. */
static om_id remat_read(om_rewriter *r, om_id v) {
    remat *m = r->arg;
    om_ctx *cx = r->to->cx;
    om_id found, with[OM_MAX_IN];
    if (remat_found(r, v, &found)) return found;
    m->todo.n = 0;
    om_id *todo = OM_PUSH(cx, &m->todo);
    if (!todo) return OM_NONE;
    *todo = v;
    while (m->todo.n) {
        const om_node *n = om_maker(r->from, m->todo.v[m->todo.n - 1]);
        int k = 0;
        if (n->n_in > OM_MAX_IN)
            return om_fail(cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OM_MAX_IN),
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
        for (k = 0; k < n->n_out; k++) *remat_clone(m, n->out + (om_id)k) = out + (om_id)k;
        m->todo.n--;
    }
    return *remat_clone(m, v);
}

/* What an elementwise node reads in place of v, a clone that widens what is kept in half precision: a cast of its own,
 * in the registers of its chain, so that none is stored for several chains. */
static om_id remat_widened(om_rewriter *r, om_id v) {
    const om_node *c = om_maker(r->to, v);
    if (!c || c->phase != OM_BACKWARD || !c->again || !om_is(c, cast)) return v;
    const om_id x = om_ins(r->to, c)[0];
    const bool widens = om_is_half(om_ty(r->to, x)->dtype) && om_ty(r->to, v)->dtype == OM_F32;
    if (!widens) return v;
    r->to->cur_scope = c->scope;
    r->to->cur_phase = OM_BACKWARD;
    return om_b_cast(r->to, x, OM_F32);
}

static om_status remat_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    om_id with[OM_MAX_IN];
    if (n->phase != OM_BACKWARD) return om_rewrite_copy(r, id);
    if (n->n_in > OM_MAX_IN)
        return om_fail(r->to->cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OM_MAX_IN);
    ((remat *)r->arg)->region = om_region(r->from, n);
    for (int k = 0; k < n->n_in; k++)
        with[k] = om_ins(r->from, n)[k] == OM_NONE ? OM_NONE : remat_read(r, om_ins(r->from, n)[k]);
    for (int k = 0; k < n->n_in && n->op->kind == OM_K_POINTWISE && !om_is(n, cast); k++) {
        int i = 0;
        while (i < k && om_ins(r->from, n)[i] != om_ins(r->from, n)[k]) i++;
        with[k] = i < k ? with[i] : remat_widened(r, with[k]);
    }
    if (r->to->cx->status != OM_OK) return r->to->cx->status;
    return om_rewrite_copy_with(r, id, with);
}

om_status om_remat_apply(om_ctx *cx, const om_facts *f, const uint8_t *again, om_graph **out) {
    int depth = 1; /* of checkpoints */
    for (uint32_t i = 0; i < f->g->scopes.n; i++) {
        const int at = om_region_depth(f->g->scopes.v[i].region);
        if (at > depth) depth = at;
    }
    const size_t bytes = ((size_t)f->g->values.n * (size_t)depth + 1) * sizeof(om_id);
    *out = NULL;
    OM_TRY(remat_check(cx, f, again));
    remat m = {.f = f, .again = again, .clone = om_alloc(cx, bytes)};
    if (!m.clone) return cx->status;
    memset(m.clone, 0xff, bytes);
    om_status s = om_rewrite(cx, f->g, remat_emit, &m, out);
    om_free(cx, m.todo.v);
    om_free(cx, m.clone);
    return s;
}

/* --- the passes ------------------------------------------------------------------------------------- */

static om_status remat_by(om_ctx *cx, const om_graph *in, om_recompute policy, om_graph **out) {
    om_facts *f = om_facts_new(cx, in);
    uint8_t *again = om_alloc(cx, (size_t)in->values.n + 1);
    om_status s = f && again ? OM_OK : cx->status;
    if (s == OM_OK) s = om_remat_policies[policy].choose(cx, &(om_remat_ask){in, f}, again);
    if (s == OM_OK) s = om_remat_apply(cx, f, again, out);
    om_free(cx, again);
    om_free(cx, f);
    return s;
}

om_status om_pass_run_remat(om_ctx *cx, const om_graph *in, om_graph **out) {
    return remat_by(cx, in, OM_RECOMPUTE_CHEAP, out);
}
om_status om_pass_run_layers(om_ctx *cx, const om_graph *in, om_graph **out) {
    return remat_by(cx, in, OM_RECOMPUTE_LAYERS, out);
}
