/* nn.c - normalisation, products, attention, dropout, losses, convolution and pooling. Form of a rule: onnx/map.h. */
#include "onnx/map.h"
#include "ops/window.h"

#include <math.h>

/* --- normalisation ----------------------------------------------------------------------------------- */

/* Does w have exactly x's sizes from `axis` on? Then the kernel applies it; else it is broadcast by hand. */
static bool norm_fits(const om_type *x, const om_type *w, int axis) {
    if (w->rank != x->rank - axis) return false;
    for (int i = 0; i < w->rank; i++)
        if (w->dim[i] != x->dim[axis + i]) return false;
    return true;
}

static om_status map_layer_norm(om_onnx *o) {
    om_graph *g = o->g;
    bool rms = o->row->op == &om_op_rms_norm;
    om_id x = IN(0), w = IN(1), b = rms ? OM_NONE : IN(2);
    om_type t = om_map_type_of(o, x);
    int axis = 0;
    double eps = FLT("epsilon", 1e-5);
    OM_TRY(om_map_axis(o, INT("axis", -1), t.rank, &axis));
    om_type wt = om_map_type_of(o, w), bt = om_map_type_of(o, b);
    bool fits = (w == OM_NONE || norm_fits(&t, &wt, axis)) && (b == OM_NONE || norm_fits(&t, &bt, axis)) &&
        (w == OM_NONE || wt.dtype == t.dtype);
    om_id y = om_make(g, o->row->op, (om_id[]){x, fits ? w : OM_NONE, fits ? b : OM_NONE}, rms ? 2 : 3,
                      OM_ATTRS(OM_AI("axis", axis), OM_AF("eps", eps)));
    om_id mean = y == OM_NONE || rms ? OM_NONE : y + 1, rstd = y == OM_NONE ? OM_NONE : y + (rms ? 1 : 2);
    if (!fits && w != OM_NONE) y = MAKE2(mul, y, om_b_cast(g, w, t.dtype));
    if (!fits && b != OM_NONE) y = MAKE2(add, y, om_b_cast(g, b, t.dtype));
    SET(0, y);
    om_dim d[OM_RANK]; /* ONNX keeps the normalised axes with size 1 */
    for (int i = 0; i < t.rank; i++) d[i] = i < axis ? t.dim[i] : 1;
    if (!rms && om_onnx_wants(o, 1)) SET(1, om_b_reshape(g, mean, d, t.rank));
    if (om_onnx_wants(o, rms ? 1 : 2)) SET(rms ? 1 : 2, om_b_reshape(g, rstd, d, t.rank));
    return o->cx->status;
}

/* (n, c, ...) in groups: layer_norm over (c/groups * spatial), then scale and shift per channel. Instance norm: groups
 * = c. */
static om_status map_group_norm(om_onnx *o) {
    om_graph *g = o->g;
    bool instance = !strcmp(o->row->name, "InstanceNormalization");
    om_id x = IN(0), w = IN(1), b = IN(2);
    om_type t = om_map_type_of(o, x), wt = om_map_type_of(o, w);
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank >= 2 && wt.rank == 1, "x has rank %d and scale rank %d; at least 2 and exactly 1 are needed",
               t.rank, wt.rank);
    int64_t groups = INT("num_groups", 0), c;
    om_dim ng = instance ? t.dim[1] : groups;
    ONNX_CHECK(o, instance || groups > 0, "num_groups is %lld", (long long)groups);
    ONNX_CHECK(o, instance || !om_dim_const(g, t.dim[1], &c) || c % groups == 0, "%lld channels in %lld groups",
               (long long)c, (long long)groups);
    om_dim rest = om_dim_div(g, t.dim[1], ng), d[3] = {t.dim[0], ng, 0}, pair[2] = {wt.dim[0], rest};
    for (int i = 2; i < t.rank; i++) rest = om_dim_mul(g, rest, t.dim[i]);
    d[2] = rest;
    om_id y = om_make(g, &om_op_layer_norm, OM_IN(om_b_reshape(g, x, d, 3)),
                      OM_ATTRS(OM_AI("axis", 2), OM_AF("eps", FLT("epsilon", 1e-5))));
    y = om_b_reshape(g, y, t.dim, t.rank);
    if (!instance && o->opset < 21) { /* scale and bias were per group */
        om_dim one[2] = {ng, 1}, all[1] = {t.dim[1]};
        w = om_b_reshape(g, om_b_expand(g, om_b_reshape(g, w, one, 2), pair, 2), all, 1);
        b = om_b_reshape(g, om_b_expand(g, om_b_reshape(g, b, one, 2), pair, 2), all, 1);
    }
    y = MAKE2(mul, y, om_map_per_channel(o, w, t.rank));
    SET(0, MAKE2(add, y, om_map_per_channel(o, b, t.rank)));
    return o->cx->status;
}

