/* reduce.cu - sums, means, maxima, minima and products over axes, in a fixed order.
 *
 * A long reduction is cut into parts whose number depends on the sizes alone; partial results (in the type computed in)
 * are reduced by a second launch. Floats are added by sixteen, those sums in double. Two shapes: a block per result,
 * its threads along the reduced elements; or 32 results a block, a lane each, eight threads along the reduced elements.
 * Sums have a way of their own where elements lie beside each other: a thread takes 16 bytes at once, of a line, or of
 * each row that columns are summed over.
 */
#include "cuda/kernel.h"

template <class T> FN T load_as(const char *p, int dtype, int64_t i);
template <> FN_MEMBER float load_as<float>(const char *p, int dtype, int64_t i) {
    return dtype == OM_F32    ? ld((const float *)p + i)
           : dtype == OM_BF16 ? in(ld((const bf16 *)p + i))
                              : in(ld((const f16 *)p + i));
}
template <> FN_MEMBER double load_as<double>(const char *p, int, int64_t i) { return ld((const double *)p + i); }
template <> FN_MEMBER int64_t load_as<int64_t>(const char *p, int dtype, int64_t i) { return integer_at(p, dtype, i); }

FN void store_as(char *p, int dtype, int64_t i, double x) { float_put(p, dtype, i, x); }
FN void store_as(char *p, int dtype, int64_t i, int64_t x) { integer_put(p, dtype, i, x); }

FN void unit(int what, float *x) {
    *x = what == OM_GPU_PROD ? 1 : what == OM_GPU_MAX ? -INFINITY : what == OM_GPU_MIN ? INFINITY : 0;
}
FN void unit(int what, double *x) {
    *x = what == OM_GPU_PROD ? 1 : what == OM_GPU_MAX ? -(double)INFINITY : what == OM_GPU_MIN ? (double)INFINITY : 0;
}
FN void unit(int what, int64_t *x) {
    *x = what == OM_GPU_PROD ? 1 : what == OM_GPU_MAX ? INT64_MIN : what == OM_GPU_MIN ? INT64_MAX : 0;
}

