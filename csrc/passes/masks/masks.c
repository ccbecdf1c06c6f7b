/* masks.c - pass `masks`: what an attention node's mask says, in the node's attributes instead of in a tensor.
 *
 * The mask operand is evaluated as a formula over the indices of a score (eval.h) and split at its top-level AND
 * (bool) or sum (additive). Terms:
 *   k <= q + c                  -> causal, causal_offset
 *   k >= q - w + 1              -> window = w
 *   true                        -> nothing
 *   the rest                    -> the smallest mask that holds it: padding becomes (b, 1, 1, k) instead of (b, 1, q,
 *                               k)
 * A formula that needs all the axes of the old operand keeps that operand, beside the attributes that were found
 * (hiding twice is hiding once). So nothing rests on the recognition being complete, and the tensors that built the
 * mask die when nobody else reads them.
 *
 * What hides decides what a row without any visible key gives, and that must not change:
 *   bool, -inf   such a row gives 0 in the attention operator, whatever hid its keys: terms may move freely between
 *                attributes and mask.
 *   finite (finfo.min, -1e9 ..)  such a row is the softmax of what is left of the scores, over all keys, causally
 *                                hidden ones too.
 *                A term moves out of the mask only if every row provably has a key that all terms let through (k = q, k
 *                = 0 or the last key makes the formula true), and the other summands are of moderate size (not fed by a
 *                float input of the user). Then hidden weights are exactly 0 in either form. Causal masks pass; with
 *                padding, which is data, they do not: there only the shape of the mask may shrink, with the same
 *                arithmetic.
 * A NaN or infinite score that is hidden by -inf stays NaN with a mask tensor and vanishes with an attribute: the
 * attribute's answer is the one bool masks give, and is preferred.
 */
#include "passes/masks/masks.h"
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/masks/eval.h"
#include "passes/passes.h"

#include <math.h>

typedef struct masks_emitted { mx_id e; om_id value; uint8_t rank, dtype; } masks_emitted;

typedef struct masks {
    mx_reader rd;
    om_rewriter *r;         /* while a node is rewritten */
    bool started, changed;
    int rank;               /* of the scores of the node at hand */
    om_dim size[OM_RANK];
    int dtype;              /* of its mask: floats are emitted in it */
    bool failed;            /* an expression has no tensor form */
    OM_VEC(masks_emitted) done;
} masks;

/* What stays to be masked by a tensor, and what became attributes. */
typedef struct masks_split {
    bool causal, window;
    int64_t offset, width;
    mx_id rest;             /* bool: AND of what is no attribute */
    mx_id add;              /* float: what is added to scores beside; MX_FLT 0 when nothing */
} masks_split;

/* --- expressions to tensors ------------------------------------------------------------------------------- */

static om_id masks_fail(masks *s) {
    s->failed = true;
    return OM_NONE;
}

static om_id masks_emit(masks *s, mx_id e);

/* Brings v, whose axis i is variable var[i] or (var[i] < 0) has size 1, to the rank and axis order of the scores. */
static om_id masks_align(masks *s, om_id v, int rank, const int *var) {
    om_graph *g = s->rd.m.g;
    int perm[OM_RANK], n = 0;
    om_dim dim[OM_RANK];
    for (int i = 0; i < rank; i++)
        if (var[i] < 0) perm[n++] = i;
    for (int i = 0; i < s->rank; i++) {
        dim[i] = 1;
        for (int k = 0; k < rank; k++)
            if (var[k] == i) perm[n++] = k, dim[i] = s->size[i];
    }
    bool moves = false;
    for (int i = 0, last = -1; i < rank; i++) /* only the order of the real axes matters */
        if (var[i] >= 0) moves |= var[i] < last, last = var[i];
    if (moves) v = om_b_permute(g, v, perm);
    return om_b_reshape(g, v, dim, s->rank);
}

