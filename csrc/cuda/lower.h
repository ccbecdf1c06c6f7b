/* cuda/lower.h - a plan's calls as launches. When a plan is made, every call is lowered once: its row's `prepare`
 * appends records {kernel, or a product for a library; grid, block, dynamic shared bytes; parameter bytes;
 * relocations}. A step copies the parameter bytes, stores the addresses of operands into the copy and launches; it
 * parses, allocates and reads nothing.
 *
 * A relocation is also a declaration: through this address the launch touches the bytes [lo, hi) and no others, and
 * reads or writes them. The fake device of the tests holds kernels to it.
 *
 * What a row does not lower (`om_gpu_host`) the CPU's row does, between a download and an upload: slow and right. The
 * plan says so by name (om_cuda_host_ops).
 */
#ifndef OM_CUDA_LOWER_H
#define OM_CUDA_LOWER_H

#include "cuda/params.h"
#include "graph/device.h"

typedef enum om_gpu_kernel {
#define KERNEL(file, name, type) OM_GPU_##name,
#include "cuda/engine.def"
#undef KERNEL
    OM_N_GPU_KERNELS
} om_gpu_kernel;

enum { OM_GPU_READ = 1, OM_GPU_WRITE = 2 };
typedef enum om_gpu_what { OM_GPU_ARG, OM_GPU_SCRATCH, OM_GPU_SCALARS, OM_GPU_FAULT, OM_GPU_GUARD } om_gpu_what;

typedef struct om_gpu_reloc {
    uint16_t at;            /* byte of the parameters that the address is stored at */
    uint8_t what, mode;
    uint16_t arg;           /* ARG: operand; outputs come after the inputs */
    int64_t offset, lo, hi; /* bytes; touched: from address + offset + lo on */
} om_gpu_reloc;

typedef struct om_gpu_launch {
    struct om_gpu_launch *next;
    uint16_t kernel, size, n_reloc, cap_reloc;
    uint32_t grid[3], block, shared;
    uint8_t *param;
    om_gpu_reloc *reloc;
    const struct om_lt_product *product; /* a call of the library's (blaslt.h) in place of a kernel */
    const struct om_gpu_program *program; /* of a chain (program.h), or NULL; where it is compiled it runs */
} om_gpu_launch;

/* A row's prep. */
typedef struct om_gpu_call {
    om_gpu_launch *first;
    const struct om_torch_conv *torch; /* torch's kernels do it (torch_conv.h), where they can */
    /* the CPU does it: what its row prepared for so many workers */
    bool host;
    int host_workers;
    int64_t host_scratch;
    const void *host_prep;
} om_gpu_call;

/* One call being lowered. */
typedef struct om_lower {
    om_ctx *cx;
    om_arena *mem;
    const om_args *a;
    om_gpu_call *call;
    om_gpu_launch *last;
    const om_graph *graph; /* whose scopes say where a fault comes from; NULL: unknown */
} om_lower;

/* Zeroed parameters of one more launch, or NULL (recorded). Grids without a block are left out: the parameters go
 * nowhere then. */
void *om_gpu_add(om_lower *l, om_gpu_kernel k, int64_t gx, int64_t gy, int64_t gz, uint32_t block, size_t shared,
                 size_t size);
/* *field of the last launch's parameters becomes the address of: operand i (of the call's inputs, then outputs), laid
 * out as t, which is it unless t is given; left out: NULL stays */
void om_gpu_in(om_lower *l, void *field, int i);
void om_gpu_out(om_lower *l, void *field, int i, int mode);
void om_gpu_part(om_lower *l, void *field, int operand, int64_t offset, int64_t lo, int64_t hi, int mode);
void om_gpu_scratch_at(om_lower *l, void *field, int64_t offset, int64_t bytes, int mode);
void om_gpu_scalars_at(om_lower *l, void *field);
/* the fault word in a write-back and in what changes state, else NULL */
void om_gpu_guard_at(om_lower *l, void *field);
/* the fault word; returns the number of the call's place in the user's source (never 0) */
uint32_t om_gpu_fault_at(om_lower *l, void *field);

typedef om_status (*om_lower_fn)(om_lower *l);
om_status om_gpu_host(om_lower *l); /* the CPU does it */
om_status om_gpu_check(om_lower *l); /* sizes that do not fit are refused as by the CPU's row */
/* dst = src, any strides and dtypes; in and out are operands of the call */
om_status om_gpu_copy_lower(om_lower *l, int in, const om_tensor *src, int64_t src_offset, int out,
                            const om_tensor *dst, int64_t dst_offset);
/* every element of dst = `value`, the bytes of one */
om_status om_gpu_fill_lower(om_lower *l, int out, const om_tensor *dst, int64_t dst_offset, uint64_t value);

/* Text of a site, for faults: operator and where. */
om_status om_gpu_site_fail(om_ctx *cx, const om_gpu_fault *f);

static inline int64_t om_gpu_blocks(int64_t n, int64_t per) { return (n + per - 1) / per; }
static inline int64_t om_gpu_grid(int64_t n, int64_t threads) { /* for OVER_GRID */
    const int64_t blocks = om_gpu_blocks(n, threads);
    return blocks < 1 << 20 ? blocks : 1 << 20;
}
/* The kernel of an EACH_FLOAT for a dtype. */
#define OM_GPU_OF(name, dtype) ((om_gpu_kernel)(OM_GPU_##name##_f32 + (dtype) - OM_F32))
const om_row *om_cuda_rows(void); /* filled at first use */

#define ROW(op, fn, scratch) om_status om_lower_##fn(om_lower *l);
#include "cuda/cuda.def"
#undef ROW
om_status om_lower_strip(om_lower *l);
#endif
