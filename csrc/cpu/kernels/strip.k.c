/* strip.k.c - the strip interpreter's loops: loads, stores, one function per instruction and class, and the run over
 * strips.
 *
 * Every loop is over n contiguous elements of one class and is vectorised by the compiler (`omp simd`: the destination
 * may be one of the operands, never shifted against it). The instruction loops are generated from pointwise.def. See
 * strip.h for the machine.
 */
#include "graph/half.h"
#include "cpu/philox.h"
#include "cpu/strip.h"
#include "cpu/kernels/vmath.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define SIMD _Pragma("omp simd")

/* --- loads and stores -------------------------------------------------------------------------------- */

#define KEEP(x) (x)
#define LOAD(name, S, T, conv)                                                                      \
    static void load_##name(const void *src, int64_t st, int64_t n, void *dst) {                    \
        const S *s = src;                                                                           \
        T *d = dst;                                                                                 \
        if (st == 1) {                                                                              \
            SIMD for (int64_t i = 0; i < n; i++) d[i] = (T)conv(s[i]);                              \
        } else if (st == 0) {                                                                       \
            const T x = (T)conv(s[0]);                                                              \
            SIMD for (int64_t i = 0; i < n; i++) d[i] = x;                                          \
        } else {                                                                                    \
            for (int64_t i = 0; i < n; i++) d[i] = (T)conv(s[i * st]);                              \
        }                                                                                           \
    }
#define STORE(name, S, T, conv)                                                                     \
    static void store_##name(const void *src, int64_t n, void *dst, int64_t st) {                   \
        const T *s = src;                                                                           \
        S *d = dst;                                                                                 \
        if (st == 1) {                                                                              \
            SIMD for (int64_t i = 0; i < n; i++) d[i] = (S)conv(s[i]);                              \
        } else {                                                                                    \
            for (int64_t i = 0; i < n; i++) d[i * st] = (S)conv(s[i]);                              \
        }                                                                                           \
    }
#define STORAGE(X)                                                                                  \
    X(F32, float, float, KEEP, KEEP) X(F64, double, double, KEEP, KEEP)                   \
    X(BF16, uint16_t, float, om_bf16_to_f32, om_f32_to_bf16)                                  \
    X(I64, int64_t, int64_t, KEEP, KEEP) X(I32, int32_t, int64_t, KEEP, KEEP)             \
    X(I16, int16_t, int64_t, KEEP, KEEP) X(I8, int8_t, int64_t, KEEP, KEEP)                \
    X(U8, uint8_t, int64_t, KEEP, KEEP) X(BOOL, uint8_t, uint8_t, KEEP, KEEP)
#define X(NAME, S, T, in, out) LOAD(NAME, S, T, in) STORE(NAME, S, T, out)
STORAGE(X)
#undef X

