/* rotary.c - rotary embeddings in one sweep. x cos + turn(x) sin, where turn(x) = concat(-x[h:], x[:h]) along the last
 * axis, of 2 h, is written in the graph as two slices, a negation and a copy; its gradient likewise, turned back. On
 * the last axis as (2, h) the turn is a flip, which is a view, and its sign goes to the table, which is small:
 *
 *   add(mul(x, cos), mul(turn(x), sin))   ->   x' cos' + flip(x') s',   s = concat(-sin[:h], sin[h:])
 *   add(mul(x, cos), back(mul(x, sin)))   ->   x' cos' + flip(x') s',   s = concat(sin[h:], -sin[:h])
 *
 * back(u) = concat(u[h:], -u[:h]); a' is a with the last axis as (2, h). Casts stand where they stood, so no bit
 * changes: -a b is a (-b). A cast of the sum follows it. All is elementwise then, and fuse makes one node of it.
 *
 * Where x is a permutation of something and the sum is only permuted (the gradient, on its way from attention to the
 * products), the sum is made in the order of what was permuted: what follows reads it without a copy.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/passes.h"

typedef struct rotary_pass {
    om_facts *facts;
    om_id *split;         /* per old value: the sum with its last axis as (2, h), in the order of `perm`; or OM_NONE */
    const om_node **perm; /* per old value with a split: NULL, or the permutation that comes behind */
} rotary_pass;

/* outer(product(inner(x), table)); outer and inner are casts, or NULL */
typedef struct rotary_term { const om_node *outer, *product, *inner; om_id x, table; } rotary_term;
typedef struct rotary_sum { rotary_term plain, turned; bool back; om_id x; int64_t h; } rotary_sum;

static const om_node *cast_of(const om_graph *g, om_id v) {
    const om_node *n = om_maker(g, v);
    return n && om_is(n, cast) ? n : NULL;
}

static bool half_is(const om_graph *g, om_id v, om_id *x, int64_t from, int64_t to) {
    const om_node *n = om_maker(g, v);
    if (!n || !om_is(n, slice) || om_node_int(n, "axis", 0) != om_ty(g, n->out)->rank - 1 ||
        om_node_int(n, "step", 1) != 1)
        return false;
    const char *name[2] = {"start", "end"};
    const int64_t want[2] = {from, to};
    for (int i = 0; i < 2; i++) {
        const om_attr *a = om_attr_get(n->attr, n->n_attr, name[i]);
        int64_t at = -1;
        if (a && a->kind == OM_ATTR_INT) at = a->i;
        else if (!a || a->kind != OM_ATTR_DIMS || a->n != 1 || !om_dim_const(g, a->dims[0], &at)) return false;
        if (at != want[i]) return false;
    }
    if (*x == OM_NONE) *x = om_ins(g, n)[0];
    return *x == om_ins(g, n)[0];
}

/* v is turn(x), or turned back */
static bool turn_is(const om_graph *g, om_id v, om_id *x, bool *back, int64_t *h) {
    const om_node *n = om_maker(g, v);
    int64_t d;
    if (!n || !om_is(n, concat) || n->n_in != 2) return false;
    const om_type *t = om_ty(g, v);
    if (om_node_int(n, "axis", 0) != t->rank - 1 || t->rank + 1 > OM_RANK || !om_is_float(t->dtype) ||
        !om_dim_const(g, t->dim[t->rank - 1], &d) || d < 2 || d % 2)
        return false;
    const om_id hi = om_ins(g, n)[0], lo = om_ins(g, n)[1];
    const om_node *nh = om_maker(g, hi), *nl = om_maker(g, lo);
    *h = d / 2, *x = OM_NONE;
    if (!nh || !nl) return false;
    *back = om_is(nl, neg);
    if (*back == om_is(nh, neg)) return false;
    return half_is(g, *back ? hi : om_ins(g, nh)[0], x, *h, d) && half_is(g, *back ? om_ins(g, nl)[0] : lo, x, 0, *h) &&
           om_pass_same_type(om_ty(g, *x), t);
}

