/* plan_calls.c - a plan's first sweep: sizes become numbers; views become (storage, offset, strides); copies where an
 * operator needs a dense operand or a view is impossible; write-backs; backward calls in the order of segments.
 */
#include "graph/sabotage.h"
#include "run/planner.h"

uint32_t om_plan_storage(planner *pl, om_where where, int64_t size, uint32_t index) {
    om_storage *s = OM_PUSH(pl->cx, &pl->st);
    if (!s) return OM_NONE;
    *s = (om_storage){.size = size, .first = INT32_MAX, .last = -1, .where = (uint8_t)where, .index = index};
    return pl->st.n - 1;
}

static om_parg arg_of(const place *pc) { return (om_parg){pc->t, pc->st, pc->offset}; }

static om_call *call_new(planner *pl, om_call_kind kind, om_id node, int n_in, int n_out) {
    om_call *c = OM_PUSH(pl->cx, &pl->calls);
    om_parg *arg = c ? om_arena_alloc(&pl->p->mem, (size_t)(n_in + n_out) * sizeof *arg) : NULL;
    if (!arg) return NULL;
    *c = (om_call){.kind = (uint8_t)kind,
                   .n_in = (uint16_t)n_in,
                   .n_out = (uint16_t)n_out,
                   .node = node,
                   .write = OM_NONE,
                   .arg = arg,
                   .scratch = OM_NONE,
                   .count = {.storage = OM_NONE}};
    return c;
}

static om_status copy_call(planner *pl, const place *from, const place *to) {
    om_call *c = call_new(pl, OM_CALL_COPY, OM_NONE, 1, 1);
    if (!c) return pl->cx->status;
    c->arg[0] = arg_of(from);
    c->arg[1] = arg_of(to);
    return OM_OK;
}

/* a dense copy of `from` in a new arena storage */
static om_status dense_copy(planner *pl, const place *from, place *to) {
    *to = *from;
    om_dense_strides(&to->t);
    to->offset = 0;
    if ((to->st = om_plan_storage(pl, OM_W_ARENA, om_tensor_bytes(&to->t), 0)) == OM_NONE) return pl->cx->status;
    return copy_call(pl, from, to);
}

static om_status plan_view(planner *pl, om_id id, const om_attr *attr) {
    const om_node *n = &pl->g->nodes.v[id];
    place *out = &pl->val[n->out], src = pl->val[om_ins(pl->g, n)[0]];
    om_args a = {
        .node = n, .attr = attr, .n_attr = n->n_attr, .n_in = n->n_in, .n_out = 1, .in = &src.t, .out = &out->t};
    int64_t offset = 0;
    if (!n->op->view(&a, &src.t, &out->t, &offset)) {
        place dense;
        OM_TRY(dense_copy(pl, &src, &dense));
        pl->calls.v[pl->calls.n - 1].node = id; /* whose copy it is, for reports */
        src = dense;
        if (!n->op->view(&a, &src.t, &out->t, &offset))
            return om_fail(pl->cx, OM_INVALID, "%s: not for these sizes", n->op->name);
    }
    out->st = src.st;
    if (offset && om_sabotage("plan.view")) offset = 0;
    out->offset = src.offset + offset * (int64_t)om_dtype_size(out->t.dtype);
    return OM_OK;
}

/* Is update node `id` the last to need what graph input v held before the run? */
static bool needed_until(const planner *pl, om_id v, om_id id) {
    const uint8_t held = pl->f->root_held[v];
    const bool handed_out = held & OM_HELD_OUTPUT, stored = held & OM_HELD_WRITE;
    if ((handed_out && !om_sabotage("plan.state_output")) || (stored && !om_sabotage("plan.state_write"))) return false;
    return om_last_holder(pl->f, v, OM_UPDATE) == id;
}

/* Output k of an update node: may it be computed in the memory of the graph input that it is written back to?
 * (plan.h) */
