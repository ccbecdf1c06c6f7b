/* philox.h - counter-based random numbers: Philox4x32-10 keyed by (seed, stream, logical element index).
 *
 * A random node draws one 32-bit word per element of its output. The word depends only on the seed of the forward, the
 * node's stream id (node->rng) and the element's row-major index in the node's logical shape, never on tiles, threads,
 * strides, fusion or the instruction set; the gradient and a recomputed clone therefore draw the same mask without
 * storing it.
 *
 * Mapping. 64 consecutive indices share 16 counters: index i uses counter (i / 64) * 16 + i % 16 and word (i / 16) % 4.
 * So a block of 16 counters fills four contiguous runs of 16 and no shuffle is needed at any vector width; on a GPU a
 * warp's loads stay coalesced.
 *     counter = (block lo, block hi, stream lo, stream hi)     key = (seed lo, seed hi)
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

enum { OM_PHILOX_BLOCK = 64 }; /* indices per block: draws are made block by block */

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
    for (int r = 0; r < 10; r++) {
        uint64_t p0 = (uint64_t)OM_PHILOX_M0 * c0, p1 = (uint64_t)OM_PHILOX_M1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)p1, c2 = n2, c3 = (uint32_t)p0;
        k0 += OM_PHILOX_W0, k1 += OM_PHILOX_W1;
    }
    w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
}

/* The word of one element. */
static inline uint32_t om_philox_at(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t w[4];
    om_philox_words(seed, stream, index / 64 * 16 + index % 16, w);
    return w[index / 16 % 4];
}

/* Words of the 64 indices [64 * block, 64 * block + 64). Counters sit in the low halves of 64-bit lanes: the 32 x 32 ->
 * 64 multiply ignores the high halves, so what the xors leave there does no harm. (A scalar loop auto-vectorises 3-8
 * times slower.) */
static inline void om_philox_block(uint64_t seed, uint64_t stream, uint64_t block, uint32_t out[64]) {
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#if defined(__AVX512F__)
#define OM_PX(op) _mm512_##op
#define OM_PX_XOR _mm512_xor_si512
    typedef __m512i px;
    enum { LANES = 8 };
    const px iota = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
#elif defined(__AVX2__)
#define OM_PX(op) _mm256_##op
#define OM_PX_XOR _mm256_xor_si256
    typedef __m256i px;
    enum { LANES = 4 };
    const px iota = _mm256_set_epi64x(3, 2, 1, 0);
#else
#define OM_PX(op) _mm_##op
#define OM_PX_XOR _mm_xor_si128
    typedef __m128i px;
    enum { LANES = 2 };
    const px iota = _mm_set_epi64x(1, 0);
#endif
#if defined(__AVX512F__)
#define OM_PX_SET1 _mm512_set1_epi64
#elif defined(__AVX2__)
#define OM_PX_SET1 _mm256_set1_epi64x
#else
#define OM_PX_SET1 _mm_set1_epi64x
#endif
    const px m0 = OM_PX_SET1(OM_PHILOX_M0), m1 = OM_PX_SET1(OM_PHILOX_M1);
    for (int g = 0; g < 16; g += 2 * LANES) { /* two vectors of counters at a time hide the multiply's latency */
        /* a multiple of 4, and 16 counters never carry into the upper half */
        const uint64_t first = block * 16 + (uint64_t)g;
        px a0 = OM_PX(add_epi64)(OM_PX_SET1((int64_t)(first & 0xFFFFFFFFu)), iota),
           b0 = OM_PX(add_epi64)(a0, OM_PX_SET1(LANES));
        px a1 = OM_PX_SET1((int64_t)(first >> 32)), b1 = a1;
        px a2 = OM_PX_SET1((int64_t)(uint32_t)stream), b2 = a2, a3 = OM_PX_SET1((int64_t)(stream >> 32)), b3 = a3;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int r = 0; r < 10; r++) {
            const px v0 = OM_PX_SET1((int64_t)k0), v1 = OM_PX_SET1((int64_t)k1);
            px p0 = OM_PX(mul_epu32)(a0, m0), p1 = OM_PX(mul_epu32)(a2, m1);
            px q0 = OM_PX(mul_epu32)(b0, m0), q1 = OM_PX(mul_epu32)(b2, m1);
            a0 = OM_PX_XOR(OM_PX_XOR(OM_PX(srli_epi64)(p1, 32), a1), v0),
            a2 = OM_PX_XOR(OM_PX_XOR(OM_PX(srli_epi64)(p0, 32), a3), v1);
            b0 = OM_PX_XOR(OM_PX_XOR(OM_PX(srli_epi64)(q1, 32), b1), v0),
            b2 = OM_PX_XOR(OM_PX_XOR(OM_PX(srli_epi64)(q0, 32), b3), v1);
            a1 = p1, a3 = p0, b1 = q1, b3 = q0;
            k0 += OM_PHILOX_W0, k1 += OM_PHILOX_W1;
        }
        const px w[4][2] = {{a0, b0}, {a1, b1}, {a2, b2}, {a3, b3}};
        for (int j = 0; j < 4; j++) {
            uint32_t *o = out + j * 16 + g;
            for (int h = 0; h < 2; h++, o += LANES) {
#if defined(__AVX512F__)
                _mm256_storeu_si256((__m256i *)o, _mm512_cvtepi64_epi32(w[j][h]));
#elif defined(__AVX2__)
                const __m256i even = _mm256_permutevar8x32_epi32(w[j][h], _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
                _mm_storeu_si128((__m128i *)o, _mm256_castsi256_si128(even));
#else
                _mm_storel_epi64((__m128i *)o, _mm_shuffle_epi32(w[j][h], 0x88));
#endif
            }
        }
    }
#undef OM_PX
#undef OM_PX_XOR
#undef OM_PX_SET1
#else
    for (int g = 0; g < 16; g++) {
        uint32_t w[4];
        om_philox_words(seed, stream, block * 16 + (uint64_t)g, w);
        for (int j = 0; j < 4; j++) out[j * 16 + g] = w[j];
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
