/* gather.c - ops/gather.c on the CPU.
 *
 * Every index is checked before it is used; one outside is an error that names it, its position and what is allowed.
 * No atomics, and the same bits whatever the number of threads:
 *   - gather, gather_nd: indices become row offsets, then rows are copied in parallel.
 *   - gather_grad, scatter_nd: the rows to write are sorted, stably, by target (counting sort, or merge sort where
 *     there are far more targets than sources). Each target belongs to one thread, which adds its sources in their
 *     original order.
 *   - scatter_elements: conflicts only happen along `axis`, so threads split the other axes.
 */
#include "cpu/cpu.h"
#include "cpu/copy.h"
#include "cpu/gather_rows.h"
#include "graph/half.h"
#include "cpu/walk.h"

static int64_t index_at(const om_tensor *idx, int64_t element) {
    return idx->dtype == OM_I64 ? ((const int64_t *)idx->data)[element] : ((const int32_t *)idx->data)[element];
}

static om_status index_fail(om_ctx *cx, const om_args *a, int64_t value, int64_t position, int64_t allowed) {
    return om_fail(cx, OM_INVALID, "%s: index %lld at position %lld is out of range; 0 to %lld are allowed",
                   a->node->op->name, (long long)value, (long long)position, (long long)allowed - 1);
}

static int size_log2(int64_t size) { return size == 8 ? 3 : size == 4 ? 2 : size == 2 ? 1 : 0; }

/* --- rows by offset: gather, gather_nd ---------------------------------------------------------------- */

typedef struct rows_job {
    const char *x;
    char *y;
    const int64_t *offset;   /* (count) bytes from x */
    int64_t count, row_size; /* row_size: bytes of a dense row */
    int size_log2;
    om_walk outer, inner;    /* x's axes before and after the gathered ones, in bytes; inner without its last axis */
    int64_t n_last, s_last;  /* last inner axis */
    bool dense_row;
} rows_job;

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const rows_job *j = arg;
    om_walk outer = j->outer, inner = j->inner;
    const int64_t size = (int64_t)1 << j->size_log2;
    om_copy_line line = OM_PICK(om_copy)->move[j->size_log2];
    walk_seek(&outer, begin / j->count);
    int64_t k = begin % j->count, n_lines = walk_count(&inner);
    for (int64_t i = begin; i < end; i++) {
        const char *x = j->x + outer.off[0] + j->offset[k];
        char *y = j->y + i * j->row_size;
        if (j->row_size == size) { /* single elements: no calls */
            if (size == 4) memcpy(y, x, 4);
            else if (size == 8) memcpy(y, x, 8);
            else if (size == 2) memcpy(y, x, 2);
            else *y = *x;
        } else if (j->dense_row) {
            memcpy(y, x, (size_t)j->row_size);
        } else {
            walk_seek(&inner, 0);
            for (int64_t l = 0; l < n_lines; l++, walk_next(&inner))
                line(x + inner.off[0], j->s_last, y + l * j->n_last * size, size, j->n_last);
        }
        if (++k == j->count) {
            k = 0;
            walk_next(&outer);
        }
    }
}

/* y (outer, count, inner) = rows of x; axes [0, n_outer) and [first_inner, rank) of x are kept. */
static void rows_copy(om_ctx *cx, const om_tensor *x, int n_outer, int first_inner, const int64_t *offset,
                      int64_t count, om_tensor *y) {
    int64_t size = (int64_t)om_dtype_size(x->dtype);
    rows_job j = {
        .x = x->data, .y = y->data, .offset = offset, .count = count, .row_size = size, .size_log2 = size_log2(size)};
    if (!om_numel(y)) return;
    j.outer.rank = n_outer;
    j.outer.n = j.inner.n = 1;
    for (int i = 0; i < n_outer; i++) {
        j.outer.dim[i] = x->dim[i];
        j.outer.stride[0][i] = x->stride[i] * size;
    }
    j.dense_row = true;
    j.n_last = 1;
    int last = -1;
    for (int i = x->rank - 1; i >= first_inner; i--) {
        if (x->dim[i] == 1) continue;
        j.dense_row &= x->stride[i] * size == j.row_size;
        j.row_size *= x->dim[i];
        if (last < 0) last = i;
    }
    if (last >= 0) {
        j.n_last = x->dim[last];
        j.s_last = x->stride[last] * size;
        for (int i = first_inner; i < last; i++) {
            j.inner.dim[j.inner.rank] = x->dim[i];
            j.inner.stride[0][j.inner.rank++] = x->stride[i] * size;
        }
    }
    om_parallel_for(cx, walk_count(&j.outer) * count, 1 + 65536 / j.row_size, rows_range, &j);
}

