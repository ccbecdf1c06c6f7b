/* gemm_amx.k.c - the packed product of bf16 on AMX tiles (om_isa_tiles); empty for processors without AVX-512.
 *
 * Both operands are packed as the tiles they will be, 1 KiB each: of A 16 rows of 32 numbers along k, of B 16 pairs of
 * neighbours along k of 16 columns. A panel is two tiles wide, 32 rows or columns; its tiles lie in the order in which
 * the inner loop takes them, two for every 32 of k. What is missing at an end is zero.
 *
 *   inner loop    2 x 2 tiles of sums; for every 32 of k two tiles of A, two of B, four products
 *
 * C's tiles go on from one slice of KC to the next, through `work` or the job's `acc`, as the floats they are, so an
 * element is one chain of sums over steps of 32, in order, whatever the slices, blocks and threads: the same bits.
 * The last slice multiplies by alpha, adds bias and C, and rounds, once.
 */
#include "cpu/gemm.h"

#include "cpu/kernels/amx.h"

#if defined(OM_AMX)
#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"

/* One panel of B (KC x 32) lies in L1 while the panels of A of a GROUP, which lie in L2 with the block of B, meet it.
 * Arithmetic of the sizes of Sapphire Rapids' caches (48 KiB, 2 MiB); not measured. */
enum { TILE = 16, STEP = 32, MR = 2 * TILE, NR = 2 * TILE, COLS = 4 * NR, KC = 512, GROUP = 16, SIZE = TILE * STEP };

/* --- packing ------------------------------------------------------------------------------------------- */

/* A panel of A: (round_up(k, STEP), MR) numbers, as om_gemm_panel_size has it with this slack. */
enum { SLACK = (STEP - 1) * MR };
static inline int64_t panel_size(int64_t k) { return k * MR + SLACK; }

/* One tile of 16 lanes and 16 pairs along k; `by_lane`: a row is a lane (A), else a pair (B). Neighbours along lanes
 * and along k are ls and ks apart, one of which is 1. */
OM_INLINE void pack_whole(uint32_t *dst, bool by_lane, const uint16_t *src, int64_t ls, int64_t ks) {
#if OM_VBYTES == 64
    V r[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) {
        if (ks == 1) {
            memcpy(&r[i], src + i * ls, sizeof r[i]);
        } else {
            hvec_f32 lo, hi;
            memcpy(&lo, src + 2 * i * ks, sizeof lo);
            memcpy(&hi, src + (2 * i + 1) * ks, sizeof hi);
            r[i] = (V)(__builtin_convertvector(lo, U) | __builtin_convertvector(hi, U) << 16);
        }
    }
    if ((ks == 1) != by_lane) transpose_f32(r);
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) memcpy(dst + i * TILE, &r[i], sizeof r[i]);
#else
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) {
            const uint16_t *s = src + (by_lane ? i * ls + 2 * j * ks : j * ls + 2 * i * ks);
            dst[i * TILE + j] = s[0] | (uint32_t)s[ks] << 16;
        }
#endif
}

static void pack_tile(uint16_t *dst, bool by_lane, const uint16_t *src, int64_t lanes, int64_t k, int64_t ls,
                      int64_t ks) {
    uint16_t whole[SIZE];
    if (lanes < TILE || k < STEP || (ls != 1 && ks != 1)) { /* first a tile with zeros around */
        const bool along_lanes = ls == 1 && ks != 1;
        if (lanes > TILE) lanes = TILE;
        if (k > STEP) k = STEP;
        memset(whole, 0, sizeof whole);
        if (along_lanes)
            for (int64_t i = 0; i < k; i++) memcpy(whole + i * TILE, src + i * ks, (size_t)lanes * sizeof *src);
        else
            for (int64_t i = 0; i < lanes; i++)
                for (int64_t j = 0; j < k; j++) whole[i * STEP + j] = src[i * ls + j * ks];
        src = whole, ls = along_lanes ? 1 : STEP, ks = along_lanes ? TILE : 1;
    }
    uint32_t *to = (uint32_t *)(void *)dst;
    if (ks == 1) pack_whole(to, by_lane, src, ls, 1);
    else pack_whole(to, by_lane, src, 1, ks);
}

/* Panels of 32 lanes, `size` numbers apart. Memory is read in the order in which it lies. */
static void pack(uint16_t *dst, int64_t size, bool by_lane, const uint16_t *src, int64_t lanes, int64_t k, int64_t ls,
                 int64_t ks) {
    const int64_t down = (lanes + TILE - 1) / TILE, along = (k + STEP - 1) / STEP;
    const bool lanes_first = ls == 1 && ks != 1;
    for (int64_t n = 0; n < down * along; n++) {
        const int64_t i = lanes_first ? n % down : n / along, s = lanes_first ? n / down : n % along;
        pack_tile(dst + i / 2 * size + (2 * s + i % 2) * SIZE, by_lane, src + i * TILE * ls + s * STEP * ks,
                  lanes - i * TILE, k - s * STEP, ls, ks);
    }
}

static void pack_a(const om_gemm_job *g, int64_t p0, int64_t p1) {
    const int64_t row0 = p0 * MR, row1 = p1 * MR < g->m ? p1 * MR : g->m, size = panel_size(g->k);
    pack((uint16_t *)g->pa + p0 * size, size, true, (const uint16_t *)g->a + row0 * g->rsa, row1 - row0, g->k, g->rsa,
         g->csa);
}

/* --- multiplication ------------------------------------------------------------------------------------ */

/* (16 or 32 rows) x (16 or 32 columns) of sums, ldc floats apart; `add`: to what is there. Tiles 0 to 3 are C, by rows,
 * 4 and 5 A, 6 and 7 B. */
