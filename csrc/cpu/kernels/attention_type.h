/* attention_type.h - the part of attention.k.c and attention_bf16.k.c that is written once and compiled per compute
 * type (after vec.h); ATTN_PAIRS: its products are of pairs of bf16, ATTN_TILES: on AMX tiles. */
#ifndef OM_ATTENTION_TYPE_ONCE
#define OM_ATTENTION_TYPE_ONCE
/* Queries and keys of a tile: S, P and dP (16 KB each in f32) stay in L1/L2. Where products take half the time, longer
 * rows: what is done once a row counts for more. */
#if ATTN_PAIRS
enum { BR = 32, BC = 128 };
#else
enum { BR = 64, BC = 64 };
#endif
enum { TILE_HIDDEN, TILE_PLAIN, TILE_MASKED };

#define ATTN_TYPE(suf)                                                                        \
    {                                                                                         \
        .rows = BR, .forward_work = forward_work_##suf, .backward_work = backward_work_##suf, \
        .forward = forward_##suf, .backward = backward_##suf                                  \
    }

/* First element of (batch entry b, head h). */
static int64_t head_at(const om_tensor *t, const om_tensor *like, int64_t b, int64_t h) {
    int64_t at = h * t->stride[t->rank - 3];
    for (int i = like->rank - 4; i >= 0; i--) {
        at += b % like->dim[i] * t->stride[i];
        b /= like->dim[i];
    }
    return at;
}

static const void *elem(const om_tensor *t, int64_t at) {
    int64_t size = t->dtype == OM_F64 ? 8 : t->dtype == OM_F32 ? 4 : t->dtype == OM_BOOL ? 1 : 2;
    return (const char *)t->data + at * size;
}

/* Keys [*lo, *hi) that query i of batch entry b may see, mask tensor apart; empty is lo >= hi. */
static void visible(const om_attn_job *j, int64_t b, int64_t i, int64_t *lo, int64_t *hi) {
    int64_t l = 0, h = j->f->tk;
    if (j->kv_start && j->kv_start[b * j->f->start_stride] > l) l = j->kv_start[b * j->f->start_stride];
    if (j->kv_end && j->kv_end[b * j->f->end_stride] < h) h = j->kv_end[b * j->f->end_stride];
    if (j->f->causal && i + j->f->offset + 1 < h) h = i + j->f->offset + 1;
    if (j->f->window > 0 && i - j->f->window + 1 > l) l = i - j->f->window + 1;
    *lo = l;
    *hi = h;
}

/* Dropout words of one row, left to right: a block of 64 words that two tiles share is drawn once. */
typedef struct drop_row { uint64_t block; uint32_t word[OM_PHILOX_BLOCK]; } drop_row;

static void drop_words(const om_attn_job *j, drop_row *r, uint64_t first, int64_t n, uint32_t *out) {
    while (n > 0) {
        uint64_t block = first / OM_PHILOX_BLOCK;
        int64_t skip = (int64_t)(first % OM_PHILOX_BLOCK),
                take = OM_PHILOX_BLOCK - skip < n ? OM_PHILOX_BLOCK - skip : n;
        if (skip == 0 && take == OM_PHILOX_BLOCK) {
            om_philox_block(j->seed, j->f->stream, block, out);
        } else {
            if (r->block != block) om_philox_block(j->seed, j->f->stream, block, r->word);
            r->block = block;
            memcpy(out, r->word + skip, (size_t)take * sizeof *out);
        }
        first += (uint64_t)take, out += take, n -= take;
    }
}
#endif

static inline int64_t N(pad)(int64_t n) { return (n + VL - 1) / VL * VL; }

/* a > b ? a : b */
OM_INLINE V N(larger)(V a, V b) {
#if OM_VBYTES == 64 && OM_VEC_BITS == 32
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif OM_VBYTES == 64
    return (V)_mm512_max_pd((__m512d)a, (__m512d)b);
#else
    return N(pick)(a > b, a, b);
#endif
}

