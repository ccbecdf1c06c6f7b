/* expr.c - the algebra of scalar expressions over index variables (expr.h has the forms).
 *
 * Expressions are hash-consed: a constructor looks for an equal node first, so == on ids is structural equality. Each
 * constructor returns a normal form:
 *   - integers are sums of (size * atom) plus a size; a sum that is one atom is that atom;
 *   - comparisons are `sum >= 0`, `sum == 0`, `sum != 0`, folded when the range of the sum decides them;
 *   - NOT is pushed to the leaves, AND and OR are flat and sorted, x AND NOT x is false;
 *   - floats keep where() and sums apart; constants are rounded to the dtype in which the graph computes them.
 * Ranges: a variable lies in [0, size - 1], bool as int in [0, 1]; a sum's bound is the sum of its terms' bounds, a
 * polynomial over size symbols, whose sign comes from interval arithmetic with sizes >= 0 (and >= 1 for the size of a
 * variable that occurs: otherwise there is no element to speak of). Unknown is always an answer.
 */
#include "passes/masks/expr.h"

#include <math.h>
#include <stdio.h>

#define INF (INT64_MAX / 2)

/* --- nodes ------------------------------------------------------------------------------------------- */

static uint32_t mx_hash(uint32_t h, uint64_t x) {
    x = (x ^ h) * 0x9e3779b97f4a7c15ull;
    return (uint32_t)(x ^ (x >> 32));
}

/* First word that is an expression, and the step to the next; -1: none. */
static int mx_first_arg(int kind, int *step) {
    *step = 1;
    switch (kind) {
    case MX_TRUE: case MX_FALSE: case MX_VAR: case MX_FLT: return -1;
    case MX_LIN: *step = 2; return 1;
    case MX_DIV: case MX_MOD: *step = 2; return 0;
    case MX_LOAD: return 1;
    default: return 0;
    }
}

static mx_id mx_put(mx *m, int kind, int cls, double f, const int64_t *w, int n) {
    uint64_t fb;
    memcpy(&fb, &f, 8);
    uint32_t h = mx_hash(mx_hash((uint32_t)kind, fb), (uint64_t)cls);
    for (int i = 0; i < n; i++) h = mx_hash(h, (uint64_t)w[i]);
    for (mx_id e = m->head[h & 4095]; e != MX_NONE; e = m->nodes.v[e].next) {
        const mx_node *x = &m->nodes.v[e];
        if (x->hash == h && x->kind == kind && x->cls == cls && x->n == n && !memcmp(&x->f, &f, 8) &&
            (!n || !memcmp(x->w, w, (size_t)n * 8)))
            return e;
    }
    if (m->cx->status != OM_OK || m->nodes.n >= MX_NODES_MAX) return MX_NONE;
    uint32_t deps = kind == MX_VAR ? 1u << w[0] : 0;
    int step, first = mx_first_arg(kind, &step);
    for (int i = first; first >= 0 && i < n; i += step) deps |= m->nodes.v[w[i]].deps;
    const int64_t *words = n ? om_arena_copy(&m->arena, w, (size_t)n * 8) : NULL;
    if (n && !words) return MX_NONE;
    mx_node *x = OM_PUSH(m->cx, &m->nodes);
    if (!x) return MX_NONE;
    *x = (mx_node){(uint8_t)kind, (uint8_t)cls, (uint16_t)n, deps, h, m->head[h & 4095], words, f};
    return m->head[h & 4095] = m->nodes.n - 1;
}

om_status mx_init(mx *m, om_ctx *cx, om_graph *g) {
    memset(m, 0, sizeof *m);
    m->cx = cx;
    m->g = g;
    m->arena.cx = cx;
    memset(m->head, 0xff, sizeof m->head);
    m->t = mx_put(m, MX_TRUE, MX_BOOL, 0, NULL, 0);
    m->fa = mx_put(m, MX_FALSE, MX_BOOL, 0, NULL, 0);
    return cx->status;
}

void mx_free(mx *m) {
    om_free(m->cx, m->nodes.v);
    om_arena_free(&m->arena);
}

mx_id mx_var(mx *m, int var, om_dim size) {
    if (size == 1) return mx_int(m, 0);
    return mx_put(m, MX_VAR, MX_INT, 0, (int64_t[]){var, size}, 2);
}

mx_id mx_load(mx *m, om_id v, const mx_id *idx, int rank, int cls) {
    int64_t w[OM_RANK + 1] = {v};
    for (int i = 0; i < rank; i++) {
        if (idx[i] == MX_NONE) return MX_NONE;
        w[i + 1] = idx[i];
    }
    return mx_put(m, MX_LOAD, cls, 0, w, rank + 1);
}

/* --- integer sums ------------------------------------------------------------------------------------ */

