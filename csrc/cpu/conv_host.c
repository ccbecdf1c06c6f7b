/* conv_host.c - convolutions that the host does better (oneDNN inside torch), and asking it.
 *
 * Measured against conv.c, on AVX-512 with AVX512_BF16 (tests/bench/bench_conv.py). Own products win where patches cost
 * nothing (one tap, stride 1), where they cost little beside the products (few channels, windows that do not overlap),
 * and in the weights' gradient of a net's first layer. In f32 the host wins where windows overlap, by building no
 * patches; in bf16 by products at twice the rate. The choice depends on sizes, type and instruction set alone.
 */
#include "cpu/conv.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"

static const double HOST_LEAST = 1e6; /* products: below it a call to the host costs more than it saves */

static bool host_better(const om_conv_geo *g, int dtype, bool grad) {
    const double work = (double)g->n * (double)g->o * (double)g->pixels * (double)(g->cg * g->taps);
    const bool overlap = g->stride[0] < g->k[0] || g->stride[1] < g->k[1] || g->stride[2] < g->k[2];
    const int64_t depth = g->cg * g->taps;
    if (work < HOST_LEAST || g->cg * g->og == 1) return false;
    if (dtype == OM_BF16 && om_isa_bf16()) return grad ? g->cg >= 8 : depth >= 64;
    if (om_isa() == OM_ISA_GENERIC) return true;
    return overlap && depth >= 64 && g->cg >= (grad ? 8 : 1) && (!grad || (g->og <= 128 && g->stride[2] == 1));
}

bool om_conv_host(om_ctx *cx, const om_conv_geo *g, int dtype, bool pointwise, bool grad) {
    const int allowed = om_gemm_host();
    if (!cx->sv.conv || allowed == OM_HOST_NEVER || (dtype != OM_F32 && dtype != OM_BF16)) return false;
    if (!g->n || !g->o || !g->pixels || !g->cg || !g->plane) return false;
    for (int i = 0; i < 3; i++) { /* the same padding behind as before */
        const int64_t room = g->in[i] + 2 * g->lo[i] - g->dil[i] * (g->k[i] - 1) - 1;
        if (room < 0 || room / g->stride[i] + 1 != g->out[i]) return false;
    }
    return allowed == OM_HOST_ALWAYS || (!pointwise && host_better(g, dtype, grad));
}

bool om_conv_host_run(om_ctx *cx, const om_args *a, const om_conv_geo *g, const bool *want) {
    const bool grad = want != NULL;
    om_conv_call c = {.groups = g->groups, .grad = grad, .x = a->in[grad], .w = a->in[1 + grad]};
    const int axes = c.x.rank - 2;
    for (int i = 0; i < axes; i++) {
        const int at = 3 - axes + i;
        c.stride[i] = g->stride[at], c.pad[i] = g->lo[at], c.dilation[i] = g->dil[at];
    }
    if (want) {
        c.y = a->in[0];
        if (want[0]) c.dx = a->out[0];
        if (want[1]) c.dw = a->out[1];
        if (want[2]) c.db = a->out[2];
    } else {
        c.y = a->out[0];
        if (a->n_in > 2 && a->in[2].dtype) c.bias = a->in[2];
    }
    return cx->sv.conv(cx->sv.user, &c);
}
