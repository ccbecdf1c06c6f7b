/* checking.c - the checking device: does anything in graph, passes, plan or run assume a CPU?
 *
 * It computes with the CPU's rows and is otherwise as far from the CPU as a device can be.
 *
 * Memory. One file in memory is mapped twice, at a fixed distance. The addresses that everybody knows (om_block.data,
 * tensors, scalars, scratch) lie in the first mapping, which nobody may read or write, and the rows work on the second
 * one: each of their pointers is moved over before the CPU's row is called. Who touches the first mapping, and a row
 * that leaves the blocks it was given, ends the process with a line that names the address. A block is never handed out
 * at another one's address, its bytes are 0xff at first, and its pages are gone when it was given back. The run's
 * scalars open up only to operators that are marked as random, and to chains with such a statement. A tensor in the
 * host's memory is refused as an operand; a graph input that is marked as a host scalar is one all the same, as the run
 * has taken it along.
 *
 * Time. What is asked of the device goes on one queue, which a thread of its own works off in order: slices, copies,
 * fills, uploads, and blocks that were given back. Only a download waits, and a plan's end: its prepared calls are read
 * by the queue. What a job needs is copied when it is queued, so that neither the run nor its arrays nor the bytes that
 * were uploaded need to be there any longer. om_checking_late says how late: 0, the beginning, is the latest that is
 * allowed, nothing runs before somebody waits; another number is a seed for a pause before each job.
 *
 * Failures. A slice that fails (an index out of range) is noted, what is queued behind it is left undone, and the first
 * one is told who waits, or begins another slice when it is known already (late faults: graph/device.h).
 *
 * Tests reach it by ctypes (tests/device/steps.py): om_checking_*.
 */
#include "cpu/copy.h"
#include "ops/strip.h"
#include "run/plan.h"

#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096 };
static const size_t ROOM = (size_t)1 << 38; /* of addresses */

typedef struct block {
    om_block b;
    size_t pages; /* bytes */
} block;

typedef enum job_kind { JOB_SLICE, JOB_COPY, JOB_FILL, JOB_UPLOAD, JOB_PUT } job_kind;

typedef struct job {
    struct job *next;
    job_kind kind;
    om_services sv;         /* SLICE, COPY: the caller's */
    om_run run;             /* SLICE: as it was, with arrays of its own behind the job */
    int from, to;
    om_tensor src, dst;     /* COPY */
    void *at;               /* FILL, UPLOAD */
    size_t size;
    int byte;
    block *put;
    char bytes[];           /* UPLOAD: what; SLICE: the run's arrays */
} job;

static struct {
    char *host, *own;       /* the two mappings */
    int fd;
    pthread_mutex_t lock;   /* of all below */
    pthread_cond_t change;
    size_t used;
    job *first, **last;
    uint64_t queued, done, wanted; /* jobs; somebody waits for the first `wanted` */
    uint64_t late;
    om_status fault;
    char message[1024];
    int strip_most;         /* statements in a chain; 0: as many as the CPU takes */
    long live, slices, waits, ended;
    bool ran[OM_N_OPS];     /* operators of which a call ran; the queue's own */
} dev = {.lock = PTHREAD_MUTEX_INITIALIZER, .change = PTHREAD_COND_INITIALIZER, .last = &dev.first};

static __thread bool on_queue; /* this thread works the queue off */
static struct sigaction before;

static om_device checking;
static om_row rows[OM_N_OPS];

/* --- memory ------------------------------------------------------------------------------------- */

static bool is_ours(const void *p) { return (const char *)p >= dev.host && (const char *)p < dev.host + ROOM; }
static void *own_view(const void *p) { return dev.own + ((const char *)p - dev.host); }

/* Async-signal-safe, as far as it can be: the process ends here. */
static void touched(int sig, siginfo_t *info, void *context) {
    const char *p = info->si_addr;
    const bool host = is_ours(p), own = p >= dev.own && p < dev.own + ROOM;
    if (!host && !own) { /* not ours to explain */
        sigaction(sig, &before, NULL);
        (void)context;
        return;
    }
    char text[160];
    int n = snprintf(text, sizeof text, "checking device: %s at byte %zu of its memory (%p)\n",
                     host ? "the host touched what is the device's" : "a kernel left the blocks it was given",
                     (size_t)(p - (host ? dev.host : dev.own)), (const void *)p);
    if (write(2, text, (size_t)n) < 0) _exit(3);
    void *frame[32];
    backtrace_symbols_fd(frame, backtrace(frame, 32), 2);
    abort(); /* Python's faulthandler says where, also to who captures our line */
}

