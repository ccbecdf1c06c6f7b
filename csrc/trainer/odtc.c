/* odtc.c - a checkpoint of onnxruntime-training as tensors and texts, in the terms of state.c.
 *
 * The file is one flatbuffer, identifier ODTC, version 2. A table is a signed distance to its vtable, which has the
 * place of every field (0: left out); strings, vectors and tables inside of others are distances from where they are
 * named. What is taken of it, by number of field:
 *
 *     Checkpoint      0 version  1 module_state  2 optimizer_groups  3 property_bag
 *     ModuleState     0 requires_grad_params  1 frozen_params  2 is_nominal_state  3 has_external_data
 *     Tensor          0 name  2 dims  3 data_type (ONNX's numbers)  4 raw_data
 *     OptimizerGroup  1 step  2 initial_learning_rate  3 optimizer_states {0 param_name  1 momentums}
 *     PropertyBag     0 ints  1 floats  2 strings {0 name  1 value}
 *
 * Every distance is checked against the file; lists are as long as the file allows, and names that come twice are
 * refused, so what is allocated is bounded by the file's size. Numbers are read byte by byte: of any alignment.
 */
#include "graph/number.h"
#include "trainer/tensors.h"

#include <stdio.h>

typedef struct flat {
    om_ctx *cx;
    const char *what;
    const uint8_t *b;
    size_t size;
    om_tensors *f;
    bool nominal;
} flat;

typedef struct list { /* of a vector */
    size_t at;        /* the first element */
    uint32_t n;
} list;

#define flat_err(x, ...) om_fail((x)->cx, OM_INVALID, __VA_ARGS__)

static uint64_t number_at(const flat *x, size_t at, int bytes) {
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++) v |= (uint64_t)x->b[at + (size_t)i] << 8 * i;
    return v;
}
static bool inside(const flat *x, size_t at, size_t bytes) { return at <= x->size && bytes <= x->size - at; }

static om_status broken(const flat *x, size_t at) {
    return flat_err(x, "%s: not a valid checkpoint of onnxruntime-training: byte %zu: cut or broken", x->what, at);
}

/* *to: where a distance at `at` leads; at least four bytes are there */
static om_status follow(const flat *x, size_t at, size_t *to) {
    if (!inside(x, at, 4)) return broken(x, at);
    *to = at + (size_t)number_at(x, at, 4);
    return *to > at && inside(x, *to, 4) ? OM_OK : broken(x, at);
}

/* *to: the field's place, 0: left out */
static om_status field(const flat *x, size_t table, int k, size_t bytes, size_t *to) {
    *to = 0;
    const int64_t v = (int64_t)table - (int32_t)(uint32_t)number_at(x, table, 4);
    if (v < 0 || !inside(x, (size_t)v, 4)) return broken(x, table);
    const size_t size = (size_t)number_at(x, (size_t)v, 2), entry = 4 + 2 * (size_t)k;
    if (!inside(x, (size_t)v, size)) return broken(x, (size_t)v);
    if (entry + 2 > size) return OM_OK;
    const size_t offset = (size_t)number_at(x, (size_t)v + entry, 2);
    if (!offset) return OM_OK;
    *to = table + offset;
    return inside(x, *to, bytes) ? OM_OK : broken(x, *to);
}

static om_status field_number(const flat *x, size_t table, int k, int bytes, uint64_t *v) { /* left out: 0 */
    size_t at;
    OM_TRY(field(x, table, k, (size_t)bytes, &at));
    *v = at ? number_at(x, at, bytes) : 0;
    return OM_OK;
}

static om_status field_table(const flat *x, size_t table, int k, size_t *to) {
    OM_TRY(field(x, table, k, 4, to));
    return *to ? follow(x, *to, to) : OM_OK;
}

static om_status field_list(const flat *x, size_t table, int k, size_t element, list *l) {
    size_t at;
    *l = (list){0};
    OM_TRY(field_table(x, table, k, &at));
    if (!at) return OM_OK;
    *l = (list){at + 4, (uint32_t)number_at(x, at, 4)};
    return inside(x, l->at, l->n * element) && l->n <= x->size ? OM_OK : broken(x, at);
}

static om_status element_table(const flat *x, const list *l, uint32_t i, size_t *to) {
    return follow(x, l->at + 4 * (size_t)i, to);
}

