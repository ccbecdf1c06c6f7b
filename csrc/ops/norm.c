/* norm.c - layer norm and RMS norm over the axes from `axis` on, forward and backward.
 *
 * The normalised axes are one row. Statistics and arithmetic are in the compute type (f32 for bf16 and f16), weights of
 * any float dtype. The gradients of the weights are summed per task during the one sweep over the rows, then over the
 * tasks in order, in double: deterministic whatever the number of threads.
 */
#include "ops/attr.h"
#include "cpu/copy.h"
#include "cpu/reduce.h"
#include "cpu/rows.h"

enum { GRAD_TASKS = 32, STRIP = 512 };

typedef struct norm_arg {
    const om_tensor *w, *b;  /* NULL = left out */
    void *mean, *rstd;       /* (rows) of the compute type; mean NULL for rms_norm */
    double eps;
    int wide;                /* compute dtype */
    int64_t e, pitch;        /* bytes of an element; of a row buffer in the task's own memory */
    int64_t w_at, b_at, dw_at, db_at; /* places in the task's own memory; -1 = none */
} norm_arg;

static const om_tensor *operand(const om_args *a, int i) {
    return i < a->n_in && a->in[i].dtype != OM_NODTYPE ? &a->in[i] : NULL;
}

static int64_t place(om_rows_job *j, const norm_arg *n) {
    const int64_t at = j->extra;
    j->extra += n->pitch;
    return at;
}

/* rows x len of the normalised matrix; `grad`: room for dw and, unless rms, db */
static void norm_setup(const om_args *a, const om_tensor *x, const om_tensor *w, const om_tensor *b, bool grad,
                       bool rms, om_rows_job *j, norm_arg *n) {
    const int axis = (int)om_args_int(a, "axis", 0);
    *j = (om_rows_job){.outer = 1, .len = 1, .inner = 1, .scratch = a->scratch, .arg = n};
    for (int i = 0; i < x->rank; i++) *(i < axis ? &j->outer : &j->len) *= x->dim[i];
    const int wide = om_compute_dtype(x->dtype);
    *n = (norm_arg){.w = w,
                    .b = b,
                    .eps = om_args_float(a, "eps", 1e-5),
                    .wide = wide,
                    .e = (int64_t)om_dtype_size(wide),
                    .w_at = -1,
                    .b_at = -1,
                    .dw_at = -1,
                    .db_at = -1};
    n->pitch = (j->len * n->e + 63) / 64 * 64;
    if (w && w->dtype != wide) n->w_at = place(j, n);
    if (b && b->dtype != wide) n->b_at = place(j, n);
    if (grad) n->dw_at = place(j, n);
    if (grad && !rms) n->db_at = place(j, n);
}

static void weight_convert(const om_tensor *w, const norm_arg *n, char *to, int64_t len) {
    OM_PICK(om_copy)->convert[w->dtype][n->wide](w->data, (int64_t)om_dtype_size(w->dtype), to, n->e, len);
}

static void weights_load(const om_rows_job *j, int64_t task, void *own) { /* once per task */
    const norm_arg *n = j->arg;
    char *m = own;
    (void)task;
    if (n->w_at >= 0) weight_convert(n->w, n, m + n->w_at, j->len);
    if (n->b_at >= 0) weight_convert(n->b, n, m + n->b_at, j->len);
    if (n->dw_at >= 0) memset(m + n->dw_at, 0, (size_t)n->pitch);
    if (n->db_at >= 0) memset(m + n->db_at, 0, (size_t)n->pitch);
}

static const void *weight(const om_tensor *w, int64_t at, char *own) { return at >= 0 ? own + at : w ? w->data : NULL; }
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

static void forward_setup(const om_args *a, om_rows_job *j, norm_arg *n) {
    const bool rms = om_is(a->node, rms_norm);
    norm_setup(a, &a->in[0], operand(a, 1), rms ? NULL : operand(a, 2), false, rms, j, n);
    n->mean = rms ? NULL : a->out[1].data;
    n->rstd = a->out[rms ? 1 : 2].data;
    j->n_mat = 2;
    j->mat[0] = (om_rows_mat){a->in[0].data, a->in[0].dtype, false};
    j->mat[1] = (om_rows_mat){a->out[0].data, a->out[0].dtype, true};
    j->row = rms ? rms_norm_row : layer_norm_row;
    j->begin = weights_load;
    om_rows_prepare(j, OM_ROWS_TASKS);
}