LOAD(f16_any, uint16_t, float, om_f16_to_f32)
STORE(f16_any, uint16_t, float, om_f32_to_f16)
static void load_f16(const void *src, int64_t st, int64_t n, void *dst) {
#if defined(__F16C__)
    if (st == 1) {
        const uint16_t *s = src;
        float *d = dst;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
        for (; i < n; i++) d[i] = om_f16_to_f32(s[i]);
        return;
    }
#endif
    load_f16_any(src, st, n, dst);
}
static void store_f16(const void *src, int64_t n, void *dst, int64_t st) {
#if defined(__F16C__)
    if (st == 1) {
        const float *s = src;
        uint16_t *d = dst;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)(d + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(s + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        for (; i < n; i++) d[i] = om_f32_to_f16(s[i]);
        return;
    }
#endif
    store_f16_any(src, n, dst, st);
}

/* --- instructions -------------------------------------------------------------------------------------- */

typedef void (*insn_fn)(const om_insn *in, void *const *v, int64_t n, uint64_t index, const om_strip_job *job);
#define ARGS const om_insn *in, void *const *v, int64_t n, uint64_t index, const om_strip_job *job
#define UNUSED (void)index, (void)job

#define BODY1(fn, TX, TD, e)                                                                        \
    static void fn(ARGS) {                                                                          \
        const TX *px = v[in->a];                                                                    \
        TD *pd = v[in->dst];                                                                        \
        UNUSED;                                                                                     \
        SIMD for (int64_t i = 0; i < n; i++) {                                                      \
            const TX x = px[i];                                                                     \
            pd[i] = (TD)(e);                                                                        \
        }                                                                                           \
    }
#define BODY2(fn, TX, TD, e)                                                                        \
    static void fn(ARGS) {                                                                          \
        const TX *px = v[in->a], *py = v[in->b];                                                    \
        TD *pd = v[in->dst];                                                                        \
        UNUSED;                                                                                     \
        SIMD for (int64_t i = 0; i < n; i++) {                                                      \
            const TX x = px[i], y = py[i];                                                          \
            pd[i] = (TD)(e);                                                                        \
        }                                                                                           \
    }

/* class F */
#define T float
#define M(f) f##_f32
#define FLT(name, arity, fx, ix) BODY##arity(name##_F, T, T, fx)
#define TRIG(name, arity, fx, ix) BODY##arity(name##_near_F, T, T, fx)
#define NUM(name, arity, fx, ix) BODY##arity(name##_F, T, T, fx)
#define CMP(name, arity, fx, ix) BODY##arity(name##_F, T, uint8_t, fx)
#define PRED(name, arity, fx, ix) BODY##arity(name##_F, T, uint8_t, fx)
#define LOG(name, arity, fx, ix)
#define SEL(name, arity, fx, ix)
#define CAST(name, arity, fx, ix)
#define DRAW(name, arity, fx, ix)
#define PW(name, arity, rule, fx, ix, grad, ...) rule(name, arity, fx, ix)
#define pow_F pow_each_F
#include "graph/pointwise.def"
#undef pow_F

/* One exponent for all (x ** 3): the powers that pow_f32 takes as products have loops of their own, with its bits and
 * without the logarithm in double, which takes twenty times as long. */
#define POWER(y)                                                                                    \
    SIMD for (int64_t i = 0; i < n; i++) pd[i] = pow_f32(px[i], y);                                 \
    return
static void pow_F(ARGS) {
    const float *px = v[in->a], *py = v[in->b];
    float *pd = v[in->dst];
    const bool one = in->b < job->prog->n_in && job->prog->uniform[in->b];
    if (one && *py == 2) { POWER(2); }
    if (one && *py == 3) { POWER(3); }
    if (one && *py == -1) { POWER(-1); }
    pow_each_F(in, v, n, index, job);
}

#define TRIG_GUARD(fn)                                                                              \
    static void fn##_F(ARGS) {                                                                      \
        const float *px = v[in->a];                                                                 \
        float *pd = v[in->dst];                                                                     \
        float far = 0;                                                                              \
        SIMD for (int64_t i = 0; i < n; i++) far = fabsf(px[i]) < VMATH_TRIG_MAX ? far : 1;         \
        if (far == 0) {                                                                             \
            fn##_near_F(in, v, n, index, job);                                                      \
            return;                                                                                 \
        }                                                                                           \
        for (int64_t i = 0; i < n; i++) pd[i] = fabsf(px[i]) < VMATH_TRIG_MAX ? fn##_f32(px[i]) : fn##f(px[i]); \
    }
TRIG_GUARD(sin)
TRIG_GUARD(cos)

/* class D */
#undef T
#undef M
#undef FLT
#undef TRIG
#undef NUM
#undef CMP
#undef PRED
#define T double
#define M(f) f##_f64
#define FLT(name, arity, fx, ix) BODY##arity(name##_D, T, T, fx)
#define TRIG(name, arity, fx, ix) BODY##arity(name##_D, T, T, fx)
#define NUM(name, arity, fx, ix) BODY##arity(name##_D, T, T, fx)
#define CMP(name, arity, fx, ix) BODY##arity(name##_D, T, uint8_t, fx)
#define PRED(name, arity, fx, ix) BODY##arity(name##_D, T, uint8_t, fx)
#include "graph/pointwise.def"

/* classes I and B */
#undef T
#undef M
#undef FLT
#undef TRIG
#undef NUM
#undef CMP
#undef PRED
#undef LOG
#define M(f) f##_i64
#define FLT(name, arity, fx, ix)
#define TRIG(name, arity, fx, ix)
#define NUM(name, arity, fx, ix) BODY##arity(name##_I, int64_t, int64_t, ix)
#define CMP(name, arity, fx, ix) BODY##arity(name##_I, int64_t, uint8_t, ix) BODY##arity(name##_B, uint8_t, uint8_t, ix)
#define PRED(name, arity, fx, ix)
#define LOG(name, arity, fx, ix) BODY##arity(name##_I, int64_t, int64_t, ix) BODY##arity(name##_B, uint8_t, uint8_t, ix)
#include "graph/pointwise.def"
#undef PW

/* Of 64-bit integers by bits: compilers have no other way without a branch before AVX2, and data decides how often a
 * branch is foreseen. */
