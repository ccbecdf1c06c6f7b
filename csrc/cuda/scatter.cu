/* scatter.cu - elements put at indices, and rows at tuples of indices: in the order of the sources, the same every
 * time. Along an axis sources meet in one line only, which a thread works off. Rows: the sources are sorted by target
 * (sort.cu), and a block per target does them all. */
#include "cuda/kernel.h"

/* y = y + x, or the further one; NaN wins. Sums of 16-bit floats are rounded each time. */
FN void put_more(char *y, int64_t to, const char *x, int64_t from, int dtype, int size, int reduce) {
    if (!reduce) {
        move_one(x, from, y, to, size);
    } else if (is_float(dtype)) {
        const double a = float_at(y, dtype, to), b = float_at(x, dtype, from);
        if (reduce == 1 && dtype == OM_F64) float_put(y, dtype, to, a + b);
        else if (reduce == 1) float_put(y, dtype, to, (float)a + (float)b);
        else if ((reduce == 2 ? b > a : b < a) || b != b) move_one(x, from, y, to, size);
    } else {
        const int64_t a = integer_at(y, dtype, to), b = integer_at(x, dtype, from);
        if (reduce == 1) integer_put(y, dtype, to, (int64_t)((uint64_t)a + (uint64_t)b));
        else if (reduce == 2 ? b > a : b < a) move_one(x, from, y, to, size);
    }
}

EXPORT(128) om_k_put(PARAM(struct om_gpu_put) p) {
    OVER_GRID(line, p.lines) {
        int64_t at[4];
        for (int k = 0; k < 4; k++) at[k] = offset_of(line, p.rank, p.dim, p.stride[k]);
        for (int64_t i = 0; i < p.len; i++) {
            const int64_t to = index_at(p.idx, p.wide, at[1] + i * p.step[1]);
            if ((uint64_t)to >= (uint64_t)p.n)
                fault_note(p.fault, (uint32_t)p.site, 1, to, at[3] + i * p.step[3], p.n);
            else put_more(p.y, at[0] + to * p.step[0], p.src, at[2] + i * p.step[2], p.dtype, p.size, p.reduce);
        }
    }
}

/* *at: the place that tuple i means; false: there is none. */
FN bool nd_place(const om_gpu_nd &p, int64_t i, bool tell, int64_t *at) {
    *at = 0;
    for (int64_t d = 0; d < p.k; d++) {
        const int64_t v = index_at(p.idx, p.wide, i * p.k + d);
        if ((uint64_t)v >= (uint64_t)p.limit[d]) {
            if (tell) fault_note(p.fault, (uint32_t)p.site, 1, v, i * p.k + d, p.limit[d]);
            return false;
        }
        *at += v * p.step[d];
    }
    return true;
}

EXPORT(256) om_k_gather_nd(PARAM(struct om_gpu_nd) p) {
    OVER_GRID(i, p.count * p.inner) {
        const int64_t c = i % p.inner;
        int64_t at;
        if (nd_place(p, i / p.inner, !c, &at))
            move_one(p.x, at + offset_of(c, p.rank, p.dim, p.stride), p.y, i, p.size);
    }
}

EXPORT(256) om_k_nd_words(PARAM(struct om_gpu_nd) p) {
    OVER_GRID(i, p.count) {
        int64_t to;
        if (!nd_place(p, i, true, &to)) to = p.targets;
        st(p.words + i, (uint64_t)to << 32 | (uint64_t)i);
    }
}

/* block (place in the order of the targets, elements of a row): the first source of a target adds them all, or the
 * last one stays */
EXPORT(256) om_k_nd_put(PARAM(struct om_gpu_nd) p) {
    const int64_t own = blockIdx.x, to = (int64_t)(ld(p.words + own) >> 32), other = p.reduce ? own - 1 : own + 1;
    if (to >= p.targets) return; /* the whole block */
    if (other >= 0 && other < p.count && (int64_t)(ld(p.words + other) >> 32) == to) return;
    const int64_t c = (int64_t)blockIdx.y * blockDim.x + threadIdx.x, y = to * p.inner + c;
    if (c >= p.inner) return;
    if (!p.reduce) {
        move_one(p.x, (int64_t)(uint32_t)ld(p.words + own) * p.inner + c, p.y, y, p.size);
        return;
    }
    const bool real = is_float(p.dtype);
    double x = real ? float_at(p.y, p.dtype, y) : 0;
    uint64_t n = !real ? (uint64_t)integer_at(p.y, p.dtype, y) : 0;
    for (int64_t k = own; k < p.count; k++) {
        const uint64_t w = ld(p.words + k);
        if ((int64_t)(w >> 32) != to) break;
        const int64_t from = (int64_t)(uint32_t)w * p.inner + c;
        if (real) x += float_at(p.x, p.dtype, from);
        else n += (uint64_t)integer_at(p.x, p.dtype, from);
    }
    if (real) float_put(p.y, p.dtype, y, x);
    else integer_put(p.y, p.dtype, y, (int64_t)n);
}
