/* softmax.c - ops/softmax.c on the CPU: rows shared out, or tiles of neighbouring columns. In place is allowed: a row
 * is read before it is written. Which way, and how it is shared out, is decided once per plan.
 */
#include "cpu/cpu.h"
#include "cpu/rows.h"

typedef void (*softmax_fn)(const void *x, void *y, int64_t n);
typedef void (*softmax_grad_fn)(const void *dy, const void *y, void *dx, int64_t n);

typedef struct softmax_prep {
    om_rows_job j;
    softmax_fn fn;        /* of a row, or */
    softmax_grad_fn grad;
    om_cols_fn cols;      /* of a tile of columns; NULL: row by row */
    int64_t tiles, grain; /* tiles per outer index */
} softmax_prep;

static void softmax_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    (void)r, (void)own;
    ((const softmax_prep *)j->arg)->fn(row[0], row[1], j->len);
}
static void softmax_grad_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    (void)r, (void)own;
    ((const softmax_prep *)j->arg)->grad(row[0], row[1], row[2], j->len);
}

static om_rows_job softmax_job(const om_args *a) {
    const om_tensor *x = &a->in[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    om_rows_job j = {.outer = 1, .len = x->rank ? x->dim[axis] : 1, .inner = 1, .n_mat = a->n_in + 1};
    for (int i = 0; i < x->rank; i++)
        if (i < axis) j.outer *= x->dim[i];
        else if (i > axis) j.inner *= x->dim[i];
    for (int k = 0; k < a->n_in; k++) j.mat[k] = (om_rows_mat){NULL, a->in[k].dtype, false};
    j.mat[a->n_in] = (om_rows_mat){NULL, a->out[0].dtype, true};
    j.row = a->n_in == 1 ? softmax_row : softmax_grad_row;
    om_rows_prepare(&j, OM_ROWS_TASKS);
    return j;
}

int64_t om_cpu_scratch_softmax(om_ctx *cx, const om_args *a) {
    (void)cx;
    const om_rows_job j = softmax_job(a);
    return j.n_tasks * j.task_bytes;
}

om_status om_cpu_prepare_softmax(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    softmax_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    const om_rows_job *j = &p->j;
    const int dtype = a->in[0].dtype, f64 = om_compute_dtype(dtype) == OM_F64;
    const struct om_rows_kernels *k = OM_PICK(om_rows);
    const bool log = om_is(a->node, log_softmax) || om_is(a->node, log_softmax_grad);
    const om_cols_fn *cols;
    p->j = softmax_job(a);
    p->j.arg = p;
    if (a->n_in == 1) {
        p->fn = (log ? k->log_softmax : k->softmax)[f64];
        cols = log ? k->log_softmax_cols : k->softmax_cols;
    } else {
        p->grad = (log ? k->log_softmax_grad : k->softmax_grad)[f64];
        cols = log ? k->log_softmax_grad_cols : k->softmax_grad_cols;
    }
    if (j->inner < 8 || dtype != om_compute_dtype(dtype)) return OM_OK;
    p->cols = cols[f64];
    p->tiles = (j->inner + OM_ROWS_COLS - 1) / OM_ROWS_COLS;
    p->grain = 16384 / (j->len * (j->inner < OM_ROWS_COLS ? j->inner : OM_ROWS_COLS) + 1) + 1;
    return OM_OK;
}

/* An inner axis of some length: tiles of neighbouring columns are read and written whole, instead of row after row with
 * gaps. */
static void cols_range(void *arg, int64_t begin, int64_t end) {
    const om_rows_job *j = arg;
    const softmax_prep *p = j->arg;
    const int64_t e = (int64_t)om_dtype_size(j->mat[0].dtype);
    for (int64_t u = begin; u < end; u++) {
        const int64_t o = u / p->tiles, c0 = (u - o * p->tiles) * OM_ROWS_COLS, at = (o * j->len * j->inner + c0) * e;
        const int64_t n = j->inner - c0 < OM_ROWS_COLS ? j->inner - c0 : OM_ROWS_COLS;
        p->cols((char *)j->mat[0].data + at, (char *)j->mat[1].data + at, (char *)j->mat[j->n_mat - 1].data + at,
                j->len, j->inner, n);
    }
}

om_status om_cpu_run_softmax(om_ctx *cx, const om_args *a) {
    const softmax_prep *p = a->prep;
    om_rows_job j = p->j;
    om_rows_at(&j, a);
    if (p->cols) om_parallel_for(cx, j.outer * p->tiles, p->grain, cols_range, &j);
    else if (j.outer > 0 && j.len > 0 && j.inner > 0) om_rows_run(cx, &j);
    return OM_OK;
}
