/* dlpack.h - how torch tensors become om_tensor and back: own prototypes of DLPack 1.3's C exchange API.
 *
 * `torch.Tensor.__dlpack_c_exchange_api__` is a capsule named "dlpack_exchange_api" that holds the function table
 * below. Borrowing (om_dl_import) asks it to fill a DLTensor on our stack: no reference is taken, no object is made,
 * about 50 ns. The memory stays valid as long as the caller keeps the Python tensor alive. Layouts are those of
 * DLPack's public ABI (major version 1); om_dl_init refuses any other major version.
 *
 * A borrowed tensor with the conj or neg bit set shows the memory as it lies, not the values; the exchange API cannot
 * tell. Captured parameters and gradients never carry these bits; whoever accepts arbitrary tensors checks in Python
 * first.
 */
#ifndef OM_DLPACK_H
#define OM_DLPACK_H

#include <Python.h>

#include "ortmodule.h"

typedef struct om_dl_version { uint32_t major, minor; } om_dl_version;
typedef struct om_dl_device { int32_t type, id; } om_dl_device;
typedef struct om_dl_dtype { uint8_t code, bits; uint16_t lanes; } om_dl_dtype;

enum { OM_DL_CPU = 1, OM_DL_CUDA = 2, OM_DL_CUDA_HOST = 3, OM_DL_CUDA_MANAGED = 13 };                 /* device types */
/* dtype codes */
enum { OM_DL_INT = 0, OM_DL_UINT = 1, OM_DL_FLOAT = 2, OM_DL_BFLOAT = 4, OM_DL_COMPLEX = 5, OM_DL_BOOL = 6 };

typedef struct om_dl_tensor {
    void *data;
    om_dl_device device;
    int32_t ndim;
    om_dl_dtype dtype;
    int64_t *shape, *strides; /* strides in elements; NULL allowed when ndim is 0 */
    uint64_t byte_offset;
} om_dl_tensor;

typedef struct om_dl_managed { /* DLManagedTensorVersioned */
    om_dl_version version;
    void *manager_ctx;
    void (*deleter)(struct om_dl_managed *self);
    uint64_t flags;
    om_dl_tensor tensor;
} om_dl_managed;

typedef struct om_dl_header {
    om_dl_version version;
    struct om_dl_header *prev_api;
} om_dl_header;

/* Functions that return int: 0, or -1 with a Python exception set. Owning pointers pass to the receiver. */
typedef struct om_dl_api {
    om_dl_header header;
    int (*alloc)(om_dl_tensor *prototype, om_dl_managed **out, void *error_ctx,
                 void (*set_error)(void *error_ctx, const char *kind, const char *message));
    int (*from_py)(void *object, om_dl_managed **out);       /* owning; keeps the tensor alive until deleter */
    int (*to_py)(om_dl_managed *tensor, void **out_object);  /* takes ownership; new reference */
    int (*borrow)(void *object, om_dl_tensor *out);          /* shape and strides live in the tensor; may be NULL */
    int (*stream)(int32_t device_type, int32_t device_id, void **out_stream);
} om_dl_api;

/* The table of torch.Tensor. om_dl_init imports torch if need be; call it once when the module is initialised.
 * 0, or -1 with ImportError set. */
int om_dl_init(void);
const om_dl_api *om_dl(void); /* NULL before om_dl_init */

/* Fills *out with a borrowed view of the torch tensor `t`: data already offset, strides in elements, dtype, device
 * (CPU and pinned memory: -1). 0, or -1 with a Python exception set (not a tensor, sparse, meta, a dtype the engine has
 * not, more than OM_RANK dimensions). Needs the GIL. */
int om_dl_import(PyObject *t, om_tensor *out);

/* Every item of a list or tuple into out[0..n); items that are None become dtype OM_NODTYPE. `what` names the argument
 * in the error. 0 or -1. */
int om_dl_import_list(PyObject *seq, Py_ssize_t n, om_tensor *out, const char *what);

/* DLPack's name of an element type, and back (OM_NODTYPE when the engine has none). */
om_dl_dtype om_dl_dtype_of(int dtype);
int om_dl_dtype_in(om_dl_dtype t);
#endif
