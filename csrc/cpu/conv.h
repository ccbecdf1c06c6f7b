/* conv.h - geometry of a convolution and the loops that move between images and matrices (csrc/cpu/kernels/conv.k.c).
 *
 * Every convolution has three spatial axes here; missing leading ones have size 1. All tensors are dense, float or
 * double.
 */
#ifndef OM_CONV_H
#define OM_CONV_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

typedef struct om_conv_geo {
    int64_t n, c, o, groups, cg, og;           /* images, channels in and out, and per group */
    int64_t in[3], k[3], out[3], stride[3], lo[3], dil[3];
    int64_t taps, pixels, plane;               /* products of k, out, in */
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
    /* Without a matrix, for few channels per group. y: planes (image, output channel); dx: planes (image, channel);
     * dw: filters (output channel, channel of its group). bias may be NULL. */
    void (*direct)(const om_conv_geo *g, const void *x, const void *w, const void *bias, void *y, int64_t p0,
                   int64_t p1);
    void (*direct_dx)(const om_conv_geo *g, const void *dy, const void *w, void *dx, int64_t p0, int64_t p1);
    void (*direct_dw)(const om_conv_geo *g, const void *x, const void *dy, void *dw, int64_t f0, int64_t f1);
    /* db: sums of dy over images and pixels for output channels [o0, o1) */
    void (*bias_grad)(const om_conv_geo *g, const void *dy, void *db, int64_t o0, int64_t o1);
};
struct om_conv_kernels { struct om_conv_type f32, f64; };
OM_DECLARE_ISA(struct om_conv_kernels, om_conv);

#endif
