/* attention.h - what ops/attention.c and the attention kernels of each instruction set share.
 *
 * Every tensor has rank r >= 3, axes (batch..., head, time, element); `mask` is broadcast by stride 0 and all batch
 * axes are q's. A task reads shared inputs and writes outputs that no other task touches, so results do not depend on
 * threads.
 */
#ifndef OM_ATTENTION_H
#define OM_ATTENTION_H

#include "graph/engine.h"
#include "cpu/kernels_isa.h"

typedef struct om_attn_form {            /* what sizes, strides and attributes decide: once per plan */
    int64_t batch, hq, hk, tq, tk, d, dv_size;
    double scale, dropout;
    bool causal;
    int nan_rows;                        /* a query that sees nothing gives NaN; 1: into its scores too, 2: not there */
    /* key j visible to query i: j <= i + offset (causal), j > i - window (window > 0) */
    int64_t offset, window;
    uint64_t stream;
    int64_t start_stride, end_stride;
    int64_t chunks, chunk_rows;          /* forward: a task is chunk_rows queries of one head */
    /* backward: a task is so many batch entries x kv heads (all that share a dmask) */
    int64_t task_batch, task_heads;
} om_attn_form;

typedef struct om_attn_job {
    const om_attn_form *f;
    /* mask: dtype OM_NODTYPE = none; y, lse: outputs of forward, inputs of backward */
    om_tensor q, k, v, mask, y, lse;
    /* backward; dmask in the compute type, broadcast as mask; OM_NODTYPE = not wanted */
    om_tensor dy, dq, dk, dv, dmask;
    /* backward; bool, broadcast as mask: scores without a gradient; OM_NODTYPE = none */
    om_tensor frozen;
    const int64_t *kv_start, *kv_end;    /* per batch entry, or NULL */
    uint64_t seed;
} om_attn_job;

typedef struct om_attn_type {            /* one compute type of one instruction set */
    int rows;                            /* queries in a tile */
    int64_t (*forward_work)(const om_attn_form *f); /* bytes of private memory per worker */
    int64_t (*backward_work)(const om_attn_form *f);
    void (*forward)(const om_attn_job *j, int64_t task, void *work);
    void (*backward)(const om_attn_job *j, int64_t task, void *work);
} om_attn_type;

typedef struct om_attn_kernels { om_attn_type f32, f64; } om_attn_kernels;
OM_DECLARE_ISA(om_attn_kernels, om_attn_isa);
OM_DECLARE_ISA(om_attn_type, om_attn_bf16); /* where om_isa_bf16 has OM_BF16_DOT */
OM_DECLARE_ISA(om_attn_type, om_attn_amx);  /* and om_isa_tiles; no `forward` where the compiler has no tiles */

#endif
