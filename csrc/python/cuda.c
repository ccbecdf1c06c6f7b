/* cuda.c - Python entry points of the optimizers on CUDA: the cuda_* functions of ortmodule._C (optim/cuda.py is their
 * caller).
 *
 * All take `head` first: device ordinal, stream (address), the table in device memory, spans, chunks. Scalars that may
 * live on the device are one-element float32 tensors there, or None. Nothing reads device memory or waits; the GIL is
 * released around launches.
 */
#include "python/pymodule.h"

#include "cuda/device.h"
#include "cuda/optim_host.h"
#include "python/dlpack.h"
#include "python/update.h"

#include <stdlib.h>

/* --- arguments ------------------------------------------------------------------------------------- */

/* args[0..5): device, stream, table, n_span, n_chunk. *device is where the other tensors must be. */
static int cuda_head(PyObject *const *args, om_gpu_table *t, int16_t *device) {
    om_tensor memory = {0};
    t->ordinal = (int)PyLong_AsLong(args[0]);
    if (!PyErr_Occurred()) t->stream = PyLong_AsVoidPtr(args[1]);
    if (!PyErr_Occurred()) t->n_span = (uint32_t)PyLong_AsUnsignedLong(args[3]);
    if (!PyErr_Occurred()) t->n_chunk = (uint32_t)PyLong_AsUnsignedLong(args[4]);
    if (PyErr_Occurred() || om_dl_import(args[2], &memory)) return -1;
    if (memory.dtype != OM_U8 || !om_is_dense(&memory) || (uintptr_t)memory.data % 16 ||
        (size_t)om_numel(&memory) < om_gpu_table_size(t->n_span, t->n_chunk)) {
        PyErr_SetString(
            PyExc_ValueError,
            "the table must be a dense uint8 tensor, 16-byte aligned, of at least the size cuda_spans returned");
        return -1;
    }
    t->memory = memory.data;
    *device = memory.device;
    return 0;
}

/* What om_gpu_lamb_order wrote; None: LAMB in three launches. */
static int cuda_order(PyObject *arg, int16_t device, om_gpu_table *t) {
    om_tensor memory = {0};
    if (arg == Py_None) return 0;
    if (om_dl_import(arg, &memory)) return -1;
    if (memory.dtype != OM_U8 || !om_is_dense(&memory) || (uintptr_t)memory.data % 16 || memory.device != device ||
        (size_t)om_numel(&memory) < om_gpu_order_size(t->n_span, t->n_chunk)) {
        PyErr_SetString(PyExc_ValueError, "the order must be a dense uint8 tensor on the device, 16-byte aligned, of "
                                          "at least cuda_lamb_order_size bytes");
        return -1;
    }
    t->order = memory.data;
    return 0;
}

/* The address of a one-element float32 tensor on the device; None: NULL. */
static int cuda_scalar(PyObject *arg, int16_t device, const char *what, float **out) {
    om_tensor t = {0};
    *out = NULL;
    if (arg == Py_None) return 0;
    if (om_dl_import(arg, &t)) return -1;
    if (t.dtype != OM_F32 || om_numel(&t) != 1 || t.device != device) {
        PyErr_Format(PyExc_ValueError, "%s must be a float32 tensor of one element on the parameters' device", what);
        return -1;
    }
    *out = t.data;
    return 0;
}

/* args[0..9): head, lr, grad_scale, found_inf, seed */
static int cuda_step_args(PyObject *const *args, om_gpu_table *t, int16_t *device, om_gpu_optim *o) {
    float *lr, *scale, *found;
    if (cuda_head(args, t, device) || cuda_scalar(args[5], *device, "lr", &lr) ||
        cuda_scalar(args[6], *device, "grad_scale", &scale) || cuda_scalar(args[7], *device, "found_inf", &found))
        return -1;
    o->lr = lr, o->grad_scale = scale, o->found_inf = found;
    o->seed = PyLong_AsUnsignedLongLongMask(args[8]);
    return PyErr_Occurred() ? -1 : 0;
}

typedef om_status (*cuda_fn)(om_ctx *, const om_gpu_table *, om_gpu_optim);
static PyObject *cuda_run(cuda_fn fn, const om_gpu_table *t, const om_gpu_optim *o) {
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    om_status s;
    Py_BEGIN_ALLOW_THREADS;
    s = fn(cx, t, *o);
    Py_END_ALLOW_THREADS;
    return om_py_done(cx, s);
}

