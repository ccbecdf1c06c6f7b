/* read.c - ONNX ModelProto bytes to a graph: docs/ONNX.md is the contract.
 *
 * 1. om_onnx_wire walks the bytes; only then protobuf-c unpacks them, into an arena.
 * 2. Graph inputs become inputs, parameters or buffers (metadata `role:<name>`); their dim_params are parsed as size
 * expressions,
 *    a dimension that is exactly a symbol binds it. Initialisers stay in the file until a node needs them.
 * 3. Nodes in file order: the size rule first (shape arithmetic makes lists, no nodes), else the row's map function
 *    builds engine nodes. Results are compared with the file's value_info: dtype, rank and known sizes must agree.
 * 4. Outputs, write-backs (metadata `write:<output>`), and every symbol in use must be bound.
 *
 * Nothing of the file is trusted: names are looked up, indices and sizes are checked, element counts are compared with
 * the bytes that are there. Nodes must stand in topological order, as ONNX demands.
 */
#include "onnx/read.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>

/* --- errors -------------------------------------------------------------------------------------- */

static void read_blame(const om_onnx *o, char *buf, size_t size) {
    if (!o->node) snprintf(buf, size, "ONNX graph: ");
    else
        snprintf(buf, size, "ONNX node %zu '%.80s' (%.60s%s%.60s): ", o->index, o->node->name ? o->node->name : "",
                 o->node->domain ? o->node->domain : "", o->node->domain && *o->node->domain ? "." : "",
                 o->node->op_type ? o->node->op_type : "?");
}

om_status om_onnx_err_at(om_onnx *o, om_status s, const char *file, int line, const char *fmt, ...) {
    char text[800], blame[320];
    if (o->cx->status != OM_OK) return o->cx->status;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    read_blame(o, blame, sizeof blame);
    return om_fail_at(o->cx, s, file, line, "%s%s", blame, text);
}

/* A message from deeper down (an operator's type rule) gets the node's place in front. */
static om_status read_blame_message(om_onnx *o) {
    char blame[320], text[sizeof o->cx->message];
    if (!o->node || strstr(o->cx->message, "ONNX ")) return o->cx->status;
    read_blame(o, blame, sizeof blame);
    memcpy(text, o->cx->message, sizeof text);
    snprintf(o->cx->message, sizeof o->cx->message, "%s%.*s", blame, (int)(sizeof text - sizeof blame), text);
    return o->cx->status;
}

/* --- nodes --------------------------------------------------------------------------------------- */

static om_id read_scope(om_onnx *o) {
    const char *module = om_onnx_meta(o, "module"), *file = om_onnx_meta(o, "file"), *line = om_onnx_meta(o, "line");
    const char *region = om_onnx_meta(o, "checkpoint");
    om_graph *g = o->g;
    if (!module && !file && !region) return OM_NONE;
    long n = 0;
    for (const char *c = line; c && isdigit((unsigned char)*c) && n < 100000000; c++) n = n * 10 + (*c - '0');
    if (!module) module = "";
    for (om_id i = g->scopes.n; i-- > 0 && g->scopes.n - i <= 64;) { /* neighbours share scopes */
        const om_scope *s = &g->scopes.v[i];
        if (s->line == n && !strcmp(s->module, module) && (s->file ? file && !strcmp(s->file, file) : !file) &&
            (s->region ? region && !strcmp(s->region, region) : !region))
            return i;
    }
    om_scope *s = OM_PUSH(o->cx, &g->scopes);
    if (!s) return OM_NONE;
    *s = (om_scope){om_arena_str(&g->arena, module), om_arena_str(&g->arena, file), (int)n,
                      om_arena_str(&g->arena, region)};
    return g->scopes.n - 1;
}

