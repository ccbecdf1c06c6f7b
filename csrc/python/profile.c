/* profile.c - class Model, windows to look in: times of operators and of calls, what lies in memory over a step. */
#include "python/pymodule.h"

#include <stdlib.h>

enum { MAX_ROWS = 512 };

PyObject *om_py_profile(PyObject *o, PyObject *args) {
    om_profile_row rows[MAX_ROWS];
    int on;
    if (!PyArg_ParseTuple(args, "p:profile", &on)) return NULL;
    const int n = om_model_profile(((Model *)o)->m, on, rows, MAX_ROWS);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n && i < MAX_ROWS; i++)
        if (om_py_list_add(list, Py_BuildValue("{s:s,s:K,s:d}", "op", rows[i].op, "count",
                                               (unsigned long long)rows[i].count, "ms", rows[i].ms)))
            Py_CLEAR(list);
    return list;
}

static const char *call_kind(const om_plan *p, const om_call *c) {
    if (c->kind == OM_CALL_HOST) return "host";
    if (c->kind == OM_CALL_RUN) return "run";
    if (c->write != OM_NONE) return "write";
    return c->node == OM_NONE || !p->g->nodes.v[c->node].op->view ? "copy" : "view copy";
}

/* A dict for call i of a plan. */
static PyObject *call_row(const om_plan *p, int i, om_clock clock) {
    const om_call *c = &p->calls[i];
    const om_node *n = c->node == OM_NONE ? NULL : &p->g->nodes.v[c->node];
    const om_scope *at = n && n->scope < p->g->scopes.n ? &p->g->scopes.v[n->scope] : NULL;
    const om_work w = om_call_work(p, c);
    const int out = c->n_out ? c->n_in : 0;
    const bool backward = i >= p->n_forward;
    return Py_BuildValue("{s:s,s:s,s:s,s:i,s:z,s:z,s:i,s:z,s:O,s:s,s:i,s:K,s:d,s:d,s:d}", "kind", call_kind(p, c), "op",
                         n ? n->op->name : "copy", "phase",
                         backward                       ? "backward"
                         : n && n->phase == OM_UPDATE ? "update"
                                                        : "forward",
                         "segment", n ? (int)n->segment : 0, "module", at ? at->module : NULL, "file",
                         at ? at->file : NULL, "line", at ? at->line : 0, "program",
                         n ? om_attr_str(n->attr, n->n_attr, "program", NULL) : NULL, "again",
                         n && n->again && n->phase == OM_BACKWARD ? Py_True : Py_False, "dtype",
                         c->n_in + c->n_out ? om_dtype_name(c->arg[out].t.dtype) : "", "host_index",
                         n && n->op->kind == OM_K_HOST ? (int)om_node_int(n, "index", -1) : -1, "count",
                         (unsigned long long)clock.count, "ms", clock.ms, "flops", w.flops, "bytes", w.bytes);
}

/* clock: NULL: nothing was timed */
static PyObject *call_rows(const om_plan *p, const om_clock *clock) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < p->n_calls; i++)
        if (om_py_list_add(list, call_row(p, i, clock ? clock[i] : (om_clock){0}))) Py_CLEAR(list);
    return list;
}

static PyObject *sizes_dict(const om_plan *p) {
    PyObject *sizes = PyDict_New();
    for (uint32_t k = 0; sizes && k < p->g->syms.n; k++) {
        PyObject *v = PyLong_FromLongLong(p->sym[k]);
        if (!v || PyDict_SetItemString(sizes, p->g->syms.v[k].name, v)) Py_CLEAR(sizes);
        Py_XDECREF(v);
    }
    return sizes;
}

