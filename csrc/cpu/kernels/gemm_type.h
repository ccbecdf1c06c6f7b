/* gemm_type.h - the part of gemm.k.c that is written once and compiled per compute type (after vec.h). */
/* A block of B, (GEMM_KC, GEMM_WIDTH * NR), and a group of panels of A, (GEMM_GROUP * MR, GEMM_KC), lie in L2 together;
 * within them one panel of B meets all panels of the group. A comes from L3 once per block of columns. On two cores
 * that share their L3 with others, blocks of one panel lose up to 20 % as soon as L3 is busy, four and eight do not;
 * depths of 384 and 512 are within 2 % of each other. */
#ifndef GEMM_KC
#define GEMM_KC 512
#endif
#ifndef GEMM_WIDTH
#define GEMM_WIDTH (OM_VBYTES == 64 ? 2 : 4)
#endif
#ifndef GEMM_GROUP
#define GEMM_GROUP 8
#endif
/* Every tile streams its panel of B from L2. Steps of k that are fetched ahead: a core that waits for a line of A or C
 * meanwhile runs out of instructions before it reaches the next ones. 4 to 14 are alike, 24 is late. */
#ifndef GEMM_AHEAD
#define GEMM_AHEAD 8
#endif
#undef NR
#define NR (OM_NV * VL)

/* Rows contiguous along the lanes: one sweep per k over a group of panels, so that memory is read in order. Each row of
 * a panel is moved by whole vectors: the source must have VL elements from the panel's last vector on. */
OM_INLINE void N(pack_rows)(T *restrict dst, int64_t size, int64_t panels, const void *src, int64_t kc, int64_t cs,
                            int s) {
    for (int64_t k = 0; k < kc; k++)
        for (int64_t p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int i = 0; i < OM_MR; i += VL)
                N(vstore)(dst + p * size + k * OM_MR + i, N(vget)(src, k * cs + p * OM_MR + i, s));
}

OM_INLINE void N(pack_a_as)(const om_gemm_job *g, int64_t p0, int64_t p1, int s) {
    int64_t size = (g->k * OM_MR + VL + 15) & ~(int64_t)15;
    T *pa = g->pa;
    size_t es = s == OM_BF16 || s == OM_F16 ? 2 : sizeof(T);
    int64_t reach = (OM_MR + VL - 1) / VL * VL; /* elements of a row that the sweep reads for a panel */
    int64_t full = g->rsa == 1 && g->m >= reach ? (g->m - reach) / OM_MR + 1 : 0;
    enum { GROUP = 8 };
    for (int64_t p = p0; p < p1;) {
        const char *src = (const char *)g->a + p * OM_MR * g->rsa * (int64_t)es;
        if (p < full) {
            int64_t cnt = (p1 < full ? p1 : full) - p;
            if (cnt > GROUP) cnt = GROUP;
            N(pack_rows)(pa + p * size, size, cnt, src, g->k, g->csa, s);
            p += cnt;
            continue;
        }
        int64_t w = g->m - p * OM_MR < OM_MR ? g->m - p * OM_MR : OM_MR;
        N(pack_strip)(pa + p * size, OM_MR, src, w, g->k, g->rsa, g->csa, s);
        p++;
    }
}

static void N(pack_a)(const om_gemm_job *g, int64_t p0, int64_t p1) {
#if OM_VEC_BITS == 32
    if (g->dtype == OM_BF16) {
        N(pack_a_as)(g, p0, p1, OM_BF16);
        return;
    }
    if (g->dtype == OM_F16) {
        N(pack_a_as)(g, p0, p1, OM_F16);
        return;
    }
#endif
    N(pack_a_as)(g, p0, p1, STORE_T);
}

/* B[k0:k0+kc, col0:col0+w] -> (kc, nr) */
OM_INLINE void N(pack_b_as)(const om_gemm_job *g, T *dst, int64_t nr, int64_t k0, int64_t kc, int64_t col0, int64_t w,
                            int s) {
    size_t es = s == OM_BF16 || s == OM_F16 ? 2 : sizeof(T);
    const char *src = (const char *)g->b + (k0 * g->rsb + col0 * g->csb) * (int64_t)es;
    N(pack_strip)(dst, nr, src, w, kc, g->csb, g->rsb, s);
}

