/* conv.k.c - loops between images and the matrix of patches.
 *
 * One idea serves both: for one tap (kd, kh, kw) and one line of output pixels, the input pixels are one strided line
 * too, and the part of it that lies in the image is one interval, computed once per tap. So the inner loops are copies
 * and adds of lines; the padding costs nothing but the zeros of im2col.
 */
#include "cpu/conv.h"
#include <string.h>

enum { RUN = 128 }; /* sums are in T up to this many terms, in double above */

/* Output positions [*lo, *hi) along axis a whose tap t falls into the image; input position = out * stride + *first. */
static inline void tap_range(const om_conv_geo *g, int a, int64_t t, int64_t *lo, int64_t *hi, int64_t *first) {
    const int64_t s = g->w.stride[a], f = t * g->w.dil[a] - g->w.lo[a];
    int64_t l = f >= 0 ? 0 : (-f + s - 1) / s, h = g->in[a] - f <= 0 ? 0 : (g->in[a] - f + s - 1) / s;
    if (h > g->out[a]) h = g->out[a];
    *lo = l < h ? l : h;
    *hi = h;
    *first = f;
}

typedef struct tap { int64_t lo[3], hi[3], first[3]; } tap;

static inline tap tap_of(const om_conv_geo *g, int64_t t) {
    tap r;
    tap_range(g, 2, t % g->w.k[2], &r.lo[2], &r.hi[2], &r.first[2]);
    tap_range(g, 1, t / g->w.k[2] % g->w.k[1], &r.lo[1], &r.hi[1], &r.first[1]);
    tap_range(g, 0, t / g->w.k[2] / g->w.k[1], &r.lo[0], &r.hi[0], &r.first[0]);
    return r;
}

/* Offset in the input plane of the pixel that tap p reads for output pixel (d, h, 0). */
static inline int64_t tap_line(const om_conv_geo *g, const tap *p, int64_t d, int64_t h) {
    return ((d * g->w.stride[0] + p->first[0]) * g->in[1] + h * g->w.stride[1] + p->first[1]) * g->in[2] + p->first[2];
}

#define CONV(S, T)                                                                                                     \
    static void im2col_##S(const om_conv_geo *g, const void *x_, void *col_, int64_t row_step, int64_t image_step,     \
                           int64_t r0, int64_t r1) {                                                                   \
        const T *x = x_;                                                                                               \
        const int64_t ow = g->out[2], s = g->w.stride[2];                                                              \
        for (int64_t r = r0; r < r1; r++) {                                                                            \
            const int64_t t = r % g->taps, c = r / g->taps % g->cg, b = r / g->taps / g->cg;                           \
            const tap p = tap_of(g, t);                                                                                \
            const T *plane = x + (b * g->c + c) * g->plane;                                                            \
            T *y = (T *)col_ + (c * g->taps + t) * row_step + b * image_step;                                          \
            for (int64_t d = 0; d < g->out[0]; d++)                                                                    \
                for (int64_t h = 0; h < g->out[1]; h++, y += ow) {                                                     \
                    if (d < p.lo[0] || d >= p.hi[0] || h < p.lo[1] || h >= p.hi[1]) {                                  \
                        memset(y, 0, (size_t)ow * sizeof(T));                                                          \
                        continue;                                                                                      \
                    }                                                                                                  \
                    const T *from = plane + tap_line(g, &p, d, h);                                                     \
                    for (int64_t w = 0; w < p.lo[2]; w++) y[w] = 0;                                                    \
                    if (s == 1)                                                                                        \
                        memcpy(y + p.lo[2], from + p.lo[2], (size_t)(p.hi[2] - p.lo[2]) * sizeof(T));                  \
                    else                                                                                               \
                        for (int64_t w = p.lo[2]; w < p.hi[2]; w++) y[w] = from[w * s];                                \
                    for (int64_t w = p.hi[2]; w < ow; w++) y[w] = 0;                                                   \
                }                                                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    /* lines of one tap: OUT(offset in output plane), IN(offset in input plane); n pixels, input step s */             \
    static inline __attribute__((always_inline)) void add_taps_##S(const om_conv_geo *g, const tap *p, T *to,          \
                                                                   int to_input, const T *from, T a) {                 \
        const int64_t s = g->w.stride[2], n = p->hi[2] - p->lo[2];                                                     \
        for (int64_t d = p->lo[0]; d < p->hi[0]; d++)                                                                  \
            for (int64_t h = p->lo[1]; h < p->hi[1]; h++) {                                                            \
                const int64_t in = tap_line(g, p, d, h) + p->lo[2] * s;                                                \
                const int64_t out = (d * g->out[1] + h) * g->out[2] + p->lo[2];                                        \
                T *y = to + (to_input ? in : out);                                                                     \
                const T *x = from + (to_input ? out : in);                                                             \
                if (s == 1) {                                                                                          \
                    _Pragma("omp simd") for (int64_t w = 0; w < n; w++) y[w] += a * x[w];                              \
                } else if (to_input) {                                                                                 \
                    for (int64_t w = 0; w < n; w++) y[w * s] += a * x[w];                                              \
                } else {                                                                                               \
                    for (int64_t w = 0; w < n; w++) y[w] += a * x[w * s];                                              \
                }                                                                                                      \
            }                                                                                                          \
    }                                                                                                                  \
    static void col2im_##S(const om_conv_geo *g, const void *col_, int64_t row_step, int64_t image_step, void *dx,     \
                           int64_t p0, int64_t p1) {                                                                   \
        for (int64_t i = p0; i < p1; i++) {                                                                            \
            const int64_t c = i % g->cg, b = i / g->cg;                                                                \
            T *y = (T *)dx + (b * g->c + c) * g->plane;                                                                \
            memset(y, 0, (size_t)g->plane * sizeof(T));                                                                \
            for (int64_t t = 0; t < g->taps; t++) {                                                                    \
                const tap p = tap_of(g, t);                                                                            \
                add_taps_##S(g, &p, y, 1, (const T *)col_ + (c * g->taps + t) * row_step + b * image_step, 1);         \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void bias_grad_##S(const om_conv_geo *g, const void *dy, void *db, int64_t o0, int64_t o1) {                \
        for (int64_t o = o0; o < o1; o++) {                                                                            \
            double sum = 0;                                                                                            \
            for (int64_t b = 0; b < g->n; b++)                                                                         \
                for (int64_t i0 = 0; i0 < g->pixels; i0 += RUN) {                                                      \
                    const T *v = (const T *)dy + (b * g->o + o) * g->pixels + i0;                                      \
                    const int64_t n = g->pixels - i0 < RUN ? g->pixels - i0 : RUN;                                     \
                    T part = 0;                                                                                        \
                    _Pragma("omp simd reduction(+ : part)") for (int64_t k = 0; k < n; k++) part += v[k];              \
                    sum += (double)part;                                                                               \
                }                                                                                                      \
            ((T *)db)[o] = (T)sum;                                                                                     \
        }                                                                                                              \
    }
CONV(f32, float)
CONV(f64, double)

#define TYPE(S) {im2col_##S, col2im_##S, bias_grad_##S}
const struct om_conv_kernels OM_ISA_NAME(om_conv) = {.f32 = TYPE(f32), .f64 = TYPE(f64)};
