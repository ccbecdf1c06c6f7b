/* matmul.c - y = a b (+ bias): numpy's matmul on ranks >= 2, batch axes broadcast.
 *
 * Any strides: transposition is a view and costs nothing here. When b has no batch, the leading axes of a and y that
 * are evenly spaced become rows of one product; the rest is a list of products with offsets (gemm.h).
 *
 * Gradient, with dy like y:   da = dy b^T     db = a^T dy     dbias = dy summed over all but the last axis
 *   - b of rank 2 (a weight): a and dy are flattened to (rows, .) first, so db is one product with no sum after it.
 *   - b a transposed view (torch stores a Linear's weight as (n, k)): db is computed as (dy^T a)^T, so that the
 *     gradient of the stored weight is dense without a copy.
 *   - broadcast batch axes are summed.
 */
#include "ops/attr.h"
#include "cpu/gemm.h"

/* --- types ------------------------------------------------------------------------------------------ */

static om_status matmul_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *a = om_ty(g, in[0]), *b = om_ty(g, in[1]);
    char t0[64], t1[64];
    OM_CHECK(g->cx, om_is_float(a->dtype), "matmul of %s: only f32, f64, bf16 and f16; cast the operands",
             om_dtype_name(a->dtype));
    OM_CHECK(g->cx, a->dtype == b->dtype, "matmul of %s by %s: both must have one dtype", om_dtype_name(a->dtype),
             om_dtype_name(b->dtype));
    OM_CHECK(g->cx, a->rank >= 2 && b->rank >= 2,
             "matmul of ranks %d and %d: at least 2 each; reshape vectors to matrices", a->rank, b->rank);
    om_dim ka = a->dim[a->rank - 1], kb = b->dim[b->rank - 2];
    om_dim_print(g, ka, t0, sizeof t0);
    om_dim_print(g, kb, t1, sizeof t1);
    OM_CHECK(g->cx, !attr_differs(g, ka, kb), "matmul: a has %s columns, b has %s rows; they must be equal", t0, t1);
    int rank = a->rank > b->rank ? a->rank : b->rank;
    *out = (om_type){.dtype = a->dtype, .rank = (uint8_t)rank, .device = a->device};
    for (int i = 0; i < rank - 2; i++) { /* numpy: aligned at the right, 1 gives way */
        int ia = i - (rank - a->rank), ib = i - (rank - b->rank);
        om_dim da = ia >= 0 ? a->dim[ia] : 1, db = ib >= 0 ? b->dim[ib] : 1;
        OM_CHECK(g->cx, da == 1 || db == 1 || !attr_differs(g, da, db),
                 "matmul: batch axis %d of the operands has %lld and %lld entries; equal or 1 is allowed", i,
                 (long long)da, (long long)db);
        int64_t known;
        out->dim[i] = da == 1 ? db : db == 1 ? da : om_dim_const(g, db, &known) ? db : da;
    }
    out->dim[rank - 2] = a->dim[a->rank - 2];
    out->dim[rank - 1] = b->dim[b->rank - 1];
    if (n->n_in > 2 && in[2] != OM_NONE) {
        const om_type *c = om_ty(g, in[2]);
        OM_CHECK(g->cx, c->dtype == a->dtype, "matmul: bias is %s, operands are %s; one dtype is needed",
                 om_dtype_name(c->dtype), om_dtype_name(a->dtype));
        OM_CHECK(g->cx, c->rank == 1 && !attr_differs(g, c->dim[0], out->dim[rank - 1]),
                 "matmul: bias must have rank 1 and as many entries as y has columns");
    }
    return OM_OK;
}

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

static int64_t matmul_scratch(om_ctx *cx, const om_args *ar) {
    om_gemm_args g;
    if (matmul_args(cx, ar, &g, NULL) != OM_OK) return 0;
    /* no operand has memory yet, and how the work is cut depends on there being a bias */
    if (ar->n_in > 2 && ar->in[2].dtype) g.bias = &g;
    return matmul_offset_bytes(&g) + om_gemm_scratch(cx, &g);
}

static om_status matmul_run(om_ctx *cx, const om_args *ar) {
    om_gemm_args g;
    OM_TRY(matmul_args(cx, ar, &g, NULL));
    int64_t head = matmul_offset_bytes(&g);
    if (head) OM_TRY(matmul_args(cx, ar, &g, ar->scratch));
    g.scratch = ar->scratch ? (char *)ar->scratch + head : NULL;
    return om_gemm(cx, &g);
}

/* --- gradient --------------------------------------------------------------------------------------- */

static bool matmul_is_transposed(const om_graph *g, om_id v) {
    om_id node = om_val(g, v)->node;
    if (node == OM_NONE) return false;
    const om_node *n = &g->nodes.v[node];
    if (!om_is(n, permute)) return false;
    const om_attr *p = om_attr_get(n->attr, n->n_attr, "perm");
    return p && p->kind == OM_ATTR_DIMS && p->n >= 2 && p->dims[p->n - 1] == (om_dim)p->n - 2 &&
           p->dims[p->n - 2] == (om_dim)p->n - 1;
}

static om_id matmul_rows(om_graph *g, om_id x) { /* (..., c) -> (rows, c) */
    if (x == OM_NONE) return OM_NONE;
    om_type t = *om_ty(g, x);
    om_dim d[2] = {1, t.dim[t.rank - 1]};
    for (int i = 0; i < t.rank - 1; i++) d[0] = om_dim_mul(g, d[0], t.dim[i]);
    return om_b_reshape(g, x, d, 2);
}

static om_status matmul_grad(om_builder *bl, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = bl->g;
    om_id a = om_ins(g, n)[0], b = om_ins(g, n)[1], d = dy[0];
    om_type ta = *om_ty(g, a), tb = *om_ty(g, b);
    if (want[0])
        dx[0] = om_b_sum_to(g, om_make(g, &om_op_matmul, OM_IN(d, om_b_transpose(g, b, -1, -2)), NULL, 0), &ta);
    if (want[1]) {
        om_id l = a, r = d;
        if (tb.rank == 2) l = matmul_rows(g, a), r = matmul_rows(g, d);
        om_id db;
        if (matmul_is_transposed(g, b))
            db = om_b_transpose(g, om_make(g, &om_op_matmul, OM_IN(om_b_transpose(g, r, -1, -2), l), NULL, 0), -1, -2);
        else db = om_make(g, &om_op_matmul, OM_IN(om_b_transpose(g, l, -1, -2), r), NULL, 0);
        dx[1] = om_b_sum_to(g, db, &tb);
    }
    if (n->n_in > 2 && want[2]) {
        om_type tc = *om_ty(g, om_ins(g, n)[2]);
        dx[2] = om_b_sum_to(g, d, &tc);
    }
    return OM_OK;
}

const om_op om_op_matmul = {
    .name = "matmul",
    .doc = "y = a b + bias: a (..., m, k), b (..., k, n), bias (n); batch axes broadcast",
    .kind = OM_K_GEMM,
    .min_in = 2,
    .max_in = 3,
    .n_out = 1,
    .dense = 1u << 2,
    .infer = matmul_infer,
    .grad = matmul_grad,
    .scratch = matmul_scratch,
    .run = matmul_run,
};
