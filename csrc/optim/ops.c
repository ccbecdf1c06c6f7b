/* ops.c - ops/optimizer.c on the CPU: the lists of tensors of a node become one multi-tensor call of this room. */
#include "cpu/cpu.h"
#include "ops/attr.h"
#include "optim/optim.h"

/* --- kernels ------------------------------------------------------------------------------------------- */

static bool update_given(const om_args *a, int i) { return i < a->n_in && a->in[i].dtype != OM_NODTYPE; }

static bool update_flag(const om_args *a, int i, bool dflt) {
    return update_given(a, i) ? *(const uint8_t *)a->in[i].data != 0 : dflt;
}

static om_status update_number(om_ctx *cx, const om_args *a, int i, double dflt, double *x) {
    *x = dflt;
    if (!update_given(a, i)) return OM_OK;
    om_tensor t = {.data = x, .dtype = OM_F64, .rank = a->in[i].rank, .device = -1};
    memcpy(t.dim, a->in[i].dim, sizeof t.dim);
    om_dense_strides(&t);
    return om_copy(cx, &a->in[i], &t);
}

static om_status update_pass(om_ctx *cx, const om_tensor *from, om_tensor *to) {
    return from->data == to->data ? OM_OK : om_copy(cx, from, to);
}

om_status om_cpu_run_adamw(om_ctx *cx, const om_args *a) {
    const int n = (a->n_in - 3) / 4;
    om_optim_param q[64] = {0};
    double step;
    om_adam_cfg c = {.inv_scale = 1, .beta1 = om_args_float(a, "alpha", 0.9), .beta2 = om_args_float(a, "beta", 0.999),
                     .eps = om_args_float(a, "epsilon", 1e-8), .weight_decay = om_args_float(a, "weight_decay", 1e-2),
                     .mode = om_args_int(a, "adam_mode", 0) ? OM_ADAMW_HF : OM_ADAMW_TORCH,
                     .bias_correction = om_args_int(a, "correct_bias", 1) != 0};
    OM_TRY(update_number(cx, a, 0, 0, &c.lr));
    OM_TRY(update_number(cx, a, 1, 0, &step));
    for (int k = 0; k < n; k++) {
        const om_tensor *in = &a->in[3 + 4 * k], *out = &a->out[3 * k];
        for (int i = 0; i < 3; i++) OM_TRY(update_pass(cx, &in[i ? i + 1 : 0], &a->out[3 * k + i]));
        q[k] = (om_optim_param){.p = out[0], .g = in[1], .m = out[1], .v = out[2], .step = step};
    }
    return update_flag(a, 2, true) ? om_adam_step(cx, &c, OM_STORE_NEAREST, 0, q, n) : OM_OK;
}

om_status om_cpu_run_sgd(om_ctx *cx, const om_args *a) {
    const int n = (a->n_in - 2) / 2;
    om_optim_param q[64] = {0};
    om_sgd_cfg c = {.inv_scale = 1};
    OM_TRY(update_number(cx, a, 0, 0, &c.lr));
    for (int k = 0; k < n; k++) {
        OM_TRY(update_pass(cx, &a->in[2 + 2 * k], &a->out[k]));
        q[k] = (om_optim_param){.p = a->out[k], .g = a->in[3 + 2 * k]};
    }
    return update_flag(a, 1, true) ? om_sgd_step(cx, &c, OM_STORE_NEAREST, 0, q, n) : OM_OK;
}

om_status om_cpu_run_lamb(om_ctx *cx, const om_args *a) {
    const int n = (a->n_in - 5) / 5;
    const bool update = update_flag(a, 0, true);
    const double beta1 = om_args_float(a, "alpha", 0.9);
    om_lamb_cfg c = {.beta1 = beta1,
                     .beta2 = om_args_float(a, "beta", 0.999),
                     .eps = om_args_float(a, "epsilon", 1e-6),
                     .weight_decay = om_args_float(a, "lambda", 0),
                     .grad_weight = 1 - beta1,
                     .ratio_min = om_args_float(a, "ratio_min", -INFINITY),
                     .ratio_max = om_args_float(a, "ratio_max", INFINITY),
                     .bias_correction = om_args_int(a, "do_bias_correction", 1) != 0};
    om_lamb_cfg each[64];
    om_optim_param q[64] = {0};
    double norm, scale, step;
    OM_TRY(update_number(cx, a, 1, 1, &scale));
    OM_TRY(update_number(cx, a, 2, 0, &norm));
    OM_TRY(update_number(cx, a, 3, 0, &c.lr));
    OM_TRY(update_number(cx, a, 4, 0, &step));
    c.inv_scale = om_lamb_inv_scale(scale, norm, update_given(a, 2) ? om_args_float(a, "max_norm_clip", 1.0) : 0);
    *(int64_t *)a->out[0].data = (int64_t)step + update;
    for (int k = 0; k < n; k++) {
        om_tensor *out = &a->out[1 + 5 * k];
        for (int i = 0; i < 5; i++)
            if (update_given(a, 5 + 5 * k + i)) OM_TRY(update_pass(cx, &a->in[5 + 5 * k + i], &out[i]));
        /* the copied gradient is the working space: it becomes the direction, then the change of the weight */
        q[k] = (om_optim_param){.p = out[0], .g = out[1], .m = out[2], .v = out[3], .d = out[1], .step = step};
        each[k] = c;
    }
    if (!update) return OM_OK;
    OM_TRY(om_lamb_step(cx, each, OM_STORE_NEAREST, 0, true, false, q, n));
    for (int k = 0; k < n; k++)
        /* the weight's 16-bit copy */
        if (update_given(a, 9 + 5 * k)) OM_TRY(om_copy(cx, &a->out[1 + 5 * k], &a->out[5 + 5 * k]));
    return OM_OK;
}

om_status om_cpu_run_clip(om_ctx *cx, const om_args *a) {
    double norm;
    OM_TRY(update_number(cx, a, 1, 0, &norm));
    const double f = om_args_float(a, "max_norm", 1.0) / (norm + 1e-6);
    return om_scale(cx, &a->out[0], &a->in[0], 1, f < 1 || f != f ? f : 1);
}

om_status om_cpu_run_all(om_ctx *cx, const om_args *a) {
    double norm;
    bool finite;
    OM_TRY(om_norm(cx, a->in, a->n_in, 2, &norm, &finite, NULL));
    if (om_is(a->node, all_finite)) *(uint8_t *)a->out[0].data = finite;
    else if (a->out[0].dtype == OM_F64) *(double *)a->out[0].data = norm;
    else *(float *)a->out[0].data = (float)norm;
    return OM_OK;
}

om_status om_cpu_run_accumulate(om_ctx *cx, const om_args *a) {
    const bool overwrite = update_flag(a, 2, false);
    if (!overwrite) OM_TRY(update_pass(cx, &a->in[0], &a->out[0]));
    return om_axpby(cx, &a->out[0], &a->in[1], 1, 1, overwrite ? 0 : 1);
}
