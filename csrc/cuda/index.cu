/* index.cu - rows by index, and their gradient. The gradient sorts the sources by target (sort.cu) and cuts them into
 * parts of so many sources; a block per part adds the rows of each of its targets in their order. Sums of a target that
 * goes on in the next part are added by a second launch, in the order of the parts. */
#include "cuda/kernel.h"

/* Row k of the index: false: it is none of x's, and where x has any the first is read. */
FN bool row_at(const om_gpu_gather &p, int64_t k, int64_t *at) {
    *at = index_at(p.idx, p.wide, k);
    const bool good = (uint64_t)*at < (uint64_t)p.n;
    if (!good) *at = 0;
    return good;
}
FN void row_fault(const om_gpu_gather &p, int64_t k) {
    fault_note(p.fault, (uint32_t)p.site, 1, index_at(p.idx, p.wide, k), k, p.n);
}

/* Four units a thread, read before the first is written; of units that 32 bits count. */
template <class T> FN void gather_units(const om_gpu_gather &p) {
    enum { AT_ONCE = 4 };
    const uint32_t inner = (uint32_t)p.inner, m = (uint32_t)p.m, step = blockDim.x;
    const int64_t total = p.outer * p.m * p.inner, first = (int64_t)blockIdx.x * AT_ONCE * step + threadIdx.x;
    for (int64_t i = first; i < total; i += (int64_t)gridDim.x * AT_ONCE * step) {
        int64_t from[AT_ONCE];
        T x[AT_ONCE];
        bool good = true;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t own = (uint32_t)(i + k * step < total ? i + k * step : i), row = own / inner;
            int64_t at;
            good &= row_at(p, row % m, &at);
            from[k] = row / m * p.x_outer + at * p.x_n + own % inner * p.x_inner;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (p.n) x[k] = ld((const T *)p.x + from[k]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (p.n && i + k * step < total) st((T *)p.y + i + k * step, x[k]);
        if (good) continue;
#pragma unroll 1
        for (int64_t k = i; k < total && k < i + AT_ONCE * step; k += step) {
            int64_t at;
            const uint32_t row = (uint32_t)k / inner;
            if ((uint32_t)k % inner == 0 && row < m && !row_at(p, row, &at)) row_fault(p, row);
        }
    }
}

EXPORT(256) om_k_gather(PARAM(struct om_gpu_gather) p) {
    const int64_t each = p.unit / p.size, inner = p.inner * each, total = p.outer * p.m * inner;
    if (((uintptr_t)p.x | (uintptr_t)p.y) & (p.unit - 1) || total > INT32_MAX) { /* by elements */
        OVER_GRID(i, total) {
            const int64_t c = i % inner, k = i / inner % p.m, o = i / inner / p.m;
            int64_t at;
            if (!row_at(p, k, &at) && !o && !c) row_fault(p, k);
            if (p.n) move_one(p.x, (o * p.x_outer + at * p.x_n) * each + c * p.x_inner, p.y, i, p.size);
        }
        return;
    }
    BY_UNIT(gather_units, p)
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
            fault_note(p.fault, (uint32_t)p.site, 1, at, p.shared ? k : i, p.n);
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
            fault_note(p.fault, (uint32_t)p.site, 1, to, i * p.place, p.n);
            to = p.n;
        }
        st(p.words + i, (uint64_t)(to == p.skip ? p.n : to) << 32 | (uint64_t)i);
    }
}

/* N elements a thread, from c on, of the part's rows: shared memory has the part's words, between the one before it
 * and the one behind it. Rows are read before the first is added. */
