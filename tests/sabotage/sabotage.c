/* sabotage.c - the other side of csrc/graph/sabotage.h, part of build/sabotage.so alone. One thread at a time. */
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "passes/passes.h"

#include <stdio.h>
#include <stdlib.h>

static char sabotage_point[64];
static int sabotage_k = -1, sabotage_seen;
static const char *sabotage_in; /* the pass that runs */

void om_sabotage_set(const char *spec);
int om_sabotage_count(void);
const char *om_sabotage_rule(int i);

void om_sabotage_set(const char *spec) {
    const char *colon = spec ? strrchr(spec, ':') : NULL;
    int n = !spec ? 0 : colon ? (int)(colon - spec) : (int)strlen(spec);
    snprintf(sabotage_point, sizeof sabotage_point, "%.*s", n, spec ? spec : "");
    sabotage_k = colon ? atoi(colon + 1) : -1;
    sabotage_seen = 0;
}
/* Occurrences since om_sabotage_set. */
int om_sabotage_count(void) { return sabotage_seen; }

/* Name of the i-th operator that has a gradient rule; NULL: there are not so many. */
const char *om_sabotage_rule(int i) {
    for (int k = 0; om_ops[k]; k++)
        if (om_ops[k]->grad && i-- == 0) return om_ops[k]->name;
    return NULL;
}

__attribute__((constructor)) static void sabotage_env(void) { om_sabotage_set(getenv("OM_SABOTAGE")); }

bool om_sabotage(const char *point) {
    if (strcmp(point, sabotage_point) != 0) return false;
    int at = sabotage_seen++;
    return sabotage_k < 0 || at == sabotage_k;
}

void om_sabotage_enter(const char *pass) { sabotage_in = pass; }

/* 1.001 v + 0.001, v + 1, not v: near enough to pass a careless comparison, wrong where v is 0 too. */
om_id om_sabotage_wrong(om_graph *g, om_id v) {
    if (v == OM_NONE || g->cx->status != OM_OK) return v;
    int dtype = om_ty(g, v)->dtype;
    if (dtype == OM_BOOL) return om_b_un(g, &om_op_not, v);
    if (om_is_int(dtype)) return om_b_bin(g, &om_op_add, v, om_scalar(g, dtype, 1));
    if (!om_is_float(dtype)) return v;
    bool half = dtype == OM_BF16 || dtype == OM_F16;
    return om_b_bin(g, &om_op_add, om_b_scale(g, v, half ? 1.25 : 1.001), om_scalar(g, dtype, half ? 0.25 : 0.001));
}

static bool sabotage_used(const om_facts *f, om_id v) { return om_users(f, v).n || f->held[v]; }

/* Whatever a pass emits that is not the same node over the same operands counts as replaced. */
void om_sabotage_replaced(om_rewriter *r, om_id node) {
    const om_node *n = &r->from->nodes.v[node], *m = om_last(r->to);
    char point[80];
    if (!sabotage_in || r->to->cx->status != OM_OK) return;
    bool same = m->op == n->op && m->n_in == n->n_in && m->n_attr == n->n_attr && n->n_out && r->map[n->out] == m->out;
    for (int i = 0; same && i < n->n_in; i++)
        same = om_ins(r->from, n)[i] == OM_NONE || r->map[om_ins(r->from, n)[i]] == om_ins(r->to, m)[i];
    snprintf(point, sizeof point, "pass.%s", sabotage_in);
    if (strcmp(point, sabotage_point) != 0 || same) return;
    om_facts *facts = om_facts_new(r->to->cx, r->from);
    for (int i = 0; facts && i < n->n_out; i++)
        if (sabotage_used(facts, n->out + (om_id)i) && om_sabotage(point))
            r->map[n->out + (om_id)i] = om_sabotage_wrong(r->to, r->map[n->out + (om_id)i]);
    om_free(r->to->cx, facts);
}

static om_status sabotage_term(om_rewriter *r, om_id id) {
    const om_node *n = &r->from->nodes.v[id];
    const om_facts *facts = r->arg;
    OM_TRY(om_rewrite_copy(r, id));
    for (int i = 0; i < n->n_out && n->phase == OM_BACKWARD; i++)
        if (sabotage_used(facts, n->out + (om_id)i) && om_is_float(om_ty(r->from, n->out + (om_id)i)->dtype) && om_sabotage("term"))
            r->map[n->out + (om_id)i] = om_sabotage_wrong(r->to, r->map[n->out + (om_id)i]);
    return r->to->cx->status;
}

om_status om_sabotage_terms(om_ctx *cx, om_graph **g) {
    om_graph *to;
    if (strcmp(sabotage_point, "term") != 0) return OM_OK;
    om_facts *facts = om_facts_new(cx, *g);
    om_status s = facts ? om_rewrite(cx, *g, sabotage_term, facts, &to) : cx->status;
    om_free(cx, facts);
    if (s != OM_OK) return s;
    om_graph_free(*g);
    *g = to;
    return OM_OK;
}
