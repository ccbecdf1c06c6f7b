/* onnx_write_node.c - what rules write with: nodes and their attributes, constants, sizes (tools/onnx_write.h). */
#include "tools/onnx_write.h"

#include <stdio.h>

void *om_write_new(om_writer *w, size_t size, void (*init)(void *)) {
    static _Thread_local _Alignas(16) char scratch[1024];
    void *p = om_arena_alloc(&w->a, size);
    if (!p) p = scratch;
    init(p);
    return p;
}
char *om_write_str(om_writer *w, const char *s) {
    char *p = om_arena_str(&w->a, s);
    return p ? p : (char *)"";
}

const char *om_write_unique(om_writer *w, const char *want) {
    char s[280];
    snprintf(s, sizeof s, "%.240s", want);
    for (;;) {
        char *copy = om_arena_str(&w->a, s);
        om_id old;
        if (!copy || !om_strmap_put(&w->taken, copy, 0, &old)) return "";
        if (old == OM_NONE) return copy;
        snprintf(s, sizeof s, "%.240s_%u", want, ++w->count);
    }
}

/* --- nodes and attributes ------------------------------------------------------------------------------ */

static void write_meta(om_writer *w, const char *key, const char *value) { /* of the last node */
    Onnx__NodeProto *n = w->last;
    Onnx__StringStringEntryProto **v = om_arena_alloc(&w->a, (n->n_metadata_props + 1) * sizeof *v);
    if (!v) return;
    if (n->n_metadata_props) memcpy(v, n->metadata_props, n->n_metadata_props * sizeof *v);
    Onnx__StringStringEntryProto *e = NEW(w, Onnx__StringStringEntryProto, onnx__string_string_entry_proto__init);
    e->key = om_write_str(w, key);
    e->value = om_write_str(w, value);
    v[n->n_metadata_props++] = e;
    n->metadata_props = v;
}

const char *om_write_node(om_writer *w, const char *domain, const char *op, const char *out, const char *const *in,
                          int n_in) {
    Onnx__NodeProto *n = w->last = NEW(w, Onnx__NodeProto, onnx__node_proto__init);
    n->op_type = om_write_str(w, op);
    if (*domain) n->domain = om_write_str(w, domain);
    n->input = om_arena_alloc(&w->a, ((size_t)n_in + 1) * sizeof *n->input);
    n->output = om_arena_alloc(&w->a, OM_WRITE_OUT * sizeof *n->output);
    if (FAILED(w)) return "";
    for (int i = 0; i < n_in; i++) n->input[n->n_input++] = (char *)in[i];
    while (n->n_input && !*n->input[n->n_input - 1]) n->n_input--;
    n->output[n->n_output++] = (char *)(out ? out : om_write_unique(w, "t"));
    if (w->n && w->n->scope != OM_NONE) {
        const om_scope *s = &w->g->scopes.v[w->n->scope];
        char line[16];
        snprintf(line, sizeof line, "%d", s->line);
        if (s->module && *s->module) write_meta(w, "module", s->module);
        if (s->file) write_meta(w, "file", s->file), write_meta(w, "line", line);
        if (s->region) write_meta(w, "checkpoint", s->region);
    }
    Onnx__NodeProto **slot = OM_PUSH(w->cx, &w->nodes);
    if (slot) *slot = n;
    return n->output[0];
}

const char *om_write_output(om_writer *w, const char *name) { /* one more output of the last node */
    if (FAILED(w) || w->last->n_output == OM_WRITE_OUT) return "";
    return w->last->output[w->last->n_output++] = (char *)name;
}

