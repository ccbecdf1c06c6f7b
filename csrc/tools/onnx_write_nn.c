/* onnx_write_nn.c - normalisation, products, attention, indices, losses, convolution and pooling as ONNX. Rules:
 * tools/onnx_write.h. */
#include "ops/window.h"
#include "tools/onnx_write.h"

/* ONNX keeps the normalised axes of the statistics with size 1 */
static void write_statistic(om_writer *w, const char *x, int k, int axis, int rank) {
    int64_t axes[OM_RANK];
    for (int i = axis; i < rank; i++) axes[i - axis] = i;
    EMIT(w, "Squeeze", out_name(w, k), x, om_write_int_list(w, axes, rank - axis));
}
static const char *write_ones(om_writer *w, const om_type *t, int axis) {
    return EMIT(w, "Expand", NULL, om_write_scalar(w, t->dtype, 1), om_write_dims(w, t->dim + axis, t->rank - axis));
}
static void rule_layer_norm(om_writer *w, const char *onnx) {
    const om_type *t = in_type(w, 0);
    int axis = (int)om_node_int(w->n, "axis", 0);
    const char *scale = in_given(w, 1) ? in_name(w, 1) : write_ones(w, t, axis);
    const bool as = out_type(w, 0)->dtype != t->dtype; /* by a cast of its own */
    const char *y = EMIT(w, onnx, as ? NULL : out_name(w, 0), in_name(w, 0), scale, in_name(w, 2));
    om_write_int(w, "axis", axis);
    om_write_float(w, "epsilon", om_node_float(w->n, "eps", 1e-5));
    const bool mean = out_used(w, 1), rstd = out_used(w, 2);
    const char *m = mean || rstd ? om_write_output(w, om_write_unique(w, "mean")) : NULL;
    const char *r = rstd ? om_write_output(w, om_write_unique(w, "rstd")) : NULL;
    if (mean) write_statistic(w, m, 1, axis, t->rank);
    if (rstd) write_statistic(w, r, 2, axis, t->rank);
    if (as) om_write_cast(w, y, out_name(w, 0), out_type(w, 0)->dtype);
}
static void rule_rms_norm(om_writer *w, const char *onnx) {
    const om_type *t = in_type(w, 0);
    int axis = (int)om_node_int(w->n, "axis", 0);
    const char *x = in_name(w, 0);
    const bool as = out_type(w, 0)->dtype != t->dtype;
    const char *scale = in_given(w, 1) ? in_name(w, 1) : write_ones(w, t, axis);
    const char *y = EMIT(w, onnx, as ? NULL : out_name(w, 0), x, scale);
    om_write_int(w, "axis", axis);
    om_write_float(w, "epsilon", om_node_float(w->n, "eps", 1e-5));
    if (as) om_write_cast(w, y, out_name(w, 0), out_type(w, 0)->dtype);
    if (!out_used(w, 1)) return;
    int64_t axes[OM_RANK];
    for (int i = axis; i < t->rank; i++) axes[i - axis] = i;
    int work = out_type(w, 1)->dtype;
    const char *wide = work == t->dtype ? x : om_write_cast(w, x, NULL, work);
    const char *ms = EMIT(w, "ReduceMean", NULL, EMIT(w, "Mul", NULL, wide, wide),
                          om_write_int_list(w, axes, t->rank - axis));
    om_write_int(w, "keepdims", 0);
    EMIT(w, "Reciprocal", out_name(w, 1),
         EMIT(w, "Sqrt", NULL, EMIT(w, "Add", NULL, ms, om_write_scalar(w, work, om_node_float(w->n, "eps", 1e-5)))));
}

/* Per-channel vectors as (c, 1, ...). */
static const char *write_channel(om_writer *w, const char *v, int rank) {
    int64_t axes[OM_RANK];
    for (int i = 1; i < rank - 1; i++) axes[i - 1] = i;
    return rank > 2 ? EMIT(w, "Unsqueeze", NULL, v, om_write_int_list(w, axes, rank - 2)) : v;
}
/* What is written out in several nodes needs one type; the engine's operators convert. */
static bool write_mixed(om_writer *w, int first, int last) {
    for (int i = first; i <= last; i++)
        if (in_given(w, i) && in_type(w, i)->dtype != in_type(w, 0)->dtype)
            return om_write_refuse(w, "its operands have several types"), true;
    return false;
}

