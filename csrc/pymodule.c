/* pymodule.c - the Python face of the engine: module ortmodule._C (documented in ortmodule/_C.pyi).
 *
 * abi3, no torch header: tensors come in borrowed and go out as pool blocks through DLPack's exchange API (dlpack.h); threads and BLAS of
 * the process are found by dlsym in the libtorch_cpu that `import torch` has loaded. A missing symbol means the built-in is used.
 * The GIL is released around everything that computes. A Run owns its context, blocks and references; dropping it at any point is safe.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"
#include "kernels_isa.h"
#include "plan.h"
#include "pool.h"

#include <dlfcn.h>
#include <stdlib.h>

extern PyMethodDef om_optim_methods[]; /* pymodule_optim.c */
extern PyMethodDef om_cuda_methods[];  /* pymodule_cuda.c */

/* --- services from torch ------------------------------------------------------------------------ */

static int32_t (*torch_parallel_for_fn)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);
static int32_t (*torch_num_threads_fn)(uint32_t *);

typedef struct pfor { void (*fn)(void *, int64_t, int64_t); void *arg; } pfor;
static void pfor_call(int64_t begin, int64_t end, void *ctx) {
    const pfor *p = ctx;
    p->fn(p->arg, begin, end);
}
static void services_parallel_for(void *user, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg) {
    (void)user;
    pfor p = {fn, arg};
    if (torch_parallel_for_fn(0, n, grain, pfor_call, &p)) fn(arg, 0, n); /* it failed before starting: do it here */
}
static int services_num_threads(void *user) {
    (void)user;
    uint32_t n = 1;
    return torch_num_threads_fn(&n) ? 1 : (int)n;
}

static om_services services;

static void services_fill(void) {
    void *lib = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    if (!lib) return;
    *(void **)&torch_parallel_for_fn = dlsym(lib, "torch_parallel_for");
    *(void **)&torch_num_threads_fn = dlsym(lib, "torch_get_num_threads");
    if (torch_parallel_for_fn && torch_num_threads_fn) {
        services.parallel_for = services_parallel_for;
        services.num_threads = services_num_threads;
    }
    *(void **)&services.sgemm = dlsym(lib, "sgemm_");
    *(void **)&services.dgemm = dlsym(lib, "dgemm_");
}

om_ctx *om_py_ctx(void) { return om_ctx_new(&services); }

/* --- errors ------------------------------------------------------------------------------------- */

PyObject *om_py_error(om_ctx *cx) {
    PyObject *type = cx->status == OM_INVALID ? PyExc_ValueError : cx->status == OM_NOMEM ? PyExc_MemoryError : PyExc_RuntimeError;
    PyErr_SetString(type, cx->message[0] ? cx->message : om_status_text(cx->status));
    om_ctx_clear(cx);
    return NULL;
}

/* --- tensors out -------------------------------------------------------------------------------- */

typedef struct exported { om_dl_managed m; om_block *block; int64_t dims[2 * OM_RANK]; } exported;

static void exported_delete(om_dl_managed *m) {
    exported *e = (exported *)(void *)m;
    om_block_put(e->block);
    free(e);
}

/* A torch tensor over `data`; takes the block (NULL: the memory belongs to somebody else). */
static PyObject *tensor_export(const om_tensor *t, void *data, om_block *block) {
    exported *e = calloc(1, sizeof *e);
    if (!e) {
        om_block_put(block);
        return PyErr_NoMemory();
    }
    e->block = block;
    for (int i = 0; i < t->rank; i++) e->dims[i] = t->dim[i], e->dims[OM_RANK + i] = t->stride[i];
    e->m = (om_dl_managed){.version = {1, 0}, .deleter = exported_delete,
                           .tensor = {.data = data, .device = {OM_DL_CPU, 0}, .ndim = t->rank, .dtype = om_dl_dtype_of(t->dtype),
                                      .shape = e->dims, .strides = e->dims + OM_RANK}};
    void *out = NULL;
    if (om_dl()->to_py(&e->m, &out)) return NULL;
    return out;
}

/* --- Model -------------------------------------------------------------------------------------- */

typedef struct Model { PyObject_HEAD om_model *m; om_profile profile; bool profiling; } Model;
typedef struct Run {
    PyObject_HEAD
    Model *model;
    PyObject *held;            /* the tensors given: alive while addresses are used */
    om_ctx *cx;
    om_run r;
    om_block *arena, **output, **grad;
    void *temp;                /* dense copies of arriving gradients: list of om_alloc'd pointers */
    bool backward, done, exported_outputs, keep;
    double plan_ms;
} Run;
static PyTypeObject *Model_type, *Run_type;

