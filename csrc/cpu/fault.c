/* fault.c - the fault word on the CPU: the smallest position of all threads stays. */
#include "cpu/fault.h"

#include <sched.h>

void om_fault_note(om_fault *f, int kind, int64_t value, int64_t position, int64_t limit) {
    while (__atomic_exchange_n(&f->busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
    if (!f->kind || position < f->position) {
        f->kind = kind;
        f->value = value;
        f->position = position;
        f->limit = limit;
    }
    __atomic_store_n(&f->busy, 0, __ATOMIC_RELEASE);
}
