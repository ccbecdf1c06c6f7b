/* budget.c - the fastest set of flags with which a step fits a number of bytes (budget.h).
 *
 * The sets are found once, at the sizes of the first step: walks (budget_walk.c) from what is computed again anyway
 * (level 0) and from whole layers (level 1), a set every STEP-th of the memory they begin with. Each is made a graph
 * and a plan, whose memory is what a step takes: no estimate. A set stays if no faster one takes as little.
 *
 * None of it depends on what is asked for. So of two budgets the larger one never gets the slower set, and the smallest
 * one that can be met is known. Other sizes ask the same sets' plans at those sizes, fastest first, and walk again
 * where none fits.
 */
#include "run/budget.h"

#include "passes/remat.h"

#include <stdlib.h>

enum { STEP = 40, MAX_SETS = 24 };

typedef struct om_budget_set {
    uint8_t *again;
    double us;                 /* of what is computed twice, at the sizes looked at last */
    om_memory memory;          /* as well */
    om_graph *g;               /* the variant's graph, */
    om_facts *f;               /* its facts; NULL: made when asked for */
} set;

static void set_graph_free(om_ctx *cx, set *s) {
    om_free(cx, s->f);
    om_graph_free(s->g);
    s->f = NULL, s->g = NULL;
}

static void set_free(om_ctx *cx, set *s) {
    set_graph_free(cx, s);
    om_free(cx, s->again);
}

static void sets_free(om_budget *b) {
    for (uint32_t i = 0; i < b->set.n; i++) set_free(b->cx, &b->set.v[i]);
    om_free(b->cx, b->set.v);
    b->set.v = NULL;
    b->set.n = b->set.cap = 0;
}

void om_budget_free(om_budget *b) {
    if (!b) return;
    sets_free(b);
    om_free(b->cx, b->f);
    om_graph_free(b->g);
    om_free(b->cx, b->wanted);
    om_free(b->cx, b->arriving);
    om_free(b->cx, b->group);
    om_free(b->cx, b);
}

bool om_budget_is(const om_budget *b, const uint8_t *wanted, const uint8_t *arriving, const int *group) {
    return !memcmp(b->wanted, wanted, b->n_inputs) && !memcmp(b->arriving, arriving, b->n_outputs) &&
           !b->group == !group && (!group || !memcmp(b->group, group, b->n_inputs * sizeof *group));
}

om_status om_budget_new(om_ctx *cx, const om_graph *forward, const uint8_t *wanted, const uint8_t *arriving,
                        const int *group, om_budget **out) {
    const uint32_t n_in = forward->inputs.n, n_out = forward->outputs.n;
    om_budget *b = *out = om_alloc(cx, sizeof *b);
    if (!b) return cx->status;
    *b = (om_budget){.cx = cx,
                     .n_inputs = n_in,
                     .n_outputs = n_out,
                     .wanted = om_alloc(cx, n_in + 1),
                     .arriving = om_alloc(cx, n_out + 1),
                     .group = group ? om_alloc(cx, (n_in + 1) * sizeof *group) : NULL};
    if (cx->status != OM_OK) return cx->status;
    memcpy(b->wanted, wanted, n_in);
    memcpy(b->arriving, arriving, n_out);
    if (group) memcpy(b->group, group, n_in * sizeof *group);
    om_flow flow = {0};
    om_status s = om_joint_begin(cx, forward, wanted, arriving, &flow, &b->g, &b->at);
    om_flow_free(cx, &flow);
    if (s == OM_OK && !(b->f = om_facts_new(cx, b->g))) s = cx->status;
    return s;
}

/* --- sets ------------------------------------------------------------------------------------------------ */

