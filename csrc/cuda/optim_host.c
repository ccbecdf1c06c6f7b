/* optim_host.c - see optim_host.h. */
#include "cuda/optim_host.h"

#include "optim/list.h"

#include <stdio.h>

_Static_assert(sizeof(om_gpu_upload) <= 4096 && sizeof(om_gpu_optim) <= 4096,
               "a kernel's parameters fit 4 KB on every driver");
_Static_assert(sizeof(om_gpu_span) % 8 == 0 && OM_GPU_UPLOAD % 8 == 0, "the parts of a table stay aligned");
_Static_assert((int)OM_GPU_MASTER == OM_STORE_MASTER && (int)OM_GPU_SPLIT == OM_STORE_SPLIT &&
                   (int)OM_GPU_STOCHASTIC == OM_STORE_STOCHASTIC,
               "one numbering of stores");

/* --- tables ------------------------------------------------------------------------------------------ */

/* spans, part, rate, chunks, skipped: by falling alignment */
static size_t table_part(size_t n_span) { return n_span * sizeof(om_gpu_span); }
static size_t table_rate(size_t n_span, size_t n_chunk) { return table_part(n_span) + 2 * n_chunk * sizeof(double); }
static size_t table_chunk(size_t n_span, size_t n_chunk) {
    return table_rate(n_span, n_chunk) + n_span * sizeof(double);
}
static size_t table_skipped(size_t n_span, size_t n_chunk) {
    return table_chunk(n_span, n_chunk) + n_chunk * sizeof(om_gpu_chunk);
}
size_t om_gpu_table_size(uint32_t n_span, uint32_t n_chunk) { return table_skipped(n_span, n_chunk) + n_chunk; }

/* LAMB in one launch: sums of the pieces, tickets, done, the counter, skipped pieces */
static size_t order_item(size_t n_piece) { return 2 * n_piece * sizeof(double); }
static size_t order_done(size_t n_piece) { return order_item(n_piece) + 2 * n_piece * sizeof(uint32_t); }
static size_t order_skipped(size_t n_span, size_t n_piece) {
    return order_done(n_piece) + (n_span + 1) * sizeof(uint32_t);
}
size_t om_gpu_order_size(uint32_t n_span, uint32_t n_chunk) {
    const size_t n_piece = OM_GPU_PIECES * (size_t)n_chunk;
    return order_skipped(n_span, n_piece) + n_piece;
}

static void order_fill(const om_gpu_table *t, om_gpu_optim *o) {
    const size_t n_piece = OM_GPU_PIECES * (size_t)t->n_chunk;
    char *m = t->order;
    o->part = (double *)(void *)m;
    o->item = (uint32_t *)(void *)(m + order_item(n_piece));
    o->done = (uint32_t *)(void *)(m + order_done(n_piece));
    o->ticket = o->done + t->n_span;
    o->skipped = (uint8_t *)m + order_skipped(t->n_span, n_piece);
}

static void table_fill(const om_gpu_table *t, om_gpu_optim *o) {
    char *m = t->memory;
    o->n_span = t->n_span, o->n_chunk = t->n_chunk;
    o->span = (om_gpu_span *)(void *)m;
    o->part = (double *)(void *)(m + table_part(t->n_span));
    o->rate = (double *)(void *)(m + table_rate(t->n_span, t->n_chunk));
    o->chunk = (om_gpu_chunk *)(void *)(m + table_chunk(t->n_span, t->n_chunk));
    o->skipped = (uint8_t *)m + table_skipped(t->n_span, t->n_chunk);
    if (t->order) order_fill(t, o);
}

static uint8_t gpu_type(int dtype) {
    return dtype == OM_BF16 ? OM_GPU_BF16 : dtype == OM_F16 ? OM_GPU_F16 : OM_GPU_F32;
}

