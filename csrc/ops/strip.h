/* strip.h - chains of elementwise operators: what a node of `fused`, or of a single row of pointwise.def, computes.
 *
 * A chain is a list of statements in SSA form. Values 0 .. n_in-1 are the operands, each statement defines the next
 * one.
 *
 * Text. The attribute `program` of `fused` holds statements separated by ';':
 *     <op>:<result dtype>[!] <value> <value> ... [p=<float>] [rng=<stream>]    one statement
 *     out <value> <value> ...                    last; absent = the last statement's value
 * e.g.  add:f32 0 1;gelu:f32 2;cast:bf16 3;out 2 4
 * Intermediate bf16 and f16 values stay in float: only memory, a cast and a `!` round them.
 *
 * How long a chain may be is the device's to say (om_device.strip_fits); the limits here are those of the text.
 */
#ifndef OM_OPS_STRIP_H
#define OM_OPS_STRIP_H

#include "graph/engine.h"
#include "ops/strip_op.h"

enum {
    OM_STRIP_IN = 24,      /* most operands */
    OM_STRIP_OUT = 8,      /* most outputs */
    OM_STRIP_VALUES = 160, /* most values */
    OM_STRIP_DRAWS = 8     /* most dropouts */
};

enum { OM_PW_FLT, OM_PW_TRIG, OM_PW_NUM, OM_PW_CMP, OM_PW_PRED, OM_PW_LOG, OM_PW_SEL, OM_PW_CAST, OM_PW_DRAW };
/* om_op.pw of a pointwise operator; onnx "": none is this operator */
typedef struct om_pw_row { const char *name; uint8_t op, arity, rule; const char *onnx; } om_pw_row;
extern const om_pw_row om_pw_rows[];

typedef struct om_strip_stmt {
    uint8_t op, n_arg, dtype; /* OM_S_<row>; result dtype */
    bool exact;               /* readers get what memory would hold, rounded to dtype */
    uint8_t arg[3];
    double p;
    uint64_t rng;
} om_strip_stmt;

/* Statements of one node. */
typedef struct om_strip_text {
    int n_in, n_stmt, n_out;
    uint8_t out[OM_STRIP_OUT];
    om_strip_stmt stmt[OM_STRIP_VALUES];
} om_strip_text;

om_status om_strip_parse(om_ctx *cx, const char *text, int n_in, om_strip_text *out);
/* Writes at most `size` bytes; returns the length needed (as snprintf). */
size_t om_strip_print(const om_strip_text *t, char *buf, size_t size);
/* dtype of every value given those of the operands; checks the rules. vtype has room for OM_STRIP_VALUES. */
om_status om_strip_types(om_ctx *cx, const om_strip_text *t, const uint8_t *in_dtype, uint8_t *vtype);
/* Of a pointwise node: its one statement, of that result dtype, or its program. */
om_status om_strip_of_node(om_ctx *cx, const om_node *n, const om_attr *attr, int dtype, om_strip_text *t);

#endif
