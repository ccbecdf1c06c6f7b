/* compare.c - om-tiles: has this processor's TDPBF16PS the bits that csrc/cpu/kernels/amx.h emulates?
 *
 *   om-tiles [n]       n products of tiles of several kinds: of one size, of all exponents, where sums cancel, near the
 *                      smallest normal number, with infinities. Any NaN counts as any other.
 *   om-tiles sums      a number for each of some products by om_gemm; run it as
 *                      ORTMODULE_GEMM=own, and beside om-tiles-emulated, in which the same kernel has emulated tiles
 *
 * Exit status 77: this processor has no tiles, or the system does not lend them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/gemm.h"

void om_tiles_emulated(const uint16_t *a, const uint16_t *b, float *c);
void om_tiles_native(const uint16_t *a, const uint16_t *b, float *c);

static uint64_t state = 88172645463325252u;
static uint32_t draw(void) { /* xorshift64 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
}

enum { ONE_SIZE, ALL, CLOSE, TINY, SMALL, SPECIAL, KINDS };
static uint32_t number(int kind, bool bf16) { /* bits of a float; a bf16's are the high half */
    static const uint8_t least[KINDS] = {120, 1, 120, 58, 0, 0}, span[KINDS] = {10, 254, 2, 12, 70, 255};
    const uint32_t sign = draw() & 0x80000000u, fraction = draw() & (bf16 ? 0x7f0000u : 0x7fffffu);
    uint32_t e = least[kind] + draw() % span[kind];
    if (kind == TINY && !bf16) e = draw() % 12; /* as small as products */
    if (kind == SPECIAL && draw() % 64 == 0) return sign | 0x7f800000u;
    return sign | e << 23 | fraction;
}

static int compare(long n) {
    long wrong = 0;
    for (long i = 0; i < n; i++) {
        static uint16_t a[512], b[512];
        static float c[256], d[256];
        const int kind = (int)(i % KINDS);
        for (int j = 0; j < 512; j++)
            a[j] = (uint16_t)(number(kind, true) >> 16), b[j] = (uint16_t)(number(kind, true) >> 16);
        for (int j = 0; j < 256; j++) {
            const uint32_t u = number(kind, false);
            memcpy(&c[j], &u, sizeof u);
        }
        memcpy(d, c, sizeof d);
        om_tiles_emulated(a, b, c);
        om_tiles_native(a, b, d);
        for (int j = 0; j < 256; j++) {
            if (memcmp(&c[j], &d[j], sizeof *c) == 0 || (isnan(c[j]) && isnan(d[j]))) continue;
            if (wrong++ < 10) printf("tile %ld (kind %d), element %d: emulated %a, native %a\n", i, kind, j, c[j], d[j]);
        }
    }
    printf("om-tiles: %ld products of tiles, %ld elements differ\n", n, wrong);
    return wrong != 0;
}

/* C = alpha A B + beta C + bias; `ta`, `tb`: A, B lie by columns */
static int sums(void) {
    static const struct { int64_t m, k, n; bool ta, tb; double alpha; int beta; bool bias; } rows[] = {
        {16, 32, 16, 0, 0, 1, 0, 0},    {33, 65, 47, 0, 1, 1, 0, 0},   {1, 100, 200, 1, 0, 1, 1, 1},
        {70, 513, 150, 1, 1, -0.5, 1, 0}, {45, 2100, 40, 0, 0, 1, 0, 1}, {530, 8300, 4, 0, 1, 1, 1, 0},
        {200, 40, 3, 0, 0, 1, 0, 0},    {6, 0, 5, 0, 0, 1, 1, 1},
    };
    om_ctx *cx = om_ctx_new(NULL);
    for (size_t i = 0; cx && i < sizeof rows / sizeof *rows; i++) {
        const int64_t m = rows[i].m, k = rows[i].k, n = rows[i].n, total = m * k + k * n + m * n + n;
        uint16_t *a = malloc((size_t)total * sizeof *a), *b = a + m * k, *c = b + k * n, *bias = c + m * n;
        if (!a) return 1;
        for (int64_t j = 0; j < total; j++) a[j] = (uint16_t)(number(ONE_SIZE, true) >> 16);
        const om_gemm_args g = {.dtype = OM_BF16, .m = m, .n = n, .k = k,
                                .a = a, .rsa = rows[i].ta ? 1 : k, .csa = rows[i].ta ? m : 1,
                                .b = b, .rsb = rows[i].tb ? 1 : n, .csb = rows[i].tb ? k : 1,
                                .c = c, .rsc = n, .csc = 1, .alpha = rows[i].alpha, .beta = rows[i].beta,
                                .bias = rows[i].bias ? bias : NULL, .batch = 1};
        if (om_gemm(cx, &g) != OM_OK) return 1;
        uint64_t hash = 14695981039346656037u; /* FNV-1a */
        for (int64_t j = 0; j < m * n; j++) hash = (hash ^ c[j]) * 1099511628211u;
        printf("om-tiles: %d %d %d: %016llx\n", (int)m, (int)k, (int)n, (unsigned long long)hash);
        free(a);
    }
    om_ctx_free(cx);
    return cx == NULL;
}

int main(int argc, char **argv) {
    if (!om_isa_tiles()) {
        puts("om-tiles: no AMX tiles here");
        return 77;
    }
    return argc > 1 && !strcmp(argv[1], "sums") ? sums() : compare(argc > 1 ? atol(argv[1]) : 2000);
}
