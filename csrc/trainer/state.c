/* state.c - parameters as one run of f32, checkpoints, properties.
 *
 * A checkpoint is a safetensors file: parameters and buffers under their own names, moments as
 * "optimizer.exp_avg:NAME" and "optimizer.exp_avg_sq:NAME" (SGD: exp_avg is the momentum), and in its metadata
 *
 *     format=ortmodule-checkpoint  version=1
 *     nominal=1                    no tensors: om_trainer_set brings the values
 *     updates, rate, initial_rate  numbers
 *     seed, drawn                  with moments: where random operators are, numbers from 0 up to 2^64 - 1
 *     frozen:NAME=1                this parameter is not trained
 *     int:NAME float:NAME string:NAME    properties
 *
 * Reading compares everything with the model before it changes anything.
 */
#include "graph/number.h"
#include "trainer/trainer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const moment[] = {OM_MOMENT_1, OM_MOMENT_2};

/* --- one buffer ---------------------------------------------------------------------------------- */

static bool in_buffer(const om_tparam *p, bool trainable_only) {
    return om_is_float(p->value.dtype) && (p->trainable || !trainable_only);
}

bool om_trainer_nominal(const om_trainer *t) { return t && t->nominal; }

int64_t om_trainer_elements(const om_trainer *t, bool trainable_only) {
    int64_t n = 0;
    for (int i = 0; i < om_trainer_params(t); i++)
        if (in_buffer(&t->param[i], trainable_only)) n += om_numel(&t->param[i].value);
    return n;
}

static om_status buffer_copy(const om_trainer *t, bool trainable_only, float *buffer, int64_t n, bool out) {
    const int64_t want = om_trainer_elements(t, trainable_only);
    OM_CHECK(t->host, buffer || !want, "%s is NULL", out ? "get: to" : "set: from");
    if (n != want)
        return om_fail(t->host, OM_INVALID, "a buffer of %lld elements; these parameters have %lld", (long long)n,
                       (long long)want);
    for (int i = 0; i < t->n_param; i++) {
        if (!in_buffer(&t->param[i], trainable_only)) continue;
        om_tensor x = t->param[i].value, run = x;
        run.dtype = OM_F32;
        run.data = buffer;
        OM_TRY(om_copy(t->host, out ? &x : &run, out ? &run : &x));
        buffer += om_numel(&x);
    }
    return OM_OK;
}

om_status om_trainer_get(const om_trainer *t, bool trainable_only, float *to, int64_t n) {
    OM_TRY(om_trainer_status(t));
    OM_TRY(om_trainer_loaded((om_trainer *)(uintptr_t)t));
    return buffer_copy(t, trainable_only, to, n, true);
}

om_status om_trainer_set(om_trainer *t, bool trainable_only, const float *from, int64_t n) {
    OM_TRY(om_trainer_status(t));
    if (trainable_only) OM_TRY(om_trainer_loaded(t));
    OM_TRY(buffer_copy(t, trainable_only, (float *)(uintptr_t)from, n, false));
    t->nominal = false;
    return OM_OK;
}

/* --- properties ---------------------------------------------------------------------------------- */

static void property_free(om_ctx *cx, om_property *p) {
    om_free(cx, (void *)(uintptr_t)p->name);
    om_free(cx, (void *)(uintptr_t)p->s);
}

static const char *text_copy(om_ctx *cx, const char *s) {
    char *d = om_alloc(cx, strlen(s) + 1);
    return d ? memcpy(d, s, strlen(s) + 1) : NULL;
}

static om_status property_copy(om_ctx *cx, const om_property *p, om_property *q) {
    *q = *p;
    q->s = NULL;
    q->name = text_copy(cx, p->name);
    if (q->name && p->kind == 's') q->s = text_copy(cx, p->s);
    if (cx->status != OM_OK) property_free(cx, q);
    return cx->status;
}

