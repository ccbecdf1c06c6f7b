/* step.c - one forward or one backward from beginning to end: om_run_* of ortmodule.h.
 *
 * A run owns its blocks until they are handed over, and a hold on its plan. Blocks of a forward's outputs and its arena
 * are taken when it starts; those of gradients (or parts of the arena) and loans when the first call that writes them
 * is about to run, and a loan goes back after its last use. What a backward is given in another layout than planned is
 * copied first. All memory is the plan's device's; nothing here looks into it.
 *
 * Invariants: r->X[i] is NULL or memory that storage X[i] may use now; r->X_block[i] is the block of it when the run
 * owns one. After a failure `done` is set and the run can only be freed.
 */
#include "run/plan.h"

struct om_state {
    om_services sv;  /* it was allocated by */
    om_model *model;
    om_plan *plan;   /* held */
    om_parts *parts; /* of the arena, where gradients may come to lie in it; else NULL */
    uint64_t seed;
};

void om_block_put(om_block *b) {
    if (b && b->parts) om_parts_put(b);
    else if (b) b->device->block_put(b);
}

static om_block *block_get(om_run *r, int64_t size) { return r->plan->device->block_get(r->cx, (size_t)size); }

void om_run_free(om_run *r) {
    if (!r) return;
    const om_graph *g = r->plan->g;
    for (uint32_t i = 0; i < g->outputs.n; i++) om_block_put(r->output_block[i]), om_block_put(r->loan_block[i]);
    for (uint32_t i = 0; i < g->grads.n; i++) om_block_put(r->grad_block[i]);
    for (uint32_t i = 0; i < r->temp.n; i++) om_block_put(r->temp.v[i]);
    om_block_put(r->arena_block);
    om_block_put(r->scalar_block);
    om_free(r->cx, r->temp.v);
    om_free(r->cx, r->stop_arg);
    om_free(r->cx, r->profile);
    om_plan_release(r->model, r->plan);
    om_free(r->cx, r);
}

/* A run of `plan`, which becomes the run's to release, also when this fails. inputs: those the host gives, or NULL. */
static om_status run_new(om_ctx *cx, om_model *m, om_plan *plan, const om_tensor *inputs, uint64_t seed,
                         om_run **out) {
    const om_graph *g = plan->g;
    const size_t n_in = g->inputs.n, n_out = g->outputs.n, n_grad = g->grads.n, n_ptr = n_in + 4 * n_out + 2 * n_grad;
    const size_t scalar_size = sizeof(om_scalars) + (g->syms.n + (size_t)plan->n_host) * sizeof(int64_t);
    om_run *r = om_alloc(cx, sizeof *r + n_ptr * sizeof(void *) + scalar_size);
    if (!r) {
        om_plan_release(m, plan);
        return cx->status;
    }
    r->model = m, r->plan = plan, r->cx = cx, r->seed = seed;
    cx->device = plan->device;
    r->input = (void **)(void *)(r + 1);
    r->output = r->input + n_in;
    r->loan = r->output + n_out;
    r->grad = r->loan + n_out;
    r->output_block = (om_block **)(r->grad + n_grad);
    r->loan_block = r->output_block + n_out;
    r->grad_block = r->loan_block + n_out;
    om_scalars *scalars = (om_scalars *)(void *)(r->grad_block + n_grad);
    scalars->seed = seed;
    memcpy(scalars->sym, plan->sym, g->syms.n * sizeof *plan->sym);
    int64_t *number = scalars->sym + g->syms.n;
    for (int k = 0; inputs && k < plan->n_host; k++) {
        const om_tensor *t = &inputs[plan->host[k]];
        if (t->dtype && t->device != -1)
            om_fail(cx, OM_INVALID, "graph input %u is a host scalar: its tensor must be on the CPU", plan->host[k]);
        else if (t->dtype) memcpy(&number[k], t->data, om_dtype_size(t->dtype));
    }
    r->scalars = scalars;
    if (!plan->device->host_memory && (r->scalar_block = block_get(r, (int64_t)scalar_size))) {
        r->scalars = r->scalar_block->data;
        plan->device->upload(cx, r->scalar_block->data, scalars, scalar_size);
    }
    for (int k = 0; k < plan->n_host; k++)
        r->input[plan->host[k]] = (char *)r->scalars + ((char *)&number[k] - (char *)scalars);
    if (om_model_profiling(m))
        r->profile = om_alloc(cx, OM_N_PROFILE * sizeof *r->profile + (size_t)plan->n_calls * sizeof(om_clock));
    if (cx->status != OM_OK) {
        om_run_free(r);
        return cx->status;
    }
    *out = r;
    return OM_OK;
}