/* ortmodule.BatchNorm: x, weight?, bias?, running_mean?, running_var? -> y, new_mean, new_var; torch's momentum and
 * variance. The standard's BatchNormalization says the same with other names, but in training it mixes running
 * statistics with momentum on the old value and with the population variance: then only y can be had. */
static om_status map_batch_norm(om_onnx *o) {
    const bool standard = !*o->row->domain;
    const int64_t training = INT(standard ? "training_mode" : "training", 0);
    const double momentum = standard ? 0.1 : FLT("momentum", 0.1), eps = FLT(standard ? "epsilon" : "eps", 1e-5);
    om_id in[5];
    if (standard && training && (om_onnx_wants(o, 1) || om_onnx_wants(o, 2)))
        REFUSE("running statistics of BatchNormalization in training mode follow another rule than torch's; write "
               "ortmodule.BatchNorm");
    for (int i = 0; i < 5; i++) in[i] = IN(i);
    om_id y = om_make(o->g, &om_op_batch_norm, in, 5,
                      OM_ATTRS(OM_AI("training", standard ? training != 0 : training), OM_AF("momentum", momentum),
                               OM_AF("eps", eps)));
    for (int k = 0; k < (standard ? 1 : 3); k++) SET(k, y == OM_NONE ? y : y + (om_id)k);
    return o->cx->status;
}

/* --- products ---------------------------------------------------------------------------------------- */

/* numpy's matmul for ranks 1 too: a vector gets an axis of size 1 that the result loses again. */
static om_id map_matmul_of(om_onnx *o, om_id a, om_id b) {
    om_graph *g = o->g;
    if (FAILED || a == OM_NONE || b == OM_NONE) return OM_NONE;
    om_type ta = *om_ty(g, a), tb = *om_ty(g, b);
    if (ta.rank == 0 || tb.rank == 0)
        return om_onnx_err(o, OM_INVALID, "operands of rank %d and %d; at least 1 is needed", ta.rank, tb.rank),
               OM_NONE;
    if (ta.rank == 1) a = om_b_reshape(g, a, (om_dim[]){1, ta.dim[0]}, 2);
    if (tb.rank == 1) b = om_b_reshape(g, b, (om_dim[]){tb.dim[0], 1}, 2);
    om_id y = om_make(g, &om_op_matmul, OM_IN(a, b), NULL, 0);
    if (y == OM_NONE || (ta.rank > 1 && tb.rank > 1)) return y;
    om_type t = *om_ty(g, y);
    om_dim d[OM_RANK];
    int n = 0;
    for (int i = 0; i < t.rank; i++)
        if (!(i == t.rank - 2 && ta.rank == 1) && !(i == t.rank - 1 && tb.rank == 1)) d[n++] = t.dim[i];
    return om_b_reshape(g, y, d, n);
}

static om_status map_matmul(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    SET(0, map_matmul_of(o, a, b));
    return o->cx->status;
}

static om_status map_gemm(om_onnx *o) {
    om_graph *g = o->g;
    om_id a = IN(0), b = IN(1), c = IN(2);
    double alpha = FLT("alpha", 1), beta = FLT("beta", 1);
    ONNX_CHECK(o, om_map_type_of(o, a).rank == 2 && om_map_type_of(o, b).rank == 2, "A and B must have rank 2");
    if (INT("transA", 0)) a = om_b_transpose(g, a, 0, 1);
    if (INT("transB", 0)) b = om_b_transpose(g, b, 0, 1);
    om_type bt = om_map_type_of(o, b), ct = om_map_type_of(o, c);
    om_id y;
    if (c != OM_NONE && alpha == 1 && beta == 1 && ct.rank == 1 && ct.dim[0] == bt.dim[1]) {
        y = om_make(g, &om_op_matmul, OM_IN(a, b, c), NULL, 0);
    } else {
        y = om_b_scale(g, om_make(g, &om_op_matmul, OM_IN(a, b), NULL, 0), alpha);
        if (c != OM_NONE && beta != 0) y = MAKE2(add, y, om_b_scale(g, c, beta));
    }
    SET(0, y);
    return o->cx->status;
}

