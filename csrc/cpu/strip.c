/* strip.c - strip programs on the CPU: compilation to instructions and registers, and the run over tensors.
 *
 * Both are done once per plan, from dtypes, sizes and strides: each statement becomes one instruction plus conversions,
 * in SSA form, then registers are assigned in one sweep: a value's register is free again after its last use, so an
 * instruction may overwrite an operand that dies with it. A run puts addresses in and starts.
 *
 * In-place. An output may share memory with an operand of equal size (the plan's in-place). Writing an output straight
 * to memory is then right only if no operand is read by a later instruction; otherwise it is computed in a register and
 * stored at the strip's end.
 */
#include "cpu/strip.h"
#include "cpu/copy.h"
#include "cpu/cpu.h"
#include "cpu/philox.h"

#define NUM OM_PW_NUM
#define CMP OM_PW_CMP
#define PRED OM_PW_PRED
#define LOG OM_PW_LOG
#define CAST OM_PW_CAST
#define DRAW OM_PW_DRAW

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
    case OM_S_floor: case OM_S_ceil: case OM_S_round: case OM_S_trunc: return 2;
    default: /* a function of floats that nobody has measured */
        if (op < OM_N_PW && om_pw_rows[op].rule == OM_PW_FLT && om_pw_rows[op].arity == 1)
            return cls == OM_STRIP_D ? 250 : 20;
        return 2;
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

/* What an integer does not hold of a float is left to the processor, as in PyTorch's C++, and so is by how many bits it
 * gets there. */