/* Element idx of an old value as a tensor: a view, where the indices are provably valid everywhere. */
static om_id masks_emit_load(masks *s, om_id old, const mx_id *idx) {
    mx *m = &s->rd.m;
    om_graph *g = m->g;
    om_id v = s->r->map[old];
    if (v == OM_NONE) return masks_fail(s);
    int rank = om_ty(g, v)->rank, var[OM_RANK];
    uint32_t seen = 0;
    for (int i = 0; i < rank; i++) {
        mx_lin l;
        om_dim size = mx_size(&s->rd, om_ty(s->rd.from, old)->dim[i]), count = 1;
        var[i] = -1;
        if (size == 1) continue;
        mx_lin_get(m, idx[i], &l);
        if (l.n == 1 && l.coef[0] == 1 && mx_at(m, l.atom[0])->kind == MX_VAR && mx_at(m, l.atom[0])->w[0] < MX_AXES) {
            var[i] = (int)mx_at(m, l.atom[0])->w[0];
            count = mx_at(m, l.atom[0])->w[1];
            if (seen >> var[i] & 1) return masks_fail(s); /* a diagonal */
            seen |= 1u << var[i];
            if (l.c == 0 && count == size) {
                om_dim plain = om_dim_copy(g, s->rd.from, om_ty(s->rd.from, old)->dim[i]);
                for (uint32_t a = 0; a < s->rd.aliases.n; a++) /* the reshape below compares them at run time */
                    if (s->rd.aliases.v[a].size == plain) s->rd.aliases.v[a].checked = true;
                continue;
            }
        } else if (l.n != 0) {
            return masks_fail(s);
        }
        if (mx_sign(m, idx[i]) <= 0 || mx_sign(m, mx_sub(m, mx_int(m, om_dim_sub(g, size, 1)), idx[i])) <= 0)
            return masks_fail(s);
        v = om_b_slice(g, v, i, l.c, om_dim_add(g, l.c, count), 1);
        if (v == OM_NONE) return OM_NONE;
    }
    return masks_align(s, v, rank, var);
}

/* A value gathered with plain indices (mask[batch_idx, k_idx]) is a view of what it was gathered from. */
static om_id masks_emit_gathered(masks *s, const mx_memo *o) {
    const om_value *val = om_val(s->rd.from, o->v);
    mx_id in[OM_RANK];
    if (val->node == OM_NONE) return OM_NONE;
    const om_node *n = &s->rd.from->nodes.v[val->node];
    om_id v = mx_gather_source(&s->rd, n, o->idx, in) ? om_ins(s->rd.from, n)[0] : OM_NONE;
    for (int i = 0; v != OM_NONE && i < om_ty(s->rd.from, v)->rank; i++)
        if (in[i] == MX_NONE) v = OM_NONE;
    if (v != OM_NONE) v = masks_emit_load(s, v, in);
    s->failed = false; /* the gathered tensor itself is there */
    return v;
}

static om_id masks_emit_sum(masks *s, const mx_node *x) { /* an integer sum: i64 */
    om_graph *g = s->rd.m.g;
    int64_t c;
    if (!om_dim_const(g, x->w[0], &c)) return masks_fail(s);
    om_id sum = OM_NONE;
    for (int i = 1; i < x->n; i += 2) {
        int64_t k;
        if (!om_dim_const(g, x->w[i + 1], &k)) return masks_fail(s);
        om_id t = masks_emit(s, (mx_id)x->w[i]);
        if (t == OM_NONE) return OM_NONE;
        if (k == -1 && sum != OM_NONE) {
            sum = om_b_bin(g, &om_op_sub, sum, t);
            continue;
        }
        if (k != 1) t = om_b_bin(g, &om_op_mul, t, om_scalar(g, OM_I64, (double)k));
        sum = sum == OM_NONE ? t : om_b_bin(g, &om_op_add, sum, t);
    }
    if (c == 0 && sum != OM_NONE) return sum;
    if (c > (1ll << 52) || c < -(1ll << 52)) return masks_fail(s);
    om_id k = om_scalar(g, OM_I64, (double)c);
    return sum == OM_NONE ? k : om_b_bin(g, &om_op_add, sum, k);
}

