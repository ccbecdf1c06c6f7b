/* conv.c - convolution over 1 to 3 spatial axes and its gradients on the CPU, as matrix products.
 *
 *     y[b, o] = w[o] (og, cg*taps)  x  patches of image b (cg*taps, pixels)            for each group
 *     dpatches = w^T dy, folded back into dx;     dw += dy patches^T;     db = sums of dy
 *
 * The patches are built (im2col) for as many images at a time as fit CONV_CHUNK bytes, then multiplied by om_gemm. When
 * an image has few output pixels, the images of a chunk stand side by side in one wide matrix instead of many small
 * ones. A convolution with one tap, stride 1 and no padding multiplies x itself, if its images are not small. With a
 * few channels per group (depthwise), products are too thin for GEMM: direct loops instead. Which way is taken depends
 * on the geometry alone.
 * f32 and f64 as they are; bf16 and f16 are widened once and computed in f32. Operands must be dense.
 * Deterministic: every output element is summed by one thread in a fixed order (dw: image after image).
 * Geometry, layout of scratch and the form of every product are worked out once per plan. The transpose is the half of
 * conv_grad that makes dx; im2col and col2im are what surrounds the products.
 */
#include "cpu/cpu.h"
#include "cpu/conv.h"
#include "cpu/copy.h"
#include "ops/attr.h"
#include "cpu/gemm.h"

enum { CONV_CHUNK = 8 << 20, /* bytes of patches built at a time */
       CONV_WIDE = 192,      /* fewer output pixels than this: images side by side, */
       CONV_FEW = 96,        /* also where that is all the patches are for (one tap) */
       CONV_DIRECT = 4 };    /* products with cg * og up to this go without GEMM */

/* --- geometry, products, layout of scratch --------------------------------------------------------------------- */

typedef struct conv_product { /* one group of one chunk of images */
    om_gemm_args g;
    om_gemm_how how;
    om_gemm_axis axis;         /* images */
} conv_product;

typedef struct conv_copies { /* prepared with the call */
    om_copy_job widen[3], narrow[3]; /* operands and results, where these are of 16 bits */
    om_copy_job side[2];             /* the images of a chunk, and of the last one, side by side or back */
    om_copy_job side_x;              /* narrow: x as dy */
} conv_copies;

typedef struct conv_plan {
    om_conv_geo g;
    int dtype, wide_dtype;     /* storage; what is computed in */
    int64_t size;              /* bytes of wide_dtype */
    bool pointwise, direct, side_by_side;
    bool narrow;               /* products of bf16 as bf16: pointwise, where the processor has them */
    bool bias;                 /* forward: is there one */
    om_conv_host_plan host;    /* and, of a gradient, which are wanted */
    int64_t chunk;             /* images at a time; what is left is the last chunk */
    int64_t row_step, image_step; /* of the patch matrix */
    const struct om_conv_type *k;
    /* scratch, bytes from its start */
    int64_t x_at, w_at, y_at, bias_at, dx_at, dw_at, db_at, col_at, side_at, gemm_at, total;
    om_conv_direct direct_y, direct_dw, direct_dx;
    const conv_copies *copy;
    int n_product;
    /* of a whole chunk, then, where it differs, of the last: forward y each, gradient dw and dx each */
    conv_product product[];
} conv_plan;
enum { CONV_PRODUCTS = 4 };
typedef union conv_room {
    conv_plan p;
    char bytes[sizeof(conv_plan) + CONV_PRODUCTS * sizeof(conv_product)];
} conv_room;

static int64_t conv_row_step(const conv_plan *p, int64_t images) {
    return p->side_by_side ? images * p->g.pixels : p->row_step;
}

