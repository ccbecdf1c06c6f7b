/* simplify.c - nodes that change nothing, or that two say what one can.
 *
 * Each node is copied, then looked at in the new graph, where its operands are already simplified; a rule answers with
 * the value that equals the node's result, which takes its place when the types are the same. Rules are exact for every
 * bit pattern: x + 0.0 is not x (it turns -0.0 into 0.0), x + -0.0 and x - 0.0 are. Gradients are unchanged too, so the
 * pass may run before and after they are built. Nodes left without a reader go in the next rewrite.
 */
#include "graph/facts.h"
#include "passes/passes.h"

enum { SIMPLIFY_PARTS = 64 /* of a concat that is looked at */ };

static const om_attr *simplify_dims(const om_node *n, const char *name) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    return a && a->kind == OM_ATTR_DIMS ? a : NULL;
}
/* An attribute that is one size, written as integer or list of one. */
static bool simplify_dim(om_graph *g, const om_node *n, const char *name, om_dim dflt, om_dim *d) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    *d = !a ? dflt : a->kind == OM_ATTR_INT ? om_dim_int(g, a->i) : dflt;
    if (a && a->kind == OM_ATTR_DIMS && a->n == 1) *d = a->dims[0];
    return !a || a->kind == OM_ATTR_INT || (a->kind == OM_ATTR_DIMS && a->n == 1);
}
static bool simplify_is(const om_graph *g, om_id v, double want, bool minus_zero) {
    double x;
    return om_number_of(g, v, &x) && x == want &&
           (want != 0 || !om_is_float(om_ty(g, v)->dtype) || !!__builtin_signbit(x) == minus_zero);
}

static om_id simplify_reshape(om_graph *g, const om_node *n, om_id x) {
    const om_node *m = om_maker(g, x);
    const om_attr *shape = simplify_dims(n, "shape");
    if (!m || m->op != n->op || !shape) return x;
    return om_b_reshape(g, om_ins(g, m)[0], shape->dims, (int)shape->n);
}

static om_id simplify_permute(om_graph *g, const om_node *n, om_id x) {
    const om_node *m = om_maker(g, x);
    const om_attr *p = simplify_dims(n, "perm"), *q = m && m->op == n->op ? simplify_dims(m, "perm") : NULL;
    int perm[OM_RANK];
    for (uint32_t i = 0; p && i < p->n; i++) perm[i] = (int)(q ? q->dims[p->dims[i]] : p->dims[i]);
    return !p ? OM_NONE : om_b_permute(g, q ? om_ins(g, m)[0] : x, perm);
}

static om_id simplify_expand(om_graph *g, const om_node *n, om_id x) {
    const om_node *m = om_maker(g, x);
    const om_attr *shape = simplify_dims(n, "shape");
    if (!m || m->op != n->op || !shape) return x;
    return om_b_expand(g, om_ins(g, m)[0], shape->dims, (int)shape->n);
}

/* x[a:b][c:d] = x[a+c : a+d] */
static om_id simplify_slice(om_graph *g, const om_node *n, om_id x) {
    const om_node *m = om_maker(g, x);
    int64_t axis = om_node_int(n, "axis", 0);
    om_dim a, c, d;
    if (!m || m->op != n->op || om_node_int(m, "axis", 0) != axis || om_node_int(m, "step", 1) != 1 ||
        om_node_int(n, "step", 1) != 1)
        return x;
    if (!simplify_dim(g, m, "start", 0, &a) || !simplify_dim(g, n, "start", 0, &c) ||
        !simplify_dim(g, n, "end", om_ty(g, x)->dim[axis], &d)) return x;
    return om_b_slice(g, om_ins(g, m)[0], (int)axis, om_dim_add(g, a, c), om_dim_add(g, a, d), 1);
}

static om_id simplify_flip(const om_graph *g, const om_node *n, om_id x) {
    const om_node *m = om_maker(g, x);
    const om_attr *p = simplify_dims(n, "axes"), *q = m && m->op == n->op ? simplify_dims(m, "axes") : NULL;
    if (p && p->n == 0) return x;
    return q && p && p->n == q->n && !memcmp(p->dims, q->dims, p->n * sizeof *p->dims) ? om_ins(g, m)[0] : OM_NONE;
}

/* Does `to` hold every value of `from`? */
static bool simplify_exact(int from, int to) {
    static const int8_t bits[OM_N_DTYPES] = {/* of integers: value bits; of floats: mantissa */
                                             [OM_BOOL] = 1, [OM_U8] = 8,   [OM_I8] = 7,   [OM_I16] = 15, [OM_I32] = 31,
                                             [OM_I64] = 63, [OM_F16] = 11, [OM_BF16] = 8, [OM_F32] = 24, [OM_F64] = 53};
    if (from == to) return true;
    if (to == OM_BOOL || !bits[from] || !bits[to]) return false;
    if (om_is_float(from))
        return (to == OM_F64 && om_is_float(to)) || (to == OM_F32 && (from == OM_F16 || from == OM_BF16));
    if (to == OM_F16) return bits[from] <= 11; /* 2^15 and more are out of its range or steps; 11 bits are not */
    if (to == OM_U8) return from == OM_BOOL;
    return bits[from] <= bits[to];
}

