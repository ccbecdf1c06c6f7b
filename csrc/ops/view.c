/* view.c - operators that only say how strides map: reshape, permute, expand, slice, flip, and two that change nothing
 * but the way of the gradient.
 *
 * A view rule gets the input tensor and the sizes of the output and sets the output's strides and offset, in elements.
 * Of valid sizes only reshape may refuse: the output's axes must split into groups, each equal in count to a run of
 * input axes that are contiguous among themselves. Axes of size 1 fit anywhere; a tensor without elements takes any
 * strides. Sizes known only at run time that turn out wrong (a slice beyond the end) are refused too, by every rule,
 * even for a dense input. Gradients: reshape and permute undo themselves, expand sums, slice writes into zeros, flip
 * flips.
 */
#include "ops/attr.h"

/* --- reshape ---------------------------------------------------------------------------------------- */

static om_status reshape_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    *out = *x;
    out->rank = (uint8_t)shape->n;
    for (uint32_t i = 0; i < shape->n; i++) out->dim[i] = shape->dims[i];
    om_dim a = om_dim_numel(g, x), b = om_dim_numel(g, out);
    if (attr_differs(g, a, b)) {
        char from[64], to[64];
        om_dim_print(g, a, from, sizeof from);
        om_dim_print(g, b, to, sizeof to);
        return om_fail(g->cx, OM_INVALID,
                       "reshape: %s elements cannot become %s; both shapes must have the same number", from, to);
    }
    return OM_OK;
}

static bool reshape_view(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset) {
    (void)a;
    *offset = 0;
    om_dense_strides(out);
    if (om_numel(in) != om_numel(out)) return false;
    if (om_numel(in) == 0) return true;
    int o = out->rank - 1;
    for (int i = in->rank - 1; i >= 0;) {
        /* the longest run of input axes ending at i that is one arithmetic sequence */
        int64_t step = in->stride[i], count = in->dim[i];
        if (in->dim[i] == 1) {
            i--;
            continue;
        }
        int k = i - 1;
        while (k >= 0 && (in->dim[k] == 1 || in->stride[k] == step * count)) count *= in->dim[k--];
        int64_t done = 1;
        while (o >= 0 && (done < count || out->dim[o] == 1)) {
            out->stride[o] = step * done;
            done *= out->dim[o--];
        }
        if (done != count) return false;
        i = k;
    }
    for (; o >= 0; o--) /* only ones are left */
        if (out->dim[o] != 1) return false;
    return true;
}

static om_status reshape_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    dx[0] = om_b_reshape(b->g, dy[0], x.dim, x.rank);
    return OM_OK;
}

const om_op om_op_reshape = {
    OM_OP(reshape), .kind = OM_K_VIEW,
    .min_in = 1, .max_in = 1, .n_out = 1, .infer = reshape_infer, .view = reshape_view, .grad = reshape_grad,
};

/* --- permute ---------------------------------------------------------------------------------------- */

static om_status permute_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int64_t perm[OM_RANK];
    uint32_t seen = 0;
    *out = *x;
    const om_attr *a = om_attr_get(n->attr, n->n_attr, "perm");
    OM_CHECK(g->cx, a && a->kind == OM_ATTR_DIMS && a->n == x->rank,
             "permute: perm must list the %d axes of the operand, it has %u entries",
             x->rank, a && a->kind == OM_ATTR_DIMS ? a->n : 0);
    OM_TRY(attr_ints(g, n, "perm", x->rank, 0, perm));
    for (int i = 0; i < x->rank; i++) {
        OM_CHECK(g->cx, perm[i] >= 0 && perm[i] < x->rank && !(seen >> perm[i] & 1),
                 "permute: perm must hold each of 0 to %d once; entry %d is %lld", x->rank - 1, i, (long long)perm[i]);
        seen |= 1u << perm[i];
        out->dim[i] = x->dim[perm[i]];
    }
    return OM_OK;
}

static bool permute_view(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset) {
    int count;
    const int64_t *perm = attr_values(a, "perm", &count);
    for (int i = 0; i < count; i++) out->stride[i] = in->stride[perm[i]];
    *offset = 0;
    return true;
}

