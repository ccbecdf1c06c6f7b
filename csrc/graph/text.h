/* text.h - a graph as text (text_print.c), and back (text_parse.c): what passes print, golden tests compare and om-opt
 * edits.
 *
 *   graph {
 *     sym s0 = x[1]                          # size of an input's axis;  sym s3 = value of n: a 0-d integer input;  sym
 *                                            s4: unbound;  sym c0 <= s0*2: bounded, known to the data alone
 *     input x: f32[2, s0, s0*12 + 3]         # roles: input param buffer grad_in
 *     input lr: f32[] host                   # a host scalar (om_value.host)
 *     param w "odd name": f32[7, 768]        # the string is the name where it is no identifier
 *     const c0: i64[2] = [1, 2]              # up to 32 numbers, else the bytes: hex "0a0b.."
 *     y = permute(w) {perm=[1, 0]}: f32[768, 7]
 *     a, b, _1 = layer_norm(x, w, _) {axis=2, eps=1e-05}: ... @"h.0.ln_1" "model.py":12 rng=3 backward seg=1
 *     output a
 *     write a -> w                           # a is stored into graph input w after the forward
 *     grad w = b                             # or: grad w = none
 *   }
 *
 * Attributes: integer `3`, float `1.0` (always with a point, exponent, inf or nan), string `"..."`, list of sizes
 * `[..]`; `to` and `dtype` show the dtype's name. A left-out operand is `_`. The types after `:` are what om_make
 * infers; they may be left out, and when present the parser compares.
 *
 * Invariants: print(parse(print(g))) == print(g) byte for byte. Statements stand in the order in which the parser must
 * make them: symbols, inputs, then constants and nodes by value id. Unnamed results are v<k> and c<k>, k counting in
 * that order, so parsing brings back the same k; such names are never stored. A name that occurs twice gets ~k
 * appended.
 */
#ifndef OM_TEXT_H
#define OM_TEXT_H

#include "graph/engine.h"
#include "graph/number.h"
#include "graph/strmap.h"

static const char *const text_role[] = {
    [OM_INPUT] = "input", [OM_PARAM] = "param", [OM_BUFFER] = "buffer", [OM_GRAD_IN] = "grad_in"};

static inline bool text_is_ident_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '~';
}

/* v12, c3: made by the printer, never stored. */
static inline bool text_is_generated(const char *s) {
    if (*s != 'v' && *s != 'c') return false;
    size_t n = strspn(s + 1, "0123456789");
    return n > 0 && s[1 + n] == 0;
}

static inline bool text_is_input(const om_value *v) {
    return v->role == OM_INPUT || v->role == OM_PARAM || v->role == OM_BUFFER || v->role == OM_GRAD_IN;
}

static inline bool text_attr_is_dtype(const char *name) { return !strcmp(name, "to") || !strcmp(name, "dtype"); }

char *om_text_type(const om_graph *g, const om_type *t); /* "f32[2, s0]"; om_free it. NULL: no memory */
#endif
