/* isa.c - which instruction set the kernels of this process use (kernels_isa.h). */
#include "cpu/kernels_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* --- instruction set --------------------------------------------------------------------------- */

#if defined(__x86_64__)
static bool cpu_has_f16c(void) { /* not every compiler's __builtin_cpu_supports knows the name */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static int isa_detect(bool lower) {
    int best = OM_ISA_GENERIC;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c() &&
        __builtin_cpu_supports("bmi2"))
        best = OM_ISA_AVX2;
    if (best == OM_ISA_AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        best = OM_ISA_AVX512;
#endif
    const char *e = lower ? getenv("ORTMODULE_ISA") : NULL;
    if (e && !strcmp(e, "generic")) best = OM_ISA_GENERIC;
    if (e && !strcmp(e, "avx2") && best > OM_ISA_AVX2) best = OM_ISA_AVX2;
    return best;
}

#if defined(OM_ONE_ISA)
enum { generic = OM_ISA_GENERIC, avx2 = OM_ISA_AVX2, avx512 = OM_ISA_AVX512 };
int om_isa(void) { return OM_ONE_ISA; }
bool om_isa_runs(void) { return isa_detect(false) >= OM_ONE_ISA; }
#else
bool om_isa_runs(void) { return true; }
int om_isa(void) { /* two threads may both detect: they find the same */
    static int isa = -1;
    int i = __atomic_load_n(&isa, __ATOMIC_RELAXED);
    if (i < 0) __atomic_store_n(&isa, i = isa_detect(true), __ATOMIC_RELAXED);
    return i;
}
#endif

const char *om_isa_text(void) {
    static const char *const name[] = {"generic", "avx2", "avx512"};
    return name[om_isa()];
}
