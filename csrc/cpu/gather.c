/* gather.c - ops/gather.c on the CPU.
 *
 * Every index is checked before it is used; one outside is noted as a fault (cpu/fault.h) and stands for row 0, or is
 * passed over. Sizes, strides and the cut into pieces are worked out once per plan; a run reads indices and addresses.
 * No atomics, and the same bits whatever the number of threads:
 *   - gather, gather_nd: indices become row offsets, then rows are copied in parallel.
 *   - gather_grad, scatter_nd: the rows to write are sorted, stably, by target (counting sort, or merge sort where
 *     there are far more targets than sources). Each target belongs to one thread, which adds its sources in their
 *     original order.
 *   - scatter_elements: conflicts only happen along `axis`, so threads split the other axes. Where one index stands for
 *     a run of adjacent elements (an index that was expanded), they are moved or added at once.
 */
#include "cpu/cpu.h"
#include "cpu/copy.h"
#include "cpu/fault.h"
#include "cpu/gather_rows.h"
#include "cpu/walk.h"

typedef struct index_list { /* a dense operand of indices into an axis of `limit` entries */
    int64_t count, limit;
    bool wide;              /* i64 */
} index_list;

static index_list index_list_of(const om_tensor *idx, int64_t limit) {
    return (index_list){om_numel(idx), limit, idx->dtype == OM_I64};
}

static int64_t index_read(const void *idx, bool wide, int64_t i) {
    return wide ? ((const int64_t *)idx)[i] : ((const int32_t *)idx)[i];
}

/* to[i] = index i times `scale`; one outside counts as 0. False: there are no entries to name. */
static bool index_scaled(const om_args *a, const index_list *x, int64_t scale, int64_t *to) {
    const void *idx = a->in[1].data;
    bool good = true;
    for (int64_t i = 0; i < x->count; i++) {
        int64_t v = index_read(idx, x->wide, i);
        if (!om_index_fits(v, x->limit)) {
            if (good) om_fault_note(a->fault, OM_FAULT_INDEX, v, i, x->limit);
            good = false;
            v = 0;
        }
        to[i] = v * scale;
    }
    return good || x->limit > 0;
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
    int64_t items, grain;
    om_copy_line line;
    bool dense_row;
} rows_job;

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const rows_job *j = arg;
    om_walk outer = j->outer, inner = j->inner;
    const int64_t size = (int64_t)1 << j->size_log2;
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
                j->line(x + inner.off[0], j->s_last, y + l * j->n_last * size, size, j->n_last);
        }
        if (++k == j->count) {
            k = 0;
            walk_next(&outer);
        }
    }
}

/* y (outer, count, inner) = rows of x; axes [0, n_outer) and [first_inner, rank) of x are kept. */
static om_status rows_prepare(om_ctx *cx, om_arena *mem, const om_tensor *x, int n_outer, int first_inner,
                              int64_t count, const om_tensor *y, rows_job *j) {
    const int64_t size = (int64_t)om_dtype_size(x->dtype);
    om_walk_axis *axis = om_arena_alloc(mem, (size_t)(n_outer + x->rank - first_inner + 1) * sizeof *axis);
    if (!axis) return cx->status;
    *j = (rows_job){.count = count,
                    .row_size = size,
                    .size_log2 = size_log2(size),
                    .outer = {.rank = n_outer, .n = 1, .axis = axis},
                    .inner = {.n = 1, .axis = axis + n_outer},
                    .n_last = 1,
                    .line = OM_PICK(om_copy)->move[size_log2(size)],
                    .dense_row = true};
    for (int i = 0; i < n_outer; i++) *axis++ = (om_walk_axis){x->dim[i], {x->stride[i] * size}};
    if (!om_numel(y)) return OM_OK;
    int last = -1;
    for (int i = x->rank - 1; i >= first_inner; i--) {
        if (x->dim[i] == 1) continue;
        j->dense_row &= x->stride[i] * size == j->row_size;
        j->row_size *= x->dim[i];
        if (last < 0) last = i;
    }
    if (last >= 0) {
        j->n_last = x->dim[last];
        j->s_last = x->stride[last] * size;
        for (int i = first_inner; i < last; i++)
            axis[j->inner.rank++] = (om_walk_axis){x->dim[i], {x->stride[i] * size}};
    }
    j->items = walk_count(&j->outer) * count;
    j->grain = 1 + 65536 / j->row_size;
    return OM_OK;
}

