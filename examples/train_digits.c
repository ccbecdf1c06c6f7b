/* train_digits.c - trains a classifier of handwritten digits in C, from artifacts that Python has made.
 *
 *     train_digits MODEL.omd digits.u8 [--epochs N] [--rate X] [--above ACCURACY] [--save CHECKPOINT]
 *                  [--export FILE.onnx] [--threads N]
 *
 * MODEL.omd: model.save_for_device of a module that takes x: f32 (batch, 64) and labels: i64 (batch,) and returns the
 * loss and the scores (batch, 10); examples/digits.py makes one. The first 1500 images are for training, the others for
 * testing; what is left of a batch is dropped. Every run prints the same numbers.
 */
#define _POSIX_C_SOURCE 200809L
#include "ortmodule.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { PIXELS = 64, CLASSES = 10, TRAIN = 1500 };

static const char usage[] = "usage: train_digits MODEL.omd digits.u8 [--epochs N] [--rate X] [--above ACCURACY] "
                            "[--save CHECKPOINT] [--export FILE.onnx] [--threads N]\n";

static void fail(const char *what, const char *why) {
    fprintf(stderr, "train_digits: %s: %s\n", what, why);
    exit(2);
}

static void check(om_ctx *cx, const char *what, om_status s) {
    if (s != OM_OK) fail(what, om_ctx_message(cx));
}

typedef struct digits {
    int n;
    uint8_t *image, *label;
} digits;

static digits digits_read(const char *path) {
    digits d = {0};
    FILE *f = fopen(path, "rb");
    if (!f) fail(path, strerror(errno));
    if (fscanf(f, "digits %d", &d.n) != 1 || fgetc(f) != '\n' || d.n <= TRAIN || d.n > 1 << 20)
        fail(path, "is not examples/digits.u8");
    d.image = malloc((size_t)d.n * (PIXELS + 1));
    if (!d.image || fread(d.image, PIXELS + 1, (size_t)d.n, f) != (size_t)d.n) fail(path, "is too short");
    d.label = d.image + (size_t)d.n * PIXELS;
    fclose(f);
    return d;
}

/* Rows `row` of the set as one batch. */
static void batch_fill(const digits *d, const int *row, om_tensor *x, om_tensor *labels) {
    for (int64_t i = 0; i < x->dim[0]; i++) {
        for (int k = 0; k < PIXELS; k++)
            ((float *)x->data)[i * PIXELS + k] = (float)d->image[row[i] * PIXELS + k] / 16 - 0.5f;
        ((int64_t *)labels->data)[i] = d->label[row[i]];
    }
}

static om_tensor tensor_make(const om_io *io) {
    om_tensor t = {.dtype = io->dtype, .rank = io->rank, .device = -1};
    int64_t n = 1;
    for (int k = io->rank - 1; k >= 0; k--) t.dim[k] = io->dim[k], t.stride[k] = n, n *= io->dim[k];
    t.data = calloc((size_t)n + 1, 8);
    if (!t.data) fail("memory", "there is none left");
    return t;
}

