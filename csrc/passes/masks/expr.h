/* expr.h - scalar expressions over index variables, in normal form (expr.c).
 *
 * An algebra of its own: it knows sizes of a graph (om_dim) and nothing else of it; what MX_LOAD names is a number to
 * it. eval.h reads a graph into such expressions, masks.c makes tensors and attributes of them: each knows those before
 * it, none those after.
 *
 * Every function takes MX_NONE as an operand and then returns MX_NONE: "gave up" (no memory, or a formula too large).
 * Memory failures are in cx->status; giving up for size is not an error: the mask then stays as it is.
 */
#ifndef OM_PASSES_MASKS_EXPR_H
#define OM_PASSES_MASKS_EXPR_H

#include "graph/engine.h"

typedef uint32_t mx_id; /* index of an expression */
#define MX_NONE UINT32_MAX

enum {
    MX_AXES = OM_RANK,       /* variables 0..7: the axes of the scores */
    MX_VARS = 32,            /* the rest: indices bound by a reduction or cumsum */
    MX_LIN_MAX = 12,         /* terms of an integer sum */
    MX_ARGS_MAX = 32,        /* operands of AND, OR, FADD */
    MX_NODES_MAX = 100000,   /* expressions per graph before the pass gives up */
};

typedef enum mx_kind {
    /* class bool */
    MX_TRUE, MX_FALSE,
    MX_GE0,   /* (int) >= 0 */
    MX_EQ0, MX_NE0,
    MX_NOT,   /* of a bool leaf only: negation is pushed down to the comparisons */
    MX_AND, MX_OR, /* flat, sorted, no duplicates */
    /* class int */
    /* w: constant, then (atom, coefficient) by atom; the constant and coefficients are sizes. Never just one atom. */
    MX_LIN,
    MX_VAR,   /* w: variable, its size; 0 <= variable < size */
    MX_B2I,   /* (bool) as 0 or 1 */
    MX_DIV, MX_MOD, /* w: (int), size > 0; floor, and the remainder >= 0 */
    MX_MUL,   /* (int, int) */
    MX_ABS,   /* (int) */
    MX_SEL,   /* (bool, int, int) */
    /* class float */
    MX_FLT,   /* f */
    MX_FSEL,  /* (bool, float, float) */
    MX_FADD,  /* (float, ...) sorted, duplicates kept */
    /* any class */
    MX_LOAD,  /* w: value id of the input graph, then one int per axis */
} mx_kind;

typedef enum mx_class { MX_BOOL, MX_INT, MX_FLOAT } mx_class;

typedef struct mx_node {
    uint8_t kind, cls;
    uint16_t n;          /* words */
    uint32_t deps;       /* bit i: depends on variable i */
    uint32_t hash, next; /* chain of the hash table */
    const int64_t *w;
    double f;
} mx_node;

typedef struct mx {
    om_ctx *cx;
    om_graph *g;            /* sizes are of this graph */
    om_arena arena;
    OM_VEC(mx_node) nodes;
    uint32_t head[4096];
    mx_id t, fa;            /* TRUE, FALSE */
} mx;

om_status mx_init(mx *m, om_ctx *cx, om_graph *g);
void mx_free(mx *m);

/* Valid until the next expression is made: copy the node, its words stay where they are. */
static inline const mx_node *mx_at(const mx *m, mx_id e) { return &m->nodes.v[e]; }
mx_id mx_var(mx *m, int var, om_dim size);
mx_id mx_load(mx *m, om_id v, const mx_id *idx, int rank, int cls);

mx_id mx_int(mx *m, om_dim c);
mx_id mx_i64(mx *m, int64_t c);
mx_id mx_add(mx *m, mx_id a, mx_id b);
mx_id mx_sub(mx *m, mx_id a, mx_id b);
mx_id mx_scale(mx *m, mx_id a, om_dim c);
mx_id mx_mul(mx *m, mx_id a, mx_id b);
mx_id mx_div(mx *m, mx_id a, om_dim d);
mx_id mx_mod(mx *m, mx_id a, om_dim d);
mx_id mx_abs(mx *m, mx_id a);
mx_id mx_b2i(mx *m, mx_id p);
mx_id mx_sel(mx *m, mx_id c, mx_id a, mx_id b);
bool mx_int_const(const mx *m, mx_id e, om_dim *c); /* e is a size or integer independent of every variable and leaf */

/* An integer sum taken apart: c + sum coef[i] * atom[i]. */
typedef struct mx_lin {
    om_dim c, coef[MX_LIN_MAX];
    mx_id atom[MX_LIN_MAX];
    int n;
} mx_lin;
void mx_lin_get(const mx *m, mx_id e, mx_lin *out);
int mx_sign(mx *m, mx_id e); /* 1: >= 0 always, -1: < 0 always, 0: unknown */

mx_id mx_ge0(mx *m, mx_id e);
mx_id mx_eq0(mx *m, mx_id e);
mx_id mx_not(mx *m, mx_id p);
mx_id mx_and(mx *m, mx_id p, mx_id q);
mx_id mx_or(mx *m, mx_id p, mx_id q);
mx_id mx_bsel(mx *m, mx_id c, mx_id p, mx_id q); /* c ? p : q */

mx_id mx_flt(mx *m, double x);
mx_id mx_fsel(mx *m, mx_id c, mx_id x, mx_id y);
mx_id mx_fadd(mx *m, mx_id x, mx_id y, int dtype);

/* e with variable `var` replaced by the int expression `by`. */
mx_id mx_subst(mx *m, mx_id e, int var, mx_id by);
/* For the debug log; `names`: the graph whose values MX_LOAD reads. */
void mx_print(const mx *m, const om_graph *names, mx_id e, char *buf, size_t size);

#endif