/* com.microsoft FusedMatMul: alpha * op(A) op(B); transBatchX moves the first axis before the last one. */
static om_status map_fused_matmul(om_onnx *o) {
    om_id in[2];
    for (int k = 0; k < 2; k++) {
        in[k] = IN(k);
        om_type t = om_map_type_of(o, in[k]);
        if (INT(k ? "transBatchB" : "transBatchA", 0)) {
            int perm[OM_RANK];
            ONNX_CHECK(o, t.rank >= 2, "operand %d has rank %d", k, t.rank);
            for (int i = 0; i < t.rank; i++) perm[i] = i < t.rank - 2 ? i + 1 : i == t.rank - 2 ? 0 : i;
            in[k] = om_b_permute(o->g, in[k], perm);
        }
        if (INT(k ? "transB" : "transA", 0) && t.rank > 1) in[k] = om_b_transpose(o->g, in[k], -2, -1);
    }
    SET(0, om_b_scale(o->g, map_matmul_of(o, in[0], in[1]), FLT("alpha", 1)));
    return o->cx->status;
}

static om_status map_attention_scale(om_onnx *o, om_id q, double *scale) {
    om_type t = om_map_type_of(o, q);
    int64_t d;
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank >= 2, "q has rank %d", t.rank);
    *scale = FLT("scale", 0);
    if (om_onnx_attr(o, "scale") && om_onnx_attr(o, "scale")->has_f) return OM_OK;
    ONNX_CHECK(o, om_dim_const(o->g, t.dim[t.rank - 1], &d) && d > 0,
               "scale is not given and the head size is not a number");
    *scale = 1 / sqrt((double)d);
    return OM_OK;
}

/* ortmodule.Attention, which knows dropout, and ai.onnx Attention: (b, h, t, d), or (b, t, h*d) with the numbers of
 * heads as attributes. */
static om_status map_attention(om_onnx *o) {
    om_graph *g = o->g;
    const bool standard = !*o->row->domain;
    const double dropout = standard ? 0 : FLT("dropout_p", 0);
    om_id in[4];
    const bool flat = standard && om_map_type(o, 0).rank == 3;
    for (int i = 0; i < 3; i++) {
        in[i] = IN(i);
        om_type t = om_map_type_of(o, in[i]);
        if (FAILED) return o->cx->status;
        ONNX_CHECK(o, !standard || t.rank == (flat ? 3 : 4), "operand %d has rank %d", i, t.rank);
        if (!flat) continue;
        int64_t heads = INT(i ? "kv_num_heads" : "q_num_heads", 0);
        ONNX_CHECK(o, heads > 0, "q_num_heads and kv_num_heads are needed for operands of rank 3");
        om_dim d[4] = {t.dim[0], t.dim[1], heads, om_dim_div(g, t.dim[2], heads)};
        in[i] = om_b_transpose(g, om_b_reshape(g, in[i], d, 4), 1, 2);
    }
    in[3] = IN(3);
    if (standard && (om_onnx_has(o, 4) || om_onnx_has(o, 5) || FLT("softcap", 0) != 0))
        REFUSE("past keys and values and softcap are not supported");
    double scale = 0;
    OM_TRY(map_attention_scale(o, in[0], &scale));
    om_id y = om_make(g, &om_op_attention, in, 4,
                      OM_ATTRS(OM_AI("causal", INT("is_causal", 0) != 0), OM_AF("scale", scale),
                               OM_AF("dropout", dropout)));
    if (dropout > 0) om_map_random(o);
    if (flat && y != OM_NONE) {
        om_type t = *om_ty(g, y);
        om_dim d[3] = {t.dim[0], t.dim[2], om_dim_mul(g, t.dim[1], t.dim[3])};
        y = om_b_reshape(g, om_b_transpose(g, y, 1, 2), d, 3);
    }
    SET(0, y);
    return o->cx->status;
}

