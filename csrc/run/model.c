/* model.c - a captured graph and what is derived from it: variants (joint graphs) and plans, each made once and cached.
 *
 *   load      ONNX -> graph -> om_passes_forward
 *   variant   forward graph -> gradients for what is wanted and arrives -> om_passes_joint, where a set of flags, a
 *             policy's or the caller's, says what is computed again -> segments
 *   plan      per sizes and strides of the inputs; the least recently used of more than MAX_PLANS leaves the cache. Who
 *             uses it, a run or a forward in flight, still finds it; the last one to let go frees it
 *
 * fork: a child has one thread, so a lock that another thread held would never be given back, and what it guarded would
 * be half done. All locks are therefore taken before a fork and given back after it, in the parent and in the child.
 */
#include "passes/passes.h"
#include "passes/remat.h"
#include "run/budget.h"
#include "graph/sabotage.h"

#include <pthread.h>
#include <stdlib.h>

enum { MAX_PLANS = 512, MAX_VARIANTS = 256 };

struct om_model {
    om_ctx *cx;              /* services for everything that lives as long as the model */
    om_graph *g;
    pthread_mutex_t lock;    /* variants, plans, cx */
    om_variant variant[MAX_VARIANTS];
    _Atomic int n_variants;  /* grows when the new one is there: read without the lock, too */
    om_plan *plan[MAX_PLANS];
    int n_plans;
    om_plan *old;            /* left the cache, still in use */
    om_parts *lent;          /* arena in which the last backward has put gradients; or NULL */
    bool lent_fleeting;      /* the host was going to keep none of them */
    bool held[2];            /* gradients, fleeting ones, were still there when a forward began: no more of these */
    om_budget *budget;       /* one for each set of gradients that was asked for with one */
    om_model *next, **link;  /* of all models */
    uint64_t clock;
    double load_ms;
    uint8_t *differentiable; /* per user output */
    char **output_name;      /* the file's; NULL: it was no file */
    bool profiling;
    struct { uint64_t count; double ms; } profile[OM_N_PROFILE];
};

static pthread_mutex_t models_lock = PTHREAD_MUTEX_INITIALIZER;
static om_model *models;

static void models_fork(void) {
    pthread_mutex_lock(&models_lock);
    for (om_model *m = models; m; m = m->next) pthread_mutex_lock(&m->lock);
}

static void models_forked(void) {
    for (om_model *m = models; m; m = m->next) pthread_mutex_unlock(&m->lock);
    pthread_mutex_unlock(&models_lock);
}

static void models_once(void) { pthread_atfork(models_fork, models_forked, models_forked); }

static void model_enter(om_model *m) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, models_once);
    pthread_mutex_lock(&models_lock);
    m->next = models;
    m->link = &models;
    if (models) models->link = &m->next;
    models = m;
    pthread_mutex_unlock(&models_lock);
}

static void model_leave(om_model *m) {
    pthread_mutex_lock(&models_lock);
    *m->link = m->next;
    if (m->next) m->next->link = m->link;
    pthread_mutex_unlock(&models_lock);
}

om_status om_model_from_graph(om_ctx *cx, om_graph *g, om_model **out) {
    double t0 = om_now_ms();
    *out = NULL;
    om_model *m = om_alloc(cx, sizeof *m);
    om_ctx *mine = m ? om_ctx_like(cx) : NULL;
    if (!mine) {
        om_free(cx, m);
        om_graph_free(g);
        return om_fail(cx, OM_NOMEM, "out of memory");
    }
    m->cx = g->cx = g->arena.cx = mine;
    m->g = g;
    pthread_mutex_init(&m->lock, NULL);
    model_enter(m);
    om_status s = om_bounded_ends(g);
    if (s == OM_OK) s = om_passes_dump(mine, "read", NULL, m->g);
    if (s == OM_OK) s = om_passes_run(mine, om_passes_forward, &m->g);
    if (s == OM_OK) s = om_outputs_differentiable(mine, m->g, &m->differentiable);
    m->load_ms = om_now_ms() - t0;
    if (s != OM_OK) {
        s = om_fail_of(cx, mine, s);
        om_model_free(cx, m);
        return s;
    }
    *out = m;
    return OM_OK;
}

