"""model.memory_timeline(): what lies in memory over a step, by class, as a picture.

All of it is the plan's own (csrc/run/plan.h): which storage lives from which call to which. The areas are what is
alive; the line above them is what the engine holds in blocks of the process, with the parameters: the arena is one
block from the forward's beginning to the backward's end, outputs are held to the end, gradients are taken when their
segment begins. Its largest value is `memory of a step` of model.report(), plus the parameters.
"""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import bypassed
from .memory import mib
from .profile import loaded, page, short, statements

if TYPE_CHECKING:
    from .chain import Graph
    from .state import State

# In the order in which they are stacked: class, colour.
CLASSES = {
    "parameters": "#b8b8b8",
    "gradients": "#6a9f58",
    "outputs": "#d8b365",
    "gradients of outputs": "#c98a2b",
    "activations kept": "#4878a8",
    "workspace": "#a84848",
}
_OF = {"kept": "activations kept", "workspace": "workspace", "scratch": "workspace", "output": "outputs",
       "gradient": "gradients", "placed": "gradients", "loan": "gradients of outputs"}  # fmt: skip
_ROWS = 20


@dataclass
class Piece:
    """Something that lies in memory at the peak."""

    kind: str
    bytes: int
    op: str
    phase: str
    module: str
    where: str
    until: int  # call