void om_trainer_properties_free(om_trainer *t) {
    for (uint32_t i = 0; i < t->property.n; i++) property_free(t->host, &t->property.v[i]);
    om_free(t->host, t->property.v);
    t->property.v = NULL;
    t->property.n = t->property.cap = 0;
}

static int property_find(const om_trainer *t, const char *name) {
    for (uint32_t i = 0; i < t->property.n; i++)
        if (!strcmp(t->property.v[i].name, name)) return (int)i;
    return -1;
}

om_status om_trainer_set_property(om_trainer *t, const om_property *p) {
    om_property q;
    OM_TRY(om_trainer_status(t));
    OM_CHECK(t->host, p, "set_property: p is NULL");
    OM_CHECK(t->host, p->name && *p->name && om_utf8_valid(p->name, strlen(p->name)),
             "a property needs a name, in UTF-8");
    OM_CHECK(t->host, p->kind == 'i' || p->kind == 'f' || (p->kind == 's' && p->s && om_utf8_valid(p->s, strlen(p->s))),
             "property '%.80s': kind 'i', 'f', or 's' with a text in UTF-8 is needed", p->name);
    OM_TRY(property_copy(t->host, p, &q));
    const int at = property_find(t, p->name);
    om_property *slot = at >= 0 ? &t->property.v[at] : OM_PUSH(t->host, &t->property);
    if (!slot) {
        property_free(t->host, &q);
        return t->host->status;
    }
    if (at >= 0) property_free(t->host, slot);
    *slot = q;
    return OM_OK;
}

int om_trainer_properties(const om_trainer *t) { return t ? (int)t->property.n : 0; }
om_property om_trainer_property_at(const om_trainer *t, int i) {
    return i >= 0 && i < om_trainer_properties(t) ? t->property.v[i] : (om_property){.name = ""};
}
bool om_trainer_property(const om_trainer *t, const char *name, om_property *p) {
    const int i = t && name ? property_find(t, name) : -1;
    if (i >= 0 && p) *p = t->property.v[i];
    return i >= 0;
}

/* --- reading a checkpoint ------------------------------------------------------------------------ */

static bool number_whole(const char *text, int64_t *v) {
    char *end;
    errno = 0;
    *v = strtoll(text, &end, 10);
    return *text && !*end && !errno;
}
static bool number_unsigned(const char *text, uint64_t *v) {
    char *end;
    errno = 0;
    *v = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno; /* strtoull takes a sign */
}
static bool number_real(const char *text, double *v) {
    char *end;
    *v = om_number_read(text, &end);
    return *text && !*end;
}

om_status om_trainer_parse(om_trainer *t, const char *what, om_bytes checkpoint, om_tensors *f) {
    OM_TRY((om_odtc_is(checkpoint.data, checkpoint.size) ? om_odtc_read : om_tensors_read)(
        t->host, what, checkpoint.data, checkpoint.size, f));
    const char *format = om_tensors_meta(f, "format"), *version = om_tensors_meta(f, "version");
    if (!format || strcmp(format, OM_CHECKPOINT_FORMAT) != 0)
        return om_fail(t->host, OM_INVALID, "%s: metadata 'format' is %.40s; '" OM_CHECKPOINT_FORMAT "' is expected",
                       what, format ? format : "missing");
    if (!version || strcmp(version, "1") != 0)
        return om_fail(t->host, OM_UNSUPPORTED, "%s: version %.20s; this library reads 1", what,
                       version ? version : "");
    return OM_OK;
}

om_status om_trainer_trainable(om_trainer *t, const om_tensors *f) {
    for (uint32_t i = 0; i < f->meta.n; i++) {
        if (strncmp(f->meta.v[i].key, "frozen:", 7) != 0) continue;
        const int at = om_trainer_find(t, f->meta.v[i].key + 7);
        if (at < 0)
            return om_fail(t->host, OM_INVALID, "checkpoint: '%.80s' is no parameter of the model",
                           f->meta.v[i].key + 7);
        t->param[at].trainable = false;
    }
    return OM_OK;
}

