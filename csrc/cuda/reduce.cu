/* reduce.cu - sums, means, maxima, minima and products over axes, in a fixed order.
 *
 * A long reduction is cut into parts whose number depends on the sizes alone; partial results (in the type computed in)
 * are reduced by a second launch. Floats are added by sixteen, those sums in double. Two shapes: a block per result,
 * its threads along the reduced elements; or 32 results a block, a lane each, eight threads along the reduced elements.
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

template <class T, class A> FN void reduce_one(const om_gpu_reduce &p) {
    SHARED(shared);
    A *sum = (A *)shared;
    const int64_t o = blockIdx.x, from = p.part * blockIdx.y, to = from + p.part < p.inner ? from + p.part : p.inner;
    const int64_t base = offset_of(o, p.orank, p.odim, p.ostride);
    sum[threadIdx.x] = gather_up<T, A>(p, base, from + threadIdx.x, to, blockDim.x);
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
