/* bounded.c - which operators understand a size that only the data knows (bounded sizes: engine.h), one row each.
 *
 * A rule sees the operands' and the results' types and says whether rows stay apart. Where a rule adds up over rows, it
 * names the operands that must be zero past the count: om_make puts trims before these, the verifier looks for them.
 * cross_entropy adds up too, but over rows whose label is ignore_index: past the count labels must be that.
 */
#include "graph/engine.h"
#include "graph/facts.h"

#include <stdio.h>

typedef struct bounded_node { /* a node, made or to be made */
    om_graph *g;
    const om_op *op;
    const om_id *in;
    int n_in;
    const om_attr *attr;
    int n_attr;
    const om_type *out;       /* NULL: not known yet */
    int n_out;
} bounded_node;

/* NULL: rows stay apart; else what is wrong. *sums: bit per operand that must be zero past the count. */
typedef const char *(*bounded_rule)(const bounded_node *n, uint32_t *sums);

static bool dim_bounded(const om_graph *g, om_dim d) { /* in it, or it */
    if (d >= 0 || !g->bounded) return false;
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_SYM) return g->syms.v[e->a].bounded;
    return e->kind != OM_DIM_INT && (dim_bounded(g, e->a) || dim_bounded(g, e->b));
}

int om_bounded_axis(const om_graph *g, const om_type *t, om_dim *size) {
    int axis = -1;
    *size = 0;
    for (int i = 0; i < t->rank; i++) {
        if (!dim_bounded(g, t->dim[i])) continue;
        *size = t->dim[i];
        if (axis >= 0 || g->exprs.v[~*size].kind != OM_DIM_SYM) return -2;
        axis = i;
    }
    return axis;
}

static int axis_of(const bounded_node *n, int i) { /* of operand i */
    om_dim size;
    return i < n->n_in && n->in[i] != OM_NONE ? om_bounded_axis(n->g, om_ty(n->g, n->in[i]), &size) : -1;
}

/* --- rules -------------------------------------------------------------------------------------------- */

static const char *rule_own(const bounded_node *n, uint32_t *sums) { /* its type rule has looked */
    (void)n, (void)sums;
    return NULL;
}

/* Operands broadcast to the first result: a bounded axis lies over the same size, or over a 1. */
static const char *rule_broadcast(const bounded_node *n, uint32_t *sums) {
    (void)sums;
    if (!n->out) return NULL;
    for (int i = 0; i < n->n_in; i++) {
        if (n->in[i] == OM_NONE) continue;
        const om_type *t = om_ty(n->g, n->in[i]);
        for (int k = 0; k < t->rank; k++) {
            const int at = k + n->out->rank - t->rank;
            const om_dim d = t->dim[k], o = at >= 0 ? n->out->dim[at] : -1;
            if (dim_bounded(n->g, d) ? d != o : dim_bounded(n->g, o) && d != 1)
                return "a bounded size meets another size";
        }
    }
    return NULL;
}

static const char *rule_reshape(const bounded_node *n, uint32_t *sums) { /* the same axis between the same products */
    om_dim size, same;
    (void)sums;
    if (!n->out) return NULL;
    const om_type *x = om_ty(n->g, n->in[0]);
    const int from = om_bounded_axis(n->g, x, &size), to = om_bounded_axis(n->g, n->out, &same);
    if (from < 0 || to < 0 || size != same) return "the bounded axis is taken apart or merged with another";
    om_type before = *x, after = *n->out;
    before.rank = (uint8_t)from, after.rank = (uint8_t)to;
    return om_dim_numel(n->g, &before) == om_dim_numel(n->g, &after) ? NULL : "rows are cut in another way";
}

static const char *rule_reduce(const bounded_node *n, uint32_t *sums) {
    const int axis = axis_of(n, 0), rank = om_ty(n->g, n->in[0])->rank;
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "axes");
    bool meets = !a || a->kind != OM_ATTR_DIMS;
    for (uint32_t i = 0; !meets && i < a->n; i++) meets = a->dims[i] == axis;
    if (axis < 0 || axis >= rank || !meets) return NULL;
    *sums |= 1;
    return n->op == &om_op_reduce_sum ? NULL : "it is no sum, and goes over the bounded axis";
}

static const char *rule_axis(const bounded_node *n, uint32_t *sums) { /* along attribute axis */
    const int64_t axis = om_attr_int(n->attr, n->n_attr, "axis", -1);
    for (int i = 0; i < n->n_in; i++)
        if (axis_of(n, i) == axis) return "it goes along the bounded axis";
    return rule_broadcast(n, sums);
}

/* Over the axes from attribute axis on; its gradient adds up over the others (dw, db). */
static const char *rule_norm(const bounded_node *n, uint32_t *sums) {
    const bool grad = n->op == &om_op_layer_norm_grad || n->op == &om_op_rms_norm_grad;
    const int64_t axis = om_attr_int(n->attr, n->n_attr, "axis", -1);
    for (int i = 0; i < n->n_in; i++) {
        const int at = axis_of(n, i);
        if (at >= axis) return "it goes over the bounded axis";
        if (at >= 0 && grad && om_attr_int(n->attr, n->n_attr, "params", 1)) *sums |= 1u << i;
    }
    return NULL;
}

