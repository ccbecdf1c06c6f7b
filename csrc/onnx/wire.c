/* wire.c - checks that bytes are a well-formed protobuf message before protobuf-c sees them.
 *
 * protobuf-c answers a broken message with NULL and nothing else, and recurses as deep as the bytes ask. This walk
 * reads the same bytes against the same descriptors and allocates nothing. After it passed: every tag, varint and
 * length lies inside its message, wire types fit the fields, packed arrays hold whole elements, strings are UTF-8
 * without NUL, nesting is at most OM_ONNX_DEPTH, singular messages occur once (protobuf-c would merge them), groups do
 * not occur, and the number of messages stays below what `size` bytes can reasonably hold.
 */
#include "onnx/onnx.h"

typedef struct wire {
    om_ctx *cx;
    const uint8_t *base;
} wire;

#define wire_err(w, p, ...) wire_err_(w, p, __LINE__, __VA_ARGS__)
static om_status wire_err_(const wire *w, const uint8_t *p, int line, const char *what, const char *where) {
    return om_fail_at(w->cx, OM_INVALID, __FILE__, line, "not a valid ONNX file: byte %zu: %s%s%s",
                      (size_t)(p - w->base), what, where ? " in " : "", where ? where : "");
}

/* NULL when it runs past `end` or over 10 bytes. */
static const uint8_t *wire_varint(const uint8_t *p, const uint8_t *end, uint64_t *v) {
    *v = 0;
    for (int shift = 0; shift < 64 && p < end; shift += 7) {
        uint8_t b = *p++;
        if (shift == 63 && b > 1) return NULL;
        *v |= (uint64_t)(b & 0x7f) << shift;
        if (b < 0x80) return p;
    }
    return NULL;
}

static int wire_type(ProtobufCType t) { /* of one element */
    switch (t) {
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE: return 1;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE: return 2;
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT: return 5;
    default: return 0;
    }
}

static om_status wire_packed(const wire *w, const ProtobufCFieldDescriptor *f, const uint8_t *p, const uint8_t *end) {
    int type = wire_type(f->type);
    if (type == 1 || type == 5)
        return (end - p) % (type == 1 ? 8 : 4) ? wire_err(w, p, "packed array holds part of an element", f->name)
                                               : OM_OK;
    uint64_t v;
    while (p < end) {
        const uint8_t *next = wire_varint(p, end, &v);
        if (!next) return wire_err(w, p, "broken varint in packed array", f->name);
        p = next;
    }
    return OM_OK;
}

static om_status wire_message(const wire *w, const ProtobufCMessageDescriptor *d, const uint8_t *p, const uint8_t *end,
                              int depth) {
    uint64_t seen = 0; /* singular message fields */
    if (depth > OM_ONNX_DEPTH) return wire_err(w, p, "messages are nested too deep", d->short_name);
    while (p < end) {
        uint64_t tag, v = 0;
        const uint8_t *at = p;
        if (!(p = wire_varint(p, end, &tag)) || tag >> 32 || tag >> 3 == 0)
            return wire_err(w, at, "broken field tag", d->short_name);
        int type = (int)(tag & 7);
        const ProtobufCFieldDescriptor *f = protobuf_c_message_descriptor_get_field(d, (unsigned)(tag >> 3));
        const char *name = f ? f->name : d->short_name;
        size_t n = 0;
        if (type == 0) {
            const uint8_t *next = wire_varint(p, end, &v);
            if (!next) return wire_err(w, p, "broken varint", name);
            p = next;
        } else if (type == 1 || type == 5) {
            n = type == 1 ? 8 : 4;
            if ((size_t)(end - p) < n) return wire_err(w, p, "the message ends inside a number", name);
            p += n;
        } else if (type == 2) {
            const uint8_t *next = wire_varint(p, end, &v);
            if (!next) return wire_err(w, p, "broken length", name);
            if (v > (uint64_t)(end - next)) return wire_err(w, p, "a length reaches past the end of its message", name);
            p = next;
            n = (size_t)v;
        } else {
            return wire_err(w, at, "unknown wire type", name);
        }
        if (!f) {
            if (type == 2) p += n;
            continue;
        }
        bool repeated = f->label == PROTOBUF_C_LABEL_REPEATED;
        if (type != wire_type(f->type) && !(type == 2 && repeated)) return wire_err(w, at, "wrong wire type", name);
        if (type != 2) continue;
        if (wire_type(f->type) != 2) {
            OM_TRY(wire_packed(w, f, p, p + n));
        } else if (f->type == PROTOBUF_C_TYPE_STRING) {
            if (!om_utf8_valid((const char *)p, n)) return wire_err(w, p, "text is not UTF-8", name);
        } else if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
            unsigned k = (unsigned)(f - d->fields);
            if (!repeated && k < 64 && (seen >> k & 1))
                return wire_err(w, at, "a singular message is given twice", name);
            if (k < 64) seen |= (uint64_t)1 << k;
            OM_TRY(wire_message(w, f->descriptor, p, p + n, depth + 1));
        }
        p += n;
    }
    return OM_OK;
}

om_status om_onnx_wire(om_ctx *cx, const ProtobufCMessageDescriptor *d, const uint8_t *bytes, size_t size) {
    if (size == 0) return om_fail(cx, OM_INVALID, "not a valid ONNX file: it is empty");
    if (size > INT32_MAX)
        return om_fail(cx, OM_INVALID, "an ONNX file of %zu bytes: at most %d (protobuf's limit)", size, INT32_MAX);
    wire w = {cx, bytes};
    return wire_message(&w, d, bytes, bytes + size, 0);
}

static void *unpack_alloc(void *arena, size_t size) { return om_arena_alloc(arena, size ? size : 1); }
static void unpack_free(void *arena, void *p) { (void)arena, (void)p; }

Onnx__ModelProto *om_onnx_unpack(om_ctx *cx, om_arena *mem, const void *bytes, size_t size) {
    ProtobufCAllocator al = {.alloc = unpack_alloc, .free = unpack_free, .allocator_data = mem};
    Onnx__ModelProto *m = onnx__model_proto__unpack(&al, size, bytes);
    if (m) return m;
    om_fail(cx, OM_INVALID, "not a valid ONNX file: protobuf cannot be unpacked"); /* unless memory was lacking */
    return NULL;
}
