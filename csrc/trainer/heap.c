/* heap.c - see heap.h. The free blocks are a list in order of address; there are few, because neighbours join. */
#include "trainer/heap.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HEAD = 64 };

/* Address space of which only pages that were used exist; NULL: not that much. */
static void *space_take(size_t size) {
#if defined(__wasm__) /* one memory, which grows: what nobody has touched costs the host nothing */
    return aligned_alloc(HEAD, size);
#else
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
#endif
}
/* the last part of it */
static bool space_cut(void *p, size_t size) {
#if defined(__wasm__)
    return (void)p, (void)size, false;
#else
    return !munmap(p, size);
#endif
}
static void space_give(void *p, size_t size) {
#if defined(__wasm__)
    (void)size;
    free(p);
#else
    munmap(p, size);
#endif
}
#if defined(__wasm__)
enum { SPACE_ZERO = false }; /* may have been somebody's before */
#else
enum { SPACE_ZERO = true };
#endif

typedef struct om_heap_block {
    size_t size;                       /* with the head */
    struct om_heap_block *prev, *next; /* free: in order of address */
} block;

bool om_heap_open(om_heap *h, void *arena, size_t size) {
    *h = (om_heap){.base = arena, .size = size & ~(size_t)(HEAD - 1)};
    if (!arena) {
        h->mapped = true;
        const size_t most = sizeof(void *) > 4 ? (size_t)1 << 37 : (size_t)1 << 29;
        for (h->size = most; !(h->base = space_take(h->size)); h->size /= 2)
            if (h->size <= (size_t)1 << 20) return false;
        /* space is limited: half of what was found is for others */
        if (h->size < most && space_cut(h->base + h->size / 2, h->size / 2)) h->size /= 2;
    }
    if (h->size < 2 * HEAD || (uintptr_t)h->base % HEAD) return false;
    pthread_mutex_init(&h->lock, NULL);
    h->first_free = (block *)(void *)h->base;
    *h->first_free = (block){.size = h->size};
    return true;
}

void om_heap_close(om_heap *h) {
    if (!h->first_free && !h->high) return;
    if (h->mapped) space_give(h->base, h->size);
    pthread_mutex_destroy(&h->lock);
    *h = (om_heap){0};
}

static size_t offset_of(const om_heap *h, const block *b) { return (size_t)((const char *)b - h->base); }

void *om_heap_alloc(void *heap, size_t size) {
    om_heap *h = heap;
    void *p = NULL;
    if (size > SIZE_MAX / 2) return NULL;
    const size_t need = ((size + HEAD - 1) & ~(size_t)(HEAD - 1)) + HEAD;
    pthread_mutex_lock(&h->lock);
    for (block *b = h->first_free; b; b = b->next) {
        if (b->size < need) continue;
        const size_t end = offset_of(h, b) + need;
        if (h->sealed && end > h->high) break;
        block *next = b->next;
        if (b->size - need >= HEAD) {
            block *rest = (block *)(void *)((char *)b + need);
            *rest = (block){.size = b->size - need, .prev = b->prev, .next = b->next};
            if (next) next->prev = rest;
            next = rest;
            b->size = need;
        } else if (next) {
            next->prev = b->prev;
        }
        if (b->prev)
            b->prev->next = next;
        else
            h->first_free = next;
        if (end > h->high) h->high = end;
        p = (char *)b + HEAD;
        break;
    }
    pthread_mutex_unlock(&h->lock);
    return p;
}

void *om_heap_zeros(om_heap *h, size_t size) {
    /* the head of what is left of a split lies behind `high`, until its block is joined */
    const size_t high = h->high + HEAD < h->size ? h->high + HEAD : h->size;
    const char *used = h->base + (h->mapped && SPACE_ZERO ? high : h->size);
    char *p = om_heap_alloc(h, size);
    if (p && p < used) memset(p, 0, (size_t)(used - p) < size ? (size_t)(used - p) : size);
    return p;
}

static void join(block *b) { /* with the next, if they touch */
    block *n = b->next;
    if (!n || (char *)b + b->size != (char *)n) return;
    b->size += n->size;
    b->next = n->next;
    if (n->next) n->next->prev = b;
}

void om_heap_free(void *heap, void *p, size_t size) {
    om_heap *h = heap;
    (void)size;
    if (!p) return;
    block *b = (block *)(void *)((char *)p - HEAD), *prev = NULL, *next;
    pthread_mutex_lock(&h->lock);
    for (next = h->first_free; next && next < b; next = next->next) prev = next;
    b->prev = prev;
    b->next = next;
    if (next) next->prev = b;
    if (prev)
        prev->next = b;
    else
        h->first_free = b;
    join(b);
    if (prev) join(prev);
    pthread_mutex_unlock(&h->lock);
}

void om_heap_fix(om_heap *h) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    pthread_mutex_lock(&h->lock);
    block *b = h->first_free;
    while (b && b->next) b = b->next;
    if (h->mapped && b && offset_of(h, b) + b->size == h->size) {
        const size_t used = offset_of(h, b) + HEAD > h->high ? offset_of(h, b) + HEAD : h->high;
        const size_t end = (used + page - 1) / page * page;
        if (end < h->size && space_cut(h->base + end, h->size - end)) {
            b->size = end - offset_of(h, b);
            h->size = end;
        }
    }
    pthread_mutex_unlock(&h->lock);
}

void om_heap_trim(om_heap *h) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!h->mapped) return;
    pthread_mutex_lock(&h->lock);
    for (const block *b = h->first_free; b; b = b->next) {
        const size_t from = (offset_of(h, b) + sizeof *b + page - 1) / page * page;
        const size_t end = offset_of(h, b) + b->size, to = (end < h->high ? end : h->high) / page * page;
        if (to > from) madvise(h->base + from, to - from, MADV_DONTNEED);
    }
    pthread_mutex_unlock(&h->lock);
}
