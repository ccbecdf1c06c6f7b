/* lower_rows.c - reductions, softmax, norms, cross-entropy, rows by index on the GPU. */
#include "cuda/scratch.h"
#include "ops/attr.h"
#include "ops/loss.h"

#include <math.h>

/* Threads for a row of n: whole warps. */
static uint32_t threads_for(int64_t n) {
    return n <= 32 ? 32 : n <= 128 ? 64 : n <= 512 ? 128 : n <= 8192 ? 256 : 1024;
}
/* A launch over rows of n in registers (row.h). */
static void *rows_add(om_lower *l, om_gpu_kernel k, int64_t rows, int64_t n, size_t size) {
    const bool warp = n <= OM_GPU_ROW_WARP;
    const int64_t threads = 32 * (warp ? OM_GPU_ROW_WARPS : om_gpu_blocks(n, OM_GPU_ROW_WARP));
    return om_gpu_add(l, k, warp ? om_gpu_blocks(rows, OM_GPU_ROW_WARPS) : rows, 1, 1,
                      (uint32_t)(threads < OM_GPU_ROW_THREADS ? threads : OM_GPU_ROW_THREADS), 32 * 8, size);
}
/* --- reductions --------------------------------------------------------------------------------------- */

static void axis_add(int64_t n, int64_t step, int *rank, int64_t *dim, int64_t *stride) {
    if (n == 1) return;
    if (*rank && stride[*rank - 1] == step * n) {
        dim[*rank - 1] *= n;
        stride[*rank - 1] = step;
        return;
    }
    dim[*rank] = n;
    stride[(*rank)++] = step;
}

enum { COLUMNS_MOST = 32 * 8 }; /* of a block of reduce_columns */
typedef struct reduction { om_gpu_reduce p; bool lanes; } reduction;

/* Columns that lie beside each other and are added: how many a thread takes, so that rows begin where its access may;
 * else 0. */
static int32_t columns_of(const om_gpu_reduce *p, int dtype) {
    const int64_t size = (int64_t)om_dtype_size(dtype), widths[3] = {16 / size, size == 2 ? 2 : 1, 1};
    if ((p->what != OM_GPU_SUM && p->what != OM_GPU_MEAN) || !om_is_float(dtype) || p->orank != 1 || p->irank != 1 ||
        p->ostride[0] != 1)
        return 0;
    int i = 0;
    while (p->outer % widths[i] || p->istride[0] % widths[i]) i++;
    return (int32_t)widths[i];
}

static void reduction_of(const om_args *a, reduction *r) {
    const om_tensor *x = &a->in[0];
    const uint32_t mask = attr_axes_mask(a->attr, a->n_attr, x->rank), id = a->node->op->id;
    om_gpu_reduce *p = &r->p;
    *r = (reduction){.p = {.outer = 1, .inner = 1}};
    p->what = id == OM_OP_reduce_sum    ? OM_GPU_SUM
              : id == OM_OP_reduce_mean ? OM_GPU_MEAN
              : id == OM_OP_reduce_max  ? OM_GPU_MAX
              : id == OM_OP_reduce_min  ? OM_GPU_MIN
                                        : OM_GPU_PROD;
    for (int i = 0; i < x->rank; i++) {
        if (mask >> i & 1) {
            p->inner *= x->dim[i];
            axis_add(x->dim[i], x->stride[i], &p->irank, p->idim, p->istride);
        } else {
            p->outer *= x->dim[i];
            axis_add(x->dim[i], x->stride[i], &p->orank, p->odim, p->ostride);
        }
    }
    const int64_t istep = p->irank ? p->istride[p->irank - 1] : 0, ostep = p->orank ? p->ostride[p->orank - 1] : 0;
    /* lanes where neighbours in memory are neighbouring results, or the sets are short */
    r->lanes = p->outer >= 32 && (p->inner <= 32 || (ostep == 1 && istep != 1));
    p->columns = r->lanes ? columns_of(p, x->dtype) : 0;
    /* enough blocks for a large GPU, from the sizes alone; a part is at least 1024 elements a block */
    const int64_t blocks = p->columns ? om_gpu_blocks(p->outer, 32 * p->columns)
                           : r->lanes ? om_gpu_blocks(p->outer, 32)
                                      : p->outer,
                  least = p->columns ? 64 : r->lanes ? 256 : 4096;
    int64_t parts = blocks >= 512 ? 1 : om_gpu_blocks(512, blocks ? blocks : 1);
    if (parts > p->inner / least) parts = p->inner / least;
    p->parts = (int32_t)(parts > 1 ? parts : 1);
    p->part = om_gpu_blocks(p->inner, p->parts);
    if (p->parts > 1) p->part = om_gpu_blocks(p->part, 8) * 8; /* parts of a line begin where 16 bytes do */
}

