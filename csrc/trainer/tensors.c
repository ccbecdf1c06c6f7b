/* tensors.c - see tensors.h. The header is read by one pass of recursive descent over the few shapes JSON may have
 * there; numbers are plain non-negative integers.
 */
#include "trainer/tensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <unistd.h>

static const struct {
    const char *name;
    uint8_t dtype;
} kinds[] = {{"F32", OM_F32}, {"F64", OM_F64}, {"BF16", OM_BF16}, {"F16", OM_F16}, {"I64", OM_I64},
             {"I32", OM_I32}, {"I16", OM_I16}, {"I8", OM_I8},     {"U8", OM_U8},   {"BOOL", OM_BOOL}};
enum { N_KINDS = sizeof kinds / sizeof *kinds, HEADER_MOST = 100 << 20 };

/* --- reading ------------------------------------------------------------------------------------- */

typedef struct json {
    om_ctx *cx;
    om_arena *mem;
    const char *what, *p, *start, *end;
    uint64_t covered; /* bytes of data that tensors have */
    const char *data;
    size_t data_size;
} json;

#define json_err(j, ...) json_err_(j, __LINE__, __VA_ARGS__)
static om_status json_err_(const json *j, int line, const char *reason) {
    return om_fail_at(j->cx, OM_INVALID, __FILE__, line, "%s: not a valid safetensors file: byte %zu: %s", j->what,
                      (size_t)(j->p - j->start) + 8, reason);
}

static void json_space(json *j) {
    while (j->p < j->end && strchr(" \t\r\n", *j->p) && *j->p) j->p++;
}

static bool json_is(json *j, char c) {
    json_space(j);
    if (j->p >= j->end || *j->p != c) return false;
    j->p++;
    return true;
}

static om_status json_want(json *j, char c) {
    static const char *const text[] = {"'{' expected", "'}' expected", "'[' expected", "']' expected",
                                       "',' expected", "':' expected", "'\"' expected"};
    return json_is(j, c) ? OM_OK : json_err(j, text[strchr("{}[],:\"", c) - "{}[],:\""]);
}

static bool json_hex(json *j, uint32_t *u) {
    *u = 0;
    if (j->end - j->p < 4) return false;
    for (int i = 0; i < 4; i++) {
        const char c = *j->p++;
        const int d = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
        if (d < 0) return false;
        *u = *u << 4 | (uint32_t)d;
    }
    return true;
}

static char *utf8_put(char *d, uint32_t u) {
    if (u < 0x80) return *d++ = (char)u, d;
    if (u < 0x800) {
        *d++ = (char)(0xc0 | u >> 6);
    } else {
        if (u < 0x10000) {
            *d++ = (char)(0xe0 | u >> 12);
        } else {
            *d++ = (char)(0xf0 | u >> 18);
            *d++ = (char)(0x80 | (u >> 12 & 0x3f));
        }
        *d++ = (char)(0x80 | (u >> 6 & 0x3f));
    }
    *d++ = (char)(0x80 | (u & 0x3f));
    return d;
}

static om_status json_string(json *j, const char **out) {
    OM_TRY(json_want(j, '"'));
    const char *q = j->p;
    while (q < j->end && *q != '"') q += *q == '\\' ? 2 : 1;
    if (q >= j->end) return json_err(j, "text does not end");
    char *s = om_arena_alloc(j->mem, (size_t)(q - j->p) + 1), *d = s; /* an escape is never longer than what it means */
    if (!s) return j->cx->status;
    while (j->p < q) {
        const unsigned char c = (unsigned char)*j->p++;
        if (c < 0x20) return json_err(j, "control character in text");
        if (c != '\\') {
            *d++ = (char)c;
            continue;
        }
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char e = *j->p++;
        const char *at = e ? strchr(from, e) : NULL;
        uint32_t u, low;
        if (at) {
            *d++ = to[at - from];
            continue;
        }
        if (e != 'u' || !json_hex(j, &u)) return json_err(j, "unknown escape in text");
        if (u >= 0xd800 && u < 0xdc00) {
            if (j->end - j->p < 6 || j->p[0] != '\\' || j->p[1] != 'u') return json_err(j, "half a surrogate pair");
            j->p += 2;
            if (!json_hex(j, &low) || low < 0xdc00 || low > 0xdfff) return json_err(j, "half a surrogate pair");
            u = 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00);
        } else if (u >= 0xdc00 && u <= 0xdfff) {
            return json_err(j, "half a surrogate pair");
        }
        if (!u) return json_err(j, "NUL in text");
        d = utf8_put(d, u);
    }
    j->p = q + 1;
    *d = 0;
    if (!om_utf8_valid(s, (size_t)(d - s))) return json_err(j, "text is not UTF-8");
    *out = s;
    return OM_OK;
}