/* --- dropout, losses --------------------------------------------------------------------------------- */

static om_status map_dropout(om_onnx *o) {
    om_graph *g = o->g;
    double p = 0.5, training = 0;
    OM_TRY(om_map_scalar(o, 1, "the ratio", &p));
    OM_TRY(om_map_scalar(o, 2, "training_mode", &training));
    ONNX_CHECK(o, p >= 0 && p <= 1, "ratio %g; 0 to 1 is allowed", p);
    om_type t = om_map_type(o, 0);
    if (!training || p == 0) {
        om_onnx_alias(o, 0, 0);
        if (om_onnx_wants(o, 1)) SET(1, om_b_fill(g, OM_BOOL, t.dim, t.rank, 1));
        return o->cx->status;
    }
    om_id y = om_make(g, &om_op_dropout, OM_IN(IN(0)), OM_ATTRS(OM_AF("p", p)));
    om_map_random(o);
    uint64_t stream = om_last(g)->rng;
    SET(0, y);
    if (om_onnx_wants(o, 1)) { /* the same stream over ones: zero exactly where the element was dropped */
        om_id ones = om_make(g, &om_op_dropout, OM_IN(om_b_fill(g, t.dtype, t.dim, t.rank, 1)),
                             OM_ATTRS(OM_AF("p", p)));
        om_last(g)->rng = stream;
        SET(1, MAKE2(ne, ones, om_map_like(o, ones, 0)));
    }
    return o->cx->status;
}

/* (n, c, d...) -> (n*d.., c) */
static om_id map_classes_last(om_onnx *o, om_id x, const om_type *t) {
    int perm[OM_RANK], n = 0;
    if (t->rank == 2) return x;
    om_dim rows = 1;
    for (int i = 0; i < t->rank; i++)
        if (i != 1) perm[n++] = i, rows = om_dim_mul(o->g, rows, t->dim[i]);
    perm[n] = 1;
    return om_b_reshape(o->g, om_b_permute(o->g, x, perm), (om_dim[]){rows, t->dim[1]}, 2);
}

/* ortmodule.CrossEntropy and SoftmaxCrossEntropyLoss. */
static om_status map_cross_entropy(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), labels = IN(1), weight = IN(2);
    om_type t = om_map_type_of(o, x), lt = om_map_type_of(o, labels);
    const char *how = om_onnx_str(o, "reduction", "mean");
    int reduction = !strcmp(how, "none") ? 0 : !strcmp(how, "mean") ? 1 : !strcmp(how, "sum") ? 2 : -1;
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, reduction >= 0, "reduction '%.40s'; none, mean and sum are defined", how);
    ONNX_CHECK(o, lt.dtype == OM_I64 || lt.dtype == OM_I32, "labels are %s; class indices (int64 or int32) are needed",
               om_dtype_name(lt.dtype));
    ONNX_CHECK(o, t.rank >= 1 && lt.rank == t.rank - 1, "scores of rank %d with labels of rank %d; one less is needed",
               t.rank, lt.rank);
    om_id flat;
    if (t.rank == 1) {
        flat = om_b_reshape(g, x, (om_dim[]){1, t.dim[0]}, 2);
        labels = om_b_reshape(g, labels, (om_dim[]){1}, 1);
    } else {
        flat = map_classes_last(o, x, &t);
        om_dim rows[1] = {om_dim_numel(g, &lt)};
        labels = om_b_reshape(g, labels, rows, 1);
    }
    om_id loss = om_make(g, &om_op_cross_entropy, (om_id[]){flat, labels, weight}, 3,
                         OM_ATTRS(OM_AI("ignore_index", INT("ignore_index", -100)),
                                  OM_AF("label_smoothing", FLT("label_smoothing", 0)), OM_AI("reduction", reduction)));
    if (reduction == 0) loss = om_b_reshape(g, loss, lt.dim, lt.rank);
    SET(0, loss);
    if (om_onnx_wants(o, 1)) SET(1, om_make(g, &om_op_log_softmax, OM_IN(x), OM_ATTRS(OM_AI("axis", t.rank > 1))));
    return o->cx->status;
}

