/* lower_attention.c - attention and its gradient on the GPU. */
#include "cuda/queue.h"
#include "cuda/scratch.h"
#include "cpu/philox.h"
#include "ops/attr.h"

#include <math.h>

enum { OWN = 16, TILE = 32, LARGEST = 256 };
/* on tensor cores (attention_mma.h) */
enum { MMA_OWN = 64, MMA_TILE = 64, MMA_STEP = 32, MMA_LARGEST = 128, MMA_LONGEST = 1 << 30 };

/* Which of the kernels on tensor cores: heads filled up to so many numbers, or 0: the plain ones. */
static int mma_of(om_ctx *cx, int dtype, const om_gpu_attention *p) {
    const int64_t most = p->d > p->dv_size ? p->d : p->dv_size;
    if ((dtype != OM_BF16 && dtype != OM_F16) || most > MMA_LARGEST || p->tq > MMA_LONGEST || p->tk > MMA_LONGEST ||
        om_gpu_capability(om_cuda_gpu(cx)) < OM_GPU_MMA_CAPABILITY)
        return 0;
    return most <= 64 ? 64 : 128;
}
#define MMA(name, size, dtype)                                                                     \
    ((om_gpu_kernel)(((size) == 64 ? OM_GPU_attention_mma64##name##_bf16 : OM_GPU_attention_mma128##name##_bf16) + \
                     ((dtype) == OM_F16)))

/* In bytes: keys, values and those that come next; in dkv queries and dy, their bits and numbers. */
static size_t mma_shared(int mma) { return (size_t)(4 * MMA_TILE * 2 * (mma + 8)); }
static size_t mma_dkv_shared(int mma) { /* heads of 64: k and v make way (attention_mma_dkv) */
    return (size_t)((4 * MMA_STEP + (mma > 64 ? 2 * MMA_OWN : 0)) * 2 * (mma + 8) + 2 * MMA_STEP * (8 + 3 * 4));
}

/* Bytes of dropout's bits (am_bits). Where a query's would be more than its q, dq, y and dy together there are none,
 * and every kernel draws its words. */
static int64_t bits_of(const om_gpu_attention *p, int mma) {
    if (!mma || !p->drop || p->tk > 64 * p->d) return 0;
    return p->batch * p->hq * om_gpu_blocks(p->tk, 64) * om_gpu_blocks(p->tq, MMA_OWN) * MMA_OWN * 8;
}

/* Which of the kernels of f32 in register tiles (attention_f32.h): heads filled up to so many numbers, or 0. */
static int tiled_of(om_ctx *cx, int dtype, const om_gpu_attention *p) {
    enum { TILED_LARGEST = 128, TILED_LONGEST = 1 << 30 };
    const int64_t most = p->d > p->dv_size ? p->d : p->dv_size;
    if (dtype != OM_F32 || most > TILED_LARGEST || p->tq > TILED_LONGEST || p->tk > TILED_LONGEST ||
        om_gpu_capability(om_cuda_gpu(cx)) < OM_GPU_MMA_CAPABILITY) /* asynchronous copies came with it */
        return 0;
    return most <= 64 ? 64 : 128;
}
#define TILED(name, size) ((size) == 64 ? OM_GPU_attention_tiled64##name##_f32 : OM_GPU_attention_tiled128##name##_f32)
static int tiled_own(int size, bool grad) { return size > 64 && grad ? 32 : 64; }
static size_t tiled_shared(int size, bool grad) { /* in bytes: rows, weights, numbers of queries */
    const size_t own = (size_t)tiled_own(size, grad), tile = size > 64 ? 32 : 64;
    return 4 * (((grad ? 2 : 1) * own + 2 * tile) * ((size_t)size + 4) + own * 40 + (grad ? 3 * tile : 0));
}

static const om_tensor *given(const om_args *a, int i) {
    return i >= 0 && i < a->n_in && a->in[i].dtype ? &a->in[i] : NULL;
}

static int64_t number(const om_args *a, const char *name) {
    const om_attr *x = om_attr_get(a->attr, a->n_attr, name);
    return x ? x->kind == OM_ATTR_DIMS ? x->dims[0] : x->i : 0;
}

/* Batch axes as one, then head, time, feature; false: the batch axes do not merge. turn: time stands before heads. */
static bool four(const om_tensor *t, bool turn, int64_t *s) {
    const int r = t->rank;
    int64_t step = 0;
    bool any = false;
    for (int i = r - 4; i >= 0; i--) {
        if (t->dim[i] == 1) continue;
        if (any && t->stride[i] != step) return false;
        if (!any) s[0] = t->stride[i];
        step = t->stride[i] * t->dim[i];
        any = true;
    }
    if (!any) s[0] = 0;
    s[1] = t->stride[turn ? r - 2 : r - 3], s[2] = t->stride[turn ? r - 3 : r - 2], s[3] = t->stride[r - 1];
    return true;
}

/* A mask broadcast to (batch, heads, tq, tk). */
static bool broadcast(const om_tensor *m, const om_tensor *q, int64_t *s) {
    om_tensor t = *q;
    for (int i = 0; i < q->rank; i++) {
        const int at = i - (q->rank - m->rank);
        t.stride[i] = at >= 0 && m->dim[at] > 1 ? m->stride[at] : 0;
    }
    return four(&t, false, s);
}

static bool attention_of(const om_args *a, int q_at, int mask_at, int start_at, int end_at, om_gpu_attention *p) {
    const om_tensor *q = &a->in[q_at], *k = q + 1, *v = q + 2, *mask = given(a, mask_at), *start = given(a, start_at),
                    *end = given(a, end_at);
    const int r = q->rank;
    const double drop = om_args_float(a, "dropout", 0);
    *p = (om_gpu_attention){.batch = 1, .hq = q->dim[r - 3], .hk = k->dim[r - 3], .tq = q->dim[r - 2],
                            .tk = k->dim[r - 2], .d = q->dim[r - 1], .dv_size = v->dim[r - 1],
                            .causal = om_args_int(a, "causal", 0) != 0, .offset = number(a, "causal_offset"),
                            .window = number(a, "window"), .nan_rows = (int32_t)om_args_int(a, "nan_rows", 0),
                            .rng = a->node->rng, .drop = drop > 0, .keep_below = om_philox_keep_below(drop),
                            .drop_scale = om_dropout_scale(drop)};
    for (int i = 0; i < r - 3; i++) p->batch *= q->dim[i];
    p->scale = om_attr_get(a->attr, a->n_attr, "scale") ? om_args_float(a, "scale", 1) : 1 / sqrt((double)p->d);
    if (!p->hk || !p->tk || !p->d || !p->dv_size || p->d > LARGEST || p->dv_size > LARGEST) return false;
    if (start) p->start_step = start->stride[0];
    if (end) p->end_step = end->stride[0];
    if (mask) p->mask_kind = mask->dtype == OM_BOOL ? 1 : 2, p->mask_type = mask->dtype;
    return four(q, false, p->sq) && four(k, false, p->sk) && four(v, false, p->sv) &&
           (!mask || broadcast(mask, q, p->smask)) && p->batch * p->hq <= 65535;
}

static void attention_operands(om_lower *l, om_gpu_attention *g, int q_at, int mask_at, int start_at, int end_at) {
    om_gpu_in(l, &g->q, q_at);
    om_gpu_in(l, &g->k, q_at + 1);
    om_gpu_in(l, &g->v, q_at + 2);
    om_gpu_in(l, &g->mask, mask_at);
    om_gpu_in(l, &g->kv_start, start_at);
    om_gpu_in(l, &g->kv_end, end_at);
    if (g->drop) om_gpu_scalars_at(l, &g->scalars);
}

int64_t om_gpu_scratch_attention(om_ctx *cx, const om_args *a) {
    om_gpu_attention p;
    (void)attention_of(a, 0, 3, 4, 5, &p); /* sizes alone; what is then not lowered needs no more */
    return bits_of(&p, mma_of(cx, a->in[0].dtype, &p));
}

/* The kernel that leaves dropout's bits in the scratch, of as many bytes, from byte `at` on. */
static void bits_add(om_lower *l, const om_gpu_attention *p, int start_at, int end_at, int64_t at, int64_t bits) {
    if (!bits) return;
    om_gpu_attention *g = om_gpu_add(l, OM_GPU_attention_mma_bits, om_gpu_blocks(p->tq, MMA_OWN), p->batch * p->hq, 1,
                                     128, 0, sizeof *g);
    if (!g) return;
    *g = *p;
    om_gpu_in(l, &g->kv_start, start_at);
    om_gpu_in(l, &g->kv_end, end_at);
    om_gpu_scalars_at(l, &g->scalars);
    om_gpu_scratch_at(l, &g->bits, at, bits, OM_GPU_WRITE);
}

om_status om_lower_attention(om_lower *l) {
    const om_args *a = l->a;
    const int dtype = a->in[0].dtype;
    const size_t wide = om_dtype_size(om_compute_dtype(dtype));
    om_gpu_attention p;
    if (!attention_of(a, 0, 3, 4, 5, &p) || !four(&a->out[0], om_args_int(a, "seq_first", 0), p.sout) ||
        !om_is_dense(&a->out[1]))
        return om_gpu_host(l);
    const int mma = mma_of(l->cx, dtype, &p);
    size_t shared = wide * (size_t)((OWN + TILE) * (p.d + 1) + TILE * (p.dv_size + 1) + 4 * TILE);
    if (mma) shared = mma_shared(mma);
    const int tiled = tiled_of(l->cx, dtype, &p);
    if (tiled) shared = tiled_shared(tiled, false);
    if (!mma && !tiled && shared > OM_GPU_SHARED) return om_gpu_host(l);
    const int64_t bits = bits_of(&p, mma);
    bits_add(l, &p, 4, 5, 0, bits);
    om_gpu_attention *g = om_gpu_add(l, mma ? MMA(, mma, dtype) : tiled ? TILED(, tiled) : OM_GPU_OF(attention, dtype),
                                     om_gpu_blocks(p.tq, mma ? MMA_OWN : tiled ? tiled_own(tiled, false) : OWN),
                                     p.batch * p.hq, 1, 128, shared, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    attention_operands(l, g, 0, 3, 4, 5);
    if (bits) om_gpu_scratch_at(l, &g->bits, 0, bits, OM_GPU_READ);
    om_gpu_out(l, &g->out, 0, OM_GPU_WRITE);
    om_gpu_out(l, &g->lse, 1, OM_GPU_WRITE);
    return OM_OK;
}

/* delta, m, il of every query; dropout's bits come behind them */
static int64_t stat_bytes(const om_args *a) {
    return om_gpu_blocks(3 * om_numel(&a->in[6]) * (int64_t)om_dtype_size(om_compute_dtype(a->in[1].dtype)), 64) * 64;
}
int64_t om_gpu_scratch_attention_grad(om_ctx *cx, const om_args *a) {
    om_gpu_attention p;
    (void)attention_of(a, 1, 4, 7, 8, &p); /* sizes alone; what is then not lowered needs no more */
    return stat_bytes(a) + bits_of(&p, mma_of(cx, a->in[1].dtype, &p));
}

/* What each element of an added mask gets. */
static om_status dmask_add(om_lower *l, const om_gpu_attention *p, const int64_t *step, int64_t bytes) {
    enum { THREADS = 128 };
    const om_args *a = l->a;
    const int64_t size[4] = {p->batch, p->hq, p->tq, p->tk};
    int64_t elements = 1, pairs = 1;
    for (int i = 0; i < 4; i++) *(step[i] ? &elements : &pairs) *= size[i];
    if (!pairs) return om_gpu_fill_lower(l, a->n_in + 3, &a->out[3], 0, 0);
    const int32_t parts = pairs >= 64 ? 16 : pairs > 1 ? 4 : 1;
    om_gpu_attention_mask *g = om_gpu_add(l, OM_GPU_OF(attention_dmask, a->in[1].dtype),
                                          om_gpu_blocks(elements, THREADS / parts), 1, 1, THREADS,
                                          THREADS * sizeof(double), sizeof *g);
    if (!g) return l->cx->status;
    g->a = *p, g->parts = parts;
    memcpy(g->step, step, sizeof size);
    attention_operands(l, &g->a, 1, 4, 7, 8);
    om_gpu_in(l, &g->a.dy, 0);
    om_gpu_scratch_at(l, &g->a.delta, 0, bytes, OM_GPU_READ);
    om_gpu_out(l, &g->dmask, 3, OM_GPU_WRITE);
    return OM_OK;
}

/* Queries of a warp of attention_delta (delta_rows). */
static int32_t delta_rows_of(const om_gpu_attention *p, int dtype) {
    enum { ROWS = 16 };
    int64_t all = p->dv_size;
    for (int i = 0; i < 3; i++) all |= p->sdy[i] | p->sy[i];
    const bool fit = (dtype == OM_BF16 || dtype == OM_F16) && p->sdy[3] == 1 && p->sy[3] == 1 && all % 8 == 0 &&
                     p->tk > 32 && p->batch * p->hq * p->tq <= INT32_MAX;
    return fit ? ROWS : 1;
}

om_status om_lower_attention_grad(om_lower *l) {
    const om_args *a = l->a;
    const int dtype = a->in[1].dtype;
    const size_t wide = om_dtype_size(om_compute_dtype(dtype));
    const bool turn = om_args_int(a, "seq_first", 0);
    const om_tensor *frozen = given(a, 9), *mask = given(a, 4);
    om_gpu_attention p;
    int64_t step[4] = {0};
    /* queries that saw nothing and shall be NaN: the CPU's */
    const bool dmask = mask && om_is_float(mask->dtype) && om_args_int(a, "want_dmask", 0);
    if (!attention_of(a, 1, 4, 7, 8, &p) || p.nan_rows || (dmask && !broadcast(&a->out[3], &a->in[1], step)) ||
        !four(&a->in[0], turn, p.sdy) || !four(&a->in[5], turn, p.sy) || !four(&a->out[0], turn, p.sdq) ||
        !four(&a->out[1], turn, p.sdk) || !four(&a->out[2], turn, p.sdv) ||
        (frozen && !broadcast(frozen, &a->in[1], p.sfrozen)))
        return om_gpu_host(l);
    const int mma = mma_of(l->cx, dtype, &p);
    size_t shared[2]; /* dq, dkv */
    shared[0] = shared[1] = wide * (size_t)((OWN + TILE) * (p.d + 1) + (OWN + TILE) * (p.dv_size + 1) + 8 * TILE);
    if (mma) shared[0] = mma_shared(mma), shared[1] = mma_dkv_shared(mma);
    const int tiled = tiled_of(l->cx, dtype, &p);
    if (tiled) shared[0] = shared[1] = tiled_shared(tiled, true);
    if (!mma && !tiled && shared[0] > OM_GPU_SHARED) return om_gpu_host(l);
    const int64_t rows = p.batch * p.hq * p.tq, bytes = 3 * rows * (int64_t)wide, bits = bits_of(&p, mma);
    p.delta_rows = delta_rows_of(&p, dtype);
    om_gpu_attention *g = om_gpu_add(l, OM_GPU_OF(attention_delta, dtype), om_gpu_blocks(rows, 4 * p.delta_rows), 1, 1,
                                     128, 0, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    attention_operands(l, g, 1, 4, 7, 8);
    om_gpu_in(l, &g->dy, 0);
    om_gpu_in(l, &g->y, 5);
    om_gpu_in(l, &g->lse, 6);
    om_gpu_scratch_at(l, &g->delta, 0, bytes, OM_GPU_WRITE);
    bits_add(l, &p, 7, 8, stat_bytes(a), bits);
    for (int which = 0; which < 2; which++) {
        om_gpu_kernel plain = which ? OM_GPU_OF(attention_dkv, dtype) : OM_GPU_OF(attention_dq, dtype);
        int own = mma ? MMA_OWN : OWN, threads = 128;
        if (tiled) {
            plain = which ? TILED(_dkv, tiled) : TILED(_dq, tiled);
            own = tiled_own(tiled, true), threads = 2 * own;
        }
        g = om_gpu_add(l, !mma ? plain : which ? MMA(_dkv, mma, dtype) : MMA(_dq, mma, dtype),
                       om_gpu_blocks(which ? p.tk : p.tq, own), p.batch * (which ? p.hk : p.hq), 1, threads,
                       shared[which], sizeof *g);
        if (!g) return l->cx->status;
        *g = p;
        attention_operands(l, g, 1, 4, 7, 8);
        om_gpu_in(l, &g->frozen, 9);
        om_gpu_in(l, &g->dy, 0);
        om_gpu_scratch_at(l, &g->delta, 0, bytes, OM_GPU_READ);
        if (bits) om_gpu_scratch_at(l, &g->bits, stat_bytes(a), bits, OM_GPU_READ);
        if (!which) om_gpu_out(l, &g->dq, 0, OM_GPU_WRITE);
        if (which) om_gpu_out(l, &g->dk, 1, OM_GPU_WRITE), om_gpu_out(l, &g->dv, 2, OM_GPU_WRITE);
    }
    return dmask ? dmask_add(l, &p, step, bytes) : OM_OK;
}
