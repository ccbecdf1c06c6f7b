"""memory_budget: what a step may take of memory, which variant takes as little, and what is told about it.

A budget is a number of bytes, or a share of what a step takes without one. What counts is in docs/MEMORY.md. The engine
chooses (csrc/run/budget.c): which values backward computes again, exactly known from the plans. Here the choice is kept
for the sizes of a call, so a step looks it up.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import forks, memory_table
from .memory_idle import idle

if TYPE_CHECKING:
    from .chain import Graph, Variant
    from .config import Settings

logger = logging.getLogger("ortmodule")

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[A-Za-z]*)\s*")
ALLOWED = "bytes as an integer, or text: '6GB' (10^9 bytes), '512MiB' (2^20 bytes), '60%' of what a step takes without"
_KNOWN = 4096  # sizes of calls that are remembered


class BudgetError(ValueError):
    """No set of recomputed values makes a step fit the budget. Nothing has been computed."""


class ClusterError(BudgetError):
    """ORTMODULE_MEMORY_OPT_CONFIG names a cluster that neither the graph nor an earlier capture has. Nothing has been
    computed."""


class Budget(NamedTuple):
    """bytes: -1: `share` of what a step takes without a budget."""

    bytes: int
    share: float
    text: str


def parse(value: object) -> Budget:
    """ValueError when it is no budget."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62:
        return Budget(value, 0.0, str(value))
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    number, unit = (float(found[1]), found[2].upper()) if found else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        return Budget(-1, number / 100, str(value))
    if number > 0 and unit in _UNITS and 1 <= number * _UNITS[unit] < 2**62:
        return Budget(int(number * _UNITS[unit]), 0.0, str(value))
    raise ValueError(f"memory_budget={value!r} is not allowed; give {ALLOWED}")


def of_settings(settings: Settings, found: set[memory_table.Plan]) -> Memory:
    """For one graph of a module with these settings. found: the configuration's, of all its captures."""
    budget = None if settings.memory_budget is None else parse(settings.memory_budget)
    config = settings.memory_opt_config if budget is None and settings.memory_opt_level != 1 else None
    plans = memory_table.read(config) if config else ()
    return Memory(budget, min(settings.memory_opt_level, 1) if not plans else 0, plans, settings.keep_memory, found)


@dataclass
class StepMemory:
    """What a step takes, in bytes, by calculation before it has run. peak: of kept + workspace + outputs + gradients,
    and loans, if the outputs are held until the end of the backward: what the engine takes. parameters, optimizer (what
    Adam would keep for the parameters that get a gradient) come on top."""

    parameters: int
    optimizer: int
    kept: int  # from forward to backward
    workspace: int
    outputs: int
    gradients: int
    loans: int  # gradients of outputs; in the outputs' own memory once nobody holds those
    placed: int  # the peak is less by this while gradients may lie in the place of activations
    peak: int
    released: int  # the same, if nobody but the backward holds the outputs
    budget: int = 0  # 0: none
    without: int = 0  # peak without a budget
    least: int = 0  # the smallest peak that is known to be possible; 0: nobody has looked
    again: float = 0.0  # time added by computing again, as a share of the step's without a budget; by calculation

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer, if Adam", self.optimizer),
            ("activations kept", self.kept),
            ("workspace", self.workspace),
            ("outputs", self.outputs),
            ("gradients of outputs", self.loans),
        ]
        text = ", ".join(f"{name} {mib(size)}" for name, size in rows)
        text += f"; the engine's peak {mib(self.peak)}"
        if self.released < self.peak:
            text += f" ({mib(self.released)} if nobody holds the outputs)"
        if self.placed and not self.budget:
            text += f", {mib(self.placed)} less while gradients take the place of activations"
        if self.budget:
            text += (
                f" of a budget of {mib(self.budget)} ({mib(self.without)} without one), computing again adds "
                f"{self.again:.1%} of the time"
            )
        return text


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def of_step(found: dict[str, int], graph: Graph, tensors: Sequence[Tensor], wanted: Sequence[bool | int]) -> StepMemory:
    """found: Model.memory's."""
    n = len(graph.leaves)
    bound = {id(t): t for t in tensors[n:]}.values()
    trained = {id(t): t for t, w in zip(tensors[n:], wanted[n:], strict=True) if w}.values()
    return StepMemory(
        parameters=sum(t.nbytes for t in bound), optimizer=sum(8 * t.numel() for t in trained), **found
    )


