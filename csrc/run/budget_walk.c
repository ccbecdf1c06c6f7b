/* budget_walk.c - a walk from one set of flags to others that need less memory (budget.h).
 *
 * A set of flags is played through on the graph to decide on: one tick per node, in its order, with the clones where
 * remat.c would put them. That gives every storage its first and last tick, so the bytes alive at every tick, and the
 * tick of the peak. What the planner does beside that is followed as far as it decides where the peak is: results in
 * the place of dying operands, outputs that are lent,
 * kernels' working memory. Copies, gaps and fused chains are left out: who wants the number asks the planner.
 *
 * step of the walk looks at the peak. Alive there, and of use only later, are values kept for a backward that has not
 * come to them. Each is a candidate: flagged, it is gone from there, with the other results of its node; what its
 * clone would read and nobody keeps is flagged as well, or kept from now on, whichever gives more bytes for a
 * microsecond. Of those that give about the most, the one is flagged after which the bytes alive are least over all
 * ticks, high ones above all (a sum of eighth powers): neighbours would be computed again at one time. So every step
 * takes away bytes where most are needed, and adds time. It ends when the peak is made of what is in use there.
 *
 * Flags are only ever added, so along a walk time grows, and nothing depends on how much memory is asked for.
 */
#include "run/budget.h"

#include "passes/remat.h"

enum { CLOSURE = 64, TRIES = 12 };  /* nodes that one candidate may add; candidates that are played through */
static const double ABOUT = 0.7;    /* of the best candidate's bytes for a microsecond */

typedef struct live { int32_t first, last; } live;
typedef struct event { om_id node; bool clone; } event;

struct om_walk {
    om_ctx *cx;
    const om_graph *g;
    const om_facts *f;
    om_id nv;
    int64_t *size;             /* per root: bytes */
    double *cost;              /* per node */
    int64_t *scratch;          /* per node: bytes of working memory, operands dense */
    uint8_t *legal;            /* per root: may be flagged, and that would save something */
    uint8_t *block;            /* per root: 1: an output or gradient, which has a block of its own */
    double total;
    /* the flags, and what playing them through has given */
    uint8_t *again;
    live *life;                /* per storage: a root's own, then (nv + root) its clone's */
    int32_t *later;            /* per root: first tick of the backward that reads its own storage; INT32_MAX: none */
    uint8_t *cloned;           /* per node */
    uint8_t *lent;             /* per storage: in an output's block */
    event *event;              /* per tick */
    int64_t *delta;
    int32_t n_ticks, n_forward, peak_at;
    int64_t peak;
    double again_us, high, unit; /* high: sum over ticks of (bytes / unit)^8 */
    double *gives;             /* per root: bytes for a microsecond as a candidate; 0: it is none */
    /* of the candidate at hand */
    uint32_t *mark, stamp;     /* per node */
    om_id stack[CLOSURE], chosen[CLOSURE];
    OM_VEC(om_id) todo;        /* clones to be made */
};

void om_walk_free(om_walk *w) {
    if (!w) return;
    void *all[] = {w->scratch, w->size, w->cost, w->legal, w->block, w->again, w->life,
                   w->later, w->cloned, w->lent, w->event, w->delta, w->gives, w->mark, w->todo.v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) om_free(w->cx, all[i]);
    om_free(w->cx, w);
}

static int64_t walk_bytes(const om_graph *g, om_id v, const int64_t *sym) {
    int64_t n = (int64_t)om_dtype_size(om_ty(g, v)->dtype);
    for (int k = 0; k < om_ty(g, v)->rank; k++) n *= om_dim_eval(g, om_ty(g, v)->dim[k], sym);
    return n;
}

static om_status walk_scratch(om_walk *w, om_arena *mem, om_id id, const int64_t *sym) {
    const om_graph *g = w->g;
    const om_node *n = &g->nodes.v[id];
    const om_row *row = om_row_of(g->cx->device, n->op);
    om_tensor in[OM_MAX_IN] = {0}, out[OM_MAX_OUT];
    om_args a = {.node = n, .n_attr = n->n_attr, .n_in = n->n_in, .n_out = n->n_out, .in = in, .out = out};
    if (!w->f->live[id] || n->op->view || n->op->kind == OM_K_HOST || !row->run) return OM_OK;
    if (n->n_in > OM_MAX_IN || n->n_out > OM_MAX_OUT) return OM_OK;
    OM_TRY(om_attrs_concrete(mem, g, n, sym, &a.attr));
    for (int k = 0; k < n->n_in; k++) {
        if (om_ins(g, n)[k] == OM_NONE) continue;
        OM_TRY(om_tensor_of(w->cx, g, om_ins(g, n)[k], sym, &in[k]));
        in[k].data = NULL;
    }
    for (int k = 0; k < n->n_out; k++) OM_TRY(om_tensor_of(w->cx, g, n->out + (om_id)k, sym, &out[k]));
    w->scratch[id] = row->scratch(w->cx, &a);
    return w->cx->status;
}

