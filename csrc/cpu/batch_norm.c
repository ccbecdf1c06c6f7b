/* batch_norm.c - ops/batch_norm.c on the CPU.
 *
 * Two passes (mean, then squared distances), so a large mean costs no accuracy. Channels are split among threads; each
 * sum has one order. Per-channel numbers are double.
 */
#include "cpu/cpu.h"
#include "cpu/batch_norm.h"

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

int64_t om_cpu_scratch_batch_norm(om_ctx *cx, const om_args *a) {
    (void)cx;
    return NORM_VECTORS * 8 * a->in[a->node->op == &om_op_batch_norm_grad].dim[1];
}

static void norm_setup(norm_job *j, const om_tensor *x, double *scratch) {
    j->n = x->dim[0];
    j->c = x->dim[1];
    j->inner = 1;
    j->f64 = x->dtype == OM_F64;
    for (int i = 2; i < x->rank; i++) j->inner *= x->dim[i];
    j->k = &OM_PICK(om_batch_norm)->type[x->dtype];
    double **v[NORM_VECTORS] = {&j->mean, &j->rstd, &j->a, &j->b, &j->s, &j->t};
    for (int i = 0; i < NORM_VECTORS; i++) *v[i] = scratch + i * j->c;
}

/* Per-channel numbers to and from double; a left-out operand gives `dflt` everywhere. */
static om_status channel_read(om_ctx *cx, const om_args *a, int operand, int64_t c, double dflt, double *to) {
    for (int64_t i = 0; i < c; i++) to[i] = dflt;
    if (operand >= a->n_in || !a->in[operand].dtype) return OM_OK;
    om_tensor t = {.data = to, .dtype = OM_F64, .rank = 1, .device = -1, .dim = {c}, .stride = {1}};
    return om_copy(cx, &a->in[operand], &t);
}
static om_status channel_write(om_ctx *cx, double *from, om_tensor *to) {
    om_tensor t = {.data = from, .dtype = OM_F64, .rank = 1, .device = -1, .dim = {to->dim[0]}, .stride = {1}};
    return om_copy(cx, &t, to);
}

static int64_t norm_grain(const norm_job *j) {
    int64_t g = 1 + 16384 / (j->n * j->inner + 1);
    return j->inner == 1 && g < 64 ? 64 : g; /* rows: whole cache lines of neighbouring channels */
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
    const om_tensor *x = &a->in[0];
    norm_job j = {.x = x->data,
                  .y = a->out[0].data,
                  .eps = om_args_float(a, "eps", 1e-5),
                  .batch = om_args_int(a, "training", 0) != 0};
    norm_setup(&j, x, a->scratch);
    const int64_t count = j.n * j.inner;
    const double m = om_args_float(a, "momentum", 0.1);
    OM_CHECK(cx, !j.batch || count != 1 || j.c == 0, "batch_norm: %lld value per channel; training needs more than one",
             (long long)count);
    OM_TRY(channel_read(cx, a, 1, j.c, 1, j.a));
    OM_TRY(channel_read(cx, a, 2, j.c, 0, j.b));
    if (!j.batch) {
        OM_TRY(channel_read(cx, a, 3, j.c, 0, j.mean));
        OM_TRY(channel_read(cx, a, 4, j.c, 1, j.s));
    }
    om_parallel_for(cx, j.c, norm_grain(&j), norm_forward_range, &j);
    OM_TRY(channel_write(cx, j.mean, &a->out[3]));
    OM_TRY(channel_write(cx, j.rstd, &a->out[4]));
    if (j.batch) {
        const bool running = a->n_in > 3 && a->in[3].dtype;
        OM_TRY(channel_read(cx, a, 3, j.c, 0, j.a));
        OM_TRY(channel_read(cx, a, 4, j.c, 0, j.b));
        for (int64_t c = 0; c < j.c; c++) {
            double unbiased = j.s[c] * ((double)count / (double)(count - 1));
            if (running && !count) { /* as torch: of nothing, nothing is learned */
                j.mean[c] = j.a[c];
                j.s[c] = j.b[c];
                continue;
            }
            j.mean[c] = running ? (1 - m) * j.a[c] + m * j.mean[c] : j.mean[c];
            j.s[c] = running ? (1 - m) * j.b[c] + m * unbiased : unbiased;
        }
    }
    OM_TRY(channel_write(cx, j.mean, &a->out[1]));
    return channel_write(cx, j.s, &a->out[2]);
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
    const om_tensor *x = &a->in[1];
    norm_job j = {.x = x->data, .dy = a->in[0].data, .y = a->out[0].data, .batch = om_args_int(a, "training", 0) != 0};
    norm_setup(&j, x, a->scratch);
    OM_TRY(channel_read(cx, a, 2, j.c, 1, j.a));
    OM_TRY(channel_read(cx, a, 3, j.c, 0, j.mean));
    OM_TRY(channel_read(cx, a, 4, j.c, 1, j.rstd));
    om_parallel_for(cx, j.c, norm_grain(&j), norm_grad_range, &j);
    OM_TRY(channel_write(cx, j.t, &a->out[1]));
    return channel_write(cx, j.s, &a->out[2]);
}
