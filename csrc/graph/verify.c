/* verify.c - is this graph what engine.h promises? Run after import and, in debug builds, after every pass.
 *
 * Checked: every id and index is in range; nodes only read values defined before them; values and nodes point at each
 * other; types are what the operator infers again; no forward node reads a backward value; random nodes have a stream;
 * symbols are bound to an existing axis; rows of bounded sizes meet nowhere; host scalars have one element and are not
 * written; writes and gradients have the type of the input they belong to. The message names the node and what is
 * wrong.
 */
#include "graph/engine.h"

#include <stdio.h>

static void verify_name(const om_graph *g, om_id node, char *buf, size_t size) {
    const om_node *n = &g->nodes.v[node];
    const char *value = n->out < g->values.n ? g->values.v[n->out].name : NULL;
    const om_scope *s = n->scope < g->scopes.n ? &g->scopes.v[n->scope] : NULL;
    snprintf(buf, size, "node %u (%s%s%.80s%s%.80s)", node, n->op ? n->op->name : "no operator", value ? ", " : "",
             value ? value : "", s && s->module ? ", " : "",
             s && s->module ? s->module : "");
}
#define VERIFY(g, node, cond, ...)                                                                  \
    do {                                                                                            \
        if (!(cond)) {                                                                              \
            char name_[240], text_[400];                                                            \
            verify_name((g), (node), name_, sizeof name_);                                          \
            snprintf(text_, sizeof text_, __VA_ARGS__);                                             \
            return om_fail((g)->cx, OM_INTERNAL, "graph: %s: %s", name_, text_);                    \
        }                                                                                           \
    } while (0)
#define VERIFY_GRAPH(g, cond, ...)                                                                  \
    do {                                                                                            \
        if (!(cond)) return om_fail((g)->cx, OM_INTERNAL, "graph: " __VA_ARGS__);                   \
    } while (0)

static bool verify_dim(const om_graph *g, om_dim d) { return d >= 0 || ~d < (om_dim)g->exprs.n; }
static bool verify_type(const om_graph *g, const om_type *t) {
    if (t->rank > OM_RANK || t->dtype >= OM_N_DTYPES || t->dtype == OM_NODTYPE) return false;
    for (int i = 0; i < t->rank; i++)
        if (!verify_dim(g, t->dim[i])) return false;
    return true;
}
static bool verify_same(const om_type *a, const om_type *b) {
    if (a->dtype != b->dtype || a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] != b->dim[i]) return false;
    return true;
}

static om_status verify_exprs(const om_graph *g) {
    for (om_id i = 0; i < g->exprs.n; i++) {
        const om_expr *e = &g->exprs.v[i];
        VERIFY_GRAPH(g, e->kind <= OM_DIM_INT, "size expression %u has kind %u", i, e->kind);
        if (e->kind == OM_DIM_SYM)
            VERIFY_GRAPH(g, e->a >= 0 && e->a < (om_dim)g->syms.n, "size expression %u names symbol %lld", i,
                         (long long)e->a);
        else if (e->kind != OM_DIM_INT) /* operands are made before: expressions cannot be cyclic */
            VERIFY_GRAPH(g, (e->a >= 0 || ~e->a < (om_dim)i) && (e->b >= 0 || ~e->b < (om_dim)i),
                         "size expression %u refers to a later one", i);
    }
    return OM_OK;
}

static om_status verify_values(const om_graph *g) {
    for (om_id i = 0; i < g->inputs.n; i++) {
        om_id v = g->inputs.v[i];
        VERIFY_GRAPH(g, v < g->values.n && om_val(g, v)->input == i,
                     "graph input %u and its value do not point at each other", i);
    }
    for (om_id i = 0; i < g->values.n; i++) {
        const om_value *v = om_val(g, i);
        VERIFY_GRAPH(g, verify_type(g, &v->type), "value %u has no valid type", i);
        if (v->role == OM_ACT) {
            VERIFY_GRAPH(
                g, v->node < g->nodes.n && v->out < g->nodes.v[v->node].n_out && g->nodes.v[v->node].out + v->out == i,
                "value %u and its producer do not point at each other", i);
        } else if (v->role == OM_CONST) {
            VERIFY_GRAPH(g, v->node == OM_NONE && v->data && !((uintptr_t)v->data & 63),
                         "constant %u has no aligned data", i);
            for (int k = 0; k < v->type.rank; k++)
                VERIFY_GRAPH(g, v->type.dim[k] >= 0, "constant %u has a size that is not a number", i);
        } else {
            bool one = !v->host || (v->role != OM_GRAD_IN && om_dtype_size(v->type.dtype) > 0);
            for (int k = 0; k < v->type.rank; k++) one &= !v->host || v->type.dim[k] == 1;
            VERIFY_GRAPH(g, one, "graph input %u is marked as a host scalar and is none", v->input);
            VERIFY_GRAPH(
                g, v->role <= OM_GRAD_IN && v->node == OM_NONE && v->input < g->inputs.n && g->inputs.v[v->input] == i,
                "value %u is no proper graph input", i);
        }
    }
    return OM_OK;
}

