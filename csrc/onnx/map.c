/* map.c - what the rules of the files of onnx/ share (onnx/map.h), host operators, and the list of all tables. */
#include "onnx/map.h"

#include <stdio.h>

/* --- helpers ----------------------------------------------------------------------------------------- */

/* Type of operand i, brought into the graph. */
om_type om_map_type(om_onnx *o, int i) {
    om_id v = om_onnx_in(o, i);
    return v == OM_NONE ? (om_type){0} : *om_ty(o->g, v);
}
om_type om_map_type_of(om_onnx *o, om_id v) { return v == OM_NONE ? (om_type){0} : *om_ty(o->g, v); }

om_status om_map_axis(om_onnx *o, int64_t a, int rank, int *axis) {
    if (a < 0) a += rank;
    ONNX_CHECK(o, a >= 0 && a < rank, "axis %lld of a tensor of rank %d", (long long)(a < 0 ? a - rank : a), rank);
    *axis = (int)a;
    return OM_OK;
}

/* Operand i (newer opsets) or the attribute `name` (older ones), as size expressions. *list NULL: neither is given. */
om_status om_map_list_or_attr(om_onnx *o, int i, const char *name, const om_dim **list, uint32_t *n) {
    *list = NULL;
    *n = 0;
    if (om_onnx_has(o, i)) {
        *list = om_onnx_list(o, i, n);
        return o->cx->status;
    }
    const int64_t *a = om_onnx_ints(o, name, n);
    if (!a) return OM_OK;
    ONNX_CHECK(o, *n <= 1024, "attribute %s has %u entries", name, *n);
    om_dim *d = om_arena_alloc(&o->tmp, (*n + 1) * sizeof *d);
    if (!d) return o->cx->status;
    for (uint32_t k = 0; k < *n; k++) d[k] = om_dim_int(o->g, a[k]);
    *list = d;
    return o->cx->status;
}

om_status om_map_known(om_onnx *o, const om_dim *list, uint32_t n, const char *what, int64_t *out) {
    for (uint32_t i = 0; i < n; i++)
        if (!om_dim_const(o->g, list[i], &out[i]))
            REFUSE("%s must be constant integers, they depend on the sizes of inputs", what);
    return OM_OK;
}

/* A set of axes as a mask. `all` when none is given. */
om_status om_map_axes(om_onnx *o, int i, int rank, bool all, uint32_t *mask) {
    const om_dim *list;
    uint32_t n;
    int64_t a[OM_RANK];
    OM_TRY(om_map_list_or_attr(o, i, "axes", &list, &n));
    *mask = 0;
    if (n == 0) {
        if (all) *mask = (1u << rank) - 1;
        return OM_OK;
    }
    ONNX_CHECK(o, n <= OM_RANK, "%u axes", n);
    OM_TRY(om_map_known(o, list, n, "axes", a));
    for (uint32_t k = 0; k < n; k++) {
        int axis = 0;
        OM_TRY(om_map_axis(o, a[k], rank, &axis));
        ONNX_CHECK(o, !(*mask >> axis & 1), "axis %d is given twice", axis);
        *mask |= 1u << axis;
    }
    return OM_OK;
}

/* Attribute list of plain integers with a default; false + error when its length is wrong. */
om_status om_map_ints(om_onnx *o, const char *name, int count, int64_t dflt, int64_t *out) {
    uint32_t n;
    const int64_t *a = om_onnx_ints(o, name, &n);
    ONNX_CHECK(o, !a || n == 0 || n == (uint32_t)count, "attribute %s has %u entries, %d are needed", name, n, count);
    for (int i = 0; i < count; i++) out[i] = a && n ? a[i] : dflt;
    return OM_OK;
}

/* A one-element operand that must be a constant. Left out: *x stays. */
om_status om_map_scalar(om_onnx *o, int i, const char *what, double *x) {
    if (!om_onnx_has(o, i) || om_onnx_scalar(o, i, x)) return o->cx->status;
    REFUSE("%s must be a constant", what);
}

om_attr om_map_dims_attr(const char *name, const int64_t *v, int n, om_graph *g, om_dim *buf) {
    for (int i = 0; i < n; i++) buf[i] = om_dim_int(g, v[i]);
    return OM_AD(name, buf, n);
}

