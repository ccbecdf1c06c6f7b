/* text.c - a graph as text, and back: what passes print, golden tests compare and om-opt edits.
 *
 *   graph {
 *     sym s0 = x[1]                          # size of an input's axis;  sym s3 = value of n: a 0-d integer input;  sym s4: unbound
 *     input x: f32[2, s0, s0*12 + 3]         # roles: input param buffer grad_in
 *     param w "odd name": f32[7, 768]        # the string is the name where it is no identifier
 *     const c0: i64[2] = [1, 2]              # up to 32 numbers, else the bytes: hex "0a0b.."
 *     y = permute(w) {perm=[1, 0]}: f32[768, 7]
 *     a, b, _1 = layer_norm(x, w, _) {axis=2, eps=1e-05}: ... @"h.0.ln_1" "model.py":12 rng=3 backward seg=1
 *     output a
 *     write a -> w                           # a is stored into graph input w after the forward
 *     grad w = b                             # or: grad w = none
 *   }
 *
 * Attributes: integer `3`, float `1.0` (always with a point, exponent, inf or nan), string `"..."`, list of sizes `[..]`;
 * `to` and `dtype` show the dtype's name. A left-out operand is `_`. The types after `:` are what om_make infers; they may be left out,
 * and when present the parser compares. `f32[2]@0` is a tensor on device 0.
 *
 * Invariants: print(parse(print(g))) == print(g) byte for byte. Statements stand in the order in which the parser must make
 * them: symbols, inputs, then constants and nodes by value id. Unnamed results are v<k> and c<k>, k counting in that order, so parsing
 * brings back the same k; such names are never stored. A name that occurs twice gets ~k appended.
 */
#include "engine.h"
#include "strmap.h"

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { TEXT_CONST_MAX = 32 /* elements shown as numbers */, TEXT_NAME_MAX = 200 };

static const char *const text_role[] = {[OM_INPUT] = "input", [OM_PARAM] = "param", [OM_BUFFER] = "buffer", [OM_GRAD_IN] = "grad_in"};

/* Numbers are written and read in the C locale whatever the host program has set. */
typedef struct text_locale { locale_t c, old; } text_locale;
static text_locale text_locale_enter(void) {
    text_locale l = {newlocale(LC_NUMERIC_MASK, "C", (locale_t)0), (locale_t)0};
    if (l.c) l.old = uselocale(l.c);
    return l;
}
static void text_locale_leave(text_locale l) {
    if (l.c) uselocale(l.old), freelocale(l.c);
}

/* --- printing ------------------------------------------------------------------------------------ */

typedef struct text_out {
    om_ctx *cx;
    OM_VEC(char) buf;
    bool failed;
} text_out;