static om_status entry_fits(om_trainer *t, const char *what, const om_entry *e, const om_tensor *want) {
    if (om_same_kind(&e->t, want)) return OM_OK;
    return om_fail(t->host, OM_INVALID, "%s: '%.80s' is %s, the model's is %s: another model's file", what, e->name,
                   om_kind_write(e->t.dtype, e->t.rank, e->t.dim).s,
                   om_kind_write(want->dtype, want->rank, want->dim).s);
}

typedef struct numbers {
    int64_t updates;
    double rate, initial_rate;
    uint64_t seed, drawn;
    bool nominal;
} numbers;

static om_status meta_check(om_trainer *t, const char *what, const om_tensors *f, numbers *x) {
    *x = (numbers){.rate = t->rate, .initial_rate = t->initial_rate, .seed = t->seed, .drawn = t->drawn};
    for (uint32_t i = 0; i < f->meta.n; i++) {
        const char *key = f->meta.v[i].key, *text = f->meta.v[i].text;
        int64_t whole;
        double real;
        bool good = true;
        if (!strcmp(key, "updates"))
            good = number_whole(text, &x->updates) && x->updates >= 0 && x->updates < INT64_MAX;
        else if (!strcmp(key, "rate"))
            good = number_real(text, &x->rate) && isfinite(x->rate) && x->rate >= 0;
        else if (!strcmp(key, "initial_rate"))
            good = number_real(text, &x->initial_rate) && isfinite(x->initial_rate) && x->initial_rate >= 0;
        else if (!strcmp(key, "seed"))
            good = number_unsigned(text, &x->seed);
        else if (!strcmp(key, "drawn"))
            good = number_unsigned(text, &x->drawn);
        else if (!strcmp(key, "nominal"))
            good = !strcmp(text, "1") || !strcmp(text, "0"), x->nominal = *text == '1';
        else if (!strncmp(key, "int:", 4))
            good = key[4] && number_whole(text, &whole);
        else if (!strncmp(key, "float:", 6))
            good = key[6] && number_real(text, &real);
        else if (!strncmp(key, "string:", 7))
            good = key[7] != 0;
        else if (!strncmp(key, "frozen:", 7)) {
            const int at = om_trainer_find(t, key + 7);
            good = at >= 0;
        }
        if (!good) return om_fail(t->host, OM_INVALID, "%s: metadata '%.80s' is '%.40s'", what, key, text);
    }
    return OM_OK;
}

static bool moment_name(const char *name) {
    return !strncmp(name, moment[0], strlen(moment[0])) || !strncmp(name, moment[1], strlen(moment[1]));
}

/* Which tensor of the trainer's an entry is; NULL: none. */
static om_tensor *entry_target(om_trainer *t, const char *name) {
    for (int k = 0; k < 2; k++) {
        const size_t n = strlen(moment[k]);
        if (strncmp(name, moment[k], n) != 0) continue;
        const int at = om_trainer_find(t, name + n);
        om_tensor *x = at < 0 ? NULL : k ? &t->param[at].v : &t->param[at].m;
        return x && x->dtype ? x : NULL;
    }
    const int at = om_trainer_find(t, name);
    return at < 0 ? NULL : &t->param[at].value;
}

static om_status properties_read(om_trainer *t, const om_tensors *f) {
    for (uint32_t i = 0; i < f->meta.n; i++) {
        const char *key = f->meta.v[i].key, *text = f->meta.v[i].text;
        om_property p = {0};
        double real;
        if (!strncmp(key, "int:", 4))
            p = (om_property){.name = key + 4, .kind = 'i', .i = strtoll(text, NULL, 10)};
        else if (!strncmp(key, "float:", 6) && number_real(text, &real))
            p = (om_property){.name = key + 6, .kind = 'f', .f = real};
        else if (!strncmp(key, "string:", 7))
            p = (om_property){.name = key + 7, .kind = 's', .s = text};
        if (p.kind) OM_TRY(om_trainer_set_property(t, &p));
    }
    return OM_OK;
}

