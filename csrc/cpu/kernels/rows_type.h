/* rows_type.h - the row kernels for one type: a template, included by rows.k.c with T, R(name), EXP and SQRT defined.
 *
 * Sums run over blocks of BLOCK elements, the four quarters of a block at once, each vectorised: that hides the latency
 * of additions; the blocks are added in double. So a sum is accurate however long the row and however narrow the
 * vectors, and depends on its length alone. exp is computed once per element.
 */

/* s += term(i) over a row; `term` is an expression of i. */
#define ROW_SUM(s, term)                                                                            \
    do {                                                                                            \
        double total_ = 0;                                                                          \
        for (int64_t b_ = 0; b_ < n; b_ += BLOCK) {                                                 \
            const int64_t q_ = (n - b_ < BLOCK ? n - b_ : BLOCK) / 4, e_ = n - b_ < BLOCK ? n : b_ + BLOCK; \
            T s0_ = 0, s1_ = 0, s2_ = 0, s3_ = 0;                                                   \
            _Pragma("omp simd reduction(+ : s0_, s1_, s2_, s3_)") for (int64_t i_ = b_; i_ < b_ + q_; i_++) { \
                { const int64_t i = i_; s0_ += (term); }                                            \
                { const int64_t i = i_ + q_; s1_ += (term); }                                       \
                { const int64_t i = i_ + 2 * q_; s2_ += (term); }                                   \
                { const int64_t i = i_ + 3 * q_; s3_ += (term); }                                   \
            }                                                                                       \
            for (int64_t i = b_ + 4 * q_; i < e_; i++) s0_ += (term);                               \
            total_ += ((double)s0_ + (double)s1_) + ((double)s2_ + (double)s3_);                    \
        }                                                                                           \
        s += (T)total_;                                                                             \
    } while (0)

static T R(row_max)(const T *x, int64_t n) { /* a NaN may be passed over: it reaches the result through e^x */
    const int64_t q = n / 4;
    const T *x1 = x + q, *x2 = x1 + q, *x3 = x2 + q;
    T a0 = (T)-INFINITY, a1 = a0, a2 = a0, a3 = a0;
    _Pragma("omp simd reduction(max : a0, a1, a2, a3)") for (int64_t i = 0; i < q; i++) {
        const T e0 = x[i], e1 = x1[i], e2 = x2[i], e3 = x3[i];
        a0 = e0 > a0 ? e0 : a0;
        a1 = e1 > a1 ? e1 : a1;
        a2 = e2 > a2 ? e2 : a2;
        a3 = e3 > a3 ? e3 : a3;
    }
    for (int64_t i = 4 * q; i < n; i++) a0 = x[i] > a0 ? x[i] : a0;
    a0 = a1 > a0 ? a1 : a0;
    a2 = a3 > a2 ? a3 : a2;
    return a2 > a0 ? a2 : a0;
}

static void R(softmax)(const void *px, void *py, int64_t n) {
    const T *x = px, m = R(row_max)(x, n);
    T *y = py;
    double sum = 0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = n - b < BLOCK ? n : b + BLOCK;
        T s = 0;
        SIMD_SUM(s) for (int64_t i = b; i < end; i++) {
            const T e = EXP(x[i] - m); /* a row of -inf: NaN, as torch */
            y[i] = e;
            s += e;
        }
        sum += (double)s;
    }
    const T r = (T)(1 / sum);
    SIMD for (int64_t i = 0; i < n; i++) y[i] *= r;
}

static void R(softmax_grad)(const void *pdy, const void *py, void *pdx, int64_t n) {
    const T *dy = pdy, *y = py;
    T *dx = pdx, d = 0;
    ROW_SUM(d, dy[i] * y[i]);
    SIMD for (int64_t i = 0; i < n; i++) dx[i] = (dy[i] - d) * y[i];
}

static void R(log_softmax)(const void *px, void *py, int64_t n) {
    const T *x = px, m = R(row_max)(x, n);
    T *y = py;
    double sum = 0;
    for (int64_t b = 0; b < n; b += BLOCK) {
        const int64_t end = n - b < BLOCK ? n : b + BLOCK;
        T s = 0;
        SIMD_SUM(s) for (int64_t i = b; i < end; i++) s += EXP(x[i] - m);
        sum += (double)s;
    }
    const T l = (T)log(sum);
    SIMD for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) - l;
}

static void R(log_softmax_grad)(const void *pdy, const void *py, void *pdx, int64_t n) {
    const T *dy = pdy, *y = py;
    T *dx = pdx, s = 0;
    ROW_SUM(s, dy[i]);
    SIMD for (int64_t i = 0; i < n; i++) dx[i] = dy[i] - EXP(y[i]) * s;
}

/* The same along an axis that is not the last: a tile of n <= OM_ROWS_COLS columns at a time, element (r, c) at r * ld
 * + c. */
#define EACH_ROW for (int64_t r = 0; r < len; r++, k += ld)
#define EACH_COL SIMD for (int64_t c = 0; c < n; c++)

static void R(column_max)(const T *x, int64_t len, int64_t ld, int64_t n, T *m) {
    int64_t k = 0;
    EACH_COL m[c] = (T)-INFINITY;
    EACH_ROW EACH_COL {
        const T e = x[k + c];
        m[c] = e > m[c] ? e : m[c];
    }
}

static void R(softmax_cols)(const void *px, const void *unused, void *py, int64_t len, int64_t ld, int64_t n) {
    const T *x = px;
    T *y = py, m[OM_ROWS_COLS];
    double s[OM_ROWS_COLS] = {0};
    int64_t k = 0;
    (void)unused;
    R(column_max)(x, len, ld, n, m);
    EACH_ROW EACH_COL {
        const T e = EXP(x[k + c] - m[c]);
        y[k + c] = e;
        s[c] += (double)e;
    }
    EACH_COL m[c] = (T)(1 / s[c]);
    k = 0;
    EACH_ROW EACH_COL y[k + c] *= m[c];
}