template <class T> FN T both(int what, T a, T b) {
    switch (what) {
    case OM_GPU_MAX: return b > a || b != b ? b : a;
    case OM_GPU_MIN: return b < a || b != b ? b : a;
    case OM_GPU_PROD: return a * b;
    default: return a + b;
    }
}
template <> FN_MEMBER int64_t both(int what, int64_t a, int64_t b) { /* wraps */
    switch (what) {
    case OM_GPU_MAX: return b > a ? b : a;
    case OM_GPU_MIN: return b < a ? b : a;
    case OM_GPU_PROD: return (int64_t)((uint64_t)a * (uint64_t)b);
    default: return (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

FN double mean_of(double x, double scale) { return x * scale; }
FN int64_t mean_of(int64_t x, double scale) { return scale > 0 ? x / (int64_t)(1 / scale + 0.5) : 0; }

/* x = x and the elements i, i + step, ... below `to` of a set, in order; A: the type of results on the way */
template <class T, class A> FN A gather_up(const om_gpu_reduce &p, int64_t base, int64_t i, int64_t to, int64_t step) {
    A x;
    unit(p.what, &x);
    while (i < to) {
        T part;
        unit(p.what, &part);
        for (int k = 0; k < 16 && i < to; k++, i += step)
            part = both(p.what, part, load_as<T>(p.x, p.xtype, base + offset_of(i, p.irank, p.idim, p.istride)));
        x = both(p.what, x, (A)part);
    }
    return x;
}

template <class T> FN void result(const om_gpu_reduce &p, int64_t part, int64_t o, T x) {
    if (p.parts == 1 && p.what == OM_GPU_MEAN) x = mean_of(x, p.scale);
    store_as(p.y, p.ytype, part * p.outer + o, x);
}

/* --- sums of what lies beside each other --------------------------------------------------------------------- */

/* The thread's sum of a line of n: 16 bytes at a time, four of them before the first is added. */
template <class S, bool whole> FN double line_add(const S *x, int64_t n) {
    typedef WIDE F;
    enum { V = 16 / sizeof(S), AT_ONCE = 4, PARTS = V * AT_ONCE > 16 ? V * AT_ONCE / 16 : 1 };
    const int64_t even = n / V * V, step = (int64_t)blockDim.x * V;
    double sum = 0;
    for (int64_t i = threadIdx.x * V; i < even; i += AT_ONCE * step) {
        several<S, V> few[AT_ONCE];
        F part[PARTS] = {};
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) few[k] = ld_several<whole, V>(x + (i + k * step < even ? i + k * step : i));
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int c = 0; c < V; c++)
                if (i + k * step < even) part[k * PARTS / AT_ONCE] += in(few[k].x[c]);
#pragma unroll
        for (int k = 0; k < PARTS; k++) sum += part[k];
    }
    return even + threadIdx.x < n ? sum + in(ld(x + even + threadIdx.x)) : sum;
}
template <class S> FN double line_add(const char *p, int64_t at, int64_t n) {
    const S *x = (const S *)p + at;
    return (uintptr_t)x % 16 ? line_add<S, false>(x, n) : line_add<S, true>(x, n);
}

/* sum[c] += the n rows of column c that are `step` apart; eight are read before the first is added, if whole */
template <class S, int V, bool whole> FN void rows_add(const S *x, int64_t step, int n, double *sum) {
    typedef WIDE F;
    enum { AT_ONCE = whole ? 8 : 1 };
    while (n > 0) {
        F part[V] = {};
#pragma unroll 1
        for (int k = 0; k < 16 && n > 0; k += AT_ONCE, n -= AT_ONCE) {
            several<S, V> row[AT_ONCE];
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                row[r] = ld_several<whole, V>(x);
                if (r + 1 < n) x += step; /* the last one again: loads without a condition are under way together */
            }
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
                for (int c = 0; c < V; c++)
                    if (r < n) part[c] += in(row[r].x[c]);
        }
#pragma unroll
        for (int c = 0; c < V; c++) sum[c] += part[c];
    }
}

/* 32 V columns a block, V a thread; eight warps along the rows. */
template <class S, int V> FN void columns_sum(const om_gpu_reduce &p) {
    SHARED(shared);
    enum { WIDTH = OM_GPU_COLUMNS_WIDTH };
    double *sums = (double *)shared, sum[V] = {}, y = 0;
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, own = threadIdx.x;
    const int64_t first = (int64_t)blockIdx.x * 32 * V, o = first + lane * V;
    const int64_t begin = p.part * blockIdx.y, from = begin + warp;
    const int64_t to = begin + p.part < p.inner ? begin + p.part : p.inner;
    const S *x = (const S *)p.x + from * p.istride[0] + o;
    if (o < p.outer && from < to) { /* V divides p.outer */
        const int n = (int)((to - from + 7) / 8);
        if (V > 1 && (uintptr_t)x % (V * sizeof(S))) rows_add<S, V, false>(x, 8 * p.istride[0], n, sum);
        else rows_add<S, V, true>(x, 8 * p.istride[0], n, sum);
    }
#pragma unroll
    for (int c = 0; c < V; c++) sums[(warp * V + c) * WIDTH + lane] = sum[c];
    __syncthreads();
    if (own >= 32 * V || first + own >= p.outer) return;
    for (unsigned w = 0; w < 8; w++) y += sums[(w * V + own % V) * WIDTH + own / V];
    result(p, blockIdx.y, first + own, y);
}
template <class S> FN void reduce_columns(const om_gpu_reduce &p) {
    enum { MOST = 16 / sizeof(S), SOME = sizeof(S) == 2 ? 2 : 1 };
    if (p.columns == MOST) columns_sum<S, MOST>(p);
    else if (p.columns == SOME) columns_sum<S, SOME>(p);
    else columns_sum<S, 1>(p);
}

