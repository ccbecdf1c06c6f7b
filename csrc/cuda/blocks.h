/* cuda/blocks.h - blocks of a GPU's memory that come back at every step.
 *
 * What is given back is kept and handed out again on the same stream for the same size, the lowest address first. A
 * step that asks for the same sizes in the same order as the one before so gets the same addresses, in whatever order
 * its blocks came back; CUDA graphs (graphs.h) live on that, and the driver is asked for nothing. When another block is
 * needed, what nobody has asked for during many requests goes to the driver's pool, then the oldest, until all is at
 * most twice what was ever in use; when there is no memory, everything.
 */
#ifndef OM_CUDA_BLOCKS_H
#define OM_CUDA_BLOCKS_H

#include "cuda/queue.h"

/* Contents undefined; the device's context is current. */
om_status om_gpu_block_get(om_ctx *cx, om_gpu *g, size_t size, void *stream, void **out);
void om_gpu_block_put(om_gpu *g, void *p, size_t size, void *stream); /* any thread */
#endif
