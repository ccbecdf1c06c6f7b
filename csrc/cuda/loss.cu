/* loss.cu - cross-entropy and its gradient (ops/loss.c): a block per row of logits, then one that adds the rows. The
 * gradient may be written over the logits.
 *
 * A row is read once: a thread adds up powers over a level near the largest logit it has seen, and moves the level when
 * one is far above it. Pieces of a row (row.h) begin at multiples of 16 bytes if the tensor does: where the first one
 * begins depends on sizes alone, the elements before it and behind the last whole one are read one by one.
 */
#include "cuda/row.h"

#define LOSS_BOUNDS 768, 1 /* blocks have 512 threads at most: so few registers */
enum { LOSS_AT_ONCE = 4, LOSS_FAR = 4 }; /* pieces; how far a logit may be above the level */

/* e^x, x at most little above 0: for 16-bit floats by the hardware's 2^x, whose error is far below theirs. */
FN float loss_power(float x, float) { return vm_exp_neg(x); }
FN double loss_power(double x, double) { return exp(x); }
FN float loss_power(float x, bf16) { return exp2_of(x * 1.44269504f); }
FN float loss_power(float x, f16) { return exp2_of(x * 1.44269504f); }

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

/* s: the sum of powers over level m; -inf: of none yet. */
template <class S, int N> FN void loss_add(const WIDE (&x)[N][ROW_V], WIDE *m, double *s) {
    typedef WIDE F;
    F top = -inf_of((F)0), part[N];
#pragma unroll
    for (int k = 0; k < N; k++) ROW_EACH_E top = fmax(top, x[k][e]); /* NaN is left out */
    if (top > *m + LOSS_FAR) {
        if (*m > -inf_of((F)0)) *s *= exp((double)*m - (double)top);
        *m = top;
    }
    const F level = *m > -inf_of((F)0) ? *m : 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        F y[ROW_V];
        ROW_EACH_E y[e] = loss_power(x[k][e] - level, S());
        part[k] = row_fold<op_sum, ROW_V>(y);
    }
    *s += row_fold<op_sum, N>(part);
}

/* The thread's pieces of a row, the first of which begins at i; whole: all inside of it are in line. */
template <class S> FN void loss_read(const om_gpu_loss &p, const S *row, int64_t i, bool whole, WIDE *m, double *s) {
    enum { V = ROW_V, N = LOSS_AT_ONCE };
    const int64_t step = (int64_t)blockDim.x * V;
    while (i < p.n) {
        WIDE x[N][V], x1[1][V];
        if (i >= 0 && i + (N - 1) * step + V <= p.n) {
            row_get_all(x, row + i * p.xcol, step, p.xcol, whole);
            loss_add<S>(x, m, s);
            i += N * step;
        } else {
            row_get(x1[0], row, p.xcol, i, p.n, whole, -inf_of((WIDE)0));
            loss_add<S>(x1, m, s);
            i += step;
        }
    }
}

