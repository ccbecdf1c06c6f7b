/* sort.c - ops/sort.c on the CPU.
 *
 * An element and its index become one number whose order is the one wanted: the value as an unsigned key (floats: sign
 * flipped or all bits; NaN the largest; descending: inverted) above the index. All numbers of a line are different, so
 * every algorithm gives the same result, and comparisons are single ones. 32 bits of key and of index suffice for all
 * but 64-bit elements and very long lines, which take 128.
 *   - k small against the line: a heap of the k smallest so far, its root the largest; then the heap sorted
 *   - else: the line sorted by merging, from runs sorted by insertion
 * Values are read again from x, so that their bits are x's. Lines are shared among tasks, each with scratch of its own.
 */
#include "cpu/cpu.h"
#include "cpu/walk.h"
#include "graph/half.h"
#include "ops/attr.h"

enum { SORT_TASKS = 16, SORT_RUN = 12, SORT_HEAP = 8 }; /* heap: where the line is this many times k and longer */

typedef uint64_t narrow_t; /* 32 bits of key above 32 of index */
typedef struct wide_t { uint64_t key, at; } wide_t;

static bool less_narrow(narrow_t a, narrow_t b) { return a < b; }
static bool less_wide(wide_t a, wide_t b) { return a.key != b.key ? a.key < b.key : a.at < b.at; }
static narrow_t make_narrow(uint64_t key, int64_t at) { return key << 32 | (uint64_t)at; }
static wide_t make_wide(uint64_t key, int64_t at) { return (wide_t){key, (uint64_t)at}; }
static int64_t at_narrow(narrow_t v) { return (int64_t)(v & UINT32_MAX); }
static int64_t at_wide(wide_t v) { return (int64_t)v.at; }

typedef struct sort_plan {
    om_walk walk;              /* all axes but the sorted one; bytes of x, y, indices */
    int64_t len, k, lines, tasks, task_size;
    int64_t step[3];           /* along the axis: bytes of x, y, indices */
    int dtype, size;
    bool largest, wide, heap;
    char *scratch;             /* of a run, as are these */
    const char *x;
    char *y, *idx;
} sort_plan;

static uint64_t sort_float(uint64_t bits, int width, bool nan) {
    const uint64_t sign = (uint64_t)1 << (width - 1), all = sign | (sign - 1);
    if (nan) return all;
    if (bits == sign) bits = 0; /* -0 */
    return bits & sign ? ~bits & all : bits | sign;
}

static uint64_t sort_key(const sort_plan *p, const char *x) {
    uint64_t u64 = 0;
    uint32_t u32;
    uint16_t u16;
    switch (p->dtype) {
    case OM_F64: {
        double v;
        memcpy(&v, x, 8), memcpy(&u64, x, 8);
        return sort_float(u64, 64, v != v);
    }
    case OM_F32: {
        float v;
        memcpy(&v, x, 4), memcpy(&u32, x, 4);
        return sort_float(u32, 32, v != v);
    }
    case OM_BF16: memcpy(&u16, x, 2); return sort_float(u16, 16, (u16 & 0x7fff) > 0x7f80);
    case OM_F16: memcpy(&u16, x, 2); return sort_float(u16, 16, (u16 & 0x7fff) > 0x7c00);
    case OM_I64: memcpy(&u64, x, 8); return u64 ^ (uint64_t)1 << 63;
    case OM_I32: memcpy(&u32, x, 4); return u32 ^ 1u << 31;
    case OM_I16: memcpy(&u16, x, 2); return (uint16_t)(u16 ^ 1u << 15);
    case OM_I8: return (uint8_t)(*x ^ 1 << 7);
    case OM_BOOL: return *x != 0;
    default: return (uint8_t)*x; /* u8 */
    }
}