mx_id mx_int(mx *m, om_dim c) { return mx_put(m, MX_LIN, MX_INT, 0, &c, 1); }
mx_id mx_i64(mx *m, int64_t c) { return mx_int(m, om_dim_int(m->g, c)); }

void mx_lin_get(const mx *m, mx_id e, mx_lin *out) {
    const mx_node *x = mx_at(m, e);
    *out = (mx_lin){0};
    if (x->kind != MX_LIN) {
        out->n = 1;
        out->atom[0] = e;
        out->coef[0] = 1;
        return;
    }
    out->c = x->w[0];
    out->n = (x->n - 1) / 2;
    for (int i = 0; i < out->n; i++) out->atom[i] = (mx_id)x->w[1 + 2 * i], out->coef[i] = x->w[2 + 2 * i];
}

static mx_id mx_lin_put(mx *m, const mx_lin *l) {
    int64_t w[1 + 2 * MX_LIN_MAX] = {l->c};
    int n = 1;
    for (int i = 0; i < l->n; i++) {
        if (l->coef[i] == 0) continue;
        w[n++] = l->atom[i];
        w[n++] = l->coef[i];
    }
    if (n == 3 && w[0] == 0 && w[2] == 1) return (mx_id)w[1];
    return mx_put(m, MX_LIN, MX_INT, 0, w, n);
}

/* l += coef * atom; false when it would not fit */
static bool mx_lin_add(mx *m, mx_lin *l, mx_id atom, om_dim coef) {
    int i = 0;
    while (i < l->n && l->atom[i] < atom) i++;
    if (i < l->n && l->atom[i] == atom) {
        l->coef[i] = om_dim_add(m->g, l->coef[i], coef);
        return true;
    }
    if (l->n == MX_LIN_MAX) return false;
    for (int j = l->n++; j > i; j--) l->atom[j] = l->atom[j - 1], l->coef[j] = l->coef[j - 1];
    l->atom[i] = atom, l->coef[i] = coef;
    return true;
}

bool mx_int_const(const mx *m, mx_id e, om_dim *c) {
    if (e == MX_NONE) return false;
    const mx_node *x = mx_at(m, e);
    if (x->kind != MX_LIN || x->n != 1) return false;
    *c = x->w[0];
    return true;
}

static mx_id mx_combine(mx *m, mx_id a, mx_id b, om_dim s) { /* a + s * b */
    if (a == MX_NONE || b == MX_NONE) return MX_NONE;
    mx_lin x, y;
    mx_lin_get(m, a, &x);
    mx_lin_get(m, b, &y);
    x.c = om_dim_add(m->g, x.c, om_dim_mul(m->g, y.c, s));
    for (int i = 0; i < y.n; i++)
        if (!mx_lin_add(m, &x, y.atom[i], om_dim_mul(m->g, y.coef[i], s))) return MX_NONE;
    return mx_lin_put(m, &x);
}

mx_id mx_add(mx *m, mx_id a, mx_id b) { return mx_combine(m, a, b, 1); }
mx_id mx_sub(mx *m, mx_id a, mx_id b) { return mx_combine(m, a, b, om_dim_int(m->g, -1)); }
mx_id mx_scale(mx *m, mx_id a, om_dim c) { return mx_combine(m, mx_int(m, 0), a, c); }

mx_id mx_b2i(mx *m, mx_id p) {
    if (p == MX_NONE) return MX_NONE;
    if (p == m->t || p == m->fa) return mx_int(m, p == m->t);
    return mx_put(m, MX_B2I, MX_INT, 0, (int64_t[]){p}, 1);
}

mx_id mx_sel(mx *m, mx_id c, mx_id a, mx_id b) {
    if (c == MX_NONE || a == MX_NONE || b == MX_NONE) return MX_NONE;
    if (c == m->t || a == b) return a;
    if (c == m->fa) return b;
    om_dim x, y;
    if (mx_int_const(m, a, &x) && mx_int_const(m, b, &y)) /* y + (x - y) * c */
        return mx_add(m, b, mx_scale(m, mx_b2i(m, c), om_dim_sub(m->g, x, y)));
    return mx_put(m, MX_SEL, MX_INT, 0, (int64_t[]){c, a, b}, 3);
}

mx_id mx_mul(mx *m, mx_id a, mx_id b) {
    if (a == MX_NONE || b == MX_NONE) return MX_NONE;
    om_dim c;
    if (mx_int_const(m, a, &c)) return mx_scale(m, b, c);
    if (mx_int_const(m, b, &c)) return mx_scale(m, a, c);
    mx_node x = *mx_at(m, a), y = *mx_at(m, b);
    if (x.kind == MX_B2I) return mx_sel(m, (mx_id)x.w[0], b, mx_int(m, 0));
    if (y.kind == MX_B2I) return mx_sel(m, (mx_id)y.w[0], a, mx_int(m, 0));
    if (a > b) {
        mx_id t = a;
        a = b, b = t;
    }
    return mx_put(m, MX_MUL, MX_INT, 0, (int64_t[]){a, b}, 2);
}

