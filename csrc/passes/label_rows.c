/* label_rows.c - a head runs on the rows whose label counts, where nobody but the loss reads its logits.
 *
 *   h -> matmul (w, bias) -> casts, scales, views -> cross_entropy(labels, ignore_index)
 *
 * becomes the same over compress(h) and compress(labels): a row of the loss depends on its own row of h, and rows that
 * are ignored add nothing to the sum, nor to what it is divided by. The order of the sum stays; so does the loss, bit
 * for bit where the product's rows do (its last tile of rows, if it is not full, rounds otherwise). Gradients follow
 * from the operators' own rules: restore puts rows of zeros between those of h, and the products for weights add up
 * fewer rows. A pass of the forward before gradients are built, of a variant's copy.
 *
 * Every value on the way must have one reader and be no output; logits that are one are left to label_grads.c.
 */
#include "graph/facts.h"
#include "passes/labels.h"
#include "passes/passes.h"

enum { CHAIN = 16 };

typedef struct head { /* from the loss up to the product */
    om_id node[CHAIN];
    int lead[CHAIN], at[CHAIN], n; /* of each one's result; the operand that has the rows */
} head;

static bool head_find(const om_facts *f, const om_node *loss, head *h) {
    om_graph *g = (om_graph *)f->g; /* may intern sizes */
    if (!om_is(loss, cross_entropy) || loss->phase != OM_FORWARD || !om_labels_fit(g, loss)) return false;
    for (int i = 1; i < 3; i++)
        if (om_users(f, loss->out + (om_id)i).n || f->held[loss->out + (om_id)i]) return false;
    const om_dim rows = om_ty(g, om_ins(g, loss)[1])->dim[0];
    om_id v = om_ins(g, loss)[0];
    int lead = 1;
    for (h->n = 0; h->n < CHAIN; v = om_ins(g, &g->nodes.v[h->node[h->n]])[h->at[h->n]], h->n++) {
        const om_node *n = om_maker(g, v);
        if (!n || !om_used_once_live(f, v)) return false;
        int *at = &h->at[h->n];
        *at = 0;
        h->node[h->n] = om_val(g, v)->node;
        h->lead[h->n] = lead;
        if (om_is(n, matmul)) {
            const om_id *in = om_ins(g, n);
            h->n++;
            return om_ty(g, v)->rank == lead + 1 && om_ty(g, in[0])->rank == lead + 1 && om_ty(g, in[1])->rank == 2;
        }
        if (om_is(n, reshape)) lead = om_labels_lead(g, om_ty(g, om_ins(g, n)[0]), rows);
        else if (!om_labels_apart(g, n, lead, at)) return false;
        if (!lead) return false;
    }
    return false;
}

static om_status label_rows_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *loss = &f->nodes.v[id];
    om_graph *g = r->to;
    head h;
    if (!head_find(r->arg, loss, &h)) return om_rewrite_copy(r, id);
    const om_id *in = om_ins(f, loss);
    const om_label_rows rows = om_labels_select(g, r->map[in[1]], om_node_int(loss, "ignore_index", -100));
    om_id y = OM_NONE;
    for (int i = h.n; i-- > 0;) {
        const om_node *n = &f->nodes.v[h.node[i]];
        g->cur_scope = n->scope;
        if (om_is(n, matmul)) {
            const om_id *of = om_ins(f, n), bias = n->n_in > 2 && of[2] != OM_NONE ? r->map[of[2]] : OM_NONE;
            y = om_labels_take(g, &rows, r->map[of[0]], h.lead[i]);
            y = om_make(g, n->op, OM_IN(y, r->map[of[1]], bias), n->attr, n->n_attr);
        } else if (om_is(n, reshape)) {
            y = om_labels_shape(g, &rows, y, om_ty(g, r->map[n->out]), h.lead[i]);
        } else {
            y = om_labels_node(r, n, h.lead[i], h.at[i], y);
        }
    }
    g->cur_scope = loss->scope;
    const om_id weight = loss->n_in > 2 && in[2] != OM_NONE ? r->map[in[2]] : OM_NONE;
    y = om_rewrite_node(r, loss, OM_IN(y, om_labels_taken(g, &rows), weight));
    for (int i = 0; i < 3 && y != OM_NONE; i++) r->map[loss->out + (om_id)i] = y + (om_id)i;
    if (y != OM_NONE && om_val(f, loss->out)->name)
        om_val(g, y)->name = om_arena_str(&g->arena, om_val(f, loss->out)->name);
    return g->cx->status;
}

om_status om_pass_run_label_rows(om_ctx *cx, const om_graph *in, om_graph **out) {
    om_facts *facts = om_facts_new(cx, in);
    om_status s = facts ? om_rewrite(cx, in, label_rows_emit, facts, out) : cx->status;
    om_free(cx, facts);
    return s;
}
