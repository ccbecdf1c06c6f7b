/* eval.c - what a value of the graph is at given indices, as an expression (eval.h).
 *
 * mx_eval walks from a value towards the inputs. Views, gathers and concatenations rewrite the indices; pointwise
 * operators combine scalars; reductions and cumsum fold when their operand does not depend on the reduced index. Any
 * other operator, and any case a rule does not cover, ends in a leaf (MX_LOAD of that value): so the result is always
 * right, at worst useless. Results are kept per (value, indices); the first (innermost) value found for an expression
 * is its origin, from which masks.c takes the tensor instead of computing it again.
 *
 * Integers are taken as exact: i64 and i32 index arithmetic that wraps around is outside what any mask does. Narrower
 * integers are loaded, compared and cast, never calculated with.
 */
#include "passes/masks/eval.h"

#include "graph/half.h"
#include "ops/attr.h"

#include <math.h>

enum { CONST_OPAQUE, CONST_UNIFORM, CONST_AFFINE, CONST_BAND };
enum { CONST_SCAN_MAX = 1 << 24 /* elements of a constant looked at */ };

static int class_of(int dtype) { return dtype == OM_BOOL ? MX_BOOL : om_is_float(dtype) ? MX_FLOAT : MX_INT; }
static bool calculates(int dtype) { return dtype == OM_I64 || dtype == OM_I32; }

/* --- the reader ---------------------------------------------------------------------------------------- */

om_status mx_reader_init(mx_reader *rd, om_ctx *cx, const om_graph *from, om_graph *g) {
    memset(rd, 0, sizeof *rd);
    rd->from = from;
    memset(rd->memo_head, 0xff, sizeof rd->memo_head);
    return mx_init(&rd->m, cx, g);
}

void mx_reader_free(mx_reader *rd) {
    om_free(rd->m.cx, rd->memos.v);
    om_free(rd->m.cx, rd->origin.v);
    om_free(rd->m.cx, rd->consts.v);
    om_free(rd->m.cx, rd->aliases.v);
    mx_free(&rd->m);
}

/* e is exactly what memo number `memo` reads. */
static bool origin_set(mx_reader *rd, mx_id e, mx_id memo) {
    while (rd->origin.n <= e) {
        mx_id *o = OM_PUSH(rd->m.cx, &rd->origin);
        if (!o) return false;
        *o = MX_NONE;
    }
    rd->origin.v[e] = memo;
    return true;
}

om_dim mx_size(mx_reader *rd, om_dim d) {
    d = om_dim_copy(rd->m.g, rd->from, d);
    for (uint32_t i = 0; i < rd->aliases.n; i++)
        if (rd->aliases.v[i].size == d) return rd->aliases.v[i].as;
    return d;
}

int mx_broadcast(mx_reader *rd, om_dim have, om_dim want) {
    int64_t c;
    if (have == want) return 1;
    if (have == 1) return 0;
    if (om_dim_const(rd->m.g, have, &c)) return -1;
    mx_alias *a = OM_PUSH(rd->m.cx, &rd->aliases);
    if (!a) return -1;
    *a = (mx_alias){have, want, false};
    return 1;
}

/* An integer or size attribute, in the working graph's sizes. */
static om_dim node_dim(mx_reader *rd, const om_node *n, const char *name, om_dim dflt) {
    mx *m = &rd->m;
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    if (!a) return dflt;
    if (a->kind == OM_ATTR_INT) return om_dim_int(m->g, a->i);
    return a->kind == OM_ATTR_DIMS && a->n == 1 ? mx_size(rd, a->dims[0]) : dflt;
}

/* --- constants by value -------------------------------------------------------------------------------- */

static double elem(int dtype, const void *p, int64_t i) {
    switch (dtype) {
    case OM_F32: return (double)((const float *)p)[i];
    case OM_F64: return ((const double *)p)[i];
    case OM_BF16: return (double)om_bf16_to_f32(((const uint16_t *)p)[i]);
    case OM_F16: return (double)om_f16_to_f32(((const uint16_t *)p)[i]);
    case OM_I64: return (double)((const int64_t *)p)[i];
    case OM_I32: return ((const int32_t *)p)[i];
    case OM_I16: return ((const int16_t *)p)[i];
    case OM_I8: return ((const int8_t *)p)[i];
    default: return ((const uint8_t *)p)[i]; /* u8, bool */
    }
}

/* The pattern of a constant: all equal; an integer sum of its indices; or one value in a diagonal band of the last two
 * axes and another outside, the same for all leading indices. */
