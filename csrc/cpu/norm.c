/* norm.c - ops/norm.c on the CPU.
 *
 * The gradients of the weights are summed per task during the one sweep over the rows, then over the tasks in order, in
 * double: deterministic whatever the number of threads. Tasks and their memory are laid out once per plan.
 */
#include "cpu/cpu.h"
#include "cpu/copy.h"
#include "cpu/reduce.h"
#include "cpu/rows.h"

enum { GRAD_TASKS = 32, STRIP = 512 };

typedef struct norm_arg {
    const void *w, *b;       /* NULL = left out */
    uint8_t w_dtype, b_dtype; /* OM_NODTYPE = left out */
    void *mean, *rstd;       /* (rows) of the compute type; mean NULL for rms_norm */
    double eps;
    int wide;                /* compute dtype */
    int64_t e, pitch;        /* bytes of an element; of a row buffer in the task's own memory */
    int64_t w_at, b_at, dw_at, db_at; /* places in the task's own memory; -1 = none */
} norm_arg;

typedef struct norm_prep {
    om_rows_job j;
    norm_arg n;
} norm_prep;

static uint8_t operand_dtype(const om_args *a, int i) { return i < a->n_in ? a->in[i].dtype : OM_NODTYPE; }
static void *operand_data(const om_args *a, int i) { return i < a->n_in ? a->in[i].data : NULL; }

static int64_t place(om_rows_job *j, const norm_arg *n) {
    const int64_t at = j->extra;
    j->extra += n->pitch;
    return at;
}

/* rows x len of the normalised matrix; `grad`: room for dw and, unless rms, db */
static void norm_setup(const om_args *a, const om_tensor *x, int w_dtype, int b_dtype, bool grad, bool rms,
                       norm_prep *p) {
    const int axis = (int)om_args_int(a, "axis", 0);
    om_rows_job *j = &p->j;
    norm_arg *n = &p->n;
    *j = (om_rows_job){.outer = 1, .len = 1, .inner = 1};
    for (int i = 0; i < x->rank; i++) *(i < axis ? &j->outer : &j->len) *= x->dim[i];
    const int wide = om_compute_dtype(x->dtype);
    *n = (norm_arg){.w_dtype = (uint8_t)w_dtype,
                    .b_dtype = (uint8_t)b_dtype,
                    .eps = om_args_float(a, "eps", 1e-5),
                    .wide = wide,
                    .e = (int64_t)om_dtype_size(wide),
                    .w_at = -1,
                    .b_at = -1,
                    .dw_at = -1,
                    .db_at = -1};
    n->pitch = (j->len * n->e + 63) / 64 * 64;
    if (w_dtype && w_dtype != wide) n->w_at = place(j, n);
    if (b_dtype && b_dtype != wide) n->b_at = place(j, n);
    if (grad) n->dw_at = place(j, n);
    if (grad && !rms) n->db_at = place(j, n);
}

static void weight_convert(const void *w, int dtype, const norm_arg *n, char *to, int64_t len) {
    OM_PICK(om_copy)->convert[dtype][n->wide](w, (int64_t)om_dtype_size(dtype), to, n->e, len);
}

static void weights_load(const om_rows_job *j, int64_t task, void *own) { /* once per task */
    const norm_arg *n = j->arg;
    char *m = own;
    (void)task;
    if (n->w_at >= 0) weight_convert(n->w, n->w_dtype, n, m + n->w_at, j->len);
    if (n->b_at >= 0) weight_convert(n->b, n->b_dtype, n, m + n->b_at, j->len);
    if (n->dw_at >= 0) memset(m + n->dw_at, 0, (size_t)n->pitch);
    if (n->db_at >= 0) memset(m + n->db_at, 0, (size_t)n->pitch);
}

static const void *weight(const void *w, int64_t at, char *own) { return at >= 0 ? own + at : w; }
static void *of_row(void *p, const norm_arg *n, int64_t r) { return (char *)p + r * n->e; }
static int table(const norm_arg *n) { return n->wide == OM_F64; }

/* --- forward --------------------------------------------------------------------------------------------------- */

static void layer_norm_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    const norm_arg *n = j->arg;
    OM_PICK(om_rows)->layer_norm[table(n)](row[0], weight(n->w, n->w_at, own), weight(n->b, n->b_at, own), n->eps,
                                           row[1], of_row(n->mean, n, r), of_row(n->rstd, n, r), j->len);
}
static void rms_norm_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    const norm_arg *n = j->arg;
    OM_PICK(om_rows)->rms_norm[table(n)](row[0], weight(n->w, n->w_at, own), n->eps, row[1], of_row(n->rstd, n, r),
                                         j->len);
}

static void forward_setup(const om_args *a, norm_prep *p) {
    const bool rms = om_is(a->node, rms_norm);
    norm_setup(a, &a->in[0], operand_dtype(a, 1), rms ? OM_NODTYPE : operand_dtype(a, 2), false, rms, p);
    om_rows_job *j = &p->j;
    j->n_mat = 2;
    j->mat[0] = (om_rows_mat){NULL, a->in[0].dtype, false};
    j->mat[1] = (om_rows_mat){NULL, a->out[0].dtype, true};
    j->row = rms ? rms_norm_row : layer_norm_row;
    j->begin = weights_load;
    om_rows_prepare(j, OM_ROWS_TASKS);
}

