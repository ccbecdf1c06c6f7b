/* lower_update.c - optimizer steps as operators of the graph, on the GPU (update.cu). Operands lie dense (lower.c);
 * types that csrc/optim refuses are refused when the plan is made. */
#include "cuda/scratch.h"
#include "optim/list.h"

#include <math.h>

static bool given(const om_args *a, int i) { return i < a->n_in && a->in[i].dtype != OM_NODTYPE; }

static int64_t blocks_of(int64_t n) {
    const int64_t blocks = om_gpu_blocks(n, 4 * OM_GPU_UPDATE_THREADS);
    return blocks < OM_GPU_UPDATE_BLOCKS ? blocks : OM_GPU_UPDATE_BLOCKS;
}

/* A launch over n elements, or over one. */
static om_gpu_update *update_add(om_lower *l, om_gpu_kernel k, const om_gpu_update *p) {
    om_gpu_update *g = om_gpu_add(l, k, blocks_of(p->n), 1, 1, OM_GPU_UPDATE_THREADS,
                                  OM_GPU_UPDATE_SHARED + 32 * sizeof(double), sizeof *g);
    if (!g) return NULL;
    *g = *p;
    om_gpu_guard_at(l, &g->guard);
    return g;
}

static void scalar_at(om_lower *l, const char **field, int32_t *type, int i) {
    if (!given(l->a, i)) return;
    om_gpu_in(l, field, i);
    *type = l->a->in[i].dtype;
}

static om_status group_check(om_lower *l, int index, const om_tensor *in, bool moments) {
    const om_optim_param q = {.p = in[0], .g = in[1], .m = moments ? in[2] : (om_tensor){0},
                              .v = moments ? in[3] : (om_tensor){0}};
    return om_optim_check(l->cx, l->a->node->op->name, OM_STORE_NEAREST, &q, index);
}

/* Operands [first, first + n) of a group are in[0] and so on. */
static void ins_at(om_lower *l, om_gpu_update *g, int first, int n) {
    for (int i = 0; i < n; i++) {
        om_gpu_in(l, &g->in[i], first + i);
        g->in_type[i] = l->a->in[first + i].dtype;
    }
}

/* --- adamw, sgd -------------------------------------------------------------------------------------------- */

om_status om_lower_adamw(om_lower *l) {
    const om_args *a = l->a;
    const om_gpu_update c = {
#define ADAMW(field, name, dflt) .field = om_args_float(a, name, dflt),
#define ADAMW_MODE(field, name, dflt) .field = om_args_int(a, name, dflt) ? OM_ADAMW_HF : OM_ADAMW_TORCH,
#define ADAMW_FLAG(field, name, dflt) .field = om_args_int(a, name, dflt) != 0,
#include "ops/optimizer.def"
    };
    for (int k = 0; k < (a->n_in - 3) / 4; k++) {
        const int first = 3 + 4 * k;
        om_gpu_update p = c;
        OM_TRY(group_check(l, k, &a->in[first], true));
        p.n = om_numel(&a->in[first]);
        om_gpu_update *g = update_add(l, OM_GPU_adamw, &p);
        if (!g) return l->cx->status;
        ins_at(l, g, first, 4);
        scalar_at(l, &g->lr, &g->lr_type, 0);
        om_gpu_in(l, &g->step, 1);
        om_gpu_in(l, &g->flag, 2);
        for (int i = 0; i < 3; i++) om_gpu_out(l, &g->out[i], 3 * k + i, OM_GPU_WRITE);
    }
    return OM_OK;
}

om_status om_lower_sgd(om_lower *l) {
    const om_args *a = l->a;
    for (int k = 0; k < (a->n_in - 2) / 2; k++) {
        const int first = 2 + 2 * k;
        const om_gpu_update p = {.n = om_numel(&a->in[first])};
        OM_TRY(group_check(l, k, &a->in[first], false));
        om_gpu_update *g = update_add(l, OM_GPU_sgd, &p);
        if (!g) return l->cx->status;
        ins_at(l, g, first, 2);
        scalar_at(l, &g->lr, &g->lr_type, 0);
        om_gpu_in(l, &g->flag, 1);
        om_gpu_out(l, &g->out[0], k, OM_GPU_WRITE);
    }
    return OM_OK;
}

/* --- lamb ---------------------------------------------------------------------------------------------------- */

int64_t om_gpu_scratch_lamb(om_ctx *cx, const om_args *a) { /* groups follow one another */
    (void)cx, (void)a;
    return 16 * OM_GPU_UPDATE_BLOCKS;
}

static void lamb_scalars_at(om_lower *l, om_gpu_update *g) {
    om_gpu_in(l, &g->flag, 0);
    scalar_at(l, &g->scale, &g->scale_type, 1);
    scalar_at(l, &g->norm, &g->norm_type, 2);
    scalar_at(l, &g->lr, &g->lr_type, 3);
    om_gpu_in(l, &g->step, 4);
}

