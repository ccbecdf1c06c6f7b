/* lower_matmul.c - matrix products on the GPU: by the library where there is one that takes the layout (blaslt.h), else
 * by the engine's own kernel.
 *
 * The library takes operands whose rows or columns are contiguous, a result whose rows are, and one evenly spaced axis
 * of products; further axes are calls of their own, if they are few.
 */
#include "cpu/gemm.h"
#include "cuda/blaslt.h"
#include "cuda/scratch.h"

enum { MOST_CALLS = 64 };                /* of the library's for one of ours */
static const int64_t MOST_SPACE = 32 << 20; /* with less it does not cut sums that would have fitted (sm_90: 479 for
                                             * 85 us), so all but tiny products say they have it */
enum { TINY = 1 << 24 };                    /* multiplications */

/* From the sizes alone. Tiny products: room for eight partial results. */
static int64_t space_of(const om_args *a) {
    const om_tensor *x = &a->in[0], *z = &a->out[0];
    const int64_t want = 8 * om_numel(z) * (z->dtype == OM_F64 ? 8 : 4);
    const bool tiny = (double)om_numel(z) * (double)x->dim[x->rank - 1] < TINY;
    return tiny && want < MOST_SPACE ? want : MOST_SPACE;
}

/* Sizes that are no multiple of 16 bytes (a vocabulary of 50,257): the library's kernels for the tensor cores of sm_90
 * want rows that begin at such multiples, and as many columns, of every operand; what it has for others takes three to
 * six times as long (docs/GPU_STATUS.md). A large product has such an operand in aligned rows in scratch, filled up
 * with zeros: of a and c as many rows of results at a time as fit. */
static int64_t most_aligned = 256 << 20, least_work = 1 << 29; /* bytes of one operand; multiplications */
enum { LEAST_DEPTH = 128, PIECE = 256 };                       /* products per element; rows */

void om_cuda_aligned(int64_t most, int64_t least) { most_aligned = most, least_work = least; }

static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum { A, B, C, BIAS };
typedef struct aligned { /* which operands are, where; row: elements; piece: rows of results */
    bool on[4];
    int64_t at[4], row[3], piece, n, k; /* n, k: of the product */
} aligned;

/* May operand t need aligned rows, and how many bytes are they at most? From sizes alone, whatever its layout. */
static int64_t aligned_bytes(int t, int64_t m, int64_t n, int64_t k, int64_t e) {
    const int64_t rows = t == B ? k : m, cols = t == A ? k : n, depth = t == A ? n : t == B ? m : k, unit = 16 / e;
    if ((e != 2 && e != 4) || depth < LEAST_DEPTH || (double)m * (double)n * (double)k < (double)least_work ||
        (rows % unit == 0 && cols % unit == 0))
        return 0;
    const int64_t all = up(rows, unit) * up(cols, unit) * e;
    return all <= most_aligned ? up(all, OM_LT_ALIGN) : t == B ? 0 : most_aligned;
}

/* The rows of a and b, if they are one matrix each. */
static bool one_matrix(const om_args *a, int64_t *m, int64_t *n, int64_t *k) {
    const om_tensor *x = &a->in[0], *y = &a->in[1], *z = &a->out[0];
    *n = z->dim[z->rank - 1], *k = x->dim[x->rank - 1];
    *m = *n ? om_numel(z) / *n : 0;
    return om_numel(y) == *k * *n;
}

int64_t om_gpu_scratch_matmul(om_ctx *cx, const om_args *a) {
    (void)cx;
    if (!om_lt_present()) return 0;
    const int64_t e = (int64_t)om_dtype_size(a->out[0].dtype);
    int64_t m, n, k, size = up(space_of(a) + OM_LT_ALIGN, OM_LT_ALIGN);
    if (!one_matrix(a, &m, &n, &k)) return size;
    for (int t = 0; t < 3; t++) size += aligned_bytes(t, m, n, k, e);
    const bool bias = a->n_in > 2 && a->in[2].dtype && aligned_bytes(C, m, n, k, e);
    return size + (bias ? up(up(n, 16 / e) * e, OM_LT_ALIGN) : 0);
}

