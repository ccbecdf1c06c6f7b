/* lower_strip.c - elementwise operators and chains as launches of the strip interpreter (strip_body.h), from the
 * program that cpu/strip.c compiles: the same instructions, registers and random words as on the CPU. */
#include "cuda/lower.h"
#include "cpu/philox.h"
#include "cpu/strip.h"
#include "cuda/program.h"
#include "cuda/strip_source.h"

enum { THREADS = 128, UNIT = 512, SHARED_MOST = 40 << 10, STRIP_TEXT = 24 << 10 };

typedef struct strip_side { const om_tensor *t; int operand; int64_t offset; } strip_side;

static om_status axes_merge(om_ctx *cx, const strip_side *side, int n_in, int n, int64_t *dim, int *rank,
                            int64_t stride[][OM_RANK]) {
    const om_tensor *shape = side[n_in].t;
    int64_t full[OM_STRIP_IN + OM_STRIP_OUT][OM_RANK] = {{0}};
    for (int k = 0; k < n; k++) {
        const om_tensor *t = side[k].t;
        const int lead = shape->rank - t->rank;
        if (lead < 0) return om_fail(cx, OM_INVALID, "pointwise: operand %d has more axes than the result", k);
        for (int i = 0; i < t->rank; i++) {
            if (t->dim[i] == shape->dim[lead + i]) full[k][lead + i] = t->dim[i] == 1 ? 0 : t->stride[i];
            else if (t->dim[i] != 1 || k >= n_in)
                return om_fail(cx, OM_INVALID, "pointwise: operand %d does not broadcast to the result's sizes", k);
        }
    }
    *rank = 0;
    for (int i = 0; i < shape->rank; i++) {
        if (shape->dim[i] == 1) continue;
        bool merge = *rank > 0;
        for (int k = 0; merge && k < n; k++) merge = stride[k][*rank - 1] == full[k][i] * shape->dim[i];
        if (!merge) dim[(*rank)++] = 1;
        dim[*rank - 1] *= shape->dim[i];
        for (int k = 0; k < n; k++) stride[k][*rank - 1] = full[k][i];
    }
    if (*rank) return OM_OK;
    dim[(*rank)++] = 1;
    for (int k = 0; k < n; k++) stride[k][0] = 0;
    return OM_OK;
}

/* n_in operands, then outputs; `mode` of operand addresses is read, of outputs write */
static om_status strip_lower(om_lower *l, const om_strip_prog *p, const strip_side *side) {
    const int n = p->n_in + p->n_out;
    int64_t dim[OM_RANK], stride[OM_STRIP_IN + OM_STRIP_OUT][OM_RANK], total = om_numel(side[p->n_in].t);
    int rank = 0;
    OM_TRY(axes_merge(l->cx, side, p->n_in, n, dim, &rank, stride));
    const size_t stride_at = (size_t)n * 8, draw_at = stride_at + (size_t)(n * rank) * 8,
                 operand_at = draw_at + p->n_draw * sizeof(om_gpu_draw),
                 insn_at = operand_at + (size_t)n * sizeof(om_gpu_operand),
                 size = insn_at + p->n_insn * sizeof(om_gpu_insn);
    if (size > OM_GPU_STRIP_LARGE) return l->a->node ? om_gpu_host(l) : om_fail(l->cx, OM_INTERNAL, "a copy too large");
    bool wide = false;
    for (int i = 0; i < p->n_insn; i++) wide |= p->insn[i].cls == OM_STRIP_D;
    uint32_t unit = UNIT, elem = p->elem_bytes ? p->elem_bytes : 8;
    while (unit > THREADS && unit * elem > SHARED_MOST) unit /= 2;
    const bool large = size > OM_GPU_STRIP_SMALL;
    om_gpu_strip *g = om_gpu_add(l, large ? wide ? OM_GPU_strip64_large : OM_GPU_strip_large
                                          : wide ? OM_GPU_strip64 : OM_GPU_strip,
                                 om_gpu_grid(total, unit), 1, 1, THREADS, (size_t)unit * elem,
                                 large ? sizeof(om_gpu_strip_large) : sizeof(om_gpu_strip));
    if (!g) return l->cx->status;
    g->total = total, g->n_in = p->n_in, g->n_out = p->n_out, g->n_insn = p->n_insn, g->rank = (uint16_t)rank;
    g->unit = unit;
    g->stride_at = (uint16_t)stride_at, g->draw_at = (uint16_t)draw_at, g->operand_at = (uint16_t)operand_at;
    g->insn_at = (uint16_t)insn_at;
    memcpy(g->dim, dim, sizeof g->dim);
    char *blob = (char *)g + offsetof(om_gpu_strip, blob);
    for (int k = 0; k < n; k++) {
        const bool is_in = k < p->n_in;
        const om_tensor *t = side[k].t;
        int64_t lo = 0, hi = (int64_t)om_dtype_size(t->dtype);
        for (int d = 0; d < rank; d++) {
            const int64_t far = (dim[d] - 1) * stride[k][d] * (int64_t)om_dtype_size(t->dtype);
            *(far < 0 ? &lo : &hi) += far;
        }
        om_gpu_part(l, blob + 8 * k, side[k].operand, side[k].offset, lo, hi, is_in ? OM_GPU_READ : OM_GPU_WRITE);
        memcpy(blob + stride_at + (size_t)(k * rank) * 8, stride[k], (size_t)rank * 8);
        const int v = is_in ? k : p->out_val[k - p->n_in];
        const om_gpu_operand o = {p->reg[v], t->dtype, p->cls[v]};
        memcpy(blob + operand_at + (size_t)k * sizeof o, &o, sizeof o);
    }
    for (int i = 0; i < p->n_draw; i++) {
        const om_gpu_draw d = {p->draw[i].rng, p->draw[i].scale, p->draw[i].keep_below, p->draw[i].all};
        memcpy(blob + draw_at + (size_t)i * sizeof d, &d, sizeof d);
    }
    for (int i = 0; i < p->n_insn; i++) {
        const om_insn *in = &p->insn[i];
        const om_gpu_insn x = {in->op, in->cls, p->reg[in->dst], p->reg[in->a],
                               in->op == OM_S_dropout ? in->b : p->reg[in->b], p->reg[in->c]};
        memcpy(blob + insn_at + (size_t)i * sizeof x, &x, sizeof x);
    }
    if (p->n_draw) om_gpu_scalars_at(l, &g->scalars);
    if (!l->a->node) return OM_OK; /* a copy: it may be of this moment only */
    char text[STRIP_TEXT];
    uint8_t dtype[OM_STRIP_IN + OM_STRIP_OUT];
    for (int k = 0; k < n; k++) dtype[k] = side[k].t->dtype;
    const om_strip_layout layout = {.prog = p, .dtype = dtype, .dim = dim, .stride = stride, .rank = rank,
                                    .total = total, .large = large, .stride_at = g->stride_at, .draw_at = g->draw_at};
    l->last->program = om_gpu_program_of(om_cuda_gpu(l->cx), text, om_strip_source(&layout, text, sizeof text), total);
    return OM_OK;
}

