/* optim.c - the optimizer operators of com.microsoft (onnxruntime-training) and the sequences their weights travel in.
 *
 * A sequence never exists in the graph: it is the list of its tensors' values (om_onnx_val.seq), made by
 * SequenceConstruct or by an optimizer, taken apart by SequenceAt. A list of groups becomes as many nodes as the limit
 * of outputs and equal settings ask for (LambOptimizer has settings per group): groups do not depend on each other, so
 * cutting changes nothing, and there is no limit of 1024.
 */
#include "onnx/onnx.h"

#include <math.h>

#define IN(i) om_onnx_in(o, (i))

enum { OPTIM_OUT = OM_MAX_OUT, OPTIM_IN = 192 }; /* outputs an engine node may have; operands of a reduction */

static om_status map_sequence_construct(om_onnx *o) {
    om_id *v = om_arena_alloc(&o->tmp, ((size_t)o->n_in + 1) * sizeof *v);
    if (!v) return o->cx->status;
    for (int i = 0; i < o->n_in; i++) v[i] = IN(i);
    om_onnx_set_seq(o, 0, v, (uint32_t)o->n_in);
    return o->cx->status;
}

static om_status map_sequence_at(om_onnx *o) {
    uint32_t n;
    double at = 0;
    const om_id *v = om_onnx_seq(o, 0, &n);
    if (!v) return o->cx->status;
    if (!om_onnx_scalar(o, 1, &at)) return om_onnx_err(o, OM_UNSUPPORTED, "the position must be a constant");
    if (at < 0) at += n;
    ONNX_CHECK(o, at >= 0 && at < n, "position %g of a sequence of %u", at, n);
    om_onnx_set(o, 0, v[(int)at]);
    return o->cx->status;
}

/* --- nodes of groups --------------------------------------------------------------------------------------- */

/* Makes one node; dtypes: the outputs' types. */
static om_id optim_node(om_onnx *o, const om_op *op, const om_id *in, int n_in, om_attr *attr, int n_attr, int n_out) {
    om_dim dtype[OPTIM_OUT] = {0};
    attr[n_attr++] = OM_AD("out_dtype", dtype, n_out); /* the length counts; the types follow from the operands */
    return om_make(o->g, op, in, n_in, attr, n_attr);
}

/* AdamWOptimizer, SGDOptimizerV2: sequences operand first .. first + n_seq; results: one sequence per kind of
 * output. */
static om_status optim_sequences(om_onnx *o, const om_op *op, const om_id *scalar, int n_scalar, int first, int n_seq,
                                 int n_kind, om_attr *attr, int n_attr) {
    const om_id *seq[4];
    uint32_t n = 0, k;
    om_id in[OPTIM_OUT * 4 + 4], *result[3];
    const int most = OPTIM_OUT / n_kind;
    for (int j = 0; j < n_seq; j++) {
        if (!(seq[j] = om_onnx_seq(o, first + j, &k))) return o->cx->status;
        ONNX_CHECK(o, k > 0 && (j == 0 || k == n),
                   "input %d has %u tensors, input %d has %u; they need equally many, at least one", first + j, k,
                   first, n);
        n = k;
    }
    for (int j = 0; j < n_kind; j++)
        if (!(result[j] = om_arena_alloc(&o->tmp, n * sizeof **result))) return o->cx->status;
    for (uint32_t from = 0; from < n; from += (uint32_t)most) {
        const int groups = n - from < (uint32_t)most ? (int)(n - from) : most;
        int n_in = 0;
        for (int j = 0; j < n_scalar; j++) in[n_in++] = scalar[j];
        for (int i = 0; i < groups; i++)
            for (int j = 0; j < n_seq; j++) in[n_in++] = seq[j][from + (uint32_t)i];
        const om_id y = optim_node(o, op, in, n_in, attr, n_attr, groups * n_kind);
        for (int i = 0; i < groups && y != OM_NONE; i++)
            for (int j = 0; j < n_kind; j++) result[j][from + (uint32_t)i] = y + (om_id)(i * n_kind + j);
    }
    if (om_onnx_wants(o, 0))
        om_onnx_set(o, 0, scalar[n_scalar - 1] != OM_NONE ? scalar[n_scalar - 1] : om_scalar(o->g, OM_BOOL, 1));
    for (int j = 0; j < n_kind; j++) om_onnx_set_seq(o, 1 + j, result[j], n);
    return o->cx->status;
}