static om_status json_number(json *j, uint64_t *v) {
    json_space(j);
    *v = 0;
    const char *from = j->p;
    while (j->p < j->end && *j->p >= '0' && *j->p <= '9') {
        if (*v > (UINT64_MAX >> 1) / 10 - 1) return json_err(j, "number too large");
        *v = *v * 10 + (uint64_t)(*j->p++ - '0');
    }
    return j->p > from && (j->p == from + 1 || *from != '0') ? OM_OK : json_err(j, "a number expected");
}

/* [a, b, ..]: at most `most` */
static om_status json_numbers(json *j, int most, uint64_t *v, int *n) {
    *n = 0;
    OM_TRY(json_want(j, '['));
    if (json_is(j, ']')) return OM_OK;
    do {
        if (*n == most) return json_err(j, "too many dimensions or offsets");
        OM_TRY(json_number(j, &v[(*n)++]));
    } while (json_is(j, ','));
    return json_want(j, ']');
}

static om_status json_tensor(json *j, om_entry *e) {
    uint64_t dim[OM_RANK], at[2];
    int rank = -1, offsets = 0;
    uint64_t bytes = 0;
    OM_TRY(json_want(j, '{'));
    do {
        const char *key, *text;
        OM_TRY(json_string(j, &key));
        OM_TRY(json_want(j, ':'));
        if (!strcmp(key, "dtype") && !e->t.dtype) {
            OM_TRY(json_string(j, &text));
            for (int i = 0; i < N_KINDS; i++)
                if (!strcmp(kinds[i].name, text)) e->t.dtype = kinds[i].dtype;
            if (!e->t.dtype) return json_err(j, "unknown dtype");
        } else if (!strcmp(key, "shape") && rank < 0) {
            OM_TRY(json_numbers(j, OM_RANK, dim, &rank));
        } else if (!strcmp(key, "data_offsets") && !offsets) {
            OM_TRY(json_numbers(j, 2, at, &offsets));
        } else {
            return json_err(j, "unknown or repeated key of a tensor");
        }
    } while (json_is(j, ','));
    OM_TRY(json_want(j, '}'));
    if (!e->t.dtype || rank < 0 || offsets != 2) return json_err(j, "a tensor needs dtype, shape and data_offsets");
    bytes = om_dtype_size(e->t.dtype);
    for (int k = 0; k < rank; k++) {
        if (__builtin_mul_overflow(bytes, dim[k], &bytes) || bytes > INT64_MAX || dim[k] > INT64_MAX / 8)
            return json_err(j, "a tensor is too large");
        e->t.dim[k] = (int64_t)dim[k];
    }
    if (at[1] < at[0] || at[1] > j->data_size || at[1] - at[0] != bytes)
        return json_err(j, "data_offsets do not agree with dtype and shape, or reach past the end of the file");
    e->t.rank = (uint8_t)rank;
    e->t.device = -1;
    om_dense_strides(&e->t);
    e->t.data = (void *)(uintptr_t)(j->data + at[0]);
    e->size = (size_t)bytes;
    j->covered += bytes;
    return OM_OK;
}

