/* fake_driver.cpp - a libcuda.so.1 for machines without a GPU, as far as the graph engine needs one (csrc/cuda/queue.h,
 * capture.h): contexts, memory, streams, copies, graphs. Kernels: fake_gpu.cpp.
 *
 * Time. Late (fake_gpu_late): what is queued runs only when somebody waits; else at once. Each stream is a queue. Who
 * waits for a stream runs what it depends on and nothing else: its own work in order, for the legacy stream and streams
 * that block with it what was queued on the other before, for a graph its own earlier launches. An odd fake_gpu_seed: all
 * other work that may run does so meanwhile, in some order. Copies from the host's memory take their bytes when they are
 * queued, as the driver does of memory that is not page-locked.
 * Memory. A block is 0xff when its turn comes, and has a fence behind it that is looked at when it goes. Without
 * fake_gpu_reuse no address comes back while anything is queued; with it, as from a pool in the order of a stream, the
 * lowest block of that size given back on that stream is handed out again at once. What a launch declares must lie in one live block; or,
 * unless fake_gpu_strict, in memory that is nobody's, which the host has told of.
 * Graphs. From cuStreamBeginCapture on a stream's work is recorded and nothing of it runs; what may not be done
 * meanwhile returns its code and invalidates the record, which its end tells. A graph's launch is one piece of work that
 * runs the record in order; parameters are those of the record. Executable graphs may be destroyed while on their way.
 * Copies to or from the host in a graph are legal in CUDA (they read the host's memory at every launch): here a failure.
 * Faults are counted in fake_gpu_failures and named by fake_gpu_message. fake_gpu_fail makes one call of an entry point
 * return an error instead of doing anything.
 */
#include "fake_gpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>

enum { FENCE = 256 };
typedef std::function<unsigned()> job;

enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* whose calls that may not be recorded end a record: everyone's, its thread's */
struct record { std::thread::id thread; bool invalid; unsigned mode; std::vector<job> work; };
struct work { job run; uint64_t number; const void *graph; CUstream_st *after; uint64_t upto; };
struct CUstream_st { int device; bool blocking; std::deque<work> queue; std::unique_ptr<record> records; };
struct CUgraph_st { std::vector<job> work; };
struct CUgraphExec_st { std::shared_ptr<std::vector<job>> work; };
struct CUctx_st { int device; };

std::recursive_mutex fake_lock;
enum { DEVICES = 2 };
static CUstream_st legacy[DEVICES] = {{0, true, {}, nullptr}, {1, true, {}, nullptr}};
static std::set<CUstream_st *> streams = {&legacy[0], &legacy[1]};
struct CUevent_st;
static std::set<CUevent_st *> events;
static std::set<CUgraph_st *> graphs;
static std::set<CUgraphExec_st *> execs;
static uint64_t queued, seed_;
static std::map<uintptr_t, size_t> blocks;                         /* live when the device is there */
struct held { size_t size; CUstream_st *stream; };
static std::map<uintptr_t, held> owned;                            /* as the host sees it */
static std::map<std::pair<CUstream_st *, size_t>, std::set<char *>> pool;
static std::vector<void *> gone;                                   /* freed with the queue's end */
static thread_local std::vector<range> declared;                   /* by the thread, for its next launch */
static bool late, declares, reuse, strict;
static long failures, waits, played, unstable;
static CUctx_st contexts[DEVICES] = {{0}, {1}};
static std::map<uintptr_t, int> places;                            /* devices of blocks */
static int running = -1;                                           /* the device whose work runs now */
static thread_local std::vector<int> current;                      /* devices whose contexts the thread has made current */
#define depth ((int)current.size())
static char message[640];

static unsigned refuse(unsigned code, const std::string &why) {
    failures++;
    if (!message[0]) snprintf(message, sizeof message, "%s", why.c_str());
    return code;
}

struct failing { std::string entry; long left; unsigned code; };
static failing failing_;
static std::map<std::string, long> calls;

static bool inside(const void *p, int64_t size) {
    auto b = blocks.upper_bound((uintptr_t)p);
    if (b == blocks.begin()) return false;
    --b;
    const auto at = places.find(b->first);
    if (running >= 0 && at != places.end() && at->second != running) return false;
    return (uintptr_t)p + (size_t)size <= b->first + b->second;
}