static PyObject *model_wrap(PyTypeObject *type, om_ctx *cx, om_status s, om_model *m) {
    if (s != OM_OK) {
        om_py_error(cx);
        om_ctx_free(cx);
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Model *self = (Model *)alloc(type, 0);
    if (self) self->m = m;
    else om_model_free(cx, m);
    om_ctx_free(cx);
    return (PyObject *)self;
}

static PyObject *Model_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
    static char *names[] = {"onnx", NULL};
    const char *data;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "y#:Model", names, &data, &size)) return NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    om_model *m = NULL;
    om_status s;
    Py_BEGIN_ALLOW_THREADS;
    s = om_model_load(cx, data, (size_t)size, &m);
    Py_END_ALLOW_THREADS;
    return model_wrap(type, cx, s, m);
}

static PyObject *Model_from_text(PyObject *none, PyObject *args) {
    (void)none;
    const char *text;
    if (!PyArg_ParseTuple(args, "s:from_text", &text)) return NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    om_graph *g = NULL;
    om_model *m = NULL;
    om_status s = om_graph_parse(cx, text, &g);
    if (s == OM_OK) s = om_model_from_graph(cx, g, &m);
    return model_wrap(Model_type, cx, s, m);
}

static void Model_dealloc(PyObject *o) {
    Model *self = (Model *)o;
    PyTypeObject *type = Py_TYPE(o);
    om_ctx *cx = om_py_ctx();
    if (cx) {
        om_model_free(cx, self->m);
        om_free(cx, self->profile.rows.v);
        om_ctx_free(cx);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}

static const char *role_name(int role) { return role == OM_PARAM ? "param" : role == OM_BUFFER ? "buffer" : "input"; }

static PyObject *Model_inputs(PyObject *o, void *closure) {
    (void)closure;
    const om_graph *g = om_model_graph(((Model *)o)->m, -1);
    PyObject *list = PyList_New((Py_ssize_t)g->inputs.n);
    for (uint32_t i = 0; list && i < g->inputs.n; i++) {
        const om_value *v = om_val(g, g->inputs.v[i]);
        PyObject *row = Py_BuildValue("(sssi)", v->name ? v->name : "", role_name(v->role), om_dtype_name(v->type.dtype), v->type.rank);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row)) Py_CLEAR(list);
    }
    return list;
}

/* Spreads reach[v] from graph inputs to the float values computed from them through operators with a gradient. */
static void reach_spread(const om_graph *g, uint8_t *reach) {
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        bool d = false;
        for (int k = 0; k < n->n_in && n->op->grad; k++) d |= om_ins(g, n)[k] != OM_NONE && reach[om_ins(g, n)[k]];
        for (int k = 0; k < n->n_out; k++) reach[n->out + (om_id)k] = d && om_is_float(om_ty(g, n->out + (om_id)k)->dtype);
    }
}

static PyObject *Model_outputs(PyObject *o, void *closure) {
    (void)closure;
    const om_graph *g = om_model_graph(((Model *)o)->m, -1);
    uint8_t *diff = calloc(g->values.n + 1, 1); /* some float parameter or input reaches it through operators with a gradient */
    if (!diff) return PyErr_NoMemory();
    for (om_id v = 0; v < g->values.n; v++) {
        const om_value *x = om_val(g, v);
        if (x->input != OM_NONE) diff[v] = om_is_float(x->type.dtype) && x->role != OM_BUFFER;
    }
    reach_spread(g, diff);
    PyObject *list = PyList_New((Py_ssize_t)g->outputs.n);
    for (uint32_t i = 0; list && i < g->outputs.n; i++) {
        const om_value *v = om_val(g, g->outputs.v[i]);
        PyObject *row = Py_BuildValue("(ssiO)", v->name ? v->name : "", om_dtype_name(v->type.dtype), v->type.rank,
                                      diff[g->outputs.v[i]] ? Py_True : Py_False);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row)) Py_CLEAR(list);
    }
    free(diff);
    return list;
}

static PyObject *Model_writes(PyObject *o, void *closure) {
    (void)closure;
    const om_graph *g = om_model_graph(((Model *)o)->m, -1);
    PyObject *list = PyList_New((Py_ssize_t)g->writes.n);
    for (uint32_t i = 0; list && i < g->writes.n; i++)
        if (PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromLong((long)g->writes.v[i].input))) Py_CLEAR(list);
    return list;
}