om_walk *om_walk_new(om_ctx *cx, const om_graph *g, const om_facts *f, const int64_t *sym) {
    om_walk *w = om_alloc(cx, sizeof *w);
    if (!w) return NULL;
    const size_t nv = g->values.n, nn = g->nodes.n;
    *w = (om_walk){.cx = cx, .g = g, .f = f, .nv = g->values.n,
                   .size = om_alloc(cx, (nv + 1) * sizeof *w->size),
                   .cost = om_alloc(cx, (nn + 1) * sizeof *w->cost),
                   .scratch = om_alloc(cx, (nn + 1) * sizeof *w->scratch),
                   .legal = om_alloc(cx, nv + 1),
                   .block = om_alloc(cx, nv + 1),
                   .again = om_alloc(cx, nv + 1),
                   .life = om_alloc(cx, (2 * nv + 1) * sizeof *w->life),
                   .later = om_alloc(cx, (nv + 1) * sizeof *w->later),
                   .cloned = om_alloc(cx, nn + 1),
                   .lent = om_alloc(cx, 2 * nv + 1),
                   .event = om_alloc(cx, (2 * nn + 1) * sizeof *w->event),
                   .delta = om_alloc(cx, (2 * nn + 3) * sizeof *w->delta),
                   .gives = om_alloc(cx, (nv + 1) * sizeof *w->gives),
                   .unit = 1,
                   .mark = om_alloc(cx, (nn + 1) * sizeof *w->mark)};
    if (cx->status != OM_OK) {
        om_walk_free(w);
        return NULL;
    }
    for (om_id v = 0; v < nv; v++) {
        if (f->root[v] != v) continue;
        w->size[v] = walk_bytes(g, v, sym);
        w->legal[v] = !om_remat_illegal(f, v);
    }
    for (om_id v = 0; v < nv; v++) { /* handed out whole: the root's memory is the block */
        const om_id r = f->root[v];
        if (!(f->held[v] & (OM_HELD_OUTPUT | OM_HELD_GRAD)) || walk_bytes(g, v, sym) != w->size[r]) continue;
        w->block[r] = 1;
        w->legal[r] = 0;
    }
    om_arena mem = {.cx = cx};
    om_status s = OM_OK;
    for (om_id i = 0; i < nn && s == OM_OK; i++) {
        if (f->live[i]) w->total += w->cost[i] = om_remat_cost(g, &g->nodes.v[i], sym);
        s = walk_scratch(w, &mem, i, sym);
    }
    om_arena_free(&mem);
    if (s == OM_OK) return w;
    om_walk_free(w);
    return NULL;
}

/* --- playing a set through ------------------------------------------------------------------------------ */

static void life_use(live *l, int32_t t) {
    if (t < l->first) l->first = t;
    if (t > l->last) l->last = t;
}

/* What a backward node or a clone reads for the memory of v: its storage. */
static om_id walk_storage(const om_walk *w, om_id v) {
    const om_id r = w->f->root[v], n = om_val(w->g, r)->node;
    return n != OM_NONE && w->cloned[n] ? w->nv + r : r;
}

static void walk_tick(om_walk *w, om_id node, bool clone) {
    const om_graph *g = w->g;
    const om_node *n = &g->nodes.v[node];
    const int32_t t = w->n_ticks++;
    w->event[t] = (event){node, clone};
    for (int k = 0; k < n->n_in; k++) {
        const om_id v = om_ins(g, n)[k];
        if (v == OM_NONE) continue;
        const om_id s = n->phase == OM_BACKWARD || clone ? walk_storage(w, v) : w->f->root[v];
        life_use(&w->life[s], t);
        if (s < w->nv && (n->phase == OM_BACKWARD || clone) && t < w->later[s]) w->later[s] = t;
    }
    if (n->op->view) return;
    for (int k = 0; k < n->n_out; k++) life_use(&w->life[(clone ? w->nv : 0) + n->out + (om_id)k], t);
    if (clone) w->cloned[node] = 1, w->again_us += w->cost[node];
}

