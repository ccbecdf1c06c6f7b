/* step.c - Adam, SGD and LAMB over a list of parameters (see optim.h), and their grouping into sweeps.
 *
 * Adam and SGD are one sweep: 28 bytes a parameter in f32 (read p g m v, write p m v).
 *
 * LAMB needs the norms of the weight and of the direction before it may change the weight, so each tensor is swept twice:
 *   1. moments, and the two sums of squares per block; f32 gradients become the direction     read p g m v, write m v g   28 bytes
 *   2. the weight moves by the direction times the trust ratio                                read p g,     write p        12 bytes
 * 40 bytes from memory, and no scratch of the model's size. Where the gradient cannot hold the direction (16-bit, or to be kept) sweep
 * 2 computes it again from p, m and v: 24 + 16 bytes. Consecutive tensors that fit the last-level cache together form a
 * wave that is swept twice while it is still there, the second time backwards: then about 28 bytes come from memory.
 * The order of the waves changes no bit: sums are per block and added in block order.
 */
#include "list.h"
#include "kernels_isa.h"

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
    /* LAMB */
    double (*sum)[2];  /* per block: w^2, d^2 */
    uint8_t *skipped;  /* per block */
    om_lamb_move *move; /* per span */
    bool keep_grads;
} sweep;

/* --- adam, sgd ------------------------------------------------------------------------------------- */

static void adam_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    (void)block;
    const sweep *w = arg;
    if (s->tp == OM_F64) w->k->adam_f64(s, &w->c[i].adam_f64);
    else w->k->adam_f32(s, &w->c[i].adam_f32);
}

om_status om_adam_step(om_ctx *cx, const om_adam_cfg *c, om_optim_store store, uint64_t seed, om_optim_param *ps, int n) {
    OM_CHECK(cx, c->mode >= 0 && c->mode < OM_N_ADAM_MODES, "adam: mode %d given; allowed: 0 to %d", c->mode, OM_N_ADAM_MODES - 1);
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
        om_optim_blocks(&l, 0, l.n, false, adam_block, &w);
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
        om_optim_blocks(&l, 0, l.n, false, sgd_block, &w);
    }
    om_free(cx, k);
    return om_optim_close(&l, s);
}

/* --- lamb ------------------------------------------------------------------------------------------ */

static bool lamb_grad_out(const sweep *w, const om_optim_span *s) { return !w->keep_grads && s->tg == (s->tp == OM_F64 ? OM_F64 : OM_F32); }

static void lamb_direction_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    const sweep *w = arg;
    const bool out = lamb_grad_out(w, s);
    w->skipped[block] = s->tp == OM_F64 ? w->k->lamb_direction_f64(s, &w->c[i].lamb_f64, out, w->sum[block])
                                        : w->k->lamb_direction_f32(s, &w->c[i].lamb_f32, out, w->sum[block]);
}

static void lamb_update_block(void *arg, int i, int64_t block, const om_optim_span *s) {
    const sweep *w = arg;
    om_lamb_move u = w->move[i];
    u.grad_out = lamb_grad_out(w, s);
    u.skipped = w->skipped[block] && !u.grad_out;
    if (s->tp == OM_F64) w->k->lamb_update_f64(s, &w->c[i].lamb_f64, &u);
    else w->k->lamb_update_f32(s, &w->c[i].lamb_f32, &u);
}

/* Bytes of weight and moments per wave: an eighth of the last-level cache, because gradients pass through it too and other cores have
 * their share; 4 MB at most (virtual machines report the host's cache, of which they own a part: larger waves measured slower). */
static int64_t lamb_wave_bytes(void) {
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const int64_t part = l3 > 0 ? l3 / 8 : 2 << 20;
    return part < 4 << 20 ? part : 4 << 20;
}

om_status om_lamb_step(om_ctx *cx, const om_lamb_cfg *cfg, om_optim_store store, uint64_t seed, bool write_weights, bool keep_grads,
                       om_optim_param *ps, int n) {
    om_optim_list l;
    sweep w = {.k = OM_PICK(om_optim), .keep_grads = keep_grads};
    consts *k = NULL;
    om_status s = om_optim_open(cx, "lamb", store, seed, write_weights, ps, n, &l);
    if (s == OM_OK) {
        k = om_alloc(cx, sizeof *k * (size_t)(l.n + 1));
        w.move = om_alloc(cx, sizeof *w.move * (size_t)(l.n + 1));
        w.sum = om_alloc(cx, sizeof *w.sum * (size_t)(l.first[l.n] + 1));
        w.skipped = om_alloc(cx, (size_t)(l.first[l.n] + 1));
        if (!k || !w.move || !w.sum || !w.skipped) s = OM_NOMEM;
    }
    w.c = k;
    for (int i = 0; s == OM_OK && i < l.n; i++) {
        const om_optim_param *q = &ps[l.param[i]];
        if (q->m.dtype == OM_NODTYPE || q->v.dtype == OM_NODTYPE)
            s = om_fail(cx, OM_INVALID, "lamb: parameter %d needs both moments", (int)l.param[i]);
        else if (l.span[i].tp == OM_F64)
            k[i].lamb_f64 = om_lamb_prepare_f64(&cfg[l.param[i]], q->step);
        else
            k[i].lamb_f32 = om_lamb_prepare_f32(&cfg[l.param[i]], q->step);
    }
    const int64_t wave = lamb_wave_bytes();
    for (int from = 0, to; s == OM_OK && from < l.n; from = to) {
        int64_t bytes = 0;
        for (to = from; to < l.n; to++) {
            const om_optim_span *p = &l.span[to];
            const int64_t weight = p->store == OM_STORE_MASTER ? 4 : (int64_t)om_dtype_size(p->tp) + (p->store == OM_STORE_SPLIT ? 2 : 0);
            bytes += p->n * (weight + (int64_t)om_dtype_size(p->tm) + (int64_t)om_dtype_size(p->tv));
            if (bytes > wave && to > from) break;
        }
        om_optim_blocks(&l, from, to, false, lamb_direction_block, &w);
        for (int i = from; i < to; i++) {
            double w2 = 0, d2 = 0;
            for (int64_t b = l.first[i]; b < l.first[i + 1]; b++) w2 += w.sum[b][0], d2 += w.sum[b][1];
            const double rate = om_lamb_rate(&cfg[l.param[i]], w2, d2);
            /* no element exceeds its tensor's norm; NaN compares false */
            w.move[i] = (om_lamb_move){.rate = rate, .write_weights = write_weights, .bounded = sqrt(w2) + fabs(rate) * sqrt(d2) < 1e38};
        }
        om_optim_blocks(&l, from, to, true, lamb_update_block, &w);
    }
    om_free(cx, k);
    om_free(cx, w.move);
    om_free(cx, w.sum);
    om_free(cx, w.skipped);
    return om_optim_close(&l, s);
}
