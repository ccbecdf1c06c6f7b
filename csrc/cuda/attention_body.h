/* attention_body.h - what the attention kernels share: which keys a query sees, scores, dropout, tiles of rows in
 * shared memory. Plain multiply-adds in the type computed in; four warps a block, a warp works on ROWS rows of its own
 * against tiles of 32 rows of the other side, a lane each. Sizes of a head up to 32 * PARTS.
 */
#ifndef OM_CUDA_ATTENTION_BODY_H
#define OM_CUDA_ATTENTION_BODY_H

#include "cuda/kernel.h"

enum { ATT_ROWS = 4, ATT_PARTS = 8, ATT_BLOCK = 128, ATT_TILE = 32, ATT_OWN = 4 * ATT_ROWS };

FN float exp_low_of(float x) { return vm_exp_neg(x); }
FN double exp_low_of(double x) { return exp(x); }

struct att_head { int64_t b, h, kv; }; /* batch entry, query head, key and value head */

FN bool att_sees(const om_gpu_attention &p, int64_t b, int64_t i, int64_t j) {
    if (i >= p.tq || j >= p.tk) return false;
    if (p.kv_start && j < ld(p.kv_start + b * p.start_step)) return false;
    if (p.kv_end && j >= ld(p.kv_end + b * p.end_step)) return false;
    if (p.causal && j > i + p.offset) return false;
    return !(p.window > 0 && j <= i - p.window);
}

#if defined(OM_EMULATED)
#define CALLED static
#else
#define CALLED static __device__ __noinline__ /* one copy for all unrolled rows */
#endif

/* The score of a pair whose product is dot; -inf: not seen. */
template <class S, class F>
CALLED F att_score(const om_gpu_attention &p, const att_head &a, int64_t i, int64_t j, F dot) {
    if (!att_sees(p, a.b, i, j)) return -inf_of((F)0);
    const int64_t m = a.b * p.smask[0] + a.h * p.smask[1] + i * p.smask[2] + j * p.smask[3];
    F s = dot * (F)p.scale;
    if (p.mask_kind == 1) return ld((const uint8_t *)p.mask + m) ? s : -inf_of((F)0);
    return p.mask_kind ? s + (F)float_at(p.mask, p.mask_type, m) : s;
}

/* What dropout multiplies the pair's probability by. */
template <class F>
CALLED F att_keep(const om_gpu_attention &p, const att_head &a, uint64_t seed, int64_t i, int64_t j) {
    if (!p.drop) return 1;
    const uint64_t at = (uint64_t)(((a.b * p.hq + a.h) * p.tq + i) * p.tk + j);
    return philox_at(seed, p.rng, at) < p.keep_below ? (F)p.drop_scale : (F)0;
}

/* Rows [from, from + n) of a head into shared memory, d apart by d + 1; rows beyond `limit` are 0. */
template <class S, class F>
FN void att_load(const char *x, const int64_t *s, int64_t b, int64_t h, int64_t from, int n, int64_t limit, int64_t d,
                 F *to) {
    const int64_t base = b * s[0] + h * s[1];
    for (int64_t e = threadIdx.x; e < n * d; e += blockDim.x) {
        const int64_t r = e / d, c = e % d;
        to[r * (d + 1) + c] = from + r < limit ? at<S>(x, base + (from + r) * s[2] + c * s[3]) : (F)0;
    }
}

template <class F> FN F att_dot(const F *x, const F *y, int64_t d) {
    F s = 0;
#pragma unroll 4
    for (int64_t c = 0; c < d; c++) s += x[c] * y[c];
    return s;
}

/* own[part] += sum over the tile's 32 rows k of w[k] * row k, elements lane + 32 part. */
template <class F> FN void att_add(F *own, const F *w, const F *rows, int64_t d) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll
    for (int part = 0; part < ATT_PARTS; part++) {
        const int64_t c = lane + 32 * part;
        if (c >= d) continue;
        F x = own[part];
#pragma unroll 4
        for (int k = 0; k < ATT_TILE; k++) x += w[k] * rows[k * (d + 1) + c];
        own[part] = x;
    }
}

/* A row of d elements to `to` from element `base` on, `step` apart: own * by. */
template <class S, class F> FN void att_put(char *to, int64_t base, int64_t step, int64_t d, const F *own, F by) {
    const unsigned lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < ATT_PARTS; c++)
        if (lane + 32 * c < d) put<S>(to, base + (lane + 32 * c) * step, own[c] * by);
}
#endif
