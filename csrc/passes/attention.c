/* attention.c - pass `attention`: attention written out as operators becomes one attention node.
 *
 *     matmul(dropout(cast(softmax(cast(where(c, matmul(q, kT) * scale + m, NEG))))), v)   ->   attention(q, k, v, mask)
 *
 * Starting at each matmul, its first operand is followed towards the inputs through dropout, casts and softmax over the
 * last axis, then through any mixture of additive masks, where() with a hiding constant, one scale, casts, and reshapes
 * that split or merge leading axes only, down to the matmul of the scores. Every value on the way must have no other
 * reader. The mask steps are replayed from the inside out on a mask tensor of their own broadcast shape, so the mask
 * has exactly the values the scores would have got. The nodes left behind are dead.
 *
 * What is the same: dropout keeps its random stream, and its logical index is the flat index of (.., h, q, k) in both
 * forms. What is not, on purpose: low-precision scores are kept in the attention operator's compute type instead of
 * being rounded in between.
 *
 * Rows without a visible key decide what a mask means. Where -inf hides, softmax gives NaN there: nan_rows.
 * A finite hiding constant of where() (om_mask_hides: one that scores do not reach) replaces the score, so its gradient
 * ends there. In a row that sees a key that is so anyway: the weights of the hidden ones are exactly 0. A row that sees
 * none has equal scores everywhere and no gradient into q and k.
 *   the constant is the only step    such a row gets a zero query and sees all keys, which is just that
 *   other steps stand beside it      from -1e30 on a score vanishes beside the constant, so adding it gives the same
 *                                    numbers, and the operand `frozen` ends the gradient; smaller ones are not taken
 * Neither is needed where every row provably sees a key (causal masks) and nothing else can hide it.
 *
 * Keys and values repeated for grouped-query heads (unsqueeze, expand, reshape, perhaps a cast) are read unrepeated,
 * where both have as many heads: the operator does the grouping.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/masks/masks.h"
#include "passes/passes.h"

#include <math.h>

enum { STEPS_MAX = 24 };

typedef enum attn_step_kind { STEP_ADD, STEP_FILL, STEP_RESHAPE } attn_step_kind;
typedef struct attn_step {
    attn_step_kind kind;
    om_id mask;          /* ADD: the summand; FILL: the condition */
    bool hide_when;      /* FILL: the condition's value that hides */
    double value;        /* FILL */
    int dtype;           /* FILL: of the scores there */
    om_id shape_of;      /* RESHAPE: value whose type the scores take */
} attn_step;

typedef struct attn_match {
    om_id q, kt, v, softmax;
    double scale, dropout;
    uint64_t rng;
    bool alone;          /* the only step is a FILL with a finite number */
    int n_steps;
    attn_step step[STEPS_MAX]; /* outermost first */
} attn_match;

typedef struct attn_pass {
    const om_facts *facts;
    bool changed;
} attn_pass;

/* --- what values are ---------------------------------------------------------------------------------------- */

/* All sizes but those of the last two axes. */
static bool same_lead(const om_type *a, const om_type *b) {
    return a->rank == b->rank && !memcmp(a->dim, b->dim, (size_t)(a->rank - 2) * sizeof *a->dim);
}

/* A reshape that leaves the last two axes alone. */
static bool leading_reshape(const om_graph *g, const om_node *n) {
    const om_type *a = om_ty(g, om_ins(g, n)[0]), *b = om_ty(g, n->out);
    return om_is(n, reshape) && a->rank >= 3 && b->rank >= 3 && a->dim[a->rank - 1] == b->dim[b->rank - 1] &&
           a->dim[a->rank - 2] == b->dim[b->rank - 2];
}

static bool leading_ones(const om_type *m) {
    for (int i = 0; i + 2 < m->rank; i++)
        if (m->dim[i] != 1) return false;
    return true;
}

/* --- the match ------------------------------------------------------------------------------------------------ */

