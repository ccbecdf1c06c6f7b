/* planner.h - what the files that make a plan share (plan.c has the sweeps' names). Private to run/. */
#ifndef OM_PLANNER_H
#define OM_PLANNER_H

#include "run/plan.h"

enum { OM_PLAN_ALIGN = 64 };

typedef struct place { om_tensor t; uint32_t st; int64_t offset; } place; /* of a value; t.data unused */

typedef struct planner {
    om_ctx *cx;
    const om_graph *g;
    om_plan *p;
    OM_VEC(om_storage) st;
    OM_VEC(om_call) calls;
    place *val;            /* per value */
    const om_facts *f;     /* a value's storage is its root's */
    uint32_t *alias;       /* storage -> storage that took over its place (in-place); itself otherwise */
    uint8_t *past;         /* per value: somebody reads what lies past the count (graph/bounded.c) */
    uint8_t *beside;       /* per node: a concat whose operands are computed where it would put them (plan_beside.c) */
    bool no_reuse;
} planner;

uint32_t om_plan_storage(planner *pl, om_where where, int64_t size, uint32_t index); /* a new one; OM_NONE: recorded */
/* *yes: the result v of a node that is about to be planned has its place already, in a concat's. */
om_status om_plan_beside(planner *pl, om_id v, bool *yes);
bool om_plan_is_beside(const planner *pl, om_id id); /* is that node such a concat, whose result is there? */

om_status om_plan_calls(planner *pl, const om_tensor *in); /* sweep 1 (plan_calls.c) */
om_status om_plan_space(planner *pl);                      /* sweeps 2 to 4 (plan_space.c) */
#endif
