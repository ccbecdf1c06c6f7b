"""model.profile(): where the time of a step goes, by operator and line of the user's code, and how near that is to what
the machine can do.

While a Profile is open the engine reads the clock around each call of its plans (csrc/run/exec.c); at other times it
does not. Times are of the calls themselves: what lies between them (autograd, the optimizer, reading data) is the
difference to the wall clock, told in the first lines. What a call computes and moves is known from its sizes
(csrc/run/work.c), what the machine can do is measured (`peak_flops`, `bandwidth`), and the roofline is the larger of
the two times that these give: the arithmetic at the measured peak, the bytes at the measured bandwidth. A call whose
tensors lie in a cache may go above 100%.
"""

from __future__ import annotations

import html
import json
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from . import bypassed, forks

if TYPE_CHECKING:
    from .chain import Graph
    from .state import GuardedGraph, State

_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
_SECONDS = 0.4  # of each measurement of the machine
_LIMIT = 40  # rows of a table
_machines: dict[Any, float] = {}


def peak_flops(dtype: str) -> float:
    """Operations a second of matrix products of this dtype by PyTorch: the best of 0.4 s, once a process."""

    def rate(n: int, seconds: float) -> float:
        a, b = (torch.full((n, n), x, dtype=_DTYPES[dtype], device="cpu") for x in (0.5, 0.25))
        out = torch.empty_like(a)
        return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), seconds)

    def measure() -> float:
        n = 512  # short enough to be left alone by other processes, long enough for all threads
        while n < 8192 and 2 * n**3 / rate(n, 0.05) < 1e-3:
            n *= 2
        return rate(n, _SECONDS)

    return _measured(("flops", dtype), measure)


def bandwidth() -> float:
    """Bytes a second of a sum of two tensors far larger than any cache, read and written, measured in the same way."""

    def measure() -> float:
        n = 1 << 24
        a, b, out = (torch.full((n,), x, device="cpu") for x in (0.5, 0.25, 0.0))
        return 12 * n / _best(lambda: torch.add(a, b, out=out), _SECONDS)

    return _measured("bytes", measure)


def _measured(what: Any, measure: Callable[[], float]) -> float:
    key = what, torch.get_num_threads()
    if key not in _machines:
        with torch.no_grad(), torch.inference_mode(False):
            _machines[key] = measure()
    return _machines[key]


def _best(run: Callable[[], Any], seconds: float) -> float:
    run()
    best, end = float("inf"), perf_counter() + seconds
    while perf_counter() < end:
        start = perf_counter()
        run()
        best = min(best, perf_counter() - start)
    return best


@dataclass
class Row:
    """Calls of one kind from one line: times and work are those of a step."""

    what: str  # operator; fused(...) with its statements
    phase: str  # forward, backward, update
    module: str  # numbers that differ are *
    file: str
    line: int
    kind: str  # run, copy, host (in PyTorch)
    again: bool  # backward computes it again
    dtype: str
    fused: list[str]
    calls: float = 0.0
    ms: float = 0.0
    share: float = 0.0  # of all rows
    flops: float = 0.0
    bytes: float = 0.0
    gflops: float = 0.0  # a second
    gbs: float = 0.0
    roofline: float = 0.0  # share of what the machine could do at most; 0: not known

    @property
    def where(self) -> str:
        return f"{short(self.file)}:{self.line}" if self.file else ""


@dataclass
class _Found:
    """What the engine has counted, before it is divided by the steps."""

    rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    modules: dict[tuple[Any, ...], set[str]] = field(default_factory=dict)


