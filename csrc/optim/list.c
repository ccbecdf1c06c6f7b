/* list.c - see list.h. Checking costs a few comparisons per tensor; the common case (everything row-major) takes no
 * copies. */
#include "optim/list.h"

#include <stdio.h>

/* One row per tensor of a parameter: where it stands in om_optim_param, and where its pointer and type go in the
 * span. */
typedef struct field { const char *name; size_t tensor, ptr, dtype; bool write; } field;
#define FIELD(nm, text, dt, wr) {text, offsetof(om_optim_param, nm), offsetof(om_optim_span, nm), dt, wr}
#define NO_DTYPE SIZE_MAX
static const field fields[] = {
    FIELD(p, "weight", offsetof(om_optim_span, tp), true),
    FIELD(g, "gradient", offsetof(om_optim_span, tg), false),
    FIELD(m, "first moment", offsetof(om_optim_span, tm), true),
    FIELD(v, "second moment", offsetof(om_optim_span, tv), true),
    FIELD(w, "master weight", NO_DTYPE, true),
    FIELD(d, "delta", offsetof(om_optim_span, td), true),
};
enum { N_FIELDS = sizeof fields / sizeof *fields };

bool om_optim_gapless(const om_tensor *t) {
    if (om_is_dense(t)) return true;
    const int64_t numel = om_numel(t);
    for (int64_t expect = 1;;) { /* find the axes from the innermost outwards */
        int next = -1;
        for (int i = 0; i < t->rank; i++)
            if (t->dim[i] > 1 && t->stride[i] == expect) next = i;
        if (next < 0) return expect == numel;
        expect *= t->dim[next];
    }
}

bool om_optim_same_order(const om_tensor *a, const om_tensor *b) {
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] > 1 && a->stride[i] != b->stride[i]) return false;
    return true;
}

static void list_sizes_text(const om_tensor *t, char *buf, size_t size) {
    size_t used = (size_t)snprintf(buf, size, "(");
    for (int i = 0; i < t->rank && used < size; i++)
        used += (size_t)snprintf(buf + used, size - used, i ? ", %lld" : "%lld", (long long)t->dim[i]);
    if (used < size) snprintf(buf + used, size - used, ")");
}

om_status om_optim_check(om_ctx *cx, const char *op, om_optim_store store, const om_optim_param *q, int index) {
    const bool wide = q->p.dtype == OM_F64;
    OM_CHECK(cx, store >= OM_STORE_NEAREST && store <= OM_STORE_STOCHASTIC,
             "%s: store %d is none of om_optim_store", op, (int)store);
    for (int f = 0; f < N_FIELDS; f++) {
        const om_tensor *t = (const om_tensor *)(const void *)((const char *)q + fields[f].tensor);
        if (t->dtype == OM_NODTYPE) {
            OM_CHECK(cx, f > 1, "%s: parameter %d has no %s", op, index, fields[f].name);
            continue;
        }
        OM_CHECK(cx, t->device == q->p.device,
                 "%s: the %s of parameter %d is on device %d, its weight on %d (-1: the CPU); they must be equal", op,
                 fields[f].name, index, t->device, q->p.device);
        bool same = t->rank == q->p.rank;
        for (int i = 0; same && i < t->rank; i++) same = t->dim[i] == q->p.dim[i];
        if (!same) {
            char a[160], b[160];
            list_sizes_text(t, a, sizeof a), list_sizes_text(&q->p, b, sizeof b);
            return om_fail(cx, OM_INVALID, "%s: the %s of parameter %d has sizes %s, its weight %s; they must be equal",
                           op, fields[f].name, index, a, b);
        }
        const bool is_w = fields[f].dtype == NO_DTYPE;
        const bool type_ok = is_w   ? t->dtype == (store == OM_STORE_SPLIT ? OM_I16 : OM_F32)
                             : wide ? t->dtype == OM_F64
                                    : t->dtype == OM_F32 || t->dtype == OM_BF16 || t->dtype == OM_F16;
        OM_CHECK(cx, type_ok, "%s: the %s of parameter %d is %s, its weight %s; allowed: %s", op, fields[f].name, index,
                 om_dtype_name(t->dtype), om_dtype_name(q->p.dtype),
                 is_w   ? "f32 (or i16 for a split master)"
                 : wide ? "f64 with an f64 weight"
                        : "f32, bf16 or f16 (f64 only when all of them are)");
    }
    const bool has_w = q->w.dtype != OM_NODTYPE, needs_w = store == OM_STORE_MASTER || store == OM_STORE_SPLIT;
    OM_CHECK(cx, has_w == needs_w, "%s: parameter %d %s a master weight", op, index, has_w ? "must not have" : "needs");
    OM_CHECK(
        cx, !((store == OM_STORE_SPLIT || store == OM_STORE_STOCHASTIC) && q->p.dtype != OM_BF16),
        "%s: split master weights and stochastic rounding are for bf16 weights; parameter %d is %s: use an f32 master",
        op, index, om_dtype_name(q->p.dtype));
    OM_CHECK(cx, !(wide && store != OM_STORE_NEAREST), "%s: parameter %d is f64 and needs no master weight", op, index);
    return OM_OK;
}

