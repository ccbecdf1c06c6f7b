/* queue.c - see queue.h. */
#include "cuda/queue.h"

#include "cuda/blaslt.h"
#include "cuda/capture.h"
#include "cuda/host_memory.h"
#include "cuda/program.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

OM_CUDA_ENTRIES(OM_CUDA_QUEUE_API)

/* A block that could not be given back: tried again by the next that asks for one. */
typedef struct owed { struct owed *next; om_cu_address at; om_cu_stream stream; } owed;

struct om_gpu {
    _Atomic bool open;
    int ordinal;
    om_cuda *cuda;
    om_gpu_fault *fault;          /* page-locked memory of the host, which the device reaches at the same address */
    om_cu_function kernel[OM_N_GPU_KERNELS];
    om_cu_module module[32];      /* per image */
    bool of_torch;                /* its memory */
    _Atomic(owed *) owed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static om_gpu gpus[OM_GPUS];
static _Thread_local om_cu_stream stream_now;
void (*om_cuda_declare)(const om_gpu_range *r, int n);

static const struct { const char *image, *name; } kernels[] = {
#define KERNEL(file, name, type) {#file, "om_k_" #name},
#include "cuda/engine.def"
#undef KERNEL
};

void om_cuda_stream(void *stream) { stream_now = stream; }
void *om_cuda_stream_now(void) { return stream_now; }

static om_status failed(om_ctx *cx, om_gpu *g, om_cu_result r, const char *what) {
    return om_cuda_fail(cx, g->cuda, r, what);
}
om_status om_gpu_fail(om_ctx *cx, om_gpu *g, om_cu_result r, const char *what) { return failed(cx, g, r, what); }
static om_status failed_of(om_ctx *cx, om_gpu *g, om_cu_result r, const char *what, const char *kernel) {
    char text[128];
    snprintf(text, sizeof text, "%s of %s", what, kernel);
    return failed(cx, g, r, text);
}

/* --- opening ------------------------------------------------------------------------------------------ */

static om_status api_open(om_ctx *cx) {
    static bool ready;
    if (ready) return OM_OK;
    OM_TRY(OM_CUDA_LOOK(cx, "CUDA 11.2 or later is needed"));
    ready = true;
    return OM_OK;
}

/* The context is current. */
static om_status kernels_load(om_ctx *cx, om_gpu *g) {
    enum { MOST_SHARED = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    for (int k = 0; k < OM_N_GPU_KERNELS; k++) {
        int i = 0;
        while (om_gpu_images[i].name && strcmp(om_gpu_images[i].name, kernels[k].image)) i++;
        if (!om_gpu_images[i].name || !*om_gpu_images[i].size)
            return om_fail(cx, OM_UNSUPPORTED, "this build has no CUDA kernels (%s): it was made without nvcc",
                           kernels[k].image);
        if (!g->module[i]) OM_GPU_CALL(module_load, &g->module[i], om_gpu_images[i].bytes);
        const om_cu_result r = api.module_function(&g->kernel[k], g->module[i], kernels[k].name);
        if (r) return failed_of(cx, g, r, module_function_name, kernels[k].name);
        const bool tiled = strstr(kernels[k].name, "_mma") || strstr(kernels[k].name, "_tiled");
        const bool mma = tiled && om_gpu_capability(g) >= OM_GPU_MMA_CAPABILITY;
        if (strstr(kernels[k].name, "attention"))
            OM_GPU_CALL(function_attribute, g->kernel[k], MOST_SHARED, mma ? OM_GPU_SHARED_MMA : OM_GPU_SHARED);
    }
    return OM_OK;
}

static om_status gpu_open(om_ctx *cx, om_gpu *g) {
    enum { PORTABLE = 1, MAPPED = 2, RELEASE_THRESHOLD = 4 };
    void *host = NULL;
    om_cu_pool pool = NULL;
    uint64_t keep = UINT64_MAX; /* what was given back stays in the pool */
    OM_TRY(kernels_load(cx, g));
    if (!g->fault) OM_GPU_CALL(host_alloc, &host, sizeof *g->fault, PORTABLE | MAPPED);
    if (host) memset(g->fault = host, 0, sizeof *g->fault);
    om_lt_open();
    if ((g->of_torch = om_torch_memory_open())) return OM_OK; /* its pool is not ours to set; some GPUs have none */
    OM_GPU_CALL(pool, &pool, g->ordinal);
    OM_GPU_CALL(pool_attribute, pool, RELEASE_THRESHOLD, &keep);
    return OM_OK;
}

om_status om_gpu_open(om_ctx *cx, int ordinal, om_gpu **out) {
    OM_CHECK(cx, ordinal >= 0 && ordinal < OM_GPUS, "CUDA device %d given; allowed: 0 to %d", ordinal, OM_GPUS - 1);
    om_gpu *g = *out = &gpus[ordinal];
    if (atomic_load(&g->open)) return OM_OK;
    om_status s = OM_OK;
    pthread_mutex_lock(&lock);
    if (!atomic_load(&g->open)) {
        g->ordinal = ordinal;
        s = api_open(cx);
        if (s == OM_OK) s = om_cuda_enter(cx, ordinal, &g->cuda);
        if (s == OM_OK) s = om_cuda_leave(cx, g->cuda, gpu_open(cx, g));
        if (s == OM_OK) atomic_store(&g->open, true);
    }
    pthread_mutex_unlock(&lock);
    return s;
}

om_status om_gpu_enter(om_ctx *cx, om_gpu *g) {
    om_cuda *same;
    return om_cuda_enter(cx, g->ordinal, &same);
}
om_status om_gpu_leave(om_ctx *cx, om_gpu *g, om_status s) { return om_cuda_leave(cx, g->cuda, s); }
om_gpu_fault *om_gpu_fault_word(om_gpu *g) { return g->fault; }
int om_gpu_ordinal(const om_gpu *g) { return g->ordinal; }
bool om_cuda_memory_of_torch(const om_ctx *cx) { return om_cuda_gpu(cx)->of_torch; }
int om_gpu_capability(const om_gpu *g) { return om_cuda_capability(g->cuda); }

/* --- memory and work ---------------------------------------------------------------------------------- */

static void owe(om_gpu *g, om_cu_address at, om_cu_stream stream) {
    owed *o = malloc(sizeof *o);
    if (!o) return; /* lost: neither memory for a word nor a driver that takes the block */
    *o = (owed){.at = at, .stream = stream, .next = atomic_load(&g->owed)};
    while (!atomic_compare_exchange_weak(&g->owed, &o->next, o)) continue;
}

static om_status torch_failed(om_ctx *cx, om_gpu *g) {
    return om_fail(cx, OM_UNSUPPORTED, "torch's allocator took no block of CUDA device %d back "
                                       "(aoti_torch_cuda_caching_allocator_raw_delete failed)", g->ordinal);
}

static om_status pay(om_ctx *cx, om_gpu *g) {
    if (!atomic_load(&g->owed)) return OM_OK;
    om_status s = OM_OK;
    for (owed *o = atomic_exchange(&g->owed, NULL), *next; o; o = next) {
        next = o->next;
        const om_cu_result r = s != OM_OK || g->of_torch ? 0 : api.free(o->at, o->stream);
        if (r) s = failed(cx, g, r, free_name);
        else if (s == OM_OK && g->of_torch && !om_torch_memory_put((void *)(uintptr_t)o->at)) s = torch_failed(cx, g);
        if (s != OM_OK) owe(g, o->at, o->stream);
        free(o);
    }
    return s;
}

/* A graph that the host records would copy from memory of the host's that is gone when it runs. */
static om_status not_captured(om_ctx *cx, om_gpu *g, void *stream) {
    bool yes = false;
    OM_TRY(om_cuda_capturing(cx, g->cuda, stream, &yes));
    return !yes ? OM_OK
                : om_fail(cx, OM_UNSUPPORTED,
                          "the stream is being captured into a CUDA graph: a step takes its seed and numbers from the "
                          "host, which a graph would repeat; leave the module out of the capture");
}

om_status om_gpu_alloc(om_ctx *cx, om_gpu *g, size_t size, void *stream, void **out) {
    enum { OUT_OF_MEMORY = 2 };
    om_cu_address p = 0;
    OM_TRY(not_captured(cx, g, stream));
    OM_TRY(pay(cx, g));
    if (g->of_torch) {
        if ((*out = om_torch_memory_get(g->ordinal, size ? size : 1, stream))) return OM_OK;
        om_fail(cx, OM_NOMEM, "CUDA device %d is out of memory: %zu bytes were asked for "
                              "(aoti_torch_cuda_caching_allocator_raw_alloc)", g->ordinal, size);
        return OM_NOMEM;
    }
    const om_cu_result r = api.alloc(&p, size ? size : 1, stream);
    if (r == OUT_OF_MEMORY) {
        om_fail(cx, OM_NOMEM, "CUDA device %d is out of memory: %zu bytes were asked for (cuMemAllocAsync: %u)",
                g->ordinal, size, r);
        return OM_NOMEM;
    }
    if (r) return failed(cx, g, r, alloc_name);
    *out = (void *)(uintptr_t)p;
    return OM_OK;
}

void om_gpu_free(om_gpu *g, void *p, void *stream) {
    om_ctx quiet = {.status = OM_OK};
    const bool entered = !g->of_torch && om_gpu_enter(&quiet, g) == OM_OK;
    const bool gone = g->of_torch ? om_torch_memory_put(p) : entered && !api.free((om_cu_address)(uintptr_t)p, stream);
    if (entered) om_gpu_leave(&quiet, g, OM_OK);
    if (!gone) owe(g, (om_cu_address)(uintptr_t)p, stream);
}

om_status om_gpu_upload(om_ctx *cx, om_gpu *g, void *to, const void *from, size_t size) {
    OM_TRY(not_captured(cx, g, stream_now));
    if (size) OM_GPU_CALL(to_device, (om_cu_address)(uintptr_t)to, from, size, stream_now);
    return OM_OK;
}

om_status om_gpu_download(om_ctx *cx, om_gpu *g, void *to, const void *from, size_t size) {
    if (size) OM_GPU_CALL(to_host, to, (om_cu_address)(uintptr_t)from, size, stream_now);
    OM_GPU_CALL(wait, stream_now);
    return OM_OK;
}

om_status om_gpu_idle(om_ctx *cx, om_gpu *g) {
    om_gpu_records_pause();
    const om_cu_result r = api.wait_all();
    om_gpu_records_resume();
    return r ? failed(cx, g, r, wait_all_name) : OM_OK;
}

om_status om_gpu_set(om_ctx *cx, om_gpu *g, void *to, int byte, size_t size) {
    if (size) OM_GPU_CALL(set, (om_cu_address)(uintptr_t)to, (unsigned char)byte, size, stream_now);
    return OM_OK;
}

om_status om_gpu_module(om_ctx *cx, om_gpu *g, const void *bytes, om_cu_module *out) {
    OM_GPU_CALL(module_load, out, bytes);
    return OM_OK;
}

om_status om_gpu_module_function(om_ctx *cx, om_gpu *g, om_cu_module m, const char *name, om_cu_function *out) {
    OM_GPU_CALL(module_function, out, m, name);
    return OM_OK;
}

/* A chain that has been compiled takes the interpreter's parameters and grid, and no shared memory. */
om_status om_gpu_start(om_ctx *cx, om_gpu *g, const om_gpu_launch *n, const void *param) {
    void *params[] = {(void *)(uintptr_t)param};
    const om_cu_function f = om_gpu_program_function(n->program);
    const om_cu_result r = api.launch(f ? f : g->kernel[n->kernel], n->grid[0], n->grid[1], n->grid[2], n->block, 1, 1,
                                      f ? 0 : n->shared, stream_now, params, NULL);
    return r ? failed_of(cx, g, r, launch_name, kernels[n->kernel].name) : OM_OK;
}
