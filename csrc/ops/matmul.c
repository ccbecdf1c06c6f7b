/* matmul.c - y = a b (+ bias): numpy's matmul on ranks >= 2, batch axes broadcast.
 *
 * Gradient, with dy like y:   da = dy b^T     db = a^T dy     dbias = dy summed over all but the last axis
 *   - b of rank 2 (a weight): a and dy are flattened to (rows, .) first, so db is one product with no sum after it.
 *   - b a transposed view (torch stores a Linear's weight as (n, k)): db is computed as (dy^T a)^T, so that the
 *     gradient of the stored weight is dense without a copy.
 *   - broadcast batch axes are summed.
 */
#include "ops/attr.h"

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
    *out = (om_type){.dtype = a->dtype, .rank = (uint8_t)rank};
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
    OM_OP(matmul),
    .kind = OM_K_GEMM,
    .min_in = 2,
    .max_in = 3,
    .n_out = 1,
    .infer = matmul_infer,
    .grad = matmul_grad,
};