Onnx__AttributeProto *om_write_attr(om_writer *w, const char *name, Onnx__AttributeProto__AttributeType type) {
    Onnx__AttributeProto *a = NEW(w, Onnx__AttributeProto, onnx__attribute_proto__init), **v;
    a->name = om_write_str(w, name);
    a->has_type = 1;
    a->type = type;
    v = om_arena_alloc(&w->a, (w->last->n_attribute + 1) * sizeof *v);
    if (!v) return a;
    if (w->last->n_attribute) memcpy(v, w->last->attribute, w->last->n_attribute * sizeof *v);
    v[w->last->n_attribute++] = a;
    w->last->attribute = v;
    return a;
}
void om_write_int(om_writer *w, const char *name, int64_t x) {
    Onnx__AttributeProto *a = om_write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INT);
    a->has_i = 1;
    a->i = x;
}
void om_write_float(om_writer *w, const char *name, double x) {
    Onnx__AttributeProto *a = om_write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOAT);
    a->has_f = 1;
    a->f = (float)x;
    if ((double)a->f == x || x != x) return;
    char key[40], text[32]; /* the double in full, for this engine's reader */
    snprintf(key, sizeof key, "f64:%s", name);
    snprintf(text, sizeof text, "%.17g", x);
    write_meta(w, key, text);
}
void om_write_text(om_writer *w, const char *name, const char *x) {
    Onnx__AttributeProto *a = om_write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRING);
    a->has_s = 1;
    a->s.data = (uint8_t *)om_write_str(w, x);
    a->s.len = strlen(x);
}
void om_write_ints(om_writer *w, const char *name, const int64_t *x, int n) {
    Onnx__AttributeProto *a = om_write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INTS);
    a->ints = om_arena_copy(&w->a, x, (size_t)n * sizeof *x);
    a->n_ints = a->ints ? (size_t)n : 0;
}

/* --- constants ----------------------------------------------------------------------------------------- */

Onnx__TensorProto *om_write_tensor(om_writer *w, int dtype, int rank, const int64_t *dim, const void *data) {
    Onnx__TensorProto *t = NEW(w, Onnx__TensorProto, onnx__tensor_proto__init);
    size_t bytes = om_dtype_size(dtype);
    for (int i = 0; i < rank; i++) bytes *= (size_t)dim[i];
    t->has_data_type = 1;
    t->data_type = om_dtype_onnx(dtype);
    t->dims = om_arena_copy(&w->a, dim, (size_t)rank * sizeof *dim);
    t->n_dims = t->dims ? (size_t)rank : 0;
    t->has_raw_data = 1;
    t->raw_data.data = om_arena_copy(&w->a, data, bytes);
    t->raw_data.len = t->raw_data.data ? bytes : 0;
    return t;
}
const char *om_write_init(om_writer *w, const char *name, int dtype, int rank, const int64_t *dim, const void *data) {
    Onnx__TensorProto *t = om_write_tensor(w, dtype, rank, dim, data), **slot = OM_PUSH(w->cx, &w->inits);
    const char *unique = name ? name : om_write_unique(w, "c");
    t->name = (char *)unique;
    if (slot) *slot = t;
    return unique;
}
const char *om_write_int_list(om_writer *w, const int64_t *x, int n) {
    return om_write_init(w, NULL, OM_I64, 1, (int64_t[]){n}, x);
}
const char *om_write_int_scalar(om_writer *w, int64_t x) { return om_write_init(w, NULL, OM_I64, 0, NULL, &x); }
void om_write_number(om_writer *w, int dtype, double f, int64_t i, void *out) { /* f for floats, i for integers */
    om_tensor from = {.data = om_is_float(dtype) ? (void *)&f : (void *)&i,
                      .dtype = om_is_float(dtype) ? OM_F64 : OM_I64,
                      .device = -1},
              to = {.data = out, .dtype = (uint8_t)dtype, .device = -1};
    om_copy(w->cx, &from, &to);
}
const char *om_write_scalar(om_writer *w, int dtype, double x) {
    char buf[8] = {0};
    om_write_number(w, dtype, x, om_is_float(dtype) ? 0 : (int64_t)x, buf);
    return om_write_init(w, NULL, dtype, 0, NULL, buf);
}

/* --- sizes --------------------------------------------------------------------------------------------- */

