/* alloc_fail.c - everything the engine does to one graph, with an allocator that fails at its k-th call, k = 1, 2, ...
 * until nothing fails.
 *
 *     om-alloc FILE [once|after][:i/n] ... FILE: .onnx or graph text; `once` fails call k alone, `after` every call
 *                                          from k on; i/n: every n-th k, from the i-th
 *
 * Per k: read, print and parse, verify, write ONNX, model (all forward passes), variants (gradient, joint passes,
 * segments), plans for several sizes, forward and backward through all segments (om_run_*). What must hold: the failing step gives
 * OM_NOMEM with a message; every object made before still works or can be freed; the same step again, with memory,
 * succeeds and gives the bits of the run that never failed; nothing leaks.
 */
#include "passes/passes.h"
#include "run/plan.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_IO = 64, SHAPES = 3 };

static struct { long calls, fail, live; bool after; } mem;

static void *mem_alloc(void *user, size_t size) {
    (void)user;
    mem.calls++;
    if (mem.fail && (mem.after ? mem.calls >= mem.fail : mem.calls == mem.fail)) return NULL;
    mem.live++;
    return aligned_alloc(64, (size + 63) & ~(size_t)63);
}
static void mem_free(void *user, void *p, size_t size) {
    (void)user, (void)size;
    mem.live--;
    free(p);
}
static const om_services services = {.alloc = mem_alloc, .free = mem_free};

#define REQUIRE(cond)                                                                                            \
    do {                                                                                                         \
        if (!(cond)) {                                                                                           \
            fprintf(stderr, "alloc_fail.c:%d: %s does not hold; allocation %ld; message: %s\n", __LINE__, #cond, \
                    mem.fail, om_ctx_message(cx));                                                               \
            abort();                                                                                             \
        }                                                                                                        \
    } while (0)

/* Runs `expr`; when the failing allocation hits it, checks the error and runs it again with memory. */
#define STEP(expr)                                                            \
    do {                                                                      \
        om_status step_ = (expr);                                             \
        REQUIRE(step_ == cx->status);                                         \
        if (step_ != OM_OK) {                                                 \
            REQUIRE(step_ == OM_NOMEM && mem.fail && mem.calls >= mem.fail && \
                    strstr(om_ctx_message(cx), "out of memory"));             \
            om_ctx_clear(cx);                                                 \
            mem.fail = 0;                                                     \
            step_ = (expr);                                                   \
            REQUIRE(step_ == OM_OK);                                          \
        }                                                                     \
    } while (0)

static uint64_t hash_bytes(uint64_t h, const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char *)p)[i]) * 1099511628211u;
    return h;
}

static om_status graph_read(om_ctx *cx, const char *bytes, size_t size, bool onnx, om_graph **g) {
    return onnx ? om_onnx_read(cx, bytes, size, g) : om_graph_parse(cx, bytes, g);
}

/* Inputs of the w-th set of sizes, in plain memory; values depend on position alone. Integers stay in 0 .. 2: valid
 * indices of small graphs. */
static void inputs_make(const om_graph *g, int w, om_tensor *in) {
    int64_t sym[64];
    /* one size for all: symbols of a file may have to agree */
    for (uint32_t i = 0; i < g->syms.n && i < 64; i++) sym[i] = 3 + 2 * w;
    for (uint32_t i = 0; i < g->inputs.n; i++) {
        const om_type *t = om_ty(g, g->inputs.v[i]);
        in[i] = (om_tensor){.dtype = t->dtype, .rank = t->rank, .device = -1};
        for (int k = 0; k < t->rank; k++) in[i].dim[k] = om_dim_eval(g, t->dim[k], sym);
        om_dense_strides(&in[i]);
        int64_t n = om_numel(&in[i]);
        in[i].data = calloc((size_t)n + 8, om_dtype_size(t->dtype));
        for (int64_t k = 0; k < n; k++) {
            double x = (double)((k * 37 + i * 11) % 101 - 50) / 64;
            if (t->dtype == OM_F32) ((float *)in[i].data)[k] = (float)x;
            if (t->dtype == OM_F64) ((double *)in[i].data)[k] = x;
            if (t->dtype == OM_I64) ((int64_t *)in[i].data)[k] = k % 3;
            if (t->dtype == OM_BOOL) ((uint8_t *)in[i].data)[k] = 1;
        }
    }
}

static void *dense(const om_tensor *t, int i) { /* plain memory, filled for arriving gradients (i >= 0) */
    int64_t n = om_numel(t);
    char *p = aligned_alloc(64, ((size_t)n * om_dtype_size(t->dtype) + 127) & ~(size_t)63);
    for (int64_t k = 0; k < n && i >= 0; k++) {
        double x = (double)((k * 53 + i * 7) % 97 - 48) / 64;
        if (t->dtype == OM_F32) ((float *)(void *)p)[k] = (float)x;
        else if (t->dtype == OM_F64) ((double *)(void *)p)[k] = x;
    }
    return p;
}

