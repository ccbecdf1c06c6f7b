/* optim_core.h - inner loops of optim.k.c for one computing type; included once with T = float and once with double.
 * sum_squares gives the same bits on every instruction set (see squares_add); LAMB's sums of a strip run in T and do
 * not. */
#define CORE_CAT_(a, b) a##_##b
#define CORE_CAT(a, b) CORE_CAT_(a, b)
#define CORE(name) CORE_CAT(name, S)

static void CORE(adam_core)(T *restrict p, const T *restrict g, T *restrict m, T *restrict v, int64_t n,
                            const CORE(om_adam) * k) {
    const CORE(om_adam) c = *k;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] = CORE(om_adam_at)(&c, p[i], g[i], &m[i], &v[i]);
}

static void CORE(sgd_core)(T *restrict p, const T *restrict g, T *restrict m, int64_t n, const CORE(om_sgd) * k) {
    const CORE(om_sgd) c = *k;
    if (!c.use_buf) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) p[i] = p[i] - c.lr * (c.inv_scale * g[i] + c.l2 * (c.l2 != 0 ? p[i] : 0));
    } else if (c.nesterov) {
        CORE(om_sgd) on = c;
        on.nesterov = 1;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) p[i] = CORE(om_sgd_at)(&on, p[i], g[i], &m[i]);
    } else {
        CORE(om_sgd) off = c;
        off.nesterov = 0;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) p[i] = CORE(om_sgd_at)(&off, p[i], g[i], &m[i]);
    }
}

/* Sums of squares run in 32 lanes of doubles: whatever the width of the machine's vectors, lane j sums the same
 * elements. (Vectors wider than the machine's would be simpler, but gcc keeps them in memory.) */
static inline void CORE(squares_add)(squares *q, const T *x, int64_t n) { /* n: a multiple of 32 */
    for (int64_t i = 0; i < n; i += 32)
#pragma GCC unroll 16
        for (int j = 0; j < 32 / ACC_WIDTH; j++) {
            const acc_vec z = CORE(widen)(x + i + ACC_WIDTH * j);
            q->acc[j] += z * z;
        }
}

static double CORE(sum_squares)(const T *x, int64_t n) {
    squares q;
    squares_clear(&q);
    /* four places at once (one stream alone does not fill the memory's queue), then what is left */
    const int64_t quarter = n / 512 * 128, whole = n / 32 * 32;
    for (int64_t i = 0; i < quarter; i += 128)
        for (int j = 0; j < 4; j++) CORE(squares_add)(&q, x + j * quarter + i, 128);
    CORE(squares_add)(&q, x + 4 * quarter, whole - 4 * quarter);
    double rest = 0;
    for (int64_t i = whole; i < n; i++) rest += (double)x[i] * (double)x[i];
    return squares_sum(&q) + rest;
}

/* Moments in place, gradient g -> direction d (g itself or a buffer); m0, v0 = the old moments; adds the sums of p^2
 * and d^2 to sum. A strip's sums run in T inside the loop, where the divisions hide them; when one of them is not
 * finite or so small that squares may have vanished, they are made again in f64. An element whose direction is not
 * finite keeps its moments and gets direction 0 and skip[i] = 1; true when there was one. */
static bool CORE(lamb_moments_core)(const T *restrict p, const T *g, T *d, T *restrict m, T *restrict v, T *restrict m0,
                                    T *restrict v0, int64_t n, const CORE(om_lamb) * k, double sum[2], uint8_t *skip) {
    const CORE(om_lamb) c = *k;
    T p2 = 0, d2 = 0;
#pragma omp simd reduction(+ : p2, d2)
    for (int64_t i = 0; i < n; i++) {
        m0[i] = m[i], v0[i] = v[i];
        const T di = CORE(om_lamb_moments)(&c, p[i], g[i], m[i], v[i], &m[i], &v[i]);
        p2 += p[i] * p[i];
        d2 += di * di;
        d[i] = di;
    }
    const T small = (T)1e-30;
    if (isfinite(p2) && isfinite(d2) && p2 > small && d2 > small) {
        sum[0] += (double)p2, sum[1] += (double)d2;
        return false;
    }
    bool any = false;
    for (int64_t i = 0; i < n; i++) {
        skip[i] = !(d[i] - d[i] == 0);
        any |= skip[i];
        if (skip[i]) d[i] = 0, m[i] = m0[i], v[i] = v0[i];
    }
    sum[0] += CORE(sum_squares)(p, n);
    sum[1] += CORE(sum_squares)(d, n);
    return any;
}

static void CORE(lamb_direction_core)(const T *restrict p, const T *restrict m, const T *restrict v, T *restrict d,
                                      int64_t n, const CORE(om_lamb) * k) {
    const CORE(om_lamb) c = *k;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) d[i] = CORE(om_lamb_direction)(&c, p[i], m[i], v[i]);
}

/* q = p - rate d, delta = the change made; where q would not be finite: q = p and no change */
static void CORE(lamb_apply_core)(const T *restrict p, const T *restrict d, T *restrict delta, T *restrict q, int64_t n,
                                  T rate) {
    T worst = 0;
#pragma omp simd reduction(+ : worst)
    for (int64_t i = 0; i < n; i++) {
        delta[i] = -rate * d[i];
        q[i] = p[i] + delta[i];
        worst += q[i] - q[i];
    }
    if (worst == 0) return;
    for (int64_t i = 0; i < n; i++)
        if (!(q[i] - q[i] == 0)) q[i] = p[i], delta[i] = 0;
}

#undef CORE
#undef CORE_CAT
#undef CORE_CAT_
