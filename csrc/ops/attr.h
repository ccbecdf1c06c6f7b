/* attr.h - reading attributes that may be written as one integer or as a size, and lists of plain integers.
 *
 * Slice bounds and shapes are size expressions, so they travel as OM_ATTR_DIMS (of length 1 for a single one); a caller
 * that knows the number may write OM_ATTR_INT. Type rules (infer) see expressions, kernels see numbers.
 */
#ifndef OM_OPS_ATTR_H
#define OM_OPS_ATTR_H

#include "graph/engine.h"

/* In a type rule: the size expression. */
static inline om_dim attr_dim(const om_node *n, const char *name, om_dim dflt) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    if (!a) return dflt;
    return a->kind == OM_ATTR_DIMS && a->n == 1 ? a->dims[0] : a->kind == OM_ATTR_INT && a->i >= 0 ? a->i : dflt;
}

/* In a kernel: its value. */
static inline int64_t attr_value(const om_args *ar, const char *name, int64_t dflt) {
    const om_attr *a = om_attr_get(ar->attr, ar->n_attr, name);
    if (!a) return dflt;
    return a->kind == OM_ATTR_DIMS && a->n == 1 ? a->dims[0] : a->kind == OM_ATTR_INT ? a->i : dflt;
}

/* A list in a kernel: NULL when absent. */
static inline const int64_t *attr_values(const om_args *ar, const char *name, int *count) {
    const om_attr *a = om_attr_get(ar->attr, ar->n_attr, name);
    *count = a && a->kind == OM_ATTR_DIMS ? (int)a->n : 0;
    return *count ? a->dims : NULL;
}

/* Entry `axis` of a list in a kernel; a list of one stands for all. */
static inline int64_t attr_entry(const om_args *ar, const char *name, int axis, int64_t dflt) {
    int count;
    const int64_t *v = attr_values(ar, name, &count);
    return v ? v[count == 1 ? 0 : axis] : dflt;
}

/* A required list of sizes in a type rule. */
static inline om_status attr_shape(om_graph *g, const om_node *n, const char *name, const om_attr **out) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    *out = a;
    OM_CHECK(g->cx, a && a->kind == OM_ATTR_DIMS, "%s: attribute %s (a list of sizes) is missing", n->op->name, name);
    OM_CHECK(g->cx, a->n <= OM_RANK, "%s: %s has %u entries; a tensor has at most %d dimensions", n->op->name, name,
             a->n, OM_RANK);
    return OM_OK;
}

/* A list of `count` plain integers in a type rule; absent: all `dflt`. A list of one stands for all. */
static inline om_status attr_ints(om_graph *g, const om_node *n, const char *name, int count, int64_t dflt,
                                  int64_t *out) {
    const om_attr *a = om_attr_get(n->attr, n->n_attr, name);
    for (int i = 0; i < count; i++) out[i] = dflt;
    if (!a) return OM_OK;
    OM_CHECK(g->cx, a->kind == OM_ATTR_DIMS && (a->n == (uint32_t)count || a->n == 1),
             "%s: %s must be a list of %d integers, %u given", n->op->name, name, count,
             a->kind == OM_ATTR_DIMS ? a->n : 0);
    for (int i = 0; i < count; i++)
        OM_CHECK(g->cx, om_dim_const(g, a->dims[a->n == 1 ? 0 : i], &out[i]),
                 "%s: %s must hold plain integers, not sizes known at run time",
                 n->op->name, name);
    return OM_OK;
}

/* The axis attribute, checked against a rank. */
static inline om_status attr_axis(om_graph *g, const om_node *n, int rank, int *axis) {
    int64_t a = om_node_int(n, "axis", -1);
    *axis = 0;
    OM_CHECK(g->cx, a >= 0 && a < rank, "%s: axis %lld of a tensor of rank %d; 0 to %d are allowed", n->op->name,
             (long long)a, rank, rank - 1);
    *axis = (int)a;
    return OM_OK;
}

/* Of start:end:step, where start <= end and step >= 1. */
static inline om_dim attr_slice_size(om_graph *g, om_dim start, om_dim end, int64_t step) {
    om_dim span = om_dim_sub(g, end, start);
    return step == 1 ? span : om_dim_div(g, om_dim_add(g, span, step - 1), step);
}

/* The type rule of what is as its first operand. */
static inline om_status attr_same_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    return OM_OK;
}

/* Attribute `axes` as bits, all of them when absent. In a type rule and in a kernel. */
static inline uint32_t attr_axes_mask(const om_attr *attr, int n_attr, int rank) {
    const om_attr *a = om_attr_get(attr, n_attr, "axes");
    uint32_t mask = 0;
    if (!a || a->kind != OM_ATTR_DIMS) return (1u << rank) - 1;
    for (uint32_t i = 0; i < a->n; i++)
        if (a->dims[i] >= 0 && a->dims[i] < rank) mask |= 1u << a->dims[i];
    return mask;
}

/* Both known and different: certainly an error. Sizes that only the run knows are checked by kernels. */
static inline bool attr_differs(const om_graph *g, om_dim a, om_dim b) {
    int64_t x, y;
    return a != b && om_dim_const(g, a, &x) && om_dim_const(g, b, &y) && x != y;
}

#endif
