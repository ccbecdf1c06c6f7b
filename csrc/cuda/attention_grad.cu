/* attention_grad.cu - the gradient of attention from lse: delta = sum of dy y per query; then dq by queries, dk and dv
 * by keys. Probabilities and random words are computed anew. */
#include "cuda/attention_body.h"

/* A query by a warp: probabilities are exp(score - m) il, and delta. From lse and y; anew, without their rounding,
 * where all keys are one tile, and m and il where lse is too large to hold log l. */
template <class S> FN void delta_row(const om_gpu_attention &p, int64_t row) {
    typedef WIDE F;
    const int64_t rows = p.batch * p.hq * p.tq;
    const unsigned lane = threadIdx.x & 31;
    att_head a = {row / p.tq / p.hq, row / p.tq % p.hq, 0};
    a.kv = a.h / (p.hq / p.hk);
    const int64_t i = row % p.tq, y = a.b * p.sy[0] + a.h * p.sy[1] + i * p.sy[2];
    const int64_t dy = a.b * p.sdy[0] + a.h * p.sdy[1] + i * p.sdy[2];
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    const F lse = ld((const F *)p.lse + row);
    const bool none = lse == -inf_of((F)0), one = p.tk <= 32;
    const bool odd = !none && (lse < -1000 || lse > 1000) && lse - lse == 0;
    F m = none ? (F)0 : lse, il = none ? (F)0 : (F)1, delta = 0;
    /* in att_dot's order: 0 is left where one key has all the probability; of 16-bit numbers, whose rounding is far
     * larger, a part by every lane */
    const bool parts = sizeof(S) == 2 && !one;
    for (int64_t c = parts ? lane : 0; c < p.dv_size; c += parts ? 32 : 1)
        delta += at<S>(p.dy, dy + c * p.sdy[3]) * at<S>(p.y, y + c * p.sy[3]);
    if (parts) delta = warp_all<op_sum>(delta);
    if (!none && (one || odd)) {
        F top = -inf_of((F)0), l = 0, d = 0;
        for (int turn = 0; turn < 2; turn++) {
            for (int64_t j = lane; j < p.tk; j += 32) {
                F dot = 0, dp = 0;
                for (int64_t c = 0; c < p.d; c++)
                    dot += at<S>(p.q, a.b * p.sq[0] + a.h * p.sq[1] + i * p.sq[2] + c * p.sq[3]) *
                           at<S>(p.k, a.b * p.sk[0] + a.kv * p.sk[1] + j * p.sk[2] + c * p.sk[3]);
                const F s = att_score<S, F>(p, a, i, j, dot);
                if (!turn) top = op_max::of(top, s);
                if (!turn || s == -inf_of((F)0)) continue;
                const F e = exp_of(s - top);
                for (int64_t c = 0; one && c < p.dv_size; c++)
                    dp += at<S>(p.dy, dy + c * p.sdy[3]) *
                          at<S>(p.v, a.b * p.sv[0] + a.kv * p.sv[1] + j * p.sv[2] + c * p.sv[3]);
                l += e;
                d += e * (dp * att_keep<F>(p, a, seed, i, j));
            }
            if (!turn) top = warp_all<op_max>(top);
        }
        il = 1 / warp_all<op_sum>(l);
        m = top;
        d = warp_all<op_sum>(d) * il;
        if (one) delta = d;
    }
    if (lane) return;
    st((F *)p.delta + row, delta);
    st((F *)p.delta + rows + row, m);
    st((F *)p.delta + 2 * rows + row, il);
}

/* 16 queries by a warp, from `first` on: eight lanes a query, 16 bytes each at once. Not where delta_row would look at
 * the keys for one of them: false, nothing is written. */
