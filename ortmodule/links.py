"""The autograd.Functions of the chain (chain.py): Head and the Links before it, Fronts and Delivers where outputs
differ in what they depend on; and the backward that Head starts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import groupby
from operator import or_
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.profiler import record_function

from . import _C, cuda_engine
from . import torch_private as private
from .holders import dropped_by_all
from .host import Answers, Missing, plain

if TYPE_CHECKING:
    from .chain import Step


_NOT_SHOWN: AbstractContextManager[Any] = nullcontext()


def shown(what: str, segment: int = -1) -> AbstractContextManager[Any]:
    """A range for torch.profiler, while one runs."""
    if not private.profiler._is_profiler_enabled:
        return _NOT_SHOWN
    return record_function(f"ORTModule {what}" + f", segment {segment}" * (segment >= 0))


class Arrived:
    """What has come to the Fronts of a step in one graph task: Head, gradients by output, and the backward started from
    `used` of them."""

    __slots__ = ("grads", "head", "live", "used")

    def __init__(self, head: Any) -> None:
        self.head = head
        self.grads: dict[int, Tensor] = {}
        self.live: Live | None = None
        self.used: frozenset[int] = frozenset()


class Live:
    """A backward in progress, kept for the Links: the engine's run, or all gradients at once. only: the inputs that get
    a gradient, when not all of the variant's do."""

    __slots__ = ("answers", "found", "keep", "missing", "only", "run")

    def __init__(
        self, run: _C.Run | None, found: dict[int, Tensor | None] | None, keep: bool, missing: Missing | None = None
    ) -> None:
        self.run = run
        self.missing = missing
        self.found = found
        self.keep = keep
        self.only: frozenset[int] | None = None
        self.answers: Answers = {}


class _Spared:
    """A hook on a tensor that is not called for a gradient that does not arrive: PyTorch does not get to the tensor
    then, but here it does, on the way of another. One that waits for several tensors waits for this one, too, so it
    hears of it, unless nothing arrives at the others."""

    __slots__ = ("calls", "hook")

    def __init__(self, hook: Callable[[Tensor | None], Any]) -> None:
        self.hook = hook
        self.calls = private.calls_of(hook)

    def __call__(self, grad: Tensor | None) -> Any:
        if grad is not None:
            return self.hook(grad)
        if self.calls is not None:
            task = private.task_id()
            if task in self.calls:
                self.hook(None)
            else:
                private.queue_callback(lambda: self.late(task))
        return None

    def late(self, task: int) -> None:
        """At the end of the backward."""
        if self.calls is not None and task in self.calls:
            self.hook(None)


class _SparedAfter:
    """The same for a post-accumulate hook, which is not told what has arrived: .grad is as it was. before: by graph
    task, for there may be one on each of several threads."""

    __slots__ = ("before", "hook")

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook
        self.before: dict[int, tuple[int, int]] = {}

    def note(self, leaf: Tensor) -> None:
        self.before[private.task_id()] = _grad_of(leaf)

    def __call__(self, leaf: Tensor) -> None:
        if self.before.pop(private.task_id(), None) != _grad_of(leaf):
            self.hook(leaf)


def _grad_of(leaf: Tensor) -> tuple[int, int]:
    """Which tensor, and as edited how often."""
    g = leaf.grad
    return id(g), 0 if g is None or g.is_inference() else g._version


def _spare_hooks(ctx: Any, result: tuple[Tensor | None, ...], n: int) -> None:
    """The last n of a Function's results go to its last n tensors."""
    for (node, _), grad in zip(ctx.next_functions[-n:], result[-n:], strict=True):
        leaf = getattr(node, "variable", None) if grad is None else None
        if leaf is None:
            continue
        hooks: dict[int, Any] = private.tensor_hooks(leaf) or {}
        for key, hook in [*hooks.items()]:
            if type(hook) is not _Spared:
                hooks[key] = _Spared(hook)
        hooks = private.post_hooks(leaf) or {}
        for key, hook in [*hooks.items()]:
            if type(hook) is not _SparedAfter:
                hook = hooks[key] = _SparedAfter(hook)
            hook.note(leaf)


def _spared(ctx: Any, result: tuple[Tensor | None, ...], head: int) -> tuple[Tensor | None, ...]:
    """A Function's result, the first `head` of it for arguments that are no tensors of the graph: hooks do not see its
    Nones."""
    if type(None) in map(type, result[head:]):
        _spare_hooks(ctx, result, len(result) - head)
    return result


