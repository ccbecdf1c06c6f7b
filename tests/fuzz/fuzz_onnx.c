/* fuzz_onnx.c - libFuzzer target for everything that reads bytes from outside: ONNX files and graph text.
 *
 * Input that starts with "graph" is text, anything else an ONNX file. What is read must be a valid graph (om_verify),
 * stay one through the forward passes and the gradient builder, and print to text that parses back to the same text.
 * Every refusal must have a message. Memory is limited, so allocation failures are met too; all of it must be given
 * back. What om_onnx_write makes of a valid graph must be readable.
 */
#include "passes/passes.h"

enum { FUZZ_MEMORY = 512 << 20 };
#include "fuzz.h"

/* A step may fail for lack of memory or support, with a message; it may not find the graph broken. */
static bool fuzz_ok(om_ctx *cx, om_status s) {
    REQUIRE(s == cx->status);
    if (s == OM_OK) return true;
    REQUIRE(*om_ctx_message(cx));
    REQUIRE(s != OM_INTERNAL);
    om_ctx_clear(cx);
    return false;
}

static void fuzz_text(om_ctx *cx, const om_graph *g) {
    char *a = NULL, *b = NULL, *c = NULL;
    om_graph *h = NULL, *k = NULL;
    if (fuzz_ok(cx, om_graph_print(g, &a))) {
        om_status s = om_graph_parse(cx, a, &h);
        if (s == OM_OK) s = om_graph_print(h, &b);
        if (s == OM_OK) s = om_graph_parse(cx, b, &k);
        if (s == OM_OK) s = om_graph_print(k, &c);
        REQUIRE(s != OM_INVALID); /* what was printed parses */
        if (fuzz_ok(cx, s)) REQUIRE(!strcmp(b, c));
    }
    om_free(cx, a);
    om_free(cx, b);
    om_free(cx, c);
    om_graph_free(h);
    om_graph_free(k);
}

/* What is written can be read. */
static void fuzz_write(om_ctx *cx, const om_graph *g) {
    void *bytes;
    size_t size;
    om_graph *h = NULL;
    if (!fuzz_ok(cx, om_onnx_write(cx, g, &bytes, &size))) return;
    om_status s = om_onnx_read(cx, bytes, size, &h);
    REQUIRE(s != OM_INVALID);
    fuzz_ok(cx, s);
    om_free(cx, bytes);
    om_graph_free(h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    om_ctx *cx = om_ctx_new(&fuzz_services);
    om_graph *g = NULL, *joint = NULL;
    if (!cx) return 0;
    om_status s;
    if (size > 5 && !memcmp(data, "graph", 5)) {
        char *text = malloc(size + 1);
        if (!text) abort();
        memcpy(text, data, size);
        text[size] = 0;
        s = om_graph_parse(cx, text, &g);
        free(text);
    } else {
        s = om_onnx_read(cx, data, size, &g);
    }
    if (fuzz_ok(cx, s)) {
        s = om_verify(g);
        /* text can state wrong graphs: verify says so */
        bool text_may_be_wrong = size > 5 && !memcmp(data, "graph", 5) && s == OM_INTERNAL;
        if (text_may_be_wrong) om_ctx_clear(cx);
        else if (fuzz_ok(cx, s)) {
            fuzz_text(cx, g);
            fuzz_write(cx, g);
            if (fuzz_ok(cx, om_passes_run(cx, om_passes_forward, &g)) && fuzz_ok(cx, om_verify(g))) {
                uint8_t ones[256];
                memset(ones, 1, sizeof ones);
                if (g->inputs.n <= sizeof ones && g->outputs.n <= sizeof ones) {
                    s = om_grad_build(cx, g, ones, ones, &joint);
                    /* sizes that only the run can compare: the builder says so */
                    if (s == OM_INTERNAL) om_ctx_clear(cx);
                    else if (fuzz_ok(cx, s) && fuzz_ok(cx, om_verify(joint))) fuzz_text(cx, joint);
                }
            }
        }
    }
    om_graph_free(joint);
    om_graph_free(g);
    om_ctx_free(cx);
    if (fuzz_live) {
        fprintf(stderr, "%zu bytes leaked\n", fuzz_live);
        abort();
    }
    return 0;
}
