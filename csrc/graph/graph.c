/* graph.c - the graph and the builder that grows it.
 *
 * om_make appends a node and lets its operator infer the types of its outputs, so a graph is well typed by construction
 * and topologically ordered. Attributes and names are copied into the graph's arena. Errors are sticky: after the first
 * one om_make returns OM_NONE and builds nothing, so gradient rules and import code need no checks of their own.
 */
#include "graph/engine.h"
#include "graph/half.h"

#include <stdio.h>

#define OP(name, doc) const char om_doc_##name[] = doc;
#include "graph/ops.def"
#undef OP

const om_op *const om_ops[] = {
#define OP(name, doc) &om_op_##name,
#include "graph/ops.def"
#undef OP
    NULL,
};

const om_op *om_op_find(const char *name) {
    for (int i = 0; om_ops[i]; i++)
        if (!strcmp(om_ops[i]->name, name)) return om_ops[i];
    return NULL;
}

int om_region_depth(const char *region) {
    int n = region && *region;
    for (; n && *region; region++) n += *region == '/';
    return n;
}

int om_region_common(const char *a, const char *b) {
    int n = 0;
    for (; a && b && *a && *b; n++) {
        const size_t x = strcspn(a, "/"), y = strcspn(b, "/");
        if (x != y || memcmp(a, b, x) != 0) break;
        a += x + (a[x] == '/');
        b += y + (b[y] == '/');
    }
    return n;
}

om_graph *om_graph_new(om_ctx *cx) {
    om_graph *g = om_alloc(cx, sizeof *g);
    if (!g) return NULL;
    static _Atomic uint64_t serial;
    g->cx = cx;
    g->arena.cx = cx;
    g->serial = ++serial;
    g->cur_scope = OM_NONE;
    /* never NULL: om_ins adds an offset to it */
    if (!om_grow(cx, (void **)&g->operands.v, &g->operands.cap, sizeof *g->operands.v)) {
        om_free(cx, g);
        return NULL;
    }
    return g;
}

void om_graph_free(om_graph *g) {
    if (!g) return;
    om_ctx *cx = g->cx;
    om_free(cx, g->values.v);
    om_free(cx, g->nodes.v);
    om_free(cx, g->operands.v);
    om_free(cx, g->exprs.v);
    om_free(cx, g->syms.v);
    om_free(cx, g->expr_index.slot);
    om_free(cx, g->sym_index.slot);
    om_free(cx, g->copied.dim.v);
    om_free(cx, g->scopes.v);
    om_free(cx, g->inputs.v);
    om_free(cx, g->outputs.v);
    om_free(cx, g->output_names.v);
    om_free(cx, g->writes.v);
    om_free(cx, g->grads.v);
    om_arena_free(&g->arena);
    om_free(cx, g);
}

/* --- attributes -------------------------------------------------------------------------------- */

const om_attr *om_attr_get(const om_attr *a, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (!strcmp(a[i].name, name)) return &a[i];
    return NULL;
}
int64_t om_attr_int(const om_attr *a, int n, const char *name, int64_t dflt) {
    const om_attr *x = om_attr_get(a, n, name);
    return x && x->kind == OM_ATTR_INT ? x->i : dflt;
}
double om_attr_float(const om_attr *a, int n, const char *name, double dflt) {
    const om_attr *x = om_attr_get(a, n, name);
    return x && x->kind == OM_ATTR_FLOAT ? x->f : x && x->kind == OM_ATTR_INT ? (double)x->i : dflt;
}
const char *om_attr_str(const om_attr *a, int n, const char *name, const char *dflt) {
    const om_attr *x = om_attr_get(a, n, name);
    return x && x->kind == OM_ATTR_STR ? x->s : dflt;
}

/* --- nodes ------------------------------------------------------------------------------------- */

om_node *om_last(om_graph *g) {
    static _Thread_local om_node none; /* after a failure: writes go nowhere */
    return g->cx->status == OM_OK && g->nodes.n ? &g->nodes.v[g->nodes.n - 1] : &none;
}

static bool attrs_copy(om_graph *g, om_node *n, const om_attr *attr, int n_attr) {
    om_attr *to = om_arena_copy(&g->arena, attr, (size_t)n_attr * sizeof *attr);
    if (!to) return false;
    for (int i = 0; i < n_attr; i++) {
        if (!(to[i].name = om_arena_str(&g->arena, to[i].name))) return false;
        if (to[i].kind == OM_ATTR_STR && !(to[i].s = om_arena_str(&g->arena, to[i].s))) return false;
        if (to[i].kind == OM_ATTR_DIMS &&
            !(to[i].dims = om_arena_copy(&g->arena, to[i].dims, to[i].n * sizeof(om_dim))))
            return false;
    }
    n->attr = to;
    n->n_attr = (uint16_t)n_attr;
    return true;
}

