/* fake_gpu.cpp - the fake GPU's kernels: those of the engine, run by csrc/cuda/emulate.h. Memory, streams, time:
 * fake_driver.cpp.
 *
 * Every launch must declare (om_cuda_declare) what it touches; each load and store is held to it. What a driver knows of
 * a kernel is read from the machine code itself, which the engine loads: a module without code for the device is
 * refused, and a block with more threads than the kernel was compiled for, or more shared memory than it was allowed.
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
#include "cuda/sort.cu"
#include "cuda/gemm.cu"
#include "cuda/each.cu"
#include "cuda/lines.cu"
#include "cuda/scatter.cu"
#include "cuda/pool.cu"
#include "cuda/batch_norm.cu"
#include "cuda/conv.cu"
#include "cuda/bounded.cu"
#include "cuda/recurrent.cu"
#include "cuda/ctc.cu"
#include "cuda/update.cu"
#include "cuda/attention.cu"
#include "cuda/attention_grad.cu"
#include "cuda/attention_mma.cu"
#include "cuda/attention_mma_grad.cu"
#include "cuda/attention_f32.cu"
#include "cuda/attention_f32_grad.cu"

#include "fake_gpu.h"

#include <dlfcn.h>
#include <map>

enum { SHARED_UNASKED = 48 << 10 }; /* bytes of a block, unless cuFuncSetAttribute has said more */
struct CUfunc_st { const char *name; void (*call)(const void *); size_t size; int device; unsigned threads = 1024, shared = SHARED_UNASKED; };
struct CUmod_st { int device; void *compiled; /* a shared object of the fake NVRTC's */ };

#define KERNEL(file, name, type) static void call_##name(const void *p) { om_k_##name(*(const struct type *)p); }
#include "cuda/engine.def"
#undef KERNEL
static CUfunc_st functions[] = {
#define KERNEL(file, name, type) {"om_k_" #name, call_##name, sizeof(struct type), 0},
#include "cuda/engine.def"
#undef KERNEL
    {"", nullptr, 0, 0}, /* the optimizers': not here */
};
static CUmod_st modules[] = {{0, nullptr}, {1, nullptr}};
static std::map<std::pair<const CUfunc_st *, int>, CUfunc_st> loaded; /* functions of a device's modules */
static int capability = 90;
static long launches;
static std::map<std::string, long> ran;

static unsigned refuse(unsigned code, const std::string &why) { return fake_gpu_refuse(code, why.c_str()); }

/* --- what tests say ------------------------------------------------------------------------------------- */

PUBLIC void fake_gpu_seed_driver(uint64_t seed);
PUBLIC void fake_gpu_seed(uint64_t seed) { emu_seed = seed, fake_gpu_seed_driver(seed); }
PUBLIC long fake_gpu_launches(void) { return launches; }
static std::map<CUstream_st *, long> launched;
PUBLIC long fake_gpu_launched(CUstream_st *stream) { return launched[stream]; } /* kernels given to the stream */
PUBLIC long fake_gpu_touches(void) { return emu_touches; } /* loads and stores of kernels */
/* What it says it is, before it is opened: 75 is sm_75. */
PUBLIC void fake_gpu_capability(int sm) { capability = sm; }
PUBLIC int fake_gpu_sm(void) { return capability; }
/* How often the kernel has run. */
PUBLIC long fake_gpu_ran(const char *kernel) {
    LOCKED;
    return ran[kernel];
}

/* Called before the next thing that is queued once the kernel has been; NULL: no more. */
static std::string watched;
static void (*watcher)(const char *);
static bool watch_due;
PUBLIC void fake_gpu_watch(const char *kernel, void (*call)(const char *)) { watched = kernel ? kernel : "", watcher = call, watch_due = false; }

/* --- machine code ----------------------------------------------------------------------------------------- */

struct kernel_facts { unsigned threads, param; }; /* of a block at most; bytes */
typedef std::map<std::string, kernel_facts> image_facts;
template <class T> static T number(const char *p) {
    T x;
    return memcpy(&x, p, sizeof x), x;
}

