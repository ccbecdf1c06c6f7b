/* train_mlp.c - trains a network in C with ortmodule.h and nothing else.
 *
 *     train_mlp MODEL.onnx [--steps N] [--rate X] [--below LOSS]
 *
 * MODEL.onnx: a forward with its loss, as ORTModule writes it (DebugOptions(save_onnx=True)). Inputs x: f32 (batch,
 * features) and labels: i64 (batch,); parameters: f32; the first output is the loss. For example, in Python:
 *
 *     class Net(nn.Module):
 *         def __init__(self):
 *             super().__init__()
 *             self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
 *         def forward(self, x, labels):
 *             return nn.functional.cross_entropy(self.net(x), labels)
 *     model = ORTModule(Net(), DebugOptions(save_onnx=True, onnx_prefix="mlp", save_path="."))
 *     model(torch.zeros(64, 2), torch.zeros(64, dtype=torch.long)).backward()
 *
 * The data is a chessboard of four fields: label 1 where the signs of the first two features are equal. Data and
 * initial weights come from a counter, so that every run prints the same losses. Plain SGD: p -= rate * gradient.
 */
#include "ortmodule.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: train_mlp MODEL.onnx [--steps N] [--rate X] [--below LOSS]\n"
    "  MODEL.onnx    forward and loss as ORTModule saves them; inputs: x (f32, batch x features), labels (i64, batch)\n"
    "  --steps N     training steps (default 300)\n"
    "  --rate X      learning rate of plain SGD (default 0.5)\n"
    "  --below LOSS  what the loss of the last step must come to (default 0.2)\n"
    "Prints one line a step. Exit status: 0, 1 when the loss is not reached, 2 for wrong arguments or a wrong file.\n";

/* Says why and gives up. */
static void fail(const char *what, const char *why) {
    fprintf(stderr, "train_mlp: %s: %s\n", what, why);
    exit(2);
}

static void check(om_ctx *cx, const char *what, om_status s) {
    if (s == OM_HOST) fail(what, "the model has a part that only PyTorch can compute");
    if (s != OM_OK) fail(what, *om_ctx_message(cx) ? om_ctx_message(cx) : om_status_text(s));
}

static void *memory(size_t size) {
    void *p = calloc(1, size + 64);
    if (!p) fail("memory", "there is none left");
    return p;
}

static void *file_read(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    if (!f) fail(path, strerror(errno));
    char *bytes = NULL;
    size_t room = 0, n;
    *size = 0;
    do {
        if (*size == room && !(bytes = realloc(bytes, room = room ? 2 * room : 65536))) fail(path, "no memory for it");
        *size += n = fread(bytes + *size, 1, room - *size, f);
    } while (n);
    if (ferror(f)) fail(path, strerror(errno));
    fclose(f);
    return bytes;
}

/* splitmix64: a number in [-1, 1) with 24 bits, exact in a float */
static double uniform(uint64_t *counter) {
    uint64_t z = *counter += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 40) / 8388608.0 - 1.0;
}

static int64_t numel(const om_tensor *t) {
    int64_t n = 1;
    for (int k = 0; k < t->rank; k++) n *= t->dim[k];
    return n;
}

/* A tensor of an input's dtype and sizes, dense, zero. */
static om_tensor tensor_like(const char *path, const om_io *io) {
    om_tensor t = {.dtype = io->dtype, .rank = io->rank, .device = -1};
    int64_t n = 1;
    for (int k = io->rank - 1; k >= 0; k--) {
        if (io->dim[k] < 0) fail(path, "has sizes that are not numbers; save it before a second size is used");
        t.dim[k] = io->dim[k];
        t.stride[k] = n;
        n *= io->dim[k];
    }
    t.data = memory((size_t)n * 8);
    return t;
}

/* Weights: uniform within 1 / sqrt(inputs of a row), another sequence for each name; vectors begin with zeros. */
static void weights_fill(const om_io *io, om_tensor *t) {
    uint64_t counter = 14695981039346656037u; /* FNV-1a of the name */
    for (const char *c = io->name; *c; c++) counter = (counter ^ (unsigned char)*c) * 1099511628211u;
    if (t->rank < 2) return;
    const double bound = 1 / sqrt((double)t->dim[t->rank - 1]);
    for (int64_t i = 0; i < numel(t); i++) ((float *)t->data)[i] = (float)(uniform(&counter) * bound);
}

static void data_fill(om_tensor *x, om_tensor *labels) {
    const int64_t rows = x->dim[0], features = x->dim[1];
    uint64_t counter = 0;
    for (int64_t i = 0; i < rows * features; i++) ((float *)x->data)[i] = (float)uniform(&counter);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = (float *)x->data + i * features;
        ((int64_t *)labels->data)[i] = (row[0] < 0) == (row[1] < 0);
    }
}

typedef struct trainer {
    om_ctx *cx;
    om_model *model;
    int variant, n_in, n_out;
    om_tensor *in, *out, *dy; /* per graph input; per output: what the forward gave, its gradient */
    om_block **out_block;
    uint8_t *dropped;
    float rate;
} trainer;

