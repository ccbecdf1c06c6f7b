/* attention_pairs.h - operands of attention's products as pairs of bf16 for VDPBF16PS (attention_wide.h says what is
 * asked of them): a LEFT row is bf16 as it stands in memory, two neighbours are broadcast together; a RIGHT has a word
 * for each two terms. The tensors' own numbers are copied, P and dS rounded once; sums, and all between the products,
 * are fp32. Of an odd number of terms the last is multiplied alone: what lies behind it may be NaN. */
#define LEFT uint16_t
#define RIGHT uint32_t
#define ATTN_TARGET __attribute__((target("avx512bf16")))

static inline int64_t N(terms)(int64_t k) { return (k + 1) / 2; }
static inline int64_t N(left_ld)(int64_t w) { return (w + 2 * VL - 1) / (2 * VL) * (2 * VL); }

/* e^x for x <= 0 (and a little above): 0 below -104, NaN stays NaN. Relative error below 2e-7 where the result counts
 * beside one bf16. */
OM_INLINE V N(vexp)(V v) {
    const __m512 x = _mm512_max_ps(_mm512_set1_ps(-200), (__m512)v); /* NaN: the second */
    const __m512 n = _mm512_roundscale_ps(x * _mm512_set1_ps(1.44269504f), _MM_FROUND_TO_NEAREST_INT);
    const __m512 f = x - n * _mm512_set1_ps(0.693147182f);
    __m512 p = f * _mm512_set1_ps(0.008312501f) + _mm512_set1_ps(0.04189033f);
    p = p * f + _mm512_set1_ps(0.16667116f);
    p = p * f + _mm512_set1_ps(0.4999923f);
    p = p * f + _mm512_set1_ps(1);
    p = p * f + _mm512_set1_ps(1);
    return (V)_mm512_scalef_ps(p, n);
}

OM_INLINE float N(row_top)(V top) { return _mm512_reduce_max_ps((__m512)top); }

/* --- small products ---------------------------------------------------------------------------------- */

enum { PAIRS_MR = 8 }; /* x 2 vectors: 16 sums, so that two instructions a cycle need not wait for each other */

OM_INLINE __m512i pair_of(const void *p, int64_t i) { /* word i of p, in every lane */
    uint32_t x;
    memcpy(&x, (const char *)p + i * 4, sizeof x);
    return _mm512_set1_epi32((int)x);
}

/* c (mr, nv * VL) = or += a b; a as words: element (i, k) at i * ars + k * acs. mr, nv and one stride are constants. */
ATTN_TARGET OM_INLINE void product_tile(int mr, int nv, int64_t kc, const void *a, int64_t ars, int64_t acs,
                                        const uint32_t *b, int64_t ldb, float *c, int64_t ldc, bool add) {
    __m512 acc[PAIRS_MR][2];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) acc[i][v] = add ? _mm512_loadu_ps(c + i * ldc + v * VL) : _mm512_setzero_ps();
#define STEP(LAST)                                                                                  \
    {                                                                                               \
        __m512i bv[2];                                                                              \
        _Pragma("GCC unroll 2") for (int v = 0; v < nv; v++) bv[v] = LAST(_mm512_loadu_si512(b + v * VL)); \
        _Pragma("GCC unroll 8") for (int i = 0; i < mr; i++) {                                      \
            const __m512i x = LAST(pair_of(a, i * ars));                                            \
            _Pragma("GCC unroll 2") for (int v = 0; v < nv; v++)                                    \
                acc[i][v] = _mm512_dpbf16_ps(acc[i][v], (__m512bh)x, (__m512bh)bv[v]);              \
        }                                                                                           \
    }
#define BOTH(x) x
#define FIRST(x) _mm512_and_si512(x, _mm512_set1_epi32(0xffff))
    for (int64_t p = 0; p < kc / 2; p++, a = (const char *)a + acs * 4, b += ldb) STEP(BOTH)
    if (kc & 1) STEP(FIRST)
#undef STEP
#undef BOTH
#undef FIRST
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) _mm512_storeu_ps(c + i * ldc + v * VL, acc[i][v]);
}

#define ROWS(x)                                                                                     \
    case x:                                                                                         \
        if (wide) product_tile(x, 2, kc, a, ars, acs, b, ldb, c, ldc, add);                         \
        else product_tile(x, 1, kc, a, ars, acs, b, ldb, c, ldc, add);                              \
        break;
ATTN_TARGET OM_INLINE void product_rows(int64_t mr, bool wide, int64_t kc, const void *a, int64_t ars, int64_t acs,
                                        const uint32_t *b, int64_t ldb, float *c, int64_t ldc, bool add) {
    switch (mr) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
    default: break;
    }
}
#undef ROWS

#if ATTN_TILES
#define PAIRS(name) name##_pairs
#else
#define PAIRS(name) N(name)
#endif

ATTN_TARGET static __attribute__((noinline)) void PAIRS(product)(int64_t m, int64_t n, int64_t kc, const uint16_t *a,
                                                                 int64_t lda, const uint32_t *b, int64_t ldb, float *c,
                                                                 int64_t ldc, bool add) {
    for (int64_t j = 0; j < n; j += 2 * VL)
        for (int64_t i = 0; i < m; i += PAIRS_MR)
            product_rows(m - i < PAIRS_MR ? m - i : PAIRS_MR, n - j > VL, kc, a + i * lda, lda / 2, 1, b + j, ldb,
                         c + i * ldc + j, ldc, add);
}

