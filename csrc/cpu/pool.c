/* pool.c - ops/pool.c on the CPU.
 *
 * Windows are intervals that depend on one axis each, so they are worked out once per plan into small tables; planes
 * (all leading axes) are independent and split among threads. Gradients add into the input plane window by window, in
 * order: deterministic. f32 and f64 as they are, bf16 and f16 through a row buffer in f32. An index of max_pool_grad
 * that is out of range is noted as a fault and passed over.
 */
#include "cpu/cpu.h"
#include "cpu/fault.h"
#include "cpu/pool.h"
#include "graph/half.h"
#include "ops/attr.h"
#include "ops/window.h"

/* --- windows --------------------------------------------------------------------------------------------- */

/* input positions lo, lo + step, ... < hi; padded: length with padding */
typedef struct window { int64_t lo, hi, padded; } window;

typedef struct pool_job pool_job;
typedef void (*pool_fn)(void *, int64_t, int64_t);
struct pool_job { /* made once per plan; a run copies it and puts the addresses in */
    int64_t in[OM_WINDOW_AXES], out[OM_WINDOW_AXES], step[OM_WINDOW_AXES]; /* missing leading axes have size 1 */
    int64_t planes, in_size, out_size, grain;               /* of a plane */
    window *win[OM_WINDOW_AXES];                            /* out[i] entries each; NULL: none is asked for */
    om_window w;                                            /* of a kernel */
    bool include_pad;
    pool_fn fn;
    om_pool_row row;
    int dtype;
    const char *x;
    char *y;
    int64_t *idx;
    om_fault *fault;
    float *wide;                                            /* half types: (planes, in_size) in scratch for gradients */
};

/* x: the tensor that windows read, y: the one with an element for each */
static void pool_sizes(pool_job *j, const om_tensor *x, const om_tensor *y, int axes) {
    *j = (pool_job){.planes = 1, .in_size = 1, .out_size = 1};
    for (int i = 0; i < x->rank - axes; i++) j->planes *= x->dim[i];
    for (int i = 0; i < OM_WINDOW_AXES; i++) {
        int axis = i - (OM_WINDOW_AXES - axes);
        j->in[i] = axis < 0 ? 1 : x->dim[x->rank - axes + axis];
        j->out[i] = axis < 0 ? 1 : y->dim[y->rank - axes + axis];
        j->step[i] = 1;
        j->in_size *= j->in[i];
        j->out_size *= j->out[i];
    }
    j->grain = 1 + 16384 / (j->in_size + j->out_size + 1);
}

static om_status pool_tables(om_ctx *cx, om_arena *mem, pool_job *j) {
    for (int i = 0; i < OM_WINDOW_AXES; i++) {
        j->win[i] = om_arena_alloc(mem, (size_t)(j->out[i] > 0 ? j->out[i] : 1) * sizeof *j->win[i]);
        if (!j->win[i]) return cx->status;
        j->win[i][0] = (window){0, 1, 1};
    }
    return OM_OK;
}

static void pool_windows(pool_job *j, const om_args *a, int axes) {
    om_window_args(a, axes, NULL, &j->w);
    for (int i = OM_WINDOW_AXES - axes; i < OM_WINDOW_AXES; i++) {
        const int64_t d = j->step[i] = j->w.dil[i];
        for (int64_t o = 0; o < j->out[i]; o++) {
            int64_t lo = o * j->w.stride[i] - j->w.lo[i], hi = lo + d * (j->w.k[i] - 1) + 1;
            int64_t most = j->in[i] + j->w.hi[i];
            window *w = &j->win[i][o];
            w->padded = (hi < most ? hi : most) - lo;
            w->lo = lo < 0 ? lo + (-lo + d - 1) / d * d : lo;
            w->hi = hi < j->in[i] ? hi : j->in[i];
        }
    }
}

static void adaptive_windows(pool_job *j) {
    for (int i = 0; i < OM_WINDOW_AXES; i++)
        for (int64_t o = 0; o < j->out[i]; o++) {
            window *w = &j->win[i][o];
            w->lo = o * j->in[i] / j->out[i];
            w->hi = ((o + 1) * j->in[i] + j->out[i] - 1) / j->out[i];
            w->padded = w->hi - w->lo;
        }
}

