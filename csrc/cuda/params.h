/* cuda/params.h - what the graph engine's kernels are given: one struct by value, below 4 KB (OM_GPU_PARAM). The
 * addresses in it are put in when a plan's call is about to run (lower.h); everything else is fixed when the plan is
 * made. Sizes and strides count elements unless said; C and CUDA read this file.
 */
#ifndef OM_CUDA_PARAMS_H
#define OM_CUDA_PARAMS_H

#include <stdint.h>

enum { OM_GPU_PARAM = 4000, OM_GPU_RANK = 8 };

/* Where a kernel notes an index that it cannot use; in page-locked memory of the host, so that the host looks at it
 * without waiting. The first call that fails keeps it (site: lower.h), and of its faults the one at the smallest
 * position. */
typedef struct om_gpu_fault { uint32_t busy, site, kind, none; int64_t value, position, limit; } om_gpu_fault;

/* the host's om_scalars */
typedef struct om_gpu_scalars { uint64_t seed; int64_t sym[1]; } om_gpu_scalars;

/* --- strip.cu ------------------------------------------------------------------------------------------ */

/* Registers lie in shared memory: value r of the block's `unit` elements begins at byte r * unit. */
typedef struct om_gpu_insn { uint8_t op, cls; uint16_t dst, a, b, c; } om_gpu_insn;
typedef struct om_gpu_draw { uint64_t rng; double scale; uint32_t below, none; } om_gpu_draw;
typedef struct om_gpu_operand { uint16_t reg; uint8_t dtype, cls; } om_gpu_operand;

/* `blob`: addresses of the operands, then outputs; their strides [operand][rank]; draws; om_gpu_operand per address;
 * instructions */
enum { OM_GPU_STRIP_SMALL = 512, OM_GPU_STRIP_LARGE = 3800 };
#define OM_GPU_STRIP_HEAD                                                                           \
    const om_gpu_scalars *scalars;                                                                  \
    int64_t total;                                                                                  \
    int64_t dim[OM_GPU_RANK];                                                                       \
    uint16_t n_in, n_out, n_insn, rank, stride_at, draw_at, operand_at, insn_at;                    \
    uint32_t unit
typedef struct om_gpu_strip { OM_GPU_STRIP_HEAD; uint64_t blob[OM_GPU_STRIP_SMALL / 8]; } om_gpu_strip;
typedef struct om_gpu_strip_large { OM_GPU_STRIP_HEAD; uint64_t blob[OM_GPU_STRIP_LARGE / 8]; } om_gpu_strip_large;

/* --- move.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_copy { /* elements of 1, 2, 4 or 8 bytes */
    const char *src;
    char *dst;
    int64_t total, dim[OM_GPU_RANK], from[OM_GPU_RANK], to[OM_GPU_RANK];
    int32_t rank, size;
} om_gpu_copy;

typedef struct om_gpu_flip { /* tiles: src runs along axis x, dst along axis y; z and w are outer axes */
    const char *src;
    char *dst;
    int64_t n[4], from[4], to[4]; /* x, y, z, w */
    int32_t size, none;
} om_gpu_flip;

typedef struct om_gpu_fill { char *dst; int64_t n; uint64_t value; int32_t size, none; } om_gpu_fill;
/* value + step * i, in dst's dtype */
typedef struct om_gpu_iota {
    char *dst;
    int64_t n;
    double start, step;
    int64_t istart, istep;
    int32_t dtype, none;
} om_gpu_iota;
typedef struct om_gpu_trilu { /* of the last two axes; dst dense */
    const char *src;
    char *dst;
    int64_t total, dim[OM_GPU_RANK], from[OM_GPU_RANK], k;
    int32_t rank, size, upper, none;
} om_gpu_trilu;

/* --- reduce.cu ----------------------------------------------------------------------------------------- */

enum { OM_GPU_SUM, OM_GPU_MEAN, OM_GPU_MAX, OM_GPU_MIN, OM_GPU_PROD };
/* y[o] over the kept axes (dense) = x reduced over the others; with parts > 1 into partial sums of the compute type */
typedef struct om_gpu_reduce {
    const char *x;
    char *y;
    int64_t outer, inner;      /* elements of y; elements of each reduced set */
    int64_t odim[OM_GPU_RANK], ostride[OM_GPU_RANK], idim[OM_GPU_RANK], istride[OM_GPU_RANK];
    int64_t part;              /* elements of a part */
    double scale;              /* MEAN: 1 / count, at the last step */
    int32_t orank, irank, what, xtype, ytype, parts;
} om_gpu_reduce;

