/* program.h - strip programs compiled for the device by NVRTC, which comes with torch's CUDA builds.
 *
 * Lowering asks for the program of a text (strip_source.h) and keeps it with the launch. Programs that are wanted are
 * compiled together, one module for all, when the next slice begins; where that is not possible the interpreter runs
 * them, with the same bits, and om_cuda_program_reason says why. Modules are kept in a directory between processes, by
 * a hash of all that goes into them. A program lives as long as the process.
 */
#ifndef OM_CUDA_PROGRAM_H
#define OM_CUDA_PROGRAM_H

#include "cuda/queue.h"

typedef struct om_gpu_program om_gpu_program;

/* The program of the text of a struct NAME, of n bytes, for launches over so many elements. NULL: not compiled (turned
 * off, too few elements to pay, no NVRTC). */
const om_gpu_program *om_gpu_program_of(om_gpu *g, const char *text, size_t n, int64_t elements);
/* Compiles what is wanted; the context is current and its stream is not being captured. */
void om_gpu_programs_make(om_ctx *cx, om_gpu *g);
om_cu_function om_gpu_program_function(const om_gpu_program *p); /* NULL: there is none */

typedef int om_rtc_result;
typedef struct _nvrtcProgram *om_rtc_program;
#define OM_RTC_API(X)                                                                                           \
    X(version, nvrtcVersion, (int *, int *))                                                                    \
    X(create, nvrtcCreateProgram, (om_rtc_program *, const char *, const char *, int, const char *const *,      \
                                   const char *const *))                                                        \
    X(destroy, nvrtcDestroyProgram, (om_rtc_program *))                                                         \
    X(compile, nvrtcCompileProgram, (om_rtc_program, int, const char *const *))                                 \
    X(log_size, nvrtcGetProgramLogSize, (om_rtc_program, size_t *))                                             \
    X(log, nvrtcGetProgramLog, (om_rtc_program, char *))                                                        \
    X(cubin_size, nvrtcGetCUBINSize, (om_rtc_program, size_t *))                                                \
    X(cubin, nvrtcGetCUBIN, (om_rtc_program, char *))

/* Texts that programs include (image.c). */
typedef struct om_gpu_text { const char *name, *text; } om_gpu_text;
enum { OM_GPU_TEXTS = 9 };
extern const om_gpu_text om_gpu_texts[OM_GPU_TEXTS];
#endif