/* --- time ------------------------------------------------------------------------------------------------ */

static CUstream_st *of(CUstream_st *s) { return s ? s : &legacy[current.empty() ? 0 : current.back()]; }
static bool is_legacy(const CUstream_st *s) { return s == &legacy[s->device]; }

/* The stream whose head must run before this one's, or NULL. */
static CUstream_st *before(CUstream_st *s) {
    const work &w = s->queue.front();
    if (w.after && streams.count(w.after) && !w.after->queue.empty() && w.after->queue.front().number < w.upto) return w.after;
    for (CUstream_st *o : streams) {
        if (o == s || o->queue.empty()) continue;
        if (s->blocking && o->blocking && s->device == o->device && (is_legacy(s) || is_legacy(o)) && o->queue.front().number < w.number) return o;
        for (const work &x : o->queue)
            if (w.graph && x.graph == w.graph && x.number < w.number) return o;
    }
    return nullptr;
}

static unsigned step(CUstream_st *s) {
    while (CUstream_st *o = before(s)) s = o;
    const work w = s->queue.front();
    s->queue.pop_front();
    return w.run();
}

static unsigned drain(CUstream_st *s) {
    unsigned r = 0;
    while (!s->queue.empty()) {
        CUstream_st *next = s;
        if (seed_ & 1) { /* whoever may */
            std::vector<CUstream_st *> able;
            for (CUstream_st *o : streams)
                if (!o->queue.empty() && !before(o)) able.push_back(o);
            seed_ = seed_ * 6364136223846793005u + 1442695040888963407u, seed_ |= 1;
            if (!able.empty()) next = able[(seed_ >> 33) % able.size()];
        }
        const unsigned t = step(next);
        if (!r) r = t;
    }
    return r;
}

static long waiting() {
    long n = 0;
    for (CUstream_st *s : streams) n += (long)s->queue.size();
    return n;
}

static unsigned drain_all() {
    unsigned r = 0;
    for (CUstream_st *s : std::set<CUstream_st *>(streams)) {
        const unsigned t = drain(s);
        if (!r) r = t;
    }
    return r;
}

static void sweep() {
    if (waiting()) return;
    for (void *p : gone) free(p);
    gone.clear();
}

static unsigned put(CUstream_st *stream, const job &work, const void *graph = nullptr) {
    CUstream_st *s = of(stream);
    if (!streams.count(s)) return refuse(INVALID_HANDLE, "a stream that is none");
    if (!current.empty() && s->device != current.back()) return refuse(INVALID_HANDLE, "a stream of another device");
    const int device = s->device;
    const job run = [work, device] {
        const int before = running;
        running = device;
        const unsigned r = work();
        running = before;
        return r;
    };
    if (s->records) {
        if (s->records->invalid) return CAPTURE_INVALIDATED;
        s->records->work.push_back(run);
        return 0;
    }
    if (is_legacy(s))
        for (CUstream_st *o : streams)
            if (o->records && o->blocking) return o->records->invalid = true, (unsigned)CAPTURE_IMPLICIT;
    if (!late) return run();
    s->queue.push_back({run, queued++, graph, nullptr, 0});
    return 0;
}

/* What a stream that is recorded cannot take, or the fake does not do. */
static unsigned never_recorded(CUstream_st *stream, const char *what) {
    CUstream_st *s = of(stream);
    if (!s->records) return 0;
    s->records->invalid = true;
    return refuse(CAPTURE_UNSUPPORTED, std::string("while a graph is recorded: ") + what);
}

/* --- for libraries on the device ------------------------------------------------------------------------- */

