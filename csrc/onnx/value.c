/* value.c - values of the file: literals, operands of a node as values of the graph or as lists of sizes, its results
 * (onnx/onnx.h). */
#include "onnx/read.h"
#include "passes/fold.h"

#include <stdio.h>

/* --- literals ------------------------------------------------------------------------------------ */

/* How the elements of a literal lie in the file, once its header was checked. */
typedef struct read_literal {
    int dtype, rank;
    int64_t dim[OM_RANK], n;
    const void *data;  /* n elements of `width` bytes each, little-endian */
    size_t width;      /* of the file's element: int32_data holds the small types */
} read_literal;

static om_status read_literal_of(om_onnx *o, const Onnx__TensorProto *t, read_literal *l) {
    const char *name = t->name ? t->name : "";
    *l = (read_literal){.dtype = om_dtype_from_onnx(t->data_type), .n = 1};
    if (l->dtype == OM_NODTYPE)
        return om_onnx_err(o, OM_UNSUPPORTED, "constant '%.80s' has ONNX element type %d, which is not supported", name,
                           t->data_type);
    ONNX_CHECK(o, t->n_dims <= OM_RANK, "constant '%.80s' has rank %zu, at most %d", name, t->n_dims, OM_RANK);
    ONNX_CHECK(o, !t->segment, "constant '%.80s' is stored in segments, which is not supported", name);
    ONNX_CHECK(o, !t->n_external_data && t->data_location == ONNX__TENSOR_PROTO__DATA_LOCATION__DEFAULT,
               "constant '%.80s' is stored in another file; save the model with its data inside", name);
    l->rank = (int)t->n_dims;
    for (int i = 0; i < l->rank; i++) {
        l->dim[i] = t->dims[i];
        ONNX_CHECK(o, t->dims[i] >= 0 && !__builtin_mul_overflow(l->n, t->dims[i], &l->n) && l->n <= INT32_MAX,
                   "constant '%.80s': sizes are negative or their product is too large", name);
    }
    size_t have;
    if (t->has_raw_data) {
        l->data = t->raw_data.data;
        l->width = om_dtype_size(l->dtype);
        ONNX_CHECK(o, t->raw_data.len == (size_t)l->n * l->width,
                   "constant '%.80s': %lld elements of %zu bytes, but %zu bytes are stored", name,
                   (long long)l->n, l->width, t->raw_data.len);
        return OM_OK;
    }
    switch (l->dtype) {
    case OM_F32: l->data = t->float_data, have = t->n_float_data, l->width = 4; break;
    case OM_F64: l->data = t->double_data, have = t->n_double_data, l->width = 8; break;
    case OM_I64: l->data = t->int64_data, have = t->n_int64_data, l->width = 8; break;
    default: l->data = t->int32_data, have = t->n_int32_data, l->width = 4;
    }
    ONNX_CHECK(o, have == (size_t)l->n, "constant '%.80s': %lld elements, but %zu are stored", name, (long long)l->n,
               have);
    return OM_OK;
}

om_id om_onnx_const(om_onnx *o, const Onnx__TensorProto *t) {
    read_literal l;
    if (read_literal_of(o, t, &l) != OM_OK) return OM_NONE;
    size_t size = om_dtype_size(l.dtype);
    if (l.width == size) return om_const(o->g, l.dtype, l.rank, l.dim, l.data);
    char *p = om_alloc(o->cx, (size_t)l.n * size + 1); /* int32_data: the low bytes of each */
    if (!p) return OM_NONE;
    for (int64_t i = 0; i < l.n; i++) memcpy(p + i * (int64_t)size, (const char *)l.data + i * 4, size);
    om_id v = om_const(o->g, l.dtype, l.rank, l.dim, p);
    om_free(o->cx, p);
    return v;
}

om_status om_onnx_literal(om_onnx *o, om_onnx_val *v) {
    const Onnx__TensorProto *t = v->lit;
    if (t->n_dims > 1 ||
        (t->data_type != ONNX__TENSOR_PROTO__DATA_TYPE__INT64 && t->data_type != ONNX__TENSOR_PROTO__DATA_TYPE__INT32 &&
         t->data_type != ONNX__TENSOR_PROTO__DATA_TYPE__BOOL))
        return OM_OK;
    read_literal l;
    OM_TRY(read_literal_of(o, t, &l));
    if (l.n > OM_ONNX_LIST) return OM_OK;
    om_dim *list = om_arena_alloc(&o->tmp, ((size_t)l.n + 1) * sizeof *list);
    if (!list) return o->cx->status;
    for (int64_t i = 0; i < l.n; i++) {
        int64_t x = 0;
        int32_t y = 0;
        if (l.width == 8) memcpy(&x, (const char *)l.data + 8 * i, 8);
        else if (l.width == 4) memcpy(&y, (const char *)l.data + 4 * i, 4), x = y;
        else x = ((const uint8_t *)l.data)[i] != 0;
        list[i] = om_dim_int(o->g, x);
    }
    v->list = list;
    v->n = (uint32_t)l.n;
    v->rank = (uint8_t)l.rank;
    v->dtype = (uint8_t)l.dtype;
    return o->cx->status;
}