#define WHERE(fn, T, taken)                                                                         \
    static void fn(ARGS) {                                                                          \
        const uint8_t *pc = v[in->a];                                                               \
        const T *px = v[in->b], *py = v[in->c];                                                     \
        T *pd = v[in->dst];                                                                         \
        UNUSED;                                                                                     \
        SIMD for (int64_t i = 0; i < n; i++) {                                                      \
            const T x = px[i], y = py[i];                                                           \
            pd[i] = taken;                                                                          \
        }                                                                                           \
    }
WHERE(where_F, float, pc[i] ? x : y)
WHERE(where_D, double, pc[i] ? x : y)
WHERE(where_I, int64_t, y ^ ((x ^ y) & -(int64_t)(pc[i] != 0)))
WHERE(where_B, uint8_t, pc[i] ? x : y)

/* x * scale where the word of the element's logical index is below the threshold, else 0 (whatever x is, NaN and inf
 * included) */
#define DROPOUT(fn, T)                                                                              \
    static void fn(ARGS) {                                                                          \
        const om_strip_draw *r = &job->prog->draw[in->b];                                           \
        const T *px = v[in->a], scale = (T)r->scale;                                                \
        T *pd = v[in->dst];                                                                         \
        const uint32_t below = r->keep_below;                                                       \
        uint32_t word[256];                                                                         \
        for (int64_t i = 0; i < n; i += 256) {                                                      \
            const int64_t m = n - i < 256 ? n - i : 256;                                            \
            if (r->all) memset(word, 0, sizeof word);                                               \
            else om_philox_fill(job->seed, r->rng, index + (uint64_t)i, m, word);                   \
            SIMD for (int64_t k = 0; k < m; k++) {                                                  \
                const T y = px[i + k] * scale;                                                      \
                pd[i + k] = word[k] < below ? y : 0;                                                \
            }                                                                                       \
        }                                                                                           \
    }
DROPOUT(dropout_F, float)
DROPOUT(dropout_D, double)

BODY1(to_d_F, float, double, x)
BODY1(to_i_F, float, int64_t, x)
BODY1(to_i32_F, float, int64_t, (int32_t)x)
BODY1(to_b_F, float, uint8_t, x != 0)
BODY1(to_f_D, double, float, x)
BODY1(to_i_D, double, int64_t, x)
BODY1(to_i32_D, double, int64_t, (int32_t)x)
BODY1(to_b_D, double, uint8_t, x != 0)
BODY1(to_f_I, int64_t, float, x)
BODY1(to_d_I, int64_t, double, x)
BODY1(to_b_I, int64_t, uint8_t, x != 0)
BODY1(to_f_B, uint8_t, float, x)
BODY1(to_d_B, uint8_t, double, x)
BODY1(to_i_B, uint8_t, int64_t, x)
BODY1(round_bf16_F, float, float, om_bf16_to_f32(om_f32_to_bf16(x)))
BODY1(round_f16_F, float, float, om_f16_to_f32(om_f32_to_f16(x)))
BODY1(wrap_i32_I, int64_t, int64_t, (int32_t)x)
BODY1(wrap_i16_I, int64_t, int64_t, (int16_t)x)
BODY1(wrap_i8_I, int64_t, int64_t, (int8_t)x)
BODY1(wrap_u8_I, int64_t, int64_t, (uint8_t)x)

#define KERNELS_FLT(name) name##_F, name##_D, NULL, NULL
#define KERNELS_TRIG(name) name##_F, name##_D, NULL, NULL
#define KERNELS_PRED(name) name##_F, name##_D, NULL, NULL
#define KERNELS_NUM(name) name##_F, name##_D, name##_I, NULL
#define KERNELS_CMP(name) name##_F, name##_D, name##_I, name##_B
#define KERNELS_LOG(name) NULL, NULL, name##_I, name##_B
#define KERNELS_SEL(name) name##_F, name##_D, name##_I, name##_B
#define KERNELS_CAST(name) NULL /* compiled to conversions */
#define KERNELS_DRAW(name) name##_F, name##_D, NULL, NULL

