/* attention.c - y = softmax(q k^T * scale + mask) v with dropout on the probabilities, and its gradient.
 *
 * q (..., hq, tq, d), k (..., hk, tk, d), v (..., hk, tk, dv); rank >= 3; hq a multiple of hk (query head h uses
 * key/value head h / (hq / hk)). Operands after v: mask, kv_start, kv_end, frozen; any of them may be left out.
 *   mask            bool (true = visible) or float (added to the scaled scores), broadcast to (..., hq, tq, tk)
 *   kv_start/end    i64, one entry per batch entry: key j is visible when kv_start <= j < kv_end
 *   frozen          bool, broadcast as mask: where it is true a score takes no gradient (it was replaced: masked_fill,
 *                   where); the mask's own gradient is not touched by it, and forward does not read it
 * Attributes
 *   scale           multiplies q k^T; absent: 1 / sqrt(d)
 *   causal          1: key j is visible to query i when j <= i + causal_offset (absent: 0, torch's top-left rule)
 *   window          w > 0: key j is visible only when j > i - w
 *   seq_first       1: y is (..., tq, hq, dv), as the layer after it reads it; its gradient then takes dy and y and
 *                   gives dq, dk, dv so too
 *   dropout         probability; words of the node's random stream at the row-major index of (batch, hq, tq, tk)
 *   nan_rows        0: a query that sees no key gives y = 0 and no gradient; 1: it gives NaN, as the softmax of nothing
 *                   but -inf does, and its scores take NaN; 2: NaN too, but what hid its keys replaced the scores,
 *                   which take no gradient
 * All conditions hold together. A query that sees no key has lse = -inf; a finite additive mask is plain arithmetic
 * (all keys at the lowest float: their mean).
 *
 * The kernels (kernels/attention.k.c) work on one head, or one chunk of its queries, at a time; workers claim these
 * tasks. dmask is computed when asked for (want_dmask): everything that adds into one of its elements then belongs to
 * one task.
 */
#include "cpu/attention.h"

#include "ops/attr.h"

#include <math.h>
#include <stdatomic.h>

/* --- types ------------------------------------------------------------------------------------------ */

/* Shared by both operators: operand positions are those of q in `in`. */
static om_status attention_check(om_graph *g, const char *name, const om_id *q_k_v, om_id mask, om_id start, om_id end,
                                 om_id frozen) {
    const om_type *q = om_ty(g, q_k_v[0]), *k = om_ty(g, q_k_v[1]), *v = om_ty(g, q_k_v[2]);
    om_ctx *cx = g->cx;
    OM_CHECK(cx, om_is_float(q->dtype), "%s of %s: only f32, f64, bf16 and f16", name, om_dtype_name(q->dtype));
    OM_CHECK(cx, q->dtype == k->dtype && q->dtype == v->dtype, "%s: q is %s, k is %s, v is %s; one dtype is needed",
             name, om_dtype_name(q->dtype), om_dtype_name(k->dtype), om_dtype_name(v->dtype));
    OM_CHECK(cx, q->rank >= 3 && k->rank == q->rank && v->rank == q->rank,
             "%s: q, k, v have ranks %d, %d, %d; equal ranks of at least 3 are needed: (..., heads, time, size)", name,
             q->rank, k->rank, v->rank);
    int r = q->rank;
    for (int i = 0; i < r - 3; i++)
        OM_CHECK(cx, !attr_differs(g, q->dim[i], k->dim[i]) && !attr_differs(g, q->dim[i], v->dim[i]),
                 "%s: batch axis %d of q, k, v differs; expand them first", name, i);
    OM_CHECK(cx, !attr_differs(g, k->dim[r - 3], v->dim[r - 3]) && !attr_differs(g, k->dim[r - 2], v->dim[r - 2]),
             "%s: k and v must have the same heads and length", name);
    OM_CHECK(cx, !attr_differs(g, q->dim[r - 1], k->dim[r - 1]),
             "%s: q has heads of %lld numbers, k of %lld; they must be equal", name, (long long)q->dim[r - 1],
             (long long)k->dim[r - 1]);
    int64_t hq, hk;
    if (om_dim_const(g, q->dim[r - 3], &hq) && om_dim_const(g, k->dim[r - 3], &hk))
        OM_CHECK(cx, hk > 0 ? hq % hk == 0 : hq == 0,
                 "%s: %lld query heads over %lld key/value heads; the first must be a multiple of the second", name,
                 (long long)hq, (long long)hk);
    if (frozen != OM_NONE)
        OM_CHECK(cx, om_ty(g, frozen)->dtype == OM_BOOL, "%s: frozen is %s; bool is needed", name,
                 om_dtype_name(om_ty(g, frozen)->dtype));
    for (int which = 0; which < 2; which++) {
        om_id given = which ? frozen : mask;
        if (given == OM_NONE) continue;
        const om_type *m = om_ty(g, given);
        OM_CHECK(cx, m->dtype == OM_BOOL || om_is_float(m->dtype), "%s: mask is %s; bool or a float type is allowed",
                 name, om_dtype_name(m->dtype));
        OM_CHECK(cx, m->rank <= r, "%s: mask has rank %d, q has %d", name, m->rank, r);
        for (int i = 0; i < m->rank; i++) {
            int at = r - m->rank + i;
            om_dim want = at == r - 1 ? k->dim[r - 2] : q->dim[at];
            OM_CHECK(cx, m->dim[i] == 1 || !attr_differs(g, m->dim[i], want),
                     "%s: axis %d of the mask has %lld entries; 1 or %lld is allowed", name, i, (long long)m->dim[i],
                     (long long)want);
        }
    }
    for (int i = 0; i < 2; i++) {
        om_id s = i ? end : start;
        if (s != OM_NONE)
            OM_CHECK(cx, om_ty(g, s)->dtype == OM_I64 && om_ty(g, s)->rank == 1,
                     "%s: %s must be i64 of rank 1, one entry per batch entry", name, i ? "kv_end" : "kv_start");
    }
    return OM_OK;
}

