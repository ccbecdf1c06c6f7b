/* driver.c - see driver.h. One table of entry points and one record per device, filled under a lock and only read
 * afterwards. A failed opening keeps what it has got and is tried again at the next use (the first may have come inside
 * a stream capture). */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

enum { MAX_DEVICES = 64 };

OM_CUDA_ENTRIES(OM_CUDA_API)

struct om_cuda {
    _Atomic bool open;
    /* compute capability; driver: the CUDA version it speaks, 13000 = 13.0 */
    int ordinal, major, minor, processors, driver;
    char name[96];
    om_cu_context context;
    om_cu_module module;
    om_cu_function kernel[OM_N_CUDA_KERNELS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool api_ready;
static om_cuda devices[MAX_DEVICES];

static const char *const kernel_name[] = {
#define KERNEL(name, type) #name,
#include "cuda/kernels.def"
#undef KERNEL
};

/* --- errors ------------------------------------------------------------------------------------------ */

enum {
    CU_NO_BINARY = 209, CU_INVALID_IMAGE = 200, CU_UNSUPPORTED_PTX = 222, CU_CAPTURE_FIRST = 900,
    CU_CAPTURE_LAST = 908
};
enum { CU_ILLEGAL_ADDRESS = 700, CU_LAUNCH_FAILED = 719 };

static const char *driver_remedy(om_cu_result r) {
    if (r >= CU_CAPTURE_FIRST && r <= CU_CAPTURE_LAST)
        return ": not allowed while a CUDA graph is captured; run one step before capturing";
    if (r >= CU_ILLEGAL_ADDRESS && r <= CU_LAUNCH_FAILED)
        return ": reported late, an earlier kernel of any library may be the cause; CUDA_LAUNCH_BLOCKING=1 names it";
    return "";
}

/* what: a function, maybe with its subject; d: NULL before there is a device */
static om_status driver_fail(om_ctx *cx, om_cu_result r, const om_cuda *d, const char *what) {
    const char *name = "unknown error", *text = "";
    if (api.get_error_name(r, &name) || !name) name = "unknown error";
    if (api.get_error_string(r, &text) || !text) text = "";
    char where[160] = "";
    if (d) snprintf(where, sizeof where, " on CUDA device %d (%s, sm_%d%d)", d->ordinal, d->name, d->major, d->minor);
    return om_fail(cx, OM_UNSUPPORTED, "%s%s failed: %s (%u, %s)%s", what, where, name, r, text, driver_remedy(r));
}

om_status om_cuda_fail(om_ctx *cx, const om_cuda *d, om_cu_result r, const char *what) {
    return driver_fail(cx, r, d, what);
}

/* --- opening ----------------------------------------------------------------------------------------- */

om_status om_cuda_look(om_ctx *cx, const char *const *names, size_t n, void *slots, const char *needs) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) return om_fail(cx, OM_UNSUPPORTED, "CUDA tensors given, but there is no NVIDIA driver: %s", dlerror());
    for (size_t i = 0; i < n; i++) {
        void *const found = dlsym(lib, names[i]);
        if (!found)
            return om_fail(cx, OM_UNSUPPORTED, "the NVIDIA driver (libcuda.so.1) has no %s: %s", names[i], needs);
        memcpy((char *)slots + i * sizeof found, &found, sizeof found);
    }
    return OM_OK;
}

static om_status driver_api(om_ctx *cx) {
    if (api_ready) return OM_OK;
    OM_TRY(OM_CUDA_LOOK(cx, "CUDA 11 or later is needed"));
    const om_cu_result r = api.init(0);
    if (r) return driver_fail(cx, r, NULL, "cuInit");
    api_ready = true;
    return OM_OK;
}

static om_status driver_load(om_ctx *cx, om_cuda *d) {
    om_cu_result r = d->module ? 0 : api.module_load(&d->module, om_cuda_image);
    if (r) d->module = NULL;
    if (r == CU_NO_BINARY || r == CU_INVALID_IMAGE || r == CU_UNSUPPORTED_PTX)
        return om_fail(
            cx, OM_UNSUPPORTED,
            "CUDA device %d (%s) is sm_%d%d, its driver speaks CUDA %d.%d; this build has kernels for sm_ %s and the "
            "driver took none of them (cuModuleLoadData: %u): update the driver, or build from source with make "
            "CUDA_ARCHS=%d%d and that driver's nvcc",
            d->ordinal, d->name, d->major, d->minor, d->driver / 1000, d->driver % 1000 / 10, om_cuda_archs, r,
            d->major, d->minor);
    if (r) return driver_fail(cx, r, d, "cuModuleLoadData");
    for (int k = 0; k < OM_N_CUDA_KERNELS; k++) {
        r = api.module_function(&d->kernel[k], d->module, kernel_name[k]);
        char what[96];
        snprintf(what, sizeof what, "cuModuleGetFunction of %s", kernel_name[k]);
        if (r) return driver_fail(cx, r, d, what);
    }
    return OM_OK;
}