static om_status conv_product_add(om_ctx *cx, conv_plan *p, int which, int64_t images) {
    const om_conv_geo *g = &p->g;
    const int64_t depth = g->cg * g->taps, px = p->side_by_side ? images * g->pixels : g->pixels;
    const int64_t prs = p->pointwise ? g->plane : conv_row_step(p, images), yrs = p->side_by_side ? px : g->pixels;
    const int64_t ystep = g->o * g->pixels, pstep = p->pointwise ? g->c * g->plane : p->image_step;
    conv_product *to = &p->product[p->n_product++];
    om_gemm_args *a = &to->g;
    *to = (conv_product){.g = {.dtype = p->wide_dtype, .alpha = 1, .batch = 1}};
    if (which == OM_CONV_Y) { /* y (og, px) = w (og, depth) patches (depth, px) */
        a->m = g->og, a->n = px, a->k = depth;
        a->rsa = depth, a->csa = 1, a->rsb = prs, a->csb = 1, a->rsc = yrs, a->csc = 1;
        to->axis = (om_gemm_axis){images, 0, pstep, ystep};
    } else if (which == OM_CONV_DW && p->narrow) { /* rounded once: all images in one product */
        a->m = g->og, a->n = depth, a->k = images * g->pixels;
        a->rsa = a->k, a->csa = 1, a->rsb = 1, a->csb = a->k, a->rsc = depth, a->csc = 1;
    } else if (which == OM_CONV_DW) { /* dw (og, depth) += dy (og, px) patches^T (px, depth), image after image */
        a->m = g->og, a->n = depth, a->k = px;
        a->rsa = yrs, a->csa = 1, a->rsb = 1, a->csb = prs, a->rsc = depth, a->csc = 1;
    } else { /* dpatches (depth, px) = w^T (depth, og) dy (og, px) */
        a->m = depth, a->n = px, a->k = g->og;
        a->rsa = 1, a->csa = depth, a->rsb = yrs, a->csb = 1, a->rsc = prs, a->csc = 1;
        to->axis = (om_gemm_axis){images, 0, ystep, pstep};
    }
    if (which != OM_CONV_DW && !p->side_by_side) a->batch = images, a->n_axis = 1;
    return om_gemm_prepare(cx, a, &to->how);
}

/* The spatial axes of x; k, out NULL: attribute kernel, as many windows as fit. */
static void conv_axes(const om_args *a, const om_tensor *x, const int64_t *k, const int64_t *out, om_conv_geo *g) {
    const int nd = x->rank - 2;
    om_window_args(a, nd, k, &g->w);
    g->taps = g->pixels = g->plane = 1;
    for (int i = 0; i < 3; i++) {
        const int s = i - (3 - nd); /* spatial axis, or < 0 */
        g->in[i] = s < 0 ? 1 : x->dim[2 + s];
        g->out[i] = s >= 0 && out ? out[s] : om_window_fits(&g->w, i, g->in[i]);
        g->taps *= g->w.k[i];
        g->pixels *= g->out[i];
        g->plane *= g->in[i];
    }
}

