/* expr.c - sizes as expressions over symbols, kept in a normal form.
 *
 * A size is a constant (>= 0) or ~index of a hash-consed expression. Sums and products are held as polynomials over
 * atoms (a symbol, or a DIV/MOD/MIN/MAX that could not be simplified): every result is flattened to a sorted list of
 * coefficient * atom * atom ..., and rebuilt in that order, so two sizes that are equal as polynomials are the same
 * om_dim. DIV and MOD are simplified only when exact for all values: every term divisible,
 * or, of DIV by a constant, some, and what is whole in the constant term; x - Mod(x, y) is y*(x//y); sizes are taken
 * to be non-zero where they divide. A polynomial too large for the fixed arrays stays as it was written (opaque), and
 * so does what is made of it: correct, only not canonical. Arithmetic never wraps: what 64 bits do not hold stays
 * unevaluated, and evaluates to OM_DIM_BAD.
 *
 * Expressions share operands, so the tree of one may be exponentially larger than what is stored. Every expression
 * knows its number of leaves, and more than OM_DIM_LEAVES are refused: that bounds depth and work of everything that
 * walks a tree, here and elsewhere.
 */
#include "graph/engine.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_TERMS = 24, MAX_ATOMS = 8, MAX_DEPTH = 64 };

typedef struct term { int64_t coef; int n; om_dim atom[MAX_ATOMS]; } term;
typedef struct poly { int n; bool overflow; term t[MAX_TERMS]; } poly;

/* --- hash-consing: open addressing, a power of two of slots, at most half full; 0 = empty
 * ------------------------------ */

static uint64_t hash_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 32);
}
static uint64_t expr_hash(const om_expr *e) { return hash_mix(hash_mix(e->kind, (uint64_t)e->a), (uint64_t)e->b); }
static uint64_t sym_hash(const char *name) {
    uint64_t h = 0;
    for (; *name; name++) h = hash_mix(h, (unsigned char)*name);
    return h;
}
static uint64_t index_hash(const om_graph *g, const om_dim_index *x, uint32_t i) {
    return x == &g->expr_index ? expr_hash(&g->exprs.v[i]) : sym_hash(g->syms.v[i].name);
}

static void index_put(const om_graph *g, om_dim_index *x, uint32_t i) {
    uint64_t k = index_hash(g, x, i);
    while (x->slot[k & (x->size - 1)]) k++;
    x->slot[k & (x->size - 1)] = i + 1;
}

/* Room for entry n, the next; false when there is no memory. */
static bool index_grow(om_graph *g, om_dim_index *x, uint32_t n) {
    if (((uint64_t)n + 1) * 2 <= x->size) return true;
    om_dim_index big = {NULL, x->size ? x->size * 2 : 64};
    if (!(big.slot = om_alloc(g->cx, big.size * sizeof *big.slot))) return false;
    om_free(g->cx, x->slot);
    *x = big;
    for (uint32_t i = 0; i < n; i++) index_put(g, x, i);
    return true;
}

static unsigned expr_leaves(const om_graph *g, om_dim d) { return d >= 0 ? 1 : g->exprs.v[~d].leaves; }

static om_dim expr_cons_as(om_graph *g, uint8_t kind, om_dim a, om_dim b, bool opaque) {
    om_expr new = {.kind = kind, .opaque = opaque, .leaves = 1, .a = a, .b = b};
    if (!index_grow(g, &g->expr_index, g->exprs.n)) return 0; /* status is set: the builder's sticky error */
    const om_dim_index *x = &g->expr_index;
    for (uint64_t k = expr_hash(&new); x->slot[k & (x->size - 1)]; k++) {
        uint32_t i = x->slot[k & (x->size - 1)] - 1;
        const om_expr *e = &g->exprs.v[i];
        if (e->kind == kind && e->a == a && e->b == b) return ~(om_dim)i;
    }
    if (kind != OM_DIM_SYM && kind != OM_DIM_INT) {
        unsigned leaves = expr_leaves(g, a) + expr_leaves(g, b);
        if (leaves > OM_DIM_LEAVES)
            return om_fail(g->cx, OM_UNSUPPORTED, "a size expression of more than %d terms", OM_DIM_LEAVES), 0;
        new.leaves = (uint16_t)leaves;
    }
    om_expr *e = OM_PUSH(g->cx, &g->exprs);
    if (!e) return 0;
    *e = new;
    index_put(g, &g->expr_index, g->exprs.n - 1);
    return ~(om_dim)(g->exprs.n - 1);
}
static om_dim expr_cons(om_graph *g, uint8_t kind, om_dim a, om_dim b) { return expr_cons_as(g, kind, a, b, false); }

