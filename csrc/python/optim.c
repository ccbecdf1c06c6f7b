/* optim.c - Python entry points of the optimizers: adam_step, sgd_step, lamb_step, steps, norm, axpby of
 * ortmodule._C.
 *
 * Each takes parallel lists of tensors (one entry per parameter), borrows their memory through DLPack, releases the GIL
 * and makes one engine call. Step counters are tensors of one element, as torch.optim keeps them: read, counted up and
 * written here, so that a step costs no Python work per parameter. Weights that share memory are updated one after the
 * other, in the order of the list: the list is cut before each weight that overlaps an earlier one, and every piece is
 * an engine call. om_optim_methods is joined to the module's method table by pymodule.c.
 */
#include "python/pymodule.h"

#include "python/dlpack.h"
#include "python/overlap.h"
#include "python/update.h"
#include "optim/list.h"

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

/* om_overlaps of a step's weights. They stay where they are: a list without overlaps is known again by a hash of its
 * addresses, and not sorted in every step. Under the GIL. */
static int overlaps_of_weights(const om_optim_param *ps, Py_ssize_t n, uint8_t **again) {
    static uint64_t known[32];
    static uint32_t next;
    uint64_t h = (uint64_t)n;
    *again = NULL;
    if (n < 2) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const om_tensor *p = &ps[i].p;
        const om_range r = om_range_of(p->data, om_dtype_size(p->dtype), p->rank, p->dim, p->stride, i);
        h = (h ^ r.begin) * 0x9E3779B97F4A7C15u;
        h = (h ^ h >> 29 ^ r.end) * 0xD1B54A32D192ED03u;
    }
    h ^= h >> 32;
    for (int k = 0; k < 32; k++)
        if (known[k] == h) return 0;
    if (om_overlaps(&ps->p, sizeof *ps, n, again)) return -1;
    if (!*again) known[next++ % 32] = h;
    return 0;
}

/* --- steps ----------------------------------------------------------------------------------------- */

/* The lists every step has in common: args = params, grads, m, v, steps, masters, store, seed. v and steps may be
 * NULL. */
typedef struct step_args {
    om_optim_param *ps;
    om_tensor *tmp;   /* ends up holding the counters */
    uint8_t *again;   /* see om_overlaps, of the weights */
    Py_ssize_t n;
    om_optim_store store;
    uint64_t seed;
} step_args;

/* One call of adam_step, sgd_step or lamb_step. */
typedef struct step_call {
    step_args a;
    union { om_adam_cfg adam; om_sgd_cfg sgd; om_lamb_cfg lamb; } c;
    bool keep; /* lamb: gradients */
} step_call;

typedef struct step_kind {
    const char *name, *usage;
    int n_args;
    bool counts;
    int (*read)(step_call *c, PyObject *const *args);
    om_status (*run)(om_ctx *cx, const step_call *c, Py_ssize_t from, Py_ssize_t n);
} step_kind;
enum { STEP_ARGS = 8 + OM_PY_LAMB_N }; /* of the longest */

/* Counter tensors: value + 1 into step; steps_write puts it back when the step is done. */
static int steps_check(PyObject *seq, om_tensor *tmp, Py_ssize_t n) {
    if (om_dl_import_list(seq, n, tmp, "steps")) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        const om_tensor *t = &tmp[i];
        if (om_numel(t) != 1 || t->device != -1 || (t->dtype != OM_F32 && t->dtype != OM_F64 && t->dtype != OM_I64)) {
            PyErr_Format(PyExc_ValueError,
                         "step counter %zd must be a CPU tensor of one float32, float64 or int64 element", i);
            return -1;
        }
    }
    return 0;
}
static void steps_read(const step_args *a, Py_ssize_t from, Py_ssize_t to) {
    for (Py_ssize_t i = from; i < to; i++) {
        const om_tensor *t = &a->tmp[i];
        a->ps[i].step = 1 + (t->dtype == OM_F32   ? *(float *)t->data
                             : t->dtype == OM_F64 ? *(double *)t->data
                                                  : (double)*(int64_t *)t->data);
    }
}
static void steps_write(const step_args *a, Py_ssize_t from, Py_ssize_t to) {
    for (Py_ssize_t i = from; i < to; i++) {
        const om_tensor *t = &a->tmp[i];
        if (t->dtype == OM_F32) *(float *)t->data = (float)a->ps[i].step;
        else if (t->dtype == OM_F64) *(double *)t->data = a->ps[i].step;
        else *(int64_t *)t->data = (int64_t)a->ps[i].step;
    }
}

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
    a->store = (om_optim_store)(st == (int)st ? st : -1);
    a->ps = calloc((size_t)a->n + 1, sizeof *a->ps);
    a->tmp = calloc((size_t)a->n + 1, sizeof *a->tmp);
    if (!a->ps || !a->tmp) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < a->n; i++) a->ps[i].stream = (uint64_t)i + 1;
    if (om_py_params((PyObject *[]){params, grads, m, v, masters}, a->ps, a->n, a->tmp) ||
        overlaps_of_weights(a->ps, a->n, &a->again))
        return -1;
    return steps ? steps_check(steps, a->tmp, a->n) : 0;
}

