/* cuda/attention_f32.h - what attention of f32 by register tiles shares: plain multiply-adds in f32, heads of at most
 * 128 numbers, filled up with zeros to D (64 or 128). OWN rows of one side are a block's own, tiles of TILE rows of the
 * other side pass by in shared memory; a tile's place is filled again by asynchronous copies while the block works with
 * the other operand.
 *
 * A warp has 16 of the own rows, a thread four of them: row and row + OWN / 4 m. Of products with a tile it has columns
 * col + 8 n (rows of the tile), of sums over a tile's rows the numbers 4 col + 32 c to 4 col + 32 c + 3 of a head.
 * Operands come from shared memory as 16-byte vectors: of 16 lanes that are served at once, two read different own rows
 * and eight different rows of the tile, which lie in different banks. Weights of the second product go through 16 x 32
 * numbers of shared memory that are the warp's own.
 */
#ifndef OM_CUDA_ATTENTION_F32_H
#define OM_CUDA_ATTENTION_F32_H

#include "cuda/attention_mma.h"

#define AF_WIDTH(D) ((D) + 4) /* of a tile's row */
#define AF_THREADS(OWN) ((OWN) * 2)
enum { AF_PART = 32, AF_LINE = AF_PART + 8 /* of weights */, AF_ROOM = 16 * AF_LINE };

FN int af_row(void) { return threadIdx.x / 32 * 4 + threadIdx.x % 2 + threadIdx.x / 16 % 2 * 2; }
FN int af_col(void) { return threadIdx.x / 2 % 8; }

/* Four numbers from shared memory; to global memory, 16 bytes aligned. */
FN void af_get(float *x, const float *from) {
#if defined(OM_EMULATED)
    memcpy(x, from, 16);
#else
    const float4 v = *(const float4 *)from;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#endif
}
FN void af_put(float *to, const float *x) {
    chunk v;
#pragma unroll
    for (int e = 0; e < 4; e++) v.x[e] = f32_bits(x[e]);
    st((chunk *)to, v);
}
FN bool af_aligned(const float *head, const int64_t *s, int d) {
    return s[3] == 1 && s[2] % 4 == 0 && d % 4 == 0 && (uintptr_t)head % 16 == 0;
}

/* Rows [from, from + ROWS) of a head on their way into a tile; beyond `limit` rows or d columns: 0. base: the head's
 * first element. */
template <int D, int ROWS, int THREADS>
FN void af_load(const char *x, const int64_t *s, int64_t base, int from, int64_t limit, int d, float *to) {
    enum { EACH = D / 4, STEP = THREADS / EACH }; /* vectors of a row, rows at a time */
    const float *head = (const float *)x + base;
    const int left = (int)limit - from;
    if (af_aligned(head, s, d)) {
        const int own = threadIdx.x / EACH, c = threadIdx.x % EACH * 4;
        const float *row = head + (from + own) * s[2] + c;
        to += own * AF_WIDTH(D) + c;
#pragma unroll 4
        for (int r = 0; r < ROWS; r += STEP, row += STEP * s[2])
            copy_begin<16>(to + r * AF_WIDTH(D), row, own + r < left && c < d);
        return;
    }
    for (int e = threadIdx.x; e < ROWS * D; e += THREADS) {
        const int r = e / D, c = e % D;
        to[r * AF_WIDTH(D) + c] = r < left && c < d ? ld(head + (from + r) * s[2] + c * s[3]) : 0.0f;
    }
}

/* s = own rows times rows of the tile, in the order of a head's numbers. own: the thread's first row; tile: its first
 * column's. */
template <int D, int OWN, int N> FN void af_dots(float (*s)[N], const float *own, const float *tile) {
    enum { W = AF_WIDTH(D) };
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < N; n++) s[m][n] = 0;
#pragma unroll (D > 64 ? 1 : 2)
    for (int c = 0; c < D; c += 4) {
        float x[4][4];
#pragma unroll
        for (int m = 0; m < 4; m++) af_get(x[m], own + m * (OWN / 4) * W + c);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float y[4];
            af_get(y, tile + n * 8 * W + c);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int m = 0; m < 4; m++) s[m][n] += x[m][e] * y[e];
        }
    }
}