static void rule_batch_norm(om_writer *w, const char *onnx) {
    (void)onnx;
    const om_type *t = in_type(w, 0);
    if (write_mixed(w, 1, 4)) return;
    bool training = om_node_int(w->n, "training", 0) != 0;
    double eps = om_node_float(w->n, "eps", 1e-5), momentum = om_node_float(w->n, "momentum", 0.1);
    const char *x = in_name(w, 0), *mean = in_name(w, 3), *var = in_name(w, 4);
    if (out_used(w, 3) || out_used(w, 4)) {
        om_write_refuse(w, "its saved statistics are read");
        return;
    }
    if (t->dtype != OM_F32 && t->dtype != OM_F64) {
        om_write_refuse(w, "only float32 and float64");
        return;
    }
    int64_t axes[OM_RANK];
    int n = 0;
    for (int i = 0; i < t->rank; i++)
        if (i != 1) axes[n++] = i;
    if (training) {
        const char *list = om_write_int_list(w, axes, n);
        mean = EMIT(w, "ReduceMean", NULL, x, list);
        om_write_int(w, "keepdims", 0);
        const char *d = EMIT(w, "Sub", NULL, x, write_channel(w, mean, t->rank));
        var = EMIT(w, "ReduceMean", NULL, EMIT(w, "Mul", NULL, d, d), list);
        om_write_int(w, "keepdims", 0);
    }
    const char *d = EMIT(w, "Sub", NULL, x, write_channel(w, mean, t->rank));
    const char *sd = EMIT(w, "Sqrt", NULL, EMIT(w, "Add", NULL, var, om_write_scalar(w, t->dtype, eps)));
    const char *y = EMIT(w, "Div", in_given(w, 1) || in_given(w, 2) ? NULL : out_name(w, 0), d,
                         write_channel(w, sd, t->rank));
    if (in_given(w, 1))
        y = EMIT(w, "Mul", in_given(w, 2) ? NULL : out_name(w, 0), y, write_channel(w, in_name(w, 1), t->rank));
    if (in_given(w, 2)) EMIT(w, "Add", out_name(w, 0), y, write_channel(w, in_name(w, 2), t->rank));
    if (out_used(w, 1) && !training) EMIT(w, "Identity", out_name(w, 1), in_name(w, 3));
    if (out_used(w, 2) && !training) EMIT(w, "Identity", out_name(w, 2), in_name(w, 4));
    if (!training || (!out_used(w, 1) && !out_used(w, 2))) return;
    const char *keep = om_write_scalar(w, t->dtype, 1 - momentum), *take = om_write_scalar(w, t->dtype, momentum);
    if (out_used(w, 1))
        EMIT(w, "Add", out_name(w, 1), EMIT(w, "Mul", NULL, in_name(w, 3), keep), EMIT(w, "Mul", NULL, mean, take));
    if (!out_used(w, 2)) return;
    /* the running variance takes the unbiased one: var * count / (count - 1), count = elements per channel */
    const char *count = om_write_dim(w, t->dim[0]);
    for (int i = 2; i < t->rank; i++) count = EMIT(w, "Mul", NULL, count, om_write_dim(w, t->dim[i]));
    count = om_write_cast(w, count, NULL, t->dtype);
    const char *less = EMIT(w, "Sub", NULL, count, om_write_scalar(w, t->dtype, 1));
    const char *unbiased = EMIT(w, "Mul", NULL, var, EMIT(w, "Div", NULL, count, less));
    EMIT(w, "Add", out_name(w, 2), EMIT(w, "Mul", NULL, in_name(w, 4), keep), EMIT(w, "Mul", NULL, unbiased, take));
}

static void rule_matmul(om_writer *w, const char *onnx) {
    const char *y = EMIT(w, onnx, in_given(w, 2) ? NULL : out_name(w, 0), in_name(w, 0), in_name(w, 1));
    if (in_given(w, 2)) EMIT(w, "Add", out_name(w, 0), y, in_name(w, 2));
}
/* ai.onnx Attention has rank 4: missing leading axes are added and taken away. */
static void rule_attention(om_writer *w, const char *onnx) {
    const char *in[4];
    int lead = 4 - in_type(w, 0)->rank;
    if (out_used(w, 1) || lead < 0) {
        om_write_refuse(w, lead < 0 ? "more than two batch axes" : "its log-sum-exp is read");
        return;
    }
    int64_t axes[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) {
        in[i] = in_name(w, i);
        if (lead && *in[i] && (i < 3 || in_type(w, i)->rank > 2))
            in[i] = EMIT(w, "Unsqueeze", NULL, in[i], om_write_int_list(w, axes, 4 - in_type(w, i)->rank));
    }
    bool turn = om_node_int(w->n, "seq_first", 0);
    const char *y = om_write_node(w, "", onnx, lead || turn ? NULL : out_name(w, 0), in, 4);
    om_write_int(w, "is_causal", om_node_int(w->n, "causal", 0));
    om_write_float(w, "scale", om_node_float(w->n, "scale", 1));
    if (turn) {
        y = EMIT(w, "Transpose", lead ? NULL : out_name(w, 0), y);
        om_write_ints(w, "perm", (int64_t[]){0, 2, 1, 3}, 4);
    }
    if (lead) EMIT(w, "Squeeze", out_name(w, 0), y, om_write_int_list(w, axes, lead));
}
static void rule_scatter(om_writer *w, const char *onnx) {
    om_write_same(w, onnx);
    if (w->n->op == &om_op_scatter_elements) om_write_int(w, "axis", om_node_int(w->n, "axis", 0));
    static const char *const how[] = {"none", "add", "max", "min"};
    om_write_text(w, "reduction", how[om_node_int(w->n, "reduce", 0)]);
}