static om_status driver_open(om_ctx *cx, om_cuda *d, int ordinal) {
    /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ..._COMPUTE_CAPABILITY_... */
    enum { PROCESSORS = 16, MAJOR = 75, MINOR = 76 };
    if (!om_cuda_image_size)
        return om_fail(cx, OM_UNSUPPORTED,
                       "this build has no CUDA kernels (nvcc was not found when it was built): move the parameters to "
                       "the CPU, or build again with nvcc on PATH");
    OM_TRY(driver_api(cx));
    int device = 0;
    om_cu_context previous;
    om_cu_result r;
    d->ordinal = ordinal;
    if ((r = api.driver_version(&d->driver))) return driver_fail(cx, r, NULL, "cuDriverGetVersion");
    if ((r = api.device_get(&device, ordinal))) return driver_fail(cx, r, NULL, "cuDeviceGet");
    if ((r = api.device_name(d->name, sizeof d->name, device))) return driver_fail(cx, r, NULL, "cuDeviceGetName");
    if ((r = api.device_attribute(&d->major, MAJOR, device)) || (r = api.device_attribute(&d->minor, MINOR, device)) ||
        (r = api.device_attribute(&d->processors, PROCESSORS, device)))
        return driver_fail(cx, r, NULL, "cuDeviceGetAttribute");
    if (!d->context && (r = api.primary_retain(&d->context, device))) {
        d->context = NULL;
        return driver_fail(cx, r, d, "cuDevicePrimaryCtxRetain");
    }
    if ((r = api.push(d->context))) return driver_fail(cx, r, d, "cuCtxPushCurrent");
    om_status s = driver_load(cx, d);
    if ((r = api.pop(&previous)) && s == OM_OK) s = driver_fail(cx, r, d, "cuCtxPopCurrent");
    if (s == OM_OK) atomic_store(&d->open, true);
    return s;
}

om_status om_cuda_enter(om_ctx *cx, int ordinal, om_cuda **out) {
    OM_CHECK(cx, ordinal >= 0 && ordinal < MAX_DEVICES, "CUDA device %d given; allowed: 0 to %d", ordinal,
             MAX_DEVICES - 1);
    om_cuda *d = *out = &devices[ordinal];
    if (!atomic_load(&d->open)) {
        pthread_mutex_lock(&lock);
        const om_status s = atomic_load(&d->open) ? OM_OK : driver_open(cx, d, ordinal);
        pthread_mutex_unlock(&lock);
        OM_TRY(s);
    }
    const om_cu_result r = api.push(d->context);
    return r ? driver_fail(cx, r, d, "cuCtxPushCurrent") : OM_OK;
}

om_status om_cuda_leave(om_ctx *cx, om_cuda *d, om_status s) {
    om_cu_context previous;
    const om_cu_result r = api.pop(&previous);
    return r && s == OM_OK ? driver_fail(cx, r, d, "cuCtxPopCurrent") : s;
}

/* --- work -------------------------------------------------------------------------------------------- */

om_status om_cuda_launch(om_ctx *cx, om_cuda *d, om_cuda_kernel k, uint32_t blocks, uint32_t threads, void *stream,
                         const void *param) {
    if (!blocks) return OM_OK;
    void *params[] = {(void *)param};
    const om_cu_result r = api.launch(d->kernel[k], blocks, 1, 1, threads, 1, 1, 0, stream, params, NULL);
    if (!r) return OM_OK;
    char what[64];
    snprintf(what, sizeof what, "launching %s", kernel_name[k]);
    return driver_fail(cx, r, d, what);
}

int om_cuda_processors(const om_cuda *d) { return d->processors; }
int om_cuda_capability(const om_cuda *d) { return 10 * d->major + d->minor; }

om_status om_cuda_capturing(om_ctx *cx, om_cuda *d, void *stream, bool *yes) {
    unsigned status = 0; /* none, active, invalidated */
    const om_cu_result r = api.stream_capturing(stream, &status);
    if (r) return driver_fail(cx, r, d, "cuStreamIsCapturing");
    *yes = status != 0;
    return OM_OK;
}