/* --- forward ------------------------------------------------------------------------------------ */

om_status om_run_forward(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, uint64_t seed, bool write,
                         om_run **run) {
    const om_variant *v = om_model_variant_at(m, variant);
    om_plan *plan = NULL;
    om_run *r = NULL;
    *run = NULL;
    if (!v) return om_fail(cx, OM_INVALID, "variant %d does not exist", variant);
    for (uint32_t i = 0; i < v->first_grad_in; i++)
        if (inputs[i].dtype && inputs[i].device != -1 && v->g->cx->device->host_memory)
            return om_fail(
                cx, OM_INVALID,
                "graph input %u is on device cuda:%d; this build runs on the CPU: move the module and its inputs", i,
                inputs[i].device);
    cx->device = v->g->cx->device;
    om_status s = om_plan_get(cx, m, variant, inputs, &plan);
    if (s == OM_OK) s = run_new(cx, m, plan, inputs, seed, &r);
    if (s != OM_OK) return s;
    r->skip_writes = !write;
    if (plan->n_segments) om_model_back(m);
    for (uint32_t i = 0; i < v->first_grad_in; i++)
        if (!om_val(v->g, v->g->inputs.v[i])->host) r->input[i] = inputs[i].data;
    if ((r->arena_block = block_get(r, plan->bytes.arena))) r->arena = r->arena_block->data;
    for (uint32_t i = 0; i < plan->g->outputs.n && cx->status == OM_OK; i++)
        if ((r->output_block[i] = block_get(r, om_tensor_bytes(&plan->output[i]))))
            r->output[i] = r->output_block[i]->data;
    if (cx->status != OM_OK) {
        om_run_free(r);
        return cx->status;
    }
    *run = r;
    return OM_OK;
}

om_status om_run_output(om_run *r, int i, om_tensor *t, om_block **block) {
    const om_plan *p = r->plan;
    *block = NULL;
    if (r->backward || r->pc < p->n_forward)
        return om_fail(r->cx, OM_INVALID, "output %d: the forward has not ended", i);
    if (i < 0 || i >= (int)p->g->outputs.n || !r->output_block[i])
        return om_fail(r->cx, OM_INVALID, "output %d does not exist (there are %u), or was taken already", i,
                       p->g->outputs.n);
    *t = p->output[i];
    t->data = r->output[i];
    *block = r->output_block[i];
    r->output_block[i] = NULL;
    return OM_OK;
}

om_status om_run_state(om_run *r, om_state **state, om_block **arena) {
    *state = NULL;
    *arena = NULL;
    if (r->backward || r->pc < r->plan->n_forward || !r->plan->n_segments || !r->arena_block)
        return om_fail(r->cx, OM_INVALID,
                       "state: the forward has not ended, its variant has no backward, or it was taken already");
    om_state *s = om_alloc(r->cx, sizeof *s);
    const om_plan *p = r->plan;
    const bool may = om_model_places(r->model, p, false) || om_model_places(r->model, p, true);
    om_parts *parts = s && may && !r->cx->host_alloc ? om_parts_new(r->cx, r->arena_block) : NULL;
    if (r->cx->status != OM_OK) {
        om_free(r->cx, s);
        return r->cx->status;
    }
    *s = (om_state){.sv = r->cx->sv,
                    .model = r->model,
                    .plan = om_plan_hold(r->model, r->plan),
                    .parts = parts,
                    .seed = r->seed};
    *state = s;
    *arena = r->arena_block;
    r->arena_block = NULL;
    r->arena = NULL;
    return OM_OK;
}

