/* sabotage.h - breaks exactly one thing, so that tests/test_sabotage.py can see whether the tests see it.
 *
 * OM_SABOTAGE="point" or "point:k" names a point below and which of its occurrences goes wrong (no k: every one).
 * Compiled in only for build/sabotage.so, the engine with -DOM_SABOTAGE_BUILD (tests/sabotage/sabotage.c); everywhere
 * else these are constants that vanish.
 *
 *   <operator>          grad.c      the next gradient its rule returns is wrong
 *   term                grad.c      the next floating-point output of a backward node is wrong
 *   grad.sum            grad.c      a further contribution to a gradient is lost
 *   pass.<name>         rewrite.c   the next value the pass replaces is wrong
 *   rewrite.stream|write|grad       a node gets another's random stream; a write-back, a returned gradient is lost
 *   uses, same_type, splat          facts.c, passes.c: a condition most passes share always holds
 *   the rest                        a condition where it stands: plan.c, model.c, passes/, cuda/
 */
#ifndef OM_SABOTAGE_H
#define OM_SABOTAGE_H

#include "graph/engine.h"

#ifdef OM_SABOTAGE_BUILD
bool om_sabotage(const char *point);                    /* does this occurrence go wrong? */
void om_sabotage_enter(const char *pass);               /* a pass begins; NULL: it ended */
void om_sabotage_replaced(om_rewriter *r, om_id node);  /* "pass.<name>", after the pass emitted `node` */
om_id om_sabotage_wrong(om_graph *g, om_id v);          /* another value of v's type */
om_status om_sabotage_terms(om_ctx *cx, om_graph **g);  /* "term" */
#else
static inline bool om_sabotage(const char *point) { return (void)point, false; }
static inline void om_sabotage_enter(const char *pass) { (void)pass; }
static inline void om_sabotage_replaced(om_rewriter *r, om_id node) { (void)r, (void)node; }
static inline om_id om_sabotage_wrong(om_graph *g, om_id v) { return (void)g, v; }
static inline om_status om_sabotage_terms(om_ctx *cx, om_graph **g) { return (void)cx, (void)g, OM_OK; }
#endif
#endif