static uint64_t hash_tensor(uint64_t h, const om_tensor *t) {
    return hash_bytes(h, t->data, (size_t)om_numel(t) * om_dtype_size(t->dtype));
}

/* What a host does with a forward: outputs (which it keeps), state. */
static om_status forward_take(om_run *r, int n_out, om_tensor *out, om_block **block, om_state **state,
                              om_block **arena) {
    OM_TRY(om_run_resume(r, 0));
    for (int i = 0; i < n_out; i++) OM_TRY(om_run_output(r, i, &out[i], &block[i]));
    return om_run_needs(r)->n_segments ? om_run_state(r, state, arena) : OM_OK;
}

static om_status backward_take(om_run *r, uint32_t n_in, uint64_t *hash) {
    const om_needs *needs = om_run_needs(r);
    for (int k = 0; k < needs->n_segments; k++) {
        OM_TRY(om_run_resume(r, k));
        for (uint32_t i = 0; i < n_in; i++) {
            om_tensor t;
            om_block *b;
            if (needs->grad_segment[i] != k) continue;
            OM_TRY(om_run_grad(r, (int)i, &t, &b));
            *hash = hash_tensor(*hash, &t);
            om_block_put(b);
        }
    }
    return OM_OK;
}

/* One forward and, segment by segment, its backward through ortmodule.h alone, which gives away the outputs it reads.
 * An execution that failed starts anew: kernels may have written half of it. */
static om_status step_run(om_ctx *cx, om_model *m, int variant, const uint8_t *arriving, const om_tensor *in,
                          uint32_t n_in, uint64_t *hash) {
    om_tensor mine[MAX_IO], out[MAX_IO], dy[MAX_IO] = {0};
    om_block *block[MAX_IO] = {0}, *arena = NULL;
    om_run *r = NULL;
    om_state *state = NULL;
    const int n_out = om_model_outputs(m);
    for (uint32_t i = 0; i < n_in; i++) {
        mine[i] = in[i];
        mine[i].data = memcpy(dense(&in[i], -1), in[i].data, (size_t)om_numel(&in[i]) * om_dtype_size(in[i].dtype));
    }
    *hash = 1469598103934665603u;
    om_status s = om_run_forward(cx, m, variant, mine, 5, true, &r);
    if (s == OM_OK) s = forward_take(r, n_out, out, block, &state, &arena);
    om_run_free(r);
    r = NULL;
    for (int i = 0; i < n_out && s == OM_OK; i++) *hash = hash_tensor(*hash, &out[i]);
    for (int i = 0; i < n_out && s == OM_OK && state; i++) {
        if (!arriving[i] || !om_is_float(out[i].dtype)) continue;
        dy[i] = out[i];
        for (int k = 0; k < dy[i].rank; k++) /* laid out backwards: it must be copied */
            dy[i].stride[k] = k ? dy[i].stride[k - 1] * dy[i].dim[k - 1] : 1;
        dy[i].data = dense(&dy[i], (int)n_in + i);
    }
    if (s == OM_OK && state)
        s = om_run_backward(cx, state, arena->data, arena->size, mine, out, dy, arriving, &r);
    if (s == OM_OK && state) s = backward_take(r, n_in, hash);
    om_run_free(r);
    om_state_free(state);
    om_block_put(arena);
    for (uint32_t i = 0; i < n_in && s == OM_OK; i++)
        if (om_model_input(m, (int)i).written) *hash = hash_tensor(*hash, &mine[i]);
    for (uint32_t i = 0; i < n_in; i++) free(mine[i].data);
    for (int i = 0; i < n_out; i++) om_block_put(block[i]), free(dy[i].data);
    return s;
}

/* om_model_from_graph takes the graph whatever happens: reading is part of the step. */
static om_status model_make(om_ctx *cx, const char *bytes, size_t size, bool onnx, om_model **m) {
    om_graph *g;
    *m = NULL;
    if (onnx) return om_model_load(cx, bytes, size, m);
    OM_TRY(om_graph_parse(cx, bytes, &g));
    return om_model_from_graph(cx, g, m);
}