/* Fetches rows [t0, t0 + n) of head `at` early, those there are: a head's rows lie far apart, which the processor does
 * not foresee. */
static void N(rows_ahead)(const om_tensor *x, int64_t at, int64_t t0, int64_t n) {
    const int r = x->rank;
    const int64_t left = x->dim[r - 2] - t0, rs = x->stride[r - 2];
    if (x->stride[r - 1] != 1) return;
    const int64_t size = x->dim[r - 1] * (int64_t)om_dtype_size(x->dtype);
    for (int64_t i = 0; i < n && i < left; i++) {
        const char *row = elem(x, at + (t0 + i) * rs);
        for (int64_t k = 0; k < size; k += 64) __builtin_prefetch(row + k);
    }
}

/* Which of VL dropout words keep their element. */
OM_INLINE I N(keeps)(const uint32_t *word, uint32_t below) {
    typedef uint32_t words __attribute__((vector_size(VL * 4)));
    words w;
    memcpy(&w, word, sizeof w);
    return __builtin_convertvector(w < below, I);
}

#if ATTN_PAIRS
#include "cpu/kernels/attention_pairs.h"
#else
#include "cpu/kernels/attention_wide.h"
#endif

/* --- the mask ------------------------------------------------------------------------------------------- */

/* The mask's tile (n, w) at (i0, j0) as numbers to add; *ld = 0 when all rows are equal. */
static int N(mask_tile)(const om_attn_job *j, int64_t at, int64_t i0, int64_t n, int64_t j0, int64_t w, T *buf,
                        int64_t *ld) {
    const om_tensor *x = &j->mask;
    if (x->dtype == OM_NODTYPE) return TILE_PLAIN;
    int64_t rs = x->stride[x->rank - 2], cs = x->stride[x->rank - 1], rows = rs == 0 ? 1 : n;
    *ld = rs == 0 ? 0 : BC;
    bool some = false, all = true; /* something visible; nothing changed */
    for (int64_t i = 0; i < rows; i++) {
        T *d = buf + i * BC;
        const void *src = elem(x, at + (i0 + i) * rs + j0 * cs);
        int seen = 0, plain = 1;
        if (x->dtype == OM_BOOL) {
            const uint8_t *m = src;
            for (int64_t k = 0; k < w; k++) {
                int v = m[k * cs] != 0;
                d[k] = v ? (T)0 : -(T)INFINITY;
                seen |= v;
                plain &= v;
            }
        } else {
            for (int64_t k = 0; k < w; k++) {
                T v = x->dtype == OM_F32    ? (T)((const float *)src)[k * cs]
                      : x->dtype == OM_F64  ? (T)((const double *)src)[k * cs]
                      : x->dtype == OM_BF16 ? (T)om_bf16_to_f32(((const uint16_t *)src)[k * cs])
                                            : (T)om_f16_to_f32(((const uint16_t *)src)[k * cs]);
                d[k] = v;
                seen |= v != -(T)INFINITY;
                plain &= v == 0;
            }
        }
        for (int64_t k = w; k < BC; k++) d[k] = 0;
        some |= seen;
        all &= plain;
    }
    return !some ? TILE_HIDDEN : all ? TILE_PLAIN : TILE_MASKED;
}

/* x = s * scale + mask in place for one row; keys outside [lo, hi) (counted from the tile's start) become -inf. Returns
 * the maximum. */
OM_INLINE T N(row_scores)(T *s, int64_t w, T scale, const T *mask, int64_t lo, int64_t hi) {
    static const I lane = {OM_LANES(+)};
    const V none = (V){0} - (T)INFINITY;
    V top = none;
    bool edge = lo > 0 || hi < N(pad)(w);
    for (int64_t k = 0; k < w; k += VL) {
        V x = N(vload)(s + k) * scale;
        if (mask) x += N(vload)(mask + k);
        if (edge) {
            I at = lane + (__typeof__(lane[0]))k;
            x = N(pick)((at >= (__typeof__(lane[0]))lo) & (at < (__typeof__(lane[0]))hi), x, none);
        }
        N(vstore)(s + k, x);
        top = N(larger)(x, top);
    }
    return N(row_top)(top);
}

