/* move.cu - elements moved as they are or from one float dtype to another, and made from nothing. */
#include "cuda/kernel.h"

/* Four units a thread, read before the first is written; of units that 32 bits count. */
template <class T> FN void copy_units(const om_gpu_copy &p) {
    enum { AT_ONCE = 4 };
    const int64_t step = blockDim.x, first = (int64_t)blockIdx.x * AT_ONCE * step + threadIdx.x;
    for (int64_t i = first; i < p.total; i += gridDim.x * AT_ONCE * step) {
        int64_t s[AT_ONCE] = {}, d[AT_ONCE] = {};
        uint32_t rest[AT_ONCE];
        T x[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) rest[k] = (uint32_t)(i + k * step);
        for (int r = p.rank - 1; r > 0; r--) {
            const uint32_t n = (uint32_t)p.dim[r];
            const int64_t from = p.from[r], to = p.to[r];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const uint32_t c = rest[k] % n;
                rest[k] /= n;
                s[k] += c * from, d[k] += c * to;
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) s[k] += rest[k] * p.from[0], d[k] += rest[k] * p.to[0];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + k * step < p.total) x[k] = ld((const T *)p.src + s[k]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + k * step < p.total) st((T *)p.dst + d[k], x[k]);
    }
}
EXPORT(256, 4) om_k_copy(PARAM(struct om_gpu_copy) p) {
    if (behind_fault(p.guard)) return;
    if (((uintptr_t)p.src | (uintptr_t)p.dst) & (p.unit - 1) || p.total > INT32_MAX) { /* by elements */
        const int64_t each = p.unit / p.size;
        OVER_GRID(i, p.total * each) {
            const int64_t s = offset_of(i / each, p.rank, p.dim, p.from), d = offset_of(i / each, p.rank, p.dim, p.to);
            move_one(p.src, s * each + i % each, p.dst, d * each + i % each, p.size);
        }
        return;
    }
    BY_UNIT(copy_units, p)
}

/* 32 N by 32 N elements a block, read along x and written along y, N of them at once. */
template <class T, int N, bool whole> FN void flip_tile(const om_gpu_flip &p) {
    SHARED(shared);
    typedef typename word_of<N * sizeof(T)>::type word;
    enum { SIDE = 32 * N, WIDTH = SIDE + N, TURNS = SIDE / 8 };
    T *tile = (T *)shared;
    const int64_t x0 = (int64_t)blockIdx.x * SIDE, y0 = (int64_t)blockIdx.y * SIDE;
    const int64_t z = blockIdx.z % p.n[2], w = blockIdx.z / p.n[2];
    const unsigned own = (threadIdx.x & 31) * N, row = threadIdx.x >> 5;
    const T *src = (const T *)p.src + z * p.from[2] + w * p.from[3] + (x0 + own) * p.from[0] + y0 * p.from[1];
    T *dst = (T *)p.dst + z * p.to[2] + w * p.to[3] + x0 * p.to[0] + (y0 + own) * p.to[1];
    several<T, N> line[TURNS];
#pragma unroll
    for (unsigned k = 0; k < TURNS; k++)
        if (x0 + own < p.n[0] && y0 + row + 8 * k < p.n[1])
            line[k] = ld_several<whole, N>(src + (row + 8 * k) * p.from[1]);
#pragma unroll
    for (unsigned k = 0; k < TURNS; k++) {
        word w;
        memcpy(&w, &line[k], sizeof w);
        *(word *)(tile + (row + 8 * k) * WIDTH + own) = w;
    }
    __syncthreads();
    if (behind_fault(p.guard)) return;
#pragma unroll
    for (unsigned k = 0; k < TURNS; k++) {
        for (int e = 0; e < N; e++) line[k].x[e] = tile[(own + e) * WIDTH + row + 8 * k];
        if (x0 + row + 8 * k < p.n[0] && y0 + own < p.n[1])
            st_several<whole, N>(dst + (row + 8 * k) * p.to[0], line[k]);
    }
}
template <class T, int N> FN void flip_tiles(const om_gpu_flip &p) {
    if (((uintptr_t)p.src | (uintptr_t)p.dst) % (N * sizeof(T))) flip_tile<T, N, false>(p);
    else flip_tile<T, N, true>(p);
}

EXPORT(256) om_k_flip(PARAM(struct om_gpu_flip) p) {
    if (p.each == 2 && p.size == 1) flip_tiles<uint8_t, 2>(p);
    else if (p.each == 2) flip_tiles<uint16_t, 2>(p);
    else if (p.size == 1) flip_tile<uint8_t, 1, true>(p);
    else if (p.size == 2) flip_tile<uint16_t, 1, true>(p);
    else if (p.size == 4) flip_tile<uint32_t, 1, true>(p);
    else flip_tile<uint64_t, 1, true>(p);
}

