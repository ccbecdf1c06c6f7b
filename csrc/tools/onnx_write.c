/* onnx_write.c - the forward part of a graph as a standard ONNX file (opset 23): onnxruntime runs it, om_onnx_read
 * reads it back.
 *
 * One table row per operator: either the ONNX operator of the same meaning, or a function that emits a composition.
 * Inference meaning: dropout and the gradient stops are Identity; batch_norm in training mode normalises with the
 * batch. Size expressions become tensors: a symbol is Shape(input)[axis] (or the 0-d input that names it), sums and
 * products are Add and Mul over int64 tensors of one element, made once per expression; a list of sizes that are all
 * numbers is an initialiser. Roles, symbols bound to values, and write-backs travel as metadata (docs/ONNX.md). Host
 * nodes and values only gradients read (lse, indices of a pool) have no standard form: writing is refused with the
 * operator's name.
 */
#include "tools/onnx_write.h"

#include "ops/strip.h"

#include <stdio.h>

static const om_write_row *const tables[] = {om_write_rows_math, om_write_rows_nn, om_write_rows_optim};

static const om_write_row *write_row_of(const om_op *op) {
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const om_write_row *r = tables[i]; r->op; r++)
            if (r->op == op) return r;
    return NULL;
}

static Onnx__ValueInfoProto *write_value_info(om_writer *w, const char *name, const om_type *t) {
    Onnx__ValueInfoProto *v = NEW(w, Onnx__ValueInfoProto, onnx__value_info_proto__init);
    Onnx__TypeProto *tp = NEW(w, Onnx__TypeProto, onnx__type_proto__init);
    Onnx__TypeProto__Tensor *tt = NEW(w, Onnx__TypeProto__Tensor, onnx__type_proto__tensor__init);
    Onnx__TensorShapeProto *s = NEW(w, Onnx__TensorShapeProto, onnx__tensor_shape_proto__init);
    v->name = (char *)name;
    v->type = tp;
    tp->value_case = ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE;
    tp->tensor_type = tt;
    tt->has_elem_type = 1;
    tt->elem_type = om_dtype_onnx(t->dtype);
    tt->shape = s;
    s->dim = om_arena_alloc(&w->a, (t->rank + 1u) * sizeof *s->dim);
    for (int i = 0; i < t->rank && s->dim; i++) {
        Onnx__TensorShapeProto__Dimension *d = NEW(w, Onnx__TensorShapeProto__Dimension,
                                                   onnx__tensor_shape_proto__dimension__init);
        if (t->dim[i] >= 0) {
            d->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
            d->dim_value = t->dim[i];
        } else {
            char text[512];
            om_dim_print(w->g, t->dim[i], text, sizeof text);
            d->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM;
            d->dim_param = om_write_str(w, text);
        }
        s->dim[s->n_dim++] = d;
    }
    return v;
}

static void write_prop(om_writer *w, const char *what, const char *name, const char *value) {
    size_t n = strlen(what) + strlen(name) + 2;
    char *key = om_arena_alloc(&w->a, n);
    Onnx__StringStringEntryProto *e = NEW(w, Onnx__StringStringEntryProto, onnx__string_string_entry_proto__init),
        **slot = OM_PUSH(w->cx, &w->props);
    if (!key || !slot) return;
    snprintf(key, n, "%s:%s", what, name);
    e->key = key;
    e->value = om_write_str(w, value);
    *slot = e;
}

/* Outputs have names of their own where the value is a graph input, a constant or an output already. */
static const char *write_out(om_writer *w, om_id v, om_strmap *given) {
    const char *name = w->name[v];
    om_id old;
    if (!om_strmap_put(given, name, v, &old)) return "";
    if (old != OM_NONE || om_val(w->g, v)->role != OM_ACT)
        name = EMIT(w, "Identity", om_write_unique(w, "output"), w->name[v]);
    Onnx__ValueInfoProto **slot = OM_PUSH(w->cx, &w->outs);
    if (slot) *slot = write_value_info(w, name, om_ty(w->g, v));
    return name;
}

