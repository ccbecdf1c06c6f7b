/* plan.c - from a graph and concrete sizes to a flat list of calls over fixed storage (contract: plan.h).
 *
 * Four sweeps over the nodes, all linear but the last:
 *   1. calls     evaluate sizes; resolve views to (storage, offset, strides); add copies where an operator needs a
 *                dense operand or a view is impossible; order backward calls by segment
 *   2. lifetime  first and last call of every storage
 *   3. in place  merge an output's storage with a dying operand's where allowed; give outputs and gradients their
 *                blocks
 *   4. offsets   largest storage first, into the smallest gap among those placed that live at the same time
 */
#include "graph/sabotage.h"
#include "run/plan.h"

#include <stdlib.h>
#include <time.h>

enum { ALIGN = 64 };

typedef struct place { om_tensor t; uint32_t st; int64_t offset; } place; /* of a value; t.data unused */

typedef struct planner {
    om_ctx *cx;
    const om_graph *g;
    om_plan *p;
    OM_VEC(om_storage) st;
    OM_VEC(om_call) calls;
    place *val;            /* per value */
    const om_facts *f;     /* a value's storage is its root's */
    uint32_t *alias;       /* storage -> storage that took over its place (in-place); itself otherwise; grown with st */
    uint32_t alias_cap;
    bool no_reuse;
} planner;

double om_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int64_t bytes_of(const om_tensor *t) { return om_numel(t) * (int64_t)om_dtype_size(t->dtype); }

static uint32_t storage_new(planner *pl, om_where where, int64_t size, uint32_t index) {
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
    if ((to->st = storage_new(pl, OM_W_ARENA, bytes_of(&to->t), 0)) == OM_NONE) return pl->cx->status;
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
    return OM_OK;
}

static om_status plan_node(planner *pl, om_id id) {
    const om_graph *g = pl->g;
    const om_node *n = &g->nodes.v[id];
    const om_attr *attr = NULL;
    OM_TRY(om_attrs_concrete(&pl->p->mem, g, n, pl->p->sym, &attr));
    if (n->op->view) return plan_view(pl, id, attr);
    if (n->op->kind == OM_K_POINTWISE) OM_TRY(operands_fit(pl, n));

    const bool host = n->op->kind == OM_K_HOST;
    const om_row *row = om_row_of(pl->p->device, n->op);
    if (!host && !row->run)
        return om_fail(pl->cx, OM_UNSUPPORTED, "%s: device %s has no kernel for it", n->op->name,
                       pl->p->device->name);
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
        if (n->phase == OM_UPDATE && state_in_place(pl, id, i, &input)) *o = pl->val[g->inputs.v[input]];
        else if ((o->st = storage_new(pl, OM_W_ARENA, bytes_of(&o->t), 0)) == OM_NONE) return pl->cx->status;
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
        uint32_t st = bytes > 0 ? storage_new(pl, OM_W_ARENA, bytes, 0) : OM_NONE;
        if (bytes > 0 && st == OM_NONE) return pl->cx->status;
        pl->calls.v[pl->calls.n - 1].scratch = st;
    }
    return OM_OK;
}

/* --- sweep 1: calls ---------------------------------------------------------------------------- */

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
                if (t->dtype != o->t.dtype || t->rank != o->t.rank ||
                    memcmp(t->dim, o->t.dim, t->rank * sizeof *t->dim))
                    return om_fail(pl->cx, OM_INVALID,
                                   "graph input %u (%s): %s of rank %d given, %s of rank %d expected, or its sizes "
                                   "contradict other inputs",
                                   x->input, x->name ? x->name : "?", om_dtype_name(t->dtype), t->rank,
                                   om_dtype_name(o->t.dtype), o->t.rank);
                memcpy(o->t.stride, t->stride, sizeof o->t.stride);
            }
            pl->p->input[x->input] = o->t;
            o->st = storage_new(pl, OM_W_INPUT, 0, x->input);
        } else if (x->role == OM_CONST) {
            o->st = storage_new(pl, OM_W_CONST, bytes_of(&o->t), 0);
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
           (pl->st.v[v->st].size == bytes_of(want) || om_sabotage("plan.owns")) &&
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
        if ((to.st = storage_new(pl, OM_W_OUTPUT, bytes_of(&to.t), i)) == OM_NONE) return pl->cx->status;
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
        if ((to.st = storage_new(pl, OM_W_INPUT, 0, input)) == OM_NONE) s = pl->cx->status;
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
            if ((to.st = storage_new(pl, OM_W_GRAD, bytes_of(&to.t), i)) == OM_NONE) s = pl->cx->status;
            else s = copy_call(pl, x, &to);
        }
        p->seg_end[seg] = (int)pl->calls.n;
    }
    om_free(pl->cx, last_seg);
    return s;
}

