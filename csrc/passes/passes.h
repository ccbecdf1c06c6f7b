/* passes.h - names of the passes (passes.def), how to find one, and the lists that run. */
#ifndef OM_PASSES_H
#define OM_PASSES_H

#include "graph/engine.h"

#define PASS(name, doc)              \
    extern const om_pass om_pass_##name; \
    om_status om_pass_run_##name(om_ctx *cx, const om_graph *in, om_graph **out);
#include "passes/passes.def"
#undef PASS

extern const om_pass *const om_passes[];         /* all of them, NULL-terminated */
extern const om_pass *const om_passes_forward[]; /* after import, before gradients are built */
extern const om_pass *const om_passes_joint[];   /* forward + backward graph */
extern const om_pass *const om_passes_joint_layers[]; /* the same at memory level 1 */
const om_pass *om_pass_find(const char *name);   /* NULL when unknown */

/* The constant a value is, if all its elements are equal: true and the element as double (exact for every float and for
 * small integers). */
bool om_pass_splat(const om_graph *g, om_id v, double *x);
/* Same dtype, rank and sizes. */
bool om_pass_same_type(const om_type *a, const om_type *b);
#endif
