/* attention_mma_grad.cu - attention_grad.cu on tensor cores, after its attention_delta: dq by queries, dk and dv by
 * keys, each in one order; both compute scores anew. */
#include "cuda/attention_mma.h"

enum { AM_STEP = 32 }; /* of the other side at a time */
/* each number that a thread holds of 16 x 32 scores */
#define FRAGMENTS(n, e)                                                                     \
    _Pragma("unroll") for (int n = 0; n < AM_STEP / 8; n++) _Pragma("unroll") for (int e = 0; e < 4; e++)

FN bool am_frozen(const om_gpu_attention &p, const att_head &a, int i, int j) {
    return p.frozen &&
           ld(p.frozen + a.b * p.sfrozen[0] + a.h * p.sfrozen[1] + i * p.sfrozen[2] + j * p.sfrozen[3]);
}

/* The product's score of a pair; -inf: not seen. `inside`: the mask alone can hide it */
FN float am_score(const om_gpu_attention &p, const att_head &a, int i, int j, float dot, bool inside) {
    if (!inside) return -INFINITY;
    return p.mask_kind ? am_masked(p, a, i, j, dot) : dot;
}

/* Two 16 x 8 products side by side, rounded, as half of the operand a. */
template <class S> FN void am_operand(uint32_t *a, const float (*c)[4]) {
    a[0] = pair_of<S>(c[0][0], c[0][1]), a[1] = pair_of<S>(c[0][2], c[0][3]);
    a[2] = pair_of<S>(c[1][0], c[1][1]), a[3] = pair_of<S>(c[1][2], c[1][3]);
}