/* The memory of a step with this set at these sizes, and its time. */
static om_status set_measure(om_budget *b, set *s, const om_tensor *in, om_walk *w) {
    om_ctx *cx = b->cx;
    om_plan *p = NULL;
    int n;
    OM_TRY(om_walk_begin(w, s->again));
    s->us = om_walk_cost(w);
    if (!s->g) {
        OM_TRY(om_remat_apply(cx, b->f, s->again, &s->g));
        OM_TRY(om_joint_end(cx, b->at, b->group, &s->g, &s->f, &n));
    }
    OM_TRY(om_plan_make(cx, s->f, in, &p));
    s->memory = om_plan_memory(b->host, p);
    om_plan_free(cx, p);
    return OM_OK;
}

/* A set of these flags behind the others, unless there is one: *new is false then. */
static om_status set_add(om_budget *b, const uint8_t *again, const om_tensor *in, om_walk *measure, bool *new) {
    om_ctx *cx = b->cx;
    *new = false;
    for (uint32_t i = 0; i < b->set.n; i++)
        if (!memcmp(b->set.v[i].again, again, b->g->values.n)) return OM_OK;
    set *s = OM_PUSH(cx, &b->set);
    if (!s) return cx->status;
    *s = (set){.again = om_alloc(cx, (size_t)b->g->values.n + 1)};
    if (!s->again) return cx->status;
    memcpy(s->again, again, b->g->values.n);
    *new = true;
    return set_measure(b, s, in, measure);
}

static int set_order(const void *a, const void *b) { /* faster first; as fast: smaller first */
    const set *x = a, *y = b;
    if (x->us != y->us) return x->us < y->us ? -1 : 1;
    return x->memory.peak < y->memory.peak ? -1 : x->memory.peak > y->memory.peak;
}

/* By time, without those that take as much as a faster one. Of more than MAX_SETS, evenly over the memory. */
static void sets_sort(om_budget *b) {
    uint32_t n = 1;
    set *v = b->set.v;
    qsort(v + 1, b->set.n - 1, sizeof *v, set_order); /* level 0 is the fastest: nothing is computed again for memory */
    for (uint32_t i = 1; i < b->set.n; i++) {
        if (v[i].memory.peak < v[n - 1].memory.peak) {
            const set keep = v[n];
            v[n] = v[i];
            if (n != i) v[i] = keep;
            n++;
        }
    }
    for (uint32_t i = n; i < b->set.n; i++) set_free(b->cx, &v[i]);
    b->set.n = n;
    while (b->set.n > MAX_SETS) { /* whose neighbours lie closest */
        uint32_t at = 1;
        int64_t close = INT64_MAX;
        for (uint32_t i = 1; i + 1 < b->set.n; i++) {
            const int64_t gap = v[i - 1].memory.peak - v[i + 1].memory.peak;
            if (gap < close) close = gap, at = i;
        }
        set_free(b->cx, &v[at]);
        memmove(v + at, v + at + 1, (b->set.n - at - 1) * sizeof *v);
        b->set.n--;
    }
}

/* Walks from a policy's set; `anyway`: also when that set is known, so has been walked from at some sizes. */
static om_status walk_from(om_budget *b, om_recompute policy, bool anyway, const om_tensor *in, om_walk *walk,
                           om_walk *measure) {
    om_ctx *cx = b->cx;
    uint8_t *again = om_alloc(cx, (size_t)b->g->values.n + 1);
    bool new = false, more = true, added;
    om_status s = again ? om_remat_policies[policy].choose(cx, &(om_remat_ask){b->g, b->f}, again) : cx->status;
    if (s == OM_OK) s = set_add(b, again, in, measure, &new);
    if (s == OM_OK) s = om_walk_begin(walk, again);
    const int64_t step = om_walk_peak(walk) / STEP + 1;
    while (s == OM_OK && (new || anyway) && more) {
        more = om_walk_on(walk, step);
        if ((s = cx->status) == OM_OK) s = set_add(b, om_walk_flags(walk), in, measure, &added);
    }
    om_free(cx, again);
    return s;
}

/* --- a budget -------------------------------------------------------------------------------------------- */

typedef struct look { const om_tensor *in; om_walk *walk, *measure; int64_t bytes; om_fit *fit; } look;

