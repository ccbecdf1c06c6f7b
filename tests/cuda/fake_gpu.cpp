/* fake_gpu.cpp - a libcuda.so.1 for machines without a GPU, as far as the graph engine needs one (csrc/cuda/queue.h):
 * memory, streams, copies, and launches of the real kernels, run by csrc/cuda/emulate.h.
 *
 * Time. Late (fake_gpu_late): what is queued runs only when somebody waits; else at once. Copies from the host's memory
 * take their bytes when they are queued, as the driver does of memory that is not page-locked.
 * Memory. A block is 0xff at first, has a fence behind it that is looked at when it goes, and is never handed out at
 * another one's address while anything is queued. Every launch must declare (om_cuda_declare) what it touches, and what
 * it declares must lie in one live block or in memory the host has told of; each load and store is held to it.
 * Faults are counted in fake_gpu_failures and named by fake_gpu_message. fake_gpu_fail makes one call of an entry point
 * return an error instead of doing anything.
 */
#include "cuda/emulate.h"

#include "cuda/strip.cu"
#include "cuda/strip64.cu"
#include "cuda/move.cu"
#include "cuda/reduce.cu"
#include "cuda/rows.cu"
#include "cuda/norm.cu"
#include "cuda/loss.cu"
#include "cuda/index.cu"
#include "cuda/gemm.cu"
#include "cuda/conv.cu"
#include "cuda/attention.cu"
#include "cuda/attention_grad.cu"
#include "cuda/attention_mma.cu"
#include "cuda/attention_mma_grad.cu"

#include "fake_gpu.h"

#include <deque>
#include <map>
#include <mutex>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
       ILLEGAL_ADDRESS = 700 };
enum { FENCE = 256 };

struct CUctx_st { int device; };
struct CUfunc_st { const char *name; void (*call)(const void *); size_t size; };
struct CUmod_st { int none; };
struct CUstream_st { int none; };

#define KERNEL(file, name, type) static void call_##name(const void *p) { om_k_##name(*(const struct type *)p); }
#include "cuda/engine.def"
#undef KERNEL
static CUfunc_st functions[] = {
#define KERNEL(file, name, type) {"om_k_" #name, call_##name, sizeof(struct type)},
#include "cuda/engine.def"
#undef KERNEL
    {"", nullptr, 0}, /* the optimizers': not here */
};

static std::recursive_mutex lock;
static std::map<uintptr_t, size_t> blocks;
static std::deque<std::function<unsigned()>> queue;
static std::vector<void *> gone; /* freed with the queue's end */
static std::vector<range> declared;
static bool late, declares;
static long failures, launches, waits;
static int capability = 90;
static std::map<std::string, long> ran;
static char message[640];
static CUctx_st context = {0};
static CUmod_st module_;
static thread_local int depth;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)

static unsigned refuse(unsigned code, const std::string &why) {
    failures++;
    if (!message[0]) snprintf(message, sizeof message, "%s", why.c_str());
    return code;
}

struct failing { std::string entry; long left; unsigned code; };
static failing failing_;
static std::map<std::string, long> calls;
#define ENTRY(name) if (const unsigned code_ = fake_gpu_injected(#name)) return code_

static bool inside(const void *p, int64_t size) {
    auto b = blocks.upper_bound((uintptr_t)p);
    if (b == blocks.begin()) return false;
    --b;
    return (uintptr_t)p + (size_t)size <= b->first + b->second;
}

static unsigned drain() {
    unsigned r = 0;
    while (!queue.empty()) {
        const unsigned s = queue.front()();
        if (!r) r = s;
        queue.pop_front();
    }
    for (void *p : gone) free(p);
    gone.clear();
    return r;
}
static unsigned put(std::function<unsigned()> work) {
    if (!late) return work();
    queue.push_back(work);
    return 0;
}

/* --- for libraries on the device ------------------------------------------------------------------------- */

PUBLIC unsigned fake_gpu_injected(const char *entry) {
    LOCKED;
    calls[entry]++;
    if (failing_.entry != entry || --failing_.left) return 0;
    failing_.entry.clear();
    return failing_.code;
}
PUBLIC bool fake_gpu_current(void) { return depth > 0; }
PUBLIC bool fake_gpu_declared(std::vector<range> *out) {
    LOCKED;
    *out = declared;
    declared.clear();
    return declares;
}
PUBLIC bool fake_gpu_inside(const void *p, int64_t size) {
    LOCKED;
    return inside(p, size);
}
PUBLIC unsigned fake_gpu_refuse(unsigned code, const char *why) {
    LOCKED;
    return refuse(code, why);
}
PUBLIC unsigned fake_gpu_put(const std::function<unsigned()> *work) {
    LOCKED;
    return put(*work);
}