class Memory:
    """The variants of one graph that fit its budget, or are what a configuration file asks for."""

    def __init__(self, budget: Budget | None, level: int = 0, plans: Sequence[memory_table.Plan] = (),
                 keep: float = math.inf, found: set[memory_table.Plan] | None = None) -> None:  # fmt: skip
        """keep: seconds after which memory that nobody uses is given back. found: plans that a capture of the same
        wrapper has had a cluster for."""
        self.budget = budget
        self.level = level
        self.plans = plans
        self.found = set() if found is None else found
        self.keep_seconds = keep
        self.faults = self._faults = self._forwards = 0
        self._like: tuple[Variant, list[memory_table.Like]] | None = None  # of the largest step so far
        self.step: StepMemory | None = None  # of the largest step so far
        self.known: dict[Any, Variant] = {}
        self.made: dict[int, Variant] = {}
        self.lock = forks.lock()

    def fit(self, graph: Graph, variant: Variant, tensors: Sequence[Tensor]) -> Variant:
        """The variant that takes `variant`'s place for tensors of these sizes. BudgetError: there is none."""
        idle.arm(self.keep_seconds)
        if self._forwards < 8 or self._forwards % 64 < 2:  # not at each: a system call
            now = getrusage(RUSAGE_SELF).ru_minflt
            self.faults = now - self._faults if self._forwards % 64 else self.faults
            self._faults = now
        self._forwards += 1
        if self.plans:
            variant = self._planned(graph, variant, tensors)
        if self.budget is None:
            if self.step is None:
                self._like = variant, [memory_table.like(t) for t in tensors]
                self._keep(of_step(graph.model.memory(variant.number, tensors), graph, tensors, variant.wanted), graph)
            return variant
        leaves = tensors[: len(graph.leaves)]
        key = (
            variant.number,
            torch.get_num_threads(),  # working memory depends on it
            *[(t.shape, t.stride(), t.item() if not t.dim() and t.dtype == torch.int64 else 0) for t in leaves],
        )
        found = self.known.get(key)
        if found is None:
            with self.lock:
                found = self._find(graph, variant, tensors)
                if len(self.known) >= _KNOWN:
                    self.known.clear()
                self.known[key] = found
        return found

    def _find(self, graph: Graph, variant: Variant, tensors: Sequence[Tensor]) -> Variant:
        budget = self.budget
        assert budget is not None
        fit = graph.model.fit(variant.wanted, variant.arriving, variant.group, tensors, budget.bytes, budget.share)
        if fit["variant"] < 0:
            raise BudgetError(_infeasible(budget, fit))
        step = of_step(fit["memory"], graph, tensors, variant.wanted)
        step.budget, step.without, step.again = fit["bytes"], fit["most"], fit["again_us"] / fit["step_us"]
        step.placed = 0  # a budget counts gradients apart, and so they are
        step.least = fit["least"] if fit["least"] < fit["most"] else 0
        number: int = fit["variant"]
        made = self.made.get(number)
        if made is None:
            made = self.made[number] = variant.numbered(graph.model, number)
        if self.step is None or step.peak > self.step.peak:
            self._like = made, [memory_table.like(t) for t in tensors]
        self._keep(step, graph)
        return made

    def _planned(self, graph: Graph, variant: Variant, tensors: Sequence[Tensor]) -> Variant:
        """What the configuration file makes of it."""
        made = self.made.get(~variant.number)
        if made is None:
            rows = memory_table.clusters(graph, variant, [memory_table.like(t).make() for t in tensors])
            here = {p for p in self.plans if p.row(rows) is not None}
            plans = [p[:3] for p in self.plans if p in here or not (p.maybe or p in self.found)]
            try:
                number = graph.model.choose(variant.wanted, variant.arriving, variant.group, 0, plans)
            except ValueError as error:
                raise ClusterError(f"ORTMODULE_MEMORY_OPT_CONFIG: {error}") from error
            self.found |= here
            made = self.made[~variant.number] = variant.numbered(graph.model, number)
        return made

    def table(self, graph: Graph) -> memory_table.Table | None:
        """What is computed again by structure, for the largest step so far."""
        if self._like is None or graph.cuda >= 0:
            return None
        variant, likes = self._like
        decided = "" if self.budget is None else "by the budget"
        try:
            return memory_table.make(graph, variant, [x.make() for x in likes], self.level, self.plans, decided)
        except (ValueError, RuntimeError):  # sizes that the graph has turned out not to hold for
            return None

    def _keep(self, step: StepMemory, graph: Graph) -> None:
        if self.step is None:  # before the first step
            n = len(graph.captured.host_ops)
            apart = f"; not counted: what PyTorch keeps for {n} operators of its own" if n else ""
            logger.info("memory of a step: %s%s", step, apart)
            if logger.isEnabledFor(logging.INFO) and (table := self.table(graph)) is not None:
                logger.info("%s", table)
        if self.step is None or step.peak > self.step.peak:
            self.step = step


def _infeasible(budget: Budget, fit: dict[str, Any]) -> str:
    least, most = fit["least"], fit["most"]
    smallest = f"memory_budget={least}"
    if budget.bytes < 0:
        smallest += f" or '{math.ceil(least / most * 1000) / 10}%'"
    return (
        f"memory_budget={budget.text} ({mib(fit['bytes'])}) cannot be met: at these sizes a step takes {mib(most)} "
        f"without a budget and at least {mib(least)} when everything is computed again that gives memory. The smallest "
        f"budget that can be met is {smallest}; give at least that, or a smaller batch or shorter sequences"
    )