/* --- kernels ------------------------------------------------------------------------------------------------ */

#define SAME(x) (x)
#define FOR_WINDOW(j, o, i, body)                                                                   \
    for (int64_t i##0 = o[0]->lo; i##0 < o[0]->hi; i##0 += (j)->step[0])                            \
        for (int64_t i##1 = o[1]->lo; i##1 < o[1]->hi; i##1 += (j)->step[1]) {                      \
            const int64_t i##_row = (i##0 * (j)->in[1] + i##1) * (j)->in[2];                        \
            for (int64_t i##2 = o[2]->lo; i##2 < o[2]->hi; i##2 += (j)->step[2]) body               \
        }
#define FOR_OUTPUT(j, o, at, ...)                                                                   \
    for (int64_t o##0 = 0, at = 0; o##0 < (j)->out[0]; o##0++)                                      \
        for (int64_t o##1 = 0; o##1 < (j)->out[1]; o##1++)                                          \
            for (int64_t o##2 = 0; o##2 < (j)->out[2]; o##2++, at++) {                              \
                const window *const o[OM_WINDOW_AXES] = {&(j)->win[0][o##0], &(j)->win[1][o##1], &(j)->win[2][o##2]}; \
                __VA_ARGS__                                                                         \
            }

static int64_t pool_count(const pool_job *j, const window *const *o) {
    if (j->include_pad) return o[0]->padded * o[1]->padded * o[2]->padded;
    return (o[0]->hi - o[0]->lo) * (o[1]->hi - o[1]->lo) * (o[2]->hi - o[2]->lo);
}

/* Rows of outputs: along the last axis all windows have one form, but for what lies outside. */
static void max_pool(void *arg, int64_t begin, int64_t end) {
    const pool_job *j = arg;
    const struct om_pool_kernels *fn = OM_PICK(om_pool);
    const om_pool_fn row = j->dtype == OM_F32    ? fn->f32
                           : j->dtype == OM_F64  ? fn->f64
                           : j->dtype == OM_BF16 ? fn->bf16
                                                 : fn->f16;
    const int64_t rows = j->out[0] * j->out[1], size = (int64_t)om_dtype_size(j->dtype);
    for (int64_t i = begin * rows; i < end * rows; i++) {
        const int64_t o[] = {i % rows / j->out[1], i % j->out[1]}, at = i * j->out[2];
        om_pool_row r = j->row;
        for (int axis = 0; axis < 2; axis++) {
            const window *w = &j->win[axis][o[axis]];
            const int64_t from = o[axis] * j->w.stride[axis] - j->w.lo[axis];
            r.lo[axis] = w->lo, r.hi[axis] = w->hi, r.by[axis] = j->step[axis];
            r.begin[axis] = (int32_t)((w->lo - from) / j->step[axis]);
            r.base += axis ? from * j->in[2] : from * j->in[1] * j->in[2];
        }
        row(&r, j->x + i / rows * j->in_size * size, j->y + at * size, j->idx + at);
    }
}

#define POOL(S, T, W, LOAD, STORE)                                                      \
    static void avg_pool_##S(void *arg, int64_t begin, int64_t end) {                   \
        const pool_job *j = arg;                                                        \
        for (int64_t p = begin; p < end; p++) {                                         \
            const T *x = (const T *)j->x + p * j->in_size;                              \
            T *y = (T *)j->y + p * j->out_size;                                         \
            FOR_OUTPUT(j, o, at, {                                                      \
                W sum = 0;                                                              \
                FOR_WINDOW(j, o, i, { sum += LOAD(x[i_row + i2]); })                    \
                y[at] = (T)STORE(sum / (W)pool_count(j, o));                            \
            })                                                                          \
        }                                                                               \
    }                                                                                   \
    static W *grad_plane_##S(const pool_job *j, int64_t p) {                            \
        W *dx = sizeof(T) == sizeof(W) ? (W *)(void *)((T *)j->y + p * j->in_size)      \
                                       : (W *)(void *)(j->wide + p * j->in_size);       \
        memset(dx, 0, (size_t)j->in_size * sizeof(W));                                  \
        return dx;                                                                      \
    }                                                                                   \
    static void grad_store_##S(const pool_job *j, int64_t p, const W *dx) {             \
        if (sizeof(T) == sizeof(W)) return;                                             \
        T *to = (T *)j->y + p * j->in_size;                                             \
        for (int64_t i = 0; i < j->in_size; i++) to[i] = (T)STORE(dx[i]);               \
    }                                                                                   \
    static void max_pool_grad_##S(void *arg, int64_t begin, int64_t end) {              \
        const pool_job *j = arg;                                                        \
        for (int64_t p = begin; p < end; p++) {                                         \
            const T *dy = (const T *)j->x + p * j->out_size;                            \
            const int64_t *idx = j->idx + p * j->out_size;                              \
            W *dx = grad_plane_##S(j, p);                                               \
            for (int64_t i = 0; i < j->out_size; i++)                                   \
                if (om_index_fits(idx[i], j->in_size)) dx[idx[i]] += LOAD(dy[i]);       \
                else om_fault_note(j->fault, OM_FAULT_INDEX, idx[i], p * j->out_size + i, j->in_size); \
            grad_store_##S(j, p, dx);                                                   \
        }                                                                               \
    }                                                                                   \
    static void avg_pool_grad_##S(void *arg, int64_t begin, int64_t end) {              \
        const pool_job *j = arg;                                                        \
        for (int64_t p = begin; p < end; p++) {                                         \
            const T *dy = (const T *)j->x + p * j->out_size;                            \
            W *dx = grad_plane_##S(j, p);                                               \
            FOR_OUTPUT(j, o, at, {                                                      \
                const W g = LOAD(dy[at]) / (W)pool_count(j, o);                         \
                FOR_WINDOW(j, o, i, { dx[i_row + i2] += g; })                           \
            })                                                                          \
            grad_store_##S(j, p, dx);                                                   \
        }                                                                               \
    }
POOL(f32, float, float, SAME, SAME)
POOL(f64, double, double, SAME, SAME)
POOL(bf16, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16)
POOL(f16, uint16_t, float, om_f16_to_f32, om_f32_to_f16)

#define POOL_ROW(name) {[OM_F32] = name##_f32, [OM_F64] = name##_f64, [OM_BF16] = name##_bf16, [OM_F16] = name##_f16}
static const pool_fn pool_max[] = {[OM_F32] = max_pool, [OM_F64] = max_pool, [OM_BF16] = max_pool,
                                   [OM_F16] = max_pool},
                     pool_avg[] = POOL_ROW(avg_pool),
                     pool_max_grad[] = POOL_ROW(max_pool_grad), pool_avg_grad[] = POOL_ROW(avg_pool_grad);

static int pool_axes(const om_args *a, const char *attr) {
    int count;
    attr_values(a, attr, &count);
    return count;
}

static int64_t wide_bytes(const om_tensor *dx) { return om_is_half(dx->dtype) ? 4 * om_numel(dx) : 0; }

int64_t om_cpu_scratch_pool_grad(om_ctx *cx, const om_args *a) {
    (void)cx;
    return wide_bytes(&a->out[0]);
}

/* The windows that `fn` sees; adaptive: their number is given, not their form. */
static om_status pool_prepare(om_ctx *cx, om_arena *mem, const om_args *a, const pool_fn *fn, bool grad, bool adaptive,
                              const void **prep) {
    const om_tensor *x = grad ? &a->out[0] : &a->in[0], *y = grad ? &a->in[0] : &a->out[0];
    const int axes = pool_axes(a, adaptive ? "size" : "kernel");
    pool_job *j = om_arena_alloc(mem, sizeof *j);
    if (!(*prep = j)) return cx->status;
    pool_sizes(j, x, y, axes);
    j->fn = fn[x->dtype];
    j->include_pad = !adaptive && om_args_int(a, "count_include_pad", 1);
    OM_TRY(pool_tables(cx, mem, j));
    if (adaptive) adaptive_windows(j);
    else pool_windows(j, a, axes);
    return OM_OK;
}

/* what kernels/pool.k.c wants of the last axis, and where each tap of a window lies */
static om_status max_pool_tables(om_ctx *cx, om_arena *mem, pool_job *j) {
    const int64_t *k = j->w.k, s = j->w.stride[2], d = j->w.dil[2], pad = j->w.lo[2];
    om_pool_tap *tap = om_arena_alloc(mem, (size_t)k[2] * sizeof *tap);
    int32_t *first = om_arena_alloc(mem, (size_t)(j->out[2] + 1) * sizeof *first);
    int64_t *offset = om_arena_alloc(mem, (size_t)(k[0] * k[1] * k[2]) * sizeof *offset);
    if (!tap || !first || !offset) return cx->status;
    for (int64_t t = 0; t < k[2]; t++) {
        const int64_t at = t * d - pad, lo = at < 0 ? (-at + s - 1) / s : 0;
        int64_t hi = at < j->in[2] ? (j->in[2] - 1 - at) / s + 1 : 0;
        if (hi > j->out[2]) hi = j->out[2];
        tap[t] = (om_pool_tap){at, lo, hi};
    }
    for (int64_t o = 0; o < j->out[2]; o++) first[o] = (int32_t)((j->win[2][o].lo - (o * s - pad)) / d);
    for (int64_t t = 0; t < k[0] * k[1] * k[2]; t++) {
        const int64_t t0 = t / k[2] / k[1] * j->step[0], t1 = t / k[2] % k[1] * j->step[1], t2 = t % k[2] * d;
        offset[t] = (t0 * j->in[1] + t1) * j->in[2] + t2;
    }
    j->row = (om_pool_row){.tap = tap, .taps = k[2], .step = s, .n = j->out[2], .first = first, .offset = offset,
                           .size = {j->in[1], j->in[2]}, .kernel = (int32_t)k[1], .base = -pad};
    return OM_OK;
}

om_status om_cpu_prepare_max_pool(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    pool_job *j = NULL;
    OM_TRY(pool_prepare(cx, mem, a, pool_max, false, false, prep));
    j = (pool_job *)(uintptr_t)*prep;
    j->dtype = a->in[0].dtype;
    return max_pool_tables(cx, mem, j);
}

om_status om_cpu_prepare_avg_pool(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return pool_prepare(cx, mem, a, pool_avg, false, false, prep);
}

om_status om_cpu_prepare_avg_pool_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return pool_prepare(cx, mem, a, pool_avg_grad, true, false, prep);
}

