/* remat_choose.c - which values backward computes again (remat.h): the policies, one row each at the end.
 *
 * cheap (memory level 0). Gelu comes from the linear layer's output that its gradient reads anyway, a normalisation
 * from its input, a cast, a dropout (its mask comes from a counter), chosen rows from all rows (compress). Such values
 * are most of what a transformer's forward leaves behind, and computing them costs one sweep over memory.
 *
 *   kept         a forward value whose memory backward reads
 *                (of a value in half precision that backward reads in f32, or what is computed from it: that itself)
 *   computable   a graph input, a kept value that stays, or a cheap operator on computable values (at most DEPTH deep)
 *   wanted       kept, made by a cheap operator on computable values; outputs, writes and gradients exist anyway:
 *                backward reads those
 *
 * Casts of graph inputs stay: one low-precision copy of a weight serves the whole step.
 *
 * layers (memory level 1): cheap, and the low-precision copies of parameters (autocast), half of what these take:
 * backward then reads the parameter, and whoever runs it sees to it that it has not changed; and whole transformer
 * layers, whatever their operators cost:
 *
 *   boundary     the input of a norm whose result reaches an attention before another norm: where a layer begins. It is
 *                kept.
 *   layer        a forward node that reads a boundary, directly or not, and that a later boundary needs. The last layer
 *                is none: backward begins with it, so forgetting its values would save nothing at the peak.
 *
 * What backward reads of a layer is computed again from the boundary before it. Left alone: nodes of the host, and
 * nodes that read an input which the forward overwrites. This is gradient checkpointing
 * (https://arxiv.org/abs/1604.06174) at the boundaries onnxruntime-training used.
 *
 * checkpoints (torch.utils.checkpoint in the user's code: om_region), with either policy:
 *
 *   inside       a value that a forward node of a checkpoint computes and that may be computed again. All are wanted
 *   asked        an inside value that backward needs outside of the (outermost) checkpoint: what PyTorch keeps as the
 *                checkpoint's result, or the input of another. It is kept, or computed as if there were no checkpoint
 *                around it, but never from what is inside: that would be there from then on.
 *
 * Either way the wanted values come first; then, from the last node to the first, what they need that nobody keeps is
 * flagged too. So what only the next boundary needs (the last product of a layer) is not computed twice.
 */
#include "graph/sabotage.h"
#include "passes/remat.h"

enum { DEPTH = 4 };

typedef struct choice {
    const om_graph *g;
    const om_facts *f;
    /* per value, at roots: backward reads it, or it is a boundary; exists anyway; wanted */
    uint8_t *kept, *fixed, *wanted;
    uint8_t *written;              /* per value: a graph input that the forward writes */
    bool layers;
    uint8_t *boundary;             /* per value; layers */
    uint8_t *layer;                /* per node: of a layer; layers */
    uint8_t *inside, *asked;       /* per value, at roots; checkpoints. inside NULL: there are none */
    uint8_t *needed;               /* per value, at roots: backward or what it computes again reads it */
} choice;

static bool choice_cheap(const om_node *n) {
    return n->op->kind == OM_K_POINTWISE || om_is(n, layer_norm) || om_is(n, rms_norm) || om_is(n, dropout) ||
           om_is(n, compress);
}

/* v, at a root, is there in backward when its checkpoint is, and not before. */
static bool choice_hidden(const choice *c, om_id v) { return c->inside && c->inside[v] && !c->asked[v]; }

static bool choice_computable(const choice *c, om_id v, int depth) {
    const om_graph *g = c->g;
    v = c->f->root[v];
    const om_node *n = om_maker(g, v);
    if (choice_hidden(c, v)) return false;
    if (!n) return !c->written[v] || om_sabotage("remat.written");
    if (n->phase != OM_FORWARD) return false;
    const bool there = c->kept[v] || c->fixed[v];
    if (there || om_sabotage("remat.computable")) return true;
    if (depth == 0 || v != n->out || !choice_cheap(n)) return false;
    for (int k = 0; k < n->n_in; k++)
        if (om_ins(g, n)[k] != OM_NONE && !choice_computable(c, om_ins(g, n)[k], depth - 1)) return false;
    return true;
}

