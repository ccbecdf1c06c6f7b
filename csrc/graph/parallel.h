/* parallel.h - when loops leave threads alone that come late (parallel.c). Times in ns, of one clock. */
#ifndef OM_PARALLEL_H
#define OM_PARALLEL_H
#include <stdint.h>

typedef struct om_pace {
    int64_t until; /* threads are tried again then, but by loops that win more than `lost` */
    int64_t pause; /* after the next delay, at least; 0: none was lately */
    int64_t lost;  /* what the last delay cost */
    int64_t fine;  /* time of loops since then, whose threads came */
} om_pace;

/* A loop from begin to end, the last of whose threads came `late`. */
void om_pace_note(om_pace *p, int64_t begin, int64_t end, int64_t late);
#endif