/* --- rows.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_softmax { /* rows of n elements `step` apart; row r begins at r / step * n * step + r % step */
    const char *x, *y;         /* gradient: dy, y; else x */
    char *out;
    int64_t rows, n, step;
    int32_t log, grad;
} om_gpu_softmax;

typedef struct om_gpu_norm { /* rows of n, dense */
    const char *dy, *x, *w, *b;
    char *y, *mean, *rstd;      /* gradient: y is dx, mean and rstd are read; rms: no mean */
    char *partial;              /* gradient: [parts][2][n] sums of dw, db in the compute type, or NULL */
    char *dw, *db;
    int64_t rows, n, parts;
    double eps;
    int32_t rms, wtype, btype, none;
} om_gpu_norm;

/* --- loss.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_loss {
    const char *x, *labels, *weight, *dloss;
    double *lse, *denom, *row;  /* row: losses, scratch for mean and sum */
    char *loss, *dx;
    om_gpu_fault *fault;
    int64_t rows, n, xrow, xcol, label_step, weight_step, loss_step, ignore;
    double smoothing;
    int32_t wtype, wide, reduction, site; /* wide: labels are i64 */
    int32_t gtype, none;                  /* gtype: dtype of dloss */
} om_gpu_loss;

/* --- index.cu ------------------------------------------------------------------------------------------ */

typedef struct om_gpu_gather { /* y (outer, m, inner) = x (outer, n, inner) at idx (m) */
    const char *x, *idx;
    char *y;
    om_gpu_fault *fault;
    int64_t outer, n, m, inner, x_outer, x_n, x_inner; /* strides of x */
    int32_t size, wide, site, none;
} om_gpu_gather;

typedef struct om_gpu_elements { /* y (dense, as idx) = x at idx along one axis */
    const char *x, *idx;
    char *y;
    om_gpu_fault *fault;
    int64_t total, dim[OM_GPU_RANK], xs[OM_GPU_RANK], is[OM_GPU_RANK]; /* xs: 0 along the axis */
    int64_t n, step;           /* of x along the axis */
    int32_t rank, size, wide, site;
} om_gpu_elements;

typedef struct om_gpu_scatter { /* y (outer, n, inner) += dy (outer, m, inner) at idx, in the order of m */
    const char *dy, *idx, *base;
    char *y;
    int32_t *head, *next;      /* scratch: per n the first position, per position the next one at the same place */
    om_gpu_fault *fault;
    int64_t outer, n, m, inner, skip; /* skip: an index that is left out */
    int32_t wide, site;
} om_gpu_scatter;

/* --- gemm.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_gemm { /* c = a b (+ bias): any strides; batch over grid z, up to 4 merged axes */
    const char *a, *b, *bias;
    char *c;
    int64_t m, n, k, ra, ca, rb, cb, rc, cc, sbias;
    int64_t bdim[4], ba[4], bb[4], bc[4];
    int32_t brank, none;
} om_gpu_gemm;

/* --- conv.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_conv { /* x (n, c, in), w (o, cg, k), y (n, o, out); og, cg: channels of a group, out and in */
    const char *x, *w, *bias, *dy;
    char *y, *dx, *dw, *db;
    int64_t n, c, o, cg, og;
    int64_t in[3], k[3], out[3], stride[3], lo[3], dil[3];
    int64_t taps, pixels, plane; /* products of k, out, in */
} om_gpu_conv;

/* --- attention.cu -------------------------------------------------------------------------------------- */

typedef struct om_gpu_attention {
    const char *q, *k, *v, *mask, *dy, *y;
    const int64_t *kv_start, *kv_end;
    const uint8_t *frozen;
    char *out, *lse, *dq, *dk, *dv, *delta;
    const om_gpu_scalars *scalars;
    /* strides: batch, head, time, feature */
    int64_t sq[4], sk[4], sv[4], sdy[4], sy[4], sout[4], sdq[4], sdk[4], sdv[4], smask[4], sfrozen[4];
    int64_t start_step, end_step, batch, hq, hk, tq, tk, d, dv_size, offset, window;
    uint64_t rng;
    double scale, drop_scale;
    uint32_t keep_below;
    int32_t causal, nan_rows, mask_kind /* 0 none, 1 bool, 2 float */, mask_type, drop, none;
} om_gpu_attention;

#endif
