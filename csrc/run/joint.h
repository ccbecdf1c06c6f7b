/* joint.h - the graph of a variant, from the forward's (joint.c), and what there is to choose from (choice.c). Private
 * to run/. */
#ifndef OM_JOINT_H
#define OM_JOINT_H

#include "run/plan.h"

/* Passes [0, *at) of om_passes_joint: *g is the graph to decide on. A failure leaves in *g what there is, to be freed.
 * */
om_status om_joint_begin(om_ctx *cx, const om_graph *forward, const uint8_t *wanted, const uint8_t *arriving,
                         om_flow *flow, om_graph **g, int *at);
/* The rest, when number *at, the flags, is done: replaces *g. facts: of the result, also the caller's after a failure.
 * */
om_status om_joint_end(om_ctx *cx, int at, const int *group, om_graph **g, om_facts **facts, int *n_segments);

/* With a context of its own, like `like`. */
om_status om_choice_make(om_ctx *cx, const om_ctx *like, const om_graph *forward, const uint8_t *wanted,
                         const uint8_t *arriving, om_choice **out);
#endif
