/* attention_f32.cu - attention.cu for f32 and heads of at most 128: 64 queries a block in register tiles, keys by tiles
 * with a running maximum. The next keys come while values are worked with, the next values while keys are. */
#include "cuda/attention_f32.h"

template <int D, int OWN, int TILE> FN void attention_tiled(const om_gpu_attention &p) {
    enum { W = AF_WIDTH(D), N = TILE / 8, THREADS = AF_THREADS(OWN) };
    SHARED(shared);
    float *const q = (float *)shared, *const k = q + OWN * W, *const v = k + TILE * W;
    float *const room = v + TILE * W + threadIdx.x / 32 * AF_ROOM;
    const af_queries mine = af_queries_at<OWN, TILE>(p);
    const att_head a = mine.a;
    const int row = af_row(), col = af_col(), i = mine.i0 + row;
    const int64_t keys = a.b * p.sk[0] + a.kv * p.sk[1], values = a.b * p.sv[0] + a.kv * p.sv[1];
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    const float scale = (float)p.scale;
    float y[4][D / 8], top[4], l[4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        top[m] = -INFINITY, l[m] = 0;
#pragma unroll
        for (int c = 0; c < D / 8; c++) y[m][c] = 0;
    }
    if (mine.first < mine.end) {
        af_load<D, OWN, THREADS>(p.q, p.sq, a.b * p.sq[0] + a.h * p.sq[1], mine.i0, p.tq, (int)p.d, q);
        af_load<D, TILE, THREADS>(p.k, p.sk, keys, mine.first, mine.end, (int)p.d, k);
        copies_end();
        af_load<D, TILE, THREADS>(p.v, p.sv, values, mine.first, mine.end, (int)p.dv_size, v);
        copies_end();
    }
    for (int j0 = mine.first; j0 < mine.end; j0 += TILE) {
        const bool more = j0 + TILE < mine.end;
        float s[4][N];
        copies_wait<1>(); /* the keys */
        __syncthreads();
        af_dots<D, OWN>(s, q + row * W, k + col * W);
        __syncthreads();
        if (more) af_load<D, TILE, THREADS>(p.k, p.sk, keys, j0 + TILE, mine.end, (int)p.d, k);
        copies_end();
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < N; n++) s[m][n] *= scale;
        if (p.mask_kind || mine.low > j0 || mine.high < j0 + TILE) af_hide<OWN>(p, a, i, j0 + col, s);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float most = top[m], sum = 0;
#pragma unroll
            for (int n = 0; n < N; n++) most = op_max::of(most, s[m][n]);
#pragma unroll
            for (int lane = 2; lane < 16; lane *= 2) most = op_max::of(most, shuffle(most, lane));
            const float from = most == -INFINITY ? 0.0f : most, by = am_exp(top[m] - from);
            top[m] = most;
#pragma unroll
            for (int n = 0; n < N; n++) sum += s[m][n] = am_exp(s[m][n] - from);
            l[m] = l[m] * by + sum;
#pragma unroll
            for (int c = 0; c < D / 8; c++) y[m][c] *= by;
        }
        if (p.drop) {
            const uint32_t kept = af_draw<OWN, N>(p, seed, blockIdx.y, i, j0 + col);
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (!af_stays(kept, m, n)) s[m][n] = 0;
        }
        copies_wait<1>(); /* the values */
        __syncthreads();
        af_add<D, N>(y, s, room, v + col * 4);
        __syncthreads();
        if (more) af_load<D, TILE, THREADS>(p.v, p.sv, values, j0 + TILE, mine.end, (int)p.dv_size, v);
        copies_end();
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int lane = 2; lane < 16; lane *= 2) l[m] += shuffle(l[m], lane);
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int64_t at = i + m * (OWN / 4);
        if (at >= p.tq) continue;
        const float by = l[m] != 0 ? (p.drop ? (float)p.drop_scale : 1.0f) / l[m] : p.nan_rows ? NAN : 0.0f;
        af_store<D>(p.out, p.sout, a.b * p.sout[0] + a.h * p.sout[1], at, (int)p.dv_size, y[m], by);
        if (!col) st((float *)p.lse + blockIdx.y * p.tq + at, l[m] == 0 ? -INFINITY : top[m] + log_of(l[m]));
    }
}

EXPORT(128, 3) om_k_attention_tiled64_f32(PARAM(om_gpu_attention) p) { MMA_BODY((attention_tiled<64, 64, 64>(p))); }
EXPORT(128, 2) om_k_attention_tiled128_f32(PARAM(om_gpu_attention) p) { MMA_BODY((attention_tiled<128, 64, 32>(p))); }
