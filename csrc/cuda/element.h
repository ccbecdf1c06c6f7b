/* cuda/element.h - elements of tensors in CUDA kernels: loads, stores, storage types and the types they are computed
 * in. Read by nvcc, by NVRTC (strip_compiled.h) and, after emulate.h, by a C++ compiler for the tests.
 *
 * Memory is reached by ld and st alone: the emulation holds them to the ranges that the launch has declared.
 */
#ifndef OM_CUDA_ELEMENT_H
#define OM_CUDA_ELEMENT_H

#include <stdint.h>

#include "cuda/scalar.h"

#if !defined(OM_EMULATED)
#define EXPORT(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) /* threads, blocks at once */
#define PARAM(type) const __grid_constant__ type
#define FN_MEMBER __device__ __forceinline__
#define touch(p, size, write) ((void)0)
#else
#define FN_MEMBER inline
#endif

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
/* Between an element as it lies in memory and its class of a strip program. */
FN float strip_in(bf16 x) { return in(x); }
FN float strip_in(f16 x) { return in(x); }
template <class T> FN T strip_in(T x) { return x; }
FN void strip_out(bf16 *p, float x) { out(p, x); }
FN void strip_out(f16 *p, float x) { out(p, x); }
template <class T, class C> FN void strip_out(T *p, C x) { st(p, (T)x); }

template <class S> FN WIDE at(const char *p, int64_t i) { return in(ld((const S *)p + i)); }
template <class S> FN void put(char *p, int64_t i, WIDE x) { out((S *)p + i, x); }

#endif
