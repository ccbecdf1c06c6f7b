/* lent.c - see lent.h. */
#include "cuda/lent.h"

#include "graph/sabotage.h"

#include <pthread.h>
#include <stdlib.h>

OM_CUDA_ENTRIES(OM_CUDA_EVENT_API)

typedef struct lent { uintptr_t at; size_t size; int n; void **stream; } lent; /* streams besides its own */
typedef struct store { lent *v; size_t n, cap; } store;                       /* by address */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static store stores[OM_GPUS];
static bool ready;

/* The first block behind the address. */
static size_t behind(const store *s, uintptr_t at) {
    size_t lo = 0, hi = s->n;
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (s->v[mid].at <= at) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

om_status om_gpu_lend(om_ctx *cx, om_gpu *g, const void *p, size_t size) {
    store *s = &stores[om_gpu_ordinal(g)];
    om_status st = OM_OK;
    pthread_mutex_lock(&lock);
    if (s->n == s->cap) {
        lent *more = realloc(s->v, (2 * s->cap + 64) * sizeof *more);
        if (more) s->v = more, s->cap = 2 * s->cap + 64;
        else st = om_fail(cx, OM_NOMEM, "no memory to note a block");
    }
    if (st == OM_OK) {
        const size_t i = behind(s, (uintptr_t)p);
        memmove(&s->v[i + 1], &s->v[i], (s->n++ - i) * sizeof *s->v);
        s->v[i] = (lent){.at = (uintptr_t)p, .size = size};
    }
    pthread_mutex_unlock(&lock);
    return st;
}

int om_cuda_record_stream(int ordinal, const void *p, void *stream) {
    if (ordinal < 0 || ordinal >= OM_GPUS) return 0;
    store *s = &stores[ordinal];
    int found = 0;
    pthread_mutex_lock(&lock);
    const size_t i = behind(s, (uintptr_t)p);
    lent *b = i ? &s->v[i - 1] : NULL;
    if (b && (uintptr_t)p - b->at < b->size) {
        found = 1;
        int k = 0;
        while (k < b->n && b->stream[k] != stream) k++;
        if (k == b->n) {
            void **more = realloc(b->stream, (size_t)(b->n + 1) * sizeof *more);
            if (more) b->stream = more, b->stream[b->n++] = stream;
            else found = -1;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* `own` waits for what `other` has been given; where that cannot be said (a capture), the host does. */
static bool follow(void *own, void *other) {
    enum { NO_TIMES = 2 };
    om_cu_event e = NULL;
    if (own == other || om_sabotage("lent.follow")) return true;
    bool good = !api.event_new(&e, NO_TIMES);
    if (good) {
        good = !api.event_record(e, other) && !api.event_wait(own, e, 0);
        api.event_free(e); /* when it is through */
    }
    return good || !api.wait(other);
}

bool om_gpu_lent_back(om_gpu *g, const void *p, void *stream) {
    store *s = &stores[om_gpu_ordinal(g)];
    lent b = {0};
    om_ctx quiet = {.status = OM_OK};
    pthread_mutex_lock(&lock);
    const size_t i = behind(s, (uintptr_t)p);
    if (i && s->v[i - 1].at == (uintptr_t)p) {
        b = s->v[i - 1];
        memmove(&s->v[i - 1], &s->v[i], (s->n-- - i) * sizeof *s->v);
    }
    if (b.n && !ready) ready = OM_CUDA_LOOK(&quiet, "") == OM_OK;
    const bool can = ready;
    pthread_mutex_unlock(&lock);
    bool good = !b.n;
    if (b.n && can && om_gpu_enter(&quiet, g) == OM_OK) {
        good = true;
        for (int k = 0; k < b.n && good; k++) good = follow(stream, b.stream[k]);
        om_gpu_leave(&quiet, g, OM_OK);
    }
    free(b.stream);
    return good;
}
