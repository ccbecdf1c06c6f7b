/* cuda/optim_lamb.h - LAMB's kernels, a part of optim.cu: in three launches, and in one.
 */
#ifndef OM_CUDA_OPTIM_LAMB_H
#define OM_CUDA_OPTIM_LAMB_H

#include "cuda/optim_four.h"

/* --- lamb -------------------------------------------------------------------------------------------- */

FN om_lamb_f32 lamb_constants(const om_gpu_optim *o, const om_gpu_span *s) {
    om_lamb_cfg c = o->lamb;
    c.inv_scale = read_inv_scale(o, c.inv_scale);
    return om_lamb_prepare_f32(&c, (double)*s->step);
}
FN int lamb_grad_out(const om_gpu_optim *o, const om_gpu_span *s) { return !o->keep_grads && s->tg == OM_GPU_F32; }

/* squares of weights and directions, elements that were not finite */
typedef struct lamb_sums { double p2, d2, bad; } lamb_sums;

/* Sweep 1 over [begin, end): this thread's share. once: sweep 2 follows in the same launch, what it does not need may
 * leave the cache. */
FN lamb_sums lamb_direction(const om_gpu_span *s, const om_lamb_f32 *k, int grad_out, int once, int64_t begin_,
                            int64_t end_) {
    lamb_sums sum = {0, 0, 0};
    EACH4((*s)) {
        float p[4], g[4], m[4], v[4], d[4] = {0};
        int any = 0;
        const raw4 rp = weights_fetch(s, i, n, vec), rg = fetch4_(s->tg, s->g, i, n, vec, once && !grad_out),
                   rm = fetch4_(s->tm, s->m, i, n, vec, once && grad_out),
                   rv = fetch4_(s->tv, s->v, i, n, vec, once && grad_out);
        weights_unpack(s, &rp, p), unpack4(s->tg, &rg, g), unpack4(s->tm, &rm, m), unpack4(s->tv, &rv, v);
        for (int j = 0; j < 4; j++) if (j < n) {
            float m1, v1;
            d[j] = om_lamb_moments_f32(k, p[j], g[j], m[j], v[j], &m1, &v1);
            if (d[j] - d[j] == 0) m[j] = m1, v[j] = v1;
            else d[j] = 0, g[j] = bits_f32(0x7fc00000u), any = 1;
            sum.p2 += (double)p[j] * (double)p[j];
            sum.d2 += (double)d[j] * (double)d[j];
        }
        store4_(s->tm, s->m, i, n, vec, m, once && grad_out);
        store4_(s->tv, s->v, i, n, vec, v, once && grad_out);
        if (grad_out) store4(s->tg, s->g, i, n, vec, d);
        else if (any) store4(s->tg, s->g, i, n, vec, g);
        sum.bad += any;
    }
    return sum;
}

/* Sweep 2 over [begin, end). */
FN void lamb_update(const om_gpu_optim *o, const om_gpu_span *s, const om_lamb_f32 *k, int grad_out, int skipped,
                    float rate, int64_t begin_, int64_t end_) {
    EACH4((*s)) {
        float p[4], g[4] = {0}, m[4] = {0}, v[4] = {0}, d[4] = {0};
        const raw4 rp = weights_fetch(s, i, n, vec);
        if (grad_out || skipped) load4(s->tg, s->g, i, n, vec, g);
        if (!grad_out) load4(s->tm, s->m, i, n, vec, m), load4(s->tv, s->v, i, n, vec, v);
        weights_unpack(s, &rp, p);
        for (int j = 0; j < 4; j++) if (j < n) {
            d[j] = grad_out ? g[j] : skipped && g[j] != g[j] ? 0.0f : om_lamb_direction_f32(k, p[j], m[j], v[j]);
            d[j] = -rate * d[j];
            const float q = p[j] + d[j];
            if (q - q == 0) p[j] = q;
            else d[j] = 0;
        }
        if (o->write_weights) weights_out(o, s, i, n, vec, p);
        if (s->d) store4(s->td, s->d, i, n, vec, d);
    }
}

/* lr times the trust ratio from `count` pairs of sums; in thread 0. */
FN double lamb_rate(const om_gpu_optim *o, const double *part, uint32_t count, double *shared) {
    double w2 = 0, d2 = 0;
    for (uint32_t c = threadIdx.x; c < count; c += OM_GPU_THREADS) w2 += part[2 * c], d2 += part[2 * c + 1];
    w2 = block_sum(w2, shared);
    d2 = block_sum(d2, shared);
    om_lamb_cfg c = o->lamb;
    c.lr = read_lr(o, c.lr);
    return om_lamb_rate(&c, w2, d2);
}