PUBLIC unsigned fake_gpu_injected(const char *entry) {
    LOCKED;
    calls[entry]++;
    if (failing_.entry != entry || --failing_.left) return 0;
    failing_.entry.clear();
    return failing_.code;
}
PUBLIC bool fake_gpu_current(void) { return depth > 0; }
PUBLIC bool fake_gpu_declared(std::vector<range> *out) {
    LOCKED;
    *out = declared;
    declared.clear();
    return declares;
}
PUBLIC bool fake_gpu_inside(const void *p, int64_t size) {
    LOCKED;
    return inside(p, size);
}
/* The device whose live block holds p; -1: none, so memory of the host. */
PUBLIC int fake_gpu_place(const void *p) {
    LOCKED;
    auto b = blocks.upper_bound((uintptr_t)p);
    if (b == blocks.begin() || (uintptr_t)p >= (--b)->first + b->second) return -1;
    const auto at = places.find(b->first);
    return at == places.end() ? -1 : at->second;
}
PUBLIC bool fake_gpu_hosts(const void *p) {
    LOCKED;
    return !strict && !inside(p, 1);
}
PUBLIC unsigned fake_gpu_refuse(unsigned code, const char *why) {
    LOCKED;
    return refuse(code, why);
}
PUBLIC unsigned fake_gpu_put(CUstream_st *stream, const job *run) {
    LOCKED;
    return put(stream, *run);
}
PUBLIC unsigned fake_gpu_unsafe(const char *entry) {
    LOCKED;
    CUstream_st *of = nullptr;
    for (CUstream_st *s : streams) {
        if (!s->records || s->records->mode == RELAXED) continue;
        if (s->records->mode == GLOBAL || s->records->thread == std::this_thread::get_id()) (of = s)->records->invalid = true;
    }
    return of ? refuse(CAPTURE_UNSUPPORTED, std::string(entry) + " while a graph is recorded") : 0;
}

/* --- what tests say ------------------------------------------------------------------------------------- */

PUBLIC void fake_gpu_late(int on) {
    LOCKED;
    drain_all();
    sweep();
    late = on;
}
/* n pieces of what the stream has run; has the kernel, ever? */
PUBLIC long fake_gpu_ran(const char *kernel);
PUBLIC int fake_gpu_some(CUstream_st *stream, long n, const char *kernel) {
    LOCKED;
    static long before = fake_gpu_ran(kernel);
    for (CUstream_st *s = of(stream); n-- && !s->queue.empty();) step(s);
    return fake_gpu_ran(kernel) > before;
}
PUBLIC void fake_gpu_seed_driver(uint64_t seed) { seed_ = seed; }
PUBLIC void fake_gpu_reuse(int on) { reuse = on; }
PUBLIC void fake_gpu_strict(int on) { strict = on; }
/* The next n blocks have addresses of their own. */
PUBLIC void fake_gpu_unstable(long n) { unstable = n; }
PUBLIC void fake_gpu_declare(const range *r, int n) {
    LOCKED;
    declares = true;
    declared.assign(r, r + n);
}
PUBLIC long fake_gpu_launches(void);
/* 0 failures, 1 launches of kernels, 2 live blocks, 3 queued, 4 waits, 5 graphs that there are, executable or not,
 * 6 graphs that have run, 7 streams that are recorded, 8 events */
PUBLIC long fake_gpu_count(int what) {
    LOCKED;
    long recorded = 0;
    for (CUstream_st *s : streams) recorded += s->records != nullptr;
    const long n[] = {failures, fake_gpu_launches(), (long)blocks.size(), waiting(), waits,
                      (long)(graphs.size() + execs.size()), played, recorded, (long)events.size()};
    return n[what];
}
/* The nth call of the entry point from now on returns the code; nth 0: none does. */
PUBLIC void fake_gpu_fail(const char *entry, long nth, unsigned code) {
    LOCKED;
    failing_ = {nth ? entry : "", nth, code};
}
/* How often it was called. */
PUBLIC long fake_gpu_calls(const char *entry) {
    LOCKED;
    return calls[entry];
}
PUBLIC int fake_gpu_depth(void) { return depth; }
PUBLIC const char *fake_gpu_message(void) { return message; }
PUBLIC void fake_gpu_forget(void) { message[0] = 0, failures = 0; }

/* --- contexts ---------------------------------------------------------------------------------------------- */

