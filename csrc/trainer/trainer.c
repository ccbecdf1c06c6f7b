/* trainer.c - artifacts to a trainer; its steps, through om_run_* of ortmodule.h alone.
 *
 * A step: gradients that were to be reset are given back, forward, backward; each gradient is a block of its own and
 * stays where the backward has put it, so the first step after a reset copies nothing. A step that finds gradients adds
 * the new to the old and gives the new back.
 */
#include "trainer/trainer.h"
#include "cpu/kernels_isa.h"
#include "trainer/cut.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(OM_BLAS)
extern void sgemm_(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                   const int *, const float *, const int *, const float *, float *, const int *);
extern void dgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *,
                   const int *, const double *, const int *, const double *, double *, const int *);
#endif

om_status om_trainer_fail(om_trainer *t, om_ctx *from, om_status s) {
    if (s == OM_OK || from == t->host) return s;
    const char *text = *from->message ? from->message : om_status_text(s);
    if (s == OM_NOMEM && !t->heap.mapped)
        om_fail(t->host, s, "%s: options.arena, of %zu bytes, is too small; om_trainer_memory of a trainer without one "
                            "tells what it must have", text, t->heap.size);
    else
        om_fail(t->host, s, "%s", text);
    om_ctx_clear(from);
    return s;
}
#define T_TRY(t, expr) OM_TRY(om_trainer_fail((t), (t)->cx, (expr)))

om_status om_trainer_status(const om_trainer *t) { return t ? t->host->status : OM_INVALID; }

const char *om_trainer_role(bool eval) { return eval ? "evaluation graph" : "training graph"; }

int om_trainer_find(const om_trainer *t, const char *name) {
    for (int i = 0; i < t->n_param; i++)
        if (!strcmp(t->param[i].name, name)) return i;
    return -1;
}

/* --- load ---------------------------------------------------------------------------------------- */

static om_status graph_load(om_trainer *t, om_bytes onnx, bool eval) {
    om_tgraph *g = eval ? &t->eval : &t->train;
    T_TRY(t, om_model_load(t->cx, onnx.data, onnx.size, &g->m));
    g->n_in = om_model_inputs(g->m), g->n_out = om_model_outputs(g->m);
    const size_t n_in = (size_t)g->n_in + 1, n_out = (size_t)g->n_out + 1;
    g->user = om_alloc(t->cx, n_in * sizeof *g->user);
    g->param = om_alloc(t->cx, n_in * sizeof *g->param);
    g->in = om_alloc(t->cx, n_in * sizeof *g->in);
    g->out = om_alloc(t->cx, n_out * sizeof *g->out);
    g->block = om_alloc(t->cx, n_out * sizeof *g->block);
    g->dy = om_alloc(t->cx, n_out * sizeof *g->dy);
    g->keep = om_alloc(t->cx, n_out);
    g->drop = om_alloc(t->cx, n_out);
    T_TRY(t, t->cx->status);
    memset(g->drop, 1, n_out);
    g->numbers = true;
    for (int i = 0; i < g->n_in; i++) {
        const om_io io = om_model_input(g->m, i);
        g->param[i] = -1;
        if (io.role != OM_INPUT) continue;
        g->user[g->n_user++] = i;
        if (io.written)
            return om_fail(t->host, OM_UNSUPPORTED, "%s: forward writes into its argument '%s'", om_trainer_role(eval),
                           io.name);
        for (int k = 0; k < io.rank; k++) g->numbers &= io.dim[k] >= 0;
    }
    if (!g->n_out) return om_fail(t->host, OM_INVALID, "%s: has no output", om_trainer_role(eval));
    return OM_OK;
}

