/* cuda/scalar.h - single numbers in every .cu: bits, 16-bit floats, random words. The common subset of C and
 * CUDA; under emulation (OM_EMULATED) the host's own conversions.
 */
#ifndef OM_CUDA_SCALAR_H
#define OM_CUDA_SCALAR_H

#if !defined(OM_EMULATED)
#define FN static __device__ __forceinline__
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
FN float bits_f32(uint32_t u) { return om_bits_f32(u); }
FN uint32_t f32_bits(float x) { return om_f32_bits(x); }
FN float f16_in(uint16_t h) { return om_f16_to_f32(h); }
FN uint16_t f16_out(float x) { return om_f32_to_f16(x); }
#endif

FN float bf16_in(uint16_t h) { return bits_f32((uint32_t)h << 16); }
#if !defined(OM_EMULATED) && __CUDA_ARCH__ >= 800
FN uint16_t bf16_out(float x) { /* NaN becomes 0x7fff; the CPU, and a GPU before sm_80, keep its upper bits */
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
/* Two beside each other, the first in the lower half */
FN uint32_t bf16_pair(float x, float y) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(y), "f"(x));
    return w;
}
FN uint32_t f16_pair(float x, float y) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(y), "f"(x));
    return w;
}
#else
FN uint16_t bf16_out(float x) {
    const uint32_t u = f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
FN uint32_t bf16_pair(float x, float y) { return bf16_out(x) | (uint32_t)bf16_out(y) << 16; }
FN uint32_t f16_pair(float x, float y) { return f16_out(x) | (uint32_t)f16_out(y) << 16; }
#endif

/* Four words of a counter: om_philox_words (the tests compare the two). */
FN void philox_words(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t *w) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = (uint32_t)stream,
             c3 = (uint32_t)(stream >> 32);
    for (int r = 0; r < 7; r++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1, c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
}
FN uint32_t philox_exchanged(uint32_t word) { return word << 16 | word >> 16; }
/* Word of one element: philox.h's om_philox_at. */
FN uint32_t philox_at(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t w[4];
    philox_words(seed, stream, index / 64 * 8 + index % 8, w);
    const uint32_t k = (uint32_t)(index / 8 % 4); /* an indexed array would lie in memory */
    const uint32_t word = k < 2 ? k ? w[1] : w[0] : k == 2 ? w[2] : w[3];
    return index / 32 % 2 ? philox_exchanged(word) : word;
}
/* Which of the eight words that begin with a counter's index, 8 apart, are below a number: a bit each. */
FN uint32_t philox_below(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t below) {
    uint32_t w[4], bits = 0;
    philox_words(seed, stream, counter, w);
    for (int k = 0; k < 4; k++)
        bits |= (uint32_t)(w[k] < below) << k | (uint32_t)(philox_exchanged(w[k]) < below) << (4 + k);
    return bits;
}
#endif
