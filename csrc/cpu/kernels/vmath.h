/* vmath.h - elementary functions of one float or double, written so that a loop around them vectorises.
 *
 * f32: branch-free polynomials (own least-maximum fits; the error of each fit stands beside it), within 1-3 ulp of the
 * exact result, right for NaN, infinities, signed zeros and subnormal arguments. Rounding to an integer is done by
 * adding and subtracting 1.5 * 2^23: it needs no instruction beyond SSE2 and no compiler flag here may reassociate it
 * away. Conditions are selections of values already computed, never of stores.
 * On a GPU (__CUDACC__) sigmoid, silu, tanh, gelu, gelu_tanh and their gradients are made of its powers of two and
 * reciprocals instead (below, "on a GPU"): chains are limited by the number of instructions there.
 * f64: libm, for exactness; tests compare with 1e-10.
 * i64: what integer operators need beyond C, total (no trap on zero divisors or on the most negative number).
 *
 * sin, cos: reduced in double by pi/2 in two parts, exact to |x| < 2^20; beyond that the caller's loop must use libm
 * (VMATH_TRIG_MAX).
 */
#ifndef OM_VMATH_H
#define OM_VMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define VM static __device__ __forceinline__
#define VM_FMA(a, b, c) fmaf(a, b, c) /* strip programs are compiled without contraction (cuda/strip_compiled.h) */
#else
#define VM static inline __attribute__((always_inline))
#define VM_FMA(a, b, c) ((a) * (b) + (c)) /* one instruction where the processor has it */
#endif

VM int32_t vm_int(float x) { int32_t i; memcpy(&i, &x, 4); return i; }
VM float vm_flt(int32_t i) { float x; memcpy(&x, &i, 4); return x; }
VM int64_t vm_int64(double x) { int64_t i; memcpy(&i, &x, 8); return i; }
VM double vm_dbl(int64_t i) { double x; memcpy(&x, &i, 8); return x; }

/* 2^n, -127 < n < 128; anything where NaN follows */
VM float vm_pow2(int32_t n) { return vm_flt((int32_t)((uint32_t)(n + 127) << 23)); }

/* c ? a : b by bits: never a branch, so a loop with many of them still vectorises */
VM float vm_pick(int32_t c, float a, float b) {
    const int32_t m = -(c != 0);
    return vm_flt((vm_int(a) & m) | (vm_int(b) & ~m));
}
/* x within [lo, hi], NaN stays. By bits: of `x > hi ? hi : ...` the compiler makes a copy of all that follows for the
 * constant, and a vector loop then computes every copy under masks (gelu_tanh_grad and silu_grad took three to six
 * times as long). */
VM float vm_clamp(float x, float lo, float hi) {
#if defined(__CUDACC__)
    return x > hi ? hi : x < lo ? lo : x; /* two instructions */
#else
    const float y = vm_pick(x > hi, hi, x);
    return vm_pick(y < lo, lo, y);
#endif
}
VM double vm_pick64(int64_t c, double a, double b) {
    const int64_t m = -(int64_t)(c != 0);
    return vm_dbl((vm_int64(a) & m) | (vm_int64(b) & ~m));
}

#define VM_MAGIC 12582912.0f            /* 1.5 * 2^23 */
#define VM_MAGIC64 6755399441055744.0   /* 1.5 * 2^52 */
#define VMATH_TRIG_MAX 1048576.0f

/* --- f32 ----------------------------------------------------------------------------------------- */

VM float fabs_f32(float x) { return fabsf(x); }
VM float sqrt_f32(float x) { return sqrtf(x); }
VM float floor_f32(float x) { return floorf(x); }
VM float ceil_f32(float x) { return ceilf(x); }
VM float rint_f32(float x) { return rintf(x); }
VM float trunc_f32(float x) { return truncf(x); }

/* e^r - 1 - r over r^2 for |r| <= ln 2 / 2; relative error of e^r 3.2e-9 */
VM float vm_exp_poly(float r) {
    float p = VM_FMA(0.00139508335f, r, 0.00836908828f);
    p = VM_FMA(p, r, 0.0416662007f);
    p = VM_FMA(p, r, 0.166665172f);
    return VM_FMA(p, r, 0.5f);
}