static om_status verify_syms(const om_graph *g) {
    for (om_id i = 0; i < g->syms.n; i++) {
        const om_sym *s = &g->syms.v[i];
        VERIFY_GRAPH(g, s->name, "symbol %u has no name", i);
        om_dim size;
        const om_type bound = {.rank = 1, .dim = {s->bound}};
        VERIFY_GRAPH(g, !s->bounded || (s->input == OM_NONE && verify_dim(g, s->bound) &&
                                        om_bounded_axis(g, &bound, &size) == -1),
                     "bounded symbol %s has no bound, or an input tells it", s->name);
        if (s->input == OM_NONE) continue;
        VERIFY_GRAPH(g, s->input < g->inputs.n, "symbol %s is bound to graph input %u of %u", s->name, s->input,
                     g->inputs.n);
        VERIFY_GRAPH(g, om_val(g, g->inputs.v[s->input])->role != OM_GRAD_IN,
                     "symbol %s is bound to a gradient, which arrives after the forward that needs its value", s->name);
        const om_type *t = om_ty(g, g->inputs.v[s->input]);
        VERIFY_GRAPH(g, s->axis >= 0 ? s->axis < t->rank : t->rank == 0 && om_is_int(t->dtype),
                     "symbol %s is bound to axis %d of an input of rank %d", s->name, s->axis, t->rank);
        VERIFY_GRAPH(g, s->axis >= 0 || om_val(g, g->inputs.v[s->input])->host,
                     "symbol %s is the value of an input that is no host scalar", s->name);
        om_dim d = s->axis >= 0 ? t->dim[s->axis] : 0; /* a size is read off an axis that is exactly that size */
        VERIFY_GRAPH(g, s->axis < 0 || (d < 0 && g->exprs.v[~d].kind == OM_DIM_SYM && g->exprs.v[~d].a == (om_dim)i),
                     "symbol %s is bound to axis %d of an input, which has another size", s->name, s->axis);
    }
    return OM_OK;
}