template <class S> FN bool delta_rows(const om_gpu_attention &p, uint32_t first, uint32_t rows) {
    enum { ROWS = 16, AT_ONCE = ROWS / 4 };
    const uint32_t lane = threadIdx.x & 31, mate = lane % 8, own = first + mate % 4 * 4 + lane / 8;
    const uint32_t tq = (uint32_t)p.tq, hq = (uint32_t)p.hq;
    float delta[AT_ONCE], mine = 0;
    int64_t dy[AT_ONCE], y[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const uint32_t row = first + k * 4 + lane / 8 < rows ? first + k * 4 + lane / 8 : rows - 1;
        const uint32_t i = row % tq, h = row / tq % hq, b = row / tq / hq;
        dy[k] = b * p.sdy[0] + h * p.sdy[1] + i * p.sdy[2], y[k] = b * p.sy[0] + h * p.sy[1] + i * p.sy[2];
        delta[k] = 0;
    }
    const float lse = ld((const float *)p.lse + (own < rows ? own : rows - 1));
    if (votes((lse < -1000 || lse > 1000) && lse - lse == 0)) return false;
    for (int64_t c = mate * 8; c < p.dv_size; c += 64) {
        several<S, 8> u[AT_ONCE], v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u[k] = ld_several<true, 8>((const S *)p.dy + dy[k] + c);
            v[k] = ld_several<true, 8>((const S *)p.y + y[k] + c);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int e = 0; e < 8; e++) delta[k] += in(u[k].x[e]) * in(v[k].x[e]);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        for (int m = 4; m; m >>= 1) delta[k] += shuffle(delta[k], m);
        if (mate == (uint32_t)k) mine = delta[k];
    }
    if (mate >= AT_ONCE || own >= rows) return true;
    const bool none = lse == -INFINITY;
    st((float *)p.delta + own, mine);
    st((float *)p.delta + rows + own, none ? 0 : lse);
    st((float *)p.delta + 2 * (int64_t)rows + own, none ? 0.0f : 1.0f);
    return true;
}
FN bool delta_fast(const om_gpu_attention &p, int64_t first, int64_t rows, bf16) {
    return delta_rows<bf16>(p, (uint32_t)first, (uint32_t)rows);
}
FN bool delta_fast(const om_gpu_attention &p, int64_t first, int64_t rows, f16) {
    return delta_rows<f16>(p, (uint32_t)first, (uint32_t)rows);
}
template <class S> FN bool delta_fast(const om_gpu_attention &, int64_t, int64_t, S) { return false; }

template <class S> FN void attention_delta(const om_gpu_attention &p) {
    const int64_t rows = p.batch * p.hq * p.tq, warp = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5);
    const int64_t first = warp * p.delta_rows;
    if (first >= rows) return; /* the whole warp */
    if (p.delta_rows > 1 && !(((uintptr_t)p.dy | (uintptr_t)p.y) % 16) && delta_fast(p, first, rows, S())) return;
#pragma unroll 1
    for (int k = 0; k < p.delta_rows; k++) {
        const int64_t row = ((int64_t)blockIdx.x * 4 + (threadIdx.x >> 5)) * p.delta_rows + k; /* anew: few registers */
        if (row < p.batch * p.hq * p.tq) delta_row<S>(p, row);
    }
}

template <class S> FN WIDE at_of(const char *x, const int64_t *s, int64_t b, int64_t h, int64_t t, int64_t c) {
    return at<S>(x, b * s[0] + h * s[1] + t * s[2] + c * s[3]);
}

template <class F> struct att_stat { F delta, m, il; };
template <class F> FN att_stat<F> att_stat_of(const om_gpu_attention &p, int64_t row, bool any) {
    const int64_t rows = p.batch * p.hq * p.tq;
    const F *x = (const F *)p.delta + row;
    if (!any) return {0, 0, 0};
    return {ld(x), ld(x + rows), ld(x + 2 * rows)};
}

/* Of a pair: *kept: probability after dropout; the result: gradient of the product q k. */
template <class S, class F>
CALLED F att_pair(const om_gpu_attention &p, const att_head &a, uint64_t seed, int64_t i, int64_t j, F dot, F dp,
              const att_stat<F> &q, F *kept) {
    const F s = att_score<S, F>(p, a, i, j, dot);
    *kept = 0;
    if (q.il == 0 || s == -inf_of((F)0)) return 0;
    const F prob = exp_of(s - q.m) * q.il, keep = att_keep<F>(p, a, seed, i, j);
    *kept = prob * keep;
    const int64_t f = a.b * p.sfrozen[0] + a.h * p.sfrozen[1] + i * p.sfrozen[2] + j * p.sfrozen[3];
    if (p.frozen && ld(p.frozen + f)) return 0;
    return prob * (dp * keep - q.delta) * (F)p.scale;
}