/* One step; returns the loss before it. */
static float train(trainer *t) {
    om_run *run;
    om_state *state;
    om_block *arena, *block;
    om_tensor grad;

    check(t->cx, "forward", om_run_forward(t->cx, t->model, t->variant, t->in, 0, true, &run));
    check(t->cx, "forward", om_run_resume(run, 0));
    for (int i = 0; i < t->n_out; i++) check(t->cx, "output", om_run_output(run, i, &t->out[i], &t->out_block[i]));
    check(t->cx, "forward", om_run_state(run, &state, &arena));
    om_run_free(run);
    const float loss = *(float *)t->out[0].data;

    check(t->cx, "backward",
          om_run_backward(t->cx, state, arena->data, arena->size, t->in, t->out, t->dy, t->dropped, &run));
    const om_needs *needs = om_run_needs(run);
    check(t->cx, "backward", om_run_resume(run, -1)); /* all of it: weights may change from here on */
    for (int i = 0; i < t->n_in; i++) {
        if (needs->grad_segment[i] < 0) continue;
        check(t->cx, "gradient", om_run_grad(run, i, &grad, &block)); /* dense, as the weights are */
        float *w = t->in[i].data, *g = grad.data;
        for (int64_t k = 0; k < numel(&grad); k++) w[k] -= t->rate * g[k];
        om_block_put(block);
    }
    om_run_free(run);
    om_state_free(state);
    om_block_put(arena);
    for (int i = 0; i < t->n_out; i++) om_block_put(t->out_block[i]);
    return loss;
}

static void trainer_make(trainer *t, const char *path) {
    size_t size;
    void *bytes = file_read(path, &size);
    check(t->cx, path, om_model_load(t->cx, bytes, size, &t->model));
    free(bytes);
    t->n_in = om_model_inputs(t->model), t->n_out = om_model_outputs(t->model);
    t->in = memory((size_t)t->n_in * sizeof *t->in);
    t->out = memory((size_t)t->n_out * sizeof *t->out);
    t->dy = memory((size_t)t->n_out * sizeof *t->dy);
    t->out_block = memory((size_t)t->n_out * sizeof *t->out_block);
    t->dropped = memory((size_t)t->n_out);
    uint8_t *wanted = memory((size_t)t->n_in), *arriving = memory((size_t)t->n_out);
    om_tensor *x = NULL, *labels = NULL;
    for (int i = 0; i < t->n_in; i++) {
        const om_io io = om_model_input(t->model, i);
        t->in[i] = tensor_like(path, &io);
        wanted[i] = io.role == OM_PARAM && io.differentiable;
        if (io.role == OM_PARAM && io.dtype != OM_F32) fail(io.name, "is a parameter of another type than f32");
        if (io.role == OM_PARAM) weights_fill(&io, &t->in[i]);
        else if (io.role == OM_INPUT && io.dtype == OM_F32 && io.rank == 2 && io.dim[1] >= 2 && !x) x = &t->in[i];
        else if (io.role == OM_INPUT && io.dtype == OM_I64 && io.rank == 1 && !labels) labels = &t->in[i];
        else fail(path, "takes something else than x (f32, batch x features) and labels (i64, batch)");
    }
    if (!x || !labels || x->dim[0] != labels->dim[0])
        fail(path, "does not take x (f32, batch x features) and labels (i64, batch) of one batch");
    const om_io loss = t->n_out ? om_model_output(t->model, 0) : (om_io){0};
    if (loss.dtype != OM_F32 || loss.rank || !loss.differentiable)
        fail(path, "has no loss: its first output must be one f32 number, computed from the parameters");
    data_fill(x, labels);
    t->dy[0] = (om_tensor){.dtype = OM_F32, .device = -1, .data = memory(sizeof(float))};
    *(float *)t->dy[0].data = 1;
    arriving[0] = 1;
    memset(t->dropped, 1, (size_t)t->n_out); /* nobody reads an output after the backward has begun */
    check(t->cx, path, om_model_variant(t->cx, t->model, wanted, arriving, NULL, OM_RECOMPUTE_CHEAP, &t->variant));
    if (!om_model_needs(t->model, t->variant)->n_segments) fail(path, "has no parameter to train");
    free(wanted);
    free(arriving);
}

static void trainer_free(trainer *t) {
    for (int i = 0; i < t->n_in; i++) free(t->in[i].data);
    free(t->dy[0].data);
    free(t->in), free(t->out), free(t->dy), free(t->out_block), free(t->dropped);
    om_model_free(t->cx, t->model);
    om_ctx_free(t->cx);
}

int main(int argc, char **argv) {
    const char *path = NULL;
    double steps = 300, rate = 0.5, below = 0.2;
    const struct { const char *name; double *value, least; } options[] = {
        {"--steps", &steps, 1}, {"--rate", &rate, 0}, {"--below", &below, 0}};
    for (int i = 1; i < argc; i++) {
        bool known = false;
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return fputs(usage, stdout), 0;
        for (int k = 0; k < 3 && !known; k++) {
            if (strcmp(argv[i], options[k].name) != 0) continue;
            char *end = NULL;
            if (i + 1 < argc) *options[k].value = strtod(argv[i + 1], &end);
            if (!end || *end || end == argv[i + 1] || !(*options[k].value >= options[k].least))
                fail(options[k].name, "a number must follow");
            known = true;
            i++;
        }
        if (known) continue;
        if (argv[i][0] == '-' || path) return fprintf(stderr, "train_mlp: %s is not understood\n%s", argv[i], usage), 2;
        path = argv[i];
    }
    if (!path) return fputs(usage, stderr), 2;

    trainer t = {.cx = om_ctx_new(NULL), .rate = (float)rate};
    if (!t.cx) fail("memory", "there is none left");
    trainer_make(&t, path);
    float loss = 0;
    for (int i = 0; i < (int)steps; i++) printf("step %d loss %.9g\n", i, (double)(loss = train(&t)));
    trainer_free(&t);
    if (loss < below) return 0;
    return fprintf(stderr, "train_mlp: the loss came to %g, not below %g\n", (double)loss, below), 1;
}
