/* attention_f32_grad.cu - attention_grad.cu for f32 and heads of at most 128, after its attention_delta: dq by queries,
 * dk and dv by keys, in register tiles, each in one order; both compute scores and random words anew. */
#include "cuda/attention_f32.h"

/* each number that a thread holds of a tile's scores */
#define SCORES(m, n) _Pragma("unroll") for (int m = 0; m < 4; m++) _Pragma("unroll") for (int n = 0; n < N; n++)

FN bool af_frozen(const om_gpu_attention &p, const att_head &a, int i, int j) {
    return p.frozen &&
           ld(p.frozen + a.b * p.sfrozen[0] + a.h * p.sfrozen[1] + i * p.sfrozen[2] + j * p.sfrozen[3]);
}

/* A block's own queries, keys by tiles: the next values come while scores and dq are worked out, the next keys while
 * dy is multiplied by values. */
template <int D, int OWN, int TILE> FN void attention_tiled_dq(const om_gpu_attention &p) {
    enum { W = AF_WIDTH(D), N = TILE / 8, THREADS = AF_THREADS(OWN) };
    SHARED(shared);
    float *const q = (float *)shared, *const dy = q + OWN * W, *const k = dy + OWN * W, *const v = k + TILE * W;
    float *const room = v + TILE * W + threadIdx.x / 32 * AF_ROOM;
    const af_queries mine = af_queries_at<OWN, TILE>(p);
    const att_head a = mine.a;
    const int row = af_row(), col = af_col(), i = mine.i0 + row;
    const int64_t keys = a.b * p.sk[0] + a.kv * p.sk[1], values = a.b * p.sv[0] + a.kv * p.sv[1];
    const int64_t rows = p.batch * p.hq * p.tq;
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    const float scale = (float)p.scale, keep = (float)p.drop_scale;
    float dq[4][D / 8], delta[4], top[4], il[4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const float *stat = (const float *)p.delta + blockIdx.y * p.tq + am_clip(i + m * (OWN / 4), p.tq - 1);
        delta[m] = ld(stat), top[m] = ld(stat + rows), il[m] = ld(stat + 2 * rows);
#pragma unroll
        for (int c = 0; c < D / 8; c++) dq[m][c] = 0;
    }
    if (mine.first < mine.end) {
        af_load<D, OWN, THREADS>(p.dy, p.sdy, a.b * p.sdy[0] + a.h * p.sdy[1], mine.i0, p.tq, (int)p.dv_size, dy);
        af_load<D, TILE, THREADS>(p.v, p.sv, values, mine.first, mine.end, (int)p.dv_size, v);
        copies_end();
        af_load<D, OWN, THREADS>(p.q, p.sq, a.b * p.sq[0] + a.h * p.sq[1], mine.i0, p.tq, (int)p.d, q);
        af_load<D, TILE, THREADS>(p.k, p.sk, keys, mine.first, mine.end, (int)p.d, k);
        copies_end();
    }
    for (int j0 = mine.first; j0 < mine.end; j0 += TILE) {
        const bool more = j0 + TILE < mine.end;
        float s[4][N], dp[4][N];
        copies_wait<1>(); /* the values */
        __syncthreads();
        af_dots<D, OWN>(dp, dy + row * W, v + col * W);
        __syncthreads();
        if (more) af_load<D, TILE, THREADS>(p.v, p.sv, values, j0 + TILE, mine.end, (int)p.dv_size, v);
        copies_end();
        if (p.drop) {
            const uint32_t kept = af_draw<OWN, N>(p, seed, blockIdx.y, i, j0 + col);
            SCORES(m, n) dp[m][n] = af_stays(kept, m, n) ? dp[m][n] * keep : 0;
        }
        copies_wait<1>(); /* the keys */
        __syncthreads();
        af_dots<D, OWN>(s, q + row * W, k + col * W);
        SCORES(m, n) s[m][n] *= scale;
        const bool part = p.mask_kind || p.frozen || mine.low > j0 || mine.high < j0 + TILE;
        if (part) af_hide<OWN>(p, a, i, j0 + col, s);
        SCORES(m, n) dp[m][n] = am_exp(s[m][n] - top[m]) * il[m] * (dp[m][n] - delta[m]);
        if (part) {
            SCORES(m, n) {
                const int query = am_clip(i + m * (OWN / 4), p.tq - 1);
                if (s[m][n] == -INFINITY || il[m] == 0 || af_frozen(p, a, query, j0 + col + n * 8)) dp[m][n] = 0;
                IN_TURN();
            }
        }
        af_add<D, N>(dq, dp, room, k + col * 4);
        __syncthreads();
        if (more) af_load<D, TILE, THREADS>(p.k, p.sk, keys, j0 + TILE, mine.end, (int)p.d, k);
        copies_end();
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int64_t at = i + m * (OWN / 4);
        if (at < p.tq)
            af_store<D>(p.dq, p.sdq, a.b * p.sdq[0] + a.h * p.sdq[1], at, (int)p.d, dq[m], scale);
    }
}

