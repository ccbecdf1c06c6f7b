/* fake_gpu.h - what the fake driver (fake_gpu.cpp) gives to a library that computes on its device (fake_blaslt.cpp). */
#ifndef OM_FAKE_GPU_H
#define OM_FAKE_GPU_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define PUBLIC extern "C" __attribute__((visibility("default")))
struct range { const void *at; int64_t size; int mode; }; /* 1 read, 2 write */

PUBLIC unsigned fake_gpu_injected(const char *entry); /* the failure a test wants of this call, or 0; counts it */
PUBLIC bool fake_gpu_current(void);                   /* the thread has a context */
/* What the launch that is being queued has declared; false: nobody declares. */
PUBLIC bool fake_gpu_declared(std::vector<range> *out);
PUBLIC bool fake_gpu_inside(const void *p, int64_t size); /* one live block */
PUBLIC unsigned fake_gpu_refuse(unsigned code, const char *why);
PUBLIC unsigned fake_gpu_put(const std::function<unsigned()> *work);
#endif