/* --- ranges ------------------------------------------------------------------------------------------ */

typedef struct mx_range { int64_t lo, hi; } mx_range;

static int64_t sat_add(int64_t a, int64_t b) {
    if (a <= -INF || b <= -INF) return -INF;
    if (a >= INF || b >= INF) return INF;
    int64_t r = a + b;
    return r > INF ? INF : r < -INF ? -INF : r;
}
static int64_t sat_mul(int64_t a, int64_t b) {
    int64_t r;
    if (a == 0 || b == 0) return 0;
    if (__builtin_mul_overflow(a, b, &r) || r > INF || r < -INF || a >= INF || a <= -INF || b >= INF || b <= -INF)
        return (a > 0) == (b > 0) ? INF : -INF;
    return r;
}

/* Values a size may take. `ones`: bit i = symbol i is known to be >= 1 (the first 64 symbols). */
static mx_range dim_range(const om_graph *g, om_dim d, uint64_t ones) {
    int64_t v;
    if (om_dim_const(g, d, &v)) return (mx_range){v, v};
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_SYM) {
        if (g->syms.v[e->a].input == OM_NONE || g->syms.v[e->a].axis < 0) return (mx_range){-INF, INF};
        return (mx_range){e->a < 64 && (ones >> e->a & 1), INF};
    }
    mx_range a = dim_range(g, e->a, ones), b = dim_range(g, e->b, ones);
    switch (e->kind) {
    case OM_DIM_ADD: return (mx_range){sat_add(a.lo, b.lo), sat_add(a.hi, b.hi)};
    case OM_DIM_MUL: {
        int64_t p[4] = {sat_mul(a.lo, b.lo), sat_mul(a.lo, b.hi), sat_mul(a.hi, b.lo), sat_mul(a.hi, b.hi)};
        mx_range r = {p[0], p[0]};
        for (int i = 1; i < 4; i++) r.lo = p[i] < r.lo ? p[i] : r.lo, r.hi = p[i] > r.hi ? p[i] : r.hi;
        return r;
    }
    case OM_DIM_DIV: /* by zero gives 0; else between 0 and a for b >= 1 */
        if (b.lo < 0) return (mx_range){-INF, INF};
        return (mx_range){a.lo < 0 ? a.lo : 0, a.hi > 0 ? a.hi : 0};
    case OM_DIM_MOD: return b.lo < 0 ? (mx_range){-INF, INF} : (mx_range){0, b.hi > 0 ? sat_add(b.hi, -1) : 0};
    case OM_DIM_MIN: return (mx_range){a.lo < b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi};
    default: return (mx_range){a.lo > b.lo ? a.lo : b.lo, a.hi > b.hi ? a.hi : b.hi};
    }
}

/* The symbols that are the size of a variable in e. */
static uint64_t mx_ones(const mx *m, mx_id e) {
    const mx_node *x = mx_at(m, e);
    if (!x->deps) return 0;
    if (x->kind == MX_VAR) {
        om_dim size = x->w[1];
        if (size >= 0 || m->g->exprs.v[~size].kind != OM_DIM_SYM || m->g->exprs.v[~size].a >= 64) return 0;
        return 1ull << m->g->exprs.v[~size].a;
    }
    if (x->kind == MX_LOAD) return 0;
    uint64_t ones = 0;
    int step, first = mx_first_arg(x->kind, &step);
    for (int i = first; first >= 0 && i < x->n; i += step) ones |= mx_ones(m, (mx_id)x->w[i]);
    return ones;
}

