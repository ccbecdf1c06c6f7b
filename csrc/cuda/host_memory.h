/* cuda/host_memory.h - a GPU's memory from torch's caching allocator, by the C functions of the libtorch_cuda.so that
 * the process has loaded; without them (no torch, an older one) the driver's pool gives it (queue.h).
 *
 * A block belongs to the stream it is asked for: torch hands it on, once it is given back, to work queued later on that
 * stream. Torch counts it (torch.cuda.memory_allocated) and lets go of what it keeps itself before it says no.
 */
#ifndef OM_CUDA_HOST_MEMORY_H
#define OM_CUDA_HOST_MEMORY_H

#include "cuda/driver.h"

#define OM_CUDA_TORCH_API(X)                                                                        \
    X(guard, aoti_torch_create_cuda_stream_guard, (void *, int32_t, void **))                       \
    X(unguard, aoti_torch_delete_cuda_stream_guard, (void *))                                       \
    X(alloc, aoti_torch_cuda_caching_allocator_raw_alloc, (uint64_t, void **))                      \
    X(free, aoti_torch_cuda_caching_allocator_raw_delete, (void *))

bool om_torch_memory_open(void); /* looks once; true: all is there */
/* NULL: torch has none to give. The device's context need not be current, and is what it was afterwards. */
void *om_torch_memory_get(int ordinal, size_t size, void *stream);
bool om_torch_memory_put(void *p); /* any thread */
#endif
