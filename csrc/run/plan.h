/* plan.h - the contract of memory and control: what a plan is, who owns which byte, when control returns to the host.
 *
 * TIME.  A plan is one flat list of calls for one variant of a graph and one set of sizes and strides of its inputs:
 *
 *     [ forward calls | update calls | write-backs ] [ backward segment 0 | segment 1 | ... ]
 *       ^ pc of a forward run                          ^ pc of a backward run
 *
 * A run is a program counter over a slice of that list. It stops at the end of a segment or before a HOST call (a yield
 * point): the host does its part (an ATen region, a PythonOp, a module kept in PyTorch), hands the results in, and
 * resumes. Nothing else in the engine waits for, or calls, the host. Nor does a run wait for its device: when
 * om_run_resume returns, the calls are queued; what fails later is told by the next download, or by the next
 * om_run_resume that finds it known (late faults: graph/device.h).
 *
 * SPACE. Every value lies in one storage; views share their source's. A storage is in one of:
 *
 *     ARENA    one block per forward in flight, at a fixed offset. Offsets only: the block may come back at another
 *              address (save_on_cpu). What the host must know of it (plan, seed, size) is an om_state beside it: the
 *              host never reads the arena. So a host can keep the block as a saved tensor, freed, checked and refused a
 *              second time by its own rules, and the om_state as long.
 *     INPUT    a tensor of the host (parameter, buffer, user tensor, arriving gradient): borrowed for one call, any
 *              strides. It lies in the device's memory; a host scalar (om_value.host) in the host's: its bytes are
 *              taken when the run begins and lie behind the run's scalars, in the device's memory.
 *     OUTPUT   a block of its own that the host owns when the forward has ended: what a user can hold is never in the
 *              arena.
 *     GRAD     the same for a returned gradient: sizes, dtype and strides of its input, no other reference, handed over
 *              at the end of its segment and not touched afterwards. Its block is a part of the arena (parts.c) where
 *              the plan has found a place that nothing else uses from its first call on (offset, else -1), if the arena
 *              is still the forward's block: not when it was moved or copied, the host has its own allocator, the
 *              model has a budget (which counts gradients apart), or gradients of a step before were still held when
 *              the next forward began. Once, then, an arena has stood beside the next one, where gradients alone would
 *              have: places are given only if what they save is no less than that costs (om_plan.stay), or the host
 *              says that it keeps none (om_run_fleeting).
 *     LOAN     a value of the backward that may overwrite an output nobody reads any more (the gradient of the logits
 *              over the logits). The host knows whether the user has dropped the output: then that block is lent, else
 *              another one. Taken when first written, free after the last use.
 *     CONST    in the graph; where the device's memory is not the host's, in a block of the plan's.
 *
 * Rules the planner keeps and tests/engine/test_plan.py checks with code of its own:
 *   - two ARENA storages whose lifetimes [first call, last call] meet do not overlap;
 *   - in place: output 0 takes operand j's storage only where the operator allows it, this call is that storage's last
 *     use, both are dense and of one size, other operands lie in it only as j does and where the operator allows it of
 *     them too, and it is ARENA and neither an output nor a gradient;
 *     where it is an output and the call is of the backward, the result is a LOAN;
 *   - a value that is an output (or a returned gradient) is computed straight into its block when it owns its whole
 *     storage and, for a gradient, is not read after its segment; else it is copied there, an output as soon as it
 *     exists;
 *   - a graph input that is overwritten (write-back) and still read by backward is first copied into the arena;
 *   - write-backs come after every other call of the forward;
 *   - what an update call makes of a graph input (om_op.state) and writes back to it is computed in the input's own
 *     memory when that is dense and no other operand of the call and no later call, output or write needs the old
 *     value: an optimizer step takes no memory of the model's size.
 * The plan never changes the graph. The same sizes give the same plan, so the same bits.
 */
#ifndef OM_PLAN_H
#define OM_PLAN_H

#include "graph/device.h"
#include "graph/exec.h"
#include "graph/facts.h"

typedef enum om_where { OM_W_ARENA, OM_W_INPUT, OM_W_OUTPUT, OM_W_GRAD, OM_W_LOAN, OM_W_CONST } om_where;

typedef struct om_storage {
    int64_t size, offset;      /* bytes; offset within the arena; GRAD: -1, or where it may lie there */
    int32_t first, last;       /* calls */
    uint8_t where;
    /* INPUT: graph input; OUTPUT: user output; GRAD: entry of graph->grads; LOAN: user output */
    uint32_t index;
    const void *data;          /* CONST: in the device's memory */
} om_storage;

typedef enum om_call_kind { OM_CALL_RUN, OM_CALL_COPY /* in[0] -> out[0] */, OM_CALL_HOST } om_call_kind;

typedef struct om_parg {       /* an operand: where it lies and how it is laid out (t.data unused) */
    om_tensor t;
    uint32_t storage;          /* OM_NONE: left out */
    int64_t offset;            /* bytes */
} om_parg;