#define SORT(S)                                                                                                        \
    static void sort_all_##S(S##_t *a, S##_t *b, int64_t n) { /* n of a, in order; b: room for as many */              \
        for (int64_t lo = 0; lo < n; lo += SORT_RUN) {                                                                 \
            const int64_t hi = lo + SORT_RUN < n ? lo + SORT_RUN : n;                                                  \
            for (int64_t i = lo + 1; i < hi; i++) {                                                                    \
                const S##_t v = a[i];                                                                                  \
                int64_t j = i;                                                                                         \
                for (; j > lo && less_##S(v, a[j - 1]); j--) a[j] = a[j - 1];                                          \
                a[j] = v;                                                                                              \
            }                                                                                                          \
        }                                                                                                              \
        S##_t *from = a, *to = b;                                                                                      \
        for (int64_t run = SORT_RUN; run < n; run *= 2) {                                                              \
            for (int64_t lo = 0; lo < n; lo += 2 * run) {                                                              \
                const int64_t mid = lo + run < n ? lo + run : n, hi = mid + run < n ? mid + run : n;                   \
                int64_t l = lo, r = mid;                                                                               \
                for (int64_t i = lo; i < hi; i++)                                                                      \
                    to[i] = l < mid && (r >= hi || less_##S(from[l], from[r])) ? from[l++] : from[r++];                \
            }                                                                                                          \
            S##_t *swap = from;                                                                                        \
            from = to;                                                                                                 \
            to = swap;                                                                                                 \
        }                                                                                                              \
        if (from != a) memcpy(a, from, (size_t)n * sizeof *a);                                                         \
    }                                                                                                                  \
    static void sort_sink_##S(S##_t *h, int64_t n, S##_t v) { /* v in the place of the root */                         \
        int64_t i = 0;                                                                                                 \
        for (int64_t c; (c = 2 * i + 1) < n; i = c) {                                                                  \
            c += c + 1 < n && less_##S(h[c], h[c + 1]);                                                                \
            if (!less_##S(v, h[c])) break;                                                                             \
            h[i] = h[c];                                                                                               \
        }                                                                                                              \
        h[i] = v;                                                                                                      \
    }                                                                                                                  \
    static void sort_line_##S(const sort_plan *p, const char *x, char *y, char *idx, S##_t *a) {                       \
        const uint64_t turn = p->largest ? UINT64_MAX >> (sizeof *a == sizeof(narrow_t) ? 32 : 0) : 0;                 \
        int64_t held = 0;                                                                                              \
        for (int64_t i = 0; i < p->len; i++) {                                                                         \
            const S##_t v = make_##S(sort_key(p, x + i * p->step[0]) ^ turn, i);                                       \
            if (!p->heap || held < p->k) {                                                                             \
                a[held++] = v;                                                                                         \
                for (int64_t c = held - 1; p->heap && c && less_##S(a[(c - 1) / 2], v); c = (c - 1) / 2)               \
                    a[c] = a[(c - 1) / 2], a[(c - 1) / 2] = v;                                                         \
            } else if (less_##S(v, a[0])) {                                                                            \
                sort_sink_##S(a, held, v);                                                                             \
            }                                                                                                          \
        }                                                                                                              \
        sort_all_##S(a, a + held, held);                                                                               \
        for (int64_t i = 0; i < p->k; i++) {                                                                           \
            const int64_t at = at_##S(a[i]);                                                                           \
            memcpy(y + i * p->step[1], x + at * p->step[0], (size_t)p->size);                                          \
            memcpy(idx + i * p->step[2], &at, sizeof at);                                                              \
        }                                                                                                              \
    }
SORT(narrow)
SORT(wide)

static void sort_tasks(void *arg, int64_t begin, int64_t end) {
    const sort_plan *p = arg;
    for (int64_t t = begin; t < end; t++) {
        om_walk w = p->walk;
        char *a = p->scratch + t * p->task_size;
        const int64_t from = p->lines * t / p->tasks, to = p->lines * (t + 1) / p->tasks;
        if (from == to) continue;
        walk_seek(&w, from);
        for (int64_t i = from; i < to; i++, walk_next(&w)) {
            if (p->wide) sort_line_wide(p, p->x + w.off[0], p->y + w.off[1], p->idx + w.off[2], (wide_t *)a);
            else sort_line_narrow(p, p->x + w.off[0], p->y + w.off[1], p->idx + w.off[2], (narrow_t *)a);
        }
    }
}

/* axes: room for the walk's, or NULL */
static void sort_layout(const om_args *a, sort_plan *p, om_walk_axis *axes) {
    const om_tensor *x = &a->in[0], *y = &a->out[0], *idx = &a->out[1];
    const int axis = (int)om_args_int(a, "axis", 0);
    const int64_t size = (int64_t)om_dtype_size(x->dtype);
    *p = (sort_plan){.len = x->dim[axis], .k = y->dim[axis], .lines = 1, .dtype = x->dtype, .size = (int)size,
                     .step = {x->stride[axis] * size, y->stride[axis] * size, idx->stride[axis] * 8},
                     .largest = om_args_int(a, "largest", 1)};
    p->walk = (om_walk){.n = 3, .axis = axes};
    for (int i = 0; i < x->rank; i++) {
        if (i == axis) continue;
        p->lines *= x->dim[i];
        if (axes)
            axes[p->walk.rank++] =
                (om_walk_axis){x->dim[i], {x->stride[i] * size, y->stride[i] * size, idx->stride[i] * 8}};
    }
    p->wide = size == 8 || p->len > UINT32_MAX;
    p->heap = p->k <= p->len / SORT_HEAP;
    p->tasks = p->lines < SORT_TASKS ? p->lines : SORT_TASKS;
    const int64_t held = p->heap ? p->k : p->len;
    p->task_size = (2 * held * (p->wide ? 16 : 8) + 63) & ~(int64_t)63;
}

int64_t om_cpu_scratch_topk(om_ctx *cx, const om_args *a) {
    sort_plan p;
    (void)cx;
    sort_layout(a, &p, NULL);
    return p.tasks * p.task_size;
}

om_status om_cpu_prepare_topk(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    sort_plan *p = om_arena_alloc(mem, sizeof *p);
    om_walk_axis *axes = om_arena_alloc(mem, OM_RANK * sizeof *axes);
    if (!p || !axes) return cx->status;
    sort_layout(a, p, axes);
    OM_CHECK(cx, p->k <= p->len, "topk: k = %lld of %lld elements", (long long)p->k, (long long)p->len);
    *prep = p;
    return OM_OK;
}

om_status om_cpu_run_topk(om_ctx *cx, const om_args *a) {
    sort_plan p = *(const sort_plan *)a->prep;
    if (!p.k || !p.lines) return OM_OK;
    p.scratch = a->scratch, p.x = a->in[0].data, p.y = a->out[0].data, p.idx = a->out[1].data;
    om_parallel_for(cx, p.tasks, p.lines * p.len < 2048 ? p.tasks : 1, sort_tasks, &p);
    return OM_OK;
}