static om_id masks_emit_new(masks *s, mx_id e) {
    mx *m = &s->rd.m;
    om_graph *g = m->g;
    mx_node x = *mx_at(m, e);
    if (mx_origin(&s->rd, e) != MX_NONE) { /* the graph already computes it */
        mx_memo o = s->rd.memos.v[mx_origin(&s->rd, e)];
        if (s->r->map[o.v] != OM_NONE) {
            om_id v = masks_emit_gathered(s, &o);
            if (v == OM_NONE) v = masks_emit_load(s, o.v, o.idx);
            return v == OM_NONE ? v : om_b_cast(g, v, x.cls == MX_BOOL ? OM_BOOL : x.cls == MX_INT ? OM_I64 : s->dtype);
        }
    }
    om_id a[3] = {OM_NONE, OM_NONE, OM_NONE};
    int n = x.kind == MX_SEL || x.kind == MX_FSEL ? 3
            : x.kind == MX_MUL                    ? 2
            : x.kind == MX_GE0 || x.kind == MX_EQ0 || x.kind == MX_NE0 || x.kind == MX_NOT || x.kind == MX_B2I ||
                    x.kind == MX_ABS || x.kind == MX_DIV || x.kind == MX_MOD
                ? 1
                : 0;
    for (int i = 0; i < n; i++)
        if ((a[i] = masks_emit(s, (mx_id)x.w[i])) == OM_NONE) return OM_NONE;
    switch (x.kind) {
    case MX_TRUE: case MX_FALSE: return om_scalar(g, OM_BOOL, x.kind == MX_TRUE);
    case MX_FLT: return om_scalar(g, s->dtype, x.f);
    case MX_VAR: {
        om_dim shape = x.w[1];
        if (x.w[0] >= MX_AXES) return masks_fail(s);
        om_id v = om_make(
            g, &om_op_iota, NULL, 0,
            OM_ATTRS(OM_AD("shape", &shape, 1), OM_AI("dtype", OM_I64), OM_AI("start", 0), OM_AI("step", 1)));
        return masks_align(s, v, 1, (int[]){(int)x.w[0]});
    }
    case MX_LIN: return masks_emit_sum(s, &x);
    case MX_GE0: return om_b_bin(g, &om_op_ge, a[0], om_scalar(g, OM_I64, 0));
    case MX_EQ0: return om_b_bin(g, &om_op_eq, a[0], om_scalar(g, OM_I64, 0));
    case MX_NE0: return om_b_bin(g, &om_op_ne, a[0], om_scalar(g, OM_I64, 0));
    case MX_NOT: return om_b_un(g, &om_op_not, a[0]);
    case MX_B2I: return om_b_cast(g, a[0], OM_I64);
    case MX_ABS: return om_b_un(g, &om_op_abs, a[0]);
    case MX_MUL: return om_b_bin(g, &om_op_mul, a[0], a[1]);
    case MX_SEL: case MX_FSEL: return om_make(g, &om_op_where, a, 3, NULL, 0);
    case MX_DIV: case MX_MOD: {
        int64_t d;
        if (!om_dim_const(g, x.w[1], &d)) return masks_fail(s);
        return om_b_bin(g, x.kind == MX_DIV ? &om_op_floor_div : &om_op_mod, a[0], om_scalar(g, OM_I64, (double)d));
    }
    case MX_AND: case MX_OR: case MX_FADD: {
        om_id v = masks_emit(s, (mx_id)x.w[0]);
        for (int i = 1; i < x.n && v != OM_NONE; i++) {
            om_id y = masks_emit(s, (mx_id)x.w[i]);
            if (y == OM_NONE) return OM_NONE;
            v = om_b_bin(g, x.kind == MX_AND ? &om_op_and : x.kind == MX_OR ? &om_op_or : &om_op_add, v, y);
        }
        return v;
    }
    case MX_LOAD: {
        mx_id idx[OM_RANK];
        for (int i = 1; i < x.n; i++) idx[i - 1] = (mx_id)x.w[i];
        om_id v = masks_emit_load(s, (om_id)x.w[0], idx);
        return v == OM_NONE ? v : om_b_cast(g, v, x.cls == MX_BOOL ? OM_BOOL : x.cls == MX_INT ? OM_I64 : s->dtype);
    }
    default: return masks_fail(s);
    }
}

