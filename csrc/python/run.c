/* run.c - classes Run and State: om_run_* of ortmodule.h on torch's tensors. A Run holds the tensors it was given and
 * its context; a State its model. */
#include "python/pymodule.h"

#include "python/dlpack.h"

#include <stdlib.h>

/* An object whose run is to be started; `held` becomes its own, NULL: an error is set. */
static Run *run_new(Model *model, PyObject *held) {
    allocfunc alloc = (allocfunc)PyType_GetSlot(om_py_run_type, Py_tp_alloc);
    Run *self = held ? (Run *)alloc(om_py_run_type, 0) : NULL;
    if (!self) {
        Py_XDECREF(held);
        return NULL;
    }
    Py_INCREF(model);
    self->model = model;
    self->held = held;
    if (!(self->cx = om_py_ctx())) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    return self;
}

static void Run_dealloc(PyObject *o) {
    Run *self = (Run *)o;
    PyTypeObject *type = Py_TYPE(o);
    om_run_free(self->r);
    om_ctx_free(self->cx);
    Py_XDECREF(self->held);
    Py_XDECREF(self->model);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}

static PyObject *run_started(Run *self, om_status s) {
    if (s == OM_OK) return (PyObject *)self;
    om_py_error(self->cx);
    Py_DECREF(self);
    return NULL;
}

/* An address is one of a device: what a plan for a GPU takes lies there, but for numbers that the host reads. (That
 * inputs of a plan for the CPU lie in its memory is om_run_forward's to see.) */
static bool anywhere(const Model *model) { return model->cuda < 0 || om_py_stand_in == Py_True; }

static int is_here(const Model *model, const om_tensor *t, const char *what, int number) {
    if (!t->dtype || t->device == model->cuda) return 0;
    PyErr_Format(PyExc_ValueError, "%s %d is on device %d, its plan on cuda:%d (-1: the CPU)", what, number, t->device,
                 model->cuda);
    return -1;
}

enum { UNKNOWN = -2 }; /* in tests: what PyTorch has computed, for devices that are none */

static int inputs_here(const Model *model, int variant, om_tensor *in, int n) {
    for (int i = 0; om_py_stand_in && i < n; i++)
        if (in[i].device == UNKNOWN) in[i].device = -1;
    const om_variant *v = anywhere(model) ? NULL : om_model_variant_at(model->m, variant);
    for (om_id i = 0; v && i < v->first_grad_in; i++)
        if (!om_val(v->g, v->g->inputs.v[i])->host && is_here(model, &in[i], "graph input", (int)i)) return -1;
    return 0;
}

static int all_here(const Model *model, const om_tensor *t, int n, const char *what) {
    for (int i = 0; !anywhere(model) && i < n; i++)
        if (t[i].device != UNKNOWN && is_here(model, &t[i], what, i)) return -1;
    return 0;
}

PyObject *om_py_forward(PyObject *o, PyObject *args, PyObject *kw) {
    static char *names[] = {"variant", "tensors", "seed", "write", NULL};
    Model *model = (Model *)o;
    int variant, write = 1;
    unsigned long long seed = 0;
    PyObject *tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iO|Kp:forward", names, &variant, &tensors, &seed, &write)) return NULL;
    om_tensor small[256], *in = small;
    const int n = om_model_inputs(model->m);
    if (n > 256 && !(in = malloc((size_t)n * sizeof *in))) return PyErr_NoMemory();
    const bool fits = !om_dl_import_list(tensors, n, in, "tensors") && !inputs_here(model, variant, in, n);
    Run *self = fits ? run_new(model, PySequence_Tuple(tensors)) : NULL;
    om_status s = OM_OK;
    if (self) {
        Py_BEGIN_ALLOW_THREADS;
        s = om_run_forward(self->cx, model->m, variant, in, seed, write, &self->r);
        Py_END_ALLOW_THREADS;
    }
    if (in != small) free(in);
    return self ? run_started(self, s) : NULL;
}

