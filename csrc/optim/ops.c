/* ops.c - ops/optimizer.c on the CPU: the lists of tensors of a node become one multi-tensor call of this room.
 * Attributes are read once per plan; learning rate, step and flags are operands, read at every step. */
#include "cpu/copy.h"
#include "cpu/cpu.h"
#include "ops/attr.h"
#include "optim/optim.h"

static bool update_given(const om_args *a, int i) { return i < a->n_in && a->in[i].dtype != OM_NODTYPE; }

static bool update_flag(const om_args *a, int i, bool dflt) {
    return update_given(a, i) ? *(const uint8_t *)a->in[i].data != 0 : dflt;
}

static double update_number(const om_args *a, int i, double dflt) { /* of an operand with one element */
    double x = dflt;
    if (update_given(a, i)) OM_PICK(om_copy)->convert[a->in[i].dtype][OM_F64](a->in[i].data, 0, (char *)&x, 0, 1);
    return x;
}

static om_status update_pass(om_ctx *cx, const om_tensor *from, om_tensor *to) {
    return from->data == to->data ? OM_OK : om_copy(cx, from, to);
}

static om_status update_keep(om_ctx *cx, om_arena *mem, const void *x, size_t size, const void **prep) {
    *prep = om_arena_copy(mem, x, size);
    return *prep ? OM_OK : cx->status;
}

/* --- adamw, sgd -------------------------------------------------------------------------------------------- */

om_status om_cpu_prepare_adamw(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_adam_cfg c = {
        .inv_scale = 1,
#define ADAMW(field, name, dflt) .field = om_args_float(a, name, dflt),
#define ADAMW_MODE(field, name, dflt) .field = om_args_int(a, name, dflt) ? OM_ADAMW_HF : OM_ADAMW_TORCH,
#define ADAMW_FLAG(field, name, dflt) .field = om_args_int(a, name, dflt) != 0,
#include "ops/optimizer.def"
    };
    return update_keep(cx, mem, &c, sizeof c, prep);
}

om_status om_cpu_run_adamw(om_ctx *cx, const om_args *a) {
    const int n = (a->n_in - 3) / 4;
    om_optim_param q[OM_MAX_OUT] = {0};
    om_adam_cfg c = *(const om_adam_cfg *)a->prep;
    const double step = update_number(a, 1, 0);
    c.lr = update_number(a, 0, 0);
    for (int k = 0; k < n; k++) {
        const om_tensor *in = &a->in[3 + 4 * k], *out = &a->out[3 * k];
        for (int i = 0; i < 3; i++) OM_TRY(update_pass(cx, &in[i ? i + 1 : 0], &a->out[3 * k + i]));
        q[k] = (om_optim_param){.p = out[0], .g = in[1], .m = out[1], .v = out[2], .step = step};
    }
    return update_flag(a, 2, true) ? om_adam_step(cx, &c, OM_STORE_NEAREST, 0, q, n) : OM_OK;
}

om_status om_cpu_run_sgd(om_ctx *cx, const om_args *a) {
    const int n = (a->n_in - 2) / 2;
    om_optim_param q[OM_MAX_OUT] = {0};
    const om_sgd_cfg c = {.inv_scale = 1, .lr = update_number(a, 0, 0)};
    for (int k = 0; k < n; k++) {
        OM_TRY(update_pass(cx, &a->in[2 + 2 * k], &a->out[k]));
        q[k] = (om_optim_param){.p = a->out[k], .g = a->in[3 + 2 * k]};
    }
    return update_flag(a, 1, true) ? om_sgd_step(cx, &c, OM_STORE_NEAREST, 0, q, n) : OM_OK;
}

/* --- lamb --------------------------------------------------------------------------------------------------- */

typedef struct lamb_prep {
    om_lamb_cfg c;
    double max_norm; /* 0: no clipping */
} lamb_prep;

om_status om_cpu_prepare_lamb(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    lamb_prep p = {
#define LAMB(field, name, dflt) .c.field = om_args_float(a, name, dflt),
#define LAMB_CLIP(field, name, dflt) .field = update_given(a, 2) ? om_args_float(a, name, dflt) : 0,
#define LAMB_FLAG(field, name, dflt) .c.field = om_args_int(a, name, dflt) != 0,
#define LAMB_RATIO(field, name, dflt) .c.field = om_args_float(a, name, dflt),
#include "ops/optimizer.def"
    };
    p.c.grad_weight = 1 - p.c.beta1;
    return update_keep(cx, mem, &p, sizeof p, prep);
}

om_status om_cpu_run_lamb(om_ctx *cx, const om_args *a) {
    const lamb_prep *p = a->prep;
    const int n = (a->n_in - 5) / 5;
    const bool update = update_flag(a, 0, true);
    om_lamb_cfg c = p->c, each[OM_MAX_OUT];
    om_optim_param q[OM_MAX_OUT] = {0};
    const double step = update_number(a, 4, 0);
    c.lr = update_number(a, 3, 0);
    c.inv_scale = om_lamb_inv_scale(update_number(a, 1, 1), update_number(a, 2, 0), p->max_norm);
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

/* --- lists ---------------------------------------------------------------------------------------------------- */

om_status om_cpu_prepare_clip(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const double max_norm = om_args_float(a, "max_norm", 1.0);
    return update_keep(cx, mem, &max_norm, sizeof max_norm, prep);
}

om_status om_cpu_run_clip(om_ctx *cx, const om_args *a) {
    const double f = *(const double *)a->prep / (update_number(a, 1, 0) + 1e-6);
    return om_scale(cx, &a->out[0], &a->in[0], 1, f < 1 || f != f ? f : 1);
}

om_status om_cpu_run_l2_norm(om_ctx *cx, const om_args *a) {
    double norm;
    bool finite;
    OM_TRY(om_norm(cx, a->in, a->n_in, 2, &norm, &finite, NULL));
    if (a->out[0].dtype == OM_F64) *(double *)a->out[0].data = norm;
    else *(float *)a->out[0].data = (float)norm;
    return OM_OK;
}

om_status om_cpu_run_all_finite(om_ctx *cx, const om_args *a) {
    double norm;
    bool finite;
    OM_TRY(om_norm(cx, a->in, a->n_in, 2, &norm, &finite, NULL));
    *(uint8_t *)a->out[0].data = finite;
    return OM_OK;
}

om_status om_cpu_run_accumulate(om_ctx *cx, const om_args *a) {
    const bool overwrite = update_flag(a, 2, false);
    if (!overwrite) OM_TRY(update_pass(cx, &a->in[0], &a->out[0]));
    return om_axpby(cx, &a->out[0], &a->in[1], 1, 1, overwrite ? 0 : 1);
}
