/* conv.c - convolution over 1 to 3 spatial axes, and its gradients as one operator; its transpose, which is the half of
 * that gradient that belongs to x; windows as columns and back. */
#include "ops/attr.h"
#include "ops/window.h"

/* --- types ------------------------------------------------------------------------------------------------- */

static om_status conv_groups(om_graph *g, const om_node *n, int64_t *groups) {
    *groups = om_node_int(n, "groups", 1);
    OM_CHECK(g->cx, *groups >= 1, "%s: %lld groups; at least 1 is needed", n->op->name, (long long)*groups);
    return OM_OK;
}

/* x (n, c, ...), w (o, c / groups, ...) -> y */
static om_status conv_shape(om_graph *g, const om_node *n, const om_type *x, const om_type *w, om_type *y) {
    const char *op = n->op->name;
    om_window win;
    int64_t groups, xc, wc, o;
    OM_CHECK(g->cx, x->rank >= 3 && x->rank <= 5 && w->rank == x->rank,
             "%s: x of rank %d, w of rank %d; both 3 to 5 (n, c, 1 to 3 spatial axes)",
             op, x->rank, w->rank);
    OM_CHECK(g->cx, om_is_float(x->dtype) && w->dtype == x->dtype, "%s: x is %s, w %s; floats of one type are needed",
             op, om_dtype_name(x->dtype), om_dtype_name(w->dtype));
    OM_TRY(om_window_read(g, n, x->rank - 2, &win));
    OM_TRY(conv_groups(g, n, &groups));
    OM_CHECK(g->cx, !om_dim_const(g, x->dim[1], &xc) || !om_dim_const(g, w->dim[1], &wc) || xc == wc * groups,
             "%s: x has %lld channels, w takes %lld in each of %lld groups", op, (long long)xc, (long long)wc,
             (long long)groups);
    OM_CHECK(g->cx, !om_dim_const(g, w->dim[0], &o) || o % groups == 0,
             "%s: %lld output channels cannot be split into %lld groups", op, (long long)o, (long long)groups);
    *y = *x;
    y->dim[1] = w->dim[0];
    for (int i = 0; i < win.axes; i++)
        OM_TRY(om_window_count(g, n, &win, i, x->dim[2 + i], w->dim[2 + i], &y->dim[2 + i]));
    return OM_OK;
}

static om_status conv_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_id *in = om_ins(g, n);
    const om_type *w = om_ty(g, in[1]);
    OM_TRY(conv_shape(g, n, om_ty(g, in[0]), w, out));
    if (n->n_in > 2 && in[2] != OM_NONE) {
        const om_type *b = om_ty(g, in[2]);
        OM_CHECK(g->cx, b->rank == 1 && b->dtype == w->dtype && !attr_differs(g, b->dim[0], w->dim[0]),
                 "conv: the bias must be %s with one entry per output channel", om_dtype_name(w->dtype));
    }
    return OM_OK;
}

static om_status conv_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_id x = om_ins(g, n)[0], w = om_ins(g, n)[1];
    om_dim wants[3] = {want[0], want[1], n->n_in > 2 && want[2]};
    om_attr attr[8];
    int k = 0;
    for (int i = 0; i < n->n_attr && k < 7; i++)
        if (strcmp(n->attr[i].name, "want")) attr[k++] = n->attr[i];
    attr[k++] = OM_AD("want", wants, 3);
    om_id first = om_make(g, &om_op_conv_grad, OM_IN(dy[0], x, w), attr, k);
    for (int i = 0; i < 3 && first != OM_NONE; i++)
        if (wants[i]) dx[i] = first + (om_id)i;
    return OM_OK;
}

static om_status conv_grad_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *dy = om_ty(g, om_ins(g, n)[0]), *x = om_ty(g, om_ins(g, n)[1]), *w = om_ty(g, om_ins(g, n)[2]);
    om_type y;
    int64_t want[3];
    OM_TRY(conv_shape(g, n, x, w, &y));
    OM_TRY(attr_ints(g, n, "want", 3, 1, want));
    OM_CHECK(g->cx, dy->rank == y.rank && dy->dtype == y.dtype,
             "conv_grad: dy is %s of rank %d, the output was %s of rank %d", om_dtype_name(dy->dtype), dy->rank,
             om_dtype_name(y.dtype), y.rank);
    for (int i = 0; i < y.rank; i++)
        OM_CHECK(g->cx, !attr_differs(g, dy->dim[i], y.dim[i]),
                 "conv_grad: dy has size %lld along axis %d, the output had %lld", (long long)dy->dim[i], i,
                 (long long)y.dim[i]);
    out[0] = *x;
    out[1] = *w;
    out[2] = *w;
    out[2].rank = 1;
    for (int i = 0; i < 3; i++)
        if (!want[i]) { /* not wanted: no elements */
            out[i].rank = 1;
            out[i].dim[0] = 0;
        }
    return OM_OK;
}