/* From the value read by softmax down to the matmul of the scores. */
static bool match_scores(const om_graph *g, const attn_pass *p, om_id v, attn_match *m, int depth, bool scaled,
                         bool reshaped) {
    const om_node *n = om_maker(g, v);
    if (!n || !om_used_once_live(p->facts, v) || depth > 24) return false;
    const om_id *in = om_ins(g, n);
    const om_type *t = om_ty(g, v);
    double x;
    int saved = m->n_steps;
    attn_step *step = &m->step[m->n_steps];
    if (om_is(n, matmul)) {
        if (n->n_in > 2 && in[2] != OM_NONE) return false;
        const om_type *a = om_ty(g, in[0]), *b = om_ty(g, in[1]);
        if (a->rank < 3 || !same_lead(a, b)) return false;
        m->q = in[0];
        m->kt = in[1];
        return true;
    }
    if (om_is(n, cast))
        return om_is_float(om_ty(g, in[0])->dtype) && match_scores(g, p, in[0], m, depth + 1, scaled, reshaped);
    if (om_is(n, mul) || om_is(n, div)) {
        for (int side = 0; side < (om_is(n, mul) ? 2 : 1); side++)
            if (om_number_of(g, in[1 - side], &x) && om_same_dims(om_ty(g, in[side]), t) && isfinite(x) &&
                (om_is(n, mul) || x != 0)) {
                double old = m->scale;
                m->scale = om_is(n, mul) ? old * x : old / x;
                if (match_scores(g, p, in[side], m, depth + 1, true, reshaped)) return true;
                m->scale = old;
            }
        return false;
    }
    if (m->n_steps == STEPS_MAX) return false;
    if (leading_reshape(g, n)) {
        *step = (attn_step){.kind = STEP_RESHAPE, .shape_of = v};
        m->n_steps++;
        if (match_scores(g, p, in[0], m, depth + 1, scaled, true)) return true;
        m->n_steps = saved;
        return false;
    }
    if (scaled) return false; /* the scale would have to go into the mask */
    if (om_is(n, add)) {
        for (int side = 0; side < 2; side++) {
            const om_type *mt = om_ty(g, in[1 - side]);
            if (!om_same_dims(om_ty(g, in[side]), t)) continue;
            if (reshaped && !leading_ones(mt) && !om_same_dims(mt, t) && !same_lead(mt, t)) continue;
            *step = (attn_step){.kind = STEP_ADD, .mask = in[1 - side]};
            m->n_steps++;
            if (match_scores(g, p, in[side], m, depth + 1, scaled, reshaped)) return true;
            m->n_steps = saved;
        }
        return false;
    }
    if (om_is(n, where)) {
        for (int side = 1; side < 3; side++) {
            const om_type *ct = om_ty(g, in[0]);
            if (!om_same_dims(om_ty(g, in[side]), t) || !om_number_of(g, in[3 - side], &x) ||
                !om_mask_hides(x, t->dtype))
                continue;
            if (reshaped && !leading_ones(ct) && !same_lead(ct, t)) continue;
            *step = (attn_step){
                .kind = STEP_FILL, .mask = in[0], .hide_when = side == 2, .value = x, .dtype = t->dtype};
            m->n_steps++;
            if (match_scores(g, p, in[side], m, depth + 1, scaled, reshaped)) return true;
            m->n_steps = saved;
        }
    }
    return false;
}

