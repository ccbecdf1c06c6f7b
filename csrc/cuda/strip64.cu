/* strip64.cu - strip programs with f64 arithmetic. */
#include "cuda/strip_body.h"

EXPORT(128) om_k_strip64(PARAM(struct om_gpu_strip) p) { strip_run<struct om_gpu_strip, true>(p); }
EXPORT(128) om_k_strip64_large(PARAM(struct om_gpu_strip_large) p) { strip_run<struct om_gpu_strip_large, true>(p); }
