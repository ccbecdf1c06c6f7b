"""Attention of f32 in register tiles (attention_f32.cu, attention_f32_grad.cu) on the fake GPU: outputs and gradients against fp64 eager, with an error of at
most twice that of eager in f32."""

from __future__ import annotations

import functools

import pytest
from cuda.children import child as any_child
from cuda.children import on_fake
from cuda.test_attention_mma import SETUP

pytestmark = on_fake
child = functools.partial(any_child, OM_DEVICE="cuda-fake")
SETUP += """
F32 = torch.float32
TILED = [f"attention_tiled{n}{what}_f32" for n in (64, 128) for what in ("", "_dq", "_dkv")]
"""

SHAPES = """
for shape in [(1, 2, 2, 64, 64, 64, 64), (2, 2, 1, 67, 131, 64, 32), (1, 1, 1, 33, 97, 128, 96), (1, 2, 2, 5, 71, 7, 5), (1, 1, 1, 130, 65, 72, 80), (1, 1, 1, 70, 40, 100, 102)]:
    for causal in (0, 1):
        case(shape, F32, causal=causal, view=causal, scale=0.31 if shape[5] == 7 else None)
case((1, 3, 1, 40, 72, 16, 24), F32, seq_first=1, causal=1, offset=5)
case((2, 2, 2, 1, 37, 8, 8), F32)
case((1, 2, 1, 9, 7, 66, 8), F32, causal=1)
done(TILED)
"""

MASKS = """
g = torch.Generator().manual_seed(3)
for shape in [(3, 2, 1, 71, 131, 16, 8), (3, 2, 1, 71, 131, 8, 68)]:
    case(shape, F32, start=[0, 100, 64], end=[131, 131, 67])
    case(shape, F32, start=[70, 0, 131], end=[71, 0, 131], causal=1)
    for offset, window in [(-3, 0), (60, 0), (0, 4), (70, 65), (-70, 0), (1, 67)]:
        case(shape, F32, causal=1, offset=offset, window=window)
        if window: case(shape, F32, window=window)
    mask = torch.rand(3, 1, 71, 131, generator=g) > 0.4
    mask[1, 0, 7] = False  # sees nothing
    case(shape, F32, mask=mask)
    case(shape, F32, mask=mask[:1, :, :1], causal=1)
    for kind in (torch.bfloat16, torch.float32, torch.float64):
        case(shape, F32, mask=rand(3, 2, 71, 131).to(kind))
        case(shape, F32, mask=torch.where(mask, 0.0, -INF).to(kind), causal=1, offset=60)
    lowest = torch.where(mask, 0.0, float(torch.finfo(F32).min))  # a row of these: the mean of v
    case(shape, F32, mask=lowest, compare=False)
    case(shape, F32, frozen=torch.rand(3, 1, 71, 131, generator=g) > 0.6)
done(TILED)
"""

EDGES = """
for d in (8, 72):
    edges(F32, d)
done(TILED)
"""

DROPOUT = """
for shape, p in [((2, 2, 2, 71, 131, 8, 8), 0.1), ((1, 4, 2, 67, 128, 8, 16), 0.5), ((1, 1, 1, 35, 193, 128, 128), 0.25), ((1, 2, 1, 37, 96, 80, 8), 0.3), ((1, 2, 2, 7, 70, 5, 3), 1.0)]:
    for causal in (0, 1):
        case(shape, F32, drop=p, causal=causal, offset=60)
done(TILED)
"""

BEHIND = """
for d, end in ((64, 67), (96, 33)):
    q, k, v = qkv(1, 2, 1, 40, 131, d, d)
    dy, runs = rand(1, 2, 40, d, per_axis=7).float(), []
    for rest in (0.0, float("nan"), INF):
        xs = [q.float(), k.float(), v.float(), torch.tensor([end])]
        for x in xs[1:3]: x[:, :, end:] = rest
        ys, gs = engine.run(graph([*xs[:3], None, None, xs[3]], "causal=1, causal_offset=[91]", ""), xs, [1, 1, 1, 0], [dy])
        runs.append([*ys, *gs])
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
done(TILED)
"""

ORDERS = """
fake.late(False)
runs = []
for seed in (0, 3, 8, 13):
    fake.seed(seed)
    runs.append(case((1, 2, 1, 67, 131, 64, 64), F32, drop=0.1, causal=1, offset=64) + case((1, 1, 1, 35, 66, 128, 96), F32, drop=0.1, end=[65]))
    runs[-1] += case((1, 1, 1, 64, 131, 7, 9), F32, causal=1, offset=30)
for other in runs[1:]:
    assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
done(TILED)
"""

REST = """
case((1, 2, 1, 35, 66, 136, 8), F32, causal=1)
case((1, 2, 1, 35, 66, 8, 8), torch.float64, compare=False)
assert not any(map(fake.ran, TILED))
done(["attention_f32", "attention_dq_f32", "attention_dkv_f32", "attention_f64"])
"""

OLDER = """
case((1, 2, 1, 35, 66, 8, 8), F32, causal=1, drop=0.1)
assert not any(map(fake.ran, TILED))
done(["attention_f32", "attention_dq_f32", "attention_dkv_f32"])
"""


@pytest.mark.parametrize("what,seed", [("SHAPES", 4), ("MASKS", 7), ("EDGES", 9), ("DROPOUT", 10)])
def test_against_eager(what: str, seed: int) -> None:
    assert child(SETUP + globals()[what], OM_FAKE_SEED=str(seed)) == "done\n"


def test_what_lies_behind_the_last_key_is_not_multiplied() -> None:
    assert child(SETUP + BEHIND) == "done\n"


def test_same_bits_in_every_order() -> None:
    assert child(SETUP + ORDERS) == "done\n"


def test_what_the_plain_kernels_take() -> None:
    """Larger heads and f64; everything before sm_80."""
    assert child(SETUP + REST) == "done\n"
    assert child(SETUP + OLDER, OM_FAKE_SM="75") == "done\n"
