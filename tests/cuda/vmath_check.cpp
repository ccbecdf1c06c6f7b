/* vmath_check.cpp - the elementary functions as a GPU computes them (vmath.h, __CUDACC__), on the host: its powers of
 * two and reciprocals are the exact ones and so many ulp beside them as the PTX manual allows, the worst of each taken.
 * Prints for each function and range of x the largest error in ulp; -DHOST: of the CPU's functions. */
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

static int off_ex2, off_rcp;
static float moved(double exact, int ulp) {
    float y = (float)exact;
    for (; ulp > 0; ulp--) y = nextafterf(y, INFINITY);
    for (; ulp < 0; ulp++) y = nextafterf(y, -INFINITY);
    return y;
}
static float approximate(const char *instruction, float x) {
    const bool power = instruction[1] == 'e', flushes = strstr(instruction, "ftz");
    if (flushes && fabsf(x) < 1.17549435e-38f) x = copysignf(0, x);
    const double exact = power ? exp2((double)x) : 1.0 / x;
    const float y = std::isfinite((float)exact) ? moved(exact, power ? off_ex2 : off_rcp) : (float)exact;
    return flushes && fabsf(y) < 1.17549435e-38f ? copysignf(0, y) : y;
}
#ifndef HOST
#define __CUDACC__
#define __device__
#define __forceinline__ inline
#define asm(...) y = approximate(#__VA_ARGS__, x)
#endif
#include "cpu/kernels/vmath.h"

static const double PI = 3.14159265358979323846;
static double share(double x) { return 0.5 * erfc(-x / sqrt(2.0)); }
static double twice_u(double x) { return 2 * sqrt(2 / PI) * (x + 0.044715 * x * x * x); }
static double sig(double x) { return 1 / (1 + exp(-x)); }

/* scale: what errors of a sum are measured by where it cancels */
struct row { const char *name; float (*f)(float); double (*exact)(double), (*scale)(double); };
static const row rows[] = {
    {"tanh", [](float x) { return tanh_f32(x); }, [](double x) { return tanh(x); }, nullptr},
    {"sigmoid", [](float x) { return sigmoid_f32(x); }, sig, nullptr},
    {"silu", [](float x) { return silu_f32(x); }, [](double x) { return x * sig(x); }, nullptr},
    {"silu_grad", [](float x) { return silu_grad_f32(1, x); },
     [](double x) { return sig(x) * (1 + x * sig(-x)); }, [](double x) { return sig(x) * (1 + fabs(x) * sig(-x)); }},
    {"gelu", [](float x) { return gelu_f32(x); }, [](double x) { return x * share(x); }, nullptr},
    {"gelu_grad", [](float x) { return gelu_grad_f32(1, x); },
     [](double x) { return share(x) + x * exp(-x * x / 2) / sqrt(2 * PI); },
     [](double x) { return share(x) + fabs(x) * exp(-x * x / 2) / sqrt(2 * PI); }},
    {"gelu_tanh", [](float x) { return gelu_tanh_f32(x); }, [](double x) { return x * sig(twice_u(x)); }, nullptr},
    {"gelu_tanh_grad", [](float x) { return gelu_tanh_grad_f32(1, x); },
     [](double x) {
         const double s = sig(twice_u(x)), n = sig(-twice_u(x));
         return s * (1 + x * n * 2 * sqrt(2 / PI) * (1 + 3 * 0.044715 * x * x));
     },
     [](double x) {
         const double s = sig(twice_u(x)), n = sig(-twice_u(x));
         return s * (1 + fabs(x) * n * 2 * sqrt(2 / PI) * (1 + 3 * 0.044715 * x * x));
     }},
};
static const float edge[] = {-80, -20, -5, -3, -1, 0, 1, 5, 80};

int main(void) {
    const float special[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, -1e-40f, 3e38f, -3e38f, -1.6e7f, -100, 100};
    for (const row &r : rows) {
        printf("%s", r.name);
        for (int k = 0; k + 1 < (int)(sizeof edge / sizeof *edge); k++) {
            double most = 0;
            for (int i = 0; i <= 40000; i++) {
                const float x = (float)(edge[k] + (edge[k + 1] - (double)edge[k]) * i / 40000);
                const double y = r.exact(x), by = r.scale ? r.scale(x) : fabs(y);
                if (by < 1e-36) continue;
                const double ulp = ldexp(1.0, ilogb(by) - 23);
                for (off_ex2 = -2; off_ex2 <= 2; off_ex2 += 2)
                    for (off_rcp = -1; off_rcp <= 1; off_rcp++) most = fmax(most, fabs(r.f(x) - y) / ulp);
            }
            printf(" %.1f", most);
        }
        printf(" |");
        off_ex2 = off_rcp = 0;
        for (float x : special) printf(" %g", (double)r.f(x));
        printf("\n");
    }
}