/* --- values -------------------------------------------------------------------------------------- */

om_onnx_val *om_onnx_define(om_onnx *o, const char *name) {
    om_id old;
    om_onnx_val *v = OM_PUSH(o->cx, &o->vals);
    if (!v || !om_strmap_put(&o->names, name, o->vals.n - 1, &old)) return NULL;
    *v = (om_onnx_val){.v = OM_NONE};
    if (old != OM_NONE) return om_onnx_err(o, OM_INVALID, "the name '%.80s' is given twice", name), NULL;
    return v;
}

bool om_onnx_has(const om_onnx *o, int i) { return i < o->n_in && o->in[i] != OM_NONE; }
om_onnx_val *om_onnx_operand(om_onnx *o, int i) { return om_onnx_has(o, i) ? &o->vals.v[o->in[i]] : NULL; }

om_id om_onnx_value(om_onnx *o, om_onnx_val *x, const char *name) {
    om_graph *g = o->g;
    if (x->v != OM_NONE || o->cx->status != OM_OK) return x->v;
    if (x->seq) {
        om_onnx_err(o, OM_UNSUPPORTED, "'%.80s' is a sequence; a tensor is needed here (SequenceAt takes one out)",
                    name ? name : "");
    } else if (x->lit) {
        x->v = om_onnx_const(o, x->lit);
    } else {
        bool all = true;
        int64_t c[OM_ONNX_LIST], dim[1] = {x->n};
        for (uint32_t i = 0; i < x->n; i++) all &= om_dim_const(g, x->list[i], &c[i]);
        if (all) {
            om_tensor from = {.data = c, .dtype = OM_I64, .rank = x->rank, .device = -1, .dim = {x->n}, .stride = {1}};
            int64_t buf[OM_ONNX_LIST];
            om_tensor to = from;
            to.dtype = x->dtype;
            to.data = buf;
            if (x->n && om_copy(o->cx, &from, &to) != OM_OK) return OM_NONE;
            x->v = om_const(g, x->dtype, x->rank, dim, buf);
        } else { /* a size known only at run time, used as a number */
            om_id part[OM_ONNX_LIST];
            for (uint32_t i = 0; i < x->n; i++) {
                part[i] = om_onnx_dim_value(o, x->list[i], x->dtype);
                if (x->rank) part[i] = om_b_reshape(g, part[i], (om_dim[]){1}, 1);
            }
            x->v = x->rank && x->n != 1 ? om_make(g, &om_op_concat, part, (int)x->n, OM_ATTRS(OM_AI("axis", 0)))
                                        : part[0];
        }
    }
    if (x->v != OM_NONE && name && !om_val(g, x->v)->name) om_val(g, x->v)->name = om_arena_str(&g->arena, name);
    return x->v;
}

om_id om_onnx_in(om_onnx *o, int i) {
    om_onnx_val *x = om_onnx_operand(o, i);
    return x ? om_onnx_value(o, x, o->node->input[i]) : OM_NONE;
}

enum { READ_FOLD_NODES = 64 };

/* The constant a value is once the nodes behind it are evaluated, or OM_NONE. *fuel bounds the nodes evaluated, and the
 * depth. */
static om_id read_fold(om_onnx *o, om_id v, int *fuel) {
    om_graph *g = o->g;
    om_id in[8], out[4];
    bool done = false;
    if (om_val(g, v)->role == OM_CONST) return v;
    if (om_val(g, v)->node == OM_NONE || --*fuel < 0) return OM_NONE;
    const om_node n = g->nodes.v[om_val(g, v)->node]; /* a copy: constants are added */
    if (n.n_in > 8 || n.n_out > 4) return OM_NONE;
    for (int i = 0; i < n.n_in; i++) {
        in[i] = om_ins(g, &n)[i];
        if (in[i] != OM_NONE && (in[i] = read_fold(o, in[i], fuel)) == OM_NONE) return OM_NONE;
    }
    if (om_fold_node(g, &n, in, out, &done) != OM_OK || !done) return OM_NONE;
    return out[om_val(g, v)->out];
}