static void const_scan(const om_value *v, mx_const *c) {
    const om_type *t = &v->type;
    int64_t n = 1, stride[OM_RANK];
    for (int i = t->rank - 1; i >= 0; i--) stride[i] = n, n *= t->dim[i];
    c->kind = CONST_OPAQUE;
    if (n == 0 || n > CONST_SCAN_MAX) return;
    double first = elem(t->dtype, v->data, 0);
    int64_t same = 1;
    while (same < n && elem(t->dtype, v->data, same) == first) same++;
    c->a = first;
    if (same == n) {
        c->kind = CONST_UNIFORM;
        return;
    }
    if (calculates(t->dtype)) {
        bool ok = fabs(first) < 1e15;
        c->base = (int64_t)first;
        for (int i = 0; i < t->rank && ok; i++) {
            double d = t->dim[i] > 1 ? elem(t->dtype, v->data, stride[i]) - first : 0;
            ok = fabs(d) < 1e9;
            c->coef[i] = ok ? (int64_t)d : 0;
        }
        for (int64_t e = 0; e < n && ok; e++) {
            int64_t x = c->base, r = e;
            for (int i = 0; i < t->rank; i++) x += c->coef[i] * (r / stride[i]), r %= stride[i];
            ok = elem(t->dtype, v->data, e) == (double)x;
        }
        if (ok) {
            c->kind = CONST_AFFINE;
            return;
        }
    }
    if (t->rank < 2) return;
    int64_t rows = t->dim[t->rank - 2], cols = t->dim[t->rank - 1];
    int64_t changes = 0, at[2] = {0, 0};
    double prev = elem(t->dtype, v->data, (rows - 1) * cols); /* the lower left corner: j - i = 1 - rows */
    c->a = prev;
    for (int64_t d = 2 - rows; d < cols; d++) {
        double x = elem(t->dtype, v->data, d < 0 ? -d * cols : d);
        if (x == prev) continue;
        if (changes == 2 || (changes == 1 && x != c->a)) return;
        if (changes == 0) c->b = x;
        at[changes++] = d;
        prev = x;
    }
    c->lo = at[0];
    c->hi = changes == 2 ? at[1] - 1 : cols;
    for (int64_t e = 0; e < n; e++) {
        int64_t d = e % cols - e / cols % rows;
        if (elem(t->dtype, v->data, e) != (d >= c->lo && d <= c->hi ? c->b : c->a)) return;
    }
    c->kind = CONST_BAND;
}

static mx_id literal(mx *m, int dtype, double x) {
    int cls = class_of(dtype);
    return cls == MX_FLOAT ? mx_flt(m, x) : cls == MX_BOOL ? (x != 0 ? m->t : m->fa) : mx_i64(m, (int64_t)x);
}

static mx_id select_any(mx *m, int dtype, mx_id c, mx_id a, mx_id b) {
    int cls = class_of(dtype);
    return cls == MX_BOOL ? mx_bsel(m, c, a, b) : cls == MX_INT ? mx_sel(m, c, a, b) : mx_fsel(m, c, a, b);
}

static mx_id eval_const(mx_reader *rd, om_id id, const mx_id *idx) {
    mx *m = &rd->m;
    const om_value *v = om_val(rd->from, id);
    const om_type *t = &v->type;
    int64_t at = 0, n = 1;
    bool known = true;
    for (int i = t->rank - 1; i >= 0; i--) {
        om_dim d;
        int64_t k;
        if (t->dim[i] == 1) continue;
        if (!mx_int_const(m, idx[i], &d) || !om_dim_const(m->g, d, &k) || k < 0 || k >= t->dim[i]) {
            known = false;
            break;
        }
        at += k * n;
        n *= t->dim[i];
    }
    if (known) {
        if (t->dtype == OM_I64) return mx_i64(m, ((const int64_t *)v->data)[at]);
        return literal(m, t->dtype, elem(t->dtype, v->data, at));
    }
    mx_const *c = NULL;
    for (uint32_t i = 0; i < rd->consts.n && !c; i++)
        if (rd->consts.v[i].v == id) c = &rd->consts.v[i];
    if (!c) {
        if (!(c = OM_PUSH(m->cx, &rd->consts))) return MX_NONE;
        memset(c, 0, sizeof *c);
        c->v = id;
        const_scan(v, c);
    }
    mx_const k = *c;
    switch (k.kind) {
    case CONST_UNIFORM: return literal(m, t->dtype, k.a);
    case CONST_AFFINE: {
        mx_id e = mx_i64(m, k.base);
        for (int i = 0; i < t->rank; i++) e = mx_add(m, e, mx_scale(m, idx[i], om_dim_int(m->g, k.coef[i])));
        return e;
    }
    case CONST_BAND: {
        mx_id d = mx_sub(m, idx[t->rank - 1], idx[t->rank - 2]);
        mx_id in = mx_and(m, mx_ge0(m, mx_sub(m, d, mx_i64(m, k.lo))), mx_ge0(m, mx_sub(m, mx_i64(m, k.hi), d)));
        return select_any(m, t->dtype, in, literal(m, t->dtype, k.b), literal(m, t->dtype, k.a));
    }
    default: return mx_load(m, id, idx, t->rank, class_of(t->dtype));
    }
}

