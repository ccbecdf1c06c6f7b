/* work.c - what a call computes and moves, by calculation, for a profile: operations per second, bytes per second, and
 * how near that is to what the machine can do.
 */
#include "passes/remat.h"
#include "run/plan.h"

static double work_numel(const om_tensor *t) {
    double n = t->dtype ? 1 : 0;
    for (int k = 0; k < t->rank; k++) n *= (double)t->dim[k];
    return n;
}

/* Each element of a broadcast tensor is one. */
static double work_bytes(const om_tensor *t) {
    double n = t->dtype ? (double)om_dtype_size(t->dtype) : 0;
    for (int k = 0; k < t->rank; k++)
        if (t->stride[k] || !t->dim[k]) n *= (double)t->dim[k];
    return n;
}

static double work_statements(const om_node *n) {
    const char *program = om_attr_str(n->attr, n->n_attr, "program", NULL);
    if (!program) return 1;
    double statements = 0;
    for (const char *p = program; p && *p; p = strchr(p, ';'), p += p != NULL)
        statements += strncmp(p, "out", 3) != 0 || p[3] != ' ';
    return statements;
}

om_work om_call_work(const om_plan *p, const om_call *c) {
    om_work w = {0};
    double most = 0;
    const om_node *n = c->node == OM_NONE ? NULL : &p->g->nodes.v[c->node];
    for (int i = 0; i < c->n_in + c->n_out; i++) {
        const om_tensor *t = &c->arg[i].t;
        if (c->arg[i].storage == OM_NONE) continue;
        double bytes = work_bytes(t);
        /* of a table: the rows that are asked for */
        if (n && i == 0 && n->op->kind == OM_K_GATHER && c->n_out && !om_is(n, cast_all)) {
            const double rows = work_bytes(&c->arg[c->n_in].t);
            if (rows < bytes) bytes = rows;
        }
        w.bytes += bytes;
        if (work_numel(t) > most) most = work_numel(t);
    }
    if (!n || c->kind != OM_CALL_RUN) return w;
    const double products = om_remat_products(p->g, n, p->sym), out = c->n_out ? work_numel(&c->arg[c->n_in].t) : 0;
    switch (n->op->kind) {
    case OM_K_POINTWISE: w.flops = out * work_statements(n); break;
    case OM_K_REDUCE: w.flops = most; break;
    case OM_K_ROW: w.flops = 10 * most; break;
    default: break;
    }
    if (products >= 0) w.flops = products;
    return w;
}