/* --- forward ---------------------------------------------------------------------------------------------- */

typedef struct N(work) { /* carved from the worker's memory */
    RIGHT *kt, *vt;      /* K and V transposed: blocks of (width, BC) */
    RIGHT *kr, *vr;      /* K and V as rows, where the tensor cannot be used as it stands */
    LEFT *q, *dy, *y;    /* one block of queries: (BR, width) */
    RIGHT *q_right, *dy_right; /* the same where they stand on the right */
    T *s, *dp, *mask;    /* tiles (BR, BC) */
    LEFT *left;          /* P (forward) or dS (backward) as the left operand, */
    RIGHT *p_flip, *ds_flip; /* both as those of product_flip */
    T *out;              /* (BR, width): O, or dQ */
    T *dk, *dv;          /* sums over a head's queries: (tk, width) */
    T *m, *l, *delta;    /* per query */
    T *top, *fade;       /* per query: the new maximum, e^(old - new) */
    T *p;                /* (BC): a row of P */
    uint32_t *word;      /* (BC) */
    drop_row *drop;      /* (BR) */
} N(work);

static int64_t N(carve)(const om_attn_form *f, bool backward, char *base, N(work) *w) {
    int64_t at = 0, blocks = (f->tk + BC - 1) / BC, dp = N(pad)(f->d), vp = N(pad)(f->dv_size),
            big = dp > vp ? dp : vp;
#define CARVE(field, type, count)                                                                   \
    w->field = (type *)(void *)(base + at);                                                         \
    at = (at + (int64_t)sizeof(type) * (count) + 63) & ~(int64_t)63;
    CARVE(kt, RIGHT, blocks * BC * N(terms)(f->d) + VL)
    CARVE(vr, RIGHT, N(terms)(f->tk) * vp)
    CARVE(q, LEFT, BR * N(left_ld)(f->d))
    CARVE(s, T, BR * BC)
    CARVE(mask, T, BR * BC)
    CARVE(out, T, BR * big)
    CARVE(m, T, BR)
    CARVE(l, T, BR)
    CARVE(top, T, BR)
    CARVE(fade, T, BR)
    CARVE(word, uint32_t, BC)
    CARVE(drop, drop_row, f->dropout > 0 ? BR : 0)
    if (backward) {
        CARVE(vt, RIGHT, blocks * BC * N(terms)(f->dv_size) + VL)
        CARVE(kr, RIGHT, N(terms)(f->tk) * dp)
        CARVE(dy, LEFT, BR * N(left_ld)(f->dv_size))
        CARVE(y, LEFT, BR * N(left_ld)(f->dv_size))
        CARVE(dp, T, BR * BC)
        CARVE(dk, T, f->tk * dp)
        CARVE(dv, T, f->tk * vp)
        CARVE(delta, T, BR)
        CARVE(p, T, BC)
    }
#if ATTN_PAIRS
    CARVE(left, LEFT, BR * BC)
    if (backward) {
        CARVE(q_right, RIGHT, N(terms)(BR) * dp)
        CARVE(dy_right, RIGHT, N(terms)(BR) * vp)
        CARVE(p_flip, RIGHT, N(terms)(BR) * BC)
        CARVE(ds_flip, RIGHT, N(terms)(BR) * BC)
    }
#else
    w->left = backward ? w->dp : w->s; /* the tiles serve as they are */
    w->p_flip = w->s, w->ds_flip = w->dp;
#endif
#undef CARVE
    return at;
}

static int64_t N(forward_work)(const om_attn_form *f) {
    N(work) w = {0};
    return N(carve)(f, false, NULL, &w);
}

static int64_t N(backward_work)(const om_attn_form *f) {
    N(work) w = {0};
    return N(carve)(f, true, NULL, &w);
}

