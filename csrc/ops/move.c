/* move.c - operators that move elements without looking at them: copy, concat, pad, slice_put, slice_scatter, trilu,
 * and the two that make elements from nothing: iota, fill.
 */
#include "ops/attr.h"

static om_status attr_dtype(om_graph *g, const om_node *n, om_type *out) {
    int64_t t = om_node_int(n, "dtype", 0);
    OM_CHECK(g->cx, om_is_float((int)t) || om_is_int((int)t), "%s: attribute dtype is missing or no number type",
             n->op->name);
    out->dtype = (uint8_t)t;
    return OM_OK;
}

/* --- copy ------------------------------------------------------------------------------------------- */

static om_status copy_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)b, (void)n, (void)want;
    dx[0] = dy[0];
    return OM_OK;
}

const om_op om_op_copy = {
    OM_OP(copy), .kind = OM_K_GATHER, .min_in = 1, .max_in = 1, .n_out = 1,
    .infer = attr_same_infer, .grad = copy_grad,
};

/* --- concat ----------------------------------------------------------------------------------------- */

static om_status concat_infer(om_graph *g, const om_node *n, om_type *out) {
    int axis;
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_TRY(attr_axis(g, n, out->rank, &axis));
    for (int i = 1; i < n->n_in; i++) {
        OM_CHECK(g->cx, om_ins(g, n)[i] != OM_NONE, "concat: operand %d is left out", i);
        const om_type *x = om_ty(g, om_ins(g, n)[i]);
        OM_CHECK(g->cx, x->dtype == out->dtype && x->rank == out->rank,
                 "concat: operand %d is %s of rank %d, operand 0 %s of rank %d; all must agree", i,
                 om_dtype_name(x->dtype), x->rank, om_dtype_name(out->dtype), out->rank);
        for (int k = 0; k < x->rank; k++)
            OM_CHECK(g->cx, k == axis || !attr_differs(g, x->dim[k], out->dim[k]),
                     "concat along axis %d: operand %d has size %lld along axis %d, operand 0 %lld; they must be equal",
                     axis, i, (long long)x->dim[k], k, (long long)out->dim[k]);
        out->dim[axis] = om_dim_add(g, out->dim[axis], x->dim[axis]);
    }
    return OM_OK;
}

static om_status concat_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    int axis = (int)om_node_int(n, "axis", 0);
    om_dim start = 0;
    for (int i = 0; i < n->n_in; i++) {
        om_type x = *om_ty(g, om_ins(g, n)[i]);
        om_dim end = om_dim_add(g, start, x.dim[axis]);
        if (want[i]) dx[i] = om_b_reshape(g, om_b_slice(g, dy[0], axis, start, end, 1), x.dim, x.rank);
        start = end;
    }
    return OM_OK;
}

const om_op om_op_concat = {
    OM_OP(concat),
    .kind = OM_K_GATHER,
    .min_in = 1,
    .max_in = -1,
    .n_out = 1,
    .infer = concat_infer,
    .grad = concat_grad,
};

/* --- pad -------------------------------------------------------------------------------------------- */

static om_status pad_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    const om_attr *lo, *hi;
    OM_TRY(attr_shape(g, n, "lo", &lo));
    OM_TRY(attr_shape(g, n, "hi", &hi));
    OM_CHECK(g->cx, lo->n == out->rank && hi->n == out->rank,
             "pad: lo and hi need one entry per axis (%d), %u and %u given", out->rank, lo->n, hi->n);
    for (int i = 0; i < out->rank; i++) {
        int64_t d;
        out->dim[i] = om_dim_add(g, om_dim_add(g, out->dim[i], lo->dims[i]), hi->dims[i]);
        OM_CHECK(g->cx, !om_dim_const(g, out->dim[i], &d) || d >= 0, "pad: axis %d would get size %lld; crop less", i,
                 (long long)d);
    }
    return OM_OK;
}

static om_status pad_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_graph *g = b->g;
    om_type x = *om_ty(g, om_ins(g, n)[0]);
    const om_attr *lo, *hi;
    om_dim l[OM_RANK], h[OM_RANK];
    OM_TRY(attr_shape(g, n, "lo", &lo));
    OM_TRY(attr_shape(g, n, "hi", &hi));
    for (int i = 0; i < x.rank; i++) {
        l[i] = om_dim_sub(g, 0, lo->dims[i]);
        h[i] = om_dim_sub(g, 0, hi->dims[i]);
    }
    om_id d = om_make(g, &om_op_pad, OM_IN(dy[0]),
                      OM_ATTRS(OM_AD("lo", l, x.rank), OM_AD("hi", h, x.rank), OM_AF("value", 0)));
    dx[0] = om_b_reshape(g, d, x.dim, x.rank);
    return OM_OK;
}

const om_op om_op_pad = {
    OM_OP(pad),
    .kind = OM_K_GATHER, .min_in = 1, .max_in = 1, .n_out = 1, .infer = pad_infer, .grad = pad_grad,
};

