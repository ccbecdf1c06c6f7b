/* lower.c - records of launches, and the table of rows (lower.h). */
#include "cuda/lower.h"
#include "cuda/scratch.h"
#include "ops/attr.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* --- records ------------------------------------------------------------------------------------------ */

void *om_gpu_add(om_lower *l, om_gpu_kernel k, int64_t gx, int64_t gy, int64_t gz, uint32_t block, size_t shared,
                 size_t size) {
    om_gpu_launch *n = om_arena_alloc(l->mem, sizeof *n);
    uint8_t *param = n ? om_arena_alloc(l->mem, size) : NULL;
    if (!param) return NULL;
    if (size > OM_GPU_PARAM || gx > INT32_MAX || gy > 65535 || gz > 65535) {
        om_fail(l->cx, OM_UNSUPPORTED, "%s: sizes beyond a grid of the GPU's",
                l->a->node ? l->a->node->op->name : "copy");
        return NULL;
    }
    *n = (om_gpu_launch){.kernel = (uint16_t)k,
                         .size = (uint16_t)size,
                         .grid = {(uint32_t)gx, (uint32_t)gy, (uint32_t)gz},
                         .block = block,
                         .shared = (uint32_t)shared,
                         .param = param};
    if (!gx || !gy || !gz) { /* nothing to do: in nobody's list */
        l->last = n;
        return param;
    }
    om_gpu_launch **end = &l->call->first;
    while (*end) end = &(*end)->next;
    *end = l->last = n;
    return param;
}

static void reloc_add(om_lower *l, void *field, om_gpu_reloc r) {
    om_gpu_launch *n = l->last;
    if (n->n_reloc == n->cap_reloc) {
        const uint16_t cap = (uint16_t)(n->cap_reloc ? 2 * n->cap_reloc : 8);
        om_gpu_reloc *more = om_arena_alloc(l->mem, cap * sizeof *more);
        if (!more) return;
        if (n->n_reloc) memcpy(more, n->reloc, n->n_reloc * sizeof *more);
        n->reloc = more, n->cap_reloc = cap;
    }
    r.at = (uint16_t)((uint8_t *)field - n->param);
    n->reloc[n->n_reloc++] = r;
}

static void span_of(const om_tensor *t, int64_t *lo, int64_t *hi) {
    const int64_t e = (int64_t)om_dtype_size(t->dtype);
    *lo = 0, *hi = e;
    for (int i = 0; i < t->rank; i++) {
        const int64_t far = (t->dim[i] - 1) * t->stride[i] * e;
        if (!t->dim[i]) *hi = *lo;
        else *(far < 0 ? lo : hi) += far;
        if (!t->dim[i]) return;
    }
}

static const om_tensor *operand(const om_lower *l, int i) {
    return i < l->a->n_in ? &l->a->in[i] : &l->a->out[i - l->a->n_in];
}

void om_gpu_part(om_lower *l, void *field, int i, int64_t offset, int64_t lo, int64_t hi, int mode) {
    reloc_add(l, field, (om_gpu_reloc){.what = OM_GPU_ARG, .mode = (uint8_t)mode, .arg = (uint16_t)i, .offset = offset,
                                       .lo = lo, .hi = hi});
}

static void whole(om_lower *l, void *field, int i, int mode) {
    int64_t lo, hi;
    if (i >= l->a->n_in + l->a->n_out || !operand(l, i)->dtype) return;
    span_of(operand(l, i), &lo, &hi);
    om_gpu_part(l, field, i, 0, lo, hi, mode);
}
void om_gpu_in(om_lower *l, void *field, int i) {
    if (i < l->a->n_in) whole(l, field, i, OM_GPU_READ);
}
void om_gpu_out(om_lower *l, void *field, int i, int mode) { whole(l, field, l->a->n_in + i, mode); }

void om_gpu_scratch_at(om_lower *l, void *field, int64_t offset, int64_t bytes, int mode) {
    reloc_add(l, field, (om_gpu_reloc){.what = OM_GPU_SCRATCH, .mode = (uint8_t)mode, .offset = offset, .hi = bytes});
}
void om_gpu_scalars_at(om_lower *l, void *field) {
    reloc_add(l, field, (om_gpu_reloc){.what = OM_GPU_SCALARS, .mode = OM_GPU_READ, .hi = sizeof(om_scalars)});
}

void om_gpu_guard_at(om_lower *l, void *field) {
    reloc_add(l, field, (om_gpu_reloc){.what = OM_GPU_GUARD, .mode = OM_GPU_READ, .hi = sizeof(om_gpu_fault)});
}

/* --- sites: who reports a fault. A process has as many as its graphs have different indexing operators and lines. */

typedef struct site { const char *op; char at[400]; int64_t ignore; } site;
static pthread_mutex_t site_lock = PTHREAD_MUTEX_INITIALIZER;
static site *sites;
static uint32_t n_sites;

