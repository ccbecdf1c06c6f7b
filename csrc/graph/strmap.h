/* strmap.h - what the readers of text and ONNX share about strings: a map from strings to 32-bit ids, and validity.
 *
 * Open addressing with linear probing, a power of two of slots, at most half full. Keys are borrowed: they must outlive
 * the map. The first insertion of a key wins, as names in a graph are defined once; the caller sees the earlier id.
 */
#ifndef OM_STRMAP_H
#define OM_STRMAP_H

#include "graph/engine.h"

typedef struct om_strmap_slot { const char *key; om_id id; } om_strmap_slot;
typedef struct om_strmap { om_ctx *cx; om_strmap_slot *slot; uint32_t n, size; } om_strmap;

static inline uint32_t om_strmap_hash(const char *s) {
    uint32_t h = 2166136261u; /* FNV-1a */
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 16777619u;
    return h ^ (h >> 15);
}

static inline om_strmap_slot *om_strmap_find(const om_strmap *m, const char *key) {
    uint32_t i = om_strmap_hash(key) & (m->size - 1);
    while (m->slot[i].key && strcmp(m->slot[i].key, key) != 0) i = (i + 1) & (m->size - 1);
    return &m->slot[i];
}

/* OM_NONE when absent. */
static inline om_id om_strmap_get(const om_strmap *m, const char *key) {
    if (!m->n) return OM_NONE;
    const om_strmap_slot *s = om_strmap_find(m, key);
    return s->key ? s->id : OM_NONE;
}

/* False when there is no memory. *old: the id already there, else OM_NONE. old may be NULL. */
static inline bool om_strmap_put(om_strmap *m, const char *key, om_id id, om_id *old) {
    if (old) *old = OM_NONE;
    if (m->n * 2 >= m->size) {
        om_strmap big = {m->cx, NULL, m->n, m->size ? m->size * 2 : 64};
        big.slot = om_alloc(m->cx, big.size * sizeof *big.slot);
        if (!big.slot) return false;
        for (uint32_t i = 0; i < m->size; i++)
            if (m->slot[i].key) *om_strmap_find(&big, m->slot[i].key) = m->slot[i];
        om_free(m->cx, m->slot);
        *m = big;
    }
    om_strmap_slot *s = om_strmap_find(m, key);
    if (s->key) {
        if (old) *old = s->id;
        return true;
    }
    *s = (om_strmap_slot){key, id};
    m->n++;
    return true;
}

/* Replaces or adds. */
static inline bool om_strmap_set(om_strmap *m, const char *key, om_id id) {
    om_id old;
    if (!om_strmap_put(m, key, id, &old)) return false;
    if (old != OM_NONE) om_strmap_find(m, key)->id = id;
    return true;
}

static inline void om_strmap_free(om_strmap *m) {
    om_free(m->cx, m->slot);
    m->slot = NULL;
    m->n = m->size = 0;
}

/* Well-formed UTF-8 without NUL, overlong forms or surrogates: names end up in Python strings. */
static inline bool om_utf8_valid(const char *s, size_t n) {
    const unsigned char *p = (const unsigned char *)s, *end = p + n;
    while (p < end) {
        unsigned char c = *p++;
        if (c == 0) return false;
        if (c < 0x80) continue;
        int more = c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : 0;
        if (!more || end - p < more) return false;
        if ((c == 0xe0 && p[0] < 0xa0) || (c == 0xed && p[0] > 0x9f) || (c == 0xf0 && p[0] < 0x90) ||
            (c == 0xf4 && p[0] > 0x8f))
            return false;
        for (; more; more--)
            if ((*p++ & 0xc0) != 0x80) return false;
    }
    return true;
}
#endif