/* -weight[target] * x[n, target, d...]; ignored targets count nothing, mean divides by the weights that count. */
static om_status map_nll(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), target = IN(1), weight = IN(2);
    om_type t = om_map_type_of(o, x), lt = om_map_type_of(o, target);
    const char *how = om_onnx_str(o, "reduction", "mean");
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank >= 2 && lt.rank == t.rank - 1, "scores of rank %d with labels of rank %d; one less is needed",
               t.rank, lt.rank);
    ONNX_CHECK(o, !strcmp(how, "none") || !strcmp(how, "mean") || !strcmp(how, "sum"),
               "reduction '%.40s'; none, mean and sum are defined", how);
    om_id zero = om_map_like(o, x, 0);
    om_id ignored = MAKE2(eq, target, om_scalar(g, lt.dtype, (double)INT("ignore_index", -100)));
    om_id safe = om_map_where(o, ignored, om_scalar(g, lt.dtype, 0), target);
    om_dim d[OM_RANK];
    for (int i = 0; i < t.rank; i++) d[i] = i == 1 ? 1 : t.dim[i];
    om_id picked = om_make(g, &om_op_gather_elements, OM_IN(x, om_b_reshape(g, safe, d, t.rank)),
                           OM_ATTRS(OM_AI("axis", 1)));
    picked = om_b_reshape(g, picked, lt.dim, lt.rank);
    om_id w = weight == OM_NONE ? om_map_like(o, x, 1)
                                : om_make(g, &om_op_gather, OM_IN(weight, safe), OM_ATTRS(OM_AI("axis", 0)));
    w = om_map_where(o, ignored, zero, w);
    om_id y = MAKE1(neg, MAKE2(mul, om_map_where(o, ignored, zero, picked), w));
    uint32_t all = (1u << lt.rank) - 1;
    if (strcmp(how, "none") != 0) y = om_b_sum(g, y, all, false);
    if (!strcmp(how, "mean")) y = MAKE2(div, y, om_b_sum(g, w, all, false));
    SET(0, y);
    return o->cx->status;
}

/* --- windows ----------------------------------------------------------------------------------------- */

/* Attributes strides, dilations and pads of a node with `axes` spatial axes; m->k is set. */
static om_status map_window_read(om_onnx *o, int axes, om_window *m) {
    int64_t pads[2 * OM_WINDOW_AXES];
    m->axes = axes;
    OM_TRY(om_map_ints(o, "strides", axes, 1, m->stride));
    OM_TRY(om_map_ints(o, "dilations", axes, 1, m->dil));
    OM_TRY(om_map_ints(o, "pads", 2 * axes, 0, pads));
    for (int i = 0; i < axes; i++) m->lo[i] = pads[i], m->hi[i] = pads[axes + i];
    return OM_OK;
}

/* The windows over x, whose kernel has the sizes of w, or those of kernel_shape. Checked here is what auto_pad counts
 * with; the type rules check the rest. */
static om_status map_window_of(om_onnx *o, const om_type *x, const om_type *w, om_window *m) {
    const int n = x->rank - 2;
    ONNX_CHECK(o, n >= 1 && n <= OM_WINDOW_AXES, "x has rank %d; 3 to 5 are supported", x->rank);
    *m = (om_window){0};
    for (int i = 0; i < n; i++)
        if (w && !om_dim_const(o->g, w->dim[2 + i], &m->k[i])) REFUSE("the kernel's sizes must be numbers");
    if (!w) OM_TRY(om_map_ints(o, "kernel_shape", n, 0, m->k));
    OM_TRY(map_window_read(o, n, m));
    const char *mode = om_onnx_str(o, "auto_pad", "NOTSET");
    for (int i = 0; i < n; i++) {
        ONNX_CHECK(o,
                   m->k[i] > 0 && m->k[i] < INT32_MAX && m->stride[i] > 0 && m->stride[i] < INT32_MAX &&
                       m->dil[i] > 0 && m->dil[i] < INT32_MAX,
                   "kernel %lld, stride %lld, dilation %lld along axis %d", (long long)m->k[i],
                   (long long)m->stride[i], (long long)m->dil[i], i + 2);
        ONNX_CHECK(o, m->lo[i] >= 0 && m->hi[i] >= 0 && m->lo[i] < INT32_MAX && m->hi[i] < INT32_MAX,
                   "pads must not be negative");
        if (!strcmp(mode, "VALID")) m->lo[i] = m->hi[i] = 0;
        if (strncmp(mode, "SAME_", 5) != 0) continue;
        int64_t size;
        if (!om_dim_const(o->g, x->dim[2 + i], &size)) REFUSE("auto_pad %.20s needs sizes that are numbers", mode);
        int64_t out = (size + m->stride[i] - 1) / m->stride[i],
            all = (out - 1) * m->stride[i] + (m->k[i] - 1) * m->dil[i] + 1 - size;
        if (all < 0) all = 0;
        m->lo[i] = !strcmp(mode, "SAME_LOWER") ? (all + 1) / 2 : all / 2;
        m->hi[i] = all - m->lo[i];
    }
    return OM_OK;
}

