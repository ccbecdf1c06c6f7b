/* blaslt.c - see blaslt.h. */
#include "cuda/blaslt.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* Room for the library's descriptors in words, more than any version asks for (13.1: 14, 32 and 12); it is told how
 * much there is. */
enum { LAYOUT_WORDS = 32, DESC_WORDS = 64, WISH_WORDS = 32 };
enum { ALIGNED = 16 }; /* bytes: what vector loads want of every address */

#define X(field, name, params) om_lt_result (*field) params;
static struct { OM_LT_API(X) } api;
#undef X

/* Of one product: [operands are cut to TF32][addresses are aligned as elements only] */
typedef struct choices { om_lt_choice of[2][2]; } choices;
typedef struct entry { om_lt_shape shape; choices c; } entry;

struct om_lt_product {
    om_lt_shape s;
    uint64_t a[LAYOUT_WORDS], b[LAYOUT_WORDS], c[LAYOUT_WORDS];
    choices choice;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool looked, present;
static void *handles[OM_GPUS];
static entry *known; /* a hash table; n_known of 1 << log_known places are taken, those with m > 0 */
static int64_t n_known;
static int log_known;
static _Thread_local bool tf32;

void om_cuda_tf32(bool allowed) { tf32 = allowed; }
bool om_cuda_tf32_now(void) { return tf32; }

bool om_lt_present(void) { return present; }

bool om_lt_open(void) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 3 && !looked; i++) {
        void *lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (!lib) continue;
        present = looked = true;
#define X(field, name, params) present &= (*(void **)&api.field = dlsym(lib, #name)) != NULL;
        OM_LT_API(X)
#undef X
    }
    looked = true;
    pthread_mutex_unlock(&lock);
    return present;
}

static om_status failed(om_ctx *cx, om_gpu *g, om_lt_result r, const char *call) {
    const char *name = ((const char *(*)(om_lt_result))(void (*)(void))api.status_name)(r);
    om_fail(cx, r == OM_LT_ALLOC_FAILED ? OM_NOMEM : OM_UNSUPPORTED, "%s on CUDA device %d failed: %s (%d)", call,
            om_gpu_ordinal(g), name ? name : "unknown status", r);
    return cx->status;
}
#define TRY(field, name, ...)                                       \
    do {                                                            \
        const om_lt_result r_ = api.field(__VA_ARGS__);             \
        if (r_) return failed(cx, g, r_, name);                     \
    } while (0)

static int type_of(int dtype) {
    return dtype == OM_F64    ? OM_LT_R_64F
           : dtype == OM_BF16 ? OM_LT_R_16BF
           : dtype == OM_F16  ? OM_LT_R_16F
                              : OM_LT_R_32F;
}

/* --- descriptors ---------------------------------------------------------------------------------------- */

/* A row-major operand of rows, cols: what the library calls columns are rows, unless turned. */
static om_status layout_make(om_ctx *cx, om_gpu *g, uint64_t *out, const om_lt_shape *s, int64_t rows, int64_t cols,
                             bool turned, int ld, int64_t step) {
    const int32_t batch = (int32_t)s->batch;
    TRY(layout_init, "cublasLtMatrixLayoutInit", out, LAYOUT_WORDS * sizeof *out, type_of(s->dtype),
        (uint64_t)(turned ? rows : cols), (uint64_t)(turned ? cols : rows), ld);
    if (batch == 1) return OM_OK;
    TRY(layout_set, "cublasLtMatrixLayoutSetAttribute", out, OM_LT_LAYOUT_BATCH, &batch, sizeof batch);
    TRY(layout_set, "cublasLtMatrixLayoutSetAttribute", out, OM_LT_LAYOUT_STRIDE, &step, sizeof step);
    return OM_OK;
}

