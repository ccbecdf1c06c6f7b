/* size.c - shape arithmetic of an ONNX file as size expressions.
 *
 * Each rule looks at operands that are lists (om_onnx_val.list: integer or bool tensors of rank <= 1 whose elements are
 * size expressions) and, when the result is one again, sets it and returns true: no node is made. When any operand is
 * not a list, or an element cannot be decided exactly (a truncating division of something perhaps negative, a
 * comparison that depends on the sizes), the rule returns false and the operator is imported as computation on tensors.
 */
#include "onnx/onnx.h"

/* --- what is known about an expression --------------------------------------------------------------- */

static int64_t sat_add(int64_t a, int64_t b) { /* INT64_MIN and INT64_MAX stand for infinity */
    int64_t r;
    if (a == INT64_MIN || b == INT64_MIN) return INT64_MIN;
    if (a == INT64_MAX || b == INT64_MAX) return INT64_MAX;
    return __builtin_add_overflow(a, b, &r) ? (a < 0 ? INT64_MIN : INT64_MAX) : r;
}
static int64_t sat_mul(int64_t a, int64_t b) {
    int64_t r;
    if (a == 0 || b == 0) return 0;
    return __builtin_mul_overflow(a, b, &r) ? ((a < 0) != (b < 0) ? INT64_MIN : INT64_MAX) : r;
}
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* *fuel bounds the work on expressions that share much. */
static void size_bounds(const om_graph *g, om_dim d, int64_t least, int64_t *lo, int64_t *hi, int *fuel) {
    *lo = INT64_MIN;
    *hi = INT64_MAX;
    if (om_dim_const(g, d, lo)) {
        *hi = *lo;
        return;
    }
    *lo = INT64_MIN;
    if (--*fuel < 0) return;
    const om_expr *e = &g->exprs.v[~d];
    if (e->kind == OM_DIM_SYM) {
        *lo = least;
        return;
    }
    int64_t a0, a1, b0, b1;
    size_bounds(g, e->a, least, &a0, &a1, fuel);
    size_bounds(g, e->b, least, &b0, &b1, fuel);
    switch (e->kind) {
    case OM_DIM_ADD: *lo = sat_add(a0, b0), *hi = sat_add(a1, b1); break;
    case OM_DIM_MUL: {
        int64_t p[4] = {sat_mul(a0, b0), sat_mul(a0, b1), sat_mul(a1, b0), sat_mul(a1, b1)};
        *lo = min64(min64(p[0], p[1]), min64(p[2], p[3]));
        *hi = max64(max64(p[0], p[1]), max64(p[2], p[3]));
        break;
    }
    case OM_DIM_DIV:
        if (b0 < 1) break; /* rounded down */
        if (a0 != INT64_MIN) *lo = a0 < 0 ? a0 / b0 - (a0 % b0 != 0) : b1 == INT64_MAX ? 0 : a0 / b1;
        if (a1 != INT64_MAX) *hi = a1 >= 0 ? a1 / b0 : b1 == INT64_MAX ? -1 : a1 / b1 - (a1 % b1 != 0);
        break;
    case OM_DIM_MOD:
        if (b0 >= 1) *lo = 0, *hi = b1 == INT64_MAX ? INT64_MAX : b1 - 1;
        break;
    case OM_DIM_MIN: *lo = min64(a0, b0), *hi = min64(a1, b1); break;
    case OM_DIM_MAX: *lo = max64(a0, b0), *hi = max64(a1, b1); break;
    default: break;
    }
}

void om_onnx_bounds(const om_graph *g, om_dim d, int64_t least, int64_t *lo, int64_t *hi) {
    int fuel = 1000;
    size_bounds(g, d, least, lo, hi, &fuel);
}

bool om_onnx_nonneg(const om_graph *g, om_dim d) {
    int64_t lo, hi;
    om_onnx_bounds(g, d, 0, &lo, &hi);
    return lo >= 0;
}

/* Symbols are taken to be at least 1 here: with `x[: s0 - 1]` and s0 = 0 the slice's bounds fail the check at run time
 * rather than carrying the rule for negative bounds into every size. */
