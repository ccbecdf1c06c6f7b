/* optim.k.c - optimizer kernels over one run of elements, one table per instruction set.
 *
 * All-f32 parameters (and all-f64 ones) are updated in place by one sweep. Everything else goes strip by strip: a strip
 * of each 16-bit tensor is widened into an L1 buffer, the same f32 core runs, the results are rounded back. So the
 * number of loops is the number of formulas, not of type combinations, and memory traffic stays that of the stored
 * types.
 *
 * The f32 weight of a parameter (weights_in / weights_out) lives in p, in the master w, or split over both: see
 * om_optim_store. SPLIT: p = the upper half of the bits rounded half up, w = the signed rest, so that (p << 16) + w
 * gives the bits back.
 */
#include "graph/half.h"
#include "optim/optim.h"
#include "cpu/kernels_isa.h"
#include "cpu/philox.h"

/* ACC_WIDTH elements as doubles, one vector register: conversions that gcc does not find by itself */
enum { ACC_WIDTH = OM_VBYTES / 8 };
typedef double acc_vec __attribute__((vector_size(OM_VBYTES)));
typedef struct squares { acc_vec acc[32 / ACC_WIDTH]; } squares;
static inline void squares_clear(squares *q) {
    for (int j = 0; j < 32 / ACC_WIDTH; j++) q->acc[j] = (acc_vec){0};
}
static double squares_sum(const squares *q) {
    double lane[32];
    memcpy(lane, q->acc, sizeof lane);
    for (int w = 16; w; w /= 2)
        for (int j = 0; j < w; j++) lane[j] += lane[j + w];
    return lane[0];
}
static inline acc_vec widen_f32(const float *x) {
#if defined(__AVX512F__)
    return (acc_vec)_mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif defined(__AVX2__)
    return (acc_vec)_mm256_cvtps_pd(_mm_loadu_ps(x));
#else
    return (acc_vec){x[0], x[1]};
#endif
}
static inline acc_vec widen_f64(const double *x) {
    acc_vec y;
    memcpy(&y, x, sizeof y);
    return y;
}

#define T float
#define S f32
#include "optim/kernels/optim_core.h"
#undef T
#undef S
#define T double
#define S f64
#include "optim/kernels/optim_core.h"
#undef T
#undef S

enum { STRIP = 512 };
static inline int64_t strip_size(int64_t left) { return left < STRIP ? left : STRIP; }

/* --- strips ---------------------------------------------------------------------------------------- */

static void f16_in(const uint16_t *restrict x, float *restrict y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = om_f16_to_f32(x[i]);
}
static void f16_out(const float *restrict x, uint16_t *restrict y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = om_f32_to_f16(x[i]);
}
static void bf16_in(const uint16_t *restrict x, float *restrict y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = om_bf16_to_f32(x[i]);
}
static void bf16_out(const float *restrict x, uint16_t *restrict y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = om_f32_to_bf16(x[i]);
}

/* n elements from element i of x as f32: x itself when it is f32, else widened into buf */
static float *strip_in(int dtype, void *x, int64_t i, int64_t n, float *buf) {
    if (dtype == OM_F32) return (float *)x + i;
    if (dtype == OM_BF16) {
        bf16_in((const uint16_t *)x + i, buf, n);
    } else if (dtype == OM_F16) {
        f16_in((const uint16_t *)x + i, buf, n);
    } else {
        for (int64_t j = 0; j < n; j++) buf[j] = (float)((const double *)x)[i + j];
    }
    return buf;
}

static void strip_out(int dtype, void *x, int64_t i, int64_t n, const float *y) {
    if (dtype == OM_F32) {
        if ((float *)x + i != y) memcpy((float *)x + i, y, (size_t)n * sizeof *y);
    } else if (dtype == OM_BF16) {
        bf16_out(y, (uint16_t *)x + i, n);
    } else if (dtype == OM_F16) {
        f16_out(y, (uint16_t *)x + i, n);
    } else {
        for (int64_t j = 0; j < n; j++) ((double *)x)[i + j] = y[j];
    }
}

static void bf16_out_stochastic(const float *restrict x, uint16_t *restrict y, int64_t n, uint64_t seed,
                                uint64_t stream, uint64_t index) {
    uint32_t r[STRIP];
    om_philox_fill(seed, stream, index, n, r);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = om_f32_bits(x[i]);
        const uint32_t up = (u + (r[i] & 0xffffu)) >> 16; /* carries with probability (lower half) / 2^16 */
        y[i] = (u & 0x7f800000u) == 0x7f800000u ? om_f32_to_bf16(x[i]) : (uint16_t)up;
    }
}