/* --- views --------------------------------------------------------------------------------------------- */

/* A rule's answer that is not an expression: the value becomes a leaf. */
#define LEAF (MX_NONE - 1)

static mx_id eval_reshape(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx *m = &rd->m;
    om_id src = om_ins(rd->from, n)[0];
    const om_type *a = om_ty(rd->from, src), *b = om_ty(rd->from, n->out);
    om_dim ad[OM_RANK], bd[OM_RANK];
    mx_id in[OM_RANK];
    for (int i = 0; i < a->rank; i++) ad[i] = mx_size(rd, a->dim[i]);
    for (int i = 0; i < b->rank; i++) bd[i] = mx_size(rd, b->dim[i]);
    int i = 0, o = 0;
    while (i < a->rank || o < b->rank) { /* the shortest groups of axes with equal products */
        int i0 = i, o0 = o;
        if (i < a->rank && ad[i] == 1) {
            in[i++] = mx_int(m, 0);
            continue;
        }
        if (o < b->rank && bd[o] == 1) {
            o++;
            continue;
        }
        if (i == a->rank || o == b->rank) return LEAF;
        om_dim pa = ad[i++], pb = bd[o++];
        while (pa != pb) { /* with symbols: grow the side that has factors left to find; equal products must come */
            int64_t x, y;
            bool grow_a;
            if (om_dim_const(m->g, pa, &x) && om_dim_const(m->g, pb, &y)) grow_a = x < y;
            else if (om_dim_mod(m->g, pb, pa) == 0) grow_a = true;
            else if (om_dim_mod(m->g, pa, pb) == 0) grow_a = false;
            else return LEAF;
            if (grow_a) {
                if (i == a->rank) return LEAF;
                pa = om_dim_mul(m->g, pa, ad[i++]);
            } else {
                if (o == b->rank) return LEAF;
                pb = om_dim_mul(m->g, pb, bd[o++]);
            }
        }
        if (i - i0 == 1 && o - o0 == 1) {
            in[i0] = idx[o0];
            continue;
        }
        mx_id flat = mx_int(m, 0);
        for (int k = o0; k < o; k++)
            if (bd[k] != 1) flat = mx_add(m, mx_scale(m, flat, bd[k]), idx[k]);
        for (int k = i - 1; k > i0; k--) {
            in[k] = mx_mod(m, flat, ad[k]);
            flat = mx_div(m, flat, ad[k]);
        }
        in[i0] = flat;
    }
    return mx_eval(rd, src, in);
}

static mx_id eval_concat(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx *m = &rd->m;
    const om_type *t = om_ty(rd->from, n->out);
    int axis = (int)om_node_int(n, "axis", 0);
    mx_id off[MX_ARGS_MAX], at_or_after[MX_ARGS_MAX], in[OM_RANK], e = MX_NONE;
    if (n->n_in > MX_ARGS_MAX || axis < 0 || axis >= t->rank) return LEAF;
    int first = 0;
    om_dim start = 0;
    for (int k = 0; k < n->n_in; k++) {
        off[k] = mx_sub(m, idx[axis], mx_int(m, start));
        if ((at_or_after[k] = k ? mx_ge0(m, off[k]) : m->t) == MX_NONE) return MX_NONE;
        if (at_or_after[k] == m->t) first = k;
        start = om_dim_add(m->g, start, mx_size(rd, om_ty(rd->from, om_ins(rd->from, n)[k])->dim[axis]));
    }
    memcpy(in, idx, (size_t)t->rank * sizeof *in);
    /* the last operand that starts at or before the index */
    for (int k = first; k < n->n_in && at_or_after[k] != m->fa; k++) {
        in[axis] = off[k];
        mx_id x = mx_eval(rd, om_ins(rd->from, n)[k], in);
        e = k == first ? x : select_any(m, t->dtype, at_or_after[k], x, e);
        if (e == MX_NONE) return MX_NONE;
    }
    return e;
}

