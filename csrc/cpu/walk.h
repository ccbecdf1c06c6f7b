/* walk.h - an odometer over several tensors at once: one index, one running offset per tensor, no division per step.
 *
 *     om_walk w = {.rank = r, .n = 2, .axis = ...};   any unit: bytes or elements
 *     walk_seek(&w, first);  for (...; ...; walk_next(&w)) use w.off[0], w.off[1];
 */
#ifndef OM_OPS_WALK_H
#define OM_OPS_WALK_H

#include "graph/engine.h"

enum { OM_WALK_TENSORS = 4 };
typedef struct om_walk_axis { int64_t dim, stride[OM_WALK_TENSORS]; } om_walk_axis;
typedef struct om_walk {
    int rank, n;
    const om_walk_axis *axis; /* outermost first */
    int64_t at[OM_RANK], off[OM_WALK_TENSORS];
} om_walk;

static inline void walk_seek(om_walk *w, int64_t index) {
    for (int t = 0; t < w->n; t++) w->off[t] = 0;
    for (int i = w->rank - 1; i >= 0; i--) {
        const om_walk_axis *a = &w->axis[i];
        w->at[i] = index % a->dim;
        index /= a->dim;
        for (int t = 0; t < w->n; t++) w->off[t] += w->at[i] * a->stride[t];
    }
}

static inline void walk_next(om_walk *w) {
    for (int i = w->rank - 1; i >= 0; i--) {
        const om_walk_axis *a = &w->axis[i];
        for (int t = 0; t < w->n; t++) w->off[t] += a->stride[t];
        if (++w->at[i] < a->dim) return;
        for (int t = 0; t < w->n; t++) w->off[t] -= a->dim * a->stride[t];
        w->at[i] = 0;
    }
}

static inline int64_t walk_count(const om_walk *w) {
    int64_t c = 1;
    for (int i = 0; i < w->rank; i++) c *= w->axis[i].dim;
    return c;
}

#endif
