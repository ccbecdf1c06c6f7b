/* cuda/torch_conv.h - convolution by torch's kernels (cuDNN's), through the C functions of the libtorch_cuda.so that
 * the process has loaded.
 *
 * Operands are given as tensors over the plan's memory, any strides; torch makes a result in memory of its allocator,
 * which is copied where the plan wants it, all on the step's stream. Settings of torch's (cudnn.benchmark,
 * deterministic, TF32) hold as in eager. Such a call is in no CUDA graph: it allocates. Where torch lacks one of the
 * functions, or a shape is none of torch's, the engine's own kernels (conv.cu) do it.
 */
#ifndef OM_CUDA_TORCH_CONV_H
#define OM_CUDA_TORCH_CONV_H

#include "cuda/queue.h"

typedef struct at_tensor at_tensor;
#define OM_CUDA_CONV_API(X)                                                                                        \
    X(guard, int32_t, aoti_torch_create_cuda_stream_guard, (void *, int32_t, void **))                             \
    X(unguard, int32_t, aoti_torch_delete_cuda_stream_guard, (void *))                                             \
    X(blob, int32_t, aoti_torch_create_tensor_from_blob,                                                           \
      (void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, at_tensor **))       \
    X(drop, int32_t, aoti_torch_delete_tensor_object, (at_tensor *))                                               \
    X(copy, int32_t, aoti_torch_tensor_copy_, (at_tensor *, at_tensor *))                                          \
    X(dtype, int32_t, aoti_torch_get_dtype, (at_tensor *, int32_t *))                                              \
    X(of_cuda, int32_t, aoti_torch_device_type_cuda, (void))                                                       \
    X(f32, int32_t, aoti_torch_dtype_float32, (void))                                                              \
    X(f64, int32_t, aoti_torch_dtype_float64, (void))                                                              \
    X(bf16, int32_t, aoti_torch_dtype_bfloat16, (void))                                                            \
    X(f16, int32_t, aoti_torch_dtype_float16, (void))                                                              \
    X(grad_mode, bool, aoti_torch_grad_mode_is_enabled, (void))                                                    \
    X(grad_mode_set, void, aoti_torch_grad_mode_set_enabled, (bool))                                               \
    X(forward, int32_t, aoti_torch_cuda_convolution,                                                               \
      (at_tensor *, at_tensor *, at_tensor **, const int64_t *, int64_t, const int64_t *, int64_t, const int64_t *, \
       int64_t, int32_t, const int64_t *, int64_t, int64_t, at_tensor **))                                         \
    X(backward, int32_t, aoti_torch_cuda_convolution_backward,                                                     \
      (at_tensor *, at_tensor *, at_tensor *, const int64_t **, int64_t, const int64_t *, int64_t, const int64_t *, \
       int64_t, const int64_t *, int64_t, int32_t, const int64_t *, int64_t, int64_t, const int32_t *, int64_t,    \
       at_tensor **, at_tensor **, at_tensor **))

/* One call: conv (x, w, bias -> y), conv_transpose (x, w -> y) or conv_grad (dy, x, w -> dx, dw, db). */
typedef struct om_torch_conv {
    bool transposed, grad;
    int nd;
    int64_t groups, stride[3], pad[3], dil[3], out_pad[3];
    int32_t want[3];
} om_torch_conv;

bool om_torch_conv_open(void); /* looks once; true: all is there */
/* arg: the call's inputs, then outputs. *done false: torch would compute it in another type (an autocast of the
 * script's that the graph was not captured under), nothing has happened. */
om_status om_torch_conv_run(om_ctx *cx, om_gpu *g, const om_torch_conv *c, const om_tensor *arg, int n_in, int n_out,
                            bool *done);
#endif
