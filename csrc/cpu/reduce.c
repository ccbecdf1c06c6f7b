/* reduce.c - ops/reduce.c on the CPU.
 *
 * The axes are split into kept and reduced ones; neighbours that are contiguous merge. Depending on where the memory
 * runs, either
 *   row   one output at a time, its elements along the innermost reduced axis, or
 *   col   a strip of outputs at a time (the kept axis with the smallest stride), adding row after row.
 * When there are few outputs the reduced index space is cut into `blocks` blocks whose number depends on the sizes
 * alone; their partial results go to scratch and are combined in order, so the result never depends on the number of
 * threads. Floats accumulate in double. Axes, blocks and the way are settled once per plan; a run puts addresses in.
 */
#include "cpu/cpu.h"
#include "cpu/reduce.h"
#include "ops/attr.h"

#include <math.h>
#include <stdlib.h>

enum { STRIP = 1024, CHUNK = 1024, ROWS = 4 /* floats converted at a time: 16 KiB, in L1 */ };

typedef struct red_job {
    int op, cls, n_kept, n_red;        /* axes, outermost first */
    bool mean, is_bool, cols;
    bool counted;                      /* of the reduced space only the rows that the run counts are read */
    int load_dtype, out_dtype;
    int64_t kdim[OM_RANK], kin[OM_RANK], kout[OM_RANK]; /* size, stride of x, stride of y (elements) */
    int64_t rdim[OM_RANK], rin[OM_RANK];
    int64_t groups, grain;             /* what a block consists of; of groups * blocks units */
    /* outputs, elements of each, blocks of the reduced space, strips of the last kept axis */
    int64_t n_out, count, blocks, strips;
    const char *x;
    char *y;
    int64_t x_size, y_size;
    char *part;                        /* (blocks, n_out) accumulators of 8 bytes */
} red_job;

typedef union red_acc { double f; int64_t i; } red_acc;

static red_acc red_unit(int op, int cls) {
    const bool f = cls != OM_STRIP_I;
    switch (op) {
    case OM_RED_PROD: return f ? (red_acc){.f = 1} : (red_acc){.i = 1};
    case OM_RED_MAX: return f ? (red_acc){.f = -INFINITY} : (red_acc){.i = INT64_MIN};
    case OM_RED_MIN: return f ? (red_acc){.f = INFINITY} : (red_acc){.i = INT64_MAX};
    default: return f ? (red_acc){.f = 0} : (red_acc){.i = 0};
    }
}

/* Accumulators to the output's type: n of them to y with a stride in elements. */
static void red_store(const red_job *j, red_acc *acc, int64_t n, char *y, int64_t stride) {
    union { float f[STRIP]; double d[STRIP]; int64_t i[STRIP]; uint8_t b[STRIP]; } v;
    for (int64_t k = 0; k < n; k++) {
        if (j->cls == OM_STRIP_I) {
            const int64_t r = j->mean ? (j->count ? acc[k].i / j->count : 0) : acc[k].i;
            if (j->is_bool) v.b[k] = r != 0;
            else v.i[k] = r;
        } else {
            const double r = j->mean ? acc[k].f / (double)j->count : acc[k].f;
            if (j->cls == OM_STRIP_F) v.f[k] = (float)r;
            else v.d[k] = r;
        }
    }
    OM_PICK(om_strip)->store[j->out_dtype](&v, n, y, stride);
}

static int64_t offset_of(int64_t index, int n, const int64_t *dim, const int64_t *stride) {
    int64_t off = 0;
    for (int d = n - 1; d >= 0; d--) {
        off += index % dim[d] * stride[d];
        index /= dim[d];
    }
    return off;
}

/* Position in the reduced axes. step moves by k along the innermost one, at most to its end. */
typedef struct red_walk { int64_t at[OM_RANK], off; } red_walk;
static void walk_set(const red_job *j, red_walk *w, int64_t index) {
    w->off = 0;
    for (int d = j->n_red - 1; d >= 0; d--) {
        w->at[d] = index % j->rdim[d];
        index /= j->rdim[d];
        w->off += w->at[d] * j->rin[d];
    }
}
static void walk_step(const red_job *j, red_walk *w, int64_t k) {
    for (int d = j->n_red - 1; d >= 0; d--, k = 1) {
        w->off += k * j->rin[d];
        if ((w->at[d] += k) < j->rdim[d]) return;
        w->off -= w->at[d] * j->rin[d];
        w->at[d] = 0;
    }
}

