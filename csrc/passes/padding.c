/* padding.c - transformer layers run on the rows that somebody sees: not on padding.
 *
 *   x (b, t, d) -> matmul, norms, elementwise, residuals ...    ->    the same over compress(x), (c0, d)
 *
 * unseen.c says of which values the rows outside of a set may hold anything; of the nodes that make such values, those
 * that make row i of rows i of their operands are computed for the rows of the set: matrix products, and what follows
 * from them. restore puts rows back where a position is asked for: before attention, and before whoever sees all rows.
 * Its gradient is compress, and the other way round, so the backward follows from the operators' own rules.
 *
 * Where a mask is added, attention is told each sample's first and last key that is there (kv_start, kv_end). Where a
 * mask of bools hides keys it then also hides queries that are left out: their result is zero, nobody reads it,
 * and tiles in which nothing is visible are skipped.
 *
 * The set is computed in front of the first node that needs it, from labels and masks alone. Heads before a loss are
 * left to label_rows.c: fewer rows have a label. A pass of the forward before gradients are built, of a variant's copy.
 */
#include "graph/device.h"
#include "graph/sabotage.h"
#include "passes/labels.h"
#include "passes/masks/masks.h"
#include "passes/passes.h"
#include "passes/unseen.h"

#include <stdio.h>

typedef struct om_bounds { om_id from, to; } om_bounds; /* keys of a sample, i64 (batch); OM_NONE: not made */

typedef struct padding {
    om_unseen u;
    uint8_t *region;       /* per node: over chosen rows */
    uint8_t *deep;         /* per value: a node of the region is behind it */
    om_id *rows;           /* per value: its chosen rows, in the new graph */
    om_label_rows *chosen; /* per group */
    om_id *keep;           /* per group: the set, bool (rows) */
    om_bounds *bounds;     /* per reader */
    om_id *mask, *of;      /* per value: a mask that hides queries too, and those of which group */
    uint8_t *made;
    bool cones;            /* masks and labels are there */
} padding;

/* --- which nodes -------------------------------------------------------------------------------------------- */

static bool each_row(const om_node *n) {
    return (n->op->pw && !n->op->random) || om_is(n, stop_grad) || om_is(n, copy) || om_is(n, reshape) ||
           om_is(n, layer_norm) || om_is(n, rms_norm) || om_is(n, softmax) || om_is(n, log_softmax);
}

/* The product before a loss, and nothing else. */
static void head_mark(const padding *s, om_id loss, uint8_t *head) {
    const om_graph *g = s->u.f->g;
    om_id v = om_ins(g, &g->nodes.v[loss])[0];
    const om_node *n;
    for (int depth = 0; depth < 16 && (n = om_maker(g, v)) && om_unseen_group(&s->u, v) != OM_NONE; depth++) {
        if (om_is(n, matmul)) head[om_val(g, v)->node] = 1;
        if (!each_row(n)) return;
        om_id from = OM_NONE;
        for (int i = 0; i < n->n_in && from == OM_NONE; i++)
            if (om_unseen_group(&s->u, om_ins(g, n)[i]) != OM_NONE) from = om_ins(g, n)[i];
        v = from;
    }
}

static om_status region_find(om_ctx *cx, padding *s) {
    const om_graph *g = s->u.f->g;
    uint8_t *head = om_alloc(cx, (size_t)g->nodes.n + 1);
    if (!head) return cx->status;
    for (om_id i = 0; i < s->u.readers.n; i++)
        if (s->u.readers.v[i].kind == OM_READER_LOSS) head_mark(s, s->u.readers.v[i].node, head);
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        const om_id group = s->u.f->live[i] && n->n_out ? om_unseen_group(&s->u, n->out) : OM_NONE;
        if (group == OM_NONE || head[i]) continue;
        bool deep = false, first = false;
        for (int k = 0; k < n->n_in; k++) {
            const om_id v = om_ins(g, n)[k];
            const bool has = v != OM_NONE && s->deep[v] && om_unseen_group(&s->u, v) == group;
            deep |= has;
            first |= has && k == 0 && om_maker(g, v) && s->region[om_val(g, v)->node];
        }
        const bool flat = s->u.value[n->out].form == OM_ROWS_FLAT;
        s->region[i] = flat && (om_is(n, matmul) || (each_row(n) && (om_is(n, reshape) ? first : deep)));
        s->deep[n->out] = s->region[i] || deep;
    }
    om_free(cx, head);
    return OM_OK;
}

