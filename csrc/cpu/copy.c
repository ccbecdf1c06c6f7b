/* copy.c - om_copy: moves a tensor of any strides into one of any strides, converting the element type on the way.
 *
 * The iteration space is simplified first: axes of size 1 vanish, negative destination strides are turned round, axes
 * are sorted by destination stride and neighbours that are contiguous in both tensors become one. Then
 *   - the innermost run, when contiguous in both and of 2, 4, 8 or 16 bytes, counts as one bigger element;
 *   - an innermost run contiguous in both is memcpy;
 *   - when the destination runs along one axis and the source along another, tiles are transposed in registers;
 *     of a conversion those of a piece that is converted, run by run of the source, into memory that stays in L1;
 *   - everything else is a strided line: along the destination's run, or along the source's where that is the longer
 *     and the other short (the four taps of a filter with channels last).
 * A conversion whose result is larger than a core's own cache writes long lines past the caches: memory is not read
 * before it is written over, which is 0.4 of what would move from bf16 to f32, and 0.25 the other way.
 * The work is cut into items (outer index, piece of the innermost axis), split among threads. Offsets advance by
 * additions; divisions happen once per item range. Overlapping source and destination are not supported. What sizes and
 * strides decide is a job, made once per plan where an operator has one to keep it in; om_copy makes it anew.
 */
#include "cpu/copy.h"

enum { COPY_PIECE = 1 << 14, /* elements of a line done at once by one thread */
       COPY_TILE = 64,       /* elements of the source's run in one transposed strip */
       COPY_SHORT = 16,      /* a line below it costs more to begin than to move */
       COPY_WIDEST = 8,      /* bytes of a number */
       COPY_LARGE = 1 << 21 }; /* bytes of a result that is larger than a core's own cache */

typedef struct copy_run {
    const om_copy_job *j;
    const char *src;
    char *dst;
} copy_run;

/* Transposes `n` elements of the line axis by `nb` of the other, converted first. */
static void copy_convert_tile(const om_copy_job *j, const char *src, int64_t other, char *dst, int64_t step, int64_t n,
                              int64_t nb) {
    _Alignas(64) char piece[COPY_TILE * COPY_TILE * COPY_WIDEST];
    const int64_t row = COPY_TILE * j->size;
    for (int64_t b = 0; b < nb; b++) j->line(src + b * other, j->from, piece + b * row, j->size, n);
    j->tile(piece, row, dst, step, n, nb);
}

static void copy_range(void *arg, int64_t begin, int64_t end) {
    const copy_run *r = arg;
    const om_copy_job *j = r->j;
    const om_copy_axis *axis = j->axis, *line = &axis[j->n_outer], *other = line + 1; /* other: with tile */
    int64_t at[OM_RANK], rest = begin / j->n_pieces, p = begin % j->n_pieces, so = 0, d = 0;
    for (int i = j->n_outer - 1; i >= 0; i--) {
        at[i] = rest % axis[i].n;
        rest /= axis[i].n;
        so += at[i] * axis[i].src;
        d += at[i] * axis[i].dst;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t i0 = p * j->piece, n = line->n - i0 < j->piece ? line->n - i0 : j->piece;
        const char *s = r->src + so + i0 * line->src;
        char *t = r->dst + d + i0 * line->dst;
        if (j->stream) {
            j->stream(j->line, s, line->src, t, line->dst, n);
        } else if (!j->tile) {
            j->line(s, line->src, t, line->dst, n);
        } else { /* line axis: contiguous in src; the other, contiguous in dst, in strips that stay in L1 */
            for (int64_t b = 0; b < other->n; b += COPY_TILE) {
                int64_t nb = other->n - b < COPY_TILE ? other->n - b : COPY_TILE;
                if (j->from) copy_convert_tile(j, s + b * other->src, other->src, t + b * j->size, line->dst, n, nb);
                else j->tile(s + b * other->src, other->src, t + b * j->size, line->dst, n, nb);
            }
        }
        if (++p < j->n_pieces) continue;
        p = 0;
        for (int i = j->n_outer - 1; i >= 0; i--) {
            so += axis[i].src;
            d += axis[i].dst;
            if (++at[i] < axis[i].n) break;
            so -= axis[i].src * axis[i].n;
            d -= axis[i].dst * axis[i].n;
            at[i] = 0;
        }
    }
}

