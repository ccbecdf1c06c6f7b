/* norm.cu - layer norm and RMS norm over dense rows, and their gradients. dw and db: partial sums over parts of the
 * rows, whose number depends on the sizes alone, then over the parts in order; they read what dx may overwrite, so they
 * are launched first. */
#include "cuda/kernel.h"

template <class S> FN void norm_row(const om_gpu_norm &p) {
    typedef WIDE F;
    SHARED(shared);
    F *sh = (F *)shared;
    const int64_t base = blockIdx.x * p.n;
    F mean = 0, v = 0;
    if (!p.rms) {
        for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) mean += at<S>(p.x, base + i);
        mean = block_all<op_sum>(mean, (F)0, sh) / (F)p.n;
    }
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
        const F x = at<S>(p.x, base + i) - mean;
        v += x * x;
    }
    v = block_all<op_sum>(v, (F)0, sh) / (F)p.n;
    const F rstd = 1 / sqrt_of(v + (F)p.eps);
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
        F y = (at<S>(p.x, base + i) - mean) * rstd;
        if (p.w) y *= (F)float_at(p.w, p.wtype, i);
        if (p.b) y += (F)float_at(p.b, p.btype, i);
        put<S>(p.y, base + i, y);
    }
    if (threadIdx.x) return;
    if (!p.rms) st((F *)p.mean + blockIdx.x, mean);
    st((F *)p.rstd + blockIdx.x, rstd);
}

template <class S> FN void norm_grad_row(const om_gpu_norm &p) {
    typedef WIDE F;
    SHARED(shared);
    F *sh = (F *)shared;
    const int64_t base = blockIdx.x * p.n;
    const F mean = p.rms ? 0 : ld((const F *)p.mean + blockIdx.x), rstd = ld((const F *)p.rstd + blockIdx.x);
    F a = 0, c = 0;
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
        const F g = at<S>(p.dy, base + i) * (p.w ? (F)float_at(p.w, p.wtype, i) : 1);
        a += g;
        c += g * ((at<S>(p.x, base + i) - mean) * rstd);
    }
    a = p.rms ? 0 : block_all<op_sum>(a, (F)0, sh) / (F)p.n;
    c = block_all<op_sum>(c, (F)0, sh) / (F)p.n;
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
        const F g = at<S>(p.dy, base + i) * (p.w ? (F)float_at(p.w, p.wtype, i) : 1);
        put<S>(p.y, base + i, rstd * (g - a - (at<S>(p.x, base + i) - mean) * rstd * c));
    }
}

/* 32 columns a block, eight rows at a time */
template <class S> FN void norm_params(const om_gpu_norm &p) {
    typedef WIDE F;
    SHARED(shared);
    F *sh = (F *)shared;
    const unsigned lane = threadIdx.x & 31, row = threadIdx.x >> 5;
    const int64_t i = (int64_t)blockIdx.x * 32 + lane, each = (p.rows + p.parts - 1) / p.parts;
    const int64_t from = each * blockIdx.y, to = from + each < p.rows ? from + each : p.rows;
    F dw = 0, db = 0;
    if (i < p.n)
        for (int64_t r = from + row; r < to; r += 8) {
            const F dy = at<S>(p.dy, r * p.n + i), mean = p.rms ? 0 : ld((const F *)p.mean + r);
            dw += dy * ((at<S>(p.x, r * p.n + i) - mean) * ld((const F *)p.rstd + r));
            db += dy;
        }
    sh[threadIdx.x] = dw, sh[256 + threadIdx.x] = db;
    __syncthreads();
    if (row || i >= p.n) return;
    for (unsigned k = 1; k < 8; k++) dw += sh[k * 32 + lane], db += sh[256 + k * 32 + lane];
    st((F *)p.partial + (2 * blockIdx.y) * p.n + i, dw);
    st((F *)p.partial + (2 * blockIdx.y + 1) * p.n + i, db);
}

template <class S> FN void norm_finish(const om_gpu_norm &p) {
    typedef WIDE F;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    double dw = 0, db = 0;
    for (int64_t k = 0; k < p.parts; k++) {
        dw += ld((const F *)p.partial + 2 * k * p.n + i);
        db += ld((const F *)p.partial + (2 * k + 1) * p.n + i);
    }
    float_put(p.dw, p.wtype, i, dw);
    if (p.db) float_put(p.db, p.btype, i, db);
}

FLOATS(norm, struct om_gpu_norm, 1024, norm_row)
FLOATS(norm_grad, struct om_gpu_norm, 1024, norm_grad_row)
FLOATS(norm_params, struct om_gpu_norm, 256, norm_params)
FLOATS(norm_finish, struct om_gpu_norm, 256, norm_finish)