/* What of the product is aligned, from byte `at` of the scratch on. */
static void aligned_of(const om_gpu_gemm *p, const om_lt_shape *s, int64_t at, aligned *x) {
    const int64_t e = (int64_t)om_dtype_size(s->dtype), unit = 16 / e;
    const int64_t ld[3] = {s->lda, s->ldb, s->ldc};
    int64_t bytes[3];
    *x = (aligned){.piece = p->m, .n = p->n, .k = p->k};
    for (int t = 0; t < 3; t++) {
        bytes[t] = aligned_bytes(t, p->m, p->n, p->k, e);
        x->on[t] = bytes[t] && ld[t] % unit;
        x->at[t] = at;
        at += bytes[t];
        x->row[t] = up(t == A ? p->k : t == B && s->tb ? p->k : p->n, unit);
        if (!x->on[t] || t == B) continue;
        const int64_t fit = most_aligned / (e * (t == A && s->ta ? p->k : x->row[t])); /* rows of results */
        if (fit < PIECE) x->on[t] = false;
        else if (fit < x->piece) x->piece = fit;
    }
    x->at[BIAS] = at;
    if (x->piece < p->m) { /* equal ones */
        const int64_t full = x->piece / PIECE * PIECE, pieces = om_gpu_blocks(p->m, full);
        x->piece = up(om_gpu_blocks(p->m, pieces), PIECE);
    }
    if (!bytes[B]) return;
    if (x->on[C]) x->n = up(p->n, unit), x->on[B] = true, x->on[BIAS] = s->bias;
    if (x->on[A] && !s->ta) x->k = up(p->k, unit), x->on[B] = true;
}

/* --- the library --------------------------------------------------------------------------------------- */

typedef struct axes { int n; int64_t dim[4], s[3][4]; } axes; /* of products: steps of a, b, c */

/* One call: the products of axis `inner` (none: -1), the others at their indices `at`. */
static void call_add(om_lower *l, const om_gpu_gemm *p, const axes *x, int inner, const int64_t *at,
                     const om_lt_product *product, int64_t space) {
    const om_args *a = l->a;
    const int64_t e = (int64_t)om_dtype_size(a->out[0].dtype);
    int64_t from[3] = {0}, size[3] = {(p->m - 1) * p->ra + (p->k - 1) * p->ca, (p->k - 1) * p->rb + (p->n - 1) * p->cb,
                                      (p->m - 1) * p->rc + (p->n - 1) * p->cc};
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < x->n; i++)
            *(i == inner ? &size[t] : &from[t]) += (i == inner ? x->dim[i] - 1 : at[i]) * x->s[t][i];
        size[t] = (size[t] + 1) * e, from[t] *= e;
    }
    om_lt_at *g = om_gpu_add(l, 0, 1, 1, 1, 0, 0, sizeof *g);
    if (!g) return;
    l->last->product = product;
    om_gpu_part(l, &g->a, 0, from[0], 0, size[0], OM_GPU_READ);
    om_gpu_part(l, &g->b, 1, from[1], 0, size[1], OM_GPU_READ);
    if (a->n_in > 2 && a->in[2].dtype) om_gpu_in(l, &g->bias, 2);
    om_gpu_part(l, &g->c, a->n_in, from[2], 0, size[2], OM_GPU_WRITE);
    om_gpu_scratch_at(l, &g->space, 0, space + OM_LT_ALIGN, OM_GPU_READ | OM_GPU_WRITE);
}

/* Operand i of the call (c comes last), from byte `from` on, to rows in scratch, or from there: of n elements, `row`
 * apart in memory and `to` in scratch; `rows` in memory, `filled` in scratch. */
