/* softmax.c - ops/softmax.c on the CPU: rows shared out, or tiles of neighbouring columns. In place is allowed: a row
 * is read before it is written.
 */
#include "cpu/cpu.h"
#include "cpu/rows.h"

static void softmax_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    (void)r, (void)own;
    ((void (*const *)(const void *, void *, int64_t))j->arg)[om_compute_dtype(j->mat[0].dtype) == OM_F64](
        row[0], row[1], j->len);
}
static void softmax_grad_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    (void)r, (void)own;
    ((void (*const *)(const void *, const void *, void *, int64_t))j->arg)[om_compute_dtype(j->mat[0].dtype) == OM_F64](
        row[0], row[1], row[2], j->len);
}

static om_rows_job softmax_job(const om_args *a) {
    const om_tensor *x = &a->in[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    om_rows_job j = {
        .outer = 1, .len = x->rank ? x->dim[axis] : 1, .inner = 1, .n_mat = a->n_in + 1, .scratch = a->scratch};
    for (int i = 0; i < x->rank; i++)
        if (i < axis) j.outer *= x->dim[i];
        else if (i > axis) j.inner *= x->dim[i];
    for (int k = 0; k < a->n_in; k++) j.mat[k] = (om_rows_mat){a->in[k].data, a->in[k].dtype, false};
    j.mat[a->n_in] = (om_rows_mat){a->out[0].data, a->out[0].dtype, true};
    j.row = a->n_in == 1 ? softmax_row : softmax_grad_row;
    om_rows_prepare(&j, OM_ROWS_TASKS);
    return j;
}

int64_t om_cpu_scratch_softmax(om_ctx *cx, const om_args *a) {
    (void)cx;
    const om_rows_job j = softmax_job(a);
    return j.n_tasks * j.task_bytes;
}

/* An inner axis of some length: tiles of neighbouring columns are read and written whole, instead of row after row with
 * gaps. */
typedef struct cols_job {
    const om_rows_job *j;
    om_cols_fn fn;
    int64_t tiles; /* per outer index */
} cols_job;

static void cols_range(void *arg, int64_t begin, int64_t end) {
    const cols_job *c = arg;
    const om_rows_job *j = c->j;
    const int64_t e = (int64_t)om_dtype_size(j->mat[0].dtype);
    for (int64_t u = begin; u < end; u++) {
        const int64_t o = u / c->tiles, c0 = (u - o * c->tiles) * OM_ROWS_COLS, at = (o * j->len * j->inner + c0) * e;
        const int64_t n = j->inner - c0 < OM_ROWS_COLS ? j->inner - c0 : OM_ROWS_COLS;
        c->fn((char *)j->mat[0].data + at, (char *)j->mat[1].data + at, (char *)j->mat[j->n_mat - 1].data + at, j->len,
              j->inner, n);
    }
}

static bool cols_run(om_ctx *cx, const om_rows_job *j, const om_cols_fn *fn) {
    const int t = j->mat[0].dtype;
    if (j->inner < 8 || t != om_compute_dtype(t)) return false;
    cols_job c = {j, fn[t == OM_F64], (j->inner + OM_ROWS_COLS - 1) / OM_ROWS_COLS};
    const int64_t work = j->len * (j->inner < OM_ROWS_COLS ? j->inner : OM_ROWS_COLS);
    om_parallel_for(cx, j->outer * c.tiles, 16384 / (work + 1) + 1, cols_range, &c);
    return true;
}

#define RUN(name)                                                                                   \
    om_status om_cpu_run_##name(om_ctx *cx, const om_args *a) {                                     \
        om_rows_job j = softmax_job(a);                                                             \
        j.arg = OM_PICK(om_rows)->name;                                                             \
        if (cols_run(cx, &j, OM_PICK(om_rows)->name##_cols)) return OM_OK;                          \
        if (j.outer > 0 && j.len > 0 && j.inner > 0) om_rows_run(cx, &j);                                         \
        return OM_OK;                                                                               \
    }
RUN(softmax)
RUN(softmax_grad)
RUN(log_softmax)
RUN(log_softmax_grad)