static PyObject *Model_random(PyObject *o, void *closure) {
    (void)closure;
    const om_graph *g = om_model_graph(((Model *)o)->m, -1);
    for (om_id i = 0; i < g->nodes.n; i++)
        if (g->nodes.v[i].rng && g->nodes.v[i].op->random) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

static PyObject *Model_load_ms(PyObject *o, void *closure) {
    (void)closure;
    return PyFloat_FromDouble(om_model_load_ms(((Model *)o)->m));
}

static PyObject *Model_text(PyObject *o, PyObject *args) {
    int variant = -1;
    if (!PyArg_ParseTuple(args, "|i:text", &variant)) return NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    char *text = NULL;
    om_status s = om_model_text(cx, ((Model *)o)->m, variant, &text);
    PyObject *res = s == OM_OK ? PyUnicode_FromString(text) : om_py_error(cx);
    om_text_free(cx, text);
    om_ctx_free(cx);
    return res;
}

static const om_graph *graph_or_error(Model *self, int variant) {
    const om_graph *g = om_model_graph(self->m, variant);
    if (!g) PyErr_Format(PyExc_ValueError, "variant %d does not exist", variant);
    return g;
}

static PyObject *Model_nodes(PyObject *o, PyObject *args) {
    int variant = -1;
    if (!PyArg_ParseTuple(args, "|i:nodes", &variant)) return NULL;
    const om_graph *g = graph_or_error((Model *)o, variant);
    PyObject *list = g ? PyList_New((Py_ssize_t)g->nodes.n) : NULL;
    for (om_id i = 0; list && i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        const om_scope *sc = n->scope < g->scopes.n ? &g->scopes.v[n->scope] : NULL;
        PyObject *row = Py_BuildValue("{s:s,s:s,s:z,s:z,s:i,s:i,s:i}", "op", n->op->name, "phase", n->phase == OM_FORWARD ? "forward" : "backward",
                                      "module", sc ? sc->module : NULL, "file", sc ? sc->file : NULL, "line", sc ? sc->line : 0, "segment",
                                      (int)n->segment, "host_index", n->op->kind == OM_K_HOST ? (int)om_node_int(n, "index", -1) : -1);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Model_variant(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    const char *wanted, *arriving;
    Py_ssize_t nw, na;
    PyObject *group = Py_None;
    if (!PyArg_ParseTuple(args, "y#y#|O:variant", &wanted, &nw, &arriving, &na, &group)) return NULL;
    const om_graph *g = om_model_graph(self->m, -1);
    if (nw != (Py_ssize_t)g->inputs.n || na != (Py_ssize_t)g->outputs.n)
        return PyErr_Format(PyExc_ValueError, "variant: %zd wanted flags for %u graph inputs, %zd arriving flags for %u outputs", nw, g->inputs.n, na,
                            g->outputs.n);
    int *grp = NULL;
    if (group != Py_None) {
        if (PySequence_Size(group) != nw) return PyErr_Format(PyExc_ValueError, "variant: group must have one entry per graph input");
        if (!(grp = calloc((size_t)nw + 1, sizeof *grp))) return PyErr_NoMemory();
        for (Py_ssize_t i = 0; i < nw; i++) {
            PyObject *x = PySequence_GetItem(group, i);
            long v = x ? PyLong_AsLong(x) : -1;
            Py_XDECREF(x);
            if (PyErr_Occurred() || v < 0 || v > 60000) {
                free(grp);
                return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "variant: group numbers go from 0 to 60000");
            }
            grp[i] = (int)v;
        }
    }
    om_ctx *cx = om_py_ctx();
    int variant = -1;
    om_status s = OM_NOMEM;
    if (cx) {
        Py_BEGIN_ALLOW_THREADS;
        s = om_model_variant(cx, self->m, (const uint8_t *)wanted, (const uint8_t *)arriving, grp, &variant);
        Py_END_ALLOW_THREADS;
    }
    free(grp);
    if (!cx) return PyErr_NoMemory();
    PyObject *res = s == OM_OK ? PyLong_FromLong(variant) : om_py_error(cx);
    om_ctx_free(cx);
    return res;
}

static int list_add(PyObject *list, PyObject *item) { /* takes the item */
    int r = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return r;
}

/* (uid, row of the host's table, is backward, inputs that want a gradient) */
static PyObject *host_row(const om_node *n) {
    const om_attr *want = om_attr_get(n->attr, n->n_attr, "want");
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && want && k < want->n; k++)
        if (list_add(list, PyLong_FromLongLong(want->dims[k]))) Py_CLEAR(list);
    return list ? Py_BuildValue("(iiON)", (int)om_node_int(n, "uid", 0), (int)om_node_int(n, "index", -1), n->phase == OM_FORWARD ? Py_False : Py_True, list) : NULL;
}

static PyObject *Model_variant_info(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    int variant;
    if (!PyArg_ParseTuple(args, "i:variant_info", &variant)) return NULL;
    const om_graph *g = graph_or_error(self, variant);
    if (!g) return NULL;
    const om_variant *vr = om_model_variant_at(self->m, variant);
    PyObject *grads = PyList_New(0), *rin = PyList_New(0), *rout = PyList_New(0), *host = PyList_New(0), *out = PyList_New(0),
             *by = PyList_New(0), *res = NULL;
    om_id *source = calloc(g->values.n + 1, sizeof *source); /* value a chain of views comes from */
    uint8_t *read = calloc(g->values.n + 1, 1);              /* backward reads its memory */
    uint8_t *reach = calloc(g->values.n + 1, 1);             /* depends on a wanted input */
    int bad = !grads || !rin || !rout || !host || !out || !by || !source || !read || !reach;
    for (uint32_t i = 0; i < vr->first_grad_in && !bad; i++)
        reach[g->inputs.v[i]] = vr->wanted[i] && om_is_float(om_ty(g, g->inputs.v[i])->dtype);
    if (!bad) reach_spread(g, reach);
    for (uint32_t i = 0; i < g->outputs.n && !bad; i++)
        if (reach[g->outputs.v[i]]) bad |= list_add(out, PyLong_FromUnsignedLong(i));
    for (om_id v = 0; v < g->values.n && !bad; v++) {
        om_id node = om_val(g, v)->node;
        source[v] = node != OM_NONE && g->nodes.v[node].op->view ? source[om_ins(g, &g->nodes.v[node])[0]] : v;
    }
    for (om_id i = 0; i < g->nodes.n && !bad; i++) {
        const om_node *n = &g->nodes.v[i];
        if (n->op->kind == OM_K_HOST)
            bad |= list_add(host, host_row(n));
        if (n->phase == OM_FORWARD) continue;
        for (int k = 0; k < n->n_in; k++)
            if (om_ins(g, n)[k] != OM_NONE) read[source[om_ins(g, n)[k]]] = 1;
    }
    for (uint32_t i = 0; i < g->grads.n && !bad; i++) {
        om_id v = g->grads.v[i].value;
        if (v == OM_NONE) continue;
        read[source[v]] = 1; /* a gradient that is a forward value or an input is copied in backward */
        om_id node = om_val(g, v)->node;
        int seg = node == OM_NONE || g->nodes.v[node].phase == OM_FORWARD ? 0 : g->nodes.v[node].segment;
        bad |= list_add(grads, Py_BuildValue("(Ii)", (unsigned)g->grads.v[i].input, seg));
    }
    for (uint32_t i = 0; i < vr->first_grad_in && !bad; i++)
        if (read[g->inputs.v[i]]) bad |= list_add(rin, PyLong_FromUnsignedLong(i));
    for (om_id i = 0; i < g->nodes.n && !bad; i++) {
        const om_node *n = &g->nodes.v[i];
        for (int k = 0; k < n->n_in && n->phase != OM_FORWARD; k++) {
            const om_value *v = om_ins(g, n)[k] == OM_NONE ? NULL : om_val(g, source[om_ins(g, n)[k]]);
            if (v && v->input != OM_NONE && v->input < vr->first_grad_in) bad |= list_add(by, Py_BuildValue("(iI)", (int)n->segment, (unsigned)v->input));
        }
    }
    for (uint32_t i = 0; i < g->outputs.n && !bad; i++)
        if (read[source[g->outputs.v[i]]]) bad |= list_add(rout, PyLong_FromUnsignedLong(i));
    if (!bad)
        res = Py_BuildValue("{s:i,s:O,s:O,s:O,s:O,s:O,s:O,s:d}", "segments", vr->n_segments, "grads", grads, "reads_inputs", rin, "reads_outputs", rout,
                            "reaches", out, "reads", by, "host_nodes", host, "ms", vr->ms);
    Py_XDECREF(grads);
    Py_XDECREF(rin);
    Py_XDECREF(rout);
    Py_XDECREF(host);
    Py_XDECREF(out);
    Py_XDECREF(by);
    free(source);
    free(read);
    free(reach);
    return res ? res : PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

/* --- Run ---------------------------------------------------------------------------------------- */

static Run *run_new(Model *model) {
    allocfunc alloc = (allocfunc)PyType_GetSlot(Run_type, Py_tp_alloc);
    Run *self = (Run *)alloc(Run_type, 0);
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
    }
    om_block_put(self->arena);
    free(self->output);
    free(self->grad);
    free(self->r.input);
    free(self->r.output);
    free(self->r.grad);
    for (void **t = self->temp; t;) {
        void **next = *t;
        om_free(self->cx, t);
        t = next;
    }
    self->arena = NULL;
    self->output = self->grad = NULL;
    self->r.input = self->r.output = self->r.grad = NULL;
    self->temp = NULL;
}

static void Run_dealloc(PyObject *o) {
    Run *self = (Run *)o;
    PyTypeObject *type = Py_TYPE(o);
    run_blocks_free(self);
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
    self->output = calloc(p->g->outputs.n + 1, sizeof *self->output);
    self->grad = calloc(p->g->grads.n + 1, sizeof *self->grad);
    if (self->model->profiling) self->r.profile = &self->model->profile;
    if (!self->r.input || !self->r.output || !self->r.grad || !self->output || !self->grad) {
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

static PyObject *Model_forward(PyObject *o, PyObject *args, PyObject *kw) {
    static char *names[] = {"variant", "tensors", "seed", "train", "write", NULL};
    Model *model = (Model *)o;
    int variant, train = 1, write = 1;
    unsigned long long seed = 0;
    PyObject *tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iO|Kpp:forward", names, &variant, &tensors, &seed, &train, &write)) return NULL;
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
            PyErr_Format(PyExc_ValueError, "graph input %u is on device cuda:%d; this build runs on the CPU: move the module and its inputs", i, in[i].device);
            goto fail;
        }
    om_status s;
    double before = om_now_ms();
    Py_BEGIN_ALLOW_THREADS;
    s = om_plan_get(self->cx, model->m, variant, in, &plan);
    Py_END_ALLOW_THREADS;
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
    *(om_arena_head *)(void *)self->r.arena = (om_arena_head){.magic = OM_ARENA_MAGIC, .serial = plan->serial, .seed = seed, .size = plan->bytes.arena};
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

/* The tensor given at backward must lie as planned; if it does not (an expanded gradient, a saved tensor that came back otherwise) it is copied. */
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
    if (!(copy.data = run_temp(self, (size_t)span * om_dtype_size(copy.dtype))) || om_copy(self->cx, t, &copy) != OM_OK) {
        om_py_error(self->cx);
        return -1;
    }
    self->r.input[i] = copy.data;
    return 0;
}

static PyObject *Model_backward(PyObject *o, PyObject *args, PyObject *kw) {
    static char *names[] = {"variant", "arena", "tensors", "outputs", "grads", "seed", "host", NULL};
    Model *model = (Model *)o;
    int variant;
    unsigned long long seed = 0;
    PyObject *arena, *tensors, *outputs, *grads, *host = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iOOOO|KO:backward", names, &variant, &arena, &tensors, &outputs, &grads, &seed, &host)) return NULL;
    const om_variant *vr = om_model_variant_at(model->m, variant);
    if (!vr) return PyErr_Format(PyExc_ValueError, "variant %d does not exist", variant);
    const om_graph *g = vr->g;
    om_tensor ar, *in = NULL;
    Run *self = NULL;
    if (om_dl_import(arena, &ar)) return NULL;
    om_arena_head head = {0};
    if (ar.dtype == OM_U8 && tensor_bytes(&ar) >= (int64_t)sizeof head) memcpy(&head, ar.data, sizeof head);
    om_plan *plan = head.magic == OM_ARENA_MAGIC && head.size == tensor_bytes(&ar) ? om_model_plan_by_serial(model->m, head.serial) : NULL;
    if (!plan || plan->variant != variant)
        return PyErr_Format(PyExc_ValueError, "backward: this is not the state of a forward of this graph and variant (or it is older than the plan cache)");
    uint32_t n = vr->first_grad_in, n_out = g->outputs.n;
    if (!(in = malloc((n + n_out + n_out + 1) * sizeof *in))) return PyErr_NoMemory();
    om_tensor *out = in + n, *dy = out + n_out;
    if (!(self = run_new(model)) || om_dl_import_list(tensors, (Py_ssize_t)n, in, "tensors") || om_dl_import_list(outputs, (Py_ssize_t)n_out, out, "outputs") ||
        om_dl_import_list(grads, (Py_ssize_t)n_out, dy, "grads") || run_arrays(self, plan))
        goto fail;
    self->backward = true;
    self->r.pc = plan->n_forward;
    self->r.seed = head.seed;
    self->r.arena = ar.data;
    for (uint32_t i = 0; i < n; i++)
        if (in[i].dtype && backward_input(self, i, &in[i], "graph input")) goto fail;
    for (uint32_t i = 0; i < n_out; i++) self->r.output[i] = out[i].dtype ? out[i].data : NULL;
    uint32_t slot = n;
    for (uint32_t i = 0; i < n_out; i++) {
        bool due = vr->arriving[i] && om_is_float(om_ty(g, g->outputs.v[i])->dtype);
        if (due != (dy[i].dtype != OM_NODTYPE)) {
            PyErr_Format(PyExc_ValueError, "backward: the gradient of output %u %s", i, due ? "is missing" : "was not announced for this variant");
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

/* Gradient blocks are taken when the first call that writes them is about to run. */
static int run_grads_take(Run *self, int stop) {
    const om_plan *p = self->r.plan;
    for (uint32_t i = 0; i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        if (s->where != OM_W_GRAD || s->first >= stop || s->last < self->r.pc || self->grad[s->index]) continue;
        if (!(self->grad[s->index] = block_or_error(s->size))) return -1;
        self->r.grad[s->index] = self->grad[s->index]->data;
    }
    return 0;
}

static PyObject *Run_resume(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    const om_plan *p = self->r.plan;
    int segment = -1;
    if (!PyArg_ParseTuple(args, "|i:resume", &segment)) return NULL;
    if (self->done) return PyErr_Format(PyExc_RuntimeError, "this run failed or was ended; start another");
    if (segment >= p->n_segments) return PyErr_Format(PyExc_ValueError, "segment %d does not exist: there are %d", segment, p->n_segments);
    int stop = !self->backward ? p->n_forward : segment < 0 ? p->n_calls : p->seg_end[segment];
    if (self->r.host_pending) return PyErr_Format(PyExc_RuntimeError, "the results of a host node are due: call host_done first");
    if (self->backward && run_grads_take(self, stop)) return NULL;
    om_status s;
    Py_BEGIN_ALLOW_THREADS;
    s = om_run_step(&self->r, stop);
    Py_END_ALLOW_THREADS;
    if (s == OM_OK) Py_RETURN_NONE;
    if (s != OM_HOST) {
        self->done = true;
        return om_py_error(self->cx);
    }
    const om_call *c = &p->calls[self->r.host_call];
    const om_node *node = &p->g->nodes.v[c->node];
    PyObject *list = PyList_New(c->n_in);
    for (int i = 0; list && i < c->n_in; i++) {
        om_tensor t = om_run_arg(&self->r, c, i);
        PyObject *x = t.dtype ? tensor_export(&t, t.data, NULL) : (Py_INCREF(Py_None), Py_None);
        if (!x || PyList_SetItem(list, i, x)) Py_CLEAR(list);
    }
    if (!list) return NULL;
    return Py_BuildValue("(iIN)", (int)om_node_int(node, "index", -1), (unsigned)om_node_int(node, "uid", 0), list);
}

static PyObject *Run_host_done(PyObject *o, PyObject *args) {
    Run *self = (Run *)o;
    PyObject *outs;
    if (!PyArg_ParseTuple(args, "O:host_done", &outs)) return NULL;
    if (!self->r.host_pending) return PyErr_Format(PyExc_RuntimeError, "host_done: no host node is due");
    const om_call *c = &self->r.plan->calls[self->r.host_call];
    const char *name = self->r.plan->g->nodes.v[c->node].op->name;
    om_tensor got[64];
    if (om_dl_import_list(outs, c->n_out, got, "host outputs")) return NULL;
    for (int i = 0; i < c->n_out; i++) {
        om_tensor want = om_run_arg(&self->r, c, c->n_in + i);
        if (!got[i].dtype) { /* None: zeros */
            if (om_numel(&want)) memset(want.data, 0, (size_t)tensor_bytes(&want));
            continue;
        }
        if (got[i].dtype != want.dtype || got[i].rank != want.rank || memcmp(got[i].dim, want.dim, want.rank * sizeof *want.dim))
            return PyErr_Format(PyExc_ValueError, "%s: output %d came back as %s of rank %d with other sizes than captured (%s of rank %d)", name, i,
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
        PyObject *t = tensor_export(&p->output[i], b->data, b);
        if (!t || PyList_SetItem(list, (Py_ssize_t)i, t)) Py_CLEAR(list);
    }
    self->exported_outputs = true;
    return list;
}

static PyObject *Run_arena(PyObject *o, PyObject *none) {
    (void)none;
    Run *self = (Run *)o;
    const om_plan *p = self->r.plan;
    if (self->backward || self->r.pc < p->n_forward) return PyErr_Format(PyExc_RuntimeError, "arena: the forward has not ended");
    om_tensor t = {.dtype = OM_U8, .rank = 1, .dim = {self->keep && p->n_segments && self->arena ? p->bytes.arena : 0}, .stride = {1}, .device = -1};
    om_block *b = t.dim[0] ? self->arena : om_block_get(0);
    if (!b) return PyErr_NoMemory();
    if (t.dim[0]) self->arena = NULL, self->r.arena = NULL, self->done = true;
    return tensor_export(&t, b->data, b);
}

static PyObject *Run_host_kept(PyObject *o, PyObject *none) { /* host outputs are copied into the arena: nothing to keep */
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
        PyObject *t = tensor_export(&p->grad[i], b->data, b);
        if (!t || list_add(list, Py_BuildValue("(IN)", (unsigned)p->g->grads.v[i].input, t))) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Run_plan_ms(PyObject *o, void *closure) {
    (void)closure;
    return PyFloat_FromDouble(((Run *)o)->plan_ms);
}

/* --- reports ------------------------------------------------------------------------------------ */

static PyObject *Model_plan_report(PyObject *o, PyObject *none) {
    (void)none;
    const om_plan *plans[512];
    int n = om_model_plans(((Model *)o)->m, plans, 512);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n && i < 512; i++) {
        const om_plan *p = plans[i];
        PyObject *sizes = PyDict_New();
        for (uint32_t k = 0; sizes && k < p->g->syms.n; k++) {
            PyObject *v = PyLong_FromLongLong(p->sym[k]);
            if (!v || PyDict_SetItemString(sizes, p->g->syms.v[k].name, v)) Py_CLEAR(sizes);
            Py_XDECREF(v);
        }
        PyObject *row = sizes ? Py_BuildValue("{s:i,s:N,s:d,s:L,s:{s:L,s:L,s:L},s:i}", "variant", p->variant, "sizes", sizes, "plan_ms", p->ms,
                                              "arena_bytes", (long long)p->bytes.arena, "peak_bytes", "activations", (long long)p->bytes.arena,
                                              "gradients", (long long)p->bytes.grads, "outputs", (long long)p->bytes.outputs, "calls", p->n_calls)
                              : NULL;
        if (list_add(list, row)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Model_profile(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    int on;
    if (!PyArg_ParseTuple(args, "p:profile", &on)) return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < self->profile.rows.n; i++) {
        const struct om_profile_row *r = &self->profile.rows.v[i];
        if (list_add(list, Py_BuildValue("{s:s,s:K,s:d}", "op", r->op, "count", (unsigned long long)r->count, "ms", r->ms))) Py_CLEAR(list);
    }
    self->profile.rows.n = 0;
    self->profiling = on;
    return list;
}

/* --- module functions --------------------------------------------------------------------------- */

static PyObject *py_isa(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyUnicode_FromString(om_isa_text());
}

static PyObject *py_pool_stats(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    om_pool_stats s = om_pool_state();
    return Py_BuildValue("{s:n,s:n,s:n}", "live", (Py_ssize_t)s.live, "free", (Py_ssize_t)s.free, "peak_live", (Py_ssize_t)s.peak_live);
}

static PyObject *py_pool_trim(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromSize_t(om_pool_trim());
}

static uint64_t mix(uint64_t h, uint64_t x) {
    h ^= x;
    h *= 0x9e3779b97f4a7c15ull;
    return h ^ (h >> 29);
}

static int hash_value(PyObject *v, uint64_t *h, int depth) {
    if (v == Py_None) *h = mix(*h, 1);
    else if (PyFloat_CheckExact(v)) { /* by bits: hash(-1.0) == hash(-2.0) */
        double d = PyFloat_AsDouble(v);
        uint64_t x;
        memcpy(&x, &d, sizeof x);
        *h = mix(*h + 2, x);
    } else if (PyLong_CheckExact(v) || PyUnicode_CheckExact(v) || PyBool_Check(v)) {
        int over = 0; /* hash(-1) == hash(-2) */
        Py_hash_t x = PyLong_CheckExact(v) ? (Py_hash_t)PyLong_AsLongLongAndOverflow(v, &over) : PyObject_Hash(v);
        if (over) x = PyObject_Hash(v); /* 1 and True hash alike: the type counts */
        if (x == -1 && PyErr_Occurred()) return -1;
        *h = mix(mix(*h, (uint64_t)x), (uint64_t)(uintptr_t)Py_TYPE(v));
    } else if (PyTuple_CheckExact(v) && depth < 4) {
        Py_ssize_t n = PyTuple_Size(v);
        *h = mix(*h, (uint64_t)n + 77);
        for (Py_ssize_t i = 0; i < n; i++)
            if (hash_value(PyTuple_GetItem(v, i), h, depth + 1)) return -1;
    } else {
        *h = mix(*h, (uint64_t)(uintptr_t)v);
    }
    return 0;
}

static PyObject *py_guard_hash(PyObject *self, PyObject *dicts) {
    (void)self;
    bool list = PyList_Check(dicts);
    if (!list && !PyTuple_Check(dicts)) return PyErr_Format(PyExc_TypeError, "guard_hash: a list or tuple of dictionaries is needed");
    Py_ssize_t n = list ? PyList_Size(dicts) : PyTuple_Size(dicts);
    uint64_t h = 0x243f6a8885a308d3ull;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *d = list ? PyList_GetItem(dicts, i) : PyTuple_GetItem(dicts, i), *key, *value;
        if (!d || !PyDict_Check(d)) return PyErr_Format(PyExc_TypeError, "guard_hash: item %zd is not a dictionary", i);
        Py_ssize_t pos = 0;
        h = mix(h, (uint64_t)PyDict_Size(d));
        while (PyDict_Next(d, &pos, &key, &value)) {
            h = mix(h, (uint64_t)(uintptr_t)key);
            if (hash_value(value, &h, 0)) return NULL;
        }
    }
    return PyLong_FromLongLong((long long)(h >> 1));
}

#define KWARGS(f) ((PyCFunction)(void (*)(void))(f))
static PyMethodDef Model_methods[] = {
    {"from_text", Model_from_text, METH_VARARGS | METH_STATIC, NULL},
    {"text", Model_text, METH_VARARGS, NULL},
    {"nodes", Model_nodes, METH_VARARGS, NULL},
    {"variant", Model_variant, METH_VARARGS, NULL},
    {"variant_info", Model_variant_info, METH_VARARGS, NULL},
    {"forward", KWARGS(Model_forward), METH_VARARGS | METH_KEYWORDS, NULL},
    {"backward", KWARGS(Model_backward), METH_VARARGS | METH_KEYWORDS, NULL},
    {"plan_report", Model_plan_report, METH_NOARGS, NULL},
    {"profile", Model_profile, METH_VARARGS, NULL},
    {0},
};
static PyGetSetDef Model_getset[] = {
    {"inputs", Model_inputs, NULL, NULL, NULL}, {"outputs", Model_outputs, NULL, NULL, NULL}, {"writes", Model_writes, NULL, NULL, NULL},
    {"random", Model_random, NULL, NULL, NULL}, {"load_ms", Model_load_ms, NULL, NULL, NULL}, {0},
};
static PyType_Slot Model_slots[] = {{Py_tp_new, (void *)Model_new}, {Py_tp_dealloc, (void *)Model_dealloc}, {Py_tp_methods, Model_methods},
                                    {Py_tp_getset, Model_getset}, {0}};
static PyType_Spec Model_spec = {"ortmodule._C.Model", sizeof(Model), 0, Py_TPFLAGS_DEFAULT, Model_slots};

static PyMethodDef Run_methods[] = {
    {"resume", Run_resume, METH_VARARGS, NULL},   {"host_done", Run_host_done, METH_VARARGS, NULL}, {"outputs", Run_outputs, METH_NOARGS, NULL},
    {"arena", Run_arena, METH_NOARGS, NULL},      {"host_kept", Run_host_kept, METH_NOARGS, NULL},  {"grads", Run_grads, METH_VARARGS, NULL},
    {0},
};
static PyGetSetDef Run_getset[] = {{"plan_ms", Run_plan_ms, NULL, NULL, NULL}, {0}};
static PyType_Slot Run_slots[] = {{Py_tp_dealloc, (void *)Run_dealloc}, {Py_tp_methods, Run_methods}, {Py_tp_getset, Run_getset}, {0}};
static PyType_Spec Run_spec = {"ortmodule._C.Run", sizeof(Run), 0, Py_TPFLAGS_DEFAULT, Run_slots};

static PyMethodDef module_methods[] = {
    {"isa", py_isa, METH_NOARGS, NULL},
    {"pool_stats", py_pool_stats, METH_NOARGS, NULL},
    {"pool_trim", py_pool_trim, METH_NOARGS, NULL},
    {"guard_hash", py_guard_hash, METH_O, NULL},
    {0},
};
static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "ortmodule._C", NULL, -1, module_methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) {
    PyObject *torch = PyImport_ImportModule("torch"); /* its libraries must be mapped before symbols are looked up */
    if (!torch) return NULL;
    Py_DECREF(torch);
    if (om_dl_init()) return NULL;
    services_fill();
    PyObject *m = PyModule_Create(&module_def);
    Model_type = (PyTypeObject *)PyType_FromSpec(&Model_spec);
    Run_type = (PyTypeObject *)PyType_FromSpec(&Run_spec);
    if (!m || !Model_type || !Run_type || PyModule_AddFunctions(m, om_optim_methods) || PyModule_AddFunctions(m, om_cuda_methods))
        return NULL;
    Py_INCREF(Model_type);
    Py_INCREF(Run_type);
    if (PyModule_AddObject(m, "Model", (PyObject *)Model_type) || PyModule_AddObject(m, "Run", (PyObject *)Run_type)) return NULL;
    return m;
}