static om_status tensor_own(om_ctx *cx, om_tensor *t, const char *what, int i) {
    if (!t->dtype || !om_numel(t)) return OM_OK;
    if (!is_ours(t->data))
        return om_fail(cx, OM_INTERNAL, "%s: operand %d lies at %p, which is no memory of the device's", what, i,
                       t->data);
    t->data = own_view(t->data);
    return OM_OK;
}

/* --- the queue ---------------------------------------------------------------------------------- */

static job *job_new(om_ctx *cx, job_kind kind, size_t bytes) {
    job *j = calloc(1, sizeof *j + bytes);
    if (!j) om_fail(cx, OM_NOMEM, "checking device: no memory for a job");
    else j->kind = kind;
    return j;
}

static void job_queue(job *j) {
    pthread_mutex_lock(&dev.lock);
    *dev.last = j;
    dev.last = &j->next;
    dev.queued++;
    dev.slices += j->kind == JOB_SLICE;
    pthread_cond_broadcast(&dev.change);
    pthread_mutex_unlock(&dev.lock);
}

static om_status copy_now(om_ctx *cx, om_tensor src, om_tensor dst) {
    OM_TRY(tensor_own(cx, &src, "copy", 0));
    OM_TRY(tensor_own(cx, &dst, "copy", 1));
    return om_device_cpu.copy(cx, &src, &dst);
}

static om_status job_do(om_ctx *cx, job *j) {
    switch (j->kind) {
    case JOB_SLICE:
        j->run.cx = cx;
        cx->max_threads = j->run.plan->threads;
        return om_run_slice_rows(&j->run, j->from, j->to);
    case JOB_COPY: return copy_now(cx, j->src, j->dst);
    case JOB_FILL: memset(own_view(j->at), j->byte, j->size); return OM_OK;
    case JOB_UPLOAD: memcpy(own_view(j->at), j->bytes, j->size); return OM_OK;
    case JOB_PUT: break;
    }
    return OM_OK;
}

static void put_now(block *b) {
    mprotect(own_view(b->b.data), b->pages, PROT_NONE);
    if (fallocate(dev.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (char *)b->b.data - dev.host, (off_t)b->pages))
        perror("checking device: fallocate");
    free(b);
}

static void *queue_work(void *arg) {
    uint64_t random = 0;
    (void)arg;
    on_queue = true;
    for (;;) {
        pthread_mutex_lock(&dev.lock);
        while (!dev.first || (!dev.late && dev.done >= dev.wanted)) pthread_cond_wait(&dev.change, &dev.lock);
        job *j = dev.first;
        const bool pause = dev.late && dev.done >= dev.wanted, failed = dev.fault != OM_OK;
        random = (random + dev.late) * 6364136223846793005u + 1442695040888963407u;
        pthread_mutex_unlock(&dev.lock);
        if (pause) usleep((useconds_t)(random >> 33) % 400);
        om_ctx cx = {.sv = j->sv, .device = &checking};
        const om_status s = failed ? OM_OK : job_do(&cx, j);
        if (j->kind == JOB_PUT) put_now(j->put);
        pthread_mutex_lock(&dev.lock);
        if (s != OM_OK) {
            dev.fault = s;
            snprintf(dev.message, sizeof dev.message, "%s", cx.message);
        }
        dev.live -= j->kind == JOB_PUT;
        if (!(dev.first = j->next)) dev.last = &dev.first;
        dev.done++;
        pthread_cond_broadcast(&dev.change);
        pthread_mutex_unlock(&dev.lock);
        free(j);
    }
    return NULL;
}

/* For all that is queued now. */
static void queue_wait(void) {
    pthread_mutex_lock(&dev.lock);
    const uint64_t until = dev.queued;
    if (dev.wanted < until) dev.wanted = until;
    dev.waits++;
    pthread_cond_broadcast(&dev.change);
    while (dev.done < until) pthread_cond_wait(&dev.change, &dev.lock);
    pthread_mutex_unlock(&dev.lock);
}

