/* blocks.h - blocks that a host may hold: outputs, gradients, arenas. Kept when they come back, so that a step after
 * the first touches no fresh page (measured on GPT-2's gradients: 429 -> 30 ms a step).
 *
 * A block is handed out whole. Small ones (< 64 KiB) come from malloc. Larger ones are mapped, 2 MiB-aligned and
 * advised for huge pages, and kept in a free list searched best-fit with at most a quarter of waste. What is mapped
 * never exceeds the highest volume that was live at one time: before a new block is mapped, free blocks that do not fit
 * are given back, oldest first. Thread-safe.
 */
#ifndef OM_POOL_H
#define OM_POOL_H
#include <stddef.h>
#include <stdint.h>

typedef struct om_block { void *data; size_t size, cap; uint64_t stamp; } om_block;
om_block *om_block_get(size_t size); /* 64-byte aligned, contents undefined; NULL when memory is out */
void om_block_put(om_block *b);      /* NULL is fine */
typedef struct om_pool_stats { size_t live, free, peak_live; } om_pool_stats;
om_pool_stats om_pool_state(void);
/* gives every free block back, and what is live now counts as the highest volume; bytes */
size_t om_pool_trim(void);
#endif