/* A piece at a time, so that a file's bytes and what is made of them are not both there. */
static void entry_copy(void *to, const om_entry *e, bool spend) {
    enum { PIECE = 1 << 20 };
    char *from = e->t.data;
    for (size_t at = 0, n; at < e->size; at += n) {
        n = PIECE - (uintptr_t)(from + at) % PIECE; /* ends at a page's end */
        if (n > e->size - at) n = e->size - at;
        memcpy((char *)to + at, from + at, n);
        if (spend) om_pages_drop(from + at, n);
    }
}

om_status om_trainer_take(om_trainer *t, const char *what, const om_tensors *f) {
    numbers x;
    int values = 0, moments = 0, want_moments = 0, with_moments = 0, left = 0;
    OM_TRY(meta_check(t, what, f, &x));
    for (int i = 0; i < t->n_param; i++) {
        const om_tparam *p = &t->param[i];
        want_moments += (p->m.dtype != 0) + (p->v.dtype != 0);
        if (!x.nominal && !om_tensors_find(f, p->name))
            return om_fail(t->host, OM_INVALID, "%s: has no '%.80s', which is a parameter of the model", what, p->name);
    }
    for (uint32_t i = 0; i < f->entry.n; i++) {
        const om_entry *e = &f->entry.v[i];
        const bool is_moment = moment_name(e->name);
        const om_tensor *to = entry_target(t, e->name);
        /* whoever only evaluates */
        if (is_moment && (t->optimizer == OM_T_NONE || (f->ort && !want_moments))) {
            left++;
            continue;
        }
        if (!to) return om_fail(t->host, OM_INVALID, "%s: has '%.80s', which the model does not have", what, e->name);
        if (x.nominal) return om_fail(t->host, OM_INVALID, "%s: is nominal, and has a tensor '%.80s'", what, e->name);
        OM_TRY(entry_fits(t, what, e, to));
        *(is_moment ? &moments : &values) += 1;
    }
    with_moments = moments > 0;
    if (with_moments && moments != want_moments)
        return om_fail(t->host, OM_INVALID, "%s: has %d of the optimizer's %d tensors", what, moments, want_moments);
    /* properties are the only thing that can still fail: the old ones stay until the new ones are there */
    om_trainer fresh = {.host = t->host};
    om_status s = properties_read(&fresh, f);
    if (s != OM_OK) {
        om_trainer_properties_free(&fresh);
        return s;
    }
    om_trainer_properties_free(t);
    t->property.v = fresh.property.v, t->property.n = fresh.property.n, t->property.cap = fresh.property.cap;
    for (int i = 0; i < t->n_param && !with_moments; i++) {
        om_tensor *const m[] = {&t->param[i].m, &t->param[i].v};
        for (int k = 0; k < 2; k++)
            if (m[k]->dtype) memset(m[k]->data, 0, (size_t)om_numel(m[k]) * om_dtype_size(m[k]->dtype));
    }
    for (uint32_t i = 0; i < f->entry.n; i++) {
        const om_entry *e = &f->entry.v[i];
        om_tensor *to = entry_target(t, e->name);
        if (to) entry_copy(to->data, e, t->spend && !f->ort);
    }
    om_trainer_grads_free(t);
    t->nominal = x.nominal;
    t->left_moments = left && t->optimizer == OM_T_NONE;
    t->updates = with_moments || !want_moments ? x.updates : 0; /* no moments: the optimizer begins anew */
    t->rate = x.rate;
    t->initial_rate = x.initial_rate;
    t->seed = x.seed, t->drawn = x.drawn;
    return OM_OK;
}