/* One output, reduced indices [r0, r1). */
static void red_row(const red_job *j, int64_t out, int64_t r0, int64_t r1, red_acc *acc) {
    _Alignas(64) char buf[CHUNK * 8];
    const char *x = j->x + offset_of(out, j->n_kept, j->kdim, j->kin) * j->x_size;
    const int last = j->n_red - 1;
    const int64_t stride = j->rin[last];
    const bool direct = stride == 1 && om_compute_dtype(j->load_dtype) == j->load_dtype;
    red_walk w;
    walk_set(j, &w, r0);
    for (int64_t r = r0; r < r1;) {
        int64_t n = j->rdim[last] - w.at[last];
        if (n > r1 - r) n = r1 - r;
        if (!direct && n > CHUNK) n = CHUNK;
        const char *s = x + w.off * j->x_size;
        if (!direct) OM_PICK(om_strip)->load[j->load_dtype](s, stride, n, buf);
        OM_PICK(om_reduce)->row[j->op][j->cls](direct ? s : buf, n, acc);
        r += n;
        walk_step(j, &w, n);
    }
}

/* n outputs along the last kept axis from `x` on, reduced indices [r0, r1). */
static void red_cols(const red_job *j, const char *x, int64_t n, int64_t r0, int64_t r1, red_acc *acc) {
    _Alignas(64) char buf[ROWS * STRIP * 4];
    const int last = j->n_red - 1;
    const int64_t stride = j->kin[j->n_kept - 1], size = j->cls == OM_STRIP_F ? 4 : 8;
    const int64_t rows = (int64_t)sizeof buf / (STRIP * size);
    const bool direct = stride == 1 && om_compute_dtype(j->load_dtype) == j->load_dtype;
    red_walk w;
    walk_set(j, &w, r0);
    for (int64_t r = r0; r < r1;) {
        int64_t m = j->rdim[last] - w.at[last];
        if (m > r1 - r) m = r1 - r;
        if (!direct && m > rows) m = rows;
        const char *s = x + w.off * j->x_size;
        for (int64_t i = 0; i < m && !direct; i++)
            OM_PICK(om_strip)->load[j->load_dtype](s + i * j->rin[last] * j->x_size, stride, n,
                                                   buf + i * STRIP * size);
        OM_PICK(om_reduce)->col[j->op][j->cls](direct ? s : buf, direct ? j->rin[last] : STRIP, m, n, acc);
        r += m;
        walk_step(j, &w, m);
    }
}

/* The blocks' results, added up in their order, to y: strips [begin, end) of the last kept axis. */
static void red_combine(void *arg, int64_t begin, int64_t end) {
    const red_job *j = arg;
    const int64_t last = j->n_kept ? j->kdim[j->n_kept - 1] : 1, stride = j->n_kept ? j->kout[j->n_kept - 1] : 1;
    const int64_t strips = (last + STRIP - 1) / STRIP;
    red_acc acc[STRIP];
    for (int64_t u = begin; u < end; u++) {
        const int64_t c0 = u % strips * STRIP, first = u / strips * last + c0;
        const int64_t n = last - c0 < STRIP ? last - c0 : STRIP;
        for (int64_t i = 0; i < n; i++) acc[i] = red_unit(j->op, j->cls);
        OM_PICK(om_reduce)->col[j->op][j->cls == OM_STRIP_I ? OM_STRIP_I : OM_STRIP_D](
            j->part + first * (int64_t)sizeof *acc, j->n_out, j->blocks, n, acc);
        red_store(j, acc, n, j->y + offset_of(first, j->n_kept, j->kdim, j->kout) * j->y_size, stride);
    }
}

