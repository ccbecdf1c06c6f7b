/* run.c - class Run: one forward or one backward in progress, its blocks, and the host's part at yield points. */
#include "python/pymodule.h"

#include "python/dlpack.h"

#include <stdlib.h>

static Run *run_new(Model *model) {
    allocfunc alloc = (allocfunc)PyType_GetSlot(om_py_run_type, Py_tp_alloc);
    Run *self = (Run *)alloc(om_py_run_type, 0);
    if (!self) return NULL;
    Py_INCREF(model);
    self->model = model;
    if (!(self->cx = om_py_ctx())) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->r.cx = self->cx;
    return self;
}

static void run_blocks_free(Run *self) {
    const om_plan *p = self->r.plan;
    if (p) {
        for (uint32_t i = 0; self->output && i < p->g->outputs.n; i++) om_block_put(self->output[i]);
        for (uint32_t i = 0; self->grad && i < p->g->grads.n; i++) om_block_put(self->grad[i]);
        for (uint32_t i = 0; self->loan && i < p->g->outputs.n; i++) om_block_put(self->loan[i]);
    }
    om_block_put(self->arena);
    free(self->output);
    free(self->grad);
    free(self->loan);
    free(self->r.input);
    free(self->r.output);
    free(self->r.loan);
    free(self->r.grad);
    for (void **t = self->temp; t;) {
        void **next = *t;
        om_free(self->cx, t);
        t = next;
    }
    om_plan_release(self->model->m, self->plan);
    self->plan = NULL;
    self->arena = NULL;
    self->output = self->grad = self->loan = NULL;
    self->r.input = self->r.output = self->r.grad = self->r.loan = NULL;
    self->temp = NULL;
}

static void Run_dealloc(PyObject *o) {
    Run *self = (Run *)o;
    PyTypeObject *type = Py_TYPE(o);
    run_blocks_free(self);
    om_free(self->cx, self->profile.rows.v);
    om_ctx_free(self->cx);
    Py_XDECREF(self->held);
    Py_XDECREF(self->model);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}

/* memory tied to the run, 64-byte aligned */
static void *run_temp(Run *self, size_t size) {
    void **t = om_alloc(self->cx, size + 64);
    if (!t) return NULL;
    *t = self->temp;
    self->temp = t;
    return (char *)t + 64;
}