/* Exporters compute pads and axes with operators that lists do not cover (reshaping to rank 2, transposing). */
static void read_fold_list(om_onnx *o, om_onnx_val *x) {
    int fuel = READ_FOLD_NODES;
    om_id c = x->v == OM_NONE ? OM_NONE : read_fold(o, x->v, &fuel);
    if (c == OM_NONE) return;
    const om_value *v = om_val(o->g, c);
    int64_t n = v->type.rank ? v->type.dim[0] : 1, buf[OM_ONNX_LIST];
    if (v->type.rank > 1 || n > OM_ONNX_LIST || !om_is_int(v->type.dtype)) return;
    om_tensor from =
                  {.data = (void *)v->data, .dtype = v->type.dtype, .rank = 1, .device = -1, .dim = {n}, .stride = {1}},
              to = from;
    to.dtype = OM_I64;
    to.data = buf;
    om_dim *list = om_arena_alloc(&o->tmp, ((size_t)n + 1) * sizeof *list);
    if (!list || (n && om_copy(o->cx, &from, &to) != OM_OK)) return;
    for (int64_t i = 0; i < n; i++) list[i] = om_dim_int(o->g, buf[i]);
    x->rank = v->type.rank;
    x->dtype = v->type.dtype;
    x->n = (uint32_t)n;
    x->list = list;
}

const om_dim *om_onnx_list(om_onnx *o, int i, uint32_t *n) {
    om_onnx_val *x = om_onnx_operand(o, i);
    *n = 0;
    if (x && !x->list && o->cx->status == OM_OK) read_fold_list(o, x);
    if (o->cx->status != OM_OK) return NULL;
    if (!x || !x->list) {
        om_onnx_err(o, OM_UNSUPPORTED,
                    "operand %d '%.80s' must be known before the run: a constant, or computed from sizes of graph "
                    "inputs; it is %s",
                    i, x ? o->node->input[i] : "", x ? "computed from data or has more than 64 elements" : "missing");
        return NULL;
    }
    *n = x->n;
    return x->list;
}

bool om_onnx_scalar(om_onnx *o, int i, double *x) {
    om_onnx_val *v = om_onnx_operand(o, i);
    int64_t c;
    if (!v) return false;
    if (v->list) {
        if (v->n != 1 || !om_dim_const(o->g, v->list[0], &c)) return false;
        *x = (double)c;
        return true;
    }
    om_id id = v->lit || v->v != OM_NONE ? om_onnx_in(o, i) : OM_NONE;
    if (id == OM_NONE || om_val(o->g, id)->role != OM_CONST || om_dim_numel(o->g, om_ty(o->g, id)) != 1) return false;
    om_tensor from = {.data = (void *)om_val(o->g, id)->data, .dtype = om_ty(o->g, id)->dtype, .device = -1};
    om_tensor to = {.data = x, .dtype = OM_F64, .device = -1};
    return om_copy(o->cx, &from, &to) == OM_OK;
}

bool om_onnx_wants(const om_onnx *o, int k) { return (size_t)k < o->node->n_output && o->node->output[k][0]; }

void om_onnx_check_type(om_onnx *o, const char *name, const om_type *t) {
    om_type want;
    bool found;
    if (om_onnx_value_type(o, name, OM_ONNX_KNOWN, &want, &found) != OM_OK || !found) return;
    bool same = want.dtype == t->dtype && want.rank == t->rank;
    for (int i = 0; same && i < t->rank; i++) {
        int64_t a, b;
        same = !om_dim_const(o->g, want.dim[i], &a) || a < 0 || !om_dim_const(o->g, t->dim[i], &b) || a == b;
    }
    if (same) return;
    char text[2][200];
    for (int k = 0; k < 2; k++) {
        const om_type *x = k ? &want : t;
        size_t n = (size_t)snprintf(text[k], sizeof text[k], "%s[", om_dtype_name(x->dtype));
        for (int i = 0; i < x->rank && n + 40 < sizeof text[k]; i++) {
            if (i) n += (size_t)snprintf(text[k] + n, sizeof text[k] - n, ", ");
            om_dim_print(o->g, x->dim[i], text[k] + n, 24);
            n += strlen(text[k] + n);
        }
        snprintf(text[k] + n, sizeof text[k] - n, "]");
    }
    om_onnx_err(o, OM_INVALID, "the result '%.80s' is %s, but the file's value_info says %s", name, text[0], text[1]);
}

