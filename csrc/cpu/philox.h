/* philox.h - counter-based random numbers: Philox4x32-7 keyed by (seed, stream, logical element index).
 *
 * A random node draws one 32-bit word per element of its output. The word depends only on the seed of the forward, the
 * node's stream id (node->rng) and the element's row-major index in the node's logical shape, never on tiles, threads,
 * strides, fusion or the instruction set; the gradient and a recomputed clone therefore draw the same mask without
 * storing it. Seven rounds are the fewest that pass BigCrush (Salmon et al., 2011, table 2).
 *
 * Mapping. 64 consecutive indices share 8 counters, so each word of a counter serves two of them, 32 apart: index i has
 * counter (i / 64) * 8 + i % 8 and word (i / 8) % 4, with its halves exchanged where i / 32 is odd. So eight 64-bit
 * lanes of counters fill eight contiguous runs of eight, and the fragments of a GPU's tensor cores, whose columns are
 * 8 apart, need a counter for eight scores.
 *     counter = (block lo, block hi, stream lo, stream hi)     key = (seed lo, seed hi)
 * What two indices that share a word may be used for: a comparison of the word with a number (each word by itself is
 * uniform, so probabilities are exact to 2^-32; that both are kept differs from the product of probabilities by less
 * than 2^-15), or its lower 16 bits (which are independent). Not for two numbers of 32 bits.
 *
 * Keep rule of dropout, the same everywhere:  keep  <=>  word < om_philox_keep_below(p),  kept values are scaled by
 * om_dropout_scale(p). p = 0 must be treated by the caller as "keep all" (the threshold would drop one word in 2^32).
 */
#ifndef OM_PHILOX_H
#define OM_PHILOX_H

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum {
    OM_PHILOX_BLOCK = 64, /* indices per block: draws are made block by block */
    OM_PHILOX_ROUNDS = 7,
};

#define OM_PHILOX_M0 0xD2511F53u
#define OM_PHILOX_M1 0xCD9E8D57u
#define OM_PHILOX_W0 0x9E3779B9u
#define OM_PHILOX_W1 0xBB67AE85u

static inline uint32_t om_philox_keep_below(double p) {
    double t = (1.0 - p) * 4294967296.0;
    return t <= 0 ? 0u : t >= 4294967295.0 ? 0xFFFFFFFFu : (uint32_t)t;
}

