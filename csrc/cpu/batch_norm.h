/* batch_norm.h - sweeps of batch normalisation (csrc/cpu/kernels/batch_norm.k.c). x is (n, c, inner), dense; channels
 * [c0, c1). */
#ifndef OM_BATCH_NORM_H
#define OM_BATCH_NORM_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

struct om_batch_norm_type {
    /* sum[c] = sum of x; with mean, rounded to the compute type: sum of (x - mean[c])^2, rest[c] = sum of x -
     * mean[c] */
    void (*sums)(const void *x, int64_t n, int64_t c, int64_t inner, int64_t c0, int64_t c1, const double *mean,
                 double *sum, double *rest);
    /* y = (x - mean[c]) * a[c] + b[c] */
    void (*apply)(const void *x, void *y, int64_t n, int64_t c, int64_t inner, int64_t c0, int64_t c1,
                  const double *mean, const double *a, const double *b);
    /* sum[c] = sum of dy, dot[c] = sum of dy * (x - mean[c]) */
    void (*grad_sums)(const void *dy, const void *x, int64_t n, int64_t c, int64_t inner, int64_t c0, int64_t c1,
                      const double *mean, double *sum, double *dot);
    /* dx = a[c] * (dy - b[c] - (x - mean[c]) * k[c]) */
    void (*grad_apply)(const void *dy, const void *x, void *dx, int64_t n, int64_t c, int64_t inner, int64_t c0,
                       int64_t c1, const double *mean, const double *a, const double *b, const double *k);
};
struct om_batch_norm_kernels { struct om_batch_norm_type type[OM_F16 + 1]; }; /* by om_dtype */
OM_DECLARE_ISA(struct om_batch_norm_kernels, om_batch_norm);

#endif