@dataclass
class Timeline:
    """Bytes by class at every call of a step; `held`: what the process holds in blocks, parameters included."""

    model: str
    calls: list[str]  # what each one is
    n_forward: int
    segment_ends: list[int]
    live: dict[str, list[int]] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)  # at the peak of what is alive, the largest first

    @property
    def total(self) -> list[int]:
        """Alive, all classes together."""
        return [sum(at) for at in zip(*self.live.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The call at which most is alive."""
        total = self.total
        return max(range(len(total)), key=total.__getitem__)

    def __str__(self) -> str:
        at, total = self.peak, self.total
        lines = [
            f"{self.model}: {len(self.calls)} calls, {self.n_forward} of them forward; most is alive at call {at} "
            f"({self.calls[at]}): {mib(total[at])}, of {mib(max(self.held))} held",
            ", ".join(f"{name} {mib(self.live[name][at])}" for name in CLASSES),
        ]
        lines += [
            f"  {mib(p.bytes):>12}  {p.kind}: {p.phase} {p.op}  {short(p.where)} {p.module}"
            for p in self.pieces[:_ROWS]
        ]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As a picture or page, by the ending: .html, .svg; .png, .pdf need matplotlib."""
        name = os.fspath(path)
        ending = os.path.splitext(name)[1].lower()
        if ending == ".html":
            _write(name, page(f"Memory of a step of {self.model}", _body(self)))
        elif ending == ".svg":
            _write(name, svg(self))
        elif ending in (".png", ".pdf"):
            _plot(self, name)
        else:
            raise ValueError(f"memory_timeline({name!r}): give a path that ends in .html, .svg, .png or .pdf")


def memory_timeline(state: State, path: str | os.PathLike[str] | None) -> Timeline:
    """See ORTModule.memory_timeline."""
    best: tuple[dict[str, Any], Graph] | None = None
    for graph in [g for each in bypassed.states(state) for made in each.every for g in loaded(made)]:
        found = graph.model.timeline()
        if found is not None and (best is None or found["peak"] > best[0]["peak"]):
            best = found, graph
    if best is None:
        raise RuntimeError(
            "ORTModule: no step with a backward has run in the engine yet, so nothing is planned: run one first"
        )
    made = _of(type(state.module).__name__, *best)
    if path is not None:
        made.save(path)
    return made


def _of(model: str, found: dict[str, Any], graph: Graph) -> Timeline:
    calls, n_forward, ends = found["calls"], found["n_forward"], found["segment_ends"]
    n = len(calls)
    step = graph.memory.step
    parameters = step.parameters if step is not None else 0
    live = {name: [0] * (n + 1) for name in CLASSES}
    held = [0] * (n + 1)
    begins = [n_forward, *ends[:-1]]

    def put(row: list[int], size: int, first: int, last: int) -> None:
        row[first] += size
        row[last + 1] -= size

    put(live["parameters"], parameters, 0, n - 1)
    put(held, parameters + found["arena"], 0, n - 1)
    spans: list[tuple[int, int, int, str]] = []
    for size, first, last, kind, _ in found["storages"]:
        alive = first, last
        if kind == "output":
            alive = first, n - 1
            put(held, size, 0, n - 1)
        elif kind in ("gradient", "placed"):
            alive = first, n - 1
            if kind == "gradient":  # the other ones lie in the arena
                put(held, size, _begin(begins, ends, first), n - 1)
        elif kind == "loan":
            put(held, size, _begin(begins, ends, first), _end(ends, last))
        spans.append((size, *alive, kind))
        put(live[_OF[kind]], size, *alive)
    result = Timeline(model, [_name(c) for c in calls], n_forward, ends, {k: _sums(v, n) for k, v in live.items()},
                      _sums(held, n))  # fmt: skip
    at = result.peak
    for size, first, last, kind in sorted(spans, key=lambda s: -s[0]):
        if first <= at <= last:
            c = calls[first]
            where = f"{c['file']}:{c['line']}" if c["file"] else ""
            result.pieces.append(Piece(_OF[kind], size, _name(c), c["phase"], c["module"] or "", where, last))
    return result


def _begin(begins: list[int], ends: list[int], call: int) -> int:
    """Where the segment of a call of the backward begins."""
    return next(b for b, e in zip(begins, ends, strict=True) if call < e)


def _end(ends: list[int], call: int) -> int:
    """The last call of its segment."""
    return next(e for e in ends if call < e) - 1


def _sums(row: list[int], n: int) -> list[int]:
    total, result = 0, []
    for x in row[:n]:
        total += x
        result.append(total)
    return result


def _name(call: dict[str, Any]) -> str:
    fused = statements(call["program"]) if call["program"] else []
    return f"fused({'+'.join(fused)})" if fused else str(call["op"])


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


# --- pictures ----------------------------------------------------------------------------------------

_W, _H, _LEFT, _TOP, _BOTTOM = 1000, 420, 70, 20, 40


def _ticks(most: float) -> list[float]:
    """Round numbers of MiB up to `most`."""
    step = 1.0
    while most / step > 8:
        step *= 2.5 if str(step).startswith("2") else 2
    while most / step < 4:
        step /= 2
    return [i * step for i in range(int(most / step) + 1)]


def svg(t: Timeline) -> str:
    """The picture; needs no library."""
    n, most = len(t.calls), max(t.held) * 1.05 / 2**20 or 1.0
    wide, high = _W - _LEFT - 10, _H - _TOP - _BOTTOM

    def x(call: float) -> float:
        return _LEFT + wide * call / max(n, 1)

    def y(size: float) -> float:
        return _TOP + high * (1 - size / 2**20 / most)

    def steps(row: list[int]) -> list[str]:
        return [f"{x(i + d):.1f},{y(size):.1f}" for i, size in enumerate(row) for d in (0, 1)]

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" font-family="sans-serif" '
             'font-size="12">',
             f'<rect width="{_W}" height="{_H}" fill="white"/>']  # fmt: skip
    for tick in _ticks(most):
        at = y(tick * 2**20)
        parts.append(f'<line x1="{_LEFT}" x2="{_W - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="#eee"/>'
                     f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')  # fmt: skip
    parts.append(f'<text x="14" y="{_TOP + high / 2:.0f}" transform="rotate(-90 14 {_TOP + high / 2:.0f})" '
                 'text-anchor="middle">MiB</text>')  # fmt: skip
    below = [0] * n
    for name, colour in CLASSES.items():
        above = [a + b for a, b in zip(below, t.live[name], strict=True)]
        points = " ".join([*steps(above), *reversed(steps(below))])
        parts.append(f'<polygon class="area" fill="{colour}" points="{points}"><title>{name}</title></polygon>')
        below = above
    parts.append(
        f'<polyline class="held" fill="none" stroke="#222" stroke-dasharray="4 3" points="{" ".join(steps(t.held))}"/>'
    )
    for i, text in [(t.n_forward, "backward"), *[(e, "") for e in t.segment_ends[:-1]]]:
        parts.append(f'<line x1="{x(i):.1f}" x2="{x(i):.1f}" y1="{_TOP}" y2="{_TOP + high}" stroke="#888" '
                     f'stroke-dasharray="{"2 4" if not text else "none"}"/>')  # fmt: skip
        parts.append(f'<text x="{x(i) + 4:.1f}" y="{_TOP + 12}" fill="#555">{text}</text>' if text else "")
    parts.append(f'<text x="{_LEFT + 4}" y="{_TOP + 12}" fill="#555">forward</text>')
    at = t.peak
    parts.append(f'<circle cx="{x(at + 0.5):.1f}" cy="{y(t.total[at]):.1f}" r="4" fill="none" stroke="#222"/>'
                 f'<text x="{_LEFT}" y="{_H - 6}" fill="#555">most alive at call {at}: '
                 f"{html.escape(t.calls[at][:60])}, {mib(t.total[at])}; held {mib(max(t.held))}</text>")  # fmt: skip
    place = _LEFT
    for name, colour in [*CLASSES.items(), ("held in blocks (dashed)", "none")]:
        parts.append(f'<rect x="{place}" y="{_H - 34}" width="10" height="10" fill="{colour}" '
                     f'stroke="{"#222" if colour == "none" else "none"}"/>'
                     f'<text x="{place + 14}" y="{_H - 25}">{name}</text>')  # fmt: skip
        place += 30 + 7 * len(name)
    return "\n".join([*[p for p in parts if p], "</svg>\n"])


def _body(t: Timeline) -> str:
    rows = "".join(
        f"<tr><td>{mib(p.bytes)}<td class=l>{p.kind}<td class=l>{html.escape(p.op)} <small>{p.phase}</small>"
        f"<td class=l>{html.escape(short(p.where))} <small>{html.escape(p.module)}</small><td>{p.until}"
        for p in t.pieces
    )
    told = html.escape(str(t).splitlines()[0])
    return (f"<p>{told}</p>\n{svg(t)}\n<h2>Alive at that call</h2>\n<table><tr><th>bytes<th class=l>class"
            f"<th class=l>made by<th class=l>where<th>until call{rows}</table>")  # fmt: skip


def _plot(t: Timeline, path: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            f"memory_timeline({path!r}): matplotlib is not installed; give a path that ends in .svg or .html"
        ) from None
    figure = Figure(figsize=(10, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    edges = list(range(len(t.calls) + 1))
    below = [0.0] * len(t.calls)
    for name, colour in CLASSES.items():
        above = [b + size / 2**20 for b, size in zip(below, t.live[name], strict=True)]
        axes.fill_between(
            edges, [*below, below[-1]], [*above, above[-1]], step="post", color=colour, label=name, linewidth=0
        )
        below = above
    held = [size / 2**20 for size in t.held]
    axes.plot(edges, [*held, held[-1]], drawstyle="steps-post", color="#222", linestyle="--", linewidth=1,
              label="held in blocks")  # fmt: skip
    axes.axvline(t.n_forward, color="#888", linewidth=1)
    for end in t.segment_ends[:-1]:
        axes.axvline(end, color="#888", linewidth=0.7, linestyle=":")
    top = max(held) * 1.18
    axes.text(t.n_forward, top * 0.98, " backward", va="top", color="#555")
    axes.text(0, top * 0.98, " forward", va="top", color="#555")
    axes.set(xlim=(0, len(t.calls)), ylim=(0, top), ylabel="MiB",
             xlabel=f"calls; most alive at {t.peak} ({t.calls[t.peak][:50]}): {mib(t.total[t.peak])}",
             title=f"Memory of a step of {t.model}")  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path)
