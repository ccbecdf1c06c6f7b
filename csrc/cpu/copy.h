/* copy.h - the inner loops of om_copy (csrc/cpu/kernels/copy.k.c), one table per instruction set. Strides are in
 * bytes. */
#ifndef OM_COPY_H
#define OM_COPY_H

#include "cpu/kernels_isa.h"
#include "graph/engine.h"

enum { OM_COPY_SIZES = 5 }; /* element sizes 1, 2, 4, 8, 16 bytes: index = log2 */

/* dst[i*ds] = src[i*ss] for i < n */
typedef void (*om_copy_line)(const char *src, int64_t ss, char *dst, int64_t ds, int64_t n);
/* Elements adjacent in src along a and in dst along b: dst[a*ds + b] = src[b*ss + a] for a < na, b < nb. */
typedef void (*om_copy_tile)(const char *src, int64_t ss, char *dst, int64_t ds, int64_t na, int64_t nb);
/* The same as line(src, ss, dst, ds, n), past the caches; ds is the size of an element. */
typedef void (*om_copy_stream)(om_copy_line line, const char *src, int64_t ss, char *dst, int64_t ds, int64_t n);

struct om_copy_kernels {
    om_copy_line move[OM_COPY_SIZES];
    om_copy_tile tile[OM_COPY_SIZES];
    om_copy_line convert[OM_N_DTYPES][OM_N_DTYPES]; /* [from][to], torch's rules */
    om_copy_stream stream;                          /* NULL: no such stores */
};
OM_DECLARE_ISA(struct om_copy_kernels, om_copy);

/* --- om_copy in two steps: once per plan, and every step ------------------------------------------------ */

typedef struct om_copy_axis { int64_t n, src, dst; } om_copy_axis; /* strides in bytes */

typedef struct om_copy_job {            /* everything but addresses */
    /* axes [0, n_outer) are walked by odometer; axis n_outer = line; with tile: axis n_outer + 1 = the other */
    const om_copy_axis *axis;
    int n_axis, n_outer;
    int64_t src_at, dst_at;             /* where the first element lies, bytes */
    int64_t size, from;                 /* with tile, bytes of an element; of the source's, if converted, else 0 */
    int64_t piece, n_pieces;            /* elements of a line done at once by one thread */
    int64_t items, grain;               /* 0 items: nothing to copy */
    om_copy_line line;
    om_copy_tile tile;
    om_copy_stream stream;              /* instead of `line`, which it is given; or NULL */
} om_copy_job;

/* src and dst: sizes, strides and dtypes; j->axis becomes `axis` (OM_RANK entries of the caller's). */
om_status om_copy_prepare(om_ctx *cx, const om_tensor *src, const om_tensor *dst, om_copy_axis *axis, om_copy_job *j);
bool om_copy_keep(om_arena *mem, om_copy_job *j); /* moves its axes to `mem` */
void om_copy_run(om_ctx *cx, const om_copy_job *j, const void *src, void *dst);
/* both at once, in `mem`; nothing to copy: a job without items */
om_status om_copy_prepared(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst, om_copy_job *j);
om_status om_cpu_copy_prepare(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst, const void **prep);
om_status om_cpu_copy_run(om_ctx *cx, const void *prep, const om_tensor *src, om_tensor *dst);

#endif