static int64_t forward_scratch(om_ctx *cx, const om_args *a) {
    om_rows_job j;
    norm_arg n;
    (void)cx;
    forward_setup(a, &j, &n);
    return j.n_tasks * j.task_bytes;
}

static om_status forward_run(om_ctx *cx, const om_args *a) {
    om_rows_job j;
    norm_arg n;
    forward_setup(a, &j, &n);
    if (j.outer > 0) om_rows_run(cx, &j);
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

static void backward_setup(const om_args *a, om_rows_job *j, norm_arg *n) {
    const bool rms = om_is(a->node, rms_norm_grad), params = om_args_int(a, "params", 1);
    norm_setup(a, &a->in[1], operand(a, 2), NULL, params, rms, j, n);
    n->mean = rms ? NULL : a->in[3].data;
    n->rstd = a->in[rms ? 3 : 4].data;
    j->n_mat = 3;
    j->mat[0] = (om_rows_mat){a->in[0].data, a->in[0].dtype, false};
    j->mat[1] = (om_rows_mat){a->in[1].data, a->in[1].dtype, false};
    j->mat[2] = (om_rows_mat){a->out[0].data, a->out[0].dtype, true};
    j->row = rms ? rms_norm_grad_row : layer_norm_grad_row;
    j->begin = weights_load;
    om_rows_prepare(j, params ? GRAD_TASKS : OM_ROWS_TASKS);
}

static int64_t backward_scratch(om_ctx *cx, const om_args *a) {
    om_rows_job j;
    norm_arg n;
    (void)cx;
    backward_setup(a, &j, &n);
    return j.n_tasks * j.task_bytes;
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

static om_status backward_run(om_ctx *cx, const om_args *a) {
    om_rows_job j;
    norm_arg n;
    backward_setup(a, &j, &n);
    if (j.len == 0) return OM_OK; /* every result is empty, and there may be no scratch */
    if (j.outer == 0 && n.dw_at >= 0) { /* no rows: gradients of the weights are zero */
        for (int i = 1; i < a->n_out; i++)
            memset(a->out[i].data, 0, (size_t)om_numel(&a->out[i]) * om_dtype_size(a->out[i].dtype));
        return OM_OK;
    }
    if (j.outer > 0) om_rows_run(cx, &j);
    if (n.dw_at >= 0) partials_sum(&j, &n, n.dw_at, &a->out[1]);
    if (n.db_at >= 0) partials_sum(&j, &n, n.db_at, &a->out[2]);
    return OM_OK;
}

/* --- types and gradients ------------------------------------------------------------------------------------------ */

static om_status weight_check(om_graph *g, const om_node *n, int i, const om_type *x, int axis) {
    if (i >= n->n_in || om_ins(g, n)[i] == OM_NONE) return OM_OK;
    const om_type *w = om_ty(g, om_ins(g, n)[i]);
    OM_CHECK(g->cx, om_is_float(w->dtype) && w->rank == x->rank - axis,
             "%s: operand %d is %s of rank %d; a float with the %d normalised axes is allowed", n->op->name, i,
             om_dtype_name(w->dtype), w->rank, x->rank - axis);
    for (int k = 0; k < w->rank; k++)
        OM_CHECK(g->cx, !attr_differs(g, w->dim[k], x->dim[axis + k]),
                 "%s: operand %d differs from x in the size of axis %d", n->op->name, i, axis + k);
    return OM_OK;
}

static om_status forward_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int axis;
    OM_CHECK(g->cx, om_is_float(x->dtype), "%s: x is %s; floats are allowed", n->op->name, om_dtype_name(x->dtype));
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    for (int i = 1; i < 3; i++) OM_TRY(weight_check(g, n, i, x, axis));
    out[0] = *x;
    out[1] = *x;
    out[1].dtype = (uint8_t)om_compute_dtype(x->dtype);
    out[1].rank = (uint8_t)axis;
    if (om_is(n, layer_norm)) out[2] = out[1];
    return OM_OK;
}

static om_status backward_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[1]), *dy = om_ty(g, om_ins(g, n)[0]);
    int axis;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    OM_CHECK(g->cx, om_is_float(x->dtype) && dy->dtype == x->dtype && dy->rank == x->rank,
             "%s: dy is %s of rank %d, x %s of rank %d; they must agree", n->op->name, om_dtype_name(dy->dtype),
             dy->rank, om_dtype_name(x->dtype), x->rank);
    OM_TRY(weight_check(g, n, 2, x, axis));
    const om_id w = om_ins(g, n)[2];
    om_type p = *x;
    p.rank = (uint8_t)(x->rank - axis);
    for (int i = 0; i < p.rank; i++) p.dim[i] = x->dim[axis + i];
    if (w != OM_NONE) p.dtype = om_ty(g, w)->dtype;
    if (!om_node_int(n, "params", 1)) p.rank = 1, p.dim[0] = 0;
    out[0] = *x;
    out[1] = p;
    if (om_is(n, layer_norm_grad)) out[2] = p;
    return OM_OK;
}