void om_state_free(om_state *s) {
    if (!s) return;
    om_ctx cx = {.sv = s->sv};
    om_plan_release(s->model, s->plan);
    om_parts_forget(s->parts);
    om_free(&cx, s);
}

/* --- backward ----------------------------------------------------------------------------------- */

/* A copy of `t` in the layout of `as`, in memory of the run's. */
static om_status temp_copy(om_run *r, const om_tensor *t, const om_tensor *as, void **data) {
    om_tensor copy = *as;
    int64_t span = 1;
    for (int k = 0; k < copy.rank; k++) span += (copy.dim[k] - 1) * (copy.stride[k] > 0 ? copy.stride[k] : 0);
    om_block *b = block_get(r, span * (int64_t)om_dtype_size(copy.dtype)), **slot = b ? OM_PUSH(r->cx, &r->temp) : NULL;
    if (!slot) {
        om_block_put(b);
        return r->cx->status;
    }
    *slot = b;
    *data = copy.data = b->data;
    return r->plan->device->copy(r->cx, t, &copy);
}

/* What is given at backward must lie as planned; if it does not (an expanded gradient, a saved tensor that came back
 * otherwise) it is copied. */
static om_status backward_given(om_run *r, const om_tensor *t, const om_tensor *want, const char *what, uint32_t i,
                                void **data) {
    if (!om_same_kind(t, want))
        return om_fail(r->cx, OM_INVALID, "backward: %s %u has another dtype or shape than in the forward", what, i);
    bool same = true;
    for (int k = 0; k < t->rank; k++) same &= t->dim[k] <= 1 || t->stride[k] == want->stride[k];
    *data = t->data;
    return same || !om_numel(t) ? OM_OK : temp_copy(r, t, want, data);
}

static om_status backward_begin(om_run *r, const om_variant *v, const om_tensor *inputs, const om_tensor *outputs,
                                const om_tensor *grads, const uint8_t *dropped) {
    static const om_tensor left_out;
    const om_plan *p = r->plan;
    const om_graph *g = v->g;
    for (uint32_t i = 0; i < v->first_grad_in; i++) {
        const om_tensor *t = inputs ? &inputs[i] : &left_out;
        if (!v->needs.reads_input[i]) continue;
        if (!t->dtype) return om_fail(r->cx, OM_INVALID, "backward: graph input %u is read and was not given", i);
        if (om_val(g, g->inputs.v[i])->host) continue; /* taken along with the seed */
        OM_TRY(backward_given(r, t, &p->input[i], "graph input", i, &r->input[i]));
    }
    for (uint32_t i = 0; i < g->outputs.n; i++) {
        const om_tensor *t = outputs ? &outputs[i] : &left_out;
        if (!v->needs.reads_output[i]) continue;
        if (!t->dtype) return om_fail(r->cx, OM_INVALID, "backward: output %u is read and was not given", i);
        OM_TRY(backward_given(r, t, &p->output[i], "output", i, &r->output[i]));
        if (dropped && dropped[i] && r->output[i] == t->data) r->loan[i] = t->data;
    }
    uint32_t slot = v->first_grad_in;
    for (uint32_t i = 0; i < g->outputs.n; i++) {
        const bool due = v->arriving[i] && om_is_float(om_ty(g, g->outputs.v[i])->dtype);
        if (due != (grads[i].dtype != OM_NODTYPE))
            return om_fail(r->cx, OM_INVALID, "backward: the gradient of output %u %s", i,
                           due ? "is missing" : "was not announced for this variant");
        if (!due) continue;
        OM_TRY(backward_given(r, &grads[i], &p->input[slot], "gradient of output", i, &r->input[slot]));
        slot++;
    }
    return OM_OK;
}

