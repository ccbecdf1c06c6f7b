/* heap.h - all memory of a trainer in one arena: the caller's, or address space reserved at once of which only pages
 * that were used exist.
 *
 * Blocks lie side by side, 64-byte aligned, each behind a head of 64 bytes. A request takes the first free block, by
 * address, that is large enough; what is given back joins its free neighbours. So where a block comes to lie depends
 * on the live blocks and nothing else: a step that begins with the same live blocks as one before finds its memory at
 * the same places and never needs more. That is what `sealed` relies on: the end of the heap is then where it has been.
 */
#ifndef OM_HEAP_H
#define OM_HEAP_H
#include "graph/engine.h"

#include <pthread.h>

typedef struct om_heap {
    pthread_mutex_t lock;
    char *base;
    size_t size; /* of the arena or the reservation */
    size_t high; /* the end of the last block that ever lived */
    struct om_heap_block *first_free;
    bool mapped, sealed;
} om_heap;

/* false: no address space, or an arena too small for one block */
bool om_heap_open(om_heap *h, void *arena, size_t size);
void om_heap_close(om_heap *h);                      /* all blocks at once */
void *om_heap_alloc(void *heap, size_t size);        /* services.alloc; NULL: it does not fit */
void *om_heap_zeros(om_heap *h, size_t size);        /* of bytes 0; pages nobody has used stay so */
void om_heap_free(void *heap, void *p, size_t size); /* services.free */
void om_heap_fix(om_heap *h);                        /* mapped: it never grows again; address space goes back */
void om_heap_trim(om_heap *h);                       /* mapped: whole pages of free blocks go back to the system */
#endif