/* --- rows by target: gather_grad, scatter_nd ------------------------------------------------------------ */

typedef struct targets {
    int64_t *order;   /* (count) source rows, sorted by target, stable */
    int64_t *target;  /* (count) target of source row i */
    int64_t count;
} targets;

/* Scratch for targets_sort, in bytes, beside order and target. */
static int64_t targets_extra(int64_t count, int64_t n_targets) {
    return 8 * (n_targets <= 4 * count + 1024 ? n_targets + 1 : count);
}

static void targets_sort(targets *t, int64_t n_targets, int64_t *extra) {
    if (n_targets <= 4 * t->count + 1024) {
        memset(extra, 0, (size_t)(n_targets + 1) * sizeof *extra);
        for (int64_t i = 0; i < t->count; i++) extra[t->target[i] + 1]++;
        for (int64_t r = 0; r < n_targets; r++) extra[r + 1] += extra[r];
        for (int64_t i = 0; i < t->count; i++) t->order[extra[t->target[i]]++] = i;
        return;
    }
    int64_t *from = t->order, *to = extra; /* bottom-up merge sort */
    for (int64_t i = 0; i < t->count; i++) from[i] = i;
    for (int64_t width = 1; width < t->count; width *= 2) {
        for (int64_t lo = 0; lo < t->count; lo += 2 * width) {
            int64_t mid = lo + width < t->count ? lo + width : t->count,
                    hi = lo + 2 * width < t->count ? lo + 2 * width : t->count;
            int64_t l = lo, r = mid;
            for (int64_t k = lo; k < hi; k++)
                to[k] = l < mid && (r >= hi || t->target[from[l]] <= t->target[from[r]]) ? from[l++] : from[r++];
        }
        int64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != t->order) memcpy(t->order, from, (size_t)t->count * sizeof *from);
}

typedef struct put_job {
    targets t;
    const char *src;           /* (outer, n_src, row) dense */
    int64_t n_src;
    char *y;                   /* (outer, n_targets, row) dense */
    int64_t n_targets, row_size, size, piece, n_pieces; /* piece: bytes of a row done at once */
    /* targets without a source become 0; else they are left alone, and y is the initial value */
    bool zero;
    bool add;
    om_sum_rows_fn sum;
} put_job;

/* Items: (outer, piece, target). */
static void put_range(void *arg, int64_t begin, int64_t end) {
    const put_job *j = arg;
    while (begin < end) {
        int64_t outer = begin / j->n_targets / j->n_pieces, piece = begin / j->n_targets % j->n_pieces,
                row = begin % j->n_targets;
        int64_t stop = row + (end - begin) < j->n_targets ? row + (end - begin) : j->n_targets;
        int64_t at = piece * j->piece, n = j->row_size - at < j->piece ? j->row_size - at : j->piece;
        char *y = j->y + outer * j->n_targets * j->row_size + at;
        const char *src = j->src + outer * j->n_src * j->row_size + at;
        begin += stop - row;
        int64_t k = 0, hi = j->t.count; /* first source whose target is >= row */
        while (k < hi) {
            int64_t mid = k + (hi - k) / 2;
            if (j->t.target[j->t.order[mid]] < row) k = mid + 1;
            else hi = mid;
        }
        while (row < stop) {
            int64_t next = k < j->t.count ? j->t.target[j->t.order[k]] : stop;
            if (next > stop) next = stop;
            if (j->zero && next > row) {
                if (j->n_pieces == 1) memset(y + row * j->row_size, 0, (size_t)((next - row) * j->row_size));
                else for (int64_t r = row; r < next; r++) memset(y + r * j->row_size, 0, (size_t)n);
            }
            row = next;
            if (row == stop) break;
            int64_t first = k;
            while (k < j->t.count && j->t.target[j->t.order[k]] == row) k++;
            char *to = y + row * j->row_size;
            if (j->add) j->sum(to, j->zero ? NULL : to, src, j->row_size, j->t.order + first, k - first, n / j->size);
            else memcpy(to, src + j->t.order[k - 1] * j->row_size, (size_t)n);
            row++;
        }
    }
}