static bool state_in_place(const planner *pl, om_id id, int k, om_id *input) {
    const om_graph *g = pl->g;
    const om_node *n = &g->nodes.v[id];
    const om_id *in = om_ins(g, n);
    int j = n->op->state ? n->op->state(n, k) : -1, writes = 0;
    if (j < 0 || in[j] == OM_NONE || om_val(g, in[j])->input == OM_NONE) return false;
    *input = om_val(g, in[j])->input;
    for (uint32_t i = 0; i < g->writes.n; i++)
        if (g->writes.v[i].input == *input) writes += g->writes.v[i].value == n->out + (om_id)k ? 1 : 2;
    if ((writes != 1 && !om_sabotage("plan.state_writes")) ||
        (!needed_until(pl, in[j], id) && !om_sabotage("plan.state_until")))
        return false;
    for (int i = 0; i < n->n_in; i++)
        if (i != j && in[i] != OM_NONE && pl->f->root[in[i]] == in[j] && !om_sabotage("plan.state_operand"))
            return false;
    return om_is_dense(&pl->val[in[j]].t);
}

/* A symbolic graph has chosen which operand's size the result has; another call may bring a 1 there. Known here, before
 * anything is computed. */
static om_status operands_fit(const planner *pl, const om_node *n) {
    const om_tensor *out = &pl->val[n->out].t;
    for (int i = 0; i < n->n_in; i++) {
        const om_tensor *t = &pl->val[om_ins(pl->g, n)[i]].t;
        const int lead = out->rank - t->rank;
        for (int k = 0; k < t->rank; k++)
            if (lead < 0 || (t->dim[k] != 1 && t->dim[k] != out->dim[lead + k]))
                return om_fail(pl->cx, OM_INVALID,
                               "%s: operand %d has size %lld on axis %d, the graph's result %lld: these sizes need a "
                               "capture of their own",
                               n->op->name, i, (long long)t->dim[k], k, (long long)(lead < 0 ? 0 : out->dim[lead + k]));
    }
    return OM_OK;
}

/* Which operands and outputs of node `id` have a bounded axis, and where the count lies if it is there by then. */
static om_status count_find(planner *pl, om_id id, om_call *c) {
    const om_graph *g = pl->g;
    const om_node *n = &g->nodes.v[id];
    om_id count = OM_NONE;
    int8_t *axis = om_arena_alloc(&pl->p->mem, (size_t)n->n_in + n->n_out + 1);
    if (!axis) return pl->cx->status;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const om_id v = i < n->n_in ? om_ins(g, n)[i] : n->out + (om_id)(i - n->n_in);
        om_dim size;
        axis[i] = v == OM_NONE ? -1 : (int8_t)om_bounded_axis(g, om_ty(g, v), &size);
        if (axis[i] >= 0) count = g->syms.v[g->exprs.v[~size].a].count;
    }
    const om_node *made = count == OM_NONE ? NULL : om_maker(g, count);
    if (!made || made->phase != OM_FORWARD || om_val(g, count)->node >= id) return OM_OK;
    c->bounded = axis;
    c->count = arg_of(&pl->val[count]);
    for (int i = 0; i < n->n_out; i++) c->past |= pl->past[n->out + (om_id)i] != 0;
    return OM_OK;
}

/* Of which values does somebody read what lies past the count? Readers come after what they read. */
static om_status past_find(planner *pl) {
    om_graph *g = (om_graph *)pl->g; /* rules may intern sizes */
    pl->past = om_alloc(pl->cx, (size_t)g->values.n + 1);
    pl->beside = om_alloc(pl->cx, (size_t)g->nodes.n + 1);
    if (!pl->past || !pl->beside) return pl->cx->status;
    for (om_id i = g->nodes.n; i-- > 0 && g->bounded;) {
        const om_node *n = &g->nodes.v[i];
        bool past = false;
        for (int k = 0; k < n->n_out; k++) past |= pl->past[n->out + (om_id)k] != 0;
        const uint32_t counted = pl->p->device->counted ? pl->p->device->counted(g, n) : 0;
        const uint32_t read = om_bounded_past(g, n, past, counted);
        for (int k = 0; k < n->n_in && k < 32; k++)
            if (read >> k & 1 && om_ins(g, n)[k] != OM_NONE) pl->past[om_ins(g, n)[k]] = 1;
    }
    return OM_OK;
}

