/* optimizer.c - parameter updates as operators of the graph (phase UPDATE), for training without PyTorch.
 *
 * They are values in, values out like every operator: new weights and moments are outputs, and a graph stores them by
 * its write list. Where it does, a plan lets them work in the weights' own memory (om_op.state); elsewhere they copy
 * first. The arithmetic is that of csrc/optim; all groups of a node are one multi-tensor call. Where the names differ
 * (csrc/onnx/optim.c reads):
 *     adamw_step      com.microsoft AdamWOptimizer; adam_mode 0 = torch.optim.AdamW, 1 = transformers
 *     sgd_step        SGDOptimizerV2           lamb_step      LambOptimizer: its inputs and outputs in its order
 *     clip_by_norm    InplaceClipGradNorm, given the norm      l2_norm_all    ReduceAllL2
 *     all_finite      IsAllFinite               accumulate     InPlaceAccumulatorV2
 * The three steps take scalars first and then any number of groups, as many as a node may have outputs (attribute
 * out_dtype lists their types); the groups share the node's attributes. Groups do not depend on each other, so a longer
 * list is several nodes. `update` false (from all_finite): every output is its input. lr is a float, step i64 and
 * 1-based, flags bool, each of one element, in the device's memory like everything: lr, adamw's step and lamb's
 * loss_scale are host scalars as a rule (om_op.host).
 */
#include "graph/engine.h"

/* --- types --------------------------------------------------------------------------------------------- */

static om_status update_same(om_graph *g, const om_node *n, int a, int b) {
    const om_type *x = om_ty(g, om_ins(g, n)[a]), *y = om_ty(g, om_ins(g, n)[b]);
    bool same = x->rank == y->rank;
    for (int i = 0; same && i < x->rank; i++) same = x->dim[i] == y->dim[i];
    OM_CHECK(g->cx, same && om_is_float(x->dtype) && om_is_float(y->dtype),
             "%s: inputs %d and %d must be floats of equal sizes", n->op->name, a, b);
    return OM_OK;
}

static om_status update_scalar(om_graph *g, const om_node *n, int i, int dtype) {
    if (i >= n->n_in || om_ins(g, n)[i] == OM_NONE) return OM_OK;
    const om_type *x = om_ty(g, om_ins(g, n)[i]);
    const bool one = x->rank == 0 || (x->rank == 1 && x->dim[0] == 1);
    OM_CHECK(g->cx, one && (dtype == OM_F32 ? om_is_float(x->dtype) : x->dtype == dtype),
             "%s: input %d is %s of rank %d; one element of %s is needed", n->op->name, i, om_dtype_name(x->dtype),
             x->rank, dtype == OM_F32 ? "a float type" : om_dtype_name(dtype));
    return OM_OK;
}

/* Operands of a step: n_scalar scalars, then groups of n_in tensors that make n_out outputs each, after n_first other
 * outputs. */
typedef struct update_form { const om_op *op; int n_scalar, n_in, n_first, n_out; } update_form;
static const update_form update_adamw = {&om_op_adamw_step, 3, 4, 0, 3}, update_sgd = {&om_op_sgd_step, 2, 2, 0, 1},
                         update_lamb = {&om_op_lamb_step, 5, 5, 1, 5};

static om_status update_groups(om_graph *g, const om_node *n, const update_form *f, int *groups) {
    const int rest = n->n_in - f->n_scalar;
    *groups = rest / f->n_in;
    OM_CHECK(g->cx, rest > 0 && rest % f->n_in == 0,
             "%s: %d operands given; %d scalars and then groups of %d are needed", n->op->name, n->n_in, f->n_scalar,
             f->n_in);
    OM_CHECK(g->cx, n->n_out == f->n_first + *groups * f->n_out, "%s: out_dtype lists %d outputs; %d groups make %d",
             n->op->name, n->n_out, *groups, f->n_first + *groups * f->n_out);
    for (int k = 0; k < *groups; k++)
        for (int j = 1; j < f->n_in; j++) {
            const int a = f->n_scalar + k * f->n_in;
            if (om_ins(g, n)[a + j] == OM_NONE && f == &update_lamb && j == 4) continue;
            for (int i = 0; i <= j; i += j)
                OM_CHECK(g->cx, om_ins(g, n)[a + i] != OM_NONE, "%s: operand %d is required", n->op->name, a + i);
            OM_TRY(update_same(g, n, a, a + j));
        }
    return OM_OK;
}

static om_status adamw_infer(om_graph *g, const om_node *n, om_type *out) {
    int groups;
    OM_TRY(update_scalar(g, n, 0, OM_F32));
    OM_TRY(update_scalar(g, n, 1, OM_I64));
    OM_TRY(update_scalar(g, n, 2, OM_BOOL));
    const int64_t mode = om_node_int(n, "adam_mode", 0);
    OM_CHECK(g->cx, mode == 0 || mode == 1, "adamw_step: adam_mode %lld given; allowed: 0 (torch), 1 (transformers)",
             (long long)mode);
    OM_CHECK(g->cx, mode == 1 || om_node_int(n, "correct_bias", 1) != 0,
             "adamw_step: adam_mode 0 needs correct_bias 1");
    OM_TRY(update_groups(g, n, &update_adamw, &groups));
    for (int k = 0; k < groups; k++)
        for (int i = 0; i < 3; i++) out[3 * k + i] = *om_ty(g, om_ins(g, n)[3 + 4 * k + (i ? i + 1 : 0)]); /* w, m, v */
    return OM_OK;
}

