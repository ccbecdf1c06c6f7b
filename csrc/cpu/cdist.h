/* cdist.h - one row against many (csrc/cpu/kernels/cdist.k.c); [0] float, [1] double; dense rows of m elements. */
#ifndef OM_CDIST_H
#define OM_CDIST_H

#include "cpu/kernels_isa.h"
#include "ortmodule.h"

enum { OM_CDIST_ZERO, OM_CDIST_ONE, OM_CDIST_TWO, OM_CDIST_INF, OM_CDIST_ANY };

struct om_cdist_kernels {
    /* d[j] = distance of x to row j of y, j < r */
    void (*rows[2])(int how, double p, const void *x, const void *y, int64_t r, int64_t m, void *d);
    /* dx = sum over j of dd[j] times the gradient of d[j] for x */
    void (*grad[2])(int how, double p, const void *dd, const void *x, const void *y, const void *d, int64_t r,
                    int64_t m, void *dx);
};
OM_DECLARE_ISA(struct om_cdist_kernels, om_cdist);

#endif