AMX OM_INLINE void tiles_run(bool low, bool right, int64_t steps, const uint16_t *a, const uint16_t *b, float *c,
                             int64_t ldc, bool add) {
    const int64_t row = 64, next = ldc * (int64_t)sizeof *c;
    if (add) {
        tile_load(0, c, next);
        if (right) tile_load(1, c + TILE, next);
        if (low) tile_load(2, c + TILE * ldc, next);
        if (low && right) tile_load(3, c + TILE * ldc + TILE, next);
    } else {
        tile_zero(0);
        if (right) tile_zero(1);
        if (low) tile_zero(2);
        if (low && right) tile_zero(3);
    }
    for (; steps > 0; steps--, a += 2 * SIZE, b += 2 * SIZE) {
        tile_load(4, a, row);
        tile_load(6, b, row);
        tile_dpbf16(0, 4, 6);
        if (right) tile_load(7, b + SIZE, row);
        if (right) tile_dpbf16(1, 4, 7);
        if (low) tile_load(5, a + SIZE, row);
        if (low) tile_dpbf16(2, 5, 6);
        if (low && right) tile_dpbf16(3, 5, 7);
    }
    tile_store(0, c, next);
    if (right) tile_store(1, c + TILE, next);
    if (low) tile_store(2, c + TILE * ldc, next);
    if (low && right) tile_store(3, c + TILE * ldc + TILE, next);
}

AMX static __attribute__((noinline)) void tiles_full_amx(int64_t steps, const uint16_t *a, const uint16_t *b, float *c,
                                                         int64_t ldc, bool add) {
    tiles_run(true, true, steps, a, b, c, ldc, add);
}

AMX static void tiles_any(bool low, bool right, int64_t steps, const uint16_t *a, const uint16_t *b, float *c,
                          int64_t ldc, bool add) {
    if (low && right) tiles_full_amx(steps, a, b, c, ldc, add);
    else if (low) tiles_run(true, false, steps, a, b, c, ldc, add);
    else if (right) tiles_run(false, true, steps, a, b, c, ldc, add);
    else tiles_run(false, false, steps, a, b, c, ldc, add);
}

/* Sums of one row of a panel of columns -> C. */
OM_INLINE void store_row(const om_gemm_job *g, float *sum, const float *bias, uint16_t *c, int64_t width) {
    const float alpha = (float)g->alpha;
    for (int j = 0; j < NR; j++) sum[j] *= alpha;
    if (bias)
        for (int j = 0; j < NR; j++) sum[j] += bias[j];
    if (g->csc == 1 && width >= NR) {
        if (g->beta)
            for (int j = 0; j < NR; j++) sum[j] += om_bf16_to_f32(c[j]);
        for (int j = 0; j < NR; j++) c[j] = om_f32_to_bf16(sum[j]);
        return;
    }
    for (int64_t j = 0; j < width && j < NR; j++) {
        uint16_t *p = c + j * g->csc;
        *p = om_f32_to_bf16(sum[j] + (g->beta ? om_bf16_to_f32(*p) : 0));
    }
}

static __attribute__((noinline)) void store_rows_amx(const om_gemm_job *g, int64_t rows, float *sums, int64_t ld,
                                                     const float *bias, uint16_t *c, int64_t width) {
    for (int64_t i = 0; i < rows; i++) store_row(g, sums + i * ld, bias, c + i * g->rsc, width);
}

AMX static void block(const om_gemm_job *g, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t next,
                  void *work) {
    (void)next;
    const int64_t width = col1 - col0, size = panel_size(g->k);
    uint16_t *bp = work;
    float *wide = g->acc ? g->acc + row0 * g->ld_acc + col0 : (float *)(void *)(bp + KC * COLS), bias[COLS];
    const int64_t ld_wide = g->acc ? g->ld_acc : COLS;
    _Alignas(64) float near[MR * NR]; /* sums that need not wait */
    for (int64_t j = 0; g->bias && j < COLS; j++)
        bias[j] = om_bf16_to_f32(((const uint16_t *)g->bias)[col0 + (j < width ? j : 0)]);
    tiles_begin();
    int64_t k0 = 0;
    do { /* at least once: k = 0 still writes C */
        const int64_t kc = g->k - k0 < KC ? g->k - k0 : KC;
        const bool add = k0 > 0 || g->more_before, last = k0 + kc >= g->k && !g->more_after;
        pack(bp, KC * NR, false, (const uint16_t *)g->b + k0 * g->rsb + col0 * g->csb, width, kc, g->csb, g->rsb);
        for (int64_t i0 = row0; i0 < row1; i0 += GROUP * MR)
            for (int64_t j = 0; j < width; j += NR)
                for (int64_t i = i0; i < row1 && i < i0 + GROUP * MR; i += MR) {
                    const bool waits = add || !last;
                    float *sums = waits ? wide + (i - row0) * ld_wide + j : near;
                    const int64_t ld = waits ? ld_wide : NR;
                    tiles_any(row1 - i > TILE, width - j > TILE, (kc + STEP - 1) / STEP,
                              (const uint16_t *)g->pa + i / MR * size + k0 * MR, bp + j * KC, sums, ld, add);
                    if (last)
                        store_rows_amx(g, row1 - i < MR ? row1 - i : MR, sums, ld, g->bias ? bias + j : NULL,
                                       (uint16_t *)g->c + i * g->rsc + (col0 + j) * g->csc, width - j);
                }
        k0 += kc;
    } while (k0 < g->k);
    tiles_end();
}

const om_gemm_type OM_ISA_NAME(om_gemm_amx) = {.mr = MR, .cols = COLS, .kc = KC, .elem = 2, .slack = SLACK,
                                               .pack_a = pack_a, .block = block};
#else
const om_gemm_type OM_ISA_NAME(om_gemm_amx) = {0};
#endif