static om_status permute_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    int64_t perm[OM_RANK];
    int inverse[OM_RANK], rank = om_ty(b->g, om_ins(b->g, n)[0])->rank;
    OM_TRY(attr_ints(b->g, n, "perm", rank, 0, perm));
    for (int i = 0; i < rank; i++) inverse[perm[i]] = i;
    dx[0] = om_b_permute(b->g, dy[0], inverse);
    return OM_OK;
}

const om_op om_op_permute = {
    OM_OP(permute), .kind = OM_K_VIEW,
    .min_in = 1, .max_in = 1, .n_out = 1, .infer = permute_infer, .view = permute_view, .grad = permute_grad,
};

/* --- expand ----------------------------------------------------------------------------------------- */

static om_status expand_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    int lead = (int)shape->n - x->rank;
    OM_CHECK(g->cx, lead >= 0, "expand: a tensor of rank %d cannot become one of rank %u", x->rank, shape->n);
    *out = *x;
    out->rank = (uint8_t)shape->n;
    for (int i = 0; i < (int)shape->n; i++) {
        out->dim[i] = shape->dims[i];
        if (i >= lead && x->dim[i - lead] != 1 && attr_differs(g, x->dim[i - lead], shape->dims[i]))
            return om_fail(g->cx, OM_INVALID, "expand: axis %d has size %lld and cannot become %lld; only size 1 grows",
                           i - lead, (long long)x->dim[i - lead], (long long)shape->dims[i]);
    }
    return OM_OK;
}

static bool expand_view(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset) {
    (void)a;
    int lead = out->rank - in->rank;
    for (int i = 0; i < out->rank; i++) {
        bool grows = i < lead || in->dim[i - lead] != out->dim[i];
        if (i >= lead && grows && in->dim[i - lead] != 1) return false;
        out->stride[i] = grows ? 0 : in->stride[i - lead];
    }
    *offset = 0;
    return true;
}

static om_status expand_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    dx[0] = om_b_sum_to(b->g, dy[0], &x);
    return OM_OK;
}

const om_op om_op_expand = {
    OM_OP(expand),
    .kind = OM_K_VIEW,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = expand_infer,
    .view = expand_view,
    .grad = expand_grad,
};

/* --- slice ------------------------------------------------------------------------------------------ */

static om_status slice_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int axis;
    OM_TRY(attr_axis(g, n, x->rank, &axis));
    om_dim start = attr_dim(n, "start", 0), end = attr_dim(n, "end", x->dim[axis]);
    int64_t step = om_node_int(n, "step", 1), s, e, d;
    OM_CHECK(g->cx, step >= 1, "slice: step is %lld; it must be at least 1 (flip first for a negative step)",
             (long long)step);
    bool ks = om_dim_const(g, start, &s), ke = om_dim_const(g, end, &e), kd = om_dim_const(g, x->dim[axis], &d);
    OM_CHECK(g->cx, (!ks || s >= 0) && (!ks || !ke || s <= e) && (!ke || !kd || e <= d),
             "slice: %lld to %lld of axis %d of size %lld; 0 <= start <= end <= size is required",
             ks ? (long long)s : -1, ke ? (long long)e : -1, axis, kd ? (long long)d : -1);
    *out = *x;
    out->dim[axis] = attr_slice_size(g, start, end, step);
    return OM_OK;
}

static bool slice_view(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset) {
    int axis = (int)om_args_int(a, "axis", 0);
    int64_t start = attr_value(a, "start", 0), end = attr_value(a, "end", in->dim[axis]);
    if (start < 0 || end > in->dim[axis]) return false; /* bounds made of sizes are first known here */
    for (int i = 0; i < in->rank; i++) out->stride[i] = in->stride[i];
    *offset = om_numel(out) ? start * in->stride[axis] : 0;
    out->stride[axis] *= om_args_int(a, "step", 1);
    return true;
}

static om_status slice_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    int64_t axis = om_node_int(n, "axis", 0), step = om_node_int(n, "step", 1);
    om_dim start = attr_dim(n, "start", 0), end = attr_dim(n, "end", x.dim[axis]);
    dx[0] = om_make(b->g, &om_op_slice_put, OM_IN(dy[0]),
                    OM_ATTRS(OM_AI("axis", axis), OM_AD("start", &start, 1), OM_AD("end", &end, 1), OM_AI("step", step),
                             OM_AD("shape", x.dim, x.rank)));
    return OM_OK;
}