void om_dim_forget(om_graph *g, uint32_t n_syms, uint32_t n_exprs) {
    om_dim_index *x[2] = {&g->expr_index, &g->sym_index};
    uint32_t *n[2] = {&g->exprs.n, &g->syms.n}, keep[2] = {n_exprs, n_syms};
    for (int k = 0; k < 2; k++)
        while (*n[k] > keep[k]) { /* the last one put ends its run of slots, so it can be taken out */
            uint64_t h = index_hash(g, x[k], *n[k] - 1);
            while (x[k]->slot[h & (x[k]->size - 1)] != *n[k]) h++;
            x[k]->slot[h & (x[k]->size - 1)] = 0;
            --*n[k];
        }
}

om_dim om_dim_int(om_graph *g, int64_t i) { return i >= 0 ? i : expr_cons(g, OM_DIM_INT, i, 0); }

bool om_dim_const(const om_graph *g, om_dim d, int64_t *value) {
    if (d >= 0) return *value = d, true;
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_INT) return *value = e->a, true;
    return false;
}

om_dim om_dim_sym(om_graph *g, const char *name) {
    if (!index_grow(g, &g->sym_index, g->syms.n)) return 0;
    const om_dim_index *x = &g->sym_index;
    for (uint64_t k = sym_hash(name); x->slot[k & (x->size - 1)]; k++) {
        uint32_t i = x->slot[k & (x->size - 1)] - 1;
        if (!strcmp(g->syms.v[i].name, name)) return expr_cons(g, OM_DIM_SYM, i, 0);
    }
    char *copy = om_arena_str(&g->arena, name);
    om_sym *s = copy ? OM_PUSH(g->cx, &g->syms) : NULL;
    if (!s) return 0;
    *s = (om_sym){.name = copy, .input = OM_NONE, .count = OM_NONE};
    index_put(g, &g->sym_index, g->syms.n - 1);
    return expr_cons(g, OM_DIM_SYM, (om_dim)g->syms.n - 1, 0);
}

om_status om_sym_bind(om_graph *g, const char *name, om_id input, int axis) {
    om_dim d = om_dim_sym(g, name);
    if (g->cx->status != OM_OK) return g->cx->status;
    om_sym *s = &g->syms.v[g->exprs.v[~d].a];
    OM_CHECK(g->cx, !s->bounded, "size %s is bounded: no graph input tells it as well", name);
    if (s->input != OM_NONE) return OM_OK;
    s->input = input, s->axis = axis;
    return axis < 0 && input != OM_NONE ? om_input_host(g, input) : OM_OK;
}

om_status om_sym_bound(om_graph *g, const char *name, om_dim bound) {
    om_dim d = om_dim_sym(g, name);
    if (g->cx->status != OM_OK) return g->cx->status;
    om_sym *s = &g->syms.v[g->exprs.v[~d].a];
    char was[64], now[64];
    om_dim_print(g, s->bound, was, sizeof was);
    om_dim_print(g, bound, now, sizeof now);
    OM_CHECK(g->cx, s->input == OM_NONE, "size %s is told by a graph input: it cannot be bounded as well", name);
    OM_CHECK(g->cx, !s->bounded || s->bound == bound, "size %s is at most %s, and %s rows are selected", name, was,
             now);
    const om_type t = {.rank = 1, .dim = {bound}};
    OM_CHECK(g->cx, om_bounded_axis(g, &t, &d) == -1, "size %s: its bound %s depends on a bounded size", name, now);
    s->bounded = g->bounded = true;
    s->bound = bound;
    return OM_OK;
}