om_status om_optim_temp_make(om_optim_list *l, om_tensor *t, const om_tensor *order, bool write) {
    om_optim_temp *x = OM_PUSH(l->cx, &l->temps);
    if (!x) return OM_NOMEM;
    x->orig = *t;
    x->write = write;
    x->tmp = *t;
    memcpy(x->tmp.stride, order->stride, sizeof x->tmp.stride);
    x->tmp.data = om_alloc(l->cx, (size_t)om_numel(t) * om_dtype_size(t->dtype));
    if (!x->tmp.data) return OM_NOMEM;
    OM_TRY(om_copy(l->cx, t, &x->tmp));
    *t = x->tmp;
    return OM_OK;
}

om_status om_optim_start(om_ctx *cx, const char *op, int n, om_optim_list *l) {
    *l = (om_optim_list){.cx = cx, .op = op};
    l->span = om_alloc(cx, sizeof *l->span * (size_t)(n + 1));
    l->param = om_alloc(cx, sizeof *l->param * (size_t)(n + 1));
    l->first = om_alloc(cx, sizeof *l->first * (size_t)(n + 1));
    return l->span && l->param && l->first ? OM_OK : OM_NOMEM;
}

om_optim_span *om_optim_add(om_optim_list *l, int param, int64_t numel) {
    om_optim_span *s = &l->span[l->n];
    s->n = numel;
    l->param[l->n] = (uint32_t)param;
    l->first[l->n + 1] = l->first[l->n] + (numel + OM_OPTIM_BLOCK - 1) / OM_OPTIM_BLOCK;
    l->n++;
    return s;
}

om_status om_optim_open(om_ctx *cx, const char *op, om_optim_store store, uint64_t seed, bool write_weights,
                        const om_optim_param *ps, int n, om_optim_list *l) {
    OM_TRY(om_optim_start(cx, op, n, l));
    for (int i = 0; i < n; i++) {
        om_optim_param q = ps[i];
        OM_TRY(om_optim_check(cx, op, store, &q, i));
        if (q.p.device != -1)
            return om_fail(cx, OM_UNSUPPORTED, "%s: parameter %d is on CUDA device %d; these are the CPU kernels", op,
                           i, q.p.device);
        const int64_t numel = om_numel(&q.p);
        if (!numel) continue;
        om_tensor order = q.p;
        if (!om_optim_gapless(&q.p)) {
            for (int a = 0; a < q.p.rank; a++)
                OM_CHECK(cx, !(q.p.dim[a] > 1 && q.p.stride[a] == 0),
                         "%s: parameter %d is an expanded tensor (stride 0 in axis %d); several elements share memory: "
                         "clone it first",
                         op, i, a);
            om_dense_strides(&order);
        }
        om_optim_span *s = om_optim_add(l, i, numel);
        for (int f = 0; f < N_FIELDS; f++) {
            om_tensor *t = (om_tensor *)(void *)((char *)&q + fields[f].tensor);
            if (t->dtype == OM_NODTYPE) continue;
            if (!om_optim_same_order(t, &order))
                OM_TRY(om_optim_temp_make(l, t, &order, fields[f].write && (f || write_weights)));
            memcpy((char *)s + fields[f].ptr, &t->data, sizeof(void *));
            if (fields[f].dtype != NO_DTYPE) *((uint8_t *)s + fields[f].dtype) = t->dtype;
        }
        s->store = (uint8_t)store;
        s->seed = seed;
        s->stream = ps[i].stream;
    }
    return OM_OK;
}