/* A bound of an int expression as a size polynomial; false: none known. */
static bool mx_bound(mx *m, mx_id e, bool upper, uint64_t ones, int depth, om_dim *out) {
    const mx_node *x = mx_at(m, e);
    if (depth > 20) return false;
    switch (x->kind) {
    case MX_VAR: *out = upper ? om_dim_add(m->g, x->w[1], om_dim_int(m->g, -1)) : 0; return true;
    case MX_B2I: *out = upper; return true;
    case MX_MOD: *out = upper ? om_dim_add(m->g, x->w[1], om_dim_int(m->g, -1)) : 0; return true;
    case MX_DIV: {
        om_dim b, d = x->w[1];
        if (!mx_bound(m, (mx_id)x->w[0], upper, ones, depth + 1, &b)) return false;
        *out = om_dim_div(m->g, b, d);
        return true;
    }
    case MX_ABS: {
        om_dim lo, hi;
        mx_id a = (mx_id)x->w[0];
        if (!upper) return *out = 0, true;
        if (!mx_bound(m, a, false, ones, depth + 1, &lo) || !mx_bound(m, a, true, ones, depth + 1, &hi)) return false;
        *out = om_dim_max(m->g, hi, om_dim_mul(m->g, lo, om_dim_int(m->g, -1)));
        return true;
    }
    case MX_SEL: {
        om_dim a, b;
        mx_id ea = (mx_id)x->w[1], eb = (mx_id)x->w[2];
        if (!mx_bound(m, ea, upper, ones, depth + 1, &a) || !mx_bound(m, eb, upper, ones, depth + 1, &b)) return false;
        *out = upper ? om_dim_max(m->g, a, b) : om_dim_min(m->g, a, b);
        return true;
    }
    case MX_LIN: {
        mx_lin l;
        mx_lin_get(m, e, &l);
        om_dim sum = l.c;
        for (int i = 0; i < l.n; i++) {
            mx_range c = dim_range(m->g, l.coef[i], ones);
            om_dim b;
            if (c.lo < 0 && c.hi > 0) return false;
            if (!mx_bound(m, l.atom[i], upper == (c.lo >= 0), ones, depth + 1, &b)) return false;
            sum = om_dim_add(m->g, sum, om_dim_mul(m->g, l.coef[i], b));
        }
        *out = sum;
        return true;
    }
    default: return false;
    }
}

int mx_sign(mx *m, mx_id e) {
    if (e == MX_NONE) return 0;
    uint64_t ones = mx_ones(m, e);
    om_dim b;
    if (mx_bound(m, e, false, ones, 0, &b) && dim_range(m->g, b, ones).lo >= 0) return 1;
    if (mx_bound(m, e, true, ones, 0, &b) && dim_range(m->g, b, ones).hi < 0) return -1;
    return 0;
}

static mx_id mx_div_mod(mx *m, mx_id a, om_dim d, bool mod) {
    if (a == MX_NONE || d == 0) return MX_NONE;
    mx_lin l, quot = {0}, rest = {0};
    mx_lin_get(m, a, &l);
    int64_t c, dv;
    for (int i = 0; i < l.n; i++) {
        bool exact = om_dim_mod(m->g, l.coef[i], d) == 0;
        if (!mx_lin_add(m, exact ? &quot : &rest, l.atom[i], exact ? om_dim_div(m->g, l.coef[i], d) : l.coef[i]))
            return MX_NONE;
    }
    if (om_dim_const(m->g, l.c, &c) && om_dim_const(m->g, d, &dv)) {
        int64_t q = c / dv - (c % dv != 0 && (c < 0) != (dv < 0));
        quot.c = om_dim_int(m->g, q);
        rest.c = om_dim_int(m->g, c - q * dv);
    } else if (om_dim_mod(m->g, l.c, d) == 0) {
        quot.c = om_dim_div(m->g, l.c, d);
    } else {
        rest.c = l.c;
    }
    mx_id r = mx_lin_put(m, &rest), q = mx_lin_put(m, &quot);
    if (r == MX_NONE || q == MX_NONE) return MX_NONE;
    if (mx_sign(m, r) == 1 && mx_sign(m, mx_sub(m, mx_int(m, om_dim_add(m->g, d, om_dim_int(m->g, -1))), r)) == 1)
        return mod ? r : q;
    if (mod) return mx_put(m, MX_MOD, MX_INT, 0, (int64_t[]){r, d}, 2);
    return mx_add(m, q, mx_put(m, MX_DIV, MX_INT, 0, (int64_t[]){r, d}, 2));
}
mx_id mx_div(mx *m, mx_id a, om_dim d) { return mx_div_mod(m, a, d, false); }
mx_id mx_mod(mx *m, mx_id a, om_dim d) { return mx_div_mod(m, a, d, true); }

mx_id mx_abs(mx *m, mx_id a) {
    int s = mx_sign(m, a);
    if (a == MX_NONE || s == 1) return a;
    mx_id neg = mx_scale(m, a, om_dim_int(m->g, -1));
    if (s == -1 || neg == MX_NONE) return neg;
    if (mx_at(m, a)->kind == MX_LIN && neg < a) a = neg; /* |x| = |-x|: one spelling */
    return mx_put(m, MX_ABS, MX_INT, 0, (int64_t[]){a}, 1);
}

/* --- booleans ---------------------------------------------------------------------------------------- */

