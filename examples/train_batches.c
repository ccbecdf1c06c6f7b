/* train_batches.c - goes on with a training that Python began, on batches that lie in a file.
 *
 *     train_batches MODEL.omd TRAIN.bin [--epochs N] [--test TEST.bin] [--scores SCORES.bin] [--save CHECKPOINT]
 *                   [--threads N]
 *
 * MODEL.omd: model.save_for_device. TRAIN.bin, TEST.bin: batches without a head; each is the graph's inputs one after the
 * other, dense. SCORES.bin: what the evaluation graph gives behind its loss for every batch of TEST.bin, f32.
 * examples/minilm_lora.py makes these files and reads what this program writes.
 */
#define _POSIX_C_SOURCE 200809L
#include "ortmodule.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { MOST = 8 };

static const char usage[] = "usage: train_batches MODEL.omd TRAIN.bin [--epochs N] [--test TEST.bin] "
                            "[--scores SCORES.bin] [--save CHECKPOINT] [--threads N]\n";

static void fail(const char *what, const char *why) {
    fprintf(stderr, "train_batches: %s: %s\n", what, why);
    exit(2);
}

static void check(om_ctx *cx, const char *what, om_status s) {
    if (s != OM_OK) fail(what, om_ctx_message(cx));
}

static size_t element_size(int dtype) {
    static const size_t size[] = {0, 4, 8, 2, 2, 8, 4, 2, 1, 1, 1}; /* om_dtype */
    return size[dtype];
}

typedef struct batch {
    int n;
    om_tensor x[MOST];
    size_t size[MOST];
} batch;

static batch batch_make(const om_trainer *t, bool eval) {
    batch b = {.n = om_trainer_inputs(t, eval)};
    if (b.n > MOST) fail("inputs", "there are more than 8");
    for (int i = 0; i < b.n; i++) {
        const om_io io = om_trainer_input(t, eval, i);
        om_tensor *x = &b.x[i];
        *x = (om_tensor){.dtype = io.dtype, .rank = io.rank, .device = -1};
        int64_t n = 1;
        for (int k = io.rank - 1; k >= 0; k--) {
            if (io.dim[k] < 0) fail(io.name, "has sizes that only a call tells");
            x->dim[k] = io.dim[k], x->stride[k] = n, n *= io.dim[k];
        }
        b.size[i] = (size_t)n * element_size(io.dtype);
        if (!(x->data = malloc(b.size[i] + 1))) fail("memory", "there is none left");
    }
    return b;
}

static bool batch_read(batch *b, FILE *f) { /* false: at the end */
    for (int i = 0; i < b->n; i++) {
        const size_t n = fread(b->x[i].data, 1, b->size[i], f);
        if (!n && !i && feof(f)) return false;
        if (n != b->size[i]) fail("batches", "the file ends inside of one: it is not for this model");
    }
    return true;
}

static void batch_free(batch *b) {
    for (int i = 0; i < b->n; i++) free(b->x[i].data);
}

static FILE *file_open(const char *path, const char *mode) {
    FILE *f = fopen(path, mode);
    if (!f) fail(path, strerror(errno));
    return f;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The most memory this process has had. getrusage would count what it was before exec. */
static long peak_kib(void) {
    struct rusage use;
    char line[128];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "VmHWM: %ld", &kib) != 1) continue;
    if (f) fclose(f);
    getrusage(RUSAGE_SELF, &use);
    return kib ? kib : use.ru_maxrss;
}

/* Mean loss; outputs behind the first are written to `scores`, when there is one. */
static double evaluate(om_ctx *cx, om_trainer *t, const char *path, const char *scores) {
    batch b = batch_make(t, true);
    FILE *f = file_open(path, "rb"), *to = scores ? file_open(scores, "wb") : NULL;
    om_tensor out[MOST];
    double sum = 0;
    int n = 0;
    if (om_trainer_outputs(t, true) > MOST) fail("outputs", "there are more than 8");
    for (; batch_read(&b, f); n++) {
        float loss;
        check(cx, "eval", om_trainer_eval(t, b.x, &loss, out));
        sum += (double)loss;
        for (int i = 1; to && i < om_trainer_outputs(t, true); i++) {
            int64_t elements = 1, dense = 1;
            for (int k = out[i].rank - 1; k >= 0; k--) dense &= out[i].stride[k] == elements, elements *= out[i].dim[k];
            if (out[i].dtype != OM_F32 || !dense) fail(scores, "only dense f32 outputs are written");
            if (fwrite(out[i].data, 4, (size_t)elements, to) != (size_t)elements) fail(scores, strerror(errno));
        }
    }
    fclose(f);
    if (to && fclose(to)) fail(scores, strerror(errno));
    batch_free(&b);
    return n ? sum / n : 0;
}

int main(int argc, char **argv) {
    const char *file[2] = {0}, *test = NULL, *scores = NULL, *save = NULL;
    double epochs = 1, threads = 0;
    int n_file = 0;
    for (int i = 1; i < argc; i++) {
        const struct {
            const char *name;
            double *number;
            const char **text;
        } options[] = {{"--epochs", &epochs, NULL}, {"--threads", &threads, NULL}, {"--test", NULL, &test},
                       {"--scores", NULL, &scores}, {"--save", NULL, &save}};
        int k = 0;
        while (k < 5 && strcmp(argv[i], options[k].name) != 0) k++;
        if (k == 5 && (argv[i][0] == '-' || n_file == 2)) return fputs(usage, stderr), 2;
        if (k == 5)
            file[n_file++] = argv[i];
        else if (++i == argc)
            return fputs(usage, stderr), 2;
        else if (options[k].text)
            *options[k].text = argv[i];
        else
            *options[k].number = strtod(argv[i], NULL);
    }
    if (n_file != 2) return fputs(usage, stderr), 2;

    om_ctx *cx = om_ctx_new(NULL);
    om_trainer *t;
    const om_trainer_options options = {.threads = (int)threads, .one_batch = true, .loss_only = true};
    if (!cx) fail("memory", "there is none left");
    check(cx, file[0], om_trainer_load_file(cx, file[0], &options, &t));
    const om_trainer_bytes bytes = om_trainer_memory(t);
    printf("memory %zu bytes, of these parameters and moments %zu; %lld updates so far\n", bytes.arena, bytes.state,
           (long long)om_trainer_updates(t));
    batch b = batch_make(t, false);
    double time = 0;
    int steps = 0;
    for (int epoch = 0; epoch < (int)epochs; epoch++) {
        FILE *f = file_open(file[1], "rb");
        double sum = 0;
        int n = 0;
        for (; batch_read(&b, f); n++) {
            float loss;
            const double begin = seconds();
            check(cx, "step", om_trainer_step(t, b.x, &loss, NULL));
            check(cx, "update", om_trainer_update(t));
            om_trainer_reset(t);
            time += seconds() - begin;
            sum += (double)loss;
        }
        steps += n;
        fclose(f);
        printf("epoch %d loss %.9g\n", epoch, n ? sum / n : 0);
    }
    if (test) printf("test loss %.9g\n", evaluate(cx, t, test, scores));
    if (save) check(cx, save, om_trainer_save(t, save, true));
    fprintf(stderr, "%.3f milliseconds a step; the process took %ld KiB at most\n", steps ? 1e3 * time / steps : 0,
            peak_kib());
    batch_free(&b);
    om_trainer_free(t);
    om_ctx_free(cx);
    return 0;
}