static void R(log_softmax_cols)(const void *px, const void *unused, void *py, int64_t len, int64_t ld, int64_t n) {
    const T *x = px;
    T *y = py, m[OM_ROWS_COLS], l[OM_ROWS_COLS];
    double s[OM_ROWS_COLS] = {0};
    int64_t k = 0;
    (void)unused;
    R(column_max)(x, len, ld, n, m);
    EACH_ROW EACH_COL s[c] += (double)EXP(x[k + c] - m[c]);
    for (int64_t c = 0; c < n; c++) l[c] = (T)log(s[c]);
    k = 0;
    EACH_ROW EACH_COL y[k + c] = (x[k + c] - m[c]) - l[c];
}

static void R(softmax_grad_cols)(const void *pdy, const void *py, void *pdx, int64_t len, int64_t ld, int64_t n) {
    const T *dy = pdy, *y = py;
    T *dx = pdx;
    double d[OM_ROWS_COLS] = {0};
    int64_t k = 0;
    EACH_ROW EACH_COL d[c] += (double)(dy[k + c] * y[k + c]);
    k = 0;
    EACH_ROW EACH_COL dx[k + c] = (dy[k + c] - (T)d[c]) * y[k + c];
}

static void R(log_softmax_grad_cols)(const void *pdy, const void *py, void *pdx, int64_t len, int64_t ld, int64_t n) {
    const T *dy = pdy, *y = py;
    T *dx = pdx;
    double s[OM_ROWS_COLS] = {0};
    int64_t k = 0;
    EACH_ROW EACH_COL s[c] += (double)dy[k + c];
    k = 0;
    EACH_ROW EACH_COL dx[k + c] = dy[k + c] - EXP(y[k + c]) * (T)s[c];
}
#undef EACH_ROW
#undef EACH_COL

static void R(layer_norm)(const void *px, const void *pw, const void *pb, double eps, void *py, void *pmean,
                          void *prstd, int64_t n) {
    const T *x = px, *w = pw, *b = pb;
    T *y = py, sum = 0, var = 0;
    ROW_SUM(sum, x[i]);
    const T mean = sum / (T)n;
    ROW_SUM(var, (x[i] - mean) * (x[i] - mean));
    const T rstd = 1 / SQRT(var / (T)n + (T)eps);
    if (w && b) { SIMD for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * w[i] + b[i]; }
    else if (w) { SIMD for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * w[i]; }
    else if (b) { SIMD for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd + b[i]; }
    else { SIMD for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd; }
    *(T *)pmean = mean;
    *(T *)prstd = rstd;
}

static void R(rms_norm)(const void *px, const void *pw, double eps, void *py, void *prstd, int64_t n) {
    const T *x = px, *w = pw;
    T *y = py, sum = 0;
    ROW_SUM(sum, x[i] * x[i]);
    const T rstd = 1 / SQRT(sum / (T)n + (T)eps);
    if (w) { SIMD for (int64_t i = 0; i < n; i++) y[i] = x[i] * rstd * w[i]; }
    else { SIMD for (int64_t i = 0; i < n; i++) y[i] = x[i] * rstd; }
    *(T *)prstd = rstd;
}

/* xhat = (x - mean) rstd, g = dy w:  dx = rstd (g - avg(g) - xhat avg(g xhat)),  dw += dy xhat,  db += dy */
static void R(layer_norm_grad)(const void *pdy, const void *px, const void *pw, const void *pmean, const void *prstd,
                               void *pdx, void *pdw, void *pdb, int64_t n) {
    const T *dy = pdy, *x = px, *w = pw, mean = *(const T *)pmean, rstd = *(const T *)prstd;
    T *dx = pdx, *dw = pdw, *db = pdb, g = 0, gx = 0;
    if (w) {
        ROW_SUM(g, dy[i] * w[i]);
        ROW_SUM(gx, dy[i] * w[i] * (x[i] - mean));
    } else {
        ROW_SUM(g, dy[i]);
        ROW_SUM(gx, dy[i] * (x[i] - mean));
    }
    if (dw) {
        SIMD for (int64_t i = 0; i < n; i++) {
            dw[i] += dy[i] * ((x[i] - mean) * rstd);
            db[i] += dy[i];
        }
    }
    const T a = g / (T)n, c = gx * rstd * rstd / (T)n;
    if (w) { SIMD for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] * w[i] - a - (x[i] - mean) * c); }
    else { SIMD for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] - a - (x[i] - mean) * c); }
}

/* g = dy w:  dx = rstd (g - x rstd^2 avg(g x)),  dw += dy x rstd */
static void R(rms_norm_grad)(const void *pdy, const void *px, const void *pw, const void *prstd, void *pdx, void *pdw,
                             int64_t n) {
    const T *dy = pdy, *x = px, *w = pw, rstd = *(const T *)prstd;
    T *dx = pdx, *dw = pdw, gx = 0;
    if (w) ROW_SUM(gx, dy[i] * w[i] * x[i]);
    else ROW_SUM(gx, dy[i] * x[i]);
    if (dw) { SIMD for (int64_t i = 0; i < n; i++) dw[i] += dy[i] * (x[i] * rstd); }
    const T c = gx * rstd * rstd / (T)n;
    if (w) { SIMD for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] * w[i] - x[i] * c); }
    else { SIMD for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] - x[i] * c); }
}
#undef ROW_SUM
