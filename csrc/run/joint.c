/* joint.c - from a forward graph to the graph of a variant: gradients, what is computed again, segments.
 *
 *   begin     om_passes_variant on a copy of the forward; gradients for what is wanted and arrives, and the passes of
 *             om_passes_joint before `remat`: the graph on which what is computed again is decided
 *   end       the passes behind it, segments, and the pass that needs to know them
 */
#include "run/joint.h"

#include "graph/sabotage.h"
#include "passes/passes.h"

#include <limits.h>

/* --- the gradient of an output is read by the end of the segment that makes it -------------------------------- */

enum { PULLED = 6 };

static bool pulled_cheap(const om_node *n) {
    return n->op->view || n->op->kind == OM_K_POINTWISE || om_is(n, layer_norm) || om_is(n, rms_norm) ||
           om_is(n, compress) || om_is(n, restore) || om_is(n, trim);
}

/* Can node n of the backward run in segment `at`, with what only it needs? (at most `depth` nodes behind each other)
 * set: it does from now on. */
static bool pulled(om_graph *g, om_node *n, int at, int depth, bool set) {
    if (!n || n->phase != OM_BACKWARD || n->segment <= at) return true;
    if (!depth || (depth < PULLED && !pulled_cheap(n))) return false;
    for (int k = 0; k < n->n_in; k++) {
        const om_id v = om_ins(g, n)[k];
        const om_node *m = om_maker(g, v);
        if (m && !pulled(g, (om_node *)m, at, depth - 1, set)) return false;
    }
    if (set) n->segment = (uint16_t)at;
    return true;
}

/* Has v x's sizes, or a bounded one in the place of one of them? */
static bool as_large(const om_graph *g, om_id v, om_id x) {
    const om_type *t = om_ty(g, v), *of = om_ty(g, x);
    om_dim size;
    const int bounded = om_bounded_axis(g, t, &size);
    bool same = t->dtype == of->dtype && t->rank == of->rank && t->rank > 0;
    for (int i = 0; i < t->rank && same; i++) same = t->dim[i] == of->dim[i] || i == bounded;
    return same;
}

/* A product that reads a gradient in an output's place (of tied weights: that of the head is due with the embedding's)
 * goes where the gradient is made: its memory is the host's, which gets it back sooner (the output itself, or a block
 * beside it). */
static void segments_pull(om_graph *g, const om_facts *f) {
    for (om_id i = 0; i < g->nodes.n; i++) {
        om_node *n = &g->nodes.v[i];
        if (n->phase != OM_BACKWARD || !om_is(n, matmul)) continue;
        for (int k = 0; k < n->n_in; k++) {
            const om_id v = om_ins(g, n)[k];
            const om_node *m = v == OM_NONE ? NULL : om_maker(g, f->root[v]);
            if (!m || m->phase != OM_BACKWARD || m->segment >= n->segment) continue;
            bool place = false;
            for (int j = 0; j < m->n_in && !place; j++) {
                const om_id x = om_ins(g, m)[j];
                place = x != OM_NONE && f->root_held[f->root[x]] & OM_HELD_OUTPUT && as_large(g, m->out, x);
            }
            if (place && pulled(g, n, m->segment, PULLED, false)) pulled(g, n, m->segment, PULLED, true);
        }
    }
}

/* Each backward node runs in the first segment that needs it, and not after the segment that hands out the gradient of
 * a graph input whose memory it reads: who has the gradient may change the tensor at once (an optimizer step in a
 * hook). */
