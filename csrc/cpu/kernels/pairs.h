/* pairs.h - bf16 packed for VDPBF16PS: pairs of neighbours along k, lanes side by side. For AVX-512, after vec.h. */
#ifndef OM_PAIRS_H
#define OM_PAIRS_H

/* Rows of k that packing fetches early; the processor does not follow such strides itself (10 % of an input
 * gradient). */
enum { AHEAD = 16 };

static inline __mmask16 first(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }
static inline __mmask32 first32(int64_t n) { return n >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << n) - 1; }

/* Lanes are contiguous: panels of ld lanes, `size` pairs apart, filled together so that memory is read in order. */
static void pack_lanes(uint32_t *dst, int64_t size, int ld, const uint16_t *src, int64_t w, int64_t kc, int64_t ks) {
    for (int64_t k = 0; k < kc; k += 2, src += 2 * ks, dst += ld) {
        uint32_t *d = dst;
        if (k + AHEAD < kc)
            for (int64_t i = 0; i < w; i += 32) {
                __builtin_prefetch(src + AHEAD * ks + i);
                __builtin_prefetch(src + (AHEAD + 1) * ks + i);
            }
        for (int64_t p = 0; p < w; p += ld, d += size)
            for (int i = 0; i < ld; i += VL) {
                const int64_t left = w - p - i < ld - i ? w - p - i : ld - i;
                const __mmask16 have = first(left);
                __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(have, src + p + i));
                if (k + 1 < kc) {
                    const __m512i y = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(have, src + ks + p + i));
                    x = _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
                }
                _mm512_mask_storeu_epi32(d + i, first(ld - i), x);
            }
    }
}

/* One panel of w <= ld lanes, ls apart; along k elements are ks apart. */
static void pack_panel(uint32_t *dst, int ld, const uint16_t *src, int64_t w, int64_t kc, int64_t ls, int64_t ks) {
    if (ks == 1) { /* pairs lie as they are wanted: 16 of 16 lanes are transposed */
        for (int64_t k = 0; k < kc; k += 2 * VL)
            for (int i0 = 0; i0 < ld; i0 += VL) {
                const __mmask32 have = first32(kc - k);
                const int64_t rows = kc - k >= 2 * VL ? VL : (kc - k + 1) / 2;
                V r[VL];
#pragma GCC unroll 16
                for (int i = 0; i < VL; i++) __builtin_prefetch(src + (i0 + i < w ? i0 + i : 0) * ls + k + 4 * 2 * VL);
#pragma GCC unroll 16
                for (int i = 0; i < VL; i++)
                    r[i] = (V)_mm512_maskz_loadu_epi16(i0 + i < w ? have : 0, src + (i0 + i < w ? i0 + i : 0) * ls + k);
                transpose_f32(r);
                const __mmask16 lanes = first(ld - i0);
                uint32_t *d = dst + k / 2 * ld + i0;
                if (rows == VL) {
#pragma GCC unroll 16
                    for (int j = 0; j < VL; j++) _mm512_mask_storeu_epi32(d + j * ld, lanes, (__m512i)r[j]);
                } else {
                    for (int j = 0; j < rows; j++) _mm512_mask_storeu_epi32(d + j * ld, lanes, (__m512i)r[j]);
                }
            }
        return;
    }
    for (int64_t k = 0; k < kc; k += 2, dst += ld)
        for (int i = 0; i < ld; i++) {
            const uint16_t *s = src + i * ls + k * ks;
            dst[i] = i >= w ? 0 : s[0] | (k + 1 < kc ? (uint32_t)s[ks] << 16 : 0);
        }
}

static inline __m512 widen(__m256i h) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }

static inline __m256i narrow(__m512 x) { /* as om_f32_to_bf16 */
    const __m512i u = (__m512i)x, high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i even = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(even, nan, high, _mm512_set1_epi32(0x40)));
}

#endif
