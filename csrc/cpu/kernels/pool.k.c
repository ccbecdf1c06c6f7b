/* pool.k.c - the largest of each window and where it lies, for a row of outputs: tap after tap, all outputs at once, so
 * that nothing branches on values: what a tap reads is laid out first, with -inf (which is never taken) where it reads
 * nothing, up to a whole block, so that no loop has a rest. The first of equal ones; NaN counts as largest, the last of
 * several. */
#include "cpu/pool.h"
#include "graph/half.h"

#include <math.h>

enum { CHUNK = 256, BLOCK = 16 };
#define SAME(x) (x)

#define LOOP(from, to) _Pragma("omp simd") for (int64_t i = from; i < to; i++)
#define TAKE(W)                                                 \
    for (int64_t b = 0; b < n; b += BLOCK)                      \
        LOOP(b, b + BLOCK) {                                    \
            const int take = (v[i] > best[i]) | (v[i] != v[i]); \
            best[i] = take ? v[i] : best[i];                    \
            where[i] = take ? number : where[i];                \
        }
#define POOL(S, T, W, LOAD, STORE)                                                                                     \
    static void max_row_##S(const om_pool_row *r, const void *x_, void *y_, int64_t *index) {                          \
        const int32_t taps = (int32_t)r->taps, outer = r->begin[0] * r->kernel + r->begin[1];                          \
        W best[CHUNK], v[CHUNK];                                                                                       \
        int32_t where[CHUNK];                                                                                          \
        for (int64_t o = 0; o < r->n; o += CHUNK) {                                                                    \
            const int64_t n = r->n - o < CHUNK ? r->n - o : CHUNK;                                                     \
            const int64_t whole = (n + BLOCK - 1) / BLOCK * BLOCK;                                                     \
            for (int64_t i = 0; i < whole; i++) best[i] = -(W)INFINITY;                                                \
            for (int64_t i = 0; i < whole; i++) where[i] = i < n ? outer * taps + r->first[o + i] : 0;                 \
            int32_t t0 = r->begin[0];                                                                                  \
            for (int64_t i0 = r->lo[0]; i0 < r->hi[0]; i0 += r->by[0], t0++) {                                         \
                int32_t t1 = r->begin[1];                                                                              \
                for (int64_t i1 = r->lo[1]; i1 < r->hi[1]; i1 += r->by[1], t1++)                                       \
                    for (int32_t t = 0; t < taps; t++) {                                                               \
                        const om_pool_tap *tap = &r->tap[t];                                                           \
                        const int64_t lo = tap->lo > o ? tap->lo - o : 0, hi = tap->hi - o < n ? tap->hi - o : n;      \
                        const T *x = (const T *)x_ + (i0 * r->size[0] + i1) * r->size[1] + tap->at + o * r->step;      \
                        const int32_t number = (t0 * r->kernel + t1) * taps + t;                                       \
                        for (int64_t i = 0; i < lo && i < whole; i++) v[i] = -(W)INFINITY;                             \
                        if (r->step == 1) for (int64_t i = lo; i < hi; i++) v[i] = LOAD(x[i]);                         \
                        else if (r->step == 2) for (int64_t i = lo; i < hi; i++) v[i] = LOAD(x[2 * i]);                \
                        else for (int64_t i = lo; i < hi; i++) v[i] = LOAD(x[i * r->step]);                            \
                        for (int64_t i = hi > lo ? hi : lo; i < whole; i++) v[i] = -(W)INFINITY;                       \
                        TAKE(W)                                                                                        \
                    }                                                                                                  \
            }                                                                                                          \
            T *y = (T *)y_ + o;                                                                                        \
            const int64_t base = r->base + o * r->step;                                                                \
            LOOP(0, n) y[i] = (T)STORE(best[i]);                                                                       \
            for (int64_t i = 0; i < n; i++) index[o + i] = base + i * r->step + r->offset[where[i]];                   \
        }                                                                                                              \
    }
POOL(f32, float, float, SAME, SAME)
POOL(f64, double, double, SAME, SAME)
POOL(bf16, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16)
POOL(f16, uint16_t, float, om_f16_to_f32, om_f32_to_f16)

const struct om_pool_kernels OM_ISA_NAME(om_pool) = {max_row_f32, max_row_f64, max_row_bf16, max_row_f16};