def _give(step: Step, live: Live, number: int, head: int, every: bool = False) -> tuple[Tensor | None, ...]:
    """Runs the segments of Function `number` and returns the gradients of its tensors, after `head` Nones for its other
    arguments. every: those that Delivers give, too."""
    variant, graph = step.variant, step.graph
    segments, inputs = variant.nodes[number][0], step.taken[number].inputs
    result: list[Tensor | None] = [None] * (head + len(inputs))
    if live.found is not None:
        for place, i in enumerate(inputs):
            if every or i not in step.apart:
                result[head + place] = live.found.pop(i, None)
        return tuple(result)
    run, places = live.run, step.taken[number].places
    missing = live.missing if graph.host.ops else None
    assert run is not None
    for segment in segments:
        with shown("backward", segment):
            if graph.host.ops:
                assert missing is not None
                graph.host.drive_backward(run, segment, step.regions, variant.want, live.keep, live.answers, missing)
            else:
                graph.host.resume(run, segment)
        for i, grad in run.grads(segment):
            if (live.only is None or i in live.only) and (missing is None or not missing.of_input(i)):
                result[head + places[i]] = grad
    return tuple(result)


def _give_all(step: Step, live: Live, every: bool = False) -> dict[int, Tensor | None]:
    """The gradients of all Functions, by input."""
    return {
        i: grad
        for number, taken in enumerate(step.taken)
        for i, grad in zip(taken.inputs, _give(step, live, number, 0, every), strict=True)
    }


def _spent(step: Step, output: int) -> bool:
    """Has a backward freed what the gradient of this output needs, too? PyTorch keeps nothing for some operations
    (sums, views)."""
    return step.variant.shares[output] & step.used != 0


def _begin_batched(ctx: Any, step: Step, grads: list[Tensor | None], keep: bool, level: int) -> Live | None:
    """A backward for each of a batch, when the gradients that arrive are tensors of vmap."""
    parts = [None if g is None else private.batch_of(g, level) for g in grads]
    held = [p for p in parts if p is not None]
    if not held:
        return None
    rows, batch = held[0]
    if level > 1 or any(private.batch_of(p[0][0], 1) is not None for p in held if len(p[0])):
        raise RuntimeError("ortmodule: a backward under more than one vmap is not possible")
    variant = step.variant
    found: dict[int, list[Tensor | None]] = {i: [] for _, inputs in variant.nodes for i in inputs}
    for k in range(len(rows)):
        one = [p[0][k] if p is not None else g for p, g in zip(parts, grads, strict=True)]
        live = _begin(ctx, step, one, keep or k + 1 < len(rows))
        for i, grad in _give_all(step, live, True).items():
            found[i].append(grad)
    result: dict[int, Tensor | None] = {}
    for i, all_rows in found.items():
        like = next((g for g in all_rows if g is not None), None)
        result[i] = (
            None if like is None else batch(torch.stack([torch.zeros_like(like) if g is None else g for g in all_rows]))
        )
    return Live(None, result, keep)


def _has_tangent(grad: Tensor | None) -> bool:
    """Forward-mode differentiation of this backward: the engine would lose it."""
    return grad is not None and private.forward_ad.unpack_dual(grad).tangent is not None