/* ort: the checkpoint, where the files are those of onnxruntime-training. The evaluation graph is kept for export. */
static om_status graph_take(om_trainer *t, om_bytes onnx, const om_tensors *ort, bool eval) {
    om_bytes own = {0};
    om_status s = OM_OK;
    if (ort)
        s = om_cut_ort(t->host, onnx, ort, &own);
    else if (eval && (own.data = om_alloc(t->host, onnx.size)))
        own.size = onnx.size, memcpy((void *)(uintptr_t)own.data, onnx.data, onnx.size);
    if (s == OM_OK) s = t->host->status;
    if (s == OM_OK) s = graph_load(t, own.size ? own : onnx, eval);
    if (eval)
        t->eval_onnx = own;
    else
        om_free(t->host, (void *)(uintptr_t)own.data);
    return s;
}

/* Parameters and buffers: of the training graph, in its order. */
static om_status params_make(om_trainer *t) {
    const om_tgraph *g = &t->train;
    t->param = om_alloc(t->cx, ((size_t)g->n_in + 1) * sizeof *t->param);
    T_TRY(t, t->cx->status);
    for (int i = 0; i < g->n_in; i++) {
        const om_io io = om_model_input(g->m, i);
        if (io.role == OM_INPUT) continue;
        om_tparam *p = &t->param[t->n_param];
        *p = (om_tparam){.name = io.name, .trainable = io.role == OM_PARAM && io.differentiable};
        p->value = (om_tensor){.dtype = io.dtype, .rank = io.rank, .device = -1};
        memcpy(p->value.dim, io.dim, sizeof io.dim);
        for (int k = 0; k < io.rank; k++)
            if (io.dim[k] < 0)
                return om_fail(t->host, OM_INVALID, "parameter '%s' has a size that is no number", io.name);
        if (!*io.name || om_trainer_find(t, io.name) >= 0)
            return om_fail(t->host, OM_INVALID, "parameter %d has no name, or another one's: '%s'", i, io.name);
        om_dense_strides(&p->value);
        g->param[i] = t->n_param++;
    }
    return OM_OK;
}

static om_status eval_bind(om_trainer *t) {
    const om_tgraph *g = &t->eval;
    for (int i = 0; i < g->n_in && g->m; i++) {
        const om_io io = om_model_input(g->m, i);
        if (io.role == OM_INPUT) continue;
        const int at = g->param[i] = om_trainer_find(t, io.name);
        if (at < 0)
            return om_fail(t->host, OM_INVALID, "evaluation graph: parameter '%s' is none of the training graph's",
                           io.name);
        const om_tensor *x = &t->param[at].value;
        if (x->dtype != io.dtype || x->rank != io.rank || memcmp(x->dim, io.dim, io.rank * sizeof *io.dim) != 0)
            return om_fail(t->host, OM_INVALID,
                           "evaluation graph: parameter '%s' has another dtype or shape than in the training graph",
                           io.name);
        if (io.written) return om_fail(t->host, OM_INVALID, "evaluation graph: writes its parameter '%s'", io.name);
    }
    return OM_OK;
}

static om_status tensor_take(om_trainer *t, om_tensor *x) { /* zeros */
    const size_t size = (size_t)om_tensor_bytes(x);
    if (!(x->data = om_heap_zeros(&t->heap, size + 1)))
        return om_fail(t->host, OM_NOMEM, "out of memory: %zu bytes were asked for", size);
    t->state_size += size;
    return OM_OK;
}

