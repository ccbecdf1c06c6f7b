/* lower_ctc.c - CTC loss and its gradient on the GPU (ctc.cu). The gradient keeps alpha and beta of all times. */
#include "cuda/scratch.h"

typedef struct ctc_space { int64_t list, begin, alpha, beta, loss, next, total; } ctc_space; /* bytes; begins */

static int64_t take(ctc_space *s, int64_t size) {
    const int64_t at = s->total;
    s->total += (size + 63) & ~(int64_t)63;
    return at;
}

static bool of_gradient(const om_args *a) { return a->n_in == 6; }

static void sizes_of(const om_args *a, om_gpu_ctc *p, ctc_space *s) {
    const bool grad = of_gradient(a);
    const om_tensor *in = a->in + grad, *x = &in[0], *t = &in[1];
    const bool valid = in[2].dtype != OM_NODTYPE;
    *p = (om_gpu_ctc){.time = x->dim[0], .rows = x->dim[1], .classes = x->dim[2], .bound = t->dim[t->rank - 1],
                      .listed = om_numel(t), .blank = om_args_int(a, "blank", 0), .dtype = x->dtype,
                      .zero = (int32_t)om_args_int(a, "zero_infinity", 0), .one_after_another = valid || t->rank == 1};
    p->columns = 2 * p->bound + 1;
    *s = (ctc_space){0};
    s->list = take(s, 8 * p->listed);
    s->begin = take(s, 8 * (p->rows + 1));
    s->alpha = take(s, 8 * p->rows * (grad ? p->time : 2) * p->columns);
    s->beta = take(s, grad ? 8 * p->rows * p->time * p->columns : 0);
    s->loss = take(s, grad ? 8 * p->rows : 0);
    s->next = take(s, grad ? 4 * p->rows * p->columns : 0);
}

int64_t om_gpu_scratch_ctc(om_ctx *cx, const om_args *a) {
    om_gpu_ctc p;
    ctc_space s;
    (void)cx;
    sizes_of(a, &p, &s);
    return s.total;
}

static om_gpu_ctc *ctc_add(om_lower *l, om_gpu_kernel k, const om_gpu_ctc *p, int64_t gx, int64_t gy,
                           uint32_t threads) {
    om_gpu_ctc *g = om_gpu_add(l, k, gx, gy, 1, threads, 256, sizeof *g);
    if (!g) return NULL;
    *g = *p;
    const int first = of_gradient(l->a);
    om_gpu_in(l, &g->x, first);
    om_gpu_in(l, &g->targets, first + 1);
    om_gpu_in(l, &g->valid, first + 2);
    om_gpu_in(l, &g->inputs, first + 3);
    om_gpu_in(l, &g->lengths, first + 4);
    g->site = (int32_t)om_gpu_fault_at(l, &g->fault);
    return g;
}

om_status om_lower_ctc(om_lower *l) {
    const bool grad = of_gradient(l->a);
    om_gpu_ctc p, *g;
    ctc_space s;
    OM_TRY(om_gpu_check(l));
    sizes_of(l->a, &p, &s);
    if (p.rows > 65535 || p.columns > INT32_MAX) return om_gpu_host(l);
    const int64_t list = 8 * p.listed, begin = 8 * (p.rows + 1), paths = s.beta - s.alpha;
    if (p.one_after_another) {
        if (!(g = ctc_add(l, OM_GPU_ctc_list, &p, p.rows ? 1 : 0, 1, 256))) return l->cx->status;
        om_gpu_scratch_at(l, &g->list, s.list, list, OM_GPU_WRITE);
        om_gpu_scratch_at(l, &g->begin, s.begin, begin, OM_GPU_WRITE);
    }
    if (!(g = ctc_add(l, OM_GPU_ctc_paths, &p, p.rows, grad ? 2 : 1, 128))) return l->cx->status;
    om_gpu_scratch_at(l, &g->list, s.list, list, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->begin, s.begin, begin, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->alpha, s.alpha, paths, OM_GPU_READ | OM_GPU_WRITE);
    if (!grad) {
        om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
        return OM_OK;
    }
    om_gpu_scratch_at(l, &g->beta, s.beta, paths, OM_GPU_READ | OM_GPU_WRITE);
    om_gpu_scratch_at(l, &g->loss, s.loss, 8 * p.rows, OM_GPU_WRITE);
    om_gpu_scratch_at(l, &g->next, s.next, 4 * p.rows * p.columns, OM_GPU_WRITE);
    if (!(g = ctc_add(l, OM_GPU_ctc_grad, &p, p.time, p.rows, 128))) return l->cx->status;
    om_gpu_in(l, &g->dy, 0);
    om_gpu_scratch_at(l, &g->list, s.list, list, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->begin, s.begin, begin, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->alpha, s.alpha, paths, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->beta, s.beta, paths, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->loss, s.loss, 8 * p.rows, OM_GPU_READ);
    om_gpu_scratch_at(l, &g->next, s.next, 4 * p.rows * p.columns, OM_GPU_READ);
    om_gpu_out(l, &g->y, 0, OM_GPU_WRITE);
    return OM_OK;
}
