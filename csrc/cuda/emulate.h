/* emulate.h - runs the graph engine's .cu files on the host, so that all but speed and races of the hardware is tested
 * without a GPU. C++; include before the .cu.
 *
 * Every thread of a block is a fiber: a stack made once (ucontext), then switched by setjmp and longjmp. __syncthreads
 * and shuffles are counting barriers, of the block and of the warp: a barrier that some threads never reach makes a
 * launch fail instead of passing. Products on tensor cores (mma.h) exchange fragments among the fibers of a warp;
 * asynchronous copies come as early or as late as they may.
 * Fibers take turns in an order drawn from emu_seed, blocks as well; with an odd seed warps run as far ahead of each
 * other as barriers of the block let them: a result that depends on the order differs between seeds. Shared memory is
 * 0xff before each block and ends where the launch said, in front of pages that nobody may touch. Global memory is
 * reached by ld and st of kernel.h, which emu_touch holds to the ranges the launch declared.
 */
#ifndef OM_CUDA_EMULATE_H
#define OM_CUDA_EMULATE_H

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define OM_EMULATED 1
#define EXPORT(...) static void
#define PARAM(type) const type &
#define SHARED(name) char *name = emu_shared
#define touch(p, size, write) emu_touch(p, size, write)
#define __threadfence() ((void)0)

struct emu_dim { unsigned x, y, z; };
static emu_dim threadIdx, blockIdx, blockDim, gridDim;

enum { EMU_STACK = 48 << 10, EMU_THREADS = 1024, EMU_SHARED = 256 << 10, EMU_FENCE = 1 << 20, EMU_RANGES = 160 };
struct emu_range { const char *lo, *hi; int mode; }; /* 1 read, 2 write */
static struct {
    emu_range range[EMU_RANGES];
    int n_range, last;
    bool checked;      /* ranges were declared */
    char message[512]; /* of the first failure */
    const char *name;
} emu;
static uint64_t emu_seed;
static long emu_touches; /* loads and stores of global memory */
static char *emu_shared, *emu_shared_fence; /* of EMU_FENCE bytes */
static size_t emu_shared_size;              /* the launch's */
static jmp_buf emu_main, emu_fiber[EMU_THREADS];
static char *emu_stack[EMU_THREADS];
static unsigned emu_fibers;
static uint8_t emu_done[EMU_THREADS];
static void (*emu_call)(const void *param);
static const void *emu_param;

static void emu_fail(const char *what, const void *p, size_t size) {
    if (!emu.message[0])
        snprintf(emu.message, sizeof emu.message, "%s: thread %u of block (%u, %u, %u) %s (%p, %zu bytes)", emu.name,
                 threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z, what, p, size);
    _longjmp(emu_main, 2);
}

static struct sigaction emu_otherwise;
static void emu_fault(int, siginfo_t *info, void *) {
    const char *at = (const char *)info->si_addr;
    if (at >= emu_shared_fence && at < emu_shared_fence + EMU_FENCE) emu_fail("reaches past its shared memory", at, 0);
    sigaction(SIGSEGV, &emu_otherwise, NULL); /* it happens again, as if this had not been here */
}

static bool emu_shared_make(void) {
    struct sigaction own = {};
    own.sa_sigaction = emu_fault, own.sa_flags = SA_SIGINFO | SA_NODEFER; /* it does not come back */
    void *all = mmap(NULL, EMU_SHARED + EMU_FENCE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect((char *)all + EMU_SHARED, EMU_FENCE, PROT_NONE)) return false;
    emu_shared_fence = (char *)all + EMU_SHARED;
    return !sigaction(SIGSEGV, &own, &emu_otherwise);
}

static inline void emu_touch(const void *p, size_t size, int write) {
    const char *at = (const char *)p;
    emu_touches++;
    if ((uintptr_t)p % (size == 16 ? 16 : size > 8 ? 8 : size)) emu_fail("reaches memory that is not aligned", p, size);
    if (!emu.checked) return;
    const int need = write ? 2 : 1;
    const emu_range *r = &emu.range[emu.last];
    if (emu.n_range && at >= r->lo && at + size <= r->hi && (r->mode & need)) return;
    for (int i = 0; i < emu.n_range; i++) {
        r = &emu.range[i];
        if (at >= r->lo && at + size <= r->hi && (r->mode & need)) {
            emu.last = i;
            return;
        }
    }
    emu_fail(write ? "writes memory the launch did not declare" : "reads memory the launch did not declare", p, size);
}

