/* eval.h - a graph read as expressions (expr.h): what a value is at given indices (eval.c).
 *
 * A tensor is a function from index expressions to a scalar expression: reshape, permute, expand, slice, gather by
 * known indices and concat only substitute indices, iota is its index, comparisons of index polynomials fold by the
 * ranges of the indices. What is not understood is a leaf: "element idx of value v". So the arange / diff / cumsum /
 * index / where constructions that exporters write for a causal or padding mask collapse to k <= q + c, k >= q - w and
 * m[b, k] != 0.
 */
#ifndef OM_PASSES_MASKS_EVAL_H
#define OM_PASSES_MASKS_EVAL_H

#include "passes/masks/expr.h"

enum { MX_DEPTH_MAX = 400 /* of nodes below one mask */ };

typedef struct mx_memo { /* value v at indices idx is the expression e */
    om_id v;
    mx_id e;
    uint32_t hash, next;
    const mx_id *idx;
} mx_memo;

typedef struct mx_const { /* a constant tensor by value */
    om_id v;
    int kind;                  /* eval.c */
    double a, b;               /* band: outside, inside */
    int64_t lo, hi;            /* band: lo <= j - i <= hi inside */
    int64_t base, coef[OM_RANK]; /* affine */
} mx_const;

/* Two sizes that must be equal for the graph to run, though nothing proves it. checked: something emitted fails if they
 * differ. */
typedef struct mx_alias { om_dim size, as; bool checked; } mx_alias;

typedef struct mx_reader {
    mx m;
    const om_graph *from;   /* values are of this graph; expressions are emitted into m.g */
    OM_VEC(mx_memo) memos;
    OM_VEC(mx_id) origin;   /* see mx_origin */
    OM_VEC(mx_const) consts;
    OM_VEC(mx_alias) aliases;
    uint32_t memo_head[4096];
    int depth, bound;
} mx_reader;

om_status mx_reader_init(mx_reader *rd, om_ctx *cx, const om_graph *from, om_graph *g);
void mx_reader_free(mx_reader *rd);
om_dim mx_size(mx_reader *rd, om_dim d); /* a size of the input graph in the working graph, aliases applied */
/* Broadcasting `have` to `want` (results of mx_size): 1 = as it is, 0 = from size 1, -1 = neither can be. When only a
 * run can tell, it is taken as equal and noted: the emitted mask must check it. */
int mx_broadcast(mx_reader *rd, om_dim have, om_dim want);

/* Element idx (one int expression per axis) of value v. Never refuses for want of a rule: unknown operators give a
 * leaf. */
mx_id mx_eval(mx_reader *rd, om_id v, const mx_id *idx);
/* The indices at which a gather, gather_nd or gather_elements reads its first operand; false for other operators. */
bool mx_gather_source(mx_reader *rd, const om_node *n, const mx_id *idx, mx_id *in);
/* The memo of a value that is exactly this expression and no larger than it; MX_NONE: none is known. */
static inline mx_id mx_origin(const mx_reader *rd, mx_id e) { return e < rd->origin.n ? rd->origin.v[e] : MX_NONE; }

#endif
