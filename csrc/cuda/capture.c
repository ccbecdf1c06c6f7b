/* capture.c - see capture.h. */
#include "cuda/capture.h"

#include <pthread.h>

OM_CUDA_ENTRIES(OM_CUDA_CAPTURE_API)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held while a graph is recorded */
static bool api_ready;
static om_cu_stream streams[OM_GPUS]; /* recorded on; NULL: none yet, or the last one cannot be trusted */

static om_status api_open(om_ctx *cx) {
    if (api_ready) return OM_OK;
    OM_TRY(OM_CUDA_LOOK(cx, "CUDA graphs need CUDA 11.4 or later"));
    api_ready = true;
    return OM_OK;
}

static om_status stream_open(om_ctx *cx, om_gpu *g, om_cu_stream *s) {
    enum { NON_BLOCKING = 1 }; /* the legacy stream stays usable while this one records */
    if (*s) return OM_OK;
    const om_cu_result r = api.stream_new(s, NON_BLOCKING);
    if (!r) return OM_OK;
    *s = NULL;
    return om_gpu_fail(cx, g, r, stream_new_name);
}

/* The end always comes, whatever became of the middle. */
static om_status record(om_ctx *cx, om_gpu *g, om_status (*queue)(void *), void *arg, om_cu_graph *out) {
    enum { THREAD_LOCAL = 1 };
    om_cu_stream *own = &streams[om_gpu_ordinal(g)];
    OM_TRY(stream_open(cx, g, own));
    OM_GPU_CALL(begin, *own, THREAD_LOCAL);
    void *const before = om_cuda_stream_now();
    om_cuda_stream(*own);
    om_status s = queue(arg);
    om_cuda_stream(before);
    const om_cu_result r = api.end(*own, out);
    if (r) {
        *out = NULL;
        api.stream_free(*own);
        *own = NULL;
    }
    if (s == OM_OK && (r || !*out)) s = om_gpu_fail(cx, g, r, end_name);
    if (s != OM_OK && *out) api.graph_free(*out);
    return s;
}

om_status om_gpu_capture(om_ctx *cx, om_gpu *g, om_status (*queue)(void *), void *arg, om_cu_exec *out) {
    om_cu_graph graph = NULL;
    om_cu_result r = 0;
    *out = NULL;
    pthread_mutex_lock(&lock);
    om_status s = api_open(cx);
    if (s == OM_OK) s = record(cx, g, queue, arg, &graph);
    pthread_mutex_unlock(&lock);
    OM_TRY(s);
    if ((r = api.make(out, graph, 0))) *out = NULL;
    api.graph_free(graph); /* the executable one does not need it */
    return r ? om_gpu_fail(cx, g, r, make_name) : OM_OK;
}

om_status om_gpu_play(om_ctx *cx, om_gpu *g, om_cu_exec exec) {
    OM_GPU_CALL(play, exec, om_cuda_stream_now());
    return OM_OK;
}

void om_gpu_exec_free(om_cu_exec exec) { api.exec_free(exec); }

void om_gpu_records_pause(void) { pthread_mutex_lock(&lock); }
void om_gpu_records_resume(void) { pthread_mutex_unlock(&lock); }

om_status om_gpu_move(om_ctx *cx, om_gpu *g, void *to, const void *from, size_t size) {
    const om_cu_address there = (om_cu_address)(uintptr_t)to, here = (om_cu_address)(uintptr_t)from;
    if (size) OM_GPU_CALL(copy, there, here, size, om_cuda_stream_now());
    return OM_OK;
}