om_dim om_onnx_bound(om_graph *g, om_dim d, om_dim size) {
    int64_t lo, hi;
    om_onnx_bounds(g, d, 1, &lo, &hi);
    if (hi < 0) {
        d = om_dim_add(g, d, size);
    } else if (lo < 0) { /* size is added exactly when d < 0: min(1, max(0, -d)) is 1 then, else 0 */
        om_dim neg = om_dim_min(g, 1, om_dim_max(g, 0, om_dim_sub(g, 0, d)));
        d = om_dim_add(g, d, om_dim_mul(g, neg, size));
    }
    om_onnx_bounds(g, d, 1, &lo, &hi);
    if (lo < 0) d = om_dim_max(g, d, 0);
    om_onnx_bounds(g, om_dim_sub(g, size, d), 1, &lo, &hi);
    return lo >= 0 ? d : om_dim_min(g, d, size);
}

om_id om_onnx_dim_value(om_onnx *o, om_dim d, int dtype) {
    return om_make(o->g, &om_op_fill, NULL, 0,
                   OM_ATTRS(OM_AD("shape", NULL, 0), OM_AI("dtype", dtype), OM_AD("value", &d, 1)));
}

/* --- helpers ----------------------------------------------------------------------------------------- */

static const om_onnx_val *size_operand(om_onnx *o, int i) {
    const om_onnx_val *v = om_onnx_operand(o, i);
    return v && v->list ? v : NULL;
}

bool om_onnx_operand_type(om_onnx *o, int i, om_type *t) {
    const om_onnx_val *v = om_onnx_operand(o, i);
    if (!v) return false;
    if (v->v != OM_NONE) {
        *t = *om_ty(o->g, v->v);
    } else if (v->lit) {
        *t = (om_type){
            .dtype = (uint8_t)om_dtype_from_onnx(v->lit->data_type), .rank = (uint8_t)v->lit->n_dims};
        if (v->lit->n_dims > OM_RANK) return false;
        for (int k = 0; k < t->rank; k++)
            if ((t->dim[k] = v->lit->dims[k]) < 0) return false;
    } else {
        *t = (om_type){.dtype = v->dtype, .rank = v->rank, .dim = {v->n}};
    }
    return true;
}

static bool size_constants(const om_graph *g, const om_onnx_val *v, int64_t *c) {
    for (uint32_t i = 0; i < v->n; i++)
        if (!om_dim_const(g, v->list[i], &c[i])) return false;
    return true;
}

/* Known numbers must fit their dtype, else the file means wrapping arithmetic. */
static bool size_set(om_onnx *o, int dtype, int rank, const om_dim *list, uint32_t n) {
    if (rank > 1 || n > OM_ONNX_LIST) return false;
    for (uint32_t i = 0; i < n; i++) {
        int64_t c;
        if (dtype == OM_I32 && om_dim_const(o->g, list[i], &c) && c != (int32_t)c) return false;
    }
    om_onnx_set_list(o, 0, dtype, rank, list, n);
    return true;
}

/* Numpy broadcasting of two lists. */
static bool size_pair(om_onnx *o, const om_onnx_val *a, const om_onnx_val *b,
                      bool (*fn)(om_onnx *, om_dim, om_dim, om_dim *), int dtype) {
    if (!a || !b || (a->n != b->n && a->n != 1 && b->n != 1)) return false;
    om_dim out[OM_ONNX_LIST];
    uint32_t n = a->n == 1 ? b->n : a->n;
    for (uint32_t i = 0; i < n; i++)
        if (!fn(o, a->list[a->n == 1 ? 0 : i], b->list[b->n == 1 ? 0 : i], &out[i])) return false;
    return size_set(o, dtype, a->rank > b->rank ? a->rank : b->rank, out, n);
}

/* --- arithmetic -------------------------------------------------------------------------------------- */

