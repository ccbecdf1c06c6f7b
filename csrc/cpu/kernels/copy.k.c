/* copy.k.c - inner loops of om_copy: strided moves, tile transposition, type conversion.
 *
 * Moves treat elements as bytes of size 1, 2, 4, 8 or 16 and never assume alignment beyond a byte (memcpy of a constant
 * size is one instruction). The transposition of 2-, 4- and 8-byte elements works on N x N blocks held in N vectors:
 * log2(N) rounds that interleave vector i with vector i + N/2 turn rows into columns; edges are done by element.
 * Conversions follow torch: integers from floats truncate (values that do not fit give the smallest i64, cut to size),
 * bool is x != 0, f16 and bf16 go through float in both directions.
 */
#include "cpu/copy.h"
#include "graph/half.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

typedef struct { uint64_t lo, hi; } copy_u128;

#define COPY_SIZES(X) X(0, uint8_t) X(1, uint16_t) X(2, uint32_t) X(3, uint64_t) X(4, copy_u128)

/* --- strided lines ------------------------------------------------------------------------------- */

#define MOVE_LOOP(T, ss, ds)                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                               \
        memcpy(&t, src + i * (ss), sizeof(T));                                                      \
        memcpy(dst + i * (ds), &t, sizeof(T));                                                      \
    }
#define MOVE(I, T)                                                                                  \
    static void move_##I(const char *src, int64_t ss, char *dst, int64_t ds, int64_t n) {           \
        const int64_t e = (int64_t)sizeof(T);                                                       \
        T t;                                                                                        \
        if (ds == e && ss == e) memcpy(dst, src, (size_t)(n * e));                                  \
        else if (ds == e && ss == 0) MOVE_LOOP(T, 0, e)                                             \
        else if (ds == e) MOVE_LOOP(T, ss, e)                                                       \
        else MOVE_LOOP(T, ss, ds)                                                                   \
    }
COPY_SIZES(MOVE)

/* --- tiles ----------------------------------------------------------------------------------------- */

#define TILE_EDGE(T, a0, a1, b0, b1)                                                                \
    for (int64_t a = (a0); a < (a1); a++)                                                           \
        for (int64_t b = (b0); b < (b1); b++)                                                       \
            memcpy(dst + a * ds + b * (int64_t)sizeof(T), src + b * ss + a * (int64_t)sizeof(T), sizeof(T));

#define TILE_PLAIN(I, T)                                                                               \
    static void tile_##I(const char *src, int64_t ss, char *dst, int64_t ds, int64_t na, int64_t nb) { \
        TILE_EDGE(T, 0, na, 0, nb)                                                                     \
    }
TILE_PLAIN(0, uint8_t)
TILE_PLAIN(4, copy_u128)

/* LO and HI: shuffle masks that interleave the lower / upper halves of two vectors. */
#if defined(__clang__)
#define TILE_SHUFFLE(x, y, mask, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define TILE_SHUFFLE(x, y, mask, ...) __builtin_shuffle(x, y, mask)
#endif
#define TILE_VECTOR(I, T, N, LO, HI)                                                                \
    typedef T tile_vec_##I __attribute__((vector_size(N * sizeof(T))));                             \
    static void tile_##I(const char *src, int64_t ss, char *dst, int64_t ds, int64_t na, int64_t nb) { \
        const tile_vec_##I lo = {LO}, hi = {HI};                                                    \
        (void)lo, (void)hi;                                                                         \
        int64_t fa = na - na % N, fb = nb - nb % N;                                                 \
        for (int64_t a = 0; a < fa; a += N)                                                         \
            for (int64_t b = 0; b < fb; b += N) {                                                   \
                tile_vec_##I r[N], t[N];                                                            \
                for (int i = 0; i < N; i++) memcpy(&r[i], src + (b + i) * ss + a * (int64_t)sizeof(T), sizeof r[i]); \
                for (int step = 1; step < N; step *= 2) {                                           \
                    for (int i = 0; i < N / 2; i++) {                                               \
                        t[2 * i] = TILE_SHUFFLE(r[i], r[i + N / 2], lo, LO);                        \
                        t[2 * i + 1] = TILE_SHUFFLE(r[i], r[i + N / 2], hi, HI);                    \
                    }                                                                               \
                    for (int i = 0; i < N; i++) r[i] = t[i];                                        \
                }                                                                                   \
                for (int i = 0; i < N; i++) memcpy(dst + (a + i) * ds + b * (int64_t)sizeof(T), &r[i], sizeof r[i]); \
            }                                                                                       \
        TILE_EDGE(T, 0, fa, fb, nb)                                                                 \
        TILE_EDGE(T, fa, na, 0, nb)                                                                 \
    }