static om_status sgd_infer(om_graph *g, const om_node *n, om_type *out) {
    int groups;
    OM_TRY(update_scalar(g, n, 0, OM_F32));
    OM_TRY(update_scalar(g, n, 1, OM_BOOL));
    OM_TRY(update_groups(g, n, &update_sgd, &groups));
    for (int k = 0; k < groups; k++) out[k] = *om_ty(g, om_ins(g, n)[2 + 2 * k]);
    return OM_OK;
}

static om_status lamb_infer(om_graph *g, const om_node *n, om_type *out) {
    static const uint8_t scalar[5] = {OM_BOOL, OM_F32, OM_F32, OM_F32, OM_I64};
    int groups;
    for (int i = 0; i < 5; i++) OM_TRY(update_scalar(g, n, i, scalar[i]));
    OM_CHECK(g->cx, om_node_float(n, "max_norm_clip", 1.0) != 0, "lamb_step: max_norm_clip is 0; it must not be");
    OM_TRY(update_groups(g, n, &update_lamb, &groups));
    out[0] = om_ins(g, n)[4] != OM_NONE ? *om_ty(g, om_ins(g, n)[4]) : (om_type){.dtype = OM_I64};
    for (int k = 0; k < groups; k++)
        for (int i = 0; i < 5; i++) {
            const om_id v = om_ins(g, n)[5 + 5 * k + i];
            /* no element */
            out[1 + 5 * k + i] = v != OM_NONE ? *om_ty(g, v) : (om_type){.dtype = OM_U8, .rank = 1};
        }
    return OM_OK;
}

static om_status clip_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(update_scalar(g, n, 1, OM_F32));
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, om_is_float(out->dtype), "clip_by_norm: x is %s; a float is needed", om_dtype_name(out->dtype));
    return OM_OK;
}

static om_status all_infer(om_graph *g, const om_node *n, om_type *out) {
    bool wide = false;
    for (int i = 0; i < n->n_in; i++) {
        const om_type *x = om_ty(g, om_ins(g, n)[i]);
        OM_CHECK(g->cx, om_is_float(x->dtype), "%s: input %d is %s; floats are needed", n->op->name, i,
                 om_dtype_name(x->dtype));
        wide |= x->dtype == OM_F64;
    }
    *out = (om_type){.dtype = om_is(n, all_finite) ? OM_BOOL : wide ? OM_F64 : OM_F32};
    return OM_OK;
}

static om_status accumulate_infer(om_graph *g, const om_node *n, om_type *out) {
    OM_TRY(update_same(g, n, 0, 1));
    OM_TRY(update_scalar(g, n, 2, OM_BOOL));
    *out = *om_ty(g, om_ins(g, n)[0]);
    return OM_OK;
}

/* --- which operand an output is the new state of ------------------------------------------------------- */

static int adamw_state(const om_node *n, int out) { (void)n; return 3 + 4 * (out / 3) + (out % 3 ? out % 3 + 1 : 0); }
static int sgd_state(const om_node *n, int out) { (void)n; return 2 + 2 * out; }
/* the last 16-bit weight may be missing */
static int lamb_state(const om_node *n, int out) { return out + 4 < n->n_in ? out + 4 : -1; }
static int first_state(const om_node *n, int out) { (void)n, (void)out; return 0; }

/* --- kernels ------------------------------------------------------------------------------------------- */

const om_op om_op_adamw_step = {OM_OP(adamw_step),
                                .kind = OM_K_ROW,
                                .min_in = 7,
                                .max_in = -1,
                                .n_out = -1,
                                .optional = 1u << 2,
                                .host = 1u << 0 | 1u << 1,
                                .state = adamw_state,
                                .infer = adamw_infer};
const om_op om_op_sgd_step = {OM_OP(sgd_step),
                              .kind = OM_K_ROW,
                              .min_in = 4,
                              .max_in = -1,
                              .n_out = -1,
                              .optional = 1u << 1,
                              .host = 1u << 0,
                              .state = sgd_state,
                              .infer = sgd_infer};
const om_op om_op_lamb_step = {OM_OP(lamb_step),
                               .kind = OM_K_REDUCE,
                               .min_in = 10,
                               .max_in = -1,
                               .n_out = -1,
                               .optional = 1u << 0 | 1u << 1 | 1u << 2 | 1u << 4 | 1u << 9,
                               .host = 1u << 1 | 1u << 3,
                               .state = lamb_state,
                               .infer = lamb_infer};
const om_op om_op_clip_by_norm = {OM_OP(clip_by_norm),
                                  .kind = OM_K_ROW,
                                  .min_in = 2,
                                  .max_in = 2,
                                  .n_out = 1,
                                  .state = first_state,
                                  .infer = clip_infer};
const om_op om_op_l2_norm_all = {OM_OP(l2_norm_all),
                                 .kind = OM_K_REDUCE,
                                 .min_in = 1,
                                 .max_in = -1,
                                 .n_out = 1,
                                 .infer = all_infer};
const om_op om_op_all_finite = {OM_OP(all_finite),
                                .kind = OM_K_REDUCE,
                                .min_in = 1,
                                .max_in = -1,
                                .n_out = 1,
                                .infer = all_infer};
const om_op om_op_accumulate = {OM_OP(accumulate),
                                .kind = OM_K_ROW,
                                .min_in = 2,
                                .max_in = 3,
                                .n_out = 1,
                                .state = first_state,
                                .infer = accumulate_infer};