static void rows_copy(om_ctx *cx, const rows_job *form, const om_args *a) {
    rows_job j = *form;
    j.x = a->in[0].data, j.y = a->out[0].data, j.offset = a->scratch;
    om_parallel_for(cx, j.items, j.grain, rows_range, &j);
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
    int64_t items, grain;
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

/* How the rows are shared out; j->t.count: all sources. */
static void put_prepare(om_ctx *cx, put_job *j, int64_t outer) {
    /* few targets: cut rows too, so that every thread gets a share */
    const int64_t share = j->n_targets * outer > 0
                              ? (4 * om_num_threads(cx) + j->n_targets * outer - 1) / (j->n_targets * outer)
                              : 1;
    j->piece = (j->row_size / share + 511) & ~(int64_t)511;
    if (share == 1 || j->piece > j->row_size || j->piece == 0) j->piece = j->row_size;
    j->n_pieces = j->piece ? (j->row_size + j->piece - 1) / j->piece : 0;
    j->items = outer * j->n_pieces * j->n_targets;
    const int64_t work = outer * (j->t.count + (j->zero ? j->n_targets : 0)) * j->row_size;
    j->grain = 1 + 65536 / (work / (j->items ? j->items : 1) + 1);
}

/* scratch: order, target, room for the sort */
static void put_at(put_job *j, const void *src, const om_args *a) {
    j->src = src, j->y = a->out[0].data;
    j->t.order = a->scratch, j->t.target = j->t.order + j->t.count;
}

/* What an operator that adds to an operand, or writes into it, begins with: a copy of it, where the plan has not laid
 * both into one place. */
typedef struct base_copy { om_copy_job job; } base_copy;

static om_status base_prepare(om_ctx *cx, om_arena *mem, const om_tensor *base, const om_tensor *y, base_copy *b) {
    om_copy_axis axis[OM_RANK];
    OM_TRY(om_copy_prepare(cx, base, y, axis, &b->job));
    return !b->job.items || om_copy_keep(mem, &b->job) ? OM_OK : cx->status;
}

static void base_run(om_ctx *cx, const base_copy *b, const om_tensor *base, const om_tensor *y) {
    if (base->data != y->data) om_copy_run(cx, &b->job, base->data, y->data);
}

/* --- gather ------------------------------------------------------------------------------------------- */

typedef struct gather_prep {
    index_list idx;
    int64_t stride; /* bytes between entries of the axis */
    rows_job rows;
} gather_prep;

int64_t om_cpu_scratch_gather(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 8 * om_numel(&a->in[1]);
}

om_status om_cpu_prepare_gather(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *x = &a->in[0], *idx = &a->in[1];
    const int axis = (int)om_args_int(a, "axis", 0);
    gather_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    p->idx = index_list_of(idx, x->dim[axis]);
    p->stride = x->stride[axis] * (int64_t)om_dtype_size(x->dtype);
    return rows_prepare(cx, mem, x, axis, axis + 1, p->idx.count, &a->out[0], &p->rows);
}

om_status om_cpu_run_gather(om_ctx *cx, const om_args *a) {
    const gather_prep *p = a->prep;
    if (index_scaled(a, &p->idx, p->stride, a->scratch)) rows_copy(cx, &p->rows, a);
    return OM_OK;
}

/* --- gather_grad ---------------------------------------------------------------------------------------- */

typedef struct gather_grad_prep {
    index_list idx;
    put_job put;
    base_copy base;
    int64_t padding;
} gather_grad_prep;

int64_t om_cpu_scratch_gather_grad(om_ctx *cx, const om_args *a) {
    (void)cx;
    int64_t count = om_numel(&a->in[1]);
    return 16 * count + targets_extra(count, a->out[0].dim[om_args_int(a, "axis", 0)]);
}

om_status om_cpu_prepare_gather_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *dy = &a->in[0], *idx = &a->in[1], *y = &a->out[0];
    const int axis = (int)om_args_int(a, "axis", 0);
    const bool base = a->n_in > 2 && a->in[2].dtype;
    const int64_t size = (int64_t)om_dtype_size(dy->dtype);
    int64_t outer = 1;
    gather_grad_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    p->idx = index_list_of(idx, y->dim[axis]);
    p->padding = om_args_int(a, "padding_idx", -1);
    p->put = (put_job){.t = {.count = p->idx.count},
                       .n_src = p->idx.count,
                       .n_targets = y->dim[axis],
                       .row_size = size,
                       .size = size,
                       .zero = !base,
                       .add = true,
                       .sum = OM_PICK(om_gather)->sum[dy->dtype]};
    for (int i = 0; i < axis; i++) outer *= y->dim[i];
    for (int i = axis + 1; i < y->rank; i++) p->put.row_size *= y->dim[i];
    put_prepare(cx, &p->put, outer);
    return base ? base_prepare(cx, mem, &a->in[2], y, &p->base) : OM_OK;
}

