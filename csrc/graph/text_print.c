/* text_print.c - a graph as text: names first, then symbols, inputs, constants and nodes by value id (text.h). */
#include "graph/text.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { TEXT_CONST_MAX = 32 /* elements shown as numbers */, TEXT_NAME_MAX = 200 };

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
}

char *om_text_type(const om_graph *g, const om_type *t) {
    text_out o = {.cx = g->cx};
    text_type(&o, g, t);
    return o.buf.v;
}

/* An identifier for `name` that no other value has. */
static const char *text_ident(om_arena *a, om_strmap *taken, const char *name, om_id id) {
    char s[TEXT_NAME_MAX + 24];
    size_t n = 0;
    for (; name[n] && n < TEXT_NAME_MAX; n++) s[n] = text_is_ident_char(name[n]) ? name[n] : '_';
    /* identifiers start with a letter or _ */
    if (n == 0 || (s[0] >= '0' && s[0] <= '9') || s[0] == '.' || s[0] == '~') {
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

static void text_attr(text_out *o, const om_graph *g, const om_attr *a) {
    text_printf(o, "%s=", a->name);
    switch (a->kind) {
    case OM_ATTR_INT:
        if (text_attr_is_dtype(a->name) && a->i > OM_NODTYPE && a->i < OM_N_DTYPES)
            text_puts(o, om_dtype_name((int)a->i));
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
        if (s->region) {
            text_puts(o, " in ");
            text_string(o, s->region);
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
    text_puts(o, v->host ? " host\n" : "\n");
}

static const char *text_input_name(const om_graph *g, om_id input, const char *const *name) {
    /* "_": broken graphs print too, parsing then refuses */
    return input < g->inputs.n ? name[g->inputs.v[input]] : "_";
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
    const om_c_locale loc = om_c_locale_enter();
    text_puts(&o, "graph {\n");
    for (om_id i = 0; i < g->syms.n; i++) {
        const om_sym *s = &g->syms.v[i];
        text_puts(&o, "  sym ");
        text_puts(&o, s->name);
        if (s->bounded) text_puts(&o, " <= "), text_dim(&o, g, s->bound);
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
    for (om_id i = 0; i < g->outputs.n; i++)
        text_puts(&o, "  output "), text_puts(&o, name[g->outputs.v[i]]), text_puts(&o, "\n");
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
    om_c_locale_leave(loc);
    om_arena_free(&tmp);
    if (o.failed) {
        om_free(cx, o.buf.v);
        return cx->status != OM_OK ? cx->status : om_fail(cx, OM_INTERNAL, "text: a line did not fit its buffer");
    }
    *text = o.buf.v;
    return OM_OK;
}