static int run_arrays(Run *self, const om_plan *p) {
    self->r.plan = p;
    self->r.input = calloc(p->g->inputs.n + 1, sizeof(void *));
    self->r.output = calloc(p->g->outputs.n + 1, sizeof(void *));
    self->r.grad = calloc(p->g->grads.n + 1, sizeof(void *));
    self->r.loan = calloc(p->g->outputs.n + 1, sizeof(void *));
    self->loan = calloc(p->g->outputs.n + 1, sizeof *self->loan);
    self->output = calloc(p->g->outputs.n + 1, sizeof *self->output);
    self->grad = calloc(p->g->grads.n + 1, sizeof *self->grad);
    if (self->model->profiling) self->r.profile = &self->profile;
    if (!self->r.input || !self->r.output || !self->r.grad || !self->r.loan || !self->output || !self->grad ||
        !self->loan) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static om_block *block_or_error(int64_t size) {
    om_block *b = om_block_get((size_t)size);
    if (!b) PyErr_Format(PyExc_MemoryError, "out of memory: a block of %lld bytes was asked for", (long long)size);
    return b;
}

static int64_t tensor_bytes(const om_tensor *t) { return om_numel(t) * (int64_t)om_dtype_size(t->dtype); }

PyObject *om_py_forward(PyObject *o, PyObject *args, PyObject *kw) {
    static char *names[] = {"variant", "tensors", "seed", "train", "write", NULL};
    Model *model = (Model *)o;
    int variant, train = 1, write = 1;
    unsigned long long seed = 0;
    PyObject *tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iO|Kpp:forward", names, &variant, &tensors, &seed, &train, &write))
        return NULL;
    const om_variant *vr = om_model_variant_at(model->m, variant);
    if (!vr) return PyErr_Format(PyExc_ValueError, "variant %d does not exist", variant);
    om_tensor small[256], *in = small;
    uint32_t n = vr->first_grad_in;
    if (n > 256 && !(in = malloc(n * sizeof *in))) return PyErr_NoMemory();
    Run *self = run_new(model);
    om_plan *plan = NULL;
    if (!self || om_dl_import_list(tensors, (Py_ssize_t)n, in, "tensors")) goto fail;
    for (uint32_t i = 0; i < n; i++)
        if (in[i].device != -1) {
            PyErr_Format(
                PyExc_ValueError,
                "graph input %u is on device cuda:%d; this build runs on the CPU: move the module and its inputs", i,
                in[i].device);
            goto fail;
        }
    om_status s;
    double before = om_now_ms();
    Py_BEGIN_ALLOW_THREADS;
    s = om_plan_get(self->cx, model->m, variant, in, &plan);
    Py_END_ALLOW_THREADS;
    self->plan = plan;
    if (s != OM_OK) {
        om_py_error(self->cx);
        goto fail;
    }
    double spent = om_now_ms() - before;
    self->plan_ms = plan->ms < spent ? plan->ms : 0; /* longer than this call took: it was cached */
    if (run_arrays(self, plan)) goto fail;
    for (uint32_t i = 0; i < n; i++) self->r.input[i] = in[i].data;
    self->r.seed = seed;
    self->r.skip_writes = !write;
    if (!(self->arena = block_or_error(plan->bytes.arena))) goto fail;
    self->r.arena = self->arena->data;
    *(om_arena_head *)(void *)self->r.arena = (om_arena_head){
        .magic = OM_ARENA_MAGIC, .serial = plan->serial, .seed = seed, .size = plan->bytes.arena};
    for (uint32_t i = 0; i < plan->g->outputs.n; i++) {
        if (!(self->output[i] = block_or_error(tensor_bytes(&plan->output[i])))) goto fail;
        self->r.output[i] = self->output[i]->data;
    }
    self->keep = train;
    if (!(self->held = PySequence_Tuple(tensors))) goto fail;
    if (in != small) free(in);
    return (PyObject *)self;
fail:
    if (in != small) free(in);
    Py_XDECREF(self);
    return NULL;
}

/* The tensor given at backward must lie as planned; if it does not (an expanded gradient, a saved tensor that came back
 * otherwise) it is copied. */
static int backward_input(Run *self, uint32_t i, const om_tensor *t, const char *what) {
    const om_tensor *want = &self->r.plan->input[i];
    if (t->dtype != want->dtype || t->rank != want->rank || memcmp(t->dim, want->dim, want->rank * sizeof *want->dim)) {
        PyErr_Format(PyExc_ValueError, "backward: %s %u has another dtype or shape than in the forward", what, i);
        return -1;
    }
    bool same = true;
    for (int k = 0; k < t->rank; k++) same &= t->dim[k] <= 1 || t->stride[k] == want->stride[k];
    self->r.input[i] = t->data;
    if (same || !om_numel(t)) return 0;
    om_tensor copy = *want;
    int64_t span = 1;
    for (int k = 0; k < copy.rank; k++) span += (copy.dim[k] - 1) * (copy.stride[k] > 0 ? copy.stride[k] : 0);
    if (!(copy.data = run_temp(self, (size_t)span * om_dtype_size(copy.dtype))) ||
        om_copy(self->cx, t, &copy) != OM_OK) {
        om_py_error(self->cx);
        return -1;
    }
    self->r.input[i] = copy.data;
    return 0;
}

/* A saved output that hooks have brought back with other strides is copied. */
static int output_given(Run *self, uint32_t i, const om_tensor *t) {
    om_tensor copy = self->r.plan->output[i];
    if (t->dtype != copy.dtype || t->rank != copy.rank || memcmp(t->dim, copy.dim, copy.rank * sizeof *copy.dim)) {
        PyErr_Format(PyExc_ValueError, "backward: output %u has another dtype or shape than in the forward", i);
        return -1;
    }
    self->r.output[i] = t->data;
    if (om_is_dense(t)) return 0;
    if (!(copy.data = run_temp(self, (size_t)tensor_bytes(&copy))) || om_copy(self->cx, t, &copy) != OM_OK) {
        om_py_error(self->cx);
        return -1;
    }
    self->r.output[i] = copy.data;
    return 0;
}

PyObject *om_py_backward(PyObject *o, PyObject *args, PyObject *kw) {
    static char *names[] = {"variant", "arena", "tensors", "outputs", "grads", "seed", "host", "dropped", NULL};
    Model *model = (Model *)o;
    int variant;
    unsigned long long seed = 0;
    const char *dropped = NULL; /* per user output: nobody else will ever read it */
    Py_ssize_t n_dropped = 0;
    PyObject *arena, *tensors, *outputs, *grads, *host = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iOOOO|KOz#:backward", names, &variant, &arena, &tensors, &outputs,
                                     &grads, &seed, &host, &dropped, &n_dropped))
        return NULL;
    const om_variant *vr = om_model_variant_at(model->m, variant);
    if (!vr) return PyErr_Format(PyExc_ValueError, "variant %d does not exist", variant);
    const om_graph *g = vr->g;
    om_tensor ar, *in = NULL;
    Run *self = NULL;
    if (om_dl_import(arena, &ar)) return NULL;
    om_arena_head head = {0};
    if (ar.dtype == OM_U8 && tensor_bytes(&ar) >= (int64_t)sizeof head) memcpy(&head, ar.data, sizeof head);
    om_plan *plan = head.magic == OM_ARENA_MAGIC && head.size == tensor_bytes(&ar)
                        ? om_model_plan_by_serial(model->m, head.serial)
                        : NULL;
    if (!plan || plan->variant != variant) {
        om_plan_release(model->m, plan);
        return PyErr_Format(PyExc_ValueError, "backward: this is not the state of a forward of this graph and variant "
                                              "(or it is older than the plan cache)");
    }
    if (!(self = run_new(model))) {
        om_plan_release(model->m, plan);
        return NULL;
    }
    self->plan = plan;
    uint32_t n = vr->first_grad_in, n_out = g->outputs.n;
    if (!(in = malloc((n + n_out + n_out + 1) * sizeof *in))) {
        PyErr_NoMemory();
        goto fail;
    }
    om_tensor *out = in + n, *dy = out + n_out;
    if (om_dl_import_list(tensors, (Py_ssize_t)n, in, "tensors") ||
        om_dl_import_list(outputs, (Py_ssize_t)n_out, out, "outputs") ||
        om_dl_import_list(grads, (Py_ssize_t)n_out, dy, "grads") || run_arrays(self, plan))
        goto fail;
    self->backward = true;
    self->r.pc = plan->n_forward;
    self->r.seed = head.seed;
    self->r.arena = ar.data;
    for (uint32_t i = 0; i < n; i++)
        if (in[i].dtype && backward_input(self, i, &in[i], "graph input")) goto fail;
    for (uint32_t i = 0; i < n_out; i++) {
        if (!out[i].dtype) continue;
        if (output_given(self, i, &out[i])) goto fail;
        if (dropped && (Py_ssize_t)i < n_dropped && dropped[i] && self->r.output[i] == out[i].data)
            self->r.loan[i] = out[i].data;
    }
    uint32_t slot = n;
    for (uint32_t i = 0; i < n_out; i++) {
        bool due = vr->arriving[i] && om_is_float(om_ty(g, g->outputs.v[i])->dtype);
        if (due != (dy[i].dtype != OM_NODTYPE)) {
            PyErr_Format(PyExc_ValueError, "backward: the gradient of output %u %s", i,
                         due ? "is missing" : "was not announced for this variant");
            goto fail;
        }
        if (due && backward_input(self, slot++, &dy[i], "gradient of output")) goto fail;
    }
    if (!(self->held = PyTuple_Pack(4, arena, tensors, outputs, grads))) goto fail;
    free(in);
    return (PyObject *)self;