typedef struct moved { int64_t from, rows, filled, n, row, at, to; } moved;
static void rows_add(om_lower *l, int i, moved v) {
    const om_args *a = l->a;
    const bool into = i < a->n_in;
    const int64_t e = (int64_t)om_dtype_size(a->out[0].dtype), all = into ? v.filled : v.rows;
    om_gpu_rows *g = om_gpu_add(l, OM_GPU_rows, om_gpu_blocks(v.n, 16 / e * 256), all < 65535 ? all : 65535, 1, 256, 0,
                                sizeof *g);
    if (!g) return;
    *g = (om_gpu_rows){.rows = all, .given = v.rows, .n = v.n, .xrow = into ? v.row : v.to, .yrow = into ? v.to : v.row,
                       .size = (int32_t)e, .fill = into};
    const int64_t there = ((v.rows - 1) * v.row + v.n) * e, here = ((all - 1) * v.to + up(v.n, 16 / e)) * e;
    if (into) om_gpu_part(l, &g->x, i, v.from, 0, there, OM_GPU_READ);
    om_gpu_scratch_at(l, into ? (void *)&g->y : (void *)&g->x, v.at, here, into ? OM_GPU_WRITE : OM_GPU_READ);
    if (!into) om_gpu_part(l, &g->y, i, v.from, 0, there, OM_GPU_WRITE);
}

enum { SIZES = 3 };
typedef struct pieces { int n; int64_t rows[SIZES]; const om_lt_product *product[SIZES]; } pieces;

/* The product of that many rows of results; NULL: the library refuses. */
static om_status piece_of(om_lower *l, const om_lt_shape *s, const aligned *x, int64_t rows, pieces *all,
                          const om_lt_product **out) {
    om_gpu *g = om_cuda_gpu(l->cx);
    for (int i = 0; i < all->n; i++)
        if (all->rows[i] == rows) return *out = all->product[i], OM_OK;
    om_lt_shape q = *s;
    q.m = rows, q.n = x->n, q.k = x->k;
    if (x->on[A]) q.lda = (int32_t)(s->ta ? up(rows, 16 / (int64_t)om_dtype_size(s->dtype)) : x->row[A]);
    if (x->on[B]) q.ldb = (int32_t)x->row[B];
    if (x->on[C]) q.ldc = (int32_t)x->row[C];
    OM_TRY(om_gpu_enter(l->cx, g));
    OM_TRY(om_gpu_leave(l->cx, g, om_lt_prepare(l->cx, g, l->mem, &q, out)));
    all->rows[all->n] = rows, all->product[all->n++] = *out;
    return OM_OK;
}