/* --- polynomials ------------------------------------------------------------------------------- */

static int term_order(const term *x, const term *y) { /* by atoms; constant term last */
    if (x->n != y->n) return y->n - x->n;
    for (int i = 0; i < x->n; i++)
        if (x->atom[i] != y->atom[i]) return x->atom[i] > y->atom[i] ? -1 : 1; /* ~index: lower index first */
    return 0;
}

static void poly_add_term(poly *p, const term *t) {
    if (!t->coef) return;
    int i = 0;
    while (i < p->n && term_order(&p->t[i], t) < 0) i++;
    if (i < p->n && term_order(&p->t[i], t) == 0) {
        if (__builtin_add_overflow(p->t[i].coef, t->coef, &p->t[i].coef)) p->overflow = true;
        if (!p->t[i].coef) {
            memmove(&p->t[i], &p->t[i + 1], (size_t)(p->n - i - 1) * sizeof(term));
            p->n--;
        }
        return;
    }
    if (p->n == MAX_TERMS) {
        p->overflow = true;
        return;
    }
    memmove(&p->t[i + 1], &p->t[i], (size_t)(p->n - i) * sizeof(term));
    p->t[i] = *t;
    p->n++;
}

static bool term_mul(const term *x, const term *y, term *out) {
    if (x->n + y->n > MAX_ATOMS || __builtin_mul_overflow(x->coef, y->coef, &out->coef)) return false;
    int i = 0, j = 0, n = 0;
    while (i < x->n || j < y->n)
        out->atom[n++] = j == y->n || (i < x->n && x->atom[i] >= y->atom[j]) ? x->atom[i++] : y->atom[j++];
    out->n = n;
    return true;
}

static void poly_of(const om_graph *g, om_dim d, poly *p) { /* adds d to *p */
    int64_t c;
    if (om_dim_const(g, d, &c)) {
        poly_add_term(p, &(term){.coef = c});
        return;
    }
    const om_expr *e = &g->exprs.v[~d];
    if (p->overflow || e->opaque) {
        p->overflow = true;
    } else if (e->kind == OM_DIM_ADD) {
        poly_of(g, e->a, p);
        poly_of(g, e->b, p);
    } else if (e->kind == OM_DIM_MUL) {
        poly x = {0}, y = {0};
        poly_of(g, e->a, &x);
        poly_of(g, e->b, &y);
        if (x.overflow || y.overflow) p->overflow = true;
        for (int i = 0; i < x.n; i++)
            for (int j = 0; j < y.n; j++) {
                term t;
                if (term_mul(&x.t[i], &y.t[j], &t)) poly_add_term(p, &t);
                else p->overflow = true;
            }
    } else {
        poly_add_term(p, &(term){.coef = 1, .n = 1, .atom = {d}});
    }
}

static om_dim poly_dim(om_graph *g, const poly *p) {
    om_dim sum = 0;
    bool any = false;
    for (int i = 0; i < p->n; i++) {
        const term *t = &p->t[i];
        om_dim m = om_dim_int(g, t->coef);
        if (t->n) {
            om_dim prod = t->atom[0];
            for (int k = 1; k < t->n; k++) prod = expr_cons(g, OM_DIM_MUL, prod, t->atom[k]);
            m = t->coef == 1 ? prod : expr_cons(g, OM_DIM_MUL, prod, m);
        }
        sum = any ? expr_cons(g, OM_DIM_ADD, sum, m) : m;
        any = true;
    }
    return sum;
}