static om_status variants_make(om_trainer *t) {
    om_tgraph *g = &t->train;
    const om_io loss = om_model_output(g->m, 0);
    bool one = loss.dtype == OM_F32;
    for (int k = 0; k < loss.rank; k++) one &= loss.dim[k] == 1;
    if (!one || !loss.differentiable)
        return om_fail(
            t->host, OM_INVALID,
            "training graph: its first output, '%s', is %s%s; it must be the loss: one f32 number computed from "
            "parameters (reduce it in the model, or let generate_artifacts put a loss behind it)",
            loss.name, om_kind_write(loss.dtype, loss.rank, loss.dim).s,
            loss.differentiable ? "" : ", and no parameter reaches it");
    uint8_t *wanted = om_alloc(t->cx, (size_t)g->n_in + 1), *arriving = om_alloc(t->cx, (size_t)g->n_out + 1);
    om_status s = t->cx->status;
    if (s == OM_OK) {
        for (int i = 0; i < g->n_in; i++) wanted[i] = g->param[i] >= 0 && t->param[g->param[i]].trainable;
        arriving[0] = 1;
        s = om_model_variant(t->cx, g->m, wanted, arriving, NULL, OM_RECOMPUTE_CHEAP, &g->variant);
    }
    if (s == OM_OK && om_model_needs(g->m, g->variant)->n_host)
        s = om_fail(t->cx, OM_UNSUPPORTED, "training graph: has a part that only PyTorch can compute");
    if (s == OM_OK && !om_model_needs(g->m, g->variant)->n_segments)
        s = om_fail(t->cx, OM_INVALID, "training graph: the loss depends on no trainable parameter");
    om_free(t->cx, wanted);
    om_free(t->cx, arriving);
    T_TRY(t, s);
    t->one = 1;
    g->dy[0] = (om_tensor){.dtype = OM_F32, .rank = loss.rank, .device = -1, .data = &t->one};
    memcpy(g->dy[0].dim, loss.dim, sizeof loss.dim);
    om_dense_strides(&g->dy[0]);
    if (!t->eval.m) return OM_OK;
    g = &t->eval;
    wanted = om_alloc(t->cx, (size_t)g->n_in + (size_t)g->n_out + 1);
    if (wanted) om_model_variant(t->cx, g->m, wanted, wanted + g->n_in, NULL, OM_RECOMPUTE_CHEAP, &g->variant);
    s = t->cx->status;
    if (s == OM_OK && om_model_needs(g->m, g->variant)->n_host)
        s = om_fail(t->cx, OM_UNSUPPORTED, "evaluation graph: has a part that only PyTorch can compute");
    om_free(t->cx, wanted);
    return om_trainer_fail(t, t->cx, s);
}

static om_status memory_take(om_trainer *t) {
    int n = 0;
    for (int i = 0; i < t->n_param; i++) {
        om_tparam *p = &t->param[i];
        OM_TRY(tensor_take(t, &p->value));
        p->m = p->v = p->value;
        p->m.data = p->v.data = NULL;
        if (!p->trainable || t->optimizer != OM_T_ADAM) p->v.dtype = OM_NODTYPE;
        if (!p->trainable || t->optimizer == OM_T_NONE || (t->optimizer == OM_T_SGD && t->sgd.momentum == 0))
            p->m.dtype = OM_NODTYPE;
        if (p->m.dtype) OM_TRY(tensor_take(t, &p->m));
        if (p->v.dtype) OM_TRY(tensor_take(t, &p->v));
        n += p->trainable;
    }
    t->update = om_alloc(t->cx, ((size_t)n + 1) * sizeof *t->update);
    t->norm = om_alloc(t->cx, ((size_t)n + 1) * 2 * sizeof *t->norm);
    return om_trainer_fail(t, t->cx, t->cx->status);
}