/* 16 queries a block, tiles of 32 keys. */
template <class S> FN void attention_dq(const om_gpu_attention &p) {
    typedef WIDE F;
    SHARED(shared);
    F *q = (F *)shared, *dy = q + ATT_OWN * (p.d + 1), *k = dy + ATT_OWN * (p.dv_size + 1);
    F *v = k + ATT_TILE * (p.d + 1);
    F *w = v + ATT_TILE * (p.dv_size + 1);
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    att_head a = {blockIdx.y / p.hq, blockIdx.y % p.hq, 0};
    a.kv = a.h / (p.hq / p.hk);
    const int64_t i0 = (int64_t)blockIdx.x * ATT_OWN;
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    F own[ATT_ROWS][ATT_PARTS];
    for (int r = 0; r < ATT_ROWS; r++)
        for (int c = 0; c < ATT_PARTS; c++) own[r][c] = 0;
    att_load<S>(p.q, p.sq, a.b, a.h, i0, ATT_OWN, p.tq, p.d, q);
    att_load<S>(p.dy, p.sdy, a.b, a.h, i0, ATT_OWN, p.tq, p.dv_size, dy);
    F *mine = w + warp * ATT_TILE;
    const int64_t last = i0 + ATT_OWN - 1 + p.offset + 1, end = p.causal && last < p.tk ? last : p.tk;
    for (int64_t j0 = 0; j0 < end; j0 += ATT_TILE) {
        __syncthreads();
        att_load<S>(p.k, p.sk, a.b, a.kv, j0, ATT_TILE, p.tk, p.d, k);
        att_load<S>(p.v, p.sv, a.b, a.kv, j0, ATT_TILE, p.tk, p.dv_size, v);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ATT_ROWS; r++) {
            const unsigned row = warp * ATT_ROWS + r;
            const int64_t i = i0 + row, at_row = blockIdx.y * p.tq + i;
            F kept;
            const F dot = att_dot(q + row * (p.d + 1), k + lane * (p.d + 1), p.d);
            const F dp = att_dot(dy + row * (p.dv_size + 1), v + lane * (p.dv_size + 1), p.dv_size);
            const att_stat<F> stat = att_stat_of<F>(p, at_row, i < p.tq);
            mine[lane] = att_pair<S, F>(p, a, seed, i, j0 + lane, dot, dp, stat, &kept);
            __syncwarp();
            att_add(own[r], mine, k, p.d);
            __syncwarp();
        }
    }
#pragma unroll
    for (int r = 0; r < ATT_ROWS; r++) {
        const int64_t i = i0 + warp * ATT_ROWS + r, base = a.b * p.sdq[0] + a.h * p.sdq[1] + i * p.sdq[2];
        if (i >= p.tq) continue;
        att_put<S>(p.dq, base, p.sdq[3], p.d, own[r], (F)1);
    }
}

/* 16 keys a block, tiles of 32 queries of every head that shares them. */
template <class S> FN void attention_dkv(const om_gpu_attention &p) {
    typedef WIDE F;
    SHARED(shared);
    F *k = (F *)shared, *v = k + ATT_OWN * (p.d + 1), *q = v + ATT_OWN * (p.dv_size + 1);
    F *dy = q + ATT_TILE * (p.d + 1);
    F *w = dy + ATT_TILE * (p.dv_size + 1);
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t group = p.hq / p.hk, j0 = (int64_t)blockIdx.x * ATT_OWN;
    att_head a = {blockIdx.y / p.hk, 0, blockIdx.y % p.hk};
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    F dk[ATT_ROWS][ATT_PARTS], dv[ATT_ROWS][ATT_PARTS];
    for (int r = 0; r < ATT_ROWS; r++)
        for (int c = 0; c < ATT_PARTS; c++) dk[r][c] = dv[r][c] = 0;
    att_load<S>(p.k, p.sk, a.b, a.kv, j0, ATT_OWN, p.tk, p.d, k);
    att_load<S>(p.v, p.sv, a.b, a.kv, j0, ATT_OWN, p.tk, p.dv_size, v);
    F *ds = w + warp * 2 * ATT_TILE, *pr = ds + ATT_TILE;
    int64_t begin = p.causal ? j0 - p.offset : 0; /* the first query that sees one of these keys */
    begin = begin > 0 ? begin / ATT_TILE * ATT_TILE : 0;
    for (a.h = a.kv * group; a.h < (a.kv + 1) * group; a.h++)
        for (int64_t i0 = begin; i0 < p.tq; i0 += ATT_TILE) {
            __syncthreads();
            att_load<S>(p.q, p.sq, a.b, a.h, i0, ATT_TILE, p.tq, p.d, q);
            att_load<S>(p.dy, p.sdy, a.b, a.h, i0, ATT_TILE, p.tq, p.dv_size, dy);
            __syncthreads();
            const int64_t i = i0 + lane, at_row = (a.b * p.hq + a.h) * p.tq + i;
            const att_stat<F> stat = att_stat_of<F>(p, at_row, i < p.tq);
#pragma unroll
            for (int r = 0; r < ATT_ROWS; r++) {
                const unsigned row = warp * ATT_ROWS + r;
                F kept;
                const F dot = att_dot(q + lane * (p.d + 1), k + row * (p.d + 1), p.d);
                const F dp = att_dot(dy + lane * (p.dv_size + 1), v + row * (p.dv_size + 1), p.dv_size);
                ds[lane] = att_pair<S, F>(p, a, seed, i, j0 + row, dot, dp, stat, &kept);
                pr[lane] = kept;
                __syncwarp();
                att_add(dk[r], ds, q, p.d);
                att_add(dv[r], pr, dy, p.dv_size);
                __syncwarp();
            }
        }
#pragma unroll
    for (int r = 0; r < ATT_ROWS; r++) {
        const int64_t j = j0 + warp * ATT_ROWS + r;
        if (j >= p.tk) continue;
        const int64_t bk = a.b * p.sdk[0] + a.kv * p.sdk[1] + j * p.sdk[2];
        const int64_t bv = a.b * p.sdv[0] + a.kv * p.sdv[1] + j * p.sdv[2];
        att_put<S>(p.dk, bk, p.sdk[3], p.d, dk[r], (F)1);
        att_put<S>(p.dv, bv, p.sdv[3], p.dv_size, dv[r], (F)1);
    }
}