/* The clones that a read of v needs first. */
static om_status walk_read(om_walk *w, om_id v) {
    const om_graph *g = w->g;
    om_id *next = OM_PUSH(w->cx, &w->todo);
    if (!next) return w->cx->status;
    *next = v;
    while (w->todo.n) {
        const om_id r = w->f->root[w->todo.v[w->todo.n - 1]], node = om_val(g, r)->node;
        if (!w->again[r] || w->cloned[node]) {
            w->todo.n--;
            continue;
        }
        const om_node *n = &g->nodes.v[node];
        int k = 0;
        for (; k < n->n_in; k++) {
            const om_id x = om_ins(g, n)[k], at = x == OM_NONE ? OM_NONE : w->f->root[x];
            if (x == OM_NONE || !w->again[at] || w->cloned[om_val(g, at)->node]) continue;
            if (!(next = OM_PUSH(w->cx, &w->todo))) return w->cx->status;
            *next = x;
            break;
        }
        if (k < n->n_in) continue;
        walk_tick(w, node, true);
        w->todo.n--;
    }
    return OM_OK;
}

/* A result in the place of an operand that dies there, as plan_space.c has it. */
static void walk_in_place(om_walk *w, int32_t t) {
    const om_graph *g = w->g;
    const event *e = &w->event[t];
    const om_node *n = &g->nodes.v[e->node];
    if (n->op->view || n->op->kind == OM_K_HOST || n->n_out < 1) return;
    const om_row *row = om_row_of(g->cx->device, n->op);
    const om_id out = (e->clone ? w->nv : 0) + n->out;
    for (int k = 0; k < n->n_in && k < 32; k++) {
        const om_id v = om_ins(g, n)[k];
        if (v == OM_NONE || !om_row_inplace(row, k)) continue;
        const om_id s = n->phase == OM_BACKWARD || e->clone ? walk_storage(w, v) : w->f->root[v];
        const om_id r = w->f->root[v];
        if (w->life[s].last != t || w->life[s].first == t || w->size[r] != w->size[n->out]) continue;
        if (s < w->nv && !om_maker(g, s)) continue;
        if (s < w->nv && w->block[s]) {
            if (t < w->n_forward || w->block[n->out]) continue;
            w->lent[out] = 1;
        } else {
            w->life[s].last = t - 1;
            w->lent[out] = w->lent[s];
        }
        return;
    }
}

static bool walk_counts(const om_walk *w, om_id storage) {
    const om_id r = storage < w->nv ? storage : storage - w->nv;
    return w->life[storage].last >= 0 && om_maker(w->g, r) && !w->lent[storage] && (storage >= w->nv || !w->block[r]);
}

static om_status walk_play(om_walk *w) {
    const om_graph *g = w->g;
    const size_t nn = g->nodes.n;
    for (om_id s = 0; s < 2 * w->nv; s++) w->life[s] = (live){INT32_MAX, -1};
    for (om_id v = 0; v < w->nv; v++) w->later[v] = INT32_MAX;
    memset(w->cloned, 0, nn + 1);
    memset(w->lent, 0, 2 * (size_t)w->nv + 1);
    memset(w->delta, 0, (2 * nn + 3) * sizeof *w->delta);
    w->n_ticks = 0;
    w->again_us = 0;
    w->todo.n = 0;
    for (om_id i = 0; i < nn; i++)
        if (w->f->live[i] && g->nodes.v[i].phase == OM_FORWARD) walk_tick(w, i, false);
    w->n_forward = w->n_ticks;
    for (uint32_t i = 0; i < g->writes.n; i++) {
        const om_id r = w->f->root[g->writes.v[i].value];
        if (w->life[r].last >= 0 && w->n_forward) life_use(&w->life[r], w->n_forward - 1);
    }
    for (om_id i = 0; i < nn; i++) {
        const om_node *n = &g->nodes.v[i];
        if (!w->f->live[i] || n->phase != OM_BACKWARD) continue;
        for (int k = 0; k < n->n_in; k++)
            if (om_ins(g, n)[k] != OM_NONE) OM_TRY(walk_read(w, om_ins(g, n)[k]));
        walk_tick(w, i, false);
    }
    for (int32_t t = 0; t < w->n_ticks; t++) walk_in_place(w, t);
    for (om_id s = 0; s < 2 * w->nv; s++) {
        if (!walk_counts(w, s)) continue;
        const int64_t size = w->size[s < w->nv ? s : s - w->nv];
        w->delta[w->life[s].first] += size;
        w->delta[w->life[s].last + 1] -= size;
    }
    int64_t now = 0;
    w->peak = w->peak_at = 0;
    w->high = 0;
    for (int32_t t = 0; t < w->n_ticks; t++) {
        now += w->delta[t];
        const int64_t all = now + w->scratch[w->event[t].node];
        const double x = (double)all / w->unit, x2 = x * x, x4 = x2 * x2;
        w->high += x4 * x4;
        if (all > w->peak) w->peak = all, w->peak_at = t;
    }
    return OM_OK;
}

/* --- candidates ----------------------------------------------------------------------------------------- */

