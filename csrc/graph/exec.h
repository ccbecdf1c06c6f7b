/* exec.h - what the planner, the executor and the interpreter share: sizes and tensors of a graph once symbols are
 * known. */
#ifndef OM_EXEC_H
#define OM_EXEC_H
#include "graph/engine.h"

/* dense, zeroed; the caller frees t->data with om_free */
om_status om_tensor_alloc(om_ctx *cx, om_tensor *t);
/* Values of the graph's symbols from the tensors given for its inputs. sym: g->syms.n entries. */
om_status om_syms_bind(om_ctx *cx, const om_graph *g, const om_tensor *in, int64_t *sym);
/* dtype, sizes and dense strides of a value; data only for constants. */
om_status om_tensor_of(om_ctx *cx, const om_graph *g, om_id v, const int64_t *sym, om_tensor *t);
/* A node's attributes with every size evaluated, in arena `a`. */
om_status om_attrs_concrete(om_arena *a, const om_graph *g, const om_node *n, const int64_t *sym, const om_attr **out);
#endif