/* A parameter in low precision. */
static bool choice_copy(const om_graph *g, const om_node *n) {
    const om_id x = om_ins(g, n)[0];
    return om_is(n, cast) && om_val(g, x)->role == OM_PARAM && om_is_half(om_ty(g, n->out)->dtype) &&
           !om_is_half(om_ty(g, x)->dtype);
}

static bool choice_wants(const choice *c, const om_node *n) {
    const om_graph *g = c->g;
    if (n->phase != OM_FORWARD || n->op->view || !choice_cheap(n) || !c->kept[n->out]) return false;
    bool computed = c->layers && choice_copy(g, n); /* from more than graph inputs */
    for (int k = 0; k < n->n_in; k++) {
        om_id v = om_ins(g, n)[k];
        if (v == OM_NONE) continue;
        if (!choice_computable(c, v, DEPTH)) return false;
        computed |= om_maker(g, c->f->root[v]) != NULL;
    }
    return computed;
}

/* The value in half precision of which v is a copy in f32, or that elementwise operators compute v from, with
 * constants alone beside it (an activation that is computed in f32 and rounded last); OM_NONE: there is none, or more
 * than one. */
static om_id choice_half(const om_graph *g, om_id v, int depth, bool *constant) {
    const om_node *n = om_maker(g, v);
    om_id x = OM_NONE;
    *constant = om_val(g, v)->role == OM_CONST;
    if (!n || n->phase != OM_FORWARD || n->op->kind != OM_K_POINTWISE || depth == 0) return OM_NONE;
    const om_id *in = om_ins(g, n);
    if (om_is(n, cast) && om_is_half(om_ty(g, in[0])->dtype) && om_ty(g, v)->dtype == OM_F32) return in[0];
    for (int k = 0; k < n->n_in; k++) {
        bool number;
        const om_id y = choice_half(g, in[k], depth - 1, &number);
        if (number) continue;
        if (y == OM_NONE || (x != OM_NONE && x != y)) return OM_NONE;
        x = y;
    }
    return x;
}

/* In f32 what the forward has in half precision, and nobody keeps: that is kept instead, half the bytes. */
static void choice_narrow(choice *c, const om_node *n) {
    om_graph *g = (om_graph *)c->g; /* may intern sizes */
    if (n->phase != OM_FORWARD || n->n_out != 1 || !c->kept[n->out] || c->fixed[n->out] ||
        om_ty(g, n->out)->dtype != OM_F32)
        return;
    bool constant;
    const om_id x = choice_half(g, n->out, DEPTH, &constant);
    if (x == OM_NONE || om_dim_numel(g, om_ty(g, x)) != om_dim_numel(g, om_ty(g, n->out))) return;
    const om_id root = c->f->root[x];
    const om_node *m = om_maker(g, root);
    const bool all = om_dim_numel(g, om_ty(g, x)) == om_dim_numel(g, om_ty(g, root));
    if (!m || m->phase != OM_FORWARD || !all || c->written[root] || choice_computable(c, x, DEPTH)) return;
    if (c->inside && (c->inside[root] || c->inside[n->out])) return;
    c->kept[root] = 1;
}

/* --- layers ---------------------------------------------------------------------------------------- */

static bool choice_norm(const om_node *n) { return om_is(n, layer_norm) || om_is(n, rms_norm); }

static void layers_begin(choice *c, uint8_t *attends /* per value: an attention reads it before a norm does */) {
    const om_graph *g = c->g;
    for (om_id i = g->nodes.n; i-- > 0;) {
        const om_node *n = &g->nodes.v[i];
        if (n->phase != OM_FORWARD) continue;
        bool hit = om_is(n, attention) || om_is(n, softmax);
        for (int k = 0; k < n->n_out; k++) hit |= attends[n->out + (om_id)k];
        if (hit && choice_norm(n)) c->boundary[c->f->root[om_ins(g, n)[0]]] = 1;
        if (!hit || choice_norm(n)) continue;
        for (int k = 0; k < n->n_in; k++)
            if (om_ins(g, n)[k] != OM_NONE) attends[om_ins(g, n)[k]] = 1;
    }
}

