/* loss.cu - cross-entropy and its gradient (ops/loss.c): a block per row of logits, then one that adds the rows. The
 * gradient may be written over the logits. */
#include "cuda/kernel.h"

FN float exp_low(float x) { return vm_exp_neg(x); }
FN double exp_low(double x) { return exp(x); }

FN double weight_at(const om_gpu_loss &p, int64_t c) {
    return p.weight ? float_at(p.weight, p.wtype, c * p.weight_step) : 1;
}

/* The row's label; one that cannot be used is noted and counts as ignored. */
FN int64_t label_of(const om_gpu_loss &p, int64_t r) {
    const int64_t y = index_at(p.labels, p.wide, r * p.label_step);
    if (y == p.ignore || (uint64_t)y < (uint64_t)p.n) return y;
    if (!threadIdx.x) fault_note(p.fault, (uint32_t)p.site, 2, y, r, p.n);
    return p.ignore;
}

template <class S> FN void loss_row(const om_gpu_loss &p) {
    typedef WIDE F;
    SHARED(shared);
    F *sh = (F *)shared;
    const int64_t r = blockIdx.x, y = label_of(p, r);
    const bool none = y == p.ignore;
    F m = -inf_of((F)0), s = 0;
    for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) m = op_max::of(m, at<S>(p.x, r * p.xrow + c * p.xcol));
    m = block_all<op_max>(m, -inf_of((F)0), sh);
    const F from = m == -inf_of((F)0) ? 0 : m;
    for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) s += exp_low(at<S>(p.x, r * p.xrow + c * p.xcol) - from);
    const double lse = (double)m + log(block_all<op_sum>((double)s, 0.0, (double *)shared));
    double smooth = 0;
    if (p.smoothing > 0) {
        for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x)
            smooth += weight_at(p, c) * (lse - (double)at<S>(p.x, r * p.xrow + c * p.xcol));
        smooth = block_all<op_sum>(smooth, 0.0, (double *)shared);
    }
    if (threadIdx.x) return;
    const double w = none ? 0 : weight_at(p, y);
    double loss = none ? 0 : w * (lse - (double)at<S>(p.x, r * p.xrow + y * p.xcol));
    if (p.smoothing > 0 && !none) loss = (1 - p.smoothing) * loss + p.smoothing / (double)p.n * smooth;
    st(p.lse + r, none ? 0 : lse);
    st(p.row + r, loss);
    st(p.row + p.rows + r, w);
}

template <class S> FN void loss_finish(const om_gpu_loss &p) {
    typedef WIDE F;
    SHARED(shared);
    double sum = 0, denom = 0;
    for (int64_t r = threadIdx.x; r < p.rows; r += blockDim.x) {
        const double loss = ld(p.row + r);
        if (!p.reduction) put<S>(p.loss, r, (F)loss);
        sum += loss;
        denom += ld(p.row + p.rows + r);
    }
    sum = block_all<op_sum>(sum, 0.0, (double *)shared);
    denom = block_all<op_sum>(denom, 0.0, (double *)shared);
    if (threadIdx.x) return;
    if (p.reduction) put<S>(p.loss, 0, (F)(p.reduction == 1 ? sum / denom : sum));
    st(p.denom, denom);
}

template <class S> FN void loss_grad_row(const om_gpu_loss &p) {
    typedef WIDE F;
    SHARED(shared);
    const int64_t r = blockIdx.x, y = label_of(p, r);
    if (y == p.ignore) { /* the same for the whole block */
        for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) put<S>(p.dx, r * p.n + c, 0);
        return;
    }
    const double each = p.smoothing / (double)p.n, hit = (1 - p.smoothing) * weight_at(p, y);
    double sum = (double)p.n;
    if (p.weight && each > 0) {
        sum = 0;
        for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) sum += weight_at(p, c);
        sum = block_all<op_sum>(sum, 0.0, (double *)shared);
    }
    const double g = float_at(p.dloss, p.gtype, p.reduction ? 0 : r * p.loss_step) * (p.reduction == 1 ? 1 / ld(p.denom) : 1);
    const double lse = ld(p.lse + r), all = hit + each * sum;
    const F hi = (F)lse, lo = (F)(lse - (double)hi), k = (F)(g * all);
    for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) {
        const F x = at<S>(p.x, r * p.xrow + c * p.xcol);
        F d = k * exp_of((x - hi) - lo);
        if (c == y) d = (F)(g * (all * exp((double)x - lse) - (each * weight_at(p, c) + hit)));
        else if (each > 0) d -= (F)(g * each * weight_at(p, c));
        put<S>(p.dx, r * p.n + c, d);
    }
}

FLOATS(loss, struct om_gpu_loss, 1024, loss_row)
FLOATS(loss_finish, struct om_gpu_loss, 1024, loss_finish)
FLOATS(loss_grad, struct om_gpu_loss, 1024, loss_grad_row)