class Profile:
    """Open (`with`) it times what the engine runs of a model, and of models inside of it; then it has rows."""

    def __init__(self, state: State) -> None:
        self.model = type(state.module).__name__
        self.state = state
        self.rows: list[Row] = []
        self.steps = 0
        self.wall_ms = 0.0
        self._on: list[Graph] = []
        self._before: dict[int, int] = {}
        self._start = 0.0

    # --- recording

    def __enter__(self) -> Profile:
        with _lock:
            if any(p.state is self.state for p in _active):
                raise RuntimeError(f"ORTModule: a profile of this {self.model} is open already")
            _active.append(self)
        self._on, self._before, self.rows, self.steps = [], {}, [], 0
        for made in self._every():
            self._watch(made)
            self._before[id(made)] = made.graph.forwards
        self._start = perf_counter()
        return self

    def __exit__(self, *_error: object) -> None:
        self.wall_ms = (perf_counter() - self._start) * 1e3
        with _lock:
            _active.remove(self)
        own = [made for made in self._every() if made.graph.forwards > self._before.get(id(made), 0)]
        self.steps = max(
            sum(made.graph.forwards - self._before.get(id(made), 0) for made in state.every)
            for state in bypassed.states(self.state)
        )
        found = _Found()
        for graph in [g for made in own for g in loaded(made)]:
            for plan in graph.model.profile_calls():
                for call in plan["calls"]:
                    if call["count"]:
                        _add(found, call, graph)
        for graph in self._on:
            graph.model.profile(False)
        self._on = []
        self._finish(found)

    def _every(self) -> Iterator[GuardedGraph]:
        for state in bypassed.states(self.state):
            yield from state.every

    def _watch(self, made: GuardedGraph) -> None:
        for graph in loaded(made):
            graph.model.profile(True)
            self._on.append(graph)

    def _finish(self, found: _Found) -> None:
        n = max(self.steps, 1)
        for key, row in found.rows.items():
            row.module = _pattern(found.modules[key])
            row.calls, row.ms = row.calls / n, row.ms / n
            row.flops, row.bytes = row.flops / n, row.bytes / n
        self.rows = sorted(found.rows.values(), key=lambda row: -row.ms)
        every = self.engine_ms
        for row in self.rows:
            row.share = row.ms / every if every else 0.0
            if row.kind == "host" or not row.ms:
                continue
            row.gflops, row.gbs = row.flops / row.ms / 1e6, row.bytes / row.ms / 1e6
            row.roofline = self._least_ms(row) / row.ms

    @staticmethod
    def _least_ms(row: Row) -> float:
        dtype = row.dtype if row.dtype in _DTYPES else "f32"
        return max(row.flops / peak_flops(dtype) if row.flops else 0.0, row.bytes / bandwidth()) * 1e3

    # --- what it has found

    @property
    def engine_ms(self) -> float:
        """Of a step, in all timed calls and in what PyTorch computes between them."""
        return sum(row.ms for row in self.rows)

    def lines(self) -> list[tuple[str, int, float, float]]:
        """(file, line, ms of a step, share) by line of the user's code, the dearest first."""
        found: dict[tuple[str, int], float] = {}
        for row in self.rows:
            found[row.file, row.line] = found.get((row.file, row.line), 0.0) + row.ms
        every = self.engine_ms or 1.0
        return [(*key, ms, ms / every) for key, ms in sorted(found.items(), key=lambda item: -item[1])]

    def headline(self) -> list[str]:
        if not self.steps:
            return [
                f"{self.model}: no forward of it ran in the engine while this was open. Either nothing called the model"
                " (is the step's model the wrapper?), or PyTorch runs it: model.report() says why"
            ]
        wall = self.wall_ms / max(self.steps, 1)
        again = sum(row.ms for row in self.rows if row.again)
        host = sum(row.ms for row in self.rows if row.kind == "host")
        every = self.engine_ms or 1.0
        peaks = [
            f"{d} {rate / 1e9:.0f} GFLOP/s"
            for (what, _), rate in _machines.items()
            if what[0] == "flops"
            for d in what[1:]
        ]
        text = [
            f"{self.model}: {self.steps} steps of {wall:.2f} ms, of which {self.engine_ms:.2f} ms in the calls below"
            f" ({self.engine_ms / wall if wall else 0:.0%}); the rest is autograd, the optimizer, data",
            f"computed again in backward: {again:.2f} ms ({again / every:.0%}); "
            f"in PyTorch: {host:.2f} ms ({host / every:.0%})",
        ]
        if self.rows:
            rates = [*peaks, f"memory {bandwidth() / 1e9:.1f} GB/s"]
            text.append(f"this machine, measured: {', '.join(rates)},"
                        f" {torch.get_num_threads()} threads")  # fmt: skip
        return text

    def table(self, limit: int = _LIMIT) -> str:
        """Text: one line per operator and line of the user's code, the dearest first."""
        head = f"{'ms':>9} {'share':>6} {'calls':>6} {'GFLOP/s':>8} {'GB/s':>6} {'roofline':>8}  what"
        lines = [*self.headline(), "", head] if self.steps else self.headline()
        for row in self.rows[:limit]:
            rates = (
                f"{row.gflops:8.1f} {row.gbs:6.1f} {row.roofline:8.0%}" if row.kind != "host" else f"{'in PyTorch':>24}"
            )
            lines.append(f"{row.ms:9.3f} {row.share:6.1%} {row.calls:6.0f} {rates}  {row.phase}{' again' * row.again} "
                         f"{row.what}  {row.where} {row.module}")  # fmt: skip
        rest = self.rows[limit:]
        if rest:
            lines.append(f"{sum(r.ms for r in rest):9.3f} {sum(r.share for r in rest):6.1%}  {len(rest)} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return {"model": self.model, "steps": self.steps, "wall_ms": self.wall_ms, "engine_ms": self.engine_ms,
                "rows": [asdict(row) for row in self.rows]}  # fmt: skip

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same as a page that stands alone, with the source lines; written to `path` if given."""
        text = _page(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text


_active: list[Profile] = []
_lock = forks.lock()


def profile(state: State, step: Callable[[], Any] | None, steps: int) -> Profile:
    """See ORTModule.profile."""
    made = Profile(state)
    if step is None:
        return made
    if not callable(step):
        raise TypeError(f"profile(step={step!r}): step is a function that makes one training step; how often it is "
                        "called is steps=")
    if steps < 1:
        raise ValueError(f"profile(steps={steps!r}) is not allowed; give an integer >= 1")
    step()  # captures and plans
    with made:
        for _ in range(steps):
            step()
    return made


def new_graph(made: GuardedGraph, state: State) -> None:
    """A capture was made: is its model being profiled?"""
    for p in _active:
        if any(s is state for s in bypassed.states(p.state)):
            p._watch(made)


def loaded(made: GuardedGraph) -> Sequence[Graph]:
    """The engine's graphs of a capture."""
    found: Sequence[Graph] = getattr(made.graph, "loaded", [made.graph])
    return found