static void emu_yield(void) {
    const unsigned self = threadIdx.x;
    if (!_setjmp(emu_fiber[self])) _longjmp(emu_main, 1);
    threadIdx.x = self;
}

struct emu_barrier { unsigned arrived, turn; };
static emu_barrier emu_block_barrier, emu_warp_barrier[EMU_THREADS / 32];
static bool emu_moved; /* a thread ended or a barrier opened in this round */
static void emu_wait(emu_barrier *b, unsigned threads) {
    const unsigned turn = b->turn;
    emu_moved = true;
    if (++b->arrived == threads) {
        b->arrived = 0;
        b->turn++;
        return;
    }
    while (b->turn == turn) emu_yield();
}
static void __syncthreads(void) { emu_wait(&emu_block_barrier, blockDim.x); }

static void __syncwarp(void) { emu_wait(&emu_warp_barrier[threadIdx.x / 32], 32); }

static uint64_t emu_lane[EMU_THREADS];
template <class T> static T shuffle(T x, int mask) {
    const unsigned self = threadIdx.x;
    T y;
    emu_wait(&emu_warp_barrier[self / 32], 32);
    memcpy(&emu_lane[self], &x, sizeof x);
    emu_wait(&emu_warp_barrier[self / 32], 32);
    memcpy(&y, &emu_lane[self ^ (unsigned)mask], sizeof y);
    return y;
}
static uint32_t emu_ballot(bool x) {
    const unsigned first = threadIdx.x & ~31u;
    uint32_t all = 0;
    emu_wait(&emu_warp_barrier[first / 32], 32);
    emu_lane[threadIdx.x] = x;
    emu_wait(&emu_warp_barrier[first / 32], 32);
    for (unsigned i = 0; i < 32; i++) all |= (uint32_t)emu_lane[first + i] << i;
    return all;
}

/* Tensor cores, from the PTX manual: element i of a lane's a (16 x 16) stands in row lane / 4, + 8 where i is 2, 3, 6
 * or 7, and in column lane % 4 * 2 + i % 2, + 8 where i >= 4; of b (16 x 8) in row lane % 4 * 2 + i % 2, + 8 where
 * i >= 2, and column lane / 4; of c (16 x 8) in row lane / 4, + 8 where i >= 2, and column lane % 4 * 2 + i % 2. Two
 * elements a register, the lower half first. Sums in f32, one after the other. */
static uint16_t emu_fragment[EMU_THREADS][16];
template <class S> static void emu_mma_16816(float *c, const uint32_t *a, const uint32_t *b) {
    const unsigned self = threadIdx.x, first = self & ~31u, lane = self & 31;
    emu_wait(&emu_warp_barrier[first / 32], 32);
    memcpy(emu_fragment[self], a, 16);
    memcpy(emu_fragment[self] + 8, b, 8);
    emu_wait(&emu_warp_barrier[first / 32], 32);
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = lane / 4 + (i >= 2 ? 8 : 0), col = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; k++) {
            const unsigned owner_a = first + row % 8 * 4 + k % 8 / 2, owner_b = first + col * 4 + k % 8 / 2;
            const S x = {emu_fragment[owner_a][(k >= 8 ? 4 : 0) + (row >= 8 ? 2 : 0) + k % 2]};
            const S y = {emu_fragment[owner_b][8 + (k >= 8 ? 2 : 0) + k % 2]};
            c[i] += in(x) * in(y);
        }
    }
}

/* ldmatrix .x4: lane 8i + r tells where row r of matrix i begins, 16 bytes; a lane gets of each matrix the elements
 * (lane / 4, lane % 4 * 2 and the next one), turned: (lane % 4 * 2 and the next one, lane / 4). */
static void emu_ldmatrix(uint32_t *r, const void *row, bool turned) {
    const unsigned self = threadIdx.x, first = self & ~31u, lane = self & 31;
    const char *at = (const char *)row;
    if ((uintptr_t)at % 16 || at < emu_shared || at + 16 > emu_shared + emu_shared_size)
        emu_fail("loads a matrix's row from outside shared memory or not aligned", row, 16);
    emu_wait(&emu_warp_barrier[first / 32], 32);
    emu_lane[self] = (uint64_t)(uintptr_t)row;
    emu_wait(&emu_warp_barrier[first / 32], 32);
    for (unsigned i = 0; i < 4; i++)
        for (unsigned e = 0; e < 2; e++) {
            const unsigned line = turned ? lane % 4 * 2 + e : lane / 4, place = turned ? lane / 4 : lane % 4 * 2 + e;
            const uint16_t x = ((const uint16_t *)(uintptr_t)emu_lane[first + i * 8 + line])[place];
            r[i] = e ? r[i] | (uint32_t)x << 16 : x;
        }
}

