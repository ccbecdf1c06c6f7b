/* blocks.h - blocks that a host may hold: outputs, gradients, arenas. Kept when they come back, so that a step after
 * the first touches no fresh page (measured on GPT-2's gradients: 429 -> 30 ms a step).
 *
 * Small ones (< 64 KiB) come from malloc. Larger ones are mapped, 2 MiB-aligned and advised for huge pages, and kept in
 * a free list searched best-fit with at most a quarter of waste. What is mapped does not exceed the highest volume that
 * was live at one time. Where nothing fits and mapping would exceed it, a block is cut off a larger one, and is one
 * with it again when both are free: logits before, gradients after, in the same pages at every step. Where nothing is
 * large enough either, free blocks are given back and a new one is mapped. What is left of blocks and of no use would
 * make that happen at every step; each time therefore allows 1/64 of that volume more, up to 1/8 (none where a budget
 * of memory is kept). Thread-safe.
 *
 * A host with an allocator of its own (services.alloc) gets its blocks from there instead, each by one call.
 */
#ifndef OM_POOL_H
#define OM_POOL_H
#include "graph/device.h"

om_block *om_cpu_block_get(om_ctx *cx, size_t size); /* the CPU's om_device.block_get */
void om_cpu_block_put(om_block *b);
size_t om_cpu_block_size(om_ctx *cx, size_t size); /* the CPU's om_device.block_size */
void om_cpu_blocks_tight(void); /* the CPU's om_device.blocks_tight */
typedef struct om_pool_stats {
    size_t live, free, peak_live;
    uint64_t mapped, moved; /* blocks asked of the system so far; blocks handed out and given back */
} om_pool_stats;
om_pool_stats om_pool_state(void);
/* gives every free block back; anew: what is live now counts as the highest volume, and no budget is kept. Bytes */
size_t om_pool_trim(bool anew);
#endif