const om_op om_op_slice = {
    OM_OP(slice), .kind = OM_K_VIEW,
    .min_in = 1, .max_in = 1, .n_out = 1, .infer = slice_infer, .view = slice_view, .grad = slice_grad,
};

/* --- flip ------------------------------------------------------------------------------------------- */

static om_status flip_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    const om_attr *axes;
    OM_TRY(attr_shape(g, n, "axes", &axes));
    uint32_t seen = 0;
    for (uint32_t i = 0; i < axes->n; i++) {
        int64_t a;
        OM_CHECK(g->cx, om_dim_const(g, axes->dims[i], &a) && a >= 0 && a < out->rank && !(seen >> a & 1),
                 "flip: axes must be different axes of a tensor of rank %d", out->rank);
        seen |= 1u << a;
    }
    return OM_OK;
}

static bool flip_view(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset) {
    int count;
    const int64_t *axes = attr_values(a, "axes", &count);
    *offset = 0;
    for (int i = 0; i < in->rank; i++) out->stride[i] = in->stride[i];
    for (int i = 0; i < count && om_numel(in); i++) {
        *offset += in->stride[axes[i]] * (in->dim[axes[i]] - 1);
        out->stride[axes[i]] = -in->stride[axes[i]];
    }
    return true;
}

static om_status flip_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    dx[0] = om_make(b->g, &om_op_flip, OM_IN(dy[0]), n->attr, n->n_attr);
    return OM_OK;
}

const om_op om_op_flip = {
    OM_OP(flip), .kind = OM_K_VIEW,
    .min_in = 1, .max_in = 1, .n_out = 1, .infer = flip_infer, .view = flip_view, .grad = flip_grad,
};

/* --- identity with a special gradient ----------------------------------------------------------------- */

static bool same_view(const om_args *a, const om_tensor *in, om_tensor *out, int64_t *offset) {
    (void)a;
    for (int i = 0; i < in->rank; i++) out->stride[i] = in->stride[i];
    *offset = 0;
    return true;
}

const om_op om_op_stop_grad = {
    OM_OP(stop_grad), .kind = OM_K_VIEW, .min_in = 1, .max_in = 1, .n_out = 1,
    .infer = attr_same_infer, .view = same_view,
};

static om_status straight_through_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *v = om_ty(g, om_ins(g, n)[0]), *x = om_ty(g, om_ins(g, n)[1]);
    OM_CHECK(g->cx, v->rank == x->rank && v->dtype == x->dtype,
             "straight_through: value is %s of rank %d, its gradient's owner %s of rank %d; "
             "both must have the same dtype and shape",
             om_dtype_name(v->dtype), v->rank, om_dtype_name(x->dtype), x->rank);
    for (int i = 0; i < v->rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, v->dim[i], x->dim[i]),
                 "straight_through: both operands must have the same size along axis %d", i);
    *out = *v;
    return OM_OK;
}

static om_status straight_through_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_type x = *om_ty(b->g, om_ins(b->g, n)[1]);
    if (want[1]) dx[1] = om_b_reshape(b->g, dy[0], x.dim, x.rank); /* equal sizes, perhaps spelt differently */
    return OM_OK;
}

static om_status zero_grad_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    if (want[0]) dx[0] = dy[0];
    if (want[1]) dx[1] = om_b_zeros_like(b->g, om_ins(b->g, n)[1]);
    return OM_OK;
}

const om_op om_op_zero_grad = {
    OM_OP(zero_grad), .kind = OM_K_VIEW, .min_in = 2, .max_in = 2, .n_out = 1,
    .infer = attr_same_infer, .view = same_view, .grad = zero_grad_grad,
};

const om_op om_op_straight_through = {
    OM_OP(straight_through),
    .kind = OM_K_VIEW,
    .min_in = 2,
    .max_in = 2,
    .n_out = 1,
    .infer = straight_through_infer,
    .view = same_view,
    .grad = straight_through_grad,
};