/* What has failed since somebody asked. */
static om_status queue_fault(om_ctx *cx) {
    pthread_mutex_lock(&dev.lock);
    const om_status s = dev.fault;
    if (s != OM_OK && cx->status == OM_OK) { /* the first failure stays */
        cx->status = s;
        memcpy(cx->message, dev.message, sizeof cx->message);
    }
    dev.fault = OM_OK;
    pthread_mutex_unlock(&dev.lock);
    return s;
}

/* --- the device --------------------------------------------------------------------------------- */

static om_block *checking_get(om_ctx *cx, size_t size) {
    const size_t pages = (size / PAGE + 1) * PAGE; /* and one that stays closed */
    block *b = malloc(sizeof *b);
    pthread_mutex_lock(&dev.lock);
    const size_t at = dev.used;
    const bool fits = b && size < ROOM && at + pages + PAGE <= ROOM;
    if (fits) dev.used += pages + PAGE, dev.live++;
    pthread_mutex_unlock(&dev.lock);
    if (!fits) {
        free(b);
        om_fail(cx, OM_NOMEM, "checking device: %zu bytes asked for, no addresses are left", size);
        return NULL;
    }
    *b = (block){.b = {.data = dev.host + at, .size = size, .device = &checking}, .pages = pages};
    mprotect(dev.own + at, pages, PROT_READ | PROT_WRITE);
    memset(dev.own + at, 0xff, pages); /* undefined */
    return &b->b;
}

static void checking_put(om_block *b) {
    block *own = (block *)(void *)b;
    om_ctx none = {.status = OM_OK};
    job *j = job_new(&none, JOB_PUT, 0);
    if (!j) abort();
    j->put = own;
    job_queue(j);
}

static om_status checking_copy(om_ctx *cx, const om_tensor *src, om_tensor *dst) {
    if (on_queue) return copy_now(cx, *src, *dst);
    job *j = job_new(cx, JOB_COPY, 0);
    if (!j) return cx->status;
    j->src = *src, j->dst = *dst, j->sv = cx->sv;
    job_queue(j);
    return OM_OK;
}

static om_status checking_copy_run(om_ctx *cx, const void *prep, const om_tensor *src, om_tensor *dst) {
    om_tensor from = *src, to = *dst;
    if (!on_queue) return om_fail(cx, OM_INTERNAL, "a copy of a plan outside of its slice");
    OM_TRY(tensor_own(cx, &from, "copy", 0));
    OM_TRY(tensor_own(cx, &to, "copy", 1));
    return om_device_cpu.copy_run(cx, prep, &from, &to);
}

static om_status checking_fill(om_ctx *cx, void *to, int byte, size_t size) {
    if (!size) return OM_OK;
    if (!is_ours(to)) return om_fail(cx, OM_INTERNAL, "fill: %p is no memory of the device's", to);
    if (on_queue) return memset(own_view(to), byte, size), OM_OK;
    job *j = job_new(cx, JOB_FILL, 0);
    if (!j) return cx->status;
    j->at = to, j->byte = byte, j->size = size;
    job_queue(j);
    return OM_OK;
}

static om_status checking_upload(om_ctx *cx, void *to, const void *from, size_t size) {
    if (!size) return OM_OK;
    if (!is_ours(to) || is_ours(from))
        return om_fail(cx, OM_INTERNAL, "upload from %p to %p: not from the host's memory to the device's", from, to);
    job *j = job_new(cx, JOB_UPLOAD, size);
    if (!j) return cx->status;
    j->at = to, j->size = size;
    memcpy(j->bytes, from, size);
    job_queue(j);
    return OM_OK;
}

static om_status checking_download(om_ctx *cx, void *to, const void *from, size_t size) {
    if (size && (is_ours(to) || !is_ours(from)))
        return om_fail(cx, OM_INTERNAL, "download from %p to %p: not from the device's memory to the host's", from, to);
    queue_wait();
    OM_TRY(queue_fault(cx));
    if (size) memcpy(to, own_view(from), size);
    return OM_OK;
}

static int checking_workers(om_ctx *cx) {
    (void)cx;
    return 2;
}

static om_status checking_begin(om_ctx *cx, int workers) {
    (void)workers;
    return queue_fault(cx); /* without waiting */
}

