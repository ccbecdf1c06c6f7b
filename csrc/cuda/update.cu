/* update.cu - optimizer steps as operators of the graph (ops/optimizer.c), by the arithmetic of optim/optim_math.h: a
 * launch per tensor, LAMB's two with their sums between them. What they write may be the weights' own memory: behind a
 * fault they write nothing. Sums of squares are in double, in an order that the sizes give. */
#include "cuda/kernel.h"
#include "optim/optim_math.h"

typedef struct om_gpu_update update;

template <class F> FN bool is_finite(F x) { return x - x == 0; }

/* What all threads of a block need: read once, so that all of them see one state of the fault word. */
template <class K> struct shared_of { int guarded, updates; K k; double rate; };
static_assert(sizeof(shared_of<om_lamb_f64>) <= OM_GPU_UPDATE_SHARED &&
                  sizeof(shared_of<om_adam_f64>) <= OM_GPU_UPDATE_SHARED &&
                  sizeof(shared_of<om_sgd_cfg>) <= OM_GPU_UPDATE_SHARED,
              "behind it lies the room of sums");

template <class K> FN shared_of<K> *block_begin(const update &p, char *shared) {
    shared_of<K> *s = (shared_of<K> *)shared;
    if (!threadIdx.x) {
        s->guarded = behind_fault(p.guard);
        s->updates = !p.flag || ld(p.flag);
    }
    return s;
}
FN double step_of(const update &p) { return p.step ? (double)ld(p.step) : 0; }

/* A result that is an operand. */
FN void keep_one(const update &p, int64_t i, int out, int in) {
    float_put(p.out[out], p.in_type[in], i, float_at(p.in[in], p.in_type[in], i));
}

/* --- adamw, sgd ------------------------------------------------------------------------------------------ */

FN om_adam_cfg adam_cfg(const update &p) {
    const om_adam_cfg c = {float_at(p.lr, p.lr_type, 0), p.beta1, p.beta2, p.eps, p.weight_decay, 1, p.mode,
                           p.bias_correction};
    return c;
}
FN void prepare(const update &p, om_adam_f32 *k) {
    const om_adam_cfg c = adam_cfg(p);
    *k = om_adam_prepare_f32(&c, step_of(p));
}
FN void prepare(const update &p, om_adam_f64 *k) {
    const om_adam_cfg c = adam_cfg(p);
    *k = om_adam_prepare_f64(&c, step_of(p));
}
FN float adam_at(const om_adam_f32 *k, float w, float g, float *m, float *v) { return om_adam_at_f32(k, w, g, m, v); }
FN double adam_at(const om_adam_f64 *k, double w, double g, double *m, double *v) {
    return om_adam_at_f64(k, w, g, m, v);
}

template <class F, class K> FN void adamw(const update &p) {
    SHARED(shared);
    shared_of<K> *s = block_begin<K>(p, shared);
    if (!threadIdx.x) prepare(p, &s->k);
    __syncthreads();
    if (s->guarded) return;
    OVER_GRID(i, p.n) {
        if (!s->updates) {
            for (int o = 0; o < 3; o++) keep_one(p, i, o, o ? o + 1 : 0);
            continue;
        }
        F m = (F)float_at(p.in[2], p.in_type[2], i), v = (F)float_at(p.in[3], p.in_type[3], i);
        const F w = (F)float_at(p.in[0], p.in_type[0], i), g = (F)float_at(p.in[1], p.in_type[1], i);
        float_put(p.out[0], p.in_type[0], i, adam_at(&s->k, w, g, &m, &v));
        float_put(p.out[1], p.in_type[2], i, m);
        float_put(p.out[2], p.in_type[3], i, v);
    }
}
EXPORT(OM_GPU_UPDATE_THREADS) om_k_adamw(PARAM(struct om_gpu_update) p) {
    if (p.in_type[0] == OM_F64) adamw<double, om_adam_f64>(p);
    else adamw<float, om_adam_f32>(p);
}

FN float sgd_at(const om_sgd_cfg *c, float w, float g) {
    const om_sgd_f32 k = om_sgd_prepare_f32(c, 1);
    float none = 0;
    return om_sgd_at_f32(&k, w, g, &none);
}
FN double sgd_at(const om_sgd_cfg *c, double w, double g) {
    const om_sgd_f64 k = om_sgd_prepare_f64(c, 1);
    double none = 0;
    return om_sgd_at_f64(&k, w, g, &none);
}
template <class F> FN void sgd(const update &p) {
    SHARED(shared);
    shared_of<om_sgd_cfg> *s = block_begin<om_sgd_cfg>(p, shared);
    const om_sgd_cfg c = {float_at(p.lr, p.lr_type, 0), 0, 0, 0, 1, 0};
    __syncthreads();
    if (s->guarded) return;
    OVER_GRID(i, p.n) {
        const F w = (F)float_at(p.in[0], p.in_type[0], i);
        const F y = s->updates ? sgd_at(&c, w, (F)float_at(p.in[1], p.in_type[1], i)) : w;
        float_put(p.out[0], p.in_type[0], i, y);
    }
}
EXPORT(OM_GPU_UPDATE_THREADS) om_k_sgd(PARAM(struct om_gpu_update) p) {
    if (p.in_type[0] == OM_F64) sgd<double>(p);
    else sgd<float>(p);
}