mx_id mx_not(mx *m, mx_id p) {
    if (p == MX_NONE) return MX_NONE;
    mx_node x = *mx_at(m, p);
    switch (x.kind) {
    case MX_TRUE: return m->fa;
    case MX_FALSE: return m->t;
    case MX_GE0: return mx_ge0(m, mx_sub(m, mx_i64(m, -1), (mx_id)x.w[0]));
    case MX_EQ0: return mx_put(m, MX_NE0, MX_BOOL, 0, x.w, 1);
    case MX_NE0: return mx_put(m, MX_EQ0, MX_BOOL, 0, x.w, 1);
    case MX_NOT: return (mx_id)x.w[0];
    case MX_AND: case MX_OR: {
        mx_id r = x.kind == MX_AND ? m->fa : m->t;
        for (int i = 0; i < x.n; i++) {
            mx_id q = mx_not(m, (mx_id)x.w[i]);
            r = x.kind == MX_AND ? mx_or(m, r, q) : mx_and(m, r, q);
        }
        return r;
    }
    default: return mx_put(m, MX_NOT, MX_BOOL, 0, (int64_t[]){p}, 1);
    }
}

/* Two comparisons of sums that differ by a constant: which implies which. 1: p => q, -1: q => p, 0: unknown */
static int mx_implies(mx *m, mx_id p, mx_id q) {
    if (mx_at(m, p)->kind != MX_GE0 || mx_at(m, q)->kind != MX_GE0) return 0;
    mx_lin a, b;
    mx_lin_get(m, (mx_id)mx_at(m, p)->w[0], &a);
    mx_lin_get(m, (mx_id)mx_at(m, q)->w[0], &b);
    if (a.n != b.n || memcmp(a.atom, b.atom, (size_t)a.n * sizeof *a.atom) ||
        memcmp(a.coef, b.coef, (size_t)a.n * sizeof *a.coef))
        return 0;
    int64_t d;
    if (!om_dim_const(m->g, om_dim_sub(m->g, b.c, a.c), &d)) return 0;
    return d >= 0 ? 1 : -1;
}

static bool mx_has(const int64_t *w, int n, mx_id e) {
    for (int i = 0; i < n; i++)
        if ((mx_id)w[i] == e) return true;
    return false;
}

static mx_id mx_nary(mx *m, int kind, mx_id p, mx_id q) {
    if (p == MX_NONE || q == MX_NONE) return MX_NONE;
    mx_id unit = kind == MX_AND ? m->t : m->fa, zero = kind == MX_AND ? m->fa : m->t;
    int64_t w[2 * MX_ARGS_MAX];
    int n = 0;
    for (int side = 0; side < 2; side++) {
        mx_id e = side ? q : p;
        mx_node x = *mx_at(m, e);
        int64_t one = e;
        const int64_t *src = x.kind == kind ? x.w : &one;
        int cnt = x.kind == kind ? x.n : 1;
        for (int i = 0; i < cnt; i++) {
            mx_id a = (mx_id)src[i];
            if (a == zero) return zero;
            if (a == unit || mx_has(w, n, a)) continue;
            mx_id na = mx_not(m, a);
            if (na == MX_NONE) return MX_NONE;
            if (mx_has(w, n, na)) return zero;
            bool drop = false;
            for (int j = 0; j < n && !drop; j++) {
                int imp = mx_implies(m, a, (mx_id)w[j]);      /* AND keeps the stronger, OR the weaker */
                if (kind == MX_OR) imp = -imp;
                if (imp == 1) w[j] = w[--n], j--;
                else if (imp == -1) drop = true;
                else {                                        /* a AND (a OR b) = a, and the other way round */
                    mx_node y = *mx_at(m, (mx_id)w[j]);
                    if (y.kind == (kind == MX_AND ? MX_OR : MX_AND) && mx_has(y.w, y.n, a)) w[j] = w[--n], j--;
                }
            }
            if (drop) continue;
            mx_node xa = *mx_at(m, a);
            if (xa.kind == (kind == MX_AND ? MX_OR : MX_AND))
                for (int j = 0; j < n && !drop; j++) drop = mx_has(xa.w, xa.n, (mx_id)w[j]);
            if (drop) continue;
            if (n == MX_ARGS_MAX) return MX_NONE;
            w[n++] = a;
        }
    }
    if (n == 0) return unit;
    if (n == 1) return (mx_id)w[0];
    for (int i = 1; i < n; i++) /* few: insertion sort */
        for (int j = i; j > 0 && w[j] < w[j - 1]; j--) {
            int64_t t = w[j];
            w[j] = w[j - 1], w[j - 1] = t;
        }
    return mx_put(m, kind, MX_BOOL, 0, w, n);
}
mx_id mx_and(mx *m, mx_id p, mx_id q) { return mx_nary(m, MX_AND, p, q); }
mx_id mx_or(mx *m, mx_id p, mx_id q) { return mx_nary(m, MX_OR, p, q); }

