/* loss.h - the row sweeps of cross-entropy (csrc/cpu/kernels/loss.k.c), per storage type of the logits. */
#ifndef OM_LOSS_H
#define OM_LOSS_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

/* One row of c logits, sx bytes apart. Weights are in the compute type (float, or double for f64), dense; NULL = all
 * 1. */
struct om_loss_type {
    /* log(sum exp x), as a double: the caller rounds it */
    double (*lse)(const char *x, int64_t sx, int64_t c);
    /* sum of weight * (lse - x) */
    double (*smooth)(const char *x, int64_t sx, int64_t c, double lse, const void *weight);
    /* dx = a * exp(x - lse) - b * weight; dx dense, may be x itself */
    void (*grad)(const char *x, int64_t sx, int64_t c, double lse, double a, double b, const void *weight, char *dx);
};
struct om_loss_kernels { struct om_loss_type type[OM_F16 + 1]; }; /* by om_dtype */
OM_DECLARE_ISA(struct om_loss_kernels, om_loss);

#endif
