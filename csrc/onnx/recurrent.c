/* recurrent.c - RNN, LSTM and GRU. Form of a rule: onnx/map.h.
 *
 * ortmodule.RNN, .LSTM, .GRU are one direction of one layer as torch writes it: (x, w_ih, w_hh, b_ih, b_hh, h0, c0?) ->
 * y, last h, last c; gates in torch's order. The standard operators have both directions in one, gates in another order
 * and the batch inside of the directions: their weights are cut and put in order first.
 */
#include "onnx/map.h"
#include "ops/recurrent.h"

typedef struct layer { om_id w_ih, w_hh, b_ih, b_hh, h0, c0; } layer; /* biases: OM_NONE for none */

/* y (t, n, h), last h and c (n, h) */
static void map_direction(om_onnx *o, int kind, om_id x, const layer *l, bool reverse, om_id *y, om_id *h, om_id *c) {
    om_graph *g = o->g;
    om_id bias = l->b_ih;
    if (kind != OM_GRU && bias != OM_NONE) bias = MAKE2(add, bias, l->b_hh);
    om_id gx = om_make(g, &om_op_matmul, (om_id[]){x, om_b_transpose(g, l->w_ih, 0, 1), bias}, bias == OM_NONE ? 2 : 3,
                       NULL, 0);
    *y = om_make(g, &om_op_recurrent, (om_id[]){gx, l->w_hh, kind == OM_GRU ? l->b_hh : OM_NONE, l->h0, l->c0}, 5,
                 OM_ATTRS(OM_AI("kind", kind), OM_AI("reverse", reverse)));
    *h = *c = OM_NONE;
    if (FAILED) return;
    const om_type t = *om_ty(g, *y);
    const om_dim end = om_dim_sub(g, t.dim[0], 1);
    *h = reverse ? om_b_slice(g, *y, 0, 0, 1, 1) : om_b_slice(g, *y, 0, end, t.dim[0], 1);
    *h = om_b_reshape(g, *h, t.dim + 1, 2);
    *c = *y + 1;
}

static om_status map_torch_layer(om_onnx *o) {
    const char *name = o->row->name, *how = om_onnx_str(o, "nonlinearity", "tanh");
    const int kind = !strcmp(name, "LSTM")  ? OM_LSTM
                     : !strcmp(name, "GRU") ? OM_GRU
                     : !strcmp(how, "relu") ? OM_RNN_RELU
                                            : OM_RNN_TANH;
    const layer l = {IN(1), IN(2), IN(3), IN(4), IN(5), IN(6)};
    om_id x = IN(0), y, h, c;
    om_type t = om_map_type_of(o, x), w = om_map_type_of(o, l.w_ih);
    ONNX_CHECK(o, t.rank == 3 && w.rank == 2, "x has rank %d, its weight %d; 3 and 2 are needed", t.rank, w.rank);
    ONNX_CHECK(o, (l.b_ih == OM_NONE) == (l.b_hh == OM_NONE), "one bias without the other");
    ONNX_CHECK(o, (l.c0 != OM_NONE) == (kind == OM_LSTM), "a cell state is for LSTM");
    map_direction(o, kind, x, &l, INT("reverse", 0) != 0, &y, &h, &c);
    SET(0, y);
    SET(1, h);
    if (kind == OM_LSTM) SET(2, c);
    return o->cx->status;
}

/* Row blocks of v (n_block blocks along axis 0) in another order. */
static om_id map_blocks(om_onnx *o, om_id v, const int *order, int n_block) {
    om_graph *g = o->g;
    om_id part[4];
    if (FAILED) return OM_NONE;
    const om_dim size = om_dim_div(g, om_ty(g, v)->dim[0], n_block);
    for (int i = 0; i < n_block; i++)
        part[i] = om_b_slice(g, v, 0, om_dim_mul(g, size, order[i]), om_dim_mul(g, size, order[i] + 1), 1);
    return n_block == 1 ? v : om_make(g, &om_op_concat, part, n_block, OM_ATTRS(OM_AI("axis", 0)));
}

static om_id map_direction_of(om_onnx *o, om_id v, int dir) { /* v[dir] */
    om_graph *g = o->g;
    if (v == OM_NONE || FAILED) return OM_NONE;
    const om_type t = *om_ty(g, v);
    return om_b_reshape(g, om_b_slice(g, v, 0, dir, dir + 1, 1), t.dim + 1, t.rank - 1);
}

