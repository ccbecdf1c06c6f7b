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
    uint32_t strided; /* bit j: output j may be given any strides; the others are dense */
} om_row;
#define OM_ALL UINT32_MAX

static inline bool om_row_dense(const om_row *r, int i) { return r->dense == OM_ALL || (i < 32 && r->dense >> i & 1); }
static inline bool om_row_inplace(const om_row *r, int i) { return i < 32 && r->inplace >> i & 1; }

struct om_strip_text;
struct om_plan;

/* Everything run/ does with memory or work goes through these. Addresses are the device's: where host_memory is false
 * the host only passes them on. */
typedef struct om_device {
    const char *name;
    const om_row *rows; /* by om_op.id */
    bool host_memory;   /* its memory is the host's: constants are read where they lie, and so are scalars */
    /* Casts of weights and of their gradients are one call each: here a call costs more than a small cast moves
     * (passes/casts.c) */
    bool joins_casts;
    /* May this chain of elementwise statements run as one node? in_dtype and uniform (one element) per operand. */
    bool (*strip_fits)(const struct om_strip_text *t, const uint8_t *in_dtype, const bool *uniform);
    /* A block of its memory, contents undefined, block->device set; NULL: memory is out (recorded) */
    om_block *(*block_get)(om_ctx *cx, size_t size);
    void (*block_put)(om_block *b); /* om_block_put; any thread, any time */
    size_t (*block_size)(om_ctx *cx, size_t size); /* what a block of `size` bytes takes; NULL: just these */
    void (*blocks_tight)(void); /* a budget is kept: from now on no memory beside what lives at once; NULL: so it is */
    om_status (*copy)(om_ctx *cx, const om_tensor *src, om_tensor *dst);  /* any strides, converts; within the device */
    /* The same for copies of a plan: src and dst are prepared once, without addresses, in `mem` of the plan's life, and
     * run with them at every step. Both NULL: `copy` does it. */
    om_status (*copy_prepare)(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst, const void **prep);
    om_status (*copy_run)(om_ctx *cx, const void *prep, const om_tensor *src, om_tensor *dst);
    om_status (*fill)(om_ctx *cx, void *to, int byte, size_t size);
    om_status (*upload)(om_ctx *cx, void *to, const void *from, size_t size);   /* from the host's memory */
    /* To it. Waits for what is queued, and returns what has failed there and was not told yet (late faults, below). */
    om_status (*download)(om_ctx *cx, void *to, const void *from, size_t size);
    int (*workers)(om_ctx *cx); /* how many may share a call now: scratch is sized by it */
    /* Bit per operand of which the node's kernel, told a count, reads nothing past it. NULL: kernels here do all rows;
     * then leaving out rows is no gain (passes/label_rows.c) */
    uint32_t (*counted)(const om_graph *g, const om_node *n);
    /* One slice, the calls between two stops of a run, is begin, run_slice, end, on the thread that resumes the run.
     * begin sets up what the slice needs of the thread (workers: as many as the plan counted on); where it fails, the
     * slice is not run and there is no end. It waits for nothing, and returns what the device already knows to have
     * failed and has not told. end undoes begin, whatever run_slice said; it gets that and returns it, or a failure of
     * its own when that was OM_OK. Slices of several runs may be between begin and end at once, each on its thread. */
    om_status (*begin)(om_ctx *cx, int workers);
    om_status (*end)(om_ctx *cx, om_status s);
    om_status (*run_slice)(om_run *r, int from, int to); /* calls [from, to) of the run's plan; none is the host's */
    /* The plan goes: no run uses it and none will, but work of its may still be queued. The device frees what it keeps
     * for it (plan->of_device, a compiled list of launches), when that is done. Its constants go after this. Any
     * thread; NULL: there is nothing. */
    void (*plan_end)(struct om_plan *p);
} om_device;

/* Late faults. A device may run behind its host. An index or label out of range, or a failure of its own, then turns up
 * when the run that queued it has returned OM_OK, or is gone. It becomes an error at the first place that may wait for
 * the device or finds out without waiting, and there once:
 *   - download, which waits: every place where the host reads results, also the operands of a host node;
 *   - begin, so om_run_resume, which does not wait to find out: of whichever run comes next, where the device knows by
 *     then. None of that slice was queued, and the run can only be freed. (Having found one it may wait, for those
 *     write-backs behind the fault that are still to be kept from happening.)
 * om_run_resume's OM_OK and OM_HOST mean that everything before is queued, not that it went well. Nothing else tells:
 * not om_run_output, om_run_grad, om_run_answer, nor freeing. Who is told may trust nothing that was queued between the
 * fault and the telling. Of the run with the fault, no write-back and no update behind it is done: the device looks at
 * the fault word before these, and so a step that failed leaves the model as it was, as on the CPU, where the fault is
 * told by om_run_resume itself. */

extern const om_device om_device_cpu;
/* run_slice of devices whose rows are called one by one from the host (run/exec.c) */
om_status om_run_slice_rows(om_run *r, int from, int to);

static inline const om_row *om_row_of(const om_device *d, const om_op *op) { return &d->rows[op->id]; }

#endif
