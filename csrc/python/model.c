/* model.c - class Model: loading, what a graph's inputs, outputs and variants are, reports. */
#include "python/pymodule.h"

#include "cuda/device.h"
#include "python/dlpack.h"

#include <stdlib.h>

static PyObject *model_wrap(PyTypeObject *type, om_ctx *cx, om_status s, om_model *m) {
    if (s != OM_OK) {
        om_py_error(cx);
        om_ctx_free(cx);
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Model *self = (Model *)alloc(type, 0);
    if (self) self->m = m, self->cuda = om_cuda_ordinal(cx->device);
    else om_model_free(cx, m);
    om_ctx_free(cx);
    return (PyObject *)self;
}

static bool level_known(int level) {
    if (level >= 0 && level < OM_N_RECOMPUTE) return true;
    PyErr_Format(PyExc_ValueError, "memory_level=%d is not allowed; give 0 or 1", level);
    return false;
}

static PyObject *Model_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
    static char *names[] = {"onnx", "memory_level", "cuda", "all_rows", "all_tokens", NULL};
    const char *data;
    Py_ssize_t size;
    int level = 0, cuda = -1, all_rows = 0, all_tokens = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "y#|iipp:Model", names, &data, &size, &level, &cuda, &all_rows,
                                     &all_tokens) ||
        !level_known(level))
        return NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    om_model *m = NULL;
    om_status s;
    cx->all_rows = all_rows;
    cx->all_tokens = all_tokens;
    Py_BEGIN_ALLOW_THREADS;
    s = cuda < 0 ? OM_OK : om_cuda_use(cx, cuda);
    if (s == OM_OK) s = om_model_load(cx, data, (size_t)size, &m);
    Py_END_ALLOW_THREADS;
    PyObject *self = model_wrap(type, cx, s, m);
    if (self) ((Model *)self)->level = level;
    return self;
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
    return model_wrap(om_py_model_type, cx, s, m);
}

static void Model_dealloc(PyObject *o) {
    Model *self = (Model *)o;
    PyTypeObject *type = Py_TYPE(o);
    om_ctx *cx = om_py_ctx();
    if (cx) {
        om_model_free(cx, self->m);
        om_ctx_free(cx);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}

static const char *role_name(int role) { return role == OM_PARAM ? "param" : role == OM_BUFFER ? "buffer" : "input"; }

static PyObject *Model_inputs(PyObject *o, void *closure) {
    (void)closure;
    const om_model *m = ((Model *)o)->m;
    PyObject *list = PyList_New(om_model_inputs(m));
    for (int i = 0; list && i < om_model_inputs(m); i++) {
        const om_io io = om_model_input(m, i);
        PyObject *row = Py_BuildValue("(sssi)", io.name, role_name(io.role), om_dtype_name(io.dtype), (int)io.rank);
        if (!row || PyList_SetItem(list, i, row)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Model_outputs(PyObject *o, void *closure) {
    (void)closure;
    const om_model *m = ((Model *)o)->m;
    PyObject *list = PyList_New(om_model_outputs(m));
    for (int i = 0; list && i < om_model_outputs(m); i++) {
        const om_io io = om_model_output(m, i);
        PyObject *row = Py_BuildValue("(ssiO)", io.name, om_dtype_name(io.dtype), (int)io.rank,
                                      io.differentiable ? Py_True : Py_False);
        if (!row || PyList_SetItem(list, i, row)) Py_CLEAR(list);
    }
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

static PyObject *Model_host_inputs(PyObject *o, void *closure) {
    (void)closure;
    const om_model *m = ((Model *)o)->m;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < om_model_inputs(m); i++)
        if (om_model_input(m, i).host && om_py_list_add(list, PyLong_FromLong(i))) Py_CLEAR(list);
    return list;
}

static PyObject *Model_random(PyObject *o, void *closure) {
    (void)closure;
    return PyBool_FromLong(om_model_random(((Model *)o)->m));
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
        PyObject *row = Py_BuildValue("{s:s,s:s,s:z,s:z,s:i,s:i,s:i}", "op", n->op->name, "phase",
                                      n->phase == OM_FORWARD    ? "forward"
                                      : n->phase == OM_BACKWARD ? "backward"
                                                                : "update",
                                      "module", sc ? sc->module : NULL, "file", sc ? sc->file : NULL, "line",
                                      sc ? sc->line : 0, "segment", (int)n->segment, "host_index",
                                      n->op->kind == OM_K_HOST ? (int)om_node_int(n, "index", -1) : -1);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row)) Py_CLEAR(list);
    }
    return list;
}

/* 0, or -1 with an error set. *group: NULL for None; free it. */
int om_py_variant_key(Model *self, Py_ssize_t nw, Py_ssize_t na, PyObject *group, int **out) {
    const om_graph *g = om_model_graph(self->m, -1);
    *out = NULL;
    if (nw != (Py_ssize_t)g->inputs.n || na != (Py_ssize_t)g->outputs.n) {
        PyErr_Format(PyExc_ValueError,
                     "variant: %zd wanted flags for %u graph inputs, %zd arriving flags for %u outputs", nw,
                     g->inputs.n, na, g->outputs.n);
        return -1;
    }
    if (group == Py_None) return 0;
    if (PySequence_Size(group) != nw) {
        PyErr_Format(PyExc_ValueError, "variant: group must have one entry per graph input");
        return -1;
    }
    int *grp = *out = calloc((size_t)nw + 1, sizeof *grp);
    if (!grp) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < nw && grp && !PyErr_Occurred(); i++) {
        PyObject *x = PySequence_GetItem(group, i);
        long v = x ? PyLong_AsLong(x) : -1;
        Py_XDECREF(x);
        if (!PyErr_Occurred() && (v < 0 || v > 60000))
            PyErr_Format(PyExc_ValueError, "variant: group numbers go from 0 to 60000");
        grp[i] = (int)v;
    }
    if (!PyErr_Occurred()) return 0;
    free(grp);
    *out = NULL;
    return -1;
}