EXPORT_BLOCKS(OM_GPU_LAMB_BLOCKS) om_cuda_lamb_direction(const om_gpu_optim o) {
    __shared__ double shared[OM_GPU_THREADS];
    __shared__ om_lamb_f32 k;
    FOR_CHUNK(o, s)
    if (stopped(&o)) return;
    if (threadIdx.x == 0) k = lamb_constants(&o, &s);
    __syncthreads();
    const lamb_sums sum = lamb_direction(&s, &k, lamb_grad_out(&o, &s), 0, begin_, end_);
    const double p2 = block_sum(sum.p2, shared), d2 = block_sum(sum.d2, shared), bad = block_sum(sum.bad, shared);
    if (threadIdx.x == 0)
        o.part[2 * blockIdx.x] = p2, o.part[2 * blockIdx.x + 1] = d2, o.skipped[blockIdx.x] = bad != 0;
}

/* One thread block per span; its chunks are consecutive. */
EXPORT om_cuda_lamb_rate(const om_gpu_optim o) {
    __shared__ double shared[OM_GPU_THREADS];
    if (stopped(&o)) return;
    const om_gpu_span *s = &o.span[blockIdx.x];
    const double rate = lamb_rate(&o, o.part + 2 * s->first, (uint32_t)((s->n + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK),
                                  shared);
    if (threadIdx.x == 0) o.rate[blockIdx.x] = rate;
}

EXPORT om_cuda_lamb_update(const om_gpu_optim o) {
    __shared__ om_lamb_f32 k;
    FOR_CHUNK(o, s)
    if (stopped(&o)) return;
    if (threadIdx.x == 0) k = lamb_constants(&o, &s);
    __syncthreads();
    lamb_update(&o, &s, &k, lamb_grad_out(&o, &s), o.skipped[blockIdx.x], (float)o.rate[chunk_.span], begin_, end_);
}

/* --- lamb in one launch ----------------------------------------------------------------------------------
 *
 * The second sweep reads what the first has read and written: 8 bytes an element (p, and d in the gradient's place) or
 * 12 (p, m, v). It finds them in the L2 cache if it comes soon enough. So thread blocks take tickets from one counter,
 * in an order that lets the sweeps of a span follow each other closely: a span's second sweep begins when `lag` more
 * pieces of the first have been handed out, about as many as thread blocks run at once, and goes backwards, so that of
 * a span larger than the cache at least the end is still there. From memory: 32 bytes an element (28 where gradients
 * are kept) for what the cache holds, 40 for the rest.
 *
 * Why it cannot hang, whatever the grid, its order and what else runs: a block takes a ticket when it is through with
 * its last one, so every ticket out is held by a block that runs. Tickets of the first sweep wait for nothing. One of
 * the second sweep waits for the span's rate, which the last to come through of the span's first-sweep pieces writes,
 * and all those have smaller tickets. Hence the smallest ticket that is not through waits for nothing, and comes
 * through; then the next. No block waits for one that may not have started: a cooperative launch is not needed, and one
 * block alone does all the work (in the host emulation, where waiting is then an error).
 *
 * Visibility: a block's writes, then a barrier, then thread 0's fence and its count of the span's pieces; whoever
 * counted the last piece or saw the rate's count reads after a fence and a barrier (the fence also drops lines the
 * processor's first-level cache has kept).
 *
 * The bits depend neither on grid and order nor on timing: sums are per piece, and added in the order of pieces.
 */
FN uint32_t span_pieces(const om_gpu_span *s) { return (uint32_t)((s->n + OM_GPU_PIECE - 1) / OM_GPU_PIECE); }
FN uint32_t all_pieces(const om_gpu_optim *o) {
    return o->span[o->n_span - 1].first_piece + span_pieces(&o->span[o->n_span - 1]);
}

/* First ticket of a span's second sweep; it rises from span to span. The second sweeps before it have first_piece
 * tickets. */
FN uint32_t second_sweep(const om_gpu_optim *o, const om_gpu_span *s, uint32_t all) {
    const uint32_t end = s->first_piece + span_pieces(s);
    return (end + o->lag < all ? end + o->lag : all) + s->first_piece;
}

/* One thread per ticket. */
EXPORT om_cuda_lamb_order(const om_gpu_optim o) {
    const uint32_t t = blockIdx.x * blockDim.x + threadIdx.x, all = all_pieces(&o);
    if (t >= 2 * all) return;
    uint32_t lo = 0, hi = o.n_span; /* spans whose second sweep begins at t or before */
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (second_sweep(&o, &o.span[mid], all) <= t) lo = mid + 1;
        else hi = mid;
    }
    uint32_t piece = t;
    if (lo) {
        const om_gpu_span *s = &o.span[lo - 1];
        const uint32_t k = t - second_sweep(&o, s, all), count = span_pieces(s);
        if (k < count) {
            o.item[t] = OM_GPU_PIECES * s->first + (count - 1 - k) + OM_GPU_SWEEP2 + 1u;
            return;
        }
        piece = t - (s->first_piece + count); /* tickets of second sweeps before t */
    }
    for (lo = 0, hi = o.n_span; hi - lo > 1;) {
        const uint32_t mid = (lo + hi) / 2;
        if (o.span[mid].first_piece <= piece) lo = mid;
        else hi = mid;
    }
    o.item[t] = OM_GPU_PIECES * o.span[lo].first + (piece - o.span[lo].first_piece);
}