/* slice_scatter: the source inside the window, the base outside. pad: the operand inside, a value outside. */
static mx_id eval_window(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx *m = &rd->m;
    const om_type *t = om_ty(rd->from, n->out);
    const om_id *ins = om_ins(rd->from, n);
    mx_id in[OM_RANK], inside = m->t;
    if (!om_is(n, pad)) {
        int axis = (int)om_node_int(n, "axis", 0);
        if (om_node_int(n, "step", 1) != 1 || axis < 0 || axis >= t->rank) return LEAF;
        memcpy(in, idx, (size_t)t->rank * sizeof *in);
        in[axis] = mx_sub(m, idx[axis], mx_int(m, node_dim(rd, n, "start", 0)));
        mx_id end = mx_int(m, node_dim(rd, n, "end", mx_size(rd, t->dim[axis])));
        inside = mx_and(m, mx_ge0(m, in[axis]), mx_ge0(m, mx_sub(m, mx_sub(m, end, mx_i64(m, 1)), idx[axis])));
        bool put = om_is(n, slice_put);
        return select_any(m, t->dtype, inside, mx_eval(rd, ins[put ? 0 : 1], in),
                          put ? literal(m, t->dtype, 0) : mx_eval(rd, ins[0], idx));
    }
    const om_attr *lo = om_attr_get(n->attr, n->n_attr, "lo");
    if (!lo || lo->kind != OM_ATTR_DIMS || lo->n != t->rank) return LEAF;
    for (int i = 0; i < t->rank; i++) {
        in[i] = mx_sub(m, idx[i], mx_int(m, mx_size(rd, lo->dims[i])));
        mx_id last = mx_int(m, om_dim_sub(m->g, mx_size(rd, om_ty(rd->from, ins[0])->dim[i]), 1));
        inside = mx_and(m, inside, mx_and(m, mx_ge0(m, in[i]), mx_ge0(m, mx_sub(m, last, in[i]))));
    }
    double value = om_node_float(n, "value", 0);
    if (inside == m->fa) return literal(m, t->dtype, value);
    return select_any(m, t->dtype, inside, mx_eval(rd, ins[0], in), literal(m, t->dtype, value));
}

bool mx_gather_source(mx_reader *rd, const om_node *n, const mx_id *idx, mx_id *in) {
    mx *m = &rd->m;
    const om_id *ins = om_ins(rd->from, n);
    const om_type *x = om_ty(rd->from, ins[0]), *it = om_ty(rd->from, ins[1]);
    mx_id part[OM_RANK];
    if (om_is(n, gather_nd)) {
        int64_t depth;
        if (it->rank < 1 || !om_dim_const(rd->from, it->dim[it->rank - 1], &depth) || depth < 1 || depth > x->rank)
            return false;
        memcpy(part, idx, (size_t)(it->rank - 1) * sizeof *part);
        for (int64_t k = 0; k < depth; k++) {
            part[it->rank - 1] = mx_i64(m, k);
            in[k] = mx_eval(rd, ins[1], part);
        }
        for (int k = (int)depth; k < x->rank; k++) in[k] = idx[it->rank - 1 + k - depth];
        return true;
    }
    int axis = (int)om_node_int(n, "axis", 0);
    if (axis < 0 || axis >= x->rank) return false;
    if (om_is(n, gather_elements)) {
        memcpy(in, idx, (size_t)x->rank * sizeof *in);
        in[axis] = mx_eval(rd, ins[1], idx);
        return true;
    }
    if (!om_is(n, gather)) return false;
    for (int k = 0; k < axis; k++) in[k] = idx[k];
    in[axis] = mx_eval(rd, ins[1], idx + axis);
    for (int k = axis + 1; k < x->rank; k++) in[k] = idx[k + it->rank - 1];
    return true;
}

static mx_id eval_gather(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx_id in[OM_RANK];
    return mx_gather_source(rd, n, idx, in) ? mx_eval(rd, om_ins(rd->from, n)[0], in) : LEAF;
}

/* Reductions and cumsum of something that does not change along the reduced axes. */
static mx_id eval_reduce(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx *m = &rd->m;
    om_id src = om_ins(rd->from, n)[0];
    const om_type *x = om_ty(rd->from, src);
    mx_id in[OM_RANK];
    uint32_t axes = 0, bound = 0;
    int64_t a;
    bool scan = om_is(n, cumsum), keep = scan || om_node_int(n, "keepdims", 1);
    if (scan) {
        axes = 1u << om_node_int(n, "axis", 0);
    } else {
        const om_attr *at = om_attr_get(n->attr, n->n_attr, "axes");
        if (!at || at->kind != OM_ATTR_DIMS) return LEAF;
        for (uint32_t i = 0; i < at->n; i++) {
            if (!om_dim_const(rd->from, at->dims[i], &a) || a < 0 || a >= x->rank) return LEAF;
            axes |= 1u << a;
        }
    }
    om_dim count = 1;
    int saved = rd->bound, o = 0;
    for (int i = 0; i < x->rank; i++) {
        if (!(axes >> i & 1)) {
            in[i] = idx[o++];
            continue;
        }
        om_dim size = mx_size(rd, x->dim[i]);
        if (keep) o++;
        if (MX_AXES + rd->bound >= MX_VARS) {
            rd->bound = saved;
            return LEAF;
        }
        int var = MX_AXES + rd->bound++;
        bound |= 1u << var;
        in[i] = mx_var(m, var, size);
        count = om_dim_mul(m->g, count, size);
    }
    mx_id e = mx_eval(rd, src, in);
    rd->bound = saved;
    if (e == MX_NONE) return MX_NONE;
    if (mx_at(m, e)->deps & bound) return LEAF;
    om_dim c;
    if (scan) {
        if (!calculates(om_ty(rd->from, n->out)->dtype) || !mx_int_const(m, e, &c)) return LEAF;
        if (c == 0) return e;
        if (om_node_int(n, "exclusive", 0) || om_node_int(n, "reverse", 0)) return LEAF;
        return mx_scale(m, mx_add(m, idx[om_node_int(n, "axis", 0)], mx_int(m, 1)), c);
    }
    /* an empty reduction gives something else: only sizes known to be at least 1 */
    int64_t known;
    if (!om_dim_const(m->g, count, &known) || known < 1) return LEAF;
    if (om_is(n, reduce_max) || om_is(n, reduce_min)) return e;
    if (om_is(n, reduce_sum) && calculates(om_ty(rd->from, n->out)->dtype)) return mx_scale(m, e, count);
    return LEAF;
}

