/* gemm.cu - c = a b (+ bias) for any strides: what is used where no library is, and what libraries are compared with.
 * 64 by 64 results a block, 4 by 4 a thread, 16 deep; sums in the type computed in, 64 products at a time along k, then
 * those. Groups of rows, each with a matrix of its own: a block's z is the group. */
#include "cuda/kernel.h"

/* The block's results of one product, whose operands begin at elements a0, b0, c0. */
template <class S>
FN void gemm_tile(const om_gpu_gemm &p, int64_t m, int64_t depth, int64_t a0, int64_t b0, int64_t c0) {
    typedef WIDE F;
    SHARED(shared);
    F *as = (F *)shared, *bs = as + 16 * 65;
    const int64_t m0 = (int64_t)blockIdx.x * 64, n0 = (int64_t)blockIdx.y * 64;
    const unsigned t = threadIdx.x, tx = t & 15, ty = t >> 4;
    F sum[4][4], part[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = part[i][j] = 0;
    for (int64_t k0 = 0; k0 < depth; k0 += 16) {
        __syncthreads();
        for (unsigned e = t; e < 1024; e += 256) { /* neighbours in memory by neighbouring threads */
            const unsigned i = p.ca == 1 ? e >> 4 : e & 63, k = p.ca == 1 ? e & 15 : e >> 6;
            const bool in_a = m0 + i < m && k0 + k < depth;
            as[k * 65 + i] = in_a ? at<S>(p.a, a0 + (m0 + i) * p.ra + (k0 + k) * p.ca) : (F)0;
            const unsigned j = p.cb == 1 ? e & 63 : e >> 4, l = p.cb == 1 ? e >> 6 : e & 15;
            const bool in_b = n0 + j < p.n && k0 + l < depth;
            bs[l * 65 + j] = in_b ? at<S>(p.b, b0 + (k0 + l) * p.rb + (n0 + j) * p.cb) : (F)0;
        }
        __syncthreads();
        for (unsigned k = 0; k < 16; k++) {
            F x[4], y[4];
            for (int i = 0; i < 4; i++) x[i] = as[k * 65 + ty * 4 + i], y[i] = bs[k * 65 + tx + 16 * i];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) part[i][j] += x[i] * y[j];
        }
        if ((k0 & 48) != 48 && k0 + 16 < depth) continue; /* the same for the whole block */
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i][j] += part[i][j], part[i][j] = 0;
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int64_t r = m0 + ty * 4 + i, c = n0 + tx + 16 * j;
            if (r < m && c < p.n)
                put<S>(p.c, c0 + r * p.rc + c * p.cc, sum[i][j] + (p.bias ? at<S>(p.bias, c * p.sbias) : (F)0));
        }
}

template <class S> FN void gemm(const om_gpu_gemm &p) {
    const int64_t batch = p.bdim[0] * p.bdim[1] * p.bdim[2] * p.bdim[3];
    for (int64_t z = blockIdx.z; z < batch; z += gridDim.z) {
        int64_t a0 = 0, b0 = 0, c0 = 0, rest = z;
        for (int d = 3; d >= 0; d--) {
            const int64_t i = rest % p.bdim[d];
            rest /= p.bdim[d];
            a0 += i * p.ba[d], b0 += i * p.bb[d], c0 += i * p.bc[d];
        }
        gemm_tile<S>(p, p.m, p.k, a0, b0, c0);
    }
}
FLOATS(gemm, struct om_gpu_gemm, 256, gemm)

/* Sixteen bytes from byte `by` of two neighbours on. */
struct alignas(16) words { uint64_t w[2]; };
FN words words_from(words a, words b, unsigned by) {
    const uint64_t x = by < 8 ? a.w[0] : a.w[1], y = by < 8 ? a.w[1] : b.w[0], z = by < 8 ? b.w[0] : b.w[1];
    const unsigned bits = by % 8 * 8;
    if (!bits) return {{x, y}};
    return {{x >> bits | y << (64 - bits), y >> bits | z << (64 - bits)}};
}

/* Rows whose beginnings have nothing in common with those they come from: sixteen bytes of y a thread, from the two
 * that hold them in x; what lies at the ends of a row element by element. */
template <class T> FN void rows_move(const om_gpu_rows &p) {
    enum { EACH = 16 / sizeof(T) };
    const int64_t chunk = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t r = blockIdx.y; r < p.rows; r += gridDim.y) {
        T *y = (T *)p.y + r * p.yrow;
        const T *x = (const T *)p.x + r * p.xrow, *end = x + p.n;
        const int64_t before = (int64_t)(-(uintptr_t)y % 16 / sizeof(T)), head = before < p.n ? before : p.n;
        const int64_t i = head + chunk * EACH;
        for (int64_t k = 0; !chunk && k < head; k++) st(y + k, r < p.given ? ld(x + k) : (T)0);
        if (i >= p.n) continue;
        const words *at = (const words *)((uintptr_t)(x + i) & ~(uintptr_t)15);
        const unsigned by = (unsigned)((uintptr_t)(x + i) % 16);
        if (r < p.given && (const T *)at >= x && (const T *)(at + (by ? 2 : 1)) <= end) {
            const words a = ld(at);
            st((words *)(y + i), words_from(a, by ? ld(at + 1) : a, by));
            continue;
        }
        several<T, EACH> v;
        for (int k = 0; k < EACH; k++) v.x[k] = r < p.given && i + k < p.n ? ld(x + i + k) : (T)0;
        if (i + EACH <= p.n || p.fill) st_several<true, EACH>(y + i, v);
        else
            for (int k = 0; k < EACH; k++)
                if (i + k < p.n) st(y + i + k, v.x[k]);
    }
}
EXPORT(256) om_k_rows(PARAM(struct om_gpu_rows) p) {
    if (p.size == 2) rows_move<uint16_t>(p);
    else rows_move<uint32_t>(p);
}

/* Ends that go back or beyond the rows are faults and count as the nearest that fit. */
template <class S> FN void grouped(const om_gpu_grouped &p) {
    const int64_t e = blockIdx.z;
    int64_t from = 0, to = 0;
    for (int64_t i = 0; i <= e; i++) {
        from = to;
        to = ld(p.ends + i * p.ends_step);
        if (to >= from && to <= p.rows) continue;
        if (i == e && !blockIdx.x && !blockIdx.y && !threadIdx.x)
            fault_note(p.fault, (uint32_t)p.site, 1, to, e, p.rows + 1);
        to = to < from ? from : p.rows;
    }
    if (p.outer) gemm_tile<S>(p.g, p.g.m, to - from, from * p.per_a, from * p.per_b, e * p.per_c);
    else if ((int64_t)blockIdx.x * 64 < to - from)
        gemm_tile<S>(p.g, to - from, p.g.k, from * p.per_a, e * p.per_b, from * p.per_c);
}
FLOATS(grouped, struct om_gpu_grouped, 256, grouped)
