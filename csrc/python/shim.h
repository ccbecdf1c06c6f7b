/* shim.h - handles of tensors in torch's stable C functions (torch/csrc/inductor/aoti_torch/c/shim.h), which borrow the
 * engine's memory for the length of one call. */
#ifndef OM_SHIM_H
#define OM_SHIM_H

#include "ortmodule.h"

typedef struct AtenTensorOpaque *om_torch_tensor; /* owned: om_torch_drop */

bool om_torch_open(void *libtorch); /* false: a function is missing, and none of the others may be called */
/* t: on the CPU, f32 or bf16, any strides. *out: NULL before; set when it returns true */
bool om_torch_borrow(const om_tensor *t, om_torch_tensor *out);
bool om_torch_is(om_torch_tensor x, om_dtype dtype); /* f32 or bf16 */
void om_torch_drop(om_torch_tensor x);               /* NULL is fine */

#endif
