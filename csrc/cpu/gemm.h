/* gemm.h - C = alpha * A B + beta * C + bias, any strides, batched: the one door to matrix products.
 *
 * Two providers: the engine's packed kernels (kernels/gemm.k.c, gemm_bf16.k.c, gemm_amx.k.c) and the BLAS of the host
 * process. Which one runs, and how the work is cut, depends only on sizes, strides' form, dtype and instruction set,
 * never on values or timing, and the sums run in one order whatever the number of threads: same inputs, same bits. So
 * both are decided once per plan (om_gemm_prepare); om_gemm_run is given addresses and starts.
 */
#ifndef OM_GEMM_H
#define OM_GEMM_H

#include "graph/engine.h"
#include "graph/half.h"
#include "cpu/kernels_isa.h"

/* Many products: an odometer of axes, the last one running fastest. Strides in elements. */
typedef struct om_gemm_axis { int64_t n, a, b, c; } om_gemm_axis;

typedef struct om_gemm_args {
    int dtype;                       /* of A, B, C and bias: f32, f64, bf16, f16; sums run in om_compute_dtype */
    bool wide_c;                     /* C and bias are of the type of the sums */
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
    int64_t batch;                   /* how many products: of the axes' n; without axes they lie in one place */
    int n_axis;
    const om_gemm_axis *axis;
    /* om_gemm_how.scratch bytes, 64-byte aligned; NULL: taken from and given back to the context */
    void *scratch;
    const void *packed;              /* NULL, or B as om_gemm_pack has laid it out: b is not read */
} om_gemm_args;

/* Who computes it, and what is computed: sizes after the choice of orientation, blocks, workers. A pure function of the
 * arguments' form and the number of threads; of these `workers`, `group_rows` and the parts depend on the threads, and
 * they do not change any sum. A run may have fewer threads than are counted on here. */
typedef struct om_gemm_how {
    uint8_t provider;
    bool swap, narrow, per_product, few; /* few: many products of a few numbers each */
    char ta, tb;                     /* the host's: how it sees A and B, */
    int lda, ldb, ldc;               /* and their leading dimensions */
    int workers;
    const struct om_gemm_type *t;
    int64_t m, n, k, block_rows, block_k, group_rows, pack_size, work_size;
    int64_t part_rows, part_cols;    /* of the parts that workers compute by themselves (per_product); else m and n */
    int64_t slices, slice_size;      /* of k that are summed apart, each into so many bytes; 0: none are */
    int64_t ld_acc, acc_size;        /* of the floats that wait between blocks of k (om_gemm_job.acc); 0: none do */
    int64_t scratch;                 /* bytes om_gemm_run wants */
} om_gemm_how;

/* Reads sizes, strides, dtype and batch, and whether there is a bias; no operand needs memory yet. */
om_status om_gemm_prepare(om_ctx *cx, const om_gemm_args *a, om_gemm_how *how);
om_status om_gemm_run(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *how);
om_status om_gemm(om_ctx *cx, const om_gemm_args *a); /* both */

/* One B for many products of one form (a recurrent layer's weights): packed once. Bytes, 0 where that is of no use;
 * `to` is 64-byte aligned. The products have the same bits. */
int64_t om_gemm_packed_size(const om_gemm_how *how);
void om_gemm_pack(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *how, void *to);

enum { OM_HOST_NEVER = -1, OM_HOST_MAY, OM_HOST_ALWAYS };
int om_gemm_host(void); /* ORTMODULE_GEMM, for who else asks the host to multiply */

/* A row-major operand (rows, cols) as BLAS sees it: column-major and transposed. Fills 'N' and ld when rows are
 * contiguous, 'T' when columns are; false: neither. */
bool om_gemm_operand(int64_t rows, int64_t cols, int64_t rs, int64_t cs, char *trans, int *ld);

/* --- inside: what gemm.c and the kernel share ------------------------------------------------------ */

