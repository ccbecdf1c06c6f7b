/* kernels_isa.h - how one kernel source becomes one object per instruction set.
 *
 * A file csrc/kernels/NAME.k.c is compiled by the Makefile once per ISA with -DOM_ISA=<isa> and that ISA's -march.
 * It exports exactly one symbol: a const table of function pointers, named OM_ISA_NAME(om_NAME). Everything else in it
 * is static. The rest of the engine reaches it through OM_PICK(om_NAME), chosen once by CPU features. Only pointers
 * cross the border: no vector type in a signature, no target_clones (measured: silently wrong numbers), -Werror=psabi.
 *
 *   isa       -march          OM_VBYTES   notes
 *   generic   (compiler's)    16          every machine; the reference
 *   avx2      x86-64-v3       32          FMA, F16C
 *   avx512    x86-64-v4       64
 */
#ifndef OM_KERNELS_ISA_H
#define OM_KERNELS_ISA_H

#include <stdbool.h>
#include <stdint.h>

#define OM_ISA_CAT_(a, b) a##_##b
#define OM_ISA_CAT(a, b) OM_ISA_CAT_(a, b)
#define OM_ISA_NAME(name) OM_ISA_CAT(name, OM_ISA)

/* make device OPS=...: whether these files have an element type; what is there for an operator, or nothing
 * (tools/om_ops.c writes the header) */
#if defined(OM_ONLY)
#include <only.h>
#pragma GCC diagnostic ignored "-Wunused-function"
#define OM_KEPT(TYPE) OM_KEEP_TYPE_##TYPE
#define OM_KEPT_OP(op, ...) OM_KEEP_##op(__VA_ARGS__)
#else
#define OM_KEPT(TYPE) 1
#define OM_KEPT_OP(op, ...) __VA_ARGS__
#endif

#if defined(__AVX512F__)
#define OM_VBYTES 64
#elif defined(__AVX2__)
#define OM_VBYTES 32
#else
#define OM_VBYTES 16
#endif

enum { OM_ISA_GENERIC, OM_ISA_AVX2, OM_ISA_AVX512, OM_N_ISA };
int om_isa(void);              /* best this CPU has; ORTMODULE_ISA=generic|avx2|avx512 lowers it */
/* What the processor has beyond AVX-512 to multiply bf16: bits. ORTMODULE_ISA=avx512 takes away both, =avx512_bf16 the
 * second. */
enum { OM_BF16_DOT = 1 /* AVX512_BF16 */, OM_BF16_AMX = 2 };
unsigned om_isa_bf16(void);
/* May this process use tiles? The first call asks the system, for all threads: one whose signal stack is too small for
 * the larger state makes it refuse, and none can be made that small from then on. */
bool om_isa_tiles(void);
bool om_isa_runs(void);        /* can this CPU run the kernels of this build? */
const char *om_isa_text(void);

/* A build for one instruction set (make device) has no choice to make: -DOM_ONE_ISA=<isa>. */
/* In a .c file:  OM_DECLARE_ISA(struct gemm_kernels, om_gemm);  ...  OM_PICK(om_gemm)->f32(...) */
#if defined(OM_ONE_ISA)
#define OM_DECLARE_ISA(type, name) extern const type OM_ISA_CAT(name, OM_ONE_ISA)
#define OM_PICK(name) (&OM_ISA_CAT(name, OM_ONE_ISA))
#elif defined(__x86_64__)
#define OM_DECLARE_ISA(type, name) extern const type name##_generic, name##_avx2, name##_avx512
#define OM_PICK(name) \
    (om_isa() == OM_ISA_AVX512 ? &name##_avx512 : om_isa() == OM_ISA_AVX2 ? &name##_avx2 : &name##_generic)
#else
#define OM_DECLARE_ISA(type, name) extern const type name##_generic
#define OM_PICK(name) (&name##_generic)
#endif
#endif
