/* interpret.c - runs a graph node by node, every value in memory of its own.
 *
 * No planner, no reuse, no in-place: slow, simple, and therefore the oracle of plan.c and what operator tests run.
 * om_eval_node is also how constant folding evaluates a node. Views are taken as views when they allow it, so kernels
 * meet the strides they would meet in a plan.
 */
#include "graph/engine.h"
#include "graph/device.h"
#include "graph/exec.h"

#include <stdio.h>

om_status om_tensor_alloc(om_ctx *cx, om_tensor *t) {
    om_dense_strides(t);
    int64_t n = om_numel(t);
    t->data = om_alloc(cx, (size_t)n * om_dtype_size(t->dtype));
    return t->data ? OM_OK : cx->status;
}

enum { FENCE = 64, FENCE_BYTE = 0xa5 };

/* As a plan does it: scratch is asked for and the call is prepared before any operand has memory. Scratch is fenced: an
 * operator that asks for less than it uses is found here. */
static om_status eval_run(om_ctx *cx, const om_row *row, om_args *a, om_arena *mem) {
    om_tensor in[OM_MAX_IN], out[OM_MAX_OUT];
    if (a->n_out > OM_MAX_OUT)
        return om_fail(cx, OM_UNSUPPORTED, "%s with %d outputs: at most %d", a->node->op->name, a->n_out, OM_MAX_OUT);
    for (int i = 0; i < a->n_in; i++) in[i] = a->in[i], in[i].data = NULL;
    for (int i = 0; i < a->n_out; i++) out[i] = a->out[i], out[i].data = NULL;
    om_args sizes = *a;
    sizes.in = in, sizes.out = out;
    int64_t bytes = row->scratch(cx, &sizes);
    if (cx->status != OM_OK) return cx->status;
    OM_TRY(row->prepare(cx, mem, &sizes, &a->prep));
    if (bytes <= 0) return row->run(cx, a);
    unsigned char *scratch = a->scratch = om_alloc(cx, (size_t)bytes + FENCE);
    if (!scratch) return cx->status;
    memset(scratch + bytes, FENCE_BYTE, FENCE);
    om_status s = row->run(cx, a);
    for (int i = 0; i < FENCE && s == OM_OK; i++)
        if (scratch[bytes + i] != FENCE_BYTE)
            s = om_fail(cx, OM_INTERNAL, "%s wrote past its scratch of %lld bytes", a->node->op->name,
                        (long long)bytes);
    om_free(cx, scratch);
    a->scratch = NULL;
    return s;
}

om_status om_fault_fail(om_ctx *cx, const om_graph *g, const om_node *n, const om_attr *attr, om_fault *f) {
    const om_fault x = *f;
    if (!x.kind) return OM_OK;
    *f = (om_fault){0};
    if (cx->rehearses) return OM_OK;
    const om_scope *s = g && n->scope < g->scopes.n ? &g->scopes.v[n->scope] : NULL;
    char at[512] = "", allowed[64] = "none is allowed: there are no entries";
    if (s && s->file) snprintf(at, sizeof at, " (%s:%d)", s->file, s->line);
    if (x.limit > 0) snprintf(allowed, sizeof allowed, "0 to %lld", (long long)x.limit - 1);
    if (x.kind == OM_FAULT_LABEL)
        return om_fail(cx, OM_INVALID, "%s: label %lld in row %lld; %s or ignore_index %lld are allowed%s", n->op->name,
                       (long long)x.value, (long long)x.position, allowed,
                       (long long)om_attr_int(attr, n->n_attr, "ignore_index", -100), at);
    return om_fail(cx, OM_INVALID, "%s: index %lld at position %lld is out of range; %s%s%s", n->op->name,
                   (long long)x.value, (long long)x.position, allowed, x.limit > 0 ? " are allowed" : "", at);
}

