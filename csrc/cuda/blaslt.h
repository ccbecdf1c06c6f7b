/* cuda/blaslt.h - matrix products by cuBLASLt: the copy that the process has loaded (torch brings one), found by dlopen
 * when a device is opened; never linked and never loaded for its own sake. Without one, and for what it refuses, the
 * engine's own kernel (gemm.cu).
 *
 * A product is prepared once per call of a plan: layouts, and the algorithm that the library proposes first. The choice
 * depends on sizes, layouts, dtype and library alone and is kept by them in a table of the process: the same bits every
 * time, also when a plan is made anew. A run fills in addresses; it allocates nothing, the workspace is the plan's.
 *
 * The library sees columns where the engine sees rows: it is asked for (A B)^T = B^T A^T. Sums are f32 (f64 for f64);
 * f32 operands are cut to TF32 only where om_cuda_tf32 allowed it on the calling thread; parts of a sum are put
 * together in the type they are computed in, which is f32's own (cut in no way, its products for gradients of weights
 * leave most of a GPU without work: 487 us of H200 where 77 suffice).
 */
#ifndef OM_CUDA_BLASLT_H
#define OM_CUDA_BLASLT_H

#include "cuda/queue.h"

/* Row-major as the engine sees it; no padding between the fields: it is a key. */
typedef struct om_lt_shape {
    int32_t ordinal, dtype;
    int32_t ta, tb;            /* 1: columns are contiguous */
    int32_t bias, lda, ldb, ldc;
    int64_t m, n, k;
    int64_t batch, a, b, c;    /* products, and what lies between two of them in elements */
    int64_t space;             /* bytes of workspace that there are */
} om_lt_shape;

typedef struct om_lt_product om_lt_product;

/* A launch's parameters; space is rounded up to OM_LT_ALIGN. */
enum { OM_LT_ALIGN = 256 };
typedef struct om_lt_at { const char *a, *b, *bias; char *c, *space; } om_lt_at;

bool om_lt_open(void);  /* looks for the library, once */
bool om_lt_present(void);
bool om_cuda_tf32_now(void); /* what om_cuda_tf32 has said on this thread */
/* *out is NULL where the library refuses. The device's context is current. */
om_status om_lt_prepare(om_ctx *cx, om_gpu *g, om_arena *mem, const om_lt_shape *s, const om_lt_product **out);
om_status om_lt_run(om_ctx *cx, om_gpu *g, const om_lt_product *p, const om_lt_at *at);

/* --- the library's interface (tests/cuda/lt_check.c compares it with cublasLt.h) ------------------------------- */

typedef int om_lt_result;
typedef struct om_lt_choice {
    uint64_t algo[8];
    size_t space;
    om_lt_result state;
    float waves;
    int reserved[4];
} om_lt_choice;

#define OM_LT_API(X)                                                                                               \
    X(create, cublasLtCreate, (void **))                                                                           \
    X(status_name, cublasLtGetStatusName, (om_lt_result))                                                          \
    X(layout_init, cublasLtMatrixLayoutInit_internal, (void *, size_t, int, uint64_t, uint64_t, int64_t))          \
    X(layout_set, cublasLtMatrixLayoutSetAttribute, (void *, int, const void *, size_t))                           \
    X(desc_init, cublasLtMatmulDescInit_internal, (void *, size_t, int, int))                                      \
    X(desc_set, cublasLtMatmulDescSetAttribute, (void *, int, const void *, size_t))                               \
    X(wish_init, cublasLtMatmulPreferenceInit_internal, (void *, size_t))                                          \
    X(wish_set, cublasLtMatmulPreferenceSetAttribute, (void *, int, const void *, size_t))                         \
    X(choose, cublasLtMatmulAlgoGetHeuristic,                                                                      \
      (void *, void *, void *, void *, void *, void *, void *, int, om_lt_choice *, int *))                        \
    X(multiply, cublasLtMatmul,                                                                                    \
      (void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *, void *, \
       void *, void *, const void *, void *, size_t, om_cu_stream))

enum { /* of cublasLt.h and library_types.h */
    OM_LT_OK = 0, OM_LT_ALLOC_FAILED = 3, OM_LT_ARCH_MISMATCH = 8, OM_LT_NOT_SUPPORTED = 15,
    OM_LT_R_32F = 0, OM_LT_R_64F = 1, OM_LT_R_16F = 2, OM_LT_R_16BF = 14,
    OM_LT_COMPUTE_32F = 68, OM_LT_COMPUTE_64F = 70, OM_LT_COMPUTE_TF32 = 77,
    OM_LT_LAYOUT_BATCH = 5, OM_LT_LAYOUT_STRIDE = 6,
    OM_LT_DESC_TRANSA = 3, OM_LT_DESC_TRANSB = 4, OM_LT_DESC_EPILOGUE = 7, OM_LT_DESC_BIAS = 8,
    OM_LT_EPILOGUE_BIAS = 4,
    OM_LT_WISH_SPACE = 1, OM_LT_WISH_REDUCTION = 3, OM_LT_WISH_ALIGN_A = 5, /* B, C, D follow */
    OM_LT_REDUCTION_COMPUTE_TYPE = 2, OM_LT_REDUCTION_ANY = 7 /* 1: in place, in turn; 4: in the type of C */
};
#endif