/* --- pointwise ------------------------------------------------------------------------------------------ */

static mx_id eval_cast(mx *m, mx_id x, int from, int to) {
    mx_node a = *mx_at(m, x);
    om_dim d;
    int64_t v;
    if (from == to) return x;
    if (to == OM_BOOL) {
        if (class_of(from) == MX_INT) return mx_not(m, mx_eq0(m, x));
        if (a.kind == MX_FLT) return a.f != 0 ? m->t : m->fa;
        if (a.kind == MX_FSEL) {
            mx_id p = eval_cast(m, (mx_id)a.w[1], from, to), q = eval_cast(m, (mx_id)a.w[2], from, to);
            return p == LEAF || q == LEAF ? LEAF : mx_bsel(m, (mx_id)a.w[0], p, q);
        }
        return LEAF;
    }
    if (class_of(to) == MX_INT) {
        if (from == OM_BOOL) return mx_b2i(m, x);
        if (class_of(from) == MX_INT) { /* narrowing keeps only what surely fits */
            if (calculates(to) || a.kind == MX_B2I) return x;
            return LEAF;
        }
        if (a.kind == MX_FLT && fabs(a.f) < 1e9) return mx_i64(m, (int64_t)a.f);
        if (a.kind == MX_FSEL && calculates(to)) {
            mx_id p = eval_cast(m, (mx_id)a.w[1], from, to), q = eval_cast(m, (mx_id)a.w[2], from, to);
            return p == LEAF || q == LEAF ? LEAF : mx_sel(m, (mx_id)a.w[0], p, q);
        }
        return LEAF;
    }
    switch (a.kind) { /* to float */
    case MX_FLT: return mx_flt(m, om_round_to(to, a.f));
    case MX_FSEL: {
        mx_id p = eval_cast(m, (mx_id)a.w[1], from, to), q = eval_cast(m, (mx_id)a.w[2], from, to);
        return p == LEAF || q == LEAF ? LEAF : mx_fsel(m, (mx_id)a.w[0], p, q);
    }
    case MX_LIN: {
        if (mx_int_const(m, x, &d)) return om_dim_const(m->g, d, &v) ? mx_flt(m, om_round_to(to, (double)v)) : LEAF;
        mx_lin l;
        mx_lin_get(m, x, &l);
        int64_t c, k;
        if (l.n != 1 || !om_dim_const(m->g, l.c, &c) || !om_dim_const(m->g, l.coef[0], &k)) return LEAF;
        mx_node p = *mx_at(m, l.atom[0]);
        if (p.kind != MX_B2I) return LEAF;
        return mx_fsel(m, (mx_id)p.w[0], mx_flt(m, om_round_to(to, (double)(c + k))),
                       mx_flt(m, om_round_to(to, (double)c)));
    }
    case MX_B2I: return mx_fsel(m, (mx_id)a.w[0], mx_flt(m, 1), mx_flt(m, 0));
    default:
        if (class_of(from) == MX_BOOL) return mx_fsel(m, x, mx_flt(m, 1), mx_flt(m, 0));
        return LEAF;
    }
}

typedef enum fop { F_ADD, F_SUB, F_MUL, F_DIV, F_MAX, F_MIN, F_EQ, F_NE, F_LT, F_LE, F_GT, F_GE, F_NONE } fop;
static fop fop_of(const om_node *n) {
    return om_is(n, add)       ? F_ADD
           : om_is(n, sub)     ? F_SUB
           : om_is(n, mul)     ? F_MUL
           : om_is(n, div)     ? F_DIV
           : om_is(n, maximum) ? F_MAX
           : om_is(n, minimum) ? F_MIN
           : om_is(n, eq)      ? F_EQ
           : om_is(n, ne)      ? F_NE
           : om_is(n, lt)      ? F_LT
           : om_is(n, le)      ? F_LE
           : om_is(n, gt)      ? F_GT
           : om_is(n, ge)      ? F_GE
                               : F_NONE;
}