om_status om_optim_close(om_optim_list *l, om_status s) {
    for (uint32_t i = 0; i < l->temps.n; i++) {
        om_optim_temp *x = &l->temps.v[i];
        if (s == OM_OK && x->write) s = om_copy(l->cx, &x->tmp, &x->orig);
        om_free(l->cx, x->tmp.data);
    }
    om_free(l->cx, l->temps.v);
    om_free(l->cx, l->span);
    om_free(l->cx, l->param);
    om_free(l->cx, l->first);
    return s;
}

int om_optim_find(const om_optim_list *l, int64_t b) {
    int lo = 0, hi = l->n; /* first[lo] <= b < first[hi] */
    while (hi - lo > 1) {
        const int mid = lo + (hi - lo) / 2;
        if (l->first[mid] <= b) lo = mid;
        else hi = mid;
    }
    return lo;
}

om_optim_span om_optim_part(const om_optim_list *l, int i, int64_t b, int64_t blocks) {
    om_optim_span s = l->span[i];
    const int64_t begin = (b - l->first[i]) * OM_OPTIM_BLOCK;
    s.index = begin;
    s.n = s.n - begin < blocks * OM_OPTIM_BLOCK ? s.n - begin : blocks * OM_OPTIM_BLOCK;
    s.p = (char *)s.p + begin * (int64_t)om_dtype_size(s.tp);
    if (s.g) s.g = (char *)s.g + begin * (int64_t)om_dtype_size(s.tg);
    if (s.m) s.m = (char *)s.m + begin * (int64_t)om_dtype_size(s.tm);
    if (s.v) s.v = (char *)s.v + begin * (int64_t)om_dtype_size(s.tv);
    if (s.w) s.w = (char *)s.w + begin * (s.store == OM_STORE_SPLIT ? 2 : 4);
    if (s.d) s.d = (char *)s.d + begin * (int64_t)om_dtype_size(s.td);
    return s;
}

void om_optim_range(const om_optim_list *l, int64_t begin, int64_t end, bool reverse, om_optim_fn fn, void *arg) {
    if (reverse) {
        int i = om_optim_find(l, end - 1);
        for (int64_t b = end - 1; b >= begin; b--) {
            while (l->first[i] > b) i--;
            const om_optim_span s = om_optim_part(l, i, b, 1);
            fn(arg, i, b, &s);
        }
        return;
    }
    int i = om_optim_find(l, begin);
    for (int64_t b = begin; b < end; b++) {
        while (l->first[i + 1] <= b) i++;
        const om_optim_span s = om_optim_part(l, i, b, 1);
        fn(arg, i, b, &s);
    }
}

typedef struct block_run {
    const om_optim_list *l;
    om_optim_fn fn;
    void *arg;
} block_run;

static void block_range(void *arg, int64_t begin, int64_t end) {
    const block_run *r = arg;
    om_optim_range(r->l, begin, end, false, r->fn, r->arg);
}

void om_optim_blocks(const om_optim_list *l, om_optim_fn fn, void *arg) {
    block_run r = {l, fn, arg};
    om_parallel_for(l->cx, l->first[l->n], 2, block_range, &r);
}