om_status om_cpu_run_gather_grad(om_ctx *cx, const om_args *a) {
    const gather_grad_prep *p = a->prep;
    put_job j = p->put;
    put_at(&j, a->in[0].data, a);
    index_scaled(a, &p->idx, 1, j.t.target);
    if (!j.items) return OM_OK;
    if (!j.zero) base_run(cx, &p->base, &a->in[2], &a->out[0]);
    targets_sort(&j.t, j.n_targets, j.t.target + j.t.count);
    if (om_index_fits(p->padding, j.n_targets)) { /* its sources count as not there */
        int64_t k = 0;
        for (int64_t i = 0; i < p->idx.count; i++)
            if (j.t.target[j.t.order[i]] != p->padding) j.t.order[k++] = j.t.order[i];
        j.t.count = k;
    }
    om_parallel_for(cx, j.items, j.grain, put_range, &j);
    return OM_OK;
}

/* --- gather_elements, scatter_elements -------------------------------------------------------------------- */

typedef struct elements_job {
    const char *idx, *src;     /* src: read; y: written */
    char *y;
    om_fault *fault;
    /* axes but `axis` and the innermost; [0] addressed tensor, [1] idx, [2] the other, [3] position in idx */
    om_walk w;
    int64_t rows, cols, limit; /* along axis, along the innermost other (1: axis is the last), allowed indices */
    int64_t a_axis, a_col, i_row, i_col, o_row, o_col; /* strides of addressed, idx, other; bytes */
    int64_t p_row, p_col;      /* of positions */
    int64_t piece, n_pieces;   /* columns per item */
    int64_t piece_rows, n_piece_rows; /* rows per item; of a scatter all of them */
    int64_t items, grain;
    int size_log2;
    bool wide, scatter;        /* wide: i64 indices */
    bool run;                  /* an index stands for all columns of its row, which are adjacent in both tensors */
    om_join_row_fn join;       /* what scatter does with what is there; NULL: it sets */
} elements_job;

static inline void element_set(int size_log2, char *to, const char *from) {
    switch (size_log2) {
    case 0: *to = *from; break;
    case 1: memcpy(to, from, 2); break;
    case 2: memcpy(to, from, 4); break;
    default: memcpy(to, from, 8);
    }
}

static inline int64_t element_index(const elements_job *j, const char *at) {
    int64_t v;
    int32_t v32;
    if (j->wide) return memcpy(&v, at, 8), v;
    return memcpy(&v32, at, 4), v32;
}