om_id om_map_like(om_onnx *o, om_id x, double value) {
    return x == OM_NONE ? OM_NONE : om_scalar(o->g, om_ty(o->g, x)->dtype, value);
}
om_id om_map_where(om_onnx *o, om_id c, om_id x, om_id y) {
    return om_make(o->g, &om_op_where, OM_IN(c, x, y), NULL, 0);
}
om_id om_map_reduce_op(om_onnx *o, const om_op *op, om_id x, uint32_t mask, bool keep) {
    om_dim axes[OM_RANK];
    int n = 0;
    if (x == OM_NONE) return OM_NONE;
    for (int i = 0; i < om_ty(o->g, x)->rank; i++)
        if (mask >> i & 1) axes[n++] = i;
    if (n == 0) return x;
    return om_make(o->g, op, OM_IN(x), OM_ATTRS(OM_AD("axes", axes, n), OM_AI("keepdims", keep)));
}
/* Reshapes a (c) vector to (c, 1, 1, ...) so that it broadcasts along axis 1 of a tensor of `rank`. */
om_id om_map_per_channel(om_onnx *o, om_id w, int rank) {
    if (w == OM_NONE) return OM_NONE;
    om_dim d[OM_RANK];
    d[0] = om_ty(o->g, w)->dim[0];
    for (int i = 1; i < rank - 1; i++) d[i] = 1;
    return om_b_reshape(o->g, w, d, rank > 1 ? rank - 1 : 1);
}
void om_map_random(om_onnx *o) { om_last(o->g)->rng = ++o->g->n_rng; }

/* --- indices: the engine's are never negative --------------------------------------------------------- */

bool om_map_index_nonneg(const om_graph *g, om_id v, int depth) {
    if (depth > 8) return false;
    const om_value *x = om_val(g, v);
    if (x->role == OM_CONST) {
        if (x->type.dtype != OM_I64 && x->type.dtype != OM_I32) return false;
        int64_t n = 1;
        for (int i = 0; i < x->type.rank; i++) n *= x->type.dim[i];
        for (int64_t i = 0; i < n; i++)
            if ((x->type.dtype == OM_I64 ? ((const int64_t *)x->data)[i] : ((const int32_t *)x->data)[i]) < 0)
                return false;
        return true;
    }
    if (x->node == OM_NONE) return false;
    const om_node *n = &g->nodes.v[x->node];
    const om_id *in = om_ins(g, n);
    if (om_is(n, argmax) || om_is(n, argmin)) return true;
    if (om_is(n, max_pool)) return x->out == 1;
    if (om_is(n, iota)) {
        const om_attr *start = om_attr_get(n->attr, n->n_attr, "start"),
                      *step = om_attr_get(n->attr, n->n_attr, "step");
        return (!start || (start->kind == OM_ATTR_INT && start->i >= 0) ||
                (start->kind == OM_ATTR_DIMS && om_onnx_nonneg(g, start->dims[0]))) &&
               (!step || (step->kind == OM_ATTR_INT && step->i >= 0));
    }
    if (om_is(n, reshape) || om_is(n, permute) || om_is(n, expand) || om_is(n, slice) || om_is(n, flip) ||
        om_is(n, stop_grad) || om_is(n, abs))
        return om_is(n, abs) || om_map_index_nonneg(g, in[0], depth + 1);
    if (om_is(n, cast))
        return om_is_int(om_ty(g, in[0])->dtype) &&
               (om_ty(g, in[0])->dtype >= OM_U8 || om_map_index_nonneg(g, in[0], depth + 1));
    if (om_is(n, add) || om_is(n, mul) || om_is(n, minimum) || om_is(n, floor_div))
        return om_map_index_nonneg(g, in[0], depth + 1) && om_map_index_nonneg(g, in[1], depth + 1);
    if (om_is(n, maximum)) return om_map_index_nonneg(g, in[0], depth + 1) || om_map_index_nonneg(g, in[1], depth + 1);
    if (om_is(n, mod)) return om_map_index_nonneg(g, in[1], depth + 1);
    if (om_is(n, where)) return om_map_index_nonneg(g, in[1], depth + 1) && om_map_index_nonneg(g, in[2], depth + 1);
    return false;
}

/* idx with `size` added where negative. Constants are fixed and checked here; what is certainly not negative stays; the
 * rest is computed: where(idx < 0, idx + size, idx). With the note index_nonneg a negative one is an error: of the file
 * when it is constant, of the kernel when not. */