static void text_write(text_out *o, const char *s, size_t n) {
    if (o->failed) return;
    while ((size_t)o->buf.cap - o->buf.n < n + 1)
        if (!om_grow(o->cx, (void **)&o->buf.v, &o->buf.cap, 1)) {
            o->failed = true;
            return;
        }
    memcpy(o->buf.v + o->buf.n, s, n);
    o->buf.n += (uint32_t)n;
    o->buf.v[o->buf.n] = 0;
}
static void text_puts(text_out *o, const char *s) { text_write(o, s, strlen(s)); }
static void text_printf(text_out *o, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void text_printf(text_out *o, const char *fmt, ...) {
    char tmp[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(tmp, sizeof tmp, fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof tmp) {
        o->failed = true; /* every caller stays far below; names go through text_puts */
        return;
    }
    text_write(o, tmp, (size_t)n);
}

static void text_string(text_out *o, const char *s) {
    text_puts(o, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') text_printf(o, "\\%c", c);
        else if (c == '\n') text_puts(o, "\\n");
        else if (c < 0x20 || c == 0x7f) text_printf(o, "\\x%02x", c);
        else text_write(o, (const char *)&c, 1);
    }
    text_puts(o, "\"");
}

/* Shortest decimal that reads back as x (as float when `single`); always looks like a float. */
static void text_float(text_out *o, double x, bool single) {
    char s[40];
    if (isnan(x)) {
        text_puts(o, "nan");
        return;
    }
    for (int p = 1; p <= 17; p++) {
        snprintf(s, sizeof s, "%.*g", p, x);
        double back = strtod(s, NULL);
        if (single ? (float)back == (float)x : back == x) break;
    }
    text_puts(o, s);
    if (!strpbrk(s, ".einf")) text_puts(o, ".0");
}

static void text_dim(text_out *o, const om_graph *g, om_dim d) {
    char buf[2048];
    if (d >= 0) {
        text_printf(o, "%lld", (long long)d);
        return;
    }
    om_dim_print(g, d, buf, sizeof buf);
    if (strlen(buf) + 1 >= sizeof buf) {
        om_fail(o->cx, OM_UNSUPPORTED, "text: a size expression is longer than %d characters", (int)sizeof buf - 2);
        o->failed = true;
    }
    text_puts(o, buf);
}

static void text_dims(text_out *o, const om_graph *g, const om_dim *d, uint32_t n) {
    text_puts(o, "[");
    for (uint32_t i = 0; i < n; i++) {
        if (i) text_puts(o, ", ");
        text_dim(o, g, d[i]);
    }
    text_puts(o, "]");
}

static void text_type(text_out *o, const om_graph *g, const om_type *t) {
    text_puts(o, om_dtype_name(t->dtype));
    text_dims(o, g, t->dim, t->rank);
    if (t->device >= 0) text_printf(o, "@%d", t->device);
}

static bool text_is_ident_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '~';
}

/* v12, c3: made by the printer, never stored. */
static bool text_is_generated(const char *s) {
    if (*s != 'v' && *s != 'c') return false;
    size_t n = strspn(s + 1, "0123456789");
    return n > 0 && s[1 + n] == 0;
}

/* An identifier for `name` that no other value has. */
static const char *text_ident(om_arena *a, om_strmap *taken, const char *name, om_id id) {
    char s[TEXT_NAME_MAX + 24];
    size_t n = 0;
    for (; name[n] && n < TEXT_NAME_MAX; n++) s[n] = text_is_ident_char(name[n]) ? name[n] : '_';
    if (n == 0 || (s[0] >= '0' && s[0] <= '9') || s[0] == '.' || s[0] == '~') { /* identifiers start with a letter or _ */
        memmove(s + 1, s, n);
        s[0] = '_';
        n++;
    }
    s[n] = 0;
    if (text_is_generated(s) || !strcmp(s, "_") || !strcmp(s, "none")) strcpy(s + n, "_"), n++;
    for (unsigned k = 2;; k++) {
        om_id old;
        char *copy = om_arena_str(a, s);
        if (!copy || !om_strmap_put(taken, copy, id, &old)) return NULL;
        if (old == OM_NONE) return copy;
        snprintf(s + n, sizeof s - n, "~%u", k);
    }
}

static void text_const(text_out *o, const om_value *v) {
    om_tensor t = {.data = (void *)v->data, .dtype = v->type.dtype, .rank = v->type.rank, .device = -1};
    for (int i = 0; i < t.rank; i++) t.dim[i] = v->type.dim[i];
    om_dense_strides(&t);
    int64_t n = om_numel(&t);
    bool is_float = om_is_float(t.dtype);
    text_puts(o, " = ");
    if (n <= TEXT_CONST_MAX && (is_float || om_is_int(t.dtype))) {
        union { double f[TEXT_CONST_MAX]; int64_t i[TEXT_CONST_MAX]; } num;
        om_tensor w = t;
        w.data = &num;
        w.dtype = is_float ? OM_F64 : OM_I64;
        if (n && om_copy(o->cx, &t, &w) != OM_OK) {
            o->failed = true;
            return;
        }
        bool nan = false; /* a NaN's payload would be lost */
        for (int64_t i = 0; i < n && is_float; i++) nan |= isnan(num.f[i]);
        if (!nan) {
            if (t.rank) text_puts(o, "[");
            for (int64_t i = 0; i < n; i++) {
                if (i) text_puts(o, ", ");
                if (is_float) text_float(o, num.f[i], t.dtype != OM_F64);
                else text_printf(o, "%lld", (long long)num.i[i]);
            }
            if (t.rank) text_puts(o, "]");
            return;
        }
    }
    static const char digit[] = "0123456789abcdef";
    const unsigned char *p = v->data;
    size_t bytes = (size_t)n * om_dtype_size(t.dtype);
    text_puts(o, "hex \"");
    for (size_t i = 0; i < bytes; i++) text_write(o, (char[]){digit[p[i] >> 4], digit[p[i] & 15]}, 2);
    text_puts(o, "\"");
}

static bool text_attr_is_dtype(const char *name) { return !strcmp(name, "to") || !strcmp(name, "dtype"); }

static void text_attr(text_out *o, const om_graph *g, const om_attr *a) {
    text_printf(o, "%s=", a->name);
    switch (a->kind) {
    case OM_ATTR_INT:
        if (text_attr_is_dtype(a->name) && a->i > OM_NODTYPE && a->i < OM_N_DTYPES) text_puts(o, om_dtype_name((int)a->i));
        else text_printf(o, "%lld", (long long)a->i);
        break;
    case OM_ATTR_FLOAT: text_float(o, a->f, false); break;
    case OM_ATTR_STR: text_string(o, a->s ? a->s : ""); break;
    default: text_dims(o, g, a->dims, a->n);
    }
}

static void text_node(text_out *o, const om_graph *g, const om_node *n, const char *const *name) {
    for (int i = 0; i < n->n_out; i++) {
        if (i) text_puts(o, ", ");
        text_puts(o, name[n->out + (om_id)i]);
    }
    text_puts(o, " = ");
    text_puts(o, n->op->name);
    text_puts(o, "(");
    for (int i = 0; i < n->n_in; i++) {
        om_id v = om_ins(g, n)[i];
        if (i) text_puts(o, ", ");
        text_puts(o, v == OM_NONE ? "_" : name[v]);
    }
    text_puts(o, ")");
    for (int i = 0; i < n->n_attr; i++) {
        text_puts(o, i ? ", " : " {");
        text_attr(o, g, &n->attr[i]);
    }
    if (n->n_attr) text_puts(o, "}");
    for (int i = 0; i < n->n_out; i++) {
        text_puts(o, i ? ", " : ": ");
        text_type(o, g, om_ty(g, n->out + (om_id)i));
    }
    if (n->scope != OM_NONE && n->scope < g->scopes.n) {
        const om_scope *s = &g->scopes.v[n->scope];
        text_puts(o, " @");
        text_string(o, s->module ? s->module : "");
        if (s->file) {
            text_puts(o, " ");
            text_string(o, s->file);
            text_printf(o, ":%d", s->line);
        }
    }
    if (n->rng) text_printf(o, " rng=%llu", (unsigned long long)n->rng);
    if (n->phase != OM_FORWARD) text_puts(o, n->phase == OM_BACKWARD ? " backward" : " update");
    if (n->segment) text_printf(o, " seg=%u", n->segment);
}

static void text_input(text_out *o, const om_graph *g, om_id id, const char *const *name) {
    const om_value *v = om_val(g, id);
    text_printf(o, "  %s ", text_role[v->role]);
    text_puts(o, name[id]);
    if (v->name && strcmp(v->name, name[id]) != 0) {
        text_puts(o, " ");
        text_string(o, v->name);
    }
    text_puts(o, ": ");
    text_type(o, g, &v->type);
    text_puts(o, "\n");
}

static const char *text_input_name(const om_graph *g, om_id input, const char *const *name) {
    return input < g->inputs.n ? name[g->inputs.v[input]] : "_"; /* "_": broken graphs print too, parsing then refuses */
}

static bool text_is_input(const om_value *v) {
    return v->role == OM_INPUT || v->role == OM_PARAM || v->role == OM_BUFFER || v->role == OM_GRAD_IN;
}

static om_status text_names(om_ctx *cx, om_arena *a, const om_graph *g, const char **name) {
    om_strmap taken = {.cx = cx};
    bool ok = true;
    for (om_id i = 0; ok && i < g->inputs.n; i++) {
        om_id v = g->inputs.v[i];
        const char *own = om_val(g, v)->name;
        ok = (name[v] = text_ident(a, &taken, own ? own : om_val(g, v)->role == OM_GRAD_IN ? "dy" : "in", v)) != NULL;
    }
    unsigned k = 0;
    for (om_id v = 0; ok && v < g->values.n; v++) {
        const om_value *x = om_val(g, v);
        if (text_is_input(x)) continue;
        if (x->name && !text_is_generated(x->name)) {
            ok = (name[v] = text_ident(a, &taken, x->name, v)) != NULL;
        } else {
            char s[16];
            snprintf(s, sizeof s, "%c%u", x->role == OM_CONST ? 'c' : 'v', k);
            ok = (name[v] = om_arena_str(a, s)) != NULL;
        }
        k++;
    }
    om_strmap_free(&taken);
    return ok ? OM_OK : cx->status;
}

om_status om_graph_print(const om_graph *g, char **text) {
    om_ctx *cx = g->cx;
    text_out o = {.cx = cx};
    om_arena tmp = {.cx = cx};
    *text = NULL;
    const char **name = om_arena_alloc(&tmp, (g->values.n + 1) * sizeof *name);
    if (!name || text_names(cx, &tmp, g, name) != OM_OK) {
        om_arena_free(&tmp);
        return cx->status;
    }
    text_locale loc = text_locale_enter();
    text_puts(&o, "graph {\n");
    for (om_id i = 0; i < g->syms.n; i++) {
        const om_sym *s = &g->syms.v[i];
        text_puts(&o, "  sym ");
        text_puts(&o, s->name);
        if (s->input != OM_NONE && s->axis >= 0) {
            text_puts(&o, " = ");
            text_puts(&o, text_input_name(g, s->input, name));
            text_printf(&o, "[%d]", s->axis);
        } else if (s->input != OM_NONE) {
            text_puts(&o, " = value of ");
            text_puts(&o, text_input_name(g, s->input, name));
        }
        text_puts(&o, "\n");
    }
    for (om_id i = 0; i < g->inputs.n; i++) text_input(&o, g, g->inputs.v[i], name);
    for (om_id v = 0; v < g->values.n; v++) {
        const om_value *x = om_val(g, v);
        if (x->role == OM_CONST) {
            text_puts(&o, "  const ");
            text_puts(&o, name[v]);
            text_puts(&o, ": ");
            text_type(&o, g, &x->type);
            text_const(&o, x);
            text_puts(&o, "\n");
        } else if (x->node != OM_NONE && x->out == 0) {
            text_puts(&o, "  ");
            text_node(&o, g, &g->nodes.v[x->node], name);
            text_puts(&o, "\n");
        }
    }
    for (om_id i = 0; i < g->outputs.n; i++) text_puts(&o, "  output "), text_puts(&o, name[g->outputs.v[i]]), text_puts(&o, "\n");
    for (om_id i = 0; i < g->writes.n; i++) {
        text_puts(&o, "  write ");
        text_puts(&o, name[g->writes.v[i].value]);
        text_puts(&o, " -> ");
        text_puts(&o, text_input_name(g, g->writes.v[i].input, name));
        text_puts(&o, "\n");
    }
    for (om_id i = 0; i < g->grads.n; i++) {
        text_puts(&o, "  grad ");
        text_puts(&o, text_input_name(g, g->grads.v[i].input, name));
        text_puts(&o, " = ");
        text_puts(&o, g->grads.v[i].value == OM_NONE ? "none" : name[g->grads.v[i].value]);
        text_puts(&o, "\n");
    }
    text_puts(&o, "}\n");
    text_locale_leave(loc);
    om_arena_free(&tmp);
    if (o.failed) {
        om_free(cx, o.buf.v);
        return cx->status != OM_OK ? cx->status : om_fail(cx, OM_INTERNAL, "text: a line did not fit its buffer");
    }
    *text = o.buf.v;
    return OM_OK;
}

/* --- parsing ------------------------------------------------------------------------------------- */

typedef struct text_pending { const char *sym, *input; int axis, line; } text_pending; /* sym bindings name inputs that come later */

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
    return om_fail_at(in->cx, OM_INVALID, __FILE__, at, "graph text line %d, column %d: %s", in->line, (int)(in->p - in->line_start) + 1,
                      what);
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
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
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
    *t = (om_type){.dtype = om_dtype_from_name(name), .device = -1};
    if (t->dtype == OM_NODTYPE && strcmp(name, "none") != 0) return text_err(in, "unknown element type '%.40s'", name);
    om_dim *d;
    uint32_t n;
    OM_TRY(text_read_dims(in, &d, &n));
    if (n > OM_RANK) return text_err(in, "rank %u, at most %d", n, OM_RANK);
    t->rank = (uint8_t)n;
    for (uint32_t i = 0; i < n; i++) t->dim[i] = d[i];
    if (*in->p == '@' && in->p[1] >= '0' && in->p[1] <= '9') { /* @"..." is a scope */
        int64_t dev;
        in->p++;
        OM_TRY(text_integer(in, &dev));
        if (dev > INT16_MAX) return text_err(in, "device %lld", (long long)dev);
        t->device = (int16_t)dev;
    }
    return OM_OK;
}

