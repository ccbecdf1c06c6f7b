/* read.h - what the files that read a model share: onnx/read.c (nodes, the graph), onnx/attributes.c (attributes,
 * metadata, types), onnx/value.c (literals, operands, results). onnx/onnx.h is what the rules of operators see. */
#ifndef OM_ONNX_READ_H
#define OM_ONNX_READ_H

#include "onnx/onnx.h"

enum { OM_ONNX_NAME = 128 }; /* the longest name of a size, and of an attribute that is looked for */

/* GraphProto.metadata_props "<what>:<name>"; of the same key twice, the first; NULL when absent */
const char *om_onnx_graph_meta(om_onnx *o, const char *what, const char *name);
/* An expression of the file; text that is none (other exporters write anything) names a symbol. */
om_status om_onnx_dim_param(om_onnx *o, const char *text, om_dim *d);

/* A value of a name that nothing has yet, which belongs to o->vals and moves when that grows. NULL: recorded. */
om_onnx_val *om_onnx_define(om_onnx *o, const char *name);
/* A small integer literal (v->lit) is also a list of sizes. */
om_status om_onnx_literal(om_onnx *o, om_onnx_val *v);
/* Brings a value of the file into the graph; OM_NONE: recorded. */
om_id om_onnx_value(om_onnx *o, om_onnx_val *x, const char *name);
/* The type of a result against the file's value_info. */
void om_onnx_check_type(om_onnx *o, const char *name, const om_type *t);

#endif