static void red_units(void *arg, int64_t begin, int64_t end) {
    const red_job *j = arg;
    const int64_t per = (j->count + j->blocks - 1) / j->blocks;
    red_acc acc[STRIP];
    for (int64_t u = begin; u < end; u++) { /* u = (group of outputs, block) */
        const int64_t group = u / j->blocks, blk = u % j->blocks;
        const int64_t r0 = blk * per, r1 = r0 + per < j->count ? r0 + per : j->count;
        int64_t first = group, n = 1, stride = 1;
        if (j->cols) {
            const int last = j->n_kept - 1;
            const int64_t c0 = group % j->strips * STRIP, rest = group / j->strips;
            n = j->kdim[last] - c0 < STRIP ? j->kdim[last] - c0 : STRIP;
            first = rest * j->kdim[last] + c0;
            stride = j->kout[last];
        }
        for (int64_t i = 0; i < n; i++) acc[i] = red_unit(j->op, j->cls);
        if (r0 < r1) {
            if (j->cols) red_cols(j, j->x + offset_of(first, j->n_kept, j->kdim, j->kin) * j->x_size, n, r0, r1, acc);
            else red_row(j, first, r0, r1, acc);
        }
        if (j->blocks > 1)
            memcpy(j->part + (blk * j->n_out + first) * (int64_t)sizeof *acc, acc, (size_t)n * sizeof *acc);
        else red_store(j, acc, n, j->y + offset_of(first, j->n_kept, j->kdim, j->kout) * j->y_size, stride);
    }
}

/* How many blocks the reduced space is cut into: more than one only where outputs are too few to share out. */
static int64_t red_blocks(int64_t n_out, int64_t count) {
    if (n_out >= 8 * STRIP || n_out == 0) return 1;
    int64_t n = n_out * count / 131072;
    if (n > count / 64) n = count / 64;
    return n < 1 ? 1 : n > 32 ? 32 : n;
}

static int64_t red_scratch(const red_job *j) {
    return j->blocks > 1 ? j->blocks * j->n_out * (int64_t)sizeof(red_acc) : 0;
}

static const struct { const om_op *op; uint8_t red; bool mean; } red_ops[] = {
    {&om_op_reduce_sum, OM_RED_SUM, false}, {&om_op_reduce_mean, OM_RED_SUM, true},
    {&om_op_reduce_max, OM_RED_MAX, false}, {&om_op_reduce_min, OM_RED_MIN, false},
    {&om_op_reduce_prod, OM_RED_PROD, false},
};

/* Everything but addresses. */
static red_job red_job_of(const om_args *a) {
    const om_tensor *x = &a->in[0], *y = &a->out[0];
    const uint32_t mask = attr_axes_mask(a->attr, a->n_attr, x->rank);
    const bool keep = om_args_int(a, "keepdims", 0);
    red_job j = {.is_bool = x->dtype == OM_BOOL,
                 .load_dtype = x->dtype,
                 .out_dtype = y->dtype,
                 .n_out = 1,
                 .count = 1,
                 .x_size = (int64_t)om_dtype_size(x->dtype),
                 .y_size = (int64_t)om_dtype_size(y->dtype)};
    for (size_t i = 0; i < sizeof red_ops / sizeof *red_ops; i++)
        if (red_ops[i].op == a->node->op) j.op = red_ops[i].red, j.mean = red_ops[i].mean;
    if (j.is_bool) j.load_dtype = OM_U8;
    j.cls = om_strip_class(j.load_dtype);
    int o = 0;
    for (int i = 0; i < x->rank; i++) {
        const bool red = mask >> i & 1;
        const int64_t d = x->dim[i], sx = x->stride[i], sy = red ? 0 : y->stride[o];
        if (!red || keep) o++;
        if (red) j.count *= d;
        else j.n_out *= d;
        if (d == 1) continue;
        if (red) {
            if (j.n_red && j.rin[j.n_red - 1] == sx * d) j.rdim[j.n_red - 1] *= d, j.rin[j.n_red - 1] = sx;
            else j.rdim[j.n_red] = d, j.rin[j.n_red++] = sx;
        } else {
            const int k = j.n_kept - 1;
            if (k >= 0 && j.kin[k] == sx * d && j.kout[k] == sy * d) j.kdim[k] *= d, j.kin[k] = sx, j.kout[k] = sy;
            else j.kdim[j.n_kept] = d, j.kin[j.n_kept] = sx, j.kout[j.n_kept++] = sy;
        }
    }
    if (j.n_out == 0) return j; /* no group */
    /* nothing to reduce: one element (or none) per output */
    if (!j.n_red) j.rdim[0] = j.count, j.rin[0] = 1, j.n_red = 1;
    /* the reduced axis with the smallest stride goes last: the order of addition is free, but fixed */
    for (int i = 0; i + 1 < j.n_red; i++)
        if (llabs(j.rin[i]) < llabs(j.rin[j.n_red - 1])) {
            const int64_t d = j.rdim[i], s = j.rin[i];
            j.rdim[i] = j.rdim[j.n_red - 1], j.rin[i] = j.rin[j.n_red - 1];
            j.rdim[j.n_red - 1] = d, j.rin[j.n_red - 1] = s;
        }
    j.blocks = red_blocks(j.n_out, j.count);
    const int k = j.n_kept - 1, r = j.n_red - 1;
    j.cols = j.n_kept && (llabs(j.kin[k]) < llabs(j.rin[r]) || j.count < 24);
    int64_t unit = (j.count + j.blocks - 1) / j.blocks + 8;
    j.groups = j.n_out;
    if (j.cols) {
        j.strips = (j.kdim[k] + STRIP - 1) / STRIP;
        j.groups = j.n_out / j.kdim[k] * j.strips;
        unit *= j.kdim[k] < STRIP ? j.kdim[k] : STRIP;
    }
    j.grain = 65536 / unit + 1;
    return j;
}

