/* overlap.h - which tensors have memory in common. A tensor is the bytes from its first to its last element, with the
 * gaps between: two whose elements alternate (columns of a matrix) overlap, too. */
#ifndef OM_OVERLAP_H
#define OM_OVERLAP_H

#include "python/pymodule.h"

typedef struct om_range {
    uintptr_t begin, end;
    Py_ssize_t i; /* of the tensor */
} om_range;

/* strides in elements of `size` bytes; NULL: dense */
om_range om_range_of(const void *data, size_t size, int rank, const int64_t *dim, const int64_t *stride, Py_ssize_t i);

/* *again: NULL when no two of the n tensors (`stride` bytes apart from each other) share memory, else n marks, set for
 * those that share some with an earlier one (at the other end of a chain of overlaps, perhaps). 0, or -1 with an error
 * set. */
int om_overlaps(const om_tensor *first, size_t stride, Py_ssize_t n, uint8_t **again);

#endif