/* In p, x - Mod(x, y) becomes y*(x//y), a multiple of y for whoever divides by it and not negative where x is not. */
static void poly_whole_of_mod(om_graph *g, poly *p) {
    for (int i = 0; i < p->n; i++) {
        const term t = p->t[i];
        const om_expr *e = t.n == 1 && t.atom[0] < 0 ? &g->exprs.v[~t.atom[0]] : NULL;
        int64_t y;
        if (!e || e->kind != OM_DIM_MOD || !om_dim_const(g, e->b, &y) || t.coef == INT64_MIN) continue;
        const om_dim of = e->a;
        poly x = {0}, div = {0}, out = *p;
        bool fits = true;
        poly_of(g, of, &x);
        for (int k = 0; k < x.n && fits; k++) {
            term u = x.t[k];
            int j = 0;
            fits = !__builtin_mul_overflow(u.coef, t.coef, &u.coef); /* added to p it takes -t.coef * x away */
            while (j < p->n && term_order(&p->t[j], &u) != 0) j++;
            int64_t left;
            fits = fits && j < p->n && !__builtin_add_overflow(p->t[j].coef, u.coef, &left) && left == 0;
            if (fits) poly_add_term(&out, &u);
        }
        if (!fits || x.overflow) continue;
        poly_add_term(&out, &(term){.coef = -t.coef, .n = 1, .atom = {t.atom[0]}});
        poly_of(g, om_dim_div(g, of, om_dim_int(g, y)), &div);
        for (int k = 0; k < div.n && fits; k++) {
            term u = div.t[k];
            fits = !__builtin_mul_overflow(u.coef, -t.coef, &u.coef) && !__builtin_mul_overflow(u.coef, y, &u.coef);
            if (fits) poly_add_term(&out, &u);
        }
        if (!fits || div.overflow || out.overflow) continue;
        *p = out;
        i = -1;
    }
}

om_dim om_dim_add(om_graph *g, om_dim a, om_dim b) {
    int64_t sum;
    if (a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, &sum)) return sum;
    poly p = {0};
    poly_of(g, a, &p);
    poly_of(g, b, &p);
    if (!p.overflow) poly_whole_of_mod(g, &p);
    return p.overflow ? expr_cons_as(g, OM_DIM_ADD, a, b, true) : poly_dim(g, &p);
}

om_dim om_dim_mul(om_graph *g, om_dim a, om_dim b) {
    int64_t r;
    if (a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &r)) return r;
    if (a == 0 || b == 0) return 0;
    poly x = {0}, y = {0}, p = {0};
    poly_of(g, a, &x);
    poly_of(g, b, &y);
    p.overflow = x.overflow || y.overflow;
    for (int i = 0; i < x.n; i++)
        for (int j = 0; j < y.n; j++) {
            term t;
            if (term_mul(&x.t[i], &y.t[j], &t)) poly_add_term(&p, &t);
            else p.overflow = true;
        }
    return p.overflow ? expr_cons_as(g, OM_DIM_MUL, a, b, true) : poly_dim(g, &p);
}

om_dim om_dim_sub(om_graph *g, om_dim a, om_dim b) { return om_dim_add(g, a, om_dim_mul(g, b, om_dim_int(g, -1))); }

