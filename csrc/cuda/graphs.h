/* cuda/graphs.h - the calls of a slice as CUDA graphs: recorded once, then launched as a whole while their addresses
 * stay the same.
 *
 * A slice is cut into pieces: a call that the CPU or torch does is one of its own, the rest is recorded piece by
 * piece. Of a piece that is run with addresses seen before a graph is made (the first time it runs call by call: the
 * driver and cuBLASLt load kernels at their first launch). The key is everything that a record holds: the stream,
 * whether products cut operands to TF32, whether write-backs are left out, and the address of every block the piece
 * reaches. A piece keeps the graphs of a few keys.
 *
 * What is another at every step is no part of a record. Seed, sizes and numbers of the host (om_value.host), and small
 * inputs, arriving gradients and buffers that nothing writes, once their address has changed, have a place in memory
 * of the graph's own, where kernels were told to read them; copies queued before the launch fill it. Lengths, counts
 * and indices are tensors, faults have one address for ever.
 *
 * A piece is given up, and runs call by call from then on, when its addresses change more than rarely or a graph
 * cannot be made; om_cuda_graph_reason says why. A failure while a graph is made is no failure of the step, which runs
 * call by call: what is broken for good fails there again. A failure of a launch, or of a copy before it, is the
 * step's, as that of a kernel's launch is.
 */
#ifndef OM_CUDA_GRAPHS_H
#define OM_CUDA_GRAPHS_H

#include "cuda/queue.h"
#include "run/plan.h"

/* Queues the calls [from, to) of a run one by one. writing: within om_gpu_writes_begin and _end. */
typedef om_status (*om_gpu_calls)(om_run *r, om_gpu *g, int from, int to, bool writing);

/* Does the call write what outlives the run: a write-back, an update in its state's memory? */
static inline bool om_gpu_call_writes(const om_plan *p, const om_call *c) {
    return c->write != OM_NONE || (c->kind == OM_CALL_RUN && p->g->nodes.v[c->node].op->state);
}

/* The slice [from, to): `calls` for pieces that run call by call, or are recorded. The device's context is current. */
om_status om_gpu_graphs_run(om_run *r, om_gpu *g, int from, int to, om_gpu_calls calls);
void om_gpu_graphs_free(om_plan *p); /* work of the plan's may still be queued */
#endif