/* The kernels pad both sides alike: what is left over is padded before. */
static om_id map_window_pad(om_onnx *o, om_id x, om_window *m, double value) {
    om_dim lo[OM_RANK] = {0}, hi[OM_RANK] = {0};
    bool any = false;
    for (int i = 0; i < m->axes; i++) {
        if (m->lo[i] == m->hi[i]) continue;
        lo[2 + i] = m->lo[i], hi[2 + i] = m->hi[i];
        m->lo[i] = m->hi[i] = 0;
        any = true;
    }
    int rank = m->axes + 2;
    return any ? om_make(o->g, &om_op_pad, OM_IN(x),
                         OM_ATTRS(OM_AD("lo", lo, rank), OM_AD("hi", hi, rank), OM_AF("value", value)))
               : x;
}

static om_status map_conv(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), w = IN(1), b = IN(2);
    om_type xt = om_map_type_of(o, x), wt = om_map_type_of(o, w);
    om_window m;
    om_dim s[3], p[3], d[3];
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, xt.rank == wt.rank, "x has rank %d, w %d", xt.rank, wt.rank);
    OM_TRY(map_window_of(o, &xt, &wt, &m));
    x = map_window_pad(o, x, &m, 0);
    SET(0,
        om_make(g, &om_op_conv, (om_id[]){x, w, b}, 3,
                OM_ATTRS(om_map_dims_attr("stride", m.stride, m.axes, g, s),
                         om_map_dims_attr("pad", m.lo, m.axes, g, p),
                         om_map_dims_attr("dilation", m.dil, m.axes, g, d), OM_AI("groups", INT("group", 1)))));
    return o->cx->status;
}

/* begins, then ends */
static om_attr map_pads_attr(om_onnx *o, const om_window *m, om_dim *buf) {
    int64_t pads[2 * OM_WINDOW_AXES];
    memcpy(pads, m->lo, (size_t)m->axes * sizeof *pads);
    memcpy(pads + m->axes, m->hi, (size_t)m->axes * sizeof *pads);
    return om_map_dims_attr("pad", pads, 2 * m->axes, o->g, buf);
}

static om_status map_conv_transpose(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), w = IN(1), b = IN(2);
    om_type xt = om_map_type_of(o, x), wt = om_map_type_of(o, w);
    om_window m;
    om_dim s[3], p[6], d[3], more[3];
    int64_t extra[3];
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, xt.rank == wt.rank, "x has rank %d, w %d", xt.rank, wt.rank);
    if (strcmp(om_onnx_str(o, "auto_pad", "NOTSET"), "NOTSET") != 0 || om_onnx_attr(o, "output_shape"))
        REFUSE("auto_pad and output_shape are not supported; pads and output_padding are");
    OM_TRY(map_window_of(o, &xt, &wt, &m));
    OM_TRY(om_map_ints(o, "output_padding", m.axes, 0, extra));
    om_id y = om_make(g, &om_op_conv_transpose, OM_IN(x, w),
                      OM_ATTRS(om_map_dims_attr("stride", m.stride, m.axes, g, s), map_pads_attr(o, &m, p),
                               om_map_dims_attr("dilation", m.dil, m.axes, g, d),
                               OM_AI("groups", INT("group", 1)),
                               om_map_dims_attr("out_pad", extra, m.axes, g, more)));
    SET(0, b == OM_NONE ? y : MAKE2(add, y, om_map_per_channel(o, b, xt.rank)));
    return o->cx->status;
}