om_status om_trainer_restore(om_trainer *t, om_bytes checkpoint) {
    om_tensors f;
    OM_TRY(om_trainer_status(t));
    OM_CHECK(t->host, checkpoint.data || !checkpoint.size, "restore: checkpoint has %zu bytes at NULL",
             checkpoint.size);
    om_status s = om_trainer_parse(t, "checkpoint", checkpoint, &f);
    const char *nominal = s == OM_OK ? om_tensors_meta(&f, "nominal") : NULL;
    if (nominal && !strcmp(nominal, "1"))
        s = om_fail(t->host, OM_INVALID, "checkpoint: is nominal, names without values: a trainer is made from it "
                                         "(om_trainer_load), there is nothing to restore");
    for (uint32_t i = 0; i < f.meta.n && s == OM_OK; i++) { /* what is trained is fixed when a trainer is made */
        const char *key = f.meta.v[i].key, *name = key + strlen("frozen:");
        const int at = strncmp(key, "frozen:", strlen("frozen:")) ? -1 : om_trainer_find(t, name);
        if (at >= 0 && t->param[at].trainable)
            s = om_fail(t->host, OM_INVALID, "checkpoint: '%.80s' is frozen there and trained here", name);
    }
    if (s == OM_OK) s = om_trainer_take(t, "checkpoint", &f);
    om_tensors_free(&f);
    return s;
}

om_status om_trainer_restore_file(om_trainer *t, const char *path) {
    void *bytes;
    size_t size;
    OM_TRY(om_trainer_status(t));
    OM_CHECK(t->host, path, "restore: path is NULL");
    OM_TRY(om_file_read(t->host, path, &bytes, &size));
    t->spend = true;
    om_status s = om_trainer_restore(t, (om_bytes){bytes, size});
    t->spend = false;
    om_free(t->host, bytes);
    return s;
}

static om_status same_model(om_trainer *t, const om_trainer *of) {
    bool same = t->n_param == of->n_param;
    for (int i = 0; i < t->n_param && same; i++)
        same = !strcmp(t->param[i].name, of->param[i].name) && om_same_kind(&t->param[i].value, &of->param[i].value);
    OM_CHECK(t->host, same, "copy: the two trainers have different parameters");
    return OM_OK;
}

static void value_copy(om_tensor *to, const om_tensor *from) {
    if (to->dtype && from->dtype) memcpy(to->data, from->data, (size_t)om_tensor_bytes(to));
}

om_status om_trainer_copy(om_trainer *t, const om_trainer *from) {
    OM_TRY(om_trainer_status(t));
    om_trainer fresh = {.host = t->host};
    OM_CHECK(t->host, from, "copy: from is NULL");
    OM_TRY(same_model(t, from));
    OM_CHECK(t->host, !from->nominal || t->nominal, "copy: the other trainer has names and sizes and no values");
    for (uint32_t i = 0; i < from->property.n; i++)
        if (om_trainer_set_property(&fresh, &from->property.v[i]) != OM_OK) {
            om_trainer_properties_free(&fresh);
            return t->host->status;
        }
    om_trainer_properties_free(t);
    t->property.v = fresh.property.v, t->property.n = fresh.property.n, t->property.cap = fresh.property.cap;
    om_trainer_grads_free(t);
    const bool moments = t->optimizer != OM_T_NONE && t->optimizer == from->optimizer &&
                         (t->sgd.momentum != 0) == (from->sgd.momentum != 0);
    for (int i = 0; i < t->n_param; i++) {
        om_tparam *to = &t->param[i];
        const om_tparam *of = &from->param[i];
        if (!from->nominal) value_copy(&to->value, &of->value);
        if (!moments || !to->trainable || !of->trainable) continue;
        value_copy(&to->m, &of->m);
        value_copy(&to->v, &of->v);
    }
    if (moments) {
        t->updates = from->updates;
        t->rate = from->rate, t->initial_rate = from->initial_rate;
        t->schedule = from->schedule;
    }
    t->left_moments |= t->optimizer == OM_T_NONE && (from->left_moments || from->optimizer != OM_T_NONE);
    t->seed = from->seed, t->drawn = from->drawn;
    t->nominal = from->nominal;
    return OM_OK;
}

