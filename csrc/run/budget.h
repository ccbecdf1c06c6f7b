/* budget.h - what backward computes again so that a step fits a number of bytes. Private to run/.
 *
 *   budget_walk.c   a walk over sets of flags, from what is cheap to as little memory as it finds: arithmetic on the
 *                   graph, no plan
 *   budget.c        sets of the walks, each with its plan's memory; the fastest one that fits
 */
#ifndef OM_BUDGET_H
#define OM_BUDGET_H

#include "run/joint.h"

/* --- budget_walk.c -------------------------------------------------------------------------------------- */

typedef struct om_walk om_walk;
/* Of the graph to decide on, at these sizes; both outlive the walk. NULL: no memory. */
om_walk *om_walk_new(om_ctx *cx, const om_graph *g, const om_facts *f, const int64_t *sym);
void om_walk_free(om_walk *w);
/* Begins at these flags. */
om_status om_walk_begin(om_walk *w, const uint8_t *again);
/* Flags what gives most memory for its time where the most is needed at once, until that is at least `bytes` less than
 * before the call, or there is nothing more: false, and the flags may have grown all the same. */
bool om_walk_on(om_walk *w, int64_t bytes);
const uint8_t *om_walk_flags(const om_walk *w);
int64_t om_walk_peak(const om_walk *w); /* bytes of the arena, without gaps: to steer by */
double om_walk_cost(const om_walk *w);  /* microseconds of what is computed twice (om_remat_cost) */
double om_walk_total(const om_walk *w); /* and of a step that computes nothing twice */

/* --- budget.c ------------------------------------------------------------------------------------------ */

typedef struct om_budget om_budget;
struct om_budget {
    om_budget *next;         /* of the model's */
    om_ctx *cx, *host;       /* the model's; who takes the blocks, as long as om_budget_fit runs */
    uint8_t *wanted, *arriving;
    int *group;              /* or NULL. These three are its key */
    om_graph *g;             /* to decide on */
    om_facts *f;
    int at;                  /* om_joint_begin */
    uint32_t n_inputs, n_outputs;
    OM_VEC(struct om_budget_set) set; /* from fast to small at the sizes they were found for; [0]: level 0 */
};
om_status om_budget_new(om_ctx *cx, const om_graph *forward, const uint8_t *wanted, const uint8_t *arriving,
                        const int *group, om_budget **out);
void om_budget_free(om_budget *b);
bool om_budget_is(const om_budget *b, const uint8_t *wanted, const uint8_t *arriving, const int *group);
/* Fills all of `fit` but the variant. cx: who is going to take the blocks. *again: the flags, one per value of b->g,
 * the budget's; NULL: nothing fits. */
om_status om_budget_fit(om_ctx *cx, om_budget *b, const om_tensor *inputs, int64_t bytes, double share,
                        om_fit *fit, const uint8_t **again);
#endif
