/* ctx.c - the context: services, first error, memory.
 *
 * Every allocation of the engine goes through om_alloc, so a host that counts, limits or fails allocations sees all of
 * them. A block is preceded by 64 bytes that hold its size. om_arena hands out pieces of growing chunks and is freed
 * whole.
 */
#include "graph/engine.h"
#include "graph/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

const char *om_status_text(om_status s) {
    static const char *const text[] = {
#define X(name, t) t,
        OM_STATUS_MAP(X)
#undef X
    };
    return (unsigned)s < sizeof text / sizeof *text ? text[s] : "unknown status";
}

/* --- built-in services ------------------------------------------------------------------------- */

static void *sv_alloc(void *user, size_t size) {
    (void)user;
    return aligned_alloc(64, (size + 63) & ~(size_t)63);
}
static void sv_free(void *user, void *p, size_t size) {
    (void)user, (void)size;
    free(p);
}
static void sv_parallel_for(void *user, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg) {
    (void)user, (void)grain;
    fn(arg, 0, n);
}
static int sv_num_threads(void *user) {
    (void)user;
    return 1;
}

om_ctx *om_ctx_new(const om_services *services) {
    om_services sv = services ? *services : (om_services){0};
    const bool host_alloc = sv.alloc && sv.free;
    if (!host_alloc) sv.alloc = sv_alloc, sv.free = sv_free;
    if (!sv.parallel_for || !sv.num_threads) sv.parallel_for = sv_parallel_for, sv.num_threads = sv_num_threads;
    om_ctx *cx = sv.alloc(sv.user, sizeof *cx);
    if (!cx) return NULL;
    memset(cx, 0, sizeof *cx);
    cx->sv = sv;
    cx->host_alloc = host_alloc;
    cx->device = &om_device_cpu;
    return cx;
}

om_ctx *om_ctx_like(const om_ctx *cx) {
    om_ctx *own = om_ctx_new(&cx->sv);
    if (!own) return NULL;
    own->device = cx->device;
    own->all_rows = cx->all_rows;
    own->all_tokens = cx->all_tokens;
    return own;
}

void om_ctx_free(om_ctx *cx) {
    if (cx) cx->sv.free(cx->sv.user, cx, sizeof *cx);
}

const char *om_ctx_message(const om_ctx *cx) { return cx->message; }

void om_ctx_clear(om_ctx *cx) {
    cx->status = OM_OK;
    cx->message[0] = 0;
}

/* Names that were cut short: what is no UTF-8 becomes '?', as hosts decode messages strictly. */
static void utf8_mend(char *text) {
    for (unsigned char *p = (unsigned char *)text; *p;) {
        const int more = *p < 0x80 ? 0 : *p >= 0xc2 && *p < 0xe0 ? 1 : *p >= 0xe0 && *p < 0xf0 ? 2
                       : *p >= 0xf0 && *p < 0xf5 ? 3 : -1;
        bool good = more >= 0;
        for (int i = 1; i <= more && good; i++) good = (p[i] & 0xc0) == 0x80; /* the end is none */
        if (good && more == 2) good = !(*p == 0xe0 && p[1] < 0xa0) && !(*p == 0xed && p[1] >= 0xa0);
        if (good && more == 3) good = !(*p == 0xf0 && p[1] < 0x90) && !(*p == 0xf4 && p[1] >= 0x90);
        if (!good) *p = '?';
        p += good ? more + 1 : 1;
    }
}

om_status om_fail_at(om_ctx *cx, om_status s, const char *file, int line, const char *fmt, ...) {
    if (cx->status != OM_OK) return cx->status;
    cx->status = s;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(cx->message, sizeof cx->message, fmt, ap);
    va_end(ap);
    const char *base = strrchr(file, '/');
    if (n >= 0 && (size_t)n < sizeof cx->message)
        snprintf(cx->message + n, sizeof cx->message - (size_t)n, " [%s:%d]", base ? base + 1 : file, line);
    utf8_mend(cx->message);
    return s;
}

om_status om_fail_of(om_ctx *to, om_ctx *from, om_status s) {
    if (s == OM_OK || from == to) return s;
    if (to->status == OM_OK) {
        to->status = s;
        memcpy(to->message, from->message, sizeof to->message);
    }
    om_ctx_clear(from);
    return to->status;
}