static const char *rule_matmul(const bounded_node *n, uint32_t *sums) {
    const om_type *a = om_ty(n->g, n->in[0]), *b = om_ty(n->g, n->in[1]);
    if (a->rank != 2 || b->rank != 2) return "a product with a bounded size is one of two matrices";
    const om_dim ka = a->dim[1], kb = b->dim[0];
    if (ka != kb && (dim_bounded(n->g, ka) || dim_bounded(n->g, kb))) return "a bounded size meets another size";
    if (dim_bounded(n->g, ka)) *sums |= 3;
    if (n->n_in > 2 && n->in[2] != OM_NONE && om_ty(n->g, n->in[2])->dim[0] != b->dim[1] &&
        (dim_bounded(n->g, b->dim[1]) || dim_bounded(n->g, om_ty(n->g, n->in[2])->dim[0])))
        return "a bounded size meets another size";
    return NULL;
}

/* Past the count, is every label the one that is ignored? */
static bool labels_end(const om_graph *g, om_id labels, int64_t ignore) {
    const om_node *n = om_maker(g, labels);
    return n && om_is(n, compress) && om_node_int(n, "past", 0) == ignore;
}

/* Rows of logits, labels, lse and gradients of logits lie side by side; or (idx) a gradient takes rows. */
static const char *rule_loss(const bounded_node *n, uint32_t *sums) {
    const bool grad = n->op == &om_op_cross_entropy_grad;
    const int x = grad, labels = x + 1;
    const int64_t ignore = om_attr_int(n->attr, n->n_attr, "ignore_index", -100);
    (void)sums;
    if (grad && n->n_in > 6) { /* its type rule has looked */
        for (int i = 0; i < 6; i++)
            if (axis_of(n, i) >= 0) return "rows of bounded operands are not chosen again";
        return NULL;
    }
    if (axis_of(n, x) != 0) return "logits and labels need the same bounded rows";
    om_dim size, other;
    om_bounded_axis(n->g, om_ty(n->g, n->in[x]), &size);
    for (int i = 0; i < n->n_in; i++) {
        if (n->in[i] == OM_NONE || i == x) continue;
        const int at = om_bounded_axis(n->g, om_ty(n->g, n->in[i]), &other);
        const bool row = i == labels || (grad && i == 4);
        const bool own = grad && i == 0 && other == size; /* dloss of each row */
        if (row ? at != 0 || other != size : at >= 0 && !own)
            return "logits and labels need the same bounded rows";
    }
    return labels_end(n->g, n->in[labels], ignore) ? NULL : "past the count its labels are not ignore_index";
}

static const struct { const om_op *op; bounded_rule rule; } rows[] = {
    {&om_op_select_rows, rule_own},
    {&om_op_compress, rule_own},
    {&om_op_restore, rule_own},
    {&om_op_trim, rule_own},
    {&om_op_fill, rule_own},
    {&om_op_permute, rule_own},
    {&om_op_reshape, rule_reshape},
    {&om_op_expand, rule_broadcast},
    {&om_op_stop_grad, rule_broadcast},
    {&om_op_straight_through, rule_broadcast},
    {&om_op_copy, rule_broadcast},
    {&om_op_fused, rule_broadcast},
    {&om_op_reduce_sum, rule_reduce},
    {&om_op_reduce_mean, rule_reduce},
    {&om_op_reduce_max, rule_reduce},
    {&om_op_reduce_min, rule_reduce},
    {&om_op_reduce_prod, rule_reduce},
    {&om_op_softmax, rule_axis},
    {&om_op_softmax_grad, rule_axis},
    {&om_op_log_softmax, rule_axis},
    {&om_op_log_softmax_grad, rule_axis},
    {&om_op_layer_norm, rule_norm},
    {&om_op_layer_norm_grad, rule_norm},
    {&om_op_rms_norm, rule_norm},
    {&om_op_rms_norm_grad, rule_norm},
    {&om_op_matmul, rule_matmul},
    {&om_op_cross_entropy, rule_loss},
    {&om_op_cross_entropy_grad, rule_loss},
};

static bounded_rule rule_of(const om_op *op) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].op == op) return rows[i].rule;
    return op->kind == OM_K_POINTWISE ? rule_broadcast : NULL;
}

/* --- zero past the count ------------------------------------------------------------------------------ */

/* Zero where its operand is. */
static bool keeps_zeros(const om_node *n) {
    return om_is(n, permute) || om_is(n, reshape) || om_is(n, stop_grad) || om_is(n, cast);
}

