/* norm_casts.c - norms write the half precision that products want, and their gradients read it.
 *
 *   cast(views(layer_norm(x, w, b)))         x: f32, the cast is to a half   ->   views(layer_norm(x, w, b) {to=half})
 *   layer_norm_grad(views(cast(dy)), ...)    dy: a half, cast to f32         ->   layer_norm_grad(views(dy), ...)
 *
 * and so for rms_norm. Under autocast norms compute in f32 between products in half precision, and what stands between
 * them was written in f32 and read again. Norms compute in the compute type either way and round once, where the cast
 * did: the bits are the same. So dy must be rounded as it is: the result of an elementwise node would be part of one
 * chain with the cast, which rounds nothing between (fuse.c). Norm, views and cast must have no other reader. Comes
 * after what is computed again has been decided: a norm and the clone that computes it again are seen through each for
 * itself.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/passes.h"

static bool is_norm(const om_node *n) { return om_is(n, layer_norm) || om_is(n, rms_norm); }
static bool is_norm_grad(const om_node *n) { return om_is(n, layer_norm_grad) || om_is(n, rms_norm_grad); }

/* The only node that reads v, and v is nothing else's; NULL: it is otherwise. */
static const om_node *only_reader(const om_facts *f, om_id v) {
    const om_span users = om_users(f, v);
    const om_node *one = NULL;
    for (uint32_t i = 0; i < users.n; i++) {
        if (!f->live[users.node[i]]) continue;
        if (one && !om_sabotage("norm_casts.once")) return NULL;
        if (!one) one = &f->g->nodes.v[users.node[i]];
    }
    return f->held[v] && !om_sabotage("norm_casts.held") ? NULL : one;
}
static bool is_view(const om_node *n) { return n->op->view && n->n_in == 1 && n->n_out == 1; }

/* The half precision that the result of norm n is cast to and is read in alone; OM_NODTYPE: none */
static int written_as(const om_facts *f, const om_node *n) {
    if (om_ty(f->g, n->out)->dtype != OM_F32) return OM_NODTYPE;
    const om_node *m = only_reader(f, n->out);
    for (int i = 0; m && is_view(m) && i < OM_PASS_VIEWS; i++) m = only_reader(f, m->out);
    return m && om_is(m, cast) && om_is_half(om_ty(f->g, m->out)->dtype) ? om_ty(f->g, m->out)->dtype : OM_NODTYPE;
}

/* The views between norm gradient n and the cast of the halves x that it can read instead: how many; -1: it can not.
 * What an elementwise node makes is of one chain with the cast, which does not round it between. */
static int read_as(const om_facts *f, const om_node *n, const om_node **view, om_id *x) {
    const int k = om_pass_cast_below(f, om_ins(f->g, n)[0], view, x, "norm_casts.once");
    const om_node *made = k < 0 ? NULL : om_maker(f->g, *x);
    return made && made->op->pw && !om_sabotage("norm_casts.chain") ? -1 : k;
}

static om_status norm_casts_emit(om_rewriter *r, om_id id) {
    const om_facts *f = r->arg;
    const om_node *n = &r->from->nodes.v[id], *view[OM_PASS_VIEWS];
    const om_id *in = om_ins(r->from, n);
    om_id x, operand[OM_MAX_IN];
    if (om_is(n, cast) && om_ty(r->to, r->map[in[0]])->dtype == om_ty(r->from, n->out)->dtype) { /* done by the norm */
        r->map[n->out] = r->map[in[0]];
        return OM_OK;
    }
    const int to = is_norm(n) ? written_as(f, n) : OM_NODTYPE;
    int k = is_norm_grad(n) ? read_as(f, n, view, &x) : -1;
    if (!to && k < 0) return om_rewrite_copy(r, id);
    for (int i = 0; i < n->n_in; i++) operand[i] = in[i] == OM_NONE ? OM_NONE : r->map[in[i]];
    if (to) return om_rewrite_copy_more(r, id, operand, OM_AI("to", to));
    operand[0] = r->map[x];
    while (k-- > 0 && operand[0] != OM_NONE) operand[0] = om_rewrite_node(r, view[k], operand, 1);
    return operand[0] == OM_NONE ? r->to->cx->status : om_rewrite_copy_with(r, id, operand);
}

om_status om_pass_run_norm_casts(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *f = om_facts_new(cx, in);
    om_status s = f ? om_rewrite(cx, in, norm_casts_emit, f, out) : cx->status;
    om_free(cx, f);
    return s;
}
