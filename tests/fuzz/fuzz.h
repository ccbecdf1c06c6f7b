/* fuzz.h - what fuzz targets share: memory that is limited and counted, and a check that tells its line. A file that
 * includes it defines FUZZ_MEMORY, in bytes, before. */
#ifndef OM_FUZZ_H
#define OM_FUZZ_H
#include "ortmodule.h"

#include <stdio.h>
#include <stdlib.h>

/* in a scope that has om_ctx *cx */
#define REQUIRE(cond)                                                                                          \
    do {                                                                                                       \
        if (!(cond)) {                                                                                         \
            fprintf(stderr, "%s:%d: %s failed; message: %s\n", __FILE__, __LINE__, #cond, om_ctx_message(cx)); \
            abort();                                                                                           \
        }                                                                                                      \
    } while (0)

static size_t fuzz_live; /* bytes given and not given back */

static void *fuzz_alloc(void *user, size_t size) {
    (void)user;
    if (size > FUZZ_MEMORY || fuzz_live + size > FUZZ_MEMORY) return NULL;
    void *p = aligned_alloc(64, (size + 63) & ~(size_t)63);
    if (p) fuzz_live += size;
    return p;
}
static void fuzz_free(void *user, void *p, size_t size) {
    (void)user;
    fuzz_live -= size;
    free(p);
}
static const om_services fuzz_services = {.alloc = fuzz_alloc, .free = fuzz_free};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#endif
