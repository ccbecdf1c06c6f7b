"""What is on and off of a module, as onnxruntime-training printed it at its first step: a table, times, memory."""

from __future__ import annotations

from .config import Settings
from .fallback import FallbackPolicy
from .memory import mib
from .report import Report

_LEVELS = {0: "cheap values alone", 1: "transformer layers", 2: "transformer layers"}


def _label_sparsity(both: int, backward: int) -> str:
    told = [f"{both} heads run on labelled rows"] * (both > 0)
    told += [f"the gradients of {backward} heads, whose logits are results, on labelled rows"] * (backward > 0)
    return ", ".join(told) or "no head before a cross entropy with ignore_index is in the graph"


def features(report: Report, settings: Settings) -> str:
    """Rows of name, ON or OFF, comment; then what capture and planning took, and the planned peak of memory."""
    host = [h.name for h in report.host]
    functions = [h.name for h in report.host if h.kind == "python_op"]
    policy = " | ".join(str(p.name) for p in FallbackPolicy if p in settings.fallback_policy)
    sparse = settings.label_sparsity
    heads = [max([g.sparse_heads[k] for g in report.graphs], default=0) for k in (0, 1)]
    padded = [g.padding for g in report.graphs if g.padding and not g.padding.startswith("none")]
    shares = [[f"{d:.0f}%" for kind, d, _ in report.densities() if kind == k] for k in ("Label", "Embedding")]
    density = [f". Input density: {', '.join(s)}" if s else "" for s in shares]
    why = [g.padding for g in report.graphs if g.padding.startswith("none")]
    rows = [
        ("Engine", not settings.disable, f"{report.node_share:.0%} of the nodes, {report.isa}"),
        ("ATen operators in PyTorch", bool(host), ", ".join(dict.fromkeys(host)) or "none is needed"),
        ("Custom Function", True, ", ".join(functions) or "none is there"),
        ("Cast Propagation", True, "by the autocast that was captured"),
        ("Memory Optimizer", settings.memory_opt_level > 0,
         f"level {settings.memory_opt_level}: backward computes again {_LEVELS[settings.memory_opt_level]}"),
        ("Compute Optimizer", sparse or settings.padding_sparsity, "rows that do not count: labels, padding"),
        ("- Label Sparsity", sum(heads) > 0, (_label_sparsity(*heads) if sparse else "LABEL_SPARSITY=0") + density[0]),
        ("- Padding Sparsity", bool(padded), (padded[0] + " run without padding" if padded else
         (why or ["no attention"])[0].removeprefix("none: ") if settings.padding_sparsity else "PADDING_SPARSITY=0")
         + density[1]),
        ("Auto Fallback", not settings.strict, policy + " (retried)" * settings.fallback_retry),
        ("Whole calls in PyTorch", bool(report.eager), "; ".join(e.reason for e in report.eager[:2]) or "none"),
    ]  # fmt: skip
    width = max(len(name) for name, _, _ in rows) + 2
    lines = [f"{name:{width}}: {'ON' if on else 'OFF':4}: {comment}" for name, on, comment in rows]
    capture, load = sum(g.capture_s for g in report.graphs), sum(g.load_s for g in report.graphs)
    plan = sum(g.plan_ms for g in report.graphs)
    lines.append(f"Initialization took {capture + load:.2f}s, where export takes {capture:.2f}s, graph building "
                 f"{load:.2f}s, planning {plan / 1e3:.3f}s.")  # fmt: skip
    peaks = [f"{name} {mib(size)}" for g in report.graphs[:1] for name, size in g.peak_bytes.items()]
    lines.append(f"Memory, planned peak: {', '.join(peaks) or 'nothing is planned yet'}.")
    return "\n".join(lines)
