/* ortmodule.h - the public face of the engine and its manual: load a training graph, run it forward and backward.
 *
 * Life of a step (docs/ARCHITECTURE.md has the picture, examples/train_mlp.c a whole training loop):
 *
 *     om_model_load      ONNX bytes -> forward graph, simplified                      once per capture
 *     om_model_variant   + gradients for the wanted inputs, given which outputs
 *                          will receive a gradient                                    once per (wanted, arriving) set
 *     om_run_forward     + concrete sizes -> plan: order, storage, kernel calls       planned once per set of sizes, in
 *                          milliseconds, and cached; then it is one forward           every step
 *     om_run_backward    one backward over what a forward left                        every step
 *
 *     forward                                          backward
 *       om_run_forward(cx, m, variant, inputs, ..)       om_run_backward(cx, state, arena, .., grads, .., &run)
 *       om_run_resume(run, 0)       -> OM_OK             om_run_resume(run, segment)    -> OM_OK
 *       om_run_output(run, i, ..)   per output           om_run_grad(run, input, ..)    per gradient of the segment
 *       om_run_state(run, ..)       for a backward       om_run_free(run)
 *       om_run_free(run)
 *
 * Errors: every function that can fail returns om_status; the first failure leaves a sentence with
 * operator, what was given, what is allowed and the remedy in the context (om_ctx_message), and later ones do not
 * replace it: clear it (om_ctx_clear) before the next call. Nothing here exits, aborts or longjmps.
 *
 * Threads: an om_model may be used from several threads at once (what it caches is locked); an om_ctx and an
 * om_run by one thread at a time, whichever; an om_state and what is asked of a model are only read.
 *
 * Memory: what the host gives (tensors, bytes, names) is borrowed, for the call or, where said, for the life of a run.
 * What the engine gives in an om_block is the host's from then on. Objects are freed by the function named after them,
 * before the model they come from.
 */
#ifndef ORTMODULE_H
#define ORTMODULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One row per status: name, sentence. */
#define OM_STATUS_MAP(X)                                                                            \
    X(OK, "ok")                                                                                     \
    X(NOMEM, "out of memory")                                                                       \
    X(INVALID, "invalid argument or malformed input")                                               \
    X(UNSUPPORTED, "valid, but the engine has no kernel or rule for it")                            \
    X(HOST, "stopped at a host node: do it, then resume")                                           \
    X(INTERNAL, "a bug in the engine")

typedef enum om_status {
#define X(name, text) OM_##name,
    OM_STATUS_MAP(X)
#undef X
} om_status;

const char *om_status_text(om_status s);

/* Element types: name, ONNX TensorProto.DataType, bytes. OPAQUE = an object only the host understands. */
#define OM_DTYPE_MAP(X)                                                                             \
    X(NODTYPE, none, 0, 0)                                                                          \
    X(F32, f32, 1, 4) X(F64, f64, 11, 8) X(BF16, bf16, 16, 2) X(F16, f16, 10, 2)                     \
    X(I64, i64, 7, 8) X(I32, i32, 6, 4) X(I16, i16, 5, 2) X(I8, i8, 3, 1) X(U8, u8, 2, 1)            \
    X(BOOL, bool, 9, 1) X(OPAQUE, opaque, 0, 0)

typedef enum om_dtype {
#define X(NAME, name, onnx, bytes) OM_##NAME,
    OM_DTYPE_MAP(X)
#undef X
    OM_N_DTYPES
} om_dtype;

enum { OM_RANK = 8 }; /* most dimensions a tensor may have */

/* A tensor at run time. Strides in elements; data may be NULL only when it has no element. */
typedef struct om_tensor {
    void *data;
    int64_t dim[OM_RANK], stride[OM_RANK];
    uint8_t dtype, rank;
    int16_t device; /* -1 CPU, 0.. CUDA ordinal */
} om_tensor;

/* Of 1 to 3 spatial axes, all tensors of one type, f32 or bf16: x (n, c, ...), w (o, c / groups, ...), y (n, o, ...).
 * All are dense; or, of two axes, x, y and dx have their channels last, as their strides say. Zeros before and behind
 * x: `pad` on each side. NULL in data: not there, or not wanted. */
