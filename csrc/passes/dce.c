/* dce.c - dead code: om_rewrite visits live nodes only, so copying is enough. */
#include "passes/passes.h"

static om_status dce_run(om_ctx *cx, const om_graph *in, om_graph **out) {
    return om_rewrite(cx, in, om_rewrite_copy, NULL, out);
}

const om_pass om_pass_dce = {"dce", "drop nodes that no output, write-back or gradient needs", dce_run};
