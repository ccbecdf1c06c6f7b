/* isa.c - which instruction set the kernels of this process use (kernels_isa.h). */
#include "cpu/kernels_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* --- instruction set --------------------------------------------------------------------------- */

#if defined(__x86_64__)
static bool cpu_has_f16c(void) { /* not every compiler's __builtin_cpu_supports knows the name */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static unsigned cpu_bf16(void) { /* what the processor multiplies bf16 with: OM_BF16_DOT, OM_BF16_AMX */
    unsigned has = 0;
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1) has |= OM_BF16_DOT;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1) has |= OM_BF16_AMX;
#endif
    return has;
}

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

/* -DOM_AMX_EMULATED (build/amx.so): kernels/amx.h computes what tiles would, on every machine. */
#if defined(OM_AMX_EMULATED)
enum { EMULATED = OM_BF16_AMX };
#else
enum { EMULATED = 0 };
#endif

unsigned om_isa_bf16(void) {
    enum { KNOWN = 1 << 8 };
    static unsigned bits;
    unsigned i = __atomic_load_n(&bits, __ATOMIC_RELAXED);
    if (!i) {
        const char *e = getenv("ORTMODULE_ISA");
        i = (om_isa() == OM_ISA_AVX512 ? cpu_bf16() : 0) | EMULATED;
        if (e && !strcmp(e, "avx512")) i = 0;
        if (e && !strcmp(e, "avx512_bf16")) i &= OM_BF16_DOT;
        __atomic_store_n(&bits, i |= KNOWN, __ATOMIC_RELAXED);
    }
    return i & (OM_BF16_DOT | OM_BF16_AMX);
}

static bool tiles_permitted(void) {
    if (EMULATED) return true;
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 }; /* asm/prctl.h, since Linux 5.16 */
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && /* AMX-TILE */
           syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

bool om_isa_tiles(void) { /* two threads may both ask: they are told the same */
    static int known;
    int k = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!k) __atomic_store_n(&known, k = om_isa_bf16() & OM_BF16_AMX && tiles_permitted() ? 2 : 1, __ATOMIC_RELAXED);
    return k == 2;
}

const char *om_isa_text(void) {
    static const char *const name[] = {"generic", "avx2", "avx512"};
    return name[om_isa()];
}
