/* ortmodule.h - the public face of the engine: load a training graph, plan it, run it.
 *
 * Life of a step (see docs/ARCHITECTURE.md for the picture):
 *
 *     om_model_load      ONNX bytes -> forward graph, simplified                      once per capture
 *     om_model_variant   + gradients for the wanted inputs, given which outputs
 *                          will receive a gradient                                    once per (wanted, arriving) set
 *     om_plan_get        + concrete sizes -> order, storage, kernel calls             once per shape, milliseconds,
 *                        cached
 *     om_run_*           one forward, one backward                                    every step
 *
 * Errors: every function that can fail returns om_status; the first failure leaves a sentence with
 * operator, what was given, what is allowed and the remedy in the context (om_ctx_message).
 * Nothing here exits, aborts or longjmps.
 *
 * Threads: an om_model may be used from several threads at once (om_plan_get locks); an om_ctx and an
 * om_run belong to one thread at a time.
 */
#ifndef ORTMODULE_H
#define ORTMODULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One row per status: name, sentence. */
#define OM_STATUS_MAP(X)                                                                            \
    X(OK, "ok")                                                                                     \
    X(NOMEM, "out of memory")                                                                       \
    X(INVALID, "invalid argument or malformed input")                                               \
    X(UNSUPPORTED, "valid, but the engine has no kernel or rule for it")                            \
    X(HOST, "stopped at a host node: do it, then resume")                                           \
    X(INTERNAL, "a bug in the engine")

typedef enum om_status {
#define X(name, text) OM_##name,
    OM_STATUS_MAP(X)
#undef X
} om_status;

const char *om_status_text(om_status s);

/* Element types: name, ONNX TensorProto.DataType, bytes. OPAQUE = an object only the host understands. */
#define OM_DTYPE_MAP(X)                                                                             \
    X(NODTYPE, none, 0, 0)                                                                          \
    X(F32, f32, 1, 4) X(F64, f64, 11, 8) X(BF16, bf16, 16, 2) X(F16, f16, 10, 2)                     \
    X(I64, i64, 7, 8) X(I32, i32, 6, 4) X(I16, i16, 5, 2) X(I8, i8, 3, 1) X(U8, u8, 2, 1)            \
    X(BOOL, bool, 9, 1) X(OPAQUE, opaque, 0, 0)

typedef enum om_dtype {
#define X(NAME, name, onnx, bytes) OM_##NAME,
    OM_DTYPE_MAP(X)
#undef X
    OM_N_DTYPES
} om_dtype;

enum { OM_RANK = 8 }; /* most dimensions a tensor may have */

/* A tensor at run time. Strides in elements; data may be NULL only when it has no element. */
typedef struct om_tensor {
    void *data;
    int64_t dim[OM_RANK], stride[OM_RANK];
    uint8_t dtype, rank;
    int16_t device; /* -1 CPU, 0.. CUDA ordinal */
} om_tensor;

/* What the engine asks of its host. Every entry may be NULL unless said otherwise: then the built-in
 * (malloc, one thread, own kernels, silence) is used. All entries may be called from any thread. */
typedef struct om_services {
    void *user;                                                        /* passed back as first argument */
    void *(*alloc)(void *user, size_t size);                           /* 64-byte aligned; NULL on failure */
    void (*free)(void *user, void *p, size_t size);
    /* Calls fn(arg, begin, end) over disjoint pieces of [0, n), each at least `grain` long but the last,
     * from any number of threads, and returns when all are done. No promise of concurrency. */
    void (*parallel_for)(void *user, int64_t n, int64_t grain, void (*fn)(void *arg, int64_t begin, int64_t end),
                         void *arg);
    int (*num_threads)(void *user);
    /* Fortran BLAS of the host process, column-major, LP64 (reference BLAS interface). */
    void (*sgemm)(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha,
                  const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c,
                  const int *ldc);
    void (*dgemm)(const char *ta, const char *tb, const int *m, const int *n, const int *k, const double *alpha,
                  const double *a, const int *lda, const double *b, const int *ldb, const double *beta, double *c,
                  const int *ldc);
    /* C (m, n) = A (m, k) B (k, n) + beta C + bias (n, or NULL) in bf16 with sums in f32, for processors that multiply
     * bf16 natively (the engine's own kernels widen it to f32). Strides in elements, rows or columns of each
     * contiguous. False: not done, C is untouched. */
    bool (*gemm_bf16)(void *user, int64_t m, int64_t n, int64_t k, const void *a, int64_t rsa, int64_t csa,
                      const void *b, int64_t rsb, int64_t csb, int beta, void *c, int64_t rsc, const void *bias);
    void (*log)(void *user, int level, const char *text);              /* level 0 error .. 3 debug */
} om_services;

typedef struct om_ctx om_ctx;     /* services + error message + counters */
typedef struct om_model om_model; /* a captured graph and everything derived from it */
typedef struct om_plan om_plan;   /* one variant for one set of sizes; owned by its model */
typedef struct om_run om_run;     /* one forward or one backward in progress */

om_ctx *om_ctx_new(const om_services *services); /* NULL services = built-ins; NULL result = no memory */
void om_ctx_free(om_ctx *cx);
const char *om_ctx_message(const om_ctx *cx); /* "" when nothing failed since om_ctx_clear */
void om_ctx_clear(om_ctx *cx);

/* --- model ------------------------------------------------------------------------------------ */

/* Reads an ONNX ModelProto (bytes are not kept) and simplifies it. Broken bytes give OM_INVALID with the
 * byte offset or node and the reason. */
om_status om_model_load(om_ctx *cx, const void *onnx, size_t size, om_model **out);
void om_model_free(om_ctx *cx, om_model *m);

/* What backward computes again instead of keeping it (csrc/passes/remat_choose.c). The gradients have the same bits. */
typedef enum om_recompute {
    OM_RECOMPUTE_CHEAP,  /* memory level 0: what costs one sweep over memory */
    OM_RECOMPUTE_LAYERS, /* memory level 1: whole transformer layers as well, each from its input */
    OM_N_RECOMPUTE
} om_recompute;

/* Text of a graph: variant < 0 is the forward graph; caller frees with om_text_free. */
om_status om_model_text(om_ctx *cx, const om_model *m, int variant, char **text);
void om_text_free(om_ctx *cx, char *text);

/* Builds (or finds) the joint forward + backward graph.
 *   wanted    one byte per graph input: non-zero = its gradient is returned (all zero: forward only)
 *   arriving  one byte per user output: non-zero = backward will be given its gradient
 *   group     one int per graph input, or NULL: backward segment in which its gradient must be complete
 *             (0 = first to finish); NULL = one segment.
 *   again     what backward computes again
 * Others of these are another variant beside the first. *variant is small and stable for the life of the model. */
om_status om_model_variant(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, const int *group,
                           om_recompute again, int *variant);

/* Concrete sizes come from the tensors given for the graph inputs (data is not read, except 0-d integer
 * inputs that name a size). Checks dtype and rank against the capture. */
om_status om_plan_get(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, om_plan **plan);

/* Ends the use of a plan that om_plan_get (or om_model_plan_by_serial, om_model_plans) has given; once each. It may
 * stay cached. */
void om_plan_release(om_model *m, om_plan *plan);

/* --- run: csrc/run/plan.h holds the contract of memory and control --------------------------------- */

#ifdef __cplusplus
}
#endif
#endif