const char *om_write_dim(om_writer *w, om_dim d) {
    const om_graph *g = w->g;
    int64_t c;
    if (FAILED(w)) return "";
    if (om_dim_const(g, d, &c)) return om_write_int_list(w, &c, 1);
    om_id k = (om_id)~d;
    if (w->expr[k]) return w->expr[k];
    const om_expr *e = &g->exprs.v[k];
    const char *r;
    if (e->kind == OM_DIM_SYM) {
        const om_sym *s = &g->syms.v[e->a];
        const char *input = w->name[g->inputs.v[s->input]];
        if (s->axis < 0) {
            const char *i64 = om_ty(g, g->inputs.v[s->input])->dtype == OM_I64 ? input : EMIT(w, "Cast", NULL, input);
            if (i64 != input) om_write_int(w, "to", om_dtype_onnx(OM_I64));
            r = EMIT(w, "Reshape", NULL, i64, om_write_int_list(w, (int64_t[]){1}, 1));
        } else {
            r = EMIT(w, "Shape", NULL, input);
            om_write_int(w, "start", s->axis);
            om_write_int(w, "end", s->axis + 1);
        }
    } else {
        static const char *const op[] = {[OM_DIM_ADD] = "Add", [OM_DIM_MUL] = "Mul", [OM_DIM_DIV] = "Div",
                                         [OM_DIM_MOD] = "Mod", [OM_DIM_MIN] = "Min", [OM_DIM_MAX] = "Max"};
        if (e->kind == OM_DIM_DIV &&
            /* ONNX truncates: floor(a/b) = (a - a mod b) / b */
            (!om_onnx_nonneg(g, e->a) || !om_onnx_nonneg(g, e->b))) {
            const char *a = om_write_dim(w, e->a), *b = om_write_dim(w, e->b);
            r = EMIT(w, "Div", NULL, EMIT(w, "Sub", NULL, a, EMIT(w, "Mod", NULL, a, b)), b);
        } else {
            const char *a = om_write_dim(w, e->a), *b = om_write_dim(w, e->b);
            r = EMIT(w, op[e->kind], NULL, a, b);
        }
    }
    return w->expr[k] = r;
}

const char *om_write_dims(om_writer *w, const om_dim *d, int n) {
    int64_t c[2 * OM_RANK];
    const char *part[2 * OM_RANK];
    bool known = true;
    for (int i = 0; i < n; i++) known &= om_dim_const(w->g, d[i], &c[i]);
    if (known) return om_write_int_list(w, c, n);
    for (int i = 0; i < n; i++) part[i] = om_write_dim(w, d[i]);
    if (n == 1) return part[0];
    const char *r = om_write_node(w, "", "Concat", NULL, part, n);
    om_write_int(w, "axis", 0);
    return r;
}

/* --- for rules ----------------------------------------------------------------------------------------- */

int om_write_known(const om_writer *w, const char *name, int64_t *out, int max) { /* list of numbers; their count */
    const om_attr *a = in_attr(w, name);
    int n = a && a->kind == OM_ATTR_DIMS ? (int)a->n : 0;
    for (int i = 0; i < n && i < max; i++)
        if (!om_dim_const(w->g, a->dims[i], &out[i])) out[i] = 0;
    return n < max ? n : max;
}
void om_write_refuse(om_writer *w, const char *why) {
    om_fail(w->cx, OM_UNSUPPORTED, "writing ONNX: %s has no standard form: %s", w->n->op->name, why);
}
const char *om_write_like(om_writer *w, double x) { return om_write_scalar(w, in_type(w, 0)->dtype, x); }

void om_write_same(om_writer *w, const char *onnx) { /* all operands, first output, no attributes */
    const char *in[OM_MAX_IN];
    const int n = w->n->n_in;
    if (n > OM_MAX_IN) return om_write_refuse(w, "it has too many operands");
    for (int i = 0; i < n; i++) in[i] = in_name(w, i);
    om_write_node(w, "", onnx, out_name(w, 0), in, n);
}
void om_write_first(om_writer *w, const char *onnx) { EMIT(w, onnx, out_name(w, 0), in_name(w, 0)); }
void om_write_axis(om_writer *w, const char *onnx) {
    om_write_same(w, onnx);
    om_write_int(w, "axis", om_node_int(w->n, "axis", 0));
}
const char *om_write_cast(om_writer *w, const char *x, const char *out, int dtype) {
    const char *r = EMIT(w, "Cast", out, x);
    om_write_int(w, "to", om_dtype_onnx(dtype));
    return r;
}
