/* conv_host.c - convolutions that the host does better (oneDNN inside torch), and asking it.
 *
 * Measured against conv.c, on AVX-512 with AVX512_BF16 (tests/bench/bench_conv.py). Own products win where patches cost
 * nothing (one tap, stride 1), where they cost little beside the products (few channels, windows that do not overlap),
 * and in the weights' gradient of a net's first layer. In f32 the host wins where windows overlap, by building no
 * patches; in bf16 by products at twice the rate. The choice depends on sizes, type and instruction set alone.
 *
 * Images lie as NCHW in the engine. oneDNN's bf16 products want channels together: given NCHW it rearranges images
 * itself, slower than our copies do. So where images are large beside the filters it is given copies with channels
 * last (the filters as they are), and what it makes of them is copied back.
 */
#include "cpu/conv.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"

static const double HOST_LEAST = 1e6; /* products: below it a call to the host costs more than it saves */
enum { HOST_FILTERS = 4 }; /* with channels last, rearranging a filter's number costs as much as four of images save */

static bool host_better(const om_conv_geo *g, int dtype, bool grad) {
    const double work = (double)g->n * (double)g->o * (double)g->pixels * (double)(g->cg * g->taps);
    const bool overlap = g->w.stride[0] < g->w.k[0] || g->w.stride[1] < g->w.k[1] || g->w.stride[2] < g->w.k[2];
    const int64_t depth = g->cg * g->taps;
    if (work < HOST_LEAST || g->cg * g->og == 1) return false;
    if (dtype == OM_BF16 && om_isa_bf16()) return grad ? g->cg >= 8 : depth >= 64;
    if (om_isa() == OM_ISA_GENERIC) return true;
    return overlap && depth >= 64 && g->cg >= (grad ? 8 : 1) && (!grad || (g->og <= 128 && g->w.stride[2] == 1));
}

bool om_conv_host(om_ctx *cx, const om_conv_geo *g, int dtype, bool pointwise, bool grad) {
    const int allowed = om_gemm_host();
    if (!cx->sv.conv || allowed == OM_HOST_NEVER || (dtype != OM_F32 && dtype != OM_BF16)) return false;
    if (!g->n || !g->o || !g->pixels || !g->cg || !g->plane) return false;
    om_window even = g->w; /* the same padding behind as before */
    memcpy(even.hi, even.lo, sizeof even.hi);
    for (int i = 0; i < 3; i++)
        if (om_window_fits(&even, i, g->in[i]) != g->out[i]) return false;
    return allowed == OM_HOST_ALWAYS || (!pointwise && host_better(g, dtype, grad));
}

static bool host_last(const om_conv_geo *g, int dtype) {
    const int64_t images = g->n * (g->c * g->plane + g->o * g->pixels), filters = g->o * g->cg * g->taps;
    return dtype == OM_BF16 && om_isa_bf16() && g->groups == 1 && images > filters * (g->taps > 1 ? HOST_FILTERS : 1);
}

/* A copy of an image (n, c, height, width) with channels last, at `h->scratch`, which grows. */
static om_conv_last host_image(const om_tensor *t, om_conv_host_plan *h) {
    const int64_t *d = t->dim, stride[] = {d[1] * d[2] * d[3], 1, d[1] * d[3], d[1]};
    om_conv_last to = {.at = h->scratch, .t = *t};
    memcpy(to.t.stride, stride, sizeof stride);
    h->scratch += (om_tensor_bytes(t) + 63) & ~(int64_t)63;
    return to;
}

void om_conv_host_layout(const om_args *a, const om_conv_geo *g, bool grad, om_conv_host_plan *h) {
    h->scratch = 0; /* the host makes its results beside the plan's memory, which is to know of them */
    for (int i = 0; i < a->n_out; i++) h->scratch += (om_tensor_bytes(&a->out[i]) + 63) & ~(int64_t)63;
    h->last = a->in[grad].rank == 4 && host_last(g, a->in[grad].dtype);
    if (!h->last) return;
    h->x = host_image(&a->in[grad], h);
    h->y = host_image(grad ? &a->in[0] : &a->out[0], h);
    if (grad && h->want[0]) h->dx = host_image(&a->out[0], h);
}

om_status om_conv_host_prepare(om_ctx *cx, om_arena *mem, const om_args *a, bool grad, om_conv_host_plan *h) {
    if (!h->last) return OM_OK;
    if (!grad || h->want[1]) OM_TRY(om_copy_prepared(cx, mem, &a->in[grad], &h->x.t, &h->x.copy));
    if (grad) OM_TRY(om_copy_prepared(cx, mem, &a->in[0], &h->y.t, &h->y.copy));
    else OM_TRY(om_copy_prepared(cx, mem, &h->y.t, &a->out[0], &h->y.copy));
    return h->want[0] ? om_copy_prepared(cx, mem, &h->dx.t, &a->out[0], &h->dx.copy) : OM_OK;
}

/* The copy of an image that is read; one that is not (no job) counts for its layout alone. */
static om_tensor host_read(om_ctx *cx, const om_args *a, const om_conv_last *l, const om_tensor *from) {
    om_tensor t = l->t;
    t.data = (char *)a->scratch + l->at;
    om_copy_run(cx, &l->copy, from->data, t.data);
    return t;
}

bool om_conv_host_run(om_ctx *cx, const om_args *a, const om_conv_geo *g, bool grad, const om_conv_host_plan *h) {
    const bool *want = h->want;
    om_conv_call c = {.groups = g->groups, .grad = grad, .x = a->in[grad], .w = a->in[1 + grad]};
    const int axes = c.x.rank - 2;
    for (int i = 0; i < axes; i++) {
        const int at = 3 - axes + i;
        c.stride[i] = g->w.stride[at], c.pad[i] = g->w.lo[at], c.dilation[i] = g->w.dil[at];
    }
    if (grad) {
        c.y = a->in[0];
        if (want[0]) c.dx = a->out[0];
        if (want[1]) c.dw = a->out[1];
        if (want[2]) c.db = a->out[2];
    } else {
        c.y = a->out[0];
        if (a->n_in > 2 && a->in[2].dtype) c.bias = a->in[2];
    }
    if (!h->last) return cx->sv.conv(cx->sv.user, &c);
    const om_conv_last *made = grad ? &h->dx : &h->y;
    om_tensor *result = grad ? &c.dx : &c.y;
    c.x = host_read(cx, a, &h->x, &c.x);
    if (grad) c.y = host_read(cx, a, &h->y, &c.y);
    if (result->data) *result = made->t, result->data = (char *)a->scratch + made->at;
    if (!cx->sv.conv(cx->sv.user, &c)) return false;
    if (result->data) om_copy_run(cx, &made->copy, result->data, a->out[0].data);
    return true;
}