om_status om_run_backward(om_ctx *cx, const om_state *state, void *arena, size_t arena_size, const om_tensor *inputs,
                          const om_tensor *outputs, const om_tensor *grads, const uint8_t *dropped, om_run **run) {
    om_plan *plan = state->plan;
    om_run *r = NULL;
    *run = NULL;
    if (arena_size != (size_t)plan->bytes.arena)
        return om_fail(cx, OM_INVALID,
                       "backward: this is not the state of a forward of this graph and variant: its arena has %lld "
                       "bytes, %zu were given",
                       (long long)plan->bytes.arena, arena_size);
    OM_TRY(run_new(cx, state->model, om_plan_hold(state->model, plan), inputs, state->seed, &r));
    r->backward = true;
    r->pc = plan->n_forward;
    r->arena = arena;
    if (om_parts_is(state->parts, arena)) r->own = state->parts;
    if (r->own && om_model_lend(state->model, plan, false, r->own)) r->parts = r->own;
    om_status s = backward_begin(r, om_model_variant_at(state->model, plan->variant), inputs, outputs, grads, dropped);
    if (s == OM_OK) *run = r;
    else om_run_free(r);
    return s;
}

void om_run_fleeting(om_run *r) {
    if (r->own && r->pc == r->plan->n_forward)
        r->parts = om_model_lend(r->model, r->plan, true, r->own) ? r->own : NULL;
}

/* Where storage `s` of a backward lies, when it is a block of its own. */
static void **own_block(om_run *r, const om_storage *s, om_block ***block) {
    if (s->where == OM_W_GRAD) return *block = &r->grad_block[s->index], &r->grad[s->index];
    if (s->where == OM_W_LOAN) return *block = &r->loan_block[s->index], &r->loan[s->index];
    return NULL;
}

static om_status blocks_take(om_run *r, int stop) {
    for (uint32_t i = 0; i < r->plan->n_st; i++) {
        const om_storage *s = &r->plan->st[i];
        om_block **block;
        void **data = s->first >= stop || s->last < r->pc ? NULL : own_block(r, s, &block);
        if (!data || *data) continue;
        const bool in_arena = r->parts && s->where == OM_W_GRAD && s->offset >= 0;
        *block = in_arena ? om_parts_take(r->cx, r->parts, s->offset, s->size) : block_get(r, s->size);
        if (!*block) return r->cx->status;
        *data = (*block)->data;
    }
    return OM_OK;
}

static void loans_return(om_run *r) {
    for (uint32_t i = 0; i < r->plan->n_st; i++) {
        const om_storage *s = &r->plan->st[i];
        if (s->where != OM_W_LOAN || s->last >= r->pc || !r->loan_block[s->index]) continue;
        om_block_put(r->loan_block[s->index]);
        r->loan_block[s->index] = NULL;
        r->loan[s->index] = NULL;
    }
}

void om_run_outputs_needed(const om_run *r, uint8_t *needed) {
    const om_plan *p = r->plan;
    memset(needed, 0, p->g->outputs.n);
    for (uint32_t i = 0; i < p->n_st; i++) {
        const om_storage *s = &p->st[i];
        if ((s->where == OM_W_OUTPUT || s->where == OM_W_LOAN) && s->last >= r->pc) needed[s->index] = 1;
    }
}

om_status om_run_grad(om_run *r, int input, om_tensor *t, om_block **block) {
    const om_plan *p = r->plan;
    const om_variant *v = om_model_variant_at(r->model, p->variant);
    const int segment = input >= 0 && input < (int)v->first_grad_in ? v->needs.grad_segment[input] : -1;
    *block = NULL;
    if (segment < 0) return om_fail(r->cx, OM_INVALID, "graph input %d has no gradient in this variant", input);
    if (!r->backward || r->pc < p->seg_end[segment])
        return om_fail(r->cx, OM_INVALID, "the gradient of graph input %d: segment %d has not run", input, segment);
    const int at = v->grad_at[input];
    if (!r->grad_block[at])
        return om_fail(r->cx, OM_INVALID, "the gradient of graph input %d was taken already", input);
    *t = p->grad[at];
    t->data = r->grad[at];
    *block = r->grad_block[at];
    r->grad_block[at] = NULL;
    return OM_OK;
}

