/* recurrent.h - the elementwise half of a time step (csrc/cpu/kernels/recurrent.k.c), a row (sample) at a time. All in
 * the compute type: [0] float, [1] double. n: hidden size; gates stand one after another in a row. */
#ifndef OM_RECURRENT_H
#define OM_RECURRENT_H

#include "cpu/kernels_isa.h"
#include "ops/recurrent.h"
#include "ortmodule.h"

typedef struct om_recurrent_row {
    void *gate;              /* what the activations are taken of; what they gave. GRU: (r, z, n, h's share of n) */
    const void *hidden;      /* GRU: h w^T + b (3n) */
    const void *c_before, *h_before;
    void *c, *h;
    /* backward: dh comes with dy added and becomes what goes to the step before besides dgh w (GRU; else nothing); dc
     * becomes that step's */
    void *dh, *dc, *dgx, *dgh;
} om_recurrent_row;
typedef void (*om_recurrent_fn)(const om_recurrent_row *r, int64_t n);

struct om_recurrent_kernels {
    om_recurrent_fn step[4][2], back[4][2];           /* by kind */
    void (*add[2])(const void *x, void *to, int64_t n); /* to += x */
};
OM_DECLARE_ISA(struct om_recurrent_kernels, om_recurrent);

#endif