/* One piece: pointers, then texts. */
static om_status names_keep(om_ctx *cx, const om_graph *g, char ***names) {
    const uint32_t n = g->output_names.n;
    size_t size = ((size_t)n + 1) * sizeof **names;
    for (uint32_t i = 0; i < n; i++) size += strlen(g->output_names.v[i]) + 1;
    char **to = *names = om_alloc(cx, size), *text = (char *)(to + n + 1);
    for (uint32_t i = 0; i < n && to; i++) {
        to[i] = strcpy(text, g->output_names.v[i]);
        text += strlen(text) + 1;
    }
    return cx->status;
}

om_status om_model_load(om_ctx *cx, const void *onnx, size_t size, om_model **out) {
    om_graph *g = NULL;
    *out = NULL;
    char **names = NULL;
    double t0 = om_now_ms();
    OM_TRY(om_onnx_read(cx, onnx, size, &g));
    double read = om_now_ms() - t0;
    om_status s = names_keep(cx, g, &names);
    if (s == OM_OK) s = om_model_from_graph(cx, g, out);
    else om_graph_free(g);
    if (s != OM_OK) return om_free(cx, names), s;
    (*out)->output_name = names;
    (*out)->load_ms += read;
    return OM_OK;
}

static void variant_free(om_ctx *cx, om_variant *v) {
    om_free(cx, v->facts);
    om_graph_free(v->g);
    om_free(cx, v->wanted);
    om_free(cx, v->arriving);
    om_free(cx, v->group);
    om_free(cx, v->again);
    om_flow_free(cx, &v->flow);
}

void om_model_free(om_ctx *cx, om_model *m) {
    if (!m) return;
    model_leave(m);
    for (int i = 0; i < m->n_plans; i++) om_plan_free(m->cx, m->plan[i]);
    for (om_plan *p = m->old, *next; p; p = next) {
        next = p->next;
        om_plan_free(m->cx, p);
    }
    for (int i = 0; i < m->n_variants; i++) variant_free(m->cx, &m->variant[i]);
    for (om_budget *b = m->budget, *next; b; b = next) {
        next = b->next;
        om_budget_free(b);
    }
    om_parts_forget(m->lent);
    om_graph_free(m->g);
    om_free(m->cx, m->differentiable);
    pthread_mutex_destroy(&m->lock);
    om_ctx_free(m->cx);
    om_free(cx, m->output_name);
    om_free(cx, m);
}

const om_graph *om_model_graph(const om_model *m, int variant) {
    return variant < 0 ? m->g : variant < m->n_variants ? m->variant[variant].g : NULL;
}
const om_variant *om_model_variant_at(const om_model *m, int variant) {
    return variant >= 0 && variant < m->n_variants ? &m->variant[variant] : NULL;
}
double om_model_load_ms(const om_model *m) { return m->load_ms; }

om_status om_model_text(om_ctx *cx, const om_model *m, int variant, char **text) {
    const om_graph *g = om_model_graph(m, variant);
    if (!g) return om_fail(cx, OM_INVALID, "variant %d does not exist: there are %d", variant, m->n_variants);
    pthread_mutex_t *lock = &((om_model *)(uintptr_t)m)->lock; /* of cx; the model itself stays as it is */
    pthread_mutex_lock(lock);
    om_status s = om_fail_of(cx, m->cx, om_graph_print(g, text));
    pthread_mutex_unlock(lock);
    return s;
}

/* A request for a variant: a policy, or a set of flags in its place. */
typedef struct ask {
    const uint8_t *wanted, *arriving;
    const int *group;
    om_recompute policy;
    const uint8_t *again;    /* NULL: the policy's */
    uint32_t n_again;
} ask;

static bool variant_gradients(const om_model *m, const om_variant *v, const ask *a) {
    const size_t n_in = m->g->inputs.n, n_out = m->g->outputs.n;
    const bool gradients = !memcmp(v->wanted, a->wanted, n_in) && !memcmp(v->arriving, a->arriving, n_out);
    return gradients && !v->group == !a->group && (!a->group || !memcmp(v->group, a->group, n_in * sizeof *a->group));
}

static bool variant_again(const om_variant *v, const uint8_t *again, uint32_t n) {
    bool same = v->n_again == n;
    for (uint32_t i = 0; i < n && same; i++) same = !v->again[i] == !again[i];
    return same;
}

