/* grouped.c - ops/grouped.c on the CPU: a product (gemm.h) for each group that has rows, whose number only the run
 * knows. Ends that go back or beyond the rows are faults and count as the nearest that fit. */
#include "cpu/cpu.h"
#include "cpu/fault.h"
#include "cpu/gemm.h"

#include <string.h>

om_status om_cpu_prepare_grouped(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *x = &a->in[0], *w = &a->in[1], *o = &a->in[2], *y = &a->out[0];
    (void)mem, (void)prep;
    if (y->rank == 2)
        OM_CHECK(cx, w->dim[1] == x->dim[1] && o->dim[0] == w->dim[0],
                 "grouped_matmul: x has %lld columns and the matrices %lld rows, %lld ends for %lld groups",
                 (long long)x->dim[1], (long long)w->dim[1], (long long)o->dim[0], (long long)w->dim[0]);
    else OM_CHECK(cx, w->dim[0] == x->dim[0], "grouped_outer: operands of %lld and %lld rows", (long long)x->dim[0],
                  (long long)w->dim[0]);
    return OM_OK;
}

static void *grouped_at(const om_tensor *t, int64_t row, int64_t stride) {
    return (char *)t->data + row * stride * (int64_t)om_dtype_size(t->dtype);
}

om_status om_cpu_run_grouped(om_ctx *cx, const om_args *a) {
    const om_tensor *x = &a->in[0], *w = &a->in[1], *o = &a->in[2], *y = &a->out[0];
    const bool outer = y->rank == 3;
    const int64_t rows = x->dim[0], groups = o->dim[0];
    const int64_t *end = o->data;
    int64_t from = 0;
    memset(y->data, 0, (size_t)om_numel(y) * om_dtype_size(y->dtype)); /* dense */
    for (int64_t e = 0; e < groups; e++) {
        int64_t to = end[e * o->stride[0]];
        if (to < from || to > rows) {
            om_fault_note(a->fault, OM_FAULT_INDEX, to, e, rows + 1);
            to = to < from ? from : rows;
        }
        om_gemm_args g = {.dtype = x->dtype, .alpha = 1, .batch = 1};
        if (outer) { /* x^T w of the group's rows */
            g.m = x->dim[1], g.n = w->dim[1], g.k = to - from;
            g.a = grouped_at(x, from, x->stride[0]), g.rsa = x->stride[1], g.csa = x->stride[0];
            g.b = grouped_at(w, from, w->stride[0]), g.rsb = w->stride[0], g.csb = w->stride[1];
            g.c = grouped_at(y, e, y->stride[0]), g.rsc = y->stride[1], g.csc = y->stride[2];
        } else {
            g.m = to - from, g.n = w->dim[2], g.k = x->dim[1];
            g.a = grouped_at(x, from, x->stride[0]), g.rsa = x->stride[0], g.csa = x->stride[1];
            g.b = grouped_at(w, e, w->stride[0]), g.rsb = w->stride[1], g.csb = w->stride[2];
            g.c = grouped_at(y, from, y->stride[0]), g.rsc = y->stride[0], g.csc = y->stride[1];
        }
        if (to > from && g.m && g.n && g.k) OM_TRY(om_gemm(cx, &g));
        from = to;
    }
    return OM_OK;
}
