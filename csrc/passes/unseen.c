/* unseen.c - the proof that rows of padding may be left out (unseen.h).
 *
 * One sweep from the results to the inputs. When a node is reached, all who read its result have said what they need
 * of it: all rows (`seen`), or only the rows that its group's readers name. Then the node says the same of its
 * operands. A node that is not known here, or whose own result is needed in full, needs its operands in full: so what
 * is proven holds whatever else the graph does.
 */
#include "passes/unseen.h"
#include "graph/sabotage.h"
#include "ops/loss.h"
#include "passes/labels.h"
#include "passes/masks/masks.h"
#include "passes/passes.h"

#include <math.h>

enum { PRODUCTS = 4 /* fewer are not worth choosing rows for: a transformer layer has at least as many */ };

/* --- groups ------------------------------------------------------------------------------------------------- */

om_id om_unseen_root(const om_unseen *u, om_id group) {
    while (u->groups.v[group].parent != group) group = u->groups.v[group].parent;
    return group;
}

static om_id group_new(om_ctx *cx, om_unseen *u, om_dim rows) {
    om_group *x = OM_PUSH(cx, &u->groups);
    if (!x) return OM_NONE;
    *x = (om_group){.parent = u->groups.n - 1, .rows = rows};
    return u->groups.n - 1;
}

static om_id group_turned(om_ctx *cx, om_unseen *u, om_dim batch, om_dim time) {
    om_graph *g = (om_graph *)u->f->g; /* may intern sizes */
    const om_id id = group_new(cx, u, om_dim_mul(g, batch, time));
    if (id == OM_NONE) return OM_NONE;
    u->groups.v[id].turned = true;
    u->groups.v[id].batch = batch;
    u->groups.v[id].time = time;
    return id;
}

static void group_fail(om_unseen *u, om_id group, const char *why) {
    om_group *x = &u->groups.v[om_unseen_root(u, group)];
    if (!x->why) x->why = why;
}

static om_id group_join(om_unseen *u, om_id a, om_id b) {
    a = om_unseen_root(u, a), b = om_unseen_root(u, b);
    if (a == b) return a;
    om_group *x = &u->groups.v[a], *y = &u->groups.v[b];
    if (x->rows != y->rows || (x->turned && y->turned && (x->batch != y->batch || x->time != y->time)))
        x->why = "rows of several sizes meet";
    if (!x->turned && y->turned) x->turned = true, x->batch = y->batch, x->time = y->time;
    if (!x->why) x->why = y->why;
    x->products += y->products;
    y->parent = a;
    return a;
}

/* --- what a node needs of an operand -------------------------------------------------------------------------- */

static void need_all(om_unseen *u, om_id v) {
    if (v != OM_NONE && !om_sabotage("unseen.seen")) u->value[v].seen = true;
}

static void need_rows(om_unseen *u, om_id v, om_unseen_value y) {
    om_unseen_value *x = &u->value[v];
    if (y.group == OM_NONE) return need_all(u, v);
    y.seen = x->seen;
    if (x->form == OM_ROWS_NONE) *x = y;
    else if (x->form != y.form || x->at != y.at || x->batch != y.batch) x->seen = true;
    else x->group = group_join(u, x->group, y.group);
}

static om_unseen_value rows_flat(int at, om_id group) {
    return (om_unseen_value){.form = OM_ROWS_FLAT, .at = (uint8_t)at, .group = group};
}

static om_unseen_value rows_turned(int batch, int time, om_id group) {
    if (batch == 0 && time == 1) return rows_flat(2, group);
    return (om_unseen_value){.form = OM_ROWS_TURNED, .at = (uint8_t)time, .batch = (uint8_t)batch, .group = group};
}

static om_reader *reader_new(om_ctx *cx, om_unseen *u, om_reader_kind kind, om_id node, om_id group) {
    om_reader *r = OM_PUSH(cx, &u->readers);
    if (r) *r = (om_reader){.kind = (uint8_t)kind, .node = node, .group = group, .queries = OM_NONE, .mask = OM_NONE};
    return r;
}