/* 64 queries a block, keys by tiles of 64, in two halves. */
template <class S, int D> FN void attention_mma_dq(const om_gpu_attention &p) {
    enum { W = AM_WIDTH(D), TILE = 2 * AM_STEP };
    SHARED(shared);
    S *const tile = (S *)shared; /* keys, values, the next keys, the next values */
    const am_queries_of mine = am_queries_at(p);
    const att_head a = mine.a;
    const int warp = threadIdx.x >> 5, g = mine.g, t = mine.t, i0 = mine.i0, own = mine.own;
    const int64_t rows = p.batch * p.hq * p.tq;
    const uint64_t seed = p.drop && !p.bits ? ld(&p.scalars->seed) : 0;
    const float scale = (float)p.scale, keep = (float)p.drop_scale;
    uint32_t q[D / 16][4], dy[D / 16][4];
    float dq[D / 8][4], delta[2], m[2], il[2];
    for (int r = 0; r < 2; r++) {
        const float *stat = (const float *)p.delta + blockIdx.y * p.tq + mine.at[r];
        delta[r] = ld(stat), m[r] = ld(stat + rows), il[r] = ld(stat + 2 * rows);
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        for (int e = 0; e < 4; e++) dq[n][e] = 0;
    am_load<D>(p.q, p.sq, a.b * p.sq[0] + a.h * p.sq[1], i0, AM_OWN, p.tq, (int)p.d, tile);
    am_load<D>(p.dy, p.sdy, a.b * p.sdy[0] + a.h * p.sdy[1], i0, AM_OWN, p.tq, (int)p.dv_size, tile + TILE * W);
    copies_end();
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        mma_a(q[c], tile, W, warp * 16, c * 16);
        mma_a(dy[c], tile + TILE * W, W, warp * 16, c * 16);
    }

    const am_span low = am_keys(p, a.b, own), high = am_keys(p, a.b, own + 15); /* the warp's */
    const int end = am_keys(p, a.b, i0 + AM_OWN - 1).hi;
    const int first = am_keys(p, a.b, i0).lo / TILE * TILE;
    const int64_t given = am_given(p, a.b);
    for (int next = first, place = 0; next < end + TILE; next += TILE, place ^= 1) {
        const int j0 = next - TILE; /* is worked off while the next tile comes */
        copies_wait<0>();
        __syncthreads();
        if (next < end) {
            S *to = tile + place * 2 * TILE * W;
            am_load<D>(p.k, p.sk, a.b * p.sk[0] + a.kv * p.sk[1], next, TILE, given, (int)p.d, to);
            am_load<D>(p.v, p.sv, a.b * p.sv[0] + a.kv * p.sv[1], next, TILE, given, (int)p.dv_size, to + TILE * W);
            copies_end();
        }
        if (next == first || low.lo >= j0 + TILE || high.hi <= j0) continue;
        const S *k = tile + (place ^ 1) * 2 * TILE * W, *v = k + TILE * W;
        const bool all = high.lo <= j0 && low.hi >= j0 + TILE && !p.mask_kind && !p.frozen;
        const uint32_t bits = p.bits ? ld(am_bits(p, blockIdx.y, own, j0) + g * 4 + t)
                              : p.drop ? am_draw<16>(p, seed, blockIdx.y, own, j0)
                                       : 0;
#pragma unroll 1
        for (int half = 0; half < TILE; half += AM_STEP) {
            float s[AM_STEP / 8][4] = {}, dp[AM_STEP / 8][4] = {};
#pragma unroll
            for (int c = 0; c < D / 16; c++)
#pragma unroll
                for (int n = 0; n < AM_STEP / 16; n++) {
                    uint32_t b[4];
                    mma_b(b, k, W, half + n * 16, c * 16);
                    mma_16816<S>(s[2 * n], q[c], b);
                    mma_16816<S>(s[2 * n + 1], q[c], b + 2);
                    mma_b(b, v, W, half + n * 16, c * 16);
                    mma_16816<S>(dp[2 * n], dy[c], b);
                    mma_16816<S>(dp[2 * n + 1], dy[c], b + 2);
                }
            /* all between the products without a branch, what few tiles need before and behind it */
            FRAGMENTS(n, e) s[n][e] *= scale;
            if (!all) {
                FRAGMENTS(n, e) {
                    const int j = j0 + half + n * 8 + t * 2 + e % 2, r = e / 2;
                    s[n][e] = am_score(p, a, mine.at[r], j, s[n][e], j >= mine.see[r].lo && j < mine.see[r].hi);
                    IN_TURN();
                }
            }
            if (p.drop) {
                const uint32_t kept = bits >> half / 8;
                FRAGMENTS(n, e) {
                    const bool stays = kept >> (8 * e + n) & 1;
                    dp[n][e] = stays ? dp[n][e] * keep : 0;
                }
            }
            FRAGMENTS(n, e) dp[n][e] = am_exp(s[n][e] - m[e / 2]) * il[e / 2] * (dp[n][e] - delta[e / 2]);
            if (!all) {
                FRAGMENTS(n, e) {
                    const int j = j0 + half + n * 8 + t * 2 + e % 2, r = e / 2;
                    if (s[n][e] == -INFINITY || il[r] == 0 || am_frozen(p, a, mine.at[r], j)) dp[n][e] = 0;
                    IN_TURN();
                }
            }
#pragma unroll
            for (int c = 0; c < AM_STEP / 16; c++) {
                uint32_t w[4];
                am_operand<S>(w, dp + 2 * c);
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    uint32_t b[4];
                    mma_b_turned(b, k, W, half + c * 16, n * 16);
                    mma_16816<S>(dq[2 * n], w, b);
                    mma_16816<S>(dq[2 * n + 1], w, b + 2);
                }
            }
        }
    }
    const float by[2] = {scale, scale};
    __syncthreads();
    am_store<D>(p.dq, p.sdq, a.b * p.sdq[0] + a.h * p.sdq[1], own, p.tq, (int)p.d, dq, by,
                tile + warp * 16 * W);
}

/* What of 32 queries dkv reads besides their rows. */
struct am_step { uint32_t bits[AM_STEP / 16][32]; float delta[AM_STEP], m[AM_STEP], il[AM_STEP]; };

/* Queries [i, i + 32) of head h on their way into a tile, as seen by the keys from j0 on. */
template <int D, class S>
FN void am_step_begin(const om_gpu_attention &p, att_head a, uint64_t seed, int64_t h, int i, int j0, S *tile,
                      am_step *step) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t head = a.b * p.hq + h, rows = p.batch * p.hq * p.tq;
    const float *stat = (const float *)p.delta + head * p.tq;
    am_load<D>(p.q, p.sq, a.b * p.sq[0] + h * p.sq[1], i, AM_STEP, p.tq, (int)p.d, tile);
    am_load<D>(p.dy, p.sdy, a.b * p.sdy[0] + h * p.sdy[1], i, AM_STEP, p.tq, (int)p.dv_size,
               tile + AM_STEP * AM_WIDTH(D));
    if (warp < 3) { /* beyond the last: il 0 */
        const bool given = i + lane < p.tq;
        copy_begin<4>(step->delta + warp * AM_STEP + lane, given ? stat + warp * rows + i + lane : stat, given);
    } else if (p.bits && lane < AM_STEP / 2) {
        copy_begin<16>(step->bits[0] + 4 * lane, am_bits(p, head, i, j0) + 4 * lane, true);
    }
    copies_end();
    if (p.drop && !p.bits) /* by halves of words */
        ((uint16_t *)&step->bits[warp / 2][lane])[warp % 2] = (uint16_t)am_draw<8>(p, seed, head, i + warp * 8, j0);
}

