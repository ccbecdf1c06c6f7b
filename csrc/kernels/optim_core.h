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

static double CORE(sum_squares)(const T *x, int64_t n) {
    double acc[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
#pragma omp simd
        for (int j = 0; j < 16; j++) acc[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i < n; i++, j++) acc[j] += (double)x[i] * (double)x[i];
    for (int w = 8; w; w /= 2)
        for (int j = 0; j < w; j++) acc[j] += acc[j + w];
    return acc[0];
}

/* d = directions as computed; counts those that are not finite */
static int64_t CORE(lamb_moments_core)(const T *restrict p, const T *restrict g, T *restrict m, T *restrict v, T *restrict d, int64_t n,
                                       const CORE(om_lamb) * k) {
    const CORE(om_lamb) c = *k;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) d[i] = CORE(om_lamb_moments)(&c, p[i], g[i], &m[i], &v[i]);
    T worst = 0; /* x - x is 0 for every finite x and NaN otherwise; NaN sticks */
#pragma omp simd reduction(+ : worst)
    for (int64_t i = 0; i < n; i++) worst += d[i] - d[i];
    int64_t bad = 0;
    if (worst == 0) return 0;
    for (int64_t i = 0; i < n; i++) bad += !(d[i] - d[i] == 0);
    return bad;
}

static void CORE(lamb_direction_core)(const T *restrict p, const T *restrict m, const T *restrict v, T *restrict d, int64_t n,
                                      const CORE(om_lamb) * k) {
    const CORE(om_lamb) c = *k;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) d[i] = CORE(om_lamb_direction)(&c, p[i], m[i], v[i]);
}

/* p -= rate d where the result is finite; d becomes the change made */
static void CORE(lamb_apply_core)(T *restrict p, T *restrict d, int64_t n, T rate) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const T delta = -rate * d[i], q = p[i] + delta;
        const int finite = q - q == 0;
        p[i] = finite ? q : p[i];
        d[i] = finite ? delta : (T)0;
    }
}

#undef CORE
#undef CORE_CAT
#undef CORE_CAT_
