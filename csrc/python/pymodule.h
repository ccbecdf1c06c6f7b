/* pymodule.h - what the files of ortmodule._C share. pymodule.c: services from torch, errors, tensors out, module
 * functions; python/model.c: Model; python/profile.c: what it shows of a step; python/run.c: Run, State;
 * python/dlpack.c: tensors across; python/optim.c, cuda.c: optimizers; python/guard.c: what a capture has read;
 * python/overlap.c: what has memory in common. */
#ifndef OM_PYMODULE_H
#define OM_PYMODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "run/plan.h"

/* Tests: CPU tensors stand for a CUDA device's. NULL: they do not; True: of any; else a function that says of which. */
extern PyObject *om_py_stand_in;
om_ctx *om_py_ctx(void);           /* a context on torch's threads; NULL = no memory */
PyObject *om_py_error(om_ctx *cx); /* raises what the context holds */
/* A torch tensor over t->data; takes the block that is (NULL: the memory belongs to somebody else). */
PyObject *om_py_export(const om_tensor *t, om_block *block);
int om_py_list_add(PyObject *list, PyObject *item); /* takes the item */

/* Arguments of METH_FASTCALL functions. 0, or -1 with an error set. */
int om_py_count(Py_ssize_t nargs, Py_ssize_t want, const char *usage);
int om_py_numbers(PyObject *const *args, double *const *out, int n); /* into the doubles; 0-d tensors are fine */
/* Parallel lists of tensors (params, grads, first moments, second moments, masters; None or NULL: left out) into the
 * members of ps. tmp: n tensors of room. */
enum { OM_PY_PARAMS = 5 };
struct om_optim_param;
int om_py_params(PyObject *const *lists, struct om_optim_param *ps, Py_ssize_t n, om_tensor *tmp); /* python/optim.c */
/* None, or NULL with the failure raised; frees the context. */
PyObject *om_py_done(om_ctx *cx, om_status s);

typedef struct Model {
    PyObject_HEAD
    om_model *m;
    int level;                 /* om_recompute of variants that are asked for without one */
    int cuda;                  /* ordinal of the device its plans run on; -1: the CPU */
} Model;
typedef struct State { PyObject_HEAD Model *model; om_state *s; } State;
typedef struct Run {
    PyObject_HEAD
    Model *model;
    PyObject *held; /* the tensors given: alive while addresses are used */
    PyObject *outputs; /* a list within `held`, of a backward: until they have been read */
    om_ctx *cx;
    om_run *r;
} Run;

extern PyTypeObject *om_py_model_type, *om_py_run_type, *om_py_state_type;
extern PyType_Spec om_py_model_spec, om_py_run_spec, om_py_state_spec;
extern PyMethodDef om_optim_methods[], om_cuda_methods[], om_guard_methods[], om_overlap_methods[];
/* after om_torch_open */
void om_torch_gemm_fill(void *libtorch, om_services *sv); /* python/gemm.c */
void om_torch_conv_fill(void *libtorch, om_services *sv); /* python/conv.c */
PyObject *om_py_forward(PyObject *model, PyObject *args, PyObject *kw); /* Model.forward */
/* python/profile.c: Model.profile, .profile_calls, .timeline */
PyObject *om_py_profile(PyObject *model, PyObject *args);
PyObject *om_py_profile_calls(PyObject *model, PyObject *none);
PyObject *om_py_timeline(PyObject *model, PyObject *none);
PyObject *om_py_clusters(PyObject *model, PyObject *args);               /* python/choice.c */
PyObject *om_py_choose(PyObject *model, PyObject *args);
/* For nw wanted inputs and na arriving outputs; 0, or -1 with an error set. *out: NULL for None; free it. */
int om_py_variant_key(Model *self, Py_ssize_t nw, Py_ssize_t na, PyObject *group, int **out);
#endif
