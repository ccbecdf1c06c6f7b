/* gemm_bf16.k.c - the packed product of bf16 for processors with AVX512_BF16 (om_isa_bf16); empty for all others.
 *
 * VDPBF16PS adds two products of bf16 to each float, so both operands are packed as pairs of neighbours along k: panels
 * of A as (k / 2, MR) pairs, each broadcast, panels of B as (k / 2, NR); an odd k ends with a zero. Otherwise as
 * gemm.k.c: any strides, slices of k in order, one chain of sums for each element however the work is divided.
 *
 * Sums stay in registers within a slice of KC; between slices they wait as floats: in `work`, or in the job's `acc`
 * where the product is cut along k. The last slice adds bias and C and rounds, once.
 * The instruction takes subnormal numbers for zeros and rounds both additions to nearest even.
 */
#include "cpu/gemm.h"

#if defined(__AVX512F__)
#include <immintrin.h>

#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/pairs.h"

#define BF16 __attribute__((target("avx512bf16")))
/* A tile of MR x NV vectors: 28 sums, so that two instructions a cycle never wait. GROUP panels of A and one block of B
 * lie in L2 together. */
enum { MR = 14, NV = 2, NR = NV * VL, COLS = 3 * NR, KC = 1024, GROUP = 16, PANELS = 8 };

/* --- packing ------------------------------------------------------------------------------------------- */

static void pack_a(const om_gemm_job *g, int64_t p0, int64_t p1) {
    const int64_t size = ((g->k * MR + 2 * VL + 15) & ~(int64_t)15) / 2;
    for (int64_t p = p0, n; p < p1; p += n) {
        const uint16_t *src = (const uint16_t *)g->a + p * MR * g->rsa;
        uint32_t *dst = (uint32_t *)g->pa + p * size;
        n = g->rsa != 1 ? 1 : p1 - p < PANELS ? p1 - p : PANELS;
        const int64_t left = g->m - p * MR, w = left < n * MR ? left : n * MR;
        if (g->rsa == 1) pack_lanes(dst, size, MR, src, w, g->k, g->csa);
        else pack_panel(dst, MR, src, w, g->k, g->rsa, g->csa);
    }
}

/* B[k0 : k0 + kc, col0 : col1] as panels of NR columns, pairs * NR apart */
static void pack_b(const om_gemm_job *g, uint32_t *dst, int64_t pairs, int64_t k0, int64_t kc, int64_t col0,
                   int64_t col1) {
    const uint16_t *src = (const uint16_t *)g->b + k0 * g->rsb + col0 * g->csb;
    if (g->csb == 1) {
        pack_lanes(dst, pairs * NR, NR, src, col1 - col0, kc, g->rsb);
        return;
    }
    for (int64_t c = col0; c < col1; c += NR, src += NR * g->csb, dst += pairs * NR)
        pack_panel(dst, NR, src, col1 - c < NR ? col1 - c : NR, kc, g->csb, g->rsb);
}

static void pack_blocks(const om_gemm_job *g, void *to, int64_t block0, int64_t block1) {
    const int64_t pairs = om_gemm_depth(g->k, KC) / 2;
    uint32_t *dst = (uint32_t *)to + block0 * om_gemm_block_size(g->k, KC, COLS) / 2;
    for (int64_t col = block0 * COLS; col < block1 * COLS && col < g->n; col += COLS)
        for (int64_t k0 = 0; k0 < g->k; k0 += KC, dst += pairs * COLS)
            pack_b(g, dst, pairs, k0, g->k - k0 < KC ? g->k - k0 : KC, col, g->n - col < COLS ? g->n : col + COLS);
}

/* --- multiplication ------------------------------------------------------------------------------------ */

typedef struct tile { /* where a register tile goes */
    float *wide;        /* sums of earlier slices, of later ones */
    int64_t ldw;
    bool add, last;     /* there were earlier slices; there is no later one: then the following */
    void *c;            /* bf16, or floats (`floats`) */
    bool floats;
    int64_t rs, cs, width;
    float alpha;
    bool beta;
    const float *bias;  /* NR numbers or NULL */
} tile;

OM_INLINE void tile_store(const tile *t, int i, int v, __m512 x) {
    float *wide = t->wide + i * t->ldw + v * VL;
    if (t->add) x += _mm512_loadu_ps(wide);
    if (!t->last) {
        _mm512_storeu_ps(wide, x);
        return;
    }
    x *= _mm512_set1_ps(t->alpha);
    if (t->bias) x += _mm512_loadu_ps(t->bias + v * VL);
    const int64_t at = i * t->rs + v * VL * t->cs, w = t->width - v * VL;
    const __mmask16 m = first(w);
    float *f = (float *)t->c + at;
    if (t->floats && t->cs == 1) {
        if (t->beta) x += _mm512_maskz_loadu_ps(m, f);
        _mm512_mask_storeu_ps(f, m, x);
        return;
    }
    uint16_t *c = (uint16_t *)t->c + at;
    if (t->cs == 1) {
        if (t->beta) x += widen(_mm256_maskz_loadu_epi16(m, c));
        _mm256_mask_storeu_epi16(c, m, narrow(x));
        return;
    }
    float tmp[VL];
    _mm512_storeu_ps(tmp, x);
    for (int64_t j = 0; j < w && j < VL; j++) {
        const int64_t p = j * t->cs;
        if (t->floats) f[p] = tmp[j] + (t->beta ? f[p] : 0);
        else c[p] = om_f32_to_bf16(tmp[j] + (t->beta ? om_bf16_to_f32(c[p]) : 0));
    }
}

