/* recurrent.k.c - activations of one time step of an RNN, LSTM or GRU, and their gradients, for one sample. */
#include "cpu/recurrent.h"
#include "cpu/kernels/vmath.h"

#define LOOP _Pragma("omp simd") for (int64_t i = 0; i < n; i++)

#define RECURRENT(S, T)                                                                                                \
    static void relu_##S(const om_recurrent_row *r, int64_t n) {                                                       \
        const T *g = r->gate;                                                                                          \
        T *h = r->h;                                                                                                   \
        LOOP h[i] = g[i] < 0 ? 0 : g[i];                                                                               \
    }                                                                                                                  \
    static void tanh_rows_##S(const om_recurrent_row *r, int64_t n) {                                                  \
        const T *g = r->gate;                                                                                          \
        T *h = r->h;                                                                                                   \
        LOOP h[i] = tanh_##S(g[i]);                                                                                    \
    }                                                                                                                  \
    static void lstm_##S(const om_recurrent_row *r, int64_t n) {                                                       \
        T *a = r->gate, *f = a + n, *g = f + n, *o = g + n, *c = r->c, *h = r->h;                                      \
        const T *before = r->c_before;                                                                                 \
        LOOP a[i] = sigmoid_##S(a[i]);                                                                                 \
        LOOP f[i] = sigmoid_##S(f[i]);                                                                                 \
        LOOP g[i] = tanh_##S(g[i]);                                                                                    \
        LOOP o[i] = sigmoid_##S(o[i]);                                                                                 \
        LOOP c[i] = f[i] * before[i] + a[i] * g[i];                                                                    \
        LOOP h[i] = o[i] * tanh_##S(c[i]);                                                                             \
    }                                                                                                                  \
    static void gru_##S(const om_recurrent_row *r, int64_t n) {                                                        \
        T *a = r->gate, *z = a + n, *m = z + n, *s = m + n, *h = r->h;                                                 \
        const T *k = r->hidden, *before = r->h_before;                                                                 \
        LOOP a[i] = sigmoid_##S(a[i] + k[i]);                                                                          \
        LOOP z[i] = sigmoid_##S(z[i] + k[n + i]);                                                                      \
        LOOP s[i] = k[2 * n + i];                                                                                      \
        LOOP m[i] = tanh_##S(m[i] + a[i] * s[i]);                                                                      \
        LOOP h[i] = (before[i] - m[i]) * z[i] + m[i];                                                                  \
    }                                                                                                                  \
    static void relu_back_##S(const om_recurrent_row *r, int64_t n) {                                                  \
        const T *h = r->h, *dh = r->dh;                                                                                \
        T *d = r->dgx;                                                                                                 \
        LOOP d[i] = h[i] <= 0 ? 0 : dh[i];                                                                             \
    }                                                                                                                  \
    static void tanh_back_##S(const om_recurrent_row *r, int64_t n) {                                                  \
        const T *h = r->h, *dh = r->dh;                                                                                \
        T *d = r->dgx;                                                                                                 \
        LOOP d[i] = dh[i] * (1 - h[i] * h[i]);                                                                         \
    }                                                                                                                  \
    static void lstm_back_##S(const om_recurrent_row *r, int64_t n) {                                                  \
        const T *a = r->gate, *f = a + n, *g = f + n, *o = g + n, *c = r->c, *before = r->c_before, *dh = r->dh;       \
        T *dc = r->dc, *da = r->dgx, *df = da + n, *dg = df + n, *dout = dg + n;                                       \
        LOOP {                                                                                                         \
            const T t = tanh_##S(c[i]), all = dc[i] + dh[i] * o[i] * (1 - t * t);                                      \
            dout[i] = dh[i] * t * o[i] * (1 - o[i]);                                                                   \
            da[i] = all * g[i] * a[i] * (1 - a[i]);                                                                    \
            df[i] = all * before[i] * f[i] * (1 - f[i]);                                                               \
            dg[i] = all * a[i] * (1 - g[i] * g[i]);                                                                    \
            dc[i] = all * f[i];                                                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    static void gru_back_##S(const om_recurrent_row *r, int64_t n) {                                                   \
        const T *a = r->gate, *z = a + n, *m = z + n, *s = m + n, *before = r->h_before;                               \
        T *dh = r->dh, *x = r->dgx, *k = r->dgh;                                                                       \
        LOOP {                                                                                                         \
            const T dm = dh[i] * (1 - z[i]) * (1 - m[i] * m[i]), da = dm * s[i] * a[i] * (1 - a[i]),                   \
                    dz = dh[i] * (before[i] - m[i]) * z[i] * (1 - z[i]);                                               \
            x[i] = k[i] = da;                                                                                          \
            x[n + i] = k[n + i] = dz;                                                                                  \
            x[2 * n + i] = dm;                                                                                         \
            k[2 * n + i] = dm * a[i];                                                                                  \
            dh[i] *= z[i];                                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static void add_##S(const void *x, void *to, int64_t n) {                                                          \
        const T *from = x;                                                                                             \
        T *sum = to;                                                                                                   \
        LOOP sum[i] += from[i];                                                                                        \
    }
RECURRENT(f32, float)
RECURRENT(f64, double)

#define BOTH(name) {name##_f32, name##_f64}
const struct om_recurrent_kernels OM_ISA_NAME(om_recurrent) = {
    .step = {BOTH(relu), BOTH(tanh_rows), BOTH(lstm), BOTH(gru)},
    .back = {BOTH(relu_back), BOTH(tanh_back), BOTH(lstm_back), BOTH(gru_back)},
    .add = BOTH(add)};