int64_t om_gpu_scratch_reduce(om_ctx *cx, const om_args *a) {
    reduction r;
    (void)cx;
    reduction_of(a, &r); /* strides may change until the call is lowered: as many parts as any strides could ask for */
    const int64_t most = r.p.inner / 64 * r.p.outer, all = 512 * COLUMNS_MOST + r.p.outer;
    return r.p.inner < 128 || r.p.outer >= 512 * COLUMNS_MOST ? 0 : (most < all ? most : all) * 8;
}

/* Shared bytes of a launch: of reduce_columns, or `otherwise`. */
static size_t columns_or(int columns, int64_t otherwise) {
    return columns ? (size_t)(8 * columns * OM_GPU_COLUMNS_WIDTH * 8) : (size_t)otherwise;
}

om_status om_lower_reduce(om_lower *l) {
    const om_args *a = l->a;
    const int dtype = a->in[0].dtype, cls = om_compute_dtype(dtype);
    const int acc = cls == OM_I64 ? OM_I64 : OM_F64; /* what results on the way are */
    reduction r;
    reduction_of(a, &r);
    if (!om_is_dense(&a->out[0]) || r.p.outer > INT32_MAX) return om_gpu_host(l);
    r.p.scale = r.p.inner ? 1 / (double)r.p.inner : NAN; /* the mean of no element; 0 of integers */
    r.p.xtype = dtype;
    const int64_t wide = (int64_t)om_dtype_size(acc), size = r.p.parts * r.p.outer * wide;
    r.p.ytype = r.p.parts > 1 ? acc : a->out[0].dtype;
    const om_gpu_kernel one = cls == OM_F32 ? OM_GPU_reduce_f : cls == OM_F64 ? OM_GPU_reduce_d : OM_GPU_reduce_i;
    const om_gpu_kernel lanes = cls == OM_F32   ? OM_GPU_reduce_lanes_f
                                : cls == OM_F64 ? OM_GPU_reduce_lanes_d
                                                : OM_GPU_reduce_lanes_i;
    const bool finish = acc == OM_F64 && (r.p.what == OM_GPU_SUM || r.p.what == OM_GPU_MEAN); /* by columns */
    om_gpu_reduce *g = om_gpu_add(l, r.p.columns ? OM_GPU_OF(reduce_columns, dtype) : r.lanes ? lanes : one,
                                  r.p.columns ? om_gpu_blocks(r.p.outer, 32 * r.p.columns)
                                  : r.lanes   ? om_gpu_blocks(r.p.outer, 32)
                                              : r.p.outer,
                                  r.p.parts, 1, 256, columns_or(r.p.columns, 256 * wide), sizeof *g);
    if (!g) return l->cx->status;
    *g = r.p;
    om_gpu_in(l, &g->x, 0);
    if (r.p.parts == 1) {
        om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
        return OM_OK;
    }
    om_gpu_scratch_at(l, &g->y, 0, size, OM_GPU_WRITE);
    om_gpu_reduce *f = om_gpu_add(l, finish          ? OM_GPU_reduce_columns_f64
                                     : acc == OM_F64 ? OM_GPU_reduce_lanes_d
                                                     : lanes,
                                  om_gpu_blocks(r.p.outer, 32), 1, 1, 256, columns_or(finish, 256 * wide), sizeof *f);
    if (!f) return l->cx->status;
    *f = (om_gpu_reduce){.outer = r.p.outer, .inner = r.p.parts, .orank = 1, .odim = {r.p.outer}, .ostride = {1},
                         .irank = 1, .idim = {r.p.parts}, .istride = {r.p.outer}, .part = r.p.parts, .parts = 1,
                         .what = r.p.what, .scale = r.p.scale, .xtype = acc, .ytype = a->out[0].dtype,
                         .columns = finish};
    om_gpu_scratch_at(l, &f->x, 0, size, OM_GPU_READ);
    om_gpu_out(l, &f->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

/* --- softmax -------------------------------------------------------------------------------------------- */

om_status om_lower_softmax(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    const uint32_t id = a->node->op->id;
    int64_t n = x->rank ? x->dim[axis] : 1, rows = 1, step = 1;
    for (int i = 0; i < x->rank; i++) {
        if (i != axis) rows *= x->dim[i];
        if (i > axis) step *= x->dim[i];
    }
    if (!n) rows = 0;
    if (!om_is_dense(&a->out[0]) || rows > INT32_MAX || n > OM_GPU_ROW_MOST) return om_gpu_host(l);
    om_gpu_softmax *g = rows_add(l, OM_GPU_OF(softmax, x->dtype), rows, n, sizeof *g);
    if (!g) return l->cx->status;
    g->rows = rows, g->n = n, g->step = step;
    g->log = id == OM_OP_log_softmax || id == OM_OP_log_softmax_grad;
    g->grad = a->n_in == 2;
    om_gpu_in(l, &g->x, 0);
    if (g->grad) om_gpu_in(l, &g->y, 1);
    om_gpu_out(l, &g->out, 0, OM_GPU_WRITE);
    return OM_OK;
}

/* --- norms ------------------------------------------------------------------------------------------------ */

static void norm_sizes(const om_args *a, const om_tensor *x, int64_t *rows, int64_t *n) {
    const int axis = (int)om_args_int(a, "axis", 0);
    *rows = *n = 1;
    for (int i = 0; i < x->rank; i++) *(i < axis ? rows : n) *= x->dim[i];
}

static bool outputs_dense(const om_args *a) {
    bool all = true;
    for (int i = 0; i < a->n_out; i++) all &= om_is_dense(&a->out[i]);
    return all;
}

om_status om_lower_norm(om_lower *l) {
    const om_args *a = l->a;
    const bool rms = om_is(a->node, rms_norm);
    int64_t rows, n;
    norm_sizes(a, &a->in[0], &rows, &n);
    if (!n || n > OM_GPU_ROW_MOST || rows > INT32_MAX || !outputs_dense(a)) return om_gpu_host(l);
    om_gpu_norm *g = rows_add(l, OM_GPU_OF(norm, a->in[0].dtype), rows, n, sizeof *g);
    if (!g) return l->cx->status;
    g->rows = rows, g->n = n, g->eps = om_args_float(a, "eps", 1e-5), g->rms = rms, g->type = a->out[0].dtype;
    om_gpu_in(l, &g->x, 0);
    if (a->n_in > 1) om_gpu_in(l, &g->w, 1), g->wtype = a->in[1].dtype;
    if (!rms && a->n_in > 2) om_gpu_in(l, &g->b, 2), g->btype = a->in[2].dtype;
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    if (!rms) om_gpu_out(l, &g->mean, 1, OM_GPU_WRITE);
    om_gpu_out(l, &g->rstd, a->n_out - 1, OM_GPU_WRITE);
    return OM_OK;
}

static int64_t norm_parts(int64_t rows) {
    const int64_t parts = om_gpu_blocks(rows, 64);
    return parts < 64 ? parts : 64;
}

int64_t om_gpu_scratch_norm_grad(om_ctx *cx, const om_args *a) {
    int64_t rows, n;
    (void)cx;
    norm_sizes(a, &a->in[1], &rows, &n);
    return om_args_int(a, "params", 1) ? norm_parts(rows) * 2 * n * 8 : 0;
}

om_status om_lower_norm_grad(om_lower *l) {
    const om_args *a = l->a;
    const bool rms = om_is(a->node, rms_norm_grad), params = om_args_int(a, "params", 1);
    const int dtype = a->in[1].dtype;
    int64_t rows, n;
    norm_sizes(a, &a->in[1], &rows, &n);
    if (!n || !rows || n > OM_GPU_ROW_MOST || rows > INT32_MAX || !outputs_dense(a)) return om_gpu_host(l);
    const om_gpu_norm p = {.rows = rows, .n = n, .rms = rms, .parts = norm_parts(rows), .wtype = a->in[2].dtype,
                           .btype = a->out[a->n_out - 1].dtype, .type = a->in[0].dtype};
    const int64_t wide = (int64_t)om_dtype_size(om_compute_dtype(dtype)), size = p.parts * 2 * n * wide;
    const int64_t piece = 16 / (int64_t)om_dtype_size(dtype); /* columns a thread */
    om_gpu_norm *g;
    if (params) {
        g = om_gpu_add(l, OM_GPU_OF(norm_params, dtype), om_gpu_blocks(n, 32 * piece), p.parts, 1, 256,
                       (size_t)(512 * piece * wide), sizeof *g);
        if (!g) return l->cx->status;
        *g = p;
        om_gpu_in(l, &g->dy, 0);
        om_gpu_in(l, &g->x, 1);
        if (!rms) om_gpu_in(l, &g->mean, 3);
        om_gpu_in(l, &g->rstd, a->n_in - 1);
        om_gpu_scratch_at(l, &g->partial, 0, size, OM_GPU_WRITE);
        g = om_gpu_add(l, OM_GPU_OF(norm_finish, dtype), om_gpu_blocks(n, 32), rms ? 1 : 2, 1, 256, 256 * 8,
                       sizeof *g);
        if (!g) return l->cx->status;
        *g = p;
        g->wtype = a->out[1].dtype;
        om_gpu_scratch_at(l, &g->partial, 0, size, OM_GPU_READ);
        om_gpu_out(l, &g->dw, 1, OM_GPU_WRITE);
        if (!rms) om_gpu_out(l, &g->db, 2, OM_GPU_WRITE);
    }
    g = rows_add(l, OM_GPU_OF(norm_grad, dtype), rows, n, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->dy, 0);
    om_gpu_in(l, &g->x, 1);
    om_gpu_in(l, &g->w, 2);
    if (!rms) om_gpu_in(l, &g->mean, 3);
    om_gpu_in(l, &g->rstd, a->n_in - 1);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

/* --- cross-entropy ------------------------------------------------------------------------------------------ */

int64_t om_gpu_scratch_cross_entropy(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 16 * a->in[0].dim[0];
}

/* Threads for a row of n logits, whose pieces a thread takes four at a time. */
static uint32_t loss_threads(int64_t rows, int64_t n) {
    return n <= 512 ? 32 : n <= 1024 ? 64 : n <= 2048 ? 128 : n <= 8192 || rows >= 256 ? 256 : OM_GPU_ROW_THREADS;
}

static om_status loss_of(om_lower *l, int first, om_gpu_loss *p) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[first], *y = x + 1, *w = a->n_in > first + 2 && x[2].dtype ? x + 2 : NULL;
    OM_CHECK(l->cx, y->dim[0] == x->dim[0], "%s: %lld labels for %lld rows of logits", a->node->op->name,
             (long long)y->dim[0], (long long)x->dim[0]);
    OM_CHECK(l->cx, !w || w->dim[0] == x->dim[1], "%s: %lld class weights for %lld classes", a->node->op->name,
             (long long)(w ? w->dim[0] : 0), (long long)x->dim[1]);
    *p = (om_gpu_loss){.rows = x->dim[0], .n = x->dim[1], .xrow = x->stride[0], .xcol = x->stride[1],
                       .label_step = y->stride[0], .wide = y->dtype == OM_I64,
                       .ignore = attr_value(a, "ignore_index", -100),
                       .smoothing = om_args_float(a, "label_smoothing", 0),
                       .reduction = (int32_t)om_args_int(a, "reduction", OM_LOSS_MEAN)};
    if (w) p->weight_step = w->stride[0], p->wtype = w->dtype;
    return OM_OK;
}

static void loss_operands(om_lower *l, int first, om_gpu_loss *g) {
    om_gpu_in(l, &g->x, first);
    om_gpu_in(l, &g->labels, first + 1);
    om_gpu_in(l, &g->weight, first + 2);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
}

om_status om_lower_cross_entropy(om_lower *l) {
    const om_args *a = l->a;
    const int dtype = a->in[0].dtype;
    om_gpu_loss p;
    OM_TRY(loss_of(l, 0, &p));
    if (p.rows > INT32_MAX || !outputs_dense(a)) return om_gpu_host(l);
    om_gpu_loss *g = om_gpu_add(l, OM_GPU_OF(loss, dtype), p.rows, 1, 1, loss_threads(p.rows, p.n), 32 * 8,
                                sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    loss_operands(l, 0, g);
    om_gpu_out(l, &g->lse, 1, OM_GPU_WRITE);
    om_gpu_scratch_at(l, &g->row, 0, 16 * p.rows, OM_GPU_WRITE);
    g = om_gpu_add(l, OM_GPU_OF(loss_finish, a->out[0].dtype), 1, 1, 1, threads_for(p.rows), 32 * 8, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_scratch_at(l, &g->row, 0, 16 * p.rows, OM_GPU_READ);
    om_gpu_out(l, &g->loss, 0, OM_GPU_WRITE);
    om_gpu_out(l, &g->denom, 2, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_cross_entropy_grad(om_lower *l) {
    const om_args *a = l->a;
    om_gpu_loss p;
    OM_TRY(loss_of(l, 1, &p));
    if (p.rows > INT32_MAX || !outputs_dense(a)) return om_gpu_host(l);
    om_gpu_loss *g = om_gpu_add(l, OM_GPU_OF(loss_grad, a->in[1].dtype), p.rows, 1, 1, loss_threads(p.rows, p.n),
                                32 * 8, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    loss_operands(l, 1, g);
    g->gtype = a->in[0].dtype;
    if (!p.reduction) g->loss_step = a->in[0].stride[0];
    om_gpu_in(l, &g->dloss, 0);
    om_gpu_in(l, &g->lse, 4);
    om_gpu_in(l, &g->denom, 5);
    om_gpu_out(l, &g->dx, 0, OM_GPU_WRITE);
    return OM_OK;
}

/* --- rows by index ------------------------------------------------------------------------------------------- */

/* y (dense, of these dimensions) = x at indices along `axis`, which lie at an element's coordinates times `is`. shared:
 * an index serves many elements, and a fault names its own place. */
static om_status elements_lower(om_lower *l, int rank, const int64_t *dim, const int64_t *is, bool shared) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    if (rank > OM_GPU_RANK || !om_is_dense(&a->out[0])) return om_gpu_host(l);
    const int64_t total = om_numel(&a->out[0]);
    om_gpu_elements *g = om_gpu_add(l, OM_GPU_gather_elements, om_gpu_grid(total, 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->total = total, g->rank = rank, g->n = x->rank ? x->dim[axis] : 1, g->step = x->rank ? x->stride[axis] : 0;
    for (int i = 0; i < rank; i++) g->dim[i] = dim[i], g->is[i] = is[i], g->xs[i] = i == axis ? 0 : x->stride[i];
    g->size = (int32_t)om_dtype_size(x->dtype), g->wide = a->in[1].dtype == OM_I64, g->shared = shared;
    om_gpu_in(l, &g->x, 0);
    om_gpu_in(l, &g->idx, 1);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_gather(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0], *idx = &a->in[1];
    const int axis = (int)om_args_int(a, "axis", 0);
    int64_t dim[2][OM_RANK], stride[2][OM_RANK], outer = 1, inner = 1;
    int rank[2] = {0, 0};
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        *(i < axis ? &outer : &inner) *= x->dim[i];
        axis_add(x->dim[i], x->stride[i], &rank[i > axis], dim[i > axis], stride[i > axis]);
    }
    if (rank[0] > 1 || rank[1] > 1) { /* rows with gaps: element by element */
        int64_t each[OM_RANK], at[OM_RANK] = {0};
        memcpy(each, x->dim, sizeof each);
        each[axis] = om_numel(idx), at[axis] = 1;
        return elements_lower(l, x->rank, each, at, true);
    }
    if (!om_is_dense(&a->out[0])) return om_gpu_host(l);
    const int64_t m = om_numel(idx), size = (int64_t)om_dtype_size(x->dtype);
    const int64_t x_outer = rank[0] ? stride[0][0] : 0, x_inner = rank[1] ? stride[1][0] : 0, x_n = x->stride[axis];
    int64_t unit = x_inner == 1 ? 16 : size; /* bytes that may be moved at once */
    while (unit > size && (inner | x_outer | x_n) * size & (unit - 1)) unit /= 2;
    const int64_t each = unit / size;
    om_gpu_gather *g = om_gpu_add(l, OM_GPU_gather, om_gpu_grid(outer * m * (inner / each), 1024), 1, 1, 256, 0,
                                  sizeof *g);
    if (!g) return l->cx->status;
    g->outer = outer, g->n = x->dim[axis], g->m = m, g->inner = inner / each, g->size = (int32_t)size;
    g->x_outer = x_outer / each, g->x_inner = x_inner, g->x_n = x_n / each, g->unit = (int32_t)unit;
    g->wide = idx->dtype == OM_I64;
    om_gpu_in(l, &g->x, 0);
    om_gpu_in(l, &g->idx, 1);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_gather_elements(om_lower *l) {
    const om_tensor *x = &l->a->in[0], *idx = &l->a->in[1];
    const int axis = (int)om_args_int(l->a, "axis", 0);
    for (int i = 0; i < idx->rank; i++)
        OM_CHECK(l->cx, i == axis || idx->dim[i] <= x->dim[i],
                 "gather_elements: indices have size %lld along axis %d, data only %lld", (long long)idx->dim[i], i,
                 (long long)x->dim[i]);
    return elements_lower(l, idx->rank, idx->dim, idx->stride, false);
}
