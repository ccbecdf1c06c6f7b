/* host_emulation.h - runs a .cu file of this project on the host, one thread block after the other, so that its logic is tested on
 * machines without a GPU. Include it before the .cu, compile as C.
 *
 * Every thread of a block is a fiber: a stack made once (ucontext), then switched by setjmp and longjmp, which cost no system call.
 * __syncthreads() switches to the next fiber; a fiber that comes back from it has been around once, so all have arrived. Fibers run in turn, hence races between barriers are not found, but a missing barrier is likely to
 * show, because the first fiber runs far ahead of the last. __shared__ variables are static: one block runs at a time.
 * What the .cu may use: threadIdx.x, blockIdx.x, blockDim.x, gridDim.x, __syncthreads, __shared__; no shuffles, no atomics.
 */
#ifndef OM_HOST_EMULATION_H
#define OM_HOST_EMULATION_H

#include <setjmp.h>
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
static jmp_buf emu_main, emu_fiber[EMU_MAX_THREADS];
static unsigned emu_fibers; /* that exist: they live as long as the process */
static uint8_t emu_done[EMU_MAX_THREADS];
static void (*emu_call)(const void *args);
static const void *emu_args;

/* To the scheduler; comes back when it is this fiber's turn again. */
static void emu_yield(void) {
    const unsigned self = threadIdx.x;
    if (!_setjmp(emu_fiber[self])) _longjmp(emu_main, 1);
    threadIdx.x = self;
}
static void __syncthreads(void) { emu_yield(); }

static void emu_entry(void) {
    for (;;) {
        emu_yield(); /* until a block begins */
        emu_call(emu_args);
        emu_done[threadIdx.x] = 1;
    }
}

static void emu_switch(unsigned t) {
    threadIdx.x = t;
    if (!_setjmp(emu_main)) _longjmp(emu_fiber[t], 1);
}

static int emu_make(unsigned t) {
    static ucontext_t start;
    char *stack = malloc(EMU_STACK);
    if (!stack || getcontext(&start)) return -1;
    start.uc_stack.ss_sp = stack, start.uc_stack.ss_size = EMU_STACK, start.uc_link = NULL;
    makecontext(&start, emu_entry, 0);
    threadIdx.x = t;
    if (!_setjmp(emu_main)) setcontext(&start);
    return 0;
}

/* Runs call(args) for `threads` threads in each of `blocks` blocks; 0, or -1 without memory. */
static int emu_launch(void (*call)(const void *args), const void *args, unsigned blocks, unsigned threads) {
    if (threads > EMU_MAX_THREADS) return -1;
    for (; emu_fibers < threads; emu_fibers++)
        if (emu_make(emu_fibers)) return -1;
    emu_call = call, emu_args = args;
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned t = 0; t < threads; t++) emu_done[t] = 0;
        for (unsigned left = threads; left;) {
            left = 0;
            for (unsigned t = 0; t < threads; t++) {
                if (emu_done[t]) continue;
                emu_switch(t);
                left += !emu_done[t];
            }
        }
    }
    return 0;
}

/* emu_run_<kernel>(param, blocks, threads) for a kernel that takes one struct by value */
#define EMU_KERNEL(kernel, type)                                                                    \
    static void emu_call_##kernel(const void *args) { kernel(*(const type *)args); }                \
    static int emu_run_##kernel(const type *param, unsigned blocks, unsigned threads) {             \
        return emu_launch(emu_call_##kernel, param, blocks, threads);                               \
    }

#endif