static bool text_type_eq(const om_type *a, const om_type *b) {
    if (a->dtype != b->dtype || a->rank != b->rank || a->device != b->device) return false;
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
    if (n > (int64_t)strlen(in->p)) return text_err(in, "a constant of %lld elements, but the text ends before", (long long)n);
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
    const char *module, *file = NULL;
    int64_t line = 0;
    OM_TRY(text_quoted(in, &module));
    text_space(in);
    if (*in->p == '"') {
        OM_TRY(text_quoted(in, &file));
        OM_TRY(text_need(in, ":"));
        OM_TRY(text_integer(in, &line));
        if (line < 0 || line > INT32_MAX) return text_err(in, "line %lld", (long long)line);
    }
    om_graph *g = in->g;
    for (om_id i = g->scopes.n; i-- > 0;) { /* neighbours share scopes: found at once */
        const om_scope *s = &g->scopes.v[i];
        if (!strcmp(s->module ? s->module : "", module) && (s->file ? file && !strcmp(s->file, file) : !file) && s->line == line) {
            n->scope = i;
            return OM_OK;
        }
    }
    om_scope *s = OM_PUSH(in->cx, &g->scopes);
    if (!s) return in->cx->status;
    n->scope = g->scopes.n - 1;
    *s = (om_scope){om_arena_str(&g->arena, module), om_arena_str(&g->arena, file), (int)line};
    return in->cx->status;
}

