/* onnx_map.c - the table of ONNX operators and what each becomes in the engine. ops.def has the engine's side.
 *
 * A rule (map_*) reads operands and attributes through onnx.h, builds nodes with the ordinary builder and sets the outputs.
 * It relies on three things: builder errors are sticky, so rules check only what the builder cannot see; operands that must be known
 * before the run (axes, shapes, pads, k) arrive as lists of size expressions; and list operands of newer opsets were
 * attributes of the same name in older ones, so one function (map_list_or_attr) reads both and opsets 13 to 23 share the rules.
 *
 * Compositions are chosen so that the gradient is torch's as well as the value: Clip is two `where` (all of the gradient passes
 * at the bounds), ReduceL2 has gradient 0 at 0, LogSumExp takes out its maximum under stop_grad.
 */
#include "onnx.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define IN(i) om_onnx_in(o, (i))
#define SET(k, v) om_onnx_set(o, (k), (v))
#define INT(name, dflt) om_onnx_int(o, (name), (dflt))
#define FLT(name, dflt) om_onnx_float(o, (name), (dflt))
#define REFUSE(...) return om_onnx_err(o, OM_UNSUPPORTED, __VA_ARGS__)
#define FAILED (o->cx->status != OM_OK)
#define MAKE1(op, x) om_make(o->g, &om_op_##op, OM_IN(x), NULL, 0)
#define MAKE2(op, x, y) om_make(o->g, &om_op_##op, OM_IN(x, y), NULL, 0)

/* --- helpers ----------------------------------------------------------------------------------------- */

/* Type of operand i, brought into the graph. */
static om_type map_type(om_onnx *o, int i) {
    om_id v = om_onnx_in(o, i);
    return v == OM_NONE ? (om_type){0} : *om_ty(o->g, v);
}
static om_type map_type_of(om_onnx *o, om_id v) { return v == OM_NONE ? (om_type){0} : *om_ty(o->g, v); }

static om_status map_axis(om_onnx *o, int64_t a, int rank, int *axis) {
    if (a < 0) a += rank;
    ONNX_CHECK(o, a >= 0 && a < rank, "axis %lld of a tensor of rank %d", (long long)(a < 0 ? a - rank : a), rank);
    *axis = (int)a;
    return OM_OK;
}

