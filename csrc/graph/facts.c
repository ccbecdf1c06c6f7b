/* facts.c - facts of a graph (facts.h): three sweeps. Values in order give the roots, since a view comes after what it
 * views; operands counted, summed up and filled in node order give the lists; nodes backwards give what is live.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"

#include <math.h>

static void held_note(om_facts *f, om_id v, uint8_t as) {
    if (v == OM_NONE) return;
    f->held[v] |= as;
    f->root_held[f->root[v]] |= as;
}

static void roots_find(om_facts *f) {
    const om_graph *g = f->g;
    for (om_id v = 0; v < g->values.n; v++) {
        const om_node *n = om_maker(g, v);
        f->root[v] = n && n->op->view ? f->root[om_ins(g, n)[0]] : v;
    }
    for (uint32_t i = 0; i < g->outputs.n; i++) held_note(f, g->outputs.v[i], OM_HELD_OUTPUT);
    for (uint32_t i = 0; i < g->writes.n; i++) held_note(f, g->writes.v[i].value, OM_HELD_WRITE);
    for (uint32_t i = 0; i < g->grads.n; i++) held_note(f, g->grads.v[i].value, OM_HELD_GRAD);
}

/* Nodes by what they read: by value (key NULL), or by key[value]. first[k + 1] counts, then is where k + 1 is filled up
 * to, and so ends as where it begins. */
static void lists_fill(const om_graph *g, const om_id *key, om_lists *l) {
    om_id *first = l->first + 1;
    for (int fill = 0; fill < 2; fill++) {
        for (om_id i = 0; i < g->nodes.n; i++)
            for (int k = 0; k < g->nodes.v[i].n_in; k++) {
                om_id v = om_ins(g, &g->nodes.v[i])[k];
                if (v == OM_NONE) continue;
                if (key) v = key[v];
                if (fill) l->node[first[v]++] = i;
                else first[v]++;
            }
        om_id sum = 0;
        for (om_id v = 0; !fill && v < g->values.n; v++) {
            const om_id n = first[v];
            first[v] = sum;
            sum += n;
        }
    }
}

void om_nodes_live(const om_graph *g, uint8_t *live) {
#define MARK(v) \
    if ((v) != OM_NONE && om_val(g, (v))->node != OM_NONE) live[om_val(g, (v))->node] = 1
    for (uint32_t i = 0; i < g->outputs.n; i++) MARK(g->outputs.v[i]);
    for (uint32_t i = 0; i < g->writes.n; i++) MARK(g->writes.v[i].value);
    for (uint32_t i = 0; i < g->grads.n; i++) MARK(g->grads.v[i].value);
    for (om_id i = g->nodes.n; i-- > 0;) {
        const om_node *n = &g->nodes.v[i];
        live[i] |= om_is(n, host) && om_node_int(n, "effect", 0);
        for (int k = 0; live[i] && k < n->n_in; k++) MARK(om_ins(g, n)[k]);
    }
#undef MARK
}

om_facts *om_facts_new(om_ctx *cx, const om_graph *g) {
    const size_t values = g->values.n, nodes = g->nodes.n, operands = g->operands.n;
    const size_t ids = values + 2 * (values + 1) + 2 * operands, bytes = 2 * values + nodes;
    om_facts *f = om_alloc(cx, sizeof *f + ids * sizeof(om_id) + bytes);
    if (!f) return NULL;
    f->g = g;
    om_id *id = (om_id *)(f + 1);
    f->root = id;
    f->users.first = f->root + values;
    f->users.node = f->users.first + values + 1;
    f->holders.first = f->users.node + operands;
    f->holders.node = f->holders.first + values + 1;
    f->held = (uint8_t *)(f->holders.node + operands);
    f->root_held = f->held + values;
    f->live = f->root_held + values;
    roots_find(f);
    lists_fill(g, NULL, &f->users);
    lists_fill(g, f->root, &f->holders);
    om_nodes_live(g, f->live);
    return f;
}

bool om_used_once(const om_facts *f, om_id v) {
    const bool once = om_users(f, v).n == 1 && !f->held[v];
    return once || om_sabotage("uses");
}

bool om_used_once_live(const om_facts *f, om_id v) {
    const om_span u = om_users(f, v);
    uint32_t n = 0;
    for (uint32_t i = 0; i < u.n; i++) n += f->live[u.node[i]];
    const bool once = n == 1 && !f->held[v];
    return once || om_sabotage("uses");
}

om_id om_last_holder(const om_facts *f, om_id v, om_phase phase) {
    const om_span u = om_holders(f, v);
    for (uint32_t i = u.n; i-- > 0;)
        if (f->g->nodes.v[u.node[i]].phase == phase) return u.node[i];
    return OM_NONE;
}

bool om_read_after_forward(const om_facts *f, om_id v) {
    const om_span u = om_holders(f, v);
    for (uint32_t i = u.n; i-- > 0;)
        if (f->g->nodes.v[u.node[i]].phase != OM_FORWARD) return true;
    return false;
}

/* --- one number ------------------------------------------------------------------------------------------ */

static bool exact(double x) { return fabs(x) <= 0x1p53; } /* of an integer */

static bool constant_number(const om_graph *g, om_id v, double *x) {
    const om_value *c = om_val(g, v);
    const size_t size = om_dtype_size(c->type.dtype);
    int64_t n = 1;
    if (c->role != OM_CONST) return false;
    for (int i = 0; i < c->type.rank; i++) n *= c->type.dim[i];
    if (n == 0 || size == 0) return false;
    for (int64_t i = 1; i < n; i++) {
        const bool differs = memcmp(c->data, (const char *)c->data + (size_t)i * size, size) != 0;
        if (differs && !om_sabotage("splat")) return false;
    }
    om_tensor from = {.data = (void *)c->data, .dtype = c->type.dtype, .device = -1},
              to = {.data = x, .dtype = OM_F64, .device = -1};
    return om_copy(g->cx, &from, &to) == OM_OK && (om_is_float(c->type.dtype) || exact(*x));
}

static bool fill_number(const om_graph *g, const om_node *n, double *x) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "value");
    const int dtype = om_ty(g, n->out)->dtype;
    int64_t i = 0;
    if (a && a->kind == OM_ATTR_DIMS && (a->n != 1 || !om_dim_const(g, a->dims[0], &i))) return false;
    *x = a && a->kind == OM_ATTR_DIMS ? (double)i : om_node_float(n, "value", 0);
    if (om_is_float(dtype)) return *x = om_round_to(dtype, *x), true;
    return dtype == OM_BOOL ? *x == 0 || *x == 1 : *x == trunc(*x) && exact(*x);
}

bool om_number_of(const om_graph *g, om_id v, double *x) {
    enum { CASTS = 8 };
    int to[CASTS], casts = 0;
    const om_node *n;
    for (; (n = om_maker(g, v)) != NULL && !om_is(n, fill); v = om_ins(g, n)[0]) {
        const bool cast = om_is(n, cast) && om_is_float(om_ty(g, v)->dtype) && casts < CASTS;
        if (cast) to[casts++] = om_ty(g, v)->dtype;
        else if (!n->op->view && !om_is(n, copy)) return false;
    }
    if (!(n ? fill_number(g, n, x) : constant_number(g, v, x))) return false;
    while (casts-- > 0) *x = om_round_to(to[casts], *x);
    return true;
}
