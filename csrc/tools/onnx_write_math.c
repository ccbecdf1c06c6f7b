/* onnx_write_math.c - elementwise operators, views, constants and reductions as ONNX. Rules: tools/onnx_write.h. */
#include "tools/onnx_write.h"

#include <stdio.h>

static void rule_shape(om_writer *w, const char *onnx) { /* reshape, expand */
    const om_type *t = out_type(w, 0);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_dims(w, t->dim, t->rank));
    if (!strcmp(onnx, "Reshape")) om_write_int(w, "allowzero", 1);
}
static void rule_permute(om_writer *w, const char *onnx) {
    int64_t p[OM_RANK];
    int n = om_write_known(w, "perm", p, OM_RANK);
    om_write_first(w, onnx);
    om_write_ints(w, "perm", p, n);
}
static void rule_slice(om_writer *w, const char *onnx) {
    int64_t axis = om_node_int(w->n, "axis", 0), step = om_node_int(w->n, "step", 1);
    om_dim start = attr_dim(w->n, "start", 0), end = attr_dim(w->n, "end", in_type(w, 0)->dim[axis]);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_dim(w, start), om_write_dim(w, end),
         om_write_int_list(w, &axis, 1), om_write_int_list(w, &step, 1));
}
static void rule_flip(om_writer *w, const char *onnx) {
    int64_t axes[OM_RANK], s[OM_RANK], e[OM_RANK];
    int n = om_write_known(w, "axes", axes, OM_RANK);
    for (int i = 0; i < n; i++) s[i] = -1, e[i] = INT64_MIN + 1;
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_int_list(w, s, n), om_write_int_list(w, e, n),
         om_write_int_list(w, axes, n), om_write_int_list(w, s, n));
}
static void rule_pad(om_writer *w, const char *onnx) {
    om_dim pads[2 * OM_RANK] = {0};
    int rank = in_type(w, 0)->rank;
    const om_attr *lo = in_attr(w, "lo"), *hi = in_attr(w, "hi");
    for (int i = 0; i < rank; i++) {
        if (lo && i < (int)lo->n) pads[i] = lo->dims[i];
        if (hi && i < (int)hi->n) pads[rank + i] = hi->dims[i];
    }
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_dims(w, pads, 2 * rank),
         om_write_like(w, om_node_float(w->n, "value", 0)));
}
static void rule_trilu(om_writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_int_scalar(w, om_node_int(w->n, "k", 0)));
    om_write_int(w, "upper", om_node_int(w->n, "upper", 0));
}
static void rule_cast(om_writer *w, const char *onnx) {
    om_write_first(w, onnx);
    om_write_int(w, "to", om_dtype_onnx(out_type(w, 0)->dtype));
}
static const char *write_size_scalar(om_writer *w, om_dim d) { return EMIT(w, "Squeeze", NULL, om_write_dim(w, d)); }

/* start + step * Range(n); everything in int64 unless an attribute is a float */
static void rule_iota(om_writer *w, const char *onnx) {
    const om_attr *start = in_attr(w, "start"), *step = in_attr(w, "step");
    const om_type *t = out_type(w, 0);
    bool real = (start && start->kind == OM_ATTR_FLOAT) || (step && step->kind == OM_ATTR_FLOAT);
    int work = !real ? OM_I64 : t->dtype == OM_F64 ? OM_F64 : OM_F32;
    const char *r = EMIT(w, onnx, NULL, om_write_int_scalar(w, 0), write_size_scalar(w, t->dim[0]),
                         om_write_int_scalar(w, 1));
    if (real) r = om_write_cast(w, r, NULL, work);
    double s = om_node_float(w->n, "step", 1);
    if (step && s != 1) r = EMIT(w, "Mul", NULL, r, om_write_scalar(w, work, s));
    if (start && start->kind == OM_ATTR_DIMS) r = EMIT(w, "Add", NULL, r, om_write_dim(w, attr_dim(w->n, "start", 0)));
    else if (start) r = EMIT(w, "Add", NULL, r, om_write_scalar(w, work, om_node_float(w->n, "start", 0)));
    om_write_cast(w, r, out_name(w, 0), t->dtype);
}
static void rule_fill(om_writer *w, const char *onnx) {
    const om_type *t = out_type(w, 0);
    const om_attr *v = in_attr(w, "value");
    if (v && v->kind == OM_ATTR_DIMS) {
        EMIT(w, "Expand", out_name(w, 0),
             om_write_cast(w, write_size_scalar(w, attr_dim(w->n, "value", 0)), NULL, t->dtype),
             om_write_dims(w, t->dim, t->rank));
        return;
    }
    char buf[8] = {0};
    double x = om_node_float(w->n, "value", 0);
    om_write_number(w, t->dtype, x, v && v->kind == OM_ATTR_INT ? v->i : om_is_float(t->dtype) ? 0 : (int64_t)x, buf);
    EMIT(w, onnx, out_name(w, 0), om_write_dims(w, t->dim, t->rank));
    Onnx__AttributeProto *value = om_write_attr(w, "value", ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR);
    value->t = om_write_tensor(w, t->dtype, 1, (int64_t[]){1}, buf);
}

