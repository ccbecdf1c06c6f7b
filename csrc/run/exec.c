/* exec.c - runs a plan's calls (contract: plan.h). om_run_step cuts them into slices at the host's nodes and gives each
 * to the plan's device; om_run_slice_rows is what a device does with a slice whose operators the host calls one by one:
 * it resolves storages to addresses and calls the rows in order. Knows nothing about threads: kernels share the host's
 * pool through om_parallel_for.
 */
#include "run/plan.h"

#include <stdlib.h>

void *om_run_storage(const om_run *r, const om_storage *s) {
    switch (s->where) {
    case OM_W_ARENA: return r->arena + s->offset;
    case OM_W_INPUT: return r->input[s->index];
    case OM_W_OUTPUT: return r->output[s->index];
    case OM_W_GRAD: return r->grad[s->index];
    case OM_W_LOAN: return r->loan[s->index];
    default: return (void *)s->data;
    }
}

om_tensor om_run_arg(const om_run *r, const om_call *c, int i) {
    const om_parg *a = &c->arg[i];
    om_tensor t = a->t;
    if (a->storage == OM_NONE) return (om_tensor){0};
    t.data = (char *)om_run_storage(r, &r->plan->st[a->storage]) + a->offset;
    return t;
}

static om_status call_run(om_run *r, const om_call *c) {
    om_tensor arg[OM_MAX_ARGS];
    int n = c->n_in + c->n_out;
    if (n > OM_MAX_ARGS)
        return om_fail(r->cx, OM_UNSUPPORTED, "a call with %d operands: at most %d", n, OM_MAX_ARGS);
    for (int i = 0; i < n; i++) {
        arg[i] = om_run_arg(r, c, i);
        if (!arg[i].data && arg[i].dtype && om_numel(&arg[i]) && c->arg[i].storage != OM_NONE)
            return om_fail(r->cx, OM_INTERNAL, "call %d (%s) operand %d has no memory", r->pc,
                           c->node == OM_NONE ? "copy" : r->plan->g->nodes.v[c->node].op->name, i);
    }
    if (c->kind == OM_CALL_COPY) {
        const om_device *d = r->plan->device;
        if (c->write != OM_NONE && r->skip_writes) return OM_OK;
        return d->copy_run ? d->copy_run(r->cx, c->prep, &arg[0], &arg[1]) : d->copy(r->cx, &arg[0], &arg[1]);
    }
    const om_node *node = &r->plan->g->nodes.v[c->node];
    om_args a = {.node = node,
                 .prep = c->prep,
                 .attr = c->attr,
                 .n_attr = node->n_attr,
                 .n_in = c->n_in,
                 .n_out = c->n_out,
                 .in = arg,
                 .out = arg + c->n_in,
                 .scalars = r->scalars,
                 .fault = &r->fault};
    if (c->count.storage != OM_NONE) {
        a.bounded = c->bounded;
        a.past = c->past;
        a.count = (void *)((char *)om_run_storage(r, &r->plan->st[c->count.storage]) + c->count.offset);
    }
    if (c->scratch != OM_NONE) a.scratch = om_run_storage(r, &r->plan->st[c->scratch]);
    if (node->phase == OM_UPDATE && r->skip_writes)
        return om_fail(r->cx, OM_INVALID, "%s: an update cannot be repeated without its writes", node->op->name);
    om_status s = c->row->run(r->cx, &a);
    return s == OM_OK ? om_fault_fail(r->cx, r->plan->g, node, c->attr, &r->fault) : s;
}

/* Debugging: fill arena storages with NaN bytes right after their last use, so that a stale read shows. */
static bool poison(void) {
    static _Atomic int on = -1;
    if (on < 0) on = getenv("ORTMODULE_POISON") != NULL;
    return on;
}

om_status om_run_poison(om_run *r, int pc) {
    if (!poison()) return OM_OK;
    const om_device *d = r->plan->device;
    for (uint32_t i = 0; i < r->plan->n_st; i++) {
        const om_storage *s = &r->plan->st[i];
        if (s->where == OM_W_ARENA && s->last == pc)
            OM_TRY(d->fill(r->cx, r->arena + s->offset, 0xff, (size_t)s->size));
    }
    return OM_OK;
}

void om_run_profile_add(om_run *r, const om_call *c, double ms) {
    om_profile_row *row = &r->profile[c->node == OM_NONE        ? OM_PROFILE_COPY
                                      : c->kind == OM_CALL_COPY ? OM_PROFILE_VIEW_COPY
                                                                : r->plan->g->nodes.v[c->node].op->id];
    row->count++;
    row->ms += ms;
    om_clock *clock = (om_clock *)(void *)(r->profile + OM_N_PROFILE) + (c - r->plan->calls);
    clock->count++;
    clock->ms += ms;
}

om_status om_run_slice_rows(om_run *r, int from, int to) {
    for (r->pc = from; r->pc < to; r->pc++) {
        const om_call *c = r->cx->call = &r->plan->calls[r->pc];
        double t0 = r->profile ? om_now_ms() : 0;
        om_status s = call_run(r, c);
        if (s != OM_OK) {
            if (c->node != OM_NONE && r->cx->status == OM_OK)
                om_fail(r->cx, s, "%s failed", r->plan->g->nodes.v[c->node].op->name);
            return s;
        }
        if (r->profile) om_run_profile_add(r, c, om_now_ms() - t0);
        OM_TRY(om_run_poison(r, r->pc));
    }
    return OM_OK;
}

om_status om_run_step(om_run *r, int stop) {
    const om_plan *p = r->plan;
    int to = r->pc;
    while (to < stop && p->calls[to].kind != OM_CALL_HOST) to++;
    if (to > r->pc) {
        om_status s = p->device->begin(r->cx, p->threads);
        if (s == OM_OK) s = p->device->end(r->cx, p->device->run_slice(r, r->pc, to));
        if (s != OM_OK) return s;
        r->pc = to;
    }
    r->host_due = to < stop;
    return r->host_due ? OM_HOST : OM_OK;
}