static const om_onnx_op *read_row(const char *domain, const char *name) {
    if (!strcmp(domain, "ai.onnx")) domain = "";
    if (!*name) return NULL; /* so rows that are no ONNX operator are called */
    for (int i = 0; om_onnx_tables[i]; i++)
        for (const om_onnx_op *r = om_onnx_tables[i]; r->name; r++)
            if (!strcmp(r->name, name) && !strcmp(r->domain, domain)) return r;
    return NULL;
}

/* The first number in a size that is absurdly large, or 0. */
static int64_t read_absurd(const om_graph *g, om_dim d) {
    int64_t c, found;
    if (om_dim_const(g, d, &c)) return c > OM_ONNX_SIZE || c < -OM_ONNX_SIZE ? c : 0;
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_SYM) return 0;
    return (found = read_absurd(g, e->a)) ? found : read_absurd(g, e->b);
}

/* No axis and no size attribute of what a node made may hold an absurd number: later arithmetic on sizes would
 * overflow. */
static om_status read_check_sizes(om_onnx *o, om_id from, om_id from_node) {
    for (om_id k = from_node; k < o->g->nodes.n; k++) {
        const om_node *n = &o->g->nodes.v[k];
        for (int i = 0; i < n->n_attr; i++)
            for (uint32_t j = 0; n->attr[i].kind == OM_ATTR_DIMS && j < n->attr[i].n; j++) {
                int64_t c = read_absurd(o->g, n->attr[i].dims[j]);
                ONNX_CHECK(o, !c, "%lld as %s of %s", (long long)c, n->attr[i].name, n->op->name);
            }
    }
    for (om_id v = from; v < o->g->values.n; v++)
        for (int i = 0; i < om_ty(o->g, v)->rank; i++) {
            int64_t c, n = read_absurd(o->g, om_ty(o->g, v)->dim[i]);
            ONNX_CHECK(o, !n, "%lld in the size of a result along axis %d", (long long)n, i);
            if (om_dim_const(o->g, om_ty(o->g, v)->dim[i], &c))
                ONNX_CHECK(o, c >= 0, "a result would have size %lld along axis %d", (long long)c, i);
        }
    return OM_OK;
}

static om_status read_node(om_onnx *o) {
    const Onnx__NodeProto *n = o->node;
    ONNX_CHECK(o, n->op_type, "the node has no op_type");
    const om_onnx_op *r = o->row = read_row(n->domain ? n->domain : "", n->op_type);
    if (!r)
        return om_onnx_err(
            o, OM_UNSUPPORTED,
            "the operator is not supported (csrc/onnx_*.c have the list); a capture keeps such operators in PyTorch "
            "as org.pytorch.aten::ATen");
    ONNX_CHECK(o, n->n_input <= 65536 && n->n_output <= 65536, "%zu inputs and %zu outputs, at most 65536", n->n_input,
               n->n_output);
    o->n_in = (int)n->n_input;
    ONNX_CHECK(o, r->max_in < 0 || o->n_in <= r->max_in, "%d inputs, at most %d are known", o->n_in, r->max_in);
    o->in = om_arena_alloc(&o->tmp, ((size_t)o->n_in + 1) * sizeof *o->in);
    if (!o->in) return o->cx->status;
    for (int i = 0; i < o->n_in; i++) {
        o->in[i] = OM_NONE;
        if (!n->input[i][0]) continue;
        o->in[i] = om_strmap_get(&o->names, n->input[i]);
        ONNX_CHECK(o, o->in[i] != OM_NONE,
                   "input %d '%.80s' is not defined by a graph input, an initialiser or an earlier node", i,
                   n->input[i]);
    }
    for (int i = 0; i < r->min_in; i++) ONNX_CHECK(o, om_onnx_has(o, i), "input %d is missing", i);
    ONNX_CHECK(o, n->n_output >= 1 && (r->max_out < 0 || n->n_output <= (size_t)r->max_out),
               "%zu outputs, 1 to %d are known", n->n_output, r->max_out);
    for (size_t i = 0; i < n->n_attribute; i++)
        ONNX_CHECK(o, !n->attribute[i]->ref_attr_name || !*n->attribute[i]->ref_attr_name,
                   "attribute '%.60s' refers to a function's attribute",
                   n->attribute[i]->name ? n->attribute[i]->name : "");
    o->g->cur_scope = read_scope(o);
    if (r->size && r->size(o)) return o->cx->status;
    if (o->cx->status != OM_OK) return o->cx->status;
    if (!r->map)
        return om_onnx_err(
            o, OM_UNSUPPORTED,
            "only sizes known before the run are supported here: its operands must be constants or computed from sizes "
            "of graph inputs");
    om_id before = o->g->values.n, before_node = o->g->nodes.n;
    OM_TRY(r->map(o));
    OM_TRY(read_check_sizes(o, before, before_node));
    for (int k = 0; k < (int)n->n_output && o->cx->status == OM_OK; k++)
        if (om_onnx_wants(o, k) && om_strmap_get(&o->names, n->output[k]) == OM_NONE)
            return om_onnx_err(o, OM_UNSUPPORTED, "output %d '%.80s' is used but the engine does not compute it", k,
                               n->output[k]);
    return o->cx->status;
}

