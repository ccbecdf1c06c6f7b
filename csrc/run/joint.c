/* joint.c - from a forward graph to the graph of a variant: gradients, what is computed again, segments.
 *
 *   begin     om_passes_variant on a copy of the forward; gradients for what is wanted and arrives, and the passes of
 *             om_passes_joint before `remat`: the graph on which what is computed again is decided
 *   end       the passes behind it, and segments
 */
#include "run/joint.h"

#include "graph/sabotage.h"
#include "passes/passes.h"

#include <limits.h>

/* Each backward node runs in the first segment that needs it, and not after the segment that hands out the gradient of
 * a graph input whose memory it reads: who has the gradient may change the tensor at once (an optimizer step in a
 * hook). */
static om_status segments_assign(om_ctx *cx, om_graph *g, const om_id *root, const int *group, int *n_segments) {
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
    OM_TRY(om_passes_range(cx, om_passes_joint, at + 1, INT_MAX, g));
    if (!(*facts = om_facts_new(cx, *g))) return cx->status;
    return segments_assign(cx, *g, (*facts)->root, group, n_segments);
}
