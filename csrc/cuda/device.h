/* cuda/device.h - a GPU as a device of the engine (graph/device.h). */
#ifndef OM_CUDA_DEVICE_H
#define OM_CUDA_DEVICE_H

#include "graph/device.h"

/* The context's plans run on that GPU from now on. */
om_status om_cuda_use(om_ctx *cx, int ordinal);
void om_cuda_stream(void *stream); /* what this thread queues from now on goes there; at first: the legacy stream */
void om_cuda_tf32(bool allowed);   /* f32 products of this thread's may cut their operands to TF32; at first: no */
/* Tests: bytes of an operand that is brought into aligned rows at once, multiplications from which that is done. */
void om_cuda_aligned(int64_t most, int64_t least);
void om_cuda_graphs(bool allowed); /* this thread's runs may be recorded and launched as CUDA graphs; at first: yes */
/* Whether chains are compiled (program.h) when a plan is made from now on; at first: never. library: path of a
 * libnvrtc.so for where the process has none; cache: directory where modules are kept; "": none. */
enum { OM_PROGRAMS_NEVER, OM_PROGRAMS_PAY /* those with enough elements */, OM_PROGRAMS_ALWAYS };
void om_cuda_programs(int when, const char *library, const char *cache);
/* Chains compiled (0), calls of NVRTC (1), modules found in the cache (2); why not all are, NULL: nothing went wrong */
long om_cuda_program_count(int what);
const char *om_cuda_program_reason(void);
/* Blocks that are given back are kept for the next step (at first: yes). What is kept now goes to the driver's pool. */
void om_cuda_keep(bool on);
/* What is kept now goes to torch's allocator, or the driver's pool. */
void om_cuda_empty(void);
/* The block with that address is worked with on another stream than its own; when it is given back, what that stream
 * has been given is waited for. 0: it is no block of the engine's; -1: no memory. */
int om_cuda_record_stream(int ordinal, const void *p, void *stream);
/* Of a device that om_cuda_use has made; -1: another one. */
int om_cuda_ordinal(const struct om_device *d);
/* Names of the operators of which this process has planned a call that the CPU does; the nth, NULL: no more. */
const char *om_cuda_host_op(int nth);
/* How often such calls have run (0), kernels were launched (1), products left to cuBLASLt (2), convolutions to torch
 * (3). */
long om_cuda_count(int what);
/* CUDA graphs that were made (0), launched (1), pieces of plans that were given up (2), graphs that there are (3). */
long om_cuda_graph_count(int what);
const char *om_cuda_graph_reason(int nth); /* why pieces were given up, each reason once; NULL: no more */
#endif
