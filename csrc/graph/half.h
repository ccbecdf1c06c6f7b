/* half.h - bfloat16 and IEEE half as storage formats: conversions to and from float, branch-free so that loops
 * vectorise.
 *
 * Both directions round to nearest even, keep NaN (quiet, sign kept), infinities, signed zeros and subnormals: the
 * rules of torch and of the hardware's own conversions. Doubles go through float first, as torch does.
 */
#ifndef OM_HALF_H
#define OM_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t om_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float om_bits_f32(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float om_bf16_to_f32(uint16_t h) { return om_bits_f32((uint32_t)h << 16); }

static inline uint16_t om_f32_to_bf16(float x) {
    const uint32_t u = om_f32_bits(x), rounded = u + 0x7fffu + ((u >> 16) & 1u), nan = u | 0x400000u;
    return (uint16_t)((x != x ? nan : rounded) >> 16); /* rounding must not turn a NaN into infinity */
}

#if defined(__aarch64__) && defined(__ARM_FP16_FORMAT_IEEE) /* the processor's own: fcvt, fcvtl, fcvtn */
static inline float om_f16_to_f32(uint16_t h) {
    __fp16 x;
    memcpy(&x, &h, sizeof x);
    return (float)x;
}

static inline uint16_t om_f32_to_f16(float f) {
    const __fp16 x = (__fp16)f;
    uint16_t h;
    memcpy(&h, &x, sizeof h);
    return h;
}
#else
static inline float om_f16_to_f32(uint16_t h) {
    uint32_t abs = (uint32_t)(h & 0x7fffu) << 13, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t finite = om_f32_bits(om_bits_f32(abs) * 0x1p112f); /* moves the exponent bias; subnormals come out right */
    uint32_t special = abs | 0x7f800000u;
    return om_bits_f32((abs >= 0x0f800000u ? special : finite) | sign);
}

static inline uint16_t om_f32_to_f16(float x) {
    uint32_t u = om_f32_bits(x), abs = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
    /* below 2^-14 the spacing is 2^-24: adding 0.5 leaves exactly those bits, rounded by the adder */
    uint32_t small = om_f32_bits(om_bits_f32(abs) + 0.5f) - 0x3f000000u;
    /* rebias 127 -> 15; a carry gives infinity */
    uint32_t normal = (abs - 0x38000000u + 0xfffu + ((abs >> 13) & 1u)) >> 13;
    uint32_t special = abs > 0x7f800000u ? 0x7e00u | ((abs >> 13) & 0x3ffu) : 0x7c00u;
    uint32_t r = abs < 0x38800000u ? small : normal;
    return (uint16_t)((abs >= 0x47800000u ? special : r) | sign);
}
#endif

#endif