static om_status map_adamw(om_onnx *o) {
    om_attr attr[] = {
#define ADAMW(field, name, dflt) OM_AF(name, om_onnx_float(o, name, dflt)),
#define ADAMW_MODE(field, name, dflt) OM_AI(name, om_onnx_int(o, name, dflt)),
#define ADAMW_FLAG(field, name, dflt) OM_AI(name, om_onnx_int(o, name, dflt)),
#include "ops/optimizer.def"
        {0}, /* of optim_node */
    };
    const om_id scalar[] = {IN(0), IN(1), IN(6)};
    return optim_sequences(o, &om_op_adamw_step, scalar, 3, 2, 4, 3, attr, sizeof attr / sizeof *attr - 1);
}

static om_status map_sgd(om_onnx *o) {
    om_attr attr[1];
    const om_id scalar[] = {IN(0), IN(3)};
    return optim_sequences(o, &om_op_sgd_step, scalar, 2, 1, 2, 1, attr, 0);
}

/* --- LambOptimizer ------------------------------------------------------------------------------------------ */

typedef struct lamb_settings { /* of a group */
#define LAMB(field, name, dflt) double field;
#define LAMB_CLIP(field, name, dflt) double field;
#include "ops/optimizer.def"
} lamb_settings;

/* Element k of a list attribute with one entry per group. */
static om_status lamb_setting(om_onnx *o, const char *name, int groups, int k, double dflt, double *x) {
    const Onnx__AttributeProto *a = om_onnx_attr(o, name);
    *x = dflt;
    if (!a) return OM_OK;
    ONNX_CHECK(o, a->n_floats >= (size_t)groups, "attribute %s has %zu entries for %d groups", name, a->n_floats,
               groups);
    *x = a->floats[k];
    return OM_OK;
}

static om_status map_lamb(om_onnx *o) {
    /* a trailing mixed-precision weight may be missing */
    const int groups = (o->n_in - 1) / 5, most = (OPTIM_OUT - 1) / 5;
    om_id in[OPTIM_OUT + 5];
    ONNX_CHECK(o, o->n_in >= 9 && (o->n_in - 5) % 5 % 4 == 0, "%d inputs; 5 scalars and then groups of 5 are needed",
               o->n_in);
    for (int from = 0, to; from < groups && o->cx->status == OM_OK; from = to) {
        lamb_settings c = {0};
        for (to = from; to < groups && to - from < most; to++) {
            lamb_settings d = {0};
#define LAMB(field, name, dflt) OM_TRY(lamb_setting(o, name, groups, to, dflt, &d.field));
#define LAMB_CLIP(field, name, dflt) OM_TRY(lamb_setting(o, name, groups, to, dflt, &d.field));
#include "ops/optimizer.def"
            if (to == from) c = d;
            else if (memcmp(&c, &d, sizeof c) != 0) break;
        }
        om_attr attr[] = {
#define LAMB(field, name, dflt) OM_AF(name, c.field),
#define LAMB_CLIP(field, name, dflt) OM_AF(name, c.field),
#define LAMB_FLAG(field, name, dflt) OM_AI(name, om_onnx_int(o, name, dflt)),
#define LAMB_RATIO(field, name, dflt) OM_AF(name, om_onnx_float(o, name, dflt)),
#include "ops/optimizer.def"
            {0}, /* of optim_node */
        };
        int n_in = 0;
        for (int i = 0; i < 5; i++) in[n_in++] = IN(i);
        for (int i = 5 + 5 * from; i < 5 + 5 * to; i++) in[n_in++] = IN(i);
        const om_id y = optim_node(o, &om_op_lamb_step, in, n_in, attr, sizeof attr / sizeof *attr - 1,
                                   1 + 5 * (to - from));
        if (y == OM_NONE) break;
        if (!from) om_onnx_set(o, 0, y);
        for (int i = 0; i < 5 * (to - from); i++) om_onnx_set(o, 1 + 5 * from + i, y + 1 + (om_id)i);
    }
    return o->cx->status;
}

