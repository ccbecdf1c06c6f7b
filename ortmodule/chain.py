"""One captured graph on the engine, and its life inside autograd.

forward   the engine computes all outputs before autograd hears of them; then a chain of K autograd.Functions is put
          around them:
              Link (segment K-1) -> token -> Link (K-2) -> ... -> token -> Head (segment 0) -> outputs
          Every Function takes the tensors whose gradients its segment completes, so autograd must run Head first, then
          link by link, and hands out gradients (hooks, DDP's all-reduce) while the rest is still to be computed. A
          token is an empty tensor.
          A backward from one output must not go on into PyTorch's graph behind an input that it does not depend on
          (where it would find freed tensors, and hooks). For such inputs the chain ends in tokens of their own:
              Deliver (the inputs of some outputs) -> token -> Front (one output); Head -> token -> every Front
backward  Head finds the engine's state among its saved tensors, starts the engine's backward, runs segment 0 and leaves
          the run for the
          Links under the number of the graph task, so that one graph may be walked by several threads at once.

The arena is a saved tensor: torch itself frees it, complains about a second backward, and lets saved_tensors_hooks move
it; what the engine knows of it (_C.State) stays with the step as long. With retain_graph a copy is used up. What
backward reads of inputs and outputs is saved too, so an in-place edit in between gives torch's own error; after an edit
of outputs without a gradient (logits beside the loss) the forward is run again.

After a backward that frees its state another may come from outputs that share nothing with it (two losses of two
towers): the forward is run again, as for gradients that were not expected. Where PyTorch would have freed what they
share, its error is raised.

Which outputs will receive a gradient is predicted (the loss, when the first output looks like one). When fewer arrive,
zeros stand for the others, and inputs without a path from those that did arrive get None, as in PyTorch. When others
arrive, or zeros met an infinity, the forward is run again, with the same seed, for a graph that starts from that set.
Either way the prediction changes, so it happens once. create_graph runs the user's module in PyTorch instead.

Invariants: an output that is an input goes around the chain (a Function would claim the caller's tensor). Nothing here
keeps a reference to a gradient after returning it (AccumulateGrad copies what others hold). A Step knows no autograd
node: no cycles.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from math import prod
from operator import or_
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _C, autocast, cuda_engine, masks, ranks
from . import torch_private as private
from .capture import Captured
from .capture.program import SIZES, View
from .holders import holders_when_dropped
from .host import OUTPUT, Answers, Failed, Flow, Host, Missing, Regions, Want, hooks_at_rest
from .links import LEAF, NONE, TOKEN, Arrived, Live, Taken, in_turn, put_around, shown
from .memory import BudgetError, Memory

logger = logging.getLogger("ortmodule")
_DRAWN = (
    "ortmodule: a backward that is differentiated itself (create_graph=True, gradients with tangents) runs the module "
    "again in PyTorch, and its random operations are not only dropout in an order that can be repeated there. Set "
    "their p to 0, or call eval() on them."
)
_OTHER = (
    "Gradients arrive for other outputs than before, or are to be differentiated again, so the forward has to be run "
    "again."
)

_SEED_END = 2**63 - 1
_SMALL = 4 << 20  # bytes copied without a second thought
_SMALL_BUFFER = 1 << 13  # elements


class Unfit(ValueError):
    """The tensors are not what the capture was made for; nothing has been computed."""


class Refusal(RuntimeError):
    """The engine cannot compute this graph at all; nothing has been computed."""


class Variant:
    """A joint graph: for which inputs gradients are wanted, and from which outputs they come.

    through: user outputs that go through the chain. nodes: one per Function, in backward order: (segments to run, graph
    inputs that the Function takes and whose gradient it returns). (What observes gradients as they arrive, as buckets
    of several ranks, sees the order of PyTorch, and the same one whatever the variant.) reads / reads_outputs: graph
    inputs and user outputs whose data backward needs; node_reads: those inputs by node.
    full: the variant for which all outputs arrive, None: this one. What holds of all outputs, arriving or not, is the
    full one's: `shares`, `apart`, and inputs with a path from some output that is not arriving: the last node takes
    them too, in case that output is used.
    """

    def __init__(
        self,
        model: _C.Model,
        wanted: bytes,
        arriving: bytes,
        group: Sequence[int] | None,
        around: Container[int] = (),
        full: Variant | None = None,
        number: int | None = None,
        turns: Sequence[int] = (),
        n_user: int = 0,
    ) -> None:
        """number: of these gradients, with another set of values that are computed again. turns: InputSpec.turn.
        n_user: how many arguments of the user's there are, the first inputs."""
        self.number = model.variant(wanted, arriving, group) if number is None else number
        self.group, self.around, self.full, self.turns, self.n_user = group, around, full, turns, n_user
        info = model.variant_info(self.number)
        self.wanted = wanted
        self.arriving = arriving
        self.sparse_heads: tuple[int, int] = info["sparse_heads"]
        self.padding: str = info["padding"]
        self.through: list[int] = [i for i in info["reaches"] if i not in around]
        self.reads: list[int] = list(info["reads_inputs"])
        self.reads_outputs: list[int] = list(info["reads_outputs"])
        self.lendable = [(place, i) for place, i in enumerate(self.reads_outputs) if i in self.through]
        self.want: Want = {}
        for _part, index, backward, places in sorted(info["host_nodes"]):
            if backward:
                self.want.setdefault(index, []).append(list(places))
        self.flow = Flow(info["flow"])
        # apart: graph inputs that some outputs do not depend on -> those that do (bits)
        if full is None:
            every = reduce(or_, [1 << min(i, 63) for i in self.through], 0)
            self.shares = self.flow.shares
            self.apart = {i: bits for i, bits in self.flow.sources().items() if every & ~bits}
        else:
            self.shares, self.apart = full.shares, full.apart
        self._without: dict[frozenset[tuple[int, int]], list[int]] = {}
        self.confirmed = False  # a backward has come with exactly this set of gradients
        by_segment: dict[int, list[int]] = {}
        for i, segment in info["grads"]:
            by_segment.setdefault(segment, []).append(i)
        self.nodes: list[tuple[range, list[int]]] = []
        begin = 0
        for segment in sorted(by_segment):
            self.nodes.append((range(begin, segment + 1), by_segment[segment]))
            begin = segment + 1
        self.grads = frozenset(i for i, _ in info["grads"])
        rest = [] if full is None else sorted(full.grads - self.grads)
        if rest:
            segments, inputs = self.nodes.pop() if self.nodes else (range(0), [])
            self.nodes.append((segments, inputs + rest))
        for _, inputs in self.nodes:
            inputs.sort(key=turns.__getitem__)
        self.users = [i for i in range(n_user) if any([i in inputs for _, inputs in self.nodes])]
        self._taken: dict[tuple[tuple[bool, ...], frozenset[int], int], list[Taken]] = {}
        by_node: list[set[int]] = [set() for _ in self.nodes]
        for segment, i in info["reads"]:
            for number, (segments, _) in enumerate(self.nodes):
                if segment in segments:
                    by_node[number].add(i)
        if by_node:  # what is read in no segment is read when the backward begins
            by_node[0].update(set(self.reads).difference(*by_node))
        self.node_reads = [sorted(reads) for reads in by_node]
        logger.debug("variant %d: gradients of %d outputs for %d inputs, %d nodes of autograd, %d values read",
                     self.number, sum(arriving), len(self.grads), len(self.nodes),
                     len(self.reads) + len(self.reads_outputs))  # fmt: skip

    def taken(self, tensors: Sequence[Tensor], apart: frozenset[int], waiting: int) -> list[Taken]:
        """How each Function takes its tensors, for their gradients to be handed out in turn. apart: those that Delivers
        take, of which so many are ready when Head is."""
        computed = tuple([tensors[i].grad_fn is not None for i in self.users])
        found = self._taken.get((computed, apart, waiting))
        if found is None:
            low = {i for i, on in zip(self.users, computed, strict=True) if on}
            before = [TOKEN] * (len(self.nodes) - 1) + [LEAF if apart else NONE]
            rows = zip(self.nodes, before, strict=True)
            found = [Taken(in_turn(inputs, low, kind, waiting, apart)) for (_, inputs), kind in rows]
            self._taken[computed, apart, waiting] = found
        return found

    def without(self, detached: frozenset[tuple[int, int]]) -> list[int]:
        """Of `through`, what requires no gradient when these results of host nodes do not."""
        found = self._without.get(detached)
        if found is None:
            flow = (self.full or self).flow
            found = [i for i in self.through if not flow.requires(OUTPUT, i, 0, detached)]
            self._without[detached] = found
        return found

    def lonely(self) -> frozenset[int]:
        """Graph inputs whose gradients may not arrive: those that no expected output depends on; of all that some
        output does not depend on, until a backward has shown what is expected."""
        if not self.confirmed:
            return frozenset(self.apart)
        return frozenset() if self.full is None else (self.full.grads - self.grads).intersection(self.apart)

    def numbered(self, model: _C.Model, number: int) -> Variant:
        """The same gradients in a variant that computes other values again."""
        if number == self.number:
            return self
        flags = self.wanted, self.arriving, self.group, self.around, self.full
        return Variant(model, *flags, number, self.turns, self.n_user)