int64_t om_cpu_scratch_reduce(om_ctx *cx, const om_args *a) {
    (void)cx;
    const red_job j = red_job_of(a);
    return red_scratch(&j);
}

om_status om_cpu_prepare_reduce(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    red_job j = red_job_of(a);
    j.counted = a->bounded && a->bounded[0] >= 0 && om_is(a->node, reduce_sum) &&
                attr_axes_mask(a->attr, a->n_attr, a->in[0].rank) == 1u << a->bounded[0];
    *prep = om_arena_copy(mem, &j, sizeof j);
    return *prep ? OM_OK : cx->status;
}

om_status om_cpu_run_reduce(om_ctx *cx, const om_args *a) {
    red_job j = *(const red_job *)a->prep;
    j.x = a->in[0].data, j.y = a->out[0].data, j.part = a->scratch;
    if (a->count && j.counted && j.groups) /* what lies past them is zero, or nobody made it so: om_device.counted */
        j.rdim[0] = j.count = *a->count < 0 ? 0 : *a->count < j.count ? *a->count : j.count;
    om_parallel_for(cx, j.groups * j.blocks, j.grain, red_units, &j);
    if (j.blocks > 1) {
        const int64_t last = j.n_kept ? j.kdim[j.n_kept - 1] : 1;
        const int64_t strips = j.n_out / last * ((last + STRIP - 1) / STRIP);
        om_parallel_for(cx, strips, 65536 / (j.blocks * STRIP) + 1, red_combine, &j);
    }
    return OM_OK;
}

/* --- argmax, argmin: lines along one axis ------------------------------------------------------------------- */

typedef struct line_job { /* lines of x along one axis: x and y addressed by the other axes */
    int n;                           /* other axes */
    int64_t dim[OM_RANK], sx[OM_RANK], sy[OM_RANK], len, lx, ly;
    const char *x;
    char *y;
    int64_t x_size, y_size;
    int64_t lines, grain;
    int load_dtype, cls, op, out_dtype;
    bool exclusive, reverse;
} line_job;

/* Everything but addresses; `work`: elements of lines that are worth a thread. */
static om_status line_prepare(om_ctx *cx, om_arena *mem, const om_args *a, bool y_has_axis, int64_t work,
                              line_job **job) {
    const om_tensor *x = &a->in[0], *y = &a->out[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    line_job *j = *job = om_arena_alloc(mem, sizeof *j);
    if (!j) return cx->status;
    *j = (line_job){.len = x->dim[axis],
                    .lx = x->stride[axis],
                    .x_size = (int64_t)om_dtype_size(x->dtype),
                    .y_size = (int64_t)om_dtype_size(y->dtype),
                    .lines = 1,
                    .load_dtype = x->dtype == OM_BOOL ? OM_U8 : x->dtype,
                    .out_dtype = y->dtype};
    j->cls = om_strip_class(j->load_dtype);
    j->ly = y_has_axis ? y->stride[axis] : 0;
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        j->dim[j->n] = x->dim[i];
        j->sx[j->n] = x->stride[i];
        j->sy[j->n++] = y->stride[y_has_axis || i < axis ? i : i - 1];
        j->lines *= x->dim[i];
    }
    j->grain = work / (j->len + 1) + 1;
    return OM_OK;
}

static om_status line_run(om_ctx *cx, const om_args *a, void (*fn)(void *, int64_t, int64_t)) {
    line_job j = *(const line_job *)a->prep;
    j.x = a->in[0].data, j.y = a->out[0].data;
    om_parallel_for(cx, j.lines, j.grain, fn, &j);
    return OM_OK;
}

