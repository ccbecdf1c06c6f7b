/* losses.c - trains an artifact on numbers from a counter and prints the losses, for comparing machines.
 *
 *     om-losses MODEL.omd STEPS [THREADS]
 */
#include "ortmodule.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 8, DIFFERENT = 4 };

static void check(om_ctx *cx, om_status s) {
    if (s == OM_OK) return;
    fprintf(stderr, "losses.c: %s\n", om_ctx_message(cx));
    exit(2);
}

static void inputs_fill(const om_trainer *t, om_tensor *x, int step) {
    uint64_t random = (uint64_t)(step % DIFFERENT) + 1;
    for (int i = 0; i < om_trainer_inputs(t, false); i++) {
        const om_io io = om_trainer_input(t, false, i);
        int64_t n = 1;
        for (int k = io.rank - 1; k >= 0; k--) x[i].dim[k] = io.dim[k], x[i].stride[k] = n, n *= io.dim[k];
        x[i].dtype = io.dtype, x[i].rank = io.rank, x[i].device = -1;
        if (!x[i].data && !(x[i].data = malloc((size_t)n * 8))) exit(2);
        for (int64_t k = 0; k < n; k++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            if (io.dtype == OM_F32)
                ((float *)x[i].data)[k] = (float)(random >> 40) / 8388608.0f - 1;
            else
                ((int64_t *)x[i].data)[k] = (int64_t)(random >> 33) % 5;
        }
    }
}

int main(int argc, char **argv) {
    om_ctx *cx = om_ctx_new(NULL);
    om_trainer *t;
    om_tensor x[MOST] = {0};
    float loss;
    if (argc < 3 || !cx) return 2;
    const om_trainer_options o = {.threads = argc > 3 ? atoi(argv[3]) : 0, .one_batch = true, .loss_only = true};
    check(cx, om_trainer_load_file(cx, argv[1], &o, &t));
    for (int i = 0; i < atoi(argv[2]); i++) {
        inputs_fill(t, x, i);
        check(cx, om_trainer_step(t, x, &loss, NULL));
        check(cx, om_trainer_update(t));
        om_trainer_reset(t);
        printf("%.9g\n", (double)loss);
    }
    om_trainer_free(t);
    om_ctx_free(cx);
    for (int i = 0; i < MOST; i++) free(x[i].data);
    return 0;
}
