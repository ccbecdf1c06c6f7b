/* bounded.cu - rows that only the data chooses: counted, taken out, put back, zeroed behind the count. The count stays
 * on the device. Rows are placed by the counts of the tiles before theirs and a running count inside of the tile: in
 * order, whoever comes first. */
#include "cuda/kernel.h"

enum { SELECT_ROUNDS = OM_GPU_SELECT_TILE / OM_GPU_SELECT_THREADS };

/* Round k of the block's tile. */
FN int64_t select_at(int k) {
    return (int64_t)blockIdx.x * OM_GPU_SELECT_TILE + k * OM_GPU_SELECT_THREADS + threadIdx.x;
}

/* block (tile) */
EXPORT(OM_GPU_SELECT_THREADS) om_k_select_count(PARAM(struct om_gpu_select) p) {
    SHARED(shared);
    uint32_t n = 0;
    for (int k = 0; k < SELECT_ROUNDS; k++) {
        const int64_t i = select_at(k);
        n += i < p.n && ld(p.mask + i);
    }
    n = block_all<op_sum>(n, 0u, (uint32_t *)shared);
    if (!threadIdx.x) st(p.counts + blockIdx.x, n);
}

/* block (tile) */
EXPORT(OM_GPU_SELECT_THREADS) om_k_select_place(PARAM(struct om_gpu_select) p) {
    SHARED(shared);
    int64_t before = 0, all = 0;
    for (int64_t t = threadIdx.x; t < p.tiles; t += OM_GPU_SELECT_THREADS) {
        const uint32_t n = ld(p.counts + t);
        all += n;
        if (t < blockIdx.x) before += n;
    }
    before = block_all<op_sum>(before, (int64_t)0, (int64_t *)shared);
    all = block_all<op_sum>(all, (int64_t)0, (int64_t *)shared);
    const bool every = (double)all > p.most * (double)p.n;
    if (!blockIdx.x && !threadIdx.x) st(p.count, every ? p.n : all);
    for (int k = 0; k < SELECT_ROUNDS; k++) {
        const int64_t i = select_at(k);
        const bool taken = i < p.n && ld(p.mask + i);
        const int64_t place = block_place(taken, &before, (uint32_t *)shared);
        if (every && i < p.n) st(p.idx + i, i);
        if (every) continue;
        if (taken) st(p.idx + place, i);
        if (i >= all && i < p.n) st(p.idx + i, (int64_t)0);
    }
}

EXPORT(256) om_k_counted(PARAM(struct om_gpu_counted) p) {
    const int64_t most = p.what == OM_GPU_COMPRESS ? p.limit : p.n;
    int64_t count = ld(p.count);
    count = count < 0 ? 0 : count > most ? most : count;
    OVER_GRID(i, p.outer * most * p.row) {
        const int64_t r = i / p.row % most, c = i % p.row;
        int64_t from = i, to = i;
        bool there = r < count;
        if (there && p.what != OM_GPU_TRIM) {
            const int64_t at = ld(p.idx + r), limit = p.what == OM_GPU_COMPRESS ? p.n : p.limit;
            *(p.what == OM_GPU_COMPRESS ? &from : &to) = at * p.row + c;
            there = (uint64_t)at < (uint64_t)limit;
            if (!there && !c) fault_note(p.fault, (uint32_t)p.site, 1, at, r, limit);
        }
        if (there) move_one(p.x, from, p.y, to, p.size);
        else if (p.what != OM_GPU_RESTORE) put_one(p.y, i, (uint64_t)p.past, p.size);
    }
}