/* Rounded down. False: b is 0, or the quotient has no 64 bits (INT64_MIN / -1, which the processor traps). */
static bool floor_div(int64_t a, int64_t b, int64_t *q) {
    if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
    *q = a / b - (a % b != 0 && (a < 0) != (b < 0));
    return true;
}
static int64_t floor_mod(int64_t a, int64_t b) { /* of the sign of b; b != 0 */
    int64_t r = b == -1 ? 0 : a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

/* p / t exactly, term by term; false when some term is not divisible */
static bool poly_div_term(const poly *p, const term *t, poly *out) {
    *out = (poly){0};
    for (int i = 0; i < p->n; i++) {
        term q = {0};
        if (floor_mod(p->t[i].coef, t->coef) || !floor_div(p->t[i].coef, t->coef, &q.coef)) return false;
        int j = 0;
        for (int k = 0; k < p->t[i].n; k++) {
            if (j < t->n && p->t[i].atom[k] == t->atom[j]) j++;
            else q.atom[q.n++] = p->t[i].atom[k];
        }
        if (j != t->n) return false;
        poly_add_term(out, &q);
    }
    return true;
}

/* The terms of p that y divides, divided, and of the constant what is whole: floor((y*w + r) / y) = w + floor(r / y).
 * False when there are none; rest: the others. */
static bool poly_whole(const poly *p, int64_t y, poly *whole, poly *rest) {
    *whole = *rest = (poly){0};
    for (int i = 0; i < p->n; i++) {
        term w = p->t[i], r = p->t[i];
        r.coef = floor_mod(p->t[i].coef, y);
        if (!floor_div(p->t[i].coef, y, &w.coef)) return false;
        if (r.coef && w.n) poly_add_term(rest, &p->t[i]);
        else {
            if (w.coef) poly_add_term(whole, &w);
            if (r.coef) poly_add_term(rest, &r);
        }
    }
    return whole->n > 0;
}

om_dim om_dim_div(om_graph *g, om_dim a, om_dim b) {
    int64_t x, y;
    if (om_dim_const(g, b, &y) && om_dim_const(g, a, &x) && floor_div(x, y, &x)) return om_dim_int(g, x);
    if (b == 1) return a;
    if (a == b) return 1;
    poly p = {0}, q = {0}, r;
    poly_of(g, a, &p);
    poly_of(g, b, &q);
    if (!p.overflow && !q.overflow && q.n == 1 && poly_div_term(&p, &q.t[0], &r)) return poly_dim(g, &r);
    if (om_dim_const(g, b, &y) && y > 0 && !p.overflow && poly_whole(&p, y, &q, &r))
        return om_dim_add(g, poly_dim(g, &q), om_dim_div(g, poly_dim(g, &r), b));
    return expr_cons(g, OM_DIM_DIV, a, b);
}

om_dim om_dim_mod(om_graph *g, om_dim a, om_dim b) {
    int64_t x, y;
    if (om_dim_const(g, b, &y) && y != 0 && om_dim_const(g, a, &x)) return om_dim_int(g, floor_mod(x, y));
    if (b == 1 || a == b) return 0;
    poly p = {0}, q = {0}, r;
    poly_of(g, a, &p);
    poly_of(g, b, &q);
    if (!p.overflow && !q.overflow && q.n == 1 && poly_div_term(&p, &q.t[0], &r)) return 0;
    return expr_cons(g, OM_DIM_MOD, a, b);
}

static om_dim dim_minmax(om_graph *g, om_dim a, om_dim b, bool max) {
    int64_t diff;
    if (a == b) return a;
    if (om_dim_const(g, om_dim_sub(g, a, b), &diff)) return (diff > 0) == max ? a : b;
    if (a < b) { /* one order, so that the pair is hash-consed once */
        om_dim t = a;
        a = b, b = t;
    }
    return expr_cons(g, max ? OM_DIM_MAX : OM_DIM_MIN, a, b);
}
om_dim om_dim_min(om_graph *g, om_dim a, om_dim b) { return dim_minmax(g, a, b, false); }
om_dim om_dim_max(om_graph *g, om_dim a, om_dim b) { return dim_minmax(g, a, b, true); }

om_dim om_dim_numel(om_graph *g, const om_type *t) {
    om_dim n = 1;
    for (int i = 0; i < t->rank; i++) n = om_dim_mul(g, n, t->dim[i]);
    return n;
}

om_dim om_dim_copy(om_graph *to, const om_graph *from, om_dim d) {
    if (d >= 0 || to == from) return d;
    if (to->copied.from != from->serial) to->copied.from = from->serial, to->copied.dim.n = 0;
    while (to->copied.dim.n < from->exprs.n) { /* 0: not yet, and a copy that is 0 is found again */
        om_dim *slot = OM_PUSH(to->cx, &to->copied.dim);
        if (!slot) return 0;
        *slot = 0;
    }
    om_dim done = to->copied.dim.v[~d];
    if (done) return done;
    om_expr e = from->exprs.v[~d];
    if (e.kind == OM_DIM_INT) return om_dim_int(to, e.a);
    if (e.kind == OM_DIM_SYM) return to->copied.dim.v[~d] = om_dim_sym(to, from->syms.v[e.a].name);
    om_dim a = om_dim_copy(to, from, e.a), b = om_dim_copy(to, from, e.b);
    if (to->cx->status != OM_OK) return 0;
    switch (e.kind) {
    case OM_DIM_ADD: done = om_dim_add(to, a, b); break;
    case OM_DIM_MUL: done = om_dim_mul(to, a, b); break;
    case OM_DIM_DIV: done = om_dim_div(to, a, b); break;
    case OM_DIM_MOD: done = om_dim_mod(to, a, b); break;
    case OM_DIM_MIN: done = om_dim_min(to, a, b); break;
    default: done = om_dim_max(to, a, b);
    }
    return to->copied.dim.v[~d] = done;
}

int64_t om_dim_eval(const om_graph *g, om_dim d, const int64_t *sym) {
    if (d >= 0) return d;
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_INT) return e->a;
    if (e->kind == OM_DIM_SYM) return sym[e->a];
    int64_t a = om_dim_eval(g, e->a, sym), b = om_dim_eval(g, e->b, sym), r;
    if (a == OM_DIM_BAD || b == OM_DIM_BAD) return OM_DIM_BAD;
    switch (e->kind) {
    case OM_DIM_ADD: return __builtin_add_overflow(a, b, &r) ? OM_DIM_BAD : r;
    case OM_DIM_MUL: return __builtin_mul_overflow(a, b, &r) ? OM_DIM_BAD : r;
    case OM_DIM_DIV: return floor_div(a, b, &r) ? r : 0; /* by zero: the size is 0 as well */
    case OM_DIM_MOD: return b == 0 ? 0 : floor_mod(a, b);
    case OM_DIM_MIN: return a < b ? a : b;
    default: return a > b ? a : b;
    }
}

