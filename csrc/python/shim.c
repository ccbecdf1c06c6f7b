/* shim.c - see shim.h. The prototypes are restated here. */
#include "python/shim.h"

#include <dlfcn.h>

static int32_t (*tensor_from_blob)(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                                   int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                   om_torch_tensor *out);
static int32_t (*tensor_delete)(om_torch_tensor t);
static int32_t (*tensor_dtype)(om_torch_tensor t, int32_t *dtype);
static int32_t dtype_f32, dtype_bf16, device_cpu;

bool om_torch_open(void *libtorch) {
    int32_t (*f32)(void), (*bf16)(void), (*cpu)(void);
    *(void **)&tensor_from_blob = dlsym(libtorch, "aoti_torch_create_tensor_from_blob");
    *(void **)&tensor_delete = dlsym(libtorch, "aoti_torch_delete_tensor_object");
    *(void **)&tensor_dtype = dlsym(libtorch, "aoti_torch_get_dtype");
    *(void **)&f32 = dlsym(libtorch, "aoti_torch_dtype_float32");
    *(void **)&bf16 = dlsym(libtorch, "aoti_torch_dtype_bfloat16");
    *(void **)&cpu = dlsym(libtorch, "aoti_torch_device_type_cpu");
    if (!tensor_from_blob || !tensor_delete || !tensor_dtype || !f32 || !bf16 || !cpu) return false;
    dtype_f32 = f32(), dtype_bf16 = bf16(), device_cpu = cpu();
    return true;
}

static int32_t dtype_of(om_dtype dtype) { return dtype == OM_F32 ? dtype_f32 : dtype_bf16; }

bool om_torch_borrow(const om_tensor *t, om_torch_tensor *out) {
    return tensor_from_blob(t->data, t->rank, t->dim, t->stride, 0, dtype_of(t->dtype), device_cpu, 0, out) == 0;
}

bool om_torch_is(om_torch_tensor x, om_dtype dtype) {
    int32_t found;
    return tensor_dtype(x, &found) == 0 && found == dtype_of(dtype);
}

void om_torch_drop(om_torch_tensor x) {
    if (x) tensor_delete(x);
}