typedef struct om_conv_call {
    int64_t stride[3], pad[3], dilation[3], groups; /* as many of each as there are spatial axes */
    om_tensor x, w, bias, y;
    bool grad;             /* y is its gradient, which is read, and these are written */
    om_tensor dx, dw, db;
} om_conv_call;

/* What the engine asks of its host. Every entry may be NULL unless said otherwise: then the built-in
 * (malloc, one thread, own kernels, silence) is used. All entries may be called from any thread. */
typedef struct om_services {
    void *user;                                                        /* passed back as first argument */
    void *(*alloc)(void *user, size_t size);                           /* 64-byte aligned; NULL on failure */
    void (*free)(void *user, void *p, size_t size);
    /* Calls fn(arg, begin, end) over disjoint pieces of [0, n), each at least `grain` long but the last,
     * from any number of threads, and returns when all are done. No promise of concurrency. */
    void (*parallel_for)(void *user, int64_t n, int64_t grain, void (*fn)(void *arg, int64_t begin, int64_t end),
                         void *arg);
    int (*num_threads)(void *user);
    /* Fortran BLAS of the host process, column-major, LP64 (reference BLAS interface). */
    void (*sgemm)(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha,
                  const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c,
                  const int *ldc);
    void (*dgemm)(const char *ta, const char *tb, const int *m, const int *n, const int *k, const double *alpha,
                  const double *a, const int *lda, const double *b, const int *ldb, const double *beta, double *c,
                  const int *ldc);
    /* C (m, n) = A (m, k) B (k, n) + beta C + bias (n, or NULL) in bf16 with sums in f32, for processors that multiply
     * bf16 natively (the engine's own kernels widen it to f32). Strides in elements, rows or columns of each
     * contiguous. False: not done, C is untouched. */
    bool (*gemm_bf16)(void *user, int64_t m, int64_t n, int64_t k, const void *a, int64_t rsa, int64_t csa,
                      const void *b, int64_t rsb, int64_t csb, int beta, void *c, int64_t rsc, const void *bias);
    /* A convolution, or its gradients. False: not done; what it would have written may hold anything. */
    bool (*conv)(void *user, const struct om_conv_call *c);
    void (*log)(void *user, int level, const char *text);              /* level 0 error .. 3 debug */
} om_services;

typedef struct om_ctx om_ctx;     /* services + error message */
typedef struct om_model om_model; /* a captured graph and everything derived from it */
typedef struct om_run om_run;     /* one forward or one backward in progress */
typedef struct om_state om_state; /* of a forward that has ended: what its backward needs beside the arena */

/* Memory that the engine hands over: outputs, gradients, arenas. It belongs to whoever has it, is 64-byte aligned, and
 * is given back once, from any thread, at any time after the run, also after the model is gone. From the host's
 * services.alloc when there is one, else from a pool that keeps what comes back for the next step. */
typedef struct om_block {
    void *data;
    size_t size;
    const struct om_device *device; /* whose memory it is */
    struct om_parts *parts;         /* the engine's; NULL: nobody has a part of it */
} om_block;
void om_block_put(om_block *b); /* NULL is fine */

om_ctx *om_ctx_new(const om_services *services); /* NULL services = built-ins; NULL result = no memory */
void om_ctx_free(om_ctx *cx);
const char *om_ctx_message(const om_ctx *cx); /* "" when nothing failed since om_ctx_clear */
void om_ctx_clear(om_ctx *cx);

/* --- model ------------------------------------------------------------------------------------ */

/* Reads an ONNX ModelProto (bytes are not kept) and simplifies it. Broken bytes give OM_INVALID with the
 * byte offset or node and the reason. */
om_status om_model_load(om_ctx *cx, const void *onnx, size_t size, om_model **out);
void om_model_free(om_ctx *cx, om_model *m);

/* What backward computes again instead of keeping it (csrc/passes/remat_choose.c). The gradients have the same bits. */
typedef enum om_recompute {
    OM_RECOMPUTE_CHEAP,  /* memory level 0: what costs one sweep over memory */
    OM_RECOMPUTE_LAYERS, /* memory level 1: whole transformer layers as well, each from its input */
    OM_N_RECOMPUTE
} om_recompute;

/* Text of a graph: variant < 0 is the forward graph; caller frees with om_text_free. */
om_status om_model_text(om_ctx *cx, const om_model *m, int variant, char **text);
void om_text_free(om_ctx *cx, char *text);

