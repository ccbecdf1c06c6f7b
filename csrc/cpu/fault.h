/* fault.h - how a kernel notes an index or label that it cannot use (om_fault, graph/engine.h). */
#ifndef OM_FAULT_H
#define OM_FAULT_H

#include "graph/engine.h"

/* From any thread. A range that meets several need only note the first, at its smallest position. */
void om_fault_note(om_fault *f, int kind, int64_t value, int64_t position, int64_t limit);

static inline bool om_index_fits(int64_t value, int64_t limit) { return (uint64_t)value < (uint64_t)limit; }

#endif
