/* rewrite.c - graph to graph: the form every pass has.
 *
 * om_rewrite copies inputs, symbols, scopes and constants, then visits the live nodes of `from` in order and calls
 * `emit` for each; emit maps the node's outputs to values of `to` (om_rewrite_copy: the same node again). Outputs,
 * writes and gradients are carried over through the map. Dead nodes are dropped on the way, so every pass also cleans
 * up; host nodes with an effect (attribute of ops/host.c) are never dead.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"

static om_id map_get(om_rewriter *r, om_id v) {
    if (v == OM_NONE) return OM_NONE;
    if (r->map[v] == OM_NONE && r->from->values.v[v].role == OM_CONST) { /* constants are copied when first used */
        const om_value *c = &r->from->values.v[v];
        int64_t dim[OM_RANK];
        for (int i = 0; i < c->type.rank; i++) dim[i] = c->type.dim[i];
        r->map[v] = om_const(r->to, c->type.dtype, c->type.rank, dim, c->data);
        if (r->map[v] != OM_NONE && c->name) om_val(r->to, r->map[v])->name = om_arena_str(&r->to->arena, c->name);
    }
    return r->map[v];
}

/* Values an emit function may need of operands that are constants: mapped before emit is called. */
static om_status operands_map(om_rewriter *r, const om_node *n) {
    for (int i = 0; i < n->n_in; i++) {
        om_id v = om_ins(r->from, n)[i];
        if (v != OM_NONE && map_get(r, v) == OM_NONE)
            return r->to->cx->status != OM_OK
                       ? r->to->cx->status
                       : om_fail(r->to->cx, OM_INTERNAL, "rewriting: operand %d of %s was dropped", i, n->op->name);
    }
    return OM_OK;
}

om_id om_rewrite_node(om_rewriter *r, const om_node *n, const om_id *in, int n_in) {
    om_graph *g = r->to;
    om_attr attr[OM_MAX_ATTR];
    om_dim dims[OM_MAX_DIMS];
    uint32_t nd = 0;
    if (n->n_attr > OM_MAX_ATTR)
        return om_fail(g->cx, OM_UNSUPPORTED, "%s with %d attributes: at most %d", n->op->name, n->n_attr, OM_MAX_ATTR),
               OM_NONE;
    for (int i = 0; i < n->n_attr; i++) {
        attr[i] = n->attr[i];
        if (attr[i].kind != OM_ATTR_DIMS) continue;
        if (nd + attr[i].n > OM_MAX_DIMS)
            return om_fail(g->cx, OM_UNSUPPORTED, "%s: attribute lists of more than %d entries", n->op->name,
                           OM_MAX_DIMS),
                   OM_NONE;
        for (uint32_t k = 0; k < attr[i].n; k++) dims[nd + k] = om_dim_copy(g, r->from, n->attr[i].dims[k]);
        attr[i].dims = dims + nd;
        nd += attr[i].n;
    }
    om_id out = om_make(g, n->op, in, n_in, attr, n->n_attr);
    if (g->cx->status != OM_OK) return OM_NONE;
    om_node *m = om_last(g);
    m->rng = n->rng && om_sabotage("rewrite.stream") ? 1000 : n->rng;
    m->segment = n->segment;
    m->again = n->again;
    return out;
}

static om_status node_copy(om_rewriter *r, const om_node *n, const om_id *in) {
    om_graph *g = r->to;
    g->cur_scope = n->scope;
    g->cur_phase = n->phase;
    om_id out = om_rewrite_node(r, n, in, n->n_in);
    if (g->cx->status != OM_OK) return g->cx->status;
    for (int i = 0; i < n->n_out; i++) {
        r->map[n->out + (om_id)i] = out + (om_id)i;
        if (r->from->values.v[n->out + (om_id)i].name)
            om_val(g, out + (om_id)i)->name = om_arena_str(&g->arena, r->from->values.v[n->out + (om_id)i].name);
    }
    return OM_OK;
}

om_status om_rewrite_copy_with(om_rewriter *r, om_id node, const om_id *in) {
    return node_copy(r, &r->from->nodes.v[node], in);
}

om_status om_rewrite_copy(om_rewriter *r, om_id node) {
    const om_node *n = &r->from->nodes.v[node];
    om_id in[OM_MAX_IN];
    if (n->n_in > OM_MAX_IN)
        return om_fail(r->to->cx, OM_UNSUPPORTED, "%s with %d operands: at most %d", n->op->name, n->n_in, OM_MAX_IN);
    for (int i = 0; i < n->n_in; i++) in[i] = map_get(r, om_ins(r->from, n)[i]);
    return om_rewrite_copy_with(r, node, in);
}

