/* recurrent.c - ops/recurrent.c on the CPU.
 *
 * A step is one matrix product of all samples by weights that are packed once, then the activations row by row
 * (kernels/recurrent.k.c), shared among threads. f32 and f64 work in the operands' own memory. bf16 and f16 are
 * multiplied as they are, states and gradients rounded to them as a step's results are; sums, activations and what a
 * step hands on beside the product are f32. Every element is computed by one thread, products have one order of sums:
 * the same bits for any number of threads. Operands are dense.
 */
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/recurrent.h"
#include "cpu/strip.h"

typedef struct recurrent_plan {
    int64_t steps, n, size, gates, kind, elem; /* elem: bytes of the compute type */
    int dtype, wide_dtype;
    bool reverse, widen, bias;
    om_gemm_args g;
    om_gemm_how how;
    om_recurrent_fn row;
    /* scratch */
    int64_t b_at, h_at[2], c_at, gate_at, hidden_at, back_at, packed_at, gemm_at, total;
    bool packed;               /* the weights, for all steps */
} recurrent_plan;

static int64_t recurrent_take(recurrent_plan *p, int64_t elements) {
    return om_scratch_take(&p->total, om_size_mul(elements, p->elem));
}

static om_status recurrent_layout(om_ctx *cx, const om_args *a, bool grad, recurrent_plan *p) {
    const om_tensor *x = grad ? &a->out[0] : &a->in[0], *w = &a->in[1 + grad], *h0 = &a->in[3];
    *p = (recurrent_plan){.steps = x->dim[0], .n = x->dim[1], .size = w->dim[1], .dtype = x->dtype,
                          .wide_dtype = om_compute_dtype(x->dtype), .kind = om_args_int(a, "kind", 0),
                          .reverse = om_args_int(a, "reverse", 0), .bias = !grad && a->in[2].dtype};
    p->gates = om_rnn_gates(p->kind);
    p->elem = (int64_t)om_dtype_size(p->wide_dtype);
    p->widen = p->dtype != p->wide_dtype;
    const int wide = p->wide_dtype == OM_F64;
    p->row = grad ? OM_PICK(om_recurrent)->back[p->kind][wide] : OM_PICK(om_recurrent)->step[p->kind][wide];
    const int64_t state = p->n * p->size, all = p->gates * p->size;
    OM_CHECK(cx, h0->dim[0] == p->n && h0->dim[1] == p->size && w->dim[0] == all && x->dim[2] == all,
             "%s: %lld samples of %lld do not fit h0 (%lld, %lld)", a->node->op->name, (long long)p->n,
             (long long)p->size, (long long)h0->dim[0], (long long)h0->dim[1]);
    om_gemm_args *g = &p->g;
    *g = (om_gemm_args){.dtype = p->dtype, .wide_c = true, .m = p->n, .alpha = 1, .batch = 1};
    if (grad) { /* dh (n, size) = dgh (n, all) w (all, size); a GRU's dh has a part of its own */
        g->n = p->size, g->k = all;
        g->rsa = all, g->csa = 1, g->rsb = p->size, g->csb = 1, g->rsc = p->size, g->csc = 1;
        g->beta = p->kind == OM_GRU;
    } else { /* h's share of the gates (n, all) = h (n, size) w^T (size, all) */
        g->n = all, g->k = p->size;
        g->rsa = p->size, g->csa = 1, g->rsb = 1, g->csb = p->size, g->rsc = all, g->csc = 1;
    }
    static const char there;
    if (p->bias) g->bias = &there; /* whether there is one; its address comes with the run */
    OM_TRY(om_gemm_prepare(cx, g, &p->how));
    if (p->widen) p->b_at = recurrent_take(p, p->bias ? all : 0);
    if (grad || p->widen)
        for (int i = 0; i < 2; i++) p->h_at[i] = recurrent_take(p, state);
    if (grad || p->widen) p->c_at = recurrent_take(p, p->kind == OM_LSTM ? state : 0);
    if (p->kind < OM_LSTM || grad) p->gate_at = recurrent_take(p, p->n * all);
    if (p->kind == OM_GRU) p->hidden_at = recurrent_take(p, p->n * all);
    if (grad) p->back_at = recurrent_take(p, p->kind == OM_LSTM ? state : 0);
    const int64_t packed = om_gemm_packed_size(&p->how);
    p->packed = packed > 0 && p->steps > 1;
    p->packed_at = p->total;
    p->gemm_at = p->packed_at + (p->packed ? (packed + 63) & ~(int64_t)63 : 0);
    p->total = p->gemm_at + p->how.scratch;
    return OM_OK;
}

static om_status recurrent_prepare(om_ctx *cx, om_arena *mem, const om_args *a, bool grad, const void **prep) {
    recurrent_plan *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    return recurrent_layout(cx, a, grad, p);
}

