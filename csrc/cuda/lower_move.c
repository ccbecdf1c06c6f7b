/* lower_move.c - ops/move.c on the GPU: copies onto parts of the output, casts of many tensors, fills. */
#include "cuda/lower.h"
#include "ops/attr.h"

typedef struct part { om_tensor t; int64_t at; } part;

static part part_of(const part *p, int axis, int64_t start, int64_t count, int64_t step) {
    part q = *p;
    q.at += start * p->t.stride[axis] * (int64_t)om_dtype_size(p->t.dtype);
    q.t.dim[axis] = count;
    q.t.stride[axis] *= step;
    return q;
}

static om_status copy_to(om_lower *l, int in, const part *from, const part *to) {
    return om_gpu_copy_lower(l, in, &from->t, from->at, l->a->n_in, &to->t, to->at);
}

/* Attribute `value` (0 when absent) as bytes of the output's dtype; the numbers a fill or an iota was given. */
static bool number(const om_args *a, const char *name, double *f, int64_t *i) {
    const om_attr *x = om_attr_get(a->attr, a->n_attr, name);
    if (!x) return true;
    *i = x->kind == OM_ATTR_INT ? x->i : x->kind == OM_ATTR_DIMS && x->n == 1 ? x->dims[0] : 0;
    *f = x->kind == OM_ATTR_FLOAT ? x->f : (double)*i;
    return x->kind != OM_ATTR_FLOAT;
}

static om_status value_of(om_lower *l, uint64_t *bytes) {
    double f = 0;
    int64_t i = 0;
    const bool is_int = number(l->a, "value", &f, &i);
    om_tensor from = {.data = is_int ? (void *)&i : (void *)&f, .dtype = is_int ? OM_I64 : OM_F64, .device = -1};
    om_tensor to = {.data = bytes, .dtype = l->a->out[0].dtype, .device = -1};
    *bytes = 0;
    return om_copy(l->cx, &from, &to);
}

