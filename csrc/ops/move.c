/* move.c - operators that move elements without looking at them: copy, concat, pad, slice_put, slice_scatter, trilu,
 * and the two that make elements from nothing: iota, fill.
 *
 * Nearly all are om_copy onto a part of the output: a part of a tensor is a tensor (same strides, other sizes and
 * start). What padding leaves uncovered is filled slab by slab, so every element is written once. A fill is a copy from
 * one element with strides 0.
 */
#include "ops/attr.h"
#include "cpu/copy.h"
#include "cpu/walk.h"

static om_tensor part(const om_tensor *t, int axis, int64_t start, int64_t count, int64_t step) {
    om_tensor p = *t;
    if (p.data) p.data = (char *)p.data + start * p.stride[axis] * (int64_t)om_dtype_size(p.dtype);
    p.dim[axis] = count;
    p.stride[axis] *= step;
    return p;
}

/* x converted to t's dtype, everywhere in t */
static om_status fill_tensor(om_ctx *cx, om_tensor *t, double f, int64_t i, bool is_int) {
    union { double f; int64_t i; char bytes[8]; } value, element;
    if (is_int) value.i = i;
    else value.f = f;
    om_tensor from = {.data = &value, .dtype = is_int ? OM_I64 : OM_F64, .device = -1};
    om_tensor to = {.data = &element, .dtype = t->dtype, .device = -1};
    OM_TRY(om_copy(cx, &from, &to));
    om_tensor one = *t;
    one.data = &element;
    memset(one.stride, 0, sizeof one.stride);
    return om_copy(cx, &one, t);
}

static om_status fill_zero(om_ctx *cx, om_tensor *t) { return fill_tensor(cx, t, 0, 0, true); }

/* A number of any attribute kind. */
static void attr_number(const om_args *a, const char *name, double *f, int64_t *i, bool *is_int) {
    const om_attr *x = om_attr_get(a->attr, a->n_attr, name);
    if (!x) return;
    *is_int = x->kind != OM_ATTR_FLOAT;
    *i = x->kind == OM_ATTR_INT ? x->i : x->kind == OM_ATTR_DIMS && x->n == 1 ? x->dims[0] : 0;
    *f = x->kind == OM_ATTR_FLOAT ? x->f : (double)*i;
}

static om_status attr_dtype(om_graph *g, const om_node *n, om_type *out) {
    int64_t t = om_node_int(n, "dtype", 0);
    OM_CHECK(g->cx, om_is_float((int)t) || om_is_int((int)t), "%s: attribute dtype is missing or no number type",
             n->op->name);
    out->dtype = (uint8_t)t;
    return OM_OK;
}

/* --- copy ------------------------------------------------------------------------------------------- */

static om_status same_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    return OM_OK;
}
static om_status copy_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)b, (void)n, (void)want;
    dx[0] = dy[0];
    return OM_OK;
}
static om_status copy_run(om_ctx *cx, const om_args *a) { return om_copy(cx, &a->in[0], &a->out[0]); }

const om_op om_op_copy = {
    .name = "copy", .doc = "y = x, dense", .kind = OM_K_GATHER, .min_in = 1, .max_in = 1, .n_out = 1,
    .infer = same_infer, .grad = copy_grad, .run = copy_run,
};

/* --- concat ----------------------------------------------------------------------------------------- */

static om_status concat_infer(om_graph *g, const om_node *n, om_type *out) {
    int axis;
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_TRY(attr_axis(g, n, out->rank, &axis));
    for (int i = 1; i < n->n_in; i++) {
        OM_CHECK(g->cx, om_ins(g, n)[i] != OM_NONE, "concat: operand %d is left out", i);
        const om_type *x = om_ty(g, om_ins(g, n)[i]);
        OM_CHECK(g->cx, x->dtype == out->dtype && x->rank == out->rank,
                 "concat: operand %d is %s of rank %d, operand 0 %s of rank %d; all must agree", i,
                 om_dtype_name(x->dtype), x->rank, om_dtype_name(out->dtype), out->rank);
        for (int k = 0; k < x->rank; k++)
            OM_CHECK(g->cx, k == axis || !attr_differs(g, x->dim[k], out->dim[k]),
                     "concat along axis %d: operand %d has size %lld along axis %d, operand 0 %lld; they must be equal",
                     axis, i, (long long)x->dim[k], k, (long long)out->dim[k]);
        out->dim[axis] = om_dim_add(g, out->dim[axis], x->dim[axis]);
    }
    return OM_OK;
}