static void put_run(om_ctx *cx, put_job *j, int64_t outer) {
    /* few targets: cut rows too, so that every thread gets a share */
    const int64_t share = j->n_targets * outer > 0
                              ? (4 * om_num_threads(cx) + j->n_targets * outer - 1) / (j->n_targets * outer)
                              : 1;
    j->piece = (j->row_size / share + 511) & ~(int64_t)511;
    if (share == 1 || j->piece > j->row_size || j->piece == 0) j->piece = j->row_size;
    j->n_pieces = (j->row_size + j->piece - 1) / j->piece;
    int64_t items = outer * j->n_pieces * j->n_targets,
            work = outer * (j->t.count + (j->zero ? j->n_targets : 0)) * j->row_size;
    int64_t per_item = work / (items ? items : 1) + 1;
    om_parallel_for(cx, items, 1 + 65536 / per_item, put_range, j);
}

/* The output may lie where an operand lies that is read at other places too: then that one is read from a copy, which
 * the caller frees. */
static om_status source_apart(om_ctx *cx, const om_tensor *src, const om_tensor *y, om_tensor *own) {
    *own = *src;
    if (src->data != y->data || !om_numel(src)) return OM_OK;
    om_dense_strides(own);
    own->data = om_alloc(cx, (size_t)om_numel(src) * om_dtype_size(src->dtype));
    return own->data ? om_copy(cx, src, own) : cx->status;
}

/* --- gather ------------------------------------------------------------------------------------------- */

int64_t om_cpu_scratch_gather(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 8 * om_numel(&a->in[1]);
}

om_status om_cpu_run_gather(om_ctx *cx, const om_args *a) {
    const om_tensor *x = &a->in[0], *idx = &a->in[1];
    int axis = (int)om_args_int(a, "axis", 0);
    int64_t *offset = a->scratch, count = om_numel(idx), stride = x->stride[axis] * (int64_t)om_dtype_size(x->dtype);
    for (int64_t i = 0; i < count; i++) {
        int64_t v = index_at(idx, i);
        if (v < 0 || v >= x->dim[axis]) return index_fail(cx, a, v, i, x->dim[axis]);
        offset[i] = v * stride;
    }
    rows_copy(cx, x, axis, axis + 1, offset, count, &a->out[0]);
    return OM_OK;
}

/* --- gather_grad ---------------------------------------------------------------------------------------- */

int64_t om_cpu_scratch_gather_grad(om_ctx *cx, const om_args *a) {
    (void)cx;
    int64_t count = om_numel(&a->in[1]);
    return 16 * count + targets_extra(count, a->out[0].dim[om_args_int(a, "axis", 0)]);
}

om_status om_cpu_run_gather_grad(om_ctx *cx, const om_args *a) {
    const om_tensor *dy = &a->in[0], *idx = &a->in[1];
    om_tensor *y = &a->out[0];
    int axis = (int)om_args_int(a, "axis", 0);
    const bool base = a->n_in > 2 && a->in[2].dtype;
    int64_t padding = om_args_int(a, "padding_idx", -1), count = om_numel(idx), outer = 1,
            size = (int64_t)om_dtype_size(dy->dtype);
    put_job j = {.src = dy->data,
                 .n_src = count,
                 .y = y->data,
                 .n_targets = y->dim[axis],
                 .row_size = size,
                 .size = size,
                 .zero = !base,
                 .add = true,
                 .sum = OM_PICK(om_gather)->sum[dy->dtype]};
    for (int i = 0; i < axis; i++) outer *= y->dim[i];
    for (int i = axis + 1; i < y->rank; i++) j.row_size *= y->dim[i];
    j.t = (targets){.order = a->scratch, .target = (int64_t *)a->scratch + count, .count = count};
    for (int64_t i = 0; i < count; i++) {
        int64_t v = j.t.target[i] = index_at(idx, i);
        if (v < 0 || v >= j.n_targets) return index_fail(cx, a, v, i, j.n_targets);
    }
    if (!om_numel(y)) return OM_OK;
    if (base && a->in[2].data != y->data) OM_TRY(om_copy(cx, &a->in[2], y));
    targets_sort(&j.t, j.n_targets, j.t.target + count);
    if (padding >= 0 && padding < j.n_targets) { /* its sources count as not there */
        int64_t k = 0;
        for (int64_t i = 0; i < count; i++)
            if (j.t.target[j.t.order[i]] != padding) j.t.order[k++] = j.t.order[i];
        j.t.count = k;
    }
    put_run(cx, &j, outer);
    return OM_OK;
}

