/* strip.cu - strip programs without f64 arithmetic. */
#include "cuda/strip_body.h"

EXPORT(128) om_k_strip(PARAM(struct om_gpu_strip) p) { strip_run<struct om_gpu_strip, false>(p); }
EXPORT(128) om_k_strip_large(PARAM(struct om_gpu_strip_large) p) { strip_run<struct om_gpu_strip_large, false>(p); }