/* Builds (or finds) the joint forward + backward graph. Inputs and outputs are numbered as in om_model_input, _output.
 *   wanted    one byte per graph input: non-zero = its gradient is returned (all zero: forward only)
 *   arriving  one byte per user output: non-zero = backward will be given its gradient
 *   group     one int per graph input, or NULL: backward segment in which its gradient must be complete
 *             (0 = first to finish); NULL = one segment.
 *   again     what backward computes again
 * Others of these are another variant beside the first; two policies that choose the same are one. *variant is small
 * and stable for the life of the model. */
om_status om_model_variant(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, const int *group,
                           om_recompute again, int *variant);

/* The same with a set of flags of the caller's in the place of a policy: again[i] non-zero, and backward computes value
 * i of om_choice again. The set is the variant's key: a policy's own set is the policy's variant. */
om_status om_model_variant_again(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving,
                                 const int *group, const uint8_t *again, int n_again, int *variant);

/* What there is to choose from: the values of the graph with gradients for (wanted, arriving), numbered the same at
 * every call. For a budget of memory, or a file of the user's. */
typedef struct om_choice om_choice;
typedef struct om_choice_row {
    const char *illegal;          /* why value i cannot be computed again; NULL: it can */
    const char *op;               /* that makes it; "": none, it is an input or a constant */
    const char *module, *file;    /* where the user's code has it; "": unknown */
    int line, output;             /* output: which of the operator's */
    uint8_t dtype, rank;
    int64_t dim[OM_RANK];         /* -1: known when tensors arrive */
    bool kept;                    /* backward reads its memory: it is kept if it is not computed again */
} om_choice_row;
om_status om_choice_new(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, om_choice **out);
int om_choice_values(const om_choice *c); /* how many: n_again of a set */
om_choice_row om_choice_value(const om_choice *c, int i);                 /* strings are the choice's */
const uint8_t *om_choice_policy(const om_choice *c, om_recompute policy); /* the flags it sets, one per value */
/* The same by structure: equal subgraphs, as the layers of a model have them, are one row. What each of `count`
 * computes is not kept when they are computed again. For inputs of these sizes; NULL: `bytes` are 0. */
typedef struct om_cluster_row {
    const char *name;             /* operators in their order, each followed by "+" */
    const char *formula;          /* of the bytes: over the graph's symbols, or a number */
    int64_t bytes;
    int count;
    bool compromise;              /* the narrower operand of its first operator, a cast, is kept instead */
    int again[OM_N_RECOMPUTE];    /* how many of them each policy computes again */
} om_cluster_row;
om_status om_choice_clusters(om_ctx *cx, om_choice *c, const om_tensor *inputs, int *n);
om_cluster_row om_choice_cluster(const om_choice *c, int i);              /* after om_choice_clusters */
/* In a set of flags (om_choice_values), for the first `count` of a cluster, -1: all. strategy 0: keep what they
 * compute; 1: compute it again; 2: or with a compromise. OM_INVALID, with the names there are, when there is none, and
 * for strategy 1 where there is a compromise only. */
om_status om_choice_set(om_ctx *cx, om_choice *c, const char *cluster, int strategy, int count, uint8_t *again);
void om_choice_free(om_choice *c); /* NULL is fine; before the model */

/* --- what a step takes of memory (docs/MEMORY.md) ----------------------------------------------- */

/* Bytes that one forward and its backward take of the host in blocks, if it holds every output until the end and keeps
 * the gradients; what the host gives (parameters, inputs) apart. The arena is kept + workspace. */
typedef struct om_memory {
    int64_t peak;                 /* at the moment when most is taken */
    int64_t released;             /* the same, if nobody but the backward holds the outputs, but for numbers */
    int64_t kept, workspace;      /* values from the forward for the backward; all else that is computed on the way */
    int64_t outputs, gradients;
    int64_t loans;                /* gradients of outputs; none where the host let go of these (om_run_backward) */
    int64_t placed;               /* so much less is the peak where gradients lie in the arena (om_run_grad) */
} om_memory;

typedef struct om_fit {
    int variant;                  /* -1: no set of flags takes as little */
    om_memory memory;             /* its step's */
    int64_t bytes;                /* what was asked for */
    int64_t most, least;          /* the peak of OM_RECOMPUTE_CHEAP, the smallest one of a known set */
    double again_us, step_us;     /* by calculation: what it computes again beside OM_RECOMPUTE_CHEAP, and the latter */
} om_fit;

