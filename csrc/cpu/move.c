/* move.c - ops/move.c on the CPU, and `cast_all`.
 *
 * Nearly all are copies onto parts of the output: a part of a tensor is a tensor (same strides, other sizes and start).
 * What padding leaves uncovered is filled slab by slab, so every element is written once. A fill is a copy from one
 * element with strides 0. Which parts, and how each is copied, is a list made once per plan.
 */
#include "cpu/cpu.h"
#include "cpu/copy.h"
#include "cpu/walk.h"
#include "ops/attr.h"

typedef struct move_part {        /* of a tensor, `at` bytes after its start */
    om_tensor t;
    int64_t at;
} move_part;

typedef struct move_piece {
    struct move_piece *next;
    om_copy_job job;
    int64_t src_at, dst_at;       /* bytes */
    int operand;                  /* VALUE: the value */
    bool whole;                   /* operand onto output: nothing to do where they are one */
} move_piece;
enum { VALUE = -1 };

typedef union move_value { double f; int64_t i; char bytes[8]; } move_value;

typedef struct move_prep {
    move_piece *piece;
    move_value value;             /* of the output's dtype */
} move_prep;

typedef struct mover {            /* makes the list, first piece first */
    om_ctx *cx;
    om_arena *mem;
    move_prep *prep;
    move_piece **end;
} mover;

static om_status mover_new(om_ctx *cx, om_arena *mem, const void **prep, mover *m) {
    *m = (mover){.cx = cx, .mem = mem, .prep = om_arena_alloc(mem, sizeof *m->prep)};
    if (!(*prep = m->prep)) return cx->status;
    m->end = &m->prep->piece;
    return OM_OK;
}

static om_status mover_add(mover *m, int operand, const move_part *from, const move_part *to, bool whole) {
    om_copy_axis axis[OM_RANK];
    om_copy_job job;
    OM_TRY(om_copy_prepare(m->cx, &from->t, &to->t, axis, &job));
    if (!job.items) return OM_OK;
    move_piece *p = om_arena_alloc(m->mem, sizeof *p);
    if (!p || !om_copy_keep(m->mem, &job)) return m->cx->status;
    *p = (move_piece){.job = job, .src_at = from->at, .dst_at = to->at, .operand = operand, .whole = whole};
    *m->end = p;
    m->end = &p->next;
    return OM_OK;
}

static om_status mover_fill(mover *m, const move_part *to) {
    move_part one = *to;
    one.at = 0;
    memset(one.t.stride, 0, sizeof one.t.stride);
    return mover_add(m, VALUE, &one, to, false);
}

static om_status move_copies(mover *m, int operand, const om_args *a, const move_part *to, bool whole) {
    const move_part from = {.t = a->in[operand]};
    return mover_add(m, operand, &from, to, whole);
}

static move_part move_whole(const om_tensor *t) { return (move_part){.t = *t}; }

static move_part part(const move_part *of, int axis, int64_t start, int64_t count, int64_t step) {
    move_part p = *of;
    p.at += start * p.t.stride[axis] * (int64_t)om_dtype_size(p.t.dtype);
    p.t.dim[axis] = count;
    p.t.stride[axis] *= step;
    return p;
}

/* A number of any attribute kind. */
static void attr_number(const om_args *a, const char *name, double *f, int64_t *i, bool *is_int) {
    const om_attr *x = om_attr_get(a->attr, a->n_attr, name);
    if (!x) return;
    *is_int = x->kind != OM_ATTR_FLOAT;
    *i = x->kind == OM_ATTR_INT ? x->i : x->kind == OM_ATTR_DIMS && x->n == 1 ? x->dims[0] : 0;
    *f = x->kind == OM_ATTR_FLOAT ? x->f : (double)*i;
}

/* Attribute `value` (0 when absent) converted to the output's dtype. */
static om_status mover_value(mover *m, const om_args *a) {
    move_value value = {.i = 0};
    double f = 0;
    int64_t i = 0;
    bool is_int = true;
    attr_number(a, "value", &f, &i, &is_int);
    if (is_int) value.i = i;
    else value.f = f;
    om_tensor from = {.data = &value, .dtype = is_int ? OM_I64 : OM_F64, .device = -1};
    om_tensor to = {.data = &m->prep->value, .dtype = a->out[0].dtype, .device = -1};
    return om_copy(m->cx, &from, &to);
}

om_status om_cpu_run_move(om_ctx *cx, const om_args *a) {
    const move_prep *prep = a->prep;
    char *to = a->out[0].data;
    for (const move_piece *p = prep->piece; p; p = p->next) {
        const char *from = p->operand == VALUE ? prep->value.bytes : a->in[p->operand].data;
        if (p->whole && from == to) continue;
        om_copy_run(cx, &p->job, from + p->src_at, to + p->dst_at);
    }
    return OM_OK;
}

/* --- copy, fill, concat ------------------------------------------------------------------------------- */

om_status om_cpu_prepare_copy(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    mover m;
    OM_TRY(mover_new(cx, mem, prep, &m));
    const move_part y = move_whole(&a->out[0]);
    return move_copies(&m, 0, a, &y, false);
}

