/* pymodule.c - the Python face of the engine: module ortmodule._C (documented in ortmodule/_C.pyi).
 *
 * abi3, no torch header: tensors come in borrowed and go out as pool blocks through DLPack's exchange API (dlpack.h);
 * threads and BLAS of the process are found by dlsym in the libtorch_cpu that `import torch` has loaded. A missing
 * symbol means the built-in is used. The GIL is released around everything that computes. A Run owns its context,
 * blocks and references; dropping it at any point is safe.
 */
#include "python/pymodule.h"

#include "python/dlpack.h"
#include "python/shim.h"

#include "cuda/device.h"
#include "cpu/blocks.h"
#include "cpu/kernels_isa.h"

#include <dlfcn.h>
#include <stdlib.h>

PyTypeObject *om_py_model_type, *om_py_run_type, *om_py_state_type;

/* --- services from torch ------------------------------------------------------------------------ */

static int32_t (*torch_parallel_for_fn)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);
static int32_t (*torch_num_threads_fn)(uint32_t *);

typedef struct pfor { void (*fn)(void *, int64_t, int64_t); void *arg; } pfor;
static void pfor_call(int64_t begin, int64_t end, void *ctx) {
    const pfor *p = ctx;
    p->fn(p->arg, begin, end);
}
static void services_parallel_for(void *user, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t),
                                  void *arg) {
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
    if (om_torch_open(lib)) {
        om_torch_gemm_fill(lib, &services);
        om_torch_conv_fill(lib, &services);
    }
}

PyObject *om_py_stand_in;
om_ctx *om_py_ctx(void) { return om_ctx_new(&services); }

/* --- errors ------------------------------------------------------------------------------------- */

/* A RuntimeError as PyTorch raises, in whose text tools that lower the batch size find PyTorch's words, and a
 * MemoryError. */
static PyObject *out_of_memory, *out_of_cuda_memory; /* with PyTorch's class of either, and MemoryError */

