/* cuda_emulated.c - csrc/cuda/optim.cu on the host (csrc/cuda/host_emulation.h), behind one function for the tests. */
#include "cuda/host_emulation.h"
#include "cuda/optim.cu"

#include <string.h>

#define KERNEL(name, type) EMU_KERNEL(name, type)
#include "cuda/kernels.def"
#undef KERNEL
#define PUBLIC __attribute__((visibility("default")))

/* those with elements; returns how many chunks */
static uint32_t spans_fill(om_gpu_span *span, int n, const int64_t *numel) {
    uint32_t chunks = 0, pieces = 0;
    for (int i = 0, k = 0; i < n; i++) {
        if (!numel[i]) continue;
        span[k].n = numel[i], span[k].first = chunks, span[k].first_piece = pieces;
        chunks += (uint32_t)((numel[i] + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK);
        pieces += span_pieces(&span[k++]);
    }
    return chunks;
}

long host_threads(int n);
PUBLIC long host_threads(int n) { /* also returns how often blocks have waited for another so far */
    emu_host_threads = n;
    return emu_waits;
}

/* The order of om_cuda_lamb's work: item per ticket; returns how many tickets, or -1. */
int lamb_order(int n, const int64_t *numel, int lag, uint32_t *item);
PUBLIC int lamb_order(int n, const int64_t *numel, int lag, uint32_t *item) {
    om_gpu_span *span = calloc((size_t)n + 1, sizeof *span);
    spans_fill(span, n, numel);
    om_gpu_optim o = {.span = span, .item = item, .lag = (uint32_t)lag};
    while (span[o.n_span].n) o.n_span++;
    const int tickets = 2 * (int)all_pieces(&o);
    const int bad = emu_run_om_cuda_lamb_order(&o, (unsigned)(tickets / OM_GPU_THREADS + 1), OM_GPU_THREADS);
    free(span);
    return bad ? -1 : tickets;
}

/* kind 0 adam, 1 sgd, 2 lamb, 3 axpby, 4 lamb in one launch: of launch[0] blocks, lag launch[1], launch[2]: the order
 * reversed, which must hang. ptr: 6 pointers a parameter (p g m v w d). type: 5 a parameter (p g m v d). h: lr b1 b2
 * eps wd mode bias momentum dampening nesterov max_norm keep ratio_min ratio_max a b. scalar: grad_scale, found_inf,
 * norm_out, scale_out. use_norm: the norm kernels run first and set the last three. */
int emulate(int kind, int n, const int64_t *numel, void *const *ptr, const uint8_t *type, float *const *step, int store,
            uint64_t seed, const double *h, float *scalar, int use_norm, const int *launch);
PUBLIC int emulate(int kind, int n, const int64_t *numel, void *const *ptr, const uint8_t *type, float *const *step,
                   int store, uint64_t seed, const double *h, float *scalar, int use_norm, const int *launch) {
    uint32_t spans = 0;
    om_gpu_span *span = calloc((size_t)n + 1, sizeof *span);
    const uint32_t chunks = spans_fill(span, n, numel), parts = OM_GPU_PIECES * chunks;
    om_gpu_chunk *chunk = calloc(chunks + 1, sizeof *chunk);
    double *part = calloc(2 * parts + 2, sizeof *part), *rate = calloc((size_t)n + 1, sizeof *rate);
    uint8_t *skipped = calloc(parts + 1, 1);
    uint32_t *item = calloc(2 * parts + 1, sizeof *item), *done = malloc(((size_t)n + 1) * sizeof *done),
             ticket = 12345;
    memset(done, 0xee, ((size_t)n + 1) * sizeof *done);
    for (int i = 0; i < n; i++) {
        if (!numel[i]) continue;
        om_gpu_span *s = &span[spans];
        s->step = step[i], s->stream = (uint64_t)i + 1, s->store = (uint8_t)store;
        memcpy(&s->p, ptr + 6 * i, 6 * sizeof *ptr);
        memcpy(&s->tp, type + 5 * i, 5);
        uintptr_t all = 0;
        for (int j = 0; j < 6; j++) all |= (uintptr_t)ptr[6 * i + j];
        s->aligned = all % 16 == 0;
        spans++;
    }
    om_gpu_optim o = {.span = span,
                      .chunk = chunk,
                      .n_span = spans,
                      .n_chunk = chunks,
                      .grad_scale = &scalar[0],
                      .found_inf = &scalar[1],
                      .seed = seed,
                      .part = part,
                      .skipped = skipped,
                      .rate = rate,
                      .div = 1,
                      .max_norm = h[10],
                      .norm_out = &scalar[2],
                      .stop_out = &scalar[1],
                      .scale_out = &scalar[3],
                      .write_weights = 1,
                      .keep_grads = h[11] != 0,
                      .a = h[14],
                      .b = h[15]};
    o.adam = (om_adam_cfg){h[0], h[1], h[2], h[3], h[4], 1.0, (int)h[5], h[6] != 0};
    o.sgd = (om_sgd_cfg){h[0], h[7], h[8], h[4], 1.0, h[9] != 0};
    o.lamb = (om_lamb_cfg){.lr = h[0],
                           .beta1 = h[1],
                           .beta2 = h[2],
                           .eps = h[3],
                           .weight_decay = h[4],
                           .grad_weight = 1 - h[1],
                           .ratio_min = h[12],
                           .ratio_max = h[13],
                           .inv_scale = 1,
                           .bias_correction = h[6] != 0};
    if (kind == 4) o.item = item, o.done = done, o.ticket = &ticket, o.lag = (uint32_t)launch[1];
    int bad = emu_run_om_cuda_chunks(&o, spans, 64);
    if (use_norm) {
        bad |= emu_run_om_cuda_norm(&o, chunks, OM_GPU_THREADS) | emu_run_om_cuda_norm_finish(&o, 1, OM_GPU_THREADS);
        o.grad_scale = &scalar[3];
    }
    if (kind != 3) bad |= emu_run_om_cuda_count(&o, (spans + 63) / 64, 64);
    if (kind == 0) bad |= emu_run_om_cuda_adam(&o, chunks, OM_GPU_THREADS);
    if (kind == 1) bad |= emu_run_om_cuda_sgd(&o, chunks, OM_GPU_THREADS);
    if (kind == 2)
        bad |= emu_run_om_cuda_lamb_direction(&o, chunks, OM_GPU_THREADS) |
               emu_run_om_cuda_lamb_rate(&o, spans, OM_GPU_THREADS) |
               emu_run_om_cuda_lamb_update(&o, chunks, OM_GPU_THREADS);
    if (kind == 4) {
        const uint32_t tickets = 2 * all_pieces(&o);
        bad |= emu_run_om_cuda_lamb_order(&o, tickets / OM_GPU_THREADS + 1, OM_GPU_THREADS);
        for (uint32_t t = 0; launch[2] && t < tickets / 2; t++) {
            const uint32_t x = item[t];
            item[t] = item[tickets - 1 - t], item[tickets - 1 - t] = x;
        }
        bad |= emu_run_om_cuda_lamb(&o, (unsigned)launch[0], OM_GPU_THREADS);
    }
    if (kind == 3) bad |= emu_run_om_cuda_axpby(&o, chunks, OM_GPU_THREADS);
    free(span), free(chunk), free(part), free(rate), free(skipped), free(item), free(done);
    return bad;
}
