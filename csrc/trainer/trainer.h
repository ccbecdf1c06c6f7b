/* trainer.h - what the files of the trainer share. ortmodule.h is its manual.
 *
 *   trainer.c     load, step, evaluate
 *   prepare.c     plans, and the memory of every step that may come
 *   state.c       parameters as one buffer, checkpoints, properties
 *   optimizer.c   what an optimizer graph says; the update itself; learning rates
 *   export.c      the evaluation graph with weights
 *   cut.*, odtc.c   a graph cut to what some values need; graphs and checkpoints of onnxruntime-training
 *   heap.*, threads.*, tensors.*   memory, threads and files of programs that bring none
 *
 * Two contexts: `host` is the caller's, with its errors and its memory for what lasts one call; `cx` has the heap, and
 * everything that lives as long as the trainer or is needed in a step. What fails in cx becomes host's error
 * (om_trainer_fail). The optimizer has a context of its own, `ocx`, on a small heap inside of the heap: what an update
 * allocates depends on the parameters alone, so it is measured once, by an update of zeros, before anything is loaded.
 */
#ifndef OM_TRAINER_H
#define OM_TRAINER_H
#include "optim/optim.h"
#include "trainer/heap.h"
#include "trainer/tensors.h"
#include "trainer/threads.h"

typedef struct om_tparam {
    const char *name;            /* the model's */
    om_tensor value, grad, m, v; /* dense; grad: of its block, or OM_NODTYPE */
    om_block *grad_block;
    bool trainable;
} om_tparam;

typedef struct om_tgraph {
    om_model *m; /* NULL: there is none */
    int variant, n_in, n_out, n_user;
    int *user;            /* graph input of each tensor a call is given */
    int *param;           /* per graph input: which parameter, or -1 */
    om_tensor *in, *out;  /* of the call */
    om_block **block;     /* of out */
    uint8_t *keep, *drop; /* per output */
    om_tensor *dy;
    bool numbers; /* every size of what a call is given is a number */
    OM_VEC(om_tensor) prepared; /* n_prepared rows of n_user tensors without data: the sizes a step may have */
    int n_prepared;             /* host's memory */
} om_tgraph;

typedef enum om_toptimizer { OM_T_NONE, OM_T_ADAM, OM_T_SGD } om_toptimizer;

struct om_trainer {
    om_ctx *host, *cx, *ocx;
    om_heap heap, update_heap;
    om_services update_services;
    om_threads *threads;
    om_tgraph train, eval;
    om_tparam *param;
    int n_param;
    om_optim_param *update; /* one per trainable parameter */
    om_tensor *norm;        /* the same, for norms and sums */
    om_bytes eval_onnx;     /* for export; host's memory */
    om_toptimizer optimizer;
    om_adam_cfg adam;
    om_sgd_cfg sgd;
    double max_norm; /* 0: gradients are not clipped */
    float one;
    float loss;
    bool one_batch, loss_only, nominal, has_grad, reset;
    bool left_moments; /* the checkpoint had some, and there is no optimizer to keep them */
    bool spend; /* a checkpoint's bytes are ours: what was copied is given back at once (om_pages_drop) */
    size_t state_size;
    uint64_t seed, drawn;
    double rate, initial_rate;
    int64_t updates;
    struct {
        om_schedule kind;
        int64_t warmup, total;
    } schedule;
    OM_VEC(om_property) property; /* host's memory */
};

om_status om_trainer_fail(om_trainer *t, om_ctx *from, om_status s);
om_status om_trainer_status(const om_trainer *t); /* may a call begin? NULL: no, and there is nowhere for a sentence */
int om_trainer_find(const om_trainer *t, const char *name); /* a parameter; -1 */
om_status om_trainer_loaded(om_trainer *t);                 /* refuses while there are names and sizes only */
void om_trainer_grads_free(om_trainer *t);
const char *om_trainer_role(bool eval);

/* a call, in its parts: checked inputs to g->in; forward to outputs in g->out and, with state and arena, what a
 * backward needs; the whole training step (drop: nobody asks for its outputs). write: as om_run_forward */
om_status om_trainer_bind(om_trainer *t, om_tgraph *g, bool eval, const om_tensor *inputs);
om_status om_trainer_forward(om_trainer *t, om_tgraph *g, bool write, om_state **state, om_block **arena);
om_status om_trainer_pass(om_trainer *t, om_tgraph *g, bool write, bool drop);
void om_trainer_outputs_free(om_tgraph *g);

/* prepare.c */
om_status om_trainer_prepared(om_trainer *t, const om_tgraph *g, bool eval, const om_tensor *inputs);

/* optimizer.c */
om_status om_trainer_optimizer(om_trainer *t, om_bytes onnx);
om_status om_trainer_optimizer_memory(om_trainer *t);
om_status om_trainer_accumulate(om_trainer *t, om_tensor *sum, const om_tensor *more, int n);

/* state.c */
om_status om_trainer_parse(om_trainer *t, const char *what, om_bytes checkpoint, om_tensors *f);
om_status om_trainer_trainable(om_trainer *t, const om_tensors *f); /* before memory is taken */
om_status om_trainer_take(om_trainer *t, const char *what, const om_tensors *f);
void om_trainer_properties_free(om_trainer *t);
#endif
