/* export.c - the evaluation graph, cut down to some outputs, with parameters inside.
 *
 * Own operators bring their bodies along; one that has none is refused. The graph without parameters is packed as a
 * whole; parameters follow one by one, from where they lie, as further initialisers: fields of a protobuf message may
 * stand in any order, so nothing is held twice.
 */
#include "trainer/cut.h"
#include "trainer/trainer.h"

#include <stdio.h>

enum { FIELD_GRAPH = 7 << 3 | 2, FIELD_INITIALIZER = 5 << 3 | 2, FIELD_RAW_DATA = 9 << 3 | 2 };

typedef struct export {
    om_cut cut;
    om_trainer *t;
    uint8_t *param; /* per parameter: inside */
} export;

static Onnx__ValueInfoProto *value_find(size_t n, Onnx__ValueInfoProto *const *v, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (v[i]->name && !strcmp(v[i]->name, name)) return v[i];
    return NULL;
}

/* Own operators have bodies in standard ones, or only this library runs the file. */
static om_status own_check(const om_cut *c, const Onnx__ModelProto *m) {
    for (size_t i = 0; i < c->g.n_node; i++) {
        const Onnx__NodeProto *n = c->g.node[i];
        bool there = !n->domain || strcmp(n->domain, "ortmodule") != 0;
        for (size_t k = 0; k < m->n_functions && !there; k++) {
            const Onnx__FunctionProto *f = m->functions[k];
            there = f->name && f->domain && n->op_type && !strcmp(f->name, n->op_type) &&
                    !strcmp(f->domain, n->domain);
        }
        OM_CHECK(c->cx, there,
                 "export: %.80s of domain ortmodule has no meaning in standard operators here, so only this library "
                 "would run the file; name outputs that do not need it", n->op_type ? n->op_type : "an operator");
    }
    return OM_OK;
}

static om_status export_make(export *e, const Onnx__ModelProto *m, const char *const *outputs, int n) {
    const Onnx__GraphProto *of = m->graph;
    om_cut *c = &e->cut;
    Onnx__GraphProto *g = &c->g;
    for (int i = 0; i < n; i++) OM_TRY(om_cut_need(c, outputs[i]));
    OM_TRY(om_cut_make(c, of, (size_t)n, 0));
    OM_TRY(own_check(c, m));
    if (!(e->param = om_arena_alloc(&c->mem, (size_t)e->t->n_param + 1))) return c->cx->status;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++)
            if (!strcmp(outputs[i], outputs[k]))
                return om_fail(c->cx, OM_INVALID, "export: output '%.80s' is named twice", outputs[i]);
        Onnx__ValueInfoProto *v = value_find(of->n_output, of->output, outputs[i]);
        if (!v) v = value_find(of->n_value_info, of->value_info, outputs[i]);
        if (!v) {
            char known[400] = "";
            size_t at = 0;
            for (size_t k = 0; k < of->n_output && at < sizeof known; k++)
                at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", k ? ", " : "", of->output[k]->name);
            return om_fail(c->cx, OM_INVALID, "export: '%.80s' is no output of the evaluation graph, which has: %s",
                           outputs[i], known);
        }
        g->output[g->n_output++] = v;
    }
    for (size_t i = 0; i < of->n_input; i++) {
        const int at = om_trainer_find(e->t, of->input[i]->name);
        if (!om_cut_needed(c, of->input[i]->name)) continue;
        if (at >= 0)
            e->param[at] = 1;
        else
            g->input[g->n_input++] = of->input[i];
    }
    size_t kept = 0;
    for (size_t i = 0; i < g->n_value_info; i++)
        if (!value_find(g->n_output, g->output, g->value_info[i]->name)) g->value_info[kept++] = g->value_info[i];
    g->n_value_info = kept;
    for (size_t i = 0; i < of->n_metadata_props; i++) {
        const char *key = of->metadata_props[i]->key;
        const bool gone = key && (!strncmp(key, "role:", 5) ? om_trainer_find(e->t, key + 5) >= 0
                                                            : !strncmp(key, "write:", 6));
        if (!gone) g->metadata_props[g->n_metadata_props++] = of->metadata_props[i];
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
static om_status weight_make(om_cut *c, const om_tparam *p, weight *w) {
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

static om_status export_write(export *e, Onnx__ModelProto *m, const char *path) {
    om_cut *c = &e->cut;
    const om_trainer *t = e->t;
    weight *w = om_arena_alloc(&c->mem, ((size_t)t->n_param + 1) * sizeof *w);
    const size_t graph = onnx__graph_proto__get_packed_size(&c->g);
    uint64_t all = graph;
    if (!w) return c->cx->status;
    for (int i = 0; i < t->n_param; i++) {
        if (!e->param[i]) continue;
        OM_TRY(weight_make(c, &t->param[i], &w[i]));
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
    for (int i = 0; i < t->n_param && s == OM_OK; i++) {
        if (!e->param[i]) continue;
        s = om_file_put(&f, w[i].head, w[i].n_head);
        if (s == OM_OK) s = om_file_put(&f, w[i].proto, w[i].n_proto);
        if (s == OM_OK) s = om_file_put(&f, w[i].raw, w[i].n_raw);
        if (s == OM_OK) s = om_file_put(&f, t->param[i].value.data, w[i].size);
    }
    return om_file_end(&f, s);
}

om_status om_trainer_export(om_trainer *t, const char *path, const char *const *outputs, int n) {
    OM_TRY(om_trainer_status(t));
    OM_TRY(om_trainer_loaded(t));
    OM_CHECK(t->host, path, "export: path is NULL");
    OM_CHECK(t->host, outputs || n <= 0, "export: outputs is NULL");
    for (int i = 0; i < n; i++) OM_CHECK(t->host, outputs[i], "export: outputs[%d], a name, is NULL", i);
    OM_CHECK(t->host, t->eval_onnx.size, "export: the artifacts have no evaluation graph");
    OM_CHECK(t->host, n > 0, "export: no output was named");
    export e = {.t = t};
    om_cut_begin(&e.cut, t->host);
    Onnx__ModelProto *m = om_cut_unpack(&e.cut, t->eval_onnx, true);
    om_status s = t->host->status;
    if (s == OM_OK) s = export_make(&e, m, outputs, n);
    if (s == OM_OK) s = export_write(&e, m, path);
    om_cut_end(&e.cut);
    return s;
}
