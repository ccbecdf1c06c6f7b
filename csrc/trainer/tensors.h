/* tensors.h - safetensors files: named tensors and a map of strings, read from bytes and written so that an
 * interruption loses nothing.
 *
 *     8 bytes little-endian: length of the header, n
 *     n bytes JSON: {"__metadata__": {"key": "text", ...}, "name": {"dtype": "F32", "shape": [2, 3],
 *                    "data_offsets": [from, to]}, ...}     and spaces
 *     the data, each tensor dense and row-major, one after the other without gaps
 *
 * The reader takes what the format allows and nothing else: sizes agree with dtype and shape, tensors cover the data
 * exactly once, no name occurs twice, text is UTF-8 without NUL. It allocates what the header's length allows.
 */
#ifndef OM_TENSORS_H
#define OM_TENSORS_H
#include "graph/engine.h"
#include "graph/strmap.h"

typedef struct om_entry {
    const char *name;
    om_tensor t; /* data: inside of the bytes, of any alignment */
    size_t size; /* bytes */
} om_entry;
typedef struct om_text_pair {
    const char *key, *text;
} om_text_pair;

typedef struct om_tensors {
    om_arena mem;
    OM_VEC(om_entry) entry;
    OM_VEC(om_text_pair) meta;
    om_strmap names, keys;
    bool ort; /* of onnxruntime-training: tensors may share bytes; plain SGD has moments that it does not use */
} om_tensors;

/* what: whose file it is, for messages. The bytes are borrowed as long as *f lives. */
om_status om_tensors_read(om_ctx *cx, const char *what, const void *bytes, size_t size, om_tensors *f);
void om_tensors_free(om_tensors *f); /* also after a failure; all zero is fine */
const om_entry *om_tensors_find(const om_tensors *f, const char *name);
const char *om_tensors_meta(const om_tensors *f, const char *key); /* NULL: absent */

/* What a checkpoint says (state.c): its format, the names of moments. */
#define OM_CHECKPOINT_FORMAT "ortmodule-checkpoint"
#define OM_MOMENT_1 "optimizer.exp_avg:"
#define OM_MOMENT_2 "optimizer.exp_avg_sq:"

/* odtc.c: a checkpoint of onnxruntime-training (a flatbuffer), in the same terms; and "trained:NAME". */
bool om_odtc_is(const void *bytes, size_t size);
om_status om_odtc_read(om_ctx *cx, const char *what, const void *bytes, size_t size, om_tensors *f);

/* The tensors (dense) and texts of a list; path: see om_file_replace. */
om_status om_tensors_write(om_ctx *cx, const char *path, const om_entry *entry, uint32_t n, const om_text_pair *meta,
                           uint32_t n_meta);

/* A file that takes the place of `path` when it is complete: written under another name in the same directory,
 * synchronised, renamed, and the directory synchronised. */
typedef struct om_file {
    om_ctx *cx;
    const char *path;
    char *aside;
    int fd;
} om_file;
om_status om_file_begin(om_ctx *cx, const char *path, om_file *f);
om_status om_file_put(om_file *f, const void *bytes, size_t size);
om_status om_file_end(om_file *f, om_status s); /* s: of what was put; a failure leaves path as it was */
/* Whole; *bytes by om_free. */
om_status om_file_read(om_ctx *cx, const char *path, void **bytes, size_t *size);
/* Whole pages inside of memory that nobody reads again (zeros, or as it was) go back to the system. */
void om_pages_drop(void *p, size_t size);
#endif
