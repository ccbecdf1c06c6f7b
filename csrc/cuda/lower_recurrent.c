/* lower_recurrent.c - RNN, LSTM and GRU on the GPU (recurrent.cu): a launch per step. What a GRU in 16-bit floats hands
 * on beside its product is of the compute type and lies in scratch, two that take turns. */
#include "cuda/scratch.h"

typedef struct recurrent_sizes {
    int64_t steps, n, size, gates, kind, elem, wide, state, all; /* bytes of a sample's elements; of a step */
    bool reverse, widen;                                         /* a GRU in 16-bit floats */
} recurrent_sizes;

static recurrent_sizes sizes_of(const om_args *a, bool grad) {
    const om_tensor *x = grad ? &a->out[0] : &a->in[0];
    recurrent_sizes s = {.steps = x->dim[0], .n = x->dim[1], .size = a->in[1 + grad].dim[1],
                         .kind = om_args_int(a, "kind", 0), .reverse = om_args_int(a, "reverse", 0),
                         .elem = (int64_t)om_dtype_size(x->dtype),
                         .wide = (int64_t)om_dtype_size(om_compute_dtype(x->dtype))};
    s.gates = s.kind == OM_GPU_LSTM ? 4 : s.kind == OM_GPU_GRU ? 3 : 1;
    s.state = s.n * s.size, s.all = s.gates * s.state;
    s.widen = s.kind == OM_GPU_GRU && s.elem != s.wide;
    return s;
}

int64_t om_gpu_scratch_recurrent(om_ctx *cx, const om_args *a) {
    const recurrent_sizes s = sizes_of(a, false);
    (void)cx;
    return s.widen ? 2 * s.state * s.wide : 0;
}
/* cells' or h's own gradient */
int64_t om_gpu_scratch_recurrent_grad(om_ctx *cx, const om_args *a) {
    const recurrent_sizes s = sizes_of(a, true);
    (void)cx;
    return s.wide * s.state;
}

/* Step t of operand i (inputs, then outputs), steps of `size` bytes */
static void step_at(om_lower *l, void *field, int i, int64_t t, int64_t size, int mode) {
    om_gpu_part(l, field, i, t * size, 0, size, mode);
}

static void *step_add(om_lower *l, om_gpu_kernel f32, const recurrent_sizes *s, int sums, size_t size) {
    const int dtype = l->a->in[0].dtype;
    return om_gpu_add(l, (om_gpu_kernel)(f32 + dtype - OM_F32), om_gpu_blocks(s->n, 16), om_gpu_blocks(s->size, 16), 1,
                      256, (size_t)((1 + sums) * 32 * 17 * s->wide), size);
}

om_status om_lower_recurrent(om_lower *l) {
    const om_args *a = l->a;
    const recurrent_sizes s = sizes_of(a, false);
    const int out = a->n_in;
    const bool lstm = s.kind == OM_GPU_LSTM, gru = s.kind == OM_GPU_GRU;
    const int64_t state = s.state * s.elem, wide = s.state * s.wide;
    OM_TRY(om_gpu_check(l));
    if (lstm && !s.steps) return om_gpu_copy_lower(l, 4, &a->in[4], 0, out + 1, &a->out[1], 0);
    for (int64_t k = 0; k < s.steps; k++) {
        const int64_t t = s.reverse ? s.steps - 1 - k : k, before = s.reverse ? t + 1 : t - 1;
        om_gpu_recurrent *g = step_add(l, OM_GPU_recurrent_f32, &s, (int)s.gates, sizeof *g);
        if (!g) return l->cx->status;
        g->n = s.n, g->size = s.size, g->kind = (int32_t)s.kind, g->first = !k;
        step_at(l, &g->gx, 0, t, s.all * s.elem, OM_GPU_READ);
        om_gpu_in(l, &g->w, 1);
        if (a->in[2].dtype) om_gpu_in(l, &g->b, 2);
        if (!k) om_gpu_in(l, &g->h, 3);
        else step_at(l, &g->h, out, before, state, OM_GPU_READ);
        if (gru && !k) om_gpu_in(l, &g->before, 3);
        else if (s.widen) om_gpu_scratch_at(l, &g->before, (k & 1) * wide, wide, OM_GPU_READ);
        else if (gru) step_at(l, &g->before, out, before, state, OM_GPU_READ);
        if (s.widen) om_gpu_scratch_at(l, &g->wide, (~k & 1) * wide, wide, OM_GPU_WRITE);
        step_at(l, &g->y, out, t, state, OM_GPU_WRITE);
        if (s.kind >= OM_GPU_LSTM) step_at(l, &g->gates, out + 2, t, 4 * wide, OM_GPU_WRITE);
        if (!lstm) continue;
        if (!k) om_gpu_in(l, &g->before, 4);
        else step_at(l, &g->before, out + 3, before, wide, OM_GPU_READ);
        step_at(l, &g->cells, out + 3, t, wide, OM_GPU_WRITE);
        if (k == s.steps - 1) om_gpu_out(l, &g->last, 1, OM_GPU_WRITE);
    }
    return OM_OK;
}

