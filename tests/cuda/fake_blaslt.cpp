/* fake_blaslt.cpp - a libcublasLt.so.13 for the fake GPU (fake_gpu.cpp): the entry points csrc/cuda/blaslt.h uses.
 *
 * Descriptors are held to what cublasLt.h and the library's manual say: attribute sizes, dtypes that go together, sizes
 * of the operands, leading dimensions, equal batch counts, results that do not overlap, an algorithm used for the
 * problem it was chosen for, addresses aligned as the algorithm asks, workspace of that size at a multiple of 256. What a
 * product reads and writes (to the byte: between two columns nothing) must be declared and lie in live memory.
 * Numbers: products in double, rounded once; TF32 cuts operands to 10 bits. Two algorithms: `wide` needs 16-byte
 * addresses and leading dimensions and overwrites workspace, `narrow` takes everything.
 */
#include "fake_gpu.h"

#include "cuda/scalar.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

enum { OK = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, WRONG_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_TF32 = 77 };
enum { LAYOUT = 0x4c41594f, DESC = 0x44455343, WISH = 0x57495348, HANDLE = 0x48414e44 };

struct layout { uint64_t magic; int32_t type, batch; uint64_t rows, cols; int64_t ld, step; };
struct desc { uint64_t magic; int32_t compute, scale, ta, tb; uint32_t epilogue; int32_t none; const char *bias; };
struct wish { uint64_t magic, space; uint32_t reduction, align[4], none; };
struct algo { uint64_t data[8]; };
struct choice { algo a; size_t space; int state; float waves; int reserved[4]; };
struct handle { uint64_t magic; };
static handle the_handle = {HANDLE};
static long products;