static void rule_cross_entropy(om_writer *w, const char *onnx) {
    static const char *const how[] = {"none", "mean", "sum"};
    int64_t red = om_node_int(w->n, "reduction", 1), ignore = om_node_int(w->n, "ignore_index", -100);
    double eps = om_node_float(w->n, "label_smoothing", 0);
    const int dtype = out_type(w, 0)->dtype;
    const bool wide = dtype != in_type(w, 0)->dtype;
    const char *x = in_name(w, 0), *labels = in_name(w, 1), *weight = in_name(w, 2);
    if (red < 0 || red > 2 || out_used(w, 1) || out_used(w, 2)) {
        om_write_refuse(w, "its saved statistics are read");
        return;
    }
    if (wide) x = om_write_cast(w, x, NULL, dtype);
    if (eps == 0) {
        EMIT(w, onnx, out_name(w, 0), x, labels, weight);
        om_write_text(w, "reduction", how[red]);
        om_write_int(w, "ignore_index", ignore);
        return;
    }
    if (!wide && write_mixed(w, 2, 2)) return;
    /* (1-e) w[y] (-log p[y]) + e/C sum_c w[c] (-log p[c]), nothing where y is ignored; mean divides by the sum of
     * w[y] */
    const char *logp = EMIT(w, "LogSoftmax", NULL, x);
    om_write_int(w, "axis", 1);
    const char *nll = EMIT(w, "NegativeLogLikelihoodLoss", NULL, logp, labels, weight);
    om_write_text(w, "reduction", "none");
    om_write_int(w, "ignore_index", ignore);
    const char *all = EMIT(w, "Neg", NULL, *weight ? EMIT(w, "Mul", NULL, logp, weight) : logp);
    all = EMIT(w, "ReduceSum", NULL, all, om_write_int_list(w, (int64_t[]){1}, 1));
    om_write_int(w, "keepdims", 0);
    const char *classes = om_write_cast(w, om_write_dim(w, in_type(w, 0)->dim[1]), NULL, dtype);
    const char *lab = in_type(w, 1)->dtype == OM_I64 ? labels : om_write_cast(w, labels, NULL, OM_I64);
    const char *ignored = EMIT(w, "Equal", NULL, lab, om_write_int_scalar(w, ignore));
    const char *zero = om_write_scalar(w, dtype, 0);
    const char *smooth = EMIT(w, "Where", NULL, ignored, zero,
                              EMIT(w, "Div", NULL, EMIT(w, "Mul", NULL, all, om_write_scalar(w, dtype, eps)), classes));
    const char *loss = EMIT(w, "Add", red ? NULL : out_name(w, 0),
                            EMIT(w, "Mul", NULL, nll, om_write_scalar(w, dtype, 1 - eps)), smooth);
    if (red == 0) return;
    loss = EMIT(w, "ReduceSum", red == 2 ? out_name(w, 0) : NULL, loss);
    om_write_int(w, "keepdims", 0);
    if (red == 2) return;
    const char *count = om_write_scalar(w, dtype, 1);
    if (*weight) {
        const char *known = EMIT(w, "Where", NULL, ignored, om_write_int_scalar(w, 0), lab);
        count = EMIT(w, "Gather", NULL, weight, known);
    }
    count = EMIT(w, "ReduceSum", NULL, EMIT(w, "Where", NULL, ignored, zero, count));
    om_write_int(w, "keepdims", 0);
    EMIT(w, "Div", out_name(w, 0), loss, count);
}

