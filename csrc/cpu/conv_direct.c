/* conv_direct.c - convolutions with few channels in a group (depthwise), without a matrix of patches.
 *
 * An input plane is laid out with its padding, and where the stride is above 1, apart by phase: positions with the same
 * remainder by the stride form a plane. Then the pixels that a tap reads for all outputs lie one after another, rows
 * too: output j is the sum over taps of w[t] flat[at[t] + j], where j counts as far as a row of such a plane is wide;
 * some of them lie between rows and mean nothing. dx: the same of dy, laid out with zeros there, phase by phase;
 * dw: dot products of the two. All are vectors over j (kernels/taps.k.c).
 * A plane, or a filter, is computed by one thread: the same bits for any number of them.
 */
#include "cpu/conv.h"
#include "cpu/cpu.h"
#include "cpu/taps.h"

#include <stdatomic.h>

void om_conv_direct_prepare(om_ctx *cx, const om_conv_geo *g, int what, int64_t size, om_conv_direct *d) {
    *d = (om_conv_direct){.what = what, .size = size, .phases = 1, .plane = 1};
    for (int i = 0; i < 3; i++) {
        d->wide[i] = g->out[i] + g->w.dil[i] * (g->w.k[i] - 1) / g->w.stride[i];
        d->phases = om_size_mul(d->phases, g->w.stride[i]);
        d->plane = om_size_mul(d->plane, d->wide[i]);
    }
    const int64_t one = om_size_mul(d->phases, d->plane);
    d->scratch = OM_SIZE_MOST;
    if (om_size_mul(one, size) > OM_ADDRESSES) return; /* the planner refuses it */
    d->flat = g->pixels ? ((g->out[0] - 1) * d->wide[1] + g->out[1] - 1) * d->wide[2] + g->out[2] : 0;
    int64_t n = TAPS_SLACK; /* elements: what is laid out, then what is computed */
    if (what == OM_CONV_DX) d->source = 2 * d->plane, n += om_size_mul(g->og, d->source) + one;
    else d->source = one, n += om_size_mul(what == OM_CONV_Y ? g->cg : 1, one) + d->flat;
    d->tasks = what == OM_CONV_Y ? g->n * g->o : what == OM_CONV_DX ? g->n * g->c : g->o * g->cg;
    const int64_t bytes = om_size_mul(n + TAPS_SLACK, size) + 64;
    d->lanes_at = (bytes + 63) & ~(int64_t)63;
    d->offsets_at = d->lanes_at + (what == OM_CONV_DW ? g->taps * TAPS_LANES * (int64_t)sizeof(double) : 0);
    const int64_t taps = g->taps * (what == OM_CONV_Y ? g->cg : what == OM_CONV_DX ? g->og : 1);
    d->order_at = d->offsets_at + taps * (int64_t)sizeof(int64_t);
    d->weights_at = d->order_at + (what == OM_CONV_DX ? taps + d->phases + 1 : 0) * (int64_t)sizeof(int64_t);
    d->work = (d->weights_at + taps * size + 63) & ~(int64_t)63;
    d->workers = om_num_threads(cx);
    if (d->workers > d->tasks) d->workers = (int)d->tasks;
    if ((double)d->tasks * (double)d->flat * (double)taps < 1e5) d->workers = 1;
    if (d->workers < 1) d->workers = 1;
    d->scratch = om_size_mul(d->workers, d->work);
}

typedef struct direct_run {
    const om_conv_direct *d;
    const om_conv_geo *g;
    const om_taps_type *k;
    const char *x, *w, *dy, *bias;
    char *out, *mem;
    atomic_int worker;
    atomic_llong next;
} direct_run;

/* Where pixel (i0, i1, first of the row) of a plane with padding lies among phases; -1: no window reads that row. */
static int64_t direct_row(const om_conv_direct *d, const om_conv_geo *g, int64_t i0, int64_t i1, int64_t *phase) {
    const int64_t u0 = i0 + g->w.lo[0], u1 = i1 + g->w.lo[1];
    const int64_t r0 = u0 / g->w.stride[0], r1 = u1 / g->w.stride[1];
    if (r0 >= d->wide[0] || r1 >= d->wide[1]) return -1;
    *phase = (u0 % g->w.stride[0] * g->w.stride[1] + u1 % g->w.stride[1]) * g->w.stride[2];
    return (r0 * d->wide[1] + r1) * d->wide[2];
}