/* What a cubin (ELF, 64 bits) says in its sections .nv.info.<kernel>: records {format, attribute, 16 bits}; of format 4
 * the 16 bits are a size and bytes follow. */
static void cubin_read(const char *elf, image_facts *out) {
    enum { MAX_THREADS = 5, PARAM_SIZE = 0x19, SIZED = 4 };
    const std::string info = ".nv.info.";
    const char *sections = elf + number<uint64_t>(elf + 40);
    const unsigned each = number<uint16_t>(elf + 58), n = number<uint16_t>(elf + 60), names = number<uint16_t>(elf + 62);
    for (unsigned i = 0; i < n; i++) {
        const char *s = sections + i * each, *at = elf + number<uint64_t>(s + 24), *end = at + number<uint64_t>(s + 32);
        const std::string name = elf + number<uint64_t>(sections + names * each + 24) + number<uint32_t>(s);
        if (name.compare(0, info.size(), info)) continue;
        kernel_facts &k = (*out)[name.substr(info.size())] = {1024, 0};
        while (at < end) {
            const unsigned format = (uint8_t)at[0], attribute = (uint8_t)at[1], size = number<uint16_t>(at + 2);
            if (format == SIZED && attribute == MAX_THREADS) k.threads = number<uint32_t>(at + 4);
            if (attribute == PARAM_SIZE) k.param = size;
            at += 4 + (format == SIZED ? size : 0);
        }
    }
}

/* Of a fatbin the cubin that a device takes: of its generation, as new as itself or older. false: none. */
static bool image_read(const char *image, image_facts *out) {
    enum { HEAD = 16, CUBIN = 2 };
    const char *best = nullptr, *at = image + HEAD, *end = at + number<uint64_t>(image + 8);
    int newest = 0;
    for (; at < end; at += number<uint32_t>(at + 4) + number<uint64_t>(at + 8)) {
        const int sm = (int)number<uint32_t>(at + 28);
        if (number<uint16_t>(at) != CUBIN || sm / 10 != capability / 10 || sm > capability || sm <= newest) continue;
        best = at + number<uint32_t>(at + 4), newest = sm;
    }
    if (best) cubin_read(best, out);
    return best;
}
static std::map<int, image_facts> facts; /* by device */

/* Shared memory that a block may be allowed. */
static unsigned most_shared(void) {
    const unsigned kb = capability < 80 ? 64 : capability == 80 || capability == 87 ? 163 : capability < 90 || capability >= 120 ? 99 : 227;
    return kb << 10;
}

/* --- devices and modules ---------------------------------------------------------------------------------- */

PUBLIC unsigned cuDriverGetVersion(int *out) {
    FAILS(cuDriverGetVersion);
    return *out = 13000, 0;
}
PUBLIC unsigned cuDeviceGet(int *out, int ordinal) {
    FAILS(cuDeviceGet);
    return ordinal < 2 ? (*out = ordinal, 0) : 101;
}
PUBLIC unsigned cuDeviceGetName(char *out, int size, int) {
    FAILS(cuDeviceGetName);
    return snprintf(out, (size_t)size, "Fake GPU"), 0;
}
PUBLIC unsigned cuDeviceGetAttribute(int *out, unsigned what, int) {
    FAILS(cuDeviceGetAttribute);
    return *out = what == 75 ? capability / 10 : what == 76 ? capability % 10 : what == 16 ? 2 : 0, 0;
}
/* What fake_module.h takes. */
static void reach(const void *p, size_t size, int write) { emu_touch(p, size, write); }
static const struct { const emu_dim *thread, *block, *threads, *blocks; void (*reach)(const void *, size_t, int); } module_host = {&threadIdx, &blockIdx, &blockDim, &gridDim, reach};