static om_status field_text(const flat *x, size_t table, int k, const char **s) {
    list l;
    OM_TRY(field_list(x, table, k, 1, &l));
    char *copy = om_arena_alloc(&x->f->mem, (size_t)l.n + 1);
    if (!copy) return x->cx->status;
    if (l.n) memcpy(copy, x->b + l.at, l.n);
    if (strlen(copy) != l.n || !om_utf8_valid(copy, l.n))
        return flat_err(x, "%s: byte %zu: text is not UTF-8, or has a NUL", x->what, l.at);
    *s = copy;
    return OM_OK;
}

/* --- into the lists of a safetensors file -------------------------------------------------------- */

static om_status meta_put(const flat *x, const char *a, const char *b, const char *text) {
    om_id old;
    char *key = om_arena_alloc(&x->f->mem, strlen(a) + strlen(b) + 1);
    if (!key) return x->cx->status;
    strcpy(strcpy(key, a) + strlen(a), b);
    if (!om_strmap_put(&x->f->keys, key, x->f->meta.n, &old)) return x->cx->status;
    if (old != OM_NONE) return flat_err(x, "%s: '%.80s' is given twice", x->what, key);
    om_text_pair *p = OM_PUSH(x->cx, &x->f->meta);
    if (!p) return x->cx->status;
    *p = (om_text_pair){key, om_arena_str(&x->f->mem, text)};
    return x->cx->status;
}

/* prefix: of the entry's name; of: the parameter a moment belongs to, NULL: the tensor's own name */
static om_status tensor_put(const flat *x, size_t table, const char *prefix, const char *of, const char **named) {
    uint64_t type;
    list dims, raw;
    om_id old;
    om_entry e = {.t = {.device = -1}};
    const char *name = of;
    if (!of) OM_TRY(field_text(x, table, 0, &name));
    OM_TRY(field_list(x, table, 2, 8, &dims));
    OM_TRY(field_number(x, table, 3, 4, &type));
    OM_TRY(field_list(x, table, 4, 1, &raw));
    *named = name;
    if (!*name) return flat_err(x, "%s: a tensor has no name", x->what);
    if (x->nominal) return OM_OK;
    e.t.dtype = (uint8_t)om_dtype_from_onnx((int)type);
    if (!e.t.dtype || dims.n > OM_RANK)
        return flat_err(x, "%s: '%.80s' has type %d (ONNX's number) and %u dimensions", x->what, name, (int)type,
                        (unsigned)dims.n);
    e.t.rank = (uint8_t)dims.n;
    uint64_t bytes = om_dtype_size(e.t.dtype);
    for (uint32_t k = 0; k < dims.n; k++) {
        const uint64_t d = number_at(x, dims.at + 8 * (size_t)k, 8);
        if (d > INT64_MAX / 8 || __builtin_mul_overflow(bytes, d, &bytes))
            return flat_err(x, "%s: '%.80s' is too large", x->what, name);
        e.t.dim[k] = (int64_t)d;
    }
    if (bytes != raw.n)
        return flat_err(x, "%s: '%.80s' has %u bytes; its type and shape need %llu", x->what, name, (unsigned)raw.n,
                        (unsigned long long)bytes);
    om_dense_strides(&e.t);
    e.t.data = (void *)(uintptr_t)(x->b + raw.at);
    e.size = raw.n;
    char *key = om_arena_alloc(&x->f->mem, strlen(prefix) + strlen(name) + 1);
    if (!key) return x->cx->status;
    e.name = strcpy(strcpy(key, prefix) + strlen(prefix), name) - strlen(prefix);
    if (!om_strmap_put(&x->f->names, e.name, x->f->entry.n, &old)) return x->cx->status;
    if (old != OM_NONE) return flat_err(x, "%s: tensor '%.80s' is given twice", x->what, e.name);
    om_entry *slot = OM_PUSH(x->cx, &x->f->entry);
    if (slot) *slot = e;
    return x->cx->status;
}

static om_status module_read(flat *x, size_t module) {
    static const char *const kind[] = {"trained:", "frozen:"};
    uint64_t flag;
    OM_TRY(field_number(x, module, 3, 1, &flag));
    if (flag)
        return om_fail(x->cx, OM_UNSUPPORTED, "%s: its tensors are in a file beside it, which is not read", x->what);
    OM_TRY(field_number(x, module, 2, 1, &flag));
    x->nominal = flag != 0;
    if (flag) OM_TRY(meta_put(x, "nominal", "", "1"));
    for (int k = 0; k < 2; k++) {
        list l;
        OM_TRY(field_list(x, module, k, 4, &l));
        for (uint32_t i = 0; i < l.n; i++) {
            size_t t;
            const char *name;
            OM_TRY(element_table(x, &l, i, &t));
            OM_TRY(tensor_put(x, t, "", NULL, &name));
            OM_TRY(meta_put(x, kind[k], name, "1"));
        }
    }
    return OM_OK;
}

