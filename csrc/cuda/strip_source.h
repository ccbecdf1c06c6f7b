/* strip_source.h - strip programs as the text of CUDA kernels (strip_compiled.h). */
#ifndef OM_CUDA_STRIP_SOURCE_H
#define OM_CUDA_STRIP_SOURCE_H

#include "cpu/strip.h"
#include "cuda/params.h"

/* A program over operands of given layouts, as lower_strip.c records it. Sizes and strides in elements. */
typedef struct om_strip_layout {
    const om_strip_prog *prog;
    const uint8_t *dtype;                /* of operands, then outputs */
    const int64_t *dim;
    const int64_t (*stride)[OM_RANK];    /* of operands, then outputs */
    int rank;
    int64_t total;
    bool large;                          /* om_gpu_strip_large */
    uint16_t stride_at, draw_at;         /* bytes in the blob */
} om_strip_layout;

/* Writes `struct NAME { .. };` into text[size], NUL-terminated; returns its length, 0 when it does not fit. Layouts
 * that share a text share a kernel. */
size_t om_strip_source(const om_strip_layout *l, char *text, size_t size);
#endif
