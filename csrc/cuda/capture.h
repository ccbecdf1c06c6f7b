/* cuda/capture.h - CUDA graphs through the driver: what a thread queues is recorded instead of run, and the record is
 * launched as a whole.
 *
 * Recording is done on a stream of the engine's own, one per device (the legacy stream cannot be captured), which
 * never runs anything; a graph is launched on the caller's. Mode thread-local: calls of other threads (NCCL's
 * watchdog, torch's for page-locked memory) neither break a record nor are broken. Entry points are opened at first
 * use.
 */
#ifndef OM_CUDA_CAPTURE_H
#define OM_CUDA_CAPTURE_H

#include "cuda/queue.h"

typedef struct CUgraph_st *om_cu_graph;
typedef struct CUgraphExec_st *om_cu_exec;

#define OM_CUDA_CAPTURE_API(X)                                                                                     \
    X(stream_new, cuStreamCreate, (om_cu_stream *, unsigned))                                                      \
    X(stream_free, cuStreamDestroy_v2, (om_cu_stream))                                                             \
    X(begin, cuStreamBeginCapture_v2, (om_cu_stream, unsigned))                                                    \
    X(end, cuStreamEndCapture, (om_cu_stream, om_cu_graph *))                                                      \
    X(make, cuGraphInstantiateWithFlags, (om_cu_exec *, om_cu_graph, unsigned long long))                          \
    X(graph_free, cuGraphDestroy, (om_cu_graph))                                                                   \
    X(exec_free, cuGraphExecDestroy, (om_cu_exec))                                                                 \
    X(play, cuGraphLaunch, (om_cu_exec, om_cu_stream))                                                             \
    X(copy, cuMemcpyDtoDAsync_v2, (om_cu_address, om_cu_address, size_t, om_cu_stream))

/* What `queue` queues on this thread's stream becomes *out; nothing of it runs. Where anything fails, also `queue`,
 * there is no graph, no stream is left recording, and what was queued is gone. The device's context is current. */
om_status om_gpu_capture(om_ctx *cx, om_gpu *g, om_status (*queue)(void *arg), void *arg, om_cu_exec *out);
/* On this thread's stream, behind what is there and behind earlier launches of the same graph. Not two at once. */
om_status om_gpu_play(om_ctx *cx, om_gpu *g, om_cu_exec exec);
/* May be on its way: it ends first. The device's context is current. */
void om_gpu_exec_free(om_cu_exec exec);
/* Around a wait for a whole device, which must not come while one of its streams records: that would end the record and
 * fail. Nobody's record begins in between. */
void om_gpu_records_pause(void);
void om_gpu_records_resume(void);
om_status om_gpu_move(om_ctx *cx, om_gpu *g, void *to, const void *from, size_t size); /* within the device */
#endif