template <class S> FN void loss_row(const om_gpu_loss &p) {
    typedef WIDE F;
    SHARED(shared);
    const int64_t r = blockIdx.x, y = label_of(p, r), skip = (r * p.xrow) & (ROW_V - 1);
    const S *row = (const S *)p.x + r * p.xrow;
    const bool none = y == p.ignore;
    F m = -inf_of((F)0);
    double s = 0;
    loss_read(p, row, (int64_t)threadIdx.x * ROW_V - skip, p.xcol == 1 && row_in_line(row - skip), &m, &s);
    const F top = block_all<op_max>(m, -inf_of((F)0), (F *)shared);
    if (top > -inf_of((F)0)) s *= exp((double)m - (double)top);
    const double lse = (double)top + log(block_all<op_sum>(s, 0.0, (double *)shared));
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

template <class F> struct loss_slope { /* of logits: k e^(x - level) - less */
    F level, k, less, at_label;
    bool own; /* the thread has the label's logit: at_label */
};
template <class S> FN void loss_grad_of(int64_t i, int64_t y, WIDE *x, loss_slope<WIDE> *f) {
    if ((uint64_t)(y - i) < (uint64_t)ROW_V) {
        f->own = true;
        ROW_EACH_E if (i + e == y) f->at_label = x[e];
    }
    ROW_EACH_E x[e] = f->k * loss_power(x[e] - f->level, S()) - f->less;
}
/* The thread's pieces of a row, the first of which begins at i; whole: all inside of it are in line, here and there. */
template <class S>
FN void loss_grad_read(const om_gpu_loss &p, const S *row, S *to, int64_t i, int64_t y, bool whole,
                       loss_slope<WIDE> *f) {
    enum { V = ROW_V, N = LOSS_AT_ONCE };
    const int64_t step = (int64_t)blockDim.x * V;
    while (i < p.n) {
        WIDE x[N][V], x1[V];
        if (i >= 0 && i + (N - 1) * step + V <= p.n) {
            row_get_all(x, row + i * p.xcol, step, p.xcol, whole);
#pragma unroll
            for (int j = 0; j < N; j++) loss_grad_of<S>(i + j * step, y, x[j], f);
            if (!whole) ROW_IN_TURN(x, j, N) row_put(to, 1, i + j * step, p.n, false, x[0]);
            else
#pragma unroll
                for (int j = 0; j < N; j++) row_out(to + i + j * step, x[j]);
            i += N * step;
        } else {
            row_get(x1, row, p.xcol, i, p.n, whole, (WIDE)0);
            loss_grad_of<S>(i, y, x1, f);
            row_put(to, 1, i, p.n, whole, x1);
            i += step;
        }
    }
}

template <class S> FN void loss_grad_row(const om_gpu_loss &p) {
    typedef WIDE F;
    SHARED(shared);
    const int64_t r = blockIdx.x, y = label_of(p, r), skip = (r * p.n) & (ROW_V - 1);
    const S *row = (const S *)p.x + r * p.xrow;
    S *to = (S *)p.dx + r * p.n;
    const bool whole_out = row_in_line(to - skip), whole = p.xcol == 1 && row_in_line(row - skip) && whole_out;
    const int64_t first = (int64_t)threadIdx.x * ROW_V - skip;
    if (y == p.ignore) { /* the same for the whole block */
        const F zero[ROW_V] = {};
        for (int64_t i = first; i < p.n; i += (int64_t)blockDim.x * ROW_V) row_put(to, 1, i, p.n, whole_out, zero);
        return;
    }
    const double each = p.smoothing / (double)p.n, hit = (1 - p.smoothing) * weight_at(p, y);
    double sum = (double)p.n;
    if (p.weight && each > 0) {
        sum = 0;
        for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) sum += weight_at(p, c);
        sum = block_all<op_sum>(sum, 0.0, (double *)shared);
    }
    const double g = float_at(p.dloss, p.gtype, p.reduction ? 0 : r * p.loss_step) *
                     (p.reduction == 1 ? 1 / ld(p.denom) : 1);
    const double lse = ld(p.lse + r), all = hit + each * sum;
    const F level = (F)lse;
    loss_slope<F> f = {level, (F)(g * all * exp((double)level - lse)), (F)(g * each), 0, false};
    if (p.weight && each > 0) { /* every class has its own part */
        for (int64_t c = threadIdx.x; c < p.n; c += blockDim.x) {
            const F x = at<S>(p.x, r * p.xrow + c * p.xcol);
            put<S>(p.dx, r * p.n + c, f.k * loss_power(x - level, S()) - (F)(g * each * weight_at(p, c)));
            if (c == y) f.own = true, f.at_label = x;
        }
    } else loss_grad_read(p, row, to, first, y, whole, &f);
    if (f.own)
        put<S>(p.dx, r * p.n + y, (F)(g * (all * exp((double)f.at_label - lse) - (each * weight_at(p, y) + hit))));
}

FLOATS(loss, struct om_gpu_loss, LOSS_BOUNDS, loss_row)
FLOATS(loss_finish, struct om_gpu_loss, 1024, loss_finish)
FLOATS(loss_grad, struct om_gpu_loss, LOSS_BOUNDS, loss_grad_row)