static om_status desc_make(om_ctx *cx, om_gpu *g, uint64_t *out, const om_lt_shape *s, bool cut, const void *bias) {
    const bool f64 = s->dtype == OM_F64;
    const int32_t first = s->tb, second = s->ta; /* CUBLAS_OP_N and _T: the library's A is our b */
    const uint32_t epilogue = OM_LT_EPILOGUE_BIAS;
    TRY(desc_init, "cublasLtMatmulDescInit", out, DESC_WORDS * sizeof *out,
        f64 ? OM_LT_COMPUTE_64F : cut ? OM_LT_COMPUTE_TF32 : OM_LT_COMPUTE_32F, f64 ? OM_LT_R_64F : OM_LT_R_32F);
    TRY(desc_set, "cublasLtMatmulDescSetAttribute", out, OM_LT_DESC_TRANSA, &first, sizeof first);
    TRY(desc_set, "cublasLtMatmulDescSetAttribute", out, OM_LT_DESC_TRANSB, &second, sizeof second);
    if (!s->bias) return OM_OK;
    TRY(desc_set, "cublasLtMatmulDescSetAttribute", out, OM_LT_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    TRY(desc_set, "cublasLtMatmulDescSetAttribute", out, OM_LT_DESC_BIAS, &bias, sizeof bias);
    return OM_OK;
}

/* --- choices ---------------------------------------------------------------------------------------------- */

static entry *place_of(entry *table, int bits, const om_lt_shape *s) {
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < sizeof *s; i++) h = (h ^ ((const uint8_t *)s)[i]) * 1099511628211u;
    size_t at = (size_t)(h >> (64 - bits));
    while (table[at].shape.m && memcmp(&table[at].shape, s, sizeof *s)) at = (at + 1) & (((size_t)1 << bits) - 1);
    return &table[at];
}

static bool choice_known(const om_lt_shape *s, choices *out) {
    bool yes = false;
    pthread_mutex_lock(&lock);
    if (known) {
        const entry *e = place_of(known, log_known, s);
        if ((yes = e->shape.m != 0)) *out = e->c;
    }
    pthread_mutex_unlock(&lock);
    return yes;
}

static om_status choice_keep(om_ctx *cx, const om_lt_shape *s, const choices *c) {
    om_status st = OM_OK;
    pthread_mutex_lock(&lock);
    if (!known || 2 * n_known >= (int64_t)1 << log_known) {
        const int bits = known ? log_known + 1 : 6;
        entry *more = calloc((size_t)1 << bits, sizeof *more);
        for (int64_t i = 0; more && known && i < (int64_t)1 << log_known; i++)
            if (known[i].shape.m) *place_of(more, bits, &known[i].shape) = known[i];
        if (more) free(known), known = more, log_known = bits;
        else st = om_fail(cx, OM_NOMEM, "no memory for the algorithms of matrix products");
    }
    if (st == OM_OK) {
        entry *e = place_of(known, log_known, s);
        if (!e->shape.m) n_known++;
        *e = (entry){*s, *c};
    }
    pthread_mutex_unlock(&lock);
    return st;
}

/* The library's first proposal; state: the reason when it has none. */
static om_status choose(om_ctx *cx, om_gpu *g, void *handle, om_lt_product *p, bool cut, bool narrow,
                        om_lt_choice *out) {
    uint64_t desc[DESC_WORDS], wish[WISH_WORDS];
    const uint32_t align = narrow ? (uint32_t)om_dtype_size(p->s.dtype) : ALIGNED;
    const bool narrow_type = om_dtype_size(p->s.dtype) < 4;
    const uint32_t reduction = narrow_type ? OM_LT_REDUCTION_COMPUTE_TYPE : OM_LT_REDUCTION_ANY;
    const uint64_t space = (uint64_t)p->s.space;
    int n = 0;
    OM_TRY(desc_make(cx, g, desc, &p->s, cut, (const void *)(uintptr_t)align)); /* looked at for its alignment alone */
    TRY(wish_init, "cublasLtMatmulPreferenceInit", wish, sizeof wish);
    TRY(wish_set, "cublasLtMatmulPreferenceSetAttribute", wish, OM_LT_WISH_SPACE, &space, sizeof space);
    TRY(wish_set, "cublasLtMatmulPreferenceSetAttribute", wish, OM_LT_WISH_REDUCTION, &reduction, sizeof reduction);
    for (int i = 0; i < 4; i++)
        TRY(wish_set, "cublasLtMatmulPreferenceSetAttribute", wish, OM_LT_WISH_ALIGN_A + i, &align, sizeof align);
    *out = (om_lt_choice){.state = OM_LT_NOT_SUPPORTED};
    const om_lt_result r = api.choose(handle, desc, p->b, p->a, p->c, p->c, wish, 1, out, &n);
    if (r == OM_LT_NOT_SUPPORTED || r == OM_LT_ARCH_MISMATCH || (!r && !n)) out->state = OM_LT_NOT_SUPPORTED;
    else if (r) return failed(cx, g, r, "cublasLtMatmulAlgoGetHeuristic");
    if (out->space > space) out->state = OM_LT_NOT_SUPPORTED;
    return OM_OK;
}