/* --- the set of rows ------------------------------------------------------------------------------------------ */

static om_id reduced(om_graph *g, const om_op *op, om_id x, om_dim axis) {
    return om_make(g, op, OM_IN(x), OM_ATTRS(OM_AD("axes", &axis, 1), OM_AI("keepdims", 1)));
}

static om_id either(om_graph *g, om_id a, om_id b) {
    return a == OM_NONE ? b : b == OM_NONE ? a : om_b_bin(g, &om_op_or, a, b);
}

static om_id any_of(om_graph *g, om_id x, om_dim axis) { /* of bools */
    return om_b_cast(g, reduced(g, &om_op_reduce_max, om_b_cast(g, x, OM_I64), axis), OM_BOOL);
}

static om_id number(om_rewriter *r, const om_attr *a, om_dim none) {
    const om_dim d = !a ? none : a->kind == OM_ATTR_DIMS ? om_dim_copy(r->to, r->from, a->dims[0]) : a->i;
    return om_make(r->to, &om_op_fill, NULL, 0,
                   OM_ATTRS(OM_AD("shape", NULL, 0), OM_AI("dtype", OM_I64), OM_AD("value", &d, 1)));
}

/* Where a reader's mask lets keys through, (batch, time). */
static om_id keys_seen(om_rewriter *r, const om_reader *x, const om_dim *shape) {
    om_graph *g = r->to;
    om_id m = r->map[x->mask];
    if (g->cx->status != OM_OK) return OM_NONE;
    const int dtype = om_ty(g, m)->dtype;
    if (dtype != OM_BOOL) m = om_b_bin(g, &om_op_gt, m, om_scalar(g, dtype, MX_HIDE));
    else if (x->negated) m = om_b_un(g, &om_op_not, m);
    return om_b_reshape(g, m, shape, 2);
}

/* Samples with a query among those read that sees no key: (batch or 1, 1). */
static om_id samples_blind(om_rewriter *r, const om_reader *x, om_id keep) {
    om_graph *g = r->to;
    om_id m = r->map[om_ins(r->from, &r->from->nodes.v[x->node])[3]];
    if (g->cx->status != OM_OK) return OM_NONE;
    const om_type t = *om_ty(g, m);
    const bool is_bool = t.dtype == OM_BOOL;
    const om_dim shape[2] = {t.dim[0], t.dim[2]};
    if (is_bool) m = om_b_cast(g, m, OM_I64);
    m = reduced(g, &om_op_reduce_min, reduced(g, &om_op_reduce_max, m, 3), 1); /* every head sees one */
    m = is_bool ? om_b_cast(g, m, OM_BOOL) : om_b_bin(g, &om_op_gt, m, om_scalar(g, t.dtype, MX_HIDE / 2));
    m = om_b_un(g, &om_op_not, om_b_reshape(g, m, shape, 2));
    if (x->queries == x->group) m = om_b_bin(g, &om_op_and, m, keep);
    return any_of(g, m, 1);
}

static bool reader_again(const padding *s, om_id i) { /* as one before it */
    const om_reader *r = &s->u.readers.v[i];
    const om_graph *g = s->u.f->g;
    for (om_id k = 0; k < i; k++) {
        const om_reader *o = &s->u.readers.v[k];
        if (o->kind == r->kind && r->kind == OM_READER_KEYS && o->group == r->group && o->mask == r->mask &&
            o->negated == r->negated && o->checked == r->checked && o->causal == r->causal &&
            (o->queries == o->group) == (r->queries == r->group) &&
            (!r->checked || om_ins(g, &g->nodes.v[o->node])[3] == om_ins(g, &g->nodes.v[r->node])[3]))
            return true;
    }
    return false;
}

static om_id places(om_graph *g, om_dim time) { /* i64 (1, time) */
    const om_attr attr[] = {OM_AD("shape", &time, 1), OM_AI("dtype", OM_I64), OM_AI("start", 0), OM_AI("step", 1)};
    return om_b_reshape(g, om_make(g, &om_op_iota, NULL, 0, attr, 4), (om_dim[]){1, time}, 2);
}