/* Rows [m, m + rows) of the results. */
static void piece_add(om_lower *l, const om_gpu_gemm *p, const om_lt_shape *s, const aligned *x, int64_t m,
                      int64_t rows, const om_lt_product *product) {
    const om_args *a = l->a;
    const int c = a->n_in; /* the operand */
    const int64_t e = (int64_t)om_dtype_size(s->dtype), row_a = s->ta ? up(rows, 16 / e) : x->row[A];
    const int64_t stored_a = s->ta ? p->k : rows, stored_b = s->tb ? x->n : x->k;
    if (x->on[A])
        rows_add(l, 0, (moved){m * (s->ta ? 1 : s->lda) * e, stored_a, stored_a, s->ta ? rows : p->k, s->lda, x->at[A],
                               row_a});
    om_lt_at *q = om_gpu_add(l, 0, 1, 1, 1, 0, 0, sizeof *q);
    if (!q) return;
    l->last->product = product;
    const int64_t size_a = s->ta ? (p->k - 1) * s->lda + rows : (rows - 1) * s->lda + p->k;
    const int64_t size_b = s->tb ? (p->n - 1) * s->ldb + p->k : (p->k - 1) * s->ldb + p->n;
    if (x->on[A]) om_gpu_scratch_at(l, &q->a, x->at[A], stored_a * row_a * e, OM_GPU_READ);
    else om_gpu_part(l, &q->a, 0, m * (s->ta ? 1 : s->lda) * e, 0, size_a * e, OM_GPU_READ);
    if (x->on[B]) om_gpu_scratch_at(l, &q->b, x->at[B], stored_b * x->row[B] * e, OM_GPU_READ);
    else om_gpu_part(l, &q->b, 1, 0, 0, size_b * e, OM_GPU_READ);
    if (x->on[BIAS]) om_gpu_scratch_at(l, &q->bias, x->at[BIAS], x->n * e, OM_GPU_READ);
    else if (s->bias) om_gpu_in(l, &q->bias, 2);
    if (x->on[C]) om_gpu_scratch_at(l, &q->c, x->at[C], rows * x->row[C] * e, OM_GPU_WRITE);
    else om_gpu_part(l, &q->c, c, m * s->ldc * e, 0, ((rows - 1) * s->ldc + p->n) * e, OM_GPU_WRITE);
    om_gpu_scratch_at(l, &q->space, 0, s->space + OM_LT_ALIGN, OM_GPU_READ | OM_GPU_WRITE);
    if (x->on[C]) rows_add(l, c, (moved){m * s->ldc * e, rows, rows, p->n, s->ldc, x->at[C], x->row[C]});
}

/* One product with operands in aligned rows, piece by piece; rows of results that are no multiple of 16 bytes of a are
 * a piece of their own. *done: the calls are in the list. */
static om_status by_pieces(om_lower *l, const om_gpu_gemm *p, const om_lt_shape *s, const aligned *x, bool *done) {
    const int64_t e = (int64_t)om_dtype_size(s->dtype), rest = x->on[A] && s->ta ? p->m % (16 / e) : 0;
    pieces all = {0};
    for (int add = 0; add < 2; add++) { /* before the first call is in the list the library has taken all of them */
        if (add && x->on[B])
            rows_add(l, 1, (moved){0, s->tb ? p->n : p->k, s->tb ? x->n : x->k, s->tb ? p->k : p->n, s->ldb, x->at[B],
                                   x->row[B]});
        if (add && x->on[BIAS]) rows_add(l, 2, (moved){0, 1, 1, p->n, p->n, x->at[BIAS], x->n});
        for (int64_t m = 0, rows; m < p->m; m += rows) {
            const om_lt_product *product = NULL;
            rows = m < p->m - rest ? p->m - rest - m : rest;
            if (rows > x->piece) rows = x->piece;
            OM_TRY(piece_of(l, s, x, rows, &all, &product));
            if (!product) return OM_OK;
            if (add) piece_add(l, p, s, x, m, rows, product);
        }
    }
    *done = true;
    return l->cx->status;
}

