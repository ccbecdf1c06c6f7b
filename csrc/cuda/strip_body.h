/* strip_body.h - the strip interpreter: every elementwise operator and fused chain, from the instructions that
 * cpu/strip.c compiles. Registers are columns of shared memory, one per element: threads share nothing, there is no
 * barrier. Every thread takes the block's elements threadIdx, threadIdx + blockDim, ...: loads are coalesced.
 */
#ifndef OM_CUDA_STRIP_BODY_H
#define OM_CUDA_STRIP_BODY_H

#include "cuda/kernel.h"
#include "ops/strip_op.h"

#define EACH for (uint32_t e = threadIdx.x; e < unit; e += blockDim.x)
#define REG(T, r) (((T *)(regs + (size_t)(r) * unit))[e])
#define CASE1(OP, TX, TD, expr)                                                                     \
    case OP: EACH {                                                                                 \
        const TX x = REG(TX, i.a);                                                                  \
        REG(TD, i.dst) = (TD)(expr);                                                                \
    } break;
#define CASE2(OP, TX, TD, expr)                                                                     \
    case OP: EACH {                                                                                 \
        const TX x = REG(TX, i.a), y = REG(TX, i.b);                                                \
        REG(TD, i.dst) = (TD)(expr);                                                                \
    } break;
#define WHERE(T)                                                                                    \
    case OM_S_where: EACH {                                                                         \
        const T x = REG(T, i.b), y = REG(T, i.c);                                                   \
        REG(T, i.dst) = REG(uint8_t, i.a) ? x : y;                                                  \
    } break;
#define DROPOUT(T)                                                                                  \
    case OM_S_dropout: EACH {                                                                       \
        const T y = REG(T, i.a) * (T)draw[i.b].scale;                                               \
        const uint32_t word = draw[i.b].none ? 0 : philox_at(seed, draw[i.b].rng, (uint64_t)(base + e)); \
        REG(T, i.dst) = word < draw[i.b].below ? y : 0;                                             \
    } break;
#define PW(name, arity, rule, fx, ix, grad, ...) rule(name, arity, fx, ix)
#define NONE(name, arity, fx, ix)

#define SEL NONE
#define CAST NONE
#define DRAW NONE
#define SAME(name, arity, fx, ix) CASE##arity(OM_S_##name, T, T, fx)
#define TEST(name, arity, fx, ix) CASE##arity(OM_S_##name, T, uint8_t, fx)
#define FLT SAME
#define NUM SAME
#define CMP TEST
#define PRED TEST
#define LOG NONE

FN void strip_f(const om_gpu_insn i, char *regs, uint32_t unit, int64_t base, uint64_t seed, const om_gpu_draw *draw) {
    typedef float T;
#define TRIG(name, arity, fx, ix) CASE1(OM_S_##name, T, T, fabsf(x) < VMATH_TRIG_MAX ? (fx) : name##f(x))
#define M(f) f##_f32
    switch (i.op) {
#include "graph/pointwise.def"
        WHERE(T) DROPOUT(T)
        CASE1(OM_S_to_d, T, double, x) CASE1(OM_S_to_i, T, int64_t, x) CASE1(OM_S_to_b, T, uint8_t, x != 0)
        CASE1(OM_S_to_i32, T, int64_t, (int32_t)x)
        CASE1(OM_S_round_bf16, T, T, bf16_in(bf16_out(x))) CASE1(OM_S_round_f16, T, T, f16_in(f16_out(x)))
    }
#undef M
#undef TRIG
}

FN void strip_d(const om_gpu_insn i, char *regs, uint32_t unit, int64_t base, uint64_t seed, const om_gpu_draw *draw) {
    typedef double T;
#define TRIG SAME
#define M(f) f##_f64
    switch (i.op) {
#include "graph/pointwise.def"
        WHERE(T) DROPOUT(T)
        CASE1(OM_S_to_f, T, float, x) CASE1(OM_S_to_i, T, int64_t, x) CASE1(OM_S_to_b, T, uint8_t, x != 0)
        CASE1(OM_S_to_i32, T, int64_t, (int32_t)x)
    }
#undef M
#undef TRIG
}

#undef FLT
#undef PRED
#undef LOG
#undef SAME
#undef TEST
#define SAME(name, arity, fx, ix) CASE##arity(OM_S_##name, T, T, ix)
#define TEST(name, arity, fx, ix) CASE##arity(OM_S_##name, T, uint8_t, ix)
#define FLT NONE
#define TRIG NONE
#define PRED NONE
#define LOG SAME
#define M(f) f##_i64

FN void strip_i(const om_gpu_insn i, char *regs, uint32_t unit) {
    typedef int64_t T;
    switch (i.op) {
#include "graph/pointwise.def"
        WHERE(T)
        CASE1(OM_S_to_f, T, float, x) CASE1(OM_S_to_d, T, double, x) CASE1(OM_S_to_b, T, uint8_t, x != 0)
        CASE1(OM_S_wrap_i32, T, T, (int32_t)x) CASE1(OM_S_wrap_i16, T, T, (int16_t)x)
        CASE1(OM_S_wrap_i8, T, T, (int8_t)x) CASE1(OM_S_wrap_u8, T, T, (uint8_t)x)
    }
}

#undef NUM
#define NUM NONE
FN void strip_b(const om_gpu_insn i, char *regs, uint32_t unit) {
    typedef uint8_t T;
    switch (i.op) {
#include "graph/pointwise.def"
        WHERE(T)
        CASE1(OM_S_to_f, T, float, x) CASE1(OM_S_to_d, T, double, x) CASE1(OM_S_to_i, T, int64_t, x)
    }
}