/* sums += w times rows of the tile, through `room` of the warp's. tile: the thread's first number of row 0. */
template <int D, int N>
FN void af_add(float (*sums)[D / 8], const float (*w)[N], float *room, const float *tile) {
    enum { W = AF_WIDTH(D) };
    float *const line = room + af_row() % 4 * AF_LINE;
#pragma unroll
    for (int part = 0; part < N / 4; part++) {
        __syncwarp();
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) line[m * 4 * AF_LINE + n * 8 + af_col()] = w[m][part * 4 + n];
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < AF_PART; k += 4) {
            float x[4][4];
#pragma unroll
            for (int m = 0; m < 4; m++) af_get(x[m], line + m * 4 * AF_LINE + k);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 0; c < D / 32; c++) {
                    float y[4];
                    af_get(y, tile + (part * AF_PART + k + e) * W + c * 32);
#pragma unroll
                    for (int m = 0; m < 4; m++)
#pragma unroll
                        for (int i = 0; i < 4; i++) sums[m][c * 4 + i] += x[m][e] * y[i];
                }
        }
    }
}

/* The thread's part of row `row` of a head: sums * by. */
template <int D>
FN void af_store(char *x, const int64_t *s, int64_t base, int64_t row, int d, const float *sums, float by) {
    float *head = (float *)x + base;
    const bool aligned = af_aligned(head, s, d);
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
        const int at = c * 32 + af_col() * 4;
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) y[e] = sums[c * 4 + e] * by;
        if (aligned) {
            if (at < d) af_put(head + row * s[2] + at, y);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (at + e < d) st(head + row * s[2] + (at + e) * s[3], y[e]);
    }
}

/* Dropout of the pairs whose indices are 8 apart, from `at` on: bit k, k <= LAST, is set where pair k is kept; what is
 * above is without meaning. Their words are one counter's, and the next one's where it has no more (cpu/philox.h). */
template <int LAST> FN uint32_t af_kept(const om_gpu_attention &p, uint64_t seed, uint64_t at) {
    const uint64_t counter = at / 64 * 8 + at % 8;
    const int begin = (int)(at / 8 % 8);
    uint32_t kept = philox_below(seed, p.rng, counter, p.keep_below);
    if (begin + LAST > 7) kept |= philox_below(seed, p.rng, counter + 8, p.keep_below) << 8;
    return kept >> begin;
}

/* Of own queries from i on and keys from j on, the thread's first of each: bit 8 m + n. */
template <int OWN, int N> FN uint32_t af_draw(const om_gpu_attention &p, uint64_t seed, int64_t head, int i, int j) {
    uint32_t bits = 0;
#pragma unroll 2
    for (int m = 0; m < 4; m++) {
        const uint64_t at = (uint64_t)((head * p.tq + i + m * (OWN / 4)) * p.tk + j);
        bits |= (af_kept<N - 1>(p, seed, at) & ((1 << N) - 1)) << 8 * m;
    }
    return bits;
}
FN bool af_stays(uint32_t bits, int m, int n) { return bits >> (8 * m + n) & 1; }

/* The queries of a block that works off keys, and the keys that they see. */
struct af_queries {
    att_head a;
    int i0, first, end;  /* the first query; keys that any of them sees, from a tile's first on */
    int low, high;       /* keys that all see */
};
template <int OWN, int TILE> FN af_queries af_queries_at(const om_gpu_attention &p) {
    af_queries q;
    q.a = {blockIdx.y / p.hq, blockIdx.y % p.hq, 0};
    q.a.kv = q.a.h / (p.hq / p.hk);
    q.i0 = (int)(p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * OWN; /* those that see most begin first */
    const am_span begin = am_keys(p, q.a.b, q.i0), last = am_keys(p, q.a.b, q.i0 + OWN - 1);
    q.first = begin.lo / TILE * TILE, q.end = last.hi, q.low = last.lo, q.high = begin.hi;
    return q;
}

/* Scaled scores; -inf: hidden. Of queries i + OWN / 4 m and keys j + 8 n. */
template <int OWN, int N>
FN void af_hide(const om_gpu_attention &p, const att_head &a, int i, int j, float (*s)[N]) {
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int query = am_clip(i + m * (OWN / 4), p.tq - 1);
        const am_span see = am_keys(p, a.b, query);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int key = j + n * 8;
            if (key < see.lo || key >= see.hi) s[m][n] = -INFINITY;
            else if (p.mask_kind) s[m][n] = am_masked(p, a, query, key, s[m][n]);
            IN_TURN();
        }
    }
}
#endif