/* A float operation of where()-trees with constants at their ends; anything else is not folded. */
static mx_id eval_float(mx *m, fop op, mx_id x, mx_id y, int dtype, int depth) {
    if (x == MX_NONE || y == MX_NONE) return MX_NONE;
    mx_node a = *mx_at(m, x), b = *mx_at(m, y);
    if (a.kind == MX_FLT && b.kind == MX_FLT) {
        switch (op) {
        case F_ADD: return mx_flt(m, om_round_to(dtype, a.f + b.f));
        case F_SUB: return mx_flt(m, om_round_to(dtype, a.f - b.f));
        case F_MUL: return mx_flt(m, om_round_to(dtype, a.f * b.f));
        case F_DIV: return mx_flt(m, om_round_to(dtype, a.f / b.f));
        case F_MAX: return mx_flt(m, a.f > b.f || isnan(a.f) ? a.f : b.f);
        case F_MIN: return mx_flt(m, a.f < b.f || isnan(a.f) ? a.f : b.f);
        default: {
            bool r = op == F_EQ   ? a.f == b.f
                     : op == F_NE ? a.f != b.f
                     : op == F_LT ? a.f < b.f
                     : op == F_LE ? a.f <= b.f
                     : op == F_GT ? a.f > b.f
                                  : a.f >= b.f;
            return r ? m->t : m->fa;
        }
        }
    }
    if (op == F_ADD && depth == 0) return mx_fadd(m, x, y, dtype);
    if (op == F_SUB && b.kind == MX_FLT && b.f == 0) return x;
    if ((op == F_MUL || op == F_DIV) && b.kind == MX_FLT && b.f == 1) return x;
    if (op == F_MUL && a.kind == MX_FLT && a.f == 1) return y;
    if (depth > 6 || (a.kind != MX_FSEL && b.kind != MX_FSEL)) return LEAF;
    bool left = a.kind == MX_FSEL;
    const mx_node *s = left ? &a : &b;
    mx_id p = eval_float(m, op, left ? (mx_id)s->w[1] : x, left ? y : (mx_id)s->w[1], dtype, depth + 1);
    if (p == LEAF) return LEAF;
    mx_id q = eval_float(m, op, left ? (mx_id)s->w[2] : x, left ? y : (mx_id)s->w[2], dtype, depth + 1);
    if (q == LEAF) return LEAF;
    return op >= F_EQ ? mx_bsel(m, (mx_id)s->w[0], p, q) : mx_fsel(m, (mx_id)s->w[0], p, q);
}

static mx_id eval_compare(mx *m, fop op, mx_id x, mx_id y) { /* integers */
    switch (op) {
    case F_EQ: return mx_eq0(m, mx_sub(m, x, y));
    case F_NE: return mx_not(m, mx_eq0(m, mx_sub(m, x, y)));
    case F_LE: return mx_ge0(m, mx_sub(m, y, x));
    case F_GE: return mx_ge0(m, mx_sub(m, x, y));
    case F_LT: return mx_not(m, mx_ge0(m, mx_sub(m, x, y)));
    default: return mx_not(m, mx_ge0(m, mx_sub(m, y, x)));
    }
}