/* Operand i (newer opsets) or the attribute `name` (older ones), as size expressions. *list NULL: neither is given. */
static om_status map_list_or_attr(om_onnx *o, int i, const char *name, const om_dim **list, uint32_t *n) {
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

static om_status map_known(om_onnx *o, const om_dim *list, uint32_t n, const char *what, int64_t *out) {
    for (uint32_t i = 0; i < n; i++)
        if (!om_dim_const(o->g, list[i], &out[i])) REFUSE("%s must be constant integers, they depend on the sizes of inputs", what);
    return OM_OK;
}

/* A set of axes as a mask. `all` when none is given. */
static om_status map_axes(om_onnx *o, int i, int rank, bool all, uint32_t *mask) {
    const om_dim *list;
    uint32_t n;
    int64_t a[OM_RANK];
    OM_TRY(map_list_or_attr(o, i, "axes", &list, &n));
    *mask = 0;
    if (n == 0) {
        if (all) *mask = (1u << rank) - 1;
        return OM_OK;
    }
    ONNX_CHECK(o, n <= OM_RANK, "%u axes", n);
    OM_TRY(map_known(o, list, n, "axes", a));
    for (uint32_t k = 0; k < n; k++) {
        int axis = 0;
        OM_TRY(map_axis(o, a[k], rank, &axis));
        ONNX_CHECK(o, !(*mask >> axis & 1), "axis %d is given twice", axis);
        *mask |= 1u << axis;
    }
    return OM_OK;
}

/* Attribute list of plain integers with a default; false + error when its length is wrong. */
static om_status map_ints(om_onnx *o, const char *name, int count, int64_t dflt, int64_t *out) {
    uint32_t n;
    const int64_t *a = om_onnx_ints(o, name, &n);
    ONNX_CHECK(o, !a || n == 0 || n == (uint32_t)count, "attribute %s has %u entries, %d are needed", name, n, count);
    for (int i = 0; i < count; i++) out[i] = a && n ? a[i] : dflt;
    return OM_OK;
}

/* A one-element operand that must be a constant. Left out: *x stays. */
static om_status map_scalar(om_onnx *o, int i, const char *what, double *x) {
    if (!om_onnx_has(o, i) || om_onnx_scalar(o, i, x)) return o->cx->status;
    REFUSE("%s must be a constant", what);
}

static om_attr map_dims_attr(const char *name, const int64_t *v, int n, om_graph *g, om_dim *buf) {
    for (int i = 0; i < n; i++) buf[i] = om_dim_int(g, v[i]);
    return OM_AD(name, buf, n);
}

static om_id map_like(om_onnx *o, om_id x, double value) { return x == OM_NONE ? OM_NONE : om_scalar(o->g, om_ty(o->g, x)->dtype, value); }
static om_id map_where(om_onnx *o, om_id c, om_id x, om_id y) { return om_make(o->g, &om_op_where, OM_IN(c, x, y), NULL, 0); }
static om_id map_reduce_op(om_onnx *o, const om_op *op, om_id x, uint32_t mask, bool keep) {
    om_dim axes[OM_RANK];
    int n = 0;
    if (x == OM_NONE) return OM_NONE;
    for (int i = 0; i < om_ty(o->g, x)->rank; i++)
        if (mask >> i & 1) axes[n++] = i;
    if (n == 0) return x;
    return om_make(o->g, op, OM_IN(x), OM_ATTRS(OM_AD("axes", axes, n), OM_AI("keepdims", keep)));
}
/* Reshapes a (c) vector to (c, 1, 1, ...) so that it broadcasts along axis 1 of a tensor of `rank`. */
static om_id map_per_channel(om_onnx *o, om_id w, int rank) {
    if (w == OM_NONE) return OM_NONE;
    om_dim d[OM_RANK];
    d[0] = om_ty(o->g, w)->dim[0];
    for (int i = 1; i < rank - 1; i++) d[i] = 1;
    return om_b_reshape(o->g, w, d, rank > 1 ? rank - 1 : 1);
}
static void map_random(om_onnx *o) { om_last(o->g)->rng = ++o->g->n_rng; }

/* --- indices: the engine's are never negative --------------------------------------------------------- */

static bool index_nonneg(const om_graph *g, om_id v, int depth) {
    if (depth > 8) return false;
    const om_value *x = om_val(g, v);
    if (x->role == OM_CONST) {
        if (x->type.dtype != OM_I64 && x->type.dtype != OM_I32) return false;
        int64_t n = 1;
        for (int i = 0; i < x->type.rank; i++) n *= x->type.dim[i];
        for (int64_t i = 0; i < n; i++)
            if ((x->type.dtype == OM_I64 ? ((const int64_t *)x->data)[i] : ((const int32_t *)x->data)[i]) < 0) return false;
        return true;
    }
    if (x->node == OM_NONE) return false;
    const om_node *n = &g->nodes.v[x->node];
    const om_id *in = om_ins(g, n);
    if (om_is(n, argmax) || om_is(n, argmin)) return true;
    if (om_is(n, max_pool)) return x->out == 1;
    if (om_is(n, iota)) {
        const om_attr *start = om_attr_get(n->attr, n->n_attr, "start"), *step = om_attr_get(n->attr, n->n_attr, "step");
        return (!start || (start->kind == OM_ATTR_INT && start->i >= 0) ||
                (start->kind == OM_ATTR_DIMS && om_onnx_nonneg(g, start->dims[0]))) &&
               (!step || (step->kind == OM_ATTR_INT && step->i >= 0));
    }
    if (om_is(n, reshape) || om_is(n, permute) || om_is(n, expand) || om_is(n, slice) || om_is(n, flip) ||
        om_is(n, stop_grad) || om_is(n, abs))
        return om_is(n, abs) || index_nonneg(g, in[0], depth + 1);
    if (om_is(n, cast)) return om_is_int(om_ty(g, in[0])->dtype) && (om_ty(g, in[0])->dtype >= OM_U8 || index_nonneg(g, in[0], depth + 1));
    if (om_is(n, add) || om_is(n, mul) || om_is(n, minimum) || om_is(n, floor_div))
        return index_nonneg(g, in[0], depth + 1) && index_nonneg(g, in[1], depth + 1);
    if (om_is(n, maximum)) return index_nonneg(g, in[0], depth + 1) || index_nonneg(g, in[1], depth + 1);
    if (om_is(n, mod)) return index_nonneg(g, in[1], depth + 1);
    if (om_is(n, where)) return index_nonneg(g, in[1], depth + 1) && index_nonneg(g, in[2], depth + 1);
    return false;
}

/* idx with `size` added where negative. Constants are fixed and checked here; what is certainly not negative stays; the rest
 * is computed: where(idx < 0, idx + size, idx). */
static om_id map_index(om_onnx *o, om_id idx, om_dim size) {
    om_graph *g = o->g;
    const char *hint = om_onnx_meta(o, "index_nonneg");
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
            if (x < -known || x >= known)
                return om_onnx_err(o, OM_INVALID, "index %lld, but the axis has size %lld", (long long)x, (long long)known), OM_NONE;
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
    if ((hint && !strcmp(hint, "1")) || index_nonneg(g, idx, 0)) return idx;
    om_id zero = om_scalar(g, t.dtype, 0), add = om_dim_const(g, size, &known) ? om_scalar(g, t.dtype, (double)known)
        : om_onnx_dim_value(o, size, t.dtype);
    return map_where(o, MAKE2(lt, idx, zero), MAKE2(add, idx, add), idx);
}

/* --- families ---------------------------------------------------------------------------------------- */

static om_status map_unary(om_onnx *o) {
    SET(0, om_b_un(o->g, o->row->op, IN(0)));
    return o->cx->status;
}
static om_status map_binary(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    SET(0, om_b_bin(o->g, o->row->op, a, b));
    return o->cx->status;
}
static om_status map_variadic(om_onnx *o) { /* Max, Min, Sum */
    om_id y = IN(0);
    for (int i = 1; i < o->n_in; i++) y = om_b_bin(o->g, o->row->op, y, IN(i));
    if (o->n_in == 1) om_onnx_alias(o, 0, 0);
    else SET(0, y);
    return o->cx->status;
}
static om_status map_mean(om_onnx *o) {
    om_id y = IN(0);
    for (int i = 1; i < o->n_in; i++) y = MAKE2(add, y, IN(i));
    SET(0, om_b_scale(o->g, y, 1.0 / o->n_in));
    return o->cx->status;
}

static om_status map_identity(om_onnx *o) {
    om_onnx_alias(o, 0, 0);
    return o->cx->status;
}

static om_status map_mod(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    SET(0, INT("fmod", 0) ? MAKE2(fmod, a, b) : MAKE2(mod, a, b));
    return o->cx->status;
}

/* The result has the base's type; an exponent of another type is brought to one both can hold. */
static om_status map_pow(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    int ta = map_type_of(o, a).dtype, tb = map_type_of(o, b).dtype;
    if (FAILED) return o->cx->status;
    int work = ta == tb || om_is_float(ta) ? ta : om_is_float(tb) ? OM_F64 : ta;
    om_id y = MAKE2(pow, om_b_cast(o->g, a, work), om_b_cast(o->g, b, work));
    SET(0, om_b_cast(o->g, y, ta));
    return o->cx->status;
}

static om_status map_isinf(om_onnx *o) {
    om_id x = IN(0);
    bool pos = INT("detect_positive", 1) != 0, neg = INT("detect_negative", 1) != 0;
    om_id y = MAKE1(isinf, x);
    if (pos != neg) y = MAKE2(and, y, pos ? MAKE2(gt, x, map_like(o, x, 0)) : MAKE2(lt, x, map_like(o, x, 0)));
    else if (!pos) y = MAKE2(and, y, om_scalar(o->g, OM_BOOL, 0));
    SET(0, y);
    return o->cx->status;
}

static om_status map_gelu(om_onnx *o) {
    const char *how = om_onnx_str(o, "approximate", "none");
    ONNX_CHECK(o, !strcmp(how, "none") || !strcmp(how, "tanh"), "approximate '%.40s'; none and tanh are defined", how);
    om_id x = IN(0);
    SET(0, !strcmp(how, "tanh") ? MAKE1(gelu_tanh, x) : MAKE1(gelu, x));
    return o->cx->status;
}
/* com.microsoft BiasGelu(x, bias), FastGelu(x, bias?): row->op says which gelu */
static om_status map_bias_gelu(om_onnx *o) {
    om_id x = IN(0);
    if (om_onnx_has(o, 1)) x = MAKE2(add, x, IN(1));
    SET(0, om_b_un(o->g, o->row->op, x));
    return o->cx->status;
}
static om_status map_quick_gelu(om_onnx *o) {
    om_id x = IN(0);
    SET(0, MAKE2(mul, x, MAKE1(sigmoid, om_b_scale(o->g, x, FLT("alpha", 1.702)))));
    return o->cx->status;
}

static om_status map_leaky_relu(om_onnx *o) {
    om_id x = IN(0);
    SET(0, map_where(o, MAKE2(gt, x, map_like(o, x, 0)), x, om_b_scale(o->g, x, FLT("alpha", 0.01))));
    return o->cx->status;
}
static om_status map_prelu(om_onnx *o) {
    om_id x = IN(0), slope = IN(1);
    SET(0, map_where(o, MAKE2(gt, x, map_like(o, x, 0)), x, MAKE2(mul, x, slope)));
    return o->cx->status;
}
/* Elu: x > 0 ? x : alpha * (exp(x) - 1). The argument of expm1 is held at <= 0: where must not meet inf * 0 in the gradient. */
static om_status map_elu(om_onnx *o) {
    om_id x = IN(0), zero = map_like(o, x, 0), pos = MAKE2(gt, x, zero);
    SET(0, map_where(o, pos, x, om_b_scale(o->g, MAKE1(expm1, map_where(o, pos, zero, x)), FLT("alpha", 1))));
    return o->cx->status;
}
static om_status map_hard_sigmoid(om_onnx *o) { /* HardSwish: x * hard_sigmoid(x) with alpha 1/6 */
    bool swish = !strcmp(o->row->name, "HardSwish");
    om_id x = IN(0);
    om_id y = MAKE2(add, om_b_scale(o->g, x, swish ? 1.0 / 6 : FLT("alpha", 0.2)), map_like(o, x, swish ? 0.5 : FLT("beta", 0.5)));
    om_id zero = map_like(o, x, 0), one = map_like(o, x, 1);
    y = map_where(o, MAKE2(lt, y, zero), zero, y);
    y = map_where(o, MAKE2(gt, y, one), one, y);
    SET(0, swish ? MAKE2(mul, x, y) : y);
    return o->cx->status;
}

/* maximum/minimum would halve the gradient at the bounds; torch.clamp passes all of it. NaN stays NaN. */
static om_status map_clip(om_onnx *o) {
    om_id x = IN(0), lo = IN(1), hi = IN(2);
    if (lo != OM_NONE) x = map_where(o, MAKE2(lt, x, lo), lo, x);
    if (hi != OM_NONE) x = map_where(o, MAKE2(gt, x, hi), hi, x);
    if (!om_onnx_has(o, 1) && !om_onnx_has(o, 2)) om_onnx_alias(o, 0, 0);
    else SET(0, x);
    return o->cx->status;
}

static om_status map_where_op(om_onnx *o) {
    om_id c = IN(0), x = IN(1), y = IN(2);
    SET(0, map_where(o, c, x, y));
    return o->cx->status;
}

static om_status map_cast(om_onnx *o) {
    int64_t to = INT("to", 0);
    int dtype = to > 0 && to < 100 ? (int)om_dtype_from_onnx((int)to) : OM_NODTYPE;
    if (!strcmp(o->row->name, "CastLike")) {
        om_type t;
        dtype = om_onnx_operand_type(o, 1, &t) ? t.dtype : OM_NODTYPE;
    }
    if (dtype == OM_NODTYPE) REFUSE("ONNX element type %lld is not supported", (long long)to);
    om_id x = IN(0);
    if (x != OM_NONE && om_ty(o->g, x)->dtype == dtype) om_onnx_alias(o, 0, 0);
    else SET(0, om_b_cast(o->g, x, dtype));
    return o->cx->status;
}

/* --- shapes ------------------------------------------------------------------------------------------ */

static om_status map_reshape(om_onnx *o) {
    om_graph *g = o->g;
    uint32_t n;
    const om_dim *list = om_onnx_list(o, 1, &n);
    om_id x = IN(0);
    if (FAILED) return o->cx->status;
    om_type t = *om_ty(g, x);
    ONNX_CHECK(o, n <= OM_RANK, "a shape of %u dimensions, at most %d", n, OM_RANK);
    om_dim d[OM_RANK], rest = 1;
    int infer = -1;
    for (uint32_t i = 0; i < n; i++) {
        int64_t c = 1;
        d[i] = list[i];
        bool known = om_dim_const(g, d[i], &c);
        if (known && c == 0 && !INT("allowzero", 0)) {
            ONNX_CHECK(o, i < t.rank, "shape[%u] = 0 copies a dimension the operand of rank %d does not have", i, t.rank);
            d[i] = t.dim[i];
        } else if (known && c == -1) {
            ONNX_CHECK(o, infer < 0, "two dimensions are -1");
            infer = (int)i;
            continue;
        } else {
            ONNX_CHECK(o, !known || c >= 0, "shape[%u] = %lld", i, (long long)c);
        }
        rest = om_dim_mul(g, rest, d[i]);
    }
    if (infer >= 0) {
        int64_t r, all;
        om_dim numel = om_dim_numel(g, &t);
        ONNX_CHECK(o, !om_dim_const(g, rest, &r) || r != 0, "the dimension -1 cannot be inferred: the others multiply to 0");
        if (om_dim_const(g, numel, &all) && om_dim_const(g, rest, &r))
            ONNX_CHECK(o, all % r == 0, "the dimension -1 cannot be inferred: %lld elements are no multiple of %lld",
                       (long long)all, (long long)r);
        d[infer] = om_dim_div(g, numel, rest);
    }
    SET(0, om_b_reshape(g, x, d, (int)n));
    return o->cx->status;
}

static om_status map_flatten(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int64_t axis = INT("axis", 1);
    if (axis < 0) axis += t.rank;
    ONNX_CHECK(o, axis >= 0 && axis <= t.rank, "axis %lld of a tensor of rank %d", (long long)axis, t.rank);
    om_dim d[2] = {1, 1};
    for (int i = 0; i < t.rank; i++) d[i >= axis] = om_dim_mul(o->g, d[i >= axis], t.dim[i]);
    SET(0, om_b_reshape(o->g, x, d, 2));
    return o->cx->status;
}

static om_status map_squeeze(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    uint32_t mask = 0;
    OM_TRY(map_axes(o, 1, t.rank, false, &mask));
    om_dim d[OM_RANK];
    int n = 0;
    for (int i = 0; i < t.rank; i++) {
        int64_t c;
        bool drop = mask ? mask >> i & 1 : t.dim[i] == 1;
        ONNX_CHECK(o, !mask || !drop || !om_dim_const(o->g, t.dim[i], &c) || c == 1, "axis %d has size %lld, only 1 can be squeezed",
                   i, (long long)t.dim[i]);
        if (!drop) d[n++] = t.dim[i];
    }
    SET(0, om_b_reshape(o->g, x, d, n));
    return o->cx->status;
}

static om_status map_unsqueeze(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    const om_dim *list;
    uint32_t n, mask = 0;
    OM_TRY(map_list_or_attr(o, 1, "axes", &list, &n));
    ONNX_CHECK(o, t.rank + n <= OM_RANK, "rank %u, at most %d", t.rank + n, OM_RANK);
    OM_TRY(map_axes(o, 1, t.rank + (int)n, false, &mask));
    om_dim d[OM_RANK];
    for (int i = 0, k = 0; i < t.rank + (int)n; i++) d[i] = mask >> i & 1 ? 1 : t.dim[k++];
    SET(0, om_b_reshape(o->g, x, d, t.rank + (int)n));
    return o->cx->status;
}

static om_status map_transpose(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int64_t p[OM_RANK];
    int perm[OM_RANK];
    uint32_t n, seen = 0;
    const int64_t *a = om_onnx_ints(o, "perm", &n);
    OM_TRY(map_ints(o, "perm", t.rank, 0, p));
    for (int i = 0; i < t.rank; i++) {
        perm[i] = a && n ? (p[i] >= 0 && p[i] < t.rank ? (int)p[i] : -1) : t.rank - 1 - i;
        ONNX_CHECK(o, perm[i] >= 0 && !(seen >> perm[i] & 1), "perm must hold each of 0 to %d once", t.rank - 1);
        seen |= 1u << perm[i];
    }
    SET(0, om_b_permute(o->g, x, perm));
    return o->cx->status;
}

/* Numpy broadcast of two sizes; unknown against a number: the number. */
static om_dim map_broadcast(const om_graph *g, om_dim a, om_dim b) {
    int64_t c;
    if (a == 1) return b;
    if (b == 1 || a == b) return a;
    return om_dim_const(g, a, &c) ? a : b;
}

static om_status map_expand(om_onnx *o) {
    uint32_t n;
    const om_dim *list = om_onnx_list(o, 1, &n);
    om_id x = IN(0);
    if (FAILED) return o->cx->status;
    om_type t = *om_ty(o->g, x);
    ONNX_CHECK(o, n <= OM_RANK, "a shape of %u dimensions, at most %d", n, OM_RANK);
    int rank = (int)n > t.rank ? (int)n : t.rank;
    om_dim d[OM_RANK];
    for (int i = 0; i < rank; i++) {
        int a = i - (rank - t.rank), b = i - (rank - (int)n);
        int64_t c;
        ONNX_CHECK(o, b < 0 || !om_dim_const(o->g, list[b], &c) || c >= 0, "shape[%d] is negative", b);
        d[i] = map_broadcast(o->g, a < 0 ? 1 : t.dim[a], b < 0 ? 1 : list[b]);
    }
    SET(0, om_b_expand(o->g, x, d, rank));
    return o->cx->status;
}

/* "To the end" as exporters write it: the largest int32 or something near the largest int64. */
static bool map_is_end(int64_t x) { return x == INT32_MAX || x > INT64_MAX / 2; }

/* Bounds of one axis. Negative steps walk the flipped axis: index i of x is size - 1 - i of flip(x). */
static om_id map_slice_axis(om_onnx *o, om_id x, int axis, om_dim start, om_dim end, int64_t step) {
    om_graph *g = o->g;
    if (FAILED || x == OM_NONE) return OM_NONE;
    om_dim size = om_ty(g, x)->dim[axis];
    int64_t s, e, n;
    bool ks = om_dim_const(g, start, &s), ke = om_dim_const(g, end, &e), kn = om_dim_const(g, size, &n);
    if (step < 0) {
        if (step == INT64_MIN) step++;
        om_id f = om_make(g, &om_op_flip, OM_IN(x), OM_ATTRS(OM_AD("axes", &(om_dim){axis}, 1)));
        /* ONNX clamps the start to [0, size-1] and the end to [-1, size-1] */
        if (ks && ke && kn) {
            if (s < 0) s += n;
            if (e < 0 && e >= -n) e += n;
            else if (e < 0) e = -1;
            s = s < 0 ? -1 : s > n - 1 ? n - 1 : s;
            e = e > n - 1 ? n - 1 : e;
            int64_t a = n - 1 - s, b = n - 1 - e;
            return om_b_slice(g, f, axis, a, b < a ? a : b, -step);
        }
        if (!ks || !ke || (s != -1 && s < INT32_MAX) || e > -INT32_MAX)
            return om_onnx_err(o, OM_UNSUPPORTED, "a slice with negative step of an axis of unknown size must cover the whole axis"),
                OM_NONE;
        return om_b_slice(g, f, axis, 0, size, -step);
    }
    if (ks && map_is_end(s) && !kn) start = size;
    else start = om_onnx_bound(g, start, size);
    end = ke && map_is_end(e) ? size : om_onnx_bound(g, end, size);
    int64_t lo, hi;
    om_onnx_bounds(g, om_dim_sub(g, end, start), 1, &lo, &hi);
    if (hi < 0) end = start;
    else if (lo < 0) end = om_dim_max(g, start, end);
    return om_b_slice(g, x, axis, start, end, step > INT32_MAX ? INT32_MAX : step);
}

static om_status map_slice(om_onnx *o) {
    uint32_t ns, ne, na = 0, nt = 0;
    const om_dim *start = om_onnx_list(o, 1, &ns), *end = om_onnx_list(o, 2, &ne), *axes = NULL, *steps = NULL;
    om_id x = IN(0);
    if (om_onnx_has(o, 3)) axes = om_onnx_list(o, 3, &na);
    if (om_onnx_has(o, 4)) steps = om_onnx_list(o, 4, &nt);
    if (FAILED) return o->cx->status;
    int rank = om_ty(o->g, x)->rank;
    ONNX_CHECK(o, ns == ne && ns <= (uint32_t)rank && (!axes || na == ns) && (!steps || nt == ns),
               "starts, ends, axes and steps have %u, %u, %u and %u entries for rank %d", ns, ne,
               na, nt, rank);
    uint32_t seen = 0;
    for (uint32_t i = 0; i < ns; i++) {
        int64_t a = i, t = 1;
        int axis = 0;
        if (axes) OM_TRY(map_known(o, &axes[i], 1, "axes", &a));
        if (steps) OM_TRY(map_known(o, &steps[i], 1, "steps", &t));
        OM_TRY(map_axis(o, a, rank, &axis));
        ONNX_CHECK(o, t != 0 && !(seen >> axis & 1), "step 0 or an axis given twice");
        seen |= 1u << axis;
        x = map_slice_axis(o, x, axis, start[i], end[i], t);
    }
    if (x == IN(0)) om_onnx_alias(o, 0, 0);
    else SET(0, x);
    return o->cx->status;
}

static om_status map_concat(om_onnx *o) {
    om_id *in = om_arena_alloc(&o->tmp, ((size_t)o->n_in + 1) * sizeof *in);
    int axis = 0;
    if (!in) return o->cx->status;
    for (int i = 0; i < o->n_in; i++) {
        ONNX_CHECK(o, om_onnx_has(o, i), "operand %d is missing", i);
        in[i] = IN(i);
    }
    OM_TRY(map_axis(o, INT("axis", 0), map_type(o, 0).rank, &axis));
    if (o->n_in == 1) om_onnx_alias(o, 0, 0);
    else SET(0, om_make(o->g, &om_op_concat, in, o->n_in, OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

static om_status map_split(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int axis = 0, parts = (int)o->node->n_output;
    const om_dim *list;
    uint32_t n;
    OM_TRY(map_axis(o, INT("axis", 0), t.rank, &axis));
    OM_TRY(map_list_or_attr(o, 1, "split", &list, &n));
    ONNX_CHECK(o, !list || n == (uint32_t)parts, "split has %u entries for %d outputs", n, parts);
    ONNX_CHECK(o, INT("num_outputs", parts) == parts, "num_outputs is %lld, but %d outputs are named",
               (long long)INT("num_outputs", parts), parts);
    om_dim size = t.dim[axis], each = om_dim_div(g, om_dim_add(g, size, parts - 1), parts), at = 0;
    for (int i = 0; i < parts; i++) {
        om_dim end = list ? om_dim_add(g, at, list[i]) : i == parts - 1 ? size : om_dim_add(g, at, each);
        if (!list && !om_dim_const(g, size, &(int64_t){0})) {
            om_dim exact = om_dim_div(g, size, parts); /* an even split stays a polynomial */
            if (om_dim_mul(g, exact, parts) == size && i < parts - 1) end = om_dim_add(g, at, exact);
        }
        int64_t a, b, c;
        if (om_dim_const(g, end, &a) && om_dim_const(g, size, &b) && a > b) {
            ONNX_CHECK(o, !list, "the parts add up to more than the %lld of the axis", (long long)b);
            end = size;
        }
        ONNX_CHECK(o, !list || !om_dim_const(g, list[i], &c) || c >= 0, "part %d has size %lld", i, (long long)c);
        if (om_onnx_wants(o, i)) SET(i, om_b_slice(g, x, axis, at, end, 1));
        at = end;
    }
    return o->cx->status;
}

/* reflect, edge and wrap, axis by axis: the new parts are slices of x. */
static om_id map_pad_axis(om_onnx *o, om_id x, int axis, om_dim lo, om_dim hi, const char *mode) {
    om_graph *g = o->g;
    if (FAILED || (lo == 0 && hi == 0)) return x;
    om_type t = *om_ty(g, x);
    om_dim size = t.dim[axis], one_less = om_dim_sub(g, size, 1);
    om_attr flip = OM_AD("axes", &(om_dim){axis}, 1);
    om_id part[3];
    int n = 0;
    for (int side = 0; side < 2; side++) {
        om_dim k = side ? hi : lo;
        if (side == 1) part[n++] = x;
        if (k == 0) continue;
        om_id p;
        if (!strcmp(mode, "reflect")) {
            p = side ? om_b_slice(g, x, axis, om_dim_sub(g, one_less, k), one_less, 1) : om_b_slice(g, x, axis, 1, om_dim_add(g, k, 1), 1);
            p = om_make(g, &om_op_flip, OM_IN(p), &flip, 1);
        } else if (!strcmp(mode, "wrap")) {
            p = side ? om_b_slice(g, x, axis, 0, k, 1) : om_b_slice(g, x, axis, om_dim_sub(g, size, k), size, 1);
        } else {
            p = side ? om_b_slice(g, x, axis, one_less, size, 1) : om_b_slice(g, x, axis, 0, 1, 1);
            om_type e = t;
            e.dim[axis] = k;
            p = om_b_expand(g, p, e.dim, e.rank);
        }
        part[n++] = p;
    }
    return om_make(g, &om_op_concat, part, n, OM_ATTRS(OM_AI("axis", axis)));
}

static om_status map_pad(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    const om_dim *pads;
    uint32_t n, na = 0;
    double value = 0;
    int64_t axes[OM_RANK];
    const char *mode = om_onnx_str(o, "mode", "constant");
    OM_TRY(map_list_or_attr(o, 1, "pads", &pads, &n));
    for (int i = 0; i < t.rank; i++) axes[i] = i;
    na = t.rank;
    if (om_onnx_has(o, 3)) {
        const om_dim *list = om_onnx_list(o, 3, &na);
        if (FAILED) return o->cx->status;
        ONNX_CHECK(o, na <= t.rank, "%u axes for rank %d", na, t.rank);
        OM_TRY(map_known(o, list, na, "axes", axes));
    }
    ONNX_CHECK(o, pads && n == 2 * na, "pads has %u entries, %u are needed", n, 2 * na);
    OM_TRY(map_scalar(o, 2, "the padding value", &value));
    om_dim lo[OM_RANK] = {0}, hi[OM_RANK] = {0};
    bool any = false;
    for (uint32_t i = 0; i < na; i++) {
        int axis = 0;
        OM_TRY(map_axis(o, axes[i], t.rank, &axis));
        lo[axis] = pads[i], hi[axis] = pads[na + i];
        any |= lo[axis] || hi[axis];
    }
    if (!any) {
        om_onnx_alias(o, 0, 0);
    } else if (!strcmp(mode, "constant")) {
        SET(0, om_make(g, &om_op_pad, OM_IN(x), OM_ATTRS(OM_AD("lo", lo, t.rank), OM_AD("hi", hi, t.rank), OM_AF("value", value))));
    } else {
        ONNX_CHECK(o, !strcmp(mode, "reflect") || !strcmp(mode, "edge") || !strcmp(mode, "wrap"),
                   "mode '%.40s'; constant, reflect, edge and wrap are defined", mode);
        for (int i = 0; i < t.rank; i++) {
            int64_t c;
            ONNX_CHECK(o, (!om_dim_const(g, lo[i], &c) || c >= 0) && (!om_dim_const(g, hi[i], &c) || c >= 0),
                       "negative pads need mode constant");
            x = map_pad_axis(o, x, i, lo[i], hi[i], mode);
        }
        SET(0, x);
    }
    return o->cx->status;
}

static om_status map_tile(om_onnx *o) {
    om_graph *g = o->g;
    uint32_t n;
    const om_dim *rep = om_onnx_list(o, 1, &n);
    om_id x = IN(0);
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, n == om_ty(g, x)->rank, "%u repeats for rank %d", n, om_ty(g, x)->rank);
    for (int i = 0; i < (int)n && !FAILED; i++) { /* (.., d, ..) -> (.., 1, d, ..) -> (.., r, d, ..) -> (.., r*d, ..) */
        if (rep[i] == 1) continue;
        om_type t = *om_ty(g, x);
        if (t.rank == OM_RANK) REFUSE("Tile of rank %d, at most %d", t.rank, OM_RANK - 1);
        om_dim d[OM_RANK];
        for (int k = 0; k <= t.rank; k++) d[k] = k < i ? t.dim[k] : k == i ? 1 : t.dim[k - 1];
        x = om_b_reshape(g, x, d, t.rank + 1);
        d[i] = rep[i];
        x = om_b_expand(g, x, d, t.rank + 1);
        t.dim[i] = om_dim_mul(g, t.dim[i], rep[i]);
        x = om_b_reshape(g, x, t.dim, t.rank);
    }
    if (x == IN(0)) om_onnx_alias(o, 0, 0);
    else SET(0, x);
    return o->cx->status;
}

/* ceil((limit - start) / delta) values from start; the number must be known as a size. */
static om_status map_range(om_onnx *o) {
    om_graph *g = o->g;
    double f[3];
    om_type t;
    if (!om_onnx_operand_type(o, 0, &t)) return om_onnx_err(o, OM_INVALID, "start has no type");
    if (om_is_float(t.dtype)) {
        for (int i = 0; i < 3; i++)
            if (!om_onnx_scalar(o, i, &f[i]))
                return FAILED ? o->cx->status : om_onnx_err(o, OM_UNSUPPORTED, "a Range of floats must have constant bounds");
        double n = f[2] != 0 ? ceil((f[1] - f[0]) / f[2]) : -1;
        ONNX_CHECK(o, f[2] != 0 && n < 2147483648.0 && n == n, "start %g, limit %g, delta %g", f[0], f[1], f[2]);
        om_dim d = n > 0 ? (om_dim)n : 0;
        SET(0, om_make(g, &om_op_iota, NULL, 0, OM_ATTRS(OM_AD("shape", &d, 1), OM_AI("dtype", t.dtype), OM_AF("start", f[0]),
                                                         OM_AF("step", f[2]))));
        return o->cx->status;
    }
    om_dim b[3];
    int64_t step, lo, hi;
    for (int i = 0; i < 3; i++) {
        uint32_t n;
        const om_dim *l = om_onnx_list(o, i, &n);
        if (FAILED) return o->cx->status;
        ONNX_CHECK(o, n == 1, "operand %d has %u elements, one is needed", i, n);
        b[i] = l[0];
    }
    OM_TRY(map_known(o, &b[2], 1, "delta", &step));
    ONNX_CHECK(o, step != 0 && step > INT32_MIN && step < INT32_MAX, "delta %lld", (long long)step);
    om_dim span = step > 0 ? om_dim_sub(g, b[1], b[0]) : om_dim_sub(g, b[0], b[1]);
    int64_t by = step > 0 ? step : -step;
    om_dim n = by == 1 ? span : om_dim_div(g, om_dim_add(g, span, by - 1), by);
    om_onnx_bounds(g, n, 0, &lo, &hi);
    if (hi < 0) n = 0;
    else if (lo < 0) {
        om_onnx_bounds(g, n, 1, &lo, &hi);
        if (lo < 0) n = om_dim_max(g, n, 0);
    }
    SET(0, om_make(g, &om_op_iota, NULL, 0, OM_ATTRS(OM_AD("shape", &n, 1), OM_AI("dtype", t.dtype), OM_AD("start", &b[0], 1),
                                                     OM_AI("step", step))));
    return o->cx->status;
}

static om_status map_constant_of_shape(om_onnx *o) {
    uint32_t n;
    const om_dim *list = om_onnx_list(o, 0, &n);
    const Onnx__AttributeProto *a = om_onnx_attr(o, "value");
    double value = 0;
    int64_t whole = 0;
    int dtype = OM_F32;
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, n <= OM_RANK, "a shape of %u dimensions, at most %d", n, OM_RANK);
    if (a && a->t) {
        om_id c = om_onnx_const(o, a->t);
        if (FAILED) return o->cx->status;
        const om_value *v = om_val(o->g, c);
        ONNX_CHECK(o, om_dim_numel(o->g, &v->type) == 1, "value must have one element");
        dtype = v->type.dtype;
        om_tensor from = {.data = (void *)v->data, .dtype = v->type.dtype, .device = -1},
            to = {.data = om_is_float(dtype) ? (void *)&value : (void *)&whole, .dtype = om_is_float(dtype) ? OM_F64 : OM_I64,
                  .device = -1};
        OM_TRY(om_copy(o->cx, &from, &to));
    }
    om_attr val = om_is_float(dtype) ? OM_AF("value", value) : OM_AI("value", whole);
    SET(0, om_make(o->g, &om_op_fill, NULL, 0, OM_ATTRS(OM_AD("shape", list, n), OM_AI("dtype", dtype), val)));
    return o->cx->status;
}

static om_status map_cumsum(om_onnx *o) {
    double a = 0;
    int axis = 0;
    OM_TRY(map_scalar(o, 1, "the axis", &a));
    ONNX_CHECK(o, fabs(a) < 1e9, "axis %g", a);
    OM_TRY(map_axis(o, (int64_t)a, map_type(o, 0).rank, &axis));
    SET(0, om_make(o->g, &om_op_cumsum, OM_IN(IN(0)), OM_ATTRS(OM_AI("axis", axis), OM_AI("exclusive", INT("exclusive", 0)),
                                                               OM_AI("reverse", INT("reverse", 0)))));
    return o->cx->status;
}

static om_status map_trilu(om_onnx *o) {
    double k = 0;
    OM_TRY(map_scalar(o, 1, "k", &k));
    ONNX_CHECK(o, fabs(k) < 1e15, "k is %g", k);
    om_id x = IN(0);
    SET(0, om_make(o->g, &om_op_trilu, OM_IN(x), OM_ATTRS(OM_AI("k", (int64_t)k), OM_AI("upper", INT("upper", 1) != 0))));
    return o->cx->status;
}

/* where(idx == iota(depth) along a new axis, on, off) */
static om_status map_one_hot(om_onnx *o) {
    om_graph *g = o->g;
    om_id idx = IN(0), values = IN(2);
    uint32_t n;
    const om_dim *depth = om_onnx_list(o, 1, &n);
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, n == 1, "depth has %u elements, one is needed", n);
    om_type t = *om_ty(g, idx), vt = *om_ty(g, values);
    ONNX_CHECK(o, om_is_int(t.dtype) && t.rank < OM_RANK, "indices must be integers of rank < %d", OM_RANK);
    ONNX_CHECK(o, vt.rank == 1 && vt.dim[0] == 2, "values must have shape [2]");
    int64_t a = INT("axis", -1);
    int axis = 0;
    OM_TRY(map_axis(o, a, t.rank + 1, &axis));
    if (!index_nonneg(g, idx, 0)) {
        om_id size = om_onnx_dim_value(o, depth[0], t.dtype);
        idx = map_where(o, MAKE2(lt, idx, map_like(o, idx, 0)), MAKE2(add, idx, size), idx);
    }
    om_dim d[OM_RANK], c[OM_RANK];
    for (int i = 0, k = 0; i <= t.rank; i++) {
        d[i] = i == axis ? 1 : t.dim[k++];
        c[i] = i == axis ? depth[0] : 1;
    }
    om_id classes = om_make(g, &om_op_iota, NULL, 0, OM_ATTRS(OM_AD("shape", depth, 1), OM_AI("dtype", t.dtype)));
    om_id hit = MAKE2(eq, om_b_reshape(g, idx, d, t.rank + 1), om_b_reshape(g, classes, c, t.rank + 1));
    om_id off = om_b_reshape(g, om_b_slice(g, values, 0, 0, 1, 1), NULL, 0),
        on = om_b_reshape(g, om_b_slice(g, values, 0, 1, 2, 1), NULL, 0);
    SET(0, map_where(o, hit, on, off));
    return o->cx->status;
}

/* --- gather and scatter ------------------------------------------------------------------------------- */

static om_status map_gather(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int axis = 0;
    OM_TRY(map_axis(o, INT("axis", 0), t.rank, &axis));
    const om_onnx_val *k = om_onnx_operand(o, 1);
    if (k->list && k->rank == 0) { /* one known index: a view, where a gather would copy */
        om_dim i = k->list[0];
        int64_t lo, hi, c, n;
        om_onnx_bounds(g, i, 0, &lo, &hi);
        if (om_dim_const(g, i, &c) && om_dim_const(g, t.dim[axis], &n))
            ONNX_CHECK(o, c >= -n && c < n, "index %lld, but axis %d has size %lld", (long long)c, axis, (long long)n);
        if (lo >= 0 || hi < 0) {
            if (hi < 0) i = om_dim_add(g, i, t.dim[axis]);
            om_id s = om_b_slice(g, x, axis, i, om_dim_add(g, i, 1), 1);
            om_dim d[OM_RANK];
            for (int a = 0, m = 0; a < t.rank; a++)
                if (a != axis) d[m++] = t.dim[a];
            SET(0, om_b_reshape(g, s, d, t.rank - 1));
            return o->cx->status;
        }
    }
    om_id idx = map_index(o, IN(1), t.dim[axis]);
    SET(0, om_make(g, &om_op_gather, OM_IN(x, idx), OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

/* ortmodule.Embedding: torch's indices are never negative; padding_idx concerns only the gradient. */
static om_status map_embedding(om_onnx *o) {
    om_id w = IN(0), idx = IN(1);
    om_type t = map_type_of(o, w);
    ONNX_CHECK(o, t.rank == 2, "the weight has rank %d, 2 is needed", t.rank);
    int64_t pad = INT("padding_idx", -1), n;
    if (om_onnx_attr(o, "padding_idx") && pad < 0 && om_dim_const(o->g, t.dim[0], &n) && pad != -1) pad += n;
    SET(0, om_make(o->g, &om_op_gather, OM_IN(w, idx), OM_ATTRS(OM_AI("axis", 0), OM_AI("padding_idx", pad))));
    return o->cx->status;
}

static om_status map_gather_elements(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int axis = 0;
    OM_TRY(map_axis(o, INT("axis", 0), t.rank, &axis));
    om_id idx = map_index(o, IN(1), t.dim[axis]);
    SET(0, om_make(o->g, &om_op_gather_elements, OM_IN(x, idx), OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

static om_status map_reduction(om_onnx *o, int64_t *reduce) {
    const char *how = om_onnx_str(o, "reduction", "none");
    *reduce = !strcmp(how, "add");
    if (!*reduce && strcmp(how, "none") != 0) REFUSE("reduction '%.40s'; none and add are supported", how);
    return OM_OK;
}

static om_status map_scatter_elements(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int axis = 0;
    int64_t reduce = 0;
    OM_TRY(map_axis(o, INT("axis", 0), t.rank, &axis));
    OM_TRY(map_reduction(o, &reduce));
    om_id idx = map_index(o, IN(1), t.dim[axis]);
    SET(0, om_make(o->g, &om_op_scatter_elements, OM_IN(x, idx, IN(2)), OM_ATTRS(OM_AI("axis", axis), OM_AI("reduce", reduce))));
    return o->cx->status;
}

/* Index tuples: column j of the last axis is fixed with size j. */
static om_id map_index_nd(om_onnx *o, om_id idx, const om_type *x) {
    om_graph *g = o->g;
    const char *hint = om_onnx_meta(o, "index_nonneg");
    if (FAILED || (hint && !strcmp(hint, "1")) || index_nonneg(g, idx, 0)) return FAILED ? OM_NONE : idx;
    om_type t = *om_ty(g, idx);
    int64_t k = 0;
    if (t.rank >= 1 && !om_dim_const(g, t.dim[t.rank - 1], &k))
        return om_onnx_err(o, OM_UNSUPPORTED, "the last axis of the indices must be a number, it depends on the sizes of inputs"), OM_NONE;
    if (t.rank < 1 || k < 1 || k > x->rank)
        return om_onnx_err(o, OM_INVALID, "indices of rank %d whose last axis has size %lld, for data of rank %d",
                           t.rank, (long long)k, x->rank), OM_NONE;
    if (t.dtype != OM_I64 && t.dtype != OM_I32)
        return om_onnx_err(o, OM_INVALID, "indices are %s, int64 is needed", om_dtype_name(t.dtype)), OM_NONE;
    om_id size[OM_RANK];
    for (int64_t j = 0; j < k; j++) size[j] = om_b_reshape(g, om_onnx_dim_value(o, x->dim[j], t.dtype), (om_dim[]){1}, 1);
    om_id sizes = k == 1 ? size[0] : om_make(g, &om_op_concat, size, (int)k, OM_ATTRS(OM_AI("axis", 0)));
    return map_where(o, MAKE2(lt, idx, om_scalar(g, t.dtype, 0)), MAKE2(add, idx, sizes), idx);
}

static om_status map_gather_nd(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    if (INT("batch_dims", 0) != 0) REFUSE("batch_dims %lld; only 0 is supported", (long long)INT("batch_dims", 0));
    om_id idx = map_index_nd(o, IN(1), &t);
    SET(0, om_make(o->g, &om_op_gather_nd, OM_IN(x, idx), NULL, 0));
    return o->cx->status;
}

static om_status map_scatter_nd(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int64_t reduce = 0;
    OM_TRY(map_reduction(o, &reduce));
    om_id idx = map_index_nd(o, IN(1), &t);
    SET(0, om_make(o->g, &om_op_scatter_nd, OM_IN(x, idx, IN(2)), OM_ATTRS(OM_AI("reduce", reduce))));
    return o->cx->status;
}

/* --- reductions -------------------------------------------------------------------------------------- */

static om_status map_reduce(om_onnx *o) {
    om_graph *g = o->g;
    const char *op = o->row->name;
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    uint32_t mask = 0;
    bool keep = INT("keepdims", 1) != 0;
    OM_TRY(map_axes(o, 1, t.rank, !INT("noop_with_empty_axes", 0), &mask));
    om_id y;
    if (o->row->op) {
        y = map_reduce_op(o, o->row->op, x, mask, keep);
    } else if (!strcmp(op, "ReduceL1")) {
        y = map_reduce_op(o, &om_op_reduce_sum, MAKE1(abs, x), mask, keep);
    } else if (!strcmp(op, "ReduceSumSquare")) {
        y = map_reduce_op(o, &om_op_reduce_sum, MAKE2(mul, x, x), mask, keep);
    } else if (!strcmp(op, "ReduceL2")) { /* sqrt has no gradient at 0; torch's norm gives 0 there */
        om_id s = map_reduce_op(o, &om_op_reduce_sum, MAKE2(mul, x, x), mask, keep), zero = map_like(o, x, 0), none = MAKE2(eq, s, zero);
        y = map_where(o, none, zero, MAKE1(sqrt, map_where(o, none, map_like(o, x, 1), s)));
    } else if (!strcmp(op, "ReduceLogSum")) {
        y = MAKE1(log, map_reduce_op(o, &om_op_reduce_sum, x, mask, keep));
    } else { /* ReduceLogSumExp: log(sum(exp(x - m))) + m, m the maximum where it is finite */
        om_id m = map_reduce_op(o, &om_op_reduce_max, x, mask, true);
        m = MAKE1(stop_grad, map_where(o, MAKE1(isinf, m), map_like(o, x, 0), m));
        y = MAKE2(add, MAKE1(log, map_reduce_op(o, &om_op_reduce_sum, MAKE1(exp, MAKE2(sub, x, m)), mask, true)), m);
        om_dim d[OM_RANK];
        int n = 0;
        for (int i = 0; i < t.rank; i++)
            if (keep || !(mask >> i & 1)) d[n++] = mask >> i & 1 ? 1 : t.dim[i];
        y = om_b_reshape(g, y, d, n);
    }
    if (y == x) om_onnx_alias(o, 0, 0);
    else SET(0, y);
    return o->cx->status;
}

static om_status map_arg(om_onnx *o) {
    om_id x = IN(0);
    int axis = 0;
    OM_TRY(map_axis(o, INT("axis", 0), map_type_of(o, x).rank, &axis));
    if (INT("select_last_index", 0)) REFUSE("select_last_index = 1 is not supported");
    SET(0, om_make(o->g, o->row->op, OM_IN(x), OM_ATTRS(OM_AI("axis", axis), OM_AI("keepdims", INT("keepdims", 1) != 0))));
    return o->cx->status;
}

static om_status map_softmax(om_onnx *o) {
    om_id x = IN(0);
    int axis = 0;
    OM_TRY(map_axis(o, INT("axis", -1), map_type_of(o, x).rank, &axis));
    SET(0, om_make(o->g, o->row->op, OM_IN(x), OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

/* --- normalisation ----------------------------------------------------------------------------------- */

/* Does w have exactly x's sizes from `axis` on? Then the kernel applies it; else it is broadcast by hand. */
static bool norm_fits(const om_type *x, const om_type *w, int axis) {
    if (w->rank != x->rank - axis) return false;
    for (int i = 0; i < w->rank; i++)
        if (w->dim[i] != x->dim[axis + i]) return false;
    return true;
}

static om_status map_layer_norm(om_onnx *o) {
    om_graph *g = o->g;
    bool rms = o->row->op == &om_op_rms_norm;
    om_id x = IN(0), w = IN(1), b = rms ? OM_NONE : IN(2);
    om_type t = map_type_of(o, x);
    int axis = 0;
    double eps = FLT("epsilon", 1e-5);
    OM_TRY(map_axis(o, INT("axis", -1), t.rank, &axis));
    om_type wt = map_type_of(o, w), bt = map_type_of(o, b);
    bool fits = (w == OM_NONE || norm_fits(&t, &wt, axis)) && (b == OM_NONE || norm_fits(&t, &bt, axis)) &&
        (w == OM_NONE || wt.dtype == t.dtype);
    om_id y = om_make(g, o->row->op, (om_id[]){x, fits ? w : OM_NONE, fits ? b : OM_NONE}, rms ? 2 : 3,
                      OM_ATTRS(OM_AI("axis", axis), OM_AF("eps", eps)));
    om_id mean = y == OM_NONE || rms ? OM_NONE : y + 1, rstd = y == OM_NONE ? OM_NONE : y + (rms ? 1 : 2);
    if (!fits && w != OM_NONE) y = MAKE2(mul, y, om_b_cast(g, w, t.dtype));
    if (!fits && b != OM_NONE) y = MAKE2(add, y, om_b_cast(g, b, t.dtype));
    SET(0, y);
    om_dim d[OM_RANK]; /* ONNX keeps the normalised axes with size 1 */
    for (int i = 0; i < t.rank; i++) d[i] = i < axis ? t.dim[i] : 1;
    if (!rms && om_onnx_wants(o, 1)) SET(1, om_b_reshape(g, mean, d, t.rank));
    if (om_onnx_wants(o, rms ? 1 : 2)) SET(rms ? 1 : 2, om_b_reshape(g, rstd, d, t.rank));
    return o->cx->status;
}

/* (n, c, ...) in groups: layer_norm over (c/groups * spatial), then scale and shift per channel. Instance norm: groups = c. */
static om_status map_group_norm(om_onnx *o) {
    om_graph *g = o->g;
    bool instance = !strcmp(o->row->name, "InstanceNormalization");
    om_id x = IN(0), w = IN(1), b = IN(2);
    om_type t = map_type_of(o, x), wt = map_type_of(o, w);
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank >= 2 && wt.rank == 1, "x has rank %d and scale rank %d; at least 2 and exactly 1 are needed", t.rank, wt.rank);
    int64_t groups = INT("num_groups", 0), c;
    om_dim ng = instance ? t.dim[1] : groups;
    ONNX_CHECK(o, instance || groups > 0, "num_groups is %lld", (long long)groups);
    ONNX_CHECK(o, instance || !om_dim_const(g, t.dim[1], &c) || c % groups == 0, "%lld channels in %lld groups",
               (long long)c, (long long)groups);
    om_dim rest = om_dim_div(g, t.dim[1], ng), d[3] = {t.dim[0], ng, 0}, pair[2] = {wt.dim[0], rest};
    for (int i = 2; i < t.rank; i++) rest = om_dim_mul(g, rest, t.dim[i]);
    d[2] = rest;
    om_id y = om_make(g, &om_op_layer_norm, OM_IN(om_b_reshape(g, x, d, 3)),
                      OM_ATTRS(OM_AI("axis", 2), OM_AF("eps", FLT("epsilon", 1e-5))));
    y = om_b_reshape(g, y, t.dim, t.rank);
    if (!instance && o->opset < 21) { /* scale and bias were per group */
        om_dim one[2] = {ng, 1}, all[1] = {t.dim[1]};
        w = om_b_reshape(g, om_b_expand(g, om_b_reshape(g, w, one, 2), pair, 2), all, 1);
        b = om_b_reshape(g, om_b_expand(g, om_b_reshape(g, b, one, 2), pair, 2), all, 1);
    }
    y = MAKE2(mul, y, map_per_channel(o, w, t.rank));
    SET(0, MAKE2(add, y, map_per_channel(o, b, t.rank)));
    return o->cx->status;
}

/* ortmodule.BatchNorm: x, weight?, bias?, running_mean?, running_var? -> y, new_mean, new_var; torch's momentum and variance. */
static om_status map_batch_norm(om_onnx *o) {
    om_id in[5];
    for (int i = 0; i < 5; i++) in[i] = IN(i);
    om_id y = om_make(o->g, &om_op_batch_norm, in, 5, OM_ATTRS(OM_AI("training", INT("training", 0)),
                                                               OM_AF("momentum", FLT("momentum", 0.1)), OM_AF("eps", FLT("eps", 1e-5))));
    SET(0, y);
    SET(1, y == OM_NONE ? y : y + 1);
    SET(2, y == OM_NONE ? y : y + 2);
    return o->cx->status;
}

/* The standard's: running statistics are mixed with momentum on the old value, and with the population variance. */
static om_status map_batch_normalization(om_onnx *o) {
    om_id in[5];
    int64_t training = INT("training_mode", 0);
    if (training && (om_onnx_wants(o, 1) || om_onnx_wants(o, 2)))
        REFUSE("running statistics of BatchNormalization in training mode follow another rule than torch's; write ortmodule.BatchNorm");
    for (int i = 0; i < 5; i++) in[i] = IN(i);
    SET(0, om_make(o->g, &om_op_batch_norm, in, 5, OM_ATTRS(OM_AI("training", training != 0), OM_AF("momentum", 0.1),
                                                            OM_AF("eps", FLT("epsilon", 1e-5)))));
    return o->cx->status;
}

/* --- products ---------------------------------------------------------------------------------------- */

/* numpy's matmul for ranks 1 too: a vector gets an axis of size 1 that the result loses again. */
static om_id map_matmul_of(om_onnx *o, om_id a, om_id b) {
    om_graph *g = o->g;
    if (FAILED || a == OM_NONE || b == OM_NONE) return OM_NONE;
    om_type ta = *om_ty(g, a), tb = *om_ty(g, b);
    if (ta.rank == 0 || tb.rank == 0)
        return om_onnx_err(o, OM_INVALID, "operands of rank %d and %d; at least 1 is needed", ta.rank, tb.rank), OM_NONE;
    if (ta.rank == 1) a = om_b_reshape(g, a, (om_dim[]){1, ta.dim[0]}, 2);
    if (tb.rank == 1) b = om_b_reshape(g, b, (om_dim[]){tb.dim[0], 1}, 2);
    om_id y = om_make(g, &om_op_matmul, OM_IN(a, b), NULL, 0);
    if (y == OM_NONE || (ta.rank > 1 && tb.rank > 1)) return y;
    om_type t = *om_ty(g, y);
    om_dim d[OM_RANK];
    int n = 0;
    for (int i = 0; i < t.rank; i++)
        if (!(i == t.rank - 2 && ta.rank == 1) && !(i == t.rank - 1 && tb.rank == 1)) d[n++] = t.dim[i];
    return om_b_reshape(g, y, d, n);
}

static om_status map_matmul(om_onnx *o) {
    om_id a = IN(0), b = IN(1);
    SET(0, map_matmul_of(o, a, b));
    return o->cx->status;
}

static om_status map_gemm(om_onnx *o) {
    om_graph *g = o->g;
    om_id a = IN(0), b = IN(1), c = IN(2);
    double alpha = FLT("alpha", 1), beta = FLT("beta", 1);
    ONNX_CHECK(o, map_type_of(o, a).rank == 2 && map_type_of(o, b).rank == 2, "A and B must have rank 2");
    if (INT("transA", 0)) a = om_b_transpose(g, a, 0, 1);
    if (INT("transB", 0)) b = om_b_transpose(g, b, 0, 1);
    om_type bt = map_type_of(o, b), ct = map_type_of(o, c);
    om_id y;
    if (c != OM_NONE && alpha == 1 && beta == 1 && ct.rank == 1 && ct.dim[0] == bt.dim[1]) {
        y = om_make(g, &om_op_matmul, OM_IN(a, b, c), NULL, 0);
    } else {
        y = om_b_scale(g, om_make(g, &om_op_matmul, OM_IN(a, b), NULL, 0), alpha);
        if (c != OM_NONE && beta != 0) y = MAKE2(add, y, om_b_scale(g, c, beta));
    }
    SET(0, y);
    return o->cx->status;
}

/* com.microsoft FusedMatMul: alpha * op(A) op(B); transBatchX moves the first axis before the last one. */
static om_status map_fused_matmul(om_onnx *o) {
    om_id in[2];
    for (int k = 0; k < 2; k++) {
        in[k] = IN(k);
        om_type t = map_type_of(o, in[k]);
        if (INT(k ? "transBatchB" : "transBatchA", 0)) {
            int perm[OM_RANK];
            ONNX_CHECK(o, t.rank >= 2, "operand %d has rank %d", k, t.rank);
            for (int i = 0; i < t.rank; i++) perm[i] = i < t.rank - 2 ? i + 1 : i == t.rank - 2 ? 0 : i;
            in[k] = om_b_permute(o->g, in[k], perm);
        }
        if (INT(k ? "transB" : "transA", 0) && t.rank > 1) in[k] = om_b_transpose(o->g, in[k], -2, -1);
    }
    SET(0, om_b_scale(o->g, map_matmul_of(o, in[0], in[1]), FLT("alpha", 1)));
    return o->cx->status;
}

static om_id map_attention_node(om_onnx *o, om_id q, om_id k, om_id v, om_id mask, double scale, double dropout) {
    bool causal = INT("is_causal", 0) != 0;
    om_id y = om_make(o->g, &om_op_attention, (om_id[]){q, k, v, mask}, 4,
                      OM_ATTRS(OM_AI("causal", causal), OM_AF("scale", scale), OM_AF("dropout", dropout)));
    if (dropout > 0) map_random(o);
    return y;
}

static om_status map_attention_scale(om_onnx *o, om_id q, double *scale) {
    om_type t = map_type_of(o, q);
    int64_t d;
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank >= 2, "q has rank %d", t.rank);
    *scale = FLT("scale", 0);
    if (om_onnx_attr(o, "scale") && om_onnx_attr(o, "scale")->has_f) return OM_OK;
    ONNX_CHECK(o, om_dim_const(o->g, t.dim[t.rank - 1], &d) && d > 0, "scale is not given and the head size is not a number");
    *scale = 1 / sqrt((double)d);
    return OM_OK;
}

/* ortmodule.Attention */
static om_status map_attention(om_onnx *o) {
    om_id q = IN(0), k = IN(1), v = IN(2), mask = IN(3);
    double scale;
    OM_TRY(map_attention_scale(o, q, &scale));
    SET(0, map_attention_node(o, q, k, v, mask, scale, FLT("dropout_p", 0)));
    return o->cx->status;
}

/* ai.onnx Attention: (b, h, t, d), or (b, t, h*d) with the numbers of heads as attributes. */
static om_status map_attention23(om_onnx *o) {
    om_graph *g = o->g;
    om_id in[3], mask = IN(3);
    bool flat = map_type(o, 0).rank == 3;
    for (int i = 0; i < 3; i++) {
        in[i] = IN(i);
        om_type t = map_type_of(o, in[i]);
        if (FAILED) return o->cx->status;
        ONNX_CHECK(o, t.rank == (flat ? 3 : 4), "operand %d has rank %d", i, t.rank);
        if (!flat) continue;
        int64_t heads = INT(i ? "kv_num_heads" : "q_num_heads", 0);
        ONNX_CHECK(o, heads > 0, "q_num_heads and kv_num_heads are needed for operands of rank 3");
        om_dim d[4] = {t.dim[0], t.dim[1], heads, om_dim_div(g, t.dim[2], heads)};
        in[i] = om_b_transpose(g, om_b_reshape(g, in[i], d, 4), 1, 2);
    }
    if (om_onnx_has(o, 4) || om_onnx_has(o, 5) || FLT("softcap", 0) != 0)
        REFUSE("past keys and values and softcap are not supported");
    double scale;
    OM_TRY(map_attention_scale(o, in[0], &scale));
    om_id y = map_attention_node(o, in[0], in[1], in[2], mask, scale, 0);
    if (flat && y != OM_NONE) {
        om_type t = *om_ty(g, y);
        om_dim d[3] = {t.dim[0], t.dim[2], om_dim_mul(g, t.dim[1], t.dim[3])};
        y = om_b_reshape(g, om_b_transpose(g, y, 1, 2), d, 3);
    }
    SET(0, y);
    return o->cx->status;
}

/* --- dropout, losses --------------------------------------------------------------------------------- */

static om_status map_dropout(om_onnx *o) {
    om_graph *g = o->g;
    double p = 0.5, training = 0;
    OM_TRY(map_scalar(o, 1, "the ratio", &p));
    OM_TRY(map_scalar(o, 2, "training_mode", &training));
    ONNX_CHECK(o, p >= 0 && p <= 1, "ratio %g; 0 to 1 is allowed", p);
    om_type t = map_type(o, 0);
    if (!training || p == 0) {
        om_onnx_alias(o, 0, 0);
        if (om_onnx_wants(o, 1)) SET(1, om_b_fill(g, OM_BOOL, t.dim, t.rank, 1));
        return o->cx->status;
    }
    om_id y = om_make(g, &om_op_dropout, OM_IN(IN(0)), OM_ATTRS(OM_AF("p", p)));
    map_random(o);
    uint64_t stream = om_last(g)->rng;
    SET(0, y);
    if (om_onnx_wants(o, 1)) { /* the same stream over ones: zero exactly where the element was dropped */
        om_id ones = om_make(g, &om_op_dropout, OM_IN(om_b_fill(g, t.dtype, t.dim, t.rank, 1)), OM_ATTRS(OM_AF("p", p)));
        om_last(g)->rng = stream;
        SET(1, MAKE2(ne, ones, map_like(o, ones, 0)));
    }
    return o->cx->status;
}

/* (n, c, d...) -> (n*d.., c) */
static om_id map_classes_last(om_onnx *o, om_id x, const om_type *t) {
    int perm[OM_RANK], n = 0;
    if (t->rank == 2) return x;
    om_dim rows = 1;
    for (int i = 0; i < t->rank; i++)
        if (i != 1) perm[n++] = i, rows = om_dim_mul(o->g, rows, t->dim[i]);
    perm[n] = 1;
    return om_b_reshape(o->g, om_b_permute(o->g, x, perm), (om_dim[]){rows, t->dim[1]}, 2);
}

/* ortmodule.CrossEntropy and SoftmaxCrossEntropyLoss. */
static om_status map_cross_entropy(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), labels = IN(1), weight = IN(2);
    om_type t = map_type_of(o, x), lt = map_type_of(o, labels);
    const char *how = om_onnx_str(o, "reduction", "mean");
    int reduction = !strcmp(how, "none") ? 0 : !strcmp(how, "mean") ? 1 : !strcmp(how, "sum") ? 2 : -1;
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, reduction >= 0, "reduction '%.40s'; none, mean and sum are defined", how);
    ONNX_CHECK(o, lt.dtype == OM_I64 || lt.dtype == OM_I32, "labels are %s; class indices (int64 or int32) are needed",
               om_dtype_name(lt.dtype));
    ONNX_CHECK(o, t.rank >= 1 && lt.rank == t.rank - 1, "scores of rank %d with labels of rank %d; one less is needed", t.rank, lt.rank);
    om_id flat;
    if (t.rank == 1) {
        flat = om_b_reshape(g, x, (om_dim[]){1, t.dim[0]}, 2);
        labels = om_b_reshape(g, labels, (om_dim[]){1}, 1);
    } else {
        flat = map_classes_last(o, x, &t);
        om_dim rows[1] = {om_dim_numel(g, &lt)};
        labels = om_b_reshape(g, labels, rows, 1);
    }
    om_id loss = om_make(g, &om_op_cross_entropy, (om_id[]){flat, labels, weight}, 3,
                         OM_ATTRS(OM_AI("ignore_index", INT("ignore_index", -100)), OM_AF("label_smoothing", FLT("label_smoothing", 0)),
                                  OM_AI("reduction", reduction)));
    if (reduction == 0) loss = om_b_reshape(g, loss, lt.dim, lt.rank);
    SET(0, loss);
    if (om_onnx_wants(o, 1)) SET(1, om_make(g, &om_op_log_softmax, OM_IN(x), OM_ATTRS(OM_AI("axis", t.rank > 1))));
    return o->cx->status;
}

/* -weight[target] * x[n, target, d...]; ignored targets count nothing, mean divides by the weights that count. */
static om_status map_nll(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), target = IN(1), weight = IN(2);
    om_type t = map_type_of(o, x), lt = map_type_of(o, target);
    const char *how = om_onnx_str(o, "reduction", "mean");
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank >= 2 && lt.rank == t.rank - 1, "scores of rank %d with labels of rank %d; one less is needed", t.rank, lt.rank);
    ONNX_CHECK(o, !strcmp(how, "none") || !strcmp(how, "mean") || !strcmp(how, "sum"),
               "reduction '%.40s'; none, mean and sum are defined", how);
    om_id zero = map_like(o, x, 0);
    om_id ignored = MAKE2(eq, target, om_scalar(g, lt.dtype, (double)INT("ignore_index", -100)));
    om_id safe = map_where(o, ignored, om_scalar(g, lt.dtype, 0), target);
    om_dim d[OM_RANK];
    for (int i = 0; i < t.rank; i++) d[i] = i == 1 ? 1 : t.dim[i];
    om_id picked = om_make(g, &om_op_gather_elements, OM_IN(x, om_b_reshape(g, safe, d, t.rank)), OM_ATTRS(OM_AI("axis", 1)));
    picked = om_b_reshape(g, picked, lt.dim, lt.rank);
    om_id w = weight == OM_NONE ? map_like(o, x, 1) : om_make(g, &om_op_gather, OM_IN(weight, safe), OM_ATTRS(OM_AI("axis", 0)));
    w = map_where(o, ignored, zero, w);
    om_id y = MAKE1(neg, MAKE2(mul, map_where(o, ignored, zero, picked), w));
    uint32_t all = (1u << lt.rank) - 1;
    if (strcmp(how, "none") != 0) y = om_b_sum(g, y, all, false);
    if (!strcmp(how, "mean")) y = MAKE2(div, y, om_b_sum(g, w, all, false));
    SET(0, y);
    return o->cx->status;
}

/* --- windows ----------------------------------------------------------------------------------------- */

typedef struct map_window { int spatial; int64_t kernel[3], stride[3], dilation[3], lo[3], hi[3]; } map_window;

static om_status map_window_of(om_onnx *o, const om_type *x, const om_type *w, map_window *m) {
    m->spatial = x->rank - 2;
    ONNX_CHECK(o, m->spatial >= 1 && m->spatial <= 3, "x has rank %d; 3 to 5 are supported", x->rank);
    int n = m->spatial;
    for (int i = 0; i < n; i++)
        if (w && !om_dim_const(o->g, w->dim[2 + i], &m->kernel[i])) REFUSE("the kernel's sizes must be numbers");
    if (!w) OM_TRY(map_ints(o, "kernel_shape", n, 0, m->kernel));
    OM_TRY(map_ints(o, "strides", n, 1, m->stride));
    OM_TRY(map_ints(o, "dilations", n, 1, m->dilation));
    int64_t pads[6];
    OM_TRY(map_ints(o, "pads", 2 * n, 0, pads));
    const char *mode = om_onnx_str(o, "auto_pad", "NOTSET");
    for (int i = 0; i < n; i++) {
        ONNX_CHECK(o, m->kernel[i] > 0 && m->kernel[i] < INT32_MAX && m->stride[i] > 0 && m->stride[i] < INT32_MAX &&
                   m->dilation[i] > 0 && m->dilation[i] < INT32_MAX,
                   "kernel %lld, stride %lld, dilation %lld along axis %d", (long long)m->kernel[i], (long long)m->stride[i],
                       (long long)m->dilation[i], i + 2);
        ONNX_CHECK(o, pads[i] >= 0 && pads[n + i] >= 0 && pads[i] < INT32_MAX && pads[n + i] < INT32_MAX, "pads must not be negative");
        m->lo[i] = pads[i], m->hi[i] = pads[n + i];
        if (!strcmp(mode, "VALID")) m->lo[i] = m->hi[i] = 0;
        if (strncmp(mode, "SAME_", 5) != 0) continue;
        int64_t size;
        if (!om_dim_const(o->g, x->dim[2 + i], &size)) REFUSE("auto_pad %.20s needs sizes that are numbers", mode);
        int64_t out = (size + m->stride[i] - 1) / m->stride[i],
            all = (out - 1) * m->stride[i] + (m->kernel[i] - 1) * m->dilation[i] + 1 - size;
        if (all < 0) all = 0;
        m->lo[i] = !strcmp(mode, "SAME_LOWER") ? (all + 1) / 2 : all / 2;
        m->hi[i] = all - m->lo[i];
    }
    return OM_OK;
}

/* The kernels pad both sides alike: what is left over is padded before. */
static om_id map_window_pad(om_onnx *o, om_id x, map_window *m, double value) {
    om_dim lo[OM_RANK] = {0}, hi[OM_RANK] = {0};
    bool any = false;
    for (int i = 0; i < m->spatial; i++) {
        if (m->lo[i] == m->hi[i]) continue;
        lo[2 + i] = m->lo[i], hi[2 + i] = m->hi[i];
        m->lo[i] = m->hi[i] = 0;
        any = true;
    }
    int rank = m->spatial + 2;
    return any ? om_make(o->g, &om_op_pad, OM_IN(x), OM_ATTRS(OM_AD("lo", lo, rank), OM_AD("hi", hi, rank), OM_AF("value", value))) : x;
}

static om_status map_conv(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), w = IN(1), b = IN(2);
    om_type xt = map_type_of(o, x), wt = map_type_of(o, w);
    map_window m;
    om_dim s[3], p[3], d[3];
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, xt.rank == wt.rank, "x has rank %d, w %d", xt.rank, wt.rank);
    OM_TRY(map_window_of(o, &xt, &wt, &m));
    x = map_window_pad(o, x, &m, 0);
    SET(0, om_make(g, &om_op_conv, (om_id[]){x, w, b}, 3, OM_ATTRS(map_dims_attr("stride", m.stride, m.spatial, g, s),
                                                                   map_dims_attr("pad", m.lo, m.spatial, g, p),
                                                                          map_dims_attr("dilation", m.dilation, m.spatial, g, d),
                                                                              OM_AI("groups", INT("group", 1)))));
    return o->cx->status;
}

static om_status map_max_pool(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    map_window m;
    om_dim k[3], s[3], p[3], d[3];
    if (FAILED) return o->cx->status;
    OM_TRY(map_window_of(o, &t, NULL, &m));
    x = map_window_pad(o, x, &m, -INFINITY);
    om_id y = om_make(g, &om_op_max_pool, OM_IN(x), OM_ATTRS(map_dims_attr("kernel", m.kernel, m.spatial, g, k),
                                                             map_dims_attr("stride", m.stride, m.spatial, g, s),
                                                                 map_dims_attr("pad", m.lo, m.spatial, g, p),
                                                            map_dims_attr("dilation", m.dilation, m.spatial, g, d),
                                                                OM_AI("ceil", INT("ceil_mode", 0))));
    SET(0, y);
    if (om_onnx_wants(o, 1) && !FAILED) { /* ONNX counts over the whole tensor, the engine within one plane */
        if (INT("storage_order", 0) || x != IN(0)) REFUSE("Indices with storage_order or asymmetric pads");
        om_dim planes = om_dim_mul(g, t.dim[0], t.dim[1]), area = 1, shape[OM_RANK] = {t.dim[0], t.dim[1], 1, 1, 1};
        for (int i = 2; i < t.rank; i++) area = om_dim_mul(g, area, t.dim[i]);
        om_id base = om_make(g, &om_op_iota, NULL, 0, OM_ATTRS(OM_AD("shape", &planes, 1), OM_AI("dtype", OM_I64)));
        base = om_b_reshape(g, MAKE2(mul, base, om_onnx_dim_value(o, area, OM_I64)), shape, t.rank);
        SET(1, MAKE2(add, y + 1, base));
    }
    return o->cx->status;
}

static om_status map_avg_pool(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    map_window m;
    om_dim k[3], s[3], p[3];
    int64_t count = INT("count_include_pad", 0) != 0;
    if (FAILED) return o->cx->status;
    OM_TRY(map_window_of(o, &t, NULL, &m));
    for (int i = 0; i < m.spatial; i++) {
        if (m.dilation[i] != 1) REFUSE("AveragePool with dilation");
        if (m.lo[i] != m.hi[i] && (!count || INT("ceil_mode", 0))) REFUSE("asymmetric pads need count_include_pad = 1 and ceil_mode = 0");
    }
    x = map_window_pad(o, x, &m, 0);
    SET(0, om_make(g, &om_op_avg_pool, OM_IN(x), OM_ATTRS(map_dims_attr("kernel", m.kernel, m.spatial, g, k),
                                                          map_dims_attr("stride", m.stride, m.spatial, g, s),
                                                              map_dims_attr("pad", m.lo, m.spatial, g, p),
                                                                    OM_AI("ceil", INT("ceil_mode", 0)),
                                                                        OM_AI("count_include_pad", count))));
    return o->cx->status;
}

static om_status map_global_pool(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    ONNX_CHECK(o, t.rank >= 3, "x has rank %d", t.rank);
    SET(0, map_reduce_op(o, o->row->op, x, ((1u << t.rank) - 1) & ~3u, true));
    return o->cx->status;
}

/* ortmodule.AdaptiveAvgPool: attribute output_size */
static om_status map_adaptive_avg_pool(om_onnx *o) {
    om_id x = IN(0);
    om_type t = map_type_of(o, x);
    int64_t size[3];
    om_dim d[3];
    ONNX_CHECK(o, t.rank >= 3 && t.rank <= 5, "x has rank %d; 3 to 5 are supported", t.rank);
    OM_TRY(map_ints(o, "output_size", t.rank - 2, 1, size));
    SET(0, om_make(o->g, &om_op_adaptive_avg_pool, OM_IN(x), OM_ATTRS(map_dims_attr("size", size, t.rank - 2, o->g, d))));
    return o->cx->status;
}

/* --- the host ---------------------------------------------------------------------------------------- */

/* ATen, PythonOp, PyModule: PyTorch computes it. Output types come from the file. */
static om_status map_host(om_onnx *o) {
    om_graph *g = o->g;
    int n_out = (int)o->node->n_output, n_attr = 3;
    om_id *in = om_arena_alloc(&o->tmp, ((size_t)o->n_in + 1) * sizeof *in);
    om_type *t = om_arena_alloc(&o->tmp, (size_t)n_out * sizeof *t);
    om_attr *attr = om_arena_alloc(&o->tmp, ((size_t)n_out + 3) * sizeof *attr);
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
        t[k] = (om_type){.dtype = OM_U8, .rank = 1, .device = -1}; /* an output nobody names */
        if (om_onnx_wants(o, k)) {
            OM_TRY(om_onnx_value_type(o, o->node->output[k], OM_ONNX_NAMED, &t[k], &found));
            ONNX_CHECK(o, found, "output %d '%.80s' has no value_info; the type of what the host computes must be given",
                       k, o->node->output[k]);
        }
        float_out |= om_is_float(t[k].dtype);
        dtype[k] = t[k].dtype;
        char *name = om_arena_alloc(&o->tmp, 16);
        if (!name) return o->cx->status;
        snprintf(name, 16, "shape%d", k);
        attr[n_attr++] = OM_AD(name, t[k].dim, t[k].rank);
    }
    attr[0] = OM_AI("index", index);
    attr[1] = OM_AD("out_dtype", dtype, n_out);
    attr[2] = OM_AI("diff", INT("diff", float_in && float_out));
    om_id y = om_make(g, &om_op_host, in, o->n_in, attr, n_attr);
    for (int k = 0; k < n_out; k++)
        if (om_onnx_wants(o, k)) SET(k, y == OM_NONE ? y : y + (om_id)k);
    return o->cx->status;
}

/* --- the table ---------------------------------------------------------------------------------------- */

#define S(name) om_onnx_size_##name
#define UNARY(onnx, engine) {"", onnx, 1, 1, 1, map_unary, NULL, &om_op_##engine}
#define BINARY(onnx, engine) {"", onnx, 2, 2, 1, map_binary, NULL, &om_op_##engine}
const om_onnx_op om_onnx_ops[] = {
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
    UNARY("Exp", exp), UNARY("Log", log), UNARY("Sqrt", sqrt), UNARY("Reciprocal", reciprocal), UNARY("Tanh", tanh),
    UNARY("Sigmoid", sigmoid), UNARY("Erf", erf), UNARY("Sin", sin), UNARY("Cos", cos), UNARY("Relu", relu), UNARY("Softplus", softplus),
    UNARY("Sign", sign), UNARY("Floor", floor), UNARY("Ceil", ceil), UNARY("Round", round), UNARY("IsNaN", isnan),
    {"", "Neg", 1, 1, 1, map_unary, S(neg), &om_op_neg},
    {"", "Abs", 1, 1, 1, map_unary, S(abs), &om_op_abs},
    {"", "Not", 1, 1, 1, map_unary, S(not), &om_op_not},
    {"", "BitwiseNot", 1, 1, 1, map_unary, NULL, &om_op_not},
    {"", "IsInf", 1, 1, 1, map_isinf, NULL, NULL},
    {"", "Gelu", 1, 1, 1, map_gelu, NULL, NULL},
    {"", "LeakyRelu", 1, 1, 1, map_leaky_relu, NULL, NULL},
    {"", "PRelu", 2, 2, 1, map_prelu, NULL, NULL},
    {"", "Elu", 1, 1, 1, map_elu, NULL, NULL},
    {"", "HardSigmoid", 1, 1, 1, map_hard_sigmoid, NULL, NULL},
    {"", "HardSwish", 1, 1, 1, map_hard_sigmoid, NULL, NULL},
    {"", "Clip", 1, 3, 1, map_clip, NULL, NULL},
    {"", "Cast", 1, 1, 1, map_cast, S(cast), NULL},
    {"", "CastLike", 2, 2, 1, map_cast, NULL, NULL},
    {"", "Identity", 1, 1, 1, map_identity, NULL, NULL},
    {"", "Add", 2, 2, 1, map_binary, S(arith), &om_op_add},
    {"", "Sub", 2, 2, 1, map_binary, S(arith), &om_op_sub},
    {"", "Mul", 2, 2, 1, map_binary, S(arith), &om_op_mul},
    {"", "Div", 2, 2, 1, map_binary, S(arith), &om_op_div},
    {"", "Mod", 2, 2, 1, map_mod, S(arith), NULL},
    {"", "Pow", 2, 2, 1, map_pow, NULL, NULL},
    {"", "Max", 1, -1, 1, map_variadic, S(arith), &om_op_maximum},
    {"", "Min", 1, -1, 1, map_variadic, S(arith), &om_op_minimum},
    {"", "Sum", 1, -1, 1, map_variadic, NULL, &om_op_add},
    {"", "Mean", 1, -1, 1, map_mean, NULL, NULL},
    {"", "And", 2, 2, 1, map_binary, S(logic), &om_op_and},
    {"", "Or", 2, 2, 1, map_binary, S(logic), &om_op_or},
    {"", "Xor", 2, 2, 1, map_binary, S(logic), &om_op_xor},
    BINARY("BitwiseAnd", and), BINARY("BitwiseOr", or), BINARY("BitwiseXor", xor),
    {"", "Equal", 2, 2, 1, map_binary, S(compare), &om_op_eq},
    {"", "Less", 2, 2, 1, map_binary, S(compare), &om_op_lt},
    {"", "LessOrEqual", 2, 2, 1, map_binary, S(compare), &om_op_le},
    {"", "Greater", 2, 2, 1, map_binary, S(compare), &om_op_gt},
    {"", "GreaterOrEqual", 2, 2, 1, map_binary, S(compare), &om_op_ge},
    {"", "Where", 3, 3, 1, map_where_op, S(where), NULL},

    {"", "Constant", 0, 0, 1, om_onnx_constant, NULL, NULL},
    {"", "ConstantOfShape", 1, 1, 1, map_constant_of_shape, S(constant_of_shape), NULL},
    {"", "Range", 3, 3, 1, map_range, S(range), NULL},
    {"", "Shape", 1, 1, 1, NULL, S(shape), NULL},
    {"", "Size", 1, 1, 1, NULL, S(size), NULL},
    {"", "Reshape", 2, 2, 1, map_reshape, S(rank), NULL},
    {"", "Flatten", 1, 1, 1, map_flatten, NULL, NULL},
    {"", "Squeeze", 1, 2, 1, map_squeeze, S(rank), NULL},
    {"", "Unsqueeze", 1, 2, 1, map_unsqueeze, S(rank), NULL},
    {"", "Transpose", 1, 1, 1, map_transpose, NULL, NULL},
    {"", "Expand", 2, 2, 1, map_expand, S(expand), NULL},
    {"", "Slice", 3, 5, 1, map_slice, S(slice), NULL},
    {"", "Concat", 1, -1, 1, map_concat, S(concat), NULL},
    {"", "Split", 1, 2, 64, map_split, NULL, NULL},
    {"", "Pad", 1, 4, 1, map_pad, NULL, NULL},
    {"", "Tile", 2, 2, 1, map_tile, NULL, NULL},
    {"", "CumSum", 2, 2, 1, map_cumsum, NULL, NULL},
    {"", "Trilu", 1, 2, 1, map_trilu, NULL, NULL},
    {"", "OneHot", 3, 3, 1, map_one_hot, NULL, NULL},

    {"", "Gather", 2, 2, 1, map_gather, S(gather), NULL},
    {"", "GatherElements", 2, 2, 1, map_gather_elements, NULL, NULL},
    {"", "GatherND", 2, 2, 1, map_gather_nd, NULL, NULL},
    {"", "ScatterElements", 3, 3, 1, map_scatter_elements, NULL, NULL},
    {"", "ScatterND", 3, 3, 1, map_scatter_nd, NULL, NULL},

    {"", "ReduceSum", 1, 2, 1, map_reduce, S(reduce), &om_op_reduce_sum},
    {"", "ReduceMean", 1, 2, 1, map_reduce, NULL, &om_op_reduce_mean},
    {"", "ReduceMax", 1, 2, 1, map_reduce, S(reduce), &om_op_reduce_max},
    {"", "ReduceMin", 1, 2, 1, map_reduce, S(reduce), &om_op_reduce_min},
    {"", "ReduceProd", 1, 2, 1, map_reduce, S(reduce), &om_op_reduce_prod},
    {"", "ReduceL1", 1, 2, 1, map_reduce, NULL, NULL},
    {"", "ReduceL2", 1, 2, 1, map_reduce, NULL, NULL},
    {"", "ReduceSumSquare", 1, 2, 1, map_reduce, NULL, NULL},
    {"", "ReduceLogSum", 1, 2, 1, map_reduce, NULL, NULL},
    {"", "ReduceLogSumExp", 1, 2, 1, map_reduce, NULL, NULL},
    {"", "ArgMax", 1, 1, 1, map_arg, NULL, &om_op_argmax},
    {"", "ArgMin", 1, 1, 1, map_arg, NULL, &om_op_argmin},

    {"", "Softmax", 1, 1, 1, map_softmax, NULL, &om_op_softmax},
    {"", "LogSoftmax", 1, 1, 1, map_softmax, NULL, &om_op_log_softmax},
    {"", "LayerNormalization", 2, 3, 3, map_layer_norm, NULL, &om_op_layer_norm},
    {"", "RMSNormalization", 2, 2, 1, map_layer_norm, NULL, &om_op_rms_norm},
    {"", "SimplifiedLayerNormalization", 2, 2, 2, map_layer_norm, NULL, &om_op_rms_norm},
    {"", "GroupNormalization", 3, 3, 1, map_group_norm, NULL, NULL},
    {"", "InstanceNormalization", 3, 3, 1, map_group_norm, NULL, NULL},
    {"", "BatchNormalization", 5, 5, 3, map_batch_normalization, NULL, NULL},

    {"", "MatMul", 2, 2, 1, map_matmul, NULL, NULL},
    {"", "Gemm", 2, 3, 1, map_gemm, NULL, NULL},
    {"", "Attention", 3, 6, 1, map_attention23, NULL, NULL},
    {"", "Dropout", 1, 3, 2, map_dropout, NULL, NULL},
    {"", "SoftmaxCrossEntropyLoss", 2, 3, 2, map_cross_entropy, NULL, NULL},
    {"", "NegativeLogLikelihoodLoss", 2, 3, 1, map_nll, NULL, NULL},
    {"", "Conv", 2, 3, 1, map_conv, NULL, NULL},
    {"", "MaxPool", 1, 1, 2, map_max_pool, NULL, NULL},
    {"", "AveragePool", 1, 1, 1, map_avg_pool, NULL, NULL},
    {"", "GlobalAveragePool", 1, 1, 1, map_global_pool, NULL, &om_op_reduce_mean},
    {"", "GlobalMaxPool", 1, 1, 1, map_global_pool, NULL, &om_op_reduce_max},

    {"com.microsoft", "FusedMatMul", 2, 2, 1, map_fused_matmul, NULL, NULL},
    {"com.microsoft", "Gelu", 1, 1, 1, map_bias_gelu, NULL, &om_op_gelu},
    {"com.microsoft", "BiasGelu", 2, 2, 1, map_bias_gelu, NULL, &om_op_gelu},
    {"com.microsoft", "FastGelu", 1, 2, 1, map_bias_gelu, NULL, &om_op_gelu_tanh},
    {"com.microsoft", "QuickGelu", 1, 1, 1, map_quick_gelu, NULL, NULL},
    {"com.microsoft", "PythonOp", 0, -1, 64, map_host, NULL, NULL},
    {"org.pytorch.aten", "ATen", 0, -1, 64, map_host, NULL, NULL},

    {"ortmodule", "Embedding", 2, 2, 1, map_embedding, NULL, NULL},
    {"ortmodule", "Attention", 3, 4, 1, map_attention, NULL, NULL},
    {"ortmodule", "CrossEntropy", 2, 3, 1, map_cross_entropy, NULL, NULL},
    {"ortmodule", "BatchNorm", 1, 5, 3, map_batch_norm, NULL, NULL},
    {"ortmodule", "AdaptiveAvgPool", 1, 1, 1, map_adaptive_avg_pool, NULL, NULL},
    {"ortmodule", "PyModule", 0, -1, 64, map_host, NULL, NULL},
    {"ortmodule", "StopGradient", 1, 1, 1, map_unary, NULL, &om_op_stop_grad},
    {"ortmodule", "Log1p", 1, 1, 1, map_unary, NULL, &om_op_log1p},
    {"ortmodule", "Expm1", 1, 1, 1, map_unary, NULL, &om_op_expm1},
    {"ortmodule", "StraightThrough", 2, 2, 1, map_binary, NULL, &om_op_straight_through},
    {NULL, NULL, 0, 0, 0, NULL, NULL, NULL},
};
