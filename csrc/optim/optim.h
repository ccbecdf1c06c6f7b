/* optim.h - multi-tensor optimizer steps, norms and scaling over lists of tensors.
 *
 * One call handles a whole parameter list: the tensors are cut into blocks of OM_OPTIM_BLOCK elements, one parallel_for
 * runs over all blocks of all tensors, so a thousand tiny tensors and one huge one load the threads alike. Sums are
 * kept per block and added in block order: results do not depend on the number of threads.
 *
 * Element types. Arithmetic is in f32, whatever the storage (f32, bf16, f16), each tensor of a parameter with its own
 * type; f64 parameters need f64 everywhere and are computed in f64. Weights are stored in one of four ways
 * (om_optim_store).
 *
 * Layout. The tensors of one parameter have the same sizes. Any dense layout (channels-last, transposed) works in place
 * when they share it; a tensor in another layout goes through a temporary copy. Sizes are 64-bit; empty tensors are
 * skipped.
 */
#ifndef OM_OPTIM_H
#define OM_OPTIM_H

#include "graph/engine.h"
#include "optim/optim_math.h"

enum { OM_OPTIM_BLOCK = 16384 };

typedef enum om_optim_store {
    OM_STORE_NEAREST,    /* weights are p itself, rounded to its type */
    OM_STORE_MASTER,     /* weights are the f32 tensor w; p is its rounded copy, written only */
    /* p bf16, w i16: the f32 weight's bits are (p << 16) + w; 4 bytes hold an exact f32 weight and its bf16 */
    OM_STORE_SPLIT,
    OM_STORE_STOCHASTIC, /* p bf16, rounded up or down at random so that the expectation is exact; no second copy */
} om_optim_store;

/* One parameter of a step. Left-out tensors have dtype OM_NODTYPE. */
typedef struct om_optim_param {
    om_tensor p, g;   /* weight (written), gradient (read; LAMB writes it: see om_lamb_step) */
    om_tensor m, v;   /* first and second moment; SGD: m = momentum, or left out */
    om_tensor w;      /* MASTER: f32, SPLIT: i16 */
    /* LAMB only: the change of the weight is written here; p may then be read only (see om_lamb_step) */
    om_tensor d;
    double step;      /* 1-based number of this update; <= 0: no bias correction (SGD: <= 1 = no momentum yet) */
    uint64_t stream;  /* STOCHASTIC: random stream of this tensor */
} om_optim_param;

om_status om_adam_step(om_ctx *cx, const om_adam_cfg *c, om_optim_store store, uint64_t seed, om_optim_param *ps,
                       int n);
om_status om_sgd_step(om_ctx *cx, const om_sgd_cfg *c, om_optim_store store, uint64_t seed, om_optim_param *ps, int n);
/* cfg: one per parameter. write_weights false: only d is written (and the moments). An element whose direction is not
 * finite keeps its weight and moments. Gradients of the computing type become the direction (0 where skipped), as in
 * Apex and ONNX Runtime, unless keep_grads; others keep their values, except NaN where skipped. */
om_status om_lamb_step(om_ctx *cx, const om_lamb_cfg *cfg, om_optim_store store, uint64_t seed, bool write_weights,
                       bool keep_grads, om_optim_param *ps, int n);

/* Norm over all elements of all tensors; ord: 2, 1, INFINITY, or any positive number. *finite: no element is inf or NaN
 * (whatever the norm does). per_tensor: n norms, or NULL. Accumulates in f64, so f32 gradients never overflow the
 * sum. */
om_status om_norm(om_ctx *cx, const om_tensor *x, int n, double ord, double *norm, bool *finite, double *per_tensor);

/* dst[i] = scale * src[i], with conversion; src NULL: in place. The tensors of a pair have the same sizes. */
om_status om_scale(om_ctx *cx, om_tensor *dst, const om_tensor *src, int n, double scale);
/* dst[i] = a * src[i] + b * dst[i] */
om_status om_axpby(om_ctx *cx, om_tensor *dst, const om_tensor *src, int n, double a, double b);

/* --- the kernels behind it (kernels/optim.k.c): one run of elements of one parameter ------------- */
typedef struct om_optim_span {
    int64_t n, index;        /* elements; index of the first in its tensor */
    void *p, *g, *m, *v, *w, *d; /* at the first element; NULL = left out */
    uint8_t tp, tg, tm, tv, td, store;
    uint64_t seed, stream;
} om_optim_span;

/* LAMB's second sweep: w -= rate * direction, taken from g (grad_out) or else computed again from w, m, v */
typedef struct om_lamb_move {
    double rate;
    bool grad_out, write_weights;
    bool skipped; /* the span has elements marked by a NaN gradient (not with grad_out) */
    bool bounded; /* no weight can become inf or NaN: known from the norms, so the elements need not be looked at */
} om_lamb_move;

struct om_optim_kernels {
    void (*adam_f32)(const om_optim_span *s, const om_adam_f32 *k);
    void (*adam_f64)(const om_optim_span *s, const om_adam_f64 *k);
    void (*sgd_f32)(const om_optim_span *s, const om_sgd_f32 *k);
    void (*sgd_f64)(const om_optim_span *s, const om_sgd_f64 *k);
    /* Updates the moments; grad_out: g (then of the computing type) becomes the direction. sum[0] = sum of w^2, sum[1]
     * = sum of d^2; true when an element was skipped. */
    bool (*lamb_direction_f32)(const om_optim_span *s, const om_lamb_f32 *k, bool grad_out, double sum[2]);
    bool (*lamb_direction_f64)(const om_optim_span *s, const om_lamb_f64 *k, bool grad_out, double sum[2]);
    void (*lamb_update_f32)(const om_optim_span *s, const om_lamb_f32 *k, const om_lamb_move *u);
    void (*lamb_update_f64)(const om_optim_span *s, const om_lamb_f64 *k, const om_lamb_move *u);
    double (*sum_squares)(int dtype, const void *x, int64_t n);
    double (*sum_powers)(int dtype, const void *x, int64_t n, double ord); /* sum |x|^ord */
    double (*max_abs)(int dtype, const void *x, int64_t n);                /* NaN if any element is */
    void (*axpby)(int dst_dtype, void *dst, int src_dtype, const void *src, int64_t n, double a, double b);
};

#endif