static bool size_binary(om_onnx *o, om_dim a, om_dim b, om_dim *out) {
    om_graph *g = o->g;
    const char *op = o->node->op_type;
    int64_t x, y, r = 0;
    bool known = om_dim_const(g, a, &x) && om_dim_const(g, b, &y), over = false;
    if (known) {
        if (!strcmp(op, "Add")) over = __builtin_add_overflow(x, y, &r);
        else if (!strcmp(op, "Sub")) over = __builtin_sub_overflow(x, y, &r);
        else if (!strcmp(op, "Mul")) over = __builtin_mul_overflow(x, y, &r);
        /* ONNX truncates */
        else if (!strcmp(op, "Div")) over = y == 0 || (x == INT64_MIN && y == -1), r = over ? 0 : x / y;
        else if (!strcmp(op, "Mod")) {
            over = y == 0 || y == -1;
            r = over ? 0 : x % y;
            if (r && (r < 0) != (y < 0) && !om_onnx_int(o, "fmod", 0)) r += y;
            if (y == -1) over = false, r = 0;
        } else if (!strcmp(op, "Max")) r = max64(x, y);
        else if (!strcmp(op, "Min")) r = min64(x, y);
        else return false;
        *out = om_dim_int(g, r);
        return !over;
    }
    if (!strcmp(op, "Add")) *out = om_dim_add(g, a, b);
    else if (!strcmp(op, "Sub")) *out = om_dim_sub(g, a, b);
    else if (!strcmp(op, "Mul")) *out = om_dim_mul(g, a, b);
    else if (!strcmp(op, "Max")) *out = om_dim_max(g, a, b);
    else if (!strcmp(op, "Min")) *out = om_dim_min(g, a, b);
    else { /* floor and truncation agree where both are certainly not negative; Mod without fmod is floor's */
        bool floor = !strcmp(op, "Mod") && !om_onnx_int(o, "fmod", 0) && om_dim_const(g, b, &y) && y > 0;
        if (!floor && (!om_onnx_nonneg(g, a) || !om_onnx_nonneg(g, b) || b == 0)) return false;
        if (!strcmp(op, "Div")) *out = om_dim_div(g, a, b);
        else if (!strcmp(op, "Mod")) *out = om_dim_mod(g, a, b);
        else return false;
    }
    return true;
}
bool om_onnx_size_arith(om_onnx *o) {
    const om_onnx_val *a = size_operand(o, 0), *b = size_operand(o, 1);
    return o->n_in == 2 && a && b && a->dtype != OM_BOOL && a->dtype == b->dtype &&
           size_pair(o, a, b, size_binary, a->dtype);
}

static bool size_decide(om_onnx *o, om_dim a, om_dim b, om_dim *out) {
    const char *op = o->node->op_type;
    int64_t lo, hi;
    om_onnx_bounds(o->g, om_dim_sub(o->g, a, b), 0, &lo, &hi);
    bool yes, no;
    if (!strcmp(op, "Equal")) yes = lo == 0 && hi == 0, no = lo > 0 || hi < 0;
    else if (!strcmp(op, "Less")) yes = hi < 0, no = lo >= 0;
    else if (!strcmp(op, "LessOrEqual")) yes = hi <= 0, no = lo > 0;
    else if (!strcmp(op, "Greater")) yes = lo > 0, no = hi <= 0;
    else if (!strcmp(op, "GreaterOrEqual")) yes = lo >= 0, no = hi < 0;
    else return false;
    *out = yes;
    return yes || no;
}
bool om_onnx_size_compare(om_onnx *o) {
    return size_pair(o, size_operand(o, 0), size_operand(o, 1), size_decide, OM_BOOL);
}

static bool size_logic(om_onnx *o, om_dim a, om_dim b, om_dim *out) {
    const char *op = o->node->op_type;
    if (a < 0 || b < 0) return false;
    *out = !strcmp(op, "And") ? a && b : !strcmp(op, "Or") ? a || b : !a != !b;
    return true;
}
bool om_onnx_size_logic(om_onnx *o) {
    const om_onnx_val *a = size_operand(o, 0), *b = size_operand(o, 1);
    return a && b && a->dtype == OM_BOOL && b->dtype == OM_BOOL && size_pair(o, a, b, size_logic, OM_BOOL);
}