static bool match(const om_graph *g, const attn_pass *p, const om_node *mm, attn_match *m) {
    *m = (attn_match){.scale = 1, .softmax = OM_NONE};
    if (mm->n_in > 2 && om_ins(g, mm)[2] != OM_NONE) return false;
    om_id v = om_ins(g, mm)[0];
    m->v = om_ins(g, mm)[1];
    const om_type *pt = om_ty(g, v), *vt = om_ty(g, m->v);
    if (pt->rank < 3 || !same_lead(pt, vt)) return false;
    const om_node *n;
    for (;;) { /* what stands between softmax and the matmul */
        if (!(n = om_maker(g, v)) || !om_used_once_live(p->facts, v)) return false;
        if (om_is(n, softmax)) break;
        if (om_is(n, dropout) && m->dropout == 0) {
            m->dropout = om_node_float(n, "p", 0);
            m->rng = n->rng;
            if (!(m->dropout >= 0 && m->dropout < 1)) return false;
        } else if (!(om_is(n, cast) && om_is_float(om_ty(g, om_ins(g, n)[0])->dtype)) && !leading_reshape(g, n)) {
            return false;
        }
        v = om_ins(g, n)[0];
    }
    m->softmax = v;
    const om_type *st = om_ty(g, v);
    if (om_node_int(n, "axis", -1) != st->rank - 1) return false;
    om_id scores = om_ins(g, n)[0];
    if (!match_scores(g, p, scores, m, 0, false, false)) return false;

    const om_type *qt = om_ty(g, m->q), *kt = om_ty(g, m->kt);
    /* no step may be more or less precise than the operator's own arithmetic */
    int T = qt->dtype, C = om_compute_dtype(T);
    if (kt->dtype != T || vt->dtype != T || om_ty(g, mm->out)->dtype != T || pt->dtype != T) return false;
    if (!om_is_float(T) || (st->dtype != T && st->dtype != C)) return false;
    bool weak = false; /* a score does not vanish beside the constant */
    for (int i = 0; i < m->n_steps; i++) {
        if (m->step[i].kind == STEP_ADD && om_ty(g, m->step[i].mask)->dtype != T &&
            om_ty(g, m->step[i].mask)->dtype != C)
            return false;
        weak |= m->step[i].kind == STEP_FILL && m->step[i].value > -1e30;
    }
    m->alone = m->n_steps == 1 && m->step[0].kind == STEP_FILL && isfinite(m->step[0].value);
    return !weak || m->alone;
}

/* --- the replacement -------------------------------------------------------------------------------------------- */

/* k0 when v is k0 with each head repeated n times: reshape(expand(unsqueeze(k0, 2), (b, hk, n, t, d)), (b, hk * n, t,
 * d)). */
static om_id unrepeat(const om_graph *g, om_id v) {
    const om_node *r = om_maker(g, v);
    if (!r || !om_is(r, reshape)) return v;
    om_id e = om_ins(g, r)[0];
    const om_node *x = om_maker(g, e);
    if (x && om_is(x, copy)) e = om_ins(g, x)[0], x = om_maker(g, e);
    if (!x || !om_is(x, expand)) return v;
    const om_node *u = om_maker(g, om_ins(g, x)[0]);
    if (!u || !om_is(u, reshape)) return v;
    om_id k0 = om_ins(g, u)[0];
    const om_type *tv = om_ty(g, v), *te = om_ty(g, e), *tu = om_ty(g, u->out), *t0 = om_ty(g, k0);
    if (tv->rank != 4 || te->rank != 5 || tu->rank != 5 || t0->rank != 4) return v;
    bool ok = tu->dim[2] == 1 && te->dim[0] == t0->dim[0] && te->dim[1] == t0->dim[1] && te->dim[3] == t0->dim[2] &&
              te->dim[4] == t0->dim[3];
    ok &= tu->dim[0] == t0->dim[0] && tu->dim[1] == t0->dim[1] && tu->dim[3] == t0->dim[2] && tu->dim[4] == t0->dim[3];
    ok &= tv->dim[0] == t0->dim[0] && tv->dim[2] == t0->dim[2] && tv->dim[3] == t0->dim[3];
    int64_t hk, rep, h;
    ok &= om_dim_const(g, te->dim[1], &hk) && om_dim_const(g, te->dim[2], &rep) && om_dim_const(g, tv->dim[1], &h) &&
          h == hk * rep;
    return ok ? k0 : v;
}