/* The first set from `from` on that fits, with `plans` made at these sizes; b->set.n: none. */
static om_status look_through(om_budget *b, look *l, uint32_t from, bool plans, uint32_t *found) {
    for (*found = from; *found < b->set.n; (*found)++) {
        set *s = &b->set.v[*found];
        if (plans) OM_TRY(set_measure(b, s, l->in, l->measure));
        if (s->memory.peak < l->fit->least) l->fit->least = s->memory.peak;
        if (s->memory.peak <= l->bytes) return OM_OK;
    }
    return OM_OK;
}

static om_status fit_find(om_budget *b, look *l, double share, uint32_t *found) {
    bool new = false;
    if (b->set.n) {
        OM_TRY(set_measure(b, &b->set.v[0], l->in, l->measure));
    } else {
        uint8_t *again = om_alloc(b->cx, (size_t)b->g->values.n + 1);
        om_status s = again ? om_remat_policies[0].choose(b->cx, &(om_remat_ask){b->g, b->f}, again) : b->cx->status;
        if (s == OM_OK) s = set_add(b, again, l->in, l->measure, &new);
        om_free(b->cx, again);
        OM_TRY(s);
    }
    l->fit->most = l->fit->least = b->set.v[0].memory.peak;
    l->fit->step_us = om_walk_total(l->walk) + b->set.v[0].us;
    if (l->bytes < 0) l->bytes = (int64_t)(share * (double)l->fit->most);
    *found = 0;
    if (l->fit->most <= l->bytes) return OM_OK;
    if (b->set.n == 1) {
        for (int i = 0; i < OM_N_RECOMPUTE; i++)
            OM_TRY(walk_from(b, (om_recompute)i, i == OM_RECOMPUTE_CHEAP, l->in, l->walk, l->measure));
        sets_sort(b);
        return look_through(b, l, 1, false, found);
    }
    for (uint32_t i = 1; i < b->set.n; i++) { /* other sizes, other times */
        OM_TRY(om_walk_begin(l->measure, b->set.v[i].again));
        b->set.v[i].us = om_walk_cost(l->measure);
    }
    qsort(b->set.v + 1, b->set.n - 1, sizeof *b->set.v, set_order);
    OM_TRY(look_through(b, l, 1, true, found));
    if (*found < b->set.n) return OM_OK;
    OM_TRY(walk_from(b, OM_RECOMPUTE_CHEAP, true, l->in, l->walk, l->measure)); /* these may need other sets */
    sets_sort(b);
    return look_through(b, l, 1, false, found);
}

om_status om_budget_fit(om_ctx *host, om_budget *b, const om_tensor *inputs, int64_t bytes, double share,
                        om_fit *fit, const uint8_t **again) {
    om_ctx *cx = b->cx;
    b->host = host;
    *fit = (om_fit){.variant = -1};
    *again = NULL;
    look l = {.in = inputs, .bytes = bytes, .fit = fit};
    uint32_t found = 0;
    int64_t *sym = om_alloc(cx, (b->g->syms.n + 1) * sizeof *sym);
    om_status s = sym ? om_syms_bind(cx, b->g, inputs, sym) : cx->status;
    if (s == OM_OK && (!(l.walk = om_walk_new(cx, b->g, b->f, sym)) ||
                       !(l.measure = om_walk_new(cx, b->g, b->f, sym))))
        s = cx->status;
    if (s == OM_OK) s = fit_find(b, &l, share, &found);
    if (s == OM_OK) fit->bytes = l.bytes;
    if (s == OM_OK && found < b->set.n) {
        const double more = b->set.v[found].us - b->set.v[0].us;
        fit->memory = b->set.v[found].memory;
        fit->again_us = more > 0 ? more : 0;
        *again = b->set.v[found].again;
    }
    if (s != OM_OK) sets_free(b); /* half of them: the next call begins again */
    om_walk_free(l.measure);
    om_walk_free(l.walk);
    om_free(cx, sym);
    return s;
}
