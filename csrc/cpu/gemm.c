/* gemm.c - matrix products: choice of provider, cutting into tasks, scratch.
 *
 * Own kernel (kernels/gemm.k.c). One product is cut into row blocks whose packed A fits BLOCK_BYTES; each block is one
 * parallel_for: workers first claim panels of A and pack them, wait for the packing that others have claimed, then
 * claim tasks = (block of columns, group of rows). Nobody waits for work that no running thread holds, so the scheme
 * also finishes when the host runs the pieces one after the other. Row groups exist only to give every thread work when
 * C is narrow. Many products: whole products are the tasks, each worker packing for itself. One product of fp32 or fp64
 * becomes parts like that, one for each worker, where it is large enough (gemm_parts), or slices of k, where it is deep
 * and C small: the gradient of a small weight (gemm_slices). Products of a few numbers are not packed (gemm_few).
 *
 * Providers: the kernel above; the host's BLAS where the kernel has no vectors; the host's bf16 product where the
 * processor multiplies bf16 and the product is not small. What the host turns down, or is not there to do, is bf16 in
 * pairs (kernels/gemm_bf16.k.c) on AVX512_BF16: twice as fast as widening, 0.8 to 1.0 times oneDNN on large products.
 * On tiles (kernels/gemm_amx.k.c) only when the own kernel is asked for, ORTMODULE_GEMM=own: in whole steps it takes
 * as long as oneDNN, and longer where a small weight meets many rows (docs/ARCHITECTURE.md).
 *
 * Orientation. The kernel wants C contiguous along its columns and more columns than VL; when C is column-major, or is
 * narrow and tall, (A B)^T = B^T A^T is computed instead: same numbers, swapped strides.
 */
#include "cpu/gemm.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
    BLOCK_BYTES = 8 << 20,       /* packed A shared by all workers: streams from L3 */
    OWN_BLOCK_BYTES = 1 << 20,   /* packed A of a worker that has a product of narrow numbers to itself */
    PART_BLOCK_BYTES = 3 << 19,  /* packed A of a worker that has a product of f32 or f64 to itself, or a part of one */
    /* rows a block should have, to pay for packing B: deeper products are cut along k instead */
    BLOCK_ROWS = 512,
    PART_BLOCK_ROWS = 768,
    NARROW_ROWS = 512,           /* rows of a task whose C is summed aside: bounds the private block */
    SLICES_BYTES = 4 << 20,      /* sums of all slices of k, which wait in L2 and L3 until they are added */
    SLIVER = 8,                  /* fewer columns than this, and more rows: compute the transpose */
    PACK_CHUNK = 8,              /* panels of A packed per claim */
    PAST_CACHES = 2 << 20,       /* bytes of C that no core's own cache holds */
    FEW = 224,                   /* m n k of a product that packing would take longer than multiplying */
    FEW_BATCH = 8,
};
/* m n k: below it a call to the host costs more than it saves; the second where the own kernel multiplies bf16 itself
 * (AVX512_BF16) and the host has nothing better (AMX): tests/bench/bench_gemm.py --bf16 */
static const double HOST_MIN = 1e6, HOST_MIN_DOT = 4e6;
static const double MIN_FLOPS = 4e5; /* less work than this does not pay for waking a thread */

typedef struct gemm_run {
    om_gemm_job job;
    const om_gemm_type *t;
    char *work;                  /* per worker */
    int64_t work_size, workers, panels, groups, group_rows, tasks;
    atomic_int worker;
    atomic_llong pack_next, packed, task_next;
} gemm_run;

enum { FORCE_NONE, FORCE_OWN, FORCE_BLAS, FORCE_HOST };
static int gemm_forced(void) { /* read once; a race writes the same value twice */
    static atomic_int known;
    int f = atomic_load(&known);
    if (!f) {
        const char *e = getenv("ORTMODULE_GEMM");
        f = 1 + (e && !strcmp(e, "own")    ? FORCE_OWN
                 : e && !strcmp(e, "blas") ? FORCE_BLAS
                 : e && !strcmp(e, "host") ? FORCE_HOST
                                           : FORCE_NONE);
        atomic_store(&known, f);
    }
    return f - 1;
}