/* --- text -------------------------------------------------------------------------------------- */

typedef struct cursor { om_graph *g; const char *s; int depth; bool bad; } cursor;

static void skip(cursor *c) {
    while (*c->s == ' ') c->s++;
}
static bool take(cursor *c, const char *tok) {
    skip(c);
    size_t n = strlen(tok);
    if (strncmp(c->s, tok, n)) return false;
    c->s += n;
    return true;
}

static om_dim parse_sum(cursor *c);

static om_dim parse_atom(cursor *c) {
    skip(c);
    if (c->bad || ++c->depth > MAX_DEPTH) return c->bad = true, 0;
    om_dim d = 0;
    if (take(c, "(")) {
        d = parse_sum(c);
        if (!take(c, ")")) c->bad = true;
    } else if (isdigit((unsigned char)*c->s) || (*c->s == '-' && isdigit((unsigned char)c->s[1]))) {
        char *end; /* with its sign: -2^63 has no positive */
        errno = 0;
        d = om_dim_int(c->g, strtoll(c->s, &end, 10));
        if (errno) c->bad = true;
        else c->s = end;
    } else if (take(c, "-")) {
        d = om_dim_mul(c->g, parse_atom(c), om_dim_int(c->g, -1));
    } else if (isalpha((unsigned char)*c->s) || *c->s == '_') {
        char name[128];
        size_t n = 0;
        while ((isalnum((unsigned char)*c->s) || *c->s == '_' || *c->s == '.') && n < sizeof name - 1)
            name[n++] = *c->s++;
        name[n] = 0;
        if (take(c, "(")) { /* Max(a, b, ...), Min, Mod, FloorDiv */
            om_dim x = parse_sum(c);
            bool max = !strcmp(name, "Max"), min = !strcmp(name, "Min"),
                 mod = !strcmp(name, "Mod") || !strcmp(name, "PythonMod"), div = !strcmp(name, "FloorDiv");
            if (!max && !min && !mod && !div) c->bad = true;
            while (!c->bad && take(c, ",")) {
                om_dim y = parse_sum(c);
                x = max   ? om_dim_max(c->g, x, y)
                    : min ? om_dim_min(c->g, x, y)
                    : mod ? om_dim_mod(c->g, x, y)
                          : om_dim_div(c->g, x, y);
            }
            if (!take(c, ")")) c->bad = true;
            d = x;
        } else {
            d = om_dim_sym(c->g, name);
        }
    } else {
        c->bad = true;
    }
    c->depth--;
    return d;
}

