"""What a wrapped model has done so far, gathered from its captures: its report, and the lines after the first step."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from . import _C, bypassed, cuda_engine, cuts
from . import torch_private as private
from .chain import Graph
from .features import features
from .report import GraphEntry, HostEntry, MemoryEntry, Report
from .state import State, n_modules

logger = logging.getLogger("ortmodule")


def announce(state: State) -> None:
    """One line, after the first step."""
    state.announced = True
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    told = report(state, False)
    text = told.headline()
    if logger.isEnabledFor(logging.INFO):
        for kind, density, on in told.densities():
            what = "ON" if on else "OFF"
            logger.info("%s sparsity-based optimization is %s for density: %.0f%%", kind, what, density)
        text += "\n" + features(told, state.settings)
    logger.log(logging.WARNING if told.eager else logging.INFO, "%s", text)


def report(state: State, table: bool = True) -> Report:
    """table: of what backward may compute again, which plans a step with and without."""
    graphs_made, graphs_played, without, reasons = _C.cuda_engine_graph_counts()
    where = {made.graph.cuda for each in bypassed.states(state) for made in each.every}
    report = Report(
        type(state.module).__name__,
        isa=", ".join(str(cuda_engine.place(i)) if i >= 0 else _C.isa() for i in sorted(where)) or _C.isa(),
        on_cpu=_C.cuda_engine_counts()[2],
        cuda_graphs=(graphs_made, graphs_played, without),
        without_cuda_graph=reasons,
        interpreted=_C.cuda_engine_program_counts()[3],
    )
    host: dict[tuple[str, str, int], HostEntry] = {}
    for made, state_of in [(made, each) for each in bypassed.states(state) for made in each.every]:
        whole = made.graph
        graphs = whole.loaded if isinstance(whole, cuts.CutGraph) else [whole]
        plans = [plan for g in graphs for plan in g.model.plan_report()]
        called = whole.call_ms if isinstance(whole, cuts.CutGraph) else {}
        peak: dict[str, int] = {}
        for plan in plans:
            for name, size in plan.get("peak_bytes", {}).items():
                peak[name] = max(peak.get(name, 0), size)
        names = [op.name for op in whole.captured.host_ops if op.kind == "module"] + list(called)
        within = sum(n_modules(state_of.module, name) - 1 for name in names)
        report.graphs.append(
            GraphEntry(
                nodes=whole.captured.n_nodes + within,
                densities=whole.captured.densities,
                engine_nodes=max(0, whole.captured.n_nodes - len(whole.captured.host_ops) - len(called)),
                dynamic=whole.captured.dynamic,
                capture_s=whole.captured.seconds,
                load_s=state_of.load_s[id(whole)],
                plans=len(plans),
                plan_ms=sum(p["plan_ms"] for p in plans),
                arena_bytes=max((p["arena_bytes"] for p in plans), default=0),
                peak_bytes=peak,
                largest=_largest(plans),
                memory=whole.memory.step if isinstance(whole, Graph) else None,
                forwards=whole.forwards,
                backwards=max((g.backwards for g in graphs), default=0),
                reruns=sum(g.reruns for g in graphs),
                why=made.why,
                part=state_of.name,
                forward_ms=sum(g.forward_ms for g in graphs),
                backward_ms=sum(g.backward_ms for g in graphs),
                host_ms=sum(sum(g.host.ms) for g in graphs),
                cuts=whole.describe() if isinstance(whole, cuts.CutGraph) else [],
                ways=[f"{c.answer} at {c.place}" for c in made.answers],
                astray=made.astray,
                sparse_heads=(
                    max((g.sparse_heads[0] for g in graphs), default=0),
                    max((g.sparse_heads[1] for g in graphs), default=0),
                ),
                padding=next((g.padding for g in sorted(graphs, key=lambda g: g.padding[:4] in ("", "none"))), ""),
                unchecked=made.no_net,
                checkpoints=str(whole.captured.checkpoints),
                table=whole.memory.table(whole) if table and isinstance(whole, Graph) else None,
                page_faults=whole.memory.faults if isinstance(whole, Graph) else 0,
            )
        )
        for name, ms in called.items():  # between two parts of the graph
            why = state_of.reasons.get(name)
            at = (why.file, why.line) if why is not None else ("", 0)
            reason = "submodule kept in PyTorch" + (f": it {why.reason}" if why is not None else "")
            own = host.setdefault((name, *at), HostEntry(name, "module", state_of.within(name), *at, reason, 0))
            own.count += 1
            own.ms += ms
        for op, ms in ((op, ms) for g in graphs for op, ms in zip(g.captured.host_ops, g.host.ms, strict=True)):
            module = state_of.within(op.module)
            entry = host.get((op.name, op.file, op.line))
            if entry is None:
                why = state_of.reasons.get(op.module) if op.kind == "module" else None
                file, line, reason = (
                    (op.file, op.line, op.reason)
                    if why is None
                    else (why.file, why.line, f"{op.reason}: it {why.reason}")
                )
                host[op.name, op.file, op.line] = HostEntry(op.name, op.kind, module, file, line, reason, 1, ms)
            else:
                entry.count += 1
                entry.ms += ms
    report.host = list(host.values())
    every = list(bypassed.states(state))
    report.failed = [replace(e, module=of.within(e.module)) for of in every for e in of.failed.values()]
    report.missing = private.missing()
    eager = [(of, e) for of in every for e in of.eager_entries.values() if e.calls]
    report.eager = [replace(e, module=of.within(e.module)) for of, e in eager]
    run = state.spread or state.by_parts
    report.parts = list(run.entries()) if run is not None else []
    return report


def _largest(plans: list[dict[str, Any]]) -> list[MemoryEntry]:
    """Of the plan that needs most: what lies in memory at its peak, gathered by kind and place."""
    found: dict[tuple[str, str, str, int], MemoryEntry] = {}
    for row in max(plans, key=lambda p: p["arena_bytes"], default={"largest": []})["largest"]:
        key = row["class"], row["op"], row["file"] or "", row["line"]
        entry = found.setdefault(key, MemoryEntry(*key, 0, 0))
        entry.count += 1
        entry.bytes += row["bytes"]
    return sorted(found.values(), key=lambda e: -e.bytes)
