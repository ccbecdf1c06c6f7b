/* prepare.c - what makes a step ask nobody for memory: it runs what steps will run, with zeros for inputs and
 * write-backs off, each after each (gradients of an earlier step lie there while the next one runs), then closes the
 * heap. From there on only the sizes that were prepared are taken: a plan of others would lie where steps have their
 * memory.
 */
#include "run/plan.h"
#include "trainer/trainer.h"

static bool same_size(const om_tensor *a, const om_tensor *b) {
    return !memcmp(a->dim, b->dim, a->rank * sizeof *a->dim);
}

static bool same_sizes(const om_tgraph *g, const om_tensor *a, const om_tensor *b) {
    for (int i = 0; i < g->n_user; i++)
        if (!same_size(&a[i], &b[i])) return false;
    return true;
}

om_status om_trainer_prepared(om_trainer *t, const om_tgraph *g, bool eval, const om_tensor *inputs) {
    const om_tensor *last = NULL;
    for (int r = 0; r < g->n_prepared; r++)
        if (same_sizes(g, last = &g->prepared.v[r * g->n_user], inputs)) return OM_OK;
    for (int i = 0; i < g->n_user && last; i++)
        if (!same_size(&last[i], &inputs[i])) {
            const om_io io = om_model_input(g->m, g->user[i]);
            return om_fail(t->host, OM_INVALID,
                           "%s: input %d ('%s') is %s; these sizes were not prepared (%s was): om_trainer_prepare",
                           om_trainer_role(eval), i, io.name, om_kind_write(io.dtype, io.rank, inputs[i].dim).s,
                           om_kind_write(io.dtype, io.rank, last[i].dim).s);
        }
    return om_fail(t->host, OM_INVALID, "%s: its sizes were not prepared, others were: om_trainer_prepare",
                   om_trainer_role(eval));
}

enum { SIZES_MOST = 64 }; /* well below what a model keeps plans of */

/* The sizes of `like`, or the graph's own, as one more row of g->prepared, unless it is there. */
static om_status row_add(om_trainer *t, om_tgraph *g, bool eval, const om_tensor *like) {
    const uint32_t at = g->prepared.n;
    for (int i = 0; i < g->n_user; i++) {
        const om_io io = om_model_input(g->m, g->user[i]);
        if (like && (like[i].dtype != io.dtype || like[i].rank != io.rank))
            return om_fail(t->host, OM_INVALID, "prepare: input %d ('%s') of the %s is %s; the graph takes %s", i,
                           io.name, om_trainer_role(eval), om_kind_write(like[i].dtype, like[i].rank, like[i].dim).s,
                           om_kind_write(io.dtype, io.rank, io.dim).s);
        om_tensor *one = OM_PUSH(t->host, &g->prepared);
        if (!one) return t->host->status;
        *one = (om_tensor){.dtype = io.dtype, .rank = io.rank, .device = -1};
        for (int k = 0; k < io.rank; k++) {
            one->dim[k] = like ? like[i].dim[k] : io.dim[k];
            if (one->dim[k] < 0 && like)
                return om_fail(t->host, OM_INVALID, "prepare: input '%s' of the %s has a size of %lld in dimension %d",
                               io.name, om_trainer_role(eval), (long long)one->dim[k], k);
            if (one->dim[k] < 0)
                return om_fail(t->host, OM_INVALID,
                               "prepare: input '%s' of the %s has sizes that only a call tells: give inputs", io.name,
                               om_trainer_role(eval));
        }
        om_dense_strides(one);
    }
    for (int r = 0; r < g->n_prepared; r++)
        if (same_sizes(g, &g->prepared.v[r * g->n_user], &g->prepared.v[at])) {
            g->prepared.n = at;
            return OM_OK;
        }
    if (g->n_prepared == SIZES_MOST)
        return om_fail(t->host, OM_UNSUPPORTED, "prepare: %d sizes of the %s were prepared, which is the most",
                       SIZES_MOST, om_trainer_role(eval));
    g->n_prepared++;
    return OM_OK;
}

static void rows_cut(om_tgraph *g, int n) {
    g->n_prepared = n;
    g->prepared.n = (uint32_t)n * (uint32_t)g->n_user;
}

/* Tensors of zeros of these sizes. One piece of host's memory. */
static om_status inputs_zero(om_trainer *t, const om_tgraph *g, const om_tensor *row, om_tensor **out) {
    size_t size = (((size_t)g->n_user + 1) * sizeof **out + 63) & ~(size_t)63, all = size;
    *out = NULL;
    for (int i = 0; i < g->n_user; i++) {
        int64_t bytes = (int64_t)om_dtype_size(row[i].dtype);
        for (int k = 0; k < row[i].rank; k++)
            if (__builtin_mul_overflow(bytes, row[i].dim[k], &bytes) || bytes > OM_ADDRESSES)
                return om_fail(t->host, OM_INVALID, "prepare: input '%s' is too large",
                               om_model_input(g->m, g->user[i]).name);
        all += ((size_t)bytes + 63) & ~(size_t)63;
    }
    om_tensor *x = *out = om_alloc(t->host, all + 64);
    for (int i = 0; i < g->n_user && x; i++) {
        x[i] = row[i];
        x[i].data = (char *)x + size;
        size += ((size_t)om_tensor_bytes(&row[i]) + 63) & ~(size_t)63;
    }
    return t->host->status;
}

