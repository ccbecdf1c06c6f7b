/* optim.c - Python entry points of the optimizers: adam_step, sgd_step, lamb_step, norm, axpby of ortmodule._C.
 *
 * Each takes parallel lists of tensors (one entry per parameter), borrows their memory through DLPack, releases the GIL
 * and makes one engine call. Step counters are tensors of one element, as torch.optim keeps them: read, counted up and
 * written here, so that a step costs no Python work per parameter. om_optim_methods is joined to the module's method
 * table by pymodule.c.
 */
#include "python/pymodule.h"

#include "python/dlpack.h"
#include "optim/optim.h"

#include <stdlib.h>

static om_ctx *optim_ctx(void) {
    om_ctx *cx = om_py_ctx();
    if (!cx) PyErr_NoMemory();
    return cx;
}

/* --- arguments ------------------------------------------------------------------------------------- */

static Py_ssize_t optim_len(PyObject *seq, const char *what) {
    if (PyList_Check(seq)) return PyList_Size(seq);
    if (PyTuple_Check(seq)) return PyTuple_Size(seq);
    PyErr_Format(PyExc_TypeError, "%s must be a list or tuple of tensors", what);
    return -1;
}

int om_py_params(PyObject *const *lists, om_optim_param *ps, Py_ssize_t n, om_tensor *tmp) {
    static const struct { size_t field; const char *what; } rows[OM_PY_PARAMS] = {
        {offsetof(om_optim_param, p), "params"},        {offsetof(om_optim_param, g), "grads"},
        {offsetof(om_optim_param, m), "first moments"}, {offsetof(om_optim_param, v), "second moments"},
        {offsetof(om_optim_param, w), "masters"},
    };
    for (int k = 0; k < OM_PY_PARAMS; k++) {
        if (!lists[k] || lists[k] == Py_None) continue;
        if (om_dl_import_list(lists[k], n, tmp, rows[k].what)) return -1;
        for (Py_ssize_t i = 0; i < n; i++) *(om_tensor *)(void *)((char *)&ps[i] + rows[k].field) = tmp[i];
    }
    return 0;
}

/* Counter tensors: value + 1 into ps[i].step; optim_steps_write puts it back when the step is done. tmp keeps the
 * counters. */
static int optim_steps(PyObject *seq, om_optim_param *ps, Py_ssize_t n, om_tensor *tmp) {
    if (om_dl_import_list(seq, n, tmp, "steps")) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        const om_tensor *t = &tmp[i];
        if (om_numel(t) != 1 || t->device != -1 || (t->dtype != OM_F32 && t->dtype != OM_F64 && t->dtype != OM_I64)) {
            PyErr_Format(PyExc_ValueError,
                         "step counter %zd must be a CPU tensor of one float32, float64 or int64 element", i);
            return -1;
        }
        ps[i].step = 1 + (t->dtype == OM_F32   ? *(float *)t->data
                          : t->dtype == OM_F64 ? *(double *)t->data
                                               : (double)*(int64_t *)t->data);
    }
    return 0;
}
static void optim_steps_write(const om_tensor *tmp, const om_optim_param *ps, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) {
        if (tmp[i].dtype == OM_F32) *(float *)tmp[i].data = (float)ps[i].step;
        else if (tmp[i].dtype == OM_F64) *(double *)tmp[i].data = ps[i].step;
        else *(int64_t *)tmp[i].data = (int64_t)ps[i].step;
    }
}

/* The lists every step has in common: args = params, grads, m, v, steps, masters, store, seed. v and steps may be
 * NULL. */
typedef struct step_args {
    om_optim_param *ps;
    om_tensor *tmp;   /* ends up holding the steps */
    Py_ssize_t n;
    om_optim_store store;
    uint64_t seed;
} step_args;

static int step_args_read(step_args *a, PyObject *params, PyObject *grads, PyObject *m, PyObject *v, PyObject *steps,
                          PyObject *masters, PyObject *store, PyObject *seed) {
    *a = (step_args){.n = optim_len(params, "params")};
    if (a->n < 0) return -1;
    if (a->n > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "more than 2^31 parameters in one list");
        return -1;
    }
    const long st = PyLong_AsLong(store);
    a->seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLongMask(seed);
    if (PyErr_Occurred()) return -1;
    a->store = (om_optim_store)st;
    a->ps = calloc((size_t)a->n + 1, sizeof *a->ps);
    a->tmp = calloc((size_t)a->n + 1, sizeof *a->tmp);
    if (!a->ps || !a->tmp) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < a->n; i++) a->ps[i].stream = (uint64_t)i + 1;
    if (om_py_params((PyObject *[]){params, grads, m, v, masters}, a->ps, a->n, a->tmp)) return -1;
    return steps ? optim_steps(steps, a->ps, a->n, a->tmp) : 0;
}

