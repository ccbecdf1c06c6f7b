/* bisect.c - `om-opt bisect`: which pass changes what a graph computes, and where.
 *
 * The passes run one after the other, as in the engine. After each the interpreter, which plans and fuses nothing,
 * computes the graph before and the graph after on the same random inputs. Results differ by rounding, which is
 * measured: the graph before is computed on inputs that are off by one rounding of its coarsest type, and the largest
 * difference that makes is what an element may be off, thirty times.
 *
 * Of the first pass that goes beyond, the rewriter tells which value of the graph before became which of the graph
 * after (om_rewrite_tell; several rewrites of a pass are joined up). All values that have the same type in both are
 * compared in the order in which they are computed: the first that differs is the wrong application.
 */
#include "graph/exec.h"
#include "tools/tool.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const char om_tool_bisect_usage[] =
    "om-opt bisect FILE [OPTION...]   which pass changes what the graph computes: random inputs, the interpreter\n"
    "\n"
    "  --pass NAME[,NAME...]   passes in order; forward, variant, joint: lists; grad: gradients of all inputs\n"
    "                          (default: forward,variant,grad,joint; joint alone where FILE has gradients)\n"
    "  --tries N               sets of random inputs (3)          --seed N   of the first (1)\n"
    "  --size NAME=N           a size that is a symbol; may be repeated (others: 2 to 7)\n"
    "\n"
    "Exit status: 0 when no pass does, 2 when one does (it is named), 1 with a message on standard error.\n";

enum { MAX_STEPS = 64, MAX_SIZES = 32, MAX_TRIES = 64, NOISES = 2, BATCH = 512 };
static const double BAND = 30, FLOOR = 8; /* roundings */

typedef struct step { const char *name; const om_pass *pass; /* NULL: gradients */ } step;

typedef struct bisect {
    om_ctx *cx;
    step steps[MAX_STEPS];
    int n_steps, n_tries, n_sizes;
    uint64_t seed;
    struct { const char *name; int64_t n; } size[MAX_SIZES];
    om_id *map;             /* of the pass that runs: value before -> value after; NULL: not known */
    uint32_t n_map;
    uint64_t from, to;      /* serials of the graphs it leads between */
} bisect;

/* --- random inputs -------------------------------------------------------------------------------- */