def _begin(ctx: Any, step: Step, grads: list[Tensor | None], keep: bool) -> Live:
    """Starts the backward of a step; grads: one per user output."""
    graph, variant = step.graph, step.variant
    if private.transforms() is not None and any(g is not None and private.is_transformed(g) for g in grads):
        raise RuntimeError(
            "ortmodule: torch.func (jvp, grad, vjp) around a backward whose forward ran outside of it is not possible: "
            "call the module inside of the transform, or differentiate with backward(create_graph=True)"
        )
    grads = [g if g is None else plain(g) for g in grads]
    if step.used and any([g is not None and _spent(step, i) for i, g in enumerate(grads)]):
        _ = ctx.saved_tensors  # PyTorch's own error
        raise RuntimeError(
            "Trying to backward through the graph a second time: the state of the forward has been freed"
        )
    if torch.is_grad_enabled() or private.forward_ad._current_level >= 0 and any(map(_has_tangent, grads)):
        return graph.backward_in_torch(step, grads)
    arriving = bytes([g is not None for g in grads])
    if step.used or any([a > b for a, b in zip(arriving, variant.arriving, strict=True)]):
        return graph.backward_other(step, grads, keep)
    try:
        saved = ctx.saved_tensors
    except RuntimeError:
        # An output was edited that eager need not miss: it matters to the missing gradients only, or stands beside the
        # loss (logits).
        if not graph.can_run_again(step, arriving):
            raise
        graph.check_versions(step, "Backward reads it, or a result was edited, so the forward has to be run again.")
        return graph.backward_other(step, grads, keep)
    only, given = None, grads
    if arriving == variant.arriving:
        variant.confirmed = True
    else:
        grads = [*grads]
        only = graph.backward_fewer(step, grads)
    outputs: list[Tensor | None] = [None] * graph.n_outputs
    for place, i in enumerate(variant.reads_outputs):
        outputs[i] = saved[1 + place]
    dropped = None
    if not keep and variant.lendable and not step.hooked and not step.apart:  # there it is others that are saved
        flags = bytearray(graph.n_outputs)
        for place, i in variant.lendable:
            flags[i] = dropped_by_all(saved[1 + place])
        dropped = bytes(flags)
    live = graph.backward(step, saved[0], outputs, grads, keep, dropped, arriving)
    if only is None:
        return live
    live.only = only
    live.keep = keep or bool(graph.host.once)  # for the case that follows
    found = _give_all(step, live, True)
    live.keep = keep
    # zero times infinity: what an output that is not asked for would have added
    if graph.can_run_forward_again(step) and not all([g is None or bool(g.isfinite().all()) for g in found.values()]):
        return graph.backward_other(step, given, keep)
    live.found = found
    return live


def _run(ctx: Any, step: Step, grads: dict[int, Tensor], keep: bool) -> Live:
    """Starts a backward from the gradients by output. ctx: Head's."""
    graph = step.graph
    incoming: list[Tensor | None] = [None] * graph.n_outputs
    arrived = 0
    for i, grad in grads.items():
        incoming[i] = grad
        arrived |= 1 << min(i, 63)
    if graph.between:
        graph.look_between(step, arrived)
    private.refuse_batches(incoming)
    level = private.vmap_level(incoming)
    live = _begin_batched(ctx, step, incoming, keep, level) if level or private.transforms() is not None else None
    return live or _begin(ctx, step, incoming, keep)


def _free(step: Step, grads: dict[int, Tensor]) -> None:
    """A backward that does not retain the graph has started from these outputs."""
    for i in grads:
        step.used |= 1 << min(i, 63)
    step.aliases, step.state = {}, None
    # else a backward from other outputs may come: the forward is run again
    over = all([_spent(step, i) for i in step.variant.through])
    if over:
        step.tensors, step.clones, step.call = (), {}, None
    if len(step.variant.nodes) == 1:  # what runs once a step has its results for such a run
        step.regions = {} if over else {i: r for i, r in step.regions.items() if i in step.graph.host.once}


def _run_apart(step: Step, arrived: Arrived, last: bool) -> Live:
    """All gradients at once, from what has come to the Fronts. last: nothing more can come. (PyTorch runs the Fronts
    before, if one thread has made the graph and one walks it; else what comes later is worth another run, which gives
    what has been delivered already once more.)"""
    grads = arrived.grads
    if arrived.live is None or arrived.used != grads.keys():
        last = last or len(grads) == len(step.variant.through)
        keep = private.keep_graph() or not last
        live = _run(arrived.head, step, grads, keep)
        if live.found is None:
            live.found = _give_all(step, live)
        arrived.live, arrived.used = live, frozenset(grads)
        if not keep:
            _free(step, grads)
        step.graph.backwards += 1
    return arrived.live


def _gradient_of(token: Tensor | None) -> Tensor | None:
    """What says to a Link that its turn has come; who takes graphs apart sees that the Link needs it."""
    return None if token is None or token.is_leaf else token.detach()


