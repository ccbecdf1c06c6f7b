/* tiles.c - one tile product, C (16 x 16 floats) += A (16 rows of 32 bf16) B (16 pairs of 16 columns), by
 * csrc/cpu/kernels/amx.h: emulated (om_tiles_emulated, in build/amx.so), and the processor's (om_tiles_native). */
#include <stdbool.h>

#include "cpu/kernels/amx.h"

#if defined(OM_AMX_EMULATED)
#define PRODUCT om_tiles_emulated
#else
#define PRODUCT om_tiles_native
#endif

void PRODUCT(const uint16_t *a, const uint16_t *b, float *c);

AMX void PRODUCT(const uint16_t *a, const uint16_t *b, float *c) {
    tiles_begin();
    tile_load(0, c, 64);
    tile_load(4, a, 64);
    tile_load(6, b, 64);
    tile_dpbf16(0, 4, 6);
    tile_store(0, c, 64);
    tiles_end();
}
