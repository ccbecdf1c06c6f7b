/* pointwise.c - every elementwise operator: types and gradients, generated from pointwise.def, `fused` and
 * `cast_all`.
 *
 * A plain node is a strip program of one statement (strip.h); `fused` carries its program as text. Types: the
 * operands share a dtype, comparisons give bool, shapes broadcast as in numpy. Gradients are built from the same
 * operators, read as little as they can (tanh reads its result, gelu its operand), follow torch's conventions where a
 * derivative does not exist, and undo broadcasting by om_b_sum_to. clamp is maximum and minimum here: at a tie the
 * gradient is shared, where torch's clamp passes all of it; an importer that wants torch's writes where(x < lo, lo, x).
 */
#include "ops/strip.h"
#include "graph/facts.h"

#include <math.h>

/* --- gradients ------------------------------------------------------------------------------------------- */

#define GRAD(name) static om_status name(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx)
#define IN(i) om_ins(b->g, n)[i]
#define Y n->out
#define DY dy[0]
#define UN(op, x) om_b_un(b->g, &om_op_##op, x)
#define BIN(op, x, y) om_b_bin(b->g, &om_op_##op, x, y)
#define NUMBER(like, v) om_scalar(b->g, om_ty(b->g, like)->dtype, v)
#define SCALE(x, s) om_b_scale(b->g, x, s)
#define WHERE(c, x, y) om_make(b->g, &om_op_where, OM_IN(c, x, y), NULL, 0)
#define DONE return b->g->cx->status

/* d, of the result's shape, for operand i, which may have been broadcast */
static om_id unbroadcast(om_builder *b, const om_node *n, int i, om_id d) {
    return d == OM_NONE ? OM_NONE : om_b_sum_to(b->g, d, om_ty(b->g, IN(i)));
}

#define UNARY(name, expr)                                                                           \
    GRAD(name) {                                                                                    \
        (void)want, (void)n;                                                                        \
        dx[0] = (expr);                                                                             \
        DONE;                                                                                       \
    }
UNARY(neg_grad, UN(neg, DY))
UNARY(abs_grad, BIN(mul, DY, UN(sign, IN(0))))
UNARY(exp_grad, BIN(mul, DY, Y))
UNARY(expm1_grad, BIN(mul, DY, UN(exp, IN(0)))) /* y + 1 would be 0 long before e^x is */
UNARY(log_grad, BIN(div, DY, IN(0)))
UNARY(log1p_grad, BIN(div, DY, BIN(add, IN(0), NUMBER(Y, 1))))
UNARY(sqrt_grad, BIN(div, DY, SCALE(Y, 2)))
UNARY(rsqrt_grad, BIN(mul, SCALE(DY, -0.5), BIN(mul, Y, BIN(mul, Y, Y))))
UNARY(reciprocal_grad, UN(neg, BIN(mul, DY, BIN(mul, Y, Y))))
UNARY(tanh_grad_, BIN(tanh_grad, DY, Y))
UNARY(sigmoid_grad_, BIN(sigmoid_grad, DY, Y))
UNARY(erf_grad, BIN(mul, SCALE(DY, 1.12837916709551257390), UN(exp, UN(neg, BIN(mul, IN(0), IN(0))))))
UNARY(sin_grad, BIN(mul, DY, UN(cos, IN(0))))
UNARY(cos_grad, UN(neg, BIN(mul, DY, UN(sin, IN(0)))))
UNARY(relu_grad, WHERE(BIN(le, Y, NUMBER(Y, 0)), NUMBER(Y, 0), DY))
UNARY(silu_grad_, BIN(silu_grad, DY, IN(0)))
UNARY(gelu_grad_, BIN(gelu_grad, DY, IN(0)))
UNARY(gelu_tanh_grad_, BIN(gelu_tanh_grad, DY, IN(0)))
UNARY(softplus_grad, WHERE(BIN(gt, IN(0), NUMBER(Y, 20)), DY, BIN(mul, DY, UN(sigmoid, IN(0)))))
UNARY(cast_grad, om_is_float(om_ty(b->g, Y)->dtype) ? om_b_cast(b->g, DY, om_ty(b->g, IN(0))->dtype) : OM_NONE)
UNARY(asinh_grad, BIN(div, DY, UN(sqrt, BIN(add, BIN(mul, IN(0), IN(0)), NUMBER(Y, 1)))))

