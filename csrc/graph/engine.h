/* engine.h - the types every file of the engine shares: context, size expressions, graph, operators, builder.
 *
 * The graph is SSA over whole tensors. Nodes stand in topological order in one array and are never removed or
 * reordered in place: a pass reads one graph and writes another (om_rewrite), so ids are plain array indices.
 *   - Sizes are expressions in types and attributes (om_dim); there are no shape tensors.
 *   - A value is defined once. Mutation exists only as the write list (BatchNorm statistics, inputs the user's
 *     code edits); in-place execution exists only in the plan.
 *   - A VIEW operator says how strides map; the plan decides between alias and copy. Every kernel takes any
 *     strides unless its operator sets `dense` for that input: then the plan makes a copy first.
 *   - Every operator works in f64 as well as f32: tests compare with eager fp64 at 1e-10.
 */
#ifndef OM_ENGINE_H
#define OM_ENGINE_H

#include "ortmodule.h"

#include <assert.h>
#include <string.h>

typedef int64_t om_dim;  /* >= 0: that size; < 0: ~index into graph->exprs (hash-consed: == is equality) */
typedef uint32_t om_id;  /* index into values, nodes or scopes */
#define OM_NONE UINT32_MAX

/* --- context and errors ------------------------------------------------------------------------ */

struct om_ctx {
    om_services sv;
    om_status status;      /* first failure since om_ctx_clear */
    char message[1024];
    /* 0: no limit. A run lowers om_num_threads to what its plan counted on when it sized scratch */
    int max_threads;
    bool host_alloc;       /* services.alloc is the host's own */
    bool all_rows;         /* rows whose label does not count are computed all the same (passes/label_rows.c) */
    bool all_tokens;       /* so is padding (passes/padding.c) */
    bool rehearses;        /* indices and labels are nobody's data: what kernels note about them is forgotten */
    char padding[96];      /* what that pass has done, or why not */
    const struct om_device *device; /* what runs this context's plans; the CPU's unless set otherwise */
    const void *call;      /* what is being computed: loops of one call are known again by it (parallel.c) */
};

/* Records the first failure and returns `s`. Message: operator, given, allowed, remedy. */
om_status om_fail_at(om_ctx *cx, om_status s, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 5, 6), cold));
/* s, and if it is a failure, from's message as `to`'s; from goes on as if nothing was. */
om_status om_fail_of(om_ctx *to, om_ctx *from, om_status s);
om_ctx *om_ctx_like(const om_ctx *cx); /* of the same services, device and settings; NULL: no memory. om_ctx_free it */
#define om_fail(cx, s, ...) om_fail_at((cx), (s), __FILE__, __LINE__, __VA_ARGS__)
#define OM_TRY(expr)                                                                                \
    do {                                                                                            \
        om_status om_try_ = (expr);                                                                 \
        if (om_try_ != OM_OK) return om_try_;                                                       \
    } while (0)
#define OM_CHECK(cx, cond, ...)                                                                     \
    do {                                                                                            \
        if (!(cond)) return om_fail((cx), OM_INVALID, __VA_ARGS__);                                 \
    } while (0)

