/* cuda/queue.h - memory, copies and launches of the graph engine on a stream of a GPU, through the driver.
 *
 * Memory comes from torch's caching allocator (host_memory.h), or where there is none from the device's own pool, in
 * the order of the stream: a block that is given back is handed on at once, to work queued later (blocks of steps stay
 * with the engine in between: blocks.h). Only a download waits for the device. The stream is the calling thread's
 * (om_cuda_stream): torch's current one, or the legacy default stream.
 */
#ifndef OM_CUDA_QUEUE_H
#define OM_CUDA_QUEUE_H

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/lower.h"

typedef unsigned long long om_cu_address;
typedef struct CUmemPoolHandle_st *om_cu_pool;

#define OM_CUDA_QUEUE_API(X)                                                                                       \
    X(alloc, cuMemAllocAsync, (om_cu_address *, size_t, om_cu_stream))                                             \
    X(free, cuMemFreeAsync, (om_cu_address, om_cu_stream))                                                         \
    X(to_device, cuMemcpyHtoDAsync_v2, (om_cu_address, const void *, size_t, om_cu_stream))                        \
    X(to_host, cuMemcpyDtoHAsync_v2, (void *, om_cu_address, size_t, om_cu_stream))                                \
    X(set, cuMemsetD8Async, (om_cu_address, unsigned char, size_t, om_cu_stream))                                  \
    X(wait, cuStreamSynchronize, (om_cu_stream))                                                                   \
    X(wait_all, cuCtxSynchronize, (void))                                                                          \
    X(host_alloc, cuMemHostAlloc, (void **, size_t, unsigned))                                                     \
    X(module_load, cuModuleLoadData, (om_cu_module *, const void *))                                               \
    X(module_function, cuModuleGetFunction, (om_cu_function *, om_cu_module, const char *))                        \
    X(function_attribute, cuFuncSetAttribute, (om_cu_function, unsigned, int))                                     \
    X(pool, cuDeviceGetDefaultMemPool, (om_cu_pool *, int))                                                        \
    X(pool_attribute, cuMemPoolSetAttribute, (om_cu_pool, unsigned, void *))                                       \
    X(launch, cuLaunchKernel,                                                                                      \
      (om_cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, om_cu_stream, void **, \
       void **))

/* One device of the graph engine's; made at first use, stays. Tables by ordinal have OM_GPUS places. */
typedef struct om_gpu om_gpu;
enum { OM_GPUS = 16 };

om_status om_gpu_open(om_ctx *cx, int ordinal, om_gpu **out);
/* Around driver calls: the device's context is current on this thread in between. */
om_status om_gpu_enter(om_ctx *cx, om_gpu *g);
om_status om_gpu_leave(om_ctx *cx, om_gpu *g, om_status s);

void *om_cuda_stream_now(void);
int om_gpu_ordinal(const om_gpu *g);
bool om_cuda_memory_of_torch(const om_ctx *cx); /* of the context's device */
int om_gpu_capability(const om_gpu *g); /* 80: sm_80 */
om_gpu *om_cuda_gpu(const om_ctx *cx); /* of a context whose device is a GPU (device.c) */

om_status om_gpu_alloc(om_ctx *cx, om_gpu *g, size_t size, void *stream, void **out);
void om_gpu_free(om_gpu *g, void *p, void *stream);
om_status om_gpu_upload(om_ctx *cx, om_gpu *g, void *to, const void *from, size_t size);
om_status om_gpu_download(om_ctx *cx, om_gpu *g, void *to, const void *from, size_t size); /* waits */
om_status om_gpu_set(om_ctx *cx, om_gpu *g, void *to, int byte, size_t size);
om_status om_gpu_start(om_ctx *cx, om_gpu *g, const om_gpu_launch *n, const void *param);
/* A module's bytes, loaded for good; a kernel of it. The context is current. */
om_status om_gpu_module(om_ctx *cx, om_gpu *g, const void *bytes, om_cu_module *out);
om_status om_gpu_module_function(om_ctx *cx, om_gpu *g, om_cu_module m, const char *name, om_cu_function *out);
om_gpu_fault *om_gpu_fault_word(om_gpu *g);
om_status om_gpu_idle(om_ctx *cx, om_gpu *g); /* waits for all streams of the device */
/* Around the queueing of a run's write-backs (device.c). */
om_status om_gpu_writes_begin(om_run *r, om_gpu *g);
void om_gpu_writes_end(void);
om_status om_gpu_fail(om_ctx *cx, om_gpu *g, om_cu_result r, const char *what); /* a driver function's failure */
/* In a file with OM_CUDA_ENTRIES, where cx and g are the context and the device. */
#define OM_GPU_CALL(field, ...)                                         \
    do {                                                                \
        const om_cu_result r_ = api.field(__VA_ARGS__);                 \
        if (r_) return om_gpu_fail(cx, g, r_, field##_name);            \
    } while (0)
void om_cuda_count_add(long launches, long products); /* to om_cuda_count: not queued one by one (device.c) */

/* What the kernels of the next launches may touch: the tests' fake device sets it; NULL else. */
typedef struct om_gpu_range { const void *at; int64_t size; int mode; } om_gpu_range;
extern void (*om_cuda_declare)(const om_gpu_range *r, int n);

/* per .cu of engine.def: a fatbin (image.c); size 0: built without nvcc */
typedef struct om_gpu_image { const char *name; const void *bytes; const uint64_t *size; } om_gpu_image;
extern const om_gpu_image om_gpu_images[];
#endif