static om_id keep_make(om_rewriter *r, const padding *s, om_id group) {
    om_graph *g = r->to;
    const om_group *x = &s->u.groups.v[group];
    const om_dim shape[2] = {om_dim_copy(g, r->from, x->batch), om_dim_copy(g, r->from, x->time)};
    const om_id place = places(g, shape[1]);
    om_id keep = om_b_expand(g, om_scalar(g, OM_BOOL, 0), shape, 2), upto = OM_NONE;
    bool own = false, causal = true; /* attention among these rows; all of it causal */
    for (om_id i = 0; i < s->u.readers.n; i++) {
        const om_reader *d = &s->u.readers.v[i];
        const om_node *n = &r->from->nodes.v[d->node];
        if (d->group != group || reader_again(s, i)) continue;
        if (d->kind == OM_READER_LOSS && !om_sabotage("padding.labels")) {
            const om_id labels = r->map[om_ins(r->from, n)[1]];
            if (g->cx->status != OM_OK) return OM_NONE;
            const double ignore = (double)om_node_int(n, "ignore_index", -100);
            const om_id has = om_b_bin(g, &om_op_ne, labels, om_scalar(g, om_ty(g, labels)->dtype, ignore));
            keep = either(g, keep, om_b_reshape(g, has, shape, 2));
        } else if (d->kind == OM_READER_SLICE) {
            const om_id from = number(r, om_attr_get(n->attr, n->n_attr, "start"), 0);
            const om_id to = number(r, om_attr_get(n->attr, n->n_attr, "end"), shape[1]);
            const om_id in = om_b_bin(g, &om_op_and, om_b_bin(g, &om_op_ge, place, from),
                                      om_b_bin(g, &om_op_lt, place, to));
            keep = either(g, keep, in);
        } else if (d->kind != OM_READER_KEYS) {
            continue;
        } else if (d->queries != group) {
            keep = either(g, keep, keys_seen(r, d, shape));
        } else {
            own = true, causal &= d->causal;
        }
    }
    if (own && causal) { /* up to the last row that is read so far */
        const om_id at = om_make(g, &om_op_where, OM_IN(keep, place, om_scalar(g, OM_I64, -1)), NULL, 0);
        upto = om_b_bin(g, &om_op_ge, reduced(g, &om_op_reduce_max, at, 1), place);
    }
    for (om_id i = 0; i < s->u.readers.n; i++) {
        const om_reader *d = &s->u.readers.v[i];
        if (d->group != group || d->kind != OM_READER_KEYS || d->queries != group || reader_again(s, i)) continue;
        om_id keys = d->mask == OM_NONE ? upto : keys_seen(r, d, shape);
        if (om_sabotage("padding.keys")) continue;
        if (d->mask != OM_NONE && upto != OM_NONE) keys = om_b_bin(g, &om_op_and, keys, upto);
        keep = either(g, keep, keys);
    }
    const om_id before = keep;
    for (om_id i = 0; i < s->u.readers.n; i++)
        if (s->u.readers.v[i].group == group && s->u.readers.v[i].checked && !reader_again(s, i) &&
            !om_sabotage("padding.blind"))
            keep = either(g, keep, samples_blind(r, &s->u.readers.v[i], before));
    const om_dim rows = om_dim_copy(g, r->from, x->rows);
    return om_b_reshape(g, keep, &rows, 1);
}

/* The group's rows, chosen when they are first asked for; what their set is made of comes with it. */
static const om_label_rows *chosen(om_rewriter *r, om_id group) {
    padding *s = r->arg;
    const om_id scope = r->to->cur_scope;
    for (om_id i = 0; i < r->from->nodes.n && !s->cones && r->to->cx->status == OM_OK; i++)
        if (s->u.cone[i] && s->u.f->live[i] && r->map[r->from->nodes.v[i].out] == OM_NONE) om_rewrite_copy(r, i);
    s->cones = true;
    r->to->cur_scope = scope;
    if (!s->made[group]) {
        s->keep[group] = keep_make(r, s, group);
        s->chosen[group] = om_labels_select_true(r->to, s->keep[group]);
    }
    s->made[group] = 1;
    return &s->chosen[group];
}

/* --- nodes over them -------------------------------------------------------------------------------------------- */

static om_id operand_rows(om_rewriter *r, const om_label_rows *rows, om_id v, int lead) {
    padding *s = r->arg;
    if (s->rows[v] == OM_NONE) s->rows[v] = om_labels_take(r->to, rows, r->map[v], lead);
    return s->rows[v];
}

