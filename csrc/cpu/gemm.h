/* gemm.h - C = alpha * A B + beta * C + bias, any strides, batched: the one door to matrix products.
 *
 * Two providers: the engine's packed kernel (kernels/gemm.k.c) and the BLAS of the host process. Which one runs, and
 * how the work is cut, depends only on sizes, strides' form, dtype and instruction set, never on values or timing, and
 * the sums run in one order whatever the number of threads: same inputs, same bits.
 */
#ifndef OM_GEMM_H
#define OM_GEMM_H

#include "graph/engine.h"
#include "cpu/kernels_isa.h"

typedef struct om_gemm_args {
    int dtype;                       /* of A, B, C and bias: f32, f64, bf16, f16; sums run in om_compute_dtype */
    int64_t m, n, k;                 /* any may be 0; k = 0 gives beta * C + bias */
    const void *a;                   /* (m, k) */
    int64_t rsa, csa;                /* strides in elements, any value including 0 and negative */
    const void *b;                   /* (k, n) */
    int64_t rsb, csb;
    void *c;                         /* (m, n), overlapping neither A nor B */
    int64_t rsc, csc;
    double alpha;
    int beta;                        /* 0: C is only written (it may hold NaN); 1: C is added to */
    const void *bias;                /* (n), added once; NULL = none */
    int64_t batch;                   /* how many products */
    const int64_t *off_a, *off_b, *off_c; /* per product: offset in elements; NULL = all 0 */
    /* om_gemm_scratch bytes, 64-byte aligned; NULL: taken from and given back to the context */
    void *scratch;
} om_gemm_args;

om_status om_gemm(om_ctx *cx, const om_gemm_args *a);

/* Bytes om_gemm wants; reads sizes, strides, dtype and batch only. */
int64_t om_gemm_scratch(om_ctx *cx, const om_gemm_args *a);

/* --- inside: what gemm.c and the kernel share ------------------------------------------------------ */

typedef struct om_gemm_job {         /* one product whose A fits its packed form */
    int dtype;
    int64_t m, n, k;
    const void *a, *b, *bias;
    void *c;
    int64_t rsa, csa, rsb, csb, rsc, csc;
    double alpha;
    int beta;
    /* packed A: panels of mr rows, each (k, mr), om_gemm_type.panel_size elements apart */
    void *pa;
} om_gemm_job;

typedef struct om_gemm_type {        /* one compute type of one instruction set */
    /* rows of a packed panel of A; columns and depth of a packed block of B; bytes of the compute type */
    int mr, cols, kc, elem;
    int slack;                       /* elements after a packed panel that packing may overwrite */
    void (*pack_a)(const om_gemm_job *g, int64_t panel0, int64_t panel1);
    /* C[row0:row1, col0:col1]; row0 a multiple of mr, at most `cols` columns. `work`: kc * cols elements, then
     * (row1 - row0) * cols when C is stored narrower than the compute type. */
    void (*block)(const om_gemm_job *g, int64_t row0, int64_t row1, int64_t col0, int64_t col1, void *work);
} om_gemm_type;

typedef struct om_gemm_kernels { om_gemm_type f32, f64; } om_gemm_kernels;
OM_DECLARE_ISA(om_gemm_kernels, om_gemm_isa);

static inline int64_t om_gemm_panel_size(const om_gemm_type *t, int64_t k) {
    return (k * t->mr + t->slack + 15) & ~(int64_t)15;
}

#endif
