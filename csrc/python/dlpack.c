/* dlpack.c - torch tensors as om_tensor, borrowed through DLPack's C exchange API (see dlpack.h).
 *
 * No reference counts change and nothing is allocated on the way in: one call into torch fills a struct on the stack,
 * then sizes and strides are copied, because they belong to the tensor and may go with it.
 */
#include "python/dlpack.h"

#include "python/pymodule.h"


#include <string.h>

static const om_dl_api *dl_api;

const om_dl_api *om_dl(void) { return dl_api; }

int om_dl_init(void) {
    if (dl_api) return 0;
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *cls = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    PyObject *cap = cls ? PyObject_GetAttrString(cls, "__dlpack_c_exchange_api__") : NULL;
    Py_XDECREF(cls);
    Py_XDECREF(torch);
    if (!cap) {
        if (torch)
            PyErr_SetString(PyExc_ImportError,
                            "torch.Tensor has no DLPack C exchange API; ortmodule needs torch >= 2.11");
        return -1;
    }
    /* The table is static in torch: it outlives the capsule. */
    const om_dl_header *h = PyCapsule_GetPointer(cap, "dlpack_exchange_api");
    Py_DECREF(cap);
    while (h && h->version.major != 1) h = h->prev_api;
    const om_dl_api *api = (const om_dl_api *)(const void *)h;
    if (!api || !api->borrow) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ImportError,
                            "torch offers no DLPack exchange table of major version 1 with borrowing; "
                            "ortmodule needs torch >= 2.11");
        return -1;
    }
    dl_api = api;
    return 0;
}

int om_dl_dtype_in(om_dl_dtype t) {
    if (t.lanes != 1) return OM_NODTYPE;
    switch (t.code << 8 | t.bits) {
    case OM_DL_FLOAT << 8 | 32: return OM_F32;
    case OM_DL_FLOAT << 8 | 64: return OM_F64;
    case OM_DL_FLOAT << 8 | 16: return OM_F16;
    case OM_DL_BFLOAT << 8 | 16: return OM_BF16;
    case OM_DL_INT << 8 | 64: return OM_I64;
    case OM_DL_INT << 8 | 32: return OM_I32;
    case OM_DL_INT << 8 | 16: return OM_I16;
    case OM_DL_INT << 8 | 8: return OM_I8;
    case OM_DL_UINT << 8 | 8: return OM_U8;
    case OM_DL_BOOL << 8 | 8: return OM_BOOL;
    }
    return OM_NODTYPE;
}

om_dl_dtype om_dl_dtype_of(int dtype) {
    switch (dtype) {
    case OM_F32: return (om_dl_dtype){OM_DL_FLOAT, 32, 1};
    case OM_F64: return (om_dl_dtype){OM_DL_FLOAT, 64, 1};
    case OM_F16: return (om_dl_dtype){OM_DL_FLOAT, 16, 1};
    case OM_BF16: return (om_dl_dtype){OM_DL_BFLOAT, 16, 1};
    case OM_I64: return (om_dl_dtype){OM_DL_INT, 64, 1};
    case OM_I32: return (om_dl_dtype){OM_DL_INT, 32, 1};
    case OM_I16: return (om_dl_dtype){OM_DL_INT, 16, 1};
    case OM_I8: return (om_dl_dtype){OM_DL_INT, 8, 1};
    case OM_U8: return (om_dl_dtype){OM_DL_UINT, 8, 1};
    case OM_BOOL: return (om_dl_dtype){OM_DL_BOOL, 8, 1};
    }
    return (om_dl_dtype){0, 0, 0};
}

int om_dl_import(PyObject *t, om_tensor *out) {
    om_dl_tensor d;
    if (dl_api->borrow(t, &d)) return -1;
    if (d.ndim < 0 || d.ndim > OM_RANK) {
        PyErr_Format(PyExc_ValueError, "tensor of rank %d given; at most %d dimensions are supported: reshape it first",
                     (int)d.ndim, OM_RANK);
        return -1;
    }
    int dtype = om_dl_dtype_in(d.dtype);
    if (dtype == OM_NODTYPE) {
        PyErr_Format(
            PyExc_ValueError,
            "tensor element type (DLPack code %d, %d bits) is not supported; allowed: float16/32/64, bfloat16, "
            "int8/16/32/64, uint8, bool: convert it first",
            (int)d.dtype.code, (int)d.dtype.bits);
        return -1;
    }
    int16_t device;
    if (d.device.type == OM_DL_CPU || d.device.type == OM_DL_CUDA_HOST) {
        device = -1;
    } else if (d.device.type == OM_DL_CUDA || d.device.type == OM_DL_CUDA_MANAGED) {
        device = (int16_t)d.device.id;
    } else {
        PyErr_Format(PyExc_ValueError, "tensor on DLPack device type %d given; allowed: CPU and CUDA",
                     (int)d.device.type);
        return -1;
    }
    if (om_py_stand_in && om_py_stand_in != Py_True) {
        PyObject *at = PyObject_CallFunctionObjArgs(om_py_stand_in, t, NULL);
        device = at ? (int16_t)PyLong_AsLong(at) : -1;
        Py_XDECREF(at);
        if (PyErr_Occurred()) return -1;
    }
    out->data = d.data ? (char *)d.data + d.byte_offset : NULL;
    out->dtype = (uint8_t)dtype;
    out->rank = (uint8_t)d.ndim;
    out->device = device;
    int64_t dense = 1;
    for (int i = d.ndim - 1; i >= 0; i--) {
        out->dim[i] = d.shape[i];
        out->stride[i] = d.strides ? d.strides[i] : dense;
        dense *= d.shape[i];
    }
    if (!out->data && dense) {
        PyErr_SetString(
            PyExc_ValueError,
            "tensor without memory given (a DTensor or other wrapper, a fake tensor, or freed storage); allowed: "
            "tensors that hold their elements: give the local tensor (DTensor: to_local())");
        return -1;
    }
    return 0;
}

int om_dl_import_list(PyObject *seq, Py_ssize_t n, om_tensor *out, const char *what) {
    int list = PyList_Check(seq);
    if (!list && !PyTuple_Check(seq)) {
        PyErr_Format(PyExc_TypeError, "%s must be a list or tuple of tensors", what);
        return -1;
    }
    Py_ssize_t have = list ? PyList_Size(seq) : PyTuple_Size(seq);
    if (have != n) {
        PyErr_Format(PyExc_ValueError, "%s has %zd tensors, expected %zd", what, have, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *t = list ? PyList_GetItem(seq, i) : PyTuple_GetItem(seq, i); /* borrowed */
        if (t == Py_None) {
            memset(&out[i], 0, sizeof out[i]);
            continue;
        }
        if (!t || om_dl_import(t, &out[i])) return -1;
    }
    return 0;
}
