/* ctc.cu - CTC loss (ops/ctc.c), in double and in logarithms. With l a row's targets and a blank before, between and
 * behind them, alpha[t][i] is the logarithm of all beginnings of paths that are at entry i at time t, beta[t][i] of all
 * ends. A block goes through the times of a row, a thread per entry; the gradient's blocks have a time of a row each,
 * and one thread adds up the entries of one class, in their order. Lengths and targets that do not fit are faults; what
 * is computed then stays inside of its tensors. */
#include "cuda/kernel.h"

typedef struct om_gpu_ctc ctc;
typedef struct ctc_row { const int64_t *target; int64_t row, time, n; } ctc_row; /* n: entries with blanks */

FN double ctc_sum(double a, double b) {
    const double m = a > b ? a : b;
    return m == -(double)INFINITY ? m : m + log1p(exp((a > b ? b : a) - m));
}

/* One block: the valid targets one after another, and where each row's begin. */
EXPORT(256) om_k_ctc_list(PARAM(struct om_gpu_ctc) p) {
    SHARED(shared);
    int64_t n = p.valid ? 0 : p.listed, sum = 0;
    for (int64_t first = 0; p.valid && first < p.listed; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        const bool taken = i < p.listed && ld(p.valid + i);
        const int64_t place = block_place(taken, &n, (uint32_t *)shared);
        if (taken) st(p.list + place, ld(p.targets + i));
    }
    if (threadIdx.x) return;
    for (int64_t row = 0; row < p.rows; row++) {
        const int64_t own = ld(p.lengths + row);
        st(p.begin + row, sum < n ? sum : n);
        sum = own > n || (own > 0 && sum + own > n) ? n + 1 : own > 0 ? sum + own : sum;
    }
    st(p.begin + p.rows, n);
    if (sum != n) fault_note(p.fault, (uint32_t)p.site, 1, sum, p.rows ? p.rows - 1 : 0, n + 1);
}

/* The row's targets and lengths, made to fit; noted by one thread. */
FN ctc_row ctc_row_of(const ctc &p, int64_t row, bool notes) {
    int64_t time = ld(p.inputs + row), n = ld(p.lengths + row);
    const int64_t begin = p.one_after_another ? ld(p.begin + row) : row * p.bound;
    if (time < 0 || time > p.time) {
        if (notes) fault_note(p.fault, (uint32_t)p.site, 1, time, row, p.time + 1);
        time = 0;
    }
    if (n < 0 || n > p.bound) {
        if (notes) fault_note(p.fault, (uint32_t)p.site, 1, n, row, p.bound + 1);
        n = 0;
    }
    if (p.one_after_another && begin + n > ld(p.begin + p.rows)) n = 0; /* noted by ctc_list */
    const ctc_row r = {(p.valid ? p.list : p.targets) + begin, row, time, 2 * n + 1};
    for (int64_t i = 0; i < n && notes; i++) {
        const int64_t c = ld(r.target + i);
        if ((uint64_t)c < (uint64_t)p.classes) continue;
        fault_note(p.fault, (uint32_t)p.site, 2, c, row, p.classes);
        break;
    }
    return r;
}

FN int64_t ctc_entry(const ctc &p, const ctc_row &r, int64_t i) {
    if (i % 2 == 0) return p.blank;
    const int64_t c = ld(r.target + i / 2);
    return (uint64_t)c < (uint64_t)p.classes ? c : 0;
}

/* May one go from entry i - 2 to entry i? */
FN bool ctc_skips(const ctc &p, const ctc_row &r, int64_t i) {
    return i >= 2 && i % 2 && ctc_entry(p, r, i) != ctc_entry(p, r, i - 2);
}

FN double ctc_x(const ctc &p, const ctc_row &r, int64_t t, int64_t c) {
    return float_at(p.x, p.dtype, (t * p.rows + r.row) * p.classes + c);
}

