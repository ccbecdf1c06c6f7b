/* mma_check.cpp - the emulation of tensor cores by itself (csrc/cuda/emulate.h, mma.h): fragments laid out element by
 * element by the formulas of the PTX manual ("Matrix Fragments for mma.m16n8k16 with floating point type"), and those
 * that ldmatrix loads, give the plain product. Prints how many products were compared.
 *
 *     mma_check seed
 */
#include "cuda/emulate.h"

#include "cuda/mma.h"

struct job { const uint16_t *a, *b, *b_turned; float *c; int how; }; /* a 16 x 16, b 16 x 8 of two; c 16 x 16 */
enum { BY_ELEMENT, BY_LDMATRIX, BY_LDMATRIX_TURNED, ONE_LANE_MISSING, NOT_ALIGNED, OUTSIDE };

template <class S> static void product(const void *param) {
    const job &j = *(const job *)param;
    SHARED(shared);
    S *a = (S *)shared, *b = a + 16 * 72, *bt = b + 16 * 72;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, group = lane >> 2, in_group = lane % 4;
    float c[2][4] = {};
    uint32_t ra[4], rb[4];
    uint16_t *ea = (uint16_t *)ra, *eb = (uint16_t *)rb;
    if (!warp)
        for (int e = lane; e < 256; e += 32) {
            a[e / 16 * 72 + e % 16].u = j.a[e], b[e / 16 * 72 + e % 16].u = j.b[e];
            bt[e / 16 * 72 + e % 16].u = j.b_turned[e];
        }
    __syncthreads();
    if (warp) { /* another warp's products do not disturb these */
        uint32_t none[4] = {0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u};
        mma_16816<S>(c[0], none, none);
        return;
    }
    if (j.how == ONE_LANE_MISSING && lane == 7) return;
    if (j.how == NOT_ALIGNED) ldmatrix<false>(ra, (char *)(a + lane % 16 * 72) + 2);
    if (j.how == OUTSIDE) ldmatrix<false>(ra, shared + 3 * 16 * 72 * 2);
    if (j.how == BY_ELEMENT || j.how == ONE_LANE_MISSING) {
        for (int i = 0; i < 8; i++) {
            const int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
            const int col = i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
            ea[i] = j.a[row * 16 + col];
        }
        for (int n = 0; n < 2; n++) {
            for (int i = 0; i < 4; i++) {
                const int row = i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8, col = group;
                eb[i] = j.b[row * 16 + 8 * n + col];
            }
            mma_16816<S>(c[n], ra, rb);
        }
    } else {
        mma_a(ra, a, 72, 0, 0);
        if (j.how == BY_LDMATRIX) mma_b_turned(rb, b, 72, 0, 0); /* rows of b are rows of the tile */
        else mma_b(rb, bt, 72, 0, 0);
        mma_16816<S>(c[0], ra, rb);
        mma_16816<S>(c[1], ra, rb + 2);
    }
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++) {
            const int row = i < 2 ? group : group + 8, col = in_group * 2 + (i & 1);
            j.c[row * 16 + 8 * n + col] = c[n][i];
        }
}

static uint16_t bits(float x, bf16) { return bf16_out(x); }
static uint16_t bits(float x, f16) { return f16_out(x); }

template <class S> static int compare(uint64_t seed) {
    static uint16_t a[256], b[256], bt[256];
    static float c[256];
    static const unsigned grid[3] = {1, 1, 1};
    uint64_t s = seed + 1;
    int n = 0;
    for (int turn = 0; turn < 20; turn++)
        for (int how = BY_ELEMENT; how <= OUTSIDE; how++) {
            for (int i = 0; i < 256; i++) {
                a[i] = bits((float)(emu_random(&s) % 63) - 31, S());
                bt[i % 16 * 16 + i / 16] = b[i] = bits((float)(emu_random(&s) % 63) / 8 - 4, S());
            }
            const job j = {a, b, bt, c, how};
            emu_seed = seed + turn;
            memset(c, 0xff, sizeof c);
            const bool ok = emu_launch("product", product<S>, &j, grid, 64, 3 * 16 * 72 * 2);
            if (ok != (how < ONE_LANE_MISSING)) return fprintf(stderr, "%d: %s\n", how, emu.message), -1;
            for (int i = 0; ok && i < 256; i++) {
                float want = 0; /* exact: small multiples of 1/8 */
                for (int k = 0; k < 16; k++) want += in(S{a[i / 16 * 16 + k]}) * in(S{b[k * 16 + i % 16]});
                if (c[i] != want)
                    return fprintf(stderr, "%d: %d: %g, not %g\n", how, i, c[i], want), -1;
                n++;
            }
        }
    return n;
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    const int x = compare<bf16>(seed), y = compare<f16>(seed);
    printf("%d %d\n", x, y);
    return x < 0 || y < 0;
}