PUBLIC unsigned cuGetErrorName(unsigned, const char **out) { return *out = "FAKE_ERROR", 0; }
PUBLIC unsigned cuGetErrorString(unsigned, const char **out) { return *out = message[0] ? message : "made to fail", 0; }
PUBLIC unsigned cuInit(unsigned) {
    FAILS(cuInit);
    return 0;
}
PUBLIC unsigned cuDevicePrimaryCtxRetain(CUctx_st **out, int device) {
    FAILS(cuDevicePrimaryCtxRetain);
    return *out = &contexts[device], 0;
}
/* NULL, of tests: device 0's */
PUBLIC unsigned cuCtxPushCurrent_v2(CUctx_st *context) {
    FAILS(cuCtxPushCurrent_v2);
    return current.push_back(context ? context->device : 0), 0;
}
PUBLIC void *fake_gpu_context(int device) { return &contexts[device]; }
PUBLIC int fake_gpu_device(void) { return current.empty() ? -1 : current.back(); }
PUBLIC unsigned cuCtxPopCurrent_v2(CUctx_st **out) {
    FAILS(cuCtxPopCurrent_v2);
    if (!depth) return INVALID_CONTEXT;
    *out = &contexts[current.back()];
    return current.pop_back(), 0;
}

/* --- memory and copies ---------------------------------------------------------------------------------------- */

PUBLIC unsigned cuDeviceGetDefaultMemPool(void **out, int) {
    FAILS(cuDeviceGetDefaultMemPool);
    return *out = &contexts[0], 0;
}
PUBLIC unsigned cuMemPoolSetAttribute(void *, int, void *) {
    FAILS(cuMemPoolSetAttribute);
    return 0;
}
PUBLIC unsigned cuMemHostAlloc(void **out, size_t size, unsigned) {
    FAILS(cuMemHostAlloc);
    LOCKED;
    if (const unsigned r = fake_gpu_unsafe("cuMemHostAlloc")) return r;
    *out = aligned_alloc(64, (size + 63) / 64 * 64);
    blocks[(uintptr_t)*out] = size;
    return 0;
}

static size_t room(size_t size) { return (size + FENCE + 255) / 256 * 256; }

PUBLIC unsigned cuMemAllocAsync(uint64_t *out, size_t size, CUstream_st *stream) {
    FAILS(cuMemAllocAsync);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (const unsigned r = never_recorded(stream, "memory")) return r;
    std::set<char *> &kept = pool[{of(stream), size}];
    char *p = nullptr;
    if (unstable > 0) unstable--;
    else if (reuse && !kept.empty()) p = *kept.begin(), kept.erase(p);
    if (!p && !(p = (char *)aligned_alloc(256, room(size)))) return OUT_OF_MEMORY;
    owned[(uintptr_t)p] = {size, of(stream)};
    places[(uintptr_t)p] = of(stream)->device;
    *out = (uint64_t)(uintptr_t)p;
    const job begin = [p, size] {
        memset(p, 0xff, size);
        memset(p + size, 0xa5, room(size) - size);
        blocks[(uintptr_t)p] = size;
        return 0u;
    };
    return reuse ? put(stream, begin) : begin();
}
PUBLIC unsigned cuMemFreeAsync(uint64_t at, CUstream_st *stream) {
    FAILS(cuMemFreeAsync);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (const unsigned r = never_recorded(stream, "memory is given back")) return r;
    if (!owned.count(at)) return refuse(INVALID_VALUE, "a block that is none was given back");
    char *p = (char *)(uintptr_t)at;
    const held h = owned[at];
    owned.erase(at);
    const bool again = reuse && h.stream == of(stream);
    if (again) pool[{h.stream, h.size}].insert(p);
    return put(stream, [p, h, again] {
        const bool whole = blocks.count((uintptr_t)p) && blocks[(uintptr_t)p] == h.size;
        blocks.erase((uintptr_t)p);
        for (size_t i = h.size; i < room(h.size); i++)
            if ((uint8_t)p[i] != 0xa5) return refuse(ILLEGAL_ADDRESS, "memory behind a block was written");
        if (!whole) return refuse(ILLEGAL_ADDRESS, "a block goes that is not there");
        if (!again && (late || strict)) gone.push_back(p);
        else if (!again) free(p);
        return 0u;
    });
}
/* Memory that copies reach lives. */
static unsigned reaches(uint64_t at, size_t size) {
    const void *p = (const void *)(uintptr_t)at;
    return !size || inside(p, (int64_t)size) || fake_gpu_hosts(p) ? 0 : refuse(ILLEGAL_ADDRESS, "a copy outside of live memory");
}
PUBLIC unsigned cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, CUstream_st *stream) {
    FAILS(cuMemcpyHtoDAsync_v2);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (const unsigned r = never_recorded(stream, "a copy from the host, which every launch would read")) return r;
    std::string bytes((const char *)from, size);
    return put(stream, [to, bytes] {
        const unsigned r = reaches(to, bytes.size());
        return r ? r : (memcpy((void *)(uintptr_t)to, bytes.data(), bytes.size()), 0u);
    });
}
PUBLIC unsigned cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, CUstream_st *stream) {
    FAILS(cuMemcpyDtoHAsync_v2);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (const unsigned r = never_recorded(stream, "a copy to the host")) return r;
    return put(stream, [to, from, size] {
        const unsigned r = reaches(from, size);
        return r ? r : (memcpy(to, (const void *)(uintptr_t)from, size), 0u);
    });
}
PUBLIC unsigned cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, CUstream_st *stream) {
    FAILS(cuMemcpyDtoDAsync_v2);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    return put(stream, [to, from, size] {
        unsigned r = reaches(from, size);
        if (!r) r = reaches(to, size);
        return r ? r : (memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size), 0u);
    });
}
PUBLIC unsigned cuMemsetD8Async(uint64_t to, unsigned char byte, size_t size, CUstream_st *stream) {
    FAILS(cuMemsetD8Async);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    return put(stream, [to, byte, size] {
        const unsigned r = reaches(to, size);
        return r ? r : (memset((void *)(uintptr_t)to, byte, size), 0u);
    });
}