/* grad: inputs are dy, x, w; else x, w, bias? */
static om_status conv_layout(om_ctx *cx, const om_args *a, bool grad, conv_room *room) {
    conv_plan *p = &room->p;
    const om_tensor *x = &a->in[grad], *w = &a->in[1 + grad], *y = grad ? &a->in[0] : &a->out[0];
    int count;
    om_conv_geo *g = &p->g;
    *p = (conv_plan){.dtype = x->dtype, .wide_dtype = om_compute_dtype(x->dtype)};
    p->bias = !grad && a->n_in > 2 && a->in[2].dtype;
    const int64_t *want = attr_values(a, "want", &count);
    for (int i = 0; i < 3; i++) p->host.want[i] = grad && i < a->n_out && (i >= count || want[i]);
    p->size = (int64_t)om_dtype_size(p->wide_dtype);
    p->k = p->wide_dtype == OM_F64 ? &OM_PICK(om_conv)->f64 : &OM_PICK(om_conv)->f32;
    g->n = x->dim[0], g->c = x->dim[1], g->o = w->dim[0], g->groups = om_args_int(a, "groups", 1);
    g->cg = w->dim[1], g->og = g->o / g->groups;
    OM_CHECK(cx, g->cg * g->groups == g->c && g->og * g->groups == g->o,
             "%s: %lld channels in, %lld out, %lld per filter, %lld groups do not fit",
             a->node->op->name, (long long)g->c, (long long)g->o, (long long)g->cg, (long long)g->groups);
    conv_axes(a, x, w->dim + 2, y->dim + 2, g);
    bool plain = true;
    for (int i = 0; i < 3; i++)
        plain &= g->w.k[i] == 1 && g->w.stride[i] == 1 && g->in[i] == g->out[i] && g->w.lo[i] == 0;
    p->direct = g->cg * g->og <= CONV_DIRECT;
    p->pointwise = !p->direct && plain && (p->dtype == OM_BF16 || g->pixels >= CONV_FEW || g->n == 1);
    const int64_t depth = g->cg * g->taps, image = om_size_mul(om_size_mul(depth, g->pixels), p->size);
    p->narrow = p->pointwise && g->groups == 1 && p->dtype == OM_BF16 && om_isa_bf16();
    if (p->narrow) p->wide_dtype = p->dtype, p->size = 2;
    p->side_by_side = !p->direct && !p->pointwise && g->pixels < CONV_WIDE && g->n > 1;
    p->chunk = p->pointwise ? g->n : image > 0 ? CONV_CHUNK / image : g->n;
    p->chunk = p->chunk < 1 ? 1 : p->chunk > g->n ? g->n : p->chunk;
    p->row_step = p->side_by_side ? p->chunk * g->pixels : g->pixels;
    p->image_step = p->side_by_side ? g->pixels : depth * g->pixels;

    p->host.asked = om_conv_host(cx, g, p->dtype, p->pointwise, grad);
    if (p->host.asked) om_conv_host_layout(a, g, grad, &p->host);
    for (int i = 0; i < 3 && !p->host.asked; i++)
        if (g->out[i] == 1) g->w.stride[i] = 1; /* no second window: what is laid out by phases need not know of it */
    const bool widen = p->dtype != p->wide_dtype;
    if (widen) { /* f32 copies of everything */
        p->x_at = om_scratch_take(&p->total, om_numel(x) * p->size);
        p->w_at = om_scratch_take(&p->total, om_numel(w) * p->size);
        p->y_at = om_scratch_take(&p->total, om_numel(y) * p->size);
        p->bias_at = om_scratch_take(&p->total, p->bias ? g->o * p->size : 0);
        p->dx_at = om_scratch_take(&p->total, grad ? om_numel(&a->out[0]) * p->size : 0);
        p->dw_at = om_scratch_take(&p->total, grad ? om_numel(&a->out[1]) * p->size : 0);
        p->db_at = om_scratch_take(&p->total, grad ? om_numel(&a->out[2]) * p->size : 0);
    }
    if (p->narrow && p->host.want[2]) { /* for the bias's gradient */
        p->y_at = om_scratch_take(&p->total, om_numel(y) * (int64_t)sizeof(float));
        p->db_at = om_scratch_take(&p->total, g->o * (int64_t)sizeof(float));
    }
    if (p->narrow && p->host.want[1] && g->n > 1) {
        p->side_at = om_scratch_take(&p->total, om_numel(y) * p->size);
        p->x_at = om_scratch_take(&p->total, om_numel(x) * p->size);
    }
    if (p->direct && !grad) om_conv_direct_prepare(cx, g, OM_CONV_Y, p->size, &p->direct_y);
    if (p->direct && p->host.want[0]) om_conv_direct_prepare(cx, g, OM_CONV_DX, p->size, &p->direct_dx);
    if (p->direct && p->host.want[1]) om_conv_direct_prepare(cx, g, OM_CONV_DW, p->size, &p->direct_dw);
    if (p->direct) {
        const int64_t dx = p->direct_dx.scratch, dw = p->direct_dw.scratch;
        p->gemm_at = om_scratch_take(&p->total, grad ? dx > dw ? dx : dw : p->direct_y.scratch);
        return OM_OK;
    }
    p->col_at = om_scratch_take(&p->total, p->pointwise ? 0 : om_size_mul(p->chunk, image));
    if (p->side_by_side) p->side_at = om_scratch_take(&p->total, om_size_mul(p->chunk, g->og * g->pixels * p->size));
    const int64_t chunks[] = {p->chunk, p->chunk > 0 ? g->n % p->chunk : 0};
    for (int i = 0; i < 2 && chunks[i]; i++)
        for (int which = grad ? OM_CONV_DW : OM_CONV_Y; which <= (grad ? OM_CONV_DX : OM_CONV_Y); which++)
            OM_TRY(conv_product_add(cx, p, which, chunks[i]));
    int64_t most = 0;
    for (int i = 0; i < p->n_product; i++)
        if (p->product[i].how.scratch > most) most = p->product[i].how.scratch;
    p->gemm_at = om_scratch_take(&p->total, most);
    return OM_OK;
}

