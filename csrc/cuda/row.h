/* cuda/row.h - rows of elements whose threads take pieces of 16 bytes: in one access where the address allows it, else
 * element by element. Which thread has which element depends on sizes alone, and so does the order of sums.
 *
 * A row that is short enough stays in registers between its passes, else it is read again for each; loads stand in one
 * place for all of them.
 */
#ifndef OM_CUDA_ROW_H
#define OM_CUDA_ROW_H

#include "cuda/kernel.h"

/* Elements of a piece; pieces that a thread has at once, which are 32 elements (doubles: 8). */
#define ROW_V (16 / (int)sizeof(S))
#define ROW_K (sizeof(S) == 8 ? 4 : 2 * (int)sizeof(S))
#define ROW_EACH_K _Pragma("unroll") for (int k = 0; k < ROW_K; k++)
#define ROW_EACH_E _Pragma("unroll") for (int e = 0; e < ROW_V; e++)

#define ROW_BOUNDS OM_GPU_ROW_THREADS, 1 /* threads, blocks at once: registers are for loads under way */

/* --- what a piece is written as ------------------------------------------------------------------------------ */

#if !defined(OM_EMULATED)
FN void row_write(void *p, const uint32_t *w) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(p)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
#else
FN void row_write(void *p, const uint32_t *w) {
    touch(p, 16, 1);
    memcpy(p, w, 16);
}
#endif
/* Word i of them */
FN uint32_t row_word(const float *x, int i, bf16) { return bf16_pair(x[2 * i], x[2 * i + 1]); }
FN uint32_t row_word(const float *x, int i, f16) { return f16_pair(x[2 * i], x[2 * i + 1]); }
FN uint32_t row_word(const float *x, int i, float) { return f32_bits(x[i]); }
FN uint32_t row_word(const double *x, int i, double) { return (uint32_t)((uint64_t)vm_int64(x[i / 2]) >> i % 2 * 32); }
template <class S, class F> FN void row_out(S *p, const F *x) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = row_word(x, i, S());
    row_write(p, w);
}

/* --- one piece ---------------------------------------------------------------------------------------------- */

FN bool row_in_line(const void *p, size_t bytes = 16) { return (uintptr_t)p % bytes == 0; }

/* Pieces one place further on, the first behind the last: a loop that does something with the first and turns them is
 * short, though registers have no index. */
template <int N, int V, class F> FN void row_turn(F (&x)[N][V]) {
#pragma unroll
    for (int e = 0; e < V; e++) {
        const F first = x[0][e];
#pragma unroll
        for (int k = 0; k + 1 < N; k++) x[k][e] = x[k + 1][e];
        x[N - 1][e] = first;
    }
}
#define ROW_IN_TURN(x, k, N) _Pragma("unroll 1") for (int k = 0; k < (N); k++, row_turn(x))

/* Elements i to i + V of a row of n, `stride` apart; outside of it: none. whole: in one access if all are inside */
template <class S, class T, class F>
FN void row_get_as(F *x, const T *row, int64_t stride, int64_t i, int64_t n, bool whole, F none) {
    if (whole && i >= 0 && i + ROW_V <= n) {
        const several<T, ROW_V> v = ld_several<true, ROW_V>(row + i);
        ROW_EACH_E x[e] = in(v.x[e]);
        return;
    }
    IN_TURN();
    ROW_EACH_E x[e] = (uint64_t)(i + e) < (uint64_t)n ? in(ld(row + (i + e) * stride)) : none;
}
template <class S, class F>
FN void row_get(F *x, const S *row, int64_t stride, int64_t i, int64_t n, bool whole, F none) {
    row_get_as<S>(x, row, stride, i, n, whole, none);
}
/* N pieces from p on, `apart` elements between them, all inside of their rows: all loads, then what needs them. T: how
 * the elements lie, at most as wide as S, whose pieces they are. */
template <class S, int N, class T, class F>
FN void row_get_all_as(F (&x)[N][ROW_V], const T *p, int64_t apart, int64_t stride, bool whole) {
    if (whole) {
        several<T, ROW_V> v[N];
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = ld_several<true, ROW_V>(p + k * apart);
#pragma unroll
        for (int k = 0; k < N; k++) ROW_EACH_E x[k][e] = in(v[k].x[e]);
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k++) ROW_EACH_E x[k][e] = 0; /* they are turned before all are there */
    ROW_IN_TURN(x, k, N) ROW_EACH_E x[0][e] = in(ld(p + (k * apart + e) * stride));
}
template <int N, class S, class F>
FN void row_get_all(F (&x)[N][ROW_V], const S *p, int64_t apart, int64_t stride, bool whole) {
    row_get_all_as<S>(x, p, apart, stride, whole);
}
template <class S, class F>
FN void row_put(S *row, int64_t stride, int64_t i, int64_t n, bool whole, const F *x) {
    if (whole && i >= 0 && i + ROW_V <= n) return row_out(row + i, x);
    IN_TURN();
    ROW_EACH_E if ((uint64_t)(i + e) < (uint64_t)n) out(row + (i + e) * stride, x[e]);
}

/* Neighbours first. */
template <class OP, int V, class F> FN F row_fold(const F *x) {
    F y[V];
#pragma unroll
    for (int e = 0; e < V; e++) y[e] = x[e];
#pragma unroll
    for (int w = 1; w < V; w *= 2)
#pragma unroll
        for (int e = 0; e + w < V; e += 2 * w) y[e] = OP::of(y[e], y[e + w]);
    return y[0];
}

/* --- rows in registers -------------------------------------------------------------------------------------- */

