/* bounded.c - ops/bounded.c on the CPU: whole rows are moved, the count is read where it lies. Operands are dense.
 *
 * compress may work in place: row i comes from row idx[i] >= i, so in ascending order nothing is overwritten that is
 * still to be read. Threads then share the columns: each moves its part of all rows.
 */
#include "cpu/cpu.h"
#include "cpu/fault.h"

enum { ROWS_PIECE = 1 << 16 }; /* bytes moved at once by one thread */

enum { ROWS_SHARE = 4096 };    /* bytes of a row that a thread takes */

typedef struct rows_prep {
    int64_t outer, n, row;     /* x is (outer, n, row bytes); trim alone has an outer */
    int64_t limit, grain;      /* rows of the other side; rows at once */
    int64_t past;              /* compress: what stands past the count, */
    int64_t elem;              /* in elements of so many bytes */
    double most;
} rows_prep;

typedef struct rows_job {
    const rows_prep *p;
    const char *x;
    char *y;
    const int64_t *idx;
    int64_t count;
    om_fault *fault;
} rows_job;

om_status om_cpu_prepare_bounded(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *x = &a->in[0];
    rows_prep *p = om_arena_alloc(mem, sizeof *p);
    *prep = p;
    if (!p) return cx->status;
    const int64_t axis = om_args_int(a, "axis", 0);
    *p = (rows_prep){.outer = 1, .n = x->dim[axis], .row = (int64_t)om_dtype_size(x->dtype), .limit = a->out[0].dim[0]};
    p->past = om_args_int(a, "past", 0);
    p->elem = p->row;
    p->most = om_args_float(a, "most", 1);
    for (int i = 0; i < x->rank; i++)
        if (i < axis) p->outer *= x->dim[i];
        else if (i > axis) p->row *= x->dim[i];
    p->grain = 1 + ROWS_PIECE / (p->row + 1);
    return OM_OK;
}

static int64_t rows_count(const om_tensor *count, int64_t most) {
    const int64_t n = *(const int64_t *)count->data;
    return n < 0 ? 0 : n > most ? most : n;
}

om_status om_cpu_run_select_rows(om_ctx *cx, const om_args *a) {
    const uint8_t *mask = a->in[0].data;
    const int64_t all = a->in[0].dim[0];
    int64_t *idx = a->out[0].data, n = 0;
    (void)cx;
    for (int64_t i = 0; i < all; i++)
        if (mask[i]) idx[n++] = i;
    if ((double)n > ((const rows_prep *)a->prep)->most * (double)all)
        for (n = 0; n < all; n++) idx[n] = n;
    *(int64_t *)a->out[1].data = n;
    for (; n < a->out[0].dim[0]; n++) idx[n] = 0;
    return OM_OK;
}

static bool rows_fits(const rows_job *j, int64_t i, int64_t limit) {
    if (om_index_fits(j->idx[i], limit)) return true;
    om_fault_note(j->fault, OM_FAULT_INDEX, j->idx[i], i, limit);
    return false;
}

static void rows_end(const rows_job *j, char *y) { /* a row past the count */
    memset(y, 0, (size_t)j->p->row);
    for (int64_t at = 0; j->p->past && at < j->p->row; at += j->p->elem) {
        const int32_t narrow = (int32_t)j->p->past;
        memcpy(y + at, j->p->elem == 8 ? (const void *)&j->p->past : (const void *)&narrow, (size_t)j->p->elem);
    }
}

static void compress_range(void *arg, int64_t begin, int64_t end) {
    const rows_job *j = arg;
    const size_t row = (size_t)j->p->row;
    for (int64_t i = begin; i < end; i++) {
        char *y = j->y + i * j->p->row;
        if (i < j->count && rows_fits(j, i, j->p->n)) memcpy(y, j->x + j->idx[i] * j->p->row, row);
        else rows_end(j, y);
    }
}

static void compress_columns(void *arg, int64_t begin, int64_t end) { /* y is x */
    const rows_job *j = arg;
    const int64_t row = j->p->row, at = begin * ROWS_SHARE, to = end * ROWS_SHARE < row ? end * ROWS_SHARE : row;
    for (int64_t i = 0; i < j->count; i++)
        if (rows_fits(j, i, j->p->n) && j->idx[i] != i)
            memcpy(j->y + i * row + at, j->x + j->idx[i] * row + at, (size_t)(to - at));
}

om_status om_cpu_run_compress(om_ctx *cx, const om_args *a) {
    const rows_prep *p = a->prep;
    rows_job j = {p, a->in[0].data, a->out[0].data, a->in[1].data, rows_count(&a->in[2], p->limit), a->fault};
    if (!p->row) return OM_OK;
    if (j.x == j.y) {
        om_parallel_for(cx, (p->row + ROWS_SHARE - 1) / ROWS_SHARE, 1, compress_columns, &j);
        for (int64_t i = j.count; i < p->limit && (a->past || !a->count); i++) rows_end(&j, j.y + i * p->row);
        return OM_OK;
    }
    om_parallel_for(cx, a->past || !a->count ? p->limit : j.count, p->grain, compress_range, &j);
    return OM_OK;
}

static void zero_range(void *arg, int64_t begin, int64_t end) {
    const rows_job *j = arg;
    memset(j->y + begin * j->p->row, 0, (size_t)((end - begin) * j->p->row));
}

static void restore_range(void *arg, int64_t begin, int64_t end) { /* no two rows go to one place */
    const rows_job *j = arg;
    for (int64_t i = begin; i < end; i++)
        if (rows_fits(j, i, j->p->limit))
            memcpy(j->y + j->idx[i] * j->p->row, j->x + i * j->p->row, (size_t)j->p->row);
}

om_status om_cpu_run_restore(om_ctx *cx, const om_args *a) {
    const rows_prep *p = a->prep;
    rows_job j = {p, a->in[0].data, a->out[0].data, a->in[1].data, rows_count(&a->in[2], p->n), a->fault};
    if (!p->row) return OM_OK;
    om_parallel_for(cx, p->limit, p->grain, zero_range, &j);
    om_parallel_for(cx, j.count, p->grain, restore_range, &j);
    return OM_OK;
}

om_status om_cpu_run_trim(om_ctx *cx, const om_args *a) {
    const rows_prep *p = a->prep;
    const int64_t keep = rows_count(&a->in[1], p->n) * p->row, all = p->n * p->row;
    const char *x = a->in[0].data;
    char *y = a->out[0].data;
    (void)cx;
    for (int64_t i = 0; i < p->outer && all; i++, x += all, y += all) {
        if (x != y) memcpy(y, x, (size_t)keep);
        if (a->past || !a->count) memset(y + keep, 0, (size_t)(all - keep));
    }
    return OM_OK;
}
