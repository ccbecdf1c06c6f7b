/* vec.h - the vector vocabulary of one compute type: a template, included once per type with OM_VEC_BITS = 32 or 64.
 *
 * Defines for that type, until the next inclusion replaces them:
 *   T       float or double                  VL      lanes in a vector of OM_VBYTES
 *   V, U, I vector of T, unsigned, signed    N(x)    x_f32 or x_f64: the name of this type's copy of a function
 * and the functions below. Storage may be narrower than T: `s` is the om_dtype of the bytes and must be a constant at
 * the call (everything here is inlined), so the conversions cost a load and nothing else when s is T itself.
 *
 * Vectors are GCC vector extensions: the same source is SSE2, NEON, AVX2 and AVX-512. Loads and stores go through
 * memcpy, which is an unaligned move.
 */
#ifndef OM_VEC_ONCE
#define OM_VEC_ONCE
#include "graph/half.h"
#include "cpu/kernels_isa.h"
#include "ortmodule.h"
#include <string.h>

#define OM_INLINE static inline __attribute__((always_inline))
#define OM_VEC_CAT_(a, b) a##_##b
#define OM_VEC_CAT(a, b) OM_VEC_CAT_(a, b)
#define N(name) OM_VEC_CAT(name, SUF)

/* Lists 0..n-1 through a macro of the lane number; for constant shuffle masks. */
#define OM_LANES2(F) F(0), F(1)
#define OM_LANES4(F) OM_LANES2(F), F(2), F(3)
#define OM_LANES8(F) OM_LANES4(F), F(4), F(5), F(6), F(7)
#define OM_LANES16(F) OM_LANES8(F), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#endif

#undef T
#undef V
#undef U
#undef I
#undef VL
#undef SUF
#undef TBITS
#undef OM_LANES
#undef STORE_T
#if OM_VEC_BITS == 32
#define T float
#define V vec_f32
#define U uvec_f32
#define I ivec_f32
#define SUF f32
#define STORE_T OM_F32
#define VL (OM_VBYTES / 4)
#if OM_VBYTES == 64
#define OM_LANES OM_LANES16
#elif OM_VBYTES == 32
#define OM_LANES OM_LANES8
#else
#define OM_LANES OM_LANES4
#endif
typedef float vec_f32 __attribute__((vector_size(OM_VBYTES)));
typedef uint32_t uvec_f32 __attribute__((vector_size(OM_VBYTES)));
typedef int32_t ivec_f32 __attribute__((vector_size(OM_VBYTES)));
typedef uint16_t hvec_f32 __attribute__((vector_size(OM_VBYTES / 2)));
#else
#define T double
#define V vec_f64
#define U uvec_f64
#define I ivec_f64
#define SUF f64
#define STORE_T OM_F64
#define VL (OM_VBYTES / 8)
#if OM_VBYTES == 64
#define OM_LANES OM_LANES8
#elif OM_VBYTES == 32
#define OM_LANES OM_LANES4
#else
#define OM_LANES OM_LANES2
#endif
typedef double vec_f64 __attribute__((vector_size(OM_VBYTES)));
typedef uint64_t uvec_f64 __attribute__((vector_size(OM_VBYTES)));
typedef int64_t ivec_f64 __attribute__((vector_size(OM_VBYTES)));
#endif

