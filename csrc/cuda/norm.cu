/* norm.cu - layer norm and RMS norm over dense rows, and their gradients: rows in registers (row.h). dw and db: partial
 * sums over parts of the rows, whose number depends on the sizes alone, then over the parts in order; they read what dx
 * may overwrite, so they are launched first. */
#include "cuda/row.h"

/* A part of row `row` of y, or of what arrives for it: elements of S, or halves where S is float. */
template <class S, class F>
FN void norm_store(F (&x)[ROW_K][ROW_V], const om_gpu_norm &p, int64_t row, int at, int n) {
    if constexpr (sizeof(S) == 4) {
        if (p.type == OM_BF16) return row_store_as<S>(x, (bf16 *)p.y + row * p.n, at, n);
        if (p.type == OM_F16) return row_store_as<S>(x, (f16 *)p.y + row * p.n, at, n);
    }
    row_store(x, (S *)p.y + row * p.n, 1, at, n);
}
template <class S, class F> FN void norm_load(F (&x)[ROW_K][ROW_V], const om_gpu_norm &p, int64_t row, int at, int n) {
    if constexpr (sizeof(S) == 4) {
        if (p.type == OM_BF16) return row_load_as<S>(x, (const bf16 *)p.dy + row * p.n, 1, at, n);
        if (p.type == OM_F16) return row_load_as<S>(x, (const f16 *)p.dy + row * p.n, 1, at, n);
    }
    row_load(x, (const S *)p.dy + row * p.n, 1, at, n);
}

template <class S> FN void norm_row(const om_gpu_norm &p) {
    typedef WIDE F;
    enum { MEAN, VARIANCE, RESULT };
    SHARED(shared);
    F *sh = (F *)shared, x[ROW_K][ROW_V], mean = 0, rstd = 0;
    const row_place r = row_place_of<S>(p.n);
    const int n = (int)p.n, first = p.rms ? VARIANCE : MEAN;
    if (r.row >= p.rows) return; /* the whole warp */
#pragma unroll 1
    for (int pass = first; pass <= RESULT; pass++) {
        F sum = 0;
        for (int at = r.first; at < n; at += r.all) {
            if (!r.fits || pass == first) row_load(x, (const S *)p.x + r.row * p.n, 1, at, n);
            if (pass == RESULT) {
                ROW_EACH_K ROW_EACH_E x[k][e] = (x[k][e] - mean) * rstd;
#pragma unroll 1
                for (int add = 0; add < 2; add++)
                    if (add ? p.b : p.w) row_apply_any<S>(x, add ? p.b : p.w, add ? p.btype : p.wtype, add, at, n);
                norm_store<S>(x, p, r.row, at, n);
                continue;
            }
            ROW_EACH_K {
                F d[ROW_V];
                ROW_EACH_E {
                    const F c = ROW_AT(k) + e < n ? x[k][e] - mean : 0;
                    d[e] = pass == MEAN ? c : c * c;
                }
                sum += row_fold<op_sum, ROW_V>(d);
            }
        }
        if (pass == RESULT) break;
        sum = row_all<op_sum>(r, sum, (F)0, sh) / (F)n;
        if (pass == MEAN) mean = sum;
        else rstd = 1 / sqrt_of(sum + (F)p.eps);
    }
    if (r.first) return;
    if (!p.rms) st((F *)p.mean + r.row, mean);
    st((F *)p.rstd + r.row, rstd);
}

template <class S> FN void norm_grad_row(const om_gpu_norm &p) {
    typedef WIDE F;
    enum { SUMS, RESULT };
    SHARED(shared);
    F *sh = (F *)shared, g[ROW_K][ROW_V], x[ROW_K][ROW_V], a = 0, c = 0; /* dy w, x normalized */
    const row_place r = row_place_of<S>(p.n);
    const int n = (int)p.n;
    if (r.row >= p.rows) return; /* the whole warp */
    const F mean = p.rms ? 0 : ld((const F *)p.mean + r.row), rstd = ld((const F *)p.rstd + r.row);
#pragma unroll 1
    for (int pass = SUMS; pass <= RESULT; pass++) {
        for (int at = r.first; at < n; at += r.all) {
            if (!r.fits || pass == SUMS) {
                norm_load<S>(g, p, r.row, at, n);
                row_load(x, (const S *)p.x + r.row * p.n, 1, at, n);
                if (p.w) row_apply_any<S>(g, p.w, p.wtype, false, at, n);
                ROW_EACH_K ROW_EACH_E x[k][e] = ROW_AT(k) + e < n ? (x[k][e] - mean) * rstd : 0;
            }
            if (pass == RESULT) {
                ROW_EACH_K ROW_EACH_E g[k][e] = rstd * (g[k][e] - a - x[k][e] * c);
                row_store(g, (S *)p.y + r.row * p.n, 1, at, n);
                continue;
            }
            ROW_EACH_K {
                F d[ROW_V];
                a += row_fold<op_sum, ROW_V>(g[k]);
                ROW_EACH_E d[e] = g[k][e] * x[k][e];
                c += row_fold<op_sum, ROW_V>(d);
            }
        }
        if (pass == RESULT) return;
        a = p.rms ? 0 : row_all<op_sum>(r, a, (F)0, sh) / (F)n;
        c = row_all<op_sum>(r, c, (F)0, sh) / (F)n;
    }
}