/* --- gather_elements, scatter_elements -------------------------------------------------------------------- */

typedef struct elements_job {
    const char *idx, *src;     /* src: read; y: written */
    char *y;
    /* axes but `axis` and the last; [0] addressed tensor (axis stride 0), [1] idx, [2] the other */
    om_walk w;
    int64_t rows, cols, limit; /* along axis, along the last axis (1 when axis is the last), allowed indices */
    int64_t a_axis, a_col, i_row, i_col, o_row, o_col; /* strides of addressed, idx, other; bytes */
    int64_t piece, n_pieces;   /* columns per item */
    int size_log2, dtype;
    bool wide, scatter, add;   /* wide: i64 indices */
    int bad;                   /* set when an index is out of range */
} elements_job;

#define ADD_AS(T)                                                                                   \
    do {                                                                                            \
        T u_, v_;                                                                                   \
        memcpy(&u_, at, sizeof u_);                                                                 \
        memcpy(&v_, o, sizeof v_);                                                                  \
        u_ = (T)(u_ + v_);                                                                          \
        memcpy(at, &u_, sizeof u_);                                                                 \
    } while (0)
#define ADD_HALF(LOAD, STORE)                                                                       \
    do {                                                                                            \
        uint16_t u_, v_;                                                                            \
        memcpy(&u_, at, 2);                                                                         \
        memcpy(&v_, o, 2);                                                                          \
        u_ = STORE(LOAD(u_) + LOAD(v_));                                                            \
        memcpy(at, &u_, 2);                                                                         \
    } while (0)

static inline void element_add(int dtype, char *at, const char *o) {
    switch (dtype) {
    case OM_F32: ADD_AS(float); break;
    case OM_F64: ADD_AS(double); break;
    case OM_BF16: ADD_HALF(om_bf16_to_f32, om_f32_to_bf16); break;
    case OM_F16: ADD_HALF(om_f16_to_f32, om_f32_to_f16); break;
    case OM_I64: ADD_AS(uint64_t); break;
    case OM_I32: ADD_AS(uint32_t); break;
    case OM_I16: ADD_AS(uint16_t); break;
    default: ADD_AS(uint8_t);
    }
}
static inline void element_set(int size_log2, char *to, const char *from) {
    switch (size_log2) {
    case 0: *to = *from; break;
    case 1: memcpy(to, from, 2); break;
    case 2: memcpy(to, from, 4); break;
    default: memcpy(to, from, 8);
    }
}

static void elements_range(void *arg, int64_t begin, int64_t end) {
    elements_job *j = arg;
    om_walk w = j->w;
    walk_seek(&w, begin / j->n_pieces);
    int64_t p = begin % j->n_pieces, bad = 0;
    for (int64_t item = begin; item < end; item++) {
        int64_t c0 = p * j->piece, c1 = c0 + j->piece < j->cols ? c0 + j->piece : j->cols;
        for (int64_t r = 0; r < j->rows; r++) {
            const char *ix = j->idx + w.off[1] + r * j->i_row + c0 * j->i_col;
            const char *s = j->src + (j->scatter ? w.off[2] + r * j->o_row + c0 * j->o_col : w.off[0] + c0 * j->a_col);
            char *y = j->y + (j->scatter ? w.off[0] + c0 * j->a_col : w.off[2] + r * j->o_row + c0 * j->o_col);
            for (int64_t c = c0; c < c1; c++, ix += j->i_col) {
                int64_t v;
                int32_t v32;
                if (j->wide) memcpy(&v, ix, 8);
                else memcpy(&v32, ix, 4), v = v32;
                if (v < 0 || v >= j->limit) {
                    bad = 1;
                } else if (!j->scatter) {
                    element_set(j->size_log2, y, s + v * j->a_axis);
                } else if (j->add) {
                    element_add(j->dtype, y + v * j->a_axis, s);
                } else {
                    element_set(j->size_log2, y + v * j->a_axis, s);
                }
                s += j->scatter ? j->o_col : j->a_col;
                y += j->scatter ? j->a_col : j->o_col;
            }
        }
        if (++p == j->n_pieces) {
            p = 0;
            walk_next(&w);
        }
    }
    if (bad) __atomic_store_n(&j->bad, 1, __ATOMIC_RELAXED);
}

