/* conv.c - convolution over 1 to 3 spatial axes and its gradients on the CPU, as matrix products.
 *
 *     y[b, o] = w[o] (og, cg*taps)  x  patches of image b (cg*taps, pixels)            for each group
 *     dpatches = w^T dy, folded back into dx;     dw += dy patches^T;     db = sums of dy
 *
 * The patches are built (im2col) for as many images at a time as fit CONV_CHUNK bytes, then multiplied by om_gemm. When
 * an image has few output pixels, the images of a chunk stand side by side in one wide matrix instead of many small
 * ones. A convolution with one tap, stride 1 and no padding multiplies x itself. With a few channels per group
 * (depthwise), products are too thin for GEMM: direct loops instead. Which way is taken depends on the geometry alone.
 * f32 and f64 as they are; bf16 and f16 are widened once and computed in f32. Operands must be dense.
 * Deterministic: every output element is summed by one thread in a fixed order (dw: image after image).
 */
#include "cpu/cpu.h"
#include "cpu/conv.h"
#include "ops/attr.h"
#include "cpu/gemm.h"

enum { CONV_CHUNK = 8 << 20, /* bytes of patches built at a time */
       CONV_WIDE = 192,      /* fewer output pixels than this: images side by side */
       CONV_DIRECT = 4 };    /* products with cg * og up to this go without GEMM */

/* --- layout of scratch --------------------------------------------------------------------------------------- */

typedef struct conv_plan {
    om_conv_geo g;
    int dtype, wide_dtype;     /* storage; what is computed in */
    int64_t size;              /* bytes of wide_dtype */
    bool pointwise, direct, side_by_side;
    int64_t chunk;             /* images at a time */
    int64_t row_step, image_step; /* of the patch matrix */
    const struct om_conv_type *k;
    /* scratch, bytes from its start */
    int64_t x, w, dy, y, bias, dx, dw, db, col, side, off, gemm, total;
} conv_plan;

static int64_t conv_take(int64_t *total, int64_t bytes) {
    int64_t at = *total;
    *total += (bytes + 63) & ~(int64_t)63;
    return at;
}

/* The three products, without pointers. Group and images are chosen by the caller. */
static void conv_gemm_args(const conv_plan *p, int which, int64_t images, om_gemm_args *a) {
    const om_conv_geo *g = &p->g;
    const int64_t depth = g->cg * g->taps, px = p->side_by_side ? images * g->pixels : g->pixels;
    const int64_t prs = p->pointwise ? g->plane : p->row_step, yrs = p->side_by_side ? px : g->pixels;
    *a = (om_gemm_args){.dtype = p->wide_dtype, .alpha = 1, .batch = which == 1 || p->side_by_side ? 1 : images};
    if (which == 0) { /* y (og, px) = w (og, depth) patches (depth, px) */
        a->m = g->og, a->n = px, a->k = depth;
        a->rsa = depth, a->csa = 1, a->rsb = prs, a->csb = 1, a->rsc = yrs, a->csc = 1;
    } else if (which == 1) { /* dw (og, depth) += dy (og, px) patches^T (px, depth) */
        a->m = g->og, a->n = depth, a->k = px;
        a->rsa = yrs, a->csa = 1, a->rsb = 1, a->csb = prs, a->rsc = depth, a->csc = 1;
    } else { /* dpatches (depth, px) = w^T (depth, og) dy (og, px) */
        a->m = depth, a->n = px, a->k = g->og;
        a->rsa = 1, a->csa = depth, a->rsb = yrs, a->csb = 1, a->rsc = prs, a->csc = 1;
    }
}