mx_id mx_bsel(mx *m, mx_id c, mx_id p, mx_id q) {
    if (c == MX_NONE || p == MX_NONE || q == MX_NONE) return MX_NONE;
    if (c == m->t || p == q) return p;
    if (c == m->fa) return q;
    if (p == m->t) return mx_or(m, c, q);
    if (p == m->fa) return mx_and(m, mx_not(m, c), q);
    if (q == m->t) return mx_or(m, mx_not(m, c), p);
    if (q == m->fa) return mx_and(m, c, p);
    return mx_or(m, mx_and(m, c, p), mx_and(m, mx_not(m, c), q));
}

/* Rules shared by >= 0 and == 0 that split a sum on a condition inside it: f(sum with where(c, a, b)) = c ? f(a) :
 * f(b). Only for a sum of one such term: the result is then no larger. */
static bool mx_split(mx *m, mx_id e, mx_id *c, mx_id *a, mx_id *b) {
    mx_lin l;
    mx_lin_get(m, e, &l);
    if (l.n != 1) return false;
    mx_node x = *mx_at(m, l.atom[0]);
    mx_id base = mx_int(m, l.c);
    if (x.kind == MX_B2I) {
        *c = (mx_id)x.w[0];
        *a = mx_int(m, om_dim_add(m->g, l.c, l.coef[0]));
        *b = base;
    } else if (x.kind == MX_SEL) {
        *c = (mx_id)x.w[0];
        *a = mx_add(m, base, mx_scale(m, (mx_id)x.w[1], l.coef[0]));
        *b = mx_add(m, base, mx_scale(m, (mx_id)x.w[2], l.coef[0]));
    } else {
        return false;
    }
    return *a != MX_NONE && *b != MX_NONE;
}

/* All coefficients constants of one magnitude: that magnitude, else 0. */
static int64_t mx_content(const mx *m, const mx_lin *l) {
    int64_t k = 0, c;
    for (int i = 0; i < l->n; i++) {
        if (!om_dim_const(m->g, l->coef[i], &c) || c == INT64_MIN) return 0;
        if (c < 0) c = -c;
        if (k && c != k) return 0;
        k = c;
    }
    return k;
}

static void mx_divide(mx *m, mx_lin *l, int64_t k, int64_t c) { /* (terms / k) + c */
    int64_t v = 0;
    for (int i = 0; i < l->n; i++) {
        om_dim_const(m->g, l->coef[i], &v);
        l->coef[i] = om_dim_int(m->g, v / k);
    }
    l->c = om_dim_int(m->g, c);
}

mx_id mx_ge0(mx *m, mx_id e) {
    if (e == MX_NONE) return MX_NONE;
    int s = mx_sign(m, e);
    if (s) return s > 0 ? m->t : m->fa;
    mx_id c, a, b;
    if (mx_split(m, e, &c, &a, &b)) return mx_bsel(m, c, mx_ge0(m, a), mx_ge0(m, b));
    mx_lin l;
    mx_lin_get(m, e, &l);
    int64_t k = mx_content(m, &l), v;
    if (k > 1 && om_dim_const(m->g, l.c, &v)) {
        mx_divide(m, &l, k, v / k - (v % k < 0));
        return mx_ge0(m, mx_lin_put(m, &l));
    }
    for (int i = 0; i < l.n; i++) { /* c - |x| >= 0: both signs; c + |x| >= 0: either */
        mx_node x = *mx_at(m, l.atom[i]);
        if (x.kind != MX_ABS || !om_dim_const(m->g, l.coef[i], &v) || (v != 1 && v != -1)) continue;
        mx_lin rest = l;
        rest.coef[i] = 0;
        mx_id r = mx_lin_put(m, &rest), p = mx_ge0(m, mx_add(m, r, (mx_id)x.w[0])),
              q = mx_ge0(m, mx_sub(m, r, (mx_id)x.w[0]));
        return v < 0 ? mx_and(m, p, q) : mx_or(m, p, q);
    }
    return mx_put(m, MX_GE0, MX_BOOL, 0, (int64_t[]){e}, 1);
}

mx_id mx_eq0(mx *m, mx_id e) {
    if (e == MX_NONE) return MX_NONE;
    om_dim d;
    int64_t v;
    if (mx_int_const(m, e, &d) && om_dim_const(m->g, d, &v)) return v == 0 ? m->t : m->fa;
    if (mx_sign(m, mx_sub(m, e, mx_int(m, 1))) > 0 || mx_sign(m, e) < 0) return m->fa;
    mx_id c, a, b;
    if (mx_split(m, e, &c, &a, &b)) return mx_bsel(m, c, mx_eq0(m, a), mx_eq0(m, b));
    mx_lin l;
    mx_lin_get(m, e, &l);
    int64_t k = mx_content(m, &l);
    if (k > 1 && om_dim_const(m->g, l.c, &v)) {
        if (v % k) return m->fa;
        mx_divide(m, &l, k, v / k);
        return mx_eq0(m, mx_lin_put(m, &l));
    }
    if (l.n == 1 && l.c == 0 && l.coef[0] == 1) { /* x * y == 0, |x| == 0 */
        mx_node x = *mx_at(m, l.atom[0]);
        if (x.kind == MX_MUL) return mx_or(m, mx_eq0(m, (mx_id)x.w[0]), mx_eq0(m, (mx_id)x.w[1]));
        if (x.kind == MX_ABS) return mx_eq0(m, (mx_id)x.w[0]);
    }
    /* one spelling of x == 0, -x == 0 */
    if (l.n && om_dim_const(m->g, l.coef[0], &v) && v < 0) e = mx_scale(m, e, om_dim_int(m->g, -1));
    if (e == MX_NONE) return MX_NONE;
    return mx_put(m, MX_EQ0, MX_BOOL, 0, (int64_t[]){e}, 1);
}

