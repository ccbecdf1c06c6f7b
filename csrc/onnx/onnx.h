/* onnx.h - what the files of the ONNX reader share: onnx/wire.c (is it protobuf?), onnx/read.h and its files (model,
 * values, types), onnx/size.c (shape arithmetic as size expressions), onnx/map.h and its files (the tables of
 * operators).
 *
 * A value of the file (om_onnx_val) is known in up to three ways: as a literal of the file, as a value of the graph
 * being built, and, for integer tensors of rank 0 or 1 with at most OM_ONNX_LIST elements, as a list of size
 * expressions. Shape subgraphs only ever make lists, so they leave no node behind; a list that is also used as data is
 * turned into one on demand. Errors are sticky in the context; om_onnx_err puts the node's place, name and operator in
 * front of the message.
 */
#ifndef OM_ONNX_H
#define OM_ONNX_H

#include "graph/engine.h"
#include "graph/strmap.h"

#include "onnx.pb-c.h"

#define OM_ONNX_SIZE ((int64_t)1 << 40) /* a longer axis is an error in the file */
enum { OM_ONNX_LIST = 64, OM_ONNX_DEPTH = 32, OM_ONNX_OPSET_MIN = 13, OM_ONNX_OPSET_MAX = 23 };

typedef struct om_onnx_val {
    om_id v;                            /* in the graph; OM_NONE until somebody needs it there */
    const om_dim *list;                 /* the elements, when they are known as sizes; else NULL */
    uint32_t n;
    uint8_t rank, dtype;                /* of the list */
    const Onnx__TensorProto *lit;
    const om_id *seq;                   /* a sequence: its n tensors (onnx/optim.c); nothing else is set then */
} om_onnx_val;

typedef struct om_onnx om_onnx;
typedef struct om_onnx_op {             /* one row of the table */
    const char *domain, *name;
    int8_t min_in, max_in, max_out;     /* max_in, max_out -1: any number */
    om_status (*map)(om_onnx *o);       /* builds nodes, sets the outputs; NULL: only the size rule exists */
    bool (*size)(om_onnx *o);           /* true: the outputs were set as lists. NULL: none */
    const om_op *op;                    /* for rules shared by many rows */
} om_onnx_op;

struct om_onnx {
    om_ctx *cx;
    om_graph *g;
    om_arena tmp;
    const Onnx__GraphProto *graph;
    int64_t opset;                      /* of ai.onnx */
    OM_VEC(om_onnx_val) vals;
    om_strmap names;                    /* name -> index into vals */
    /* name -> index into graph->value_info or, from n_value_info on, into graph->output */
    om_strmap types;
    om_strmap meta;                     /* key -> index into graph->metadata_props */
    /* the node being read */
    const Onnx__NodeProto *node;
    size_t index;
    const om_onnx_op *row;
    uint32_t *in;                       /* per input: index into vals, or OM_NONE = left out */
    int n_in;
};

om_status om_onnx_err_at(om_onnx *o, om_status s, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 5, 6), cold));
#define om_onnx_err(o, s, ...) om_onnx_err_at((o), (s), __FILE__, __LINE__, __VA_ARGS__)
#define ONNX_CHECK(o, cond, ...)                                                                    \
    do {                                                                                            \
        if (!(cond)) return om_onnx_err((o), OM_INVALID, __VA_ARGS__);                              \
    } while (0)

/* Is this a well-formed message of type d? Otherwise OM_INVALID with byte offset and reason. */
om_status om_onnx_wire(om_ctx *cx, const ProtobufCMessageDescriptor *d, const uint8_t *bytes, size_t size);
/* A file, which om_onnx_wire has found well-formed, as messages in `mem`. NULL: recorded. */
Onnx__ModelProto *om_onnx_unpack(om_ctx *cx, om_arena *mem, const void *bytes, size_t size);

