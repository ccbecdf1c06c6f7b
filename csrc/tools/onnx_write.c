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
#include "onnx/onnx.h"
#include "ops/strip.h"
#include "ops/window.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

typedef struct writer {
    om_ctx *cx;
    const om_graph *g;
    om_arena a;
    om_strmap taken;
    uint32_t *uses;          /* per value, by forward nodes, outputs and writes */
    const char **name;       /* per value */
    const char **expr;       /* per size expression: its tensor, once made */
    OM_VEC(Onnx__NodeProto *) nodes;
    OM_VEC(Onnx__TensorProto *) inits;
    OM_VEC(Onnx__ValueInfoProto *) ins;
    OM_VEC(Onnx__ValueInfoProto *) outs;
    OM_VEC(Onnx__StringStringEntryProto *) props;
    const om_node *n;        /* the node being written */
    Onnx__NodeProto *last;   /* the node just emitted: write_int & co. add attributes to it */
    unsigned count;
    bool microsoft;          /* com.microsoft operators are in use */
} writer;

enum { WRITE_OUT = OM_MAX_OUT }; /* outputs a node may have */

#define FAILED(w) ((w)->cx->status != OM_OK)

/* Messages are allocated from the arena; after a failure a scratch one takes the writes. */
#define NEW(w, type, init) write_new((w), sizeof(type), (void (*)(void *))(init))
static void *write_new(writer *w, size_t size, void (*init)(void *)) {
    static _Thread_local _Alignas(16) char scratch[1024];
    void *p = om_arena_alloc(&w->a, size);
    if (!p) p = scratch;
    init(p);
    return p;
}
static char *write_str(writer *w, const char *s) {
    char *p = om_arena_str(&w->a, s);
    return p ? p : (char *)"";
}

static const char *write_unique(writer *w, const char *want) {
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

static void write_meta(writer *w, const char *key, const char *value) { /* of the last node */
    Onnx__NodeProto *n = w->last;
    Onnx__StringStringEntryProto **v = om_arena_alloc(&w->a, (n->n_metadata_props + 1) * sizeof *v);
    if (!v) return;
    if (n->n_metadata_props) memcpy(v, n->metadata_props, n->n_metadata_props * sizeof *v);
    Onnx__StringStringEntryProto *e = NEW(w, Onnx__StringStringEntryProto, onnx__string_string_entry_proto__init);
    e->key = write_str(w, key);
    e->value = write_str(w, value);
    v[n->n_metadata_props++] = e;
    n->metadata_props = v;
}

/* Adds a node with up to four inputs (NULL ends the list, "" leaves one out); returns its first output. */
static const char *write_node(writer *w, const char *domain, const char *op, const char *out, const char *const *in,
                              int n_in) {
    Onnx__NodeProto *n = w->last = NEW(w, Onnx__NodeProto, onnx__node_proto__init);
    n->op_type = write_str(w, op);
    if (*domain) n->domain = write_str(w, domain);
    n->input = om_arena_alloc(&w->a, ((size_t)n_in + 1) * sizeof *n->input);
    n->output = om_arena_alloc(&w->a, WRITE_OUT * sizeof *n->output);
    if (FAILED(w)) return "";
    for (int i = 0; i < n_in; i++) n->input[n->n_input++] = (char *)in[i];
    while (n->n_input && !*n->input[n->n_input - 1]) n->n_input--;
    n->output[n->n_output++] = (char *)(out ? out : write_unique(w, "t"));
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
#define EMIT(w, op, out, ...)                                       \
    write_node((w), "", (op), (out), (const char *[]){__VA_ARGS__}, \
               (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)))

static const char *write_output(writer *w, const char *name) { /* one more output of the last node */
    if (FAILED(w) || w->last->n_output == WRITE_OUT) return "";
    return w->last->output[w->last->n_output++] = (char *)name;
}

static Onnx__AttributeProto *write_attr(writer *w, const char *name, Onnx__AttributeProto__AttributeType type) {
    Onnx__AttributeProto *a = NEW(w, Onnx__AttributeProto, onnx__attribute_proto__init), **v;
    a->name = write_str(w, name);
    a->has_type = 1;
    a->type = type;
    v = om_arena_alloc(&w->a, (w->last->n_attribute + 1) * sizeof *v);
    if (!v) return a;
    if (w->last->n_attribute) memcpy(v, w->last->attribute, w->last->n_attribute * sizeof *v);
    v[w->last->n_attribute++] = a;
    w->last->attribute = v;
    return a;
}
static void write_int(writer *w, const char *name, int64_t x) {
    Onnx__AttributeProto *a = write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INT);
    a->has_i = 1;
    a->i = x;
}
static void write_float(writer *w, const char *name, double x) {
    Onnx__AttributeProto *a = write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOAT);
    a->has_f = 1;
    a->f = (float)x;
    if ((double)a->f == x || x != x) return;
    char key[40], text[32]; /* the double in full, for this engine's reader */
    snprintf(key, sizeof key, "f64:%s", name);
    snprintf(text, sizeof text, "%.17g", x);
    write_meta(w, key, text);
}
static void write_text(writer *w, const char *name, const char *x) {
    Onnx__AttributeProto *a = write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRING);
    a->has_s = 1;
    a->s.data = (uint8_t *)write_str(w, x);
    a->s.len = strlen(x);
}
static void write_ints(writer *w, const char *name, const int64_t *x, int n) {
    Onnx__AttributeProto *a = write_attr(w, name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INTS);
    a->ints = om_arena_copy(&w->a, x, (size_t)n * sizeof *x);
    a->n_ints = a->ints ? (size_t)n : 0;
}

/* --- constants ----------------------------------------------------------------------------------------- */