class Step:
    """One forward in flight: what its backward needs besides the saved tensors."""

    __slots__ = (
        "aliases",
        "apart",
        "arena",
        "lowered",
        "call",
        "clones",
        "fronts",
        "given",
        "graph",
        "hooked",
        "kinds",
        "live",
        "outs",
        "random_states",
        "regions",
        "seed",
        "state",
        "taken",
        "tensors",
        "used",
        "variant",
        "versions",
    )

    graph: Graph
    apart: frozenset[int]  # graph inputs that get their gradients from Delivers
    fronts: dict[int, Arrived]  # per graph task
    given: list[ref[Tensor] | None]  # the outputs as the user has them, where one is computed from another
    variant: Variant
    taken: list[Taken]  # by Function
    tensors: Sequence[Tensor]  # one per graph input; () once a backward has used the step up
    # what backward reads of them: they share the version counter, but keep the data of now if p.data is assigned
    aliases: dict[int, Tensor]
    # version and address of those tensors; None when they have none (inference tensors)
    versions: list[tuple[int, int]] | None
    seed: int
    regions: Regions
    clones: dict[int, Tensor]  # graph inputs that a forward overwrites, as they were before
    call: Call | None  # what PyTorch needs to do this forward itself; None once a backward has used the step up
    kinds: list[tuple[torch.Size, torch.dtype]]  # of the user outputs
    live: dict[int, Live]
    # what the engine knows of the arena: until a backward begins that does not retain the graph
    state: _C.State | None
    hooked: bool  # saved tensors went through hooks: who holds them cannot be told
    arena: Tensor | None  # these two only between the engine's forward and Head.forward
    outs: tuple[Tensor, ...]
    lowered: autocast.State
    used: int  # user outputs (bits) of backward passes that have freed what they needed
    random_states: list[Tensor] | None  # torch's generators before the forward, when a host node has drawn from one


