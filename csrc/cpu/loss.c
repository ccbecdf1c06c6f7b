/* loss.c - ops/loss.c on the CPU: every logit is read once, and in the gradient written once. Row losses are summed in
 * row order, in double: the same bits for any number of threads. A label out of range is noted as a fault and its row
 * counts as ignored. Attributes and sizes are read once per plan.
 *
 * The gradient of some rows (idx) may overwrite the logits too: row i is made of row idx[i] >= i, so in ascending order
 * nothing is overwritten that is still to be read. Threads then share the columns, in pieces that are whole blocks of
 * the kernel: the bits are those of the gradient of all rows.
 */
#include "cpu/cpu.h"
#include "cpu/copy.h"
#include "cpu/fault.h"
#include "cpu/loss.h"
#include "ops/attr.h"
#include "ops/loss.h"
#include "graph/half.h"

#include <math.h>

static double float_at(const om_tensor *t, int64_t element) {
    switch (t->dtype) {
    case OM_F64: return ((const double *)t->data)[element];
    case OM_F32: return ((const float *)t->data)[element];
    case OM_BF16: return om_bf16_to_f32(((const uint16_t *)t->data)[element]);
    default: return om_f16_to_f32(((const uint16_t *)t->data)[element]);
    }
}

static void float_put(om_tensor *t, int64_t element, double x) {
    switch (t->dtype) {
    case OM_F64: ((double *)t->data)[element] = x; break;
    case OM_F32: ((float *)t->data)[element] = (float)x; break;
    case OM_BF16: ((uint16_t *)t->data)[element] = om_f32_to_bf16((float)x); break;
    default: ((uint16_t *)t->data)[element] = om_f32_to_f16((float)x);
    }
}

/* --- what both need ------------------------------------------------------------------------------------ */

/* Made once per plan; a run copies it and puts the operands in. */
typedef struct loss_job {
    const om_tensor *x, *labels, *g;  /* (n, c), (n), gradient: forward: NULL */
    const om_tensor *lse_in;
    om_tensor *lse_out, *dx;
    const struct om_loss_type *k;
    const void *weight;               /* (c) compute type, or NULL */
    double *row_loss, *row_weight;    /* (n) forward */
    double smoothing, weight_sum, scale; /* scale: of the gradient, all but g_i */
    int64_t ignore, n, c, grain;
    uint8_t reduction;
    bool weighted;
    om_fault *fault;
    const int64_t *idx;               /* gradient of these rows, as many as `rows` */
    int64_t rows, share;              /* share: columns at once */
} loss_job;

enum { LOSS_BLOCK = 512 /* loss.k.c's */, LOSS_SHARES = 16 };

static int64_t label_at(const loss_job *j, int64_t i) {
    int64_t at = i * j->labels->stride[0];
    return j->labels->dtype == OM_I64 ? ((const int64_t *)j->labels->data)[at] : ((const int32_t *)j->labels->data)[at];
}

static double weight_at(const loss_job *j, int64_t c) {
    return !j->weight ? 1 : j->x->dtype == OM_F64 ? ((const double *)j->weight)[c] : ((const float *)j->weight)[c];
}

static int64_t weight_bytes(const om_tensor *x, const om_tensor *w) {
    return w->dtype ? ((x->dtype == OM_F64 ? 8 : 4) * x->dim[1] + 63) & ~(int64_t)63 : 0;
}

/* The label of row i; one out of range is noted (*noted: one of this range was) and counts as to be ignored. */
static int64_t label_checked(const loss_job *j, int64_t i, bool *noted) {
    const int64_t y = label_at(j, i);
    if (y == j->ignore || om_index_fits(y, j->c)) return y;
    if (!*noted) om_fault_note(j->fault, OM_FAULT_LABEL, y, i, j->c);
    *noted = true;
    return j->ignore;
}

/* logits, labels, weight? are operands `first` and on */
static om_status loss_prepare(om_ctx *cx, om_arena *mem, const om_args *a, int first, const void **prep) {
    const om_tensor *x = &a->in[first], *labels = x + 1, *w = a->n_in > first + 2 ? x + 2 : NULL;
    loss_job *j = om_arena_alloc(mem, sizeof *j);
    if (!(*prep = j)) return cx->status;
    *j = (loss_job){.k = &OM_PICK(om_loss)->type[x->dtype],
                    .smoothing = om_args_float(a, "label_smoothing", 0),
                    .scale = 1,
                    .ignore = attr_value(a, "ignore_index", -100),
                    .n = x->dim[0],
                    .c = x->dim[1],
                    .reduction = (uint8_t)om_args_int(a, "reduction", OM_LOSS_MEAN),
                    .weighted = w && w->dtype};
    j->weight_sum = (double)j->c;
    j->grain = 1 + 32768 / (j->c + 1);
    j->share = (j->c / LOSS_SHARES / LOSS_BLOCK + 1) * LOSS_BLOCK;
    OM_CHECK(cx, labels->dim[0] == j->n, "%s: %lld labels for %lld rows of logits", a->node->op->name,
             (long long)labels->dim[0], (long long)j->n);
    OM_CHECK(cx, !j->weighted || w->dim[0] == j->c, "%s: %lld class weights for %lld classes", a->node->op->name,
             (long long)(w ? w->dim[0] : 0), (long long)j->c);
    return OM_OK;
}