/* A product one operand of which is a table: as long as x along the last axis. */
static bool term_is(const om_graph *g, om_id v, int side, rotary_term *t) {
    *t = (rotary_term){.outer = cast_of(g, v)};
    t->product = om_maker(g, t->outer ? om_ins(g, t->outer)[0] : v);
    if (!t->product || !om_is(t->product, mul)) return false;
    t->x = om_ins(g, t->product)[side], t->table = om_ins(g, t->product)[1 - side];
    const om_type *x = om_ty(g, t->x), *table = om_ty(g, t->table);
    return x->rank > 0 && table->rank > 0 && table->rank <= x->rank &&
           table->dim[table->rank - 1] == x->dim[x->rank - 1];
}

/* The term's operand is x, or a cast of it. */
static bool term_over(const om_graph *g, rotary_term *t, om_id x) {
    if (t->x == x) return true;
    t->inner = cast_of(g, t->x);
    if (!t->inner || om_ins(g, t->inner)[0] != x) return false;
    t->x = x;
    return true;
}

static bool rotary_match(const om_graph *g, const om_node *n, rotary_sum *s) {
    if (!om_is(n, add)) return false;
    for (int k = 0; k < 8; k++) { /* which operand is turned; which operands of the products are tables */
        const om_id plain = om_ins(g, n)[k & 1], turned = om_ins(g, n)[1 - (k & 1)];
        om_id of;
        if (!term_is(g, plain, k >> 1 & 1, &s->plain)) continue;
        if (turn_is(g, turned, &of, &s->back, &s->h)) { /* the gradient */
            if (!s->back || !term_is(g, of, k >> 2, &s->turned)) continue;
            const om_node *c = cast_of(g, s->turned.x);
            s->x = c ? om_ins(g, c)[0] : s->turned.x;
            if (!term_over(g, &s->turned, s->x)) continue;
        } else {
            if (!term_is(g, turned, k >> 2, &s->turned)) continue;
            const om_node *c = cast_of(g, s->turned.x);
            if (!turn_is(g, c ? om_ins(g, c)[0] : s->turned.x, &s->x, &s->back, &s->h) || s->back) continue;
            s->turned.inner = c;
        }
        om_dim size;
        const om_type *x = om_ty(g, s->x);
        if (term_over(g, &s->plain, s->x) && om_same_dims(om_ty(g, n->out), x) && om_bounded_axis(g, x, &size) < 0 &&
            !om_same_dims(om_ty(g, s->turned.table), x)) /* a table as large as x is as dear to turn */
            return true;
    }
    return false;
}

/* All that is done with v, or with casts of it, is to permute it. */
static bool only_permuted(const om_facts *f, om_id v) {
    const om_span u = om_users(f, v);
    if (f->held[v]) return false;
    for (uint32_t i = 0; i < u.n; i++) {
        const om_node *n = &f->g->nodes.v[u.node[i]];
        if (!om_is(n, permute) && !(om_is(n, cast) && only_permuted(f, n->out))) return false;
    }
    return u.n > 0;
}

static void perm_of(const om_graph *g, const om_node *n, int *perm) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "perm");
    for (uint32_t i = 0; i < a->n; i++) {
        int64_t p = 0;
        om_dim_const(g, a->dims[i], &p);
        perm[i] = (int)p;
    }
}

/* (..., 2 h) as (..., 2, h) */
static om_id halves(om_graph *g, om_id v, int64_t h) {
    om_type t = *om_ty(g, v);
    t.dim[t.rank - 1] = om_dim_int(g, 2);
    t.dim[t.rank] = om_dim_int(g, h);
    return om_b_reshape(g, v, t.dim, t.rank + 1);
}

static om_id flipped(om_graph *g, om_id v) {
    const om_dim axis = om_dim_int(g, om_ty(g, v)->rank - 2);
    return om_make(g, &om_op_flip, OM_IN(v), OM_ATTRS(OM_AD("axes", &axis, 1)));
}

/* A table of rank <= `rank` whose rows lie as those of what was permuted. */
static om_id table_before(om_graph *g, om_id v, const int *perm, int rank) {
    om_type t = *om_ty(g, v);
    om_dim dim[OM_RANK];
    int inverse[OM_RANK];
    for (int i = 0; i < rank; i++) {
        dim[i] = i < rank - t.rank ? om_dim_int(g, 1) : t.dim[i - (rank - t.rank)];
        inverse[perm[i]] = i;
    }
    return om_b_permute(g, om_b_reshape(g, v, dim, rank), inverse);
}

