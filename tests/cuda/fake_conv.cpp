/* fake_conv.cpp - torch's convolution on the fake GPU: the C functions that csrc/cuda/torch_conv.c calls. A tensor is a
 * place in memory, its sizes and strides. Results lie in memory of the allocator's, channels last, and are computed when
 * their turn on the guard's stream comes: plain loops in double. An ambient autocast is what fake_torch_autocast says.
 * Refused: work without a guard or with gradients on, tensors of another device, sizes that do not fit, reads and writes
 * outside of live memory. */
#include "fake_torch.h"

#include "cuda/scalar.h"

#include <algorithm>
#include <memory>

enum { CUDA = 1, F16 = 5, F32 = 6, F64 = 7, BF16 = 15 }; /* at::ScalarType, c10::DeviceType */
typedef std::vector<int64_t> list;
struct at_tensor { char *data; list dim, stride; int32_t dtype; bool owned; };

static long tensors, convolutions;
static int32_t autocast;
static thread_local bool grad_mode = true;

PUBLIC long fake_torch_tensors(void) { return tensors; }
PUBLIC long fake_torch_convolutions(void) { return convolutions; }
PUBLIC void fake_torch_autocast(int32_t dtype) { autocast = dtype; } /* forward of f32: 0, none; 15, bf16 */
PUBLIC bool fake_torch_grad_mode(void) { return grad_mode; }

PUBLIC int32_t aoti_torch_device_type_cuda(void) { return CUDA; }
PUBLIC int32_t aoti_torch_dtype_float32(void) { return F32; }
PUBLIC int32_t aoti_torch_dtype_float64(void) { return F64; }
PUBLIC int32_t aoti_torch_dtype_bfloat16(void) { return BF16; }
PUBLIC int32_t aoti_torch_dtype_float16(void) { return F16; }
PUBLIC bool aoti_torch_grad_mode_is_enabled(void) { return grad_mode; }
PUBLIC void aoti_torch_grad_mode_set_enabled(bool on) { grad_mode = on; }

static int64_t size_of(int32_t dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }
static double get(const at_tensor &t, int64_t i) {
    switch (t.dtype) {
    case F64: return ((const double *)t.data)[i];
    case F32: return ((const float *)t.data)[i];
    case BF16: return bf16_in(((const uint16_t *)t.data)[i]);
    default: return f16_in(((const uint16_t *)t.data)[i]);
    }
}
static void put(const at_tensor &t, int64_t i, double x) {
    switch (t.dtype) {
    case F64: ((double *)t.data)[i] = x; break;
    case F32: ((float *)t.data)[i] = (float)x; break;
    case BF16: ((uint16_t *)t.data)[i] = bf16_out((float)x); break;
    default: ((uint16_t *)t.data)[i] = f16_out((float)x);
    }
}
static bool lives(const at_tensor &t) {
    int64_t last = 0;
    for (size_t i = 0; i < t.dim.size(); i++) {
        if (!t.dim[i]) return true;
        last += (t.dim[i] - 1) * t.stride[i];
    }
    return fake_gpu_inside(t.data, (last + 1) * size_of(t.dtype)) || fake_gpu_hosts(t.data);
}
/* Every place of a tensor, in row-major order. */
template <class F> static void each(const at_tensor &t, F f) {
    list at(t.dim.size());
    for (int64_t n : t.dim)
        if (!n) return;
    for (;;) {
        int64_t off = 0;
        for (size_t i = 0; i < at.size(); i++) off += at[i] * t.stride[i];
        f(at, off);
        size_t i = at.size();
        while (i && ++at[i - 1] == t.dim[i - 1]) at[--i] = 0;
        if (!i) return;
    }
}

PUBLIC int32_t aoti_torch_create_tensor_from_blob(void *data, int64_t rank, const int64_t *dim, const int64_t *stride, int64_t offset,
                                                  int32_t dtype, int32_t type, int32_t device, at_tensor **out) {
    ENTRY(aoti_torch_create_tensor_from_blob);
    if (type != CUDA || !fake_guard || device != fake_guard->device || offset) return (int32_t)fake_gpu_refuse(INVALID_VALUE, "a tensor that is not the device's");
    *out = new at_tensor{(char *)data, list(dim, dim + rank), list(stride, stride + rank), dtype, false};
    tensors++;
    return 0;
}
PUBLIC int32_t aoti_torch_delete_tensor_object(at_tensor *t) {
    if (t->owned && aoti_torch_cuda_caching_allocator_raw_delete(t->data)) return 1;
    delete t;
    tensors--;
    return 0;
}
PUBLIC int32_t aoti_torch_get_dtype(at_tensor *t, int32_t *out) {
    ENTRY(aoti_torch_get_dtype);
    return *out = t->dtype, 0;
}

