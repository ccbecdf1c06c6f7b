/* passes.c - running passes: the lists, verification between passes, dumps and bisection.
 *
 * A pass reads a graph and writes another (om_rewrite), which replaces the first. Environment:
 *   ORTMODULE_VERIFY=1        verify after every pass (always on when built with -DOM_DEBUG)
 *   ORTMODULE_DUMP_PASSES=d   write the graph before and after every pass that changed it into directory d (dump.c)
 *   ORTMODULE_PASS_LIMIT=n    run only the first n passes of a list: bisects a wrong pass
 */
#include "passes/passes.h"
#include "graph/facts.h"
#include "graph/sabotage.h"

#include <limits.h>
#include <stdlib.h>

#define PASS(name, doc) const om_pass om_pass_##name = {#name, doc, om_pass_run_##name};
#include "passes/passes.def"
#undef PASS

const om_pass *const om_passes[] = {
#define PASS(name, doc) &om_pass_##name,
#include "passes/passes.def"
#undef PASS
    NULL,
};

/* --- the pipelines: each pass leaves dead nodes to the next ----------------------------------------- */

const om_pass *const om_passes_forward[] = {
    &om_pass_attention,
    &om_pass_masks,
    &om_pass_fold,
    &om_pass_simplify,
    &om_pass_cse,
    &om_pass_simplify, /* again: fold and cse made operands equal that were not */
    &om_pass_patterns,
    &om_pass_bias,
    &om_pass_losses,
    &om_pass_layout,
    &om_pass_dce,
    NULL,
};

/* make device OPS=... leaves out what only saves time: rows that do not count are computed there */
const om_pass *const om_passes_variant[] = {
#ifndef OM_ONLY
    &om_pass_label_parts,
    &om_pass_padding,
    &om_pass_label_rows,
#endif
    NULL,
};

const om_pass *const om_passes_joint[] = {
    &om_pass_simplify,
    &om_pass_fold,
    &om_pass_cse,
#ifndef OM_ONLY
    &om_pass_label_grads,
#endif
    &om_pass_accumulate,
    &om_pass_remat, /* a variant: the flags it is asked by */
#ifndef OM_ONLY
    &om_pass_rotary,
    &om_pass_norm_casts,
#endif
    &om_pass_dce,
    &om_pass_fuse,
#ifndef OM_ONLY
    &om_pass_casts, /* knows the segments (run/joint.c) */
#endif
    NULL,
};

const om_pass *om_pass_find(const char *name) {
    for (int i = 0; om_passes[i]; i++)
        if (!strcmp(om_passes[i]->name, name)) return om_passes[i];
    return NULL;
}

bool om_pass_same_type(const om_type *a, const om_type *b) {
    return a->dtype == b->dtype && (om_same_dims(a, b) || (a->rank == b->rank && om_sabotage("same_type")));
}

int om_pass_cast_below(const om_facts *f, om_id v, const om_node **view, om_id *x, const char *sabotage) {
    for (int n = 0;; n++) {
        const om_node *m = om_maker(f->g, v);
        const bool once = om_used_once_live(f, v) || om_sabotage(sabotage);
        if (!m || m->n_in != 1 || m->n_out != 1 || !once || f->held[v]) return -1;
        *x = om_ins(f->g, m)[0];
        if (om_is(m, cast)) return om_ty(f->g, v)->dtype == OM_F32 && om_is_half(om_ty(f->g, *x)->dtype) ? n : -1;
        if (!m->op->view || n == OM_PASS_VIEWS) return -1;
        view[n] = m;
        v = *x;
    }
}

static bool passes_verify(void) {
#ifdef OM_DEBUG
    return true;
#elif defined(OM_ONLY) /* it has no verifier */
    return false;
#else
    const char *e = getenv("ORTMODULE_VERIFY");
    return e && *e && strcmp(e, "0") != 0;
#endif
}

om_status om_passes_step(om_ctx *cx, int i, const char *name, om_pass_step step, const void *arg, om_graph **g) {
    const char *limit = getenv("ORTMODULE_PASS_LIMIT");
    if (limit && *limit && i >= strtol(limit, NULL, 10)) return OM_OK;
    om_graph *next;
    om_sabotage_enter(name);
    om_status s = step(cx, *g, arg, &next);
    om_sabotage_enter(NULL);
    OM_TRY(s);
    if (passes_verify() && om_verify(next) != OM_OK) {
        om_log(cx, 0, "the graph is wrong after pass %s: %s", name, cx->message);
        om_graph_free(next);
        return cx->status;
    }
    s = om_passes_dump(cx, name, *g, next);
    om_graph_free(*g);
    *g = next;
    return s;
}

static om_status passes_call(om_ctx *cx, const om_graph *in, const void *pass, om_graph **out) {
    return ((const om_pass *)pass)->run(cx, in, out);
}

om_status om_pass_apply(om_ctx *cx, const om_pass *pass, const om_graph *in, om_graph **out) {
    om_sabotage_enter(pass->name);
    const om_status s = pass->run(cx, in, out);
    om_sabotage_enter(NULL);
    return s;
}

om_status om_passes_range(om_ctx *cx, const om_pass *const *list, int from, int to, om_graph **g) {
    for (int i = from; i < to && list[i]; i++) OM_TRY(om_passes_step(cx, i, list[i]->name, passes_call, list[i], g));
    return OM_OK;
}

om_status om_passes_run(om_ctx *cx, const om_pass *const *list, om_graph **g) {
    return om_passes_range(cx, list, 0, INT_MAX, g);
}
