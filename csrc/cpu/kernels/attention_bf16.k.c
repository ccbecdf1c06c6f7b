/* attention_bf16.k.c - attention.k.c for bf16 on processors with AVX512_BF16 (om_isa_bf16): the same walk over tiles,
 * each product on pairs of bf16 with fp32 sums (attention_pairs.h), P and dS rounded to bf16 for theirs. Empty for all
 * others.
 */
#include "cpu/attention.h"

#if defined(__AVX512F__)
#include "cpu/philox.h"

#include <immintrin.h>
#include <math.h>

#define ATTN_PAIRS 1
#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/pairs.h"
#include "cpu/kernels/attention_type.h"

const om_attn_type OM_ISA_NAME(om_attn_bf16) = ATTN_TYPE(f32);
#else
const om_attn_type OM_ISA_NAME(om_attn_bf16) = {0};
#endif
