/* gemm.c - torch's bf16 matrix product (oneDNN inside libtorch_cpu) as the engine's service.
 *
 * These functions reach the CPU kernels directly: no autograd, no autocast, no GIL. The prototypes are restated here
 * (torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h); a missing symbol or a failing call means that the engine's
 * own kernel runs.
 */
#include "python/pymodule.h"

#include "python/shim.h"

#include <dlfcn.h>

static int32_t (*mm_out)(om_torch_tensor out, om_torch_tensor a, om_torch_tensor b);
static int32_t (*addmm_out)(om_torch_tensor out, om_torch_tensor self, om_torch_tensor a, om_torch_tensor b,
                            double beta, double alpha);

static bool borrow(const void *data, int64_t rows, int64_t cols, int64_t rs, int64_t cs, om_torch_tensor *out) {
    const om_tensor t = {
        .data = (void *)(uintptr_t)data, .dtype = OM_BF16, .rank = 2, .dim = {rows, cols}, .stride = {rs, cs}};
    return om_torch_borrow(&t, out);
}

static bool gemm_bf16(void *user, int64_t m, int64_t n, int64_t k, const void *a, int64_t rsa, int64_t csa,
                      const void *b, int64_t rsb, int64_t csb, int beta, void *c, int64_t rsc, const void *bias) {
    (void)user;
    om_torch_tensor ta = NULL, tb = NULL, tc = NULL, add = NULL;
    bool ok = borrow(a, m, k, rsa, csa, &ta) && borrow(b, k, n, rsb, csb, &tb) && borrow(c, m, n, rsc, 1, &tc);
    if (ok && bias && beta) ok = false; /* two addends: the engine's own kernel has both */
    if (ok && bias) ok = borrow(bias, m, n, 0, 1, &add) && addmm_out(tc, add, ta, tb, 1, 1) == 0;
    else if (ok && beta) ok = addmm_out(tc, tc, ta, tb, 1, 1) == 0;
    else if (ok) ok = mm_out(tc, ta, tb) == 0;
    om_torch_drop(ta), om_torch_drop(tb), om_torch_drop(tc), om_torch_drop(add);
    return ok;
}

void om_torch_gemm_fill(void *libtorch, om_services *sv) {
    *(void **)&mm_out = dlsym(libtorch, "aoti_torch_cpu_mm_out");
    *(void **)&addmm_out = dlsym(libtorch, "aoti_torch_cpu_addmm_out");
    if (mm_out && addmm_out) sv->gemm_bf16 = gemm_bf16;
}
