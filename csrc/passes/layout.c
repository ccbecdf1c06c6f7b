/* layout.c - attention writes its result in the order in which the next layer reads it.
 *
 *   permute(attention(q, k, v)) to (..., time, heads, size)   ->   the same of attention with seq_first = 1, whose
 *   permute back and forth simplify
 *                                                                drops; the reshape to (..., time, heads * size) after
 *                                                                it is then a view
 *
 * Without it the result is kept twice between forward and backward: as attention's gradient reads it, and copied for
 * the layer after it. The gradients of q, k and v come in that order too, as the split or the three layers before
 * attention have them.
 */
#include "graph/facts.h"
#include "passes/passes.h"

static bool layout_swaps(const om_node *n) { /* heads and time, nothing else */
    const om_attr *perm = om_is(n, permute) ? om_attr_get(n->attr, n->n_attr, "perm") : NULL;
    if (!perm || perm->n < 3) return false;
    for (uint32_t i = 0; i < perm->n; i++) {
        om_dim want = i == perm->n - 3 ? perm->n - 2 : i == perm->n - 2 ? perm->n - 3 : i;
        if (perm->dims[i] != want) return false;
    }
    return true;
}

static bool layout_wanted(const om_facts *f, om_id v) { /* somebody reads it the other way round */
    const om_span u = om_users(f, v);
    for (uint32_t i = 0; i < u.n; i++)
        if (layout_swaps(&f->g->nodes.v[u.node[i]])) return true;
    return false;
}

static om_status layout_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    om_graph *g = r->to;
    OM_TRY(om_rewrite_copy(r, id));
    if (!om_is(n, attention) || !layout_wanted(r->arg, n->out) || om_node_int(n, "seq_first", 0)) return OM_OK;
    om_node *m = om_last(g);
    om_attr *attr = om_arena_alloc(&g->arena, (m->n_attr + 1u) * sizeof *attr);
    om_type out[2];
    if (!attr) return g->cx->status;
    memcpy(attr, m->attr, m->n_attr * sizeof *attr);
    attr[m->n_attr] = OM_AI("seq_first", 1);
    m->attr = attr;
    m->n_attr++;
    OM_TRY(m->op->infer(g, m, out));
    om_id y = m->out;
    om_val(g, y)->type = out[0];
    r->map[n->out] = om_b_transpose(g, y, -3, -2);
    return g->cx->status;
}

om_status om_pass_run_layout(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *facts = om_facts_new(cx, in);
    om_status s = facts ? om_rewrite(cx, in, layout_emit, facts, out) : cx->status;
    om_free(cx, facts);
    return s;
}