int64_t om_cpu_scratch_recurrent(om_ctx *cx, const om_args *a) {
    recurrent_plan p;
    return recurrent_layout(cx, a, false, &p) == OM_OK ? p.total : 0;
}
int64_t om_cpu_scratch_recurrent_grad(om_ctx *cx, const om_args *a) {
    recurrent_plan p;
    return recurrent_layout(cx, a, true, &p) == OM_OK ? p.total : 0;
}
om_status om_cpu_prepare_recurrent(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return recurrent_prepare(cx, mem, a, false, prep);
}
om_status om_cpu_prepare_recurrent_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return recurrent_prepare(cx, mem, a, true, prep);
}

/* n elements of the operands' type, from byte address, in the compute type: there, or widened to `to` */
static char *recurrent_wide(const recurrent_plan *p, const void *from, int64_t n, char *to) {
    if (!p->widen) return (char *)(uintptr_t)from;
    OM_PICK(om_strip)->load[p->dtype](from, 1, n, to);
    return to;
}
static void recurrent_copy_in(const recurrent_plan *p, const void *from, int64_t n, char *to) {
    if (p->widen) OM_PICK(om_strip)->load[p->dtype](from, 1, n, to);
    else if (n) memcpy(to, from, (size_t)(n * p->elem));
}
static void recurrent_copy_out(const recurrent_plan *p, const char *from, int64_t n, void *to) {
    if (p->widen) OM_PICK(om_strip)->store[p->dtype](from, n, to, 1);
    else if (n && from != to) memcpy(to, from, (size_t)(n * p->elem));
}

/* Adds n elements of the operands' type to as many of the compute type. */
static void recurrent_add(const recurrent_plan *p, const char *from, int64_t n, char *to) {
    enum { CHUNK = 512 };
    _Alignas(64) char room[CHUNK * sizeof(double)];
    const int64_t bytes = (int64_t)om_dtype_size(p->dtype);
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t m = n - i < CHUNK ? n - i : CHUNK;
        OM_PICK(om_recurrent)->add[p->wide_dtype == OM_F64](recurrent_wide(p, from + i * bytes, m, room),
                                                            to + i * p->elem, m);
    }
}

typedef struct recurrent_job { /* of one step; per sample: bytes from one to the next, of the compute type */
    const recurrent_plan *p;
    om_recurrent_row at;
    int64_t gate_step, all_step, size_step;
    bool back;
    /* of the operands' type. in: gx, or dy. Where those are widened: before, whose row goes to `wide`; the results y,
     * or dgx and dgh */
    const char *in, *before;
    char *wide, *out[2];
} recurrent_job;

#define MOVE(field, by) row.field = row.field ? (char *)(uintptr_t)row.field + i * (by) : NULL
static void recurrent_rows(void *arg, int64_t begin, int64_t end) {
    const recurrent_job *j = arg;
    const recurrent_plan *p = j->p;
    const int64_t all = p->gates * p->size, bytes = (int64_t)om_dtype_size(p->dtype);
    for (int64_t i = begin; i < end; i++) {
        om_recurrent_row row = j->at;
        MOVE(gate, j->gate_step);
        MOVE(hidden, j->all_step), MOVE(dgx, j->all_step), MOVE(dgh, j->all_step);
        MOVE(c_before, j->size_step), MOVE(h_before, j->size_step), MOVE(c, j->size_step), MOVE(h, j->size_step);
        MOVE(dh, j->size_step), MOVE(dc, j->size_step);
        if (j->back) recurrent_add(p, j->in + i * p->size * bytes, p->size, row.dh);
        else if (p->kind == OM_GRU) recurrent_copy_in(p, j->in + i * all * bytes, all, row.gate); /* 3 of 4 gates */
        else recurrent_add(p, j->in + i * all * bytes, all, row.gate);
        if (j->before)
            recurrent_copy_in(p, j->before + i * p->size * bytes, p->size, j->wide + i * j->size_step);
        p->row(&row, p->size);
        if (!p->widen) continue;
        if (!j->back) recurrent_copy_out(p, row.h, p->size, j->out[0] + i * p->size * bytes);
        else recurrent_copy_out(p, row.dgx, all, j->out[0] + i * all * bytes);
        if (j->out[1]) recurrent_copy_out(p, row.dgh, all, j->out[1] + i * all * bytes);
    }
}

static void recurrent_go(om_ctx *cx, const recurrent_plan *p, recurrent_job *j) {
    const int64_t all = p->gates * p->size * p->elem, size = p->size * p->elem;
    j->p = p, j->gate_step = p->kind >= OM_LSTM ? 4 * size : all, j->all_step = all, j->size_step = size;
    om_parallel_for(cx, p->n, 1 + 4096 / (p->gates * p->size + 1), recurrent_rows, j);
}

static void recurrent_pack(om_ctx *cx, const recurrent_plan *p, char *scratch, om_gemm_args *g) {
    if (!p->packed) return;
    om_gemm_pack(cx, g, &p->how, scratch + p->packed_at);
    g->packed = scratch + p->packed_at;
}

