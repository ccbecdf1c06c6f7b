/* rows.cu - softmax, log-softmax and their gradients: rows in registers (row.h), which may be written where they were
 * read. */
#include "cuda/row.h"

FN float exp_neg(float x) { return vm_exp_neg(x); } /* e^x, x <= 0 or NaN */
FN double exp_neg(double x) { return exp(x); }

template <class S> FN void softmax_grad_row(const om_gpu_softmax &p, const row_place &r, int64_t base, WIDE *sh) {
    typedef WIDE F;
    enum { SUM, RESULT };
    F dy[ROW_K][ROW_V], y[ROW_K][ROW_V], sum = 0;
    const int n = (int)p.n;
#pragma unroll 1
    for (int pass = SUM; pass <= RESULT; pass++) {
        for (int at = r.first; at < n; at += r.all) {
            if (!r.fits || pass == SUM) {
                row_load(dy, (const S *)p.x + base, p.step, at, n);
                row_load(y, (const S *)p.y + base, p.step, at, n);
            }
            if (pass == RESULT) {
                ROW_EACH_K ROW_EACH_E
                    dy[k][e] = p.log ? dy[k][e] - exp_of(y[k][e]) * sum : (dy[k][e] - sum) * y[k][e];
                row_store(dy, (S *)p.out + base, p.step, at, n);
                continue;
            }
            ROW_EACH_K {
                F d[ROW_V];
                ROW_EACH_E d[e] = p.log ? dy[k][e] : dy[k][e] * y[k][e];
                sum += row_fold<op_sum, ROW_V>(d);
            }
        }
        if (pass == SUM) sum = row_all<op_sum>(r, sum, (F)0, sh);
    }
}

template <class S> FN void softmax_row(const om_gpu_softmax &p) {
    typedef WIDE F;
    enum { MAXIMUM, SUM, RESULT };
    SHARED(shared);
    F *sh = (F *)shared, x[ROW_K][ROW_V], m = -inf_of((F)0), s = 0, by = 0, l = 0;
    const row_place r = row_place_of<S>(p.n);
    const int64_t base = r.row / p.step * p.n * p.step + r.row % p.step;
    const int n = (int)p.n;
    if (r.row >= p.rows) return; /* the whole warp */
    if (p.grad) return softmax_grad_row<S>(p, r, base, sh);
#pragma unroll 1
    for (int pass = MAXIMUM; pass <= RESULT; pass++) {
        for (int at = r.first; at < n; at += r.all) {
            if (!r.fits || pass == MAXIMUM) row_load(x, (const S *)p.x + base, p.step, at, n);
            if (pass == MAXIMUM) {
                ROW_EACH_K ROW_EACH_E if (ROW_AT(k) + e < n) m = op_max::of(m, x[k][e]);
                continue;
            }
            ROW_EACH_K {
                F d[ROW_V];
                ROW_EACH_E d[e] = ROW_AT(k) + e < n ? exp_neg(x[k][e] - m) : 0;
                if (pass == SUM) s += row_fold<op_sum, ROW_V>(d);
                else ROW_EACH_E x[k][e] = p.log ? x[k][e] - m - l : d[e] * by;
            }
            if (pass == RESULT) row_store(x, (S *)p.out + base, p.step, at, n);
        }
        if (pass == MAXIMUM) m = row_all<op_max>(r, m, -inf_of((F)0), sh);
        if (pass == SUM) s = row_all<op_sum>(r, s, (F)0, sh), by = 1 / s, l = log_of(s);
    }
}
FLOATS(softmax, struct om_gpu_softmax, OM_GPU_ROW_THREADS, softmax_row)