static unsigned wrong(const char *why) { return fake_gpu_refuse(WRONG_VALUE, (std::string("cuBLASLt: ") + why).c_str()); }
#define ENTRY(name)                                                         \
    if (const unsigned code_ = fake_gpu_injected(#name)) return (int)code_; \
    if (!fake_gpu_current()) return (int)wrong(#name ": no context is current")
#define LIKE(p, what) ((p) && (p)->magic == (what))

static size_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

PUBLIC long fake_blaslt_products(void) { return products; }

PUBLIC const char *cublasLtGetStatusName(int s) {
    static const std::map<int, const char *> names = {
        {0, "CUBLAS_STATUS_SUCCESS"}, {1, "CUBLAS_STATUS_NOT_INITIALIZED"}, {3, "CUBLAS_STATUS_ALLOC_FAILED"},
        {7, "CUBLAS_STATUS_INVALID_VALUE"}, {8, "CUBLAS_STATUS_ARCH_MISMATCH"}, {11, "CUBLAS_STATUS_MAPPING_ERROR"},
        {13, "CUBLAS_STATUS_EXECUTION_FAILED"}, {14, "CUBLAS_STATUS_INTERNAL_ERROR"}, {15, "CUBLAS_STATUS_NOT_SUPPORTED"},
        {16, "CUBLAS_STATUS_LICENSE_ERROR"}};
    const auto n = names.find(s);
    return n == names.end() ? "unknown" : n->second;
}

PUBLIC int cublasLtCreate(handle **out) {
    ENTRY(cublasLtCreate);
    return out ? (*out = &the_handle, OK) : WRONG_VALUE;
}

/* --- descriptors --------------------------------------------------------------------------------------------- */

template <class T> static int begin(T *out, size_t size, T x) {
    if (size < sizeof(T)) return ALLOC_FAILED;
    memset((void *)out, 0x77, size); /* all that it was given is the library's */
    *out = x;
    return OK;
}
template <class T> static int give(T *field, const void *from, size_t size) {
    if (size != sizeof(T)) return WRONG_VALUE;
    memcpy(field, from, size);
    return OK;
}

PUBLIC int cublasLtMatrixLayoutInit_internal(layout *l, size_t size, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    ENTRY(cublasLtMatrixLayoutInit_internal);
    return begin(l, size, {LAYOUT, type, 1, rows, cols, ld, 0});
}
PUBLIC int cublasLtMatrixLayoutSetAttribute(layout *l, int what, const void *from, size_t size) {
    ENTRY(cublasLtMatrixLayoutSetAttribute);
    if (!LIKE(l, LAYOUT)) return (int)wrong("no layout");
    return what == 5 ? give(&l->batch, from, size) : what == 6 ? give(&l->step, from, size) : WRONG_VALUE;
}
PUBLIC int cublasLtMatmulDescInit_internal(desc *d, size_t size, int compute, int scale) {
    ENTRY(cublasLtMatmulDescInit_internal);
    return begin(d, size, {DESC, compute, scale, 0, 0, 1, 0, nullptr});
}
PUBLIC int cublasLtMatmulDescSetAttribute(desc *d, int what, const void *from, size_t size) {
    ENTRY(cublasLtMatmulDescSetAttribute);
    if (!LIKE(d, DESC)) return (int)wrong("no operation");
    switch (what) {
    case 3: return give(&d->ta, from, size);
    case 4: return give(&d->tb, from, size);
    case 7: return give(&d->epilogue, from, size);
    case 8: return give(&d->bias, from, size);
    default: return WRONG_VALUE;
    }
}
PUBLIC int cublasLtMatmulPreferenceInit_internal(wish *w, size_t size) {
    ENTRY(cublasLtMatmulPreferenceInit_internal);
    return begin(w, size, {WISH, 0, 7, {256, 256, 256, 256}, 0});
}
PUBLIC int cublasLtMatmulPreferenceSetAttribute(wish *w, int what, const void *from, size_t size) {
    ENTRY(cublasLtMatmulPreferenceSetAttribute);
    if (!LIKE(w, WISH)) return (int)wrong("no preference");
    return what == 1             ? give(&w->space, from, size)
           : what == 3           ? give(&w->reduction, from, size)
           : what > 4 && what < 9 ? give(&w->align[what - 5], from, size)
                                 : WRONG_VALUE;
}

/* --- problems -------------------------------------------------------------------------------------------------- */

static bool turned(int op) { return op == 1; }

/* Why not, or NULL; *code. */
static const char *problem(const desc *d, const layout *a, const layout *b, const layout *c, const layout *z, int *code) {
    *code = WRONG_VALUE;
    if (!LIKE(d, DESC) || !LIKE(a, LAYOUT) || !LIKE(b, LAYOUT) || !LIKE(c, LAYOUT) || !LIKE(z, LAYOUT))
        return "a descriptor that is none";
    if (d->ta < 0 || d->ta > 1 || d->tb < 0 || d->tb > 1) return "transposition";
    const uint64_t m = turned(d->ta) ? a->cols : a->rows, k = turned(d->ta) ? a->rows : a->cols;
    const uint64_t kb = turned(d->tb) ? b->cols : b->rows, n = turned(d->tb) ? b->rows : b->cols;
    if (!m || !n || !k) return "an empty matrix";
    if (k != kb || z->rows != m || z->cols != n || c->rows != m || c->cols != n) return "sizes of the operands differ";
    for (const layout *l : {a, b, c, z}) {
        if (l->ld < (int64_t)l->rows) return "leading dimension below the number of rows";
        if (l->batch < 1 || l->batch != z->batch) return "batch counts differ";
        if (l->rows > INT32_MAX || l->cols > INT32_MAX || l->ld > INT32_MAX) return "beyond 32 bits";
    }
    const int64_t whole = (int64_t)(n - 1) * z->ld + (int64_t)m;
    if (z->batch > 1 && z->step < whole && (z->step < (int64_t)m || (z->batch - 1) * z->step + (int64_t)m > z->ld))
        return "results overlap";
    *code = NOT_SUPPORTED;
    const bool f64 = d->compute == COMPUTE_64F, f32 = d->compute == COMPUTE_32F, tf32 = d->compute == COMPUTE_TF32;
    if ((!f64 && !f32 && !tf32) || d->scale != (f64 ? R_64F : R_32F)) return "compute and scale type";
    for (const layout *l : {a, b, c, z})
        if (l->type != z->type) return "operands of several dtypes";
    if (f64 ? z->type != R_64F : tf32 ? z->type != R_32F : z->type == R_64F) return "dtype for this compute type";
    if (d->epilogue != 1 && d->epilogue != 4) return "epilogue";
    if (d->epilogue == 4 && !d->bias) return "no address of the bias";
    return nullptr;
}

static uint64_t mixed(const desc *d, const layout *a, const layout *b, const layout *z) {
    uint64_t h = (uint64_t)d->compute * 31 + (uint64_t)d->ta * 2 + (uint64_t)d->tb + d->epilogue * 7;
    for (const layout *l : {a, b, z})
        for (const uint64_t x : {(uint64_t)l->type, (uint64_t)l->batch, l->rows, l->cols, (uint64_t)l->ld, (uint64_t)l->step})
            h = (h ^ x) * 0x9e3779b97f4a7c15u + (h >> 29);
    return h;
}

PUBLIC int cublasLtMatmulAlgoGetHeuristic(handle *h, const desc *d, const layout *a, const layout *b, const layout *c,
                                          const layout *z, const wish *w, int asked, choice *out, int *found) {
    ENTRY(cublasLtMatmulAlgoGetHeuristic);
    int code;
    if (h != &the_handle) return NOT_INITIALIZED;
    if (asked < 1 || !out || !found || !LIKE(w, WISH)) return WRONG_VALUE;
    *found = 0;
    if (const char *why = problem(d, a, b, c, z, &code)) return code == WRONG_VALUE ? (int)wrong(why) : code;
    if (d->compute == COMPUTE_TF32 && fake_gpu_sm() < 80) return NOT_SUPPORTED;
    if (w->reduction != (size_of(z->type) < 4 ? 2 : 7)) return (int)wrong("a sum whose parts are rounded, or may not be cut");
    uint64_t bias = 16;
    if (d->epilogue == 4) bias = (uint64_t)(uintptr_t)d->bias & -(uint64_t)(uintptr_t)d->bias;
    bool wide = bias >= 16;
    for (const uint32_t x : w->align) wide &= x >= 16;
    for (const layout *l : {a, b, z}) wide &= (uint64_t)l->ld * size_of(l->type) % 16 == 0 && (uint64_t)l->step * size_of(l->type) % 16 == 0;
    const uint64_t want = z->rows * z->cols * (uint64_t)z->batch * 4;
    *out = {};
    out->a = {{0xa190, mixed(d, a, b, z), wide ? 16u : size_of(z->type), wide ? (want < w->space ? want : w->space) : 0}};
    out->space = out->a.data[3];
    *found = 1;
    return OK;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

struct work { desc d; layout a, b, z; const char *pa, *pb; char *pz, *space; size_t size; std::vector<range> declared; bool checks; };

static double get(const char *p, int type, int64_t i) {
    switch (type) {
    case R_64F: return ((const double *)p)[i];
    case R_16F: return f16_in(((const uint16_t *)p)[i]);
    case R_16BF: return bf16_in(((const uint16_t *)p)[i]);
    default: return ((const float *)p)[i];
    }
}
static void put(char *p, int type, int64_t i, double x) {
    switch (type) {
    case R_64F: ((double *)p)[i] = x; break;
    case R_16F: ((uint16_t *)p)[i] = f16_out((float)x); break;
    case R_16BF: ((uint16_t *)p)[i] = bf16_out((float)x); break;
    default: ((float *)p)[i] = (float)x;
    }
}
static double cut(double x) { /* to the nearest with 10 bits behind the point */
    const uint32_t u = f32_bits((float)x);
    return (u & 0x7f800000u) == 0x7f800000u ? x : bits_f32((u + 0xfffu + (u >> 13 & 1u)) & ~0x1fffu);
}

static bool declared(const work &w, const char *at, int64_t size, int mode) {
    if (!fake_gpu_inside(at, size) && (w.checks || !fake_gpu_hosts(at))) return false; /* else: the host's, which stands for it */
    if (!w.checks) return true;
    for (const range &r : w.declared)
        if (at >= (const char *)r.at && at + size <= (const char *)r.at + r.size && (r.mode & mode) == mode) return true;
    return false;
}
static bool reached(const work &w, const layout &l, const char *p, int mode) {
    const int64_t e = (int64_t)size_of(l.type);
    for (int64_t i = 0; i < l.batch; i++)
        if (!declared(w, p + i * l.step * e, ((int64_t)(l.cols - 1) * l.ld + (int64_t)l.rows) * e, mode)) return false;
    return true;
}

static unsigned run(const work &w) {
    const bool bias = w.d.epilogue == 4, tf32 = w.d.compute == COMPUTE_TF32;
    const int type = w.z.type;
    if (!reached(w, w.a, w.pa, 1)) return wrong("A reaches memory the call did not declare");
    if (!reached(w, w.b, w.pb, 1)) return wrong("B reaches memory the call did not declare");
    if (!reached(w, w.z, w.pz, 2)) return wrong("D reaches memory the call did not declare");
    if (bias && !declared(w, w.d.bias, (int64_t)(w.z.rows * size_of(type)), 1)) return wrong("the bias reaches memory the call did not declare");
    if (w.size && !declared(w, w.space, (int64_t)w.size, 3)) return wrong("the workspace is not the call's");
    if (w.size) memset(w.space, 0xee, w.size);
    products++;
    const int64_t m = (int64_t)w.z.rows, n = (int64_t)w.z.cols, k = (int64_t)(turned(w.d.ta) ? w.a.rows : w.a.cols);
    const int64_t ai = turned(w.d.ta) ? w.a.ld : 1, ak = turned(w.d.ta) ? 1 : w.a.ld;
    const int64_t bk = turned(w.d.tb) ? w.b.ld : 1, bj = turned(w.d.tb) ? 1 : w.b.ld;
    std::vector<double> a((size_t)(m * k)), b((size_t)(k * n));
    for (int64_t p = 0; p < w.z.batch; p++) {
        for (int64_t i = 0; i < m * k; i++) a[(size_t)i] = get(w.pa, type, p * w.a.step + i / k * ai + i % k * ak);
        for (int64_t j = 0; j < n * k; j++) b[(size_t)j] = get(w.pb, type, p * w.b.step + j / k * bj + j % k * bk);
        if (tf32) for (double &x : a) x = cut(x);
        if (tf32) for (double &x : b) x = cut(x);
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < m; i++) {
                double sum = 0;
                for (int64_t t = 0; t < k; t++) sum += a[(size_t)(i * k + t)] * b[(size_t)(j * k + t)];
                if (bias) sum += get(w.d.bias, type, i);
                put(w.pz, type, p * w.z.step + i + j * w.z.ld, sum);
            }
    }
    return 0;
}

PUBLIC int cublasLtMatmul(handle *h, const desc *d, const void *alpha, const char *pa, const layout *a, const char *pb,
                          const layout *b, const void *beta, const char *pc, const layout *c, char *pz, const layout *z,
                          const algo *how, char *space, size_t size, CUstream_st *stream) {
    ENTRY(cublasLtMatmul);
    int code;
    work w = {};
    w.checks = fake_gpu_declared(&w.declared);
    if (h != &the_handle) return NOT_INITIALIZED;
    if (const char *why = problem(d, a, b, c, z, &code)) return code == WRONG_VALUE ? (int)wrong(why) : code;
    const bool f64 = d->compute == COMPUTE_64F;
    if (f64 ? *(const double *)alpha != 1 || *(const double *)beta != 0 : *(const float *)alpha != 1 || *(const float *)beta != 0)
        return NOT_SUPPORTED; /* not by this fake */
    if (!pa || !pb || !pc || !pz || pc != pz) return (int)wrong("addresses");
    if (!how || how->data[0] != 0xa190 || how->data[1] != mixed(d, a, b, z)) return (int)wrong("an algorithm of another problem");
    if (how->data[3] > size || (size && (uintptr_t)space % 256)) return (int)wrong("workspace");
    const uintptr_t all = (uintptr_t)pa | (uintptr_t)pb | (uintptr_t)pz | (uintptr_t)(d->epilogue == 4 ? d->bias : nullptr);
    if (all % how->data[2]) return (int)wrong("addresses are not aligned as the algorithm asks");
    w.d = *d, w.a = *a, w.b = *b, w.z = *z, w.pa = pa, w.pb = pb, w.pz = pz, w.space = space, w.size = size;
    const std::function<unsigned()> later = [w] { return run(w) ? 719u : 0u; };
    return fake_gpu_put(stream, &later) ? EXECUTION_FAILED : OK;
}
