/* loss.h - attribute `reduction` of the losses. */
#ifndef OM_OPS_LOSS_H
#define OM_OPS_LOSS_H

enum { OM_LOSS_NONE, OM_LOSS_MEAN, OM_LOSS_SUM };

#endif
