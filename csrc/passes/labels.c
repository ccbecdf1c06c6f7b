/* labels.c - rows whose label counts (labels.h). */
#include "passes/labels.h"
#include "graph/device.h"
#include "graph/facts.h"
#include "ops/loss.h"

#include <stdio.h>

/* Fewer classes are not worth choosing rows for. */
enum { CLASSES = 256 };
/* With more rows that count than this, all are computed: then nothing is copied but rows of the head's input. */
static const double MOST = 0.9;

bool om_labels_fit(const om_graph *g, const om_node *loss) {
    const bool grad = om_is(loss, cross_entropy_grad);
    if (!grad && !om_is(loss, cross_entropy)) return false;
    const om_id *in = om_ins(g, loss);
    const om_type *x = om_ty(g, in[grad]), *labels = om_ty(g, in[grad + 1]);
    om_dim size;
    if (g->cx->all_rows || !g->cx->device->counted) return false;
    if (om_node_int(loss, "reduction", OM_LOSS_MEAN) == OM_LOSS_NONE) return false;
    if (grad && loss->n_in != 6) return false;
    if (om_val(g, in[grad + 1])->role == OM_CONST || x->dim[0] != labels->dim[0] || labels->dim[0] == 1) return false;
    return x->dim[1] >= CLASSES && om_bounded_axis(g, x, &size) == -1;
}

int om_labels_lead(om_graph *g, const om_type *t, om_dim rows) {
    om_dim n = 1;
    for (int i = 0; i < t->rank; i++)
        if ((n = om_dim_mul(g, n, t->dim[i])) == rows) return i + 1;
    return 0;
}

bool om_labels_apart(const om_graph *g, const om_node *n, int lead, int *at) {
    if (n->op->kind != OM_K_POINTWISE || n->op->random || n->n_out != 1) return false;
    const om_type *y = om_ty(g, n->out);
    *at = -1;
    for (int i = 0; i < n->n_in; i++) {
        const om_type *t = om_ty(g, om_ins(g, n)[i]);
        bool rows = t->rank == y->rank, shared = true;
        for (int k = 0; k < lead; k++) {
            const int axis = k - (y->rank - t->rank);
            rows = rows && t->dim[k] == y->dim[k];
            shared &= axis < 0 || t->dim[axis] == 1;
        }
        if (rows && *at < 0) *at = i;
        else if (!shared) return false;
    }
    return *at >= 0;
}

om_label_rows om_labels_select_true(om_graph *g, om_id mask) {
    om_label_rows r = {.labels = OM_NONE};
    if (g->cx->status != OM_OK) return r;
    const om_type t = *om_ty(g, mask);
    char name[24];
    bool taken = true;
    for (uint32_t i = 0; taken; i++) {
        snprintf(name, sizeof name, "c%u", i);
        taken = false;
        for (uint32_t k = 0; k < g->syms.n; k++) taken |= !strcmp(g->syms.v[k].name, name);
    }
    r.all = t.dim[0];
    r.size = om_dim_sym(g, name);
    r.idx = om_make(g, &om_op_select_rows, OM_IN(mask), OM_ATTRS(OM_AD("count", &r.size, 1), OM_AF("most", MOST)));
    r.count = r.idx + 1;
    return r;
}

om_label_rows om_labels_select(om_graph *g, om_id labels, int64_t ignore) {
    if (g->cx->status != OM_OK) return (om_label_rows){.labels = labels};
    const om_id none = om_scalar(g, om_ty(g, labels)->dtype, (double)ignore);
    om_label_rows r = om_labels_select_true(g, om_b_bin(g, &om_op_ne, labels, none));
    r.labels = labels, r.ignore = ignore;
    return r;
}

om_id om_labels_take(om_graph *g, const om_label_rows *r, om_id x, int lead) {
    if (g->cx->status != OM_OK) return OM_NONE;
    om_type t = *om_ty(g, x);
    t.dim[lead - 1] = r->all;
    x = om_b_reshape(g, x, t.dim + lead - 1, t.rank - lead + 1);
    return om_make(g, &om_op_compress, OM_IN(x, r->idx, r->count), NULL, 0);
}

om_id om_labels_put(om_graph *g, const om_label_rows *r, om_id y, const om_type *t) {
    if (g->cx->status != OM_OK) return OM_NONE;
    om_type rows = *om_ty(g, y);
    rows.dim[0] = r->all;
    const om_attr shape = OM_AD("shape", rows.dim, rows.rank);
    const om_id x = om_make(g, &om_op_restore, OM_IN(y, r->idx, r->count), &shape, 1);
    return om_b_reshape(g, x, t->dim, t->rank);
}

om_id om_labels_taken(om_graph *g, const om_label_rows *r) {
    return om_make(g, &om_op_compress, OM_IN(r->labels, r->idx, r->count), OM_ATTRS(OM_AI("past", r->ignore)));
}

om_id om_labels_shape(om_graph *g, const om_label_rows *r, om_id y, const om_type *t, int lead) {
    om_type rest = *t;
    rest.dim[lead - 1] = r->size;
    return om_b_reshape(g, y, rest.dim + lead - 1, rest.rank - lead + 1);
}

om_id om_labels_node(om_rewriter *r, const om_node *n, int lead, int at, om_id y) {
    om_graph *g = r->to;
    om_id in[OM_MAX_IN];
    const int rest = om_ty(r->from, n->out)->rank - lead;
    for (int i = 0; i < n->n_in; i++) {
        const om_id v = r->map[om_ins(r->from, n)[i]];
        const om_type t = *om_ty(g, v); /* ones in front of what all rows share go */
        const int drop = t.rank > rest ? t.rank - rest : 0;
        in[i] = i == at ? y : om_b_reshape(g, v, t.dim + drop, t.rank - drop);
    }
    return om_rewrite_node(r, n, in, n->n_in);
}
