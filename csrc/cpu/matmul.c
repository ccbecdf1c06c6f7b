/* matmul.c - ops/matmul.c on the CPU.
 *
 * Any strides: transposition is a view and costs nothing here. When b has no batch, the leading axes of a and y that
 * are evenly spaced become rows of one product; the rest are products along axes (gemm.h). All of it is worked out once
 * per plan; a run puts addresses in.
 */
#include "cpu/cpu.h"
#include "cpu/gemm.h"

/* Axes [0, last] of t as one evenly spaced axis: its stride; false when they are not. */
static bool matmul_flatten(const om_tensor *t, int last, int64_t *stride) {
    int64_t step = 0, next = 0;
    bool any = false;
    for (int i = last; i >= 0; i--) {
        if (t->dim[i] == 1) continue;
        if (!any) step = t->stride[i], any = true;
        else if (t->stride[i] != next) return false;
        next = t->stride[i] * t->dim[i];
    }
    *stride = any ? step : 1;
    return true;
}

/* How the node maps to products; g->axis is `axis` (OM_RANK entries), its neighbours merged. */
static om_status matmul_args(om_ctx *cx, const om_args *ar, om_gemm_args *g, om_gemm_axis *axis) {
    const om_tensor *a = &ar->in[0], *b = &ar->in[1], *y = &ar->out[0];
    const om_tensor *bias = ar->n_in > 2 && ar->in[2].dtype != OM_NODTYPE ? &ar->in[2] : NULL;
    int ra = a->rank, rb = b->rank, ry = y->rank;
    *g = (om_gemm_args){.dtype = a->dtype, .m = a->dim[ra - 2], .n = b->dim[rb - 1], .k = a->dim[ra - 1],
                        .rsa = a->stride[ra - 2], .csa = a->stride[ra - 1],
                        .rsb = b->stride[rb - 2], .csb = b->stride[rb - 1],
                        .rsc = y->stride[ry - 2], .csc = y->stride[ry - 1], .alpha = 1, .batch = 1, .axis = axis};
    OM_CHECK(cx, b->dim[rb - 2] == g->k, "matmul: a has %lld columns, b has %lld rows; they must be equal",
             (long long)g->k, (long long)b->dim[rb - 2]);
    OM_CHECK(cx, y->dim[ry - 2] == g->m && y->dim[ry - 1] == g->n,
             "matmul: y is (%lld, %lld), the operands give (%lld, %lld)", (long long)y->dim[ry - 2],
             (long long)y->dim[ry - 1], (long long)g->m, (long long)g->n);
    if (bias) {
        OM_CHECK(cx, bias->dim[0] == g->n, "matmul: bias has %lld entries, y has %lld columns", (long long)bias->dim[0],
                 (long long)g->n);
        g->bias = bias; /* that there is one decides how the work is cut; a run puts its address here */
    }
    int nb = ry - 2;
    int64_t plain = 1, dim[OM_RANK], sa[OM_RANK], sb[OM_RANK]; /* of the batch axes; plain: entries b really has */
    for (int i = 0; i < nb; i++) {
        int ia = i - (ry - ra), ib = i - (ry - rb);
        int64_t da = ia >= 0 ? a->dim[ia] : 1, db = ib >= 0 ? b->dim[ib] : 1;
        dim[i] = y->dim[i];
        OM_CHECK(cx, (da == dim[i] || da == 1) && (db == dim[i] || db == 1),
                 "matmul: batch axis %d of y has %lld entries, the operands have %lld and %lld", i, (long long)dim[i],
                 (long long)da, (long long)db);
        sa[i] = ia >= 0 && da > 1 ? a->stride[ia] : 0;
        sb[i] = ib >= 0 && db > 1 ? b->stride[ib] : 0;
        plain *= db;
        g->batch *= dim[i];
    }
    if (nb == 0 || g->batch == 0) return OM_OK;
    int64_t rsa, rsc;
    if (plain == 1 && ra == ry && matmul_flatten(a, ra - 2, &rsa) && matmul_flatten(y, ry - 2, &rsc)) {
        int64_t rows = g->m;
        bool same = true; /* a broadcast axis of a is not a row */
        for (int i = 0; i < nb; i++) rows *= dim[i], same &= a->dim[i] == dim[i];
        if (same) {
            g->m = rows, g->rsa = rsa, g->rsc = rsc, g->batch = 1;
            return OM_OK;
        }
    }
    for (int i = 0; i < nb; i++) {
        if (dim[i] == 1) continue;
        om_gemm_axis x = {dim[i], sa[i], sb[i], y->stride[i]}, *p = g->n_axis ? &axis[g->n_axis - 1] : NULL;
        if (p && p->a == x.a * x.n && p->b == x.b * x.n && p->c == x.c * x.n) x.n *= p->n, *p = x;
        else axis[g->n_axis++] = x;
    }
    return OM_OK;
}