/* 64 keys a block, queries by tiles of 32, of every head that shares the keys. Products are turned: rows are keys. */
template <class S, int D> FN void attention_mma_dkv(const om_gpu_attention &p) {
    enum { W = AM_WIDTH(D), KEPT = D <= 64 /* the keys' and values' operands stay in registers */ };
    SHARED(shared);
    /* tile: queries, dy, the next queries, the next dy; where all that is read of k and v is in registers, in place of
     * them */
    S *k = (S *)shared, *v = k + AM_OWN * W, *const tile = KEPT ? k : v + AM_OWN * W;
    am_step *const steps = (am_step *)(tile + 4 * AM_STEP * W);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
    const int group = (int)(p.hq / p.hk);
    const int j0 = (int)blockIdx.x * AM_OWN, own = j0 + warp * 16;
    att_head a = {blockIdx.y / p.hk, 0, blockIdx.y % p.hk};
    const uint64_t seed = p.drop && !p.bits ? ld(&p.scalars->seed) : 0;
    const float scale = (float)p.scale, keep = p.drop ? (float)p.drop_scale : 1.0f;
    uint32_t ka[KEPT ? D / 16 : 1][4], va[KEPT ? D / 16 : 1][4];
    float dk[D / 8][4], dv[D / 8][4];
    const am_span see[2] = {am_queries(p, a.b, own + g), am_queries(p, a.b, own + g + 8)};
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        for (int e = 0; e < 4; e++) dk[n][e] = dv[n][e] = 0;
    am_load<D>(p.k, p.sk, a.b * p.sk[0] + a.kv * p.sk[1], j0, AM_OWN, p.tk, (int)p.d, k);
    am_load<D>(p.v, p.sv, a.b * p.sv[0] + a.kv * p.sv[1], j0, AM_OWN, p.tk, (int)p.dv_size, v);
    copies_end();
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int c = 0; KEPT && c < D / 16; c++) {
        mma_a(ka[c], k, W, warp * 16, c * 16);
        mma_a(va[c], v, W, warp * 16, c * 16);
    }
    /* the first query that sees the block's first key, the last one that sees its last; all of a warp's keys */
    const int first = p.causal ? am_clip(j0 - p.offset, p.tq) / AM_STEP * AM_STEP : 0;
    const int end = p.window > 0 ? am_clip(j0 + AM_OWN - 1 + p.window, p.tq) : (int)p.tq;
    bool whole = own + 15 < p.tk && !p.mask_kind && !p.frozen;
    if (whole && p.kv_start) whole = own >= ld(p.kv_start + a.b * p.start_step);
    if (whole && p.kv_end) whole = own + 15 < ld(p.kv_end + a.b * p.end_step);
    const am_span low = am_queries(p, a.b, own), high = am_queries(p, a.b, own + 15);
    const int of_head = end > first ? (end - first + AM_STEP - 1) / AM_STEP : 0, tiles = group * of_head;
    for (int next = 0; next <= tiles; next++) {
        copies_wait<0>();
        __syncthreads();
        if (next < tiles)
            am_step_begin<D>(p, a, seed, a.kv * group + next / of_head, first + next % of_head * AM_STEP, j0,
                             tile + next % 2 * 2 * AM_STEP * W, &steps[next % 2]);
        if (!next) continue;
        /* is worked off while the next tile comes */
        const int i0 = first + (next - 1) % of_head * AM_STEP;
        a.h = a.kv * group + (next - 1) / of_head;
        const S *q = tile + (next - 1) % 2 * 2 * AM_STEP * W, *dy = q + AM_STEP * W;
        const am_step &step = steps[(next - 1) % 2];
        const bool all = whole && high.lo <= i0 && low.hi >= i0 + AM_STEP;
        float s[AM_STEP / 8][4] = {}, dp[AM_STEP / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            if (!KEPT) mma_a(ka[0], k, W, warp * 16, c * 16), mma_a(va[0], v, W, warp * 16, c * 16);
#pragma unroll
            for (int n = 0; n < AM_STEP / 16; n++) {
                uint32_t b[4];
                mma_b(b, q, W, n * 16, c * 16);
                mma_16816<S>(s[2 * n], ka[KEPT ? c : 0], b);
                mma_16816<S>(s[2 * n + 1], ka[KEPT ? c : 0], b + 2);
                mma_b(b, dy, W, n * 16, c * 16);
                mma_16816<S>(dp[2 * n], va[KEPT ? c : 0], b);
                mma_16816<S>(dp[2 * n + 1], va[KEPT ? c : 0], b + 2);
            }
        }
        /* s becomes dropped probabilities, dp the scores' gradient; as in dq */
        FRAGMENTS(n, e) s[n][e] *= scale;
        if (!all) {
            FRAGMENTS(n, e) {
                const int i = i0 + n * 8 + t * 2 + e % 2, r = e / 2;
                s[n][e] = am_score(p, a, i, own + g + 8 * r, s[n][e], i >= see[r].lo && i < see[r].hi);
                IN_TURN();
            }
        }
        uint32_t kept[AM_STEP / 16][2]; /* of queries 8 apart 16 bits each, of keys 8 apart 1 bit */
#pragma unroll
        for (int n = 0; n < AM_STEP / 16; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                kept[n][e] = p.drop ? step.bits[n][(t * 2 + e) * 4 + g / 2] >> (8 * (g % 2) + 2 * warp) : ~0u;
#pragma unroll
        for (int n = 0; n < AM_STEP / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = n * 8 + t * 2 + e;
                const float delta = step.delta[at], m = step.m[at], il = step.il[at];
#pragma unroll
                for (int x = e; x < 4; x += 2) {
                    const bool stays = kept[n / 2][e] >> (16 * (n % 2) + x / 2) & 1;
                    s[n][x] = am_exp(s[n][x] - m) * il; /* beyond the last: not seen, il 0 */
                    dp[n][x] = s[n][x] * ((stays ? dp[n][x] * keep : 0.0f) - delta);
                }
            }
        if (!all) {
            FRAGMENTS(n, e) {
                const int i = i0 + n * 8 + t * 2 + e % 2, j = own + g + 8 * (e / 2);
                if (s[n][e] == 0 || am_frozen(p, a, i, j)) dp[n][e] = 0;
                IN_TURN();
            }
        }
        if (p.drop) {
            FRAGMENTS(n, e) if (!(kept[n / 2][e % 2] >> (16 * (n % 2) + e / 2) & 1)) s[n][e] = 0;
        }
#pragma unroll
        for (int c = 0; c < AM_STEP / 16; c++) {
            uint32_t w[4], ds[4];
            am_operand<S>(w, s + 2 * c);
            am_operand<S>(ds, dp + 2 * c);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                uint32_t b[4];
                mma_b_turned(b, dy, W, c * 16, n * 16);
                mma_16816<S>(dv[2 * n], w, b);
                mma_16816<S>(dv[2 * n + 1], w, b + 2);
                mma_b_turned(b, q, W, c * 16, n * 16);
                mma_16816<S>(dk[2 * n], ds, b);
                mma_16816<S>(dk[2 * n + 1], ds, b + 2);
            }
        }
    }
    const float by_k[2] = {scale, scale}, by_v[2] = {keep, keep};
    __syncthreads();
    am_store<D>(p.dk, p.sdk, a.b * p.sdk[0] + a.kv * p.sdk[1], own, p.tk, (int)p.d, dk, by_k, k + warp * 16 * W);
    am_store<D>(p.dv, p.sdv, a.b * p.sdv[0] + a.kv * p.sdv[1], own, p.tk, (int)p.dv_size, dv, by_v, v + warp * 16 * W);
}

#define KERNELS(D, what, blocks)                                                             \
    EXPORT(AM_BLOCK, blocks) om_k_attention_mma##D##_##what##_bf16(PARAM(om_gpu_attention) p) {      \
        MMA_BODY((attention_mma_##what<bf16, D>(p)));                                                \
    }                                                                                                \
    EXPORT(AM_BLOCK, blocks) om_k_attention_mma##D##_##what##_f16(PARAM(om_gpu_attention) p) {       \
        MMA_BODY((attention_mma_##what<f16, D>(p)));                                                 \
    }
KERNELS(64, dq, 3)
KERNELS(64, dkv, 3)
KERNELS(128, dq, 2)
KERNELS(128, dkv, 2)
#undef KERNELS
#undef FRAGMENTS