GRAD(second_order) {
    (void)dy, (void)want, (void)dx;
    return om_fail(b->g->cx, OM_UNSUPPORTED,
                   "%s has no gradient of its own: second derivatives run in PyTorch (create_graph=True)", n->op->name);
}

GRAD(flat_grad) { /* steps: zeros, as PyTorch passes them on */
    (void)dy, (void)want;
    dx[0] = om_b_zeros_like(b->g, IN(0));
    DONE;
}

GRAD(undefined) {
    (void)dy, (void)want, (void)dx;
    return om_fail(b->g->cx, OM_UNSUPPORTED, "%s has no derivative in PyTorch, which raises in backward", n->op->name);
}

GRAD(dropout_grad) {
    (void)want;
    dx[0] = om_make(b->g, &om_op_dropout, OM_IN(DY), OM_ATTRS(OM_AF("p", om_node_float(n, "p", 0.5))));
    om_last(b->g)->rng = n->rng; /* the same mask */
    DONE;
}

GRAD(add_grad) {
    for (int i = 0; i < 2; i++)
        if (want[i]) dx[i] = unbroadcast(b, n, i, DY);
    DONE;
}

GRAD(sub_grad) {
    if (want[0]) dx[0] = unbroadcast(b, n, 0, DY);
    if (want[1]) dx[1] = UN(neg, unbroadcast(b, n, 1, DY));
    DONE;
}

GRAD(mul_grad) {
    for (int i = 0; i < 2; i++)
        if (want[i]) dx[i] = unbroadcast(b, n, i, BIN(mul, DY, IN(1 - i)));
    DONE;
}

GRAD(div_grad) {
    if (want[0]) dx[0] = unbroadcast(b, n, 0, BIN(div, DY, IN(1)));
    if (want[1]) dx[1] = unbroadcast(b, n, 1, UN(neg, BIN(mul, DY, BIN(div, Y, IN(1)))));
    DONE;
}

GRAD(pow_grad) { /* x = 0 and y = 0 as torch: 0 */
    const om_id x = IN(0), y = IN(1), zero = NUMBER(Y, 0);
    double c;
    const bool known = om_number_of(b->g, y, &c);
    if (want[0] && known && c == 0) {
        dx[0] = om_b_zeros_like(b->g, x);
    } else if (want[0] && known) {
        dx[0] = unbroadcast(b, n, 0, BIN(mul, DY, SCALE(c == 2 ? x : BIN(pow, x, NUMBER(Y, c - 1)), c)));
    } else if (want[0]) {
        const om_id d = BIN(mul, DY, BIN(mul, y, BIN(pow, x, BIN(sub, y, NUMBER(Y, 1)))));
        dx[0] = unbroadcast(b, n, 0, WHERE(BIN(eq, y, zero), zero, d));
    }
    if (want[1]) {
        const om_id flat = BIN(and, BIN(eq, x, zero), BIN(ge, y, zero));
        dx[1] = unbroadcast(b, n, 1, WHERE(flat, zero, BIN(mul, DY, BIN(mul, Y, UN(log, x)))));
    }
    DONE;
}

/* torch: half of the gradient at ties, all of it to a NaN */
static om_status extremum_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx,
                               const om_op *loses) {
    for (int i = 0; i < 2; i++) {
        if (!want[i]) continue;
        const om_id lost = om_b_bin(b->g, loses, IN(i), IN(1 - i));
        const om_id share = WHERE(BIN(eq, IN(0), IN(1)), SCALE(DY, 0.5), DY);
        dx[i] = unbroadcast(b, n, i, WHERE(lost, NUMBER(Y, 0), share));
    }
    DONE;
}
GRAD(maximum_grad) { return extremum_grad(b, n, dy, want, dx, &om_op_lt); }
GRAD(minimum_grad) { return extremum_grad(b, n, dy, want, dx, &om_op_gt); }