/* gather: other = addressed[idx]; scatter: addressed[idx] = other */
static om_status elements_run(om_ctx *cx, const om_args *a, const om_tensor *addressed, const om_tensor *other,
                              bool scatter, bool add) {
    const om_tensor *idx = &a->in[1];
    const int axis = (int)om_args_int(a, "axis", 0), r = idx->rank, last = r - 1;
    const int64_t size = (int64_t)om_dtype_size(other->dtype), isize = (int64_t)om_dtype_size(idx->dtype);
    for (int i = 0; i < r; i++)
        OM_CHECK(cx, i == axis || idx->dim[i] <= addressed->dim[i],
                 "%s: indices have size %lld along axis %d, data only %lld", a->node->op->name, (long long)idx->dim[i],
                 i, (long long)addressed->dim[i]);
    if (!om_numel(idx)) return OM_OK;
    elements_job j = {.idx = idx->data,
                      .src = scatter ? other->data : addressed->data,
                      .y = scatter ? addressed->data : other->data,
                      .rows = idx->dim[axis],
                      .cols = 1,
                      .limit = addressed->dim[axis],
                      .a_axis = addressed->stride[axis] * size,
                      .i_row = idx->stride[axis] * isize,
                      .o_row = other->stride[axis] * size,
                      .size_log2 = size_log2(size),
                      .dtype = other->dtype,
                      .wide = idx->dtype == OM_I64,
                      .scatter = scatter,
                      .add = add};
    j.w.n = 3;
    for (int i = 0; i < r; i++) {
        if (i == axis) continue;
        if (i == last) {
            j.cols = idx->dim[i];
            j.a_col = addressed->stride[i] * size;
            j.i_col = idx->stride[i] * isize;
            j.o_col = other->stride[i] * size;
            continue;
        }
        int k = j.w.rank++;
        j.w.dim[k] = idx->dim[i];
        j.w.stride[0][k] = addressed->stride[i] * size;
        j.w.stride[1][k] = idx->stride[i] * isize;
        j.w.stride[2][k] = other->stride[i] * size;
    }
    j.piece = j.cols < 256 ? j.cols : 256;
    j.n_pieces = (j.cols + j.piece - 1) / j.piece;
    om_parallel_for(cx, walk_count(&j.w) * j.n_pieces, 1 + 16384 / (j.rows * j.piece), elements_range, &j);
    if (!j.bad) return OM_OK;
    om_walk all = {.rank = r, .n = 1}; /* slow way, to name the first one */
    for (int i = 0; i < r; i++) {
        all.dim[i] = idx->dim[i];
        all.stride[0][i] = idx->stride[i];
    }
    walk_seek(&all, 0);
    for (int64_t i = 0, n = walk_count(&all); i < n; i++, walk_next(&all)) {
        int64_t v = index_at(idx, all.off[0]);
        if (v < 0 || v >= j.limit) return index_fail(cx, a, v, i, j.limit);
    }
    return om_fail(cx, OM_INTERNAL, "%s: an index changed while it was read", a->node->op->name);
}

om_status om_cpu_run_gather_elements(om_ctx *cx, const om_args *a) {
    return elements_run(cx, a, &a->in[0], &a->out[0], false, false);
}

