/* overlap.c - see overlap.h; overlaps and overlaps_written of ortmodule._C.
 *
 * Ranges are sorted by where they begin; what begins before an earlier one ends overlaps it.
 */
#include "python/overlap.h"

#include "python/dlpack.h"

#include <stdlib.h>
#include <string.h>

om_range om_range_of(const void *data, size_t size, int rank, const int64_t *dim, const int64_t *stride, Py_ssize_t i) {
    int64_t last = 0, dense = 1;
    for (int a = rank - 1; a >= 0; a--) {
        last += (dim[a] - 1) * (stride ? stride[a] : dense);
        dense *= dim[a];
    }
    const uintptr_t begin = (uintptr_t)data;
    return (om_range){begin, begin + (size_t)(last + 1) * size, i};
}

static int range_order(const void *a, const void *b) {
    const om_range *x = a, *y = b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin) : (x->i > y->i) - (x->i < y->i);
}

/* The next one of the m ranges; *sorted stays true while they come in order. */
static void range_add(om_range *r, Py_ssize_t m, om_range next, bool *sorted) {
    r[m] = next;
    *sorted &= !m || range_order(&r[m - 1], &r[m]) < 0;
}

int om_overlaps(const om_tensor *first, size_t stride, Py_ssize_t n, uint8_t **again) {
    om_range *r = malloc(((size_t)n + 1) * sizeof *r);
    Py_ssize_t m = 0;
    bool sorted = true;
    *again = NULL;
    if (!r) goto memory;
    for (Py_ssize_t i = 0; i < n; i++) {
        const om_tensor *t = (const om_tensor *)(const void *)((const char *)first + (size_t)i * stride);
        if (t->dtype == OM_NODTYPE || !om_numel(t)) continue;
        range_add(r, m++, om_range_of(t->data, om_dtype_size(t->dtype), t->rank, t->dim, t->stride, i), &sorted);
    }
    if (!sorted) qsort(r, (size_t)m, sizeof *r, range_order);
    for (Py_ssize_t k = 1, low = 0; k < m; k++) { /* low: the earliest tensor of the chain that ends at k - 1 */
        if (r[k].begin >= r[k - 1].end) {
            low = k;
            continue;
        }
        if (!*again && !(*again = calloc((size_t)n, 1))) goto memory;
        (*again)[r[r[k].i > r[low].i ? k : low].i] = 1;
        if (r[k].i < r[low].i) low = k;
        if (r[k].end < r[k - 1].end) r[k].end = r[k - 1].end;
    }
    free(r);
    return 0;
memory:
    free(r);
    PyErr_NoMemory();
    return -1;
}

static PyObject *py_overlaps(PyObject *self, PyObject *tensors) {
    (void)self;
    if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "tensors must be a list or tuple of tensors");
        return NULL;
    }
    const Py_ssize_t n = PySequence_Size(tensors);
    om_tensor *x = calloc((size_t)n + 1, sizeof *x);
    uint8_t *again = NULL;
    PyObject *r = NULL;
    if (!x) PyErr_NoMemory();
    else if (!om_dl_import_list(tensors, n, x, "tensors") && !om_overlaps(x, sizeof *x, n, &again)) r = PyList_New(0);
    for (Py_ssize_t i = 0; r && again && i < n; i++)
        if (again[i] && om_py_list_add(r, PyLong_FromSsize_t(i))) Py_CLEAR(r);
    free(x), free(again);
    return r;
}

/* --- what is written ------------------------------------------------------------------------------- */

/* May two elements be one number in memory? Surely not where every stride is wider than all smaller ones reach. */
static bool is_folded(const om_dl_tensor *d) {
    int64_t reach = 0; /* of the dimensions that are done, in elements */
    for (uint64_t done = 0;;) {
        int next = -1;
        for (int a = 0; a < d->ndim; a++)
            if (d->shape[a] > 1 && !(done >> a & 1) && (next < 0 || d->strides[a] < d->strides[next])) next = a;
        if (next < 0) return false;
        if (d->strides[next] <= reach) return true;
        reach += d->strides[next] * (d->shape[next] - 1);
        done |= 1ull << next;
    }
}

/* False: it has no elements, or none that can be seen (None, sparse, fake). */
static bool borrowed(PyObject *t, om_dl_tensor *d) {
    if (t == Py_None) return false;
    if (om_dl()->borrow(t, d)) {
        PyErr_Clear();
        return false;
    }
    for (int a = 0; a < d->ndim; a++)
        if (!d->shape[a]) return false;
    return d->data && d->ndim <= 64;
}

static int pair_add(PyObject *pairs, Py_ssize_t i, Py_ssize_t j) {
    PyObject *pair = Py_BuildValue("(nn)", i < j ? i : j, i < j ? j : i);
    const int failed = !pair || PySet_Add(pairs, pair) ? -1 : 0;
    Py_XDECREF(pair);
    return failed;
}

/* Fills r, room for one per tensor, and `pairs`. 0, or -1 with an error set. */
static int written_find(PyObject *tensors, const uint8_t *written, om_range *r, PyObject *pairs) {
    const Py_ssize_t n = PyList_Size(tensors);
    Py_ssize_t m = 0;
    bool sorted = true;
    for (Py_ssize_t i = 0; i < n; i++) {
        om_dl_tensor d;
        if (!borrowed(PyList_GetItem(tensors, i), &d)) continue;
        const size_t size = ((size_t)d.dtype.bits * d.dtype.lanes + 7) / 8;
        range_add(r, m++, om_range_of((char *)d.data + d.byte_offset, size, d.ndim, d.shape, d.strides, i), &sorted);
        if (written[i] && d.strides && is_folded(&d) && pair_add(pairs, i, i)) return -1;
    }
    if (!sorted) qsort(r, (size_t)m, sizeof *r, range_order);
    uintptr_t end = 0; /* of all before k */
    for (Py_ssize_t k = 0; k < m; k++) {
        for (Py_ssize_t j = k - 1; j >= 0 && r[k].begin < end; j--)
            if (r[j].end > r[k].begin && (written[r[j].i] || written[r[k].i]) && pair_add(pairs, r[j].i, r[k].i))
                return -1;
        if (r[k].end > end) end = r[k].end;
    }
    return 0;
}

static PyObject *py_overlaps_written(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tensors, *numbers;
    if (!PyArg_ParseTuple(args, "O!O!:overlaps_written", &PyList_Type, &tensors, &PyTuple_Type, &numbers)) return NULL;
    const Py_ssize_t n = PyList_Size(tensors), n_written = PyTuple_Size(numbers);
    om_range *r = malloc((size_t)(n + 1) * (sizeof *r + 1));
    if (!r) return PyErr_NoMemory();
    uint8_t *written = (uint8_t *)(r + n + 1);
    memset(written, 0, (size_t)n + 1);
    PyObject *pairs = PySet_New(NULL);
    for (Py_ssize_t i = 0; pairs && i < n_written; i++) {
        const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(numbers, i));
        if (at >= 0 && at < n) {
            written[at] = 1;
            continue;
        }
        if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "%zd is written, of %zd tensors", at, n);
        Py_CLEAR(pairs);
    }
    if (pairs && written_find(tensors, written, r, pairs)) Py_CLEAR(pairs);
    free(r);
    return pairs;
}

PyMethodDef om_overlap_methods[] = {
    {"overlaps", py_overlaps, METH_O, "overlaps(tensors): indices of those that share memory with an earlier one."},
    {"overlaps_written", py_overlaps_written, METH_VARARGS,
     "overlaps_written(tensors, written): pairs of indices that share memory and of which one is written."},
    {0},
};
