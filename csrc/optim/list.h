/* list.h - from a list of parameters to blocks of work (internal to csrc/optim).
 *
 * om_optim_open checks types, devices and layouts and makes one span per non-empty parameter; om_optim_blocks runs a
 * function over all blocks; om_optim_close, called whatever the outcome, copies temporaries back and frees. A tensor
 * needs a temporary when its memory order differs from the weight's (or the weight itself has gaps): then every tensor
 * of that parameter is brought into one order.
 */
#ifndef OM_OPTIM_LIST_H
#define OM_OPTIM_LIST_H

#include "optim/optim.h"

typedef struct om_optim_temp { om_tensor tmp, orig; bool write; } om_optim_temp;

typedef struct om_optim_list {
    om_ctx *cx;
    const char *op;          /* for messages */
    om_optim_span *span;     /* one per non-empty parameter */
    uint32_t *param;         /* its index in the caller's array */
    int64_t *first;          /* n + 1: first block of each span */
    int n;
    OM_VEC(om_optim_temp) temps;
} om_optim_list;

om_status om_optim_open(om_ctx *cx, const char *op, om_optim_store store, uint64_t seed, bool write_weights,
                        const om_optim_param *ps, int n, om_optim_list *l);
/* What om_optim_open is made of, for lists that are not parameters: an empty list with room for n spans, and its next
 * span. */
om_status om_optim_start(om_ctx *cx, const char *op, int n, om_optim_list *l);
om_optim_span *om_optim_add(om_optim_list *l, int param, int64_t numel);
om_status om_optim_close(om_optim_list *l, om_status s); /* s: status so far; temporaries go back only when OM_OK */

/* Types, sizes and devices of one parameter's tensors agree, and with the way its weight is stored. */
om_status om_optim_check(om_ctx *cx, const char *op, om_optim_store store, const om_optim_param *q, int index);
bool om_optim_gapless(const om_tensor *t); /* row-major up to a permutation of the axes: no gaps, no overlap */
bool om_optim_same_order(const om_tensor *a, const om_tensor *b); /* equal strides where they matter; sizes are equal */
/* *t becomes a copy with order's strides */
om_status om_optim_temp_make(om_optim_list *l, om_tensor *t, const om_tensor *order, bool write);

/* The part of span i that its blocks [b, b + blocks) cover (counted from the list's first block). */
om_optim_span om_optim_part(const om_optim_list *l, int i, int64_t b, int64_t blocks);
int om_optim_find(const om_optim_list *l, int64_t b); /* span of block b */
typedef void (*om_optim_fn)(void *arg, int span, int64_t block, const om_optim_span *part);
/* Runs fn over the blocks [begin, end) on the calling thread; reverse: from the last to the first (what was touched
 * last comes first). */
void om_optim_range(const om_optim_list *l, int64_t begin, int64_t end, bool reverse, om_optim_fn fn, void *arg);
void om_optim_blocks(const om_optim_list *l, om_optim_fn fn, void *arg); /* all blocks, on all threads, in any order */
#endif