static Onnx__TensorProto *write_tensor(writer *w, int dtype, int rank, const int64_t *dim, const void *data) {
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
static const char *write_init(writer *w, const char *name, int dtype, int rank, const int64_t *dim, const void *data) {
    Onnx__TensorProto *t = write_tensor(w, dtype, rank, dim, data), **slot = OM_PUSH(w->cx, &w->inits);
    const char *unique = name ? name : write_unique(w, "c");
    t->name = (char *)unique;
    if (slot) *slot = t;
    return unique;
}
static const char *write_int_list(writer *w, const int64_t *x, int n) {
    return write_init(w, NULL, OM_I64, 1, (int64_t[]){n}, x);
}
static const char *write_int_scalar(writer *w, int64_t x) { return write_init(w, NULL, OM_I64, 0, NULL, &x); }
static void write_number(writer *w, int dtype, double f, int64_t i, void *out) { /* f for floats, i for integers */
    om_tensor from = {.data = om_is_float(dtype) ? (void *)&f : (void *)&i,
                      .dtype = om_is_float(dtype) ? OM_F64 : OM_I64,
                      .device = -1},
              to = {.data = out, .dtype = (uint8_t)dtype, .device = -1};
    om_copy(w->cx, &from, &to);
}
static const char *write_scalar(writer *w, int dtype, double x) {
    char buf[8] = {0};
    write_number(w, dtype, x, om_is_float(dtype) ? 0 : (int64_t)x, buf);
    return write_init(w, NULL, dtype, 0, NULL, buf);
}

/* --- sizes --------------------------------------------------------------------------------------------- */

/* A size as an int64 tensor of shape [1]. */
static const char *write_dim(writer *w, om_dim d) {
    const om_graph *g = w->g;
    int64_t c;
    if (FAILED(w)) return "";
    if (om_dim_const(g, d, &c)) return write_int_list(w, &c, 1);
    om_id k = (om_id)~d;
    if (w->expr[k]) return w->expr[k];
    const om_expr *e = &g->exprs.v[k];
    const char *r;
    if (e->kind == OM_DIM_SYM) {
        const om_sym *s = &g->syms.v[e->a];
        const char *input = w->name[g->inputs.v[s->input]];
        if (s->axis < 0) {
            const char *i64 = om_ty(g, g->inputs.v[s->input])->dtype == OM_I64 ? input : EMIT(w, "Cast", NULL, input);
            if (i64 != input) write_int(w, "to", om_dtype_onnx(OM_I64));
            r = EMIT(w, "Reshape", NULL, i64, write_int_list(w, (int64_t[]){1}, 1));
        } else {
            r = EMIT(w, "Shape", NULL, input);
            write_int(w, "start", s->axis);
            write_int(w, "end", s->axis + 1);
        }
    } else {
        static const char *const op[] = {[OM_DIM_ADD] = "Add", [OM_DIM_MUL] = "Mul", [OM_DIM_DIV] = "Div",
                                         [OM_DIM_MOD] = "Mod", [OM_DIM_MIN] = "Min", [OM_DIM_MAX] = "Max"};
        if (e->kind == OM_DIM_DIV &&
            /* ONNX truncates: floor(a/b) = (a - a mod b) / b */
            (!om_onnx_nonneg(g, e->a) || !om_onnx_nonneg(g, e->b))) {
            const char *a = write_dim(w, e->a), *b = write_dim(w, e->b);
            r = EMIT(w, "Div", NULL, EMIT(w, "Sub", NULL, a, EMIT(w, "Mod", NULL, a, b)), b);
        } else {
            const char *a = write_dim(w, e->a), *b = write_dim(w, e->b);
            r = EMIT(w, op[e->kind], NULL, a, b);
        }
    }
    return w->expr[k] = r;
}

static const char *write_dims(writer *w, const om_dim *d, int n) {
    int64_t c[2 * OM_RANK];
    const char *part[2 * OM_RANK];
    bool known = true;
    for (int i = 0; i < n; i++) known &= om_dim_const(w->g, d[i], &c[i]);
    if (known) return write_int_list(w, c, n);
    for (int i = 0; i < n; i++) part[i] = write_dim(w, d[i]);
    if (n == 1) return part[0];
    const char *r = write_node(w, "", "Concat", NULL, part, n);
    write_int(w, "axis", 0);
    return r;
}

/* --- what a rule reads --------------------------------------------------------------------------------- */

static const char *in_name(const writer *w, int i) {
    om_id v = i < w->n->n_in ? om_ins(w->g, w->n)[i] : OM_NONE;
    return v == OM_NONE ? "" : w->name[v];
}
static const om_type *in_type(const writer *w, int i) { return om_ty(w->g, om_ins(w->g, w->n)[i]); }
static bool in_given(const writer *w, int i) { return i < w->n->n_in && om_ins(w->g, w->n)[i] != OM_NONE; }
static const char *out_name(const writer *w, int k) { return w->name[w->n->out + (om_id)k]; }
static bool out_used(const writer *w, int k) { return w->uses[w->n->out + (om_id)k] > 0; }
static const om_type *out_type(const writer *w, int k) { return om_ty(w->g, w->n->out + (om_id)k); }
static const om_attr *attr_dims(const writer *w, const char *name) {
    return om_attr_get(w->n->attr, w->n->n_attr, name);
}
static int attr_known(const writer *w, const char *name, int64_t *out, int max) { /* list of numbers; their count */
    const om_attr *a = attr_dims(w, name);
    int n = a && a->kind == OM_ATTR_DIMS ? (int)a->n : 0;
    for (int i = 0; i < n && i < max; i++)
        if (!om_dim_const(w->g, a->dims[i], &out[i])) out[i] = 0;
    return n < max ? n : max;
}
static om_dim attr_bound(const writer *w, const char *name, om_dim dflt) {
    const om_attr *a = attr_dims(w, name);
    return !a                                     ? dflt
           : a->kind == OM_ATTR_DIMS && a->n == 1 ? a->dims[0]
           : a->kind == OM_ATTR_INT && a->i >= 0  ? a->i
                                                  : dflt;
}
static void write_refuse(writer *w, const char *why) {
    om_fail(w->cx, OM_UNSUPPORTED, "writing ONNX: %s has no standard form: %s", w->n->op->name, why);
}
static const char *one_like(writer *w, double x) { return write_scalar(w, in_type(w, 0)->dtype, x); }

/* --- rules --------------------------------------------------------------------------------------------- */

typedef struct write_row { const om_op *op; const char *onnx; void (*rule)(writer *w, const char *onnx); } write_row;

static void rule_same(writer *w, const char *onnx) { /* all operands, first output, no attributes */
    const char *in[OM_MAX_IN];
    const int n = w->n->n_in;
    if (n > OM_MAX_IN) return write_refuse(w, "it has too many operands");
    for (int i = 0; i < n; i++) in[i] = in_name(w, i);
    write_node(w, "", onnx, out_name(w, 0), in, n);
}
static void rule_first(writer *w, const char *onnx) { EMIT(w, onnx, out_name(w, 0), in_name(w, 0)); }
static void rule_axis(writer *w, const char *onnx) {
    rule_same(w, onnx);
    write_int(w, "axis", om_node_int(w->n, "axis", 0));
}
static void rule_shape(writer *w, const char *onnx) { /* reshape, expand */
    const om_type *t = out_type(w, 0);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_dims(w, t->dim, t->rank));
    if (!strcmp(onnx, "Reshape")) write_int(w, "allowzero", 1);
}
static void rule_permute(writer *w, const char *onnx) {
    int64_t p[OM_RANK];
    int n = attr_known(w, "perm", p, OM_RANK);
    rule_first(w, onnx);
    write_ints(w, "perm", p, n);
}
static void rule_slice(writer *w, const char *onnx) {
    int64_t axis = om_node_int(w->n, "axis", 0), step = om_node_int(w->n, "step", 1);
    om_dim start = attr_bound(w, "start", 0), end = attr_bound(w, "end", in_type(w, 0)->dim[axis]);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_dim(w, start), write_dim(w, end), write_int_list(w, &axis, 1),
         write_int_list(w, &step, 1));
}
static void rule_flip(writer *w, const char *onnx) {
    int64_t axes[OM_RANK], s[OM_RANK], e[OM_RANK];
    int n = attr_known(w, "axes", axes, OM_RANK);
    for (int i = 0; i < n; i++) s[i] = -1, e[i] = INT64_MIN + 1;
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_int_list(w, s, n), write_int_list(w, e, n),
         write_int_list(w, axes, n), write_int_list(w, s, n));
}
static void rule_pad(writer *w, const char *onnx) {
    om_dim pads[2 * OM_RANK] = {0};
    int rank = in_type(w, 0)->rank;
    const om_attr *lo = attr_dims(w, "lo"), *hi = attr_dims(w, "hi");
    for (int i = 0; i < rank; i++) {
        if (lo && i < (int)lo->n) pads[i] = lo->dims[i];
        if (hi && i < (int)hi->n) pads[rank + i] = hi->dims[i];
    }
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_dims(w, pads, 2 * rank),
         one_like(w, om_node_float(w->n, "value", 0)));
}
static void rule_trilu(writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_int_scalar(w, om_node_int(w->n, "k", 0)));
    write_int(w, "upper", om_node_int(w->n, "upper", 0));
}
static void rule_cast(writer *w, const char *onnx) {
    rule_first(w, onnx);
    write_int(w, "to", om_dtype_onnx(out_type(w, 0)->dtype));
}
static const char *write_cast(writer *w, const char *x, const char *out, int dtype) {
    const char *r = EMIT(w, "Cast", out, x);
    write_int(w, "to", om_dtype_onnx(dtype));
    return r;
}
static const char *write_size_scalar(writer *w, om_dim d) { return EMIT(w, "Squeeze", NULL, write_dim(w, d)); }

