/* text_parse.c - the text of a graph (text.h), read by recursive descent straight into the builder. Errors name line
 * and column. */
#include "graph/text.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* sym bindings name inputs that come later */
typedef struct text_pending { const char *sym, *input; int axis, line; } text_pending;

typedef struct text_in {
    om_ctx *cx;
    om_graph *g;
    om_arena tmp;        /* tokens */
    om_strmap names;     /* identifier -> value id */
    const char *p;       /* the rest */
    const char *line_start;
    int line;
    OM_VEC(text_pending) pending;
} text_in;

#define text_err(in, ...) text_err_(in, __LINE__, __VA_ARGS__)
static om_status text_err_(text_in *in, int at, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static om_status text_err_(text_in *in, int at, const char *fmt, ...) {
    if (in->cx->status != OM_OK) return in->cx->status; /* e.g. out of memory: that came first */
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return om_fail_at(in->cx, OM_INVALID, __FILE__, at, "graph text line %d, column %d: %s", in->line,
                      (int)(in->p - in->line_start) + 1, what);
}

static void text_blank(text_in *in) {
    for (;; in->p++) {
        if (*in->p == '#') in->p += strcspn(in->p, "\n");
        if (*in->p == '\n') {
            in->line++;
            in->line_start = in->p + 1;
        } else if (*in->p != ' ' && *in->p != '\t' && *in->p != '\r') {
            return;
        }
    }
}
static void text_space(text_in *in) { /* within a line */
    while (*in->p == ' ' || *in->p == '\t' || *in->p == '\r') in->p++;
}
static bool text_at_end(text_in *in) {
    text_space(in);
    return *in->p == '\n' || *in->p == 0 || *in->p == '#' || *in->p == '}';
}
static bool text_eat(text_in *in, const char *s) {
    text_space(in);
    size_t n = strlen(s);
    if (strncmp(in->p, s, n) != 0) return false;
    in->p += n;
    return true;
}
static om_status text_need(text_in *in, const char *s) {
    return text_eat(in, s) ? OM_OK : text_err(in, "expected '%s'", s);
}
static char *text_take(text_in *in, const char *s, size_t n) {
    char *t = om_arena_alloc(&in->tmp, n + 1);
    if (t) memcpy(t, s, n);
    return t;
}
static om_status text_word(text_in *in, const char **out) {
    text_space(in);
    const char *s = in->p;
    if (*s >= '0' && *s <= '9') return text_err(in, "expected a name, found a number");
    while (text_is_ident_char(*in->p)) in->p++;
    if (in->p == s) return text_err(in, "expected a name");
    *out = text_take(in, s, (size_t)(in->p - s));
    return *out ? OM_OK : in->cx->status;
}
/* Peeks: is the next word `s`? Then eats it. */
static bool text_keyword(text_in *in, const char *s) {
    text_space(in);
    size_t n = strlen(s);
    if (strncmp(in->p, s, n) != 0 || text_is_ident_char(in->p[n])) return false;
    in->p += n;
    return true;
}
static om_status text_integer(text_in *in, int64_t *out) {
    text_space(in);
    char *end;
    errno = 0;
    long long v = strtoll(in->p, &end, 10);
    if (end == in->p || errno) return text_err(in, "expected an integer of at most 64 bits");
    in->p = end;
    *out = v;
    return OM_OK;
}
static int text_hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}
static om_status text_quoted(text_in *in, const char **out) {
    OM_TRY(text_need(in, "\""));
    size_t n = 0;
    for (const char *q = in->p; *q != '"'; q++, n++) {
        if (*q == '\\') q++;
        if (*q == 0 || *q == '\n') return text_err(in, "string without closing quote");
    }
    char *s = om_arena_alloc(&in->tmp, n + 1), *d = s;
    if (!s) return in->cx->status;
    for (; *in->p != '"'; in->p++) {
        if (*in->p != '\\') {
            *d++ = *in->p;
            continue;
        }
        in->p++;
        if (*in->p == 'n') *d++ = '\n';
        else if (*in->p == 'x') {
            int hi = text_hex_digit(in->p[1]), lo = hi < 0 ? -1 : text_hex_digit(in->p[2]);
            if (lo < 0 || hi * 16 + lo == 0) return text_err(in, "\\x needs two hexadecimal digits other than 00");
            *d++ = (char)(hi * 16 + lo);
            in->p += 2;
        } else *d++ = *in->p;
    }
    *d = 0;
    in->p++;
    *out = s;
    return om_utf8_valid(s, (size_t)(d - s)) ? OM_OK : text_err(in, "the string before is not UTF-8");
}

