/* ctc.c - ops/ctc.c on the CPU: a row of the batch at a time, in double and in logarithms.
 *
 * With l the targets and a blank before, between and behind them (2 s + 1 entries), alpha[t][i] is the logarithm of all
 * beginnings of paths that are at entry i at time t, beta[t][i] of all ends; from i one goes to i, i + 1 or, between
 * different targets, i + 2. The backward computes alpha again instead of keeping it. Lengths and targets that do not
 * fit are faults; what is computed then stays inside of its tensors. */
#include "cpu/cpu.h"
#include "cpu/fault.h"

#include <math.h>

enum { CTC_TASKS = 16 };

typedef struct ctc_plan {
    int64_t time, rows, classes, bound, listed, blank, tasks, columns, task_size, list_size;
    int first, wide, zero, concatenated;
} ctc_plan;

typedef struct ctc_job {
    ctc_plan p;
    const void *dy, *x;
    const int64_t *targets, *inputs, *lengths;
    const int64_t *list; /* the targets one after another; NULL: rows */
    int64_t *begin;      /* of a row's targets in the list */
    char *scratch, *to;
    om_fault *fault;
} ctc_job;

static void ctc_layout(const om_args *a, ctc_plan *p) {
    const int first = a->n_in == 6;
    const om_tensor *x = &a->in[first], *t = &a->in[first + 1];
    const bool valid = a->in[first + 2].dtype != OM_NODTYPE;
    *p = (ctc_plan){.time = x->dim[0], .rows = x->dim[1], .classes = x->dim[2], .first = first,
                    .bound = t->dim[t->rank - 1], .listed = om_numel(t), .blank = om_args_int(a, "blank", 0),
                    .wide = x->dtype == OM_F64, .zero = (int)om_args_int(a, "zero_infinity", 0),
                    .concatenated = valid || t->rank == 1};
    p->tasks = p->rows < CTC_TASKS ? p->rows : CTC_TASKS;
    p->columns = 2 * p->bound + 1;
    /* forward: two lines of alpha; backward: all of alpha, two lines of beta, the classes of one time */
    p->task_size = om_size_mul(first ? om_size_mul(p->time + 2, p->columns) + p->classes : 2 * p->columns,
                               (int64_t)sizeof(double));
    p->list_size = (p->listed + p->rows) * (int64_t)sizeof(int64_t);
}

int64_t om_cpu_scratch_ctc(om_ctx *cx, const om_args *a) {
    ctc_plan p;
    (void)cx;
    ctc_layout(a, &p);
    return om_size_add(p.list_size, om_size_mul(p.tasks, p.task_size));
}

om_status om_cpu_prepare_ctc(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    ctc_plan *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    ctc_layout(a, p);
    OM_CHECK(cx, p->blank >= 0 && p->blank < p->classes, "%s: blank %lld of %lld classes", a->node->op->name,
             (long long)p->blank, (long long)p->classes);
    OM_CHECK(cx, om_numel(&a->in[p->first + 3]) == p->rows && om_numel(&a->in[p->first + 4]) == p->rows,
             "%s: lengths for %lld rows are needed", a->node->op->name, (long long)p->rows);
    OM_CHECK(cx, a->in[p->first + 2].dtype == OM_NODTYPE || om_numel(&a->in[p->first + 2]) == p->listed,
             "%s: valid has another size than the targets", a->node->op->name);
    OM_CHECK(cx, p->concatenated || a->in[p->first + 1].dim[0] == p->rows, "%s: targets for %lld rows are needed",
             a->node->op->name, (long long)p->rows);
    return OM_OK;
}

static double ctc_sum(double a, double b) {
    const double m = a > b ? a : b;
    return m == (double)-INFINITY ? m : m + log1p(exp((a > b ? b : a) - m));
}

static double ctc_at(const ctc_job *j, int64_t t, int64_t row, int64_t c) {
    const int64_t i = (t * j->p.rows + row) * j->p.classes + c;
    return j->p.wide ? ((const double *)j->x)[i] : (double)((const float *)j->x)[i];
}

typedef struct ctc_row { const int64_t *target; int64_t time, n, row; } ctc_row; /* n: entries with blanks */