/* A tensor whose axes are those of the scores, of size 1 where e does not depend on them (constants: 0-d). Once per
 * expression. */
static om_id masks_emit(masks *s, mx_id e) {
    if (s->failed) return OM_NONE;
    int dtype = mx_at(&s->rd.m, e)->cls == MX_FLOAT ? s->dtype : 0;
    for (uint32_t i = 0; i < s->done.n; i++) {
        const masks_emitted *d = &s->done.v[i];
        if (d->e == e && d->rank == s->rank && d->dtype == dtype) return d->value;
    }
    om_id v = masks_emit_new(s, e);
    if (v == OM_NONE) return OM_NONE;
    masks_emitted *d = OM_PUSH(s->rd.m.cx, &s->done);
    if (!d) return OM_NONE;
    *d = (masks_emitted){e, v, (uint8_t)s->rank, (uint8_t)dtype};
    return v;
}

/* --- terms ------------------------------------------------------------------------------------------------- */

/* p as k <= q + c (1) or k >= q + c (-1); 0: neither. */
static int masks_diagonal(masks *s, mx_id p, int64_t *c) {
    mx *m = &s->rd.m;
    mx_lin l;
    if (mx_at(m, p)->kind != MX_GE0) return 0;
    mx_lin_get(m, (mx_id)mx_at(m, p)->w[0], &l);
    if (l.n != 2 || !om_dim_const(m->g, l.c, c)) return 0;
    int64_t k[2], sign[OM_RANK] = {0};
    for (int i = 0; i < 2; i++) {
        const mx_node *x = mx_at(m, l.atom[i]);
        if (x->kind != MX_VAR || x->w[0] >= MX_AXES || !om_dim_const(m->g, l.coef[i], &k[i]) ||
            (k[i] != 1 && k[i] != -1))
            return 0;
        sign[x->w[0]] = k[i];
    }
    int64_t sq = sign[s->rank - 2], sk = sign[s->rank - 1];
    if (sq == 1 && sk == -1) return 1;
    if (sq == -1 && sk == 1) return *c = -*c, -1;
    return 0;
}

static void masks_add_bool(masks *s, masks_split *p, mx_id cond) {
    mx_node x = *mx_at(&s->rd.m, cond);
    int64_t one = cond, c = 0;
    int n = x.kind == MX_AND ? x.n : 1;
    const int64_t *w = x.kind == MX_AND ? x.w : &one;
    for (int i = 0; i < n; i++) {
        int d = masks_diagonal(s, (mx_id)w[i], &c);
        if (d == 1 && c > INT32_MIN && c < INT32_MAX) {
            p->offset = p->causal && p->offset < c ? p->offset : c;
            p->causal = true;
        } else if (d == -1 && c <= 0 && c > INT32_MIN) { /* k >= q + c is k > q - (1 - c) */
            p->width = p->window && p->width < 1 - c ? p->width : 1 - c;
            p->window = true;
        } else {
            p->rest = mx_and(&s->rd.m, p->rest, (mx_id)w[i]);
        }
    }
}