/* --- sweeps 2 and 3 ---------------------------------------------------------------------------- */

static void use(om_storage *s, int call) {
    if (call < s->first) s->first = call;
    if (call > s->last) s->last = call;
}

static uint32_t root(planner *pl, uint32_t st) {
    while (pl->alias[st] != st) st = pl->alias[st];
    return st;
}

static void lifetimes(planner *pl) {
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        for (int k = 0; k < c->n_in + c->n_out; k++)
            if (c->arg[k].storage != OM_NONE && (k >= c->n_in || !om_sabotage("plan.lifetime")))
                use(&pl->st.v[c->arg[k].storage], (int)i);
        if (c->count.storage != OM_NONE) use(&pl->st.v[c->count.storage], (int)i);
        if (c->scratch != OM_NONE) use(&pl->st.v[c->scratch], (int)i);
    }
}

static bool same_layout(const om_parg *a, const om_parg *b) {
    if (a->offset != b->offset || a->t.rank != b->t.rank || om_dtype_size(a->t.dtype) != om_dtype_size(b->t.dtype))
        return false;
    for (int i = 0; i < a->t.rank; i++)
        if (a->t.dim[i] != b->t.dim[i] || (a->t.dim[i] > 1 && a->t.stride[i] != b->t.stride[i])) return false;
    return true;
}

/* Output 0 may lie where operand j lies, when that is its storage's last use (rules: plan.h). */
static void in_place(planner *pl) {
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        if (c->kind != OM_CALL_RUN || !c->n_out) continue;
        om_parg *out = &c->arg[c->n_in];
        for (int j = 0; j < c->n_in && j < 32; j++) {
            if (!om_row_inplace(c->row, j) || c->arg[j].storage == OM_NONE) continue;
            uint32_t from = root(pl, c->arg[j].storage), to = root(pl, out->storage);
            om_storage *sf = &pl->st.v[from], *so = &pl->st.v[to];
            bool loan = sf->where == OM_W_OUTPUT && so->where == OM_W_ARENA && (int)i >= pl->p->n_forward;
            if (from == to || (sf->where != OM_W_ARENA && !loan) || (sf->last != (int)i && !om_sabotage("plan.last")) ||
                so->first != (int)i)
                continue;
            if (c->arg[j].offset != 0 || sf->size != so->size || out->offset != 0 ||
                (!same_layout(&c->arg[j], out) && !om_sabotage("plan.layout")))
                continue;
            /* what else lies there is read element by element as well, or it would be read after it was overwritten */
            bool clash = false;
            for (int k = 0; k < c->n_in; k++)
                clash |= k != j && c->arg[k].storage != OM_NONE && root(pl, c->arg[k].storage) == from &&
                         (!om_row_inplace(c->row, k) || !same_layout(&c->arg[k], out));
            for (int k = c->n_in + 1; k < c->n_in + c->n_out; k++) clash |= root(pl, c->arg[k].storage) == from;
            if (clash && !om_sabotage("plan.clash")) continue;
            if (loan) {
                so->where = OM_W_LOAN;
                so->index = sf->index;
                break;
            }
            /* the operand moves into the output's storage: that one may be a block of the host's (OUTPUT, GRAD) */
            if (so->where != OM_W_ARENA && ((int)i >= pl->p->n_forward) != (sf->first >= pl->p->n_forward) &&
                !om_sabotage("plan.home"))
                continue;
            pl->alias[from] = to;
            so->first = sf->first;
            break;
        }
    }
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        for (int k = 0; k < c->n_in + c->n_out; k++)
            if (c->arg[k].storage != OM_NONE) c->arg[k].storage = root(pl, c->arg[k].storage);
        if (c->count.storage != OM_NONE) c->count.storage = root(pl, c->count.storage);
    }
}

