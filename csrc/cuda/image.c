/* cuda/image.c - the compiled kernels (fatbins of cubins, see the Makefile) as bytes of this object: the optimizers'
 * and one per .cu of the graph engine. Empty when they were built without nvcc. */
#include "cuda/driver.h"
#include "cuda/queue.h"

#define IMAGE(symbol, file)                                            \
    __asm__(".pushsection .rodata\n"                                   \
            ".balign 64\n"                                             \
            ".hidden " #symbol "\n.globl " #symbol "\n" #symbol ":\n" \
            ".incbin \"" file "\"\n"                                   \
            "1:\n.balign 8\n"                                          \
            ".hidden " #symbol "_size\n.globl " #symbol "_size\n" #symbol "_size:\n" \
            ".quad 1b - " #symbol "\n"                                 \
            ".popsection\n")

IMAGE(om_cuda_image, OM_CUDA_DIR "/optim.fatbin");

const char om_cuda_archs[] = OM_CUDA_ARCHS;

#define FILES(X)                                                                                    \
    X(strip) X(strip64) X(move) X(reduce) X(rows) X(norm) X(loss) X(index) X(sort) X(gemm) X(each) X(lines)         \
    X(scatter) X(pool) X(batch_norm) X(conv) X(bounded) X(recurrent) X(ctc) X(update) X(attention) \
    X(attention_grad) X(attention_mma) X(attention_mma_grad)
#define X(name)                                                        \
    extern const char om_gpu_image_##name[];                           \
    extern const uint64_t om_gpu_image_##name##_size;                  \
    IMAGE(om_gpu_image_##name, OM_CUDA_DIR "/" #name ".fatbin");
FILES(X)
#undef X

const om_gpu_image om_gpu_images[] = {
#define X(name) {#name, om_gpu_image_##name, &om_gpu_image_##name##_size},
    FILES(X)
#undef X
    {0},
};