/* --- what tests say ------------------------------------------------------------------------------------- */

PUBLIC void fake_gpu_late(int on) {
    LOCKED;
    drain();
    late = on;
}
PUBLIC void fake_gpu_seed(uint64_t seed) { emu_seed = seed; }
PUBLIC void fake_gpu_declare(const range *r, int n) {
    LOCKED;
    declares = true;
    declared.assign(r, r + n);
}
/* 0 failures, 1 launches, 2 live blocks, 3 queued, 4 waits */
PUBLIC long fake_gpu_count(int what) {
    LOCKED;
    const long n[] = {failures, launches, (long)blocks.size(), (long)queue.size(), waits};
    return n[what];
}
/* The nth call of the entry point from now on returns the code; nth 0: none does. */
PUBLIC void fake_gpu_fail(const char *entry, long nth, unsigned code) {
    LOCKED;
    failing_ = {nth ? entry : "", nth, code};
}
/* What it says it is, before it is opened: 75 is sm_75. */
PUBLIC void fake_gpu_capability(int sm) { capability = sm; }
/* How often the kernel has run. */
PUBLIC long fake_gpu_ran(const char *kernel) {
    LOCKED;
    return ran[kernel];
}
/* How often it was called. */
PUBLIC long fake_gpu_calls(const char *entry) {
    LOCKED;
    return calls[entry];
}
PUBLIC int fake_gpu_depth(void) { return depth; }
PUBLIC const char *fake_gpu_message(void) { return message; }
PUBLIC void fake_gpu_forget(void) { message[0] = 0, failures = 0; }

/* --- the driver ------------------------------------------------------------------------------------------- */

PUBLIC unsigned cuGetErrorName(unsigned, const char **out) { return *out = "FAKE_ERROR", 0; }
PUBLIC unsigned cuGetErrorString(unsigned, const char **out) { return *out = message[0] ? message : "made to fail", 0; }
PUBLIC unsigned cuInit(unsigned) {
    ENTRY(cuInit);
    return 0;
}
PUBLIC unsigned cuDriverGetVersion(int *out) {
    ENTRY(cuDriverGetVersion);
    return *out = 13000, 0;
}
PUBLIC unsigned cuDeviceGet(int *out, int) {
    ENTRY(cuDeviceGet);
    return *out = 0, 0;
}
PUBLIC unsigned cuDeviceGetName(char *out, int size, int) {
    ENTRY(cuDeviceGetName);
    return snprintf(out, (size_t)size, "Fake GPU"), 0;
}
PUBLIC unsigned cuDeviceGetAttribute(int *out, unsigned what, int) {
    ENTRY(cuDeviceGetAttribute);
    return *out = what == 75 ? capability / 10 : what == 76 ? capability % 10 : what == 16 ? 2 : 0, 0;
}
PUBLIC unsigned cuDevicePrimaryCtxRetain(CUctx_st **out, int) {
    ENTRY(cuDevicePrimaryCtxRetain);
    return *out = &context, 0;
}
PUBLIC unsigned cuCtxPushCurrent_v2(CUctx_st *) {
    ENTRY(cuCtxPushCurrent_v2);
    return depth++, 0;
}
PUBLIC unsigned cuCtxPopCurrent_v2(CUctx_st **out) {
    ENTRY(cuCtxPopCurrent_v2);
    if (!depth) return INVALID_CONTEXT;
    return *out = &context, depth--, 0;
}
PUBLIC unsigned cuModuleLoadData(CUmod_st **out, const void *) {
    ENTRY(cuModuleLoadData);
    return depth ? (*out = &module_, 0) : INVALID_CONTEXT;
}
PUBLIC unsigned cuModuleGetFunction(CUfunc_st **out, CUmod_st *, const char *name) {
    ENTRY(cuModuleGetFunction);
    CUfunc_st *f = functions;
    while (f->call && strcmp(f->name, name)) f++;
    *out = f;
    return !f->call && !strncmp(name, "om_k_", 5) ? (unsigned)NOT_FOUND : 0;
}
PUBLIC unsigned cuFuncSetAttribute(CUfunc_st *, int, int) {
    ENTRY(cuFuncSetAttribute);
    return 0;
}
PUBLIC unsigned cuStreamIsCapturing(CUstream_st *, unsigned *out) {
    ENTRY(cuStreamIsCapturing);
    return *out = 0, 0;
}
PUBLIC unsigned cuDeviceGetDefaultMemPool(void **out, int) {
    ENTRY(cuDeviceGetDefaultMemPool);
    return *out = &context, 0;
}
PUBLIC unsigned cuMemPoolSetAttribute(void *, int, void *) {
    ENTRY(cuMemPoolSetAttribute);
    return 0;
}
PUBLIC unsigned cuMemHostAlloc(void **out, size_t size, unsigned) {
    ENTRY(cuMemHostAlloc);
    LOCKED;
    *out = aligned_alloc(64, (size + 63) / 64 * 64);
    blocks[(uintptr_t)*out] = size;
    return 0;
}