GRAD(mod_grad) { /* x - y * floor(x / y), the quotient taken as constant */
    if (want[0]) dx[0] = unbroadcast(b, n, 0, DY);
    if (want[1]) dx[1] = unbroadcast(b, n, 1, UN(neg, BIN(mul, DY, BIN(floor_div, IN(0), IN(1)))));
    DONE;
}
GRAD(fmod_grad) {
    if (want[0]) dx[0] = unbroadcast(b, n, 0, DY);
    if (want[1]) dx[1] = unbroadcast(b, n, 1, UN(neg, BIN(mul, DY, UN(trunc, BIN(div, IN(0), IN(1))))));
    DONE;
}

GRAD(where_grad) {
    const om_id zero = NUMBER(Y, 0);
    if (want[1]) dx[1] = unbroadcast(b, n, 1, WHERE(IN(0), DY, zero));
    if (want[2]) dx[2] = unbroadcast(b, n, 2, WHERE(IN(0), zero, DY));
    DONE;
}

GRAD(tanh_grad_grad) {
    if (want[0]) dx[0] = unbroadcast(b, n, 0, BIN(tanh_grad, DY, IN(1)));
    if (want[1]) dx[1] = unbroadcast(b, n, 1, SCALE(BIN(mul, BIN(mul, DY, IN(0)), IN(1)), -2));
    DONE;
}
GRAD(sigmoid_grad_grad) {
    if (want[0]) dx[0] = unbroadcast(b, n, 0, BIN(sigmoid_grad, DY, IN(1)));
    if (want[1]) dx[1] = unbroadcast(b, n, 1, BIN(mul, BIN(mul, DY, IN(0)), BIN(sub, NUMBER(Y, 1), SCALE(IN(1), 2))));
    DONE;
}

/* --- types ------------------------------------------------------------------------------------------------- */

/* numpy broadcasting of all operands. Sizes known only at run time are taken as equal when both could be; the run
 * checks. */
static om_status broadcast(om_graph *g, const om_node *n, om_type *out) {
    out->rank = 0;
    for (int i = 0; i < n->n_in; i++) {
        const om_type *t = om_ty(g, om_ins(g, n)[i]);
        if (t->rank > out->rank) {
            memmove(out->dim + (t->rank - out->rank), out->dim, out->rank * sizeof *out->dim);
            for (int k = 0; k < t->rank - out->rank; k++) out->dim[k] = 1;
            out->rank = t->rank;
        }
        for (int k = 0; k < t->rank; k++) {
            om_dim *o = &out->dim[out->rank - t->rank + k], d = t->dim[k];
            int64_t have, given;
            const bool known = om_dim_const(g, d, &given), was = om_dim_const(g, *o, &have);
            if (d == *o || (known && given == 1)) continue;
            if (known && was && have != 1) {
                return om_fail(g->cx, OM_INVALID,
                               "%s: operand %d has %lld elements on axis %d from the end, another has %lld; sizes must "
                               "be equal or 1",
                               n->op->name, i, (long long)given, t->rank - k, (long long)have);
            }
            if ((was && have == 1) || (known && !was)) *o = d;
        }
    }
    return OM_OK;
}