/* --- anything ------------------------------------------------------------------------------------------------ */

/* Does a set that is added lie in a line? */
FN bool in_line(const om_gpu_reduce &p) {
    return (p.what == OM_GPU_SUM || p.what == OM_GPU_MEAN) && p.irank == 1 && p.istride[0] == 1;
}
template <class T, class A> FN A line_or_not(const om_gpu_reduce &p, int64_t base, int64_t from, int64_t to) {
    return gather_up<T, A>(p, base, from + threadIdx.x, to, blockDim.x);
}
template <> FN_MEMBER double line_or_not<double, double>(const om_gpu_reduce &p, int64_t base, int64_t from,
                                                         int64_t to) {
    if (in_line(p)) return line_add<double>(p.x, base + from, to - from);
    return gather_up<double, double>(p, base, from + threadIdx.x, to, blockDim.x);
}
template <> FN_MEMBER double line_or_not<float, double>(const om_gpu_reduce &p, int64_t base, int64_t from,
                                                        int64_t to) {
    if (!in_line(p)) return gather_up<float, double>(p, base, from + threadIdx.x, to, blockDim.x);
    return p.xtype == OM_F32    ? line_add<float>(p.x, base + from, to - from)
           : p.xtype == OM_BF16 ? line_add<bf16>(p.x, base + from, to - from)
                                : line_add<f16>(p.x, base + from, to - from);
}

template <class T, class A> FN void reduce_one(const om_gpu_reduce &p) {
    SHARED(shared);
    A *sum = (A *)shared;
    const int64_t o = blockIdx.x, from = p.part * blockIdx.y, to = from + p.part < p.inner ? from + p.part : p.inner;
    sum[threadIdx.x] = line_or_not<T, A>(p, offset_of(o, p.orank, p.odim, p.ostride), from, to);
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sum[threadIdx.x] = both(p.what, sum[threadIdx.x], sum[threadIdx.x + half]);
    }
    if (!threadIdx.x) result(p, blockIdx.y, o, sum[0]);
}

template <class T, class A> FN void reduce_lanes(const om_gpu_reduce &p) {
    SHARED(shared);
    A *sum = (A *)shared, x;
    const unsigned lane = threadIdx.x & 31, row = threadIdx.x >> 5;
    const int64_t o = (int64_t)blockIdx.x * 32 + lane;
    const int64_t from = p.part * blockIdx.y, to = from + p.part < p.inner ? from + p.part : p.inner;
    unit(p.what, &x);
    if (o < p.outer) {
        x = gather_up<T, A>(p, offset_of(o, p.orank, p.odim, p.ostride), from + row, to, 8);
    }
    sum[threadIdx.x] = x;
    __syncthreads();
    if (row || o >= p.outer) return;
    for (unsigned r = 1; r < 8; r++) x = both(p.what, x, sum[r * 32 + lane]);
    result(p, blockIdx.y, o, x);
}

EXPORT(256) om_k_reduce_f(PARAM(struct om_gpu_reduce) p) { reduce_one<float, double>(p); }
EXPORT(256) om_k_reduce_d(PARAM(struct om_gpu_reduce) p) { reduce_one<double, double>(p); }
EXPORT(256) om_k_reduce_i(PARAM(struct om_gpu_reduce) p) { reduce_one<int64_t, int64_t>(p); }
EXPORT(256) om_k_reduce_lanes_f(PARAM(struct om_gpu_reduce) p) { reduce_lanes<float, double>(p); }
EXPORT(256) om_k_reduce_lanes_d(PARAM(struct om_gpu_reduce) p) { reduce_lanes<double, double>(p); }
EXPORT(256) om_k_reduce_lanes_i(PARAM(struct om_gpu_reduce) p) { reduce_lanes<int64_t, int64_t>(p); }
FLOATS(reduce_columns, struct om_gpu_reduce, 256, reduce_columns)