#define LO2 0, 2
#define HI2 1, 3
#define LO4 0, 4, 1, 5
#define HI4 2, 6, 3, 7
#define LO8 0, 8, 1, 9, 2, 10, 3, 11
#define HI8 4, 12, 5, 13, 6, 14, 7, 15
TILE_VECTOR(1, uint16_t, 8, LO8, HI8)
#if OM_VBYTES >= 64
TILE_VECTOR(2, uint32_t, 8, LO8, HI8)
TILE_VECTOR(3, uint64_t, 8, LO8, HI8)
#else /* AVX2 too: its shuffles across halves of a register take three instructions, 4 x 4 is four times as fast */
TILE_VECTOR(2, uint32_t, 4, LO4, HI4)
TILE_VECTOR(3, uint64_t, 2, LO2, HI2)
#endif

/* --- conversion ------------------------------------------------------------------------------------ */

/* type: storage; wide: what loads give and stores take; kind of wide: f float, d double, i integer */
#define CONVERT_TYPES(X, ...)                                                                       \
    X(F32, float, float, F, __VA_ARGS__)                                                            \
    X(F64, double, double, D, __VA_ARGS__)                                                          \
    X(BF16, uint16_t, float, F, __VA_ARGS__)                                                        \
    X(F16, uint16_t, float, F, __VA_ARGS__)                                                         \
    X(I64, int64_t, int64_t, I, __VA_ARGS__)                                                        \
    X(I32, int32_t, int64_t, I, __VA_ARGS__)                                                        \
    X(I16, int16_t, int64_t, I, __VA_ARGS__)                                                        \
    X(I8, int8_t, int64_t, I, __VA_ARGS__)                                                          \
    X(U8, uint8_t, int64_t, I, __VA_ARGS__)                                                         \
    X(BOOL, uint8_t, int64_t, I, __VA_ARGS__)

static inline int64_t integer_of(double x) { return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN; }

#define LOAD_F32(x) (x)
#define LOAD_F64(x) (x)
#define LOAD_BF16(x) om_bf16_to_f32(x)
#define LOAD_F16(x) om_f16_to_f32(x)
#define LOAD_I64(x) (x)
#define LOAD_I32(x) ((int64_t)(x))
#define LOAD_I16(x) ((int64_t)(x))
#define LOAD_I8(x) ((int64_t)(x))
#define LOAD_U8(x) ((int64_t)(x))
#define LOAD_BOOL(x) ((int64_t)((x) != 0))

#define AS_F(FROM, x) ((float)(x))
#define AS_D(FROM, x) ((double)(x))
#define AS_I(FROM, x) AS_I_##FROM(x)
#define AS_I_F(x) integer_of((double)(x))
#define AS_I_D(x) integer_of(x)
#define AS_I_I(x) (x)

#define STORE_F32(K, x) AS_F(K, x)
#define STORE_F64(K, x) AS_D(K, x)
#define STORE_BF16(K, x) om_f32_to_bf16(AS_F(K, x))
#define STORE_F16(K, x) om_f32_to_f16(AS_F(K, x))
#define STORE_I64(K, x) AS_I(K, x)
#define STORE_I32(K, x) ((int32_t)(uint32_t)(uint64_t)AS_I(K, x))
#define STORE_I16(K, x) ((int16_t)(uint16_t)(uint64_t)AS_I(K, x))
#define STORE_I8(K, x) ((int8_t)(uint8_t)(uint64_t)AS_I(K, x))
#define STORE_U8(K, x) ((uint8_t)(uint64_t)AS_I(K, x))
#define STORE_BOOL(K, x) ((uint8_t)((x) != 0))

