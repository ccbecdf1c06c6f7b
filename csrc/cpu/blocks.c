/* blocks.c - see blocks.h. One lock, one array of free blocks in the order of their addresses: a few hundred entries,
 * searched linearly. The lock is held over a fork, so that the child finds it free and the list whole. */
#include "cpu/blocks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SMALL = 64 << 10, HUGE_PAGE = 2 << 20, HOST_HEAD = 128 };

typedef struct block {
    om_block b;
    size_t cap;
    size_t whole;                /* bytes of the mapping that it is a part of, or all of */
    uint64_t mapping, stamp;     /* number of that mapping; when it came back */
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
    size_t spare; /* bytes above the highest volume that may be mapped */
    bool tight;
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

static void leave(size_t i) { /* the list */
    pool.st.free -= pool.free[i]->cap;
    memmove(pool.free + i, pool.free + i + 1, (--pool.n - i) * sizeof *pool.free);
}

static void unmap_at(size_t i) {
    block *b = pool.free[i];
    leave(i);
    munmap(b->b.data, b->cap);
    free(b);
}

static bool follows(const block *a, const block *b) {
    return a->mapping == b->mapping && (char *)a->b.data + a->cap == b->b.data;
}

/* Puts a block among the free ones, and together with those that it was cut from. -> whether there was room for it */
static bool enter(block *b) {
    if (pool.n == pool.cap) {
        const size_t cap = pool.cap ? pool.cap * 2 : 256;
        block **p = realloc(pool.free, cap * sizeof *p);
        if (!p) return false;
        pool.free = p, pool.cap = cap;
    }
    size_t i = pool.n;
    while (i && (uintptr_t)pool.free[i - 1]->b.data > (uintptr_t)b->b.data) i--;
    if (i < pool.n && follows(b, pool.free[i])) {
        block *next = pool.free[i];
        leave(i);
        b->cap += next->cap;
        free(next);
    }
    if (i && follows(pool.free[i - 1], b)) {
        block *last = pool.free[i - 1];
        last->cap += b->cap, last->stamp = b->stamp, pool.st.free += b->cap;
        free(b);
        return true;
    }
    memmove(pool.free + i + 1, pool.free + i, (pool.n++ - i) * sizeof *pool.free);
    pool.free[i] = b;
    pool.st.free += b->cap;
    return true;
}

static size_t smallest(size_t least, size_t most) { /* free block of so many bytes; pool.n: none */
    size_t best = pool.n;
    for (size_t i = 0; i < pool.n; i++)
        if (pool.free[i]->cap >= least && pool.free[i]->cap <= most &&
            (best == pool.n || pool.free[i]->cap < pool.free[best]->cap))
            best = i;
    return best;
}

static block *take(size_t size) { /* best fit, at most a quarter of waste */
    const size_t at = smallest(size, size + size / 4);
    if (at == pool.n) return NULL;
    block *b = pool.free[at];
    leave(at);
    return b;
}

/* The beginning of a larger block; the rest of it stays free. */
static block *cut(size_t size) {
    const size_t at = smallest(size, SIZE_MAX);
    block *head = at < pool.n ? malloc(sizeof *head) : NULL, *rest;
    if (!head) return NULL;
    rest = pool.free[at];
    *head = (block){.b.data = rest->b.data, .cap = size, .whole = rest->whole, .mapping = rest->mapping};
    rest->b.data = (char *)rest->b.data + size, rest->cap -= size, pool.st.free -= size;
    return head;
}

static size_t most_live(size_t size) {
    return pool.st.live + size > pool.st.peak_live ? pool.st.live + size : pool.st.peak_live;
}

static bool room(size_t size) { /* to map so many bytes more */
    return pool.st.live + pool.st.free + size <= most_live(size) + pool.spare;
}

/* Whole mappings first, oldest first: where a rest is given back, its mapping is too small for what came from it. */
static size_t least_missed(void) {
    size_t best = 0;
    for (size_t i = 1; i < pool.n; i++) {
        const block *a = pool.free[i], *b = pool.free[best];
        const bool whole = a->cap == a->whole, other = b->cap == b->whole;
        if (whole != other ? whole : a->stamp < b->stamp) best = i;
    }
    return best;
}

/* What is given back where the volume does not grow will be missed at the next step: from then on a little more is
 * kept. */
static void make_room(size_t size) {
    if (room(size)) return;
    if (!pool.tight && pool.st.live + size <= pool.st.peak_live) {
        pool.spare += pool.st.peak_live / 64;
        if (pool.spare > pool.st.peak_live / 8) pool.spare = pool.st.peak_live / 8;
    }
    while (pool.n && !room(size)) unmap_at(least_missed());
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
    if (!b && mapped && !room(cap)) b = cut(cap);
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
            *b = (block){.b.data = data, .cap = cap, .whole = cap, .mapping = pool.st.mapped};
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
    if (!mapped || !enter(b)) {
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

void om_cpu_blocks_tight(void) {
    pthread_mutex_lock(&pool.lock);
    pool.spare = 0, pool.tight = true;
    pthread_mutex_unlock(&pool.lock);
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
    if (anew) pool.st.peak_live = pool.st.live, pool.spare = 0, pool.tight = false;
    pthread_mutex_unlock(&pool.lock);
    return bytes;
}
