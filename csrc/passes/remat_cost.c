/* remat_cost.c - what a node costs, by calculation (remat.h): arithmetic at a rate of its dtype, and the bytes that it
 * reads and writes at a rate of memory. The two add up, as kernels here rarely hide one behind the other. Only ratios
 * count: what is computed again is compared with other values, and with the whole step. The rates are those of two
 * cores of an x86 server (docs/MEMORY.md); machines with ten times as much of both decide the same.
 */
#include "passes/remat.h"

/* per microsecond */
static const double COST_BYTES = 10e3, COST_FLOPS = 100e3, COST_HALF_FLOPS = 300e3, COST_CALL = 0.5;

static double cost_numel(const om_graph *g, om_id v, const int64_t *sym) {
    double n = 1;
    for (int k = 0; v != OM_NONE && k < om_ty(g, v)->rank; k++) n *= (double)om_dim_eval(g, om_ty(g, v)->dim[k], sym);
    return v == OM_NONE ? 0 : n;
}

/* axis counts from the end: -1 is the last */
static double cost_dim(const om_graph *g, om_id v, int axis, const int64_t *sym) {
    const om_type *t = om_ty(g, v);
    return t->rank + axis < 0 ? 1 : (double)om_dim_eval(g, t->dim[t->rank + axis], sym);
}

/* Products: twice the multiplications. Rows of functions (exp, sqrt, random bits): about ten operations an element. */
double om_remat_products(const om_graph *g, const om_node *n, const int64_t *sym) {
    const om_id *in = om_ins(g, n);
    const double out = cost_numel(g, n->out, sym);
    if (om_is(n, matmul)) return 2 * out * cost_dim(g, in[0], -1, sym);
    if (om_is(n, attention) || om_is(n, attention_grad)) {
        const bool grad = om_is(n, attention_grad);
        const om_id q = in[grad], k = in[grad + 1], v = in[grad + 2];
        const double scores = cost_numel(g, q, sym) / cost_dim(g, q, -1, sym) * cost_dim(g, k, -2, sym);
        const double seen = om_node_int(n, "causal", 0) ? 0.5 : 1;
        const double each = 2 * (cost_dim(g, q, -1, sym) + cost_dim(g, v, -1, sym)) + 10;
        return seen * scores * each * (grad ? 2.5 : 1);
    }
    if (om_is(n, conv)) return 2 * out * cost_numel(g, in[1], sym) / cost_dim(g, in[1], -om_ty(g, in[1])->rank, sym);
    if (om_is(n, conv_transpose))
        return 2 * cost_numel(g, in[0], sym) * cost_numel(g, in[1], sym) /
               cost_dim(g, in[1], -om_ty(g, in[1])->rank, sym);
    if (om_is(n, conv_grad))
        return 4 * cost_numel(g, in[0], sym) * cost_numel(g, in[2], sym) /
               cost_dim(g, in[2], -om_ty(g, in[2])->rank, sym);
    if (om_is(n, recurrent)) return 2 * cost_numel(g, in[0], sym) * cost_dim(g, in[1], -1, sym);
    if (om_is(n, recurrent_grad)) return 4 * cost_numel(g, n->out, sym) * cost_dim(g, in[2], -1, sym);
    if (om_is(n, grouped_matmul)) return out * cost_dim(g, in[0], -1, sym);
    if (om_is(n, grouped_outer)) return cost_numel(g, in[0], sym) * cost_dim(g, in[1], -1, sym);
    if (om_is(n, cdist)) return 3 * out * cost_dim(g, in[0], -1, sym);
    return -1;
}

static double cost_flops(const om_graph *g, const om_node *n, const int64_t *sym) {
    const double products = om_remat_products(g, n, sym), out = cost_numel(g, n->out, sym);
    const om_id *in = om_ins(g, n);
    if (products >= 0) return products;
    if (om_is(n, topk)) return 40 * cost_numel(g, in[0], sym);
    return (n->op->kind == OM_K_POINTWISE ? 4 : 10) * out;
}

double om_remat_cost(const om_graph *g, const om_node *n, const int64_t *sym) {
    double bytes = 0;
    if (n->op->view) return 0;
    for (int k = 0; k < n->n_in; k++)
        if (om_ins(g, n)[k] != OM_NONE)
            bytes += cost_numel(g, om_ins(g, n)[k], sym) * (double)om_dtype_size(om_ty(g, om_ins(g, n)[k])->dtype);
    for (int k = 0; k < n->n_out; k++)
        bytes += cost_numel(g, n->out + (om_id)k, sym) * (double)om_dtype_size(om_ty(g, n->out + (om_id)k)->dtype);
    const bool half = om_is_half(om_ty(g, n->out)->dtype);
    return COST_CALL + bytes / COST_BYTES + cost_flops(g, n, sym) / (half ? COST_HALF_FLOPS : COST_FLOPS);
}
