/* om_ops.c - the command `om-ops`: which operators artifacts need, as a header for `make device OPS=...`.
 *
 *     om-ops MODEL.omd ... > only.h
 *
 * Loads each file as a device does and notes every node that is ever made on the way (graph.c, OM_TRACE_OPS): those of
 * the file, those that passes put in their place, gradients; and every type. The header has OM_KEEP_<operator>(row):
 * the row of the device's table, or nothing; and OM_KEEP_TYPE_<type>, 0 or 1. A graph that needs what was left out is
 * refused by name when it is loaded.
 */
#include "graph/engine.h"

#include <stdio.h>
#include <stdlib.h>

extern uint8_t om_ops_made[], om_types_made[];

int main(int argc, char **argv) {
    if (argc < 2) return fputs("usage: om-ops MODEL.omd ... > only.h\n", stderr), 2;
    for (int i = 1; i < argc; i++) {
        om_ctx *cx = om_ctx_new(NULL);
        om_trainer *t;
        if (!cx || om_trainer_load_file(cx, argv[i], NULL, &t) != OM_OK)
            return fprintf(stderr, "om-ops: %s: %s\n", argv[i], cx ? om_ctx_message(cx) : "no memory"), 1;
        om_trainer_free(t);
        om_ctx_free(cx);
    }
    printf("/* of");
    for (int i = 1; i < argc; i++) printf(" %s", argv[i]);
    printf(" by om-ops */\n");
    for (int k = 0; om_ops[k]; k++)
        printf("#define OM_KEEP_%s(...)%s\n", om_ops[k]->name, om_ops_made[k] ? " __VA_ARGS__" : "");
    static const char *const type[OM_N_DTYPES] = {
        [OM_F32] = "F32", [OM_F64] = "F64", [OM_BF16] = "BF16", [OM_F16] = "F16", [OM_I64] = "I64",
        [OM_I32] = "I32", [OM_I16] = "I16", [OM_I8] = "I8",     [OM_U8] = "U8",   [OM_BOOL] = "BOOL"};
    om_types_made[OM_F32] = om_types_made[OM_F64] = om_types_made[OM_I64] = 1; /* what kernels convert to on the way */
    for (int k = 0; k < OM_N_DTYPES; k++)
        if (type[k]) printf("#define OM_KEEP_TYPE_%s %d\n", type[k], om_types_made[k]);
    return 0;
}