int om_gemm_host(void) {
    const int f = gemm_forced();
    return f == FORCE_OWN ? OM_HOST_NEVER : f == FORCE_HOST ? OM_HOST_ALWAYS : OM_HOST_MAY;
}

static const om_gemm_type *gemm_type(int dtype) {
    const om_gemm_type *tiles = OM_PICK(om_gemm_amx);
    if (dtype == OM_BF16 && gemm_forced() == FORCE_OWN && tiles->block && om_isa_tiles()) return tiles;
    if (dtype == OM_BF16 && om_isa_bf16() & OM_BF16_DOT) return OM_PICK(om_gemm_bf16);
    const om_gemm_kernels *k = OM_PICK(om_gemm_isa);
    return dtype == OM_F64 ? &k->f64 : &k->f32;
}

static int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Bytes one worker needs to fill a column block of `rows` rows; `aside`: its sums lie apart from C until they are
 * rounded. */
static int64_t gemm_work_size(const om_gemm_type *t, bool aside, int64_t rows) {
    const int64_t sum = t->elem < 4 ? 4 : t->elem;
    return round_up(((int64_t)t->kc * t->elem + (aside ? rows * sum : 0)) * t->cols, 64);
}

static int64_t gemm_own_scratch(const om_gemm_how *p) {
    const int64_t shared = p->pack_size + p->acc_size;
    if (p->few) return 0;
    return p->per_product || p->workers == 1 || p->slices
               ? p->workers * (shared + p->work_size) + p->slices * p->slice_size
               : shared + p->workers * p->work_size;
}

/* Packing a row or a column takes as long as PACK_COST products with a number of it. */
static double gemm_cost(double rows, double cols) {
    enum { PACK_COST = 30 };
    return rows * cols + PACK_COST * (rows + cols);
}

/* One product in as many parts as there are workers, each with packed operands of its own: no worker waits for another
 * or reads what another has packed. Faster than one packed A for all, which is 8 MiB, written past L2 and read from
 * there for every block of columns: 3 to 9 % on Granite Rapids (L2 2 MiB), whole steps 6 to 12 % on Zen 3 (L2 512 KiB,
 * an L3 that others share). Parts that packing would delay by more than WORTH are not made. Parts cut no sum. The
 * slowest part's cost, or that of what is not worth it. */
static double gemm_parts(const om_gemm_type *t, om_gemm_how *p) {
    const double WORTH = 1.25;
    double least = WORTH * gemm_cost((double)p->m, (double)p->n) / p->workers;
    for (int down = 1; down <= p->workers; down++) {
        if (p->workers % down) continue;
        const int64_t rows = round_up((p->m + down - 1) / down, t->mr), across = p->workers / down,
                      cols = round_up((p->n + across - 1) / across, t->cols);
        const double cost = gemm_cost((double)(rows < p->m ? rows : p->m), (double)(cols < p->n ? cols : p->n));
        if (cost >= least) continue;
        least = cost, p->part_rows = rows, p->part_cols = cols;
    }
    return least;
}

/* Slices of k, claimed by the workers, where that beats `least`: nothing is packed twice. Cut where the kernel cuts,
 * and added in its order: no sum changes. */
static void gemm_slices(const om_gemm_type *t, double least, om_gemm_how *p) {
    const int64_t slices = (p->k + t->kc - 1) / t->kc, size = round_up(p->m * p->n * t->elem, 64);
    const double JOIN_COST = 1.03, deepest = (double)((slices + p->workers - 1) / p->workers * t->kc),
                 share = deepest / (double)p->k; /* of a worker, in the last round of which the last slice may not be */
    if (slices < 2 || size > SLICES_BYTES / slices) return;
    if (share * JOIN_COST * gemm_cost((double)p->m, (double)p->n) >= least) return;
    p->slices = slices, p->slice_size = size;
}