/* kT's transpose: what kT was made from, when it was made by swapping the last two axes. */
static om_id untransposed(const om_graph *g, om_id kt) {
    const om_node *n = om_maker(g, kt);
    if (!n || !om_is(n, permute)) return OM_NONE;
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "perm");
    int rank = om_ty(g, kt)->rank;
    if (!a || (int)a->n != rank) return OM_NONE;
    for (int i = 0; i < rank; i++)
        if (a->dims[i] != (i == rank - 1 ? rank - 2 : i == rank - 2 ? rank - 1 : i)) return OM_NONE;
    return om_ins(g, n)[0];
}

/* x (lead.., rows, cols) with the leading axes of `shape`. */
static om_id with_lead(om_graph *g, om_id x, const om_dim *lead, int n_lead) {
    if (x == OM_NONE || g->cx->status != OM_OK) return OM_NONE;
    om_dim dim[OM_RANK];
    om_type t = *om_ty(g, x);
    memcpy(dim, lead, (size_t)n_lead * sizeof *dim);
    dim[n_lead] = t.dim[t.rank - 2];
    dim[n_lead + 1] = t.dim[t.rank - 1];
    return om_b_reshape(g, x, dim, n_lead + 2);
}

/* A mask of the scores before a RESHAPE step as one of those after it. */
static om_id mask_reshape(om_rewriter *r, const attn_step *s, om_id mask) {
    om_graph *g = r->to;
    if (mask == OM_NONE || g->cx->status != OM_OK) return OM_NONE;
    om_type t = *om_ty(r->from, s->shape_of), mt = *om_ty(g, mask);
    om_dim lead[OM_RANK];
    bool ones = leading_ones(&mt);
    for (int k = 0; k + 2 < t.rank; k++) lead[k] = ones ? 1 : om_dim_copy(g, r->from, t.dim[k]);
    while (mt.rank < 2) { /* a mask over keys alone: rows of size 1 */
        memmove(mt.dim + 1, mt.dim, mt.rank * sizeof *mt.dim);
        mt.dim[0] = 1;
        mt.rank++;
    }
    mask = om_b_reshape(g, mask, mt.dim, mt.rank);
    return with_lead(g, mask, lead, t.rank - 2);
}

/* Where a FILL replaced the score. */
static om_id frozen_of(om_rewriter *r, const attn_match *m) {
    om_graph *g = r->to;
    om_id frozen = OM_NONE;
    for (int i = m->n_steps - 1; i >= 0; i--) {
        const attn_step *s = &m->step[i];
        if (s->kind == STEP_RESHAPE) frozen = mask_reshape(r, s, frozen);
        if (s->kind != STEP_FILL) continue;
        om_id hide = s->hide_when ? r->map[s->mask] : om_b_un(g, &om_op_not, r->map[s->mask]);
        frozen = frozen == OM_NONE ? hide : om_b_bin(g, &om_op_or, frozen, hide);
    }
    return frozen;
}

static om_id mask_of(om_rewriter *r, const attn_match *m) {
    om_graph *g = r->to;
    om_id mask = OM_NONE;
    for (int i = m->n_steps - 1; i >= 0; i--) {
        const attn_step *s = &m->step[i];
        if (s->kind == STEP_RESHAPE) {
            mask = mask_reshape(r, s, mask);
            continue;
        }
        om_id x = r->map[s->mask];
        if (s->kind == STEP_ADD) {
            if (mask != OM_NONE && om_ty(g, mask)->dtype == OM_BOOL)
                mask = om_make(g, &om_op_where, OM_IN(mask, x, om_scalar(g, om_ty(g, x)->dtype, -INFINITY)), NULL, 0);
            else if (mask != OM_NONE) {
                int dt = om_ty(g, mask)->dtype == om_ty(g, x)->dtype ? om_ty(g, x)->dtype
                                                                     : om_compute_dtype(om_ty(g, x)->dtype);
                mask = om_b_bin(g, &om_op_add, om_b_cast(g, mask, dt), om_b_cast(g, x, dt));
            } else
                mask = x;
            continue;
        }
        om_id see = s->hide_when ? om_b_un(g, &om_op_not, x) : x;
        bool inf = isinf(s->value), is_bool = mask != OM_NONE && om_ty(g, mask)->dtype == OM_BOOL;
        if (inf && (mask == OM_NONE || is_bool)) {
            mask = mask == OM_NONE ? see : om_b_bin(g, &om_op_and, mask, see);
        } else {
            int dt = mask != OM_NONE && !is_bool ? om_ty(g, mask)->dtype : s->dtype;
            if (is_bool)
                mask = om_make(g, &om_op_where, OM_IN(mask, om_scalar(g, dt, 0), om_scalar(g, dt, -INFINITY)), NULL, 0);
            if (mask == OM_NONE) mask = om_scalar(g, dt, 0);
            mask = om_make(g, &om_op_where, OM_IN(see, mask, om_scalar(g, dt, s->value)), NULL, 0);
        }
    }
    return mask;
}