/* grad: inputs are dy, x, w; else x, w, bias? */
static om_status conv_layout(om_ctx *cx, const om_args *a, bool grad, conv_plan *p) {
    const om_tensor *x = &a->in[grad], *w = &a->in[1 + grad], *y = grad ? &a->in[0] : &a->out[0];
    const bool bias = !grad && a->n_in > 2 && a->in[2].dtype;
    int count, nd = x->rank - 2;
    om_conv_geo *g = &p->g;
    *p = (conv_plan){.dtype = x->dtype, .wide_dtype = om_compute_dtype(x->dtype)};
    p->size = (int64_t)om_dtype_size(p->wide_dtype);
    p->k = p->wide_dtype == OM_F64 ? &OM_PICK(om_conv)->f64 : &OM_PICK(om_conv)->f32;
    g->n = x->dim[0], g->c = x->dim[1], g->o = w->dim[0], g->groups = om_args_int(a, "groups", 1);
    g->cg = w->dim[1], g->og = g->o / g->groups;
    OM_CHECK(cx, g->cg * g->groups == g->c && g->og * g->groups == g->o,
             "%s: %lld channels in, %lld out, %lld per filter, %lld groups do not fit",
             a->node->op->name, (long long)g->c, (long long)g->o, (long long)g->cg, (long long)g->groups);
    g->taps = g->pixels = g->plane = 1;
    bool plain = true;
    for (int i = 0; i < 3; i++) {
        int s = i - (3 - nd); /* spatial axis, or < 0 */
        const int64_t *v;
        g->in[i] = s < 0 ? 1 : x->dim[2 + s];
        g->k[i] = s < 0 ? 1 : w->dim[2 + s];
        g->out[i] = s < 0 ? 1 : y->dim[2 + s];
        g->stride[i] = s >= 0 && (v = attr_values(a, "stride", &count)) ? v[count == 1 ? 0 : s] : 1;
        g->dil[i] = s >= 0 && (v = attr_values(a, "dilation", &count)) ? v[count == 1 ? 0 : s] : 1;
        g->lo[i] = s >= 0 && (v = attr_values(a, "pad", &count)) ? v[count == 1 ? 0 : s] : 0;
        g->taps *= g->k[i];
        g->pixels *= g->out[i];
        g->plane *= g->in[i];
        plain &= g->k[i] == 1 && g->stride[i] == 1 && g->in[i] == g->out[i] && g->lo[i] == 0;
    }
    p->direct = g->cg * g->og <= CONV_DIRECT;
    p->pointwise = !p->direct && plain;
    const int64_t depth = g->cg * g->taps, image = depth * g->pixels * p->size;
    p->side_by_side = !p->direct && !p->pointwise && g->pixels < CONV_WIDE && g->n > 1;
    p->chunk = p->pointwise ? g->n : image > 0 ? CONV_CHUNK / image : g->n;
    p->chunk = p->chunk < 1 ? 1 : p->chunk > g->n ? g->n : p->chunk;
    p->row_step = p->side_by_side ? p->chunk * g->pixels : g->pixels;
    p->image_step = p->side_by_side ? g->pixels : depth * g->pixels;

    const bool widen = p->dtype != p->wide_dtype;
    if (widen) { /* f32 copies of everything */
        p->x = conv_take(&p->total, om_numel(x) * p->size);
        p->w = conv_take(&p->total, om_numel(w) * p->size);
        p->y = p->dy = conv_take(&p->total, om_numel(y) * p->size);
        p->bias = conv_take(&p->total, bias ? g->o * p->size : 0);
        p->dx = conv_take(&p->total, grad ? om_numel(&a->out[0]) * p->size : 0);
        p->dw = conv_take(&p->total, grad ? om_numel(&a->out[1]) * p->size : 0);
        p->db = conv_take(&p->total, grad ? om_numel(&a->out[2]) * p->size : 0);
    }
    if (p->direct) return OM_OK;
    p->col = conv_take(&p->total, p->pointwise ? 0 : p->chunk * depth * g->pixels * p->size);
    p->side = conv_take(&p->total, p->side_by_side ? p->chunk * g->og * g->pixels * p->size : 0);
    p->off = conv_take(&p->total, 24 * p->chunk);
    int64_t most = 0;
    for (int which = grad ? 1 : 0; which <= (grad ? 2 : 0); which++) {
        om_gemm_args ga;
        conv_gemm_args(p, which, p->chunk, &ga);
        int64_t bytes = om_gemm_scratch(cx, &ga);
        if (bytes > most) most = bytes;
    }
    p->gemm = conv_take(&p->total, most);
    return OM_OK;
}

static int64_t conv_scratch_of(om_ctx *cx, const om_args *a, bool grad) {
    conv_plan p;
    return conv_layout(cx, a, grad, &p) == OM_OK ? p.total : 0;
}

/* --- running --------------------------------------------------------------------------------------------------- */