static om_status checking_end(om_ctx *cx, om_status s) {
    (void)cx;
    return s;
}

/* A run of the queue's own: the caller's is gone or changed when the slice is due. */
static om_status checking_slice(om_run *r, int from, int to) {
    const om_graph *g = r->plan->g;
    const size_t n_in = g->inputs.n, n_out = g->outputs.n, n_grad = g->grads.n;
    job *j = job_new(r->cx, JOB_SLICE, (n_in + 2 * n_out + n_grad) * sizeof(void *));
    if (!j) return r->cx->status;
    if (!is_ours(r->scalars) || !r->plan->constants) {
        free(j);
        return om_fail(r->cx, OM_INTERNAL, "scalars lie at %p, constants at %p: no memory of the device's",
                       (const void *)r->scalars, (void *)r->plan->constants);
    }
    void **at = (void **)(void *)j->bytes;
    j->sv = r->cx->sv;
    j->run = (om_run){.plan = r->plan,
                      .scalars = r->scalars,
                      .arena = r->arena,
                      .backward = r->backward,
                      .skip_writes = r->skip_writes,
                      .profile = r->profile,
                      .seed = r->seed};
    j->from = from, j->to = to;
    j->run.input = memcpy(at, r->input, n_in * sizeof *at);
    j->run.output = memcpy(at + n_in, r->output, n_out * sizeof *at);
    j->run.loan = memcpy(at + n_in + n_out, r->loan, n_out * sizeof *at);
    j->run.grad = memcpy(at + n_in + 2 * n_out, r->grad, n_grad * sizeof *at);
    r->plan->of_device = dev.host; /* calls of it were queued */
    job_queue(j);
    if (!r->profile) return OM_OK;
    queue_wait(); /* its rows are the run's */
    return queue_fault(r->cx);
}

/* Its prepared calls are read by the queue. */
static void checking_plan_end(om_plan *p) {
    if (p->of_device) queue_wait();
    dev.ended += p->of_device != NULL;
    p->of_device = NULL;
}

/* The CPU's row on the second mapping. */
static om_status checking_run(om_ctx *cx, const om_args *a) {
    const char *name = a->node->op->name;
    om_tensor t[OM_MAX_ARGS];
    om_args own = *a;
    for (int i = 0; i < a->n_in + a->n_out; i++) {
        t[i] = i < a->n_in ? a->in[i] : a->out[i - a->n_in];
        OM_TRY(tensor_own(cx, &t[i], name, i));
    }
    if (!is_ours(a->scalars) || (a->scratch && !is_ours(a->scratch)))
        return om_fail(cx, OM_INTERNAL, "%s: scalars at %p, scratch at %p: no memory of the device's", name,
                       (const void *)a->scalars, a->scratch);
    if (a->count && !is_ours(a->count))
        return om_fail(cx, OM_INTERNAL, "%s: the count at %p: no memory of the device's", name, (const void *)a->count);
    own.in = t, own.out = t + a->n_in;
    if (a->count) own.count = own_view(a->count);
    /* the seed is for who is marked as random: others get what nobody may read */
    const char *chain = om_attr_str(a->attr, a->n_attr, "program", "");
    own.scalars = a->node->op->random || strstr(chain, " rng=") ? own_view(a->scalars) : a->scalars;
    if (a->scratch) own.scratch = own_view(a->scratch);
    dev.ran[a->node->op->id] = true;
    return om_device_cpu.rows[a->node->op->id].run(cx, &own);
}

static uint32_t checking_counted(const om_graph *g, const om_node *n) { return om_device_cpu.counted(g, n); }

static bool checking_strip_fits(const om_strip_text *t, const uint8_t *in_dtype, const bool *uniform) {
    return (!dev.strip_most || t->n_stmt <= dev.strip_most) && om_device_cpu.strip_fits(t, in_dtype, uniform);
}

static om_device checking = {.name = "checking",
                             .rows = rows,
                             .strip_fits = checking_strip_fits,
                             .block_get = checking_get,
                             .block_put = checking_put,
                             .copy = checking_copy,
                             .copy_prepare = om_cpu_copy_prepare,
                             .copy_run = checking_copy_run,
                             .fill = checking_fill,
                             .upload = checking_upload,
                             .download = checking_download,
                             .workers = checking_workers,
                             .counted = checking_counted,
                             .begin = checking_begin,
                             .end = checking_end,
                             .run_slice = checking_slice,
                             .plan_end = checking_plan_end};

