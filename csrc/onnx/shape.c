/* shape.c - what moves, cuts and makes tensors: reshape to one-hot. Form of a rule: onnx/map.h. */
#include "onnx/map.h"

#include <math.h>

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
            ONNX_CHECK(o, i < t.rank, "shape[%u] = 0 copies a dimension the operand of rank %d does not have", i,
                       t.rank);
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
        ONNX_CHECK(o, !om_dim_const(g, rest, &r) || r != 0,
                   "the dimension -1 cannot be inferred: the others multiply to 0");
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
    om_type t = om_map_type_of(o, x);
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
    om_type t = om_map_type_of(o, x);
    uint32_t mask = 0;
    OM_TRY(om_map_axes(o, 1, t.rank, false, &mask));
    om_dim d[OM_RANK];
    int n = 0;
    for (int i = 0; i < t.rank; i++) {
        int64_t c;
        bool drop = mask ? mask >> i & 1 : t.dim[i] == 1;
        ONNX_CHECK(o, !mask || !drop || !om_dim_const(o->g, t.dim[i], &c) || c == 1,
                   "axis %d has size %lld, only 1 can be squeezed", i, (long long)t.dim[i]);
        if (!drop) d[n++] = t.dim[i];
    }
    SET(0, om_b_reshape(o->g, x, d, n));
    return o->cx->status;
}

static om_status map_unsqueeze(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    const om_dim *list;
    uint32_t n, mask = 0;
    OM_TRY(om_map_list_or_attr(o, 1, "axes", &list, &n));
    ONNX_CHECK(o, t.rank + n <= OM_RANK, "rank %u, at most %d", t.rank + n, OM_RANK);
    OM_TRY(om_map_axes(o, 1, t.rank + (int)n, false, &mask));
    om_dim d[OM_RANK];
    for (int i = 0, k = 0; i < t.rank + (int)n; i++) d[i] = mask >> i & 1 ? 1 : t.dim[k++];
    SET(0, om_b_reshape(o->g, x, d, t.rank + (int)n));
    return o->cx->status;
}

