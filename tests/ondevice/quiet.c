/* quiet.c - steps of a trainer while nobody gives memory: malloc and its relatives, mmap and the context's allocator
 * abort after the trainer is made (the linker puts the functions below in their places, --wrap).
 *
 *     om-quiet MODEL.omd THREADS
 *
 * Then the same in an arena of exactly the size that om_trainer_memory told, with the same losses; one 64 bytes smaller
 * must be refused with a message.
 */
#include "inputs.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static bool forbidden;
static void ask(const char *what) {
    if (!forbidden) return;
    forbidden = false;
    fprintf(stderr, "quiet.c: %s was called in a step\n", what);
    abort();
}

#define WRAP(type, name, args, call) \
    type __real_##name args;         \
    type __wrap_##name args;         \
    type __wrap_##name args {        \
        ask(#name);                  \
        return __real_##name call;   \
    }
WRAP(void *, malloc, (size_t n), (n))
WRAP(void *, calloc, (size_t n, size_t m), (n, m))
WRAP(void *, realloc, (void *p, size_t n), (p, n))
WRAP(void *, aligned_alloc, (size_t a, size_t n), (a, n))
WRAP(int, posix_memalign, (void **p, size_t a, size_t n), (p, a, n))
WRAP(void *, mmap, (void *p, size_t n, int prot, int flags, int fd, off_t at), (p, n, prot, flags, fd, at))

static void *own_alloc(void *user, size_t n) {
    (void)user;
    ask("services.alloc");
    return __real_aligned_alloc(64, (n + 63) & ~(size_t)63);
}
static void own_free(void *user, void *p, size_t n) {
    (void)user, (void)n;
    free(p);
}

static void check(om_ctx *cx, const char *what, om_status s) {
    if (s == OM_OK) return;
    forbidden = false;
    fprintf(stderr, "quiet.c: %s: %s\n", what, om_ctx_message(cx));
    exit(2);
}

enum { STEPS = 12 };

static void train(om_ctx *cx, om_trainer *t, float *losses) {
    om_tensor x[MOST] = {0}, y[MOST] = {0}, out[MOST];
    inputs_fill(t, false, x, 0); /* their memory */
    inputs_fill(t, true, y, 0);
    if (!om_trainer_memory(t).final) exit(2);
    const size_t before = om_trainer_memory(t).arena;
    forbidden = true;
    for (int i = 0; i < STEPS; i++) {
        inputs_fill(t, false, x, i);
        inputs_fill(t, true, y, i);
        check(cx, "step", om_trainer_step(t, x, &losses[2 * i], i % 2 ? out : NULL));
        if (i % 3 == 1) check(cx, "second step", om_trainer_step(t, x, NULL, i % 2 ? NULL : out));
        if (i % 4 == 1) check(cx, "evaluation between", om_trainer_eval(t, y, NULL, out));
        check(cx, "update", om_trainer_update(t));
        om_trainer_reset(t);
        check(cx, "evaluation", om_trainer_eval(t, y, &losses[2 * i + 1], i % 3 ? out : NULL));
    }
    forbidden = false;
    if (om_trainer_memory(t).arena != before) {
        fprintf(stderr, "quiet.c: %zu bytes were told, %zu used\n", before, om_trainer_memory(t).arena);
        exit(2);
    }
    inputs_free(x);
    inputs_free(y);
}

int main(int argc, char **argv) {
    const om_services sv = {.alloc = own_alloc, .free = own_free};
    om_ctx *cx = om_ctx_new(&sv);
    om_trainer *t;
    float a[2 * STEPS], b[2 * STEPS];
    if (argc != 3 || !cx) return 2;
    om_trainer_options o = {.threads = atoi(argv[2])};
    check(cx, "load", om_trainer_load_file(cx, argv[1], &o, &t));
    train(cx, t, a);
    const size_t size = om_trainer_memory(t).arena;
    om_trainer_free(t);

    o.arena = __real_aligned_alloc(64, size);
    o.arena_size = size;
    check(cx, "load into an arena", om_trainer_load_file(cx, argv[1], &o, &t));
    train(cx, t, b);
    if (memcmp(a, b, sizeof a) != 0 || a[0] == a[2]) {
        fprintf(stderr, "quiet.c: the arena's losses differ\n");
        return 2;
    }
    om_trainer_free(t);
    o.arena_size = size - 64;
    const om_status s = om_trainer_load_file(cx, argv[1], &o, &t);
    if (s != OM_NOMEM || t || !strstr(om_ctx_message(cx), "memory")) {
        fprintf(stderr, "quiet.c: an arena that is too small gave '%s'\n", om_ctx_message(cx));
        return 2;
    }
    om_ctx_clear(cx);
    free(o.arena);
    om_ctx_free(cx);
    printf("%zu\n", size);
    return 0;
}