static bool started;

static void device_start(void) {
    pthread_t thread;
    struct sigaction act = {.sa_sigaction = touched, .sa_flags = SA_SIGINFO | SA_NODEFER};
    void *warm[1];
    memcpy(rows, om_device_cpu.rows, sizeof rows);
    for (int i = 0; i < OM_N_OPS; i++)
        if (rows[i].run) rows[i].run = checking_run;
    backtrace(warm, 1); /* what loads a library does so outside of the signal handler */
    dev.fd = memfd_create("checking", 0);
    if (dev.fd < 0 || ftruncate(dev.fd, (off_t)ROOM)) return;
    dev.host = mmap(NULL, ROOM, PROT_NONE, MAP_SHARED | MAP_NORESERVE, dev.fd, 0);
    dev.own = mmap(NULL, ROOM, PROT_NONE, MAP_SHARED | MAP_NORESERVE, dev.fd, 0);
    if (dev.host == MAP_FAILED || dev.own == MAP_FAILED) return;
    if (sigaction(SIGSEGV, &act, &before) || pthread_create(&thread, NULL, queue_work, NULL)) return;
    pthread_detach(thread);
    started = true;
}

/* --- for tests ---------------------------------------------------------------------------------- */

void om_checking_use(om_ctx *cx);
void om_checking_late(uint64_t seed);
void om_checking_strip(int most);
long om_checking_count(int what);
const char *om_checking_idle(int nth);
om_status om_checking_wait(om_ctx *cx);
void om_checking_peek(void *to, const void *from, size_t size);
om_block *om_checking_get(om_ctx *cx, size_t size);
om_status om_checking_upload(om_ctx *cx, void *to, const void *from, size_t size);
om_status om_checking_download(om_ctx *cx, void *to, const void *from, size_t size);
om_status om_checking_copy_of(om_ctx *cx, const om_tensor *src, om_tensor *dst);

/* The context's plans run here from now on; models take their device from the context they are loaded with. */
void om_checking_use(om_ctx *cx) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, device_start);
    if (started) cx->device = &checking;
    else om_fail(cx, OM_NOMEM, "checking device: no memory file, mapping or thread");
}

void om_checking_late(uint64_t seed) {
    pthread_mutex_lock(&dev.lock);
    dev.late = seed;
    pthread_cond_broadcast(&dev.change);
    pthread_mutex_unlock(&dev.lock);
}

void om_checking_strip(int most) { dev.strip_most = most; }

/* 0: blocks that are not given back; 1: jobs queued and not done; 2: slices, 3: waits, 4: plans gone so far */
long om_checking_count(int what) {
    pthread_mutex_lock(&dev.lock);
    const long n[] = {dev.live, (long)(dev.queued - dev.done), dev.slices, dev.waits, dev.ended};
    pthread_mutex_unlock(&dev.lock);
    return n[what];
}

/* The nth operator with a row of which no call has run yet; NULL: there are not so many. */
const char *om_checking_idle(int nth) {
    queue_wait();
    for (int i = 0; i < OM_N_OPS; i++)
        if (rows[i].run && !dev.ran[i] && nth-- == 0) return om_ops[i]->name;
    return NULL;
}

om_status om_checking_wait(om_ctx *cx) {
    queue_wait();
    return queue_fault(cx);
}

/* The device's bytes as they are now: waits for nothing. */
void om_checking_peek(void *to, const void *from, size_t size) { memcpy(to, own_view(from), size); }

/* Of the context's device, whichever. */
om_block *om_checking_get(om_ctx *cx, size_t size) { return cx->device->block_get(cx, size); }
om_status om_checking_upload(om_ctx *cx, void *to, const void *from, size_t size) {
    return cx->device->upload(cx, to, from, size);
}
om_status om_checking_download(om_ctx *cx, void *to, const void *from, size_t size) {
    return cx->device->download(cx, to, from, size);
}
om_status om_checking_copy_of(om_ctx *cx, const om_tensor *src, om_tensor *dst) {
    return cx->device->copy(cx, src, dst);
}