/* A line of alpha from the one before, or of beta from the one after (way -1); NULL: the first. */
FN void ctc_line(const ctc &p, const ctc_row &r, int64_t t, int way, const double *from, double *to) {
    for (int64_t i = threadIdx.x; i < r.n; i += blockDim.x) {
        const int64_t one = i - way, two = i - 2 * way;
        double a = -(double)INFINITY;
        if (!from) {
            if (way > 0 ? i < 2 : i >= r.n - 2) a = 0;
        } else {
            a = ld(from + i);
            if (one >= 0 && one < r.n) a = ctc_sum(a, ld(from + one));
            if (two >= 0 && two < r.n && ctc_skips(p, r, way > 0 ? i : two)) a = ctc_sum(a, ld(from + two));
        }
        st(to + i, a + ctc_x(p, r, t, ctc_entry(p, r, i)));
    }
    __syncthreads();
}

/* Which entry has the same class next, and whether one before has it. */
FN void ctc_chain(const ctc &p, const ctc_row &r) {
    for (int64_t i = threadIdx.x; i < r.n; i += blockDim.x) {
        const int64_t c = ctc_entry(p, r, i);
        int64_t next = i + 1, before = i - 1;
        while (next < r.n && ctc_entry(p, r, next) != c) next++;
        while (before >= 0 && ctc_entry(p, r, before) != c) before--;
        st(p.next + r.row * p.columns + i, (uint32_t)next | (before >= 0 ? 1u << 31 : 0));
    }
}

/* block (row, 1 or, for the gradient, alpha and beta) */
EXPORT(128) om_k_ctc_paths(PARAM(struct om_gpu_ctc) p) {
    const bool ends = blockIdx.y == 1;
    const ctc_row r = ctc_row_of(p, blockIdx.x, !ends && !threadIdx.x);
    const int64_t lines = p.beta ? p.time : 2, own = r.row * lines * p.columns;
    const double *last = nullptr;
    for (int64_t k = 0; k < r.time; k++) {
        double *to = (ends ? p.beta : p.alpha) + own + (p.beta ? ends ? r.time - 1 - k : k : k % 2) * p.columns;
        ctc_line(p, r, ends ? r.time - 1 - k : k, ends ? -1 : 1, last, to);
        last = to;
    }
    if (ends) ctc_chain(p, r);
    if (ends || threadIdx.x) return;
    const double loss = !last ? r.n == 1 ? 0 : (double)INFINITY
                              : -(r.n > 1 ? ctc_sum(ld(last + r.n - 1), ld(last + r.n - 2)) : ld(last));
    if (p.loss) st(p.loss + r.row, loss);
    else float_put(p.y, p.dtype, r.row, p.zero && loss == (double)INFINITY ? 0 : loss);
}

/* block (time, row) */
EXPORT(128) om_k_ctc_grad(PARAM(struct om_gpu_ctc) p) {
    const int64_t t = blockIdx.x, line = ((int64_t)blockIdx.y * p.time + t) * p.columns;
    const ctc_row r = ctc_row_of(p, blockIdx.y, false);
    const int64_t at = (t * p.rows + r.row) * p.classes;
    const double loss = ld(p.loss + r.row), dy = float_at(p.dy, p.dtype, r.row);
    const bool none = t >= r.time || (p.zero && loss == (double)INFINITY);
    /* of a class without entries the share is nothing */
    for (int64_t c = threadIdx.x; c < p.classes; c += blockDim.x) {
        const double x = ctc_x(p, r, t, c);
        float_put(p.y, p.dtype, at + c, none ? 0 : (exp(x) - exp(-(double)INFINITY + loss - x)) * dy);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < r.n && !none; i += blockDim.x) {
        const uint32_t *next = p.next + r.row * p.columns;
        if (ld(next + i) >> 31) continue;
        double share = -(double)INFINITY;
        for (int64_t k = i; k < r.n; k = ld(next + k) & ~(1u << 31))
            share = ctc_sum(share, ld(p.alpha + line + k) + ld(p.beta + line + k));
        const int64_t c = ctc_entry(p, r, i);
        const double x = ctc_x(p, r, t, c);
        float_put(p.y, p.dtype, at + c, (exp(x) - exp(share + loss - x)) * dy);
    }
}
