/* losses.c - trains an artifact on numbers from a counter and prints the losses, for comparing machines.
 *
 *     om-losses MODEL.omd STEPS [THREADS]
 */
#include "inputs.h"

#include <stdio.h>

enum { DIFFERENT = 4 };

static void check(om_ctx *cx, om_status s) {
    if (s == OM_OK) return;
    fprintf(stderr, "losses.c: %s\n", om_ctx_message(cx));
    exit(2);
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
        inputs_fill(t, false, x, i % DIFFERENT);
        check(cx, om_trainer_step(t, x, &loss, NULL));
        check(cx, om_trainer_update(t));
        om_trainer_reset(t);
        printf("%.9g\n", (double)loss);
    }
    om_trainer_free(t);
    om_ctx_free(cx);
    inputs_free(x);
    return 0;
}
