/* recurrent.cu - one time step of an RNN, LSTM or GRU: its product and its activations, forward and backward.
 *
 * A block does 16 samples by 16 units, a thread one of each with all gates: no gate is written before its activation.
 * What a step needs of the others of its sample (h, or gradients of all gates) the step before has written: a launch
 * each; a product takes them as that step's results are stored. Sums are of 32 products at a time, then those.
 */
#include "cuda/kernel.h"

enum { SIDE = 16, DEEP = 32 };

/* By the strip's arithmetic, as on the CPU. */
FN float sigmoid_of(float x) { return sigmoid_f32(x); }
FN double sigmoid_of(double x) { return sigmoid_f64(x); }
FN float tanh_of(float x) { return tanh_f32(x); }
FN double tanh_of(double x) { return tanh_f64(x); }
template <class F> FN F wide_at(const char *p, int64_t i) { return ld((const F *)p + i); }
template <class F> FN void wide_put(char *p, int64_t i, F x) { st((F *)p + i, x); }

/* sum[g] = the thread's: rows of a (n, depth) by `gates` matrices of w: element (k, j) of matrix g lies at
 * g * per_gate + k * per_k + j * per_j. */
template <class S, int GATES>
FN void step_product(const char *a, const char *w, int64_t n, int64_t size, int64_t depth,
                     int64_t per_gate, int64_t per_k, int64_t per_j, WIDE *sum) {
    typedef WIDE F;
    SHARED(shared);
    F *as = (F *)shared, *ws = as + DEEP * (SIDE + 1);
    const unsigned t = threadIdx.x, tx = t & 15, ty = t >> 4;
    const int64_t i0 = (int64_t)blockIdx.x * SIDE, j0 = (int64_t)blockIdx.y * SIDE;
    for (int g = 0; g < GATES; g++) sum[g] = 0;
    for (int64_t k0 = 0; k0 < depth; k0 += DEEP) {
        __syncthreads();
        for (unsigned e = t; e < SIDE * DEEP; e += 256) { /* neighbours in memory by neighbouring threads */
            const unsigned i = e / DEEP, k = e % DEEP;
            const int64_t from = (i0 + i) * depth + k0 + k;
            as[k * (SIDE + 1) + i] = i0 + i < n && k0 + k < depth ? at<S>(a, from) : (F)0;
            const unsigned j = per_k == 1 ? i : e % SIDE, l = per_k == 1 ? k : e / SIDE;
            const bool in_w = j0 + j < size && k0 + l < depth;
            for (int g = 0; g < GATES; g++)
                ws[(g * DEEP + l) * (SIDE + 1) + j] =
                    in_w ? at<S>(w, g * per_gate + (k0 + l) * per_k + (j0 + j) * per_j) : (F)0;
        }
        __syncthreads();
        F part[GATES];
        for (int g = 0; g < GATES; g++) part[g] = 0;
        for (int k = 0; k < DEEP; k++) {
            const F x = as[k * (SIDE + 1) + ty];
            for (int g = 0; g < GATES; g++) part[g] += x * ws[(g * DEEP + k) * (SIDE + 1) + tx];
        }
        for (int g = 0; g < GATES; g++) sum[g] += part[g];
    }
}

/* block (samples, units) */
template <class S, int GATES> FN void step(const om_gpu_recurrent &p) {
    typedef WIDE F;
    F sum[GATES], x[GATES], h;
    step_product<S, GATES>(p.h, p.w, p.n, p.size, p.size, p.size * p.size, 1, p.size, sum);
    const int64_t i = (int64_t)blockIdx.x * SIDE + (threadIdx.x >> 4);
    const int64_t j = (int64_t)blockIdx.y * SIDE + (threadIdx.x & 15), own = i * p.size + j;
    if (i >= p.n || j >= p.size) return;
    for (int g = 0; g < GATES; g++) {
        x[g] = at<S>(p.gx, (i * GATES + g) * p.size + j);
        if (p.b) sum[g] += at<S>(p.b, g * p.size + j);
    }
    if (GATES == 1) {
        h = x[0] + sum[0];
        h = p.kind == OM_GPU_TANH ? tanh_of(h) : h < 0 ? (F)0 : h;
    } else if (GATES == 4) {
        const F before = p.first ? at<S>(p.before, own) : wide_at<F>(p.before, own);
        const F in = sigmoid_of(x[0] + sum[0]), forget = sigmoid_of(x[1] + sum[1]), now = tanh_of(x[2] + sum[2]);
        const F out = sigmoid_of(x[3] + sum[3]), c = forget * before + in * now;
        const F gate[4] = {in, forget, now, out};
        for (int g = 0; g < 4; g++) wide_put<F>(p.gates, (i * 4 + g) * p.size + j, gate[g]);
        wide_put<F>(p.cells, own, c);
        if (p.last) put<S>(p.last, own, c);
        h = out * tanh_of(c);
    } else {
        const F before = p.first ? at<S>(p.before, own) : wide_at<F>(p.before, own);
        const F reset = sigmoid_of(x[0] + sum[0]), z = sigmoid_of(x[1] + sum[1]), now = tanh_of(x[2] + reset * sum[2]);
        const F gate[4] = {reset, z, now, sum[2]};
        for (int g = 0; g < 4; g++) wide_put<F>(p.gates, (i * 4 + g) * p.size + j, gate[g]);
        h = (before - now) * z + now;
    }
    put<S>(p.y, own, h);
    if (p.wide) wide_put<F>(p.wide, own, h);
}
template <class S> FN void recurrent(const om_gpu_recurrent &p) {
    if (p.kind == OM_GPU_LSTM) step<S, 4>(p);
    else if (p.kind == OM_GPU_GRU) step<S, 3>(p);
    else step<S, 1>(p);
}
FLOATS(recurrent, struct om_gpu_recurrent, 256, recurrent)