/* An operand of an elementwise node: rows of its own, one for all rows, or something between, which is spread out. */
static om_id operand_each(om_rewriter *r, const om_label_rows *rows, const om_node *n, om_id v) {
    const padding *s = r->arg;
    const om_unseen_value *form = &s->u.value[n->out];
    om_graph *g = r->to;
    om_type y = *om_ty(r->from, n->out);
    const om_type t = *om_ty(r->from, v);
    if (om_unseen_apart(r->from, v, &y, form)) return operand_rows(r, rows, v, form->at);
    const int rest = y.rank - form->at, drop = t.rank > rest ? t.rank - rest : 0;
    bool shared = true;
    for (int i = 0; i < drop; i++) shared &= t.dim[i] == 1;
    om_type now = *om_ty(g, r->map[v]);
    if (shared) return om_b_reshape(g, r->map[v], now.dim + drop, now.rank - drop);
    for (int i = 0; i < y.rank; i++) {
        const int at = i - (y.rank - t.rank);
        const om_dim d = i < form->at ? y.dim[i] : at < 0 ? 1 : t.dim[at];
        now.dim[i] = om_dim_copy(g, r->from, d);
    }
    return om_labels_take(g, rows, om_b_expand(g, r->map[v], now.dim, y.rank), form->at);
}

static om_id region_node(om_rewriter *r, const om_node *n, const om_label_rows *rows) {
    const padding *s = r->arg;
    const om_id *in = om_ins(r->from, n);
    const int lead = s->u.value[n->out].at;
    om_graph *g = r->to;
    om_id of[OM_MAX_IN];
    om_attr attr[OM_MAX_ATTR];
    om_type y = *om_ty(r->from, n->out);
    if (om_is(n, reshape)) {
        for (int i = 0; i < y.rank; i++) y.dim[i] = om_dim_copy(g, r->from, y.dim[i]);
        return om_labels_shape(g, rows, s->rows[in[0]], &y, lead);
    }
    if (n->op->pw) {
        for (int i = 0; i < n->n_in; i++) of[i] = operand_each(r, rows, n, in[i]);
        return om_rewrite_node(r, n, of, n->n_in);
    }
    for (int i = 1; i < n->n_in; i++) of[i] = in[i] == OM_NONE ? OM_NONE : r->map[in[i]];
    of[0] = operand_rows(r, rows, in[0], s->u.value[in[0]].form ? s->u.value[in[0]].at : lead);
    if (!om_attr_get(n->attr, n->n_attr, "axis")) return om_rewrite_node(r, n, of, n->n_in);
    for (int i = 0; i < n->n_attr && n->n_attr <= OM_MAX_ATTR; i++) {
        attr[i] = n->attr[i];
        if (!strcmp(attr[i].name, "axis")) attr[i].i -= lead - 1;
    }
    return om_make(g, n->op, of, n->n_in, attr, n->n_attr);
}

/* A mask of bools by which attention leaves out queries; OM_NONE: it has none. Of one mask one, for one group. */
static om_id mask_queries(om_rewriter *r, const om_node *n) {
    padding *s = r->arg;
    const om_id *in = om_ins(r->from, n), group = om_unseen_group(&s->u, n->out);
    om_graph *g = r->to;
    if (!om_is(n, attention) || n->n_in < 4 || in[3] == OM_NONE || group == OM_NONE || !s->made[group]) return OM_NONE;
    const om_type t = *om_ty(r->from, in[3]), q = *om_ty(r->from, in[0]);
    if (t.dtype != OM_BOOL || t.rank != 4 || om_node_int(n, "nan_rows", 0) != 0) return OM_NONE;
    if (s->mask[in[3]] == OM_NONE) {
        const om_dim shape[4] = {om_dim_copy(g, r->from, q.dim[0]), 1, om_dim_copy(g, r->from, q.dim[2]), 1};
        const om_id rows = om_b_reshape(g, s->keep[group], shape, 4);
        s->mask[in[3]] = om_b_bin(g, &om_op_and, r->map[in[3]], rows);
        s->of[in[3]] = group;
    }
    return s->of[in[3]] == group ? s->mask[in[3]] : OM_NONE;
}