void om_onnx_set(om_onnx *o, int k, om_id v) {
    if (!om_onnx_wants(o, k) || o->cx->status != OM_OK) return;
    const char *name = o->node->output[k];
    if (v == OM_NONE) {
        om_onnx_err(o, OM_UNSUPPORTED, "output %d '%.80s' is used but the engine does not compute it", k, name);
        return;
    }
    om_onnx_val *x = om_onnx_define(o, name);
    if (!x) return;
    x->v = v;
    if (!om_val(o->g, v)->name) om_val(o->g, v)->name = om_arena_str(&o->g->arena, name);
    om_onnx_check_type(o, name, om_ty(o->g, v));
}

void om_onnx_set_list(om_onnx *o, int k, int dtype, int rank, const om_dim *list, uint32_t n) {
    if (!om_onnx_wants(o, k) || o->cx->status != OM_OK) return;
    om_onnx_val *x = om_onnx_define(o, o->node->output[k]);
    if (!x) return;
    om_dim *copy = om_arena_alloc(&o->tmp, (n + 1) * sizeof *copy);
    if (!copy) return;
    if (n) memcpy(copy, list, n * sizeof *copy);
    *x = (om_onnx_val){.v = OM_NONE, .list = copy, .n = n, .rank = (uint8_t)rank, .dtype = (uint8_t)dtype};
}

void om_onnx_set_seq(om_onnx *o, int k, const om_id *v, uint32_t n) {
    if (!om_onnx_wants(o, k) || o->cx->status != OM_OK) return;
    om_onnx_val *x = om_onnx_define(o, o->node->output[k]);
    if (x) *x = (om_onnx_val){.v = OM_NONE, .seq = v, .n = n};
}

const om_id *om_onnx_seq(om_onnx *o, int i, uint32_t *n) {
    const om_onnx_val *x = om_onnx_operand(o, i);
    *n = x ? x->n : 0;
    if (o->cx->status != OM_OK || (x && x->seq)) return x ? x->seq : NULL;
    om_onnx_err(o, OM_INVALID, "input %d must be a sequence made by SequenceConstruct or an optimizer", i);
    return NULL;
}

void om_onnx_alias(om_onnx *o, int k, int i) {
    if (!om_onnx_wants(o, k) || o->cx->status != OM_OK) return;
    om_onnx_val *x = om_onnx_define(o, o->node->output[k]);
    if (x) *x = *om_onnx_operand(o, i);
}

om_status om_onnx_constant(om_onnx *o) {
    if (!om_onnx_wants(o, 0)) return OM_OK;
    const Onnx__AttributeProto *a = o->node->n_attribute == 1 ? o->node->attribute[0] : NULL;
    ONNX_CHECK(o, a && a->name, "exactly one attribute is expected");
    om_onnx_val *v = om_onnx_define(o, o->node->output[0]);
    if (!v) return o->cx->status;
    Onnx__TensorProto *t = a->t;
    if (!t) { /* value_int and friends as a literal of their own */
        if (!(t = om_arena_alloc(&o->tmp, sizeof *t))) return o->cx->status;
        onnx__tensor_proto__init(t);
        int64_t *dim = om_arena_alloc(&o->tmp, sizeof *dim);
        if (!dim) return o->cx->status;
        bool one = !strcmp(a->name, "value_int") || !strcmp(a->name, "value_float");
        if (!strncmp(a->name, "value_int", 9)) {
            t->data_type = ONNX__TENSOR_PROTO__DATA_TYPE__INT64;
            t->n_int64_data = one ? 1 : a->n_ints;
            t->int64_data = one ? (int64_t *)&a->i : a->ints;
        } else if (!strncmp(a->name, "value_float", 11)) {
            t->data_type = ONNX__TENSOR_PROTO__DATA_TYPE__FLOAT;
            t->n_float_data = one ? 1 : a->n_floats;
            t->float_data = one ? (float *)&a->f : a->floats;
        } else
            return om_onnx_err(o, OM_UNSUPPORTED,
                               "attribute '%.60s'; value, value_int(s) and value_float(s) are supported", a->name);
        *dim = (int64_t)(t->n_int64_data + t->n_float_data);
        t->n_dims = !one;
        t->dims = dim;
    }
    v->lit = t;
    return om_onnx_literal(o, v);
}
