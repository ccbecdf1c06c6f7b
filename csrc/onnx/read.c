/* read.c - ONNX ModelProto bytes to a graph: docs/ONNX.md is the contract.
 *
 * 1. om_onnx_wire walks the bytes; only then protobuf-c unpacks them, into an arena.
 * 2. Graph inputs become inputs, parameters or buffers (metadata `role:<name>`); their dim_params are parsed as size
 * expressions,
 *    a dimension that is exactly a symbol binds it. Initialisers stay in the file until a node needs them.
 * 3. Nodes in file order: the size rule first (shape arithmetic makes lists, no nodes), else the row's map function
 *    builds engine nodes. Results are compared with the file's value_info: dtype, rank and known sizes must agree.
 * 4. Outputs, write-backs (metadata `write:<output>`), and every symbol in use must be bound.
 *
 * Nothing of the file is trusted: names are looked up, indices and sizes are checked, element counts are compared with
 * the bytes that are there. Nodes must stand in topological order, as ONNX demands.
 */
#include "graph/number.h"
#include "onnx/onnx.h"
#include "passes/fold.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { READ_NAME = 128 };

/* --- errors -------------------------------------------------------------------------------------- */

static void read_blame(const om_onnx *o, char *buf, size_t size) {
    if (!o->node) snprintf(buf, size, "ONNX graph: ");
    else
        snprintf(buf, size, "ONNX node %zu '%.80s' (%.60s%s%.60s): ", o->index, o->node->name ? o->node->name : "",
                 o->node->domain ? o->node->domain : "", o->node->domain && *o->node->domain ? "." : "",
                 o->node->op_type ? o->node->op_type : "?");
}

om_status om_onnx_err_at(om_onnx *o, om_status s, const char *file, int line, const char *fmt, ...) {
    char text[800], blame[320];
    if (o->cx->status != OM_OK) return o->cx->status;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    read_blame(o, blame, sizeof blame);
    return om_fail_at(o->cx, s, file, line, "%s%s", blame, text);
}

/* A message from deeper down (an operator's type rule) gets the node's place in front. */
static om_status read_blame_message(om_onnx *o) {
    char blame[320], text[sizeof o->cx->message];
    if (!o->node || strstr(o->cx->message, "ONNX ")) return o->cx->status;
    read_blame(o, blame, sizeof blame);
    memcpy(text, o->cx->message, sizeof text);
    snprintf(o->cx->message, sizeof o->cx->message, "%s%.*s", blame, (int)(sizeof text - sizeof blame), text);
    return o->cx->status;
}

/* --- attributes ---------------------------------------------------------------------------------- */

const Onnx__AttributeProto *om_onnx_attr(const om_onnx *o, const char *name) {
    for (size_t i = 0; i < o->node->n_attribute; i++)
        if (o->node->attribute[i]->name && !strcmp(o->node->attribute[i]->name, name)) return o->node->attribute[i];
    return NULL;
}
int64_t om_onnx_int(const om_onnx *o, const char *name, int64_t dflt) {
    const Onnx__AttributeProto *a = om_onnx_attr(o, name);
    return a && a->has_i ? a->i : dflt;
}
double om_onnx_float(const om_onnx *o, const char *name, double dflt) {
    const Onnx__AttributeProto *a = om_onnx_attr(o, name);
    if (!a || !a->has_f) return dflt;
    char key[READ_NAME];
    snprintf(key, sizeof key, "f64:%s", name);
    const char *text = om_onnx_meta(o, key); /* attributes are float32; the capture puts the full double beside */
    double full = text ? om_number_read(text, NULL) : a->f;
    return (float)full == a->f ? full : a->f;
}
const char *om_onnx_str(om_onnx *o, const char *name, const char *dflt) {
    const Onnx__AttributeProto *a = om_onnx_attr(o, name);
    if (!a || !a->has_s) return dflt;
    char *s = om_arena_alloc(&o->tmp, a->s.len + 1);
    if (s && a->s.len) memcpy(s, a->s.data, a->s.len);
    return s ? s : dflt;
}
const int64_t *om_onnx_ints(const om_onnx *o, const char *name, uint32_t *n) {
    const Onnx__AttributeProto *a = om_onnx_attr(o, name);
    static const int64_t none[1];
    *n = 0;
    if (!a) return NULL;
    *n = (uint32_t)a->n_ints;
    return a->n_ints ? a->ints : none;
}

