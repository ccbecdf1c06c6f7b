/* attention_tiles.h - products of attention_pairs.h on AMX tiles: its operands are tiles as they stand. 16 rows of a
 * LEFT with 32 terms are one, 16 rows of words of a RIGHT with 16 columns another; P and dS as product_flip takes them
 * are turned round first. Rows, and terms, that do not fill a tile are left to the products of pairs. Of numbers below
 * 2^-126 tiles make zeros, as PyTorch's own products on AMX do.
 *
 * The tiles are configured from the beginning of a task to its end: nothing that is called in between uses them.
 */
#include "cpu/kernels/amx.h"

enum { TILE = 16, TERMS = 32 };

/* c (16 or 32 rows, 16 or 32 columns) = or += a b, `steps` times 32 terms. Tiles 0 to 3 are C, by rows, 4 and 5 A, 6
 * and 7 B. */
AMX OM_INLINE void tiles_run(bool low, bool right, int64_t steps, const uint16_t *a, int64_t lda, const uint32_t *b,
                             int64_t ldb, float *c, int64_t ldc, bool add) {
    const int64_t as = lda * (int64_t)sizeof *a, bs = ldb * (int64_t)sizeof *b, cs = ldc * (int64_t)sizeof *c;
    if (add) {
        tile_load(0, c, cs);
        if (right) tile_load(1, c + TILE, cs);
        if (low) tile_load(2, c + TILE * ldc, cs);
        if (low && right) tile_load(3, c + TILE * ldc + TILE, cs);
    } else {
        tile_zero(0);
        if (right) tile_zero(1);
        if (low) tile_zero(2);
        if (low && right) tile_zero(3);
    }
    for (; steps > 0; steps--, a += TERMS, b += TILE * ldb) {
        tile_load(4, a, as);
        tile_load(6, b, bs);
        tile_dpbf16(0, 4, 6);
        if (right) tile_load(7, b + TILE, bs);
        if (right) tile_dpbf16(1, 4, 7);
        if (low) tile_load(5, a + TILE * lda, as);
        if (low) tile_dpbf16(2, 5, 6);
        if (low && right) tile_dpbf16(3, 5, 7);
    }
    tile_store(0, c, cs);
    if (right) tile_store(1, c + TILE, cs);
    if (low) tile_store(2, c + TILE * ldc, cs);
    if (low && right) tile_store(3, c + TILE * ldc + TILE, cs);
}

/* m and n multiples of 16, kc of 32 */
AMX static __attribute__((noinline)) void product_tiles(int64_t m, int64_t n, int64_t kc, const uint16_t *a,
                                                        int64_t lda, const uint32_t *b, int64_t ldb, float *c,
                                                        int64_t ldc, bool add) {
    for (int64_t j = 0; j < n; j += 2 * TILE)
        for (int64_t i = 0; i < m; i += 2 * TILE) {
            const bool low = m - i > TILE, right = n - j > TILE;
            const uint16_t *ai = a + i * lda;
            float *at = c + i * ldc + j;
            if (low && right) tiles_run(true, true, kc / TERMS, ai, lda, b + j, ldb, at, ldc, add);
            else if (low) tiles_run(true, false, kc / TERMS, ai, lda, b + j, ldb, at, ldc, add);
            else if (right) tiles_run(false, true, kc / TERMS, ai, lda, b + j, ldb, at, ldc, add);
            else tiles_run(false, false, kc / TERMS, ai, lda, b + j, ldb, at, ldc, add);
        }
}

/* 16 words of each of 16 rows, `ld` apart -> 16 rows of 32 terms */
static void turn_words(const uint32_t *words, int64_t ld, uint16_t *rows) {
    V r[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) memcpy(&r[i], words + i * ld, sizeof r[i]);
    transpose_f32(r);
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) memcpy(rows + i * TERMS, &r[i], sizeof r[i]);
}

static void N(product)(int64_t m, int64_t n, int64_t kc, const uint16_t *a, int64_t lda, const uint32_t *b,
                       int64_t ldb, float *c, int64_t ldc, bool add) {
    const int64_t rows = m / TILE * TILE, terms = kc / TERMS * TERMS;
    if (!rows || !terms) {
        product_pairs(m, n, kc, a, lda, b, ldb, c, ldc, add);
        return;
    }
    product_tiles(rows, n, terms, a, lda, b, ldb, c, ldc, add);
    if (terms < kc) product_pairs(rows, n, kc - terms, a + terms, lda, b + terms / 2 * ldb, ldb, c, ldc, true);
    if (rows < m) product_pairs(m - rows, n, kc, a + rows * lda, lda, b, ldb, c + rows * ldc, ldc, add);
}

static void N(product_flip)(int64_t m, int64_t n, int64_t kc, const uint32_t *a, int64_t lda, const uint32_t *b,
                            int64_t ldb, float *c, int64_t ldc) {
    const int64_t rows = m / TILE * TILE, terms = kc / TERMS * TERMS;
    _Alignas(64) uint16_t left[BC * TERMS];
    for (int64_t k = 0; k < terms; k += TERMS) {
        for (int64_t i = 0; i < rows; i += TILE) turn_words(a + k / 2 * lda + i, lda, left + i * TERMS);
        product_tiles(rows, n, TERMS, left, TERMS, b + k / 2 * ldb, ldb, c, ldc, true);
    }
    if (terms < kc && rows)
        product_flip_pairs(rows, n, kc - terms, a + terms / 2 * lda, lda, b + terms / 2 * ldb, ldb, c, ldc);
    if (rows < m) product_flip_pairs(m - rows, n, kc, a + rows, lda, b, ldb, c + rows * ldc, ldc);
}
