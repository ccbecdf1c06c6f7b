/* batch_norm.c - ops/batch_norm.c on the CPU.
 *
 * Two passes (mean, then squared distances), so a large mean costs no accuracy. Channels are split among threads; each
 * sum has one order. Per-channel numbers are double.
 */
#include "cpu/cpu.h"
#include "cpu/batch_norm.h"
#include "cpu/copy.h"

#include <math.h>

typedef struct norm_job {
    const struct om_batch_norm_type *k;
    const void *x, *dy;
    void *y;                     /* or dx */
    int64_t n, c, inner;
    double *mean, *rstd, *a, *b, *s, *t; /* (c) each: see the callers */
    double eps;
    bool batch;                  /* statistics of the batch */
    bool f64;
} norm_job;

enum { NORM_VECTORS = 6 };

typedef struct norm_prep { /* once per plan: a job without addresses */
    norm_job j;
    double momentum;
    bool running;          /* running statistics are given */
    int64_t grain;
} norm_prep;

int64_t om_cpu_scratch_batch_norm(om_ctx *cx, const om_args *a) {
    (void)cx;
    return NORM_VECTORS * 8 * a->in[a->node->op == &om_op_batch_norm_grad].dim[1];
}

static void norm_at(norm_job *j, double *scratch) {
    double **v[NORM_VECTORS] = {&j->mean, &j->rstd, &j->a, &j->b, &j->s, &j->t};
    for (int i = 0; i < NORM_VECTORS; i++) *v[i] = scratch + i * j->c;
}

/* Per-channel numbers to and from double; a left-out operand gives `dflt` everywhere. */
static void channel_read(const om_args *a, int operand, int64_t c, double dflt, double *to) {
    const om_tensor *t = operand < a->n_in && a->in[operand].dtype ? &a->in[operand] : NULL;
    if (t) OM_PICK(om_copy)->convert[t->dtype][OM_F64](t->data, t->stride[0] * (int64_t)om_dtype_size(t->dtype),
                                                       (char *)to, sizeof *to, c);
    else for (int64_t i = 0; i < c; i++) to[i] = dflt;
}
static void channel_write(const double *from, const om_tensor *to) {
    OM_PICK(om_copy)->convert[OM_F64][to->dtype]((const char *)from, sizeof *from, to->data,
                                                 to->stride[0] * (int64_t)om_dtype_size(to->dtype), to->dim[0]);
}

static int64_t norm_grain(const norm_job *j) {
    int64_t g = 1 + 16384 / (j->n * j->inner + 1);
    return j->inner == 1 && g < 64 ? 64 : g; /* rows: whole cache lines of neighbouring channels */
}

om_status om_cpu_prepare_batch_norm(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const bool grad = om_is(a->node, batch_norm_grad);
    const om_tensor *x = &a->in[grad];
    norm_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    p->j = (norm_job){.k = &OM_PICK(om_batch_norm)->type[x->dtype],
                      .n = x->dim[0],
                      .c = x->dim[1],
                      .inner = 1,
                      .eps = om_args_float(a, "eps", 1e-5),
                      .batch = om_args_int(a, "training", 0) != 0,
                      .f64 = x->dtype == OM_F64};
    for (int i = 2; i < x->rank; i++) p->j.inner *= x->dim[i];
    if (!p->j.inner) p->j.n = 0, p->j.inner = 1; /* nothing, as a table without rows */
    p->momentum = om_args_float(a, "momentum", 0.1);
    p->running = !grad && a->n_in > 3 && a->in[3].dtype;
    p->grain = norm_grain(&p->j);
    for (int i = grad ? 2 : 1; i < a->n_in; i++)
        OM_CHECK(cx, !a->in[i].dtype || a->in[i].dim[0] == p->j.c, "%s: operand %d has %lld entries for %lld channels",
                 a->node->op->name, i, (long long)a->in[i].dim[0], (long long)p->j.c);
    OM_CHECK(cx, grad || !p->j.batch || p->j.n * p->j.inner != 1 || p->j.c == 0,
             "batch_norm: %lld value per channel; training needs more than one", (long long)(p->j.n * p->j.inner));
    return OM_OK;
}

/* To the compute type and back. */
static double norm_rounded(const norm_job *j, double x) { return j->f64 ? x : (double)(float)x; }