static om_status rehearse_step(om_trainer *t, const om_tensor *x, bool drop) {
    om_status s = om_trainer_bind(t, &t->train, false, x);
    if (s == OM_OK) s = om_trainer_fail(t, t->cx, om_trainer_pass(t, &t->train, false, drop));
    om_trainer_outputs_free(&t->train);
    return s;
}

static om_status rehearse_eval(om_trainer *t, const om_tensor *x) {
    om_status s = om_trainer_bind(t, &t->eval, true, x);
    if (s == OM_OK) s = om_trainer_fail(t, t->cx, om_trainer_forward(t, &t->eval, false, NULL, NULL));
    om_trainer_outputs_free(&t->eval);
    return s;
}

/* Every call that may come, in every state of the heap it may find: without gradients, and with those of a step of any
 * prepared sizes, its outputs kept or not. Once before that to make the plans, which stay. */
static om_status rehearse_all(om_trainer *t, om_tensor *const *x, int n_train, int n_eval) {
    const int kinds = t->loss_only ? 1 : 2;
    om_status s = OM_OK;
    for (int k = 0; k < n_train && s == OM_OK; k++) s = rehearse_step(t, x[k], true);
    for (int k = 0; k < n_eval && s == OM_OK; k++) s = rehearse_eval(t, x[n_train + k]);
    for (int first = -1; first < n_train * kinds && s == OM_OK; first++) {
        om_trainer_grads_free(t);
        if (first >= 0) s = rehearse_step(t, x[first / kinds], first % kinds == 0);
        for (int k = 0; k < n_train * kinds && first >= 0 && !t->one_batch && s == OM_OK; k++)
            s = rehearse_step(t, x[k / kinds], k % kinds == 0);
        for (int k = 0; k < n_eval && s == OM_OK; k++) s = rehearse_eval(t, x[n_train + k]);
    }
    om_trainer_grads_free(t);
    return s;
}

static om_status rehearse(om_trainer *t) {
    const int n_train = t->train.n_prepared, n_eval = t->eval.n_prepared;
    om_tensor **x = om_alloc(t->host, ((size_t)n_train + (size_t)n_eval + 1) * sizeof *x);
    om_status s = t->host->status;
    for (int k = 0; k < n_train + n_eval && s == OM_OK; k++) {
        const om_tgraph *g = k < n_train ? &t->train : &t->eval;
        s = inputs_zero(t, g, &g->prepared.v[(k < n_train ? k : k - n_train) * g->n_user], &x[k]);
    }
    t->cx->rehearses = true; /* zeros may be no indices and no labels here */
    if (s == OM_OK) s = rehearse_all(t, x, n_train, n_eval);
    t->cx->rehearses = false;
    for (int k = 0; k < n_train + n_eval && x; k++) om_free(t->host, x[k]);
    om_free(t->host, x);
    return s;
}

/* After a failure: the plans of before at the places of before. What was wrong is told, not what happens here. */
static void prepare_undo(om_trainer *t, int n_train, int n_eval) {
    char text[sizeof t->host->message];
    const om_status s = t->host->status;
    memcpy(text, t->host->message, sizeof text);
    om_ctx_clear(t->host);
    rows_cut(&t->train, n_train);
    rows_cut(&t->eval, n_eval);
    om_model_plans_drop(t->train.m);
    if (t->eval.m) om_model_plans_drop(t->eval.m);
    if (n_train + n_eval) rehearse(t);
    om_ctx_clear(t->host);
    om_fail(t->host, s, "%s", text);
}

om_status om_trainer_prepare(om_trainer *t, const om_tensor *train, const om_tensor *eval) {
    OM_TRY(om_trainer_status(t));
    OM_CHECK(t->host, !t->has_grad || t->reset,
             "prepare: there are gradients of a step, which it would lose; om_trainer_update uses them, "
             "om_trainer_reset gives them up");
    OM_CHECK(t->host, !eval || t->eval.m, "prepare: the artifacts have no evaluation graph; eval NULL is expected");
    const bool sealed = t->heap.sealed;
    const int n_train = t->train.n_prepared, n_eval = t->eval.n_prepared;
    t->heap.sealed = false;
    om_trainer_grads_free(t);
    om_trainer_outputs_free(&t->train);
    om_trainer_outputs_free(&t->eval);
    om_status s = row_add(t, &t->train, false, train);
    if (s == OM_OK && t->eval.m && (eval || t->eval.numbers)) s = row_add(t, &t->eval, true, eval);
    if (s == OM_OK) s = rehearse(t);
    if (s != OM_OK) prepare_undo(t, n_train, n_eval);
    t->heap.sealed = s == OM_OK || sealed;
    return s;
}