static void N(pack_b)(const om_gemm_job *g, T *dst, int64_t nr, int64_t k0, int64_t kc, int64_t col0, int64_t w) {
#if OM_VEC_BITS == 32
    if (g->dtype == OM_BF16) {
        N(pack_b_as)(g, dst, nr, k0, kc, col0, w, OM_BF16);
        return;
    }
    if (g->dtype == OM_F16) {
        N(pack_b_as)(g, dst, nr, k0, kc, col0, w, OM_F16);
        return;
    }
#endif
    if (nr == NR) N(pack_b_as)(g, dst, NR, k0, kc, col0, w, STORE_T);
    else N(pack_b_as)(g, dst, nr, k0, kc, col0, w, STORE_T);
}

typedef struct N(tile) { /* where a register tile goes: c = alpha * acc + (add ? c : 0) + bias */
    T *c;
    int64_t rs, cs, width; /* width < NR: only the first columns exist */
    T alpha;
    bool add;
    const T *bias; /* NR numbers or NULL */
} N(tile);

/* One register tile: multiply and store. mr and nv are constants at the call. */
OM_INLINE void N(tile_run)(int mr, int nv, int64_t kc, const T *a, const T *b, int64_t ldb, const N(tile) *t) {
    V acc[OM_MR][OM_NV];
    T *c = t->c;
    int64_t rs = t->rs;
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v += 64 / (int)OM_VBYTES) __builtin_prefetch(c + i * rs + v * VL, 1);
    N(micro)(mr, nv, kc, a, 1, OM_MR, b, ldb, GEMM_AHEAD, acc);
    if (t->alpha != 1) {
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) acc[i][v] *= t->alpha;
    }
    if (t->bias) {
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) acc[i][v] += N(vload)(t->bias + v * VL);
    }
    if (t->cs == 1 && t->width >= nv * VL) {
        if (t->add) {
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
                for (int v = 0; v < nv; v++) acc[i][v] += N(vload)(c + i * rs + v * VL);
        }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) N(vstore)(c + i * rs + v * VL, acc[i][v]);
        return;
    }
    T tmp[OM_MR * NR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) N(vstore)(tmp + i * NR + v * VL, acc[i][v]);
    int64_t w = t->width < nv * VL ? t->width : nv * VL;
    for (int i = 0; i < mr; i++)
        for (int64_t j = 0; j < w; j++) {
            T *p = c + i * rs + j * t->cs;
            *p = tmp[i * NR + j] + (t->add ? *p : 0);
        }
}

#define ROWS(x)                                                                                     \
    case x:                                                                                         \
        if (nv == OM_NV) N(tile_run)(x, OM_NV, kc, a, b, ldb, t);                                   \
        else if (nv == 1) N(tile_run)(x, 1, kc, a, b, ldb, t);                                      \
        else N(tile_run)(x, OM_NV > 2 ? 2 : OM_NV, kc, a, b, ldb, t);                               \
        break;
static void N(tile_any)(int64_t mr, int nv, int64_t kc, const T *a, const T *b, int64_t ldb, const N(tile) *t) {
    switch (mr) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if OM_MR > 4
        ROWS(5) ROWS(6)
#endif
#if OM_MR > 6
        ROWS(7) ROWS(8)
#endif
    default: break;
    }
}
#undef ROWS

static __attribute__((noinline)) void N(tile_full)(int64_t kc, const T *a, const T *b, int64_t ldb, const N(tile) *t) {
    N(tile_run)(OM_MR, OM_NV, kc, a, b, ldb, t);
}

/* B[k0:k0+kc, col0:col1] as panels of NR columns, depth * NR apart; columns after n are 0. */
static void N(pack_cols)(const om_gemm_job *g, T *dst, int64_t depth, int64_t k0, int64_t kc, int64_t col0,
                         int64_t col1) {
    for (int64_t c = col0; c < col1; c += NR, dst += depth * NR) {
        int64_t w = col1 - c < NR ? col1 - c : NR;
        N(pack_b)(g, dst, (w + VL - 1) / VL * VL, k0, kc, c, w);
    }
}