static om_status map_standard(om_onnx *o) {
    static const int order[4][4] = {{0}, {0}, {0, 2, 3, 1}, {1, 0, 2}}; /* i o f c, z r h -> torch's */
    om_graph *g = o->g;
    const char *name = o->row->name, *way = om_onnx_str(o, "direction", "forward");
    int kind = !strcmp(name, "LSTM") ? OM_LSTM : !strcmp(name, "GRU") ? OM_GRU : OM_RNN_TANH;
    const int gates = om_rnn_gates(kind), dirs = !strcmp(way, "bidirectional") ? 2 : 1;
    om_id x = IN(0), w = IN(1), r = IN(2), bias = IN(3), h0 = IN(5), c0 = kind == OM_LSTM ? IN(6) : OM_NONE, out[3][2];
    om_type t = om_map_type_of(o, x), wt = om_map_type_of(o, w), rt = om_map_type_of(o, r);
    const Onnx__AttributeProto *acts = om_onnx_attr(o, "activations");
    if (FAILED) return o->cx->status;
    ONNX_CHECK(o, t.rank == 3 && wt.rank == 3 && rt.rank == 3 && om_dim_numel(g, &wt) != 0,
               "x has rank %d, W %d, R %d; 3 each are needed", t.rank, wt.rank, rt.rank);
    ONNX_CHECK(o, wt.dim[0] == dirs && rt.dim[0] == dirs, "direction %.20s and weights for %lld directions", way,
               (long long)wt.dim[0]);
    if (om_onnx_has(o, 4)) REFUSE("sequence_lens is not supported: one length for all");
    if (om_onnx_has(o, 7)) REFUSE("peepholes are not supported");
    if (om_onnx_attr(o, "clip") || INT("layout", 0) || INT("input_forget", 0))
        REFUSE("clip, layout and input_forget are not supported");
    if (kind == OM_GRU && !INT("linear_before_reset", 0)) REFUSE("linear_before_reset = 0 is not supported");
    for (size_t i = 0; acts && i < acts->n_strings; i++) {
        static const char *const usual[4][3] = {{"Relu"}, {"Tanh"}, {"Sigmoid", "Tanh", "Tanh"}, {"Sigmoid", "Tanh"}};
        const ProtobufCBinaryData *s = &acts->strings[i];
        if (kind <= OM_RNN_TANH && i == 0 && s->len == 4 && !memcmp(s->data, "Relu", 4)) kind = OM_RNN_RELU;
        const char *want = usual[kind][i % (kind == OM_LSTM ? 3 : kind == OM_GRU ? 2 : 1)];
        if (s->len != strlen(want) || memcmp(s->data, want, s->len) != 0)
            REFUSE("activation %.*s", (int)s->len, s->data);
    }
    const om_dim state[3] = {dirs, t.dim[1], rt.dim[2]};
    if (h0 == OM_NONE) h0 = om_b_fill(g, t.dtype, state, 3, 0);
    if (c0 == OM_NONE && kind == OM_LSTM) c0 = om_b_fill(g, t.dtype, state, 3, 0);
    for (int d = 0; d < dirs; d++) {
        layer l = {map_blocks(o, map_direction_of(o, w, d), order[kind], gates),
                   map_blocks(o, map_direction_of(o, r, d), order[kind], gates), OM_NONE, OM_NONE,
                   map_direction_of(o, h0, d), map_direction_of(o, c0, d)};
        om_id b = map_direction_of(o, bias, d);
        if (b != OM_NONE) { /* of W, then of R */
            const om_dim all = om_ty(g, b)->dim[0], half = om_dim_div(g, all, 2);
            l.b_ih = map_blocks(o, om_b_slice(g, b, 0, 0, half, 1), order[kind], gates);
            l.b_hh = map_blocks(o, om_b_slice(g, b, 0, half, all, 1), order[kind], gates);
        }
        map_direction(o, kind, x, &l, d == 1 || !strcmp(way, "reverse"), &out[0][d], &out[1][d], &out[2][d]);
        if (FAILED) return o->cx->status;
        const om_type y = *om_ty(g, out[0][d]);
        out[0][d] = om_b_reshape(g, out[0][d], (om_dim[]){y.dim[0], 1, y.dim[1], y.dim[2]}, 4);
        for (int i = 1; i < (kind == OM_LSTM ? 3 : 2); i++)
            out[i][d] = om_b_reshape(g, out[i][d], (om_dim[]){1, y.dim[1], y.dim[2]}, 3);
    }
    for (int i = 0; i < (kind == OM_LSTM ? 3 : 2); i++)
        SET(i, dirs == 1 ? out[i][0] : om_make(g, &om_op_concat, out[i], 2, OM_ATTRS(OM_AI("axis", i == 0))));
    return o->cx->status;
}

const om_onnx_op om_onnx_ops_recurrent[] = {
    /* domain, operator, inputs min, max, outputs max, rule, size rule, engine operator of a shared rule */
    {"", "RNN", 3, 6, 2, map_standard, NULL, NULL},
    {"", "GRU", 3, 6, 2, map_standard, NULL, NULL},
    {"", "LSTM", 3, 8, 3, map_standard, NULL, NULL},
    {"ortmodule", "RNN", 6, 6, 2, map_torch_layer, NULL, NULL},
    {"ortmodule", "GRU", 6, 6, 2, map_torch_layer, NULL, NULL},
    {"ortmodule", "LSTM", 7, 7, 3, map_torch_layer, NULL, NULL},
    {0},
};
