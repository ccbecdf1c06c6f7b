/* wasi/pthread.h - threads for a machine that has none (wasm32-wasi, make device-wasm): locks that nobody contends
 * for; a thread cannot be made, so a trainer there has one. */
#ifndef OM_WASI_PTHREAD_H
#define OM_WASI_PTHREAD_H
#include <errno.h>
#include <stddef.h>

typedef int pthread_mutex_t, pthread_cond_t, pthread_once_t, pthread_t;
#define PTHREAD_MUTEX_INITIALIZER 0
#define PTHREAD_ONCE_INIT 0

static inline int pthread_mutex_init(pthread_mutex_t *m, const void *attr) { return (void)attr, *m = 0; }
static inline int pthread_mutex_destroy(pthread_mutex_t *m) { return (void)m, 0; }
static inline int pthread_mutex_lock(pthread_mutex_t *m) { return (void)m, 0; }
static inline int pthread_mutex_trylock(pthread_mutex_t *m) { return (void)m, 0; }
static inline int pthread_mutex_unlock(pthread_mutex_t *m) { return (void)m, 0; }
static inline int pthread_cond_init(pthread_cond_t *c, const void *attr) { return (void)attr, *c = 0; }
static inline int pthread_cond_destroy(pthread_cond_t *c) { return (void)c, 0; }
static inline int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m) { return (void)c, (void)m, 0; }
static inline int pthread_cond_signal(pthread_cond_t *c) { return (void)c, 0; }
static inline int pthread_cond_broadcast(pthread_cond_t *c) { return (void)c, 0; }
static inline int pthread_once(pthread_once_t *o, void (*f)(void)) {
    if (!*o) *o = 1, f();
    return 0;
}
static inline int pthread_atfork(void (*a)(void), void (*b)(void), void (*c)(void)) {
    return (void)a, (void)b, (void)c, 0;
}
static inline int pthread_create(pthread_t *t, const void *attr, void *(*f)(void *), void *arg) {
    return (void)t, (void)attr, (void)f, (void)arg, ENOSYS;
}
static inline int pthread_join(pthread_t t, void **result) { return (void)t, (void)result, ENOSYS; }
#endif
