"""What the engine runs of a model, what it does not and why, and what capture and planning have cost.

`Report` is a snapshot: plain data (`to_dict`), readable as text (`str`). Everything that was left to PyTorch is in
`host` (single operators, functions and submodules inside the graph) or in `eager` (whole calls), named by the user's
own file and line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .memory import StepMemory, mib
from .memory_table import Table

_ROWS = 4  # of a list, in the text


@dataclass
class HostEntry:
    """A node of the graph that PyTorch computes."""

    name: str
    kind: str
    module: str
    file: str
    line: int
    reason: str
    count: int = 1
    ms: float = 0.0


@dataclass
class EagerEntry:
    """Calls of the whole module that PyTorch computed. by_parts: in how many of them the engine ran submodules."""

    reason: str
    module: str = ""
    file: str = ""
    line: int = 0
    calls: int = 0
    by_parts: int = 0

    def count(self, by_parts: bool = False) -> None:
        """One more."""
        self.calls += 1
        self.by_parts += by_parts


@dataclass
class PartEntry:
    """A submodule of a module whose forward PyTorch runs. reason: why PyTorch runs this, too; empty: the engine does.
    """

    name: str
    device: str
    reason: str = ""


@dataclass
class FailedEntry:
    """Attempts to capture that came to nothing, of one reason. symbolic: with symbols for sizes or numbers."""

    reason: str
    module: str = ""
    file: str = ""
    line: int = 0
    symbolic: bool = False
    count: int = 0
    seconds: float = 0.0


@dataclass
class MemoryEntry:
    """What lies in memory when the largest plan needs most, gradients apart: `count` tensors from one place of the
    source."""

    kind: str  # kept for backward, temporary, output, scratch
    op: str
    file: str
    line: int
    count: int
    bytes: int


@dataclass
class GraphEntry:
    """One capture and what became of it. nodes: a submodule kept in PyTorch counts as the modules in it."""

    nodes: int
    engine_nodes: int
    dynamic: bool
    capture_s: float
    load_s: float
    plans: int
    plan_ms: float
    arena_bytes: int
    peak_bytes: dict[str, int]
    largest: list[MemoryEntry]
    forwards: int
    backwards: int
    reruns: int
    why: str
    forward_ms: float
    backward_ms: float
    host_ms: float
    part: str = ""  # the submodule that it is of, where a module lies on several devices
    cuts: list[str] = field(default_factory=list)  # hooks on submodules, which run between parts of the graph
    memory: StepMemory | None = None  # of the largest step, when there is one with a backward
    ways: list[str] = field(default_factory=list)  # the answers of branches on values that it holds for
    astray: int = 0  # forwards that were thrown away: their call went another way
    checkpoints: str = ""  # regions of torch.utils.checkpoint, and what became of them; empty: there are none
    table: Table | None = None  # clusters of operators that backward may compute again, for the sizes of that step
    page_faults: int = 0  # of the process between two recent training forwards
    # heads that leave out rows whose label is ignored: in forward and backward, in the backward alone
    sparse_heads: tuple[int, int] = (0, 0)
    padding: str = ""  # how many products leave out padding ("6 products"), or why none does ("none: ...")
    # of the captured call, at level INFO: label or embedding, module, percent of what counts
    densities: list[tuple[str, str, float]] = field(default_factory=list)
    unchecked: str = ""  # why forward is not compared with the capture from time to time (ORTMODULE_RECHECK)


@dataclass
class Report:
    """See the module's text. Times in the unit of the name, sizes in bytes."""

    model: str
    graphs: list[GraphEntry] = field(default_factory=list)
    host: list[HostEntry] = field(default_factory=list)
    eager: list[EagerEntry] = field(default_factory=list)
    failed: list[FailedEntry] = field(default_factory=list)
    # of a module whose tensors lie on several devices, or whose forward cannot be captured: PyTorch runs that, the
    # engine parts of it
    parts: list[PartEntry] = field(default_factory=list)
    isa: str = ""  # that its kernels use, or the CUDA device that they run on
    on_cpu: list[str] = field(default_factory=list)  # operators that the CPU did for a CUDA device, in this process
    # CUDA graphs of this process: made, launched, parts of plans that run without one; and why those do
    cuda_graphs: tuple[int, int, int] = (0, 0, 0)
    without_cuda_graph: list[str] = field(default_factory=list)
    interpreted: str = ""  # why chains of elementwise operators on a CUDA device were not compiled
    missing: list[str] = field(default_factory=list)  # names of PyTorch, and what happens without them

    @property
    def node_share(self) -> float:
        """Nodes computed by the engine / all nodes of all captured graphs; 0 when nothing is captured."""
        every = sum(g.nodes for g in self.graphs)
        return sum(g.engine_nodes for g in self.graphs) / every if every else 0.0

    @property
    def time_share(self) -> float:
        """Time in the engine / time in the engine and its host nodes (whole calls in PyTorch are not timed)."""
        every = sum(g.forward_ms + g.backward_ms for g in self.graphs)
        return 1 - sum(g.host_ms for g in self.graphs) / every if every else 0.0

    @property
    def n_captures(self) -> int:
        return len(self.graphs)

    @property
    def n_plans(self) -> int:
        return sum(g.plans for g in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return {
            **asdict(self),
            "node_share": self.node_share,
            "time_share": self.time_share,
            "n_captures": self.n_captures,
            "n_plans": self.n_plans,
        }

    def densities(self) -> list[tuple[str, float, bool]]:
        """Label or Embedding, percent, whether the engine leaves out the rest; of every capture made at level INFO."""
        def on(g: GraphEntry, kind: str) -> bool:
            return any(g.sparse_heads) if kind == "label" else g.padding[:4] not in ("", "none")

        return [(kind.capitalize(), d, d < 90 and on(g, kind)) for g in self.graphs for kind, _, d in g.densities]

    def headline(self) -> str:
        """One line."""
        seconds = sum(g.capture_s + g.load_s for g in self.graphs)
        text = (
            f"{self.model}: {self.node_share:.0%} of {sum(g.nodes for g in self.graphs)} nodes in the engine "
            f"({self.isa}), "
            f"{self.n_captures} capture{'s' * (self.n_captures != 1)} in {seconds:.2f} s, {self.n_plans} "
            f"plan{'s' * (self.n_plans != 1)}"
        )
        if self.host:
            text += f"; in PyTorch: {', '.join(h.name for h in self.host[:3])}{', ...' * (len(self.host) > 3)}"
        if self.parts:
            places = sorted({p.device for p in self.parts})
            text += f"; it lies on {', '.join(places)}: " if len(places) > 1 else "; "
            text += ("forward in PyTorch, "
                     f"{sum(not p.reason for p in self.parts)} of {len(self.parts)} parts in the engine")  # fmt: skip
        if self.failed:
            n, s = sum(f.count for f in self.failed), sum(f.seconds for f in self.failed)
            text += f"; {n} attempt{'s' * (n != 1)} to capture failed in {s:.2f} s"
        if self.on_cpu:
            text += f"; on the CPU for the GPU: {', '.join(self.on_cpu)}"
        if self.cuda_graphs[2]:
            text += f"; without a CUDA graph: {self.cuda_graphs[2]} ({'; '.join(self.without_cuda_graph)})"
        if self.interpreted:
            text += f"; chains are interpreted: {self.interpreted}"
        if not (self.graphs or self.failed or self.eager or self.parts):
            text += "; its forward has not been called (what other methods compute runs in PyTorch)"
        if self.eager:
            n, by = sum(e.calls for e in self.eager), sum(e.by_parts for e in self.eager)
            told = [f"{n - by} calls wholly in PyTorch"] * (n > by) + [f"{by} calls in PyTorch by parts"] * bool(by)
            text += f"; {', '.join(told)}: {self.eager[0].reason}"
        return text

    def __str__(self) -> str:
        lines = [self.headline()]
        for device, reason in dict.fromkeys((p.device, p.reason) for p in self.parts):
            names = ", ".join(p.name for p in self.parts if (p.device, p.reason) == (device, reason))
            lines.append(f"  on {device}, {f'in PyTorch ({reason})' if reason else 'in the engine'}: {names}")
        for g in self.graphs:
            peak = ", ".join(f"{name} {mib(size)}" for name, size in g.peak_bytes.items())
            lines.append(
                f"  graph of {g.nodes} nodes{f' of {g.part}' * bool(g.part)}{' (dynamic sizes)' * g.dynamic} "
                f"[{g.why}]: capture {g.capture_s:.2f} s, "
                f"load {g.load_s:.3f} s, "
                f"{g.plans} plans {g.plan_ms:.1f} ms, {g.forwards} forwards {g.forward_ms:.1f} ms, {g.backwards} "
                "backwards "
                f"{g.backward_ms:.1f} ms, host {g.host_ms:.1f} ms" + (f", planned peak: {peak}" if peak else "")
            )
            lines += [f"    {text}" for text in g.cuts]
            if any(g.sparse_heads):
                lines.append(
                    "    rows whose label is ignored are left out by: "
                    f"{g.sparse_heads[0]} heads, the gradients of {g.sparse_heads[1]} more"
                )
            if g.padding:
                lines.append(f"    padding is left out by: {g.padding}")
            if g.memory:
                lines.append(f"    memory of a step: {g.memory}; {g.page_faults} page faults in a recent one")
            if g.table:
                lines += [f"    {text}" for text in str(g.table).splitlines()]
            if g.checkpoints:
                lines.append(f"    regions of torch.utils.checkpoint: {g.checkpoints}")
            if g.ways:
                ways = f"{', '.join(g.ways[:_ROWS])}{', ...' * (len(g.ways) > _ROWS)}"
                lines.append(f"    for branches on values of tensors: {ways}; {g.astray} calls went another way")
            if g.unchecked:
                lines.append(f"    not compared with forward later on: {g.unchecked}")
            if g.largest:
                rows = [
                    f"{mib(e.bytes)} {e.kind} from {e.op}{f' at {e.file}:{e.line}' * bool(e.file)}"
                    for e in g.largest[:_ROWS]
                ]
                lines.append(f"    at the peak: {'; '.join(rows)}{'; ...' * (len(g.largest) > _ROWS)}")
            if g.reruns:
                lines.append(
                    f"    {g.reruns} forwards were run again because gradients arrived for other outputs than before"
                )
        for h in self.host:
            where = (h.module or "top level") + f", {h.file}:{h.line}" * bool(h.file)
            lines.append(f"  in PyTorch: {h.name} x{h.count} ({where}): {h.reason}; {h.ms:.1f} ms")
        for e in self.eager:
            where = (
                f" [{e.module or 'top level'}, {e.file}:{e.line}]" if e.file else f" [{e.module}]" if e.module else ""
            )
            what = "forward in PyTorch, parts in the engine" if e.by_parts == e.calls else "whole module in PyTorch"
            by = f", {e.by_parts} of them with parts in the engine" * (0 < e.by_parts < e.calls)
            lines.append(f"  {what}, {e.calls} calls{by}: {e.reason}{where}")
        for f in self.failed:
            where = f" [{f.module or 'top level'}, {f.file}:{f.line}]" if f.file else f" [{f.module}]" * bool(f.module)
            how = " with symbolic sizes" * f.symbolic
            lines.append(f"  not captured{how}, {f.count}x in {f.seconds:.2f} s: {f.reason}{where}")
        lines += [f"  {text}" for text in self.missing]
        return "\n".join(lines)