static uint64_t random_next(uint64_t *s) { /* splitmix64 */
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static double random_unit(uint64_t *s) { return (double)(random_next(s) >> 11) / 9007199254740992.0; }

static double dtype_eps(int dtype) {
    return dtype == OM_F64 ? DBL_EPSILON : dtype == OM_F32 ? FLT_EPSILON : dtype == OM_F16 ? 0x1p-10 : 0x1p-7;
}

/* Of the coarsest floating-point type in it. */
static double graph_eps(const om_graph *g) {
    double eps = DBL_EPSILON;
    for (om_id v = 0; v < g->values.n; v++)
        if (om_is_float(om_ty(g, v)->dtype)) eps = fmax(eps, dtype_eps(om_ty(g, v)->dtype));
    return eps;
}

static void tensors_free(om_ctx *cx, om_tensor *t, uint32_t n) {
    for (uint32_t i = 0; t && i < n; i++) om_free(cx, t[i].data);
    om_free(cx, t);
}

static om_status elements_set(om_ctx *cx, om_tensor *t, double (*f)(void *arg, double old), void *arg) {
    const int64_t n = om_numel(t);
    double *x = om_alloc(cx, (size_t)(n + 1) * sizeof *x);
    if (!x) return cx->status;
    om_tensor wide = *t;
    wide.data = x, wide.dtype = OM_F64;
    om_status s = om_copy(cx, t, &wide);
    for (int64_t i = 0; i < n; i++) x[i] = f(arg, x[i]);
    if (s == OM_OK) s = om_copy(cx, &wide, t);
    om_free(cx, x);
    return s;
}

typedef struct fill { uint64_t seed; int role, dtype; double scale; bool zero; } fill;

/* Floats around 0, weights smaller by their length, buffers (variances) above 0; indices, labels, masks: 0 and 1. */
static double fill_next(void *arg, double old) {
    fill *f = arg;
    const double u = random_unit(&f->seed);
    (void)old;
    if (om_is_float(f->dtype)) return f->role == OM_BUFFER ? 0.1 + 0.9 * u : (2 * u - 1) * f->scale;
    return f->zero ? 0 : u < 0.5;
}

typedef struct shake { uint64_t seed; double eps; } shake;
static double shake_next(void *arg, double old) {
    shake *s = arg;
    return old * (1 + s->eps * (2 * random_unit(&s->seed) - 1));
}

static om_status inputs_make(const bisect *b, const om_graph *g, int try, bool zero, om_tensor **out) {
    om_ctx *cx = b->cx;
    uint64_t seed = b->seed + (uint64_t)try * 1000003;
    om_tensor *t = *out = om_alloc(cx, (g->inputs.n + 1) * sizeof *t);
    int64_t *sym = om_alloc(cx, (g->syms.n + 1) * sizeof *sym);
    om_status s = t && sym ? OM_OK : cx->status;
    for (uint32_t i = 0; s == OM_OK && i < g->syms.n; i++) {
        sym[i] = 2 + (int64_t)(random_next(&seed) % 6);
        for (int k = 0; k < b->n_sizes; k++)
            if (!strcmp(b->size[k].name, g->syms.v[i].name)) sym[i] = b->size[k].n;
    }
    for (uint32_t i = 0; s == OM_OK && i < g->syms.n; i++)
        if (g->syms.v[i].bounded) sym[i] = om_dim_eval(g, g->syms.v[i].bound, sym);
    for (uint32_t i = 0; s == OM_OK && i < g->inputs.n; i++) {
        const om_value *v = om_val(g, g->inputs.v[i]);
        s = om_tensor_of(cx, g, g->inputs.v[i], sym, &t[i]);
        if (s == OM_OK) s = om_tensor_alloc(cx, &t[i]);
        if (s != OM_OK) break;
        const int64_t length = t[i].rank > 1 ? t[i].dim[t[i].rank - 1] : 1;
        fill f = {random_next(&seed), v->role, t[i].dtype, 1, zero};
        if (v->role == OM_PARAM) f.scale = 1 / sqrt((double)(length > 0 ? length : 1));
        s = elements_set(cx, &t[i], fill_next, &f);
        for (uint32_t k = 0; k < g->syms.n; k++)
            if (g->syms.v[k].input == i && g->syms.v[k].axis < 0 && t[i].dtype == OM_I64 && t[i].data)
                *(int64_t *)t[i].data = sym[k];
    }
    om_free(cx, sym);
    return s;
}

/* --- comparing ------------------------------------------------------------------------------------ */

static om_status wide_copy(om_ctx *cx, const om_tensor *t, om_tensor *to) {
    *to = *t;
    to->dtype = OM_F64;
    OM_TRY(om_tensor_alloc(cx, to));
    return t->dtype ? om_copy(cx, t, to) : OM_OK;
}

static double element_diff(double x, double y) {
    return x == y || (isnan(x) && isnan(y)) ? 0 : isfinite(x) && isfinite(y) ? fabs(x - y) : INFINITY;
}

typedef struct diff { double most, allowed; } diff;

/* a, b: the same value of both graphs; noise: of the first, on shaken inputs. *d: the element that goes farthest beyond
 * what rounding explains, most <= allowed: none does. */
static om_status tensors_compare(om_ctx *cx, const om_tensor *a, const om_tensor *b, const om_tensor *noise, double eps,
                                 diff *d) {
    om_tensor x, y, z[NOISES];
    *d = (diff){0, 0};
    OM_TRY(wide_copy(cx, a, &x));
    om_status s = wide_copy(cx, b, &y);
    int n_z = 0;
    for (; s == OM_OK && n_z < NOISES; n_z++) s = wide_copy(cx, &noise[n_z], &z[n_z]);
    const int64_t n = s == OM_OK ? om_numel(&x) : 0;
    const double *p = x.data, *q = s == OM_OK ? y.data : NULL;
    double scale = 0, shaken = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(p[i])) scale = fmax(scale, fabs(p[i]));
        for (int k = 0; k < NOISES; k++) shaken = fmax(shaken, element_diff(p[i], ((double *)z[k].data)[i]));
    }
    d->allowed = om_is_float(a->dtype) ? BAND * shaken + FLOOR * eps * scale : shaken;
    for (int64_t i = 0; i < n; i++) d->most = fmax(d->most, element_diff(p[i], q[i]));
    om_free(cx, x.data);
    if (s == OM_OK || n_z) om_free(cx, y.data);
    for (int k = 0; k < n_z; k++) om_free(cx, z[k].data);
    return s;
}

