/* batch_norm.cu - batch normalisation and its gradient, a block per channel: two sweeps for the statistics (mean, then
 * squared distances, so a large mean costs no accuracy), one for the result. Sixteen numbers at a time are added in the
 * type computed in, those sums in double, in a fixed order. */
#include "cuda/kernel.h"

typedef struct om_gpu_batch_norm batch_norm;

FN double channel_at(const om_gpu_channel &v, int64_t c, double otherwise) {
    return v.data ? float_at(v.data, v.dtype, c * v.step) : otherwise;
}
FN void channel_put(const om_gpu_channel &v, int64_t c, double x) {
    if (v.data) float_put(v.data, v.dtype, c * v.step, x);
}
FN double rounded(float, double x) { return (double)(float)x; }
FN double rounded(double, double x) { return x; }

/* sums[0] += of x - m (gradient: dy), sums[1] += of its square (gradient: dy (x - m)) */
template <class S> FN void channel_sums(const batch_norm &p, WIDE m, bool grad, double *sums) {
    typedef WIDE F;
    const int64_t count = p.n * p.inner;
    sums[0] = sums[1] = 0;
    for (int64_t i = threadIdx.x; i < count;) {
        F a = 0, b = 0;
        for (int k = 0; k < 16 && i < count; k++, i += blockDim.x) {
            const int64_t at_x = (i / p.inner * p.c + blockIdx.x) * p.inner + i % p.inner;
            const F x = at<S>(p.x, at_x) - m, y = grad ? at<S>(p.dy, at_x) : x;
            a += y, b += x * y;
        }
        sums[0] += a, sums[1] += b;
    }
    SHARED(shared);
    sums[0] = block_all<op_sum>(sums[0], 0.0, (double *)shared);
    sums[1] = block_all<op_sum>(sums[1], 0.0, (double *)shared);
}

template <class S> FN void batch_norm_forward(const batch_norm &p) {
    typedef WIDE F;
    const int64_t c = blockIdx.x, count = p.n * p.inner;
    const double n = count > 0 ? (double)count : 1; /* of nothing: mean and variance 0 */
    double mean = channel_at(p.in_mean, c, 0), var = channel_at(p.in_var, c, 1), sums[2];
    if (p.batch) {
        channel_sums<S>(p, 0, false, sums);
        mean = rounded((F)0, sums[0] / n);
        channel_sums<S>(p, (F)mean, false, sums);
        const double rest = sums[0] / n; /* the first mean was rounded: what is left over corrects both */
        var = sums[1] / n - rest * rest;
        mean += rest;
        var = var < 0 ? 0 : var;
    }
    const double rstd = 1 / sqrt(var + p.eps), m = rounded((F)0, mean), a = channel_at(p.w, c, 1) * rstd;
    const F fa = (F)a, fb = (F)(channel_at(p.b, c, 0) - (mean - m) * a), fm = (F)m;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const int64_t at_x = (i / p.inner * p.c + c) * p.inner + i % p.inner;
        put<S>(p.y, at_x, (at<S>(p.x, at_x) - fm) * fa + fb);
    }
    if (threadIdx.x) return;
    channel_put(p.mean, c, mean);
    channel_put(p.rstd, c, rstd);
    if (p.batch) {
        const double unbiased = var * ((double)count / (double)(count - 1)), k = p.momentum;
        const double old_mean = channel_at(p.in_mean, c, 0), old_var = channel_at(p.in_var, c, 0);
        /* of nothing, nothing is learned */
        mean = !p.running ? mean : count ? (1 - k) * old_mean + k * mean : old_mean;
        var = !p.running ? unbiased : count ? (1 - k) * old_var + k * unbiased : old_var;
    }
    channel_put(p.new_mean, c, mean);
    channel_put(p.new_var, c, var);
}

template <class S> FN void batch_norm_grad(const batch_norm &p) {
    typedef WIDE F;
    const int64_t c = blockIdx.x, count = p.n * p.inner;
    const double mean = channel_at(p.in_mean, c, 0), rstd = channel_at(p.in_var, c, 1);
    const F m = (F)mean;
    double sums[2];
    channel_sums<S>(p, m, true, sums);
    const F a = (F)(channel_at(p.w, c, 1) * rstd), b = (F)(p.batch ? sums[0] / (double)count : 0),
            k = (F)(p.batch ? sums[1] * rstd * rstd / (double)count : 0);
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const int64_t at_x = (i / p.inner * p.c + c) * p.inner + i % p.inner;
        put<S>(p.y, at_x, a * (at<S>(p.dy, at_x) - b - (at<S>(p.x, at_x) - m) * k));
    }
    if (threadIdx.x) return;
    channel_put(p.mean, c, sums[1] * rstd); /* dw */
    channel_put(p.rstd, c, sums[0]);        /* db */
}

FLOATS(batch_norm, struct om_gpu_batch_norm, 256, batch_norm_forward)
FLOATS(batch_norm_grad, struct om_gpu_batch_norm, 256, batch_norm_grad)
