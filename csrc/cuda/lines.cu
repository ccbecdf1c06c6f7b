/* lines.cu - what is worked off along an axis: running sums, products and logarithms of sums, the place of the largest,
 * the k largest in order. */
#include "cuda/kernel.h"

typedef struct om_gpu_lines lines;

FN int64_t line_at(const lines &p, int64_t line, int operand) {
    return offset_of(line, p.rank, p.dim, p.stride[operand]);
}

FN void number_at(const char *p, int dtype, int64_t i, double *x) { *x = float_at(p, dtype, i); }
FN void number_at(const char *p, int dtype, int64_t i, uint64_t *x) { *x = (uint64_t)integer_at(p, dtype, i); }
FN void number_put(char *p, int dtype, int64_t i, double x) { float_put(p, dtype, i, x); }
FN void number_put(char *p, int dtype, int64_t i, uint64_t x) { integer_put(p, dtype, i, (int64_t)x); }

/* A block per line: blockDim elements at a time, the sum of those before carried on. */
template <class A> FN void running_sum(const lines &p) {
    SHARED(shared);
    A *sum = (A *)shared;
    const int64_t line = blockIdx.x, x = line_at(p, line, 0), y = line_at(p, line, 3);
    A before = 0;
    for (int64_t first = 0; first < p.len; first += blockDim.x) {
        const int64_t i = first + threadIdx.x, at = p.reverse ? p.len - 1 - i : i;
        A all = 0;
        if (i < p.len) number_at(p.x[0], p.dtype, x + at * p.step[0], &all);
        for (unsigned d = 1; d < blockDim.x; d *= 2) {
            __syncthreads();
            sum[threadIdx.x] = all;
            __syncthreads();
            if (threadIdx.x >= d) all = sum[threadIdx.x - d] + all;
        }
        __syncthreads();
        sum[threadIdx.x] = all;
        __syncthreads();
        if (i < p.len) {
            const A up_to = threadIdx.x ? before + sum[threadIdx.x - 1] : before;
            number_put(p.y[0], p.dtype, y + at * p.step[3], p.exclusive ? up_to : before + all);
        }
        before += sum[blockDim.x - 1];
    }
}
EXPORT(256) om_k_cumsum(PARAM(struct om_gpu_lines) p) {
    if (is_float(p.dtype)) running_sum<double>(p);
    else running_sum<uint64_t>(p);
}

/* A thread per line, in double (integers: 64 bits, wrapping), rounded last. */
FN void line_products(const lines &p, int64_t x, int64_t y) {
    if (!is_float(p.dtype)) {
        uint64_t u = 1;
        for (int64_t i = 0; i < p.len; i++) {
            u *= (uint64_t)integer_at(p.x[0], p.dtype, x + i * p.step[0]);
            integer_put(p.y[0], p.dtype, y + i * p.step[3], (int64_t)u);
        }
        return;
    }
    double u = 1;
    for (int64_t i = 0; i < p.len; i++) {
        u *= float_at(p.x[0], p.dtype, x + i * p.step[0]);
        float_put(p.y[0], p.dtype, y + i * p.step[3], u);
    }
}

FN void line_products_grad(const lines &p, int64_t dy, int64_t x, int64_t dx, double *g) {
    double u = 0;
    for (int64_t i = p.len - 1; i >= 0; i--) {
        const double gi = float_at(p.x[0], p.dtype, dy + i * p.step[0]) + u;
        st(g + i, gi);
        u = float_at(p.x[1], p.dtype, x + i * p.step[1]) * gi;
    }
    u = 1;
    for (int64_t i = 0; i < p.len; i++) {
        float_put(p.y[0], p.dtype, dx + i * p.step[3], u * ld(g + i));
        u *= float_at(p.x[1], p.dtype, x + i * p.step[1]);
    }
}

FN void line_logs(const lines &p, int64_t x, int64_t y) {
    const double most = (double)INFINITY;
    double m = -most, sum = 0; /* the largest so far, the sum of e^(x - m) */
    for (int64_t i = 0; i < p.len; i++) {
        const double v = float_at(p.x[0], p.dtype, x + i * p.step[0]);
        if (v > m) sum = sum * exp(m - v) + 1, m = v;
        else if (v == m && (v == most || v == -most)) sum = sum != sum ? sum : v > 0 ? 1 : 0; /* NaN stays */
        else sum += exp(v - m);
        float_put(p.y[0], p.dtype, y + i * p.step[3], sum != sum ? sum : m + log(sum == 0 ? 1 : sum));
    }
}

FN void line_logs_grad(const lines &p, int64_t dy, int64_t x, int64_t y, int64_t dx) {
    double g = 0, after = 0;
    for (int64_t i = p.len - 1; i >= 0; i--) {
        const double s = float_at(p.x[2], p.dtype, y + i * p.step[2]);
        g = float_at(p.x[0], p.dtype, dy + i * p.step[0]) + (i + 1 < p.len ? exp(s - after) * g : 0);
        after = s;
        float_put(p.y[0], p.dtype, dx + i * p.step[3], g * exp(float_at(p.x[1], p.dtype, x + i * p.step[1]) - s));
    }
}

EXPORT(128) om_k_products(PARAM(struct om_gpu_lines) p) {
    OVER_GRID(i, p.lines) {
        const int64_t a = line_at(p, i, 0), y = line_at(p, i, 3);
        if (p.what == OM_GPU_CUMPROD) line_products(p, a, y);
        else if (p.what == OM_GPU_LOGS) line_logs(p, a, y);
        else if (p.what == OM_GPU_LOGS_GRAD) line_logs_grad(p, a, line_at(p, i, 1), line_at(p, i, 2), y);
        else line_products_grad(p, a, line_at(p, i, 1), y, p.space + i * p.len);
    }
}

