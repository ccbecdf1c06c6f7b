/* cut.c - see cut.h. The nodes that values need are found by names, from the last to the first; a node's subgraphs may
 * name values of the graph around them.
 *
 * A training graph of onnxruntime-training is forward, loss, gradients and their sums: beside the user's inputs and the
 * parameters it takes NAME.accumulation.buffer and lazy_reset_grad, behind the user's outputs it gives
 * NAME.accumulation.out. All of that goes; what is left takes the parameters' roles as metadata (docs/ONNX.md).
 */
#include "trainer/cut.h"

void om_cut_begin(om_cut *c, om_ctx *cx) {
    *c = (om_cut){.cx = cx, .mem = {.cx = cx}, .need = {.cx = cx}};
}

void om_cut_end(om_cut *c) {
    om_strmap_free(&c->need);
    om_arena_free(&c->mem);
}

Onnx__ModelProto *om_cut_unpack(om_cut *c, om_bytes onnx, bool checked) {
    if (!checked && om_onnx_wire(c->cx, &onnx__model_proto__descriptor, onnx.data, onnx.size) != OM_OK) return NULL;
    Onnx__ModelProto *m = om_onnx_unpack(c->cx, &c->mem, onnx.data, onnx.size);
    if (!m || m->graph) return m;
    om_fail(c->cx, OM_INVALID, "not a valid ONNX file: it has no graph");
    return NULL;
}

om_status om_cut_need(om_cut *c, const char *name) {
    return !name || !*name || om_strmap_put(&c->need, name, 0, NULL) ? OM_OK : c->cx->status;
}
bool om_cut_needed(const om_cut *c, const char *name) { return name && om_strmap_get(&c->need, name) != OM_NONE; }

static om_status graph_need(om_cut *c, const Onnx__GraphProto *g);

static om_status node_need(om_cut *c, const Onnx__NodeProto *n) {
    for (size_t i = 0; i < n->n_input; i++) OM_TRY(om_cut_need(c, n->input[i]));
    for (size_t i = 0; i < n->n_attribute; i++) {
        const Onnx__AttributeProto *a = n->attribute[i];
        if (a->g) OM_TRY(graph_need(c, a->g));
        for (size_t k = 0; k < a->n_graphs; k++) OM_TRY(graph_need(c, a->graphs[k]));
    }
    return OM_OK;
}

static om_status graph_need(om_cut *c, const Onnx__GraphProto *g) {
    for (size_t i = 0; i < g->n_node; i++) OM_TRY(node_need(c, g->node[i]));
    for (size_t i = 0; i < g->n_output; i++) OM_TRY(om_cut_need(c, g->output[i]->name));
    return OM_OK;
}

om_status om_cut_make(om_cut *c, const Onnx__GraphProto *of, size_t n_outputs, size_t n_metadata) {
    c->g = *of;
#define LIST(field, count) (c->g.field = om_arena_alloc(&c->mem, ((count) + 1) * sizeof *c->g.field))
    if (!LIST(node, of->n_node) || !LIST(initializer, of->n_initializer) || !LIST(input, of->n_input) ||
        !LIST(output, n_outputs) || !LIST(value_info, of->n_value_info) ||
        !LIST(metadata_props, of->n_metadata_props + n_metadata))
        return c->cx->status;
#undef LIST
    c->g.n_node = c->g.n_initializer = c->g.n_input = c->g.n_output = c->g.n_value_info = c->g.n_metadata_props = 0;
    for (size_t i = of->n_node; i-- > 0;) {
        bool used = false;
        for (size_t k = 0; k < of->node[i]->n_output; k++) used |= om_cut_needed(c, of->node[i]->output[k]);
        if (!used) continue;
        OM_TRY(node_need(c, of->node[i]));
        c->g.node[c->g.n_node++] = of->node[i];
    }
    for (size_t i = 0, k = c->g.n_node; i + 1 < k; i++, k--) {
        Onnx__NodeProto *swap = c->g.node[i];
        c->g.node[i] = c->g.node[k - 1];
        c->g.node[k - 1] = swap;
    }
    for (size_t i = 0; i < of->n_initializer; i++)
        if (om_cut_needed(c, of->initializer[i]->name)) c->g.initializer[c->g.n_initializer++] = of->initializer[i];
    for (size_t i = 0; i < of->n_value_info; i++)
        if (om_cut_needed(c, of->value_info[i]->name)) c->g.value_info[c->g.n_value_info++] = of->value_info[i];
    return OM_OK;
}