static om_status files_unpack(om_trainer *t, const om_trainer_files *files, om_tensors *pack, om_trainer_files *parts) {
    const om_bytes *const given[] = {&files->packed, &files->train, &files->eval, &files->optimizer,
                                     &files->checkpoint};
    static const char *const name[] = {"packed", "train", "eval", "optimizer", "checkpoint"};
    for (int i = 0; i < 5; i++)
        OM_CHECK(t->host, given[i]->data || !given[i]->size, "load: files.%s has %zu bytes at NULL", name[i],
                 given[i]->size);
    *parts = *files;
    if (!files->packed.size) return OM_OK;
    OM_TRY(om_tensors_read(t->host, "packed file", files->packed.data, files->packed.size, pack));
    const char *format = om_tensors_meta(pack, "format"), *version = om_tensors_meta(pack, "version");
    if (!format || strcmp(format, "ortmodule-device") != 0)
        return om_fail(t->host, OM_INVALID, "packed file: metadata 'format' is %.40s; 'ortmodule-device' is expected",
                       format ? format : "missing");
    if (!version || strcmp(version, "1") != 0)
        return om_fail(t->host, OM_UNSUPPORTED, "packed file: version %.20s; this library reads 1",
                       version ? version : "");
    const struct {
        const char *name;
        om_bytes *to;
    } rows[] = {{"training_model.onnx", &parts->train},
                {"eval_model.onnx", &parts->eval},
                {"optimizer_model.onnx", &parts->optimizer},
                {"checkpoint", &parts->checkpoint}};
    for (int i = 0; i < 4; i++) {
        const om_entry *e = om_tensors_find(pack, rows[i].name);
        *rows[i].to = e ? (om_bytes){e->t.data, e->size} : (om_bytes){0};
    }
    return OM_OK;
}

static om_status contexts_make(om_trainer *t, const om_trainer_options *o) {
    if (o->threads < 0 || o->threads > 1024)
        return om_fail(t->host, OM_INVALID, "options.threads is %d; 0 to 1024 are expected", o->threads);
    if (!om_isa_runs())
        return om_fail(t->host, OM_UNSUPPORTED, "this library was built for %s, which this processor lacks",
                       om_isa_text());
    if (o->threads > 1 && !(t->threads = om_threads_new(t->host, o->threads))) return t->host->status;
    if (!om_heap_open(&t->heap, o->arena, o->arena_size)) {
        t->heap = (om_heap){0};
        return om_fail(t->host, o->arena ? OM_INVALID : OM_NOMEM,
                       "the arena has %zu bytes at %p: too small, or not aligned to 64", o->arena_size, o->arena);
    }
    return OM_OK;
}

/* One `user` serves all entries of om_services: it is the trainer, and these pass on what belongs to others. */
static void *sv_alloc(void *user, size_t size) { return om_heap_alloc(&((om_trainer *)user)->heap, size); }
static void sv_free(void *user, void *p, size_t size) { om_heap_free(&((om_trainer *)user)->heap, p, size); }
static void *sv_alloc_update(void *user, size_t size) {
    return om_heap_alloc(&((om_trainer *)user)->update_heap, size);
}
static void sv_free_update(void *user, void *p, size_t size) {
    om_heap_free(&((om_trainer *)user)->update_heap, p, size);
}
static void sv_for(void *user, int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *arg) {
    const om_trainer *t = user;
    if (t->threads)
        om_threads_for(t->threads, n, grain, fn, arg);
    else
        t->host->sv.parallel_for(t->host->sv.user, n, grain, fn, arg);
}
static int sv_threads(void *user) {
    const om_trainer *t = user;
    return t->threads ? om_threads_count(t->threads) : t->host->sv.num_threads(t->host->sv.user);
}
static bool sv_gemm_bf16(void *user, int64_t m, int64_t n, int64_t k, const void *a, int64_t rsa, int64_t csa,
                         const void *b, int64_t rsb, int64_t csb, int beta, void *c, int64_t rsc, const void *bias) {
    const om_services *sv = &((om_trainer *)user)->host->sv;
    return sv->gemm_bf16(sv->user, m, n, k, a, rsa, csa, b, rsb, csb, beta, c, rsc, bias);
}
static bool sv_conv(void *user, const om_conv_call *c) {
    const om_services *sv = &((om_trainer *)user)->host->sv;
    return sv->conv(sv->user, c);
}
static void sv_log(void *user, int level, const char *text) {
    const om_services *sv = &((om_trainer *)user)->host->sv;
    sv->log(sv->user, level, text);
}

