/* graphs.c - see graphs.h.
 *
 * Graphs of a plan are found, made and launched under its lock: the copies into a graph's memory and its launch are one
 * step, and the driver's graph objects are one thread's at a time. Copies, launch and giving memory back are on the
 * stream of the key, so in order.
 */
#include "cuda/graphs.h"

#include "cuda/blaslt.h"
#include "cuda/capture.h"
#include "graph/sabotage.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    FEWEST = 3,            /* launches that are worth a graph */
    KEYS = 4,              /* a piece remembers */
    MOST_MISSED = 16,      /* runs with new addresses, and one more for */
    PLAYED_A_MISS = 8,     /* so many launches of its graphs */
    MOST_ALIVE = 512,      /* graphs of a process: each holds memory of the device's */
    MOST_COPIED = 1 << 20, /* bytes of an input that may be copied */
    MOST_BUFFER = 1 << 16, /* of a buffer */
    PLACE = 256            /* alignment in a graph's memory */
};

/* A block that a piece reaches. size > 0: may be copied to `at` of the graph's memory, and is since it moved. */
typedef struct base { uint8_t where; bool moved; uint32_t index; size_t at, size; const void *last; } base;

typedef struct entry {
    uint64_t used;         /* clock of the piece; 0: free */
    om_cu_exec exec;       /* NULL: the key was seen once */
    void *memory;
    uintptr_t *key;
} entry;

typedef struct piece {
    int from, to;
    bool plain, off;       /* runs call by call: never meant for graphs; given up */
    bool writes;           /* has write-backs */
    long launches, products;
    bool scalars;          /* reads them, or a number of the host's; they lie first in a graph's memory */
    size_t scalar_size, memory_size;
    int n_base;
    base *base;
    uint64_t clock;
    long missed, played;
    entry entry[KEYS];
} piece;

typedef struct slice { struct slice *next; int from, to, n; piece *piece; } slice;

typedef struct graphs { pthread_mutex_t lock; slice *first; } graphs; /* om_plan.of_device */

enum { STREAM, TF32, WRITES, HEAD };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of om_plan.of_device and the reasons */
static _Thread_local bool off;
static atomic_long counts[4]; /* made, played, pieces given up, alive */
static char reasons[8][256];

void om_cuda_graphs(bool allowed) { off = !allowed; }
long om_cuda_graph_count(int what) { return atomic_load(&counts[what]); }

const char *om_cuda_graph_reason(int nth) {
    static _Thread_local char text[sizeof *reasons];
    if (nth >= 8) return NULL;
    pthread_mutex_lock(&lock);
    memcpy(text, reasons[nth], sizeof text);
    pthread_mutex_unlock(&lock);
    return *text ? text : NULL;
}

/* --- pieces --------------------------------------------------------------------------------------------- */

/* The CPU's, or torch's: a piece of its own, in no graph. */
static bool alone(const om_call *c) {
    const om_gpu_call *call = c->prep;
    return c->kind == OM_CALL_RUN && (call->host || call->torch);
}

static bool written(const om_plan *p, uint32_t input) {
    for (int i = 0; i < p->n_calls; i++)
        for (int k = p->calls[i].n_in; k < p->calls[i].n_in + p->calls[i].n_out; k++) {
            const uint32_t s = p->calls[i].arg[k].storage;
            if (s != OM_NONE && p->st[s].where == OM_W_INPUT && p->st[s].index == input) return true;
        }
    return false;
}

/* Bytes of an input that a graph may have a copy of, or 0. */
static size_t copied_size(const om_plan *p, uint32_t input) {
    const om_tensor *t = &p->input[input];
    const uint8_t role = om_val(p->g, p->g->inputs.v[input])->role;
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) {
        if (t->stride[i] < 0 || !t->dim[i]) return 0;
        n += (t->dim[i] - 1) * t->stride[i];
    }
    n *= (int64_t)om_dtype_size(t->dtype);
    const int64_t most = role == OM_INPUT || role == OM_GRAD_IN ? MOST_COPIED : role == OM_BUFFER ? MOST_BUFFER : 0;
    return n <= most && !written(p, input) ? (size_t)n : 0;
}