/* Rows without a visible key: their query becomes zero and every key visible. */
static om_id free_blind_rows(om_graph *g, om_id see, om_id *q) {
    if (see == OM_NONE || g->cx->status != OM_OK) return OM_NONE;
    om_type t = *om_ty(g, see), qt = *om_ty(g, *q);
    om_dim last = t.rank - 1;
    om_id alive = see;
    if (t.rank && t.dim[last] != 1) {
        om_id any = om_make(g, &om_op_reduce_max, OM_IN(om_b_cast(g, see, OM_I64)),
                            OM_ATTRS(OM_AD("axes", &last, 1), OM_AI("keepdims", 1)));
        alive = om_b_cast(g, any, OM_BOOL);
    }
    *q = om_make(g, &om_op_where, OM_IN(alive, *q, om_scalar(g, qt.dtype, 0)), NULL, 0);
    return om_b_bin(g, &om_op_or, see, om_b_un(g, &om_op_not, alive));
}

static om_status make_attention(om_rewriter *r, const om_node *mm, const attn_match *m) {
    om_graph *g = r->to;
    const om_graph *from = r->from;
    const om_type *st = om_ty(from, m->softmax), *qt = om_ty(from, m->q);
    om_type yt = *om_ty(from, mm->out);
    int n_lead = st->rank - 2;
    om_dim lead[OM_RANK];
    for (int i = 0; i < n_lead; i++) lead[i] = om_dim_copy(g, from, st->dim[i]);
    bool same = same_lead(qt, st);
    bool same_v = same_lead(&yt, st);
    for (int i = 0; i < yt.rank; i++) yt.dim[i] = om_dim_copy(g, from, yt.dim[i]);

    om_id k_old = untransposed(from, m->kt), q = r->map[m->q], v = r->map[m->v], k;
    if (k_old != OM_NONE) {
        const om_id k_once = unrepeat(from, k_old), v_once = unrepeat(from, m->v);
        const bool once = same && same_v && k_once != k_old && v_once != m->v &&
                          om_ty(from, k_once)->dim[1] == om_ty(from, v_once)->dim[1];
        k = r->map[once ? k_once : k_old];
        if (once) v = r->map[v_once];
    } else {
        k = om_b_transpose(g, r->map[m->kt], -1, -2);
    }
    if (!same) q = with_lead(g, q, lead, n_lead), k = with_lead(g, k, lead, n_lead);
    if (!same_v) v = with_lead(g, v, lead, n_lead);
    attn_match as = *m;
    int fills = 0, finite = 0, at = 0;
    bool adds = false, moderate = true, sees = false;
    for (int i = 0; i < m->n_steps; i++)
        if (m->step[i].kind == STEP_FILL) {
            fills++, at = i;
            finite += isfinite(m->step[i].value) != 0;
        } else if (m->step[i].kind == STEP_ADD) {
            adds = true;
            moderate &= om_mask_moderate(from, m->step[i].mask);
        }
    if (fills == 1 && finite && moderate) {
        om_dim size[OM_RANK];
        bool plain = true;
        for (int i = 0; i < m->n_steps; i++) plain &= m->step[i].kind != STEP_RESHAPE;
        for (int i = 0; i < st->rank; i++) size[i] = om_dim_copy(g, from, st->dim[i]);
        sees = plain && om_mask_rows_see(r, m->step[at].mask, !m->step[at].hide_when, size, st->rank);
    }
    if (m->alone) as.step[0].value = -INFINITY;
    om_id mask = mask_of(r, &as), frozen = OM_NONE;
    if (m->alone && !sees) mask = free_blind_rows(g, mask, &q);
    else if (!m->alone && !sees && fills && (finite || adds)) frozen = frozen_of(r, m);
    bool nan = m->n_steps && !m->alone;
    om_id in[7] = {q, k, v, mask, OM_NONE, OM_NONE, frozen};
    om_attr attr[4] = {OM_AI("causal", 0), OM_AF("scale", m->scale), OM_AF("dropout", m->dropout),
                       OM_AI("nan_rows", adds || finite ? 1 : 2)};
    om_id y = om_make(g, &om_op_attention, in,
                      frozen != OM_NONE ? 7
                      : mask != OM_NONE ? 4
                                        : 3,
                      attr, nan && mask != OM_NONE ? 4 : 3);
    om_last(g)->rng = m->dropout > 0 ? m->rng + om_sabotage("attention.stream") : 0;
    r->map[mm->out] = om_b_reshape(g, y, yt.dim, yt.rank);
    return g->cx->status;
}