static void N(pack_blocks)(const om_gemm_job *g, void *to, int64_t block0, int64_t block1) {
    enum { COLS = GEMM_WIDTH * NR };
    const int64_t depth = om_gemm_depth(g->k, GEMM_KC);
    T *dst = (T *)to + block0 * om_gemm_block_size(g->k, GEMM_KC, COLS);
    for (int64_t col = block0 * COLS; col < block1 * COLS && col < g->n; col += COLS)
        for (int64_t k0 = 0; k0 < g->k; k0 += GEMM_KC, dst += depth * COLS)
            N(pack_cols)(g, dst, depth, k0, g->k - k0 < GEMM_KC ? g->k - k0 : GEMM_KC, col,
                         g->n - col < COLS ? g->n : col + COLS);
}

static void N(block)(const om_gemm_job *g, int64_t row0, int64_t row1, int64_t col0, int64_t col1, int64_t next,
                     void *work) {
    enum { COLS = GEMM_WIDTH * NR };
    T *own = work, *wide = own + GEMM_KC * COLS; /* `wide`: C in the compute type, when it is stored narrower */
    int64_t size = (g->k * OM_MR + VL + 15) & ~(int64_t)15, width = col1 - col0;
    const bool as_is = g->dtype == STORE_T, narrow = !as_is && !g->wide_c;
    /* too few rows to pay for packing: B is read where it is (all but the last, incomplete panel) */
    bool direct = !g->pb && g->csb == 1 && as_is && row1 - row0 <= 2 * OM_MR;
    const int64_t depth = g->pb ? om_gemm_depth(g->k, GEMM_KC) : GEMM_KC; /* of a panel, in memory */
    const T *bp = g->pb ? (const T *)g->pb + col0 / COLS * om_gemm_block_size(g->k, GEMM_KC, COLS) : own;
    T bias[COLS];
    if (g->bias)
        for (int64_t j = 0; j < COLS; j++) {
            int64_t at = col0 + (j < width ? j : 0);
            bias[j] = !narrow              ? N(get)(g->bias, at, STORE_T)
                      : g->dtype == OM_BF16 ? N(get)(g->bias, at, OM_BF16)
                                            : N(get)(g->bias, at, OM_F16);
        }
    N(tile) t = {.alpha = (T)g->alpha, .rs = narrow ? COLS : g->rsc, .cs = narrow ? 1 : g->csc};
    if (narrow && g->beta)
        for (int64_t i = row0; i < row1; i++)
            for (int64_t j = 0; j < width; j++) {
                int64_t at = i * g->rsc + (col0 + j) * g->csc;
                wide[(i - row0) * COLS + j] = g->dtype == OM_BF16 ? N(get)(g->c, at, OM_BF16)
                                                                  : N(get)(g->c, at, OM_F16);
            }
    const int64_t tiles = (row1 - row0 + OM_MR - 1) / OM_MR * ((width + NR - 1) / NR);
    int64_t k0 = 0;
    do { /* at least once: k = 0 still writes C */
        int64_t kc = g->k - k0 < GEMM_KC ? g->k - k0 : GEMM_KC;
        const bool more = k0 + kc < g->k; /* another slice of these columns; else on to the next columns */
        const int64_t at = more ? k0 + kc : 0, col = more ? col0 : next, end = more ? col1 : g->n;
        ahead soon = {0};
        if (!direct && !g->pb && col >= 0)
            soon = ahead_of(g, at, g->k - at < GEMM_KC ? g->k - at : GEMM_KC, col, end - col < COLS ? end - col : COLS,
                            tiles);
        int64_t in_place = direct ? width / NR * NR : 0; /* columns */
        if (!g->pb) N(pack_cols)(g, own + in_place / NR * depth * NR, depth, k0, kc, col0 + in_place, col1);
        t.add = g->beta || k0 > 0;
        for (int64_t i0 = row0; i0 < row1; i0 += GEMM_GROUP * OM_MR)
            for (int64_t j = 0; j < width; j += NR) {
                int64_t w = width - j < NR ? width - j : NR, ldb = (w + VL - 1) / VL * VL;
                const T *b = bp + j / NR * depth * NR;
                if (j < in_place) b = (const T *)g->b + k0 * g->rsb + col0 + j, ldb = g->rsb;
                t.width = narrow ? NR : w;
                t.bias = g->bias && k0 == 0 ? bias + j : NULL;
                for (int64_t i = i0; i < row1 && i < i0 + GEMM_GROUP * OM_MR; i += OM_MR) {
                    const T *a = (const T *)g->pa + i / OM_MR * size + k0 * OM_MR;
                    t.c = narrow ? wide + (i - row0) * COLS + j : (T *)g->c + i * g->rsc + (col0 + j) * g->csc;
                    ahead_fetch(&soon);
                    if (w > NR - VL && row1 - i >= OM_MR) N(tile_full)(kc, a, b, ldb, &t);
                    else N(tile_any)(row1 - i < OM_MR ? row1 - i : OM_MR, (int)((w + VL - 1) / VL), kc, a, b, ldb, &t);
                }
            }
        if (g->pb) bp += depth * COLS;
        k0 += kc;
    } while (k0 < g->k);
    if (narrow)
        for (int64_t i = row0; i < row1; i++)
            for (int64_t j = 0; j < width; j++) {
                int64_t at = i * g->rsc + (col0 + j) * g->csc;
                T x = wide[(i - row0) * COLS + j];
                if (g->dtype == OM_BF16) N(put)(g->c, at, x, OM_BF16);
                else N(put)(g->c, at, x, OM_F16);
            }
}