OM_INLINE V N(vload)(const T *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

OM_INLINE void N(vstore)(T *p, V v) { memcpy(p, &v, sizeof v); }

OM_INLINE V N(splat)(T x) { return x - (V){0}; } /* x - 0 is x, signed zeros included: no instruction */

/* m ? a : b, lane by lane; m is the result of a comparison. */
OM_INLINE V N(pick)(I m, V a, V b) { return (V)(((U)a & (U)m) | ((U)b & ~(U)m)); }

/* Element i of storage type s. */
OM_INLINE T N(get)(const void *p, int64_t i, int s) {
#if OM_VEC_BITS == 32
    if (s == OM_BF16) return om_bf16_to_f32(((const uint16_t *)p)[i]);
    if (s == OM_F16) return om_f16_to_f32(((const uint16_t *)p)[i]);
#endif
    (void)s;
    return ((const T *)p)[i];
}

OM_INLINE void N(put)(void *p, int64_t i, T x, int s) {
#if OM_VEC_BITS == 32
    if (s == OM_BF16) {
        ((uint16_t *)p)[i] = om_f32_to_bf16(x);
        return;
    }
    if (s == OM_F16) {
        ((uint16_t *)p)[i] = om_f32_to_f16(x);
        return;
    }
#endif
    (void)s;
    ((T *)p)[i] = x;
}

/* VL elements from element i on. */
OM_INLINE V N(vget)(const void *p, int64_t i, int s) {
#if OM_VEC_BITS == 32
    if (s == OM_BF16) {
        hvec_f32 h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        return (V)(__builtin_convertvector(h, U) << 16);
    }
    if (s == OM_F16) {
        hvec_f32 h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        U u = __builtin_convertvector(h, U), mag = u & 0x7fff;
        V v = (V)(mag << 13) * 0x1p112f;                 /* exact; subnormal halves become normal floats */
        U inf = (U)(mag >= 0x7c00) & 0x7f800000u;        /* inf and NaN keep their exponent */
        return (V)((U)v | inf | (u & 0x8000) << 16);
    }
#endif
    (void)s;
    return N(vload)((const T *)p + i);
}

/* the lanes F(0), F(1).. of a and, from VL on, of b */
#if defined(__clang__)
#define OM_SHUFFLE(a, b, F) __builtin_shufflevector(a, b, OM_LANES(F))
#else
#define OM_SHUFFLE(a, b, F) __builtin_shuffle(a, b, (U){OM_LANES(F)})
#endif

/* Transposes VL vectors in place: log2(VL) rounds, each swapping the off-diagonal blocks of size 1, 2, 4, ... */
#define OM_SWAP_LO(j, b) ((j) & (b) ? (j) - (b) + VL : (j))
#define OM_SWAP_HI(j, b) ((j) & (b) ? (j) + VL : (j) + (b))
#define OM_SWAP_ROUND(b, LO, HI)                                                                    \
    _Pragma("GCC unroll 16") for (int i_ = 0; i_ < VL; i_++) if (!(i_ & (b))) {                     \
        V lo_ = OM_SHUFFLE(r[i_], r[i_ + (b)], LO);                                                 \
        V hi_ = OM_SHUFFLE(r[i_], r[i_ + (b)], HI);                                                 \
        r[i_] = lo_;                                                                                \
        r[i_ + (b)] = hi_;                                                                          \
    }
#ifndef OM_VEC_SWAPS
#define OM_VEC_SWAPS
#define OM_LO1(j) OM_SWAP_LO(j, 1)
#define OM_HI1(j) OM_SWAP_HI(j, 1)
#define OM_LO2(j) OM_SWAP_LO(j, 2)
#define OM_HI2(j) OM_SWAP_HI(j, 2)
#define OM_LO4(j) OM_SWAP_LO(j, 4)
#define OM_HI4(j) OM_SWAP_HI(j, 4)
#define OM_LO8(j) OM_SWAP_LO(j, 8)
#define OM_HI8(j) OM_SWAP_HI(j, 8)
#endif
OM_INLINE void N(transpose)(V r[VL]) {
    OM_SWAP_ROUND(1, OM_LO1, OM_HI1)
#if OM_VBYTES * 8 / OM_VEC_BITS >= 4
    OM_SWAP_ROUND(2, OM_LO2, OM_HI2)
#endif
#if OM_VBYTES * 8 / OM_VEC_BITS >= 8
    OM_SWAP_ROUND(4, OM_LO4, OM_HI4)
#endif
#if OM_VBYTES * 8 / OM_VEC_BITS >= 16
    OM_SWAP_ROUND(8, OM_LO8, OM_HI8)
#endif
}
#undef OM_SWAP_ROUND
#undef OM_SWAP_LO
#undef OM_SWAP_HI

/* Sum and maximum of the lanes, pairwise in one order: lane j meets lane j ^ VL/2, then j ^ VL/4, ... */
#ifndef OM_VEC_XORS
#define OM_VEC_XORS
#define OM_XOR1(j) ((j) ^ 1)
#define OM_XOR2(j) ((j) ^ 2)
#define OM_XOR4(j) ((j) ^ 4)
#define OM_XOR8(j) ((j) ^ 8)
#endif
#if OM_VBYTES * 8 / OM_VEC_BITS == 16
#define OM_FOLD(STEP) STEP(OM_XOR8) STEP(OM_XOR4) STEP(OM_XOR2) STEP(OM_XOR1)
#elif OM_VBYTES * 8 / OM_VEC_BITS == 8
#define OM_FOLD(STEP) STEP(OM_XOR4) STEP(OM_XOR2) STEP(OM_XOR1)
#elif OM_VBYTES * 8 / OM_VEC_BITS == 4
#define OM_FOLD(STEP) STEP(OM_XOR2) STEP(OM_XOR1)
#else
#define OM_FOLD(STEP) STEP(OM_XOR1)
#endif
#define OM_STEP_SUM(X) v += OM_SHUFFLE(v, v, X);
#define OM_STEP_MAX(X)                                                                              \
    {                                                                                               \
        V o = OM_SHUFFLE(v, v, X);                                                                  \
        v = N(pick)(v > o, v, o);                                                                   \
    }
OM_INLINE T N(vsum)(V v) {
    OM_FOLD(OM_STEP_SUM)
    return v[0];
}

OM_INLINE T N(vmax)(V v) { /* NaN lanes: any result */
    OM_FOLD(OM_STEP_MAX)
    return v[0];
}
#undef OM_SHUFFLE
#undef OM_FOLD
#undef OM_STEP_SUM
#undef OM_STEP_MAX

/* The product every kernel is made of: acc[i][v] = sum over k < kc of a[i * ars + k * acs] * b[k * ldb + v * VL ..],
 * for mr <= OM_MR rows and nv <= OM_NV vectors, all in registers. mr, nv and one of ars, acs are constants at the call.
 * OM_MR x OM_NV accumulators + OM_NV + 1 registers. A small tile would wait for its own additions: it splits k into two
 * or four interleaved sums. The order of summation is fixed by (mr, nv, kc). A full tile fetches b `fetch` steps (a
 * constant; 0: not at all) before it multiplies by it, for a b that lies in L2. */
#ifndef OM_MR
#if OM_VBYTES == 64
#define OM_MR 8
#define OM_NV 3
#elif OM_VBYTES == 32
#define OM_MR 6
#define OM_NV 2
#elif defined(__aarch64__)
#define OM_MR 8
#define OM_NV 3
#else
#define OM_MR 4
#define OM_NV 2
#endif
#endif
OM_INLINE void N(micro)(int mr, int nv, int64_t kc, const T *restrict a, int64_t ars, int64_t acs, const T *restrict b,
                        int64_t ldb, int fetch, V acc[OM_MR][OM_NV]) {
    enum { FULL = OM_MR * OM_NV, LINES = OM_NV * OM_VBYTES / 64 };
    const int sets = mr * nv * 4 <= FULL ? 4 : mr * nv * 2 <= FULL ? 2 : 1;
    V part[4][OM_MR][OM_NV];
#pragma GCC unroll 4
    for (int s = 0; s < sets; s++)
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) part[s][i][v] = (V){0};
#define OM_MICRO_STEP(s)                                                                            \
    {                                                                                               \
        V bv[OM_NV];                                                                                \
        _Pragma("GCC unroll 4") for (int v = 0; v < nv; v++) bv[v] = N(vload)(b + (s)*ldb + v * VL); \
        _Pragma("GCC unroll 8") for (int i = 0; i < mr; i++)                                        \
            _Pragma("GCC unroll 4") for (int v = 0; v < nv; v++) part[s][i][v] += a[i * ars + (s)*acs] * bv[v]; \
    }
    for (int64_t n = kc / sets; n; n--, a += sets * acs, b += sets * ldb) {
        if (sets == 1 && fetch)
#pragma GCC unroll 4
            for (int i = 0; i < LINES; i++) __builtin_prefetch((const char *)(b + fetch * ldb) + i * 64);
        OM_MICRO_STEP(0)
        if (sets > 1) OM_MICRO_STEP(1)
        if (sets > 2) OM_MICRO_STEP(2)
        if (sets > 2) OM_MICRO_STEP(3)
    }
    for (int64_t n = kc % sets; n; n--, a += acs, b += ldb) OM_MICRO_STEP(0)
#undef OM_MICRO_STEP
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) {
            acc[i][v] = part[0][i][v];
            if (sets > 1) acc[i][v] += part[1][i][v];
            if (sets > 2) acc[i][v] += part[2][i][v] + part[3][i][v];
        }
}