typedef struct conv_run_job {
    const conv_plan *p;
    om_conv_geo g;             /* of the chunk */
    const char *x, *w, *dy, *bias;
    char *y, *dx, *dw, *db, *col;
} conv_run_job;

static void im2col_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->im2col(&j->g, j->x, j->col, j->p->row_step, j->p->image_step, b, e);
}
static void col2im_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->col2im(&j->g, j->col, j->p->row_step, j->p->image_step, j->dx, b, e);
}
static void direct_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->direct(&j->g, j->x, j->w, j->bias, j->y, b, e);
}
static void direct_dx_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->direct_dx(&j->g, j->dy, j->w, j->dx, b, e);
}
static void direct_dw_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->direct_dw(&j->g, j->x, j->dy, j->dw, b, e);
}
static void bias_grad_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->bias_grad(&j->g, j->dy, j->db, b, e);
}

static int64_t conv_grain(int64_t work_per_item) { return 1 + 32768 / (work_per_item + 1); }

/* (images, og, pixels) of one group, inside (n, o, pixels), to or from (og, images, pixels) */
static om_status conv_side(om_ctx *cx, const conv_plan *p, int64_t images, char *y, char *side, bool to_side) {
    const om_conv_geo *g = &p->g;
    om_tensor t = {.data = y,
                   .dtype = (uint8_t)p->wide_dtype,
                   .rank = 3,
                   .device = -1,
                   .dim = {images, g->og, g->pixels},
                   .stride = {g->o * g->pixels, g->pixels, 1}};
    om_tensor s = t;
    s.data = side;
    s.stride[0] = g->pixels;
    s.stride[1] = images * g->pixels;
    return to_side ? om_copy(cx, &t, &s) : om_copy(cx, &s, &t);
}

/* Widened copy of a tensor in scratch, or its own memory. */
static om_status conv_widen(om_ctx *cx, const conv_plan *p, const om_tensor *t, char *scratch, int64_t at, char **out) {
    *out = t->data;
    if (p->dtype == p->wide_dtype) return OM_OK;
    om_tensor to = *t;
    to.dtype = (uint8_t)p->wide_dtype;
    om_dense_strides(&to);
    *out = to.data = scratch + at;
    return om_copy(cx, t, &to);
}

static om_status conv_narrow(om_ctx *cx, const conv_plan *p, const char *from, om_tensor *t) {
    if (p->dtype == p->wide_dtype || !om_numel(t)) return OM_OK;
    om_tensor src = *t;
    src.dtype = (uint8_t)p->wide_dtype;
    om_dense_strides(&src);
    src.data = (void *)(uintptr_t)from;
    return om_copy(cx, &src, t);
}

/* One product for one group of one chunk. */
static om_status conv_product(om_ctx *cx, const conv_plan *p, char *scratch, int which, int64_t first, int64_t images,
                              int64_t group, const char *x, const char *w, const char *dy, char *y, char *dx, char *dw,
                              int beta) {
    const om_conv_geo *g = &p->g;
    const int64_t depth = g->cg * g->taps, size = p->size;
    om_gemm_args ga;
    conv_gemm_args(p, which, images, &ga);
    ga.beta = beta;
    ga.scratch = scratch + p->gemm;
    const char *wg = w + group * g->og * depth * size;
    const int64_t yo = (first * g->o + group * g->og) * g->pixels * size,
                  xo = (first * g->c + group * g->cg) * g->plane * size;
    const int64_t ystep = g->o * g->pixels, pstep = p->pointwise ? g->c * g->plane : p->image_step;
    char *side = scratch + p->side, *col = scratch + p->col;
    int64_t *off_y = (int64_t *)(scratch + p->off), *off_p = off_y + p->chunk, *off_0 = off_p + p->chunk;
    for (int64_t b = 0; b < images; b++) {
        off_y[b] = b * ystep;
        off_p[b] = b * pstep;
        off_0[b] = 0;
    }
    /* only a group's rows of a pointwise dx are written: the product goes straight into dx */
    const char *patches = p->pointwise ? x + xo : col;
    if (which == 0) {
        ga.a = wg, ga.b = patches, ga.c = p->side_by_side ? side : y + yo;
        ga.off_a = off_0, ga.off_b = off_p, ga.off_c = off_y;
        if (p->side_by_side) ga.off_a = ga.off_b = ga.off_c = NULL;
        return om_gemm(cx, &ga);
    }
    if (which == 1) {
        ga.c = dw + group * g->og * depth * size;
        if (p->side_by_side) {
            ga.a = side, ga.b = patches;
            return om_gemm(cx, &ga);
        }
        for (int64_t b = 0; b < images; b++) { /* image after image: the sum has one order */
            ga.a = dy + yo + b * ystep * size;
            ga.b = patches + b * pstep * size;
            OM_TRY(om_gemm(cx, &ga));
            ga.beta = 1;
        }
        return OM_OK;
    }
    ga.a = wg, ga.b = p->side_by_side ? side : dy + yo, ga.c = p->pointwise ? dx + xo : col;
    ga.off_a = off_0, ga.off_b = off_y, ga.off_c = off_p;
    if (p->side_by_side) ga.off_a = ga.off_b = ga.off_c = NULL;
    return om_gemm(cx, &ga);
}