om_status om_cpu_prepare_fill(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    mover m;
    OM_TRY(mover_new(cx, mem, prep, &m));
    OM_TRY(mover_value(&m, a));
    const move_part y = move_whole(&a->out[0]);
    return mover_fill(&m, &y);
}

om_status om_cpu_prepare_concat(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const int axis = (int)om_args_int(a, "axis", 0);
    const move_part y = move_whole(&a->out[0]);
    int64_t start = 0;
    mover m;
    OM_TRY(mover_new(cx, mem, prep, &m));
    for (int i = 0; i < a->n_in; i++) {
        OM_CHECK(cx, start + a->in[i].dim[axis] <= y.t.dim[axis], "concat: operand %d does not fit the output", i);
        const move_part to = part(&y, axis, start, a->in[i].dim[axis], 1);
        OM_TRY(move_copies(&m, i, a, &to, false));
        start += a->in[i].dim[axis];
    }
    return OM_OK;
}

/* --- pad -------------------------------------------------------------------------------------------- */

om_status om_cpu_prepare_pad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    int count;
    const int64_t *lo = attr_values(a, "lo", &count), *hi = attr_values(a, "hi", &count);
    mover m;
    OM_TRY(mover_new(cx, mem, prep, &m));
    OM_TRY(mover_value(&m, a));
    move_part x = move_whole(&a->in[0]), y = move_whole(&a->out[0]);
    for (int i = 0; i < x.t.rank; i++) { /* shrink x and y to what they share; what y loses is filled */
        int64_t head = lo[i] > 0 ? lo[i] : 0, skip = lo[i] < 0 ? -lo[i] : 0;
        int64_t n = x.t.dim[i] - skip - (hi[i] < 0 ? -hi[i] : 0);
        if (n <= 0) return mover_fill(&m, &y);
        const move_part before = part(&y, i, 0, head, 1), after = part(&y, i, head + n, y.t.dim[i] - head - n, 1);
        OM_TRY(mover_fill(&m, &before));
        OM_TRY(mover_fill(&m, &after));
        x = part(&x, i, skip, n, 1);
        y = part(&y, i, head, n, 1);
    }
    return mover_add(&m, 0, &x, &y, false);
}

/* --- slice_put, slice_scatter ------------------------------------------------------------------------- */

typedef struct slice { int axis; int64_t start, n, step; } slice;

/* The slice of y that the attributes name, for src; checks bounds. */
static om_status slice_of(om_ctx *cx, const om_args *a, const om_tensor *src, const move_part *y, slice *s,
                          move_part *to) {
    *s = (slice){(int)om_args_int(a, "axis", 0), attr_value(a, "start", 0), 0, om_args_int(a, "step", 1)};
    const int64_t size = y->t.dim[s->axis], end = attr_value(a, "end", size);
    s->n = (end - s->start + s->step - 1) / s->step;
    OM_CHECK(cx, s->start >= 0 && s->start <= end && end <= size && s->n == src->dim[s->axis],
             "%s: %lld to %lld step %lld of axis %d of size %lld for %lld elements", a->node->op->name,
             (long long)s->start, (long long)end, (long long)s->step, s->axis, (long long)size,
             (long long)src->dim[s->axis]);
    *to = part(y, s->axis, s->n ? s->start : 0, s->n, s->step);
    return OM_OK;
}

om_status om_cpu_prepare_slice_put(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const move_part y = move_whole(&a->out[0]);
    move_part to;
    slice s;
    mover m;
    OM_TRY(mover_new(cx, mem, prep, &m));
    OM_TRY(slice_of(cx, a, &a->in[0], &y, &s, &to));
    if (s.step == 1) {
        const move_part before = part(&y, s.axis, 0, s.start, 1),
                        after = part(&y, s.axis, s.start + s.n, y.t.dim[s.axis] - s.start - s.n, 1);
        OM_TRY(mover_fill(&m, &before));
        OM_TRY(mover_fill(&m, &after));
    } else {
        OM_TRY(mover_fill(&m, &y));
    }
    return move_copies(&m, 0, a, &to, false);
}

om_status om_cpu_prepare_slice_scatter(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const move_part y = move_whole(&a->out[0]);
    move_part to;
    slice s;
    mover m;
    OM_TRY(mover_new(cx, mem, prep, &m));
    OM_TRY(slice_of(cx, a, &a->in[1], &y, &s, &to));
    OM_TRY(move_copies(&m, 0, a, &y, true));
    return move_copies(&m, 1, a, &to, false);
}

/* --- cast_all --------------------------------------------------------------------------------------- */

om_status om_cpu_prepare_cast_all(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    om_copy_job *jobs = om_arena_alloc(mem, (size_t)a->n_in * sizeof *jobs);
    if (!(*prep = jobs)) return cx->status;
    for (int i = 0; i < a->n_in; i++) OM_TRY(om_copy_prepared(cx, mem, &a->in[i], &a->out[i], &jobs[i]));
    return OM_OK;
}

