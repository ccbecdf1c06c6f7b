/* cumprod.c - ops/cumprod.c on the CPU: a line at a time, in double (integers: 64 bits, wrapping), rounded last. */
#include "cpu/cpu.h"
#include "cpu/strip.h"
#include "cpu/walk.h"

#include <math.h>

enum { CUM_TASKS = 16 };

typedef struct cum_plan {
    om_walk walk;            /* all axes but one; elements of the operands, then of the result */
    int n_in, dtype, cls;
    bool logs;               /* logcumsumexp */
    int64_t len, lines, tasks, task_size, line_size, size, step[4];
    const char *in[3];       /* of a run, as is what follows */
    char *y, *scratch;
} cum_plan;

static void cum_product(const cum_plan *p, char *x) {
    if (p->cls == OM_STRIP_I) {
        uint64_t u = 1;
        for (int64_t i = 0; i < p->len; i++) ((uint64_t *)x)[i] = u *= ((uint64_t *)x)[i];
        return;
    }
    double u = 1;
    for (int64_t i = 0; i < p->len; i++) {
        if (p->cls == OM_STRIP_F) ((float *)x)[i] = (float)(u *= (double)((float *)x)[i]);
        else ((double *)x)[i] = u *= ((double *)x)[i];
    }
}

static void cum_gradient(const cum_plan *p, char *dy, const char *x, double *g) { /* dx into dy */
#define CUM_GRADIENT(T)                                                                             \
    do {                                                                                            \
        double u = 0;                                                                               \
        for (int64_t i = p->len - 1; i >= 0; i--) {                                                 \
            g[i] = (double)((T *)dy)[i] + u;                                                        \
            u = (double)((const T *)x)[i] * g[i];                                                   \
        }                                                                                           \
        u = 1;                                                                                      \
        for (int64_t i = 0; i < p->len; i++) {                                                      \
            ((T *)dy)[i] = (T)(u * g[i]);                                                           \
            u *= (double)((const T *)x)[i];                                                         \
        }                                                                                           \
    } while (0)
    if (p->cls == OM_STRIP_F) CUM_GRADIENT(float);
    else CUM_GRADIENT(double);
}

static void cum_logs(const cum_plan *p, char *x) {
    double m = (double)-INFINITY, sum = 0; /* the largest so far, the sum of e^(x - m) */
    for (int64_t i = 0; i < p->len; i++) {
        const double v = p->cls == OM_STRIP_F ? (double)((float *)(void *)x)[i] : ((double *)(void *)x)[i];
        if (v > m) sum = sum * exp(m - v) + 1, m = v;
        else if (v == m && isinf(v)) sum = sum != sum ? sum : v > 0 ? 1 : 0; /* NaN stays */
        else sum += exp(v - m);
        const double y = sum != sum ? sum : m + log(sum == 0 ? 1 : sum);
        if (p->cls == OM_STRIP_F) ((float *)(void *)x)[i] = (float)y;
        else ((double *)(void *)x)[i] = y;
    }
}

static void cum_logs_gradient(const cum_plan *p, char *dy, const char *x, const char *y) { /* dx into dy */
#define CUM_LOGS(T)                                                                                 \
    do {                                                                                            \
        T *d = (T *)(void *)dy;                                                                     \
        const T *v = (const T *)(const void *)x, *s = (const T *)(const void *)y;                   \
        double g = 0;                                                                               \
        for (int64_t i = p->len - 1; i >= 0; i--) {                                                 \
            g = (double)d[i] + (i + 1 < p->len ? exp((double)s[i] - (double)s[i + 1]) * g : 0);     \
            d[i] = (T)(g * exp((double)v[i] - (double)s[i]));                                       \
        }                                                                                           \
    } while (0)
    if (p->cls == OM_STRIP_F) CUM_LOGS(float);
    else CUM_LOGS(double);
}

static void cum_tasks(void *arg, int64_t begin, int64_t end) {
    const cum_plan *p = arg;
    for (int64_t t = begin; t < end; t++) {
        const int64_t from = p->lines * t / p->tasks, to = p->lines * (t + 1) / p->tasks;
        char *a = p->scratch + t * p->task_size, *b = a + p->line_size;
        om_walk w = p->walk;
        if (from == to) continue;
        walk_seek(&w, from);
        for (int64_t i = from; i < to; i++, walk_next(&w)) {
            for (int k = 0; k < p->n_in; k++)
                OM_PICK(om_strip)->load[p->dtype](p->in[k] + w.off[k] * p->size, p->step[k], p->len,
                                                  a + k * p->line_size);
            if (p->logs && p->n_in == 1) cum_logs(p, a);
            else if (p->logs) cum_logs_gradient(p, a, b, b + p->line_size);
            else if (p->n_in == 1) cum_product(p, a);
            else cum_gradient(p, a, b, (double *)(b + p->line_size));
            OM_PICK(om_strip)->store[p->dtype](a, p->len, p->y + w.off[p->n_in] * p->size, p->step[p->n_in]);
        }
    }
}

static void cum_layout(const om_args *a, cum_plan *p, om_walk_axis *axes) {
    const om_tensor *x = &a->in[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    *p = (cum_plan){.n_in = a->n_in, .dtype = x->dtype, .cls = om_strip_class(x->dtype), .len = x->dim[axis],
                    .lines = 1, .size = (int64_t)om_dtype_size(x->dtype),
                    .logs = a->node->op == &om_op_logcumsumexp || a->node->op == &om_op_logcumsumexp_grad};
    p->walk = (om_walk){.n = a->n_in + 1, .axis = axes};
    for (int k = 0; k <= a->n_in; k++) p->step[k] = (k < a->n_in ? &a->in[k] : &a->out[0])->stride[axis];
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        p->lines *= x->dim[i];
        if (!axes) continue;
        om_walk_axis *w = &axes[p->walk.rank++];
        w->dim = x->dim[i];
        for (int k = 0; k <= a->n_in; k++) w->stride[k] = (k < a->n_in ? &a->in[k] : &a->out[0])->stride[i];
    }
    p->tasks = p->lines < CUM_TASKS ? p->lines : CUM_TASKS;
    p->line_size = (p->len * 8 + 63) & ~(int64_t)63;
    p->task_size = p->line_size * (p->n_in == 1 ? 1 : 3);
}

int64_t om_cpu_scratch_cumprod(om_ctx *cx, const om_args *a) {
    cum_plan p;
    (void)cx;
    cum_layout(a, &p, NULL);
    return p.tasks * p.task_size;
}

om_status om_cpu_prepare_cumprod(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    cum_plan *p = om_arena_alloc(mem, sizeof *p);
    om_walk_axis *axes = om_arena_alloc(mem, OM_RANK * sizeof *axes);
    if (!p || !axes) return cx->status;
    cum_layout(a, p, axes);
    *prep = p;
    return OM_OK;
}

om_status om_cpu_run_cumprod(om_ctx *cx, const om_args *a) {
    cum_plan p = *(const cum_plan *)a->prep;
    if (!p.lines || !p.len) return OM_OK;
    for (int k = 0; k < p.n_in; k++) p.in[k] = a->in[k].data;
    p.y = a->out[0].data, p.scratch = a->scratch;
    om_parallel_for(cx, p.tasks, p.lines * p.len < 16384 ? p.tasks : 1, cum_tasks, &p);
    return OM_OK;
}
