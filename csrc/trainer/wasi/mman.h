/* wasi/mman.h - address space for a machine whose memory is one piece (wasm32-wasi): there is none but what malloc
 * gives. */
#ifndef OM_WASI_MMAN_H
#define OM_WASI_MMAN_H
#include <stddef.h>

#define MAP_FAILED ((void *)-1)
enum { PROT_READ = 1, PROT_WRITE = 2, MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x20, MAP_NORESERVE = 0x4000 };
enum { MADV_DONTNEED = 4, MADV_HUGEPAGE = 14 };

static inline void *mmap(void *at, size_t size, int prot, int flags, int fd, long long offset) {
    return (void)at, (void)size, (void)prot, (void)flags, (void)fd, (void)offset, MAP_FAILED;
}
static inline int munmap(void *p, size_t size) { return (void)p, (void)size, -1; }
static inline int madvise(void *p, size_t size, int advice) { return (void)p, (void)size, (void)advice, -1; }
#endif
