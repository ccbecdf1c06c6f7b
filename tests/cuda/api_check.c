/* api_check.c - compiled, never run: the entry points csrc/cuda/driver.h declares have the types of cuda.h. */
#include <cuda.h>

#include "cuda/capture.h"
#include "cuda/driver.h"
#include "cuda/queue.h"

#define X(field, name, params)                                            \
    _Static_assert(sizeof(CUresult) == sizeof(om_cu_result), "CUresult"); \
    om_cu_result(*check_##field) params = name;
OM_CUDA_API(X)
#undef X
#define X(field, name, params) om_cu_result(*check_queue_##field) params = name;
OM_CUDA_QUEUE_API(X)
#undef X
#define X(field, name, params) om_cu_result(*check_capture_##field) params = name;
OM_CUDA_CAPTURE_API(X)
#undef X
_Static_assert(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == 1 && CU_STREAM_NON_BLOCKING == 1, "capture");
_Static_assert(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD == 4 && CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8,
               "attributes");
_Static_assert(CU_MEMHOSTALLOC_PORTABLE == 1 && CU_MEMHOSTALLOC_DEVICEMAP == 2, "flags");
_Static_assert(CUDA_ERROR_OUT_OF_MEMORY == 2, "errors");
_Static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75 && CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == 76,
               "attributes");
_Static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == 16, "attributes");
_Static_assert(CUDA_ERROR_NO_BINARY_FOR_GPU == 209 && CUDA_ERROR_INVALID_IMAGE == 200 &&
                   CUDA_ERROR_UNSUPPORTED_PTX_VERSION == 222,
               "errors");
_Static_assert(CUDA_ERROR_ILLEGAL_ADDRESS == 700 && CUDA_ERROR_LAUNCH_FAILED == 719, "errors");
_Static_assert(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED == 900 && CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD == 908, "errors");