static uint32_t site_of(om_lower *l) {
    const om_node *n = l->a->node;
    site s = {.op = n->op->name, .ignore = om_attr_int(l->a->attr, l->a->n_attr, "ignore_index", -100)};
    const om_scope *where = l->graph && n->scope < l->graph->scopes.n ? &l->graph->scopes.v[n->scope] : NULL;
    if (where && where->file) snprintf(s.at, sizeof s.at, " (%s:%d)", where->file, where->line);
    uint32_t i = 0;
    pthread_mutex_lock(&site_lock);
    while (i < n_sites && (sites[i].op != s.op || sites[i].ignore != s.ignore || strcmp(sites[i].at, s.at))) i++;
    if (i == n_sites) {
        site *more = i % 64 ? sites : realloc(sites, (i + 64) * sizeof *sites);
        if (more) sites = more, sites[n_sites++] = s;
        else om_fail(l->cx, OM_NOMEM, "no memory for the place of a fault");
    }
    pthread_mutex_unlock(&site_lock);
    return i + 1;
}

uint32_t om_gpu_fault_at(om_lower *l, void *field) {
    reloc_add(l, field, (om_gpu_reloc){.what = OM_GPU_FAULT, .mode = OM_GPU_READ | OM_GPU_WRITE,
                                       .hi = sizeof(om_gpu_fault)});
    return site_of(l);
}

om_status om_gpu_site_fail(om_ctx *cx, const om_gpu_fault *f) {
    site s = {.op = "?"};
    char allowed[64] = "none is allowed: there are no entries";
    pthread_mutex_lock(&site_lock);
    if (f->site && f->site <= n_sites) s = sites[f->site - 1];
    pthread_mutex_unlock(&site_lock);
    if (f->limit > 0) snprintf(allowed, sizeof allowed, "0 to %lld", (long long)f->limit - 1);
    if (f->kind == OM_FAULT_LABEL)
        return om_fail(cx, OM_INVALID, "%s: label %lld in row %lld; %s or ignore_index %lld are allowed%s", s.op,
                       (long long)f->value, (long long)f->position, allowed, (long long)s.ignore, s.at);
    return om_fail(cx, OM_INVALID, "%s: index %lld at position %lld is out of range; %s%s%s", s.op,
                   (long long)f->value, (long long)f->position, allowed, f->limit > 0 ? " are allowed" : "", s.at);
}

/* --- rows --------------------------------------------------------------------------------------------- */

static om_lower_fn lowerings[OM_N_OPS];
static om_row rows[OM_N_OPS];

om_status om_gpu_host(om_lower *l) {
    const om_row *cpu = &om_device_cpu.rows[l->a->node->op->id];
    l->call->first = NULL;
    l->call->host = true;
    l->call->host_workers = om_num_threads(l->cx);
    l->call->host_scratch = cpu->scratch(l->cx, l->a);
    OM_TRY(l->cx->status);
    return cpu->prepare(l->cx, l->mem, l->a, &l->call->host_prep);
}

om_status om_gpu_check(om_lower *l) {
    const void *none = NULL;
    return om_device_cpu.rows[l->a->node->op->id].prepare(l->cx, l->mem, l->a, &none);
}

static om_status prepare(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {
    om_lower l = {.cx = cx, .mem = mem, .a = a, .call = om_arena_alloc(mem, sizeof *l.call), .graph = a->graph};
    if (!l.call) return cx->status;
    *prep = l.call;
    const om_lower_fn fn = lowerings[a->node->op->id];
    const om_status s = fn ? fn(&l) : om_gpu_host(&l);
    return s == OM_OK ? cx->status : s;
}

static om_status run(om_ctx *cx, const om_args *a) {
    return om_fail(cx, OM_INTERNAL, "%s: the GPU's calls are launched by slice, not by row", a->node->op->name);
}

static void rows_fill(void) {
    memcpy(rows, om_device_cpu.rows, sizeof rows);
    for (int i = 0; i < OM_N_OPS; i++) {
        if (!rows[i].run) continue;
        rows[i].scratch = om_gpu_scratch_none;
        rows[i].prepare = prepare;
        rows[i].run = run;
    }
#define ROW(op, fn, sc) lowerings[OM_OP_##op] = om_lower_##fn, rows[OM_OP_##op].scratch = om_gpu_scratch_##sc;
#include "cuda/cuda.def"
#undef ROW
    rows[OM_OP_compress].inplace = 0; /* all rows are moved at once */
#define DENSE(op) rows[OM_OP_##op].dense = OM_ALL
    DENSE(adamw_step), DENSE(sgd_step), DENSE(lamb_step), DENSE(clip_by_norm), DENSE(accumulate);
    DENSE(l2_norm_all), DENSE(all_finite);
#undef DENSE
#define PW(op, ...) lowerings[OM_OP_##op] = om_lower_strip;
#include "graph/pointwise.def"
#undef PW
}

const om_row *om_cuda_rows(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, rows_fill);
    return rows;
}

int64_t om_gpu_scratch_none(om_ctx *cx, const om_args *a) {
    (void)cx, (void)a;
    return 0;
}