static uint32_t results_count(const om_graph *g) { return g->outputs.n + g->writes.n + g->grads.n; }

/* What g gives: for each set of inputs, and (noises) for these shaken. */
typedef struct results {
    uint32_t n;
    om_tensor *of[MAX_TRIES], *noise[MAX_TRIES][NOISES];
} results;

static void results_free(om_ctx *cx, results *r) {
    for (int t = 0; t < MAX_TRIES; t++) {
        tensors_free(cx, r->of[t], r->n);
        for (int k = 0; k < NOISES; k++) tensors_free(cx, r->noise[t][k], r->n);
    }
    *r = (results){0};
}

static om_status interpret(om_ctx *cx, const om_graph *g, const om_tensor *in, om_tensor **out) {
    *out = om_alloc(cx, (results_count(g) + 1) * sizeof **out);
    return *out ? om_interpret(cx, g, in, 12345, *out) : cx->status;
}

static om_status interpret_shaken(om_ctx *cx, const om_graph *g, const om_tensor *in, double eps, int k,
                                  om_tensor **out) {
    om_tensor *t = om_alloc(cx, (g->inputs.n + 1) * sizeof *t);
    om_status s = t ? OM_OK : cx->status;
    for (uint32_t i = 0; s == OM_OK && i < g->inputs.n; i++) {
        t[i] = in[i];
        t[i].data = NULL;
        s = om_tensor_alloc(cx, &t[i]);
        if (s == OM_OK) s = om_copy(cx, &in[i], &t[i]);
        shake by = {(uint64_t)k * 7919 + i, eps};
        if (s == OM_OK && om_is_float(t[i].dtype)) s = elements_set(cx, &t[i], shake_next, &by);
    }
    if (s == OM_OK) s = interpret(cx, g, t, out);
    tensors_free(cx, t, g->inputs.n);
    return s;
}

static om_status results_make(const bisect *b, const om_graph *g, om_tensor *const *in, bool noises, results *r) {
    const double eps = graph_eps(g);
    *r = (results){.n = results_count(g)};
    for (int t = 0; t < b->n_tries; t++) {
        OM_TRY(interpret(b->cx, g, in[t], &r->of[t]));
        for (int k = 0; noises && k < NOISES; k++)
            OM_TRY(interpret_shaken(b->cx, g, in[t], eps, k, &r->noise[t][k]));
    }
    return OM_OK;
}

/* The first result that differs, and in which try; r->n: none does. */
static om_status results_compare(const bisect *b, const results *x, const results *y, double eps, uint32_t *which,
                                 int *try, diff *d) {
    for (int t = 0; t < b->n_tries; t++)
        for (uint32_t i = 0; i < x->n; i++) {
            om_tensor noise[NOISES];
            for (int k = 0; k < NOISES; k++) noise[k] = x->noise[t][k][i];
            const om_tensor *p = &x->of[t][i], *q = &y->of[t][i];
            *which = i, *try = t;
            if (!p->dtype != !q->dtype) { /* a gradient that is there and one that is none */
                *d = (diff){INFINITY, 0};
                return OM_OK;
            }
            if (!p->dtype) continue;
            OM_TRY(tensors_compare(b->cx, p, q, noise, eps, d));
            if (d->most > d->allowed) return OM_OK;
        }
    *which = x->n;
    return OM_OK;
}

/* --- naming --------------------------------------------------------------------------------------- */

/* The line of the graph's text that makes v, without blanks before it. */
static void line_print(const om_graph *g, om_id v, const char *before) {
    char *text;
    uint32_t at = 1 + g->syms.n + g->inputs.n;
    const om_value *x = om_val(g, v);
    if (om_graph_print(g, &text) != OM_OK) return;
    if (x->input != OM_NONE) at = 1 + g->syms.n + x->input;
    else
        for (om_id w = 0; w < v - x->out; w++) /* constants and nodes, by their first value (text_print.c) */
            at += om_val(g, w)->role == OM_CONST || (om_val(g, w)->node != OM_NONE && om_val(g, w)->out == 0);
    const char *p = text;
    while (at-- && (p = strchr(p, '\n'))) p++;
    if (p) {
        p += strspn(p, " ");
        printf("%s%.*s\n", before, (int)strcspn(p, "\n"), p);
    }
    om_text_free(g->cx, text);
}