typedef struct om_call {
    uint8_t kind;
    uint16_t n_in, n_out;
    om_id node;                /* OM_NONE for copies the planner added */
    const om_row *row;         /* RUN: how the plan's device computes it */
    const void *prep;          /* what the row, for copies the device, prepared for these sizes */
    om_id write;               /* COPY that is a write-back: its graph input; else OM_NONE */
    const om_attr *attr;
    om_parg *arg;              /* n_in + n_out */
    uint32_t scratch;          /* storage or OM_NONE */
    const int8_t *bounded;     /* om_args.bounded, or NULL; then count.storage is OM_NONE */
    om_parg count;             /* what om_args.count points to: as good as an operand */
    bool past;                 /* om_args.past */
} om_call;

/* kept: arena bytes alive between forward and backward; placed: of grads, those with a place in the arena */
typedef struct om_plan_bytes { int64_t arena, kept, outputs, grads, loans, placed; } om_plan_bytes;

/* Of one call, while its model is profiled: how often it ran, how long in all. */
typedef struct om_clock { uint64_t count; double ms; } om_clock;

typedef struct om_plan om_plan;
struct om_plan {
    const om_graph *g;
    const om_device *device;
    om_arena mem;
    int variant;
    uint64_t used;             /* clock of the model's cache */
    int refs;                  /* the cache's and every user's; freed at 0 (under the model's lock) */
    struct om_plan *next;      /* of the plans that have left the cache and are still in use */
    int threads;               /* the device's workers when scratch was sized; a run uses at most so many */
    int64_t *key;              /* threads, sizes and strides of the inputs, values that are sizes; n_key entries */
    int n_key;
    int64_t *sym;
    om_id *host;               /* graph inputs that are host scalars, as they lie behind the symbols */
    int n_host;
    om_call *calls;
    int n_calls, n_forward;    /* calls[0, n_forward) are the forward */
    int n_segments;
    int *seg_end;              /* per backward segment: one past its last call */
    om_storage *st;
    uint32_t n_st;
    om_tensor *input;          /* per graph input: sizes and strides planned for (arriving gradients: dense) */
    om_tensor *output;         /* per user output: dense */
    om_tensor *grad;           /* per graph->grads entry; dtype OM_NODTYPE when absent */
    int *grad_segment;         /* per graph->grads entry */
    om_block *constants;       /* where the device's memory is not the host's */
    void *of_device;           /* the device's own, NULL at first: it sets this under a lock of its own, as several runs
                                  may share a plan, and frees it in plan_end */
    om_plan_bytes bytes;
    bool stay;                 /* gradients that the host keeps may lie in the arena */
    om_clock *clock;           /* per call, under the model's lock; NULL: no run of the plan was timed */
    double ms;                 /* time planning took */
};

/* For the graph of the facts. `in`: per graph input that is not an arriving gradient. */
om_status om_plan_make(om_ctx *cx, const om_facts *facts, const om_tensor *in, om_plan **out);
void om_plan_free(om_ctx *cx, om_plan *p);
int om_plan_key_size(const om_graph *g);
void om_plan_key(const om_graph *g, const om_tensor *in, int64_t *key);

/* What a step of this plan, its forward and its backward, takes of the device in blocks (docs/MEMORY.md): the arena and
 * the outputs from the beginning to the end, the gradients that the segments so far hand out, and the loans of the one
 * at hand, as if the host held every output. (peak.c) */
om_memory om_plan_memory(om_ctx *cx, const om_plan *p);
/* What lives at the call where arena + outputs are largest, largest first (peak.c). *n: rows written, at most max. */
typedef struct om_live {
    int64_t size;
    uint8_t where;             /* om_where */
    bool scratch;              /* a kernel's own, not a value */
    int32_t first, last;       /* calls */
    om_id node;                /* that made it; OM_NONE: a copy the planner added */
} om_live;
om_status om_plan_peak(om_ctx *cx, const om_plan *p, om_live *out, int max, int *n, int *call, int64_t *bytes);

/* What a call computes, by calculation (work.c): operations of products exactly, one per statement of an elementwise
 * chain and element, a few per element of rows and reductions; and the bytes of its operands, each element once. */
typedef struct om_work { double flops, bytes; } om_work;
om_work om_call_work(const om_plan *p, const om_call *c);

/* --- parts of a block (parts.c) ------------------------------------------------------------------ */

/* Of a block: who has it or a part of it, and who wants to know. Made with one holder, the block's (om_block_put of it
 * is its end), and known to the caller. NULL: recorded. */
typedef struct om_parts om_parts;
om_parts *om_parts_new(om_ctx *cx, om_block *whole);
void om_parts_know(om_parts *p);                       /* once more */
void om_parts_forget(om_parts *p);                     /* once each; NULL is fine */
/* `data`, which the caller knows to be there, is the block's memory */
bool om_parts_is(const om_parts *p, const void *data);
bool om_parts_out(const om_parts *p);                  /* a part has not been put */
om_block *om_parts_take(om_ctx *cx, om_parts *p, int64_t offset, int64_t size); /* while the block is held */
void om_parts_put(om_block *b);                        /* om_block_put of the block or a part; any thread */