/* --- onnxruntime-training ------------------------------------------------------------------------ */

static bool ends(const char *name, const char *with) {
    const size_t n = name ? strlen(name) : 0, m = strlen(with);
    return n >= m && !strcmp(name + n - m, with);
}

static om_status role_put(om_cut *c, const char *name) {
    Onnx__StringStringEntryProto *p = om_arena_alloc(&c->mem, sizeof *p);
    char *key = om_arena_alloc(&c->mem, strlen(name) + 6);
    if (!p || !key) return c->cx->status;
    *p = (Onnx__StringStringEntryProto)ONNX__STRING_STRING_ENTRY_PROTO__INIT;
    strcpy(strcpy(key, "role:") + 5, name);
    p->key = key;
    p->value = (char *)(uintptr_t) "param";
    c->g.metadata_props[c->g.n_metadata_props++] = p;
    return OM_OK;
}

static bool is_parameter(const om_tensors *checkpoint, om_arena *mem, const char *name) {
    static const char *const kind[] = {"trained:", "frozen:"};
    for (int k = 0; k < 2 && name; k++) {
        char *key = om_arena_alloc(mem, strlen(kind[k]) + strlen(name) + 1);
        if (!key) return false;
        strcpy(strcpy(key, kind[k]) + strlen(kind[k]), name);
        if (om_tensors_meta(checkpoint, key)) return true;
    }
    return false;
}

static om_status ort_make(om_cut *c, om_bytes onnx, const om_tensors *checkpoint, om_bytes *out) {
    Onnx__ModelProto *m = om_cut_unpack(c, onnx, false);
    if (!m) return c->cx->status;
    Onnx__GraphProto *of = m->graph;
    for (size_t i = 0; i < of->n_output; i++)
        if (!ends(of->output[i]->name, ".accumulation.out")) OM_TRY(om_cut_need(c, of->output[i]->name));
    OM_TRY(om_cut_make(c, of, of->n_output, of->n_input));
    for (size_t i = 0; i < of->n_output; i++)
        if (!ends(of->output[i]->name, ".accumulation.out")) c->g.output[c->g.n_output++] = of->output[i];
    for (size_t i = 0; i < of->n_metadata_props; i++)
        c->g.metadata_props[c->g.n_metadata_props++] = of->metadata_props[i];
    for (size_t i = 0; i < of->n_input; i++) {
        Onnx__ValueInfoProto *v = of->input[i];
        if (ends(v->name, ".accumulation.buffer") || (v->name && !strcmp(v->name, "lazy_reset_grad"))) continue;
        c->g.input[c->g.n_input++] = v;
        if (is_parameter(checkpoint, &c->mem, v->name)) OM_TRY(role_put(c, v->name));
    }
    OM_TRY(c->cx->status);
    m->graph = &c->g;
    const size_t size = onnx__model_proto__get_packed_size(m);
    void *bytes = om_alloc(c->cx, size + 1);
    if (!bytes) return c->cx->status;
    onnx__model_proto__pack(m, bytes);
    *out = (om_bytes){bytes, size};
    return OM_OK;
}

om_status om_cut_ort(om_ctx *cx, om_bytes onnx, const om_tensors *checkpoint, om_bytes *out) {
    om_cut c;
    om_cut_begin(&c, cx);
    *out = (om_bytes){0};
    const om_status s = ort_make(&c, onnx, checkpoint, out);
    om_cut_end(&c);
    return s;
}