/* --- over all gradients -------------------------------------------------------------------------------------- */

/* ReduceAllL2 or IsAllFinite over n values: in parts, then over the parts. */
static om_id optim_all(om_onnx *o, const om_op *op, const om_id *v, uint32_t n) {
    om_id part = OM_NONE;
    for (uint32_t from = 0; from < n; from += OPTIM_IN) {
        const om_id x = om_make(o->g, op, v + from, (int)(n - from < OPTIM_IN ? n - from : OPTIM_IN), NULL, 0);
        part = part == OM_NONE ? x : om_make(o->g, op == &om_op_all_finite ? &om_op_and : op, OM_IN(part, x), NULL, 0);
    }
    return part;
}

static om_status map_all(om_onnx *o) { /* ReduceAllL2, IsAllFinite */
    if (om_onnx_int(o, "isinf_only", 0) || om_onnx_int(o, "isnan_only", 0))
        return om_onnx_err(o, OM_UNSUPPORTED, "isinf_only and isnan_only: only both together are checked");
    om_id *v = om_arena_alloc(&o->tmp, (size_t)o->n_in * sizeof *v);
    if (!v) return o->cx->status;
    for (int i = 0; i < o->n_in; i++) v[i] = IN(i);
    om_onnx_set(o, 0, optim_all(o, o->row->op, v, (uint32_t)o->n_in));
    return o->cx->status;
}

static om_status map_clip_norm(om_onnx *o) {
    uint32_t n;
    const char *kind = om_onnx_str(o, "norm_type", "fro");
    const om_id *v = om_onnx_seq(o, 0, &n);
    if (!v) return o->cx->status;
    ONNX_CHECK(o, !strcmp(kind, "fro"), "norm_type '%.40s'; fro is defined", kind);
    om_id *y = om_arena_alloc(&o->tmp, (n + 1) * sizeof *y);
    if (!y || !n) return n ? o->cx->status : om_onnx_err(o, OM_INVALID, "an empty sequence");
    const om_id norm = optim_all(o, &om_op_l2_norm_all, v, n);
    for (uint32_t i = 0; i < n; i++)
        y[i] = om_make(o->g, &om_op_clip_by_norm, OM_IN(v[i], norm),
                       OM_ATTRS(OM_AF("max_norm", om_onnx_float(o, "max_norm", 1))));
    om_onnx_set_seq(o, 0, y, n);
    return o->cx->status;
}

static om_status map_accumulate(om_onnx *o) { /* (buffer, gradient, overwrite?) -> done [1], buffer */
    const bool yes = true;
    om_onnx_set(o, 1, om_make(o->g, &om_op_accumulate, (om_id[]){IN(0), IN(1), IN(2)}, 3, NULL, 0));
    if (om_onnx_wants(o, 0)) om_onnx_set(o, 0, om_const(o->g, OM_BOOL, 1, (int64_t[]){1}, &yes));
    return o->cx->status;
}

const om_onnx_op om_onnx_ops_optim[] = {
    {"", "SequenceConstruct", 1, -1, 1, map_sequence_construct, NULL, NULL},
    {"", "SequenceAt", 2, 2, 1, map_sequence_at, NULL, NULL},
    {"com.microsoft", "AdamWOptimizer", 6, 7, 4, map_adamw, NULL, NULL},
    {"com.microsoft", "SGDOptimizerV2", 3, 4, 2, map_sgd, NULL, NULL},
    {"com.microsoft", "LambOptimizer", 0, -1, -1, map_lamb, NULL, NULL},
    {"com.microsoft", "InplaceClipGradNorm", 1, 1, 1, map_clip_norm, NULL, NULL},
    {"com.microsoft", "ReduceAllL2", 1, -1, 1, map_all, NULL, &om_op_l2_norm_all},
    {"com.microsoft", "IsAllFinite", 1, -1, 1, map_all, NULL, &om_op_all_finite},
    {"com.microsoft", "InPlaceAccumulatorV2", 2, 3, 2, map_accumulate, NULL, NULL},
    {NULL, NULL, 0, 0, 0, NULL, NULL, NULL},
};