static void layers_extend(choice *c, uint8_t *after /* per value: it depends on a boundary */,
                          uint8_t *before /* a boundary depends on it */) {
    const om_graph *g = c->g;
    const om_id *root = c->f->root;
    for (om_id i = g->nodes.n; i-- > 0;) {
        const om_node *n = &g->nodes.v[i];
        bool needed = false;
        for (int k = 0; k < n->n_out; k++) needed |= before[n->out + (om_id)k] || c->boundary[n->out + (om_id)k];
        for (int k = 0; k < n->n_in && needed && n->phase == OM_FORWARD; k++)
            if (om_ins(g, n)[k] != OM_NONE) before[om_ins(g, n)[k]] = 1;
    }
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        bool follows = false, ahead = false, stale = false;
        for (int k = 0; k < n->n_in; k++) {
            om_id v = om_ins(g, n)[k];
            if (v == OM_NONE) continue;
            follows |= after[v] || c->boundary[root[v]];
            stale |= c->written[root[v]];
        }
        for (int k = 0; k < n->n_out; k++) {
            after[n->out + (om_id)k] = follows;
            ahead |= before[n->out + (om_id)k];
        }
        const bool between = follows && ahead && n->phase == OM_FORWARD && n->op->kind != OM_K_HOST;
        c->layer[i] = between && (!stale || om_sabotage("layers.written"));
    }
}

static bool layers_inside(const choice *c, om_id v) { /* made inside a layer and not where the next begins */
    om_id n = om_val(c->g, v)->node;
    return n != OM_NONE && c->layer[n] && !c->boundary[v];
}

static om_status layers_find(om_ctx *cx, choice *c) {
    size_t n = (size_t)c->g->values.n + 1;
    uint8_t *attends = om_alloc(cx, n), *after = om_alloc(cx, n), *before = om_alloc(cx, n);
    c->boundary = om_alloc(cx, n);
    c->layer = om_alloc(cx, (size_t)c->g->nodes.n + 1);
    om_status s = attends && after && before && c->boundary && c->layer ? OM_OK : cx->status;
    if (s == OM_OK) {
        layers_begin(c, attends);
        layers_extend(c, after, before);
        for (om_id v = 0; v < c->g->values.n; v++) {
            if (c->kept[v] && layers_inside(c, v)) c->wanted[v] = 1;
            if (c->boundary[v]) c->kept[v] = 1, c->wanted[v] = 0;
        }
    }
    om_free(cx, attends);
    om_free(cx, after);
    om_free(cx, before);
    return s;
}

/* --- checkpoints ----------------------------------------------------------------------------------- */

/* Does somebody in a checkpoint, or outside of any, ask for what another one has computed? */
static void regions_ask(choice *c, const om_node *by, om_id v) {
    v = c->f->root[v];
    if (c->inside && c->inside[v] && !om_region_common(om_region(c->g, om_maker(c->g, v)), om_region(c->g, by)))
        c->asked[v] = 1;
}

static om_status regions_find(om_ctx *cx, choice *c) {
    const om_graph *g = c->g;
    bool any = false;
    for (uint32_t i = 0; i < g->scopes.n; i++) any |= g->scopes.v[i].region != NULL;
    if (!any || om_sabotage("remat.region")) return OM_OK;
    c->inside = om_alloc(cx, (size_t)g->values.n + 1);
    c->asked = om_alloc(cx, (size_t)g->values.n + 1);
    if (!c->inside || !c->asked) return cx->status;
    for (om_id v = 0; v < g->values.n; v++)
        c->inside[v] = c->f->root[v] == v && om_region(g, om_maker(g, v)) && !c->fixed[v] && !om_remat_illegal(c->f, v);
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        for (int k = 0; k < n->n_in && n->phase == OM_BACKWARD && !n->op->view && c->f->live[i]; k++)
            if (om_ins(g, n)[k] != OM_NONE) regions_ask(c, n, om_ins(g, n)[k]);
    }
    return OM_OK;
}

/* --- from wanted values to flags ------------------------------------------------------------------- */