/* Does every row have a key k for which cond holds? */
static bool masks_row_sees(masks *s, mx_id cond) {
    mx *m = &s->rd.m;
    if (cond == m->t) return true;
    if (cond == MX_NONE) return false;
    int kv = s->rank - 1;
    mx_id q = mx_var(m, s->rank - 2, s->size[s->rank - 2]), last = mx_int(m, om_dim_sub(m->g, s->size[kv], 1));
    if (mx_sign(m, mx_sub(m, last, q)) > 0 && mx_subst(m, cond, kv, q) == m->t) return true;
    return mx_subst(m, cond, kv, mx_int(m, 0)) == m->t || mx_subst(m, cond, kv, last) == m->t;
}

bool om_mask_rows_see(om_rewriter *r, om_id cond, bool visible_when, const om_dim *size, int rank) {
    om_ctx *cx = r->to->cx;
    masks *s = om_alloc(cx, sizeof *s);
    bool sees = false;
    if (!s) return false;
    mx *m = &s->rd.m;
    s->rank = rank;
    memcpy(s->size, size, (size_t)rank * sizeof *size);
    if (mx_reader_init(&s->rd, cx, r->from, r->to) == OM_OK) {
        const om_type *t = om_ty(r->from, cond);
        mx_id idx[OM_RANK];
        int lead = rank - t->rank;
        bool fits = lead >= 0;
        for (int i = 0; i < t->rank && fits; i++) {
            int b = mx_broadcast(&s->rd, mx_size(&s->rd, t->dim[i]), size[i + lead]);
            fits = b >= 0;
            idx[i] = b > 0 ? mx_var(m, i + lead, size[i + lead]) : mx_int(m, 0);
        }
        mx_id e = fits ? mx_eval(&s->rd, cond, idx) : MX_NONE;
        sees = masks_row_sees(s, visible_when ? e : mx_not(m, e)) && s->rd.aliases.n == 0;
    }
    mx_reader_free(&s->rd);
    om_free(cx, s);
    return sees;
}

/* Values that a trained network produces, not ones that a user may have filled with -inf or finfo.min. */
static bool masks_moderate_value(const om_graph *g, om_id v, int depth) {
    const om_value *x = om_val(g, v);
    if (!om_is_float(x->type.dtype) || x->role == OM_PARAM) return true;
    if (x->node == OM_NONE) {
        int64_t n = 1;
        if (x->role != OM_CONST) return false;
        for (int i = 0; i < x->type.rank; i++) n *= x->type.dim[i];
        if (n > 4096 || (x->type.dtype != OM_F32 && x->type.dtype != OM_F64)) return false;
        for (int64_t i = 0; i < n; i++) {
            double f = x->type.dtype == OM_F32 ? (double)((const float *)x->data)[i] : ((const double *)x->data)[i];
            if (!(fabs(f) < 1e4)) return false;
        }
        return true;
    }
    const om_node *n = &g->nodes.v[x->node];
    if (n->op->kind == OM_K_GEMM || n->op->kind == OM_K_ROW || n->op->kind == OM_K_ATTENTION ||
        n->op->kind == OM_K_CONV)
        return true;
    if (n->op->kind == OM_K_HOST || depth > 24) return false;
    double f;
    if (om_is(n, fill)) return om_number_of(g, v, &f) && fabs(f) < 1e4;
    for (int i = 0; i < n->n_in; i++)
        if (om_ins(g, n)[i] != OM_NONE && !masks_moderate_value(g, om_ins(g, n)[i], depth + 1)) return false;
    return true;
}

bool om_mask_moderate(const om_graph *g, om_id v) { return masks_moderate_value(g, v, 0); }

