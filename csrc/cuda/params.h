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

typedef struct om_gpu_copy { /* elements of 1, 2, 4 or 8 bytes; total, dim, from, to count units of `unit` bytes */
    const char *src;
    char *dst;
    const om_gpu_fault *guard; /* write-backs: nothing is written behind a fault; else NULL */
    int64_t total, dim[OM_GPU_RANK], from[OM_GPU_RANK], to[OM_GPU_RANK];
    int32_t rank, size, unit, none;
} om_gpu_copy;

typedef struct om_gpu_flip { /* tiles: src runs along axis x, dst along axis y; z and w are outer axes */
    const char *src;
    char *dst;
    const om_gpu_fault *guard;
    int64_t n[4], from[4], to[4]; /* x, y, z, w */
    int32_t size, each;        /* each: elements that are read and written at once, 1 or 2 */
} om_gpu_flip;

/* Casts of so many dense tensors at most: blocks from first[i] on do n[i] elements, TILE each. None is empty. */
enum { OM_GPU_CASTS = 64, OM_GPU_CAST_TILE = 4096 };
typedef struct om_gpu_casts {
    const char *src[OM_GPU_CASTS];
    char *dst[OM_GPU_CASTS];
    int64_t n[OM_GPU_CASTS];
    uint32_t first[OM_GPU_CASTS];
    uint8_t from[OM_GPU_CASTS], to[OM_GPU_CASTS]; /* dtypes */
    uint32_t count, none;
} om_gpu_casts;

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
/* of 32 sums of a warp in shared memory: neighbouring columns lie in different banks */
enum { OM_GPU_COLUMNS_WIDTH = 34 };
/* y[o] over the kept axes (dense) = x reduced over the others; with parts > 1 into partial sums of the compute type */
typedef struct om_gpu_reduce {
    const char *x;
    char *y;
    int64_t outer, inner;      /* elements of y; elements of each reduced set */
    int64_t odim[OM_GPU_RANK], ostride[OM_GPU_RANK], idim[OM_GPU_RANK], istride[OM_GPU_RANK];
    int64_t part;              /* elements of a part */
    double scale;              /* MEAN: 1 / count, at the last step */
    int32_t orank, irank, what, xtype, ytype, parts;
    int32_t columns, none;     /* reduce_columns: of a thread, 1 or 4 or 16 bytes of them */
} om_gpu_reduce;

/* --- rows.cu ------------------------------------------------------------------------------------------- */

/* row.h: rows of so many elements have a warp each, so many a block; longer ones a block of at most so many threads */
enum { OM_GPU_ROW_WARP = 1024, OM_GPU_ROW_WARPS = 4, OM_GPU_ROW_THREADS = 512, OM_GPU_ROW_MOST = 1 << 30 };

typedef struct om_gpu_softmax { /* rows of n elements `step` apart; row r begins at r / step * n * step + r % step */
    const char *x, *y;         /* gradient: dy, y; else x */
    char *out;
    int64_t rows, n, step;
    int32_t log, grad;
} om_gpu_softmax;

typedef struct om_gpu_norm { /* rows of n, dense; y, and dy of a gradient, may be halves of f32 */
    const char *dy, *x, *w, *b;
    char *y, *mean, *rstd;      /* gradient: y is dx, mean and rstd are read; rms: no mean */
    char *partial;              /* gradient: [parts][2][n] sums of dw, db in the compute type, or NULL */
    char *dw, *db;
    int64_t rows, n, parts;
    double eps;
    int32_t rms, wtype, btype;
    int32_t type;               /* of y; of a gradient's dy */
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
    int32_t size, wide, site, unit; /* inner, strides: in units of so many bytes, as of om_gpu_copy */
} om_gpu_gather;

typedef struct om_gpu_elements { /* y (dense) = x at idx along one axis */
    const char *x, *idx;
    char *y;
    om_gpu_fault *fault;
    int64_t total, dim[OM_GPU_RANK], xs[OM_GPU_RANK], is[OM_GPU_RANK]; /* xs: 0 along the axis */
    int64_t n, step;           /* of x along the axis */
    int32_t rank, size, wide, site, shared; /* shared: an index serves many elements */
} om_gpu_elements;