static om_status map_transpose(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int64_t p[OM_RANK];
    int perm[OM_RANK];
    uint32_t n, seen = 0;
    const int64_t *a = om_onnx_ints(o, "perm", &n);
    OM_TRY(om_map_ints(o, "perm", t.rank, 0, p));
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
            return om_onnx_err(o, OM_UNSUPPORTED,
                               "a slice with negative step of an axis of unknown size must cover the whole axis"),
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
        if (axes) OM_TRY(om_map_known(o, &axes[i], 1, "axes", &a));
        if (steps) OM_TRY(om_map_known(o, &steps[i], 1, "steps", &t));
        OM_TRY(om_map_axis(o, a, rank, &axis));
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
    OM_TRY(om_map_axis(o, INT("axis", 0), om_map_type(o, 0).rank, &axis));
    if (o->n_in == 1) om_onnx_alias(o, 0, 0);
    else SET(0, om_make(o->g, &om_op_concat, in, o->n_in, OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

static om_status map_split(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int axis = 0, parts = (int)o->node->n_output;
    const om_dim *list;
    uint32_t n;
    OM_TRY(om_map_axis(o, INT("axis", 0), t.rank, &axis));
    OM_TRY(om_map_list_or_attr(o, 1, "split", &list, &n));
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
            p = side ? om_b_slice(g, x, axis, om_dim_sub(g, one_less, k), one_less, 1)
                     : om_b_slice(g, x, axis, 1, om_dim_add(g, k, 1), 1);
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
    om_type t = om_map_type_of(o, x);
    const om_dim *pads;
    uint32_t n, na = 0;
    double value = 0;
    int64_t axes[OM_RANK];
    const char *mode = om_onnx_str(o, "mode", "constant");
    OM_TRY(om_map_list_or_attr(o, 1, "pads", &pads, &n));
    for (int i = 0; i < t.rank; i++) axes[i] = i;
    na = t.rank;
    if (om_onnx_has(o, 3)) {
        const om_dim *list = om_onnx_list(o, 3, &na);
        if (FAILED) return o->cx->status;
        ONNX_CHECK(o, na <= t.rank, "%u axes for rank %d", na, t.rank);
        OM_TRY(om_map_known(o, list, na, "axes", axes));
    }
    ONNX_CHECK(o, pads && n == 2 * na, "pads has %u entries, %u are needed", n, 2 * na);
    OM_TRY(om_map_scalar(o, 2, "the padding value", &value));
    om_dim lo[OM_RANK] = {0}, hi[OM_RANK] = {0};
    bool any = false;
    for (uint32_t i = 0; i < na; i++) {
        int axis = 0;
        OM_TRY(om_map_axis(o, axes[i], t.rank, &axis));
        lo[axis] = pads[i], hi[axis] = pads[na + i];
        any |= lo[axis] || hi[axis];
    }
    if (!any) {
        om_onnx_alias(o, 0, 0);
    } else if (!strcmp(mode, "constant")) {
        SET(0, om_make(g, &om_op_pad, OM_IN(x),
                       OM_ATTRS(OM_AD("lo", lo, t.rank), OM_AD("hi", hi, t.rank), OM_AF("value", value))));
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
        int64_t one;
        if (om_dim_const(g, t.dim[i], &one) && one == 1) { /* a view */
            t.dim[i] = rep[i];
            x = om_b_expand(g, x, t.dim, t.rank);
            continue;
        }
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
                return FAILED ? o->cx->status
                              : om_onnx_err(o, OM_UNSUPPORTED, "a Range of floats must have constant bounds");
        double n = f[2] != 0 ? ceil((f[1] - f[0]) / f[2]) : -1;
        ONNX_CHECK(o, f[2] != 0 && n < 2147483648.0 && n == n, "start %g, limit %g, delta %g", f[0], f[1], f[2]);
        om_dim d = n > 0 ? (om_dim)n : 0;
        SET(0, om_make(g, &om_op_iota, NULL, 0,
                       OM_ATTRS(OM_AD("shape", &d, 1), OM_AI("dtype", t.dtype), OM_AF("start", f[0]),
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
    OM_TRY(om_map_known(o, &b[2], 1, "delta", &step));
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
    SET(0, om_make(g, &om_op_iota, NULL, 0,
                   OM_ATTRS(OM_AD("shape", &n, 1), OM_AI("dtype", t.dtype), OM_AD("start", &b[0], 1),
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
                  to = {.data = om_is_float(dtype) ? (void *)&value : (void *)&whole,
                        .dtype = om_is_float(dtype) ? OM_F64 : OM_I64,
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
    OM_TRY(om_map_scalar(o, 1, "the axis", &a));
    ONNX_CHECK(o, fabs(a) < 1e9, "axis %g", a);
    OM_TRY(om_map_axis(o, (int64_t)a, om_map_type(o, 0).rank, &axis));
    SET(0, om_make(o->g, &om_op_cumsum, OM_IN(IN(0)),
                   OM_ATTRS(OM_AI("axis", axis), OM_AI("exclusive", INT("exclusive", 0)),
                            OM_AI("reverse", INT("reverse", 0)))));
    return o->cx->status;
}

static om_status map_trilu(om_onnx *o) {
    double k = 0;
    OM_TRY(om_map_scalar(o, 1, "k", &k));
    ONNX_CHECK(o, fabs(k) < 1e15, "k is %g", k);
    om_id x = IN(0);
    SET(0,
        om_make(o->g, &om_op_trilu, OM_IN(x), OM_ATTRS(OM_AI("k", (int64_t)k), OM_AI("upper", INT("upper", 1) != 0))));
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
    OM_TRY(om_map_axis(o, a, t.rank + 1, &axis));
    if (!om_map_index_nonneg(g, idx, 0)) {
        om_id size = om_onnx_dim_value(o, depth[0], t.dtype);
        idx = om_map_where(o, MAKE2(lt, idx, om_map_like(o, idx, 0)), MAKE2(add, idx, size), idx);
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
    SET(0, om_map_where(o, hit, on, off));
    return o->cx->status;
}

/* --- the rows ------------------------------------------------------------------------------------------ */

#define S(name) om_onnx_size_##name
const om_onnx_op om_onnx_ops_shape[] = {
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
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
    {0},
};