/* --- slice_put, slice_scatter ------------------------------------------------------------------------- */

/* `src` goes to start:end:step along axis of something of `whole`'s sizes. */
static om_status slice_check(om_graph *g, const om_node *n, const om_type *src, const om_type *whole) {
    int axis;
    OM_TRY(attr_axis(g, n, whole->rank, &axis));
    int64_t step = om_node_int(n, "step", 1);
    OM_CHECK(g->cx, step >= 1, "%s: step is %lld; it must be at least 1", n->op->name, (long long)step);
    om_dim size = attr_slice_size(g, attr_dim(n, "start", 0), attr_dim(n, "end", whole->dim[axis]), step);
    OM_CHECK(g->cx, src->rank == whole->rank && src->dtype == whole->dtype,
             "%s: a %s of rank %d cannot go into a %s of rank %d", n->op->name, om_dtype_name(src->dtype), src->rank,
             om_dtype_name(whole->dtype), whole->rank);
    for (int i = 0; i < whole->rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, src->dim[i], i == axis ? size : whole->dim[i]),
                 "%s: the slice has size %lld along axis %d, what goes there %lld", n->op->name,
                 (long long)(i == axis ? size : whole->dim[i]), i, (long long)src->dim[i]);
    return OM_OK;
}

static om_status slice_put_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    *out = *x;
    out->rank = (uint8_t)shape->n;
    for (uint32_t i = 0; i < shape->n; i++) out->dim[i] = shape->dims[i];
    return slice_check(g, n, x, out);
}

static om_status slice_put_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    int axis = (int)om_node_int(n, "axis", 0);
    om_id d = om_b_slice(b->g, dy[0], axis, attr_dim(n, "start", 0), attr_dim(n, "end", om_ty(b->g, dy[0])->dim[axis]),
                         om_node_int(n, "step", 1));
    dx[0] = om_b_reshape(b->g, d, x.dim, x.rank);
    return OM_OK;
}

const om_op om_op_slice_put = {
    OM_OP(slice_put),
    .kind = OM_K_SCATTER,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = slice_put_infer,
    .grad = slice_put_grad,
};

static om_status slice_scatter_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    return slice_check(g, n, om_ty(g, om_ins(g, n)[1]), out);
}

static om_status slice_scatter_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_type src = *om_ty(g, om_ins(g, n)[1]);
    int axis = (int)om_node_int(n, "axis", 0);
    om_dim end = attr_dim(n, "end", om_ty(g, dy[0])->dim[axis]);
    if (want[0]) {
        om_id zero = om_b_fill(g, src.dtype, src.dim, src.rank, 0);
        dx[0] = om_make(g, &om_op_slice_scatter, OM_IN(dy[0], zero), n->attr, n->n_attr);
    }
    if (want[1]) {
        om_id d = om_b_slice(g, dy[0], axis, attr_dim(n, "start", 0), end, om_node_int(n, "step", 1));
        dx[1] = om_b_reshape(g, d, src.dim, src.rank);
    }
    return OM_OK;
}

const om_op om_op_slice_scatter = {
    OM_OP(slice_scatter),
    .kind = OM_K_SCATTER,
    .min_in = 2,
    .max_in = 2,
    .n_out = 1,
    .infer = slice_scatter_infer,
    .grad = slice_scatter_grad,
};

/* --- trilu ------------------------------------------------------------------------------------------ */

static om_status trilu_infer(om_graph *g, const om_node *n, om_type *out) {
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, out->rank >= 2, "trilu: a tensor of rank %d; at least 2 is needed", out->rank);
    return OM_OK;
}

static om_status trilu_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    (void)want;
    dx[0] = om_make(b->g, &om_op_trilu, OM_IN(dy[0]), n->attr, n->n_attr);
    return OM_OK;
}

const om_op om_op_trilu = {
    OM_OP(trilu),
    .kind = OM_K_GATHER,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = trilu_infer,
    .grad = trilu_grad,
};

/* --- iota, fill ------------------------------------------------------------------------------------- */

static om_status iota_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    OM_CHECK(g->cx, shape->n == 1, "iota: shape must have one entry, it has %u", shape->n);
    out->rank = 1;
    out->dim[0] = shape->dims[0];
    return attr_dtype(g, n, out);
}

const om_op om_op_iota = {
    OM_OP(iota),
    .kind = OM_K_CREATE,
    .min_in = 0,
    .max_in = 0,
    .n_out = 1,
    .infer = iota_infer,
};

static om_status fill_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_attr *shape;
    OM_TRY(attr_shape(g, n, "shape", &shape));
    out->rank = (uint8_t)shape->n;
    for (uint32_t i = 0; i < shape->n; i++) out->dim[i] = shape->dims[i];
    return attr_dtype(g, n, out);
}

const om_op om_op_fill = {
    OM_OP(fill),
    .kind = OM_K_CREATE,
    .min_in = 0,
    .max_in = 0,
    .n_out = 1,
    .infer = fill_infer,
};
