/* patterns.c - composites that models spell out become the one operator that has a kernel and a lean gradient:
 *
 *     0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))     -> gelu_tanh(x)       GPT-2's gelu_new, T5's gated activation
 *     0.5 x (1 + erf(x / sqrt 2))                         -> gelu(x)
 *     x sigmoid(x)                                        -> silu(x)
 *     x / sqrt(mean(x^2) + eps) [* w]                     -> rms_norm(x, w)     Llama, T5; w (last axis)
 *
 * A match starts at the last multiplication and looks up through definitions; operands of commutative operators match
 * in either order. Intermediate values that somebody else reads stay: only the matched result is replaced. Constants
 * may differ from the formula's by their own rounding (1e-6 relative, 1e-2 in 16-bit types).
 */
#include "graph/facts.h"
#include "passes/passes.h"

#include <math.h>

typedef struct matcher { const om_graph *g; double tol; } matcher;

static const om_node *def(const matcher *m, om_id v, const om_op *op) {
    const om_node *n = om_maker(m->g, v);
    return n && n->op == op ? n : NULL;
}

static bool number(const matcher *m, om_id v, double want) {
    double x;
    return om_pass_splat(m->g, v, &x) && fabs(x - want) <= m->tol * fabs(want);
}

/* v = op(x, c) with c a constant close to `want`, in either order */
static bool with_number(const matcher *m, om_id v, const om_op *op, double want, om_id *x) {
    const om_node *n = def(m, v, op);
    for (int s = 0; n && s < 2; s++)
        if (number(m, om_ins(m->g, n)[1 - s], want)) return *x = om_ins(m->g, n)[s], true;
    return false;
}

static bool same_dims(const matcher *m, om_id a, om_id b) { return om_pass_same_type(om_ty(m->g, a), om_ty(m->g, b)); }

static bool is_power(const matcher *m, om_id v, om_id x, int p) { /* v = x^p, as pow or as products */
    const om_node *n = def(m, v, &om_op_pow);
    if (n) return om_ins(m->g, n)[0] == x && number(m, om_ins(m->g, n)[1], p);
    if (!(n = def(m, v, &om_op_mul))) return false;
    om_id a = om_ins(m->g, n)[0], b = om_ins(m->g, n)[1];
    if (p == 2) return a == x && b == x;
    return (a == x && is_power(m, b, x, p - 1)) || (b == x && is_power(m, a, x, p - 1));
}

/* v = 0.5 x, or v = x with the half elsewhere: returns x of (0.5 x) * t or 0.5 * (x * t) */
static bool half_times(const matcher *m, const om_node *n, om_id *x, om_id *t) {
    om_id a, inner = OM_NONE;
    for (int s = 0; s < 2; s++) {
        om_id u = om_ins(m->g, n)[s], w = om_ins(m->g, n)[1 - s];
        if (with_number(m, u, &om_op_mul, 0.5, &a)) return *x = a, *t = w, true;
        if (number(m, w, 0.5)) inner = u;
    }
    const om_node *k = inner == OM_NONE ? NULL : def(m, inner, &om_op_mul);
    if (!k) return false;
    *x = om_ins(m->g, k)[0], *t = om_ins(m->g, k)[1];
    return true;
}

static bool is_gelu(const matcher *m, om_id x, om_id t, bool *tanh_form) {
    om_id u, z, w;
    if (!with_number(m, t, &om_op_add, 1, &u)) return false;
    const om_node *e = def(m, u, &om_op_erf);
    if (e) {
        *tanh_form = false;
        return (with_number(m, om_ins(m->g, e)[0], &om_op_mul, M_SQRT1_2, &z) ||
                with_number(m, om_ins(m->g, e)[0], &om_op_div, M_SQRT2, &z)) &&
               z == x;
    }
    const om_node *h = def(m, u, &om_op_tanh);
    *tanh_form = true;
    if (!h || !with_number(m, om_ins(m->g, h)[0], &om_op_mul, 0.7978845608028654, &z)) return false;
    const om_node *sum = def(m, z, &om_op_add);
    for (int s = 0; sum && s < 2; s++)
        if (om_ins(m->g, sum)[s] == x && with_number(m, om_ins(m->g, sum)[1 - s], &om_op_mul, 0.044715, &w) &&
            is_power(m, w, x, 3))
            return true;
    return false;
}