static void split_in(const uint16_t *restrict hi, const int16_t *restrict lo, float *restrict y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = om_bits_f32(((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i]);
}
static void split_out(const float *restrict x, uint16_t *restrict hi, int16_t *restrict lo, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = om_f32_bits(x[i]);
        const int nan = (u & 0x7fffffffu) > 0x7f800000u;
        hi[i] = nan ? (uint16_t)0x7fc0u : (uint16_t)((u + 0x8000u) >> 16);
        lo[i] = nan ? (int16_t)0 : (int16_t)(uint16_t)u;
    }
}

static float *weights_in(const om_optim_span *s, int64_t i, int64_t n, float *buf) {
    if (s->store == OM_STORE_MASTER) return (float *)s->w + i;
    if (s->store == OM_STORE_SPLIT) {
        split_in((const uint16_t *)s->p + i, (const int16_t *)s->w + i, buf, n);
        return buf;
    }
    return strip_in(s->tp, s->p, i, n, buf);
}

static void weights_out(const om_optim_span *s, int64_t i, int64_t n, const float *x) {
    if (s->store == OM_STORE_SPLIT)
        split_out(x, (uint16_t *)s->p + i, (int16_t *)s->w + i, n);
    else if (s->store == OM_STORE_STOCHASTIC)
        bf16_out_stochastic(x, (uint16_t *)s->p + i, n, s->seed, s->stream, (uint64_t)(s->index + i));
    else
        strip_out(s->tp, s->p, i, n, x);
}

static bool all_f32(const om_optim_span *s) {
    return s->store == OM_STORE_NEAREST && s->tp == OM_F32 && s->tg == OM_F32 && (!s->m || s->tm == OM_F32) &&
           (!s->v || s->tv == OM_F32);
}

/* --- adam, sgd ------------------------------------------------------------------------------------- */

static void adam_f32(const om_optim_span *s, const om_adam_f32 *k) {
    if (all_f32(s)) {
        adam_core_f32(s->p, s->g, s->m, s->v, s->n, k);
        return;
    }
    float pb[STRIP], gb[STRIP], mb[STRIP], vb[STRIP];
    for (int64_t i = 0; i < s->n; i += STRIP) {
        const int64_t n = strip_size(s->n - i);
        float *p = weights_in(s, i, n, pb), *m = strip_in(s->tm, s->m, i, n, mb), *v = strip_in(s->tv, s->v, i, n, vb);
        adam_core_f32(p, strip_in(s->tg, s->g, i, n, gb), m, v, n, k);
        weights_out(s, i, n, p);
        strip_out(s->tm, s->m, i, n, m);
        strip_out(s->tv, s->v, i, n, v);
    }
}
static void adam_f64(const om_optim_span *s, const om_adam_f64 *k) { adam_core_f64(s->p, s->g, s->m, s->v, s->n, k); }

static void sgd_f32(const om_optim_span *s, const om_sgd_f32 *k) {
    if (all_f32(s)) {
        sgd_core_f32(s->p, s->g, s->m, s->n, k);
        return;
    }
    float pb[STRIP], gb[STRIP], mb[STRIP];
    for (int64_t i = 0; i < s->n; i += STRIP) {
        const int64_t n = strip_size(s->n - i);
        float *p = weights_in(s, i, n, pb), *m = s->m ? strip_in(s->tm, s->m, i, n, mb) : NULL;
        sgd_core_f32(p, strip_in(s->tg, s->g, i, n, gb), m, n, k);
        weights_out(s, i, n, p);
        if (m) strip_out(s->tm, s->m, i, n, m);
    }
}
static void sgd_f64(const om_optim_span *s, const om_sgd_f64 *k) { sgd_core_f64(s->p, s->g, s->m, s->n, k); }

/* --- lamb ------------------------------------------------------------------------------------------ */

/* The direction replaces the gradient when it has the computing type (grad_out: then the second sweep need not compute
 * it again); else it is thrown away and skipped elements are marked by a NaN gradient. */
