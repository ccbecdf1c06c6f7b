/* cuda/optim_host.h - host side of the optimizer kernels: tables of spans, and the launches one step is made of.
 *
 * A list of parameters has one table in device memory, laid out by om_gpu_table: the spans (uploaded), the chunks (made
 * from them on the device) and the scratch of sums. The caller owns that memory and keeps a copy of the spans on the
 * host, by which it sees whether anything changed since the last upload. Nothing here waits for the device.
 */
#ifndef OM_CUDA_OPTIM_HOST_H
#define OM_CUDA_OPTIM_HOST_H

#include "optim/optim.h"
#include "cuda/driver.h"
#include "cuda/optim.h"

typedef struct om_gpu_table {
    int ordinal;   /* CUDA device */
    void *stream;
    void *memory;  /* om_gpu_table_size bytes, 16-byte aligned */
    uint32_t n_span, n_chunk;
    void *order;   /* om_gpu_order_size bytes, 16-byte aligned: LAMB in one launch; NULL: in three */
} om_gpu_table;

size_t om_gpu_table_size(uint32_t n_span, uint32_t n_chunk);
size_t om_gpu_order_size(uint32_t n_span, uint32_t n_chunk);

/* Spans of the parameters that have elements. step[i].data: the counter of parameter i (dtype OM_NODTYPE: none). odd[i]
 * is set when the tensors of parameter i do not share one dense memory order: the caller brings them into one and comes
 * again; *n_odd counts them. */
om_status om_gpu_spans(om_ctx *cx, const char *op, om_optim_store store, const om_optim_param *ps,
                       const om_tensor *step, int n, om_gpu_span *out, uint32_t *n_span, uint32_t *n_chunk,
                       uint8_t *odd, int *n_odd);

/* Writes spans and chunks of a table. */
om_status om_gpu_upload_spans(om_ctx *cx, const om_gpu_table *t, const om_gpu_span *spans);

/* Writes t->order for the spans of the table. */
om_status om_gpu_lamb_order(om_ctx *cx, const om_gpu_table *t);

/* One step. `o` holds configuration, scalars and seed; the table's pointers are filled in here. */
om_status om_gpu_adam(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o);
om_status om_gpu_sgd(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o);
om_status om_gpu_lamb(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o);
om_status om_gpu_axpby(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o);
om_status om_gpu_norm(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o);        /* sums of the chunks ... */
/* ... norm_out ... first_out from them; repeatable */
om_status om_gpu_norm_finish(om_ctx *cx, const om_gpu_table *t, om_gpu_optim o);
om_status om_gpu_loss_scale(om_ctx *cx, int ordinal, void *stream, const om_gpu_scaling *a);
#endif