static int emit_cast(compiler *c, int v, int dtype) {
    const int from = c->p->cls[v], to = om_strip_class(dtype);
    const bool by_32 = dtype == OM_I32 || dtype == OM_I16 || dtype == OM_I8;
    if (by_32 && (from == OM_STRIP_F || from == OM_STRIP_D)) return emit(c, OM_S_to_i32, from, to, v, v, v);
    return emit_to(c, v, to);
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
                           om_strip_room *room, om_strip_prog *p) {
    uint8_t vtype[OM_STRIP_VALUES], at[OM_STRIP_VALUES] = {0}, uses[OM_STRIP_VALUES] = {0};
    compiler c = {cx, p, false};
    OM_TRY(om_strip_types(cx, t, in_dtype, vtype));
    *p = (om_strip_prog){.cls = room->cls, .reg = room->reg, .insn = room->insn, .draw = room->draw};
    p->n_in = (uint16_t)t->n_in;
    p->n_out = (uint16_t)t->n_out;
    p->n_val = (uint16_t)t->n_in;
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
            const int from = vtype[s->arg[0]];
            v = emit_cast(&c, a, s->dtype);
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
            if (uses[id] && (rule == NUM || rule == LOG) && cls == OM_STRIP_I) v = emit_narrow(&c, v, s->dtype, false);
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

/* Everything of a run but addresses and seed. */
typedef struct strip_prep {
    om_strip_prog prog;
    om_strip_job job;
    om_strip_arg *arg; /* operands, then outputs */
    int64_t n_strips, grain;
    const om_copy_job *copy; /* of a lone cast for which copies know a better way; else NULL */
} strip_prep;

static bool prog_keep(om_arena *mem, om_strip_prog *p) {
    p->cls = om_arena_copy(mem, p->cls, p->n_val * sizeof *p->cls);
    p->reg = om_arena_copy(mem, p->reg, p->n_val * sizeof *p->reg);
    p->insn = om_arena_copy(mem, p->insn, p->n_insn * sizeof *p->insn);
    p->draw = om_arena_copy(mem, p->draw, p->n_draw * sizeof *p->draw);
    return p->cls && p->reg && p->insn && p->draw;
}

static om_status job_prepare(om_ctx *cx, const om_strip_prog *p, const om_tensor *in, const om_tensor *out,
                             strip_prep *prep) {
    om_strip_job *j = &prep->job;
    const om_tensor *shape = &out[0];
    const int n_arg = p->n_in + p->n_out;
    int64_t stride[OM_STRIP_IN + OM_STRIP_OUT][OM_RANK] = {{0}};
    *j = (om_strip_job){.prog = p, .total = 1};

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
        if (shape->dim[i] == 0) return OM_OK; /* no strip */
        if (shape->dim[i] == 1) continue;
        bool merge = j->rank > 0;
        for (int k = 0; merge && k < n_arg; k++) {
            const om_strip_arg *a = &prep->arg[k];
            merge = a->stride[j->rank - 1] == stride[k][i] * shape->dim[i];
        }
        if (!merge) j->dim[j->rank++] = 1;
        j->dim[j->rank - 1] *= shape->dim[i];
        j->total *= shape->dim[i];
        for (int k = 0; k < n_arg; k++) prep->arg[k].stride[j->rank - 1] = stride[k][i];
    }
    if (!j->rank) j->dim[j->rank++] = 1; /* one element */

    const int last = j->rank - 1;
    const int64_t room = OM_STRIP_BYTES / (p->elem_bytes ? p->elem_bytes : 1) / OM_STRIP_UNIT * OM_STRIP_UNIT;
    j->strip = room < OM_STRIP_MAX ? room : OM_STRIP_MAX;
    j->flat = j->rank > 1 && j->dim[last] < ROW_MIN;
    if (j->flat) {
        prep->n_strips = (j->total + j->strip - 1) / j->strip;
    } else {
        j->per_row = (j->dim[last] + j->strip - 1) / j->strip;
        j->strip = ((j->dim[last] + j->per_row - 1) / j->per_row + OM_STRIP_UNIT - 1) / OM_STRIP_UNIT * OM_STRIP_UNIT;
        prep->n_strips = j->total / j->dim[last] * j->per_row;
    }

    for (int k = 0; k < n_arg; k++) {
        const bool is_in = k < p->n_in;
        const om_tensor *t = is_in ? &in[k] : &out[k - p->n_in];
        om_strip_arg *a = &prep->arg[k];
        a->size = (uint8_t)om_dtype_size(t->dtype);
        bool line = true; /* one stride over the whole flat index */
        for (int i = 0; i < last; i++) line &= a->stride[i] == a->stride[i + 1] * j->dim[i + 1];
        const int cls = is_in ? p->cls[k] : p->cls[p->out_val[k - p->n_in]];
        if (is_in && p->uniform[k]) a->how = OM_STRIP_UNIFORM;
        else if (j->flat && !line) a->how = OM_STRIP_WALK;
        else if (a->stride[last] == 1 && t->dtype != OM_BF16 && t->dtype != OM_F16 && a->size == class_size[cls])
            a->how = OM_STRIP_DIRECT;
        else a->how = OM_STRIP_MOVE;
    }
    for (int k = 0; k < p->n_out; k++) {
        bool ok = p->out_val[k] >= p->n_in;
        for (int i = 0; i < k; i++) ok &= p->out_val[i] != p->out_val[k];
        om_strip_arg *o = &prep->arg[p->n_in + k];
        if (!ok && o->how == OM_STRIP_DIRECT) o->how = OM_STRIP_MOVE;
    }
    prep->grain = 400000 / (p->cost * j->strip + 1) + 1; /* about 20 us a piece */
    return OM_OK;
}

/* A lone cast that would be walked, or one of autocast's, of a weight to bf16 or of its gradient back: a copy converts
 * from tensor to tensor, a strip by way of a register, and a large result goes past the caches. Of other types some
 * copies are faster than strips and some slower, to f16 twice. */
static bool copy_better(const strip_prep *p) {
    const int from = p->prog.in_dtype[0], to = p->prog.out_dtype[0];
    return p->arg[0].how == OM_STRIP_WALK || (from == OM_F32 && to == OM_BF16) || (from == OM_BF16 && to == OM_F32);
}