static void elements_range(void *arg, int64_t begin, int64_t end) {
    const elements_job *j = arg;
    const int64_t size = (int64_t)1 << j->size_log2, n_pieces = j->n_pieces * j->n_piece_rows;
    om_walk w = j->w;
    walk_seek(&w, begin / n_pieces);
    int64_t p = begin % n_pieces;
    for (int64_t item = begin; item < end; item++) {
        const int64_t c0 = p % j->n_pieces * j->piece, c1 = c0 + j->piece < j->cols ? c0 + j->piece : j->cols;
        const int64_t r0 = p / j->n_pieces * j->piece_rows,
                      r1 = r0 + j->piece_rows < j->rows ? r0 + j->piece_rows : j->rows;
        for (int64_t r = r0; r < r1; r++) {
            const char *ix = j->idx + w.off[1] + r * j->i_row + c0 * j->i_col;
            const char *s = j->src + (j->scatter ? w.off[2] + r * j->o_row + c0 * j->o_col : w.off[0] + c0 * j->a_col);
            char *y = j->y + (j->scatter ? w.off[0] + c0 * j->a_col : w.off[2] + r * j->o_row + c0 * j->o_col);
            if (j->run) {
                const int64_t v = element_index(j, ix);
                if (!om_index_fits(v, j->limit))
                    om_fault_note(j->fault, OM_FAULT_INDEX, v, w.off[3] + r * j->p_row + c0 * j->p_col, j->limit);
                else if (j->join) j->join(y + v * j->a_axis, s, c1 - c0);
                else if (j->scatter) memcpy(y + v * j->a_axis, s, (size_t)((c1 - c0) * size));
                else memcpy(y, s + v * j->a_axis, (size_t)((c1 - c0) * size));
                continue;
            }
            for (int64_t c = c0; c < c1; c++, ix += j->i_col) {
                const int64_t v = element_index(j, ix);
                if (!om_index_fits(v, j->limit)) {
                    om_fault_note(j->fault, OM_FAULT_INDEX, v, w.off[3] + r * j->p_row + c * j->p_col, j->limit);
                } else if (!j->scatter) {
                    element_set(j->size_log2, y, s + v * j->a_axis);
                } else if (j->join) {
                    j->join(y + v * j->a_axis, s, 1);
                } else {
                    element_set(j->size_log2, y + v * j->a_axis, s);
                }
                s += j->scatter ? j->o_col : j->a_col;
                y += j->scatter ? j->a_col : j->o_col;
            }
        }
        if (++p == n_pieces) {
            p = 0;
            walk_next(&w);
        }
    }
}

/* Axes of the walk that lie as one in every tensor become one. */
static void elements_fold(om_walk *w, om_walk_axis *axis) {
    int n = 0;
    for (int i = 0; i < w->rank; i++) {
        bool fits = n > 0;
        for (int t = 0; fits && t < w->n; t++) fits = axis[n - 1].stride[t] == axis[i].stride[t] * axis[i].dim;
        if (!fits) {
            axis[n++] = axis[i];
            continue;
        }
        for (int t = 0; t < w->n; t++) axis[n - 1].stride[t] = axis[i].stride[t];
        axis[n - 1].dim *= axis[i].dim;
    }
    w->rank = n;
}