static int64_t conv_scratch(om_ctx *cx, const om_args *a, bool grad) {
    conv_room room;
    if (conv_layout(cx, a, grad, &room) != OM_OK) return 0;
    return room.p.host.asked ? room.p.host.scratch : room.p.total;
}

/* (images, channels, pixels) of one group, inside (n, all channels, pixels), as (channels, images, pixels) */
static void conv_side(const conv_plan *p, int64_t images, int64_t channels, int64_t all, om_tensor *inside,
                      om_tensor *side) {
    const int64_t pixels = p->g.pixels;
    *inside = (om_tensor){.dtype = (uint8_t)p->wide_dtype,
                          .rank = 3,
                          .device = -1,
                          .dim = {images, channels, pixels},
                          .stride = {all * pixels, pixels, 1}};
    *side = *inside;
    side->stride[0] = pixels;
    side->stride[1] = images * pixels;
}

static om_status conv_copies_make(om_ctx *cx, om_arena *mem, const om_args *a, bool grad, conv_plan *p) {
    conv_copies *c = om_arena_alloc(mem, sizeof *c);
    p->copy = c;
    if (!c) return cx->status;
    for (int i = 0; i < a->n_in + a->n_out && p->dtype != p->wide_dtype; i++) {
        const bool is_in = i < a->n_in;
        const om_tensor *t = is_in ? &a->in[i] : &a->out[i - a->n_in];
        if (!t->dtype) continue;
        om_tensor wide = *t;
        wide.dtype = (uint8_t)p->wide_dtype;
        om_dense_strides(&wide);
        if (is_in) OM_TRY(om_copy_prepared(cx, mem, t, &wide, &c->widen[i]));
        else OM_TRY(om_copy_prepared(cx, mem, &wide, t, &c->narrow[i - a->n_in]));
    }
    om_tensor inside, side;
    if (p->narrow && p->host.want[1] && p->g.n > 1) {
        conv_side(p, p->g.n, p->g.o, p->g.o, &inside, &side);
        OM_TRY(om_copy_prepared(cx, mem, &inside, &side, &c->side[0]));
        conv_side(p, p->g.n, p->g.c, p->g.c, &inside, &side);
        OM_TRY(om_copy_prepared(cx, mem, &inside, &side, &c->side_x));
    }
    if (p->narrow && p->host.want[2]) {
        om_tensor dy = a->in[0], db = a->out[2];
        dy.dtype = db.dtype = OM_F32;
        om_dense_strides(&dy), om_dense_strides(&db);
        OM_TRY(om_copy_prepared(cx, mem, &a->in[0], &dy, &c->widen[0]));
        OM_TRY(om_copy_prepared(cx, mem, &db, &a->out[2], &c->narrow[2]));
    }
    for (int i = 0; i < 2 && p->side_by_side; i++) {
        conv_side(p, i ? p->g.n % p->chunk : p->chunk, p->g.og, p->g.o, &inside, &side);
        OM_TRY(om_copy_prepared(cx, mem, grad ? &inside : &side, grad ? &side : &inside, &c->side[i]));
    }
    return OM_OK;
}

static om_status conv_prepare(om_ctx *cx, om_arena *mem, const om_args *a, bool grad, const void **prep) {
    conv_room room;
    OM_TRY(conv_layout(cx, a, grad, &room));
    OM_TRY(conv_copies_make(cx, mem, a, grad, &room.p));
    OM_TRY(om_conv_host_prepare(cx, mem, a, grad, &room.p.host));
    *prep = om_arena_copy(mem, &room, sizeof room.p + (size_t)room.p.n_product * sizeof *room.p.product);
    return *prep ? OM_OK : cx->status;
}

int64_t om_cpu_scratch_conv(om_ctx *cx, const om_args *a) { return conv_scratch(cx, a, false); }
int64_t om_cpu_scratch_conv_grad(om_ctx *cx, const om_args *a) { return conv_scratch(cx, a, true); }
om_status om_cpu_prepare_conv(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return conv_prepare(cx, mem, a, false, prep);
}
om_status om_cpu_prepare_conv_grad(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    return conv_prepare(cx, mem, a, true, prep);
}

/* --- running --------------------------------------------------------------------------------------------------- */