static int32_t later(const std::function<unsigned()> &work) {
    if (!fake_guard || grad_mode) return (int32_t)fake_gpu_refuse(INVALID_VALUE, "torch works without a guard, or for autograd");
    return fake_gpu_put(fake_guard->stream, &work) != 0;
}

PUBLIC int32_t aoti_torch_tensor_copy_(at_tensor *src, at_tensor *dst) {
    ENTRY(aoti_torch_tensor_copy_);
    if (src->dim != dst->dim) return (int32_t)fake_gpu_refuse(INVALID_VALUE, "a copy between tensors of different sizes");
    return later([s = *src, d = *dst] {
        if (!lives(s) || !lives(d)) return fake_gpu_refuse(ILLEGAL_ADDRESS, "torch copies outside of live memory");
        each(d, [&](const list &at, int64_t to) {
            int64_t from = 0;
            for (size_t i = 0; i < at.size(); i++) from += at[i] * s.stride[i];
            put(d, to, get(s, from));
        });
        return 0u;
    });
}

static bool result(const list &dim, int32_t dtype, at_tensor **out) {
    int64_t n = 1;
    at_tensor t = {nullptr, dim, list(dim.size()), dtype, true};
    if (dim.size() == 1) t.stride[0] = 1;
    else { /* channels last */
        t.stride[1] = 1, n = dim[1];
        for (size_t i = dim.size(); i-- > 2;) t.stride[i] = n, n *= dim[i];
        t.stride[0] = n;
    }
    n = size_of(dtype);
    for (int64_t d : dim) n *= d;
    void *p = nullptr;
    if (aoti_torch_cuda_caching_allocator_raw_alloc((uint64_t)std::max<int64_t>(n, 1), &p)) return false;
    t.data = (char *)p;
    *out = new at_tensor(t);
    tensors++;
    return true;
}

struct geometry { list stride, pad, dil; int64_t groups; };
/* f(offset in x, in w, in y) for every product of y = conv(x, w). */
template <class F> static void products(const at_tensor &x, const at_tensor &w, const at_tensor &y, const geometry &g, F f) {
    const int64_t og = w.dim[0] / g.groups;
    each(w, [&](const list &k, int64_t at_w) {
        each(y, [&](const list &o, int64_t at_y) {
            if (o[1] != k[0]) return;
            int64_t at_x = o[0] * x.stride[0] + (k[0] / og * w.dim[1] + k[1]) * x.stride[1];
            for (size_t i = 2; i < k.size(); i++) {
                const int64_t p = o[i] * g.stride[i - 2] + k[i] * g.dil[i - 2] - g.pad[i - 2];
                if (p < 0 || p >= x.dim[i]) return;
                at_x += p * x.stride[i];
            }
            f(at_x, at_w, at_y);
        });
    });
}
/* Sums in double, by offset; then rounded. */
static void store(const at_tensor &t, const std::vector<double> &sum) {
    each(t, [&](const list &, int64_t at) { put(t, at, sum[(size_t)at]); });
}
static std::vector<double> zeros(const at_tensor &t) {
    int64_t n = 1;
    for (size_t i = 0; i < t.dim.size(); i++) n += (t.dim[i] - 1) * t.stride[i];
    return std::vector<double>((size_t)n);
}

