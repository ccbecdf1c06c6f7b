/* plan.h - the contract of memory and control: what a plan is, who owns which byte, when control returns to the host.
 *
 * TIME.  A plan is one flat list of calls for one variant of a graph and one set of sizes and strides of its inputs:
 *
 *     [ forward calls | update calls | write-backs ] [ backward segment 0 | segment 1 | ... ]
 *       ^ pc of a forward run                          ^ pc of a backward run
 *
 * A run is a program counter over a slice of that list. It stops at the end of a segment or before a HOST call (a yield
 * point): the host does its part (an ATen region, a PythonOp, a module kept in PyTorch), hands the results in, and
 * resumes. Nothing else in the engine waits for, or calls, the host.
 *
 * SPACE. Every value lies in one storage; views share their source's. A storage is in one of:
 *
 *     ARENA    one block per forward in flight, at a fixed offset. Offsets only: the block may come back at another
 *              address (save_on_cpu). It begins with an om_arena_head that names plan and seed, so the block alone IS
 *              the state of a forward, and a host can keep it as a saved tensor: freed, checked and refused a second
 *              time by the host's rules.
 *     INPUT    a tensor of the host (parameter, buffer, user tensor, arriving gradient): borrowed for one call, any
 *              strides.
 *     OUTPUT   a block of its own that the host owns when the forward has ended: what a user can hold is never in the
 *              arena.
 *     GRAD     the same for a returned gradient: sizes, dtype and strides of its input, no other reference, handed over
 *              at the end of its segment and not touched afterwards.
 *     LOAN     a value of the backward that may overwrite an output nobody reads any more (the gradient of the logits
 *              over the logits). The host knows whether the user has dropped the output: then that block is lent, else
 *              another one. Taken when first written, free after the last use.
 *     CONST    in the graph.
 *
 * Rules the planner keeps and tests/test_plan.py checks with code of its own:
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

typedef enum om_where { OM_W_ARENA, OM_W_INPUT, OM_W_OUTPUT, OM_W_GRAD, OM_W_LOAN, OM_W_CONST } om_where;

typedef struct om_storage {
    int64_t size, offset;      /* bytes; offset within the arena */
    int32_t first, last;       /* calls */
    uint8_t where;
    /* INPUT: graph input; OUTPUT: user output; GRAD: entry of graph->grads; LOAN: user output */
    uint32_t index;
    const void *data;          /* CONST */
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
    const void *prep;          /* what the row prepared for these sizes */
    om_id write;               /* COPY that is a write-back: its graph input; else OM_NONE */
    const om_attr *attr;
    om_parg *arg;              /* n_in + n_out */
    uint32_t scratch;          /* storage or OM_NONE */
} om_call;

/* kept: arena bytes alive between forward and backward */
typedef struct om_plan_bytes { int64_t arena, kept, outputs, grads, loans; } om_plan_bytes;

struct om_plan {
    const om_graph *g;
    const om_device *device;
    om_arena mem;
    int variant;
    uint64_t serial;           /* unique in the process */
    uint64_t used;             /* clock of the model's cache */
    int refs;                  /* the cache's and every user's; freed at 0 (under the model's lock) */
    struct om_plan *next;      /* of the plans that have left the cache and are still in use */
    int threads;               /* om_num_threads when scratch was sized; a run uses at most so many */
    int64_t *key;              /* threads, sizes and strides of the inputs, values that are sizes; n_key entries */
    int n_key;
    int64_t *sym;
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
    uint8_t *input_read;       /* per graph input: 1 forward, 2 backward reads it */
    uint8_t *output_read;      /* per user output: backward reads it */
    om_plan_bytes bytes;
    double ms;                 /* time planning took */
};

typedef struct om_arena_head { /* first bytes of every arena */
    uint64_t magic, serial, seed;
    int64_t size;
    uint64_t pad[4];
} om_arena_head;
#define OM_ARENA_MAGIC 0x31414e4552414d4full /* "OMARENA1" */

/* `in`: per graph input that is not an arriving gradient. */
om_status om_plan_make(om_ctx *cx, const om_graph *g, const om_tensor *in, om_plan **out);
void om_plan_free(om_ctx *cx, om_plan *p);
int om_plan_key_size(const om_graph *g);
void om_plan_key(const om_graph *g, const om_tensor *in, int64_t *key);

/* What lives at the call where arena + outputs are largest, largest first (peak.c). *n: rows written, at most max. */
typedef struct om_live {
    int64_t size;
    uint8_t where;             /* om_where */
    bool scratch;              /* a kernel's own, not a value */
    int32_t first, last;       /* calls */
    om_id node;                /* that made it; OM_NONE: a copy the planner added */
} om_live;
om_status om_plan_peak(om_ctx *cx, const om_plan *p, om_live *out, int max, int *n, int *call, int64_t *bytes);

/* --- running ------------------------------------------------------------------------------------
 * The host fills the bases, then steps. om_run_step returns OM_OK when `stop` is reached, OM_HOST with run->host_call
 * set when calls[run->host_call] is the host's to do: it reads om_run_arg()s, writes the outputs, calls om_run_step
 * again. */
struct om_run {
    const om_plan *plan;
    om_ctx *cx;
    uint64_t seed;
    char *arena;               /* plan->bytes.arena bytes, 64-byte aligned */
    void **input;              /* per graph input: data or NULL when not needed */
    void **output;             /* per user output */
    void **grad;               /* per graph->grads entry */
    void **loan;               /* per user output */
    om_fault fault;            /* what a call has noted; looked at after each one: nothing later runs */
    int pc, host_call;
    bool host_pending;
    bool skip_writes;          /* a repeated forward must not update buffers twice */
    struct om_profile *profile; /* or NULL */
};
typedef struct om_profile { /* per operator name: filled when asked for */
    OM_VEC(struct om_profile_row { const char *op; uint64_t count; double ms; }) rows;
} om_profile;

void om_profile_merge(om_ctx *cx, om_profile *to, om_profile *from); /* and empties `from` */

om_status om_run_step(om_run *r, int stop);
om_tensor om_run_arg(const om_run *r, const om_call *c, int i);
double om_now_ms(void);

/* --- model (model.c) ---------------------------------------------------------------------------- */
typedef struct om_variant {
    om_graph *g;
    uint8_t *wanted, *arriving;
    int *group;
    int n_segments;
    om_id first_grad_in;       /* graph inputs from here on are arriving gradients */
    om_flow flow;
    double ms;
} om_variant;

om_status om_model_from_graph(om_ctx *cx, om_graph *g, om_model **out); /* takes the graph */
const om_graph *om_model_graph(const om_model *m, int variant);         /* -1: forward */
const om_variant *om_model_variant_at(const om_model *m, int variant);
/* to be released; NULL when it was evicted and nobody used it */
om_plan *om_model_plan_by_serial(om_model *m, uint64_t serial);
om_plan *om_plan_hold(om_model *m, om_plan *plan);                      /* one more user */
double om_model_load_ms(const om_model *m);
/* up to max plans, to be released; returns how many */
int om_model_plans(om_model *m, om_plan **out, int max);

#endif