/* Union of what queries [i0, i0 + n) may see, as tile bounds. */
static void N(range)(const om_attn_job *j, int64_t b, int64_t i0, int64_t n, int64_t *from, int64_t *to) {
    int64_t lo0, hi0, lo1, hi1; /* both bounds grow with i */
    visible(j, b, i0, &lo0, &hi0);
    visible(j, b, i0 + n - 1, &lo1, &hi1);
    *from = (lo0 < 0 ? 0 : lo0) / BC * BC;
    *to = hi1;
}

ATTN_TARGET static void N(forward)(const om_attn_job *j, int64_t task, void *memory) {
    N(work) w;
    N(carve)(j->f, false, memory, &w);
    int64_t chunk = task % j->f->chunks, head = task / j->f->chunks, b = head / j->f->hq, h = head % j->f->hq,
            kv = h / (j->f->hq / j->f->hk);
    int64_t q_at = head_at(&j->q, &j->q, b, h), k_at = head_at(&j->k, &j->q, b, kv),
            v_at = head_at(&j->v, &j->q, b, kv);
    int64_t y_at = head_at(&j->y, &j->q, b, h), m_at = j->mask.dtype ? head_at(&j->mask, &j->q, b, h) : 0;
    int64_t first = chunk * j->f->chunk_rows,
            last = first + j->f->chunk_rows < j->f->tq ? first + j->f->chunk_rows : j->f->tq,
            vp = N(pad)(j->f->dv_size);
    if (first >= last) return;
    ATTN_BEGIN();
    T scale = (T)j->f->scale, keep_scale = (T)om_dropout_scale(j->f->dropout);
    uint32_t keep_below = om_philox_keep_below(j->f->dropout);
    bool drop = j->f->dropout > 0;
    int64_t from, to, ldv = 0;
    N(range)(j, b, first, last - first, &from, &to);
    N(rows_ahead)(&j->q, q_at, first, BR);
    for (int64_t j0 = from; j0 < to; j0 += BC) {
        N(rows_ahead)(&j->k, k_at, j0 + BC, BC);
        N(cols_in)(&j->k, k_at, j0, to - j0 < BC ? to - j0 : BC, w.kt + j0 * N(terms)(j->f->d));
    }
    const RIGHT *v = to > from ? N(right_in)(&j->v, v_at, from, to - from, w.vr, &ldv) : NULL;
    int64_t v_from = from;
    T *lse = (T *)j->lse.data + head * j->f->tq;

    for (int64_t i0 = first; i0 < last; i0 += BR) {
        int64_t n = last - i0 < BR ? last - i0 : BR, ldq, ldm = 0;
        const LEFT *q = N(left_in)(&j->q, q_at, i0, n, w.q, &ldq);
        N(rows_ahead)(&j->q, q_at, i0 + BR, last - i0 - BR < BR ? last - i0 - BR : BR);
        for (int64_t i = 0; i < BR; i++) w.m[i] = w.top[i] = -(T)INFINITY, w.l[i] = 0;
        memset(w.out, 0, (size_t)(n * vp) * sizeof(T));
        for (int64_t i = 0; drop && i < n; i++) w.drop[i].block = UINT64_MAX;
        N(range)(j, b, i0, n, &from, &to);
        for (int64_t j0 = from; j0 < to; j0 += BC) {
            int64_t c = j->f->tk - j0 < BC ? j->f->tk - j0 : BC;
            if (j0 + c > to) c = to - j0;
            int tile = N(mask_tile)(j, m_at, i0, n, j0, c, w.mask, &ldm);
            if (tile == TILE_HIDDEN) continue;
            N(product)(n, N(pad)(c), j->f->d, q, ldq, w.kt + j0 * N(terms)(j->f->d), BC, w.s, BC, false);
            for (int64_t i = 0; i < n; i++) {
                int64_t lo, hi;
                visible(j, b, i0 + i, &lo, &hi);
                lo -= j0, hi -= j0;
                T top = N(row_scores)(w.s + i * BC, c, scale, tile == TILE_MASKED ? w.mask + i * ldm : NULL, lo,
                                      hi > c ? c : hi);
                w.top[i] = w.m[i] > top ? w.m[i] : top;
            }
            /* e^(m - m'): 0 for the first tile, where m = -inf; NaN while m' is -inf, unused */
            for (int64_t i = 0; i < n; i += VL) {
                V top = N(vload)(w.top + i);
                N(vstore)(w.fade + i, N(vexp)(N(vload)(w.m + i) - top));
                N(vstore)(w.m + i, top);
            }
            for (int64_t i = 0; i < n; i++) {
                T *s = w.s + i * BC, *o = w.out + i * vp, m = w.m[i], fade = w.fade[i];
                LEFT *left = w.left + i * BC;
                if (m == -(T)INFINITY) { /* nothing visible so far; a NaN must still come through */
                    for (int64_t k = 0; k < c; k++) {
                        s[k] = s[k] != s[k] ? s[k] : 0;
                        w.l[i] += s[k];
                    }
                    for (int64_t k = 0; k < c; k += VL) N(left_put)(left + k, N(vload)(s + k));
                    continue;
                }
                V sum = {0};
                if (drop) drop_words(j, &w.drop[i], (uint64_t)((head * j->f->tq + i0 + i) * j->f->tk + j0), c, w.word);
                for (int64_t k = 0; k < c; k += VL) {
                    V p = N(vexp)(N(vload)(s + k) - m);
                    sum += p;
                    if (drop) p = N(pick)(N(keeps)(w.word + k, keep_below), p * keep_scale, (V){0});
                    N(left_put)(left + k, p);
                }
                w.l[i] = w.l[i] * fade + N(vsum)(sum);
                if (fade != 1)
                    for (int64_t k = 0; k < vp; k += VL) N(vstore)(o + k, N(vload)(o + k) * fade);
            }
            N(product)(n, vp, c, w.left, BC, v + N(terms)(j0 - v_from) * ldv, ldv, w.out, vp, true);
        }
        for (int64_t i = 0; i < n; i++) {
            T *o = w.out + i * vp, inv = w.l[i] != 0 ? 1 / w.l[i] : j->f->nan_rows ? (T)NAN : 0;
            for (int64_t k = 0; k < vp; k += VL) N(vstore)(o + k, N(vload)(o + k) * inv);
            lse[i0 + i] = w.l[i] == 0 ? -(T)INFINITY : w.m[i] + (T)log((double)w.l[i]);
        }
        N(rows_out)(&j->y, y_at, i0, n, w.out, vp);
    }
    ATTN_END();
}

