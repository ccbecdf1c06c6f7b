/* The extension on a glibc older than the one it is linked with, down to 2.28 (2018): the linker sends calls of the
 * names below here (-Wl,--wrap, GLIBC_NAMES of the Makefile), and each goes on to the version of that name which glibc
 * has had from its beginning. What changed with the newer versions: where the threads lie (2.34: libpthread and libdl
 * became part of libc), errno of exp, log and pow (2.29), that fstat and lstat are symbols at all (2.33). Nothing that
 * is computed.
 *
 * A static library has no versions, so this is no part of libom or libortmodule. */
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>

#if defined __x86_64__
#define OLD "GLIBC_2.2.5"
#define STAT 1
#elif defined __aarch64__
#define OLD "GLIBC_2.17"
#define STAT 0
#endif

#define WRAP(ret, name, params, args)                           \
    ret om_old_##name params;                                   \
    __asm__(".symver om_old_" #name "," #name "@" OLD);         \
    ret __wrap_##name params;                                   \
    ret __wrap_##name params { return om_old_##name args; }

WRAP(double, exp, (double x), (x))
WRAP(double, log, (double x), (x))
WRAP(double, pow, (double x, double y), (x, y))
WRAP(int, pthread_create, (pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *arg), (t, a, f, arg))
WRAP(int, pthread_join, (pthread_t t, void **result), (t, result))
WRAP(int, pthread_once, (pthread_once_t *once, void (*f)(void)), (once, f))
WRAP(int, pthread_mutex_trylock, (pthread_mutex_t *m), (m))
WRAP(int, pthread_rwlock_rdlock, (pthread_rwlock_t *l), (l))
WRAP(int, pthread_rwlock_wrlock, (pthread_rwlock_t *l), (l))
WRAP(int, pthread_rwlock_unlock, (pthread_rwlock_t *l), (l))
WRAP(void *, dlopen, (const char *path, int flags), (path, flags))
WRAP(void *, dlsym, (void *lib, const char *name), (lib, name))
WRAP(char *, dlerror, (void), ())

int om_old_fstat(int version, int fd, struct stat *st);
__asm__(".symver om_old_fstat,__fxstat@" OLD);
int __wrap_fstat(int fd, struct stat *st);
int __wrap_fstat(int fd, struct stat *st) { return om_old_fstat(STAT, fd, st); }

int om_old_lstat(int version, const char *path, struct stat *st);
__asm__(".symver om_old_lstat,__lxstat@" OLD);
int __wrap_lstat(const char *path, struct stat *st);
int __wrap_lstat(const char *path, struct stat *st) { return om_old_lstat(STAT, path, st); }