/* --- graph --------------------------------------------------------------------------------------- */

static om_status read_inputs(om_onnx *o) {
    const Onnx__GraphProto *f = o->graph;
    om_graph *g = o->g;
    for (size_t i = 0; i < f->n_initializer; i++) {
        const Onnx__TensorProto *t = f->initializer[i];
        ONNX_CHECK(o, t->name && *t->name, "initialiser %zu has no name", i);
        om_onnx_val *v = om_onnx_define(o, t->name);
        if (!v) return o->cx->status;
        v->lit = t;
        OM_TRY(om_onnx_literal(o, v));
    }
    for (size_t i = 0; i < f->n_input; i++) {
        const Onnx__ValueInfoProto *in = f->input[i];
        om_type t;
        ONNX_CHECK(o, in->name && *in->name, "graph input %zu has no name", i);
        om_id known = om_strmap_get(&o->names, in->name);
        if (known != OM_NONE && known < f->n_initializer) continue; /* the initialiser is its default value */
        OM_TRY(om_onnx_type(o, in->type, OM_ONNX_INPUT, in->name, &t));
        const char *role = om_onnx_graph_meta(o, "role", in->name), *sym = om_onnx_graph_meta(o, "symbol", in->name);
        ONNX_CHECK(o, !role || !strcmp(role, "input") || !strcmp(role, "param") || !strcmp(role, "buffer"),
                   "role '%.40s' of graph input '%.80s'; input, param and buffer are allowed",
                   role ? role : "", in->name);
        om_id id = om_input(g,
                            !role || !strcmp(role, "input") ? OM_INPUT
                            : !strcmp(role, "param")        ? OM_PARAM
                                                            : OM_BUFFER,
                            in->name, &t);
        om_onnx_val *v = id != OM_NONE ? om_onnx_define(o, in->name) : NULL;
        if (!v) return o->cx->status;
        v->v = id;
        if (sym) {
            ONNX_CHECK(o, t.rank == 0 && t.dtype == OM_I64,
                       "graph input '%.80s' names the size '%.40s', so it must be a 0-d int64 tensor", in->name, sym);
            om_dim *list = om_arena_alloc(&o->tmp, sizeof *list);
            if (!list) return o->cx->status;
            OM_TRY(om_onnx_dim_param(o, sym, list));
            ONNX_CHECK(o, *list < 0 && g->exprs.v[~*list].kind == OM_DIM_SYM,
                       "graph input '%.80s': '%.40s' is not the name of a size", in->name, sym);
            OM_TRY(om_sym_bind(g, g->syms.v[g->exprs.v[~*list].a].name, om_val(g, id)->input, -1));
            v->list = list;
            v->n = 1;
            v->rank = 0;
            v->dtype = OM_I64;
        }
    }
    for (om_id i = 0; i < g->inputs.n; i++) {
        const om_type *t = om_ty(g, g->inputs.v[i]);
        for (int k = 0; k < t->rank; k++)
            if (t->dim[k] < 0 && g->exprs.v[~t->dim[k]].kind == OM_DIM_SYM) {
                const char *sym = g->syms.v[g->exprs.v[~t->dim[k]].a].name;
                OM_TRY(om_sym_bind(g, sym, i, k));
            }
    }
    return o->cx->status;
}