class Call(Protocol):
    """One call of the user's module."""

    def replay(self, tensors: Sequence[Tensor], clones: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        """Runs it in PyTorch on aliases of its tensors. tensors: the graph inputs; clones: those it has overwritten, as
        they were.
        -> user outputs, aliases of the graph inputs."""


class Graph:
    """A captured graph loaded into the engine: builds variants, runs steps."""

    def __init__(
        self,
        captured: Captured,
        segment_mb: float,
        memory_level: int = 0,
        cuda: int = -1,
        memory: Memory | None = None,
        all_rows: bool = False,
        all_tokens: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        """memory: what a step may take; a budget decides in the place of memory_level. all_rows, all_tokens: no label
        sparsity, no padding sparsity."""
        self.captured = captured
        self.cuda = cuda
        self.cuda_graphs = cuda_graphs
        if cuda >= 0:
            cuda_engine.listen()
        self.memory = memory or Memory(None)
        decided = self.memory.budget is not None or bool(self.memory.plans)
        self.model = _C.Model(captured.onnx, 0 if decided else min(memory_level, 1), cuda, all_rows, all_tokens)
        holders_when_dropped()  # measured here rather than inside the first backward
        self.segment_bytes = segment_mb * 2**20
        follow = partial(cuda_engine.follow_stream, cuda, cuda_graphs) if cuda >= 0 else None
        self.host = Host(captured.host_ops, follow)
        self.random: bool = self.model.random
        self.n_outputs = captured.n_user_outputs
        self.passthrough = list(captured.passthrough.items())
        self.views = bool(captured.views)
        self.formats = list(captured.formats.items())
        self.between = captured.between
        self.around = frozenset((*captured.passthrough, *captured.views))  # outputs that the chain knows nothing of
        self.writes = list(dict.fromkeys(captured.writes))
        self.edits = [i for i in self.writes if i not in captured.quiet]
        self.small = [
            i for i, spec in enumerate(captured.inputs) if spec.kind == "buffer" and _fewer(spec.dims, _SMALL_BUFFER)
        ]
        self.leaves = [spec.leaf for spec in captured.inputs if spec.kind == "user"]
        self.turns = [spec.turn for spec in captured.inputs]
        self.bound = [spec for spec in captured.inputs if spec.kind != "user"]
        self.pairs = [i for i, spec in enumerate(captured.inputs) if spec.pairs]
        self.host_inputs = frozenset(self.model.host_inputs)
        if any(spec.kind == "user" for spec in captured.inputs[len(self.leaves) :]):
            raise RuntimeError("ortmodule: user inputs of a captured graph must come first")
        if len(self.model.inputs) != len(captured.inputs):
            raise RuntimeError(
                f"ortmodule: the engine sees {len(self.model.inputs)} graph inputs, the capture {len(captured.inputs)}"
            )
        self.differentiable = [
            d and i not in self.around for i, (_, _, _, d) in enumerate(self.model.outputs[: self.n_outputs])
        ]
        self.plain = Variant(self.model, bytes(len(captured.inputs)), bytes(self.n_outputs), None)
        self.made: Callable[[int], None] | None = None  # told the number of each variant that runs
        self._current: dict[tuple[bool, ...], Variant] = {}
        # predictions corrected by a backward, in force once it has ended
        self._next: dict[tuple[bool, ...], Variant] = {}
        self._full: dict[tuple[bool, ...], Variant] = {}
        self._variants: dict[tuple[tuple[bool, ...], bytes], Variant] = {}
        self.gathered: list[int] = []  # parameters of DeepSpeed's ZeRO-3
        self.forward_ms = self.backward_ms = 0.0
        self.forwards = self.backwards = self.reruns = 0

    @property
    def sparse_heads(self) -> tuple[int, int]:
        """Heads that leave out rows whose label is ignored: forward and backward, backward alone."""
        both, back = zip(*[v.sparse_heads for v in [self.plain, *self._variants.values()]], strict=True)
        return max(both), max(back)

    @property
    def padding(self) -> str:
        """How many products leave out padding in the variants there are, the newest first; or why none does."""
        told = [v.padding for v in reversed([self.plain, *self._variants.values()]) if v.padding]
        return min(told, key=lambda text: text.startswith("none")) if told else ""

    # --- choosing a variant -----------------------------------------------------------------------

    def variant(self, wanted: tuple[bool, ...], tensors: Sequence[Tensor]) -> Variant:
        """The variant for the next forward; wanted: requires_grad of every graph input."""
        found = self._current.get(wanted)
        if found is None:
            try:
                found = self._full_variant(wanted, tensors)
                if 0 in found.through and self.model.outputs[0][2] == 0 and len(found.through) > 1:
                    found = self.variant_for(wanted, bytes([i == 0 for i in range(self.n_outputs)]), tensors)
            except Exception as error:
                raise Refusal(str(error) or type(error).__name__) from error
            self._current[wanted] = found
            if self.made is not None:
                self.made(found.number)
        return found

    def _full_variant(self, wanted: tuple[bool, ...], tensors: Sequence[Tensor]) -> Variant:
        """All outputs that depend on a wanted input receive a gradient."""
        found = self._full.get(wanted)
        if found is None:
            flags = bytes(wanted), self._groups(wanted, tensors), self.around
            arriving = bytes(self.differentiable)
            while True:  # at most twice: the first only tells which outputs those are
                found = Variant(self.model, flags[0], arriving, *flags[1:], None, None, self.turns, len(self.leaves))
                reached = bytes([i in found.through for i in range(self.n_outputs)])
                if reached == arriving:
                    break
                arriving = reached
            self._full[wanted] = self._variants[wanted, arriving] = found
        return found

    def variant_for(self, wanted: tuple[bool, ...], arriving: bytes, tensors: Sequence[Tensor]) -> Variant:
        """The variant for this set of arriving gradients."""
        found = self._variants.get((wanted, arriving))
        if found is None:
            full = self._full_variant(wanted, tensors)
            flags = bytes(wanted), arriving, self._groups(wanted, tensors), self.around
            found = Variant(self.model, *flags, full, None, self.turns, len(self.leaves))
            self._variants[wanted, arriving] = found
        return found

    def _groups(self, wanted: tuple[bool, ...], tensors: Sequence[Tensor]) -> list[int] | None:
        """Backward segment per graph input: parameters in the order of PyTorch's backward, a new segment after every
        segment_bytes; inputs last."""
        group = [0] * len(tensors)
        segment, size = 0, 0
        for i in sorted(range(len(self.leaves), len(tensors)), key=self.turns.__getitem__):
            if not wanted[i]:
                continue
            if size >= self.segment_bytes:
                segment, size = segment + 1, 0
            group[i] = segment
            size += tensors[i].nbytes
        for i in range(len(self.leaves)):
            group[i] = segment
        return group if segment else None

    # --- forward ----------------------------------------------------------------------------------

    def infer(self, tensors: Sequence[Tensor]) -> Any:
        """The user's output, without anything for a backward."""
        start = perf_counter()
        before = {i: tensors[i].detach().clone() for i in self.writes if tensors[i].nbytes <= _SMALL}
        run = self._start(self.plain, tensors, self._seed())
        try:
            with shown("forward"):
                self.host.drive_forward(run, {}, {}, tensors)
        except Failed as error:
            self._restore(error, before, tensors)
            raise
        if self.edits:
            increment_version([tensors[i] for i in self.edits])
        outs: list[Tensor | None] = list(run.outputs())
        self.forward_ms += (perf_counter() - start) * 1e3
        self.forwards += 1
        return self._rebuild(outs, tensors)

    def train(
        self, tensors: Sequence[Tensor], wanted: tuple[bool, ...], call: Call, lowered: autocast.State
    ) -> Any:
        """The user's output, with the chain around it."""
        # a forward inside a backward may be a checkpoint's second: it must save what the first did
        if self._next and not private.in_backward():
            self._current.update(self._next)
            self._next.clear()
        variant = self._current.get(wanted) or self.variant(wanted, tensors)
        if not variant.nodes:
            return self.infer(tensors)
        variant = self._fitting(variant, tensors)
        start = perf_counter()
        step = Step()
        step.graph = self
        step.variant = variant
        step.tensors = tensors
        step.seed = seed = self._seed()
        step.regions = {}
        step.live = {}
        step.fronts = {}
        step.apart = frozenset([i for i in variant.apart if wanted[i] and tensors[i].grad_fn is not None])
        if variant.apart and ranks.several() and any([wanted[i] for i in variant.lonely()]):
            step.apart = frozenset([i for _, inputs in variant.nodes for i in inputs])  # all, to be in turn
        step.call = call
        step.used = 0
        step.lowered = lowered
        step.clones = self._clones(variant, tensors) if self.writes or self.small else {}
        before = cuda_engine.random_states(self.cuda) if self.host.ops else None
        want, flow = variant.want, (variant.full or variant).flow
        if self.host.once:  # prepared for any backward
            full = self._full_variant(wanted, tensors).want
            want = {**want, **{i: full[i] for i in self.host.once if i in full}}
        run = self._start(variant, tensors, seed)
        try:
            with shown("forward"):
                detached = self.host.drive_forward(run, step.regions, want, tensors, flow)
        except Failed as error:
            self._restore(error, step.clones, tensors)
            raise
        drawn = before is not None and not cuda_engine.same_states(before, cuda_engine.random_states(self.cuda))
        step.random_states = before if drawn else None
        if self.edits:
            increment_version([tensors[i] for i in self.edits])
        clones = step.clones
        if not self.forwards:
            self.gathered = [i for i, t in enumerate(tensors) if hasattr(t, "ds_id")]
        step.aliases = {i: clones[i] if i in clones else tensors[i].detach() for i in variant.reads}
        for i in self.gathered:
            if i in step.aliases:
                step.aliases[i] = tensors[i]  # its data will have been freed, and gathered anew, when backward reads it
        step.versions = _versions(tensors)
        every = run.outputs()
        step.state, step.arena = run.state()
        outs: list[Tensor | None] = list(every)
        step.outs = tuple(every)
        step.kinds = [(t.shape, t.dtype) for t in every]

        for i, out in zip(variant.through, put_around(step, tensors), strict=True):
            outs[i] = out
        for i in variant.without(detached) if detached else ():
            outs[i] = every[i].detach().clone()  # its own memory may be overwritten by backward
        if self.between:
            step.given = [None if out is None else ref(out) for out in outs]
        self.forward_ms += (perf_counter() - start) * 1e3
        self.forwards += 1
        return self._rebuild(outs, tensors)

    def _fitting(self, variant: Variant, tensors: Sequence[Tensor]) -> Variant:
        """What runs in the place of `variant` to keep the budget."""
        try:
            return self.memory.fit(self, variant, tensors)
        except BudgetError:
            raise
        except ValueError as error:
            raise Unfit(str(error)) from error
        except MemoryError as error:
            raise Failed(str(error)) from error
        except Exception as error:  # of the engine, about the graph or these tensors; nothing has been computed
            raise (Unfit if self.forwards else Refusal)(str(error)) from error

    def _start(self, variant: Variant, tensors: Sequence[Tensor], seed: int) -> _C.Run:
        cuda_engine.follow_stream(self.cuda, self.cuda_graphs)
        try:
            return self.model.forward(variant.number, tensors, seed)
        except ValueError as error:
            raise Unfit(str(error)) from error
        except MemoryError as error:  # of this batch: smaller ones may fit
            raise Failed(str(error)) from error
        except RuntimeError as error:
            raise (Unfit if self.forwards else Refusal)(str(error)) from error  # other sizes have been computed
        except Exception as error:
            raise (Failed if self.forwards else Refusal)(str(error)) from error

    def _restore(self, error: Failed, clones: dict[int, Tensor], tensors: Sequence[Tensor]) -> None:
        """Undoes what a forward that has failed may have written, so that PyTorch can run it."""
        if any(i not in clones for i in self.writes):
            raise RuntimeError(str(error)) from error
        with torch.no_grad():
            for i in self.writes:
                tensors[i].copy_(clones[i])
        if self.cuda >= 0 and isinstance(error.__cause__, ValueError):
            # an index or label out of range, of this step or the one before: on it PyTorch's kernels would end the
            # process's work with the GPU
            raise IndexError(str(error)) from None

    def forget_fault(self) -> None:
        """The call goes another way through forward than this graph, which has run: an index out of range that it alone
        has read is no error. On CUDA one turns up late (csrc/graph/device.h)."""
        try:
            cuda_engine.look(self.cuda)
        except ValueError as error:
            said = str(error)
            place = re.search(r" \((.+):(\d+)\)", said)
            at = None if place is None else (place[1], int(place[2]))
            nodes = (n for n in self.model.nodes() if n["op"] == said.partition(":")[0])
            if not any(at is None or (n["file"], n["line"]) == at for n in nodes):
                raise IndexError(said) from None  # of a step before

    def _clones(self, variant: Variant, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copies of what backward may need and this or another forward overwrites: small buffers always (PyTorch's
        batch_norm changes them without telling autograd, so a step may be in flight meanwhile), other written tensors
        while a second run is likely."""
        chosen = self.small
        large = [i for i in self.writes if i not in self.small]
        if large and (not variant.confirmed or self.reruns or sum(tensors[i].nbytes for i in large) <= _SMALL):
            chosen = chosen + large
        return {i: tensors[i].detach().clone() for i in chosen}

    def _seed(self) -> int:
        return cuda_engine.seed(self.cuda, _SEED_END) if self.random else 0

    def _rebuild(self, outs: list[Tensor | None], tensors: Sequence[Tensor]) -> Any:
        for i, source in self.passthrough:
            outs[i] = tensors[source]
        for i, kind in self.formats:
            out = outs[i]
            outs[i] = None if out is None else out.contiguous(memory_format=kind)
        if self.views:
            view_again(self.captured.views, tensors, outs)
        return self.captured.rebuild(outs)  # type: ignore[arg-type]

    # --- backward ---------------------------------------------------------------------------------

    def backward(
        self,
        step: Step,
        arena: Tensor,
        outputs: Sequence[Tensor | None],
        grads: list[Tensor | None],
        keep: bool,
        dropped: bytes | None,
        arrived: bytes,
    ) -> Live:
        """Starts a backward over what the step's forward left. dropped: outputs whose memory may be overwritten.
        arrived: outputs whose gradient is not a zero filled in."""
        tensors: list[Tensor | None] = [None] * len(self.captured.inputs)
        for i, t in step.aliases.items():
            tensors[i] = t
        state = step.state
        if state is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the first, which has failed, has used up the "
                "state of the forward. Specify retain_graph=True at the first backward."
            )
        if not keep:  # from here on what lies there is the backward's, which may stop in the middle
            step.state = None
        cuda_engine.follow_stream(self.cuda, self.cuda_graphs)
        fleeting = self._added_up(step)
        run = state.backward(arena.clone() if keep else arena, tensors, outputs, grads, dropped, fleeting)
        return Live(run, None, keep, Missing(step.variant.flow, arrived))

    def _added_up(self, step: Step) -> bool:
        """Are there gradients already that those of this backward will be added to? (Where autograd.grad asks for them
        instead, the engine notices that they are kept.)"""
        found = False
        for t, wanted in zip(step.tensors, step.variant.wanted, strict=False):
            if wanted and t.is_leaf:
                if t.grad is None:
                    return False
                found = True
        return found

    def can_run_forward_again(self, step: Step) -> bool:
        """Is there still all that the forward has read?"""
        return bool(step.tensors) and all(i in step.clones for i in self.writes)

    def can_run_again(self, step: Step, arriving: bytes) -> bool:
        """A saved tensor was edited: is everything there to make it again, and is it none of the outputs that receive a
        gradient (where eager would raise, too)?"""
        if step.versions is None or step.hooked or not self.can_run_forward_again(step):
            return False
        variant = self.variant_for(tuple(map(bool, step.variant.wanted)), arriving, step.tensors)
        return not any(arriving[i] for i in variant.reads_outputs)

    def backward_fewer(self, step: Step, grads: list[Tensor | None]) -> frozenset[int]:
        """Fills in zeros for gradients that were expected and have not come. -> the inputs that get a gradient."""
        wanted = tuple(map(bool, step.variant.wanted))
        variant = self.variant_for(wanted, bytes([g is not None for g in grads]), step.tensors)
        self._next[wanted] = variant
        for i, expected in enumerate(step.variant.arriving):
            if expected and grads[i] is None:
                shape, dtype = step.kinds[i]
                grads[i] = cuda_engine.nothing(self.cuda, dtype).expand(shape)
        return variant.grads

    def backward_other(self, step: Step, grads: list[Tensor | None], keep: bool) -> Live:
        """Backward from a set of outputs that the forward was not prepared for: runs the forward again, prepared for
        it."""
        arriving = bytes([g is not None for g in grads])
        self.check_versions(step)
        if any(i not in step.clones for i in self.writes):
            raise RuntimeError(
                "ortmodule: gradients arrive for other outputs than in the backward passes before, and the forward has "
                "overwritten "
                f"{[self.captured.inputs[i].name for i in self.writes]}, so it cannot be run again. Run the forward "
                "again; it will be "
                "prepared for this set of outputs.")
        wanted = tuple(map(bool, step.variant.wanted))
        variant = self.variant_for(wanted, arriving, step.tensors)
        if not step.used:
            self._next[wanted] = variant
        self.reruns += 1
        tensors = [step.clones.get(i, t) for i, t in enumerate(step.tensors)]
        variant = self.memory.fit(self, variant, tensors)
        regions: Regions = {}
        run = self._forward_again(step, variant.number, tensors, regions, variant.want)
        state, arena = run.state()
        back = state.backward(arena, tensors, run.outputs(), grads)
        found: dict[int, Tensor | None] = {}
        answers: Answers = {}
        missing = Missing(variant.flow, arriving)
        retain = keep or bool(self.host.once)  # Regions of the step
        for segments, _ in variant.nodes:
            for segment in segments:
                self.host.drive_backward(back, segment, regions, variant.want, retain, answers, missing)
                found.update([(i, None if missing.of_input(i) else grad) for i, grad in back.grads(segment)])
        return Live(None, found, keep)

    def _forward_again(
        self, step: Step, variant: int, tensors: Sequence[Tensor], regions: Regions, want: Want
    ) -> _C.Run:
        """The step's forward with the numbers it has drawn, and without its writes."""
        random = cuda_engine.random_from(self.cuda, step.random_states)
        with torch.no_grad(), random, autocast.put(step.lowered):
            run = self.model.forward(variant, tensors, step.seed, write=False)
            flow = (step.variant.full or step.variant).flow
            self.host.drive_forward(run, regions, want, tensors, flow, step.regions)
        return run

    def backward_in_torch(self, step: Step, grads: list[Tensor | None]) -> Live:
        """Gradients that can be differentiated again, or in forward mode as they are made: the user's module runs in
        PyTorch on aliases of the step's tensors."""
        if step.random_states is not None or self.random and str(self.captured.checkpoints):
            raise RuntimeError(_DRAWN)
        self.check_versions(step)
        if any(i not in step.clones for i in self.writes):
            self.reruns += 1  # from now on copies are kept
            raise RuntimeError(
                "ortmodule: a backward that is differentiated itself (create_graph=True, gradients with tangents) "
                "runs the forward again, which has overwritten "
                f"{[self.captured.inputs[i].name for i in self.writes]}. Run the forward again; it will keep what "
                "they were.")
        assert step.call is not None
        try:
            dropout = masks.same(step.seed, self.captured.onnx) if self.random else nullcontext()
            with torch.enable_grad(), autocast.put(step.lowered), dropout:
                outputs, aliases = step.call.replay(step.tensors, step.clones)
        except masks.Unknown:
            raise RuntimeError(_DRAWN) from None
        if (self.random or self.host.once) and not self._like(step, outputs):
            raise RuntimeError(_DRAWN)
        pairs = [
            (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o is not None and o.requires_grad
        ]
        numbers = [i for i, w in enumerate(step.variant.wanted) if w]
        found: Sequence[Tensor | None] = [None] * len(numbers)
        if pairs:
            sources, incoming = zip(*pairs, strict=True)
            places = [aliases[i] for i in numbers]
            with hooks_at_rest(places):
                found = torch.autograd.grad(sources, places, incoming, create_graph=torch.is_grad_enabled(),
                                            allow_unused=True)  # fmt: skip
            # a tensor that is two inputs has all of its gradient at both: one hands it on
            takers = {id(aliases[i]): i for _, inputs in step.variant.nodes for i in inputs}
            found = [g if takers.get(id(at), i) == i else None
                     for i, at, g in zip(numbers, places, found, strict=True)]  # fmt: skip
        return Live(None, dict(zip(numbers, found, strict=True)), True)

    def _like(self, step: Step, outputs: Sequence[Tensor | None]) -> bool:
        """Are these what the step's forward has returned? It is run again."""
        tensors = [step.clones.get(i, t) for i, t in enumerate(step.tensors)]
        run = self._forward_again(step, self.plain.number, tensors, {}, {})
        for ours, t in zip(run.outputs(), outputs, strict=False):
            if t is not None and t.is_floating_point():
                near = 5e-2 if torch.finfo(t.dtype).bits < 32 or any(step.lowered) else 1e-3
                a, b = ours.detach().double(), t.detach().double()
                if a.shape != b.shape or not (a - b).norm() <= near * b.norm() + 1e-12:
                    return False
        return True

    def look_between(self, step: Step, arrived: int) -> None:
        """Says once when the gradient of an output is looked at that another output, whose gradient arrives, is
        computed from: the way between them is the engine's, so what the user sees lacks it."""
        looked = 0
        for i, given in enumerate(step.given):
            out = given() if given is not None else None
            if out is not None and i < 63 and (private.tensor_hooks(out) or out.retains_grad) and not out.is_leaf:
                looked |= 1 << i
        for i, bits in self.between.items() if looked else ():
            if arrived >> min(i, 63) & 1 and bits & looked:
                self.between = {}
                logger.warning(
                    "a hook or retain_grad() on an output of the module (number %d) does not see the gradient that "
                    "comes from another "
                    "output (number %d) which the module computes from it: that way is inside the engine. "
                    "Compute the second from the "
                    "first outside of the module, or put the hook on a submodule.",
                    (bits & looked).bit_length() - 1,
                    i,
                )
                return

    def check_versions(self, step: Step, why: str = _OTHER) -> None:
        """The forward is about to be run again: its inputs must be what they were. Names one that backward reads before
        others."""
        if not step.tensors:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the state of the forward has been freed. Specify "
                "retain_graph=True at the first backward."
            )
        if step.versions is None:
            return
        reads = frozenset(step.variant.reads)
        for i in sorted(range(len(step.tensors)), key=lambda i: i not in reads):
            t, (version, address) = step.tensors[i], step.versions[i]
            if i in step.clones:
                continue
            if t.data_ptr() != address:
                raise RuntimeError(
                    f"the data of {self.captured.inputs[i].name} was replaced between forward and a backward that has "
                    "to run the "
                    "forward again"
                )
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{self.captured.inputs[i].name}, a {t.dtype} tensor of size {tuple(t.shape)}, is at version "
                    f"{t._version}; expected "
                    f"version {version} instead. ({why}) Edit it after its last backward, or edit a clone() of it.")


def view_again(
    made: dict[int, tuple[int, int, list[View]]], tensors: Sequence[Tensor], outs: list[Tensor | None]
) -> None:
    """Puts views in the place of results that are views of an input or of another result (Captured.views)."""
    for i, (number, other, views) in made.items():
        t = tensors[number] if number >= 0 else outs[other]
        assert t is not None
        outs[i] = _as_viewed(t, views, outs[i])


def _as_viewed(t: Tensor, views: Sequence[View], like: Tensor | None) -> Tensor:
    """like: the same as the engine has computed it."""
    for target, args, kwargs, item, grad in views:
        with nullcontext() if grad else torch.no_grad():
            made = target(t, *args, **kwargs) if args != (SIZES,) else target(t, like.shape)  # type: ignore[union-attr]
        t = made[item] if item >= 0 else made
    return t


def _fewer(dims: Sequence[int | str], limit: int) -> bool:
    """Is that a known number of elements, and at most `limit`?"""
    return all(isinstance(d, int) for d in dims) and prod(d for d in dims if isinstance(d, int)) <= limit


def _versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    try:
        return [(t._version, t.data_ptr()) for t in tensors]
    except RuntimeError:  # inference tensors have no version
        return None