static const char *read_meta(size_t n, Onnx__StringStringEntryProto *const *props, const char *key) {
    for (size_t i = 0; i < n; i++)
        if (props[i]->key && props[i]->value && !strcmp(props[i]->key, key)) return props[i]->value;
    return NULL;
}
const char *om_onnx_meta(const om_onnx *o, const char *key) {
    return read_meta(o->node->n_metadata_props, o->node->metadata_props, key);
}

bool om_onnx_index_nonneg(const om_onnx *o) {
    const char *noted = om_onnx_meta(o, "index_nonneg");
    return noted && !strcmp(noted, "1");
}
/* GraphProto.metadata_props "<what>:<name>"; of the same key twice, the first */
static const char *read_graph_meta(om_onnx *o, const char *what, const char *name) {
    size_t n = strlen(what), m = strlen(name);
    if (!o->meta.n) return NULL;
    char *key = om_arena_alloc(&o->tmp, n + m + 2);
    if (!key) return NULL;
    memcpy(key, what, n);
    key[n] = ':';
    memcpy(key + n + 1, name, m);
    om_id i = om_strmap_get(&o->meta, key);
    return i == OM_NONE ? NULL : o->graph->metadata_props[i]->value;
}

/* --- types --------------------------------------------------------------------------------------- */

/* An expression of the file; text that is none (other exporters write anything) names a symbol. */
static om_status read_dim_param(om_onnx *o, const char *text, om_dim *d) {
    char name[READ_NAME];
    size_t n = 0;
    bool expression = true;
    for (const char *c = text; *c; c++) expression &= isalnum((unsigned char)*c) || strchr("_.+-*/%(), ", *c) != NULL;
    if (expression) {
        uint32_t syms = o->g->syms.n, exprs = o->g->exprs.n;
        if (om_dim_parse(o->g, text, d) == OM_OK) return OM_OK;
        if (o->cx->status != OM_INVALID) return o->cx->status;
        om_ctx_clear(o->cx);
        om_dim_forget(o->g, syms, exprs); /* what the attempt left behind */
    }
    ONNX_CHECK(o, strlen(text) < sizeof name - 2, "the name of a size, '%.40s...', has %zu characters, at most %zu",
               text, strlen(text), sizeof name - 3);
    for (const char *c = text; *c; c++) name[n++] = isalnum((unsigned char)*c) ? *c : '_';
    name[n] = 0;
    if (!n || isdigit((unsigned char)name[0])) {
        memmove(name + 1, name, n + 1);
        name[0] = '_';
    }
    *d = om_dim_sym(o->g, name);
    return o->cx->status;
}

om_status om_onnx_type(om_onnx *o, const Onnx__TypeProto *t, int mode, const char *name, om_type *out) {
    ONNX_CHECK(o, t && t->value_case == ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE && t->tensor_type,
               "'%.80s' is not a tensor; only tensors are supported", name);
    const Onnx__TypeProto__Tensor *tt = t->tensor_type;
    *out = (om_type){.dtype = (uint8_t)om_dtype_from_onnx(tt->elem_type)};
    if (out->dtype == OM_NODTYPE)
        return om_onnx_err(
            o, OM_UNSUPPORTED,
            "'%.80s' has ONNX element type %d; float 16/32/64, bfloat16, int 8/16/32/64, uint8 and bool are supported",
            name, (int)tt->elem_type);
    ONNX_CHECK(o, tt->shape, "'%.80s' has no shape; its rank must be known", name);
    ONNX_CHECK(o, tt->shape->n_dim <= OM_RANK, "'%.80s' has rank %zu, at most %d is supported", name, tt->shape->n_dim,
               OM_RANK);
    out->rank = (uint8_t)tt->shape->n_dim;
    for (int i = 0; i < out->rank; i++) {
        const Onnx__TensorShapeProto__Dimension *d = tt->shape->dim[i];
        if (d->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE) {
            ONNX_CHECK(o, d->dim_value >= 0 && d->dim_value <= OM_ONNX_SIZE, "'%.80s' has size %lld along axis %d",
                       name, (long long)d->dim_value, i);
            out->dim[i] = d->dim_value;
        } else if (mode == OM_ONNX_KNOWN) {
            out->dim[i] = om_dim_int(o->g, -1);
        } else if (d->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM && d->dim_param &&
                   *d->dim_param) {
            OM_TRY(read_dim_param(o, d->dim_param, &out->dim[i]));
        } else {
            ONNX_CHECK(o, mode == OM_ONNX_INPUT, "'%.80s': the size along axis %d is not given", name, i);
            char sym[READ_NAME], text[READ_NAME + 24];
            snprintf(sym, sizeof sym, "%.100s", name);
            for (char *c = sym; *c; c++)
                if (!isalnum((unsigned char)*c)) *c = '_';
            snprintf(text, sizeof text, "_%s_%d", sym, i);
            out->dim[i] = om_dim_sym(o->g, text);
        }
    }
    return o->cx->status;
}