/* start + step * Range(n); everything in int64 unless an attribute is a float */
static void rule_iota(writer *w, const char *onnx) {
    const om_attr *start = attr_dims(w, "start"), *step = attr_dims(w, "step");
    const om_type *t = out_type(w, 0);
    bool real = (start && start->kind == OM_ATTR_FLOAT) || (step && step->kind == OM_ATTR_FLOAT);
    int work = !real ? OM_I64 : t->dtype == OM_F64 ? OM_F64 : OM_F32;
    const char *r = EMIT(w, onnx, NULL, write_int_scalar(w, 0), write_size_scalar(w, t->dim[0]),
                         write_int_scalar(w, 1));
    if (real) r = write_cast(w, r, NULL, work);
    double s = om_node_float(w->n, "step", 1);
    if (step && s != 1) r = EMIT(w, "Mul", NULL, r, write_scalar(w, work, s));
    if (start && start->kind == OM_ATTR_DIMS) r = EMIT(w, "Add", NULL, r, write_dim(w, attr_bound(w, "start", 0)));
    else if (start) r = EMIT(w, "Add", NULL, r, write_scalar(w, work, om_node_float(w->n, "start", 0)));
    write_cast(w, r, out_name(w, 0), t->dtype);
}
static void rule_fill(writer *w, const char *onnx) {
    const om_type *t = out_type(w, 0);
    const om_attr *v = attr_dims(w, "value");
    if (v && v->kind == OM_ATTR_DIMS) {
        EMIT(w, "Expand", out_name(w, 0),
             write_cast(w, write_size_scalar(w, attr_bound(w, "value", 0)), NULL, t->dtype),
             write_dims(w, t->dim, t->rank));
        return;
    }
    char buf[8] = {0};
    double x = om_node_float(w->n, "value", 0);
    write_number(w, t->dtype, x, v && v->kind == OM_ATTR_INT ? v->i : om_is_float(t->dtype) ? 0 : (int64_t)x, buf);
    EMIT(w, onnx, out_name(w, 0), write_dims(w, t->dim, t->rank));
    write_attr(w, "value", ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR)->t = write_tensor(w, t->dtype, 1,
                                                                                            (int64_t[]){1}, buf);
}

static void rule_expm1(writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Exp", NULL, in_name(w, 0)), one_like(w, 1));
}
static void rule_log1p(writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Add", NULL, in_name(w, 0), one_like(w, 1)));
}
static void rule_rsqrt(writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Sqrt", NULL, in_name(w, 0)));
}
static void rule_silu(writer *w, const char *onnx) { EMIT(w, onnx, out_name(w, 0), in_name(w, 0),
                                                          EMIT(w, "Sigmoid", NULL, in_name(w, 0))); }
static void rule_gelu(writer *w, const char *onnx) {
    rule_first(w, onnx);
    write_text(w, "approximate", w->n->op == &om_op_gelu_tanh ? "tanh" : "none");
}
static void rule_trunc(writer *w, const char *onnx) {
    const char *x = in_name(w, 0);
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Less", NULL, x, one_like(w, 0)), EMIT(w, "Ceil", NULL, x),
         EMIT(w, "Floor", NULL, x));
}
static void rule_floor_div(writer *w, const char *onnx) {
    const char *a = in_name(w, 0), *b = in_name(w, 1);
    if (om_is_float(in_type(w, 0)->dtype)) EMIT(w, "Floor", out_name(w, 0), EMIT(w, onnx, NULL, a, b));
    else EMIT(w, onnx, out_name(w, 0), EMIT(w, "Sub", NULL, a, EMIT(w, "Mod", NULL, a, b)), b);
}
static void rule_mod(writer *w, const char *onnx) {
    const char *a = in_name(w, 0), *b = in_name(w, 1);
    if (!om_is_float(in_type(w, 0)->dtype)) EMIT(w, onnx, out_name(w, 0), a, b);
    else EMIT(w, "Sub", out_name(w, 0), a, EMIT(w, "Mul", NULL, b, EMIT(w, "Floor", NULL, EMIT(w, "Div", NULL, a, b))));
}
static void rule_fmod(writer *w, const char *onnx) {
    rule_same(w, onnx);
    write_int(w, "fmod", 1);
}
static void rule_ne(writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), EMIT(w, "Equal", NULL, in_name(w, 0), in_name(w, 1)));
}
static void rule_logic(writer *w, const char *onnx) { /* bool: And; integers: BitwiseAnd */
    char name[32];
    snprintf(name, sizeof name, "%s%s", in_type(w, 0)->dtype == OM_BOOL ? "" : "Bitwise", onnx);
    rule_same(w, name);
}

