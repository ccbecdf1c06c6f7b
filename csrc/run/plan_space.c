/* plan_space.c - where storages lie (rules: plan.h): lifetimes, what works in place, offsets. The last is quadratic in
 * the number of storages: largest first, into the smallest gap among those placed that live at the same time. Then
 * gradients, which live to the end, into what gaps there are.
 */
#include "graph/sabotage.h"
#include "run/planner.h"

#include <stdlib.h>

enum { PART_LEAST = 4 << 10 }; /* a smaller gradient in the arena saves nothing and may hold all of it for long */

static void use(om_storage *s, int call) {
    if (call < s->first) s->first = call;
    if (call > s->last) s->last = call;
}

static uint32_t root(planner *pl, uint32_t st) {
    while (pl->alias[st] != st) st = pl->alias[st];
    return st;
}

static void lifetimes(planner *pl) {
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        for (int k = 0; k < c->n_in + c->n_out; k++)
            if (c->arg[k].storage != OM_NONE && (k >= c->n_in || !om_sabotage("plan.lifetime")))
                use(&pl->st.v[c->arg[k].storage], (int)i);
        if (c->count.storage != OM_NONE) use(&pl->st.v[c->count.storage], (int)i);
        if (c->scratch != OM_NONE) use(&pl->st.v[c->scratch], (int)i);
    }
}

static bool same_layout(const om_parg *a, const om_parg *b) {
    if (a->offset != b->offset || a->t.rank != b->t.rank || om_dtype_size(a->t.dtype) != om_dtype_size(b->t.dtype))
        return false;
    for (int i = 0; i < a->t.rank; i++)
        if (a->t.dim[i] != b->t.dim[i] || (a->t.dim[i] > 1 && a->t.stride[i] != b->t.stride[i])) return false;
    return true;
}

/* Output 0 may lie where operand j lies, when that is its storage's last use (rules: plan.h). */
static void in_place(planner *pl) {
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        if (c->kind != OM_CALL_RUN || !c->n_out) continue;
        om_parg *out = &c->arg[c->n_in];
        for (int j = 0; j < c->n_in && j < 32; j++) {
            if (!om_row_inplace(c->row, j) || c->arg[j].storage == OM_NONE) continue;
            uint32_t from = root(pl, c->arg[j].storage), to = root(pl, out->storage);
            om_storage *sf = &pl->st.v[from], *so = &pl->st.v[to];
            bool loan = sf->where == OM_W_OUTPUT && so->where == OM_W_ARENA && (int)i >= pl->p->n_forward;
            if (from == to || (sf->where != OM_W_ARENA && !loan) || (sf->last != (int)i && !om_sabotage("plan.last")) ||
                so->first != (int)i)
                continue;
            if (c->arg[j].offset != 0 || sf->size != so->size || out->offset != 0 ||
                (!same_layout(&c->arg[j], out) && !om_sabotage("plan.layout")))
                continue;
            /* what else lies there is read element by element as well, or it would be read after it was overwritten */
            bool clash = false;
            for (int k = 0; k < c->n_in; k++)
                clash |= k != j && c->arg[k].storage != OM_NONE && root(pl, c->arg[k].storage) == from &&
                         (!om_row_inplace(c->row, k) || !same_layout(&c->arg[k], out));
            for (int k = c->n_in + 1; k < c->n_in + c->n_out; k++) clash |= root(pl, c->arg[k].storage) == from;
            if (clash && !om_sabotage("plan.clash")) continue;
            if (loan) {
                so->where = OM_W_LOAN;
                so->index = sf->index;
                break;
            }
            /* the operand moves into the output's storage: that one may be a block of the host's (OUTPUT, GRAD) */
            if (so->where != OM_W_ARENA && ((int)i >= pl->p->n_forward) != (sf->first >= pl->p->n_forward) &&
                !om_sabotage("plan.home"))
                continue;
            pl->alias[from] = to;
            so->first = sf->first;
            break;
        }
    }
    for (uint32_t i = 0; i < pl->calls.n; i++) {
        om_call *c = &pl->calls.v[i];
        for (int k = 0; k < c->n_in + c->n_out; k++)
            if (c->arg[k].storage != OM_NONE) c->arg[k].storage = root(pl, c->arg[k].storage);
        if (c->count.storage != OM_NONE) c->count.storage = root(pl, c->count.storage);
    }
}

/* --- sweep 4: offsets -------------------------------------------------------------------------- */

typedef struct slot { int64_t offset, end; int32_t first, last; } slot;
typedef struct order { int64_t size; uint32_t st; int32_t first; } order;

static int by_size(const void *a, const void *b) { /* larger first; ties by first call, then index: one result */
    const order *x = a, *y = b;
    if (x->size != y->size) return x->size > y->size ? -1 : 1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->st < y->st ? -1 : x->st > y->st;
}

