/* fake_cuda.c - a libcuda.so.1 for machines without a GPU: the entry points csrc/cuda/driver.c uses, over ordinary
 * memory.
 *
 * Launches run the real kernels through csrc/cuda/host_emulation.h, at once or (fake_defer) only when fake_sync is
 * called, so that code which reads a result without waiting reads the old one. It refuses what a driver refuses: no
 * cuInit, no or the wrong current context, foreign handles, bad launch sizes, first use or legacy-stream work during a
 * capture. And it checks what a driver cannot: every address a kernel is given must lie in memory that was registered
 * and is still alive, in the device it runs on. Any call can be told to fail (fake_fail). Two streams per device;
 * captured launches are kept by value, as in a CUDA graph.
 */
#include "cuda/host_emulation.h"
#include "cuda/optim.cu"

#include "cuda/driver.h"

#include <stdio.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
enum { DEVICES = 32, STREAMS = 2, MAX_OPS = 4096, MAX_RANGES = 65536, MAX_GRAPHS = 64 };
enum {
    INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_IMPLICIT = 906
};

#define KERNEL(name, type) EMU_KERNEL(name, type)
#include "cuda/kernels.def"
#undef KERNEL

struct CUctx_st { int device, retained; };
struct CUmod_st { struct CUctx_st *context; };
struct CUfunc_st { struct CUctx_st *context; int kernel; };
struct CUstream_st { struct CUctx_st *context; int capturing; };

typedef union param { om_gpu_optim optim; om_gpu_upload upload; om_gpu_scaling scaling; } param;
typedef struct op { int kernel, device; unsigned blocks, threads; struct CUstream_st *stream; param p; } op;
typedef struct range { const char *at; size_t size; int device, count; } range;

static struct CUctx_st contexts[DEVICES];
static struct CUmod_st modules[DEVICES];
static struct CUfunc_st functions[DEVICES][OM_N_CUDA_KERNELS];
static struct CUstream_st streams[DEVICES][STREAMS];
static __thread struct CUctx_st *stack[16];
static __thread int depth;
static int ready, deferred, any_capture;
static op *queue;
static int n_queue;
static struct { op *ops; int n; } graphs[MAX_GRAPHS], recording;
static int n_graphs;
static range ranges[MAX_RANGES];
static int n_ranges;
static char message[512];
static struct { char name[64]; int nth; unsigned code; } fault;
static struct { const char *name; int n; } calls[32];

static const char *const kernel_names[] = {
#define KERNEL(name, type) #name,
#include "cuda/kernels.def"
#undef KERNEL
};

/* --- bookkeeping ------------------------------------------------------------------------------------- */

static unsigned called(const char *name) {
    int i = 0;
    while (calls[i].name && strcmp(calls[i].name, name)) i++;
    calls[i].name = name;
    calls[i].n++;
    if (fault.nth && !strcmp(fault.name, name) && !--fault.nth) return fault.code;
    return 0;
}
#define CALLED                                       \
    do {                                             \
        const unsigned injected_ = called(__func__); \
        if (injected_) return injected_;             \
    } while (0)

static unsigned refuse(unsigned code, const char *why) {
    snprintf(message, sizeof message, "%s", why);
    return code;
}

static int trusting; /* addresses are not looked up */
PUBLIC void fake_trust(int on) { trusting = on; }

/* --- memory ------------------------------------------------------------------------------------------ */

PUBLIC void fake_register(const void *at, size_t size, int device) {
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].count && ranges[i].at == at) {
            ranges[i].count++;
            if (ranges[i].size < size) ranges[i].size = size;
            if (device >= 0) ranges[i].device = device;
            return;
        }
    for (int i = 0; i <= n_ranges && i < MAX_RANGES; i++)
        if (i == n_ranges || !ranges[i].count) {
            ranges[i] = (range){at, size, device, 1};
            n_ranges += i == n_ranges;
            return;
        }
}
PUBLIC void fake_unregister(const void *at) {
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].count && ranges[i].at == at) {
            ranges[i].count--;
            return;
        }
}

