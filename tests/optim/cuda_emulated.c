/* cuda_emulated.c - csrc/cuda/optim.cu on the host (csrc/cuda/host_emulation.h), behind one function for the tests. */
#include "cuda/host_emulation.h"
#include "cuda/optim.cu"

#include <string.h>

EMU_KERNEL(om_cuda_chunks, om_gpu_optim)
EMU_KERNEL(om_cuda_count, om_gpu_optim)
EMU_KERNEL(om_cuda_adam, om_gpu_optim)
EMU_KERNEL(om_cuda_sgd, om_gpu_optim)
EMU_KERNEL(om_cuda_norm, om_gpu_optim)
EMU_KERNEL(om_cuda_norm_finish, om_gpu_optim)
EMU_KERNEL(om_cuda_lamb_direction, om_gpu_optim)
EMU_KERNEL(om_cuda_lamb_rate, om_gpu_optim)
EMU_KERNEL(om_cuda_lamb_update, om_gpu_optim)
EMU_KERNEL(om_cuda_axpby, om_gpu_optim)

/* kind 0 adam, 1 sgd, 2 lamb, 3 axpby. ptr: 6 pointers a parameter (p g m v w d). type: 5 a parameter (p g m v d).
 * h: lr b1 b2 eps wd mode bias momentum dampening nesterov max_norm keep ratio_min ratio_max a b.
 * scalar: grad_scale, found_inf, norm_out, scale_out. use_norm: the norm kernels run first and set the last three. */
int emulate(int kind, int n, const int64_t *numel, void *const *ptr, const uint8_t *type, float *const *step, int store, uint64_t seed,
            const double *h, float *scalar, int use_norm);
__attribute__((visibility("default"))) int emulate(int kind, int n, const int64_t *numel, void *const *ptr, const uint8_t *type,
                                                    float *const *step, int store, uint64_t seed, const double *h, float *scalar,
                                                    int use_norm) {
    uint32_t chunks = 0, spans = 0, first = 0;
    for (int i = 0; i < n; i++) chunks += (uint32_t)((numel[i] + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK);
    om_gpu_span *span = calloc((size_t)n + 1, sizeof *span);
    om_gpu_chunk *chunk = calloc(chunks + 1, sizeof *chunk);
    double *part = calloc(2 * chunks + 2, sizeof *part), *rate = calloc((size_t)n + 1, sizeof *rate);
    uint8_t *skipped = calloc(chunks + 1, 1);
    for (int i = 0; i < n; i++) {
        if (!numel[i]) continue;
        om_gpu_span *s = &span[spans];
        *s = (om_gpu_span){.n = numel[i], .step = step[i], .stream = (uint64_t)i + 1, .store = (uint8_t)store, .first = first};
        memcpy(&s->p, ptr + 6 * i, 6 * sizeof *ptr);
        memcpy(&s->tp, type + 5 * i, 5);
        uintptr_t all = 0;
        for (int j = 0; j < 6; j++) all |= (uintptr_t)ptr[6 * i + j];
        s->aligned = all % 16 == 0;
        first += (uint32_t)((numel[i] + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK);
        spans++;
    }
    om_gpu_optim o = {.span = span, .chunk = chunk, .n_span = spans, .n_chunk = chunks, .grad_scale = &scalar[0], .found_inf = &scalar[1],
                      .seed = seed, .part = part, .skipped = skipped, .rate = rate, .div = 1, .max_norm = h[10], .norm_out = &scalar[2],
                      .stop_out = &scalar[1], .scale_out = &scalar[3], .write_weights = 1, .keep_grads = h[11] != 0, .a = h[14], .b = h[15]};
    o.adam = (om_adam_cfg){h[0], h[1], h[2], h[3], h[4], 1.0, (int)h[5], h[6] != 0};
    o.sgd = (om_sgd_cfg){h[0], h[7], h[8], h[4], 1.0, h[9] != 0};
    o.lamb = (om_lamb_cfg){.lr = h[0], .beta1 = h[1], .beta2 = h[2], .eps = h[3], .weight_decay = h[4], .grad_weight = 1 - h[1],
                           .ratio_min = h[12], .ratio_max = h[13], .inv_scale = 1, .bias_correction = h[6] != 0};
    int bad = emu_run_om_cuda_chunks(&o, spans, 64);
    if (use_norm) {
        bad |= emu_run_om_cuda_norm(&o, chunks, OM_GPU_THREADS) | emu_run_om_cuda_norm_finish(&o, 1, OM_GPU_THREADS);
        o.grad_scale = &scalar[3];
    }
    if (kind != 3) bad |= emu_run_om_cuda_count(&o, (spans + 63) / 64, 64);
    if (kind == 0) bad |= emu_run_om_cuda_adam(&o, chunks, OM_GPU_THREADS);
    if (kind == 1) bad |= emu_run_om_cuda_sgd(&o, chunks, OM_GPU_THREADS);
    if (kind == 2)
        bad |= emu_run_om_cuda_lamb_direction(&o, chunks, OM_GPU_THREADS) | emu_run_om_cuda_lamb_rate(&o, spans, OM_GPU_THREADS) |
               emu_run_om_cuda_lamb_update(&o, chunks, OM_GPU_THREADS);
    if (kind == 3) bad |= emu_run_om_cuda_axpby(&o, chunks, OM_GPU_THREADS);
    free(span), free(chunk), free(part), free(rate), free(skipped);
    return bad;
}