static om_status segments_assign(om_ctx *cx, om_graph *g, const om_facts *f, const int *group, int *n_segments) {
    const om_id *root = f->root;
    int last = 0;
    int *seg = om_alloc(cx, (g->values.n + 1) * sizeof *seg);
    /* at roots: last segment that may read what lies there */
    int *until = om_alloc(cx, (g->values.n + 1) * sizeof *until);
    if (!seg || !until) {
        om_free(cx, seg);
        om_free(cx, until);
        return cx->status;
    }
    for (uint32_t i = 0; i < g->grads.n; i++)
        if (group && group[g->grads.v[i].input] > last) last = group[g->grads.v[i].input];
    for (om_id v = 0; v < g->values.n; v++) seg[v] = until[v] = last;
    for (uint32_t i = 0; i < g->grads.n; i++) {
        om_id v = g->grads.v[i].value;
        int want = group ? group[g->grads.v[i].input] : 0;
        if (v == OM_NONE) continue;
        if (want < seg[v]) seg[v] = want < 0 ? 0 : want;
        until[g->inputs.v[g->grads.v[i].input]] = want < 0 ? 0 : want;
    }
    for (om_id i = g->nodes.n; i-- > 0;) {
        om_node *n = &g->nodes.v[i];
        if (n->phase == OM_FORWARD) continue;
        int s = last;
        for (int k = 0; k < n->n_out; k++)
            if (seg[n->out + (om_id)k] < s) s = seg[n->out + (om_id)k];
        for (int k = 0; k < n->n_in; k++) {
            const om_id v = om_ins(g, n)[k];
            const bool ends = v != OM_NONE && until[root[v]] < s;
            if (ends && !om_sabotage("segment.until")) s = until[root[v]];
        }
        const bool early = s < last;
        n->segment = (uint16_t)(early && om_sabotage("segment") ? s + 1 : s);
        for (int k = 0; k < n->n_in; k++) {
            om_id v = om_ins(g, n)[k];
            if (v != OM_NONE && s < seg[v]) seg[v] = s;
        }
    }
    segments_pull(g, f);
    *n_segments = g->n_segments = g->grads.n ? last + 1 : 0;
    om_free(cx, seg);
    om_free(cx, until);
    return OM_OK;
}

om_status om_joint_begin(om_ctx *cx, const om_graph *forward, const uint8_t *wanted, const uint8_t *arriving,
                         om_flow *flow, om_graph **g, int *at) {
    *at = 0;
    while (om_passes_joint[*at] != &om_pass_remat) (*at)++;
    om_graph *own = NULL; /* the variant's forward: the model's, or a copy that passes have changed */
    om_status s = OM_OK;
    cx->padding[0] = 0;
    for (om_id i = 0; i < forward->nodes.n && s == OM_OK && !own; i++) {
        const om_node *n = &forward->nodes.v[i];
        if ((om_is(n, cross_entropy) && !cx->all_rows) || (om_is(n, attention) && !cx->all_tokens))
            s = om_rewrite(cx, forward, om_rewrite_copy, NULL, &own);
    }
    if (s == OM_OK && own) s = om_passes_run(cx, om_passes_variant, &own);
    if (s == OM_OK) s = om_grad_flow(cx, own ? own : forward, wanted, arriving, flow, g);
    if (s == OM_OK) s = om_passes_dump(cx, "grad", own ? own : forward, *g);
    om_graph_free(own);
    OM_TRY(s);
    return om_passes_range(cx, om_passes_joint, 0, *at, g);
}

om_status om_joint_end(om_ctx *cx, int at, const int *group, om_graph **g, om_facts **facts, int *n_segments) {
    int known = at + 1; /* passes from here on know the segments */
    while (om_passes_joint[known - 1] != &om_pass_fuse) known++;
    OM_TRY(om_passes_range(cx, om_passes_joint, at + 1, known, g));
    if (!(*facts = om_facts_new(cx, *g))) return cx->status;
    OM_TRY(segments_assign(cx, *g, *facts, group, n_segments));
    const om_graph *assigned = *g;
    if (cx->device->joins_casts) OM_TRY(om_passes_range(cx, om_passes_joint, known, INT_MAX, g));
    if (*g == assigned) return OM_OK;
    (*g)->n_segments = *n_segments; /* nodes have kept theirs */
    om_free(cx, *facts);
    return (*facts = om_facts_new(cx, *g)) ? OM_OK : cx->status;
}
