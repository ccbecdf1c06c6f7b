/* gemm_amx.k.c - the packed product of bf16 on AMX tiles (om_isa_tiles); empty for processors without AVX-512.
 *
 * Both operands are packed as the tiles they will be, 1 KiB each: of A 16 rows of 32 numbers along k, of B 16 pairs of
 * neighbours along k of 16 columns. A panel is two tiles wide, 32 rows or columns; its tiles lie in the order in which
 * the inner loop takes them, two for every 32 of k. What is missing at an end is zero.
 *
 *   inner loop    2 x 2 tiles of sums; for every 32 of k two tiles of A, two of B, four products
 *   packing       reads memory by rows, as it lies, and turns tiles round in L1: where a line from beyond L2 takes
 *                 hundreds of nanoseconds, only the processor's own prefetching keeps up, and it follows rows
 *   results       of large products go past the caches, a line at a time
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
#if OM_VBYTES == 64
#include <immintrin.h>
#endif

/* A panel of B and one of A (each KC x 32, 16 KiB) and their sums (4 KiB) share L1, the slice of A's panels of a GROUP
 * and the block of B, with its sums, L2. Measured on Granite Rapids (48 KiB, 2 MiB), weights not in the caches: KC 512
 * takes a fifth more time, 128 columns a tenth, 256 as much as these. */
enum { TILE = 16, STEP = 32, MR = 2 * TILE, NR = 2 * TILE, COLS = 6 * NR, KC = 256, GROUP = 16, SIZE = TILE * STEP };
enum { SUMS = TILE * TILE, PANEL = MR * NR }; /* floats of a tile, and of the four that are summed together */

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

enum { STAGE = 32 }; /* tiles that are read before they are turned round */

/* Tile `s` along k of lanes 16 i and on; panels of 32 lanes are `size` numbers apart. */
static inline uint16_t *tile_at(uint16_t *dst, int64_t size, int64_t i, int64_t s) {
    return dst + i / 2 * size + (2 * s + i % 2) * SIZE;
}

