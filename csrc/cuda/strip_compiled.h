/* strip_compiled.h - what the kernels of compiled strip programs are made of (strip_source.c writes them, program.c has
 * them compiled). Read by NVRTC, by nvcc, and by a C++ compiler for the fake device of the tests.
 *
 * A kernel takes the parameters of the interpreter's (om_gpu_strip) and gives the same bits: operation by operation in
 * the same functions, nothing contracted across statements (-fmad=false, as strip.cu has it). What is fixed when it is
 * compiled: statements, dtypes, which strides are 0 or 1, whether rows are whole. What it reads from its parameters:
 * addresses, sizes, other strides, dropout's streams.
 *
 * A block of 128 threads takes 512 elements, a thread four that lie 16 apart in a group of 64 elements: they have their
 * words from one Philox counter, two of it each; half a warp reads 16 neighbours.
 */
#ifndef OM_CUDA_STRIP_COMPILED_H
#define OM_CUDA_STRIP_COMPILED_H

#include "cpu/kernels/vmath.h"
#include "cuda/element.h"
#include "cuda/params.h"

enum { STRIP_APART = 16, STRIP_GROUP = 64, STRIP_PART = 512 }; /* elements: a thread's; of counters; of a block */

/* f::op_add, d::op_add, ...: every row of pointwise.def in each class that has it */
#define PW(name, arity, rule, fx, ix, grad, ...) rule(name, arity, fx, ix)
#define NONE(name, arity, fx, ix)
#define OP1(name, TD, expr) FN TD op_##name(T x) { return (TD)(expr); }
#define OP2(name, TD, expr) FN TD op_##name(T x, T y) { return (TD)(expr); }
#define SEL NONE
#define CAST NONE
#define DRAW NONE
#define FLT SAME
#define NUM SAME
#define CMP TEST
#define PRED TEST
#define LOG NONE
#define SAME(name, arity, fx, ix) OP##arity(name, T, fx)
#define TEST(name, arity, fx, ix) OP##arity(name, uint8_t, fx)
namespace f {
typedef float T;
#define TRIG(name, arity, fx, ix) OP1(name, T, fabsf(x) < VMATH_TRIG_MAX ? (fx) : name##f(x))
#define M(f) f##_f32
#include "graph/pointwise.def"
#undef M
#undef TRIG
}
namespace d {
typedef double T;
#define TRIG SAME
#define M(f) f##_f64
#include "graph/pointwise.def"
#undef M
#undef TRIG
}
#undef FLT
#undef PRED
#undef LOG
#undef SAME
#undef TEST
#define SAME(name, arity, fx, ix) OP##arity(name, T, ix)
#define TEST(name, arity, fx, ix) OP##arity(name, uint8_t, ix)
#define FLT NONE
#define TRIG NONE
#define PRED NONE
#define LOG SAME
#define M(f) f##_i64
namespace i {
typedef int64_t T;
#include "graph/pointwise.def"
}
#undef NUM
#define NUM NONE
namespace b {
typedef uint8_t T;
#include "graph/pointwise.def"
}
#undef M
#undef PW
#undef NONE
#undef OP1
#undef OP2
#undef SEL
#undef CAST
#undef DRAW
#undef FLT
#undef TRIG
#undef NUM
#undef CMP
#undef PRED
#undef LOG
#undef SAME
#undef TEST

FN float strip_round_bf16(float x) { return bf16_in(bf16_out(x)); }
FN float strip_round_f16(float x) { return f16_in(f16_out(x)); }
template <class T> FN T strip_drop(T x, uint32_t word, const om_gpu_draw &d) {
    const T y = x * (T)d.scale;
    return (d.none ? 0 : word) < d.below ? y : 0;
}

/* Where a thread's N elements lie: `at` is the first one's place in the flat order, the others follow 16 apart. ROWS:
 * they stand in one row of the innermost axis. */
