/* cuda/scratch.h - scratch of the rows of cuda.def, by name. */
#ifndef OM_CUDA_SCRATCH_H
#define OM_CUDA_SCRATCH_H
#include "cuda/lower.h"
int64_t om_gpu_scratch_none(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_matmul(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_reduce(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_norm_grad(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_cross_entropy(om_ctx *cx, const om_args *a);
/* Of m words to be sorted: they and room for their sorting. */
int64_t om_gpu_sort_scratch(int64_t m);
/* The scratch's m words, keys of at most `most`, in order; what follows reads them at the offset that is returned. */
int64_t om_gpu_sort_lower(om_lower *l, int64_t m, int64_t most);
int64_t om_gpu_scratch_gather_grad(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_scatter_elements(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_scatter_nd(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_topk(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_products(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_max_pool_grad(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_attention(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_attention_grad(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_select_rows(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_recurrent(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_recurrent_grad(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_lamb(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_norm_all(om_ctx *cx, const om_args *a);
int64_t om_gpu_scratch_ctc(om_ctx *cx, const om_args *a);
#endif
