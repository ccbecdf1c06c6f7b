/* lower_sort.c - words of a call's scratch sorted by key on the GPU (sort.cu): 8 bits of the keys at a time, to and fro
 * between two halves of the scratch. */
#include "cuda/scratch.h"

static int64_t tiles_of(int64_t m) { return om_gpu_blocks(m, OM_GPU_SORT_TILE); }

int64_t om_gpu_sort_scratch(int64_t m) { return 16 * m + 1024 * tiles_of(m); }

static om_gpu_sort *pass_add(om_lower *l, om_gpu_kernel k, int64_t blocks, size_t shared, const om_gpu_sort *p) {
    om_gpu_sort *g = om_gpu_add(l, k, blocks, 1, 1, OM_GPU_SORT_THREADS, shared, sizeof *g);
    if (g) *g = *p;
    return g;
}

int64_t om_gpu_sort_lower(om_lower *l, int64_t m, int64_t most) {
    om_gpu_sort p = {.n = m, .tiles = tiles_of(m), .shift = 32}, *g;
    const int64_t room = 8 * m, counts = 2 * room, count_size = 1024 * p.tiles;
    const size_t shared = OM_GPU_SORT_THREADS / 32 * 256 * sizeof(uint32_t);
    int64_t from = 0;
    for (; p.shift < 64 && most >> (p.shift - 32); p.shift += 8, from = room - from) {
        if (!(g = pass_add(l, OM_GPU_sort_count, p.tiles, shared, &p))) return 0;
        om_gpu_scratch_at(l, &g->from, from, room, OM_GPU_READ);
        om_gpu_scratch_at(l, &g->counts, counts, count_size, OM_GPU_WRITE);
        if (!(g = pass_add(l, OM_GPU_sort_scan, p.tiles ? 1 : 0, 1024, &p))) return 0;
        om_gpu_scratch_at(l, &g->counts, counts, count_size, OM_GPU_READ | OM_GPU_WRITE);
        if (!(g = pass_add(l, OM_GPU_sort_place, p.tiles, shared, &p))) return 0;
        om_gpu_scratch_at(l, &g->from, from, room, OM_GPU_READ);
        om_gpu_scratch_at(l, &g->counts, counts, count_size, OM_GPU_READ);
        om_gpu_scratch_at(l, &g->to, room - from, room, OM_GPU_WRITE);
    }
    return from;
}