typedef struct bias_job { const conv_plan *p; char *y; const char *bias; } bias_job;

static void bias_range(void *arg, int64_t begin, int64_t end) { /* y = bias, over planes (image, channel) */
    const bias_job *j = arg;
    const om_conv_geo *g = &j->p->g;
    for (int64_t i = begin; i < end; i++) {
        if (j->p->wide_dtype == OM_F64) {
            double *y = (double *)j->y + i * g->pixels, v = ((const double *)j->bias)[i % g->o];
            for (int64_t k = 0; k < g->pixels; k++) y[k] = v;
        } else {
            float *y = (float *)j->y + i * g->pixels, v = ((const float *)j->bias)[i % g->o];
            for (int64_t k = 0; k < g->pixels; k++) y[k] = v;
        }
    }
}

om_status om_cpu_run_conv(om_ctx *cx, const om_args *a) {
    conv_plan p;
    om_tensor *y = &a->out[0];
    OM_TRY(conv_layout(cx, a, false, &p));
    const om_conv_geo *g = &p.g;
    if (!om_numel(y)) return OM_OK;
    char *scratch = a->scratch, *x, *w, *bias = NULL, *out = p.dtype == p.wide_dtype ? y->data : scratch + p.y;
    OM_TRY(conv_widen(cx, &p, &a->in[0], scratch, p.x, &x));
    OM_TRY(conv_widen(cx, &p, &a->in[1], scratch, p.w, &w));
    if (a->n_in > 2 && a->in[2].dtype) OM_TRY(conv_widen(cx, &p, &a->in[2], scratch, p.bias, &bias));
    conv_run_job j = {.p = &p, .g = *g, .x = x, .w = w, .bias = bias, .y = out};
    if (p.direct) {
        om_parallel_for(cx, g->n * g->o, conv_grain(g->pixels * g->taps * g->cg), direct_range, &j);
        return conv_narrow(cx, &p, out, y);
    }
    if (bias) { /* side by side, the copy below would overwrite it: added there through the matrix */
        bias_job bj = {&p, out, bias};
        if (!p.side_by_side) om_parallel_for(cx, g->n * g->o, conv_grain(g->pixels), bias_range, &bj);
    }
    j.col = scratch + p.col;
    for (int64_t first = 0; first < g->n; first += p.chunk) {
        const int64_t images = g->n - first < p.chunk ? g->n - first : p.chunk;
        if (p.side_by_side) p.row_step = images * g->pixels;
        for (int64_t group = 0; group < g->groups; group++) {
            j.x = x + (first * g->c + group * g->cg) * g->plane * p.size;
            if (!p.pointwise) om_parallel_for(cx, images * g->cg * g->taps, conv_grain(g->pixels), im2col_range, &j);
            if (p.side_by_side && bias) { /* rows of the wide matrix start at the bias */
                conv_plan wide = p;
                wide.g.pixels = images * g->pixels;
                wide.g.o = g->og;
                bias_job bj = {&wide, scratch + p.side, bias + group * g->og * p.size};
                om_parallel_for(cx, g->og, conv_grain(wide.g.pixels), bias_range, &bj);
            }
            OM_TRY(conv_product(cx, &p, scratch, 0, first, images, group, x, w, NULL, out, NULL, NULL, bias != NULL));
            if (p.side_by_side)
                OM_TRY(conv_side(cx, &p, images, out + (first * g->o + group * g->og) * g->pixels * p.size,
                                 scratch + p.side, false));
        }
    }
    return conv_narrow(cx, &p, out, y);
}