/* --- tables ------------------------------------------------------------------------------------------ */

/* what the table on the device was made from */
typedef struct image { uint64_t n_span, n_chunk; om_gpu_span span[]; } image;

static PyObject *py_cuda_image_size(PyObject *self, PyObject *n) {
    (void)self;
    const Py_ssize_t count = PyLong_AsSsize_t(n);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromSize_t(sizeof(image) + (size_t)count * sizeof(om_gpu_span));
}

static image *cuda_image(PyObject *arg, Py_ssize_t n) {
    om_tensor t = {0};
    if (om_dl_import(arg, &t)) return NULL;
    if (t.dtype != OM_U8 || t.device != -1 || (size_t)om_numel(&t) < sizeof(image) + (size_t)n * sizeof(om_gpu_span)) {
        PyErr_SetString(PyExc_ValueError,
                        "the image must be a uint8 CPU tensor of at least cuda_image_size(number of parameters) bytes");
        return NULL;
    }
    return t.data;
}

static PyObject *py_cuda_spans(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 10,
                    "cuda_spans(op, image, params, grads, exp_avgs, exp_avg_sqs, masters, steps, store, numbers)"))
        return NULL;
    const Py_ssize_t n = PySequence_Size(args[2]);
    const long store = n < 0 ? 0 : PyLong_AsLong(args[8]);
    PyObject *name = PyErr_Occurred() ? NULL : PyUnicode_AsUTF8String(args[0]);
    image *im = name ? cuda_image(args[1], n) : NULL;
    if (!im || n > INT32_MAX) {
        Py_XDECREF(name);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "more than 2^31 parameters in one list");
    }
    om_optim_param *ps = calloc((size_t)n + 1, sizeof *ps);
    om_tensor *tmp = calloc((size_t)n + 1, sizeof *tmp); /* ends up holding the steps */
    om_gpu_span *span = calloc((size_t)n + 1, sizeof *span);
    uint8_t *odd = calloc((size_t)n + 1, 1);
    om_ctx *cx = om_py_ctx();
    PyObject *r = NULL, *list = NULL;
    bool bad = !ps || !tmp || !span || !odd || !cx;
    if (bad) PyErr_NoMemory();
    if (!bad) bad = om_py_params(args + 2, ps, n, tmp);
    if (!bad && tmp) memset(tmp, 0, (size_t)n * sizeof *tmp);
    if (!bad && args[7] != Py_None) bad = om_dl_import_list(args[7], n, tmp, "steps");
    if (!bad) {
        for (Py_ssize_t i = 0; i < n && !bad; i++) {
            PyObject *number = args[9] == Py_None ? NULL : PySequence_GetItem(args[9], i);
            ps[i].stream = 1 + (number ? PyLong_AsUnsignedLongLongMask(number) : (uint64_t)i);
            Py_XDECREF(number);
            bad = args[9] != Py_None && PyErr_Occurred();
        }
    }
    if (!bad) {
        uint32_t n_span = 0, n_chunk = 0;
        int n_odd = 0;
        const om_status s = om_gpu_spans(cx, PyBytes_AsString(name), (om_optim_store)store, ps, tmp, (int)n, span,
                                         &n_span, &n_chunk, odd, &n_odd);
        if (s != OM_OK) {
            om_py_error(cx);
        } else if ((list = PyList_New(0))) {
            for (Py_ssize_t i = 0; list && i < n; i++) {
                PyObject *index = odd[i] ? PyLong_FromSsize_t(i) : NULL;
                if (odd[i] && (!index || PyList_Append(list, index))) Py_CLEAR(list);
                Py_XDECREF(index);
            }
            const bool changed = im->n_span != n_span || im->n_chunk != n_chunk ||
                                 memcmp(im->span, span, n_span * sizeof *span);
            if (list && !n_odd && changed) {
                im->n_span = n_span, im->n_chunk = n_chunk;
                memcpy(im->span, span, n_span * sizeof *span);
            }
            if (list)
                r = Py_BuildValue("(IInOO)", n_span, n_chunk, (Py_ssize_t)om_gpu_table_size(n_span, n_chunk),
                                  changed ? Py_True : Py_False, list);
        }
    }
    Py_XDECREF(list);
    Py_DECREF(name);
    if (cx) om_ctx_free(cx);
    free(ps), free(tmp), free(span), free(odd);
    return r;
}