fail:
    free(in);
    Py_XDECREF(self);
    return NULL;
}

/* Blocks of gradients, and of loans that do not overwrite an output, are taken when the first call that writes them is
 * about to run. */
static int run_blocks_take(Run *self, int stop) {
    const om_plan *p = self->r.plan;
    for (uint32_t i = 0; i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        if ((s->where != OM_W_GRAD && s->where != OM_W_LOAN) || s->first >= stop || s->last < self->r.pc) continue;
        om_block **block = s->where == OM_W_GRAD ? &self->grad[s->index] : &self->loan[s->index];
        void **data = s->where == OM_W_GRAD ? &self->r.grad[s->index] : &self->r.loan[s->index];
        if (*data) continue;
        if (!(*block = block_or_error(s->size))) return -1;
        *data = (*block)->data;
    }
    return 0;
}

static void run_loans_return(Run *self) {
    const om_plan *p = self->r.plan;
    for (uint32_t i = 0; i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        if (s->where != OM_W_LOAN || s->last >= self->r.pc || !self->loan[s->index]) continue;
        om_block_put(self->loan[s->index]);
        self->loan[s->index] = NULL;
        self->r.loan[s->index] = NULL;
    }
}

/* What the host gets at a stop: the memory as it lies, or a dense copy where it runs backwards (a flipped view; torch
 * has no such strides). */