om_status om_lower_strip(om_lower *l) {
    const om_args *a = l->a;
    om_strip_text t;
    om_strip_room room;
    om_strip_prog p;
    uint8_t dtype[OM_STRIP_IN];
    bool uniform[OM_STRIP_IN] = {0};
    strip_side side[OM_STRIP_IN + OM_STRIP_OUT];
    for (int i = 0; i < a->n_in; i++) {
        dtype[i] = a->in[i].dtype;
        uniform[i] = om_numel(&a->in[i]) == 1;
        side[i] = (strip_side){&a->in[i], i, 0};
    }
    for (int i = 0; i < a->n_out; i++) side[a->n_in + i] = (strip_side){&a->out[i], a->n_in + i, 0};
    OM_TRY(om_strip_of_node(l->cx, a->node, a->attr, a->out[0].dtype, &t));
    OM_TRY(om_strip_compile(l->cx, &t, dtype, uniform, &room, &p));
    return strip_lower(l, &p, side);
}

/* --- copies ------------------------------------------------------------------------------------------- */

typedef struct copy_axis { int64_t n, from, to; } copy_axis;
static int64_t size_of(int64_t x) { return x < 0 ? -x : x; }

static om_status converted(om_lower *l, int in, const om_tensor *src, int64_t src_offset, int out,
                           const om_tensor *dst, int64_t dst_offset) {
    const om_strip_text t = {.n_in = 1,
                             .n_stmt = 1,
                             .n_out = 1,
                             .out = {1},
                             .stmt = {{.op = OM_S_cast, .n_arg = 1, .dtype = dst->dtype}}};
    const strip_side side[2] = {{src, in, src_offset}, {dst, out, dst_offset}};
    om_strip_room room;
    om_strip_prog p;
    const uint8_t dtype = src->dtype;
    OM_TRY(om_strip_compile(l->cx, &t, &dtype, NULL, &room, &p));
    return strip_lower(l, &p, side);
}

/* Bytes that may be moved at once: the innermost runs, where they run on both sides, are whole units and begin where
 * units do. */
static int64_t unit_of(const copy_axis *axis, int n, int64_t size, int64_t offsets) {
    int64_t all = offsets | axis[n - 1].n * size, unit = 16;
    if (axis[n - 1].from != 1 || axis[n - 1].to != 1) return size;
    for (int i = 0; i < n - 1; i++) all |= (axis[i].from | axis[i].to) * size;
    while (unit > size && all & (unit - 1)) unit /= 2;
    return unit;
}