/* --- backward --------------------------------------------------------------------------------------------- */

/* m and 1 / l of the queries whose lse is too large in magnitude to hold log l. */
static void N(stats)(const om_attn_job *j, N(work) * w, int64_t b, int64_t m_at, int64_t i0, int64_t n, int64_t from,
                     int64_t to, const LEFT *q, int64_t ldq) {
    T m[BR], l[BR];
    int64_t ldm = 0;
    for (int64_t i = 0; i < n; i++) m[i] = -(T)INFINITY, l[i] = 0;
    for (int64_t j0 = from; j0 < to; j0 += BC) {
        int64_t c = to - j0 < BC ? to - j0 : BC;
        int tile = N(mask_tile)(j, m_at, i0, n, j0, c, w->mask, &ldm);
        if (tile == TILE_HIDDEN) continue;
        N(product)(n, N(pad)(c), j->f->d, q, ldq, w->kt + j0 * N(terms)(j->f->d), BC, w->s, BC, false);
        for (int64_t i = 0; i < n; i++) {
            T *s = w->s + i * BC;
            int64_t lo, hi;
            visible(j, b, i0 + i, &lo, &hi);
            T top = N(row_scores)(s, c, (T)j->f->scale, tile == TILE_MASKED ? w->mask + i * ldm : NULL, lo - j0,
                                  hi - j0 > c ? c : hi - j0);
            T max = m[i] > top ? m[i] : top;
            if (max == -(T)INFINITY) continue;
            V sum = {0};
            for (int64_t k = 0; k < c; k += VL) sum += N(vexp)(N(vload)(s + k) - max);
            l[i] = l[i] * (m[i] == max ? 1 : (T)exp((double)(m[i] - max))) + N(vsum)(sum);
            m[i] = max;
        }
    }
    for (int64_t i = 0; i < n; i++)
        if (w->l[i] < 0) w->m[i] = m[i], w->l[i] = 1 / l[i];
}

