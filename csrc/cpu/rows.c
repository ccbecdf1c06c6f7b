/* rows.c - hands the rows of matrices to a row kernel, task by task.
 *
 * The rows are cut into at most OM_ROWS_TASKS equal tasks, a number that depends on the sizes alone, so sums kept per
 * task (gradients of norm weights) are added in the same order whatever the number of threads. A matrix whose rows are
 * contiguous in the compute type is used in place; rows of other storage, or along an inner axis, are converted into
 * the task's own row buffer and back.
 */
#include "cpu/rows.h"

static bool mat_direct(const om_rows_job *j, int k) {
    return j->inner == 1 && om_compute_dtype(j->mat[k].dtype) == j->mat[k].dtype;
}

static int64_t row_bytes(const om_rows_job *j, int k) {
    const int64_t e = om_compute_dtype(j->mat[k].dtype) == OM_F64 ? 8 : 4;
    return mat_direct(j, k) ? 0 : (j->len * e + 63) / 64 * 64;
}

void om_rows_prepare(om_rows_job *j, int64_t most_tasks) {
    const int64_t rows = j->outer * j->inner;
    int64_t n = rows * (j->len + 16) / 16384 + 1;
    if (n > rows) n = rows;
    j->n_tasks = n < 1 ? 1 : n > most_tasks ? most_tasks : n;
    j->extra = (j->extra + 63) / 64 * 64;
    j->task_bytes = j->extra;
    for (int k = 0; k < j->n_mat; k++) j->task_bytes += row_bytes(j, k);
}

void om_rows_at(om_rows_job *j, const om_args *a) {
    for (int k = 0; k < j->n_mat - 1; k++) j->mat[k].data = a->in[k].data;
    j->mat[j->n_mat - 1].data = a->out[0].data;
    j->scratch = a->scratch;
}

static void tasks_run(void *arg, int64_t begin, int64_t end) {
    const om_rows_job *j = arg;
    const int64_t rows = j->outer * j->inner;
    for (int64_t t = begin; t < end; t++) {
        char *own = j->scratch + t * j->task_bytes, *buf = own + j->extra;
        void *row[OM_ROWS_MATS];
        for (int k = 0; k < j->n_mat; k++) {
            row[k] = buf;
            buf += row_bytes(j, k);
        }
        if (j->begin) j->begin(j, t, own);
        for (int64_t r = rows * t / j->n_tasks; r < rows * (t + 1) / j->n_tasks; r++) {
            const int64_t o = r / j->inner, first = o * j->len * j->inner + (r - o * j->inner);
            for (int k = 0; k < j->n_mat; k++) {
                char *p = (char *)j->mat[k].data + first * (int64_t)om_dtype_size(j->mat[k].dtype);
                if (mat_direct(j, k)) row[k] = p;
                else if (!j->mat[k].out) OM_PICK(om_strip)->load[j->mat[k].dtype](p, j->inner, j->len, row[k]);
            }
            j->row(j, r, row, own);
            for (int k = 0; k < j->n_mat; k++)
                if (j->mat[k].out && !mat_direct(j, k))
                    OM_PICK(om_strip)->store[j->mat[k].dtype](
                        row[k], j->len, (char *)j->mat[k].data + first * (int64_t)om_dtype_size(j->mat[k].dtype),
                        j->inner);
        }
    }
}

void om_rows_run(om_ctx *cx, om_rows_job *j) { om_parallel_for(cx, j->n_tasks, 1, tasks_run, j); }
