/* attention.c - ops/attention.c on the CPU.
 *
 * The kernels (kernels/attention.k.c) work on one head, or one chunk of its queries, at a time; workers claim these
 * tasks. dmask is computed when asked for (want_dmask): everything that adds into one of its elements then belongs to
 * one task. Sizes, strides, what attributes say and how the work is cut are worked out once per plan (om_attn_form).
 */
#include "cpu/copy.h"
#include "cpu/cpu.h"
#include "cpu/attention.h"

#include "ops/attr.h"

#include <math.h>
#include <stdatomic.h>

typedef struct attention_prep {
    om_attn_form f;
    const om_attn_type *type;
    bool turn;                  /* q, y and their gradients come with time before heads */
    uint8_t dmask_dtype;        /* backward: OM_NODTYPE = not wanted */
    int workers;
    int64_t tasks, work;        /* work: bytes per worker */
    int64_t sum_bytes;          /* dmask summed aside, before the workers' memory, */
    om_copy_job sum;            /* and then copied to where it belongs */
    /* of operands that broadcast, 0 where they do; a left-out one is not looked at */
    int64_t mask[OM_RANK], frozen[OM_RANK], dmask[OM_RANK];
} attention_prep;

/* Which operands are which: q, k, v stand in a row. */
typedef struct attention_places { int q, mask, start, end, frozen; } attention_places;
static const attention_places forward_places = {0, 3, 4, 5, -1}, backward_places = {1, 4, 7, 8, 9};

static const om_tensor *attention_operand(const om_args *a, int i) {
    return i >= 0 && i < a->n_in && a->in[i].dtype != OM_NODTYPE ? &a->in[i] : NULL;
}

/* --- once per plan ---------------------------------------------------------------------------------------- */

/* Strides of t broadcast to (batch and heads of like, rows, cols). */
static om_status attention_broadcast(om_ctx *cx, const om_tensor *t, const om_tensor *like, int64_t rows, int64_t cols,
                                     int64_t *stride) {
    for (int i = 0; i < like->rank; i++) {
        int at = i - (like->rank - t->rank);
        int64_t want = i == like->rank - 2   ? rows
                       : i == like->rank - 1 ? cols
                                             : like->dim[i],
                have = at >= 0 ? t->dim[at] : 1;
        OM_CHECK(cx, have == want || have == 1, "attention: axis %d of the mask has %lld entries; 1 or %lld is allowed",
                 at, (long long)have, (long long)want);
        stride[i] = have == 1 ? 0 : t->stride[at];
    }
    return OM_OK;
}

static const om_attn_type *attention_type(int dtype) {
    const om_attn_type *tiles = OM_PICK(om_attn_amx);
    if (dtype == OM_BF16 && om_isa_bf16() & OM_BF16_DOT && tiles->forward && om_isa_tiles()) return tiles;
    if (dtype == OM_BF16 && om_isa_bf16() & OM_BF16_DOT) return OM_PICK(om_attn_bf16);
    const om_attn_kernels *k = OM_PICK(om_attn_isa);
    return dtype == OM_F64 ? &k->f64 : &k->f32;
}

static int64_t attention_number(const om_args *a, const char *name) { /* a size expression or an integer */
    const om_attr *x = om_attr_get(a->attr, a->n_attr, name);
    return x ? x->kind == OM_ATTR_DIMS ? x->dims[0] : x->i : 0;
}

static om_status attention_form(om_ctx *cx, const om_args *a, const attention_places *at, attention_prep *p) {
    *p = (attention_prep){.turn = om_args_int(a, "seq_first", 0)};
    om_attn_form *f = &p->f;
    const om_tensor *q = &a->in[at->q], *k = q + 1, *v = q + 2;
    const om_tensor *mask = attention_operand(a, at->mask), *frozen = attention_operand(a, at->frozen),
                    *start = attention_operand(a, at->start), *end = attention_operand(a, at->end);
    p->type = attention_type(q->dtype);
    int r = q->rank;
    f->batch = 1;
    for (int i = 0; i < r - 3; i++) {
        f->batch *= q->dim[i];
        OM_CHECK(cx, k->dim[i] == q->dim[i] && v->dim[i] == q->dim[i],
                 "attention: batch axis %d has %lld, %lld, %lld entries in q, k, v; expand them first", i,
                 (long long)q->dim[i], (long long)k->dim[i], (long long)v->dim[i]);
    }
    f->hq = q->dim[r - 3], f->hk = k->dim[r - 3], f->tq = q->dim[r - 2], f->tk = k->dim[r - 2], f->d = q->dim[r - 1],
    f->dv_size = v->dim[r - 1];
    OM_CHECK(cx, k->dim[r - 1] == f->d && v->dim[r - 2] == f->tk && v->dim[r - 3] == f->hk,
             "attention: q, k and v do not fit together: k is (%lld, %lld, %lld), v is (%lld, %lld, %lld), q has %lld "
             "numbers a head",
             (long long)f->hk, (long long)f->tk, (long long)k->dim[r - 1], (long long)v->dim[r - 3],
             (long long)v->dim[r - 2], (long long)f->dv_size, (long long)f->d);
    OM_CHECK(cx, f->hk > 0 ? f->hq % f->hk == 0 : f->hq == 0,
             "attention: %lld query heads over %lld key/value heads; the first must be a multiple of the second",
             (long long)f->hq, (long long)f->hk);
    if (mask) OM_TRY(attention_broadcast(cx, mask, q, f->tq, f->tk, p->mask));
    if (frozen) OM_TRY(attention_broadcast(cx, frozen, q, f->tq, f->tk, p->frozen));
    if (start) {
        OM_CHECK(cx, start->dim[0] == f->batch, "attention: kv_start has %lld entries for a batch of %lld",
                 (long long)start->dim[0], (long long)f->batch);
        f->start_stride = start->stride[0];
    }
    if (end) {
        OM_CHECK(cx, end->dim[0] == f->batch, "attention: kv_end has %lld entries for a batch of %lld",
                 (long long)end->dim[0], (long long)f->batch);
        f->end_stride = end->stride[0];
    }
    f->scale = om_args_float(a, "scale", 1 / sqrt((double)(f->d > 0 ? f->d : 1)));
    f->dropout = om_args_float(a, "dropout", 0);
    OM_CHECK(cx, f->dropout >= 0 && f->dropout <= 1, "attention: dropout %g; a probability is needed", f->dropout);
    f->causal = om_args_int(a, "causal", 0) != 0;
    f->nan_rows = f->tk > 0 ? (int)om_args_int(a, "nan_rows", 0) : 0;
    f->offset = attention_number(a, "causal_offset");
    f->window = attention_number(a, "window");
    f->stream = a->node ? a->node->rng : 0;
    return OM_OK;
}

