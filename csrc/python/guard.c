/* guard.c - what a capture depends on, in C because it is asked at every step (ortmodule/guard.py, ortmodule/watch/).
 *
 * guard_hash   the dictionaries of a module tree, and the classes of its modules, as one number: changes when an entry
 *              does.
 * guard_check  a table of things the user's code has read while it was captured: the first that is no longer what it
 *              was.
 * watch_calls  while a capture runs: a profile function of this thread that tells which code was entered. It is set
 *              through PyEval_SetProfile, because sys.setprofile builds the locals of every frame of torch that runs;
 *              that function is not part of the limited API, but has had one signature since Python 2 and is looked up
 *              at run time.
 * attributes_asked  while a capture runs: a __getattribute__ of a class that tells when one of some names is asked for.
 *
 * Only one thread watches at a time (watch/ holds a lock), so what it has met lies in static tables.
 */
#include "python/pymodule.h"

#include <dlfcn.h>
#include <stdlib.h>

/* --- guard_hash ---------------------------------------------------------------------------------- */

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
        int over = 0; /* hash(-1) == hash(-2), hash(8) == hash(2 ** 64) */
        Py_hash_t x = PyLong_CheckExact(v) ? (Py_hash_t)PyLong_AsLongLongAndOverflow(v, &over) : PyObject_Hash(v);
        if (over) x = (Py_hash_t)(uintptr_t)v;
        if (x == -1 && PyErr_Occurred()) return -1; /* 1 and True hash alike: the type counts */
        *h = mix(mix(*h, (uint64_t)x), (uint64_t)(uintptr_t)Py_TYPE(v));
    } else if (PyTuple_CheckExact(v) && depth < 4) {
        Py_ssize_t n = PyTuple_Size(v);
        *h = mix(*h, (uint64_t)n + 77);
        for (Py_ssize_t i = 0; i < n; i++)
            if (hash_value(PyTuple_GetItem(v, i), h, depth + 1)) return -1;
    } else { /* a tensor may be given another class */
        *h = mix(mix(*h, (uint64_t)(uintptr_t)v), (uint64_t)(uintptr_t)Py_TYPE(v));
    }
    return 0;
}

static PyObject *py_guard_hash(PyObject *self, PyObject *dicts) {
    (void)self;
    bool list = PyList_Check(dicts);
    if (!list && !PyTuple_Check(dicts))
        return PyErr_Format(PyExc_TypeError, "guard_hash: a list or tuple of dictionaries is needed");
    Py_ssize_t n = list ? PyList_Size(dicts) : PyTuple_Size(dicts);
    uint64_t h = 0x243f6a8885a308d3ull;
    PyObject *passed = NULL; /* keys of the next dictionary that do not count */
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *d = list ? PyList_GetItem(dicts, i) : PyTuple_GetItem(dicts, i), *key, *value;
        if (d && PyTuple_CheckExact(d)) { /* objects: their classes count, and which dictionaries they have */
            for (Py_ssize_t k = 0, m = PyTuple_Size(d); k < m; k++) {
                PyObject *object = PyTuple_GetItem(d, k), *own = PyObject_GenericGetDict(object, NULL);
                if (!own) PyErr_Clear();
                h = mix(mix(h, (uint64_t)(uintptr_t)Py_TYPE(object)), (uint64_t)(uintptr_t)own);
                Py_XDECREF(own); /* the object holds it */
            }
            continue;
        }
        if (d && PyFrozenSet_CheckExact(d)) {
            passed = d;
            continue;
        }
        if (!d || !PyDict_Check(d)) return PyErr_Format(PyExc_TypeError, "guard_hash: item %zd is not a dictionary", i);
        Py_ssize_t pos = 0;
        uint64_t counted = 0;
        while (PyDict_Next(d, &pos, &key, &value)) {
            const int pass = passed ? PySet_Contains(passed, key) : 0;
            if (pass < 0) return NULL;
            if (pass) continue;
            h = mix(h, (uint64_t)(uintptr_t)key);
            if (hash_value(value, &h, 0)) return NULL;
            counted++;
        }
        h = mix(h, counted);
        passed = NULL;
    }
    return PyLong_FromLongLong((long long)(h >> 1));
}