static void gemm_own_prepare(int threads, const om_gemm_args *a, om_gemm_how *p) {
    const om_gemm_type *t = p->t = gemm_type(a->dtype);
    if (a->batch >= FEW_BATCH && a->m * a->n <= FEW && a->m * a->n * a->k <= FEW) { /* the first: of no k */
        p->few = true, p->t = a->dtype == OM_F64 ? &OM_PICK(om_gemm_isa)->f64 : &OM_PICK(om_gemm_isa)->f32;
        return;
    }
    const bool pairs = t->elem == 2;
    p->m = a->m, p->n = a->n, p->k = a->k, p->narrow = om_is_half(a->dtype) && !pairs && !a->wide_c;
    bool columns = a->csc != 1 && a->rsc == 1, sliver = a->n < SLIVER && a->m > a->n;
    p->swap = !a->bias && (columns || sliver) && !(a->csc == 1 && a->rsc != 1 && a->m < SLIVER && a->n >= a->m);
    if (p->swap) p->m = a->n, p->n = a->m;
    double flops = 2.0 * (double)p->m * (double)p->n * (double)(p->k ? p->k : 1), all = flops * (double)a->batch;
    p->workers = all < MIN_FLOPS ? 1 : all / MIN_FLOPS < threads ? (int)(all / MIN_FLOPS) : threads;
    if (p->workers < 1) p->workers = 1;
    p->per_product = a->batch > 1 && (flops < 8 * MIN_FLOPS || a->batch >= 4 * threads || p->workers == 1);
    const bool wide = !pairs && !p->narrow;
    if (wide && !p->per_product && p->workers > 1) {
        gemm_slices(t, gemm_parts(t, p), p);
        p->per_product = p->part_rows > 0 && !p->slices;
    }
    if (!p->per_product || !p->part_rows) p->part_rows = p->m, p->part_cols = p->n;
    const bool alone = p->per_product || p->workers == 1 || p->slices, apart = alone && wide;
    const int64_t m = p->part_rows < p->m ? p->part_rows : p->m, least = apart ? PART_BLOCK_ROWS : BLOCK_ROWS,
                  want = m < least ? m : least,
                  elems = (apart ? PART_BLOCK_BYTES : p->per_product ? OWN_BLOCK_BYTES : BLOCK_BYTES) / t->elem;
    p->block_k = p->slices ? t->kc : p->k;
    if (p->block_k * want > elems && !p->narrow) { /* not when C is narrow: it is rounded once, after all of k */
        p->block_k = elems / want / t->kc * t->kc;
        if (p->block_k < t->kc) p->block_k = t->kc;
    }
    const bool cut = pairs && p->block_k < p->k, aside = p->narrow || (pairs && !cut && p->k > t->kc);
    int64_t rows = elems / (p->block_k > 0 ? p->block_k : 1) / t->mr * t->mr;
    if (rows < 8 * t->mr) rows = 8 * t->mr;
    if (aside && rows > NARROW_ROWS / t->mr * t->mr) rows = NARROW_ROWS / t->mr * t->mr;
    if (rows > m) rows = round_up(m, t->mr);
    if (apart && rows < m) { /* blocks of one size, a little more before another one, which packs B again */
        const int64_t blocks = m <= rows + rows / 8 ? 1 : (m + rows - 1) / rows;
        rows = round_up((m + blocks - 1) / blocks, t->mr);
    }
    p->block_rows = rows;
    p->ld_acc = cut ? round_up(p->n, t->cols) : 0;
    p->acc_size = round_up(rows * p->ld_acc * (int64_t)sizeof(float), 64);
    int64_t col_blocks = (p->n + t->cols - 1) / t->cols, groups = 1, row_panels = rows / t->mr;
    if (!alone && col_blocks < 3 * p->workers && col_blocks > 0 && !(t->even && col_blocks % p->workers == 0))
        groups = (3 * p->workers + col_blocks - 1) / col_blocks;
    p->group_rows = groups > 1 ? (row_panels + groups - 1) / groups * t->mr : rows;
    if (p->group_rows < 4 * t->mr) p->group_rows = 4 * t->mr;
    p->pack_size = round_up((p->block_rows / t->mr + 1) * om_gemm_panel_size(t, p->block_k) * t->elem, 64);
    p->work_size = gemm_work_size(t, aside, p->block_rows);
}