om_status om_eval_node(om_ctx *cx, const om_graph *g, const om_node *n, const om_attr *attr, const om_tensor *in,
                       om_tensor *out, uint64_t seed) {
    const om_row *row = om_row_of(&om_device_cpu, n->op);
    om_tensor ins[OM_MAX_IN];
    bool copied[OM_MAX_IN] = {0};
    om_status s = OM_OK;
    if (n->n_in > OM_MAX_IN)
        return om_fail(cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OM_MAX_IN);
    for (int i = 0; i < n->n_in; i++) {
        ins[i] = in[i];
        if (s == OM_OK && in[i].dtype && om_row_dense(row, i) && !om_is_dense(&in[i])) {
            s = om_tensor_alloc(cx, &ins[i]);
            copied[i] = s == OM_OK;
            if (s == OM_OK) s = om_copy(cx, &in[i], &ins[i]);
        }
    }
    const om_scalars scalars = {.seed = seed};
    om_fault fault = {0};
    om_args a = {.node = n,
                 .attr = attr,
                 .n_attr = n->n_attr,
                 .n_in = n->n_in,
                 .n_out = n->n_out,
                 .in = ins,
                 .out = out,
                 .scalars = &scalars,
                 .fault = &fault};
    if (s == OM_OK && n->op->view) {
        om_tensor v = out[0];
        int64_t offset = 0;
        om_tensor src = ins[0];
        if (n->op->view(&a, &ins[0], &v, &offset)) {
            v.data = (char *)ins[0].data + offset * (int64_t)om_dtype_size(v.dtype);
        } else { /* the plan's fallback: a dense copy, then the view always applies */
            s = om_tensor_alloc(cx, &src);
            if (s == OM_OK) s = om_copy(cx, &ins[0], &src);
            if (s == OM_OK && !n->op->view(&a, &src, &v, &offset))
                s = om_fail(cx, OM_INTERNAL, "%s: no view of a dense tensor", n->op->name);
            v.data = (char *)src.data + offset * (int64_t)om_dtype_size(v.dtype);
        }
        if (s == OM_OK) s = om_copy(cx, &v, &out[0]);
        if (src.data != ins[0].data) om_free(cx, src.data);
    } else if (s == OM_OK) {
        om_arena mem = {.cx = cx};
        if (!row->run) s = om_fail(cx, OM_UNSUPPORTED, "%s has no kernel: only the host can run it", n->op->name);
        if (s == OM_OK) s = eval_run(cx, row, &a, &mem);
        if (s == OM_OK) s = om_fault_fail(cx, g, n, attr, &fault);
        om_arena_free(&mem);
    }
    for (int i = 0; i < n->n_in; i++)
        if (copied[i]) om_free(cx, ins[i].data);
    return s;
}

om_status om_syms_bind(om_ctx *cx, const om_graph *g, const om_tensor *in, int64_t *sym) {
    for (uint32_t i = 0; i < g->syms.n; i++) {
        const om_sym *s = &g->syms.v[i];
        if (s->bounded) continue;
        if (s->input == OM_NONE)
            return om_fail(cx, OM_INVALID, "size %s is not a dimension of any graph input", s->name);
        const om_tensor *t = &in[s->input];
        if (s->axis >= 0) {
            if (s->axis >= t->rank)
                return om_fail(cx, OM_INVALID, "size %s is dimension %d of an input of rank %d", s->name, s->axis,
                               t->rank);
            sym[i] = t->dim[s->axis];
        } else if (t->dtype == OM_I64 && t->data) {
            sym[i] = *(const int64_t *)t->data;
        } else {
            return om_fail(cx, OM_INVALID, "size %s is the value of an input that is not a 64-bit integer", s->name);
        }
    }
    for (uint32_t i = 0; i < g->syms.n; i++) /* who needs a number takes the bound */
        if (g->syms.v[i].bounded) sym[i] = om_dim_eval(g, g->syms.v[i].bound, sym);
    return OM_OK;
}

om_status om_tensor_of(om_ctx *cx, const om_graph *g, om_id v, const int64_t *sym, om_tensor *t) {
    const om_type *ty = om_ty(g, v);
    *t = (om_tensor){.dtype = ty->dtype, .rank = ty->rank, .device = -1, .data = (void *)g->values.v[v].data};
    for (int i = 0; i < ty->rank; i++)
        if ((t->dim[i] = om_dim_eval(g, ty->dim[i], sym)) < 0) {
            char buf[128];
            om_dim_print(g, ty->dim[i], buf, sizeof buf);
            if (t->dim[i] == OM_DIM_BAD) return om_fail(cx, OM_INVALID, "a dimension %s is no 64-bit number", buf);
            return om_fail(cx, OM_INVALID, "a dimension %s would be %lld", buf, (long long)t->dim[i]);
        }
    int64_t bytes = (int64_t)om_dtype_size(t->dtype);
    for (int i = 0; i < t->rank; i++)
        if (t->dim[i] && (__builtin_mul_overflow(bytes, t->dim[i], &bytes) || bytes > OM_ADDRESSES))
            return om_fail(cx, OM_INVALID, "a tensor of rank %d would be larger than the address space", t->rank);
    om_dense_strides(t);
    return OM_OK;
}

