/* attention.c - ops/attention.c on the CPU.
 *
 * The kernels (kernels/attention.k.c) work on one head, or one chunk of its queries, at a time; workers claim these
 * tasks. dmask is computed when asked for (want_dmask): everything that adds into one of its elements then belongs to
 * one task.
 */
#include "cpu/cpu.h"
#include "cpu/attention.h"

#include "ops/attr.h"

#include <math.h>
#include <stdatomic.h>

/* --- types ------------------------------------------------------------------------------------------ */

static om_tensor attention_turned(om_tensor t, bool turn) { /* seen with heads before time */
    if (!turn) return t;
    int64_t dim = t.dim[t.rank - 3], stride = t.stride[t.rank - 3];
    t.dim[t.rank - 3] = t.dim[t.rank - 2], t.stride[t.rank - 3] = t.stride[t.rank - 2];
    t.dim[t.rank - 2] = dim, t.stride[t.rank - 2] = stride;
    return t;
}

/* --- from tensors to a job ---------------------------------------------------------------------------- */

/* t broadcast to (batch and heads of like, rows, cols) by stride 0. */
static om_status attention_broadcast(om_ctx *cx, const om_tensor *t, const om_tensor *like, int64_t rows, int64_t cols,
                                     om_tensor *out) {
    *out = *t;
    out->rank = like->rank;
    for (int i = 0; i < like->rank; i++) {
        int at = i - (like->rank - t->rank);
        int64_t want = i == like->rank - 2   ? rows
                       : i == like->rank - 1 ? cols
                                             : like->dim[i],
                have = at >= 0 ? t->dim[at] : 1;
        OM_CHECK(cx, have == want || have == 1, "attention: axis %d of the mask has %lld entries; 1 or %lld is allowed",
                 at, (long long)have, (long long)want);
        out->dim[i] = want;
        out->stride[i] = have == 1 ? 0 : t->stride[at];
    }
    return OM_OK;
}

static om_status attention_job(om_ctx *cx, const om_args *a, const om_tensor *qkv, const om_tensor *mask,
                               const om_tensor *start, const om_tensor *end, om_attn_job *j) {
    *j = (om_attn_job){.q = qkv[0], .k = qkv[1], .v = qkv[2]};
    int r = j->q.rank;
    j->batch = 1;
    for (int i = 0; i < r - 3; i++) {
        j->batch *= j->q.dim[i];
        OM_CHECK(cx, j->k.dim[i] == j->q.dim[i] && j->v.dim[i] == j->q.dim[i],
                 "attention: batch axis %d has %lld, %lld, %lld entries in q, k, v; expand them first", i,
                 (long long)j->q.dim[i], (long long)j->k.dim[i], (long long)j->v.dim[i]);
    }
    j->hq = j->q.dim[r - 3], j->hk = j->k.dim[r - 3], j->tq = j->q.dim[r - 2], j->tk = j->k.dim[r - 2],
    j->d = j->q.dim[r - 1], j->dv_size = j->v.dim[r - 1];
    OM_CHECK(cx, j->k.dim[r - 1] == j->d && j->v.dim[r - 2] == j->tk && j->v.dim[r - 3] == j->hk,
             "attention: q, k and v do not fit together: k is (%lld, %lld, %lld), v is (%lld, %lld, %lld), q has %lld "
             "numbers a head",
             (long long)j->hk, (long long)j->tk, (long long)j->k.dim[r - 1], (long long)j->v.dim[r - 3],
             (long long)j->v.dim[r - 2], (long long)j->dv_size, (long long)j->d);
    OM_CHECK(cx, j->hk > 0 ? j->hq % j->hk == 0 : j->hq == 0,
             "attention: %lld query heads over %lld key/value heads; the first must be a multiple of the second",
             (long long)j->hq, (long long)j->hk);
    if (mask) OM_TRY(attention_broadcast(cx, mask, &j->q, j->tq, j->tk, &j->mask));
    if (start) {
        OM_CHECK(cx, start->dim[0] == j->batch, "attention: kv_start has %lld entries for a batch of %lld",
                 (long long)start->dim[0], (long long)j->batch);
        j->kv_start = start->data, j->start_stride = start->stride[0];
    }
    if (end) {
        OM_CHECK(cx, end->dim[0] == j->batch, "attention: kv_end has %lld entries for a batch of %lld",
                 (long long)end->dim[0], (long long)j->batch);
        j->kv_end = end->data, j->end_stride = end->stride[0];
    }
    j->scale = om_args_float(a, "scale", 1 / sqrt((double)(j->d > 0 ? j->d : 1)));
    j->dropout = om_args_float(a, "dropout", 0);
    OM_CHECK(cx, j->dropout >= 0 && j->dropout <= 1, "attention: dropout %g; a probability is needed", j->dropout);
    j->causal = om_args_int(a, "causal", 0) != 0;
    j->nan_rows = j->tk > 0 ? (int)om_args_int(a, "nan_rows", 0) : 0;
    const om_attr *off = om_attr_get(a->attr, a->n_attr, "causal_offset"),
                  *win = om_attr_get(a->attr, a->n_attr, "window");
    j->offset = off ? off->kind == OM_ATTR_DIMS ? off->dims[0] : off->i : 0; /* a size expression or an integer */
    j->window = win ? win->kind == OM_ATTR_DIMS ? win->dims[0] : win->i : 0;
    j->seed = a->scalars ? a->scalars->seed : 0, j->stream = a->node ? a->node->rng : 0;
    return OM_OK;
}