/* *done: the calls are in the list. p describes one product. */
static om_status by_library(om_lower *l, const om_gpu_gemm *p, const axes *x, bool *done) {
    const om_args *a = l->a;
    om_gpu *g = om_cuda_gpu(l->cx);
    om_lt_shape s = {.ordinal = om_gpu_ordinal(g), .dtype = a->out[0].dtype, .batch = 1,
                     .bias = a->n_in > 2 && a->in[2].dtype, .space = space_of(a)};
    int64_t calls = 1, at[4] = {0};
    int inner = -1;
    char ta, tb, tc;
    *done = false;
    if (!om_lt_present() || p->m < 1 || p->n < 1 || p->k < 1 || p->m > INT32_MAX || p->n > INT32_MAX ||
        p->k > INT32_MAX || (s.bias && p->n > 1 && a->in[2].stride[0] != 1))
        return OM_OK;
    for (int i = 0; i < x->n; i++) {
        if (x->dim[i] < 1 || x->dim[i] > INT32_MAX || x->s[0][i] < 0 || x->s[1][i] < 0 || x->s[2][i] < 1) return OM_OK;
        if (inner < 0 || x->dim[i] > x->dim[inner]) inner = i;
    }
    for (int i = 0; i < x->n; i++)
        if (i != inner && (calls *= x->dim[i]) > MOST_CALLS) return OM_OK;
    if (!om_gemm_operand(p->m, p->k, p->ra, p->ca, &ta, &s.lda) ||
        !om_gemm_operand(p->k, p->n, p->rb, p->cb, &tb, &s.ldb) ||
        !om_gemm_operand(p->m, p->n, p->rc, p->cc, &tc, &s.ldc) || tc == 'T')
        return OM_OK;
    s.ta = ta == 'T', s.tb = tb == 'T', s.m = p->m, s.n = p->n, s.k = p->k;
    if (inner >= 0) s.batch = x->dim[inner], s.a = x->s[0][inner], s.b = x->s[1][inner], s.c = x->s[2][inner];
    int64_t m, n, k;
    aligned rows = {.piece = 0};
    if (!x->n && one_matrix(a, &m, &n, &k)) aligned_of(p, &s, up(s.space + OM_LT_ALIGN, OM_LT_ALIGN), &rows);
    if (rows.on[A] || rows.on[B] || rows.on[C]) OM_TRY(by_pieces(l, p, &s, &rows, done));
    if (*done) return OM_OK;
    const om_lt_product *product = NULL;
    OM_TRY(om_gpu_enter(l->cx, g));
    OM_TRY(om_gpu_leave(l->cx, g, om_lt_prepare(l->cx, g, l->mem, &s, &product)));
    if (!product) return OM_OK;
    for (int64_t c = 0; c < calls; c++) {
        call_add(l, p, x, inner, at, product, s.space);
        OM_TRY(l->cx->status);
        for (int i = x->n - 1; i >= 0; i--) {
            if (i == inner) continue;
            if (++at[i] < x->dim[i]) break;
            at[i] = 0;
        }
    }
    *done = true;
    return OM_OK;
}

/* --- matmul ------------------------------------------------------------------------------------------- */

om_status om_lower_matmul(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0], *y = &a->in[1], *z = &a->out[0];
    const int rank = z->rank;
    om_gpu_gemm p = {.m = z->dim[rank - 2], .n = z->dim[rank - 1], .k = x->dim[x->rank - 1],
                     .ra = x->stride[x->rank - 2], .ca = x->stride[x->rank - 1],
                     .rb = y->stride[y->rank - 2], .cb = y->stride[y->rank - 1],
                     .rc = z->stride[rank - 2], .cc = z->stride[rank - 1], .bdim = {1, 1, 1, 1}};
    OM_CHECK(l->cx, y->dim[y->rank - 2] == p.k, "matmul: a has %lld columns, b has %lld rows; they must be equal",
             (long long)p.k, (long long)y->dim[y->rank - 2]);
    int64_t dim[OM_RANK], s[3][OM_RANK];
    int n = 0;
    for (int i = 0; i < rank - 2; i++) { /* batch axes; neighbours that run on in all three merge */
        const int64_t d = z->dim[i];
        if (d == 1) continue;
        const int ix = i - (rank - x->rank), iy = i - (rank - y->rank);
        const int64_t sx = ix >= 0 && x->dim[ix] > 1 ? x->stride[ix] : 0;
        const int64_t sy = iy >= 0 && y->dim[iy] > 1 ? y->stride[iy] : 0;
        if ((ix >= 0 && x->dim[ix] > 1 && x->dim[ix] != d) || (iy >= 0 && y->dim[iy] > 1 && y->dim[iy] != d))
            return om_fail(l->cx, OM_INVALID, "matmul: batch axis %d of the operands differs", i);
        if (n && s[0][n - 1] == sx * d && s[1][n - 1] == sy * d && s[2][n - 1] == z->stride[i] * d) {
            dim[n - 1] *= d;
            n--;
        } else {
            dim[n] = d;
        }
        s[0][n] = sx, s[1][n] = sy, s[2][n] = z->stride[i];
        n++;
    }
    if (n > 4) return om_gpu_host(l);
    if (n == 1 && s[1][0] == 0 && s[0][0] == p.ra * p.m && s[2][0] == p.rc * p.m) { /* one b for all: more rows */
        p.m *= dim[0];
        n = 0;
    }
    axes products = {.n = n};
    int64_t batch = 1;
    for (int i = 0; i < n; i++) {
        p.bdim[i] = products.dim[i] = dim[i];
        p.ba[i] = products.s[0][i] = s[0][i], p.bb[i] = products.s[1][i] = s[1][i];
        p.bc[i] = products.s[2][i] = s[2][i];
        batch *= dim[i];
    }
    bool done;
    OM_TRY(by_library(l, &p, &products, &done));
    if (done) return OM_OK;
    const int64_t gx = om_gpu_blocks(p.m, 64), gy = om_gpu_blocks(p.n, 64);
    if (gy > 65535) return om_gpu_host(l);
    om_gpu_gemm *g = om_gpu_add(l, OM_GPU_OF(gemm, z->dtype), gx, gy, batch < 65535 ? batch : 65535, 256,
                                2 * 16 * 65 * om_dtype_size(om_compute_dtype(z->dtype)), sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    om_gpu_in(l, &g->a, 0);
    om_gpu_in(l, &g->b, 1);
    if (a->n_in > 2 && a->in[2].dtype) om_gpu_in(l, &g->bias, 2), g->sbias = a->in[2].stride[0];
    om_gpu_out(l, &g->c, 0, OM_GPU_WRITE);
    return OM_OK;
}

