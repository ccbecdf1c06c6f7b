/* step.c - Adam, SGD and LAMB over a list of parameters (see optim.h), and their grouping into sweeps.
 *
 * Adam and SGD are one sweep: 28 bytes a parameter in f32 (read p g m v, write p m v).
 *
 * LAMB needs the norms of the weight and of the direction before it may change the weight, so each tensor is swept
 * twice:
 *   1. moments, and the two sums of squares per block; f32 gradients become the direction     read p g m v, write m v g
 *     28 bytes 2. the weight moves by the direction times the trust ratio                                read p g,    
 *     write p        12 bytes
 * 40 bytes from memory, and no scratch of the model's size. Where the gradient cannot hold the direction (16-bit, or to
 * be kept) sweep 2 computes it again from p, m and v: 24 + 16 bytes. Consecutive small tensors form a wave that one
 * worker sweeps twice while it is in the cache, the second time backwards: then about 28 bytes come from memory. A
 * larger tensor is a wave of its own, and workers claim pieces of it. All waves are one parallel_for: who has nothing
 * left to claim in one wave goes on with the next, and sweep 2 of a wave may be claimed when its sweep 1 is done.
 * Workers wait only for pieces that running threads hold, and only when nothing else is left, so the scheme also
 * finishes when the host runs the workers one after the other. Neither waves nor threads change a bit: sums are per
 * block and added in block order.
 */
#include "optim/list.h"
#include "cpu/kernels_isa.h"

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

OM_DECLARE_ISA(struct om_optim_kernels, om_optim);

/* Constants of a step: f32 and f64 twins, one entry per span. */
typedef union consts {
    om_adam_f32 adam_f32; om_adam_f64 adam_f64;
    om_sgd_f32 sgd_f32;   om_sgd_f64 sgd_f64;
    om_lamb_f32 lamb_f32; om_lamb_f64 lamb_f64;
} consts;

typedef struct sweep {
    const struct om_optim_kernels *k;
    const consts *c;
} sweep;

/* --- adam, sgd ------------------------------------------------------------------------------------- */

static void adam_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    (void)block;
    const sweep *w = arg;
    if (s->tp == OM_F64) w->k->adam_f64(s, &w->c[i].adam_f64);
    else w->k->adam_f32(s, &w->c[i].adam_f32);
}

om_status om_adam_step(om_ctx *cx, const om_adam_cfg *c, om_optim_store store, uint64_t seed, om_optim_param *ps,
                       int n) {
    OM_CHECK(cx, c->mode >= 0 && c->mode < OM_N_ADAM_MODES, "adam: mode %d given; allowed: 0 to %d", c->mode,
             OM_N_ADAM_MODES - 1);
    om_optim_list l;
    consts *k = NULL;
    om_status s = om_optim_open(cx, "adam", store, seed, true, ps, n, &l);
    if (s == OM_OK && !(k = om_alloc(cx, sizeof *k * (size_t)(l.n + 1)))) s = OM_NOMEM;
    for (int i = 0; s == OM_OK && i < l.n; i++) {
        const om_optim_param *q = &ps[l.param[i]];
        if (q->m.dtype == OM_NODTYPE || q->v.dtype == OM_NODTYPE)
            s = om_fail(cx, OM_INVALID, "adam: parameter %d needs both moments", (int)l.param[i]);
        else if (i && q->step == ps[l.param[i - 1]].step && (l.span[i].tp == OM_F64) == (l.span[i - 1].tp == OM_F64))
            k[i] = k[i - 1];
        else if (l.span[i].tp == OM_F64)
            k[i].adam_f64 = om_adam_prepare_f64(c, q->step);
        else
            k[i].adam_f32 = om_adam_prepare_f32(c, q->step);
    }
    if (s == OM_OK) {
        sweep w = {.k = OM_PICK(om_optim), .c = k};
        om_optim_blocks(&l, adam_block, &w);
    }
    om_free(cx, k);
    return om_optim_close(&l, s);
}

static void sgd_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    (void)block;
    const sweep *w = arg;
    if (s->tp == OM_F64) w->k->sgd_f64(s, &w->c[i].sgd_f64);
    else w->k->sgd_f32(s, &w->c[i].sgd_f32);
}

om_status om_sgd_step(om_ctx *cx, const om_sgd_cfg *c, om_optim_store store, uint64_t seed, om_optim_param *ps, int n) {
    om_optim_list l;
    consts *k = NULL;
    om_status s = om_optim_open(cx, "sgd", store, seed, true, ps, n, &l);
    if (s == OM_OK && !(k = om_alloc(cx, sizeof *k * (size_t)(l.n + 1)))) s = OM_NOMEM;
    for (int i = 0; s == OM_OK && i < l.n; i++) {
        const om_optim_param *q = &ps[l.param[i]];
        if (c->momentum != 0 && q->m.dtype == OM_NODTYPE)
            s = om_fail(cx, OM_INVALID, "sgd: parameter %d needs a momentum buffer", (int)l.param[i]);
        else if (l.span[i].tp == OM_F64)
            k[i].sgd_f64 = om_sgd_prepare_f64(c, q->step <= 1);
        else
            k[i].sgd_f32 = om_sgd_prepare_f32(c, q->step <= 1);
    }
    if (s == OM_OK) {
        sweep w = {.k = OM_PICK(om_optim), .c = k};
        om_optim_blocks(&l, sgd_block, &w);
    }
    om_free(cx, k);
    return om_optim_close(&l, s);
}

