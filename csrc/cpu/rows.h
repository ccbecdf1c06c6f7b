/* rows.h - kernels over whole rows (kernels/rows.k.c): softmax and the norms. A row is n contiguous elements of the
 * compute type, float or double: tables have one entry for each, [0] and [1]. ops/softmax.c and ops/norm.c convert rows
 * of other storage. */
#ifndef OM_ROWS_H
#define OM_ROWS_H

#include "cpu/strip.h"

enum { OM_ROWS_COLS = 128 };
typedef void (*om_cols_fn)(const void *a, const void *b, void *out, int64_t len, int64_t ld, int64_t n);

struct om_rows_kernels {
    void (*softmax[2])(const void *x, void *y, int64_t n);
    void (*softmax_grad[2])(const void *dy, const void *y, void *dx, int64_t n);
    void (*log_softmax[2])(const void *x, void *y, int64_t n);
    void (*log_softmax_grad[2])(const void *dy, const void *y, void *dx, int64_t n);
    /* the same for n <= OM_ROWS_COLS columns of len rows, ld apart; x, y for the forward ones: (x, NULL, y) */
    om_cols_fn softmax_cols[2], softmax_grad_cols[2], log_softmax_cols[2], log_softmax_grad_cols[2];
    /* w, b may be NULL; *mean and *rstd are written */
    void (*layer_norm[2])(const void *x, const void *w, const void *b, double eps, void *y, void *mean, void *rstd,
                          int64_t n);
    void (*rms_norm[2])(const void *x, const void *w, double eps, void *y, void *rstd, int64_t n);
    /* dx is written; dw, db (both or neither NULL) are added to */
    void (*layer_norm_grad[2])(const void *dy, const void *x, const void *w, const void *mean, const void *rstd,
                               void *dx, void *dw, void *db, int64_t n);
    void (*rms_norm_grad[2])(const void *dy, const void *x, const void *w, const void *rstd, void *dx, void *dw,
                             int64_t n);
};
OM_DECLARE_ISA(struct om_rows_kernels, om_rows);

/* --- sharing rows among threads (cpu/rows.c) -------------------------------------------------------- */

/* Up to 3 matrices of the same sizes, dense: row (o, i) of (outer, len, inner) starts at o * len * inner + i with
 * stride inner. */
enum { OM_ROWS_MATS = 3, OM_ROWS_TASKS = 64 };

typedef struct om_rows_mat { void *data; int dtype; bool out; } om_rows_mat;

/* A row makes one once per plan; a run copies it and puts in the addresses (om_rows_at). */
typedef struct om_rows_job {
    int64_t outer, len, inner;
    int n_mat;
    om_rows_mat mat[OM_ROWS_MATS];
    /* set by om_rows_prepare; task_bytes of scratch for each task, after `extra` bytes of the caller's own */
    int64_t n_tasks, task_bytes;
    int64_t extra;               /* asked for by the caller, per task */
    char *scratch;
    /* row[k]: the row of matrix k as contiguous elements of the compute type; own: the task's `extra` bytes */
    void (*row)(const struct om_rows_job *job, int64_t r, void *const *row, void *own);
    void (*begin)(const struct om_rows_job *job, int64_t task, void *own); /* before a task's first row; may be NULL */
    const void *arg;
} om_rows_job;

/* from sizes and dtypes alone: also what the operators' scratch rules call */
void om_rows_prepare(om_rows_job *j, int64_t most_tasks);
/* matrices: the first operands, then output 0 */
void om_rows_at(om_rows_job *j, const om_args *a);
void om_rows_run(om_ctx *cx, om_rows_job *j);

#endif
