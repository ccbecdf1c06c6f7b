/* cuda/kernel.h - what every .cu of the graph engine begins with: loads, stores, conversions, reductions over a warp
 * and a block, Philox. Compiled by nvcc for the GPU and, after emulate.h, by a C++ compiler for the tests.
 *
 * Memory is reached by ld and st alone: the emulation holds them to the ranges that the launch has declared. Shared
 * memory is dynamic. Sums have a fixed order: the same bits every time.
 */
#ifndef OM_CUDA_KERNEL_H
#define OM_CUDA_KERNEL_H

#include "cuda/params.h"
#include "ortmodule.h"

#if !defined(OM_EMULATED)
#define EXPORT(threads) extern "C" __global__ void __launch_bounds__(threads)
#define PARAM(type) const __grid_constant__ type
#define FN static __device__ __forceinline__
#define FN_MEMBER __device__ __forceinline__
#define SHARED(name) extern __shared__ __align__(16) char name[]
#define touch(p, size, write) ((void)0)
template <class T> FN T shuffle(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FN float bits_f32(uint32_t u) { return __uint_as_float(u); }
FN uint32_t f32_bits(float x) { return __float_as_uint(x); }
FN float f16_in(uint16_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
FN uint16_t f16_out(float x) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
#else
#include "graph/half.h"
#define FN static inline
#define FN_MEMBER inline
FN float bits_f32(uint32_t u) { return om_bits_f32(u); }
FN uint32_t f32_bits(float x) { return om_f32_bits(x); }
FN float f16_in(uint16_t h) { return om_f16_to_f32(h); }
FN uint16_t f16_out(float x) { return om_f32_to_f16(x); }
#endif

#include "cpu/kernels/vmath.h"

/* --- memory and element types ------------------------------------------------------------------------- */

struct bf16 { uint16_t u; };
struct f16 { uint16_t u; };

template <class T> FN T ld(const T *p) {
    touch(p, sizeof(T), 0);
    return *p;
}
template <class T> FN void st(T *p, T x) {
    touch(p, sizeof(T), 1);
    *p = x;
}

FN float bf16_in(uint16_t h) { return bits_f32((uint32_t)h << 16); }
FN uint16_t bf16_out(float x) {
    const uint32_t u = f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* A float element in the type it is computed in, and back. */
template <class S> struct wide;
template <> struct wide<float> { typedef float type; };
template <> struct wide<double> { typedef double type; };
template <> struct wide<bf16> { typedef float type; };
template <> struct wide<f16> { typedef float type; };
#define WIDE typename wide<S>::type
FN float in(float x) { return x; }
FN double in(double x) { return x; }
FN float in(bf16 x) { return bf16_in(x.u); }
FN float in(f16 x) { return f16_in(x.u); }
FN void out(float *p, float x) { st(p, x); }
FN void out(double *p, double x) { st(p, x); }
FN void out(bf16 *p, float x) {
    const bf16 y = {bf16_out(x)};
    st(p, y);
}
FN void out(f16 *p, float x) {
    const f16 y = {f16_out(x)};
    st(p, y);
}
template <class S> FN WIDE at(const char *p, int64_t i) { return in(ld((const S *)p + i)); }
template <class S> FN void put(char *p, int64_t i, WIDE x) { out((S *)p + i, x); }

/* Any float dtype, told at run time. */
FN double float_at(const char *p, int dtype, int64_t i) {
    switch (dtype) {
    case OM_F64: return ld((const double *)p + i);
    case OM_BF16: return in(ld((const bf16 *)p + i));
    case OM_F16: return in(ld((const f16 *)p + i));
    default: return ld((const float *)p + i);
    }
}
FN void float_put(char *p, int dtype, int64_t i, double x) {
    switch (dtype) {
    case OM_F64: st((double *)p + i, x); break;
    case OM_BF16: out((bf16 *)p + i, (float)x); break;
    case OM_F16: out((f16 *)p + i, (float)x); break;
    default: st((float *)p + i, (float)x);
    }
}

/* name_f32, name_f64, ...: body<element>(p) */
#define FLOATS(name, param, threads, body)                                                          \
    EXPORT(threads) om_k_##name##_f32(PARAM(param) p) { body<float>(p); }                        \
    EXPORT(threads) om_k_##name##_f64(PARAM(param) p) { body<double>(p); }                       \
    EXPORT(threads) om_k_##name##_bf16(PARAM(param) p) { body<bf16>(p); }                        \
    EXPORT(threads) om_k_##name##_f16(PARAM(param) p) { body<f16>(p); }

FN float exp_of(float x) { return exp_f32(x); }
FN double exp_of(double x) { return exp(x); }
FN float log_of(float x) { return log_f32(x); }
FN double log_of(double x) { return log(x); }
FN float sqrt_of(float x) { return sqrtf(x); }
FN double sqrt_of(double x) { return sqrt(x); }
FN float inf_of(float) { return INFINITY; }
FN double inf_of(double) { return (double)INFINITY; }

/* --- reductions ------------------------------------------------------------------------------------------ */

struct op_sum { template <class T> static FN_MEMBER T of(T a, T b) { return a + b; } };
struct op_max { template <class T> static FN_MEMBER T of(T a, T b) { return b > a ? b : a; } };

template <class OP, class T> FN T warp_all(T x) {
    for (int m = 16; m; m >>= 1) x = OP::of(x, shuffle(x, m));
    return x;
}
/* Over the block, to every thread; `none` changes nothing; sh: 32 of T. All threads must come. */
template <class OP, class T> FN T block_all(T x, T none, T *sh) {
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = warp_all<OP>(x);
    __syncthreads();
    if (!lane) sh[warp] = x;
    __syncthreads();
    return warp_all<OP>(lane < blockDim.x >> 5 ? sh[lane] : none);
}

/* --- random words: philox.h's om_philox_at ----------------------------------------------------------------- */

FN uint32_t philox_at(uint64_t seed, uint64_t stream, uint64_t index) {
    const uint64_t counter = index / 64 * 16 + index % 16;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = (uint32_t)stream,
             c3 = (uint32_t)(stream >> 32);
    for (int r = 0; r < 10; r++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1, c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const uint32_t word = (uint32_t)(index / 16 % 4); /* an indexed array would lie in memory */
    return word < 2 ? word ? c1 : c0 : word == 2 ? c2 : c3;
}

/* --- faults -------------------------------------------------------------------------------------------------- */

FN void fault_note(om_gpu_fault *f, uint32_t site, uint32_t kind, int64_t value, int64_t position, int64_t limit) {
    touch(f, sizeof *f, 1);
    while (atomicExch(&f->busy, 1u)) continue;
    __threadfence();
    volatile om_gpu_fault *v = f;
    if (!v->kind || (v->site == site && position < v->position)) {
        v->site = site, v->value = value, v->position = position, v->limit = limit;
        v->kind = kind;
    }
    __threadfence();
    atomicExch(&f->busy, 0u);
}

FN int64_t index_at(const char *p, int wide_index, int64_t i) {
    return wide_index ? ld((const int64_t *)p + i) : (int64_t)ld((const int32_t *)p + i);
}

#endif
