/* masks.h - what other passes ask about attention masks (masks.c).
 *
 * Three layers, each of which includes only those before it:
 *   expr.h, expr.c   expressions: hash-consed, so equal formulas are equal numbers; normal forms; ranges; substitution
 *   eval.h, eval.c   value of the graph + indices -> expression
 *   masks.h, masks.c formula -> attributes of the attention node and the smallest tensor for the rest
 */
#ifndef OM_PASSES_MASKS_H
#define OM_PASSES_MASKS_H

#include "graph/engine.h"

/* Additive masks hide by a large negative number. At or below this a visible key's weight makes a hidden one's exactly
 * 0 (padding_sparsity, and f16). */
#define MX_HIDE (-6e4)
/* Does a number of this dtype, which a user put in the place of a score or adds to it, hide the key? Scores stay above
 * what hides: in f16 nothing lies far below it, else models write -1e9 (in bf16 -999292928) or the lowest number. A
 * number that scores may reach is computed with. */
static inline bool om_mask_hides(double x, int dtype) { return x <= (dtype == OM_F16 ? MX_HIDE : -9e8); }
/* Does every row of scores of these sizes provably have a key for which the bool value `cond` (of r->from, broadcast to
 * them) is `visible_when`? False also when nothing is known. */
bool om_mask_rows_see(om_rewriter *r, om_id cond, bool visible_when, const om_dim *size, int rank);
/* Are all numbers of a float value ones that a trained network produces, not ones that a user may have filled with -inf
 * or finfo.min? */
bool om_mask_moderate(const om_graph *g, om_id v);

#endif
