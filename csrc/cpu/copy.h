/* copy.h - the inner loops of om_copy (csrc/cpu/kernels/copy.k.c), one table per instruction set. Strides are in
 * bytes. */
#ifndef OM_COPY_H
#define OM_COPY_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

enum { OM_COPY_SIZES = 5 }; /* element sizes 1, 2, 4, 8, 16 bytes: index = log2 */

/* dst[i*ds] = src[i*ss] for i < n */
typedef void (*om_copy_line)(const char *src, int64_t ss, char *dst, int64_t ds, int64_t n);
/* Elements adjacent in src along a and in dst along b: dst[a*ds + b] = src[b*ss + a] for a < na, b < nb. */
typedef void (*om_copy_tile)(const char *src, int64_t ss, char *dst, int64_t ds, int64_t na, int64_t nb);

struct om_copy_kernels {
    om_copy_line move[OM_COPY_SIZES];
    om_copy_tile tile[OM_COPY_SIZES];
    om_copy_line convert[OM_N_DTYPES][OM_N_DTYPES]; /* [from][to], torch's rules */
};
OM_DECLARE_ISA(struct om_copy_kernels, om_copy);

#endif