template <class S, int N> FN void part_add(const om_gpu_scatter &p, const uint64_t *words, int n, int64_t c) {
    enum { AHEAD = 8 };
    const int64_t src = blockIdx.z * p.m * p.inner + c, dst = blockIdx.z * p.n * p.inner + c;
    const int64_t room = ((int64_t)blockIdx.z * gridDim.x + blockIdx.x) * 2;
    double x[N] = {};
    bool own = false; /* the sum has the target's first source */
    for (int k0 = 0; k0 < n; k0 += AHEAD) {
        several<S, N> row[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++) { /* also what is not added: loads without a condition are under way together */
            const uint32_t from = (uint32_t)words[k0 + r < n ? k0 + r + 1 : n];
            row[r] = ld_several<true, N>((const S *)p.dy + src + from * p.inner);
        }
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            const int k = k0 + r;
            const int64_t to = k < n ? (int64_t)(words[k + 1] >> 32) : p.n;
            if (to >= p.n) break;
            S *y = (S *)p.y + dst + to * p.inner;
            const bool first = (int64_t)(words[k] >> 32) != to, last = (int64_t)(words[k + 2] >> 32) != to;
            if (first || !k) {
                several<S, N> old = {};
                if (first && !p.fresh) old = ld_several<true, N>((const S *)y);
                own = first;
                for (int e = 0; e < N; e++) x[e] = in(old.x[e]);
            }
            for (int e = 0; e < N; e++) x[e] += in(row[r].x[e]);
            if (last && own) {
                for (int e = 0; e < N; e++) row[r].x[e] = narrow<S>((WIDE)x[e]);
                st_several<true, N>(y, row[r]);
            } else if (last || k == n - 1) {
                for (int e = 0; e < N; e++) st(p.sums + (room + own) * p.inner + c + e, x[e]);
            }
        }
    }
}

/* block (part, elements of a row, outer) */
template <class S> FN void scatter_add(const om_gpu_scatter &p) {
    SHARED(shared);
    enum { PART = OM_GPU_SCATTER_PART, MOST = 16 / sizeof(S) };
    uint64_t *words = (uint64_t *)shared;
    const int64_t begin = (int64_t)blockIdx.x * PART, left = p.m - begin;
    const int n = left < PART ? (int)left : PART;
    for (int i = threadIdx.x; i < n + 2; i += blockDim.x) {
        const int64_t k = begin + i - 1;
        words[i] = k >= 0 && k < p.m ? ld(p.words + k) : ~0ull;
    }
    __syncthreads();
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * p.each;
    if (c >= p.inner) return; /* which p.each divides */
    if (p.each == MOST && !(((uintptr_t)p.dy | (uintptr_t)p.y) % 16)) part_add<S, MOST>(p, words, n, c);
    else
        for (int e = 0; e < p.each; e++) part_add<S, 1>(p, words, n, c + e);
}

/* block (part, elements of a row, outer): a target whose sources begin in the part and go on */
template <class S> FN void scatter_join(const om_gpu_scatter &p) {
    enum { PART = OM_GPU_SCATTER_PART, AHEAD = 16 };
    const int64_t begin = (int64_t)blockIdx.x * PART, c = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    if (begin + PART >= p.m || c >= p.inner) return;
    const int64_t to = (int64_t)(ld(p.words + begin + PART - 1) >> 32), first = (int64_t)blockIdx.z * gridDim.x;
    if (to >= p.n || (int64_t)(ld(p.words + begin + PART) >> 32) != to) return;
    if (begin && (int64_t)(ld(p.words + begin - 1) >> 32) == to) return;
    double x = ld(p.sums + ((first + blockIdx.x) * 2 + 1) * p.inner + c);
    bool more = true;
    for (int64_t part = blockIdx.x + 1; more; part += AHEAD) {
        double sum[AHEAD] = {};
        int64_t target[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) { /* behind the target: anything */
            const bool given = (part + k) * PART < p.m;
            target[k] = given ? (int64_t)(ld(p.words + (part + k) * PART) >> 32) : p.n;
            if (given) sum[k] = ld(p.sums + (first + part + k) * 2 * p.inner + c);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            more &= target[k] == to;
            if (more) x += sum[k];
        }
    }
    put<S>(p.y, (blockIdx.z * p.n + to) * p.inner + c, (WIDE)x);
}
FLOATS(scatter_add, struct om_gpu_scatter, 256, scatter_add)
FLOATS(scatter_join, struct om_gpu_scatter, 256, scatter_join)
