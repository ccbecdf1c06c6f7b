/* cut.h - an ONNX graph cut down to what some values need; and the graphs of onnxruntime-training as this library's. */
#ifndef OM_CUT_H
#define OM_CUT_H
#include "onnx/onnx.h"
#include "trainer/tensors.h"

typedef struct om_cut {
    om_ctx *cx;
    om_arena mem;        /* of lists */
    om_strmap need;      /* names of values */
    Onnx__GraphProto g;  /* a copy of the graph, whose lists are replaced by shorter ones */
} om_cut;

void om_cut_begin(om_cut *c, om_ctx *cx);
void om_cut_end(om_cut *c);
/* The file, checked first unless it was before; it lives as long as the cut. NULL: recorded. */
Onnx__ModelProto *om_cut_unpack(om_cut *c, om_bytes onnx, bool checked);
om_status om_cut_need(om_cut *c, const char *name);
bool om_cut_needed(const om_cut *c, const char *name);
/* c->g: `of` with the nodes, initialisers and value_info that are needed; room for all inputs and metadata and for
 * n_outputs and n_metadata more, none of which are there yet. */
om_status om_cut_make(om_cut *c, const Onnx__GraphProto *of, size_t n_outputs, size_t n_metadata);

/* A training or evaluation graph of onnxruntime-training: what the user's outputs need (the gradient is derived here),
 * and parameters, told by the checkpoint. *out by om_free(cx). */
om_status om_cut_ort(om_ctx *cx, om_bytes onnx, const om_tensors *checkpoint, om_bytes *out);
#endif
