/* special.c - ops/special.c on the CPU: pieces of 256 elements, in double, rounded last. */
#include "cpu/cpu.h"
#include "cpu/kernels/special.h"
#include "cpu/strip.h"

#include <math.h>
#include <string.h>

enum { PIECE = 256 };

typedef struct special_plan {
    double (*one)(double);
    double (*two)(double, double);
    int64_t count, size;
    int dtype;
    const char *in[2]; /* of a run, as is what follows */
    char *y;
} special_plan;

static double special_lgamma(double x) { /* lgamma writes the sign to a variable that all threads share */
    int sign;
    return lgamma_r(x, &sign);
}

static const struct { const om_op *op; double (*one)(double); double (*two)(double, double); } SPECIAL[] = {
    {&om_op_acos, acos, NULL}, {&om_op_asin, asin, NULL}, {&om_op_atan, atan, NULL}, {&om_op_acosh, acosh, NULL},
    {&om_op_atanh, atanh, NULL}, {&om_op_tan, tan, NULL}, {&om_op_sinh, sinh, NULL}, {&om_op_cosh, cosh, NULL},
    {&om_op_lgamma, special_lgamma, NULL}, {&om_op_digamma, special_digamma, NULL},
    {&om_op_trigamma, special_trigamma, NULL}, {&om_op_atan2, NULL, atan2}, {&om_op_xlogy, NULL, special_xlogy},
};

om_status om_cpu_prepare_special(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    special_plan *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    *p = (special_plan){.count = om_numel(&a->out[0]), .dtype = a->in[0].dtype,
                        .size = (int64_t)om_dtype_size(a->in[0].dtype)};
    for (size_t i = 0; i < sizeof SPECIAL / sizeof *SPECIAL; i++)
        if (SPECIAL[i].op == a->node->op) p->one = SPECIAL[i].one, p->two = SPECIAL[i].two;
    for (int i = 1; i < a->n_in; i++)
        OM_CHECK(cx, om_numel(&a->in[i]) == p->count, "%s: operands of %lld and %lld elements", a->node->op->name,
                 (long long)p->count, (long long)om_numel(&a->in[i]));
    return OM_OK;
}

static void special_pieces(void *arg, int64_t begin, int64_t end) {
    const special_plan *p = arg;
    double x[PIECE], y[PIECE];
    const bool wide = om_strip_class(p->dtype) == OM_STRIP_D;
    for (int64_t k = begin; k < end; k++) {
        const int64_t from = k * PIECE, n = p->count - from < PIECE ? p->count - from : PIECE;
        for (int j = 0; j < (p->two ? 2 : 1); j++) {
            double *to = j ? y : x;
            float half[PIECE];
            OM_PICK(om_strip)->load[p->dtype](p->in[j] + from * p->size, 1, n, wide ? (void *)to : (void *)half);
            if (!wide)
                for (int64_t i = 0; i < n; i++) to[i] = (double)half[i];
        }
        for (int64_t i = 0; i < n; i++) x[i] = p->two ? p->two(x[i], y[i]) : p->one(x[i]);
        float half[PIECE];
        if (!wide)
            for (int64_t i = 0; i < n; i++) half[i] = (float)x[i];
        OM_PICK(om_strip)->store[p->dtype](wide ? (const void *)x : (const void *)half, n, p->y + from * p->size, 1);
    }
}

om_status om_cpu_run_special(om_ctx *cx, const om_args *a) {
    special_plan p = *(const special_plan *)a->prep;
    for (int i = 0; i < a->n_in; i++) p.in[i] = a->in[i].data;
    p.y = a->out[0].data;
    om_parallel_for(cx, (p.count + PIECE - 1) / PIECE, 8, special_pieces, &p);
    return OM_OK;
}
