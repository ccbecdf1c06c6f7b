/* strip.c - strip programs: their text, their types, compilation to instructions and registers, and the run over
 * tensors.
 *
 * Compilation is cheap (a microsecond or two) and happens at each call of a kernel: what is uniform and what is
 * contiguous is only known with the tensors in hand. It lowers each statement to one instruction plus conversions, in
 * SSA form, then assigns registers in one sweep: a value's register is free again after its last use, so an instruction
 * may overwrite an operand that dies with it.
 *
 * In-place. An output may share memory with an operand of equal size (the plan's in-place). Writing an output straight
 * to memory is then right only if no operand is read by a later instruction; otherwise it is computed in a register and
 * stored at the strip's end.
 */
#include "cpu/philox.h"
#include "cpu/strip.h"

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
#define PW(name, arity, rule, fx, ix, grad, doc) {#name, OM_S_##name, arity, rule},
#include "ops/pointwise.def"
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

/* --- compilation --------------------------------------------------------------------------------------- */

static const uint8_t class_size[OM_STRIP_CLASSES] = {4, 8, 8, 1};

static int op_cost(int op, int cls) { /* about 1/20 ns an element */
    switch (op) {
    case OM_S_exp:
    case OM_S_sigmoid:
    case OM_S_silu:
    case OM_S_expm1:
    case OM_S_log: return cls == OM_STRIP_D ? 100 : 8;
    case OM_S_tanh:
    case OM_S_erf:
    case OM_S_gelu:
    case OM_S_gelu_tanh:
    case OM_S_silu_grad:
    case OM_S_gelu_grad:
    case OM_S_gelu_tanh_grad:
    case OM_S_log1p: case OM_S_sin: case OM_S_cos: return cls == OM_STRIP_D ? 250 : 14;
    case OM_S_softplus: case OM_S_dropout: return cls == OM_STRIP_D ? 300 : 20;
    case OM_S_pow: return cls == OM_STRIP_D ? 500 : 40;
    case OM_S_mod: case OM_S_fmod: case OM_S_floor_div: return 150;
    case OM_S_div: case OM_S_sqrt: case OM_S_rsqrt: case OM_S_reciprocal: return cls == OM_STRIP_I ? 60 : 3;
    default: return 2;
    }
}

typedef struct compiler {
    om_ctx *cx;
    om_strip_prog *p;
    bool full;
} compiler;

static uint8_t emit(compiler *c, int op, int cls, int dst_cls, int a, int b, int z) {
    om_strip_prog *p = c->p;
    if (p->n_val >= OM_STRIP_VALUES || p->n_insn >= OM_STRIP_INSNS) {
        c->full = true;
        return 0;
    }
    p->cls[p->n_val] = (uint8_t)dst_cls;
    p->insn[p->n_insn++] = (om_insn){.op = (uint8_t)op,
                                     .cls = (uint8_t)cls,
                                     .dst = (uint8_t)p->n_val,
                                     .a = (uint8_t)a,
                                     .b = (uint8_t)b,
                                     .c = (uint8_t)z};
    p->cost = (uint16_t)(p->cost + op_cost(op, cls));
    return (uint8_t)p->n_val++;
}

static int emit_to(compiler *c, int v, int cls) {
    static const uint8_t to[] = {OM_S_to_f, OM_S_to_d, OM_S_to_i, OM_S_to_b};
    const int from = c->p->cls[v];
    return from == cls ? v : emit(c, to[cls], from, cls, v, v, v);
}

/* A value that later statements read must have the precision of its dtype: a cast's rounding, an integer's
 * wrap-around. */
static int emit_narrow(compiler *c, int v, int dtype, bool round) {
    switch (dtype) {
    case OM_BF16: return round ? emit(c, OM_S_round_bf16, OM_STRIP_F, OM_STRIP_F, v, v, v) : v;
    case OM_F16: return round ? emit(c, OM_S_round_f16, OM_STRIP_F, OM_STRIP_F, v, v, v) : v;
    case OM_I32: return emit(c, OM_S_wrap_i32, OM_STRIP_I, OM_STRIP_I, v, v, v);
    case OM_I16: return emit(c, OM_S_wrap_i16, OM_STRIP_I, OM_STRIP_I, v, v, v);
    case OM_I8: return emit(c, OM_S_wrap_i8, OM_STRIP_I, OM_STRIP_I, v, v, v);
    case OM_U8: return emit(c, OM_S_wrap_u8, OM_STRIP_I, OM_STRIP_I, v, v, v);
    default: return v;
    }
}