/* The smallest gap of `size` bytes among n slots, and up to `top`, that nobody uses from `first` to `last`; -1: none.
 * *end: past the last of those in use. */
static int64_t gap_find(const slot *placed, uint32_t n, int64_t size, int32_t first, int32_t last, int64_t top,
                        int64_t *end) {
    int64_t at = 0, best = -1, best_gap = INT64_MAX;
    for (uint32_t k = 0; k < n; k++) { /* gaps between neighbours in time */
        if (placed[k].last < first + (om_sabotage("plan.overlap") ? 1 : 0) || placed[k].first > last) continue;
        const int64_t gap = placed[k].offset - at;
        if (gap >= size && gap < best_gap) best = at, best_gap = gap;
        if (placed[k].end > at) at = placed[k].end;
    }
    if (top - at >= size && top - at < best_gap) best = at;
    *end = at;
    return best;
}

static void slot_put(slot *placed, uint32_t n, slot s) {
    while (n > 0 && placed[n - 1].offset > s.offset) placed[n] = placed[n - 1], n--;
    placed[n] = s;
}

static int64_t aligned(int64_t size) { return (size + OM_PLAN_ALIGN - 1) & ~(int64_t)(OM_PLAN_ALIGN - 1); }

/* Gradients that find a place in the arena of `top` bytes, in which n storages lie. ord: room for every storage. */
static void gradients(planner *pl, order *ord, slot *placed, uint32_t n, int64_t top) {
    uint32_t count = 0;
    int64_t sum = 0, found = 0;
    for (uint32_t i = 0; i < pl->st.n; i++) {
        om_storage *s = &pl->st.v[i];
        if (s->where != OM_W_GRAD || pl->alias[i] != i || s->last < 0) continue;
        s->offset = -1;
        sum += s->size;
        if (s->size >= PART_LEAST) ord[count++] = (order){aligned(s->size), i, s->first};
    }
    if (pl->no_reuse) return;
    qsort(ord, count, sizeof *ord, by_size);
    for (uint32_t i = 0; i < count; i++) {
        om_storage *s = &pl->st.v[ord[i].st];
        const int32_t first = s->first + (om_sabotage("plan.place") ? 1 : 0);
        int64_t end;
        if ((s->offset = gap_find(placed, n, ord[i].size, first, INT32_MAX, top, &end)) < 0) continue;
        slot_put(placed, n++, (slot){s->offset, s->offset + ord[i].size, s->first, INT32_MAX});
        found += s->size;
    }
    pl->p->bytes.placed = found;
    pl->p->stay = top <= sum + found;
}

static om_status offsets(planner *pl) {
    uint32_t n = 0;
    order *ord = om_alloc(pl->cx, (pl->st.n + 1) * sizeof *ord);
    slot *placed = om_alloc(pl->cx, (pl->st.n + 1) * sizeof *placed); /* sorted by offset */
    if (!ord || !placed) {
        om_free(pl->cx, ord);
        om_free(pl->cx, placed);
        return pl->cx->status;
    }
    for (uint32_t i = 0; i < pl->st.n; i++) {
        om_storage *s = &pl->st.v[i];
        if (s->where == OM_W_ARENA && pl->alias[i] == i && s->last >= 0)
            ord[n++] = (order){aligned(s->size), i, s->first};
    }
    qsort(ord, n, sizeof *ord, by_size);
    int64_t top = 0;
    for (uint32_t i = 0; i < n; i++) {
        om_storage *s = &pl->st.v[ord[i].st];
        const int64_t size = ord[i].size;
        int64_t end;
        if (pl->no_reuse) {
            s->offset = top;
            if ((top += size) > OM_ADDRESSES) break;
            continue;
        }
        const int64_t gap = gap_find(placed, i, size, s->first, s->last, -1, &end);
        s->offset = gap >= 0 ? gap : end;
        if (s->offset + size > top) top = s->offset + size;
        if (top > OM_ADDRESSES) break;
        slot_put(placed, i, (slot){s->offset, s->offset + size, s->first, s->last});
    }
    pl->p->bytes.arena = top;
    if (top <= OM_ADDRESSES) gradients(pl, ord, placed, n, top);
    om_free(pl->cx, ord);
    om_free(pl->cx, placed);
    return top <= OM_ADDRESSES
               ? OM_OK
               : om_fail(pl->cx, OM_NOMEM, "a step at these sizes needs more memory than the address space has");
}
om_status om_plan_space(planner *pl) {
    if (!(pl->alias = om_alloc(pl->cx, (pl->st.n + 1) * sizeof *pl->alias))) return pl->cx->status;
    for (uint32_t i = 0; i < pl->st.n; i++) pl->alias[i] = i;
    lifetimes(pl);
    if (!pl->no_reuse) in_place(pl);
    return offsets(pl);
}
