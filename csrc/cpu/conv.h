/* conv.h - geometry of a convolution and the loops that move between images and matrices (csrc/cpu/kernels/conv.k.c).
 *
 * Every convolution has three spatial axes here; missing leading ones have size 1. All tensors are dense, float or
 * double.
 */
#ifndef OM_CONV_H
#define OM_CONV_H

#include "cpu/copy.h"
#include "ops/window.h"

typedef struct om_conv_geo {
    int64_t n, c, o, groups, cg, og;           /* images, channels in and out, and per group */
    int64_t in[3], out[3];
    om_window w;
    int64_t taps, pixels, plane;               /* products of w.k, out, in */
} om_conv_geo;

struct om_conv_type {
    /* Rows [r0, r1) of the matrix of patches: row (image, channel, tap) holds that tap's pixel for every output pixel,
     * 0 in the padding. x: first image, first channel of the group; cols channels are wanted per image. Row (b, c, t)
     * starts at col + (c * taps + t) * row_step + b * image_step. */
    void (*im2col)(const om_conv_geo *g, const void *x, void *col, int64_t row_step, int64_t image_step, int64_t r0,
                   int64_t r1);
    /* The adjoint: planes [p0, p1) = (image, channel of the group) of dx are the sums of what im2col would have read
     * from them. */
    void (*col2im)(const om_conv_geo *g, const void *col, int64_t row_step, int64_t image_step, void *dx, int64_t p0,
                   int64_t p1);
    /* db: sums of dy over images and pixels for output channels [o0, o1) */
    void (*bias_grad)(const om_conv_geo *g, const void *dy, void *db, int64_t o0, int64_t o1);
};
struct om_conv_kernels { struct om_conv_type f32, f64; };
OM_DECLARE_ISA(struct om_conv_kernels, om_conv);

/* conv_direct.c: what is asked for, f32 or f64, prepared with the call. `scratch` bytes are wanted by a run. */
enum { OM_CONV_Y, OM_CONV_DW, OM_CONV_DX };
typedef struct om_conv_direct {
    int what, workers;
    int64_t size, wide[3], phases, plane, flat;    /* bytes of an element; a phase's plane; outputs laid flat */
    int64_t source, tasks;                         /* elements of one plane laid out */
    int64_t lanes_at, offsets_at, order_at, weights_at, work, scratch; /* bytes, of a worker but for the last */
} om_conv_direct;
void om_conv_direct_prepare(om_ctx *cx, const om_conv_geo *g, int what, int64_t size, om_conv_direct *d);
/* y of x, w, bias or none; dx of dy, w; dw of x, dy */
void om_conv_direct_run(om_ctx *cx, const om_conv_direct *d, const om_conv_geo *g, const void *x, const void *w,
                        const void *dy, const void *bias, void *out, char *scratch);

/* conv_host.c: what is asked of the host. Images with channels last: a copy of each in scratch, made of the operand, or
 * what the result is made of. */
typedef struct om_conv_last {
    om_tensor t;               /* without address */
    int64_t at;                /* in scratch */
    om_copy_job copy;          /* no items: there is none */
} om_conv_last;
typedef struct om_conv_host_plan {
    bool asked;                /* first; own scratch is taken when the host has turned the call down */
    bool want[3];              /* gradient: dx, dw, db */
    bool last;                 /* with channels last */
    om_conv_last x, y, dx;     /* y: of a gradient it is read */
    int64_t scratch;
} om_conv_host_plan;
bool om_conv_host(om_ctx *cx, const om_conv_geo *g, int dtype, bool pointwise, bool grad); /* does it do this one? */
void om_conv_host_layout(const om_args *a, const om_conv_geo *g, bool grad, om_conv_host_plan *h); /* h->want is set */
om_status om_conv_host_prepare(om_ctx *cx, om_arena *mem, const om_args *a, bool grad, om_conv_host_plan *h);
/* False: it has not. */
bool om_conv_host_run(om_ctx *cx, const om_args *a, const om_conv_geo *g, bool grad, const om_conv_host_plan *h);

#endif
