/* optim_math.h - the arithmetic of the optimizers, written once: the CPU kernels (kernels/optim.k.c), the CUDA kernels
 * (cuda/optim.cu) and its host emulation all call these functions on one element at a time; dynamic loss scaling too.
 *
 * Every mode of Adam is one formula with constants prepared once per tensor and step in double precision:
 *
 *     g  = inv_scale * g + l2 * p                    l2 decay: modes 0 and 3
 *     p  = p * before                                1 - lr*wd in mode 2, else 1
 *     m  = b1 m + (1-b1) g      v = b2 v + (1-b2) g^2
 *     p  = (p - rate * m / (sqrt(v) * root + eps)) * after      after = 1 - lr*wd in mode 1, else 1
 *
 *   modes 0, 1   rate = lr sqrt(c2)/c1, root = 1             eps outside the bias correction (ORT, HF transformers)
 *   modes 2, 3   rate = lr/c1,          root = 1/sqrt(c2)    eps inside (torch.optim.AdamW, torch.optim.Adam)
 *   c1 = 1 - beta1^t, c2 = 1 - beta2^t; both 1 without bias correction. Multiplying by 1 is exact, so unused terms cost
 *   nothing.
 *
 * Without decay (l2 0) Adam and SGD do not read p for the gradient: an infinite weight stays what it is, as in torch
 * (0 * inf would be NaN).
 *
 * inv_scale = 1 / loss scale (times the clipping factor); negative maximises. Betas and powers are doubles: 1 - beta2
 * is not rounded through float first.
 */
#ifndef OM_OPTIM_MATH_H
#define OM_OPTIM_MATH_H

#if !defined(__CUDACC_RTC__)
#include <math.h>
#endif

#if defined(__CUDACC__)
#define OM_FN __host__ __device__ static __forceinline__
#else
#define OM_FN static inline
#endif

enum { OM_ADAM_L2 = 0, OM_ADAMW_HF = 1, OM_ADAMW_TORCH = 2, OM_ADAM_TORCH = 3, OM_N_ADAM_MODES };

typedef struct om_adam_cfg {
    double lr, beta1, beta2, eps, weight_decay, inv_scale;
    int mode, bias_correction;
} om_adam_cfg;

typedef struct om_lamb_cfg {
    double lr, beta1, beta2, eps, weight_decay; /* weight_decay is part of the direction ... */
    double l2;                                  /* ... l2 is added to the gradient instead */
    double grad_weight;                         /* factor of g in the first moment: 1 - beta1, or 1 (no averaging) */
    double ratio_min, ratio_max;                /* clamp of the trust ratio */
    double inv_scale;                           /* see om_lamb_inv_scale */
    int bias_correction, no_ratio;              /* no_ratio: plain lr (Apex: groups without decay) */
} om_lamb_cfg;

typedef struct om_sgd_cfg {
    double lr, momentum, dampening, weight_decay, inv_scale;
    int nesterov;
} om_sgd_cfg;