bool om_onnx_size_neg(om_onnx *o) {
    const om_onnx_val *a = size_operand(o, 0);
    om_dim out[OM_ONNX_LIST];
    if (!a || a->dtype == OM_BOOL) return false;
    for (uint32_t i = 0; i < a->n; i++) {
        int64_t c;
        if (om_dim_const(o->g, a->list[i], &c) && c == INT64_MIN) return false;
        out[i] = om_dim_const(o->g, a->list[i], &c) ? om_dim_int(o->g, -c) : om_dim_sub(o->g, 0, a->list[i]);
    }
    return size_set(o, a->dtype, a->rank, out, a->n);
}

bool om_onnx_size_not(om_onnx *o) {
    const om_onnx_val *a = size_operand(o, 0);
    om_dim out[OM_ONNX_LIST];
    if (!a || a->dtype != OM_BOOL) return false;
    for (uint32_t i = 0; i < a->n; i++) {
        if (a->list[i] < 0) return false;
        out[i] = !a->list[i];
    }
    return size_set(o, OM_BOOL, a->rank, out, a->n);
}

bool om_onnx_size_abs(om_onnx *o) {
    const om_onnx_val *a = size_operand(o, 0);
    if (!a || a->dtype == OM_BOOL) return false;
    for (uint32_t i = 0; i < a->n; i++)
        if (!om_onnx_nonneg(o->g, a->list[i])) return false;
    return size_set(o, a->dtype, a->rank, a->list, a->n);
}

/* --- making and moving ------------------------------------------------------------------------------- */

bool om_onnx_size_shape(om_onnx *o) {
    om_type t;
    if (!om_onnx_operand_type(o, 0, &t)) return false;
    int64_t from = om_onnx_int(o, "start", 0), to = om_onnx_int(o, "end", t.rank);
    if (from < 0) from += t.rank;
    if (to < 0) to += t.rank;
    from = max64(0, min64(from, t.rank));
    to = max64(from, min64(to, t.rank));
    return size_set(o, OM_I64, 1, t.dim + from, (uint32_t)(to - from));
}

bool om_onnx_size_size(om_onnx *o) {
    om_type t;
    if (!om_onnx_operand_type(o, 0, &t)) return false;
    om_dim n = om_dim_numel(o->g, &t);
    return size_set(o, OM_I64, 0, &n, 1);
}

bool om_onnx_size_gather(om_onnx *o) {
    const om_onnx_val *x = size_operand(o, 0), *idx = size_operand(o, 1);
    int64_t k[OM_ONNX_LIST], axis = om_onnx_int(o, "axis", 0);
    om_dim out[OM_ONNX_LIST];
    if (!x || !idx || x->rank != 1 || (axis != 0 && axis != -1) || !size_constants(o->g, idx, k)) return false;
    for (uint32_t i = 0; i < idx->n; i++) {
        if (k[i] < 0 && !om_onnx_index_nonneg(o)) k[i] += x->n;
        if (k[i] < 0 || k[i] >= x->n) return false; /* the general rule has the message */
        out[i] = x->list[k[i]];
    }
    return size_set(o, x->dtype, idx->rank, out, idx->n);
}

bool om_onnx_size_slice(om_onnx *o) {
    const om_onnx_val *x = size_operand(o, 0), *start = size_operand(o, 1), *end = size_operand(o, 2),
                      *axes = size_operand(o, 3), *steps = size_operand(o, 4);
    int64_t s, e, st = 1;
    om_dim out[OM_ONNX_LIST];
    uint32_t n = 0;
    if (!x || x->rank != 1 || !start || !end || start->n != 1 || end->n != 1) return false;
    if (om_onnx_has(o, 3) && (!axes || axes->n != 1 || (axes->list[0] != 0 && axes->list[0] != om_dim_int(o->g, -1))))
        return false;
    if (om_onnx_has(o, 4) && (!steps || steps->n != 1 || !om_dim_const(o->g, steps->list[0], &st) || st < 1))
        return false;
    if (!om_dim_const(o->g, start->list[0], &s) || !om_dim_const(o->g, end->list[0], &e)) return false;
    if (s < 0) s = max64(s + x->n, 0);
    if (e < 0) e = max64(e + x->n, 0);
    e = min64(e, x->n);
    for (int64_t i = s; i < e; i += st) {
        out[n++] = x->list[i];
        if (st > OM_ONNX_LIST) break;
    }
    return size_set(o, x->dtype, 1, out, n);
}

