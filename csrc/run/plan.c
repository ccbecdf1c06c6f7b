/* plan.c - from a graph and concrete sizes to a flat list of calls over fixed storage (contract: plan.h).
 *
 * Four sweeps over the nodes, all linear but the last:
 *   1. calls     plan_calls.c: evaluate sizes; resolve views; add copies; order backward calls by segment
 *   2. lifetime  plan_space.c: first and last call of every storage
 *   3. in place  merge an output's storage with a dying operand's where allowed; give outputs and gradients their
 *                blocks
 *   4. offsets   largest storage first, into the smallest gap among those placed that live at the same time
 */
#include "graph/sabotage.h"
#include "run/planner.h"

#include <stdlib.h>
#include <time.h>

double om_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

int om_plan_key_size(const om_graph *g) {
    int n = 1;
    for (uint32_t i = 0; i < g->inputs.n; i++)
        if (om_val(g, g->inputs.v[i])->role != OM_GRAD_IN) n += 2 * om_ty(g, g->inputs.v[i])->rank;
    for (uint32_t i = 0; i < g->syms.n; i++) n += g->syms.v[i].axis < 0;
    return n;
}

void om_plan_key(const om_graph *g, const om_tensor *in, int64_t *key) {
    *key++ = g->cx->device->workers(g->cx); /* scratch is sized by it */
    for (uint32_t i = 0; i < g->inputs.n; i++) {
        if (om_val(g, g->inputs.v[i])->role == OM_GRAD_IN) continue;
        for (int k = 0; k < om_ty(g, g->inputs.v[i])->rank; k++) {
            *key++ = in[i].dim[k];
            *key++ = in[i].dim[k] == 1 || om_sabotage("plan.key") ? 0 : in[i].stride[k];
        }
    }
    for (uint32_t i = 0; i < g->syms.n; i++) { /* sizes that are values of inputs: a word each */
        const om_sym *s = &g->syms.v[i];
        if (s->axis >= 0) continue;
        const om_tensor *t = s->input == OM_NONE ? NULL : &in[s->input];
        *key++ = t && t->dtype == OM_I64 && t->data && !om_sabotage("plan.key_value") ? *(const int64_t *)t->data : 0;
    }
}

static void bytes_count(planner *pl) {
    om_plan_bytes *b = &pl->p->bytes;
    for (uint32_t i = 0; i < pl->st.n; i++) {
        const om_storage *s = &pl->st.v[i];
        if (pl->alias[i] != i) continue;
        if (s->where == OM_W_OUTPUT) b->outputs += s->size;
        if (s->where == OM_W_GRAD) b->grads += s->size;
        if (s->where == OM_W_LOAN) b->loans += s->size;
        if (s->where == OM_W_ARENA && s->first < pl->p->n_forward && s->last >= pl->p->n_forward) b->kept += s->size;
    }
}

/* What each call needs to know but addresses is worked out once, when layouts and storages are settled. */
static om_status calls_prepare(planner *pl) {
    om_tensor in[OM_MAX_IN], out[OM_MAX_OUT];
    const om_device *d = pl->p->device;
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        if (c->kind == OM_CALL_COPY && d->copy_prepare)
            OM_TRY(d->copy_prepare(pl->cx, &pl->p->mem, &c->arg[0].t, &c->arg[1].t, &c->prep));
        if (c->kind != OM_CALL_RUN) continue;
        for (int k = 0; k < c->n_in; k++) in[k] = c->arg[k].storage == OM_NONE ? (om_tensor){0} : c->arg[k].t;
        for (int k = 0; k < c->n_out; k++) out[k] = c->arg[c->n_in + k].t;
        const om_node *n = &pl->g->nodes.v[c->node];
        om_args a = {.node = n, .graph = pl->g, .attr = c->attr, .n_attr = n->n_attr};
        a.n_in = c->n_in, a.n_out = c->n_out;
        a.in = in, a.out = out, a.bounded = c->bounded;
        OM_TRY(c->row->prepare(pl->cx, &pl->p->mem, &a, &c->prep));
    }
    return OM_OK;
}

