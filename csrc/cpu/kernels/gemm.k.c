/* gemm.k.c - the packed matrix product of one instruction set: packing of A, and one block of columns of C.
 *
 *   pack A once       panels of MR rows, k-major: the micro-kernel broadcasts MR consecutive numbers per step
 *   per column block  for each KC slice of k: pack B's slice into the worker's L2 as panels of NR columns; for each
 *                     panel of A and each panel of B: MR x NR products in registers, added into C
 * Packing takes any strides and any storage type (bf16 and f16 become f32 here); where k is contiguous it transposes
 * VL x VL blocks in registers. C narrower than the compute type is summed in a private f32 block and rounded once.
 * Slices of k are added in order, also where they are summed apart (join), so each element is one fixed chain of sums
 * however the work is divided among threads.
 */
#include "cpu/gemm.h"

/* A part of B that will be packed soon: rows of bytes, fetched into L2 a few lines before each tile. Without that
 * packing waits for memory, which is a twelfth of a product of 512 rows with a transposed B. */
typedef struct ahead { const char *row; int64_t step, rows, bytes, at, lines; } ahead;

static ahead ahead_of(const om_gemm_job *g, int64_t k, int64_t kc, int64_t col, int64_t cols, int64_t tiles) {
    const int64_t es = (int64_t)om_dtype_size(g->dtype);
    const bool deep = g->rsb == 1; /* contiguous along k */
    if (kc <= 0 || cols <= 0 || !(deep || g->csb == 1)) return (ahead){0};
    ahead a = {.row = (const char *)g->b + (k * g->rsb + col * g->csb) * es};
    a.rows = deep ? cols : kc, a.bytes = (deep ? kc : cols) * es, a.step = (deep ? g->csb : g->rsb) * es;
    a.lines = (a.rows * (a.bytes / 64 + 1) + tiles - 1) / tiles;
    return a;
}

static inline void ahead_fetch(ahead *a) {
    for (int64_t i = 0; i < a->lines && a->rows > 0; i++) {
        __builtin_prefetch(a->row + a->at, 0, 2);
        if ((a->at += 64) >= a->bytes) a->at = 0, a->row += a->step, a->rows--;
    }
}

#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/gemm_type.h"
#undef OM_VEC_BITS
#define OM_VEC_BITS 64
#include "cpu/kernels/vec.h"
#include "cpu/kernels/gemm_type.h"

#define GEMM_TYPE(suf, type)                                                                        \
    {.mr = OM_MR, .cols = GEMM_WIDTH * OM_NV * (int)(OM_VBYTES / sizeof(type)), .kc = GEMM_KC, .elem = sizeof(type), \
     .slack = OM_VBYTES / sizeof(type), .pack_a = pack_a_##suf, .block = block_##suf, \
     .join = join_##suf, .pack_b = pack_blocks_##suf, .few = few_##suf}
const om_gemm_kernels OM_ISA_NAME(om_gemm_isa) = {GEMM_TYPE(f32, float), GEMM_TYPE(f64, double)};