static int64_t ctc_entry(const ctc_job *j, const ctc_row *r, int64_t i) {
    if (i % 2 == 0) return j->p.blank;
    const int64_t c = r->target[i / 2];
    return om_index_fits(c, j->p.classes) ? c : 0;
}

/* May one go from entry i - 2 to entry i? */
static bool ctc_skips(const ctc_job *j, const ctc_row *r, int64_t i) {
    return i >= 2 && i % 2 && ctc_entry(j, r, i) != ctc_entry(j, r, i - 2);
}

/* A line of alpha from the one before; NULL: the first */
static void ctc_forward(const ctc_job *j, const ctc_row *r, int64_t t, const double *before, double *now) {
    for (int64_t i = 0; i < r->n; i++) {
        double a = (double)-INFINITY;
        if (!before) a = i < 2 ? 0 : a;
        else {
            a = i ? ctc_sum(before[i], before[i - 1]) : before[i];
            if (ctc_skips(j, r, i)) a = ctc_sum(a, before[i - 2]);
        }
        now[i] = a + ctc_at(j, t, r->row, ctc_entry(j, r, i));
    }
}

static double ctc_end(const ctc_row *r, const double *last) {
    return -(r->n > 1 ? ctc_sum(last[r->n - 1], last[r->n - 2]) : last[0]);
}

/* The row's targets and lengths, made to fit. */
static ctc_row ctc_row_of(const ctc_job *j, int64_t row) {
    const ctc_plan *p = &j->p;
    int64_t time = j->inputs[row], n = j->lengths[row];
    const int64_t begin = p->concatenated ? j->begin[row] : 0;
    if (time < 0 || time > p->time) om_fault_note(j->fault, OM_FAULT_INDEX, time, row, p->time + 1), time = 0;
    if (n < 0 || n > p->bound) om_fault_note(j->fault, OM_FAULT_INDEX, n, row, p->bound + 1), n = 0;
    if (p->concatenated && begin + n > p->listed) n = 0; /* noted by ctc_list */
    const int64_t *target = p->concatenated ? j->list + begin : j->targets + row * p->bound;
    for (int64_t i = 0; i < n; i++)
        if (!om_index_fits(target[i], p->classes)) {
            om_fault_note(j->fault, OM_FAULT_LABEL, target[i], row, p->classes);
            break;
        }
    return (ctc_row){target, time, 2 * n + 1, row};
}

static void ctc_put(const ctc_job *j, int64_t i, double v) {
    if (j->p.wide) ((double *)(void *)j->to)[i] = v;
    else ((float *)(void *)j->to)[i] = (float)v;
}

static double ctc_loss_of(const ctc_job *j, const ctc_row *r, double *alpha, bool all) {
    const int64_t columns = j->p.columns;
    if (r->time == 0) return r->n == 1 ? 0 : (double)INFINITY;
    double *now = alpha;
    ctc_forward(j, r, 0, NULL, now);
    for (int64_t t = 1; t < r->time; t++) {
        double *next = all ? now + columns : alpha + t % 2 * columns;
        ctc_forward(j, r, t, now, next);
        now = next;
    }
    return ctc_end(r, now);
}

static void ctc_losses(void *arg, int64_t begin, int64_t end) {
    const ctc_job *j = arg;
    for (int64_t k = begin; k < end; k++)
        for (int64_t row = j->p.rows * k / j->p.tasks; row < j->p.rows * (k + 1) / j->p.tasks; row++) {
            const ctc_row r = ctc_row_of(j, row);
            const double y = ctc_loss_of(j, &r, (double *)(void *)(j->scratch + k * j->p.task_size), false);
            ctc_put(j, row, j->p.zero && y == (double)INFINITY ? 0 : y);
        }
}

/* A line of beta from the one after it; NULL: the last */
static void ctc_backward(const ctc_job *j, const ctc_row *r, int64_t t, const double *after, double *now) {
    for (int64_t i = 0; i < r->n; i++) {
        double b = (double)-INFINITY;
        if (!after) b = i >= r->n - 2 ? 0 : b;
        else {
            b = i + 1 < r->n ? ctc_sum(after[i], after[i + 1]) : after[i];
            if (i + 2 < r->n && ctc_skips(j, r, i + 2)) b = ctc_sum(b, after[i + 2]);
        }
        now[i] = b + ctc_at(j, t, r->row, ctc_entry(j, r, i));
    }
}

