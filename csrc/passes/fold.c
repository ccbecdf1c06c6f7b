/* fold.c - constant folding: a node whose operands are constants, or that has none (iota, fill), is evaluated by its
 * own kernel and becomes a constant. Random and host nodes never are; results of more than 64 KiB stay computed (a
 * causal mask of a long sequence costs less to make than to keep).
 *
 * The node is copied first, so that operands and sizes are those of the new graph; when it folds, the copy is left
 * dead.
 */
#include "graph/device.h"
#include "graph/exec.h"
#include "graph/sabotage.h"
#include "passes/fold.h"
#include "passes/passes.h"

enum { FOLD_MAX_BYTES = 65536 };

/* The tensor of a value whose sizes are numbers; false otherwise. */
static bool fold_tensor(const om_graph *g, om_id v, om_tensor *t) {
    const om_value *x = om_val(g, v);
    *t = (om_tensor){.data = (void *)x->data, .dtype = x->type.dtype, .rank = x->type.rank, .device = -1};
    for (int i = 0; i < t->rank; i++)
        if (x->type.dim[i] < 0) return false;
        else t->dim[i] = x->type.dim[i];
    om_dense_strides(t);
    return om_dtype_size(x->type.dtype) > 0;
}

static bool fold_bytes(const om_tensor *t, int64_t *sum) {
    int64_t n = (int64_t)om_dtype_size(t->dtype);
    for (int i = 0; i < t->rank; i++)
        if (__builtin_mul_overflow(n, t->dim[i], &n)) return false;
    return !__builtin_add_overflow(*sum, n, sum);
}

static bool fold_attrs(const om_graph *g, const om_node *n) { /* no size of the run in them */
    for (int i = 0; i < n->n_attr; i++)
        for (uint32_t k = 0; n->attr[i].kind == OM_ATTR_DIMS && k < n->attr[i].n; k++) {
            int64_t c;
            if (!om_dim_const(g, n->attr[i].dims[k], &c)) return false;
        }
    return true;
}

om_status om_fold_node(om_graph *g, const om_node *node, const om_id *operand, om_id *result, bool *done) {
    om_ctx *cx = g->cx;
    const om_node n = *node; /* making constants does not move nodes, but be sure */
    om_tensor in[OM_FOLD_IN] = {0}, out[OM_FOLD_OUT];
    int64_t bytes = 0;
    *done = false;
    const bool runs = n.op->kind != OM_K_HOST && (om_row_of(&om_device_cpu, n.op)->run || n.op->view);
    const bool draws = n.op->random;
    if (!runs || (draws && !om_sabotage("fold.random"))) return OM_OK;
    if (n.n_in > OM_FOLD_IN || n.n_out > OM_FOLD_OUT) return OM_OK;
    for (int i = 0; i < n.n_in; i++)
        if (operand[i] != OM_NONE && (om_val(g, operand[i])->role != OM_CONST || !fold_tensor(g, operand[i], &in[i])))
            return OM_OK;
    for (int i = 0; i < n.n_out; i++)
        if (!fold_tensor(g, n.out + (om_id)i, &out[i]) || !fold_bytes(&out[i], &bytes)) return OM_OK;
    if (bytes > FOLD_MAX_BYTES || !fold_attrs(g, &n)) return OM_OK;

    om_arena tmp = {.cx = cx};
    const om_attr *attr = NULL;
    om_status s = om_attrs_concrete(&tmp, g, &n, NULL, &attr); /* negative integers are expressions, too */
    for (int i = 0; i < n.n_out && s == OM_OK; i++) {
        out[i].data = om_arena_alloc(&tmp, (size_t)om_numel(&out[i]) * om_dtype_size(out[i].dtype) + 64);
        if (!out[i].data) s = cx->status;
        else out[i].data = (char *)out[i].data + (-(uintptr_t)out[i].data & 63);
    }
    if (s == OM_OK) s = om_eval_node(cx, g, &n, attr, in, out, 0);
    for (int i = 0; i < n.n_out && s == OM_OK; i++) {
        result[i] = om_const(g, out[i].dtype, out[i].rank, out[i].dim, out[i].data);
        if (result[i] == OM_NONE) s = cx->status;
    }
    om_arena_free(&tmp);
    *done = s == OM_OK;
    return s;
}

static om_status fold_emit(om_rewriter *r, om_id id) {
    OM_TRY(om_rewrite_copy(r, id));
    om_id out[OM_FOLD_OUT];
    bool done;
    const om_node *n = om_last(r->to);
    OM_TRY(om_fold_node(r->to, n, om_ins(r->to, n), out, &done));
    for (int i = 0; done && i < r->from->nodes.v[id].n_out; i++) r->map[r->from->nodes.v[id].out + (om_id)i] = out[i];
    return OM_OK;
}

om_status om_pass_run_fold(om_ctx *cx, const om_graph *in, om_graph **out) {
    return om_rewrite(cx, in, fold_emit, NULL, out);
}