/* Queries [i, i + TILE) of a head on their way into a tile, and their delta, m and il: beyond the last il is 0. */
template <int D, int TILE, int THREADS>
FN void af_queries_begin(const om_gpu_attention &p, int64_t b, int64_t h, int i, float *tile, float *stat) {
    const float *from = (const float *)p.delta + (b * p.hq + h) * p.tq;
    af_load<D, TILE, THREADS>(p.q, p.sq, b * p.sq[0] + h * p.sq[1], i, p.tq, (int)p.d, tile);
    for (int e = threadIdx.x; e < 3 * TILE; e += THREADS) {
        const int at = i + e % TILE;
        const bool given = at < p.tq;
        copy_begin<4>(stat + e, given ? from + e / TILE * (p.batch * p.hq * p.tq) + at : from, given);
    }
    copies_end();
}

/* Dropout of own keys from j on and queries from i on, the thread's first of each. OWN 32: keys are 8 apart, bit
 * 8 n + m; 64: they are 16 apart, bit 8 (n / 2) + n % 2 + 2 m. */
template <int OWN> FN uint32_t af_draw_turned(const om_gpu_attention &p, uint64_t seed, int64_t head, int i, int j) {
    uint32_t bits = 0;
#pragma unroll 2
    for (int n = 0; n < OWN / 8; n++) {
        const uint64_t at = (uint64_t)((head * p.tq + i + n * 8) * p.tk + j);
        if (OWN == 64) bits |= (af_kept<6>(p, seed, at) & 0x55) << (n / 2 * 8 + n % 2);
        else bits |= (af_kept<3>(p, seed, at) & 15) << 8 * n;
    }
    return bits;
}
template <int OWN> FN bool af_stays_turned(uint32_t bits, int n, int m) {
    return OWN == 64 ? bits >> (n / 2 * 8 + n % 2 + 2 * m) & 1 : af_stays(bits, n, m);
}

/* A block's own keys, queries by tiles, of every head that shares the keys; products are turned: rows are keys. The
 * next dy come while dk is added to, the next queries while values are multiplied by dy. */