/* im2col, col2im: m->k is set */
static om_status map_patches(om_onnx *o, int n, om_window *m, const om_dim *size) {
    om_attr attr[5];
    om_dim k[3], s[3], d[3], p[6];
    ONNX_CHECK(o, n >= 1 && n <= OM_WINDOW_AXES, "%d spatial axes; 1 to 3 are supported", n);
    OM_TRY(map_window_read(o, n, m));
    attr[0] = om_map_dims_attr("kernel", m->k, n, o->g, k);
    attr[1] = om_map_dims_attr("stride", m->stride, n, o->g, s);
    attr[2] = om_map_dims_attr("dilation", m->dil, n, o->g, d);
    attr[3] = map_pads_attr(o, m, p);
    if (size) attr[4] = OM_AD("size", size, n);
    SET(0, om_make(o->g, size ? &om_op_col2im : &om_op_im2col, OM_IN(IN(0)), attr, size ? 5 : 4));
    return o->cx->status;
}

static om_status map_im2col(om_onnx *o) {
    om_type t = om_map_type(o, 0);
    om_window m = {0};
    ONNX_CHECK(o, t.rank >= 3 && t.rank <= 5, "x has rank %d; 3 to 5 are supported", t.rank);
    OM_TRY(om_map_ints(o, "kernel_shape", t.rank - 2, 0, m.k));
    return map_patches(o, t.rank - 2, &m, NULL);
}

static om_status map_col2im(om_onnx *o) {
    uint32_t n, blocks;
    om_window m = {0};
    const om_dim *size = om_onnx_list(o, 1, &n), *block = size ? om_onnx_list(o, 2, &blocks) : NULL;
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, n == blocks && n >= 1 && n <= 3, "image_shape has %u entries, block_shape %u; 1 to 3 are supported",
               n, blocks);
    OM_TRY(om_map_known(o, block, blocks, "block_shape", m.k));
    return map_patches(o, (int)n, &m, size);
}

/* What both pools say, and `more`. */
static om_id map_pool_node(om_onnx *o, const om_op *op, om_id x, const om_window *m, om_attr more) {
    om_dim k[3], s[3], p[3];
    return om_make(o->g, op, OM_IN(x),
                   OM_ATTRS(om_map_dims_attr("kernel", m->k, m->axes, o->g, k),
                            om_map_dims_attr("stride", m->stride, m->axes, o->g, s),
                            om_map_dims_attr("pad", m->lo, m->axes, o->g, p), OM_AI("ceil", INT("ceil_mode", 0)),
                            more));
}

static om_status map_max_pool(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    om_window m;
    om_dim d[3];
    if (FAILED) return o->cx->status;
    OM_TRY(map_window_of(o, &t, NULL, &m));
    x = map_window_pad(o, x, &m, -INFINITY);
    om_id y = map_pool_node(o, &om_op_max_pool, x, &m, om_map_dims_attr("dilation", m.dil, m.axes, g, d));
    SET(0, y);
    if (om_onnx_wants(o, 1) && !FAILED) { /* ONNX counts over the whole tensor, the engine within one plane */
        if (INT("storage_order", 0) || x != IN(0)) REFUSE("Indices with storage_order or asymmetric pads");
        om_dim planes = om_dim_mul(g, t.dim[0], t.dim[1]), area = 1, shape[OM_RANK] = {t.dim[0], t.dim[1], 1, 1, 1};
        for (int i = 2; i < t.rank; i++) area = om_dim_mul(g, area, t.dim[i]);
        om_id base = om_make(g, &om_op_iota, NULL, 0, OM_ATTRS(OM_AD("shape", &planes, 1), OM_AI("dtype", OM_I64)));
        base = om_b_reshape(g, MAKE2(mul, base, om_onnx_dim_value(o, area, OM_I64)), shape, t.rank);
        SET(1, MAKE2(add, y + 1, base));
    }
    return o->cx->status;
}