static void attention_workers(om_ctx *cx, attention_prep *p, int64_t tasks) {
    const om_attn_form *f = &p->f;
    double flops = 4.0 * (double)(f->batch * f->hq) * (double)f->tq * (double)f->tk * (double)(f->d + f->dv_size);
    int threads = flops < 1e6 ? 1 : om_num_threads(cx);
    p->tasks = tasks;
    p->workers = tasks < threads ? (int)(tasks > 0 ? tasks : 1) : threads;
}

static om_status attention_forward_form(om_ctx *cx, const om_args *a, attention_prep *p) {
    OM_TRY(attention_form(cx, a, &forward_places, p));
    if (!om_is_dense(&a->out[1])) return om_fail(cx, OM_INTERNAL, "attention: the plan gave lse strides");
    om_attn_form *f = &p->f;
    int64_t heads = f->batch * f->hq, rows = p->type->rows, blocks = (f->tq + rows - 1) / rows,
            want = 4 * (int64_t)om_num_threads(cx);
    f->chunks = heads == 0 || heads >= want ? 1 : (want + heads - 1) / heads;
    if (f->chunks > blocks) f->chunks = blocks > 0 ? blocks : 1;
    f->chunk_rows = (blocks + f->chunks - 1) / f->chunks * rows;
    p->work = p->type->forward_work(f);
    attention_workers(cx, p, heads * f->chunks);
    return OM_OK;
}

static om_status attention_backward_form(om_ctx *cx, const om_args *a, attention_prep *p) {
    OM_TRY(attention_form(cx, a, &backward_places, p));
    om_attn_form *f = &p->f;
    const om_tensor *q = &a->in[backward_places.q], *mask = attention_operand(a, backward_places.mask);
    f->task_batch = f->task_heads = 1;
    if (mask && om_is_float(mask->dtype) && om_args_int(a, "want_dmask", 0)) {
        om_tensor sum = a->out[3]; /* summed in the compute type: in place when that is its own */
        const int r = q->rank;
        p->dmask_dtype = (uint8_t)om_compute_dtype(q->dtype);
        if (sum.dtype != p->dmask_dtype || !om_is_dense(&sum)) {
            om_dense_strides(&sum);
            p->sum_bytes = (om_numel(&sum) * (int64_t)om_dtype_size(p->dmask_dtype) + 63) & ~(int64_t)63;
        }
        OM_TRY(attention_broadcast(cx, &sum, q, f->tq, f->tk, p->dmask));
        for (int i = 0; i < r - 3; i++)
            if (p->dmask[i] == 0 && q->dim[i] > 1) f->task_batch = f->batch;
        if (p->dmask[r - 3] == 0) f->task_heads = f->hk > 0 ? f->hk : 1;
    }
    p->work = p->type->backward_work(f);
    attention_workers(cx, p, f->batch && f->hk ? f->batch / f->task_batch * (f->hk / f->task_heads) : 0);
    return OM_OK;
}

/* The mask's gradient in the compute type, at the beginning of scratch. */
static om_tensor attention_sum(const om_args *a, const attention_prep *p) {
    om_tensor wide = a->out[3];
    wide.dtype = p->dmask_dtype;
    om_dense_strides(&wide);
    wide.data = a->scratch;
    return wide;
}

int64_t om_cpu_scratch_attention(om_ctx *cx, const om_args *a) {
    attention_prep p;
    return attention_forward_form(cx, a, &p) == OM_OK ? p.workers * p.work : 0;
}

