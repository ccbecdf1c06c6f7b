/* program.c - see program.h. */
#include "cuda/program.h"
#include "cuda/device.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST = 1024 /* programs of a device */, PAYS = 1 << 15 /* elements */, PLACES = 4096 };

struct om_gpu_program {
    struct om_gpu_program *next;
    uint64_t hash;                     /* of the text; its name in the module */
    size_t n;
    _Atomic(om_cu_function) function;
    bool wanted;
    char text[];
};

static struct { om_gpu_program *first, **end; int n; _Atomic int wanted; } tables[OM_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of tables, settings, reason */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int when = OM_PROGRAMS_NEVER;
static char library[PLACES], cache[PLACES], reason[512];
static atomic_long counts[3];

#define X(field, name, params) om_rtc_result (*field) params;
static struct { OM_RTC_API(X) } api;
#undef X

void om_cuda_programs(int new_when, const char *new_library, const char *new_cache) {
    pthread_mutex_lock(&lock);
    snprintf(library, sizeof library, "%s", new_library);
    snprintf(cache, sizeof cache, "%s", new_cache);
    atomic_store(&when, new_when);
    pthread_mutex_unlock(&lock);
}

long om_cuda_program_count(int what) { return atomic_load(&counts[what]); }

const char *om_cuda_program_reason(void) {
    static _Thread_local char text[sizeof reason];
    pthread_mutex_lock(&lock);
    memcpy(text, reason, sizeof text);
    pthread_mutex_unlock(&lock);
    return *text ? text : NULL;
}

__attribute__((format(printf, 1, 2))) static void because(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&lock);
    if (!*reason) vsnprintf(reason, sizeof reason, fmt, args);
    pthread_mutex_unlock(&lock);
    va_end(args);
}

static uint64_t hash_of(uint64_t h, const char *p, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)p[i]) * 1099511628211u;
    return h;
}
static const uint64_t NOTHING = 14695981039346656037u;

/* --- what is wanted ------------------------------------------------------------------------------------- */

const om_gpu_program *om_gpu_program_of(om_gpu *g, const char *text, size_t n, int64_t elements) {
    const int now = atomic_load(&when), device = om_gpu_ordinal(g);
    const bool pays = now != OM_PROGRAMS_PAY || elements >= PAYS; /* else only what another chain has had compiled */
    if (now == OM_PROGRAMS_NEVER || !n) return NULL;
    const uint64_t hash = hash_of(NOTHING, text, n);
    pthread_mutex_lock(&lock);
    if (!tables[device].end) tables[device].end = &tables[device].first;
    om_gpu_program *p = tables[device].first;
    while (p && (p->hash != hash || p->n != n || memcmp(p->text, text, n))) p = p->next;
    if (!p && pays && tables[device].n < MOST && (p = malloc(sizeof *p + n + 1))) {
        *p = (om_gpu_program){.hash = hash, .n = n, .wanted = true};
        memcpy(p->text, text, n + 1);
        *tables[device].end = p;
        tables[device].end = &p->next;
        tables[device].n++;
        atomic_fetch_add(&tables[device].wanted, 1);
    }
    pthread_mutex_unlock(&lock);
    return p;
}

om_cu_function om_gpu_program_function(const om_gpu_program *p) {
    return p ? atomic_load_explicit(&p->function, memory_order_acquire) : NULL;
}

/* --- NVRTC ------------------------------------------------------------------------------------------------ */

/* A setting, as it is now. */
static const char *setting_copy(char *to, const char *from) {
    pthread_mutex_lock(&lock);
    memcpy(to, from, PLACES);
    pthread_mutex_unlock(&lock);
    return to;
}

static bool rtc_open(void) {
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"};
    static bool looked, there;
    void *lib = NULL;
    if (looked) return there;
    looked = true;
    for (int i = 0; i < 3 && !lib; i++) lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    char place[PLACES];
    if (!lib && *setting_copy(place, library)) lib = dlopen(place, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; i < 3 && !lib; i++) lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!lib) return because("there is no libnvrtc.so (it comes with PyTorch's CUDA builds)"), false;
    const char *missing = NULL;
