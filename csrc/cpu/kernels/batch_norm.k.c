/* batch_norm.k.c - the four sweeps of batch normalisation.
 *
 * With inner > 1 a channel is n runs of `inner` elements, worked off one by one. With inner = 1 (a table of rows)
 * neighbours belong to different channels: a block of columns is swept row by row, one accumulator each. Partial sums
 * of at most 128 elements (32 rows) run in the compute type, everything above in double, in a fixed order.
 */
#include "cpu/batch_norm.h"
#include "graph/half.h"

enum { RUN = 128, COLUMNS = 128, ROWS = 32 };

#define SAME(x) (x)

/* For channels c0..c1: RUNS walks runs of one channel; ROWWISE walks rows of a block of columns. Both define W sums of
 * EXPR. */
#define SUM2(S, T, W, NAME, PARAMS, SETUP, EXPR1, EXPR2, OUT1, OUT2)                                \
    static void NAME##_##S(PARAMS) {                                                                \
        if (inner > 1) {                                                                            \
            for (int64_t ch = c0; ch < c1; ch++) {                                                  \
                const W m = mean ? (W)mean[ch] : 0;                                                 \
                double total1 = 0, total2 = 0;                                                      \
                for (int64_t b = 0; b < n; b++)                                                     \
                    for (int64_t i0 = 0; i0 < inner; i0 += RUN) {                                   \
                        const int64_t at = (b * c + ch) * inner + i0, len = inner - i0 < RUN ? inner - i0 : RUN; \
                        SETUP                                                                       \
                        W s1 = 0, s2 = 0;                                                           \
                        _Pragma("omp simd reduction(+ : s1, s2)") for (int64_t i = 0; i < len; i++) { \
                            s1 += EXPR1;                                                            \
                            s2 += EXPR2;                                                            \
                        }                                                                           \
                        total1 += (double)s1;                                                       \
                        total2 += (double)s2;                                                       \
                    }                                                                               \
                OUT1[ch] = total1;                                                                  \
                OUT2                                                                                \
            }                                                                                       \
            return;                                                                                 \
        }                                                                                           \
        for (int64_t k0 = c0; k0 < c1; k0 += COLUMNS) {                                             \
            const int64_t len = c1 - k0 < COLUMNS ? c1 - k0 : COLUMNS;                              \
            double total1_[COLUMNS] = {0}, total2_[COLUMNS] = {0};                                  \
            W mean_[COLUMNS] = {0};                                                                 \
            if (mean) for (int64_t i = 0; i < len; i++) mean_[i] = (W)mean[k0 + i];                 \
            for (int64_t b0 = 0; b0 < n; b0 += ROWS) {                                              \
                W part1[COLUMNS] = {0}, part2[COLUMNS] = {0};                                       \
                for (int64_t b = b0; b < b0 + ROWS && b < n; b++) {                                 \
                    const int64_t at = b * c + k0;                                                  \
                    SETUP                                                                           \
                    _Pragma("omp simd") for (int64_t i = 0; i < len; i++) {                         \
                        const W m = mean_[i];                                                       \
                        (void)m;                                                                    \
                        part1[i] += EXPR1;                                                          \
                        part2[i] += EXPR2;                                                          \
                    }                                                                               \
                }                                                                                   \
                for (int64_t i = 0; i < len; i++) {                                                 \
                    total1_[i] += (double)part1[i];                                                 \
                    total2_[i] += (double)part2[i];                                                 \
                }                                                                                   \
            }                                                                                       \
            for (int64_t i = 0; i < len; i++) {                                                     \
                const int64_t ch = k0 + i;                                                          \
                const double total2 = total2_[i];                                                   \
                (void)total2;                                                                       \
                OUT1[ch] = total1_[i];                                                              \
                OUT2                                                                                \
            }                                                                                       \
        }                                                                                           \
    }

#define SHAPE int64_t n, int64_t c, int64_t inner, int64_t c0, int64_t c1
#define SUMS_PARAMS const void *x_, SHAPE, const double *mean, double *sum, double *rest
#define GRAD_PARAMS const void *dy_, const void *x_, SHAPE, const double *mean, double *sum, double *dot