/* Puts the operands in and converts the weights into `memory`. Rows past the count are left out: their labels are to
 * be ignored (graph/bounded.c). */
static void loss_begin(const om_args *a, int first, char *memory, loss_job *j) {
    const om_tensor *w = &a->in[first + 2];
    j->rows = j->n;
    if (a->count && !a->past) j->rows = *a->count < 0 ? 0 : *a->count < j->n ? *a->count : j->n;
    j->x = &a->in[first];
    j->labels = &a->in[first + 1];
    j->fault = a->fault;
    if (!j->weighted) return;
    const int wide = om_compute_dtype(j->x->dtype);
    OM_PICK(om_copy)->convert[w->dtype][wide](w->data, w->stride[0] * (int64_t)om_dtype_size(w->dtype), memory,
                                              (int64_t)om_dtype_size(wide), j->c);
    j->weight = memory;
    j->weight_sum = 0;
    for (int64_t c = 0; c < j->c; c++) j->weight_sum += weight_at(j, c);
}

/* --- forward --------------------------------------------------------------------------------------------- */

int64_t om_cpu_scratch_cross_entropy(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 16 * a->in[0].dim[0] + (a->n_in > 2 ? weight_bytes(&a->in[0], &a->in[2]) : 0);
}

static void cross_entropy_range(void *arg, int64_t begin, int64_t end) {
    const loss_job *j = arg;
    const int64_t size = (int64_t)om_dtype_size(j->x->dtype), sx = j->x->stride[1] * size;
    bool noted = false;
    for (int64_t i = begin; i < end; i++) {
        const int64_t y = label_checked(j, i, &noted);
        const char *x = (const char *)j->x->data + i * j->x->stride[0] * size;
        j->row_loss[i] = j->row_weight[i] = 0;
        if (y == j->ignore) {
            float_put(j->lse_out, i, 0);
            continue;
        }
        double lse = j->k->lse(x, sx, j->c), w = j->row_weight[i] = weight_at(j, y);
        float_put(j->lse_out, i, lse);
        j->row_loss[i] = w * (lse - float_at(j->x, i * j->x->stride[0] + y * j->x->stride[1]));
        if (j->smoothing > 0)
            j->row_loss[i] = (1 - j->smoothing) * j->row_loss[i] +
                             j->smoothing / (double)j->c * j->k->smooth(x, sx, j->c, lse, j->weight);
    }
}

om_status om_cpu_prepare_cross_entropy(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return loss_prepare(cx, mem, a, 0, prep);
}

om_status om_cpu_run_cross_entropy(om_ctx *cx, const om_args *a) {
    loss_job j = *(const loss_job *)a->prep;
    j.lse_out = &a->out[1];
    j.row_loss = a->scratch, j.row_weight = j.row_loss + j.n;
    loss_begin(a, 0, (char *)(j.row_weight + j.n), &j);
    om_parallel_for(cx, j.rows, j.grain, cross_entropy_range, &j);
    double sum = 0, denom = 0;
    for (int64_t i = 0; i < j.rows; i++) {
        sum += j.row_loss[i];
        denom += j.row_weight[i];
        if (j.reduction == OM_LOSS_NONE) float_put(&a->out[0], i, j.row_loss[i]);
    }
    if (j.reduction != OM_LOSS_NONE) float_put(&a->out[0], 0, j.reduction == OM_LOSS_MEAN ? sum / denom : sum);
    float_put(&a->out[2], 0, denom);
    return OM_OK;
}

/* --- gradient --------------------------------------------------------------------------------------------- */

int64_t om_cpu_scratch_cross_entropy_grad(om_ctx *cx, const om_args *a) {
    (void)cx;
    return weight_bytes(&a->in[1], &a->in[3]);
}