static void rule_expm1(om_writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Exp", NULL, in_name(w, 0)), om_write_like(w, 1));
}
static void rule_log1p(om_writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Add", NULL, in_name(w, 0), om_write_like(w, 1)));
}
static void rule_rsqrt(om_writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Sqrt", NULL, in_name(w, 0)));
}
static void rule_silu(om_writer *w, const char *onnx) { EMIT(w, onnx, out_name(w, 0), in_name(w, 0),
                                                          EMIT(w, "Sigmoid", NULL, in_name(w, 0))); }
static void rule_gelu(om_writer *w, const char *onnx) {
    om_write_first(w, onnx);
    om_write_text(w, "approximate", w->n->op == &om_op_gelu_tanh ? "tanh" : "none");
}
static void rule_trunc(om_writer *w, const char *onnx) {
    const char *x = in_name(w, 0);
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Less", NULL, x, om_write_like(w, 0)), EMIT(w, "Ceil", NULL, x),
         EMIT(w, "Floor", NULL, x));
}
static void rule_floor_div(om_writer *w, const char *onnx) {
    const char *a = in_name(w, 0), *b = in_name(w, 1);
    if (om_is_float(in_type(w, 0)->dtype)) EMIT(w, "Floor", out_name(w, 0), EMIT(w, onnx, NULL, a, b));
    else EMIT(w, onnx, out_name(w, 0), EMIT(w, "Sub", NULL, a, EMIT(w, "Mod", NULL, a, b)), b);
}
static void rule_mod(om_writer *w, const char *onnx) {
    const char *a = in_name(w, 0), *b = in_name(w, 1);
    if (!om_is_float(in_type(w, 0)->dtype)) EMIT(w, onnx, out_name(w, 0), a, b);
    else EMIT(w, "Sub", out_name(w, 0), a, EMIT(w, "Mul", NULL, b, EMIT(w, "Floor", NULL, EMIT(w, "Div", NULL, a, b))));
}
static void rule_fmod(om_writer *w, const char *onnx) {
    om_write_same(w, onnx);
    om_write_int(w, "fmod", 1);
}
static void rule_ne(om_writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Equal", NULL, in_name(w, 0), in_name(w, 1)));
}
static void rule_logic(om_writer *w, const char *onnx) { /* bool: And; integers: BitwiseAnd */
    char name[32];
    snprintf(name, sizeof name, "%s%s", in_type(w, 0)->dtype == OM_BOOL ? "" : "Bitwise", onnx);
    om_write_same(w, name);
}