static int copy_log2(int64_t size) {
    return size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : size == 16 ? 4 : -1;
}

static void copy_swap(om_copy_axis *a, om_copy_axis *b) {
    const om_copy_axis t = *a;
    *a = *b;
    *b = t;
}

static int64_t copy_abs(int64_t x) { return x < 0 ? -x : x; }

/* a belongs outside b: the larger destination stride, then the larger source stride */
static bool copy_outer(const om_copy_axis *a, const om_copy_axis *b) {
    return a->dst > b->dst || (a->dst == b->dst && copy_abs(a->src) >= copy_abs(b->src));
}

/* The source's run becomes the line where the destination's is short. */
static void copy_line_choose(om_copy_axis *axis, int nd, int64_t from) {
    const int64_t last = axis[nd - 1].n;
    if (last >= COPY_SHORT || axis[nd - 1].src == from) return;
    for (int i = 0; i < nd - 1; i++)
        if (axis[i].src == from && axis[i].n > last) {
            for (int p = i; p < nd - 1; p++) copy_swap(&axis[p], &axis[p + 1]);
            return;
        }
}

/* The destination runs along the last axis; where the source runs along another, at least `least` long, tiles of `size`
 * bytes are transposed: that axis becomes the line, the last one goes with it. */
static bool copy_tile_choose(om_copy_job *j, om_copy_axis *axis, int nd, int64_t from, int64_t size, int64_t least) {
    const om_copy_axis *last = &axis[nd - 1];
    if (last->dst != size || last->src == from || last->n < 8 || nd >= OM_RANK) return false;
    for (int i = 0; i < nd - 1; i++)
        if (axis[i].src == from && axis[i].n >= least) {
            for (int p = i; p < nd - 2; p++) copy_swap(&axis[p], &axis[p + 1]);
            j->tile = OM_PICK(om_copy)->tile[copy_log2(size)];
            j->size = size;
            j->n_outer = nd - 2;
            return true;
        }
    return false;
}