typedef struct matmul_prep {
    om_gemm_args g;
    om_gemm_how how;
    size_t bounded;      /* where g has a size that only the data knows (m, n or k); 0: nowhere */
    om_gemm_axis axis[]; /* g.n_axis */
} matmul_prep;

static om_status matmul_decide(om_ctx *cx, const om_args *ar, om_gemm_args *g, om_gemm_axis *axis, om_gemm_how *how) {
    OM_TRY(matmul_args(cx, ar, g, axis));
    return om_gemm_prepare(cx, g, how);
}

int64_t om_cpu_scratch_matmul(om_ctx *cx, const om_args *ar) {
    om_gemm_args g;
    om_gemm_axis axis[OM_RANK];
    om_gemm_how how;
    return matmul_decide(cx, ar, &g, axis, &how) == OM_OK ? how.scratch : 0;
}

om_status om_cpu_prepare_matmul(om_ctx *cx, om_arena *mem, const om_args *ar, const void **prep) {
    om_gemm_args g;
    om_gemm_axis axis[OM_RANK];
    om_gemm_how how;
    OM_TRY(matmul_decide(cx, ar, &g, axis, &how));
    const size_t bytes = (size_t)g.n_axis * sizeof *axis;
    matmul_prep *p = om_arena_alloc(mem, sizeof *p + bytes);
    if (!p) return cx->status;
    *p = (matmul_prep){.g = g, .how = how};
    p->g.axis = memcpy(p->axis, axis, bytes);
    if (ar->bounded) /* of two matrices: graph/bounded.c */
        p->bounded = ar->bounded[0] == 0   ? offsetof(om_gemm_args, m)
                     : ar->bounded[0] == 1 ? offsetof(om_gemm_args, k)
                     : ar->bounded[1] == 1 ? offsetof(om_gemm_args, n)
                                           : 0;
    *prep = p;
    return OM_OK;
}

om_status om_cpu_run_matmul(om_ctx *cx, const om_args *ar) {
    const matmul_prep *p = ar->prep;
    om_gemm_args g = p->g;
    g.a = ar->in[0].data, g.b = ar->in[1].data, g.c = ar->out[0].data;
    if (g.bias) g.bias = ar->in[2].data;
    g.scratch = ar->scratch;
    if (ar->count && p->bounded) { /* as many rows as count: nothing past them is read */
        int64_t *size = (int64_t *)(void *)((char *)&g + p->bounded), all = *size;
        om_gemm_how how;
        *size = *ar->count < 0 ? 0 : *ar->count < all ? *ar->count : all;
        if (*size < all) {
            OM_TRY(om_gemm_prepare(cx, &g, &how));
            if (how.scratch > p->how.scratch) g.scratch = NULL; /* it wants more room than all of them */
            return om_gemm_run(cx, &g, &how);
        }
    }
    return om_gemm_run(cx, &g, &p->how);
}