#if defined(OM_TRACE_OPS) /* tools/om_ops.c: what was ever made */
uint8_t om_ops_made[OM_N_OPS], om_types_made[OM_N_DTYPES];
static om_status type_note(om_ctx *cx, int dtype) {
    om_types_made[dtype] = 1;
    return cx->status;
}
#elif defined(OM_ONLY) /* make device OPS=...: copies convert between the types of these files (cpu/kernels/copy.k.c) */
#include <only.h>
static om_status type_note(om_ctx *cx, int dtype) {
#define TYPE(t) [OM_##t] = OM_KEEP_TYPE_##t
    static const uint8_t kept[OM_N_DTYPES] = {TYPE(F32), TYPE(F64), TYPE(BF16), TYPE(F16), TYPE(I64),
                                              TYPE(I32), TYPE(I16), TYPE(I8),   TYPE(U8),  TYPE(BOOL)};
#undef TYPE
    return kept[dtype] ? cx->status
                       : om_fail(cx, OM_UNSUPPORTED,
                                 "%s: this library was built for files that do not use this type: make device "
                                 "OPS=\"...\" with this one as well",
                                 om_dtype_name(dtype));
}
#else
static om_status type_note(om_ctx *cx, int dtype) { return (void)dtype, cx->status; }
#endif

om_id om_make(om_graph *g, const om_op *op, const om_id *in, int n_in, const om_attr *attr, int n_attr) {
    om_ctx *cx = g->cx;
    om_id trimmed[OM_MAX_IN];
    if (cx->status != OM_OK) return OM_NONE;
    if (n_in < op->min_in || (op->max_in >= 0 && n_in > op->max_in))
        return om_fail(cx, OM_INVALID, "%s takes %d to %d operands, %d given", op->name, op->min_in, op->max_in, n_in),
               OM_NONE;
    for (int i = 0; i < n_in; i++)
        if (in[i] == OM_NONE ? i < op->min_in && !(op->optional >> (i & 31) & 1) : in[i] >= g->values.n)
            return om_fail(cx, OM_INVALID, "%s: operand %d is required", op->name, i), OM_NONE;

    if (g->bounded && n_in && n_in <= OM_MAX_IN) {
        in = om_bounded_operands(g, op, in, n_in, attr, n_attr, trimmed);
        if (!in) return OM_NONE;
    }
    om_id in0 = g->operands.n, out0 = g->values.n;
    uint8_t phase = op->state ? OM_UPDATE : g->cur_phase;
    for (int i = 0; i < n_in; i++) /* what reads an update is one */
        if (in[i] != OM_NONE && om_val(g, in[i])->node != OM_NONE &&
            g->nodes.v[om_val(g, in[i])->node].phase == OM_UPDATE)
            phase = OM_UPDATE;
    for (int i = 0; i < n_in; i++) {
        om_id x = in[i]; /* `in` may point into operands, which may move */
        om_id *slot = OM_PUSH(cx, &g->operands);
        if (!slot) return OM_NONE;
        *slot = x;
    }
    om_node node = {.op = op, .in = in0, .out = out0, .n_in = (uint16_t)n_in, .phase = phase, .scope = g->cur_scope};
    if (!attrs_copy(g, &node, attr, n_attr)) return OM_NONE;
    const om_attr *dts = om_attr_get(node.attr, n_attr, "out_dtype");
    int n_out = op->n_out >= 0 ? op->n_out : dts ? (int)dts->n : 0;
    if (n_out > OM_MAX_OUT)
        return om_fail(cx, OM_UNSUPPORTED, "%s with %d outputs: at most %d", op->name, n_out, OM_MAX_OUT), OM_NONE;
    node.n_out = (uint16_t)n_out;
    om_type ty[OM_MAX_OUT] = {0};
#if defined(OM_TRACE_OPS)
    om_ops_made[op->id] = 1;
#endif
    if (op->infer(g, &node, ty) != OM_OK || cx->status != OM_OK) {
        if (cx->status == OM_OK) om_fail(cx, OM_INTERNAL, "%s: its type rule failed without a message", op->name);
        return OM_NONE;
    }
    for (int i = 0; i < n_out; i++)
        if (type_note(cx, ty[i].dtype) != OM_OK) return OM_NONE;
    if (g->bounded && om_bounded_check(g, &node, ty) != OM_OK) return OM_NONE;
    om_node *slot = OM_PUSH(cx, &g->nodes);
    if (!slot) return OM_NONE;
    *slot = node;
    for (int i = 0; i < n_out; i++) {
        om_value *v = OM_PUSH(cx, &g->values);
        if (!v) return OM_NONE;
        *v = (om_value){.type = ty[i], .node = g->nodes.n - 1, .role = OM_ACT, .out = (uint16_t)i, .input = OM_NONE};
    }
    return out0;
}