/* Everything. False: no context could be made. */
static bool everything(const char *bytes, size_t size, bool onnx, uint64_t *hash) {
    om_ctx *cx = om_ctx_new(&services);
    if (!cx) return false;
    om_graph *g = NULL, *again = NULL;
    char *text = NULL, *second = NULL;
    void *file = NULL;
    size_t file_size = 0;
    *hash = 0;
    STEP(graph_read(cx, bytes, size, onnx, &g));
    STEP(om_verify(g));
    STEP(om_graph_print(g, &text));
    STEP(om_graph_parse(cx, text, &again));
    STEP(om_graph_print(again, &second));
    *hash = hash_bytes(*hash, second, strlen(second));
    om_text_free(cx, second);
    STEP(om_onnx_write(cx, g, &file, &file_size));
    *hash = hash_bytes(*hash, file, file_size);
    om_free(cx, file);
    om_text_free(cx, text);
    om_graph_free(again);
    STEP(om_passes_run(cx, om_passes_forward, &g)); /* replaces pass by pass: what is there after a failure is whole */
    STEP(om_verify(g));

    om_model *m = NULL;
    STEP(model_make(cx, bytes, size, onnx, &m));
    const om_graph *f = om_model_graph(m, -1);
    uint32_t n_in = f->inputs.n;
    REQUIRE(n_in <= MAX_IO && f->outputs.n <= MAX_IO && f->syms.n <= 64);
    uint8_t wanted[MAX_IO], none[MAX_IO] = {0}, arriving[MAX_IO];
    int group[MAX_IO];
    for (uint32_t i = 0; i < n_in; i++)
        wanted[i] = om_is_float(om_ty(f, f->inputs.v[i])->dtype), group[i] = (int)(n_in - i) % 3;
    memset(arriving, 1, sizeof arriving);
    for (int v = 0; v < 3; v++) { /* forward only, whole backward, three segments */
        int variant = -1;
        STEP(om_model_variant(cx, m, v ? wanted : none, v ? arriving : none, v == 2 ? group : NULL,
                              v == 2 ? OM_RECOMPUTE_LAYERS : OM_RECOMPUTE_CHEAP, &variant));
        REQUIRE(variant == v);
        for (int w = 0; w < SHAPES; w++) {
            om_tensor in[MAX_IO];
            om_plan *p = NULL, *same = NULL;
            uint64_t h;
            inputs_make(f, w, in);
            STEP(om_plan_get(cx, m, variant, in, &p));
            STEP(step_run(cx, m, variant, v ? arriving : none, in, n_in, &h));
            *hash = hash_bytes(*hash, &h, sizeof h);
            STEP(om_plan_get(cx, m, variant, in, &same));
            REQUIRE(p == same);
            om_plan_release(m, p);
            om_plan_release(m, same);
            for (uint32_t i = 0; i < n_in; i++) free(in[i].data);
        }
        text = NULL;
        STEP(om_model_text(cx, m, variant, &text));
        *hash = hash_bytes(*hash, text, strlen(text));
        om_text_free(cx, text);
    }
    for (int w = 0; w < SHAPES; w++) { /* less memory than a step can do with: all sets are looked at */
        om_tensor in[MAX_IO];
        om_fit fit;
        inputs_make(f, w, in);
        STEP(om_model_fit(cx, m, wanted, arriving, group, in, 1, 0, &fit));
        REQUIRE(fit.variant < 0 && fit.least > 1);
        const int64_t least = fit.least;
        STEP(om_model_fit(cx, m, wanted, arriving, group, in, least, 0, &fit));
        REQUIRE(fit.variant >= 0 && fit.memory.peak == least);
        *hash = hash_bytes(*hash, (char *)&least, sizeof least);
        for (uint32_t i = 0; i < n_in; i++) free(in[i].data);
    }
    om_model_free(cx, m);
    om_graph_free(g);
    om_ctx_free(cx);
    return true;
}

int main(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        FILE *f = fopen(argv[i], "rb");
        size_t len = strlen(argv[i]), cap = 1 << 24;
        char *bytes = malloc(cap + 1);
        if (!f || !bytes) return fprintf(stderr, "%s cannot be read\n", argv[i]), 1;
        size_t size = fread(bytes, 1, cap, f);
        bytes[size] = 0;
        fclose(f);
        bool onnx = len > 5 && !strcmp(argv[i] + len - 5, ".onnx");
        uint64_t right, hash;
        long first = 1, step = 1;
        const char *part = strchr(argv[i + 1], ':');
        if (part && (sscanf(part, ":%ld/%ld", &first, &step) != 2 || first < 1 || step < first))
            return fprintf(stderr, "%s: a part is i/n, with 1 <= i <= n\n", argv[i + 1]), 1;
        mem.fail = 0, mem.calls = 0, mem.after = !strncmp(argv[i + 1], "after", 5);
        if (!everything(bytes, size, onnx, &right) || mem.live)
            return fprintf(stderr, "%s: %ld blocks leak without any failure\n", argv[i], mem.live), 1;
        long n = mem.calls, failed = 0;
        for (long k = first; k <= n; k += step, failed++) {
            mem.fail = k, mem.calls = 0;
            bool made = everything(bytes, size, onnx, &hash);
            if (mem.live)
                return fprintf(stderr, "%s: allocation %ld failing leaks %ld blocks\n", argv[i], k, mem.live), 1;
            if (made && hash != right)
                return fprintf(stderr, "%s: allocation %ld failing changes the result\n", argv[i], k), 1;
        }
        printf("%s %s: %ld of %ld allocations failed\n", argv[i], argv[i + 1], failed, n);
        free(bytes);
    }
    return 0;
}
