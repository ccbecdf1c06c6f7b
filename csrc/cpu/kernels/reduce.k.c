/* reduce.k.c - loops of sum, product, maximum, minimum over contiguous elements (row) or over rows of a matrix (col).
 *
 * The order of operations depends on the length of a row alone, so the result does too. NaN wins a maximum or minimum.
 */
#include "cpu/reduce.h"

#include <math.h>

#define SUM(a, x) ((a) + (x))
#define PROD(a, x) ((a) * (x))
#define MAX(a, x) ((x) > (a) || (x) != (x) ? (x) : (a))
#define MIN(a, x) ((x) < (a) || (x) != (x) ? (x) : (a))
#define OVER(a, x) ((x) > (a) ? (x) : (a)) /* as MAX and MIN, but a NaN never enters: one instruction */
#define UNDER(a, x) ((x) < (a) ? (x) : (a))

#define PRAGMA(p) _Pragma(#p)

/* T: element; L: accumulator of a row; A: accumulator given; CLAUSE: OP's name in OpenMP. The four quarters of the row
 * run at once, each in a vector: that hides the latency of the operation. */
#define ROW(name, OP, CLAUSE, T, L, A, unit)                                                        \
    static void row_##name(const void *px, int64_t n, void *pa) {                                   \
        const T *x = px;                                                                            \
        A *acc = pa;                                                                                \
        L a0 = (L)(unit), a1 = a0, a2 = a0, a3 = a0;                                                \
        const int64_t q = n / 4;                                                                    \
        const T *x1 = x + q, *x2 = x1 + q, *x3 = x2 + q;                                            \
        PRAGMA(omp simd reduction(CLAUSE : a0, a1, a2, a3)) for (int64_t i = 0; i < q; i++) {       \
            const L e0 = (L)x[i], e1 = (L)x1[i], e2 = (L)x2[i], e3 = (L)x3[i];                      \
            a0 = OP(a0, e0);                                                                        \
            a1 = OP(a1, e1);                                                                        \
            a2 = OP(a2, e2);                                                                        \
            a3 = OP(a3, e3);                                                                        \
        }                                                                                           \
        for (int64_t i = 4 * q; i < n; i++) {                                                       \
            const L e = (L)x[i];                                                                    \
            a0 = OP(a0, e);                                                                         \
        }                                                                                           \
        const L b0 = OP(a0, a1), b1 = OP(a2, a3), b = OP(b0, b1);                                   \
        const A r = (A)b;                                                                           \
        *acc = OP(*acc, r);                                                                         \
    }
#define COL(name, OP, T, A)                                                                         \
    static void col_##name(const void *px, int64_t ld, int64_t m, int64_t n, void *pa) {            \
        const T *x = px;                                                                            \
        A *acc = pa;                                                                                \
        for (; m >= 4; m -= 4, x += 4 * ld) {                                                       \
            const T *x1 = x + ld, *x2 = x1 + ld, *x3 = x2 + ld;                                     \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                   \
                const A e = (A)x[i], e1 = (A)x1[i], e2 = (A)x2[i], e3 = (A)x3[i];                   \
                A a = acc[i];                                                                       \
                a = OP(a, e);                                                                       \
                a = OP(a, e1);                                                                      \
                a = OP(a, e2);                                                                      \
                acc[i] = OP(a, e3);                                                                 \
            }                                                                                       \
        }                                                                                           \
        for (; m > 0; m--, x += ld)                                                                 \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                   \
                const A e = (A)x[i], a = acc[i];                                                    \
                acc[i] = OP(a, e);                                                                  \
            }                                                                                       \
    }
/* Maximum, minimum: NaN is looked for apart, block by block, so that the extremum itself is one instruction. */
#define EXTREME(name, OP, T, A, unit)                                                               \
    static void row_##name(const void *px, int64_t n, void *pa) {                                   \
        const T *x = px;                                                                            \
        A *acc = pa;                                                                                \
        for (int64_t i0 = 0; i0 < n; i0 += 1024) {                                                  \
            const int64_t m = n - i0 < 1024 ? n - i0 : 1024;                                        \
            A block = (A)(unit);                                                                    \
            int nan = 0;                                                                            \
            row_plain_##name(x + i0, m, &block);                                                    \
            _Pragma("omp simd reduction(|:nan)") for (int64_t i = 0; i < m; i++) nan |= x[i0 + i] != x[i0 + i]; \
            if (nan) block = (A)NAN;                                                                \
            *acc = OP(*acc, block);                                                                 \
        }                                                                                           \
    }                                                                                               \
    COL(name, OP, T, A)
#define BOTH(name, OP, CLAUSE, T, L, A, unit) ROW(name, OP, CLAUSE, T, L, A, unit) COL(name, OP, T, A)
BOTH(sum_F, SUM, +, float, double, double, 0)
BOTH(sum_D, SUM, +, double, double, double, 0)
BOTH(sum_I, SUM, +, int64_t, uint64_t, uint64_t, 0)
BOTH(prod_F, PROD, *, float, double, double, 1)
BOTH(prod_D, PROD, *, double, double, double, 1)
BOTH(prod_I, PROD, *, int64_t, uint64_t, uint64_t, 1)
ROW(plain_max_F, OVER, max, float, float, double, -INFINITY)
ROW(plain_max_D, OVER, max, double, double, double, -INFINITY)
ROW(plain_min_F, UNDER, min, float, float, double, INFINITY)
ROW(plain_min_D, UNDER, min, double, double, double, INFINITY)
EXTREME(max_F, MAX, float, double, -INFINITY)
EXTREME(max_D, MAX, double, double, -INFINITY)
EXTREME(min_F, MIN, float, double, INFINITY)
EXTREME(min_D, MIN, double, double, INFINITY)
BOTH(max_I, OVER, max, int64_t, int64_t, int64_t, INT64_MIN)
BOTH(min_I, UNDER, min, int64_t, int64_t, int64_t, INT64_MAX)

#define FIND(name, T)                                                                                              \
    static int64_t find_##name(const void *px, int64_t n, const void *pb) {                                        \
        const T *x = px, best = *(const T *)pb;                                                                    \
        const int nan = best != best;                                                                              \
        for (int64_t i = 0; i < n; i += 256) { /* which block, vectorised; then where in it */                     \
            const int64_t m = n - i < 256 ? n - i : 256;                                                           \
            int hit = 0;                                                                                           \
            _Pragma("omp simd reduction(|:hit)") for (int64_t k = 0; k < m; k++) hit |= nan ? x[i + k] != x[i + k] \
                                                                                            : x[i + k] == best;    \
            if (!hit) continue;                                                                                    \
            for (int64_t k = i;; k++)                                                                              \
                if (nan ? x[k] != x[k] : x[k] == best) return k;                                                   \
        }                                                                                                          \
        return n;                                                                                                  \
    }
FIND(F, float)
FIND(D, double)
FIND(I, int64_t)

const struct om_reduce_kernels OM_ISA_NAME(om_reduce) = {
    .row = {{row_sum_F, row_sum_D, row_sum_I},
            {row_prod_F, row_prod_D, row_prod_I},
            {row_max_F, row_max_D, row_max_I},
            {row_min_F, row_min_D, row_min_I}},
    .col = {{col_sum_F, col_sum_D, col_sum_I},
            {col_prod_F, col_prod_D, col_prod_I},
            {col_max_F, col_max_D, col_max_I},
            {col_min_F, col_min_D, col_min_I}},
    .find = {find_F, find_D, find_I},
};
