/* attributes.c - what a file says beside data: attributes and metadata of nodes, metadata of the graph, and types, with
 * sizes as expressions. */
#include "graph/number.h"
#include "onnx/read.h"

#include <ctype.h>
#include <stdio.h>

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
    char key[OM_ONNX_NAME];
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

const char *om_onnx_graph_meta(om_onnx *o, const char *what, const char *name) {
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

om_status om_onnx_dim_param(om_onnx *o, const char *text, om_dim *d) {
    char name[OM_ONNX_NAME];
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
            OM_TRY(om_onnx_dim_param(o, d->dim_param, &out->dim[i]));
        } else {
            ONNX_CHECK(o, mode == OM_ONNX_INPUT, "'%.80s': the size along axis %d is not given", name, i);
            char sym[OM_ONNX_NAME], text[OM_ONNX_NAME + 24];
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
