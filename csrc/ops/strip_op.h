/* strip_op.h - numbers of the instructions of strip programs, in C and CUDA. */
#ifndef OM_OPS_STRIP_OP_H
#define OM_OPS_STRIP_OP_H

/* The rows of pointwise.def, then conversions. */
enum {
#define PW(name, arity, rule, fx, ix, grad, ...) OM_S_##name,
#include "graph/pointwise.def"
#undef PW
    OM_N_PW
};
enum {
    OM_S_to_f = OM_N_PW, OM_S_to_d, OM_S_to_i, OM_S_to_b,          /* from the instruction's class */
    OM_S_to_i32,                                                   /* from class F or D, to class I */
    OM_S_round_bf16, OM_S_round_f16,                               /* class F */
    OM_S_wrap_i32, OM_S_wrap_i16, OM_S_wrap_i8, OM_S_wrap_u8,      /* class I */
    OM_N_S
};

/* Register classes (cpu/strip.h). */
enum { OM_STRIP_F, OM_STRIP_D, OM_STRIP_I, OM_STRIP_B, OM_STRIP_CLASSES };

#endif
