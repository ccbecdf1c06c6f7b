/* labels.h - rows whose label counts: what label_rows.c and label_grads.c share.
 *
 * A tensor (a, b, ..., rest) whose leading axes have as many entries as there are labels has a row per label; `lead` is
 * how many axes these are. Of a value with rows, `take` gives those that count, as (c0, rest), c0 a bounded size.
 */
#ifndef OM_PASSES_LABELS_H
#define OM_PASSES_LABELS_H

#include "graph/engine.h"

typedef struct om_label_rows {
    om_id labels, idx, count; /* of the graph that is made */
    om_dim size, all;         /* c0; all rows */
    int64_t ignore;
} om_label_rows;

/* Is the loss (cross_entropy, or its gradient) one whose rows may be left out, and over enough classes to pay? */
bool om_labels_fit(const om_graph *g, const om_node *loss);
/* axes at the front of t with `rows` entries together; 0: none */
int om_labels_lead(om_graph *g, const om_type *t, om_dim rows);
/* Does an elementwise node of `lead` axes of rows make row i of row i of operand *at and of what all rows share? */
bool om_labels_apart(const om_graph *g, const om_node *n, int lead, int *at);
om_label_rows om_labels_select(om_graph *g, om_id labels, int64_t ignore);
om_label_rows om_labels_select_true(om_graph *g, om_id mask); /* rows where it is true; no labels */
om_id om_labels_take(om_graph *g, const om_label_rows *r, om_id x, int lead);
/* zeros elsewhere; t: of all rows */
om_id om_labels_put(om_graph *g, const om_label_rows *r, om_id y, const om_type *t);
/* labels, ignore_index past the count */
om_id om_labels_taken(om_graph *g, const om_label_rows *r);
/* y, rows that count, in the sizes that t has behind its leading axes */
om_id om_labels_shape(om_graph *g, const om_label_rows *r, om_id y, const om_type *t, int lead);
/* The elementwise node n (of r->from) over rows y that count in the place of operand `at`. */
om_id om_labels_node(om_rewriter *r, const om_node *n, int lead, int at, om_id y);

#endif