om_status om_gpu_spans(om_ctx *cx, const char *op, om_optim_store store, const om_optim_param *ps,
                       const om_tensor *step, int n, om_gpu_span *out, uint32_t *n_span, uint32_t *n_chunk,
                       uint8_t *odd, int *n_odd) {
    uint64_t chunks = 0, pieces = 0;
    *n_span = 0, *n_odd = 0;
    for (int i = 0; i < n; i++) {
        const om_optim_param *q = &ps[i];
        OM_TRY(om_optim_check(cx, op, store, q, i));
        OM_CHECK(cx, q->p.dtype != OM_F64, "%s: parameter %d is f64 on a CUDA device; allowed there: f32, bf16, f16",
                 op, i);
        const om_tensor *c = &step[i];
        OM_CHECK(cx, c->dtype == OM_NODTYPE || (c->dtype == OM_F32 && om_numel(c) == 1 && c->device == q->p.device),
                 "%s: the step counter of parameter %d must be one f32 element on the parameter's device", op, i);
        const int64_t numel = om_numel(&q->p);
        const om_tensor *const all[] = {&q->p, &q->g, &q->m, &q->v, &q->w, &q->d};
        bool even = om_optim_gapless(&q->p);
        uintptr_t bits = 0;
        for (int f = 0; f < 6; f++) {
            if (all[f]->dtype == OM_NODTYPE) continue;
            even = even && om_optim_same_order(all[f], &q->p);
            bits |= (uintptr_t)all[f]->data;
        }
        odd[i] = numel && !even;
        *n_odd += odd[i];
        if (!numel) continue;
        om_gpu_span *s = &out[(*n_span)++];
        memset(s, 0, sizeof *s); /* padding too: callers compare bytes */
        s->n = numel;
        s->p = q->p.data, s->g = q->g.data, s->m = q->m.data, s->v = q->v.data, s->w = q->w.data, s->d = q->d.data;
        s->tp = gpu_type(q->p.dtype), s->tg = gpu_type(q->g.dtype), s->tm = gpu_type(q->m.dtype),
        s->tv = gpu_type(q->v.dtype);
        s->td = gpu_type(q->d.dtype);
        s->step = c->data;
        s->stream = q->stream;
        s->store = (uint8_t)store;
        s->aligned = bits % 16 == 0;
        s->first = (uint32_t)chunks;
        s->first_piece = (uint32_t)pieces;
        chunks += (uint64_t)(numel + OM_GPU_BLOCK - 1) / OM_GPU_BLOCK;
        pieces += (uint64_t)(numel + OM_GPU_PIECE - 1) / OM_GPU_PIECE;
        /* 2^31 tickets of the first sweep at most */
        OM_CHECK(cx, chunks < 1u << 28, "%s: more than 2^42 elements in one list", op);
    }
    *n_chunk = (uint32_t)chunks;
    return OM_OK;
}

/* --- launches ---------------------------------------------------------------------------------------- */

typedef struct queue { /* where a sequence of launches goes */
    om_ctx *cx;
    om_cuda *d;
    void *stream;
} queue;

static om_status queue_open(om_ctx *cx, const om_gpu_table *t, om_gpu_optim *o, queue *q) {
    *q = (queue){.cx = cx, .stream = t->stream};
    table_fill(t, o);
    return om_cuda_enter(cx, t->ordinal, &q->d);
}

static om_status queue_put(const queue *q, om_cuda_kernel k, uint32_t blocks, uint32_t threads, const om_gpu_optim *o) {
    return om_cuda_launch(q->cx, q->d, k, blocks, threads, q->stream, o);
}

/* What a failure after the first launch leaves behind is part of its message. */
static om_status queue_half(const queue *q, om_status s, const char *done) {
    if (s == OM_OK) return OM_OK;
    char first[512];
    snprintf(first, sizeof first, "%s", om_ctx_message(q->cx));
    om_ctx_clear(q->cx);
    return om_fail(q->cx, s, "%s; %s: restore the last checkpoint", first, done);
}

om_status om_gpu_upload_spans(om_ctx *cx, const om_gpu_table *t, const om_gpu_span *spans) {
    queue q;
    om_gpu_optim o = {0};
    OM_TRY(queue_open(cx, t, &o, &q));
    const size_t size = t->n_span * sizeof *spans;
    om_status s = OM_OK;
    for (size_t at = 0; s == OM_OK && at < size; at += OM_GPU_UPLOAD) {
        const size_t part = size - at < OM_GPU_UPLOAD ? size - at : OM_GPU_UPLOAD;
        om_gpu_upload u = {.to = (uint64_t *)(void *)((char *)t->memory + at), .n_word = (uint32_t)(part / 8)};
        memcpy(u.word, (const char *)spans + at, part);
        s = om_cuda_launch(cx, q.d, om_cuda_upload_kernel, 1, OM_GPU_THREADS, q.stream, &u);
    }
    if (s == OM_OK) s = queue_put(&q, om_cuda_chunks_kernel, t->n_span, OM_GPU_THREADS, &o);
    return om_cuda_leave(cx, q.d, s);
}

static om_status queue_count(const queue *q, const om_gpu_optim *o) {
    return queue_put(q, om_cuda_count_kernel, (o->n_span + OM_GPU_THREADS - 1) / OM_GPU_THREADS, OM_GPU_THREADS, o);
}