/* --- own kernel ------------------------------------------------------------------------------------ */

/* bytes of an element of C or of the bias */
static int64_t gemm_c_size(int dtype, bool wide_c) {
    return (int64_t)om_dtype_size(wide_c ? om_compute_dtype(dtype) : dtype);
}

/* Where product number `product` lies. */
typedef struct gemm_place { const char *a, *b; char *c; } gemm_place;
static gemm_place gemm_place_of(const om_gemm_args *a, int64_t product) {
    int64_t oa = 0, ob = 0, oc = 0;
    for (int i = a->n_axis - 1; i >= 0; i--) {
        const om_gemm_axis *x = &a->axis[i];
        const int64_t at = i ? product % x->n : product;
        if (i) product /= x->n;
        oa += at * x->a, ob += at * x->b, oc += at * x->c;
    }
    const int64_t es = (int64_t)om_dtype_size(a->dtype);
    return (gemm_place){(const char *)a->a + oa * es, (const char *)a->b + ob * es,
                        (char *)a->c + oc * gemm_c_size(a->dtype, a->wide_c)};
}

static om_gemm_job gemm_job(const om_gemm_args *a, bool swap, int64_t product) {
    const gemm_place at = gemm_place_of(a, product);
    om_gemm_job j = {.dtype = a->dtype, .wide_c = a->wide_c, .m = a->m, .n = a->n, .k = a->k,
                     .a = at.a, .b = at.b, .bias = a->bias, .c = at.c,
                     .rsa = a->rsa, .csa = a->csa, .rsb = a->rsb, .csb = a->csb, .rsc = a->rsc, .csc = a->csc,
                     .alpha = a->alpha, .beta = a->beta, .pb = a->packed,
                     .past = a->m * a->n * gemm_c_size(a->dtype, a->wide_c) >= PAST_CACHES};
    if (swap) {
        j.m = a->n, j.n = a->m;
        j.a = at.b, j.rsa = a->csb, j.csa = a->rsb;
        j.b = at.a, j.rsb = a->csa, j.csb = a->rsa;
        j.rsc = a->csc, j.csc = a->rsc;
    }
    return j;
}

/* The part of a job that one packed block covers: rows from `row`, depth from `k`. Later depths add to C, or in `acc`,
 * which lies behind the packed block. */
static om_gemm_job gemm_block(const om_gemm_how *p, const om_gemm_job *j, int64_t row, int64_t k, char *pack) {
    int64_t es = (int64_t)om_dtype_size(j->dtype);
    om_gemm_job b = *j;
    b.a = (const char *)j->a + (row * j->rsa + k * j->csa) * es;
    b.b = (const char *)j->b + k * j->rsb * es;
    b.c = (char *)j->c + row * j->rsc * gemm_c_size(j->dtype, j->wide_c);
    b.m = j->m - row < p->block_rows ? j->m - row : p->block_rows;
    b.k = j->k - k < p->block_k ? j->k - k : p->block_k;
    b.pa = pack;
    if (p->acc_size) {
        b.acc = (float *)(void *)(pack + p->pack_size), b.ld_acc = p->ld_acc;
        b.more_before = k > 0, b.more_after = k + b.k < j->k;
    } else if (k > 0) {
        b.beta = 1, b.bias = NULL;
    }
    return b;
}