om_status om_gpu_fill_lower(om_lower *l, int out, const om_tensor *dst, int64_t dst_offset, uint64_t value) {
    const int64_t n = om_numel(dst), e = (int64_t)om_dtype_size(dst->dtype);
    if (!n) return OM_OK;
    if (!om_is_dense(dst)) { /* one slab after another along the outermost axis */
        int axis = 0;
        while (dst->dim[axis] == 1) axis++;
        om_tensor slab = *dst;
        slab.dim[axis] = 1;
        for (int64_t i = 0; i < dst->dim[axis]; i++)
            OM_TRY(om_gpu_fill_lower(l, out, &slab, dst_offset + i * dst->stride[axis] * e, value));
        return OM_OK;
    }
    om_gpu_fill *g = om_gpu_add(l, OM_GPU_fill, om_gpu_grid(n * e, 8192), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->n = n, g->value = value, g->size = (int32_t)e;
    om_gpu_part(l, &g->dst, out, dst_offset, 0, n * e, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_copy(om_lower *l) {
    const part x = {.t = l->a->in[0]}, y = {.t = l->a->out[0]};
    return copy_to(l, 0, &x, &y);
}

/* One launch for what lies dense, on both sides; one each for what does not. */
om_status om_lower_cast_all(om_lower *l) {
    const om_args *a = l->a;
    om_gpu_casts p = {0};
    int operand[OM_GPU_CASTS];
    int64_t blocks = 0;
    _Static_assert(OM_GPU_CASTS >= (int)OM_MAX_OUT, "one launch holds a node");
    for (int i = 0; i < a->n_in; i++) {
        const part x = {.t = a->in[i]}, y = {.t = a->out[i]};
        const int64_t n = om_numel(&x.t);
        if (!n) continue;
        if (!om_is_dense(&x.t) || !om_is_dense(&y.t)) {
            OM_TRY(om_gpu_copy_lower(l, i, &x.t, 0, a->n_in + i, &y.t, 0));
            continue;
        }
        operand[p.count] = i;
        p.n[p.count] = n, p.first[p.count] = (uint32_t)blocks;
        p.from[p.count] = x.t.dtype, p.to[p.count++] = y.t.dtype;
        blocks += om_gpu_blocks(n, OM_GPU_CAST_TILE);
    }
    om_gpu_casts *g = om_gpu_add(l, OM_GPU_cast_all, blocks, 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    *g = p;
    for (uint32_t k = 0; k < p.count; k++) {
        om_gpu_in(l, &g->src[k], operand[k]);
        om_gpu_out(l, &g->dst[k], operand[k], OM_GPU_WRITE);
    }
    return OM_OK;
}

/* What is left of y after parts were cut off is dense only outside of them: y is filled whole, then written over. */
static om_status fill_all(om_lower *l) {
    uint64_t value;
    OM_TRY(value_of(l, &value));
    return om_gpu_fill_lower(l, l->a->n_in, &l->a->out[0], 0, value);
}

om_status om_lower_fill(om_lower *l) { return fill_all(l); }

om_status om_lower_concat(om_lower *l) {
    const om_args *a = l->a;
    const int axis = (int)om_args_int(a, "axis", 0);
    const part y = {.t = a->out[0]};
    int64_t start = 0;
    for (int i = 0; i < a->n_in; i++) {
        OM_CHECK(l->cx, start + a->in[i].dim[axis] <= y.t.dim[axis], "concat: operand %d does not fit the output", i);
        const part x = {.t = a->in[i]}, to = part_of(&y, axis, start, a->in[i].dim[axis], 1);
        OM_TRY(copy_to(l, i, &x, &to));
        start += a->in[i].dim[axis];
    }
    return OM_OK;
}

om_status om_lower_pad(om_lower *l) {
    const om_args *a = l->a;
    int count;
    const int64_t *lo = attr_values(a, "lo", &count), *hi = attr_values(a, "hi", &count);
    part x = {.t = a->in[0]}, y = {.t = a->out[0]};
    bool adds = false, any = true;
    for (int i = 0; i < x.t.rank; i++) {
        const int64_t head = lo[i] > 0 ? lo[i] : 0, skip = lo[i] < 0 ? -lo[i] : 0;
        const int64_t n = x.t.dim[i] - skip - (hi[i] < 0 ? -hi[i] : 0);
        adds |= lo[i] > 0 || hi[i] > 0;
        if (!(any &= n > 0)) break;
        x = part_of(&x, i, skip, n, 1);
        y = part_of(&y, i, head, n, 1);
    }
    if (adds || !any) OM_TRY(fill_all(l));
    return any ? copy_to(l, 0, &x, &y) : OM_OK;
}

static om_status slice_of(om_lower *l, const om_tensor *src, part *to) {
    const om_args *a = l->a;
    const part y = {.t = a->out[0]};
    const int axis = (int)om_args_int(a, "axis", 0);
    const int64_t start = attr_value(a, "start", 0), step = om_args_int(a, "step", 1), size = y.t.dim[axis],
                  end = attr_value(a, "end", size), n = (end - start + step - 1) / step;
    OM_CHECK(l->cx, start >= 0 && start <= end && end <= size && n == src->dim[axis],
             "%s: %lld to %lld step %lld of axis %d of size %lld for %lld elements", a->node->op->name,
             (long long)start, (long long)end, (long long)step, axis, (long long)size, (long long)src->dim[axis]);
    *to = part_of(&y, axis, n ? start : 0, n, step);
    return OM_OK;
}

om_status om_lower_slice_put(om_lower *l) {
    const part x = {.t = l->a->in[0]};
    part to;
    OM_TRY(slice_of(l, &x.t, &to));
    OM_TRY(fill_all(l));
    return copy_to(l, 0, &x, &to);
}

om_status om_lower_slice_scatter(om_lower *l) {
    const part x = {.t = l->a->in[0]}, src = {.t = l->a->in[1]}, y = {.t = l->a->out[0]};
    part to;
    OM_TRY(slice_of(l, &src.t, &to));
    OM_TRY(copy_to(l, 0, &x, &y)); /* in place: onto itself */
    return copy_to(l, 1, &src, &to);
}

om_status om_lower_trilu(om_lower *l) {
    const om_tensor *x = &l->a->in[0];
    const int64_t n = om_numel(x);
    if (!om_is_dense(&l->a->out[0])) return om_gpu_host(l);
    om_gpu_trilu *g = om_gpu_add(l, OM_GPU_trilu, om_gpu_grid(n, 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->total = n, g->rank = x->rank, g->size = (int32_t)om_dtype_size(x->dtype);
    g->k = attr_value(l->a, "k", 0), g->upper = om_args_int(l->a, "upper", 1) != 0;
    memcpy(g->dim, x->dim, sizeof g->dim);
    memcpy(g->from, x->stride, sizeof g->from);
    om_gpu_in(l, &g->src, 0);
    om_gpu_out(l, &g->dst, 0, OM_GPU_WRITE);
    return OM_OK;
}

om_status om_lower_iota(om_lower *l) {
    const om_tensor *y = &l->a->out[0];
    double start = 0, step = 1;
    int64_t istart = 0, istep = 1;
    const bool int0 = number(l->a, "start", &start, &istart), int1 = number(l->a, "step", &step, &istep);
    /* integers from fractions, bool: rare */
    if ((om_is_int(y->dtype) && !(int0 && int1)) || y->dtype == OM_BOOL || !om_is_dense(y)) return om_gpu_host(l);
    om_gpu_iota *g = om_gpu_add(l, OM_GPU_iota, om_gpu_blocks(y->dim[0], 256), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->n = y->dim[0], g->start = start, g->step = step, g->istart = istart, g->istep = istep, g->dtype = y->dtype;
    om_gpu_out(l, &g->dst, 0, OM_GPU_WRITE);
    return OM_OK;
}
