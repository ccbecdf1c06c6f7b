#include "engine.h"
om_status om_onnx_write(om_ctx *cx, const om_graph *g, void **bytes, size_t *size) {
    (void)g, (void)bytes, (void)size;
    return om_fail(cx, OM_UNSUPPORTED, "writing ONNX");
}
