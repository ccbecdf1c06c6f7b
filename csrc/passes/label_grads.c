/* label_grads.c - the gradient of a head is computed for the rows whose label counts.
 *
 * Where only the loss has a gradient, that of the logits is zero in every row that is ignored: what follows from such a
 * row is zero, or adds nothing. So of cross_entropy_grad only the rows that count are made, and up to the products all
 * is done with those:
 *
 *   dz = cross_entropy_grad           dz' = the same of rows idx        (c0, classes)
 *   dx = dz w                         dx  = restore(dz' w)
 *   dw = dz^T x                       dw  = dz'^T compress(x)
 *   db = sum of dz                    db  = sum of dz'
 *
 * Between are views, casts, scales. This needs nothing of the forward: logits are there in full for whoever holds them,
 * two thirds of the head's arithmetic are left out. Everybody who reads dz or what is made of it up to the products
 * must be one of these nodes (a gradient of the logits that arrives from outside is added to dz: then nothing changes).
 * Casts between logits and loss are made again for the rows that count.
 */
#include "graph/facts.h"
#include "passes/labels.h"
#include "passes/passes.h"

typedef enum grad_role {
    NONE, LOSS, /* makes dz */ VIEW, TURN, /* a transposed view */ EACH, /* elementwise */ DX, DW, DW_TURNED, SUM
} grad_role;

typedef struct grads {
    const om_facts *f;
    uint8_t *role;          /* per node */
    uint8_t *lead, *turned; /* per value of rows: axes of rows in front; (rest, rows) */
    om_id *loss;            /* per value of rows, and per node: the cross_entropy_grad it comes from */
    om_id *rows;            /* per value: what the new graph has in its place */
    om_label_rows *chosen;  /* per node that makes dz */
    OM_VEC(om_id) region;   /* values found so far */
} grads;

static bool is_matrix(const om_graph *g, om_id v) { return om_ty(g, v)->rank == 2; }

/* Is w, the other factor of a product, none of this pass's values? */
static bool plain(const grads *s, om_id w) { return is_matrix(s->f->g, w) && !s->lead[w] && !s->turned[w]; }

static bool sums_rows(const om_graph *g, const om_node *n, int lead) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "axes");
    if (!a || a->kind != OM_ATTR_DIMS || (int)a->n != lead) return false;
    for (uint32_t i = 0; i < a->n; i++)
        if (a->dims[i] != (om_dim)i) return false;
    return om_ty(g, om_ins(g, n)[0])->rank > lead;
}

/* What node n does with v, rows of the region; *lead: of its result, when that has rows. */
static grad_role role_of(const grads *s, const om_node *n, om_id v, int *lead) {
    om_graph *g = (om_graph *)s->f->g;
    const om_id *in = om_ins(g, n);
    const om_dim rows = om_ty(g, om_ins(g, &g->nodes.v[s->loss[v]])[2])->dim[0];
    const bool bias = om_is(n, matmul) && n->n_in > 2 && in[2] != OM_NONE;
    int at;
    *lead = s->lead[v];
    if (n->phase != OM_BACKWARD || bias) return NONE;
    if (s->turned[v]) return om_is(n, matmul) && in[0] == v && plain(s, in[1]) ? DW_TURNED : NONE;
    if (om_is(n, matmul) && in[0] == v)
        return om_ty(g, v)->rank == *lead + 1 && plain(s, in[1]) ? DX : NONE;
    if (om_is(n, matmul)) return *lead == 1 && is_matrix(g, v) && plain(s, in[0]) ? DW : NONE;
    if (om_is(n, reshape)) return (*lead = om_labels_lead(g, om_ty(g, n->out), rows)) ? VIEW : NONE;
    if (om_is(n, permute)) {
        const om_attr *p = om_attr_get(n->attr, n->n_attr, "perm");
        return *lead == 1 && is_matrix(g, v) && p && p->n == 2 && p->dims[0] == 1 ? TURN : NONE;
    }
    if (om_is(n, reduce_sum)) return sums_rows(g, n, *lead) ? SUM : NONE;
    const bool linear = om_is(n, cast) || om_is(n, mul) || om_is(n, neg) || (om_is(n, div) && in[0] == v);
    return linear && om_is_float(om_ty(g, n->out)->dtype) && om_labels_apart(g, n, *lead, &at) && in[at] == v ? EACH
                                                                                                            : NONE;
}

