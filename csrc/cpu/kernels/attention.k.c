/* attention.k.c - softmax(q k^T * scale + mask) v and its gradient, tile by tile; scores never reach memory.
 *
 * Forward, per block of BR queries (online softmax): for each block of BC keys that some query may see
 *     S = Q K^T;  x = S * scale + mask;  m' = max(m, rowmax x);  P = exp(x - m');  l = l e^(m - m') + rowsum P
 *     O = O e^(m - m') + drop(P) V
 * then y = O / l and lse = m + log l, the only thing backward needs besides y.
 * Backward, per block of queries, with D = rowsum(dy * y):
 *     P = exp(x - lse);  dP = drop'(dY V^T);  dS = P (dP - D)
 *     dV += drop(P)^T dY;  dK += scale dS^T Q;  dQ += scale dS K;  dmask += dS
 * A task owns all queries of a key/value head (and everything that adds into the same dmask), and walks blocks in one
 * order: deterministic, no atomics.
 *
 * Visibility is algebra, not a tensor: row i sees keys [lo_i, hi_i) from causal, window and kv_start/kv_end; blocks
 * outside the union are never computed. A mask tensor is read tile by tile; a tile with nothing visible is skipped, one
 * that adds nothing is ignored.
 *
 * A row that sees nothing (only -inf) gives 0, lse = -inf and no gradient. Arithmetic stays in natural units so that
 * finite masks such as the lowest float behave as in plain softmax. There lse = m + log l loses log l; rows with such
 * an lse are recomputed: m and l are gathered again in a sweep of their own (stats).
 *
 * Dropout draws word ((b * hq + h) * tq + i) * tk + j of the node's stream: independent of tiles.
 * All memory tiles are in the compute type; narrower storage is widened while packing.
 */
#include "cpu/attention.h"
#include "cpu/philox.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <math.h>

#define ATTN_PAIRS 0
#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/attention_type.h"
#undef OM_VEC_BITS
#define OM_VEC_BITS 64
#include "cpu/kernels/vec.h"
#include "cpu/kernels/attention_type.h"

const om_attn_kernels OM_ISA_NAME(om_attn_isa) = {ATTN_TYPE(f32), ATTN_TYPE(f64)};
