/* onnx_write_optim.c - com.microsoft optimizer operators (onnx/optim.c reads them). Rules: tools/onnx_write.h. */
#include "tools/onnx_write.h"

#include <math.h>

static const char *write_microsoft(om_writer *w, const char *op, const char *out, const char *const *in, int n_in) {
    w->microsoft = true;
    return om_write_node(w, "com.microsoft", op, out, in, n_in);
}
/* A float attribute with its default where the node has none. */
static void write_setting(om_writer *w, const char *name, double dflt) {
    om_write_float(w, name, om_node_float(w->n, name, dflt));
}

/* adamw_step, sgd_step: operands are gathered into sequences, results taken out of them. */
static void rule_sequences(om_writer *w, const char *onnx) {
    const bool adam = om_is(w->n, adamw_step);
    const int n_scalar = adam ? 3 : 2, n_seq = adam ? 4 : 2, n_kind = adam ? 3 : 1,
              groups = (w->n->n_in - n_scalar) / n_seq;
    const char *part[OM_WRITE_OUT], *in[7], *result[3];
    int n_in = 0;
    for (int i = 0; i < n_scalar - 1; i++) in[n_in++] = in_name(w, i);
    for (int j = 0; j < n_seq; j++) {
        for (int k = 0; k < groups; k++) part[k] = in_name(w, n_scalar + k * n_seq + j);
        in[n_in++] = om_write_node(w, "", "SequenceConstruct", NULL, part, groups);
    }
    in[n_in++] = in_name(w, n_scalar - 1);
    write_microsoft(w, onnx, NULL, in, n_in);
    for (int j = 0; j < n_kind; j++) result[j] = om_write_output(w, om_write_unique(w, "t"));
    if (adam) {
#define ADAMW(field, name, dflt) write_setting(w, name, dflt);
#define ADAMW_MODE(field, name, dflt) om_write_int(w, name, om_node_int(w->n, name, dflt));
#define ADAMW_FLAG(field, name, dflt) om_write_int(w, name, om_node_int(w->n, name, dflt));
#include "ops/optimizer.def"
    }
    for (int k = 0; k < groups; k++)
        for (int j = 0; j < n_kind; j++)
            EMIT(w, "SequenceAt", out_name(w, k * n_kind + j), result[j], om_write_int_scalar(w, k));
}

static void rule_lamb(om_writer *w, const char *onnx) {
    static const struct {
        const char *name;
        double dflt;
    } each[] = {
#define LAMB(field, name, dflt) {name, dflt},
#define LAMB_CLIP(field, name, dflt) {name, dflt},
#include "ops/optimizer.def"
    };
    const char *in[OM_WRITE_OUT + 5];
    if (out_used(w, 0) && !in_given(w, 4)) {
        om_write_refuse(w, "it counts a step that is not given");
        return;
    }
    for (int i = 0; i < w->n->n_in; i++) in[i] = in_name(w, i);
    write_microsoft(w, onnx, in_given(w, 4) ? out_name(w, 0) : "", in, w->n->n_in);
    for (int i = 1; i < w->n->n_out; i++) om_write_output(w, in_given(w, i + 4) ? out_name(w, i) : "");
    for (size_t k = 0; k < sizeof each / sizeof *each; k++) { /* one entry per group */
        Onnx__AttributeProto *a = om_write_attr(w, each[k].name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOATS);
        const int groups = (w->n->n_out - 1) / 5;
        if (!(a->floats = om_arena_alloc(&w->a, (size_t)groups * sizeof *a->floats))) return;
        for (int i = 0; i < groups; i++)
            a->floats[a->n_floats++] = (float)om_node_float(w->n, each[k].name, each[k].dflt);
    }
#define LAMB_RATIO(field, name, dflt) write_setting(w, name, dflt);
#include "ops/optimizer.def"
#define LAMB_FLAG(field, name, dflt) om_write_int(w, name, om_node_int(w->n, name, dflt));
#include "ops/optimizer.def"
}

static void rule_all(om_writer *w, const char *onnx) { /* l2_norm_all, all_finite */
    const char *in[OM_MAX_IN];
    if (w->n->n_in > OM_MAX_IN) return om_write_refuse(w, "it has too many operands");
    for (int i = 0; i < w->n->n_in; i++) in[i] = in_name(w, i);
    write_microsoft(w, onnx, out_name(w, 0), in, w->n->n_in);
}

/* The norm is given here, so not InplaceClipGradNorm: x * Min(1, max_norm / (norm + 1e-6)) */
static void rule_clip(om_writer *w, const char *onnx) {
    const int dtype = in_type(w, 0)->dtype;
    const char *norm = in_name(w, 1);
    if (in_type(w, 1)->dtype != dtype) {
        norm = EMIT(w, "Cast", NULL, norm);
        om_write_int(w, "to", om_dtype_onnx(dtype));
    }
    const char *f = EMIT(w, "Div", NULL, om_write_scalar(w, dtype, om_node_float(w->n, "max_norm", 1)),
                         EMIT(w, "Add", NULL, norm, om_write_scalar(w, dtype, 1e-6)));
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), EMIT(w, "Min", NULL, om_write_scalar(w, dtype, 1), f));
}

static void rule_accumulate(om_writer *w, const char *onnx) {
    write_microsoft(w, onnx, NULL, (const char *[]){in_name(w, 0), in_name(w, 1), in_name(w, 2)}, 3);
    om_write_output(w, out_name(w, 0));
}

const om_write_row om_write_rows_optim[] = {
    {&om_op_adamw_step, "AdamWOptimizer", rule_sequences},
    {&om_op_sgd_step, "SGDOptimizerV2", rule_sequences},
    {&om_op_lamb_step, "LambOptimizer", rule_lamb},
    {&om_op_l2_norm_all, "ReduceAllL2", rule_all},
    {&om_op_all_finite, "IsAllFinite", rule_all},
    {&om_op_clip_by_norm, "Mul", rule_clip},
    {&om_op_accumulate, "InPlaceAccumulatorV2", rule_accumulate},
    {0},
};