/* A number whose order is that of the elements: -0 is 0, NaN the largest; `turn`: the other way round. */
FN uint64_t order_of(const char *p, int dtype, int64_t i, uint64_t turn) {
    const uint64_t top = (uint64_t)1 << 63;
    if (!is_float(dtype)) return ((uint64_t)integer_at(p, dtype, i) ^ top) ^ turn;
    const double x = float_at(p, dtype, i);
    const uint64_t bits = (uint64_t)vm_int64(x == 0 ? 0 : x);
    return (x != x ? ~(uint64_t)0 : bits & top ? ~bits : bits | top) ^ turn;
}

/* A block per line: the largest, of equal ones the first. p.largest: which way; of the smallest NaN wins, too. */
EXPORT(256) om_k_arg(PARAM(struct om_gpu_lines) p) {
    SHARED(keys);
    uint64_t *key = (uint64_t *)keys;
    int64_t *place = (int64_t *)(key + blockDim.x);
    const int64_t x = line_at(p, blockIdx.x, 0);
    uint64_t best = 0;
    int64_t where = p.len;
    for (int64_t i = threadIdx.x; i < p.len; i += blockDim.x) {
        uint64_t k = order_of(p.x[0], p.dtype, x + i * p.step[0], 0);
        if (!p.largest && !(is_float(p.dtype) && k == ~(uint64_t)0)) k = ~k;
        if (where == p.len || k > best) best = k, where = i;
    }
    key[threadIdx.x] = best, place[threadIdx.x] = where;
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        const unsigned o = threadIdx.x + half;
        if (place[o] == p.len) continue;
        if (place[threadIdx.x] == p.len || key[o] > key[threadIdx.x] ||
            (key[o] == key[threadIdx.x] && place[o] < place[threadIdx.x]))
            key[threadIdx.x] = key[o], place[threadIdx.x] = place[o];
    }
    if (!threadIdx.x) st((int64_t *)p.y[0] + line_at(p, blockIdx.x, 3), place[0]);
}

/* A block per line: the k-th key one bit after the other, then the keys before it and the first of those equal to it,
 * in the order of the line. */
EXPORT(256) om_k_topk_pick(PARAM(struct om_gpu_lines) p) {
    SHARED(shared);
    const uint64_t turn = p.largest ? ~(uint64_t)0 : 0;
    const int64_t x = line_at(p, blockIdx.x, 0);
    uint64_t *key = (uint64_t *)p.space + blockIdx.x * 2 * p.k, kth = 0;
    int64_t *place = (int64_t *)key + p.k, left = p.k, before = 0, equal = 0;
    for (int bit = 63; bit >= 0; bit--) { /* `left`: its number among the keys with the same upper bits */
        int64_t n = 0;
        for (int64_t i = threadIdx.x; i < p.len; i += blockDim.x)
            n += (order_of(p.x[0], p.dtype, x + i * p.step[0], turn) ^ kth) >> bit == 0;
        n = block_all<op_sum>(n, (int64_t)0, (int64_t *)shared);
        if (n < left) left -= n, kth |= (uint64_t)1 << bit;
    }
    for (int64_t first = 0; first < p.len; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        const uint64_t own = i < p.len ? order_of(p.x[0], p.dtype, x + i * p.step[0], turn) : ~(uint64_t)0;
        const int64_t equals = block_place(i < p.len && own == kth, &equal, (uint32_t *)shared);
        const bool taken = i < p.len && (own < kth || (own == kth && equals < left));
        const int64_t at = block_place(taken, &before, (uint32_t *)shared);
        if (!taken) continue;
        st(key + at, own);
        st(place + at, i);
    }
}

/* Block (line, blockDim candidates): how many of them come before one is its place. */
EXPORT(256) om_k_topk(PARAM(struct om_gpu_lines) p) {
    SHARED(keys);
    uint64_t *key = (uint64_t *)keys;
    const uint64_t turn = p.largest ? ~(uint64_t)0 : 0, *picked = (const uint64_t *)p.space + blockIdx.x * 2 * p.k;
    const int64_t n = p.space ? p.k : p.len, x = line_at(p, blockIdx.x, 0);
    const int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    const int size = is_float(p.dtype) ? p.dtype == OM_F64 ? 8 : p.dtype == OM_F32 ? 4 : 2
                                       : p.dtype == OM_I64 ? 8 : p.dtype == OM_I32 ? 4 : p.dtype == OM_I16 ? 2 : 1;
    uint64_t own = 0;
    if (i < n) own = p.space ? ld(picked + i) : order_of(p.x[0], p.dtype, x + i * p.step[0], turn);
    int64_t rank = 0;
    for (int64_t first = 0; first < n; first += blockDim.x) {
        const int64_t j = first + threadIdx.x, many = n - first < blockDim.x ? n - first : blockDim.x;
        __syncthreads();
        if (j < n) key[threadIdx.x] = p.space ? ld(picked + j) : order_of(p.x[0], p.dtype, x + j * p.step[0], turn);
        __syncthreads();
        for (int64_t k = 0; k < many; k++) rank += key[k] < own || (key[k] == own && first + k < i);
    }
    if (i >= n || rank >= p.k) return;
    const int64_t from = p.space ? ld((const int64_t *)picked + p.k + i) : i;
    move_one(p.x[0], x + from * p.step[0], p.y[0], line_at(p, blockIdx.x, 3) + rank * p.step[3], size);
    st((int64_t *)p.y[1] + line_at(p, blockIdx.x, 4) + rank * p.step[4], from);
}