/* dmask += one row of dS; an axis the mask does not have is summed: columns here, rows first over the tile (column). */
static void N(dmask_row)(T *dst, T *column, int64_t col, T *ds, int64_t c) {
    if (column) {
        for (int64_t k = 0; k < c; k++) column[k] += ds[k];
    } else if (col == 0) {
        T sum = 0;
        for (int64_t k = 0; k < c; k++) sum += ds[k];
        *dst += sum;
    } else {
        for (int64_t k = 0; k < c; k++) dst[k * col] += ds[k];
    }
}

static void N(dmask_columns)(T *dst, int64_t col, const T *column, int64_t c) {
    T sum = 0;
    for (int64_t k = 0; k < c; k++)
        if (col) dst[k * col] += column[k];
        else sum += column[k];
    if (!col) *dst += sum;
}

static void N(backward_head)(const om_attn_job *j, const N(work) *mem, int64_t b, int64_t h, const RIGHT *kr,
                             int64_t ldk) {
    N(work) w = *mem;
    int64_t head = b * j->f->hq + h, dp = N(pad)(j->f->d), vp = N(pad)(j->f->dv_size);
    int64_t q_at = head_at(&j->q, &j->q, b, h), y_at = head_at(&j->y, &j->q, b, h),
            dy_at = head_at(&j->dy, &j->q, b, h), dq_at = head_at(&j->dq, &j->q, b, h);
    int64_t m_at = j->mask.dtype ? head_at(&j->mask, &j->q, b, h) : 0;
    T *dmask = j->dmask.dtype ? (T *)j->dmask.data + head_at(&j->dmask, &j->q, b, h) : NULL;
    int64_t dm_row = j->dmask.stride[j->q.rank - 2], dm_col = j->dmask.stride[j->q.rank - 1];
    int64_t f_at = j->frozen.dtype ? head_at(&j->frozen, &j->q, b, h) : 0, f_row = j->frozen.stride[j->q.rank - 2],
            f_col = j->frozen.stride[j->q.rank - 1];
    const T *lse = (const T *)j->lse.data + head * j->f->tq;
    T scale = (T)j->f->scale, keep_scale = (T)om_dropout_scale(j->f->dropout);
    uint32_t keep_below = om_philox_keep_below(j->f->dropout);
    bool drop = j->f->dropout > 0;
    T column[BC];
    for (int64_t i0 = 0; i0 < j->f->tq; i0 += BR) {
        int64_t n = j->f->tq - i0 < BR ? j->f->tq - i0 : BR, ldq, lddy, ldy, ldqr, lddyr, ldm = 0, from, to;
        const LEFT *q = N(left_in)(&j->q, q_at, i0, n, w.q, &ldq), *dy = N(left_in)(&j->dy, dy_at, i0, n, w.dy, &lddy);
        const LEFT *y = N(left_in)(&j->y, y_at, i0, n, w.y, &ldy);
        const RIGHT *q_right = N(right_again)(&j->q, q_at, i0, n, q, ldq, w.q_right, &ldqr);
        const RIGHT *dy_right = N(right_again)(&j->dy, dy_at, i0, n, dy, lddy, w.dy_right, &lddyr);
        N(rows_ahead)(&j->q, q_at, i0 + BR, BR), N(rows_ahead)(&j->dy, dy_at, i0 + BR, BR);
        N(rows_ahead)(&j->y, y_at, i0 + BR, BR);
        bool odd = false, blind = false; /* blind: some query saw nothing, and that is NaN */
        for (int64_t i = 0; i < n; i++) {
            V sum = {0};
            for (int64_t k = 0; k < vp; k += VL) sum += N(left_get)(dy + i * lddy + k) * N(left_get)(y + i * ldy + k);
            w.delta[i] = N(vsum)(sum);
            T x = lse[i0 + i];
            w.m[i] = x == -(T)INFINITY ? 0 : x;
            w.l[i] = x == -(T)INFINITY ? 0 : 1; /* from here on: what exp(x - m) is multiplied by */
            blind |= x == -(T)INFINITY && j->f->nan_rows;
            if ((x < -1000 || x > 1000) && x - x == 0) w.l[i] = -1, odd = true;
            if (drop) w.drop[i].block = UINT64_MAX;
        }
        memset(w.out, 0, (size_t)(n * dp) * sizeof(T));
        N(range)(j, b, i0, n, &from, &to);
        if (blind) from = 0, to = j->f->tk;
        /* the tile holds whole rows: softmax and D anew, without the rounding of lse and y */
        bool single = to - from <= BC;
        if (odd && !single) N(stats)(j, &w, b, m_at, i0, n, from, to, q, ldq);
        for (int64_t j0 = from; j0 < to; j0 += BC) {
            int64_t c = to - j0 < BC ? to - j0 : BC;
            int tile = N(mask_tile)(j, m_at, i0, n, j0, c, w.mask, &ldm);
            if (tile == TILE_HIDDEN && !blind) continue;
            if (tile == TILE_HIDDEN) tile = TILE_MASKED; /* the mask's tile is all -inf */
            N(product)(n, N(pad)(c), j->f->d, q, ldq, w.kt + j0 * N(terms)(j->f->d), BC, w.s, BC, false);
            N(product)(n, N(pad)(c), j->f->dv_size, dy, lddy, w.vt + j0 * N(terms)(j->f->dv_size), BC, w.dp, BC, false);
            if (dm_row == 0) memset(column, 0, sizeof column);
            for (int64_t i = 0; i < n; i++) {
                T *s = w.s + i * BC, *ds = w.dp + i * BC, m = w.m[i], l = w.l[i], delta = w.delta[i];
                if (l == 0) { /* saw nothing */
                    for (int64_t k = 0; k < BC; k++)
                        s[k] = blind ? (T)NAN : 0, ds[k] = blind && j->f->nan_rows == 1 ? (T)NAN : 0;
                    if (blind) goto scores;
                    continue;
                }
                int64_t lo, hi;
                visible(j, b, i0 + i, &lo, &hi);
                lo -= j0, hi -= j0;
                if (hi > c) hi = c;
                T top = N(row_scores)(s, c, scale, tile == TILE_MASKED ? w.mask + i * ldm : NULL, lo, hi);
                if (drop) drop_words(j, &w.drop[i], (uint64_t)((head * j->f->tq + i0 + i) * j->f->tk + j0), c, w.word);
                if (single) m = top, l = 1;
                for (int64_t k = c; k < N(pad)(c); k++) ds[k] = 0; /* from keys that nobody sees: may be NaN */
                V own = {0}, total = {0};
                for (int64_t k = 0; k < c; k += VL) {
                    V p = N(vexp)(N(vload)(s + k) - m) * l, g = N(vload)(ds + k), kept = p;
                    if (drop) {
                        V f = N(pick)(N(keeps)(w.word + k, keep_below), N(splat)(keep_scale), (V){0});
                        kept = p * f;
                        g *= f;
                    }
                    N(vstore)(s + k, kept);
                    N(vstore)(ds + k, single ? g : p * (g - delta));
                    if (single) {
                        total += p;
                        own += p * g;
                        if (drop) N(vstore)(w.p + k, p);
                    }
                }
                if (single) {
                    l = 1 / N(vsum)(total);
                    delta = N(vsum)(own) * l;
                    const T *all = drop ? w.p : s;
                    for (int64_t k = 0; k < c; k += VL) {
                        V p = N(vload)(all + k) * l;
                        N(vstore)(s + k, N(vload)(s + k) * l);
                        N(vstore)(ds + k, p * (N(vload)(ds + k) - delta));
                    }
                }
            scores:
                            if (dmask)
                                N(dmask_row)
                                (dmask + (i0 + i) * dm_row + j0 * dm_col, dm_row == 0 ? column : NULL, dm_col, ds, c);
                            if (j->frozen.dtype) {
                                const uint8_t *f = (const uint8_t *)j->frozen.data + f_at + (i0 + i) * f_row +
                                                   j0 * f_col;
                                for (int64_t k = 0; k < c; k++) ds[k] = f[k * f_col] ? 0 : ds[k];
                }
                for (int64_t k = 0; k < c; k += VL) N(vstore)(ds + k, N(vload)(ds + k) * scale);
            }
            if (dmask && dm_row == 0) N(dmask_columns)(dmask + j0 * dm_col, dm_col, column, c);
            N(tiles_turn)(n, c, w.s, w.dp, w.p_flip, w.ds_flip, w.left);
            N(product_flip)(c, vp, n, w.p_flip, BC, dy_right, lddyr, w.dv + j0 * vp, vp);
            N(product_flip)(c, dp, n, w.ds_flip, BC, q_right, ldqr, w.dk + j0 * dp, dp);
            N(product)(n, dp, c, w.left, BC, kr + N(terms)(j0) * ldk, ldk, w.out, dp, true);
        }
        N(rows_out)(&j->dq, dq_at, i0, n, w.out, dp);
    }
}