/* Products too small to be packed: `count` of them, sa, sb, sc elements apart. */
OM_INLINE void N(few_as)(const om_gemm_job *g, int64_t count, int64_t sa, int64_t sb, int64_t sc, int s) {
    const int sum_s = g->wide_c ? STORE_T : s;
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = 0; i < g->m; i++)
            for (int64_t j = 0; j < g->n; j++) {
                const int64_t a = q * sa + i * g->rsa, b = q * sb + j * g->csb, c = q * sc + i * g->rsc + j * g->csc;
                T sum = 0;
                for (int64_t k = 0; k < g->k; k++)
                    sum += N(get)(g->a, a + k * g->csa, s) * N(get)(g->b, b + k * g->rsb, s);
                sum *= (T)g->alpha;
                if (g->bias) sum += N(get)(g->bias, j, sum_s);
                if (g->beta) sum += N(get)(g->c, c, sum_s);
                N(put)(g->c, c, sum, sum_s);
            }
}

static void N(few)(const om_gemm_job *g, int64_t count, int64_t sa, int64_t sb, int64_t sc) {
#if OM_VEC_BITS == 32
    if (g->dtype != STORE_T) {
        if (g->dtype == OM_BF16) N(few_as)(g, count, sa, sb, sc, OM_BF16);
        else N(few_as)(g, count, sa, sb, sc, OM_F16);
        return;
    }
#endif
    N(few_as)(g, count, sa, sb, sc, STORE_T);
}

/* Slices are added in the order of k, the bias and what was in C behind the first: as `block` does. */
static void N(join)(const om_gemm_job *g, const void *sums, int64_t slice, int64_t slices, int64_t row0, int64_t row1) {
    enum { COLS = 16 * VL };
    const T *bias = g->bias;
    T sum[COLS];
    for (int64_t i = row0; i < row1; i++)
        for (int64_t j0 = 0; j0 < g->n; j0 += COLS) {
            const int64_t w = g->n - j0 < COLS ? g->n - j0 : COLS;
            const T *x = (const T *)sums + i * g->n + j0;
            T *c = (T *)g->c + i * g->rsc + j0 * g->csc;
            for (int64_t j = 0; j < w; j++) sum[j] = bias ? x[j] + bias[j0 + j] : x[j];
            if (g->beta)
                for (int64_t j = 0; j < w; j++) sum[j] += c[j * g->csc];
            for (int64_t s = 1; s < slices; s++) {
                x += slice;
                for (int64_t j = 0; j < w; j++) sum[j] += x[j];
            }
            if (g->csc == 1) memcpy(c, sum, (size_t)w * sizeof(T));
            else for (int64_t j = 0; j < w; j++) c[j * g->csc] = sum[j];
        }
}
