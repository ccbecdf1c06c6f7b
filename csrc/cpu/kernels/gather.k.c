/* gather.k.c - sums of scattered rows: columns in blocks that stay in L1, rows in blocks of 32; and a row joined with
 * the one that is there.
 *
 * The two levels of sums keep the rounding error of a row that occurs n times near log n instead of n (an embedding
 * row of a frequent token, a position or segment embedding). The order of the additions depends on `order` alone.
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

#define ADD(a, b) ((a) + (b))
#define LARGER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define SMALLER(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define JOIN_ROW(NAME, HOW, T, W, LOAD, STORE)                                                                     \
    static void NAME(char *to, const char *from, int64_t n) {                                                      \
        T *y = (T *)to;                                                                                            \
        const T *x = (const T *)from;                                                                              \
        for (int64_t c = 0; c < n; c++) {                                                                          \
            const W a = LOAD(y[c]), b = LOAD(x[c]);                                                                \
            y[c] = (T)STORE(HOW(a, b));                                                                            \
        }                                                                                                          \
    }
#define JOIN_ROWS(NAME, HOW)                                                                                       \
    JOIN_ROW(NAME##_f32, HOW, float, float, SAME, SAME)                                                            \
    JOIN_ROW(NAME##_f64, HOW, double, double, SAME, SAME)                                                          \
    JOIN_ROW(NAME##_bf16, HOW, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16)                                    \
    JOIN_ROW(NAME##_f16, HOW, uint16_t, float, om_f16_to_f32, om_f32_to_f16)
JOIN_ROWS(add, ADD)
JOIN_ROWS(larger, LARGER)
JOIN_ROWS(smaller, SMALLER)
JOIN_ROW(add_i64, ADD, uint64_t, uint64_t, SAME, SAME)
JOIN_ROW(add_i32, ADD, uint32_t, uint32_t, SAME, SAME)
JOIN_ROW(add_i16, ADD, uint16_t, uint32_t, SAME, SAME)
JOIN_ROW(add_i8, ADD, uint8_t, uint32_t, SAME, SAME)
#define JOIN_INTEGERS(T, TYPE)                                                                                \
    JOIN_ROW(larger_##T, LARGER, TYPE, TYPE, SAME, SAME) JOIN_ROW(smaller_##T, SMALLER, TYPE, TYPE, SAME, SAME)
JOIN_INTEGERS(i64, int64_t)
JOIN_INTEGERS(i32, int32_t)
JOIN_INTEGERS(i16, int16_t)
JOIN_INTEGERS(i8, int8_t)
JOIN_INTEGERS(u8, uint8_t)

#define JOINS(NAME, U8)                                                                                            \
    {                                                                                                              \
        [OM_F32] = NAME##_f32, [OM_F64] = NAME##_f64, [OM_BF16] = NAME##_bf16, [OM_F16] = NAME##_f16,              \
        [OM_I64] = NAME##_i64, [OM_I32] = NAME##_i32, [OM_I16] = NAME##_i16, [OM_I8] = NAME##_i8, [OM_U8] = U8,    \
    }

const struct om_gather_kernels OM_ISA_NAME(om_gather) = {
    .join = {[OM_JOIN_ADD] = JOINS(add, add_i8),
             [OM_JOIN_MAX] = JOINS(larger, larger_u8),
             [OM_JOIN_MIN] = JOINS(smaller, smaller_u8)},
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
