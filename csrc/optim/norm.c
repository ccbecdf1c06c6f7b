/* norm.c - norms over all tensors of a list with the finiteness check in the same sweep, and scaled copies.
 *
 * Partial results are kept per block of OM_OPTIM_BLOCK elements and combined in block order, in f64: the result depends
 * neither on threads nor, for f32 and narrower elements, on overflow of squares. A sum of squares of such elements is
 * finite exactly when all of them are, so the check costs nothing; for f64 and the other norms a second look is taken
 * only if the sum is not finite. Tensors of any strides: one without gaps is read where it lies, whatever its order;
 * others are copied first.
 */
#include "optim/list.h"
#include "cpu/kernels_isa.h"

OM_DECLARE_ISA(struct om_optim_kernels, om_optim);

typedef struct norm_run {
    const struct om_optim_kernels *k;
    double ord, *part; /* per block */
} norm_run;

static void norm_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    (void)i;
    const norm_run *r = arg;
    r->part[block] = r->ord == 2          ? r->k->sum_squares(s->tp, s->p, s->n)
                     : r->ord == INFINITY ? r->k->max_abs(s->tp, s->p, s->n)
                                          : r->k->sum_powers(s->tp, s->p, s->n, r->ord);
}

static double norm_join(double ord, double a, double b) {
    if (ord != INFINITY) return a + b;
    return a != a || a > b ? a : b; /* a NaN stays; b's NaN is returned by the comparison */
}

static double norm_root(double ord, double sum) {
    return ord == 2 ? sqrt(sum) : ord == INFINITY || ord == 1 ? sum : pow(sum, 1 / ord);
}

/* One span per non-empty dst[i]: dst as p and, for axpby, src (NULL: dst itself) as g, in one order. */
static om_status norm_open(om_ctx *cx, const char *op, const om_tensor *dst, bool write, const om_tensor *src, int n,
                           om_optim_list *l) {
    OM_TRY(om_optim_start(cx, op, n, l));
    for (int i = 0; i < n; i++) {
        om_tensor d = dst[i], x = src ? src[i] : d;
        OM_CHECK(cx, om_is_float(d.dtype) && om_is_float(x.dtype), "%s: tensor %d is %s; allowed: f32, f64, bf16, f16",
                 op, i, om_dtype_name(om_is_float(d.dtype) ? x.dtype : d.dtype));
        if (d.device != -1 || x.device != -1)
            return om_fail(cx, OM_UNSUPPORTED, "%s: tensor %d is on a CUDA device; these are the CPU kernels", op, i);
        bool same = d.rank == x.rank;
        for (int j = 0; same && j < d.rank; j++) same = d.dim[j] == x.dim[j];
        OM_CHECK(cx, same, "%s: the tensors of pair %d have different sizes", op, i);
        const int64_t numel = om_numel(&d);
        if (!numel) continue;
        if (!om_optim_gapless(&d)) {
            om_tensor order = d;
            om_dense_strides(&order);
            OM_TRY(om_optim_temp_make(l, &d, &order, write));
        }
        if (!src) x = d;
        if (!om_optim_same_order(&x, &d)) OM_TRY(om_optim_temp_make(l, &x, &d, false));
        om_optim_span *s = om_optim_add(l, i, numel);
        s->p = d.data, s->tp = d.dtype, s->g = x.data, s->tg = x.dtype;
    }
    return OM_OK;
}

om_status om_norm(om_ctx *cx, const om_tensor *x, int n, double ord, double *norm, bool *finite, double *per_tensor) {
    OM_CHECK(cx, ord > 0, "norm: order %g given; allowed: positive numbers and infinity", ord);
    om_optim_list l;
    norm_run r = {OM_PICK(om_optim), ord, NULL};
    om_status s = norm_open(cx, "norm", x, false, NULL, n, &l);
    if (s == OM_OK && !(r.part = om_alloc(cx, sizeof *r.part * (size_t)(l.first[l.n] + 1)))) s = OM_NOMEM;
    if (s == OM_OK) {
        om_optim_blocks(&l, norm_block, &r);
        double all = 0;
        for (int i = 0; per_tensor && i < n; i++) per_tensor[i] = 0;
        for (int i = 0; i < l.n; i++) {
            double one = 0;
            for (int64_t b = l.first[i]; b < l.first[i + 1]; b++) one = norm_join(ord, one, r.part[b]);
            if (per_tensor) per_tensor[l.param[i]] = norm_root(ord, one);
            all = norm_join(ord, all, one);
        }
        *norm = norm_root(ord, all);
        *finite = isfinite(all);
        bool look_again = !*finite && ord != INFINITY;
        if (look_again && ord == 2) { /* only f64 squares can overflow */
            look_again = false;
            for (int i = 0; i < l.n; i++) look_again |= l.span[i].tp == OM_F64;
        }
        if (look_again) {
            r.ord = INFINITY;
            om_optim_blocks(&l, norm_block, &r);
            *finite = true;
            for (int64_t b = 0; b < l.first[l.n]; b++) *finite = *finite && isfinite(r.part[b]);
        }
    }
    om_free(cx, r.part);
    return om_optim_close(&l, s);
}

/* --- scaled copies --------------------------------------------------------------------------------- */

typedef struct axpby_run {
    const struct om_optim_kernels *k;
    double a, b;
} axpby_run;

static void axpby_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    (void)i, (void)block;
    const axpby_run *r = arg;
    r->k->axpby(s->tp, s->p, s->tg, s->g, s->n, r->a, r->b);
}

om_status om_axpby(om_ctx *cx, om_tensor *dst, const om_tensor *src, int n, double a, double b) {
    om_optim_list l;
    om_status s = norm_open(cx, "axpby", dst, true, src, n, &l);
    if (s == OM_OK) {
        axpby_run r = {OM_PICK(om_optim), a, b};
        om_optim_blocks(&l, axpby_block, &r);
    }
    return om_optim_close(&l, s);
}

om_status om_scale(om_ctx *cx, om_tensor *dst, const om_tensor *src, int n, double scale) {
    return om_axpby(cx, dst, src, n, scale, 0);
}