#define DIRECT(S, T)                                                                                                   \
    /* an input plane into its phases, whose padding is zero already; or out of them, zero where no window reads */    \
    static void direct_in_##S(const om_conv_direct *d, const om_conv_geo *g, const void *plane, void *to_) {           \
        const int64_t s = g->w.stride[2], most = d->wide[2] * s - g->w.lo[2], n = g->in[2] < most ? g->in[2] : most;   \
        const T *x = plane;                                                                                            \
        for (int64_t i0 = 0; i0 < g->in[0]; i0++)                                                                      \
            for (int64_t i1 = 0; i1 < g->in[1]; i1++, x += g->in[2]) {                                                 \
                int64_t phase, at = direct_row(d, g, i0, i1, &phase);                                                  \
                T *to = (T *)to_ + phase * d->plane + at;                                                              \
                if (at < 0) continue;                                                                                  \
                if (s == 1) memcpy(to + g->w.lo[2], x, (size_t)(n > 0 ? n : 0) * sizeof(T));                           \
                else                                                                                                   \
                    for (int64_t i = 0, r = g->w.lo[2] % s, q = g->w.lo[2] / s; i < n; i++) {                          \
                        to[r * d->plane + q] = x[i];                                                                   \
                        if (++r == s) r = 0, q++;                                                                      \
                    }                                                                                                  \
            }                                                                                                          \
    }                                                                                                                  \
    static void direct_out_##S(const om_conv_direct *d, const om_conv_geo *g, const void *from_, void *plane) {        \
        const int64_t s = g->w.stride[2], most = d->wide[2] * s - g->w.lo[2], n = g->in[2] < most ? g->in[2] : most;   \
        T *x = plane;                                                                                                  \
        for (int64_t i0 = 0; i0 < g->in[0]; i0++)                                                                      \
            for (int64_t i1 = 0; i1 < g->in[1]; i1++, x += g->in[2]) {                                                 \
                int64_t phase, at = direct_row(d, g, i0, i1, &phase), i = 0;                                           \
                const T *from = (const T *)from_ + phase * d->plane + at;                                              \
                if (at >= 0 && s == 1 && n > 0) memcpy(x, from + g->w.lo[2], (size_t)n * sizeof(T)), i = n;            \
                else if (at >= 0)                                                                                      \
                    for (int64_t r = g->w.lo[2] % s, q = g->w.lo[2] / s; i < n; i++) {                                 \
                        x[i] = from[r * d->plane + q];                                                                 \
                        if (++r == s) r = 0, q++;                                                                      \
                    }                                                                                                  \
                for (; i < g->in[2]; i++) x[i] = 0;                                                                    \
            }                                                                                                          \
    }
DIRECT(f32, float)
DIRECT(f64, double)

/* rows of an output plane, `wide` apart in flat, or back */
static void direct_rows(const om_conv_direct *d, const om_conv_geo *g, char *plane, char *flat, bool lay) {
    const size_t row = (size_t)(g->out[2] * d->size);
    for (int64_t i0 = 0; i0 < g->out[0]; i0++)
        for (int64_t i1 = 0; i1 < g->out[1]; i1++, plane += row) {
            char *at = flat + (i0 * d->wide[1] + i1) * d->wide[2] * d->size;
            if (lay) memcpy(at, plane, row);
            else memcpy(plane, at, row);
        }
}

/* Tap t: its phase, and where it begins within it. */
static int64_t direct_tap(const om_conv_direct *d, const om_conv_geo *g, int64_t t, int64_t *phase) {
    const int64_t *k = g->w.k, *dil = g->w.dil, *s = g->w.stride;
    const int64_t at[3] = {t / k[2] / k[1] * dil[0], t / k[2] % k[1] * dil[1], t % k[2] * dil[2]};
    *phase = (at[0] % s[0] * s[1] + at[1] % s[1]) * s[2] + at[2] % s[2];
    return ((at[0] / s[0]) * d->wide[1] + at[1] / s[1]) * d->wide[2] + at[2] / s[2];
}

/* What every task needs of the taps: where each reads; for dx phase by phase, `order` the taps' numbers among og * taps
 * in that order, then where each phase begins in it. */
static void direct_taps(const om_conv_direct *d, const om_conv_geo *g, int64_t *at, int64_t *order) {
    int64_t phase, n = 0;
    if (d->what != OM_CONV_DX) {
        for (int64_t c = 0; c < (d->what == OM_CONV_Y ? g->cg : 1); c++)
            for (int64_t t = 0; t < g->taps; t++, n++) {
                at[n] = c * d->source + direct_tap(d, g, t, &phase);
                at[n] += phase * d->plane;
            }
        return;
    }
    int64_t *begin = order + g->og * g->taps;
    for (int64_t p = 0; p < d->phases; p++) {
        begin[p] = n;
        for (int64_t i = 0; i < g->og * g->taps; i++) {
            const int64_t back = direct_tap(d, g, i % g->taps, &phase);
            if (phase != p) continue;
            order[n] = i;
            at[n++] = i / g->taps * d->source + d->plane - back;
        }
    }
    begin[d->phases] = n;
}