static void ctc_gradient_of(const ctc_job *j, const ctc_row *r, double *alpha) {
    const ctc_plan *p = &j->p;
    double *beta = alpha + p->time * p->columns, *share = beta + 2 * p->columns;
    const double loss = ctc_loss_of(j, r, alpha, true);
    const double dy = p->wide ? ((const double *)j->dy)[r->row] : (double)((const float *)j->dy)[r->row];
    const bool none = p->zero && loss == (double)INFINITY;
    const double *after = NULL;
    for (int64_t t = p->time - 1; t >= 0; t--) {
        const int64_t at = (t * p->rows + r->row) * p->classes;
        if (t >= r->time || none) {
            for (int64_t c = 0; c < p->classes; c++) ctc_put(j, at + c, 0);
            continue;
        }
        double *now = beta + t % 2 * p->columns;
        ctc_backward(j, r, t, after, now);
        after = now;
        for (int64_t c = 0; c < p->classes; c++) share[c] = (double)-INFINITY;
        for (int64_t i = 0; i < r->n; i++) {
            const int64_t c = ctc_entry(j, r, i);
            share[c] = ctc_sum(share[c], alpha[t * p->columns + i] + now[i]);
        }
        for (int64_t c = 0; c < p->classes; c++) {
            const double x = ctc_at(j, t, r->row, c);
            ctc_put(j, at + c, (exp(x) - exp(share[c] + loss - x)) * dy);
        }
    }
}

static void ctc_gradients(void *arg, int64_t begin, int64_t end) {
    const ctc_job *j = arg;
    for (int64_t k = begin; k < end; k++)
        for (int64_t row = j->p.rows * k / j->p.tasks; row < j->p.rows * (k + 1) / j->p.tasks; row++) {
            const ctc_row r = ctc_row_of(j, row);
            ctc_gradient_of(j, &r, (double *)(void *)(j->scratch + k * j->p.task_size));
        }
}

/* Where the targets of each row begin, of those that are valid. */
static void ctc_list(ctc_job *j, const uint8_t *valid, int64_t *list, int64_t *begin) {
    int64_t n = 0, sum = 0;
    j->list = valid ? list : j->targets;
    for (int64_t i = 0; valid && i < j->p.listed; i++)
        if (valid[i]) list[n++] = j->targets[i];
    if (!valid) n = j->p.listed;
    for (int64_t row = 0; row < j->p.rows; row++) {
        begin[row] = sum;
        if (j->lengths[row] > 0 && j->lengths[row] <= n) sum += j->lengths[row];
        else if (j->lengths[row] > n) sum = n + 1;
        if (sum > n) sum = n + 1; /* no overflow */
    }
    if (sum != n) om_fault_note(j->fault, OM_FAULT_INDEX, sum, j->p.rows ? j->p.rows - 1 : 0, n + 1);
    for (int64_t row = 0; row < j->p.rows; row++)
        if (begin[row] > n) begin[row] = n;
    j->p.listed = n;
}

om_status om_cpu_run_ctc(om_ctx *cx, const om_args *a) {
    ctc_job j = {.p = *(const ctc_plan *)a->prep, .to = a->out[0].data, .fault = a->fault};
    const om_tensor *in = a->in + j.p.first;
    if (!j.p.rows) return OM_OK;
    j.dy = a->in[0].data, j.x = in[0].data, j.targets = in[1].data, j.inputs = in[3].data, j.lengths = in[4].data;
    j.begin = a->scratch;
    j.scratch = (char *)a->scratch + j.p.list_size;
    if (j.p.concatenated)
        ctc_list(&j, in[2].dtype == OM_NODTYPE ? NULL : in[2].data, j.begin + j.p.rows, j.begin);
    om_parallel_for(cx, j.p.tasks, 1, j.p.first ? ctc_gradients : ctc_losses, &j);
    return OM_OK;
}
