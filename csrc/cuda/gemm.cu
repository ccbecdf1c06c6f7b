/* gemm.cu - c = a b (+ bias) for any strides: what is used where no library is, and what libraries are compared with.
 * 64 by 64 results a block, 4 by 4 a thread, 16 deep; sums in
 * the type computed in, 64 products at a time along k, then those. */
#include "cuda/kernel.h"

template <class S> FN void gemm(const om_gpu_gemm &p) {
    typedef WIDE F;
    SHARED(shared);
    F *as = (F *)shared, *bs = as + 16 * 65;
    const int64_t m0 = (int64_t)blockIdx.x * 64, n0 = (int64_t)blockIdx.y * 64;
    const unsigned t = threadIdx.x, tx = t & 15, ty = t >> 4;
    const int64_t batch = p.bdim[0] * p.bdim[1] * p.bdim[2] * p.bdim[3];
    for (int64_t z = blockIdx.z; z < batch; z += gridDim.z) {
        int64_t a0 = 0, b0 = 0, c0 = 0, rest = z;
        for (int d = 3; d >= 0; d--) {
            const int64_t i = rest % p.bdim[d];
            rest /= p.bdim[d];
            a0 += i * p.ba[d], b0 += i * p.bb[d], c0 += i * p.bc[d];
        }
        F sum[4][4], part[4][4];
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i][j] = part[i][j] = 0;
        for (int64_t k0 = 0; k0 < p.k; k0 += 16) {
            __syncthreads();
            for (unsigned e = t; e < 1024; e += 256) { /* neighbours in memory by neighbouring threads */
                const unsigned i = p.ca == 1 ? e >> 4 : e & 63, k = p.ca == 1 ? e & 15 : e >> 6;
                const bool in_a = m0 + i < p.m && k0 + k < p.k;
                as[k * 65 + i] = in_a ? at<S>(p.a, a0 + (m0 + i) * p.ra + (k0 + k) * p.ca) : (F)0;
                const unsigned j = p.cb == 1 ? e & 63 : e >> 4, l = p.cb == 1 ? e >> 6 : e & 15;
                const bool in_b = n0 + j < p.n && k0 + l < p.k;
                bs[l * 65 + j] = in_b ? at<S>(p.b, b0 + (k0 + l) * p.rb + (n0 + j) * p.cb) : (F)0;
            }
            __syncthreads();
            for (unsigned k = 0; k < 16; k++) {
                F x[4], y[4];
                for (int i = 0; i < 4; i++) x[i] = as[k * 65 + ty * 4 + i], y[i] = bs[k * 65 + tx + 16 * i];
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++) part[i][j] += x[i] * y[j];
            }
            if ((k0 & 48) != 48 && k0 + 16 < p.k) continue; /* the same for the whole block */
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sum[i][j] += part[i][j], part[i][j] = 0;
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                const int64_t r = m0 + ty * 4 + i, c = n0 + tx + 16 * j;
                if (r < p.m && c < p.n)
                    put<S>(p.c, c0 + r * p.rc + c * p.cc, sum[i][j] + (p.bias ? at<S>(p.bias, c * p.sbias) : (F)0));
            }
    }
}
FLOATS(gemm, struct om_gpu_gemm, 256, gemm)
