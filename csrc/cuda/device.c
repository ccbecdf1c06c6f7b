/* device.c - a GPU as a device: blocks, copies, and the calls of a slice as launches on the thread's stream.
 *
 * A slice resolves each launch's relocations into a copy of its parameters and queues it, or launches what graphs.h has
 * recorded of that; it waits for nothing, unless a call is the CPU's. Faults are noted in memory of the host and looked
 * at when somebody waits or the next slice begins; by then the calls behind the fault have run, but for write-backs.
 */
#include "cuda/device.h"

#include "cuda/blaslt.h"
#include "cuda/blocks.h"
#include "cuda/graphs.h"
#include "cuda/lent.h"
#include "cuda/program.h"
#include "cuda/torch_conv.h"
#include "graph/sabotage.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

static om_device devices[OM_GPUS]; /* by ordinal */
static om_gpu *gpus[OM_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool host_ops[OM_N_OPS];
static atomic_long counts[4]; /* calls of the CPU's, launches, products by the library, convolutions by torch */

typedef struct block {
    om_block b;
    om_gpu *gpu;
    void *stream;
} block;

om_gpu *om_cuda_gpu(const om_ctx *cx) { return gpus[cx->device - devices]; }

/* --- memory ------------------------------------------------------------------------------------------- */

static om_block *cuda_get(om_ctx *cx, size_t size) {
    om_gpu *g = om_cuda_gpu(cx);
    block *b = malloc(sizeof *b);
    if (!b) return om_fail(cx, OM_NOMEM, "no memory for a block"), NULL;
    *b = (block){.b = {.size = size, .device = cx->device}, .gpu = g, .stream = om_cuda_stream_now()};
    om_status s = om_gpu_enter(cx, g);
    if (s == OM_OK) s = om_gpu_leave(cx, g, om_gpu_block_get(cx, g, size, b->stream, &b->b.data));
    if (s == OM_OK) s = om_gpu_lend(cx, g, b->b.data, size);
    if (s == OM_OK) return &b->b;
    if (b->b.data) om_gpu_block_put(g, b->b.data, size, b->stream); /* leaving failed */
    free(b);
    return NULL;
}

static void cuda_put(om_block *b) {
    block *own = (block *)(void *)b;
    if (om_gpu_lent_back(own->gpu, b->data, own->stream))
        om_gpu_block_put(own->gpu, b->data, b->size, own->stream);
    free(own);
}

#define INSIDE(expr)                            \
    do {                                        \
        om_gpu *g = om_cuda_gpu(cx);                 \
        OM_TRY(om_gpu_enter(cx, g));            \
        return om_gpu_leave(cx, g, (expr));     \
    } while (0)

/* --- faults: write-backs look at the fault word on the device (kernel.h), so the host may clear it only when none that
 * comes behind the fault is still to run. Those that are queued are waited for. A run that was under way when a fault
 * was told may be behind it and queues none. ----------------------------------------------------------------------- */

static pthread_rwlock_t telling = PTHREAD_RWLOCK_INITIALIZER; /* shared while write-backs are queued */
static long told[OM_GPUS]; /* faults so far */

/* The context is current. */
static om_status fault_look(om_ctx *cx, om_gpu *g) {
    om_gpu_fault *f = om_gpu_fault_word(g), x = {0};
    if (!__atomic_load_n(&f->kind, __ATOMIC_ACQUIRE)) return OM_OK;
    pthread_rwlock_wrlock(&telling);
    om_status s = OM_OK;
    if (__atomic_load_n(&f->kind, __ATOMIC_ACQUIRE) && 
        (om_sabotage("device.told") || (s = om_gpu_idle(cx, g)) == OM_OK)) {
        x = *f;
        memset(f, 0, sizeof *f);
        told[om_gpu_ordinal(g)]++;
    }
    pthread_rwlock_unlock(&telling);
    return s == OM_OK && x.kind ? om_gpu_site_fail(cx, &x) : s;
}

om_status om_gpu_writes_begin(om_run *r, om_gpu *g) {
    pthread_rwlock_rdlock(&telling);
    if (r->of_device == 1 + told[om_gpu_ordinal(g)] || om_sabotage("device.meanwhile")) return OM_OK;
    pthread_rwlock_unlock(&telling);
    return om_fail(r->cx, OM_INVALID, "while this step ran, another one's fault was told; it may have failed as well, "
                                      "so nothing of it is written back");
}
void om_gpu_writes_end(void) { pthread_rwlock_unlock(&telling); }

static om_status cuda_fill(om_ctx *cx, void *to, int byte, size_t size) {
    INSIDE(om_gpu_set(cx, g, to, byte, size));
}
static om_status cuda_upload(om_ctx *cx, void *to, const void *from, size_t size) {
    INSIDE(om_gpu_upload(cx, g, to, from, size));
}
static om_status cuda_download(om_ctx *cx, void *to, const void *from, size_t size) {
    om_gpu *g = om_cuda_gpu(cx);
    OM_TRY(om_gpu_enter(cx, g));
    om_status s = om_gpu_download(cx, g, to, from, size);
    if (s == OM_OK) s = fault_look(cx, g);
    return om_gpu_leave(cx, g, s);
}

/* --- launches ------------------------------------------------------------------------------------------ */

typedef struct place { /* where one call's addresses come from */
    const om_tensor *arg;
    void *scratch;
    const void *scalars;
    bool write;
} place;

static om_status launch(om_ctx *cx, om_gpu *g, const om_gpu_launch *n, const place *at) {
    _Alignas(16) uint8_t param[OM_GPU_PARAM];
    om_gpu_range range[OM_MAX_ARGS];
    memcpy(param, n->param, n->size);
    for (int i = 0; i < n->n_reloc; i++) {
        const om_gpu_reloc *r = &n->reloc[i];
        char *base = r->what == OM_GPU_ARG       ? at->arg[r->arg].data
                     : r->what == OM_GPU_SCRATCH ? at->scratch
                     : r->what == OM_GPU_SCALARS ? (char *)(uintptr_t)at->scalars
                     : r->what == OM_GPU_FAULT || at->write ? (char *)om_gpu_fault_word(g)
                                                            : NULL;
        base = base ? base + r->offset : NULL;
        memcpy(param + r->at, &base, sizeof base);
        if (om_cuda_declare && i < OM_MAX_ARGS)
            range[i] = (om_gpu_range){base ? base + r->lo : NULL, base ? r->hi - r->lo : 0, r->mode};
    }
    if (om_cuda_declare) om_cuda_declare(range, n->n_reloc < OM_MAX_ARGS ? n->n_reloc : OM_MAX_ARGS);
    atomic_fetch_add_explicit(&counts[n->product ? 2 : 1], 1, memory_order_relaxed);
    return n->product ? om_lt_run(cx, g, n->product, (const om_lt_at *)(const void *)param)
                      : om_gpu_start(cx, g, n, param);
}

static om_status launch_all(om_ctx *cx, om_gpu *g, const om_gpu_call *c, const place *at) {
    for (const om_gpu_launch *n = c->first; n; n = n->next) OM_TRY(launch(cx, g, n, at));
    return OM_OK;
}

static om_status copy_lower(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst, om_gpu_call *call) {
    om_tensor t[2] = {*src, *dst};
    const om_args a = {.n_in = 1, .n_out = 1, .in = &t[0], .out = &t[1]};
    om_lower l = {.cx = cx, .mem = mem, .a = &a, .call = call};
    const om_status s = om_gpu_copy_lower(&l, 0, src, 0, 1, dst, 0);
    return s == OM_OK ? cx->status : s;
}

/* What the host asks for: lowered on the spot. */
static om_status copy_now(om_ctx *cx, om_gpu *g, const om_tensor *src, const om_tensor *dst) {
    const om_tensor t[2] = {*src, *dst};
    const place at = {.arg = t};
    om_gpu_call call = {0};
    om_arena mem = {.cx = cx};
    om_status s = copy_lower(cx, &mem, src, dst, &call);
    if (s == OM_OK) s = launch_all(cx, g, &call, &at);
    om_arena_free(&mem);
    return s;
}

static om_status cuda_copy_prepare(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst,
                                   const void **prep) {
    om_gpu_call *call = om_arena_alloc(mem, sizeof *call);
    *prep = call;
    return call ? copy_lower(cx, mem, src, dst, call) : cx->status;
}

static om_status cuda_copy_run(om_ctx *cx, const void *prep, const om_tensor *src, om_tensor *dst) {
    const om_tensor t[2] = {*src, *dst};
    const place at = {.arg = t};
    INSIDE(launch_all(cx, g, prep, &at));
}

static om_status cuda_copy(om_ctx *cx, const om_tensor *src, om_tensor *dst) {
    INSIDE(copy_now(cx, g, src, dst));
}

/* --- calls of the CPU's ---------------------------------------------------------------------------------- */

typedef struct span { char *lo, *hi; } span;
static span span_of(const om_tensor *t) {
    const int64_t e = (int64_t)om_dtype_size(t->dtype);
    span s = {t->data, (char *)t->data + e};
    for (int i = 0; i < t->rank; i++) {
        const int64_t far = (t->dim[i] - 1) * t->stride[i] * e;
        *(far < 0 ? &s.lo : &s.hi) += far;
    }
    return s;
}

/* Operands that share memory share their copy on the host: what may lie in place does so there. */
static om_status host_call(om_ctx *cx, om_gpu *g, om_run *r, const om_call *c, om_tensor *arg, const place *at) {
    const om_gpu_call *call = c->prep;
    const om_node *node = &r->plan->g->nodes.v[c->node];
    const int n = c->n_in + c->n_out;
    span s[OM_MAX_ARGS];
    char *copy[OM_MAX_ARGS] = {0};
    int of[OM_MAX_ARGS]; /* the operand whose copy it lies in */
    om_status st = OM_OK;
    for (int i = 0; i < n; i++) {
        of[i] = -1;
        if (!arg[i].dtype || !om_numel(&arg[i])) continue;
        s[i] = span_of(&arg[i]);
        of[i] = i;
        for (int k = 0; k < i; k++)
            if (of[k] >= 0 && c->arg[k].storage == c->arg[i].storage && of[i] == i) of[i] = of[k];
        if (of[i] == i) continue;
        if (s[i].lo < s[of[i]].lo) s[of[i]].lo = s[i].lo;
        if (s[i].hi > s[of[i]].hi) s[of[i]].hi = s[i].hi;
    }
    for (int i = 0; i < n && st == OM_OK; i++) {
        if (of[i] != i) continue;
        const size_t size = (size_t)(s[i].hi - s[i].lo);
        if (!(copy[i] = om_alloc(cx, size))) st = cx->status;
        else st = om_gpu_download(cx, g, copy[i], s[i].lo, size);
    }
    om_tensor host[OM_MAX_ARGS];
    for (int i = 0; i < n && st == OM_OK; i++) {
        host[i] = arg[i];
        if (of[i] >= 0) host[i].data = copy[of[i]] + ((char *)arg[i].data - s[of[i]].lo);
    }
    const size_t scalar_size = sizeof(om_scalars) + r->plan->g->syms.n * sizeof(int64_t);
    om_scalars *scalars = st == OM_OK ? om_alloc(cx, scalar_size) : NULL;
    void *scratch = scalars && call->host_scratch > 0 ? om_alloc(cx, (size_t)call->host_scratch) : NULL;
    if (st == OM_OK) st = cx->status;
    if (st == OM_OK) st = om_gpu_download(cx, g, scalars, at->scalars, scalar_size);
    int64_t count = 0;
    const char *counted = NULL;
    if (c->count.storage != OM_NONE)
        counted = (const char *)om_run_storage(r, &r->plan->st[c->count.storage]) + c->count.offset;
    if (st == OM_OK && counted) st = om_gpu_download(cx, g, &count, counted, sizeof count);
    if (st == OM_OK) st = fault_look(cx, g); /* no update behind a fault */
    if (st == OM_OK) {
        om_args a = {.node = node, .prep = call->host_prep, .attr = c->attr, .n_attr = node->n_attr, .n_in = c->n_in,
                     .n_out = c->n_out, .in = host, .out = host + c->n_in, .scratch = scratch, .scalars = scalars,
                     .fault = &r->fault, .bounded = counted ? c->bounded : NULL, .count = counted ? &count : NULL,
                     .past = c->past};
        const om_device *device = cx->device;
        const int threads = cx->max_threads;
        cx->device = &om_device_cpu;
        cx->max_threads = call->host_workers;
        st = om_device_cpu.rows[node->op->id].run(cx, &a);
        cx->device = device;
        cx->max_threads = threads;
        if (st == OM_OK) st = om_fault_fail(cx, r->plan->g, node, c->attr, &r->fault);
    }
    bool written[OM_MAX_ARGS] = {0};
    for (int i = c->n_in; i < n; i++)
        if (of[i] >= 0) written[of[i]] = true;
    for (int i = 0; i < n && st == OM_OK; i++)
        if (written[i]) st = om_gpu_upload(cx, g, s[i].lo, copy[i], (size_t)(s[i].hi - s[i].lo));
    for (int i = 0; i < n; i++) om_free(cx, copy[i]);
    om_free(cx, scalars);
    om_free(cx, scratch);
    atomic_store(&host_ops[node->op->id], true);
    atomic_fetch_add(&counts[0], 1);
    return st;
}

/* --- slices ------------------------------------------------------------------------------------------------ */

static om_status call_run(om_run *r, om_gpu *g, const om_call *c) {
    om_ctx *cx = r->cx;
    om_tensor arg[OM_MAX_ARGS];
    const int n = c->n_in + c->n_out;
    if (n > OM_MAX_ARGS) return om_fail(cx, OM_UNSUPPORTED, "a call with %d operands: at most %d", n, OM_MAX_ARGS);
    for (int i = 0; i < n; i++) arg[i] = om_run_arg(r, c, i);
    const om_gpu_call *call = c->prep;
    place at = {.arg = arg, .scalars = r->scalars,
                .write = om_gpu_call_writes(r->plan, c) && !om_sabotage("device.guard")};
    if (c->kind == OM_CALL_COPY)
        return c->write != OM_NONE && r->skip_writes ? OM_OK : launch_all(cx, g, call, &at);
    const om_node *node = &r->plan->g->nodes.v[c->node];
    if (node->phase == OM_UPDATE && r->skip_writes)
        return om_fail(cx, OM_INVALID, "%s: an update cannot be repeated without its writes", node->op->name);
    if (c->scratch != OM_NONE) at.scratch = om_run_storage(r, &r->plan->st[c->scratch]);
    bool done = false;
    if (call->torch) OM_TRY(om_torch_conv_run(cx, g, call->torch, arg, c->n_in, c->n_out, &done));
    if (done) atomic_fetch_add_explicit(&counts[3], 1, memory_order_relaxed);
    return done ? OM_OK : call->host ? host_call(cx, g, r, c, arg, &at) : launch_all(cx, g, call, &at);
}

static om_status calls_run(om_run *r, om_gpu *g, int from, int to, bool writing) {
    for (r->pc = from; r->pc < to; r->pc++) {
        const om_call *c = &r->plan->calls[r->pc];
        const double t0 = r->profile ? om_now_ms() : 0;
        const bool writes = om_gpu_call_writes(r->plan, c) && !r->skip_writes && !writing;
        if (writes) OM_TRY(om_gpu_writes_begin(r, g));
        const om_status s = call_run(r, g, c);
        if (writes) om_gpu_writes_end();
        OM_TRY(s);
        if (r->profile) { /* a profile waits after each call */
            OM_TRY(om_gpu_download(r->cx, g, NULL, NULL, 0));
            om_run_profile_add(r, c, om_now_ms() - t0);
        }
        OM_TRY(om_run_poison(r, r->pc));
    }
    return OM_OK;
}

static om_status cuda_slice(om_run *r, int from, int to) {
    om_gpu *g = om_cuda_gpu(r->cx);
    if (!r->of_device) {
        pthread_rwlock_rdlock(&telling);
        r->of_device = 1 + told[om_gpu_ordinal(g)];
        pthread_rwlock_unlock(&telling);
    }
    om_gpu_programs_make(r->cx, g);
    return om_gpu_graphs_run(r, g, from, to, calls_run);
}

static om_status cuda_begin(om_ctx *cx, int workers) {
    om_gpu *g = om_cuda_gpu(cx);
    (void)workers;
    OM_TRY(om_gpu_enter(cx, g));
    const om_status s = fault_look(cx, g);
    return s == OM_OK ? OM_OK : om_gpu_leave(cx, g, s);
}
static om_status cuda_end(om_ctx *cx, om_status s) { return om_gpu_leave(cx, om_cuda_gpu(cx), s); }

static int cuda_workers(om_ctx *cx) {
    (void)cx;
    return 1;
}

/* --- use ----------------------------------------------------------------------------------------------------- */

om_status om_cuda_use(om_ctx *cx, int ordinal) {
    om_gpu *g;
    OM_TRY(om_gpu_open(cx, ordinal, &g));
    pthread_mutex_lock(&lock);
    if (!gpus[ordinal]) { /* once: others may be using it */
        devices[ordinal] = (om_device){.name = "cuda",
                                       .rows = om_cuda_rows(),
                                       .joins_casts = true,
                                       .strip_fits = om_device_cpu.strip_fits,
                                       .block_get = cuda_get,
                                       .block_put = cuda_put,
                                       .copy = cuda_copy,
                                       .copy_prepare = cuda_copy_prepare,
                                       .copy_run = cuda_copy_run,
                                       .fill = cuda_fill,
                                       .upload = cuda_upload,
                                       .download = cuda_download,
                                       .workers = cuda_workers,
                                       .begin = cuda_begin,
                                       .end = cuda_end,
                                       .run_slice = cuda_slice,
                                       .plan_end = om_gpu_graphs_free};
        gpus[ordinal] = g;
    }
    pthread_mutex_unlock(&lock);
    cx->device = &devices[ordinal];
    return OM_OK;
}

int om_cuda_ordinal(const om_device *d) {
    for (int i = 0; i < OM_GPUS; i++)
        if (d == &devices[i]) return i;
    return -1;
}

const char *om_cuda_host_op(int nth) {
    for (int i = 0; i < OM_N_OPS; i++)
        if (atomic_load(&host_ops[i]) && nth-- == 0) return om_ops[i]->name;
    return NULL;
}

long om_cuda_count(int what) { return atomic_load(&counts[what]); }
void om_cuda_count_add(long launches, long products) {
    atomic_fetch_add_explicit(&counts[1], launches, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts[2], products, memory_order_relaxed);
}