PUBLIC unsigned cuMemAllocAsync(uint64_t *out, size_t size, CUstream_st *) {
    ENTRY(cuMemAllocAsync);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    char *p = (char *)aligned_alloc(256, (size + FENCE + 255) / 256 * 256);
    if (!p) return OUT_OF_MEMORY;
    memset(p, 0xff, size);
    memset(p + size, 0xa5, FENCE - size % 256 % FENCE);
    blocks[(uintptr_t)p] = size;
    *out = (uint64_t)(uintptr_t)p;
    return 0;
}
PUBLIC unsigned cuMemFreeAsync(uint64_t at, CUstream_st *) {
    ENTRY(cuMemFreeAsync);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (!blocks.count(at)) return refuse(INVALID_VALUE, "a block that is none was given back");
    return put([at] {
        const char *p = (const char *)(uintptr_t)at;
        const size_t size = blocks[at];
        for (size_t i = size; i < (size + 255) / 256 * 256; i++)
            if ((uint8_t)p[i] != 0xa5) return refuse(ILLEGAL_ADDRESS, "memory behind a block was written");
        blocks.erase(at);
        if (late) gone.push_back((void *)p);
        else free((void *)p);
        return 0u;
    });
}
PUBLIC unsigned cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, CUstream_st *) {
    ENTRY(cuMemcpyHtoDAsync_v2);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    std::string bytes((const char *)from, size);
    return put([to, bytes] { return memcpy((void *)(uintptr_t)to, bytes.data(), bytes.size()), 0u; });
}
PUBLIC unsigned cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, CUstream_st *) {
    ENTRY(cuMemcpyDtoHAsync_v2);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    return put([to, from, size] { return memcpy(to, (const void *)(uintptr_t)from, size), 0u; });
}
PUBLIC unsigned cuMemsetD8Async(uint64_t to, unsigned char byte, size_t size, CUstream_st *) {
    ENTRY(cuMemsetD8Async);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    return put([to, byte, size] { return memset((void *)(uintptr_t)to, byte, size), 0u; });
}
PUBLIC unsigned cuStreamSynchronize(CUstream_st *) {
    LOCKED;
    waits++;
    const unsigned r = drain();
    ENTRY(cuStreamSynchronize); /* told when the work is done */
    return r;
}

struct work {
    CUfunc_st *f;
    unsigned grid[3], block;
    size_t shared;
    std::string param;
    std::vector<range> declared;
    bool declares;
};

static unsigned run(const work &w) {
    emu.n_range = 0;
    emu.checked = w.declares;
    launches++;
    ran[w.f->name]++;
    for (const range &r : w.declared) {
        if (!r.size || !r.at) continue;
        if (emu.n_range == EMU_RANGES) return refuse(INVALID_VALUE, "too many ranges");
        if (!inside(r.at, r.size) && inside(r.at, 1)) return refuse(ILLEGAL_ADDRESS, std::string(w.f->name) + ": a declared range leaves its block");
        emu.range[emu.n_range++] = {(const char *)r.at, (const char *)r.at + r.size, r.mode};
    }
    if (emu_launch(w.f->name, w.f->call, w.param.data(), w.grid, w.block, w.shared)) return 0;
    return refuse(ILLEGAL_ADDRESS, emu.message);
}

PUBLIC unsigned cuLaunchKernel(CUfunc_st *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream_st *, void **params, void **extra) {
    ENTRY(cuLaunchKernel);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (!f->call || !gx || !gy || !gz || gx > INT32_MAX || gy > 65535 || gz > 65535 || !bx || bx > 1024 || by != 1 || bz != 1 ||
        extra || shared > (64 << 10) || f->size > 4096)
        return refuse(INVALID_VALUE, std::string(f->name) + ": bad launch sizes");
    work w = {f, {gx, gy, gz}, bx, shared, std::string((const char *)params[0], f->size), declared, declares};
    declared.clear();
    return put([w] { return run(w); });
}