static void rule_reduce(writer *w, const char *onnx) {
    const om_attr *a = attr_dims(w, "axes");
    int rank = in_type(w, 0)->rank, n = 0;
    int64_t axes[OM_RANK];
    uint32_t mask = a && a->kind == OM_ATTR_DIMS ? 0 : (1u << rank) - 1; /* no list: all axes */
    for (uint32_t i = 0; a && a->kind == OM_ATTR_DIMS && i < a->n; i++) mask |= 1u << a->dims[i];
    for (int i = 0; i < rank; i++)
        if (mask >> i & 1) axes[n++] = i;
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_int_list(w, axes, n));
    write_int(w, "keepdims", om_node_int(w->n, "keepdims", 0) != 0);
    write_int(w, "noop_with_empty_axes", 1);
}
static void rule_arg(writer *w, const char *onnx) {
    rule_first(w, onnx);
    write_int(w, "axis", om_node_int(w->n, "axis", 0));
    write_int(w, "keepdims", om_node_int(w->n, "keepdims", 0));
}
static void rule_topk(writer *w, const char *onnx) {
    const int axis = (int)om_node_int(w->n, "axis", 0);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_dim(w, out_type(w, 0)->dim[axis]));
    write_output(w, out_name(w, 1));
    write_int(w, "axis", axis);
    write_int(w, "largest", om_node_int(w->n, "largest", 1));
}
static void rule_cumsum(writer *w, const char *onnx) {
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_int_scalar(w, om_node_int(w->n, "axis", 0)));
    write_int(w, "exclusive", om_node_int(w->n, "exclusive", 0));
    write_int(w, "reverse", om_node_int(w->n, "reverse", 0));
}

/* ONNX keeps the normalised axes of the statistics with size 1 */
static void write_statistic(writer *w, const char *x, int k, int axis, int rank) {
    int64_t axes[OM_RANK];
    for (int i = axis; i < rank; i++) axes[i - axis] = i;
    EMIT(w, "Squeeze", out_name(w, k), x, write_int_list(w, axes, rank - axis));
}
static const char *write_ones(writer *w, const om_type *t, int axis) {
    return EMIT(w, "Expand", NULL, write_scalar(w, t->dtype, 1), write_dims(w, t->dim + axis, t->rank - axis));
}
static void rule_layer_norm(writer *w, const char *onnx) {
    const om_type *t = in_type(w, 0);
    int axis = (int)om_node_int(w->n, "axis", 0);
    const char *scale = in_given(w, 1) ? in_name(w, 1) : write_ones(w, t, axis);
    const bool as = out_type(w, 0)->dtype != t->dtype; /* by a cast of its own */
    const char *y = EMIT(w, onnx, as ? NULL : out_name(w, 0), in_name(w, 0), scale, in_name(w, 2));
    write_int(w, "axis", axis);
    write_float(w, "epsilon", om_node_float(w->n, "eps", 1e-5));
    const bool mean = out_used(w, 1), rstd = out_used(w, 2);
    const char *m = mean || rstd ? write_output(w, write_unique(w, "mean")) : NULL;
    const char *r = rstd ? write_output(w, write_unique(w, "rstd")) : NULL;
    if (mean) write_statistic(w, m, 1, axis, t->rank);
    if (rstd) write_statistic(w, r, 2, axis, t->rank);
    if (as) write_cast(w, y, out_name(w, 0), out_type(w, 0)->dtype);
}
static void rule_rms_norm(writer *w, const char *onnx) {
    const om_type *t = in_type(w, 0);
    int axis = (int)om_node_int(w->n, "axis", 0);
    const char *x = in_name(w, 0);
    const bool as = out_type(w, 0)->dtype != t->dtype;
    const char *scale = in_given(w, 1) ? in_name(w, 1) : write_ones(w, t, axis);
    const char *y = EMIT(w, onnx, as ? NULL : out_name(w, 0), x, scale);
    write_int(w, "axis", axis);
    write_float(w, "epsilon", om_node_float(w->n, "eps", 1e-5));
    if (as) write_cast(w, y, out_name(w, 0), out_type(w, 0)->dtype);
    if (!out_used(w, 1)) return;
    int64_t axes[OM_RANK];
    for (int i = axis; i < t->rank; i++) axes[i - axis] = i;
    int work = out_type(w, 1)->dtype;
    const char *wide = work == t->dtype ? x : write_cast(w, x, NULL, work);
    const char *ms = EMIT(w, "ReduceMean", NULL, EMIT(w, "Mul", NULL, wide, wide),
                          write_int_list(w, axes, t->rank - axis));
    write_int(w, "keepdims", 0);
    EMIT(w, "Reciprocal", out_name(w, 1),
         EMIT(w, "Sqrt", NULL, EMIT(w, "Add", NULL, ms, write_scalar(w, work, om_node_float(w->n, "eps", 1e-5)))));
}

/* Per-channel vectors as (c, 1, ...). */
static const char *write_channel(writer *w, const char *v, int rank) {
    int64_t axes[OM_RANK];
    for (int i = 1; i < rank - 1; i++) axes[i - 1] = i;
    return rank > 2 ? EMIT(w, "Unsqueeze", NULL, v, write_int_list(w, axes, rank - 2)) : v;
}
/* What is written out in several nodes needs one type; the engine's operators convert. */
static bool write_mixed(writer *w, int first, int last) {
    for (int i = first; i <= last; i++)
        if (in_given(w, i) && in_type(w, i)->dtype != in_type(w, 0)->dtype)
            return write_refuse(w, "its operands have several types"), true;
    return false;
}

