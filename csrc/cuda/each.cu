/* each.cu - results that need nothing of each other, a thread each: functions that the strip interpreter has not,
 * places in sorted rows, distances of rows. */
#include "cuda/kernel.h"

#include "cpu/kernels/special.h"

FN double special_of(int what, double x, double y) {
    switch (what) {
    case OM_GPU_ACOS: return acos(x);
    case OM_GPU_ASIN: return asin(x);
    case OM_GPU_ATAN: return atan(x);
    case OM_GPU_ACOSH: return acosh(x);
    case OM_GPU_ATANH: return atanh(x);
    case OM_GPU_TAN: return tan(x);
    case OM_GPU_SINH: return sinh(x);
    case OM_GPU_COSH: return cosh(x);
    case OM_GPU_LGAMMA: return lgamma(x);
    case OM_GPU_DIGAMMA: return special_digamma(x);
    case OM_GPU_TRIGAMMA: return special_trigamma(x);
    case OM_GPU_ATAN2: return atan2(x, y);
    default: return special_xlogy(x, y);
    }
}

EXPORT(256) om_k_special(PARAM(struct om_gpu_special) p) {
    OVER_GRID(i, p.n) {
        const double x = float_at(p.x, p.dtype, i), y = p.y ? float_at(p.y, p.dtype, i) : 0;
        float_put(p.out, p.dtype, i, special_of(p.what, x, y));
    }
}

/* Bisection: the first place where the element is not before the value; comparisons as torch makes them, of NaN too. */
EXPORT(256) om_k_search(PARAM(struct om_gpu_search) p) {
    OVER_GRID(i, p.count) {
        const int64_t row = i / p.per_row * p.row;
        const bool real = is_float(p.dtype);
        const double x = real ? float_at(p.values, p.dtype, i) : 0;
        const int64_t n = real ? 0 : integer_at(p.values, p.dtype, i);
        int64_t lo = 0, hi = p.row;
        while (lo < hi) {
            const int64_t mid = lo + (hi - lo) / 2;
            bool before;
            if (real) {
                const double e = float_at(p.sorted, p.dtype, row + mid);
                before = p.right ? !(e > x) : !(e >= x);
            } else {
                const int64_t e = integer_at(p.sorted, p.dtype, row + mid);
                before = p.right ? e <= n : e < n;
            }
            if (before) lo = mid + 1;
            else hi = mid;
        }
        st((int64_t *)p.y + i, lo);
    }
}

/* Sums of up to 128 terms in the type computed in, those in double. */
template <class S> FN void cdist(const om_gpu_cdist &p) {
    OVER_GRID(i, p.items * p.r) {
        const int64_t item = i / p.r, x = item * p.m, y = (item / p.rows * p.r + i % p.r) * p.m;
        double sum = 0;
        S part = 0;
        for (int64_t j = 0; j < p.m; j++) {
            const S e = fabs(at<S>(p.x, x + j) - at<S>(p.y, y + j));
            if (p.p < 0) {
                if (e > part || e != e) part = e;
                continue;
            }
            if (p.p != 0 && p.p != 1 && p.p != 2) {
                sum += pow((double)e, p.p);
                continue;
            }
            part += p.p == 2 ? e * e : p.p == 1 ? e : (S)(e != 0);
            if (j % 128 == 127) sum += part, part = 0;
        }
        sum += part;
        if (p.p == 2) sum = sqrt(sum);
        else if (p.p != 0 && p.p != 1 && p.p > 0) sum = pow(sum, 1 / p.p);
        put<S>(p.out, i, (S)sum);
    }
}

template <class S> FN void cdist_grad(const om_gpu_cdist &p) {
    OVER_GRID(i, p.items * p.m) {
        const int64_t item = i / p.m, column = i % p.m, y = item / p.rows * p.r * p.m + column;
        const S x = at<S>(p.x, i);
        S dx = 0;
        for (int64_t j = 0; j < p.r && p.p != 0; j++) {
            const S g = at<S>(p.dd, item * p.r + j), d = at<S>(p.d, item * p.r + j), e = x - at<S>(p.y, y + j * p.m);
            const S sign = (S)((e > 0) - (e < 0));
            if (p.p == 1) dx += g * sign;
            else if (p.p < 0) dx += fabs(e) == d ? g * sign : (S)0;
            else if (d == 0) continue;
            else if (p.p == 2) dx += g / d * e;
            else if (e != 0) dx += g * (S)((double)sign * pow((double)fabs(e) / (double)d, p.p - 1));
        }
        put<S>(p.out, i, dx);
    }
}

EXPORT(256) om_k_cdist_f32(PARAM(struct om_gpu_cdist) p) { cdist<float>(p); }
EXPORT(256) om_k_cdist_f64(PARAM(struct om_gpu_cdist) p) { cdist<double>(p); }
EXPORT(256) om_k_cdist_grad_f32(PARAM(struct om_gpu_cdist) p) { cdist_grad<float>(p); }
EXPORT(256) om_k_cdist_grad_f64(PARAM(struct om_gpu_cdist) p) { cdist_grad<double>(p); }
