/* cdist.k.c - distances of one row to many, and their gradients for it. Sums of up to RUN terms in the compute type,
 * above in double. */
#include "cpu/cdist.h"
#include "cpu/kernels/vmath.h"

enum { RUN = 128 };

#define SUM(EXPR)                                                                                                      \
    for (int64_t i0 = 0; i0 < m; i0 += RUN) {                                                                          \
        const int64_t end = m - i0 < RUN ? m : i0 + RUN;                                                               \
        part = 0;                                                                                                      \
        _Pragma("omp simd reduction(+ : part)") for (int64_t i = i0; i < end; i++) part += EXPR;                       \
        sum += (double)part;                                                                                           \
    }

#define CDIST(S, T)                                                                                                    \
    static void rows_##S(int how, double p, const void *x_, const void *y_, int64_t r, int64_t m, void *d) {           \
        const T *x = x_;                                                                                               \
        for (int64_t j = 0; j < r; j++) {                                                                              \
            const T *y = (const T *)y_ + j * m;                                                                        \
            double sum = 0;                                                                                            \
            T part = 0;                                                                                                \
            if (how == OM_CDIST_TWO) {                                                                                 \
                SUM((x[i] - y[i]) * (x[i] - y[i]))                                                                     \
                sum = sqrt(sum);                                                                                       \
            } else if (how == OM_CDIST_ONE) {                                                                          \
                SUM(fabs_##S(x[i] - y[i]))                                                                             \
            } else if (how == OM_CDIST_ZERO) {                                                                         \
                SUM((T)(x[i] != y[i]))                                                                                 \
            } else if (how == OM_CDIST_INF) {                                                                          \
                for (int64_t i = 0; i < m; i++) {                                                                      \
                    const T e = fabs_##S(x[i] - y[i]);                                                                 \
                    if (e > part || e != e) part = e;                                                                  \
                }                                                                                                      \
                sum = (double)part;                                                                                    \
            } else {                                                                                                   \
                for (int64_t i = 0; i < m; i++) sum += pow((double)fabs_##S(x[i] - y[i]), p);                          \
                sum = pow(sum, 1 / p);                                                                                 \
            }                                                                                                          \
            ((T *)d)[j] = (T)sum;                                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    static void grad_##S(int how, double p, const void *dd, const void *x_, const void *y_, const void *d_, int64_t r, \
                         int64_t m, void *dx_) {                                                                       \
        const T *x = x_;                                                                                               \
        T *dx = dx_;                                                                                                   \
        for (int64_t i = 0; i < m; i++) dx[i] = 0;                                                                     \
        for (int64_t j = 0; j < r && how != OM_CDIST_ZERO; j++) {                                                      \
            const T *y = (const T *)y_ + j * m, g = ((const T *)dd)[j], d = ((const T *)d_)[j];                        \
            if (how == OM_CDIST_ONE) {                                                                                 \
                _Pragma("omp simd") for (int64_t i = 0; i < m; i++)                                                    \
                    dx[i] += g * (T)((x[i] > y[i]) - (x[i] < y[i]));                                                   \
            } else if (how == OM_CDIST_INF) {                                                                          \
                for (int64_t i = 0; i < m; i++)                                                                        \
                    if (fabs_##S(x[i] - y[i]) == d) dx[i] += g * (T)((x[i] > y[i]) - (x[i] < y[i]));                   \
            } else if (d == 0) {                                                                                       \
                continue;                                                                                              \
            } else if (how == OM_CDIST_TWO) {                                                                          \
                const T c = g / d;                                                                                     \
                _Pragma("omp simd") for (int64_t i = 0; i < m; i++) dx[i] += c * (x[i] - y[i]);                        \
            } else {                                                                                                   \
                for (int64_t i = 0; i < m; i++) {                                                                      \
                    const double e = (double)x[i] - (double)y[i];                                                      \
                    if (e == 0) continue;                                                                              \
                    dx[i] += g * (T)((e > 0 ? 1 : -1) * pow(fabs(e) / (double)d, p - 1));                              \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
CDIST(f32, float)
CDIST(f64, double)

const struct om_cdist_kernels OM_ISA_NAME(om_cdist) = {.rows = {rows_f32, rows_f64}, .grad = {grad_f32, grad_f64}};
