/* threads.c - see threads.h. A job is cut into pieces of one size that threads claim by a counter; the caller works too
 * and returns when the last piece is done. A call from inside of a piece, or while another thread's job runs, is
 * done by its caller alone. Workers look for the next job for some microseconds, then sleep on a condition.
 */
#include "trainer/threads.h"

#include <pthread.h>
#include <stdatomic.h>

enum { PIECES = 4 /* per thread */, SPINS = 2000 };

struct om_threads {
    int n; /* with the caller's */
    pthread_t *thread;
    pthread_mutex_t lock, owner;
    pthread_cond_t work, idle;
    atomic_uint job; /* number of the job; changes under the lock */
    int busy;        /* workers inside of it; under the lock */
    bool stop;
    /* of the job */
    void (*fn)(void *, int64_t, int64_t);
    void *arg;
    int64_t end, piece;
    atomic_llong next;
};

static _Thread_local bool inside;

static void claim(om_threads *t) {
    inside = true;
    for (;;) {
        const int64_t from = atomic_fetch_add(&t->next, t->piece);
        if (from >= t->end) break;
        t->fn(t->arg, from, t->end - from < t->piece ? t->end : from + t->piece);
    }
    inside = false;
}

static void *worker(void *arg) {
    om_threads *t = arg;
    unsigned done = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load_explicit(&t->job, memory_order_relaxed) == done; i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        pthread_mutex_lock(&t->lock);
        while (!t->stop && atomic_load(&t->job) == done) pthread_cond_wait(&t->work, &t->lock);
        if (t->stop) break;
        done = atomic_load(&t->job);
        const bool some = t->fn != NULL;
        t->busy += some;
        pthread_mutex_unlock(&t->lock);
        if (!some) continue;
        claim(t);
        pthread_mutex_lock(&t->lock);
        if (!--t->busy) pthread_cond_signal(&t->idle);
        pthread_mutex_unlock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

void om_threads_for(void *threads, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg) {
    om_threads *t = threads;
    if (inside || n <= grain || pthread_mutex_trylock(&t->owner)) {
        fn(arg, 0, n);
        return;
    }
    int64_t piece = (n + PIECES * t->n - 1) / (PIECES * t->n);
    if (piece < grain) piece = grain;
    pthread_mutex_lock(&t->lock);
    t->fn = fn, t->arg = arg, t->end = n, t->piece = piece;
    atomic_store(&t->next, 0);
    atomic_fetch_add(&t->job, 1);
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    claim(t);
    pthread_mutex_lock(&t->lock);
    t->fn = NULL; /* who wakes up now has come too late */
    while (t->busy) pthread_cond_wait(&t->idle, &t->lock);
    pthread_mutex_unlock(&t->lock);
    pthread_mutex_unlock(&t->owner);
}

int om_threads_count(void *threads) { return ((om_threads *)threads)->n; }

om_threads *om_threads_new(om_ctx *cx, int n) {
    om_threads *t = om_alloc(cx, sizeof *t + (size_t)n * sizeof *t->thread);
    if (!t) return NULL;
    t->thread = (pthread_t *)(void *)(t + 1);
    t->n = 1;
    pthread_mutex_init(&t->lock, NULL);
    pthread_mutex_init(&t->owner, NULL);
    pthread_cond_init(&t->work, NULL);
    pthread_cond_init(&t->idle, NULL);
    for (; t->n < n; t->n++)
        if (pthread_create(&t->thread[t->n], NULL, worker, t)) break;
    if (t->n < n) {
        om_fail(cx, OM_NOMEM, "%d threads were asked for, the system gives %d", n, t->n);
        om_threads_free(cx, t);
        return NULL;
    }
    return t;
}

void om_threads_free(om_ctx *cx, om_threads *t) {
    if (!t) return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    for (int i = 1; i < t->n; i++) pthread_join(t->thread[i], NULL);
    pthread_cond_destroy(&t->work);
    pthread_cond_destroy(&t->idle);
    pthread_mutex_destroy(&t->lock);
    pthread_mutex_destroy(&t->owner);
    om_free(cx, t);
}
