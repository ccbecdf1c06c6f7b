/* cuda/image.c - the compiled kernels (one fatbin of cubins, see the Makefile) as bytes of this object. Empty when it
 * was built without nvcc. */
#include "cuda/driver.h"

__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        ".hidden om_cuda_image\n.globl om_cuda_image\nom_cuda_image:\n"
        ".incbin \"" OM_CUDA_FATBIN "\"\n"
        "1:\n.balign 8\n"
        ".hidden om_cuda_image_size\n.globl om_cuda_image_size\nom_cuda_image_size:\n"
        ".quad 1b - om_cuda_image\n"
        ".popsection\n");

const char om_cuda_archs[] = OM_CUDA_ARCHS;