static void result_print(const om_graph *g, uint32_t i) {
    if (i < g->outputs.n) {
        const char *name = om_val(g, g->outputs.v[i])->name;
        printf("output %u%s%s%s", i, name ? " (" : "", name ? name : "", name ? ")" : "");
        return;
    }
    i -= g->outputs.n;
    const om_id input = i < g->writes.n ? g->writes.v[i].input : g->grads.v[i - g->writes.n].input;
    const char *name = om_val(g, g->inputs.v[input])->name;
    printf("%s %s", i < g->writes.n ? "the write to" : "the gradient of", name ? name : "an input");
}

static void rewrite_join(void *arg, const om_graph *from, const om_graph *to, const om_id *map) {
    bisect *b = arg;
    if (b->map && from->serial == b->to) { /* a further rewrite of the same pass */
        for (om_id v = 0; v < b->n_map; v++)
            if (b->map[v] != OM_NONE) b->map[v] = map[b->map[v]];
    } else if (from->serial == b->from) {
        om_free(b->cx, b->map);
        b->map = om_alloc(b->cx, ((size_t)from->values.n + 1) * sizeof *b->map);
        if (!b->map) return;
        b->n_map = from->values.n;
        memcpy(b->map, map, b->n_map * sizeof *map);
    } else {
        return;
    }
    b->to = to->serial;
}

static om_status outputs_push(om_graph *g, const om_id *v, uint32_t n) {
    g->outputs.n = 0;
    for (uint32_t i = 0; i < n; i++) {
        om_id *o = OM_PUSH(g->cx, &g->outputs);
        if (!o) return g->cx->status;
        *o = v[i];
    }
    return OM_OK;
}

static bool same_type(const om_graph *g, om_id v, const om_graph *h, om_id w, const int64_t *sym) {
    om_tensor a, b;
    return om_ty(g, v)->dtype == om_ty(h, w)->dtype && om_ty(g, v)->rank == om_ty(h, w)->rank &&
           om_tensor_of(g->cx, g, v, sym, &a) == OM_OK && om_tensor_of(h->cx, h, w, sym, &b) == OM_OK &&
           !memcmp(a.dim, b.dim, a.rank * sizeof *a.dim);
}

/* Which application of a pass that is wrong: before and after are not used again. */
static om_status application_find(bisect *b, om_graph *before, om_graph *after, const char *pass, om_tensor *in) {
    om_ctx *cx = b->cx;
    om_id *v = om_alloc(cx, (before->values.n + 1) * sizeof *v), *w = om_alloc(cx, (before->values.n + 1) * sizeof *w);
    int64_t *sym = om_alloc(cx, (before->syms.n + 1) * sizeof *sym);
    om_status s = v && w && sym ? om_syms_bind(cx, before, in, sym) : cx->status;
    const double eps = graph_eps(before);
    uint32_t n = 0;
    bool found = false;
    for (om_id x = 0; s == OM_OK && b->map && x < before->values.n; x++) {
        const om_value *val = om_val(before, x);
        const om_id y = b->map[x];
        if (val->node == OM_NONE || y == OM_NONE || y >= after->values.n) continue;
        if (!om_is_float(val->type.dtype) && !om_is_int(val->type.dtype)) continue;
        const om_node *node = &before->nodes.v[val->node];
        /* what lies inside of a chain has no value after it: fuse.c maps it to its operand's */
        if (!strcmp(pass, "fuse") && node->n_in && om_ins(before, node)[0] != OM_NONE &&
            y == b->map[om_ins(before, node)[0]])
            continue;
        if (!same_type(before, x, after, y, sym)) continue;
        v[n] = x, w[n++] = y;
    }
    before->writes.n = after->writes.n = before->grads.n = after->grads.n = 0;
    for (uint32_t at = 0; s == OM_OK && at < n && !found; at += BATCH) {
        const uint32_t m = n - at < BATCH ? n - at : BATCH;
        om_tensor *x = NULL, *y = NULL, *z[NOISES] = {0};
        s = outputs_push(before, v + at, m);
        if (s == OM_OK) s = outputs_push(after, w + at, m);
        if (s == OM_OK) s = interpret(cx, before, in, &x);
        if (s == OM_OK) s = interpret(cx, after, in, &y);
        for (int k = 0; k < NOISES && s == OM_OK; k++) s = interpret_shaken(cx, before, in, eps, k, &z[k]);
        for (uint32_t i = 0; s == OM_OK && i < m && !found; i++) {
            om_tensor noise[NOISES];
            diff d;
            for (int k = 0; k < NOISES; k++) noise[k] = z[k][i];
            s = tensors_compare(cx, &x[i], &y[i], noise, eps, &d);
            if (s != OM_OK || !(d.most > d.allowed)) continue;
            found = true;
            printf("  first value that differs, by %.3g (rounding explains %.3g):\n", d.most, d.allowed);
            line_print(before, v[at + i], "    before  ");
            line_print(after, w[at + i], "    after   ");
        }
        tensors_free(cx, x, m);
        tensors_free(cx, y, m);
        for (int k = 0; k < NOISES; k++) tensors_free(cx, z[k], m);
    }
    if (s == OM_OK && !found) printf("  no value inside the graph is known to differ: the application is not told\n");
    om_free(cx, v);
    om_free(cx, w);
    om_free(cx, sym);
    return s;
}

