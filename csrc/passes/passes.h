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
extern const om_pass *const om_passes_variant[]; /* the forward of a variant, before its gradients */
/* forward + backward graph; in the place of `remat` a variant's own set of flags is applied (run/model.c) */
extern const om_pass *const om_passes_joint[];
/* Passes [from, to) of a list, and one step that is none of it, number i of the pipeline: replaces *g. */
om_status om_passes_range(om_ctx *cx, const om_pass *const *list, int from, int to, om_graph **g);
typedef om_status (*om_pass_step)(om_ctx *cx, const om_graph *in, const void *arg, om_graph **out);
om_status om_passes_step(om_ctx *cx, int i, const char *name, om_pass_step step, const void *arg, om_graph **g);
const om_pass *om_pass_find(const char *name);   /* NULL when unknown */
om_status om_pass_apply(om_ctx *cx, const om_pass *pass, const om_graph *in, om_graph **out); /* one, and no more */
/* Where ORTMODULE_DUMP_PASSES asks for it: the graphs as files, if they differ (dump.c). before NULL: there is none. */
om_status om_passes_dump(om_ctx *cx, const char *name, const om_graph *before, const om_graph *after);

/* The views from v down to a cast of a half to f32, first below v: how many, at most OM_PASS_VIEWS; -1: it is
 * otherwise, or somebody else reads what lies between. *x: what is cast. sabotage: the point that lets others read it.
 */
enum { OM_PASS_VIEWS = 8 };
struct om_facts;
int om_pass_cast_below(const struct om_facts *f, om_id v, const om_node **view, om_id *x, const char *sabotage);
/* Same dtype, rank and sizes. */
bool om_pass_same_type(const om_type *a, const om_type *b);
#endif