om_id om_map_index(om_onnx *o, om_id idx, om_dim size) {
    om_graph *g = o->g;
    const bool as_is = om_onnx_index_nonneg(o);
    if (FAILED || idx == OM_NONE) return OM_NONE;
    om_type t = *om_ty(g, idx);
    if (t.dtype != OM_I64 && t.dtype != OM_I32)
        return om_onnx_err(o, OM_INVALID, "indices are %s, int64 or int32 is needed", om_dtype_name(t.dtype)), OM_NONE;
    int64_t known, n = 1;
    if (om_val(g, idx)->role == OM_CONST && om_dim_const(g, size, &known)) {
        const void *data = om_val(g, idx)->data;
        bool negative = false;
        for (int i = 0; i < t.rank; i++) n *= t.dim[i];
        for (int64_t i = 0; i < n; i++) {
            int64_t x = t.dtype == OM_I64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
            if (x < (as_is ? 0 : -known) || x >= known)
                return om_onnx_err(o, OM_INVALID, "index %lld, but the axis has size %lld", (long long)x,
                                   (long long)known),
                       OM_NONE;
            negative |= x < 0;
        }
        if (!negative) return idx;
        size_t bytes = (size_t)n * om_dtype_size(t.dtype);
        void *fixed = om_alloc(o->cx, bytes);
        if (!fixed) return OM_NONE;
        for (int64_t i = 0; i < n; i++) {
            int64_t x = t.dtype == OM_I64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
            if (x < 0) x += known;
            if (t.dtype == OM_I64) ((int64_t *)fixed)[i] = x;
            else ((int32_t *)fixed)[i] = (int32_t)x;
        }
        int64_t dim[OM_RANK];
        for (int i = 0; i < t.rank; i++) dim[i] = t.dim[i];
        om_id c = om_const(g, t.dtype, t.rank, dim, fixed);
        om_free(o->cx, fixed);
        return c;
    }
    if (as_is || om_map_index_nonneg(g, idx, 0)) return idx;
    om_id zero = om_scalar(g, t.dtype, 0), add = om_dim_const(g, size, &known) ? om_scalar(g, t.dtype, (double)known)
        : om_onnx_dim_value(o, size, t.dtype);
    return om_map_where(o, MAKE2(lt, idx, zero), MAKE2(add, idx, add), idx);
}

/* --- the host ---------------------------------------------------------------------------------------- */

/* ATen, PythonOp, PyModule: PyTorch computes it. Output types come from the file. The last two run what a user wrote,
 * so they run whether or not their results are read. */
static om_status map_host(om_onnx *o) {
    om_graph *g = o->g;
    int n_out = (int)o->node->n_output, n_attr = 4;
    om_id *in = om_arena_alloc(&o->tmp, ((size_t)o->n_in + 1) * sizeof *in);
    om_type *t = om_arena_alloc(&o->tmp, (size_t)n_out * sizeof *t);
    om_attr *attr = om_arena_alloc(&o->tmp, ((size_t)n_out + 4) * sizeof *attr);
    om_dim *dtype = om_arena_alloc(&o->tmp, (size_t)n_out * sizeof *dtype);
    bool float_in = false, float_out = false;
    if (!in || !t || !attr || !dtype) return o->cx->status;
    int64_t index = INT("host_index", -1);
    ONNX_CHECK(o, index >= 0, "attribute host_index (row of the host's table) is missing");
    for (int i = 0; i < o->n_in; i++) {
        in[i] = IN(i);
        float_in |= in[i] != OM_NONE && om_is_float(om_ty(g, in[i])->dtype);
    }
    for (int k = 0; k < n_out; k++) {
        bool found = false;
        t[k] = (om_type){.dtype = OM_U8, .rank = 1}; /* an output nobody names */
        if (om_onnx_wants(o, k)) {
            OM_TRY(om_onnx_value_type(o, o->node->output[k], OM_ONNX_NAMED, &t[k], &found));
            ONNX_CHECK(o, found,
                       "output %d '%.80s' has no value_info; the type of what the host computes must be given", k,
                       o->node->output[k]);
        }
        float_out |= om_is_float(t[k].dtype);
        dtype[k] = t[k].dtype;
        enum { NAME = 24 };
        char *name = om_arena_alloc(&o->tmp, NAME);
        if (!name) return o->cx->status;
        snprintf(name, NAME, "shape%d", k);
        attr[n_attr++] = OM_AD(name, t[k].dim, t[k].rank);
    }
    attr[0] = OM_AI("index", index);
    attr[1] = OM_AD("out_dtype", dtype, n_out);
    attr[2] = OM_AI("diff", INT("diff", float_in && float_out));
    /* what a user wrote, and what draws from the host's generator: later numbers depend on it */
    attr[3] = OM_AI("effect", INT("effect", strcmp(o->node->op_type, "ATen") != 0));
    om_id y = om_make(g, &om_op_host, in, o->n_in, attr, n_attr);
    for (int k = 0; k < n_out; k++)
        if (om_onnx_wants(o, k)) SET(k, y == OM_NONE ? y : y + (om_id)k);
    return o->cx->status;
}

/* --- the rows ------------------------------------------------------------------------------------------ */

const om_onnx_op om_onnx_ops_host[] = {
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
    {"com.microsoft", "PythonOp", 0, -1, OM_MAX_OUT, map_host, NULL, NULL},
    {"org.pytorch.aten", "ATen", 0, -1, OM_MAX_OUT, map_host, NULL, NULL},
    {"ortmodule", "PyModule", 0, -1, OM_MAX_OUT, map_host, NULL, NULL},
    {0},
};

const om_onnx_op *const om_onnx_tables[] = {
#define X(name) om_onnx_ops_##name,
    OM_ONNX_TABLES(X)
#undef X
    NULL,
};
