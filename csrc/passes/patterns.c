/* patterns.c - composites that models spell out become the one operator that has a kernel and a lean gradient: gelu in
 * both forms (GPT-2's gelu_new, T5's gated activation), silu, rms_norm (Llama, T5). One row each: the operator, and
 * the formula it stands for.
 *
 * A formula is written as in the text dump and read while it is matched, from its last operation up through
 * definitions:
 *   op(a, b)    a node of that operator; operands of add and mul match in either order
 *   0.5         a constant, all of it this number as its dtype has it (see number)
 *   x           any value, the same wherever the name stands, or a copy of it in a wider type. The first x is where
 *               the text has it first, so x stands before what is made of it
 *   w           a vector as long as x's last axis
 *   e           a constant, all of it one number
 *   square(x), cube(x)     as pow or as products
 *   mean(a)     over the last axis, which stays with size 1
 * The result has x's type, and operator(x), operator(x, w) takes its place, with attributes axis (the last) and eps = e
 * where the formula has an e. Intermediate values that somebody else reads stay: only the result is replaced.
 *
 * And a convolution that is a product becomes one (window_is_image).
 */
#include "graph/facts.h"
#include "graph/number.h"
#include "passes/passes.h"

#include <ctype.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>

#define GELU_ROWS(op, t)                                                             \
    {&om_op_##op, "mul(mul(x, 0.5), " t ")"}, {&om_op_##op, "mul(x, mul(" t ", 0.5))"}, \
        {&om_op_##op, "mul(mul(x, " t "), 0.5)"}
#define RMS_ROWS(n) {&om_op_rms_norm, "mul(" n ", w)"}, {&om_op_rms_norm, n}

static const struct pattern { const om_op *op; const char *formula; } patterns[] = {
    {&om_op_silu, "mul(x, sigmoid(x))"},
    GELU_ROWS(gelu_tanh, "add(tanh(mul(add(x, mul(cube(x), 0.044715)), 0.7978845608028654)), 1)"),
    GELU_ROWS(gelu, "add(erf(mul(x, 0.7071067811865476)), 1)"),
    GELU_ROWS(gelu, "add(erf(div(x, 1.4142135623730951)), 1)"),
    RMS_ROWS("mul(x, rsqrt(add(mean(square(x)), e)))"),
    RMS_ROWS("mul(x, reciprocal(sqrt(add(mean(square(x)), e))))"),
};

typedef struct matched { om_id x, w; double e; bool has_e; } matched;
typedef struct matcher { const om_graph *g; matched found; } matcher;

/* What v is a copy of in a wider type, or v: autocast computes parts of a formula in f32, of x in half precision. */
static om_id narrow(const om_graph *g, om_id v) {
    const om_node *n = om_maker(g, v);
    if (!n || !om_is(n, cast) || om_ty(g, v)->dtype != OM_F32) return v;
    const om_id x = om_ins(g, n)[0];
    return om_is_half(om_ty(g, x)->dtype) ? x : v;
}
static bool same(const matcher *m, om_id a, om_id b) { return a == b || narrow(m->g, a) == narrow(m->g, b); }

/* Halves and whole numbers are meant exactly, exponents among them. Others may be the last bit or two off: spelled with
 * fewer digits (0.79788456), or computed (sqrt(2 / pi)). */
static bool number(const matcher *m, om_id v, double want) {
    double x;
    if (!om_number_of(m->g, v, &x)) return false;
    if (want * 2 == floor(want * 2)) return x == want;
    switch (om_ty(m->g, v)->dtype) {
    case OM_BF16:
    case OM_F16: return x == om_round_to(om_ty(m->g, v)->dtype, want);
    case OM_F32: return fabs(x - want) <= (double)FLT_EPSILON * fabs(want);
    default: return fabs(x - want) <= 2 * DBL_EPSILON * fabs(want);
    }
}

static bool is_power(const matcher *m, om_id v, om_id x, int p) {
    const om_node *n = om_maker(m->g, narrow(m->g, v));
    if (!n || x == OM_NONE || (!om_is(n, pow) && !om_is(n, mul))) return false;
    const om_id a = om_ins(m->g, n)[0], b = om_ins(m->g, n)[1];
    if (om_is(n, pow)) return same(m, a, x) && number(m, b, p);
    if (p == 2) return same(m, a, x) && same(m, b, x);
    return (same(m, a, x) && is_power(m, b, x, p - 1)) || (same(m, b, x) && is_power(m, a, x, p - 1));
}

static bool is_mean(const matcher *m, const om_node *n) {
    const om_attr *axes = om_attr_get(n->attr, n->n_attr, "axes");
    const int rank = om_ty(m->g, om_ins(m->g, n)[0])->rank;
    return axes && axes->n == 1 && axes->dims[0] == rank - 1 && om_node_int(n, "keepdims", 1);
}

/* Is v what stands under `name`? The first time, it is from now on. */
static bool bind(matcher *m, char name, om_id v) {
    matched *f = &m->found;
    if (name == 'e') return f->has_e = om_number_of(m->g, v, &f->e);
    if (name == 'x') {
        if (f->x == OM_NONE) f->x = v;
        return same(m, f->x, v);
    }
    const om_type *w = om_ty(m->g, v), *x = om_ty(m->g, f->x);
    f->w = v;
    return w->rank == 1 && x->rank && w->dim[0] == x->dim[x->rank - 1];
}

/* Does v match the formula at p? Behind it, or NULL; what a failed attempt has bound is forgotten. */
static const char *match(matcher *m, const char *p, om_id v) {
    if (isdigit((unsigned char)*p)) {
        char *end;
        return number(m, v, om_number_read(p, &end)) ? p + strspn(p, "0123456789.") : NULL;
    }
    if (strchr(",)", p[1])) return bind(m, *p, v) ? p + 1 : NULL; /* a name, or the last letter of the text */
    const size_t len = strcspn(p, "(");
    const char *arg = p + len + 1;
    const int power = !strncmp(p, "square", len) ? 2 : !strncmp(p, "cube", len) ? 3 : 0;
    if (power) return is_power(m, v, m->found.x, power) ? arg + strlen("x)") : NULL;
    const om_node *n = om_maker(m->g, narrow(m->g, v));
    if (!n) return NULL;
    const char *name = om_is(n, reduce_mean) && is_mean(m, n) ? "mean" : n->op->name;
    if (strncmp(name, p, len) != 0 || name[len]) return NULL;
    const int orders = om_is(n, add) || om_is(n, mul) ? 2 : 1;
    const matched before = m->found;
    for (int swap = 0; swap < orders; swap++, m->found = before) {
        const char *q = arg;
        for (int k = 0; q && k < n->op->min_in; k++) {
            q = match(m, q, om_ins(m->g, n)[k ^ swap]);
            if (q) q += *q == ',' ? strlen(", ") : strlen(")");
        }
        if (q) return q;
    }
    return NULL;
}

/* Is the window of a convolution all of its image? (Of 1 x 1 images, too: what squeeze and excitation have.) */
static bool window_is_image(const om_graph *g, const om_node *n) {
    if (!om_is(n, conv) || om_node_int(n, "groups", 1) != 1) return false;
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *w = om_ty(g, om_ins(g, n)[1]);
    const om_attr *pad = om_attr_get(n->attr, n->n_attr, "pad");
    if (pad && pad->kind != OM_ATTR_DIMS) return false;
    for (uint32_t i = 0; pad && i < pad->n; i++)
        if (pad->dims[i] != 0) return false;
    for (int i = 1; i < x->rank; i++) {
        int64_t image, window;
        if (!om_dim_const(g, x->dim[i], &image) || !om_dim_const(g, w->dim[i], &window) || image != window)
            return false;
    }
    return true;
}

/* It is a product, which builds no patches: y (n, o) = x (n, c * taps) w^T. */
static om_status product_emit(om_rewriter *r, const om_node *n) {
    const om_id *in = om_ins(r->from, n);
    const bool bias = n->n_in > 2 && in[2] != OM_NONE;
    const om_type x = *om_ty(r->from, in[0]), w = *om_ty(r->from, in[1]), y = *om_ty(r->from, n->out);
    om_dim taps = 1;
    for (int i = 1; i < x.rank; i++) taps *= w.dim[i];
    const om_id rows = om_b_reshape(r->to, r->map[in[0]], (om_dim[]){x.dim[0], taps}, 2),
                filters = om_b_reshape(r->to, r->map[in[1]], (om_dim[]){w.dim[0], taps}, 2),
                operand[3] = {rows, om_b_permute(r->to, filters, (int[]){1, 0}), bias ? r->map[in[2]] : OM_NONE};
    r->map[n->out] = om_b_reshape(r->to, om_make(r->to, &om_op_matmul, operand, bias ? 3 : 2, NULL, 0), y.dim, y.rank);
    return r->to->cx->status;
}

static om_status patterns_emit(om_rewriter *r, om_id id) {
    const om_graph *f = r->from;
    const om_node *n = &f->nodes.v[id];
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns && n->n_out == 1; i++) {
        matcher m = {f, {.x = OM_NONE, .w = OM_NONE}};
        if (!match(&m, patterns[i].formula, n->out)) continue;
        om_type x = *om_ty(f, m.found.x);
        if (om_is_half(x.dtype) && om_ty(f, n->out)->dtype == OM_F32) x.dtype = OM_F32;
        if (!om_pass_same_type(om_ty(f, n->out), &x)) continue;
        const om_id in[2] = {om_b_cast(r->to, r->map[m.found.x], x.dtype),
                             m.found.w == OM_NONE ? OM_NONE : r->map[m.found.w]};
        const om_attr attr[2] = {OM_AI("axis", om_ty(f, m.found.x)->rank - 1), OM_AF("eps", m.found.e)};
        r->map[n->out] = om_make(r->to, patterns[i].op, in, m.found.w == OM_NONE ? 1 : 2, attr, m.found.has_e ? 2 : 0);
        return r->to->cx->status;
    }
    return window_is_image(f, n) ? product_emit(r, n) : om_rewrite_copy(r, id);
}

om_status om_pass_run_patterns(om_ctx *cx, const om_graph *in, om_graph **out) {
    return om_rewrite(cx, in, patterns_emit, NULL, out);
}