static om_id term_emit(om_rewriter *r, const rotary_term *t, om_id x, om_id table) {
    if (t->inner) x = om_rewrite_node(r, t->inner, &x, 1);
    x = om_rewrite_node(r, t->product, OM_IN(x, table));
    return t->outer ? om_rewrite_node(r, t->outer, &x, 1) : x;
}

/* The old value v from its split. */
static om_status rotary_put(om_rewriter *r, om_id v, om_id split, const om_node *perm) {
    rotary_pass *p = r->arg;
    om_graph *g = r->to;
    if (split == OM_NONE) return g->cx->status;
    p->split[v] = split, p->perm[v] = perm;
    om_type t = *om_ty(g, split);
    t.dim[t.rank - 2] = om_dim_copy(g, r->from, om_ty(r->from, v)->dim[t.rank - 2]);
    om_id y = om_b_reshape(g, split, t.dim, t.rank - 1);
    int order[OM_RANK];
    if (perm && y != OM_NONE) perm_of(r->from, perm, order), y = om_b_permute(g, y, order);
    r->map[v] = y;
    if (y != OM_NONE && om_val(r->from, v)->name && !om_val(g, y)->name)
        om_val(g, y)->name = om_arena_str(&g->arena, om_val(r->from, v)->name);
    return g->cx->status;
}

static om_status rotary_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *n = &f->nodes.v[id];
    rotary_pass *p = r->arg;
    om_graph *g = r->to;
    rotary_sum s;
    if (om_is(n, cast) && p->split[om_ins(f, n)[0]] != OM_NONE) {
        const om_id of = om_ins(f, n)[0];
        return rotary_put(r, n->out, om_rewrite_node(r, n, &p->split[of], 1), p->perm[of]);
    }
    if (!rotary_match(f, n, &s)) return om_rewrite_copy(r, id);

    const om_node *perm = om_maker(f, s.x);
    const int rank = om_ty(f, s.x)->rank;
    int order[OM_RANK];
    if (!perm || !om_is(perm, permute) || !only_permuted(p->facts, n->out)) perm = NULL;
    if (perm && (perm_of(f, perm, order), order[rank - 1] != rank - 1)) perm = NULL;
    om_id x = r->map[perm ? om_ins(f, perm)[0] : s.x], cos = r->map[s.plain.table], sin = r->map[s.turned.table];
    const om_type *table = om_ty(g, sin);
    const int last = table->rank - 1;
    const om_dim zero = om_dim_int(g, 0), half = om_dim_int(g, s.h), whole = om_dim_int(g, 2 * s.h);
    om_id lo = om_b_slice(g, sin, last, zero, half, 1), hi = om_b_slice(g, sin, last, half, whole, 1);
    if (!om_sabotage("rotary.sign")) lo = om_b_un(g, &om_op_neg, lo);
    const bool back = s.back && !om_sabotage("rotary.back");
    sin = om_make(g, &om_op_concat, OM_IN(back ? hi : lo, back ? lo : hi), OM_ATTRS(OM_AI("axis", last)));
    if (perm) cos = table_before(g, cos, order, rank), sin = table_before(g, sin, order, rank);
    x = halves(g, x, s.h), cos = halves(g, cos, s.h), sin = halves(g, sin, s.h);
    if (x == OM_NONE || cos == OM_NONE || sin == OM_NONE) return g->cx->status;
    const om_id plain = term_emit(r, &s.plain, x, cos), turned = term_emit(r, &s.turned, flipped(g, x), sin);
    return rotary_put(r, n->out, om_rewrite_node(r, n, OM_IN(plain, turned)), perm);
}

om_status om_pass_run_rotary(om_ctx *cx, const om_graph *in, om_graph **out) {
    rotary_pass p = {.facts = om_facts_new(cx, in),
                     .split = om_alloc(cx, (in->values.n + 1) * sizeof *p.split),
                     .perm = om_alloc(cx, (in->values.n + 1) * sizeof *p.perm)};
    const bool ready = p.facts && p.split && p.perm;
    for (om_id v = 0; ready && v < in->values.n; v++) p.split[v] = OM_NONE, p.perm[v] = NULL;
    const om_status s = ready ? om_rewrite(cx, in, rotary_emit, &p, out) : cx->status;
    om_free(cx, p.perm), om_free(cx, p.split), om_free(cx, p.facts);
    return s;
}