void om_log(om_ctx *cx, int level, const char *fmt, ...) {
    if (!cx->sv.log) return;
    char buf[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(buf, sizeof buf, fmt, ap);
    va_end(ap);
    cx->sv.log(cx->sv.user, level, buf);
}

/* --- memory ------------------------------------------------------------------------------------ */

enum { OM_BLOCK_HEAD = 64 };

void *om_alloc(om_ctx *cx, size_t size) {
    size_t all = size + OM_BLOCK_HEAD;
    char *p = all < size ? NULL : cx->sv.alloc(cx->sv.user, all);
    if (!p) {
        om_fail(cx, OM_NOMEM, "out of memory: %zu bytes were asked for", size);
        return NULL;
    }
    memcpy(p, &all, sizeof all);
    memset(p + OM_BLOCK_HEAD, 0, size);
    return p + OM_BLOCK_HEAD;
}

void om_free(om_ctx *cx, void *p) {
    if (!p) return;
    char *head = (char *)p - OM_BLOCK_HEAD;
    size_t all;
    memcpy(&all, head, sizeof all);
    cx->sv.free(cx->sv.user, head, all);
}

struct om_chunk {
    struct om_chunk *next;
    size_t used, cap;
    _Alignas(64) char data[];
};

void *om_arena_alloc(om_arena *a, size_t size) {
    if (size > SIZE_MAX / 2) { /* what is added below would wrap */
        om_fail(a->cx, OM_NOMEM, "out of memory: %zu bytes were asked for", size);
        return NULL;
    }
    size = (size + 15) & ~(size_t)15;
    struct om_chunk *c = a->chunks;
    if (!c || c->cap - c->used < size) {
        size_t cap = size > 16384 ? size : 65536;
        struct om_chunk *fresh = om_alloc(a->cx, sizeof *fresh + cap);
        if (!fresh) return NULL;
        fresh->cap = cap;
        if (size > 16384 && c) { /* keep filling the current chunk */
            fresh->next = c->next;
            c->next = fresh;
        } else {
            fresh->next = c;
            a->chunks = fresh;
        }
        c = fresh;
    }
    void *p = c->data + c->used;
    c->used += size;
    return p;
}

void *om_arena_copy(om_arena *a, const void *p, size_t size) {
    void *q = om_arena_alloc(a, size);
    if (q && size) memcpy(q, p, size);
    return q;
}

char *om_arena_str(om_arena *a, const char *s) { return s ? om_arena_copy(a, s, strlen(s) + 1) : NULL; }

void om_arena_free(om_arena *a) {
    for (struct om_chunk *c = a->chunks, *next; c; c = next) {
        next = c->next;
        om_free(a->cx, c);
    }
    a->chunks = NULL;
}

bool om_grow(om_ctx *cx, void **v, uint32_t *cap, size_t elem) {
    uint32_t want = *cap ? *cap * 2 : 16;
    if (want <= *cap) {
        om_fail(cx, OM_NOMEM, "an array of more than %u elements is not supported", *cap);
        return false;
    }
    void *p = om_alloc(cx, want * elem);
    if (!p) return false;
    if (*cap) memcpy(p, *v, *cap * elem);
    om_free(cx, *v);
    *v = p;
    *cap = want;
    return true;
}

/* --- dtypes ------------------------------------------------------------------------------------ */

static const struct { const char *name; int onnx; size_t size; } dtypes[OM_N_DTYPES] = {
#define X(NAME, nm, onnx_, bytes) [OM_##NAME] = {#nm, onnx_, bytes},
    OM_DTYPE_MAP(X)
#undef X
};

size_t om_dtype_size(int t) { return (unsigned)t < OM_N_DTYPES ? dtypes[t].size : 0; }
const char *om_dtype_name(int t) { return (unsigned)t < OM_N_DTYPES ? dtypes[t].name : "?"; }
om_kind_text om_kind_write(int dtype, int rank, const int64_t *dim) {
    om_kind_text k;
    int n = snprintf(k.s, sizeof k.s, "%s [", om_dtype_name(dtype));
    for (int i = 0; i < rank && i < OM_RANK; i++) {
        const char *comma = i ? ", " : "";
        n += dim[i] < 0 ? snprintf(k.s + n, sizeof k.s - (size_t)n, "%s?", comma)
                        : snprintf(k.s + n, sizeof k.s - (size_t)n, "%s%lld", comma, (long long)dim[i]);
    }
    snprintf(k.s + n, sizeof k.s - (size_t)n, "]");
    return k;
}
int om_dtype_onnx(int t) { return (unsigned)t < OM_N_DTYPES ? dtypes[t].onnx : 0; }
om_dtype om_dtype_from_name(const char *name) {
    for (int t = 1; t < OM_N_DTYPES; t++)
        if (!strcmp(dtypes[t].name, name)) return (om_dtype)t;
    return OM_NODTYPE;
}
om_dtype om_dtype_from_onnx(int onnx) {
    for (int t = 1; t < OM_N_DTYPES; t++)
        if (onnx && dtypes[t].onnx == onnx) return (om_dtype)t;
    return OM_NODTYPE;
}

/* --- tensors ----------------------------------------------------------------------------------- */

bool om_is_dense(const om_tensor *t) {
    int64_t want = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (t->dim[i] == 0) return true;
        if (t->dim[i] != 1 && t->stride[i] != want) {
            for (int j = 0; j < i; j++)
                if (t->dim[j] == 0) return true;
            return false;
        }
        want *= t->dim[i];
    }
    return true;
}

void om_dense_strides(om_tensor *t) {
    int64_t s = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        t->stride[i] = s;
        /* no such tensor has an element: om_tensor_of */
        if (__builtin_mul_overflow(s, t->dim[i] > 0 ? t->dim[i] : 1, &s)) s = 1;
    }
}

void om_text_free(om_ctx *cx, char *text) { om_free(cx, text); }
