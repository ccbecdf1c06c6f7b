/* device.h - the boundary between what an operator means and how a device computes it.
 *
 * ops/ says what operators mean and computes nothing. A device is a table: one om_row per operator and a few functions.
 * The CPU's (cpu/device.c, cpu/cpu.def) is complete: it is also the oracle of every other device, and what folds
 * constants. A context has one device, a plan is made for one device and asks it three things of a call:
 *
 *     scratch(args)         bytes of working memory                    once per plan; data pointers are NULL
 *     prepare(args) -> prep what depends on sizes, strides, dtypes     once per plan; data pointers are NULL
 *                           and attributes alone: a compiled strip
 *                           program, axes looked up by name
 *     run(args, prep)       the work                                   every step; looks nothing up
 *
 * Every address in args is the device's: operands, scratch, scalars (seed, symbols). A number that the host gives, as a
 * learning rate, is an operand like another: the run has taken it along with its scalars (om_value.host).
 */
#ifndef OM_DEVICE_H
#define OM_DEVICE_H

#include "graph/engine.h"

typedef struct om_row {
    /* bit j: input j must be dense row-major, the plan copies when it is not (OM_ALL: every input) */
    uint32_t dense;
    /* bit j: output 0 may take the storage of input j (same size; of input j, element i of y needs only element i).
     * Inputs that have the bit may all lie there; one that has not never does: it is read when y is partly written */
    uint32_t inplace;
    int64_t (*scratch)(om_ctx *cx, const om_args *a);
    /* *prep: made in `mem`, of the plan's life; what `run` finds in a->prep */
    om_status (*prepare)(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep);
    om_status (*run)(om_ctx *cx, const om_args *a); /* NULL: the device cannot */
} om_row;
#define OM_ALL UINT32_MAX

static inline bool om_row_dense(const om_row *r, int i) { return r->dense == OM_ALL || (i < 32 && r->dense >> i & 1); }
static inline bool om_row_inplace(const om_row *r, int i) { return i < 32 && r->inplace >> i & 1; }

struct om_strip_text;

/* Everything run/ does with memory or work goes through these. Addresses are the device's: where host_memory is false
 * the host only passes them on. */
typedef struct om_device {
    const char *name;
    const om_row *rows; /* by om_op.id */
    bool host_memory;   /* its memory is the host's: constants are read where they lie, and so are scalars */
    /* May this chain of elementwise statements run as one node? in_dtype and uniform (one element) per operand. */
    bool (*strip_fits)(const struct om_strip_text *t, const uint8_t *in_dtype, const bool *uniform);
    /* A block of its memory, contents undefined, block->device set; NULL: memory is out (recorded) */
    om_block *(*block_get)(om_ctx *cx, size_t size);
    void (*block_put)(om_block *b); /* om_block_put; any thread, any time */
    om_status (*copy)(om_ctx *cx, const om_tensor *src, om_tensor *dst);  /* any strides, converts; within the device */
    om_status (*fill)(om_ctx *cx, void *to, int byte, size_t size);
    om_status (*upload)(om_ctx *cx, void *to, const void *from, size_t size);   /* from the host's memory */
    /* To it. Waits for what is queued, and returns what has failed there since it was last told: a device that runs
     * behind its host (tests/device/checking.c) has told nobody else. */
    om_status (*download)(om_ctx *cx, void *to, const void *from, size_t size);
    int (*workers)(om_ctx *cx); /* how many may share a call now: scratch is sized by it */
    /* Around the calls between two stops of a run, on the thread that resumes it. workers: what the plan counted on.
     * end gets what run_slice said and returns that, or a failure of its own. */
    om_status (*begin)(om_ctx *cx, int workers);
    om_status (*end)(om_ctx *cx, om_status s);
    om_status (*run_slice)(om_run *r, int from, int to); /* calls [from, to) of the run's plan; none is the host's */
} om_device;

extern const om_device om_device_cpu;
/* run_slice of devices whose rows are called one by one from the host (run/exec.c) */
om_status om_run_slice_rows(om_run *r, int from, int to);

static inline const om_row *om_row_of(const om_device *d, const om_op *op) { return &d->rows[op->id]; }

#endif
