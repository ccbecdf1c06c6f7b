/* move.c - ops/move.c on the CPU.
 *
 * Nearly all are om_copy onto a part of the output: a part of a tensor is a tensor (same strides, other sizes and
 * start). What padding leaves uncovered is filled slab by slab, so every element is written once. A fill is a copy from
 * one element with strides 0.
 */
#include "cpu/cpu.h"
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

/* --- copy ------------------------------------------------------------------------------------------- */

om_status om_cpu_run_copy(om_ctx *cx, const om_args *a) { return om_copy(cx, &a->in[0], &a->out[0]); }

/* --- concat ----------------------------------------------------------------------------------------- */

om_status om_cpu_run_concat(om_ctx *cx, const om_args *a) {
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

/* --- pad -------------------------------------------------------------------------------------------- */

om_status om_cpu_run_pad(om_ctx *cx, const om_args *a) {
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

/* --- slice_put, slice_scatter ------------------------------------------------------------------------- */

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

om_status om_cpu_run_slice_put(om_ctx *cx, const om_args *a) {
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

om_status om_cpu_run_slice_scatter(om_ctx *cx, const om_args *a) {
    om_tensor *y = &a->out[0], to;
    int64_t start;
    int axis;
    OM_TRY(slice_of(cx, a, &a->in[1], y, &to, &start, &axis));
    if (y->data != a->in[0].data) OM_TRY(om_copy(cx, &a->in[0], y));
    return om_copy(cx, &a->in[1], &to);
}

/* --- trilu ------------------------------------------------------------------------------------------ */

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

om_status om_cpu_run_trilu(om_ctx *cx, const om_args *a) {
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

/* --- iota, fill ------------------------------------------------------------------------------------- */

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

om_status om_cpu_run_iota(om_ctx *cx, const om_args *a) {
    iota_job j = {.y = &a->out[0], .f0 = 0, .fstep = 1, .i0 = 0, .istep = 1};
    bool int0 = true, int_step = true;
    attr_number(a, "start", &j.f0, &j.i0, &int0);
    attr_number(a, "step", &j.fstep, &j.istep, &int_step);
    j.is_int = int0 && int_step;
    om_parallel_for(cx, j.y->dim[0], 16384, iota_range, &j);
    return OM_OK;
}

om_status om_cpu_run_fill(om_ctx *cx, const om_args *a) {
    double f = 0;
    int64_t i = 0;
    bool is_int = true;
    attr_number(a, "value", &f, &i, &is_int);
    return fill_tensor(cx, &a->out[0], f, i, is_int);
}
