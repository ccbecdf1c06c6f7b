/* remat_cluster.c - subgraphs that backward may compute again, found by structure (remat.h): for the memory table, and
 * for who wants to choose among them.
 *
 *   kept         a forward value whose memory backward reads, and that may be computed again
 *   its cluster  the nodes that compute it from kept values, graph inputs and what exists anyway; views are not counted.
 *                At most MOST of them, and none that may not be computed again: else there is no cluster
 *   compromise   a cast from a narrower type may begin a cluster: its operand is kept in the place of the result
 *
 * Clusters of the same operators in the same order are one row, "layer_norm+matmul+": the layers of a model share theirs.
 * These are the names that onnxruntime-training gave (ORTMODULE_MEMORY_OPT_CONFIG).
 */
#include "passes/remat.h"

#include <stdlib.h>

enum { MOST = 50 };

typedef struct found { om_id node[MOST]; int n; bool compromised; om_id instead; } found;

static bool cluster_kept(const om_facts *f, om_id v) {
    const om_node *n = om_maker(f->g, v);
    return f->root[v] == v && n && n->phase == OM_FORWARD && f->live[om_val(f->g, v)->node] &&
           om_last_holder(f, v, OM_BACKWARD) != OM_NONE;
}

/* Handed out whole: it exists anyway. */
static bool cluster_fixed(om_facts *f, om_id v) {
    om_graph *g = (om_graph *)f->g; /* may intern sizes */
    const om_span by = om_holders(f, v);
    bool fixed = f->held[v];
    for (uint32_t i = 0; i < by.n && !fixed; i++) {
        const om_node *n = &g->nodes.v[by.node[i]];
        fixed = n->op->view && f->held[n->out] && om_dim_numel(g, om_ty(g, n->out)) == om_dim_numel(g, om_ty(g, v));
    }
    return fixed;
}

static int cluster_order(const void *a, const void *b) {
    const om_id x = *(const om_id *)a, y = *(const om_id *)b;
    return x < y ? -1 : x > y;
}

/* The cluster of the kept value v; false: it has none. */
static bool cluster_of(om_facts *f, om_id v, bool compromise, found *c) {
    const om_graph *g = f->g;
    c->n = 0;
    c->compromised = false;
    c->node[c->n++] = om_val(g, v)->node;
    for (int at = 0; at < c->n; at++) {
        const om_node *n = &g->nodes.v[c->node[at]];
        for (int k = 0; k < n->n_out; k++)
            if (f->root[n->out + (om_id)k] == n->out + (om_id)k && om_remat_illegal(f, n->out + (om_id)k)) return false;
        for (int k = 0; k < n->n_in; k++) {
            if (om_ins(g, n)[k] == OM_NONE) continue;
            const om_id x = f->root[om_ins(g, n)[k]], by = om_val(g, x)->node;
            if (by == OM_NONE || cluster_kept(f, x) || cluster_fixed(f, x)) continue;
            bool seen = false;
            for (int i = 0; i < c->n; i++) seen |= c->node[i] == by;
            const size_t from = om_dtype_size(om_ty(g, x)->dtype), to = om_dtype_size(om_ty(g, n->out)->dtype);
            if (!seen && compromise && om_is(n, cast) && from < to) c->compromised = true, c->instead = x;
            else if (!seen && c->n == MOST) return false;
            else if (!seen) c->node[c->n++] = by;
        }
    }
    qsort(c->node, (size_t)c->n, sizeof *c->node, cluster_order);
    return true;
}

static const char *cluster_name(om_arena *mem, const om_graph *g, const found *c) {
    size_t size = 1;
    for (int i = 0; i < c->n; i++) size += strlen(g->nodes.v[c->node[i]].op->name) + 1;
    char *name = om_arena_alloc(mem, size), *end = name;
    for (int i = 0; i < c->n && name; i++) {
        const char *op = g->nodes.v[c->node[i]].op->name;
        memcpy(end, op, strlen(op));
        end += strlen(op);
        *end++ = '+';
    }
    return name;
}

static om_dim cluster_bytes(om_graph *g, om_id v) {
    return om_dim_mul(g, om_dim_numel(g, om_ty(g, v)), (om_dim)om_dtype_size(om_ty(g, v)->dtype));
}

static om_status cluster_add(om_ctx *cx, om_facts *f, om_clusters *all, om_id v, const found *c) {
    om_graph *g = (om_graph *)f->g;
    const char *name = cluster_name(&all->mem, g, c);
    om_cluster *row = NULL;
    if (!name) return cx->status;
    for (uint32_t i = 0; i < all->row.n && !row; i++)
        if (!strcmp(all->row.v[i].name, name) && all->row.v[i].compromise == c->compromised) row = &all->row.v[i];
    if (!row) {
        if (!(row = OM_PUSH(cx, &all->row))) return cx->status;
        *row = (om_cluster){.name = name, .compromise = c->compromised};
    }
    om_id *slot = OM_PUSH(cx, &row->value);
    if (!slot) return cx->status;
    *slot = v;
    om_dim saved = cluster_bytes(g, v);
    if (c->compromised) saved = om_dim_sub(g, saved, cluster_bytes(g, c->instead));
    row->bytes = om_dim_add(g, row->bytes, saved);
    return cx->status;
}

om_status om_clusters_find(om_ctx *cx, om_facts *f, om_clusters *all) {
    found *c = om_alloc(cx, sizeof *c);
    om_status s = c ? OM_OK : cx->status;
    *all = (om_clusters){.mem = {.cx = cx}};
    for (om_id v = 0; v < f->g->values.n && s == OM_OK; v++) {
        if (!cluster_kept(f, v) || cluster_fixed(f, v) || om_remat_illegal(f, v)) continue;
        if (cluster_of(f, v, false, c)) s = cluster_add(cx, f, all, v, c);
        if (s == OM_OK && cluster_of(f, v, true, c) && c->compromised) s = cluster_add(cx, f, all, v, c);
    }
    om_free(cx, c);
    return s;
}

void om_clusters_free(om_ctx *cx, om_clusters *all) {
    for (uint32_t i = 0; i < all->row.n; i++) om_free(cx, all->row.v[i].value.v);
    om_free(cx, all->row.v);
    om_arena_free(&all->mem);
    *all = (om_clusters){0};
}

om_status om_cluster_flag(om_ctx *cx, om_facts *f, const om_cluster *row, int count, bool on, uint8_t *again) {
    const om_graph *g = f->g;
    found *c = om_alloc(cx, sizeof *c);
    if (!c) return cx->status;
    for (uint32_t i = 0; i < row->value.n && (count < 0 || (int)i < count); i++) {
        if (!on) {
            again[row->value.v[i]] = 0;
            continue;
        }
        cluster_of(f, row->value.v[i], row->compromise, c);
        for (int k = 0; k < c->n; k++) {
            const om_node *n = &g->nodes.v[c->node[k]];
            for (int o = 0; o < n->n_out; o++)
                if (!n->op->view && !om_remat_illegal(f, n->out + (om_id)o)) again[n->out + (om_id)o] = 1;
        }
    }
    om_free(cx, c);
    return OM_OK;
}