/* --- streams --------------------------------------------------------------------------------------------------- */

PUBLIC unsigned cuStreamCreate(CUstream_st **out, unsigned flags) {
    FAILS(cuStreamCreate);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    streams.insert(*out = new CUstream_st{current.back(), !(flags & 1), {}, nullptr});
    return 0;
}
PUBLIC unsigned cuStreamDestroy_v2(CUstream_st *s) {
    FAILS(cuStreamDestroy_v2);
    LOCKED;
    if (!s || !streams.count(s)) return INVALID_HANDLE;
    s->records.reset();
    drain(s);
    streams.erase(s);
    delete s;
    return 0;
}
PUBLIC unsigned cuStreamSynchronize(CUstream_st *stream) {
    LOCKED;
    waits++;
    CUstream_st *s = of(stream);
    if (s->records) {
        s->records->invalid = true;
        return refuse(CAPTURE_UNSUPPORTED, "waits for a stream that records a graph");
    }
    const unsigned r = drain(s);
    sweep();
    FAILS(cuStreamSynchronize); /* told when the work is done */
    return r;
}
PUBLIC unsigned cuCtxSynchronize(void) {
    FAILS(cuCtxSynchronize);
    LOCKED;
    waits++;
    if (!depth) return INVALID_CONTEXT;
    for (CUstream_st *s : streams) /* whoever records: a device that is waited for must have none */
        if (s->records && s->device == current.back()) {
            s->records->invalid = true;
            return refuse(CAPTURE_UNSUPPORTED, "waits for a device one of whose streams records a graph");
        }
    const unsigned r = drain_all();
    sweep();
    return r;
}
PUBLIC unsigned cuStreamIsCapturing(CUstream_st *stream, unsigned *out) {
    FAILS(cuStreamIsCapturing);
    LOCKED;
    if (!stream)
        for (CUstream_st *o : streams)
            if (o->records && o->blocking) return CAPTURE_IMPLICIT;
    const CUstream_st *s = of(stream);
    return *out = !s->records ? 0 : s->records->invalid ? 2 : 1, 0;
}

/* --- events: of a stream, as far as it had come ----------------------------------------------------------------- */

struct CUevent_st { CUstream_st *stream; uint64_t upto; };

