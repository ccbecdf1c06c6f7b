/* special.c - elementwise functions that are too rare or too dear for a strip instruction: inverse and hyperbolic
 * ones, the logarithm of the gamma function with its derivatives. Two operands have one shape; the capture expands.
 * Gradients are torch's, its values at the edges of the domains included. */
#include "ops/attr.h"

static om_status special_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, om_is_float(x->dtype), "%s: operand of dtype %s; floats are allowed", n->op->name,
             om_dtype_name(x->dtype));
    for (int i = 1; i < n->n_in; i++) {
        const om_type *y = om_ty(g, om_ins(g, n)[i]);
        OM_CHECK(g->cx, y->dtype == x->dtype && y->rank == x->rank, "%s: operands of different types", n->op->name);
        for (int a = 0; a < x->rank; a++)
            OM_CHECK(g->cx, !attr_differs(g, x->dim[a], y->dim[a]), "%s: axis %d has sizes %lld and %lld", n->op->name,
                     a, (long long)x->dim[a], (long long)y->dim[a]);
    }
    *out = *x;
    return OM_OK;
}

#define GRAD(name) static om_status name(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx)
#define X om_ins(b->g, n)[0]
#define Y om_ins(b->g, n)[1]
#define OUT n->out
#define DY dy[0]
#define UN(op, x) om_b_un(b->g, &om_op_##op, x)
#define BIN(op, x, y) om_b_bin(b->g, &om_op_##op, x, y)
#define NUMBER(v) om_scalar(b->g, om_ty(b->g, X)->dtype, v)
#define SQUARE(x) BIN(mul, x, x)
#define MAKE(op, ...) om_make(b->g, &om_op_##op, OM_IN(__VA_ARGS__), NULL, 0)

#define UNARY(name, expr)                                                                           \
    GRAD(name) {                                                                                    \
        (void)want;                                                                                 \
        dx[0] = (expr);                                                                             \
        return b->g->cx->status;                                                                    \
    }
UNARY(acos_grad, UN(neg, BIN(mul, DY, UN(rsqrt, BIN(sub, NUMBER(1), SQUARE(X))))))
UNARY(asin_grad, BIN(mul, DY, UN(rsqrt, BIN(sub, NUMBER(1), SQUARE(X)))))
UNARY(atan_grad, BIN(div, DY, BIN(add, SQUARE(X), NUMBER(1))))
UNARY(acosh_grad, BIN(mul, DY, UN(rsqrt, BIN(sub, SQUARE(X), NUMBER(1)))))
UNARY(atanh_grad, BIN(div, DY, BIN(sub, NUMBER(1), SQUARE(X))))
UNARY(tan_grad, BIN(mul, DY, BIN(add, SQUARE(OUT), NUMBER(1))))
UNARY(sinh_grad, BIN(mul, DY, MAKE(cosh, X)))
UNARY(cosh_grad, BIN(mul, DY, MAKE(sinh, X)))
UNARY(lgamma_grad, BIN(mul, DY, MAKE(digamma, X)))
UNARY(digamma_grad, BIN(mul, DY, MAKE(trigamma, X)))

GRAD(trigamma_grad) {
    (void)dy, (void)want, (void)dx;
    return om_fail(b->g->cx, OM_UNSUPPORTED, "%s has no gradient here: PyTorch computes it", n->op->name);
}

/* (y, x): the angle of the point (x, y) */
GRAD(atan2_grad) {
    const om_id square = BIN(add, SQUARE(X), SQUARE(Y));
    /* PyTorch's: nothing where the squares add to 0; NaN stays NaN */
    const om_id over = MAKE(where, BIN(eq, square, NUMBER(0)), NUMBER(0), UN(reciprocal, square));
    if (want[0]) dx[0] = BIN(mul, DY, BIN(mul, Y, over));
    if (want[1]) dx[1] = BIN(mul, DY, BIN(mul, UN(neg, X), over));
    return b->g->cx->status;
}

/* of x: nothing where x is 0 and log y does not exist, and nothing where nothing arrives */
GRAD(xlogy_grad) {
    if (want[0]) {
        const om_id edge = BIN(and, BIN(eq, X, NUMBER(0)), BIN(le, Y, NUMBER(0)));
        dx[0] = MAKE(where, edge, NUMBER(0), MAKE(xlogy, DY, Y));
    }
    if (want[1]) dx[1] = BIN(div, BIN(mul, DY, X), Y);
    return b->g->cx->status;
}

#define ROW(name, count)                                                                            \
    const om_op om_op_##name = {                                                                    \
        OM_OP(name), .kind = OM_K_ROW, .min_in = count, .max_in = count, .n_out = 1,                \
        .infer = special_infer, .grad = name##_grad,                                                \
    };
ROW(acos, 1)
ROW(asin, 1)
ROW(atan, 1)
ROW(acosh, 1)
ROW(atanh, 1)
ROW(tan, 1)
ROW(sinh, 1)
ROW(cosh, 1)
ROW(lgamma, 1)
ROW(digamma, 1)
ROW(trigamma, 1)
ROW(atan2, 2)
ROW(xlogy, 2)