/* The variant that computes least again among those whose step takes at most `bytes` at the sizes of `inputs` (as for
 * om_run_forward; data is not read); bytes < 0: at most `share` of what OM_RECOMPUTE_CHEAP takes. The first call that
 * asks for less than that looks for sets of flags, a second or two for a large graph; what they are does not depend on
 * `bytes`, so that less memory never computes less again. */
om_status om_model_fit(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, const int *group,
                       const om_tensor *inputs, int64_t bytes, double share, om_fit *fit);
/* What a step of this variant takes. */
om_status om_model_memory(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, om_memory *memory);

/* --- what a graph takes and gives --------------------------------------------------------------- */

/* INPUT: given anew in every call; PARAM, BUFFER: the host's state. The others are values inside of a graph. */
typedef enum om_role { OM_ACT, OM_INPUT, OM_PARAM, OM_BUFFER, OM_CONST, OM_GRAD_IN } om_role;

typedef struct om_io {
    const char *name;       /* "" when the file gives none; the model's */
    uint8_t role;           /* of an input; outputs: OM_ACT */
    uint8_t dtype, rank;
    int64_t dim[OM_RANK];   /* -1: no number of the graph's, known when tensors arrive */
    bool written;           /* a forward writes a new value into the tensor given for this input */
    /* input: may be wanted; output: computed from a parameter or float input through operators with a gradient */
    bool differentiable;
    /* input: its one element lies in the host's memory, whatever the device (a learning rate, a size that is a value);
     * it has no gradient */
    bool host;
} om_io;

int om_model_inputs(const om_model *m);  /* how many */
int om_model_outputs(const om_model *m); /* of the user's: what forward returned */
om_io om_model_input(const om_model *m, int i);
om_io om_model_output(const om_model *m, int i);
bool om_model_random(const om_model *m); /* it draws random numbers: give each forward a seed of its own */

/* What a variant needs and gives. Everything lives as long as the model. */
typedef struct om_needs_read { int segment, input; } om_needs_read;
typedef struct om_needs_host { /* a node of the host's: see om_host_stop */
    int index, part;
    bool backward;
    int n_want;
    const int64_t *want;          /* backward: the node's inputs, by position, whose gradients are its outputs */
} om_needs_host;
typedef struct om_needs {
    int n_segments;               /* of the backward; 0: there is none */
    const int *grad_segment;      /* per graph input: the segment that returns its gradient; -1: it has none */
    const uint8_t *reads_input;   /* per graph input: a backward must be given it as the forward was */
    const uint8_t *reads_output;  /* per user output: the same */
    const uint8_t *reaches;       /* per user output: computed from a wanted input */
    int n_reads, n_host;
    const om_needs_read *reads;   /* which segment reads which input; sorted, each once */
    const om_needs_host *host;
} om_needs;

const om_needs *om_model_needs(const om_model *m, int variant); /* NULL: there is no such variant */

/* --- run ------------------------------------------------------------------------------------------
 * csrc/run/plan.h holds the contract of memory and control: which byte lies where, when control returns. */

/* Starts a forward. inputs: one tensor per graph input, of the dtype and rank of the capture; any sizes that fit it,
 * any strides. All lie in the device's memory but those that om_io.host marks. Their memory is read (and, for written
 * inputs, written) until the run is freed. write false: inputs that would be written keep their values; for a forward
 * that is repeated. cx: of this run until it is freed; its message tells of every failure below. */
om_status om_run_forward(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, uint64_t seed, bool write,
                         om_run **run);

/* Forward: runs to the end (segment is not looked at). Backward: to the end of that segment, and of those before it;
 * -1: of all. OM_OK: it is there. OM_HOST: a node of the host's is due (om_run_host); answer it, then resume. Anything
 * else: this run can only be freed. On a device that runs behind its host, "there" is queued: what fails after this has
 * returned is an error of the next download, or of the next om_run_resume, of this run or another, that finds it known
 * (csrc/graph/device.h). */
om_status om_run_resume(om_run *run, int segment);