static inline double om_dropout_scale(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

/* The four words of one counter: the reference of everything below. */
static inline void om_philox_words(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t w[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = (uint32_t)stream,
             c3 = (uint32_t)(stream >> 32);
    for (int r = 0; r < OM_PHILOX_ROUNDS; r++) {
        uint64_t p0 = (uint64_t)OM_PHILOX_M0 * c0, p1 = (uint64_t)OM_PHILOX_M1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)p1, c2 = n2, c3 = (uint32_t)p0;
        k0 += OM_PHILOX_W0, k1 += OM_PHILOX_W1;
    }
    w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
}

static inline uint32_t om_philox_exchanged(uint32_t word) { return word << 16 | word >> 16; }

/* The word of one element. */
static inline uint32_t om_philox_at(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t w[4];
    om_philox_words(seed, stream, index / 64 * 8 + index % 8, w);
    const uint32_t word = w[index / 8 % 4];
    return index / 32 % 2 ? om_philox_exchanged(word) : word;
}

/* Words of the 64 indices [64 * block, 64 * block + 64). Counters sit in the low halves of 64-bit lanes: the 32 x 32 ->
 * 64 multiply ignores the high halves, so what the xors leave there does no harm. (A scalar loop auto-vectorises 3-8
 * times slower.) */
static inline void om_philox_block(uint64_t seed, uint64_t stream, uint64_t block, uint32_t out[64]) {
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#if defined(__AVX512F__)
#define OM_PX(op) _mm512_##op
#define OM_PX_XOR _mm512_xor_si512
#define OM_PX_SET1 _mm512_set1_epi64
    typedef __m512i px;
    enum { LANES = 8, SIDE = 1 }; /* SIDE vectors of counters at a time hide the multiply's latency; here the */
                                  /* processor works on several blocks at once                                */
    const px iota = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
#elif defined(__AVX2__)
#define OM_PX(op) _mm256_##op
#define OM_PX_XOR _mm256_xor_si256
#define OM_PX_SET1 _mm256_set1_epi64x
    typedef __m256i px;
    enum { LANES = 4, SIDE = 2 };
    const px iota = _mm256_set_epi64x(3, 2, 1, 0);
#else
#define OM_PX(op) _mm_##op
#define OM_PX_XOR _mm_xor_si128
#define OM_PX_SET1 _mm_set1_epi64x
    typedef __m128i px;
    enum { LANES = 2, SIDE = 2 };
    const px iota = _mm_set_epi64x(1, 0);
#endif
    const px m0 = OM_PX_SET1(OM_PHILOX_M0), m1 = OM_PX_SET1(OM_PHILOX_M1);
    for (int g = 0; g < 8; g += SIDE * LANES) {
        /* a multiple of 8, and 8 counters never carry into the upper half */
        const uint64_t first = block * 8 + (uint64_t)g;
        px c[SIDE][4];
        for (int i = 0; i < SIDE; i++) {
            c[i][0] = OM_PX(add_epi64)(OM_PX_SET1((int64_t)((first & 0xFFFFFFFFu) + (uint64_t)(i * LANES))), iota);
            c[i][1] = OM_PX_SET1((int64_t)(first >> 32));
            c[i][2] = OM_PX_SET1((int64_t)(uint32_t)stream);
            c[i][3] = OM_PX_SET1((int64_t)(stream >> 32));
        }
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int r = 0; r < OM_PHILOX_ROUNDS; r++) {
            const px v0 = OM_PX_SET1((int64_t)k0), v1 = OM_PX_SET1((int64_t)k1);
            for (int i = 0; i < SIDE; i++) {
                const px p0 = OM_PX(mul_epu32)(c[i][0], m0), p1 = OM_PX(mul_epu32)(c[i][2], m1);
                c[i][0] = OM_PX_XOR(OM_PX_XOR(OM_PX(srli_epi64)(p1, 32), c[i][1]), v0);
                c[i][2] = OM_PX_XOR(OM_PX_XOR(OM_PX(srli_epi64)(p0, 32), c[i][3]), v1);
                c[i][1] = p1, c[i][3] = p0;
            }
            k0 += OM_PHILOX_W0, k1 += OM_PHILOX_W1;
        }
#if defined(__AVX512F__)
        const px even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        for (int j = 0; j < 4; j += 2) {
            const px w = _mm512_permutex2var_epi32(c[0][j], even, c[0][j + 1]);
            _mm512_storeu_si512(out + j * 8, w);
            _mm512_storeu_si512(out + 32 + j * 8, _mm512_rol_epi32(w, 16));
        }
#elif defined(__AVX2__)
        for (int j = 0; j < 4; j++) { /* the even words of each half, then the halves' order */
            const __m256 halves =
                _mm256_shuffle_ps(_mm256_castsi256_ps(c[0][j]), _mm256_castsi256_ps(c[1][j]), 0x88);
            const __m256i w = _mm256_permute4x64_epi64(_mm256_castps_si256(halves), 0xD8),
                          exchanged = _mm256_or_si256(_mm256_slli_epi32(w, 16), _mm256_srli_epi32(w, 16));
            _mm256_storeu_si256((__m256i *)(out + j * 8), w);
            _mm256_storeu_si256((__m256i *)(out + 32 + j * 8), exchanged);
        }
#else
        for (int j = 0; j < 4; j++) {
            const __m128 words = _mm_shuffle_ps(_mm_castsi128_ps(c[0][j]), _mm_castsi128_ps(c[1][j]), 0x88);
            const __m128i w = _mm_castps_si128(words),
                          exchanged = _mm_or_si128(_mm_slli_epi32(w, 16), _mm_srli_epi32(w, 16));
            _mm_storeu_si128((__m128i *)(out + j * 8 + g), w);
            _mm_storeu_si128((__m128i *)(out + 32 + j * 8 + g), exchanged);
        }
#endif
    }
#undef OM_PX
#undef OM_PX_XOR
#undef OM_PX_SET1
#else
    for (int g = 0; g < 8; g++) {
        uint32_t w[4];
        om_philox_words(seed, stream, block * 8 + (uint64_t)g, w);
        for (int j = 0; j < 4; j++) out[j * 8 + g] = w[j], out[32 + j * 8 + g] = om_philox_exchanged(w[j]);
    }
#endif
}

/* Words of the indices [first, first + n), any alignment. */
static inline void om_philox_fill(uint64_t seed, uint64_t stream, uint64_t first, int64_t n, uint32_t *out) {
    uint32_t tmp[64];
    while (n > 0) {
        const uint64_t skip = first % 64;
        const int64_t take = 64 - (int64_t)skip < n ? 64 - (int64_t)skip : n;
        if (take == 64) {
            om_philox_block(seed, stream, first / 64, out);
        } else {
            om_philox_block(seed, stream, first / 64, tmp);
            for (int64_t i = 0; i < take; i++) out[i] = tmp[(int64_t)skip + i];
        }
        first += (uint64_t)take, out += take, n -= take;
    }
}

#endif