/* An element of the mask gets the sum over all pairs that it was added to, of which every `parts`-th is a thread's:
 * neighbouring elements by neighbouring threads. */
template <class S> FN void attention_dmask(const om_gpu_attention_mask &m) {
    typedef WIDE F;
    SHARED(shared);
    double *sums = (double *)shared, sum = 0;
    const om_gpu_attention &p = m.a;
    const int64_t size[4] = {p.batch, p.hq, p.tq, p.tk}, each = blockDim.x / m.parts;
    const int64_t lane = threadIdx.x % each, part = threadIdx.x / each, own = blockIdx.x * each + lane;
    const uint64_t seed = p.drop ? ld(&p.scalars->seed) : 0;
    int64_t elements = 1, pairs = 1, to = 0;
#pragma unroll
    for (int x = 0; x < 4; x++) *(m.step[x] ? &elements : &pairs) *= size[x];
    for (int64_t r = part; r < pairs && own < elements; r += m.parts) {
        int64_t at[4], e = own, rest = r;
        to = 0;
#pragma unroll
        for (int x = 3; x >= 0; x--) {
            int64_t *from = m.step[x] ? &e : &rest;
            at[x] = *from % size[x];
            *from /= size[x];
            to += at[x] * m.step[x];
        }
        const att_head a = {at[0], at[1], at[1] / (p.hq / p.hk)};
        const int64_t i = at[2], j = at[3];
        const att_stat<F> stat = att_stat_of<F>(p, (a.b * p.hq + a.h) * p.tq + i, true);
        if (stat.il == 0 || !att_sees(p, a.b, i, j)) continue;
        F dot = 0, dp = 0;
        for (int64_t c = 0; c < p.d; c++)
            dot += at_of<S>(p.q, p.sq, a.b, a.h, i, c) * at_of<S>(p.k, p.sk, a.b, a.kv, j, c);
        for (int64_t c = 0; c < p.dv_size; c++)
            dp += at_of<S>(p.dy, p.sdy, a.b, a.h, i, c) * at_of<S>(p.v, p.sv, a.b, a.kv, j, c);
        const F s = att_score<S, F>(p, a, i, j, dot);
        if (s == -inf_of((F)0)) continue;
        sum += exp_of(s - stat.m) * stat.il * (dp * att_keep<F>(p, a, seed, i, j) - stat.delta);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (part || own >= elements) return;
    for (int64_t k = 1; k < m.parts; k++) sum += sums[k * each + lane];
    float_put(m.dmask, p.mask_type, to, sum);
}

FLOATS(attention_delta, struct om_gpu_attention, ATT_BLOCK, attention_delta)
FLOATS(attention_dmask, struct om_gpu_attention_mask, ATT_BLOCK, attention_dmask)
FLOATS(attention_dq, struct om_gpu_attention, ATT_BLOCK, attention_dq)
FLOATS(attention_dkv, struct om_gpu_attention, ATT_BLOCK, attention_dkv)