/* A host node: what a capture left to its host (an ATen region, a Python function). */
typedef struct om_host_stop {
    int index;              /* attribute `index` of the node: a row of the host's own table */
    int part;               /* a gradient with very many results stops several times: which of them this is */
    bool backward;          /* the gradient of the node: inputs are the gradients of its float outputs, zeros where none
                               arrived; outputs the gradients of its inputs `want` (om_needs_host) */
    int n_in, n_out;
    const om_tensor *in;    /* to be read before the answer; dtype OM_NODTYPE: left out; strides are not negative */
    const om_tensor *out;   /* what is to be answered: dtype and sizes; may be written right there */
} om_host_stop;

const om_host_stop *om_run_host(const om_run *run); /* until the answer; NULL: none is due */
/* outputs: n_out tensors, any strides, copied; dtype OM_NODTYPE: zeros; data as in stop->out: it is there already. */
om_status om_run_answer(om_run *run, const om_tensor *outputs);

/* When the forward has ended, once each: the i-th user output, dense, in a block of its own that becomes the host's.
 * An output that is an input comes back as a copy. */
om_status om_run_output(om_run *run, int i, om_tensor *t, om_block **block);

/* When the forward of a variant with a backward has ended, once: what the backward needs. Both become the host's. The
 * arena may be kept elsewhere meanwhile and come back at another address, aligned to 64 bytes. The state is small,
 * keeps the plan, and may serve any number of backwards, each of which uses up the arena it is given (so keep a copy of
 * that for a second one). Without om_run_state a forward leaves nothing behind. */
om_status om_run_state(om_run *run, om_state **state, om_block **arena);
void om_state_free(om_state *state); /* NULL is fine */

/* Starts a backward over what a forward left.
 *   arena     the forward's, arena_size bytes of it; overwritten; the host's, as long as the run lives
 *   inputs    one per graph input: those that needs->reads_input names, as the forward had them (another layout is
 *             copied); others may be left out (dtype OM_NODTYPE). NULL: all are
 *   outputs   one per user output, in the same way: reads_output
 *   grads     one per user output: its gradient where `arriving` of the variant says so, else OM_NODTYPE
 *   dropped   one byte per user output, or NULL: nobody else reads its memory any more, so that its gradient may take
 *             the place */
om_status om_run_backward(om_ctx *cx, const om_state *state, void *arena, size_t arena_size, const om_tensor *inputs,
                          const om_tensor *outputs, const om_tensor *grads, const uint8_t *dropped, om_run **run);

/* Before the first resume: the host adds the gradients to others as they come and keeps none of them. Then they may lie
 * in the arena (om_run_grad) whatever was held of earlier ones. */
void om_run_fleeting(om_run *run);

/* Between two segments, one byte per user output: calls to come read it, or put its gradient in its place. The host may
 * let go of the others. */
void om_run_outputs_needed(const om_run *run, uint8_t *needed);

/* When its segment has run, once each: the gradient of a graph input (needs->grad_segment), with the input's sizes and
 * dtype, and its strides where these leave no gaps, in a block that becomes the host's. The block may be a part of the
 * arena that the backward no longer uses; the arena's memory then goes back when its block and all such parts have been
 * put. A model whose next forward finds parts still out gives no more of them (of this kind: om_run_fleeting). */
om_status om_run_grad(om_run *run, int input, om_tensor *t, om_block **block);

const om_needs *om_run_needs(const om_run *run); /* of its variant */
void om_run_free(om_run *run); /* NULL is fine; at any point: what was not handed over is given back */

/* Times every call of an operator from now on, or no more. What was gathered since the last call goes to rows, one per
 * operator that has run, at most max of them; returns how many there are. */
typedef struct om_profile_row { const char *op; uint64_t count; double ms; } om_profile_row;
int om_model_profile(om_model *m, bool on, om_profile_row *rows, int max);