/* --- both --------------------------------------------------------------------------------------- */

/* What the host gets: the memory as it lies, or a dense copy where it runs backwards (a flipped view). */
static om_status stop_make(om_run *r) {
    const om_call *c = &r->plan->calls[r->pc];
    const om_node *node = &r->plan->g->nodes.v[c->node];
    const int n = c->n_in + c->n_out;
    om_tensor *arg = r->stop_arg = om_alloc(r->cx, (size_t)(n + 1) * sizeof *arg);
    if (!arg) return r->cx->status;
    for (int i = 0; i < n; i++) {
        arg[i] = om_run_arg(r, c, i);
        bool backwards = false;
        for (int k = 0; k < arg[i].rank && i < c->n_in; k++) backwards |= arg[i].stride[k] < 0;
        if (!backwards) continue;
        om_tensor as = arg[i];
        om_dense_strides(&as);
        OM_TRY(temp_copy(r, &arg[i], &as, &as.data));
        arg[i] = as;
    }
    r->stop = (om_host_stop){.index = (int)om_node_int(node, "index", -1),
                             .part = (int)om_node_int(node, "part", 0),
                             .backward = node->phase != OM_FORWARD,
                             .n_in = c->n_in,
                             .n_out = c->n_out,
                             .in = arg,
                             .out = arg + c->n_in};
    return OM_HOST;
}

om_status om_run_resume(om_run *r, int segment) {
    const om_plan *p = r->plan;
    if (r->done) return om_fail(r->cx, OM_INVALID, "this run has failed; start another");
    if (r->host_due) return om_fail(r->cx, OM_INVALID, "the results of a host node are due: answer it first");
    if (r->backward && segment >= p->n_segments)
        return om_fail(r->cx, OM_INVALID, "segment %d does not exist: there are %d", segment, p->n_segments);
    const int stop = !r->backward ? p->n_forward : segment < 0 ? p->n_calls : p->seg_end[segment];
    om_status s = r->backward ? blocks_take(r, stop) : OM_OK;
    if (s == OM_OK) s = om_run_step(r, stop);
    if (r->backward) loans_return(r);
    if (r->profile) om_model_profile_add(r->model, r);
    if (s == OM_HOST) s = stop_make(r);
    r->stop_ms = r->profile ? om_now_ms() : 0;
    r->done = s != OM_OK && s != OM_HOST;
    return s;
}

const om_needs *om_run_needs(const om_run *r) { return om_model_needs(r->model, r->plan->variant); }

const om_host_stop *om_run_host(const om_run *r) { return r->host_due && !r->done ? &r->stop : NULL; }

om_status om_run_answer(om_run *r, const om_tensor *outputs) {
    const om_device *d = r->plan->device;
    if (!om_run_host(r)) return om_fail(r->cx, OM_INVALID, "answer: no host node is due");
    for (int i = 0; i < r->stop.n_out; i++) {
        om_tensor want = r->stop.out[i];
        const om_tensor *got = &outputs[i];
        if (got->dtype && !om_same_kind(got, &want))
            return om_fail(r->cx, OM_INVALID, "result %d is %s and was %s when it was captured", i,
                           om_kind_write(got->dtype, got->rank, got->dim).s,
                           om_kind_write(want.dtype, want.rank, want.dim).s);
        if (!got->dtype) OM_TRY(d->fill(r->cx, want.data, 0, (size_t)om_tensor_bytes(&want)));
        else if (got->data != want.data) OM_TRY(d->copy(r->cx, got, &want));
    }
    if (r->profile) om_run_profile_add(r, &r->plan->calls[r->pc], om_now_ms() - r->stop_ms);
    om_free(r->cx, r->stop_arg);
    r->stop_arg = NULL;
    r->host_due = false;
    r->pc++;
    return OM_OK;
}
