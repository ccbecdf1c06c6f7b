/* fake_allocator.cpp - what the engine uses of libtorch_cuda.so, on the fake GPU: torch's caching allocator, which gives
 * memory in the order of the stream that is current on the thread, and guards that make one current. An allocation
 * without a guard, guards that are not undone in turn, and a block given back twice are failures. */
#include "fake_torch.h"

#include <map>

PUBLIC unsigned cuMemAllocAsync(uint64_t *out, size_t size, CUstream_st *stream);
PUBLIC unsigned cuMemFreeAsync(uint64_t at, CUstream_st *stream);
PUBLIC unsigned cuCtxPushCurrent_v2(void *context);
PUBLIC unsigned cuCtxPopCurrent_v2(void **out);

thread_local guard *fake_guard;
#define current fake_guard
struct of_torch { CUstream_st *stream; int device; };
static std::map<void *, of_torch> held;
static std::mutex held_lock;

PUBLIC int fake_torch_guards(void) { return current != nullptr; }
PUBLIC long fake_torch_blocks(void) {
    std::lock_guard<std::mutex> l(held_lock);
    return (long)held.size();
}

/* Of the blocks that are out; they are all on one. */
PUBLIC void *fake_torch_block_stream(void) {
    std::lock_guard<std::mutex> l(held_lock);
    CUstream_st *one = held.empty() ? nullptr : held.begin()->second.stream;
    for (const auto &b : held)
        if (b.second.stream != one) fake_gpu_refuse(INVALID_VALUE, "blocks of several streams are out");
    return one;
}

PUBLIC int32_t aoti_torch_create_cuda_stream_guard(void *stream, int32_t device, guard **out) {
    ENTRY(aoti_torch_create_cuda_stream_guard);
    *out = current = new guard{current, (CUstream_st *)stream, device};
    return 0;
}

PUBLIC int32_t aoti_torch_delete_cuda_stream_guard(guard *g) {
    if (g != current) return (int32_t)fake_gpu_refuse(INVALID_VALUE, "guards of torch's stream are undone out of turn");
    current = g->before;
    delete g;
    ENTRY(aoti_torch_delete_cuda_stream_guard);
    return 0;
}

PUBLIC int32_t aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t size, void **out) {
    ENTRY(aoti_torch_cuda_caching_allocator_raw_alloc);
    if (!current) return (int32_t)fake_gpu_refuse(INVALID_VALUE, "memory of torch's without a guard");
    uint64_t at = 0;
    void *none;
    cuCtxPushCurrent_v2(fake_gpu_context(current->device));
    const unsigned r = cuMemAllocAsync(&at, size, current->stream);
    cuCtxPopCurrent_v2(&none);
    if (r) return 1;
    *out = (void *)(uintptr_t)at;
    std::lock_guard<std::mutex> l(held_lock);
    held[*out] = {current->stream, current->device};
    return 0;
}

PUBLIC int32_t aoti_torch_cuda_caching_allocator_raw_delete(void *p) {
    ENTRY(aoti_torch_cuda_caching_allocator_raw_delete);
    of_torch of;
    {
        std::lock_guard<std::mutex> l(held_lock);
        const auto b = held.find(p);
        if (b == held.end()) return (int32_t)fake_gpu_refuse(INVALID_VALUE, "a block that is none goes back to torch");
        of = b->second;
        held.erase(b);
    }
    void *none;
    cuCtxPushCurrent_v2(fake_gpu_context(of.device));
    const unsigned r = cuMemFreeAsync((uint64_t)(uintptr_t)p, of.stream);
    cuCtxPopCurrent_v2(&none);
    return r != 0;
}