EXPORT_BLOCKS(OM_GPU_LAMB_BLOCKS) om_cuda_lamb(const om_gpu_optim o) {
    __shared__ double shared[OM_GPU_THREADS];
    __shared__ om_lamb_f32 k;
    __shared__ om_gpu_span s;
    __shared__ uint32_t item, last;
    if (stopped(&o)) return;
    const uint32_t tickets = 2 * all_pieces(&o), none = 0xffffffffu;
    for (uint32_t span = none;;) {
        if (threadIdx.x == 0) {
            const uint32_t t = atomicAdd(o.ticket, 1u);
            item = t < tickets ? o.item[t] : none;
        }
        __syncthreads();
        const uint32_t taken = item;
        if (taken == none) return;
        const int second = taken > OM_GPU_SWEEP2;
        const uint32_t id = taken & OM_GPU_SWEEP2;
        const om_gpu_chunk chunk = o.chunk[id / OM_GPU_PIECES];
        if (chunk.span != span) {
            span = chunk.span;
            for (unsigned w = threadIdx.x; w < sizeof(om_gpu_span) / 8; w += blockDim.x)
                ((uint64_t *)(void *)&s)[w] = ((const uint64_t *)(const void *)&o.span[span])[w];
            __syncthreads();
            if (threadIdx.x == 0) k = lamb_constants(&o, &s);
        }
        const uint32_t count = span_pieces(&s);
        if (second && threadIdx.x == 0) {
            while (volatile_load(&o.done[span]) != count + 1) __nanosleep(100);
            __threadfence();
        }
        __syncthreads();
        const int grad_out = lamb_grad_out(&o, &s);
        const int64_t begin = ((int64_t)chunk.index * OM_GPU_PIECES + id % OM_GPU_PIECES) * OM_GPU_PIECE;
        const int64_t end = s.n - begin < OM_GPU_PIECE ? s.n : begin + OM_GPU_PIECE;
        if (second) {
            lamb_update(&o, &s, &k, grad_out, o.skipped[id], (float)o.rate[span], begin, end);
            continue;
        }
        const lamb_sums sum = lamb_direction(&s, &k, grad_out, 1, begin, end);
        const double p2 = block_sum(sum.p2, shared), d2 = block_sum(sum.d2, shared), bad = block_sum(sum.bad, shared);
        if (threadIdx.x == 0) { /* after the barriers of the sums: everything this block wrote */
            o.part[2 * id] = p2, o.part[2 * id + 1] = d2, o.skipped[id] = bad != 0;
            __threadfence();
            last = atomicAdd(&o.done[span], 1u) + 1 == count;
            __threadfence();
        }
        __syncthreads();
        if (!last) continue;
        const double rate = lamb_rate(&o, o.part + 2 * (size_t)OM_GPU_PIECES * s.first, count, shared);
        if (threadIdx.x == 0) {
            o.rate[span] = rate;
            __threadfence();
            atomicAdd(&o.done[span], 1u);
        }
    }
}
#endif
