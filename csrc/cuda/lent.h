/* cuda/lent.h - blocks of a GPU's memory that are in use, by address, and the streams that read them besides their own.
 *
 * A block is handed on in the order of its stream. Where another stream works with it (Tensor.record_stream of what the
 * engine gave out: torch's allocator knows nothing of such memory, so the call does nothing there) its own waits, when
 * it is given back, for what the other has been given until then: on the device, not on the host.
 */
#ifndef OM_CUDA_LENT_H
#define OM_CUDA_LENT_H

#include "cuda/queue.h"

#define OM_CUDA_EVENT_API(X)                                                    \
    X(event_new, cuEventCreate, (om_cu_event *, unsigned))                      \
    X(event_free, cuEventDestroy_v2, (om_cu_event))                             \
    X(event_record, cuEventRecord, (om_cu_event, om_cu_stream))                 \
    X(event_wait, cuStreamWaitEvent, (om_cu_stream, om_cu_event, unsigned))     \
    X(wait, cuStreamSynchronize, (om_cu_stream))
typedef struct CUevent_st *om_cu_event;

om_status om_gpu_lend(om_ctx *cx, om_gpu *g, const void *p, size_t size); /* a block goes into use */
/* It is given back, on its stream; false: another stream may be working with it, and it must stay. Any thread. */
bool om_gpu_lent_back(om_gpu *g, const void *p, void *stream);
#endif