#define MOVE(T, C) if (store) st((T *)p + off, (T)REG(C, o.reg)); else REG(C, o.reg) = (C)ld((const T *)p + off); break
FN void strip_move(const om_gpu_operand o, char *p, int64_t off, char *regs, uint32_t unit, uint32_t e, bool store) {
    switch (o.dtype) {
    case OM_F32: MOVE(float, float);
    case OM_F64: MOVE(double, double);
    case OM_BF16:
        if (store) out((bf16 *)p + off, REG(float, o.reg));
        else REG(float, o.reg) = in(ld((const bf16 *)p + off));
        break;
    case OM_F16:
        if (store) out((f16 *)p + off, REG(float, o.reg));
        else REG(float, o.reg) = in(ld((const f16 *)p + off));
        break;
    case OM_I64: MOVE(int64_t, int64_t);
    case OM_I32: MOVE(int32_t, int64_t);
    case OM_I16: MOVE(int16_t, int64_t);
    case OM_I8: MOVE(int8_t, int64_t);
    case OM_U8: MOVE(uint8_t, int64_t);
    case OM_BOOL: MOVE(uint8_t, uint8_t);
    }
}
#undef MOVE

/* An operand whose elements are `stride` apart: of n elements a thread's, four at a time, so that four loads are under
 * way; what they are is looked up once. */
template <class T, class C> FN void strip_line(T *p, int64_t stride, C *reg, uint32_t n, bool store) {
    enum { AT_ONCE = 4 };
    const uint32_t step = blockDim.x;
    for (uint32_t e = threadIdx.x; e < n; e += AT_ONCE * step) {
        C x[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0, at = e; i < AT_ONCE; i++, at += step)
            if (at < n) x[i] = store ? reg[at] : (C)strip_in(ld(p + at * stride));
#pragma unroll
        for (uint32_t i = 0, at = e; i < AT_ONCE; i++, at += step) {
            if (at >= n) continue;
            if (store) strip_out(p + at * stride, x[i]);
            else reg[at] = x[i];
        }
    }
}

#define LINE(dtype, T, C)                                                                           \
    case dtype: strip_line((T *)p + base * stride, stride, (C *)reg, n, store); break;
FN void strip_line_of(const om_gpu_operand o, char *p, int64_t base, int64_t stride, char *reg, uint32_t n,
                      bool store) {
    switch (o.dtype) {
        LINE(OM_F32, float, float) LINE(OM_F64, double, double) LINE(OM_BF16, bf16, float) LINE(OM_F16, f16, float)
        LINE(OM_I64, int64_t, int64_t) LINE(OM_I32, int32_t, int64_t) LINE(OM_I16, int16_t, int64_t)
        LINE(OM_I8, int8_t, int64_t) LINE(OM_U8, uint8_t, int64_t) LINE(OM_BOOL, uint8_t, uint8_t)
    }
}
#undef LINE

/* Operands [first, first + n) of the block's elements, loaded or stored. */
template <class P> FN void strip_operands(const P &p, char *regs, int64_t base, int first, int n, bool store) {
    const char *blob = (const char *)p.blob;
    char *const *data = (char *const *)p.blob;
    const int64_t *stride = (const int64_t *)(blob + p.stride_at);
    const om_gpu_operand *operand = (const om_gpu_operand *)(blob + p.operand_at);
    const uint32_t unit = p.unit;
    if (p.rank == 1) {
        const uint32_t some = p.total - base < unit ? (uint32_t)(p.total - base) : unit;
        for (int k = first; k < first + n; k++)
            strip_line_of(operand[k], data[k], base, stride[k], regs + (size_t)operand[k].reg * unit, some, store);
        return;
    }
    EACH {
        int64_t rest = base + e, c[OM_GPU_RANK];
        if (rest >= p.total) break;
#pragma unroll
        for (int d = OM_GPU_RANK - 1; d >= 0; d--) {
            c[d] = 0;
            if (d >= p.rank) continue;
            const int64_t m = p.dim[d];
            if (rest <= 0x7fffffff) {
                c[d] = (uint32_t)rest % (uint32_t)m;
                rest = (uint32_t)rest / (uint32_t)m;
            } else {
                c[d] = rest % m;
                rest /= m;
            }
        }
        for (int k = first; k < first + n; k++) {
            int64_t off = 0;
#pragma unroll
            for (int d = 0; d < OM_GPU_RANK; d++)
                if (d < p.rank) off += c[d] * stride[k * p.rank + d];
            strip_move(operand[k], data[k], off, regs, unit, e, store);
        }
    }
}

template <class P, bool D> FN void strip_run(const P &p) {
    SHARED(regs);
    const char *blob = (const char *)p.blob;
    const om_gpu_insn *insn = (const om_gpu_insn *)(blob + p.insn_at);
    const om_gpu_draw *draw = (const om_gpu_draw *)(blob + p.draw_at);
    const uint32_t unit = p.unit;
    const uint64_t seed = p.scalars ? ld(&p.scalars->seed) : 0;
    for (int64_t base = (int64_t)blockIdx.x * unit; base < p.total; base += (int64_t)gridDim.x * unit) {
        strip_operands(p, regs, base, 0, p.n_in, false);
        for (int k = 0; k < p.n_insn; k++) {
            const om_gpu_insn i = insn[k];
            if (i.cls == OM_STRIP_F) strip_f(i, regs, unit, base, seed, draw);
            else if (i.cls == OM_STRIP_I) strip_i(i, regs, unit);
            else if (i.cls == OM_STRIP_B) strip_b(i, regs, unit);
            else if (D) strip_d(i, regs, unit, base, seed, draw);
        }
        strip_operands(p, regs, base, p.n_in, p.n_out, true);
    }
}

#undef M
#undef PW
#undef NONE
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
#undef CASE1
#undef CASE2
#undef WHERE
#undef DROPOUT
#undef EACH
#undef REG
#endif
