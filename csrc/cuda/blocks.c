/* blocks.c - see blocks.h. */
#include "cuda/blocks.h"

#include <pthread.h>
#include <stdlib.h>

enum { OLD = 4096 /* requests */ };

typedef struct kept { uintptr_t stream, size, at; uint64_t since; } kept;
/* kept blocks by stream, size, address; bytes that are kept, in use, and the most that ever were in use */
typedef struct store { kept *v; size_t n, cap; uint64_t clock; size_t idle, used, most; } store;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static store stores[OM_GPUS];
static om_gpu *gpus[OM_GPUS];
static bool keeps = true;

static bool below(const kept *a, uintptr_t stream, uintptr_t size, uintptr_t at) {
    if (a->stream != stream) return a->stream < stream;
    return a->size != size ? a->size < size : a->at < at;
}

static size_t place_of(const store *s, uintptr_t stream, uintptr_t size, uintptr_t at) {
    size_t lo = 0, hi = s->n;
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (below(&s->v[mid], stream, size, at)) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

static void forget(om_gpu *g, store *s, size_t i) {
    const kept k = s->v[i];
    memmove(&s->v[i], &s->v[i + 1], (--s->n - i) * sizeof *s->v);
    s->idle -= k.size;
    if (g) om_gpu_free(g, (void *)k.at, (void *)k.stream);
}

static void forget_all(om_gpu *g, store *s) {
    while (s->n) forget(g, s, s->n - 1);
}

/* Makes room for a block of the driver's: what is old goes, and the oldest as long as there is more than twice what was
 * ever in use. */
static void trim(om_gpu *g, store *s, size_t size) {
    while (s->n) {
        size_t oldest = 0;
        for (size_t i = 1; i < s->n; i++)
            if (s->v[i].since < s->v[oldest].since) oldest = i;
        if (s->v[oldest].since + OLD >= s->clock && s->idle + s->used + size <= 2 * s->most) return;
        forget(g, s, oldest);
    }
}

static om_status get(om_ctx *cx, om_gpu *g, store *s, size_t size, void *stream, void **out) {
    const size_t i = place_of(s, (uintptr_t)stream, size, 0);
    s->clock++;
    if (i < s->n && s->v[i].stream == (uintptr_t)stream && s->v[i].size == size) {
        *out = (void *)s->v[i].at;
        forget(NULL, s, i);
        return OM_OK;
    }
    if (s->used + size > s->most) s->most = s->used + size;
    trim(g, s, size);
    if (!s->n) return om_gpu_alloc(cx, g, size, stream, out);
    om_ctx quiet = *cx;
    const om_status st = om_gpu_alloc(&quiet, g, size, stream, out);
    if (st != OM_NOMEM) {
        if (st != OM_OK) *cx = quiet;
        return st;
    }
    forget_all(g, s);
    return om_gpu_alloc(cx, g, size, stream, out);
}

om_status om_gpu_block_get(om_ctx *cx, om_gpu *g, size_t size, void *stream, void **out) {
    pthread_mutex_lock(&lock);
    gpus[om_gpu_ordinal(g)] = g;
    store *of = &stores[om_gpu_ordinal(g)];
    const om_status s = get(cx, g, of, size, stream, out);
    if (s == OM_OK) of->used += size;
    pthread_mutex_unlock(&lock);
    return s;
}

void om_gpu_block_put(om_gpu *g, void *p, size_t size, void *stream) {
    pthread_mutex_lock(&lock);
    store *s = &stores[om_gpu_ordinal(g)];
    s->used -= size;
    bool room = keeps && s->n < s->cap;
    if (keeps && !room) {
        kept *more = realloc(s->v, (2 * s->cap + 64) * sizeof *more);
        if ((room = more != NULL)) s->v = more, s->cap = 2 * s->cap + 64;
    }
    if (room) {
        const size_t i = place_of(s, (uintptr_t)stream, size, (uintptr_t)p);
        memmove(&s->v[i + 1], &s->v[i], (s->n++ - i) * sizeof *s->v);
        s->v[i] = (kept){(uintptr_t)stream, size, (uintptr_t)p, s->clock};
        s->idle += size;
    }
    pthread_mutex_unlock(&lock);
    if (!room) om_gpu_free(g, p, stream);
}

static void empty(void) {
    for (int i = 0; i < OM_GPUS; i++)
        if (stores[i].n) forget_all(gpus[i], &stores[i]);
}

void om_cuda_keep(bool on) {
    pthread_mutex_lock(&lock);
    keeps = on;
    empty();
    pthread_mutex_unlock(&lock);
}

void om_cuda_empty(void) {
    pthread_mutex_lock(&lock);
    empty();
    pthread_mutex_unlock(&lock);
}