/* --- floats ------------------------------------------------------------------------------------------ */

mx_id mx_flt(mx *m, double x) { return mx_put(m, MX_FLT, MX_FLOAT, x == 0 ? 0.0 : x, NULL, 0); /* -0 adds like 0 */ }

mx_id mx_fsel(mx *m, mx_id c, mx_id x, mx_id y) {
    if (c == MX_NONE || x == MX_NONE || y == MX_NONE) return MX_NONE;
    if (c == m->t || x == y) return x;
    if (c == m->fa) return y;
    mx_node a = *mx_at(m, x), b = *mx_at(m, y);
    if (a.kind == MX_FSEL) { /* where(c, where(d, p, q), y) */
        mx_id d = (mx_id)a.w[0], p = (mx_id)a.w[1], q = (mx_id)a.w[2];
        if (d == c) return mx_fsel(m, c, p, y);
        if (q == y) return mx_fsel(m, mx_and(m, c, d), p, y);
        if (p == y) return mx_fsel(m, mx_and(m, c, mx_not(m, d)), q, y);
    }
    if (b.kind == MX_FSEL) { /* where(c, x, where(d, p, q)) */
        mx_id d = (mx_id)b.w[0], p = (mx_id)b.w[1], q = (mx_id)b.w[2];
        if (d == c) return mx_fsel(m, c, x, q);
        if (p == x) return mx_fsel(m, mx_or(m, c, d), x, q);
        if (q == x) return mx_fsel(m, mx_or(m, c, mx_not(m, d)), x, p);
    }
    return mx_put(m, MX_FSEL, MX_FLOAT, 0, (int64_t[]){c, x, y}, 3);
}

mx_id mx_fadd(mx *m, mx_id x, mx_id y, int dtype) {
    if (x == MX_NONE || y == MX_NONE) return MX_NONE;
    mx_node a = *mx_at(m, x), b = *mx_at(m, y);
    if (a.kind == MX_FLT && b.kind == MX_FLT) return mx_flt(m, om_round_to(dtype, a.f + b.f));
    if (a.kind == MX_FLT && a.f == 0) return y;
    if (b.kind == MX_FLT && b.f == 0) return x;
    if (a.kind == MX_FLT && b.kind == MX_FSEL)
        return mx_fsel(m, (mx_id)b.w[0], mx_fadd(m, x, (mx_id)b.w[1], dtype), mx_fadd(m, x, (mx_id)b.w[2], dtype));
    if (b.kind == MX_FLT && a.kind == MX_FSEL)
        return mx_fsel(m, (mx_id)a.w[0], mx_fadd(m, (mx_id)a.w[1], y, dtype), mx_fadd(m, (mx_id)a.w[2], y, dtype));
    int64_t w[2 * MX_ARGS_MAX];
    int n = 0;
    for (int side = 0; side < 2; side++) {
        const mx_node *s = side ? &b : &a;
        for (int i = 0; i < (s->kind == MX_FADD ? s->n : 1); i++) {
            if (n == MX_ARGS_MAX) return MX_NONE;
            int64_t e = s->kind == MX_FADD ? s->w[i] : side ? y : x;
            int j = n++;
            for (; j > 0 && w[j - 1] > e; j--) w[j] = w[j - 1];
            w[j] = e;
        }
    }
    return mx_put(m, MX_FADD, MX_FLOAT, 0, w, n);
}

/* --- substitution ------------------------------------------------------------------------------------ */