static PyObject *Model_variant(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    const char *wanted, *arriving;
    Py_ssize_t nw, na;
    PyObject *group = Py_None;
    int level = self->level, *grp;
    if (!PyArg_ParseTuple(args, "y#y#|Oi:variant", &wanted, &nw, &arriving, &na, &group, &level) ||
        !level_known(level) || om_py_variant_key(self, nw, na, group, &grp))
        return NULL;
    om_ctx *cx = om_py_ctx();
    int variant = -1;
    om_status s = OM_NOMEM;
    if (cx) {
        Py_BEGIN_ALLOW_THREADS;
        s = om_model_variant(cx, self->m, (const uint8_t *)wanted, (const uint8_t *)arriving, grp,
                             (om_recompute)level, &variant);
        Py_END_ALLOW_THREADS;
    }
    free(grp);
    if (!cx) return PyErr_NoMemory();
    PyObject *res = s == OM_OK ? PyLong_FromLong(variant) : om_py_error(cx);
    om_ctx_free(cx);
    return res;
}

/* --- memory ------------------------------------------------------------------------------------- */

static PyObject *memory_dict(const om_memory *m) {
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "peak", (long long)m->peak, "released",
                         (long long)m->released, "kept", (long long)m->kept, "workspace",
                         (long long)m->workspace, "outputs", (long long)m->outputs, "gradients",
                         (long long)m->gradients, "loans", (long long)m->loans, "placed", (long long)m->placed);
}