static om_status read_outputs(om_onnx *o) {
    const Onnx__GraphProto *f = o->graph;
    om_graph *g = o->g;
    for (size_t i = 0; i < f->n_output; i++) {
        const char *name = f->output[i]->name ? f->output[i]->name : "";
        om_id k = om_strmap_get(&o->names, name);
        ONNX_CHECK(o, k != OM_NONE, "graph output %zu '%.80s' is computed by no node", i, name);
        om_id v = om_onnx_value(o, &o->vals.v[k], name);
        if (v == OM_NONE) return o->cx->status;
        if (om_val(g, v)->role != OM_CONST) om_onnx_check_type(o, name, om_ty(g, v));
        const char *to = om_onnx_graph_meta(o, "write", name);
        if (to) {
            om_id t = om_strmap_get(&o->names, to), in = t == OM_NONE ? OM_NONE : o->vals.v[t].v;
            ONNX_CHECK(o, in != OM_NONE && om_val(g, in)->input != OM_NONE,
                       "output '%.80s' is to be written to '%.80s', which is no graph input", name, to);
            const om_type *a = om_ty(g, v), *b = om_ty(g, in);
            ONNX_CHECK(o, a->dtype == b->dtype && a->rank == b->rank,
                       "output '%.80s' is to be written to '%.80s' of another dtype or rank", name, to);
            om_write *w = OM_PUSH(o->cx, &g->writes);
            if (w) *w = (om_write){v, om_val(g, in)->input};
        } else {
            om_id *out = OM_PUSH(o->cx, &g->outputs);
            if (out) *out = v;
            const char **kept = OM_PUSH(o->cx, &g->output_names);
            if (kept) *kept = om_arena_str(&g->arena, name);
        }
        if (o->cx->status != OM_OK) return o->cx->status;
    }
    return OM_OK;
}

/* Numbers that a host gives (om_op.host) are host scalars, where no forward writes them. */
static om_status read_host_scalars(om_onnx *o) {
    om_graph *g = o->g;
    uint8_t *written = om_arena_alloc(&o->tmp, g->inputs.n + 1);
    if (!written) return o->cx->status;
    for (om_id i = 0; i < g->writes.n; i++) written[g->writes.v[i].input] = 1;
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        for (int k = 0; k < n->n_in && k < 32 && n->op->host >> k; k++) {
            const om_id v = om_ins(g, n)[k], in = v == OM_NONE ? OM_NONE : om_val(g, v)->input;
            if (n->op->host >> k & 1 && in != OM_NONE && !written[in]) OM_TRY(om_input_host(g, in));
        }
    }
    return OM_OK;
}

/* Expressions refer to earlier ones only, so one sweep finds for each a symbol in it that nothing binds. */
static om_status read_check_symbols(om_onnx *o) {
    om_graph *g = o->g;
    uint32_t *unbound = om_arena_alloc(&o->tmp, ((size_t)g->exprs.n + 1) * sizeof *unbound); /* 1 + symbol; 0: none */
    if (!unbound) return o->cx->status;
    for (om_id i = 0; i < g->exprs.n; i++) {
        const om_expr *e = &g->exprs.v[i];
        if (e->kind == OM_DIM_SYM) unbound[i] = g->syms.v[e->a].input == OM_NONE ? (uint32_t)e->a + 1 : 0;
        else if (e->kind != OM_DIM_INT) {
            if (e->a < 0) unbound[i] = unbound[~e->a];
            if (e->b < 0 && !unbound[i]) unbound[i] = unbound[~e->b];
        }
    }
    for (om_id i = 0; i < g->values.n; i++)
        for (int k = 0; k < om_ty(g, i)->rank; k++) {
            om_dim d = om_ty(g, i)->dim[k];
            ONNX_CHECK(o, d >= 0 || !unbound[~d],
                       "the size '%.60s' is not a dimension of any graph input (nor a `symbol:` input)",
                       g->syms.v[unbound[~d] - 1].name);
        }
    return OM_OK;
}