template <int D, int OWN, int TILE> FN void attention_tiled_dkv(const om_gpu_attention &p) {
    enum { W = AF_WIDTH(D), N = TILE / 8, THREADS = AF_THREADS(OWN) };
    SHARED(shared);
    float *const k = (float *)shared, *const v = k + OWN * W, *const q = v + OWN * W, *const dy = q + TILE * W;
    float *const stat = dy + TILE * W, *const room = stat + 3 * TILE + threadIdx.x / 32 * AF_ROOM;
    const int row = af_row(), col = af_col(), group = (int)(p.hq / p.hk), j0 = (int)blockIdx.x * OWN;
    att_head a = {blockIdx.y / p.hk, 0, blockIdx.y % p.hk};
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    const float scale = (float)p.scale, keep = p.drop ? (float)p.drop_scale : 1.0f;
    float dk[4][D / 8], dv[4][D / 8];
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int c = 0; c < D / 8; c++) dk[m][c] = dv[m][c] = 0;
    /* the first query that sees the block's first key, the last one that sees its last; queries that see all keys */
    const int first = p.causal ? am_clip(j0 - p.offset, p.tq) / TILE * TILE : 0;
    const int end = p.window > 0 ? am_clip(j0 + OWN - 1 + p.window, p.tq) : (int)p.tq;
    const am_span begin = am_queries(p, a.b, j0), last = am_queries(p, a.b, j0 + OWN - 1);
    const bool whole = !p.mask_kind && !p.frozen;
    const int of_head = end > first ? (end - first + TILE - 1) / TILE : 0, tiles = group * of_head;
    if (tiles) {
        const int64_t h = a.kv * group;
        af_load<D, OWN, THREADS>(p.v, p.sv, a.b * p.sv[0] + a.kv * p.sv[1], j0, p.tk, (int)p.dv_size, v);
        af_load<D, TILE, THREADS>(p.dy, p.sdy, a.b * p.sdy[0] + h * p.sdy[1], first, p.tq, (int)p.dv_size, dy);
        copies_end();
        af_load<D, OWN, THREADS>(p.k, p.sk, a.b * p.sk[0] + a.kv * p.sk[1], j0, p.tk, (int)p.d, k);
        af_queries_begin<D, TILE, THREADS>(p, a.b, h, first, q, stat);
    }
    for (int tile = 0; tile < tiles; tile++) {
        const int i0 = first + tile % of_head * TILE, next = first + (tile + 1) % of_head * TILE;
        const int64_t next_h = a.kv * group + (tile + 1) / of_head;
        const bool more = tile + 1 < tiles;
        float s[4][N], dp[4][N];
        a.h = a.kv * group + tile / of_head;
        copies_wait<1>(); /* dy */
        __syncthreads();
        af_dots<D, OWN>(dp, v + row * W, dy + col * W);
        copies_wait<0>(); /* queries */
        __syncthreads();
        af_dots<D, OWN>(s, k + row * W, q + col * W);
        SCORES(m, n) s[m][n] *= scale;
        const bool part = !whole || begin.lo > i0 || begin.hi < i0 + TILE || last.lo > i0 || last.hi < i0 + TILE;
        if (part) {
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int j = j0 + row + m * (OWN / 4);
                const am_span see = am_queries(p, a.b, j);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int i = i0 + col + n * 8;
                    if (i < see.lo || i >= see.hi) s[m][n] = -INFINITY;
                    else if (p.mask_kind) s[m][n] = am_masked(p, a, i, j, s[m][n]);
                    IN_TURN();
                }
            }
        }
        const uint32_t kept = p.drop ? af_draw_turned<OWN>(p, seed, a.b * p.hq + a.h, i0 + col, j0 + row) : ~0u;
        /* s becomes dropped probabilities, dp the scores' gradient */
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int at = col + n * 8;
            const float delta = stat[at], top = stat[TILE + at], il = stat[2 * TILE + at];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const bool stays = af_stays_turned<OWN>(kept, n, m);
                const float prob = am_exp(s[m][n] - top) * il; /* beyond the last: not seen, il 0 */
                dp[m][n] = part && prob == 0 ? 0.0f : prob * ((stays ? dp[m][n] * keep : 0.0f) - delta);
                s[m][n] = stays ? prob : 0.0f;
            }
        }
        if (p.frozen) {
            SCORES(m, n) { /* not 0: a pair that there is */
                if (dp[m][n] != 0 && af_frozen(p, a, i0 + col + n * 8, j0 + row + m * (OWN / 4))) dp[m][n] = 0;
                IN_TURN();
            }
        }
        af_add<D, N>(dv, s, room, dy + col * 4);
        __syncthreads();
        if (more)
            af_load<D, TILE, THREADS>(p.dy, p.sdy, a.b * p.sdy[0] + next_h * p.sdy[1], next, p.tq, (int)p.dv_size, dy);
        copies_end();
        af_add<D, N>(dk, dp, room, q + col * 4);
        __syncthreads();
        if (more) af_queries_begin<D, TILE, THREADS>(p, a.b, next_h, next, q, stat);
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int64_t at = j0 + row + m * (OWN / 4);
        if (at >= p.tk) continue;
        af_store<D>(p.dk, p.sdk, a.b * p.sdk[0] + a.kv * p.sdk[1], at, (int)p.d, dk[m], scale);
        af_store<D>(p.dv, p.sdv, a.b * p.sdv[0] + a.kv * p.sdv[1], at, (int)p.dv_size, dv[m], keep);
    }
}

#define KERNELS(what, D, OWN, TILE, blocks)                                                          \
    EXPORT(AF_THREADS(OWN), blocks) om_k_attention_tiled##D##_##what##_f32(PARAM(om_gpu_attention) p) { \
        MMA_BODY((attention_tiled_##what<D, OWN, TILE>(p)));                                         \
    }
KERNELS(dq, 64, 64, 64, 2)
KERNELS(dkv, 64, 64, 64, 2)
KERNELS(dq, 128, 32, 32, 3)
KERNELS(dkv, 128, 32, 32, 3)
#undef KERNELS
#undef SCORES