static om_status pointwise_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_pw_row *row = n->op->pw;
    uint8_t dtype[OM_STRIP_IN], vtype[OM_STRIP_VALUES];
    om_strip_text t;
    if (n->n_in > OM_STRIP_IN)
        return om_fail(g->cx, OM_UNSUPPORTED, "%s: %d operands; at most %d", n->op->name, n->n_in, OM_STRIP_IN);
    for (int i = 0; i < n->n_in; i++) {
        OM_CHECK(g->cx, om_ins(g, n)[i] != OM_NONE, "%s: operand %d is missing", n->op->name, i);
        dtype[i] = om_ty(g, om_ins(g, n)[i])->dtype;
    }
    int result = OM_NODTYPE;
    if (row) {
        result = row->rule == OM_PW_CMP || row->rule == OM_PW_PRED ? OM_BOOL : row->rule == OM_PW_SEL ? dtype[1]
               : row->rule == OM_PW_CAST ? (int)om_node_int(n, "to", OM_NODTYPE) : dtype[0];
        OM_CHECK(g->cx, om_is_float(result) || om_is_int(result),
                 "%s: no result of dtype number %d; attribute `to` names a number type", n->op->name, result);
        const double p = row->op == OM_S_dropout ? om_node_float(n, "p", 0.5) : 0;
        OM_CHECK(g->cx, p >= 0 && p <= 1, "dropout: p = %g; it is a probability, 0 to 1", p);
    }
    OM_TRY(om_strip_of_node(g->cx, n, n->attr, result, &t));
    OM_TRY(om_strip_types(g->cx, &t, dtype, vtype));
    OM_TRY(broadcast(g, n, &out[0]));
    if (!row)
        OM_CHECK(g->cx, t.n_out == n->n_out, "fused: the program has %d outputs, attribute out_dtype %d", t.n_out,
                 n->n_out);
    for (int k = 0; k < t.n_out; k++) {
        out[k] = out[0];
        out[k].dtype = vtype[t.out[k]];
    }
    if (!row) {
        const om_attr *dt = om_attr_get(n->attr, n->n_attr, "out_dtype");
        for (int k = 0; k < t.n_out; k++)
            OM_CHECK(g->cx, dt->dims[k] == out[k].dtype, "fused: output %d is %s, attribute out_dtype says %s", k,
                     om_dtype_name(out[k].dtype), om_dtype_name((int)dt->dims[k]));
    }
    return OM_OK;
}

/* --- the operators ------------------------------------------------------------------------------------------- */

#define PW(nm, arity, rule, fx, ix, gradient, ...)                        \
    const om_op om_op_##nm = {                                            \
        OM_OP(nm),                                                        \
        .kind = OM_S_##nm == OM_S_dropout ? OM_K_RANDOM : OM_K_POINTWISE, \
        .min_in = arity,                                                  \
        .max_in = arity,                                                  \
        .n_out = 1,                                                       \
        .random = OM_S_##nm == OM_S_dropout,                              \
        .infer = pointwise_infer,                                         \
        .grad = gradient,                                                 \
        .pw = &om_pw_rows[OM_S_##nm],                                     \
    };
#include "graph/pointwise.def"
#undef PW

const om_op om_op_fused = {
    OM_OP(fused),
    .kind = OM_K_POINTWISE,
    .min_in = 1,
    .max_in = OM_STRIP_IN,
    .n_out = -1,
    .infer = pointwise_infer,
    .grad = second_order,
};

/* Operands of any sizes: nothing is broadcast. */
static om_status cast_all_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_attr *dt = om_attr_get(n->attr, n->n_attr, "out_dtype");
    OM_CHECK(g->cx, dt && dt->kind == OM_ATTR_DIMS && dt->n == n->n_in,
             "cast_all: attribute out_dtype lists %u dtypes for %d operands", dt ? dt->n : 0, n->n_in);
    for (int i = 0; i < n->n_in; i++) {
        const om_id x = om_ins(g, n)[i];
        OM_CHECK(g->cx, x != OM_NONE, "cast_all: operand %d is left out", i);
        const int from = om_ty(g, x)->dtype, to = (int)dt->dims[i];
        OM_CHECK(g->cx, om_is_float(from) && dt->dims[i] == to && om_is_float(to),
                 "cast_all: operand %d from %s to dtype number %d; floats become floats", i, om_dtype_name(from), to);
        out[i] = *om_ty(g, x);
        out[i].dtype = (uint8_t)to;
    }
    return OM_OK;
}

const om_op om_op_cast_all = {
    OM_OP(cast_all),
    .kind = OM_K_GATHER,
    .min_in = 1,
    .max_in = OM_MAX_OUT,
    .n_out = -1,
    .infer = cast_all_infer,
    .grad = second_order,
};
