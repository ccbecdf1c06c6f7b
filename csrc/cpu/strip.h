/* strip.h - the pointwise engine: small programs over strips of a few hundred elements that live in L1.
 *
 * A program is a list of instructions in SSA form. Values 0 .. n_in-1 are the operands, each instruction defines the
 * next ones. A value belongs to one of four register classes, the type it is computed in:
 *     F float (f32, bf16, f16 storage)    D double (f64)    I int64 (all integers; bool in arithmetic)    B uint8 0 / 1
 *     (bool)
 * Operands of any strides and storage types are loaded into their class at the start of a strip, outputs are stored at
 * its end; when the storage type is the class's own and the strip is contiguous there is no copy at all: the value's
 * pointer is the tensor's memory. A plain operator is a program of one instruction, so it runs at memory speed; a fused
 * chain reads and writes memory once.
 *
 * Iteration: axes that are contiguous for all tensors are merged. A long innermost axis is cut into strips; otherwise
 * strips run over the flat index and operands that do not follow it are gathered. Strips are independent, one
 * parallel_for runs them all.
 */
#ifndef OM_CPU_STRIP_H
#define OM_CPU_STRIP_H

#include "ops/strip.h"
#include "cpu/kernels_isa.h"

enum {
    OM_STRIP_INSNS = 160,
    OM_STRIP_BYTES = 28 << 10, /* registers of one thread: on its stack, in L1 */
    /* elements of a strip, at most; always a multiple of OM_STRIP_UNIT unless it is a row's end */
    OM_STRIP_MAX = 1024,
    OM_STRIP_UNIT = 64,
    OM_STRIP_ELEM = OM_STRIP_BYTES / OM_STRIP_UNIT, /* most register bytes per element */
};

typedef struct om_insn {
    uint8_t op, cls;       /* kernel = table[op][cls]; cls is the class of the operands (of x and y for where) */
    uint8_t dst, a, b, c;  /* values; dropout: b = index into draw[] */
} om_insn;

typedef struct om_strip_draw { uint64_t rng; uint32_t keep_below; double scale; bool all; } om_strip_draw;

typedef struct om_strip_prog {
    uint16_t n_in, n_out, n_val, n_insn, n_draw;
    uint16_t elem_bytes;             /* registers: bytes per element of a strip */
    uint16_t cost;                   /* of one element, about 1/20 ns: how finely the work may be shared out */
    uint8_t in_dtype[OM_STRIP_IN], out_dtype[OM_STRIP_OUT], out_val[OM_STRIP_OUT];
    bool uniform[OM_STRIP_IN];       /* operand is one element: filled once per thread; its register is never reused */
    /* out_val may be computed straight into the output's memory, even when that is an operand's */
    bool direct[OM_STRIP_OUT];
    uint8_t *cls;                    /* per value */
    uint16_t *reg;                   /* per value: its register starts at reg * strip length bytes */
    om_insn *insn;
    om_strip_draw *draw;
} om_strip_prog;

/* Where a program lies while it is compiled. */
typedef struct om_strip_room {
    uint8_t cls[OM_STRIP_VALUES];
    uint16_t reg[OM_STRIP_VALUES];
    om_insn insn[OM_STRIP_INSNS];
    om_strip_draw draw[OM_STRIP_DRAWS];
} om_strip_room;

/* --- building (strip.c) ---------------------------------------------------------------------------- */

static inline int om_strip_class(int dtype) {
    return dtype == OM_BOOL ? OM_STRIP_B : dtype == OM_F64 ? OM_STRIP_D : om_is_float(dtype) ? OM_STRIP_F : OM_STRIP_I;
}

/* The program lies in `room`. OM_UNSUPPORTED: too large. */
om_status om_strip_compile(om_ctx *cx, const om_strip_text *t, const uint8_t *in_dtype, const bool *uniform,
                           om_strip_room *room, om_strip_prog *p);
bool om_strip_fits(const om_strip_text *t, const uint8_t *in_dtype, const bool *uniform);

/* --- running (kernels/strip.k.c) ------------------------------------------------------------------- */

typedef struct om_strip_arg {
    char *data;
    uint8_t how, size;          /* OM_STRIP_DIRECT..; bytes of an element */
    int64_t stride[OM_RANK];    /* elements, on the merged axes */
} om_strip_arg;

enum {
    OM_STRIP_UNIFORM, OM_STRIP_DIRECT, OM_STRIP_MOVE /* one stride over the strip */,
    OM_STRIP_WALK /* flat strips only */
};

typedef struct om_strip_job {
    const om_strip_prog *prog;
    uint64_t seed;
    int rank;                   /* merged axes, >= 1 */
    bool flat;                  /* strips over the flat index, else over the innermost axis */
    int64_t dim[OM_RANK], total;
    int64_t strip, per_row;     /* elements of a strip; strips per row (not flat) */
    const om_strip_arg *in, *out;
} om_strip_job;

struct om_strip_kernels {
    void (*run)(const om_strip_job *job, int64_t begin, int64_t end); /* strips [begin, end) */
    /* dst[i] = src[i * stride] in the class of dtype, i < n; and back, rounded to nearest even */
    void (*load[OM_N_DTYPES])(const void *src, int64_t stride, int64_t n, void *dst);
    void (*store[OM_N_DTYPES])(const void *src, int64_t n, void *dst, int64_t stride);
};
OM_DECLARE_ISA(struct om_strip_kernels, om_strip);

#endif