/* The gradient of h of this step is dy and what the step after it hands back; then those of the gates. Behind all steps
 * it is h0's. */
template <class S, int GATES> FN void step_grad(const om_gpu_recurrent_grad &p) {
    typedef WIDE F;
    const bool lstm = GATES == 4, gru = GATES == 3;
    F dh = 0, dc = 0, d[GATES], dm = 0, gate[4];
    if (p.after) step_product<S, 1>(p.after, p.w, p.n, p.size, GATES * p.size, 0, p.size, 1, &dh);
    const int64_t i = (int64_t)blockIdx.x * SIDE + (threadIdx.x >> 4);
    const int64_t j = (int64_t)blockIdx.y * SIDE + (threadIdx.x & 15), own = i * p.size + j;
    if (i >= p.n || j >= p.size) return;
    if (gru && p.after) dh += wide_at<F>(p.own, own);
    if (lstm) dc = p.after ? wide_at<F>(p.dc, own) : p.dlast ? at<S>(p.dlast, own) : (F)0;
    if (p.dh0) {
        put<S>(p.dh0, own, dh);
        if (lstm) put<S>(p.dc0, own, dc);
        return;
    }
    dh += at<S>(p.dy, own);
    for (int g = 0; g < 4; g++) gate[g] = GATES > 1 ? wide_at<F>(p.gates, (i * 4 + g) * p.size + j) : (F)0;
    if (lstm) {
        const F before = p.first ? at<S>(p.before, own) : wide_at<F>(p.before, own);
        const F in = gate[0], forget = gate[1], now = gate[2], out = gate[3], c = tanh_of(wide_at<F>(p.cells, own));
        const F all = dc + dh * out * (1 - c * c);
        d[0] = all * now * in * (1 - in), d[1 % GATES] = all * before * forget * (1 - forget);
        d[2 % GATES] = all * in * (1 - now * now), d[3 % GATES] = dh * c * out * (1 - out);
        wide_put<F>(p.dc, own, all * forget);
    } else if (gru) {
        const F before = at<S>(p.h, own), reset = gate[0], z = gate[1], now = gate[2], hidden = gate[3];
        dm = dh * (1 - z) * (1 - now * now);
        d[0] = dm * hidden * reset * (1 - reset), d[1 % GATES] = dh * (before - now) * z * (1 - z);
        d[2 % GATES] = dm * reset;
        wide_put<F>(p.own, own, dh * z);
    } else {
        const F h = at<S>(p.h, own);
        d[0] = p.kind == OM_GPU_TANH ? dh * (1 - h * h) : h <= 0 ? (F)0 : dh;
    }
    for (int g = 0; g < GATES; g++) { /* gx of a GRU has not what the reset gate did to h's share */
        const int64_t to = (i * GATES + g) * p.size + j;
        put<S>(p.dgx, to, gru && g == 2 ? dm : d[g]);
        if (gru) put<S>(p.dgh, to, d[g]);
    }
}
template <class S> FN void recurrent_grad(const om_gpu_recurrent_grad &p) {
    if (p.kind == OM_GPU_LSTM) step_grad<S, 4>(p);
    else if (p.kind == OM_GPU_GRU) step_grad<S, 3>(p);
    else step_grad<S, 1>(p);
}
FLOATS(recurrent_grad, struct om_gpu_recurrent_grad, 256, recurrent_grad)