static void registers_assign(om_strip_prog *p) {
    uint8_t last[OM_STRIP_VALUES] = {0}; /* 1 + index of the last instruction that reads it */
    uint16_t pool[OM_STRIP_CLASSES][OM_STRIP_VALUES];
    int n_pool[OM_STRIP_CLASSES] = {0};
    uint16_t top = 0;
    for (int i = 0; i < p->n_insn; i++) {
        const om_insn *in = &p->insn[i];
        last[in->a] = last[in->c] = (uint8_t)(i + 1);
        if (in->op != OM_S_dropout) last[in->b] = (uint8_t)(i + 1);
    }
    for (int k = 0; k < p->n_out; k++) { /* before outputs are made immortal */
        const int v = p->out_val[k];
        bool ok = v >= p->n_in;
        for (int j = 0; j < k; j++) ok &= p->out_val[j] != v;
        int def = 0;
        for (int i = 0; i < p->n_insn; i++)
            if (p->insn[i].dst == v) def = i + 1;
        for (int i = 0; i < p->n_in; i++) ok &= last[i] <= def;
        p->direct[k] = ok;
    }
    for (int k = 0; k < p->n_out; k++) last[p->out_val[k]] = UINT8_MAX;
    for (int i = 0; i < p->n_in; i++) {
        p->reg[i] = top;
        top = (uint16_t)(top + class_size[p->cls[i]]);
        if (p->uniform[i]) last[i] = UINT8_MAX;
    }
    for (int i = 0; i < p->n_insn; i++) {
        const om_insn *in = &p->insn[i];
        const uint8_t arg[3] = {in->a, in->op == OM_S_dropout ? in->a : in->b, in->c};
        for (int k = 0; k < 3; k++) {
            const uint8_t v = arg[k];
            if (last[v] != i + 1) continue;
            last[v] = 0; /* once */
            const int size = p->cls[v] == OM_STRIP_I ? OM_STRIP_D : p->cls[v];
            pool[size][n_pool[size]++] = p->reg[v];
        }
        const int cls = p->cls[in->dst] == OM_STRIP_I ? OM_STRIP_D : p->cls[in->dst];
        if (n_pool[cls]) {
            p->reg[in->dst] = pool[cls][--n_pool[cls]];
        } else {
            p->reg[in->dst] = top;
            top = (uint16_t)(top + class_size[cls]);
        }
    }
    p->elem_bytes = top;
}

