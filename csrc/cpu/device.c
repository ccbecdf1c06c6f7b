/* device.c - the CPU as a device: its table of operators, generated from cpu.def and graph/pointwise.def. */
#include "cpu/blocks.h"
#include "cpu/copy.h"
#include "cpu/cpu.h"
#include "cpu/strip.h"
#include "ops/attr.h"

int64_t om_cpu_scratch_none(om_ctx *cx, const om_args *a) {
    (void)cx, (void)a;
    return 0;
}

om_status om_cpu_prepare_none(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    (void)cx, (void)mem, (void)a, (void)prep;
    return OM_OK;
}

/* make device OPS=...: a header (tools/om_ops.c) says which rows are kept; the others cannot run, and their kernels are
 * not linked. */
#if defined(OM_ONLY)
#include <only.h>
#define KEEP(op, ...) OM_KEEP_##op(__VA_ARGS__)
#else
#define KEEP(op, ...) __VA_ARGS__
#endif

#define STRIDED(op) .strided = OM_OP_##op == OM_OP_attention_grad ? 7 : 0 /* dq, dk, dv */
#define IN(j) 1u << (j)
#define ALL OM_ALL
static const om_row rows[OM_N_OPS] = {
#define ROW(op, dense, inplace, scratch, prepare, run) \
    [OM_OP_##op] = {KEEP(op, dense, inplace, om_cpu_scratch_##scratch, om_cpu_prepare_##prepare, om_cpu_run_##run, \
                         STRIDED(op))},
#include "cpu/cpu.def"
#undef ROW
#define PW(op, arity, rule, fx, ix, grad, ...) \
    [OM_OP_##op] = {KEEP(op, 0, (1u << arity) - 1, om_cpu_scratch_none, om_cpu_prepare_strip, om_cpu_run_strip)},
#include "graph/pointwise.def"
#undef PW
};

static om_status cpu_fill(om_ctx *cx, void *to, int byte, size_t size) {
    (void)cx;
    if (size) memset(to, byte, size);
    return OM_OK;
}

static om_status cpu_move(om_ctx *cx, void *to, const void *from, size_t size) {
    (void)cx;
    if (size) memcpy(to, from, size);
    return OM_OK;
}

static om_status cpu_begin(om_ctx *cx, int workers) {
    cx->max_threads = workers;
    return OM_OK;
}

static om_status cpu_end(om_ctx *cx, om_status s) {
    cx->max_threads = 0;
    return s;
}

static uint32_t cpu_counted(const om_graph *g, const om_node *n) {
    om_dim size;
    if (om_is(n, matmul)) return 3;
    if (om_is(n, cross_entropy)) return 1u << 1;
    if (om_is(n, cross_entropy_grad)) return 1u << 2;
    const om_type *x = om_is(n, reduce_sum) ? om_ty(g, om_ins(g, n)[0]) : NULL;
    return x && attr_axes_mask(n->attr, n->n_attr, x->rank) == 1u << (om_bounded_axis(g, x, &size) & 31);
}

const om_device om_device_cpu = {.name = "cpu",
                                 .host_memory = true,
                                 .rows = rows,
                                 .strip_fits = om_strip_fits,
                                 .block_get = om_cpu_block_get,
                                 .block_put = om_cpu_block_put,
                                 .block_size = om_cpu_block_size,
                                 .blocks_tight = om_cpu_blocks_tight,
                                 .copy = om_copy,
                                 .copy_prepare = om_cpu_copy_prepare,
                                 .copy_run = om_cpu_copy_run,
                                 .fill = cpu_fill,
                                 .upload = cpu_move,
                                 .download = cpu_move,
                                 .workers = om_num_threads,
                                 .counted = cpu_counted,
                                 .begin = cpu_begin,
                                 .end = cpu_end,
                                 .run_slice = om_run_slice_rows};