/* gather: other = addressed[idx]; scatter: addressed[idx] = other */
static om_status elements_prepare(om_ctx *cx, om_arena *mem, const om_args *a, const om_tensor *addressed,
                                  const om_tensor *other, bool scatter, elements_job *j) {
    const om_tensor *idx = &a->in[1];
    const int axis = (int)om_args_int(a, "axis", 0), r = idx->rank;
    const int64_t size = (int64_t)om_dtype_size(other->dtype), isize = (int64_t)om_dtype_size(idx->dtype);
    for (int i = 0; i < r; i++)
        OM_CHECK(cx, i == axis || idx->dim[i] <= addressed->dim[i],
                 "%s: indices have size %lld along axis %d, data only %lld", a->node->op->name, (long long)idx->dim[i],
                 i, (long long)addressed->dim[i]);
    *j = (elements_job){.rows = idx->dim[axis],
                        .cols = 1,
                        .limit = addressed->dim[axis],
                        .a_axis = addressed->stride[axis] * size,
                        .i_row = idx->stride[axis] * isize,
                        .o_row = other->stride[axis] * size,
                        .size_log2 = size_log2(size),
                        .wide = idx->dtype == OM_I64,
                        .scatter = scatter};
    if (!om_numel(idx)) return OM_OK;
    om_tensor place = *idx; /* strides of positions */
    om_dense_strides(&place);
    om_walk_axis *w = om_arena_alloc(mem, (size_t)r * sizeof *w);
    if (!(j->w.axis = w)) return cx->status;
    j->w.n = 4;
    j->p_row = place.stride[axis];
    for (int i = 0; i < r; i++)
        if (i != axis && idx->dim[i] > 1)
            w[j->w.rank++] = (om_walk_axis){idx->dim[i], {addressed->stride[i] * size, idx->stride[i] * isize,
                                                          other->stride[i] * size, place.stride[i]}};
    elements_fold(&j->w, w);
    if (j->w.rank && axis != r - 1) {
        const om_walk_axis *x = &w[--j->w.rank];
        j->cols = x->dim, j->a_col = x->stride[0], j->i_col = x->stride[1], j->o_col = x->stride[2],
        j->p_col = x->stride[3];
    }
    j->run = j->cols > 1 && !j->i_col && j->a_col == size && j->o_col == size;
    if (scatter && om_args_int(a, "reduce", 0))
        j->join = OM_PICK(om_gather)->join[om_args_int(a, "reduce", 0) - 1][other->dtype];
    /* an item: so many columns and, where rows do not meet, rows, with enough of them for every thread */
    const int64_t lines = walk_count(&j->w), most = 4 * om_num_threads(cx), line = 64 / size;
    j->piece = j->run ? 4096 / size : 256;
    if (j->piece * most > lines * j->cols) j->piece = (lines * j->cols / most + line) / line * line;
    if (j->piece > j->cols || (!scatter && j->run)) j->piece = j->cols;
    j->n_pieces = (j->cols + j->piece - 1) / j->piece;
    j->piece_rows = scatter ? j->rows : 1 + 16384 / (j->piece * size);
    if (j->piece_rows > j->rows) j->piece_rows = j->rows;
    j->n_piece_rows = (j->rows + j->piece_rows - 1) / j->piece_rows;
    j->items = lines * j->n_pieces * j->n_piece_rows;
    j->grain = 1 + (j->run ? 65536 / size : 16384) / (j->piece_rows * j->piece);
    return OM_OK;
}

static void elements_run(om_ctx *cx, const om_args *a, const elements_job *form, const void *src) {
    elements_job j = *form;
    j.idx = a->in[1].data, j.src = src, j.y = a->out[0].data, j.fault = a->fault;
    om_parallel_for(cx, j.items, j.grain, elements_range, &j);
}

om_status om_cpu_prepare_gather_elements(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    elements_job *j = om_arena_alloc(mem, sizeof *j);
    if (!(*prep = j)) return cx->status;
    return elements_prepare(cx, mem, a, &a->in[0], &a->out[0], false, j);
}

om_status om_cpu_run_gather_elements(om_ctx *cx, const om_args *a) {
    elements_run(cx, a, a->prep, a->in[0].data);
    return OM_OK;
}

typedef struct scatter_prep {
    base_copy base;
    elements_job job;
} scatter_prep;

om_status om_cpu_prepare_scatter_elements(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    scatter_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    OM_TRY(base_prepare(cx, mem, &a->in[0], &a->out[0], &p->base));
    return elements_prepare(cx, mem, a, &a->out[0], &a->in[2], true, &p->job);
}

om_status om_cpu_run_scatter_elements(om_ctx *cx, const om_args *a) {
    const scatter_prep *p = a->prep;
    base_run(cx, &p->base, &a->in[0], &a->out[0]);
    elements_run(cx, a, &p->job, a->in[2].data);
    return OM_OK;
}

/* --- gather_nd, scatter_nd ---------------------------------------------------------------------------------- */

typedef struct nd_index {
    int64_t count, k;         /* tuples, and how long each is */
    bool wide;
    int64_t limit[OM_RANK], stride[OM_RANK];
} nd_index;

