/* tool.h - what the files of the command om-opt share. */
#ifndef OM_TOOL_H
#define OM_TOOL_H

#include "passes/passes.h"

int om_tool_fail(om_ctx *cx, const char *what);                  /* says why on standard error; 1 */
om_status om_tool_load(om_ctx *cx, const char *path, om_graph **g); /* ONNX or text; verified */
/* Gradients of the named graph inputs (all, params), every float output receiving one: replaces *g. */
om_status om_tool_grad(om_ctx *cx, om_graph **g, char *names);
/* The passes of a pipeline (forward, variant, joint), or the one of that name in `one`: its first is NULL where there
 * is none. */
const om_pass *const *om_tool_list(const char *name, const om_pass *one[2]);
int om_tool_bisect(om_ctx *cx, int argc, char **argv);           /* bisect.c; the exit status */
extern const char om_tool_bisect_usage[];
#endif
