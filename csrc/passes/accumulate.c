/* accumulate.c - sums of gradients without the zeros: what autodiff writes as x + (zeros with y at some places) is
 * written into x.
 *
 *   add(x, gather_grad(dy, idx))                     -> gather_grad(dy, idx, x)        a tied embedding: no dense (v,
 *                                                    d) zeros
 *   add(x, scatter(zeros, idx, y) that adds)         -> scatter(x, idx, y)
 *   add(..., slice_put(a), slice_put(b), ...)        -> concat(a, b, ...)              the gradient of a split, when
 *   the slices tile
 *                                                                                      the axis; what else is added is
 *                                                                                      added after
 *
 * The zeros and the sum each cost a sweep over the whole tensor; the rewritten form may work in place. A term must have
 * no other reader, and adding zero must change nothing, which holds for all but the sign of a zero.
 * Every add is tried as the top of a sum; what is made for an inner one is dead once the outer one is made.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/passes.h"

enum { TERMS = 64 };

typedef struct sum { om_id term[TERMS]; int n, adds; } sum;

/* Both operands have the type of the result: no broadcasting. */
static bool plain_add(const om_graph *g, const om_node *n) {
    return n && om_is(n, add) && om_pass_same_type(om_ty(g, n->out), om_ty(g, om_ins(g, n)[0])) &&
           om_pass_same_type(om_ty(g, n->out), om_ty(g, om_ins(g, n)[1]));
}

/* Leaves of the tree of adds under v, left to right; an add read elsewhere, or of the other phase, is a leaf. False:
 * too many. */
static bool sum_collect(const om_facts *f, om_id v, bool top, uint8_t phase, sum *s) {
    const om_graph *g = f->g;
    const om_node *n = om_maker(g, v);
    /* TERMS adds make more than TERMS leaves: no need to go on down */
    if (plain_add(g, n) && n->phase == phase && (top || om_used_once(f, v)))
        return ++s->adds < TERMS && sum_collect(f, om_ins(g, n)[0], false, phase, s) &&
               sum_collect(f, om_ins(g, n)[1], false, phase, s);
    if (s->n == TERMS) return false;
    s->term[s->n++] = v;
    return true;
}

static om_dim bound(const om_node *n, const char *name) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    return !a ? -1 : a->kind == OM_ATTR_DIMS && a->n == 1 ? a->dims[0] : a->kind == OM_ATTR_INT ? a->i : -1;
}

/* Among the terms, slices that follow one another from 0 to the end of one axis: indices into terms in order; 0 =
 * none. */
static int sum_tiles(const om_facts *facts, const sum *s, int *order, int *axis) {
    const om_graph *g = facts->g;
    for (int first = 0; first < s->n; first++) {
        const om_node *f = om_maker(g, s->term[first]);
        if (!f || !om_is(f, slice_put) || bound(f, "start") != 0) continue;
        *axis = (int)om_node_int(f, "axis", 0);
        om_dim size = om_ty(g, f->out)->dim[*axis], at = 0;
        int n = 0;
        bool used[TERMS] = {0};
        while (at != size) {
            int k = 0;
            for (; k < s->n; k++) {
                const om_node *p = om_maker(g, s->term[k]);
                if (!used[k] && p && om_is(p, slice_put) && om_used_once(facts, s->term[k]) &&
                    om_node_int(p, "axis", 0) == *axis && om_node_int(p, "step", 1) == 1 && bound(p, "start") == at &&
                    bound(p, "end") != at)
                    break;
            }
            if (k == s->n) break;
            used[k] = true;
            order[n++] = k;
            at = bound(om_maker(g, s->term[k]), "end");
        }
        const bool whole = at == size;
        if (n > 1 && (whole || om_sabotage("accumulate.tiles"))) return n;
    }
    return 0;
}

/* A node that adds into zeros, read by nobody else. */
static bool adds_into_zeros(const om_facts *f, om_id v) {
    const om_graph *g = f->g;
    const om_node *n = om_maker(g, v);
    double zero;
    if (!n || !om_used_once(f, v)) return false;
    if (om_is(n, gather_grad)) return n->n_in < 3 || om_ins(g, n)[2] == OM_NONE;
    if (!(om_is(n, scatter_elements) || om_is(n, scatter_nd)) || om_node_int(n, "reduce", 0) != 1) return false;
    return om_number_of(g, om_ins(g, n)[0], &zero) && zero == 0;
}

static om_status accumulate_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *n = &f->nodes.v[id];
    const om_facts *facts = r->arg;
    om_graph *g = r->to;
    sum s = {.n = 0};
    if (!plain_add(f, n) || !sum_collect(facts, n->out, true, n->phase, &s)) return om_rewrite_copy(r, id);

    int order[TERMS], axis, n_tiles = sum_tiles(facts, &s, order, &axis), n_into = 0;
    bool done[TERMS] = {0}, into[TERMS] = {0};
    for (int i = 0; i < s.n; i++) n_into += into[i] = adds_into_zeros(facts, s.term[i]);
    if (!n_tiles && !n_into) return om_rewrite_copy(r, id);

    om_id y = OM_NONE;
    if (n_tiles) {
        om_id part[TERMS];
        for (int i = 0; i < n_tiles; i++) {
            part[i] = r->map[om_ins(f, om_maker(f, s.term[order[i]]))[0]];
            done[order[i]] = true;
        }
        y = om_make(g, &om_op_concat, part, n_tiles, OM_ATTRS(OM_AI("axis", axis)));
    }
    for (int i = 0; i < s.n; i++) { /* ordinary terms, in their order */
        const bool ordinary = !done[i] && !into[i];
        if (!ordinary || (n_tiles && om_sabotage("accumulate.term"))) continue;
        y = y == OM_NONE ? r->map[s.term[i]] : om_b_bin(g, &om_op_add, y, r->map[s.term[i]]);
    }
    for (int i = 0; i < s.n; i++) {
        if (done[i] || !into[i]) continue;
        if (y == OM_NONE) { /* nothing to add into yet: this one makes its own zeros */
            y = r->map[s.term[i]];
            continue;
        }
        const om_node *p = om_maker(f, s.term[i]);
        const om_id *in = om_ins(f, p);
        if (om_is(p, gather_grad)) y = om_rewrite_node(r, p, OM_IN(r->map[in[0]], r->map[in[1]], y));
        else y = om_rewrite_node(r, p, OM_IN(y, r->map[in[1]], r->map[in[2]]));
    }
    r->map[n->out] = y;
    if (y != OM_NONE && om_val(f, n->out)->name && !om_val(g, y)->name)
        om_val(g, y)->name = om_arena_str(&g->arena, om_val(f, n->out)->name);
    return g->cx->status;
}

om_status om_pass_run_accumulate(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *facts = om_facts_new(cx, in);
    om_status s = facts ? om_rewrite(cx, in, accumulate_emit, facts, out) : cx->status;
    om_free(cx, facts);
    return s;
}
