/* rows.cu - softmax, log-softmax and their gradients: a block per row, which may be written where it was read. */
#include "cuda/kernel.h"

FN float exp_neg(float x) { return vm_exp_neg(x); } /* e^x, x <= 0 or NaN */
FN double exp_neg(double x) { return exp(x); }

template <class S> FN void softmax_row(const om_gpu_softmax &p) {
    typedef WIDE F;
    SHARED(shared);
    F *sh = (F *)shared;
    const int64_t r = blockIdx.x, base = r / p.step * p.n * p.step + r % p.step;
    if (p.grad) {
        F d = 0;
        for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
            const F dy = at<S>(p.x, base + i * p.step);
            d += p.log ? dy : dy * at<S>(p.y, base + i * p.step);
        }
        d = block_all<op_sum>(d, (F)0, sh);
        for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
            const F dy = at<S>(p.x, base + i * p.step), y = at<S>(p.y, base + i * p.step);
            put<S>(p.out, base + i * p.step, p.log ? dy - exp_of(y) * d : (dy - d) * y);
        }
        return;
    }
    F m = -inf_of((F)0), s = 0;
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) m = op_max::of(m, at<S>(p.x, base + i * p.step));
    m = block_all<op_max>(m, -inf_of((F)0), sh);
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) s += exp_neg(at<S>(p.x, base + i * p.step) - m);
    s = block_all<op_sum>(s, (F)0, sh);
    const F by = 1 / s, l = log_of(s);
    for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
        const F x = at<S>(p.x, base + i * p.step) - m;
        put<S>(p.out, base + i * p.step, p.log ? x - l : exp_neg(x) * by);
    }
}
FLOATS(softmax, struct om_gpu_softmax, 1024, softmax_row)