#define X(field, name, params)                                      \
    *(void **)&api.field = dlsym(lib, #name);                       \
    if (!api.field) missing = #name;
    OM_RTC_API(X)
#undef X
    if (missing) because("libnvrtc.so has no %s", missing);
    return there = !missing;
}

typedef struct source { char *text; size_t n; int programs; om_gpu_program *program[MOST]; } source;

static bool source_add(source *s, const char *text, size_t n) {
    char *more = realloc(s->text, s->n + n + 1);
    if (!more) return false;
    memcpy(more + s->n, text, n);
    s->text = more, s->n += n;
    return more[s->n] = 0, true;
}

/* All that is wanted of a device, which then is no longer. */
static bool source_make(int device, source *s) {
    static const char head[] = "#include \"cuda/strip_compiled.h\"\n";
    char before[64], behind[64];
    bool whole = source_add(s, head, sizeof head - 1);
    for (om_gpu_program *p = tables[device].first; p; p = p->next) {
        if (!p->wanted) continue;
        p->wanted = false;
        s->program[s->programs++] = p;
        const unsigned long long h = p->hash;
        const int a = snprintf(before, sizeof before, "#define NAME s_%016llx\n", h),
                  b = snprintf(behind, sizeof behind, "#undef NAME\nSTRIP_KERNEL(s_%016llx)\n", h);
        whole = whole && source_add(s, before, (size_t)a) && source_add(s, p->text, p->n) &&
                source_add(s, behind, (size_t)b);
    }
    atomic_store(&tables[device].wanted, 0);
    return whole;
}

/* --- modules of earlier processes ------------------------------------------------------------------------- */

typedef struct kept { char magic[8]; uint64_t size, hash; } kept; /* then the module */
static const char MAGIC[8] = "omstrip";

static void *kept_read(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    kept k;
    char *bytes = NULL;
    if (fread(&k, sizeof k, 1, f) == 1 && !memcmp(k.magic, MAGIC, sizeof k.magic) && k.size && k.size < 1u << 30 &&
        (bytes = malloc(k.size)) &&
        (fread(bytes, 1, k.size, f) != k.size || hash_of(NOTHING, bytes, k.size) != k.hash)) {
        free(bytes);
        bytes = NULL;
    }
    fclose(f);
    if (bytes) *size = k.size;
    return bytes;
}

/* Whole or not at all; a directory that cannot be written is no fault. */
static void kept_write(const char *path, const void *bytes, size_t size) {
    char part[PLACES + 96];
    kept k = {.size = size, .hash = hash_of(NOTHING, bytes, size)};
    memcpy(k.magic, MAGIC, sizeof k.magic);
    snprintf(part, sizeof part, "%s.%ld", path, (long)getpid());
    FILE *f = fopen(part, "wb");
    if (!f) return;
    const bool whole = fwrite(&k, sizeof k, 1, f) == 1 && fwrite(bytes, 1, size, f) == size;
    if (fclose(f) || !whole || rename(part, path)) unlink(part);
}

static void directories_make(char *path) {
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        const bool fine = !mkdir(path, 0700) || errno == EEXIST;
        *p = '/';
        if (!fine) return;
    }
}

/* --- making ------------------------------------------------------------------------------------------------- */

