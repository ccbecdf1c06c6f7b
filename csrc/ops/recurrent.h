/* recurrent.h - attribute `kind` of recurrent layers. */
#ifndef OM_OPS_RECURRENT_H
#define OM_OPS_RECURRENT_H

enum { OM_RNN_RELU, OM_RNN_TANH, OM_LSTM, OM_GRU };

/* Blocks of `size` rows that its weights have. */
static inline int om_rnn_gates(int64_t kind) { return kind == OM_LSTM ? 4 : kind == OM_GRU ? 3 : 1; }

#endif
