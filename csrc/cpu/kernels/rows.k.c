/* rows.k.c - softmax, log-softmax, layer norm and RMS norm of one row, forward and backward, in float and double.
 *
 * Each is two or three passes over a row that fits L1 or L2: statistics first, then the result. The variance of layer
 * norm is taken around the mean (two passes), not from the sum of squares, which cancels. See rows_type.h for the
 * loops.
 */
#include "cpu/rows.h"
#include "cpu/kernels/vmath.h"

#define SIMD _Pragma("omp simd")
enum { BLOCK = 512 };
#define PRAGMA_(p) _Pragma(#p)
#define SIMD_SUM(s) PRAGMA_(omp simd reduction(+ : s))

#define T float
#define R(name) name##_f32
#define EXP vm_exp_neg
#define SQRT sqrtf
#include "cpu/kernels/rows_type.h"
#undef T
#undef R
#undef EXP
#undef SQRT
#define T double
#define R(name) name##_f64
#define EXP exp
#define SQRT sqrt
#include "cpu/kernels/rows_type.h"

#define BOTH(name) .name = {name##_f32, name##_f64}
const struct om_rows_kernels OM_ISA_NAME(om_rows) = {
    BOTH(softmax), BOTH(softmax_grad), BOTH(log_softmax), BOTH(log_softmax_grad),
    BOTH(softmax_cols), BOTH(softmax_grad_cols), BOTH(log_softmax_cols), BOTH(log_softmax_grad_cols),
    BOTH(layer_norm), BOTH(rms_norm), BOTH(layer_norm_grad), BOTH(rms_norm_grad),
};
