/* onnx_write.h - what the files that write ONNX share: onnx_write.c (the model), onnx_write_node.c (nodes, attributes,
 * constants, sizes), and the tables of operators: onnx_write_math.c, onnx_write_nn.c, onnx_write_optim.c.
 *
 * A rule (rule_*) writes w->n, whose operands and results have names already, as nodes of the file; the last of them
 * gives out_name. It may refuse by name. Errors are sticky in the context, so rules do not check what they call: after
 * the first one names are "" and what is written is thrown away. All messages live in the writer's arena.
 */
#ifndef OM_ONNX_WRITE_H
#define OM_ONNX_WRITE_H

#include "onnx/onnx.h"
#include "ops/attr.h"

enum { OM_WRITE_OUT = OM_MAX_OUT }; /* outputs a node may have */

typedef struct om_writer {
    om_ctx *cx;
    const om_graph *g;
    om_arena a;
    om_strmap taken;
    uint32_t *uses;          /* per value, by forward nodes, outputs and writes */
    const char **name;       /* per value */
    const char **expr;       /* per size expression: its tensor, once made */
    OM_VEC(Onnx__NodeProto *) nodes;
    OM_VEC(Onnx__TensorProto *) inits;
    OM_VEC(Onnx__ValueInfoProto *) ins;
    OM_VEC(Onnx__ValueInfoProto *) outs;
    OM_VEC(Onnx__StringStringEntryProto *) props;
    const om_node *n;        /* the node being written */
    Onnx__NodeProto *last;   /* the node just emitted: om_write_int & co. add attributes to it */
    unsigned count;
    bool microsoft;          /* com.microsoft operators are in use */
} om_writer;

typedef struct om_write_row { /* the rule of an operator, and the name it is given */
    const om_op *op;
    const char *onnx;
    void (*rule)(om_writer *w, const char *onnx);
} om_write_row;
extern const om_write_row om_write_rows_math[], om_write_rows_nn[], om_write_rows_optim[]; /* up to one without op */

#define FAILED(w) ((w)->cx->status != OM_OK)
#define NEW(w, type, init) om_write_new((w), sizeof(type), (void (*)(void *))(init))
#define EMIT(w, op, out, ...)                                          \
    om_write_node((w), "", (op), (out), (const char *[]){__VA_ARGS__}, \
                  (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)))

/* --- nodes: names are kept, not copied; the node last emitted takes outputs and attributes ----------------------- */

/* A message in the arena; after a failure a scratch one takes the writes. */
void *om_write_new(om_writer *w, size_t size, void (*init)(void *));
char *om_write_str(om_writer *w, const char *s);                  /* a copy */
const char *om_write_unique(om_writer *w, const char *want);      /* a name that nothing has yet */
/* Adds a node; "" leaves an input out. Returns its first output, `out` or, where that is NULL, a name of its own. */
const char *om_write_node(om_writer *w, const char *domain, const char *op, const char *out, const char *const *in,
                          int n_in);
const char *om_write_output(om_writer *w, const char *name);      /* one more output */
Onnx__AttributeProto *om_write_attr(om_writer *w, const char *name, Onnx__AttributeProto__AttributeType type);
void om_write_int(om_writer *w, const char *name, int64_t x);
void om_write_float(om_writer *w, const char *name, double x);    /* as float32, the double in full beside it */
void om_write_text(om_writer *w, const char *name, const char *x);
void om_write_ints(om_writer *w, const char *name, const int64_t *x, int n);

/* --- constants and sizes: the name of a tensor ------------------------------------------------------------------- */

Onnx__TensorProto *om_write_tensor(om_writer *w, int dtype, int rank, const int64_t *dim, const void *data);
/* name NULL: one of its own */
const char *om_write_init(om_writer *w, const char *name, int dtype, int rank, const int64_t *dim, const void *data);
const char *om_write_int_list(om_writer *w, const int64_t *x, int n);
const char *om_write_int_scalar(om_writer *w, int64_t x);
/* one element of `dtype` at out: f for floats, i for integers */
void om_write_number(om_writer *w, int dtype, double f, int64_t i, void *out);
const char *om_write_scalar(om_writer *w, int dtype, double x);
const char *om_write_like(om_writer *w, double x);                /* of the first operand's type */
const char *om_write_dim(om_writer *w, om_dim d);                 /* a size as an int64 tensor of shape [1] */
const char *om_write_dims(om_writer *w, const om_dim *d, int n);  /* of shape [n] */

/* --- what several rules do ---------------------------------------------------------------------------------------- */

void om_write_refuse(om_writer *w, const char *why);
/* an attribute's list of numbers, at most max; their count */
int om_write_known(const om_writer *w, const char *name, int64_t *out, int max);
void om_write_same(om_writer *w, const char *onnx);               /* all operands, first output, no attributes */
void om_write_first(om_writer *w, const char *onnx);              /* the first operand alone */
void om_write_axis(om_writer *w, const char *onnx);               /* om_write_same, and attribute axis */
const char *om_write_cast(om_writer *w, const char *x, const char *out, int dtype);

/* --- what a rule reads -------------------------------------------------------------------------------------------- */

static inline const char *in_name(const om_writer *w, int i) {
    om_id v = i < w->n->n_in ? om_ins(w->g, w->n)[i] : OM_NONE;
    return v == OM_NONE ? "" : w->name[v];
}
static inline const om_type *in_type(const om_writer *w, int i) { return om_ty(w->g, om_ins(w->g, w->n)[i]); }
static inline bool in_given(const om_writer *w, int i) { return i < w->n->n_in && om_ins(w->g, w->n)[i] != OM_NONE; }
static inline const char *out_name(const om_writer *w, int k) { return w->name[w->n->out + (om_id)k]; }
static inline bool out_used(const om_writer *w, int k) { return w->uses[w->n->out + (om_id)k] > 0; }
static inline const om_type *out_type(const om_writer *w, int k) { return om_ty(w->g, w->n->out + (om_id)k); }
static inline const om_attr *in_attr(const om_writer *w, const char *name) {
    return om_attr_get(w->n->attr, w->n->n_attr, name);
}

#endif
