/* taps_type.h - taps.k.c for one compute type (after vec.h). */

/* `nv` vectors from j on */
OM_INLINE void N(taps_block)(int nv, const T *from, const int64_t *at, const T *w, int64_t taps, T start, T *to) {
    V sum[8];
#pragma GCC unroll 8
    for (int v = 0; v < nv; v++) sum[v] = N(splat)(start);
    for (int64_t t = 0; t < taps; t++) {
        const T *f = from + at[t];
        const V by = N(splat)(w[t]);
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) sum[v] += by * N(vload)(f + v * VL);
    }
#pragma GCC unroll 8
    for (int v = 0; v < nv; v++) N(vstore)(to + v * VL, sum[v]);
}

static void N(taps_sum)(const void *from_, const int64_t *at, const void *w, int64_t taps, double start, void *to_,
                        int64_t n) {
    const T *from = from_;
    T *to = to_;
    int64_t j = 0;
    for (; n - j > 7 * VL; j += 8 * VL) N(taps_block)(8, from + j, at, w, taps, (T)start, to + j);
    for (; n - j > 3 * VL; j += 4 * VL) N(taps_block)(4, from + j, at, w, taps, (T)start, to + j);
    for (; j < n; j += VL) N(taps_block)(1, from + j, at, w, taps, (T)start, to + j);
}

/* `nt` taps at once: a vector of `by` is loaded once for all; what lies behind n counts nothing */
OM_INLINE void N(taps_rows)(int nt, const T *from, const int64_t *at, const T *by, int64_t n, double *lanes) {
    V sum[8];
#pragma GCC unroll 8
    for (int t = 0; t < nt; t++) sum[t] = (V){0};
    int64_t j = 0;
    for (; j + VL <= n; j += VL) {
        const V b = N(vload)(by + j);
#pragma GCC unroll 8
        for (int t = 0; t < nt; t++) sum[t] += b * N(vload)(from + at[t] + j);
    }
#pragma GCC unroll 8
    for (int t = 0; t < nt; t++) {
        T part[VL];
        N(vstore)(part, sum[t]);
        for (int i = 0; i < VL; i++) lanes[t * TAPS_LANES + i] += (double)part[i];
        for (int64_t i = j; i < n; i++) lanes[t * TAPS_LANES + i - j] += (double)(by[i] * from[at[t] + i]);
    }
}

static void N(taps_dot)(const void *from_, const int64_t *at, int64_t taps, const void *by_, int64_t n,
                        double *lanes) {
    enum { RUN = 128 * VL }; /* sums of a lane are in T up to 128 terms, in double above */
    for (int64_t j = 0; j < n; j += RUN) {
        const T *from = (const T *)from_ + j, *by = (const T *)by_ + j;
        const int64_t m = n - j < RUN ? n - j : RUN;
        int64_t t = 0;
        for (; t + 8 <= taps; t += 8) N(taps_rows)(8, from, at + t, by, m, lanes + t * TAPS_LANES);
        for (; t < taps; t++) N(taps_rows)(1, from, at + t, by, m, lanes + t * TAPS_LANES);
    }
}

static void N(taps_total)(const double *lanes, int64_t taps, void *to) {
    for (int64_t t = 0; t < taps; t++) {
        double sum = 0;
        for (int i = 0; i < VL; i++) sum += lanes[t * TAPS_LANES + i];
        ((T *)to)[t] = (T)sum;
    }
}