static om_status load(om_trainer *t, const om_trainer_files *files, const om_trainer_options *o, om_tensors *pack) {
    om_trainer_files f;
    om_tensors checkpoint = {0};
    OM_TRY(files_unpack(t, files, pack, &f));
    OM_CHECK(t->host, f.train.size, "a training graph is needed");
    OM_CHECK(t->host, f.checkpoint.size, "a checkpoint is needed: it has the parameters, or their names and sizes");
    t->one_batch = o->one_batch;
    t->loss_only = o->loss_only;
    t->seed = o->seed;
    om_status s = om_trainer_parse(t, "checkpoint", f.checkpoint, &checkpoint);
    if (s == OM_OK) s = graph_take(t, f.train, checkpoint.ort ? &checkpoint : NULL, false);
    if (s == OM_OK && f.eval.size) s = graph_take(t, f.eval, checkpoint.ort ? &checkpoint : NULL, true);
    if (s == OM_OK) s = params_make(t);
    if (s == OM_OK) s = eval_bind(t);
    if (s == OM_OK && f.optimizer.size) s = om_trainer_optimizer(t, f.optimizer);
    if (s == OM_OK) s = om_trainer_trainable(t, &checkpoint);
    if (s == OM_OK) s = variants_make(t);
    if (s == OM_OK) s = memory_take(t);
    if (s == OM_OK) s = om_trainer_optimizer_memory(t);
    om_heap_trim(&t->heap);
    if (s == OM_OK && t->train.numbers && (!t->eval.m || t->eval.numbers)) s = om_trainer_prepare(t, NULL, NULL);
    if (s == OM_OK) s = om_trainer_take(t, "checkpoint", &checkpoint);
    if (s == OM_OK && t->heap.sealed) om_heap_fix(&t->heap);
    om_tensors_free(&checkpoint);
    t->spend = false;
    return s;
}

/* spend: pages of the files' bytes may be given back to the system once they were copied */
static om_status trainer_make(om_ctx *cx, const om_trainer_files *files, const om_trainer_options *options, bool spend,
                              om_trainer **out) {
    static const om_trainer_options none;
    const om_trainer_options *o = options ? options : &none;
    OM_CHECK(cx, out, "load: out is NULL");
    *out = NULL;
    OM_CHECK(cx, files, "load: files is NULL");
    OM_TRY(cx->status);
    om_trainer *t = om_alloc(cx, sizeof *t);
    if (!t) return cx->status;
    t->host = cx;
    t->spend = spend;
    om_services sv = {.user = t,
                      .alloc = sv_alloc,
                      .free = sv_free,
                      .parallel_for = sv_for,
                      .num_threads = sv_threads,
                      .sgemm = cx->sv.sgemm,
                      .dgemm = cx->sv.dgemm,
                      .gemm_bf16 = cx->sv.gemm_bf16 ? sv_gemm_bf16 : NULL,
                      .conv = cx->sv.conv ? sv_conv : NULL,
                      .log = cx->sv.log ? sv_log : NULL};
#if defined(OM_BLAS)
    if (!sv.sgemm) sv.sgemm = sgemm_;
    if (!sv.dgemm) sv.dgemm = dgemm_;
#endif
    om_tensors pack = {0};
    om_status s = contexts_make(t, o);
    if (s == OM_OK && !(t->cx = om_ctx_new(&sv)))
        s = om_fail(cx, OM_NOMEM, "options.arena, of %zu bytes, is too small; om_trainer_memory of a trainer without "
                                  "one tells what it must have", o->arena_size);
    sv.alloc = sv_alloc_update, sv.free = sv_free_update;
    t->update_services = sv;
    if (s == OM_OK) s = load(t, files, o, &pack);
    om_tensors_free(&pack);
    if (s == OM_OK)
        *out = t;
    else
        om_trainer_free(t);
    return s;
}

om_status om_trainer_load(om_ctx *cx, const om_trainer_files *files, const om_trainer_options *options,
                          om_trainer **out) {
    return cx ? trainer_make(cx, files, options, false, out) : OM_INVALID;
}