static om_status write_graph(om_writer *w) {
    const om_graph *g = w->g;
    for (om_id i = 0; i < g->values.n && !FAILED(w); i++) {
        const om_value *v = om_val(g, i);
        char s[16];
        snprintf(s, sizeof s, "v%u", i);
        if (v->role == OM_GRAD_IN || (v->role == OM_ACT && g->nodes.v[v->node].phase == OM_BACKWARD)) w->name[i] = "";
        else w->name[i] = om_write_unique(w, v->name ? v->name : s);
    }
    for (om_id i = 0; i < g->outputs.n && !FAILED(w); i++)
        if (!*w->name[g->outputs.v[i]])
            return om_fail(w->cx, OM_INVALID, "writing ONNX: output %u is known only in backward", i);
    for (om_id i = 0; i < g->syms.n; i++)
        if (g->syms.v[i].input == OM_NONE)
            return om_fail(w->cx, OM_INVALID, "writing ONNX: the size %s is not bound to a graph input",
                           g->syms.v[i].name);
    for (om_id i = 0; i < g->inputs.n && !FAILED(w); i++) {
        const om_value *v = om_val(g, g->inputs.v[i]);
        if (v->role == OM_GRAD_IN) continue;
        const char *name = w->name[g->inputs.v[i]];
        Onnx__ValueInfoProto **slot = OM_PUSH(w->cx, &w->ins);
        if (slot) *slot = write_value_info(w, name, &v->type);
        write_prop(w, "role", name, v->role == OM_PARAM ? "param" : v->role == OM_BUFFER ? "buffer" : "input");
    }
    for (om_id i = 0; i < g->syms.n && !FAILED(w); i++)
        if (g->syms.v[i].input != OM_NONE && g->syms.v[i].axis < 0)
            write_prop(w, "symbol", w->name[g->inputs.v[g->syms.v[i].input]], g->syms.v[i].name);
    for (om_id i = 0; i < g->values.n && !FAILED(w); i++) {
        const om_value *v = om_val(g, i);
        int64_t dim[OM_RANK];
        if (v->role != OM_CONST || !w->uses[i]) continue;
        for (int k = 0; k < v->type.rank; k++) dim[k] = v->type.dim[k];
        om_write_init(w, w->name[i], v->type.dtype, v->type.rank, dim, v->data);
    }
    for (om_id i = 0; i < g->nodes.n && !FAILED(w); i++) {
        w->n = &g->nodes.v[i];
        if (w->n->phase == OM_BACKWARD) continue;
        const om_write_row *r = write_row_of(w->n->op);
        const om_pw_row *pw = w->n->op->pw;
        if (r) r->rule(w, r->onnx);
        else if (pw && *pw->onnx) om_write_same(w, pw->onnx);
        else return om_write_refuse(w, "it exists only inside the engine"), w->cx->status;
    }
    w->n = NULL;
    om_strmap given = {.cx = w->cx};
    for (om_id i = 0; i < g->outputs.n && !FAILED(w); i++) write_out(w, g->outputs.v[i], &given);
    for (om_id i = 0; i < g->writes.n && !FAILED(w); i++) {
        const char *name = write_out(w, g->writes.v[i].value, &given);
        if (!FAILED(w)) write_prop(w, "write", name, w->name[g->inputs.v[g->writes.v[i].input]]);
    }
    om_strmap_free(&given);
    return w->cx->status;
}

static void write_count(om_writer *w) {
    const om_graph *g = w->g;
    for (om_id i = 0; i < g->nodes.n; i++)
        for (int k = 0; k < g->nodes.v[i].n_in && g->nodes.v[i].phase != OM_BACKWARD; k++)
            if (om_ins(g, &g->nodes.v[i])[k] != OM_NONE) w->uses[om_ins(g, &g->nodes.v[i])[k]]++;
    for (om_id i = 0; i < g->outputs.n; i++) w->uses[g->outputs.v[i]]++;
    for (om_id i = 0; i < g->writes.n; i++) w->uses[g->writes.v[i].value]++;
}

static om_status write_model(om_writer *w, void **bytes, size_t *size) {
    Onnx__ModelProto m = ONNX__MODEL_PROTO__INIT;
    Onnx__GraphProto f = ONNX__GRAPH_PROTO__INIT;
    Onnx__OperatorSetIdProto opset = ONNX__OPERATOR_SET_ID_PROTO__INIT, ms = opset, *opsets[] = {&opset, &ms};
    ms.domain = (char *)"com.microsoft";
    ms.has_version = 1;
    ms.version = 1;
    opset.domain = (char *)"";
    opset.has_version = 1;
    opset.version = OM_ONNX_OPSET_MAX;
    m.has_ir_version = 1;
    m.ir_version = 10;
    m.producer_name = (char *)"ortmodule";
    m.n_opset_import = w->microsoft ? 2 : 1;
    m.opset_import = opsets;
    m.graph = &f;
    f.name = (char *)"forward";
    f.node = w->nodes.v, f.n_node = w->nodes.n;
    f.initializer = w->inits.v, f.n_initializer = w->inits.n;
    f.input = w->ins.v, f.n_input = w->ins.n;
    f.output = w->outs.v, f.n_output = w->outs.n;
    f.metadata_props = w->props.v, f.n_metadata_props = w->props.n;
    size_t n = onnx__model_proto__get_packed_size(&m);
    if (n > INT32_MAX)
        return om_fail(w->cx, OM_UNSUPPORTED, "writing ONNX: %zu bytes, protobuf holds at most %d", n, INT32_MAX);
    *bytes = om_alloc(w->cx, n);
    if (!*bytes) return w->cx->status;
    *size = onnx__model_proto__pack(&m, *bytes);
    return OM_OK;
}

om_status om_onnx_write(om_ctx *cx, const om_graph *g, void **bytes, size_t *size) {
    *bytes = NULL;
    *size = 0;
    if (cx->status != OM_OK) return cx->status;
    om_writer w = {.cx = cx, .g = g, .a = {.cx = cx}, .taken = {.cx = cx}};
    w.uses = om_arena_alloc(&w.a, (g->values.n + 1u) * sizeof *w.uses);
    w.name = om_arena_alloc(&w.a, (g->values.n + 1u) * sizeof *w.name);
    w.expr = om_arena_alloc(&w.a, (g->exprs.n + 1u) * sizeof *w.expr);
    om_status s = cx->status;
    if (s == OM_OK) write_count(&w);
    if (s == OM_OK) s = write_graph(&w);
    if (s == OM_OK) s = write_model(&w, bytes, size);
    om_strmap_free(&w.taken);
    om_free(cx, w.nodes.v);
    om_free(cx, w.inits.v);
    om_free(cx, w.ins.v);
    om_free(cx, w.outs.v);
    om_free(cx, w.props.v);
    om_arena_free(&w.a);
    return s;
}