/* One size expression: up to a comma or ] outside parentheses. */
static om_status text_read_dim(text_in *in, om_dim *out) {
    text_space(in);
    const char *s = in->p;
    int depth = 0;
    for (; *in->p && *in->p != '\n'; in->p++) {
        if (*in->p == '(') depth++;
        if (*in->p == ')' && depth-- == 0) break;
        if (depth == 0 && (*in->p == ',' || *in->p == ']')) break;
    }
    char *t = text_take(in, s, (size_t)(in->p - s));
    if (!t) return in->cx->status;
    for (size_t n = strlen(t); n && (t[n - 1] == ' ' || t[n - 1] == '\t'); n--) t[n - 1] = 0;
    char *end;
    errno = 0;
    long long v = strtoll(t, &end, 10);
    if (end != t && *end == 0 && !errno) {
        *out = om_dim_int(in->g, v);
        return in->cx->status;
    }
    if (om_dim_parse(in->g, t, out) == OM_OK) return OM_OK;
    return in->cx->status != OM_OK ? in->cx->status : text_err(in, "'%.80s' is no size expression", t);
}

typedef OM_VEC(om_dim) text_dimvec;
static om_status text_read_dims(text_in *in, om_dim **out, uint32_t *n) {
    text_dimvec v = {0};
    om_status st = text_need(in, "[");
    *out = NULL;
    *n = 0;
    if (st == OM_OK && text_eat(in, "]")) return OM_OK;
    while (st == OM_OK) {
        om_dim d;
        st = text_read_dim(in, &d);
        if (st != OM_OK) break;
        om_dim *slot = OM_PUSH(in->cx, &v);
        if (!slot) st = in->cx->status;
        else *slot = d;
        if (st == OM_OK && text_eat(in, "]")) break;
        if (st == OM_OK) st = text_need(in, ",");
    }
    if (st == OM_OK) {
        *out = om_arena_copy(&in->tmp, v.v, v.n * sizeof *v.v);
        *n = v.n;
        if (!*out) st = in->cx->status;
    }
    om_free(in->cx, v.v);
    return st;
}

static om_status text_read_type(text_in *in, om_type *t) {
    const char *name;
    OM_TRY(text_word(in, &name));
    *t = (om_type){.dtype = om_dtype_from_name(name)};
    if (t->dtype == OM_NODTYPE && strcmp(name, "none") != 0) return text_err(in, "unknown element type '%.40s'", name);
    om_dim *d;
    uint32_t n;
    OM_TRY(text_read_dims(in, &d, &n));
    if (n > OM_RANK) return text_err(in, "rank %u, at most %d", n, OM_RANK);
    t->rank = (uint8_t)n;
    for (uint32_t i = 0; i < n; i++) t->dim[i] = d[i];
    return OM_OK;
}

static bool text_type_eq(const om_type *a, const om_type *b) {
    if (a->dtype != b->dtype || a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] != b->dim[i]) return false;
    return true;
}

static om_status text_define(text_in *in, const char *ident, om_id v) {
    om_id old;
    if (!om_strmap_put(&in->names, ident, v, &old)) return in->cx->status;
    return old == OM_NONE ? OM_OK : text_err(in, "'%.80s' is defined twice", ident);
}
static om_status text_lookup(text_in *in, const char *ident, om_id *v) {
    *v = om_strmap_get(&in->names, ident);
    return *v != OM_NONE ? OM_OK : text_err(in, "'%.80s' is not defined above", ident);
}
static om_status text_lookup_input(text_in *in, const char *ident, om_id *input) {
    om_id v;
    OM_TRY(text_lookup(in, ident, &v));
    if (!text_is_input(om_val(in->g, v))) return text_err(in, "'%.80s' is not a graph input", ident);
    *input = om_val(in->g, v)->input;
    return OM_OK;
}