/* cp.async, commit_group and wait_group, from the PTX manual: what a thread copies has come when it has waited for the
 * group, and may have come at any time before. The seed says which copies are made at once and which by the wait; the
 * place of these is poisoned until then. A thread must not end before it has waited for all. */
enum { EMU_COPIES = 64 };
struct emu_copy { char *to; const char *from; unsigned size, group; bool given; };
static struct { emu_copy copy[EMU_COPIES]; unsigned n, group; } emu_copies[EMU_THREADS];
static uint64_t emu_copy_turn;
static uint32_t emu_random(uint64_t *s) {
    return (uint32_t)((*s = *s * 6364136223846793005u + 1442695040888963407u) >> 33);
}
static void emu_copy_make(const emu_copy *c) {
    if (c->given) memcpy(c->to, c->from, c->size);
    else memset(c->to, 0, c->size);
}
static void emu_copy_begin(void *to, const void *from, unsigned size, bool given) {
    const auto own = &emu_copies[threadIdx.x];
    const emu_copy c = {(char *)to, (const char *)from, size, own->group, given};
    if ((uintptr_t)to % size || (uintptr_t)from % size || c.to < emu_shared ||
        c.to + size > emu_shared + emu_shared_size)
        emu_fail("copies to outside shared memory, or what is not aligned", to, size);
    if (given) emu_touch(from, size, 0);
    if (emu_random(&emu_copy_turn) & 1) return emu_copy_make(&c);
    if (own->n == EMU_COPIES) emu_fail("has too many copies under way", to, size);
    memset(to, 0xff, size);
    own->copy[own->n++] = c;
}
static void emu_copies_end(void) { emu_copies[threadIdx.x].group++; }
static void emu_copies_wait(unsigned left) {
    const auto own = &emu_copies[threadIdx.x];
    unsigned kept = 0;
    for (unsigned i = 0; i < own->n; i++) {
        if (own->copy[i].group + left < own->group) emu_copy_make(&own->copy[i]);
        else own->copy[kept++] = own->copy[i];
    }
    own->n = kept;
}

static uint32_t atomicExch(uint32_t *p, uint32_t x) {
    const uint32_t was = *p;
    *p = x;
    return was;
}
static int32_t atomicExch(int32_t *p, int32_t x) {
    const int32_t was = *p;
    *p = x;
    return was;
}

static int32_t atomicMin(int32_t *p, int32_t x) {
    const int32_t was = *p;
    if (x < was) *p = x;
    return was;
}

static void emu_entry(void) {
    for (;;) {
        emu_yield();
        emu_call(emu_param);
        if (emu_copies[threadIdx.x].n) emu_fail("ends before its copies have", emu_copies[threadIdx.x].copy[0].to, 0);
        emu_done[threadIdx.x] = 1;
        emu_moved = true;
    }
}

static void emu_make(unsigned t) {
    static ucontext_t start;
    emu_stack[t] = (char *)malloc(EMU_STACK);
    getcontext(&start);
    start.uc_stack.ss_sp = emu_stack[t], start.uc_stack.ss_size = EMU_STACK, start.uc_link = NULL;
    makecontext(&start, emu_entry, 0);
    threadIdx.x = t;
    if (!_setjmp(emu_main)) setcontext(&start);
}

/* One turn for each of n fibers that is not done; false: one failed in the middle. */
static bool emu_round(const unsigned *order, unsigned n, unsigned *left) {
    for (volatile unsigned k = 0; k < n; k = k + 1) {
        const unsigned t = order[k];
        if (emu_done[t]) continue;
        threadIdx.x = t;
        const int from = _setjmp(emu_main);
        if (!from) _longjmp(emu_fiber[t], 1);
        if (from == 2) return false;
        *left += !emu_done[t];
    }
    return true;
}

