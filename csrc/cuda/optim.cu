/* optim.cu - Adam, SGD, LAMB, norms and scaled copies on the GPU: the arithmetic of optim_math.h over a table of chunks
 * (optim.h).
 *
 *   om_cuda_adam, om_cuda_sgd   one sweep
 *   om_cuda_norm, ..._finish    sum of squares per chunk in f64, then one thread block adds them in a fixed order:
 *                               norm, stop flag, divisor
 *   om_cuda_lamb_direction, ..._rate, ..._update    moments and partial norms; trust ratio per span; weights (40 bytes
 *   a parameter)
 *   om_cuda_lamb, ..._order     the same in one launch whose second sweep finds the first one's data in the L2 cache;
 *                               the order of its work
 *   om_cuda_loss_scale          after a scaled step: the next loss scale, counters, a log of overflows (FP16_Optimizer)
 *   om_cuda_count               step counters + 1, unless found_inf
 *   om_cuda_axpby               p = a g + b p with conversion; in place with a factor of 1 (nothing clipped) it reads
 *                               nothing
 *   om_cuda_upload, ..._chunks  the table of spans, carried in the arguments: no staging memory whose life a captured
 *                               graph would prolong, no copy the host could wait for; then the table of chunks, made
 *                               from it
 *
 * Four elements a thread and turn; 16-byte (f32) or 8-byte (16-bit) loads when the span is aligned. Sums use shared
 * memory in a fixed order, never atomics: the same bits every time. Written in the common subset of C and CUDA:
 * host_emulation.h runs it without a GPU.
 */
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
/* --- tables ------------------------------------------------------------------------------------------ */

EXPORT om_cuda_upload(const om_gpu_upload u) {
    for (uint32_t i = threadIdx.x; i < u.n_word; i += blockDim.x) u.to[i] = u.word[i];
}

/* One thread block per span. */
EXPORT om_cuda_chunks(const om_gpu_optim o) {
    const om_gpu_span *s = &o.span[blockIdx.x];
    const uint32_t first = s->first, count = (uint32_t)((s->n + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK);
    for (uint32_t c = threadIdx.x; c < count; c += blockDim.x) {
        om_gpu_chunk k;
        k.span = blockIdx.x, k.index = c;
        o.chunk[first + c] = k;
    }
}

/* --- adam, sgd --------------------------------------------------------------------------------------- */

EXPORT om_cuda_count(const om_gpu_optim o) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < o.n_span && !stopped(&o)) *o.span[i].step += 1.0f;
    if (i < o.n_span && o.done) o.done[i] = 0;
    if (i == 0 && o.ticket) *o.ticket = 0;
}

EXPORT om_cuda_adam(const om_gpu_optim o) {
    __shared__ om_adam_f32 k;
    FOR_CHUNK(o, s)
    if (stopped(&o)) return;
    if (threadIdx.x == 0) {
        om_adam_cfg c = o.adam;
        c.lr = read_lr(&o, c.lr), c.inv_scale = read_inv_scale(&o, c.inv_scale);
        k = om_adam_prepare_f32(&c, (double)*s.step);
    }
    __syncthreads();
    EACH4(s) {
        float p[4], g[4], m[4], v[4];
        const raw4 rp = weights_fetch(&s, i, n, vec), rg = fetch4(s.tg, s.g, i, n, vec),
                   rm = fetch4(s.tm, s.m, i, n, vec), rv = fetch4(s.tv, s.v, i, n, vec);
        weights_unpack(&s, &rp, p), unpack4(s.tg, &rg, g), unpack4(s.tm, &rm, m), unpack4(s.tv, &rv, v);
        for (int j = 0; j < 4; j++) p[j] = om_adam_at_f32(&k, p[j], g[j], &m[j], &v[j]);
        weights_out(&o, &s, i, n, vec, p);
        store4(s.tm, s.m, i, n, vec, m);
        store4(s.tv, s.v, i, n, vec, v);
    }
}