static om_status gpu_one_sweep(om_ctx *cx, const om_gpu_table *t, om_gpu_optim *o, om_cuda_kernel k) {
    queue q;
    OM_TRY(queue_open(cx, t, o, &q));
    om_status s = queue_count(&q, o);
    if (s == OM_OK)
        s = queue_half(&q, queue_put(&q, k, o->n_chunk, OM_GPU_THREADS, o),
                       "step counters were advanced, weights were not");
    return om_cuda_leave(cx, q.d, s);
}

om_status om_gpu_adam(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    OM_CHECK(cx, o.adam.mode >= 0 && o.adam.mode < OM_N_ADAM_MODES, "adam: mode %d given; allowed: 0 to %d",
             o.adam.mode, OM_N_ADAM_MODES - 1);
    return gpu_one_sweep(cx, t, &o, om_cuda_adam_kernel);
}

om_status om_gpu_sgd(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    return gpu_one_sweep(cx, t, &o, om_cuda_sgd_kernel);
}

/* Thread blocks of om_cuda_lamb: as many as run at once by its launch bounds; and as many pieces lie between the sweeps
 * of a span, so that whoever takes the first ticket of a second sweep is likely to find the first one done. */
static uint32_t lamb_blocks(const queue *q) { return OM_GPU_LAMB_BLOCKS * (uint32_t)om_cuda_processors(q->d); }

om_status om_gpu_lamb_order(om_ctx *cx, const om_gpu_table *t) {
    queue q;
    om_gpu_optim o = {0};
    OM_TRY(queue_open(cx, t, &o, &q));
    o.lag = lamb_blocks(&q);
    const uint64_t tickets = 2 * OM_GPU_PIECES * (uint64_t)t->n_chunk; /* that many at most */
    return om_cuda_leave(cx, q.d,
                         queue_put(&q, om_cuda_lamb_order_kernel,
                                   (uint32_t)((tickets + OM_GPU_THREADS - 1) / OM_GPU_THREADS), OM_GPU_THREADS, &o));
}

om_status om_gpu_lamb(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    queue q;
    OM_TRY(queue_open(cx, t, &o, &q));
    o.write_weights = 1;
    om_status s = queue_count(&q, &o);
    if (t->order) {
        const uint32_t most = lamb_blocks(&q), pieces = OM_GPU_PIECES * o.n_chunk;
        if (s == OM_OK)
            s = queue_half(&q, queue_put(&q, om_cuda_lamb_kernel, pieces < most ? pieces : most, OM_GPU_THREADS, &o),
                           "step counters were advanced, moments and weights were not");
        return om_cuda_leave(cx, q.d, s);
    }
    if (s == OM_OK)
        s = queue_half(&q, queue_put(&q, om_cuda_lamb_direction_kernel, o.n_chunk, OM_GPU_THREADS, &o),
                       "step counters were advanced, moments and weights were not");
    if (s == OM_OK) {
        s = queue_put(&q, om_cuda_lamb_rate_kernel, o.n_span, OM_GPU_THREADS, &o);
        if (s == OM_OK) s = queue_put(&q, om_cuda_lamb_update_kernel, o.n_chunk, OM_GPU_THREADS, &o);
        s = queue_half(&q, s, "step counters and moments were advanced, weights were not");
    }
    return om_cuda_leave(cx, q.d, s);
}

static om_status gpu_launch(om_ctx *cx, const om_gpu_table *t, om_gpu_optim *o, om_cuda_kernel k, uint32_t blocks) {
    queue q;
    OM_TRY(queue_open(cx, t, o, &q));
    return om_cuda_leave(cx, q.d, queue_put(&q, k, blocks, OM_GPU_THREADS, o));
}

om_status om_gpu_loss_scale(om_ctx *cx, int ordinal, void *stream, const om_gpu_scaling *a) {
    om_cuda *d;
    OM_TRY(om_cuda_enter(cx, ordinal, &d));
    return om_cuda_leave(cx, d, om_cuda_launch(cx, d, om_cuda_loss_scale_kernel, 1, 1, stream, a));
}

om_status om_gpu_axpby(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    return gpu_launch(cx, t, &o, om_cuda_axpby_kernel, t->n_chunk);
}
om_status om_gpu_norm(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    return gpu_launch(cx, t, &o, om_cuda_norm_kernel, t->n_chunk);
}
om_status om_gpu_norm_finish(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    return gpu_launch(cx, t, &o, om_cuda_norm_finish_kernel, 1);
}
