/* fuse.c - chains and DAGs of elementwise nodes become one `fused` node: memory is read and written once, nothing in
 * between.
 *
 * Groups grow backwards: nodes are visited from last to first, and an elementwise node joins the group of its users
 * when it has the group's sizes (so one iteration space) and phase. The group stands where its last member, the root,
 * stood. Therefore a value of the group that others read too becomes a further output, allowed only if all those
 * readers come after the root; a value read before the root keeps its node out. With that rule no cycle can arise:
 * operands of a group are made before the root, its outputs are read after. A group is limited in operands, outputs and
 * members so that its registers stay in L1 (strip.h).
 *
 * Nothing is computed twice and results in f32 and f64 keep their bits. bf16 and f16 chains round only at casts and at
 * memory, and where it matters that all see the same number. Such a value is exact: its readers in the group get what
 * memory would hold. Exact are
 *   - values that are stored as well: who reads the memory and who reads the register must not differ (amax of h, and h
 *     == amax);
 *   - operands of what jumps: comparisons, roundings, casts to integers. A step is where PyTorch's is;
 *   - a value and its clone that computes it again (om_node.again), if one of them is.
 * So what backward computes again has the bits of the forward's.
 */
#include "graph/device.h"
#include "graph/facts.h"
#include "graph/sabotage.h"
#include "ops/strip.h"
#include "passes/passes.h"

enum { FUSE_MEMBERS = 40, FUSE_OPERANDS = 16 };

typedef struct fuse_group {
    om_id root;
    OM_VEC(om_id) member;  /* descending */
} fuse_group;

typedef struct fuse_state {
    const om_graph *g;
    om_facts *facts;
    uint32_t *group;        /* per node: group index + 1; 0 = none, or dead */
    uint8_t *exact;         /* per value: as memory would hold it */
    OM_VEC(fuse_group) groups;
} fuse_state;

typedef struct fuse_program { /* the text of a group and what goes in and out */
    om_strip_text text;
    om_id operand[OM_STRIP_IN], result[OM_STRIP_OUT];
} fuse_program;

static om_status fuse_prepare(om_ctx *cx, fuse_state *st) {
    const om_graph *g = st->g;
    st->facts = om_facts_new(cx, g);
    st->group = om_alloc(cx, (g->nodes.n + 1) * sizeof *st->group);
    st->exact = om_alloc(cx, g->values.n + 1);
    if (!st->facts || !st->group || !st->exact) return cx->status;
    memset(st->exact, 1, g->values.n); /* until it is known: what fits so fits */
    return OM_OK;
}

static bool same_space(const om_type *a, const om_type *b) {
    if (a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] != b->dim[i]) return false;
    return true;
}

/* The program of the nodes list[0..n) (descending; list[0] is the root). False: too large for the machine. */
static bool program_build(const fuse_state *st, uint32_t group, const om_id *list, uint32_t n, fuse_program *p) {
    const om_graph *g = st->g;
    om_id value[FUSE_MEMBERS];
    memset(&p->text, 0, offsetof(om_strip_text, stmt));
    om_strip_text *t = &p->text;
    for (int pass = 0; pass < 2; pass++) { /* operands first: their number is where statements begin */
        for (uint32_t m = n; m-- > 0;) {
            const om_node *nd = &g->nodes.v[list[m]];
            om_strip_stmt *s = pass ? &t->stmt[t->n_stmt] : NULL;
            const om_pw_row *row = nd->op->pw;
            if (pass) {
                *s = (om_strip_stmt){.op = row->op, .n_arg = row->arity, .dtype = om_ty(g, nd->out)->dtype};
                s->exact = st->exact[nd->out] && om_is_half(s->dtype) && row->op != OM_S_cast;
                if (row->op == OM_S_dropout) s->p = om_node_float(nd, "p", 0.5), s->rng = nd->rng;
            }
            for (int k = 0; k < nd->n_in; k++) {
                const om_id v = om_ins(g, nd)[k];
                int at = -1;
                for (int i = 0; pass && i < t->n_stmt; i++)
                    if (value[i] == v) at = t->n_in + i;
                bool inside = false;
                for (uint32_t i = m + 1; i < n; i++) inside |= g->nodes.v[list[i]].out == v;
                for (int i = 0; !inside && at < 0 && i < t->n_in; i++)
                    if (p->operand[i] == v) at = i;
                if (pass) s->arg[k] = (uint8_t)at;
                const bool second = pass && k == 1 && s->arg[0] != s->arg[1];
                if (second && om_sabotage("fuse.swap")) s->arg[1] = s->arg[0], s->arg[0] = (uint8_t)at;
                else if (!inside && at < 0) {
                    if (t->n_in >= FUSE_OPERANDS) return false;
                    p->operand[t->n_in++] = v;
                }
            }
            if (pass) value[t->n_stmt++] = nd->out;
        }
    }
    int draws = 0;
    for (int i = 0; i < t->n_stmt; i++) {
        draws += t->stmt[i].op == OM_S_dropout;
        bool out = st->facts->held[value[i]] || i == t->n_stmt - 1;
        const om_span users = om_users(st->facts, value[i]);
        for (uint32_t u = 0; u < users.n; u++)
            out |= st->facts->live[users.node[u]] && st->group[users.node[u]] != group;
        if (!out) continue;
        if (t->n_out >= OM_STRIP_OUT) return false;
        p->result[t->n_out] = value[i];
        t->out[t->n_out++] = (uint8_t)(t->n_in + i);
    }
    return draws <= OM_STRIP_DRAWS;
}