/* Threads take turns; with an odd seed a warp goes on alone until all of it waits for the block. */
static bool emu_block(unsigned threads, const unsigned *order, size_t shared) {
    memset(emu_shared, 0xff, shared);
    memset(emu_shared + shared, 0x5a, (size_t)(emu_shared_fence - emu_shared) - shared);
    memset(emu_done, 0, threads);
    for (unsigned t = 0; t < threads; t++) emu_copies[t].n = emu_copies[t].group = 0;
    emu_block_barrier = emu_barrier();
    memset(emu_warp_barrier, 0, sizeof emu_warp_barrier);
    const unsigned group = emu_seed & 1 ? 32 : threads;
    for (unsigned left = threads; left;) {
        bool any = false, whole = true;
        left = 0;
        for (unsigned k = 0; k < threads && whole; k += group) {
            unsigned of_group;
            do {
                of_group = 0;
                emu_moved = false;
                whole = emu_round(order + k, group, &of_group);
                any |= emu_moved;
            } while (whole && emu_moved && group < threads);
            left += of_group;
        }
        if (whole && left && !any) {
            snprintf(emu.message, sizeof emu.message,
                     "%s: block (%u, %u, %u): threads wait at a barrier others never reach", emu.name,
                     blockIdx.x, blockIdx.y, blockIdx.z);
            whole = false;
        }
        if (!whole) { /* its fibers begin anew */
            while (emu_fibers) free(emu_stack[--emu_fibers]);
            return false;
        }
    }
    for (const char *p = emu_shared + shared; p < emu_shared_fence; p++)
        if ((uint8_t)*p != 0x5a) {
            snprintf(emu.message, sizeof emu.message, "%s: wrote past its %zu bytes of shared memory", emu.name,
                     shared);
            return false;
        }
    return true;
}

/* Warp after warp, in the order of their first threads. */
static void emu_by_warp(unsigned *order, unsigned threads) {
    static unsigned by[EMU_THREADS];
    bool taken[EMU_THREADS / 32] = {};
    unsigned n = 0;
    for (unsigned i = 0; i < threads; i++) {
        const unsigned warp = order[i] / 32;
        if (taken[warp]) continue;
        taken[warp] = true;
        for (unsigned k = i; k < threads; k++)
            if (order[k] / 32 == warp) by[n++] = order[k];
    }
    memcpy(order, by, threads * sizeof *by);
}

/* Runs call(param) for every thread of every block; false: emu.message says why. */
static bool emu_launch(const char *name, void (*call)(const void *), const void *param, const unsigned grid[3],
                       unsigned threads, size_t shared) {
    static unsigned order[EMU_THREADS];
    emu.name = name, emu.message[0] = 0, emu.last = 0;
    emu_copy_turn = emu_seed;
    if (threads > EMU_THREADS || !threads || shared > EMU_SHARED || threads % 32)
        return snprintf(emu.message, sizeof emu.message, "%s: %u threads, %zu bytes of shared memory", name, threads,
                        shared), false;
    if (!emu_shared_fence && !emu_shared_make()) return snprintf(emu.message, sizeof emu.message, "mmap failed"), false;
    emu_shared = emu_shared_fence - (shared + 15) / 16 * 16; /* aligned as SHARED says, to no more */
    emu_shared_size = shared;
    for (; emu_fibers < threads; emu_fibers++) emu_make(emu_fibers);
    uint64_t s = emu_seed;
    for (unsigned t = 0; t < threads; t++) {
        const unsigned at = emu_seed ? emu_random(&s) % (t + 1) : t;
        order[t] = order[at];
        order[at] = t;
    }
    if (emu_seed & 1) emu_by_warp(order, threads);
    emu_call = call, emu_param = param;
    gridDim.x = grid[0], gridDim.y = grid[1], gridDim.z = grid[2], blockDim.x = threads, blockDim.y = blockDim.z = 1;
    const uint64_t n = (uint64_t)grid[0] * grid[1] * grid[2], first = emu_seed ? emu_random(&s) % n : 0;
    for (uint64_t k = 0; k < n; k++) {
        uint64_t b = (k + first) % n;
        if (emu_seed & 1) b = n - 1 - b;
        blockIdx.x = (unsigned)(b % grid[0]), blockIdx.y = (unsigned)(b / grid[0] % grid[1]);
        blockIdx.z = (unsigned)(b / grid[0] / grid[1]);
        if (!emu_block(threads, order, shared)) return false;
    }
    return true;
}
#endif