PUBLIC unsigned cuEventCreate(CUevent_st **out, unsigned) {
    FAILS(cuEventCreate);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    events.insert(*out = new CUevent_st{nullptr, 0});
    return 0;
}
PUBLIC unsigned cuEventDestroy_v2(CUevent_st *e) {
    LOCKED;
    if (!events.erase(e)) return refuse(INVALID_HANDLE, "an event that is none goes");
    delete e;
    FAILS(cuEventDestroy_v2);
    return 0;
}
PUBLIC unsigned cuEventRecord(CUevent_st *e, CUstream_st *stream) {
    FAILS(cuEventRecord);
    LOCKED;
    if (!depth || !events.count(e) || !streams.count(of(stream))) return refuse(INVALID_HANDLE, "cuEventRecord");
    if (const unsigned r = never_recorded(stream, "an event of the host's")) return r;
    *e = {of(stream), queued};
    return 0;
}
PUBLIC unsigned cuStreamWaitEvent(CUstream_st *stream, CUevent_st *e, unsigned flags) {
    FAILS(cuStreamWaitEvent);
    LOCKED;
    if (!depth || !events.count(e) || !streams.count(of(stream)) || flags) return refuse(INVALID_HANDLE, "cuStreamWaitEvent");
    if (const unsigned r = never_recorded(stream, "an event of another stream")) return r;
    if (late && e->stream) of(stream)->queue.push_back({[] { return 0u; }, queued++, nullptr, e->stream, e->upto});
    return 0;
}

/* --- graphs ---------------------------------------------------------------------------------------------------- */

PUBLIC unsigned cuStreamBeginCapture_v2(CUstream_st *s, unsigned mode) {
    FAILS(cuStreamBeginCapture_v2);
    LOCKED;
    if (!s) return refuse(CAPTURE_UNSUPPORTED, "the legacy stream cannot record");
    if (!streams.count(s) || mode > RELAXED) return refuse(INVALID_VALUE, "cuStreamBeginCapture");
    if (s->records) return refuse(ILLEGAL_STATE, "a stream that records is to begin recording");
    s->records.reset(new record{std::this_thread::get_id(), false, mode, {}});
    return 0;
}
PUBLIC unsigned cuStreamEndCapture(CUstream_st *s, CUgraph_st **out) {
    FAILS(cuStreamEndCapture);
    LOCKED;
    if (!s || !streams.count(s) || !s->records) return refuse(ILLEGAL_STATE, "the end of no record");
    if (s->records->mode != RELAXED && s->records->thread != std::this_thread::get_id()) return refuse(CAPTURE_WRONG_THREAD, "another thread ends a record");
    const std::unique_ptr<record> r = std::move(s->records);
    *out = nullptr;
    if (r->invalid) return CAPTURE_INVALIDATED;
    graphs.insert(*out = new CUgraph_st{r->work});
    return 0;
}
PUBLIC unsigned cuGraphInstantiateWithFlags(CUgraphExec_st **out, CUgraph_st *g, unsigned long long flags) {
    FAILS(cuGraphInstantiateWithFlags);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (!graphs.count(g) || flags) return refuse(INVALID_VALUE, "cuGraphInstantiate");
    execs.insert(*out = new CUgraphExec_st{std::make_shared<std::vector<job>>(g->work)});
    return 0;
}
PUBLIC unsigned cuGraphDestroy(CUgraph_st *g) {
    FAILS(cuGraphDestroy);
    LOCKED;
    if (!graphs.erase(g)) return refuse(INVALID_VALUE, "a graph that is none goes");
    delete g;
    return 0;
}
PUBLIC unsigned cuGraphExecDestroy(CUgraphExec_st *e) {
    FAILS(cuGraphExecDestroy);
    LOCKED;
    if (!execs.erase(e)) return refuse(INVALID_VALUE, "an executable graph that is none goes");
    delete e; /* launches on their way have the record */
    return 0;
}
PUBLIC unsigned cuGraphLaunch(CUgraphExec_st *e, CUstream_st *stream) {
    FAILS(cuGraphLaunch);
    LOCKED;
    if (!depth) return INVALID_CONTEXT;
    if (!execs.count(e)) return refuse(INVALID_VALUE, "a graph that is none is launched");
    const std::shared_ptr<std::vector<job>> all = e->work;
    return put(stream, [all] {
        unsigned r = 0;
        played++;
        for (const job &w : *all)
            if (!r) r = w();
        return r;
    }, all.get());
}