om_status om_cpu_run_cast_all(om_ctx *cx, const om_args *a) {
    const om_copy_job *jobs = a->prep;
    for (int i = 0; i < a->n_in; i++) om_copy_run(cx, &jobs[i], a->in[i].data, a->out[i].data);
    return OM_OK;
}

/* --- trilu ------------------------------------------------------------------------------------------ */

typedef struct trilu_job {
    const char *x;
    char *y;
    int64_t k, cols, size, step; /* step: bytes between columns of x */
    int64_t items, grain;
    bool upper;
    om_copy_line line;
    om_walk rows;                /* every axis but the last */
} trilu_job;

static void trilu_range(void *arg, int64_t begin, int64_t end) {
    const trilu_job *j = arg;
    const int64_t cols = j->cols, size = j->size;
    om_walk w = j->rows;
    walk_seek(&w, begin);
    for (int64_t i = begin; i < end; i++, walk_next(&w)) {
        /* upper keeps columns >= row + k, lower columns <= row + k */
        int64_t edge = w.at[w.rank - 1] + j->k + !j->upper;
        edge = edge < 0 ? 0 : edge > cols ? cols : edge;
        int64_t lo = j->upper ? edge : 0, hi = j->upper ? cols : edge;
        char *y = j->y + w.off[1];
        memset(y, 0, (size_t)(lo * size));
        j->line(j->x + w.off[0] + lo * j->step, j->step, y + lo * size, size, hi - lo);
        memset(y + hi * size, 0, (size_t)((cols - hi) * size));
    }
}

om_status om_cpu_prepare_trilu(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *x = &a->in[0];
    const int last = x->rank - 1;
    trilu_job *j = om_arena_alloc(mem, sizeof *j);
    if (!(*prep = j)) return cx->status;
    const int64_t size = (int64_t)om_dtype_size(x->dtype);
    *j = (trilu_job){.k = attr_value(a, "k", 0),
                     .cols = x->dim[last],
                     .size = size,
                     .step = x->stride[last] * size,
                     .upper = om_args_int(a, "upper", 1) != 0,
                     .line = OM_PICK(om_copy)->move[size == 8 ? 3 : size == 4 ? 2 : size == 2 ? 1 : 0],
                     .rows = {.rank = last, .n = 2}};
    om_walk_axis *axis = om_arena_alloc(mem, (size_t)last * sizeof *axis);
    if (!(j->rows.axis = axis)) return cx->status;
    for (int i = 0; i < last; i++)
        axis[i] = (om_walk_axis){x->dim[i], {x->stride[i] * size, a->out[0].stride[i] * size}};
    if (!om_numel(x)) return OM_OK;
    j->items = walk_count(&j->rows);
    j->grain = 1 + 32768 / j->cols;
    return OM_OK;
}

om_status om_cpu_run_trilu(om_ctx *cx, const om_args *a) {
    trilu_job j = *(const trilu_job *)a->prep;
    j.x = a->in[0].data, j.y = a->out[0].data;
    om_parallel_for(cx, j.items, j.grain, trilu_range, &j);
    return OM_OK;
}

/* --- iota ------------------------------------------------------------------------------------------- */

typedef struct iota_job {
    char *y;
    int64_t n, size;
    om_copy_line store;
    double f0, fstep;
    int64_t i0, istep;
    bool is_int;
} iota_job;

static void iota_range(void *arg, int64_t begin, int64_t end) {
    const iota_job *j = arg;
    enum { BLOCK = 512 };
    union { double f[BLOCK]; int64_t i[BLOCK]; } buf;
    for (int64_t b = begin; b < end; b += BLOCK) {
        int64_t n = end - b < BLOCK ? end - b : BLOCK;
        for (int64_t i = 0; i < n; i++)
            if (j->is_int) buf.i[i] = (int64_t)((uint64_t)j->i0 + (uint64_t)j->istep * (uint64_t)(b + i));
            else buf.f[i] = j->f0 + j->fstep * (double)(b + i);
        j->store((const char *)&buf, 8, j->y + b * j->size, j->size, n);
    }
}

om_status om_cpu_prepare_iota(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *y = &a->out[0];
    bool int0 = true, int_step = true;
    iota_job *j = om_arena_alloc(mem, sizeof *j);
    if (!(*prep = j)) return cx->status;
    *j = (iota_job){.n = y->dim[0], .size = (int64_t)om_dtype_size(y->dtype), .fstep = 1, .istep = 1};
    attr_number(a, "start", &j->f0, &j->i0, &int0);
    attr_number(a, "step", &j->fstep, &j->istep, &int_step);
    j->is_int = int0 && int_step;
    j->store = OM_PICK(om_copy)->convert[j->is_int ? OM_I64 : OM_F64][y->dtype];
    return OM_OK;
}

om_status om_cpu_run_iota(om_ctx *cx, const om_args *a) {
    iota_job j = *(const iota_job *)a->prep;
    j.y = a->out[0].data;
    om_parallel_for(cx, j.n, 16384, iota_range, &j);
    return OM_OK;
}
