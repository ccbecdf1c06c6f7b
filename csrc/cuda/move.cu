/* move.cu - elements moved as they are, and made from nothing. */
#include "cuda/kernel.h"

/* the low bytes of x */
FN void put_one(char *dst, int64_t d, uint64_t x, int size) {
    switch (size) {
    case 1: st((uint8_t *)dst + d, (uint8_t)x); break;
    case 2: st((uint16_t *)dst + d, (uint16_t)x); break;
    case 4: st((uint32_t *)dst + d, (uint32_t)x); break;
    default: st((uint64_t *)dst + d, x);
    }
}

EXPORT(256) om_k_copy(PARAM(struct om_gpu_copy) p) {
    if (behind_fault(p.guard)) return;
    OVER_GRID(i, p.total) {
        int64_t rest = i, s = 0, d = 0;
        for (int r = p.rank - 1; r >= 0; r--) {
            const int64_t c = rest % p.dim[r];
            rest /= p.dim[r];
            s += c * p.from[r], d += c * p.to[r];
        }
        move_one(p.src, s, p.dst, d, p.size);
    }
}

/* 32 by 32 elements a block: read along x, written along y. */
EXPORT(256) om_k_flip(PARAM(struct om_gpu_flip) p) {
    SHARED(tile);
    const int64_t x0 = (int64_t)blockIdx.x * 32, y0 = (int64_t)blockIdx.y * 32;
    const int64_t z = blockIdx.z % p.n[2], w = blockIdx.z / p.n[2];
    const int64_t s0 = z * p.from[2] + w * p.from[3], d0 = z * p.to[2] + w * p.to[3];
    const unsigned lane = threadIdx.x & 31, row = threadIdx.x >> 5;
    for (unsigned y = row; y < 32; y += 8)
        if (x0 + lane < p.n[0] && y0 + y < p.n[1]) {
            const int64_t at = s0 + (x0 + lane) * p.from[0] + (y0 + y) * p.from[1];
            const unsigned to = y * 33 + lane;
            switch (p.size) {
            case 1: ((uint8_t *)tile)[to] = ld((const uint8_t *)p.src + at); break;
            case 2: ((uint16_t *)tile)[to] = ld((const uint16_t *)p.src + at); break;
            case 4: ((uint32_t *)tile)[to] = ld((const uint32_t *)p.src + at); break;
            default: ((uint64_t *)tile)[to] = ld((const uint64_t *)p.src + at);
            }
        }
    __syncthreads();
    if (behind_fault(p.guard)) return;
    for (unsigned x = row; x < 32; x += 8)
        if (x0 + x < p.n[0] && y0 + lane < p.n[1]) {
            const int64_t at = d0 + (x0 + x) * p.to[0] + (y0 + lane) * p.to[1];
            const unsigned from = lane * 33 + x;
            switch (p.size) {
            case 1: st((uint8_t *)p.dst + at, ((const uint8_t *)tile)[from]); break;
            case 2: st((uint16_t *)p.dst + at, ((const uint16_t *)tile)[from]); break;
            case 4: st((uint32_t *)p.dst + at, ((const uint32_t *)tile)[from]); break;
            default: st((uint64_t *)p.dst + at, ((const uint64_t *)tile)[from]);
            }
        }
}

EXPORT(256) om_k_fill(PARAM(struct om_gpu_fill) p) {
    OVER_GRID(i, p.n) put_one(p.dst, i, p.value, p.size);
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
