/* mma_check.cpp - the emulation of tensor cores by itself (csrc/cuda/emulate.h, mma.h): fragments laid out element by
 * element by the formulas of the PTX manual ("Matrix Fragments for mma.m16n8k16 with floating point type"), and those
 * that ldmatrix loads, give the plain product; copies that come later (cp.async) are there after a wait and a barrier,
 * and what leaves one of these out is noticed; so is what reaches past its shared memory. Prints how many numbers were
 * compared.
 *
 *     mma_check seed
 */
#include "cuda/emulate.h"

#include "cuda/mma.h"

#include <initializer_list>

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

/* Tiles of 64 chunks, one a thread, pass by in two places: each thread writes what another has copied. The last 16
 * chunks of a tile are not given, and lie in no memory that was declared. */
enum { TILES = 3, OF_TILE = 64, GIVEN = 48, THREADS = 64 };
struct copies { const chunk *from; chunk *to; int how; };
enum { IN_ORDER, BY_FOURS, ONE_AHEAD, SEEN, NO_WAIT = SEEN, NO_BARRIER, TOO_FEW, ENDED_LATE, OTHER_PLACE, REFUSED,
       FROM_ODD = REFUSED, TO_ODD, BEYOND, UNDECLARED, UNDECLARED_PART, NOT_WAITED, ALL_COPIES };

static void tile_begin(const copies &j, char *shared, int tile) {
    char *to = shared + (j.how == OTHER_PLACE ? 0 : tile % 2 * OF_TILE * 16) + threadIdx.x * 16;
    const char *from = (const char *)(j.from + tile * OF_TILE + threadIdx.x);
    const bool given = threadIdx.x < GIVEN || j.how == UNDECLARED_PART;
    if (j.how == FROM_ODD) from += 4;
    if (j.how == TO_ODD) to += 8;
    if (j.how == BEYOND) to += OF_TILE * 16;
    if (j.how == UNDECLARED) from += TILES * OF_TILE * 16;
    if (j.how == ENDED_LATE && tile) copies_end(); /* the copy is of no group that the wait asks for */
    if (j.how == BY_FOURS) for (int i = 0; i < 16; i += 4) copy_begin<4>(to + i, from + i, given);
    else copy_begin<16>(to, from, given);
    if (j.how != ENDED_LATE || !tile) copies_end();
}
static void copied(const void *param) {
    const copies &j = *(const copies *)param;
    SHARED(shared);
    if (j.how == ONE_AHEAD || j.how == TOO_FEW) tile_begin(j, shared, 0);
    for (int at = 0; at < TILES; at++) {
        const bool ahead = j.how == ONE_AHEAD || j.how == TOO_FEW;
        const int next = at + ahead;
        if (next < TILES) tile_begin(j, shared, next);
        if (j.how == NOT_WAITED && at == TILES - 1) return;
        if (j.how != NO_WAIT) {
            if (ahead && (next < TILES || j.how == TOO_FEW)) copies_wait<1>();
            else copies_wait<0>();
        }
        if (j.how != NO_BARRIER) __syncthreads();
        const unsigned of = OF_TILE - 1 - threadIdx.x;
        st(j.to + at * OF_TILE + of, ((const chunk *)shared)[(at % 2) * OF_TILE + of]);
        if (j.how != NO_BARRIER) __syncthreads();
    }
    copies_end();
    copies_wait<0>();
}

static int compare_copies(uint64_t seed) {
    enum { N = TILES * OF_TILE };
    static chunk from[N], to[N];
    static const unsigned grid[3] = {1, 1, 1};
    uint64_t s = seed + 1;
    int n = 0;
    for (int how = 0; how < ALL_COPIES; how++) {
        int failed = 0, wrong = 0;
        for (int turn = 0; turn < 20; turn++) {
            for (chunk &c : from) for (uint32_t &x : c.x) x = emu_random(&s);
            memset(to, 0x33, sizeof to);
            emu.checked = true, emu.n_range = 0, emu_seed = seed + turn;
            for (int i = 0; i < TILES; i++)
                emu.range[emu.n_range++] = {(char *)(from + i * OF_TILE), (char *)(from + i * OF_TILE + GIVEN), 1};
            emu.range[emu.n_range++] = {(char *)to, (char *)(to + N), 2};
            const copies j = {from, to, how};
            if (!emu_launch("copied", copied, &j, grid, THREADS, 2 * OF_TILE * 16)) {
                failed++;
                continue;
            }
            bool same = true;
            for (int i = 0; i < N; i++)
                for (int k = 0; k < 4; k++) same &= to[i].x[k] == (i % OF_TILE < GIVEN ? from[i].x[k] : 0);
            wrong += !same;
            if (how < SEEN) n += N;
        }
        /* what is right is so in every order; what is left out shows in one, what is not allowed in all */
        const bool fine = how < SEEN ? !failed && !wrong : how < REFUSED ? failed + wrong > 0 : failed == 20;
        if (!fine) return fprintf(stderr, "copies %d: %d failed, %d wrong: %s\n", how, failed, wrong, emu.message), -1;
    }
    emu.checked = false;
    return n;
}

/* A thread reaches memory `at` bytes past what the launch gave its block. */
struct reached { int at; bool write; };
static void reaching(const void *param) {
    const reached &j = *(const reached *)param;
    static volatile char seen;
    SHARED(shared);
    volatile char *at = shared + emu_shared_size + j.at;
    if (threadIdx.x != 40) return;
    if (j.write) *at = 1;
    else seen = *at;
}

static int check_shared(uint64_t seed) {
    static const unsigned grid[3] = {2, 1, 1};
    int n = 0;
    emu_seed = seed;
    for (size_t size : {0, 16, 40, 4096, 99 << 10})
        for (int at : {-1, 0, 15, 16, 64, 5000, 1000000})
            for (bool write : {false, true}) {
                const reached j = {at, write};
                const bool inside = at < 0 && size, padding = at >= 0 && size + at < (size + 15) / 16 * 16;
                if (at < 0 && !size) continue;
                const bool ok = emu_launch("reaching", reaching, &j, grid, THREADS, size);
                if (ok != (inside || (padding && !write)) || (!ok && !strstr(emu.message, "past its")))
                    return fprintf(stderr, "%zu bytes, %d: %d, %s\n", size, at, ok, emu.message), -1;
                n++;
            }
    return n;
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    const int x = compare<bf16>(seed), y = compare<f16>(seed), z = compare_copies(seed), r = check_shared(seed);
    printf("%d %d %d %d\n", x, y, z, r);
    return x < 0 || y < 0 || z < 0 || r < 0;
}
