/* cuda/driver.h - CUDA through the driver API: devices, the embedded kernels, launches.
 *
 * libcuda.so.1 is opened at first use, never linked, and nothing happens at import. The primary context of a device
 * (the one that torch and the CUDA runtime use) is retained once per process; om_cuda_enter makes it current on the
 * calling thread and om_cuda_leave puts back what was there. Kernels are loaded once per device. Memory and streams
 * belong to the host (torch): this file allocates nothing on a device and never waits for one. All functions may be
 * called from any thread.
 *
 * Types are those of cuda.h under names of our own, so that building needs no CUDA header (tests/cuda/api_check.c
 * compares the two).
 */
#ifndef OM_CUDA_DRIVER_H
#define OM_CUDA_DRIVER_H

#include "graph/engine.h"

typedef unsigned om_cu_result; /* CUresult: 0 = success */
typedef struct CUctx_st *om_cu_context;
typedef struct CUmod_st *om_cu_module;
typedef struct CUfunc_st *om_cu_function;
typedef struct CUstream_st *om_cu_stream;

/* Every entry point that is used: field, exported name, parameters. */
#define OM_CUDA_API(X)                                                                                              \
    X(get_error_name, cuGetErrorName, (om_cu_result, const char **))                                                \
    X(get_error_string, cuGetErrorString, (om_cu_result, const char **))                                            \
    X(init, cuInit, (unsigned))                                                                                     \
    X(driver_version, cuDriverGetVersion, (int *))                                                                  \
    X(device_get, cuDeviceGet, (int *, int))                                                                        \
    X(device_name, cuDeviceGetName, (char *, int, int))                                                             \
    X(device_attribute, cuDeviceGetAttribute, (int *, unsigned, int))                                               \
    X(primary_retain, cuDevicePrimaryCtxRetain, (om_cu_context *, int))                                             \
    X(push, cuCtxPushCurrent_v2, (om_cu_context))                                                                   \
    X(pop, cuCtxPopCurrent_v2, (om_cu_context *))                                                                   \
    X(module_load, cuModuleLoadData, (om_cu_module *, const void *))                                                \
    X(module_function, cuModuleGetFunction, (om_cu_function *, om_cu_module, const char *))                         \
    X(stream_capturing, cuStreamIsCapturing, (om_cu_stream, unsigned *))                                            \
    X(launch, cuLaunchKernel,                                                                                       \
      (om_cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, om_cu_stream, void **, \
       void **))

/* In a file that calls the driver: the table `api` of its entry points, their names in order, field_name of each. */
#define OM_CUDA_ENTRIES(TABLE)                                      \
    static struct { TABLE(OM_CUDA_FIELD) } api;                     \
    static const char *const api_names[] = {TABLE(OM_CUDA_NAME)};   \
    TABLE(OM_CUDA_TEXT)
#define OM_CUDA_FIELD(field, name, params) om_cu_result (*field) params;
#define OM_CUDA_NAME(field, name, params) #name,
#define OM_CUDA_TEXT(field, name, params) __attribute__((unused)) static const char field##_name[] = #name;
/* Fills it from libcuda.so.1; `needs`: the end of the sentence about a driver that lacks one. */
#define OM_CUDA_LOOK(cx, needs) om_cuda_look(cx, api_names, sizeof api_names / sizeof *api_names, &api, needs)
om_status om_cuda_look(om_ctx *cx, const char *const *names, size_t n, void *slots, const char *needs);

typedef enum om_cuda_kernel {
#define KERNEL(name, type) name##_kernel,
#include "cuda/kernels.def"
#undef KERNEL
    OM_N_CUDA_KERNELS
} om_cuda_kernel;

typedef struct om_cuda om_cuda; /* one device */

/* Makes the context of CUDA device `ordinal` current; first use loads the kernels. On OM_OK om_cuda_leave must follow
 * on the same thread. */
om_status om_cuda_enter(om_ctx *cx, int ordinal, om_cuda **out);
om_status om_cuda_leave(om_ctx *cx, om_cuda *d, om_status s); /* s, or the failure of leaving when s is OM_OK */

/* Queues one kernel over a line of blocks; it takes the struct `param` points to by value. blocks 0: nothing to do. */
om_status om_cuda_launch(om_ctx *cx, om_cuda *d, om_cuda_kernel k, uint32_t blocks, uint32_t threads, void *stream,
                         const void *param);

/* The failure r of a driver function, in words. */
om_status om_cuda_fail(om_ctx *cx, const om_cuda *d, om_cu_result r, const char *what);

int om_cuda_processors(const om_cuda *d); /* multiprocessors of the device */
int om_cuda_capability(const om_cuda *d); /* compute capability: 80 is sm_80 */

/* The stream is being captured into a graph: launches are recorded instead of run. */
om_status om_cuda_capturing(om_ctx *cx, om_cuda *d, void *stream, bool *yes);

extern const char om_cuda_image[];        /* fatbin */
extern const uint64_t om_cuda_image_size; /* 0 when built without nvcc */
extern const char om_cuda_archs[];        /* its architectures: "75 80 ..." */
#endif