/* dst[k * ld + i] = src[i * rs + k * cs] for i < w <= ld lanes and k < kc; lanes w..ld-1 become 0. Stores may run VL -
 * 1 elements past the end (the caller leaves room); later rows overwrite what earlier ones spilled. */
OM_INLINE void N(pack_strip)(T *restrict dst, int64_t ld, const void *src, int64_t w, int64_t kc, int64_t rs,
                             int64_t cs, int s) {
    int64_t k = 0;
    if (rs == 1 && w == ld) { /* lanes contiguous */
        int64_t full = ld / VL * VL;
        for (; k < kc; k++) {
            int64_t i = 0;
            for (; i < full; i += VL) N(vstore)(dst + k * ld + i, N(vget)(src, k * cs + i, s));
            for (; i < ld; i++) dst[k * ld + i] = N(get)(src, k * cs + i, s);
        }
        return;
    }
    if (cs == 1) { /* k contiguous: VL steps of k by VL lanes at a time */
        for (; k + VL <= kc; k += VL) {
            /* downwards: what spills into the next row is then rewritten */
            for (int64_t i0 = (ld - 1) / VL * VL; i0 >= 0; i0 -= VL) {
                V r[VL];
#pragma GCC unroll 16
                for (int i = 0; i < VL; i++) r[i] = i0 + i < w ? N(vget)(src, (i0 + i) * rs + k, s) : (V){0};
                N(transpose)(r);
#pragma GCC unroll 16
                for (int j = 0; j < VL; j++) N(vstore)(dst + (k + j) * ld + i0, r[j]);
            }
        }
    }
    for (; k < kc; k++)
        for (int64_t i = 0; i < ld; i++) dst[k * ld + i] = i < w ? N(get)(src, i * rs + k * cs, s) : 0;
}
