/* fake_nvrtc.cpp - a libnvrtc.so for the fake device: compiles by the C++ compiler of the host ($CXX, else c++), for
 * fake_module.h; what it gives for a cubin names a shared object, which fake_gpu.cpp loads. The same text is compiled
 * once for each directory ($OM_FAKE_RTC, else /tmp), and stays there beside the object. Headers of C's own are the host's, graph/half.h is that of the tree
 * ($OM_FAKE_SOURCE). */
#include "fake_gpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/stat.h>
#include <unistd.h>

enum { OUT_OF_INPUT = 3 /* NVRTC_ERROR_INVALID_INPUT */, NOT_COMPILED = 6 /* NVRTC_ERROR_COMPILATION */ };
struct _nvrtcProgram { std::string text, log, cubin; std::map<std::string, std::string> headers; };
typedef _nvrtcProgram program;
static long compiled;

static bool put(const std::string &path, const std::string &text) {
    for (size_t i = 1; (i = path.find('/', i)) != std::string::npos; i++) mkdir(path.substr(0, i).c_str(), 0700);
    FILE *f = fopen(path.c_str(), "w");
    if (!f) return false;
    fwrite(text.data(), 1, text.size(), f);
    return !fclose(f);
}
static std::string get(const std::string &path) {
    std::string text;
    char part[4096];
    FILE *f = fopen(path.c_str(), "r");
    for (size_t n; f && (n = fread(part, 1, sizeof part, f));) text.append(part, n);
    if (f) fclose(f);
    return text;
}

PUBLIC long fake_nvrtc_compiled(void) { return compiled; } /* by the compiler */

PUBLIC int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
PUBLIC int nvrtcCreateProgram(program **out, const char *text, const char *, int n, const char *const *texts, const char *const *names) {
    FAILS(nvrtcCreateProgram);
    program *p = *out = new program{text, "", "", {}};
    for (int i = 0; i < n; i++)
        if (strchr(names[i], '/')) p->headers[names[i]] = texts[i];
    return 0;
}
PUBLIC int nvrtcDestroyProgram(program **p) { return delete *p, *p = nullptr, 0; }
PUBLIC int nvrtcCompileProgram(program *p, int n, const char *const *options) {
    FAILS(nvrtcCompileProgram);
    std::string all = p->text;
    bool arch = false, fixed = false;
    for (int i = 0; i < n; i++) {
        arch |= !strncmp(options[i], "--gpu-architecture=sm_", 22);
        fixed |= !strcmp(options[i], "-fmad=false");
        all += options[i];
    }
    if (!arch || !fixed) return p->log = "options that the engine needs are missing", (int)OUT_OF_INPUT;
    for (const auto &h : p->headers) all += h.first + h.second;
    const char *root = getenv("OM_FAKE_RTC"), *compiler = getenv("CXX"), *source = getenv("OM_FAKE_SOURCE");
    const std::string here = source ? source : ".";
    char name[64];
    snprintf(name, sizeof name, "/om-fake-rtc-%d/%016zx", (int)getuid(), std::hash<std::string>()(all));
    const std::string at = std::string(root ? root : "/tmp") + name, so = at + ".so", own = at + "." + std::to_string(getpid());
    if (access(so.c_str(), R_OK)) {
        for (const auto &h : p->headers) put(own + "/" + h.first, h.second);
        put(own + "/strips.cpp", "#include \"" + here + "/tests/cuda/fake_module.h\"\n" + p->text);
        const std::string command = std::string(compiler ? compiler : "c++") + " -std=c++17 -O1 -w -fPIC -shared -I" + own + " -I" + here + "/csrc -o " + own +
                                    "/strips.so " + own + "/strips.cpp 2> " + own + "/log";
        compiled++;
        put(at + ".cu", p->text);
        if (system(command.c_str()) || rename((own + "/strips.so").c_str(), so.c_str())) return p->log = get(own + "/log"), (int)NOT_COMPILED;
        (void)!system(("rm -rf " + own).c_str());
    }
    return p->cubin = "FAKECUBIN:" + so, p->cubin += '\0', 0;
}
PUBLIC int nvrtcGetProgramLogSize(program *p, size_t *n) { return *n = p->log.size() + 1, 0; }
PUBLIC int nvrtcGetProgramLog(program *p, char *out) { return memcpy(out, p->log.c_str(), p->log.size() + 1), 0; }
PUBLIC int nvrtcGetCUBINSize(program *p, size_t *n) { return *n = p->cubin.size(), 0; }
PUBLIC int nvrtcGetCUBIN(program *p, char *out) {
    FAILS(nvrtcGetCUBIN);
    return memcpy(out, p->cubin.data(), p->cubin.size()), 0;
}
