/* cuda/mma.h - tensor cores (sm_80 and later): products of 16x16 by 16x8 fragments, their way from shared memory and
 * into it, 16-bit pairs. Which lane holds what is the PTX manual's; emulate.h has the same functions for tests.
 *
 * Of a warp's lane with g = lane / 4, t = lane % 4, a pair being two 16-bit numbers of a register, the lower first:
 *   a (16 x 16)  a[0] row g, a[1] row g + 8, columns 2t, 2t + 1; a[2], a[3]: columns + 8
 *   b (16 x 8)   b[0] column g, rows 2t, 2t + 1; b[1]: rows + 8
 *   c (16 x 8)   c[0], c[1] row g, columns 2t, 2t + 1; c[2], c[3]: row g + 8
 * So c of two products side by side, rounded, is an a.
 */
#ifndef OM_CUDA_MMA_H
#define OM_CUDA_MMA_H

#include "cuda/kernel.h"

#if !defined(OM_EMULATED)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define MMA_BODY(call) __trap() /* never launched there (lower_attention.c) */
#else
#define MMA_BODY(call) call
#endif

#define MMA(type)                                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                     \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <class S> FN void mma_16816(float *c, const uint32_t *a, const uint32_t *b);
template <> FN_MEMBER void mma_16816<bf16>(float *c, const uint32_t *a, const uint32_t *b) { MMA("bf16"); }
template <> FN_MEMBER void mma_16816<f16>(float *c, const uint32_t *a, const uint32_t *b) { MMA("f16"); }
#undef MMA

/* Four 8 x 8 matrices of 16-bit numbers, the rows of the ith told by lanes 8i to 8i + 7: a lane gets row g, columns 2t
 * and 2t + 1 of each; turned: column g, rows 2t and 2t + 1. */
template <bool turned> FN void ldmatrix(uint32_t *r, const void *row) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    if (turned)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

/* 4 or 16 bytes, aligned to as many, on their way to shared memory; not given: zeros, and nothing is read. They are
 * there once the thread has waited for their group, which it ends by copies_end: for other threads behind a barrier
 * after that. copies_wait: until at most `left` of the groups that were ended are under way. */
template <int bytes> FN void copy_begin(void *to, const void *from, bool given) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if (bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(at), "l"(__cvta_generic_to_global(from)), "r"(given ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :: "r"(at), "l"(__cvta_generic_to_global(from)), "r"(given ? 4 : 0) : "memory");
}
FN void copies_end(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left> FN void copies_wait(void) { asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory"); }
#else
#define MMA_BODY(call) call
template <class S> FN void mma_16816(float *c, const uint32_t *a, const uint32_t *b) { emu_mma_16816<S>(c, a, b); }
template <bool turned> FN void ldmatrix(uint32_t *r, const void *row) { emu_ldmatrix(r, row, turned); }
template <int bytes> FN void copy_begin(void *to, const void *from, bool given) {
    emu_copy_begin(to, from, bytes, given);
}
FN void copies_end(void) { emu_copies_end(); }
template <int left> FN void copies_wait(void) { emu_copies_wait(left); }
#endif

template <class S> FN uint32_t pair_of(float lo, float hi);
template <> FN_MEMBER uint32_t pair_of<bf16>(float lo, float hi) { return bf16_pair(lo, hi); }
template <> FN_MEMBER uint32_t pair_of<f16>(float lo, float hi) { return f16_pair(lo, hi); }

/* Tiles in shared memory: rows of `width` 16-bit numbers, which is 8 modulo 64: eight rows that are
 * read together lie in different banks. */

/* a: rows from `row`, columns from `col` of a tile */
template <class S> FN void mma_a(uint32_t *a, const S *tile, int width, int row, int col) {
    const int lane = threadIdx.x & 31;
    ldmatrix<false>(a, tile + (row + lane % 16) * width + col + lane / 16 * 8);
}
/* b of two products side by side, columns of b being rows of the tile: b[0], b[1] from `row` on, the rest from
 * row + 8 */
template <class S> FN void mma_b(uint32_t *b, const S *tile, int width, int row, int col) {
    const int lane = threadIdx.x & 31;
    ldmatrix<false>(b, tile + (row + lane % 8 + lane / 16 * 8) * width + col + lane / 8 % 2 * 8);
}
/* the same, rows of b being rows of the tile: b[0], b[1] are columns from `col`, b[2], b[3] from col + 8 */
template <class S> FN void mma_b_turned(uint32_t *b, const S *tile, int width, int row, int col) {
    const int lane = threadIdx.x & 31;
    ldmatrix<true>(b, tile + (row + lane % 16) * width + col + lane / 16 * 8);
}
#endif