PyObject *om_py_error(om_ctx *cx) {
    const char *text = cx->message[0] ? cx->message : om_status_text(cx->status);
    const bool cuda = strstr(text, "CUDA");
    if (cx->status == OM_NOMEM)
        PyErr_Format(cuda ? out_of_cuda_memory : out_of_memory, "%s: %s",
                     cuda ? "CUDA out of memory." : "DefaultCPUAllocator: can't allocate memory", text);
    else
        PyErr_SetString(cx->status == OM_INVALID ? PyExc_ValueError : PyExc_RuntimeError, text);
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

PyObject *om_py_export(const om_tensor *t, om_block *block) {
    /* what torch cannot hold makes it throw, and no exception may pass through C */
    bool fits = om_dl_dtype_of(t->dtype).bits != 0;
    for (int i = 0; i < t->rank; i++) fits &= t->stride[i] >= 0 && t->dim[i] >= 0;
    if (!fits) {
        om_block_put(block);
        return PyErr_Format(PyExc_RuntimeError,
                            "a %s value with %d dimensions and these strides cannot be a torch tensor",
                            om_dtype_name(t->dtype), t->rank);
    }
    exported *e = calloc(1, sizeof *e);
    if (!e) {
        om_block_put(block);
        return PyErr_NoMemory();
    }
    e->block = block;
    int cuda = block ? om_cuda_ordinal(block->device) : t->device;
    if (om_py_stand_in) cuda = -1;
    for (int i = 0; i < t->rank; i++) e->dims[i] = t->dim[i], e->dims[OM_RANK + i] = t->stride[i];
    e->m = (om_dl_managed){.version = {1, 0},
                           .deleter = exported_delete,
                           .tensor = {.data = t->data,
                                      .device = {cuda < 0 ? OM_DL_CPU : OM_DL_CUDA, cuda < 0 ? 0 : cuda},
                                      .ndim = t->rank,
                                      .dtype = om_dl_dtype_of(t->dtype),
                                      .shape = e->dims,
                                      .strides = e->dims + OM_RANK}};
    void *out = NULL;
    if (om_dl()->to_py(&e->m, &out)) return NULL;
    return out;
}

int om_py_list_add(PyObject *list, PyObject *item) {
    int r = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return r;
}

/* --- arguments ---------------------------------------------------------------------------------- */

int om_py_count(Py_ssize_t nargs, Py_ssize_t want, const char *usage) {
    if (nargs == want) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments given, expected %s", nargs, usage);
    return -1;
}

int om_py_numbers(PyObject *const *args, double *const *out, int n) {
    for (int i = 0; i < n; i++) {
        *out[i] = PyFloat_AsDouble(args[i]);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

PyObject *om_py_done(om_ctx *cx, om_status s) {
    if (s != OM_OK) om_py_error(cx);
    om_ctx_free(cx);
    if (s != OM_OK) return NULL;
    Py_RETURN_NONE;
}

/* --- module functions --------------------------------------------------------------------------- */

static PyObject *py_isa(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyUnicode_FromString(om_isa_text());
}

static PyObject *py_has_bf16(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyBool_FromLong(om_isa_bf16() & (OM_BF16_DOT | OM_BF16_AMX));
}

static PyObject *py_pool_stats(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    om_pool_stats s = om_pool_state();
    return Py_BuildValue("{s:n,s:n,s:n,s:K,s:K}", "live", (Py_ssize_t)s.live, "free", (Py_ssize_t)s.free, "peak_live",
                         (Py_ssize_t)s.peak_live, "mapped", (unsigned long long)s.mapped, "moved",
                         (unsigned long long)s.moved);
}

static PyObject *py_pool_trim(PyObject *self, PyObject *args) {
    int anew = 1;
    (void)self;
    return PyArg_ParseTuple(args, "|p:pool_trim", &anew) ? PyLong_FromSize_t(om_pool_trim(anew)) : NULL;
}

/* What lives and is of exactly one of these types. In one call: the list of everything has a reference to tuples that
 * other threads are still filling, who would find it (SystemError) if they got to run before it is gone. */
static PyObject *py_living(PyObject *self, PyObject *types) {
    (void)self;
    if (!PyTuple_Check(types)) return PyErr_Format(PyExc_TypeError, "living: a tuple of types is needed");
    const Py_ssize_t n = PyTuple_Size(types);
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *found = gc ? PyList_New(0) : NULL;
    PyObject *all = found ? PyObject_CallMethod(gc, "get_objects", NULL) : NULL;
    bool good = all != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_Size(all); i++) {
        PyObject *x = PyList_GetItem(all, i);
        for (Py_ssize_t k = 0; k < n; k++)
            if ((PyObject *)Py_TYPE(x) == PyTuple_GetItem(types, k)) {
                good = !PyList_Append(found, x);
                break;
            }
    }
    Py_XDECREF(all);
    Py_XDECREF(gc);
    if (good) return found;
    Py_XDECREF(found);
    return NULL;
}

static PyMethodDef module_methods[] = {
    {"isa", py_isa, METH_NOARGS, NULL},
    {"has_bf16", py_has_bf16, METH_NOARGS, NULL},
    {"pool_stats", py_pool_stats, METH_NOARGS, NULL},
    {"pool_trim", py_pool_trim, METH_VARARGS, NULL},
    {"living", py_living, METH_O, NULL},
    {0},
};
static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "ortmodule._C", NULL, -1, module_methods, NULL, NULL, NULL, NULL};

static PyObject *error_class(const char *name, PyObject *base) {
    PyObject *bases = PyTuple_Pack(2, base, PyExc_MemoryError);
    PyObject *made = bases ? PyErr_NewException(name, bases, NULL) : NULL;
    Py_XDECREF(bases);
    return made;
}

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) {
    PyObject *torch = PyImport_ImportModule("torch"); /* its libraries must be mapped before symbols are looked up */
    if (!torch) return NULL;
    PyObject *theirs = PyObject_GetAttrString(torch, "OutOfMemoryError");
    Py_DECREF(torch);
    if (!theirs || om_dl_init()) return NULL;
    services_fill();
    out_of_memory = error_class("ortmodule.OutOfMemoryError", PyExc_RuntimeError);
    out_of_cuda_memory = error_class("ortmodule.CudaOutOfMemoryError", theirs);
    Py_DECREF(theirs);
    if (!out_of_memory || !out_of_cuda_memory) return NULL;
    PyObject *m = PyModule_Create(&module_def);
    om_py_model_type = (PyTypeObject *)PyType_FromSpec(&om_py_model_spec);
    om_py_run_type = (PyTypeObject *)PyType_FromSpec(&om_py_run_spec);
    om_py_state_type = (PyTypeObject *)PyType_FromSpec(&om_py_state_spec);
    if (!m || !om_py_model_type || !om_py_run_type || !om_py_state_type || PyModule_AddFunctions(m, om_optim_methods) ||
        PyModule_AddFunctions(m, om_cuda_methods) || PyModule_AddFunctions(m, om_guard_methods) ||
        PyModule_AddFunctions(m, om_overlap_methods))
        return NULL;
    Py_INCREF(om_py_model_type);
    Py_INCREF(om_py_run_type);
    Py_INCREF(om_py_state_type);
    if (PyModule_AddObject(m, "Model", (PyObject *)om_py_model_type) ||
        PyModule_AddObject(m, "Run", (PyObject *)om_py_run_type) ||
        PyModule_AddObject(m, "State", (PyObject *)om_py_state_type))
        return NULL;
    return m;
}