om_status om_cpu_prepare_strip(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    om_strip_text t;
    uint8_t dtype[OM_STRIP_IN];
    bool uniform[OM_STRIP_IN];
    for (int i = 0; i < a->n_in; i++) {
        dtype[i] = a->in[i].dtype;
        uniform[i] = om_numel(&a->in[i]) == 1;
    }
    om_strip_room room;
    strip_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!p) return cx->status;
    OM_TRY(om_strip_of_node(cx, a->node, a->attr, a->out[0].dtype, &t));
    OM_TRY(om_strip_compile(cx, &t, dtype, uniform, &room, &p->prog));
    p->arg = om_arena_alloc(mem, (size_t)(a->n_in + a->n_out) * sizeof *p->arg);
    if (!p->arg || !prog_keep(mem, &p->prog)) return cx->status;
    *prep = p;
    OM_TRY(job_prepare(cx, &p->prog, a->in, a->out, p));
    if (!om_is(a->node, cast) || !p->n_strips || a->bounded || !copy_better(p)) return OM_OK;
    om_copy_job *copy = om_arena_alloc(mem, sizeof *copy);
    p->copy = copy;
    return copy ? om_copy_prepared(cx, mem, &a->in[0], &a->out[0], copy) : cx->status;
}

/* Rows past the count are left out: the outermost axis becomes shorter. How many strips are left. */
static int64_t strips_counted(const om_args *a, const strip_prep *prep, om_strip_job *j) {
    const int64_t all = a->bounded[a->n_in] == 0 ? a->out[0].dim[0] : 0, count = *a->count;
    if (all <= 1 || count >= all) return prep->n_strips;
    if (count <= 0) return 0;
    const int last = j->rank - 1;
    j->dim[0] = j->dim[0] / all * count;
    j->total = j->total / all * count;
    if (j->flat) return (j->total + j->strip - 1) / j->strip;
    if (!last) j->per_row = (j->dim[0] + j->strip - 1) / j->strip;
    return j->total / j->dim[last] * j->per_row;
}

om_status om_cpu_run_strip(om_ctx *cx, const om_args *a) {
    const strip_prep *prep = a->prep;
    const om_strip_prog *p = &prep->prog;
    om_strip_arg arg[OM_STRIP_IN + OM_STRIP_OUT], *out = arg + p->n_in;
    if (!prep->n_strips) return OM_OK;
    if (prep->copy) {
        om_copy_run(cx, prep->copy, a->in[0].data, a->out[0].data);
        return OM_OK;
    }
    memcpy(arg, prep->arg, (size_t)(p->n_in + p->n_out) * sizeof *arg);
    for (int k = 0; k < p->n_in; k++) arg[k].data = a->in[k].data;
    for (int k = 0; k < p->n_out; k++) {
        out[k].data = a->out[k].data;
        if (p->direct[k] || out[k].how != OM_STRIP_DIRECT) continue;
        const span o = tensor_span(&a->out[k]);
        for (int i = 0; i < p->n_in; i++) {
            const span s = tensor_span(&a->in[i]);
            if (s.hi > o.lo && o.hi > s.lo) out[k].how = OM_STRIP_MOVE;
        }
    }
    om_strip_job j = prep->job;
    if (p->n_draw) j.seed = a->scalars->seed;
    j.in = arg;
    j.out = out;
    const int64_t n_strips = a->count && !a->past ? strips_counted(a, prep, &j) : prep->n_strips;
    om_parallel_for(cx, n_strips, prep->grain, run_strips, &j);
    return OM_OK;
}

bool om_strip_fits(const om_strip_text *t, const uint8_t *in_dtype, const bool *uniform) {
    om_ctx quiet = {.status = OM_OK}; /* "too large" is an answer here, not a failure */
    om_strip_room room;
    om_strip_prog p;
    return om_strip_compile(&quiet, t, in_dtype, uniform, &room, &p) == OM_OK;
}