/* --- running tasks ------------------------------------------------------------------------------------- */

static const om_attn_type *attention_type(const om_attn_job *j) {
    const om_attn_kernels *k = OM_PICK(om_attn_isa);
    return j->q.dtype == OM_F64 ? &k->f64 : &k->f32;
}

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

static int attention_workers(om_ctx *cx, const om_attn_job *j, int64_t tasks) {
    double flops = 4.0 * (double)(j->batch * j->hq) * (double)j->tq * (double)j->tk * (double)(j->d + j->dv_size);
    int threads = flops < 1e6 ? 1 : om_num_threads(cx);
    return tasks < threads ? (int)(tasks > 0 ? tasks : 1) : threads;
}

static int64_t attention_forward_tasks(om_ctx *cx, om_attn_job *j) {
    int64_t heads = j->batch * j->hq, rows = attention_type(j)->rows, blocks = (j->tq + rows - 1) / rows,
            want = 4 * (int64_t)om_num_threads(cx);
    j->chunks = heads == 0 || heads >= want ? 1 : (want + heads - 1) / heads;
    if (j->chunks > blocks) j->chunks = blocks > 0 ? blocks : 1;
    j->chunk_rows = (blocks + j->chunks - 1) / j->chunks * rows;
    return heads * j->chunks;
}

static const om_tensor *attention_operand(const om_args *a, int i) {
    return i < a->n_in && a->in[i].dtype != OM_NODTYPE ? &a->in[i] : NULL;
}

static om_status attention_forward_job(om_ctx *cx, const om_args *a, om_attn_job *j) {
    OM_TRY(attention_job(cx, a, a->in, attention_operand(a, 3), attention_operand(a, 4), attention_operand(a, 5), j));
    j->y = attention_turned(a->out[0], om_args_int(a, "seq_first", 0)), j->lse = a->out[1];
    return OM_OK;
}

int64_t om_cpu_scratch_attention(om_ctx *cx, const om_args *a) {
    om_attn_job j;
    if (attention_forward_job(cx, a, &j) != OM_OK) return 0;
    return attention_workers(cx, &j, attention_forward_tasks(cx, &j)) * attention_type(&j)->forward_work(&j);
}