/* Part number `part` of a job: down the rows first. */
static om_gemm_job gemm_part(const om_gemm_how *p, const om_gemm_job *j, int64_t part) {
    const int64_t down = (j->m + p->part_rows - 1) / p->part_rows, row = part % down * p->part_rows,
                  col = part / down * p->part_cols, es = (int64_t)om_dtype_size(j->dtype),
                  cs = gemm_c_size(j->dtype, j->wide_c);
    om_gemm_job b = *j;
    b.m = j->m - row < p->part_rows ? j->m - row : p->part_rows;
    b.n = j->n - col < p->part_cols ? j->n - col : p->part_cols;
    b.a = (const char *)j->a + row * j->rsa * es;
    b.b = (const char *)j->b + col * j->csb * es;
    if (j->pb) b.pb = (const char *)j->pb + col / p->t->cols * om_gemm_block_size(j->k, p->t->kc, p->t->cols) *
                                                   p->t->elem;
    b.c = (char *)j->c + (row * j->rsc + col * j->csc) * cs;
    if (j->bias) b.bias = (const char *)j->bias + col * cs;
    return b;
}

static void gemm_alone(const om_gemm_how *p, const om_gemm_job *j, char *pack, char *work) {
    for (int64_t row = 0; row < j->m; row += p->block_rows) {
        int64_t k = 0;
        do { /* at least once: k = 0 still writes C */
            om_gemm_job b = gemm_block(p, j, row, k, pack);
            p->t->pack_a(&b, 0, (b.m + p->t->mr - 1) / p->t->mr);
            for (int64_t col = 0, end; col < b.n; col = end) {
                end = b.n - col < p->t->cols ? b.n : col + p->t->cols;
                p->t->block(&b, 0, b.m, col, end, end < b.n ? end : -1, work);
            }
            k += p->block_k;
        } while (k < j->k);
    }
}

/* the piece's bounds carry no meaning: work is claimed */
static void gemm_worker(void *arg, int64_t begin, int64_t end) {
    (void)begin, (void)end;
    gemm_run *r = arg;
    char *work = r->work + atomic_fetch_add(&r->worker, 1) * r->work_size;
    for (long long p; (p = atomic_fetch_add(&r->pack_next, PACK_CHUNK)) < r->panels;) {
        int64_t to = p + PACK_CHUNK < r->panels ? p + PACK_CHUNK : r->panels;
        r->t->pack_a(&r->job, p, to);
        atomic_fetch_add(&r->packed, to - p);
    }
    for (int spin = 0; atomic_load(&r->packed) < r->panels;)
        if (++spin > 1000) sched_yield();
    for (long long i; (i = atomic_fetch_add(&r->task_next, 1)) < r->tasks;) {
        int64_t col = i / r->groups * r->t->cols, col1 = col + r->t->cols < r->job.n ? col + r->t->cols : r->job.n;
        int64_t row = i % r->groups * r->group_rows,
                row1 = row + r->group_rows < r->job.m ? row + r->group_rows : r->job.m;
        /* the others claim one task each meanwhile */
        const int64_t next = i + r->workers < r->tasks ? (i + r->workers) / r->groups * r->t->cols : -1;
        if (row < row1) r->t->block(&r->job, row, row1, col, col1, next > col ? next : -1, work);
    }
}

typedef struct gemm_many {
    const om_gemm_how *p;
    const om_gemm_args *a;
    char *mem;
    int64_t parts;               /* of each product */
    atomic_int worker;
    atomic_llong next;
} gemm_many;

static void gemm_many_worker(void *arg, int64_t begin, int64_t end) {
    (void)begin, (void)end;
    gemm_many *r = arg;
    const om_gemm_how *p = r->p;
    const int64_t shared = p->pack_size + p->acc_size;
    char *mem = r->mem + atomic_fetch_add(&r->worker, 1) * (shared + p->work_size);
    for (long long i; (i = atomic_fetch_add(&r->next, 1)) < r->a->batch * r->parts;) {
        const om_gemm_job whole = gemm_job(r->a, p->swap, i / r->parts), j = gemm_part(p, &whole, i % r->parts);
        gemm_alone(p, &j, mem, mem + shared);
    }
}

typedef struct gemm_deep {
    const om_gemm_how *p;
    om_gemm_job job;
    char *mem, *sums;
    atomic_int worker;
    atomic_llong next;
} gemm_deep;

