/* cuda/kernel.h - what every .cu of the graph engine begins with: elements (element.h), elements whose dtype is known
 * at run time, reductions over a warp and a block. Compiled by nvcc for the GPU and, after emulate.h, by a C++ compiler
 * for the tests. Shared memory is dynamic. Sums have a fixed order: the same bits every time.
 */
#ifndef OM_CUDA_KERNEL_H
#define OM_CUDA_KERNEL_H

#include "cpu/kernels/vmath.h"
#include "cuda/element.h"
#include "cuda/params.h"
#include "ortmodule.h"

#if !defined(OM_EMULATED)
#define SHARED(name) extern __shared__ __align__(16) char name[]
template <class T> FN T shuffle(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FN uint32_t votes(bool x) { return __ballot_sync(0xffffffffu, x); } /* bit per lane of the warp */
FN int ones(uint32_t x) { return __popc(x); }
FN float exp2_of(float x) { return vm_ex2(x); } /* as the hardware has it */
#define IN_TURN() asm volatile("" ::: "memory") /* loads behind it wait: few are under way, few registers */
#else
FN uint32_t votes(bool x) { return emu_ballot(x); }
FN int ones(uint32_t x) { return __builtin_popcount(x); }
FN float exp2_of(float x) { return exp2f(x); }
#define IN_TURN() ((void)0)
#endif

/* Element i of n, each for one thread of a grid of any size in x. */
#define OVER_GRID(i, n)                                                                             \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)

/* --- several elements in one access -------------------------------------------------------------------------- */

struct alignas(16) chunk { uint32_t x[4]; }; /* 16 bytes, the most that a thread moves at once */
template <int bytes> struct word_of;
template <> struct word_of<1> { typedef uint8_t type; };
template <> struct word_of<2> { typedef uint16_t type; };
template <> struct word_of<4> { typedef uint32_t type; };
template <> struct word_of<8> { typedef uint64_t type; };
template <> struct word_of<16> { typedef chunk type; };

/* N elements that lie beside each other, 16 bytes at most; whole: their address is a multiple of their size, and they
 * are one access. */
template <class S, int N> struct several { S x[N]; };
template <bool whole, int N, class S> FN several<S, N> ld_several(const S *p) {
    typedef typename word_of<N * sizeof(S)>::type word;
    several<S, N> y;
    if (whole) {
        const word w = ld((const word *)p);
        memcpy(&y, &w, sizeof y);
    } else {
#pragma unroll
        for (int c = 0; c < N; c++) y.x[c] = ld(p + c);
    }
    return y;
}
template <bool whole, int N, class S> FN void st_several(S *p, const several<S, N> &x) {
    typedef typename word_of<N * sizeof(S)>::type word;
    if (whole) {
        word w;
        memcpy(&w, &x, sizeof w);
        st((word *)p, w);
    } else {
#pragma unroll
        for (int c = 0; c < N; c++) st(p + c, x.x[c]);
    }
}

/* f<word>(p) for words of p.unit bytes */
#define BY_UNIT(f, p)                          \
    switch ((p).unit) {                        \
    case 1: f<word_of<1>::type>(p); break;     \
    case 2: f<word_of<2>::type>(p); break;     \
    case 4: f<word_of<4>::type>(p); break;     \
    case 8: f<word_of<8>::type>(p); break;     \
    default: f<word_of<16>::type>(p);          \
    }

template <class S> FN S narrow(WIDE x);
template <> FN_MEMBER float narrow<float>(float x) { return x; }
template <> FN_MEMBER double narrow<double>(double x) { return x; }
template <> FN_MEMBER bf16 narrow<bf16>(float x) { return {bf16_out(x)}; }
template <> FN_MEMBER f16 narrow<f16>(float x) { return {f16_out(x)}; }

/* One element of 1, 2, 4 or 8 bytes as it is; offsets in elements. */
FN void move_one(const char *src, int64_t s, char *dst, int64_t d, int size) {
    switch (size) {
    case 1: st((uint8_t *)dst + d, ld((const uint8_t *)src + s)); break;
    case 2: st((uint16_t *)dst + d, ld((const uint16_t *)src + s)); break;
    case 4: st((uint32_t *)dst + d, ld((const uint32_t *)src + s)); break;
    default: st((uint64_t *)dst + d, ld((const uint64_t *)src + s));
    }
}

/* The low bytes of x. */
FN void put_one(char *dst, int64_t d, uint64_t x, int size) {
    switch (size) {
    case 1: st((uint8_t *)dst + d, (uint8_t)x); break;
    case 2: st((uint16_t *)dst + d, (uint16_t)x); break;
    case 4: st((uint32_t *)dst + d, (uint32_t)x); break;
    default: st((uint64_t *)dst + d, x);
    }
}

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

/* Any integer dtype, and bool. */
FN int64_t integer_at(const char *p, int dtype, int64_t i) {
    switch (dtype) {
    case OM_I64: return ld((const int64_t *)p + i);
    case OM_I32: return ld((const int32_t *)p + i);
    case OM_I16: return ld((const int16_t *)p + i);
    case OM_I8: return ld((const int8_t *)p + i);
    default: return ld((const uint8_t *)p + i);
    }
}
FN void integer_put(char *p, int dtype, int64_t i, int64_t x) {
    switch (dtype) {
    case OM_I64: st((int64_t *)p + i, x); break;
    case OM_I32: st((int32_t *)p + i, (int32_t)x); break;
    case OM_I16: st((int16_t *)p + i, (int16_t)x); break;
    case OM_BOOL: st((uint8_t *)p + i, (uint8_t)(x != 0)); break;
    default: st((uint8_t *)p + i, (uint8_t)x);
    }
}
FN bool is_float(int dtype) { return dtype == OM_F32 || dtype == OM_F64 || dtype == OM_BF16 || dtype == OM_F16; }

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
/* The thread's place among those of the block that take one, in the order of threads, counted on from *next, which
 * moves behind them; sh: one per warp. All threads must come. */
FN int64_t block_place(bool takes, int64_t *next, uint32_t *sh) {
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t mates = votes(takes);
    int64_t place = *next + ones(mates & ((1u << lane) - 1));
    __syncthreads();
    if (!lane) sh[warp] = (uint32_t)ones(mates);
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x >> 5; w++) {
        *next += sh[w];
        if (w < warp) place += sh[w];
    }
    return place;
}