static PyObject *py_cuda_upload(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 6, "cuda_upload(device, stream, table, n_span, n_chunk, image)")) return NULL;
    om_gpu_table t = {0};
    int16_t device;
    if (cuda_head(args, &t, &device)) return NULL;
    const image *im = cuda_image(args[5], t.n_span);
    if (!im) return NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    om_status s;
    Py_BEGIN_ALLOW_THREADS;
    s = om_gpu_upload_spans(cx, &t, im->span);
    Py_END_ALLOW_THREADS;
    return om_py_done(cx, s);
}

static PyObject *py_cuda_capturing(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 2, "cuda_capturing(device, stream)")) return NULL;
    const int ordinal = (int)PyLong_AsLong(args[0]);
    void *stream = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]);
    om_ctx *cx = PyErr_Occurred() ? NULL : om_py_ctx();
    if (!cx) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    om_cuda *d;
    bool yes = false;
    om_status s = om_cuda_enter(cx, ordinal, &d);
    if (s == OM_OK) s = om_cuda_leave(cx, d, om_cuda_capturing(cx, d, stream, &yes));
    PyObject *r = s == OM_OK ? PyBool_FromLong(yes) : om_py_error(cx);
    om_ctx_free(cx);
    return r;
}

static PyObject *py_engine_refusal(PyObject *self, PyObject *device) {
    (void)self;
    const int ordinal = (int)PyLong_AsLong(device);
    om_ctx *cx = PyErr_Occurred() ? NULL : om_py_ctx();
    if (!cx) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    const om_status s = om_cuda_use(cx, ordinal);
    PyObject *r = PyUnicode_FromString(s == OM_OK ? "" : cx->message[0] ? cx->message : om_status_text(s));
    om_ctx_free(cx);
    return r;
}

static PyObject *py_cuda_archs(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyUnicode_FromString(!om_cuda_image_size ? "" : om_cuda_archs);
}

/* --- steps ------------------------------------------------------------------------------------------- */

#define HEAD "device, stream, table, n_span, n_chunk"
#define STEP HEAD ", lr_tensor, grad_scale, found_inf, seed"

#define ADAM STEP ", " OM_PY_ADAM
#define SGD STEP ", " OM_PY_SGD
#define LAMB STEP ", " OM_PY_LAMB ", order"
enum { STEP_N = 9 };

static PyObject *py_cuda_adam(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, STEP_N + OM_PY_ADAM_N, "cuda_adam(" ADAM ")")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    int16_t device;
    if (cuda_step_args(args, &t, &device, &o) || om_py_adam(args + STEP_N, &o.adam)) return NULL;
    return cuda_run(om_gpu_adam, &t, &o);
}

static PyObject *py_cuda_sgd(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, STEP_N + OM_PY_SGD_N, "cuda_sgd(" SGD ")")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    int16_t device;
    if (cuda_step_args(args, &t, &device, &o) || om_py_sgd(args + STEP_N, &o.sgd)) return NULL;
    return cuda_run(om_gpu_sgd, &t, &o);
}

static PyObject *py_cuda_lamb(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, STEP_N + OM_PY_LAMB_N + 1, "cuda_lamb(" LAMB ")")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    bool keep;
    int16_t device;
    if (cuda_step_args(args, &t, &device, &o) || om_py_lamb(args + STEP_N, &o.lamb, &keep) ||
        cuda_order(args[STEP_N + OM_PY_LAMB_N], device, &t))
        return NULL;
    o.keep_grads = keep;
    return cuda_run(om_gpu_lamb, &t, &o);
}

static PyObject *py_cuda_lamb_order_size(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 2, "cuda_lamb_order_size(n_span, n_chunk)")) return NULL;
    const uint32_t n_span = (uint32_t)PyLong_AsUnsignedLong(args[0]),
                   n_chunk = PyErr_Occurred() ? 0 : (uint32_t)PyLong_AsUnsignedLong(args[1]);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(om_gpu_order_size(n_span, n_chunk));
}

static om_status cuda_lamb_order(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o) {
    (void)o;
    return om_gpu_lamb_order(cx, t);
}

