/* strip.c - strip programs as text and as statements: reading, printing, types (strip.h). */
#include "ops/strip.h"

#include <math.h>
#include <stdio.h>

#define FLT OM_PW_FLT
#define TRIG OM_PW_TRIG
#define NUM OM_PW_NUM
#define CMP OM_PW_CMP
#define PRED OM_PW_PRED
#define LOG OM_PW_LOG
#define SEL OM_PW_SEL
#define CAST OM_PW_CAST
#define DRAW OM_PW_DRAW
const om_pw_row om_pw_rows[] = {
#define PW(name, arity, rule, fx, ix, grad, onnx, aten, doc) {#name, OM_S_##name, arity, rule, onnx},
#include "graph/pointwise.def"
#undef PW
};
enum { N_ROWS = sizeof om_pw_rows / sizeof *om_pw_rows };

/* --- text -------------------------------------------------------------------------------------------- */

static int row_find(const char *name, size_t len) {
    for (int i = 0; i < N_ROWS; i++)
        if (om_pw_rows[i].name[0] == *name && !strncmp(om_pw_rows[i].name, name, len) && !om_pw_rows[i].name[len])
            return i;
    return -1;
}

static int dtype_find(const char *name, size_t len) {
    char buf[16];
    if (len >= sizeof buf) return OM_NODTYPE;
    memcpy(buf, name, len);
    buf[len] = 0;
    return om_dtype_from_name(buf);
}

static const char *spaces_skip(const char *s) {
    while (*s == ' ') s++;
    return s;
}

/* Reads one value number below `limit`; false when there is none. */
static bool value_read(const char **s, int limit, uint8_t *v) {
    const char *p = spaces_skip(*s);
    long x = 0;
    if (*p < '0' || *p > '9') return false;
    for (; *p >= '0' && *p <= '9'; p++)
        if ((x = x * 10 + (*p - '0')) > OM_STRIP_VALUES) return false;
    if (x >= limit) return false;
    *v = (uint8_t)x;
    *s = p;
    return true;
}

static const char *digits_read(const char *s, uint64_t *x) {
    for (*x = 0; *s >= '0' && *s <= '9'; s++) *x = *x * 10 + (uint64_t)(*s - '0');
    return s;
}

/* A double whatever the host's locale: digits with a point, exact up to 2^53 and 22 places, or an integer times 2^-k as
 * 5404319552844595p54. */
static double number_read(const char *s, const char **end) {
    uint64_t m, k;
    const char *e = digits_read(s, &m);
    double unit = 1;
    if (*e == '.')
        for (e++; *e >= '0' && *e <= '9'; e++, unit *= 10) m = m * 10 + (uint64_t)(*e - '0');
    else if (*e == 'p' && e > s) {
        e = digits_read(e + 1, &k);
        *end = e;
        return ldexp((double)m, -(int)k);
    }
    *end = e;
    return (double)m / unit;
}

/* Of x in [0, 1]: the shortest decimal that reads back, else the exact form. */
static void number_text(double x, char buf[40]) {
    const char *end;
    for (int digits = 1; digits <= 15; digits++) {
        snprintf(buf, 40, "%.*f", digits, x);
        buf[1] = '.';
        if (number_read(buf, &end) == x) return;
    }
    int e = 0;
    const double m = frexp(x, &e);
    snprintf(buf, 40, "%llup%d", (unsigned long long)ldexp(m, 53), 53 - e);
}

#define BAD(s, ...) return om_fail(cx, OM_INVALID, "fused: program at \"%.24s\": " __VA_ARGS__)

om_status om_strip_parse(om_ctx *cx, const char *text, int n_in, om_strip_text *out) {
    memset(out, 0, offsetof(om_strip_text, stmt));
    out->n_in = n_in;
    if (n_in > OM_STRIP_IN) return om_fail(cx, OM_UNSUPPORTED, "fused: %d operands; at most %d", n_in, OM_STRIP_IN);
    for (const char *s = text; *(s = spaces_skip(s));) {
        const int limit = n_in + out->n_stmt;
        const size_t word = strcspn(s, ": ;");
        if (word == 3 && !strncmp(s, "out", 3)) {
            for (s += 3; out->n_out < OM_STRIP_OUT && value_read(&s, limit, &out->out[out->n_out]);) out->n_out++;
            s = spaces_skip(s);
            if (*s || !out->n_out)
                BAD(s, "out takes 1 to %d value numbers below %d and ends the program", s, OM_STRIP_OUT, limit);
            break;
        }
        if (limit >= OM_STRIP_VALUES) BAD(s, "more than %d values", s, OM_STRIP_VALUES);
        om_strip_stmt *st = &out->stmt[out->n_stmt];
        *st = (om_strip_stmt){0};
        const int row = row_find(s, word);
        if (row < 0 || s[word] != ':') BAD(s, "no pointwise operator; a statement is op:dtype values", s);
        st->op = (uint8_t)row;
        const char *t = s + word + 1;
        const size_t len = strcspn(t, "! ;");
        if ((st->dtype = (uint8_t)dtype_find(t, len)) == OM_NODTYPE) BAD(t, "no dtype", t);
        t += len;
        if ((st->exact = *t == '!')) t++;
        while (st->n_arg < 3 && value_read(&t, limit, &st->arg[st->n_arg])) st->n_arg++;
        for (t = spaces_skip(t); *t == 'p' || *t == 'r'; t = spaces_skip(t)) {
            const char *from = t, *end = NULL;
            if (!strncmp(t, "p=", 2)) st->p = number_read(from += 2, &end);
            else if (!strncmp(t, "rng=", 4)) end = digits_read(from += 4, &st->rng);
            if (!end || end == from) BAD(t, "p=<number> or rng=<integer> expected", t);
            t = end;
        }
        if (*t && *t != ';') BAD(t, "values below %d, then ';', expected", t, limit);
        if (st->n_arg != om_pw_rows[row].arity)
            BAD(s, "%s takes %d values, %d given", s, om_pw_rows[row].name, om_pw_rows[row].arity, st->n_arg);
        out->n_stmt++;
        s = *t ? t + 1 : t;
    }
    if (!out->n_stmt) return om_fail(cx, OM_INVALID, "fused: the program is empty");
    if (!out->n_out) out->out[out->n_out++] = (uint8_t)(n_in + out->n_stmt - 1);
    return OM_OK;
}