typedef OM_VEC(const char *) text_words;
typedef OM_VEC(om_id) text_ids;
typedef OM_VEC(om_attr) text_attrs;

/* [names =] op(operands) {attributes}: types @scope rng= backward seg=      `lhs` holds the names already */
static om_status text_parse_node(text_in *in, const text_words *lhs, text_ids *ins, text_attrs *attrs) {
    om_graph *g = in->g;
    const char *word;
    OM_TRY(text_word(in, &word));
    const om_op *op = om_op_find(word);
    if (!op) in->p -= strlen(word); /* point at the name */
    if (!op) return text_err(in, "unknown operator '%.60s' (the list: csrc/ops.def)", word);
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
    if (ins->n > UINT16_MAX || attrs->n > UINT16_MAX) return text_err(in, "more than %d operands or attributes", UINT16_MAX);
    om_id out = om_make(g, op, ins->v, (int)ins->n, attrs->v, (int)attrs->n);
    if (in->cx->status != OM_OK) return in->cx->status;
    om_node *n = om_last(g);
    n->phase = OM_FORWARD;
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
                text_out o = {.cx = in->cx};
                text_type(&o, g, om_ty(g, out + i));
                om_status st = text_err(in, "%s: the type given for '%.60s' differs from the inferred %.120s", op->name, lhs->v[i],
                                        o.buf.v ? o.buf.v : "one");
                om_free(in->cx, o.buf.v);
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
    return text_err(in, "'%.60s' starts no statement (sym, input, param, buffer, grad_in, const, output, write, grad, name = ...)", word);
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
    text_locale loc = text_locale_enter();
    om_status st = text_parse_all(&in);
    text_locale_leave(loc);
    om_strmap_free(&in.names);
    om_arena_free(&in.tmp);
    om_free(cx, in.pending.v);
    if (st == OM_OK) st = cx->status;
    if (st != OM_OK) {
        char what[sizeof cx->message]; /* an operator's type rule does not know the line */
        memcpy(what, cx->message, sizeof what);
        if (strncmp(what, "graph text", 10) != 0) snprintf(cx->message, sizeof cx->message, "graph text line %d: %.950s", in.line, what);
        om_graph_free(g);
        return st;
    }
    *out = g;
    return OM_OK;
}