static __attribute__((noinline)) void tile_put(const tile *t, int mr, int nv, const __m512 *sums) {
    for (int i = 0; i < mr; i++)
        for (int v = 0; v < nv; v++) tile_store(t, i, v, sums[i * NV + v]);
}

/* mr, nv and edge are constants at the call. edge: one tile_put for all of them; inlined into each of 28 sizes, stores
 * take the compiler minutes. */
BF16 OM_INLINE void tile_run(int mr, int nv, bool edge, int64_t pairs, const uint32_t *a, const uint32_t *b,
                             const tile *t) {
    __m512 acc[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) acc[i][v] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++, a += MR, b += NR) {
        __m512i bv[NV];
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) bv[v] = _mm512_loadu_si512(b + v * VL);
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) {
            const __m512i x = _mm512_set1_epi32((int)a[i]);
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], (__m512bh)x, (__m512bh)bv[v]);
        }
    }
    __m512 sums[MR * NV]; /* not `acc`, which has no address: it lies in registers */
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++)
            if (edge) sums[i * NV + v] = acc[i][v];
            else tile_store(t, i, v, acc[i][v]);
    if (edge) tile_put(t, mr, nv, sums);
}

#define ROWS(x)                                                                                     \
    case x:                                                                                         \
        if (nv == NV) tile_run(x, NV, true, pairs, a, b, t);                                        \
        else tile_run(x, 1, true, pairs, a, b, t);                                                  \
        break;
BF16 static void tile_any(int64_t mr, int nv, int64_t pairs, const uint32_t *a, const uint32_t *b, const tile *t) {
    switch (mr) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
        ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
    default: break;
    }
}
#undef ROWS

BF16 static __attribute__((noinline)) void tile_full_bf16(int64_t pairs, const uint32_t *a, const uint32_t *b,
                                                          const tile *t) {
    tile_run(MR, NV, false, pairs, a, b, t);
}

static void block(const om_gemm_job *g, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t next,
                  void *work) {
    (void)next;
    const int64_t size = ((g->k * MR + 2 * VL + 15) & ~(int64_t)15) / 2, width = col1 - col0;
    uint32_t *own = work;
    float *wide = g->acc ? g->acc + row0 * g->ld_acc + col0 : (float *)(own + KC / 2 * COLS), bias[COLS];
    if (g->bias) om_gemm_bias(g, col0, width, COLS, bias);
    const int64_t depth = g->pb ? om_gemm_depth(g->k, KC) / 2 : KC / 2; /* of a panel, in pairs */
    const uint32_t *bp = g->pb ? (const uint32_t *)g->pb + col0 / COLS * om_gemm_block_size(g->k, KC, COLS) / 2 : own;
    tile t = {.floats = g->wide_c, .ldw = g->acc ? g->ld_acc : COLS, .rs = g->rsc, .cs = g->csc,
              .alpha = (float)g->alpha, .beta = g->beta};
    int64_t k0 = 0;
    do { /* at least once: k = 0 still writes C */
        const int64_t kc = g->k - k0 < KC ? g->k - k0 : KC, pairs = (kc + 1) / 2;
        if (!g->pb) pack_b(g, own, depth, k0, kc, col0, col1);
        t.add = k0 > 0 || g->more_before;
        t.last = k0 + kc >= g->k && !g->more_after;
        for (int64_t i0 = row0; i0 < row1; i0 += GROUP * MR)
            for (int64_t j = 0; j < width; j += NR) {
                const int nv = width - j > VL ? NV : 1;
                const uint32_t *b = bp + j * depth;
                t.width = width - j;
                t.bias = g->bias ? bias + j : NULL;
                for (int64_t i = i0; i < row1 && i < i0 + GROUP * MR; i += MR) {
                    const uint32_t *a = (const uint32_t *)g->pa + i / MR * size + k0 / 2 * MR;
                    t.wide = wide + (i - row0) * t.ldw + j;
                    t.c = (char *)g->c + (i * g->rsc + (col0 + j) * g->csc) * (g->wide_c ? 4 : 2);
                    if (nv == NV && row1 - i >= MR) tile_full_bf16(pairs, a, b, &t);
                    else tile_any(row1 - i < MR ? row1 - i : MR, nv, pairs, a, b, &t);
                }
            }
        if (g->pb) bp += depth * COLS;
        k0 += kc;
    } while (k0 < g->k);
}

const om_gemm_type OM_ISA_NAME(om_gemm_bf16) = {.mr = MR, .cols = COLS, .kc = KC, .elem = 2, .slack = 2 * VL,
                                                .pack_a = pack_a, .block = block, .pack_b = pack_blocks};
#else
const om_gemm_type OM_ISA_NAME(om_gemm_bf16) = {0};
#endif