om_status om_copy_prepare(om_ctx *cx, const om_tensor *src, const om_tensor *dst, om_copy_axis *axis, om_copy_job *j) {
    bool same = src->rank == dst->rank;
    for (int i = 0; i < src->rank && same; i++) same = src->dim[i] == dst->dim[i];
    if (!same)
        return om_fail(cx, OM_INTERNAL, "copy between tensors of different sizes (rank %d and %d)", src->rank,
                       dst->rank);
    const struct om_copy_kernels *k = OM_PICK(om_copy);
    const int64_t from = (int64_t)om_dtype_size(src->dtype), to = (int64_t)om_dtype_size(dst->dtype);
    if (!from || !to)
        return om_fail(cx, OM_UNSUPPORTED, "copy from %s to %s: only numbers can be copied", om_dtype_name(src->dtype),
                       om_dtype_name(dst->dtype));

    *j = (om_copy_job){.axis = axis};
    if (om_numel(src) == 0) return OM_OK;
    int nd = 0;
    for (int i = 0; i < src->rank; i++) {
        if (src->dim[i] == 1) continue;
        om_copy_axis x = {src->dim[i], src->stride[i] * from, dst->stride[i] * to};
        if (x.dst < 0) {
            j->src_at += x.src * (x.n - 1);
            j->dst_at += x.dst * (x.n - 1);
            x.src = -x.src;
            x.dst = -x.dst;
        }
        axis[nd++] = x;
    }
    for (int i = 1; i < nd; i++) /* insertion sort */
        for (int p = i; p > 0 && !copy_outer(&axis[p - 1], &axis[p]); p--) copy_swap(&axis[p - 1], &axis[p]);
    int m = 0; /* merge */
    for (int i = 1; i < nd; i++) {
        om_copy_axis *a = &axis[m], *b = &axis[i];
        if (a->dst == b->dst * b->n && a->src == b->src * b->n) *a = (om_copy_axis){a->n * b->n, b->src, b->dst};
        else axis[++m] = *b;
    }
    nd = nd ? m + 1 : 0;
    if (!nd) axis[nd++] = (om_copy_axis){1, from, to};

    int64_t total = 1;
    for (int i = 0; i < nd; i++) total *= axis[i].n;
    j->size = from;
    j->n_outer = nd - 1;
    if (src->dtype != dst->dtype) {
        j->line = k->convert[src->dtype][dst->dtype];
        if (copy_tile_choose(j, axis, nd, from, to, COPY_SHORT)) j->from = from;
        else copy_line_choose(axis, nd, from);
    } else {
        const om_copy_axis *last = &axis[nd - 1];
        int64_t run = last->src == from && last->dst == from ? last->n * from : 0;
        if (nd > 1 && run && copy_log2(run) >= 0) { /* a short run is one bigger element */
            total /= last->n;
            j->size = run;
            nd--;
            last--;
            j->n_outer = nd - 1;
        }
        j->line = k->move[copy_log2(j->size)];
        if (!copy_tile_choose(j, axis, nd, j->size, j->size, 8)) copy_line_choose(axis, nd, j->size);
    }
    j->n_axis = nd;
    const om_copy_axis *line = &axis[j->n_outer];
    j->piece = j->tile ? COPY_TILE : COPY_PIECE;
    if (src->dtype != dst->dtype && !j->tile && line->n >= COPY_PIECE && line->dst == to && total * to >= COPY_LARGE)
        j->stream = k->stream;
    if (j->piece > line->n) j->piece = line->n;
    j->n_pieces = (line->n + j->piece - 1) / j->piece;
    j->items = j->n_pieces;
    for (int i = 0; i < j->n_outer; i++) j->items *= axis[i].n;
    int64_t per_item = total / j->items > 0 ? total / j->items : 1;
    j->grain = 2 * COPY_PIECE / per_item;
    if (j->grain < 1) j->grain = 1;
    return OM_OK;
}

bool om_copy_keep(om_arena *mem, om_copy_job *j) {
    return (j->axis = om_arena_copy(mem, j->axis, (size_t)j->n_axis * sizeof *j->axis));
}

void om_copy_run(om_ctx *cx, const om_copy_job *j, const void *src, void *dst) {
    if (!j->items) return;
    copy_run r = {j, (const char *)src + j->src_at, (char *)dst + j->dst_at};
    om_parallel_for(cx, j->items, j->grain, copy_range, &r);
}

om_status om_copy_prepared(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst, om_copy_job *j) {
    om_copy_axis axis[OM_RANK];
    OM_TRY(om_copy_prepare(cx, src, dst, axis, j));
    return !j->items || om_copy_keep(mem, j) ? OM_OK : cx->status;
}

om_status om_cpu_copy_prepare(om_ctx *cx, om_arena *mem, const om_tensor *src, const om_tensor *dst,
                              const void **prep) {
    om_copy_job *j = om_arena_alloc(mem, sizeof *j);
    *prep = j;
    return j ? om_copy_prepared(cx, mem, src, dst, j) : cx->status;
}

om_status om_cpu_copy_run(om_ctx *cx, const void *prep, const om_tensor *src, om_tensor *dst) {
    om_copy_run(cx, prep, src->data, dst->data);
    return OM_OK;
}

om_status om_copy(om_ctx *cx, const om_tensor *src, om_tensor *dst) {
    om_copy_axis axis[OM_RANK];
    om_copy_job j;
    OM_TRY(om_copy_prepare(cx, src, dst, axis, &j));
    om_copy_run(cx, &j, src->data, dst->data);
    return OM_OK;
}
