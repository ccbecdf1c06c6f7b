/* conv.cu - convolution over 1 to 3 spatial axes and its gradients, by plain loops: every result is summed by one
 * thread in the order channels, taps (of y and dx; the taps of a channel first among themselves), or by one block in a
 * fixed order (dw, db: images and pixels). Operands are dense; missing leading axes have size 1. */
#include "cuda/kernel.h"

typedef struct om_gpu_conv conv;

struct spot { int64_t at[3]; };
FN spot spot_of(int64_t i, const int64_t *size) {
    spot s;
    s.at[2] = i % size[2], i /= size[2];
    s.at[1] = i % size[1], s.at[0] = i / size[1];
    return s;
}
/* Of x, under output pixel `out` at a tap; -1: padding. */
FN int64_t under(const conv &p, const spot &out, const spot &tap) {
    int64_t at = 0;
    for (int a = 0; a < 3; a++) {
        const int64_t i = out.at[a] * p.stride[a] - p.lo[a] + tap.at[a] * p.dil[a];
        if (i < 0 || i >= p.in[a]) return -1;
        at = at * p.in[a] + i;
    }
    return at;
}
/* Of y, whose tap lies on input pixel `in`; -1: none. */
FN int64_t over(const conv &p, const spot &in, const spot &tap) {
    int64_t at = 0;
    for (int a = 0; a < 3; a++) {
        const int64_t i = in.at[a] + p.lo[a] - tap.at[a] * p.dil[a], o = i / p.stride[a];
        if (i < 0 || o * p.stride[a] != i || o >= p.out[a]) return -1;
        at = at * p.out[a] + o;
    }
    return at;
}

template <class S> FN void conv_y(const conv &p) {
    typedef WIDE F;
    OVER_GRID(i, p.n * p.o * p.pixels) {
        const int64_t o = i / p.pixels % p.o, b = i / p.pixels / p.o, c0 = o / p.og * p.cg;
        const spot out = spot_of(i % p.pixels, p.out);
        F sum = p.bias ? at<S>(p.bias, o) : (F)0;
        for (int64_t c = 0; c < p.cg; c++) {
            const int64_t x = (b * p.c + c0 + c) * p.plane, w = (o * p.cg + c) * p.taps;
            F part = 0;
            for (int64_t t = 0; t < p.taps; t++) {
                const int64_t s = under(p, out, spot_of(t, p.k));
                if (s >= 0) part += at<S>(p.x, x + s) * at<S>(p.w, w + t);
            }
            sum += part;
        }
        put<S>(p.y, i, sum);
    }
}

template <class S> FN void conv_dx(const conv &p) {
    typedef WIDE F;
    OVER_GRID(i, p.n * p.c * p.plane) {
        const int64_t c = i / p.plane % p.c, b = i / p.plane / p.c, o0 = c / p.cg * p.og;
        const spot in = spot_of(i % p.plane, p.in);
        F sum = 0;
        for (int64_t o = 0; o < p.og; o++) {
            const int64_t y = (b * p.o + o0 + o) * p.pixels, w = ((o0 + o) * p.cg + c % p.cg) * p.taps;
            F part = 0;
            for (int64_t t = 0; t < p.taps; t++) {
                const int64_t s = over(p, in, spot_of(t, p.k));
                if (s >= 0) part += at<S>(p.dy, y + s) * at<S>(p.w, w + t);
            }
            sum += part;
        }
        put<S>(p.dx, i, sum);
    }
}

/* A block per element: filter, channel, tap. */
template <class S> FN void conv_dw(const conv &p) {
    typedef WIDE F;
    SHARED(shared);
    const int64_t i = blockIdx.x, c = i / p.taps % p.cg, o = i / p.taps / p.cg;
    const spot tap = spot_of(i % p.taps, p.k);
    F sum = 0;
    for (int64_t b = 0; b < p.n; b++) {
        const int64_t x = (b * p.c + o / p.og * p.cg + c) * p.plane, y = (b * p.o + o) * p.pixels;
        F part = 0;
        for (int64_t e = threadIdx.x; e < p.pixels; e += blockDim.x) {
            const int64_t s = under(p, spot_of(e, p.out), tap);
            if (s >= 0) part += at<S>(p.x, x + s) * at<S>(p.dy, y + e);
        }
        sum += part;
    }
    sum = block_all<op_sum>(sum, (F)0, (F *)shared);
    if (!threadIdx.x) put<S>(p.dw, i, sum);
}

/* A block per filter. */
template <class S> FN void conv_db(const conv &p) {
    typedef WIDE F;
    SHARED(shared);
    F sum = 0;
    for (int64_t b = 0; b < p.n; b++) {
        const int64_t y = (b * p.o + blockIdx.x) * p.pixels;
        F part = 0;
        for (int64_t e = threadIdx.x; e < p.pixels; e += blockDim.x) part += at<S>(p.dy, y + e);
        sum += part;
    }
    sum = block_all<op_sum>(sum, (F)0, (F *)shared);
    if (!threadIdx.x) put<S>(p.db, blockIdx.x, sum);
}

FLOATS(conv_y, struct om_gpu_conv, 256, conv_y)
FLOATS(conv_dx, struct om_gpu_conv, 256, conv_dx)
FLOATS(conv_dw, struct om_gpu_conv, 256, conv_dw)
FLOATS(conv_db, struct om_gpu_conv, 256, conv_db)

/* Columns (n, c * taps, pixels): y from x. */
template <class S> FN void unfold(const conv &p) {
    OVER_GRID(i, p.n * p.c * p.taps * p.pixels) {
        const int64_t row = i / p.pixels, s = under(p, spot_of(i % p.pixels, p.out), spot_of(row % p.taps, p.k));
        put<S>(p.y, i, s < 0 ? 0 : at<S>(p.x, row / p.taps * p.plane + s));
    }
}
/* And back: dx from dy, the taps in order. */
template <class S> FN void fold(const conv &p) {
    typedef WIDE F;
    OVER_GRID(i, p.n * p.c * p.plane) {
        const spot in = spot_of(i % p.plane, p.in);
        F sum = 0;
        for (int64_t t = 0; t < p.taps; t++) {
            const int64_t s = over(p, in, spot_of(t, p.k));
            if (s >= 0) sum += at<S>(p.dy, (i / p.plane * p.taps + t) * p.pixels + s);
        }
        put<S>(p.dx, i, sum);
    }
}
FLOATS(unfold, struct om_gpu_conv, 256, unfold)
FLOATS(fold, struct om_gpu_conv, 256, fold)