int64_t om_cpu_scratch_norm(om_ctx *cx, const om_args *a) {
    norm_prep p;
    (void)cx;
    forward_setup(a, &p);
    return p.j.n_tasks * p.j.task_bytes;
}

om_status om_cpu_prepare_norm(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    norm_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    forward_setup(a, p);
    return OM_OK;
}

om_status om_cpu_run_norm(om_ctx *cx, const om_args *a) {
    norm_prep p = *(const norm_prep *)a->prep;
    p.j.arg = &p.n;
    om_rows_at(&p.j, a);
    p.n.w = operand_data(a, 1);
    p.n.b = operand_data(a, 2);
    p.n.mean = a->out[1].data;
    p.n.rstd = a->out[a->n_out - 1].data; /* of rms_norm, output 1 */
    if (p.j.outer > 0) om_rows_run(cx, &p.j);
    return OM_OK;
}

/* --- backward -------------------------------------------------------------------------------------------------- */

static void layer_norm_grad_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    const norm_arg *n = j->arg;
    char *m = own;
    OM_PICK(om_rows)->layer_norm_grad[table(n)](row[0], row[1], weight(n->w, n->w_at, own), of_row(n->mean, n, r),
                                                of_row(n->rstd, n, r), row[2], n->dw_at >= 0 ? m + n->dw_at : NULL,
                                                n->db_at >= 0 ? m + n->db_at : NULL, j->len);
}
static void rms_norm_grad_row(const om_rows_job *j, int64_t r, void *const *row, void *own) {
    const norm_arg *n = j->arg;
    OM_PICK(om_rows)->rms_norm_grad[table(n)](row[0], row[1], weight(n->w, n->w_at, own), of_row(n->rstd, n, r), row[2],
                                              n->dw_at >= 0 ? (char *)own + n->dw_at : NULL, j->len);
}

static void backward_setup(const om_args *a, norm_prep *p) {
    const bool rms = om_is(a->node, rms_norm_grad), params = om_args_int(a, "params", 1);
    norm_setup(a, &a->in[1], operand_dtype(a, 2), OM_NODTYPE, params, rms, p);
    om_rows_job *j = &p->j;
    j->n_mat = 3;
    j->mat[0] = (om_rows_mat){NULL, a->in[0].dtype, false};
    j->mat[1] = (om_rows_mat){NULL, a->in[1].dtype, false};
    j->mat[2] = (om_rows_mat){NULL, a->out[0].dtype, true};
    j->row = rms ? rms_norm_grad_row : layer_norm_grad_row;
    j->begin = weights_load;
    om_rows_prepare(j, params ? GRAD_TASKS : OM_ROWS_TASKS);
}

int64_t om_cpu_scratch_norm_grad(om_ctx *cx, const om_args *a) {
    norm_prep p;
    (void)cx;
    backward_setup(a, &p);
    return p.j.n_tasks * p.j.task_bytes;
}

om_status om_cpu_prepare_norm_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    norm_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    backward_setup(a, p);
    return OM_OK;
}

/* The tasks' partial sums at `at` into a weight gradient. */
static void partials_sum(const om_rows_job *j, const norm_arg *n, int64_t at, om_tensor *dw) {
    const int cls = om_strip_class(n->wide);
    const int64_t size = (int64_t)om_dtype_size(dw->dtype);
    for (int64_t c = 0; c < j->len; c += STRIP) {
        const int64_t m = j->len - c < STRIP ? j->len - c : STRIP;
        double acc[STRIP] = {0};
        OM_PICK(om_reduce)->col[OM_RED_SUM][cls](j->scratch + at + c * n->e, j->task_bytes / n->e, j->n_tasks, m, acc);
        OM_PICK(om_copy)->convert[OM_F64][dw->dtype]((const char *)acc, 8, (char *)dw->data + c * size, size, m);
    }
}

om_status om_cpu_run_norm_grad(om_ctx *cx, const om_args *a) {
    norm_prep p = *(const norm_prep *)a->prep;
    const om_rows_job *j = &p.j;
    const norm_arg *n = &p.n;
    p.j.arg = n;
    om_rows_at(&p.j, a);
    p.n.w = operand_data(a, 2);
    p.n.mean = a->in[3].data;
    p.n.rstd = a->in[a->n_in - 1].data; /* of rms_norm_grad, operand 3 */
    if (j->len == 0) return OM_OK; /* every result is empty, and there may be no scratch */
    if (j->outer == 0 && n->dw_at >= 0) { /* no rows: gradients of the weights are zero */
        for (int i = 1; i < a->n_out; i++)
            memset(a->out[i].data, 0, (size_t)om_numel(&a->out[i]) * om_dtype_size(a->out[i].dtype));
        return OM_OK;
    }
    if (j->outer > 0) om_rows_run(cx, &p.j);
    if (n->dw_at >= 0) partials_sum(j, n, n->dw_at, &a->out[1]);
    if (n->db_at >= 0) partials_sum(j, n, n->db_at, &a->out[2]);
    return OM_OK;
}
