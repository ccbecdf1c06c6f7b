/* batch_norm.c - batch normalisation over every axis but the channel (axis 1), as torch.nn.functional.batch_norm.
 *
 *   training   mean, var (biased) of the batch;  new_mean = (1 - m) running_mean + m mean,  new_var with the unbiased
 *              variance
 *   eval       mean, var = the running ones, which come out unchanged
 *   y = (x - mean) rstd w + b,  rstd = 1 / sqrt(var + eps)
 *   gradient   db = sum dy,  dw = rstd sum dy (x - mean);
 *              training: dx = rstd w (dy - db / N - (x - mean) rstd dw / N),   eval: dx = rstd w dy
 *
 * Two passes (mean, then squared distances), so a large mean costs no accuracy. Channels are split among threads; each
 * sum has one order. Per-channel numbers are double; w, b and the statistics may be of any float type. Operands must be
 * dense.
 */
#include "cpu/batch_norm.h"
#include "ops/attr.h"

#include <math.h>

static om_status channel_check(om_graph *g, const om_node *n, int operand, const om_type *x, const char *what) {
    if (operand >= n->n_in || om_ins(g, n)[operand] == OM_NONE) return OM_OK;
    const om_type *t = om_ty(g, om_ins(g, n)[operand]);
    OM_CHECK(g->cx, t->rank == 1 && om_is_float(t->dtype) && !attr_differs(g, t->dim[0], x->dim[1]),
             "%s: %s is %s of rank %d with size %lld; floats with one entry per channel (%lld) are needed", n->op->name,
             what, om_dtype_name(t->dtype), t->rank, (long long)t->dim[0], (long long)x->dim[1]);
    return OM_OK;
}

static om_type channel_type(const om_type *x, int dtype) {
    return (om_type){.dtype = (uint8_t)dtype, .rank = 1, .device = x->device, .dim = {x->dim[1]}};
}

static om_status batch_norm_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *x = om_ty(g, in[0]);
    const bool mean = n->n_in > 3 && in[3] != OM_NONE, var = n->n_in > 4 && in[4] != OM_NONE;
    static const char *const names[] = {"x", "weight", "bias", "running_mean", "running_var"};
    OM_CHECK(g->cx, x->rank >= 2 && om_is_float(x->dtype),
             "batch_norm: x is %s of rank %d; floats (n, c, ...) are needed", om_dtype_name(x->dtype), x->rank);
    for (int i = 1; i < 5; i++) OM_TRY(channel_check(g, n, i, x, names[i]));
    OM_CHECK(g->cx, mean == var, "batch_norm: running_mean and running_var must both be given or both left out");
    OM_CHECK(g->cx, mean || om_node_int(n, "training", 0),
             "batch_norm: without running statistics only training = 1 is possible");
    int compute = om_compute_dtype(x->dtype);
    out[0] = *x;
    out[1] = channel_type(x, mean ? om_ty(g, in[3])->dtype : compute);
    out[2] = channel_type(x, var ? om_ty(g, in[4])->dtype : compute);
    out[3] = out[4] = channel_type(x, compute);
    return OM_OK;
}

static om_status batch_norm_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id *in = om_ins(g, n);
    om_id x = in[0], w = n->n_in > 1 ? in[1] : OM_NONE, bias = n->n_in > 2 ? in[2] : OM_NONE;
    if (dy[0] == OM_NONE) return OM_OK;
    om_id first = om_make(g, &om_op_batch_norm_grad, OM_IN(dy[0], x, w, n->out + 3, n->out + 4),
                          OM_ATTRS(OM_AI("training", om_node_int(n, "training", 0))));
    if (first == OM_NONE) return g->cx->status;
    if (want[0]) dx[0] = first;
    if (w != OM_NONE && want[1]) dx[1] = om_b_cast(g, first + 1, om_ty(g, w)->dtype);
    if (bias != OM_NONE && want[2]) dx[2] = om_b_cast(g, first + 2, om_ty(g, bias)->dtype);
    return OM_OK;
}

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

static int64_t norm_scratch(om_ctx *cx, const om_args *a) {
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

static om_status batch_norm_run(om_ctx *cx, const om_args *a) {
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

const om_op om_op_batch_norm = {
    .name = "batch_norm",
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 5,
    .n_out = 5,
    .dense = 1u,
    .doc = "(x (n, c, ...), weight?, bias?, running_mean?, running_var?) training momentum eps -> y, new_mean, "
           "new_var, mean, rstd",
    .infer = batch_norm_infer,
    .grad = batch_norm_grad_build,
    .scratch = norm_scratch,
    .run = batch_norm_run,
};

/* --- gradient ------------------------------------------------------------------------------------------ */

static om_status batch_norm_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *dy = om_ty(g, in[0]), *x = om_ty(g, in[1]);
    OM_CHECK(
        g->cx, x->rank >= 2 && om_is_float(x->dtype) && dy->dtype == x->dtype && dy->rank == x->rank,
        "batch_norm_grad: dy is %s of rank %d, x %s of rank %d; both must be floats of one type and rank, 2 or more",
        om_dtype_name(dy->dtype), dy->rank, om_dtype_name(x->dtype), x->rank);
    for (int i = 0; i < x->rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, x->dim[i], dy->dim[i]),
                 "batch_norm_grad: dy and x differ in size along axis %d", i);
    OM_TRY(channel_check(g, n, 2, x, "weight"));
    OM_TRY(channel_check(g, n, 3, x, "mean"));
    OM_TRY(channel_check(g, n, 4, x, "rstd"));
    out[0] = *x;
    out[1] = out[2] = channel_type(x, in[2] != OM_NONE ? om_ty(g, in[2])->dtype : om_compute_dtype(x->dtype));
    return OM_OK;
}

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

static om_status batch_norm_grad_run(om_ctx *cx, const om_args *a) {
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

const om_op om_op_batch_norm_grad = {
    .name = "batch_norm_grad",
    .kind = OM_K_ROW,
    .min_in = 5,
    .max_in = 5,
    .n_out = 3,
    .optional = 1u << 2,
    .dense = 1u | 1u << 1,
    .inplace = 1u << 0 | 1u << 1,
    .doc = "(dy, x, weight?, mean, rstd) training -> dx, dw, db",
    .infer = batch_norm_grad_infer,
    .scratch = norm_scratch,
    .run = batch_norm_grad_run,
};