/* --- trainer ---------------------------------------------------------------------------------------
 * A training loop in few calls, for programs without Python (docs/ON_DEVICE.md; examples/train_digits.c):
 *
 *     om_trainer_load(cx, ..)                 artifacts -> a trainer: all its memory is taken here
 *     om_trainer_step(t, inputs, &loss, ..)   forward and backward; gradients are added to those that are there
 *     om_trainer_update(t)                    the optimizer
 *     om_trainer_reset(t)                     the next step begins with gradients of its own
 *     om_trainer_save(t, path, true)          parameters, moments, properties: safetensors
 *     om_trainer_free(t)
 *
 * Errors are in the context the trainer was made with, which it uses until it is freed. After a failed call the trainer
 * is as it was before, except that a step that fails in the middle has lost the gradients gathered so far and may have
 * written buffers (statistics of batch norm). Asked for an index it does not have, it gives zeros and the name "".
 * A pointer that is NULL where something is needed is OM_INVALID, with its name in the message; without a trainer (or a
 * context to load with) there is no message, and what a call gives is zeros.
 * Threads: one trainer by one thread at a time; different trainers, each with a context of its own, do not meet.
 * Memory: one arena, the caller's or mapped. Sizes that are numbers in the artifacts are planned and tried in load (one
 * forward and backward that change nothing), so om_trainer_memory is known before the first step and no later step asks
 * anybody for memory; for symbolic sizes om_trainer_prepare does that. Checkpoints, exports and prepare use the
 * context's services beside it, for the time of the call.
 */
typedef struct om_trainer om_trainer;

typedef struct om_trainer_options {
    /* NULL: mapped, as much as is needed (while load runs, and where sizes are symbols always, from half of the address
     * space that is left: where that is limited, give one). Else aligned to 64 bytes; the trainer's until freed. */
    void *arena;
    size_t arena_size;
    int threads;         /* > 1: a pool of its own with this many, the caller's included; else the context's services */
    /* What never happens, so that no memory is kept for it: gradients added up over steps; outputs asked of a step. */
    bool one_batch, loss_only;
    uint64_t seed;       /* of random operators, where the checkpoint has none */
} om_trainer_options;

typedef struct om_bytes { const void *data; size_t size; } om_bytes;

/* What om_trainer_load reads. From Python: model.save_for_device, ortmodule.artifacts.generate_artifacts. Files of
 * onnxruntime-training 1.19 go in the same places: its checkpoint tells that they are. */
typedef struct om_trainer_files {
    om_bytes packed;     /* one file (.omd) that holds the others; then these are not looked at */
    om_bytes train;      /* ONNX: forward whose first output is the loss; parameters are inputs (docs/ONNX.md) */
    om_bytes eval;       /* ONNX: the same for evaluation and export; may be empty */
    om_bytes optimizer;  /* ONNX: an AdamWOptimizer or SGDOptimizerV2 node; empty: no om_trainer_update */
    om_bytes checkpoint; /* safetensors: om_trainer_save; or onnxruntime-training's */
} om_trainer_files;

/* The bytes are not kept. options NULL: all zero. */
om_status om_trainer_load(om_ctx *cx, const om_trainer_files *files, const om_trainer_options *options,
                          om_trainer **out);
om_status om_trainer_load_file(om_ctx *cx, const char *packed, const om_trainer_options *options, om_trainer **out);
void om_trainer_free(om_trainer *t); /* NULL is fine */

/* What a call takes (the graph's inputs that are no parameters) and gives. eval: of the evaluation graph. */
int om_trainer_inputs(const om_trainer *t, bool eval);
int om_trainer_outputs(const om_trainer *t, bool eval);
om_io om_trainer_input(const om_trainer *t, bool eval, int i);
om_io om_trainer_output(const om_trainer *t, bool eval, int i);

/* Plans steps and evaluations for inputs of these sizes (data is not looked at; eval NULL: none) and tries them. Then
 * the arena is as large as it will be, and steps of other sizes are refused. Called again, up to 64 times, for more
 * sizes: each is tried after each (one_batch: n trials instead of n * n), and has a plan, some 100 KB in the arena.
 * Refused while there are gradients, which it would lose. Where it fails, what was prepared stays. */
om_status om_trainer_prepare(om_trainer *t, const om_tensor *train, const om_tensor *eval);

typedef struct om_trainer_bytes {
    size_t arena;        /* the most that was ever in use: what options.arena_size must be */
    size_t state;        /* of these: parameters, moments */
    bool final;          /* no step takes more */
} om_trainer_bytes;
om_trainer_bytes om_trainer_memory(const om_trainer *t);

/* One forward and backward. inputs: dense, of the dtypes and sizes the graph names; others are OM_INVALID before
 * anything has happened. loss may be NULL.
 * outputs: NULL, or all of the graph's, borrowed until the next call. */
