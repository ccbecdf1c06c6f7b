/* window.h - the windows of convolutions and pools: what a node says of them, how many fit into a tensor.
 *
 * Along a spatial axis of `in` elements with lo zeros before and hi behind, window j reads k elements, dil apart, from
 * j stride - lo on; it spans dil (k - 1) + 1. So
 *
 *     count = floor((in + lo + hi - span) / stride) + 1
 *
 * windows lie inside. Where a pool rounds up (ceil), the last may reach out behind, but begins before in + lo.
 * Attributes stride, dilation (1 where they are not given) and pad (0) have an entry per spatial axis, or one for all;
 * pad may list all begins, then all ends. A pool's pads are alike on both sides; its stride, where none is given, is
 * its kernel.
 *
 * All numbers count elements. In what om_window_read lets pass, stride and dil are 1 to 2^31 - 1, pads 0 to 2^31 - 1,
 * and a window whose kernel is an attribute has (over all axes) and spans (along each) at most 2^31 - 1 elements: sums
 * of two, and products with a size that a tensor has, are 64-bit numbers. Nothing is owned; nothing is allocated but
 * size expressions, in the graph.
 */
#ifndef OM_WINDOW_H
#define OM_WINDOW_H

#include "graph/engine.h"

enum { OM_WINDOW_AXES = 3 };

typedef struct om_window {
    int axes;
    bool ceil;
    int64_t k[OM_WINDOW_AXES], stride[OM_WINDOW_AXES], dil[OM_WINDOW_AXES], lo[OM_WINDOW_AXES], hi[OM_WINDOW_AXES];
} om_window;

/* --- in a type rule: attributes are checked, sizes are expressions, errors name the operator ------------------- */

/* How many axes the node's attribute kernel lists: 1 to OM_WINDOW_AXES, or an error. */
om_status om_window_axes(om_graph *g, const om_node *n, int *axes);
/* The windows of n over `axes` axes, 1 to OM_WINDOW_AXES, entry i for the i-th; k is 1 where kernel is no attribute. */
om_status om_window_read(om_graph *g, const om_node *n, int axes, om_window *w);
/* How many windows of k elements fit along axis i of size `in`; an error where it is known that not even one does. */
om_status om_window_count(om_graph *g, const om_node *n, const om_window *w, int i, om_dim in, om_dim k, om_dim *count);
/* The other way round: the size that `count` windows lie in, and `more` elements; an error where it is known to be less
 * than 1. */
om_status om_window_length(om_graph *g, const om_node *n, const om_window *w, int i, om_dim count, om_dim k,
                           int64_t more, om_dim *length);

/* --- in a kernel: attributes have passed the type rule, sizes are numbers --------------------------------------- */

/* The windows over the last `axes` axes. Always three: leading ones that are missing have k, stride and dil 1 and no
 * padding. k: the kernel's sizes; NULL: attribute kernel. ceil stays false: the result's size is known. */
void om_window_args(const om_args *a, int axes, const int64_t *k, om_window *w);
/* How many fit along axis i of size `in`; 0: none. */
int64_t om_window_fits(const om_window *w, int i, int64_t in);

#endif
