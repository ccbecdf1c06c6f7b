/* threads.h - a small pool of threads that sleep: parallel_for for programs that have none. */
#ifndef OM_THREADS_H
#define OM_THREADS_H
#include "graph/engine.h"

typedef struct om_threads om_threads;
om_threads *om_threads_new(om_ctx *cx, int n);   /* n: with the caller's; NULL: recorded */
void om_threads_free(om_ctx *cx, om_threads *t); /* NULL is fine */
int om_threads_count(void *threads);             /* services.num_threads */
void om_threads_for(void *threads, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg);
#endif