/* --- casts of many tensors ------------------------------------------------------------------------------------- */

/* n elements of a block, eight a thread in accesses of 16 bytes where both sides begin at a multiple of that. */
template <class S, class T> FN void cast_tile(const S *x, T *y, int64_t n) {
    enum { EACH = 8, READ = 16 / sizeof(S), WRITE = 16 / sizeof(T) };
    const int64_t eights = ((uintptr_t)x | (uintptr_t)y) % 16 ? 0 : n / EACH;
    for (int64_t i = threadIdx.x; i < eights; i += blockDim.x) {
        S from[EACH];
        T to[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k += READ) {
            const several<S, READ> some = ld_several<true, READ>(x + i * EACH + k);
            memcpy(from + k, &some, sizeof some);
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) to[k] = narrow<T>((typename wide<T>::type)in(from[k]));
#pragma unroll
        for (int k = 0; k < EACH; k += WRITE) {
            several<T, WRITE> some;
            memcpy(&some, to + k, sizeof some);
            st_several<true, WRITE>(y + i * EACH + k, some);
        }
    }
    for (int64_t i = eights * EACH + threadIdx.x; i < n; i += blockDim.x)
        out(y + i, (typename wide<T>::type)in(ld(x + i)));
}
template <class S> FN void cast_from(const S *x, char *dst, int to, int64_t at, int64_t n) {
    switch (to) {
    case OM_F64: cast_tile(x + at, (double *)dst + at, n); break;
    case OM_BF16: cast_tile(x + at, (bf16 *)dst + at, n); break;
    case OM_F16: cast_tile(x + at, (f16 *)dst + at, n); break;
    default: cast_tile(x + at, (float *)dst + at, n);
    }
}
EXPORT(256) om_k_cast_all(PARAM(struct om_gpu_casts) p) {
    uint32_t i = 0, end = p.count; /* the last tensor whose blocks begin here or before */
    while (end - i > 1) {
        const uint32_t middle = (i + end) / 2;
        if (p.first[middle] <= blockIdx.x) i = middle;
        else end = middle;
    }
    const int64_t at = (int64_t)(blockIdx.x - p.first[i]) * OM_GPU_CAST_TILE, left = p.n[i] - at;
    const int64_t n = left < OM_GPU_CAST_TILE ? left : OM_GPU_CAST_TILE;
    switch (p.from[i]) {
    case OM_F64: cast_from((const double *)p.src[i], p.dst[i], p.to[i], at, n); break;
    case OM_BF16: cast_from((const bf16 *)p.src[i], p.dst[i], p.to[i], at, n); break;
    case OM_F16: cast_from((const f16 *)p.src[i], p.dst[i], p.to[i], at, n); break;
    default: cast_from((const float *)p.src[i], p.dst[i], p.to[i], at, n);
    }
}

EXPORT(256) om_k_fill(PARAM(struct om_gpu_fill) p) {
    const int64_t each = 16 / p.size, n = (uintptr_t)p.dst % 16 ? 0 : p.n / each;
    uint64_t x = p.value;
    for (int size = p.size; size < 8; size *= 2) x |= x << 8 * size;
    const uint32_t lo = (uint32_t)x, hi = (uint32_t)(x >> 32);
    const chunk all = {{lo, hi, lo, hi}};
    OVER_GRID(i, n) st((chunk *)p.dst + i, all);
    OVER_GRID(i, p.n - n * each) put_one(p.dst, n * each + i, p.value, p.size);
}

EXPORT(256) om_k_iota(PARAM(struct om_gpu_iota) p) {
    OVER_GRID(i, p.n) {
        const int64_t k = p.istart + i * p.istep;
        switch (p.dtype) {
        case OM_I64: st((int64_t *)p.dst + i, k); break;
        case OM_I32: st((int32_t *)p.dst + i, (int32_t)k); break;
        case OM_I16: st((int16_t *)p.dst + i, (int16_t)k); break;
        case OM_I8: case OM_U8: st((uint8_t *)p.dst + i, (uint8_t)k); break;
        default: float_put(p.dst, p.dtype, i, p.start + p.step * (double)i);
        }
    }
}

EXPORT(256) om_k_trilu(PARAM(struct om_gpu_trilu) p) {
    OVER_GRID(i, p.total) {
        int64_t rest = i, s = 0, row = 0, col = 0;
        for (int r = p.rank - 1; r >= 0; r--) {
            const int64_t c = rest % p.dim[r];
            rest /= p.dim[r];
            s += c * p.from[r];
            if (r == p.rank - 1) col = c;
            if (r == p.rank - 2) row = c;
        }
        const bool kept = p.upper ? col - row >= p.k : col - row <= p.k;
        if (kept) move_one(p.src, s, p.dst, i, p.size);
        else put_one(p.dst, i, 0, p.size);
    }
}