bool om_unseen_apart(const om_graph *g, om_id v, const om_type *y, const om_unseen_value *form) {
    const om_type *t = om_ty(g, v);
    if (t->rank != y->rank) return false;
    if (form->form == OM_ROWS_TURNED)
        return t->dim[form->batch] == y->dim[form->batch] && t->dim[form->at] == y->dim[form->at];
    for (int i = 0; i < form->at; i++)
        if (t->dim[i] != y->dim[i]) return false;
    return true;
}

/* --- keys that a mask hides ------------------------------------------------------------------------------------ */

/* Is v (batch, 1, 1, time)? */
static bool over_keys(const om_graph *g, om_id v, om_dim batch, om_dim time) {
    const om_type *t = om_ty(g, v);
    return t->rank == 4 && t->dim[0] == batch && t->dim[1] == 1 && t->dim[2] == 1 && t->dim[3] == time;
}

/* The part of a mask that hides keys of a sample from all its queries: true, and where; false: there is none. `hides`:
 * v is true where keys are hidden. */
static bool keys_of(const om_graph *g, om_id v, bool hides, om_dim batch, om_dim time, om_reader *r) {
    double x;
    for (int depth = 0; depth < 32; depth++) {
        const om_node *n = om_maker(g, v);
        if (over_keys(g, v, batch, time) && (n || om_val(g, v)->role == OM_INPUT)) {
            r->mask = v;
            r->negated = hides;
            return true;
        }
        if (!n) return false;
        const om_id *in = om_ins(g, n);
        if (om_is(n, expand) || om_is(n, copy)) {
            v = in[0];
        } else if (om_is(n, not)) {
            v = in[0], hides = !hides;
        } else if (om_is(n, add) ? om_is_float(om_ty(g, v)->dtype) : hides ? om_is(n, or) : om_is(n, and)) {
            if (keys_of(g, in[1], hides, batch, time, r)) return true;
            v = in[0];
        } else if (om_is(n, where) && om_is_float(om_ty(g, v)->dtype)) {
            const bool first = om_number_of(g, in[1], &x) && x <= MX_HIDE;
            if (!first && !(om_number_of(g, in[2], &x) && x <= MX_HIDE)) return false;
            v = in[0], hides = first;
        } else if (om_is(n, cast) && om_is_float(om_ty(g, v)->dtype) && om_is_float(om_ty(g, in[0])->dtype)) {
            v = in[0];
        } else {
            return false;
        }
    }
    return false;
}

static om_status attention_visit(om_ctx *cx, om_unseen *u, om_id id, bool unseen) {
    const om_graph *g = u->f->g;
    const om_node *n = &g->nodes.v[id];
    const om_id *in = om_ins(g, n), mask = n->n_in > 3 ? in[3] : OM_NONE;
    const om_unseen_value y = u->value[n->out];
    const om_type q = *om_ty(g, in[0]), k = *om_ty(g, in[1]);
    const bool first = om_node_int(n, "seq_first", 0) != 0, causal = om_node_int(n, "causal", 0) != 0;
    const bool plain = om_node_int(n, "causal_offset", 0) == 0 && om_node_int(n, "window", 0) == 0;
    for (int i = 0; i < n->n_in; i++)
        if (i > 2) need_all(u, in[i]);
    unseen &= q.rank == 4 && y.form == (first ? OM_ROWS_FLAT : OM_ROWS_TURNED) && y.at == 2 && y.batch == 0;
    if (unseen) need_rows(u, in[0], rows_turned(0, 2, y.group));
    else need_all(u, in[0]);
    om_reader r = {.kind = OM_READER_KEYS, .node = id, .mask = OM_NONE, .causal = causal && plain};
    bool fits = q.rank == 4 && q.dim[0] == k.dim[0];
    for (int i = 4; i < 6 && i < n->n_in; i++) fits &= in[i] == OM_NONE;
    if (fits && mask != OM_NONE && keys_of(g, mask, false, k.dim[0], k.dim[2], &r)) {
        r.checked = om_ty(g, mask)->dtype != OM_BOOL || om_node_int(n, "nan_rows", 0) != 0;
        /* what a row sees is then asked of the mask alone */
        fits = !r.checked || (!causal && om_node_int(n, "window", 0) == 0 && om_ty(g, mask)->rank == 4);
    } else {
        fits &= unseen && r.causal && q.dim[2] == k.dim[2];
    }
    if (!fits) {
        need_all(u, in[1]);
        need_all(u, in[2]);
        return OM_OK;
    }
    r.queries = unseen ? y.group : OM_NONE;
    r.group = group_turned(cx, u, k.dim[0], k.dim[2]);
    om_reader *slot = r.group == OM_NONE ? NULL : OM_PUSH(cx, &u->readers);
    if (!slot) return cx->status;
    *slot = r;
    need_rows(u, in[1], rows_turned(0, 2, r.group));
    need_rows(u, in[2], rows_turned(0, 2, r.group));
    return OM_OK;
}

