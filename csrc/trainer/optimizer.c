/* optimizer.c - what an optimizer graph says, the update, learning rates.
 *
 * The graph is not run: it is onnxruntime-training's contract (inputs learning_rate, step and sequences of parameters,
 * gradients and moments; one node), of which only the node's attributes are news. The update is the multi-tensor kernel
 * that Python's FusedAdam and FusedSGD use, over all trainable parameters that have a gradient.
 *
 *   AdamWOptimizer (com.microsoft)      alpha beta epsilon weight_decay adam_mode (0 torch, 1 HF) correct_bias
 *   SGDOptimizerV2 (com.microsoft)      -
 *   ClipGradNorm, InplaceClipGradNorm   max_norm: before either, over all gradients
 *   SGD (ortmodule)                     momentum dampening nesterov weight_decay
 */
#include "graph/number.h"
#include "onnx/onnx.h"
#include "trainer/trainer.h"

#include <stdlib.h>

static const Onnx__AttributeProto *attribute(const Onnx__NodeProto *n, const char *name) {
    for (size_t i = 0; i < n->n_attribute; i++)
        if (n->attribute[i]->name && !strcmp(n->attribute[i]->name, name)) return n->attribute[i];
    return NULL;
}
/* attributes are f32; metadata "f64:<name>" has the double, where there is one (docs/ONNX.md) */
static double number(const Onnx__NodeProto *n, const char *name, double dflt) {
    const Onnx__AttributeProto *a = attribute(n, name);
    for (size_t i = 0; i < n->n_metadata_props && a && a->has_f; i++) {
        const Onnx__StringStringEntryProto *p = n->metadata_props[i];
        if (!p->key || !p->value || strncmp(p->key, "f64:", 4) != 0 || strcmp(p->key + 4, name) != 0) continue;
        const double full = om_number_read(p->value, NULL);
        if ((float)full == a->f) return full;
    }
    return a && a->has_f ? a->f : a && a->has_i ? (double)a->i : dflt;
}

static om_status node_read(om_trainer *t, const Onnx__NodeProto *n) {
    const char *op = n->op_type ? n->op_type : "", *domain = n->domain ? n->domain : "";
    const bool ort = !strcmp(domain, "com.microsoft");
    if (!strcmp(op, "SequenceConstruct") || !strcmp(op, "SequenceAt") || !strcmp(op, "Identity")) return OM_OK;
    if (ort && (!strcmp(op, "InplaceClipGradNorm") || !strcmp(op, "ClipGradNorm"))) {
        t->max_norm = number(n, "max_norm", 1.0);
        return t->max_norm > 0 && isfinite(t->max_norm)
                   ? OM_OK
                   : om_fail(t->host, OM_INVALID, "optimizer graph: max_norm %g; it must be above 0", t->max_norm);
    }
    const bool adam = ort && !strcmp(op, "AdamWOptimizer"), sgd = ort && !strcmp(op, "SGDOptimizerV2");
    const bool own = !strcmp(domain, "ortmodule") && !strcmp(op, "SGD");
    if (!adam && !sgd && !own)
        return om_fail(t->host, OM_UNSUPPORTED,
                       "optimizer graph: node %.60s%s%.60s; AdamWOptimizer, SGDOptimizerV2, InplaceClipGradNorm "
                       "(com.microsoft) and SGD (ortmodule) are supported",
                       domain, *domain ? "." : "", op);
    if (t->optimizer != OM_T_NONE) return om_fail(t->host, OM_UNSUPPORTED, "optimizer graph: more than one optimizer");
    t->optimizer = adam ? OM_T_ADAM : OM_T_SGD;
    t->sgd = (om_sgd_cfg){.inv_scale = 1};
    if (own)
        t->sgd = (om_sgd_cfg){.momentum = number(n, "momentum", 0),
                              .dampening = number(n, "dampening", 0),
                              .weight_decay = number(n, "weight_decay", 0),
                              .nesterov = number(n, "nesterov", 0) != 0,
                              .inv_scale = 1};
    const om_sgd_cfg *d = &t->sgd;
    OM_CHECK(t->host, d->momentum >= 0 && isfinite(d->momentum) && isfinite(d->dampening) && isfinite(d->weight_decay),
             "optimizer graph: momentum %g, dampening %g and weight_decay %g; finite numbers are expected, the first "
             "from 0 up",
             d->momentum, d->dampening, d->weight_decay);
    if (!adam) return OM_OK;
    const double mode = number(n, "adam_mode", 0);
    if (mode != 0 && mode != 1)
        return om_fail(t->host, OM_UNSUPPORTED, "optimizer graph: adam_mode %g; 0 and 1 are defined", mode);
    t->adam = (om_adam_cfg){
        .inv_scale = 1,
#define ADAMW(field, name, dflt) .field = number(n, name, dflt),
#define ADAMW_MODE(field, name, dflt) .field = mode == 0 ? OM_ADAMW_TORCH : OM_ADAMW_HF,
#define ADAMW_FLAG(field, name, dflt) .field = number(n, name, dflt) != 0,
#include "ops/optimizer.def"
    };
    const om_adam_cfg *a = &t->adam;
    OM_CHECK(t->host, a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1,
             "optimizer graph: betas %g and %g; numbers from 0 up and below 1 are expected", a->beta1, a->beta2);
    OM_CHECK(t->host, a->eps >= 0 && isfinite(a->eps) && isfinite(a->weight_decay),
             "optimizer graph: epsilon %g and weight_decay %g; finite numbers are expected, the first from 0 up",
             a->eps, a->weight_decay);
    return OM_OK;
}