typedef struct conv_run_job {
    const conv_plan *p;
    int64_t row_step;          /* of the chunk */
    const char *x, *w, *dy, *bias;
    char *y, *dx, *dw, *db, *col;
    const char *image;         /* of the chunk and group: what im2col reads, */
    char *dimage;              /* what col2im writes */
} conv_run_job;

static void im2col_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->im2col(&j->p->g, j->image, j->col, j->row_step, j->p->image_step, b, e);
}
static void col2im_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->col2im(&j->p->g, j->col, j->row_step, j->p->image_step, j->dimage, b, e);
}
static void bias_grad_range(void *arg, int64_t b, int64_t e) {
    conv_run_job *j = arg;
    j->p->k->bias_grad(&j->p->g, j->dy, j->db, b, e);
}

static int64_t conv_grain(int64_t work_per_item) { return 1 + 32768 / (work_per_item + 1); }

/* Widened copy of operand i in scratch, or its own memory. */
static char *conv_widen(om_ctx *cx, const conv_plan *p, const om_args *a, int i, int64_t at) {
    char *to = (char *)a->scratch + at;
    if (p->dtype == p->wide_dtype) return a->in[i].data;
    om_copy_run(cx, &p->copy->widen[i], a->in[i].data, to);
    return to;
}

static void conv_narrow(om_ctx *cx, const conv_plan *p, const om_args *a, const char *from, int i) {
    if (p->dtype != p->wide_dtype) om_copy_run(cx, &p->copy->narrow[i], from, a->out[i].data);
}

/* One product of a chunk of images that begins with image `first`, for one group. */
static om_status conv_product_run(om_ctx *cx, const conv_plan *p, int which, int64_t first, int64_t group,
                                  const conv_run_job *j, char *scratch, int beta) {
    const om_conv_geo *g = &p->g;
    const bool rest = g->n - first < p->chunk;
    const conv_product *pr = &p->product[which == OM_CONV_Y ? rest : 2 * rest + (which == OM_CONV_DX)];
    const int64_t depth = g->cg * g->taps, size = p->size, images = rest ? g->n - first : p->chunk;
    const int64_t yo = (first * g->o + group * g->og) * g->pixels * size,
                  xo = (first * g->c + group * g->cg) * g->plane * size, wo = group * g->og * depth * size;
    char *side = scratch + p->side_at;
    om_gemm_args ga = pr->g;
    ga.beta = beta;
    ga.scratch = scratch + p->gemm_at;
    ga.axis = &pr->axis;
    /* only a group's rows of a pointwise dx are written: the product goes straight into dx */
    if (which == OM_CONV_Y) {
        ga.a = j->w + wo, ga.b = p->pointwise ? j->x + xo : j->col, ga.c = p->side_by_side ? side : j->y + yo;
        return om_gemm_run(cx, &ga, &pr->how);
    }
    if (which == OM_CONV_DX) {
        ga.a = j->w + wo, ga.b = p->side_by_side ? side : j->dy + yo, ga.c = p->pointwise ? j->dx + xo : j->col;
        return om_gemm_run(cx, &ga, &pr->how);
    }
    const int64_t ystep = g->o * g->pixels, pstep = p->pointwise ? g->c * g->plane : p->image_step;
    ga.c = j->dw + wo;
    if (p->narrow) {
        ga.a = g->n > 1 ? side : j->dy, ga.b = g->n > 1 ? scratch + p->x_at : j->x;
        return om_gemm_run(cx, &ga, &pr->how);
    }
    for (int64_t b = 0; b < (p->side_by_side ? 1 : images); b++) { /* image after image: the sum has one order */
        ga.a = p->side_by_side ? side : j->dy + yo + b * ystep * size;
        ga.b = (p->pointwise ? j->x + xo : j->col) + b * pstep * size;
        OM_TRY(om_gemm_run(cx, &ga, &pr->how));
        ga.beta = 1;
    }
    return OM_OK;
}

typedef struct bias_job {
    int64_t pixels, channels; /* of a plane; of an image */
    int dtype;
    char *y;
    const char *bias;
} bias_job;