static bool masks_moderate(const masks *s, mx_id e) {
    const mx_node *x = mx_at(&s->rd.m, e);
    switch (x->kind) {
    case MX_FLT: return fabs(x->f) < 1e4;
    case MX_FSEL: return masks_moderate(s, (mx_id)x->w[1]) && masks_moderate(s, (mx_id)x->w[2]);
    case MX_FADD:
        for (int i = 0; i < x->n; i++)
            if (!masks_moderate(s, (mx_id)x->w[i])) return false;
        return true;
    case MX_LOAD: return masks_moderate_value(s->rd.from, (om_id)x->w[0], 0);
    default: return false;
    }
}

/* One summand of an additive mask as (cond ? rest : hidden): cond_inf where -inf hides, cond_fin where a finite number
 * does. */
static void masks_gates(masks *s, mx_id e, mx_id *cond_inf, mx_id *cond_fin, mx_id *rest) {
    mx *m = &s->rd.m;
    *cond_inf = *cond_fin = m->t;
    for (;;) {
        mx_node x = *mx_at(m, e);
        if (x.kind != MX_FSEL) break;
        mx_node a = *mx_at(m, (mx_id)x.w[1]), b = *mx_at(m, (mx_id)x.w[2]);
        bool hide_else = b.kind == MX_FLT && om_mask_hides(b.f, s->dtype),
             hide_then = a.kind == MX_FLT && om_mask_hides(a.f, s->dtype);
        if (hide_else == hide_then) break;
        mx_id cond = hide_else ? (mx_id)x.w[0] : mx_not(m, (mx_id)x.w[0]);
        bool inf = isinf(hide_else ? b.f : a.f);
        mx_id *to = inf ? cond_inf : cond_fin;
        *to = mx_and(m, *to, cond);
        e = (mx_id)x.w[hide_else ? 1 : 2];
        if (*to == MX_NONE) return;
    }
    *rest = e;
}

/* The formula of an additive mask, taken apart. false: nothing can be said. */
static bool masks_split_add(masks *s, mx_id e, masks_split *p) {
    mx *m = &s->rd.m;
    mx_node x = *mx_at(m, e);
    int64_t one = e;
    int n = x.kind == MX_FADD ? x.n : 1;
    const int64_t *w = x.kind == MX_FADD ? x.w : &one;
    mx_id all = p->rest, hard = m->t; /* all: what every row must be able to see; hard: what -inf hides */
    if (p->causal) {
        mx_id q = mx_var(m, s->rank - 2, s->size[s->rank - 2]), k = mx_var(m, s->rank - 1, s->size[s->rank - 1]);
        all = mx_and(m, all, mx_ge0(m, mx_add(m, mx_sub(m, q, k), mx_i64(m, p->offset))));
        if (p->window) all = mx_and(m, all, mx_ge0(m, mx_add(m, mx_sub(m, k, q), mx_i64(m, p->width - 1))));
    } else if (p->window) {
        return false;
    }
    bool finite = false, moderate = true;
    for (int i = 0; i < n; i++) {
        mx_id ci, cf, rest = MX_NONE;
        masks_gates(s, (mx_id)w[i], &ci, &cf, &rest);
        all = mx_and(m, all, mx_and(m, ci, cf));
        if (all == MX_NONE) return false;
        finite |= cf != m->t;
        moderate &= masks_moderate(s, rest);
    }
    bool exact = !finite || (moderate && masks_row_sees(s, all));
    p->add = mx_flt(m, 0);
    for (int i = 0; i < n; i++) {
        mx_id ci, cf, rest;
        masks_gates(s, (mx_id)w[i], &ci, &cf, &rest);
        if (cf == m->t || exact) {
            hard = mx_and(m, hard, mx_and(m, ci, cf));
            p->add = mx_fadd(m, p->add, rest, s->dtype);
        } else {
            p->add = mx_fadd(m, p->add, (mx_id)w[i], s->dtype);
        }
    }
    if (hard == MX_NONE || p->add == MX_NONE) return false;
    masks_add_bool(s, p, hard);
    return p->rest != MX_NONE;
}

