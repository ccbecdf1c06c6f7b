/* amx.h - eight tiles of 16 rows of 64 bytes, and what the bf16 product does with them.
 *
 *   tiles_begin()               all eight configured: 16 rows, 64 bytes each
 *   tile_zero(t)
 *   tile_load(t, from, step)    rows lie `step` bytes apart
 *   tile_dpbf16(c, a, b)        c (16 x 16 floats) += a (16 rows of 16 pairs) * b (16 pairs of 16 columns); TDPBF16PS
 *   tile_store(t, to, step)
 *   tiles_end()                 as they were before: nothing that a thread, its system or a signal must keep
 *
 * t, c, a and b are numbers the compiler sees. Tiles are nobody's across a call (System V ABI), so a function that has
 * begun calls none that might use them. They need the system's permission: om_isa_tiles.
 *
 * Two implementations: the processor's, for AVX-512 builds; with -DOM_AMX_EMULATED plain C with the bits that Intel's
 * manual describes, for tests on machines without AMX (build/amx.so, tests/ops/test_matmul_amx.py). A NaN's bits aside:
 * the manual leaves open which of several goes on.
 */
#ifndef OM_AMX_H
#define OM_AMX_H

#include <stdint.h>

typedef struct tile_config { /* what ldtilecfg reads */
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "ldtilecfg reads 64 bytes");

static const tile_config tile_eight = {.palette = 1,
                                       .colsb = {64, 64, 64, 64, 64, 64, 64, 64},
                                       .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

#if defined(OM_AMX_EMULATED)
#define OM_AMX 1
#define AMX

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

static _Thread_local struct {
    tile_config cfg;
    uint8_t row[8][16][64];
} tiles;

static inline void tile_known(int t) { /* the processor would raise #UD */
    assert(tiles.cfg.palette == 1 && t >= 0 && t < 8 && tiles.cfg.rows[t] && tiles.cfg.colsb[t]);
}

static void tiles_begin(void) {
    memset(&tiles, 0, sizeof tiles);
    tiles.cfg = tile_eight;
}
static void tiles_end(void) { memset(&tiles, 0, sizeof tiles); }

static void tile_zero(int t) {
    tile_known(t);
    memset(tiles.row[t], 0, sizeof tiles.row[t]);
}

static void tile_load(int t, const void *from, int64_t step) {
    tile_zero(t); /* what lies past its rows and columns */
    for (int r = 0; r < tiles.cfg.rows[t]; r++)
        memcpy(tiles.row[t][r], (const char *)from + r * step, tiles.cfg.colsb[t]);
}

static void tile_store(int t, void *to, int64_t step) {
    tile_known(t);
    for (int r = 0; r < tiles.cfg.rows[t]; r++) memcpy((char *)to + r * step, tiles.row[t][r], tiles.cfg.colsb[t]);
}

static inline float tile_daz(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

/* a * b + c, rounded once to nearest even. Subnormal numbers count as zeros, as operands and as a result; a result is
 * subnormal when it is below FLT_MIN rounded as if exponents had no end (x86's rule), which fmaf alone does not say of
 * FLT_MIN. */
static float tile_fma(float a, float b, float c) {
    a = tile_daz(a), b = tile_daz(b), c = tile_daz(c);
    const float x = fmaf(a, b, c);
    if (fabsf(x) != FLT_MIN) return tile_daz(x);
    const bool left = fabsf(a) < fabsf(b); /* the smaller one times 2^64 is finite, as c's is here */
    const float wide = fmaf(left ? a * 0x1p64f : a, left ? b : b * 0x1p64f, c * 0x1p64f);
    return fabsf(wide) < FLT_MIN * 0x1p64f ? copysignf(0, x) : x;
}

static inline float tile_pair(int t, int r, int i, int half) { /* a bf16 of pair i of a row */
    uint16_t h;
    memcpy(&h, tiles.row[t][r] + 4 * i + 2 * half, sizeof h);
    const uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static void tile_dpbf16(int c, int a, int b) {
    const tile_config *g = &tiles.cfg;
    tile_known(a), tile_known(b), tile_known(c);
    assert(c != a && c != b && a != b && g->rows[c] == g->rows[a] && g->colsb[c] == g->colsb[b] &&
           g->colsb[a] / 4 == g->rows[b]);
    const int cols = g->colsb[c] / 4;
    for (int m = 0; m < g->rows[c]; m++) {
        float even[16] = {0}, odd[16] = {0}, sum[16];
        for (int k = 0; k < g->colsb[a] / 4; k++) {
            const float a0 = tile_pair(a, m, k, 0), a1 = tile_pair(a, m, k, 1);
            for (int n = 0; n < cols; n++) {
                even[n] = tile_fma(a0, tile_pair(b, k, n, 0), even[n]);
                odd[n] = tile_fma(a1, tile_pair(b, k, n, 1), odd[n]);
            }
        }
        memcpy(sum, tiles.row[c][m], sizeof sum);
        for (int n = 0; n < cols; n++) sum[n] = tile_fma(1, tile_fma(1, even[n], odd[n]), sum[n]);
        memcpy(tiles.row[c][m], sum, sizeof sum);
    }
}

#elif defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 11)
#define OM_AMX 1
#define AMX __attribute__((target("amx-tile,amx-bf16")))

#include <immintrin.h>

/* gcc's tile instructions do not say that they read memory: stores must not move past them */
#define TILE_MEMORY() __asm__ volatile("" ::: "memory")

AMX static inline void tiles_begin(void) { _tile_loadconfig(&tile_eight); }
AMX static inline void tiles_end(void) { _tile_release(); }
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, step) do { TILE_MEMORY(); _tile_loadd(t, from, step); } while (0)
#define tile_store(t, to, step) do { _tile_stored(t, to, step); TILE_MEMORY(); } while (0)
#define tile_dpbf16(c, a, b) _tile_dpbf16ps(c, a, b)
#endif
#endif