static om_status json_meta(json *j, om_tensors *f) {
    OM_TRY(json_want(j, '{'));
    if (json_is(j, '}')) return OM_OK;
    do {
        om_text_pair pair;
        om_id old;
        OM_TRY(json_string(j, &pair.key));
        OM_TRY(json_want(j, ':'));
        OM_TRY(json_string(j, &pair.text));
        if (!om_strmap_put(&f->keys, pair.key, f->meta.n, &old)) return j->cx->status;
        if (old != OM_NONE) return json_err(j, "a key of __metadata__ is given twice");
        om_text_pair *slot = OM_PUSH(j->cx, &f->meta);
        if (!slot) return j->cx->status;
        *slot = pair;
    } while (json_is(j, ','));
    return json_want(j, '}');
}

static int entry_order(const void *a, const void *b) {
    const om_entry *x = a, *y = b;
    const char *p = x->t.data, *q = y->t.data;
    return p != q ? (p > q) - (p < q) : (x->size > y->size) - (x->size < y->size);
}

static om_status json_file(json *j, om_tensors *f) {
    bool meta = false;
    if (j->p >= j->end || *j->p != '{') return json_err(j, "'{' expected");
    j->p++;
    if (!json_is(j, '}')) {
        do {
            const char *name;
            om_id old;
            OM_TRY(json_string(j, &name));
            OM_TRY(json_want(j, ':'));
            if (!strcmp(name, "__metadata__")) {
                if (meta) return json_err(j, "__metadata__ is given twice");
                meta = true;
                OM_TRY(json_meta(j, f));
                continue;
            }
            if (!om_strmap_put(&f->names, name, f->entry.n, &old)) return j->cx->status;
            if (old != OM_NONE) return json_err(j, "a tensor is given twice");
            om_entry *e = OM_PUSH(j->cx, &f->entry);
            if (!e) return j->cx->status;
            e->name = name;
            OM_TRY(json_tensor(j, e));
        } while (json_is(j, ','));
        OM_TRY(json_want(j, '}'));
    }
    json_space(j);
    if (j->p != j->end) return json_err(j, "something follows the header's end");
    /* side by side: as many bytes as there are, and in order of address none begins before the last one ends */
    if (j->covered != j->data_size) return json_err(j, "the tensors do not cover the data");
    om_entry *sorted = om_alloc(j->cx, (f->entry.n + 1) * sizeof *sorted);
    if (!sorted) return j->cx->status;
    if (f->entry.n) memcpy(sorted, f->entry.v, f->entry.n * sizeof *sorted);
    qsort(sorted, f->entry.n, sizeof *sorted, entry_order);
    const char *at = j->data;
    bool side_by_side = true;
    for (uint32_t i = 0; i < f->entry.n; i++) {
        side_by_side &= !sorted[i].size || sorted[i].t.data == at;
        at += sorted[i].size;
    }
    om_free(j->cx, sorted);
    return side_by_side ? OM_OK : json_err(j, "tensors overlap");
}

om_status om_tensors_read(om_ctx *cx, const char *what, const void *bytes, size_t size, om_tensors *f) {
    uint64_t n = 0;
    *f = (om_tensors){.mem = {.cx = cx}, .names = {.cx = cx}, .keys = {.cx = cx}};
    for (int i = 0; i < 8 && size >= 8; i++) n |= (uint64_t)((const uint8_t *)bytes)[i] << 8 * i;
    if (size < 10 || n > HEADER_MOST || n > size - 8)
        return om_fail(cx, OM_INVALID,
                       "%s: not a valid safetensors file: %zu bytes, with a header of %llu: cut, or another format",
                       what, size, (unsigned long long)n);
    const char *start = (const char *)bytes + 8;
    json j = {.cx = cx,
              .mem = &f->mem,
              .what = what,
              .p = start,
              .start = start,
              .end = start + n,
              .data = start + n,
              .data_size = size - 8 - (size_t)n};
    return json_file(&j, f);
}

void om_tensors_free(om_tensors *f) {
    if (!f->mem.cx) return;
    om_free(f->mem.cx, f->entry.v);
    om_free(f->mem.cx, f->meta.v);
    om_strmap_free(&f->names);
    om_strmap_free(&f->keys);
    om_arena_free(&f->mem);
    *f = (om_tensors){0};
}

const om_entry *om_tensors_find(const om_tensors *f, const char *name) {
    const om_id i = om_strmap_get(&f->names, name);
    return i == OM_NONE ? NULL : &f->entry.v[i];
}