/* Products of groups of rows, by the engine's own kernel: only the device knows where groups end. */
om_status om_lower_grouped(om_lower *l) {
    const om_args *a = l->a;
    const om_tensor *x = &a->in[0], *w = &a->in[1], *ends = &a->in[2], *y = &a->out[0];
    const bool outer = y->rank == 3;
    const int64_t rows = x->dim[0], groups = ends->dim[0];
    OM_TRY(om_gpu_check(l));
    om_gpu_grouped p = {.ends_step = ends->stride[0], .groups = groups, .rows = rows, .outer = outer,
                        .per_a = x->stride[0], .per_b = w->stride[0], .per_c = y->stride[0]};
    om_gpu_gemm *g = &p.g;
    g->m = outer ? x->dim[1] : rows, g->n = w->dim[outer ? 1 : 2], g->k = outer ? 0 : x->dim[1];
    g->ra = x->stride[outer], g->ca = x->stride[!outer];
    g->rb = w->stride[!outer], g->cb = w->stride[outer ? 1 : 2];
    g->rc = y->stride[outer], g->cc = y->stride[outer ? 2 : 1];
    const int64_t bm = om_gpu_blocks(g->m, 64), bn = om_gpu_blocks(g->n, 64);
    if (bm > INT32_MAX || bn > 65535 || groups > 65535 || !om_is_dense(y)) return om_gpu_host(l);
    if (!outer) OM_TRY(om_gpu_fill_lower(l, a->n_in, y, 0, 0)); /* rows behind the last group */
    const size_t shared = 2 * 16 * 65 * (y->dtype == OM_F64 ? 8 : 4);
    om_gpu_grouped *q = om_gpu_add(l, OM_GPU_OF(grouped, y->dtype), bm, bn, groups, 256, shared, sizeof *q);
    if (!q) return l->cx->status;
    *q = p;
    om_gpu_in(l, &q->g.a, 0);
    om_gpu_in(l, &q->g.b, 1);
    om_gpu_in(l, &q->ends, 2);
    q->site = (int32_t)om_gpu_fault_at(l, &q->fault);
    om_gpu_out(l, &q->g.c, 0, OM_GPU_WRITE);
    return OM_OK;
}
