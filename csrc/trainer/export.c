/* export.c - the evaluation graph, cut down to some outputs, with parameters inside.
 *
 * The nodes an output needs are found by names, from the last to the first (a node's subgraphs may name values of the
 * graph around them). The graph without parameters is packed as a whole; parameters follow one by one, from where they
 * lie, as further initialisers: fields of a protobuf message may stand in any order, so nothing is held twice.
 */
#include "onnx/onnx.h"
#include "trainer/trainer.h"

enum { FIELD_GRAPH = 7 << 3 | 2, FIELD_INITIALIZER = 5 << 3 | 2, FIELD_RAW_DATA = 9 << 3 | 2 };

typedef struct cut {
    om_ctx *cx;
    om_trainer *t;
    om_arena mem;
    om_strmap need;     /* names of values */
    Onnx__GraphProto g; /* what is left of it */
    uint8_t *param;     /* per parameter: inside */
} cut;

static void *pb_alloc(void *arena, size_t size) { return om_arena_alloc(arena, size ? size : 1); }
static void pb_free(void *arena, void *p) { (void)arena, (void)p; }

static om_status need_add(cut *c, const char *name) {
    return !name || !*name || om_strmap_put(&c->need, name, 0, NULL) ? OM_OK : c->cx->status;
}
static bool needed(const cut *c, const char *name) { return name && om_strmap_get(&c->need, name) != OM_NONE; }

static om_status graph_need(cut *c, const Onnx__GraphProto *g);

static om_status node_need(cut *c, const Onnx__NodeProto *n) {
    for (size_t i = 0; i < n->n_input; i++) OM_TRY(need_add(c, n->input[i]));
    for (size_t i = 0; i < n->n_attribute; i++) {
        const Onnx__AttributeProto *a = n->attribute[i];
        if (a->g) OM_TRY(graph_need(c, a->g));
        for (size_t k = 0; k < a->n_graphs; k++) OM_TRY(graph_need(c, a->graphs[k]));
    }
    return OM_OK;
}

static om_status graph_need(cut *c, const Onnx__GraphProto *g) {
    for (size_t i = 0; i < g->n_node; i++) OM_TRY(node_need(c, g->node[i]));
    for (size_t i = 0; i < g->n_output; i++) OM_TRY(need_add(c, g->output[i]->name));
    return OM_OK;
}

static const Onnx__ValueInfoProto *value_find(size_t n, Onnx__ValueInfoProto *const *v, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (v[i]->name && !strcmp(v[i]->name, name)) return v[i];
    return NULL;
}

