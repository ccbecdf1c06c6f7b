/* attention_wide.h - operands of attention's products in the compute type itself: what attention_type.h works on where
 * no instruction multiplies the tensors' own type. attention_pairs.h has the same functions over pairs of bf16.
 *
 * Both define, for c = a b and c = a^T b on tiles:
 *   LEFT, RIGHT          elements of a (m, k), rows, and of b (k, n) and of an a that is stored (k, m)
 *   terms(k), left_ld(w) rows of a RIGHT that hold k terms; elements of a LEFT row of w terms
 *   left_in, right_in    rows of a tensor as either; right_again: as RIGHT what already is LEFT; cols_in: transposed
 *   left_get, left_put   a vector of a LEFT
 *   tiles_turn           P and dS as product_flip takes them, dS as LEFT
 *   product, product_flip
 *   vexp                 e^x of softmax
 *   rows_out             sums back into rows of a tensor
 */
#undef LEFT
#undef RIGHT
#define LEFT T
#define RIGHT T
#undef ATTN_TARGET
#undef ATTN_BEGIN
#undef ATTN_END
#define ATTN_TARGET
#define ATTN_BEGIN()
#define ATTN_END()

static inline int64_t N(terms)(int64_t k) { return k; }
static inline int64_t N(left_ld)(int64_t w) { return N(pad)(w); }

/* e^x for x <= 0 (and a little above): 0 below the smallest normal number, NaN stays NaN. Error below 1.5 ulp. */
OM_INLINE V N(vexp)(V x) {
#if OM_VEC_BITS == 32
    const T low = -87.3f, log2e = 1.44269504f, ln2_hi = 0.693359375f, ln2_lo = -2.12194440e-4f, magic = 0x1.8p23f;
    enum { SHIFT = 23, BIAS = 127 };
#else
    const T low = -708.3, log2e = 1.4426950408889634, ln2_hi = 0x1.62e42fee00000p-1, ln2_lo = 0x1.a39ef35793c76p-33,
            magic = 0x1.8p52;
    enum { SHIFT = 52, BIAS = 1023 };
#endif
    V r = x * log2e + magic; /* the integer sits in the low bits */
    U n = (U)r;
    r -= magic;
    V f = x - r * ln2_hi - r * ln2_lo;
#if OM_VEC_BITS == 32
    V p = f * (1.0f / 5040) + 1.0f / 720;
#else
    V p = f * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    p = p * f + 1.0 / 39916800.0;
    p = p * f + 1.0 / 3628800.0;
    p = p * f + 1.0 / 362880.0;
    p = p * f + 1.0 / 40320.0;
    p = p * f + 1.0 / 5040.0;
    p = p * f + 1.0 / 720.0;
#endif
    p = p * f + (T)(1.0 / 120);
    p = p * f + (T)(1.0 / 24);
    p = p * f + (T)(1.0 / 6);
    p = p * f + (T)0.5;
    p = p * f + (T)1;
    p = p * f + (T)1;
    p *= (V)((n + BIAS) << SHIFT); /* bits of magic above the integer are shifted out */
    return (V)((U)p & ~(U)(I)(x < low)); /* whatever came out below `low` becomes 0 */
}

OM_INLINE T N(row_top)(V top) { return N(vmax)(top); }

/* --- small products ---------------------------------------------------------------------------------- */

/* c (mr, nv * VL) = or += a b; a (mr, kc) row-major, or with `flip` stored (kc, mr). */
OM_INLINE void N(product_tile)(int mr, int nv, bool flip, int64_t kc, const T *a, int64_t lda, const T *b, int64_t ldb,
                               T *c, int64_t ldc, bool add) {
    V acc[OM_MR][OM_NV];
    N(micro)(mr, nv, kc, a, flip ? 1 : lda, flip ? lda : 1, b, ldb, 0, acc);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) {
            T *p = c + i * ldc + v * VL;
            N(vstore)(p, add ? acc[i][v] + N(vload)(p) : acc[i][v]);
        }
}

#define ROWS(x)                                                                                     \
    case x:                                                                                         \
        if (wide) N(product_tile)(x, 2, flip, kc, a, lda, b, ldb, c, ldc, add);                     \
        else N(product_tile)(x, 1, flip, kc, a, lda, b, ldb, c, ldc, add);                          \
        break;
OM_INLINE void N(product_rows)(int64_t mr, bool wide, bool flip, int64_t kc, const T *a, int64_t lda, const T *b,
                               int64_t ldb, T *c, int64_t ldc, bool add) {
    switch (mr) {
        ROWS(1) ROWS(2) ROWS(3)
#if OM_MR > 4
        ROWS(4) ROWS(5)
#endif
#if OM_MR > 6
        ROWS(6) ROWS(7)
#endif
        ROWS(OM_MR)
    default: break;
    }
}
#undef ROWS

/* c (m, n) = or += a b with n a multiple of VL: a (m, kc) row-major; b (kc, n). */
static __attribute__((noinline)) void N(product)(int64_t m, int64_t n, int64_t kc, const T *a, int64_t lda, const T *b,
                                                 int64_t ldb, T *c, int64_t ldc, bool add) {
    for (int64_t j = 0; j < n; j += 2 * VL)
        for (int64_t i = 0; i < m; i += OM_MR)
            N(product_rows)
            (m - i < OM_MR ? m - i : OM_MR, n - j > VL, false, kc, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
             add);
}