om_status om_trainer_optimizer(om_trainer *t, om_bytes onnx) {
    om_arena mem = {.cx = t->host};
    om_status s = om_onnx_wire(t->host, &onnx__model_proto__descriptor, onnx.data, onnx.size);
    const Onnx__ModelProto *m = s == OM_OK ? om_onnx_unpack(t->host, &mem, onnx.data, onnx.size) : NULL;
    if (!m) s = t->host->status;
    else if (!m->graph) s = om_fail(t->host, OM_INVALID, "optimizer graph: there is none in it");
    for (size_t i = 0; s == OM_OK && i < m->graph->n_node; i++) s = node_read(t, m->graph->node[i]);
    if (s == OM_OK && t->optimizer == OM_T_NONE) s = om_fail(t->host, OM_INVALID, "optimizer graph: has no optimizer");
    om_arena_free(&mem);
    t->rate = t->initial_rate = 1e-3;
    return s;
}

/* sum += more */
om_status om_trainer_accumulate(om_trainer *t, om_tensor *sum, const om_tensor *more, int n) {
    om_status s = om_axpby(t->ocx, sum, more, n, 1, 1);
    if (s != OM_OK) om_fail(t->cx, s, "%s", t->ocx->message);
    om_ctx_clear(t->ocx);
    return s;
}

/* zeros: parameters for gradients, and a rate of 0: whoever measures memory */
static om_status update(om_trainer *t, bool zeros) {
    int n = 0;
    double norm, scale = 1;
    bool finite;
    for (int i = 0; i < t->n_param; i++) {
        const om_tparam *p = &t->param[i];
        if (!p->trainable || (!zeros && !p->grad_block)) continue;
        t->update[n] = (om_optim_param){
            .p = p->value, .g = zeros ? p->value : p->grad, .m = p->m, .v = p->v, .step = (double)t->updates + 1};
        t->norm[n] = t->update[n].g;
        n++;
    }
    if (t->max_norm > 0) {
        OM_TRY(om_norm(t->ocx, t->norm, n, 2, &norm, &finite, NULL));
        const double clip = t->max_norm / (norm + 1e-6);
        scale = clip < 1 ? clip : 1;
    }
    t->adam.lr = t->sgd.lr = zeros ? 0 : t->rate;
    t->adam.inv_scale = t->sgd.inv_scale = scale;
    if (t->optimizer == OM_T_ADAM) return om_adam_step(t->ocx, &t->adam, OM_STORE_NEAREST, 0, t->update, n);
    return om_sgd_step(t->ocx, &t->sgd, OM_STORE_NEAREST, 0, t->update, n);
}