om_status om_gpu_copy_lower(om_lower *l, int in, const om_tensor *src, int64_t src_offset, int out,
                            const om_tensor *dst, int64_t dst_offset) {
    if (!om_numel(dst)) return OM_OK;
    if (src->dtype != dst->dtype) return converted(l, in, src, src_offset, out, dst, dst_offset);
    const int64_t e = (int64_t)om_dtype_size(src->dtype);
    copy_axis axis[OM_RANK];
    int n = 0;
    int64_t lo[2] = {0, 0}, hi[2] = {e, e};
    for (int i = 0; i < src->rank; i++) {
        if (src->dim[i] != dst->dim[i]) return om_fail(l->cx, OM_INTERNAL, "copy between tensors of different sizes");
        if (src->dim[i] == 1) continue;
        axis[n] = (copy_axis){src->dim[i], src->stride[i], dst->stride[i]};
        for (int k = 0; k < 2; k++) {
            const int64_t far = (src->dim[i] - 1) * (k ? axis[n].to : axis[n].from) * e;
            *(far < 0 ? &lo[k] : &hi[k]) += far;
        }
        n++;
    }
    for (int i = 1; i < n; i++) /* outermost: the largest step in dst */
        for (int p = i; p > 0 && size_of(axis[p].to) > size_of(axis[p - 1].to); p--) {
            const copy_axis x = axis[p];
            axis[p] = axis[p - 1], axis[p - 1] = x;
        }
    int m = 0;
    for (int i = 1; i < n; i++)
        if (axis[m].from == axis[i].from * axis[i].n && axis[m].to == axis[i].to * axis[i].n)
            axis[m] = (copy_axis){axis[m].n * axis[i].n, axis[i].from, axis[i].to};
        else axis[++m] = axis[i];
    n = n ? m + 1 : 0;
    if (!n) axis[n++] = (copy_axis){1, 1, 1};
    int x = -1; /* the axis src runs along, when it is not dst's */
    for (int i = 0; i < n - 1; i++)
        if (axis[i].from == 1 && axis[i].n >= 16 && axis[n - 1].from != 1 && axis[n - 1].n >= 16) x = i;
    if (x >= 0 && n <= 4) {
        int64_t z[2] = {1, 1};
        om_gpu_flip p = {.size = (int32_t)e, .n = {axis[x].n, axis[n - 1].n, 1, 1}};
        p.from[0] = axis[x].from, p.to[0] = axis[x].to, p.from[1] = axis[n - 1].from, p.to[1] = axis[n - 1].to;
        for (int i = 0, k = 0; i < n - 1; i++)
            if (i != x) p.n[2 + k] = z[k] = axis[i].n, p.from[2 + k] = axis[i].from, p.to[2 + k] = axis[i].to, k++;
        int64_t all = p.n[0] | p.n[1] | p.to[0]; /* pairs on both sides? */
        for (int i = 1; i < 4; i++) all |= p.from[i] | (i > 1 ? p.to[i] : 0);
        p.each = e <= 2 && p.to[1] == 1 && !(all & 1) ? 2 : 1;
        const int64_t side = 32 * p.each, width = side + p.each;
        const int64_t bx = om_gpu_blocks(p.n[0], side), by = om_gpu_blocks(p.n[1], side), bz = z[0] * z[1];
        if (by <= 65535 && bz <= 65535) {
            om_gpu_flip *g = om_gpu_add(l, OM_GPU_flip, bx, by, bz, 256, (size_t)(side * width * e), sizeof *g);
            if (!g) return l->cx->status;
            *g = p;
            om_gpu_part(l, &g->src, in, src_offset, lo[0], hi[0], OM_GPU_READ);
            om_gpu_part(l, &g->dst, out, dst_offset, lo[1], hi[1], OM_GPU_WRITE);
            om_gpu_guard_at(l, &g->guard);
            return OM_OK;
        }
    }
    const int64_t unit = unit_of(axis, n, e, src_offset | dst_offset), each = unit / e;
    int64_t total = 1;
    for (int i = 0; i < n; i++) {
        if (i == n - 1) axis[i].n /= each;
        else axis[i].from /= each, axis[i].to /= each;
        total *= axis[i].n;
    }
    om_gpu_copy *g = om_gpu_add(l, OM_GPU_copy, om_gpu_grid(total, 1024), 1, 1, 256, 0, sizeof *g);
    if (!g) return l->cx->status;
    g->total = total, g->rank = n, g->size = (int32_t)e, g->unit = (int32_t)unit;
    for (int i = 0; i < n; i++) g->dim[i] = axis[i].n, g->from[i] = axis[i].from, g->to[i] = axis[i].to;
    om_gpu_part(l, &g->src, in, src_offset, lo[0], hi[0], OM_GPU_READ);
    om_gpu_part(l, &g->dst, out, dst_offset, lo[1], hi[1], OM_GPU_WRITE);
    om_gpu_guard_at(l, &g->guard);
    return OM_OK;
}
