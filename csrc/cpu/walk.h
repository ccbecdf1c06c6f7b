/* walk.h - an odometer over several tensors at once: one index, one running offset per tensor, no division per step.
 *
 *     om_walk w = {.rank = r, .n = 2, .dim = ..., .stride = {{...}, {...}}};   any unit: bytes or elements
 *     walk_seek(&w, first);  for (...; ...; walk_next(&w)) use w.off[0], w.off[1];
 */
#ifndef OM_OPS_WALK_H
#define OM_OPS_WALK_H

#include "graph/engine.h"

enum { OM_WALK_TENSORS = 4 };
typedef struct om_walk {
    int rank, n;
    int64_t dim[OM_RANK], stride[OM_WALK_TENSORS][OM_RANK], at[OM_RANK], off[OM_WALK_TENSORS];
} om_walk;

static inline void walk_seek(om_walk *w, int64_t index) {
    for (int t = 0; t < w->n; t++) w->off[t] = 0;
    for (int i = w->rank - 1; i >= 0; i--) {
        w->at[i] = index % w->dim[i];
        index /= w->dim[i];
        for (int t = 0; t < w->n; t++) w->off[t] += w->at[i] * w->stride[t][i];
    }
}

static inline void walk_next(om_walk *w) {
    for (int i = w->rank - 1; i >= 0; i--) {
        for (int t = 0; t < w->n; t++) w->off[t] += w->stride[t][i];
        if (++w->at[i] < w->dim[i]) return;
        for (int t = 0; t < w->n; t++) w->off[t] -= w->dim[i] * w->stride[t][i];
        w->at[i] = 0;
    }
}

static inline int64_t walk_count(const om_walk *w) {
    int64_t c = 1;
    for (int i = 0; i < w->rank; i++) c *= w->dim[i];
    return c;
}

#endif
