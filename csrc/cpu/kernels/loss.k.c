/* loss.k.c - the sweeps over a row of logits that cross-entropy needs, each reading the row once.
 *
 * A row is worked off in blocks that stay in L1. log-sum-exp is online: a block first gives its maximum; when that
 * exceeds the running one, the running sum is scaled by exp(old - new); then the block's exponentials are added. Blocks
 * add up in double, so a row of 50,257 logits loses nothing. The gradient subtracts lse in two parts, so large logits
 * lose nothing either. Rows that are not contiguous, or stored narrower than they are computed, are loaded into a
 * buffer block by block.
 *
 * Special values follow the arithmetic: a NaN or +inf logit, or a row of nothing but -inf, gives NaN further on, as in
 * torch.
 */
#include "graph/half.h"
#include "cpu/loss.h"
#include "cpu/kernels/vmath.h"

enum { BLOCK = 512 };

#define SAME(x) (x)
#define EXP_f32(x) vm_exp_neg(x)
#define EXP_f64(x) exp(x)

#define LOSS(NAME, T, W, LOAD, STORE, EXP)                                                                            \
    static const W *load_##NAME(const char *x, int64_t sx, int64_t n, W *buf) {                                       \
        if (sx == (int64_t)sizeof(T)) {                                                                               \
            const T *p = (const T *)x;                                                                                \
            if (sizeof(T) == sizeof(W)) return (const W *)(const void *)x;                                            \
            for (int64_t i = 0; i < n; i++) buf[i] = LOAD(p[i]);                                                      \
        } else {                                                                                                      \
            for (int64_t i = 0; i < n; i++) buf[i] = LOAD(*(const T *)(x + i * sx));                                  \
        }                                                                                                             \
        return buf;                                                                                                   \
    }                                                                                                                 \
    static double lse_##NAME(const char *x, int64_t sx, int64_t c) {                                                  \
        W buf[BLOCK], m = -(W)INFINITY;                                                                               \
        double sum = 0;                                                                                               \
        for (int64_t c0 = 0; c0 < c; c0 += BLOCK) {                                                                   \
            const int64_t n = c - c0 < BLOCK ? c - c0 : BLOCK;                                                        \
            const W *v = load_##NAME(x + c0 * sx, sx, n, buf);                                                        \
            W lane[32], top = -(W)INFINITY, s = 0;                                                                    \
            for (int l = 0; l < 32; l++) lane[l] = top;                                                               \
            int64_t i = 0;                                                                                            \
            for (; i + 32 <= n; i += 32)                                                                              \
                for (int l = 0; l < 32; l++) lane[l] = v[i + l] > lane[l] ? v[i + l] : lane[l];                       \
            for (; i < n; i++) top = v[i] > top ? v[i] : top;                                                         \
            for (int l = 0; l < 32; l++) top = lane[l] > top ? lane[l] : top;                                         \
            if (top > m) {                                                                                            \
                if (sum != 0) sum *= exp((double)m - (double)top);                                                    \
                m = top;                                                                                              \
            }                                                                                                         \
            const W at = m == -(W)INFINITY ? 0 : m; /* nothing but -inf so far: exp(-inf) is 0, -inf - -inf is not */ \
            _Pragma("omp simd reduction(+ : s)") for (int64_t k = 0; k < n; k++) s += EXP(v[k] - at);                 \
            sum += (double)s;                                                                                         \
        }                                                                                                             \
        return (double)m + log(sum);                                                                                  \
    }                                                                                                                 \
    static double smooth_##NAME(const char *x, int64_t sx, int64_t c, double lse, const void *weight) {               \
        W buf[BLOCK];                                                                                                 \
        const W *w = weight;                                                                                          \
        double sum = 0;                                                                                               \
        for (int64_t c0 = 0; c0 < c; c0 += BLOCK) {                                                                   \
            const int64_t n = c - c0 < BLOCK ? c - c0 : BLOCK;                                                        \
            const W *v = load_##NAME(x + c0 * sx, sx, n, buf);                                                        \
            double s = 0;                                                                                             \
            if (w) {                                                                                                  \
                _Pragma("omp simd reduction(+ : s)") for (int64_t k = 0; k < n; k++)                                  \
                    s += (double)w[c0 + k] * (lse - (double)v[k]);                                                    \
            } else {                                                                                                  \
                _Pragma("omp simd reduction(+ : s)") for (int64_t k = 0; k < n; k++) s += lse - (double)v[k];         \
            }                                                                                                         \
            sum += s;                                                                                                 \
        }                                                                                                             \
        return sum;                                                                                                   \
    }                                                                                                                 \
    static void grad_##NAME(const char *x, int64_t sx, int64_t c, double lse_, double a_, double b_,                  \
                            const void *weight, char *dx) {                                                           \
        W buf[BLOCK];                                                                                                 \
        const W *w = weight, hi = (W)lse_, lo = (W)(lse_ - (double)hi), a = (W)a_, b = (W)b_;                         \
        for (int64_t c0 = 0; c0 < c; c0 += BLOCK) {                                                                   \
            const int64_t n = c - c0 < BLOCK ? c - c0 : BLOCK;                                                        \
            const W *v = load_##NAME(x + c0 * sx, sx, n, buf);                                                        \
            T *y = (T *)dx + c0;                                                                                      \
            if (w && b != 0) {                                                                                        \
                _Pragma("omp simd") for (int64_t k = 0; k < n; k++)                                                   \
                    y[k] = (T)STORE(a * EXP((v[k] - hi) - lo) - b * w[c0 + k]);                                       \
            } else {                                                                                                  \
                _Pragma("omp simd") for (int64_t k = 0; k < n; k++) y[k] = (T)STORE(a * EXP((v[k] - hi) - lo) - b);   \
            }                                                                                                         \
        }                                                                                                             \
    }
LOSS(f32, float, float, SAME, SAME, EXP_f32)
LOSS(f64, double, double, SAME, SAME, EXP_f64)
LOSS(bf16, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16, EXP_f32)
LOSS(f16, uint16_t, float, om_f16_to_f32, om_f32_to_f16, EXP_f32)

#define FOR(TYPE, f) (OM_KEPT(TYPE) ? (f) : NULL)
#define ROW(TYPE, NAME) [OM_##TYPE] = {FOR(TYPE, lse_##NAME), FOR(TYPE, smooth_##NAME), FOR(TYPE, grad_##NAME)}
const struct om_loss_kernels OM_ISA_NAME(om_loss) = {
    .type = {ROW(F32, f32), ROW(F64, f64), ROW(BF16, bf16), ROW(F16, f16)},
};
