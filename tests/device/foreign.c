/* foreign.c - is a device's memory the device's alone? The CPU's table over memory that the host may not touch.
 *
 *     om-foreign FILE ...      FILE: graph text
 *
 * The device `foreign` computes with the CPU's rows, but its blocks lie in pages that can be read and written only
 * while one of its own functions runs: whoever else looks into one, or writes, crashes. At every slice all addresses that its
 * calls are given (operands, results, scratch, constants, scalars) must lie in these pages. Each graph runs a forward
 * and a backward there and on the CPU; outputs, what was written back, and gradients must have the same bits. Sizes of
 * symbols: 3, also where they are the value of an input. Host nodes are answered with twice their first input, put where
 * it is wanted in a forward, in a block to be copied in a backward, and with nothing (zeros) when all is done again.
 */
#include "run/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { MAX_IO = 64, PAGE = 4096 };
static const size_t ROOM = (size_t)1 << 30; /* of addresses; a block is never handed out twice */

static struct { char *base; size_t used; int depth; long live, uploads, copies; } mem;

#define REQUIRE(cond)                                                                           \
    do {                                                                                        \
        if (!(cond)) {                                                                          \
            fprintf(stderr, "foreign.c:%d: %s does not hold; message: %s\n", __LINE__, #cond,   \
                    cx ? om_ctx_message(cx) : "");                                              \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)
#define CHECK(expr) REQUIRE((expr) == OM_OK)

/* Inside of device functions the pages are open. */
static void open_pages(void) {
    if (!mem.depth++ && mem.used) mprotect(mem.base, mem.used, PROT_READ | PROT_WRITE);
}
static void close_pages(void) {
    if (!--mem.depth && mem.used) mprotect(mem.base, mem.used, PROT_NONE);
}

static om_device foreign;

static om_block *foreign_get(om_ctx *cx, size_t size) {
    om_block *b = malloc(sizeof *b);
    size_t all = (size + PAGE) & ~(size_t)(PAGE - 1);
    REQUIRE(b && mem.used + all <= ROOM);
    *b = (om_block){.data = mem.base + mem.used, .size = size, .device = &foreign};
    mem.used += all;
    mem.live++;
    open_pages();
    memset(b->data, 0xff, all); /* undefined */
    close_pages();
    return b;
}
static void foreign_put(om_block *b) {
    madvise(b->data, (b->size + PAGE) & ~(size_t)(PAGE - 1), MADV_DONTNEED);
    mem.live--;
    free(b);
}
static bool is_foreign(const void *p) { return (const char *)p >= mem.base && (const char *)p < mem.base + mem.used; }

static om_status foreign_copy(om_ctx *cx, const om_tensor *src, om_tensor *dst) {
    REQUIRE(!om_numel(src) || (is_foreign(src->data) && is_foreign(dst->data)));
    mem.copies++;
    open_pages();
    om_status s = om_device_cpu.copy(cx, src, dst);
    close_pages();
    return s;
}
static om_status foreign_fill(om_ctx *cx, void *to, int byte, size_t size) {
    REQUIRE(is_foreign(to));
    open_pages();
    memset(to, byte, size);
    close_pages();
    return OM_OK;
}
static om_status foreign_upload(om_ctx *cx, void *to, const void *from, size_t size) {
    REQUIRE(!size || (is_foreign(to) && !is_foreign(from)));
    mem.uploads++;
    open_pages();
    memcpy(to, from, size);
    close_pages();
    return OM_OK;
}
static om_status foreign_download(om_ctx *cx, void *to, const void *from, size_t size) {
    REQUIRE(!size || (!is_foreign(to) && is_foreign(from)));
    open_pages();
    memcpy(to, from, size);
    close_pages();
    return OM_OK;
}
static om_status foreign_begin(om_ctx *cx, int workers) {
    open_pages();
    return om_device_cpu.begin(cx, workers);
}
static om_status foreign_end(om_ctx *cx, om_status s) {
    s = om_device_cpu.end(cx, s);
    close_pages();
    return s;
}
static om_status foreign_slice(om_run *r, int from, int to) {
    om_ctx *cx = r->cx;
    long copies = mem.copies;
    REQUIRE(mem.depth == 1 && is_foreign(r->scalars));
    for (int i = from; i < to; i++) {
        const om_call *c = &r->plan->calls[i];
        REQUIRE(c->kind != OM_CALL_HOST);
        copies += c->kind == OM_CALL_COPY;
        for (int k = 0; k < c->n_in + c->n_out; k++) {
            const om_tensor t = om_run_arg(r, c, k);
            REQUIRE(!t.dtype || !om_numel(&t) || is_foreign(t.data));
        }
        REQUIRE(c->count.storage == OM_NONE || r->plan->st[c->count.storage].where == OM_W_ARENA);
        REQUIRE(c->scratch == OM_NONE || is_foreign(r->arena + r->plan->st[c->scratch].offset));
    }
    om_status s = om_run_slice_rows(r, from, to);
    REQUIRE(s != OM_OK || mem.copies == copies); /* each by the device */
    return s;
}

/* --- one graph ---------------------------------------------------------------------------------- */

static size_t bytes_of(const om_tensor *t) { return (size_t)om_numel(t) * om_dtype_size(t->dtype); }

/* Dense values in the host's memory that depend on position alone; integers are 3, as every symbol's value is. */
static void *values(const om_tensor *t, int which) {
    char *p = calloc(1, bytes_of(t) + 64);
    for (int64_t k = 0; k < om_numel(t); k++) {
        double x = (double)((k * 53 + which * 7) % 97 - 48) / 64;
        if (t->dtype == OM_F32) ((float *)(void *)p)[k] = (float)x;
        else if (t->dtype == OM_F64) ((double *)(void *)p)[k] = x;
        else if (t->dtype == OM_I64) ((int64_t *)(void *)p)[k] = 3;
    }
    return p;
}

/* The tensor's memory is a new block of the device's, with these values. */
static om_block *given(om_ctx *cx, om_tensor *t, int which) {
    const om_device *d = cx->device;
    void *host = values(t, which);
    om_block *b = d->block_get(cx, bytes_of(t));
    REQUIRE(b);
    t->data = b->data;
    CHECK(d->upload(cx, b->data, host, bytes_of(t)));
    free(host);
    return b;
}

typedef struct results { char *bytes; size_t n; } results;

static void result_add(om_ctx *cx, results *to, const om_tensor *t) {
    REQUIRE(to->bytes = realloc(to->bytes, to->n + bytes_of(t) + 1));
    CHECK(cx->device->download(cx, to->bytes + to->n, t->data, bytes_of(t)));
    to->n += bytes_of(t);
}

/* The answer to a host node's stop: 2 x, computed in the host's memory. */
static void answer(om_ctx *cx, om_run *r, bool zeros) {
    const om_host_stop *stop = om_run_host(r);
    om_tensor out = stop->out[0], x = stop->in[0];
    REQUIRE(stop->n_in == 1 && stop->n_out == 1 && bytes_of(&x) == bytes_of(&out) && out.dtype == OM_F64);
    REQUIRE(om_is_dense(&x));
    double *v = calloc(1, bytes_of(&x) + 8);
    CHECK(cx->device->download(cx, v, x.data, bytes_of(&x)));
    for (int64_t k = 0; k < om_numel(&x); k++) v[k] *= 2;
    om_block *own = stop->backward ? cx->device->block_get(cx, bytes_of(&x)) : NULL;
    if (own) out.data = own->data;
    CHECK(cx->device->upload(cx, out.data, v, bytes_of(&x)));
    free(v);
    CHECK(om_run_answer(r, zeros ? &(om_tensor){0} : &out));
    om_block_put(own);
}

static void resume(om_ctx *cx, om_run *r, int segment, bool zeros) {
    om_status s;
    while ((s = om_run_resume(r, segment)) == OM_HOST) answer(cx, r, zeros);
    CHECK(s);
}

static results everything(const om_device *device, const char *text) {
    om_ctx *cx = om_ctx_new(NULL);
    om_graph *g;
    om_model *m;
    om_run *r;
    om_state *state;
    om_tensor in[MAX_IO], out[MAX_IO], dy[MAX_IO] = {0};
    om_block *block[3 * MAX_IO + 1], *b;
    uint8_t wanted[MAX_IO], arriving[MAX_IO];
    int64_t sym[64];
    int variant, n_block = 0, n_own = 0;
    void *own[MAX_IO]; /* host scalars */
    results res = {0};
    REQUIRE(cx);
    cx->device = device;
    CHECK(om_graph_parse(cx, text, &g));
    for (uint32_t i = 0; i < g->syms.n; i++) sym[i] = 3;
    REQUIRE(g->inputs.n <= MAX_IO && g->outputs.n <= MAX_IO && g->syms.n <= 64);
    for (uint32_t i = 0; i < g->inputs.n; i++) {
        CHECK(om_tensor_of(cx, g, g->inputs.v[i], sym, &in[i]));
        if (om_val(g, g->inputs.v[i])->host) in[i].data = values(&in[i], (int)i), own[n_own++] = in[i].data;
        else block[n_block++] = given(cx, &in[i], (int)i);
    }
    CHECK(om_model_from_graph(cx, g, &m));
    const int n_in = om_model_inputs(m), n_out = om_model_outputs(m);
    for (int i = 0; i < n_in; i++) wanted[i] = om_model_input(m, i).differentiable;
    for (int i = 0; i < n_out; i++) arriving[i] = om_model_output(m, i).differentiable;
    CHECK(om_model_variant(cx, m, wanted, arriving, NULL, OM_RECOMPUTE_CHEAP, &variant));

    for (int again = 0; again < 2; again++) { /* the second time with the plan of the first */
        CHECK(om_run_forward(cx, m, variant, in, 7, true, &r));
        resume(cx, r, 0, again);
        for (int i = 0; i < n_out; i++) CHECK(om_run_output(r, i, &out[i], &block[n_block + i]));
        CHECK(om_run_state(r, &state, &b));
        om_run_free(r);
        for (int i = 0; i < n_out; i++) result_add(cx, &res, &out[i]);
        om_block *dy_block[MAX_IO] = {0};
        for (int i = 0; i < n_out; i++) {
            if (!arriving[i]) continue;
            dy[i] = out[i];
            dy_block[i] = given(cx, &dy[i], 20 + i);
            if (dy[i].rank == 2 && dy[i].dim[0] == dy[i].dim[1]) dy[i].stride[0] = 1, dy[i].stride[1] = dy[i].dim[0];
        }
        CHECK(om_run_backward(cx, state, b->data, b->size, in, out, dy, NULL, &r));
        resume(cx, r, -1, again);
        for (int i = 0; i < n_in; i++) {
            om_tensor t;
            om_block *grad;
            if (om_run_needs(r)->grad_segment[i] < 0) continue;
            CHECK(om_run_grad(r, i, &t, &grad));
            result_add(cx, &res, &t);
            om_block_put(grad);
        }
        for (int i = 0; i < n_in; i++)
            if (om_model_input(m, i).written) result_add(cx, &res, &in[i]);
        om_run_free(r);
        om_state_free(state);
        om_block_put(b);
        for (int i = 0; i < n_out; i++) om_block_put(block[n_block + i]), om_block_put(dy_block[i]);
    }
    om_model_free(cx, m);
    for (int i = 0; i < n_block; i++) om_block_put(block[i]);
    for (int i = 0; i < n_own; i++) free(own[i]);
    om_ctx_free(cx);
    return res;
}

int main(int argc, char **argv) {
    om_ctx *cx = NULL;
    mem.base = mmap(NULL, ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(mem.base != MAP_FAILED);
    foreign = om_device_cpu;
    foreign.name = "foreign";
    foreign.host_memory = false;
    foreign.block_get = foreign_get;
    foreign.block_put = foreign_put;
    foreign.copy = foreign_copy;
    foreign.copy_prepare = NULL; /* copies of a plan by `copy`, too */
    foreign.copy_run = NULL;
    foreign.fill = foreign_fill;
    foreign.upload = foreign_upload;
    foreign.download = foreign_download;
    foreign.begin = foreign_begin;
    foreign.end = foreign_end;
    foreign.run_slice = foreign_slice;
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        char text[65536] = {0};
        REQUIRE(f && fread(text, 1, sizeof text - 1, f));
        fclose(f);
        results there = everything(&foreign, text), here = everything(&om_device_cpu, text);
        REQUIRE(!mem.live && !mem.depth);
        REQUIRE(there.n == here.n && there.n && !memcmp(there.bytes, here.bytes, here.n));
        printf("%s: %zu bytes of results, %ld uploads\n", argv[i], here.n, mem.uploads);
        mem.uploads = 0;
        free(there.bytes);
        free(here.bytes);
    }
    return 0;
}
