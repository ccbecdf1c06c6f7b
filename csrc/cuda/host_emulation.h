/* host_emulation.h - runs a .cu file of this project on the host, so that its logic is tested on machines without a
 * GPU. Include it before the .cu, compile as C.
 *
 * Every thread of a block is a fiber: a stack made once (ucontext), then switched by setjmp and longjmp, which cost no
 * system call. __syncthreads() switches to the next fiber; a fiber that comes back from it has been around once, so all
 * have arrived. Fibers run in turn, hence races between barriers are not found, but a missing barrier is likely to
 * show, because the first fiber runs far ahead of the last. __shared__ variables are static: a host thread runs one
 * block at a time, blocks one after the other.
 *
 * Compiled with -DEMU_THREADS, emu_host_threads > 1 runs that many blocks at once, each on a host thread. With one, a
 * block that waits (__nanosleep) waits for ever: the launch fails, and so do all later ones.
 * What the .cu may use: threadIdx.x, blockIdx.x, blockDim.x, gridDim.x, __syncthreads, __shared__, atomicAdd,
 * __threadfence, __nanosleep, __ldcs, __stcs; no shuffles.
 */
#ifndef OM_HOST_EMULATION_H
#define OM_HOST_EMULATION_H

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>

#define OM_EMULATED 1
#define __global__ static
#define __device__ static inline
#define __launch_bounds__(n)
#define __ldcs(p) (*(p))
#define __stcs(p, x) ((void)(*(p) = (x)))
#define atomicAdd(p, x) (emu_pause(), __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST))
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)

#if defined(EMU_THREADS)
#define EMU_OWN static __thread /* of a host thread */
#else
#define EMU_OWN static
#endif
#define __shared__ EMU_OWN

typedef struct emu_dim { unsigned x; } emu_dim;
EMU_OWN emu_dim threadIdx, blockIdx, blockDim, gridDim;

enum { EMU_STACK = 64 << 10, EMU_MAX_THREADS = 1024, EMU_MAX_HOST_THREADS = 16 };
EMU_OWN jmp_buf emu_main, emu_fiber[EMU_MAX_THREADS];
EMU_OWN char *emu_stack[EMU_MAX_THREADS];
EMU_OWN unsigned emu_fibers; /* that exist */
EMU_OWN uint8_t emu_done[EMU_MAX_THREADS];
EMU_OWN void (*emu_call)(const void *args);
EMU_OWN const void *emu_args;
static int emu_host_threads = 1;
static long emu_waits; /* turns of all blocks that waited for another */
static int emu_stuck; /* a block waited for something nobody was left to do */

static void emu_pause(void) { /* blocks that run at once get ahead of each other where they meet */
    if (emu_host_threads > 1) sched_yield();
}

/* To the scheduler; comes back when it is this fiber's turn again. */
static void emu_yield(void) {
    const unsigned self = threadIdx.x;
    if (!_setjmp(emu_fiber[self])) _longjmp(emu_main, 1);
    threadIdx.x = self;
}
static void __syncthreads(void) { emu_yield(); }

/* Called in a loop that waits for another block. */
static void __nanosleep(unsigned ns) {
    (void)ns;
    EMU_OWN long turns;
    __atomic_fetch_add(&emu_waits, 1, __ATOMIC_SEQ_CST);
    if (emu_host_threads == 1 || ++turns > 100000000L) emu_stuck = 1;
    if (__atomic_load_n(&emu_stuck, __ATOMIC_SEQ_CST)) _longjmp(emu_main, 2);
    sched_yield();
}

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
    EMU_OWN ucontext_t start;
    char *stack = emu_stack[t] = malloc(EMU_STACK);
    if (!stack || getcontext(&start)) return -1;
    start.uc_stack.ss_sp = stack, start.uc_stack.ss_size = EMU_STACK, start.uc_link = NULL;
    makecontext(&start, emu_entry, 0);
    threadIdx.x = t;
    if (!_setjmp(emu_main)) setcontext(&start);
    return 0;
}

static void emu_block(unsigned b, unsigned threads) {
    blockIdx.x = b;
    for (unsigned t = 0; t < threads; t++) emu_done[t] = 0;
    for (unsigned left = threads; left;) {
        left = 0;
        for (unsigned t = 0; t < threads; t++) {
            if (emu_done[t]) continue;
            emu_switch(t);
            if (emu_stuck) return;
            left += !emu_done[t];
        }
    }
}

typedef struct emu_grid { /* one launch */
    void (*call)(const void *args);
    const void *args;
    unsigned blocks, threads, next; /* next block to run */
    int failed;
} emu_grid;

static void *emu_worker(void *arg) {
    emu_grid *g = arg;
    for (; emu_fibers < g->threads; emu_fibers++)
        if (emu_make(emu_fibers)) return g->failed = 1, NULL;
    emu_call = g->call, emu_args = g->args;
    gridDim.x = g->blocks, blockDim.x = g->threads;
    for (unsigned b; (b = __atomic_fetch_add(&g->next, 1, __ATOMIC_SEQ_CST)) < g->blocks && !emu_stuck;)
        emu_block(b, g->threads);
    return NULL;
}

static void *emu_guest(void *arg) { /* a host thread of its own: its fibers end with it */
    emu_worker(arg);
    while (emu_fibers) free(emu_stack[--emu_fibers]);
    return NULL;
}

/* Runs call(args) for `threads` threads in each of `blocks` blocks; 0, or -1 without memory or when a block would have
 * waited for ever. */
static int emu_launch(void (*call)(const void *args), const void *args, unsigned blocks, unsigned threads) {
    if (threads > EMU_MAX_THREADS || emu_host_threads > EMU_MAX_HOST_THREADS) return -1;
    emu_grid g = {.call = call, .args = args, .blocks = blocks, .threads = threads};
    if (emu_host_threads <= 1) {
        emu_worker(&g);
    } else {
        pthread_t id[EMU_MAX_HOST_THREADS];
        int n = 0;
        for (; n < emu_host_threads && !pthread_create(&id[n], NULL, emu_guest, &g); n++) continue;
        g.failed |= n < emu_host_threads;
        while (n) pthread_join(id[--n], NULL);
    }
    return g.failed || emu_stuck ? -1 : 0;
}

/* emu_run_<kernel>(param, blocks, threads) for a kernel that takes one struct by value */
#define EMU_KERNEL(kernel, type)                                                                    \
    static void emu_call_##kernel(const void *args) { kernel(*(const type *)args); }                \
    static int emu_run_##kernel(const type *param, unsigned blocks, unsigned threads) {             \
        return emu_launch(emu_call_##kernel, param, blocks, threads);                               \
    }

#endif