/* --- lamb ------------------------------------------------------------------------------------------ */

enum { LAMB_PIECE = 8 }; /* blocks of a large tensor claimed at once; the second sweep runs over them as one span */

/* Spans [from, to), their blocks counted from the first of them; sweep 2 counts from the last. */
typedef struct lamb_wave {
    int from, to;
    int64_t blocks, piece;      /* claimed at once: a small wave as a whole */
    atomic_llong next1, done1;  /* sweep 1: blocks claimed, blocks done */
    atomic_llong next2;         /* sweep 2: blocks claimed */
    atomic_bool moving;         /* sweep 1 is done and the rates are known */
} lamb_wave;

typedef struct lamb_run {
    const om_optim_list *l;
    const struct om_optim_kernels *k;
    const om_lamb_cfg *cfg;     /* per parameter */
    consts *c;                  /* per span */
    om_lamb_move *move;         /* per span */
    double (*sum)[2];           /* per block: w^2, d^2 */
    uint8_t *skipped;           /* per block */
    bool write_weights, keep_grads;
    lamb_wave *wave;
    int waves;
} lamb_run;

static bool lamb_grad_out(const lamb_run *r, const om_optim_span *s) {
    return !r->keep_grads && s->tg == (s->tp == OM_F64 ? OM_F64 : OM_F32);
}

static void lamb_direction_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    const lamb_run *r = arg;
    const bool out = lamb_grad_out(r, s);
    r->skipped[block] = s->tp == OM_F64 ? r->k->lamb_direction_f64(s, &r->c[i].lamb_f64, out, r->sum[block])
                                        : r->k->lamb_direction_f32(s, &r->c[i].lamb_f32, out, r->sum[block]);
}

static void lamb_update(const lamb_run *r, int i, int64_t block, int64_t blocks) {
    const om_optim_span s = om_optim_part(r->l, i, block, blocks);
    om_lamb_move u = r->move[i];
    u.grad_out = lamb_grad_out(r, &s);
    for (int64_t b = block; b < block + blocks && !u.grad_out; b++) u.skipped |= r->skipped[b];
    if (s.tp == OM_F64) r->k->lamb_update_f64(&s, &r->c[i].lamb_f64, &u);
    else r->k->lamb_update_f32(&s, &r->c[i].lamb_f32, &u);
}

static void lamb_update_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    (void)s;
    lamb_update(arg, i, block, 1);
}

static void lamb_rates(const lamb_run *r, const lamb_wave *w) {
    for (int i = w->from; i < w->to; i++) {
        double w2 = 0, d2 = 0;
        for (int64_t b = r->l->first[i]; b < r->l->first[i + 1]; b++) w2 += r->sum[b][0], d2 += r->sum[b][1];
        const double rate = om_lamb_rate(&r->cfg[r->l->param[i]], w2, d2);
        /* no element exceeds its tensor's norm; NaN compares false */
        r->move[i] = (om_lamb_move){
            .rate = rate, .write_weights = r->write_weights, .bounded = sqrt(w2) + fabs(rate) * sqrt(d2) < 1e38};
    }
}

/* Up to `piece` of the blocks that are left into [*b, *b + *n). Looks before it takes, so that the counter cannot run
 * away. */
static bool lamb_claim(atomic_llong *next, const lamb_wave *w, int64_t *b, int64_t *n) {
    if (atomic_load(next) >= w->blocks || (*b = atomic_fetch_add(next, w->piece)) >= w->blocks) return false;
    *n = w->blocks - *b < w->piece ? w->blocks - *b : w->piece;
    return true;
}

/* Does one piece of the wave; false when there was none to claim for sweep 2. */
static bool lamb_work(const lamb_run *r, lamb_wave *w) {
    const int64_t first = r->l->first[w->from], end = r->l->first[w->to];
    int64_t b, n;
    if (lamb_claim(&w->next1, w, &b, &n)) {
        om_optim_range(r->l, first + b, first + b + n, false, lamb_direction_block, (void *)(uintptr_t)r);
        if (atomic_fetch_add(&w->done1, n) + n < w->blocks) return true;
        lamb_rates(r, w); /* the last one in */
        atomic_store(&w->moving, true);
    }
    if (!atomic_load(&w->moving) || !lamb_claim(&w->next2, w, &b, &n)) return false;
    if (w->to - w->from == 1) lamb_update(r, w->from, end - b - n, n); /* one run of memory */
    else om_optim_range(r->l, end - b - n, end - b, true, lamb_update_block, (void *)(uintptr_t)r);
    return true;
}

