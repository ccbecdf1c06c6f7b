/* unseen.h - which rows of a batch nobody sees: what padding.c may leave out, and the proof (unseen.c).
 *
 * A row is one position of one sample: of a tensor (batch, time, ...), or (batch * time, ...), what lies at (b, t). A
 * value is `unseen` outside of a set of rows when whatever stands in its other rows changes no output, no write and no
 * gradient. Values whose rows meet on the way (row-wise operators, attention) share one set, their group's. It is made
 * of its readers:
 *
 *   loss        rows whose label counts
 *   slice       positions that it takes, of every sample
 *   keys        what attention reads as keys and values: those that its mask lets through; where nothing but a causal
 *               rule hides keys, all up to the sample's last row that somebody reads
 *
 * A query that sees no key at all gives zeros (a mask of bools: then nothing depends on keys), or a mean over all keys
 * (a finite number was added to scores: at MX_HIDE and below it hides, above half of that a key is there). The second
 * are `checked` readers: the run looks whether there is such a query among the rows that are read, and then keeps all
 * rows of its sample.
 */
#ifndef OM_PASSES_UNSEEN_H
#define OM_PASSES_UNSEEN_H

#include "graph/facts.h"

typedef enum om_unseen_form {
    OM_ROWS_NONE, /* not looked at */
    OM_ROWS_FLAT, /* the leading `at` axes count the rows */
    OM_ROWS_TURNED, /* samples along axis `batch`, positions along axis `at`, which are not the leading two */
} om_unseen_form;

typedef struct om_unseen_value {
    uint8_t form, at, batch;
    bool seen;        /* somebody needs all rows */
    om_id group;
} om_unseen_value;

typedef enum om_reader_kind { OM_READER_LOSS, OM_READER_SLICE, OM_READER_KEYS } om_reader_kind;
typedef struct om_reader {
    uint8_t kind;
    bool checked, causal; /* KEYS: of nothing but a causal rule, or that beside its mask */
    bool negated;         /* KEYS: mask is true where keys are hidden */
    om_id node, group;
    om_id queries;        /* KEYS: their group; OM_NONE: all are read */
    om_id mask;           /* KEYS: (batch, 1, 1, time), bool or added to scores; OM_NONE: none */
} om_reader;

typedef struct om_group {
    om_id parent;         /* itself: a root */
    om_dim rows, batch, time;
    bool turned;          /* batch and time are known */
    const char *why;      /* not NULL: its rows are not left out */
    int products;         /* matrix products over its rows */
} om_group;

typedef struct om_unseen {
    const om_facts *f;
    om_unseen_value *value; /* per value */
    uint8_t *cone;          /* per node: groups' masks are made of it */
    OM_VEC(om_group) groups;
    OM_VEC(om_reader) readers;
} om_unseen;

om_status om_unseen_find(om_ctx *cx, const om_facts *f, om_unseen *u);
void om_unseen_free(om_ctx *cx, om_unseen *u);
om_id om_unseen_root(const om_unseen *u, om_id group);
/* the root of v's group where v's other rows may be anything, and leaving them out pays; OM_NONE otherwise */
om_id om_unseen_group(const om_unseen *u, om_id v);
/* Does operand v of a node whose result has rows in that form have a row for each of them? */
bool om_unseen_apart(const om_graph *g, om_id v, const om_type *y, const om_unseen_value *form);

#endif