static void rule_batch_norm(writer *w, const char *onnx) {
    (void)onnx;
    const om_type *t = in_type(w, 0);
    if (write_mixed(w, 1, 4)) return;
    bool training = om_node_int(w->n, "training", 0) != 0;
    double eps = om_node_float(w->n, "eps", 1e-5), momentum = om_node_float(w->n, "momentum", 0.1);
    const char *x = in_name(w, 0), *mean = in_name(w, 3), *var = in_name(w, 4);
    if (out_used(w, 3) || out_used(w, 4)) {
        write_refuse(w, "its saved statistics are read");
        return;
    }
    if (t->dtype != OM_F32 && t->dtype != OM_F64) {
        write_refuse(w, "only float32 and float64");
        return;
    }
    int64_t axes[OM_RANK];
    int n = 0;
    for (int i = 0; i < t->rank; i++)
        if (i != 1) axes[n++] = i;
    if (training) {
        const char *list = write_int_list(w, axes, n);
        mean = EMIT(w, "ReduceMean", NULL, x, list);
        write_int(w, "keepdims", 0);
        const char *d = EMIT(w, "Sub", NULL, x, write_channel(w, mean, t->rank));
        var = EMIT(w, "ReduceMean", NULL, EMIT(w, "Mul", NULL, d, d), list);
        write_int(w, "keepdims", 0);
    }
    const char *d = EMIT(w, "Sub", NULL, x, write_channel(w, mean, t->rank));
    const char *sd = EMIT(w, "Sqrt", NULL, EMIT(w, "Add", NULL, var, write_scalar(w, t->dtype, eps)));
    const char *y = EMIT(w, "Div", in_given(w, 1) || in_given(w, 2) ? NULL : out_name(w, 0), d,
                         write_channel(w, sd, t->rank));
    if (in_given(w, 1))
        y = EMIT(w, "Mul", in_given(w, 2) ? NULL : out_name(w, 0), y, write_channel(w, in_name(w, 1), t->rank));
    if (in_given(w, 2)) EMIT(w, "Add", out_name(w, 0), y, write_channel(w, in_name(w, 2), t->rank));
    if (out_used(w, 1) && !training) EMIT(w, "Identity", out_name(w, 1), in_name(w, 3));
    if (out_used(w, 2) && !training) EMIT(w, "Identity", out_name(w, 2), in_name(w, 4));
    if (!training || (!out_used(w, 1) && !out_used(w, 2))) return;
    const char *keep = write_scalar(w, t->dtype, 1 - momentum), *take = write_scalar(w, t->dtype, momentum);
    if (out_used(w, 1))
        EMIT(w, "Add", out_name(w, 1), EMIT(w, "Mul", NULL, in_name(w, 3), keep), EMIT(w, "Mul", NULL, mean, take));
    if (!out_used(w, 2)) return;
    /* the running variance takes the unbiased one: var * count / (count - 1), count = elements per channel */
    const char *count = write_dim(w, t->dim[0]);
    for (int i = 2; i < t->rank; i++) count = EMIT(w, "Mul", NULL, count, write_dim(w, t->dim[i]));
    count = write_cast(w, count, NULL, t->dtype);
    const char *unbiased = EMIT(w, "Mul", NULL, var,
                                EMIT(w, "Div", NULL, count, EMIT(w, "Sub", NULL, count, write_scalar(w, t->dtype, 1))));
    EMIT(w, "Add", out_name(w, 2), EMIT(w, "Mul", NULL, in_name(w, 4), keep), EMIT(w, "Mul", NULL, unbiased, take));
}

static void rule_matmul(writer *w, const char *onnx) {
    const char *y = EMIT(w, onnx, in_given(w, 2) ? NULL : out_name(w, 0), in_name(w, 0), in_name(w, 1));
    if (in_given(w, 2)) EMIT(w, "Add", out_name(w, 0), y, in_name(w, 2));
}
/* ai.onnx Attention has rank 4: missing leading axes are added and taken away. */
static void rule_attention(writer *w, const char *onnx) {
    const char *in[4];
    int lead = 4 - in_type(w, 0)->rank;
    if (out_used(w, 1) || lead < 0) {
        write_refuse(w, lead < 0 ? "more than two batch axes" : "its log-sum-exp is read");
        return;
    }
    int64_t axes[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) {
        in[i] = in_name(w, i);
        if (lead && *in[i] && (i < 3 || in_type(w, i)->rank > 2))
            in[i] = EMIT(w, "Unsqueeze", NULL, in[i], write_int_list(w, axes, 4 - in_type(w, i)->rank));
    }
    bool turn = om_node_int(w->n, "seq_first", 0);
    const char *y = write_node(w, "", onnx, lead || turn ? NULL : out_name(w, 0), in, 4);
    write_int(w, "is_causal", om_node_int(w->n, "causal", 0));
    write_float(w, "scale", om_node_float(w->n, "scale", 1));
    if (turn) {
        y = EMIT(w, "Transpose", lead ? NULL : out_name(w, 0), y);
        write_ints(w, "perm", (int64_t[]){0, 2, 1, 3}, 4);
    }
    if (lead) EMIT(w, "Squeeze", out_name(w, 0), y, write_int_list(w, axes, lead));
}
static void rule_scatter(writer *w, const char *onnx) {
    rule_same(w, onnx);
    if (w->n->op == &om_op_scatter_elements) write_int(w, "axis", om_node_int(w->n, "axis", 0));
    static const char *const how[] = {"none", "add", "max", "min"};
    write_text(w, "reduction", how[om_node_int(w->n, "reduce", 0)]);
}

