/* choice.c - what there is to choose from: the values of a joint graph that backward may compute again (om_choice), one
 * by one and as clusters. */
#include "graph/exec.h"
#include "passes/passes.h"
#include "passes/remat.h"
#include "run/joint.h"

#include <stdio.h>

struct om_choice {
    om_ctx *cx;              /* its own: callers come with any, and without the model's lock */
    om_graph *g;
    om_facts *f;
    uint8_t *policy[OM_N_RECOMPUTE];
    om_clusters cluster;
    OM_VEC(om_cluster_row) row;   /* one for each */
};

void om_choice_free(om_choice *c) {
    if (!c) return;
    for (int i = 0; i < OM_N_RECOMPUTE; i++) om_free(c->cx, c->policy[i]);
    om_clusters_free(c->cx, &c->cluster);
    om_free(c->cx, c->row.v);
    om_free(c->cx, c->f);
    om_graph_free(c->g);
    om_ctx *cx = c->cx;
    om_free(cx, c);
    om_ctx_free(cx);
}

static om_status choice_build(om_choice *c, const om_graph *forward, const uint8_t *wanted, const uint8_t *arriving) {
    om_flow flow = {0};
    int at;
    om_status s = om_joint_begin(c->cx, forward, wanted, arriving, &flow, &c->g, &at);
    om_flow_free(c->cx, &flow);
    if (s == OM_OK && !(c->f = om_facts_new(c->cx, c->g))) s = c->cx->status;
    for (int i = 0; i < OM_N_RECOMPUTE && s == OM_OK; i++) {
        if (!(c->policy[i] = om_alloc(c->cx, (size_t)c->g->values.n + 1))) return c->cx->status;
        s = om_remat_policies[i].choose(c->cx, &(om_remat_ask){c->g, c->f}, c->policy[i]);
    }
    return s;
}

om_status om_choice_make(om_ctx *cx, const om_ctx *like, const om_graph *forward, const uint8_t *wanted,
                         const uint8_t *arriving, om_choice **out) {
    om_ctx *own = om_ctx_like(like);
    om_choice *c = *out = own ? om_alloc(own, sizeof *c) : NULL;
    if (!c) {
        if (own) om_ctx_free(own);
        return om_fail(cx, OM_NOMEM, "out of memory");
    }
    c->cx = own;
    const om_status s = om_fail_of(cx, own, choice_build(c, forward, wanted, arriving));
    if (s != OM_OK) om_choice_free(c), *out = NULL;
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

/* --- clusters ------------------------------------------------------------------------------------------- */

enum { FORMULA = 1024 };

static om_status choice_find(om_choice *c) {
    if (!c->cluster.mem.cx) OM_TRY(om_clusters_find(c->cx, c->f, &c->cluster));
    return OM_OK;
}

static om_status clusters_list(om_choice *c, const om_tensor *inputs, int *n) {
    const om_graph *g = c->g;
    om_ctx *cx = c->cx;
    OM_TRY(choice_find(c));
    int64_t *sym = om_alloc(cx, (g->syms.n + 1) * sizeof *sym);
    om_status s = !sym ? cx->status : inputs ? om_syms_bind(cx, g, inputs, sym) : OM_OK;
    c->row.n = 0;
    for (uint32_t i = 0; i < c->cluster.row.n && s == OM_OK; i++) {
        const om_cluster *from = &c->cluster.row.v[i];
        om_cluster_row *to = OM_PUSH(cx, &c->row);
        char *formula = om_arena_alloc(&c->cluster.mem, FORMULA);
        if (!to || !formula) {
            s = cx->status;
            break;
        }
        om_dim_print(g, from->bytes, formula, FORMULA);
        *to = (om_cluster_row){.name = from->name,
                               .formula = formula,
                               .bytes = inputs ? om_dim_eval(g, from->bytes, sym) : 0,
                               .count = (int)from->value.n,
                               .compromise = from->compromise};
        for (int p = 0; p < OM_N_RECOMPUTE; p++)
            for (uint32_t k = 0; k < from->value.n; k++) to->again[p] += c->policy[p][from->value.v[k]];
    }
    om_free(cx, sym);
    if (s == OM_OK) *n = (int)c->row.n;
    return s;
}

om_status om_choice_clusters(om_ctx *cx, om_choice *c, const om_tensor *inputs, int *n) {
    *n = 0;
    return om_fail_of(cx, c->cx, clusters_list(c, inputs, n));
}

om_cluster_row om_choice_cluster(const om_choice *c, int i) { return c->row.v[i]; }

static om_status cluster_set(om_choice *c, const char *cluster, int strategy, int count, uint8_t *again) {
    om_ctx *cx = c->cx;
    OM_TRY(choice_find(c));
    const om_cluster *found = NULL; /* of two of the name the one with a compromise is strategy 2's */
    for (uint32_t i = 0; i < c->cluster.row.n; i++) {
        const om_cluster *row = &c->cluster.row.v[i];
        if (!strcmp(row->name, cluster) && (!found || row->compromise == (strategy == 2))) found = row;
    }
    if (found && found->compromise && strategy == 1)
        return om_fail(cx, OM_INVALID,
                       "cluster %s has strategies 0 and 2 only: it begins with a cast, whose operand is kept instead",
                       cluster);
    if (found) return om_cluster_flag(cx, c->f, found, count, strategy != 0, again);
    char names[900] = "";
    size_t at = 0;
    for (uint32_t i = 0; i < c->cluster.row.n && at < sizeof names; i++)
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i ? ", " : "", c->cluster.row.v[i].name);
    return om_fail(cx, OM_INVALID, "there is no cluster %s; there are %s%s", cluster, *names ? names : "none",
                   at >= sizeof names ? ", ..." : "");
}

om_status om_choice_set(om_ctx *cx, om_choice *c, const char *cluster, int strategy, int count, uint8_t *again) {
    return om_fail_of(cx, c->cx, cluster_set(c, cluster, strategy, count, again));
}