static mx_id eval_pointwise(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx *m = &rd->m;
    const om_type *out = om_ty(rd->from, n->out);
    mx_id x[3] = {MX_NONE, MX_NONE, MX_NONE};
    int dt = out->dtype, it = dt;
    if (n->n_in > 3) return LEAF;
    for (int j = 0; j < n->n_in; j++) { /* numpy broadcasting */
        om_id v = om_ins(rd->from, n)[j];
        if (v == OM_NONE) return LEAF;
        const om_type *t = om_ty(rd->from, v);
        mx_id in[OM_RANK];
        int lead = out->rank - t->rank;
        for (int i = 0; i < t->rank; i++) {
            int b = mx_broadcast(rd, mx_size(rd, t->dim[i]), mx_size(rd, out->dim[i + lead]));
            if (b < 0) return LEAF;
            in[i] = b ? idx[i + lead] : mx_int(m, 0);
        }
        if ((x[j] = mx_eval(rd, v, in)) == MX_NONE) return MX_NONE;
        it = t->dtype;
    }
    int cls = class_of(it); /* of the last operand */
    if (om_is(n, where)) return select_any(m, dt, x[0], x[1], x[2]);
    if (om_is(n, cast)) return eval_cast(m, x[0], it, dt);
    if (om_is(n, not)) return cls == MX_BOOL ? mx_not(m, x[0]) : LEAF;
    bool is_and = om_is(n, and), is_or = om_is(n, or);
    if (is_and || is_or || om_is(n, xor)) {
        if (cls == MX_BOOL)
            return is_and  ? mx_and(m, x[0], x[1])
                   : is_or ? mx_or(m, x[0], x[1])
                           : mx_bsel(m, x[0], mx_not(m, x[1]), x[1]);
        if (mx_at(m, x[0])->kind != MX_B2I || mx_at(m, x[1])->kind != MX_B2I) return LEAF;
        mx_id p = (mx_id)mx_at(m, x[0])->w[0], q = (mx_id)mx_at(m, x[1])->w[0];
        return is_and ? mx_b2i(m, mx_and(m, p, q)) : is_or ? mx_b2i(m, mx_or(m, p, q)) : LEAF;
    }
    fop op = fop_of(n);
    if (cls == MX_BOOL) {
        if (op == F_EQ) return mx_bsel(m, x[0], x[1], mx_not(m, x[1]));
        if (op == F_NE) return mx_bsel(m, x[0], mx_not(m, x[1]), x[1]);
        if (op == F_MUL || op == F_MIN) return mx_and(m, x[0], x[1]);
        if (op == F_ADD || op == F_MAX) return mx_or(m, x[0], x[1]);
        return LEAF;
    }
    if (cls == MX_FLOAT) {
        if (op != F_NONE) return eval_float(m, op, x[0], x[1], dt, 0);
        if (om_is(n, neg)) return eval_float(m, F_MUL, x[0], mx_flt(m, -1), dt, 0);
        return LEAF;
    }
    if (op >= F_EQ && op < F_NONE) return eval_compare(m, op, x[0], x[1]);
    if (!calculates(dt)) return LEAF;
    om_dim d;
    switch (op) {
    case F_ADD: return mx_add(m, x[0], x[1]);
    case F_SUB: return mx_sub(m, x[0], x[1]);
    case F_MUL: return mx_mul(m, x[0], x[1]);
    case F_MAX: case F_MIN: {
        int s = mx_sign(m, mx_sub(m, x[0], x[1]));
        return s == 0 ? LEAF : (s > 0) == (op == F_MAX) ? x[0] : x[1];
    }
    default: break;
    }
    if (om_is(n, neg)) return mx_scale(m, x[0], om_dim_int(m->g, -1));
    if (om_is(n, abs)) return mx_abs(m, x[0]);
    int64_t c;
    if ((om_is(n, floor_div) || om_is(n, mod)) && mx_int_const(m, x[1], &d) && om_dim_const(m->g, d, &c) && c > 0)
        return om_is(n, mod) ? mx_mod(m, x[0], d) : mx_div(m, x[0], d);
    return LEAF;
}

/* --- the walk ------------------------------------------------------------------------------------------- */

static mx_id eval_node(mx_reader *rd, const om_node *n, const mx_id *idx) {
    mx *m = &rd->m;
    const om_graph *g = rd->from;
    const om_id *ins = om_ins(g, n);
    const om_type *out = om_ty(g, n->out);
    mx_id in[OM_RANK];
    int64_t p[OM_RANK];
    if (om_is(n, reshape)) return eval_reshape(rd, n, idx);
    if (om_is(n, stop_grad) || om_is(n, copy) || om_is(n, straight_through)) return mx_eval(rd, ins[0], idx);
    if (om_is(n, permute)) {
        if (attr_ints(m->g, n, "perm", out->rank, 0, p) != OM_OK) return MX_NONE;
        for (int i = 0; i < out->rank; i++) in[p[i]] = idx[i];
        return mx_eval(rd, ins[0], in);
    }
    if (om_is(n, expand)) {
        const om_type *x = om_ty(g, ins[0]);
        int lead = out->rank - x->rank;
        for (int i = 0; i < x->rank; i++) {
            int b = mx_broadcast(rd, mx_size(rd, x->dim[i]), mx_size(rd, out->dim[i + lead]));
            if (b < 0) return LEAF;
            in[i] = b ? idx[i + lead] : mx_int(m, 0);
        }
        return mx_eval(rd, ins[0], in);
    }
    if (om_is(n, slice)) {
        int axis = (int)om_node_int(n, "axis", 0);
        memcpy(in, idx, out->rank * sizeof *in);
        in[axis] = mx_add(m, mx_scale(m, idx[axis], om_dim_int(m->g, om_node_int(n, "step", 1))),
                          mx_int(m, node_dim(rd, n, "start", 0)));
        return mx_eval(rd, ins[0], in);
    }
    if (om_is(n, flip)) {
        const om_attr *axes = om_attr_get(n->attr, n->n_attr, "axes");
        memcpy(in, idx, out->rank * sizeof *in);
        for (uint32_t i = 0; axes && i < axes->n; i++) {
            int a = (int)axes->dims[i];
            in[a] = mx_sub(m, mx_int(m, om_dim_sub(m->g, mx_size(rd, out->dim[a]), 1)), idx[a]);
        }
        return mx_eval(rd, ins[0], in);
    }
    if (om_is(n, concat)) return eval_concat(rd, n, idx);
    if (om_is(n, pad) || om_is(n, slice_put) || om_is(n, slice_scatter)) return eval_window(rd, n, idx);
    if (om_is(n, gather) || om_is(n, gather_elements) || om_is(n, gather_nd)) return eval_gather(rd, n, idx);
    if (om_is(n, cumsum) || om_is(n, reduce_max) || om_is(n, reduce_min) || om_is(n, reduce_sum))
        return eval_reduce(rd, n, idx);
    if (om_is(n, iota)) {
        if (!calculates(out->dtype)) return LEAF;
        return mx_add(m, mx_scale(m, idx[0], node_dim(rd, n, "step", 1)), mx_int(m, node_dim(rd, n, "start", 0)));
    }
    if (om_is(n, fill)) {
        const om_attr *a = om_attr_get(n->attr, n->n_attr, "value");
        if (a && a->kind == OM_ATTR_DIMS) return calculates(out->dtype) ? mx_int(m, node_dim(rd, n, "value", 0)) : LEAF;
        return literal(m, out->dtype, om_round_to(out->dtype, om_node_float(n, "value", 0)));
    }
    if (om_is(n, trilu)) { /* keep j - i >= k, or j - i <= k */
        mx_id d = mx_sub(m, mx_sub(m, idx[out->rank - 1], idx[out->rank - 2]), mx_int(m, node_dim(rd, n, "k", 0)));
        mx_id keep = om_node_int(n, "upper", 0) ? mx_ge0(m, d) : mx_ge0(m, mx_scale(m, d, om_dim_int(m->g, -1)));
        return select_any(m, out->dtype, keep, mx_eval(rd, ins[0], idx), literal(m, out->dtype, 0));
    }
    if (n->op->kind == OM_K_POINTWISE && !n->op->random && n->n_out == 1) return eval_pointwise(rd, n, idx);
    return LEAF;
}