/* --- the sweep -------------------------------------------------------------------------------------------------- */

static bool axis_apart(const om_unseen_value *y, int64_t axis) {
    return y->form == OM_ROWS_FLAT ? axis >= y->at : axis != y->batch && axis != y->at;
}

/* The operand's form where a permutation's result has y's; false: rows are taken apart. */
static bool permute_back(const om_node *n, const om_unseen_value *y, om_unseen_value *x) {
    const om_attr *p = om_attr_get(n->attr, n->n_attr, "perm");
    const bool flat = y->form == OM_ROWS_FLAT;
    if (!p || p->kind != OM_ATTR_DIMS || p->n < 2) return false;
    if (flat && y->at != 2) return *x = *y, y->at == 1 && p->dims[0] == 0;
    *x = rows_turned((int)p->dims[flat ? 0 : y->batch], (int)p->dims[flat ? 1 : y->at], y->group);
    return true;
}

/* The axis of x that axis `at` of its reshape y is; -1: it is taken apart or merged. */
static int axis_before(om_graph *g, const om_type *x, const om_type *y, int at) {
    om_dim before = 1, n = 1;
    for (int i = 0; i < at; i++) before = om_dim_mul(g, before, y->dim[i]);
    for (int i = 0; i < x->rank; n = om_dim_mul(g, n, x->dim[i++]))
        if (n == before && x->dim[i] == y->dim[at]) return i;
    return -1;
}

/* A node of which nobody needs more than the rows of y: is it so of its operands? True: it is said. */
static bool rows_visit(om_unseen *u, const om_node *n, const om_unseen_value y) {
    om_graph *g = (om_graph *)u->f->g;
    const om_id *in = om_ins(g, n);
    const om_type *t = om_ty(g, n->out), *x = n->n_in ? om_ty(g, in[0]) : NULL;
    om_unseen_value of;
    if (n->op->pw || om_is(n, stop_grad) || om_is(n, copy)) {
        for (int i = 0; i < n->n_in; i++)
            if (om_unseen_apart(g, in[i], t, &y)) need_rows(u, in[i], y);
            else need_all(u, in[i]);
        return true;
    }
    if (om_is(n, reshape)) {
        const bool flat = y.form == OM_ROWS_FLAT;
        const int at = flat ? om_labels_lead(g, x, u->groups.v[om_unseen_root(u, y.group)].rows)
                            : axis_before(g, x, t, y.at);
        const int batch = flat ? 0 : axis_before(g, x, t, y.batch);
        if (flat ? !at : at < 0 || batch < 0 || at == batch) return false;
        need_rows(u, in[0], flat ? rows_flat(at, y.group) : rows_turned(batch, at, y.group));
        return true;
    }
    if (om_is(n, permute)) {
        if (!permute_back(n, &y, &of)) return false;
        need_rows(u, in[0], of);
        return true;
    }
    if (om_is(n, matmul)) {
        if (y.form != OM_ROWS_FLAT || t->rank != y.at + 1 || x->rank != t->rank || om_ty(g, in[1])->rank != 2)
            return false;
        u->groups.v[om_unseen_root(u, y.group)].products++;
    } else if (om_is(n, layer_norm) || om_is(n, rms_norm)) {
        const int64_t axis = om_node_int(n, "axis", -1);
        if (y.form == OM_ROWS_FLAT ? axis < y.at : axis <= y.at || axis <= y.batch) return false;
    } else if (om_is(n, softmax) || om_is(n, log_softmax) || om_is(n, slice) || om_is(n, concat)) {
        if (!axis_apart(&y, om_node_int(n, "axis", -1))) return false;
    } else {
        return false;
    }
    for (int i = 0; i < n->n_in; i++)
        if (i == 0 || om_is(n, concat)) need_rows(u, in[i], y);
        else need_all(u, in[i]);
    return true;
}