EXPORT om_cuda_sgd(const om_gpu_optim o) {
    __shared__ om_sgd_f32 k;
    FOR_CHUNK(o, s)
    if (stopped(&o)) return;
    if (threadIdx.x == 0) {
        om_sgd_cfg c = o.sgd;
        c.lr = read_lr(&o, c.lr), c.inv_scale = read_inv_scale(&o, c.inv_scale);
        k = om_sgd_prepare_f32(&c, *s.step <= 1);
    }
    __syncthreads();
    EACH4(s) {
        float p[4], g[4], m[4] = {0};
        const raw4 rp = weights_fetch(&s, i, n, vec), rg = fetch4(s.tg, s.g, i, n, vec);
        if (s.m) load4(s.tm, s.m, i, n, vec, m);
        weights_unpack(&s, &rp, p), unpack4(s.tg, &rg, g);
        for (int j = 0; j < 4; j++) p[j] = om_sgd_at_f32(&k, p[j], g[j], &m[j]);
        weights_out(&o, &s, i, n, vec, p);
        if (s.m) store4(s.tm, s.m, i, n, vec, m);
    }
}

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

EXPORT om_cuda_norm(const om_gpu_optim o) {
    __shared__ double shared[OM_GPU_THREADS];
    FOR_CHUNK(o, s)
    double sum = 0;
    EACH4(s) {
        float g[4] = {0, 0, 0, 0};
        load4(s.tg, s.g, i, n, vec, g);
        for (int j = 0; j < 4; j++) if (j < n) sum += (double)g[j] * (double)g[j];
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) o.part[2 * blockIdx.x] = sum;
}

/* One thread block. */
EXPORT om_cuda_norm_finish(const om_gpu_optim o) {
    __shared__ double shared[OM_GPU_THREADS];
    /* squares of f32 do not overflow in f64: a sum that is not finite has an inf or NaN in it */
    double sum = 0, bad = (double)o.n_chunk;
    for (uint32_t c = threadIdx.x; c < o.n_chunk; c += OM_GPU_THREADS) {
        const double part = o.part[2 * c];
        sum += part;
        if (!(part - part == 0) && (double)c < bad) bad = (double)c;
    }
    sum = block_sum(sum, shared);
    if (o.first_out) bad = block_min(bad, shared);
    if (threadIdx.x) return;
    const double scale = o.div * (o.grad_scale ? (double)*o.grad_scale : 1.0), norm = sqrt(sum);
    const int finite = sum - sum == 0;
    double divisor = scale;
    if (o.clip == OM_GPU_CLIP_TORCH || (o.clip == OM_GPU_CLIP_FINITE && finite)) {
        const double factor = o.max_norm / (norm / scale + 1e-6);
        if (!(factor >= 1)) divisor = scale / factor;
    } else if (o.clip == OM_GPU_CLIP_LAMB && finite) {
        divisor = 1.0 / om_lamb_inv_scale(scale, norm, o.max_norm);
    }
    if (o.first_out)
        *o.first_out = bad < (double)o.n_chunk ? (float)o.span[o.chunk[(uint32_t)bad].span].stream - 1.0f : -1.0f;
    if (o.norm_out) *o.norm_out = (float)(norm / scale);
    if (o.stop_out) *o.stop_out = !finite || stopped(&o) ? 1.0f : 0.0f;
    if (o.scale_out) *o.scale_out = (float)divisor;
}

/* One thread. After the step it decided about has been queued, so that no step counts that was never launched. */
EXPORT om_cuda_loss_scale(const om_gpu_scaling a) {
    if (threadIdx.x) return;
    om_gpu_steps *s = a.steps;
    const int finite = *a.stop == 0;
    const double before = a.scaler->scale;
    if (a.automatic) *a.scaler = om_loss_scale_next(*a.scaler, finite, a.window, a.lowest, a.highest);
    s->overflow = !finite;
    s->row = finite ? 0 : s->row + 1;
    if (finite) {
        s->done += 1;
        return;
    }
    om_gpu_overflow *k = &s->log[(uint64_t)s->skipped % OM_GPU_LOG];
    k->step = s->done + s->skipped, k->param = (double)*a.first, k->before = before, k->after = a.scaler->scale,
    k->row = s->row;
    s->skipped += 1;
}

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

/* --- scaled copies ----------------------------------------------------------------------------------- */

EXPORT om_cuda_axpby(const om_gpu_optim o) {
    FOR_CHUNK(o, s)
    const float a = (float)read_inv_scale(&o, o.a), b = (float)o.b;
    if (a == 1 && b == 0 && s.g == s.p) return;
    EACH4(s) {
        float x[4] = {0}, y[4] = {0};
        load4(s.tg, s.g, i, n, vec, x);
        if (b != 0) load4(s.tp, s.p, i, n, vec, y);
        for (int j = 0; j < 4; j++) x[j] = b != 0 ? a * x[j] + b * y[j] : a * x[j];
        store4(s.tp, s.p, i, n, vec, x);
    }
}