/* e is all of v and v is no larger than e: every axis of v is a variable of e, or has size 1. */
static bool is_origin(mx_reader *rd, om_id v, const mx_id *idx, mx_id e) {
    mx *m = &rd->m;
    const om_type *t = om_ty(rd->from, v);
    uint32_t seen = 0;
    for (int i = 0; i < t->rank; i++) {
        if (t->dim[i] == 1) continue;
        const mx_node *x = mx_at(m, idx[i]);
        if (x->kind != MX_VAR || x->w[0] >= MX_AXES || (seen >> x->w[0] & 1) || x->w[1] != mx_size(rd, t->dim[i]))
            return false;
        seen |= 1u << x->w[0];
    }
    return seen == mx_at(m, e)->deps && om_val(rd->from, v)->role != OM_CONST;
}

mx_id mx_eval(mx_reader *rd, om_id v, const mx_id *idx) {
    mx *m = &rd->m;
    const om_value *val = om_val(rd->from, v);
    int rank = val->type.rank;
    uint32_t h = (v + 1) * 2654435761u;
    for (int i = 0; i < rank; i++) {
        if (idx[i] == MX_NONE) return MX_NONE;
        h = (h ^ idx[i]) * 2654435761u;
    }
    h ^= h >> 15;
    for (uint32_t k = rd->memo_head[h & 4095]; k != MX_NONE; k = rd->memos.v[k].next) {
        const mx_memo *c = &rd->memos.v[k];
        if (c->hash == h && c->v == v && !memcmp(c->idx, idx, (size_t)rank * sizeof *idx)) return c->e;
    }
    if (rd->depth >= MX_DEPTH_MAX || m->cx->status != OM_OK) return MX_NONE;
    rd->depth++;
    mx_id e = LEAF;
    om_dim size = 0;
    if (val->role == OM_CONST) {
        e = eval_const(rd, v, idx);
    } else if (val->node != OM_NONE) {
        const om_node *n = &rd->from->nodes.v[val->node];
        if (val->out == 0) e = eval_node(rd, n, idx);
    } else if (rank == 0 && calculates(val->type.dtype)) { /* an integer argument that names a size */
        for (uint32_t s = 0; s < rd->from->syms.n; s++)
            if (rd->from->syms.v[s].axis < 0 && rd->from->syms.v[s].input == val->input && val->input != OM_NONE)
                size = om_dim_sym(m->g, rd->from->syms.v[s].name), e = mx_int(m, size);
    }
    rd->depth--;
    if (e == LEAF) e = mx_load(m, v, idx, rank, class_of(val->type.dtype));
    mx_memo *c = e == MX_NONE ? NULL : OM_PUSH(m->cx, &rd->memos);
    if (!c) return MX_NONE;
    *c = (mx_memo){v, e, h, rd->memo_head[h & 4095], om_arena_copy(&m->arena, idx, (size_t)rank * sizeof *idx)};
    if (rank && !c->idx) {
        rd->memos.n--;
        return MX_NONE;
    }
    rd->memo_head[h & 4095] = rd->memos.n - 1;
    const bool first = mx_origin(rd, e) == MX_NONE && is_origin(rd, v, idx, e);
    return !first || origin_set(rd, e, rd->memos.n - 1) ? e : MX_NONE;
}