/* Do its registers fit? Compiled with nothing uniform: what is uniform is known at the run. */
static bool program_fits(const fuse_state *st, const fuse_program *p) {
    uint8_t dtype[OM_STRIP_IN];
    bool uniform[OM_STRIP_IN];
    for (int i = 0; i < p->text.n_in; i++) {
        dtype[i] = om_ty(st->g, p->operand[i])->dtype;
        uniform[i] = true; /* the worst case: keeps its register */
    }
    return st->g->cx->device->strip_fits(&p->text, dtype, uniform);
}

/* Where node u will stand: its group's root. */
static om_id place(const fuse_state *st, om_id u) { return st->group[u] ? st->groups.v[st->group[u] - 1].root : u; }

static om_status group_join(om_ctx *cx, fuse_state *st, om_id id, fuse_program *p) {
    const om_graph *g = st->g;
    const om_node *n = &g->nodes.v[id];
    if (!n->op->pw || n->n_out != 1) return OM_OK;
    const om_span users = om_users(st->facts, n->out);
    om_id nearest = OM_NONE; /* the reader that comes first */
    uint32_t join = 0;
    for (uint32_t u = 0; u < users.n; u++) {
        const om_id at = place(st, users.node[u]);
        if (at >= nearest || !st->facts->live[users.node[u]]) continue;
        nearest = at;
        join = st->group[users.node[u]];
    }
    if (join) { /* every other reader stands after the root of the nearest one, or is of its group */
        fuse_group *gr = &st->groups.v[join - 1];
        const om_node *root = &g->nodes.v[gr->root];
        bool ok = gr->member.n < FUSE_MEMBERS && root->phase == n->phase &&
                  same_space(om_ty(g, root->out), om_ty(g, n->out));
        if (ok) {
            om_id *slot = OM_PUSH(cx, &gr->member);
            if (!slot) return cx->status;
            *slot = id;
            st->group[id] = join;
            if (program_build(st, join, gr->member.v, gr->member.n, p) && program_fits(st, p)) return OM_OK;
            gr->member.n--;
            st->group[id] = 0;
        }
    }
    fuse_group *gr = OM_PUSH(cx, &st->groups);
    if (!gr) return cx->status;
    *gr = (fuse_group){.root = id};
    om_id *slot = OM_PUSH(cx, &gr->member);
    if (!slot) return cx->status;
    *slot = id;
    st->group[id] = st->groups.n;
    return OM_OK;
}

/* Does a small difference of operands make a large one of the result? */
static bool jumps(const om_graph *g, const om_node *n) {
    const om_pw_row *row = n->op->pw;
    if (!row) return false;
    switch (row->op) {
    case OM_S_sign:
    case OM_S_floor:
    case OM_S_ceil:
    case OM_S_round:
    case OM_S_trunc:
    case OM_S_floor_div:
    case OM_S_mod:
    case OM_S_fmod: return true;
    case OM_S_cast: return !om_is_float(om_ty(g, n->out)->dtype);
    default: return row->rule == OM_PW_CMP || row->rule == OM_PW_PRED;
    }
}

