/* dce.c - dead code: om_rewrite visits live nodes only, so copying is enough. */
#include "passes/passes.h"

om_status om_pass_run_dce(om_ctx *cx, const om_graph *in, om_graph **out) {
    return om_rewrite(cx, in, om_rewrite_copy, NULL, out);
}