void *om_alloc(om_ctx *cx, size_t size); /* 64-byte aligned, zeroed; on failure records OM_NOMEM, returns NULL */
void om_free(om_ctx *cx, void *p);       /* NULL is fine */
void om_log(om_ctx *cx, int level, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void om_parallel_for(om_ctx *cx, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg);
int om_num_threads(om_ctx *cx);

/* Bump arena: freed as a whole. om_arena_alloc is zeroed, 16-byte aligned. */
typedef struct om_arena { om_ctx *cx; struct om_chunk *chunks; } om_arena;
void *om_arena_alloc(om_arena *a, size_t size);
char *om_arena_str(om_arena *a, const char *s); /* copy; NULL stays NULL */
void *om_arena_copy(om_arena *a, const void *p, size_t size);
void om_arena_free(om_arena *a);

/* Growable array of POD: struct { T *v; uint32_t n, cap; }. OM_PUSH evaluates to the new element or NULL. */
#define OM_VEC(T) struct { T *v; uint32_t n, cap; }
#define OM_PUSH(cx, vec)                                                                            \
    (((vec)->n < (vec)->cap || om_grow((cx), (void **)&(vec)->v, &(vec)->cap, sizeof *(vec)->v))    \
         ? &(vec)->v[(vec)->n++]                                                                    \
         : NULL)
bool om_grow(om_ctx *cx, void **v, uint32_t *cap, size_t elem); /* new memory is zeroed */

/* --- dtypes ------------------------------------------------------------------------------------ */

size_t om_dtype_size(int dtype);
const char *om_dtype_name(int dtype);
/* "f32 [6, ?]", for messages; ?: any size (a negative one) */
typedef struct om_kind_text { char s[200]; } om_kind_text;
om_kind_text om_kind_write(int dtype, int rank, const int64_t *dim);
om_dtype om_dtype_from_name(const char *name);  /* OM_NODTYPE if unknown */
om_dtype om_dtype_from_onnx(int onnx);          /* OM_NODTYPE if unknown */
int om_dtype_onnx(int dtype);
static inline bool om_is_float(int t) { return t == OM_F32 || t == OM_F64 || t == OM_BF16 || t == OM_F16; }
static inline bool om_is_half(int t) { return t == OM_BF16 || t == OM_F16; }
static inline bool om_is_int(int t) { return t >= OM_I64 && t <= OM_BOOL; }
/* The type arithmetic is done in: f64 -> f64; f32, bf16, f16 -> f32; integers and bool -> i64. */
static inline int om_compute_dtype(int t) { return t == OM_F64 ? OM_F64 : om_is_float(t) ? OM_F32 : OM_I64; }

/* --- graph ------------------------------------------------------------------------------------- */

typedef enum om_expr_kind {
    OM_DIM_SYM, OM_DIM_ADD, OM_DIM_MUL, OM_DIM_DIV /* floor */, OM_DIM_MOD, OM_DIM_MIN, OM_DIM_MAX,
    OM_DIM_INT /* a negative integer, in a */
} om_expr_kind;
/* a larger size expression is refused, written out as a tree: what walks one needs no bound of its own */
enum { OM_DIM_LEAVES = 1024 };
typedef struct om_expr {
    uint8_t kind;
    bool opaque;        /* ADD, MUL: no polynomial of the normal form, stands as it was written */
    uint16_t leaves;    /* symbols and numbers in it */
    om_dim a, b;        /* operands; SYM: a = index into graph->syms */
} om_expr;
typedef struct om_dim_index { uint32_t *slot, size; } om_dim_index; /* hash -> 1 + index; expr.c */

typedef struct om_sym { /* a size known only when tensors arrive; bounded: only by the data */
    const char *name;   /* "s0" */
    om_id input;        /* graph input that tells it */
    int axis;           /* which dimension of it; -1: the value of that 0-d integer input */
    bool bounded;
    om_dim bound;       /* bounded: its largest value, without bounded symbols */
    om_id count;        /* bounded: the 0-d i64 value that holds it; OM_NONE: no node counts yet */
} om_sym;

/* Bounded sizes (graph/bounded.c): how many rows there are, only the data knows (those whose label counts).
 *   - Such a size is a symbol of its own, c0 <= n. Who needs a number (plan, interpreter, storages, strides) takes the
 *     bound. The count is a value of the graph, one i64 in the device's memory, made by the operator that defines the
 *     symbol (select_rows): kernels read it, the host never does, so one plan serves every count.
 *   - Rows from the count to the bound exist and hold anything. No row below the count, and nothing without that axis,
 *     depends on them: an operator makes row i from rows i (and may leave out the rest: om_args.count); or has the
 *     count as an operand (compress, restore, trim); or adds up over rows, and then is given rows that are zero from
 *     the count on: om_make puts a trim before an operand that is not known to be so.
 *   - A tensor has at most one axis of a bounded size, and no size is computed from one. Graph inputs, outputs, writes,
 *     gradients and host nodes have none: restore gives back the rows of before.
 *   - Other operators, and these where rows would meet otherwise, are refused by name. */

typedef struct om_type {
    uint8_t dtype, rank; /* no device: a plan has one, for all of its values */
    om_dim dim[OM_RANK];
} om_type;

typedef struct om_value {
    om_type type;
    om_id node;         /* producer, or OM_NONE for inputs and constants */
    uint8_t role;
    uint16_t out;       /* which output of the producer */
    om_id input;        /* index into graph->inputs for INPUT, PARAM, BUFFER, GRAD_IN */
    /* Input: a host scalar. Its one element lies in the host's memory, whatever the device; a run takes it along with
     * its seed (om_scalars), and what reads it finds it in the device's memory, as every operand. Only these may the
     * host side look into: sizes that are values are host scalars. */
    bool host;
    const void *data;   /* CONST: dense row-major bytes, 64-byte aligned */
    const char *name;
} om_value;

typedef enum om_attr_kind {
    OM_ATTR_INT, OM_ATTR_FLOAT, OM_ATTR_STR, OM_ATTR_DIMS /* list of om_dim: sizes or plain integers */
} om_attr_kind;
typedef struct om_attr {
    const char *name;
    uint8_t kind;
    uint32_t n;         /* DIMS: how many */
    union { int64_t i; double f; const char *s; const om_dim *dims; };
} om_attr;
#define OM_AI(nm, x) ((om_attr){.name = (nm), .kind = OM_ATTR_INT, .i = (x)})
#define OM_AF(nm, x) ((om_attr){.name = (nm), .kind = OM_ATTR_FLOAT, .f = (x)})
#define OM_AS(nm, x) ((om_attr){.name = (nm), .kind = OM_ATTR_STR, .s = (x)})
#define OM_AD(nm, p, cnt) ((om_attr){.name = (nm), .kind = OM_ATTR_DIMS, .n = (uint32_t)(cnt), .dims = (p)})

typedef struct om_scope { /* where in the user's source a node comes from */
    const char *module;   /* "transformer.h.0.attn" */
    const char *file;
    int line;
    const char *region;   /* checkpoints it lies in, outermost first: "2/3"; NULL: none. Of equal text: one region */
} om_scope;

/* UPDATE: optimizer steps and what reads their results. Such nodes run once per run, after every FORWARD node and never
 * in a repeated forward; a graph has them or BACKWARD nodes, not both. */
typedef enum om_phase { OM_FORWARD, OM_BACKWARD, OM_UPDATE } om_phase;

/* What a node may have at most, so that arrays for it may stand on a stack: operands, outputs, both together,
 * attributes, entries of all its attribute lists together. */
enum { OM_MAX_IN = 256, OM_MAX_OUT = 64, OM_MAX_ARGS = OM_MAX_IN + OM_MAX_OUT, OM_MAX_ATTR = 64, OM_MAX_DIMS = 512 };

typedef struct om_node {
    const struct om_op *op;
    /* in: offset into graph->operands (OM_NONE operand = left out); out: first output value, consecutive */
    om_id in, out;
    uint16_t n_in, n_out, n_attr;
    uint16_t segment;        /* backward: which autograd node runs it; set by the segment pass */
    uint8_t phase;
    const om_attr *attr;     /* in the graph's arena */
    om_id scope;             /* OM_NONE = unknown */
    /* random stream id, fixed at capture, shared with the gradient and with clones; 0 = none */
    uint64_t rng;
    /* one number for a node and for the clone that computes it again (passes/remat.c); 0 = none */
    om_id again;
} om_node;

/* When the forward's values are there, UPDATE nodes included, `value` is stored into graph input `input`: of the old
 * value nothing else is lost. */
typedef struct om_write { om_id value, input; } om_write;
/* gradient of graph input `input`; value OM_NONE = no path: None */
typedef struct om_gradout { om_id value, input; } om_gradout;

typedef struct om_graph {
    om_ctx *cx;
    om_arena arena;                    /* names, attributes, constants */
    OM_VEC(om_value) values;
    OM_VEC(om_node) nodes;
    OM_VEC(om_id) operands;
    OM_VEC(om_expr) exprs;
    OM_VEC(om_sym) syms;
    OM_VEC(om_scope) scopes;
    OM_VEC(om_id) inputs;              /* value ids, in the order the host passes tensors; GRAD_IN ones last */
    OM_VEC(om_id) outputs;             /* user outputs */
    OM_VEC(const char *) output_names; /* of a graph that was just read: the file's */
    OM_VEC(om_write) writes;
    OM_VEC(om_gradout) grads;
    om_dim_index expr_index, sym_index;
    uint64_t serial;                   /* no other graph has it */
    bool bounded;                      /* some symbol is */
    /* what om_dim_copy made of the expressions of graph `from`; 0: nothing yet */
    struct { uint64_t from; OM_VEC(om_dim) dim; } copied;
    uint32_t n_rng;                    /* streams handed out so far */
    int n_segments;                    /* of the backward; set with node->segment (model.c) */
    /* builder state: stamped on every node made */
    om_id cur_scope;
    uint8_t cur_phase;
} om_graph;

om_graph *om_graph_new(om_ctx *cx);
void om_graph_free(om_graph *g);
static inline const om_id *om_ins(const om_graph *g, const om_node *n) { return g->operands.v + n->in; }
/* The checkpoints a node lies in; a node of the backward: those of the node it is the gradient of. NULL: none. */
static inline const char *om_region(const om_graph *g, const om_node *n) {
    return n && n->scope < g->scopes.n ? g->scopes.v[n->scope].region : NULL;
}
int om_region_depth(const char *region);               /* how many; NULL: 0 */
int om_region_common(const char *a, const char *b);    /* how many of the outermost are the same */
static inline om_value *om_val(const om_graph *g, om_id v) { return &g->values.v[v]; }
static inline const om_type *om_ty(const om_graph *g, om_id v) { return &g->values.v[v].type; }
/* Of one graph, or where sizes are numbers: sizes of two graphs are not to be compared. */
static inline bool om_has_dims(const om_type *t, const om_dim *dim, int rank) {
    return t->rank == rank && !memcmp(t->dim, dim, (size_t)rank * sizeof *dim);
}
static inline bool om_same_dims(const om_type *a, const om_type *b) { return om_has_dims(a, b->dim, b->rank); }

/* Sizes. Results are in a normal form (sum of products, sorted), so equal expressions are equal om_dims
 * whenever they are equal as polynomials; DIV/MOD/MIN/MAX are simplified only where plainly exact. */
om_dim om_dim_sym(om_graph *g, const char *name);          /* finds or adds; binding by om_sym_bind */
om_status om_sym_bind(om_graph *g, const char *name, om_id input, int axis); /* first binding wins */
om_status om_sym_bound(om_graph *g, const char *name, om_dim bound);         /* a bounded size; twice: the same bound */
om_dim om_dim_add(om_graph *g, om_dim a, om_dim b);
om_dim om_dim_sub(om_graph *g, om_dim a, om_dim b);
om_dim om_dim_mul(om_graph *g, om_dim a, om_dim b);
om_dim om_dim_div(om_graph *g, om_dim a, om_dim b);        /* floor */
om_dim om_dim_mod(om_graph *g, om_dim a, om_dim b);
om_dim om_dim_min(om_graph *g, om_dim a, om_dim b);
om_dim om_dim_max(om_graph *g, om_dim a, om_dim b);
om_dim om_dim_numel(om_graph *g, const om_type *t);        /* product of the dimensions */
om_dim om_dim_copy(om_graph *to, const om_graph *from, om_dim d);
/* drops later symbols and expressions; nobody may hold one */
void om_dim_forget(om_graph *g, uint32_t n_syms, uint32_t n_exprs);
#define OM_DIM_BAD INT64_MIN                               /* what a size is that 64 bits do not hold */
/* sym[i] = value of syms[i]; may be negative; OM_DIM_BAD: overflow */
int64_t om_dim_eval(const om_graph *g, om_dim d, const int64_t *sym);
om_dim om_dim_int(om_graph *g, int64_t i);                 /* any integer: i itself when >= 0, else an INT expression */
bool om_dim_const(const om_graph *g, om_dim d, int64_t *value); /* true and the value when it is a known integer */
/* "s0*12 + 3", "s1//2", "Max(1, s0)", "Mod(s0, 4)" */
om_status om_dim_parse(om_graph *g, const char *text, om_dim *out);
void om_dim_print(const om_graph *g, om_dim d, char *buf, size_t size);

/* --- operators --------------------------------------------------------------------------------- */

typedef enum om_kind {
    OM_K_VIEW, OM_K_POINTWISE, OM_K_REDUCE, OM_K_ROW, OM_K_GEMM, OM_K_ATTENTION, OM_K_GATHER, OM_K_SCATTER,
    OM_K_RANDOM, OM_K_CONV, OM_K_CREATE, OM_K_HOST
} om_kind;

/* What the calls of a run share and its plan does not fix: one small block, in the device's memory. Behind the symbols
 * lie the host scalars, eight bytes each (om_plan.host). */
typedef struct om_scalars {
    /* of this forward; with node->rng it keys Philox. Read where an operator is `random`, or a fused chain has such a
     * statement, and nowhere else */
    uint64_t seed;
    int64_t sym[];       /* values of the graph's symbols */
} om_scalars;

/* The index or label that a call could not use. A kernel returns no error from its middle, where a device that runs
 * behind its host has nobody to return to: it notes the fault, goes on without touching memory outside of its tensors,
 * and whoever runs the call looks afterwards (om_fault_fail). Of several, the one at the smallest position is kept, so
 * it is the same whatever the number of threads. */
typedef enum om_fault_kind { OM_FAULT_NONE, OM_FAULT_INDEX, OM_FAULT_LABEL } om_fault_kind;
typedef struct om_fault {
    int kind, busy;      /* busy: a thread is writing */
    int64_t value;       /* what was found, */
    int64_t position;    /* counted in row-major order of the operand; */
    int64_t limit;       /* 0 to limit - 1 are allowed */
} om_fault;

typedef struct om_args { /* what a kernel gets */
    const om_node *node;
    const om_graph *graph; /* the node's, where a call is prepared; else maybe NULL */
    /* node->attr with every size replaced by its value (all DIMS entries >= 0 or plain negative ints) */
    const om_attr *attr;
    int n_attr, n_in, n_out;
    const om_tensor *in; /* left-out operand: dtype OM_NODTYPE */
    /* dense row-major unless the plan says otherwise; never overlaps an input, except allowed in-place */
    om_tensor *out;
    const void *prep;    /* what the row's `prepare` made of these sizes */
    void *scratch;       /* as many bytes as the row's `scratch` said, 64-byte aligned, uninitialised */
    const om_scalars *scalars; /* of this run */
    /* Bounded sizes: per operand, then per output, the axis that has one, -1: none; NULL: nobody has. And how many
     * entries of it count, in the device's memory: a kernel may leave out what lies past them. NULL while a call is
     * prepared, and where no plan runs it. */
    const int8_t *bounded;
    const int64_t *count;
    /* Somebody reads what lies past the count in an output: then it must be what it is without a count (zeros, where
     * the operator says so) */
    bool past;
    om_fault *fault;     /* of this run; never NULL where a kernel runs */
} om_args;
typedef struct om_builder om_builder;

typedef struct om_op {
    const char *name;   /* snake_case, as in the text dump */
    uint16_t id;        /* OM_OP_<name>: its place in om_ops and in every device's table */
    const char *doc;    /* of its row in ops.def: (operands) attributes -> results */
    uint8_t kind;
    int8_t min_in, max_in; /* max_in -1: any number */
    int8_t n_out;       /* outputs; -1: host operators, the length of attribute out_dtype */
    uint32_t optional;  /* bit j: operand j < min_in may be left out (operands >= min_in always may) */
    /* Operators that change state: the operand whose new value output `out` is (same type), or -1. Where the graph
     * writes the output back to that operand, a plan computes it in the operand's own memory. Nodes of such an operator
     * are of phase UPDATE. */
    int (*state)(const om_node *n, int out);
    bool random;        /* reads node->rng and the run's seed */
    /* bit j: operand j is a number that a host gives (learning rate, step): a graph input of a file that is read there
     * and never written is a host scalar */
    uint32_t host;

    /* Types of the outputs; sets node->n_out's types in out[]. `n` has op, attr, n_in, n_out filled. */
    om_status (*infer)(om_graph *g, const om_node *n, om_type *out);
    /* VIEW: fill out->dim is done; set out->stride and *offset (elements) from in; false = needs a copy. */
    bool (*view)(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset);
    /* Gradient: dy[i] = gradient of output i (OM_NONE = zero); set dx[j] for inputs with want[j]; leave OM_NONE = zero.
     * Built with om_make & friends; dx[j] must have input j's shape and dtype. NULL = not differentiable (all dx
     * zero). */
    om_status (*grad)(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx);
    const struct om_pw_row *pw; /* POINTWISE: its row of pointwise.def (ops/strip.h) */
} om_op;

/* Every operator, one row each in ops.def: OP(name, doc) -> `extern const om_op om_op_name`, its number OM_OP_name. */
#define OP(name, doc)                                                                               \
    extern const om_op om_op_##name;                                                                \
    extern const char om_doc_##name[];
#include "graph/ops.def"
#undef OP
enum {
#define OP(name, doc) OM_OP_##name,
#include "graph/ops.def"
#undef OP
    OM_N_OPS
};
#define OM_OP(nm) .name = #nm, .id = OM_OP_##nm, .doc = om_doc_##nm
extern const om_op *const om_ops[]; /* NULL-terminated */
const om_op *om_op_find(const char *name);
#define om_is(n, opname) ((n)->op == &om_op_##opname)

/* attributes: by name; the default when absent */
int64_t om_attr_int(const om_attr *a, int n, const char *name, int64_t dflt);
double om_attr_float(const om_attr *a, int n, const char *name, double dflt);
const char *om_attr_str(const om_attr *a, int n, const char *name, const char *dflt);
const om_attr *om_attr_get(const om_attr *a, int n, const char *name);       /* NULL when absent */
#define om_node_int(nd, name, d) om_attr_int((nd)->attr, (nd)->n_attr, name, d)
#define om_node_float(nd, name, d) om_attr_float((nd)->attr, (nd)->n_attr, name, d)
#define om_args_int(ar, name, d) om_attr_int((ar)->attr, (ar)->n_attr, name, d)
#define om_args_float(ar, name, d) om_attr_float((ar)->attr, (ar)->n_attr, name, d)

/* --- builder: errors are sticky. After a failure every om_make returns OM_NONE and makes nothing; the caller checks
 * once at the end (g->cx->status). An OM_NONE operand where one is required also fails. ---------------------------- */
struct om_builder { om_graph *g; };

/* Adds a node, infers its types, returns its first output. Attributes and strings are copied into the graph. */
om_id om_make(om_graph *g, const om_op *op, const om_id *in, int n_in, const om_attr *attr, int n_attr);
om_node *om_last(om_graph *g); /* the node just made */
#define OM_IN(...) (om_id[]){__VA_ARGS__}, (int)(sizeof((om_id[]){__VA_ARGS__}) / sizeof(om_id))
#define OM_ATTRS(...) (om_attr[]){__VA_ARGS__}, (int)(sizeof((om_attr[]){__VA_ARGS__}) / sizeof(om_attr))
/* example: om_make(g, &om_op_permute, OM_IN(x), OM_ATTRS(OM_AD("perm", p, rank)))      no attributes: NULL, 0 */

om_id om_const(om_graph *g, int dtype, int rank, const int64_t *dim, const void *data); /* data copied */
om_id om_scalar(om_graph *g, int dtype, double x);               /* 0-d constant */
double om_round_to(int dtype, double x);                         /* x as that float type holds it; others: x */
/* shorthands; rank and sizes from the operands */
om_id om_b_un(om_graph *g, const om_op *op, om_id x);
om_id om_b_bin(om_graph *g, const om_op *op, om_id x, om_id y);  /* numpy broadcasting */
om_id om_b_cast(om_graph *g, om_id x, int dtype);                /* x itself when already that */
om_id om_b_reshape(om_graph *g, om_id x, const om_dim *dim, int rank); /* x itself when already that */
om_id om_b_permute(om_graph *g, om_id x, const int *perm);
om_id om_b_transpose(om_graph *g, om_id x, int a, int b);        /* swap two axes; negative counts from the end */
om_id om_b_expand(om_graph *g, om_id x, const om_dim *dim, int rank);
om_id om_b_slice(om_graph *g, om_id x, int axis, om_dim start, om_dim end, int64_t step);
om_id om_b_sum(om_graph *g, om_id x, uint32_t axes_mask, bool keepdim);
om_id om_b_sum_to(om_graph *g, om_id x, const om_type *t);       /* undo broadcasting: sum and reshape x to t's shape */
om_id om_b_fill(om_graph *g, int dtype, const om_dim *dim, int rank, double value);
om_id om_b_zeros_like(om_graph *g, om_id x);
om_id om_b_scale(om_graph *g, om_id x, double s);                /* x * s in x's dtype, rounded once */

om_id om_input(om_graph *g, om_role role, const char *name, const om_type *t); /* appends to g->inputs */
om_status om_input_host(om_graph *g, om_id input);  /* makes it a host scalar (om_value.host): one element */

/* Copies `from` node by node through `emit`, which must define om_map[old value] -> new value for the node's outputs
 * (om_rewrite_copy does it unchanged). Dead nodes (no path to outputs, writes, grads) are skipped. */
typedef struct om_rewriter {
    const om_graph *from;
    om_graph *to;
    om_id *map;              /* per old value: new value or OM_NONE */
    void *arg;
} om_rewriter;
typedef om_status (*om_emit_fn)(om_rewriter *r, om_id node);
om_status om_rewrite(om_ctx *cx, const om_graph *from, om_emit_fn emit, void *arg, om_graph **out);
/* Told of each rewrite of this thread when it is done, NULL: nobody. map: as om_rewriter's, of the finished graph. */
typedef void (*om_rewrite_told)(void *arg, const om_graph *from, const om_graph *to, const om_id *map);
void om_rewrite_tell(om_rewrite_told told, void *arg);
om_status om_rewrite_copy(om_rewriter *r, om_id node);
/* the same over these operands (of `to`) */
om_status om_rewrite_copy_with(om_rewriter *r, om_id node, const om_id *in);
om_status om_rewrite_copy_more(om_rewriter *r, om_id node, const om_id *in, om_attr more); /* with an attribute more */
/* Only the node, over n_in operands of `to`: scope and phase are the builder's, the map stays. Returns its first
 * output. */
om_id om_rewrite_node(om_rewriter *r, const om_node *n, const om_id *in, int n_in);

/* Runs one node on given tensors (outputs allocated by the caller, dense); inputs that an operator needs dense are
 * copied. */
om_status om_eval_node(om_ctx *cx, const om_graph *g, const om_node *n, const om_attr *attr, const om_tensor *in,
                       om_tensor *out, uint64_t seed);
/* OM_OK when nothing was noted; else the error, with the operator and where in the user's source it comes from, and the
 * fault is forgotten. `attr`: the call's. */
om_status om_fault_fail(om_ctx *cx, const om_graph *g, const om_node *n, const om_attr *attr, om_fault *f);
/* Runs a whole graph node by node, every value in its own memory: no planner, no reuse, no in-place. The oracle of
 * plan.c and what the operator tests run. in: one per g->inputs. out: one per g->outputs, then writes, then grads
 * (absent gradient: dtype OM_NODTYPE); data allocated with om_alloc, the caller frees. */
om_status om_interpret(om_ctx *cx, const om_graph *g, const om_tensor *in, uint64_t seed, om_tensor *out);

/* bounded.c. operands: those of a node to be made, with trims where it adds up over rows (`with`: OM_MAX_IN entries,
 * what is returned when one was needed). check: of a node and its outputs' types. ends: of a graph's inputs and
 * results. */
const om_id *om_bounded_operands(om_graph *g, const om_op *op, const om_id *in, int n_in, const om_attr *attr,
                                 int n_attr, om_id *with);
om_status om_bounded_check(om_graph *g, const om_node *n, const om_type *out);
om_status om_bounded_ends(const om_graph *g);
/* Bit per operand of which n needs what lies past the count. past: somebody reads it of n's result; counted: operands
 * of which its kernel reads nothing there (om_device.counted). */
uint32_t om_bounded_past(om_graph *g, const om_node *n, bool past, uint32_t counted);
/* the axis of a bounded size, and which; -1: none, -2: several, or a size computed from one */
int om_bounded_axis(const om_graph *g, const om_type *t, om_dim *size);

/* structure, types re-inferred, topological order; names the node that is wrong */
om_status om_verify(const om_graph *g);
om_status om_graph_print(const om_graph *g, char **text);          /* text dump; om_text_free */
om_status om_graph_parse(om_ctx *cx, const char *text, om_graph **out); /* inverse of the dump */
om_status om_onnx_read(om_ctx *cx, const void *bytes, size_t size, om_graph **out);
/* inference part as standard ONNX */
om_status om_onnx_write(om_ctx *cx, const om_graph *g, void **bytes, size_t *size);

/* --- passes: passes.def is the pipeline ---------------------------------------------------------- */
typedef struct om_pass {
    const char *name, *doc;
    om_status (*run)(om_ctx *cx, const om_graph *in, om_graph **out);
} om_pass;
/* replaces *g; verifies between passes in debug builds */
om_status om_passes_run(om_ctx *cx, const om_pass *const *list, om_graph **g);

/* Gradients: appends BACKWARD nodes to a copy of `fwd`. */
om_status om_grad_build(om_ctx *cx, const om_graph *fwd, const uint8_t *wanted, const uint8_t *arriving,
                        om_graph **out);

/* Where gradients come from. In one run a gradient is absent (None, which is not zeros) when everything it is a sum
 * over is: outputs whose gradient did not arrive, host nodes that had none to give. The engine computes with zeros
 * then; the host asks here what to call None. */
typedef enum om_flow_kind {
    OM_FLOW_NEVER /* term 0 */,
    OM_FLOW_OUTPUT /* a: user output */,
    OM_FLOW_HOST /* a: row of the host's table, b: which
               input of the node */
    ,
    OM_FLOW_ANY /* a, b: terms before this one */
} om_flow_kind;
typedef struct om_flow_term {
    uint8_t kind;
    uint32_t a, b;
    uint64_t outputs;   /* bit per user output it comes from; the last bit stands for all from 63 on */
} om_flow_term;
/* gradient of the place-th float output of a host node */
typedef struct om_flow_in { uint32_t row, place, term; } om_flow_in;
typedef struct om_flow {
    OM_VEC(om_flow_term) terms;
    OM_VEC(om_flow_in) host;
    uint32_t *grads;    /* per graph input: term */
    /* per user output: outputs (bits) whose gradients need forward values by a node that this one's gradient needs some
     * by */
    uint64_t *shares;
    uint8_t *reach;     /* per user output: computed from a wanted input through operators with a gradient */
} om_flow;
om_status om_grad_flow(om_ctx *cx, const om_graph *fwd, const uint8_t *wanted, const uint8_t *arriving, om_flow *flow,
                       om_graph **out);
void om_flow_free(om_ctx *cx, om_flow *flow);

/* --- kernels' helpers ---------------------------------------------------------------------------- */
static inline int64_t om_numel(const om_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) n *= t->dim[i];
    return n;
}
static inline int64_t om_tensor_bytes(const om_tensor *t) { return om_numel(t) * (int64_t)om_dtype_size(t->dtype); }
/* dtype and sizes, not strides */
static inline bool om_same_kind(const om_tensor *a, const om_tensor *b) {
    return a->dtype == b->dtype && a->rank == b->rank && !memcmp(a->dim, b->dim, a->rank * sizeof *a->dim);
}
/* bytes; larger tensors are refused, so sums of a few sizes cannot overflow */
#define OM_ADDRESSES ((int64_t)1 << 47)
bool om_is_dense(const om_tensor *t);                       /* row-major, no gaps (size-1 and empty dims ignored) */
void om_dense_strides(om_tensor *t);
/* any strides, any dtypes (converted), same dims */
om_status om_copy(om_ctx *cx, const om_tensor *src, om_tensor *dst);

#endif