static PyObject *Model_fit(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    const char *wanted, *arriving;
    Py_ssize_t nw, na;
    PyObject *group, *tensors;
    long long bytes;
    double share;
    int *grp;
    if (!PyArg_ParseTuple(args, "y#y#OOLd:fit", &wanted, &nw, &arriving, &na, &group, &tensors, &bytes, &share) ||
        om_py_variant_key(self, nw, na, group, &grp))
        return NULL;
    const int n = om_model_inputs(self->m);
    om_tensor *in = malloc((size_t)(n + 1) * sizeof *in);
    om_ctx *cx = in ? om_py_ctx() : NULL;
    om_fit fit;
    PyObject *res = NULL;
    if (!cx) PyErr_NoMemory();
    if (cx && !om_dl_import_list(tensors, n, in, "tensors")) {
        om_status s;
        Py_BEGIN_ALLOW_THREADS;
        s = om_model_fit(cx, self->m, (const uint8_t *)wanted, (const uint8_t *)arriving, grp, in, bytes, share, &fit);
        Py_END_ALLOW_THREADS;
        res = s != OM_OK ? om_py_error(cx)
                         : Py_BuildValue("{s:i,s:N,s:L,s:L,s:L,s:d,s:d}", "variant", fit.variant, "memory",
                                         memory_dict(&fit.memory), "bytes", (long long)fit.bytes, "most",
                                         (long long)fit.most, "least", (long long)fit.least, "again_us", fit.again_us,
                                         "step_us", fit.step_us);
    }
    om_ctx_free(cx);
    free(in);
    free(grp);
    return res;
}

static PyObject *Model_memory(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    PyObject *tensors;
    int variant;
    if (!PyArg_ParseTuple(args, "iO:memory", &variant, &tensors)) return NULL;
    const int n = om_model_inputs(self->m);
    om_tensor *in = malloc((size_t)(n + 1) * sizeof *in);
    om_ctx *cx = in ? om_py_ctx() : NULL;
    om_memory memory;
    PyObject *res = NULL;
    if (!cx) PyErr_NoMemory();
    if (cx && !om_dl_import_list(tensors, n, in, "tensors"))
        res = om_model_memory(cx, self->m, variant, in, &memory) == OM_OK ? memory_dict(&memory) : om_py_error(cx);
    om_ctx_free(cx);
    free(in);
    return res;
}

/* (part of the gradient, row of the host's table, is backward, inputs that want a gradient) */
static PyObject *host_row(const om_needs_host *h) {
    PyObject *list = PyList_New(0);
    for (int k = 0; list && k < h->n_want; k++)
        if (om_py_list_add(list, PyLong_FromLongLong(h->want[k]))) Py_CLEAR(list);
    return list ? Py_BuildValue("(iiON)", h->part, h->index, h->backward ? Py_True : Py_False, list) : NULL;
}

/* the numbers of what is not 0 */
static PyObject *marked(const uint8_t *mark, int n) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n; i++)
        if (mark[i] && om_py_list_add(list, PyLong_FromLong(i))) Py_CLEAR(list);
    return list;
}

/* om_flow: (terms, {(row, place): term of the gradient of a host node's output}, {graph input: term}, outputs sharing
 * nodes, per output) */
static PyObject *flow_rows(const om_variant *vr) {
    const om_flow *f = &vr->flow;
    PyObject *terms = PyList_New(0), *host = PyDict_New(), *grads = PyDict_New(), *shares = PyList_New(0);
    bool bad = !terms || !host || !grads || !shares;
    for (uint32_t i = 0; i < f->terms.n && !bad; i++)
        bad = om_py_list_add(terms, Py_BuildValue("(III)", (unsigned)f->terms.v[i].kind, (unsigned)f->terms.v[i].a,
                                                  (unsigned)f->terms.v[i].b));
    for (uint32_t i = 0; i < f->host.n && !bad; i++) {
        PyObject *key = Py_BuildValue("(II)", (unsigned)f->host.v[i].row, (unsigned)f->host.v[i].place),
                 *t = PyLong_FromUnsignedLong(f->host.v[i].term);
        bad = !key || !t || PyDict_SetItem(host, key, t);
        Py_XDECREF(key);
        Py_XDECREF(t);
    }
    for (uint32_t i = 0; i < vr->first_grad_in && !bad; i++) {
        PyObject *key = PyLong_FromUnsignedLong(i), *t = PyLong_FromUnsignedLong(f->grads[i]);
        bad = !key || !t || PyDict_SetItem(grads, key, t);
        Py_XDECREF(key);
        Py_XDECREF(t);
    }
    for (uint32_t i = 0; i < vr->g->outputs.n && !bad; i++)
        bad = om_py_list_add(shares, PyLong_FromUnsignedLongLong(f->shares[i]));
    if (!bad) return Py_BuildValue("(NNNN)", terms, host, grads, shares);
    Py_XDECREF(terms);
    Py_XDECREF(host);
    Py_XDECREF(grads);
    Py_XDECREF(shares);
    return NULL;
}