static void direct_worker(void *arg, int64_t begin, int64_t end) {
    (void)begin, (void)end; /* work is claimed */
    direct_run *r = arg;
    const om_conv_direct *d = r->d;
    const om_conv_geo *g = r->g;
    const bool wide = d->size == 8;
    void (*in)(const om_conv_direct *, const om_conv_geo *, const void *, void *) = wide ? direct_in_f64
                                                                                         : direct_in_f32;
    char *mem = r->mem + atomic_fetch_add(&r->worker, 1) * d->work, *weights = mem + d->weights_at;
    int64_t *at = (void *)(mem + d->offsets_at), *order = (void *)(mem + d->order_at);
    const int64_t sources = d->what == OM_CONV_Y ? g->cg : d->what == OM_CONV_DX ? g->og : 1;
    char *made = mem + (sources * d->source + TAPS_SLACK) * d->size;
    memset(mem, 0, (size_t)d->lanes_at);
    direct_taps(d, g, at, order);
    for (long long i; (i = atomic_fetch_add(&r->next, 1)) < d->tasks;) {
        if (d->what == OM_CONV_Y) { /* plane i = (image, output channel) */
            const int64_t o = i % g->o, first = i / g->o * g->c + o / g->og * g->cg;
            const int64_t n = g->cg * g->taps;
            for (int64_t c = 0; c < g->cg; c++)
                in(d, g, r->x + (first + c) * g->plane * d->size, mem + c * d->source * d->size);
            const double start = !r->bias ? 0
                                 : wide   ? ((const double *)r->bias)[o]
                                          : (double)((const float *)r->bias)[o];
            r->k->sum(mem, at, r->w + o * n * d->size, n, start, made, d->flat);
            direct_rows(d, g, r->out + i * g->pixels * d->size, made, false);
        } else if (d->what == OM_CONV_DX) { /* plane i = (image, channel); dy lies `plane` behind its source's start */
            const int64_t c = i % g->c % g->cg, first = i % g->c / g->cg * g->og;
            for (int64_t o = 0; o < g->og; o++)
                direct_rows(d, g, (char *)(uintptr_t)r->dy + (i / g->c * g->o + first + o) * g->pixels * d->size,
                            mem + (o * d->source + d->plane) * d->size, true);
            const int64_t *from = order + g->og * g->taps; /* where phases begin */
            const char *w = r->w + (first * g->cg + c) * g->taps * d->size; /* og of them, cg * taps apart */
            for (int64_t n = 0; n < from[d->phases]; n++) {
                const int64_t tap = order[n] / g->taps * (g->cg - 1) * g->taps + order[n];
                if (wide) ((double *)(void *)weights)[n] = ((const double *)(const void *)w)[tap];
                else ((float *)(void *)weights)[n] = ((const float *)(const void *)w)[tap];
            }
            for (int64_t p = 0; p < d->phases; p++)
                r->k->sum(mem, at + from[p], weights + from[p] * d->size, from[p + 1] - from[p], 0,
                          made + p * d->plane * d->size, d->plane);
            (wide ? direct_out_f64 : direct_out_f32)(d, g, made, r->out + i * g->plane * d->size);
        } else { /* filter i = (output channel, channel of its group) */
            const int64_t o = i / g->cg, c = o / g->og * g->cg + i % g->cg;
            double *lanes = (void *)(mem + d->lanes_at);
            memset(lanes, 0, (size_t)g->taps * TAPS_LANES * sizeof *lanes);
            for (int64_t b = 0; b < g->n; b++) {
                in(d, g, r->x + (b * g->c + c) * g->plane * d->size, mem);
                direct_rows(d, g, (char *)(uintptr_t)r->dy + (b * g->o + o) * g->pixels * d->size, made, true);
                r->k->dot(mem, at, g->taps, made, d->flat, lanes);
            }
            r->k->total(lanes, g->taps, r->out + i * g->taps * d->size);
        }
    }
}

void om_conv_direct_run(om_ctx *cx, const om_conv_direct *d, const om_conv_geo *g, const void *x, const void *w,
                        const void *dy, const void *bias, void *out, char *scratch) {
    if (!d->tasks) return;
    direct_run r = {.d = d, .g = g, .x = x, .w = w, .dy = dy, .bias = bias, .out = out, .mem = scratch};
    r.k = d->size == 8 ? &OM_PICK(om_taps)->f64 : &OM_PICK(om_taps)->f32;
    if (d->workers == 1) direct_worker(&r, 0, 1);
    else om_parallel_for(cx, d->workers, 1, direct_worker, &r);
}