static void bias_range(void *arg, int64_t begin, int64_t end) { /* y = bias, over planes (image, channel) */
    const bias_job *j = arg;
    for (int64_t i = begin; i < end; i++) {
        if (j->dtype == OM_BF16) {
            uint16_t *y = (uint16_t *)j->y + i * j->pixels, v = ((const uint16_t *)j->bias)[i % j->channels];
            for (int64_t k = 0; k < j->pixels; k++) y[k] = v;
        } else if (j->dtype == OM_F64) {
            double *y = (double *)j->y + i * j->pixels, v = ((const double *)j->bias)[i % j->channels];
            for (int64_t k = 0; k < j->pixels; k++) y[k] = v;
        } else {
            float *y = (float *)j->y + i * j->pixels, v = ((const float *)j->bias)[i % j->channels];
            for (int64_t k = 0; k < j->pixels; k++) y[k] = v;
        }
    }
}

static om_status conv_own(om_ctx *cx, const om_args *a) {
    const conv_plan *p = a->prep;
    const om_conv_geo *g = &p->g;
    om_tensor *y = &a->out[0];
    char *scratch = a->scratch, *x, *w, *bias = NULL, *out = p->dtype == p->wide_dtype ? y->data : scratch + p->y_at;
    x = conv_widen(cx, p, a, 0, p->x_at);
    w = conv_widen(cx, p, a, 1, p->w_at);
    if (p->bias) bias = conv_widen(cx, p, a, 2, p->bias_at);
    conv_run_job j = {.p = p, .x = x, .w = w, .bias = bias, .y = out, .col = scratch + p->col_at};
    if (p->direct) {
        om_conv_direct_run(cx, &p->direct_y, g, x, w, NULL, bias, out, scratch + p->gemm_at);
        conv_narrow(cx, p, a, out, 0);
        return OM_OK;
    }
    if (bias && !p->side_by_side) { /* else the copy below would overwrite it: added through the matrix */
        bias_job bj = {g->pixels, g->o, p->wide_dtype, out, bias};
        om_parallel_for(cx, g->n * g->o, conv_grain(g->pixels), bias_range, &bj);
    }
    for (int64_t first = 0; first < g->n; first += p->chunk) {
        const int64_t images = g->n - first < p->chunk ? g->n - first : p->chunk;
        j.row_step = conv_row_step(p, images);
        for (int64_t group = 0; group < g->groups; group++) {
            j.image = x + (first * g->c + group * g->cg) * g->plane * p->size;
            if (!p->pointwise) om_parallel_for(cx, images * g->cg * g->taps, conv_grain(g->pixels), im2col_range, &j);
            if (p->side_by_side && bias) { /* rows of the wide matrix start at the bias */
                bias_job bj = {images * g->pixels, g->og, p->wide_dtype, scratch + p->side_at,
                               bias + group * g->og * p->size};
                om_parallel_for(cx, g->og, conv_grain(bj.pixels), bias_range, &bj);
            }
            OM_TRY(conv_product_run(cx, p, OM_CONV_Y, first, group, &j, scratch, p->bias));
            if (p->side_by_side)
                om_copy_run(cx, &p->copy->side[images < p->chunk], scratch + p->side_at,
                            out + (first * g->o + group * g->og) * g->pixels * p->size);
        }
    }
    conv_narrow(cx, p, a, out, 0);
    return OM_OK;
}

