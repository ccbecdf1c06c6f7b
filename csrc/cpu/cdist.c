/* cdist.c - ops/cdist.c on the CPU: every row of the first operand against all of the second's, shared among threads. */
#include "cpu/cpu.h"
#include "cpu/cdist.h"

typedef struct cdist_plan {
    int64_t items, rows, r, m, size, grain; /* items: batch * rows of x */
    double p;
    int how, wide;
} cdist_plan;

om_status om_cpu_prepare_cdist(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const int first = a->n_in == 4;
    const om_tensor *x = &a->in[first], *y = &a->in[first + 1];
    cdist_plan *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    *p = (cdist_plan){.rows = x->dim[x->rank - 2], .r = y->dim[y->rank - 2], .m = x->dim[x->rank - 1],
                      .size = (int64_t)om_dtype_size(x->dtype), .p = om_args_float(a, "p", 2),
                      .wide = x->dtype == OM_F64};
    p->how = p->p == 0 ? OM_CDIST_ZERO : p->p == 1 ? OM_CDIST_ONE : p->p == 2 ? OM_CDIST_TWO : p->p < 0 ? OM_CDIST_INF
                                                                                                     : OM_CDIST_ANY;
    p->items = p->rows;
    for (int i = 0; i < x->rank - 2; i++) p->items *= x->dim[i];
    OM_CHECK(cx, y->dim[y->rank - 1] == p->m && om_numel(y) * p->rows == p->items * p->r * p->m,
             "%s: rows of %lld and %lld elements, or other batches", a->node->op->name, (long long)p->m,
             (long long)y->dim[y->rank - 1]);
    p->grain = 1 + 32768 / (p->r * p->m + 1);
    return OM_OK;
}

typedef struct cdist_job { const cdist_plan *p; const char *dd, *x, *y, *d; char *to; } cdist_job;

static void cdist_rows(void *arg, int64_t begin, int64_t end) {
    const cdist_job *j = arg;
    const cdist_plan *p = j->p;
    for (int64_t i = begin; i < end; i++) {
        const char *x = j->x + i * p->m * p->size, *y = j->y + i / p->rows * p->r * p->m * p->size;
        const int64_t at = i * p->r * p->size;
        if (!j->dd) OM_PICK(om_cdist)->rows[p->wide](p->how, p->p, x, y, p->r, p->m, j->to + at);
        else
            OM_PICK(om_cdist)->grad[p->wide](p->how, p->p, j->dd + at, x, y, j->d + at, p->r, p->m,
                                             j->to + i * p->m * p->size);
    }
}

om_status om_cpu_run_cdist(om_ctx *cx, const om_args *a) {
    const cdist_plan *p = a->prep;
    const cdist_job j = {.p = p, .x = a->in[0].data, .y = a->in[1].data, .to = a->out[0].data};
    om_parallel_for(cx, p->items, p->grain, cdist_rows, (void *)(uintptr_t)&j);
    return OM_OK;
}

om_status om_cpu_run_cdist_grad(om_ctx *cx, const om_args *a) {
    const cdist_job j = {a->prep, a->in[0].data, a->in[1].data, a->in[2].data, a->in[3].data, a->out[0].data};
    om_parallel_for(cx, j.p->items, j.p->grain, cdist_rows, (void *)(uintptr_t)&j);
    return OM_OK;
}
