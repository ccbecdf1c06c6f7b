/* reduce.h - inner loops of the reductions (kernels/reduce.k.c). Elements are in a compute class (strip.h: F, D, I);
 * accumulators are double for floats, so that a sum of floats is exact to the last place whatever its length, and int64
 * for integers. */
#ifndef OM_REDUCE_H
#define OM_REDUCE_H

#include "cpu/strip.h"

enum { OM_RED_SUM, OM_RED_PROD, OM_RED_MAX, OM_RED_MIN, OM_N_RED };

struct om_reduce_kernels {
    /* *acc = *acc op x[0] op ... op x[n-1] */
    void (*row[OM_N_RED][3])(const void *x, int64_t n, void *acc);
    /* acc[i] = acc[i] op x[i] op x[i + ld] .. over m rows */
    void (*col[OM_N_RED][3])(const void *x, int64_t ld, int64_t m, int64_t n, void *acc);
    /* index of the first x equal to best (or of the first NaN when best is NaN) in [0, n); n when there is none */
    int64_t (*find[3])(const void *x, int64_t n, const void *best);
};
OM_DECLARE_ISA(struct om_reduce_kernels, om_reduce);

#endif
