/* taps.h - sums over the taps of a small window on planes laid flat (csrc/cpu/kernels/taps.k.c). All float or double.
 *
 * Reads and writes whole vectors: TAPS_SLACK elements behind what is asked for are read, and may be written.
 */
#ifndef OM_TAPS_H
#define OM_TAPS_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

enum { TAPS_SLACK = 16, TAPS_LANES = 16 };

typedef struct om_taps_type {
    /* to[j] = start + sum over taps t, in order, of w[t] from[at[t] + j], for j < n */
    void (*sum)(const void *from, const int64_t *at, const void *w, int64_t taps, double start, void *to, int64_t n);
    /* lanes[t][...] += by[j] from[at[t] + j], over j < n; TAPS_LANES partial sums for each tap */
    void (*dot)(const void *from, const int64_t *at, int64_t taps, const void *by, int64_t n, double *lanes);
    void (*total)(const double *lanes, int64_t taps, void *to);
} om_taps_type;
typedef struct om_taps_kernels { om_taps_type f32, f64; } om_taps_kernels;
OM_DECLARE_ISA(om_taps_kernels, om_taps);

#endif