#define BATCH_NORM(S, T, W, LOAD, STORE)                                                                               \
    SUM2(S, T, W, plain, SUMS_PARAMS, const T *x = (const T *)x_ + at;, LOAD(x[i]) - m, 0, sum, (void)rest;)           \
    SUM2(S, T, W, square, SUMS_PARAMS, const T *x = (const T *)x_ + at;                                                \
         , (LOAD(x[i]) - m) * (LOAD(x[i]) - m), LOAD(x[i]) - m, sum, rest[ch] = total2;)                               \
    SUM2(S, T, W, grad_sums, GRAD_PARAMS, const T *x = (const T *)x_ + at; const T *dy = (const T *)dy_ + at;          \
         , LOAD(dy[i]), LOAD(dy[i]) * (LOAD(x[i]) - m), sum, dot[ch] = total2;)                                        \
    static void sums_##S(SUMS_PARAMS) {                                                                                \
        if (mean)                                                                                                      \
            square_##S(x_, n, c, inner, c0, c1, mean, sum, rest);                                                      \
        else                                                                                                           \
            plain_##S(x_, n, c, inner, c0, c1, mean, sum, rest);                                                       \
    }                                                                                                                  \
    static void apply_##S(const void *x_, void *y_, SHAPE, const double *mean, const double *a_, const double *b_) {   \
        for (int64_t row = 0; row < n; row++) {                                                                        \
            if (inner > 1) {                                                                                           \
                for (int64_t ch = c0; ch < c1; ch++) {                                                                 \
                    const T *x = (const T *)x_ + (row * c + ch) * inner;                                               \
                    T *y = (T *)y_ + (row * c + ch) * inner;                                                           \
                    const W m = (W)mean[ch], a = (W)a_[ch], b = (W)b_[ch];                                             \
                    _Pragma("omp simd") for (int64_t i = 0; i < inner; i++) y[i] = (T)STORE((LOAD(x[i]) - m) * a + b); \
                }                                                                                                      \
            } else {                                                                                                   \
                const T *x = (const T *)x_ + row * c;                                                                  \
                T *y = (T *)y_ + row * c;                                                                              \
                _Pragma("omp simd") for (int64_t ch = c0; ch < c1; ch++)                                               \
                    y[ch] = (T)STORE((LOAD(x[ch]) - (W)mean[ch]) * (W)a_[ch] + (W)b_[ch]);                             \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void grad_apply_##S(const void *dy_, const void *x_, void *dx_, SHAPE, const double *mean,                  \
                               const double *a_, const double *b_, const double *k_) {                                 \
        for (int64_t row = 0; row < n; row++) {                                                                        \
            if (inner > 1) {                                                                                           \
                for (int64_t ch = c0; ch < c1; ch++) {                                                                 \
                    const int64_t at = (row * c + ch) * inner;                                                         \
                    const T *x = (const T *)x_ + at, *dy = (const T *)dy_ + at;                                        \
                    T *dx = (T *)dx_ + at;                                                                             \
                    const W m = (W)mean[ch], a = (W)a_[ch], b = (W)b_[ch], k = (W)k_[ch];                              \
                    _Pragma("omp simd") for (int64_t i = 0; i < inner; i++)                                            \
                        dx[i] = (T)STORE(a * (LOAD(dy[i]) - b - (LOAD(x[i]) - m) * k));                                \
                }                                                                                                      \
            } else {                                                                                                   \
                const T *x = (const T *)x_ + row * c, *dy = (const T *)dy_ + row * c;                                  \
                T *dx = (T *)dx_ + row * c;                                                                            \
                _Pragma("omp simd") for (int64_t ch = c0; ch < c1; ch++) dx[ch] = (T)STORE(                            \
                    (W)a_[ch] * (LOAD(dy[ch]) - (W)b_[ch] - (LOAD(x[ch]) - (W)mean[ch]) * (W)k_[ch]));                 \
            }                                                                                                          \
        }                                                                                                              \
    }
BATCH_NORM(f32, float, float, SAME, SAME)
BATCH_NORM(f64, double, double, SAME, SAME)
BATCH_NORM(bf16, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16)
BATCH_NORM(f16, uint16_t, float, om_f16_to_f32, om_f32_to_f16)

#define ROW(TYPE, S) [TYPE] = {sums_##S, apply_##S, grad_sums_##S, grad_apply_##S}
const struct om_batch_norm_kernels OM_ISA_NAME(om_batch_norm) = {
    .type = {ROW(OM_F32, f32), ROW(OM_F64, f64), ROW(OM_BF16, bf16), ROW(OM_F16, f16)},
};