static int memory_ok(const op *o, const char *what, const void *at, size_t size) {
    if (!at || !size || trusting) return 1;
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].count && (ranges[i].device < 0 || ranges[i].device == o->device) &&
            (const char *)at >= ranges[i].at && (const char *)at + size <= ranges[i].at + ranges[i].size)
            return 1;
    snprintf(message, sizeof message, "%s: %s (%p, %zu bytes) is not live memory of device %d", kernel_names[o->kernel],
             what, at, size, o->device);
    return 0;
}

static size_t type_size(int t) { return t == OM_GPU_F32 ? 4 : 2; }

static int op_ok(const op *o) {
    if (o->kernel == om_cuda_upload_kernel)
        return memory_ok(o, "table", o->p.upload.to, 8 * (size_t)o->p.upload.n_word) &&
               o->p.upload.n_word <= OM_GPU_UPLOAD / 8;
    if (o->kernel == om_cuda_loss_scale_kernel) {
        const om_gpu_scaling *a = &o->p.scaling;
        return memory_ok(o, "scaler", a->scaler, sizeof *a->scaler) &&
               memory_ok(o, "steps", a->steps, sizeof *a->steps) && memory_ok(o, "stop", a->stop, 4) &&
               memory_ok(o, "first", a->first, 4);
    }
    const om_gpu_optim *g = &o->p.optim;
    const size_t n_part = g->ticket ? OM_GPU_PIECES * (size_t)g->n_chunk : g->n_chunk;
    int ok = memory_ok(o, "spans", g->span, g->n_span * sizeof *g->span) &&
             memory_ok(o, "chunks", g->chunk, g->n_chunk * sizeof *g->chunk) &&
             memory_ok(o, "part", g->part, 2 * n_part * sizeof *g->part) &&
             memory_ok(o, "rate", g->rate, g->n_span * sizeof *g->rate) &&
             memory_ok(o, "skipped", g->skipped, n_part) &&
             memory_ok(o, "item", g->item, 2 * n_part * sizeof *g->item) &&
             memory_ok(o, "done", g->done, g->n_span * sizeof *g->done) && memory_ok(o, "ticket", g->ticket, 4) &&
             memory_ok(o, "lr", g->lr, 4) && memory_ok(o, "grad_scale", g->grad_scale, 4) &&
             memory_ok(o, "found_inf", g->found_inf, 4) && memory_ok(o, "norm_out", g->norm_out, 4) &&
             memory_ok(o, "stop_out", g->stop_out, 4) && memory_ok(o, "scale_out", g->scale_out, 4) &&
             memory_ok(o, "first_out", g->first_out, 4);
    unsigned first = 0;
    for (unsigned i = 0; ok && i < g->n_span; i++) {
        const om_gpu_span *s = &g->span[i];
        const size_t n = (size_t)s->n;
        ok = memory_ok(o, "p", s->p, n * type_size(s->tp)) && memory_ok(o, "g", s->g, n * type_size(s->tg)) &&
             memory_ok(o, "m", s->m, n * type_size(s->tm)) && memory_ok(o, "v", s->v, n * type_size(s->tv)) &&
             memory_ok(o, "w", s->w, n * (s->store == OM_GPU_SPLIT ? 2 : 4)) &&
             memory_ok(o, "d", s->d, n * type_size(s->td)) && memory_ok(o, "step", s->step, 4);
        if (ok && s->first != first) return refuse(0, "spans do not follow each other");
        first += (unsigned)((s->n + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK);
        const uintptr_t all = (uintptr_t)s->p | (uintptr_t)s->g | (uintptr_t)s->m | (uintptr_t)s->v | (uintptr_t)s->w |
                              (uintptr_t)s->d;
        if (ok && s->aligned && all % 16) return refuse(0, "a span that is not aligned says it is");
    }
    for (unsigned c = 0; ok && o->kernel != om_cuda_chunks_kernel && c < g->n_chunk; c++)
        if (g->chunk[c].span >= g->n_span) return refuse(0, "a chunk of no span");
    return ok;
}

static unsigned op_run(const op *o) {
    if (!op_ok(o)) return ILLEGAL_ADDRESS;
    switch (o->kernel) {
#define KERNEL(name, type) \
    case name##_kernel:    \
        return (unsigned)emu_run_##name((const type *)(const void *)&o->p, o->blocks, o->threads);
#include "cuda/kernels.def"
#undef KERNEL
    }
    return INVALID_HANDLE;
}

static unsigned op_put(const op *o) {
    if (!deferred) return op_run(o);
    if (!queue) queue = malloc(MAX_OPS * sizeof *queue);
    if (n_queue == MAX_OPS) return refuse(INVALID_VALUE, "queue full");
    queue[n_queue++] = *o;
    return 0;
}

/* --- what tests say ----------------------------------------------------------------------------------- */

PUBLIC const char *fake_message(void) { return message; }
PUBLIC void fake_fail(const char *name, int nth, unsigned code) {
    snprintf(fault.name, sizeof fault.name, "%s", name);
    fault.nth = nth, fault.code = code;
}
PUBLIC int fake_fault_left(void) { return fault.nth; }
PUBLIC int fake_calls(const char *name) {
    for (int i = 0; calls[i].name; i++)
        if (!strcmp(calls[i].name, name)) return calls[i].n;
    return 0;
}
PUBLIC int fake_depth(void) { return depth; }
PUBLIC void *fake_stream(int device, int n) { return &streams[device][n]; }
PUBLIC void fake_defer(int on) { deferred = on; }
/* streams one after the other, the last first: order between streams is not promised */
PUBLIC unsigned fake_sync(void) {
    unsigned r = 0;
    for (int d = DEVICES; d-- > 0;)
        for (int s = STREAMS; s-- > -1;) {
            for (int i = 0; i < n_queue && !r; i++) {
                struct CUstream_st *of = s < 0 ? NULL : &streams[d][s];
                if (queue[i].device == d && queue[i].stream == of) r = op_run(&queue[i]);
            }
        }
    n_queue = 0;
    return r;
}
PUBLIC void fake_capture_begin(void *stream) {
    ((struct CUstream_st *)stream)->capturing = any_capture = 1;
    recording.ops = malloc(MAX_OPS * sizeof *recording.ops);
    recording.n = 0;
}
PUBLIC int fake_capture_end(void *stream) {
    ((struct CUstream_st *)stream)->capturing = any_capture = 0;
    graphs[n_graphs].ops = recording.ops, graphs[n_graphs].n = recording.n;
    return n_graphs++;
}
PUBLIC unsigned fake_replay(int graph) {
    unsigned r = 0;
    for (int i = 0; i < graphs[graph].n && !r; i++) r = op_put(&graphs[graph].ops[i]);
    return r;
}

/* --- the driver --------------------------------------------------------------------------------------- */

PUBLIC unsigned cuGetErrorName(unsigned r, const char **out) {
    static char name[32];
    snprintf(name, sizeof name, "FAKE_ERROR_%u", r);
    *out = name;
    return 0;
}
PUBLIC unsigned cuGetErrorString(unsigned r, const char **out) {
    (void)r;
    *out = message[0] ? message : "made to fail";
    return 0;
}
PUBLIC unsigned cuInit(unsigned flags) {
    CALLED;
    if (flags) return INVALID_VALUE;
    ready = 1;
    return 0;
}
PUBLIC unsigned cuDriverGetVersion(int *out) {
    CALLED;
    *out = 13000;
    return 0;
}
PUBLIC unsigned cuDeviceGet(int *out, int ordinal) {
    CALLED;
    if (!ready) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *out = ordinal + 100; /* handles are not ordinals */
    return 0;
}
PUBLIC unsigned cuDeviceGetName(char *out, int size, int device) {
    CALLED;
    if (device < 100) return INVALID_DEVICE;
    snprintf(out, (size_t)size, "Fake GPU");
    return 0;
}
PUBLIC unsigned cuDeviceGetAttribute(int *out, unsigned attribute, int device) {
    CALLED;
    if (device < 100) return INVALID_DEVICE;
    *out = attribute == 75 ? 9 : attribute == 16 ? 2 : 0;
    return 0;
}
PUBLIC unsigned cuDevicePrimaryCtxRetain(struct CUctx_st **out, int device) {
    CALLED;
    if (!ready) return NOT_INITIALIZED;
    if (device < 100 || device >= 100 + DEVICES) return INVALID_DEVICE;
    if (any_capture) return CAPTURE_UNSUPPORTED;
    *out = &contexts[device - 100];
    (*out)->device = device - 100;
    (*out)->retained++;
    for (int s = 0; s < STREAMS; s++) streams[device - 100][s].context = *out;
    return 0;
}
PUBLIC unsigned cuCtxPushCurrent_v2(struct CUctx_st *c) {
    CALLED;
    if (c < contexts || c >= contexts + DEVICES || !c->retained || depth == 16) return INVALID_CONTEXT;
    stack[depth++] = c;
    return 0;
}
PUBLIC unsigned cuCtxPopCurrent_v2(struct CUctx_st **out) {
    if (!depth) return INVALID_CONTEXT;
    *out = stack[--depth];
    CALLED; /* a failure is reported by a pop that popped */
    return 0;
}
PUBLIC unsigned cuModuleLoadData(struct CUmod_st **out, const void *image) {
    CALLED;
    if (!depth) return INVALID_CONTEXT;
    if (any_capture) return CAPTURE_UNSUPPORTED;
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    if (magic != 0xBA55ED50u) return refuse(INVALID_IMAGE, "not a fatbin");
    *out = &modules[stack[depth - 1]->device];
    (*out)->context = stack[depth - 1];
    return 0;
}
PUBLIC unsigned cuModuleGetFunction(struct CUfunc_st **out, struct CUmod_st *m, const char *name) {
    CALLED;
    if (!depth || m->context != stack[depth - 1]) return INVALID_HANDLE;
    for (int k = 0; k < OM_N_CUDA_KERNELS; k++)
        if (!strcmp(name, kernel_names[k])) {
            *out = &functions[m->context->device][k];
            **out = (struct CUfunc_st){m->context, k};
            return 0;
        }
    return NOT_FOUND;
}
static unsigned stream_check(const struct CUstream_st *s) {
    if (!depth) return INVALID_CONTEXT;
    if (!s) return any_capture ? refuse(CAPTURE_IMPLICIT, "the legacy stream was used during a capture") : 0;
    return s->context == stack[depth - 1] ? 0 : refuse(INVALID_HANDLE, "a stream of another context");
}
PUBLIC unsigned cuStreamIsCapturing(struct CUstream_st *s, unsigned *out) {
    CALLED;
    const unsigned r = stream_check(s);
    if (r) return r;
    *out = s ? (unsigned)s->capturing : 0;
    return 0;
}
PUBLIC unsigned cuLaunchKernel(struct CUfunc_st *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, struct CUstream_st *s, void **params, void **extra) {
    CALLED;
    const unsigned r = stream_check(s);
    if (r) return r;
    if (!f || f->context != stack[depth - 1]) return refuse(INVALID_HANDLE, "a kernel of another context");
    if (!gx || gx > INT32_MAX || gy != 1 || gz != 1 || !bx || bx > OM_GPU_THREADS || by != 1 || bz != 1 ||
        shared > 48 << 10 || !params || extra)
        return refuse(INVALID_VALUE, "bad launch sizes");
    static const size_t param_size[] = {
#define KERNEL(name, type) sizeof(type),
#include "cuda/kernels.def"
#undef KERNEL
    };
    op o = {f->kernel, f->context->device, gx, bx, s, {{0}}};
    memcpy(&o.p, params[0], param_size[f->kernel]);
    if (s && s->capturing) {
        if (recording.n == MAX_OPS) return refuse(INVALID_VALUE, "graph full");
        recording.ops[recording.n++] = o;
        return 0;
    }
    return op_put(&o);
}