om_status om_cpu_run_conv_grad(om_ctx *cx, const om_args *a) {
    conv_plan p;
    int count;
    const int64_t *want = attr_values(a, "want", &count);
    const bool want_x = count < 1 || want[0], want_w = count < 2 || want[1], want_b = count < 3 || want[2];
    OM_TRY(conv_layout(cx, a, true, &p));
    const om_conv_geo *g = &p.g;
    const bool narrow = p.dtype != p.wide_dtype;
    char *scratch = a->scratch, *dy, *x = NULL, *w = NULL;
    char *dx = narrow ? scratch + p.dx : a->out[0].data, *dw = narrow ? scratch + p.dw : a->out[1].data;
    char *db = narrow ? scratch + p.db : a->out[2].data;
    OM_TRY(conv_widen(cx, &p, &a->in[0], scratch, p.dy, &dy));
    if (want_w) OM_TRY(conv_widen(cx, &p, &a->in[1], scratch, p.x, &x));
    if (want_x) OM_TRY(conv_widen(cx, &p, &a->in[2], scratch, p.w, &w));
    conv_run_job j = {.p = &p, .g = *g, .x = x, .w = w, .dy = dy, .dx = dx, .dw = dw, .db = db, .col = scratch + p.col};
    if (want_b) om_parallel_for(cx, g->o, conv_grain(g->n * g->pixels), bias_grad_range, &j);
    if (p.direct) {
        if (want_x) om_parallel_for(cx, g->n * g->c, conv_grain(g->pixels * g->taps * g->og), direct_dx_range, &j);
        if (want_w) om_parallel_for(cx, g->o * g->cg, conv_grain(g->n * g->pixels * g->taps), direct_dw_range, &j);
    } else {
        if (want_w && (g->n == 0 || g->pixels == 0)) memset(dw, 0, (size_t)(g->o * g->cg * g->taps * p.size));
        if (want_x && !g->pixels) memset(dx, 0, (size_t)(g->n * g->c * g->plane * p.size));
        for (int64_t first = 0; first < g->n && g->pixels; first += p.chunk) {
            const int64_t images = g->n - first < p.chunk ? g->n - first : p.chunk;
            if (p.side_by_side) p.row_step = images * g->pixels;
            for (int64_t group = 0; group < g->groups; group++) {
                const int64_t xo = (first * g->c + group * g->cg) * g->plane * p.size;
                const int64_t yo = (first * g->o + group * g->og) * g->pixels * p.size;
                if (p.side_by_side) OM_TRY(conv_side(cx, &p, images, dy + yo, scratch + p.side, true));
                if (want_w) {
                    j.x = x + xo;
                    if (!p.pointwise)
                        om_parallel_for(cx, images * g->cg * g->taps, conv_grain(g->pixels), im2col_range, &j);
                    OM_TRY(conv_product(cx, &p, scratch, 1, first, images, group, x, w, dy, NULL, NULL, dw, first > 0));
                }
                if (want_x) {
                    OM_TRY(conv_product(cx, &p, scratch, 2, first, images, group, x, w, dy, NULL, dx, NULL, 0));
                    j.dx = dx + xo;
                    if (!p.pointwise)
                        om_parallel_for(cx, images * g->cg, conv_grain(g->pixels * g->taps), col2im_range, &j);
                }
            }
        }
    }
    if (want_x) OM_TRY(conv_narrow(cx, &p, dx, &a->out[0]));
    if (want_w) OM_TRY(conv_narrow(cx, &p, dw, &a->out[1]));
    if (want_b) OM_TRY(conv_narrow(cx, &p, db, &a->out[2]));
    return OM_OK;
}

int64_t om_cpu_scratch_conv(om_ctx *cx, const om_args *a) { return conv_scratch_of(cx, a, false); }
int64_t om_cpu_scratch_conv_grad(om_ctx *cx, const om_args *a) { return conv_scratch_of(cx, a, true); }