# --- gathering ---------------------------------------------------------------------------------------


def statements(program: str) -> list[str]:
    """Operators of an elementwise chain (csrc/ops/strip.h)."""
    return [part.partition(":")[0] for part in program.split(";") if part and not part.startswith("out ")]


def _add(found: _Found, call: dict[str, Any], graph: Graph) -> None:
    fused = statements(call["program"]) if call["program"] else []
    what = f"fused({'+'.join(fused)})" if fused else call["op"]
    file, line, module = call["file"] or "", call["line"], call["module"] or ""
    if call["kind"] == "host":
        op = graph.captured.host_ops[call["host_index"]]
        what, file, line, module = op.name, op.file or file, op.line or line, op.module or module
    elif call["kind"] != "run":
        what = {"copy": "copy", "view copy": f"copy for {call['op']}", "write": "write back"}[call["kind"]]
    kind = call["kind"] if call["kind"] in ("run", "host") else "copy"
    key = what, call["phase"], file, line, kind, call["again"], call["dtype"], _digits(module)
    row = found.rows.get(key)
    if row is None:
        row = found.rows[key] = Row(what, call["phase"], "", file, line, kind, call["again"], call["dtype"], fused)
    found.modules.setdefault(key, set()).add(module)
    row.calls += call["count"]
    row.ms += call["ms"]
    row.flops += call["flops"] * call["count"]
    row.bytes += call["bytes"] * call["count"]


def _digits(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _pattern(modules: set[str]) -> str:
    """One text for modules that differ in numbers: h.0.attn, h.1.attn -> h.*.attn"""
    return next(iter(modules)) if len(modules) == 1 else _digits(next(iter(modules)))


def short(file: str) -> str:
    """The last two parts of a path."""
    return os.path.join(*file.split(os.sep)[-2:]) if file.count(os.sep) > 1 else file


# --- the page ----------------------------------------------------------------------------------------

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222; }
table { border-collapse: collapse; width: 100%; margin: 1em 0 2em; }
th, td { padding: 2px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th { border-bottom: 1px solid #888; } td.l, th.l { text-align: left; white-space: normal; overflow-wrap: anywhere; }
code { font: 12px ui-monospace, monospace; color: #555; } small { color: #777; }
.bar { display: inline-block; height: 9px; background: #4878a8; vertical-align: middle; }
.again { background: #c98a2b; } .host { background: #a84848; } .backward { background: #6a9f58; }
"""


def page(title: str, body: str) -> str:
    """A page that stands alone."""
    return (f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>\n"
            f"<style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>\n{body}\n</html>\n")  # fmt: skip


def _page(p: Profile) -> str:
    body = [f"<p>{'<br>'.join(html.escape(text) for text in p.headline())}</p>", "<h2>Operators</h2>", "<table><tr>"]
    body += [f"<th>{name}" for name in ("ms", "share", "calls", "GFLOP/s", "GB/s", "roofline")]
    body += ["<th class=l><th class=l>what<th class=l>where"]
    for row in p.rows:
        kind = "host" if row.kind == "host" else "again" if row.again else row.phase
        rates = (
            "<td colspan=3>in PyTorch"
            if row.kind == "host"
            else (f"<td>{row.gflops:.1f}<td>{row.gbs:.1f}<td>{row.roofline:.0%}")
        )
        told = f"{row.phase}{', computed again' * row.again}, {row.dtype}"
        body.append(f"<tr><td>{row.ms:.3f}<td>{row.share:.1%}<td>{row.calls:.0f}{rates}"
                    f"<td class=l><span class='bar {kind}' style='width:{row.share * 200:.0f}px'></span>"
                    f"<td class=l>{html.escape(row.what)} <small>{told}</small>"
                    f"<td class=l>{html.escape(row.where)} <small>{html.escape(row.module)}</small>")  # fmt: skip
    body += ["</table>", "<h2>Lines of code</h2>", "<table><tr><th>ms<th>share<th class=l>where<th class=l>code"]
    for file, line, ms, share in p.lines():
        code = linecache.getline(file, line).strip() if file else "(the engine's own copies)"
        where = f"{short(file)}:{line}" if file else ""
        body.append(
            f"<tr><td>{ms:.3f}<td>{share:.1%}<td class=l>{html.escape(where)}"
            f"<td class=l><code>{html.escape(code)}</code>"
        )
    body.append("</table>")
    data = json.dumps(p.to_dict()).replace("</", "<\\/")
    body.append(f"<script type=application/json id=profile>{data}</script>")
    return page(f"Profile of {p.model}", "\n".join(body))
