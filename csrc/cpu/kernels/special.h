/* special.h - functions that libm has not, in double, for C and CUDA.
 *
 * digamma and trigamma: below 0 the reflection formulas, from there by the recurrence to 10 or more, then the
 * asymptotic series, of which the first term left out is below 1e-17 of the result. */
#ifndef OM_SPECIAL_H
#define OM_SPECIAL_H

#include "cpu/kernels/vmath.h"

#define SPECIAL_PI 3.14159265358979323846

/* pi x without its whole multiples of pi, by which tan and sin^2 do not change */
VM double special_turn(double x) { return SPECIAL_PI * (x - rint(x)); }

VM double special_digamma(double x) {
    double sum = 0;
    if (x == 0) return copysign((double)INFINITY, -x);
    if (x < 0) {
        if (x == trunc(x)) return (double)NAN; /* -infinity too */
        sum = -SPECIAL_PI / tan(special_turn(x));
        x = 1 - x;
    }
    for (; x < 10; x++) sum -= 1 / x;
    if (!(x < 1e17)) return sum + log(x);
    const double z = 1 / (x * x);
    const double s = z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132
                     - z * (691.0 / 32760 - z / 12))))));
    return sum + log(x) - 0.5 / x - s;
}

VM double special_trigamma(double x) {
    double sum = 0, sign = 1;
    if (x < 0.5) {
        const double s = sin(special_turn(x));
        sum = -SPECIAL_PI * SPECIAL_PI / (s * s);
        x = 1 - x, sign = -1;
    }
    double near = 0;
    for (; x < 10; x++) near += 1 / (x * x);
    const double z = 1 / (x * x);
    near += 1 / x + z / 2 + z / x * (1.0 / 6 - z * (1.0 / 30 - z * (1.0 / 42 - z * (1.0 / 30 - z * (5.0 / 66
            - z * (691.0 / 2730 - z * 7 / 6))))));
    return sign * (sum + near);
}

VM double special_xlogy(double x, double y) { return y != y ? y : x == 0 ? 0 : x * log(y); }

#endif