static om_status concat_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    int axis = (int)om_node_int(n, "axis", 0);
    om_dim start = 0;
    for (int i = 0; i < n->n_in; i++) {
        om_type x = *om_ty(g, om_ins(g, n)[i]);
        om_dim end = om_dim_add(g, start, x.dim[axis]);
        if (want[i]) dx[i] = om_b_reshape(g, om_b_slice(g, dy[0], axis, start, end, 1), x.dim, x.rank);
        start = end;
    }
    return OM_OK;
}

static om_status concat_run(om_ctx *cx, const om_args *a) {
    int axis = (int)om_args_int(a, "axis", 0);
    int64_t start = 0;
    for (int i = 0; i < a->n_in; i++) {
        OM_CHECK(cx, start + a->in[i].dim[axis] <= a->out[0].dim[axis], "concat: operand %d does not fit the output",
                 i);
        om_tensor to = part(&a->out[0], axis, start, a->in[i].dim[axis], 1);
        OM_TRY(om_copy(cx, &a->in[i], &to));
        start += a->in[i].dim[axis];
    }
    return OM_OK;
}

const om_op om_op_concat = {
    .name = "concat",
    .doc = "y = the operands one after another along axis",
    .kind = OM_K_GATHER,
    .min_in = 1,
    .max_in = -1,
    .n_out = 1,
    .infer = concat_infer,
    .grad = concat_grad,
    .run = concat_run,
};

/* --- pad -------------------------------------------------------------------------------------------- */

static om_status pad_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    const om_attr *lo, *hi;
    OM_TRY(attr_shape(g, n, "lo", &lo));
    OM_TRY(attr_shape(g, n, "hi", &hi));
    OM_CHECK(g->cx, lo->n == out->rank && hi->n == out->rank,
             "pad: lo and hi need one entry per axis (%d), %u and %u given", out->rank, lo->n, hi->n);
    for (int i = 0; i < out->rank; i++) {
        int64_t d;
        out->dim[i] = om_dim_add(g, om_dim_add(g, out->dim[i], lo->dims[i]), hi->dims[i]);
        OM_CHECK(g->cx, !om_dim_const(g, out->dim[i], &d) || d >= 0, "pad: axis %d would get size %lld; crop less", i,
                 (long long)d);
    }
    return OM_OK;
}

static om_status pad_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_graph *g = b->g;
    om_type x = *om_ty(g, om_ins(g, n)[0]);
    const om_attr *lo, *hi;
    om_dim l[OM_RANK], h[OM_RANK];
    OM_TRY(attr_shape(g, n, "lo", &lo));
    OM_TRY(attr_shape(g, n, "hi", &hi));
    for (int i = 0; i < x.rank; i++) {
        l[i] = om_dim_sub(g, 0, lo->dims[i]);
        h[i] = om_dim_sub(g, 0, hi->dims[i]);
    }
    om_id d = om_make(g, &om_op_pad, OM_IN(dy[0]),
                      OM_ATTRS(OM_AD("lo", l, x.rank), OM_AD("hi", h, x.rank), OM_AF("value", 0)));
    dx[0] = om_b_reshape(g, d, x.dim, x.rank);
    return OM_OK;
}

static om_status pad_run(om_ctx *cx, const om_args *a) {
    int count;
    const int64_t *lo = attr_values(a, "lo", &count), *hi = attr_values(a, "hi", &count);
    double f = 0;
    int64_t v = 0;
    bool is_int = true;
    attr_number(a, "value", &f, &v, &is_int);
    om_tensor x = a->in[0], y = a->out[0];
    for (int i = 0; i < x.rank; i++) { /* shrink x and y to what they share; what y loses is filled */
        int64_t head = lo[i] > 0 ? lo[i] : 0, skip = lo[i] < 0 ? -lo[i] : 0;
        int64_t n = x.dim[i] - skip - (hi[i] < 0 ? -hi[i] : 0);
        if (n <= 0) return fill_tensor(cx, &y, f, v, is_int);
        om_tensor before = part(&y, i, 0, head, 1), after = part(&y, i, head + n, y.dim[i] - head - n, 1);
        OM_TRY(fill_tensor(cx, &before, f, v, is_int));
        OM_TRY(fill_tensor(cx, &after, f, v, is_int));
        x = part(&x, i, skip, n, 1);
        y = part(&y, i, head, n, 1);
    }
    return om_copy(cx, &x, &y);
}

