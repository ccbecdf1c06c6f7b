/* masks.h - attention masks as formulas: one scalar expression over the indices (.., b, h, q, k) of a score.
 *
 * A tensor is a function from index expressions to a scalar expression: reshape, permute, expand, slice, gather by
 * known indices and concat only substitute indices, iota is its index, comparisons of index polynomials fold by the
 * ranges of the indices. What is not understood is a leaf: "element idx of value v". So the arange / diff / cumsum /
 * index / where constructions that exporters write for a causal or padding mask collapse to k <= q + c, k >= q - w and
 * m[b, k] != 0.
 *
 *   expr.c  expressions: hash-consed, so equal formulas are equal numbers; normal forms; ranges; substitution
 *   eval.c  value of the graph + indices -> expression
 *   masks.c       formula -> attributes of the attention node and the smallest tensor for the rest
 *
 * Every function takes MX_NONE as an operand and then returns MX_NONE: "gave up" (no memory, or a formula too large).
 * Memory failures are in cx->status; giving up for size is not an error: the mask then stays as it is.
 */
#ifndef OM_PASSES_MASKS_H
#define OM_PASSES_MASKS_H

#include "graph/engine.h"

typedef uint32_t mx_id; /* index of an expression */
#define MX_NONE UINT32_MAX

enum {
    MX_AXES = OM_RANK,       /* variables 0..7: the axes of the scores */
    MX_VARS = 32,            /* the rest: indices bound by a reduction or cumsum */
    MX_LIN_MAX = 12,         /* terms of an integer sum */ MX_ARGS_MAX = 32,        /* operands of AND, OR, FADD */
    MX_NODES_MAX = 100000,   /* expressions per graph before the pass gives up */
    MX_DEPTH_MAX = 400,      /* of nodes below one mask */
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

typedef struct mx {
    om_ctx *cx;
    const om_graph *from;   /* values are of this graph */
    om_graph *g;            /* sizes are of this graph; expressions are emitted into it */
    om_arena arena;
    OM_VEC(mx_node) nodes;
    OM_VEC(mx_memo) memos;
    /* per expression: memo whose value is exactly this expression and no larger than it, or MX_NONE */
    OM_VEC(mx_id) origin;
    OM_VEC(mx_const) consts;
    OM_VEC(mx_alias) aliases;
    uint32_t head[4096], memo_head[4096];
    int depth, bound;
    mx_id t, fa;            /* TRUE, FALSE */
} mx;

om_status mx_init(mx *m, om_ctx *cx, const om_graph *from, om_graph *g);
void mx_free(mx *m);
om_dim mx_size(mx *m, om_dim d); /* a size of the input graph in the working graph, aliases applied */
/* Broadcasting `have` to `want` (results of mx_size): 1 = as it is, 0 = from size 1, -1 = neither can be. When only a
 * run can tell, it is taken as equal and noted: the emitted mask must check it. */
int mx_broadcast(mx *m, om_dim have, om_dim want);

/* --- expr.c --- */
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
double mx_round(int dtype, double x); /* as a value of that float dtype */

/* e with variable `var` replaced by the int expression `by`. */
mx_id mx_subst(mx *m, mx_id e, int var, mx_id by);
void mx_print(const mx *m, mx_id e, char *buf, size_t size); /* for the debug log */

/* --- eval.c --- */
/* Element idx (one int expression per axis) of value v. Never refuses for want of a rule: unknown operators give a
 * leaf. */
mx_id mx_eval(mx *m, om_id v, const mx_id *idx);
/* The indices at which a gather, gather_nd or gather_elements reads its first operand; false for other operators. */
bool mx_gather_source(mx *m, const om_node *n, const mx_id *idx, mx_id *in);

/* --- masks.c --- */
/* Additive masks hide by a large negative number. At or below this a visible key's weight makes a hidden one's exactly
 * 0. */
#define MX_HIDE (-6e4)
/* Does every row of scores of these sizes provably have a key for which the bool value `cond` (of r->from, broadcast to
 * them) is `visible_when`? False also when nothing is known. */
bool om_mask_rows_see(om_rewriter *r, om_id cond, bool visible_when, const om_dim *size, int rank);
/* Are all numbers of a float value ones that a trained network produces, not ones that a user may have filled with -inf
 * or finfo.min? */
bool om_mask_moderate(const om_graph *g, om_id v);

#endif