static bool reach(const om_plan *p, piece *x, uint32_t storage) {
    if (storage == OM_NONE) return true;
    const om_storage *s = &p->st[storage];
    const uint32_t index = s->where == OM_W_ARENA ? 0 : s->index;
    if (s->where == OM_W_CONST) return true;
    if (s->where == OM_W_INPUT && om_val(p->g, p->g->inputs.v[index])->host) return x->scalars = true;
    for (int i = 0; i < x->n_base; i++)
        if (x->base[i].where == s->where && x->base[i].index == index) return true;
    base *more = x->n_base & (x->n_base - 1) ? x->base : realloc(x->base, 2 * (size_t)(x->n_base + 1) * sizeof *more);
    if (!more) return false;
    x->base = more;
    more[x->n_base++] = (base){.where = s->where, .index = index,
                               .size = s->where == OM_W_INPUT ? copied_size(p, index) : 0};
    return true;
}

static bool piece_fill(const om_plan *p, piece *x) {
    bool ok = true;
    for (int i = x->from; i < x->to && ok; i++) {
        const om_call *c = &p->calls[i];
        for (int k = 0; k < c->n_in + c->n_out && ok; k++) ok = reach(p, x, c->arg[k].storage);
        if (ok) ok = reach(p, x, c->scratch) && reach(p, x, c->count.storage);
        for (const om_gpu_launch *n = ((const om_gpu_call *)c->prep)->first; n; n = n->next) {
            n->product ? x->products++ : x->launches++;
            for (int k = 0; k < n->n_reloc; k++) x->scalars |= n->reloc[k].what == OM_GPU_SCALARS;
        }
    }
    x->scalar_size = sizeof(om_scalars) + (p->g->syms.n + (size_t)p->n_host) * sizeof(int64_t);
    if (x->scalars) x->memory_size = (x->scalar_size + PLACE - 1) / PLACE * PLACE;
    for (int i = 0; i < x->n_base; i++) {
        x->base[i].at = x->memory_size;
        x->memory_size += (x->base[i].size + PLACE - 1) / PLACE * PLACE;
    }
    return ok;
}

static slice *slice_new(const om_plan *p, int from, int to) {
    slice *s = calloc(1, sizeof *s + (size_t)(to - from) * sizeof *s->piece);
    if (!s) return NULL;
    *s = (slice){.from = from, .to = to, .piece = (piece *)(void *)(s + 1)};
    for (int i = from; i < to; i++) {
        if (i == from || alone(&p->calls[i]) || alone(&p->calls[i - 1])) s->piece[s->n++] = (piece){.from = i};
        s->piece[s->n - 1].to = i + 1;
        s->piece[s->n - 1].writes |= om_gpu_call_writes(p, &p->calls[i]);
    }
    for (int i = 0; i < s->n; i++) {
        piece *x = &s->piece[i];
        x->plain = alone(&p->calls[x->from]) || !piece_fill(p, x) || x->launches + x->products < FEWEST;
    }
    return s;
}

/* NULL: no memory. */
static slice *slice_of(om_plan *p, graphs **of, int from, int to) {
    pthread_mutex_lock(&lock);
    graphs *gs = p->of_device;
    if (!gs && (gs = calloc(1, sizeof *gs))) {
        pthread_mutex_init(&gs->lock, NULL);
        p->of_device = gs;
    }
    slice *s = gs ? gs->first : NULL;
    while (s && (s->from != from || s->to != to)) s = s->next;
    if (gs && !s && (s = slice_new(p, from, to))) s->next = gs->first, gs->first = s;
    pthread_mutex_unlock(&lock);
    *of = gs;
    return s;
}

/* --- keys ------------------------------------------------------------------------------------------------- */

static char *address(const om_run *r, const base *b) {
    return om_run_storage(r, &(om_storage){.where = b->where, .index = b->index});
}

