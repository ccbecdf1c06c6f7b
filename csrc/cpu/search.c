/* search.c - ops/search.c on the CPU: bisection. Comparisons as torch makes them, of NaN too. */
#include "cpu/cpu.h"

typedef struct search_plan {
    int64_t row, per_row, count; /* elements of a row; values that look into one row; all values */
    int dtype;
    bool right;
    const void *sorted, *values; /* of a run, as is what follows */
    int64_t *y;
} search_plan;

om_status om_cpu_prepare_search(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    const om_tensor *x = &a->in[0], *v = &a->in[1];
    search_plan *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    *p = (search_plan){.row = x->dim[x->rank - 1], .count = om_numel(v), .dtype = x->dtype,
                       .right = om_args_int(a, "right", 0) != 0};
    p->per_row = x->rank == 1 ? p->count : v->dim[v->rank - 1];
    OM_CHECK(cx, x->rank == 1 || !p->per_row || om_numel(x) == p->count / p->per_row * p->row,
             "search_sorted: %lld sorted elements for %lld values", (long long)om_numel(x), (long long)p->count);
    return OM_OK;
}

/* bisection: the first place where the element is not before the value */
#define SEARCH(T, BEFORE)                                                                           \
    static void search_##T(const search_plan *p, int64_t begin, int64_t end) {                      \
        for (int64_t i = begin; i < end; i++) {                                                     \
            const T *x = (const T *)p->sorted + i / p->per_row * p->row, v = ((const T *)p->values)[i]; \
            int64_t lo = 0, hi = p->row;                                                            \
            while (lo < hi) {                                                                       \
                const int64_t mid = lo + (hi - lo) / 2;                                             \
                const T e = x[mid];                                                                 \
                if (BEFORE) lo = mid + 1;                                                           \
                else hi = mid;                                                                      \
            }                                                                                       \
            p->y[i] = lo;                                                                           \
        }                                                                                           \
    }
#define ORDERED (p->right ? !(e > v) : !(e >= v)) /* of a NaN in the row neither holds: torch goes on there too */
SEARCH(float, ORDERED)
SEARCH(double, ORDERED)
SEARCH(int64_t, ORDERED)
SEARCH(int32_t, ORDERED)
SEARCH(int16_t, ORDERED)
SEARCH(int8_t, ORDERED)
SEARCH(uint8_t, ORDERED)

static void search_values(void *arg, int64_t begin, int64_t end) {
    const search_plan *p = arg;
    switch (p->dtype) {
    case OM_F32: search_float(p, begin, end); break;
    case OM_F64: search_double(p, begin, end); break;
    case OM_I64: search_int64_t(p, begin, end); break;
    case OM_I32: search_int32_t(p, begin, end); break;
    case OM_I16: search_int16_t(p, begin, end); break;
    case OM_I8: search_int8_t(p, begin, end); break;
    default: search_uint8_t(p, begin, end); break;
    }
}

om_status om_cpu_run_search(om_ctx *cx, const om_args *a) {
    search_plan p = *(const search_plan *)a->prep;
    p.sorted = a->in[0].data, p.values = a->in[1].data, p.y = a->out[0].data;
    om_parallel_for(cx, p.count, 2048, search_values, &p);
    return OM_OK;
}