/* The list in pieces whose weights do not share memory. */
static om_status step_run(om_ctx *cx, const step_kind *kind, const step_call *c) {
    const step_args *a = &c->a;
    for (Py_ssize_t from = 0, to; from < a->n; from = to) {
        for (to = from + 1; to < a->n && !(a->again && a->again[to]);) to++;
        if (kind->counts) steps_read(a, from, to); /* now: a parameter may be in the list twice */
        OM_TRY(kind->run(cx, c, from, to - from));
        if (kind->counts) steps_write(a, from, to);
    }
    return OM_OK;
}

/* Several lists: all of them are looked at before the first moves. */
static PyObject *steps_all(const step_kind *kind, PyObject *const *args, Py_ssize_t n) {
    step_call *c = calloc((size_t)n + 1, sizeof *c);
    om_ctx *cx = NULL;
    PyObject *r = NULL;
    int bad = !c;
    if (bad) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n && !bad; i++) bad = kind->read(&c[i], args + i * kind->n_args);
    if (!bad && (cx = optim_ctx())) {
        om_status s = OM_OK;
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < n; i++)
            for (Py_ssize_t k = 0; (n > 1 || c[i].a.again) && k < c[i].a.n && s == OM_OK; k++)
                s = om_optim_check(cx, kind->name, c[i].a.store, &c[i].a.ps[k], (int)k);
        for (Py_ssize_t i = 0; i < n && s == OM_OK; i++) s = step_run(cx, kind, &c[i]);
        Py_END_ALLOW_THREADS;
        r = om_py_done(cx, s);
    }
    for (Py_ssize_t i = 0; i < n && c; i++) free(c[i].a.ps), free(c[i].a.tmp), free(c[i].a.again);
    free(c);
    return r;
}

static int adam_read(step_call *c, PyObject *const *args) {
    if (om_py_adam(args + 8, &c->c.adam)) return -1;
    return step_args_read(&c->a, args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7]);
}
static om_status adam_run(om_ctx *cx, const step_call *c, Py_ssize_t from, Py_ssize_t n) {
    return om_adam_step(cx, &c->c.adam, c->a.store, c->a.seed, c->a.ps + from, (int)n);
}

static int sgd_read(step_call *c, PyObject *const *args) {
    if (om_py_sgd(args + 6, &c->c.sgd)) return -1;
    if (step_args_read(&c->a, args[0], args[1], args[2], NULL, NULL, args[3], args[4], args[5])) return -1;
    PyObject *const firsts = args[6 + OM_PY_SGD_N];
    const bool list = PyList_Check(firsts);
    if (list && PyList_Size(firsts) != c->a.n) {
        PyErr_Format(PyExc_ValueError, "first has %zd entries, expected %zd", PyList_Size(firsts), c->a.n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < c->a.n; i++) {
        const int first = PyObject_IsTrue(list ? PyList_GetItem(firsts, i) : firsts);
        if (first < 0) return -1;
        c->a.ps[i].step = first ? 1 : 2;
    }
    return 0;
}
static om_status sgd_run(om_ctx *cx, const step_call *c, Py_ssize_t from, Py_ssize_t n) {
    return om_sgd_step(cx, &c->c.sgd, c->a.store, c->a.seed, c->a.ps + from, (int)n);
}

static int lamb_read(step_call *c, PyObject *const *args) {
    if (om_py_lamb(args + 8, &c->c.lamb, &c->keep)) return -1;
    return step_args_read(&c->a, args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7]);
}
static om_status lamb_run(om_ctx *cx, const step_call *c, Py_ssize_t from, Py_ssize_t n) {
    om_lamb_cfg *each = om_alloc(cx, sizeof *each * (size_t)(n + 1));
    if (!each) return OM_NOMEM;
    for (Py_ssize_t i = 0; i < n; i++) each[i] = c->c.lamb;
    const om_status s = om_lamb_step(cx, each, c->a.store, c->a.seed, true, c->keep, c->a.ps + from, (int)n);
    om_free(cx, each);
    return s;
}