static om_status plan_node(planner *pl, om_id id) {
    const om_graph *g = pl->g;
    const om_node *n = &g->nodes.v[id];
    const om_attr *attr = NULL;
    OM_TRY(om_attrs_concrete(&pl->p->mem, g, n, pl->p->sym, &attr));
    if (n->op->view) return plan_view(pl, id, attr);
    if (n->op->kind == OM_K_POINTWISE) OM_TRY(operands_fit(pl, n));

    if (om_plan_is_beside(pl, id)) return OM_OK;

    const bool host = n->op->kind == OM_K_HOST;
    const om_row *row = om_row_of(pl->p->device, n->op);
    if (!host && !row->run)
#if defined(OM_ONLY)
        return om_fail(pl->cx, OM_UNSUPPORTED,
                       "%s: this library was built for files that do not use this operator: make device OPS=\"...\" "
                       "with this one as well",
                       n->op->name);
#else
        return om_fail(pl->cx, OM_UNSUPPORTED, "%s: device %s has no kernel for it", n->op->name,
                       pl->p->device->name);
#endif
    om_tensor in[OM_MAX_IN] = {0}, out[OM_MAX_OUT];
    place ins[OM_MAX_IN];
    if (n->n_in > OM_MAX_IN || n->n_out > OM_MAX_OUT)
        return om_fail(pl->cx, OM_UNSUPPORTED, "%s with %d operands and %d outputs: at most %d and %d", n->op->name,
                       n->n_in, n->n_out, OM_MAX_IN, OM_MAX_OUT);
    for (int i = 0; i < n->n_in; i++) {
        om_id v = om_ins(g, n)[i];
        if (v == OM_NONE) continue;
        ins[i] = pl->val[v];
        if (!host && om_row_dense(row, i) && !om_is_dense(&ins[i].t) && !om_sabotage("plan.dense"))
            OM_TRY(dense_copy(pl, &pl->val[v], &ins[i]));
        in[i] = ins[i].t;
    }
    om_call *c = call_new(pl, host ? OM_CALL_HOST : OM_CALL_RUN, id, n->n_in, n->n_out);
    if (!c) return pl->cx->status;
    c->attr = attr;
    c->row = host ? NULL : row;
    if (g->bounded && !host) OM_TRY(count_find(pl, id, c));
    for (int i = 0; i < n->n_in; i++)
        c->arg[i] = om_ins(g, n)[i] == OM_NONE ? (om_parg){.storage = OM_NONE} : arg_of(&ins[i]);
    for (int i = 0; i < n->n_out; i++) {
        place *o = &pl->val[n->out + (om_id)i];
        om_id input;
        bool there = false;
        if (!host) OM_TRY(om_plan_beside(pl, n->out + (om_id)i, &there));
        if (n->phase == OM_UPDATE && state_in_place(pl, id, i, &input)) *o = pl->val[g->inputs.v[input]];
        else if (!there && (o->st = om_plan_storage(pl, OM_W_ARENA, om_tensor_bytes(&o->t), 0)) == OM_NONE)
            return pl->cx->status;
        c->arg[n->n_in + i] = arg_of(o);
        out[i] = o->t;
    }
    if (!host) {
        om_args a = {
            .node = n, .attr = attr, .n_attr = n->n_attr, .n_in = n->n_in, .n_out = n->n_out, .in = in, .out = out};
        a.bounded = pl->calls.v[pl->calls.n - 1].bounded;
        int64_t bytes = row->scratch(pl->cx, &a);
        if (pl->cx->status != OM_OK) return pl->cx->status;
        if (bytes < 0 || bytes > OM_ADDRESSES)
            return om_fail(pl->cx, OM_NOMEM, "%s at these sizes needs more memory than the address space has",
                           n->op->name);
        uint32_t st = bytes > 0 ? om_plan_storage(pl, OM_W_ARENA, bytes, 0) : OM_NONE;
        if (bytes > 0 && st == OM_NONE) return pl->cx->status;
        pl->calls.v[pl->calls.n - 1].scratch = st;
    }
    return OM_OK;
}