int64_t om_cpu_scratch_attention_grad(om_ctx *cx, const om_args *a) {
    attention_prep p;
    return attention_backward_form(cx, a, &p) == OM_OK ? p.sum_bytes + p.workers * p.work : 0;
}

om_status om_cpu_prepare_attention(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    attention_prep *p = om_arena_alloc(mem, sizeof *p);
    *prep = p;
    return p ? attention_forward_form(cx, a, p) : cx->status;
}

om_status om_cpu_prepare_attention_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    attention_prep *p = om_arena_alloc(mem, sizeof *p);
    *prep = p;
    if (!p || attention_backward_form(cx, a, p) != OM_OK) return cx->status;
    if (!p->sum_bytes) return OM_OK;
    const om_tensor wide = attention_sum(a, p);
    return om_copy_prepared(cx, mem, &wide, &a->out[3], &p->sum);
}

/* --- every step --------------------------------------------------------------------------------------------- */

typedef struct attention_run {
    const om_attn_job *job;
    void (*task)(const om_attn_job *, int64_t, void *);
    char *memory;
    int64_t work, tasks;
    atomic_int worker;
    atomic_llong next;
} attention_run;

/* the piece's bounds carry no meaning: tasks are claimed */
static void attention_worker(void *arg, int64_t begin, int64_t end) {
    (void)begin, (void)end;
    attention_run *r = arg;
    char *memory = r->memory + atomic_fetch_add(&r->worker, 1) * r->work;
    for (long long i; (i = atomic_fetch_add(&r->next, 1)) < r->tasks;) r->task(r->job, i, memory);
}

static void attention_work(om_ctx *cx, const attention_prep *p, const om_attn_job *j,
                           void (*task)(const om_attn_job *, int64_t, void *), char *memory) {
    attention_run r = {.job = j, .task = task, .memory = memory, .work = p->work, .tasks = p->tasks};
    om_parallel_for(cx, p->workers, 1, attention_worker, &r);
}

static om_tensor attention_turned(om_tensor t, bool turn) { /* seen with heads before time */
    if (!turn) return t;
    int64_t dim = t.dim[t.rank - 3], stride = t.stride[t.rank - 3];
    t.dim[t.rank - 3] = t.dim[t.rank - 2], t.stride[t.rank - 3] = t.stride[t.rank - 2];
    t.dim[t.rank - 2] = dim, t.stride[t.rank - 2] = stride;
    return t;
}

static om_tensor attention_broadcast_of(void *data, int dtype, int rank, const int64_t *stride) {
    om_tensor t = {.data = data, .dtype = (uint8_t)dtype, .rank = (uint8_t)rank, .device = -1};
    memcpy(t.stride, stride, sizeof t.stride);
    return t;
}

static om_attn_job attention_job(const om_args *a, const attention_prep *p, const attention_places *at) {
    const om_tensor *q = &a->in[at->q], *mask = attention_operand(a, at->mask),
                    *frozen = attention_operand(a, at->frozen), *start = attention_operand(a, at->start),
                    *end = attention_operand(a, at->end);
    om_attn_job j = {.f = &p->f, .q = q[0], .k = q[1], .v = q[2], .seed = a->scalars->seed};
    if (mask) j.mask = attention_broadcast_of(mask->data, mask->dtype, q->rank, p->mask);
    if (frozen) j.frozen = attention_broadcast_of(frozen->data, frozen->dtype, q->rank, p->frozen);
    if (start) j.kv_start = start->data;
    if (end) j.kv_end = end->data;
    return j;
}

om_status om_cpu_run_attention(om_ctx *cx, const om_args *a) {
    const attention_prep *p = a->prep;
    om_attn_job j = attention_job(a, p, &forward_places);
    j.y = attention_turned(a->out[0], p->turn), j.lse = a->out[1];
    attention_work(cx, p, &j, p->type->forward, a->scratch);
    return OM_OK;
}

om_status om_cpu_run_attention_grad(om_ctx *cx, const om_args *a) {
    const attention_prep *p = a->prep;
    om_attn_job j = attention_job(a, p, &backward_places);
    j.dy = attention_turned(a->in[0], p->turn), j.y = attention_turned(a->in[5], p->turn), j.lse = a->in[6];
    j.dq = attention_turned(a->out[0], p->turn), j.dk = attention_turned(a->out[1], p->turn),
    j.dv = attention_turned(a->out[2], p->turn);
    om_tensor wide = {0};
    if (p->dmask_dtype) {
        wide = p->sum_bytes ? attention_sum(a, p) : a->out[3];
        j.dmask = attention_broadcast_of(wide.data, p->dmask_dtype, j.q.rank, p->dmask);
        if (om_numel(&wide)) memset(wide.data, 0, (size_t)om_numel(&wide) * om_dtype_size(wide.dtype));
    }
    attention_work(cx, p, &j, p->type->backward, (char *)a->scratch + p->sum_bytes);
    if (p->sum_bytes) om_copy_run(cx, &p->sum, wide.data, a->out[3].data);
    return OM_OK;
}