static om_status text_parse_sym(text_in *in) {
    const char *name;
    OM_TRY(text_word(in, &name));
    om_dim_sym(in->g, name);
    if (in->cx->status != OM_OK) return in->cx->status;
    if (text_eat(in, "<=")) {
        om_dim bound;
        OM_TRY(text_read_dim(in, &bound));
        return om_sym_bound(in->g, name, bound);
    }
    if (!text_eat(in, "=")) return OM_OK;
    text_pending p = {.sym = name, .axis = -1, .line = in->line};
    OM_TRY(text_word(in, &p.input));
    if (!strcmp(p.input, "value") && text_keyword(in, "of")) {
        OM_TRY(text_word(in, &p.input));
    } else {
        int64_t axis;
        OM_TRY(text_need(in, "["));
        OM_TRY(text_integer(in, &axis));
        OM_TRY(text_need(in, "]"));
        if (axis < 0 || axis >= OM_RANK) return text_err(in, "axis %lld", (long long)axis);
        p.axis = (int)axis;
    }
    text_pending *slot = OM_PUSH(in->cx, &in->pending);
    if (!slot) return in->cx->status;
    *slot = p;
    return OM_OK;
}

static om_status text_bind_syms(text_in *in) {
    for (uint32_t i = 0; i < in->pending.n; i++) {
        const text_pending *p = &in->pending.v[i];
        om_id input;
        in->line = p->line;
        OM_TRY(text_lookup_input(in, p->input, &input));
        const om_type *t = om_ty(in->g, in->g->inputs.v[input]);
        if (p->axis >= t->rank || (p->axis < 0 && (t->rank || !om_is_int(t->dtype))))
            return text_err(in, "sym %.40s: '%.80s' has no such axis or is no 0-d integer", p->sym, p->input);
        OM_TRY(om_sym_bind(in->g, p->sym, input, p->axis));
    }
    return OM_OK;
}

static om_status text_parse_input(text_in *in, om_role role) {
    const char *ident, *name;
    om_type t;
    OM_TRY(text_word(in, &ident));
    text_space(in);
    name = ident;
    if (*in->p == '"') OM_TRY(text_quoted(in, &name));
    OM_TRY(text_need(in, ":"));
    OM_TRY(text_read_type(in, &t));
    om_id v = om_input(in->g, role, name, &t);
    if (v == OM_NONE) return in->cx->status;
    if (text_keyword(in, "host")) OM_TRY(om_input_host(in->g, om_val(in->g, v)->input));
    return text_define(in, ident, v);
}

static om_status text_read_numbers(text_in *in, const om_type *t, int64_t n, void *data) {
    bool is_float = om_is_float(t->dtype);
    if (!is_float && !om_is_int(t->dtype)) return text_err(in, "numbers cannot be of type %s", om_dtype_name(t->dtype));
    if (t->rank) OM_TRY(text_need(in, "["));
    for (int64_t i = 0; i < n; i++) {
        if (i) OM_TRY(text_need(in, ","));
        if (is_float) {
            text_space(in);
            char *end;
            double x = strtod(in->p, &end);
            if (end == in->p) return text_err(in, "expected a number");
            in->p = end;
            ((double *)data)[i] = x;
        } else {
            OM_TRY(text_integer(in, &((int64_t *)data)[i]));
        }
    }
    return t->rank ? text_need(in, "]") : OM_OK;
}

static om_status text_read_hex(text_in *in, size_t bytes, unsigned char *data) {
    OM_TRY(text_need(in, "\""));
    for (size_t i = 0; i < bytes; i++) {
        int hi = text_hex_digit(*in->p), lo = hi < 0 ? -1 : text_hex_digit(in->p[1]);
        if (lo < 0) return text_err(in, "expected %zu hexadecimal bytes, found %zu", bytes, i);
        data[i] = (unsigned char)(hi * 16 + lo);
        in->p += 2;
    }
    return text_need(in, "\"");
}