/* pad: begins, then ends, or one number per axis for both */
static void write_pads(om_writer *w, int spatial) {
    int64_t v[2 * OM_WINDOW_AXES] = {0};
    const int n = om_write_known(w, "pad", v, 2 * OM_WINDOW_AXES);
    if (n < 2 * spatial)
        for (int i = 2 * spatial - 1; i >= 0; i--) v[i] = v[n > 1 ? i % spatial : 0];
    om_write_ints(w, "pads", v, 2 * spatial);
}
static void write_window(om_writer *w, const char *const (*names)[2], int n_names, int spatial) {
    for (int k = 0; k < n_names; k++) {
        int64_t v[OM_WINDOW_AXES];
        int n = om_write_known(w, names[k][0], v, OM_WINDOW_AXES);
        if (n == 0) continue;
        for (int i = n; i < spatial; i++) v[i] = v[0];
        if (!strcmp(names[k][1], "pads")) write_pads(w, spatial);
        else om_write_ints(w, names[k][1], v, spatial);
    }
}
static void rule_conv(om_writer *w, const char *onnx) {
    static const char *const names[][2] = {{"stride", "strides"}, {"pad", "pads"}, {"dilation", "dilations"}};
    om_write_same(w, onnx);
    write_window(w, names, 3, in_type(w, 0)->rank - 2);
    om_write_int(w, "group", om_node_int(w->n, "groups", 1));
}
static void rule_conv_transpose(om_writer *w, const char *onnx) {
    static const char *const names[][2] = {
        {"stride", "strides"}, {"dilation", "dilations"}, {"out_pad", "output_padding"}};
    om_write_same(w, onnx);
    write_window(w, names, 3, in_type(w, 0)->rank - 2);
    write_pads(w, in_type(w, 0)->rank - 2);
    om_write_int(w, "group", om_node_int(w->n, "groups", 1));
}
static void rule_col2im(om_writer *w, const char *onnx) {
    static const char *const names[][2] = {{"stride", "strides"}, {"dilation", "dilations"}};
    const om_type *t = out_type(w, 0);
    int64_t kernel[3];
    const int n = om_write_known(w, "kernel", kernel, 3);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), om_write_dims(w, t->dim + 2, n), om_write_int_list(w, kernel, n));
    write_window(w, names, 2, n);
    write_pads(w, n);
}
static void rule_pool(om_writer *w, const char *onnx) {
    static const char *const names[][2] = {
        {"kernel", "kernel_shape"}, {"stride", "strides"}, {"pad", "pads"}, {"dilation", "dilations"}};
    if (w->n->n_out > 1 && out_used(w, 1)) {
        om_write_refuse(w, "its indices are read");
        return;
    }
    om_write_first(w, onnx);
    write_window(w, names, 4, in_type(w, 0)->rank - 2);
    om_write_int(w, "ceil_mode", om_node_int(w->n, "ceil", 0));
    if (w->n->op == &om_op_avg_pool) om_write_int(w, "count_include_pad", om_node_int(w->n, "count_include_pad", 0));
}
static void rule_adaptive(om_writer *w, const char *onnx) { /* an average pool where the sizes divide */
    int64_t size[3] = {1, 1, 1}, kernel[3];
    const om_type *t = in_type(w, 0);
    int n = t->rank - 2;
    om_write_known(w, "size", size, 3);
    bool global = true;
    for (int i = 0; i < n; i++) global &= size[i] == 1;
    if (global) {
        om_write_first(w, "GlobalAveragePool");
        return;
    }
    for (int i = 0; i < n; i++) {
        int64_t d;
        if (!om_dim_const(w->g, t->dim[2 + i], &d) || size[i] < 1 || d % size[i]) {
            om_write_refuse(w, "the output's sizes do not divide the input's");
            return;
        }
        kernel[i] = d / size[i];
    }
    om_write_first(w, onnx);
    om_write_ints(w, "kernel_shape", kernel, n);
    om_write_ints(w, "strides", kernel, n);
}

const om_write_row om_write_rows_nn[] = {
    {&om_op_layer_norm, "LayerNormalization", rule_layer_norm},
    {&om_op_rms_norm, "RMSNormalization", rule_rms_norm},
    {&om_op_batch_norm, "BatchNormalization", rule_batch_norm},
    {&om_op_matmul, "MatMul", rule_matmul},
    {&om_op_attention, "Attention", rule_attention},
    {&om_op_gather, "Gather", om_write_axis},
    {&om_op_gather_elements, "GatherElements", om_write_axis},
    {&om_op_gather_nd, "GatherND", om_write_same},
    {&om_op_scatter_elements, "ScatterElements", rule_scatter},
    {&om_op_scatter_nd, "ScatterND", rule_scatter},
    {&om_op_cross_entropy, "SoftmaxCrossEntropyLoss", rule_cross_entropy},
    {&om_op_conv, "Conv", rule_conv},
    {&om_op_conv_transpose, "ConvTranspose", rule_conv_transpose},
    {&om_op_col2im, "Col2Im", rule_col2im},
    {&om_op_max_pool, "MaxPool", rule_pool},
    {&om_op_avg_pool, "AveragePool", rule_pool},
    {&om_op_adaptive_avg_pool, "AveragePool", rule_adaptive},
    {0},
};