#if OM_VBYTES == 64
/* Lanes 16 half and on of two rows along k -> 16 pairs. */
static inline __m512i interleave(__m512i lo, __m512i hi, int half) {
    static const _Alignas(64) uint16_t at[2][32] = {{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
                                                    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                                     24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    return _mm512_permutex2var_epi16(lo, _mm512_load_si512(at[half]), hi);
}

static inline __m512i lanes_of(const uint16_t *p, bool two) { /* 32 lanes, or 16 */
    return two ? _mm512_loadu_si512(p) : _mm512_castsi256_si512(_mm256_loadu_si256((const void *)p));
}
static __attribute__((noinline)) void turn_tile(uint16_t *dst, const uint16_t *src) {
    V r[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) memcpy(&r[i], src + i * STEP, sizeof r[i]);
    transpose_f32(r);
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) memcpy(dst + i * STEP, &r[i], sizeof r[i]);
}

/* Whole tiles: `down` of 16 lanes, `along` of 32 numbers. Memory is read by rows, as it lies. */
static void pack_tiles(uint16_t *dst, int64_t size, bool by_lane, const uint16_t *src, int64_t down, int64_t along,
                       int64_t ls, int64_t ks) {
    _Alignas(64) uint16_t stage[STAGE * SIZE];
    if (ks == 1) {
        for (int64_t i = 0; i < down; i++)
            for (int64_t s0 = 0; s0 < along; s0 += STAGE) {
                const int64_t n = along - s0 < STAGE ? along - s0 : STAGE;
                for (int r = 0; r < TILE; r++) {
                    const uint16_t *from = src + (i * TILE + r) * ls + s0 * STEP;
                    uint16_t *to = by_lane ? tile_at(dst, size, i, s0) : stage;
                    const int64_t next = by_lane ? 2 * SIZE : SIZE;
                    for (int64_t s = 0; s < n; s++)
                        _mm512_storeu_si512(to + s * next + r * STEP, _mm512_loadu_si512(from + s * STEP));
                }
                for (int64_t s = 0; s < n && !by_lane; s++) turn_tile(tile_at(dst, size, i, s0 + s), stage + s * SIZE);
            }
        return;
    }
    for (int64_t s = 0; s < along; s++)
        for (int64_t i0 = 0; i0 < down; i0 += STAGE) {
            const int64_t n = down - i0 < STAGE ? down - i0 : STAGE;
            for (int p = 0; p < TILE; p++) {
                const uint16_t *lo = src + (s * STEP + 2 * p) * ks + i0 * TILE, *hi = lo + ks;
                for (int64_t i = 0; i < n; i += 2) {
                    const bool two = i + 1 < n;
                    const __m512i x = lanes_of(lo + i * TILE, two), y = lanes_of(hi + i * TILE, two);
                    uint16_t *to = by_lane ? stage + i * SIZE : tile_at(dst, size, i0 + i, s);
                    _mm512_storeu_si512(to + p * STEP, interleave(x, y, 0));
                    if (two) _mm512_storeu_si512(to + SIZE + p * STEP, interleave(x, y, 1));
                }
            }
            for (int64_t i = 0; i < n && by_lane; i++) turn_tile(tile_at(dst, size, i0 + i, s), stage + i * SIZE);
        }
}
#endif

/* Panels of 32 lanes, `size` numbers apart. */
static void pack(uint16_t *dst, int64_t size, bool by_lane, const uint16_t *src, int64_t lanes, int64_t k, int64_t ls,
                 int64_t ks) {
    int64_t down = lanes / TILE, along = k / STEP;
#if OM_VBYTES == 64
    if (ls == 1 || ks == 1)
        pack_tiles(dst, size, by_lane, src, down, along, ls, ks);
    else
#endif
        down = along = 0;
    for (int64_t i = 0; i * TILE < lanes; i++)
        for (int64_t s = i < down ? along : 0; s * STEP < k; s++)
            pack_tile(tile_at(dst, size, i, s), by_lane, src + i * TILE * ls + s * STEP * ks, lanes - i * TILE,
                      k - s * STEP, ls, ks);
}

static void pack_a(const om_gemm_job *g, int64_t p0, int64_t p1) {
    const int64_t row0 = p0 * MR, row1 = p1 * MR < g->m ? p1 * MR : g->m, size = panel_size(g->k);
    pack((uint16_t *)g->pa + p0 * size, size, true, (const uint16_t *)g->a + row0 * g->rsa, row1 - row0, g->k, g->rsa,
         g->csa);
}

/* --- multiplication ------------------------------------------------------------------------------------ */

/* (16 or 32 rows) x (16 or 32 columns) of sums: four tiles, one behind the other; `add`: to what is there. Tiles 0 to 3
 * are C, by rows, 4 and 5 A, 6 and 7 B. */
AMX OM_INLINE void tiles_run(bool low, bool right, int64_t steps, const uint16_t *a, const uint16_t *b, float *c,
                             bool add) {
    const int64_t row = 64;
    if (add) {
        tile_load(0, c, row);
        if (right) tile_load(1, c + SUMS, row);
        if (low) tile_load(2, c + 2 * SUMS, row);
        if (low && right) tile_load(3, c + 3 * SUMS, row);
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
    tile_store(0, c, row);
    if (right) tile_store(1, c + SUMS, row);
    if (low) tile_store(2, c + 2 * SUMS, row);
    if (low && right) tile_store(3, c + 3 * SUMS, row);
}

AMX static __attribute__((noinline)) void tiles_full_amx(int64_t steps, const uint16_t *a, const uint16_t *b, float *c,
                                                         bool add) {
    tiles_run(true, true, steps, a, b, c, add);
}

AMX static void tiles_any(bool low, bool right, int64_t steps, const uint16_t *a, const uint16_t *b, float *c,
                          bool add) {
    if (low && right) tiles_full_amx(steps, a, b, c, add);
    else if (low) tiles_run(true, false, steps, a, b, c, add);
    else if (right) tiles_run(false, true, steps, a, b, c, add);
    else tiles_run(false, false, steps, a, b, c, add);
}

/* One row of a panel's sums (two tiles side by side) -> C, from element `at` on. */
OM_INLINE void store_row(const om_gemm_job *g, const float *from, const float *bias, int64_t at, int64_t width) {
    const float alpha = (float)g->alpha;
    float sum[NR];
    for (int j = 0; j < TILE; j++) sum[j] = from[j] * alpha, sum[j + TILE] = from[j + SUMS] * alpha;
    if (bias)
        for (int j = 0; j < NR; j++) sum[j] += bias[j];
    if (g->wide_c) {
        float *to = (float *)g->c + at;
        for (int64_t j = 0; j < width && j < NR; j++) to[j * g->csc] = sum[j] + (g->beta ? to[j * g->csc] : 0);
        return;
    }
    uint16_t *c = (uint16_t *)g->c + at;
    if (g->csc == 1 && width >= NR) {
        _Alignas(64) uint16_t line[NR];
        if (g->beta)
            for (int j = 0; j < NR; j++) sum[j] += om_bf16_to_f32(c[j]);
        for (int j = 0; j < NR; j++) line[j] = om_f32_to_bf16(sum[j]);
#if OM_VBYTES == 64
        if (g->past && (uintptr_t)c % sizeof line == 0) {
            _mm512_stream_si512((void *)c, _mm512_load_si512(line));
            return;
        }
#endif
        memcpy(c, line, sizeof line);
        return;
    }
    for (int64_t j = 0; j < width && j < NR; j++) {
        uint16_t *p = c + j * g->csc;
        *p = om_f32_to_bf16(sum[j] + (g->beta ? om_bf16_to_f32(*p) : 0));
    }
}

static __attribute__((noinline)) void store_rows_amx(const om_gemm_job *g, int64_t rows, const float *sums,
                                                     const float *bias, int64_t at, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
        store_row(g, sums + (i / TILE * 2 * TILE + i % TILE) * TILE, bias, at + i * g->rsc, width);
}

AMX static void block(const om_gemm_job *g, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t next,
                      void *work) {
    (void)next;
    const int64_t width = col1 - col0, size = panel_size(g->k);
    uint16_t *bp = work;
    /* sums that wait for the next slice: panels, as they are summed, side by side */
    float *wide = g->acc ? g->acc : (float *)(void *)(bp + KC * COLS), bias[COLS];
    const int64_t across = (g->acc ? g->ld_acc : COLS) / NR, first = g->acc ? row0 / MR * across + col0 / NR : 0;
    _Alignas(64) float near[PANEL]; /* sums that need not wait */
    if (g->bias) om_gemm_bias(g, col0, width, COLS, bias);
    const int64_t slices = (g->k + KC - 1) / KC, /* alike, for sums go through memory once for each */
        most = slices ? ((g->k + STEP - 1) / STEP + slices - 1) / slices * STEP : KC;
    tiles_begin();
    int64_t k0 = 0;
    do { /* at least once: k = 0 still writes C */
        const int64_t kc = g->k - k0 < most ? g->k - k0 : most;
        const bool add = k0 > 0 || g->more_before, last = k0 + kc >= g->k && !g->more_after;
        pack(bp, KC * NR, false, (const uint16_t *)g->b + k0 * g->rsb + col0 * g->csb, width, kc, g->csb, g->rsb);
        for (int64_t i0 = row0; i0 < row1; i0 += GROUP * MR)
            for (int64_t j = 0; j < width; j += NR)
                for (int64_t i = i0; i < row1 && i < i0 + GROUP * MR; i += MR) {
                    float *sums = !add && last ? near : wide + (first + (i - row0) / MR * across + j / NR) * PANEL;
                    tiles_any(row1 - i > TILE, width - j > TILE, (kc + STEP - 1) / STEP,
                              (const uint16_t *)g->pa + i / MR * size + k0 * MR, bp + j * KC, sums, add);
                    if (last)
                        store_rows_amx(g, row1 - i < MR ? row1 - i : MR, sums, g->bias ? bias + j : NULL,
                                       i * g->rsc + (col0 + j) * g->csc, width - j);
                }
        k0 += kc;
    } while (k0 < g->k);
    tiles_end();
#if OM_VBYTES == 64
    if (g->past) _mm_sfence();
#endif
}

const om_gemm_type OM_ISA_NAME(om_gemm_amx) = {
    .mr = MR, .cols = COLS, .kc = KC, .elem = 2, .slack = SLACK, .even = true, .pack_a = pack_a, .block = block};
#else
const om_gemm_type OM_ISA_NAME(om_gemm_amx) = {0};
#endif
