/* gemm.k.c - the packed matrix product of one instruction set: packing of A, and one block of columns of C.
 *
 *   pack A once       panels of MR rows, k-major: the micro-kernel broadcasts MR consecutive numbers per step
 *   per column block  for each KC slice of k: pack B's slice into the worker's L2 as panels of NR columns; for each
 *                     panel of A and each panel of B: MR x NR products in registers, added into C
 * Packing takes any strides and any storage type (bf16 and f16 become f32 here); where k is contiguous it transposes
 * VL x VL blocks in registers. C narrower than the compute type is summed in a private f32 block and rounded once.
 * Slices of k run in order, so each element is one fixed chain of sums however the work is divided among threads.
 */
#include "cpu/gemm.h"

#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/gemm_type.h"
#undef OM_VEC_BITS
#define OM_VEC_BITS 64
#include "cpu/kernels/vec.h"
#include "cpu/kernels/gemm_type.h"

#define GEMM_TYPE(suf, type)                                                                        \
    {.mr = OM_MR, .cols = GEMM_WIDTH * OM_NV * (int)(OM_VBYTES / sizeof(type)), .kc = GEMM_KC, .elem = sizeof(type), \
     .slack = OM_VBYTES / sizeof(type), .pack_a = pack_a_##suf, .block = block_##suf}
const om_gemm_kernels OM_ISA_NAME(om_gemm_isa) = {GEMM_TYPE(f32, float), GEMM_TYPE(f64, double)};