typedef struct om_gpu_scatter { /* y (outer, n, inner) += dy (outer, m, inner) at idx, in the order of m */
    const char *dy, *idx;
    char *y;
    uint64_t *words;           /* scratch: {target, position}, as sort.cu sorts them; target n: none */
    double *sums;              /* scratch: [outer][parts][2][inner] sums of targets that more parts than one add */
    om_gpu_fault *fault;
    int64_t outer, n, m, inner, skip; /* skip: an index that is left out */
    int64_t place;                    /* positions that a fault names between two indices */
    int32_t wide, site, each, fresh;  /* each: elements of a thread; fresh: y is 0 */
} om_gpu_scatter;
enum { OM_GPU_SCATTER_PART = 32 }; /* sources that a block adds */

/* --- sort.cu ------------------------------------------------------------------------------------------- */

enum { OM_GPU_SORT_THREADS = 256, OM_GPU_SORT_TILE = 2048 };
typedef struct om_gpu_sort { /* n words by the 8 bits from `shift` on */
    const uint64_t *from;
    uint64_t *to;
    uint32_t *counts;          /* [tiles][256] */
    int64_t n, tiles;
    int32_t shift, none;
} om_gpu_sort;

/* --- gemm.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_gemm { /* c = a b (+ bias): any strides; batch over grid z, up to 4 merged axes */
    const char *a, *b, *bias;
    char *c;
    int64_t m, n, k, ra, ca, rb, cb, rc, cc, sbias;
    int64_t bdim[4], ba[4], bb[4], bc[4];
    int32_t brank, none;
} om_gpu_gemm;

/* y = x: rows of n elements, of which x has the first `given` (the rest are zeros). fill: what is left of the last 16
 * bytes of y's rows, which begin at multiples of that, becomes zeros. */
typedef struct om_gpu_rows {
    const char *x;
    char *y;
    int64_t rows, given, n, xrow, yrow; /* steps in elements */
    int32_t size, fill;                 /* bytes of an element */
} om_gpu_rows;

/* --- conv.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_conv { /* x (n, c, in), w (o, cg, k), y (n, o, out); og, cg: channels of a group, out and in */
    const char *x, *w, *bias, *dy;
    char *y, *dx, *dw, *db;
    int64_t n, c, o, cg, og;
    int64_t in[3], k[3], out[3], stride[3], lo[3], dil[3];
    int64_t taps, pixels, plane; /* products of k, out, in */
} om_gpu_conv;

/* What kernels may take of shared memory: attention, and where it is on tensor cores or in register tiles (every GPU
 * from sm_80 on gives a block 99 KB). */
enum { OM_GPU_SHARED = 64 << 10, OM_GPU_SHARED_MMA = 96 << 10, OM_GPU_MMA_CAPABILITY = 80 };

/* --- attention.cu -------------------------------------------------------------------------------------- */

typedef struct om_gpu_attention {
    const char *q, *k, *v, *mask, *dy, *y;
    const int64_t *kv_start, *kv_end;
    const uint8_t *frozen;
    char *out, *lse, *dq, *dk, *dv, *delta;
    uint32_t *bits; /* dropout's, drawn by a kernel of their own on tensor cores; NULL: each draws them */
    const om_gpu_scalars *scalars;
    /* strides: batch, head, time, feature */
    int64_t sq[4], sk[4], sv[4], sdy[4], sy[4], sout[4], sdq[4], sdk[4], sdv[4], smask[4], sfrozen[4];
    int64_t start_step, end_step, batch, hq, hk, tq, tk, d, dv_size, offset, window;
    uint64_t rng;
    double scale, drop_scale;
    uint32_t keep_below;
    int32_t causal, nan_rows, mask_kind /* 0 none, 1 bool, 2 float */, mask_type, drop;
    int32_t delta_rows;        /* of a warp of attention_delta: 1, or 16 and their numbers lie for 16-byte loads */
} om_gpu_attention;

typedef struct om_gpu_attention_mask { /* gradient of a mask that is added; strides 0 where it broadcasts */
    om_gpu_attention a;
    char *dmask;
    int64_t step[4];
    int32_t parts, none;       /* threads that share an element */
} om_gpu_attention_mask;

/* --- each.cu, lines.cu --------------------------------------------------------------------------------- */

/* Numbers of what a kernel computes. */
enum {
    OM_GPU_ACOS, OM_GPU_ASIN, OM_GPU_ATAN, OM_GPU_ACOSH, OM_GPU_ATANH, OM_GPU_TAN, OM_GPU_SINH, OM_GPU_COSH,
    OM_GPU_LGAMMA, OM_GPU_DIGAMMA, OM_GPU_TRIGAMMA, OM_GPU_ATAN2, OM_GPU_XLOGY
};
enum { OM_GPU_CUMPROD, OM_GPU_CUMPROD_GRAD, OM_GPU_LOGS, OM_GPU_LOGS_GRAD };

