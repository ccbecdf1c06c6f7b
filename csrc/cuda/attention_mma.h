/* cuda/attention_mma.h - what attention on tensor cores (mma.h) shares: bf16 and f16, products summed in f32, weights
 * rounded to the storage type before their products. Four warps a block; 64 rows of one side are the block's own, 16 a
 * warp, and tiles of rows of the other side pass by in shared memory, in two places in turn: the next tile comes while
 * one is worked off. D: 64 or 128, heads are filled up with zeros.
 */
#ifndef OM_CUDA_ATTENTION_MMA_H
#define OM_CUDA_ATTENTION_MMA_H

#include "cuda/attention_body.h"
#include "cuda/mma.h"

enum { AM_BLOCK = 128, AM_OWN = 64 };
#define AM_LOG2E 1.44269504088896340736f
#define AM_WIDTH(D) ((D) + 8) /* of a tile's row */

FN float am_exp(float x) { return exp2_of(x * AM_LOG2E); }

/* Rows [from, from + n) of a head on their way into a tile; beyond `limit` rows or d columns: 0. base: the head's first
 * element. */
template <int D, class S>
FN void am_load(const char *x, const int64_t *s, int64_t base, int from, int n, int64_t limit, int d, S *to) {
    enum { EACH = D / 8, ROWS = AM_BLOCK / EACH }; /* chunks of a row, rows at a time */
    const S *head = (const S *)x + base;
    const int left = (int)limit - from;
    if (s[3] == 1 && s[2] % 8 == 0 && d % 8 == 0 && (uintptr_t)head % 16 == 0) {
        const int own = threadIdx.x / EACH, c = threadIdx.x % EACH * 8;
        const S *row = head + (from + own) * s[2] + c;
        to += own * AM_WIDTH(D) + c;
#pragma unroll 4
        for (int r = 0; r < n; r += ROWS, row += ROWS * s[2])
            copy_begin<16>(to + r * AM_WIDTH(D), row, own + r < left && c < d);
        return;
    }
    for (int e = threadIdx.x; e < n * D; e += AM_BLOCK) {
        const int r = e / D, c = e % D;
        S v = {};
        if (r < left && c < d) v = ld(head + (from + r) * s[2] + c * s[3]);
        to[r * AM_WIDTH(D) + c] = v;
    }
}

/* The warp's 16 rows by * c to rows [row, ...) of a head, through 16 rows of shared memory that are its own. */
template <int D, class S>
FN void am_store(char *x, const int64_t *s, int64_t base, int64_t row, int64_t limit, int d, const float (*c)[4],
                 const float *by, S *room) {
    const int lane = threadIdx.x & 31;
    S *head = (S *)x + base;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(uint32_t *)(room + (lane / 4 + 8 * r) * AM_WIDTH(D) + n * 8 + lane % 4 * 2) =
                pair_of<S>(c[n][2 * r] * by[r], c[n][2 * r + 1] * by[r]);
    __syncwarp();
    if (s[3] == 1 && s[2] % 8 == 0 && d % 8 == 0 && (uintptr_t)head % 16 == 0) {
        for (int e = lane; e < 16 * (D / 8); e += 32) {
            const int r = e / (D / 8), k = e % (D / 8) * 8;
            if (row + r < limit && k < d)
                st((chunk *)(head + (row + r) * s[2] + k), *(const chunk *)(room + r * AM_WIDTH(D) + k));
        }
        return;
    }
    for (int e = lane; e < 16 * D; e += 32) {
        const int r = e / D, k = e % D;
        if (row + r < limit && k < d) st(head + (row + r) * s[2] + k * s[3], room[r * AM_WIDTH(D) + k]);
    }
}

/* What of the other side is seen: [lo, hi). Both ends grow with the row. */
struct am_span { int lo, hi; };
FN int am_clip(int64_t x, int64_t most) { return (int)(x < 0 ? 0 : x > most ? most : x); }
/* keys that query i sees, but for the mask; rows beyond the last are as the last */
FN am_span am_keys(const om_gpu_attention &p, int64_t b, int64_t i) {
    int64_t lo = p.kv_start ? ld(p.kv_start + b * p.start_step) : 0;
    int64_t hi = p.kv_end ? ld(p.kv_end + b * p.end_step) : p.tk;
    if (i >= p.tq) i = p.tq - 1;
    if (p.causal && hi > i + p.offset + 1) hi = i + p.offset + 1;
    if (p.window > 0 && lo < i - p.window + 1) lo = i - p.window + 1;
    return {am_clip(lo, p.tk), am_clip(hi, p.tk)};
}
/* Keys that there are, hidden ones behind the last apart: what lies there, be it NaN, is not multiplied. */
FN int64_t am_given(const om_gpu_attention &p, int64_t b) {
    return p.kv_end ? am_clip(ld(p.kv_end + b * p.end_step), p.tk) : p.tk;
}
/* queries that see key j; none: of keys that are hidden or beyond the last */
FN am_span am_queries(const om_gpu_attention &p, int64_t b, int64_t j) {
    if (j >= p.tk || (p.kv_start && j < ld(p.kv_start + b * p.start_step)) ||
        (p.kv_end && j >= ld(p.kv_end + b * p.end_step)))
        return {0, 0};
    const int64_t lo = p.causal ? j - p.offset : 0, hi = p.window > 0 ? j + p.window : p.tq;
    return {am_clip(lo, p.tq), am_clip(hi, p.tq)};
}