om_status om_cpu_run_scatter_elements(om_ctx *cx, const om_args *a) {
    om_tensor src;
    OM_TRY(source_apart(cx, &a->in[2], &a->out[0], &src));
    om_status s = a->out[0].data != a->in[0].data ? om_copy(cx, &a->in[0], &a->out[0]) : OM_OK;
    if (s == OM_OK) s = elements_run(cx, a, &a->out[0], &src, true, om_args_int(a, "reduce", 0) == 1);
    if (src.data != a->in[2].data) om_free(cx, src.data);
    return s;
}

/* --- gather_nd, scatter_nd ---------------------------------------------------------------------------------- */

/* to[i] = sum over j < k of idx[i][j] * stride[j]; checks every index against x's sizes */
static om_status nd_offsets(om_ctx *cx, const om_args *a, const om_tensor *x, const int64_t *stride, int64_t *to,
                            int64_t *count) {
    const om_tensor *idx = &a->in[1];
    int64_t k = idx->dim[idx->rank - 1];
    *count = 1;
    for (int i = 0; i < idx->rank - 1; i++) *count *= idx->dim[i];
    for (int64_t i = 0; i < *count; i++) {
        to[i] = 0;
        for (int64_t d = 0; d < k; d++) {
            int64_t v = index_at(idx, i * k + d);
            if (v < 0 || v >= x->dim[d]) return index_fail(cx, a, v, i * k + d, x->dim[d]);
            to[i] += v * stride[d];
        }
    }
    return OM_OK;
}

static int64_t nd_count(const om_args *a) {
    int64_t c = 1;
    for (int i = 0; i < a->in[1].rank - 1; i++) c *= a->in[1].dim[i];
    return c;
}

int64_t om_cpu_scratch_gather_nd(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 8 * nd_count(a);
}

om_status om_cpu_run_gather_nd(om_ctx *cx, const om_args *a) {
    const om_tensor *x = &a->in[0];
    int64_t stride[OM_RANK], count;
    for (int i = 0; i < x->rank; i++) stride[i] = x->stride[i] * (int64_t)om_dtype_size(x->dtype);
    OM_TRY(nd_offsets(cx, a, x, stride, a->scratch, &count));
    rows_copy(cx, x, 0, (int)a->in[1].dim[a->in[1].rank - 1], a->scratch, count, &a->out[0]);
    return OM_OK;
}

static int64_t nd_targets(const om_args *a) {
    int64_t n = 1, k = a->in[1].dim[a->in[1].rank - 1];
    for (int i = 0; i < k; i++) n *= a->out[0].dim[i];
    return n;
}

int64_t om_cpu_scratch_scatter_nd(om_ctx *cx, const om_args *a) {
    (void)cx;
    int64_t count = nd_count(a);
    return 16 * count + targets_extra(count, nd_targets(a));
}

om_status om_cpu_run_scatter_nd(om_ctx *cx, const om_args *a) {
    om_tensor *y = &a->out[0];
    int64_t size = (int64_t)om_dtype_size(y->dtype), count = nd_count(a), stride[OM_RANK], row = 1;
    int k = (int)a->in[1].dim[a->in[1].rank - 1];
    bool add = om_args_int(a, "reduce", 0) == 1;
    for (int i = k - 1; i >= 0; i--) {
        stride[i] = row;
        row *= y->dim[i];
    }
    put_job j = {.n_src = count, .y = y->data, .n_targets = row, .row_size = size, .size = size, .add = add,
                 .sum = OM_PICK(om_gather)->sum[y->dtype]};
    j.t = (targets){.order = a->scratch, .target = (int64_t *)a->scratch + count, .count = count};
    OM_TRY(nd_offsets(cx, a, y, stride, j.t.target, &count));
    for (int i = k; i < y->rank; i++) j.row_size *= y->dim[i];
    om_tensor src;
    OM_TRY(source_apart(cx, &a->in[2], y, &src));
    om_status s = y->data != a->in[0].data ? om_copy(cx, &a->in[0], y) : OM_OK;
    if (s == OM_OK && om_numel(y) && count) {
        j.src = src.data;
        targets_sort(&j.t, j.n_targets, j.t.target + count);
        put_run(cx, &j, 1);
    }
    if (src.data != a->in[2].data) om_free(cx, src.data);
    return s;
}