template <int N, int RANK, bool ROWS, class INDEX> struct strip_place {
    INDEX at, total;
    INDEX c[ROWS ? 1 : N][RANK];
    template <class P> FN_MEMBER strip_place(const P &p, INDEX first) {
        at = first, total = (INDEX)p.total;
#pragma unroll
        for (int k = 0; k < (ROWS ? 1 : N); k++) {
            INDEX rest = first + k * STRIP_APART;
#pragma unroll
            for (int a = RANK - 1; a > 0; a--) {
                const INDEX m = (INDEX)p.dim[a], q = rest / m;
                c[k][a] = rest - q * m;
                rest = q;
            }
            c[k][0] = rest;
        }
    }
    FN_MEMBER bool lives(int k) const { return at + k * STRIP_APART < total; }
    FN_MEMBER int64_t of(int axis, int k) const { /* coordinate of element k */
        return ROWS ? (int64_t)c[0][axis] + (axis == RANK - 1 ? k * STRIP_APART : 0) : (int64_t)c[ROWS ? 0 : k][axis];
    }
    FN_MEMBER void words(uint32_t *w, uint64_t seed, const om_gpu_draw &d) const { /* a word of Philox for each */
        if (N == 1) {
            w[0] = philox_at(seed, d.rng, (uint64_t)at);
        } else { /* at is one of its group's first 16 */
            uint32_t of[4];
            const bool odd = at / 8 % 2;
            philox_words(seed, d.rng, (uint64_t)(at / STRIP_GROUP * 8 + at % 8), of);
            w[0] = odd ? of[1] : of[0], w[1] = odd ? of[3] : of[2];
            w[2] = philox_exchanged(w[0]), w[3] = philox_exchanged(w[1]);
        }
    }
};

/* The whole of a kernel; S is what strip_source.c has written: type P of its parameters, INDEX of places, N elements
 * at once, run. */
template <class S> FN void strip_compiled(const typename S::P &p) {
    const uint64_t seed = p.scalars ? ld(&p.scalars->seed) : 0;
    typedef typename S::INDEX INDEX;
    const INDEX total = (INDEX)p.total;
    const unsigned t = threadIdx.x, first = t / STRIP_APART * STRIP_GROUP + t % STRIP_APART;
    for (INDEX part = (INDEX)blockIdx.x * STRIP_PART; part < total; part += (INDEX)gridDim.x * STRIP_PART) {
        if (S::N == 1)
            for (unsigned k = 0; k < STRIP_GROUP / STRIP_APART; k++)
                S::template run<false>(p, part + first + k * STRIP_APART, seed);
        else if (part + STRIP_PART <= total) S::template run<true>(p, part + first, seed);
        else S::template run<false>(p, part + first, seed);
    }
}

#define STRIP_KERNEL(S) EXPORT(128) om_##S(PARAM(S::P) p) { strip_compiled<S>(p); }
#define EACH _Pragma("unroll") for (int k = 0; k < N; k++)
#define LIVES (WHOLE || w.lives(k))
#define ADDRESS(n) (((char *const *)p.blob)[n])
#define STRIDE(n) (((const int64_t *)((const char *)p.blob + STRIDE_AT))[n])
#define DRAWN(n) (((const om_gpu_draw *)((const char *)p.blob + DRAW_AT))[n])
#define LOAD(v, C, T, n, offset)                                                                    \
    C v[N];                                                                                         \
    EACH v[k] = LIVES ? (C)strip_in(ld((const T *)ADDRESS(n) + (offset))) : (C)0;
#define STORE(v, T, n, offset) EACH if (LIVES) strip_out((T *)ADDRESS(n) + (offset), v[k]);
#define SET(v, C, expr)                                                                             \
    C v[N];                                                                                         \
    EACH v[k] = (C)(expr);
#define WORDS(v, n)                                                                                 \
    uint32_t v[4];                                                                                  \
    w.words(v, seed, DRAWN(n));

#endif