static void cross_entropy_grad_range(void *arg, int64_t begin, int64_t end) {
    const loss_job *j = arg;
    const int64_t size = (int64_t)om_dtype_size(j->x->dtype), sx = j->x->stride[1] * size;
    const double e = j->smoothing;
    const int64_t step = j->reduction == OM_LOSS_NONE ? j->g->stride[0] : 0; /* one gradient a row, or for all */
    bool noted = false;
    for (int64_t i = begin; i < end; i++) {
        const int64_t y = label_checked(j, i, &noted), at = i * j->c;
        char *dx = (char *)j->dx->data + at * size;
        if (y == j->ignore) {
            memset(dx, 0, (size_t)(j->c * size));
            continue;
        }
        double g = j->scale * float_at(j->g, i * step), lse = float_at(j->lse_in, i);
        double hit = (1 - e) * weight_at(j, y), each = e / (double)j->c;
        double all = hit + each * j->weight_sum;
        double xy = float_at(j->x, i * j->x->stride[0] + y * j->x->stride[1]); /* dx may overwrite x */
        j->k->grad((const char *)j->x->data + i * j->x->stride[0] * size, sx, j->c, lse, g * all, g * each, j->weight,
                   dx);
        float_put(j->dx, at + y, g * (all * exp(xy - lse) - (each * weight_at(j, y) + hit)));
    }
}

/* Columns [from, to) of row `at` of the gradient, made of row i. */
static void grad_piece(const loss_job *j, int64_t at, int64_t i, int64_t from, int64_t to, bool *noted) {
    const int64_t size = (int64_t)om_dtype_size(j->x->dtype), sx = j->x->stride[1] * size;
    const int64_t y = label_checked(j, i, noted);
    char *dx = (char *)j->dx->data + (at * j->c + from) * size;
    if (y == j->ignore) {
        memset(dx, 0, (size_t)((to - from) * size));
        return;
    }
    const double e = j->smoothing, g = j->scale * float_at(j->g, 0), lse = float_at(j->lse_in, i);
    const double hit = (1 - e) * weight_at(j, y), each = e / (double)j->c, all = hit + each * j->weight_sum;
    const int64_t row = i * j->x->stride[0], wide = (int64_t)om_dtype_size(om_compute_dtype(j->x->dtype));
    const bool here = y >= from && y < to;
    const double xy = here ? float_at(j->x, row + y * j->x->stride[1]) : 0;
    j->k->grad((const char *)j->x->data + row * size + from * sx, sx, to - from, lse, g * all, g * each,
               j->weight ? (const char *)j->weight + from * wide : NULL, dx);
    if (here) float_put(j->dx, at * j->c + y, g * (all * exp(xy - lse) - (each * weight_at(j, y) + hit)));
}

static void grad_rows(void *arg, int64_t begin, int64_t end) {
    const loss_job *j = arg;
    bool noted = false;
    for (int64_t at = begin; at < end; at++) grad_piece(j, at, j->idx[at], 0, j->c, &noted);
}

static void grad_columns(void *arg, int64_t begin, int64_t end) {
    const loss_job *j = arg;
    bool noted = false;
    for (int64_t u = begin; u < end; u++) {
        const int64_t from = u * j->share, to = from + j->share < j->c ? from + j->share : j->c;
        for (int64_t at = 0; at < j->rows; at++) grad_piece(j, at, j->idx[at], from, to, &noted);
    }
}

static om_status grad_some(om_ctx *cx, const om_args *a, loss_job *j) {
    const int64_t count = *(const int64_t *)a->in[7].data, size = (int64_t)om_dtype_size(j->x->dtype);
    j->idx = a->in[6].data;
    j->rows = count < 0 ? 0 : count < j->n ? count : j->n;
    for (int64_t i = 0; i < j->rows; i++)
        if (j->idx[i] < i || j->idx[i] >= j->n)
            return om_fail(cx, OM_INTERNAL, "cross_entropy_grad: idx is no list of a select_rows");
    const bool moves = j->x->data == j->dx->data && j->rows && j->idx[j->rows - 1] != j->rows - 1;
    if (moves) om_parallel_for(cx, (j->c + j->share - 1) / j->share, 1, grad_columns, j);
    else om_parallel_for(cx, j->rows, j->grain, grad_rows, j);
    if (a->past || !a->count)
        memset((char *)j->dx->data + j->rows * j->c * size, 0, (size_t)((j->n - j->rows) * j->c * size));
    return OM_OK;
}

om_status om_cpu_prepare_cross_entropy_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return loss_prepare(cx, mem, a, 1, prep);
}

om_status om_cpu_run_cross_entropy_grad(om_ctx *cx, const om_args *a) {
    loss_job j = *(const loss_job *)a->prep;
    j.g = &a->in[0], j.lse_in = &a->in[4], j.dx = &a->out[0];
    loss_begin(a, 1, a->scratch, &j);
    if (j.reduction == OM_LOSS_MEAN) j.scale = 1 / float_at(&a->in[5], 0);
    if (a->n_in > 6) return grad_some(cx, a, &j);
    om_parallel_for(cx, j.rows, j.grain, cross_entropy_grad_range, &j);
    return OM_OK;
}