/* Axes of heads and time of what seq_first turns. */
static void attention_turn_type(om_type *t) {
    om_dim heads = t->dim[t->rank - 3];
    t->dim[t->rank - 3] = t->dim[t->rank - 2];
    t->dim[t->rank - 2] = heads;
}

static om_tensor attention_turned(om_tensor t, bool turn) { /* seen with heads before time */
    if (!turn) return t;
    int64_t dim = t.dim[t.rank - 3], stride = t.stride[t.rank - 3];
    t.dim[t.rank - 3] = t.dim[t.rank - 2], t.stride[t.rank - 3] = t.stride[t.rank - 2];
    t.dim[t.rank - 2] = dim, t.stride[t.rank - 2] = stride;
    return t;
}

static om_status attention_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    OM_TRY(attention_check(g, "attention", in, n->n_in > 3 ? in[3] : OM_NONE, n->n_in > 4 ? in[4] : OM_NONE,
                           n->n_in > 5 ? in[5] : OM_NONE, n->n_in > 6 ? in[6] : OM_NONE));
    out[0] = *om_ty(g, in[0]);
    out[0].dim[out[0].rank - 1] = om_ty(g, in[2])->dim[out[0].rank - 1];
    out[1] = *om_ty(g, in[0]);
    out[1].rank--;
    out[1].dtype = (uint8_t)om_compute_dtype(out[0].dtype);
    if (om_node_int(n, "seq_first", 0)) attention_turn_type(&out[0]);
    return OM_OK;
}

static om_status attention_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    OM_TRY(attention_check(g, "attention_grad", in + 1, in[4], n->n_in > 7 ? in[7] : OM_NONE,
                           n->n_in > 8 ? in[8] : OM_NONE, n->n_in > 9 ? in[9] : OM_NONE));
    OM_CHECK(g->cx,
             om_ty(g, in[0])->dtype == om_ty(g, in[1])->dtype && om_ty(g, in[5])->dtype == om_ty(g, in[1])->dtype,
             "attention_grad: dy and y must have q's dtype");
    OM_CHECK(g->cx, om_ty(g, in[6])->dtype == om_compute_dtype(om_ty(g, in[1])->dtype),
             "attention_grad: lse must be in the compute dtype");
    for (int i = 0; i < 3; i++) {
        out[i] = *om_ty(g, in[i + 1]);
        if (om_node_int(n, "seq_first", 0)) attention_turn_type(&out[i]);
    }
    bool dmask = in[4] != OM_NONE && om_is_float(om_ty(g, in[4])->dtype) && om_node_int(n, "want_dmask", 0);
    if (dmask) out[3] = *om_ty(g, in[4]);
    else out[3] = (om_type){.dtype = out[0].dtype, .rank = 1, .device = out[0].device};
    return OM_OK;
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
    j->seed = a->seed, j->stream = a->node ? a->node->rng : 0;
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