static om_status verify_node(om_graph *g, om_id id) {
    const om_node *n = &g->nodes.v[id];
    om_ctx *cx = g->cx;
    VERIFY(g, id, n->op && n->op->infer, "no operator");
    VERIFY(g, id, n->in <= g->operands.n && n->n_in <= g->operands.n - n->in, "operands out of range");
    VERIFY(g, id, n->out <= g->values.n && n->n_out <= g->values.n - n->out && n->n_out <= OM_MAX_OUT,
           "outputs out of range");
    VERIFY(g, id, n->n_in >= n->op->min_in && (n->op->max_in < 0 || n->n_in <= n->op->max_in), "%d operands", n->n_in);
    VERIFY(g, id, n->op->n_out < 0 || n->n_out == n->op->n_out, "%d outputs", n->n_out);
    VERIFY(g, id, n->scope == OM_NONE || n->scope < g->scopes.n, "scope %u of %u", n->scope, g->scopes.n);
    VERIFY(g, id, n->phase <= OM_UPDATE, "phase %d", n->phase);
    VERIFY(g, id, !n->op->state || n->phase == OM_UPDATE, "it changes state, so its phase is update");
    for (int i = 0; i < n->n_in; i++) {
        om_id v = om_ins(g, n)[i];
        if (v == OM_NONE) continue;
        VERIFY(g, id, v < g->values.n, "operand %d is value %u of %u", i, v, g->values.n);
        om_id p = om_val(g, v)->node;
        VERIFY(g, id, p == OM_NONE || p < id, "operand %d is computed later", i);
        VERIFY(g, id, p == OM_NONE || g->nodes.v[p].phase <= n->phase, "a %s node reads a value of a later phase",
               n->phase == OM_FORWARD ? "forward" : "backward");
        VERIFY(g, id, om_val(g, v)->role != OM_GRAD_IN || n->phase != OM_FORWARD,
               "a forward node reads an arriving gradient");
    }
    for (int i = 0; i < n->n_attr; i++) {
        VERIFY(g, id, n->attr[i].name && n->attr[i].kind <= OM_ATTR_DIMS, "attribute %d is malformed", i);
        for (uint32_t k = 0; n->attr[i].kind == OM_ATTR_DIMS && k < n->attr[i].n; k++)
            VERIFY(g, id, verify_dim(g, n->attr[i].dims[k]), "attribute %s[%u] is no size", n->attr[i].name, k);
    }
    if (n->op->random && (om_node_float(n, "p", 0) > 0 || om_node_float(n, "dropout", 0) > 0))
        VERIFY(g, id, n->rng != 0, "random, but it has no stream");
    om_type t[OM_MAX_OUT] = {0};
    om_node copy = *n;
    if (copy.op->infer(g, &copy, t) != OM_OK || cx->status != OM_OK) { /* its message first, then where */
        char what[sizeof cx->message];
        memcpy(what, cx->message, sizeof what);
        om_ctx_clear(cx);
        VERIFY(g, id, false, "%.300s", what[0] ? what : "its type rule failed");
    }
    if (g->bounded && om_bounded_check(g, n, t) != OM_OK) {
        char what[sizeof cx->message];
        memcpy(what, cx->message, sizeof what);
        om_ctx_clear(cx);
        VERIFY(g, id, false, "%.300s", what);
    }
    for (int i = 0; i < copy.n_out; i++)
        VERIFY(g, id, verify_same(&t[i], om_ty(g, copy.out + (om_id)i)),
               "output %d is %s of rank %d, its type rule says %s of rank %d (or other sizes)", i,
               om_dtype_name(om_ty(g, copy.out + (om_id)i)->dtype), om_ty(g, copy.out + (om_id)i)->rank,
                   om_dtype_name(t[i].dtype), t[i].rank);
    return OM_OK;
}

om_status om_verify(const om_graph *graph) {
    om_graph *g = (om_graph *)graph; /* type rules may intern size expressions, nothing else */
    if (g->cx->status != OM_OK) return g->cx->status;
    OM_TRY(verify_exprs(g));
    OM_TRY(verify_values(g));
    OM_TRY(verify_syms(g));
    for (om_id i = 0; i < g->nodes.n; i++) OM_TRY(verify_node(g, i));
    for (om_id i = 0; i < g->outputs.n; i++)
        VERIFY_GRAPH(g, g->outputs.v[i] < g->values.n, "output %u is value %u of %u", i, g->outputs.v[i], g->values.n);
    for (om_id i = 0; i < g->writes.n; i++) {
        om_write w = g->writes.v[i];
        VERIFY_GRAPH(g, w.value < g->values.n && w.input < g->inputs.n, "write %u is out of range", i);
        const om_type *a = om_ty(g, w.value), *b = om_ty(g, g->inputs.v[w.input]);
        VERIFY_GRAPH(g, !om_val(g, g->inputs.v[w.input])->host, "write %u stores into a host scalar", i);
        VERIFY_GRAPH(g, a->dtype == b->dtype && a->rank == b->rank,
                     "write %u stores %s of rank %d into an input of %s of rank %d", i, om_dtype_name(a->dtype),
                     a->rank, om_dtype_name(b->dtype), b->rank);
    }
    for (om_id i = 0; i < g->grads.n; i++) {
        om_gradout d = g->grads.v[i];
        VERIFY_GRAPH(g, d.input < g->inputs.n && (d.value == OM_NONE || d.value < g->values.n),
                     "gradient %u is out of range", i);
        if (d.value != OM_NONE)
            VERIFY_GRAPH(g, verify_same(om_ty(g, d.value), om_ty(g, g->inputs.v[d.input])),
                         "the gradient of graph input %u has another type than the input", d.input);
    }
    return om_bounded_ends(g);
}