static om_status norm_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const bool rms = om_is(n, rms_norm);
    const om_id w = n->n_in > 1 ? om_ins(g, n)[1] : OM_NONE, bias = n->n_in > 2 ? om_ins(g, n)[2] : OM_NONE;
    if (dy[1] != OM_NONE || (!rms && dy[2] != OM_NONE))
        return om_fail(g->cx, OM_UNSUPPORTED, "%s: a gradient arrives for its statistics; only y is differentiable",
                       n->op->name);
    if (dy[0] == OM_NONE) return OM_OK;
    const bool want_w = n->n_in > 1 && want[1], want_b = n->n_in > 2 && want[2];
    const om_attr attr[2] = {OM_AI("axis", om_node_int(n, "axis", 0)), OM_AI("params", want_w || want_b)};
    const om_id x = om_ins(g, n)[0];
    const om_id d = rms ? om_make(g, &om_op_rms_norm_grad, OM_IN(dy[0], x, w, n->out + 1), attr, 2)
                        : om_make(g, &om_op_layer_norm_grad, OM_IN(dy[0], x, w, n->out + 1, n->out + 2), attr, 2);
    if (d == OM_NONE) return g->cx->status;
    if (want[0]) dx[0] = d;
    if (want_w) dx[1] = d + 1;
    if (want_b) dx[2] = om_b_cast(g, d + 2, om_ty(g, bias)->dtype);
    return g->cx->status;
}
static om_status second_order(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)dy, (void)want, (void)dx;
    return om_fail(b->g->cx, OM_UNSUPPORTED,
                   "%s has no gradient of its own: second derivatives run in PyTorch (create_graph=True)", n->op->name);
}

const om_op om_op_layer_norm = {
    .name = "layer_norm",
    .doc = "(x, w?, b?) axis eps: y = (x - mean) rstd w + b over axes >= axis; mean and rstd in the compute dtype",
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 3,
    .n_out = 3,
    .inplace = 1,
    .dense = 1u << 31,
    .infer = forward_infer,
    .grad = norm_grad,
    .scratch = forward_scratch,
    .run = forward_run,
};
const om_op om_op_rms_norm = {
    .name = "rms_norm",
    .doc = "(x, w?) axis eps: y = x rstd w, rstd = 1 / sqrt(mean of x^2 + eps) over axes >= axis",
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 2,
    .n_out = 2,
    .inplace = 1,
    .dense = 1u << 31,
    .infer = forward_infer,
    .grad = norm_grad,
    .scratch = forward_scratch,
    .run = forward_run,
};
const om_op om_op_layer_norm_grad = {
    .name = "layer_norm_grad",
    .doc = "(dy, x, w?, mean, rstd) axis params: dx, dw, db; params = 0: dw and db are empty",
    .kind = OM_K_ROW,
    .min_in = 5,
    .max_in = 5,
    .n_out = 3,
    .inplace = 3,
    .dense = 1u << 31,
    .optional = 4,
    .infer = backward_infer,
    .grad = second_order,
    .scratch = backward_scratch,
    .run = backward_run,
};
const om_op om_op_rms_norm_grad = {
    .name = "rms_norm_grad",
    .doc = "(dy, x, w?, rstd) axis params: dx, dw; params = 0: dw is empty",
    .kind = OM_K_ROW,
    .min_in = 4,
    .max_in = 4,
    .n_out = 2,
    .inplace = 3,
    .dense = 1u << 31,
    .optional = 4,
    .infer = backward_infer,
    .grad = second_order,
    .scratch = backward_scratch,
    .run = backward_run,
};