static om_status conv_grad_own(om_ctx *cx, const om_args *a) {
    const conv_plan *p = a->prep;
    const om_conv_geo *g = &p->g;
    const bool narrow = p->dtype != p->wide_dtype;
    const bool want_x = p->host.want[0], want_w = p->host.want[1], want_b = p->host.want[2];
    char *scratch = a->scratch, *dy, *x = NULL, *w = NULL;
    char *dx = narrow ? scratch + p->dx_at : a->out[0].data, *dw = narrow ? scratch + p->dw_at : a->out[1].data;
    char *db = narrow ? scratch + p->db_at : a->out[2].data;
    dy = conv_widen(cx, p, a, 0, p->y_at);
    if (want_w) x = conv_widen(cx, p, a, 1, p->x_at);
    if (want_x) w = conv_widen(cx, p, a, 2, p->w_at);
    conv_run_job j = {.p = p, .x = x, .w = w, .dy = dy, .dx = dx, .dw = dw, .db = db, .col = scratch + p->col_at};
    if (p->narrow && want_w && g->n > 1) {
        om_copy_run(cx, &p->copy->side[0], dy, scratch + p->side_at);
        om_copy_run(cx, &p->copy->side_x, x, scratch + p->x_at);
    }
    if (p->narrow && want_b) {
        om_copy_run(cx, &p->copy->widen[0], dy, scratch + p->y_at);
        j.dy = scratch + p->y_at, j.db = scratch + p->db_at;
    }
    if (want_b) om_parallel_for(cx, g->o, conv_grain(g->n * g->pixels), bias_grad_range, &j);
    if (p->narrow && want_b) om_copy_run(cx, &p->copy->narrow[2], j.db, a->out[2].data);
    j.dy = dy;
    if (p->direct) {
        if (want_x) om_conv_direct_run(cx, &p->direct_dx, g, NULL, w, dy, NULL, dx, scratch + p->gemm_at);
        if (want_w) om_conv_direct_run(cx, &p->direct_dw, g, x, NULL, dy, NULL, dw, scratch + p->gemm_at);
    } else {
        if (want_w && (g->n == 0 || g->pixels == 0)) memset(dw, 0, (size_t)(g->o * g->cg * g->taps * p->size));
        if (want_x && !g->pixels) memset(dx, 0, (size_t)(g->n * g->c * g->plane * p->size));
        for (int64_t first = 0; first < g->n && g->pixels; first += p->chunk) {
            const int64_t images = g->n - first < p->chunk ? g->n - first : p->chunk;
            j.row_step = conv_row_step(p, images);
            for (int64_t group = 0; group < g->groups; group++) {
                const int64_t xo = (first * g->c + group * g->cg) * g->plane * p->size;
                const int64_t yo = (first * g->o + group * g->og) * g->pixels * p->size;
                if (p->side_by_side)
                    om_copy_run(cx, &p->copy->side[images < p->chunk], dy + yo, scratch + p->side_at);
                if (want_w) {
                    j.image = x + xo;
                    if (!p->pointwise)
                        om_parallel_for(cx, images * g->cg * g->taps, conv_grain(g->pixels), im2col_range, &j);
                    OM_TRY(conv_product_run(cx, p, OM_CONV_DW, first, group, &j, scratch, first > 0));
                }
                if (want_x) {
                    OM_TRY(conv_product_run(cx, p, OM_CONV_DX, first, group, &j, scratch, 0));
                    j.dimage = dx + xo;
                    if (!p->pointwise)
                        om_parallel_for(cx, images * g->cg, conv_grain(g->pixels * g->taps), col2im_range, &j);
                }
            }
        }
    }
    if (want_x) conv_narrow(cx, p, a, dx, 0);
    if (want_w) conv_narrow(cx, p, a, dw, 1);
    if (want_b) conv_narrow(cx, p, a, db, 2);
    return OM_OK;
}

static om_status conv_run(om_ctx *cx, const om_args *a, bool grad) {
    const conv_plan *p = a->prep;
    const bool none = !grad && (!p->g.n || !p->g.o || !p->g.pixels);
    if (none || (p->host.asked && om_conv_host_run(cx, a, &p->g, grad, &p->host))) return OM_OK;
    om_args own = *a;
    if (p->host.asked && !(own.scratch = om_alloc(cx, (size_t)p->total + 1))) return OM_NOMEM;
    const om_status s = grad ? conv_grad_own(cx, &own) : conv_own(cx, &own);
    if (p->host.asked) om_free(cx, own.scratch);
    return s;
}

om_status om_cpu_run_conv(om_ctx *cx, const om_args *a) { return conv_run(cx, a, false); }
om_status om_cpu_run_conv_grad(om_ctx *cx, const om_args *a) { return conv_run(cx, a, true); }

/* --- transpose: conv_grad's dx, x in the place of dy, y in those of x and dx -------------------------------------- */

typedef struct conv_turned { om_args a; om_tensor in[3], out[3]; } conv_turned;

static const om_args *conv_turn(const om_args *a, conv_turned *t) {
    const om_tensor none = {.dtype = a->out[0].dtype, .rank = 1, .device = -1};
    *t = (conv_turned){.a = *a, .in = {a->in[0], a->out[0], a->in[1]}, .out = {a->out[0], none, none}};
    t->a.in = t->in, t->a.out = t->out;
    t->a.n_in = 3;
    return &t->a; /* one output: nothing but dx is wanted */
}