/* (heads whose rows without a label are left out in forward and backward, those where only the backward does) */
static PyObject *sparse_heads(const om_graph *g) {
    int both = 0, back = 0;
    om_dim size;
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        if (om_is(n, cross_entropy_grad))
            back += n->n_in > 6 || om_bounded_axis(g, om_ty(g, om_ins(g, n)[1]), &size) == 0;
        both += om_is(n, cross_entropy) && om_bounded_axis(g, om_ty(g, om_ins(g, n)[0]), &size) == 0;
    }
    return Py_BuildValue("(ii)", both, back > both ? back - both : 0);
}

static PyObject *Model_variant_info(PyObject *o, PyObject *args) {
    Model *self = (Model *)o;
    int variant;
    if (!PyArg_ParseTuple(args, "i:variant_info", &variant) || !graph_or_error(self, variant)) return NULL;
    const om_variant *vr = om_model_variant_at(self->m, variant);
    if (!vr) return PyErr_Format(PyExc_ValueError, "variant %d does not exist", variant);
    const om_needs *needs = &vr->needs;
    const int n_in = om_model_inputs(self->m), n_out = om_model_outputs(self->m);
    PyObject *grads = PyList_New(0), *reads = PyList_New(0), *host = PyList_New(0);
    bool bad = !grads || !reads || !host;
    for (int i = 0; i < n_in && !bad; i++)
        if (needs->grad_segment[i] >= 0) bad = om_py_list_add(grads, Py_BuildValue("(ii)", i, needs->grad_segment[i]));
    for (int i = 0; i < needs->n_reads && !bad; i++)
        bad = om_py_list_add(reads, Py_BuildValue("(ii)", needs->reads[i].segment, needs->reads[i].input));
    for (int i = 0; i < needs->n_host && !bad; i++) bad = om_py_list_add(host, host_row(&needs->host[i]));
    if (!bad)
        return Py_BuildValue("{s:i,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:s,s:d}", "segments", needs->n_segments, "grads",
                             grads, "reads_inputs", marked(needs->reads_input, n_in), "reads_outputs",
                             marked(needs->reads_output, n_out), "reaches", marked(needs->reaches, n_out), "reads",
                             reads, "host_nodes", host, "flow", flow_rows(vr), "sparse_heads",
                             sparse_heads(vr->g), "padding", vr->padding, "ms", vr->ms);
    Py_XDECREF(grads);
    Py_XDECREF(reads);
    Py_XDECREF(host);
    return NULL;
}

/* --- reports ------------------------------------------------------------------------------------ */