PyObject *om_py_profile_calls(PyObject *o, PyObject *none) {
    om_plan *plans[MAX_ROWS];
    om_model *m = ((Model *)o)->m;
    (void)none;
    const int n = om_model_plans(m, plans, MAX_ROWS);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n; i++) {
        om_clock *clock = malloc((size_t)(plans[i]->n_calls + 1) * sizeof *clock);
        if (!clock) PyErr_NoMemory();
        if (clock && !om_plan_clocks(m, plans[i], clock)) {
            free(clock);
            continue;
        }
        PyObject *sizes = clock ? sizes_dict(plans[i]) : NULL, *calls = sizes ? call_rows(plans[i], clock) : NULL;
        free(clock);
        if (!calls) Py_CLEAR(sizes);
        PyObject *row = calls ? Py_BuildValue("{s:i,s:i,s:N,s:N}", "variant", plans[i]->variant, "threads",
                                              plans[i]->threads, "sizes", sizes, "calls", calls)
                              : NULL;
        if (om_py_list_add(list, row)) Py_CLEAR(list);
    }
    for (int i = 0; i < n; i++) om_plan_release(m, plans[i]);
    return list;
}

/* (bytes, first call, last call, class, graph output or gradient it belongs to) of what lies in memory for some time */
static PyObject *storage_rows(const om_plan *p, bool apart, om_ctx *cx) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        int64_t size = s->size;
        const char *class = NULL;
        if (s->last < 0 || s->size <= 0) continue;
        const bool kept = s->first < p->n_forward && s->last >= p->n_forward;
        if (s->where == OM_W_ARENA)
            class = kept ? "kept" : p->calls[s->first].scratch == i ? "scratch" : "workspace";
        else if (s->where == OM_W_OUTPUT) class = "output";
        else if (s->where == OM_W_GRAD) class = s->offset >= 0 && !apart ? "placed" : "gradient";
        else if (s->where == OM_W_LOAN) class = "loan";
        if (!class) continue;
        if (s->where != OM_W_ARENA && p->device->block_size) size = (int64_t)p->device->block_size(cx, (size_t)size);
        if (om_py_list_add(list, Py_BuildValue("(Liisi)", (long long)size, (int)s->first, (int)s->last, class,
                                               s->where == OM_W_ARENA ? -1 : (int)s->index)))
            Py_CLEAR(list);
    }
    return list;
}

PyObject *om_py_timeline(PyObject *o, PyObject *none) {
    om_plan *plans[MAX_ROWS], *p = NULL;
    om_model *m = ((Model *)o)->m;
    (void)none;
    const int n = om_model_plans(m, plans, MAX_ROWS);
    for (int i = 0; i < n; i++) /* of those with a backward the one used last */
        if (plans[i]->n_segments && (!p || plans[i]->used > p->used)) p = plans[i];
    PyObject *result = NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) {
        PyErr_NoMemory();
    } else if (!p) {
        result = (Py_INCREF(Py_None), Py_None);
    } else {
        const om_memory memory = om_plan_memory(cx, p);
        PyObject *ends = PyList_New(0), *sizes = sizes_dict(p), *calls = call_rows(p, NULL);
        PyObject *storages = storage_rows(p, !om_model_places(m, p, false), cx);
        for (int i = 0; ends && i < p->n_segments; i++)
            if (om_py_list_add(ends, PyLong_FromLong(p->seg_end[i]))) Py_CLEAR(ends);
        const int64_t arena = memory.kept + memory.workspace;
        if (ends && sizes && calls && storages)
            result = Py_BuildValue("{s:i,s:O,s:i,s:O,s:L,s:L,s:L,s:O,s:O}", "variant", p->variant, "sizes", sizes,
                                   "n_forward", p->n_forward, "segment_ends", ends, "arena", (long long)arena, "peak",
                                   (long long)memory.peak, "released", (long long)memory.released, "calls", calls,
                                   "storages", storages);
        Py_XDECREF(ends);
        Py_XDECREF(sizes);
        Py_XDECREF(calls);
        Py_XDECREF(storages);
    }
    om_ctx_free(cx);
    for (int i = 0; i < n; i++) om_plan_release(m, plans[i]);
    return result;
}