/* --- lamb ------------------------------------------------------------------------------------------------- */

FN om_lamb_cfg lamb_cfg(const update &p) {
    const double scale = p.scale ? float_at(p.scale, p.scale_type, 0) : 1;
    const double norm = p.norm ? float_at(p.norm, p.norm_type, 0) : 0;
    const om_lamb_cfg c = {float_at(p.lr, p.lr_type, 0), p.beta1, p.beta2, p.eps, p.weight_decay, 0, 1 - p.beta1,
                           p.ratio_min, p.ratio_max, om_lamb_inv_scale(scale, norm, p.max_norm), p.bias_correction, 0};
    return c;
}
FN void prepare(const update &p, om_lamb_f32 *k) {
    const om_lamb_cfg c = lamb_cfg(p);
    *k = om_lamb_prepare_f32(&c, step_of(p));
}
FN void prepare(const update &p, om_lamb_f64 *k) {
    const om_lamb_cfg c = lamb_cfg(p);
    *k = om_lamb_prepare_f64(&c, step_of(p));
}
FN float moments(const om_lamb_f32 *k, float w, float g, float m, float v, float *m1, float *v1) {
    return om_lamb_moments_f32(k, w, g, m, v, m1, v1);
}
FN double moments(const om_lamb_f64 *k, double w, double g, double m, double v, double *m1, double *v1) {
    return om_lamb_moments_f64(k, w, g, m, v, m1, v1);
}
FN float direction(const om_lamb_f32 *k, float w, float m, float v) { return om_lamb_direction_f32(k, w, m, v); }
FN double direction(const om_lamb_f64 *k, double w, double m, double v) { return om_lamb_direction_f64(k, w, m, v); }

/* Can the gradient's type hold the direction? Else it is computed again, and NaN marks what is left out. */
FN bool holds(const update &p) { return p.in_type[1] == (p.in_type[0] == OM_F64 ? OM_F64 : OM_F32); }

template <class F, class K> FN void lamb_moments(const update &p) {
    SHARED(shared);
    shared_of<K> *s = block_begin<K>(p, shared);
    double *room = (double *)(shared + OM_GPU_UPDATE_SHARED), w2 = 0, d2 = 0;
    if (!threadIdx.x) prepare(p, &s->k);
    __syncthreads();
    if (s->guarded || !s->updates) return; /* all of the block */
    OVER_GRID(i, p.n) {
        const F w = (F)float_at(p.in[0], p.in_type[0], i), g = (F)float_at(p.in[1], p.in_type[1], i);
        const F m = (F)float_at(p.in[2], p.in_type[2], i), v = (F)float_at(p.in[3], p.in_type[3], i);
        F m1, v1, d = moments(&s->k, w, g, m, v, &m1, &v1);
        const bool left_out = !is_finite(d);
        if (left_out) d = 0, m1 = m, v1 = v;
        float_put(p.out[2], p.in_type[2], i, m1);
        float_put(p.out[3], p.in_type[3], i, v1);
        float_put(p.out[1], p.in_type[1], i, holds(p) ? (double)d : left_out ? (double)NAN : 0);
        w2 += (double)w * w, d2 += (double)d * d;
    }
    w2 = block_all<op_sum>(w2, 0.0, room);
    d2 = block_all<op_sum>(d2, 0.0, room);
    if (threadIdx.x) return;
    st(p.sums + 2 * blockIdx.x, w2);
    st(p.sums + 2 * blockIdx.x + 1, d2);
}
EXPORT(OM_GPU_UPDATE_THREADS) om_k_lamb_moments(PARAM(struct om_gpu_update) p) {
    if (p.in_type[0] == OM_F64) lamb_moments<double, om_lamb_f64>(p);
    else lamb_moments<float, om_lamb_f32>(p);
}