static void arg_lines(void *arg, int64_t begin, int64_t end) {
    const line_job *j = arg;
    _Alignas(64) char buf[CHUNK * 8];
    for (int64_t u = begin; u < end; u++) {
        const char *x = j->x + offset_of(u, j->n, j->dim, j->sx) * j->x_size;
        red_acc best = red_unit(j->op, j->cls);
        int64_t at = 0;
        bool nan = false;
        /* a chunk is searched only if it improves on those before it */
        for (int64_t i = 0; i < j->len && !nan; i += CHUNK) {
            const int64_t n = j->len - i < CHUNK ? j->len - i : CHUNK;
            red_acc acc = best;
            OM_PICK(om_strip)->load[j->load_dtype](x + i * j->lx * j->x_size, j->lx, n, buf);
            OM_PICK(om_reduce)->row[j->op][j->cls](buf, n, &acc);
            nan = j->cls != OM_STRIP_I && acc.f != acc.f;
            if (i && !nan && (j->cls == OM_STRIP_I ? acc.i == best.i : acc.f == best.f)) continue;
            best = acc;
            const float f = (float)acc.f;
            const int64_t k = OM_PICK(om_reduce)->find[j->cls](
                buf, n, j->cls == OM_STRIP_F ? (const void *)&f : (const void *)&acc);
            if (k < n) at = i + k;
        }
        memcpy(j->y + offset_of(u, j->n, j->dim, j->sy) * j->y_size, &at, sizeof at);
    }
}

om_status om_cpu_prepare_arg(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    line_job *j;
    OM_TRY(line_prepare(cx, mem, a, om_args_int(a, "keepdims", 0), 32768, &j));
    j->op = om_is(a->node, argmax) ? OM_RED_MAX : OM_RED_MIN;
    *prep = j;
    return OM_OK;
}

om_status om_cpu_run_arg(om_ctx *cx, const om_args *a) { return line_run(cx, a, arg_lines); }

/* --- cumsum ------------------------------------------------------------------------------------------------------ */

#define CUMSUM(A, T)                                                                                \
    for (int64_t i = 0; i < n; i++) {                                                               \
        const A e = (A)((T *)buf)[i];                                                               \
        if (j->exclusive) ((T *)buf)[i] = (T)sum.v_##A, sum.v_##A += e;                             \
        else sum.v_##A += e, ((T *)buf)[i] = (T)sum.v_##A;                                          \
    }

static void cumsum_lines(void *arg, int64_t begin, int64_t end) {
    const line_job *j = arg;
    _Alignas(64) char buf[CHUNK * 8];
    for (int64_t u = begin; u < end; u++) {
        const int64_t dir = j->reverse ? -1 : 1, start = j->reverse && j->len ? j->len - 1 : 0;
        const char *x = j->x + (offset_of(u, j->n, j->dim, j->sx) + start * j->lx) * j->x_size;
        char *y = j->y + (offset_of(u, j->n, j->dim, j->sy) + start * j->ly) * j->y_size;
        struct { double v_double; uint64_t v_uint64_t; } sum = {0, 0};
        for (int64_t i0 = 0; i0 < j->len; i0 += CHUNK) {
            const int64_t n = j->len - i0 < CHUNK ? j->len - i0 : CHUNK;
            OM_PICK(om_strip)->load[j->load_dtype](x + dir * i0 * j->lx * j->x_size, dir * j->lx, n, buf);
            if (j->cls == OM_STRIP_F) { CUMSUM(double, float) }
            else if (j->cls == OM_STRIP_D) { CUMSUM(double, double) }
            else { CUMSUM(uint64_t, int64_t) }
            OM_PICK(om_strip)->store[j->out_dtype](buf, n, y + dir * i0 * j->ly * j->y_size, dir * j->ly);
        }
    }
}

om_status om_cpu_prepare_cumsum(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    line_job *j;
    OM_TRY(line_prepare(cx, mem, a, true, 16384, &j));
    j->exclusive = om_args_int(a, "exclusive", 0);
    j->reverse = om_args_int(a, "reverse", 0);
    *prep = j;
    return OM_OK;
}

om_status om_cpu_run_cumsum(om_ctx *cx, const om_args *a) { return line_run(cx, a, cumsum_lines); }
