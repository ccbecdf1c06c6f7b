/* needs.c - what a graph and a variant need of their host and give to it (om_needs), found from the graph alone, once.
 *
 * Backward reads a graph input or a user output when a node of its own reads the memory that value lies in: views share
 * their source's. A gradient that is itself a forward value or an input is copied in the backward, so it is a read too.
 */
#include "run/plan.h"

#include <stdlib.h>

om_status om_outputs_differentiable(om_ctx *cx, const om_graph *g, uint8_t **out) {
    uint8_t *reach = om_alloc(cx, g->values.n + 1); /* per value */
    if (!reach || !(*out = om_alloc(cx, g->outputs.n + 1))) {
        om_free(cx, reach);
        return cx->status;
    }
    for (om_id v = 0; v < g->values.n; v++) {
        const om_value *x = om_val(g, v);
        if (x->input != OM_NONE) reach[v] = om_is_float(x->type.dtype) && x->role != OM_BUFFER;
    }
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        bool d = false;
        for (int k = 0; k < n->n_in && n->op->grad; k++) d |= om_ins(g, n)[k] != OM_NONE && reach[om_ins(g, n)[k]];
        for (int k = 0; k < n->n_out; k++)
            reach[n->out + (om_id)k] = d && om_is_float(om_ty(g, n->out + (om_id)k)->dtype);
    }
    for (uint32_t i = 0; i < g->outputs.n; i++) (*out)[i] = reach[g->outputs.v[i]];
    om_free(cx, reach);
    return OM_OK;
}

static int read_order(const void *a, const void *b) {
    const om_needs_read *x = a, *y = b;
    const int segment = (x->segment > y->segment) - (x->segment < y->segment);
    return segment ? segment : (x->input > y->input) - (x->input < y->input);
}

static om_status reads_find(om_ctx *cx, om_variant *v) {
    om_graph *g = v->g;
    OM_VEC(om_needs_read) all = {0};
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        for (int k = 0; k < n->n_in && n->phase != OM_FORWARD; k++) {
            const om_id in = om_ins(g, n)[k];
            const om_value *x = in == OM_NONE ? NULL : om_val(g, v->facts->root[in]);
            if (!x || x->input == OM_NONE || x->input >= v->first_grad_in) continue;
            om_needs_read *row = OM_PUSH(cx, &all);
            if (row) *row = (om_needs_read){(int)n->segment, (int)x->input};
        }
    }
    if (all.n) qsort(all.v, all.n, sizeof *all.v, read_order);
    uint32_t n = 0;
    for (uint32_t i = 0; i < all.n; i++)
        if (!n || read_order(&all.v[n - 1], &all.v[i])) all.v[n++] = all.v[i];
    v->needs.n_reads = (int)n;
    v->needs.reads = om_arena_copy(&g->arena, all.v, n * sizeof *all.v);
    om_free(cx, all.v);
    return cx->status;
}

static om_status host_find(om_ctx *cx, om_variant *v) {
    om_graph *g = v->g;
    int n_host = 0;
    for (om_id i = 0; i < g->nodes.n; i++) n_host += g->nodes.v[i].op->kind == OM_K_HOST;
    om_needs_host *host = om_arena_alloc(&g->arena, (size_t)n_host * sizeof *host), *h = host;
    if (!host) return cx->status;
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        if (n->op->kind != OM_K_HOST) continue;
        const om_attr *want = om_attr_get(n->attr, n->n_attr, "want");
        *h++ = (om_needs_host){.index = (int)om_node_int(n, "index", -1),
                                      .part = (int)om_node_int(n, "part", 0),
                                      .n_want = want ? (int)want->n : 0,
                                      .backward = n->phase != OM_FORWARD,
                                      .want = want ? want->dims : NULL};
    }
    v->needs.n_host = n_host;
    v->needs.host = host;
    return OM_OK;
}

/* Its memory: a gradient that is a forward value or an input is copied in the backward. */
static bool backward_reads(const om_facts *f, om_id v) {
    return om_read_after_forward(f, v) || f->root_held[f->root[v]] & OM_HELD_GRAD;
}

om_status om_needs_make(om_ctx *cx, om_variant *v) {
    om_graph *g = v->g;
    om_arena *mem = &g->arena;
    int *segment = om_arena_alloc(mem, (g->inputs.n + 1) * sizeof *segment);
    int *at = om_arena_alloc(mem, (g->inputs.n + 1) * sizeof *at);
    uint8_t *in = om_arena_alloc(mem, g->inputs.n + 1), *out = om_arena_alloc(mem, g->outputs.n + 1);
    if (!segment || !at || !in || !out) return cx->status;
    for (uint32_t i = 0; i < g->inputs.n; i++) segment[i] = at[i] = -1;
    for (uint32_t i = 0; i < g->grads.n; i++) {
        const om_gradout *o = &g->grads.v[i];
        if (o->value == OM_NONE) continue;
        const om_node *n = om_maker(g, o->value);
        segment[o->input] = !n || n->phase == OM_FORWARD ? 0 : n->segment;
        at[o->input] = (int)i;
    }
    for (uint32_t i = 0; i < v->first_grad_in; i++) in[i] = backward_reads(v->facts, g->inputs.v[i]);
    for (uint32_t i = 0; i < g->outputs.n; i++) out[i] = backward_reads(v->facts, g->outputs.v[i]);
    v->grad_at = at;
    v->needs = (om_needs){.n_segments = v->n_segments,
                          .grad_segment = segment,
                          .reads_input = in,
                          .reads_output = out,
                          .reaches = v->flow.reach};
    OM_TRY(reads_find(cx, v));
    return host_find(cx, v);
}