/* --- guard_check --------------------------------------------------------------------------------- */

/* A table is a flat tuple of rows (kind, holder, key, value), kinds as in watch/table.py:
 *   0 item      dictionary[key] is value
 *   1 no item   the dictionary has no such key
 *   2 attribute holder.key is value (slots, contents of a cell)
 *   3 mapped    mapping[key] is value (a mapping that is no dictionary; the dictionary of a class is one, behind its
 *               mappingproxy)
 *   4 unmapped  the mapping has no such key
 *   5 list      the elements are those of the tuple `value`
 *   6 dict      keys and values, in order, are those of the tuple `value` (key, value, key, value, ...)
 *   7 sequence  iterating gives the elements of the tuple (deque and other kinds that are no list)
 *   8 memory    the bytes of the array `holder`, asked for by `key` (__array_struct__), are `value`
 *   9 call      key() gives value
 *  10 functions the functions of the tuple `holder` have the code, defaults and keyword defaults of `value`, three each
 *  11 class     holder is an object of the class value
 *  12 own       the dictionary of holder's attributes is value
 *  13 no attribute  holder has none of the name `key` (a slot that is not set, an empty cell)
 * "is" means: the same object, or equal plain values of the same type (floats and complex numbers by their bits, so
 * that -0.0 and NaN count). */
enum {
    ITEM, NO_ITEM, ATTRIBUTE, MAPPED, UNMAPPED, LIST, DICT, SEQUENCE, MEMORY, CALL, FUNCTIONS, CLASS, OWN, NO_ATTRIBUTE
};

static int same(PyObject *a, PyObject *b, int depth) { /* 1, 0, -1: error */
    if (a == b) return 1;
    if (!a || !b || Py_TYPE(a) != Py_TYPE(b)) return 0;
    if (PyFloat_CheckExact(a)) {
        double x = PyFloat_AsDouble(a), y = PyFloat_AsDouble(b);
        return !memcmp(&x, &y, sizeof x);
    }
    if (PyLong_CheckExact(a) || PyUnicode_CheckExact(a) || PyBytes_CheckExact(a))
        return PyObject_RichCompareBool(a, b, Py_EQ);
    if (PyTuple_CheckExact(a) && depth < 8) {
        Py_ssize_t n = PyTuple_Size(a);
        if (n != PyTuple_Size(b)) return 0;
        for (Py_ssize_t i = 0; i < n; i++) {
            int r = same(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i), depth + 1);
            if (r != 1) return r;
        }
        return 1;
    }
    if (PyComplex_CheckExact(a)) {
        double x[] = {PyComplex_RealAsDouble(a), PyComplex_ImagAsDouble(a)};
        double y[] = {PyComplex_RealAsDouble(b), PyComplex_ImagAsDouble(b)};
        return !memcmp(x, y, sizeof x);
    }
    return 0;
}