om_status om_strip_compile(om_ctx *cx, const om_strip_text *t, const uint8_t *in_dtype, const bool *uniform,
                           om_strip_prog *p) {
    uint8_t vtype[OM_STRIP_VALUES], at[OM_STRIP_VALUES] = {0}, uses[OM_STRIP_VALUES] = {0};
    compiler c = {cx, p, false};
    OM_TRY(om_strip_types(cx, t, in_dtype, vtype));
    p->n_in = (uint16_t)t->n_in;
    p->n_out = (uint16_t)t->n_out;
    p->n_val = (uint16_t)t->n_in;
    p->n_insn = p->n_draw = 0;
    p->cost = 2;
    for (int i = 0; i < t->n_in; i++) {
        p->in_dtype[i] = in_dtype[i];
        p->uniform[i] = uniform && uniform[i];
        p->cls[i] = (uint8_t)om_strip_class(in_dtype[i]);
        p->cost = (uint16_t)(p->cost + (p->uniform[i] ? 0 : 2));
        at[i] = (uint8_t)i;
    }
    for (int i = 0; i < t->n_stmt; i++)
        for (int k = 0; k < t->stmt[i].n_arg; k++) uses[t->stmt[i].arg[k]] = 1;

    for (int i = 0; i < t->n_stmt && !c.full; i++) {
        const om_strip_stmt *s = &t->stmt[i];
        const int rule = om_pw_rows[s->op].rule, id = t->n_in + i, cls = om_strip_class(s->dtype);
        int a = at[s->arg[0]], b = s->n_arg > 1 ? at[s->arg[1]] : a, z = s->n_arg > 2 ? at[s->arg[2]] : b, v;
        if (rule == CAST) {
            v = emit_to(&c, a, cls);
            const int from = vtype[s->arg[0]];
            if (uses[id] && from != s->dtype && from != OM_BOOL) v = emit_narrow(&c, v, s->dtype, true);
        } else if (rule == CMP || rule == PRED) {
            v = emit(&c, s->op, p->cls[a], OM_STRIP_B, a, b, b);
        } else if (rule == DRAW) {
            if (p->n_draw >= OM_STRIP_DRAWS) {
                c.full = true;
                break;
            }
            p->draw[p->n_draw] = (om_strip_draw){s->rng, om_philox_keep_below(s->p), om_dropout_scale(s->p), s->p <= 0};
            v = emit(&c, s->op, cls, cls, a, p->n_draw++, a);
        } else if (rule == NUM && cls == OM_STRIP_B) { /* arithmetic on bool: 0 / 1 integers, back to != 0 */
            a = emit_to(&c, a, OM_STRIP_I);
            b = s->n_arg > 1 ? emit_to(&c, b, OM_STRIP_I) : a;
            v = emit_to(&c, emit(&c, s->op, OM_STRIP_I, OM_STRIP_I, a, b, b), OM_STRIP_B);
        } else {
            v = emit(&c, s->op, cls, cls, a, b, z);
            if (uses[id] && rule == NUM && cls == OM_STRIP_I) v = emit_narrow(&c, v, s->dtype, false);
        }
        if (uses[id] && s->exact && cls == OM_STRIP_F && rule != CAST) v = emit_narrow(&c, v, s->dtype, true);
        at[id] = (uint8_t)v;
    }
    for (int k = 0; k < t->n_out; k++) {
        p->out_val[k] = at[t->out[k]];
        p->out_dtype[k] = vtype[t->out[k]];
    }
    if (!c.full) registers_assign(p);
    if (c.full || p->elem_bytes > OM_STRIP_ELEM)
        return om_fail(
            cx, OM_UNSUPPORTED,
            "fused: the program needs more than %d values, %d dropouts or %d bytes of registers per element; split it",
            OM_STRIP_VALUES, OM_STRIP_DRAWS, (int)OM_STRIP_ELEM);
    return OM_OK;
}

/* --- run ----------------------------------------------------------------------------------------------- */

enum { ROW_MIN = 192 }; /* innermost axes at least this long make strips of their own */

static void run_strips(void *arg, int64_t begin, int64_t end) { OM_PICK(om_strip)->run(arg, begin, end); }

typedef struct span { const char *lo, *hi; } span;
static span tensor_span(const om_tensor *t) {
    const int64_t e = (int64_t)om_dtype_size(t->dtype);
    span s = {t->data, (const char *)t->data + e};
    for (int i = 0; i < t->rank; i++) {
        const int64_t far = (t->dim[i] - 1) * t->stride[i] * e;
        if (far < 0) s.lo += far;
        else s.hi += far;
    }
    return s;
}