/* --- sweep 4: offsets -------------------------------------------------------------------------- */

typedef struct slot { int64_t offset, end; int32_t first, last; } slot;
typedef struct order { int64_t size; uint32_t st; int32_t first; } order;

static int by_size(const void *a, const void *b) { /* larger first; ties by first call, then index: one result */
    const order *x = a, *y = b;
    if (x->size != y->size) return x->size > y->size ? -1 : 1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->st < y->st ? -1 : x->st > y->st;
}

static om_status offsets(planner *pl) {
    uint32_t n = 0;
    order *ord = om_alloc(pl->cx, (pl->st.n + 1) * sizeof *ord);
    slot *placed = om_alloc(pl->cx, (pl->st.n + 1) * sizeof *placed); /* sorted by offset */
    if (!ord || !placed) {
        om_free(pl->cx, ord);
        om_free(pl->cx, placed);
        return pl->cx->status;
    }
    for (uint32_t i = 0; i < pl->st.n; i++) {
        om_storage *s = &pl->st.v[i];
        if (s->where == OM_W_ARENA && pl->alias[i] == i && s->last >= 0)
            ord[n++] = (order){(s->size + ALIGN - 1) & ~(int64_t)(ALIGN - 1), i, s->first};
    }
    qsort(ord, n, sizeof *ord, by_size);
    int64_t top = 0;
    for (uint32_t i = 0; i < n; i++) {
        om_storage *s = &pl->st.v[ord[i].st];
        int64_t size = ord[i].size, at = 0, best = -1, best_gap = INT64_MAX;
        if (pl->no_reuse) {
            s->offset = top;
            if ((top += size) > OM_ADDRESSES) break;
            continue;
        }
        for (uint32_t k = 0; k < i; k++) { /* gaps between neighbours in time */
            if (placed[k].last < s->first + (om_sabotage("plan.overlap") ? 1 : 0) || placed[k].first > s->last)
                continue;
            int64_t gap = placed[k].offset - at;
            if (gap >= size && gap < best_gap) best = at, best_gap = gap;
            if (placed[k].end > at) at = placed[k].end;
        }
        s->offset = best >= 0 ? best : at;
        if (s->offset + size > top) top = s->offset + size;
        if (top > OM_ADDRESSES) break;
        uint32_t k = i;
        while (k > 0 && placed[k - 1].offset > s->offset) placed[k] = placed[k - 1], k--;
        placed[k] = (slot){s->offset, s->offset + size, s->first, s->last};
    }
    pl->p->bytes.arena = top;
    om_free(pl->cx, ord);
    om_free(pl->cx, placed);
    return top <= OM_ADDRESSES
               ? OM_OK
               : om_fail(pl->cx, OM_NOMEM, "a step at these sizes needs more memory than the address space has");
}

/* --- the whole --------------------------------------------------------------------------------- */

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
        size += (s->size + ALIGN - 1) & ~(int64_t)(ALIGN - 1);
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
    if (s == OM_OK) s = grad_segments(&pl);
    if (s == OM_OK) s = values_place(&pl, in);
    if (s == OM_OK) s = calls_make(&pl);
    if (s == OM_OK) s = writes_place(&pl);
    p->n_forward = (int)pl.calls.n;
    if (s == OM_OK) s = backward_make(&pl);
    if (s == OM_OK && !(pl.alias = om_alloc(cx, (pl.st.n + 1) * sizeof *pl.alias))) s = cx->status;
    if (s == OM_OK) {
        for (uint32_t i = 0; i < pl.st.n; i++) pl.alias[i] = i;
        lifetimes(&pl);
        if (!pl.no_reuse) in_place(&pl);
        s = offsets(&pl);
        if (s == OM_OK) s = calls_prepare(&pl);
    }
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