static const insn_fn table[OM_N_S][OM_STRIP_CLASSES] = {
#define PW(name, arity, rule, fx, ix, grad, ...) [OM_S_##name] = {OM_KEPT_OP(name, KERNELS_##rule(name))},
#include "graph/pointwise.def"
#undef PW
    [OM_S_to_f] = {NULL, to_f_D, to_f_I, to_f_B},
    [OM_S_to_d] = {to_d_F, NULL, to_d_I, to_d_B},
    [OM_S_to_i] = {to_i_F, to_i_D, NULL, to_i_B},
    [OM_S_to_b] = {to_b_F, to_b_D, to_b_I, NULL},
    [OM_S_to_i32] = {to_i32_F, to_i32_D},
    [OM_S_round_bf16] = {round_bf16_F},
    [OM_S_round_f16] = {round_f16_F},
    [OM_S_wrap_i32] = {NULL, NULL, wrap_i32_I},
    [OM_S_wrap_i16] = {NULL, NULL, wrap_i16_I},
    [OM_S_wrap_i8] = {NULL, NULL, wrap_i8_I},
    [OM_S_wrap_u8] = {NULL, NULL, wrap_u8_I},
};

/* --- the run ----------------------------------------------------------------------------------------- */

typedef void (*load_fn)(const void *src, int64_t stride, int64_t n, void *dst);
typedef void (*store_fn)(const void *src, int64_t n, void *dst, int64_t stride);
static const load_fn load_table[OM_N_DTYPES] = {
#define X(NAME, S, T, in, out) [OM_##NAME] = load_##NAME,
    STORAGE(X)
#undef X
    [OM_F16] = load_f16,
};
static const store_fn store_table[OM_N_DTYPES] = {
#define X(NAME, S, T, in, out) [OM_##NAME] = store_##NAME,
    STORAGE(X)
#undef X
    [OM_F16] = store_f16,
};
static const uint8_t class_size[OM_STRIP_CLASSES] = {4, 8, 8, 1};

#define SWAP(T)                                                                                     \
    do {                                                                                            \
        T *x = reg;                                                                                 \
        for (int64_t i = 0; i < n; i += 2) {                                                        \
            const T even = x[i];                                                                    \
            x[i] = x[i + 1], x[i + 1] = even;                                                       \
        }                                                                                           \
    } while (0)
static void swap_pairs(void *reg, int size, int64_t n) {
    if (size == 4) SWAP(uint32_t);
    else if (size == 8) SWAP(uint64_t);
    else SWAP(uint8_t);
}

/* Copies the flat range [i0, i0 + n) between a tensor that does not follow the flat index and a register, piece by
 * piece: as far as the tensor itself goes on in one stride. Whole pieces one stride apart are copied without a step of
 * the odometer between them. Dense pairs read in turned order (the imaginary part first, of a product of complex
 * numbers) are read as they lie and turned then. */
static void walk(const om_strip_job *j, const om_strip_arg *a, int dtype, int64_t i0, int64_t n, char *reg,
                 int reg_size, bool store) {
    int64_t dim[OM_RANK], stride[OM_RANK], at[OM_RANK], rest = i0, off = 0;
    int rank = 0;
    for (int d = 0; d < j->rank; d++) {
        const bool merge = rank && stride[rank - 1] == a->stride[d] * j->dim[d];
        if (!merge) dim[rank++] = 1;
        dim[rank - 1] *= j->dim[d], stride[rank - 1] = a->stride[d];
    }
    const bool turned = !store && rank > 1 && dim[rank - 1] == 2 && stride[rank - 1] == -1 && stride[rank - 2] == 2 &&
                        !(i0 & 1) && !(n & 1);
    if (turned) rank--, dim[rank - 1] *= 2, stride[rank - 1] = 1, off = -1;
    const int last = rank - 1;
    char *const first = reg;
    const int64_t all = n;
    for (int d = last; d >= 0; d--) {
        at[d] = rest % dim[d];
        rest /= dim[d];
        off += at[d] * stride[d];
    }
    while (n > 0) {
        const int64_t left = dim[last] - at[last], m = left < n ? left : n;
        int64_t pieces = 1;
        if (last && m == dim[last]) {
            pieces = dim[last - 1] - at[last - 1];
            if (pieces > n / m) pieces = n / m;
        }
        char *p = a->data + off * a->size;
        for (int64_t i = 0; i < pieces; i++, reg += m * reg_size) {
            if (store) store_table[dtype](reg, m, p, stride[last]);
            else load_table[dtype](p, stride[last], m, reg);
            if (last) p += stride[last - 1] * a->size;
        }
        n -= pieces * m;
        if (last) at[last - 1] += pieces - 1, off += (pieces - 1) * stride[last - 1];
        off += (m - 1) * stride[last]; /* to the last element done, then one step of the odometer */
        at[last] += m - 1;
        for (int d = last; d >= 0; d--) {
            off += stride[d];
            if (++at[d] < dim[d]) break;
            off -= stride[d] * dim[d];
            at[d] = 0;
        }
    }
    if (turned) swap_pairs(first, reg_size, all);
}

