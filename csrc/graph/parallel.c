/* parallel.c - loops over the host's threads.
 *
 * A loop ends when all its threads have ended, and one that the system does not run at once (a neighbour computes, or
 * workers of a data loader do) costs all of them a slice of time: milliseconds, where most loops are worth
 * microseconds. So it is measured how late threads begin. After one that was late, the caller does alone, for as long,
 * what it would not win as much by; if tries go on to fail, for twice as long each time: a single delay costs half of
 * itself more, a busy machine a try each second. Kernels give the same bits on any number of threads. What is known is
 * the calling thread's.
 */
#include "graph/parallel.h"

#include "graph/engine.h"

#include <stdatomic.h>
#include <time.h>

enum { LOOPS = 1024, LATE = 500000, LONGEST = 1000000000 }; /* LATE: the least delay that is a slice of time; ns */

static _Thread_local struct own {
    om_pace pace;
    struct loop { uint32_t key; float work; } seen[LOOPS]; /* the least time that the caller took alone */
} own;
static _Thread_local struct { const void *team; int64_t begin; } joined; /* whose pieces this thread began last */

void om_pace_note(om_pace *p, int64_t begin, int64_t end, int64_t late) {
    if (late >= LATE) {
        const int64_t pause = p->pause > late ? p->pause : late;
        p->until = end + pause;
        p->pause = pause < LONGEST / 2 ? 2 * pause : LONGEST;
        p->lost = 2 * late; /* the caller, who waited, is often not run at once either */
        p->fine = 0;
    } else if (p->pause && (p->fine += end - begin) > p->pause / 4) {
        p->pause = p->pause > LATE ? p->pause / 2 : 0;
        p->fine = 0;
    }
}

typedef struct team {
    void (*fn)(void *, int64_t, int64_t);
    void *arg;
    const struct own *caller;
    int64_t begin;
    _Atomic int64_t late; /* of the last thread to begin */
} team;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void team_piece(void *arg, int64_t from, int64_t to) {
    team *t = arg;
    if (t->caller != &own && (joined.team != t || joined.begin != t->begin)) {
        joined.team = t, joined.begin = t->begin;
        int64_t late = now_ns() - t->begin, was = atomic_load(&t->late);
        while (late > was && !atomic_compare_exchange_weak(&t->late, &was, late)) continue;
    }
    t->fn(t->arg, from, to);
}

static uint32_t loop_key(const om_ctx *cx, int64_t n, void (*fn)(void *, int64_t, int64_t)) {
    uint64_t h = ((uint64_t)(uintptr_t)cx->call * 0x9e3779b97f4a7c15u) ^ (uint64_t)(uintptr_t)fn;
    h = ((h ^ (h >> 32)) * 0x9e3779b97f4a7c15u) ^ (uint64_t)n;
    return (uint32_t)((h * 0x9e3779b97f4a7c15u) >> 32) | 1;
}

/* Threads have been late, and this loop would not win what that costs: done. */
static bool loop_alone(const om_ctx *cx, int64_t n, int64_t threads, void (*fn)(void *, int64_t, int64_t), void *arg,
                       int64_t begin) {
    const uint32_t key = loop_key(cx, n, fn);
    struct loop *l = &own.seen[key % LOOPS];
    const bool known = l->key == key;
    if (known && l->work * (1 - 1 / (float)threads) >= (float)own.pace.lost) return false;
    fn(arg, 0, n);
    const float work = (float)(now_ns() - begin);
    if (!known || work < l->work) *l = (struct loop){key, work};
    return true;
}

void om_parallel_for(om_ctx *cx, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg) {
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    const int64_t threads = n <= grain ? 1 : cx->sv.num_threads(cx->sv.user);
    if (threads <= 1) {
        fn(arg, 0, n);
        return;
    }
    const int64_t begin = now_ns();
    if (begin < own.pace.until && loop_alone(cx, n, threads, fn, arg, begin)) return;
    team t = {.fn = fn, .arg = arg, .caller = &own, .begin = begin};
    cx->sv.parallel_for(cx->sv.user, n, grain, team_piece, &t);
    const int64_t late = atomic_load(&t.late);
    if (late >= LATE || own.pace.pause) om_pace_note(&own.pace, begin, now_ns(), late);
}

int om_num_threads(om_ctx *cx) {
    int n = cx->sv.num_threads(cx->sv.user);
    return cx->max_threads && cx->max_threads < n ? cx->max_threads : n;
}