static void norm_forward_range(void *arg, int64_t c0, int64_t c1) {
    norm_job *j = arg;
    /* nothing: mean and variance 0, y empty */
    const double count = j->n * j->inner > 0 ? (double)(j->n * j->inner) : 1;
    if (j->batch) { /* s: variance, biased */
        j->k->sums(j->x, j->n, j->c, j->inner, c0, c1, NULL, j->mean, NULL);
        for (int64_t c = c0; c < c1; c++) j->mean[c] = norm_rounded(j, j->mean[c] / count);
        j->k->sums(j->x, j->n, j->c, j->inner, c0, c1, j->mean, j->s, j->t);
        for (int64_t c = c0; c < c1; c++) { /* the first mean was rounded: what is left over corrects both */
            const double rest = j->t[c] / count, var = j->s[c] / count - rest * rest;
            j->mean[c] += rest;
            j->s[c] = var < 0 ? 0 : var;
        }
    }
    /* a: weight, then weight * rstd; b: bias; t: mean as the sweep can subtract it */
    for (int64_t c = c0; c < c1; c++) {
        j->rstd[c] = 1 / sqrt(j->s[c] + j->eps);
        j->a[c] *= j->rstd[c];
        j->t[c] = norm_rounded(j, j->mean[c]);
        j->b[c] -= (j->mean[c] - j->t[c]) * j->a[c];
    }
    j->k->apply(j->x, j->y, j->n, j->c, j->inner, c0, c1, j->t, j->a, j->b);
}

om_status om_cpu_run_batch_norm(om_ctx *cx, const om_args *a) {
    const norm_prep *p = a->prep;
    norm_job j = p->j;
    j.x = a->in[0].data, j.y = a->out[0].data;
    norm_at(&j, a->scratch);
    const int64_t count = j.n * j.inner;
    const double m = p->momentum;
    channel_read(a, 1, j.c, 1, j.a);
    channel_read(a, 2, j.c, 0, j.b);
    if (!j.batch) {
        channel_read(a, 3, j.c, 0, j.mean);
        channel_read(a, 4, j.c, 1, j.s);
    }
    om_parallel_for(cx, j.c, p->grain, norm_forward_range, &j);
    channel_write(j.mean, &a->out[3]);
    channel_write(j.rstd, &a->out[4]);
    if (j.batch) {
        channel_read(a, 3, j.c, 0, j.a);
        channel_read(a, 4, j.c, 0, j.b);
        for (int64_t c = 0; c < j.c; c++) {
            double unbiased = j.s[c] * ((double)count / (double)(count - 1));
            if (p->running && !count) { /* as torch: of nothing, nothing is learned */
                j.mean[c] = j.a[c];
                j.s[c] = j.b[c];
                continue;
            }
            j.mean[c] = p->running ? (1 - m) * j.a[c] + m * j.mean[c] : j.mean[c];
            j.s[c] = p->running ? (1 - m) * j.b[c] + m * unbiased : unbiased;
        }
    }
    channel_write(j.mean, &a->out[1]);
    channel_write(j.s, &a->out[2]);
    return OM_OK;
}

/* --- gradient ------------------------------------------------------------------------------------------ */

static void norm_grad_range(void *arg, int64_t c0, int64_t c1) {
    norm_job *j = arg;
    const double count = (double)(j->n * j->inner);
    j->k->grad_sums(j->dy, j->x, j->n, j->c, j->inner, c0, c1, j->mean, j->s, j->t);
    /* a: weight -> factor of dx; b: what dy loses; t: dot -> dw; rstd -> factor of x - mean */
    for (int64_t c = c0; c < c1; c++) {
        const double dot = j->t[c], r = j->rstd[c];
        j->a[c] *= r;
        j->t[c] = dot * r;
        j->b[c] = j->batch ? j->s[c] / count : 0;
        j->rstd[c] = j->batch ? dot * r * r / count : 0;
    }
    j->k->grad_apply(j->dy, j->x, j->y, j->n, j->c, j->inner, c0, c1, j->mean, j->a, j->b, j->rstd);
}

om_status om_cpu_run_batch_norm_grad(om_ctx *cx, const om_args *a) {
    const norm_prep *p = a->prep;
    norm_job j = p->j;
    j.x = a->in[1].data, j.dy = a->in[0].data, j.y = a->out[0].data;
    norm_at(&j, a->scratch);
    channel_read(a, 2, j.c, 1, j.a);
    channel_read(a, 3, j.c, 0, j.mean);
    channel_read(a, 4, j.c, 1, j.rstd);
    om_parallel_for(cx, j.c, p->grain, norm_grad_range, &j);
    channel_write(j.t, &a->out[1]);
    channel_write(j.s, &a->out[2]);
    return OM_OK;
}
