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

enum { VIEWS = 8 };

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
    if (om_ty(f->g, n->out)->dtype != OM_F32 || n->n_attr + 1 > OM_MAX_ATTR) return OM_NODTYPE;
    const om_node *m = only_reader(f, n->out);
    for (int i = 0; m && is_view(m) && i < VIEWS; i++) m = only_reader(f, m->out);
    return m && om_is(m, cast) && om_is_half(om_ty(f->g, m->out)->dtype) ? om_ty(f->g, m->out)->dtype : OM_NODTYPE;
}

/* The views from v down to a cast of halves to f32, first below v: how many; -1: it is otherwise. *x: what is cast. */
static int read_as(const om_facts *f, om_id v, const om_node **view, om_id *x) {
    for (int n = 0;; n++) {
        const om_node *m = om_maker(f->g, v);
        if (!m || om_ty(f->g, v)->dtype != OM_F32 || !only_reader(f, v)) return -1;
        *x = om_ins(f->g, m)[0];
        if (om_is(m, cast)) {
            const om_node *made = om_maker(f->g, *x); /* elementwise: of its chain with the cast, not rounded between */
            const bool chain = made && made->op->pw && !om_sabotage("norm_casts.chain");
            return om_is_half(om_ty(f->g, *x)->dtype) && !chain ? n : -1;
        }
        if (!is_view(m) || n == VIEWS) return -1;
        view[n] = m;
        v = *x;
    }
}

static om_status norm_emit(om_rewriter *r, om_id id, int to) {
    const om_node *n = &r->from->nodes.v[id];
    om_attr attr[OM_MAX_ATTR];
    om_id in[3];
    for (int i = 0; i < n->n_in; i++)
        in[i] = om_ins(r->from, n)[i] == OM_NONE ? OM_NONE : r->map[om_ins(r->from, n)[i]];
    for (int i = 0; i < n->n_attr; i++) attr[i] = n->attr[i]; /* numbers: none has sizes */
    attr[n->n_attr] = OM_AI("to", to);
    const om_id out = om_make(r->to, n->op, in, n->n_in, attr, n->n_attr + 1);
    if (out == OM_NONE) return r->to->cx->status;
    om_last(r->to)->segment = n->segment;
    om_last(r->to)->again = n->again;
    for (int o = 0; o < n->n_out; o++) r->map[n->out + (om_id)o] = out + (om_id)o;
    return OM_OK;
}

static om_status norm_casts_emit(om_rewriter *r, om_id id) {
    const om_facts *f = r->arg;
    const om_node *n = &r->from->nodes.v[id], *view[VIEWS];
    const om_id *in = om_ins(r->from, n);
    if (is_norm(n)) {
        const int to = written_as(f, n);
        return to ? norm_emit(r, id, to) : om_rewrite_copy(r, id);
    }
    if (om_is(n, cast) && om_ty(r->to, r->map[in[0]])->dtype == om_ty(r->from, n->out)->dtype) { /* done by the norm */
        r->map[n->out] = r->map[in[0]];
        return OM_OK;
    }
    om_id x, operand[OM_MAX_IN];
    int k = is_norm_grad(n) ? read_as(f, in[0], view, &x) : -1;
    if (k < 0) return om_rewrite_copy(r, id);
    om_id dy = r->map[x];
    while (k-- > 0 && dy != OM_NONE) dy = om_rewrite_node(r, view[k], &dy, 1);
    for (int i = 0; i < n->n_in; i++) operand[i] = i == 0 ? dy : in[i] == OM_NONE ? OM_NONE : r->map[in[i]];
    return dy == OM_NONE ? r->to->cx->status : om_rewrite_copy_with(r, id, operand);
}

om_status om_pass_run_norm_casts(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *f = om_facts_new(cx, in);
    om_status s = f ? om_rewrite(cx, in, norm_casts_emit, f, out) : cx->status;
    om_free(cx, f);
    return s;
}