#define CONVERT_LOOP(TO, TT, FROM, FT, FW, FK, ss, ds)                                              \
    for (int64_t i = 0; i < n; i++) {                                                               \
        FT s;                                                                                       \
        memcpy(&s, src + i * (ss), sizeof s);                                                       \
        const FW x = LOAD_##FROM(s);                                                                \
        const TT y = STORE_##TO(FK, x);                                                             \
        memcpy(dst + i * (ds), &y, sizeof y);                                                       \
    }
#define CONVERT(TO, TT, TW, TK, FROM, FT, FW, FK)                                                   \
    static void convert_##FROM##_##TO(const char *src, int64_t ss, char *dst, int64_t ds, int64_t n) { \
        const int64_t es = (int64_t)sizeof(FT), ed = (int64_t)sizeof(TT);                           \
        if (ss == es && ds == ed) CONVERT_LOOP(TO, TT, FROM, FT, FW, FK, es, ed)                    \
        else CONVERT_LOOP(TO, TT, FROM, FT, FW, FK, ss, ds)                                         \
    }
/* Every type to every type. A macro is not expanded inside of itself: the inner list is written so that only a second
 * scan, COPY_TWICE, finds it. */
#define COPY_NOTHING()
#define COPY_TYPES() CONVERT_TYPES
#define COPY_TWICE(...) __VA_ARGS__
#define CONVERT_FROM(FROM, FT, FW, FK, ...) COPY_TYPES COPY_NOTHING()()(CONVERT, FROM, FT, FW, FK)
COPY_TWICE(CONVERT_TYPES(CONVERT_FROM, ))

/* make device OPS=...: only between the types of these files and those of sums */
#define CELL(TO, TT, TW, TK, FROM) [OM_##TO] = OM_KEPT(FROM) && OM_KEPT(TO) ? convert_##FROM##_##TO : NULL,
#define CELL_FROM(FROM, FT, FW, FK, ...) [OM_##FROM] = {COPY_TYPES COPY_NOTHING()()(CELL, FROM)},
#define MOVE_CELL(I, T) move_##I,
#define TILE_CELL(I, T) tile_##I,

/* --- past the caches ------------------------------------------------------------------------------- */

#if defined(__SSE2__)
#if OM_VBYTES == 64
#define STREAM(p, x) _mm512_stream_si512((void *)(p), _mm512_load_si512(x))
#elif OM_VBYTES == 32
#define STREAM(p, x) _mm256_stream_si256((void *)(p), _mm256_load_si256((const void *)(x)))
#else
#define STREAM(p, x) _mm_stream_si128((void *)(p), _mm_load_si128((const void *)(x)))
#endif
enum { LINE = 64, PIECE = 4096 }; /* bytes: of a line of the caches; of what is converted at once, and stays in L1 */

static void stream_line(om_copy_line line, const char *src, int64_t ss, char *dst, int64_t ds, int64_t n) {
    _Alignas(LINE) char piece[PIECE];
    int64_t m = (int64_t)(-(uintptr_t)dst % LINE) / ds; /* before the first whole line */
    if (m > n) m = n;
    line(src, ss, dst, ds, m);
    src += m * ss, dst += m * ds, n -= m;
    while ((uintptr_t)dst % LINE == 0 && (m = n * ds < PIECE ? n * ds / LINE * LINE / ds : PIECE / ds) > 0) {
        line(src, ss, piece, ds, m);
        for (int64_t i = 0; i < m * ds; i += OM_VBYTES) STREAM(dst + i, piece + i);
        src += m * ss, dst += m * ds, n -= m;
    }
    _mm_sfence();
    line(src, ss, dst, ds, n);
}
#else
#define stream_line NULL
#endif

const struct om_copy_kernels OM_ISA_NAME(om_copy) = {
    .move = {COPY_SIZES(MOVE_CELL)},
    .tile = {COPY_SIZES(TILE_CELL)},
    .convert = {COPY_TWICE(CONVERT_TYPES(CELL_FROM, ))},
    .stream = stream_line,
};
