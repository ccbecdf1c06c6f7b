/* gather_rows.h - the inner loops of what is written at rows by index (csrc/cpu/kernels/gather.k.c). */
#ifndef OM_GATHER_ROWS_H
#define OM_GATHER_ROWS_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

/* dst[c] = init[c] + (sum over k < count of row order[k] of src at c), for c < n. Strides in bytes; init NULL = 0; dst
 * may be init. Sums run in the compute type, in blocks of 32 rows, and are rounded once. */
typedef void (*om_sum_rows_fn)(char *dst, const char *init, const char *src, int64_t src_stride, const int64_t *order,
                               int64_t count, int64_t n);
/* y[c] = y[c] + x[c], rounded, or the larger or smaller of the two (NaN wins), for c < n */
typedef void (*om_join_row_fn)(char *y, const char *x, int64_t n);
enum { OM_JOIN_ADD, OM_JOIN_MAX, OM_JOIN_MIN, OM_JOINS };
struct om_gather_kernels {
    om_sum_rows_fn sum[OM_N_DTYPES]; /* NULL: the type cannot be added (bool) */
    om_join_row_fn join[OM_JOINS][OM_N_DTYPES];
};
OM_DECLARE_ISA(struct om_gather_kernels, om_gather);

#endif