/* Constants that calls read, side by side in one block of the device's. */
static om_status constants_upload(om_ctx *cx, om_plan *p) {
    int64_t size = 0;
    for (uint32_t i = 0; i < p->n_st; i++) {
        om_storage *s = &p->st[i];
        if (s->where != OM_W_CONST || s->last < 0) continue;
        s->offset = size;
        size += (s->size + OM_PLAN_ALIGN - 1) & ~(int64_t)(OM_PLAN_ALIGN - 1);
    }
    if (!(p->constants = p->device->block_get(cx, (size_t)size))) return cx->status;
    for (uint32_t i = 0; i < p->n_st; i++) {
        om_storage *s = &p->st[i];
        if (s->where != OM_W_CONST || s->last < 0) continue;
        void *to = (char *)p->constants->data + s->offset;
        OM_TRY(p->device->upload(cx, to, s->data, (size_t)s->size));
        s->data = to;
    }
    return OM_OK;
}

om_status om_plan_make(om_ctx *cx, const om_facts *facts, const om_tensor *in, om_plan **out) {
    const om_graph *g = facts->g;
    double t0 = om_now_ms();
    *out = NULL;
    om_plan *p = om_alloc(cx, sizeof *p);
    if (!p) return cx->status;
    p->g = g;
    p->device = cx->device;
    p->mem.cx = cx;
    p->threads = p->device->workers(cx);
    planner pl = {.cx = cx, .g = g, .p = p, .f = facts, .no_reuse = getenv("ORTMODULE_NO_REUSE") != NULL};
    om_arena *m = &p->mem;
    pl.val = om_alloc(cx, (g->values.n + 1) * sizeof *pl.val);
    p->sym = om_arena_alloc(m, (g->syms.n + 1) * sizeof *p->sym);
    p->input = om_arena_alloc(m, (g->inputs.n + 1) * sizeof *p->input);
    p->output = om_arena_alloc(m, (g->outputs.n + 1) * sizeof *p->output);
    p->grad = om_arena_alloc(m, (g->grads.n + 1) * sizeof *p->grad);
    p->grad_segment = om_arena_alloc(m, (g->grads.n + 1) * sizeof *p->grad_segment);
    p->n_key = om_plan_key_size(g);
    p->key = om_arena_alloc(m, (size_t)(p->n_key + 1) * sizeof *p->key);
    p->host = om_arena_alloc(m, (g->inputs.n + 1) * sizeof *p->host);
    om_status s = cx->status;
    for (om_id i = 0; i < g->inputs.n && s == OM_OK; i++)
        if (om_val(g, g->inputs.v[i])->host) p->host[p->n_host++] = i;
    if (s == OM_OK) s = om_syms_bind(cx, g, in, p->sym);
    if (s == OM_OK) om_plan_key(g, in, p->key);
    if (s == OM_OK) s = om_plan_calls(&pl, in);
    if (s == OM_OK) s = om_plan_space(&pl);
    if (s == OM_OK) s = calls_prepare(&pl);
    if (s == OM_OK) {
        bytes_count(&pl);
        for (uint32_t i = 0; i < pl.st.n; i++) /* storages that live in another's place are no more */
            if (pl.alias[i] != i) pl.st.v[i].first = pl.st.v[i].last = -1;
        p->calls = om_arena_copy(m, pl.calls.v, pl.calls.n * sizeof *p->calls);
        p->st = om_arena_copy(m, pl.st.v, pl.st.n * sizeof *p->st);
        p->n_calls = (int)pl.calls.n;
        p->n_st = pl.st.n;
        if (!p->calls || !p->st) s = cx->status;
        else if (!p->device->host_memory) s = constants_upload(cx, p);
    }
    om_free(cx, pl.val);
    om_free(cx, pl.alias);
    om_free(cx, pl.past);
    om_free(cx, pl.beside);
    om_free(cx, pl.st.v);
    om_free(cx, pl.calls.v);
    p->ms = om_now_ms() - t0;
    if (s == OM_OK) *out = p;
    else om_plan_free(cx, p);
    return s;
}

void om_plan_free(om_ctx *cx, om_plan *p) {
    if (!p) return;
    if (p->device->plan_end) p->device->plan_end(p);
    om_block_put(p->constants);
    om_arena_free(&p->mem);
    om_free(cx, p);
}