class Head(Function):
    """The last Function of the chain in forward order, the first in backward: owns the saved state."""

    @staticmethod
    def forward(ctx: Any, step: Step, token: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        variant, outs = step.variant, step.outs
        ctx.step = step
        ctx.token = _gradient_of(token)
        ctx.set_materialize_grads(False)
        aliases, reads, apart = step.aliases, variant.node_reads[0], step.apart
        if apart:  # all segments run at once, and the outputs are those of Fronts
            reads = [*dict.fromkeys([i for reads in variant.node_reads for i in reads])]
        ctx.save_for_backward(
            step.arena,
            *[outs[i].detach() if apart else outs[i] for i in variant.reads_outputs],
            *[aliases[i] for i in reads],
        )
        step.hooked = private.saved_hooks(True) is not None
        step.arena = None
        step.outs = ()
        return (cuda_engine.token(step.graph.cuda),) if apart else tuple([outs[i] for i in variant.through])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        start = perf_counter()
        step: Step = ctx.step
        graph, variant, task = step.graph, step.variant, private.task_id()
        if step.apart:
            arrived = step.fronts.get(task)
            given = {} if arrived is None else arrived.grads
        else:
            given = {i: grad for i, grad in zip(variant.through, grads, strict=True) if grad is not None}
        if not given:  # PyTorch also goes on behind a Function that has given None
            return _spared(ctx, (None,) * (2 + len(variant.nodes[0][1])), 2)
        if step.apart:
            assert arrived is not None
            live = _run_apart(step, arrived, True)
            result = _give(step, live, 0, 2)
        else:
            keep = private.keep_graph()
            live = _run(ctx, step, given, keep)
            result = (None, ctx.token, *_give(step, live, 0, 2)[2:])
            if not keep:
                _free(step, given)
            graph.backwards += 1
        if len(variant.nodes) > 1:
            step.live[task] = live
            private.queue_callback(lambda: step.live.pop(task, None))
        graph.backward_ms += (perf_counter() - start) * 1e3
        return _spared(ctx, result, 2)


_put_head = super(Function, Head).apply  # without its way around torch.func, in which no step of the engine runs


class Link(Function):
    """One of the Functions before Head: waits for its token's turn, then completes its own segment."""

    @staticmethod
    def forward(ctx: Any, step: Step, number: int, token: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.step = step
        ctx.number = number
        ctx.token = _gradient_of(token)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[step.aliases[i] for i in step.variant.node_reads[number]])
        return cuda_engine.token(step.graph.cuda)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        start = perf_counter()
        step: Step = ctx.step
        live = step.live.get(private.task_id())
        if live is None and grad is not None:
            raise RuntimeError(
                "ortmodule: a backward begins in the middle of a module's segments, where the engine cannot begin "
                "(zero-bubble schedules of torch.distributed.pipelining take the gradients of weights apart so). Let "
                "the module's gradients be one segment: ORTModule(stage, segment_mb=1e6)"
            )
        if live is None:  # nothing has come to Head
            return _spared(ctx, (None,) * (3 + len(step.variant.nodes[ctx.number][1])), 3)
        if live.found is None or live.only is not None:
            _ = ctx.saved_tensors  # torch's check that nobody has edited what this segment reads
        result = (None, None, ctx.token, *_give(step, live, ctx.number, 3)[3:])
        step.graph.backward_ms += (perf_counter() - start) * 1e3
        return _spared(ctx, result, 3)


class _Low(Function):
    """Below all leaves in autograd's queue, as a Link is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Fan(Function):
    """Gives all its tensors a gradient at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.n = len(tensors)
        return tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad,) * ctx.n


# what a Function takes before its inputs: nothing, the token of another Function, one that is a leaf
NONE, TOKEN, LEAF = range(3)


@functools.cache
def _called(n: int, before: int, low: int, waiting: int) -> list[int]:
    """In which order autograd comes to the n leaves of one Function, with `before` before them, `low` results of others
    behind, and while `waiting` other Functions have been made ready with it. Leaves have the same priority, so it is
    how its queue, a heap, happens to work: looked at once, on a thread of its own, whose queue is empty."""
    if n < 2:
        return [*range(n)]
    order: list[int] = []

    def look() -> None:
        leaves = [torch.zeros((), device="cpu", requires_grad=True) for _ in range(n)]
        for i, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))  # type: ignore[misc]
        others, ready, token = ([torch.zeros((), device="cpu", requires_grad=True) for _ in range(k)]
                                for k in (low, waiting, int(before != NONE)))  # fmt: skip
        others, ready = [_Low.apply(x) for x in others], [_Low.apply(x) for x in ready]
        token = [_Low.apply(x) for x in token] if before == TOKEN else token
        _Fan.apply(_Fan.apply(*token, *leaves, *others), *ready).backward()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return order