static PyObject *State_backward(PyObject *o, PyObject *args, PyObject *kw) {
    static char *names[] = {"arena", "tensors", "outputs", "grads", "dropped", "fleeting", NULL};
    State *state = (State *)o;
    const char *dropped = NULL;
    Py_ssize_t n_dropped = 0;
    int fleeting = 0;
    PyObject *arena, *tensors, *outputs, *grads;
    const int n = om_model_inputs(state->model->m), n_out = om_model_outputs(state->model->m);
    if (!PyArg_ParseTupleAndKeywords(args, kw, "OOOO|z#p:backward", names, &arena, &tensors, &outputs, &grads, &dropped,
                                     &n_dropped, &fleeting))
        return NULL;
    if (dropped && n_dropped != n_out)
        return PyErr_Format(PyExc_ValueError, "backward: %zd dropped flags for %d outputs", n_dropped, n_out);
    om_tensor ar, *in = malloc((size_t)(n + 2 * n_out + 1) * sizeof *in);
    if (!in) return PyErr_NoMemory();
    PyObject *own = PySequence_List(outputs);
    om_tensor *out = in + n, *dy = out + n_out;
    Run *self = !own || om_dl_import(arena, &ar) || om_dl_import_list(tensors, n, in, "tensors") ||
                        om_dl_import_list(outputs, n_out, out, "outputs") ||
                        om_dl_import_list(grads, n_out, dy, "grads") ||
                        all_here(state->model, out, n_out, "output") ||
                        all_here(state->model, dy, n_out, "gradient of output")
                    ? NULL
                    : run_new(state->model, PyTuple_Pack(4, arena, tensors, own, grads));
    Py_XDECREF(own);
    om_status s = OM_OK;
    if (self) {
        self->outputs = own;
        const size_t size = ar.dtype == OM_U8 && om_is_dense(&ar) ? (size_t)om_numel(&ar) : SIZE_MAX;
        Py_BEGIN_ALLOW_THREADS;
        s = om_run_backward(self->cx, state->s, ar.data, size, in, out, dy, (const uint8_t *)dropped, &self->r);
        if (s == OM_OK && fleeting) om_run_fleeting(self->r);
        Py_END_ALLOW_THREADS;
    }
    free(in);
    return self ? run_started(self, s) : NULL;
}

/* Lets go of outputs that a backward has read for the last time. */
static int outputs_drop(Run *self) {
    const Py_ssize_t n = self->outputs ? PyList_Size(self->outputs) : 0;
    uint8_t small[64], *needed = n <= 64 ? small : malloc((size_t)n);
    if (!needed) return PyErr_NoMemory(), -1;
    if (n) om_run_outputs_needed(self->r, needed);
    for (Py_ssize_t i = 0; i < n; i++)
        if (!needed[i] && PyList_GetItem(self->outputs, i) != Py_None)
            PyList_SetItem(self->outputs, i, (Py_INCREF(Py_None), Py_None));
    if (needed != small) free(needed);
    return 0;
}

static PyObject *Run_resume(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    int segment = -1;
    if (!PyArg_ParseTuple(args, "|i:resume", &segment)) return NULL;
    om_status s;
    Py_BEGIN_ALLOW_THREADS;
    s = om_run_resume(self->r, segment);
    Py_END_ALLOW_THREADS;
    if (s != OM_OK && s != OM_HOST) return om_py_error(self->cx);
    if (s == OM_OK) {
        if (outputs_drop(self)) return NULL;
        Py_RETURN_NONE;
    }
    const om_host_stop *stop = om_run_host(self->r);
    PyObject *list = PyList_New(stop->n_in);
    for (int i = 0; list && i < stop->n_in; i++) {
        om_tensor t = stop->in[i];
        t.device = (int16_t)self->model->cuda;
        PyObject *x = t.dtype ? om_py_export(&t, NULL) : (Py_INCREF(Py_None), Py_None);
        if (!x || PyList_SetItem(list, i, x)) Py_CLEAR(list);
    }
    return list ? Py_BuildValue("(iIN)", stop->index, (unsigned)stop->part, list) : NULL;
}