/* --- transpose --------------------------------------------------------------------------------------------- */

static om_status conv_transpose_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]), *w = om_ty(g, om_ins(g, n)[1]);
    const char *op = n->op->name;
    om_window win;
    int64_t groups, channels, more[OM_WINDOW_AXES];
    OM_CHECK(g->cx, x->rank >= 3 && x->rank <= 5 && w->rank == x->rank,
             "%s: x of rank %d, w of rank %d; both 3 to 5 (n, c, 1 to 3 spatial axes)", op, x->rank, w->rank);
    OM_CHECK(g->cx, om_is_float(x->dtype) && w->dtype == x->dtype, "%s: x is %s, w %s; floats of one type are needed",
             op, om_dtype_name(x->dtype), om_dtype_name(w->dtype));
    OM_TRY(om_window_read(g, n, x->rank - 2, &win));
    OM_TRY(conv_groups(g, n, &groups));
    OM_TRY(attr_ints(g, n, "out_pad", win.axes, 0, more));
    OM_CHECK(g->cx, !attr_differs(g, x->dim[1], w->dim[0]), "%s: x has %lld channels, w takes %lld", op,
             (long long)x->dim[1], (long long)w->dim[0]);
    OM_CHECK(g->cx, !om_dim_const(g, w->dim[0], &channels) || channels % groups == 0,
             "%s: %lld channels cannot be split into %lld groups", op, (long long)channels, (long long)groups);
    *out = *x;
    out->dim[1] = om_dim_mul(g, w->dim[1], groups);
    for (int i = 0; i < win.axes; i++) {
        OM_CHECK(g->cx, more[i] >= 0 && more[i] < (win.stride[i] > win.dil[i] ? win.stride[i] : win.dil[i]),
                 "%s: out_pad %lld along spatial axis %d; at least 0 and less than the stride or the dilation", op,
                 (long long)more[i], i);
        OM_TRY(om_window_length(g, n, &win, i, x->dim[2 + i], w->dim[2 + i], more[i], &out->dim[2 + i]));
    }
    return OM_OK;
}

/* dx is the convolution of dy. Where out_pad reaches the stride, that has more elements than x: they are the windows
 * behind x's last, over zeros for w's gradient. */
static om_status conv_transpose_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    const om_id x = om_ins(g, n)[0], w = om_ins(g, n)[1];
    const om_type xt = *om_ty(g, x);
    om_window win;
    int64_t more[OM_WINDOW_AXES];
    om_dim lo[OM_RANK] = {0}, hi[OM_RANK] = {0}, wants[3] = {0, 1, 0};
    om_attr attr[8];
    int k = 0;
    OM_TRY(om_window_read(g, n, xt.rank - 2, &win));
    OM_TRY(attr_ints(g, n, "out_pad", win.axes, 0, more));
    for (int i = 0; i < n->n_attr && k < 7; i++)
        if (strcmp(n->attr[i].name, "out_pad")) attr[k++] = n->attr[i];
    bool longer = false;
    for (int i = 0; i < win.axes; i++) longer |= (hi[2 + i] = more[i] / win.stride[i]) > 0;
    if (want[0]) {
        dx[0] = om_make(g, &om_op_conv, OM_IN(dy[0], w), attr, k);
        for (int i = 2; i < xt.rank && g->cx->status == OM_OK; i++)
            if (om_ty(g, dx[0])->dim[i] != xt.dim[i]) dx[0] = om_b_slice(g, dx[0], i, 0, xt.dim[i], 1);
    }
    if (want[1]) {
        om_id padded = longer ? om_make(g, &om_op_pad, OM_IN(x),
                                        OM_ATTRS(OM_AD("lo", lo, xt.rank), OM_AD("hi", hi, xt.rank)))
                              : x;
        attr[k++] = OM_AD("want", wants, 3);
        om_id first = om_make(g, &om_op_conv_grad, OM_IN(padded, dy[0], w), attr, k);
        if (first != OM_NONE) dx[1] = first + 1;
    }
    return g->cx->status;
}

/* --- windows as columns ------------------------------------------------------------------------------------ */

