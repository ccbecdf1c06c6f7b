/* torch_conv.c - see torch_conv.h. */
#include "cuda/torch_conv.h"

#include <dlfcn.h>
#include <pthread.h>

#define X(field, type, name, params) type (*field) params;
static struct { OM_CUDA_CONV_API(X) } api;
#undef X
static const char *(*what)(void); /* of the last failure; torch 2.13 and later */
static pthread_once_t looked = PTHREAD_ONCE_INIT;
static bool present;

static void look(void) {
    void *lib = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    present = lib != NULL;
#define X(field, type, name, params) present = present && (*(void **)&api.field = dlsym(lib, #name));
    OM_CUDA_CONV_API(X)
#undef X
    if (present) *(void **)&what = dlsym(lib, "torch_exception_get_what_without_backtrace");
}

bool om_torch_conv_open(void) {
    pthread_once(&looked, look);
    return present;
}

enum { OPERANDS = 3 };
typedef struct held { at_tensor *in[OPERANDS], *out[OPERANDS], *result[OPERANDS]; } held;

static int32_t dtype_of(int dtype) {
    return dtype == OM_F64 ? api.f64() : dtype == OM_BF16 ? api.bf16() : dtype == OM_F16 ? api.f16() : api.f32();
}

static bool tensor_of(om_gpu *g, const om_tensor *t, at_tensor **out) {
    return !t->dtype || !api.blob(t->data, t->rank, t->dim, t->stride, 0, dtype_of(t->dtype), api.of_cuda(),
                                  om_gpu_ordinal(g), out);
}

static bool compute(const om_torch_conv *c, held *h, const int64_t *bias_size) {
    const int nd = c->nd;
    if (!c->grad)
        return !api.forward(h->in[0], h->in[1], h->in[2] ? &h->in[2] : NULL, c->stride, nd, c->pad, nd, c->dil, nd,
                            c->transposed, c->out_pad, nd, c->groups, &h->result[0]);
    return !api.backward(h->in[0], h->in[1], h->in[2], &bias_size, 1, c->stride, nd, c->pad, nd, c->dil, nd,
                         c->transposed, c->out_pad, nd, c->groups, c->want, OPERANDS, &h->result[0], &h->result[1],
                         &h->result[2]);
}

static bool take(om_gpu *g, const om_torch_conv *c, const om_tensor *arg, int n_in, int n_out, held *h, bool *done) {
    for (int i = 0; i < n_in; i++)
        if (!tensor_of(g, &arg[i], &h->in[i])) return false;
    if (!compute(c, h, &arg[0].dim[1])) return false; /* of dy: channels, as many as there are biases */
    for (int i = 0; i < n_out; i++) {
        int32_t type;
        if (!arg[n_in + i].dtype || (c->grad && !c->want[i])) continue;
        if (api.dtype(h->result[i], &type)) return false;
        if (type != dtype_of(arg[n_in + i].dtype)) return true;
        if (!tensor_of(g, &arg[n_in + i], &h->out[i]) || api.copy(h->result[i], h->out[i])) return false;
    }
    return *done = true;
}

om_status om_torch_conv_run(om_ctx *cx, om_gpu *g, const om_torch_conv *c, const om_tensor *arg, int n_in, int n_out,
                            bool *done) {
    const char *name = c->grad ? "aoti_torch_cuda_convolution_backward" : "aoti_torch_cuda_convolution";
    void *guard = NULL;
    bool good = false;
    *done = false;
    if (n_in > OPERANDS || n_out > OPERANDS) return om_fail(cx, OM_INTERNAL, "a convolution of %d operands", n_in);
    if (api.guard(om_cuda_stream_now(), om_gpu_ordinal(g), &guard))
        return om_fail(cx, OM_UNSUPPORTED, "torch's stream guard failed (aoti_torch_create_cuda_stream_guard)");
    const bool grads = api.grad_mode();
    api.grad_mode_set(false);
    for (int turn = 0; turn < 2 && !good; turn++) {
        held h = {0};
        if (turn) om_cuda_empty(); /* its allocator may have been out of memory that the engine keeps */
        good = take(g, c, arg, n_in, n_out, &h, done);
        for (int i = 0; i < OPERANDS; i++) {
            at_tensor *const t[] = {h.in[i], h.out[i], h.result[i]};
            for (int k = 0; k < 3; k++)
                if (t[k]) api.drop(t[k]);
        }
    }
    api.grad_mode_set(grads);
    const bool unguarded = !api.unguard(guard);
    if (good && unguarded) return OM_OK;
    const char *why = what && !good ? what() : "";
    return om_fail(cx, OM_UNSUPPORTED, "torch's convolution failed (%s)%s%s",
                   good ? "aoti_torch_delete_cuda_stream_guard" : name, *why ? ": " : "", why);
}
