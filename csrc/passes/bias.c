/* bias.c - matmul(a, b) + c becomes matmul(a, b, c) when c is a vector along the last axis and nobody else reads the
 * product: the bias then rides in the product's epilogue. This is how a captured Linear (Transpose, MatMul, Add)
 * becomes one product; the transposition stays a view.
 */
#include "graph/facts.h"
#include "passes/passes.h"

static om_status bias_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *n = &f->nodes.v[id];
    const om_facts *facts = r->arg;
    om_graph *g = r->to;
    for (int side = 0; om_is(n, add) && side < 2; side++) {
        om_id p = om_ins(f, n)[side], c = om_ins(f, n)[1 - side];
        const om_type *pt = om_ty(f, p), *ct = om_ty(f, c);
        const om_node *m = om_maker(f, p);
        if (!m || !om_is(m, matmul) || !om_used_once(facts, p) || (m->n_in == 3 && om_ins(f, m)[2] != OM_NONE) ||
            m->phase != n->phase)
            continue;
        if (ct->rank != 1 || ct->dtype != pt->dtype || ct->dim[0] != pt->dim[pt->rank - 1] ||
            !om_pass_same_type(pt, om_ty(f, n->out)))
            continue;
        om_id y = om_make(g, m->op, OM_IN(r->map[om_ins(f, m)[0]], r->map[om_ins(f, m)[1]], r->map[c]), m->attr,
                          m->n_attr);
        r->map[n->out] = y; /* the product alone is dead now */
        if (y != OM_NONE && om_val(f, n->out)->name)
            om_val(g, y)->name = om_arena_str(&g->arena, om_val(f, n->out)->name);
        return g->cx->status;
    }
    return om_rewrite_copy(r, id);
}

om_status om_pass_run_bias(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *facts = om_facts_new(cx, in);
    om_status s = facts ? om_rewrite(cx, in, bias_emit, facts, out) : cx->status;
    om_free(cx, facts);
    return s;
}