const om_op om_op_pad = {
    .name = "pad", .doc = "y = x with lo[i] and hi[i] elements of `value` added around axis i; negative numbers crop",
    .kind = OM_K_GATHER, .min_in = 1, .max_in = 1, .n_out = 1, .infer = pad_infer, .grad = pad_grad, .run = pad_run,
};

/* --- slice_put, slice_scatter ------------------------------------------------------------------------- */

static om_dim slice_size(om_graph *g, om_dim start, om_dim end, int64_t step) {
    om_dim span = om_dim_sub(g, end, start);
    return step == 1 ? span : om_dim_div(g, om_dim_add(g, span, step - 1), step);
}

/* `src` goes to start:end:step along axis of something of `whole`'s sizes. */
static om_status slice_check(om_graph *g, const om_node *n, const om_type *src, const om_type *whole) {
    int axis;
    OM_TRY(attr_axis(g, n, whole->rank, &axis));
    int64_t step = om_node_int(n, "step", 1);
    om_dim size = slice_size(g, attr_dim(n, "start", 0), attr_dim(n, "end", whole->dim[axis]), step < 1 ? 1 : step);
    OM_CHECK(g->cx, step >= 1, "%s: step is %lld; it must be at least 1", n->op->name, (long long)step);
    OM_CHECK(g->cx, src->rank == whole->rank && src->dtype == whole->dtype,
             "%s: a %s of rank %d cannot go into a %s of rank %d", n->op->name, om_dtype_name(src->dtype), src->rank,
             om_dtype_name(whole->dtype), whole->rank);
    for (int i = 0; i < whole->rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, src->dim[i], i == axis ? size : whole->dim[i]),
                 "%s: the slice has size %lld along axis %d, what goes there %lld", n->op->name,
                 (long long)(i == axis ? size : whole->dim[i]), i, (long long)src->dim[i]);
    return OM_OK;
}

/* The slice of y that the attributes name; checks bounds. */
static om_status slice_of(om_ctx *cx, const om_args *a, const om_tensor *src, om_tensor *y, om_tensor *to,
                          int64_t *start, int *axis) {
    *axis = (int)om_args_int(a, "axis", 0);
    *start = attr_value(a, "start", 0);
    int64_t end = attr_value(a, "end", y->dim[*axis]), step = om_args_int(a, "step", 1),
            n = (end - *start + step - 1) / step;
    OM_CHECK(cx, *start >= 0 && *start <= end && end <= y->dim[*axis] && n == src->dim[*axis],
             "%s: %lld to %lld step %lld of axis %d of size %lld for %lld elements", a->node->op->name,
             (long long)*start, (long long)end, (long long)step, *axis, (long long)y->dim[*axis],
             (long long)src->dim[*axis]);
    *to = part(y, *axis, n ? *start : 0, n, step);
    return OM_OK;
}

static om_status slice_put_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    *out = *x;
    out->rank = (uint8_t)shape->n;
    for (uint32_t i = 0; i < shape->n; i++) out->dim[i] = shape->dims[i];
    return slice_check(g, n, x, out);
}

static om_status slice_put_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    int axis = (int)om_node_int(n, "axis", 0);
    om_id d = om_b_slice(b->g, dy[0], axis, attr_dim(n, "start", 0), attr_dim(n, "end", om_ty(b->g, dy[0])->dim[axis]),
                         om_node_int(n, "step", 1));
    dx[0] = om_b_reshape(b->g, d, x.dim, x.rank);
    return OM_OK;
}