/* Is v's memory alive at the peak only for a backward that comes later? */
static bool walk_waits(const om_walk *w, om_id v) {
    const live *l = &w->life[v];
    return walk_counts(w, v) && w->later[v] != INT32_MAX && l->first < w->peak_at && l->last >= w->peak_at &&
           w->later[v] > w->peak_at;
}

typedef struct gain { double bytes, us; int n; } gain; /* n: flags, in w->chosen */

/* Flagging value v of a node of the forward, with what that asks for. n = 0: it gives nothing. */
static gain walk_gain(om_walk *w, om_id v) {
    const om_graph *g = w->g;
    gain sum = {0, 1e-3, 0};
    int n_stack = 0, n_nodes = 0;
    w->stamp++;
    w->stack[n_stack++] = om_val(g, v)->node;
    w->mark[w->stack[0]] = w->stamp;
    while (n_stack) {
        const om_id id = w->stack[--n_stack];
        const om_node *n = &g->nodes.v[id];
        if (!w->cloned[id]) sum.us += w->cost[id];
        n_nodes++;
        for (int k = 0; k < n->n_out; k++) {
            const om_id x = n->out + (om_id)k;
            if (w->f->root[x] != x || !w->legal[x] || w->again[x]) continue;
            if (sum.n == CLOSURE) return (gain){0};
            w->chosen[sum.n++] = x;
            if (walk_waits(w, x)) sum.bytes += (double)w->size[x];
        }
        for (int k = 0; k < n->n_in; k++) {
            if (om_ins(g, n)[k] == OM_NONE) continue;
            const om_id r = w->f->root[om_ins(g, n)[k]], m = om_val(g, r)->node;
            const bool there = m == OM_NONE || w->again[r] || w->block[r] || w->later[r] != INT32_MAX;
            if (there || w->mark[m] == w->stamp) continue;
            const double less = sum.bytes - (double)w->size[r], more = w->cloned[m] ? 0 : w->cost[m];
            const bool keep = less > 0 && less * (sum.us + more) >= sum.bytes * sum.us;
            if (!keep && w->legal[r] && n_nodes + n_stack < CLOSURE) {
                w->mark[m] = w->stamp;
                w->stack[n_stack++] = m;
            } else {
                sum.bytes = less; /* counted once per reader: rather too dear than too cheap */
            }
        }
    }
    return sum.bytes > 0 ? sum : (gain){0};
}

/* Plays the set through with v and what it asks for; w->chosen: which flags that has added. */
static om_status walk_try(om_walk *w, om_id v, int *n) {
    *n = walk_gain(w, v).n;
    for (int i = 0; i < *n; i++) w->again[w->chosen[i]] = 1;
    return walk_play(w);
}

static om_status walk_undo(om_walk *w, int n) {
    for (int i = 0; i < n; i++) w->again[w->chosen[i]] = 0;
    return walk_play(w);
}

/* Flags a candidate at the peak; false: there is none. */
static bool walk_step(om_walk *w) {
    double best = 0, least = 0;
    int64_t about = 0, seen = 0, tried = 0;
    om_id found = OM_NONE;
    int n;
    for (om_id v = 0; v < w->nv; v++) {
        w->gives[v] = 0;
        if (w->f->root[v] != v || !w->legal[v] || w->again[v] || !walk_waits(w, v)) continue;
        const gain one = walk_gain(w, v);
        if (one.n) w->gives[v] = one.bytes / one.us;
        if (w->gives[v] > best) best = w->gives[v];
    }
    if (best <= 0) return false;
    for (om_id v = 0; v < w->nv; v++) about += w->gives[v] >= ABOUT * best;
    for (om_id v = 0; v < w->nv; v++) {
        if (w->gives[v] < ABOUT * best) continue;
        if (about > TRIES && seen++ * TRIES / about < tried) continue; /* of many, some from everywhere */
        tried++;
        if (about > 1 && (walk_try(w, v, &n) != OM_OK)) return false;
        if (found == OM_NONE || w->high < least) found = v, least = w->high;
        if (about > 1 && walk_undo(w, n) != OM_OK) return false;
    }
    return walk_try(w, found, &n) == OM_OK;
}

om_status om_walk_begin(om_walk *w, const uint8_t *again) {
    memcpy(w->again, again, w->nv);
    w->unit = 1;
    OM_TRY(walk_play(w));
    w->unit = w->peak > 0 ? (double)w->peak : 1;
    return OM_OK;
}

bool om_walk_on(om_walk *w, int64_t bytes) {
    const int64_t target = w->peak - bytes;
    while (w->peak > target)
        if (!walk_step(w)) return false;
    return true;
}

const uint8_t *om_walk_flags(const om_walk *w) { return w->again; }
int64_t om_walk_peak(const om_walk *w) { return w->peak; }
double om_walk_cost(const om_walk *w) { return w->again_us; }
double om_walk_total(const om_walk *w) { return w->total; }
