/* losses.c - a cross-entropy of logits in half precision reads them where they are.
 *
 *   cross_entropy(views(cast(x)), labels, weight?)      x: bf16 or f16, cast to f32
 *   -> cross_entropy(views(x), labels, weight?) {wide=1}
 *
 * Under autocast, and in models that call float() on their logits, the f32 copy is the largest tensor of a step, and
 * its gradient another. The kernels compute in f32 either way, and the gradient is rounded to x's type once, where the
 * cast's gradient would: the bits are the same. Cast and views must have no other reader, or the sum of their gradients
 * would be rounded at another place.
 */
#include "graph/facts.h"
#include "passes/passes.h"

static om_status losses_emit(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id], *view[OM_PASS_VIEWS];
    om_id x, in[OM_MAX_IN];
    if (!om_is(n, cross_entropy) || n->phase != OM_FORWARD) return om_rewrite_copy(r, id);
    int k = om_pass_cast_below(r->arg, om_ins(r->from, n)[0], view, &x, "losses.once");
    if (k < 0) return om_rewrite_copy(r, id);
    om_id at = r->map[x];
    while (k-- > 0) at = om_rewrite_node(r, view[k], &at, 1);
    in[0] = at;
    for (int i = 1; i < n->n_in; i++)
        in[i] = om_ins(r->from, n)[i] == OM_NONE ? OM_NONE : r->map[om_ins(r->from, n)[i]];
    return om_rewrite_copy_more(r, id, in, OM_AI("wide", 1));
}

om_status om_pass_run_losses(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *f = om_facts_new(cx, in);
    om_status s = f ? om_rewrite(cx, in, losses_emit, f, out) : cx->status;
    om_free(cx, f);
    return s;
}