static PyObject *py_cuda_lamb_order(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 6, "cuda_lamb_order(" HEAD ", order)")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    int16_t device;
    return cuda_head(args, &t, &device) || cuda_order(args[5], device, &t) ? NULL : cuda_run(cuda_lamb_order, &t, &o);
}

static PyObject *py_cuda_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 5, "cuda_norm(" HEAD ")")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    int16_t device;
    return cuda_head(args, &t, &device) ? NULL : cuda_run(om_gpu_norm, &t, &o);
}

#define FINISH "grad_scale, found_inf, norm_out, stop_out, scale_out, first_out, div, max_norm, clip"
static PyObject *py_cuda_norm_finish(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 14, "cuda_norm_finish(" HEAD ", " FINISH ")")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    int16_t device = 0;
    float *scale, *found;
    double clip;
    double *const out[] = {&o.div, &o.max_norm, &clip};
    if (cuda_head(args, &t, &device) || cuda_scalar(args[5], device, "grad_scale", &scale) ||
        cuda_scalar(args[6], device, "found_inf", &found) || cuda_scalar(args[7], device, "norm_out", &o.norm_out) ||
        cuda_scalar(args[8], device, "stop_out", &o.stop_out) ||
        cuda_scalar(args[9], device, "scale_out", &o.scale_out) ||
        cuda_scalar(args[10], device, "first_out", &o.first_out) || om_py_numbers(args + 11, out, 3))
        return NULL;
    o.grad_scale = scale, o.found_inf = found, o.clip = (int)clip;
    return cuda_run(om_gpu_norm_finish, &t, &o);
}

#define SCALING "device, stream, scaler, counters, stop, first, automatic, window, lowest, highest"
static PyObject *py_cuda_loss_scale(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 10, "cuda_loss_scale(" SCALING ")")) return NULL;
    om_gpu_scaling a = {0};
    om_tensor scaler = {0}, steps = {0};
    float *stop, *first;
    double automatic;
    double *const out[] = {&automatic, &a.window, &a.lowest, &a.highest};
    const int ordinal = (int)PyLong_AsLong(args[0]);
    void *stream = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred() || om_dl_import(args[2], &scaler) || om_dl_import(args[3], &steps) ||
        cuda_scalar(args[4], scaler.device, "stop", &stop) || cuda_scalar(args[5], scaler.device, "first", &first) ||
        om_py_numbers(args + 6, out, 4))
        return NULL;
    if (scaler.dtype != OM_F64 || om_numel(&scaler) * 8 != sizeof *a.scaler || steps.dtype != OM_F64 ||
        om_numel(&steps) * 8 != sizeof *a.steps || !om_is_dense(&scaler) || !om_is_dense(&steps) ||
        scaler.device != steps.device || !stop || !first) {
        PyErr_Format(PyExc_ValueError,
                     "cuda_loss_scale: the scaler must be %zu and the counters %zu float64 on one device, with stop "
                     "and first there",
                     sizeof *a.scaler / 8, sizeof *a.steps / 8);
        return NULL;
    }
    a.scaler = scaler.data, a.steps = steps.data, a.stop = stop, a.first = first, a.automatic = automatic != 0;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    const om_status s = om_gpu_loss_scale(cx, ordinal, stream, &a);
    return om_py_done(cx, s);
}

static PyObject *py_cuda_axpby(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (om_py_count(nargs, 8, "cuda_axpby(" HEAD ", grad_scale, a, b)")) return NULL;
    om_gpu_table t = {0};
    om_gpu_optim o = {0};
    int16_t device = 0;
    float *scale;
    double *const out[] = {&o.a, &o.b};
    if (cuda_head(args, &t, &device) || cuda_scalar(args[5], device, "grad_scale", &scale) ||
        om_py_numbers(args + 6, out, 2))
        return NULL;
    o.grad_scale = scale;
    return cuda_run(om_gpu_axpby, &t, &o);
}

#define FAST(name) #name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL
/* --- the graph engine's ---------------------------------------------------------------------------- */

