/* remat.h - what backward computes again instead of keeping it: first decided, then done.
 *
 * A decision is one flag per value of a joint graph. 1: backward computes the value again from what it is made of. 0:
 * it is kept, whoever in the backward (or among the values computed again) reads it. Flags are set where memory is
 * (om_facts.root), never at a view of it.
 *
 * A policy decides (remat_choose.c; of the user's clusters: remat_cluster.c), or a caller (om_model_variant_again); a policy is given the graph and its facts
 * and sets flags. om_remat_apply (remat.c) takes any set of legal flags, whoever has set them, and clones nodes; the
 * results have the same bits with every set.
 * Illegal is a flag at
 *   - what no forward node computes: graph inputs, constants, values of the backward, updates;
 *   - a view: the flag belongs to the value it is a view of;
 *   - the result of a host node: the host is not asked twice;
 *   - the result of a random node that has no stream, so would draw other numbers;
 *   - what a write stores (running statistics of a BatchNorm): state is computed once;
 *   - what is computed from a graph input that the forward overwrites (a batch_norm's running statistics are no such
 *     operand while it trains and nobody reads the new ones: its result does not depend on them).
 */
#ifndef OM_REMAT_H
#define OM_REMAT_H

#include "graph/facts.h"

typedef struct om_remat_ask { /* what a policy may look at */
    const om_graph *g;
    const om_facts *f;
} om_remat_ask;

typedef struct om_remat_policy {
    const char *name;
    om_status (*choose)(om_ctx *cx, const om_remat_ask *ask, uint8_t *again); /* again: per value, zeroed */
} om_remat_policy;
extern const om_remat_policy om_remat_policies[OM_N_RECOMPUTE]; /* by om_recompute */

/* Microseconds that the node takes at these sizes, roughly (remat_cost.c): to compare with others. Views: 0. */
double om_remat_cost(const om_graph *g, const om_node *n, const int64_t *sym);

/* Operations of a node that is a matrix product, a convolution, attention or the like; -1: it is none of these. */
double om_remat_products(const om_graph *g, const om_node *n, const int64_t *sym);

/* NULL: value v may be flagged; else why not. */
const char *om_remat_illegal(const om_facts *f, om_id v);
/* Subgraphs that may be computed again, by structure (remat_cluster.c). Interns sizes in the graph. */
typedef struct om_cluster {
    const char *name;        /* operators in their order, each followed by +: "layer_norm+matmul+" */
    bool compromise;         /* its first operator is a cast: what that reads is kept instead */
    om_dim bytes;            /* of all: what is not kept any more */
    OM_VEC(om_id) value;     /* what each computes; ascending */
} om_cluster;
typedef struct om_clusters { om_arena mem; OM_VEC(om_cluster) row; } om_clusters;
om_status om_clusters_find(om_ctx *cx, om_facts *f, om_clusters *all);
void om_clusters_free(om_ctx *cx, om_clusters *all);
/* Sets the flags of the first `count` of a row (-1: of all), or takes away those of their values. */
om_status om_cluster_flag(om_ctx *cx, om_facts *f, const om_cluster *row, int count, bool on, uint8_t *again);

/* OM_INVALID, naming the value, when a flag is illegal. */
om_status om_remat_apply(om_ctx *cx, const om_facts *f, const uint8_t *again, om_graph **out);
#endif
