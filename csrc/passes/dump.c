/* dump.c - ORTMODULE_DUMP_PASSES=<directory>: what each pass makes of a graph, as files that parse back.
 *
 *     <directory>/<process>/index.txt                a line per pass that ran: its number if it changed the graph
 *                           0007-fold-before.txt     the graph's text (graph/text.h); om-opt reads it
 *                           0007-fold-after.txt
 *
 * Numbers count over the process, whatever graph a pass is run on: `read`, a graph as it was captured, and `grad`, the
 * same with its gradients, say where the next one begins. A directory that cannot be written is an error: who asks for
 * dumps and gets none should know. So it is in a library for given files (make device OPS=...), which has no text form.
 */
#include "passes/passes.h"

#include <stdlib.h>

#ifdef OM_ONLY
om_status om_passes_dump(om_ctx *cx, const char *name, const om_graph *before, const om_graph *after) {
    const char *to = getenv("ORTMODULE_DUMP_PASSES");
    (void)name, (void)before, (void)after;
    return to && *to ? om_fail(cx, OM_INVALID, "ORTMODULE_DUMP_PASSES: a library for given files writes none") : OM_OK;
}
#else

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t dump_lock = PTHREAD_MUTEX_INITIALIZER; /* number, index.txt */
static int dump_number;

static om_status dump_fail(om_ctx *cx, const char *path) {
    return om_fail(cx, OM_INVALID, "ORTMODULE_DUMP_PASSES: %.300s cannot be written: %s; give a directory", path,
                   strerror(errno));
}

/* The directory, and those above it. */
static om_status dump_directory(om_ctx *cx, char *path) {
    for (char *p = path + 1;; p++) {
        const char was = *p;
        if (was && was != '/') continue;
        *p = 0;
        const bool bad = mkdir(path, 0777) != 0 && errno != EEXIST;
        if (bad) return dump_fail(cx, path);
        if (!(*p = was)) return OM_OK;
    }
}

static om_status dump_file(om_ctx *cx, const char *dir, const char *name, const char *mode, const char *text) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, mode);
    bool ok = f && fputs(text, f) >= 0;
    if (f && fclose(f) != 0) ok = false;
    return ok ? OM_OK : dump_fail(cx, path);
}

static om_status dump_pair(om_ctx *cx, const char *to, const char *name, const char *a, const char *b, uint32_t n_a,
                           uint32_t n_b) {
    char dir[PATH_MAX - 300], file[240], line[320];
    const bool same = a && !strcmp(a, b);
    const int n = snprintf(dir, sizeof dir, "%s/%ld", to, (long)getpid());
    if (n < 0 || (size_t)n >= sizeof dir) return errno = ENAMETOOLONG, dump_fail(cx, to);
    OM_TRY(dump_directory(cx, dir));
    if (same) {
        snprintf(line, sizeof line, "     %-12s unchanged, %u nodes\n", name, n_b);
        return dump_file(cx, dir, "index.txt", "a", line);
    }
    const int number = ++dump_number;
    if (a) {
        snprintf(file, sizeof file, "%04d-%s-before.txt", number, name);
        OM_TRY(dump_file(cx, dir, file, "w", a));
    }
    snprintf(file, sizeof file, "%04d-%s-after.txt", number, name);
    OM_TRY(dump_file(cx, dir, file, "w", b));
    if (a) snprintf(line, sizeof line, "%04d %-12s %u -> %u nodes\n", number, name, n_a, n_b);
    else snprintf(line, sizeof line, "%04d %-12s %u nodes\n", number, name, n_b);
    return dump_file(cx, dir, "index.txt", "a", line);
}

om_status om_passes_dump(om_ctx *cx, const char *name, const om_graph *before, const om_graph *after) {
    const char *to = getenv("ORTMODULE_DUMP_PASSES");
    char *a = NULL, *b = NULL;
    if (!to || !*to) return OM_OK;
    om_status s = before ? om_graph_print(before, &a) : OM_OK;
    if (s == OM_OK) s = om_graph_print(after, &b);
    if (s == OM_OK) {
        pthread_mutex_lock(&dump_lock);
        s = dump_pair(cx, to, name, a, b, before ? before->nodes.n : 0, after->nodes.n);
        pthread_mutex_unlock(&dump_lock);
    }
    if (a) om_text_free(cx, a);
    if (b) om_text_free(cx, b);
    return s;
}
#endif
