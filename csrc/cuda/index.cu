/* index.cu - rows by index, and their gradient. The gradient adds the rows of one target in their order: the first
 * source of a target (an atomic minimum, so it is the same every time) leads, and its block adds all others. */
#include "cuda/kernel.h"

EXPORT(256) om_k_gather(PARAM(struct om_gpu_gather) p) {
    OVER_GRID(i, p.outer * p.m * p.inner) {
        const int64_t c = i % p.inner, k = i / p.inner % p.m, o = i / p.inner / p.m;
        int64_t at = index_at(p.idx, p.wide, k);
        if ((uint64_t)at >= (uint64_t)p.n) {
            if (!o && !c) fault_note(p.fault, (uint32_t)p.site, 1, at, k, p.n);
            if (!p.n) continue;
            at = 0;
        }
        const int64_t s = o * p.x_outer + at * p.x_n + c * p.x_inner;
        move_one(p.x, s, p.y, i, p.size);
    }
}

EXPORT(256) om_k_gather_elements(PARAM(struct om_gpu_elements) p) {
    OVER_GRID(i, p.total) {
        int64_t rest = i, s = 0, k = 0;
        for (int r = p.rank - 1; r >= 0; r--) {
            const int64_t c = rest % p.dim[r];
            rest /= p.dim[r];
            s += c * p.xs[r], k += c * p.is[r];
        }
        int64_t at = index_at(p.idx, p.wide, k);
        if ((uint64_t)at >= (uint64_t)p.n) {
            fault_note(p.fault, (uint32_t)p.site, 1, at, i, p.n);
            if (!p.n) continue;
            at = 0;
        }
        s += at * p.step;
        move_one(p.x, s, p.y, i, p.size);
    }
}

EXPORT(256) om_k_scatter_clear(PARAM(struct om_gpu_scatter) p) {
    OVER_GRID(i, p.n) st(p.head + i, INT32_MAX);
}

EXPORT(256) om_k_scatter_link(PARAM(struct om_gpu_scatter) p) {
    OVER_GRID(i, p.m) {
        const int64_t to = index_at(p.idx, p.wide, i);
        if ((uint64_t)to >= (uint64_t)p.n) {
            fault_note(p.fault, (uint32_t)p.site, 1, to, i, p.n);
        } else if (to != p.skip) {
            touch(p.head + to, sizeof *p.head, 1);
            atomicMin(p.head + to, (int32_t)i);
        }
    }
}

/* block (source, 256 elements of a row, outer) */
template <class S> FN void scatter_add(const om_gpu_scatter &p) {
    typedef WIDE F;
    SHARED(shared);
    uint8_t *same = (uint8_t *)shared;
    const int64_t first = blockIdx.x, to = index_at(p.idx, p.wide, first);
    if ((uint64_t)to >= (uint64_t)p.n || to == p.skip) return; /* the whole block */
    if (ld(p.head + to) != (int32_t)first) return;
    const int64_t c = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    const int64_t row = blockIdx.z * p.n + to, src = blockIdx.z * p.m;
    double x = 0;
    if (c < p.inner) x = at<S>(p.y, row * p.inner + c);
    for (int64_t k0 = first; k0 < p.m; k0 += blockDim.x) {
        const int64_t k = k0 + threadIdx.x;
        __syncthreads();
        same[threadIdx.x] = k < p.m && index_at(p.idx, p.wide, k) == to;
        __syncthreads();
        for (unsigned j = 0; j < blockDim.x; j++)
            if (same[j] && c < p.inner) x += at<S>(p.dy, (src + k0 + j) * p.inner + c);
    }
    if (c < p.inner) put<S>(p.y, row * p.inner + c, (F)x);
}
FLOATS(scatter_add, struct om_gpu_scatter, 256, scatter_add)