/* A thread's place: a warp for each row of at most OM_GPU_ROW_WARP elements, OM_GPU_ROW_WARPS a block, else a block. A
 * warp has neighbouring pieces: of a part of the row, `all` elements, a thread those at first + 32 k V. */
struct row_place { int64_t row; int first, all; bool warp, fits; };
template <class S> FN row_place row_place_of(int64_t n) {
    row_place r;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    r.warp = n <= OM_GPU_ROW_WARP;
    r.row = r.warp ? (int64_t)blockIdx.x * OM_GPU_ROW_WARPS + warp : blockIdx.x;
    r.first = ((r.warp ? 0 : warp * 32 * ROW_K) + lane) * ROW_V;
    r.all = (r.warp ? 32 : (int)blockDim.x) * ROW_K * ROW_V, r.fits = n <= r.all;
    return r;
}
template <class OP, class T> FN T row_all(const row_place &r, T x, T none, T *sh) {
    return r.warp ? warp_all<OP>(x) : block_all<OP>(x, none, sh);
}
#define ROW_AT(k) (at + 32 * ROW_V * (k)) /* element that a thread's piece k begins at */

/* The pieces of a part of a row of n elements `stride` apart; 0 past the end. All loads come first. T: how the elements
 * lie, at most as wide as S, whose pieces a thread has. */
template <class S, class T, class F>
FN void row_load_as(F (&x)[ROW_K][ROW_V], const T *row, int64_t stride, int at, int n) {
    if (stride == 1 && n % ROW_V == 0 && row_in_line(row, ROW_V * sizeof(T))) {
        several<T, ROW_V> v[ROW_K];
        ROW_EACH_K {
            v[k] = several<T, ROW_V>();
            if (ROW_AT(k) < n) v[k] = ld_several<true, ROW_V>(row + ROW_AT(k));
        }
        ROW_EACH_K ROW_EACH_E x[k][e] = in(v[k].x[e]);
        return;
    }
    ROW_EACH_K ROW_EACH_E x[k][e] = 0;
    ROW_IN_TURN(x, k, ROW_K) ROW_EACH_E x[0][e] = ROW_AT(k) + e < n ? in(ld(row + (ROW_AT(k) + e) * stride)) : 0;
}
template <class S, class F> FN void row_load(F (&x)[ROW_K][ROW_V], const S *row, int64_t stride, int at, int n) {
    row_load_as<S>(x, row, stride, at, n);
}
/* A dense row of elements narrower than S, whose pieces a thread has. */
template <class S, class T, class F> FN void row_store_as(F (&x)[ROW_K][ROW_V], T *row, int at, int n) {
    if (n % ROW_V == 0 && row_in_line(row, ROW_V * sizeof(T))) {
        ROW_EACH_K {
            if (ROW_AT(k) >= n) continue;
            several<T, ROW_V> v;
            ROW_EACH_E v.x[e] = narrow<T>(x[k][e]);
            st_several<true, ROW_V>(row + ROW_AT(k), v);
        }
        return;
    }
    ROW_IN_TURN(x, k, ROW_K) ROW_EACH_E if (ROW_AT(k) + e < n) out(row + ROW_AT(k) + e, x[0][e]);
}
template <class S, class F> FN void row_store(F (&x)[ROW_K][ROW_V], S *row, int64_t stride, int at, int n) {
    if (stride == 1 && n % ROW_V == 0 && row_in_line(row)) {
        ROW_EACH_K if (ROW_AT(k) < n) row_out(row + ROW_AT(k), x[k]);
        return;
    }
    ROW_IN_TURN(x, k, ROW_K) ROW_EACH_E if (ROW_AT(k) + e < n) out(row + (ROW_AT(k) + e) * stride, x[0][e]);
}

/* x = x * y, or x + y, by a dense row y. */
template <class F> FN void row_apply_one(F *x, F y, bool add) { *x = add ? *x + y : *x * y; }
template <class S, class T, class F>
FN void row_apply(F (&x)[ROW_K][ROW_V], const T *y, bool add, int at, int n) {
    enum { N = ROW_V * sizeof(T) < 16 ? ROW_V : 16 / sizeof(T) };
    const bool usual = sizeof(T) == sizeof(S) || sizeof(T) == sizeof(F);
    if (usual && n % ROW_V == 0 && row_in_line(y, N * sizeof(T))) {
        ROW_EACH_K {
            if (ROW_AT(k) >= n) continue;
#pragma unroll
            for (int m = 0; m < ROW_V; m += N) {
                const several<T, N> v = ld_several<true, N>(y + ROW_AT(k) + m);
#pragma unroll
                for (int e = 0; e < N; e++) row_apply_one(&x[k][m + e], (F)in(v.x[e]), add);
            }
        }
        return;
    }
    ROW_IN_TURN(x, k, ROW_K)
        ROW_EACH_E if (ROW_AT(k) + e < n) row_apply_one(&x[0][e], (F)in(ld(y + ROW_AT(k) + e)), add);
}
/* Of any float dtype, told at run time. */
template <class S, class F>
FN void row_apply_any(F (&x)[ROW_K][ROW_V], const char *y, int dtype, bool add, int at, int n) {
    switch (dtype) {
    case OM_F64: row_apply<S>(x, (const double *)y, add, at, n); break;
    case OM_BF16: row_apply<S>(x, (const bf16 *)y, add, at, n); break;
    case OM_F16: row_apply<S>(x, (const f16 *)y, add, at, n); break;
    default: row_apply<S>(x, (const float *)y, add, at, n);
    }
}

#endif