#define NORM_PARAMS_BOUNDS 256, 2
/* Adds N rows, eight apart, one after the other. */
template <class S, int N>
FN void norm_params_add(const om_gpu_norm &p, int64_t r, const WIDE (&dy)[N][ROW_V], const WIDE (&x)[N][ROW_V],
                        WIDE *dw, WIDE *db) {
    typedef WIDE F;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const F mean = p.rms ? 0 : ld((const F *)p.mean + r + 8 * k), rstd = ld((const F *)p.rstd + r + 8 * k);
        ROW_EACH_E dw[e] += dy[k][e] * ((x[k][e] - mean) * rstd);
        ROW_EACH_E db[e] += dy[k][e];
    }
}
/* 32 pieces of columns a block, eight rows at a time, a thread's several at once; dy lies as T */
template <class S, class T> FN void norm_params_of(const om_gpu_norm &p) {
    typedef WIDE F;
    enum { V = ROW_V, AT_ONCE = V == 8 ? 2 : 4 };
    SHARED(shared);
    F *sh = (F *)shared, dw[V] = {}, db[V] = {};
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t i = ((int64_t)blockIdx.x * 32 + lane) * V, each = (p.rows + p.parts - 1) / p.parts;
    const int64_t from = each * blockIdx.y, to = from + each < p.rows ? from + each : p.rows;
    const bool whole = p.n % V == 0 && row_in_line(p.dy, V * sizeof(T)) && row_in_line(p.x);
    int64_t r = from + warp;
    if (whole && i < p.n)
        for (; r + 8 * (AT_ONCE - 1) < to; r += 8 * AT_ONCE) {
            F dy[AT_ONCE][V], x[AT_ONCE][V];
            row_get_all_as<S>(dy, (const T *)p.dy + r * p.n + i, 8 * p.n, 1, true);
            row_get_all(x, (const S *)p.x + r * p.n + i, 8 * p.n, 1, true);
            norm_params_add<S>(p, r, dy, x, dw, db);
        }
    for (; r < to; r += 8) {
        F dy[1][V], x[1][V];
        row_get_as<S>(dy[0], (const T *)p.dy + r * p.n, 1, i, p.n, whole, (F)0);
        row_get(x[0], (const S *)p.x + r * p.n, 1, i, p.n, whole, (F)0);
        norm_params_add<S>(p, r, dy, x, dw, db);
    }
    for (int e = 0; e < V; e++) sh[(warp * V + e) * 32 + lane] = dw[e], sh[((8 + warp) * V + e) * 32 + lane] = db[e];
    __syncthreads();
    for (unsigned e = warp; e < 2 * V; e += 8) { /* a warp per place in a piece, of dw, then of db */
        const unsigned what = e / V, at = e % V;
        F sum = 0;
        for (unsigned k = 0; k < 8; k++) sum += sh[((8 * what + k) * V + at) * 32 + lane];
        if (i + at < p.n) st((F *)p.partial + (2 * blockIdx.y + what) * p.n + i + at, sum);
    }
}

template <class S> FN void norm_params(const om_gpu_norm &p) {
    if constexpr (sizeof(S) == 4) {
        if (p.type == OM_BF16) return norm_params_of<S, bf16>(p);
        if (p.type == OM_F16) return norm_params_of<S, f16>(p);
    }
    norm_params_of<S, S>(p);
}

/* 32 columns a block of dw, in y of db; eight sums of a column over an eighth of the parts each, then over these */
template <class S> FN void norm_finish(const om_gpu_norm &p) {
    typedef WIDE F;
    enum { AT_ONCE = 8 };
    SHARED(shared);
    double *sh = (double *)shared, sum = 0;
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, db = blockIdx.y;
    const int64_t i = (int64_t)blockIdx.x * 32 + lane, each = (p.parts + 7) / 8;
    const F *from = (const F *)p.partial + (db + 2 * each * warp) * p.n + i;
    const int64_t count = p.parts - each * warp < each ? p.parts - each * warp : each;
    if (i < p.n)
        for (int64_t k = 0; k < count; k += AT_ONCE) {
            F x[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) x[j] = k + j < count ? ld(from + 2 * (k + j) * p.n) : 0;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sum += x[j];
        }
    sh[threadIdx.x] = sum;
    __syncthreads();
    if (warp || i >= p.n) return;
    for (unsigned k = 1; k < 8; k++) sum += sh[k * 32 + lane];
    if (db) float_put(p.db, p.btype, i, sum);
    else float_put(p.dw, p.wtype, i, sum);
}

FLOATS(norm, struct om_gpu_norm, ROW_BOUNDS, norm_row)
FLOATS(norm_grad, struct om_gpu_norm, ROW_BOUNDS, norm_grad_row)
FLOATS(norm_params, struct om_gpu_norm, NORM_PARAMS_BOUNDS, norm_params)
FLOATS(norm_finish, struct om_gpu_norm, 256, norm_finish)