mx_id mx_subst(mx *m, mx_id e, int var, mx_id by) {
    if (e == MX_NONE || by == MX_NONE) return MX_NONE;
    mx_node x = *mx_at(m, e);
    if (!(x.deps >> var & 1)) return e;
    if (x.kind == MX_VAR) return by;
    mx_id s[1 + 2 * MX_LIN_MAX + 2 * MX_ARGS_MAX];
    int step, first = mx_first_arg(x.kind, &step);
    for (int i = first; i < x.n; i += step)
        if ((s[i] = mx_subst(m, (mx_id)x.w[i], var, by)) == MX_NONE) return MX_NONE;
    switch (x.kind) {
    case MX_GE0: return mx_ge0(m, s[0]);
    case MX_EQ0: return mx_eq0(m, s[0]);
    case MX_NE0: return mx_not(m, mx_eq0(m, s[0]));
    case MX_NOT: return mx_not(m, s[0]);
    case MX_AND: case MX_OR: {
        mx_id r = s[0];
        for (int i = 1; i < x.n; i++) r = mx_nary(m, x.kind, r, s[i]);
        return r;
    }
    case MX_LIN: {
        mx_id r = mx_int(m, x.w[0]);
        for (int i = 1; i < x.n; i += 2) r = mx_add(m, r, mx_scale(m, s[i], x.w[i + 1]));
        return r;
    }
    case MX_B2I: return mx_b2i(m, s[0]);
    case MX_DIV: return mx_div(m, s[0], x.w[1]);
    case MX_MOD: return mx_mod(m, s[0], x.w[1]);
    case MX_MUL: return mx_mul(m, s[0], s[1]);
    case MX_ABS: return mx_abs(m, s[0]);
    case MX_SEL: return mx_sel(m, s[0], s[1], s[2]);
    case MX_FSEL: return mx_fsel(m, s[0], s[1], s[2]);
    case MX_FADD: {
        mx_id r = s[0];
        for (int i = 1; i < x.n; i++) r = mx_fadd(m, r, s[i], OM_F64);
        return r;
    }
    case MX_LOAD: return mx_load(m, (om_id)x.w[0], s + 1, x.n - 1, x.cls);
    default: return MX_NONE;
    }
}

/* --- text, for the debug log --------------------------------------------------------------------------- */

static size_t mx_text(const mx *m, const om_graph *names, mx_id e, char *buf, size_t size) {
    static const char *const name[] = {
        [MX_TRUE] = "true", [MX_FALSE] = "false", [MX_GE0] = "ge0", [MX_EQ0] = "eq0", [MX_NE0] = "ne0",
        [MX_NOT] = "not",   [MX_AND] = "and",     [MX_OR] = "or",   [MX_B2I] = "int", [MX_DIV] = "div",
        [MX_MOD] = "mod",   [MX_MUL] = "mul",     [MX_ABS] = "abs", [MX_SEL] = "sel", [MX_FSEL] = "where",
        [MX_FADD] = "fadd", [MX_LOAD] = "load"};
    size_t n = 0;
#define PUT(...)                                                                                    \
    do {                                                                                            \
        int w_ = snprintf(n < size ? buf + n : NULL, n < size ? size - n : 0, __VA_ARGS__);         \
        n += w_ > 0 ? (size_t)w_ : 0;                                                               \
    } while (0)
#define SUB(x) n += mx_text(m, names, (mx_id)(x), n < size ? buf + n : NULL, n < size ? size - n : 0)
    if (e == MX_NONE) {
        PUT("?");
        return n;
    }
    const mx_node *x = mx_at(m, e);
    char d[128];
    switch (x->kind) {
    case MX_VAR: PUT("i%d", (int)x->w[0]); return n;
    case MX_FLT: PUT("%g", x->f); return n;
    case MX_LIN:
        om_dim_print(m->g, x->w[0], d, sizeof d);
        PUT("(%s", d);
        for (int i = 1; i < x->n; i += 2) {
            om_dim_print(m->g, x->w[i + 1], d, sizeof d);
            PUT(" + %s*", d);
            SUB(x->w[i]);
        }
        PUT(")");
        return n;
    case MX_DIV: case MX_MOD:
        om_dim_print(m->g, x->w[1], d, sizeof d);
        PUT("%s(", name[x->kind]);
        SUB(x->w[0]);
        PUT(", %s)", d);
        return n;
    case MX_LOAD: {
        const om_value *v = om_val(names, (om_id)x->w[0]);
        PUT("v%u%s%s[", (unsigned)x->w[0], v->name ? ":" : "", v->name ? v->name : "");
        for (int i = 1; i < x->n; i++) {
            SUB(x->w[i]);
            PUT(i + 1 < x->n ? ", " : "");
        }
        PUT("]");
        return n;
    }
    default:
        PUT("%s", name[x->kind]);
        for (int i = 0; i < x->n; i++) {
            PUT(i ? ", " : "(");
            SUB(x->w[i]);
        }
        PUT(x->n ? ")" : "");
        return n;
    }
#undef PUT
#undef SUB
}

void mx_print(const mx *m, const om_graph *names, mx_id e, char *buf, size_t size) {
    if (size) buf[0] = 0;
    mx_text(m, names, e, buf, size);
}