static int64_t attention_scratch(om_ctx *cx, const om_args *a) {
    om_attn_job j;
    if (attention_forward_job(cx, a, &j) != OM_OK) return 0;
    return attention_workers(cx, &j, attention_forward_tasks(cx, &j)) * attention_type(&j)->forward_work(&j);
}

static om_status attention_run_op(om_ctx *cx, const om_args *a) {
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

static int64_t attention_grad_scratch(om_ctx *cx, const om_args *a) {
    om_attn_job j;
    int64_t sum;
    if (attention_backward_job(cx, a, &j, &sum) != OM_OK) return 0;
    return sum + attention_workers(cx, &j, attention_backward_tasks(&j)) * attention_type(&j)->backward_work(&j);
}

static om_status attention_grad_run(om_ctx *cx, const om_args *a) {
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

static om_status attention_grad_rule(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_id in[7] = {OM_NONE, OM_NONE, OM_NONE, OM_NONE, OM_NONE, OM_NONE, OM_NONE};
    for (int i = 0; i < n->n_in; i++) in[i] = om_ins(g, n)[i];
    if (dy[1] != OM_NONE)
        return om_fail(g->cx, OM_UNSUPPORTED, "attention: a gradient arrives for lse, which only backward may read");
    if (dy[0] == OM_NONE) return OM_OK;
    bool dmask = n->n_in > 3 && want[3];
    om_attr attr[16];
    int n_attr = 0;
    OM_CHECK(g->cx, n->n_attr < 16, "attention: %d attributes; at most 15 are known", n->n_attr);
    for (int i = 0; i < n->n_attr; i++) attr[n_attr++] = n->attr[i];
    if (dmask) attr[n_attr++] = OM_AI("want_dmask", 1);
    om_id ops[10] = {dy[0], in[0], in[1], in[2], in[3], n->out, n->out + 1, in[4], in[5], in[6]};
    int n_ops = in[6] != OM_NONE ? 10 : in[5] != OM_NONE ? 9 : in[4] != OM_NONE ? 8 : 7;
    om_id d = om_make(g, &om_op_attention_grad, ops, n_ops, attr, n_attr);
    if (d == OM_NONE) return g->cx->status;
    om_last(g)->rng = n->rng; /* the same words as forward */
    for (int i = 0; i < 3; i++)
        if (want[i]) dx[i] = om_node_int(n, "seq_first", 0) ? om_b_transpose(g, d + (om_id)i, -3, -2) : d + (om_id)i;
    if (dmask) dx[3] = d + 3;
    return OM_OK;
}

const om_op om_op_attention = {
    .name = "attention",
    .doc = "y, lse = softmax(q k^T scale + mask) v; q (..., hq, tq, d), k v (..., hk, tk, .), mask?, kv_start?, "
           "kv_end?, frozen?",
    .kind = OM_K_ATTENTION,
    .min_in = 3,
    .max_in = 7,
    .n_out = 2,
    .random = true,
    .infer = attention_infer,
    .grad = attention_grad_rule,
    .scratch = attention_scratch,
    .run = attention_run_op,
};

const om_op om_op_attention_grad = {
    .name = "attention_grad",
    .doc = "dq, dk, dv, dmask from (dy, q, k, v, mask?, y, lse, kv_start?, kv_end?, frozen?); dmask has no element "
           "unless want_dmask",
    .kind = OM_K_ATTENTION,
    .min_in = 7,
    .max_in = 10,
    .n_out = 4,
    .optional = 1u << 4,
    .dense = 1u << 6,
    .random = true,
    .infer = attention_grad_infer,
    .scratch = attention_grad_scratch,
    .run = attention_grad_run,
};