/* --- the search ----------------------------------------------------------------------------------- */

static om_status steps_add(bisect *b, char *names) {
    for (char *rest, *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        const om_pass *one[2], *const *list = om_tool_list(name, one);
        const bool grad = !strcmp(name, "grad");
        OM_CHECK(b->cx, grad || list[0], "no pass is named '%s'; om-opt --list shows them", name);
        for (int i = 0; grad ? i < 1 : list[i] != NULL; i++) {
            OM_CHECK(b->cx, b->n_steps < MAX_STEPS, "more than %d passes", MAX_STEPS);
            b->steps[b->n_steps++] = (step){grad ? "grad" : list[i]->name, grad ? NULL : list[i]};
        }
    }
    return OM_OK;
}

static om_status options_read(bisect *b, int argc, char **argv) {
    for (int i = 3; i < argc; i += 2) {
        char *value = i + 1 < argc ? argv[i + 1] : NULL, *end = value;
        OM_CHECK(b->cx, value, "'%s' is no option of bisect (or lacks its argument); om-opt bisect --help", argv[i]);
        if (!strcmp(argv[i], "--pass")) {
            OM_TRY(steps_add(b, value));
        } else if (!strcmp(argv[i], "--tries")) {
            b->n_tries = (int)strtol(value, &end, 10);
            const bool fits = !*end && b->n_tries > 0 && b->n_tries <= MAX_TRIES;
            OM_CHECK(b->cx, fits, "--tries %s: 1 to %d", value, MAX_TRIES);
        } else if (!strcmp(argv[i], "--seed")) {
            b->seed = strtoull(value, &end, 10);
            OM_CHECK(b->cx, !*end, "--seed %s: an integer", value);
        } else if (!strcmp(argv[i], "--size")) {
            char *eq = strchr(value, '=');
            const int64_t n = eq ? strtoll(eq + 1, &end, 10) : 0;
            OM_CHECK(b->cx, eq && eq[1] && !*end && n >= 0 && b->n_sizes < MAX_SIZES, "--size %s: NAME=N", value);
            *eq = 0;
            b->size[b->n_sizes].name = value, b->size[b->n_sizes++].n = n;
        } else {
            return om_fail(b->cx, OM_INVALID, "'%s' is no option of bisect; om-opt bisect --help", argv[i]);
        }
    }
    return OM_OK;
}

/* Inputs that g can be computed on. Where an index is out of range, all are 0. */
static om_status tries_make(const bisect *b, const om_graph *g, om_tensor **in, results *r) {
    for (int zero = 0;; zero++) {
        om_status s = OM_OK;
        for (int t = 0; s == OM_OK && t < b->n_tries; t++) s = inputs_make(b, g, t, zero, &in[t]);
        if (s == OM_OK) s = results_make(b, g, in, true, r);
        if (s == OM_OK || zero || s != OM_INVALID) return s;
        om_ctx_clear(b->cx);
        results_free(b->cx, r);
        for (int t = 0; t < b->n_tries; t++) tensors_free(b->cx, in[t], g->inputs.n), in[t] = NULL;
    }
}