/* Are there products of operands cut to TF32? Before sm_80 they are f32's whatever torch allows. */
static bool cuts(const om_gpu *g, const om_lt_shape *s) { return s->dtype == OM_F32 && om_gpu_capability(g) >= 80; }

static om_status handle_of(om_ctx *cx, om_gpu *g, void **out) {
    om_lt_result r = 0;
    pthread_mutex_lock(&lock);
    void **h = &handles[om_gpu_ordinal(g)];
    if (!*h && (r = api.create(h))) *h = NULL;
    *out = *h;
    pthread_mutex_unlock(&lock);
    return r ? failed(cx, g, r, "cublasLtCreate") : OM_OK;
}

om_status om_lt_prepare(om_ctx *cx, om_gpu *g, om_arena *mem, const om_lt_shape *s, const om_lt_product **out) {
    void *handle;
    *out = NULL;
    om_lt_product *p = om_arena_alloc(mem, sizeof *p);
    if (!p) return cx->status;
    OM_TRY(handle_of(cx, g, &handle));
    p->s = *s;
    OM_TRY(layout_make(cx, g, p->a, s, s->m, s->k, s->ta, s->lda, s->a));
    OM_TRY(layout_make(cx, g, p->b, s, s->k, s->n, s->tb, s->ldb, s->b));
    OM_TRY(layout_make(cx, g, p->c, s, s->m, s->n, false, s->ldc, s->c));
    if (!choice_known(s, &p->choice)) {
        for (int cut = 0; cut < 2; cut++)
            for (int narrow = 0; narrow < 2; narrow++)
                if (cut && !cuts(g, s)) p->choice.of[cut][narrow] = p->choice.of[0][narrow];
                else OM_TRY(choose(cx, g, handle, p, cut, narrow, &p->choice.of[cut][narrow]));
        OM_TRY(choice_keep(cx, s, &p->choice));
    }
    for (int i = 0; i < 4; i++)
        if (p->choice.of[i / 2][i % 2].state) return OM_OK;
    *out = p;
    return OM_OK;
}

/* --- a step's -------------------------------------------------------------------------------------------------- */

om_status om_lt_run(om_ctx *cx, om_gpu *g, const om_lt_product *p, const om_lt_at *at) {
    static const float one = 1, zero = 0;
    static const double one64 = 1, zero64 = 0;
    uint64_t desc[DESC_WORDS];
    const bool f64 = p->s.dtype == OM_F64, cut = tf32 && cuts(g, &p->s);
    const uintptr_t all = (uintptr_t)at->a | (uintptr_t)at->b | (uintptr_t)at->c | (uintptr_t)at->bias;
    const om_lt_choice *how = &p->choice.of[cut][all % ALIGNED != 0];
    char *space = at->space + (-(uintptr_t)at->space & (OM_LT_ALIGN - 1));
    OM_TRY(desc_make(cx, g, desc, &p->s, cut, at->bias));
    TRY(multiply, "cublasLtMatmul", handles[p->s.ordinal], desc, f64 ? (const void *)&one64 : &one, at->b,
        (void *)(uintptr_t)p->b, at->a, (void *)(uintptr_t)p->a, f64 ? (const void *)&zero64 : &zero, at->c,
        (void *)(uintptr_t)p->c, at->c, (void *)(uintptr_t)p->c, how->algo, how->space ? space : NULL, how->space,
        om_cuda_stream_now());
    return OM_OK;
}
