/* update.h - the numbers of an update as Python passes them, to a step on the CPU (optim.c) and to one on a GPU
 * (cuda.c): their order, and where they go. Readers give 0, or -1 with a Python error set. */
#ifndef OM_PY_UPDATE_H
#define OM_PY_UPDATE_H

#include "optim/optim_math.h"
#include "python/pymodule.h"

enum { OM_PY_ADAM_N = 8, OM_PY_SGD_N = 6, OM_PY_LAMB_N = 13 };
#define OM_PY_ADAM "lr, beta1, beta2, eps, weight_decay, inv_scale, mode, bias_correction"
#define OM_PY_SGD "lr, momentum, dampening, weight_decay, inv_scale, nesterov"
#define OM_PY_LAMB                                                                                                     \
    "lr, beta1, beta2, eps, weight_decay, l2, grad_weight, ratio_min, ratio_max, inv_scale, bias_correction, "         \
    "no_ratio, keep_grads"

static inline int om_py_adam(PyObject *const *args, om_adam_cfg *c) {
    double mode = 0, bias = 0;
    double *const out[OM_PY_ADAM_N] = {&c->lr, &c->beta1, &c->beta2, &c->eps, &c->weight_decay, &c->inv_scale, &mode,
                                       &bias};
    if (om_py_numbers(args, out, OM_PY_ADAM_N)) return -1;
    c->mode = (int)mode, c->bias_correction = bias != 0;
    return 0;
}

static inline int om_py_sgd(PyObject *const *args, om_sgd_cfg *c) {
    double nesterov = 0;
    double *const out[OM_PY_SGD_N] = {&c->lr, &c->momentum, &c->dampening, &c->weight_decay, &c->inv_scale, &nesterov};
    if (om_py_numbers(args, out, OM_PY_SGD_N)) return -1;
    c->nesterov = nesterov != 0;
    return 0;
}

static inline int om_py_lamb(PyObject *const *args, om_lamb_cfg *c, bool *keep_grads) {
    double bias = 0, no_ratio = 0, keep = 0;
    double *const out[OM_PY_LAMB_N] = {&c->lr, &c->beta1,       &c->beta2,     &c->eps,       &c->weight_decay,
                                       &c->l2, &c->grad_weight, &c->ratio_min, &c->ratio_max, &c->inv_scale,
                                       &bias,  &no_ratio,       &keep};
    if (om_py_numbers(args, out, OM_PY_LAMB_N)) return -1;
    c->bias_correction = bias != 0, c->no_ratio = no_ratio != 0;
    *keep_grads = keep != 0;
    return 0;
}

#endif
