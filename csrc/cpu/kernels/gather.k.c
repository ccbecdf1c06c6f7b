/* gather.k.c - sums of scattered rows: columns in blocks that stay in L1, rows in blocks of 32.
 *
 * The two levels keep the rounding error of a row that occurs n times near log n instead of n (an embedding row of a
 * frequent token, a position or segment embedding). The order of the additions depends on `order` alone.
 */
#include "cpu/gather_rows.h"
#include "graph/half.h"

enum { COLUMNS = 256, ROWS = 32 };

#define SAME(x) (x)
#define SUM_ROWS(NAME, T, W, LOAD, STORE)                                                                          \
    static void sum_##NAME(char *dst, const char *init, const char *src, int64_t src_stride, const int64_t *order, \
                           int64_t count, int64_t n) {                                                             \
        W total[COLUMNS], part[COLUMNS];                                                                           \
        for (int64_t c0 = 0; c0 < n; c0 += COLUMNS) {                                                              \
            const int64_t w = n - c0 < COLUMNS ? n - c0 : COLUMNS, at = c0 * (int64_t)sizeof(T);                   \
            T *y = (T *)(dst + at);                                                                                \
            for (int64_t c = 0; c < w; c++) total[c] = 0;                                                          \
            for (int64_t k0 = 0; k0 < count; k0 += ROWS) {                                                         \
                const int64_t k1 = count - k0 < ROWS ? count : k0 + ROWS;                                          \
                const T *x = (const T *)(src + order[k0] * src_stride + at);                                       \
                for (int64_t c = 0; c < w; c++) part[c] = LOAD(x[c]);                                              \
                for (int64_t k = k0 + 1; k < k1; k++) {                                                            \
                    x = (const T *)(src + order[k] * src_stride + at);                                             \
                    for (int64_t c = 0; c < w; c++) part[c] += LOAD(x[c]);                                         \
                }                                                                                                  \
                for (int64_t c = 0; c < w; c++) total[c] += part[c];                                               \
            }                                                                                                      \
            if (init) {                                                                                            \
                const T *x = (const T *)(init + at);                                                               \
                for (int64_t c = 0; c < w; c++) total[c] += LOAD(x[c]);                                            \
            }                                                                                                      \
            for (int64_t c = 0; c < w; c++) y[c] = (T)STORE(total[c]);                                             \
        }                                                                                                          \
    }
SUM_ROWS(f32, float, float, SAME, SAME)
SUM_ROWS(f64, double, double, SAME, SAME)
SUM_ROWS(bf16, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16)
SUM_ROWS(f16, uint16_t, float, om_f16_to_f32, om_f32_to_f16)
SUM_ROWS(i64, uint64_t, uint64_t, SAME, SAME) /* unsigned: sums wrap round, as torch's do */
SUM_ROWS(i32, uint32_t, uint32_t, SAME, SAME)
SUM_ROWS(i16, uint16_t, uint32_t, SAME, SAME)
SUM_ROWS(u8, uint8_t, uint32_t, SAME, SAME)

const struct om_gather_kernels OM_ISA_NAME(om_gather) = {
    .sum = {[OM_F32] = sum_f32,
            [OM_F64] = sum_f64,
            [OM_BF16] = sum_bf16,
            [OM_F16] = sum_f16,
            [OM_I64] = sum_i64,
            [OM_I32] = sum_i32,
            [OM_I16] = sum_i16,
            [OM_I8] = sum_u8,
            [OM_U8] = sum_u8},
};