PUBLIC int32_t aoti_torch_cuda_convolution(at_tensor *x, at_tensor *w, at_tensor **bias, const int64_t *stride, int64_t n_stride, const int64_t *pad,
                                           int64_t n_pad, const int64_t *dil, int64_t n_dil, int32_t transposed, const int64_t *out_pad,
                                           int64_t n_out_pad, int64_t groups, at_tensor **out) {
    ENTRY(aoti_torch_cuda_convolution);
    const size_t nd = x->dim.size() - 2;
    const geometry g = {list(stride, stride + n_stride), list(pad, pad + n_pad), list(dil, dil + n_dil), groups};
    const at_tensor b = bias ? **bias : at_tensor{};
    if (g.stride.size() != nd || g.pad.size() != nd || g.dil.size() != nd || (size_t)n_out_pad != nd || w->dim.size() != nd + 2 || x->dtype != w->dtype ||
        (transposed ? x->dim[1] != w->dim[0] : x->dim[1] != w->dim[1] * groups))
        return (int32_t)fake_gpu_refuse(INVALID_VALUE, "operands of a convolution do not fit");
    list dim = {x->dim[0], transposed ? w->dim[1] * groups : w->dim[0]};
    for (size_t i = 0; i < nd; i++) {
        const int64_t reach = dil[i] * (w->dim[2 + i] - 1) + 1;
        dim.push_back(transposed ? (x->dim[2 + i] - 1) * stride[i] - 2 * pad[i] + reach + out_pad[i] : (x->dim[2 + i] + 2 * pad[i] - reach) / stride[i] + 1);
    }
    if (!result(dim, autocast && x->dtype == F32 ? autocast : x->dtype, out)) return 1;
    convolutions++;
    return later([x = *x, w = *w, b, y = **out, g, transposed] {
        if (!lives(x) || !lives(w) || !lives(y) || (b.data && !lives(b))) return fake_gpu_refuse(ILLEGAL_ADDRESS, "torch's convolution leaves live memory");
        std::vector<double> sum = zeros(y);
        if (transposed) products(y, w, x, g, [&](int64_t i, int64_t k, int64_t o) { sum[(size_t)i] += get(x, o) * get(w, k); });
        else products(x, w, y, g, [&](int64_t i, int64_t k, int64_t o) { sum[(size_t)o] += get(x, i) * get(w, k); });
        if (b.data) each(y, [&](const list &at, int64_t o) { sum[(size_t)o] += get(b, at[1] * b.stride[0]); });
        store(y, sum);
        return 0u;
    });
}

PUBLIC int32_t aoti_torch_cuda_convolution_backward(at_tensor *dy, at_tensor *x, at_tensor *w, const int64_t **bias, int64_t n_bias, const int64_t *stride,
                                                    int64_t n_stride, const int64_t *pad, int64_t n_pad, const int64_t *dil, int64_t n_dil,
                                                    int32_t transposed, const int64_t *, int64_t, int64_t groups, const int32_t *want, int64_t n_want,
                                                    at_tensor **dx, at_tensor **dw, at_tensor **db) {
    ENTRY(aoti_torch_cuda_convolution_backward);
    const geometry g = {list(stride, stride + n_stride), list(pad, pad + n_pad), list(dil, dil + n_dil), groups};
    if (transposed || n_want != 3 || !bias || n_bias != 1 || **bias != w->dim[0] || dy->dim[1] != w->dim[0] || x->dim[1] != w->dim[1] * groups)
        return (int32_t)fake_gpu_refuse(INVALID_VALUE, "operands of a convolution's gradient do not fit");
    at_tensor **const out[] = {dx, dw, db};
    const list dims[] = {x->dim, w->dim, {w->dim[0]}};
    for (int i = 0; i < 3; i++) {
        *out[i] = nullptr;
        if (want[i] && !result(dims[i], dy->dtype, out[i])) return 1;
        if (!want[i]) *out[i] = new at_tensor{nullptr, {}, {}, 0, false}, tensors++; /* an undefined tensor */
    }
    convolutions++;
    return later([dy = *dy, x = *x, w = *w, a = **dx, b = **dw, c = **db, g] {
        if (!lives(x) || !lives(w) || !lives(dy)) return fake_gpu_refuse(ILLEGAL_ADDRESS, "torch's convolution leaves live memory");
        std::vector<double> of_x = a.data ? zeros(a) : zeros(x), of_w = b.data ? zeros(b) : zeros(w), of_b((size_t)w.dim[0]);
        if (a.data) products(a, w, dy, g, [&](int64_t i, int64_t k, int64_t o) { of_x[(size_t)i] += get(w, k) * get(dy, o); });
        if (b.data) products(x, b, dy, g, [&](int64_t i, int64_t k, int64_t o) { of_w[(size_t)k] += get(x, i) * get(dy, o); });
        each(dy, [&](const list &at, int64_t o) { of_b[(size_t)at[1]] += get(dy, o); });
        if (a.data) store(a, of_x);
        if (b.data) store(b, of_w);
        if (c.data) store(c, of_b);
        return 0u;
    });
}
