/* fake_module.h - before a source that is given to the fake NVRTC: what its kernels find on the fake device
 * (fake_gpu.cpp, csrc/cuda/emulate.h). */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct emu_dim { unsigned x, y, z; };
struct fake_module { const emu_dim *thread, *block, *threads, *blocks; void (*reach)(const void *, size_t, int); };
static fake_module fake_host;
extern "C" __attribute__((visibility("default"))) void fake_module_begin(const fake_module *m) { fake_host = *m; }

#define OM_EMULATED 1
#define EXPORT(...) extern "C" __attribute__((visibility("default"))) void
#define PARAM(type) const type &
#define touch(p, size, write) fake_host.reach(p, size, write)
#define threadIdx (*fake_host.thread)
#define blockIdx (*fake_host.block)
#define blockDim (*fake_host.threads)
#define gridDim (*fake_host.blocks)