/* The same of a cast of repeated heads (autocast's, behind the repetition): the operand in `to`, the cast made anew
 * over the heads themselves; OM_NONE: it is no repetition. */
static om_id heads_once(om_rewriter *r, om_id v, om_dim *heads) {
    const om_graph *from = r->from;
    const om_node *c = om_maker(from, v);
    if (c && !om_is(c, cast)) c = NULL;
    const om_id repeated = c ? om_ins(from, c)[0] : v, v0 = unrepeat(from, repeated);
    if (v0 == repeated) return OM_NONE;
    *heads = om_ty(from, v0)->dim[1];
    return c ? om_rewrite_node(r, c, &r->map[v0], 1) : r->map[v0];
}

/* An attention node whose keys and values are repeated heads. */
static om_status attention_unrepeat(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    attn_pass *p = r->arg;
    om_dim kh = 0, vh = 0;
    const om_id *in = om_ins(r->from, n), k = heads_once(r, in[1], &kh), v = heads_once(r, in[2], &vh);
    OM_TRY(om_rewrite_copy(r, id));
    if (k == OM_NONE || v == OM_NONE || kh != vh) return r->to->cx->status;
    om_id *ins = r->to->operands.v + om_last(r->to)->in; /* the node just copied: same sizes, so its types stand */
    ins[1] = k;
    ins[2] = v;
    p->changed = true;
    return OM_OK;
}

static om_status attn_node(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    attn_pass *p = r->arg;
    attn_match m;
    if (om_is(n, attention)) return attention_unrepeat(r, id);
    if (!om_is(n, matmul) || !match(r->from, p, n, &m)) return om_rewrite_copy(r, id);
    p->changed = true;
    return make_attention(r, n, &m);
}

om_status om_pass_run_attention(om_ctx *cx, const om_graph *in, om_graph **out) {
    *out = NULL;
    om_facts *facts = om_facts_new(cx, in);
    attn_pass p = {facts, false};
    om_graph *g = NULL;
    om_status st = facts ? om_rewrite(cx, in, attn_node, &p, &g) : cx->status;
    if (st == OM_OK && p.changed) { /* once more, to drop what the matches left behind */
        om_graph *clean = NULL;
        st = om_rewrite(cx, g, om_rewrite_copy, NULL, &clean);
        om_graph_free(g);
        g = clean;
    }
    om_free(cx, facts);
    if (st == OM_OK) *out = g;
    return st;
}
