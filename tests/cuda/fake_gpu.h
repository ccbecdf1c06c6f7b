/* fake_gpu.h - the fake GPU's parts to one another: fake_driver.cpp (time, memory, streams, graphs), fake_gpu.cpp
 * (kernels), fake_blaslt.cpp (a library that computes on it). */
#ifndef OM_FAKE_GPU_H
#define OM_FAKE_GPU_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#define PUBLIC extern "C" __attribute__((visibility("default")))
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, ILLEGAL_STATE = 401,
       NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
       CAPTURE_IMPLICIT = 906, CAPTURE_WRONG_THREAD = 908 };
struct range { const void *at; int64_t size; int mode; }; /* 1 read, 2 write */
struct CUstream_st;

extern std::recursive_mutex fake_lock;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(fake_lock)

PUBLIC unsigned fake_gpu_injected(const char *entry); /* the failure a test wants of this call, or 0; counts it */
#define FAILS(name) if (const unsigned code_ = fake_gpu_injected(#name)) return code_
PUBLIC void *fake_gpu_context(int device);
PUBLIC int fake_gpu_device(void);                     /* whose context is current; -1: none */
PUBLIC int fake_gpu_sm(void);                         /* what it says it is: 90 is sm_90 */
PUBLIC bool fake_gpu_current(void);                   /* the thread has a context */
/* What the launch that is being queued has declared; false: nobody declares. */
PUBLIC bool fake_gpu_declared(std::vector<range> *out);
PUBLIC bool fake_gpu_inside(const void *p, int64_t size); /* one live block */
/* Memory that no block is, which the host may have told of (CPU tensors that stand for the device's). */
PUBLIC bool fake_gpu_hosts(const void *p);
PUBLIC unsigned fake_gpu_refuse(unsigned code, const char *why);
/* Work for a stream: runs now or later, or becomes part of a graph. */
PUBLIC unsigned fake_gpu_put(CUstream_st *stream, const std::function<unsigned()> *work);
/* Something that must not be done by a thread that records a graph in mode thread-local: what it returns then, else 0. */
PUBLIC unsigned fake_gpu_unsafe(const char *entry);
#endif
