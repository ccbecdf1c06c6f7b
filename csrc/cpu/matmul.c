/* matmul.c - ops/matmul.c on the CPU.
 *
 * Any strides: transposition is a view and costs nothing here. When b has no batch, the leading axes of a and y that
 * are evenly spaced become rows of one product; the rest is a list of products with offsets (gemm.h).
 */
#include "cpu/cpu.h"
#include "cpu/gemm.h"

/* --- kernel ----------------------------------------------------------------------------------------- */

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

/* How the node maps to products; offsets (3 * batch entries, or NULL when they are not wanted) are filled in. */
static om_status matmul_args(om_ctx *cx, const om_args *ar, om_gemm_args *g, int64_t *offsets) {
    const om_tensor *a = &ar->in[0], *b = &ar->in[1], *y = &ar->out[0];
    const om_tensor *bias = ar->n_in > 2 && ar->in[2].dtype != OM_NODTYPE ? &ar->in[2] : NULL;
    int ra = a->rank, rb = b->rank, ry = y->rank;
    *g = (om_gemm_args){.dtype = a->dtype, .m = a->dim[ra - 2], .n = b->dim[rb - 1], .k = a->dim[ra - 1],
                        .a = a->data, .rsa = a->stride[ra - 2], .csa = a->stride[ra - 1],
                        .b = b->data, .rsb = b->stride[rb - 2], .csb = b->stride[rb - 1],
                        .c = y->data, .rsc = y->stride[ry - 2], .csc = y->stride[ry - 1], .alpha = 1, .batch = 1};
    OM_CHECK(cx, b->dim[rb - 2] == g->k, "matmul: a has %lld columns, b has %lld rows; they must be equal",
             (long long)g->k, (long long)b->dim[rb - 2]);
    OM_CHECK(cx, y->dim[ry - 2] == g->m && y->dim[ry - 1] == g->n,
             "matmul: y is (%lld, %lld), the operands give (%lld, %lld)", (long long)y->dim[ry - 2],
             (long long)y->dim[ry - 1], (long long)g->m, (long long)g->n);
    if (bias) {
        OM_CHECK(cx, bias->dim[0] == g->n, "matmul: bias has %lld entries, y has %lld columns", (long long)bias->dim[0],
                 (long long)g->n);
        g->bias = bias->data;
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
    if (!offsets) return OM_OK;
    for (int64_t p = 0; p < g->batch; p++) {
        int64_t rest = p, oa = 0, ob = 0, oc = 0;
        for (int i = nb - 1; i >= 0; i--) {
            int64_t at = rest % dim[i];
            rest /= dim[i];
            oa += at * sa[i], ob += at * sb[i], oc += at * y->stride[i];
        }
        offsets[p] = oa, offsets[g->batch + p] = ob, offsets[2 * g->batch + p] = oc;
    }
    g->off_a = offsets, g->off_b = offsets + g->batch, g->off_c = offsets + 2 * g->batch;
    return OM_OK;
}

static int64_t matmul_offset_bytes(const om_gemm_args *g) {
    return g->batch > 1 ? (3 * g->batch * (int64_t)sizeof(int64_t) + 63) & ~(int64_t)63 : 0;
}

int64_t om_cpu_scratch_matmul(om_ctx *cx, const om_args *ar) {
    om_gemm_args g;
    if (matmul_args(cx, ar, &g, NULL) != OM_OK) return 0;
    /* no operand has memory yet, and how the work is cut depends on there being a bias */
    if (ar->n_in > 2 && ar->in[2].dtype) g.bias = &g;
    return matmul_offset_bytes(&g) + om_gemm_scratch(cx, &g);
}

om_status om_cpu_run_matmul(om_ctx *cx, const om_args *ar) {
    om_gemm_args g;
    OM_TRY(matmul_args(cx, ar, &g, NULL));
    int64_t head = matmul_offset_bytes(&g);
    if (head) OM_TRY(matmul_args(cx, ar, &g, ar->scratch));
    g.scratch = ar->scratch ? (char *)ar->scratch + head : NULL;
    return om_gemm(cx, &g);
}