#define MOMENTS "params, grads, exp_avgs, exp_avg_sqs, steps, masters, store, seed, "
#define ADAM_USAGE "adam_step(" MOMENTS OM_PY_ADAM ")"
#define SGD_USAGE "sgd_step(params, grads, momentum_buffers, masters, store, seed, " OM_PY_SGD ", first)"
#define LAMB_USAGE "lamb_step(" MOMENTS OM_PY_LAMB ")"
static const step_kind step_adam = {"adam", ADAM_USAGE, 8 + OM_PY_ADAM_N, true, adam_read, adam_run};
static const step_kind step_sgd = {"sgd", SGD_USAGE, 6 + OM_PY_SGD_N + 1, false, sgd_read, sgd_run};
static const step_kind step_lamb = {"lamb", LAMB_USAGE, STEP_ARGS, true, lamb_read, lamb_run};

static PyObject *py_adam_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    return om_py_count(nargs, step_adam.n_args, step_adam.usage) ? NULL : steps_all(&step_adam, args, 1);
}
static PyObject *py_sgd_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    return om_py_count(nargs, step_sgd.n_args, step_sgd.usage) ? NULL : steps_all(&step_sgd, args, 1);
}
static PyObject *py_lamb_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    return om_py_count(nargs, step_lamb.n_args, step_lamb.usage) ? NULL : steps_all(&step_lamb, args, 1);
}

static PyObject *py_steps(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    static const step_kind *const kinds[] = {&step_adam, &step_sgd, &step_lamb};
    const step_kind *kind = NULL;
    (void)self;
    if (om_py_count(nargs, 2, "steps(kernel, calls)")) return NULL;
    for (int i = 0; i < 3 && PyUnicode_Check(args[0]); i++)
        if (!PyUnicode_CompareWithASCIIString(args[0], kinds[i]->name)) kind = kinds[i];
    const Py_ssize_t n = kind && PyList_Check(args[1]) ? PyList_Size(args[1]) : -1;
    PyObject **row = n < 0 ? NULL : calloc((size_t)n * STEP_ARGS + 1, sizeof *row), *r = NULL;
    if (!row)
        return n < 0 ? PyErr_Format(PyExc_ValueError, "steps: kernel %R given; allowed: 'adam', 'sgd', 'lamb', and a "
                                                      "list of the arguments of its calls", args[0])
                     : PyErr_NoMemory();
    bool bad = false;
    for (Py_ssize_t i = 0; i < n && !bad; i++) {
        PyObject *call = PyList_GetItem(args[1], i); /* borrowed, as what it holds */
        bad = !PyTuple_Check(call) || PyTuple_Size(call) != kind->n_args;
        if (bad) PyErr_Format(PyExc_TypeError, "call %zd is not the arguments of %s", i, kind->usage);
        for (int k = 0; k < kind->n_args && !bad; k++) row[i * kind->n_args + k] = PyTuple_GetItem(call, k);
    }
    if (!bad) r = steps_all(kind, row, n);
    free(row);
    return r;
}

/* --- norms, scaled copies -------------------------------------------------------------------------- */

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
    {FAST(adam_step), ADAM_USAGE ": one Adam step over lists of tensors."},
    {FAST(sgd_step), SGD_USAGE ": one SGD step over lists of tensors."},
    {FAST(lamb_step), LAMB_USAGE ": one LAMB step over lists of tensors."},
    {FAST(steps), "steps(kernel, calls): adam_step, sgd_step or lamb_step for each tuple of arguments in a list; all "
                  "are looked at before the first moves."},
    {FAST(norm), "norm(tensors, ord, per_tensor): (norm, finite[, norms]) over all elements of all tensors."},
    {FAST(loss_scale_next),
     "loss_scale_next(scale, good, finite, window, lowest, highest): (scale, good steps) after one more step."},
    {FAST(axpby), "axpby(dst, src, a, b): dst = a * src + b * dst over lists of tensors; src None: in place."},
    {NULL, NULL, 0, NULL},
};
