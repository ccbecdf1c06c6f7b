/* cuda/image.c - the compiled kernels (fatbins of cubins, see the Makefile) as bytes of this object: the optimizers'
 * and one per .cu of the graph engine. Empty when they were built without nvcc. */
#include "cuda/driver.h"
#include "cuda/program.h"
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
    X(attention_grad) X(attention_mma) X(attention_mma_grad) X(attention_f32) X(attention_f32_grad)
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

/* --- what compiled chains include (program.h), as text ------------------------------------------------------- */

#define TEXT(symbol, file)                                                                          \
    __asm__(".pushsection .rodata\n.hidden " #symbol "\n.globl " #symbol "\n" #symbol ":\n"          \
            ".incbin \"csrc/" file "\"\n.byte 0\n.popsection\n");                                    \
    extern const char symbol[]
TEXT(om_text_compiled, "cuda/strip_compiled.h");
TEXT(om_text_element, "cuda/element.h");
TEXT(om_text_scalar, "cuda/scalar.h");
TEXT(om_text_params, "cuda/params.h");
TEXT(om_text_vmath, "cpu/kernels/vmath.h");
TEXT(om_text_pointwise, "graph/pointwise.def");

const om_gpu_text om_gpu_texts[OM_GPU_TEXTS] = {
    {"cuda/strip_compiled.h", om_text_compiled}, {"cuda/element.h", om_text_element},
    {"cuda/scalar.h", om_text_scalar},           {"cuda/params.h", om_text_params},
    {"cpu/kernels/vmath.h", om_text_vmath},      {"graph/pointwise.def", om_text_pointwise},
    /* C's own, as far as those need them: NVRTC has none */
    {"stdint.h", "typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;\n"
                 "typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;\n"
                 "typedef unsigned long uint64_t;\n#define INT32_MIN (-2147483647 - 1)\n"},
    {"math.h", "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fffffff)\n"},
    {"string.h", ""},
};