template <class F, class K> FN void lamb(const update &p) {
    SHARED(shared);
    shared_of<K> *s = block_begin<K>(p, shared);
    if (!threadIdx.x && !s->guarded && s->updates) {
        const om_lamb_cfg c = lamb_cfg(p);
        double w2 = 0, d2 = 0;
        for (int64_t b = 0; b < p.blocks; b++) w2 += ld(p.sums + 2 * b), d2 += ld(p.sums + 2 * b + 1);
        s->rate = om_lamb_rate(&c, w2, d2);
        prepare(p, &s->k);
    }
    __syncthreads();
    if (s->guarded) return;
    const F rate = (F)(s->updates ? s->rate : 0);
    OVER_GRID(i, p.n) {
        if (!s->updates) {
            for (int o = 0; o < (p.out[4] ? 5 : 4); o++) keep_one(p, i, o, o);
            continue;
        }
        const F w = (F)float_at(p.in[0], p.in_type[0], i), said = (F)float_at(p.out[1], p.in_type[1], i);
        F d = said;
        if (!holds(p)) {
            d = direction(&s->k, w, (F)float_at(p.out[2], p.in_type[2], i), (F)float_at(p.out[3], p.in_type[3], i));
            if (said != said) d = 0;
        }
        F change = -rate * d, y = w + change;
        if (!is_finite(y)) y = w, change = 0;
        float_put(p.out[0], p.in_type[0], i, y);
        float_put(p.out[1], p.in_type[1], i, change);
        if (p.out[4]) float_put(p.out[4], p.in_type[4], i, float_at(p.out[0], p.in_type[0], i));
    }
}
EXPORT(OM_GPU_UPDATE_THREADS) om_k_lamb(PARAM(struct om_gpu_update) p) {
    if (p.in_type[0] == OM_F64) lamb<double, om_lamb_f64>(p);
    else lamb<float, om_lamb_f32>(p);
}

/* The next step's number, behind all that reads this one's. */
EXPORT(32) om_k_update_count(PARAM(struct om_gpu_update) p) {
    if (threadIdx.x || behind_fault(p.guard)) return;
    st((int64_t *)p.out[0], (p.step ? ld(p.step) : 0) + (!p.flag || ld(p.flag)));
}

/* --- norms, and what is scaled ------------------------------------------------------------------------------ */

EXPORT(OM_GPU_UPDATE_THREADS) om_k_squares(PARAM(struct om_gpu_norm_all) p) {
    SHARED(shared);
    double *room = (double *)shared, sum = 0, odd = 0;
    OVER_GRID(i, p.n) {
        const double x = float_at(p.x, p.dtype, i);
        sum += x * x;
        odd += !is_finite(x);
    }
    sum = block_all<op_sum>(sum, 0.0, room);
    odd = block_all<op_sum>(odd, 0.0, room);
    if (threadIdx.x) return;
    st(p.sums + 2 * blockIdx.x, sum);
    st(p.sums + 2 * blockIdx.x + 1, odd);
}
EXPORT(32) om_k_norm_all(PARAM(struct om_gpu_norm_all) p) {
    double sum = 0, odd = 0;
    if (threadIdx.x) return;
    for (int64_t b = 0; b < p.blocks; b++) sum += ld(p.sums + 2 * b), odd += ld(p.sums + 2 * b + 1);
    if (p.finite) st((uint8_t *)p.y, (uint8_t)(odd == 0));
    else float_put(p.y, p.dtype, 0, sqrt(sum));
}

/* out = x * what the norm leaves of it; out = in + x, or x where the flag says so */
EXPORT(OM_GPU_UPDATE_THREADS) om_k_clip(PARAM(struct om_gpu_update) p) {
    SHARED(shared);
    shared_of<int> *s = block_begin<int>(p, shared);
    const double ratio = p.max_norm / (float_at(p.norm, p.norm_type, 0) + 1e-6);
    const double f = ratio < 1 || ratio != ratio ? ratio : 1;
    const bool wide = p.in_type[0] == OM_F64;
    __syncthreads();
    if (s->guarded) return;
    OVER_GRID(i, p.n) {
        const double x = float_at(p.in[0], p.in_type[0], i);
        float_put(p.out[0], p.in_type[0], i, wide ? f * x : (double)((float)f * (float)x));
    }
}
EXPORT(OM_GPU_UPDATE_THREADS) om_k_accumulate(PARAM(struct om_gpu_update) p) {
    SHARED(shared);
    shared_of<int> *s = block_begin<int>(p, shared);
    const bool wide = p.in_type[0] == OM_F64 && p.in_type[1] == OM_F64;
    __syncthreads();
    if (s->guarded) return;
    const bool over = p.flag && s->updates;
    OVER_GRID(i, p.n) {
        const double x = float_at(p.in[1], p.in_type[1], i), y = over ? 0 : float_at(p.in[0], p.in_type[0], i);
        float_put(p.out[0], p.in_type[0], i, over ? x : wide ? x + y : (double)((float)x + (float)y));
    }
}