static void step_args_free(step_args *a) {
    free(a->ps);
    free(a->tmp);
}

/* --- entry points ---------------------------------------------------------------------------------- */

static PyObject *py_adam_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 16,
                    "adam_step(params, grads, exp_avgs, exp_avg_sqs, steps, masters, store, seed, lr, beta1, beta2, "
                    "eps, weight_decay, "
                    "inv_scale, mode, bias_correction)"))
        return NULL;
    om_adam_cfg c = {0};
    step_args a = {0};
    double mode = 0, bias = 0;
    double *const out[] = {&c.lr, &c.beta1, &c.beta2, &c.eps, &c.weight_decay, &c.inv_scale, &mode, &bias};
    om_ctx *cx = NULL;
    PyObject *r = NULL;
    if (!om_py_numbers(args + 8, out, 8) &&
        !step_args_read(&a, args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7]) &&
        (cx = optim_ctx())) {
        om_status s;
        c.mode = (int)mode, c.bias_correction = bias != 0;
        Py_BEGIN_ALLOW_THREADS;
        s = om_adam_step(cx, &c, a.store, a.seed, a.ps, (int)a.n);
        if (s == OM_OK) optim_steps_write(a.tmp, a.ps, a.n);
        Py_END_ALLOW_THREADS;
        r = om_py_done(cx, s);
    }
    step_args_free(&a);
    return r;
}

static PyObject *py_sgd_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 13,
                    "sgd_step(params, grads, momentum_buffers, masters, store, seed, lr, momentum, dampening, "
                    "weight_decay, inv_scale, "
                    "nesterov, first)"))
        return NULL;
    om_sgd_cfg c = {0};
    step_args a = {0};
    double nesterov = 0, first = 0;
    double *const out[] = {&c.lr, &c.momentum, &c.dampening, &c.weight_decay, &c.inv_scale, &nesterov, &first};
    om_ctx *cx = NULL;
    PyObject *r = NULL;
    if (!om_py_numbers(args + 6, out, 7) &&
        !step_args_read(&a, args[0], args[1], args[2], NULL, NULL, args[3], args[4], args[5]) && (cx = optim_ctx())) {
        om_status s;
        c.nesterov = nesterov != 0;
        for (Py_ssize_t i = 0; i < a.n; i++) a.ps[i].step = first != 0 ? 1 : 2;
        Py_BEGIN_ALLOW_THREADS;
        s = om_sgd_step(cx, &c, a.store, a.seed, a.ps, (int)a.n);
        Py_END_ALLOW_THREADS;
        r = om_py_done(cx, s);
    }
    step_args_free(&a);
    return r;
}

static PyObject *py_lamb_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 21,
                    "lamb_step(params, grads, exp_avgs, exp_avg_sqs, steps, masters, store, seed, lr, beta1, beta2, "
                    "eps, weight_decay, l2, "
                    "grad_weight, ratio_min, ratio_max, inv_scale, bias_correction, no_ratio, keep_grads)"))
        return NULL;
    om_lamb_cfg c = {0};
    step_args a = {0};
    double bias = 0, no_ratio = 0, keep = 0;
    double *const out[] = {&c.lr,        &c.beta1,     &c.beta2,     &c.eps, &c.weight_decay, &c.l2, &c.grad_weight,
                           &c.ratio_min, &c.ratio_max, &c.inv_scale, &bias,  &no_ratio,       &keep};
    om_ctx *cx = NULL;
    om_lamb_cfg *each = NULL;
    PyObject *r = NULL;
    if (!om_py_numbers(args + 8, out, 13) &&
        !step_args_read(&a, args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7]) &&
        (cx = optim_ctx())) {
        om_status s = OM_NOMEM;
        c.bias_correction = bias != 0, c.no_ratio = no_ratio != 0;
        each = om_alloc(cx, sizeof *each * (size_t)(a.n + 1));
        if (each) {
            for (Py_ssize_t i = 0; i < a.n; i++) each[i] = c;
            Py_BEGIN_ALLOW_THREADS;
            s = om_lamb_step(cx, each, a.store, a.seed, true, keep != 0, a.ps, (int)a.n);
            if (s == OM_OK) optim_steps_write(a.tmp, a.ps, a.n);
            Py_END_ALLOW_THREADS;
            om_free(cx, each);
        }
        r = om_py_done(cx, s);
    }
    step_args_free(&a);
    return r;
}

