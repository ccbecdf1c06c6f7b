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
#include "cuda/optim_four.h"
#include "cuda/optim_lamb.h"

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

/* --- norms, loss scaling --------------------------------------------------------------------------- */

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