static om_status read_model(om_onnx *o, const Onnx__ModelProto *m) {
    const Onnx__GraphProto *f = o->graph = m->graph;
    ONNX_CHECK(o, f, "the model has no graph");
    for (size_t i = 0; i < m->n_opset_import; i++) {
        const char *d = m->opset_import[i]->domain;
        if (!d || !*d || !strcmp(d, "ai.onnx")) o->opset = m->opset_import[i]->version;
    }
    if (o->opset < OM_ONNX_OPSET_MIN || o->opset > OM_ONNX_OPSET_MAX)
        return om_onnx_err(o, OM_UNSUPPORTED,
                           "opset %lld of ai.onnx; %d to %d are supported (onnx.version_converter converts)",
                           (long long)o->opset, OM_ONNX_OPSET_MIN, OM_ONNX_OPSET_MAX);
    ONNX_CHECK(o, !f->n_sparse_initializer, "sparse initialisers are not supported");
    ONNX_CHECK(o, f->n_value_info + f->n_output < OM_NONE / 2 && f->n_node < OM_NONE / 2, "too many values");
    for (size_t i = 0; i < f->n_metadata_props && i < OM_NONE; i++) {
        const Onnx__StringStringEntryProto *p = f->metadata_props[i];
        if (p->key && p->value && !om_strmap_put(&o->meta, p->key, (om_id)i, NULL)) return o->cx->status;
    }
    for (size_t i = 0; i < f->n_output; i++)
        if (f->output[i]->name && !om_strmap_put(&o->types, f->output[i]->name, (om_id)(f->n_value_info + i), NULL))
            return o->cx->status;
    for (size_t i = 0; i < f->n_value_info; i++) /* an entry of its own, even for outputs: it may say more */
        if (f->value_info[i]->name && f->value_info[i]->type &&
            !om_strmap_set(&o->types, f->value_info[i]->name, (om_id)i))
            return o->cx->status;
    OM_TRY(read_inputs(o));
    for (size_t i = 0; i < f->n_node; i++) {
        o->node = f->node[i];
        o->index = i;
        if (read_node(o) != OM_OK) return read_blame_message(o);
    }
    o->node = NULL;
    o->g->cur_scope = OM_NONE;
    OM_TRY(read_outputs(o));
    OM_TRY(read_host_scalars(o));
    return read_check_symbols(o);
}

om_status om_onnx_read(om_ctx *cx, const void *bytes, size_t size, om_graph **out) {
    *out = NULL;
    if (cx->status != OM_OK) return cx->status;
    OM_TRY(om_onnx_wire(cx, &onnx__model_proto__descriptor, bytes, size));
    om_arena file = {.cx = cx};
    om_onnx o = {.cx = cx,
                 .tmp = {.cx = cx},
                 .names = {.cx = cx},
                 .types = {.cx = cx},
                 .meta = {.cx = cx},
                 .g = om_graph_new(cx)};
    const Onnx__ModelProto *m = o.g ? om_onnx_unpack(cx, &file, bytes, size) : NULL;
    om_status s = cx->status;
    if (s == OM_OK) s = read_model(&o, m);
    if (s == OM_OK) s = cx->status;
    om_strmap_free(&o.names);
    om_strmap_free(&o.types);
    om_strmap_free(&o.meta);
    om_free(cx, o.vals.v);
    om_arena_free(&o.tmp);
    om_arena_free(&file);
    if (s == OM_OK) *out = o.g;
    else om_graph_free(o.g);
    return s;
}