om_status om_cpu_run_recurrent(om_ctx *cx, const om_args *a) {
    const recurrent_plan *p = a->prep;
    const int64_t state = p->n * p->size, all = p->gates * p->size, bytes = (int64_t)om_dtype_size(p->dtype);
    const bool lstm = p->kind == OM_LSTM, gru = p->kind == OM_GRU;
    char *scratch = a->scratch, *y = a->out[0].data, *kept = a->out[2].data, *cells = a->out[3].data;
    const char *gx = a->in[0].data;
    om_gemm_args g = p->g;
    g.a = a->in[3].data, g.b = a->in[1].data;
    g.scratch = scratch + p->gemm_at;
    recurrent_pack(cx, p, scratch, &g);
    if (p->bias) g.bias = recurrent_wide(p, a->in[2].data, all, scratch + p->b_at);
    const char *h = gru ? recurrent_wide(p, g.a, state, scratch + p->h_at[0]) : NULL,
               *c = lstm ? recurrent_wide(p, a->in[4].data, state, scratch + p->c_at) : NULL;
    for (int64_t s = 0; s < p->steps; s++) {
        const int64_t t = p->reverse ? p->steps - 1 - s : s;
        char *gate = p->kind >= OM_LSTM ? kept + t * 4 * state * p->elem : scratch + p->gate_at,
             *result = y + t * state * bytes, *to = p->widen ? scratch + p->h_at[(s + 1) & 1] : result,
             *cell = lstm ? cells + t * state * p->elem : NULL;
        g.c = gru ? scratch + p->hidden_at : gate;
        OM_TRY(om_gemm_run(cx, &g, &p->how));
        recurrent_go(cx, p, &(recurrent_job){.at = {.gate = gate, .hidden = gru ? g.c : NULL, .c_before = c,
                                                    .h_before = h, .c = cell, .h = to},
                                             .in = gx + t * p->n * all * bytes, .out = {result}});
        g.a = result, h = to, c = cell;
    }
    if (lstm) recurrent_copy_out(p, c, state, a->out[1].data);
    return OM_OK;
}

om_status om_cpu_run_recurrent_grad(om_ctx *cx, const om_args *a) {
    const recurrent_plan *p = a->prep;
    const int64_t state = p->n * p->size, all = p->gates * p->size, bytes = (int64_t)om_dtype_size(p->dtype);
    const bool lstm = p->kind == OM_LSTM, gru = p->kind == OM_GRU;
    char *scratch = a->scratch, *dh = scratch + p->h_at[0], *room = scratch + p->h_at[1],
         *dc = lstm ? scratch + p->back_at : NULL;
    const char *dy = a->in[0].data, *y = a->in[5].data, *kept = a->in[6].data, *cells = a->in[7].data;
    om_gemm_args g = p->g;
    g.b = a->in[2].data;
    g.c = dh, g.scratch = scratch + p->gemm_at;
    recurrent_pack(cx, p, scratch, &g);
    if (state) memset(dh, 0, (size_t)(state * p->elem));
    if (lstm && a->in[1].dtype) recurrent_copy_in(p, a->in[1].data, state, dc);
    else if (lstm && state) memset(dc, 0, (size_t)(state * p->elem));
    for (int64_t s = 0; s < p->steps; s++) {
        const int64_t t = p->reverse ? s : p->steps - 1 - s, before = p->reverse ? t + 1 : t - 1;
        const bool first = s == p->steps - 1;
        char *dgx = (char *)a->out[0].data + t * p->n * all * bytes,
             *dgh = gru ? (char *)a->out[1].data + t * p->n * all * bytes : NULL;
        recurrent_job j = {.back = true, .in = dy + t * state * bytes, .out = {dgx, dgh}, .at = {.dh = dh, .dc = dc}};
        j.at.dgx = p->widen ? scratch + p->gate_at : dgx;
        j.at.dgh = p->widen && gru ? scratch + p->hidden_at : dgh;
        if (p->kind >= OM_LSTM) j.at.gate = (char *)(uintptr_t)kept + t * 4 * state * p->elem;
        const char *seen = p->kind < OM_LSTM ? y + t * state * bytes
                           : gru && first    ? a->in[3].data
                           : gru             ? y + before * state * bytes
                                             : NULL;
        if (seen && p->widen) j.before = seen, j.wide = room, seen = room;
        if (p->kind < OM_LSTM) j.at.h = (char *)(uintptr_t)seen;
        else j.at.h_before = seen;
        if (lstm) {
            j.at.c = (char *)(uintptr_t)cells + t * state * p->elem;
            j.at.c_before = first ? recurrent_wide(p, a->in[4].data, state, scratch + p->c_at)
                                  : cells + before * state * p->elem;
        }
        recurrent_go(cx, p, &j);
        g.a = gru ? dgh : dgx;
        OM_TRY(om_gemm_run(cx, &g, &p->how));
    }
    recurrent_copy_out(p, dh, state, a->out[2].data);
    if (lstm) recurrent_copy_out(p, dc, state, a->out[3].data);
    return OM_OK;
}
