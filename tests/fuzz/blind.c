/* blind.c - drives a libFuzzer target where there is no libFuzzer (gcc): mutates seeds without looking at coverage.
 *
 *     fuzz_onnx [-max_total_time=SECONDS] [-runs=N] [-timeout=SECONDS] [-seed=N] FILE|DIRECTORY...      other
 *     options of libFuzzer are accepted and ignored
 *
 * Files among the arguments are run as they are first. Half of the inputs are one seed changed in a few places, the
 * others begin like one seed and end like another. An input that dies, or takes more than -timeout= seconds of the
 * processor (1), is written to ./crash-blind, or to -artifact_prefix=. The seed of the generator is printed; with it and -runs= the
 * same inputs come again, however fast the machine is.
 */
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void __sanitizer_set_death_callback(void (*f)(void));

#ifndef FUZZ_MAX_LEN
#define FUZZ_MAX_LEN 8192
#endif
enum { MAX_SEEDS = 4096, MAX_LEN = FUZZ_MAX_LEN };
static struct { uint8_t *data; size_t size; } seed[MAX_SEEDS];
static int n_seeds;
static uint8_t input[MAX_LEN];
static size_t input_size;
static char crash[1024] = "crash-blind";
static int timeout = 1; /* of processor time: a busy machine is no finding */

static void died(void) { /* of a sanitizer's finding or of an abort */
    FILE *f = fopen(crash, "wb");
    if (!f || fwrite(input, 1, input_size, f) != input_size) fprintf(stderr, "%s cannot be written\n", crash);
    else fprintf(stderr, "the input of %zu bytes is in %s\n", input_size, crash);
    if (f) fclose(f);
}

static void run(size_t size) {
    uint8_t *exact = malloc(size ? size : 1); /* as large as the input: a read beyond it is seen */
    if (!exact) abort();
    input_size = size;
    memcpy(exact, input, size);
    setitimer(ITIMER_PROF, &(struct itimerval){.it_value.tv_sec = timeout}, NULL);
    LLVMFuzzerTestOneInput(exact, size);
    setitimer(ITIMER_PROF, &(struct itimerval){0}, NULL);
    free(exact);
}

static void seed_add(const char *path) {
    struct stat st;
    if (stat(path, &st)) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(1);
    }
    if (S_ISDIR(st.st_mode)) {
        struct dirent **list;
        int n = scandir(path, &list, NULL, alphasort);
        for (int i = 0; i < n; i++) {
            char inner[2048];
            snprintf(inner, sizeof inner, "%s/%s", path, list[i]->d_name);
            if (list[i]->d_name[0] != '.') seed_add(inner);
            free(list[i]);
        }
        if (n >= 0) free(list);
        return;
    }
    FILE *f = fopen(path, "rb");
    uint8_t *data = malloc(MAX_LEN);
    if (!f || !data || n_seeds == MAX_SEEDS) exit(1);
    seed[n_seeds].size = fread(data, 1, MAX_LEN, f);
    seed[n_seeds++].data = data;
    fclose(f);
}

static uint64_t state;
static uint64_t draw(uint64_t n) { /* xorshift64* (Vigna 2016) below n */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return n ? (state * 2685821657736338717u >> 11) % n : 0;
}

static size_t change(size_t n) {
    static const uint8_t odd[] = {0,   1,   0x7f, 0x80, 0xff, 0x0a, 0x12, 0x22, '[', ']',
                                  '(', ')', '{',  '}',  '-',  '9',  '*',  '/',  ' ', '\n'};
    size_t at = draw(n + 1), len = 1 + draw(draw(4) ? 8 : 256), from = draw(n + 1);
    if (at + len > n) len = n - at;
    switch (draw(7)) {
    case 0:
        if (at < n) input[at] ^= (uint8_t)(1 << draw(8));
        return n;
    case 1:
        if (at < n) input[at] = odd[draw(sizeof odd)];
        return n;
    case 2:
        if (at < n) input[at] = (uint8_t)draw(256);
        return n;
    case 3: /* a piece goes */
        memmove(input + at, input + at + len, n - at - len);
        return n - len;
    case 4: /* a piece comes twice */
        if (n + len > MAX_LEN) return n;
        memmove(input + at + len, input + at, n - at);
        return n + len;
    case 5: /* a piece over another place */
        if (from + len <= n) memmove(input + from, input + at, len);
        return n;
    default: /* the end is missing */
        return draw(8) ? n : at;
    }
}

static void aborted(int sig) {
    if (sig == SIGPROF) fprintf(stderr, "an input takes more than %d s\n", timeout);
    died();
    signal(sig, SIG_DFL);
    raise(sig);
}

int main(int argc, char **argv) {
    double seconds = 60;
    long runs = 0, most = -1; /* all that fit into the time */
    state = (uint64_t)time(NULL);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-max_total_time=", 16)) seconds = atof(argv[i] + 16);
        else if (!strncmp(argv[i], "-runs=", 6)) most = atol(argv[i] + 6);
        else if (!strncmp(argv[i], "-timeout=", 9)) timeout = atoi(argv[i] + 9);
        else if (!strncmp(argv[i], "-seed=", 6)) state = strtoull(argv[i] + 6, NULL, 10);
        else if (!strncmp(argv[i], "-artifact_prefix=", 17))
            snprintf(crash, sizeof crash, "%scrash-blind", argv[i] + 17);
        else if (argv[i][0] != '-') seed_add(argv[i]);
    }
    if (!n_seeds) return fprintf(stderr, "no seeds\n"), 1;
    if (!state) state = 1;
    printf("%d seeds, -seed=%llu\n", n_seeds, (unsigned long long)state);
    fflush(stdout);
    state *= 0x9e3779b97f4a7c15u;
    __sanitizer_set_death_callback(died);
    signal(SIGABRT, aborted);
    signal(SIGPROF, aborted);
    for (int i = 0; i < n_seeds; i++) {
        memcpy(input, seed[i].data, seed[i].size);
        run(seed[i].size);
    }
    for (time_t end = time(NULL) + (time_t)seconds; runs != most && time(NULL) < end; runs++) {
        const int a = (int)draw((uint64_t)n_seeds), b = (int)draw((uint64_t)n_seeds);
        size_t n = seed[a].size;
        memcpy(input, seed[a].data, n);
        if (draw(2)) {
            size_t cut = draw(n + 1), from = draw(seed[b].size + 1), rest = seed[b].size - from;
            if (cut + rest > MAX_LEN) rest = MAX_LEN - cut;
            memcpy(input + cut, seed[b].data + from, rest);
            n = cut + rest;
        }
        for (uint64_t k = 1 + draw(6); k; k--) n = change(n);
        run(n);
    }
    printf("%ld runs, no finding\n", runs);
    return 0;
}