om_status om_trainer_load_file(om_ctx *cx, const char *packed, const om_trainer_options *options, om_trainer **out) {
    void *bytes;
    size_t size;
    if (!cx) return OM_INVALID;
    OM_CHECK(cx, out, "load: out is NULL");
    *out = NULL;
    OM_CHECK(cx, packed, "load: packed, the path, is NULL");
    OM_TRY(om_file_read(cx, packed, &bytes, &size));
    const om_trainer_files files = {.packed = {bytes, size}};
    om_status s = size ? trainer_make(cx, &files, options, true, out) : om_fail(cx, OM_INVALID, "%s: is empty", packed);
    om_free(cx, bytes);
    return s;
}

void om_trainer_free(om_trainer *t) {
    if (!t) return;
    om_ctx *host = t->host;
    if (t->cx) {
        om_model_free(t->cx, t->train.m); /* leaves the list of models; all memory goes with the heap */
        om_model_free(t->cx, t->eval.m);
    }
    om_heap_close(&t->update_heap);
    om_heap_close(&t->heap);
    om_threads_free(host, t->threads);
    om_trainer_properties_free(t);
    om_free(host, (void *)(uintptr_t)t->eval_onnx.data);
    om_free(host, t->train.prepared.v);
    om_free(host, t->eval.prepared.v);
    om_free(host, t);
}

/* --- what calls take and give -------------------------------------------------------------------- */

static const om_tgraph *graph_of(const om_trainer *t, bool eval) {
    static const om_tgraph none;
    return !t ? &none : eval ? &t->eval : &t->train;
}
int om_trainer_inputs(const om_trainer *t, bool eval) { return graph_of(t, eval)->n_user; }
int om_trainer_outputs(const om_trainer *t, bool eval) { return graph_of(t, eval)->n_out; }
om_io om_trainer_input(const om_trainer *t, bool eval, int i) {
    const om_tgraph *g = graph_of(t, eval);
    return i >= 0 && i < g->n_user ? om_model_input(g->m, g->user[i]) : (om_io){.name = ""};
}
om_io om_trainer_output(const om_trainer *t, bool eval, int i) {
    const om_tgraph *g = graph_of(t, eval);
    return i >= 0 && i < g->n_out ? om_model_output(g->m, i) : (om_io){.name = ""};
}
int om_trainer_params(const om_trainer *t) { return t ? t->n_param : 0; }
om_trainer_param om_trainer_param_at(const om_trainer *t, int i) {
    if (i < 0 || i >= om_trainer_params(t)) return (om_trainer_param){.name = ""};
    const om_tparam *p = &t->param[i];
    return (om_trainer_param){.name = p->name, .trainable = p->trainable, .value = p->value, .grad = p->grad};
}

om_trainer_bytes om_trainer_memory(const om_trainer *t) {
    if (!t) return (om_trainer_bytes){0};
    return (om_trainer_bytes){.arena = t->heap.high, .state = t->state_size, .final = t->heap.sealed};
}

void om_trainer_seed(om_trainer *t, uint64_t seed) {
    if (!t) return;
    t->seed = seed;
    t->drawn = 0;
}

/* --- steps --------------------------------------------------------------------------------------- */

om_status om_trainer_loaded(om_trainer *t) {
    return t->nominal ? om_fail(t->host, OM_INVALID,
                                "this state has names and sizes of parameters and no values: load parameters first "
                                "(om_trainer_set of all, or om_trainer_restore)")
                      : OM_OK;
}

void om_trainer_grads_free(om_trainer *t) {
    for (int i = 0; i < t->n_param; i++) {
        om_block_put(t->param[i].grad_block);
        t->param[i].grad_block = NULL;
        t->param[i].grad = (om_tensor){0};
    }
    t->has_grad = t->reset = false;
}