/* Of element i in row-major order of dim, the place by strides. */
FN int64_t offset_of(int64_t i, int rank, const int64_t *dim, const int64_t *stride) {
    int64_t off = 0;
    for (int d = rank - 1; d > 0; d--) {
        off += i % dim[d] * stride[d];
        i /= dim[d];
    }
    return rank ? off + i * stride[0] : 0;
}

/* --- faults -------------------------------------------------------------------------------------------------- */

/* Would it be the fault that stays? Asked without the lock first: all of a tensor's labels may be wrong, and the word
 * is memory of the host's. `kind` is written last. */
FN bool fault_stays(const volatile om_gpu_fault *f, uint32_t site, int64_t position) {
    if (!f->kind) return true;
    __threadfence();
    return f->site == site && position < f->position;
}

/* A lane takes the lock and gives it back within one turn of the loop: lanes of a warp that want it do not wait for
 * each other in an order that the hardware does not run them in. */
FN void fault_note(om_gpu_fault *f, uint32_t site, uint32_t kind, int64_t value, int64_t position, int64_t limit) {
    touch(f, sizeof *f, 1);
    volatile om_gpu_fault *v = f;
    bool noted = false;
    while (!noted && fault_stays(v, site, position)) {
        if (!atomicExch(&f->busy, 1u)) {
            __threadfence();
            if (fault_stays(v, site, position)) {
                v->site = site, v->value = value, v->position = position, v->limit = limit;
                __threadfence();
                v->kind = kind;
            }
            __threadfence();
            atomicExch(&f->busy, 0u);
            noted = true;
        }
    }
}

/* A write-back that comes behind a fault: what was told, or will be, ends the step. */
FN bool behind_fault(const om_gpu_fault *f) {
    if (!f) return false;
    touch(&f->kind, sizeof f->kind, 0);
    return *(const volatile uint32_t *)&f->kind != 0;
}

FN int64_t index_at(const char *p, int wide_index, int64_t i) {
    return wide_index ? ld((const int64_t *)p + i) : (int64_t)ld((const int32_t *)p + i);
}

#endif