static om_status text_parse_const(text_in *in) {
    const char *ident;
    om_type t;
    OM_TRY(text_word(in, &ident));
    OM_TRY(text_need(in, ":"));
    OM_TRY(text_read_type(in, &t));
    OM_TRY(text_need(in, "="));
    om_tensor dst = {.dtype = t.dtype, .rank = t.rank, .device = -1};
    int64_t n = 1;
    for (int i = 0; i < t.rank; i++) {
        if (t.dim[i] < 0) return text_err(in, "a constant's sizes must be numbers");
        if (__builtin_mul_overflow(n, t.dim[i], &n) || n > (int64_t)1 << 31) return text_err(in, "constant too large");
        dst.dim[i] = t.dim[i];
    }
    if (n > (int64_t)strlen(in->p))
        return text_err(in, "a constant of %lld elements, but the text ends before", (long long)n);
    om_dense_strides(&dst);
    size_t size = (size_t)n * 8 + 8;
    void *raw = om_alloc(in->cx, size), *data = om_alloc(in->cx, size);
    om_status st = raw && data ? OM_OK : in->cx->status;
    if (st == OM_OK && text_keyword(in, "hex")) {
        st = text_read_hex(in, (size_t)n * om_dtype_size(t.dtype), data);
    } else if (st == OM_OK) {
        st = text_read_numbers(in, &t, n, raw);
        om_tensor src = dst;
        src.dtype = om_is_float(t.dtype) ? OM_F64 : OM_I64;
        src.data = raw;
        dst.data = data;
        if (st == OM_OK && n) st = om_copy(in->cx, &src, &dst);
    }
    if (st == OM_OK) {
        om_id v = om_const(in->g, t.dtype, t.rank, dst.dim, data);
        if (v == OM_NONE) st = in->cx->status;
        else {
            if (!text_is_generated(ident)) om_val(in->g, v)->name = om_arena_str(&in->g->arena, ident);
            st = text_define(in, ident, v);
        }
    }
    om_free(in->cx, raw);
    om_free(in->cx, data);
    return st;
}

static om_status text_parse_attr(text_in *in, om_attr *a) {
    OM_TRY(text_word(in, &a->name));
    OM_TRY(text_need(in, "="));
    text_space(in);
    if (*in->p == '"') {
        a->kind = OM_ATTR_STR;
        return text_quoted(in, &a->s);
    }
    if (*in->p == '[') {
        om_dim *d;
        a->kind = OM_ATTR_DIMS;
        OM_TRY(text_read_dims(in, &d, &a->n));
        a->dims = d;
        return OM_OK;
    }
    if (text_attr_is_dtype(a->name) && text_is_ident_char(*in->p) && !(*in->p >= '0' && *in->p <= '9')) {
        const char *name;
        OM_TRY(text_word(in, &name));
        a->kind = OM_ATTR_INT;
        a->i = om_dtype_from_name(name);
        return a->i != OM_NODTYPE ? OM_OK : text_err(in, "unknown element type '%.40s'", name);
    }
    char *end;
    errno = 0;
    a->kind = OM_ATTR_INT;
    a->i = strtoll(in->p, &end, 10);
    if (end == in->p || errno || *end == '.' || *end == 'e' || *end == 'i' || *end == 'n') {
        a->kind = OM_ATTR_FLOAT;
        a->f = strtod(in->p, &end);
    }
    if (end == in->p) return text_err(in, "attribute %.40s: expected a number, \"string\" or [sizes]", a->name);
    in->p = end;
    return OM_OK;
}

static om_status text_scope(text_in *in, om_node *n) {
    const char *module, *file = NULL, *region = NULL;
    int64_t line = 0;
    OM_TRY(text_quoted(in, &module));
    text_space(in);
    if (*in->p == '"') {
        OM_TRY(text_quoted(in, &file));
        OM_TRY(text_need(in, ":"));
        OM_TRY(text_integer(in, &line));
        if (line < 0 || line > INT32_MAX) return text_err(in, "line %lld", (long long)line);
        text_space(in);
    }
    if (!strncmp(in->p, "in ", 3)) {
        in->p += 3;
        text_space(in);
        OM_TRY(text_quoted(in, &region));
    }
    om_graph *g = in->g;
    for (om_id i = g->scopes.n; i-- > 0;) { /* neighbours share scopes: found at once */
        const om_scope *s = &g->scopes.v[i];
        if (!strcmp(s->module ? s->module : "", module) && (s->file ? file && !strcmp(s->file, file) : !file) &&
            s->line == line && (s->region ? region && !strcmp(s->region, region) : !region)) {
            n->scope = i;
            return OM_OK;
        }
    }
    om_scope *s = OM_PUSH(in->cx, &g->scopes);
    if (!s) return in->cx->status;
    n->scope = g->scopes.n - 1;
    *s = (om_scope){om_arena_str(&g->arena, module), om_arena_str(&g->arena, file), (int)line,
                      om_arena_str(&g->arena, region)};
    return in->cx->status;
}

