/* pymodule.h - what the files of ortmodule._C share. pymodule.c: services from torch, errors, tensors out, module
 * functions; python/model.c: Model; python/run.c: Run; python/dlpack.c: tensors across; python/optim.c: optimizers;
 * python/guard.c: what a capture has read. */
#ifndef OM_PYMODULE_H
#define OM_PYMODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "run/plan.h"
#include "cpu/blocks.h"

om_ctx *om_py_ctx(void);           /* a context on torch's threads; NULL = no memory */
PyObject *om_py_error(om_ctx *cx); /* raises what the context holds */
/* A torch tensor over `data`; takes the block (NULL: the memory belongs to somebody else). */
PyObject *om_py_export(const om_tensor *t, void *data, om_block *block);
int om_py_list_add(PyObject *list, PyObject *item); /* takes the item */

typedef struct Model {
    PyObject_HEAD
    om_model *m;
    om_profile profile;
    bool profiling;
    int level;                 /* om_recompute of variants that are asked for without one */
} Model;
typedef struct Run {
    PyObject_HEAD
    Model *model;
    PyObject *held;            /* the tensors given: alive while addresses are used */
    om_ctx *cx;
    om_run r;
    om_plan *plan;             /* r.plan, to be released */
    om_block *arena, **output, **grad, **loan;
    void *temp;                /* dense copies of what lies otherwise: list of om_alloc'd pointers */
    om_profile profile;        /* of this run; added to the model's under the GIL */
    bool backward, done, exported_outputs, keep;
    double plan_ms;
} Run;

extern PyTypeObject *om_py_model_type, *om_py_run_type;
extern PyType_Spec om_py_model_spec, om_py_run_spec;
extern PyMethodDef om_optim_methods[], om_cuda_methods[], om_guard_methods[];
void om_torch_gemm_fill(void *libtorch, om_services *sv); /* python/gemm.c */
PyObject *om_py_forward(PyObject *model, PyObject *args, PyObject *kw);  /* Model.forward */
PyObject *om_py_backward(PyObject *model, PyObject *args, PyObject *kw); /* Model.backward */
#endif
