/* om_opt.c - the command `om-opt`: read a graph (ONNX or text), transform it, look at it, write it.
 *
 * Actions run in the order they are given, so `om-opt m.onnx --pass forward --grad all --stats` counts the joint graph.
 * The graph is verified after reading and after every action.
 */
#include "tools/tool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static const char usage[] =
    "om-opt FILE [ACTION...]      FILE: .onnx, or text (any other name; - is standard input)\n"
    "\n"
    "  --pass NAME[,NAME...]      run passes; forward and joint are the engine's own lists\n"
    "  --grad NAME[,NAME...]      add the gradients of these graph inputs (all: every parameter and float input,\n"
    "                             params: parameters only), every float output receiving one\n"
    "  --print                    the graph as text (also when no other output is asked for)\n"
    "  --stats                    counts of nodes by operator and phase, constants, parameters\n"
    "  -o FILE                    write: ONNX when FILE ends in .onnx (forward part only), else text\n"
    "  --list                     the passes        --ops   the operators        --help   this text\n"
    "\n"
    "om-opt bisect FILE ...       which pass changes what a graph computes (om-opt bisect --help)\n"
    "\n"
    "Exit status: 0, or 1 with a message on standard error.\n";

int om_tool_fail(om_ctx *cx, const char *what) {
    fprintf(stderr, "om-opt: %s%s%s\n", what, *om_ctx_message(cx) ? ": " : "", om_ctx_message(cx));
    return 1;
}