/* The 64 queries of a block that works off keys, 16 a warp, as a thread sees them. */
struct am_queries_of {
    int g, t;            /* its row and column in fragments: lane / 4, lane % 4 */
    att_head a;
    int i0, own, at[2];  /* the block's first query, the warp's; the thread's two */
    am_span see[2];      /* the keys of those */
};
FN am_queries_of am_queries_at(const om_gpu_attention &p) {
    am_queries_of q;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    q.g = lane / 4, q.t = lane % 4;
    q.a = {blockIdx.y / p.hq, blockIdx.y % p.hq, 0};
    q.a.kv = q.a.h / (p.hq / p.hk);
    /* those that see most begin first */
    q.i0 = (int)(p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * AM_OWN, q.own = q.i0 + warp * 16;
    for (int r = 0; r < 2; r++) {
        q.at[r] = q.own + q.g + 8 * r < p.tq ? q.own + q.g + 8 * r : (int)p.tq - 1;
        q.see[r] = am_keys(p, q.a.b, q.at[r]);
    }
    return q;
}

/* A score with the mask's say; -inf: hidden. */
FN float am_masked(const om_gpu_attention &p, const att_head &a, int i, int j, float s) {
    const int64_t at = a.b * p.smask[0] + a.h * p.smask[1] + i * p.smask[2] + j * p.smask[3];
    if (p.mask_kind == 1) return ld((const uint8_t *)p.mask + at) ? s : -INFINITY;
    switch (p.mask_type) {
    case OM_F32: return s + ld((const float *)p.mask + at);
    case OM_F64: return s + (float)ld((const double *)p.mask + at);
    case OM_BF16: return s + in(ld((const bf16 *)p.mask + at));
    default: return s + in(ld((const f16 *)p.mask + at));
    }
}

/* Dropout of the pairs whose scores a thread holds in fragments, of `rows` queries from i on (8 or 16) and the 64 keys
 * from j0 on, a multiple of 64: bit 16 r + 8 e + n is set where query lane / 4 + 8 r keeps key 8 n + lane % 4 * 2 + e.
 * A counter's eight words are those of keys 8 apart (cpu/philox.h), the next counter has the rest of them where a row
 * does not begin with a counter. together: counters whose chains run beside each other. */
template <int rows, int together = 2>
FN uint32_t am_draw(const om_gpu_attention &p, uint64_t seed, int64_t head, int64_t i, int64_t j0) {
    const int lane = threadIdx.x & 31;
    const uint64_t own = (uint64_t)((head * p.tq + i + lane / 4) * p.tk + j0 + lane % 4 * 2);
    uint32_t bits = 0;
    if (p.tk % 64 == 0) { /* rows begin with a counter */
        const uint64_t l = lane % 4 * 2, first = (own - l) / 8 + l;
#pragma unroll together
        for (int turn = 0; turn < rows / 4; turn++) /* r, e */
            bits |= philox_below(seed, p.rng, first + turn / 2 * p.tk + turn % 2, p.keep_below) << 8 * turn;
        return bits;
    }
#pragma unroll together
    for (int turn = 0; turn < rows / 4; turn++) {
        const uint64_t at = own + turn / 2 * 8 * p.tk + turn % 2, counter = at / 64 * 8 + at % 8;
        const int begin = (int)(at / 8 % 8);
        uint32_t kept = philox_below(seed, p.rng, counter, p.keep_below);
        if (begin) kept |= philox_below(seed, p.rng, counter + 8, p.keep_below) << 8;
        bits |= (kept >> begin & 255) << 8 * turn;
    }
    return bits;
}

/* Where attention_mma_bits leaves those bits for the other kernels: a word of every lane for 16 queries and 64 keys; of
 * the same keys the words of all queries, filled up to whole blocks, lie together. */
FN uint32_t *am_bits(const om_gpu_attention &p, int64_t head, int64_t i, int64_t j0) {
    const int64_t tiles = (p.tk + 63) / 64, queries = (p.tq + AM_OWN - 1) / AM_OWN * AM_OWN;
    return p.bits + ((head * tiles + j0 / 64) * queries + i) * 2;
}
#endif
