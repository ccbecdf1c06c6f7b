/* window.c - the rule of window.h, in size expressions and in numbers. */
#include "ops/window.h"

#include "ops/attr.h"

static bool window_pools(const om_node *n) {
    return om_is(n, max_pool) || om_is(n, avg_pool) || om_is(n, avg_pool_grad);
}

static bool window_within(int64_t x, int64_t least) { return x >= least && x <= INT32_MAX; }

om_status om_window_axes(om_graph *g, const om_node *n, int *axes) {
    const om_attr *kernel = om_attr_get(n->attr, n->n_attr, "kernel");
    *axes = 0;
    OM_CHECK(g->cx, kernel && kernel->kind == OM_ATTR_DIMS && kernel->n >= 1 && kernel->n <= OM_WINDOW_AXES,
             "%s: kernel must list a size for each spatial axis, 1 to %d", n->op->name, OM_WINDOW_AXES);
    *axes = (int)kernel->n;
    return OM_OK;
}

om_status om_window_read(om_graph *g, const om_node *n, int axes, om_window *w) {
    const om_attr *pad = om_attr_get(n->attr, n->n_attr, "pad");
    const bool pool = window_pools(n);
    const bool both = !pool && pad && pad->kind == OM_ATTR_DIMS && pad->n == 2u * (uint32_t)axes;
    int64_t p[2 * OM_WINDOW_AXES], taps = 1;
    *w = (om_window){.axes = axes, .ceil = pool && om_node_int(n, "ceil", 0) != 0};
    OM_TRY(attr_ints(g, n, "kernel", axes, 1, w->k));
    OM_TRY(attr_ints(g, n, "stride", axes, 1, w->stride));
    OM_TRY(attr_ints(g, n, "dilation", axes, 1, w->dil));
    OM_TRY(attr_ints(g, n, "pad", both ? 2 * axes : axes, 0, p));
    for (int i = 0; i < axes; i++) {
        if (pool && !om_attr_get(n->attr, n->n_attr, "stride")) w->stride[i] = w->k[i];
        w->lo[i] = p[i];
        w->hi[i] = p[both ? axes + i : i];
        OM_CHECK(g->cx,
                 window_within(w->stride[i], 1) && window_within(w->dil[i], 1) && window_within(w->lo[i], 0) &&
                     window_within(w->hi[i], 0),
                 "%s: stride %lld, dilation %lld, pad %lld and %lld along spatial axis %d; stride and dilation must be "
                 "at least 1, pad at least 0, each less than 2^31",
                 n->op->name, (long long)w->stride[i], (long long)w->dil[i], (long long)w->lo[i], (long long)w->hi[i],
                 i);
        OM_CHECK(g->cx, w->k[i] >= 1 && w->k[i] <= INT32_MAX / taps && w->dil[i] <= INT32_MAX / w->k[i],
                 "%s: kernel %lld, dilation %lld along spatial axis %d; a window has and spans 1 to 2^31 - 1 elements",
                 n->op->name, (long long)w->k[i], (long long)w->dil[i], i);
        OM_CHECK(g->cx, !pool || 2 * w->lo[i] <= w->dil[i] * (w->k[i] - 1) + 1,
                 "%s: pad %lld, kernel %lld, dilation %lld along spatial axis %d; pad must be at most half the window",
                 n->op->name, (long long)w->lo[i], (long long)w->k[i], (long long)w->dil[i], i);
        taps *= w->k[i];
    }
    return OM_OK;
}

static om_dim window_span(om_graph *g, const om_window *w, int i, om_dim k) {
    return om_dim_add(g, om_dim_mul(g, om_dim_sub(g, k, 1), w->dil[i]), 1);
}

om_status om_window_count(om_graph *g, const om_node *n, const om_window *w, int i, om_dim in, om_dim k,
                          om_dim *count) {
    const int64_t s = w->stride[i], up = w->ceil ? s - 1 : 0;
    const om_dim room = om_dim_sub(g, om_dim_add(g, in, w->lo[i] + w->hi[i]), window_span(g, w, i, k));
    int64_t known;
    OM_CHECK(g->cx, !om_dim_const(g, room, &known) || known + up >= 0,
             "%s: the kernel is larger than the padded input along spatial axis %d", n->op->name, i);
    *count = om_dim_add(g, om_dim_div(g, up ? om_dim_add(g, room, up) : room, s), 1);
    if (w->ceil) { /* (count - 1) stride < in + lo */
        const om_dim last = om_dim_sub(g, om_dim_add(g, in, w->lo[i]), 1);
        *count = om_dim_min(g, *count, om_dim_add(g, om_dim_div(g, last, s), 1));
    }
    return OM_OK;
}

om_status om_window_length(om_graph *g, const om_node *n, const om_window *w, int i, om_dim count, om_dim k,
                           int64_t more, om_dim *length) {
    const om_dim first = om_dim_add(g, window_span(g, w, i, k), more);
    const om_dim all = om_dim_add(g, om_dim_mul(g, om_dim_sub(g, count, 1), w->stride[i]), first);
    int64_t known;
    *length = om_dim_sub(g, all, w->lo[i] + w->hi[i]);
    OM_CHECK(g->cx, !om_dim_const(g, *length, &known) || known >= 1, "%s: the result has size %lld along spatial axis "
             "%d", n->op->name, (long long)known, i);
    return OM_OK;
}

void om_window_args(const om_args *a, int axes, const int64_t *k, om_window *w) {
    const bool pool = window_pools(a->node);
    int n_pad = 0;
    const int64_t *pad = attr_values(a, "pad", &n_pad);
    *w = (om_window){.axes = OM_WINDOW_AXES};
    for (int i = 0; i < OM_WINDOW_AXES; i++) {
        const int s = i - (OM_WINDOW_AXES - axes); /* spatial axis, or < 0 */
        w->k[i] = w->stride[i] = w->dil[i] = 1;
        if (s < 0) continue;
        w->k[i] = k ? k[s] : attr_entry(a, "kernel", s, 1);
        w->stride[i] = attr_entry(a, "stride", s, pool ? w->k[i] : 1);
        w->dil[i] = attr_entry(a, "dilation", s, 1);
        w->lo[i] = attr_entry(a, "pad", s, 0);
        w->hi[i] = !pool && n_pad == 2 * axes ? pad[axes + s] : w->lo[i];
    }
}

int64_t om_window_fits(const om_window *w, int i, int64_t in) {
    const int64_t room = in + w->lo[i] + w->hi[i] - w->dil[i] * (w->k[i] - 1) - 1;
    return room < 0 ? 0 : room / w->stride[i] + 1;
}