static void N(backward)(const om_attn_job *j, int64_t task, void *memory) {
    N(work) w;
    N(carve)(j->f, true, memory, &w);
    int64_t heads = j->f->hk / j->f->task_heads, b0 = task / heads * j->f->task_batch,
            h0 = task % heads * j->f->task_heads,
            group = j->f->hq / j->f->hk;
    int64_t dp = N(pad)(j->f->d), vp = N(pad)(j->f->dv_size), ldk;
    ATTN_BEGIN();
    for (int64_t b = b0; b < b0 + j->f->task_batch; b++)
        for (int64_t kv = h0; kv < h0 + j->f->task_heads; kv++) {
            int64_t k_at = head_at(&j->k, &j->q, b, kv), v_at = head_at(&j->v, &j->q, b, kv);
            for (int64_t j0 = 0; j0 < j->f->tk; j0 += BC) {
                int64_t c = j->f->tk - j0 < BC ? j->f->tk - j0 : BC;
                N(rows_ahead)(&j->k, k_at, j0 + BC, BC), N(rows_ahead)(&j->v, v_at, j0 + BC, BC);
                N(cols_in)(&j->k, k_at, j0, c, w.kt + j0 * N(terms)(j->f->d));
                N(cols_in)(&j->v, v_at, j0, c, w.vt + j0 * N(terms)(j->f->dv_size));
            }
            const RIGHT *kr = N(right_in)(&j->k, k_at, 0, j->f->tk, w.kr, &ldk);
            memset(w.dk, 0, (size_t)(j->f->tk * dp) * sizeof(T));
            memset(w.dv, 0, (size_t)(j->f->tk * vp) * sizeof(T));
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) N(backward_head)(j, &w, b, h, kr, ldk);
            N(rows_out)(&j->dk, head_at(&j->dk, &j->q, b, kv), 0, j->f->tk, w.dk, dp);
            N(rows_out)(&j->dv, head_at(&j->dv, &j->q, b, kv), 0, j->f->tk, w.dv, vp);
        }
    ATTN_END();
}