/* Of an attention whose mask is added: each sample's first key that is there and one past its last, so that tiles of
 * padding alone are skipped; where a query that is read sees none, all (it is a mean over them). False: none. */
static bool bounds_keys(om_rewriter *r, const om_node *n, om_id *from, om_id *to) {
    padding *s = r->arg;
    om_graph *g = r->to;
    const om_id id = (om_id)(n - r->from->nodes.v), *in = om_ins(r->from, n);
    if (!om_is(n, attention) || n->n_in < 4 || in[3] == OM_NONE) return false;
    if (om_ty(r->from, in[3])->dtype == OM_BOOL) return false; /* the kernel sees what it hides by itself */
    om_id at = 0;
    while (at < s->u.readers.n && (s->u.readers.v[at].node != id || s->u.readers.v[at].kind != OM_READER_KEYS)) at++;
    const om_reader *d = at < s->u.readers.n ? &s->u.readers.v[at] : NULL;
    if (!d || d->mask == OM_NONE || s->u.groups.v[d->group].why) return false;
    om_bounds *b = &s->bounds[at];
    for (om_id k = 0; k < at && b->from == OM_NONE; k++) { /* as of one before it */
        const om_reader *o = &s->u.readers.v[k];
        if (s->bounds[k].from != OM_NONE && o->group == d->group && o->mask == d->mask && o->negated == d->negated &&
            o->queries == d->queries && om_ins(r->from, &r->from->nodes.v[o->node])[3] == in[3])
            *b = s->bounds[k];
    }
    if (b->from == OM_NONE) {
        (void)chosen(r, d->group);
        const om_group *x = &s->u.groups.v[d->group];
        const om_dim shape[2] = {om_dim_copy(g, r->from, x->batch), om_dim_copy(g, r->from, x->time)};
        const om_id keep = om_b_reshape(g, s->keep[d->group], shape, 2), seen = keys_seen(r, d, shape);
        const om_id place = places(g, shape[1]), none = om_scalar(g, OM_I64, 0), end = number(r, NULL, shape[1]);
        const om_id next = om_b_bin(g, &om_op_add, place, om_scalar(g, OM_I64, !om_sabotage("padding.end")));
        om_id first = reduced(g, &om_op_reduce_min, om_make(g, &om_op_where, OM_IN(seen, place, end), NULL, 0), 1);
        om_id last = reduced(g, &om_op_reduce_max, om_make(g, &om_op_where, OM_IN(seen, next, none), NULL, 0), 1);
        if (d->checked && !om_sabotage("padding.bounds")) {
            const om_id blind = samples_blind(r, d, keep);
            first = om_make(g, &om_op_where, OM_IN(blind, none, first), NULL, 0);
            last = om_make(g, &om_op_where, OM_IN(blind, end, last), NULL, 0);
        }
        *b = (om_bounds){om_b_reshape(g, first, shape, 1), om_b_reshape(g, last, shape, 1)};
    }
    *from = b->from, *to = b->to;
    return g->cx->status == OM_OK;
}

static om_status attention_within(om_rewriter *r, const om_node *n, om_id from, om_id to) {
    om_id of[OM_MAX_IN];
    for (int i = 0; i < n->n_in || i < 6; i++) {
        const om_id v = i < n->n_in ? om_ins(r->from, n)[i] : OM_NONE;
        of[i] = v == OM_NONE ? OM_NONE : r->map[v];
    }
    of[4] = from, of[5] = to;
    const om_id y = om_rewrite_node(r, n, of, n->n_in < 6 ? 6 : n->n_in);
    for (int i = 0; i < n->n_out && y != OM_NONE; i++) r->map[n->out + (om_id)i] = y + (om_id)i;
    return r->to->cx->status;
}