typedef OM_VEC(const char *) text_words;
typedef OM_VEC(om_id) text_ids;
typedef OM_VEC(om_attr) text_attrs;

/* [names =] op(operands) {attributes}: types @scope in "region" rng= backward seg=   `lhs` holds the names already */
static om_status text_parse_node(text_in *in, const text_words *lhs, text_ids *ins, text_attrs *attrs) {
    om_graph *g = in->g;
    const char *word;
    OM_TRY(text_word(in, &word));
    const om_op *op = om_op_find(word);
    if (!op) in->p -= strlen(word); /* point at the name */
    if (!op) return text_err(in, "unknown operator '%.60s' (the list: csrc/graph/ops.def)", word);
    OM_TRY(text_need(in, "("));
    while (!text_eat(in, ")")) {
        if (ins->n) OM_TRY(text_need(in, ","));
        OM_TRY(text_word(in, &word));
        om_id *v = OM_PUSH(in->cx, ins);
        if (!v) return in->cx->status;
        *v = OM_NONE;
        if (strcmp(word, "_") != 0) OM_TRY(text_lookup(in, word, v));
    }
    if (text_eat(in, "{"))
        while (!text_eat(in, "}")) {
            if (attrs->n) OM_TRY(text_need(in, ","));
            om_attr *a = OM_PUSH(in->cx, attrs);
            if (!a) return in->cx->status;
            OM_TRY(text_parse_attr(in, a));
        }
    if (ins->n > UINT16_MAX || attrs->n > UINT16_MAX)
        return text_err(in, "more than %d operands or attributes", UINT16_MAX);
    g->cur_phase = OM_FORWARD;
    om_id out = om_make(g, op, ins->v, (int)ins->n, attrs->v, (int)attrs->n);
    if (in->cx->status != OM_OK) return in->cx->status;
    om_node *n = om_last(g);
    n->scope = OM_NONE;
    if (n->n_out != lhs->n) return text_err(in, "%s makes %d values, %u names are given", op->name, n->n_out, lhs->n);
    for (uint32_t i = 0; i < lhs->n; i++) {
        OM_TRY(text_define(in, lhs->v[i], out + i));
        if (!text_is_generated(lhs->v[i])) om_val(g, out + i)->name = om_arena_str(&g->arena, lhs->v[i]);
    }
    if (text_eat(in, ":"))
        for (uint32_t i = 0; i < lhs->n; i++) {
            om_type t;
            if (i) OM_TRY(text_need(in, ","));
            OM_TRY(text_read_type(in, &t));
            if (!text_type_eq(&t, om_ty(g, out + i))) {
                char *inferred = om_text_type(g, om_ty(g, out + i));
                om_status st = text_err(in, "%s: the type given for '%.60s' differs from the inferred %.120s", op->name,
                                        lhs->v[i], inferred ? inferred : "one");
                om_free(in->cx, inferred);
                return st;
            }
        }
    while (!text_at_end(in)) {
        int64_t k;
        if (text_eat(in, "@")) OM_TRY(text_scope(in, n));
        else if (text_keyword(in, "backward")) n->phase = OM_BACKWARD;
        else if (text_keyword(in, "update")) n->phase = OM_UPDATE;
        else if (text_eat(in, "rng=")) {
            OM_TRY(text_integer(in, &k));
            if (k < 0 || k >= UINT32_MAX) return text_err(in, "rng %lld", (long long)k);
            n->rng = (uint64_t)k;
            if (g->n_rng < (uint32_t)k) g->n_rng = (uint32_t)k;
        } else if (text_eat(in, "seg=")) {
            OM_TRY(text_integer(in, &k));
            if (k < 0 || k > UINT16_MAX) return text_err(in, "segment %lld, at most %d", (long long)k, UINT16_MAX);
            n->segment = (uint16_t)k;
        } else return text_err(in, "expected @\"scope\", rng=, backward, update, seg= or the end of the line");
    }
    return in->cx->status;
}

