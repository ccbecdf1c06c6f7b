/* elementwise.c - elementwise operators of ONNX: those that are a row of pointwise.def, and those with rules of their
 * own. Form of a rule: onnx/map.h. */
#include "onnx/map.h"

static om_status map_unary(om_onnx *o) {
    SET(0, om_b_un(o->g, o->row->op, IN(0)));
    return o->cx->status;
}
static om_status map_binary(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    SET(0, om_b_bin(o->g, o->row->op, a, b));
    return o->cx->status;
}
static om_status map_variadic(om_onnx *o) { /* Max, Min, Sum */
    om_id y = IN(0);
    for (int i = 1; i < o->n_in; i++) y = om_b_bin(o->g, o->row->op, y, IN(i));
    if (o->n_in == 1) om_onnx_alias(o, 0, 0);
    else SET(0, y);
    return o->cx->status;
}
static om_status map_mean(om_onnx *o) {
    om_id y = IN(0);
    for (int i = 1; i < o->n_in; i++) y = MAKE2(add, y, IN(i));
    SET(0, om_b_scale(o->g, y, 1.0 / o->n_in));
    return o->cx->status;
}

static om_status map_identity(om_onnx *o) {
    om_onnx_alias(o, 0, 0);
    return o->cx->status;
}

static om_status map_mod(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    SET(0, INT("fmod", 0) ? MAKE2(fmod, a, b) : MAKE2(mod, a, b));
    return o->cx->status;
}

/* The result has the base's type; an exponent of another type is brought to one both can hold. */
static om_status map_pow(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    int ta = om_map_type_of(o, a).dtype, tb = om_map_type_of(o, b).dtype;
    if (FAILED) return o->cx->status;
    int work = ta == tb || om_is_float(ta) ? ta : om_is_float(tb) ? OM_F64 : ta;
    om_id y = MAKE2(pow, om_b_cast(o->g, a, work), om_b_cast(o->g, b, work));
    SET(0, om_b_cast(o->g, y, ta));
    return o->cx->status;
}

static om_status map_isinf(om_onnx *o) {
    om_id x = IN(0);
    bool pos = INT("detect_positive", 1) != 0, neg = INT("detect_negative", 1) != 0;
    om_id y = MAKE1(isinf, x);
    if (pos != neg) y = MAKE2(and, y, pos ? MAKE2(gt, x, om_map_like(o, x, 0)) : MAKE2(lt, x, om_map_like(o, x, 0)));
    else if (!pos) y = MAKE2(and, y, om_scalar(o->g, OM_BOOL, 0));
    SET(0, y);
    return o->cx->status;
}

static om_status map_gelu(om_onnx *o) {
    const char *how = om_onnx_str(o, "approximate", "none");
    ONNX_CHECK(o, !strcmp(how, "none") || !strcmp(how, "tanh"), "approximate '%.40s'; none and tanh are defined", how);
    om_id x = IN(0);
    SET(0, !strcmp(how, "tanh") ? MAKE1(gelu_tanh, x) : MAKE1(gelu, x));
    return o->cx->status;
}
/* com.microsoft BiasGelu(x, bias), FastGelu(x, bias?): row->op says which gelu */
static om_status map_bias_gelu(om_onnx *o) {
    om_id x = IN(0);
    if (om_onnx_has(o, 1)) x = MAKE2(add, x, IN(1));
    SET(0, om_b_un(o->g, o->row->op, x));
    return o->cx->status;
}

/* Activations with constants are computed in the compute type and rounded once, as PyTorch's kernels do: neither a
 * constant nor what stands in between is rounded to 16 bits. */
static om_id wide_in(om_onnx *o, int *dtype) {
    om_id x = IN(0);
    if (x == OM_NONE) return OM_NONE;
    *dtype = om_ty(o->g, x)->dtype;
    return om_b_cast(o->g, x, om_compute_dtype(*dtype));
}
#define SET_ROUNDED(v) SET(0, om_b_cast(o->g, (v), dtype))

static om_status map_quick_gelu(om_onnx *o) {
    int dtype = OM_NODTYPE;
    om_id x = wide_in(o, &dtype);
    SET_ROUNDED(MAKE2(mul, x, MAKE1(sigmoid, om_b_scale(o->g, x, FLT("alpha", 1.702)))));
    return o->cx->status;
}

static om_status map_leaky_relu(om_onnx *o) {
    om_id x = IN(0);
    SET(0, om_map_where(o, MAKE2(gt, x, om_map_like(o, x, 0)), x, om_b_scale(o->g, x, FLT("alpha", 0.01))));
    return o->cx->status;
}
static om_status map_prelu(om_onnx *o) {
    om_id x = IN(0), slope = IN(1);
    SET(0, om_map_where(o, MAKE2(gt, x, om_map_like(o, x, 0)), x, MAKE2(mul, x, slope)));
    return o->cx->status;
}
/* Elu: x > 0 ? x : alpha * (exp(x) - 1). The argument of expm1 is held at <= 0: where must not meet inf * 0 in the
 * gradient. */