const char *om_tensors_meta(const om_tensors *f, const char *key) {
    const om_id i = om_strmap_get(&f->keys, key);
    return i == OM_NONE ? NULL : f->meta.v[i].text;
}

/* --- files --------------------------------------------------------------------------------------- */

static om_status file_fail(om_ctx *cx, const char *path, const char *what, int line) {
    return om_fail_at(cx, OM_INVALID, __FILE__, line, "%s: %s: %s", path, what, strerror(errno));
}

/* Of the thread: two of a process may save to one path. */
static long file_owner(void) {
#ifdef __linux__
    return (long)syscall(SYS_gettid);
#else
    return (long)getpid();
#endif
}

/* A rename would put a file in the place of a device or a pipe. Links are replaced. */
static om_status file_replaceable(om_ctx *cx, const char *path) {
    struct stat st;
    if (lstat(path, &st) || S_ISREG(st.st_mode) || S_ISLNK(st.st_mode)) return OM_OK;
    const char *kind = S_ISDIR(st.st_mode) ? "a directory" : S_ISFIFO(st.st_mode) ? "a pipe" : "a device";
    if (S_ISSOCK(st.st_mode)) kind = "a socket";
    return om_fail(cx, OM_INVALID, "%s: cannot be replaced: is %s; give the path of a file", path, kind);
}

om_status om_file_begin(om_ctx *cx, const char *path, om_file *f) {
    const size_t n = strlen(path);
    if (!n) return om_fail(cx, OM_INVALID, "a path is needed: it is empty");
    OM_TRY(file_replaceable(cx, path));
    *f = (om_file){.cx = cx, .path = path, .fd = -1, .aside = om_alloc(cx, n + 32)};
    if (!f->aside) return cx->status;
    snprintf(f->aside, n + 32, "%s.%ld.part", path, file_owner());
    f->fd = open(f->aside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd >= 0) return OM_OK;
    file_fail(cx, f->aside, "cannot be written", __LINE__);
    om_free(cx, f->aside);
    f->aside = NULL;
    return cx->status;
}

om_status om_file_put(om_file *f, const void *bytes, size_t size) {
    const char *p = bytes;
    while (size) {
        const ssize_t n = write(f->fd, p, size > (1 << 30) ? 1 << 30 : size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return file_fail(f->cx, f->aside, "cannot be written", __LINE__);
        p += n;
        size -= (size_t)n;
    }
    return OM_OK;
}

static void directory_sync(const char *path) { /* the rename itself; some file systems cannot */
    char dir[4096];
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof dir) return;
    memcpy(dir, path, n);
    dir[n] = 0;
    const int fd = open(n ? dir : slash ? "/" : ".", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

om_status om_file_end(om_file *f, om_status s) {
    if (f->fd < 0) return s;
    if (s == OM_OK && fsync(f->fd)) s = file_fail(f->cx, f->aside, "cannot be synchronised", __LINE__);
    if (close(f->fd) && s == OM_OK) s = file_fail(f->cx, f->aside, "cannot be closed", __LINE__);
    if (s == OM_OK && rename(f->aside, f->path)) s = file_fail(f->cx, f->path, "cannot be replaced", __LINE__);
    if (s == OM_OK)
        directory_sync(f->path);
    else
        unlink(f->aside);
    om_free(f->cx, f->aside);
    f->aside = NULL;
    f->fd = -1;
    return s;
}

om_status om_file_read(om_ctx *cx, const char *path, void **bytes, size_t *size) {
    struct stat st;
    *bytes = NULL;
    *size = 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* of a pipe it would wait for who writes */
    if (fd < 0) return file_fail(cx, path, "cannot be read", __LINE__);
    om_status s = OM_OK;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) s = om_fail(cx, OM_INVALID, "%s: is not a file", path);
    if (s == OM_OK && (uint64_t)st.st_size > SIZE_MAX / 2) s = om_fail(cx, OM_NOMEM, "%s: is too large", path);
    if (s == OM_OK && !(*bytes = om_alloc(cx, (size_t)st.st_size + 1))) s = cx->status;
    while (s == OM_OK && *size < (size_t)st.st_size) {
        const ssize_t n = read(fd, (char *)*bytes + *size, (size_t)st.st_size - *size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            s = n ? file_fail(cx, path, "cannot be read", __LINE__)
                  : om_fail(cx, OM_INVALID, "%s: became shorter", path);
        else
            *size += (size_t)n;
    }
    close(fd);
    if (s == OM_OK) return OM_OK;
    om_free(cx, *bytes);
    *bytes = NULL;
    return s;
}

void om_pages_drop(void *p, size_t size) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = ((uintptr_t)p + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)p + size) & ~(page - 1);
    if (end > from) madvise((void *)from, end - from, MADV_DONTNEED);
}