static PyObject *host_input(Run *self, om_tensor t) {
    if (!t.dtype) return Py_INCREF(Py_None), Py_None;
    bool backwards = false;
    for (int k = 0; k < t.rank; k++) backwards |= t.stride[k] < 0;
    if (backwards) {
        om_tensor copy = t;
        om_dense_strides(&copy);
        if (!(copy.data = run_temp(self, (size_t)tensor_bytes(&copy))) || om_copy(self->cx, &t, &copy) != OM_OK)
            return om_py_error(self->cx);
        t = copy;
    }
    return om_py_export(&t, t.data, NULL);
}

static PyObject *Run_resume(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    const om_plan *p = self->r.plan;
    int segment = -1;
    if (!PyArg_ParseTuple(args, "|i:resume", &segment)) return NULL;
    if (self->done) return PyErr_Format(PyExc_RuntimeError, "this run failed or was ended; start another");
    if (segment >= p->n_segments)
        return PyErr_Format(PyExc_ValueError, "segment %d does not exist: there are %d", segment, p->n_segments);
    int stop = !self->backward ? p->n_forward : segment < 0 ? p->n_calls : p->seg_end[segment];
    if (self->r.host_pending)
        return PyErr_Format(PyExc_RuntimeError, "the results of a host node are due: call host_done first");
    if (self->backward && run_blocks_take(self, stop)) return NULL;
    om_status s;
    Py_BEGIN_ALLOW_THREADS;
    s = om_run_step(&self->r, stop);
    Py_END_ALLOW_THREADS;
    if (self->backward) run_loans_return(self);
    if (self->r.profile) om_profile_merge(self->cx, &self->model->profile, &self->profile);
    if (s == OM_OK) Py_RETURN_NONE;
    if (s != OM_HOST) {
        self->done = true;
        return om_py_error(self->cx);
    }
    const om_call *c = &p->calls[self->r.host_call];
    const om_node *node = &p->g->nodes.v[c->node];
    PyObject *list = PyList_New(c->n_in);
    for (int i = 0; list && i < c->n_in; i++) {
        PyObject *x = host_input(self, om_run_arg(&self->r, c, i));
        if (!x || PyList_SetItem(list, i, x)) Py_CLEAR(list);
    }
    if (!list) return NULL;
    return Py_BuildValue("(iIN)", (int)om_node_int(node, "index", -1), (unsigned)om_node_int(node, "part", 0), list);
}

static PyObject *Run_host_done(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    PyObject *outs;
    if (!PyArg_ParseTuple(args, "O:host_done", &outs)) return NULL;
    if (!self->r.host_pending) return PyErr_Format(PyExc_RuntimeError, "host_done: no host node is due");
    const om_call *c = &self->r.plan->calls[self->r.host_call];
    const char *name = self->r.plan->g->nodes.v[c->node].op->name;
    om_tensor got[OM_MAX_OUT];
    if (om_dl_import_list(outs, c->n_out, got, "host outputs")) return NULL;
    for (int i = 0; i < c->n_out; i++) {
        om_tensor want = om_run_arg(&self->r, c, c->n_in + i);
        if (!got[i].dtype) { /* None: zeros */
            if (om_numel(&want)) memset(want.data, 0, (size_t)tensor_bytes(&want));
            continue;
        }
        if (got[i].dtype != want.dtype || got[i].rank != want.rank ||
            memcmp(got[i].dim, want.dim, want.rank * sizeof *want.dim))
            return PyErr_Format(
                PyExc_ValueError,
                "%s: output %d came back as %s of rank %d with other sizes than captured (%s of rank %d)", name, i,
                om_dtype_name(got[i].dtype), got[i].rank, om_dtype_name(want.dtype), want.rank);
        if (om_copy(self->cx, &got[i], &want) != OM_OK) return om_py_error(self->cx);
    }
    self->r.pc++;
    self->r.host_pending = false;
    Py_RETURN_NONE;
}

