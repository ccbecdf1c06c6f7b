/* lower_pool.c - pooling and batch normalisation on the GPU (pool.cu, batch_norm.cu). */
#include "cuda/scratch.h"
#include "ops/attr.h"
#include "ops/window.h"

/* x: the tensor that windows read, y: the one with an element for each */
static void pool_of(const om_args *a, const om_tensor *x, const om_tensor *y, int axes, om_gpu_pool *p) {
    *p = (om_gpu_pool){.planes = 1, .in_size = 1, .out_size = 1};
    p->include_pad = om_args_int(a, "count_include_pad", 1) != 0;
    for (int i = 0; i < x->rank - axes; i++) p->planes *= x->dim[i];
    om_window w;
    om_window_args(a, axes, NULL, &w);
    for (int i = 0; i < 3; i++) {
        const int s = i - (3 - axes), at = x->rank - axes + s;
        p->in[i] = s < 0 ? 1 : x->dim[at];
        p->out[i] = s < 0 ? 1 : y->dim[at];
        p->k[i] = w.k[i], p->stride[i] = w.stride[i], p->pad[i] = w.lo[i], p->dil[i] = w.dil[i];
        p->in_size *= p->in[i], p->out_size *= p->out[i];
    }
}

static int pooled(const om_args *a, const char *attr) {
    int count;
    attr_values(a, attr, &count);
    return count;
}

om_status om_lower_pool(om_lower *l) {
    const om_args *a = l->a;
    const om_op *op = a->node->op;
    const bool grad = op == &om_op_avg_pool_grad || op == &om_op_adaptive_avg_pool_grad, max = op == &om_op_max_pool;
    const bool adaptive = op == &om_op_adaptive_avg_pool || op == &om_op_adaptive_avg_pool_grad;
    const int dtype = a->in[0].dtype;
    om_gpu_pool p, *g;
    OM_TRY(om_gpu_check(l));
    pool_of(a, grad ? &a->out[0] : &a->in[0], grad ? &a->in[0] : &a->out[0], pooled(a, adaptive ? "size" : "kernel"),
            &p);
    p.adaptive = adaptive;
    p.include_pad &= !adaptive;
    for (int i = 0; i < a->n_out; i++)
        if (!om_is_dense(&a->out[i])) return om_gpu_host(l);
    if (grad && !p.out_size) return om_gpu_fill_lower(l, a->n_in, &a->out[0], 0, 0);
    const om_gpu_kernel k = max    ? OM_GPU_OF(max_pool, dtype)
                            : grad ? OM_GPU_OF(avg_pool_grad, dtype)
                                   : OM_GPU_OF(avg_pool, dtype);
    g = om_gpu_add(l, k, om_gpu_grid(p.planes * (grad ? p.in_size : p.out_size), 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, grad ? &g->dy : &g->x, 0);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    if (max) om_gpu_out(l, &g->idx, 1, OM_GPU_WRITE);
    return OM_OK;
}

int64_t om_gpu_scratch_max_pool_grad(om_ctx *cx, const om_args *a) {
    (void)cx;
    return om_is_half(a->out[0].dtype) ? 4 * om_numel(&a->out[0]) : 0;
}

om_status om_lower_max_pool_grad(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *dx = &a->out[0];
    enum { THREADS = 128 };
    om_gpu_pool p, *g;
    pool_of(a, dx, &a->in[0], (int)om_args_int(a, "axes", a->in[0].rank - 2), &p);
    if (!om_is_dense(dx) || p.planes > INT32_MAX) return om_gpu_host(l);
    g = om_gpu_add(l, OM_GPU_OF(max_pool_grad, dx->dtype), p.in_size ? p.planes : 0, 1, 1, THREADS, THREADS * 16,
                   sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->dy, 0);
    om_gpu_in(l, &g->at, 1);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    om_gpu_out(l, &g->y, 0, OM_GPU_READ | OM_GPU_WRITE);
    if (om_is_half(dx->dtype)) om_gpu_scratch_at(l, &g->wide, 0, 4 * om_numel(dx), OM_GPU_READ | OM_GPU_WRITE);
    return OM_OK;
}

/* --- batch normalisation ---------------------------------------------------------------------------------- */

static void channel_in(om_lower *l, om_gpu_channel *v, int i) {
    if (i >= l->a->n_in || !l->a->in[i].dtype) return;
    v->step = l->a->in[i].stride[0], v->dtype = l->a->in[i].dtype;
    om_gpu_in(l, &v->data, i);
}
static void channel_out(om_lower *l, om_gpu_channel *v, int i) {
    v->step = l->a->out[i].stride[0], v->dtype = l->a->out[i].dtype;
    om_gpu_out(l, &v->data, i, OM_GPU_WRITE);
}

om_status om_lower_batch_norm(om_lower *l) {
    const om_args *a = l->a;
    const bool grad = om_is(a->node, batch_norm_grad);
    const om_tensor *x = &a->in[grad];
    OM_TRY(om_gpu_check(l));
    if (!om_is_dense(&a->out[0]) || x->dim[1] > INT32_MAX) return om_gpu_host(l);
    const om_gpu_kernel k = grad ? OM_GPU_OF(batch_norm_grad, x->dtype) : OM_GPU_OF(batch_norm, x->dtype);
    om_gpu_batch_norm *g = om_gpu_add(l, k, x->dim[1], 1, 1, 256, 32 * 8, sizeof *g);
    if (!g) return l->cx->status;
    g->n = x->dim[0], g->c = x->dim[1], g->inner = 1;
    for (int i = 2; i < x->rank; i++) g->inner *= x->dim[i];
    g->eps = om_args_float(a, "eps", 1e-5), g->momentum = om_args_float(a, "momentum", 0.1);
    g->batch = om_args_int(a, "training", 0) != 0, g->running = !grad && a->n_in > 3 && a->in[3].dtype;
    om_gpu_in(l, &g->x, grad);
    if (grad) om_gpu_in(l, &g->dy, 0);
    channel_in(l, &g->w, grad + 1);
    if (!grad) channel_in(l, &g->b, 2);
    channel_in(l, &g->in_mean, 3);
    channel_in(l, &g->in_var, 4);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    if (!grad) channel_out(l, &g->new_mean, 1), channel_out(l, &g->new_var, 2);
    channel_out(l, &g->mean, grad ? 1 : 3);
    channel_out(l, &g->rstd, grad ? 2 : 4);
    return OM_OK;
}
