/* blocks.c - see blocks.h. */
#include "cuda/blocks.h"

#include <pthread.h>
#include <stdlib.h>

enum { MAX_DEVICES = 16, OLD = 4096 /* requests */ };

typedef struct kept { uintptr_t stream, size, at; uint64_t since; } kept;
typedef struct store { kept *v; size_t n, cap; uint64_t clock; } store; /* by stream, size, address */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static store stores[MAX_DEVICES];
static om_gpu *gpus[MAX_DEVICES];
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

/* What came back before that goes to the driver. */
static void release(om_gpu *g, store *s, uint64_t before) {
    size_t left = 0;
    for (size_t i = 0; i < s->n; i++)
        if (s->v[i].since < before) om_gpu_free(g, (void *)s->v[i].at, (void *)s->v[i].stream);
        else s->v[left++] = s->v[i];
    s->n = left;
}

static om_status get(om_ctx *cx, om_gpu *g, store *s, size_t size, void *stream, void **out) {
    const size_t i = place_of(s, (uintptr_t)stream, size, 0);
    s->clock++;
    if (i < s->n && s->v[i].stream == (uintptr_t)stream && s->v[i].size == size) {
        *out = (void *)s->v[i].at;
        memmove(&s->v[i], &s->v[i + 1], (--s->n - i) * sizeof *s->v);
        return OM_OK;
    }
    if (s->clock > OLD) release(g, s, s->clock - OLD);
    if (!s->n) return om_gpu_alloc(cx, g, size, stream, out);
    om_ctx quiet = *cx;
    const om_status st = om_gpu_alloc(&quiet, g, size, stream, out);
    if (st != OM_NOMEM) {
        if (st != OM_OK) *cx = quiet;
        return st;
    }
    release(g, s, UINT64_MAX);
    return om_gpu_alloc(cx, g, size, stream, out);
}

om_status om_gpu_block_get(om_ctx *cx, om_gpu *g, size_t size, void *stream, void **out) {
    pthread_mutex_lock(&lock);
    gpus[om_gpu_ordinal(g)] = g;
    const om_status s = get(cx, g, &stores[om_gpu_ordinal(g)], size, stream, out);
    pthread_mutex_unlock(&lock);
    return s;
}

void om_gpu_block_put(om_gpu *g, void *p, size_t size, void *stream) {
    pthread_mutex_lock(&lock);
    store *s = &stores[om_gpu_ordinal(g)];
    bool room = keeps && s->n < s->cap;
    if (keeps && !room) {
        kept *more = realloc(s->v, (2 * s->cap + 64) * sizeof *more);
        if ((room = more != NULL)) s->v = more, s->cap = 2 * s->cap + 64;
    }
    if (room) {
        const size_t i = place_of(s, (uintptr_t)stream, size, (uintptr_t)p);
        memmove(&s->v[i + 1], &s->v[i], (s->n++ - i) * sizeof *s->v);
        s->v[i] = (kept){(uintptr_t)stream, size, (uintptr_t)p, s->clock};
    }
    pthread_mutex_unlock(&lock);
    if (!room) om_gpu_free(g, p, stream);
}

void om_cuda_keep(bool on) {
    pthread_mutex_lock(&lock);
    keeps = on;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (stores[i].n) release(gpus[i], &stores[i], UINT64_MAX);
    pthread_mutex_unlock(&lock);
}