typedef struct om_gpu_special { const char *x, *y; char *out; int64_t n; int32_t what, dtype; } om_gpu_special;

typedef struct om_gpu_search { /* per value: how many of its row (dense) are before it */
    const char *sorted, *values;
    char *y;
    int64_t row, per_row, count; /* elements of a row; values that look into one; all values */
    int32_t dtype, right;
} om_gpu_search;

typedef struct om_gpu_cdist { /* x (items / rows, rows, m), y (items / rows, r, m), all dense; gradient: dx */
    const char *x, *y, *dd, *d;
    char *out;
    int64_t items, rows, r, m;
    double p;
} om_gpu_cdist;

/* Lines of `len` elements along one axis; the others are dim. Operands 0 to 2 are inputs, then outputs: strides over
 * dim, and `step` along the axis. */
typedef struct om_gpu_lines {
    const char *x[3];
    char *y[2];
    double *space; /* lines * len; topk: keys of k candidates and their places, per line; NULL: all are */
    int64_t lines, len, dim[OM_GPU_RANK], stride[5][OM_GPU_RANK], step[5];
    int64_t k;     /* of the largest */
    int32_t rank, dtype, what, exclusive, reverse, largest;
} om_gpu_lines;

/* --- scatter.cu ---------------------------------------------------------------------------------------- */

/* y op= src at idx along one axis; the other axes of idx are dim. Strides of y, idx, src, positions in a dense idx. */
typedef struct om_gpu_put {
    const char *idx, *src;
    char *y;
    om_gpu_fault *fault;
    int64_t lines, len, n, dim[OM_GPU_RANK], stride[4][OM_GPU_RANK], step[4];
    int32_t rank, dtype, size, wide, reduce, site; /* reduce: 0 set, 1 add, 2 max, 3 min */
} om_gpu_put;

/* Rows by tuples of k indices (dense): y (count, inner) = x at them, or y op= src (count, inner). */
typedef struct om_gpu_nd {
    const char *x, *idx;
    char *y;
    uint64_t *words;           /* scatter: {target, source}, as of om_gpu_scatter */
    om_gpu_fault *fault;
    int64_t count, k, inner, targets;
    int64_t limit[OM_GPU_RANK], step[OM_GPU_RANK];   /* of the k axes */
    int64_t dim[OM_GPU_RANK], stride[OM_GPU_RANK];   /* gather: of x's other axes */
    int32_t rank, dtype, size, wide, reduce, site;
} om_gpu_nd;

/* --- pool.cu ------------------------------------------------------------------------------------------- */

typedef struct om_gpu_pool { /* windows over the last axes of x (planes, in), one per element of y (planes, out) */
    const char *x, *dy;
    const int64_t *at;         /* max_pool_grad: positions in a plane */
    char *y;
    int64_t *idx;
    float *wide;               /* max_pool_grad of 16-bit floats: sums, as dx */
    om_gpu_fault *fault;
    int64_t planes, in_size, out_size, in[3], out[3], k[3], stride[3], pad[3], dil[3];
    int32_t adaptive, include_pad, site, none;
} om_gpu_pool;

/* --- batch_norm.cu ------------------------------------------------------------------------------------- */

/* One number per channel, of a type told at run time; steps in elements; data NULL: none is given. */
typedef struct om_gpu_channel { char *data; int64_t step; int32_t dtype, none; } om_gpu_channel;
typedef struct om_gpu_batch_norm { /* x (n, c, inner) */
    const char *x, *dy;
    char *y;                   /* or dx, which may lie where dy or x do */
    om_gpu_channel w, b, in_mean, in_var;        /* gradient: mean and rstd of the forward */
    om_gpu_channel new_mean, new_var, mean, rstd; /* gradient: dw, db */
    int64_t n, c, inner;
    double eps, momentum;
    int32_t batch, running;
} om_gpu_batch_norm;

/* --- grouped.cu ---------------------------------------------------------------------------------------- */

typedef struct om_gpu_grouped { /* g: of one group, its rows or (outer) its sums from ends[e - 1] to ends[e] */
    om_gpu_gemm g;
    const int64_t *ends;
    om_gpu_fault *fault;
    int64_t ends_step, groups, rows, per_a, per_b, per_c; /* per_*: steps to the next row, or matrix */
    int32_t outer, site;
} om_gpu_grouped;

/* --- bounded.cu ---------------------------------------------------------------------------------------- */

