/* host_memory.c - see host_memory.h. */
#include "cuda/host_memory.h"

#include <dlfcn.h>
#include <pthread.h>

#define X(field, name, params) int32_t (*field) params; /* AOTITorchError: 0 is success */
static struct { OM_CUDA_TORCH_API(X) } api;
#undef X
static pthread_once_t looked = PTHREAD_ONCE_INIT;
static bool present;

static void look(void) {
    void *lib = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    present = lib != NULL;
#define X(field, name, params) present = present && (*(void **)&api.field = dlsym(lib, #name));
    OM_CUDA_TORCH_API(X)
#undef X
}

bool om_torch_memory_open(void) {
    pthread_once(&looked, look);
    return present;
}

void *om_torch_memory_get(int ordinal, size_t size, void *stream) {
    void *guard = NULL, *p = NULL;
    if (api.guard(stream, ordinal, &guard)) return NULL; /* torch's own stream for this thread, and its device */
    if (api.alloc(size, &p)) p = NULL;
    if (!api.unguard(guard)) return p;
    if (p) api.free(p);
    return NULL;
}

bool om_torch_memory_put(void *p) { return !api.free(p); }