om_status om_cpu_run_attention(om_ctx *cx, const om_args *a) {
    om_attn_job j;
    OM_TRY(attention_forward_job(cx, a, &j));
    if (!om_is_dense(&j.lse)) return om_fail(cx, OM_INTERNAL, "attention: the plan gave lse strides");
    attention_run r = {.job = &j,
                       .task = attention_type(&j)->forward,
                       .memory = a->scratch,
                       .work = attention_type(&j)->forward_work(&j),
                       .tasks = attention_forward_tasks(cx, &j)};
    om_parallel_for(cx, attention_workers(cx, &j, r.tasks), 1, attention_worker, &r);
    return OM_OK;
}

/* --- gradient ------------------------------------------------------------------------------------------- */

static om_status attention_backward_job(om_ctx *cx, const om_args *a, om_attn_job *j, int64_t *sum_bytes) {
    OM_TRY(
        attention_job(cx, a, a->in + 1, attention_operand(a, 4), attention_operand(a, 7), attention_operand(a, 8), j));
    bool turn = om_args_int(a, "seq_first", 0);
    j->dy = attention_turned(a->in[0], turn), j->y = attention_turned(a->in[5], turn), j->lse = a->in[6];
    j->dq = attention_turned(a->out[0], turn), j->dk = attention_turned(a->out[1], turn),
    j->dv = attention_turned(a->out[2], turn);
    j->task_batch = j->task_heads = 1;
    *sum_bytes = 0;
    const om_tensor *mask = attention_operand(a, 4), *frozen = attention_operand(a, 9);
    if (frozen) OM_TRY(attention_broadcast(cx, frozen, &j->q, j->tq, j->tk, &j->frozen));
    if (!mask || !om_is_float(mask->dtype) || !om_args_int(a, "want_dmask", 0)) return OM_OK;
    om_tensor sum = a->out[3]; /* summed in the compute type: in place when that is its own */
    int r = j->q.rank, type = om_compute_dtype(j->q.dtype);
    if (sum.dtype != type || !om_is_dense(&sum)) {
        sum.dtype = (uint8_t)type;
        om_dense_strides(&sum);
        sum.data = NULL;
        *sum_bytes = (om_numel(&sum) * (int64_t)om_dtype_size(type) + 63) & ~(int64_t)63;
    }
    OM_TRY(attention_broadcast(cx, &sum, &j->q, j->tq, j->tk, &j->dmask));
    for (int i = 0; i < r - 3; i++)
        if (j->dmask.stride[i] == 0 && j->q.dim[i] > 1) j->task_batch = j->batch;
    if (j->dmask.stride[r - 3] == 0) j->task_heads = j->hk > 0 ? j->hk : 1;
    return OM_OK;
}

static int64_t attention_backward_tasks(const om_attn_job *j) {
    return j->batch && j->hk ? j->batch / j->task_batch * (j->hk / j->task_heads) : 0;
}

int64_t om_cpu_scratch_attention_grad(om_ctx *cx, const om_args *a) {
    om_attn_job j;
    int64_t sum;
    if (attention_backward_job(cx, a, &j, &sum) != OM_OK) return 0;
    return sum + attention_workers(cx, &j, attention_backward_tasks(&j)) * attention_type(&j)->backward_work(&j);
}

om_status om_cpu_run_attention_grad(om_ctx *cx, const om_args *a) {
    om_attn_job j;
    int64_t sum;
    OM_TRY(attention_backward_job(cx, a, &j, &sum));
    om_tensor wide = {0};
    if (j.dmask.dtype) {
        wide = a->out[3];
        if (sum) {
            wide.dtype = j.dmask.dtype;
            om_dense_strides(&wide);
            wide.data = a->scratch;
        }
        j.dmask.data = wide.data;
        if (om_numel(&wide)) memset(wide.data, 0, (size_t)om_numel(&wide) * om_dtype_size(wide.dtype));
    }
    attention_run r = {.job = &j,
                       .task = attention_type(&j)->backward,
                       .memory = (char *)a->scratch + sum,
                       .work = attention_type(&j)->backward_work(&j),
                       .tasks = attention_backward_tasks(&j)};
    om_parallel_for(cx, attention_workers(cx, &j, r.tasks), 1, attention_worker, &r);
    return sum ? om_copy(cx, &wide, &a->out[3]) : OM_OK;
}