static int found(PyObject *now) { /* what a look-up gave; its exception is an answer: no (an interrupt is none: -1) */
    if (now) return 1;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

static int same_owned(PyObject *now, PyObject *value) { /* takes `now` */
    int r = found(now);
    if (r != 1) return r;
    r = same(now, value, 0);
    Py_DECREF(now);
    return r;
}

static int same_dict(PyObject *d, PyObject *value) {
    if (!PyDict_Check(d) || 2 * PyDict_Size(d) != PyTuple_Size(value)) return 0;
    PyObject *k, *v;
    Py_ssize_t pos = 0, i = 0;
    while (PyDict_Next(d, &pos, &k, &v)) {
        int r = same(k, PyTuple_GetItem(value, i), 0);
        if (r == 1) r = same(v, PyTuple_GetItem(value, i + 1), 0);
        if (r != 1) return r;
        i += 2;
    }
    return 1;
}

static int same_list(PyObject *list, PyObject *value) {
    if (!PyList_Check(list) || PyList_Size(list) != PyTuple_Size(value)) return 0;
    for (Py_ssize_t i = 0, n = PyList_Size(list); i < n; i++) {
        int r = same(PyList_GetItem(list, i), PyTuple_GetItem(value, i), 0);
        if (r != 1) return r;
    }
    return 1;
}

static int same_sequence(PyObject *seq, PyObject *value) {
    PyObject *now = PySequence_Tuple(seq);
    return same_owned(now, value);
}

/* What numpy's __array_struct__ points at (its array interface, version 3). */
typedef struct array_struct {
    int two, rank;
    char kind;
    int itemsize, flags;
    intptr_t *dim, *stride;
    void *data;
} array_struct;

/* An array's bytes, where they lie now: it may have been given other memory, or another size. */
static int same_memory(PyObject *array, PyObject *name, PyObject *value) {
    enum { CONTIGUOUS = 1 };
    char *bytes;
    Py_ssize_t n;
    if (PyBytes_AsStringAndSize(value, &bytes, &n)) return -1;
    PyObject *now = PyObject_GetAttr(array, name);
    int r = found(now);
    if (r != 1) return r;
    const array_struct *a = PyCapsule_GetPointer(now, NULL);
    r = a ? a->two == 2 && a->flags & CONTIGUOUS : -1;
    if (r == 1) {
        Py_ssize_t size = a->itemsize;
        for (int i = 0; i < a->rank; i++) size *= a->dim[i];
        r = size == n && !memcmp(a->data, bytes, (size_t)n);
    }
    Py_DECREF(now);
    return r;
}

/* Not part of the limited API, but as it is since Python 2; what is not found is asked for by name. */
static PyObject *(*function_get[3])(PyObject *function);
static const char *const function_has[3] = {"__code__", "__defaults__", "__kwdefaults__"};

static int same_functions(PyObject *functions, PyObject *value) {
    static bool looked;
    if (!looked) {
        *(void **)&function_get[0] = dlsym(RTLD_DEFAULT, "PyFunction_GetCode");
        *(void **)&function_get[1] = dlsym(RTLD_DEFAULT, "PyFunction_GetDefaults");
        *(void **)&function_get[2] = dlsym(RTLD_DEFAULT, "PyFunction_GetKwDefaults");
        looked = true;
    }
    if (!PyTuple_CheckExact(functions) || !PyTuple_CheckExact(value)) return 0;
    Py_ssize_t n = PyTuple_Size(functions);
    if (PyTuple_Size(value) != 3 * n) return 0;
    for (Py_ssize_t i = 0; i < 3 * n; i++) {
        PyObject *f = PyTuple_GetItem(functions, i / 3), *now;
        if (function_get[i % 3]) now = function_get[i % 3](f);
        else if ((now = PyObject_GetAttrString(f, function_has[i % 3]))) Py_DECREF(now); /* the function holds it */
        if (!now && PyErr_Occurred()) return -1; /* it is no function */
        if ((now ? now : Py_None) != PyTuple_GetItem(value, i)) return 0;
    }
    return 1;
}

static int no_attribute(PyObject *now) { /* takes `now` */
    int r = found(now);
    Py_XDECREF(now);
    return r < 0 ? r : !r;
}

static int row_holds(long kind, PyObject *holder, PyObject *key, PyObject *value) {
    switch (kind) {
    case ITEM: return same(PyDict_GetItemWithError(holder, key), value, 0);
    case NO_ITEM: return PyDict_GetItemWithError(holder, key) ? 0 : PyErr_Occurred() ? -1 : 1;
    case ATTRIBUTE: return same_owned(PyObject_GetAttr(holder, key), value);
    case MAPPED: return same_owned(PyObject_GetItem(holder, key), value);
    case UNMAPPED: return !PySequence_Contains(holder, key);
    case LIST: return same_list(holder, value);
    case DICT: return same_dict(holder, value);
    case SEQUENCE: return same_sequence(holder, value);
    case MEMORY: return same_memory(holder, key, value);
    case CALL: return same_owned(PyObject_CallNoArgs(key), value);
    case FUNCTIONS: return same_functions(holder, value);
    case CLASS: return (PyObject *)Py_TYPE(holder) == value;
    case OWN: return same_owned(PyObject_GenericGetDict(holder, NULL), value);
    case NO_ATTRIBUTE: return no_attribute(PyObject_GetAttr(holder, key));
    default: PyErr_Format(PyExc_ValueError, "guard_check: kind %ld", kind); return -1;
    }
}

static PyObject *py_guard_check(PyObject *self, PyObject *table) {
    (void)self;
    if (!PyTuple_CheckExact(table) || PyTuple_Size(table) % 4)
        return PyErr_Format(PyExc_TypeError, "guard_check: a tuple of rows of 4 is needed");
    Py_ssize_t n = PyTuple_Size(table);
    PyObject *number = NULL; /* the last kind: rows of one kind come after each other */
    long kind = 0;
    for (Py_ssize_t i = 0; i < n; i += 4) {
        PyObject *now = PyTuple_GetItem(table, i), *holder = PyTuple_GetItem(table, i + 1);
        if (now != number) number = now, kind = PyLong_AsLong(now);
        if (kind >= LIST && kind <= SEQUENCE && !PyTuple_CheckExact(PyTuple_GetItem(table, i + 3)))
            return PyErr_Format(PyExc_TypeError, "guard_check: row %zd needs a tuple", i / 4);
        int r = row_holds(kind, holder, PyTuple_GetItem(table, i + 2), PyTuple_GetItem(table, i + 3));
        if (r == 1) continue; /* without an error: every kind of row answers 0 or -1 then */
        if (kind >= ITEM && kind <= NO_ITEM && !PyDict_Check(holder)) {
            PyErr_Clear();
            return PyErr_Format(PyExc_TypeError, "guard_check: row %zd needs a dictionary", i / 4);
        }
        if (r < 0 || PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* an interrupt is the user's */
            /* a comparison of the user's that fails: not the same */
            PyErr_Clear();
            r = 0;
        }
        if (!r) return PyLong_FromSsize_t(i / 4);
    }
    return PyLong_FromLong(-1);
}

/* --- watch_calls --------------------------------------------------------------------------------- */

/* address -> 1..255; open addressing */
typedef struct ptr_map { void **key; unsigned char *value; size_t cap, n; } ptr_map;

static unsigned char *ptr_find(const ptr_map *m, const void *p) {
    if (!m->cap) return NULL;
    for (size_t i = mix(17, (uint64_t)(uintptr_t)p) & (m->cap - 1);; i = (i + 1) & (m->cap - 1)) {
        if (m->key[i] == p) return &m->value[i];
        if (!m->key[i]) return NULL;
    }
}

static int ptr_put(ptr_map *m, void *p, unsigned char value) {
    if (2 * (m->n + 1) > m->cap) {
        ptr_map wide = {.cap = m->cap ? 2 * m->cap : 1024};
        wide.key = calloc(wide.cap, sizeof *wide.key);
        wide.value = calloc(wide.cap, 1);
        if (!wide.key || !wide.value) {
            free(wide.key), free(wide.value);
            PyErr_NoMemory();
            return -1;
        }
        for (size_t i = 0; i < m->cap; i++)
            if (m->key[i]) ptr_put(&wide, m->key[i], m->value[i]);
        free(m->key), free(m->value);
        *m = wide;
    }
    size_t i = mix(17, (uint64_t)(uintptr_t)p) & (m->cap - 1);
    while (m->key[i] && m->key[i] != p) i = (i + 1) & (m->cap - 1);
    m->n += !m->key[i];
    m->key[i] = p, m->value[i] = value;
    return 0;
}

static void ptr_free(ptr_map *m) {
    free(m->key), free(m->value);
    *m = (ptr_map){0};
}

typedef int profile_fn(PyObject *obj, PyFrameObject *frame, int what, PyObject *arg);
static void (*set_profile)(profile_fn *fn, PyObject *obj);
enum { CALLED = 0, C_CALLED = 4 };           /* PyTrace_CALL, PyTrace_C_CALL */
enum { ENTERED = 1, CALLS = 2, KNOWN = 4 };  /* of code: tell its entry, what it calls in C; choose was asked */

static struct {
    ptr_map codes, functions;
    PyObject *met;                       /* the code objects in `codes`, alive */
    PyObject *choose, *called, *c_called;
    PyObject *types;                     /* builtin methods of objects of these types are told too */
} watch;

/* Of the frame's code, ENTERED | CALLS, and the code (new); -1: an exception. */
static int watched(PyFrameObject *frame, PyObject **code) {
    *code = (PyObject *)PyFrame_GetCode(frame);
    const unsigned char *known = ptr_find(&watch.codes, *code);
    if (known) return *known;
    PyObject *said = PyObject_CallFunctionObjArgs(watch.choose, *code, NULL);
    long kind = said ? PyLong_AsLong(said) : -1;
    Py_XDECREF(said);
    if (kind >= 0 && !PyList_Append(watch.met, *code) && !ptr_put(&watch.codes, *code, (unsigned char)(kind | KNOWN)))
        return (int)kind;
    Py_DECREF(*code);
    return -1;
}

static int watch_event(PyObject *obj, PyFrameObject *frame, int what, PyObject *arg) {
    (void)obj;
    PyObject *code, *tell = what == CALLED ? watch.called : watch.c_called;
    if (what == C_CALLED) {
        if (!arg || !PyObject_TypeCheck(arg, &PyCFunction_Type)) return 0;
        bool told = ptr_find(&watch.functions, (void *)(uintptr_t)PyCFunction_GetFunction(arg)) != NULL;
        PyObject *self = told ? NULL : PyCFunction_GetSelf(arg);
        for (Py_ssize_t i = 0, n = PyTuple_Size(watch.types); self && !told && i < n; i++)
            told = PyObject_TypeCheck(self, (PyTypeObject *)PyTuple_GetItem(watch.types, i));
        if (PyErr_Occurred()) PyErr_Clear();
        if (!told) return 0;
    } else if (what != CALLED) {
        return 0;
    }
    int kind = watched(frame, &code);
    if (kind < 0) return -1;
    bool told = kind & (what == CALLED ? ENTERED : CALLS);
    PyObject *r = told ? PyObject_CallFunctionObjArgs(tell, frame, what == CALLED ? code : arg, NULL) : NULL;
    Py_DECREF(code);
    if (told && !r) return -1;
    Py_XDECREF(r);
    return 0;
}

static void watch_clear(void) {
    Py_CLEAR(watch.met);
    Py_CLEAR(watch.choose);
    Py_CLEAR(watch.called);
    Py_CLEAR(watch.c_called);
    Py_CLEAR(watch.types);
    ptr_free(&watch.codes);
    ptr_free(&watch.functions);
}

static PyObject *py_watch_calls(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *choose, *called, *c_called, *functions, *types;
    if (!PyArg_ParseTuple(args, "OOOO!O!", &choose, &called, &c_called, &PyTuple_Type, &functions, &PyTuple_Type,
                          &types))
        return NULL;
    if (!set_profile) *(void **)&set_profile = dlsym(RTLD_DEFAULT, "PyEval_SetProfile");
    if (!set_profile || watch.met)
        return PyErr_Format(PyExc_RuntimeError, "watch_calls: %s",
                            watch.met ? "already watching" : "no PyEval_SetProfile");
    for (Py_ssize_t i = 0, n = PyTuple_Size(types); i < n; i++)
        if (!PyType_Check(PyTuple_GetItem(types, i)))
            return PyErr_Format(PyExc_TypeError, "watch_calls: types must be types");
    for (Py_ssize_t i = 0, n = PyTuple_Size(functions); i < n; i++) {
        PyObject *f = PyTuple_GetItem(functions, i);
        if (PyObject_TypeCheck(f, &PyCFunction_Type) &&
            ptr_put(&watch.functions, (void *)(uintptr_t)PyCFunction_GetFunction(f), 1))
            return NULL;
    }
    watch.met = PyList_New(0);
    if (!watch.met) return NULL;
    Py_INCREF(choose), Py_INCREF(called), Py_INCREF(c_called), Py_INCREF(types);
    watch.choose = choose, watch.called = called, watch.c_called = c_called, watch.types = types;
    set_profile(watch_event, Py_None);
    Py_RETURN_NONE;
}

static PyObject *py_watch_end(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    if (watch.met) set_profile(NULL, NULL);
    watch_clear();
    Py_RETURN_NONE;
}

/* --- attributes_asked ---------------------------------------------------------------------------- */

/* By class; what a class was given last. PyTorch asks a symbolic number for attributes some ten thousand times in a
 * trace: in Python that is a tenth of its time. */
static struct { PyTypeObject *cls; PyObject *names, *ask; unsigned long thread; } asked[4];
enum { ASKED_MAX = (int)(sizeof asked / sizeof *asked) };

static PyObject *asked_get(PyObject *self, PyObject *name) {
    for (int i = 0; i < ASKED_MAX; i++) {
        if (asked[i].cls != Py_TYPE(self)) continue;
        int in = asked[i].thread == PyThread_get_thread_ident() ? PySet_Contains(asked[i].names, name) : 0;
        if (in < 0) return NULL;
        if (in) return PyObject_CallFunctionObjArgs(asked[i].ask, self, name, NULL);
        break;
    }
    return PyObject_GenericGetAttr(self, name);
}

static PyObject *py_attributes_asked(PyObject *self, PyObject *args) {
    static PyMethodDef get = {"__getattribute__", asked_get, METH_O, NULL};
    (void)self;
    PyObject *cls, *names, *ask;
    if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &cls, &names, &ask)) return NULL;
    if (!PyFrozenSet_Check(names)) return PyErr_Format(PyExc_TypeError, "attributes_asked: names must be a frozenset");
    int at = 0;
    while (at < ASKED_MAX && asked[at].cls && asked[at].cls != (PyTypeObject *)cls) at++;
    if (at == ASKED_MAX)
        return PyErr_Format(PyExc_RuntimeError, "attributes_asked: of %d classes at most", ASKED_MAX);
    PyObject *old[] = {(PyObject *)asked[at].cls, asked[at].names, asked[at].ask};
    Py_INCREF(cls), Py_INCREF(names), Py_INCREF(ask);
    asked[at].cls = (PyTypeObject *)cls, asked[at].names = names, asked[at].ask = ask;
    asked[at].thread = PyThread_get_thread_ident();
    for (int i = 0; i < 3; i++) Py_XDECREF(old[i]);
    return PyDescr_NewMethod((PyTypeObject *)cls, &get);
}

PyMethodDef om_guard_methods[] = {
    {"attributes_asked", py_attributes_asked, METH_VARARGS, NULL},
    {"guard_hash", py_guard_hash, METH_O, NULL},
    {"guard_check", py_guard_check, METH_O, NULL},
    {"watch_calls", py_watch_calls, METH_VARARGS, NULL},
    {"watch_end", py_watch_end, METH_NOARGS, NULL},
    {0},
};