static bool variant_is(const om_model *m, const om_variant *v, const ask *a) {
    const bool same = a->again ? variant_again(v, a->again, a->n_again) : v->policies >> a->policy & 1;
    return same && variant_gradients(m, v, a);
}

typedef struct again_step { const om_facts *f; const uint8_t *again; } again_step;

static om_status again_apply(om_ctx *cx, const om_graph *in, const void *arg, om_graph **out) {
    const again_step *a = arg;
    (void)in;
    return om_remat_apply(cx, a->f, a->again, out);
}

/* The flags of `a` for graph v->g, and the graph that does what they say. *same: a variant that has them already, or
 * NULL; then v->g is not finished. */
static om_status joint_finish(om_model *m, const ask *a, int at, om_variant *v, om_variant **same) {
    om_ctx *cx = m->cx;
    om_facts *f = om_facts_new(cx, v->g);
    v->n_again = v->g->values.n;
    om_status s = f && (v->again = om_alloc(cx, (size_t)v->n_again + 1)) ? OM_OK : cx->status;
    if (s == OM_OK && a->again && a->n_again != v->n_again)
        s = om_fail(cx, OM_INVALID, "a set of %u flags for a graph of %u values: om_choice says how many there are",
                    a->n_again, v->n_again);
    if (s == OM_OK && a->again) memcpy(v->again, a->again, v->n_again);
    else if (s == OM_OK) s = om_remat_policies[a->policy].choose(cx, &(om_remat_ask){v->g, f}, v->again);
    for (int i = 0; i < m->n_variants && s == OM_OK && !*same; i++)
        if (variant_gradients(m, &m->variant[i], a) && variant_again(&m->variant[i], v->again, v->n_again))
            *same = &m->variant[i];
    if (s == OM_OK && !*same) {
        const char *name = !a->again && a->policy == OM_RECOMPUTE_LAYERS ? "layers" : "remat";
        s = om_passes_step(cx, at, name, again_apply, &(again_step){f, v->again}, &v->g);
        if (s == OM_OK) s = om_joint_end(cx, at, a->group, &v->g, &v->facts, &v->n_segments);
    }
    om_free(cx, f);
    return s;
}

static om_status variant_build(om_model *m, const ask *a, int *variant) {
    om_ctx *cx = m->cx;
    uint32_t n_in = m->g->inputs.n, n_out = m->g->outputs.n;
    if ((unsigned)a->policy >= OM_N_RECOMPUTE)
        return om_fail(cx, OM_INVALID, "a variant that computes %d again: 0 (what is cheap) and 1 (layers) are defined",
                       (int)a->policy);
    for (int i = 0; i < m->n_variants; i++)
        if (variant_is(m, &m->variant[i], a)) {
            *variant = i;
            return OM_OK;
        }
    for (uint32_t i = 0; i < n_in; i++)
        if (a->wanted[i] && om_val(m->g, m->g->inputs.v[i])->host)
            return om_fail(cx, OM_INVALID, "graph input %u is a host scalar: it has no gradient", i);
    om_variant v = {.wanted = om_alloc(cx, n_in + 1),
                    .arriving = om_alloc(cx, n_out + 1),
                    .policies = a->again ? 0 : 1u << a->policy,
                    .first_grad_in = n_in},
               *same = NULL;
    double t0 = om_now_ms();
    int at;
    om_status s = v.wanted && v.arriving ? OM_OK : cx->status;
    if (s == OM_OK && a->group && !(v.group = om_alloc(cx, (n_in + 1) * sizeof *v.group))) s = cx->status;
    if (s == OM_OK) {
        memcpy(v.wanted, a->wanted, n_in);
        memcpy(v.arriving, a->arriving, n_out);
        if (a->group) memcpy(v.group, a->group, n_in * sizeof *v.group);
        s = om_joint_begin(cx, m->g, a->wanted, a->arriving, &v.flow, &v.g, &at);
        memcpy(v.padding, cx->padding, sizeof v.padding);
    }
    if (s == OM_OK) s = joint_finish(m, a, at, &v, &same);
    if (s == OM_OK && same) {
        same->policies |= v.policies;
        *variant = (int)(same - m->variant);
        variant_free(cx, &v);
        return OM_OK;
    }
    if (s == OM_OK && m->n_variants == MAX_VARIANTS)
        s = om_fail(cx, OM_UNSUPPORTED,
                    "more than %d sets of wanted and arriving gradients and of what is computed again for one graph",
                    MAX_VARIANTS);
    if (s == OM_OK) s = om_needs_make(cx, &v);
    v.ms = om_now_ms() - t0;
    if (s != OM_OK) {
        variant_free(cx, &v);
        return s;
    }
    *variant = m->n_variants;
    m->variant[m->n_variants] = v;
    m->n_variants++;
    return OM_OK;
}