bool om_onnx_size_concat(om_onnx *o) {
    om_dim out[OM_ONNX_LIST];
    uint32_t n = 0;
    int dtype = OM_NODTYPE;
    for (int i = 0; i < o->n_in; i++) {
        const om_onnx_val *x = size_operand(o, i);
        if (!x || x->rank != 1 || (dtype && dtype != x->dtype) || n + x->n > OM_ONNX_LIST) return false;
        dtype = x->dtype;
        for (uint32_t k = 0; k < x->n; k++) out[n++] = x->list[k];
    }
    return dtype && size_set(o, dtype, 1, out, n);
}

/* Squeeze, Unsqueeze, Reshape: only the rank changes. */
bool om_onnx_size_rank(om_onnx *o) {
    const om_onnx_val *x = size_operand(o, 0), *to = size_operand(o, 1);
    const char *op = o->node->op_type;
    if (!x || (om_onnx_has(o, 1) && !to)) return false;
    if (!strcmp(op, "Unsqueeze")) return to && x->rank == 0 && to->n == 1 && size_set(o, x->dtype, 1, x->list, 1);
    if (!strcmp(op, "Squeeze")) {
        if (to && to->n == 0) return size_set(o, x->dtype, x->rank, x->list, x->n);
        return x->rank == 1 && x->n == 1 && size_set(o, x->dtype, 0, x->list, 1);
    }
    int64_t d;
    if (!to || to->rank != 1 || to->n > 1) return false;
    if (to->n == 0) return x->n == 1 && size_set(o, x->dtype, 0, x->list, 1);
    if (!om_dim_const(o->g, to->list[0], &d) ||
        (d != -1 && d != x->n && !(d == 0 && x->rank == 1 && !om_onnx_int(o, "allowzero", 0))))
        return false;
    return size_set(o, x->dtype, 1, x->list, x->n);
}

bool om_onnx_size_cast(om_onnx *o) {
    const om_onnx_val *x = size_operand(o, 0);
    int to = om_dtype_from_onnx((int)om_onnx_int(o, "to", 0));
    om_dim out[OM_ONNX_LIST];
    if (!x || (to != OM_I64 && to != OM_I32 && to != OM_BOOL)) return false;
    for (uint32_t i = 0; i < x->n; i++) {
        int64_t lo, hi;
        out[i] = x->list[i];
        if (to != OM_BOOL || x->dtype == OM_BOOL) continue;
        om_onnx_bounds(o->g, x->list[i], 0, &lo, &hi);
        if (!(lo > 0 || hi < 0 || (lo == 0 && hi == 0))) return false;
        out[i] = !(lo == 0 && hi == 0);
    }
    return size_set(o, to, x->rank, out, x->n);
}

bool om_onnx_size_where(om_onnx *o) {
    const om_onnx_val *c = size_operand(o, 0), *x = size_operand(o, 1), *y = size_operand(o, 2);
    om_dim out[OM_ONNX_LIST];
    if (!c || !x || !y || c->dtype != OM_BOOL || x->dtype != y->dtype) return false;
    uint32_t n = 1;
    if (c->n != 1) n = c->n;
    if (x->n != 1) n = x->n;
    if (y->n != 1) n = y->n;
    if ((c->n != n && c->n != 1) || (x->n != n && x->n != 1) || (y->n != n && y->n != 1)) return false;
    for (uint32_t i = 0; i < n; i++) {
        om_dim k = c->list[c->n == 1 ? 0 : i];
        if (k < 0) return false;
        out[i] = k ? x->list[x->n == 1 ? 0 : i] : y->list[y->n == 1 ? 0 : i];
    }
    return size_set(o, x->dtype, c->rank | x->rank | y->rank, out, n);
}