/* Copied: given, and as well aligned as its place (products choose by alignment). */
static bool copied(const base *b, const void *at) { return b->moved && at && (uintptr_t)at % 16 == 0; }

static void key_of(const om_run *r, piece *x, uintptr_t *key) {
    key[STREAM] = (uintptr_t)om_cuda_stream_now();
    key[TF32] = om_cuda_tf32_now(), key[WRITES] = r->skip_writes;
    for (int i = 0; i < x->n_base; i++) {
        base *b = &x->base[i];
        char *at = address(r, b);
        b->moved |= b->size && at && b->last && b->last != at;
        if (at) b->last = at;
        key[HEAD + i] = copied(b, at) || om_sabotage("graphs.address") ? 1 : (uintptr_t)at;
    }
}

/* The context is current. */
static void entry_free(om_gpu *g, entry *e) {
    if (e->exec) om_gpu_exec_free(e->exec), atomic_fetch_sub(&counts[3], 1);
    if (e->memory) om_gpu_free(g, e->memory, (void *)e->key[STREAM]);
    free(e->key);
    *e = (entry){0};
}

static void give_up(om_gpu *g, piece *x, const char *why) {
    x->off = true;
    for (int i = 0; i < KEYS; i++) entry_free(g, &x->entry[i]);
    atomic_fetch_add(&counts[2], 1);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < 8 && reasons[i][0] && strncmp(reasons[i], why, sizeof reasons[i] - 1)) i++;
    if (i < 8) snprintf(reasons[i], sizeof reasons[i], "%s", why);
    pthread_mutex_unlock(&lock);
}

/* The entry of the key; else NULL, and the key has taken the place of the one that was used longest ago. */
static entry *entry_of(om_gpu *g, piece *x, const uintptr_t *key, size_t size) {
    entry *oldest = &x->entry[0];
    for (int i = 0; i < KEYS; i++) {
        entry *e = &x->entry[i];
        if (e->used && !memcmp(e->key, key, size)) return e->used = ++x->clock, e;
        if (e->used < oldest->used) oldest = e;
    }
    entry_free(g, oldest);
    if ((oldest->key = malloc(size))) memcpy(oldest->key, key, size), oldest->used = ++x->clock;
    return NULL;
}

/* --- graphs ----------------------------------------------------------------------------------------------- */

typedef struct recording { om_run *r; om_gpu *g; const piece *x; om_gpu_calls calls; } recording;

static om_status record(void *arg) {
    const recording *c = arg;
    return c->calls(c->r, c->g, c->x->from, c->x->to, true);
}

/* The run's addresses are those in the graph's memory while it is recorded. */
static om_status entry_make(om_ctx *cx, om_run *r, om_gpu *g, const piece *x, entry *e, om_gpu_calls calls) {
    const om_plan *p = r->plan;
    void **given = malloc((p->g->inputs.n + 1) * sizeof *given);
    if (!given) return om_fail(cx, OM_NOMEM, "no memory to record a CUDA graph");
    if (x->memory_size && !e->memory) {
        const om_status s = om_gpu_alloc(cx, g, x->memory_size, om_cuda_stream_now(), &e->memory);
        if (s != OM_OK) return free(given), s;
    }
    const om_scalars *scalars = r->scalars;
    om_ctx *own = r->cx;
    char *memory = e->memory;
    memcpy(given, r->input, p->g->inputs.n * sizeof *given);
    for (int i = 0; i < x->n_base; i++)
        if (copied(&x->base[i], address(r, &x->base[i]))) r->input[x->base[i].index] = memory + x->base[i].at;
    if (x->scalars) {
        for (int k = 0; k < p->n_host; k++)
            r->input[p->host[k]] = memory + ((char *)r->input[p->host[k]] - (const char *)scalars);
        r->scalars = (const om_scalars *)(void *)memory;
    }
    r->cx = cx;
    recording c = {r, g, x, calls};
    const om_status s = om_gpu_capture(cx, g, record, &c, &e->exec);
    r->cx = own;
    r->scalars = scalars;
    memcpy(r->input, given, p->g->inputs.n * sizeof *given);
    free(given);
    if (s == OM_OK) atomic_fetch_add(&counts[0], 1), atomic_fetch_add(&counts[3], 1);
    return s;
}

