/* host_emulation.h - runs a .cu file of this project on the host, one thread block after the other, so that its logic is tested on
 * machines without a GPU. Include it before the .cu, compile as C.
 *
 * Every thread of a block is a fiber (ucontext). __syncthreads() switches to the next fiber; a fiber that comes back from it has been
 * around once, so all have arrived. Fibers run in turn, hence races between barriers are not found, but a missing barrier is likely to
 * show, because the first fiber runs far ahead of the last. __shared__ variables are static: one block runs at a time.
 * What the .cu may use: threadIdx.x, blockIdx.x, blockDim.x, gridDim.x, __syncthreads, __shared__; no shuffles, no atomics.
 */
#ifndef OM_HOST_EMULATION_H
#define OM_HOST_EMULATION_H

#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>

#define OM_EMULATED 1
#define __global__ static
#define __device__ static inline
#define __shared__ static
#define __launch_bounds__(n)

typedef struct emu_dim { unsigned x; } emu_dim;
static emu_dim threadIdx, blockIdx, blockDim, gridDim;

enum { EMU_STACK = 64 << 10, EMU_MAX_THREADS = 1024 };
static ucontext_t emu_main, emu_fiber[EMU_MAX_THREADS];
static uint8_t emu_done[EMU_MAX_THREADS];
static void (*emu_call)(const void *args);
static const void *emu_args;

static void emu_entry(void) {
    emu_call(emu_args);
    emu_done[threadIdx.x] = 1;
}

static void __syncthreads(void) {
    const unsigned self = threadIdx.x;
    swapcontext(&emu_fiber[self], &emu_main); /* the scheduler resumes every other fiber before this one */
    threadIdx.x = self;
}

/* Runs call(args) for `threads` threads in each of `blocks` blocks; 0, or -1 without memory. */
static int emu_launch(void (*call)(const void *args), const void *args, unsigned blocks, unsigned threads) {
    char *stacks = malloc((size_t)threads * EMU_STACK);
    if (!stacks) return -1;
    emu_call = call, emu_args = args;
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned t = 0; t < threads; t++) {
            getcontext(&emu_fiber[t]);
            emu_fiber[t].uc_stack.ss_sp = stacks + (size_t)t * EMU_STACK;
            emu_fiber[t].uc_stack.ss_size = EMU_STACK;
            emu_fiber[t].uc_link = &emu_main;
            makecontext(&emu_fiber[t], emu_entry, 0);
            emu_done[t] = 0;
        }
        for (unsigned left = threads; left;) {
            left = 0;
            for (unsigned t = 0; t < threads; t++) {
                if (emu_done[t]) continue;
                threadIdx.x = t;
                swapcontext(&emu_main, &emu_fiber[t]);
                left += !emu_done[t];
            }
        }
    }
    free(stacks);
    return 0;
}

/* emu_run_<kernel>(param, blocks, threads) for a kernel that takes one struct by value */
#define EMU_KERNEL(kernel, type)                                                                    \
    static void emu_call_##kernel(const void *args) { kernel(*(const type *)args); }                \
    static int emu_run_##kernel(const type *param, unsigned blocks, unsigned threads) {             \
        return emu_launch(emu_call_##kernel, param, blocks, threads);                               \
    }

#endif