static PyObject *plan_largest(const om_plan *p) {
    om_live rows[512];
    int n, call;
    int64_t bytes;
    om_ctx *cx = om_ctx_new(NULL);
    om_status s = cx ? om_plan_peak(cx, p, rows, 512, &n, &call, &bytes) : OM_NOMEM;
    om_ctx_free(cx);
    if (s != OM_OK) return PyErr_NoMemory();
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n; i++) {
        const om_node *node = rows[i].node == OM_NONE ? NULL : &p->g->nodes.v[rows[i].node];
        const om_scope *at = node && node->scope != OM_NONE ? &p->g->scopes.v[node->scope] : NULL;
        PyObject *row = Py_BuildValue(
            "{s:L,s:s,s:s,s:s,s:z,s:i,s:z}", "bytes", (long long)rows[i].size, "class",
            rows[i].scratch                                                ? "scratch"
            : rows[i].where == OM_W_OUTPUT                                 ? "output"
            : rows[i].first < p->n_forward && rows[i].last >= p->n_forward ? "kept for backward"
                                                                           : "temporary",
            "op", node ? node->op->name : "copy", "phase", rows[i].first < p->n_forward ? "forward" : "backward",
            "file", at ? at->file : NULL, "line", at ? at->line : 0, "module", at ? at->module : NULL);
        if (om_py_list_add(list, row)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Model_plan_report(PyObject *o, PyObject *none) {
    (void)none;
    om_plan *plans[512];
    int n = om_model_plans(((Model *)o)->m, plans, 512);
    int most = 0;
    for (int i = 1; i < n; i++)
        if (plans[i]->bytes.arena > plans[most]->bytes.arena) most = i;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n; i++) {
        const om_plan *p = plans[i];
        PyObject *sizes = PyDict_New();
        for (uint32_t k = 0; sizes && k < p->g->syms.n; k++) {
            PyObject *v = PyLong_FromLongLong(p->sym[k]);
            if (!v || PyDict_SetItemString(sizes, p->g->syms.v[k].name, v)) Py_CLEAR(sizes);
            Py_XDECREF(v);
        }
        PyObject *largest = !sizes ? NULL : i == most ? plan_largest(p) : PyList_New(0);
        if (!largest) Py_CLEAR(sizes);
        PyObject *row = sizes
                            ? Py_BuildValue("{s:i,s:N,s:d,s:L,s:{s:L,s:L,s:L},s:i,s:N}", "variant", p->variant, "sizes",
                                            sizes, "plan_ms", p->ms, "arena_bytes", (long long)p->bytes.arena,
                                            "peak_bytes", "activations", (long long)p->bytes.arena, "gradients",
                                            (long long)p->bytes.grads, "outputs", (long long)p->bytes.outputs, "calls",
                                            p->n_calls, "largest", largest)
                            : NULL;
        if (om_py_list_add(list, row)) Py_CLEAR(list);
    }
    for (int i = 0; i < n; i++) om_plan_release(((Model *)o)->m, plans[i]);
    return list;
}

#define KWARGS(f) ((PyCFunction)(void (*)(void))(f))
static PyMethodDef Model_methods[] = {
    {"from_text", Model_from_text, METH_VARARGS | METH_STATIC, NULL},
    {"text", Model_text, METH_VARARGS, NULL},
    {"nodes", Model_nodes, METH_VARARGS, NULL},
    {"variant", Model_variant, METH_VARARGS, NULL},
    {"variant_info", Model_variant_info, METH_VARARGS, NULL},
    {"fit", Model_fit, METH_VARARGS, NULL},
    {"memory", Model_memory, METH_VARARGS, NULL},
    {"clusters", om_py_clusters, METH_VARARGS, NULL},
    {"choose", om_py_choose, METH_VARARGS, NULL},
    {"forward", KWARGS(om_py_forward), METH_VARARGS | METH_KEYWORDS, NULL},
    {"plan_report", Model_plan_report, METH_NOARGS, NULL},
    {"profile", om_py_profile, METH_VARARGS, NULL},
    {"profile_calls", om_py_profile_calls, METH_NOARGS, NULL},
    {"timeline", om_py_timeline, METH_NOARGS, NULL},
    {0},
};
static PyGetSetDef Model_getset[] = {
    {"inputs", Model_inputs, NULL, NULL, NULL},
    {"outputs", Model_outputs, NULL, NULL, NULL},
    {"writes", Model_writes, NULL, NULL, NULL},
    {"host_inputs", Model_host_inputs, NULL, NULL, NULL},
    {"random", Model_random, NULL, NULL, NULL},
    {"load_ms", Model_load_ms, NULL, NULL, NULL},
    {0},
};
static PyType_Slot Model_slots[] = {{Py_tp_new, (void *)Model_new},
                                    {Py_tp_dealloc, (void *)Model_dealloc},
                                    {Py_tp_methods, Model_methods},
                                    {Py_tp_getset, Model_getset},
                                    {0}};
PyType_Spec om_py_model_spec = {"ortmodule._C.Model", sizeof(Model), 0, Py_TPFLAGS_DEFAULT, Model_slots};
