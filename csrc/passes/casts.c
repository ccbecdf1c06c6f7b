/* casts.c - casts of weights, and of their gradients, become one node each for many. On a device whose calls cost
 * microseconds (om_device.joins_casts) the hundreds that autocast asks for in a step take longer than their bytes.
 *
 *   from the start   casts of graph inputs, also of views of them, stand where the first of them stood: their operands
 *                    are there
 *   gradients        casts that are returned gradients and that nobody reads stand where the last of them stood
 *
 * Members of a group are of one phase and one segment, so a segment hands out what it did. What lives longer is
 * bounded: the results of the first kind and the operands of the second, CASTS_BYTES of a group. Sizes that only a run
 * knows are left alone, and so is the order around a node of the host's. Runs when segments are assigned (run/joint.c).
 */
#include "graph/device.h"
#include "graph/facts.h"
#include "passes/passes.h"

enum { CASTS_BYTES = 16 << 20 };
typedef enum casts_kind { CASTS_START, CASTS_GRAD, CASTS_KINDS, CASTS_ALONE } casts_kind;

typedef struct casts_group {
    om_id place;                   /* the member where all of them are made */
    int64_t bytes;                 /* that live longer */
    int n;
    om_id member[OM_MAX_OUT];      /* ascending */
} casts_group;

typedef struct casts_state {
    const om_graph *g;
    om_facts *facts;
    uint32_t *group;               /* per node: group index + 1; 0 = none */
    uint32_t *open;                /* per phase, segment and kind: the group that takes more, as above */
    OM_VEC(casts_group) groups;
} casts_state;

static bool from_start(const om_graph *g, const om_facts *f, om_id v) {
    const uint8_t role = om_val(g, f->root[v])->role;
    return role == OM_INPUT || role == OM_PARAM || role == OM_BUFFER;
}

/* The elements of v; -1: only a run knows. */
static int64_t elements(const om_graph *g, om_id v) {
    const om_type *t = om_ty(g, v);
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) {
        int64_t size;
        if (!om_dim_const(g, t->dim[i], &size) || size < 0 || (size && n > CASTS_BYTES / size)) return -1;
        n *= size;
    }
    return n;
}

static bool read_by_none(const om_facts *f, om_id v) {
    const om_span users = om_users(f, v);
    bool read = false;
    for (uint32_t u = 0; u < users.n; u++) read |= f->live[users.node[u]];
    return !read;
}

/* bytes: what would live longer */
static casts_kind kind_of(const casts_state *st, om_id id, int64_t *bytes) {
    const om_graph *g = st->g;
    const om_node *n = &g->nodes.v[id];
    if (!st->facts->live[id] || !om_is(n, cast) || n->phase == OM_UPDATE) return CASTS_ALONE;
    const om_id x = om_ins(g, n)[0];
    const int from = om_ty(g, x)->dtype, to = om_ty(g, n->out)->dtype;
    const int64_t count = elements(g, x);
    if (!om_is_float(from) || !om_is_float(to) || count < 0) return CASTS_ALONE;
    casts_kind kind = CASTS_ALONE;
    if (from_start(g, st->facts, x)) kind = CASTS_START;
    else if (n->phase == OM_BACKWARD && st->facts->held[n->out] == OM_HELD_GRAD && read_by_none(st->facts, n->out))
        kind = CASTS_GRAD;
    *bytes = count * (int64_t)om_dtype_size(kind == CASTS_START ? to : from);
    return *bytes > CASTS_BYTES ? CASTS_ALONE : kind;
}

/* Is the operand of `id` made before node `place`? */
static bool made_before(const om_graph *g, om_id id, om_id place) {
    const om_id maker = om_val(g, om_ins(g, &g->nodes.v[id])[0])->node;
    return maker == OM_NONE || maker < place;
}

static om_status casts_group_all(om_ctx *cx, casts_state *st) {
    const om_graph *g = st->g;
    uint32_t most = 0;
    for (om_id i = 0; i < g->nodes.n; i++)
        if (g->nodes.v[i].segment > most) most = g->nodes.v[i].segment;
    const size_t n_open = ((size_t)most + 1) * 2 * CASTS_KINDS;
    if (!(st->open = om_alloc(cx, n_open * sizeof *st->open))) return cx->status;
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        int64_t bytes = 0;
        if (n->op->kind == OM_K_HOST) memset(st->open, 0, n_open * sizeof *st->open);
        const casts_kind kind = kind_of(st, i, &bytes);
        if (kind == CASTS_ALONE) continue;
        uint32_t *open = &st->open[(n->segment * 2 + (n->phase == OM_BACKWARD)) * CASTS_KINDS + kind];
        casts_group *gr = *open ? &st->groups.v[*open - 1] : NULL;
        if (gr && kind == CASTS_START && !made_before(g, i, gr->place)) continue;
        if (!gr || gr->n == OM_MAX_OUT || gr->bytes + bytes > CASTS_BYTES) {
            if (!(gr = OM_PUSH(cx, &st->groups))) return cx->status;
            *gr = (casts_group){.place = i};
            *open = st->groups.n;
        }
        if (kind == CASTS_GRAD) gr->place = i;
        gr->bytes += bytes;
        gr->member[gr->n++] = i;
        st->group[i] = *open;
    }
    return OM_OK;
}

static om_status casts_emit(om_rewriter *r, om_id id) {
    const casts_state *st = r->arg;
    const om_graph *f = r->from;
    const uint32_t group = st->group[id];
    const casts_group *gr = group ? &st->groups.v[group - 1] : NULL;
    if (!gr || gr->n == 1) return om_rewrite_copy(r, id);
    if (gr->place != id) return OM_OK; /* made before, or behind; nobody reads it until then */
    om_graph *g = r->to;
    om_id in[OM_MAX_OUT];
    om_dim dtype[OM_MAX_OUT];
    for (int i = 0; i < gr->n; i++) {
        const om_node *n = &f->nodes.v[gr->member[i]];
        in[i] = r->map[om_ins(f, n)[0]];
        dtype[i] = om_ty(f, n->out)->dtype;
    }
    const om_id out = om_make(g, &om_op_cast_all, in, gr->n, OM_ATTRS(OM_AD("out_dtype", dtype, gr->n)));
    if (out == OM_NONE) return g->cx->status;
    om_last(g)->segment = f->nodes.v[id].segment;
    for (int i = 0; i < gr->n; i++) {
        const om_node *n = &f->nodes.v[gr->member[i]];
        const char *name = om_val(f, n->out)->name;
        if (n->again) om_last(g)->again = n->again; /* that it computes again, for who looks on */
        if (name) om_val(g, out + (om_id)i)->name = om_arena_str(&g->arena, name);
        r->map[n->out] = out + (om_id)i;
    }
    return OM_OK;
}

om_status om_pass_run_casts(om_ctx *cx, const om_graph *in, om_graph **out) {
    casts_state st = {.g = in};
    if (!cx->device->joins_casts) return om_rewrite(cx, in, om_rewrite_copy, NULL, out);
    st.facts = om_facts_new(cx, in);
    st.group = om_alloc(cx, (in->nodes.n + 1) * sizeof *st.group);
    om_status s = st.facts && st.group ? casts_group_all(cx, &st) : cx->status;
    if (s == OM_OK) s = om_rewrite(cx, in, casts_emit, &st, out);
    om_free(cx, st.groups.v), om_free(cx, st.open), om_free(cx, st.group), om_free(cx, st.facts);
    return s;
}