om_status om_cpu_prepare_adaptive_avg_pool(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return pool_prepare(cx, mem, a, pool_avg, false, true, prep);
}

om_status om_cpu_prepare_adaptive_avg_pool_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return pool_prepare(cx, mem, a, pool_avg_grad, true, true, prep);
}

om_status om_cpu_prepare_max_pool_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    pool_job *j = om_arena_alloc(mem, sizeof *j);
    if (!(*prep = j)) return cx->status;
    pool_sizes(j, &a->out[0], &a->in[0], (int)om_args_int(a, "axes", a->in[0].rank - 2));
    j->fn = pool_max_grad[a->out[0].dtype];
    return OM_OK;
}

static om_status pool_run(om_ctx *cx, const om_args *a, int64_t *idx) {
    pool_job j = *(const pool_job *)a->prep;
    if (!om_numel(&a->out[0])) return OM_OK;
    j.x = a->in[0].data, j.y = a->out[0].data, j.idx = idx, j.wide = a->scratch, j.fault = a->fault;
    om_parallel_for(cx, j.planes, j.grain, j.fn, &j);
    return OM_OK;
}

om_status om_cpu_run_pool(om_ctx *cx, const om_args *a) { return pool_run(cx, a, NULL); }
om_status om_cpu_run_max_pool(om_ctx *cx, const om_args *a) { return pool_run(cx, a, a->out[1].data); }
om_status om_cpu_run_max_pool_grad(om_ctx *cx, const om_args *a) { return pool_run(cx, a, a->in[1].data); }
