/* inputs.h - inputs of a trainer's graph, of its own sizes, with numbers from a counter: f32 in [-1, 1), integers below
 * 5. The memory is taken at the first call; inputs_free gives it back. */
#ifndef OM_TEST_INPUTS_H
#define OM_TEST_INPUTS_H
#include "ortmodule.h"

#include <stdlib.h>

enum { MOST = 8 };

static void inputs_fill(const om_trainer *t, bool eval, om_tensor x[MOST], int step) {
    uint64_t random = (uint64_t)step + 1;
    for (int i = 0; i < om_trainer_inputs(t, eval); i++) {
        const om_io io = om_trainer_input(t, eval, i);
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

static void inputs_free(om_tensor x[MOST]) {
    for (int i = 0; i < MOST; i++) free(x[i].data);
}
#endif