/* v = x * rsqrt(mean(x^2, last axis) + eps) */
static bool is_rms(const matcher *m, om_id v, om_id *x, double *eps) {
    const om_node *n = def(m, v, &om_op_mul);
    for (int s = 0; n && s < 2; s++) {
        om_id a = om_ins(m->g, n)[s], r = om_ins(m->g, n)[1 - s], sum;
        const om_node *k = def(m, r, &om_op_rsqrt);
        if (k) sum = om_ins(m->g, k)[0];
        else {
            if (!(k = def(m, r, &om_op_reciprocal)) || !(k = def(m, om_ins(m->g, k)[0], &om_op_sqrt))) continue;
            sum = om_ins(m->g, k)[0];
        }
        const om_node *plus = def(m, sum, &om_op_add);
        for (int q = 0; plus && q < 2; q++) {
            const om_node *mean = def(m, om_ins(m->g, plus)[q], &om_op_reduce_mean);
            if (!mean || !om_pass_splat(m->g, om_ins(m->g, plus)[1 - q], eps)) continue;
            const om_attr *axes = om_attr_get(mean->attr, mean->n_attr, "axes");
            int rank = om_ty(m->g, a)->rank;
            if (!axes || axes->n != 1 || axes->dims[0] != rank - 1 || !om_node_int(mean, "keepdims", 1)) continue;
            if (is_power(m, om_ins(m->g, mean)[0], a, 2) && same_dims(m, v, a)) return *x = a, true;
        }
    }
    return false;
}

static om_status patterns_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *n = &f->nodes.v[id];
    if (!om_is(n, mul)) return om_rewrite_copy(r, id);
    int dtype = om_ty(f, n->out)->dtype;
    matcher m = {f, dtype == OM_BF16 || dtype == OM_F16 ? 1e-2 : 1e-6};
    om_id x, t, y = OM_NONE;
    double eps;
    bool tanh_form;
    for (int s = 0; s < 2 && y == OM_NONE; s++) {
        om_id a = om_ins(f, n)[s], b = om_ins(f, n)[1 - s];
        const om_node *sig = def(&m, b, &om_op_sigmoid);
        if (sig && om_ins(f, sig)[0] == a) y = om_b_un(r->to, &om_op_silu, r->map[a]);
        const om_type *w = om_ty(f, b);
        if (y == OM_NONE && w->rank == 1 && is_rms(&m, a, &x, &eps) &&
            w->dim[0] == om_ty(f, x)->dim[om_ty(f, x)->rank - 1] && same_dims(&m, n->out, x) && r->map[b] != OM_NONE)
            y = om_make(r->to, &om_op_rms_norm, OM_IN(r->map[x], r->map[b]),
                        OM_ATTRS(OM_AI("axis", om_ty(f, x)->rank - 1), OM_AF("eps", eps)));
    }
    if (y == OM_NONE && half_times(&m, n, &x, &t)) {
        if (!is_gelu(&m, x, t, &tanh_form)) { /* 0.5 * (x * t): which is which */
            om_id swap = x;
            x = t, t = swap;
        }
        if (is_gelu(&m, x, t, &tanh_form) && same_dims(&m, n->out, x))
            y = om_b_un(r->to, tanh_form ? &om_op_gelu_tanh : &om_op_gelu, r->map[x]);
    }
    if (y == OM_NONE && is_rms(&m, n->out, &x, &eps))
        y = om_make(r->to, &om_op_rms_norm, OM_IN(r->map[x]),
                    OM_ATTRS(OM_AI("axis", om_ty(f, x)->rank - 1), OM_AF("eps", eps)));
    if (r->to->cx->status != OM_OK) return r->to->cx->status;
    if (y == OM_NONE) return om_rewrite_copy(r, id);
    r->map[n->out] = y;
    return OM_OK;
}

static om_status patterns_run(om_ctx *cx, const om_graph *in, om_graph **out) {
    return om_rewrite(cx, in, patterns_emit, NULL, out);
}

const om_pass om_pass_patterns = {"patterns", "gelu, silu and rms_norm spelled out become one operator", patterns_run};