static om_status values_place(planner *pl, const om_tensor *in) {
    const om_graph *g = pl->g;
    for (om_id v = 0; v < g->values.n; v++) {
        const om_value *x = om_val(g, v);
        place *o = &pl->val[v];
        o->st = OM_NONE;
        OM_TRY(om_tensor_of(pl->cx, g, v, pl->p->sym, &o->t));
        o->t.data = NULL;
        if (x->input != OM_NONE) {
            if (x->role != OM_GRAD_IN) {
                const om_tensor *t = &in[x->input];
                if (!om_same_kind(t, &o->t))
                    return om_fail(pl->cx, OM_INVALID, "graph input %u (%s): %s given, %s expected: its sizes "
                                   "contradict those of other inputs",
                                   x->input, x->name ? x->name : "?", om_kind_write(t->dtype, t->rank, t->dim).s,
                                   om_kind_write(o->t.dtype, o->t.rank, o->t.dim).s);
                memcpy(o->t.stride, t->stride, sizeof o->t.stride);
            }
            pl->p->input[x->input] = o->t;
            o->st = om_plan_storage(pl, OM_W_INPUT, 0, x->input);
        } else if (x->role == OM_CONST) {
            o->st = om_plan_storage(pl, OM_W_CONST, om_tensor_bytes(&o->t), 0);
            if (o->st != OM_NONE) pl->st.v[o->st].data = x->data;
        }
        if (pl->cx->status != OM_OK) return pl->cx->status;
    }
    return OM_OK;
}

/* A written input that backward reads, or hands out as a gradient as it is, is copied into the arena first, and every
 * use reads the copy. */
static om_status written_inputs_save(planner *pl) {
    const om_graph *g = pl->g;
    for (uint32_t i = 0; i < g->writes.n && g->grads.n; i++) {
        const om_id v = g->inputs.v[g->writes.v[i].input];
        const bool needed = om_last_holder(pl->f, v, OM_BACKWARD) != OM_NONE || pl->f->root_held[v] & OM_HELD_GRAD;
        const bool saved = pl->st.v[pl->val[v].st].where != OM_W_INPUT; /* for another write to it */
        if (!needed || saved || om_sabotage("plan.save")) continue;
        place from = pl->val[v], to;
        OM_TRY(dense_copy(pl, &from, &to));
        pl->val[v] = to;
    }
    return OM_OK;
}

/* May `v`'s storage become a block of its own with layout `want`? It must own the whole storage and be computed in the
 * arena. */
static bool owns_storage(const planner *pl, const place *v, const om_tensor *want) {
    return pl->st.v[v->st].where == OM_W_ARENA && v->offset == 0 &&
           (pl->st.v[v->st].size == om_tensor_bytes(want) || om_sabotage("plan.owns")) &&
           !memcmp(v->t.stride, want->stride, want->rank * sizeof *want->stride) && om_is_dense(&v->t);
}

/* User outputs that node `id` makes (OM_NONE: those that are inputs or constants), as soon as they exist: where the
 * output is a copy, what it is a copy of may then go. */