static om_id simplify_cast(om_graph *g, const om_node *n, om_id x) {
    const om_node *m = om_maker(g, x);
    int to = om_ty(g, n->out)->dtype;
    if (!m) return x;
    om_id from = om_ins(g, m)[0];
    const om_node *made = om_is(m, reshape) ? om_maker(g, from) : NULL;
    if (made && made->op->kind == OM_K_POINTWISE && made->op != n->op && om_is_half(to)) { /* where fuse finds it */
        const om_type t = *om_ty(g, n->out); /* building moves the array */
        return om_b_reshape(g, om_b_cast(g, from, to), t.dim, t.rank);
    }
    if (m->op != n->op) return x;
    if (!simplify_exact(om_ty(g, from)->dtype, om_ty(g, x)->dtype)) return x;
    return om_b_cast(g, from, to);
}

/* done: the gradients are built. Before that an operand of no elements is due a gradient, of no elements too. */
static om_id simplify_concat(om_graph *g, const om_node *n, bool done) {
    om_id in[SIMPLIFY_PARTS], empty[SIMPLIFY_PARTS];
    int k = 0, n_empty = 0;
    int64_t axis = om_node_int(n, "axis", 0);
    if (n->n_in > SIMPLIFY_PARTS) return OM_NONE;
    for (int i = 0; i < n->n_in; i++) {
        om_id v = om_ins(g, n)[i];
        if (v == OM_NONE || om_ty(g, v)->dim[axis] != 0) in[k++] = v;
        else if (om_is_float(om_ty(g, v)->dtype) && om_val(g, v)->role != OM_CONST) empty[n_empty++] = v;
    }
    if (k == n->n_in && k > 1) return OM_NONE;
    om_id y = k == 0 ? om_ins(g, n)[0] : k == 1 ? in[0] : om_make(g, n->op, in, k, n->attr, n->n_attr);
    for (int i = k == 0; i < n_empty && !done; i++) y = om_b_bin(g, &om_op_zero_grad, y, empty[i]);
    return y;
}

static bool simplify_no_pad(const om_node *n) {
    for (int side = 0; side < 2; side++) {
        const om_attr *a = simplify_dims(n, side ? "hi" : "lo");
        for (uint32_t i = 0; a && i < a->n; i++)
            if (a->dims[i] != 0) return false;
    }
    return true;
}

/* The value that equals the result of n (a copy: building moves the array), or OM_NONE. */
static om_id simplify_rule(om_graph *g, const om_node *n, bool done) {
    if (n->n_out != 1 || n->n_in == 0) return OM_NONE;
    om_id x = om_ins(g, n)[0], y = n->n_in > 1 ? om_ins(g, n)[1] : OM_NONE;
    const om_node *m = om_maker(g, x);
    if (om_is(n, reshape)) return simplify_reshape(g, n, x);
    if (om_is(n, permute)) return simplify_permute(g, n, x);
    if (om_is(n, expand)) return simplify_expand(g, n, x);
    if (om_is(n, slice)) return simplify_slice(g, n, x);
    if (om_is(n, flip)) return simplify_flip(g, n, x);
    if (om_is(n, cast)) return simplify_cast(g, n, x);
    if (om_is(n, concat)) return simplify_concat(g, n, done);
    if (om_is(n, pad)) return simplify_no_pad(n) ? x : OM_NONE;
    if (om_is(n, copy)) return x;
    if (om_is(n, zero_grad))
        return done || !om_is_float(om_ty(g, y)->dtype) || om_val(g, y)->role == OM_CONST ? x : OM_NONE;
    if (om_is(n, stop_grad)) return !om_is_float(om_ty(g, x)->dtype) || (m && m->op == n->op) ? x : OM_NONE;
    if (om_is(n, dropout)) return om_node_float(n, "p", 0) == 0 ? x : OM_NONE;
    if (om_is(n, neg) || om_is(n, not)) return m && m->op == n->op ? om_ins(g, m)[0] : OM_NONE;
    if (om_is(n, mul)) return simplify_is(g, y, 1, false) ? x : simplify_is(g, x, 1, false) ? y : OM_NONE;
    if (om_is(n, div)) return simplify_is(g, y, 1, false) ? x : OM_NONE;
    if (om_is(n, pow)) return simplify_is(g, y, 1, false) ? x : OM_NONE;
    if (om_is(n, add)) return simplify_is(g, y, 0, true) ? x : simplify_is(g, x, 0, true) ? y : OM_NONE;
    if (om_is(n, sub)) return simplify_is(g, y, 0, false) ? x : OM_NONE;
    if (om_is(n, where)) {
        double c; /* the branch never taken must not be one that would have received a gradient of zeros */
        if (!om_number_of(g, x, &c)) return OM_NONE;
        om_id other = om_ins(g, n)[c != 0 ? 2 : 1];
        return om_val(g, other)->role == OM_CONST || !om_is_float(om_ty(g, other)->dtype) ? om_ins(g, n)[c != 0 ? 1 : 2]
                                                                                          : OM_NONE;
    }
    return OM_NONE;
}

static om_status simplify_emit(om_rewriter *r, om_id id) {
    OM_TRY(om_rewrite_copy(r, id));
    om_graph *g = r->to;
    const om_node n = *om_last(g);
    om_id y = simplify_rule(g, &n, r->from->grads.n > 0);
    if (g->cx->status != OM_OK) return g->cx->status;
    if (y != OM_NONE && om_pass_same_type(om_ty(g, y), om_ty(g, n.out))) r->map[r->from->nodes.v[id].out] = y;
    return OM_OK;
}

om_status om_pass_run_simplify(om_ctx *cx, const om_graph *in, om_graph **out) {
    return om_rewrite(cx, in, simplify_emit, NULL, out);
}