static int64_t nd_count(const om_args *a) {
    int64_t c = 1;
    for (int i = 0; i < a->in[1].rank - 1; i++) c *= a->in[1].dim[i];
    return c;
}

/* Into the first axes of x; strides by the caller. */
static nd_index nd_index_of(const om_args *a, const om_tensor *x) {
    const om_tensor *idx = &a->in[1];
    nd_index n = {.count = nd_count(a), .k = idx->dim[idx->rank - 1], .wide = idx->dtype == OM_I64};
    for (int64_t d = 0; d < n.k; d++) n.limit[d] = x->dim[d];
    return n;
}

/* to[i] = sum over d < k of index[i][d] * stride[d]; one outside counts as 0. False: there are no entries to name. */
static bool nd_offsets(const om_args *a, const nd_index *n, int64_t *to) {
    const void *idx = a->in[1].data;
    bool good = true, some = true;
    for (int64_t d = 0; d < n->k; d++) some &= n->limit[d] > 0;
    for (int64_t i = 0; i < n->count; i++) {
        to[i] = 0;
        for (int64_t d = 0; d < n->k; d++) {
            int64_t v = index_read(idx, n->wide, i * n->k + d);
            if (om_index_fits(v, n->limit[d])) {
                to[i] += v * n->stride[d];
            } else {
                if (good) om_fault_note(a->fault, OM_FAULT_INDEX, v, i * n->k + d, n->limit[d]);
                good = false;
            }
        }
    }
    return good || some;
}

typedef struct gather_nd_prep {
    nd_index idx;
    rows_job rows;
} gather_nd_prep;

int64_t om_cpu_scratch_gather_nd(om_ctx *cx, const om_args *a) {
    (void)cx;
    return 8 * nd_count(a);
}

om_status om_cpu_prepare_gather_nd(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *x = &a->in[0];
    gather_nd_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    p->idx = nd_index_of(a, x);
    for (int64_t d = 0; d < p->idx.k; d++) p->idx.stride[d] = x->stride[d] * (int64_t)om_dtype_size(x->dtype);
    return rows_prepare(cx, mem, x, 0, (int)p->idx.k, p->idx.count, &a->out[0], &p->rows);
}

om_status om_cpu_run_gather_nd(om_ctx *cx, const om_args *a) {
    const gather_nd_prep *p = a->prep;
    if (nd_offsets(a, &p->idx, a->scratch)) rows_copy(cx, &p->rows, a);
    return OM_OK;
}

typedef struct scatter_nd_prep {
    nd_index idx;
    put_job put;
    base_copy base;
} scatter_nd_prep;

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

om_status om_cpu_prepare_scatter_nd(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *y = &a->out[0];
    const int64_t size = (int64_t)om_dtype_size(y->dtype);
    scatter_nd_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    p->idx = nd_index_of(a, y);
    p->put = (put_job){.t = {.count = p->idx.count},
                       .n_src = p->idx.count,
                       .n_targets = 1,
                       .row_size = size,
                       .size = size,
                       .add = om_args_int(a, "reduce", 0) == 1,
                       .sum = OM_PICK(om_gather)->sum[y->dtype]};
    for (int64_t d = p->idx.k - 1; d >= 0; d--) {
        p->idx.stride[d] = p->put.n_targets;
        p->put.n_targets *= y->dim[d];
    }
    for (int64_t d = p->idx.k; d < y->rank; d++) p->put.row_size *= y->dim[d];
    put_prepare(cx, &p->put, 1);
    return base_prepare(cx, mem, &a->in[0], y, &p->base);
}

om_status om_cpu_run_scatter_nd(om_ctx *cx, const om_args *a) {
    const scatter_nd_prep *p = a->prep;
    put_job j = p->put;
    put_at(&j, a->in[2].data, a);
    nd_offsets(a, &p->idx, j.t.target);
    base_run(cx, &p->base, &a->in[0], &a->out[0]);
    if (!j.items || !j.t.count) return OM_OK;
    targets_sort(&j.t, j.n_targets, j.t.target + j.t.count);
    om_parallel_for(cx, j.items, j.grain, put_range, &j);
    return OM_OK;
}