static om_status node_visit(om_ctx *cx, om_unseen *u, om_id id) {
    om_graph *g = (om_graph *)u->f->g;
    const om_node *n = &g->nodes.v[id];
    const om_id *in = om_ins(g, n);
    const om_unseen_value y = u->value[n->out];
    bool unseen = n->n_out > 0 && y.form != OM_ROWS_NONE && !y.seen;
    bool others = false; /* results beside the first are read */
    for (int i = 1; i < n->n_out; i++) {
        const om_id o = n->out + (om_id)i;
        others |= u->f->held[o] || u->value[o].seen || u->value[o].form != OM_ROWS_NONE;
    }
    unseen &= !others;
    if (om_is(n, cross_entropy) && !others && om_node_int(n, "reduction", OM_LOSS_MEAN) != OM_LOSS_NONE &&
        om_val(g, in[1])->role != OM_CONST) {
        for (int i = 1; i < n->n_in; i++) need_all(u, in[i]);
        const om_id group = group_new(cx, u, om_ty(g, in[0])->dim[0]);
        if (group == OM_NONE || !reader_new(cx, u, OM_READER_LOSS, id, group)) return cx->status;
        need_rows(u, in[0], rows_flat(1, group));
        return OM_OK;
    }
    if (om_is(n, attention) && !others) return attention_visit(cx, u, id, unseen);
    /* (batch, time, size) at one position: of rows that are samples, but made of rows that are positions */
    const bool one = om_is(n, slice) && om_node_int(n, "axis", -1) == 1 && om_ty(g, n->out)->rank == 3 &&
                     om_ty(g, n->out)->dim[1] == 1 && y.form == OM_ROWS_FLAT && y.at == 1;
    if (unseen && !one && rows_visit(u, n, y)) return OM_OK;
    if (om_is(n, slice) && om_node_int(n, "axis", -1) == 1 && om_node_int(n, "step", 1) == 1 &&
        om_ty(g, n->out)->rank > 2 && om_maker(g, in[0])) {
        const om_type *t = om_ty(g, in[0]);
        const om_id group = group_turned(cx, u, t->dim[0], t->dim[1]);
        if (group == OM_NONE || !reader_new(cx, u, OM_READER_SLICE, id, group)) return cx->status;
        need_rows(u, in[0], rows_flat(2, group));
        return OM_OK;
    }
    for (int i = 0; i < n->n_in; i++) need_all(u, in[i]);
    return OM_OK;
}

/* --- groups as a whole -------------------------------------------------------------------------------------------- */