/* c (m, n) += a^T b: a (kc, m) row-major. */
static __attribute__((noinline)) void N(product_flip)(int64_t m, int64_t n, int64_t kc, const T *a, int64_t lda,
                                                      const T *b, int64_t ldb, T *c, int64_t ldc) {
    for (int64_t j = 0; j < n; j += 2 * VL)
        for (int64_t i = 0; i < m; i += OM_MR)
            N(product_rows)
            (m - i < OM_MR ? m - i : OM_MR, n - j > VL, true, kc, a + i, lda, b + j, ldb, c + i * ldc + j, ldc, true);
}

/* --- operands ------------------------------------------------------------------------------------------- */

OM_INLINE void N(rows_in_as)(T *dst, int64_t ld, const void *src, int64_t n, int64_t w, int64_t rs, int64_t es, int s) {
    for (int64_t i = 0; i < n; i++) {
        int64_t k = 0;
        if (es == 1)
            for (; k + VL <= w; k += VL) N(vstore)(dst + i * ld + k, N(vget)(src, i * rs + k, s));
        for (; k < w; k++) dst[i * ld + k] = N(get)(src, i * rs + k * es, s);
        for (; k < ld; k++) dst[i * ld + k] = 0;
    }
}

/* Rows [t0, t0 + n) of head `at` as (n, ld), ld >= width a multiple of VL, zeros after the width. Where the tensor
 * already is such a matrix it is used as it stands. */
static const T *N(rows_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, T *buf, int64_t *ld) {
    int r = x->rank;
    int64_t w = x->dim[r - 1], rs = x->stride[r - 2], es = x->stride[r - 1];
    const void *src = elem(x, at + t0 * rs);
    if (x->dtype == STORE_T && es == 1 && w % VL == 0) {
        *ld = rs;
        return src;
    }
    *ld = N(pad)(w);
#if OM_VEC_BITS == 32
    if (x->dtype == OM_BF16) N(rows_in_as)(buf, *ld, src, n, w, rs, es, OM_BF16);
    else if (x->dtype == OM_F16) N(rows_in_as)(buf, *ld, src, n, w, rs, es, OM_F16);
    else
#endif
        N(rows_in_as)(buf, *ld, src, n, w, rs, es, STORE_T);
    return buf;
}

/* Rows [t0, t0 + n) transposed: (width, BC), zeros after n. */
static void N(cols_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, T *dst) {
    int r = x->rank;
    int64_t w = x->dim[r - 1], rs = x->stride[r - 2], es = x->stride[r - 1];
    const void *src = elem(x, at + t0 * rs);
#if OM_VEC_BITS == 32
    if (x->dtype == OM_BF16) N(pack_strip)(dst, BC, src, n, w, rs, es, OM_BF16);
    else if (x->dtype == OM_F16) N(pack_strip)(dst, BC, src, n, w, rs, es, OM_F16);
    else
#endif
        N(pack_strip)(dst, BC, src, n, w, rs, es, STORE_T);
}

static inline const T *N(left_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, T *buf, int64_t *ld) {
    return N(rows_in)(x, at, t0, n, buf, ld);
}

static inline const T *N(right_in)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, T *buf, int64_t *ld) {
    return N(rows_in)(x, at, t0, n, buf, ld);
}

static inline const T *N(right_again)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, const T *left,
                                      int64_t ldl, T *buf, int64_t *ld) {
    (void)x, (void)at, (void)t0, (void)n, (void)buf;
    *ld = ldl;
    return left;
}

OM_INLINE V N(left_get)(const T *p) { return N(vload)(p); }
OM_INLINE void N(left_put)(T *p, V v) { N(vstore)(p, v); }
OM_INLINE void N(tiles_turn)(int64_t n, int64_t c, const T *p, const T *ds, T *p_flip, T *ds_flip, T *left) {
    (void)n, (void)c, (void)p, (void)ds, (void)p_flip, (void)ds_flip, (void)left;
}

OM_INLINE void N(rows_out_as)(void *dst, int64_t n, int64_t w, int64_t rs, int64_t es, const T *src, int64_t ld,
                              int s) {
    for (int64_t i = 0; i < n; i++)
        if (es == 1)
            for (int64_t k = 0; k < w; k++) N(put)(dst, i * rs + k, src[i * ld + k], s);
        else
            for (int64_t k = 0; k < w; k++) N(put)(dst, i * rs + k * es, src[i * ld + k], s);
}

/* (n, ld) back into rows [t0, t0 + n) of head `at`, rounded to the tensor's type. */
static void N(rows_out)(const om_tensor *x, int64_t at, int64_t t0, int64_t n, const T *src, int64_t ld) {
    int r = x->rank;
    int64_t w = x->dim[r - 1], rs = x->stride[r - 2], es = x->stride[r - 1];
    void *dst = (void *)elem(x, at + t0 * rs);
#if OM_VEC_BITS == 32
    if (x->dtype == OM_BF16) N(rows_out_as)(dst, n, w, rs, es, src, ld, OM_BF16);
    else if (x->dtype == OM_F16) N(rows_out_as)(dst, n, w, rs, es, src, ld, OM_F16);
    else
#endif
        N(rows_out_as)(dst, n, w, rs, es, src, ld, STORE_T);
}