static bool lamb_direction_f32(const om_optim_span *s, const om_lamb_f32 *k, bool grad_out, double sum[2]) {
    float pb[STRIP], gb[STRIP], mb[STRIP], vb[STRIP], m0[STRIP], v0[STRIP];
    uint8_t skip[STRIP];
    bool skipped = false;
    sum[0] = sum[1] = 0;
    for (int64_t i = 0; i < s->n; i += STRIP) {
        const int64_t n = strip_size(s->n - i);
        const float *p = weights_in(s, i, n, pb);
        float *m = strip_in(s->tm, s->m, i, n, mb), *v = strip_in(s->tv, s->v, i, n, vb),
              *g = strip_in(s->tg, s->g, i, n, gb);
        if (lamb_moments_core_f32(p, g, grad_out ? g : gb, m, v, m0, v0, n, k, sum, skip)) {
            skipped = true;
            for (int64_t j = 0; !grad_out && j < n; j++)
                if (skip[j]) strip_out(s->tg, s->g, i + j, 1, &(float){NAN});
        }
        strip_out(s->tm, s->m, i, n, m);
        strip_out(s->tv, s->v, i, n, v);
    }
    return skipped;
}

static bool lamb_direction_f64(const om_optim_span *s, const om_lamb_f64 *k, bool grad_out, double sum[2]) {
    double gb[STRIP], m0[STRIP], v0[STRIP];
    uint8_t skip[STRIP];
    bool skipped = false;
    sum[0] = sum[1] = 0;
    for (int64_t i = 0; i < s->n; i += STRIP) {
        const int64_t n = strip_size(s->n - i);
        double *g = (double *)s->g + i;
        if (lamb_moments_core_f64((double *)s->p + i, g, grad_out ? g : gb, (double *)s->m + i, (double *)s->v + i, m0,
                                  v0, n, k, sum, skip)) {
            skipped = true;
            for (int64_t j = 0; !grad_out && j < n; j++)
                if (skip[j]) g[j] = NAN;
        }
    }
    return skipped;
}

/* Four places at once: two streams alone do not fill the memory's queue. */
static void lamb_move_f32(float *restrict p, const float *restrict d, int64_t n, float rate) {
    enum { RUN = 32 };
    const int64_t quarter = n / (4 * RUN) * RUN;
    for (int64_t i = 0; i < quarter; i += RUN)
        for (int j = 0; j < 4; j++)
#pragma omp simd
            for (int64_t k = j * quarter + i; k < j * quarter + i + RUN; k++) p[k] -= rate * d[k];
#pragma omp simd
    for (int64_t k = 4 * quarter; k < n; k++) p[k] -= rate * d[k];
}

static void lamb_update_f32(const om_optim_span *s, const om_lamb_f32 *k, const om_lamb_move *u) {
    float pb[STRIP], gb[STRIP], mb[STRIP], vb[STRIP], db[STRIP], q[STRIP];
    const bool look = !u->bounded || !u->write_weights || s->d;
    if (!look && u->grad_out && s->store == OM_STORE_NEAREST && s->tp == OM_F32) {
        lamb_move_f32(s->p, s->g, s->n, (float)u->rate);
        return;
    }
    for (int64_t i = 0; i < s->n; i += STRIP) {
        const int64_t n = strip_size(s->n - i);
        float *p = weights_in(s, i, n, pb), *d = u->grad_out ? (float *)s->g + i : db;
        if (!u->grad_out)
            lamb_direction_core_f32(p, strip_in(s->tm, s->m, i, n, mb), strip_in(s->tv, s->v, i, n, vb), d, n, k);
        if (u->skipped) {
            const float *g = strip_in(s->tg, s->g, i, n, gb);
            for (int64_t j = 0; j < n; j++)
                if (g[j] != g[j]) d[j] = 0;
        }
        if (!look) {
            lamb_move_f32(p, d, n, (float)u->rate);
            weights_out(s, i, n, p);
            continue;
        }
        lamb_apply_core_f32(p, d, gb, q, n, (float)u->rate);
        if (u->write_weights) {
            if (s->store == OM_STORE_MASTER) memcpy(p, q, (size_t)n * sizeof *p);
            weights_out(s, i, n, q);
        }
        if (s->d) strip_out(s->td, s->d, i, n, gb);
    }
}

static void lamb_update_f64(const om_optim_span *s, const om_lamb_f64 *k, const om_lamb_move *u) {
    double db[STRIP], delta[STRIP], q[STRIP];
    for (int64_t i = 0; i < s->n; i += STRIP) {
        const int64_t n = strip_size(s->n - i);
        double *p = (double *)s->p + i, *g = (double *)s->g + i, *d = u->grad_out ? g : db;
        if (!u->grad_out) lamb_direction_core_f64(p, (double *)s->m + i, (double *)s->v + i, d, n, k);
        for (int64_t j = 0; u->skipped && j < n; j++)
            if (g[j] != g[j]) d[j] = 0;
        lamb_apply_core_f64(p, d, delta, q, n, u->rate);
        if (u->write_weights) memcpy(p, q, (size_t)n * sizeof *p);
        if (s->d) memcpy((double *)s->d + i, delta, (size_t)n * sizeof *p);
    }
}

