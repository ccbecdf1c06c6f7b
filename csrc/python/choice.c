/* choice.c - of class Model: what there is to choose from for backward to compute again, by structure, and variants of
 * what was chosen. */
#include "python/pymodule.h"

#include "python/dlpack.h"

#include <stdlib.h>

/* Model.clusters(wanted, arriving, tensors) */
PyObject *om_py_clusters(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    const char *wanted, *arriving;
    Py_ssize_t nw, na;
    PyObject *tensors, *list = NULL;
    int *group, rows = 0;
    if (!PyArg_ParseTuple(args, "y#y#O:clusters", &wanted, &nw, &arriving, &na, &tensors) ||
        om_py_variant_key(self, nw, na, Py_None, &group))
        return NULL;
    const int n = om_model_inputs(self->m);
    om_tensor *in = malloc((size_t)(n + 1) * sizeof *in);
    om_ctx *cx = in ? om_py_ctx() : NULL;
    om_choice *c = NULL;
    if (!cx) PyErr_NoMemory();
    if (cx && !om_dl_import_list(tensors, n, in, "tensors")) {
        om_status s = om_choice_new(cx, self->m, (const uint8_t *)wanted, (const uint8_t *)arriving, &c);
        if (s == OM_OK) s = om_choice_clusters(cx, c, in, &rows);
        list = s == OM_OK ? PyList_New(0) : om_py_error(cx);
    }
    for (int i = 0; list && i < rows; i++) {
        const om_cluster_row r = om_choice_cluster(c, i);
        if (om_py_list_add(list, Py_BuildValue("{s:s,s:s,s:L,s:i,s:O,s:i,s:i}", "name", r.name, "formula", r.formula,
                                               "bytes", (long long)r.bytes, "count", r.count, "compromise",
                                               r.compromise ? Py_True : Py_False, "cheap", r.again[OM_RECOMPUTE_CHEAP],
                                               "layers", r.again[OM_RECOMPUTE_LAYERS])))
            Py_CLEAR(list);
    }
    om_choice_free(c);
    om_ctx_free(cx);
    free(in);
    return list;
}

/* Model.choose(wanted, arriving, group, level, plans): plans None: nothing is computed again */
PyObject *om_py_choose(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    const char *wanted, *arriving;
    Py_ssize_t nw, na;
    PyObject *group, *plans;
    int level, *grp, variant = -1;
    if (!PyArg_ParseTuple(args, "y#y#OiO:choose", &wanted, &nw, &arriving, &na, &group, &level, &plans) ||
        om_py_variant_key(self, nw, na, group, &grp))
        return NULL;
    om_ctx *cx = om_py_ctx();
    om_choice *c = NULL;
    om_status s = !cx ? OM_NOMEM : om_choice_new(cx, self->m, (const uint8_t *)wanted, (const uint8_t *)arriving, &c);
    const int n = s == OM_OK ? om_choice_values(c) : 0;
    uint8_t *again = calloc((size_t)n + 1, 1);
    if (!again || !cx) PyErr_NoMemory();
    if (s == OM_OK && again && plans != Py_None && level >= 0 && level < OM_N_RECOMPUTE)
        memcpy(again, om_choice_policy(c, (om_recompute)level), (size_t)n);
    const Py_ssize_t n_plans = s == OM_OK && plans != Py_None ? PySequence_Size(plans) : 0;
    for (Py_ssize_t i = 0; i < n_plans && s == OM_OK && again && !PyErr_Occurred(); i++) {
        const char *name;
        int strategy, count;
        PyObject *plan = PySequence_GetItem(plans, i);
        if (plan && PyArg_ParseTuple(plan, "sii:plan", &name, &strategy, &count))
            s = om_choice_set(cx, c, name, strategy, count, again);
        Py_XDECREF(plan);
    }
    if (s == OM_OK && again && !PyErr_Occurred())
        s = om_model_variant_again(cx, self->m, (const uint8_t *)wanted, (const uint8_t *)arriving, grp, again, n,
                                   &variant);
    PyObject *res = PyErr_Occurred() ? NULL : s == OM_OK ? PyLong_FromLong(variant) : om_py_error(cx);
    om_choice_free(c);
    om_ctx_free(cx);
    free(again);
    free(grp);
    return res;
}
