/* gemm.c - torch's bf16 matrix product (oneDNN inside libtorch_cpu) as the engine's service.
 *
 * Torch's stable C functions take tensor handles; ours borrow the engine's memory for the length of one call. They
 * reach the CPU kernels directly: no autograd, no autocast, no GIL. The prototypes are restated here
 * (torch/csrc/inductor/aoti_torch/c/shim.h and generated/c_shim_cpu.h); a missing symbol or a failing call means that
 * the engine's own kernel runs.
 */
#include "python/pymodule.h"

#include <dlfcn.h>

typedef struct AtenTensorOpaque *tensor; /* owned: given back by tensor_delete */

static int32_t (*tensor_from_blob)(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                                   int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                   tensor *out);
static int32_t (*tensor_delete)(tensor t);
static int32_t (*mm_out)(tensor out, tensor a, tensor b);
static int32_t (*addmm_out)(tensor out, tensor self, tensor a, tensor b, double beta, double alpha);
static int32_t dtype_bf16, device_cpu;

static bool borrow(const void *data, int64_t rows, int64_t cols, int64_t rs, int64_t cs, tensor *out) {
    return tensor_from_blob((void *)data, 2, (int64_t[]){rows, cols}, (int64_t[]){rs, cs}, 0, dtype_bf16, device_cpu, 0,
                            out) == 0;
}

static bool gemm_bf16(void *user, int64_t m, int64_t n, int64_t k, const void *a, int64_t rsa, int64_t csa,
                      const void *b, int64_t rsb, int64_t csb, int beta, void *c, int64_t rsc, const void *bias) {
    (void)user;
    tensor ta = NULL, tb = NULL, tc = NULL, add = NULL;
    bool ok = borrow(a, m, k, rsa, csa, &ta) && borrow(b, k, n, rsb, csb, &tb) && borrow(c, m, n, rsc, 1, &tc);
    if (ok && bias && beta) ok = false; /* two addends: the engine's own kernel has both */
    if (ok && bias) ok = borrow(bias, m, n, 0, 1, &add) && addmm_out(tc, add, ta, tb, 1, 1) == 0;
    else if (ok && beta) ok = addmm_out(tc, tc, ta, tb, 1, 1) == 0;
    else if (ok) ok = mm_out(tc, ta, tb) == 0;
    if (ta) tensor_delete(ta);
    if (tb) tensor_delete(tb);
    if (tc) tensor_delete(tc);
    if (add) tensor_delete(add);
    return ok;
}

void om_torch_gemm_fill(void *libtorch, om_services *sv) {
    int32_t (*number)(void);
    *(void **)&tensor_from_blob = dlsym(libtorch, "aoti_torch_create_tensor_from_blob");
    *(void **)&tensor_delete = dlsym(libtorch, "aoti_torch_delete_tensor_object");
    *(void **)&mm_out = dlsym(libtorch, "aoti_torch_cpu_mm_out");
    *(void **)&addmm_out = dlsym(libtorch, "aoti_torch_cpu_addmm_out");
    *(void **)&number = dlsym(libtorch, "aoti_torch_dtype_bfloat16");
    if (!number || !tensor_from_blob || !tensor_delete || !mm_out || !addmm_out) return;
    dtype_bf16 = number();
    *(void **)&number = dlsym(libtorch, "aoti_torch_device_type_cpu");
    if (!number) return;
    device_cpu = number();
    sv->gemm_bf16 = gemm_bf16;
}