static om_status outputs_place(planner *pl, om_id id) {
    const om_graph *g = pl->g;
    for (uint32_t i = 0; i < g->outputs.n; i++) {
        if (om_val(g, g->outputs.v[i])->node != id) continue;
        place *v = &pl->val[g->outputs.v[i]], to = *v;
        om_dense_strides(&to.t);
        pl->p->output[i] = to.t;
        if (owns_storage(pl, v, &to.t)) {
            pl->st.v[v->st].where = OM_W_OUTPUT;
            pl->st.v[v->st].index = i;
            continue;
        }
        to.offset = 0;
        if ((to.st = om_plan_storage(pl, OM_W_OUTPUT, om_tensor_bytes(&to.t), i)) == OM_NONE) return pl->cx->status;
        OM_TRY(copy_call(pl, v, &to));
    }
    return OM_OK;
}

static om_status calls_make(planner *pl) {
    const om_graph *g = pl->g;
    OM_TRY(written_inputs_save(pl));
    for (om_id i = 0; i < g->nodes.n; i++)
        if (g->nodes.v[i].phase == OM_FORWARD) {
            OM_TRY(plan_node(pl, i));
            OM_TRY(outputs_place(pl, i));
        }
    for (om_id i = 0; i < g->nodes.n; i++) {
        if (g->nodes.v[i].phase != OM_UPDATE) continue;
        if (g->grads.n)
            return om_fail(pl->cx, OM_UNSUPPORTED,
                           "%s in a graph with gradients: let a graph of its own, which is given the gradients, update "
                           "the weights",
                           g->nodes.v[i].op->name);
        OM_TRY(plan_node(pl, i));
        OM_TRY(outputs_place(pl, i));
    }
    return outputs_place(pl, OM_NONE);
}

/* An update has computed it there: it lies where the input does, and is neither the input nor a view of it. */
static bool written_in_place(const planner *pl, const om_write *w) {
    const om_id to = pl->g->inputs.v[w->input];
    return pl->val[w->value].st == pl->val[to].st && pl->f->root[w->value] != to;
}

static om_status writes_place(planner *pl) {
    const om_graph *g = pl->g;
    place *from = om_alloc(pl->cx, (g->writes.n + 1) * sizeof *from);
    om_status s = from ? OM_OK : pl->cx->status;
    /* values that are themselves inputs: a write might change them first */
    for (uint32_t i = 0; i < g->writes.n && s == OM_OK; i++) {
        if (om_val(g, g->inputs.v[g->writes.v[i].input])->host)
            s = om_fail(pl->cx, OM_INVALID, "graph input %u is a host scalar: no run may write it",
                        g->writes.v[i].input);
        from[i] = pl->val[g->writes.v[i].value];
        if (pl->st.v[from[i].st].where == OM_W_INPUT && !om_sabotage("plan.write_order") &&
            !written_in_place(pl, &g->writes.v[i])) {
            place copy;
            s = dense_copy(pl, &from[i], &copy);
            from[i] = copy;
        }
    }
    for (uint32_t i = 0; i < g->writes.n && s == OM_OK; i++) {
        uint32_t input = g->writes.v[i].input;
        place to = {.t = pl->p->input[input]};
        if (om_sabotage("plan.write") || written_in_place(pl, &g->writes.v[i])) continue;
        if ((to.st = om_plan_storage(pl, OM_W_INPUT, 0, input)) == OM_NONE) s = pl->cx->status;
        else if ((s = copy_call(pl, &from[i], &to)) == OM_OK) pl->calls.v[pl->calls.n - 1].write = input;
    }
    om_free(pl->cx, from);
    return s;
}