static void rule_cross_entropy(writer *w, const char *onnx) {
    static const char *const how[] = {"none", "mean", "sum"};
    int64_t red = om_node_int(w->n, "reduction", 1), ignore = om_node_int(w->n, "ignore_index", -100);
    double eps = om_node_float(w->n, "label_smoothing", 0);
    const int dtype = out_type(w, 0)->dtype;
    const bool wide = dtype != in_type(w, 0)->dtype;
    const char *x = in_name(w, 0), *labels = in_name(w, 1), *weight = in_name(w, 2);
    if (red < 0 || red > 2 || out_used(w, 1) || out_used(w, 2)) {
        write_refuse(w, "its saved statistics are read");
        return;
    }
    if (wide) x = write_cast(w, x, NULL, dtype);
    if (eps == 0) {
        EMIT(w, onnx, out_name(w, 0), x, labels, weight);
        write_text(w, "reduction", how[red]);
        write_int(w, "ignore_index", ignore);
        return;
    }
    if (!wide && write_mixed(w, 2, 2)) return;
    /* (1-e) w[y] (-log p[y]) + e/C sum_c w[c] (-log p[c]), nothing where y is ignored; mean divides by the sum of
     * w[y] */
    const char *logp = EMIT(w, "LogSoftmax", NULL, x);
    write_int(w, "axis", 1);
    const char *nll = EMIT(w, "NegativeLogLikelihoodLoss", NULL, logp, labels, weight);
    write_text(w, "reduction", "none");
    write_int(w, "ignore_index", ignore);
    const char *all = EMIT(w, "Neg", NULL, *weight ? EMIT(w, "Mul", NULL, logp, weight) : logp);
    all = EMIT(w, "ReduceSum", NULL, all, write_int_list(w, (int64_t[]){1}, 1));
    write_int(w, "keepdims", 0);
    const char *classes = write_cast(w, write_dim(w, in_type(w, 0)->dim[1]), NULL, dtype);
    const char *lab = in_type(w, 1)->dtype == OM_I64 ? labels : write_cast(w, labels, NULL, OM_I64);
    const char *ignored = EMIT(w, "Equal", NULL, lab, write_int_scalar(w, ignore)), *zero = write_scalar(w, dtype, 0);
    const char *smooth = EMIT(w, "Where", NULL, ignored, zero,
                              EMIT(w, "Div", NULL, EMIT(w, "Mul", NULL, all, write_scalar(w, dtype, eps)), classes));
    const char *loss = EMIT(w, "Add", red ? NULL : out_name(w, 0),
                            EMIT(w, "Mul", NULL, nll, write_scalar(w, dtype, 1 - eps)), smooth);
    if (red == 0) return;
    loss = EMIT(w, "ReduceSum", red == 2 ? out_name(w, 0) : NULL, loss);
    write_int(w, "keepdims", 0);
    if (red == 2) return;
    const char *count = write_scalar(w, dtype, 1);
    if (*weight) count = EMIT(w, "Gather", NULL, weight, EMIT(w, "Where", NULL, ignored, write_int_scalar(w, 0), lab));
    count = EMIT(w, "ReduceSum", NULL, EMIT(w, "Where", NULL, ignored, zero, count));
    write_int(w, "keepdims", 0);
    EMIT(w, "Div", out_name(w, 0), loss, count);
}

/* pad: begins, then ends, or one number per axis for both */
static void write_pads(writer *w, int spatial) {
    int64_t v[2 * OM_WINDOW_AXES] = {0};
    const int n = attr_known(w, "pad", v, 2 * OM_WINDOW_AXES);
    if (n < 2 * spatial)
        for (int i = 2 * spatial - 1; i >= 0; i--) v[i] = v[n > 1 ? i % spatial : 0];
    write_ints(w, "pads", v, 2 * spatial);
}
static void write_window(writer *w, const char *const (*names)[2], int n_names, int spatial) {
    for (int k = 0; k < n_names; k++) {
        int64_t v[OM_WINDOW_AXES];
        int n = attr_known(w, names[k][0], v, OM_WINDOW_AXES);
        if (n == 0) continue;
        for (int i = n; i < spatial; i++) v[i] = v[0];
        if (!strcmp(names[k][1], "pads")) write_pads(w, spatial);
        else write_ints(w, names[k][1], v, spatial);
    }
}
static void rule_conv(writer *w, const char *onnx) {
    static const char *const names[][2] = {{"stride", "strides"}, {"pad", "pads"}, {"dilation", "dilations"}};
    rule_same(w, onnx);
    write_window(w, names, 3, in_type(w, 0)->rank - 2);
    write_int(w, "group", om_node_int(w->n, "groups", 1));
}
static void rule_conv_transpose(writer *w, const char *onnx) {
    static const char *const names[][2] = {
        {"stride", "strides"}, {"dilation", "dilations"}, {"out_pad", "output_padding"}};
    rule_same(w, onnx);
    write_window(w, names, 3, in_type(w, 0)->rank - 2);
    write_pads(w, in_type(w, 0)->rank - 2);
    write_int(w, "group", om_node_int(w->n, "groups", 1));
}
static void rule_col2im(writer *w, const char *onnx) {
    static const char *const names[][2] = {{"stride", "strides"}, {"dilation", "dilations"}};
    const om_type *t = out_type(w, 0);
    int64_t kernel[3];
    const int n = attr_known(w, "kernel", kernel, 3);
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), write_dims(w, t->dim + 2, n), write_int_list(w, kernel, n));
    write_window(w, names, 2, n);
    write_pads(w, n);
}
static void rule_pool(writer *w, const char *onnx) {
    static const char *const names[][2] = {
        {"kernel", "kernel_shape"}, {"stride", "strides"}, {"pad", "pads"}, {"dilation", "dilations"}};
    if (w->n->n_out > 1 && out_used(w, 1)) {
        write_refuse(w, "its indices are read");
        return;
    }
    rule_first(w, onnx);
    write_window(w, names, 4, in_type(w, 0)->rank - 2);
    write_int(w, "ceil_mode", om_node_int(w->n, "ceil", 0));
    if (w->n->op == &om_op_avg_pool) write_int(w, "count_include_pad", om_node_int(w->n, "count_include_pad", 0));
}
static void rule_adaptive(writer *w, const char *onnx) { /* an average pool where the sizes divide */
    int64_t size[3] = {1, 1, 1}, kernel[3];
    const om_type *t = in_type(w, 0);
    int n = t->rank - 2;
    attr_known(w, "size", size, 3);
    bool global = true;
    for (int i = 0; i < n; i++) global &= size[i] == 1;
    if (global) {
        rule_first(w, "GlobalAveragePool");
        return;
    }
    for (int i = 0; i < n; i++) {
        int64_t d;
        if (!om_dim_const(w->g, t->dim[2 + i], &d) || size[i] < 1 || d % size[i]) {
            write_refuse(w, "the output's sizes do not divide the input's");
            return;
        }
        kernel[i] = d / size[i];
    }
    rule_first(w, onnx);
    write_ints(w, "kernel_shape", kernel, n);
    write_ints(w, "strides", kernel, n);
}

/* --- com.microsoft optimizer operators (onnx/optim.c reads them) ------------------------------------------ */