static om_status map_elu(om_onnx *o) {
    int dtype = OM_NODTYPE;
    om_id x = wide_in(o, &dtype), zero = om_map_like(o, x, 0), pos = MAKE2(gt, x, zero),
          low = MAKE1(expm1, om_map_where(o, pos, zero, x));
    SET_ROUNDED(om_map_where(o, pos, x, om_b_scale(o->g, low, FLT("alpha", 1))));
    return o->cx->status;
}
static om_status map_hard_sigmoid(om_onnx *o) { /* HardSwish: x * hard_sigmoid(x) with alpha 1/6 */
    bool swish = !strcmp(o->row->name, "HardSwish");
    int dtype = OM_NODTYPE;
    om_id x = wide_in(o, &dtype);
    om_id y = MAKE2(add, om_b_scale(o->g, x, swish ? 1.0 / 6 : FLT("alpha", 0.2)),
                    om_map_like(o, x, swish ? 0.5 : FLT("beta", 0.5)));
    om_id zero = om_map_like(o, x, 0), one = om_map_like(o, x, 1);
    y = om_map_where(o, MAKE2(lt, y, zero), zero, y);
    y = om_map_where(o, MAKE2(gt, y, one), one, y);
    SET_ROUNDED(swish ? MAKE2(mul, x, y) : y);
    return o->cx->status;
}

/* maximum/minimum would halve the gradient at the bounds; torch.clamp passes all of it. NaN stays NaN. */
static om_status map_clip(om_onnx *o) {
    om_id x = IN(0), lo = IN(1), hi = IN(2);
    if (lo != OM_NONE) x = om_map_where(o, MAKE2(lt, x, lo), lo, x);
    if (hi != OM_NONE) x = om_map_where(o, MAKE2(gt, x, hi), hi, x);
    if (!om_onnx_has(o, 1) && !om_onnx_has(o, 2)) om_onnx_alias(o, 0, 0);
    else SET(0, x);
    return o->cx->status;
}

static om_status map_where_op(om_onnx *o) {
    om_id c = IN(0), x = IN(1), y = IN(2);
    SET(0, om_map_where(o, c, x, y));
    return o->cx->status;
}

static om_status map_cast(om_onnx *o) {
    int64_t to = INT("to", 0);
    int dtype = to > 0 && to < 100 ? (int)om_dtype_from_onnx((int)to) : OM_NODTYPE;
    if (!strcmp(o->row->name, "CastLike")) {
        om_type t;
        dtype = om_onnx_operand_type(o, 1, &t) ? t.dtype : OM_NODTYPE;
    }
    if (dtype == OM_NODTYPE) REFUSE("ONNX element type %lld is not supported", (long long)to);
    om_id x = IN(0);
    if (x != OM_NONE && om_ty(o->g, x)->dtype == dtype) om_onnx_alias(o, 0, 0);
    else SET(0, om_b_cast(o->g, x, dtype));
    return o->cx->status;
}

/* --- the rows ------------------------------------------------------------------------------------------ */

