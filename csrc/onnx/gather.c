/* gather.c - gathers, scatters and reductions. Form of a rule: onnx/map.h. */
#include "onnx/map.h"

#include <float.h>

/* --- gather and scatter ------------------------------------------------------------------------------- */

static om_status map_gather(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int axis = 0;
    OM_TRY(om_map_axis(o, INT("axis", 0), t.rank, &axis));
    const om_onnx_val *k = om_onnx_operand(o, 1);
    const bool as_is = om_onnx_index_nonneg(o);
    if (k->list && k->rank == 0) { /* one known index: a view, where a gather would copy */
        om_dim i = k->list[0];
        int64_t lo, hi, c, n;
        om_onnx_bounds(g, i, 0, &lo, &hi);
        if (om_dim_const(g, i, &c) && om_dim_const(g, t.dim[axis], &n))
            ONNX_CHECK(o, c >= (as_is ? 0 : -n) && c < n, "index %lld, but axis %d has size %lld", (long long)c, axis,
                       (long long)n);
        if (lo >= 0 || (hi < 0 && !as_is)) {
            if (hi < 0) i = om_dim_add(g, i, t.dim[axis]);
            om_id s = om_b_slice(g, x, axis, i, om_dim_add(g, i, 1), 1);
            om_dim d[OM_RANK];
            for (int a = 0, m = 0; a < t.rank; a++)
                if (a != axis) d[m++] = t.dim[a];
            SET(0, om_b_reshape(g, s, d, t.rank - 1));
            return o->cx->status;
        }
    }
    om_id idx = om_map_index(o, IN(1), t.dim[axis]);
    SET(0, om_make(g, &om_op_gather, OM_IN(x, idx), OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

/* ortmodule.Embedding: torch's indices are never negative; padding_idx concerns only the gradient. */
static om_status map_embedding(om_onnx *o) {
    om_id w = IN(0), idx = IN(1);
    om_type t = om_map_type_of(o, w);
    ONNX_CHECK(o, t.rank == 2, "the weight has rank %d, 2 is needed", t.rank);
    int64_t pad = INT("padding_idx", -1), n;
    if (om_onnx_attr(o, "padding_idx") && pad < 0 && om_dim_const(o->g, t.dim[0], &n) && pad != -1) pad += n;
    SET(0, om_make(o->g, &om_op_gather, OM_IN(w, idx), OM_ATTRS(OM_AI("axis", 0), OM_AI("padding_idx", pad))));
    return o->cx->status;
}

static om_status map_gather_elements(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int axis = 0;
    OM_TRY(om_map_axis(o, INT("axis", 0), t.rank, &axis));
    om_id idx = om_map_index(o, IN(1), t.dim[axis]);
    SET(0, om_make(o->g, &om_op_gather_elements, OM_IN(x, idx), OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

static om_status map_reduction(om_onnx *o, int64_t *reduce) {
    const char *how = om_onnx_str(o, "reduction", "none");
    *reduce = !strcmp(how, "add");
    if (o->row->op == &om_op_scatter_elements && (!strcmp(how, "max") || !strcmp(how, "min"))) {
        *reduce = !strcmp(how, "max") ? 2 : 3;
        return OM_OK;
    }
    if (!*reduce && strcmp(how, "none") != 0) REFUSE("reduction '%.40s'; none and add are supported", how);
    return OM_OK;
}

static om_status map_scatter_elements(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int axis = 0;
    int64_t reduce = 0;
    OM_TRY(om_map_axis(o, INT("axis", 0), t.rank, &axis));
    OM_TRY(map_reduction(o, &reduce));
    om_id idx = om_map_index(o, IN(1), t.dim[axis]);
    SET(0, om_make(o->g, &om_op_scatter_elements, OM_IN(x, idx, IN(2)),
                   OM_ATTRS(OM_AI("axis", axis), OM_AI("reduce", reduce))));
    return o->cx->status;
}

/* Index tuples: column j of the last axis is fixed with size j. */
static om_id map_index_nd(om_onnx *o, om_id idx, const om_type *x) {
    om_graph *g = o->g;
    if (FAILED || om_onnx_index_nonneg(o) || om_map_index_nonneg(g, idx, 0)) return FAILED ? OM_NONE : idx;
    om_type t = *om_ty(g, idx);
    int64_t k = 0;
    if (t.rank >= 1 && !om_dim_const(g, t.dim[t.rank - 1], &k))
        return om_onnx_err(o, OM_UNSUPPORTED,
                           "the last axis of the indices must be a number, it depends on the sizes of inputs"),
               OM_NONE;
    if (t.rank < 1 || k < 1 || k > x->rank)
        return om_onnx_err(o, OM_INVALID, "indices of rank %d whose last axis has size %lld, for data of rank %d",
                           t.rank, (long long)k, x->rank), OM_NONE;
    if (t.dtype != OM_I64 && t.dtype != OM_I32)
        return om_onnx_err(o, OM_INVALID, "indices are %s, int64 is needed", om_dtype_name(t.dtype)), OM_NONE;
    om_id size[OM_RANK];
    for (int64_t j = 0; j < k; j++)
        size[j] = om_b_reshape(g, om_onnx_dim_value(o, x->dim[j], t.dtype), (om_dim[]){1}, 1);
    om_id sizes = k == 1 ? size[0] : om_make(g, &om_op_concat, size, (int)k, OM_ATTRS(OM_AI("axis", 0)));
    return om_map_where(o, MAKE2(lt, idx, om_scalar(g, t.dtype, 0)), MAKE2(add, idx, sizes), idx);
}

static om_status map_gather_nd(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    if (INT("batch_dims", 0) != 0) REFUSE("batch_dims %lld; only 0 is supported", (long long)INT("batch_dims", 0));
    om_id idx = map_index_nd(o, IN(1), &t);
    SET(0, om_make(o->g, &om_op_gather_nd, OM_IN(x, idx), NULL, 0));
    return o->cx->status;
}

static om_status map_scatter_nd(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    int64_t reduce = 0;
    OM_TRY(map_reduction(o, &reduce));
    om_id idx = map_index_nd(o, IN(1), &t);
    SET(0, om_make(o->g, &om_op_scatter_nd, OM_IN(x, idx, IN(2)), OM_ATTRS(OM_AI("reduce", reduce))));
    return o->cx->status;
}

/* --- sampling by a grid -------------------------------------------------------------------------------- */

/* Where along an axis of `size` the grid points: -1 and 1 are the outer edges, or (align) the outer elements. border:
 * held inside, without a gradient where it is held; NaN becomes 0 there, as in torch. torch rounds c * size - 1 once
 * (a fused multiply-add), so float32 goes by way of float64: at whole pixels the last bit chooses the neighbours. */
static om_id map_grid_at(om_onnx *o, om_id grid, int which, om_dim size, bool align, bool border) {
    om_graph *g = o->g;
    if (FAILED) return OM_NONE;
    const om_type t = *om_ty(g, grid);
    om_id c = om_b_reshape(g, om_b_slice(g, grid, 3, which, which + 1, 1), t.dim, 3);
    const om_id one = om_scalar(g, t.dtype, 1), last = om_onnx_dim_value(o, om_dim_sub(g, size, 1), t.dtype),
                zero = om_scalar(g, t.dtype, 0);
    c = MAKE2(add, c, one);
    if (align) {
        c = MAKE2(mul, om_b_scale(g, c, 0.5), last);
    } else {
        c = MAKE2(mul, om_b_cast(g, c, OM_F64), om_onnx_dim_value(o, size, OM_F64));
        c = om_b_cast(g, om_b_scale(g, MAKE2(sub, c, om_scalar(g, OM_F64, 1)), 0.5), t.dtype);
    }
    if (!border) return c;
    return om_map_where(o, MAKE2(gt, c, zero), om_map_where(o, MAKE2(ge, c, last), last, c), zero);
}

/* Four neighbours as rows of x (n h w, c), weighted; what lies outside counts as 0. */
static om_status map_grid_sample(om_onnx *o) {
    om_graph *g = o->g;
    om_id x = IN(0), grid = IN(1), sum = OM_NONE;
    om_type t = om_map_type_of(o, x), gt = om_map_type_of(o, grid);
    const char *mode = om_onnx_str(o, "mode", o->opset >= 20 ? "linear" : "bilinear"),
               *pad = om_onnx_str(o, "padding_mode", "zeros");
    if (FAILED) return o->cx->status;
    const bool border = !strcmp(pad, "border"), align = INT("align_corners", 0) != 0;
    if (t.rank != 4 || (strcmp(mode, "linear") != 0 && strcmp(mode, "bilinear") != 0) ||
        (!border && strcmp(pad, "zeros") != 0))
        REFUSE("mode %.20s, padding_mode %.20s, rank %d; linear, zeros or border, and rank 4 are supported", mode, pad,
               t.rank);
    ONNX_CHECK(o, gt.rank == 4 && gt.dim[3] == 2 && gt.dtype == t.dtype && (t.dtype == OM_F32 || t.dtype == OM_F64),
               "x is %s, the grid %s of rank %d; float or double both, rank 4 and two coordinates are needed",
               om_dtype_name(t.dtype), om_dtype_name(gt.dtype), gt.rank);
    const om_dim h = t.dim[2], w = t.dim[3], area = om_dim_mul(g, h, w);
    om_dim each[4] = {gt.dim[0], gt.dim[1], gt.dim[2], 1}, rows[2] = {om_dim_mul(g, t.dim[0], area), t.dim[1]};
    om_id image = om_make(g, &om_op_iota, NULL, 0, OM_ATTRS(OM_AD("shape", t.dim, 1), OM_AI("dtype", OM_I64)));
    image = om_b_reshape(g, MAKE2(mul, image, om_onnx_dim_value(o, area, OM_I64)), (om_dim[]){t.dim[0], 1, 1}, 3);
    om_id flat = om_b_reshape(g, om_b_permute(g, x, (int[]){0, 2, 3, 1}), rows, 2);
    om_id at[2] = {map_grid_at(o, grid, 0, w, align, border), map_grid_at(o, grid, 1, h, align, border)}, low[2];
    for (int a = 0; a < 2; a++) low[a] = MAKE1(floor, at[a]);
    const om_id one = om_scalar(g, t.dtype, 1), zero = om_scalar(g, t.dtype, 0), none = om_scalar(g, OM_I64, 0);
    for (int k = 0; k < 4; k++) {
        om_id place[2], weight[2], inside = OM_NONE;
        for (int a = 0; a < 2; a++) {
            const bool high = a == 0 ? k & 1 : k >> 1;
            const om_id next = MAKE2(add, low[a], one), p = high ? next : low[a],
                        end = om_onnx_dim_value(o, a == 0 ? w : h, t.dtype);
            const om_id in = MAKE2(and, MAKE2(ge, p, zero), MAKE2(lt, p, end));
            weight[a] = high ? MAKE2(sub, at[a], low[a]) : MAKE2(sub, next, at[a]);
            inside = inside == OM_NONE ? in : MAKE2(and, inside, in);
            place[a] = p;
        }
        for (int a = 0; a < 2; a++) place[a] = om_b_cast(g, om_map_where(o, inside, place[a], zero), OM_I64);
        om_id idx = MAKE2(add, MAKE2(mul, place[1], om_onnx_dim_value(o, w, OM_I64)), place[0]);
        idx = om_map_where(o, inside, MAKE2(add, idx, image), none);
        om_id row = om_make(g, &om_op_gather, OM_IN(flat, idx), OM_ATTRS(OM_AI("axis", 0)));
        row = om_map_where(o, om_b_reshape(g, inside, each, 4), row, zero);
        row = MAKE2(mul, row, om_b_reshape(g, MAKE2(mul, weight[0], weight[1]), each, 4));
        sum = sum == OM_NONE ? row : MAKE2(add, sum, row);
        if (FAILED) return o->cx->status;
    }
    SET(0, om_b_permute(g, sum, (int[]){0, 3, 1, 2}));
    return o->cx->status;
}

/* --- reductions -------------------------------------------------------------------------------------- */

static om_status map_reduce(om_onnx *o) {
    om_graph *g = o->g;
    const char *op = o->row->name;
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    uint32_t mask = 0;
    bool keep = INT("keepdims", 1) != 0;
    OM_TRY(om_map_axes(o, 1, t.rank, !INT("noop_with_empty_axes", 0), &mask));
    om_id y;
    if (o->row->op) {
        y = om_map_reduce_op(o, o->row->op, x, mask, keep);
    } else if (!strcmp(op, "ReduceL1")) {
        y = om_map_reduce_op(o, &om_op_reduce_sum, MAKE1(abs, x), mask, keep);
    } else if (!strcmp(op, "ReduceSumSquare")) {
        y = om_map_reduce_op(o, &om_op_reduce_sum, MAKE2(mul, x, x), mask, keep);
    /* sqrt has no gradient at 0; torch's norm gives 0 there. Squares leave the range of f16: wide */
    } else if (!strcmp(op, "ReduceL2")) {
        om_id w = om_b_cast(g, x, om_compute_dtype(t.dtype));
        om_id s = om_map_reduce_op(o, &om_op_reduce_sum, MAKE2(mul, w, w), mask, keep), zero = om_map_like(o, w, 0),
              none = MAKE2(eq, s, zero);
        y = om_b_cast(g, om_map_where(o, none, zero, MAKE1(sqrt, om_map_where(o, none, om_map_like(o, w, 1), s))),
                      t.dtype);
    } else if (!strcmp(op, "ReduceLogSum")) {
        y = MAKE1(log, om_map_reduce_op(o, &om_op_reduce_sum, x, mask, keep));
    } else { /* ReduceLogSumExp: log(sum(exp(x - m))) + m, m the maximum; for an infinite one the largest number, beside
              * which no exponential of the others overflows: that would make NaN of their gradient */
        const double most = t.dtype == OM_F64 ? DBL_MAX : t.dtype == OM_F32 ? (double)FLT_MAX
                          : t.dtype == OM_BF16 ? 0x1.fep127 : 65504;
        om_id m = om_map_reduce_op(o, &om_op_reduce_max, x, mask, true);
        m = MAKE1(stop_grad, om_map_where(o, MAKE1(isinf, m), om_map_like(o, x, most), m));
        y = MAKE2(add, MAKE1(log, om_map_reduce_op(o, &om_op_reduce_sum, MAKE1(exp, MAKE2(sub, x, m)), mask, true)), m);
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
    OM_TRY(om_map_axis(o, INT("axis", 0), om_map_type_of(o, x).rank, &axis));
    if (INT("select_last_index", 0)) REFUSE("select_last_index = 1 is not supported");
    SET(0,
        om_make(o->g, o->row->op, OM_IN(x), OM_ATTRS(OM_AI("axis", axis), OM_AI("keepdims", INT("keepdims", 1) != 0))));
    return o->cx->status;
}

/* ortmodule.CumProd, LogCumSumExp: along the last axis */
static om_status map_running(om_onnx *o) {
    om_id x = IN(0);
    om_type t = om_map_type_of(o, x);
    ONNX_CHECK(o, t.rank >= 1, "x has rank 0");
    SET(0, om_make(o->g, o->row->op, OM_IN(x), OM_ATTRS(OM_AI("axis", t.rank - 1))));
    return o->cx->status;
}

static om_status map_search_sorted(om_onnx *o) {
    const om_id x = IN(0), v = IN(1);
    SET(0, om_make(o->g, &om_op_search_sorted, OM_IN(x, v), OM_ATTRS(OM_AI("right", INT("right", 0) != 0))));
    return o->cx->status;
}

static om_status map_ctc_loss(om_onnx *o) {
    const om_id x = IN(0), t = IN(1), a = IN(2), c = IN(3), v = om_onnx_has(o, 4) ? IN(4) : OM_NONE;
    SET(0, om_make(o->g, &om_op_ctc_loss, OM_IN(x, t, v, a, c),
                   OM_ATTRS(OM_AI("blank", INT("blank", 0)), OM_AI("zero_infinity", INT("zero_infinity", 0) != 0))));
    return o->cx->status;
}

static om_status map_grouped_matmul(om_onnx *o) {
    const om_id x = IN(0), w = IN(1), ends = IN(2);
    SET(0, om_make(o->g, &om_op_grouped_matmul, OM_IN(x, w, ends), NULL, 0));
    return o->cx->status;
}

/* ortmodule.Cdist: p, -1 for infinity */
static om_status map_cdist(om_onnx *o) {
    SET(0, om_make(o->g, &om_op_cdist, OM_IN(IN(0), IN(1)), OM_ATTRS(OM_AF("p", FLT("p", 2)))));
    return o->cx->status;
}

/* sorted = 0 allows any order, sorted is one of them */
static om_status map_topk(om_onnx *o) {
    om_id x = IN(0);
    int axis = 0;
    uint32_t n;
    const om_dim *k = om_onnx_list(o, 1, &n);
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, n == 1, "k has %u elements, one is needed", n);
    OM_TRY(om_map_axis(o, INT("axis", -1), om_map_type_of(o, x).rank, &axis));
    om_id y = om_make(o->g, &om_op_topk, OM_IN(x),
                      OM_ATTRS(OM_AI("axis", axis), OM_AD("k", k, 1), OM_AI("largest", INT("largest", 1) != 0)));
    if (FAILED) return o->cx->status;
    SET(0, y);
    SET(1, y + 1);
    return o->cx->status;
}

static om_status map_softmax(om_onnx *o) {
    om_id x = IN(0);
    int axis = 0;
    OM_TRY(om_map_axis(o, INT("axis", -1), om_map_type_of(o, x).rank, &axis));
    SET(0, om_make(o->g, o->row->op, OM_IN(x), OM_ATTRS(OM_AI("axis", axis))));
    return o->cx->status;
}

/* --- the rows ------------------------------------------------------------------------------------------ */

#define S(name) om_onnx_size_##name
const om_onnx_op om_onnx_ops_gather[] = {
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
    {"", "Gather", 2, 2, 1, map_gather, S(gather), NULL},
    {"", "GatherElements", 2, 2, 1, map_gather_elements, NULL, NULL},
    {"", "GatherND", 2, 2, 1, map_gather_nd, NULL, NULL},
    {"", "ScatterElements", 3, 3, 1, map_scatter_elements, NULL, &om_op_scatter_elements},
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
    {"", "GridSample", 2, 2, 1, map_grid_sample, NULL, NULL},
    {"ortmodule", "CumProd", 1, 1, 1, map_running, NULL, &om_op_cumprod},
    {"ortmodule", "Cdist", 2, 2, 1, map_cdist, NULL, NULL},
    {"ortmodule", "LogCumSumExp", 1, 1, 1, map_running, NULL, &om_op_logcumsumexp},
    {"ortmodule", "SearchSorted", 2, 2, 1, map_search_sorted, NULL, NULL},
    {"ortmodule", "CTCLoss", 4, 5, 1, map_ctc_loss, NULL, NULL},
    {"ortmodule", "GroupedMatMul", 3, 3, 1, map_grouped_matmul, NULL, NULL},
    {"", "TopK", 2, 2, 2, map_topk, NULL, NULL},
    {"", "ArgMax", 1, 1, 1, map_arg, NULL, &om_op_argmax},
    {"", "ArgMin", 1, 1, 1, map_arg, NULL, &om_op_argmin},
    {"", "Softmax", 1, 1, 1, map_softmax, NULL, &om_op_softmax},
    {"", "LogSoftmax", 1, 1, 1, map_softmax, NULL, &om_op_log_softmax},
    {"ortmodule", "Embedding", 2, 2, 1, map_embedding, NULL, NULL},
    {0},
};