static PyObject *py_engine_stream(PyObject *none, PyObject *stream) {
    (void)none;
    om_cuda_stream(PyLong_AsVoidPtr(stream));
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_engine_tf32(PyObject *none, PyObject *allowed) {
    (void)none;
    om_cuda_tf32(PyObject_IsTrue(allowed) > 0);
    Py_RETURN_NONE;
}

static PyObject *py_engine_graphs(PyObject *none, PyObject *allowed) {
    (void)none;
    om_cuda_graphs(PyObject_IsTrue(allowed) > 0);
    Py_RETURN_NONE;
}

static PyObject *py_engine_programs(PyObject *none, PyObject *args) {
    int when;
    const char *library, *cache;
    (void)none;
    if (!PyArg_ParseTuple(args, "iss:cuda_engine_programs", &when, &library, &cache)) return NULL;
    om_cuda_programs(when, library, cache);
    Py_RETURN_NONE;
}

static PyObject *py_engine_program_counts(PyObject *none, PyObject *unused) {
    (void)none, (void)unused;
    const char *why = om_cuda_program_reason();
    return Py_BuildValue("(llls)", om_cuda_program_count(0), om_cuda_program_count(1), om_cuda_program_count(2),
                         why ? why : "");
}

static PyObject *py_engine_keep(PyObject *none, PyObject *on) {
    (void)none;
    om_cuda_keep(PyObject_IsTrue(on) > 0);
    Py_RETURN_NONE;
}

static PyObject *py_engine_empty(PyObject *none, PyObject *unused) {
    (void)none, (void)unused;
    om_cuda_empty();
    Py_RETURN_NONE;
}

static PyObject *py_engine_record_stream(PyObject *none, PyObject *const *args, Py_ssize_t nargs) {
    (void)none;
    if (om_py_count(nargs, 3, "cuda_engine_record_stream(device, address, stream)")) return NULL;
    const long device = PyLong_AsLong(args[0]);
    void *at = PyLong_AsVoidPtr(args[1]), *stream = PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred()) return NULL;
    const int found = om_cuda_record_stream((int)device, at, stream);
    return found < 0 ? PyErr_NoMemory() : PyBool_FromLong(found);
}

static PyObject *py_engine_graph_counts(PyObject *none, PyObject *unused) {
    (void)none, (void)unused;
    PyObject *why = PyList_New(0);
    const char *text;
    for (int i = 0; why && (text = om_cuda_graph_reason(i)); i++)
        if (om_py_list_add(why, PyUnicode_FromString(text))) Py_CLEAR(why);
    return why ? Py_BuildValue("(lllN)", om_cuda_graph_count(0), om_cuda_graph_count(1), om_cuda_graph_count(2), why)
               : NULL;
}

static PyObject *py_engine_stand_in(PyObject *none, PyObject *on) {
    (void)none;
    Py_XDECREF(om_py_stand_in);
    om_py_stand_in = on == Py_False ? NULL : (Py_INCREF(on), on);
    Py_RETURN_NONE;
}

static PyObject *py_engine_look(PyObject *none, PyObject *device) {
    (void)none;
    const long ordinal = PyLong_AsLong(device);
    if (ordinal == -1 && PyErr_Occurred()) return NULL;
    om_ctx *cx = om_py_ctx();
    if (!cx) return PyErr_NoMemory();
    om_status s = om_cuda_use(cx, (int)ordinal);
    if (s == OM_OK && (s = cx->device->begin(cx, 1)) == OM_OK) s = cx->device->end(cx, OM_OK);
    PyObject *res = s == OM_OK ? Py_NewRef(Py_None) : om_py_error(cx);
    om_ctx_free(cx);
    return res;
}

static PyObject *py_engine_counts(PyObject *none, PyObject *unused) {
    (void)none, (void)unused;
    PyObject *names = PyList_New(0);
    const char *name;
    for (int i = 0; names && (name = om_cuda_host_op(i)); i++)
        if (om_py_list_add(names, PyUnicode_FromString(name))) Py_CLEAR(names);
    return names ? Py_BuildValue("(llNl)", om_cuda_count(1), om_cuda_count(0), names, om_cuda_count(2)) : NULL;
}

