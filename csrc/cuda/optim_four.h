/* cuda/optim_four.h - what the optimizers' kernels share: four elements a thread and turn, loaded and stored by type;
 * the chunk that is a block's; sums over a block. The common subset of C and CUDA.
 */
#ifndef OM_CUDA_OPTIM_FOUR_H
#define OM_CUDA_OPTIM_FOUR_H

#include "cuda/optim.h"
#include "cuda/scalar.h"

#if !defined(OM_EMULATED)
/* n blocks a processor keep enough loads in flight */
#define EXPORT_BLOCKS(n) extern "C" __global__ void __launch_bounds__(OM_GPU_THREADS, n)
#define EXPORT EXPORT_BLOCKS(4)
FN uint32_t volatile_load(const uint32_t *p) { return *(const volatile uint32_t *)p; }
#else
#define EXPORT_BLOCKS(n) static void
#define EXPORT EXPORT_BLOCKS(4)
FN uint32_t volatile_load(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
typedef struct uint2 { uint32_t x, y; } uint2;
typedef struct uint4 { uint32_t x, y, z, w; } uint4;
#endif

/* Loops over a thread's four elements always run to 4 (`if (j < n)`): a constant trip count keeps the arrays in
 * registers. */

/* --- four elements ---------------------------------------------------------------------------------- */

/* As loaded: f32 in four words, 16-bit types in two. Unpacking waits for the load; so a kernel fetches all it needs
 * first. */
typedef struct raw4 { uint32_t w[4]; } raw4;

/* once: nobody reads these lines again soon; they are the first to leave the cache. */
FN raw4 fetch4_(int type, const void *p, int64_t i, int n, int vec, int once) {
    raw4 r = {{0, 0, 0, 0}};
    if (type == OM_GPU_F32) {
        const uint32_t *q = (const uint32_t *)p + i;
        if (vec) {
            const uint4 *at = (const uint4 *)(const void *)q, t = once ? __ldcs(at) : *at;
            r.w[0] = t.x, r.w[1] = t.y, r.w[2] = t.z, r.w[3] = t.w;
        } else {
            for (int j = 0; j < 4; j++) if (j < n) r.w[j] = q[j];
        }
    } else {
        const uint16_t *q = (const uint16_t *)p + i;
        if (vec) {
            const uint2 *at = (const uint2 *)(const void *)q, t = once ? __ldcs(at) : *at;
            r.w[0] = t.x, r.w[1] = t.y;
        } else {
            for (int j = 0; j < 4; j++) if (j < n) r.w[j / 2] |= (uint32_t)q[j] << 16 * (j % 2);
        }
    }
    return r;
}

FN raw4 fetch4(int type, const void *p, int64_t i, int n, int vec) { return fetch4_(type, p, i, n, vec, 0); }

FN void unpack4(int type, const raw4 *r, float x[4]) {
    for (int j = 0; j < 4; j++) {
        const uint16_t h = (uint16_t)(r->w[j / 2] >> 16 * (j % 2));
        x[j] = type == OM_GPU_F32 ? bits_f32(r->w[j]) : type == OM_GPU_BF16 ? bf16_in(h) : f16_in(h);
    }
}

FN void load4(int type, const void *p, int64_t i, int n, int vec, float x[4]) {
    const raw4 r = fetch4(type, p, i, n, vec);
    unpack4(type, &r, x);
}

FN void store16_(uint16_t *q, int n, int vec, const uint16_t h[4], int once) {
    if (vec) {
        uint2 t;
        t.x = h[0] | (uint32_t)h[1] << 16, t.y = h[2] | (uint32_t)h[3] << 16;
        if (once) __stcs((uint2 *)(void *)q, t);
        else *(uint2 *)(void *)q = t;
    } else {
        for (int j = 0; j < 4; j++) if (j < n) q[j] = h[j];
    }
}

FN void store16(uint16_t *q, int n, int vec, const uint16_t h[4]) { store16_(q, n, vec, h, 0); }

FN void store4_(int type, void *p, int64_t i, int n, int vec, const float x[4], int once) {
    if (type == OM_GPU_F32) {
        float *q = (float *)p + i;
        if (vec) {
            uint4 t;
            t.x = f32_bits(x[0]), t.y = f32_bits(x[1]), t.z = f32_bits(x[2]), t.w = f32_bits(x[3]);
            if (once) __stcs((uint4 *)(void *)q, t);
            else *(uint4 *)(void *)q = t;
        } else {
            for (int j = 0; j < 4; j++) if (j < n) q[j] = x[j];
        }
        return;
    }
    uint16_t h[4];
    for (int j = 0; j < 4; j++) h[j] = type == OM_GPU_BF16 ? bf16_out(x[j]) : f16_out(x[j]);
    store16_((uint16_t *)p + i, n, vec, h, once);
}
FN void store4(int type, void *p, int64_t i, int n, int vec, const float x[4]) { store4_(type, p, i, n, vec, x, 0); }

/* The weight: what it is stored in, and its f32 value. SPLIT: p's halves in w[0..2), the rests in w[2..4). */
FN raw4 weights_fetch(const om_gpu_span *s, int64_t i, int n, int vec) {
    if (s->store == OM_GPU_MASTER) return fetch4(OM_GPU_F32, s->w, i, n, vec);
    raw4 r = fetch4(s->tp, s->p, i, n, vec);
    if (s->store == OM_GPU_SPLIT) {
        const raw4 lo = fetch4(OM_GPU_BF16, s->w, i, n, vec);
        r.w[2] = lo.w[0], r.w[3] = lo.w[1];
    }
    return r;
}

FN void weights_unpack(const om_gpu_span *s, const raw4 *r, float x[4]) {
    if (s->store == OM_GPU_SPLIT) {
        for (int j = 0; j < 4; j++) {
            const uint32_t hi = r->w[j / 2] >> 16 * (j % 2), lo = r->w[2 + j / 2] >> 16 * (j % 2);
            x[j] = bits_f32((hi << 16) + (uint32_t)(int32_t)(int16_t)(uint16_t)lo);
        }
    } else {
        unpack4(s->store == OM_GPU_MASTER ? OM_GPU_F32 : s->tp, r, x);
    }
}

FN void weights_out(const om_gpu_optim *o, const om_gpu_span *s, int64_t i, int n, int vec, const float x[4]) {
    uint16_t h[4], lo[4];
    if (s->store == OM_GPU_SPLIT) {
        for (int j = 0; j < 4; j++) if (j < n) {
            const uint32_t u = f32_bits(x[j]);
            const int nan = (u & 0x7fffffffu) > 0x7f800000u;
            h[j] = nan ? (uint16_t)0x7fc0u : (uint16_t)((u + 0x8000u) >> 16);
            lo[j] = nan ? (uint16_t)0 : (uint16_t)u;
        }
        store16((uint16_t *)s->p + i, n, vec, h);
        store16((uint16_t *)s->w + i, n, vec, lo);
        return;
    }
    if (s->store == OM_GPU_STOCHASTIC) {
        /* the step is counted on the device, so that every replay of a captured step rounds with new random words */
        const uint64_t seed = o->seed + OM_GPU_SEED_STEP * (uint64_t)*s->step;
        for (int j = 0; j < 4; j++) if (j < n) {
            const uint32_t u = f32_bits(x[j]);
            const uint32_t up = (u + (philox_at(seed, s->stream, (uint64_t)(i + j)) & 0xffffu)) >> 16;
            h[j] = (u & 0x7f800000u) == 0x7f800000u ? bf16_out(x[j]) : (uint16_t)up;
        }
        store16((uint16_t *)s->p + i, n, vec, h);
        return;
    }
    if (s->store == OM_GPU_MASTER) store4(OM_GPU_F32, s->w, i, n, vec, x);
    store4(s->tp, s->p, i, n, vec, x);
}

/* The block's chunk and (in shared memory: its 22 words would cost every thread a third of its registers) span; then
 * the thread's share: i = first element, n = how many of four, vec = all four with one load. */
#define FOR_CHUNK(o, s)                                                                              \
    __shared__ om_gpu_span s;                                                                        \
    const om_gpu_chunk chunk_ = (o).chunk[blockIdx.x];                                               \
    for (unsigned w_ = threadIdx.x; w_ < sizeof(om_gpu_span) / 8; w_ += blockDim.x)                  \
        ((uint64_t *)(void *)&s)[w_] = ((const uint64_t *)(const void *)&(o).span[chunk_.span])[w_]; \
    __syncthreads();                                                                                 \
    const int64_t begin_ = (int64_t)chunk_.index * OM_GPU_BLOCK,                                     \
                  end_ = s.n - begin_ < OM_GPU_BLOCK ? s.n : begin_ + OM_GPU_BLOCK;
#define EACH4(s)                                                                           \
    for (int64_t i = begin_ + 4 * (int64_t)threadIdx.x; i < end_; i += 4 * OM_GPU_THREADS) \
        for (int n = end_ - i < 4 ? (int)(end_ - i) : 4, vec = s.aligned && n == 4, once_ = 1; once_; once_ = 0)

FN double read_lr(const om_gpu_optim *o, double lr) { return o->lr ? (double)*o->lr : lr; }
FN double read_inv_scale(const om_gpu_optim *o, double inv) {
    return o->grad_scale ? inv / (double)*o->grad_scale : inv;
}
FN int stopped(const om_gpu_optim *o) { return o->found_inf && *o->found_inf != 0; }

/* --- sums -------------------------------------------------------------------------------------------- */

/* Sum of x (smallest x) over the thread block, in a fixed order; every thread gets it. */
FN double block_reduce(double x, double *shared, int smallest) {
    shared[threadIdx.x] = x;
    __syncthreads();
    for (unsigned w = OM_GPU_THREADS / 2; w; w /= 2) {
        if (threadIdx.x < w) {
            const double a = shared[threadIdx.x], b = shared[threadIdx.x + w];
            shared[threadIdx.x] = !smallest ? a + b : a < b ? a : b;
        }
        __syncthreads();
    }
    const double result = shared[0];
    __syncthreads();
    return result;
}
FN double block_sum(double x, double *shared) { return block_reduce(x, shared, 0); }
FN double block_min(double x, double *shared) { return block_reduce(x, shared, 1); }
#endif