/* --- writing ------------------------------------------------------------------------------------- */

typedef struct out {
    om_ctx *cx;
    OM_VEC(char) s;
} out;

static void out_raw(out *o, const char *s) {
    for (; *s; s++) {
        char *c = OM_PUSH(o->cx, &o->s);
        if (!c) return;
        *c = *s;
    }
}

static void out_string(out *o, const char *s) {
    out_raw(o, "\"");
    for (; *s; s++) {
        char buf[8] = {*s};
        if (*s == '"' || *s == '\\')
            snprintf(buf, sizeof buf, "\\%c", *s);
        else if ((unsigned char)*s < 0x20)
            snprintf(buf, sizeof buf, "\\u%04x", (unsigned)*s);
        out_raw(o, buf);
    }
    out_raw(o, "\"");
}

static const char *kind_name(int dtype) {
    for (int i = 0; i < N_KINDS; i++)
        if (kinds[i].dtype == dtype) return kinds[i].name;
    return NULL;
}

static om_status header_write(out *o, const om_entry *entry, uint32_t n, const om_text_pair *meta, uint32_t n_meta) {
    uint64_t at = 0;
    char buf[64];
    out_raw(o, "{\"__metadata__\":{");
    for (uint32_t i = 0; i < n_meta; i++) {
        if (i) out_raw(o, ",");
        out_string(o, meta[i].key);
        out_raw(o, ":");
        out_string(o, meta[i].text);
    }
    out_raw(o, "}");
    for (uint32_t i = 0; i < n; i++) {
        const om_tensor *t = &entry[i].t;
        const char *kind = kind_name(t->dtype);
        if (!kind)
            return om_fail(o->cx, OM_UNSUPPORTED, "%s: safetensors has no dtype %s", entry[i].name,
                           om_dtype_name(t->dtype));
        out_raw(o, ",");
        out_string(o, entry[i].name);
        snprintf(buf, sizeof buf, ":{\"dtype\":\"%s\",\"shape\":[", kind);
        out_raw(o, buf);
        for (int k = 0; k < t->rank; k++) {
            snprintf(buf, sizeof buf, "%s%lld", k ? "," : "", (long long)t->dim[k]);
            out_raw(o, buf);
        }
        snprintf(buf, sizeof buf, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                 (unsigned long long)(at + entry[i].size));
        out_raw(o, buf);
        at += entry[i].size;
    }
    out_raw(o, "}");
    while (o->cx->status == OM_OK && (o->s.n + 8) % 64) out_raw(o, " "); /* the data begins aligned */
    return o->cx->status;
}

om_status om_tensors_write(om_ctx *cx, const char *path, const om_entry *entry, uint32_t n, const om_text_pair *meta,
                           uint32_t n_meta) {
    out o = {.cx = cx};
    om_file f = {.fd = -1};
    uint8_t length[8];
    om_status s = header_write(&o, entry, n, meta, n_meta);
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)o.s.n >> 8 * i);
    if (s == OM_OK) s = om_file_begin(cx, path, &f);
    if (s == OM_OK) s = om_file_put(&f, length, 8);
    if (s == OM_OK) s = om_file_put(&f, o.s.v, o.s.n);
    for (uint32_t i = 0; i < n && s == OM_OK; i++) s = om_file_put(&f, entry[i].t.data, entry[i].size);
    om_free(cx, o.s.v);
    return om_file_end(&f, s);
}
