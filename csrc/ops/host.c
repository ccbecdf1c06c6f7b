/* host.c - nodes that the host runs: the executor stops there, hands over the inputs and goes on with what comes back.
 *
 * host: index = row of the host's own table, one row per node, so that the host finds a forward's state by it. diff = 1
 * when the host can differentiate it. Types of the outputs stand in the attributes: out_dtype[i] is an om_dtype,
 * shape<i> the sizes of output i (of any kind of object the sizes may be left out: rank 0).
 * host_grad: the same index; its inputs are the gradients of the host node's outputs (floats only, in order; zeros
 * where none arrives), its outputs the gradients of the host node's inputs listed in `want`. A module kept in PyTorch
 * may have hundreds of parameters, a node has at most 64 outputs: then there are several host_grad nodes, part = 0, 1,
 * ..., and the host answers all from one computation. effect = 1: it runs what a user wrote, so it is never dead code
 * (graph/rewrite.c). There is no kernel; a host node that a plan would run by itself is an error.
 */
#include "ops/attr.h"

#include <stdio.h>

/* om_make: outputs of a node; attributes of a node are 64, a gradient takes one */
enum { HOST_OUTPUTS = 64, HOST_PART = 32 };

static om_status host_infer(om_graph *g, const om_node *n, om_type *out) {
    const om_attr *dt = om_attr_get(n->attr, n->n_attr, "out_dtype");
    OM_CHECK(g->cx, !dt || dt->kind == OM_ATTR_DIMS, "%s: out_dtype must list the dtypes of the outputs", n->op->name);
    OM_CHECK(g->cx, om_node_int(n, "index", -1) >= 0, "%s: attribute index (row of the host's table) is missing",
             n->op->name);
    for (int i = 0; i < n->n_out; i++) {
        char name[24];
        int64_t t;
        OM_CHECK(g->cx, om_dim_const(g, dt->dims[i], &t) && t > OM_NODTYPE && t < OM_N_DTYPES,
                 "%s: entry %d of out_dtype is no dtype", n->op->name, i);
        out[i].dtype = (uint8_t)t;
        snprintf(name, sizeof name, "shape%d", i);
        const om_attr *shape = om_attr_get(n->attr, n->n_attr, name);
        OM_CHECK(g->cx, shape || t == OM_OPAQUE, "%s: attribute %s (the sizes of output %d) is missing", n->op->name,
                 name, i);
        if (!shape) continue;
        OM_CHECK(g->cx, shape->kind == OM_ATTR_DIMS && shape->n <= OM_RANK, "%s: %s must list at most %d sizes",
                 n->op->name, name, OM_RANK);
        out[i].rank = (uint8_t)shape->n;
        for (uint32_t k = 0; k < shape->n; k++) out[i].dim[k] = shape->dims[k];
    }
    return OM_OK;
}

/* One part: the gradients of the inputs `which`. */
static om_status host_grad_part(om_builder *b, const om_node *n, const om_id *dy, int n_dy, const om_dim *which,
                                int n_want, int part, om_id *dx) {
    om_graph *g = b->g;
    om_dim dtypes[HOST_PART], shapes[HOST_PART][OM_RANK];
    char names[HOST_PART][24];
    om_attr attr[4 + HOST_PART];
    int n_attr = 0;
    for (int i = 0; i < n_want; i++) {
        const om_type *t = om_ty(g, om_ins(g, n)[which[i]]);
        dtypes[i] = t->dtype;
        memcpy(shapes[i], t->dim, sizeof t->dim);
        snprintf(names[i], sizeof names[i], "shape%d", i);
        attr[n_attr++] = OM_AD(names[i], shapes[i], t->rank);
    }
    attr[n_attr++] = OM_AI("index", om_node_int(n, "index", 0));
    attr[n_attr++] = OM_AI("part", part);
    attr[n_attr++] = OM_AD("want", which, n_want);
    attr[n_attr++] = OM_AD("out_dtype", dtypes, n_want);
    om_id first = om_make(g, &om_op_host_grad, dy, n_dy, attr, n_attr);
    if (first == OM_NONE) return g->cx->status;
    for (int i = 0; i < n_want; i++) dx[which[i]] = first + (om_id)i;
    return OM_OK;
}

static om_status host_grad_build(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {
    om_graph *g = b->g;
    om_id in[HOST_OUTPUTS];
    om_dim which[HOST_PART];
    int n_in = 0, n_want = 0, part = 0;
    if (!om_node_int(n, "diff", 1)) return OM_OK;
    for (int i = 0; i < n->n_out; i++) {
        int t = om_ty(g, n->out + (om_id)i)->dtype;
        if (om_is_float(t)) in[n_in++] = dy[i] != OM_NONE ? dy[i] : om_b_zeros_like(g, n->out + (om_id)i);
    }
    for (int i = 0; i < n->n_in; i++) {
        if (want[i]) which[n_want++] = i;
        if (n_want == HOST_PART || (n_want && i == n->n_in - 1)) {
            OM_TRY(host_grad_part(b, n, in, n_in, which, n_want, part++, dx));
            n_want = 0;
        }
    }
    return OM_OK;
}

const om_op om_op_host = {
    OM_OP(host),
    .kind = OM_K_HOST,
    .min_in = 0,
    .max_in = -1,
    .n_out = -1,
    .infer = host_infer,
    .grad = host_grad_build,
};
const om_op om_op_host_grad = {
    OM_OP(host_grad),
    .kind = OM_K_HOST,
    .min_in = 0,
    .max_in = -1,
    .n_out = -1,
    .infer = host_infer,
};