static om_status slice_put_run(om_ctx *cx, const om_args *a) {
    om_tensor *y = &a->out[0], to;
    int64_t start;
    int axis;
    OM_TRY(slice_of(cx, a, &a->in[0], y, &to, &start, &axis));
    if (om_args_int(a, "step", 1) == 1) {
        om_tensor before = part(y, axis, 0, start, 1);
        om_tensor after = part(y, axis, start + to.dim[axis], y->dim[axis] - start - to.dim[axis], 1);
        OM_TRY(fill_zero(cx, &before));
        OM_TRY(fill_zero(cx, &after));
    } else {
        OM_TRY(fill_zero(cx, y));
    }
    return om_copy(cx, &a->in[0], &to);
}

const om_op om_op_slice_put = {
    .name = "slice_put",
    .doc = "y = zeros of `shape` with x at start:end:step along axis: the gradient of slice",
    .kind = OM_K_SCATTER,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = slice_put_infer,
    .grad = slice_put_grad,
    .run = slice_put_run,
};

static om_status slice_scatter_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    return slice_check(g, n, om_ty(g, om_ins(g, n)[1]), out);
}

static om_status slice_scatter_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_type src = *om_ty(g, om_ins(g, n)[1]);
    int axis = (int)om_node_int(n, "axis", 0);
    om_dim end = attr_dim(n, "end", om_ty(g, dy[0])->dim[axis]);
    if (want[0]) {
        om_id zero = om_b_fill(g, src.dtype, src.dim, src.rank, 0);
        dx[0] = om_make(g, &om_op_slice_scatter, OM_IN(dy[0], zero), n->attr, n->n_attr);
    }
    if (want[1]) {
        om_id d = om_b_slice(g, dy[0], axis, attr_dim(n, "start", 0), end, om_node_int(n, "step", 1));
        dx[1] = om_b_reshape(g, d, src.dim, src.rank);
    }
    return OM_OK;
}

static om_status slice_scatter_run(om_ctx *cx, const om_args *a) {
    om_tensor *y = &a->out[0], to;
    int64_t start;
    int axis;
    OM_TRY(slice_of(cx, a, &a->in[1], y, &to, &start, &axis));
    if (y->data != a->in[0].data) OM_TRY(om_copy(cx, &a->in[0], y));
    return om_copy(cx, &a->in[1], &to);
}

const om_op om_op_slice_scatter = {
    .name = "slice_scatter",
    .doc = "y = x with src (second operand) written at start:end:step along axis",
    .kind = OM_K_SCATTER,
    .min_in = 2,
    .max_in = 2,
    .n_out = 1,
    .inplace = 1u << 0,
    .infer = slice_scatter_infer,
    .grad = slice_scatter_grad,
    .run = slice_scatter_run,
};

/* --- trilu ------------------------------------------------------------------------------------------ */

static om_status trilu_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, out->rank >= 2, "trilu: a tensor of rank %d; at least 2 is needed", out->rank);
    return OM_OK;
}

static om_status trilu_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    dx[0] = om_make(b->g, &om_op_trilu, OM_IN(dy[0]), n->attr, n->n_attr);
    return OM_OK;
}

typedef struct trilu_job {
    const om_tensor *x;
    om_tensor *y;
    int64_t k, size;
    bool upper;
    om_walk rows; /* every axis but the last */
} trilu_job;

static void trilu_range(void *arg, int64_t begin, int64_t end) {
    const trilu_job *j = arg;
    const int r = j->x->rank;
    const int64_t cols = j->x->dim[r - 1], size = j->size;
    om_copy_line line = OM_PICK(om_copy)->move[size == 8 ? 3 : size == 4 ? 2 : size == 2 ? 1 : 0];
    om_walk w = j->rows;
    walk_seek(&w, begin);
    for (int64_t i = begin; i < end; i++, walk_next(&w)) {
        /* upper keeps columns >= row + k, lower columns <= row + k */
        int64_t edge = w.at[r - 2] + j->k + !j->upper;
        edge = edge < 0 ? 0 : edge > cols ? cols : edge;
        int64_t lo = j->upper ? edge : 0, hi = j->upper ? cols : edge;
        char *y = (char *)j->y->data + w.off[1];
        memset(y, 0, (size_t)(lo * size));
        line((const char *)j->x->data + w.off[0] + lo * j->x->stride[r - 1] * size, j->x->stride[r - 1] * size,
             y + lo * size, size, hi - lo);
        memset(y + hi * size, 0, (size_t)((cols - hi) * size));
    }
}