static om_status text_parse_assignment(text_in *in, const char *first) {
    text_words lhs = {0};
    text_ids ins = {0};
    text_attrs attrs = {0};
    om_status st = OM_OK;
    for (const char *name = first; st == OM_OK;) {
        const char **slot = OM_PUSH(in->cx, &lhs);
        if (!slot) st = in->cx->status;
        else *slot = name;
        if (st != OM_OK || !text_eat(in, ",")) break;
        st = text_word(in, &name);
    }
    if (st == OM_OK) st = text_need(in, "=");
    if (st == OM_OK) st = text_parse_node(in, &lhs, &ins, &attrs);
    om_free(in->cx, (void *)lhs.v);
    om_free(in->cx, ins.v);
    om_free(in->cx, attrs.v);
    return st;
}

static om_status text_statement(text_in *in) {
    om_graph *g = in->g;
    const char *word;
    OM_TRY(text_word(in, &word));
    text_space(in);
    if (*in->p == '=' || *in->p == ',') return text_parse_assignment(in, word);
    for (int r = OM_INPUT; r <= OM_GRAD_IN; r++)
        if (text_role[r] && !strcmp(word, text_role[r])) return text_parse_input(in, (om_role)r);
    if (!strcmp(word, "sym")) return text_parse_sym(in);
    if (!strcmp(word, "const")) return text_parse_const(in);
    if (!strcmp(word, "output")) {
        om_id v;
        OM_TRY(text_word(in, &word));
        OM_TRY(text_lookup(in, word, &v));
        om_id *slot = OM_PUSH(in->cx, &g->outputs);
        if (slot) *slot = v;
        return in->cx->status;
    }
    if (!strcmp(word, "write")) {
        om_write w;
        OM_TRY(text_word(in, &word));
        OM_TRY(text_lookup(in, word, &w.value));
        OM_TRY(text_need(in, "->"));
        OM_TRY(text_word(in, &word));
        OM_TRY(text_lookup_input(in, word, &w.input));
        om_write *slot = OM_PUSH(in->cx, &g->writes);
        if (slot) *slot = w;
        return in->cx->status;
    }
    if (!strcmp(word, "grad")) {
        om_gradout d = {OM_NONE, OM_NONE};
        OM_TRY(text_word(in, &word));
        OM_TRY(text_lookup_input(in, word, &d.input));
        OM_TRY(text_need(in, "="));
        OM_TRY(text_word(in, &word));
        if (strcmp(word, "none") != 0) OM_TRY(text_lookup(in, word, &d.value));
        om_gradout *slot = OM_PUSH(in->cx, &g->grads);
        if (slot) *slot = d;
        return in->cx->status;
    }
    return text_err(
        in, "'%.60s' starts no statement (sym, input, param, buffer, grad_in, const, output, write, grad, name = ...)",
        word);
}

static om_status text_parse_all(text_in *in) {
    text_blank(in);
    if (!text_keyword(in, "graph")) return text_err(in, "expected 'graph {'");
    OM_TRY(text_need(in, "{"));
    for (;;) {
        text_blank(in);
        if (*in->p == 0) return text_err(in, "'}' is missing");
        if (text_eat(in, "}")) break;
        OM_TRY(text_statement(in));
        if (!text_at_end(in)) return text_err(in, "unexpected '%.20s'", in->p);
    }
    text_blank(in);
    if (*in->p) return text_err(in, "text after the closing '}'");
    return text_bind_syms(in);
}

om_status om_graph_parse(om_ctx *cx, const char *text, om_graph **out) {
    *out = NULL;
    if (cx->status != OM_OK) return cx->status;
    om_graph *g = om_graph_new(cx);
    if (!g) return cx->status;
    text_in in = {.cx = cx, .g = g, .tmp = {.cx = cx}, .names = {.cx = cx}, .p = text, .line_start = text, .line = 1};
    const om_c_locale loc = om_c_locale_enter();
    om_status st = text_parse_all(&in);
    om_c_locale_leave(loc);
    om_strmap_free(&in.names);
    om_arena_free(&in.tmp);
    om_free(cx, in.pending.v);
    if (st == OM_OK) st = cx->status;
    if (st != OM_OK) {
        char what[sizeof cx->message]; /* an operator's type rule does not know the line */
        memcpy(what, cx->message, sizeof what);
        if (strncmp(what, "graph text", 10) != 0)
            snprintf(cx->message, sizeof cx->message, "graph text line %d: %.950s", in.line, what);
        om_graph_free(g);
        return st;
    }
    *out = g;
    return OM_OK;
}
