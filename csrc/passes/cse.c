/* cse.c - common subexpressions: nodes with the same operator, operands and attributes are computed once; equal
 * constants become one.
 *
 * Nodes are visited in order, so operands are already merged when a node is looked up; a hash of (operator, operands,
 * attributes) finds candidates, a full comparison decides. Operands of commutative operators are compared in sorted
 * order. Not merged: random nodes (each has a stream of its own), host nodes, and a backward node with a forward one
 * unless it is a view or makes its result from nothing: keeping a forward value alive for backward is the recompute
 * pass's decision.
 */
#include "passes/passes.h"
#include "graph/sabotage.h"

/* node or ~constant value + 1; 0 = empty */
typedef struct cse_table { uint32_t *slot; uint32_t size; om_graph *g; } cse_table;
typedef struct cse_state { cse_table nodes, consts; } cse_state;

enum { CSE_CONST_BYTES = 4096 };

static uint64_t cse_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}
static uint64_t cse_text(uint64_t h, const char *s) {
    for (; *s; s++) h = cse_mix(h, (unsigned char)*s);
    return h;
}

static bool cse_commutes(const om_op *op) {
    return op == &om_op_add || op == &om_op_mul || op == &om_op_maximum || op == &om_op_minimum || op == &om_op_eq ||
           op == &om_op_ne || op == &om_op_and || op == &om_op_or || op == &om_op_xor;
}

static void cse_operands(const om_graph *g, const om_node *n, om_id *in) {
    for (int i = 0; i < n->n_in; i++) in[i] = om_ins(g, n)[i];
    if (n->n_in == 2 && cse_commutes(n->op) && in[0] > in[1]) {
        om_id t = in[0];
        in[0] = in[1], in[1] = t;
    }
}

static uint64_t cse_hash(const om_graph *g, const om_node *n) {
    om_id in[OM_MAX_IN];
    uint64_t h = cse_text(1, n->op->name);
    cse_operands(g, n, in);
    for (int i = 0; i < n->n_in; i++) h = cse_mix(h, in[i]);
    for (int i = 0; i < n->n_attr; i++) {
        const om_attr *a = &n->attr[i];
        uint64_t bits = 0;
        h = cse_text(h, a->name);
        if (a->kind == OM_ATTR_INT) bits = (uint64_t)a->i;
        else if (a->kind == OM_ATTR_FLOAT) memcpy(&bits, &a->f, 8);
        else if (a->kind == OM_ATTR_STR) h = cse_text(h, a->s ? a->s : "");
        else
            for (uint32_t k = 0; k < a->n; k++) h = cse_mix(h, (uint64_t)a->dims[k]);
        h = cse_mix(h, bits);
    }
    return h;
}

static bool cse_equal(const om_graph *g, const om_node *a, const om_node *b) {
    om_id x[OM_MAX_IN], y[OM_MAX_IN];
    if (a->op != b->op || a->n_in != b->n_in || a->n_out != b->n_out || a->n_attr != b->n_attr) return false;
    if (a->phase != b->phase && a->op->kind != OM_K_VIEW && a->op->kind != OM_K_CREATE) return false;
    cse_operands(g, a, x);
    cse_operands(g, b, y);
    if (a->n_in && memcmp(x, y, a->n_in * sizeof *x) != 0) return false;
    for (int i = 0; i < a->n_attr; i++) {
        const om_attr *p = &a->attr[i], *q = &b->attr[i];
        if (p->kind != q->kind || strcmp(p->name, q->name) != 0) return false;
        if (p->kind == OM_ATTR_INT && p->i != q->i) return false;
        if (p->kind == OM_ATTR_FLOAT && memcmp(&p->f, &q->f, 8) != 0) return false;
        if (p->kind == OM_ATTR_STR && strcmp(p->s ? p->s : "", q->s ? q->s : "") != 0) return false;
        if (p->kind == OM_ATTR_DIMS &&
            (p->n != q->n || (p->n && memcmp(p->dims, q->dims, p->n * sizeof *p->dims) != 0)))
            return false;
    }
    return true;
}

static size_t cse_const_bytes(const om_value *v) {
    size_t n = om_dtype_size(v->type.dtype);
    for (int i = 0; i < v->type.rank; i++) n *= (size_t)v->type.dim[i];
    return n;
}

/* The first constant of the new graph equal to v. */
static om_id cse_const(cse_table *t, om_graph *g, om_id v) {
    const om_value *x = om_val(g, v);
    size_t bytes = cse_const_bytes(x);
    if (bytes > CSE_CONST_BYTES) return v;
    uint64_t h = cse_mix(x->type.dtype, x->type.rank);
    for (int i = 0; i < x->type.rank; i++) h = cse_mix(h, (uint64_t)x->type.dim[i]);
    for (size_t i = 0; i < bytes; i++) h = cse_mix(h, ((const unsigned char *)x->data)[i]);
    for (uint32_t k = (uint32_t)h & (t->size - 1);; k = (k + 1) & (t->size - 1)) {
        if (!t->slot[k]) {
            t->slot[k] = v + 1;
            return v;
        }
        const om_value *y = om_val(g, t->slot[k] - 1);
        if (om_pass_same_type(&x->type, &y->type) && (!bytes || !memcmp(x->data, y->data, bytes)))
            return t->slot[k] - 1;
    }
}

static om_status cse_emit(om_rewriter *r, om_id id) {
    cse_state *st = r->arg;
    om_graph *g = r->to;
    const om_node *old = &r->from->nodes.v[id];
    for (int i = 0; i < old->n_in; i++) {
        om_id v = om_ins(r->from, old)[i];
        if (v != OM_NONE && om_val(r->from, v)->role == OM_CONST) r->map[v] = cse_const(&st->consts, g, r->map[v]);
    }
    OM_TRY(om_rewrite_copy(r, id));
    const om_node *n = om_last(g);
    const bool fits = n->op->kind != OM_K_HOST && n->n_in <= OM_MAX_IN && n->n_out > 0, draws = n->op->random;
    if (!fits || (draws && !om_sabotage("cse.random"))) return OM_OK;
    cse_table *t = &st->nodes;
    for (uint32_t k = (uint32_t)cse_hash(g, n) & (t->size - 1);; k = (k + 1) & (t->size - 1)) {
        if (!t->slot[k]) {
            t->slot[k] = g->nodes.n; /* index + 1 */
            return OM_OK;
        }
        const om_node *m = &g->nodes.v[t->slot[k] - 1];
        if (!cse_equal(g, m, n)) continue;
        for (int i = 0; i < n->n_out; i++) r->map[old->out + (om_id)i] = m->out + (om_id)i;
        return OM_OK;
    }
}

om_status om_pass_run_cse(om_ctx *cx, const om_graph *in, om_graph **out) {
    uint32_t size = 64;
    while (size < 2 * in->nodes.n || size < 2 * in->values.n) size *= 2;
    cse_state st = {{om_alloc(cx, size * sizeof(uint32_t)), size, NULL},
                    {om_alloc(cx, size * sizeof(uint32_t)), size, NULL}};
    om_status s = st.nodes.slot && st.consts.slot ? om_rewrite(cx, in, cse_emit, &st, out) : cx->status;
    om_free(cx, st.nodes.slot);
    om_free(cx, st.consts.slot);
    return s;
}
