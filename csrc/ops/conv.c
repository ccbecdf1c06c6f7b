/* conv.c - convolution over 1 to 3 spatial axes, and its gradients as one operator. */
#include "ops/attr.h"

/* --- types ------------------------------------------------------------------------------------------------- */

typedef struct conv_attr { int nd; int64_t stride[3], lo[3], hi[3], dil[3], groups; } conv_attr;

static om_status conv_attrs(om_graph *g, const om_node *n, int nd, conv_attr *c) {
    const om_attr *pad = om_attr_get(n->attr, n->n_attr, "pad");
    int64_t p[6];
    c->nd = nd;
    c->groups = om_node_int(n, "groups", 1);
    OM_TRY(attr_ints(g, n, "stride", nd, 1, c->stride));
    OM_TRY(attr_ints(g, n, "dilation", nd, 1, c->dil));
    bool both = pad && pad->kind == OM_ATTR_DIMS && pad->n == 2u * (uint32_t)nd; /* begins, then ends */
    OM_TRY(attr_ints(g, n, "pad", both ? 2 * nd : nd, 0, p));
    for (int i = 0; i < nd; i++) {
        c->lo[i] = p[i];
        c->hi[i] = p[both ? nd + i : i];
        OM_CHECK(g->cx, c->stride[i] >= 1 && c->dil[i] >= 1 && c->lo[i] >= 0 && c->hi[i] >= 0,
                 "%s: stride %lld, dilation %lld, pad %lld and %lld along spatial axis %d; stride and dilation must be "
                 "at least 1, "
                 "pad at least 0",
                 n->op->name, (long long)c->stride[i], (long long)c->dil[i], (long long)c->lo[i], (long long)c->hi[i],
                 i);
    }
    OM_CHECK(g->cx, c->groups >= 1, "%s: %lld groups; at least 1 is needed", n->op->name, (long long)c->groups);
    return OM_OK;
}

/* x (n, c, ...), w (o, c / groups, ...) -> y */
static om_status conv_shape(om_graph *g, const om_node *n, const om_type *x, const om_type *w, om_type *y) {
    const char *op = n->op->name;
    conv_attr c = {0};
    OM_CHECK(g->cx, x->rank >= 3 && x->rank <= 5 && w->rank == x->rank,
             "%s: x of rank %d, w of rank %d; both 3 to 5 (n, c, 1 to 3 spatial axes)",
             op, x->rank, w->rank);
    OM_CHECK(g->cx, om_is_float(x->dtype) && w->dtype == x->dtype, "%s: x is %s, w %s; floats of one type are needed",
             op, om_dtype_name(x->dtype), om_dtype_name(w->dtype));
    OM_TRY(conv_attrs(g, n, x->rank - 2, &c));
    int64_t xc, wc, o;
    OM_CHECK(g->cx, !om_dim_const(g, x->dim[1], &xc) || !om_dim_const(g, w->dim[1], &wc) || xc == wc * c.groups,
             "%s: x has %lld channels, w takes %lld in each of %lld groups", op, (long long)xc, (long long)wc,
             (long long)c.groups);
    OM_CHECK(g->cx, !om_dim_const(g, w->dim[0], &o) || o % c.groups == 0,
             "%s: %lld output channels cannot be split into %lld groups", op, (long long)o, (long long)c.groups);
    *y = *x;
    y->dim[1] = w->dim[0];
    for (int i = 0; i < c.nd; i++) { /* (in + lo + hi - dil (k - 1) - 1) / stride + 1 */
        om_dim span = om_dim_mul(g, om_dim_sub(g, w->dim[2 + i], 1), c.dil[i]);
        om_dim room = om_dim_sub(g, om_dim_sub(g, om_dim_add(g, x->dim[2 + i], c.lo[i] + c.hi[i]), span), 1);
        int64_t r;
        OM_CHECK(g->cx, !om_dim_const(g, room, &r) || r >= 0,
                 "%s: the kernel is larger than the padded input along spatial axis %d", op, i);
        y->dim[2 + i] = om_dim_add(g, om_dim_div(g, room, c.stride[i]), 1);
    }
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

/* --- running --------------------------------------------------------------------------------------------------- */

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