/* n = x / ln 2 rounded, r = x - n ln 2; ln 2 in two parts so that n * hi is exact */
#define VM_EXP_REDUCE(x, n, r)                                                                      \
    const float n##_t = VM_FMA(x, 1.44269504f, VM_MAGIC);                                           \
    const int32_t n = vm_int(n##_t) - 0x4B400000;                                                   \
    const float n##_f = n##_t - VM_MAGIC;                                                           \
    const float r = VM_FMA(n##_f, 2.12194440e-4f, VM_FMA(-n##_f, 0.693359375f, x))

VM float exp_f32(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    VM_EXP_REDUCE(x, n, r);
    const float p = 1 + VM_FMA(r * r, vm_exp_poly(r), r);
    const int32_t h = n >> 1; /* two factors: results reach subnormals below and infinity above */
    return p * vm_pow2(h) * vm_pow2(n - h);
}

/* e^x for x known to lie in [-87, 87] */
VM float vm_exp_raw(float x) {
    VM_EXP_REDUCE(x, n, r);
    return (1 + VM_FMA(r * r, vm_exp_poly(r), r)) * vm_pow2(n);
}

/* e^x for x <= 0 (softmax): exactly 0 below -87, so masked scores (-inf) vanish. NaN stays. */
VM float vm_exp_neg(float x) {
    const float e = vm_exp_raw(x < -87.0f ? -87.0f : x);
    return x < -87.0f ? 0 : e;
}

VM float expm1_f32(float x) {
    const float keep = x;
    x = x > 89.0f ? 89.0f : x;
    x = x < -20.0f ? -20.0f : x;
    VM_EXP_REDUCE(x, n, r);
    const float p = VM_FMA(r * r, vm_exp_poly(r), r);    /* e^r - 1 */
    const float t = vm_pow2(n - 1);   /* half of 2^n: n = 128 must not overflow early */
    const float e = 2 * VM_FMA(t, p, t - 0.5f);
    return keep == 0 ? keep : e; /* -0 */
}

VM float log_f32(float x) {
    const int32_t tiny = x < 1.17549435e-38f;
    const float s = vm_pick(tiny, x * 8388608.0f, x);
    const int32_t i = (int32_t)((uint32_t)vm_int(s) - 0x3F3504F3u);      /* sqrt(1/2): m in [sqrt(1/2), sqrt 2) */
    const float e = (float)((i >> 23) - 23 * tiny);
    const float f = vm_flt((i & 0x007FFFFF) + 0x3F3504F3) - 1;
    float p = VM_FMA(0.0674661075f, f, -0.116756485f); /* log(1 + f) = f - f^2/2 + f^3 p; relative error 7.5e-10 */
    p = VM_FMA(p, f, 0.118881742f);
    p = VM_FMA(p, f, -0.124055901f);
    p = VM_FMA(p, f, 0.142195508f);
    p = VM_FMA(p, f, -0.166679957f);
    p = VM_FMA(p, f, 0.200021187f);
    p = VM_FMA(p, f, -0.250000096f);
    p = VM_FMA(p, f, 0.333333126f);
    const float f2 = f * f;
    float r = VM_FMA(f * f2, p, -2.12194440e-4f * e);
    r = VM_FMA(-0.5f, f2, r);
    r = VM_FMA(0.693359375f, e, r + f);
    r = vm_pick((x > 3.40282347e38f) | (x != x), x, r);
    r = vm_pick(x == 0, -INFINITY, r);
    return vm_pick(x < 0, NAN, r);
}

VM float log1p_f32(float x) {
    const float u = 1 + x, c = x - (u - 1); /* what the rounding of u lost */
    const float r = log_f32(u) + c / u;
    const float s = vm_pick(u == 0, -INFINITY, r);
    return vm_pick((x > 3.40282347e38f) | (x == 0), x, s);
}

#if defined(__CUDACC__)
/* As the hardware has them: within 2 ulp and 1 ulp (PTX manual), infinities and NaN as by division, results below the
 * normal range 0. */
VM float vm_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VM float vm_rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define VM_QUOTIENT(a, b) ((a) * vm_rcp(b))
#else
#define VM_QUOTIENT(a, b) ((a) / (b))
#endif

VM float tanh_f32(float x) {
    const float a = fabsf(x), q = x * x;
    float p = VM_FMA(-0.00570498640f, q, 0.0206390861f); /* |x| <= 0.625: x + x^3 p(x^2), relative error 4.4e-9 */
    p = VM_FMA(p, q, -0.0537397154f);
    p = VM_FMA(p, q, 0.133314416f);
    p = VM_FMA(p, q, -0.333332807f);
    const float near = VM_FMA(x * q, p, x);
    const float e = vm_exp_raw(2 * vm_pick(a > 9.1f, 9.1f, a));
    const float far = copysignf(1 - VM_QUOTIENT(2.0f, e + 1), x);
    return a <= 0.625f ? near : far;
}

VM float erf_f32(float x) {
    const float a = fabsf(x), q = x * x;
    float p = VM_FMA(7.85402508e-05f, q, -0.000801024751f); /* |x| <= 1: x + x p(x^2), relative error 1.2e-9 */
    p = VM_FMA(p, q, 0.00518833452f);
    p = VM_FMA(p, q, -0.0268538161f);
    p = VM_FMA(p, q, 0.112835853f);
    p = VM_FMA(p, q, -0.376126258f);
    p = VM_FMA(p, q, 0.128379166f);
    const float near = VM_FMA(x, p, x);
    const float t = a > 4.0f ? 4.0f : a;
    float g = VM_FMA(0.000192425601f, t, -0.0030085328f); /* 1 < |x| <= 4: 1 - e^g(|x|), relative error 1.4e-9 */
    g = VM_FMA(g, t, 0.0220876242f);
    g = VM_FMA(g, t, -0.103640289f);
    g = VM_FMA(g, t, -0.63751705f);
    g = VM_FMA(g, t, -1.12747496f);
    g = VM_FMA(g, t, -0.00024471916f);
    const float far = copysignf(1 - vm_exp_raw(g), x);
    return a <= 1 ? near : a > 1 ? far : x; /* NaN */
}

/* s = 0: sin, 1: cos. |x| < VMATH_TRIG_MAX */
VM float vm_sincos(float x, int32_t s) {
    const double d = x, t = d * 0.63661977236758134 + VM_MAGIC64, n = t - VM_MAGIC64;
    const double r = (d - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
    const int32_t k = (int32_t)n + s;
    const float f = (float)r, q = f * f;
    /* 5.6e-12 */
    const float sn = f + f * q * (((2.71735901e-6f * q - 0.000198392349f) * q + 0.00833332908f) * q - 0.166666666f);
    /* 1.1e-10 */
    const float cs = 1 - 0.5f * q + q * q * ((2.44292121e-5f * q - 0.00138872889f) * q + 0.0416666453f);
    const float v = k & 1 ? cs : sn;
    return vm_flt((int32_t)((uint32_t)vm_int(v) ^ (uint32_t)(k & 2) << 30));
}
VM float sin_f32(float x) { const float y = vm_sincos(x, 0); return x == 0 ? x : y; }
VM float cos_f32(float x) { return vm_sincos(x, 1); }

VM float softplus_f32(float x) {
    const float e = log1p_f32(exp_f32(x));
    return vm_pick(x > 20, x, e);
}

#define VM_SQRT1_2 0.70710678118654752440
#define VM_GELU_C 0.79788456080286535588  /* sqrt(2 / pi) */
#define VM_INV_SQRT_2PI 0.39894228040143267794

#if !defined(__CUDACC__)
VM float sigmoid_f32(float x) { return 1 / (1 + exp_f32(-x)); }
VM float silu_f32(float x) { return x / (1 + exp_f32(-x)); }
VM float gelu_f32(float x) { return x * 0.5f * (1 + erf_f32(x * (float)VM_SQRT1_2)); }
VM float gelu_grad_f32(float dy, float x) {
    const float cdf = 0.5f * (1 + erf_f32(x * (float)VM_SQRT1_2));
    const float c = x > 13.0f ? 13.0f : x < -13.0f ? -13.0f : x; /* beyond, the density is below 1e-36 */
    const float pdf = vm_exp_raw(-0.5f * c * c) * (float)VM_INV_SQRT_2PI;
    return dy * VM_FMA(c, pdf, cdf);
}
/* x/2 (1 + tanh u) = x / (1 + e^-2u): no cancellation on the negative side */
VM float gelu_tanh_f32(float x) {
    const float u = (float)(2 * VM_GELU_C) * VM_FMA(0.044715f * x * x, x, x);
    return x / (1 + exp_f32(-u));
}
VM float gelu_tanh_grad_f32(float dy, float x) {
    const float c = vm_clamp(x, -9.9f, 9.9f); /* beyond, s (1 - s) is below 1e-36; e^85 is a number */
    const float u = (float)(2 * VM_GELU_C) * VM_FMA(0.044715f * c * c, c, c);
    const float e = vm_exp_raw(-u), s = 1 / (1 + e), du = (float)(2 * VM_GELU_C) * VM_FMA(3 * 0.044715f * c, c, 1);
    return dy * VM_FMA(c * (e * s) * s, du, s); /* e s = 1 - s, without cancellation */
}
VM float silu_grad_f32(float dy, float x) {
    const float c = vm_clamp(x, -87.0f, 87.0f), e = vm_exp_raw(-c), s = 1 / (1 + e);
    return dy * s * VM_FMA(c, e * s, 1); /* e s = 1 - s, without cancellation */
}

#else /* on a GPU */
/* e^-x = 2^hi (1 + lo): hi is rounded, lo is what that has left over, by ln 2 in two parts. x is a number. */
#define VM_EXP_PARTS(x, hi, lo)                                                                     \
    const float hi = (x) * -1.44269504f;                                                            \
    const float lo = VM_FMA(hi, 1.90465421e-9f, VM_FMA(hi, -0.693147182f, -(x)))

VM float vm_sigmoid4(float x) { /* 4 / (1 + e^-x), so that results below the normal range are not lost */
    const float c = vm_clamp(x, -200.0f, 200.0f); /* 2^hi is 0 or infinite beyond, lo of any size */
    VM_EXP_PARTS(c, hi, lo);
    return vm_rcp(VM_FMA(vm_ex2(hi), VM_FMA(lo, 0.25f, 0.25f), 0.25f));
}
VM float sigmoid_f32(float x) { return 0.25f * vm_sigmoid4(x); }
VM float silu_f32(float x) { return 0.25f * x * vm_sigmoid4(x); }
VM float silu_grad_f32(float dy, float x) {
    const float c = vm_clamp(x, -87.0f, 87.0f);
    VM_EXP_PARTS(c, hi, lo);
    const float p = vm_ex2(hi), e = VM_FMA(p, lo, p), s = vm_rcp(1 + e);
    return dy * s * VM_FMA(c, e * s, 1); /* e s = 1 - s, without cancellation */
}

/* log2 of the normal distribution's share above a >= 0, within 1.3e-7 + 4e-9 / share; beyond 5.6 it falls faster than
 * the share does, to -infinity. */
VM float vm_log2_above(float a) {
    float p = VM_FMA(-1.94895233e-06f, a, 2.85711449e-05f);
    p = VM_FMA(p, a, -0.000133790978f);
    p = VM_FMA(p, a, -0.000266319345f);
    p = VM_FMA(p, a, 0.0072366274f);
    p = VM_FMA(p, a, -0.0526194610f);
    p = VM_FMA(p, a, -0.459165931f);
    p = VM_FMA(p, a, -1.15111065f);
    return VM_FMA(p, a, -0.999999881f);
}
VM float vm_normal_share(float x) { /* below x: (1 + erf(x / sqrt 2)) / 2 */
    const float e = vm_ex2(vm_log2_above(fabsf(x)));
    return x < 0 ? e : 1 - e;
}
VM float gelu_f32(float x) { return x * vm_normal_share(x); }
VM float gelu_grad_f32(float dy, float x) {
    const float c = vm_clamp(x, -13.0f, 13.0f); /* beyond, the density is below 1e-36 */
    const float pdf = vm_ex2(VM_FMA(c * c, -0.721347520f, -1.32574806f)); /* e^(-c^2 / 2) / sqrt(2 pi) */
    return dy * VM_FMA(c, pdf, vm_normal_share(c));
}

/* e^-2u = 2^(x (T + T3 x^2)) */
#define VM_GELU_T ((float)(-2 * VM_GELU_C * 1.44269504088896340736))
#define VM_GELU_T3 ((float)(-2 * VM_GELU_C * 1.44269504088896340736 * 0.044715))
VM float gelu_tanh_f32(float x) {
    const float e = vm_ex2(x * VM_FMA(VM_GELU_T3, x * x, VM_GELU_T));
    return VM_QUOTIENT(x, 1 + e); /* 0 from e = 2^126 on: below 1.2e-37 */
}
VM float gelu_tanh_grad_f32(float dy, float x) {
    const float c = vm_clamp(x, -9.9f, 9.9f), q = c * c; /* beyond, s (1 - s) is below 1e-36; 2^123 is a number */
    const float e = vm_ex2(c * VM_FMA(VM_GELU_T3, q, VM_GELU_T)), s = vm_rcp(1 + e);
    const float du = VM_FMA((float)(6 * 0.044715 * VM_GELU_C), q, (float)(2 * VM_GELU_C));
    return dy * s * VM_FMA(c * du, e * s, 1); /* e s = 1 - s, without cancellation */
}
#endif

/* x^y = 2^(y log2 x) with log2 and the power of two in double: about 1 ulp. Special values as C's pow. */
VM float pow_f32(float x, float y) {
#if defined(__CUDACC__) || defined(OM_EMULATED) /* a thread that is alone may branch; the same bits as below */
    if (y == 2) return x * x;
    if (y == 3) return x * x * x;
    if (y == -1) return 1 / x;
#endif
    const double a = fabsf(x);
    const int64_t i = vm_int64(a) - 0x3FE6A09E667F3BCDll; /* sqrt(1/2) */
    const double m = vm_dbl((i & 0x000FFFFFFFFFFFFFll) + 0x3FE6A09E667F3BCDll);
    const double s = (m - 1) / (m + 1), q = s * s;
    double l = 0.26052899414249711 * q + 0.25943235257298647; /* log2 m = s l(s^2), relative error 2.6e-14 */
    l = l * q + 0.32070023410461956;
    l = l * q + 0.41219682728214124;
    l = l * q + 0.57707803030601623;
    l = l * q + 0.96179669388600009;
    l = l * q + 2.8853900817779445;
    double g = (double)(int32_t)(i >> 52) + s * l;
    g = vm_pick64(a > 3.5e38, INFINITY, g); /* infinity */
    g = vm_pick64(a == 0, -INFINITY, g);
    double e = (double)y * g;
    e = vm_pick64(e > 200, 200, e);
    e = vm_pick64(e < -200, -200, e);
    const double t = e + VM_MAGIC64, n = t - VM_MAGIC64, r = e - n;
    double p = 1.3263680587377497e-06 * r + 1.531008650181444e-05; /* 2^r, relative error 7.8e-13 */
    p = p * r + 0.00015403413412313997;
    p = p * r + 0.0013333450536415516;
    p = p * r + 0.0096181292261183424;
    p = p * r + 0.055504109412463434;
    p = p * r + 0.24022650695475825;
    p = p * r + 0.69314718054592039;
    p = p * r + 1.0000000000000269;
    float v = (float)(p * vm_dbl((int64_t)(((uint64_t)vm_int64(t) - (uint64_t)vm_int64(VM_MAGIC64) + 1023) << 52)));
    const float b = fabsf(y);
    const int32_t yi = (int32_t)vm_pick(b < 16777216.0f, y, 0); /* from 2^24 on every float is an even integer */
    const int32_t integer = (b >= 16777216.0f) | ((float)yi == y), odd = yi & integer & 1;
    v = vm_flt(vm_int(v) | ((vm_int(x) & INT32_MIN) & -odd));
    v = vm_pick((x < 0) & !integer & (a < 3.5e38), NAN, v);
    v = vm_pick((x != x) | (y != y), NAN, v);
    v = vm_pick((x == -1) & (b > 3.40282347e38f), 1, v);
    v = vm_pick(y == 2, x * x, v); /* exact cases: the same bits whether a power is a constant or one element of many */
    v = vm_pick((y == 0.5f) & (x > 0), sqrtf(x), v);
    v = vm_pick(y == -1, 1 / x, v);
    v = vm_pick(y == 3, x * x * x, v);
    return vm_pick((y == 0) | (x == 1), 1, v);
}

VM float fmod_f32(float x, float y) { return fmodf(x, y); }
VM float mod_f32(float x, float y) {
    const float m = fmodf(x, y);
    return m != 0 && (y < 0) != (m < 0) ? m + y : m;
}
VM float floor_div_f32(float x, float y) {
    if (y == 0) return x / y;
    const float m = fmodf(x, y), d = (x - m) / y - (m != 0 && (y < 0) != (m < 0));
    if (d == 0) return copysignf(0.0f, x / y);
    const float f = floorf(d);
    return d - f > 0.5f ? f + 1 : f;
}

/* --- f64 ------------------------------------------------------------------------------------------- */

VM double fabs_f64(double x) { return fabs(x); }
VM double sqrt_f64(double x) { return sqrt(x); }
VM double floor_f64(double x) { return floor(x); }
VM double ceil_f64(double x) { return ceil(x); }
VM double rint_f64(double x) { return rint(x); }
VM double trunc_f64(double x) { return trunc(x); }
VM double exp_f64(double x) { return exp(x); }
VM double expm1_f64(double x) { return expm1(x); }
VM double log_f64(double x) { return log(x); }
VM double log1p_f64(double x) { return log1p(x); }
VM double tanh_f64(double x) { return tanh(x); }
VM double sigmoid_f64(double x) { return 1 / (1 + exp(-x)); }
VM double silu_f64(double x) { return x / (1 + exp(-x)); }
VM double erf_f64(double x) { return erf(x); }
VM double sin_f64(double x) { return sin(x); }
VM double cos_f64(double x) { return cos(x); }
VM double softplus_f64(double x) { return x > 20 ? x : log1p(exp(x)); }
VM double gelu_f64(double x) { return x * 0.5 * (1 + erf(x * VM_SQRT1_2)); }
VM double gelu_grad_f64(double dy, double x) {
    const double c = x > 38 ? 38 : x < -38 ? -38 : x; /* x * density = 0 at infinity */
    return dy * (0.5 * (1 + erf(x * VM_SQRT1_2)) + c * exp(-0.5 * c * c) * VM_INV_SQRT_2PI);
}
VM double gelu_tanh_f64(double x) { return 0.5 * x * (1 + tanh(VM_GELU_C * (x + 0.044715 * x * x * x))); }
VM double gelu_tanh_grad_f64(double dy, double x) {
    const double c = x > 40 ? 40 : x < -40 ? -40 : x;
    const double t = tanh(VM_GELU_C * (c + 0.044715 * c * c * c)), du = VM_GELU_C * (1 + 3 * 0.044715 * c * c);
    return dy * (0.5 * (1 + t) + 0.5 * c * (1 - t * t) * du);
}
VM double silu_grad_f64(double dy, double x) {
    const double s = 1 / (1 + exp(-x)), c = x < -740 ? -740 : x > 740 ? 740 : x;
    return dy * s * (1 + c * (1 - s));
}
VM double pow_f64(double x, double y) { return y == 2 ? x * x : pow(x, y); }
VM double fmod_f64(double x, double y) { return fmod(x, y); }
VM double mod_f64(double x, double y) {
    const double m = fmod(x, y);
    return m != 0 && (y < 0) != (m < 0) ? m + y : m;
}
VM double floor_div_f64(double x, double y) {
    if (y == 0) return x / y;
    const double m = fmod(x, y), d = (x - m) / y - (m != 0 && (y < 0) != (m < 0));
    if (d == 0) return copysign(0.0, x / y);
    const double f = floor(d);
    return d - f > 0.5 ? f + 1 : f;
}

/* --- i64: zero divisors give 0; the quotient of the most negative number by -1 wraps ------------------ */

VM int64_t vm_neg(int64_t x) { return (int64_t)(0 - (uint64_t)x); }
VM int64_t div_i64(int64_t x, int64_t y) { return y == 0 ? 0 : y == -1 ? vm_neg(x) : x / y; }
VM int64_t fmod_i64(int64_t x, int64_t y) { return y == 0 || y == -1 ? 0 : x % y; }
VM int64_t mod_i64(int64_t x, int64_t y) {
    const int64_t m = fmod_i64(x, y);
    return m != 0 && (m < 0) != (y < 0) ? m + y : m;
}
VM int64_t floor_div_i64(int64_t x, int64_t y) {
    return y == 0 ? 0 : y == -1 ? vm_neg(x) : x / y - (x % y != 0 && (x < 0) != (y < 0));
}
VM int64_t pow_i64(int64_t x, int64_t y) { /* wraps; a negative power of anything but 1 and -1 is 0 */
    if (y < 0) return x == 1 ? 1 : x == -1 ? (y & 1 ? -1 : 1) : 0;
    uint64_t r = 1, b = (uint64_t)x;
    for (uint64_t e = (uint64_t)y; e; e >>= 1, b *= b)
        if (e & 1) r *= b;
    return (int64_t)r;
}

#endif