static void *compile(const char *text, int capability, size_t *size) {
    const char *texts[OM_GPU_TEXTS], *names[OM_GPU_TEXTS];
    char arch[48];
    for (int i = 0; i < OM_GPU_TEXTS; i++) names[i] = om_gpu_texts[i].name, texts[i] = om_gpu_texts[i].text;
    snprintf(arch, sizeof arch, "--gpu-architecture=sm_%d", capability);
    const char *const options[] = {arch, "--std=c++17", "-fmad=false", "--no-source-include"};
    om_rtc_program p = NULL;
    char *cubin = NULL;
    om_rtc_result r = api.create(&p, text, "strips.cu", OM_GPU_TEXTS, texts, names);
    if (r) return because("nvrtcCreateProgram failed (%d)", r), NULL;
    if ((r = api.compile(p, 4, options))) {
        size_t n = 0;
        char *log = !api.log_size(p, &n) && n ? calloc(1, n + 1) : NULL;
        if (log) api.log(p, log);
        because("nvrtcCompileProgram for sm_%d failed (%d): %.300s", capability, r, log ? log : "");
        free(log);
    } else if ((r = api.cubin_size(p, size)) || !(cubin = malloc(*size)) || (r = api.cubin(p, cubin))) {
        because("nvrtcGetCUBIN failed (%d)", r);
        free(cubin);
        cubin = NULL;
    }
    api.destroy(&p);
    return cubin;
}

static void *module_bytes(om_ctx *cx, om_gpu *g, const source *s, size_t *size) {
    char path[PLACES + 64] = "", place[PLACES];
    int major = 0, minor = 0;
    api.version(&major, &minor);
    if (*setting_copy(place, cache)) {
        char what[96];
        const int n = snprintf(what, sizeof what, "sm_%d NVRTC %d.%d", om_gpu_capability(g), major, minor);
        uint64_t h = hash_of(hash_of(NOTHING, what, (size_t)n), s->text, s->n);
        for (int i = 0; i < OM_GPU_TEXTS; i++) h = hash_of(h, om_gpu_texts[i].text, strlen(om_gpu_texts[i].text));
        snprintf(path, sizeof path, "%s/strips-%016llx-%zu.cubin", place, (unsigned long long)h, s->n);
        void *bytes = kept_read(path, size);
        if (bytes) return atomic_fetch_add(&counts[2], 1), bytes;
    }
    om_log(cx, 1, "%d chains are being compiled for the GPU, once for this machine ...", s->programs);
    void *bytes = compile(s->text, om_gpu_capability(g), size);
    if (!bytes) return NULL;
    atomic_fetch_add(&counts[1], 1);
    if (*path) directories_make(path), kept_write(path, bytes, *size);
    return bytes;
}

static void functions_take(om_ctx *cx, om_gpu *g, om_cu_module m, const source *s) {
    char name[64];
    for (int i = 0; i < s->programs; i++) {
        om_cu_function f = NULL;
        snprintf(name, sizeof name, "om_s_%016llx", (unsigned long long)s->program[i]->hash);
        if (om_gpu_module_function(cx, g, m, name, &f) != OM_OK) return because("%s", cx->message);
        atomic_store_explicit(&s->program[i]->function, f, memory_order_release);
        atomic_fetch_add(&counts[0], 1);
    }
}

void om_gpu_programs_make(om_ctx *cx, om_gpu *g) {
    const int device = om_gpu_ordinal(g);
    if (!atomic_load(&tables[device].wanted)) return;
    om_ctx quiet = {.status = OM_OK}; /* what fails here is no failure of the step's */
    om_cu_module m = NULL;
    size_t size = 0;
    pthread_mutex_lock(&making); /* who comes meanwhile waits, so that runs do not differ in who computes */
    source *s = calloc(1, sizeof *s);
    pthread_mutex_lock(&lock);
    const bool whole = s && source_make(device, s);
    pthread_mutex_unlock(&lock);
    void *bytes = whole && s->programs && rtc_open() ? module_bytes(cx, g, s, &size) : NULL;
    if (bytes && om_gpu_module(&quiet, g, bytes, &m) != OM_OK) because("%s", quiet.message);
    else if (bytes) functions_take(&quiet, g, m, s);
    pthread_mutex_unlock(&making);
    free(bytes);
    if (s) free(s->text);
    free(s);
}