static om_status entry_play(om_run *r, om_gpu *g, const piece *x, const entry *e, bool again) {
    char *memory = e->memory;
    if (x->scalars && !(again && om_sabotage("graphs.scalars")))
        OM_TRY(om_gpu_move(r->cx, g, memory, r->scalars, x->scalar_size));
    for (int i = 0; i < x->n_base; i++) {
        const base *b = &x->base[i];
        const char *at = address(r, b);
        if (copied(b, at) && !(again && om_sabotage("graphs.input")))
            OM_TRY(om_gpu_move(r->cx, g, memory + b->at, at, b->size));
    }
    return om_gpu_play(r->cx, g, e->exec);
}

/* *done: the piece is queued (or failed); else it is to be run call by call. */
static om_status piece_graph(om_run *r, om_gpu *g, piece *x, om_gpu_calls calls, bool *done) {
    const size_t size = (HEAD + (size_t)x->n_base) * sizeof(uintptr_t);
    uintptr_t *key = x->off ? NULL : malloc(size);
    if (!key) return OM_OK;
    key_of(r, x, key);
    entry *e = entry_of(g, x, key, size);
    free(key);
    if (!e) {
        if (++x->missed > MOST_MISSED + x->played / PLAYED_A_MISS)
            give_up(g, x, "addresses change too often to be recorded");
        return OM_OK;
    }
    const bool again = e->exec != NULL;
    if (!again) {
        if (atomic_load(&counts[3]) >= MOST_ALIVE) return OM_OK;
        om_ctx quiet = *r->cx;
        if (entry_make(&quiet, r, g, x, e, calls) != OM_OK) {
            give_up(g, x, quiet.message);
            return OM_OK;
        }
    } else {
        om_cuda_count_add(x->launches, x->products);
    }
    *done = true;
    x->played++;
    atomic_fetch_add(&counts[1], 1);
    return entry_play(r, g, x, e, again);
}

om_status om_gpu_graphs_run(om_run *r, om_gpu *g, int from, int to, om_gpu_calls calls) {
    graphs *gs = NULL;
    slice *s = off || r->profile ? NULL : slice_of(r->plan, &gs, from, to);
    if (!s) return calls(r, g, from, to, false);
    for (int i = 0; i < s->n; i++) {
        piece *x = &s->piece[i];
        bool done = false;
        r->pc = x->from;
        if (!x->plain) {
            const bool writes = x->writes && !r->skip_writes;
            if (writes) OM_TRY(om_gpu_writes_begin(r, g));
            pthread_mutex_lock(&gs->lock);
            const om_status st = piece_graph(r, g, x, calls, &done);
            pthread_mutex_unlock(&gs->lock);
            if (writes) om_gpu_writes_end();
            OM_TRY(st);
        }
        if (!done) OM_TRY(calls(r, g, x->from, x->to, false));
    }
    r->pc = to;
    return OM_OK;
}

void om_gpu_graphs_free(om_plan *p) {
    graphs *gs = p->of_device;
    om_ctx quiet = {.status = OM_OK, .device = p->device};
    if (!gs) return;
    om_gpu *g = om_cuda_gpu(&quiet);
    const bool entered = om_gpu_enter(&quiet, g) == OM_OK; /* else what the driver holds stays */
    for (slice *s = gs->first, *next; s; s = next) {
        next = s->next;
        for (int i = 0; i < s->n; i++) {
            for (int k = 0; k < KEYS; k++)
                if (entered) entry_free(g, &s->piece[i].entry[k]);
                else free(s->piece[i].entry[k].key);
            free(s->piece[i].base);
        }
        free(s);
    }
    if (entered) om_gpu_leave(&quiet, g, OM_OK);
    pthread_mutex_destroy(&gs->lock);
    free(gs);
    p->of_device = NULL;
}