static om_status map_avg_pool(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    om_window m;
    int64_t count = INT("count_include_pad", 0) != 0;
    if (FAILED) return o->cx->status;
    OM_TRY(map_window_of(o, &t, NULL, &m));
    for (int i = 0; i < m.axes; i++) {
        if (m.dil[i] != 1) REFUSE("AveragePool with dilation");
        if (m.lo[i] != m.hi[i] && (!count || INT("ceil_mode", 0)))
            REFUSE("asymmetric pads need count_include_pad = 1 and ceil_mode = 0");
    }
    x = map_window_pad(o, x, &m, 0);
    SET(0, map_pool_node(o, &om_op_avg_pool, x, &m, OM_AI("count_include_pad", count)));
    return o->cx->status;
}

static om_status map_global_pool(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    ONNX_CHECK(o, t.rank >= 3, "x has rank %d", t.rank);
    SET(0, om_map_reduce_op(o, o->row->op, x, ((1u << t.rank) - 1) & ~3u, true));
    return o->cx->status;
}

/* ortmodule.AdaptiveAvgPool: attribute output_size */
static om_status map_adaptive_avg_pool(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int64_t size[3];
    om_dim d[3];
    ONNX_CHECK(o, t.rank >= 3 && t.rank <= 5, "x has rank %d; 3 to 5 are supported", t.rank);
    OM_TRY(om_map_ints(o, "output_size", t.rank - 2, 1, size));
    SET(0, om_make(o->g, &om_op_adaptive_avg_pool, OM_IN(x),
                   OM_ATTRS(om_map_dims_attr("size", size, t.rank - 2, o->g, d))));
    return o->cx->status;
}

/* --- the rows ------------------------------------------------------------------------------------------ */

#define S(name) om_onnx_size_##name
const om_onnx_op om_onnx_ops_nn[] = {
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
    {"", "LayerNormalization", 2, 3, 3, map_layer_norm, NULL, &om_op_layer_norm},
    {"", "RMSNormalization", 2, 2, 1, map_layer_norm, NULL, &om_op_rms_norm},
    {"", "SimplifiedLayerNormalization", 2, 2, 2, map_layer_norm, NULL, &om_op_rms_norm},
    {"", "GroupNormalization", 3, 3, 1, map_group_norm, NULL, NULL},
    {"", "InstanceNormalization", 3, 3, 1, map_group_norm, NULL, NULL},
    {"", "BatchNormalization", 5, 5, 3, map_batch_norm, NULL, NULL},
    {"", "MatMul", 2, 2, 1, map_matmul, NULL, NULL},
    {"", "Gemm", 2, 3, 1, map_gemm, NULL, NULL},
    {"", "Attention", 3, 6, 1, map_attention, NULL, NULL},
    {"", "Dropout", 1, 3, 2, map_dropout, NULL, NULL},
    {"", "SoftmaxCrossEntropyLoss", 2, 3, 2, map_cross_entropy, NULL, NULL},
    {"", "NegativeLogLikelihoodLoss", 2, 3, 1, map_nll, NULL, NULL},
    {"", "Conv", 2, 3, 1, map_conv, NULL, NULL},
    {"", "ConvTranspose", 2, 3, 1, map_conv_transpose, NULL, NULL},
    {"", "Col2Im", 3, 3, 1, map_col2im, NULL, NULL},
    {"ortmodule", "Im2Col", 1, 1, 1, map_im2col, NULL, NULL},
    {"", "MaxPool", 1, 1, 2, map_max_pool, NULL, NULL},
    {"", "AveragePool", 1, 1, 1, map_avg_pool, NULL, NULL},
    {"", "GlobalAveragePool", 1, 1, 1, map_global_pool, NULL, &om_op_reduce_mean},
    {"", "GlobalMaxPool", 1, 1, 1, map_global_pool, NULL, &om_op_reduce_max},
    {"com.microsoft", "FusedMatMul", 2, 2, 1, map_fused_matmul, NULL, NULL},
    {"ortmodule", "Attention", 3, 4, 1, map_attention, NULL, NULL},
    {"ortmodule", "CrossEntropy", 2, 3, 1, map_cross_entropy, NULL, NULL},
    {"ortmodule", "BatchNorm", 1, 5, 3, map_batch_norm, NULL, NULL},
    {"ortmodule", "AdaptiveAvgPool", 1, 1, 1, map_adaptive_avg_pool, NULL, NULL},
    {0},
};
