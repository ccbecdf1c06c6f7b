/* cuda/optim.h - what the optimizer kernels on the GPU are given: one struct by value, everything else in device
 * memory.
 *
 * The table of spans (one per parameter) and of blocks is written when the list of pointers changes and stays on the
 * device; what changes from step to step (lr, step counters, grad_scale, found_inf) is read from device memory, so a
 * step can be captured in a CUDA graph and replayed, and nothing waits for the host. A grid has one thread block per
 * entry of `chunk`.
 */
#ifndef OM_CUDA_OPTIM_H
#define OM_CUDA_OPTIM_H

#if defined(__CUDACC_RTC__) /* the run-time compiler has no standard headers */
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#else
#include <stdint.h>
#endif

#include "optim/optim_math.h"

/* bytes of a table that one launch carries; all parameters of a kernel must stay below 4 KB */
enum { OM_GPU_UPLOAD = 3840 };
enum { OM_GPU_BLOCK = 16384, OM_GPU_THREADS = 256 };
/* om_cuda_lamb: elements of a ticket, pieces in a chunk */
enum { OM_GPU_PIECE = 4096, OM_GPU_PIECES = OM_GPU_BLOCK / OM_GPU_PIECE };
enum { OM_GPU_LAMB_BLOCKS = 3 }; /* that LAMB's kernels keep room for on a multiprocessor */
enum { OM_GPU_SWEEP2 = 0x7fffffff }; /* tickets above are of the second sweep */
enum { OM_GPU_F32, OM_GPU_BF16, OM_GPU_F16 };
enum { OM_GPU_NEAREST, OM_GPU_MASTER, OM_GPU_SPLIT, OM_GPU_STOCHASTIC }; /* as om_optim_store */

typedef struct om_gpu_span { /* one parameter; NULL = left out */
    int64_t n;
    void *p, *g, *m, *v, *w, *d;
    float *step;             /* counted up by om_cuda_count; SGD: there is no momentum before the first */
    uint64_t stream;         /* of random words; in lists of gradients 1 + the parameter's number, for messages */
    uint32_t first;          /* index of its first chunk */
    uint32_t first_piece;    /* pieces of the spans before it */
    uint8_t tp, tg, tm, tv, td, store;
    uint8_t aligned;         /* every pointer at a multiple of 16 bytes: vector loads */
} om_gpu_span;

/* elements [index, index + 1) * OM_GPU_BLOCK of the span */
typedef struct om_gpu_chunk { uint32_t span, index; } om_gpu_chunk;

typedef struct om_gpu_upload { /* om_cuda_upload */
    uint64_t *to;
    uint32_t n_word;
    uint64_t word[OM_GPU_UPLOAD / 8];
} om_gpu_upload;

enum { OM_GPU_LOG = 16 };
/* divisor: om_lamb_inv_scale; torch's formula, NaN where the norm is; the same, */
enum { OM_GPU_CLIP_LAMB, OM_GPU_CLIP_TORCH, OM_GPU_CLIP_FINITE };
                                                                  /* but nothing is clipped when the norm is not
                                                                   * finite */
/* Counters of FP16_Optimizer's scaled steps, in doubles: exact, and one float64 tensor for the host. */
/* param: -1 unknown; before, after: the scale */
typedef struct om_gpu_overflow { double step, param, before, after, row; } om_gpu_overflow;
typedef struct om_gpu_steps {
    double done, skipped;
    double row;      /* overflows in a row */
    double overflow; /* 1: the last step was left out */
    om_gpu_overflow log[OM_GPU_LOG]; /* overflow k lies at k % OM_GPU_LOG */
} om_gpu_steps;

typedef struct om_gpu_scaling { /* om_cuda_loss_scale */
    om_loss_scale *scaler;
    om_gpu_steps *steps;
    const float *stop, *first; /* as om_cuda_norm_finish wrote them */
    double window, lowest, highest;
    int automatic;             /* 0: the scale is constant */
} om_gpu_scaling;

typedef struct om_gpu_optim {
    om_gpu_span *span;
    om_gpu_chunk *chunk;
    uint32_t n_span, n_chunk;
    const float *lr;         /* NULL: the configuration's */
    const float *grad_scale; /* gradients are that many times too large; NULL: 1 */
    const float *found_inf;  /* non-zero: the step does nothing; NULL: never */
    uint64_t seed;           /* STOCHASTIC: of step 0; every step adds OM_GPU_SEED_STEP */
    om_adam_cfg adam;
    om_sgd_cfg sgd;
    om_lamb_cfg lamb;
    double *part;            /* 2 per chunk */
    double *rate;            /* per span */
    uint8_t *skipped;        /* per chunk */
    /* om_cuda_lamb. Piece k of a span has the number OM_GPU_PIECES * first + k; part and skipped are then per piece. */
    uint32_t *item;          /* per ticket: its piece, + OM_GPU_SWEEP2 + 1 in the second sweep */
    uint32_t *done;          /* per span: pieces that are through the first sweep; one more when its rate is known */
    uint32_t *ticket;        /* the next one */
    uint32_t lag;            /* pieces of later spans between the two sweeps of a span */
    /* om_cuda_norm_finish */
    double div;              /* the gradients' divisor known to the host; grad_scale multiplies it */
    double max_norm;         /* > 0: scale_out clips as well */
    int clip;                /* OM_GPU_CLIP_... */
    float *norm_out;         /* norm of the unscaled gradients */
    float *stop_out;         /* 1 when found_inf is set or the norm is not finite, else 0 */
    float *scale_out;        /* divisor of the gradients: div * grad_scale, enlarged when clipping */
    float *first_out;        /* stream - 1 of the first span with an inf or NaN, -1 when there is none */
    uint8_t write_weights, keep_grads;
    double a, b;             /* om_cuda_axpby: p = a g + b p */
} om_gpu_optim;
#define OM_GPU_SEED_STEP 0x9E3779B97F4A7C15ull
#endif