static om_status variant_ask(om_ctx *cx, om_model *m, const ask *a, int *variant) {
    pthread_mutex_lock(&m->lock);
    om_status s = om_fail_of(cx, m->cx, variant_build(m, a, variant));
    pthread_mutex_unlock(&m->lock);
    return s;
}

om_status om_model_variant(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, const int *group,
                           om_recompute again, int *variant) {
    return variant_ask(cx, m, &(ask){wanted, arriving, group, again, NULL, 0}, variant);
}

om_status om_model_variant_again(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving,
                                 const int *group, const uint8_t *again, int n_again, int *variant) {
    return variant_ask(cx, m, &(ask){wanted, arriving, group, OM_RECOMPUTE_CHEAP, again, (uint32_t)n_again}, variant);
}

om_status om_choice_new(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, om_choice **out) {
    pthread_mutex_lock(&m->lock);
    om_status s = om_choice_make(cx, m->cx, m->g, wanted, arriving, out);
    pthread_mutex_unlock(&m->lock);
    return s;
}

static void plan_unref(om_model *m, om_plan *p) { /* with the lock */
    if (--p->refs) return;
    for (om_plan **at = &m->old; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    om_plan_free(m->cx, p);
}

static void plan_evict(om_model *m, om_plan *p) {
    p->next = m->old;
    m->old = p;
    plan_unref(m, p);
}

void om_model_plans_drop(om_model *m) {
    pthread_mutex_lock(&m->lock);
    while (m->n_plans) plan_evict(m, m->plan[--m->n_plans]);
    pthread_mutex_unlock(&m->lock);
}

void om_plan_release(om_model *m, om_plan *plan) {
    if (!plan) return;
    pthread_mutex_lock(&m->lock);
    plan_unref(m, plan);
    pthread_mutex_unlock(&m->lock);
}

static om_status inputs_check(om_ctx *cx, const om_graph *g, uint32_t n, const om_tensor *in) {
    for (uint32_t i = 0; i < n; i++) {
        const om_value *x = om_val(g, g->inputs.v[i]);
        if (in[i].dtype != x->type.dtype || in[i].rank != x->type.rank)
            return om_fail(cx, OM_INVALID,
                           "graph input %u (%s): %s of rank %d expected, %s of rank %d given: capture again", i,
                           x->name ? x->name : "?", om_dtype_name(x->type.dtype), x->type.rank,
                           om_dtype_name(in[i].dtype), in[i].rank);
    }
    return OM_OK;
}

static om_status plan_find(om_model *m, int variant, const om_tensor *in, om_plan **plan) {
    om_ctx *cx = m->cx;
    const om_variant *v = om_model_variant_at(m, variant);
    if (!v) return om_fail(cx, OM_INVALID, "variant %d does not exist: there are %d", variant, m->n_variants);
    OM_TRY(inputs_check(cx, v->g, v->first_grad_in, in));
    int64_t small[512], *key = small;
    int n = om_plan_key_size(v->g);
    if (n > 512 && !(key = om_alloc(cx, (size_t)n * sizeof *key))) return cx->status;
    om_plan_key(v->g, in, key);
    om_status s = OM_OK;
    *plan = NULL;
    for (int i = 0; i < m->n_plans && !*plan; i++)
        if (m->plan[i]->variant == variant && !memcmp(m->plan[i]->key, key, (size_t)n * sizeof *key))
            *plan = m->plan[i];
    if (key != small) om_free(cx, key);
    if (!*plan) {
        s = om_plan_make(cx, v->facts, in, plan);
        if (s != OM_OK) return s;
        (*plan)->variant = variant;
        (*plan)->refs = 1;
        int at = m->n_plans;
        if (at == MAX_PLANS) {
            at = 0;
            for (int i = 1; i < MAX_PLANS; i++)
                if (m->plan[i]->used < m->plan[at]->used) at = i;
            plan_evict(m, m->plan[at]);
        } else {
            m->n_plans++;
        }
        m->plan[at] = *plan;
    }
    (*plan)->used = ++m->clock;
    (*plan)->refs++;
    return s;
}

om_status om_plan_get(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, om_plan **plan) {
    pthread_mutex_lock(&m->lock);
    om_status s = om_fail_of(cx, m->cx, plan_find(m, variant, inputs, plan));
    pthread_mutex_unlock(&m->lock);
    return s;
}

static om_status fit_find(om_ctx *cx, om_model *m, const ask *a, const om_tensor *in, int64_t bytes,
                          double share, om_fit *fit) {
    om_budget *b = m->budget;
    const uint8_t *again = NULL;
    *fit = (om_fit){.variant = -1};
    OM_TRY(inputs_check(m->cx, m->g, m->g->inputs.n, in));
    while (b && !om_budget_is(b, a->wanted, a->arriving, a->group)) b = b->next;
    if (!b) {
        om_status s = om_budget_new(m->cx, m->g, a->wanted, a->arriving, a->group, &b);
        if (s != OM_OK) {
            om_budget_free(b);
            return s;
        }
        b->next = m->budget;
        m->budget = b;
        if (m->cx->device->blocks_tight) m->cx->device->blocks_tight();
    }
    OM_TRY(om_budget_fit(cx, b, in, bytes, share, fit, &again));
    ask with = *a;
    with.again = again;
    with.n_again = b->g->values.n;
    return again ? variant_build(m, &with, &fit->variant) : OM_OK;
}

om_status om_model_fit(om_ctx *cx, om_model *m, const uint8_t *wanted, const uint8_t *arriving, const int *group,
                       const om_tensor *inputs, int64_t bytes, double share, om_fit *fit) {
    pthread_mutex_lock(&m->lock);
    const ask a = {wanted, arriving, group, OM_RECOMPUTE_CHEAP, NULL, 0};
    om_status s = om_fail_of(cx, m->cx, fit_find(cx, m, &a, inputs, bytes, share, fit));
    pthread_mutex_unlock(&m->lock);
    return s;
}

/* --- gradients in the arena ---------------------------------------------------------------------- */

static bool places(const om_model *m, const om_plan *p, bool fleeting) {
    return p->bytes.placed && (fleeting || p->stay) && !m->budget && !m->held[fleeting];
}

bool om_model_places(om_model *m, const om_plan *p, bool fleeting) {
    pthread_mutex_lock(&m->lock);
    const bool may = places(m, p, fleeting);
    pthread_mutex_unlock(&m->lock);
    return may;
}

bool om_model_lend(om_model *m, const om_plan *p, bool fleeting, om_parts *parts) {
    pthread_mutex_lock(&m->lock);
    const bool may = places(m, p, fleeting);
    if (may) {
        om_parts_know(parts);
        om_parts_forget(m->lent);
        m->lent = parts;
        m->lent_fleeting = fleeting;
    }
    pthread_mutex_unlock(&m->lock);
    return may;
}

void om_model_back(om_model *m) {
    pthread_mutex_lock(&m->lock);
    if (m->lent) m->held[m->lent_fleeting] |= om_parts_out(m->lent);
    om_parts_forget(m->lent);
    m->lent = NULL;
    pthread_mutex_unlock(&m->lock);
}

om_status om_model_memory(om_ctx *cx, om_model *m, int variant, const om_tensor *inputs, om_memory *memory) {
    om_plan *plan;
    *memory = (om_memory){0};
    OM_TRY(om_plan_get(cx, m, variant, inputs, &plan));
    *memory = om_plan_memory(cx, plan);
    om_plan_release(m, plan);
    return OM_OK;
}

om_plan *om_plan_hold(om_model *m, om_plan *plan) {
    pthread_mutex_lock(&m->lock);
    plan->refs++;
    pthread_mutex_unlock(&m->lock);
    return plan;
}

int om_model_plans(om_model *m, om_plan **out, int max) {
    pthread_mutex_lock(&m->lock);
    int n = m->n_plans < max ? m->n_plans : max;
    for (int i = 0; i < n; i++) {
        out[i] = m->plan[i];
        out[i]->refs++;
    }
    pthread_mutex_unlock(&m->lock);
    return n;
}

/* --- what a graph takes and gives --------------------------------------------------------------- */

int om_model_inputs(const om_model *m) { return (int)m->g->inputs.n; }
int om_model_outputs(const om_model *m) { return (int)m->g->outputs.n; }

static om_io io_of(const om_graph *g, om_id id) {
    const om_value *v = om_val(g, id);
    om_io io = {.name = v->name ? v->name : "", .role = v->role, .dtype = v->type.dtype, .rank = v->type.rank};
    for (int k = 0; k < v->type.rank; k++)
        if (!om_dim_const(g, v->type.dim[k], &io.dim[k])) io.dim[k] = -1;
    return io;
}

om_io om_model_input(const om_model *m, int i) {
    om_io io = io_of(m->g, m->g->inputs.v[i]);
    for (uint32_t k = 0; k < m->g->writes.n; k++) io.written |= m->g->writes.v[k].input == (om_id)i;
    io.host = om_val(m->g, m->g->inputs.v[i])->host;
    io.differentiable = om_is_float(io.dtype) && !io.host;
    return io;
}

om_io om_model_output(const om_model *m, int i) {
    om_io io = io_of(m->g, m->g->outputs.v[i]);
    io.role = OM_ACT;
    if (m->output_name) io.name = m->output_name[i];
    io.differentiable = m->differentiable[i];
    return io;
}

bool om_model_random(const om_model *m) {
    for (om_id i = 0; i < m->g->nodes.n; i++)
        if (m->g->nodes.v[i].rng && m->g->nodes.v[i].op->random) return true;
    return false;
}

const om_needs *om_model_needs(const om_model *m, int variant) {
    const om_variant *v = om_model_variant_at(m, variant);
    return v ? &v->needs : NULL;
}

/* --- profile ------------------------------------------------------------------------------------ */

bool om_model_profiling(const om_model *m) { return __atomic_load_n(&m->profiling, __ATOMIC_RELAXED); }

void om_model_profile_add(om_model *m, om_run *r) {
    om_profile_row *rows = r->profile;
    om_clock *clock = (om_clock *)(void *)(rows + OM_N_PROFILE);
    om_plan *p = r->plan;
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < OM_N_PROFILE; i++) m->profile[i].count += rows[i].count, m->profile[i].ms += rows[i].ms;
    if (!p->clock && !(p->clock = om_arena_alloc(&p->mem, (size_t)(p->n_calls + 1) * sizeof *p->clock)))
        om_ctx_clear(p->mem.cx); /* no memory for it: a profile without this plan's calls */
    for (int i = 0; p->clock && i < p->n_calls; i++)
        p->clock[i].count += clock[i].count, p->clock[i].ms += clock[i].ms;
    pthread_mutex_unlock(&m->lock);
    memset(rows, 0, OM_N_PROFILE * sizeof *rows + (size_t)p->n_calls * sizeof *clock);
}

bool om_plan_clocks(om_model *m, const om_plan *p, om_clock *out) {
    bool any = false;
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < p->n_calls; i++) {
        out[i] = p->clock ? p->clock[i] : (om_clock){0};
        any |= out[i].count != 0;
    }
    pthread_mutex_unlock(&m->lock);
    return any;
}

static void clock_clear(om_plan *p) {
    if (p->clock) memset(p->clock, 0, (size_t)p->n_calls * sizeof *p->clock);
}

int om_model_profile(om_model *m, bool on, om_profile_row *rows, int max) {
    int n = 0;
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < OM_N_PROFILE; i++) {
        if (!m->profile[i].count) continue;
        const char *op = i == OM_PROFILE_COPY ? "copy" : i == OM_PROFILE_VIEW_COPY ? "view copy" : om_ops[i]->name;
        if (n < max) rows[n] = (om_profile_row){op, m->profile[i].count, m->profile[i].ms};
        n++;
    }
    memset(m->profile, 0, sizeof m->profile);
    for (int i = 0; i < m->n_plans; i++) clock_clear(m->plan[i]);
    for (om_plan *p = m->old; p; p = p->next) clock_clear(p);
    __atomic_store_n(&m->profiling, on, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&m->lock);
    return n;
}