static om_dim parse_product(cursor *c) {
    om_dim d = parse_atom(c);
    while (!c->bad) {
        if (take(c, "//")) d = om_dim_div(c->g, d, parse_atom(c));
        else if (take(c, "*")) d = om_dim_mul(c->g, d, parse_atom(c));
        else if (take(c, "%")) d = om_dim_mod(c->g, d, parse_atom(c));
        else break;
    }
    return d;
}

static om_dim parse_sum(cursor *c) {
    if (++c->depth > MAX_DEPTH) return c->bad = true, 0;
    om_dim d = parse_product(c);
    while (!c->bad) {
        if (take(c, "+")) d = om_dim_add(c->g, d, parse_product(c));
        else if (take(c, "-")) d = om_dim_sub(c->g, d, parse_product(c));
        else break;
    }
    c->depth--;
    return d;
}

om_status om_dim_parse(om_graph *g, const char *text, om_dim *out) {
    cursor c = {g, text, 0, false};
    *out = parse_sum(&c);
    skip(&c);
    if (g->cx->status != OM_OK) return g->cx->status;
    if (c.bad || *c.s)
        return om_fail(
            g->cx, OM_INVALID,
            "size expression '%.100s' is not understood at position %d: allowed are integers, names, + - * // %%, "
            "Max(), Min(), Mod(), FloorDiv()",
            text, (int)(c.s - text));
    return g->cx->status;
}

static size_t dim_print(const om_graph *g, om_dim d, char *buf, size_t size, int prec) {
    size_t n = 0;
#define PUT(...)                                                                                    \
    do {                                                                                            \
        int w_ = snprintf(n < size ? buf + n : NULL, n < size ? size - n : 0, __VA_ARGS__);         \
        n += w_ > 0 ? (size_t)w_ : 0;                                                               \
    } while (0)
#define SUB(x, p) n += dim_print(g, (x), n < size ? buf + n : NULL, n < size ? size - n : 0, (p))
    int64_t v;
    if (om_dim_const(g, d, &v)) {
        PUT(v < 0 && prec > 0 ? "(%lld)" : "%lld", (long long)v);
        return n;
    }
    const om_expr *e = &g->exprs.v[~d];
    switch (e->kind) {
    case OM_DIM_SYM: PUT("%s", g->syms.v[e->a].name); break;
    case OM_DIM_ADD:
        if (prec > 0) PUT("(");
        SUB(e->a, 0);
        if (om_dim_const(g, e->b, &v) && v < 0 && v > INT64_MIN) PUT(" - %lld", -(long long)v);
        else {
            PUT(" + ");
            SUB(e->b, 1);
        }
        if (prec > 0) PUT(")");
        break;
    case OM_DIM_MUL:
    case OM_DIM_DIV:
        if (prec > 1) PUT("(");
        SUB(e->a, 1);
        PUT(e->kind == OM_DIM_MUL ? "*" : "//");
        SUB(e->b, 2);
        if (prec > 1) PUT(")");
        break;
    default:
        PUT(e->kind == OM_DIM_MOD ? "Mod(" : e->kind == OM_DIM_MIN ? "Min(" : "Max(");
        SUB(e->a, 0);
        PUT(", ");
        SUB(e->b, 0);
        PUT(")");
    }
    return n;
#undef PUT
#undef SUB
}

void om_dim_print(const om_graph *g, om_dim d, char *buf, size_t size) {
    if (size) buf[0] = 0;
    dim_print(g, d, buf, size, 0);
}
