/* index.cu - rows by index, and their gradient. The gradient sorts the sources by target (sort.cu), and a block per
 * target adds its rows in their order. */
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

EXPORT(256) om_k_scatter_words(PARAM(struct om_gpu_scatter) p) {
    OVER_GRID(i, p.m) {
        int64_t to = index_at(p.idx, p.wide, i);
        if ((uint64_t)to >= (uint64_t)p.n) {
            fault_note(p.fault, (uint32_t)p.site, 1, to, i, p.n);
            to = p.n;
        }
        st(p.words + i, (uint64_t)(to == p.skip ? p.n : to) << 32 | (uint64_t)i);
    }
}

/* block (place in the order of the targets, elements of a row, outer): the first source of a target adds them all */
template <class S> FN void scatter_add(const om_gpu_scatter &p) {
    typedef WIDE F;
    enum { AHEAD = 8 }; /* rows that are read before the first is added */
    const int64_t first = blockIdx.x, to = (int64_t)(ld(p.words + first) >> 32);
    if (to >= p.n || (first && (int64_t)(ld(p.words + first - 1) >> 32) == to)) return; /* the whole block */
    const int64_t c = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    const int64_t row = blockIdx.z * p.n + to, src = blockIdx.z * p.m;
    if (c >= p.inner) return;
    double x = at<S>(p.y, row * p.inner + c);
    int n = AHEAD;
    for (int64_t k = first; n == AHEAD; k += AHEAD) {
        F dy[AHEAD];
        for (n = 0; n < AHEAD && k + n < p.m; n++) {
            const uint64_t w = ld(p.words + k + n);
            if ((int64_t)(w >> 32) != to) break;
            dy[n] = at<S>(p.dy, (src + (uint32_t)w) * p.inner + c);
        }
        for (int j = 0; j < n; j++) x += dy[j];
    }
    put<S>(p.y, row * p.inner + c, (F)x);
}
FLOATS(scatter_add, struct om_gpu_scatter, 256, scatter_add)