typedef struct om_gemm_job {         /* one product whose A fits its packed form */
    int dtype;                       /* of A and B; of C and bias unless wide_c */
    bool wide_c;
    int64_t m, n, k;
    const void *a, *b, *bias;
    void *c;
    int64_t rsa, csa, rsb, csb, rsc, csc;
    double alpha;
    int beta;
    /* packed A: panels of mr rows, each (k, mr), om_gemm_type.panel_size elements apart */
    void *pa;
    const void *pb;                  /* packed B, or NULL: blocks of columns, the kc deep slices of each together */
    /* bf16 as bf16, cut along k: where the sums of C wait as floats, ld_acc for a row, in the order that a kernel
     * likes; what other blocks of k do */
    float *acc;
    int64_t ld_acc;
    bool more_before, more_after;
    bool past;                       /* all of C is larger than a core's own cache: it may be stored past the caches */
} om_gemm_job;

typedef struct om_gemm_type {        /* one compute type of one instruction set */
    /* rows of a packed panel of A; columns and depth of a packed block of B; bytes of a packed element: of the compute
     * type, 2 when bf16 stays bf16 */
    int mr, cols, kc, elem;
    int slack;                       /* elements after a packed panel that packing may overwrite */
    bool even;                       /* C is not cut by rows where as many blocks of columns fall on every worker */
    void (*pack_a)(const om_gemm_job *g, int64_t panel0, int64_t panel1);
    /* C[row0:row1, col0:col1]; row0 a multiple of mr, at most `cols` columns. next: the column from which this worker
     * will likely go on, -1 where it will not: a hint for the caches. `work`: kc * cols elements, then
     * (row1 - row0) * cols of the compute type when C is stored narrower (bf16 as bf16: when k > kc, without acc). */
    void (*block)(const om_gemm_job *g, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t next,
                  void *work);
    /* Of packed B (om_gemm_job.pb) the blocks of columns from block0 to block1; NULL on tiles. */
    void (*pack_b)(const om_gemm_job *g, void *to, int64_t block0, int64_t block1);
    /* C[row0:row1] from the sums of kc deep slices, `slice` elements apart, each (m, n) dense: what `block` makes of
     * all of them, to the bit. NULL where elements are packed as 16 bits. */
    void (*join)(const om_gemm_job *g, const void *sums, int64_t slice, int64_t slices, int64_t row0, int64_t row1);
    /* `count` products, sa, sb, sc elements apart, without packing. NULL where elements are packed as 16 bits. */
    void (*few)(const om_gemm_job *g, int64_t count, int64_t sa, int64_t sb, int64_t sc);
} om_gemm_type;

typedef struct om_gemm_kernels { om_gemm_type f32, f64; } om_gemm_kernels;
OM_DECLARE_ISA(om_gemm_kernels, om_gemm_isa);
OM_DECLARE_ISA(om_gemm_type, om_gemm_bf16); /* where om_isa_bf16 has OM_BF16_DOT */
OM_DECLARE_ISA(om_gemm_type, om_gemm_amx);  /* where om_isa_tiles; no `block` where the compiler has no tiles */

static inline int64_t om_gemm_panel_size(const om_gemm_type *t, int64_t k) {
    return (k * t->mr + t->slack + 15) & ~(int64_t)15;
}

/* Of bf16 as bf16: the bias of the columns from col0 on, as floats; past `width` any number. */
static inline void om_gemm_bias(const om_gemm_job *g, int64_t col0, int64_t width, int64_t cols, float *to) {
    for (int64_t j = 0; j < cols; j++) {
        const int64_t at = col0 + (j < width ? j : 0);
        to[j] = g->wide_c ? ((const float *)g->bias)[at] : om_bf16_to_f32(((const uint16_t *)g->bias)[at]);
    }
}

/* Packed B: how deep a slice of a block of columns is laid out (whole pairs), and elements of a block. */
static inline int64_t om_gemm_depth(int64_t k, int64_t kc) { return k < kc ? (k + 1) & ~(int64_t)1 : kc; }
static inline int64_t om_gemm_block_size(int64_t k, int64_t kc, int64_t cols) {
    return (k + kc - 1) / kc * om_gemm_depth(k, kc) * cols;
}

#endif
