/* parts.c - a block of which parts are handed out as blocks of their own (plan.h, GRAD). It goes back to its device
 * when it and all its parts have been put. Counts are atomic: blocks are put on any thread, at any time.
 */
#include "run/plan.h"

struct om_parts {
    om_services sv;  /* it was allocated by */
    om_block *whole;
    void *data;      /* whole's: compared when that may be gone */
    int held, out;   /* the whole, and parts; parts */
    int known;       /* om_parts_know, and one for those held */
};

static void parts_free(om_services sv, void *p) {
    om_ctx cx = {.sv = sv};
    om_free(&cx, p);
}

om_parts *om_parts_new(om_ctx *cx, om_block *whole) {
    om_parts *p = om_alloc(cx, sizeof *p);
    if (!p) return NULL;
    *p = (om_parts){.sv = cx->sv, .whole = whole, .data = whole->data, .held = 1, .known = 2};
    whole->parts = p;
    return p;
}

void om_parts_know(om_parts *p) { __atomic_add_fetch(&p->known, 1, __ATOMIC_RELAXED); }

void om_parts_forget(om_parts *p) {
    if (p && !__atomic_sub_fetch(&p->known, 1, __ATOMIC_ACQ_REL)) parts_free(p->sv, p);
}

bool om_parts_is(const om_parts *p, const void *data) {
    return p && p->data == data && __atomic_load_n(&p->held, __ATOMIC_ACQUIRE) > 0;
}

bool om_parts_out(const om_parts *p) { return __atomic_load_n(&p->out, __ATOMIC_ACQUIRE) > 0; }

om_block *om_parts_take(om_ctx *cx, om_parts *p, int64_t offset, int64_t size) {
    om_block *b = om_alloc(cx, sizeof *b);
    if (!b) return NULL;
    *b = (om_block){.data = (char *)p->data + offset, .size = (size_t)size, .device = p->whole->device, .parts = p};
    __atomic_add_fetch(&p->held, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&p->out, 1, __ATOMIC_RELAXED);
    return b;
}

void om_parts_put(om_block *b) {
    om_parts *p = b->parts;
    om_block *whole = p->whole;
    if (b != whole) {
        parts_free(p->sv, b);
        __atomic_sub_fetch(&p->out, 1, __ATOMIC_RELEASE);
    }
    if (__atomic_sub_fetch(&p->held, 1, __ATOMIC_ACQ_REL)) return;
    whole->parts = NULL;
    whole->device->block_put(whole);
    om_parts_forget(p);
}