void om_trainer_outputs_free(om_tgraph *g) {
    for (int i = 0; i < g->n_out; i++) om_block_put(g->block[i]);
    if (g->n_out) memset(g->block, 0, (size_t)g->n_out * sizeof *g->block);
}

om_status om_trainer_bind(om_trainer *t, om_tgraph *g, bool eval, const om_tensor *inputs) {
    OM_CHECK(t->host, inputs || !g->n_user, "%s: no inputs were given; it takes %d", om_trainer_role(eval), g->n_user);
    for (int i = 0; i < g->n_user; i++) {
        const om_io io = om_model_input(g->m, g->user[i]);
        const om_tensor *x = &inputs[i];
        bool fits = x->dtype == io.dtype && x->rank == io.rank;
        for (int k = 0; fits && k < io.rank; k++) fits = io.dim[k] < 0 ? x->dim[k] >= 0 : x->dim[k] == io.dim[k];
        if (x->device != -1)
            return om_fail(t->host, OM_INVALID, "%s: input %d ('%s') is on device %d; -1, the CPU, is expected",
                           om_trainer_role(eval), i, io.name, x->device);
        for (int k = 0; k < x->rank && k < OM_RANK; k++)
            if (x->dim[k] < 0)
                return om_fail(t->host, OM_INVALID, "%s: input %d ('%s') has a size of %lld in dimension %d",
                               om_trainer_role(eval), i, io.name, (long long)x->dim[k], k);
        if (!fits)
            return om_fail(t->host, OM_INVALID, "%s: input %d ('%s') is %s; the graph takes %s%s",
                           om_trainer_role(eval), i, io.name,
                           om_kind_write(x->dtype, x->rank, x->dim).s, om_kind_write(io.dtype, io.rank, io.dim).s,
                           x->dtype != io.dtype || x->rank != io.rank
                               ? ""
                               : ": a size that is a number there is part of the artifacts; pad or cut the batch, or "
                                 "export with that size as a symbol");
        if (!om_numel(x)) continue;
        if (!x->data)
            return om_fail(t->host, OM_INVALID, "%s: input %d ('%s') has no data", om_trainer_role(eval), i, io.name);
        om_tensor dense = *x;
        om_dense_strides(&dense);
        for (int k = 0; k < x->rank; k++)
            if (x->dim[k] != 1 && x->stride[k] != dense.stride[k])
                return om_fail(t->host, OM_INVALID,
                               "%s: input %d ('%s') has a stride of %lld in dimension %d, where a dense tensor has "
                               "%lld: copy it",
                               om_trainer_role(eval), i, io.name, (long long)x->stride[k], k,
                               (long long)dense.stride[k]);
    }
    if (t->heap.sealed) OM_TRY(om_trainer_prepared(t, g, eval, inputs));
    for (int i = 0; i < g->n_user; i++) g->in[g->user[i]] = inputs[i];
    for (int i = 0; i < g->n_in; i++)
        if (g->param[i] >= 0) g->in[i] = t->param[g->param[i]].value;
    return OM_OK;
}

/* Forward to its end: outputs in g->out; with state and arena, what a backward needs. */
om_status om_trainer_forward(om_trainer *t, om_tgraph *g, bool write, om_state **state, om_block **arena) {
    om_run *run;
    const uint64_t seed = t->seed * 0x9e3779b97f4a7c15u + (write ? t->drawn : 0);
    OM_TRY(om_run_forward(t->cx, g->m, g->variant, g->in, seed, write, &run));
    om_status s = om_run_resume(run, 0);
    for (int i = 0; i < g->n_out && s == OM_OK; i++) s = om_run_output(run, i, &g->out[i], &g->block[i]);
    if (s == OM_OK && state) s = om_run_state(run, state, arena);
    om_run_free(run);
    return s;
}