static const char *write_microsoft(writer *w, const char *op, const char *out, const char *const *in, int n_in) {
    w->microsoft = true;
    return write_node(w, "com.microsoft", op, out, in, n_in);
}
/* A float attribute with its default where the node has none. */
static void write_setting(writer *w, const char *name, double dflt) {
    write_float(w, name, om_node_float(w->n, name, dflt));
}

/* adamw_step, sgd_step: operands are gathered into sequences, results taken out of them. */
static void rule_sequences(writer *w, const char *onnx) {
    const bool adam = om_is(w->n, adamw_step);
    const int n_scalar = adam ? 3 : 2, n_seq = adam ? 4 : 2, n_kind = adam ? 3 : 1,
              groups = (w->n->n_in - n_scalar) / n_seq;
    const char *part[WRITE_OUT], *in[7], *result[3];
    int n_in = 0;
    for (int i = 0; i < n_scalar - 1; i++) in[n_in++] = in_name(w, i);
    for (int j = 0; j < n_seq; j++) {
        for (int k = 0; k < groups; k++) part[k] = in_name(w, n_scalar + k * n_seq + j);
        in[n_in++] = write_node(w, "", "SequenceConstruct", NULL, part, groups);
    }
    in[n_in++] = in_name(w, n_scalar - 1);
    write_microsoft(w, onnx, NULL, in, n_in);
    for (int j = 0; j < n_kind; j++) result[j] = write_output(w, write_unique(w, "t"));
    if (adam) {
        write_setting(w, "alpha", 0.9), write_setting(w, "beta", 0.999), write_setting(w, "epsilon", 1e-8),
            write_setting(w, "weight_decay", 1e-2);
        write_int(w, "adam_mode", om_node_int(w->n, "adam_mode", 0)),
            write_int(w, "correct_bias", om_node_int(w->n, "correct_bias", 1));
    }
    for (int k = 0; k < groups; k++)
        for (int j = 0; j < n_kind; j++)
            EMIT(w, "SequenceAt", out_name(w, k * n_kind + j), result[j], write_int_scalar(w, k));
}

static void rule_lamb(writer *w, const char *onnx) {
    static const struct {
        const char *name;
        double dflt;
    } each[] = {{"alpha", 0.9}, {"beta", 0.999}, {"lambda", 0}, {"epsilon", 1e-6}, {"max_norm_clip", 1}};
    const char *in[WRITE_OUT + 5];
    if (out_used(w, 0) && !in_given(w, 4)) {
        write_refuse(w, "it counts a step that is not given");
        return;
    }
    for (int i = 0; i < w->n->n_in; i++) in[i] = in_name(w, i);
    write_microsoft(w, onnx, in_given(w, 4) ? out_name(w, 0) : "", in, w->n->n_in);
    for (int i = 1; i < w->n->n_out; i++) write_output(w, in_given(w, i + 4) ? out_name(w, i) : "");
    for (size_t k = 0; k < sizeof each / sizeof *each; k++) { /* one entry per group */
        Onnx__AttributeProto *a = write_attr(w, each[k].name, ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOATS);
        const int groups = (w->n->n_out - 1) / 5;
        if (!(a->floats = om_arena_alloc(&w->a, (size_t)groups * sizeof *a->floats))) return;
        for (int i = 0; i < groups; i++)
            a->floats[a->n_floats++] = (float)om_node_float(w->n, each[k].name, each[k].dflt);
    }
    write_setting(w, "ratio_min", -INFINITY), write_setting(w, "ratio_max", INFINITY);
    write_int(w, "do_bias_correction", om_node_int(w->n, "do_bias_correction", 1));
}

static void rule_all(writer *w, const char *onnx) { /* l2_norm_all, all_finite */
    const char *in[OM_MAX_IN];
    if (w->n->n_in > OM_MAX_IN) return write_refuse(w, "it has too many operands");
    for (int i = 0; i < w->n->n_in; i++) in[i] = in_name(w, i);
    write_microsoft(w, onnx, out_name(w, 0), in, w->n->n_in);
}

/* The norm is given here, so not InplaceClipGradNorm: x * Min(1, max_norm / (norm + 1e-6)) */
static void rule_clip(writer *w, const char *onnx) {
    const int dtype = in_type(w, 0)->dtype;
    const char *norm = in_name(w, 1);
    if (in_type(w, 1)->dtype != dtype) {
        norm = EMIT(w, "Cast", NULL, norm);
        write_int(w, "to", om_dtype_onnx(dtype));
    }
    const char *f = EMIT(w, "Div", NULL, write_scalar(w, dtype, om_node_float(w->n, "max_norm", 1)),
                         EMIT(w, "Add", NULL, norm, write_scalar(w, dtype, 1e-6)));
    EMIT(w, onnx, out_name(w, 0), in_name(w, 0), EMIT(w, "Min", NULL, write_scalar(w, dtype, 1), f));
}

static void rule_accumulate(writer *w, const char *onnx) {
    write_microsoft(w, onnx, NULL, (const char *[]){in_name(w, 0), in_name(w, 1), in_name(w, 2)}, 3);
    write_output(w, out_name(w, 0));
}