static om_status step_run(bisect *b, const step *p, om_graph *g, om_graph **out) {
    om_status s;
    *out = NULL;
    if (!p->pass) { /* om_tool_grad replaces the graph */
        char *text, all[] = "all";
        OM_TRY(om_graph_print(g, &text));
        s = om_graph_parse(b->cx, text, out);
        om_text_free(b->cx, text);
        return s == OM_OK ? om_tool_grad(b->cx, out, all) : s;
    }
    om_free(b->cx, b->map);
    b->map = NULL;
    b->from = g->serial;
    om_rewrite_tell(rewrite_join, b);
    s = om_pass_apply(b->cx, p->pass, g, out);
    om_rewrite_tell(NULL, NULL);
    if (s == OM_OK) s = om_verify(*out);
    return s;
}

/* *g: the graph before the first pass. 0: no pass is wrong, 2: one is and was named, 1: an error, in b->cx */
static int search(bisect *b, om_graph **g) {
    om_ctx *cx = b->cx;
    om_tensor *in[MAX_TRIES] = {0};
    uint32_t n_in = (*g)->inputs.n, which;
    results x = {0}, y = {0};
    om_graph *next = NULL;
    int rc = 0, try;
    diff d;
    om_status s = tries_make(b, *g, in, &x);
    for (int i = 0; i < b->n_steps && s == OM_OK && !rc; i++) {
        const step *p = &b->steps[i];
        s = step_run(b, p, *g, &next);
        if (s != OM_OK) {
            printf("pass %d of %d, %s, fails: %s\n", i + 1, b->n_steps, p->name, om_ctx_message(cx));
            rc = 2;
        } else if (!p->pass) { /* another graph: its results are compared from here on */
            results_free(cx, &x);
            for (int t = 0; t < b->n_tries; t++) tensors_free(cx, in[t], n_in), in[t] = NULL;
            n_in = next->inputs.n;
            s = tries_make(b, next, in, &x);
        } else {
            s = results_make(b, next, in, true, &y);
            if (s != OM_OK) {
                printf("pass %d of %d, %s: its graph cannot be computed: %s\n", i + 1, b->n_steps, p->name,
                       om_ctx_message(cx));
                rc = 2;
            }
            if (s == OM_OK) s = results_compare(b, &x, &y, graph_eps(*g), &which, &try, &d);
            if (s == OM_OK && which < x.n) {
                rc = 2;
                printf("pass %d of %d, %s, is wrong: ", i + 1, b->n_steps, p->name);
                result_print(*g, which);
                printf(" differs by %.3g (rounding explains %.3g), inputs of seed %llu, try %d\n", d.most, d.allowed,
                       (unsigned long long)b->seed, try);
                s = application_find(b, *g, next, p->name, in[try]);
            }
            results_free(cx, &x);
            x = y;
            y = (results){0};
        }
        om_graph_free(*g);
        *g = next;
        next = NULL;
    }
    if (s == OM_OK && !rc)
        printf("%d passes, %d sets of inputs: none changes a result beyond rounding\n", b->n_steps, b->n_tries);
    results_free(cx, &x);
    results_free(cx, &y);
    for (int t = 0; t < b->n_tries; t++) tensors_free(cx, in[t], n_in);
    om_free(cx, b->map);
    return rc ? rc : s == OM_OK ? 0 : 1;
}

int om_tool_bisect(om_ctx *cx, int argc, char **argv) {
    if (argc < 3 || !strcmp(argv[2], "--help") || !strcmp(argv[2], "-h")) {
        fputs(om_tool_bisect_usage, argc < 3 ? stderr : stdout);
        return argc < 3;
    }
    bisect b = {.cx = cx, .n_tries = 3, .seed = 1};
    om_graph *g = NULL;
    om_status s = options_read(&b, argc, argv);
    if (s == OM_OK) s = om_tool_load(cx, argv[2], &g);
    if (s == OM_OK && !b.n_steps) {
        char every[] = "forward,variant,grad,joint", joint[] = "joint";
        s = steps_add(&b, g->grads.n ? joint : every);
    }
    const int rc = s == OM_OK ? search(&b, &g) : 1;
    om_graph_free(g);
    return rc == 1 ? om_tool_fail(cx, argv[2]) : rc;
}
