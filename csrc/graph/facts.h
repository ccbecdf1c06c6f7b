/* facts.h - what follows from a graph and more than one part of the engine asks: who made a value, whose memory it is,
 * who reads it, who still needs it when the run is over.
 *
 * om_facts_new computes it once, in O(nodes + operands), into one block that om_free gives back; nothing in it changes
 * and it points at the graph, so it is true as long as nobody adds a node. (Segments of nodes and interned sizes may
 * change: they are not in it.)
 *
 *   root       per value: the value whose memory it lies in, as long as views are views: itself, or where the chain of
 *              view operators it is made by begins. That is a graph input, a constant, or the result of a node that
 *              writes memory of its own
 *   users      per value: the nodes that read it, in their order, once per operand
 *   holders    per root: the nodes that read any value lying there, in the same way; a view of it is one of them
 *   held       per value: it is a user output, what a write stores, a returned gradient (OM_HELD_*)
 *   root_held  per root: the same of any value lying there
 *   live       per node: an output, a write or a gradient needs it
 *
 * Dead nodes are users too: a plan runs every node of its graph. Who looks at a graph that another pass has left dead
 * nodes in, and may ignore them, asks `live`.
 */
#ifndef OM_FACTS_H
#define OM_FACTS_H

#include "graph/engine.h"

enum { OM_HELD_OUTPUT = 1, OM_HELD_WRITE = 2, OM_HELD_GRAD = 4 };

typedef struct om_lists { om_id *first, *node; } om_lists; /* of key k: node[first[k]] .. node[first[k + 1] - 1] */

typedef struct om_facts {
    const om_graph *g;
    om_id *root;
    om_lists users, holders;
    uint8_t *held, *root_held, *live;
} om_facts;

om_facts *om_facts_new(om_ctx *cx, const om_graph *g); /* NULL: no memory. om_free it */

typedef struct om_span { const om_id *node; uint32_t n; } om_span; /* nodes, ascending */
static inline om_span om_list(const om_lists *l, om_id k) {
    return (om_span){l->node + l->first[k], l->first[k + 1] - l->first[k]};
}
static inline om_span om_users(const om_facts *f, om_id v) { return om_list(&f->users, v); }
/* of the memory that v lies in */
static inline om_span om_holders(const om_facts *f, om_id v) { return om_list(&f->holders, f->root[v]); }

/* The node that makes v; NULL: a graph input or a constant (or OM_NONE). Needs no facts. */
static inline const om_node *om_maker(const om_graph *g, om_id v) {
    return v == OM_NONE || om_val(g, v)->node == OM_NONE ? NULL : &g->nodes.v[om_val(g, v)->node];
}

/* The number v is at each of its elements, whatever its shape: a constant of equal elements, a fill, or what views,
 * copies and casts to a float make of one. false: it is none, or not known before the run (a fill's value may be a
 * size), or an integer that a double does not hold. Needs no facts. */
bool om_number_of(const om_graph *g, om_id v, double *x);

/* Of an operand v of some node: does nothing else in the graph name it? `live`: dead nodes do not count. */
bool om_used_once(const om_facts *f, om_id v);
bool om_used_once_live(const om_facts *f, om_id v);
/* The last node of that phase that reads the memory v lies in; OM_NONE: none does. */
om_id om_last_holder(const om_facts *f, om_id v, om_phase phase);
/* Does a node that does not run with the forward (backward, update) read the memory v lies in? */
bool om_read_after_forward(const om_facts *f, om_id v);

/* live[i] = node i is needed by an output, a write or a gradient; `live` is zeroed, one byte per node. */
void om_nodes_live(const om_graph *g, uint8_t *live);
#endif