static bool region_add(om_ctx *cx, grads *s, om_id v, om_id loss, int lead, bool turned) {
    om_id *slot = OM_PUSH(cx, &s->region);
    if (!slot) return false;
    *slot = v;
    s->loss[v] = loss;
    s->lead[v] = (uint8_t)(turned ? 0 : lead);
    s->turned[v] = turned;
    return true;
}

/* All that is made of node id's dz, up to the products. Nothing is marked unless all of it fits, and there are some. */
static om_status region_find(om_ctx *cx, grads *s, om_id id) {
    const om_graph *g = s->f->g;
    const om_node *loss = &g->nodes.v[id];
    if (!om_is(loss, cross_entropy_grad) || !om_labels_fit(g, loss)) return OM_OK;
    const om_node *of = om_maker(g, om_ins(g, loss)[4]); /* its lse is the forward's: rows are chosen there */
    if (!of || !om_is(of, cross_entropy) || of->phase != OM_FORWARD) return OM_OK;
    bool fits = region_add(cx, s, loss->out, id, 1, false);
    int products = 0;
    s->role[id] = LOSS;
    for (uint32_t i = 0; i < s->region.n && fits; i++) {
        const om_id v = s->region.v[i];
        const om_span users = om_users(s->f, v);
        fits = !s->f->held[v];
        for (uint32_t u = 0; u < users.n && fits; u++) {
            const om_node *n = &g->nodes.v[users.node[u]];
            int lead;
            if (!s->f->live[users.node[u]]) continue;
            const grad_role role = s->role[users.node[u]] ? NONE : role_of(s, n, v, &lead);
            if (!(fits = role != NONE)) break;
            s->role[users.node[u]] = (uint8_t)role;
            if (role >= DX) s->loss[n->out] = id;
            else fits = region_add(cx, s, n->out, id, lead, role == TURN);
            products += role == DX || role == DW || role == DW_TURNED;
        }
    }
    for (uint32_t i = 0; i < s->region.n && !(fits && products); i++) { /* as if it had not been looked at */
        const om_span users = om_users(s->f, s->region.v[i]);
        for (uint32_t u = 0; u < users.n; u++)
            if (s->loss[g->nodes.v[users.node[u]].out] == id) s->role[users.node[u]] = NONE;
        s->role[id] = NONE;
        s->lead[s->region.v[i]] = s->turned[s->region.v[i]] = 0;
    }
    s->region.n = 0;
    return cx->status;
}

/* --- emission ------------------------------------------------------------------------------------------- */

/* Where the logits were before the first cast on their way to the loss; OM_NONE: there is none. */
static om_id before_casts(const grads *s, om_id x, om_dim rows, int *lead) {
    om_graph *g = (om_graph *)s->f->g;
    om_id found = OM_NONE;
    for (const om_node *n; (n = om_maker(g, x)) && (om_is(n, cast) || om_is(n, reshape));) {
        const bool cast = om_is(n, cast);
        x = om_ins(g, n)[0];
        const int at = om_labels_lead(g, om_ty(g, x), rows);
        if (!at || !om_is_float(om_ty(g, x)->dtype)) break;
        if (cast) found = x, *lead = at;
    }
    return found;
}

static om_id loss_emit(om_rewriter *r, const om_node *n, const om_label_rows *rows) {
    const grads *s = r->arg;
    om_graph *g = r->to;
    const om_id *in = om_ins(r->from, n), weight = in[3] == OM_NONE ? OM_NONE : r->map[in[3]];
    int lead = 1;
    const om_id narrow = before_casts(s, in[1], om_ty(r->from, in[2])->dim[0], &lead);
    if (narrow == OM_NONE)
        return om_rewrite_node(r, n, OM_IN(r->map[in[0]], r->map[in[1]], r->map[in[2]], weight, r->map[in[4]],
                                           r->map[in[5]], rows->idx, rows->count));
    const om_type x = *om_ty(g, r->map[in[1]]);
    om_id y = om_b_cast(g, om_labels_take(g, rows, r->map[narrow], lead), x.dtype);
    y = om_labels_shape(g, rows, y, &x, 1);
    return om_rewrite_node(r, n, OM_IN(r->map[in[0]], y, om_labels_taken(g, rows), weight,
                                       om_labels_take(g, rows, r->map[in[4]], 1), r->map[in[5]]));
}