bool om_onnx_size_range(om_onnx *o) {
    const om_onnx_val *a = size_operand(o, 0), *b = size_operand(o, 1), *c = size_operand(o, 2);
    int64_t from, to, step;
    om_dim out[OM_ONNX_LIST];
    uint32_t n = 0;
    if (!a || !b || !c || a->n != 1 || b->n != 1 || c->n != 1 || a->dtype == OM_BOOL) return false;
    if (!om_dim_const(o->g, a->list[0], &from) || !om_dim_const(o->g, b->list[0], &to) ||
        !om_dim_const(o->g, c->list[0], &step) || step == 0)
        return false;
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
        if (n == OM_ONNX_LIST) return false;
        out[n++] = om_dim_int(o->g, i);
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return size_set(o, a->dtype, 1, out, n);
}

bool om_onnx_size_constant_of_shape(om_onnx *o) {
    const om_onnx_val *s = size_operand(o, 0);
    const Onnx__AttributeProto *a = om_onnx_attr(o, "value");
    int64_t n = 1;
    if (!s || s->rank != 1 || s->n > 1 || !a || !a->t) return false;
    if (s->n && (!om_dim_const(o->g, s->list[0], &n) || n < 0 || n > OM_ONNX_LIST)) return false;
    int dtype = om_dtype_from_onnx(a->t->data_type);
    int64_t x;
    if ((dtype != OM_I64 && dtype != OM_I32) || a->t->segment || a->t->n_external_data) return false;
    if (a->t->has_raw_data && a->t->raw_data.len == om_dtype_size(dtype)) {
        int32_t y;
        if (dtype == OM_I64) memcpy(&x, a->t->raw_data.data, 8);
        else memcpy(&y, a->t->raw_data.data, 4), x = y;
    } else if (dtype == OM_I64 && a->t->n_int64_data == 1) x = a->t->int64_data[0];
    else if (dtype == OM_I32 && a->t->n_int32_data == 1) x = a->t->int32_data[0];
    else return false;
    om_dim out[OM_ONNX_LIST];
    for (int64_t i = 0; i < n; i++) out[i] = om_dim_int(o->g, x);
    return size_set(o, dtype, (int)s->n, out, (uint32_t)n);
}

bool om_onnx_size_expand(om_onnx *o) {
    const om_onnx_val *x = size_operand(o, 0), *s = size_operand(o, 1);
    int64_t n = 1;
    om_dim out[OM_ONNX_LIST];
    if (!x || !s || s->rank != 1 || s->n > 1 || (s->n && !om_dim_const(o->g, s->list[0], &n))) return false;
    if (n == 1) n = x->n;
    if (n < 0 || n > OM_ONNX_LIST || (x->n != 1 && x->n != n)) return false;
    for (int64_t i = 0; i < n; i++) out[i] = x->list[x->n == 1 ? 0 : i];
    return size_set(o, x->dtype, x->rank > s->n ? x->rank : (int)s->n, out, (uint32_t)n);
}

bool om_onnx_size_reduce(om_onnx *o) {
    const om_onnx_val *x = size_operand(o, 0);
    const char *op = o->node->op_type;
    if (!x || x->rank != 1 || x->n == 0 || x->dtype == OM_BOOL || om_onnx_int(o, "noop_with_empty_axes", 0))
        return false;
    om_dim r = x->list[0];
    for (uint32_t i = 1; i < x->n; i++) {
        om_dim y = x->list[i];
        r = !strcmp(op, "ReduceProd") ? om_dim_mul(o->g, r, y) : !strcmp(op, "ReduceSum") ? om_dim_add(o->g, r, y)
          : !strcmp(op, "ReduceMax")  ? om_dim_max(o->g, r, y) : om_dim_min(o->g, r, y);
    }
    return size_set(o, x->dtype, om_onnx_int(o, "keepdims", 1) ? 1 : 0, &r, 1);
}
