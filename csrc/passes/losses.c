/* losses.c - a cross-entropy of logits in half precision reads them where they are.
 *
 *   cross_entropy(views(cast(x)), labels, weight?)      x: bf16 or f16, cast to f32
 *   -> cross_entropy(views(x), labels, weight?) {wide=1}
 *
 * Under autocast, and in models that call float() on their logits, the f32 copy is the largest tensor of a step, and its
 * gradient another. The kernels compute in f32 either way, and the gradient is rounded to x's type once, where the cast's
 * gradient would: the bits are the same. Cast and views must have no other reader, or the sum of their gradients would be
 * rounded at another place.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/passes.h"

enum { VIEWS = 8 };

/* The views from the logits v down to a cast of halves, first below v: their number; -1: it is otherwise. *x: what is
 * cast. */
static int losses_chain(const om_facts *f, om_id v, const om_node **view, om_id *x) {
    for (int n = 0;; n++) {
        const om_node *m = om_maker(f->g, v);
        const bool once = om_used_once_live(f, v) || om_sabotage("losses.once");
        if (!m || m->phase != OM_FORWARD || m->n_in != 1 || m->n_out != 1 || !once || f->held[v]) return -1;
        *x = om_ins(f->g, m)[0];
        if (om_is(m, cast)) return om_ty(f->g, v)->dtype == OM_F32 && om_is_half(om_ty(f->g, *x)->dtype) ? n : -1;
        if (!m->op->view || n == VIEWS) return -1;
        view[n] = m;
        v = *x;
    }
}

static om_status losses_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id], *view[VIEWS];
    om_attr attr[OM_MAX_ATTR];
    om_id x, in[OM_MAX_IN];
    if (!om_is(n, cross_entropy) || n->n_attr + 1 > OM_MAX_ATTR || n->phase != OM_FORWARD) return om_rewrite_copy(r, id);
    int k = losses_chain(r->arg, om_ins(r->from, n)[0], view, &x);
    if (k < 0) return om_rewrite_copy(r, id);
    om_id at = r->map[x];
    while (k-- > 0) at = om_rewrite_node(r, view[k], &at, 1);
    in[0] = at;
    for (int i = 1; i < n->n_in; i++) in[i] = om_ins(r->from, n)[i] == OM_NONE ? OM_NONE : r->map[om_ins(r->from, n)[i]];
    for (int i = 0; i < n->n_attr; i++) attr[i] = n->attr[i]; /* numbers: none has sizes */
    attr[n->n_attr] = OM_AI("wide", 1);
    const om_id out = om_make(r->to, n->op, in, n->n_in, attr, n->n_attr + 1);
    for (int o = 0; o < n->n_out && out != OM_NONE; o++) r->map[n->out + (om_id)o] = out + (om_id)o;
    return r->to->cx->status;
}

om_status om_pass_run_losses(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *f = om_facts_new(cx, in);
    om_status s = f ? om_rewrite(cx, in, losses_emit, f, out) : cx->status;
    om_free(cx, f);
    return s;
}