static om_status exact_find(om_ctx *cx, fuse_state *st) {
    const om_graph *g = st->g;
    om_id most = 0;
    for (om_id i = 0; i < g->nodes.n; i++)
        if (g->nodes.v[i].again > most) most = g->nodes.v[i].again;
    uint8_t *again = om_alloc(cx, (size_t)most + 1);
    if (!again) return cx->status;
    for (om_id v = 0; v < g->values.n; v++) {
        const om_id node = om_val(g, v)->node;
        if (node == OM_NONE || !st->facts->live[node] || !om_is_half(om_ty(g, v)->dtype)) continue;
        const om_span users = om_users(st->facts, v);
        bool exact = st->facts->held[v] || !st->group[node];
        for (uint32_t u = 0; u < users.n && !exact; u++) {
            const om_id by = users.node[u];
            exact = st->facts->live[by] && (st->group[by] != st->group[node] || jumps(g, &g->nodes.v[by]));
        }
        st->exact[v] = exact && !om_sabotage("fuse.exact");
        if (st->exact[v]) again[g->nodes.v[node].again] = 1;
    }
    for (om_id v = 0; v < g->values.n; v++) {
        const om_id node = om_val(g, v)->node;
        const om_id twin = node == OM_NONE ? 0 : g->nodes.v[node].again; /* the number of both; 0: there is none */
        const bool either = twin && again[twin];
        if (either && !om_sabotage("fuse.again")) st->exact[v] = 1;
    }
    om_free(cx, again);
    return OM_OK;
}

typedef struct fuse_emitter { fuse_state *st; fuse_program *p; char *text; } fuse_emitter;
enum { FUSE_TEXT = 16384 };

static om_status fuse_emit(om_rewriter *r, om_id id) {
    fuse_emitter *e = r->arg;
    fuse_state *st = e->st;
    const om_node *n = &r->from->nodes.v[id];
    const uint32_t group = st->group[id];
    if (!group || st->groups.v[group - 1].member.n == 1) return om_rewrite_copy(r, id);
    const fuse_group *gr = &st->groups.v[group - 1];
    if (gr->root != id) { /* made at the root; the rewriter only wants to see it mapped until then */
        r->map[n->out] = r->map[om_ins(r->from, n)[0]];
        return OM_OK;
    }
    fuse_program *p = e->p;
    om_id in[OM_STRIP_IN];
    om_dim dtype[OM_STRIP_OUT];
    om_graph *g = r->to;
    if (!program_build(st, group, gr->member.v, gr->member.n, p))
        return om_fail(g->cx, OM_INTERNAL, "fuse: a program that fitted no longer does");
    if (om_strip_print(&p->text, e->text, FUSE_TEXT) >= FUSE_TEXT)
        return om_fail(g->cx, OM_INTERNAL, "fuse: the text of a program is longer than %d", FUSE_TEXT);
    for (int i = 0; i < p->text.n_in; i++) in[i] = r->map[p->operand[i]];
    for (int i = 0; i < p->text.n_out; i++) dtype[i] = om_ty(r->from, p->result[i])->dtype;
    const om_id out = om_make(g, &om_op_fused, in, p->text.n_in,
                              OM_ATTRS(OM_AS("program", e->text), OM_AD("out_dtype", dtype, p->text.n_out)));
    if (out == OM_NONE) return g->cx->status;
    om_last(g)->segment = n->segment;
    for (uint32_t i = 0; i < gr->member.n; i++) /* that it computes again, for who looks on */
        if (r->from->nodes.v[gr->member.v[i]].again) om_last(g)->again = r->from->nodes.v[gr->member.v[i]].again;
    for (int i = 0; i < p->text.n_out; i++) {
        r->map[p->result[i]] = out + (om_id)i;
        const char *name = om_val(r->from, p->result[i])->name;
        if (name) om_val(g, out + (om_id)i)->name = om_arena_str(&g->arena, name);
    }
    return OM_OK;
}

om_status om_pass_run_fuse(om_ctx *cx, const om_graph *in, om_graph **out) {
    fuse_state st = {.g = in};
    fuse_program *p = om_alloc(cx, sizeof *p);
    char *text = om_alloc(cx, FUSE_TEXT);
    om_status s = p && text ? fuse_prepare(cx, &st) : cx->status;
    for (om_id i = in->nodes.n; s == OM_OK && i-- > 0;)
        if (st.facts->live[i]) s = group_join(cx, &st, i, p);
    if (s == OM_OK) s = exact_find(cx, &st);
    if (s == OM_OK) s = om_rewrite(cx, in, fuse_emit, &(fuse_emitter){&st, p, text}, out);
    for (uint32_t i = 0; i < st.groups.n; i++) om_free(cx, st.groups.v[i].member.v);
    om_free(cx, st.groups.v);
    om_free(cx, st.facts);
    om_free(cx, st.group);
    om_free(cx, st.exact);
    om_free(cx, text);
    om_free(cx, p);
    return s;
}
