/* pool.h - one row of a max pool's outputs (csrc/cpu/kernels/pool.k.c). */
#ifndef OM_POOL_H
#define OM_POOL_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

typedef struct om_pool_tap { int64_t at, lo, hi; } om_pool_tap; /* outputs [lo, hi) read x[at + o step] */
typedef struct om_pool_row {
    /* along the last axis, of all rows: taps of a window, outputs, the first tap of an output's window */
    const om_pool_tap *tap;
    int64_t taps, step, n;
    const int32_t *first;
    const int64_t *offset; /* per tap of a whole window, in order: position of what it reads, without base + o step */
    /* of this row: positions lo, lo + by, ... < hi along the first two axes; the tap at `lo`, taps of a window */
    int64_t lo[2], hi[2], by[2], size[2]; /* size: of the input, along the last two axes */
    int32_t begin[2], kernel;              /* kernel: along the second axis */
    int64_t base;
} om_pool_row;
typedef void (*om_pool_fn)(const om_pool_row *r, const void *x, void *y, int64_t *index);
struct om_pool_kernels { om_pool_fn f32, f64, bf16, f16; };
OM_DECLARE_ISA(struct om_pool_kernels, om_pool);

#endif