#define OM_OPTIM_MATH(T, S, SQRT)                                                                                      \
    typedef struct om_adam_##S {                                                                                       \
        T inv_scale, l2, before, b1, a1, b2, a2, rate, root, eps, after;                                               \
    } om_adam_##S;                                                                                                     \
    typedef struct om_lamb_##S {                                                                                       \
        T inv_scale, l2, b1, a1, b2, a2, ic1, root, eps, wd;                                                           \
    } om_lamb_##S;                                                                                                     \
    typedef struct om_sgd_##S {                                                                                        \
        T inv_scale, l2, lr, momentum, buf, grad;                                                                      \
        int use_buf, nesterov;                                                                                         \
    } om_sgd_##S;                                                                                                      \
                                                                                                                       \
    OM_FN om_adam_##S om_adam_prepare_##S(const om_adam_cfg *c, double step) {                                         \
        om_adam_##S k;                                                                                                 \
        const double c1 = c->bias_correction && step > 0 ? 1.0 - pow(c->beta1, step) : 1.0;                            \
        const double c2 = c->bias_correction && step > 0 ? 1.0 - pow(c->beta2, step) : 1.0;                            \
        const int inside = c->mode == OM_ADAMW_TORCH || c->mode == OM_ADAM_TORCH;                                      \
        const int l2 = c->mode == OM_ADAM_L2 || c->mode == OM_ADAM_TORCH;                                              \
        k.inv_scale = (T)c->inv_scale;                                                                                 \
        k.l2 = (T)(l2 ? c->weight_decay : 0.0);                                                                        \
        k.before = (T)(c->mode == OM_ADAMW_TORCH ? 1.0 - c->lr * c->weight_decay : 1.0);                               \
        k.after = (T)(c->mode == OM_ADAMW_HF ? 1.0 - c->lr * c->weight_decay : 1.0);                                   \
        k.b1 = (T)c->beta1, k.a1 = (T)(1.0 - c->beta1), k.b2 = (T)c->beta2, k.a2 = (T)(1.0 - c->beta2);                \
        k.rate = (T)(inside ? c->lr / c1 : c->lr * sqrt(c2) / c1);                                                     \
        k.root = (T)(inside ? 1.0 / sqrt(c2) : 1.0);                                                                   \
        k.eps = (T)c->eps;                                                                                             \
        return k;                                                                                                      \
    }                                                                                                                  \
    OM_FN T om_adam_at_##S(const om_adam_##S *k, T p, T g, T *m, T *v) {                                               \
        g = k->inv_scale * g + k->l2 * (k->l2 != 0 ? p : 0);                                                           \
        p = p * k->before;                                                                                             \
        const T m1 = k->b1 * *m + k->a1 * g, v1 = k->b2 * *v + k->a2 * g * g;                                          \
        *m = m1, *v = v1;                                                                                              \
        return (p - k->rate * m1 / (SQRT(v1) * k->root + k->eps)) * k->after;                                          \
    }                                                                                                                  \
                                                                                                                       \
    OM_FN om_lamb_##S om_lamb_prepare_##S(const om_lamb_cfg *c, double step) {                                         \
        om_lamb_##S k;                                                                                                 \
        const double c1 = c->bias_correction && step > 0 ? 1.0 - pow(c->beta1, step) : 1.0;                            \
        const double c2 = c->bias_correction && step > 0 ? 1.0 - pow(c->beta2, step) : 1.0;                            \
        k.inv_scale = (T)c->inv_scale, k.l2 = (T)c->l2, k.wd = (T)c->weight_decay, k.eps = (T)c->eps;                  \
        k.b1 = (T)c->beta1, k.a1 = (T)c->grad_weight, k.b2 = (T)c->beta2, k.a2 = (T)(1.0 - c->beta2);                  \
        k.ic1 = (T)(1.0 / c1), k.root = (T)(1.0 / sqrt(c2));                                                           \
        return k;                                                                                                      \
    }                                                                                                                  \
    OM_FN T om_lamb_direction_##S(const om_lamb_##S *k, T p, T m, T v) {                                               \
        return k->wd * p + m * k->ic1 / (SQRT(v) * k->root + k->eps);                                                  \
    }                                                                                                                  \
    /* New moments into *m1 and *v1; returns the direction. The caller keeps the old moments when it is not finite. */ \
    OM_FN T om_lamb_moments_##S(const om_lamb_##S *k, T p, T g, T m, T v, T *m1, T *v1) {                              \
        g = k->inv_scale * g + k->l2 * p;                                                                              \
        *m1 = k->b1 * m + k->a1 * g, *v1 = k->b2 * v + k->a2 * g * g;                                                  \
        return om_lamb_direction_##S(k, p, *m1, *v1);                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* first: this tensor has no momentum yet, its buffer becomes the gradient itself (torch's rule) */                \
    OM_FN om_sgd_##S om_sgd_prepare_##S(const om_sgd_cfg *c, int first) {                                              \
        om_sgd_##S k;                                                                                                  \
        k.inv_scale = (T)c->inv_scale, k.l2 = (T)c->weight_decay, k.lr = (T)c->lr, k.momentum = (T)c->momentum;        \
        k.buf = (T)(first ? 0.0 : c->momentum), k.grad = (T)(first || !c->momentum ? 1.0 : 1.0 - c->dampening);        \
        k.use_buf = c->momentum != 0, k.nesterov = c->nesterov;                                                        \
        return k;                                                                                                      \
    }                                                                                                                  \
    OM_FN T om_sgd_at_##S(const om_sgd_##S *k, T p, T g, T *m) {                                                       \
        g = k->inv_scale * g + k->l2 * (k->l2 != 0 ? p : 0);                                                           \
        const T b = k->buf * *m + k->grad * g;                                                                         \
        *m = b;                                                                                                        \
        return p - k->lr * (k->nesterov ? g + k->momentum * b : b);                                                    \
    }

OM_OPTIM_MATH(float, f32, sqrtf)
OM_OPTIM_MATH(double, f64, sqrt)

/* Dynamic loss scaling after one step: halved at an overflow, doubled after `window` good steps in a row, within
 * [lowest, highest]. */
/* good: steps without overflow since the scale last changed */
typedef struct om_loss_scale { double scale, good; } om_loss_scale;
OM_FN om_loss_scale om_loss_scale_next(om_loss_scale s, int finite, double window, double lowest, double highest) {
    if (!finite) {
        s.scale = s.scale / 2 > lowest ? s.scale / 2 : lowest;
        s.good = 0;
    } else if (++s.good >= window) {
        s.scale = s.scale * 2 < highest ? s.scale * 2 : highest;
        s.good = 0;
    }
    return s;
}

/* Divisor of LAMB's gradients: the loss scale, or, when the norm of the still scaled gradients exceeds scale *
 * max_norm, norm / max_norm (unscales and clips at once; no epsilon). max_norm <= 0: no clipping. */
OM_FN double om_lamb_inv_scale(double loss_scale, double scaled_norm, double max_norm) {
    return max_norm > 0 && scaled_norm > loss_scale * max_norm ? max_norm / scaled_norm : 1.0 / loss_scale;
}

/* lr times the clamped trust ratio |w| / |d|; plain lr, not clamped, when either norm is zero. */
OM_FN double om_lamb_rate(const om_lamb_cfg *c, double w2, double d2) {
    if (c->no_ratio || w2 == 0 || d2 == 0) return c->lr;
    double r = sqrt(w2 / d2);
    r = r > c->ratio_max ? c->ratio_max : r;
    return c->lr * (r < c->ratio_min ? c->ratio_min : r);
}

#endif
