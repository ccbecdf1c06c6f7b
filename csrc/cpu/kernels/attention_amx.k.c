/* attention_amx.k.c - attention_bf16.k.c with its products on AMX tiles (om_isa_tiles). Empty for processors without
 * AVX-512.
 */
#include "cpu/attention.h"

#if defined(__AVX512F__)
#include "cpu/kernels/amx.h"
#endif

#if defined(OM_AMX)
#include "cpu/philox.h"

#include <immintrin.h>
#include <math.h>

#define ATTN_PAIRS 1
#define ATTN_TILES 1
#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/pairs.h"
#include "cpu/kernels/attention_type.h"

const om_attn_type OM_ISA_NAME(om_attn_amx) = ATTN_TYPE(f32);
#else
const om_attn_type OM_ISA_NAME(om_attn_amx) = {0};
#endif
