/* bounded.h - what type rules ask of rows that only the data chooses (bounded.c). */
#ifndef OM_OPS_BOUNDED_H
#define OM_OPS_BOUNDED_H

#include "graph/engine.h"

/* The bounded size that operands `idx` and `count` (or `count` alone: idx < 0) of a node stand for. */
om_status bounded_operands(om_graph *g, const om_node *n, int idx, int count, om_dim *size);

#endif
