/* fake_torch.h - the parts of the fake libtorch_cuda.so to one another. */
#ifndef OM_FAKE_TORCH_H
#define OM_FAKE_TORCH_H

#include "fake_gpu.h"

struct guard { guard *before; CUstream_st *stream; int device; };
extern thread_local guard *fake_guard; /* of this thread, or NULL */
#define ENTRY(name) if (fake_gpu_injected(#name)) return 1 /* what a caught exception returns */

PUBLIC int32_t aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t size, void **out);
PUBLIC int32_t aoti_torch_cuda_caching_allocator_raw_delete(void *p);
#endif