static PyObject *Run_outputs(PyObject *o, PyObject *none) {
    (void)none;
    Run *self = (Run *)o;
    const om_plan *p = self->r.plan;
    if (self->backward || self->r.pc < p->n_forward || self->exported_outputs)
        return PyErr_Format(PyExc_RuntimeError, "outputs: the forward has not ended, or they were taken already");
    PyObject *list = PyList_New((Py_ssize_t)p->g->outputs.n);
    for (uint32_t i = 0; list && i < p->g->outputs.n; i++) {
        om_block *b = self->output[i];
        self->output[i] = NULL;
        PyObject *t = om_py_export(&p->output[i], b->data, b);
        if (!t || PyList_SetItem(list, (Py_ssize_t)i, t)) Py_CLEAR(list);
    }
    self->exported_outputs = true;
    return list;
}

static PyObject *Run_arena(PyObject *o, PyObject *none) {
    (void)none;
    Run *self = (Run *)o;
    const om_plan *p = self->r.plan;
    if (self->backward || self->r.pc < p->n_forward)
        return PyErr_Format(PyExc_RuntimeError, "arena: the forward has not ended");
    om_tensor t = {.dtype = OM_U8,
                   .rank = 1,
                   .dim = {self->keep && p->n_segments && self->arena ? p->bytes.arena : 0},
                   .stride = {1},
                   .device = -1};
    om_block *b = t.dim[0] ? self->arena : om_block_get(0);
    if (!b) return PyErr_NoMemory();
    if (t.dim[0]) self->arena = NULL, self->r.arena = NULL, self->done = true;
    return om_py_export(&t, b->data, b);
}

/* host outputs are copied into the arena: nothing to keep */
static PyObject *Run_host_kept(PyObject *o, PyObject *none) {
    (void)o, (void)none;
    return PyList_New(0);
}

static PyObject *Run_grads(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    const om_plan *p = self->r.plan;
    int segment;
    if (!PyArg_ParseTuple(args, "i:grads", &segment)) return NULL;
    if (!self->backward || segment < 0 || segment >= p->n_segments || self->r.pc < p->seg_end[segment])
        return PyErr_Format(PyExc_RuntimeError, "grads: segment %d has not run", segment);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->g->grads.n; i++) {
        om_block *b = self->grad[i];
        if (p->grad_segment[i] != segment || !b) continue;
        self->grad[i] = NULL;
        PyObject *t = om_py_export(&p->grad[i], b->data, b);
        if (!t || om_py_list_add(list, Py_BuildValue("(IN)", (unsigned)p->g->grads.v[i].input, t))) Py_CLEAR(list);
    }
    return list;
}

static void plan_let_go(PyObject *capsule) {
    Model *model = PyCapsule_GetContext(capsule);
    om_plan_release(model->m, PyCapsule_GetPointer(capsule, "ortmodule.plan"));
    Py_DECREF(model);
}

static PyObject *Run_plan(PyObject *o, PyObject *none) {
    (void)none;
    Run *self = (Run *)o;
    PyObject *capsule = PyCapsule_New(self->plan, "ortmodule.plan", NULL);
    if (!capsule || PyCapsule_SetContext(capsule, self->model) || PyCapsule_SetDestructor(capsule, plan_let_go)) {
        Py_XDECREF(capsule);
        return NULL;
    }
    om_plan_hold(self->model->m, self->plan);
    Py_INCREF(self->model);
    return capsule;
}

static PyObject *Run_plan_ms(PyObject *o, void *closure) {
    (void)closure;
    return PyFloat_FromDouble(((Run *)o)->plan_ms);
}

static PyMethodDef Run_methods[] = {
    {"resume", Run_resume, METH_VARARGS, NULL},      {"host_done", Run_host_done, METH_VARARGS, NULL},
    {"outputs", Run_outputs, METH_NOARGS, NULL},     {"arena", Run_arena, METH_NOARGS, NULL},
    {"host_kept", Run_host_kept, METH_NOARGS, NULL}, {"grads", Run_grads, METH_VARARGS, NULL},
    {"plan", Run_plan, METH_NOARGS, NULL},           {0},
};
static PyGetSetDef Run_getset[] = {{"plan_ms", Run_plan_ms, NULL, NULL, NULL}, {0}};
static PyType_Slot Run_slots[] = {
    {Py_tp_dealloc, (void *)Run_dealloc}, {Py_tp_methods, Run_methods}, {Py_tp_getset, Run_getset}, {0}};
PyType_Spec om_py_run_spec = {"ortmodule._C.Run", sizeof(Run), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Run_slots};