om_id om_input(om_graph *g, om_role role, const char *name, const om_type *t) {
    om_ctx *cx = g->cx;
    if (cx->status != OM_OK || type_note(cx, t->dtype) != OM_OK) return OM_NONE;
    om_value *v = OM_PUSH(cx, &g->values);
    om_id *slot = v ? OM_PUSH(cx, &g->inputs) : NULL;
    if (!slot) return OM_NONE;
    *slot = g->values.n - 1;
    *v = (om_value){.type = *t,
                    .node = OM_NONE,
                    .role = (uint8_t)role,
                    .input = g->inputs.n - 1,
                    .name = om_arena_str(&g->arena, name)};
    return *slot;
}

om_status om_input_host(om_graph *g, om_id input) {
    om_value *v = om_val(g, g->inputs.v[input]);
    bool one = v->role != OM_GRAD_IN && om_dtype_size(v->type.dtype) > 0;
    for (int i = 0; i < v->type.rank; i++) one &= v->type.dim[i] == 1;
    OM_CHECK(g->cx, one, "graph input %u (%s) is no host scalar: it has not one element, or none of a number", input,
             v->name ? v->name : "?");
    v->host = true;
    return OM_OK;
}

om_id om_const(om_graph *g, int dtype, int rank, const int64_t *dim, const void *data) {
    om_ctx *cx = g->cx;
    if (cx->status != OM_OK) return OM_NONE;
    size_t bytes = om_dtype_size(dtype);
    om_type t = {.dtype = (uint8_t)dtype, .rank = (uint8_t)rank};
    if (rank > OM_RANK) return om_fail(cx, OM_UNSUPPORTED, "a constant of rank %d: at most %d", rank, OM_RANK), OM_NONE;
    for (int i = 0; i < rank; i++) t.dim[i] = dim[i], bytes *= (size_t)dim[i];
    char *p = om_arena_alloc(&g->arena, bytes + 64);
    om_value *v = p ? OM_PUSH(cx, &g->values) : NULL;
    if (!v) return OM_NONE;
    p += -(uintptr_t)p & 63;
    if (bytes) memcpy(p, data, bytes);
    *v = (om_value){.type = t, .node = OM_NONE, .role = OM_CONST, .input = OM_NONE, .data = p};
    return g->values.n - 1;
}

double om_round_to(int dtype, double x) {
    switch (dtype) {
    case OM_F32: return (double)(float)x;
    case OM_BF16: return (double)om_bf16_to_f32(om_f32_to_bf16((float)x));
    case OM_F16: return (double)om_f16_to_f32(om_f32_to_f16((float)x));
    default: return x;
    }
}

om_id om_scalar(om_graph *g, int dtype, double x) {
    union { float f; double d; uint16_t h; int64_t l; int32_t i; int16_t s; int8_t c; } u = {0};
    switch (dtype) {
    case OM_F32: u.f = (float)x; break;
    case OM_F64: u.d = x; break;
    case OM_BF16: u.h = om_f32_to_bf16((float)x); break;
    case OM_F16: u.h = om_f32_to_f16((float)x); break;
    case OM_I64: u.l = (int64_t)x; break;
    case OM_I32: u.i = (int32_t)x; break;
    case OM_I16: u.s = (int16_t)x; break;
    case OM_BOOL: u.c = x != 0; break;
    default: u.c = (int8_t)(int64_t)x;
    }
    return om_const(g, dtype, 0, NULL, &u);
}

/* --- shorthands -------------------------------------------------------------------------------- */

#define FAILED(g, x) ((g)->cx->status != OM_OK || (x) == OM_NONE)

om_id om_b_un(om_graph *g, const om_op *op, om_id x) { return om_make(g, op, OM_IN(x), NULL, 0); }
om_id om_b_bin(om_graph *g, const om_op *op, om_id x, om_id y) { return om_make(g, op, OM_IN(x, y), NULL, 0); }

om_id om_b_cast(om_graph *g, om_id x, int dtype) {
    if (FAILED(g, x)) return OM_NONE;
    if (om_ty(g, x)->dtype == dtype) return x;
    return om_make(g, &om_op_cast, OM_IN(x), OM_ATTRS(OM_AI("to", dtype)));
}