size_t om_strip_print(const om_strip_text *t, char *buf, size_t size) {
    size_t at = 0;
#define PUT(...) at += (size_t)snprintf(at < size ? buf + at : NULL, at < size ? size - at : 0, __VA_ARGS__)
    for (int i = 0; i < t->n_stmt; i++) {
        const om_strip_stmt *s = &t->stmt[i];
        PUT("%s%s:%s%s", i ? ";" : "", om_pw_rows[s->op].name, om_dtype_name(s->dtype), s->exact ? "!" : "");
        for (int k = 0; k < s->n_arg; k++) PUT(" %d", s->arg[k]);
        if (s->op == OM_S_dropout) {
            char p[40];
            number_text(s->p, p);
            PUT(" p=%s rng=%llu", p, (unsigned long long)s->rng);
        }
    }
    if (t->n_out != 1 || t->out[0] != t->n_in + t->n_stmt - 1) {
        PUT(";out");
        for (int i = 0; i < t->n_out; i++) PUT(" %d", t->out[i]);
    }
#undef PUT
    return at;
}

/* --- types ------------------------------------------------------------------------------------------- */

om_status om_strip_types(om_ctx *cx, const om_strip_text *t, const uint8_t *in_dtype, uint8_t *vtype) {
    memcpy(vtype, in_dtype, (size_t)t->n_in);
    for (int i = 0; i < t->n_stmt; i++) {
        const om_strip_stmt *s = &t->stmt[i];
        const om_pw_row *row = &om_pw_rows[s->op];
        const int a = vtype[s->arg[0]], b = s->n_arg > 1 ? vtype[s->arg[1]] : a,
                  c = s->n_arg > 2 ? vtype[s->arg[2]] : b;
        const char *want = NULL;
        int result = a;
        switch (row->rule) {
        case FLT: case TRIG: case DRAW: want = om_is_float(a) && a == b ? NULL : "floats of one dtype"; break;
        case NUM: want = (om_is_float(a) || om_is_int(a)) && a == b ? NULL : "numbers of one dtype"; break;
        case CMP:
            want = (om_is_float(a) || om_is_int(a)) && a == b ? NULL : "numbers of one dtype";
            result = OM_BOOL;
            break;
        case PRED: want = om_is_float(a) ? NULL : "floats"; result = OM_BOOL; break;
        case LOG: want = om_is_int(a) && a == b ? NULL : "bool or integers of one dtype"; break;
        case SEL:
            want = a == OM_BOOL && b == c && (om_is_float(b) || om_is_int(b)) ? NULL
                                                                              : "a bool and two numbers of one dtype";
            result = b;
            break;
        default:
            want = (om_is_float(a) || om_is_int(a)) && (om_is_float(s->dtype) || om_is_int(s->dtype)) ? NULL
                                                                                                      : "numbers";
            result = s->dtype;
        }
        if (want)
            return om_fail(cx, OM_INVALID, "%s: operands of dtype %s, %s, %s; it takes %s: cast first", row->name,
                           om_dtype_name(a), s->n_arg > 1 ? om_dtype_name(b) : "-",
                           s->n_arg > 2 ? om_dtype_name(c) : "-", want);
        if (s->dtype != result)
            return om_fail(cx, OM_INVALID, "%s: result declared %s, but its operands give %s", row->name,
                           om_dtype_name(s->dtype), om_dtype_name(result));
        vtype[t->n_in + i] = s->dtype;
    }
    return OM_OK;
}

/* --- a node's statements --------------------------------------------------------------------------------- */

om_status om_strip_of_node(om_ctx *cx, const om_node *n, const om_attr *attr, int dtype, om_strip_text *t) {
    const om_pw_row *row = n->op->pw;
    if (!row) return om_strip_parse(cx, om_attr_str(attr, n->n_attr, "program", ""), n->n_in, t);
    t->n_in = n->n_in;
    t->n_stmt = t->n_out = 1;
    t->out[0] = (uint8_t)n->n_in;
    t->stmt[0] = (om_strip_stmt){.op = row->op, .n_arg = row->arity, .dtype = (uint8_t)dtype, .arg = {0, 1, 2}};
    if (row->op == OM_S_dropout) {
        t->stmt[0].p = om_attr_float(attr, n->n_attr, "p", 0.5);
        t->stmt[0].rng = n->rng;
    }
    return OM_OK;
}