static bool tool_ends(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

/* The whole of a file, with a NUL after it. */
static char *tool_read(om_ctx *cx, const char *path, size_t *size) {
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    if (!f) return om_fail(cx, OM_INVALID, "%s: %s", path, strerror(errno)), NULL;
    size_t cap = 1 << 16, n = 0, got;
    char *buf = malloc(cap);
    while (buf && (got = fread(buf + n, 1, cap - n - 1, f)) > 0) {
        n += got;
        if (n + 1 < cap) continue;
        char *more = cap > SIZE_MAX / 2 ? NULL : realloc(buf, cap *= 2);
        if (!more) free(buf);
        buf = more;
    }
    bool bad = ferror(f) != 0;
    if (f != stdin) fclose(f);
    if (!buf || bad) {
        free(buf);
        return om_fail(cx, OM_INVALID, "%s: %s", path, bad ? "cannot be read" : "out of memory"), NULL;
    }
    buf[n] = 0;
    *size = n;
    return buf;
}

om_status om_tool_load(om_ctx *cx, const char *path, om_graph **g) {
    size_t size;
    *g = NULL;
    char *bytes = tool_read(cx, path, &size);
    om_status s = bytes ? OM_OK : OM_INVALID;
    if (s == OM_OK) s = tool_ends(path, ".onnx") ? om_onnx_read(cx, bytes, size, g) : om_graph_parse(cx, bytes, g);
    free(bytes);
    return s == OM_OK ? om_verify(*g) : s;
}

static om_status tool_write(om_ctx *cx, const om_graph *g, const char *path) {
    void *bytes = NULL;
    size_t size = 0;
    if (tool_ends(path, ".onnx")) {
        OM_TRY(om_onnx_write(cx, g, &bytes, &size));
    } else {
        OM_TRY(om_graph_print(g, (char **)&bytes));
        size = strlen(bytes);
    }
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(bytes, 1, size, f) == size;
    if (f && fclose(f) != 0) ok = false;
    om_free(cx, bytes);
    return ok ? OM_OK : om_fail(cx, OM_INVALID, "%s: %s", path, strerror(errno));
}

const om_pass *const *om_tool_list(const char *name, const om_pass *one[2]) {
    one[0] = om_pass_find(name), one[1] = NULL;
    return !strcmp(name, "forward")   ? om_passes_forward
           : !strcmp(name, "variant") ? om_passes_variant
           : !strcmp(name, "joint")   ? om_passes_joint
                                      : one;
}

static om_status tool_pass(om_ctx *cx, om_graph **g, char *names) {
    for (char *rest, *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        const om_pass *one[2], *const *list = om_tool_list(name, one);
        if (!list[0]) return om_fail(cx, OM_INVALID, "no pass is named '%s'; om-opt --list shows them", name);
        OM_TRY(om_passes_run(cx, list, g));
    }
    return OM_OK;
}

om_status om_tool_grad(om_ctx *cx, om_graph **g, char *names) {
    const om_graph *f = *g;
    uint8_t *wanted = om_alloc(cx, f->inputs.n + 1), *arriving = om_alloc(cx, f->outputs.n + 1);
    om_status s = wanted && arriving ? OM_OK : cx->status;
    for (char *rest, *name = s == OM_OK ? strtok_r(names, ",", &rest) : NULL; name && s == OM_OK;
         name = strtok_r(NULL, ",", &rest)) {
        bool all = !strcmp(name, "all"), params = !strcmp(name, "params"), found = all || params;
        for (om_id i = 0; i < f->inputs.n; i++) {
            const om_value *v = om_val(f, f->inputs.v[i]);
            bool hit = all || (params && v->role == OM_PARAM) || (v->name && !strcmp(v->name, name));
            if (hit && om_is_float(v->type.dtype)) wanted[i] = 1;
            found |= hit;
        }
        if (!found) s = om_fail(cx, OM_INVALID, "no graph input is named '%s'", name);
    }
    for (om_id i = 0; s == OM_OK && i < f->outputs.n; i++) arriving[i] = om_is_float(om_ty(f, f->outputs.v[i])->dtype);
    om_graph *joint = NULL;
    if (s == OM_OK) s = om_grad_build(cx, f, wanted, arriving, &joint);
    if (s == OM_OK) {
        om_graph_free(*g);
        *g = joint;
    }
    om_free(cx, wanted);
    om_free(cx, arriving);
    return s;
}

static om_status tool_stats(om_ctx *cx, const om_graph *g) {
    size_t bytes = 0, consts = 0, params = 0, phase[3] = {0};
    for (om_id i = 0; i < g->nodes.n; i++) phase[g->nodes.v[i].phase % 3]++;
    for (om_id i = 0; i < g->values.n; i++) {
        const om_value *v = om_val(g, i);
        params += v->role == OM_PARAM;
        if (v->role != OM_CONST) continue;
        size_t n = om_dtype_size(v->type.dtype);
        for (int k = 0; k < v->type.rank; k++) n *= (size_t)v->type.dim[k];
        bytes += n;
        consts++;
    }
    printf("%u nodes (%zu forward, %zu backward), %u inputs (%zu parameters), %u outputs, %u writes, %u gradients\n",
           g->nodes.n, phase[0], phase[1], g->inputs.n, params,
           g->outputs.n, g->writes.n, g->grads.n);
    printf("%zu constants, %zu bytes; %u symbols, %u size expressions\n", consts, bytes, g->syms.n, g->exprs.n);
    uint32_t *count = om_alloc(cx, ((size_t)g->nodes.n + 1) * sizeof *count); /* of the first node with that operator */
    if (!count) return cx->status;
    for (om_id i = 0; i < g->nodes.n; i++)
        for (om_id k = 0; k <= i; k++)
            if (g->nodes.v[k].op == g->nodes.v[i].op) {
                count[k]++;
                break;
            }
    for (;;) { /* most frequent first */
        om_id best = OM_NONE;
        for (om_id i = 0; i < g->nodes.n; i++)
            if (count[i] && (best == OM_NONE || count[i] > count[best])) best = i;
        if (best == OM_NONE) break;
        printf("%8u  %s\n", count[best], g->nodes.v[best].op->name);
        count[best] = 0;
    }
    om_free(cx, count);
    return OM_OK;
}

static om_status tool_print(const om_graph *g) {
    char *text;
    OM_TRY(om_graph_print(g, &text));
    fputs(text, stdout);
    om_text_free(g->cx, text);
    return OM_OK;
}

static int tool_lists(const char *what) {
    if (!strcmp(what, "--list"))
        for (int i = 0; om_passes[i]; i++) printf("%-12s %s\n", om_passes[i]->name, om_passes[i]->doc);
    else
        for (int i = 0; om_ops[i]; i++) printf("%-24s %s\n", om_ops[i]->name, om_ops[i]->doc);
    return 0;
}

static om_status tool_run(om_ctx *cx, om_graph **g, int argc, char **argv) {
    bool shown = false;
    for (int i = 2; i < argc; i++) {
        bool more = i + 1 < argc;
        om_status s;
        if (!strcmp(argv[i], "--print")) shown = true, s = tool_print(*g);
        else if (!strcmp(argv[i], "--stats")) shown = true, s = tool_stats(cx, *g);
        else if (!strcmp(argv[i], "--pass") && more) s = tool_pass(cx, g, argv[++i]);
        else if (!strcmp(argv[i], "--grad") && more) s = om_tool_grad(cx, g, argv[++i]);
        else if (!strcmp(argv[i], "-o") && more) shown = true, s = tool_write(cx, *g, argv[++i]);
        else
            return om_fail(cx, OM_INVALID, "'%s' is no action (or lacks its argument); om-opt --help lists them",
                           argv[i]);
        OM_TRY(s);
        OM_TRY(om_verify(*g));
    }
    return shown ? OM_OK : tool_print(*g);
}

int main(int argc, char **argv) {
    if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        fputs(usage, argc < 2 ? stderr : stdout);
        return argc < 2;
    }
    if (!strcmp(argv[1], "--list") || !strcmp(argv[1], "--ops")) return tool_lists(argv[1]);
    om_ctx *cx = om_ctx_new(NULL);
    if (!cx) {
        fputs("om-opt: out of memory\n", stderr);
        return 1;
    }
    if (!strcmp(argv[1], "bisect")) {
        const int found = om_tool_bisect(cx, argc, argv);
        om_ctx_free(cx);
        return found;
    }
    om_graph *g = NULL;
    om_status s = om_tool_load(cx, argv[1], &g);
    if (s == OM_OK) s = tool_run(cx, &g, argc, argv);
    int rc = s == OM_OK ? 0 : om_tool_fail(cx, argv[1]);
    om_graph_free(g);
    om_ctx_free(cx);
    return rc;
}