/* Somebody needs v in the backward: is it computed again, rather than kept? */
static bool choice_again(const choice *c, om_id v) {
    const om_node *n = om_maker(c->g, v);
    if (!n || n->phase != OM_FORWARD || c->fixed[v]) return false;
    if (choice_hidden(c, v)) return true;
    if (c->wanted[v]) return true;
    if (c->kept[v]) return false;
    /* a layer's value goes with its layer; of others only what is cheap, as wanted values have counted on: the rest is
     * kept from now on */
    if (c->layer && layers_inside(c, v)) return true;
    return (!c->layer && !c->inside) || choice_computable(c, v, DEPTH);
}

static void choice_close(choice *c, uint8_t *again) {
    const om_graph *g = c->g;
    for (om_id v = 0; v < g->values.n; v++) c->needed[v] = c->f->root[v] == v && c->kept[v];
    for (om_id i = g->nodes.n; i-- > 0;) {
        const om_node *n = &g->nodes.v[i];
        bool made = false;
        for (int k = 0; k < n->n_out && !n->op->view; k++) {
            const om_id v = n->out + (om_id)k;
            made |= again[v] = c->needed[v] && choice_again(c, v);
        }
        for (int k = 0; k < n->n_in && made; k++) {
            if (om_ins(g, n)[k] == OM_NONE) continue;
            c->needed[c->f->root[om_ins(g, n)[k]]] = 1;
            regions_ask(c, n, om_ins(g, n)[k]);
        }
    }
}

/* v is handed out. Of a view of a part (keys and values inside a joint projection) a copy is; what it is a part of need
 * not stay. */
static void choice_fix(choice *c, om_id v) {
    om_graph *g = (om_graph *)c->g; /* may intern sizes */
    const om_id root = c->f->root[v];
    if (om_dim_numel(g, om_ty(g, v)) == om_dim_numel(g, om_ty(g, root))) c->fixed[root] = 1;
}

static om_status choose(om_ctx *cx, const om_remat_ask *ask, bool layers, uint8_t *again) {
    const om_graph *g = ask->g;
    size_t n = (size_t)g->values.n + 1;
    choice c = {.g = g,
                .f = ask->f,
                .layers = layers,
                .kept = om_alloc(cx, n),
                .fixed = om_alloc(cx, n),
                .wanted = om_alloc(cx, n),
                .written = om_alloc(cx, n),
                .needed = om_alloc(cx, n)};
    om_status s = c.kept && c.fixed && c.wanted && c.written && c.needed ? OM_OK : cx->status;
    if (s == OM_OK) {
        for (om_id v = 0; v < g->values.n; v++) {
            c.kept[v] = c.f->root[v] == v && om_last_holder(c.f, v, OM_BACKWARD) != OM_NONE;
            if (c.f->held[v]) choice_fix(&c, v);
        }
        for (uint32_t i = 0; i < g->writes.n; i++) c.written[g->inputs.v[g->writes.v[i].input]] = 1;
        s = regions_find(cx, &c);
    }
    for (om_id i = 0; i < g->nodes.n && s == OM_OK; i++) choice_narrow(&c, &g->nodes.v[i]);
    for (om_id i = 0; i < g->nodes.n && s == OM_OK; i++) {
        if (choice_wants(&c, &g->nodes.v[i])) c.wanted[g->nodes.v[i].out] = 1;
    }
    if (s == OM_OK && layers) s = layers_find(cx, &c);
    if (s == OM_OK) choice_close(&c, again);
    om_free(cx, c.boundary);
    om_free(cx, c.layer);
    om_free(cx, c.inside);
    om_free(cx, c.asked);
    om_free(cx, c.kept);
    om_free(cx, c.fixed);
    om_free(cx, c.wanted);
    om_free(cx, c.written);
    om_free(cx, c.needed);
    return s;
}

static om_status choose_cheap(om_ctx *cx, const om_remat_ask *a, uint8_t *again) { return choose(cx, a, false, again); }
static om_status choose_layers(om_ctx *cx, const om_remat_ask *a, uint8_t *again) { return choose(cx, a, true, again); }

const om_remat_policy om_remat_policies[OM_N_RECOMPUTE] = {
    [OM_RECOMPUTE_CHEAP] = {"cheap", choose_cheap},
    [OM_RECOMPUTE_LAYERS] = {"layers", choose_layers},
};