static PyObject *Run_host_done(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    PyObject *outs;
    if (!PyArg_ParseTuple(args, "O:host_done", &outs)) return NULL;
    const om_host_stop *stop = om_run_host(self->r);
    om_tensor got[OM_MAX_OUT];
    if (stop && (om_dl_import_list(outs, stop->n_out, got, "host outputs") ||
                 all_here(self->model, got, stop->n_out, "result of PyTorch")))
        return NULL;
    if (om_run_answer(self->r, got) != OM_OK) return om_py_error(self->cx);
    Py_RETURN_NONE;
}

static PyObject *Run_outputs(PyObject *o, PyObject *none) {
    (void)none;
    Run *self = (Run *)o;
    const int n = om_model_outputs(self->model->m);
    PyObject *list = PyList_New(n);
    for (int i = 0; list && i < n; i++) {
        om_tensor t;
        om_block *b;
        PyObject *x = om_run_output(self->r, i, &t, &b) == OM_OK ? om_py_export(&t, b) : om_py_error(self->cx);
        if (!x || PyList_SetItem(list, i, x)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Run_state(PyObject *o, PyObject *none) {
    (void)none;
    Run *self = (Run *)o;
    om_state *s;
    om_block *arena;
    if (om_run_state(self->r, &s, &arena) != OM_OK) return om_py_error(self->cx);
    om_tensor t = {.data = arena->data, .dtype = OM_U8, .rank = 1, .dim = {(int64_t)arena->size}, .stride = {1}};
    PyObject *tensor = om_py_export(&t, arena);
    allocfunc alloc = (allocfunc)PyType_GetSlot(om_py_state_type, Py_tp_alloc);
    State *state = tensor ? (State *)alloc(om_py_state_type, 0) : NULL;
    if (!state) {
        om_state_free(s);
        Py_XDECREF(tensor);
        return NULL;
    }
    state->s = s;
    state->model = self->model;
    Py_INCREF(state->model);
    return Py_BuildValue("(NN)", state, tensor);
}

static PyObject *Run_grads(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    int segment;
    if (!PyArg_ParseTuple(args, "i:grads", &segment)) return NULL;
    const om_needs *needs = om_run_needs(self->r);
    const int n = om_model_inputs(self->model->m);
    if (segment < 0 || segment >= needs->n_segments)
        return PyErr_Format(PyExc_ValueError, "segment %d does not exist: there are %d", segment, needs->n_segments);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n; i++) {
        om_tensor t;
        om_block *b;
        if (needs->grad_segment[i] != segment) continue;
        PyObject *x = om_run_grad(self->r, i, &t, &b) == OM_OK ? om_py_export(&t, b) : om_py_error(self->cx);
        if (om_py_list_add(list, x ? Py_BuildValue("(iN)", i, x) : NULL)) Py_CLEAR(list);
    }
    return list;
}

static void State_dealloc(PyObject *o) {
    State *self = (State *)o;
    PyTypeObject *type = Py_TYPE(o);
    om_state_free(self->s);
    Py_XDECREF(self->model);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}

static PyMethodDef Run_methods[] = {
    {"resume", Run_resume, METH_VARARGS, NULL},  {"host_done", Run_host_done, METH_VARARGS, NULL},
    {"outputs", Run_outputs, METH_NOARGS, NULL}, {"state", Run_state, METH_NOARGS, NULL},
    {"grads", Run_grads, METH_VARARGS, NULL},    {0},
};
static PyType_Slot Run_slots[] = {{Py_tp_dealloc, (void *)Run_dealloc}, {Py_tp_methods, Run_methods}, {0}};
PyType_Spec om_py_run_spec = {"ortmodule._C.Run", sizeof(Run), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Run_slots};

static PyMethodDef State_methods[] = {
    {"backward", (PyCFunction)(void (*)(void))State_backward, METH_VARARGS | METH_KEYWORDS, NULL}, {0}};
static PyType_Slot State_slots[] = {{Py_tp_dealloc, (void *)State_dealloc}, {Py_tp_methods, State_methods}, {0}};
PyType_Spec om_py_state_spec = {"ortmodule._C.State", sizeof(State), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, State_slots};
