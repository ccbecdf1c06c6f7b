/* strip_source.c - see strip_source.h. */
#include "cuda/strip_source.h"
#include "ops/strip_op.h"

#include <stdarg.h>
#include <stdio.h>

/* Bytes of registers per element up to which a thread holds four elements at once; one else. Elements up to which their
 * places, those of a step of the grid behind them too, are 32-bit numbers: then an address is one instruction. */
enum { FOUR_UPTO = 80, INDEX_MOST = INT32_MAX - 1024 };

typedef struct writer { char *text; size_t size, n; bool full; } writer;

__attribute__((format(printf, 2, 3))) static void put(writer *w, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(w->text + w->n, w->size - w->n, fmt, args);
    va_end(args);
    if (n < 0 || (size_t)n >= w->size - w->n) w->full = true;
    else w->n += (size_t)n;
}

static const char *const op_name[] = {
#define PW(name, ...) #name,
#include "graph/pointwise.def"
#undef PW
};
static const char *const class_type[] = {"float", "double", "int64_t", "uint8_t"};
static const char class_space[] = "fdib";

static const char *storage(int dtype) {
    switch (dtype) {
    case OM_F32: return "float";
    case OM_F64: return "double";
    case OM_BF16: return "bf16";
    case OM_F16: return "f16";
    case OM_I64: return "int64_t";
    case OM_I32: return "int32_t";
    case OM_I16: return "int16_t";
    case OM_I8: return "int8_t";
    default: return "uint8_t"; /* U8, BOOL */
    }
}

static void offset_put(writer *w, const om_strip_layout *l, int operand) {
    bool any = false;
    for (int a = 0; a < l->rank; a++) {
        const int64_t s = l->stride[operand][a];
        if (!s) continue;
        put(w, s == 1 ? "%sw.of(%d, k)" : "%sw.of(%d, k) * STRIDE(%d)", any ? " + " : "", a, operand * l->rank + a);
        any = true;
    }
    if (!any) put(w, "0");
}

static void insn_put(writer *w, const om_strip_prog *p, const om_insn *in) {
    const char *of = class_type[p->cls[in->dst]];
    switch (in->op) {
    case OM_S_where: put(w, "SET(v%d, %s, v%d[k] ? v%d[k] : v%d[k])\n", in->dst, of, in->a, in->b, in->c); return;
    case OM_S_dropout:
        put(w, "WORDS(w%d, %d) SET(v%d, %s, strip_drop(v%d[k], w%d[k], DRAWN(%d)))\n", in->b, in->b, in->dst, of, in->a,
            in->b, in->b);
        return;
    case OM_S_to_b: put(w, "SET(v%d, %s, v%d[k] != 0)\n", in->dst, of, in->a); return;
    case OM_S_to_f:
    case OM_S_to_d:
    case OM_S_to_i: put(w, "SET(v%d, %s, v%d[k])\n", in->dst, of, in->a); return;
    case OM_S_to_i32:
    case OM_S_wrap_i32: put(w, "SET(v%d, %s, (int32_t)v%d[k])\n", in->dst, of, in->a); return;
    case OM_S_round_bf16: put(w, "SET(v%d, %s, strip_round_bf16(v%d[k]))\n", in->dst, of, in->a); return;
    case OM_S_round_f16: put(w, "SET(v%d, %s, strip_round_f16(v%d[k]))\n", in->dst, of, in->a); return;
    case OM_S_wrap_i16: put(w, "SET(v%d, %s, (int16_t)v%d[k])\n", in->dst, of, in->a); return;
    case OM_S_wrap_i8: put(w, "SET(v%d, %s, (int8_t)v%d[k])\n", in->dst, of, in->a); return;
    case OM_S_wrap_u8: put(w, "SET(v%d, %s, (uint8_t)v%d[k])\n", in->dst, of, in->a); return;
    }
    put(w, om_pw_rows[in->op].arity == 1 ? "SET(v%d, %s, %c::op_%s(v%d[k]))\n"
                                         : "SET(v%d, %s, %c::op_%s(v%d[k], v%d[k]))\n",
        in->dst, of, class_space[in->cls], op_name[in->op], in->a, in->b);
}

size_t om_strip_source(const om_strip_layout *l, char *text, size_t size) {
    const om_strip_prog *p = l->prog;
    writer w = {text, size, 0, size == 0};
    const bool rows = l->rank == 1 || l->dim[l->rank - 1] % 64 == 0;
    put(&w,
        "struct NAME {\ntypedef %s P;\ntypedef %s INDEX;\nenum { N = %d, STRIDE_AT = %d, DRAW_AT = %d };\n"
        "template <bool WHOLE> static FN_MEMBER void run(const P &p, INDEX at, uint64_t seed) {\n"
        "const strip_place<N, %d, %s, INDEX> w(p, at);\n",
        l->large ? "om_gpu_strip_large" : "om_gpu_strip", l->total <= INDEX_MOST ? "uint32_t" : "int64_t",
        p->elem_bytes <= FOUR_UPTO ? 4 : 1, l->stride_at, l->draw_at, l->rank, rows ? "true" : "false");
    for (int i = 0; i < p->n_in; i++) {
        put(&w, "LOAD(v%d, %s, %s, %d, ", i, class_type[p->cls[i]], storage(l->dtype[i]), i);
        offset_put(&w, l, i);
        put(&w, ")\n");
    }
    for (int i = 0; i < p->n_insn; i++) insn_put(&w, p, &p->insn[i]);
    for (int i = 0; i < p->n_out; i++) {
        put(&w, "STORE(v%d, %s, %d, ", p->out_val[i], storage(l->dtype[p->n_in + i]), p->n_in + i);
        offset_put(&w, l, p->n_in + i);
        put(&w, ")\n");
    }
    put(&w, "}\n};\n");
    return w.full ? 0 : w.n;
}