om_status om_lower_lamb(om_lower *l) {
    const om_args *a = l->a;
    const om_gpu_update c = {
#define LAMB(field, name, dflt) .field = om_args_float(a, name, dflt),
#define LAMB_CLIP(field, name, dflt) .field = given(a, 2) ? om_args_float(a, name, dflt) : 0,
#define LAMB_FLAG(field, name, dflt) .field = om_args_int(a, name, dflt) != 0,
#define LAMB_RATIO(field, name, dflt) .field = om_args_float(a, name, dflt),
#include "ops/optimizer.def"
    };
    for (int k = 0; k < (a->n_in - 5) / 5; k++) {
        const int first = 5 + 5 * k, out = 1 + 5 * k;
        om_gpu_update p = c;
        OM_TRY(group_check(l, k, &a->in[first], true));
        p.n = om_numel(&a->in[first]), p.blocks = blocks_of(p.n);
        om_gpu_update *g = update_add(l, OM_GPU_lamb_moments, &p);
        if (!g) return l->cx->status;
        ins_at(l, g, first, 4);
        lamb_scalars_at(l, g);
        for (int i = 1; i < 4; i++) om_gpu_out(l, &g->out[i], out + i, OM_GPU_WRITE);
        om_gpu_scratch_at(l, &g->sums, 0, 16 * p.blocks, OM_GPU_WRITE);
        if (!(g = update_add(l, OM_GPU_lamb, &p))) return l->cx->status;
        ins_at(l, g, first, given(a, first + 4) ? 5 : 4);
        lamb_scalars_at(l, g);
        for (int i = 0; i < 4; i++) om_gpu_out(l, &g->out[i], out + i, OM_GPU_READ | OM_GPU_WRITE);
        om_gpu_scratch_at(l, &g->sums, 0, 16 * p.blocks, OM_GPU_READ);
        if (given(a, first + 4)) om_gpu_out(l, &g->out[4], out + 4, OM_GPU_WRITE);
    }
    const om_gpu_update one = {.n = 1};
    om_gpu_update *g = update_add(l, OM_GPU_update_count, &one);
    if (!g) return l->cx->status;
    l->last->block = 32;
    om_gpu_in(l, &g->flag, 0);
    om_gpu_in(l, &g->step, 4);
    om_gpu_out(l, &g->out[0], 0, OM_GPU_WRITE);
    return OM_OK;
}

/* --- lists ----------------------------------------------------------------------------------------------------- */

int64_t om_gpu_scratch_norm_all(om_ctx *cx, const om_args *a) {
    int64_t blocks = 0;
    (void)cx;
    for (int i = 0; i < a->n_in; i++) blocks += blocks_of(om_numel(&a->in[i]));
    return 16 * blocks;
}

om_status om_lower_norm_all(om_lower *l) {
    const om_args *a = l->a;
    int64_t all = 0;
    for (int i = 0; i < a->n_in; i++) {
        const int64_t n = om_numel(&a->in[i]), blocks = blocks_of(n);
        om_gpu_norm_all *g = om_gpu_add(l, OM_GPU_squares, blocks, 1, 1, OM_GPU_UPDATE_THREADS, 32 * sizeof(double),
                                        sizeof *g);
        if (!g) return l->cx->status;
        g->n = n, g->dtype = a->in[i].dtype;
        om_gpu_in(l, &g->x, i);
        om_gpu_scratch_at(l, &g->sums, 16 * all, 16 * blocks, OM_GPU_WRITE);
        all += blocks;
    }
    om_gpu_norm_all *g = om_gpu_add(l, OM_GPU_norm_all, 1, 1, 1, 32, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->blocks = all, g->dtype = a->out[0].dtype, g->finite = om_is(a->node, all_finite);
    om_gpu_scratch_at(l, &g->sums, 0, 16 * all, OM_GPU_READ);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_clip(om_lower *l) {
    const om_gpu_update p = {.n = om_numel(&l->a->in[0]), .max_norm = om_args_float(l->a, "max_norm", 1.0)};
    om_gpu_update *g = update_add(l, OM_GPU_clip, &p);
    if (!g) return l->cx->status;
    ins_at(l, g, 0, 1);
    scalar_at(l, &g->norm, &g->norm_type, 1);
    om_gpu_out(l, &g->out[0], 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_accumulate(om_lower *l) {
    const om_gpu_update p = {.n = om_numel(&l->a->in[0])};
    om_gpu_update *g = update_add(l, OM_GPU_accumulate, &p);
    if (!g) return l->cx->status;
    ins_at(l, g, 0, 2);
    om_gpu_in(l, &g->flag, 2);
    om_gpu_out(l, &g->out[0], 0, OM_GPU_WRITE);
    return OM_OK;
}