#define S(name) om_onnx_size_##name
#define BINARY(onnx, engine) {"", onnx, 2, 2, 1, map_binary, NULL, &om_op_##engine}
const om_onnx_op om_onnx_ops_elementwise[] = { /* what is more than a row of pointwise.def says */
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
    {"", "Neg", 1, 1, 1, map_unary, S(neg), &om_op_neg},
    {"", "Abs", 1, 1, 1, map_unary, S(abs), &om_op_abs},
    {"", "Not", 1, 1, 1, map_unary, S(not ), &om_op_not},
    {"", "BitwiseNot", 1, 1, 1, map_unary, NULL, &om_op_not},
    {"", "IsInf", 1, 1, 1, map_isinf, NULL, NULL},
    {"", "Gelu", 1, 1, 1, map_gelu, NULL, NULL},
    {"", "LeakyRelu", 1, 1, 1, map_leaky_relu, NULL, NULL},
    {"", "PRelu", 2, 2, 1, map_prelu, NULL, NULL},
    {"", "Elu", 1, 1, 1, map_elu, NULL, NULL},
    {"", "HardSigmoid", 1, 1, 1, map_hard_sigmoid, NULL, NULL},
    {"", "HardSwish", 1, 1, 1, map_hard_sigmoid, NULL, NULL},
    {"", "Clip", 1, 3, 1, map_clip, NULL, NULL},
    {"", "Cast", 1, 1, 1, map_cast, S(cast), NULL},
    {"", "CastLike", 2, 2, 1, map_cast, NULL, NULL},
    {"", "Identity", 1, 1, 1, map_identity, NULL, NULL},
    {"", "Add", 2, 2, 1, map_binary, S(arith), &om_op_add},
    {"", "Sub", 2, 2, 1, map_binary, S(arith), &om_op_sub},
    {"", "Mul", 2, 2, 1, map_binary, S(arith), &om_op_mul},
    {"", "Div", 2, 2, 1, map_binary, S(arith), &om_op_div},
    {"", "Mod", 2, 2, 1, map_mod, S(arith), NULL},
    {"", "Pow", 2, 2, 1, map_pow, NULL, NULL},
    {"", "Max", 1, -1, 1, map_variadic, S(arith), &om_op_maximum},
    {"", "Min", 1, -1, 1, map_variadic, S(arith), &om_op_minimum},
    {"", "Sum", 1, -1, 1, map_variadic, NULL, &om_op_add},
    {"", "Mean", 1, -1, 1, map_mean, NULL, NULL},
    {"", "And", 2, 2, 1, map_binary, S(logic), &om_op_and},
    {"", "Or", 2, 2, 1, map_binary, S(logic), &om_op_or},
    {"", "Xor", 2, 2, 1, map_binary, S(logic), &om_op_xor},
    BINARY("BitwiseAnd", and),
    BINARY("BitwiseOr", or),
    BINARY("BitwiseXor", xor),
    {"", "Equal", 2, 2, 1, map_binary, S(compare), &om_op_eq},
    {"", "Less", 2, 2, 1, map_binary, S(compare), &om_op_lt},
    {"", "LessOrEqual", 2, 2, 1, map_binary, S(compare), &om_op_le},
    {"", "Greater", 2, 2, 1, map_binary, S(compare), &om_op_gt},
    {"", "GreaterOrEqual", 2, 2, 1, map_binary, S(compare), &om_op_ge},
    {"", "Where", 3, 3, 1, map_where_op, S(where), NULL},
    {"com.microsoft", "Gelu", 1, 1, 1, map_bias_gelu, NULL, &om_op_gelu},
    {"com.microsoft", "BiasGelu", 2, 2, 1, map_bias_gelu, NULL, &om_op_gelu},
    {"com.microsoft", "FastGelu", 1, 2, 1, map_bias_gelu, NULL, &om_op_gelu_tanh},
    {"com.microsoft", "QuickGelu", 1, 1, 1, map_quick_gelu, NULL, NULL},
    {"ortmodule", "StopGradient", 1, 1, 1, map_unary, NULL, &om_op_stop_grad},
    {"ortmodule", "Log1p", 1, 1, 1, map_unary, NULL, &om_op_log1p},
    {"ortmodule", "Expm1", 1, 1, 1, map_unary, NULL, &om_op_expm1},
    {"ortmodule", "FloorDiv", 2, 2, 1, map_binary, NULL, &om_op_floor_div},
    {"ortmodule", "Remainder", 2, 2, 1, map_binary, NULL, &om_op_mod},
    {"", "Acos", 1, 1, 1, map_unary, NULL, &om_op_acos},
    {"", "Asin", 1, 1, 1, map_unary, NULL, &om_op_asin},
    {"", "Atan", 1, 1, 1, map_unary, NULL, &om_op_atan},
    {"", "Acosh", 1, 1, 1, map_unary, NULL, &om_op_acosh},
    {"", "Atanh", 1, 1, 1, map_unary, NULL, &om_op_atanh},
    {"", "Tan", 1, 1, 1, map_unary, NULL, &om_op_tan},
    {"", "Sinh", 1, 1, 1, map_unary, NULL, &om_op_sinh},
    {"", "Cosh", 1, 1, 1, map_unary, NULL, &om_op_cosh},
    {"ortmodule", "LogGamma", 1, 1, 1, map_unary, NULL, &om_op_lgamma},
    {"ortmodule", "Digamma", 1, 1, 1, map_unary, NULL, &om_op_digamma},
    {"ortmodule", "Atan2", 2, 2, 1, map_binary, NULL, &om_op_atan2},
    {"ortmodule", "XLogY", 2, 2, 1, map_binary, NULL, &om_op_xlogy},
    {"ortmodule", "StraightThrough", 2, 2, 1, map_binary, NULL, &om_op_straight_through},
    {"ortmodule", "ZeroGradient", 2, 2, 1, map_binary, NULL, &om_op_zero_grad},
    {0},
};

/* Rows of pointwise.def that are one ONNX operator. This table is searched last: a row of another one does more. */
const om_onnx_op om_onnx_ops_pointwise[] = {
#define PW(nm, arity, rule, fx, ix, grad, onnx, aten, doc) \
    {"", onnx, arity, arity, 1, arity == 1 ? map_unary : map_binary, NULL, &om_op_##nm},
#include "graph/pointwise.def"
#undef PW
    {0},
};
