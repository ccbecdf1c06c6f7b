/* peak.c - how much memory a step takes (om_plan_memory: blocks, exact), and what lies in it when a plan needs most:
 * the answer to "where does my memory go?". Of the latter:
 *
 * Counted are the arena's storages between their first and last call, and outputs to the end of the forward at least,
 * as the host holds them. Gradients exist at the end of every backward, whatever the engine does: they are not part of
 * the question. The arena's layout can only be larger (gaps).
 */
#include "run/plan.h"

#include <stdlib.h>

static int peak_last(const om_plan *p, const om_storage *s) {
    if (s->where == OM_W_OUTPUT && s->last < p->n_forward) return p->n_forward - 1;
    return s->last;
}

static bool peak_counts(const om_storage *s) {
    return (s->where == OM_W_ARENA || s->where == OM_W_OUTPUT) && s->last >= 0 && s->size > 0;
}

static int peak_by_size(const void *a, const void *b) {
    const om_live *x = a, *y = b;
    return x->size != y->size ? (x->size < y->size ? 1 : -1) : x->first - y->first;
}

om_status om_plan_peak(om_ctx *cx, const om_plan *p, om_live *out, int max, int *n, int *call, int64_t *bytes) {
    *n = *call = 0;
    *bytes = 0;
    int64_t *delta = om_alloc(cx, ((size_t)p->n_calls + 2) * sizeof *delta);
    if (!delta) return cx->status;
    for (uint32_t i = 0; i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        if (!peak_counts(s)) continue;
        delta[s->first] += s->size;
        delta[peak_last(p, s) + 1] -= s->size;
    }
    int64_t now = 0;
    for (int i = 0; i < p->n_calls; i++) {
        now += delta[i];
        if (now > *bytes) *bytes = now, *call = i;
    }
    om_free(cx, delta);
    om_live *all = om_alloc(cx, (p->n_st + 1) * sizeof *all);
    if (!all) return cx->status;
    int count = 0;
    for (uint32_t i = 0; i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        if (!peak_counts(s) || s->first > *call || peak_last(p, s) < *call) continue;
        const om_call *c = &p->calls[s->first];
        bool scratch = c->scratch == i;
        all[count++] = (om_live){.size = s->size,
                                 .where = s->where,
                                 .scratch = scratch,
                                 .first = s->first,
                                 .last = s->last,
                                 .node = c->node};
    }
    qsort(all, (size_t)count, sizeof *all, peak_by_size);
    *n = count < max ? count : max;
    memcpy(out, all, (size_t)*n * sizeof *out);
    om_free(cx, all);
    return OM_OK;
}

/* --- blocks ----------------------------------------------------------------------------------------- */

static int64_t peak_block(om_ctx *cx, const om_plan *p, int64_t size) {
    return p->device->block_size ? (int64_t)p->device->block_size(cx, (size_t)size) : size;
}

/* The first segment that hands out a gradient: until then autograd holds what it has saved of the outputs. */
static int peak_head(const om_plan *p) {
    int head = p->n_segments;
    for (uint32_t i = 0; i < p->g->grads.n; i++) {
        const om_id v = p->g->grads.v[i].value;
        const om_node *n = v == OM_NONE ? NULL : om_maker(p->g, v);
        const int at = !n || n->phase == OM_FORWARD ? 0 : (int)n->segment;
        if (v != OM_NONE && at < head) head = at;
    }
    return head;
}

/* The last call that needs output i or the gradient in its place; -1: only the forward does. */
static int peak_until(const om_plan *p, uint32_t i) {
    int last = -1;
    for (uint32_t k = 0; k < p->n_st; k++) {
        const om_storage *s = &p->st[k];
        const bool own = (s->where == OM_W_OUTPUT || s->where == OM_W_LOAN) && s->index == i;
        if (own && s->last >= p->n_forward && s->last > last) last = s->last;
    }
    return last;
}

om_memory om_plan_memory(om_ctx *cx, const om_plan *p) {
    const int64_t arena = peak_block(cx, p, p->bytes.arena);
    const int head = peak_head(p);
    om_memory m = {.kept = p->bytes.kept, .workspace = arena - p->bytes.kept};
    /* gradients, and loans; the same without those in the arena; gradients, and outputs that nobody else holds */
    int64_t most = 0, beside = 0, alone = 0;
    for (uint32_t i = 0; i < p->g->outputs.n; i++)
        m.outputs += peak_block(cx, p, om_tensor_bytes(&p->output[i]));
    for (int seg = 0; seg < p->n_segments; seg++) { /* as step.c takes and returns them */
        const int from = seg ? p->seg_end[seg - 1] : p->n_forward, to = p->seg_end[seg];
        int64_t grads = 0, placed = 0, loans = 0, saved = 0;
        for (uint32_t i = 0; i < p->n_st; i++) {
            const om_storage *s = &p->st[i];
            if (s->last < 0 || s->first >= to) continue;
            if (s->where == OM_W_GRAD) grads += peak_block(cx, p, s->size);
            if (s->where == OM_W_GRAD && s->offset >= 0) placed += peak_block(cx, p, s->size);
            if (s->where == OM_W_LOAN && s->last >= from) loans += peak_block(cx, p, s->size);
        }
        for (uint32_t i = 0; i < p->g->outputs.n; i++) { /* a number's holder is expected to keep it */
            if (om_numel(&p->output[i]) == 1 || peak_until(p, i) >= (seg <= head ? p->n_forward : from))
                saved += peak_block(cx, p, om_tensor_bytes(&p->output[i]));
        }
        m.gradients = grads;
        if (loans > m.loans) m.loans = loans;
        if (grads + loans > most) most = grads + loans;
        if (grads - placed + loans > beside) beside = grads - placed + loans;
        if (grads + saved > alone) alone = grads + saved;
    }
    m.peak = arena + m.outputs + most;
    m.placed = p->stay ? most - beside : 0;
    m.released = arena + (alone > m.outputs ? alone : m.outputs);
    return m;
}
