/* choice.c - what there is to choose from: the values of a joint graph that backward may compute again (om_choice). */
#include "passes/passes.h"
#include "passes/remat.h"
#include "run/joint.h"

struct om_choice {
    om_ctx *cx;              /* the model's */
    om_graph *g;
    om_facts *f;
    uint8_t *policy[OM_N_RECOMPUTE];
};

void om_choice_free(om_choice *c) {
    if (!c) return;
    for (int i = 0; i < OM_N_RECOMPUTE; i++) om_free(c->cx, c->policy[i]);
    om_free(c->cx, c->f);
    om_graph_free(c->g);
    om_free(c->cx, c);
}

om_status om_choice_make(om_ctx *cx, const om_graph *forward, const uint8_t *wanted, const uint8_t *arriving,
                         om_choice **out) {
    om_choice *c = *out = om_alloc(cx, sizeof *c);
    if (!c) return cx->status;
    om_flow flow = {0};
    int at;
    c->cx = cx;
    om_status s = om_joint_begin(cx, forward, wanted, arriving, &flow, &c->g, &at);
    om_flow_free(cx, &flow);
    if (s == OM_OK && !(c->f = om_facts_new(cx, c->g))) s = cx->status;
    for (int i = 0; i < OM_N_RECOMPUTE && s == OM_OK; i++) {
        if (!(c->policy[i] = om_alloc(cx, (size_t)c->g->values.n + 1))) return cx->status;
        s = om_remat_policies[i].choose(cx, &(om_remat_ask){c->g, c->f}, c->policy[i]);
    }
    return s;
}

int om_choice_values(const om_choice *c) { return (int)c->g->values.n; }
const uint8_t *om_choice_policy(const om_choice *c, om_recompute policy) { return c->policy[policy]; }

om_choice_row om_choice_value(const om_choice *c, int i) {
    const om_graph *g = c->g;
    const om_id v = (om_id)i;
    const om_value *x = om_val(g, v);
    const om_node *n = om_maker(g, v);
    const om_scope *at = n && n->scope < g->scopes.n ? &g->scopes.v[n->scope] : NULL;
    om_choice_row row = {.illegal = om_remat_illegal(c->f, v),
                         .op = n ? n->op->name : "",
                         .module = at && at->module ? at->module : "",
                         .file = at && at->file ? at->file : "",
                         .line = at ? at->line : 0,
                         .output = x->out,
                         .dtype = x->type.dtype,
                         .rank = x->type.rank,
                         .kept = c->f->root[v] == v && n && n->phase == OM_FORWARD &&
                                 om_last_holder(c->f, v, OM_BACKWARD) != OM_NONE};
    for (int k = 0; k < x->type.rank; k++)
        if (!om_dim_const(g, x->type.dim[k], &row.dim[k])) row.dim[k] = -1;
    return row;
}
