/* facts.c - facts of a graph (facts.h): three sweeps. Values in order give the roots, since a view comes after what it
 * views; operands counted, summed up and filled in node order give the lists; nodes backwards give what is live.
 */
#include "graph/facts.h"
#include "graph/sabotage.h"

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