/* operands; i beyond the node's inputs counts as left out */
bool om_onnx_has(const om_onnx *o, int i);
om_onnx_val *om_onnx_operand(om_onnx *o, int i);                 /* NULL when left out */
/* as a value of the graph; OM_NONE when left out (or failed) */
om_id om_onnx_in(om_onnx *o, int i);
const om_dim *om_onnx_list(om_onnx *o, int i, uint32_t *n);     /* as sizes; NULL + error when it depends on data */
bool om_onnx_scalar(om_onnx *o, int i, double *x);              /* a one-element constant; false otherwise, no error */
void om_onnx_set(om_onnx *o, int k, om_id v);                   /* output k; a name the node does not give is skipped */
void om_onnx_set_list(om_onnx *o, int k, int dtype, int rank, const om_dim *list, uint32_t n);
void om_onnx_set_seq(om_onnx *o, int k, const om_id *v, uint32_t n); /* v is kept */
/* tensors of a sequence; NULL + error when it is none */
const om_id *om_onnx_seq(om_onnx *o, int i, uint32_t *n);
void om_onnx_alias(om_onnx *o, int k, int i);                   /* output k is operand i */
bool om_onnx_wants(const om_onnx *o, int k);                    /* is output k named? */

/* attributes of the node */
const Onnx__AttributeProto *om_onnx_attr(const om_onnx *o, const char *name);
int64_t om_onnx_int(const om_onnx *o, const char *name, int64_t dflt);
double om_onnx_float(const om_onnx *o, const char *name, double dflt);
const char *om_onnx_str(om_onnx *o, const char *name, const char *dflt);
const int64_t *om_onnx_ints(const om_onnx *o, const char *name, uint32_t *n);   /* NULL when absent */
const char *om_onnx_meta(const om_onnx *o, const char *key);    /* NodeProto.metadata_props; NULL when absent */
bool om_onnx_index_nonneg(const om_onnx *o);                    /* noted there: no index of it counts from the end */

om_id om_onnx_const(om_onnx *o, const Onnx__TensorProto *t);    /* a tensor of the file as constant */
om_status om_onnx_constant(om_onnx *o);                        /* the rule of Constant */

/* What to do with a dimension that is no number. NAMED: parse it, it must be there; INPUT: the same, but a missing one
 * gets a symbol of its own; KNOWN: only numbers matter, others become -1. */
enum { OM_ONNX_NAMED, OM_ONNX_INPUT, OM_ONNX_KNOWN };
om_status om_onnx_type(om_onnx *o, const Onnx__TypeProto *t, int mode, const char *name, om_type *out);
om_status om_onnx_value_type(om_onnx *o, const char *name, int mode, om_type *out, bool *found);

/* onnx/size.c */
om_id om_onnx_dim_value(om_onnx *o, om_dim d, int dtype);       /* a size as 0-d tensor */
/* with every symbol >= least; INT64_MIN/MAX: unknown */
void om_onnx_bounds(const om_graph *g, om_dim d, int64_t least, int64_t *lo, int64_t *hi);
bool om_onnx_nonneg(const om_graph *g, om_dim d);               /* for certain, symbols being >= 0 */
/* x[start:end:step] of an axis of `size`, ONNX's rules for step >= 1: bounds in 0 .. size */
om_dim om_onnx_bound(om_graph *g, om_dim d, om_dim size);
bool om_onnx_operand_type(om_onnx *o, int i, om_type *t);       /* without bringing it into the graph */
#define OM_ONNX_SIZE_MAP(X)                                                                                          \
    X(arith)                                                                                                         \
    X(compare) X(logic) X(neg) X(not ) X(abs) X(shape) X(size) X(gather) X(slice) X(concat) X(rank) X(cast) X(where) \
        X(range) X(constant_of_shape) X(expand) X(reduce)
#define X(name) bool om_onnx_size_##name(om_onnx *o);
OM_ONNX_SIZE_MAP(X)
#undef X

/* The tables of operators, one per file; each ends with name NULL. */
#define OM_ONNX_TABLES(X) X(elementwise) X(shape) X(gather) X(nn) X(recurrent) X(host) X(optim) X(pointwise)
#define X(name) extern const om_onnx_op om_onnx_ops_##name[];
OM_ONNX_TABLES(X)
#undef X
extern const om_onnx_op *const om_onnx_tables[];                /* all of them, then NULL */
#endif