om_id om_b_reshape(om_graph *g, om_id x, const om_dim *dim, int rank) {
    if (FAILED(g, x)) return OM_NONE;
    if (om_has_dims(om_ty(g, x), dim, rank)) return x;
    return om_make(g, &om_op_reshape, OM_IN(x), OM_ATTRS(OM_AD("shape", dim, rank)));
}

om_id om_b_permute(om_graph *g, om_id x, const int *perm) {
    if (FAILED(g, x)) return OM_NONE;
    int rank = om_ty(g, x)->rank;
    om_dim p[OM_RANK];
    bool same = true;
    for (int i = 0; i < rank; i++) p[i] = perm[i], same &= perm[i] == i;
    return same ? x : om_make(g, &om_op_permute, OM_IN(x), OM_ATTRS(OM_AD("perm", p, rank)));
}

om_id om_b_transpose(om_graph *g, om_id x, int a, int b) {
    if (FAILED(g, x)) return OM_NONE;
    int rank = om_ty(g, x)->rank, perm[OM_RANK];
    for (int i = 0; i < rank; i++) perm[i] = i;
    if (a < 0) a += rank;
    if (b < 0) b += rank;
    if (a < 0 || b < 0 || a >= rank || b >= rank)
        return om_fail(g->cx, OM_INVALID, "transpose of axes %d and %d of a tensor of rank %d", a, b, rank), OM_NONE;
    perm[a] = b, perm[b] = a;
    return om_b_permute(g, x, perm);
}

om_id om_b_expand(om_graph *g, om_id x, const om_dim *dim, int rank) {
    if (FAILED(g, x)) return OM_NONE;
    if (om_has_dims(om_ty(g, x), dim, rank)) return x;
    return om_make(g, &om_op_expand, OM_IN(x), OM_ATTRS(OM_AD("shape", dim, rank)));
}

om_id om_b_slice(om_graph *g, om_id x, int axis, om_dim start, om_dim end, int64_t step) {
    if (FAILED(g, x)) return OM_NONE;
    if (start == 0 && step == 1 && axis < om_ty(g, x)->rank && end == om_ty(g, x)->dim[axis]) return x;
    return om_make(
        g, &om_op_slice, OM_IN(x),
        OM_ATTRS(OM_AI("axis", axis), OM_AD("start", &start, 1), OM_AD("end", &end, 1), OM_AI("step", step)));
}

om_id om_b_sum(om_graph *g, om_id x, uint32_t axes_mask, bool keepdim) {
    if (FAILED(g, x) || !axes_mask) return FAILED(g, x) ? OM_NONE : x;
    om_dim axes[OM_RANK];
    int n = 0;
    for (int i = 0; i < om_ty(g, x)->rank; i++)
        if (axes_mask >> i & 1) axes[n++] = i;
    return om_make(g, &om_op_reduce_sum, OM_IN(x), OM_ATTRS(OM_AD("axes", axes, n), OM_AI("keepdims", keepdim)));
}

om_id om_b_sum_to(om_graph *g, om_id x, const om_type *t) {
    if (FAILED(g, x)) return OM_NONE;
    om_type to = *t, from = *om_ty(g, x); /* t may point into values, which may move */
    int lead = from.rank - to.rank;
    uint32_t mask = 0;
    for (int i = 0; i < from.rank; i++)
        if (i < lead || (to.dim[i - lead] == 1 && from.dim[i] != 1)) mask |= 1u << i;
    return om_b_reshape(g, om_b_sum(g, x, mask, true), to.dim, to.rank);
}

om_id om_b_fill(om_graph *g, int dtype, const om_dim *dim, int rank, double value) {
    return om_make(g, &om_op_fill, NULL, 0,
                   OM_ATTRS(OM_AD("shape", dim, rank), OM_AI("dtype", dtype), OM_AF("value", value)));
}

om_id om_b_zeros_like(om_graph *g, om_id x) {
    if (FAILED(g, x)) return OM_NONE;
    om_type t = *om_ty(g, x);
    return om_b_fill(g, t.dtype, t.dim, t.rank, 0);
}

om_id om_b_scale(om_graph *g, om_id x, double s) {
    if (FAILED(g, x) || s == 1) return FAILED(g, x) ? OM_NONE : x;
    const int t = om_ty(g, x)->dtype;
    const bool fits = !om_is_half(t) || om_round_to(t, s) == s;
    const int wide = fits ? t : om_compute_dtype(t);
    return om_b_cast(g, om_b_bin(g, &om_op_mul, om_b_cast(g, x, wide), om_scalar(g, wide, s)), t);
}