/* What v is made of. Masks and labels that products or chance make may depend on what is left out. */
static bool cone_mark(om_unseen *u, om_id v) {
    const om_graph *g = u->f->g;
    if (!om_maker(g, v)) return om_val(g, v)->role != OM_CONST;
    const om_id last = om_val(g, v)->node;
    u->cone[last] |= 2;
    bool fits = true;
    for (om_id i = last + 1; i-- > 0;) {
        if (!(u->cone[i] & 2)) continue;
        const om_node *n = &g->nodes.v[i];
        u->cone[i] = 1;
        fits &= !om_is(n, matmul) && !om_is(n, attention) && !n->op->random && n->op->kind != OM_K_HOST;
        for (int k = 0; k < n->n_in; k++) {
            const om_node *m = om_maker(g, om_ins(g, n)[k]);
            if (m) u->cone[om_val(g, m->out)->node] |= 2;
        }
    }
    return fits;
}

static void groups_check(om_unseen *u) {
    const om_graph *g = u->f->g;
    bool masked = false; /* somewhere a mask says what padding is */
    for (om_id i = 0; i < u->readers.n; i++) {
        om_reader *r = &u->readers.v[i];
        const om_node *n = &g->nodes.v[r->node];
        r->group = om_unseen_root(u, r->group);
        r->queries = r->queries == OM_NONE ? OM_NONE : om_unseen_root(u, r->queries);
        masked |= r->mask != OM_NONE;
        if (r->kind == OM_READER_KEYS && r->mask == OM_NONE && r->queries != r->group)
            group_fail(u, r->group, "its keys are read by other rows, without a mask");
        bool fits = r->mask == OM_NONE || cone_mark(u, r->mask);
        if (r->kind == OM_READER_LOSS) fits = cone_mark(u, om_ins(g, n)[1]);
        else if (r->checked) fits &= cone_mark(u, om_ins(g, n)[3]);
        if (!fits) group_fail(u, r->group, "its mask or labels are constants, or computed by products");
    }
    for (om_id i = 0; i < u->readers.n; i++) { /* without a mask all keys up to the last row are read */
        const om_reader *r = &u->readers.v[i];
        for (om_id k = 0; k < u->readers.n && r->kind == OM_READER_KEYS && r->mask == OM_NONE; k++) {
            const om_reader *o = &u->readers.v[k];
            if (o->group == r->group && o->kind == OM_READER_KEYS && o->queries == o->group && !o->causal)
                group_fail(u, r->group, "its keys are read without a mask");
        }
    }
    for (om_id i = 0; i < u->groups.n; i++) {
        om_group *x = &u->groups.v[i];
        if (x->parent != i) continue;
        om_graph *own = (om_graph *)g;
        if (!masked) group_fail(u, i, "no attention has a mask of padding");
        const bool known = x->turned && om_dim_mul(own, x->batch, x->time) == x->rows;
        if (!known) group_fail(u, i, "no attention reads its rows");
        if (x->products < PRODUCTS) group_fail(u, i, "there are too few products");
    }
}

om_status om_unseen_find(om_ctx *cx, const om_facts *f, om_unseen *u) {
    const om_graph *g = f->g;
    *u = (om_unseen){.f = f};
    u->value = om_alloc(cx, ((size_t)g->values.n + 1) * sizeof *u->value);
    u->cone = om_alloc(cx, (size_t)g->nodes.n + 1);
    if (!u->value || !u->cone) return cx->status;
    for (om_id v = 0; v < g->values.n; v++) u->value[v].seen = f->held[v] != 0;
    for (om_id i = g->nodes.n; i-- > 0;)
        if (f->live[i]) OM_TRY(node_visit(cx, u, i));
    groups_check(u);
    return cx->status;
}

void om_unseen_free(om_ctx *cx, om_unseen *u) {
    om_free(cx, u->readers.v);
    om_free(cx, u->groups.v);
    om_free(cx, u->cone);
    om_free(cx, u->value);
}

om_id om_unseen_group(const om_unseen *u, om_id v) {
    const om_unseen_value *x = &u->value[v];
    if (x->form == OM_ROWS_NONE || x->seen) return OM_NONE;
    const om_id root = om_unseen_root(u, x->group);
    return u->groups.v[root].why ? OM_NONE : root;
}
