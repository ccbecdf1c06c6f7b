/* blocks.c - see blocks.h. One lock, one array of free blocks: a few hundred entries, searched linearly. The lock is
 * held over a fork, so that the child finds it free and the list whole. */
#include "cpu/blocks.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { SMALL = 64 << 10, HUGE_PAGE = 2 << 20, HOST_HEAD = 128 };

typedef struct block {
    om_block b;
    size_t cap;
    uint64_t stamp;
    void (*host_free)(void *user, void *p, size_t size); /* the host's: one piece with its data, HOST_HEAD before it */
    void *user;
} block;
_Static_assert(sizeof(block) <= HOST_HEAD, "a block of the host's lies before its data");

static struct {
    pthread_mutex_t lock;
    block **free;
    size_t n, cap;
    om_pool_stats st;
    uint64_t clock;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void pool_fork(void) { pthread_mutex_lock(&pool.lock); }
static void pool_forked(void) { pthread_mutex_unlock(&pool.lock); }
static void pool_once(void) { pthread_atfork(pool_fork, pool_forked, pool_forked); }

static size_t round_up(size_t x, size_t to) { return (x + to - 1) & ~(to - 1); }

static void *map(size_t size) {
    size_t slack = size >= HUGE_PAGE ? HUGE_PAGE : 0;
    char *p = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (slack) { /* cut down to an aligned piece */
        size_t lead = (size_t)(-(uintptr_t)p & (HUGE_PAGE - 1));
        if (lead) munmap(p, lead);
        if (slack - lead) munmap(p + lead + size, slack - lead);
        p += lead;
        madvise(p, size & ~(size_t)(HUGE_PAGE - 1), MADV_HUGEPAGE);
    }
    return p;
}

static void unmap_at(size_t i) {
    block *b = pool.free[i];
    pool.st.free -= b->cap;
    munmap(b->b.data, b->cap);
    free(b);
    pool.free[i] = pool.free[--pool.n];
}

static block *take(size_t size) { /* best fit, at most a quarter of waste */
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < pool.n; i++)
        if (pool.free[i]->cap >= size && pool.free[i]->cap <= size + size / 4 &&
            (best == SIZE_MAX || pool.free[i]->cap < pool.free[best]->cap))
            best = i;
    if (best == SIZE_MAX) return NULL;
    block *b = pool.free[best];
    pool.free[best] = pool.free[--pool.n];
    pool.st.free -= b->cap;
    return b;
}

static void make_room(size_t size) {
    size_t limit = pool.st.live + size > pool.st.peak_live ? pool.st.live + size : pool.st.peak_live;
    while (pool.n && pool.st.live + pool.st.free + size > limit) {
        size_t old = 0;
        for (size_t i = 1; i < pool.n; i++)
            if (pool.free[i]->stamp < pool.free[old]->stamp) old = i;
        unmap_at(old);
    }
}

/* The capacity alone says where a block's memory is from: below SMALL malloc, else a mapping. */
static size_t pool_round(size_t size) {
    const size_t cap = round_up(size ? size : 1, 64);
    return cap < SMALL ? cap : round_up(size, SMALL);
}

static block *pool_get(size_t size) {
    const size_t cap = pool_round(size);
    const bool mapped = cap >= SMALL;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (cap < size) return NULL;
    pthread_once(&once, pool_once);
    pthread_mutex_lock(&pool.lock);
    block *b = mapped ? take(cap) : NULL;
    if (!b) {
        if (mapped) make_room(cap);
        b = malloc(sizeof *b);
        void *data = !b ? NULL : mapped ? map(cap) : aligned_alloc(64, cap);
        pool.st.mapped += mapped;
        if (b && !data && pool.n && mapped) { /* memory is out: the free blocks are the last reserve */
            while (pool.n) unmap_at(pool.n - 1);
            data = map(cap);
        }
        if (data) {
            *b = (block){.b.data = data, .cap = cap};
        } else {
            free(b);
            b = NULL;
        }
    }
    if (b) {
        pool.st.moved++;
        pool.st.live += b->cap;
        if (pool.st.live > pool.st.peak_live) pool.st.peak_live = pool.st.live;
    }
    pthread_mutex_unlock(&pool.lock);
    return b;
}

static void pool_put(block *b) {
    pthread_mutex_lock(&pool.lock);
    pool.st.moved++;
    pool.st.live -= b->cap;
    b->stamp = ++pool.clock;
    const bool mapped = b->cap >= SMALL;
    bool keep = mapped;
    if (keep && pool.n == pool.cap) {
        size_t cap = pool.cap ? pool.cap * 2 : 256;
        block **p = realloc(pool.free, cap * sizeof *p);
        if (p) pool.free = p, pool.cap = cap;
        else keep = false;
    }
    if (keep) {
        pool.free[pool.n++] = b;
        pool.st.free += b->cap;
    } else {
        if (mapped) munmap(b->b.data, b->cap);
        else free(b->b.data);
        free(b);
    }
    pthread_mutex_unlock(&pool.lock);
}

static block *host_get(om_ctx *cx, size_t size) {
    const size_t cap = round_up(size, 64) + HOST_HEAD;
    block *b = cap < size ? NULL : cx->sv.alloc(cx->sv.user, cap);
    if (b)
        *b = (block){.b.data = (char *)b + HOST_HEAD, .cap = cap, .host_free = cx->sv.free, .user = cx->sv.user};
    return b;
}

size_t om_cpu_block_size(om_ctx *cx, size_t size) {
    return cx->host_alloc ? round_up(size, 64) + HOST_HEAD : pool_round(size);
}

om_block *om_cpu_block_get(om_ctx *cx, size_t size) {
    block *b = cx->host_alloc ? host_get(cx, size) : pool_get(size);
    if (!b) {
        om_fail(cx, OM_NOMEM, "out of memory: a block of %zu bytes was asked for", size);
        return NULL;
    }
    b->b.size = size;
    b->b.device = &om_device_cpu;
    return &b->b;
}

void om_cpu_block_put(om_block *block_) {
    block *b = (block *)(void *)block_;
    if (b->host_free) b->host_free(b->user, b, b->cap);
    else pool_put(b);
}

om_pool_stats om_pool_state(void) {
    pthread_mutex_lock(&pool.lock);
    om_pool_stats s = pool.st;
    pthread_mutex_unlock(&pool.lock);
    return s;
}

size_t om_pool_trim(bool anew) {
    pthread_mutex_lock(&pool.lock);
    size_t bytes = pool.st.free;
    while (pool.n) unmap_at(pool.n - 1);
    if (anew) pool.st.peak_live = pool.st.live;
    pthread_mutex_unlock(&pool.lock);
    return bytes;
}