static om_status backward_make(planner *pl) {
    const om_graph *g = pl->g;
    om_plan *p = pl->p;
    int n_seg = g->grads.n && !g->n_segments ? 1 : g->n_segments;
    p->n_segments = n_seg;
    p->seg_end = om_arena_alloc(&p->mem, (size_t)(n_seg + 1) * sizeof *p->seg_end);
    if (!p->seg_end) return pl->cx->status;

    /* The last segment that reads a storage, decided on nodes before the calls exist: per value, noted at the value its
     * views come from. A returned gradient is itself a use in its segment. */
    const om_id *source = pl->f->root;
    int *last_seg = om_alloc(pl->cx, (g->values.n + 1) * sizeof *last_seg);
    om_status s = last_seg ? OM_OK : pl->cx->status;
    for (om_id i = 0; i < g->nodes.n && s == OM_OK; i++) {
        const om_node *n = &g->nodes.v[i];
        if (n->phase != OM_BACKWARD) continue;
        for (int k = 0; k < n->n_in; k++) {
            om_id v = om_ins(g, n)[k];
            if (v != OM_NONE && last_seg[source[v]] < n->segment) last_seg[source[v]] = n->segment;
        }
    }
    for (uint32_t i = 0; i < g->grads.n && s == OM_OK; i++) {
        om_id v = g->grads.v[i].value;
        if (v != OM_NONE && last_seg[source[v]] < p->grad_segment[i]) last_seg[source[v]] = p->grad_segment[i];
    }
    for (int seg = 0; seg < n_seg && s == OM_OK; seg++) {
        for (om_id i = 0; i < g->nodes.n && s == OM_OK; i++)
            if (g->nodes.v[i].phase == OM_BACKWARD && g->nodes.v[i].segment == seg) s = plan_node(pl, i);
        for (uint32_t i = 0; i < g->grads.n && s == OM_OK; i++) {
            om_id v = g->grads.v[i].value;
            if (v == OM_NONE || p->grad_segment[i] != seg) continue;
            const om_tensor *like = &p->input[g->grads.v[i].input];
            place to = {.t = pl->val[v].t};
            memcpy(to.t.stride, like->stride, sizeof to.t.stride);
            int64_t span = 1; /* keep the input's strides when they are a permutation of dense; else dense */
            for (int k = 0; k < like->rank; k++) span += (like->dim[k] - 1) * like->stride[k];
            bool permuted = om_numel(like) == 0 || span == om_numel(like);
            for (int k = 0; k < like->rank; k++) permuted &= like->stride[k] > 0 || like->dim[k] <= 1;
            /* sorted strides must each be the product of the smaller ones */
            for (int k = 0; k < like->rank && permuted; k++)
                if (like->dim[k] > 1) {
                    int64_t want = 1;
                    for (int j = 0; j < like->rank; j++)
                        if (like->dim[j] > 1 && like->stride[j] < like->stride[k]) want *= like->dim[j];
                    permuted = want == like->stride[k];
                }
            if (!permuted) om_dense_strides(&to.t);
            p->grad[i] = to.t;
            place *x = &pl->val[v];
            bool shared = last_seg[source[v]] > seg && !om_sabotage("plan.shared");
            if (!shared && om_is_dense(&to.t) && owns_storage(pl, x, &to.t)) {
                pl->st.v[x->st].where = OM_W_GRAD;
                pl->st.v[x->st].index = i;
                continue;
            }
            if ((to.st = om_plan_storage(pl, OM_W_GRAD, om_tensor_bytes(&to.t), i)) == OM_NONE) s = pl->cx->status;
            else s = copy_call(pl, x, &to);
        }
        p->seg_end[seg] = (int)pl->calls.n;
    }
    om_free(pl->cx, last_seg);
    return s;
}
static om_status grad_segments(planner *pl) {
    const om_graph *g = pl->g;
    /* the segment in which the value exists; arriving gradients: the first */
    for (uint32_t i = 0; i < g->grads.n; i++) {
        const om_id v = g->grads.v[i].value;
        const om_node *n = om_maker(g, v);
        pl->p->grad_segment[i] = v == OM_NONE ? -1 : !n || n->phase == OM_FORWARD ? 0 : n->segment;
    }
    return OM_OK;
}
om_status om_plan_calls(planner *pl, const om_tensor *in) {
    OM_TRY(past_find(pl));
    OM_TRY(grad_segments(pl));
    OM_TRY(values_place(pl, in));
    OM_TRY(calls_make(pl));
    OM_TRY(writes_place(pl));
    pl->p->n_forward = (int)pl->calls.n;
    return backward_make(pl);
}
