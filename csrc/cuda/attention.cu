/* attention.cu - y = softmax(q k^T scale + mask) v and the log-sum-exp of every query (ops/attention.c): 16 queries a
 * block, keys by tiles of 32 with a running maximum. */
#include "cuda/attention_body.h"

template <class S> FN void attention(const om_gpu_attention &p) {
    typedef WIDE F;
    SHARED(shared);
    F *q = (F *)shared, *k = q + ATT_OWN * (p.d + 1), *v = k + ATT_TILE * (p.d + 1);
    F *w = v + ATT_TILE * (p.dv_size + 1);
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    att_head a = {blockIdx.y / p.hq, blockIdx.y % p.hq, 0};
    a.kv = a.h / (p.hq / p.hk);
    const int64_t i0 = (int64_t)blockIdx.x * ATT_OWN;
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    F own[ATT_ROWS][ATT_PARTS], m[ATT_ROWS], l[ATT_ROWS];
    for (int r = 0; r < ATT_ROWS; r++) {
        m[r] = -inf_of((F)0), l[r] = 0;
        for (int c = 0; c < ATT_PARTS; c++) own[r][c] = 0;
    }
    att_load<S>(p.q, p.sq, a.b, a.h, i0, ATT_OWN, p.tq, p.d, q);
    F *mine = w + warp * ATT_TILE;
    const int64_t last = i0 + ATT_OWN - 1 + p.offset + 1, end = p.causal && last < p.tk ? last : p.tk;
    for (int64_t j0 = 0; j0 < end; j0 += ATT_TILE) {
        __syncthreads();
        att_load<S>(p.k, p.sk, a.b, a.kv, j0, ATT_TILE, p.tk, p.d, k);
        att_load<S>(p.v, p.sv, a.b, a.kv, j0, ATT_TILE, p.tk, p.dv_size, v);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ATT_ROWS; r++) {
            const int64_t i = i0 + warp * ATT_ROWS + r, j = j0 + lane;
            const F dot = att_dot(q + (warp * ATT_ROWS + r) * (p.d + 1), k + lane * (p.d + 1), p.d);
            const F s = att_score<S, F>(p, a, i, j, dot);
            const F top = op_max::of(m[r], warp_all<op_max>(s)), from = top == -inf_of((F)0) ? 0 : top;
            const F e = exp_low_of(s - from), by = m[r] == -inf_of((F)0) ? (F)0 : exp_low_of(m[r] - from);
            l[r] = l[r] * by + warp_all<op_sum>(e);
            m[r] = top;
            mine[lane] = e * (e == 0 ? (F)1 : att_keep<F>(p, a, seed, i, j));
            __syncwarp();
            for (int c = 0; c < ATT_PARTS; c++) own[r][c] *= by;
            att_add(own[r], mine, v, p.dv_size);
            __syncwarp();
        }
    }
#pragma unroll
    for (int r = 0; r < ATT_ROWS; r++) {
        const int64_t i = i0 + warp * ATT_ROWS + r;
        if (i >= p.tq) continue;
        const F by = l[r] != 0 ? 1 / l[r] : p.nan_rows ? (F)NAN : (F)0;
        const int64_t base = a.b * p.sout[0] + a.h * p.sout[1] + i * p.sout[2];
        att_put<S>(p.out, base, p.sout[3], p.dv_size, own[r], by);
        if (!lane) st((F *)p.lse + blockIdx.y * p.tq + i, l[r] == 0 ? -inf_of((F)0) : m[r] + log_of(l[r]));
    }
}
FLOATS(attention, struct om_gpu_attention, ATT_BLOCK, attention)
