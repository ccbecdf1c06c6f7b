/* attention_mma.cu - attention.cu on tensor cores: 64 queries a block, keys by tiles of 64 with a running maximum. */
#include "cuda/attention_mma.h"

enum { AM_TILE = 64 };

/* Dropout's bits of a block's queries and the keys that they see, by themselves: drawing is a chain of multiplications,
 * which many warps hide and those with products in their registers do not. */
FN void attention_mma_bits(const om_gpu_attention &p) {
    const am_queries_of rows = am_queries_at(p);
    const att_head a = rows.a;
    const int lane = threadIdx.x & 31, own = rows.own;
    const uint64_t seed = ld(&p.scalars->seed);
    const int lo = am_keys(p, a.b, own).lo / AM_TILE * AM_TILE, hi = am_keys(p, a.b, own + 15).hi;
    for (int j0 = lo; j0 < hi; j0 += AM_TILE)
        st(am_bits(p, blockIdx.y, own, j0) + lane, am_draw<16, 4>(p, seed, blockIdx.y, own, j0));
}
EXPORT(AM_BLOCK) om_k_attention_mma_bits(PARAM(om_gpu_attention) p) { attention_mma_bits(p); }

template <class S, int D> FN void attention_mma(const om_gpu_attention &p) {
    enum { W = AM_WIDTH(D) };
    SHARED(shared);
    S *const tile = (S *)shared; /* keys, values, the next keys, the next values */
    const am_queries_of rows = am_queries_at(p);
    const att_head a = rows.a;
    const int warp = threadIdx.x >> 5, g = rows.g, t = rows.t, i0 = rows.i0, own = rows.own;
    const uint64_t seed = p.drop && !p.bits ? ld(&p.scalars->seed) : 0;
    const float scale = (float)p.scale;
    uint32_t q[D / 16][4];
    float y[D / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        for (int e = 0; e < 4; e++) y[n][e] = 0;
    am_load<D>(p.q, p.sq, a.b * p.sq[0] + a.h * p.sq[1], i0, AM_OWN, p.tq, (int)p.d, tile);
    copies_end();
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int c = 0; c < D / 16; c++) mma_a(q[c], tile, W, warp * 16, c * 16);

    const am_span low = am_keys(p, a.b, own), high = am_keys(p, a.b, own + 15); /* the warp's */
    const int end = am_keys(p, a.b, i0 + AM_OWN - 1).hi;
    const int first = am_keys(p, a.b, i0).lo / AM_TILE * AM_TILE;
    const int64_t given = am_given(p, a.b);
    for (int next = first, place = 0; next < end + AM_TILE; next += AM_TILE, place ^= 1) {
        const int j0 = next - AM_TILE; /* is worked off while the next tile comes */
        copies_wait<0>();
        __syncthreads();
        if (next < end) {
            S *to = tile + place * 2 * AM_TILE * W;
            am_load<D>(p.k, p.sk, a.b * p.sk[0] + a.kv * p.sk[1], next, AM_TILE, given, (int)p.d, to);
            am_load<D>(p.v, p.sv, a.b * p.sv[0] + a.kv * p.sv[1], next, AM_TILE, given, (int)p.dv_size,
                       to + AM_TILE * W);
            copies_end();
        }
        if (next == first || low.lo >= j0 + AM_TILE || high.hi <= j0) continue;
        const S *k = tile + (place ^ 1) * 2 * AM_TILE * W, *v = k + AM_TILE * W;
        const bool all = high.lo <= j0 && low.hi >= j0 + AM_TILE && !p.mask_kind;
        uint32_t kept = p.bits ? ld(am_bits(p, blockIdx.y, own, j0) + g * 4 + t) : 0;
        float s[AM_TILE / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++)
#pragma unroll
            for (int n = 0; n < AM_TILE / 16; n++) {
                uint32_t b[4];
                mma_b(b, k, W, n * 16, c * 16);
                mma_16816<S>(s[2 * n], q[c], b);
                mma_16816<S>(s[2 * n + 1], q[c], b + 2);
            }
#pragma unroll
        for (int n = 0; n < AM_TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= scale;
        if (!all) {
#pragma unroll
            for (int n = 0; n < AM_TILE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int j = j0 + n * 8 + t * 2 + e % 2, r = e / 2;
                    if (j < rows.see[r].lo || j >= rows.see[r].hi) s[n][e] = -INFINITY;
                    else if (p.mask_kind) s[n][e] = am_masked(p, a, rows.at[r], j, s[n][e]);
                    IN_TURN();
                }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = m[r], sum = 0;
#pragma unroll
            for (int n = 0; n < AM_TILE / 8; n++) top = op_max::of(op_max::of(top, s[n][2 * r]), s[n][2 * r + 1]);
            top = op_max::of(top, shuffle(top, 1));
            top = op_max::of(top, shuffle(top, 2));
            const float from = top == -INFINITY ? 0.0f : top, by = am_exp(m[r] - from);
            m[r] = top;
#pragma unroll
            for (int n = 0; n < AM_TILE / 8; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) sum += s[n][e] = am_exp(s[n][e] - from);
            l[r] = l[r] * by + sum;
#pragma unroll
            for (int n = 0; n < D / 8; n++) y[n][2 * r] *= by, y[n][2 * r + 1] *= by;
        }
        if (p.drop) {
            if (!p.bits) kept = am_draw<16>(p, seed, blockIdx.y, own, j0);
#pragma unroll
            for (int n = 0; n < AM_TILE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!(kept >> (8 * e + n) & 1)) s[n][e] = 0;
        }
#pragma unroll
        for (int c = 0; c < AM_TILE / 16; c++) {
            const uint32_t w[4] = {pair_of<S>(s[2 * c][0], s[2 * c][1]), pair_of<S>(s[2 * c][2], s[2 * c][3]),
                                   pair_of<S>(s[2 * c + 1][0], s[2 * c + 1][1]),
                                   pair_of<S>(s[2 * c + 1][2], s[2 * c + 1][3])};
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                uint32_t b[4];
                mma_b_turned(b, v, W, c * 16, n * 16);
                mma_16816<S>(y[2 * n], w, b);
                mma_16816<S>(y[2 * n + 1], w, b + 2);
            }
        }
    }
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        l[r] += shuffle(l[r], 1);
        l[r] += shuffle(l[r], 2);
        by[r] = l[r] != 0 ? (p.drop ? (float)p.drop_scale : 1.0f) / l[r] : p.nan_rows ? NAN : 0.0f;
        const int64_t i = own + g + 8 * r;
        if (!t && i < p.tq) st((float *)p.lse + blockIdx.y * p.tq + i, l[r] == 0 ? -INFINITY : m[r] + log_of(l[r]));
    }
    __syncthreads();
    am_store<D>(p.out, p.sout, a.b * p.sout[0] + a.h * p.sout[1], own, p.tq, (int)p.dv_size, y, by,
                tile + warp * 16 * W);
}

#define KERNELS(D, blocks)                                                              \
    EXPORT(AM_BLOCK, blocks) om_k_attention_mma##D##_bf16(PARAM(om_gpu_attention) p) {  \
        MMA_BODY((attention_mma<bf16, D>(p)));                                          \
    }                                                                                   \
    EXPORT(AM_BLOCK, blocks) om_k_attention_mma##D##_f16(PARAM(om_gpu_attention) p) {   \
        MMA_BODY((attention_mma<f16, D>(p)));                                           \
    }
KERNELS(64, 3)
KERNELS(128, 2)
#undef KERNELS
