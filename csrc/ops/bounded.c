/* bounded.c - rows that only the data chooses: counted once, taken out, put back (bounded sizes: graph/engine.h).
 *
 *     idx, count = select_rows(mask)      y = compress(x, idx, count)      ... layers on y's rows ...
 *     z = restore(y, idx, count)
 *
 * compress and restore are each other's gradients. select_rows defines the symbol in its attribute `count`: at most as
 * many rows as the mask has. `most`: where more than that share of them is true, leaving out the others does not pay,
 * and all rows are taken; whoever sets it must do with more rows than the mask says.
 */
#include "ops/attr.h"
#include "ops/bounded.h"

om_status bounded_operands(om_graph *g, const om_node *n, int idx, int count, om_dim *size) {
    const om_id c = om_ins(g, n)[count];
    const om_value *v = om_val(g, c);
    const om_node *made = v->node == OM_NONE ? NULL : &g->nodes.v[v->node];
    OM_CHECK(g->cx, made && om_is(made, select_rows) && v->out == 1,
             "%s: operand %d is no count: the second result of a select_rows is needed", n->op->name, count);
    *size = attr_dim(made, "count", 0);
    const om_type *t = idx < 0 ? NULL : om_ty(g, om_ins(g, n)[idx]);
    OM_CHECK(g->cx, !t || (t->dtype == OM_I64 && t->rank == 1 && t->dim[0] == *size),
             "%s: operand %d is not the list of rows that operand %d counts", n->op->name, idx, count);
    return OM_OK;
}

static om_status select_rows_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_type mask = *om_ty(g, om_ins(g, n)[0]);
    const om_dim size = attr_dim(n, "count", 0);
    OM_CHECK(g->cx, mask.dtype == OM_BOOL && mask.rank == 1,
             "select_rows: the mask is %s of rank %d; bool (n) is needed", om_dtype_name(mask.dtype), mask.rank);
    OM_CHECK(g->cx, size < 0 && g->exprs.v[~size].kind == OM_DIM_SYM,
             "select_rows: attribute count must be the name of a size");
    OM_TRY(om_sym_bound(g, g->syms.v[g->exprs.v[~size].a].name, mask.dim[0]));
    om_sym *s = &g->syms.v[g->exprs.v[~size].a];
    if (s->count == OM_NONE) s->count = n->out + 1;
    const double most = om_node_float(n, "most", 1);
    OM_CHECK(g->cx, most >= 0 && most <= 1, "select_rows: most is %g; 0 to 1 is allowed", most);
    out[0] = (om_type){.dtype = OM_I64, .rank = 1, .dim = {size}};
    out[1] = (om_type){.dtype = OM_I64};
    return OM_OK;
}

static om_status compress_infer(om_graph *g, const om_node *n, om_type *out) {
    om_dim size;
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_TRY(bounded_operands(g, n, 1, 2, &size));
    const om_dim bound = g->syms.v[g->exprs.v[~size].a].bound;
    OM_CHECK(g->cx, out->rank >= 1 && out->dim[0] == bound, "compress: x must have as many rows as the mask");
    OM_CHECK(g->cx, om_node_int(n, "past", 0) == 0 || out->dtype == OM_I64 || out->dtype == OM_I32,
             "compress: past is for i64 and i32, x is %s", om_dtype_name(out->dtype));
    out->dim[0] = size;
    return OM_OK;
}

static om_status restore_infer(om_graph *g, const om_node *n, om_type *out) {
    om_dim size;
    const om_attr *shape;
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_TRY(bounded_operands(g, n, 1, 2, &size));
    OM_TRY(attr_shape(g, n, "shape", &shape));
    bool fits = out->rank >= 1 && out->dim[0] == size && shape->n == out->rank &&
                shape->dims[0] == g->syms.v[g->exprs.v[~size].a].bound;
    for (int i = 1; i < out->rank && fits; i++) fits = shape->dims[i] == out->dim[i];
    OM_CHECK(g->cx, fits, "restore: shape must have the mask's rows, and otherwise y's sizes");
    out->dim[0] = shape->dims[0];
    return OM_OK;
}

static om_status trim_infer(om_graph *g, const om_node *n, om_type *out) {
    om_dim size;
    int axis;
    *out = *om_ty(g, om_ins(g, n)[0]);
    OM_TRY(bounded_operands(g, n, -1, 1, &size));
    OM_TRY(attr_axis(g, n, out->rank, &axis));
    OM_CHECK(g->cx, out->dim[axis] == size, "trim: axis %d has not the size that is counted", axis);
    return OM_OK;
}

static om_status compress_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    const om_id *in = om_ins(b->g, n), idx = in[1], count = in[2];
    const om_type x = *om_ty(b->g, in[0]);
    if (want[0])
        dx[0] = om_make(b->g, &om_op_restore, OM_IN(dy[0], idx, count), OM_ATTRS(OM_AD("shape", x.dim, x.rank)));
    return OM_OK;
}

static om_status restore_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    const om_id *in = om_ins(b->g, n), idx = in[1], count = in[2];
    if (want[0]) dx[0] = om_make(b->g, &om_op_compress, OM_IN(dy[0], idx, count), NULL, 0);
    return OM_OK;
}

static om_status trim_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    const om_id count = om_ins(b->g, n)[1];
    if (want[0])
        dx[0] = om_make(b->g, &om_op_trim, OM_IN(dy[0], count), OM_ATTRS(OM_AI("axis", om_node_int(n, "axis", 0))));
    return OM_OK;
}

const om_op om_op_select_rows = {
    OM_OP(select_rows), .kind = OM_K_GATHER, .min_in = 1, .max_in = 1, .n_out = 2, .infer = select_rows_infer};
const om_op om_op_compress = {OM_OP(compress),
                              .kind = OM_K_GATHER,
                              .min_in = 3,
                              .max_in = 3,
                              .n_out = 1,
                              .infer = compress_infer,
                              .grad = compress_grad};
const om_op om_op_restore = {OM_OP(restore),
                             .kind = OM_K_SCATTER,
                             .min_in = 3,
                             .max_in = 3,
                             .n_out = 1,
                             .infer = restore_infer,
                             .grad = restore_grad};
const om_op om_op_trim = {OM_OP(trim),
                          .kind = OM_K_GATHER,
                          .min_in = 2,
                          .max_in = 2,
                          .n_out = 1,
                          .infer = trim_infer,
                          .grad = trim_grad};