static om_status padding_emit(om_rewriter *r, om_id id) {
    padding *s = r->arg;
    const om_graph *f = r->from;
    const om_node *n = &f->nodes.v[id];
    om_graph *g = r->to;
    if (n->n_out && r->map[n->out] != OM_NONE) return OM_OK; /* of a mask, made before */
    g->cur_scope = n->scope;
    g->cur_phase = n->phase;
    om_id from, to;
    if (bounds_keys(r, n, &from, &to)) return attention_within(r, n, from, to);
    OM_TRY(g->cx->status);
    const om_id mask = mask_queries(r, n);
    if (mask != OM_NONE) {
        om_id of[OM_MAX_IN];
        for (int i = 0; i < n->n_in; i++) of[i] = om_ins(f, n)[i] == OM_NONE ? OM_NONE : r->map[om_ins(f, n)[i]];
        of[3] = mask;
        return om_rewrite_copy_with(r, id, of);
    }
    if (!s->region[id]) return om_rewrite_copy(r, id);
    const om_label_rows *rows = chosen(r, om_unseen_group(&s->u, n->out));
    const om_id y = region_node(r, n, rows);
    if (y == OM_NONE || g->cx->status != OM_OK) return g->cx->status;
    for (int i = 0; i < n->n_out; i++) r->map[n->out + (om_id)i] = y + (om_id)i;
    s->rows[n->out] = y;
    const om_span users = om_users(s->u.f, n->out);
    bool all = false;
    for (uint32_t i = 0; i < users.n; i++) all |= s->u.f->live[users.node[i]] && !s->region[users.node[i]];
    if (!all) return OM_OK;
    om_type t = *om_ty(f, n->out);
    for (int i = 0; i < t.rank; i++) t.dim[i] = om_dim_copy(g, f, t.dim[i]);
    r->map[n->out] = om_labels_put(g, rows, y, &t);
    return g->cx->status;
}

static void padding_tell(om_ctx *cx, const padding *s) {
    const char *why = NULL;
    int products = 0;
    for (om_id i = 0; i < s->u.f->g->nodes.n; i++)
        products += s->region[i] && om_is(&s->u.f->g->nodes.v[i], matmul);
    for (om_id i = 0; i < s->u.readers.n && !why; i++)
        if (s->u.readers.v[i].mask != OM_NONE) why = s->u.groups.v[s->u.readers.v[i].group].why;
    if (products) snprintf(cx->padding, sizeof cx->padding, "%d products", products);
    else snprintf(cx->padding, sizeof cx->padding, "none: %s", why ? why : "no attention has a mask of padding");
}

om_status om_pass_run_padding(om_ctx *cx, const om_graph *in, om_graph **out) {
    const size_t values = (size_t)in->values.n + 1, nodes = (size_t)in->nodes.n + 1;
    om_facts *f = om_facts_new(cx, in);
    padding s = {.region = om_alloc(cx, nodes),
                 .deep = om_alloc(cx, values),
                 .rows = om_alloc(cx, values * sizeof *s.rows),
                 .mask = om_alloc(cx, values * sizeof *s.mask),
                 .of = om_alloc(cx, values * sizeof *s.of)};
    om_status st = f && s.region && s.deep && s.rows && s.mask && s.of ? OM_OK : cx->status;
    for (om_id v = 0; v < in->values.n && st == OM_OK; v++) s.rows[v] = s.mask[v] = OM_NONE;
    if (st == OM_OK && cx->device->counted && !cx->all_tokens) {
        st = om_unseen_find(cx, f, &s.u);
        s.chosen = om_alloc(cx, ((size_t)s.u.groups.n + 1) * sizeof *s.chosen);
        s.made = om_alloc(cx, (size_t)s.u.groups.n + 1);
        s.keep = om_alloc(cx, ((size_t)s.u.groups.n + 1) * sizeof *s.keep);
        s.bounds = om_alloc(cx, ((size_t)s.u.readers.n + 1) * sizeof *s.bounds);
        for (om_id i = 0; i < s.u.readers.n && s.bounds; i++) s.bounds[i] = (om_bounds){OM_NONE, OM_NONE};
        if (st == OM_OK && s.chosen && s.made && s.keep && s.bounds) st = region_find(cx, &s);
        if (st == OM_OK) st = cx->status;
        if (st == OM_OK) padding_tell(cx, &s);
    }
    if (st == OM_OK && s.u.value) st = om_rewrite(cx, in, padding_emit, &s, out);
    else if (st == OM_OK) st = om_rewrite(cx, in, om_rewrite_copy, NULL, out);
    om_unseen_free(cx, &s.u);
    om_free(cx, s.bounds);
    om_free(cx, s.keep);
    om_free(cx, s.made);
    om_free(cx, s.of);
    om_free(cx, s.mask);
    om_free(cx, s.chosen);
    om_free(cx, s.rows);
    om_free(cx, s.deep);
    om_free(cx, s.region);
    om_free(cx, f);
    return st;
}