static void gemm_deep_worker(void *arg, int64_t begin, int64_t end) {
    (void)begin, (void)end;
    gemm_deep *r = arg;
    const om_gemm_how *p = r->p;
    const int64_t es = (int64_t)om_dtype_size(r->job.dtype), kc = p->t->kc;
    char *mem = r->mem + atomic_fetch_add(&r->worker, 1) * (p->pack_size + p->work_size);
    for (long long i; (i = atomic_fetch_add(&r->next, 1)) < p->slices;) {
        om_gemm_job j = r->job;
        j.a = (const char *)j.a + i * kc * j.csa * es, j.b = (const char *)j.b + i * kc * j.rsb * es;
        j.k = j.k - i * kc < kc ? j.k - i * kc : kc;
        j.c = r->sums + i * p->slice_size, j.rsc = j.n, j.csc = 1;
        j.beta = 0, j.bias = NULL;
        gemm_alone(p, &j, mem, mem + p->pack_size);
    }
}

static void gemm_deep_join(void *arg, int64_t begin, int64_t end) {
    const gemm_deep *r = arg;
    const int64_t slice = r->p->slice_size / r->p->t->elem;
    r->p->t->join(&r->job, r->sums, slice, r->p->slices, begin, end);
}

typedef struct gemm_few { const om_gemm_how *p; const om_gemm_args *a; int64_t first; } gemm_few;

static void gemm_few_range(void *arg, int64_t begin, int64_t end) {
    const gemm_few *r = arg;
    const om_gemm_axis *x = r->a->n_axis ? &r->a->axis[r->a->n_axis - 1] : NULL;
    for (int64_t i = r->first + begin, count; i < r->first + end; i += count) { /* runs along the last axis */
        count = r->first + end - i;
        if (x && x->n - i % x->n < count) count = x->n - i % x->n;
        const om_gemm_job j = gemm_job(r->a, false, i);
        r->p->t->few(&j, count, x ? x->a : 0, x ? x->b : 0, x ? x->c : 0);
    }
}

/* The products from `first` on. */
static void gemm_own(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *p, int64_t first, char *mem) {
    if (p->few) {
        om_parallel_for(cx, a->batch - first, 1 + 16384 / (a->m * a->n * (a->k + 4)), gemm_few_range,
                        &(gemm_few){p, a, first});
        return;
    }
    if (p->per_product || p->workers == 1) {
        const int64_t parts = (p->m + p->part_rows - 1) / p->part_rows * ((p->n + p->part_cols - 1) / p->part_cols);
        gemm_many r = {.p = p, .a = a, .mem = mem, .parts = parts, .next = first * parts};
        if (p->workers == 1) gemm_many_worker(&r, 0, 1);
        else om_parallel_for(cx, p->workers, 1, gemm_many_worker, &r);
        return;
    }
    for (int64_t i = first; i < a->batch && p->slices; i++) {
        gemm_deep r = {.p = p, .job = gemm_job(a, p->swap, i), .mem = mem};
        r.sums = mem + p->workers * (p->pack_size + p->work_size);
        om_parallel_for(cx, p->workers, 1, gemm_deep_worker, &r);
        om_parallel_for(cx, r.job.m, 1 + 16384 / (r.job.n * p->slices), gemm_deep_join, &r);
    }
    for (int64_t i = first; i < a->batch && !p->slices; i++) {
        om_gemm_job j = gemm_job(a, p->swap, i);
        for (int64_t row = 0; row < j.m; row += p->block_rows) {
            int64_t k = 0;
            do {
                gemm_run r = {.job = gemm_block(p, &j, row, k, mem),
                              .t = p->t,
                              .work = mem + p->pack_size + p->acc_size,
                              .work_size = p->work_size,
                              .workers = p->workers,
                              .group_rows = p->group_rows};
                r.panels = (r.job.m + p->t->mr - 1) / p->t->mr;
                r.groups = (r.job.m + p->group_rows - 1) / p->group_rows;
                r.tasks = (r.job.n + p->t->cols - 1) / p->t->cols * r.groups;
                om_parallel_for(cx, p->workers, 1, gemm_worker, &r);
                k += p->block_k;
            } while (k < j.k);
        }
    }
}