/* of: the whole graph; c->g: a copy of it, whose lists are replaced by shorter ones */
static om_status cut_make(cut *c, const Onnx__GraphProto *of, const char *const *outputs, int n) {
    c->g = *of;
#define LIST(field, count) (c->g.field = om_arena_alloc(&c->mem, ((count) + 1) * sizeof *c->g.field))
    if (!LIST(node, of->n_node) || !LIST(initializer, of->n_initializer) || !LIST(input, of->n_input) ||
        !LIST(output, (size_t)n) || !LIST(value_info, of->n_value_info) ||
        !LIST(metadata_props, of->n_metadata_props) || !(c->param = om_arena_alloc(&c->mem, (size_t)c->t->n_param + 1)))
        return c->cx->status;
#undef LIST
    c->g.n_node = c->g.n_initializer = c->g.n_input = c->g.n_output = c->g.n_value_info = c->g.n_metadata_props = 0;
    for (int i = 0; i < n; i++) {
        const Onnx__ValueInfoProto *v = value_find(of->n_output, of->output, outputs[i]);
        if (!v) v = value_find(of->n_value_info, of->value_info, outputs[i]);
        if (!v) return om_fail(c->cx, OM_INVALID, "export: '%.80s' is no output of the evaluation graph", outputs[i]);
        c->g.output[c->g.n_output++] = (Onnx__ValueInfoProto *)(uintptr_t)v;
        OM_TRY(need_add(c, outputs[i]));
    }
    for (size_t i = of->n_node; i-- > 0;) {
        bool used = false;
        for (size_t k = 0; k < of->node[i]->n_output; k++) used |= needed(c, of->node[i]->output[k]);
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
        if (needed(c, of->initializer[i]->name)) c->g.initializer[c->g.n_initializer++] = of->initializer[i];
    for (size_t i = 0; i < of->n_input; i++) {
        const int at = om_trainer_find(c->t, of->input[i]->name);
        if (!needed(c, of->input[i]->name)) continue;
        if (at >= 0)
            c->param[at] = 1;
        else
            c->g.input[c->g.n_input++] = of->input[i];
    }
    for (size_t i = 0; i < of->n_value_info; i++)
        if (needed(c, of->value_info[i]->name) && !value_find(c->g.n_output, c->g.output, of->value_info[i]->name))
            c->g.value_info[c->g.n_value_info++] = of->value_info[i];
    for (size_t i = 0; i < of->n_metadata_props; i++) {
        const char *key = of->metadata_props[i]->key;
        const bool gone = key && (!strncmp(key, "role:", 5) ? om_trainer_find(c->t, key + 5) >= 0
                                                            : !strncmp(key, "write:", 6));
        if (!gone) c->g.metadata_props[c->g.n_metadata_props++] = of->metadata_props[i];
    }
    return OM_OK;
}

static size_t varint(uint8_t *to, uint64_t v) {
    size_t n = 0;
    for (; v > 0x7f; v >>= 7) to[n++] = (uint8_t)(v | 0x80);
    to[n++] = (uint8_t)v;
    return n;
}

/* tag and length of a field of bytes */
static size_t field_head(uint8_t *to, int tag, uint64_t size) {
    to[0] = (uint8_t)tag;
    return 1 + varint(to + 1, size);
}

typedef struct weight {
    uint8_t head[16], raw[16], *proto;
    size_t n_head, n_raw, n_proto, size;
} weight;

/* An initialiser, but for its bytes. */
static om_status weight_make(cut *c, const om_tparam *p, weight *w) {
    int64_t dims[OM_RANK];
    Onnx__TensorProto proto = ONNX__TENSOR_PROTO__INIT;
    memcpy(dims, p->value.dim, sizeof dims);
    proto.name = (char *)(uintptr_t)p->name;
    proto.n_dims = p->value.rank;
    proto.dims = dims;
    proto.has_data_type = 1;
    proto.data_type = om_dtype_onnx(p->value.dtype);
    w->size = (size_t)om_numel(&p->value) * om_dtype_size(p->value.dtype);
    w->n_proto = onnx__tensor_proto__get_packed_size(&proto);
    if (!(w->proto = om_arena_alloc(&c->mem, w->n_proto + 1))) return c->cx->status;
    onnx__tensor_proto__pack(&proto, w->proto);
    w->n_raw = field_head(w->raw, FIELD_RAW_DATA, w->size);
    w->n_head = field_head(w->head, FIELD_INITIALIZER, w->n_proto + w->n_raw + w->size);
    return OM_OK;
}

static om_status cut_write(cut *c, Onnx__ModelProto *m, const char *path) {
    weight *w = om_arena_alloc(&c->mem, ((size_t)c->t->n_param + 1) * sizeof *w);
    const size_t graph = onnx__graph_proto__get_packed_size(&c->g);
    uint64_t all = graph;
    if (!w) return c->cx->status;
    for (int i = 0; i < c->t->n_param; i++) {
        if (!c->param[i]) continue;
        OM_TRY(weight_make(c, &c->t->param[i], &w[i]));
        all += w[i].n_head + w[i].n_proto + w[i].n_raw + w[i].size;
    }
    m->graph = NULL;
    const size_t rest = onnx__model_proto__get_packed_size(m);
    if (all + rest > INT32_MAX - 32)
        return om_fail(c->cx, OM_UNSUPPORTED, "export: %llu bytes; an ONNX file has 2 GiB at most",
                       (unsigned long long)all);
    uint8_t head[16], *body = om_arena_alloc(&c->mem, graph + 1), *around = om_arena_alloc(&c->mem, rest + 1);
    om_file f;
    if (!body || !around) return c->cx->status;
    onnx__graph_proto__pack(&c->g, body);
    onnx__model_proto__pack(m, around);
    OM_TRY(om_file_begin(c->cx, path, &f));
    om_status s = om_file_put(&f, around, rest);
    if (s == OM_OK) s = om_file_put(&f, head, field_head(head, FIELD_GRAPH, all));
    if (s == OM_OK) s = om_file_put(&f, body, graph);
    for (int i = 0; i < c->t->n_param && s == OM_OK; i++) {
        if (!c->param[i]) continue;
        s = om_file_put(&f, w[i].head, w[i].n_head);
        if (s == OM_OK) s = om_file_put(&f, w[i].proto, w[i].n_proto);
        if (s == OM_OK) s = om_file_put(&f, w[i].raw, w[i].n_raw);
        if (s == OM_OK) s = om_file_put(&f, c->t->param[i].value.data, w[i].size);
    }
    return om_file_end(&f, s);
}

om_status om_trainer_export(om_trainer *t, const char *path, const char *const *outputs, int n) {
    OM_TRY(t->host->status);
    OM_TRY(om_trainer_loaded(t));
    OM_CHECK(t->host, t->eval_onnx.size, "export: the artifacts have no evaluation graph");
    OM_CHECK(t->host, n > 0, "export: no output was named");
    cut c = {.cx = t->host, .t = t, .mem = {.cx = t->host}, .need = {.cx = t->host}};
    ProtobufCAllocator al = {.alloc = pb_alloc, .free = pb_free, .allocator_data = &c.mem};
    Onnx__ModelProto *m = onnx__model_proto__unpack(&al, t->eval_onnx.size, t->eval_onnx.data);
    om_status s = m && m->graph ? OM_OK : om_fail(t->host, OM_NOMEM, "export: out of memory");
    if (s == OM_OK) s = cut_make(&c, m->graph, outputs, n);
    if (s == OM_OK) s = cut_write(&c, m, path);
    om_strmap_free(&c.need);
    om_arena_free(&c.mem);
    return s;
}