/* Leaves the node as it is, and forgets what was assumed for its sake. */
static om_status masks_give_up(om_rewriter *r, om_id id) {
    masks *s = r->arg;
    if (r->to->cx->status != OM_OK) return r->to->cx->status;
    bool unchecked = false;
    for (uint32_t i = 0; i < s->rd.aliases.n; i++) unchecked |= !s->rd.aliases.v[i].checked;
    if (unchecked) {
        mx_reader_free(&s->rd);
        s->done.n = 0;
        OM_TRY(mx_reader_init(&s->rd, r->to->cx, r->from, r->to));
    }
    return om_rewrite_copy(r, id);
}

static bool masks_all_checked(const masks *s) {
    for (uint32_t i = 0; i < s->rd.aliases.n; i++)
        if (!s->rd.aliases.v[i].checked) return false;
    return true;
}

/* --- the node ----------------------------------------------------------------------------------------------- */

static om_status masks_node(om_rewriter *r, om_id id) {
    const om_graph *from = r->from;
    const om_node *n = &from->nodes.v[id];
    masks *s = r->arg;
    mx *m = &s->rd.m;
    enum { MASK = 3 };
    if (!om_is(n, attention) || n->n_in <= MASK || om_ins(from, n)[MASK] == OM_NONE) return om_rewrite_copy(r, id);
    if (!s->started) {
        s->started = true;
        OM_TRY(mx_reader_init(&s->rd, r->to->cx, from, r->to));
    }
    s->r = r;
    s->failed = false;
    om_id mask = om_ins(from, n)[MASK];
    const om_type *qt = om_ty(from, om_ins(from, n)[0]), *kt = om_ty(from, om_ins(from, n)[1]), *mt = om_ty(from, mask);
    s->rank = qt->rank;
    s->dtype = mt->dtype;
    if (mt->rank > s->rank || s->rank < 2) return masks_give_up(r, id);
    for (int i = 0; i < s->rank - 1; i++) s->size[i] = mx_size(&s->rd, qt->dim[i]);
    s->size[s->rank - 1] = mx_size(&s->rd, kt->dim[s->rank - 2]);

    mx_id idx[OM_RANK];
    uint32_t axes = 0; /* of the scores that the operand really has */
    int lead = s->rank - mt->rank;
    for (int i = 0; i < mt->rank; i++) {
        om_dim have = mx_size(&s->rd, mt->dim[i]), want = s->size[i + lead];
        int b = mx_broadcast(&s->rd, have, want);
        if (b < 0) return masks_give_up(r, id);
        if (have != 1) axes |= 1u << (i + lead);
        idx[i] = b ? mx_var(m, i + lead, want) : mx_int(m, 0);
    }
    mx_id e = mx_eval(&s->rd, mask, idx);
    if (e == MX_NONE) return masks_give_up(r, id);

    bool was_causal = om_node_int(n, "causal", 0) != 0;
    int64_t old_width = om_node_int(n, "window", 0), old_offset = om_node_int(n, "causal_offset", 0);
    masks_split p = {.causal = was_causal,
                     .offset = old_offset,
                     .window = old_width > 0,
                     .width = old_width,
                     .rest = m->t,
                     .add = MX_NONE};
    if (mt->dtype == OM_BOOL) masks_add_bool(s, &p, e);
    else if (!masks_split_add(s, e, &p)) p.rest = MX_NONE;
    if (p.rest == MX_NONE) return masks_give_up(r, id);

    char text[512];
    mx_print(m, s->rd.from, e, text, sizeof text);
    om_log(m->cx, 3, "masks: node %u: %s", id, text);

    if (p.causal && om_sabotage("masks.offset")) p.offset++;
    if (p.window && om_sabotage("masks.window")) p.width++;
    if (p.rest != m->t && om_sabotage("masks.rest")) p.rest = m->t;
    bool no_add = p.add == MX_NONE || (mx_at(m, p.add)->kind == MX_FLT && mx_at(m, p.add)->f == 0);
    bool attrs = p.causal != was_causal || (p.causal && p.offset != old_offset) || p.window != (old_width > 0) ||
                 p.width != old_width;
    om_id operand = r->map[mask];
    bool smaller = false;
    if (no_add && p.rest == m->t) {
        operand = OM_NONE;
        smaller = true;
    } else {
        mx_id want = p.rest;
        if (!no_add)
            want = p.rest == m->t ? p.add
                                  : mx_fadd(m, p.add, mx_fsel(m, p.rest, mx_flt(m, 0), mx_flt(m, -INFINITY)), s->dtype);
        uint32_t deps = want == MX_NONE ? 0 : mx_at(m, want)->deps;
        bool free = want != MX_NONE && want != e &&
                    (mx_origin(&s->rd, want) != MX_NONE || mx_at(m, want)->kind == MX_LOAD);
        if (deps && (deps & ~axes) == 0 && (deps != axes || free)) {
            om_id v = masks_emit(s, want);
            if (v != OM_NONE) operand = v, smaller = true;
            else /* what was emitted on the way is dead, and with it its checks */
                for (uint32_t i = 0; i < s->rd.aliases.n; i++) s->rd.aliases.v[i].checked = false;
        }
    }
    if (m->cx->status != OM_OK) return m->cx->status;
    if ((!attrs && !smaller) || !masks_all_checked(s)) return masks_give_up(r, id);

    om_id in[8];
    om_attr attr[16];
    int n_attr = 0, n_in = n->n_in;
    if (n_in > 8 || n->n_attr > 12) return masks_give_up(r, id);
    for (int i = 0; i < n_in; i++) in[i] = om_ins(from, n)[i] == OM_NONE ? OM_NONE : r->map[om_ins(from, n)[i]];
    in[MASK] = operand;
    if (operand == OM_NONE && n_in == MASK + 1) n_in = MASK;
    for (int i = 0; i < n->n_attr; i++)
        if (strcmp(n->attr[i].name, "causal") && strcmp(n->attr[i].name, "causal_offset") &&
            strcmp(n->attr[i].name, "window"))
            attr[n_attr++] = n->attr[i];
    attr[n_attr++] = OM_AI("causal", p.causal);
    if (p.causal && p.offset) attr[n_attr++] = OM_AI("causal_offset", p.offset);
    if (p.window) attr[n_attr++] = OM_AI("window", p.width);
    r->to->cur_scope = n->scope;
    r->to->cur_phase = n->phase;
    om_id out = om_make(r->to, n->op, in, n_in, attr, n_attr);
    if (r->to->cx->status != OM_OK) return r->to->cx->status;
    om_node *nn = om_last(r->to);
    nn->rng = n->rng;
    nn->segment = n->segment;
    for (int i = 0; i < n->n_out; i++) {
        r->map[n->out + (om_id)i] = out + (om_id)i;
        const char *name = om_val(from, n->out + (om_id)i)->name;
        if (name) om_val(r->to, out + (om_id)i)->name = om_arena_str(&r->to->arena, name);
    }
    s->changed = true;
    return r->to->cx->status;
}

om_status om_pass_run_masks(om_ctx *cx, const om_graph *in, om_graph **out) {
    masks *s = om_alloc(cx, sizeof *s); /* its hash tables are too large for a stack */
    if (!s) return cx->status;
    om_graph *g = NULL;
    om_status st = om_rewrite(cx, in, masks_node, s, &g);
    if (st == OM_OK && s->changed) { /* once more, to drop what built the masks */
        om_graph *clean = NULL;
        st = om_rewrite(cx, g, om_rewrite_copy, NULL, &clean);
        om_graph_free(g);
        g = clean;
    }
    if (s->started) mx_reader_free(&s->rd);
    om_free(cx, s->done.v);
    om_free(cx, s);
    *out = st == OM_OK ? g : NULL;
    return st;
}
