/* cpu.h - what the files that compute operators on the CPU define: the functions that the rows of cpu.def name. */
#ifndef OM_CPU_H
#define OM_CPU_H

#include "graph/device.h"

/* Sums and products of sizes, none of them negative, for layouts of scratch: cut off at 2^61, which the planner refuses
 * as more than there are addresses. */
#define OM_SIZE_MOST ((int64_t)1 << 61)
static inline int64_t om_size_add(int64_t a, int64_t b) {
    return a + b < OM_SIZE_MOST ? a + b : OM_SIZE_MOST;
}
static inline int64_t om_size_mul(int64_t a, int64_t b) {
    int64_t c;
    return __builtin_mul_overflow(a, b, &c) || c > OM_SIZE_MOST ? OM_SIZE_MOST : c;
}
/* Where `bytes` more begin, 64-byte aligned, in a scratch of *total bytes so far. */
static inline int64_t om_scratch_take(int64_t *total, int64_t bytes) {
    const int64_t at = *total;
    *total = om_size_add(at, (om_size_add(bytes, 63)) & ~(int64_t)63);
    return at;
}

#define ROW(op, dense, inplace, scratch, prepare, run)                                                     \
    int64_t om_cpu_scratch_##scratch(om_ctx *cx, const om_args *a);                                        \
    om_status om_cpu_prepare_##prepare(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep);    \
    om_status om_cpu_run_##run(om_ctx *cx, const om_args *a);
#include "cpu/cpu.def"
#undef ROW

#endif
