/* copy.c - om_copy: moves a tensor of any strides into one of any strides, converting the element type on the way.
 *
 * The iteration space is simplified first: axes of size 1 vanish, negative destination strides are turned round, axes
 * are sorted by destination stride and neighbours that are contiguous in both tensors become one. Then
 *   - the innermost run, when contiguous in both and of 2, 4, 8 or 16 bytes, counts as one bigger element;
 *   - an innermost run contiguous in both is memcpy;
 *   - when the destination runs along one axis and the source along another, tiles are transposed in registers;
 *   - everything else, and every conversion, is a strided line.
 * The work is cut into items (outer index, piece of the innermost axis), split among threads. Offsets advance by
 * additions; divisions happen once per item range. Overlapping source and destination are not supported.
 */
#include "cpu/copy.h"
#include "graph/engine.h"

enum { COPY_PIECE = 1 << 14, /* elements of a line done at once by one thread */
       COPY_TILE = 64 };     /* elements of the source's run in one transposed strip */

typedef struct copy_job {
    int n_outer;                                    /* axes 0..n_outer-1 are walked by odometer */
    /* bytes; axis n_outer = line; with tile: axis n_outer + 1 = the other */
    int64_t dim[OM_RANK], ss[OM_RANK], ds[OM_RANK];
    int64_t piece, n_pieces;
    const char *src;
    char *dst;
    om_copy_line line;
    om_copy_tile tile;
    int64_t size;                                   /* bytes of an element, when tile is set */
} copy_job;

static void copy_range(void *arg, int64_t begin, int64_t end) {
    const copy_job *j = arg;
    int64_t at[OM_RANK], rest = begin / j->n_pieces, p = begin % j->n_pieces, so = 0, d = 0;
    const int L = j->n_outer;
    for (int i = L - 1; i >= 0; i--) {
        at[i] = rest % j->dim[i];
        rest /= j->dim[i];
        so += at[i] * j->ss[i];
        d += at[i] * j->ds[i];
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t i0 = p * j->piece, n = j->dim[L] - i0 < j->piece ? j->dim[L] - i0 : j->piece;
        const char *s = j->src + so + i0 * j->ss[L];
        char *t = j->dst + d + i0 * j->ds[L];
        if (!j->tile) {
            j->line(s, j->ss[L], t, j->ds[L], n);
        } else { /* line axis: contiguous in src; the other, contiguous in dst, in strips that stay in L1 */
            for (int64_t b = 0; b < j->dim[L + 1]; b += COPY_TILE) {
                int64_t nb = j->dim[L + 1] - b < COPY_TILE ? j->dim[L + 1] - b : COPY_TILE;
                j->tile(s + b * j->ss[L + 1], j->ss[L + 1], t + b * j->size, j->ds[L], n, nb);
            }
        }
        if (++p < j->n_pieces) continue;
        p = 0;
        for (int i = L - 1; i >= 0; i--) {
            so += j->ss[i];
            d += j->ds[i];
            if (++at[i] < j->dim[i]) break;
            so -= j->ss[i] * j->dim[i];
            d -= j->ds[i] * j->dim[i];
            at[i] = 0;
        }
    }
}

static int copy_log2(int64_t size) {
    return size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : size == 16 ? 4 : -1;
}

static void copy_swap(copy_job *j, int a, int b) {
#define SWAP(v) do { int64_t t_ = (v)[a]; (v)[a] = (v)[b]; (v)[b] = t_; } while (0)
    SWAP(j->dim);
    SWAP(j->ss);
    SWAP(j->ds);
#undef SWAP
}

static int64_t copy_abs(int64_t x) { return x < 0 ? -x : x; }

om_status om_copy(om_ctx *cx, const om_tensor *src, om_tensor *dst) {
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

    if (om_numel(src) == 0) return OM_OK;
    copy_job j = {.src = src->data, .dst = dst->data};
    int nd = 0;
    for (int i = 0; i < src->rank; i++) {
        if (src->dim[i] == 1) continue;
        j.dim[nd] = src->dim[i];
        j.ss[nd] = src->stride[i] * from;
        j.ds[nd] = dst->stride[i] * to;
        if (j.ds[nd] < 0) {
            j.src += j.ss[nd] * (j.dim[nd] - 1);
            j.dst += j.ds[nd] * (j.dim[nd] - 1);
            j.ss[nd] = -j.ss[nd];
            j.ds[nd] = -j.ds[nd];
        }
        nd++;
    }
    for (int i = 1; i < nd; i++) /* insertion sort: largest destination stride outermost */
        for (int p = i;
             p > 0 && (j.ds[p - 1] < j.ds[p] || (j.ds[p - 1] == j.ds[p] && copy_abs(j.ss[p - 1]) < copy_abs(j.ss[p])));
             p--)
            copy_swap(&j, p - 1, p);
    int m = 0; /* merge */
    for (int i = 1; i < nd; i++) {
        if (j.ds[m] == j.ds[i] * j.dim[i] && j.ss[m] == j.ss[i] * j.dim[i]) {
            j.dim[m] *= j.dim[i];
        } else {
            m++;
            j.dim[m] = j.dim[i];
        }
        j.ss[m] = j.ss[i];
        j.ds[m] = j.ds[i];
    }
    nd = nd ? m + 1 : 0;
    if (!nd) j.dim[nd] = 1, j.ss[nd] = from, j.ds[nd] = to, nd = 1;

    int64_t total = 1;
    for (int i = 0; i < nd; i++) total *= j.dim[i];
    int64_t size = from;
    j.n_outer = nd - 1;
    if (src->dtype != dst->dtype) {
        j.line = k->convert[src->dtype][dst->dtype];
    } else {
        int64_t run = j.ss[nd - 1] == size && j.ds[nd - 1] == size ? j.dim[nd - 1] * size : 0;
        if (nd > 1 && run && copy_log2(run) >= 0) { /* a short run is one bigger element */
            total /= j.dim[nd - 1];
            size = run;
            nd--;
            j.n_outer = nd - 1;
        }
        j.line = k->move[copy_log2(size)];
        if (j.ds[nd - 1] == size && j.ss[nd - 1] != size && j.dim[nd - 1] >= 8 && nd < OM_RANK)
            for (int i = 0; i < nd - 1; i++)
                if (j.ss[i] == size && j.dim[i] >= 8) { /* src runs along i, dst along nd - 1 */
                    for (int p = i; p < nd - 2; p++) copy_swap(&j, p, p + 1);
                    j.tile = k->tile[copy_log2(size)];
                    j.n_outer = nd - 2;
                    break;
                }
    }
    const int L = j.n_outer;
    j.size = size;
    j.piece = j.tile ? COPY_TILE : COPY_PIECE;
    if (j.piece > j.dim[L]) j.piece = j.dim[L];
    j.n_pieces = (j.dim[L] + j.piece - 1) / j.piece;
    int64_t items = j.n_pieces;
    for (int i = 0; i < L; i++) items *= j.dim[i];
    int64_t per_item = total / items > 0 ? total / items : 1;
    int64_t grain = 2 * COPY_PIECE / per_item;
    om_parallel_for(cx, items, grain < 1 ? 1 : grain, copy_range, &j);
    return OM_OK;
}