/* --- the host's BLAS ------------------------------------------------------------------------------- */

bool om_gemm_operand(int64_t rows, int64_t cols, int64_t rs, int64_t cs, char *trans, int *ld) {
    int64_t l;
    if ((cs == 1 || cols <= 1) && (rs >= cols || rows <= 1)) *trans = 'N', l = rows <= 1 ? cols : rs;
    else if ((rs == 1 || rows <= 1) && (cs >= rows || cols <= 1)) *trans = 'T', l = cols <= 1 ? rows : cs;
    else return false;
    if (l < 1) l = 1;
    *ld = (int)l;
    return l <= INT_MAX;
}

static bool blas_operands(const om_gemm_args *a, om_gemm_how *b) {
    char tc;
    return om_gemm_operand(a->m, a->k, a->rsa, a->csa, &b->ta, &b->lda) &&
           om_gemm_operand(a->k, a->n, a->rsb, a->csb, &b->tb, &b->ldb) &&
           om_gemm_operand(a->m, a->n, a->rsc, a->csc, &tc, &b->ldc) && tc == 'N';
}

/* Measured (tests/bench/bench_gemm.py). */
static bool blas_chosen(om_ctx *cx, const om_gemm_args *a, om_gemm_how *b) {
    int forced = gemm_forced();
    if (forced == FORCE_OWN || (forced != FORCE_BLAS && om_isa() != OM_ISA_GENERIC)) return false;
    if (a->dtype == OM_F32 ? !cx->sv.sgemm : a->dtype == OM_F64 ? !cx->sv.dgemm : true) return false;
    if (a->m > INT_MAX || a->n > INT_MAX || a->k > INT_MAX || a->k == 0) return false;
    return blas_operands(a, b);
}

static void gemm_blas_run(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *s) {
    int m = (int)a->m, n = (int)a->n, k = (int)a->k;
    int64_t es = (int64_t)om_dtype_size(a->dtype);
    for (int64_t i = 0; i < a->batch; i++) {
        const gemm_place at = gemm_place_of(a, i);
        const void *pa = at.a, *pb = at.b;
        char *pc = at.c;
        int beta = a->beta;
        if (a->bias && !beta) { /* C starts as the bias */
            for (int64_t r = 0; r < a->m; r++) memcpy(pc + r * s->ldc * es, a->bias, (size_t)(a->n * es));
            beta = 1;
        } else if (a->bias) {
            for (int64_t r = 0; r < a->m; r++)
                for (int64_t c = 0; c < a->n; c++)
                    if (a->dtype == OM_F32) ((float *)pc)[r * s->ldc + c] += ((const float *)a->bias)[c];
                    else ((double *)pc)[r * s->ldc + c] += ((const double *)a->bias)[c];
        }
        if (a->dtype == OM_F32) {
            float al = (float)a->alpha, be = (float)beta;
            cx->sv.sgemm(&s->tb, &s->ta, &n, &m, &k, &al, pb, &s->ldb, pa, &s->lda, &be, (float *)pc, &s->ldc);
        } else {
            double al = a->alpha, be = beta;
            cx->sv.dgemm(&s->tb, &s->ta, &n, &m, &k, &al, pb, &s->ldb, pa, &s->lda, &be, (double *)pc, &s->ldc);
        }
    }
}

/* --- the host's bf16 product (oneDNN inside torch) -------------------------------------------------- */

static bool host_chosen(om_ctx *cx, const om_gemm_args *a, om_gemm_how *b) {
    const int forced = gemm_forced();
    const unsigned has = om_isa_bf16();
    if (a->dtype != OM_BF16 || a->wide_c || !cx->sv.gemm_bf16 || forced == FORCE_OWN || a->alpha != 1 || a->k == 0)
        return false;
    if (!blas_operands(a, b)) return false;
    const double least = has == OM_BF16_DOT ? HOST_MIN_DOT : HOST_MIN;
    return forced == FORCE_HOST || (has && (double)a->m * (double)a->n * (double)a->k >= least);
}