def in_turn(
    inputs: Sequence[int], low: Container[int], before: int, waiting: int = 0, gone: Container[int] = ()
) -> list[int]:
    """How a Function is to take these inputs so that their gradients are handed out in this order. low: those that are
    no leaves; they come behind. gone: those that autograd does not get to from here; they come last."""
    here = [i for i in inputs if i not in gone]
    leaves, rest = [i for i in here if i not in low], [i for i in here if i in low]
    placed = [0] * len(leaves)
    for i, place in zip(leaves, _called(len(leaves), before, len(rest), waiting), strict=True):
        placed[place] = i
    return placed + rest + [i for i in inputs if i in gone]


class Taken:
    """The inputs of a Function as it takes them, and the place of each."""

    __slots__ = ("inputs", "places")

    def __init__(self, inputs: list[int]) -> None:
        self.inputs = inputs
        self.places = {i: place for place, i in enumerate(inputs)}


class Front(Function):
    """One output, where outputs differ in the inputs that they depend on."""

    @staticmethod
    def forward(ctx: Any, step: Step, number: int, out: list[Tensor], *tokens: Tensor) -> Tensor:
        """tokens: Head's, those of the Delivers of what the output depends on."""
        ctx.step = step
        ctx.number = number
        ctx.tokens = len(tokens)
        ctx.set_materialize_grads(False)
        return out[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        step: Step = ctx.step
        if grad is not None:
            task = private.task_id()
            arrived = step.fronts.get(task)
            if arrived is None:
                arrived = step.fronts[task] = Arrived(ctx.next_functions[0][0])
                private.queue_callback(lambda: step.fronts.pop(task, None))
            arrived.grads[ctx.number] = grad
        return (None,) * (3 + ctx.tokens)


class Deliver(Function):
    """Hands out the gradients of inputs that the same outputs depend on. token: of the Deliver whose turn comes next,
    where every output that leads here leads there."""

    @staticmethod
    def forward(ctx: Any, step: Step, numbers: tuple[int, ...], token: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.step = step
        ctx.numbers = numbers
        ctx.token = _gradient_of(token)
        ctx.set_materialize_grads(False)
        return cuda_engine.token(step.graph.cuda)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step: Step = ctx.step
        arrived = step.fronts.get(private.task_id())
        found = {} if arrived is None else _run_apart(step, arrived, False).found or {}
        return _spared(ctx, (None, None, ctx.token, *[found.pop(i, None) for i in ctx.numbers]), 3)


def put_around(step: Step, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The chain around a step's forward. -> the outputs that go through it."""
    variant, outs, own = step.variant, step.outs, tensors
    token: Tensor | None = None
    delivers: list[tuple[int, Tensor]] = []
    waiting = 0  # Delivers that are ready when Head is
    if step.apart:
        every = reduce(or_, [1 << min(i, 63) for i in variant.through], 0)
        in_order = sorted(step.apart, key=variant.turns.__getitem__)
        runs = [(bits, [*run]) for bits, run in groupby(in_order, lambda i: variant.apart.get(i, every))]
        for bits, run in reversed(runs):  # what is made last has its turn first
            follows = delivers[-1][1] if delivers and not bits & ~delivers[-1][0] else None
            waiting += follows is None and bits != 0  # else no backward comes to it
            low = {i for i in run if tensors[i].grad_fn is not None}
            group = in_turn(run, low, NONE if follows is None else TOKEN, max(waiting - 1, 0))
            delivers.append((bits, Deliver.apply(step, (*group,), follows, *[tensors[i] for i in group])))
        own = [t.detach() if i in step.apart else t for i, t in enumerate(tensors)]
        token = cuda_engine.token(step.graph.cuda, requires_grad=True)  # all that the Functions take may stand apart
    step.taken = variant.taken(tensors, step.apart, waiting)
    for number in range(len(variant.nodes) - 1, 0, -1):
        token = Link.apply(step, number, token, *[own[i] for i in step.taken[number].inputs])
    given: tuple[Tensor, ...] = _put_head(step, token, *[own[i] for i in step.taken[0].inputs])
    if not step.apart:
        return given
    return tuple([
        Front.apply(step, i, [outs[i]], given[0], *[t for bits, t in delivers if bits >> min(i, 63) & 1])
        for i in variant.through
    ])  # fmt: skip