om_status om_onnx_value_type(om_onnx *o, const char *name, int mode, om_type *out, bool *found) {
    om_id i = om_strmap_get(&o->types, name);
    *found = i != OM_NONE;
    if (!*found) return OM_OK;
    const Onnx__ValueInfoProto *v = i < o->graph->n_value_info ? o->graph->value_info[i]
                                                               : o->graph->output[i - o->graph->n_value_info];
    const Onnx__TypeProto *t = v->type;
    bool tensor = t && t->value_case == ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE && t->tensor_type;
    /* it says nothing */
    if (mode == OM_ONNX_KNOWN && (!tensor || !t->tensor_type->shape || !t->tensor_type->elem_type)) {
        *found = false;
        return OM_OK;
    }
    return om_onnx_type(o, v->type, mode, name, out);
}

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

/* A small integer literal is also a list of sizes. */
static om_status read_track_literal(om_onnx *o, om_onnx_val *v) {
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

static om_onnx_val *read_define(om_onnx *o, const char *name) {
    om_id old;
    om_onnx_val *v = OM_PUSH(o->cx, &o->vals);
    if (!v || !om_strmap_put(&o->names, name, o->vals.n - 1, &old)) return NULL;
    *v = (om_onnx_val){.v = OM_NONE};
    if (old != OM_NONE) return om_onnx_err(o, OM_INVALID, "the name '%.80s' is given twice", name), NULL;
    return v;
}

bool om_onnx_has(const om_onnx *o, int i) { return i < o->n_in && o->in[i] != OM_NONE; }
om_onnx_val *om_onnx_operand(om_onnx *o, int i) { return om_onnx_has(o, i) ? &o->vals.v[o->in[i]] : NULL; }

/* Brings a value of the file into the graph. */
static om_id read_value(om_onnx *o, om_onnx_val *x, const char *name) {
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
    return x ? read_value(o, x, o->node->input[i]) : OM_NONE;
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

/* The type of a result against the file's value_info. */
static void read_check_type(om_onnx *o, const char *name, const om_type *t) {
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
    om_onnx_val *x = read_define(o, name);
    if (!x) return;
    x->v = v;
    if (!om_val(o->g, v)->name) om_val(o->g, v)->name = om_arena_str(&o->g->arena, name);
    read_check_type(o, name, om_ty(o->g, v));
}

void om_onnx_set_list(om_onnx *o, int k, int dtype, int rank, const om_dim *list, uint32_t n) {
    if (!om_onnx_wants(o, k) || o->cx->status != OM_OK) return;
    om_onnx_val *x = read_define(o, o->node->output[k]);
    if (!x) return;
    om_dim *copy = om_arena_alloc(&o->tmp, (n + 1) * sizeof *copy);
    if (!copy) return;
    if (n) memcpy(copy, list, n * sizeof *copy);
    *x = (om_onnx_val){.v = OM_NONE, .list = copy, .n = n, .rank = (uint8_t)rank, .dtype = (uint8_t)dtype};
}

void om_onnx_set_seq(om_onnx *o, int k, const om_id *v, uint32_t n) {
    if (!om_onnx_wants(o, k) || o->cx->status != OM_OK) return;
    om_onnx_val *x = read_define(o, o->node->output[k]);
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
    om_onnx_val *x = read_define(o, o->node->output[k]);
    if (x) *x = *om_onnx_operand(o, i);
}

om_status om_onnx_constant(om_onnx *o) {
    if (!om_onnx_wants(o, 0)) return OM_OK;
    const Onnx__AttributeProto *a = o->node->n_attribute == 1 ? o->node->attribute[0] : NULL;
    ONNX_CHECK(o, a && a->name, "exactly one attribute is expected");
    om_onnx_val *v = read_define(o, o->node->output[0]);
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
    return read_track_literal(o, v);
}

/* --- nodes --------------------------------------------------------------------------------------- */

static om_id read_scope(om_onnx *o) {
    const char *module = om_onnx_meta(o, "module"), *file = om_onnx_meta(o, "file"), *line = om_onnx_meta(o, "line");
    const char *region = om_onnx_meta(o, "checkpoint");
    om_graph *g = o->g;
    if (!module && !file && !region) return OM_NONE;
    long n = 0;
    for (const char *c = line; c && isdigit((unsigned char)*c) && n < 100000000; c++) n = n * 10 + (*c - '0');
    if (!module) module = "";
    for (om_id i = g->scopes.n; i-- > 0 && g->scopes.n - i <= 64;) { /* neighbours share scopes */
        const om_scope *s = &g->scopes.v[i];
        if (s->line == n && !strcmp(s->module, module) && (s->file ? file && !strcmp(s->file, file) : !file) &&
            (s->region ? region && !strcmp(s->region, region) : !region))
            return i;
    }
    om_scope *s = OM_PUSH(o->cx, &g->scopes);
    if (!s) return OM_NONE;
    *s = (om_scope){om_arena_str(&g->arena, module), om_arena_str(&g->arena, file), (int)n,
                      om_arena_str(&g->arena, region)};
    return g->scopes.n - 1;
}

static const om_onnx_op *read_row(const char *domain, const char *name) {
    if (!strcmp(domain, "ai.onnx")) domain = "";
    if (!*name) return NULL; /* so rows that are no ONNX operator are called */
    for (int i = 0; om_onnx_tables[i]; i++)
        for (const om_onnx_op *r = om_onnx_tables[i]; r->name; r++)
            if (!strcmp(r->name, name) && !strcmp(r->domain, domain)) return r;
    return NULL;
}

/* The first number in a size that is absurdly large, or 0. */
static int64_t read_absurd(const om_graph *g, om_dim d) {
    int64_t c, found;
    if (om_dim_const(g, d, &c)) return c > OM_ONNX_SIZE || c < -OM_ONNX_SIZE ? c : 0;
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_SYM) return 0;
    return (found = read_absurd(g, e->a)) ? found : read_absurd(g, e->b);
}

/* No axis and no size attribute of what a node made may hold an absurd number: later arithmetic on sizes would
 * overflow. */
static om_status read_check_sizes(om_onnx *o, om_id from, om_id from_node) {
    for (om_id k = from_node; k < o->g->nodes.n; k++) {
        const om_node *n = &o->g->nodes.v[k];
        for (int i = 0; i < n->n_attr; i++)
            for (uint32_t j = 0; n->attr[i].kind == OM_ATTR_DIMS && j < n->attr[i].n; j++) {
                int64_t c = read_absurd(o->g, n->attr[i].dims[j]);
                ONNX_CHECK(o, !c, "%lld as %s of %s", (long long)c, n->attr[i].name, n->op->name);
            }
    }
    for (om_id v = from; v < o->g->values.n; v++)
        for (int i = 0; i < om_ty(o->g, v)->rank; i++) {
            int64_t c, n = read_absurd(o->g, om_ty(o->g, v)->dim[i]);
            ONNX_CHECK(o, !n, "%lld in the size of a result along axis %d", (long long)n, i);
            if (om_dim_const(o->g, om_ty(o->g, v)->dim[i], &c))
                ONNX_CHECK(o, c >= 0, "a result would have size %lld along axis %d", (long long)c, i);
        }
    return OM_OK;
}

static om_status read_node(om_onnx *o) {
    const Onnx__NodeProto *n = o->node;
    ONNX_CHECK(o, n->op_type, "the node has no op_type");
    const om_onnx_op *r = o->row = read_row(n->domain ? n->domain : "", n->op_type);
    if (!r)
        return om_onnx_err(
            o, OM_UNSUPPORTED,
            "the operator is not supported (csrc/onnx_*.c have the list); a capture keeps such operators in PyTorch "
            "as org.pytorch.aten::ATen");
    ONNX_CHECK(o, n->n_input <= 65536 && n->n_output <= 65536, "%zu inputs and %zu outputs, at most 65536", n->n_input,
               n->n_output);
    o->n_in = (int)n->n_input;
    ONNX_CHECK(o, r->max_in < 0 || o->n_in <= r->max_in, "%d inputs, at most %d are known", o->n_in, r->max_in);
    o->in = om_arena_alloc(&o->tmp, ((size_t)o->n_in + 1) * sizeof *o->in);
    if (!o->in) return o->cx->status;
    for (int i = 0; i < o->n_in; i++) {
        o->in[i] = OM_NONE;
        if (!n->input[i][0]) continue;
        o->in[i] = om_strmap_get(&o->names, n->input[i]);
        ONNX_CHECK(o, o->in[i] != OM_NONE,
                   "input %d '%.80s' is not defined by a graph input, an initialiser or an earlier node", i,
                   n->input[i]);
    }
    for (int i = 0; i < r->min_in; i++) ONNX_CHECK(o, om_onnx_has(o, i), "input %d is missing", i);
    ONNX_CHECK(o, n->n_output >= 1 && (r->max_out < 0 || n->n_output <= (size_t)r->max_out),
               "%zu outputs, 1 to %d are known", n->n_output, r->max_out);
    for (size_t i = 0; i < n->n_attribute; i++)
        ONNX_CHECK(o, !n->attribute[i]->ref_attr_name || !*n->attribute[i]->ref_attr_name,
                   "attribute '%.60s' refers to a function's attribute",
                   n->attribute[i]->name ? n->attribute[i]->name : "");
    o->g->cur_scope = read_scope(o);
    if (r->size && r->size(o)) return o->cx->status;
    if (o->cx->status != OM_OK) return o->cx->status;
    if (!r->map)
        return om_onnx_err(
            o, OM_UNSUPPORTED,
            "only sizes known before the run are supported here: its operands must be constants or computed from sizes "
            "of graph inputs");
    om_id before = o->g->values.n, before_node = o->g->nodes.n;
    OM_TRY(r->map(o));
    OM_TRY(read_check_sizes(o, before, before_node));
    for (int k = 0; k < (int)n->n_output && o->cx->status == OM_OK; k++)
        if (om_onnx_wants(o, k) && om_strmap_get(&o->names, n->output[k]) == OM_NONE)
            return om_onnx_err(o, OM_UNSUPPORTED, "output %d '%.80s' is used but the engine does not compute it", k,
                               n->output[k]);
    return o->cx->status;
}

/* --- graph --------------------------------------------------------------------------------------- */

static om_status read_inputs(om_onnx *o) {
    const Onnx__GraphProto *f = o->graph;
    om_graph *g = o->g;
    for (size_t i = 0; i < f->n_initializer; i++) {
        const Onnx__TensorProto *t = f->initializer[i];
        ONNX_CHECK(o, t->name && *t->name, "initialiser %zu has no name", i);
        om_onnx_val *v = read_define(o, t->name);
        if (!v) return o->cx->status;
        v->lit = t;
        OM_TRY(read_track_literal(o, v));
    }
    for (size_t i = 0; i < f->n_input; i++) {
        const Onnx__ValueInfoProto *in = f->input[i];
        om_type t;
        ONNX_CHECK(o, in->name && *in->name, "graph input %zu has no name", i);
        om_id known = om_strmap_get(&o->names, in->name);
        if (known != OM_NONE && known < f->n_initializer) continue; /* the initialiser is its default value */
        OM_TRY(om_onnx_type(o, in->type, OM_ONNX_INPUT, in->name, &t));
        const char *role = read_graph_meta(o, "role", in->name), *sym = read_graph_meta(o, "symbol", in->name);
        ONNX_CHECK(o, !role || !strcmp(role, "input") || !strcmp(role, "param") || !strcmp(role, "buffer"),
                   "role '%.40s' of graph input '%.80s'; input, param and buffer are allowed",
                   role ? role : "", in->name);
        om_id id = om_input(g,
                            !role || !strcmp(role, "input") ? OM_INPUT
                            : !strcmp(role, "param")        ? OM_PARAM
                                                            : OM_BUFFER,
                            in->name, &t);
        om_onnx_val *v = id != OM_NONE ? read_define(o, in->name) : NULL;
        if (!v) return o->cx->status;
        v->v = id;
        if (sym) {
            ONNX_CHECK(o, t.rank == 0 && t.dtype == OM_I64,
                       "graph input '%.80s' names the size '%.40s', so it must be a 0-d int64 tensor", in->name, sym);
            om_dim *list = om_arena_alloc(&o->tmp, sizeof *list);
            if (!list) return o->cx->status;
            OM_TRY(read_dim_param(o, sym, list));
            ONNX_CHECK(o, *list < 0 && g->exprs.v[~*list].kind == OM_DIM_SYM,
                       "graph input '%.80s': '%.40s' is not the name of a size", in->name, sym);
            OM_TRY(om_sym_bind(g, g->syms.v[g->exprs.v[~*list].a].name, om_val(g, id)->input, -1));
            v->list = list;
            v->n = 1;
            v->rank = 0;
            v->dtype = OM_I64;
        }
    }
    for (om_id i = 0; i < g->inputs.n; i++) {
        const om_type *t = om_ty(g, g->inputs.v[i]);
        for (int k = 0; k < t->rank; k++)
            if (t->dim[k] < 0 && g->exprs.v[~t->dim[k]].kind == OM_DIM_SYM) {
                const char *sym = g->syms.v[g->exprs.v[~t->dim[k]].a].name;
                OM_TRY(om_sym_bind(g, sym, i, k));
            }
    }
    return o->cx->status;
}

static om_status read_outputs(om_onnx *o) {
    const Onnx__GraphProto *f = o->graph;
    om_graph *g = o->g;
    for (size_t i = 0; i < f->n_output; i++) {
        const char *name = f->output[i]->name ? f->output[i]->name : "";
        om_id k = om_strmap_get(&o->names, name);
        ONNX_CHECK(o, k != OM_NONE, "graph output %zu '%.80s' is computed by no node", i, name);
        om_id v = read_value(o, &o->vals.v[k], name);
        if (v == OM_NONE) return o->cx->status;
        if (om_val(g, v)->role != OM_CONST) read_check_type(o, name, om_ty(g, v));
        const char *to = read_graph_meta(o, "write", name);
        if (to) {
            om_id t = om_strmap_get(&o->names, to), in = t == OM_NONE ? OM_NONE : o->vals.v[t].v;
            ONNX_CHECK(o, in != OM_NONE && om_val(g, in)->input != OM_NONE,
                       "output '%.80s' is to be written to '%.80s', which is no graph input", name, to);
            const om_type *a = om_ty(g, v), *b = om_ty(g, in);
            ONNX_CHECK(o, a->dtype == b->dtype && a->rank == b->rank,
                       "output '%.80s' is to be written to '%.80s' of another dtype or rank", name, to);
            om_write *w = OM_PUSH(o->cx, &g->writes);
            if (w) *w = (om_write){v, om_val(g, in)->input};
        } else {
            om_id *out = OM_PUSH(o->cx, &g->outputs);
            if (out) *out = v;
            const char **kept = OM_PUSH(o->cx, &g->output_names);
            if (kept) *kept = om_arena_str(&g->arena, name);
        }
        if (o->cx->status != OM_OK) return o->cx->status;
    }
    return OM_OK;
}

/* Numbers that a host gives (om_op.host) are host scalars, where no forward writes them. */
static om_status read_host_scalars(om_onnx *o) {
    om_graph *g = o->g;
    uint8_t *written = om_arena_alloc(&o->tmp, g->inputs.n + 1);
    if (!written) return o->cx->status;
    for (om_id i = 0; i < g->writes.n; i++) written[g->writes.v[i].input] = 1;
    for (om_id i = 0; i < g->nodes.n; i++) {
        const om_node *n = &g->nodes.v[i];
        for (int k = 0; k < n->n_in && k < 32 && n->op->host >> k; k++) {
            const om_id v = om_ins(g, n)[k], in = v == OM_NONE ? OM_NONE : om_val(g, v)->input;
            if (n->op->host >> k & 1 && in != OM_NONE && !written[in]) OM_TRY(om_input_host(g, in));
        }
    }
    return OM_OK;
}

/* Expressions refer to earlier ones only, so one sweep finds for each a symbol in it that nothing binds. */
static om_status read_check_symbols(om_onnx *o) {
    om_graph *g = o->g;
    uint32_t *unbound = om_arena_alloc(&o->tmp, ((size_t)g->exprs.n + 1) * sizeof *unbound); /* 1 + symbol; 0: none */
    if (!unbound) return o->cx->status;
    for (om_id i = 0; i < g->exprs.n; i++) {
        const om_expr *e = &g->exprs.v[i];
        if (e->kind == OM_DIM_SYM) unbound[i] = g->syms.v[e->a].input == OM_NONE ? (uint32_t)e->a + 1 : 0;
        else if (e->kind != OM_DIM_INT) {
            if (e->a < 0) unbound[i] = unbound[~e->a];
            if (e->b < 0 && !unbound[i]) unbound[i] = unbound[~e->b];
        }
    }
    for (om_id i = 0; i < g->values.n; i++)
        for (int k = 0; k < om_ty(g, i)->rank; k++) {
            om_dim d = om_ty(g, i)->dim[k];
            ONNX_CHECK(o, d >= 0 || !unbound[~d],
                       "the size '%.60s' is not a dimension of any graph input (nor a `symbol:` input)",
                       g->syms.v[unbound[~d] - 1].name);
        }
    return OM_OK;
}

static om_status read_model(om_onnx *o, const Onnx__ModelProto *m) {
    const Onnx__GraphProto *f = o->graph = m->graph;
    ONNX_CHECK(o, f, "the model has no graph");
    for (size_t i = 0; i < m->n_opset_import; i++) {
        const char *d = m->opset_import[i]->domain;
        if (!d || !*d || !strcmp(d, "ai.onnx")) o->opset = m->opset_import[i]->version;
    }
    if (o->opset < OM_ONNX_OPSET_MIN || o->opset > OM_ONNX_OPSET_MAX)
        return om_onnx_err(o, OM_UNSUPPORTED,
                           "opset %lld of ai.onnx; %d to %d are supported (onnx.version_converter converts)",
                           (long long)o->opset, OM_ONNX_OPSET_MIN, OM_ONNX_OPSET_MAX);
    ONNX_CHECK(o, !f->n_sparse_initializer, "sparse initialisers are not supported");
    ONNX_CHECK(o, f->n_value_info + f->n_output < OM_NONE / 2 && f->n_node < OM_NONE / 2, "too many values");
    for (size_t i = 0; i < f->n_metadata_props && i < OM_NONE; i++) {
        const Onnx__StringStringEntryProto *p = f->metadata_props[i];
        if (p->key && p->value && !om_strmap_put(&o->meta, p->key, (om_id)i, NULL)) return o->cx->status;
    }
    for (size_t i = 0; i < f->n_output; i++)
        if (f->output[i]->name && !om_strmap_put(&o->types, f->output[i]->name, (om_id)(f->n_value_info + i), NULL))
            return o->cx->status;
    for (size_t i = 0; i < f->n_value_info; i++) /* an entry of its own, even for outputs: it may say more */
        if (f->value_info[i]->name && f->value_info[i]->type &&
            !om_strmap_set(&o->types, f->value_info[i]->name, (om_id)i))
            return o->cx->status;
    OM_TRY(read_inputs(o));
    for (size_t i = 0; i < f->n_node; i++) {
        o->node = f->node[i];
        o->index = i;
        if (read_node(o) != OM_OK) return read_blame_message(o);
    }
    o->node = NULL;
    o->g->cur_scope = OM_NONE;
    OM_TRY(read_outputs(o));
    OM_TRY(read_host_scalars(o));
    return read_check_symbols(o);
}

om_status om_onnx_read(om_ctx *cx, const void *bytes, size_t size, om_graph **out) {
    *out = NULL;
    if (cx->status != OM_OK) return cx->status;
    OM_TRY(om_onnx_wire(cx, &onnx__model_proto__descriptor, bytes, size));
    om_arena file = {.cx = cx};
    om_onnx o = {.cx = cx,
                 .tmp = {.cx = cx},
                 .names = {.cx = cx},
                 .types = {.cx = cx},
                 .meta = {.cx = cx},
                 .g = om_graph_new(cx)};
    const Onnx__ModelProto *m = o.g ? om_onnx_unpack(cx, &file, bytes, size) : NULL;
    om_status s = cx->status;
    if (s == OM_OK) s = read_model(&o, m);
    if (s == OM_OK) s = cx->status;
    om_strmap_free(&o.names);
    om_strmap_free(&o.types);
    om_strmap_free(&o.meta);
    om_free(cx, o.vals.v);
    om_arena_free(&o.tmp);
    om_arena_free(&file);
    if (s == OM_OK) *out = o.g;
    else om_graph_free(o.g);
    return s;
}
