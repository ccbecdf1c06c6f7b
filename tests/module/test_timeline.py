"""model.memory_timeline(): what it shows is what the pool hands out, and pictures that can be read back."""

from __future__ import annotations

import gc
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import MODELS
from torch import Tensor, nn

from ortmodule import _C, ORTModule
from ortmodule.memory import mib
from ortmodule.timeline import CLASSES, svg


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 300)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, labels), logits


def made(**options: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return ORTModule(Net(), **options), (torch.randn(48, 64), torch.randint(0, 300, (48,)))


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    model.zero_grad()
    out = model(*batch)
    out[0].backward()


@pytest.mark.parametrize("options", [{}, {"segment_mb": 0.02}, {"memory_opt_level": 1}])
def test_what_is_held_is_what_the_pool_hands_out(options: dict[str, Any]) -> None:
    model, batch = made(**options)
    step(model, batch)
    t = model.memory_timeline()
    parameters = sum(p.nbytes for p in model.parameters())
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        _C.pool_trim()
        before = _C.pool_stats()["live"]
        step(model, batch)
    measured = _C.pool_stats()["peak_live"] - before
    assert max(t.held) - parameters == measured == model.report().graphs[0].memory.peak
    assert set(t.live) == set(CLASSES) and all(len(row) == len(t.calls) == len(t.held) for row in t.live.values())
    assert all(a <= b for a, b in zip(t.total, t.held)) and all(x >= 0 for row in t.live.values() for x in row)
    assert set(t.live["parameters"]) == {parameters}
    # nothing of the backward before it begins; gradients only grow and are all there at the end
    assert not any(t.live["gradients"][: t.n_forward]) and t.live["gradients"] == sorted(t.live["gradients"])
    assert t.live["gradients"][-1] >= parameters and max(t.live["gradients of outputs"][: t.n_forward], default=0) == 0
    assert len(t.segment_ends) == (1 if "segment_mb" not in options else len(set(t.segment_ends))) and t.segment_ends[-1] == len(t.calls)
    # what is kept grows until the forward ends and goes away
    kept = t.live["activations kept"]
    assert kept[: t.n_forward] == sorted(kept[: t.n_forward]) and kept[t.n_forward :] == sorted(kept[t.n_forward :], reverse=True)
    assert kept[t.n_forward] == model.report().graphs[0].memory.kept and sum(p.bytes for p in t.pieces) + parameters == t.total[t.peak]


def test_what_is_held_while_segments_run() -> None:
    """Asked of the pool when gradients are handed out."""
    model, batch = made(segment_mb=0.02)
    step(model, batch)
    t = model.memory_timeline()
    parameters = sum(p.nbytes for p in model.parameters())
    seen: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: seen.append(_C.pool_stats()["live"] - before))
    model.zero_grad()
    gc.collect()
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    step(model, batch)
    assert len(t.segment_ends) > 2 and len(set(seen)) == len(t.segment_ends) and seen == sorted(seen)
    for begin, end in zip(t.segment_ends, t.segment_ends[1:]):  # but for the first, whose loan goes back with its end
        assert set(t.held[begin:end]) == {t.held[begin]} and t.held[begin] - parameters in seen


def test_whole_layers_computed_again_keep_less() -> None:
    make, batch = MODELS["gpt2"]
    found = []
    for level in (0, 1):
        torch.manual_seed(0)
        model = ORTModule(make(), memory_opt_level=level)
        model(**batch).loss.backward()
        found.append(model.memory_timeline())
    a, b = found
    assert max(b.held) < max(a.held) and max(b.live["activations kept"]) < 0.6 * max(a.live["activations kept"])


def areas(text: str) -> dict[str, list[tuple[float, float]]]:
    """Points of every area of an svg, by title; `held`."""
    root = ET.fromstring(text)
    space = {"s": "http://www.w3.org/2000/svg"}
    found = {}
    for e in [*root.iterfind(".//s:polygon", space), *root.iterfind(".//s:polyline", space)]:
        title = e.find("s:title", space)
        found[title.text if title is not None else e.attrib["class"]] = [tuple(map(float, p.split(","))) for p in e.attrib["points"].split()]
    return found  # type: ignore[return-value]


def test_pictures_and_page(tmp_path: Path) -> None:
    model, batch = made(segment_mb=0.02)
    with pytest.raises(RuntimeError, match="no step with a backward"):
        model.memory_timeline()
    step(model, batch)
    t = model.memory_timeline(tmp_path / "m.svg")
    shapes = areas((tmp_path / "m.svg").read_text())
    assert set(shapes) == {*CLASSES, "held"}
    # the axis: two ticks give bytes per pixel; the highest point of `held` is the largest value
    ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', svg(t))
    (y0, v0), (y1, v1) = [(float(a) - 4, float(b)) for a, b in (ticks[0], ticks[-1])]
    per = (v1 - v0) * 2**20 / (y0 - y1)
    assert abs((y0 - min(y for _, y in shapes["held"])) * per - max(t.held)) < 0.01 * max(t.held)
    top = shapes["workspace"][: 2 * len(t.calls)]  # the uppermost area: its upper edge is all that is alive
    for i, total in enumerate(t.total):
        assert abs((y0 - top[2 * i][1]) * per - total) < 0.01 * max(t.held)
    page = model.memory_timeline(tmp_path / "m.html") and (tmp_path / "m.html").read_text()
    assert "<svg" in page and page.count("<tr>") == len(t.pieces) + 1 and mib(t.total[t.peak]) in page and "test_timeline.py" in page
    with pytest.raises(ValueError, match=r"\.html, \.svg"):
        model.memory_timeline("m.txt")
    assert "activations kept" in str(t) and f"call {t.peak}" in str(t)


def test_picture_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    model, batch = made()
    step(model, batch)
    model.memory_timeline(str(tmp_path / "m.png"))
    seen = image.open(tmp_path / "m.png").convert("RGB")
    colours = {colour for _, colour in seen.getcolors(1 << 24)}
    for name in ("parameters", "gradients", "outputs", "activations kept", "workspace"):
        assert tuple(int(CLASSES[name][i : i + 2], 16) for i in (1, 3, 5)) in colours, name


def test_without_matplotlib_the_error_says_what_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, batch = made()
    step(model, batch)
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"give a path that ends in \.svg or \.html"):
        model.memory_timeline(tmp_path / "m.png")
    model.memory_timeline(tmp_path / "m.svg")