static int rows_right(const om_tensor *scores, const om_tensor *labels) {
    int right = 0;
    for (int64_t i = 0; i < scores->dim[0]; i++) {
        const float *s = (const float *)scores->data + i * scores->stride[0];
        int best = 0;
        for (int k = 1; k < CLASSES; k++)
            if (s[k] > s[best]) best = k;
        right += best == ((const int64_t *)labels->data)[i];
    }
    return right;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    const char *file[2] = {0}, *save = NULL, *export = NULL;
    double epochs = 20, rate = 0, above = 0.95, threads = 0;
    int n_file = 0;
    for (int i = 1; i < argc; i++) {
        const struct {
            const char *name;
            double *number;
            const char **text;
        } options[] = {{"--epochs", &epochs, NULL},   {"--rate", &rate, NULL}, {"--above", &above, NULL},
                       {"--threads", &threads, NULL}, {"--save", NULL, &save}, {"--export", NULL, &export}};
        int k = 0;
        while (k < 6 && strcmp(argv[i], options[k].name) != 0) k++;
        if (k == 6 && (argv[i][0] == '-' || n_file == 2)) return fputs(usage, stderr), 2;
        if (k == 6)
            file[n_file++] = argv[i];
        else if (++i == argc)
            return fputs(usage, stderr), 2;
        else if (options[k].text)
            *options[k].text = argv[i];
        else
            *options[k].number = strtod(argv[i], NULL);
    }
    if (n_file != 2) return fputs(usage, stderr), 2;

    const digits d = digits_read(file[1]);
    om_ctx *cx = om_ctx_new(NULL);
    om_trainer *t;
    const om_trainer_options options = {.threads = (int)threads, .one_batch = true, .loss_only = true};
    if (!cx) fail("memory", "there is none left");
    check(cx, file[0], om_trainer_load_file(cx, file[0], &options, &t));
    if (om_trainer_inputs(t, false) != 2 || om_trainer_outputs(t, true) != 2)
        fail(file[0], "does not take x and labels, or does not give the loss and the scores");
    const om_io io[2] = {om_trainer_input(t, false, 0), om_trainer_input(t, false, 1)};
    const int64_t batch = io[0].dim[0];
    if (io[0].dtype != OM_F32 || io[0].rank != 2 || io[0].dim[1] != PIXELS || io[1].dtype != OM_I64 ||
        io[1].rank != 1 || batch < 1 || batch > d.n - TRAIN || batch > 4096)
        fail(file[0], "takes something else than x (f32, batch x 64) and labels (i64, batch)");
    om_tensor in[2] = {tensor_make(&io[0]), tensor_make(&io[1])}, out[2];
    if (rate > 0) check(cx, file[0], om_trainer_set_rate(t, rate));
    const om_trainer_bytes bytes = om_trainer_memory(t);
    printf("memory %zu bytes, of these parameters and moments %zu\n", bytes.arena, bytes.state);

    int order[TRAIN], steps = 0;
    uint64_t random = 1;
    double accuracy = 0, time = 0;
    for (int i = 0; i < TRAIN; i++) order[i] = i;
    for (int epoch = 0; epoch < (int)epochs; epoch++) {
        for (int i = TRAIN - 1; i > 0; i--) { /* Fisher-Yates */
            random = random * 6364136223846793005u + 1442695040888963407u;
            const int k = (int)((random >> 33) % (uint64_t)(i + 1)), swap = order[i];
            order[i] = order[k], order[k] = swap;
        }
        double sum = 0;
        int n = 0;
        for (int64_t at = 0; at + batch <= TRAIN; at += batch, n++) {
            float loss;
            batch_fill(&d, order + at, &in[0], &in[1]);
            const double begin = seconds();
            check(cx, "step", om_trainer_step(t, in, &loss, NULL));
            check(cx, "update", om_trainer_update(t));
            om_trainer_reset(t);
            time += seconds() - begin;
            sum += (double)loss;
            steps++;
        }
        int right = 0, tested = 0;
        for (int64_t at = TRAIN; at + batch <= d.n; at += batch, tested += (int)batch) {
            int row[4096];
            for (int64_t i = 0; i < batch; i++) row[i] = (int)(at + i);
            batch_fill(&d, row, &in[0], &in[1]);
            check(cx, "eval", om_trainer_eval(t, in, NULL, out));
            right += rows_right(&out[1], &in[1]);
        }
        accuracy = (double)right / tested;
        printf("epoch %d loss %.9g accuracy %.4f\n", epoch, sum / n, accuracy);
    }
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    fprintf(stderr, "%.1f microseconds a step; the process took %ld KiB at most\n", 1e6 * time / steps, use.ru_maxrss);
    if (save) check(cx, save, om_trainer_save(t, save, true));
    if (export) {
        const char *name = om_trainer_output(t, true, 1).name;
        char copy[256];
        snprintf(copy, sizeof copy, "%s", name);
        const char *names[] = {copy};
        check(cx, export, om_trainer_export(t, export, names, 1));
    }
    om_trainer_free(t);
    om_ctx_free(cx);
    free(in[0].data), free(in[1].data), free(d.image);
    if (accuracy > above) return 0;
    return fprintf(stderr, "train_digits: the accuracy came to %g, not above %g\n", accuracy, above), 1;
}