/* The k-th step and, behind all, what h0 and c0 get. */
static om_status step_grad(om_lower *l, const recurrent_sizes *s, int64_t k) {
    const om_args *a = l->a;
    const int out = a->n_in;
    const bool lstm = s->kind == OM_GPU_LSTM, gru = s->kind == OM_GPU_GRU, end = k == s->steps;
    const int64_t state = s->state * s->elem, wide = s->state * s->wide, all = s->all * s->elem;
    const int64_t t = s->reverse ? k : s->steps - 1 - k, after = s->reverse ? t - 1 : t + 1;
    const int64_t before = s->reverse ? t + 1 : t - 1;
    om_gpu_recurrent_grad *g = step_add(l, OM_GPU_recurrent_grad_f32, s, 1, sizeof *g);
    if (!g) return l->cx->status;
    g->n = s->n, g->size = s->size, g->kind = (int32_t)s->kind, g->first = k == s->steps - 1;
    if (k) step_at(l, &g->after, gru ? out + 1 : out, after, all, OM_GPU_READ);
    om_gpu_in(l, &g->w, 2);
    if (lstm && !k && a->in[1].dtype) om_gpu_in(l, &g->dlast, 1);
    if (lstm) om_gpu_scratch_at(l, &g->dc, 0, wide, OM_GPU_READ | OM_GPU_WRITE);
    if (gru) om_gpu_scratch_at(l, &g->own, 0, wide, OM_GPU_READ | OM_GPU_WRITE);
    if (end) {
        om_gpu_out(l, &g->dh0, 2, OM_GPU_WRITE);
        if (lstm) om_gpu_out(l, &g->dc0, 3, OM_GPU_WRITE);
        return OM_OK;
    }
    step_at(l, &g->dy, 0, t, state, OM_GPU_READ);
    step_at(l, &g->dgx, out, t, all, OM_GPU_WRITE);
    if (gru) step_at(l, &g->dgh, out + 1, t, all, OM_GPU_WRITE);
    if (lstm || gru) step_at(l, &g->gates, 6, t, 4 * wide, OM_GPU_READ);
    if (gru && g->first) om_gpu_in(l, &g->h, 3);
    else if (!lstm) step_at(l, &g->h, 5, gru ? before : t, state, OM_GPU_READ);
    if (!lstm) return OM_OK;
    step_at(l, &g->cells, 7, t, wide, OM_GPU_READ);
    if (g->first) om_gpu_in(l, &g->before, 4);
    else step_at(l, &g->before, 7, before, wide, OM_GPU_READ);
    return OM_OK;
}

om_status om_lower_recurrent_grad(om_lower *l) {
    const recurrent_sizes s = sizes_of(l->a, true);
    OM_TRY(om_gpu_check(l));
    for (int64_t k = 0; k <= s.steps; k++) OM_TRY(step_grad(l, &s, k));
    return OM_OK;
}
