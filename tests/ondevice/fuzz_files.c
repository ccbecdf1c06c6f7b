/* fuzz_files.c - libFuzzer target for what a device reads from outside: checkpoints, packed files, their parts.
 *
 *     OM_FUZZ_TRAINER=MODEL.omd fuzz_files ...      the trainer whose state must survive
 *
 * A checkpoint that is refused leaves every byte of the state as it was, with a message; one that is taken leaves a
 * trainer that takes a step. Of a packed file whose parts are read everything is used once. All memory is given back.
 */
#include "trainer/trainer.h"

enum { FUZZ_MEMORY = 256 << 20 };
#include "../fuzz/fuzz.h"

static om_ctx *cx;
static om_trainer *trainer; /* of OM_FUZZ_TRAINER */
static void *arena;

static uint64_t state_hash(void) {
    uint64_t h = 14695981039346656037u ^ (uint64_t)trainer->updates ^ (uint64_t)trainer->property.n << 32;
    h = (h ^ trainer->seed) * 1099511628211u ^ trainer->drawn;
    for (int i = 0; i < trainer->n_param; i++) {
        const om_tparam *p = &trainer->param[i];
        const om_tensor *const x[] = {&p->value, &p->m, &p->v};
        for (int k = 0; k < 3; k++) {
            if (!x[k]->dtype) continue;
            const unsigned char *b = x[k]->data;
            for (size_t n = (size_t)om_numel(x[k]) * om_dtype_size(x[k]->dtype); n--;) h = (h ^ *b++) * 1099511628211u;
        }
    }
    return h;
}

static void step(om_trainer *t) {
    om_tensor x[16] = {0};
    static int64_t zeros[1 << 16];
    if (om_trainer_inputs(t, false) > 16) return;
    for (int i = 0; i < om_trainer_inputs(t, false); i++) {
        const om_io io = om_trainer_input(t, false, i);
        x[i] = (om_tensor){.dtype = io.dtype, .rank = io.rank, .device = -1, .data = zeros};
        int64_t n = 1;
        for (int k = io.rank - 1; k >= 0; k--) {
            x[i].dim[k] = io.dim[k] < 0 ? 1 : io.dim[k];
            x[i].stride[k] = n;
            n *= x[i].dim[k];
            if (n > (1 << 16)) return;
        }
    }
    if (om_trainer_step(t, x, NULL, NULL) != OM_OK) REQUIRE(*om_ctx_message(cx));
    om_ctx_clear(cx);
    if (om_trainer_update(t) != OM_OK) REQUIRE(*om_ctx_message(cx));
    om_ctx_clear(cx);
    om_trainer_reset(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!cx) {
        const char *path = getenv("OM_FUZZ_TRAINER");
        cx = om_ctx_new(&fuzz_services);
        arena = aligned_alloc(64, FUZZ_MEMORY);
        const om_trainer_options o = {.arena = arena, .arena_size = FUZZ_MEMORY / 2};
        REQUIRE(path && om_trainer_load_file(cx, path, &o, &trainer) == OM_OK);
    }
    const uint64_t before = state_hash();
    om_status s = om_trainer_restore(trainer, (om_bytes){data, size});
    if (s != OM_OK) {
        REQUIRE(*om_ctx_message(cx) && s != OM_INTERNAL);
        om_ctx_clear(cx);
        REQUIRE(state_hash() == before);
    } else {
        step(trainer);
    }
    const om_trainer_files files = {.packed = {data, size}};
    const om_trainer_options own = {.arena = (char *)arena + FUZZ_MEMORY / 2, .arena_size = FUZZ_MEMORY / 2};
    const size_t lived = fuzz_live;
    om_trainer *t = NULL;
    s = om_trainer_load(cx, &files, &own, &t);
    if (s != OM_OK) {
        REQUIRE(!t && *om_ctx_message(cx) && s != OM_INTERNAL);
        om_ctx_clear(cx);
    } else {
        step(t);
        om_trainer_free(t);
    }
    REQUIRE(fuzz_live == lived);
    return 0;
}