/* How many elements a window has, and how many windows lie in size[nd]. */
static om_status patches_of(om_graph *g, const om_node *n, const om_dim *size, int nd, int64_t *taps, om_dim *windows) {
    om_window win;
    int axes;
    OM_TRY(om_window_axes(g, n, &axes));
    OM_CHECK(g->cx, axes == nd, "%s: kernel must list as many sizes as there are spatial axes, %d; it lists %d",
             n->op->name, nd, axes);
    OM_TRY(om_window_read(g, n, nd, &win));
    *taps = 1;
    *windows = 1;
    for (int i = 0; i < nd; i++) {
        om_dim count;
        OM_TRY(om_window_count(g, n, &win, i, size[i], win.k[i], &count));
        *taps *= win.k[i];
        *windows = om_dim_mul(g, *windows, count);
    }
    return OM_OK;
}

static om_status im2col_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    int64_t taps;
    om_dim windows;
    OM_CHECK(g->cx, x->rank >= 3 && x->rank <= 5 && om_is_float(x->dtype),
             "im2col: x is %s of rank %d; floats of rank 3 to 5 are needed", om_dtype_name(x->dtype), x->rank);
    OM_TRY(patches_of(g, n, x->dim + 2, x->rank - 2, &taps, &windows));
    *out = *x;
    out->rank = 3;
    out->dim[1] = om_dim_mul(g, x->dim[1], taps);
    out->dim[2] = windows;
    return OM_OK;
}

static om_status col2im_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    const om_attr *size;
    int64_t taps, rows;
    om_dim windows;
    OM_CHECK(g->cx, x->rank == 3 && om_is_float(x->dtype), "col2im: x is %s of rank %d; floats of rank 3 are needed",
             om_dtype_name(x->dtype), x->rank);
    OM_TRY(attr_shape(g, n, "size", &size));
    OM_TRY(patches_of(g, n, size->dims, (int)size->n, &taps, &windows));
    OM_CHECK(g->cx, om_dim_const(g, x->dim[1], &rows) && rows % taps == 0,
             "col2im: %lld rows are no multiple of the %lld elements of a window", (long long)x->dim[1],
             (long long)taps);
    OM_CHECK(g->cx, !attr_differs(g, x->dim[2], windows), "col2im: %lld columns, %lld windows", (long long)x->dim[2],
             (long long)windows);
    *out = *x;
    out->rank = (uint8_t)(2 + size->n);
    out->dim[1] = rows / taps;
    for (uint32_t i = 0; i < size->n; i++) out->dim[2 + i] = size->dims[i];
    return OM_OK;
}

static int patches_attrs(const om_node *n, om_attr *attr) { /* all but size */
    int k = 0;
    for (int i = 0; i < n->n_attr && k < 7; i++)
        if (strcmp(n->attr[i].name, "size")) attr[k++] = n->attr[i];
    return k;
}

static om_status im2col_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    const om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    om_attr attr[8];
    int k = patches_attrs(n, attr);
    if (!want[0]) return OM_OK;
    attr[k++] = OM_AD("size", x.dim + 2, x.rank - 2);
    dx[0] = om_make(b->g, &om_op_col2im, OM_IN(dy[0]), attr, k);
    return b->g->cx->status;
}

static om_status col2im_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    const om_type x = *om_ty(b->g, om_ins(b->g, n)[0]);
    om_attr attr[8];
    int k = patches_attrs(n, attr);
    if (!want[0]) return OM_OK;
    dx[0] = om_b_reshape(b->g, om_make(b->g, &om_op_im2col, OM_IN(dy[0]), attr, k), x.dim, x.rank);
    return b->g->cx->status;
}

/* --- the operators ----------------------------------------------------------------------------------------- */

const om_op om_op_conv = {
    OM_OP(conv),
    .kind = OM_K_CONV,
    .min_in = 2,
    .max_in = 3,
    .n_out = 1,
    .infer = conv_infer,
    .grad = conv_grad_build,
};
const om_op om_op_conv_grad = {
    OM_OP(conv_grad), .kind = OM_K_CONV, .min_in = 3, .max_in = 3, .n_out = 3,
    .infer = conv_grad_infer,
};
const om_op om_op_conv_transpose = {
    OM_OP(conv_transpose), .kind = OM_K_CONV, .min_in = 2, .max_in = 2, .n_out = 1,
    .infer = conv_transpose_infer, .grad = conv_transpose_grad,
};
const om_op om_op_im2col = {
    OM_OP(im2col), .kind = OM_K_CONV, .min_in = 1, .max_in = 1, .n_out = 1, .infer = im2col_infer, .grad = im2col_grad,
};
const om_op om_op_col2im = {
    OM_OP(col2im), .kind = OM_K_CONV, .min_in = 1, .max_in = 1, .n_out = 1, .infer = col2im_infer, .grad = col2im_grad,
};
