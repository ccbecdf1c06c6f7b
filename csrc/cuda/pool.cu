/* pool.cu - windows over up to three axes: maxima, means, and their gradients, each element's terms added in the order
 * of the windows. Missing leading axes have size 1. */
#include "cuda/kernel.h"

typedef struct om_gpu_pool pool;

/* input positions lo, lo + dil, ... < hi; padded: length with padding */
struct interval { int64_t lo, hi, padded; };
FN interval window_of(const pool &p, int a, int64_t o) {
    interval w;
    if (p.adaptive) {
        w.lo = o * p.in[a] / p.out[a], w.hi = ((o + 1) * p.in[a] + p.out[a] - 1) / p.out[a], w.padded = w.hi - w.lo;
        return w;
    }
    const int64_t lo = o * p.stride[a] - p.pad[a], hi = lo + p.dil[a] * (p.k[a] - 1) + 1, most = p.in[a] + p.pad[a];
    w.padded = (hi < most ? hi : most) - lo;
    w.lo = lo < 0 ? lo + (-lo + p.dil[a] - 1) / p.dil[a] * p.dil[a] : lo;
    w.hi = hi < p.in[a] ? hi : p.in[a];
    return w;
}

struct windows { interval at[3]; int64_t count; };
FN windows windows_of(const pool &p, int64_t o) {
    windows w;
    w.count = 1;
    for (int a = 2; a >= 0; a--) {
        w.at[a] = window_of(p, a, o % p.out[a]);
        o /= p.out[a];
        w.count *= p.include_pad ? w.at[a].padded : w.at[a].hi - w.at[a].lo;
    }
    return w;
}
#define FOR_WINDOW(w, spot)                                                                                  \
    for (int64_t i0 = (w).at[0].lo; i0 < (w).at[0].hi; i0 += p.dil[0])                                       \
        for (int64_t i1 = (w).at[1].lo; i1 < (w).at[1].hi; i1 += p.dil[1])                                   \
            for (int64_t i2 = (w).at[2].lo, spot = (i0 * p.in[1] + i1) * p.in[2] + i2; i2 < (w).at[2].hi;      \
                 i2 += p.dil[2], spot += p.dil[2])

template <class S> FN void max_pool(const pool &p) {
    typedef WIDE F;
    OVER_GRID(i, p.planes * p.out_size) {
        const int64_t plane = i / p.out_size * p.in_size;
        const windows w = windows_of(p, i % p.out_size);
        F best = -inf_of((F)0);
        int64_t where = (w.at[0].lo * p.in[1] + w.at[1].lo) * p.in[2] + w.at[2].lo;
        FOR_WINDOW(w, s) {
            const F x = at<S>(p.x, plane + s);
            if (x > best || x != x) best = x, where = s;
        }
        put<S>(p.y, i, best);
        st(p.idx + i, where);
    }
}

template <class S> FN void avg_pool(const pool &p) {
    typedef WIDE F;
    OVER_GRID(i, p.planes * p.out_size) {
        const int64_t plane = i / p.out_size * p.in_size;
        const windows w = windows_of(p, i % p.out_size);
        F sum = 0;
        FOR_WINDOW(w, s) sum += at<S>(p.x, plane + s);
        put<S>(p.y, i, sum / (F)w.count);
    }
}

/* The windows [lo, hi) of an axis that position i lies in. */
FN interval over(const pool &p, int a, int64_t i) {
    interval o;
    o.lo = p.adaptive ? i * p.out[a] / p.in[a] : (i + p.pad[a]) / p.stride[a];
    if (o.lo >= p.out[a]) o.lo = p.out[a] - 1;
    o.hi = o.lo;
    while (o.lo > 0 && window_of(p, a, o.lo - 1).hi > i) o.lo--;
    while (o.hi < p.out[a] && window_of(p, a, o.hi).lo <= i) o.hi++;
    if (window_of(p, a, o.lo).hi <= i) o.hi = o.lo; /* between two windows */
    return o;
}

template <class S> FN void avg_pool_grad(const pool &p) {
    typedef WIDE F;
    OVER_GRID(i, p.planes * p.in_size) {
        const int64_t plane = i / p.in_size * p.out_size, at_in = i % p.in_size;
        const interval a = over(p, 0, at_in / p.in[2] / p.in[1]), b = over(p, 1, at_in / p.in[2] % p.in[1]),
                       c = over(p, 2, at_in % p.in[2]);
        F dx = 0;
        for (int64_t o0 = a.lo; o0 < a.hi; o0++)
            for (int64_t o1 = b.lo; o1 < b.hi; o1++)
                for (int64_t o2 = c.lo; o2 < c.hi; o2++) {
                    const int64_t o = (o0 * p.out[1] + o1) * p.out[2] + o2;
                    dx += at<S>(p.dy, plane + o) / (F)windows_of(p, o).count;
                }
        put<S>(p.y, i, dx);
    }
}

FN float *sums_of(const pool &p, bf16) { return p.wide; }
FN float *sums_of(const pool &p, f16) { return p.wide; }
FN float *sums_of(const pool &p, float) { return (float *)p.y; }
FN double *sums_of(const pool &p, double) { return (double *)p.y; }

/* A block per plane, blockDim windows at a time: of those with one position the first adds all. */
template <class S> FN void max_pool_grad(const pool &p) {
    typedef WIDE F;
    SHARED(shared);
    int64_t *where = (int64_t *)shared;
    F *dy = (F *)(where + blockDim.x), *sums = sums_of(p, S()) + blockIdx.x * p.in_size;
    const int64_t y = blockIdx.x * p.out_size;
    for (int64_t i = threadIdx.x; i < p.in_size; i += blockDim.x) st(sums + i, (F)0);
    for (int64_t first = 0; first < p.out_size; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        int64_t own = i < p.out_size ? ld(p.at + y + i) : -1;
        if (i < p.out_size && (uint64_t)own >= (uint64_t)p.in_size) {
            fault_note(p.fault, (uint32_t)p.site, 1, own, y + i, p.in_size);
            own = -1;
        }
        __syncthreads();
        where[threadIdx.x] = own;
        dy[threadIdx.x] = own >= 0 ? at<S>(p.dy, y + i) : (F)0;
        __syncthreads();
        bool leads = own >= 0;
        for (unsigned j = 0; j < threadIdx.x && leads; j++) leads = where[j] != own;
        if (!leads) continue;
        F sum = ld(sums + own);
        for (unsigned j = threadIdx.x; j < blockDim.x; j++)
            if (where[j] == own) sum += dy[j];
        st(sums + own, sum);
    }
    if (sizeof(S) == sizeof(F)) return;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.in_size; i += blockDim.x) put<S>(p.y, blockIdx.x * p.in_size + i, ld(sums + i));
}

FLOATS(max_pool, struct om_gpu_pool, 256, max_pool)
FLOATS(avg_pool, struct om_gpu_pool, 256, avg_pool)
FLOATS(avg_pool_grad, struct om_gpu_pool, 256, avg_pool_grad)
FLOATS(max_pool_grad, struct om_gpu_pool, 128, max_pool_grad)