om_status om_trainer_optimizer_memory(om_trainer *t) {
    om_heap *h = &t->update_heap;
    if (!om_heap_open(h, NULL, 0)) return om_fail(t->host, OM_NOMEM, "out of address space");
    if (!(t->ocx = om_ctx_new(&t->update_services))) return om_fail(t->host, OM_NOMEM, "out of memory");
    om_status s = t->optimizer == OM_T_NONE ? OM_OK : update(t, true);
    for (int i = 0; i < t->n_param && s == OM_OK; i++) /* two tensors of equal layout need no copy */
        if (t->param[i].trainable) s = om_axpby(t->ocx, &t->param[i].value, &t->param[i].value, 1, 1, 1);
    OM_TRY(om_trainer_fail(t, t->ocx, s));
    const size_t size = h->high;
    om_heap_close(h);
    t->ocx = NULL;
    void *arena = om_alloc(t->cx, size);
    OM_TRY(om_trainer_fail(t, t->cx, t->cx->status));
    if (!om_heap_open(h, arena, size) || !(t->ocx = om_ctx_new(&t->update_services)))
        return om_fail(t->host, OM_INTERNAL, "the update's memory");
    for (int i = 0; i < t->n_param; i++) {
        om_tparam *p = &t->param[i];
        om_tensor *const x[] = {&p->value, &p->m, &p->v};
        for (int k = 0; k < 3 && p->trainable; k++) /* the others nobody has touched */
            if (x[k]->dtype) memset(x[k]->data, 0, (size_t)om_numel(x[k]) * om_dtype_size(x[k]->dtype));
    }
    return OM_OK;
}

om_status om_trainer_update(om_trainer *t) {
    OM_TRY(om_trainer_status(t));
    OM_TRY(om_trainer_loaded(t));
    OM_CHECK(t->host, t->optimizer != OM_T_NONE, "update: the artifacts have no optimizer");
    OM_CHECK(t->host, t->has_grad, "update: there are no gradients; om_trainer_step makes them");
    OM_TRY(om_trainer_fail(t, t->ocx, update(t, false)));
    t->updates++;
    return OM_OK;
}

/* --- learning rate ------------------------------------------------------------------------------- */

double om_trainer_rate(const om_trainer *t) { return t ? t->rate : 0; }
om_status om_trainer_set_rate(om_trainer *t, double rate) {
    OM_TRY(om_trainer_status(t));
    OM_CHECK(t->host, rate >= 0 && isfinite(rate), "a learning rate of %g; a number from 0 up is expected", rate);
    t->rate = rate;
    return OM_OK;
}
int64_t om_trainer_updates(const om_trainer *t) { return t ? t->updates : 0; }

om_status om_trainer_schedule(om_trainer *t, om_schedule kind, int64_t warmup, int64_t total, double rate) {
    OM_TRY(om_trainer_status(t));
    OM_CHECK(t->host, (unsigned)kind <= OM_SCHEDULE_COSINE, "schedule: kind %d; an om_schedule is expected", (int)kind);
    OM_CHECK(t->host, rate >= 0 && isfinite(rate), "schedule: a learning rate of %g; a number from 0 up is expected",
             rate);
    OM_CHECK(t->host, warmup >= 0 && (kind < OM_SCHEDULE_LINEAR || total > warmup),
             "schedule: %lld steps of warm-up, %lld in all: the first must be at least 0 and below the second",
             (long long)warmup, (long long)total);
    t->schedule.kind = kind;
    t->schedule.warmup = warmup;
    t->schedule.total = total;
    t->initial_rate = rate;
    return kind == OM_SCHEDULE_NONE ? OM_OK : om_trainer_schedule_step(t);
}

om_status om_trainer_schedule_step(om_trainer *t) {
    OM_TRY(om_trainer_status(t));
    const double n = (double)t->updates, warmup = (double)t->schedule.warmup, total = (double)t->schedule.total;
    double part = 1;
    OM_CHECK(t->host, t->schedule.kind != OM_SCHEDULE_NONE, "there is no schedule; om_trainer_schedule makes one");
    if (n < warmup)
        part = n / warmup;
    else if (t->schedule.kind == OM_SCHEDULE_LINEAR)
        part = n < total ? (total - n) / (total - warmup) : 0;
    else if (t->schedule.kind == OM_SCHEDULE_COSINE)
        part = n < total ? 0.5 * (1 + cos(3.14159265358979323846 * (n - warmup) / (total - warmup))) : 0;
    t->rate = t->initial_rate * part;
    return OM_OK;
}