static om_status real_put(const flat *x, const char *a, const char *b, uint32_t bits) {
    char text[64];
    float v;
    memcpy(&v, &bits, sizeof v);
    om_number_write(text, (double)v);
    return meta_put(x, a, b, text);
}

static om_status group_read(const flat *x, size_t group) {
    static const char *const moment[] = {OM_MOMENT_1, OM_MOMENT_2};
    uint64_t step, rate;
    list states, moments;
    char text[32];
    OM_TRY(field_number(x, group, 1, 8, &step));
    OM_TRY(field_number(x, group, 2, 4, &rate));
    OM_TRY(field_list(x, group, 3, 4, &states));
    snprintf(text, sizeof text, "%lld", (long long)step);
    OM_TRY(meta_put(x, "updates", "", text));
    if (rate) { /* 0: never set */
        OM_TRY(real_put(x, "rate", "", (uint32_t)rate));
        OM_TRY(real_put(x, "initial_rate", "", (uint32_t)rate));
    }
    for (uint32_t i = 0; i < states.n; i++) {
        size_t state, t;
        const char *name, *own;
        OM_TRY(element_table(x, &states, i, &state));
        OM_TRY(field_text(x, state, 0, &name));
        OM_TRY(meta_put(x, "moments:", name, "1")); /* once */
        OM_TRY(field_list(x, state, 1, 4, &moments));
        if (moments.n > 2)
            return flat_err(x, "%s: '%.80s' has %u moments; 2 at most", x->what, name, (unsigned)moments.n);
        for (uint32_t k = 0; k < moments.n; k++) {
            OM_TRY(element_table(x, &moments, k, &t));
            OM_TRY(tensor_put(x, t, moment[k], name, &own));
        }
    }
    return OM_OK;
}

static om_status bag_read(const flat *x, size_t bag) {
    static const char *const kind[] = {"int:", "float:", "string:"};
    for (int k = 0; k < 3; k++) {
        list l;
        OM_TRY(field_list(x, bag, k, 4, &l));
        for (uint32_t i = 0; i < l.n; i++) {
            size_t t;
            uint64_t v;
            const char *name, *value;
            char text[32];
            OM_TRY(element_table(x, &l, i, &t));
            OM_TRY(field_text(x, t, 0, &name));
            if (k == 2) {
                OM_TRY(field_text(x, t, 1, &value));
                OM_TRY(meta_put(x, kind[k], name, value));
                continue;
            }
            OM_TRY(field_number(x, t, 1, k ? 4 : 8, &v));
            snprintf(text, sizeof text, "%lld", (long long)v);
            OM_TRY(k ? real_put(x, kind[k], name, (uint32_t)v) : meta_put(x, kind[k], name, text));
        }
    }
    return OM_OK;
}

bool om_odtc_is(const void *bytes, size_t size) { return size >= 8 && !memcmp((const char *)bytes + 4, "ODTC", 4); }

om_status om_odtc_read(om_ctx *cx, const char *what, const void *bytes, size_t size, om_tensors *f) {
    flat x = {.cx = cx, .what = what, .b = bytes, .size = size, .f = f};
    size_t root, module, bag;
    uint64_t version;
    list groups;
    *f = (om_tensors){.mem = {.cx = cx}, .names = {.cx = cx}, .keys = {.cx = cx}, .ort = true};
    OM_TRY(follow(&x, 0, &root));
    OM_TRY(field_number(&x, root, 0, 4, &version));
    if (version != 2)
        return om_fail(cx, OM_UNSUPPORTED, "%s: version %d of onnxruntime-training's format; this library reads 2",
                       what, (int)version);
    OM_TRY(field_table(&x, root, 1, &module));
    OM_TRY(field_list(&x, root, 2, 4, &groups));
    OM_TRY(field_table(&x, root, 3, &bag));
    if (!module) return flat_err(&x, "%s: has no parameters", what);
    if (groups.n > 1)
        return om_fail(cx, OM_UNSUPPORTED, "%s: %u groups of an optimizer; one is supported", what, (unsigned)groups.n);
    OM_TRY(meta_put(&x, "format", "", OM_CHECKPOINT_FORMAT));
    OM_TRY(meta_put(&x, "version", "", "1"));
    OM_TRY(module_read(&x, module));
    if (groups.n) {
        size_t group;
        OM_TRY(element_table(&x, &groups, 0, &group));
        OM_TRY(group_read(&x, group));
    }
    return bag ? bag_read(&x, bag) : OM_OK;
}