enum { OM_GPU_SELECT_THREADS = 256, OM_GPU_SELECT_TILE = 4096 };
typedef struct om_gpu_select { /* idx: where mask (n) is true, in order, then zeros */
    const uint8_t *mask;
    uint32_t *counts;          /* scratch: of each tile */
    int64_t *idx, *count;
    int64_t n, tiles;
    double most;
} om_gpu_select;

enum { OM_GPU_COMPRESS, OM_GPU_RESTORE, OM_GPU_TRIM };
/* Rows of `row` elements. COMPRESS: y (limit) = x (n) at idx, `past` behind the count; RESTORE: y (limit) at idx = x
 * (n); TRIM: y (outer, n) = x, zeros behind the count */
typedef struct om_gpu_counted {
    const char *x;
    const int64_t *idx, *count;
    char *y;
    om_gpu_fault *fault;
    int64_t outer, n, limit, row, past;
    int32_t what, size, site, none;
} om_gpu_counted;

/* --- recurrent.cu -------------------------------------------------------------------------------------- */

/* as ops/recurrent.h has them */
enum { OM_GPU_RELU, OM_GPU_TANH, OM_GPU_LSTM, OM_GPU_GRU };
/* One step of n samples with `size` units, all dense; of the compute type unless said */
typedef struct om_gpu_recurrent {
    const char *gx, *w, *b, *h; /* of the operands' type, so is y; h: of the step before, or h0 */
    const char *before;        /* of an LSTM the cells, of a GRU h of the step before; first: c0 and h0, of that type */
    char *y, *gates, *cells;
    char *wide;                /* h of a GRU; NULL: y is that */
    char *last;                /* the cells once more, in the operands' type; NULL: not the last step */
    int64_t n, size;
    int32_t kind, first;
} om_gpu_recurrent;
typedef struct om_gpu_recurrent_grad {
    const char *after;         /* dgh (dgx) of the step after this one; NULL: there is none */
    const char *dy, *w;        /* of the operands' type, so are h and dlast */
    const char *h, *dlast;     /* h: of an RNN this step's, of a GRU the one before; dlast: the first dc */
    const char *gates, *cells, *before; /* before: cells of the step before; first: c0, of the operands' type */
    char *dgx, *dgh;           /* of the operands' type */
    char *own, *dc;            /* scratch: GRU: what reaches the step before around the product; LSTM */
    char *dh0, *dc0;           /* behind all steps: of the operands' type; else NULL */
    int64_t n, size;
    int32_t kind, first;
} om_gpu_recurrent_grad;

/* --- ctc.cu -------------------------------------------------------------------------------------------- */

typedef struct om_gpu_ctc {    /* x (time, rows, classes); columns: entries with blanks, at most */
    const char *x, *dy;
    const int64_t *targets, *inputs, *lengths;
    const uint8_t *valid;
    int64_t *list, *begin;     /* scratch: targets that are valid; where each row's begin, then how many there are */
    double *alpha, *beta, *loss; /* scratch: per row, [time or 2][columns]; beta NULL: no gradient */
    uint32_t *next;            /* scratch, per row: what entry has the same class next; bit 31: one before has */
    char *y;
    om_gpu_fault *fault;
    int64_t time, rows, classes, bound, listed, blank, columns;
    int32_t dtype, zero, one_after_another, site;
} om_gpu_ctc;

/* --- update.cu ----------------------------------------------------------------------------------------- */

enum { OM_GPU_UPDATE_THREADS = 256, OM_GPU_UPDATE_BLOCKS = 512, OM_GPU_UPDATE_SHARED = 256 };
/* One group of an optimizer step, all dense: weight, gradient, moments. lr, step, flag and what else has one element
 * lie on the device; NULL: left out */
typedef struct om_gpu_update {
    const char *in[5], *lr, *scale, *norm; /* LAMB: and the narrow weight */
    char *out[5];              /* the same without the gradient; LAMB: with its change of the weight there */
    const int64_t *step;
    const uint8_t *flag;       /* false: results are operands */
    const om_gpu_fault *guard;
    double *sums;              /* LAMB: two of each block */
    int64_t n, blocks;
    double beta1, beta2, eps, weight_decay, max_norm, ratio_min, ratio_max;
    int32_t mode, bias_correction, in_type[5], lr_type, scale_type, norm_type;
} om_gpu_update;

/* sums: of squares and how many are not finite, per block; the last launch adds up those of all tensors */
typedef struct om_gpu_norm_all {
    const char *x;
    double *sums;
    char *y;
    int64_t n, blocks;
    int32_t dtype, finite;     /* of x, or of y; finite: y is whether all are */
} om_gpu_norm_all;

#endif
