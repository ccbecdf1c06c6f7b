/* label_parts.c - a loss over a part of the positions is one over all of them, of which the others are ignored:
 *
 *   cross_entropy(rows of l[:, a:b], labels)   ->   cross_entropy(rows of l, labels with ignore_index around them)
 *
 * So is the usual shift, logits[:, :-1] against labels[:, 1:]. Rows that are ignored add nothing, and the order of the
 * others stays: the same bits. The copy of the logits is gone, and so is that of their gradient between zeros; and rows
 * of labels are rows of the product before them, as label_rows.c and label_grads.c want them.
 *
 * So are labels whose number of rows has another name (s2 * s3 beside s0 * s1, when nothing in the graph compares
 * them): a reshape gives them that of the logits, and fails where the loss would.
 */
#include "graph/facts.h"
#include "passes/labels.h"
#include "passes/passes.h"

typedef struct part { om_id slice, casts; int lead, axis; } part; /* casts: node that casts behind it; OM_NONE: none */

static bool part_find(const om_facts *f, const om_node *loss, part *p) {
    om_graph *g = (om_graph *)f->g; /* may intern sizes */
    if (!om_is(loss, cross_entropy) || !om_labels_fit(g, loss)) return false;
    for (int i = 1; i < 3; i++)
        if (om_users(f, loss->out + (om_id)i).n || f->held[loss->out + (om_id)i]) return false;
    const om_node *n = om_maker(g, om_ins(g, loss)[0]);
    p->casts = OM_NONE;
    while (n && (om_is(n, reshape) || (om_is(n, cast) && p->casts == OM_NONE))) {
        const om_id x = om_ins(g, n)[0];
        if (om_is(n, cast)) p->casts = om_val(g, n->out)->node;
        if (!om_labels_lead(g, om_ty(g, x), om_ty(g, om_ins(g, loss)[1])->dim[0])) return false;
        n = om_maker(g, x);
    }
    if (!n || !om_is(n, slice) || om_node_int(n, "step", 1) != 1) return false;
    p->slice = om_val(g, n->out)->node;
    p->axis = (int)om_node_int(n, "axis", -1);
    p->lead = om_labels_lead(g, om_ty(g, n->out), om_ty(g, om_ins(g, loss)[1])->dim[0]);
    return p->axis < p->lead && p->lead < om_ty(g, n->out)->rank;
}

static om_dim bound_of(om_rewriter *r, const om_node *n, const char *name, om_dim none) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    return !a ? none : a->kind == OM_ATTR_DIMS ? om_dim_copy(r->to, r->from, a->dims[0]) : a->i;
}

/* The loss of x and labels in the place of node id. */
static om_status loss_put(om_rewriter *r, const om_node *loss, om_id x, om_id labels) {
    const om_id *in = om_ins(r->from, loss), weight = loss->n_in > 2 && in[2] != OM_NONE ? r->map[in[2]] : OM_NONE;
    om_graph *g = r->to;
    g->cur_scope = loss->scope;
    g->cur_phase = loss->phase;
    const om_id y = om_rewrite_node(r, loss, OM_IN(x, labels, weight));
    for (int i = 0; i < 3 && y != OM_NONE; i++) r->map[loss->out + (om_id)i] = y + (om_id)i;
    if (y != OM_NONE && om_val(r->from, loss->out)->name)
        om_val(g, y)->name = om_arena_str(&g->arena, om_val(r->from, loss->out)->name);
    return g->cx->status;
}

static om_status label_parts_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *loss = &f->nodes.v[id];
    om_graph *g = r->to;
    part p;
    const om_id *in = om_ins(f, loss);
    if (!part_find(r->arg, loss, &p)) {
        const om_dim rows = om_is(loss, cross_entropy) ? om_ty(f, in[0])->dim[0] : 0;
        if (!om_is(loss, cross_entropy) || om_ty(f, in[1])->rank != 1 || om_ty(f, in[1])->dim[0] == rows ||
            om_val(f, in[1])->role == OM_CONST)
            return om_rewrite_copy(r, id);
        const om_dim shape = om_dim_copy(g, f, rows);
        return loss_put(r, loss, r->map[in[0]], om_b_reshape(g, r->map[in[1]], &shape, 1));
    }
    const om_node *cut = &f->nodes.v[p.slice];
    om_id x = r->map[om_ins(f, cut)[0]], labels = r->map[in[1]];
    const om_type all = *om_ty(g, x), some = *om_ty(g, r->map[cut->out]);
    if (p.casts != OM_NONE) x = om_b_cast(g, x, om_ty(f, f->nodes.v[p.casts].out)->dtype);
    om_dim shape[2] = {1, om_ty(g, r->map[in[0]])->dim[1]}, lo[OM_RANK] = {0}, hi[OM_RANK] = {0};
    for (int i = 0; i < p.lead; i++) shape[0] = om_dim_mul(g, shape[0], all.dim[i]);
    lo[p.axis] = bound_of(r, cut, "start", 0);
    hi[p.axis] = om_dim_sub(g, all.dim[p.axis], bound_of(r, cut, "end", all.dim[p.axis]));
    labels = om_b_reshape(g, labels, some.dim, p.lead);
    labels = om_make(g, &om_op_pad, OM_IN(labels),
                     OM_ATTRS(OM_AD("lo", lo, p.lead), OM_AD("hi", hi, p.lead),
                              OM_AF("value", (double)om_node_int(loss, "ignore_index", -100))));
    labels = om_b_reshape(g, labels, shape, 1);
    return loss_put(r, loss, om_b_reshape(g, x, shape, 2), labels);
}

om_status om_pass_run_label_parts(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *facts = om_facts_new(cx, in);
    om_status s = facts ? om_rewrite(cx, in, label_parts_emit, facts, out) : cx->status;
    om_free(cx, facts);
    return s;
}