static bool is_zero_past(const om_graph *g, om_id v) {
    for (;;) {
        const om_node *n = om_maker(g, v);
        if (!n) return false;
        if (om_is(n, compress)) return om_node_int(n, "past", 0) == 0;
        if (om_is(n, trim) || om_is(n, cross_entropy_grad)) return true;
        double x;
        if (om_is(n, fill)) return om_number_of(g, v, &x) && x == 0;
        if (!keeps_zeros(n)) return false;
        v = om_ins(g, n)[0];
    }
}

uint32_t om_bounded_past(om_graph *g, const om_node *n, bool past, uint32_t counted) {
    const bounded_node b = {g, n->op, om_ins(g, n), n->n_in, n->attr, n->n_attr, NULL, 0};
    const bounded_rule rule = rule_of(n->op);
    uint32_t read = 0;
    if (rule) rule(&b, &read);
    const bool grad = om_is(n, cross_entropy_grad), loss = om_is(n, cross_entropy);
    if (loss || grad) read |= 1u << (loss ? 1 : 2);
    read &= ~counted;
    if (past && grad) read |= 1u << 2;
    if (past && keeps_zeros(n)) read |= 1;
    return read;
}

/* Before the views: a trim of a transposed view would be a transposed copy. */
static om_id trim_make(om_graph *g, om_id v) {
    om_dim size;
    const om_node *n = om_maker(g, v);
    if (n && (om_is(n, permute) || om_is(n, reshape))) {
        const om_node view = *n; /* building moves the array */
        const om_id x = trim_make(g, om_ins(g, &view)[0]);
        return om_make(g, view.op, OM_IN(x), view.attr, view.n_attr);
    }
    const int axis = om_bounded_axis(g, om_ty(g, v), &size);
    const om_id count = axis < 0 ? OM_NONE : g->syms.v[g->exprs.v[~size].a].count;
    return om_make(g, &om_op_trim, OM_IN(v, count), OM_ATTRS(OM_AI("axis", axis)));
}

const om_id *om_bounded_operands(om_graph *g, const om_op *op, const om_id *in, int n_in, const om_attr *attr,
                                 int n_attr, om_id *with) {
    const bounded_node n = {g, op, in, n_in, attr, n_attr, NULL, 0};
    const bounded_rule rule = rule_of(op);
    uint32_t sums = 0;
    bool any = false;
    for (int i = 0; i < n_in; i++) any |= axis_of(&n, i) >= 0;
    if (!any || !rule || rule(&n, &sums) || !sums) return in; /* what is wrong is told by the check */
    memcpy(with, in, (size_t)n_in * sizeof *with);
    for (int i = 0; i < n_in && i < 32; i++)
        if (sums >> i & 1 && axis_of(&n, i) >= 0 && !is_zero_past(g, with[i])) with[i] = trim_make(g, with[i]);
    return g->cx->status == OM_OK ? with : NULL;
}

om_status om_bounded_check(om_graph *g, const om_node *n, const om_type *out) {
    const bounded_node b = {g, n->op, om_ins(g, n), n->n_in, n->attr, n->n_attr, n->n_out ? out : NULL, n->n_out};
    const bounded_rule rule = rule_of(n->op);
    const char *why = NULL;
    om_dim size, one = 0;
    uint32_t sums = 0;
    bool any = false;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        if (i < n->n_in && b.in[i] == OM_NONE) continue;
        const int axis = om_bounded_axis(g, i < n->n_in ? om_ty(g, b.in[i]) : &out[i - n->n_in], &one);
        if (axis == -1) continue;
        if (axis == -2) why = "a size is computed from a bounded one, or two axes are bounded";
        any = true, size = one;
    }
    if (!any) return OM_OK;
    if (!why) why = rule ? rule(&b, &sums) : "it does not know such sizes";
    for (int i = 0; i < n->n_in && i < 32 && !why; i++)
        if (sums >> i & 1 && axis_of(&b, i) >= 0 && !is_zero_past(g, b.in[i]))
            why = "it adds up over rows past the count: trim its operand";
    if (!why) return OM_OK;
    char name[64];
    om_dim_print(g, size, name, sizeof name);
    return om_fail(g->cx, OM_UNSUPPORTED, "%s with bounded size %s: %s", n->op->name, name, why);
}

om_status om_bounded_ends(const om_graph *g) {
    om_dim size;
    char name[64];
    for (om_id i = 0; i < g->inputs.n + g->outputs.n + g->writes.n + g->grads.n && g->bounded; i++) {
        const om_id o = i - g->inputs.n, w = o - g->outputs.n, d = w - g->writes.n;
        const om_id v = i < g->inputs.n    ? g->inputs.v[i]
                        : o < g->outputs.n ? g->outputs.v[o]
                        : w < g->writes.n  ? g->writes.v[w].value
                                           : g->grads.v[d].value;
        if (v == OM_NONE || om_bounded_axis(g, om_ty(g, v), &size) == -1) continue;
        om_dim_print(g, size, name, sizeof name);
        return om_fail(g->cx, OM_INVALID,
                       "a graph input, output, write or gradient has the bounded size %s, which the host does not know:"
                       " restore its rows first",
                       name);
    }
    return OM_OK;
}