/* Backward; new gradients are added to what is there. */
static om_status backward(om_trainer *t, om_tgraph *g, const om_state *state, om_block *arena) {
    om_run *run;
    OM_TRY(om_run_backward(t->cx, state, arena->data, arena->size, g->in, g->out, g->dy, g->drop, &run));
    om_status s = om_run_resume(run, -1);
    const om_needs *needs = om_run_needs(run);
    for (int i = 0; i < g->n_in && s == OM_OK; i++) {
        if (needs->grad_segment[i] < 0) continue;
        om_tparam *p = &t->param[g->param[i]];
        om_tensor grad;
        om_block *block;
        s = om_run_grad(run, i, &grad, &block);
        if (s != OM_OK) break;
        if (!p->grad_block) {
            p->grad = grad;
            p->grad_block = block;
            continue;
        }
        s = om_trainer_accumulate(t, &p->grad, &grad, 1);
        om_block_put(block);
    }
    om_run_free(run);
    return s;
}

om_status om_trainer_pass(om_trainer *t, om_tgraph *g, bool write, bool drop) {
    om_state *state = NULL;
    om_block *arena = NULL;
    if (t->reset) om_trainer_grads_free(t);
    om_status s = om_trainer_forward(t, g, write, &state, &arena);
    if (s == OM_OK) t->loss = *(const float *)g->out[0].data;
    memset(g->drop, drop, (size_t)g->n_out);
    if (s == OM_OK) {
        s = backward(t, g, state, arena);
        if (s != OM_OK)
            om_trainer_grads_free(t);
        else
            t->has_grad = true, t->drawn += write;
    }
    om_state_free(state);
    om_block_put(arena);
    if (drop || s != OM_OK) om_trainer_outputs_free(g);
    return s;
}

om_status om_trainer_step(om_trainer *t, const om_tensor *inputs, float *loss, om_tensor *outputs) {
    om_tgraph *g = &t->train;
    OM_TRY(om_trainer_status(t));
    OM_TRY(om_trainer_loaded(t));
    if (t->one_batch && t->has_grad && !t->reset)
        return om_fail(t->host, OM_INVALID,
                       "a step while there are gradients of one before: this trainer was made with one_batch; "
                       "om_trainer_reset comes first");
    if (t->loss_only && outputs)
        return om_fail(t->host, OM_INVALID, "outputs were asked for: this trainer was made with loss_only");
    OM_TRY(om_trainer_bind(t, g, false, inputs));
    om_trainer_outputs_free(&t->train);
    om_trainer_outputs_free(&t->eval);
    T_TRY(t, om_trainer_pass(t, g, true, !outputs));
    if (loss) *loss = t->loss;
    if (outputs) memcpy(outputs, g->out, (size_t)g->n_out * sizeof *outputs);
    return OM_OK;
}

om_status om_trainer_eval(om_trainer *t, const om_tensor *inputs, float *loss, om_tensor *outputs) {
    om_tgraph *g = &t->eval;
    OM_TRY(om_trainer_status(t));
    OM_TRY(om_trainer_loaded(t));
    OM_CHECK(t->host, g->m, "eval: the artifacts have no evaluation graph");
    OM_TRY(om_trainer_bind(t, g, true, inputs));
    om_trainer_outputs_free(&t->train);
    om_trainer_outputs_free(g);
    T_TRY(t, om_trainer_forward(t, g, false, NULL, NULL));
    if (loss) {
        const bool one = g->out[0].dtype == OM_F32 && om_numel(&g->out[0]) == 1;
        if (!one)
            return om_fail(t->host, OM_INVALID, "eval: the first output is no loss (one f32 number); give loss NULL");
        *loss = *(const float *)g->out[0].data;
    }
    if (outputs)
        memcpy(outputs, g->out, (size_t)g->n_out * sizeof *outputs);
    else
        om_trainer_outputs_free(g);
    return OM_OK;
}

void om_trainer_reset(om_trainer *t) {
    if (t) t->reset = t->has_grad;
}