om_status om_rewrite_copy_more(om_rewriter *r, om_id node, const om_id *in, om_attr more) {
    om_node n = r->from->nodes.v[node];
    om_attr attr[OM_MAX_ATTR];
    if (n.n_attr + 1 > OM_MAX_ATTR)
        return om_fail(r->to->cx, OM_UNSUPPORTED, "%s with more than %d attributes", n.op->name, OM_MAX_ATTR);
    for (int i = 0; i < n.n_attr; i++) attr[i] = n.attr[i];
    attr[n.n_attr++] = more;
    n.attr = attr;
    return node_copy(r, &n, in);
}

static _Thread_local om_rewrite_told rewrite_told;
static _Thread_local void *rewrite_arg;

void om_rewrite_tell(om_rewrite_told told, void *arg) { rewrite_told = told, rewrite_arg = arg; }

om_status om_rewrite(om_ctx *cx, const om_graph *from, om_emit_fn emit, void *arg, om_graph **out) {
    *out = NULL;
    om_graph *g = om_graph_new(cx);
    om_rewriter r = {from, g, om_alloc(cx, (from->values.n + 1) * sizeof(om_id)), arg};
    uint8_t *live = om_alloc(cx, from->nodes.n + 1);
    om_status s = g && r.map && live ? OM_OK : cx->status;
    if (s != OM_OK) goto done;
    memset(r.map, 0xff, from->values.n * sizeof(om_id));

    om_nodes_live(from, live);
    for (uint32_t i = 0; i < from->syms.n; i++) om_dim_sym(g, from->syms.v[i].name);
    for (uint32_t i = 0; i < from->scopes.n && cx->status == OM_OK; i++) {
        om_scope *sc = OM_PUSH(cx, &g->scopes);
        if (sc)
            *sc = (om_scope){om_arena_str(&g->arena, from->scopes.v[i].module),
                             om_arena_str(&g->arena, from->scopes.v[i].file), from->scopes.v[i].line,
                             om_arena_str(&g->arena, from->scopes.v[i].region)};
    }
    for (uint32_t i = 0; i < from->inputs.n; i++) {
        const om_value *v = om_val(from, from->inputs.v[i]);
        om_type t = v->type;
        for (int k = 0; k < t.rank; k++) t.dim[k] = om_dim_copy(g, from, t.dim[k]);
        r.map[from->inputs.v[i]] = om_input(g, v->role, v->name, &t);
        if (v->host && cx->status == OM_OK) om_input_host(g, i);
    }
    for (uint32_t i = 0; i < from->syms.n && cx->status == OM_OK; i++)
        if (!from->syms.v[i].bounded)
            om_sym_bind(g, from->syms.v[i].name, from->syms.v[i].input, from->syms.v[i].axis);
    for (uint32_t i = 0; i < from->syms.n && cx->status == OM_OK; i++)
        if (from->syms.v[i].bounded)
            om_sym_bound(g, from->syms.v[i].name, om_dim_copy(g, from, from->syms.v[i].bound));
    g->n_rng = from->n_rng;

    for (om_id i = 0; i < from->nodes.n && (s = cx->status) == OM_OK; i++) {
        if (!live[i]) continue;
        if ((s = operands_map(&r, &from->nodes.v[i])) != OM_OK) break;
        g->cur_scope = from->nodes.v[i].scope;
        g->cur_phase = from->nodes.v[i].phase;
        if ((s = emit(&r, i)) != OM_OK) break;
        om_sabotage_replaced(&r, i);
    }
    if (s == OM_OK) s = cx->status;
    for (uint32_t i = 0; i < from->outputs.n && s == OM_OK; i++) {
        om_id *o = OM_PUSH(cx, &g->outputs);
        if (!o) s = cx->status;
        else if ((*o = map_get(&r, from->outputs.v[i])) == OM_NONE)
            s = om_fail(cx, OM_INTERNAL, "rewriting: output %u was dropped", i);
    }
    for (uint32_t i = 0; i < from->writes.n && s == OM_OK; i++) {
        if (om_sabotage("rewrite.write")) continue;
        om_write *w = OM_PUSH(cx, &g->writes);
        if (!w) s = cx->status;
        else *w = (om_write){map_get(&r, from->writes.v[i].value), from->writes.v[i].input};
    }
    for (uint32_t i = 0; i < from->grads.n && s == OM_OK; i++) {
        om_gradout *w = OM_PUSH(cx, &g->grads);
        if (!w) s = cx->status;
        else
            *w = (om_gradout){om_sabotage("rewrite.grad") ? OM_NONE : map_get(&r, from->grads.v[i].value),
                              from->grads.v[i].input};
    }
    if (s == OM_OK) s = cx->status;
    if (s == OM_OK && rewrite_told) rewrite_told(rewrite_arg, from, g, r.map);
done:
    om_free(cx, r.map);
    om_free(cx, live);
    if (s == OM_OK) *out = g;
    else om_graph_free(g);
    return s;
}
