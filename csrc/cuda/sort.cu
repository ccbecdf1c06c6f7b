/* sort.cu - words {key: upper half, position: lower half} in the order of their keys, and for one key in that of their
 * positions, if that is how they came: a radix sort by 8 bits at a time, from the lowest on. The words of a tile are
 * counted by digit, the counts become places, every word goes to its place. Linear in the number of words whatever
 * their keys; no sum depends on an order. */
#include "cuda/kernel.h"

enum { WARPS = OM_GPU_SORT_THREADS / 32, ROUNDS = OM_GPU_SORT_TILE / OM_GPU_SORT_THREADS };

/* Round k of a warp, whose words of a tile lie together: false: past the end. */
FN bool word_at(const om_gpu_sort &p, int k, uint64_t *w, uint32_t *digit) {
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t i = (int64_t)blockIdx.x * OM_GPU_SORT_TILE + (warp * ROUNDS + k) * 32 + lane;
    *w = i < p.n ? ld(p.from + i) : 0;
    *digit = (uint32_t)(*w >> p.shift) & 255;
    return i < p.n;
}

/* Counts a round's digits in the warp's counters; returns how many there were before this lane's. */
FN uint32_t tally(uint32_t *count, bool valid, uint32_t digit) {
    const unsigned lane = threadIdx.x & 31;
    uint32_t same = votes(valid);
    for (int b = 0; b < 8; b++) {
        const uint32_t set = votes(digit >> b & 1);
        same &= digit >> b & 1 ? set : ~set;
    }
    const uint32_t before = valid ? count[digit] : 0;
    const int rank = ones(same & ((1u << lane) - 1));
    __syncwarp();
    if (valid && !rank) count[digit] = before + (uint32_t)ones(same);
    __syncwarp();
    return before + (uint32_t)rank;
}

/* The block's counters: per warp, per digit. */
FN void tallies(const om_gpu_sort &p, uint32_t *count) {
    uint64_t w;
    uint32_t digit;
    for (int i = threadIdx.x; i < WARPS * 256; i += OM_GPU_SORT_THREADS) count[i] = 0;
    __syncthreads();
    for (int k = 0; k < ROUNDS; k++) {
        const bool valid = word_at(p, k, &w, &digit);
        tally(count + (threadIdx.x >> 5) * 256, valid, digit);
    }
    __syncthreads();
}

/* block (tile): counts[tile][digit] */
EXPORT(OM_GPU_SORT_THREADS) om_k_sort_count(PARAM(struct om_gpu_sort) p) {
    SHARED(shared);
    uint32_t *count = (uint32_t *)shared, sum = 0;
    tallies(p, count);
    for (int w = 0; w < WARPS; w++) sum += count[w * 256 + threadIdx.x];
    st(p.counts + (int64_t)blockIdx.x * 256 + threadIdx.x, sum);
}

/* One block, a thread per digit: counts become places, those of smaller digits and of the tiles before come first. */
EXPORT(OM_GPU_SORT_THREADS) om_k_sort_scan(PARAM(struct om_gpu_sort) p) {
    SHARED(shared);
    uint32_t *sums = (uint32_t *)shared, sum = 0, place = 0;
    for (int64_t t = 0; t < p.tiles; t++) sum += ld(p.counts + t * 256 + threadIdx.x);
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned d = 0; d < threadIdx.x; d++) place += sums[d];
    for (int64_t t = 0; t < p.tiles; t++) {
        uint32_t *at = p.counts + t * 256 + threadIdx.x;
        const uint32_t n = ld(at);
        st(at, place);
        place += n;
    }
}

/* block (tile) */
EXPORT(OM_GPU_SORT_THREADS) om_k_sort_place(PARAM(struct om_gpu_sort) p) {
    SHARED(shared);
    uint32_t *count = (uint32_t *)shared;
    tallies(p, count);
    uint32_t place = ld(p.counts + (int64_t)blockIdx.x * 256 + threadIdx.x);
    for (int w = 0; w < WARPS; w++) {
        uint32_t *at = count + w * 256 + threadIdx.x;
        const uint32_t n = *at;
        *at = place;
        place += n;
    }
    __syncthreads();
    for (int k = 0; k < ROUNDS; k++) {
        uint64_t w;
        uint32_t digit;
        const bool valid = word_at(p, k, &w, &digit);
        const uint32_t to = tally(count + (threadIdx.x >> 5) * 256, valid, digit);
        if (valid) st(p.to + to, w);
    }
}
