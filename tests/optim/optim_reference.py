"""fp64 references written from the formulas of onnxruntime-training, torch and the LAMB paper, one tensor at a time, in
numpy."""

from __future__ import annotations

import math

import numpy as np


def adam(p, g, m, v, step, *, lr, b1, b2, eps, wd, mode, bias=True):
    """One step; returns new (p, m, v). Modes as AdamWMode."""
    c1, c2 = (1 - b1**step, 1 - b2**step) if bias else (1.0, 1.0)
    if mode in (0, 3):
        g = g + wd * p
    if mode == 2:
        p = p - lr * wd * p
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    if mode in (0, 1):
        p = p - lr * math.sqrt(c2) / c1 * m / (np.sqrt(v) + eps)
    else:
        p = p - lr * m / (c1 * (np.sqrt(v) / math.sqrt(c2) + eps))
    if mode == 1:
        p = p - lr * wd * p
    return p, m, v


def lamb(p, g, m, v, step, *, lr, b1, b2, eps, wd, scale=1.0, bias=True, ratio_min=-math.inf, ratio_max=math.inf, g_weight=None):
    """LambOptimizer's three stages; `scale` divides the gradient. Returns new (p, m, v, direction)."""
    g = g / scale
    c1, c2 = (1 - b1**step, 1 - b2**step) if bias else (1.0, 1.0)
    with np.errstate(all="ignore"):
        m1 = b1 * m + (1 - b1 if g_weight is None else g_weight) * g
        v1 = b2 * v + (1 - b2) * g * g
        d = wd * p + (m1 / c1) / (np.sqrt(v1 / c2) + eps)
    ok = np.isfinite(d)
    m, v, d = np.where(ok, m1, m), np.where(ok, v1, v), np.where(ok, d, 0)
    w2, d2 = float((p * p).sum()), float((d * d).sum())
    rate = lr * max(ratio_min, min(ratio_max, math.sqrt(w2 / d2))) if w2 and d2 else lr
    with np.errstate(all="ignore"):
        new = p - rate * d
    return np.where(np.isfinite(new), new, p), m, v, d


def lamb_scale(loss_scale, scaled_norm, max_norm):
    return scaled_norm / max_norm if max_norm and scaled_norm > loss_scale * max_norm else loss_scale