static void rule_reduce(om_writer *w, const char *onnx) {
    const om_attr *a = in_attr(w, "axes");
    int rank = in_type(w, 0)->rank, n = 0;
    int64_t axes[OM_RANK];
    uint32_t mask = a && a->kind == OM_ATTR_DIMS ? 0 : (1u << rank) - 1; /* no list: all axes */
    for (uint32_t i = 0; a && a->kind == OM_ATTR_DIMS && i < a->n; i++) mask |= 1u << a->dims[i];
    for (int i = 0; i < rank; i++)
        if (mask >> i & 1) axes[n++] = i;
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_int_list(w, axes, n));
    om_write_int(w, "keepdims", om_node_int(w->n, "keepdims", 0) != 0);
    om_write_int(w, "noop_with_empty_axes", 1);
}
static void rule_arg(om_writer *w, const char *onnx) {
    om_write_first(w, onnx);
    om_write_int(w, "axis", om_node_int(w->n, "axis", 0));
    om_write_int(w, "keepdims", om_node_int(w->n, "keepdims", 0));
}
static void rule_topk(om_writer *w, const char *onnx) {
    const int axis = (int)om_node_int(w->n, "axis", 0);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_dim(w, out_type(w, 0)->dim[axis]));
    om_write_output(w, out_name(w, 1));
    om_write_int(w, "axis", axis);
    om_write_int(w, "largest", om_node_int(w->n, "largest", 1));
}
static void rule_cumsum(om_writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_int_scalar(w, om_node_int(w->n, "axis", 0)));
    om_write_int(w, "exclusive", om_node_int(w->n, "exclusive", 0));
    om_write_int(w, "reverse", om_node_int(w->n, "reverse", 0));
}

/* What is not simply the ONNX operator that a row of pointwise.def names. */
const om_write_row om_write_rows_math[] = {
    {&om_op_reshape, "Reshape", rule_shape},
    {&om_op_expand, "Expand", rule_shape},
    {&om_op_permute, "Transpose", rule_permute},
    {&om_op_slice, "Slice", rule_slice},
    {&om_op_flip, "Slice", rule_flip},
    {&om_op_stop_grad, "Identity", om_write_first},
    {&om_op_straight_through, "Identity", om_write_first},
    {&om_op_zero_grad, "Identity", om_write_first},
    {&om_op_copy, "Identity", om_write_first},
    {&om_op_dropout, "Identity", om_write_first},
    {&om_op_concat, "Concat", om_write_axis},
    {&om_op_pad, "Pad", rule_pad},
    {&om_op_trilu, "Trilu", rule_trilu},
    {&om_op_iota, "Range", rule_iota},
    {&om_op_fill, "ConstantOfShape", rule_fill},
    {&om_op_cast, "Cast", rule_cast},
    {&om_op_not, "Not", rule_logic},
    {&om_op_expm1, "Sub", rule_expm1},
    {&om_op_log1p, "Log", rule_log1p},
    {&om_op_rsqrt, "Reciprocal", rule_rsqrt},
    {&om_op_silu, "Mul", rule_silu},
    {&om_op_gelu, "Gelu", rule_gelu},
    {&om_op_gelu_tanh, "Gelu", rule_gelu},
    {&om_op_trunc, "Where", rule_trunc},
    {&om_op_floor_div, "Div", rule_floor_div},
    {&om_op_mod, "Mod", rule_mod},
    {&om_op_fmod, "Mod", rule_fmod},
    {&om_op_ne, "Not", rule_ne},
    {&om_op_and, "And", rule_logic},
    {&om_op_or, "Or", rule_logic},
    {&om_op_xor, "Xor", rule_logic},
    {&om_op_where, "Where", om_write_same},
    {&om_op_reduce_sum, "ReduceSum", rule_reduce},
    {&om_op_reduce_mean, "ReduceMean", rule_reduce},
    {&om_op_reduce_max, "ReduceMax", rule_reduce},
    {&om_op_reduce_min, "ReduceMin", rule_reduce},
    {&om_op_reduce_prod, "ReduceProd", rule_reduce},
    {&om_op_argmax, "ArgMax", rule_arg},
    {&om_op_argmin, "ArgMin", rule_arg},
    {&om_op_cumsum, "CumSum", rule_cumsum},
    {&om_op_topk, "TopK", rule_topk},
    {&om_op_softmax, "Softmax", om_write_axis},
    {&om_op_log_softmax, "LogSoftmax", om_write_axis},
    {0},
};