om_status om_strip_run(om_ctx *cx, const om_strip_prog *p, const om_tensor *in, om_tensor *out, uint64_t seed) {
    om_strip_job j = {.prog = p, .seed = seed, .total = 1};
    const om_tensor *shape = &out[0];
    const int n_arg = p->n_in + p->n_out;
    int64_t stride[OM_STRIP_IN + OM_STRIP_OUT][OM_RANK] = {{0}};

    for (int k = 0; k < n_arg; k++) {
        const om_tensor *t = k < p->n_in ? &in[k] : &out[k - p->n_in];
        const int lead = shape->rank - t->rank;
        bool fits = lead >= 0 && (k < p->n_in || lead == 0);
        for (int i = 0; fits && i < t->rank; i++) {
            if (t->dim[i] == shape->dim[lead + i]) stride[k][lead + i] = t->dim[i] == 1 ? 0 : t->stride[i];
            else fits = k < p->n_in && t->dim[i] == 1;
        }
        if (!fits)
            return om_fail(cx, OM_INVALID,
                           "pointwise: %s %d (rank %d) does not broadcast to the result's sizes (rank %d)",
                           k < p->n_in ? "operand" : "output", k < p->n_in ? k : k - p->n_in, t->rank, shape->rank);
    }
    for (int i = 0; i < shape->rank; i++) { /* axes of size 1 vanish, contiguous neighbours merge */
        if (shape->dim[i] == 0) return OM_OK;
        if (shape->dim[i] == 1) continue;
        bool merge = j.rank > 0;
        for (int k = 0; merge && k < n_arg; k++) {
            const om_strip_arg *a = k < p->n_in ? &j.in[k] : &j.out[k - p->n_in];
            merge = a->stride[j.rank - 1] == stride[k][i] * shape->dim[i];
        }
        if (!merge) j.dim[j.rank++] = 1;
        j.dim[j.rank - 1] *= shape->dim[i];
        j.total *= shape->dim[i];
        for (int k = 0; k < n_arg; k++)
            (k < p->n_in ? &j.in[k] : &j.out[k - p->n_in])->stride[j.rank - 1] = stride[k][i];
    }
    if (!j.rank) j.dim[j.rank++] = 1; /* one element */

    const int last = j.rank - 1;
    const int64_t room = OM_STRIP_BYTES / (p->elem_bytes ? p->elem_bytes : 1) / OM_STRIP_UNIT * OM_STRIP_UNIT;
    j.strip = room < OM_STRIP_MAX ? room : OM_STRIP_MAX;
    j.flat = j.rank > 1 && j.dim[last] < ROW_MIN;
    int64_t n_strips;
    if (j.flat) {
        n_strips = (j.total + j.strip - 1) / j.strip;
    } else {
        j.per_row = (j.dim[last] + j.strip - 1) / j.strip;
        j.strip = ((j.dim[last] + j.per_row - 1) / j.per_row + OM_STRIP_UNIT - 1) / OM_STRIP_UNIT * OM_STRIP_UNIT;
        n_strips = j.total / j.dim[last] * j.per_row;
    }

    for (int k = 0; k < n_arg; k++) {
        const bool is_in = k < p->n_in;
        const om_tensor *t = is_in ? &in[k] : &out[k - p->n_in];
        om_strip_arg *a = is_in ? &j.in[k] : &j.out[k - p->n_in];
        a->data = t->data;
        a->size = (uint8_t)om_dtype_size(t->dtype);
        bool line = true; /* one stride over the whole flat index */
        for (int i = 0; i < last; i++) line &= a->stride[i] == a->stride[i + 1] * j.dim[i + 1];
        const int cls = is_in ? p->cls[k] : p->cls[p->out_val[k - p->n_in]];
        if (is_in && p->uniform[k]) a->how = OM_STRIP_UNIFORM;
        else if (j.flat && !line) a->how = OM_STRIP_WALK;
        else if (a->stride[last] == 1 && t->dtype != OM_BF16 && t->dtype != OM_F16 && a->size == class_size[cls])
            a->how = OM_STRIP_DIRECT;
        else a->how = OM_STRIP_MOVE;
    }
    for (int k = 0; k < p->n_out; k++) {
        if (j.out[k].how != OM_STRIP_DIRECT) continue;
        bool ok = p->out_val[k] >= p->n_in;
        for (int i = 0; i < k; i++) ok &= p->out_val[i] != p->out_val[k];
        if (ok && !p->direct[k]) {
            const span o = tensor_span(&out[k]);
            for (int i = 0; i < p->n_in; i++) {
                const span s = tensor_span(&in[i]);
                ok &= s.hi <= o.lo || o.hi <= s.lo;
            }
        }
        if (!ok) j.out[k].how = OM_STRIP_MOVE;
    }
    const int64_t grain = 400000 / (p->cost * j.strip + 1) + 1; /* about 20 us a piece */
    om_parallel_for(cx, n_strips, grain, run_strips, &j);
    return OM_OK;
}