static om_type type_in(om_rewriter *r, om_id v) {
    om_type t = *om_ty(r->from, v);
    for (int i = 0; i < t.rank; i++) t.dim[i] = om_dim_copy(r->to, r->from, t.dim[i]);
    return t;
}

static om_status node_emit(om_rewriter *r, om_id id) {
    static const int turn[2] = {1, 0};
    grads *s = r->arg;
    om_graph *g = r->to;
    const om_node *n = &r->from->nodes.v[id];
    const om_id *in = om_ins(r->from, n);
    const om_label_rows *rows = &s->chosen[s->loss[n->out]];
    const om_type t = type_in(r, n->out);
    om_id *made = &s->rows[n->out], x;
    int at;
    switch (s->role[id]) {
    case LOSS: *made = loss_emit(r, n, rows); break;
    case VIEW: *made = om_labels_shape(g, rows, s->rows[in[0]], &t, s->lead[n->out]); break;
    case TURN: *made = om_b_permute(g, s->rows[in[0]], turn); break;
    case EACH:
        om_labels_apart(r->from, n, s->lead[n->out], &at);
        *made = om_labels_node(r, n, s->lead[n->out], at, s->rows[in[at]]);
        break;
    case DX:
        x = om_make(g, n->op, OM_IN(s->rows[in[0]], r->map[in[1]]), NULL, 0);
        r->map[n->out] = om_labels_put(g, rows, x, &t);
        return g->cx->status;
    case DW_TURNED:
        x = om_labels_take(g, rows, r->map[in[1]], 1);
        r->map[n->out] = om_make(g, n->op, OM_IN(s->rows[in[0]], x), NULL, 0);
        return g->cx->status;
    case DW:
        x = om_labels_take(g, rows, om_b_permute(g, r->map[in[0]], turn), 1);
        r->map[n->out] = om_make(g, n->op, OM_IN(om_b_permute(g, x, turn), s->rows[in[1]]), NULL, 0);
        return g->cx->status;
    default: /* SUM */
        x = om_b_sum(g, s->rows[in[0]], 1, false);
        r->map[n->out] = om_b_reshape(g, x, t.dim, t.rank);
        return g->cx->status;
    }
    r->map[n->out] = r->map[in[0]]; /* nobody reads it: the rewriter only wants to see it mapped */
    return g->cx->status;
}

static om_status label_grads_emit(om_rewriter *r, om_id id) {
    grads *s = r->arg;
    const om_node *n = &r->from->nodes.v[id];
    if (s->role[id]) return node_emit(r, id);
    OM_TRY(om_rewrite_copy(r, id));
    if (!om_is(n, cross_entropy)) return OM_OK;
    const om_span users = om_users(s->f, n->out + 1);
    for (uint32_t i = 0; i < users.n; i++) /* chosen in the forward: the count is known before anybody needs it */
        if (s->role[users.node[i]] == LOSS)
            s->chosen[users.node[i]] = om_labels_select(r->to, r->map[om_ins(r->from, n)[1]],
                                                        om_node_int(n, "ignore_index", -100));
    return r->to->cx->status;
}

om_status om_pass_run_label_grads(om_ctx *cx, const om_graph *in, om_graph **out) {
    const size_t values = (size_t)in->values.n + 1, nodes = (size_t)in->nodes.n + 1;
    om_facts *f = om_facts_new(cx, in);
    grads s = {.f = f,
               .role = om_alloc(cx, nodes),
               .lead = om_alloc(cx, values),
               .turned = om_alloc(cx, values),
               .loss = om_alloc(cx, values * sizeof *s.loss),
               .rows = om_alloc(cx, values * sizeof *s.rows),
               .chosen = om_alloc(cx, nodes * sizeof *s.chosen)};
    om_status st = f && s.role && s.lead && s.turned && s.loss && s.rows && s.chosen ? OM_OK : cx->status;
    for (om_id v = 0; v < in->values.n && st == OM_OK; v++) s.loss[v] = s.rows[v] = OM_NONE;
    for (om_id i = 0; i < in->nodes.n && st == OM_OK; i++)
        if (f->live[i]) st = region_find(cx, &s, i);
    if (st == OM_OK) st = om_rewrite(cx, in, label_grads_emit, &s, out);
    om_free(cx, s.region.v);
    om_free(cx, s.chosen);
    om_free(cx, s.rows);
    om_free(cx, s.loss);
    om_free(cx, s.turned);
    om_free(cx, s.lead);
    om_free(cx, s.role);
    om_free(cx, f);
    return st;
}