/* --- running: step.c owns the blocks of a run, exec.c does its calls ----------------------------- */

/* rows of a profile: operators by id, copies the planner added */
enum { OM_PROFILE_COPY = OM_N_OPS, OM_PROFILE_VIEW_COPY, OM_N_PROFILE };

struct om_run {
    om_model *model;
    om_plan *plan;             /* held */
    om_ctx *cx;
    const om_scalars *scalars; /* in the device's memory */
    char *arena;               /* plan->bytes.arena bytes, 64-byte aligned */
    void **input;              /* per graph input: data or NULL when not needed */
    void **output;             /* per user output */
    void **grad;               /* per graph->grads entry */
    void **loan;               /* per user output */
    om_parts *own, *parts;     /* of the arena, if it is the forward's; where gradients may lie in it; else NULL */
    om_fault fault;            /* what a call has noted; looked at after each one: nothing later runs */
    int pc;
    bool backward, skip_writes, host_due, done, state_taken;
    om_profile_row *profile;   /* OM_N_PROFILE rows, and behind them an om_clock per call of the plan; or NULL */
    double stop_ms;            /* when the host was given its node */
    /* blocks the run owns: NULL once handed over, or when the memory is somebody else's */
    om_block *scalar_block, *arena_block, **output_block, **grad_block, **loan_block;
    OM_VEC(om_block *) temp;   /* copies of what was given in another layout */
    om_host_stop stop;         /* when host_due */
    om_tensor *stop_arg;       /* its tensors */
    uint64_t seed;
    long of_device;            /* the device's own; 0 when the run begins */
};

/* Calls up to `stop` or the next one of the host's: OM_HOST, run->host_due, and calls[run->pc] is it. */
om_status om_run_step(om_run *r, int stop);
om_tensor om_run_arg(const om_run *r, const om_call *c, int i);
/* for a device's run_slice: where a storage lies; after call pc: what is dead then is filled with NaN
 * (ORTMODULE_POISON); a line of the profile */
void *om_run_storage(const om_run *r, const om_storage *s);
om_status om_run_poison(om_run *r, int pc);
void om_run_profile_add(om_run *r, const om_call *c, double ms);
double om_now_ms(void);

/* --- model (model.c) ---------------------------------------------------------------------------- */
typedef struct om_variant {
    om_graph *g;
    om_facts *facts;           /* of g */
    uint8_t *wanted, *arriving;
    int *group;
    /* per value of the joint graph before it was decided: backward computes it again; n_again of them. wanted,
     * arriving, group and this are the key */
    uint8_t *again;
    uint32_t n_again;
    uint32_t policies;         /* bit per om_recompute that chooses this set */
    int n_segments;
    om_id first_grad_in;       /* graph inputs from here on are arriving gradients */
    om_flow flow;
    om_needs needs;            /* in g's arena; so is */
    const int *grad_at;        /* per graph input: entry of g->grads, -1: none */
    double ms;
    char padding[96];          /* om_ctx's, when it was made */
} om_variant;

om_status om_model_from_graph(om_ctx *cx, om_graph *g, om_model **out); /* takes the graph */
const om_graph *om_model_graph(const om_model *m, int variant);         /* -1: forward */
const om_variant *om_model_variant_at(const om_model *m, int variant);

/* Concrete sizes come from the tensors given for the graph inputs (data is not read, except 0-d integer inputs that
 * name a size: theirs is in the host's memory). Checks dtype and rank against the capture. */
om_status om_plan_get(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, om_plan **plan);
/* Ends the use of a plan that om_plan_get, om_plan_hold or om_model_plans has given; once each. It may stay cached. */
void om_plan_release(om_model *m, om_plan *plan);
void om_model_plans_drop(om_model *m);                                  /* empties the cache; who uses one keeps it */
om_plan *om_plan_hold(om_model *m, om_plan *plan);                      /* one more user */
/* Gradients in the arena (above, GRAD): they may be there; a backward puts them there, if they may; a forward with a
 * backward begins */
bool om_model_places(om_model *m, const om_plan *p, bool fleeting);
bool om_model_lend(om_model *m, const om_plan *p, bool fleeting, om_parts *parts);
void om_model_back(om_model *m);
bool om_model_profiling(const om_model *m);
void om_model_profile_add(om_model *m, om_run *r);                      /* what r has gathered, and empties it */
bool om_plan_clocks(om_model *m, const om_plan *p, om_clock *out);      /* one per call; false: none was timed */

/* needs.c */
om_status om_needs_make(om_ctx *cx, om_variant *v);                     /* fills v->needs and v->grad_at */
/* per user output: it depends on a float parameter or input through operators with a gradient; om_free */
om_status om_outputs_differentiable(om_ctx *cx, const om_graph *g, uint8_t **out);
double om_model_load_ms(const om_model *m);
/* up to max plans, to be released; returns how many */
int om_model_plans(om_model *m, om_plan **out, int max);

#endif
