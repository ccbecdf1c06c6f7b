/* taps.k.c - sums over the taps of a window for many positions at once, and its adjoint for the window's weights. */
#include "cpu/taps.h"

#define OM_VEC_BITS 32
#include "cpu/kernels/vec.h"
#include "cpu/kernels/taps_type.h"
#undef OM_VEC_BITS
#define OM_VEC_BITS 64
#include "cpu/kernels/vec.h"
#include "cpu/kernels/taps_type.h"

#define TAPS_TYPE(suf) {.sum = taps_sum_##suf, .dot = taps_dot_##suf, .total = taps_total_##suf}
const om_taps_kernels OM_ISA_NAME(om_taps) = {TAPS_TYPE(f32), TAPS_TYPE(f64)};
