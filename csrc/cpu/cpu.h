/* cpu.h - what the files that compute operators on the CPU define: the functions that the rows of cpu.def name. */
#ifndef OM_CPU_H
#define OM_CPU_H

#include "graph/device.h"

#define ROW(op, dense, inplace, scratch, prepare, run)                                                     \
    int64_t om_cpu_scratch_##scratch(om_ctx *cx, const om_args *a);                                        \
    om_status om_cpu_prepare_##prepare(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep);    \
    om_status om_cpu_run_##run(om_ctx *cx, const om_args *a);
#include "cpu/cpu.def"
#undef ROW

#endif