om_status om_trainer_step(om_trainer *t, const om_tensor *inputs, float *loss, om_tensor *outputs);
om_status om_trainer_eval(om_trainer *t, const om_tensor *inputs, float *loss, om_tensor *outputs);
om_status om_trainer_update(om_trainer *t);
void om_trainer_reset(om_trainer *t); /* lazily: until the next step they can be read, and an update uses them */
/* Of random operators: step n after this call draws the same. Checkpoints with moments have it and how many steps have
 * drawn; loaded or restored, they go on from there. */
void om_trainer_seed(om_trainer *t, uint64_t seed);

/* The learning rate the next update uses. A schedule sets it, when it begins and at every om_trainer_schedule_step,
 * from the number of updates so far. Warm-up: 0 to `rate`; after it linear, or half a cosine, to 0 at `total`. */
typedef enum om_schedule { OM_SCHEDULE_NONE, OM_SCHEDULE_CONSTANT, OM_SCHEDULE_LINEAR, OM_SCHEDULE_COSINE } om_schedule;
double om_trainer_rate(const om_trainer *t);
om_status om_trainer_set_rate(om_trainer *t, double rate); /* from 0 up, finite; a schedule's rate too */
om_status om_trainer_schedule(om_trainer *t, om_schedule kind, int64_t warmup, int64_t total, double rate);
om_status om_trainer_schedule_step(om_trainer *t);
int64_t om_trainer_updates(const om_trainer *t); /* so far; those before a checkpoint too, if it has moments */

/* Parameters and buffers, in the order of the training graph's inputs. */
typedef struct om_trainer_param {
    const char *name;
    bool trainable;
    om_tensor value;      /* may be read and written between calls */
    om_tensor grad;       /* dtype OM_NODTYPE: none. Valid until the next call */
} om_trainer_param;
int om_trainer_params(const om_trainer *t);
om_trainer_param om_trainer_param_at(const om_trainer *t, int i);

/* All floating-point ones, or the trainable ones, as one run of f32 in that order. n: its elements, which must be
 * om_trainer_elements. After a nominal checkpoint (names and sizes, no values) the first set must be of all. */
bool om_trainer_nominal(const om_trainer *t); /* there are no values yet */
int64_t om_trainer_elements(const om_trainer *t, bool trainable_only);
om_status om_trainer_get(const om_trainer *t, bool trainable_only, float *to, int64_t n);
om_status om_trainer_set(om_trainer *t, bool trainable_only, const float *from, int64_t n);

/* A safetensors file: parameters by name, the properties, and with `moments` all that training goes on from: what the
 * optimizer keeps and where random operators are. Written beside `path`, synchronised, then renamed: whenever it is
 * interrupted, path holds the old or the new state. Moments of a checkpoint that was loaded without an optimizer are
 * not there: asked for, that is OM_INVALID. A link at `path` is replaced, not followed; a directory, a
 * pipe or a device there is OM_INVALID before anything is written. */
om_status om_trainer_save(om_trainer *t, const char *path, bool moments);
/* Everything is checked before anything is changed: another model's, a nominal, a cut or a broken file is refused. */
om_status om_trainer_restore(om_trainer *t, om_bytes checkpoint);
om_status om_trainer_restore_file(om_trainer *t, const char *path);
/* What lives between steps, from another trainer of the same parameters: values, seed, properties, and of an optimizer
 * of the same kind moments, updates, rate and schedule. No gradients. */
om_status om_trainer_copy(om_trainer *t, const om_trainer *from);

/* Named values that travel with the checkpoint. kind: 'i', 'f' or 's'. */
typedef struct om_property { const char *name; char kind; int64_t i; double f; const char *s; } om_property;
om_status om_trainer_set_property(om_trainer *t, const om_property *p); /* copied; replaces one of that name */
int om_trainer_properties(const om_trainer *t);
/* false: there is none. p NULL: is there one? */
bool om_trainer_property(const om_trainer *t, const char *name, om_property *p);
om_property om_trainer_property_at(const om_trainer *t, int i);

/* The evaluation graph, cut down to these outputs, with the parameters inside: an ONNX file for any runtime. Where they
 * need an operator that standard ONNX cannot express (docs/ONNX.md) that is OM_INVALID. */
om_status om_trainer_export(om_trainer *t, const char *path, const char *const *outputs, int n);

#ifdef __cplusplus
}
#endif
#endif