/* --- norms and scaling ----------------------------------------------------------------------------- */

static double sum_squares(int dtype, const void *x, int64_t n) {
    if (dtype == OM_F64) return sum_squares_f64(x, n);
    if (dtype == OM_F32) return sum_squares_f32(x, n);
    float buf[STRIP];
    double sum = 0;
    for (int64_t i = 0; i < n; i += STRIP) {
        const int64_t len = strip_size(n - i);
        sum += sum_squares_f32(strip_in(dtype, (void *)(uintptr_t)x, i, len, buf), len);
    }
    return sum;
}

static double sum_powers(int dtype, const void *x, int64_t n, double ord) {
    float buf[STRIP];
    double sum = 0;
    for (int64_t i = 0; i < n; i += STRIP) {
        const int64_t len = strip_size(n - i);
        if (dtype == OM_F64) {
            const double *y = (const double *)x + i;
            for (int64_t j = 0; j < len; j++) sum += ord == 1 ? fabs(y[j]) : pow(fabs(y[j]), ord);
        } else {
            const float *y = strip_in(dtype, (void *)(uintptr_t)x, i, len, buf);
            for (int64_t j = 0; j < len; j++) sum += ord == 1 ? fabs((double)y[j]) : pow(fabs((double)y[j]), ord);
        }
    }
    return sum;
}

/* As integers, magnitudes order like numbers, with infinity and then NaN above all finite ones. */
static double max_abs(int dtype, const void *x, int64_t n) {
    if (dtype == OM_F64) {
        uint64_t top = 0;
        const uint64_t *u = x;
        for (int64_t i = 0; i < n; i++) {
            const uint64_t a = u[i] & 0x7fffffffffffffffu;
            top = a > top ? a : top;
        }
        double r;
        memcpy(&r, &top, sizeof r);
        return r;
    }
    float buf[STRIP];
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i += STRIP) {
        const int64_t len = strip_size(n - i);
        const float *y = strip_in(dtype, (void *)(uintptr_t)x, i, len, buf);
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < len; j++) {
            const uint32_t a = om_f32_bits(y[j]) & 0x7fffffffu;
            top = a > top ? a : top;
        }
    }
    return om_bits_f32(top);
}

static void axpby_f64(double *dst, const double *src, int64_t n, double a, double b) {
    if (b == 0) {
        for (int64_t i = 0; i < n; i++) dst[i] = a * src[i]; /* not b * dst: a NaN in dst must not survive */
    } else {
        for (int64_t i = 0; i < n; i++) dst[i] = a * src[i] + b * dst[i];
    }
}

static void axpby(int dst_dtype, void *dst, int src_dtype, const void *src, int64_t n, double a, double b) {
    if (dst_dtype == OM_F64 && src_dtype == OM_F64) {
        axpby_f64(dst, src, n, a, b);
        return;
    }
    float xb[STRIP], yb[STRIP], out[STRIP];
    const float fa = (float)a, fb = (float)b;
    for (int64_t i = 0; i < n; i += STRIP) {
        const int64_t len = strip_size(n - i);
        const float *x = strip_in(src_dtype, (void *)(uintptr_t)src, i, len, xb);
        if (b == 0) {
            float *o = dst_dtype == OM_F32 ? (float *)dst + i : out;
#pragma omp simd
            for (int64_t j = 0; j < len; j++) o[j] = fa * x[j];
            strip_out(dst_dtype, dst, i, len, o);
        } else {
            const float *y = strip_in(dst_dtype, dst, i, len, yb);
#pragma omp simd
            for (int64_t j = 0; j < len; j++) out[j] = fa * x[j] + fb * y[j];
            strip_out(dst_dtype, dst, i, len, out);
        }
    }
}

extern const struct om_optim_kernels OM_ISA_NAME(om_optim);
const struct om_optim_kernels OM_ISA_NAME(om_optim) = {
    adam_f32,        adam_f64,        sgd_f32,     sgd_f64,    lamb_direction_f32, lamb_direction_f64,
    lamb_update_f32, lamb_update_f64, sum_squares, sum_powers, max_abs,            axpby,
};
