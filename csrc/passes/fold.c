/* fold.c - constant folding: a node whose operands are constants, or that has none (iota, fill), is evaluated by its own kernel and
 * becomes a constant. Random and host nodes never are; results of more than 64 KiB stay computed (a causal mask of a long sequence
 * costs less to make than to keep).
 *
 * The node is copied first, so that operands and sizes are those of the new graph; when it folds, the copy is left dead.
 */
#include "passes.h"

enum { FOLD_MAX_BYTES = 65536, FOLD_MAX_IN = 16, FOLD_MAX_OUT = 4 };

/* The tensor of a value whose sizes are numbers; false otherwise. */
static bool fold_tensor(const om_graph *g, om_id v, om_tensor *t) {
    const om_value *x = om_val(g, v);
    *t = (om_tensor){.data = (void *)x->data, .dtype = x->type.dtype, .rank = x->type.rank, .device = x->type.device};
    for (int i = 0; i < t->rank; i++)
        if (x->type.dim[i] < 0) return false;
        else t->dim[i] = x->type.dim[i];
    om_dense_strides(t);
    return x->type.device < 0 && om_dtype_size(x->type.dtype) > 0;
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

/* Kernels read integers, not expressions: negative constants are expressions in the graph. */
static om_attr *fold_concrete(om_ctx *cx, om_arena *a, const om_graph *g, const om_node *n) {
    om_attr *to = om_arena_copy(a, n->attr, n->n_attr * sizeof *to);
    for (int i = 0; to && i < n->n_attr; i++) {
        if (to[i].kind != OM_ATTR_DIMS) continue;
        om_dim *d = om_arena_alloc(a, ((size_t)to[i].n + 1) * sizeof *d);
        if (!d) return NULL;
        for (uint32_t k = 0; k < to[i].n; k++) om_dim_const(g, n->attr[i].dims[k], &d[k]);
        to[i].dims = d;
    }
    (void)cx;
    return to;
}

static om_status fold_emit(om_rewriter *r, om_id id) {
    OM_TRY(om_rewrite_copy(r, id));
    om_graph *g = r->to;
    om_ctx *cx = g->cx;
    const om_node n = *om_last(g);
    om_tensor in[FOLD_MAX_IN] = {0}, out[FOLD_MAX_OUT];
    int64_t bytes = 0;
    if (n.op->random || n.op->kind == OM_K_HOST || n.n_in > FOLD_MAX_IN || n.n_out > FOLD_MAX_OUT || (!n.op->run && !n.op->view))
        return OM_OK;
    for (int i = 0; i < n.n_in; i++) {
        om_id v = om_ins(g, &n)[i];
        if (v != OM_NONE && (om_val(g, v)->role != OM_CONST || !fold_tensor(g, v, &in[i]))) return OM_OK;
    }
    for (int i = 0; i < n.n_out; i++)
        if (!fold_tensor(g, n.out + (om_id)i, &out[i]) || !fold_bytes(&out[i], &bytes)) return OM_OK;
    if (bytes > FOLD_MAX_BYTES || !fold_attrs(g, &n)) return OM_OK;

    om_arena tmp = {.cx = cx};
    const om_attr *attr = fold_concrete(cx, &tmp, g, &n);
    om_status s = attr ? OM_OK : cx->status;
    for (int i = 0; i < n.n_out && s == OM_OK; i++) {
        out[i].data = om_arena_alloc(&tmp, (size_t)om_numel(&out[i]) * om_dtype_size(out[i].dtype) + 64);
        if (!out[i].data) s = cx->status;
        else out[i].data = (char *)out[i].data + (-(uintptr_t)out[i].data & 63);
    }
    if (s == OM_OK) s = om_eval_node(cx, g, &n, attr, in, out, 0);
    for (int i = 0; i < n.n_out && s == OM_OK; i++) {
        om_id c = om_const(g, out[i].dtype, out[i].rank, out[i].dim, out[i].data);
        if (c == OM_NONE) s = cx->status;
        else r->map[r->from->nodes.v[id].out + (om_id)i] = c;
    }
    om_arena_free(&tmp);
    return s;
}

static om_status fold_run(om_ctx *cx, const om_graph *in, om_graph **out) { return om_rewrite(cx, in, fold_emit, NULL, out); }

const om_pass om_pass_fold = {"fold", "evaluate nodes whose operands are constants, up to 64 KiB of result", fold_run};
