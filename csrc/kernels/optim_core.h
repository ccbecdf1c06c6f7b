/* optim_core.h - inner loops of optim.k.c for one computing type; included once with T = float and once with double.
 * Sums run in 16 fixed double lanes, so they do not depend on the width of the machine's vectors. */
#define CORE_CAT_(a, b) a##_##b
#define CORE_CAT(a, b) CORE_CAT_(a, b)
#define CORE(name) CORE_CAT(name, S)

static void CORE(adam_core)(T *restrict p, const T *restrict g, T *restrict m, T *restrict v, int64_t n, const CORE(om_adam) * k) {
    const CORE(om_adam) c = *k;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] = CORE(om_adam_at)(&c, p[i], g[i], &m[i], &v[i]);
}

static void CORE(sgd_core)(T *restrict p, const T *restrict g, T *restrict m, int64_t n, const CORE(om_sgd) * k) {
    const CORE(om_sgd) c = *k;
    if (!c.use_buf) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) p[i] = p[i] - c.lr * (c.inv_scale * g[i] + c.l2 * p[i]);
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

/* 32 lanes of doubles; whatever the width of the machine's vectors, lane j sums the same elements. (Vectors wider than the
 * machine's would be simpler, but gcc keeps them in memory.) */
static double CORE(sum_squares)(const T *x, int64_t n) {
    acc_vec acc[32 / ACC_WIDTH];
    memset(acc, 0, sizeof acc);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
#pragma GCC unroll 16
        for (int j = 0; j < 32 / ACC_WIDTH; j++) {
            const acc_vec z = CORE(widen)(x + i + ACC_WIDTH * j);
            acc[j] += z * z;
        }
    double lane[32], sum = 0;
    memcpy(lane, acc, sizeof lane);
    for (int w = 16; w; w /= 2)
        for (int j = 0; j < w; j++) lane[j] += lane[j + w];
    for (; i < n; i++) sum += (double)x[i] * (double)x[i];
    return lane[0] + sum;
}

/* New moments and direction into m1, v1, d; false when a direction is not finite. */
static bool CORE(lamb_moments_core)(const T *restrict p, const T *restrict g, const T *restrict m, const T *restrict v, T *restrict m1,
                                    T *restrict v1, T *restrict d, int64_t n, const CORE(om_lamb) * k) {
    const CORE(om_lamb) c = *k;
    T worst = 0; /* x - x is 0 for every finite x and NaN otherwise; NaN sticks */
#pragma omp simd reduction(+ : worst)
    for (int64_t i = 0; i < n; i++) {
        d[i] = CORE(om_lamb_moments)(&c, p[i], g[i], m[i], v[i], &m1[i], &v1[i]);
        worst += d[i] - d[i];
    }
    return worst == 0;
}

static void CORE(lamb_direction_core)(const T *restrict p, const T *restrict m, const T *restrict v, T *restrict d, int64_t n,
                                      const CORE(om_lamb) * k) {
    const CORE(om_lamb) c = *k;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) d[i] = CORE(om_lamb_direction)(&c, p[i], m[i], v[i]);
}

/* q = p - rate d, d = the change made; where q would not be finite: q = p and no change */
static void CORE(lamb_apply_core)(const T *restrict p, T *restrict d, T *restrict q, int64_t n, T rate) {
    T worst = 0;
#pragma omp simd reduction(+ : worst)
    for (int64_t i = 0; i < n; i++) {
        d[i] = -rate * d[i];
        q[i] = p[i] + d[i];
        worst += q[i] - q[i];
    }
    if (worst == 0) return;
    for (int64_t i = 0; i < n; i++)
        if (!(q[i] - q[i] == 0)) q[i] = p[i], d[i] = 0;
}

#undef CORE
#undef CORE_CAT
#undef CORE_CAT_