/* the piece's bounds carry no meaning: work is claimed */
static void lamb_worker(void *arg, int64_t begin, int64_t end) {
    (void)begin, (void)end;
    const lamb_run *r = arg;
    for (int first = 0, spin = 0; first < r->waves;) {
        if (atomic_load(&r->wave[first].next2) >= r->wave[first].blocks) { /* nothing left to claim */
            first++;
            continue;
        }
        int i = first; /* the earliest wave comes first: it is the one in the cache */
        while (i < r->waves && !lamb_work(r, &r->wave[i])) i++;
        if (i < r->waves) spin = 0;
        else if (++spin > 1000) sched_yield();
    }
}

/* Bytes of weight and moments of a wave: an eighth of a thread's share of the last-level cache, because gradients pass
 * through it too, but no less than a core's own cache holds; 2 MB at most (virtual machines report the host's cache, of
 * which they own a part: larger waves measured slower). */
static int64_t lamb_wave_bytes(int threads) {
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const int64_t part = l3 > 0 ? l3 / 8 / threads : 1 << 20;
    return part > 2 << 20 ? 2 << 20 : part < 256 << 10 ? 256 << 10 : part;
}

static int64_t lamb_span_bytes(const om_optim_span *p) {
    const int64_t weight = p->store == OM_STORE_MASTER
                               ? 4
                               : (int64_t)om_dtype_size(p->tp) + (p->store == OM_STORE_SPLIT ? 2 : 0);
    return p->n * (weight + (int64_t)om_dtype_size(p->tm) + (int64_t)om_dtype_size(p->tv));
}

static void lamb_waves_make(lamb_run *r, int threads) {
    const om_optim_list *l = r->l;
    int64_t all = 0, most = lamb_wave_bytes(threads);
    for (int i = 0; i < l->n; i++) all += lamb_span_bytes(&l->span[i]);
    if (threads > 1 && all / (4 * threads) < most) most = all / (4 * threads); /* every thread has some */
    for (int from = 0, to; from < l->n; from = to) {
        int64_t bytes = 0;
        for (to = from; to < l->n; to++) {
            bytes += lamb_span_bytes(&l->span[to]);
            if (bytes > most && to > from) break;
        }
        lamb_wave *w = &r->wave[r->waves++];
        w->from = from, w->to = to;
        w->blocks = l->first[to] - l->first[from];
        w->piece = to - from > 1 || bytes <= most ? w->blocks : LAMB_PIECE;
    }
}

om_status om_lamb_step(om_ctx *cx, const om_lamb_cfg *cfg, om_optim_store store, uint64_t seed, bool write_weights,
                       bool keep_grads, om_optim_param *ps, int n) {
    om_optim_list l;
    lamb_run r = {
        .l = &l, .k = OM_PICK(om_optim), .cfg = cfg, .write_weights = write_weights, .keep_grads = keep_grads};
    om_status s = om_optim_open(cx, "lamb", store, seed, write_weights, ps, n, &l);
    if (s == OM_OK) {
        r.c = om_alloc(cx, sizeof *r.c * (size_t)(l.n + 1));
        r.move = om_alloc(cx, sizeof *r.move * (size_t)(l.n + 1));
        r.wave = om_alloc(cx, sizeof *r.wave * (size_t)(l.n + 1));
        r.sum = om_alloc(cx, sizeof *r.sum * (size_t)(l.first[l.n] + 1));
        r.skipped = om_alloc(cx, (size_t)(l.first[l.n] + 1));
        if (!r.c || !r.move || !r.wave || !r.sum || !r.skipped) s = OM_NOMEM;
    }
    for (int i = 0; s == OM_OK && i < l.n; i++) {
        const om_optim_param *q = &ps[l.param[i]];
        if (q->m.dtype == OM_NODTYPE || q->v.dtype == OM_NODTYPE)
            s = om_fail(cx, OM_INVALID, "lamb: parameter %d needs both moments", (int)l.param[i]);
        else if (l.span[i].tp == OM_F64)
            r.c[i].lamb_f64 = om_lamb_prepare_f64(&cfg[l.param[i]], q->step);
        else
            r.c[i].lamb_f32 = om_lamb_prepare_f32(&cfg[l.param[i]], q->step);
    }
    if (s == OM_OK) {
        const int threads = om_num_threads(cx);
        lamb_waves_make(&r, threads);
        om_parallel_for(cx, threads < l.first[l.n] ? threads : l.first[l.n], 1, lamb_worker, &r);
    }
    om_free(cx, r.c);
    om_free(cx, r.move);
    om_free(cx, r.wave);
    om_free(cx, r.sum);
    om_free(cx, r.skipped);
    return om_optim_close(&l, s);
}
