/* conv.c - torch's convolution (oneDNN inside libtorch_cpu) as the engine's service, as gemm.c has it for products.
 *
 * Torch makes the results itself; they are copied to where the engine wants them. Nothing here requires a gradient, so
 * what dispatcher there is between the C functions and the kernels adds nothing; a convolution of this form is none
 * that autocast casts.
 */
#include "python/pymodule.h"

#include "python/shim.h"

#include <dlfcn.h>

typedef om_torch_tensor tensor;

static int32_t (*copy)(tensor self, tensor from, int32_t non_blocking);
static int32_t (*convolution)(tensor x, tensor w, tensor *bias, const int64_t *stride, int64_t n_stride,
                              const int64_t *pad, int64_t n_pad, const int64_t *dilation, int64_t n_dilation,
                              int32_t transposed, const int64_t *out_pad, int64_t n_out_pad, int64_t groups,
                              tensor *y);
static int32_t (*convolution_backward)(tensor dy, tensor x, tensor w, const int64_t **bias_size, int64_t n_bias,
                                       const int64_t *stride, int64_t n_stride, const int64_t *pad, int64_t n_pad,
                                       const int64_t *dilation, int64_t n_dilation, int32_t transposed,
                                       const int64_t *out_pad, int64_t n_out_pad, int64_t groups,
                                       const int32_t *mask, int64_t n_mask, tensor *dx, tensor *dw, tensor *db);

static bool put(tensor from, const om_tensor *to) {
    tensor t = NULL;
    const bool ok = from && om_torch_is(from, to->dtype) && om_torch_borrow(to, &t) && copy(t, from, 0) == 0;
    om_torch_drop(t);
    return ok;
}

static bool conv(void *user, const om_conv_call *c) {
    (void)user;
    tensor x = NULL, w = NULL, bias = NULL, y = NULL, made[3] = {NULL, NULL, NULL};
    const int64_t n = c->x.rank - 2, none[3] = {0}, *outputs = &c->w.dim[0];
    bool ok = om_torch_borrow(&c->x, &x) && om_torch_borrow(&c->w, &w);
    if (ok && c->bias.data) ok = om_torch_borrow(&c->bias, &bias);
    if (ok && c->grad) {
        const om_tensor *to[3] = {&c->dx, &c->dw, &c->db};
        const int32_t mask[3] = {c->dx.data != NULL, c->dw.data != NULL, c->db.data != NULL};
        ok = om_torch_borrow(&c->y, &y) &&
             convolution_backward(y, x, w, mask[2] ? &outputs : NULL, mask[2], c->stride, n, c->pad, n, c->dilation, n,
                                  0, none, n, c->groups, mask, 3, &made[0], &made[1], &made[2]) == 0;
        for (int i = 0; i < 3 && ok; i++) ok = !mask[i] || put(made[i], to[i]);
    } else if (ok) {
        ok = convolution(x, w, bias ? &bias : NULL, c->stride, n, c->pad, n, c->dilation, n, 0, none, n, c->groups,
                         &made[0]) == 0 && put(made[0], &c->y);
    }
    tensor all[] = {x, w, bias, y, made[0], made[1], made[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) om_torch_drop(all[i]);
    return ok;
}

void om_torch_conv_fill(void *libtorch, om_services *sv) {
    *(void **)&copy = dlsym(libtorch, "aoti_torch_copy_");
    *(void **)&convolution = dlsym(libtorch, "aoti_torch_cpu_convolution");
    *(void **)&convolution_backward = dlsym(libtorch, "aoti_torch_cpu_convolution_backward");
    if (copy && convolution && convolution_backward) sv->conv = conv;
}