PyMethodDef om_cuda_methods[] = {
    {"cuda_engine_stream", py_engine_stream, METH_O,
     "cuda_engine_stream(stream): where this thread's next runs on a CUDA device are queued."},
    {"cuda_engine_empty", py_engine_empty, METH_NOARGS,
     "cuda_engine_empty(): blocks that are kept for the next step go back to torch's allocator."},
    {"cuda_engine_record_stream", (PyCFunction)(void (*)(void))py_engine_record_stream, METH_FASTCALL,
     "cuda_engine_record_stream(device, address, stream): the block there is worked with on that stream, too; whether "
     "it is one of the engine's."},
    {"cuda_engine_tf32", py_engine_tf32, METH_O,
     "cuda_engine_tf32(allowed): whether this thread's next float32 products may cut their operands to TF32."},
    {"cuda_engine_graphs", py_engine_graphs, METH_O,
     "cuda_engine_graphs(allowed): whether this thread's next runs may be launched as CUDA graphs."},
    {"cuda_engine_programs", py_engine_programs, METH_VARARGS,
     "cuda_engine_programs(when, library, cache): whether chains are compiled by NVRTC: 0 never, 1 where it pays, 2 "
     "always."},
    {"cuda_engine_program_counts", py_engine_program_counts, METH_NOARGS,
     "cuda_engine_program_counts(): chains compiled, calls of NVRTC, modules found in the cache, why not all were."},
    {"cuda_engine_keep", py_engine_keep, METH_O,
     "cuda_engine_keep(on): whether blocks that are given back are kept for the next step; gives those back that are."},
    {"cuda_engine_graph_counts", py_engine_graph_counts, METH_NOARGS,
     "cuda_engine_graph_counts(): CUDA graphs made, launched, pieces of plans that were given up, why."},
    {"cuda_engine_stand_in", py_engine_stand_in, METH_O,
     "cuda_engine_stand_in(on): tests: CPU tensors stand for those of a CUDA device; on: a bool, or a function from a "
     "tensor to the ordinal of its device (-1: the CPU; -2: of a gradient's, any)."},
    {"cuda_engine_look", py_engine_look, METH_O,
     "cuda_engine_look(device): ValueError with an index or label out of range that is known there and was not told."},
    {"cuda_engine_counts", py_engine_counts, METH_NOARGS,
     "cuda_engine_counts(): kernels launched, calls the CPU did for a CUDA device, names of their operators, "
     "products by cuBLASLt."},
    {"cuda_engine_refusal", py_engine_refusal, METH_O,
     "cuda_engine_refusal(device): why no plan can run on that GPU, with what was found and what is wanted; ''."},
    {"cuda_archs", py_cuda_archs, METH_NOARGS,
     "cuda_archs(): architectures of the embedded kernels, '75 80 ...'; '' when built without nvcc."},
    {"cuda_image_size", py_cuda_image_size, METH_O,
     "cuda_image_size(n): bytes of the host image of a list of n parameters."},
    {FAST(cuda_capturing), "cuda_capturing(device, stream): the stream is being captured into a CUDA graph."},
    {FAST(cuda_spans), "cuda_spans(op, image, params, grads, exp_avgs, exp_avg_sqs, masters, steps, store, numbers): "
                       "(spans, chunks, bytes of the "
                       "device table, image changed, parameters whose tensors need one memory order first). numbers: "
                       "what the spans' streams "
                       "and first_out count by; None: places in the list."},
    {FAST(cuda_upload), "cuda_upload(" HEAD ", image): writes the table."},
    {FAST(cuda_adam), "cuda_adam(" ADAM ")"},
    {FAST(cuda_sgd), "cuda_sgd(" SGD ")"},
    {FAST(cuda_lamb), "cuda_lamb(" LAMB "): order None: in three launches."},
    {FAST(cuda_lamb_order_size),
     "cuda_lamb_order_size(n_span, n_chunk): bytes of the order of a list for LAMB in one launch."},
    {FAST(cuda_lamb_order), "cuda_lamb_order(" HEAD ", order): writes it."},
    {FAST(cuda_norm), "cuda_norm(" HEAD "): sums of squares of the gradients, for cuda_norm_finish."},
    {FAST(cuda_norm_finish), "cuda_norm_finish(" HEAD ", " FINISH
                             "): clip 0 LAMB's divisor, 1 torch's formula, 2 that but nothing when the norm is "
                             "not finite; max_norm 0 with clip 0: none."},
    {FAST(cuda_loss_scale), "cuda_loss_scale(" SCALING
                            "): one scaled step was queued; scaler: float64 (scale, good steps), counters: float64."},
    {FAST(cuda_axpby), "cuda_axpby(" HEAD ", grad_scale, a, b): p = a / grad_scale * g + b * p."},
    {NULL, NULL, 0, NULL},
};
