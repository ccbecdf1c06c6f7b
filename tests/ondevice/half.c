/* half.c - a number for all that csrc/graph/half.h makes: every half to float, every 4099th float to half. */
#include "graph/half.h"

#include <stdio.h>

int main(void) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < 65536; i++) {
        const uint32_t quiet = (i & 0x7c00) == 0x7c00 && i & 0x3ff ? 0x400000 : 0; /* a signalling NaN may stay one */
        hash = (hash ^ (om_f32_bits(om_f16_to_f32((uint16_t)i)) | quiet)) * 0x100000001b3u;
    }
    for (uint64_t i = 0; i <= UINT32_MAX; i += 4099)
        hash = (hash ^ om_f32_to_f16(om_bits_f32((uint32_t)i))) * 0x100000001b3u;
    printf("%016llx\n", (unsigned long long)hash);
    return 0;
}