ATTN_TARGET static __attribute__((noinline)) void PAIRS(product_flip)(int64_t m, int64_t n, int64_t kc,
                                                                      const uint32_t *a, int64_t lda,
                                                                      const uint32_t *b, int64_t ldb, float *c,
                                                                      int64_t ldc) {
    for (int64_t j = 0; j < n; j += 2 * VL)
        for (int64_t i = 0; i < m; i += PAIRS_MR)
            product_rows(m - i < PAIRS_MR ? m - i : PAIRS_MR, n - j > VL, kc, a + i, 1, lda, b + j, ldb,
                         c + i * ldc + j, ldc, true);
}

#undef PAIRS

#if ATTN_TILES
#include "cpu/kernels/attention_tiles.h"
#define ATTN_BEGIN() tiles_begin()
#define ATTN_END() tiles_end()
#else
#define ATTN_BEGIN()
#define ATTN_END()
#endif

/* --- operands ------------------------------------------------------------------------------------------- */

static const uint16_t *N(left_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, uint16_t *buf, int64_t *ld) {
    const int r = x->rank;
    const int64_t w = x->dim[r - 1], rs = x->stride[r - 2], es = x->stride[r - 1];
    const uint16_t *src = elem(x, at + t0 * rs);
    *ld = N(left_ld)(w);
    for (int64_t i = 0; i < n; i++, src += rs)
        for (int64_t k = 0; k < *ld; k += 2 * VL) {
            uint16_t *d = buf + i * *ld + k;
            if (es == 1) _mm512_storeu_si512(d, _mm512_maskz_loadu_epi16(first32(w - k), src + k));
            else
                for (int64_t e = 0; e < 2 * VL; e++) d[e] = k + e < w ? src[(k + e) * es] : 0;
        }
    return buf;
}

static const uint32_t *N(right_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, uint32_t *buf, int64_t *ld) {
    const int r = x->rank;
    const int64_t w = x->dim[r - 1], rs = x->stride[r - 2], es = x->stride[r - 1];
    const uint16_t *src = elem(x, at + t0 * rs);
    *ld = N(pad)(w);
    if (es == 1) pack_lanes(buf, 0, (int)*ld, src, w, n, rs);
    else pack_panel(buf, (int)*ld, src, w, n, es, rs);
    return buf;
}

static const uint32_t *N(right_again)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, const uint16_t *left,
                                      int64_t ldl, uint32_t *buf, int64_t *ld) {
    (void)at, (void)t0;
    const int64_t w = x->dim[x->rank - 1];
    *ld = N(pad)(w);
    pack_lanes(buf, 0, (int)*ld, left, w, n, ldl);
    return buf;
}

static void N(cols_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, uint32_t *dst) {
    const int r = x->rank;
    const int64_t rs = x->stride[r - 2];
    pack_panel(dst, BC, elem(x, at + t0 * rs), n, x->dim[r - 1], rs, x->stride[r - 1]);
}

OM_INLINE V N(left_get)(const uint16_t *p) { return N(vget)(p, 0, OM_BF16); }

ATTN_TARGET OM_INLINE void N(left_put)(uint16_t *p, V v) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

/* words (terms(n), BC) of the tile s, pairs along its rows */
ATTN_TARGET OM_INLINE void turn(int64_t n, int64_t c, const float *s, uint32_t *words) {
    const __m512i mix = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t i = 0; i < n; i += 2)
        for (int64_t k = 0; k < c; k += VL) {
            const __m512 x = _mm512_loadu_ps(s + i * BC + k),
                         y = i + 1 < n ? _mm512_loadu_ps(s + (i + 1) * BC + k) : _mm512_setzero_ps();
            _mm512_storeu_si512(words + i / 2 * BC + k,
                                _mm512_permutexvar_epi16(mix, (__m512i)_mm512_cvtne2ps_pbh(y, x)));
        }
}

ATTN_TARGET static __attribute__((noinline)) void N(tiles_turn)(int64_t n, int64_t c, const float *p, const float *ds,
                                                                uint32_t *p_flip, uint32_t *ds_flip, uint16_t *left) {
    turn(n, c, p, p_flip);
    turn(n, c, ds, ds_flip);
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < c; k += VL) N(left_put)(left + i * BC + k, N(vload)(ds + i * BC + k));
}

static void N(rows_out)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, const float *src, int64_t ld) {
    const int r = x->rank;
    const int64_t w = x->dim[r - 1], rs = x->stride[r - 2], es = x->stride[r - 1];
    uint16_t *dst = (uint16_t *)elem(x, at + t0 * rs);
    for (int64_t i = 0; i < n; i++, src += ld, dst += rs)
        if (es == 1)
            for (int64_t k = 0; k < w; k += VL)
                _mm256_mask_storeu_epi16(dst + k, first(w - k), narrow(_mm512_loadu_ps(src + k)));
        else
            for (int64_t k = 0; k < w; k++) dst[k * es] = om_f32_to_bf16(src[k]);
}