int64_t om_cpu_scratch_conv_transpose(om_ctx *cx, const om_args *a) {
    conv_turned t;
    return conv_scratch(cx, conv_turn(a, &t), true);
}

om_status om_cpu_prepare_conv_transpose(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    conv_turned t;
    return conv_prepare(cx, mem, conv_turn(a, &t), true, prep);
}

om_status om_cpu_run_conv_transpose(om_ctx *cx, const om_args *a) {
    conv_turned t;
    return om_cpu_run_conv_grad(cx, conv_turn(a, &t));
}

/* --- im2col, col2im ----------------------------------------------------------------------------------------------- */

typedef struct patches_plan {
    om_conv_geo g;
    const struct om_conv_type *k;
    bool to_columns, widen;
    int dtype, wide_dtype;
    int64_t image_step, in_at, out_at, total; /* elements of an image's columns; widened operands in scratch */
} patches_plan;

static void patches_layout(const om_args *a, patches_plan *p) {
    const bool to = om_is(a->node, im2col);
    const om_tensor *x = to ? &a->in[0] : &a->out[0];
    om_conv_geo *g = &p->g;
    *p = (patches_plan){.to_columns = to, .dtype = x->dtype, .wide_dtype = om_compute_dtype(x->dtype)};
    p->widen = p->dtype != p->wide_dtype;
    p->k = p->wide_dtype == OM_F64 ? &OM_PICK(om_conv)->f64 : &OM_PICK(om_conv)->f32;
    g->n = x->dim[0], g->c = g->cg = x->dim[1], g->groups = 1;
    conv_axes(a, x, NULL, NULL, g);
    p->image_step = g->c * g->taps * g->pixels;
    if (!p->widen) return;
    p->in_at = om_scratch_take(&p->total, om_numel(&a->in[0]) * (int64_t)om_dtype_size(p->wide_dtype));
    p->out_at = om_scratch_take(&p->total, om_numel(&a->out[0]) * (int64_t)om_dtype_size(p->wide_dtype));
}

int64_t om_cpu_scratch_patches(om_ctx *cx, const om_args *a) {
    patches_plan p;
    (void)cx;
    patches_layout(a, &p);
    return p.total;
}

om_status om_cpu_prepare_patches(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    patches_plan p;
    patches_layout(a, &p);
    OM_CHECK(cx, om_numel(p.to_columns ? &a->out[0] : &a->in[0]) == p.g.n * p.image_step,
             "%s: %lld windows of %lld elements in %lld images do not fit the columns", a->node->op->name,
             (long long)p.g.pixels, (long long)(p.g.c * p.g.taps), (long long)p.g.n);
    *prep = om_arena_copy(mem, &p, sizeof p);
    return *prep ? OM_OK : cx->status;
}

typedef struct patches_job { const patches_plan *p; const void *from; void *to; } patches_job;

static void im2col_rows(void *arg, int64_t b, int64_t e) {
    const patches_job *j = arg;
    j->p->k->im2col(&j->p->g, j->from, j->to, j->p->g.pixels, j->p->image_step, b, e);
}
static void col2im_planes(void *arg, int64_t b, int64_t e) {
    const patches_job *j = arg;
    j->p->k->col2im(&j->p->g, j->from, j->p->g.pixels, j->p->image_step, j->to, b, e);
}

om_status om_cpu_run_patches(om_ctx *cx, const om_args *a) {
    const patches_plan *p = a->prep;
    const om_conv_geo *g = &p->g;
    om_tensor from = a->in[0], to = a->out[0];
    if (!om_numel(&to)) return OM_OK;
    if (p->widen) {
        from.dtype = to.dtype = (uint8_t)p->wide_dtype;
        from.data = (char *)a->scratch + p->in_at, to.data = (char *)a->scratch + p->out_at;
        OM_TRY(om_copy(cx, &a->in[0], &from));
    }
    patches_job j = {p, from.data, to.data};
    if (p->to_columns) om_parallel_for(cx, g->n * g->c * g->taps, conv_grain(g->pixels), im2col_rows, &j);
    else om_parallel_for(cx, g->n * g->c, conv_grain(g->pixels * g->taps), col2im_planes, &j);
    return p->widen ? om_copy(cx, &to, &a->out[0]) : OM_OK;
}