/* What is not simply the ONNX operator that a row of pointwise.def names. */
static const write_row rows[] = {
    {&om_op_adamw_step, "AdamWOptimizer", rule_sequences},
    {&om_op_sgd_step, "SGDOptimizerV2", rule_sequences},
    {&om_op_lamb_step, "LambOptimizer", rule_lamb},
    {&om_op_l2_norm_all, "ReduceAllL2", rule_all},
    {&om_op_all_finite, "IsAllFinite", rule_all},
    {&om_op_clip_by_norm, "Mul", rule_clip},
    {&om_op_accumulate, "InPlaceAccumulatorV2", rule_accumulate},
    {&om_op_reshape, "Reshape", rule_shape},
    {&om_op_expand, "Expand", rule_shape},
    {&om_op_permute, "Transpose", rule_permute},
    {&om_op_slice, "Slice", rule_slice},
    {&om_op_flip, "Slice", rule_flip},
    {&om_op_stop_grad, "Identity", rule_first},
    {&om_op_straight_through, "Identity", rule_first},
    {&om_op_zero_grad, "Identity", rule_first},
    {&om_op_copy, "Identity", rule_first},
    {&om_op_dropout, "Identity", rule_first},
    {&om_op_concat, "Concat", rule_axis},
    {&om_op_pad, "Pad", rule_pad},
    {&om_op_trilu, "Trilu", rule_trilu},
    {&om_op_iota, "Range", rule_iota},
    {&om_op_fill, "ConstantOfShape", rule_fill},
    {&om_op_cast, "Cast", rule_cast},
    {&om_op_not, "Not", rule_logic},
    {&om_op_expm1, "Sub", rule_expm1},
    {&om_op_log1p, "Log", rule_log1p},
    {&om_op_rsqrt, "Reciprocal", rule_rsqrt},
    {&om_op_silu, "Mul", rule_silu},
    {&om_op_gelu, "Gelu", rule_gelu},
    {&om_op_gelu_tanh, "Gelu", rule_gelu},
    {&om_op_trunc, "Where", rule_trunc},
    {&om_op_floor_div, "Div", rule_floor_div},
    {&om_op_mod, "Mod", rule_mod},
    {&om_op_fmod, "Mod", rule_fmod},
    {&om_op_ne, "Not", rule_ne},
    {&om_op_and, "And", rule_logic},
    {&om_op_or, "Or", rule_logic},
    {&om_op_xor, "Xor", rule_logic},
    {&om_op_where, "Where", rule_same},
    {&om_op_reduce_sum, "ReduceSum", rule_reduce},
    {&om_op_reduce_mean, "ReduceMean", rule_reduce},
    {&om_op_reduce_max, "ReduceMax", rule_reduce},
    {&om_op_reduce_min, "ReduceMin", rule_reduce},
    {&om_op_reduce_prod, "ReduceProd", rule_reduce},
    {&om_op_argmax, "ArgMax", rule_arg},
    {&om_op_argmin, "ArgMin", rule_arg},
    {&om_op_cumsum, "CumSum", rule_cumsum},
    {&om_op_topk, "TopK", rule_topk},
    {&om_op_softmax, "Softmax", rule_axis},
    {&om_op_log_softmax, "LogSoftmax", rule_axis},
    {&om_op_layer_norm, "LayerNormalization", rule_layer_norm},
    {&om_op_rms_norm, "RMSNormalization", rule_rms_norm},
    {&om_op_batch_norm, "BatchNormalization", rule_batch_norm},
    {&om_op_matmul, "MatMul", rule_matmul},
    {&om_op_attention, "Attention", rule_attention},
    {&om_op_gather, "Gather", rule_axis},
    {&om_op_gather_elements, "GatherElements", rule_axis},
    {&om_op_gather_nd, "GatherND", rule_same},
    {&om_op_scatter_elements, "ScatterElements", rule_scatter},
    {&om_op_scatter_nd, "ScatterND", rule_scatter},
    {&om_op_cross_entropy, "SoftmaxCrossEntropyLoss", rule_cross_entropy},
    {&om_op_conv, "Conv", rule_conv},
    {&om_op_conv_transpose, "ConvTranspose", rule_conv_transpose},
    {&om_op_col2im, "Col2Im", rule_col2im},
    {&om_op_max_pool, "MaxPool", rule_pool},
    {&om_op_avg_pool, "AveragePool", rule_pool},
    {&om_op_adaptive_avg_pool, "AveragePool", rule_adaptive},
};

/* --- the model ----------------------------------------------------------------------------------------- */

static Onnx__ValueInfoProto *write_value_info(writer *w, const char *name, const om_type *t) {
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
            d->dim_param = write_str(w, text);
        }
        s->dim[s->n_dim++] = d;
    }
    return v;
}

static void write_prop(writer *w, const char *what, const char *name, const char *value) {
    size_t n = strlen(what) + strlen(name) + 2;
    char *key = om_arena_alloc(&w->a, n);
    Onnx__StringStringEntryProto *e = NEW(w, Onnx__StringStringEntryProto, onnx__string_string_entry_proto__init),
        **slot = OM_PUSH(w->cx, &w->props);
    if (!key || !slot) return;
    snprintf(key, n, "%s:%s", what, name);
    e->key = key;
    e->value = write_str(w, value);
    *slot = e;
}

/* Outputs have names of their own where the value is a graph input, a constant or an output already. */
static const char *write_out(writer *w, om_id v, om_strmap *given) {
    const char *name = w->name[v];
    om_id old;
    if (!om_strmap_put(given, name, v, &old)) return "";
    if (old != OM_NONE || om_val(w->g, v)->role != OM_ACT)
        name = EMIT(w, "Identity", write_unique(w, "output"), w->name[v]);
    Onnx__ValueInfoProto **slot = OM_PUSH(w->cx, &w->outs);
    if (slot) *slot = write_value_info(w, name, om_ty(w->g, v));
    return name;
}

static om_status write_graph(writer *w) {
    const om_graph *g = w->g;
    for (om_id i = 0; i < g->values.n && !FAILED(w); i++) {
        const om_value *v = om_val(g, i);
        char s[16];
        snprintf(s, sizeof s, "v%u", i);
        if (v->role == OM_GRAD_IN || (v->role == OM_ACT && g->nodes.v[v->node].phase == OM_BACKWARD)) w->name[i] = "";
        else w->name[i] = write_unique(w, v->name ? v->name : s);
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
        write_init(w, w->name[i], v->type.dtype, v->type.rank, dim, v->data);
    }
    for (om_id i = 0; i < g->nodes.n && !FAILED(w); i++) {
        w->n = &g->nodes.v[i];
        if (w->n->phase == OM_BACKWARD) continue;
        size_t r = 0, n = sizeof rows / sizeof *rows;
        while (r < n && rows[r].op != w->n->op) r++;
        const om_pw_row *pw = w->n->op->pw;
        if (r < n) rows[r].rule(w, rows[r].onnx);
        else if (pw && *pw->onnx) rule_same(w, pw->onnx);
        else return write_refuse(w, "it exists only inside the engine"), w->cx->status;
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

static void write_count(writer *w) {
    const om_graph *g = w->g;
    for (om_id i = 0; i < g->nodes.n; i++)
        for (int k = 0; k < g->nodes.v[i].n_in && g->nodes.v[i].phase != OM_BACKWARD; k++)
            if (om_ins(g, &g->nodes.v[i])[k] != OM_NONE) w->uses[om_ins(g, &g->nodes.v[i])[k]]++;
    for (om_id i = 0; i < g->outputs.n; i++) w->uses[g->outputs.v[i]]++;
    for (om_id i = 0; i < g->writes.n; i++) w->uses[g->writes.v[i].value]++;
}

static om_status write_model(writer *w, void **bytes, size_t *size) {
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
    writer w = {.cx = cx, .g = g, .a = {.cx = cx}, .taken = {.cx = cx}};
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