static om_status trilu_run(om_ctx *cx, const om_args *a) {
    const om_tensor *x = &a->in[0];
    trilu_job j = {.x = x, .y = &a->out[0], .k = attr_value(a, "k", 0), .upper = om_args_int(a, "upper", 1) != 0};
    if (!om_numel(x)) return OM_OK;
    j.size = (int64_t)om_dtype_size(x->dtype);
    j.rows.rank = x->rank - 1;
    j.rows.n = 2;
    for (int i = 0; i < x->rank - 1; i++) {
        j.rows.dim[i] = x->dim[i];
        j.rows.stride[0][i] = x->stride[i] * j.size;
        j.rows.stride[1][i] = a->out[0].stride[i] * j.size;
    }
    om_parallel_for(cx, walk_count(&j.rows), 1 + 32768 / x->dim[x->rank - 1], trilu_range, &j);
    return OM_OK;
}

const om_op om_op_trilu = {
    .name = "trilu",
    .doc = "y = x with zeros below (upper) or above (lower) the k-th diagonal of the last two axes",
    .kind = OM_K_GATHER,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = trilu_infer,
    .grad = trilu_grad,
    .run = trilu_run,
};

/* --- iota, fill ------------------------------------------------------------------------------------- */

static om_status iota_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    OM_CHECK(g->cx, shape->n == 1, "iota: shape must have one entry, it has %u", shape->n);
    out->rank = 1;
    out->dim[0] = shape->dims[0];
    return attr_dtype(g, n, out);
}

typedef struct iota_job {
    om_tensor *y;
    double f0, fstep;
    int64_t i0, istep;
    bool is_int;
} iota_job;

static void iota_range(void *arg, int64_t begin, int64_t end) {
    const iota_job *j = arg;
    enum { BLOCK = 512 };
    union { double f[BLOCK]; int64_t i[BLOCK]; } buf;
    om_copy_line store = OM_PICK(om_copy)->convert[j->is_int ? OM_I64 : OM_F64][j->y->dtype];
    int64_t size = (int64_t)om_dtype_size(j->y->dtype);
    for (int64_t b = begin; b < end; b += BLOCK) {
        int64_t n = end - b < BLOCK ? end - b : BLOCK;
        for (int64_t i = 0; i < n; i++)
            if (j->is_int) buf.i[i] = (int64_t)((uint64_t)j->i0 + (uint64_t)j->istep * (uint64_t)(b + i));
            else buf.f[i] = j->f0 + j->fstep * (double)(b + i);
        store((const char *)&buf, 8, (char *)j->y->data + b * size, size, n);
    }
}

static om_status iota_run(om_ctx *cx, const om_args *a) {
    iota_job j = {.y = &a->out[0], .f0 = 0, .fstep = 1, .i0 = 0, .istep = 1};
    bool int0 = true, int_step = true;
    attr_number(a, "start", &j.f0, &j.i0, &int0);
    attr_number(a, "step", &j.fstep, &j.istep, &int_step);
    j.is_int = int0 && int_step;
    om_parallel_for(cx, j.y->dim[0], 16384, iota_range, &j);
    return OM_OK;
}

const om_op om_op_iota = {
    .name = "iota",
    .doc = "y[i] = start + step * i; shape (one size), dtype",
    .kind = OM_K_CREATE,
    .min_in = 0,
    .max_in = 0,
    .n_out = 1,
    .device_only_meta = true,
    .infer = iota_infer,
    .run = iota_run,
};

static om_status fill_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    out->rank = (uint8_t)shape->n;
    for (uint32_t i = 0; i < shape->n; i++) out->dim[i] = shape->dims[i];
    return attr_dtype(g, n, out);
}

static om_status fill_run(om_ctx *cx, const om_args *a) {
    double f = 0;
    int64_t i = 0;
    bool is_int = true;
    attr_number(a, "value", &f, &i, &is_int);
    return fill_tensor(cx, &a->out[0], f, i, is_int);
}

const om_op om_op_fill = {
    .name = "fill",
    .doc = "y = value everywhere; shape, dtype",
    .kind = OM_K_CREATE,
    .min_in = 0,
    .max_in = 0,
    .n_out = 1,
    .device_only_meta = true,
    .infer = fill_infer,
    .run = fill_run,
};