/* How many of the products the host has done, in order. */
static int64_t host_run(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *s) {
    int64_t i = 0;
    for (; i < a->batch; i++) {
        const gemm_place at = gemm_place_of(a, i);
        if (!cx->sv.gemm_bf16(cx->sv.user, a->m, a->n, a->k, at.a, s->ta == 'N' ? s->lda : 1,
                              s->ta == 'N' ? 1 : s->lda, at.b, s->tb == 'N' ? s->ldb : 1, s->tb == 'N' ? 1 : s->ldb,
                              a->beta, at.c, s->ldc, a->bias))
            break;
    }
    return i;
}

/* --- the door -------------------------------------------------------------------------------------- */

enum { GEMM_NOTHING, GEMM_OWN, GEMM_BLAS, GEMM_HOST };

om_status om_gemm_prepare(om_ctx *cx, const om_gemm_args *a, om_gemm_how *how) {
    if (!om_is_float(a->dtype))
        return om_fail(cx, OM_UNSUPPORTED,
                       "matrix product of %s: only f32, f64, bf16 and f16 have a kernel; cast the operands",
                       om_dtype_name(a->dtype));
    *how = (om_gemm_how){.provider = GEMM_NOTHING};
    if (a->m <= 0 || a->n <= 0 || a->batch <= 0) return OM_OK;
    how->provider = blas_chosen(cx, a, how) ? GEMM_BLAS : host_chosen(cx, a, how) ? GEMM_HOST : GEMM_OWN;
    if (how->provider != GEMM_BLAS) gemm_own_prepare(om_num_threads(cx), a, how); /* the host may turn products down */
    if (how->provider == GEMM_OWN) how->scratch = gemm_own_scratch(how);
    return OM_OK;
}

om_status om_gemm_run(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *how) {
    if (how->provider == GEMM_NOTHING) return OM_OK;
    if (how->provider == GEMM_BLAS) {
        gemm_blas_run(cx, a, how);
        return OM_OK;
    }
    int64_t first = 0;
    if (how->provider == GEMM_HOST && (first = host_run(cx, a, how)) == a->batch) return OM_OK;
    char *own = NULL, *mem = how->provider == GEMM_OWN ? a->scratch : NULL; /* none was asked for */
    if (!how->few && !mem && !(mem = own = om_alloc(cx, (size_t)gemm_own_scratch(how)))) return OM_NOMEM;
    gemm_own(cx, a, how, first, mem);
    om_free(cx, own);
    return OM_OK;
}

int64_t om_gemm_packed_size(const om_gemm_how *how) {
    const om_gemm_type *t = how->t;
    if (how->provider != GEMM_OWN || !t->pack_b || how->narrow || how->swap || how->slices || how->few ||
        how->block_k < how->k)
        return 0;
    return (how->n + t->cols - 1) / t->cols * om_gemm_block_size(how->k, t->kc, t->cols) * t->elem;
}

typedef struct gemm_packing { const om_gemm_how *p; om_gemm_job job; void *to; } gemm_packing;
static void gemm_pack_range(void *arg, int64_t begin, int64_t end) {
    const gemm_packing *r = arg;
    r->p->t->pack_b(&r->job, r->to, begin, end);
}

void om_gemm_pack(om_ctx *cx, const om_gemm_args *a, const om_gemm_how *how, void *to) {
    gemm_packing r = {.p = how, .job = gemm_job(a, false, 0), .to = to};
    const int64_t blocks = (how->n + how->t->cols - 1) / how->t->cols;
    om_parallel_for(cx, blocks, 1 + 16384 / (how->k * how->t->cols + 1), gemm_pack_range, &r);
}

om_status om_gemm(om_ctx *cx, const om_gemm_args *a) {
    om_gemm_how how;
    OM_TRY(om_gemm_prepare(cx, a, &how));
    return om_gemm_run(cx, a, &how);
}