PUBLIC unsigned cuModuleLoadData(CUmod_st **out, const void *bytes) {
    static const char mark[] = "FAKECUBIN:";
    enum : uint32_t { FATBIN = 0xba55ed50 };
    FAILS(cuModuleLoadData);
    if (const unsigned r = fake_gpu_unsafe("cuModuleLoadData")) return r;
    if (!fake_gpu_current()) return INVALID_CONTEXT;
    *out = &modules[fake_gpu_device()];
    if (memcmp(bytes, mark, sizeof mark - 1)) {
        LOCKED;
        return number<uint32_t>((const char *)bytes) != FATBIN ? (unsigned)INVALID_IMAGE : image_read((const char *)bytes, &facts[fake_gpu_device()]) ? 0 : (unsigned)NO_BINARY;
    }
    void *lib = dlopen((const char *)bytes + sizeof mark - 1, RTLD_NOW | RTLD_LOCAL);
    if (!lib) return refuse(INVALID_VALUE, dlerror());
    ((void (*)(const void *))dlsym(lib, "fake_module_begin"))(&module_host);
    *out = new CUmod_st{fake_gpu_device(), lib};
    return 0;
}
PUBLIC unsigned cuModuleGetFunction(CUfunc_st **out, CUmod_st *module, const char *name) {
    FAILS(cuModuleGetFunction);
    if (module->compiled) {
        void (*call)(const void *) = (void (*)(const void *))dlsym(module->compiled, name);
        if (!call) return NOT_FOUND;
        *out = new CUfunc_st{strdup(name), call, sizeof(om_gpu_strip_large), module->device};
        (*out)->threads = 128;
        return 0;
    }
    LOCKED;
    const auto fact = facts[module->device].find(name);
    if (fact == facts[module->device].end()) return NOT_FOUND;
    CUfunc_st *f = functions;
    while (f->call && strcmp(f->name, name)) f++;
    CUfunc_st *of = &loaded[{f, module->device}];
    *of = *f, of->device = module->device, of->threads = fact->second.threads;
    *out = of;
    if (f->call && f->size != fact->second.param) return refuse(INVALID_VALUE, std::string(name) + ": parameters are of another size");
    return !f->call && !strncmp(name, "om_k_", 5) ? (unsigned)NOT_FOUND : 0;
}
PUBLIC unsigned cuFuncSetAttribute(CUfunc_st *f, int what, int bytes) {
    FAILS(cuFuncSetAttribute);
    if (what != 8 || bytes < 0 || (unsigned)bytes > most_shared()) return refuse(INVALID_VALUE, std::string(f->name) + ": more shared memory than a block may have");
    return f->shared = (unsigned)bytes, 0;
}

/* --- launches --------------------------------------------------------------------------------------------- */

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
        if (!fake_gpu_inside(r.at, r.size) && !fake_gpu_hosts(r.at)) return refuse(ILLEGAL_ADDRESS, std::string(w.f->name) + ": a declared range leaves its block");
        emu.range[emu.n_range++] = {(const char *)r.at, (const char *)r.at + r.size, r.mode};
    }
    if (emu_launch(w.f->name, w.f->call, w.param.data(), w.grid, w.block, w.shared)) return 0;
    return refuse(ILLEGAL_ADDRESS, emu.message);
}

PUBLIC unsigned cuLaunchKernel(CUfunc_st *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream_st *stream, void **params, void **extra) {
    FAILS(cuLaunchKernel);
    if (watcher && watch_due) watcher(f->name);
    watch_due = watcher && watched == f->name;
    LOCKED;
    if (!fake_gpu_current()) return INVALID_CONTEXT;
    if (f->device != fake_gpu_device()) return refuse(INVALID_HANDLE, "a kernel of another device's module");
    if (!f->call || !gx || !gy || !gz || gx > INT32_MAX || gy > 65535 || gz > 65535 || !bx || bx > 1024 || by != 1 || bz != 1 ||
        extra || bx > f->threads || shared > f->shared || f->size > 4096)
        return refuse(INVALID_VALUE, std::string(f->name) + ": bad launch sizes");
    launched[stream]++;
    work w = {f, {gx, gy, gz}, bx, shared, std::string((const char *)params[0], f->size), {}, false};
    w.declares = fake_gpu_declared(&w.declared);
    const std::function<unsigned()> later = [w] { return run(w); };
    return fake_gpu_put(stream, &later);
}