/* --- writing one --------------------------------------------------------------------------------- */

typedef struct lists {
    om_ctx *cx;
    om_arena mem;
    OM_VEC(om_entry) entry;
    OM_VEC(om_text_pair) meta;
} lists;

static char *join(lists *l, const char *a, const char *b) {
    char *s = om_arena_alloc(&l->mem, strlen(a) + strlen(b) + 1);
    if (s) strcpy(strcpy(s, a) + strlen(a), b);
    return s;
}

static void meta_add(lists *l, const char *a, const char *b, const char *text) {
    om_text_pair *p = OM_PUSH(l->cx, &l->meta);
    if (p) *p = (om_text_pair){join(l, a, b), om_arena_str(&l->mem, text)};
}

static void entry_add(lists *l, const char *a, const char *b, const om_tensor *x) {
    om_entry *e = OM_PUSH(l->cx, &l->entry);
    if (e) *e = (om_entry){.name = join(l, a, b), .t = *x, .size = (size_t)om_numel(x) * om_dtype_size(x->dtype)};
}

om_status om_trainer_save(om_trainer *t, const char *path, bool moments) {
    OM_TRY(om_trainer_status(t));
    lists l = {.cx = t->host, .mem = {.cx = t->host}};
    char text[64];
    OM_CHECK(t->host, path, "save: path is NULL");
    OM_TRY(om_trainer_loaded(t));
    OM_CHECK(t->host, !moments || !t->left_moments,
             "save: moments were asked for; those of the checkpoint were not read, because this trainer has no "
             "optimizer: give it one before, or save without moments");
    meta_add(&l, "format", "", OM_CHECKPOINT_FORMAT);
    meta_add(&l, "version", "", "1");
    snprintf(text, sizeof text, "%lld", (long long)t->updates);
    meta_add(&l, "updates", "", text);
    om_number_write(text, t->rate);
    meta_add(&l, "rate", "", text);
    om_number_write(text, t->initial_rate);
    meta_add(&l, "initial_rate", "", text);
    if (moments) { /* without, a checkpoint is where something new begins */
        snprintf(text, sizeof text, "%llu", (unsigned long long)t->seed);
        meta_add(&l, "seed", "", text);
        snprintf(text, sizeof text, "%llu", (unsigned long long)t->drawn);
        meta_add(&l, "drawn", "", text);
    }
    om_status s = OM_OK;
    for (int i = 0; i < t->n_param && s == OM_OK; i++) {
        const om_tparam *p = &t->param[i];
        if (moment_name(p->name) || !strcmp(p->name, "__metadata__"))
            s = om_fail(t->host, OM_UNSUPPORTED,
                        "save: a parameter named '%.80s', a name that checkpoints use themselves", p->name);
        entry_add(&l, "", p->name, &p->value);
        if (moments && p->m.dtype) entry_add(&l, moment[0], p->name, &p->m);
        if (moments && p->v.dtype) entry_add(&l, moment[1], p->name, &p->v);
        if (!p->trainable) meta_add(&l, "frozen:", p->name, "1");
    }
    for (uint32_t i = 0; i < t->property.n; i++) {
        const om_property *p = &t->property.v[i];
        if (p->kind == 's') {
            meta_add(&l, "string:", p->name, p->s);
            continue;
        }
        if (p->kind == 'i')
            snprintf(text, sizeof text, "%lld", (long long)p->i);
        else
            om_number_write(text, p->f);
        meta_add(&l, p->kind == 'i' ? "int:" : "float:", p->name, text);
    }
    if (s == OM_OK) s = t->host->status;
    if (s == OM_OK) s = om_tensors_write(t->host, path, l.entry.v, l.entry.n, l.meta.v, l.meta.n);
    om_free(t->host, l.entry.v);
    om_free(t->host, l.meta.v);
    om_arena_free(&l.mem);
    return s;
}