om_status om_attrs_concrete(om_arena *a, const om_graph *g, const om_node *n, const int64_t *sym, const om_attr **out) {
    om_attr *to = om_arena_copy(a, n->attr, n->n_attr * sizeof *to);
    if (!to) return a->cx->status;
    for (int i = 0; i < n->n_attr; i++) {
        if (to[i].kind != OM_ATTR_DIMS) continue;
        om_dim *d = om_arena_alloc(a, to[i].n * sizeof *d);
        if (!d) return a->cx->status;
        for (uint32_t k = 0; k < to[i].n; k++)
            if ((d[k] = om_dim_eval(g, n->attr[i].dims[k], sym)) == OM_DIM_BAD) {
                char buf[128];
                om_dim_print(g, n->attr[i].dims[k], buf, sizeof buf);
                return om_fail(a->cx, OM_INVALID, "%s: %s %s is no 64-bit number", n->op->name, to[i].name, buf);
            }
        to[i].dims = d;
    }
    *out = to;
    return OM_OK;
}

om_status om_interpret(om_ctx *cx, const om_graph *g, const om_tensor *in, uint64_t seed, om_tensor *out) {
    uint32_t n_out = g->outputs.n + g->writes.n + g->grads.n;
    memset(out, 0, n_out * sizeof *out);
    om_tensor *val = om_alloc(cx, (g->values.n + 1) * sizeof *val);
    int64_t *sym = om_alloc(cx, (g->syms.n + 1) * sizeof *sym);
    om_arena arena = {.cx = cx};
    om_status s = val && sym ? om_syms_bind(cx, g, in, sym) : cx->status;
    for (om_id v = 0; v < g->values.n && s == OM_OK; v++) {
        const om_value *x = om_val(g, v);
        if ((s = om_tensor_of(cx, g, v, sym, &val[v])) != OM_OK) break;
        if (x->input != OM_NONE) {
            const om_tensor *t = &in[x->input];
            if (!om_same_kind(t, &val[v]))
                s = om_fail(cx, OM_INVALID, "graph input %s: dtype, rank or sizes differ from the graph's",
                            x->name ? x->name : "?");
            val[v] = *t;
        } else if (x->role == OM_ACT) {
            s = om_tensor_alloc(cx, &val[v]);
        }
    }
    for (om_id i = 0; i < g->nodes.n && s == OM_OK; i++) {
        const om_node *n = &g->nodes.v[i];
        om_tensor ins[OM_MAX_IN] = {0};
        const om_attr *attr = NULL;
        for (int k = 0; k < n->n_in && k < OM_MAX_IN; k++)
            if (om_ins(g, n)[k] != OM_NONE) ins[k] = val[om_ins(g, n)[k]];
        s = om_attrs_concrete(&arena, g, n, sym, &attr);
        if (s == OM_OK) s = om_eval_node(cx, g, n, attr, ins, &val[n->out], seed);
    }
    for (uint32_t i = 0; i < n_out && s == OM_OK; i++) {
        om_id v = i < g->outputs.n                 ? g->outputs.v[i]
                  : i < g->outputs.n + g->writes.n ? g->writes.v[i - g->outputs.n].value
                                                   : g->grads.v[i - g->outputs.n - g->writes.n].value;
        if (v == OM_NONE) continue;
        om_tensor t = val[v];
        if ((s = om_tensor_alloc(cx, &t)) != OM_OK) break;
        out[i] = t;
        s = om_copy(cx, &val[v], &t);
    }
    for (om_id v = 0; val && v < g->values.n; v++)
        if (om_val(g, v)->role == OM_ACT) om_free(cx, val[v].data);
    if (s != OM_OK)
        for (uint32_t i = 0; i < n_out; i++) {
            om_free(cx, out[i].data);
            out[i] = (om_tensor){0};
        }
    om_arena_free(&arena);
    om_free(cx, val);
    om_free(cx, sym);
    return s;
}