static void strip_run(const om_strip_job *j, int64_t begin, int64_t end) {
    const om_strip_prog *p = j->prog;
    _Alignas(64) char regs[OM_STRIP_BYTES];
    void *v[OM_STRIP_VALUES];
    int64_t at[OM_RANK] = {0}, off[OM_STRIP_IN + OM_STRIP_OUT] = {0}, row = -1;
    const int last = j->rank - 1, n_arg = p->n_in + p->n_out;
    for (int i = 0; i < p->n_val; i++) v[i] = regs + (int64_t)p->reg[i] * j->strip;
    for (int i = 0; i < p->n_in; i++)
        if (j->in[i].how == OM_STRIP_UNIFORM) load_table[p->in_dtype[i]](j->in[i].data, 0, j->strip, v[i]);

    for (int64_t u = begin; u < end; u++) {
        int64_t i0, n, index; /* position on the innermost (or flat) axis, length, flat index */
        if (j->flat) {
            i0 = index = u * j->strip;
            n = j->total - i0 < j->strip ? j->total - i0 : j->strip;
        } else {
            const int64_t r = u / j->per_row;
            i0 = (u - r * j->per_row) * j->strip;
            n = j->dim[last] - i0 < j->strip ? j->dim[last] - i0 : j->strip;
            index = r * j->dim[last] + i0;
            if (r != row) { /* offsets of the row: from scratch at the first, then by an odometer step */
                if (row < 0) {
                    int64_t rest = r;
                    for (int d = last - 1; d >= 0; d--) at[d] = rest % j->dim[d], rest /= j->dim[d];
                    for (int k = 0; k < n_arg; k++) {
                        const om_strip_arg *a = k < p->n_in ? &j->in[k] : &j->out[k - p->n_in];
                        for (int d = 0; d < last; d++) off[k] += at[d] * a->stride[d];
                    }
                } else {
                    for (int d = last - 1; d >= 0; d--) {
                        const bool wrap = ++at[d] == j->dim[d];
                        for (int k = 0; k < n_arg; k++) {
                            const om_strip_arg *a = k < p->n_in ? &j->in[k] : &j->out[k - p->n_in];
                            off[k] += a->stride[d] - (wrap ? a->stride[d] * j->dim[d] : 0);
                        }
                        if (!wrap) break;
                        at[d] = 0;
                    }
                }
                row = r;
            }
        }
        for (int i = 0; i < p->n_in; i++) {
            const om_strip_arg *a = &j->in[i];
            if (a->how == OM_STRIP_UNIFORM) continue;
            if (a->how == OM_STRIP_WALK) {
                walk(j, a, p->in_dtype[i], i0, n, v[i], class_size[p->cls[i]], false);
                continue;
            }
            char *s = a->data + (off[i] + i0 * a->stride[last]) * a->size;
            if (a->how == OM_STRIP_DIRECT) v[i] = s;
            else load_table[p->in_dtype[i]](s, a->stride[last], n, v[i]);
        }
        for (int i = 0; i < p->n_out; i++)
            if (j->out[i].how == OM_STRIP_DIRECT)
                v[p->out_val[i]] = j->out[i].data + (off[p->n_in + i] + i0) * j->out[i].size;
        for (int i = 0; i < p->n_insn; i++) table[p->insn[i].op][p->insn[i].cls](&p->insn[i], v, n, (uint64_t)index, j);
        for (int i = 0; i < p->n_out; i++) {
            const om_strip_arg *a = &j->out[i];
            char *src = v[p->out_val[i]];
            if (a->how == OM_STRIP_WALK)
                walk(j, a, p->out_dtype[i], i0, n, src, class_size[p->cls[p->out_val[i]]], true);
            else if (a->how == OM_STRIP_MOVE)
                store_table[p->out_dtype[i]](src, n, a->data + (off[p->n_in + i] + i0 * a->stride[last]) * a->size,
                                             a->stride[last]);
        }
    }
}

const struct om_strip_kernels OM_ISA_NAME(om_strip) = {
    .run = strip_run,
#define X(NAME, S, T, in, out) .load[OM_##NAME] = load_##NAME, .store[OM_##NAME] = store_##NAME,
    STORAGE(X)
#undef X
    .load[OM_F16] = load_f16,
    .store[OM_F16] = store_f16,
};
