/* plan_beside.c - results that a concat would put side by side are computed there, by operators that can write results
 * with any strides (om_row.strided): the gradients of queries, keys and values that one product has made, say. The
 * concat is then no call, and takes no memory of its own.
 *
 * So it is where every operand of the concat comes, by reshapes alone, from such a result of the same phase and
 * segment, and nobody else reads any of what lies between: all of them or none, as a concat writes all of its operands.
 */
#include "run/planner.h"

enum { CHAIN = 8 };
typedef enum beside { BESIDE_ASKED = 1, BESIDE_YES = 2 } beside; /* per node: planner.beside */

/* The only node that reads v, which nobody holds; OM_NONE: it is otherwise. */
static om_id only_reader(const planner *pl, om_id v) {
    const om_span users = om_users(pl->f, v);
    return users.n == 1 && !pl->f->held[v] ? users.node[0] : OM_NONE;
}

/* Who concatenates v, after reshapes; OM_NONE: nobody. */
static om_id concat_of(const planner *pl, om_id v) {
    for (int n = 0; n < CHAIN; n++) {
        const om_id id = only_reader(pl, v);
        if (id == OM_NONE) return OM_NONE;
        const om_node *m = &pl->g->nodes.v[id];
        if (om_is(m, concat)) return id;
        if (!om_is(m, reshape)) return OM_NONE;
        v = m->out;
    }
    return OM_NONE;
}

static bool same_strides(const om_tensor *a, const om_tensor *b) {
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] > 1 && a->stride[i] != b->stride[i]) return false;
    return true;
}

/* Operand v of concat c, its part of c's result and the operator that makes it: *from and the strides it is to write,
 * where reshapes give back the part. */
static bool part_place(const planner *pl, const om_node *c, om_id v, om_tensor part, om_id *from, om_tensor *strided) {
    for (int n = 0; n <= CHAIN; n++) {
        const om_node *m = om_maker(pl->g, v);
        int64_t offset;
        if (!m || m->phase != c->phase || m->segment != c->segment) return false;
        if (!om_is(m, reshape)) {
            const om_row *row = om_row_of(pl->p->device, m->op);
            *from = v, *strided = part;
            return m->op->kind != OM_K_HOST && row->strided >> (v - m->out) & 1 && om_numel(&part) > 0;
        }
        v = om_ins(pl->g, m)[0];
        if (only_reader(pl, v) == OM_NONE) return false;
        om_tensor before = pl->val[v].t, again = part;
        if (!m->op->view(NULL, &part, &before, &offset) || !m->op->view(NULL, &before, &again, &offset) ||
            !same_strides(&again, &part))
            return false;
        part = before;
    }
    return false;
}

/* All operands of concat `id`: may they lie side by side? Then they do from here on. */
static om_status parts_place(planner *pl, om_id id) {
    const om_node *c = &pl->g->nodes.v[id];
    const om_tensor *all = &pl->val[c->out].t;
    const int axis = (int)om_node_int(c, "axis", 0);
    om_id from[OM_MAX_IN];
    om_tensor part[OM_MAX_IN];
    pl->beside[id] = BESIDE_ASKED;
    if (c->n_in > OM_MAX_IN || pl->g->bounded) return OM_OK;
    for (int i = 0; i < c->n_in; i++) {
        const om_id v = om_ins(pl->g, c)[i];
        om_tensor t = *all;
        t.dim[axis] = pl->val[v].t.dim[axis];
        if (only_reader(pl, v) != id || !part_place(pl, c, v, t, &from[i], &part[i])) return OM_OK;
    }
    place at = {.t = *all};
    if ((at.st = om_plan_storage(pl, OM_W_ARENA, om_tensor_bytes(all), 0)) == OM_NONE) return pl->cx->status;
    pl->val[c->out] = at;
    for (int i = 0; i < c->n_in; i++) {
        at.t = part[i];
        pl->val[from[i]] = at;
        at.offset += pl->val[om_ins(pl->g, c)[i]].t.dim[axis] * all->stride[axis] * (int64_t)om_dtype_size(all->dtype);
    }
    pl->beside[id] |= BESIDE_YES;
    return OM_OK;
}

om_status om_plan_beside(planner *pl, om_id v, bool *yes) {
    const om_node *m = om_maker(pl->g, v);
    const om_id c = om_row_of(pl->p->device, m->op)->strided >> (v - m->out) & 1 ? concat_of(pl, v) : OM_NONE;
    *yes = false;
    if (c == OM_NONE) return OM_OK;
    if (!pl->beside[c]) OM_TRY(parts_place(pl, c));
    *yes = om_plan_is_beside(pl, c);
    return OM_OK;
}

bool om_plan_is_beside(const planner *pl, om_id id) { return pl->beside[id] & BESIDE_YES; }