static PyObject *py_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 3, "norm(tensors, ord, per_tensor)")) return NULL;
    const double ord = PyFloat_AsDouble(args[1]);
    const int want_each = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[2]);
    const Py_ssize_t n = want_each < 0 ? -1 : optim_len(args[0], "tensors");
    if (n < 0) return NULL;
    om_tensor *x = calloc((size_t)n + 1, sizeof *x);
    double *each = want_each ? calloc((size_t)n + 1, sizeof *each) : NULL;
    om_ctx *cx = NULL;
    PyObject *r = NULL;
    if (!x || (want_each && !each)) {
        PyErr_NoMemory();
    } else if (!om_dl_import_list(args[0], n, x, "tensors") && (cx = optim_ctx())) {
        double norm = 0;
        bool finite = true;
        om_status s;
        Py_BEGIN_ALLOW_THREADS;
        s = om_norm(cx, x, (int)n, ord, &norm, &finite, each);
        Py_END_ALLOW_THREADS;
        PyObject *done = om_py_done(cx, s), *list = NULL;
        Py_XDECREF(done);
        if (done && want_each && (list = PyList_New(n))) {
            for (Py_ssize_t i = 0; list && i < n; i++) {
                PyObject *v = PyFloat_FromDouble(each[i]);
                if (!v || PyList_SetItem(list, i, v)) Py_CLEAR(list);
            }
        }
        if (done && (list || !want_each))
            r = want_each ? Py_BuildValue("(dNN)", norm, PyBool_FromLong(finite), list)
                          : Py_BuildValue("(dN)", norm, PyBool_FromLong(finite));
    }
    free(x);
    free(each);
    return r;
}

static PyObject *py_axpby(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 4, "axpby(dst, src, a, b)")) return NULL;
    double a = 0, b = 0;
    double *const out[] = {&a, &b};
    const Py_ssize_t n = om_py_numbers(args + 2, out, 2) ? -1 : optim_len(args[0], "dst");
    if (n < 0) return NULL;
    om_tensor *dst = calloc((size_t)n + 1, sizeof *dst), *src = calloc((size_t)n + 1, sizeof *src);
    om_ctx *cx = NULL;
    PyObject *r = NULL;
    const bool has_src = args[1] != Py_None;
    if (!dst || !src) {
        PyErr_NoMemory();
    } else if (!om_dl_import_list(args[0], n, dst, "dst") && !(has_src && om_dl_import_list(args[1], n, src, "src")) &&
               (cx = optim_ctx())) {
        om_status s;
        Py_BEGIN_ALLOW_THREADS;
        s = om_axpby(cx, dst, has_src ? src : NULL, (int)n, a, b);
        Py_END_ALLOW_THREADS;
        r = om_py_done(cx, s);
    }
    free(dst);
    free(src);
    return r;
}

static PyObject *py_loss_scale_next(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 6, "loss_scale_next(scale, good, finite, window, lowest, highest)")) return NULL;
    om_loss_scale s;
    double finite, window, lowest, highest;
    double *const out[] = {&s.scale, &s.good, &finite, &window, &lowest, &highest};
    if (om_py_numbers(args, out, 6)) return NULL;
    s = om_loss_scale_next(s, finite != 0, window, lowest, highest);
    return Py_BuildValue("(dd)", s.scale, s.good);
}

#define FAST(name) #name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL
PyMethodDef om_optim_methods[] = {
    {FAST(adam_step), "adam_step(params, grads, exp_avgs, exp_avg_sqs, steps, masters, store, seed, lr, beta1, beta2, "
                      "eps, weight_decay, "
                      "inv_scale, mode, bias_correction): one Adam step over lists of tensors."},
    {FAST(sgd_step), "sgd_step(params, grads, momentum_buffers, masters, store, seed, lr, momentum, dampening, "
                     "weight_decay, inv_scale, "
                     "nesterov, first): one SGD step over lists of tensors."},
    {FAST(lamb_step), "lamb_step(params, grads, exp_avgs, exp_avg_sqs, steps, masters, store, seed, lr, beta1, beta2, "
                      "eps, weight_decay, l2, "
                      "grad_weight, ratio_min, ratio_max, inv_scale, bias_correction, no_ratio, keep_grads): one LAMB "
                      "step over lists of tensors."},
    {FAST(norm), "norm(tensors, ord, per_tensor): (norm, finite[, norms]) over all elements of all tensors."},
    {FAST(loss_scale_next),
     "loss_scale_next(scale, good, finite, window, lowest, highest): (scale, good steps) after one more step."},
    {FAST(axpby), "axpby(dst, src, a, b): dst = a * src + b * dst over lists of tensors; src None: in place."},
    {NULL, NULL, 0, NULL},
};
