/* onnx/map.h - what the files that map ONNX operators to engine operators share: onnx/elementwise.c, onnx/shape.c,
 * onnx/gather.c, onnx/nn.c, and onnx/map.c for host operators and the list of their tables. ops.def has the engine's
 * side. A new file: its table, and its name in OM_ONNX_TABLES.
 *
 * A rule (map_*) reads operands and attributes through onnx.h, builds nodes with the ordinary builder and sets the
 * outputs. It relies on three things: builder errors are sticky, so rules check only what the builder cannot see;
 * operands that must be known before the run (axes, shapes, pads, k) arrive as lists of size expressions; and list
 * operands of newer opsets were attributes of the same name in older ones, so one function (map_list_or_attr) reads
 * both and opsets 13 to 23 share the rules.
 *
 * Compositions are chosen so that the gradient is torch's as well as the value: Clip is two `where` (all of the
 * gradient passes at the bounds), ReduceL2 has gradient 0 at 0, LogSumExp takes out its maximum under stop_grad.
 */
#ifndef OM_ONNX_MAP_H
#define OM_ONNX_MAP_H

#include "onnx/onnx.h"

#define IN(i) om_onnx_in(o, (i))
#define SET(k, v) om_onnx_set(o, (k), (v))
#define INT(name, dflt) om_onnx_int(o, (name), (dflt))
#define FLT(name, dflt) om_onnx_float(o, (name), (dflt))
#define REFUSE(...) return om_onnx_err(o, OM_UNSUPPORTED, __VA_ARGS__)
#define FAILED (o->cx->status != OM_OK)
#define MAKE1(op, x) om_make(o->g, &om_op_##op, OM_IN(x), NULL, 0)
#define MAKE2(op, x, y) om_make(o->g, &om_op_##op, OM_IN(x, y), NULL, 0)

om_type om_map_type(om_onnx *o, int i);         /* of operand i, brought into the graph */
om_type om_map_type_of(om_onnx *o, om_id v);
om_status om_map_axis(om_onnx *o, int64_t a, int rank, int *axis);
/* Operand i (newer opsets) or the attribute `name` (older ones), as size expressions. *list NULL: neither is given. */
om_status om_map_list_or_attr(om_onnx *o, int i, const char *name, const om_dim **list, uint32_t *n);
/* all of them constants */
om_status om_map_known(om_onnx *o, const om_dim *list, uint32_t n, const char *what, int64_t *out);
/* a set of axes; `all` when none is given */
om_status om_map_axes(om_onnx *o, int i, int rank, bool all, uint32_t *mask);
/* attribute list of plain integers */
om_status om_map_ints(om_onnx *o, const char *name, int count, int64_t dflt, int64_t *out);
/* a one-element constant operand; left out: *x stays */
om_status om_map_scalar(om_onnx *o, int i, const char *what, double *x);
om_attr om_map_dims_attr(const char *name, const int64_t *v, int n, om_graph *g, om_dim *buf);
om_id om_map_like(om_onnx *o, om_id x, double value); /* a scalar of x's dtype */
om_id om_map_where(om_onnx *o, om_id c, om_id x, om_id y);
om_id om_map_reduce_op(om_onnx *o, const om_op *op, om_id x, uint32_t mask, bool keep);
/* (c) -> (c, 1, 1, ...): broadcasts along axis 1 of a tensor of `rank` */
om_id om_map_per_channel(om_onnx *o, om_id w, int rank);
void om_map_random(om_onnx *o);                 /* gives the last node a random stream of its own */
bool om_map_index_nonneg(const om_graph *g, om_id v, int depth); /* certainly; depth: 0 */
om_id om_map_index(om_onnx *o, om_id idx, om_dim size); /* idx with `size` added where negative */
#endif
