/* fold.h - a node over constants evaluated (fold.c). It stands on the graph and its kernels alone: the pass `fold` and
 * the ONNX reader (pads and axes that exporters compute) both call it, and it knows of neither.
 */
#ifndef OM_FOLD_H
#define OM_FOLD_H

#include "graph/engine.h"

/* Evaluates a node of g whose operands are (replaced by) the constants in[]: new constants in out[] and *done, or *done
 * = false when it is random, of the host, too large, or of sizes known only at run time. */
enum { OM_FOLD_IN = 16, OM_FOLD_OUT = 4 }; /* nodes with more operands or outputs are left alone */
om_status om_fold_node(om_graph *g, const om_node *n, const om_id *in, om_id *out, bool *done);
#endif
