"""Modules whose own forward cannot be captured (here: numpy decides something in the middle of it): PyTorch runs that, the
engine their submodules. What is held: eager's outputs, gradients, buffers and exceptions in fp64, and that nobody can tell
the modules from the user's."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close
from pairs import step_of_both as step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule import FallbackPolicy, ORTModule
from ortmodule.capture import CaptureError

pytestmark = pytest.mark.usefixtures("seeded")


class Block(nn.Module):
    def __init__(self, n: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def order(x: Tensor) -> Tensor:
    """What no graph has: numpy sorts the rows."""
    return torch.from_numpy(x.detach().double().sum((1, 2)).numpy().argsort().copy())


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(6, p), Block(6, p)])
        self.head = nn.Linear(6, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.middle(self.embed(ids))
        if labels is None:
            return self.head(x)
        self.seen += 1
        x = x[order(x)]
        return F.cross_entropy((self.head(x) * self.scale).flatten(0, 1), labels.flatten())


def batch(k: int = 0, n: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    return torch.randint(0, 11, (n, 5), generator=g), torch.randint(0, 11, (n, 5), generator=g)


def both(make: Any = Net, **options: Any) -> tuple[Any, Any]:
    eager = make().double()
    return ORTModule(copy.deepcopy(eager), **options), eager


def played(ours: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for g in ours.report().graphs:
        counts[g.part] = counts.get(g.part, 0) + g.forwards
    return counts


def test_the_parts_run_in_the_engine(caplog: Any) -> None:
    ours, eager = both()
    tree = [(name, type(m), id(m)) for name, m in ours.module.named_modules()]
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        for k in range(4):
            step(ours, eager, *batch(k))
    assert [(name, type(m), id(m)) for name, m in ours.module.named_modules()] == tree
    assert all(m.__dict__.keys() == n.__dict__.keys() for m, n in zip(ours.modules(), eager.modules()))
    assert played(ours) == {"blocks.0": 4, "blocks.1": 4}
    report = ours.report()
    assert [(p.name, p.reason) for p in report.parts] == [("blocks.0", ""), ("blocks.1", "")]
    (told,) = report.eager
    assert (told.calls, told.by_parts) == (4, 4) and "numpy" in told.reason
    text = str(report)
    assert "forward in PyTorch, 2 of 2 parts in the engine" in text and "; 4 calls in PyTorch by parts: " in text
    assert "  forward in PyTorch, parts in the engine, 4 calls: " in text and "lies on" not in text
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and said[0].endswith("The engine runs blocks.0, blocks.1") and said[0].startswith("Net: PyTorch runs forward: ")


def test_a_part_that_pytorch_runs_at_every_call_is_not_in_the_engine() -> None:
    class Frozen(Net):
        def middle(self, x: Tensor) -> Tensor:
            with torch.no_grad():  # other than around forward
                x = self.blocks[0](x)
            return self.blocks[1](x)

    ours, eager = both(Frozen)
    for k in range(3):
        step(ours, eager, *batch(k))
    report = ours.report()
    assert played(ours) == {"blocks.1": 3}
    assert [p.name for p in report.parts if not p.reason] == ["blocks.1"]
    assert report.parts[0].reason.startswith("called under another grad mode than the forward")
    assert "forward in PyTorch, 1 of 2 parts in the engine" in str(report)


def test_what_can_be_captured_is() -> None:
    """Without labels forward does not meet numpy."""
    ours, eager = both()
    for k in range(3):
        step(ours, eager, *batch(k))
        step(ours, eager, batch(k)[0])
        with torch.no_grad():
            close(ours(batch(k)[0]), eager(batch(k)[0]))
    counts = played(ours)
    assert counts[""] == 6 and counts["blocks.0"] == 3, counts


def test_other_sizes() -> None:
    ours, eager = both()
    for k in range(8):
        step(ours, eager, *batch(k, 2 + k))
    assert played(ours)["blocks.0"] == 8 and len(ours.report().graphs) == 4


def test_masks_are_those_of_wrapped_parts() -> None:
    net = Net(0.4).double()
    hand = copy.deepcopy(net)
    for k in range(2):
        hand.blocks[k] = ORTModule(hand.blocks[k])
    ours = ORTModule(net)
    ours(*batch())
    for k in range(3):
        for m in (ours, hand):
            torch.manual_seed(k)
            m.zero_grad()
            m(*batch(k)).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), hand.parameters()))


class Around(Net):
    """Parts by other ways than the tree, under other modes, once more in backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.listed = [self.blocks[0]]  # no entry of the tree
        self.twin = self.blocks[1]

    def middle(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        if self.how == "identity":
            assert type(first) is Block and first is self.listed[0] and second is self.twin and first in [first]
            assert {first: 1}[self.listed[0]] == 1 and list(self.children())[1] is self.blocks
            return self.twin(self.listed[0](second(x)))
        if self.how == "no_grad":
            with torch.no_grad():
                x = first(x)
            return second(x)
        if self.how == "inference_mode":
            with torch.inference_mode():
                x = first(x)
            return second(x.clone())
        if self.how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return second(first(x)).double()
        if self.how.startswith("checkpoint"):
            return second(checkpoint(first, x, use_reentrant="reentrant" in self.how))
        if self.how == "functional":
            own = {k: p * 2 for k, p in first.named_parameters()}
            return second(torch.func.functional_call(first, own, x))
        if self.how == "vmap":
            return torch.vmap(first)(second(x))
        if self.how == "deepcopy":
            other = copy.deepcopy(first)
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(2)
            assert type(other) is Block and other.__dict__.keys() == Block().__dict__.keys()
            return second(first(x) + other(x).detach() + pickle.loads(pickle.dumps(other))(x).detach())
        if self.how == "by hand":  # copies of a part's dictionary
            other: Any = object.__new__(Block)
            other.__dict__.update(first.__dict__)
            other._parameters, other._modules = dict(first._parameters), {k: copy.deepcopy(m) for k, m in first._modules.items()}
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(2)
            again = first._replicate_for_data_parallel()
            again._modules = dict(other._modules)
            self.kept = [other]
            return second(first(x) + other(x).detach() + again(x).detach())
        if self.how == "forward":
            return second.forward(first(x))
        if self.how == "class":
            return Block.forward(second, first(x))
        if self.how == "in place":
            x = first(x)
            x += 1
            y = second(x)
            y[:, 0].mul_(2)
            return y.transpose(0, 1).contiguous().transpose(0, 1)
        if self.how == "gradient":
            x = x.detach().requires_grad_()
            g = torch.autograd.grad(second(first(x)).square().sum(), x, create_graph=True)[0]
            return x + g * second(x)
        if self.how == "frozen":
            second.requires_grad_(not second.norm.weight.requires_grad)
            return second(first(x))
        if self.how == "mode":
            first.train(not first.training)
            return second(first(x))
        if self.how == "compiled":
            if not hasattr(self, "made"):
                self.made = [torch.compile(first, backend="eager")]
            return second(self.made[0](x))
        if self.how == "jacobian":
            j = torch.func.jacrev(lambda y: first(y).sum((0, 1)))(x)
            return second(x) * j.square().sum()
        if self.how == "forward mode":
            return second(torch.func.jvp(first, (x,), (x,))[1])
        raise AssertionError(self.how)


WAYS = ["identity", "no_grad", "inference_mode", "autocast", "checkpoint", "checkpoint reentrant", "functional", "vmap", "deepcopy", "by hand",
        "forward", "class", "in place", "gradient", "frozen", "mode", "compiled", "jacobian", "forward mode"]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_parts_are_called_as_forward_likes(how: str) -> None:
    if how == "autocast":
        ours, eager = ORTModule(Around(how)), None
        truth = copy.deepcopy(ours.module)
        for k in range(3):
            a, b = ours(*batch(k)), truth(*batch(k))
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        assert played(ours)["blocks.0"] == 3
        return
    ours, eager = both(lambda: Around(how))
    if how == "forward mode":
        for k in range(4):
            close(ours(*batch(k)), eager(*batch(k)))
        return
    for k in range(4):
        step(ours, eager, *batch(k))
    counts = played(ours)
    assert counts.get("blocks.1" if how not in ("forward", "class") else "blocks.0", 0) >= (2 if how in ("frozen", "mode") else 3), counts


def test_masks_that_backward_draws_again() -> None:
    """A part inside of torch.utils.checkpoint is PyTorch's both times."""
    for how in ("checkpoint", "checkpoint reentrant"):
        ours, eager = both(lambda how=how: Around(how))
        for m in (ours, eager):
            m.blocks[0].drop.p = 0.5
        for k in range(3):
            for m in (ours, eager):
                torch.manual_seed(k)
                m.zero_grad()
                m(*batch(k)).backward()
            for p, q in zip(ours.parameters(), eager.parameters()):
                close(p.grad, q.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("looked", [False, True])
def test_a_checkpoint_around_it(reentrant: bool, looked: bool) -> None:
    """From the first call on forward and what backward computes again are the same, masks too."""
    ours = ORTModule(Net(0.5).double())
    if looked:  # calls without gradients are another kind
        with torch.no_grad():
            ours(*batch())
    seen: list[Tensor] = []
    ours.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    for k in range(3):
        torch.manual_seed(k)
        hold = torch.ones((), dtype=torch.float64, requires_grad=True)
        checkpoint(lambda h, k=k: ours(*batch(k)) * h, hold, use_reentrant=reentrant).backward()
        close(seen[-1], seen[-2])
    assert len(seen) == 6 and played(ours)["blocks.0"] >= 6


def test_hooks_get_the_module_itself() -> None:
    ours, eager = both()
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for i, m in enumerate((ours.module, eager)):
        part = m.blocks[0]

        def note(what: str, of: Any, i: int = i, part: Any = part) -> None:
            seen[i].append((what, of is part, type(of) is Block))

        part.register_forward_hook(lambda m, a, out, note=note: note("forward", m))
        part.register_forward_hook(lambda m, a, k, out, note=note: note("kwargs", m), with_kwargs=True, always_call=True)
        part.register_forward_pre_hook(lambda m, a, note=note: note("before", m))
        part.register_full_backward_hook(lambda m, gi, go, note=note: note("backward", m))
        part.register_full_backward_pre_hook(lambda m, go, note=note: note("backward before", m))
    for k in range(3):
        step(ours, eager, *batch(k))
    assert seen[0] == seen[1] and len(seen[0]) == 15 and all(ok and same for _, ok, same in seen[0])


def test_hooks_on_parts_and_inside() -> None:
    ours, eager = both()
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for i, m in enumerate((ours, eager)):
        for part in (m.blocks[0], m.blocks[1].up, m.head):
            part.register_forward_hook(lambda m, a, out, i=i: seen[i].append((type(m).__name__, out.detach().clone())))
        m.blocks[1].register_full_backward_hook(lambda m, gi, go, i=i: seen[i].append(("gradient", go[0].clone())))
        m.blocks[1].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    for k in range(4):
        step(ours, eager, *batch(k))
    assert len(seen[0]) == len(seen[1]) == 16
    for (a, x), (b, y) in zip(*seen.values()):
        assert a == b
        close(x, y)


class Leaves(Block):
    """A part that leaves something behind, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.also: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        y = super().forward(x)
        self.penalty = y.square().mean()
        self.also.append(y.abs().mean())
        return y - self.mean


class Leaving(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Leaves()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.blocks[0].also.clear()
        loss = super().forward(ids, labels)
        return loss + self.blocks[0].penalty + self.blocks[0].also[-1] + self.blocks[0].mean.sum()


def test_what_parts_leave_behind() -> None:
    ours, eager = both(Leaving)
    for k in range(5):
        step(ours, eager, *batch(k))
    assert played(ours)["blocks.1"] == 5


def test_batch_norm_and_tied_weights() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(6, 6)))
            self.blocks[2][3].weight = self.blocks[2][0].weight
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.head.weight = self.embed.weight

    ours, eager = both(Tied)
    for k in range(4):
        step(ours, eager, *batch(k))
    for m in (ours, eager):
        m.eval()
    step(ours, eager, *batch())
    step(ours, eager, *batch())
    assert played(ours)["blocks.2"] == 6


class Inner(nn.Module):
    """A part whose forward cannot be captured either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[order(x)])


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Block(), Inner(), Inner()])


def test_parts_of_parts(caplog: Any) -> None:
    ours, eager = both(Nested)
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        for k in range(5):
            step(ours, eager, *batch(k))
    assert played(ours) == {name: 5 for name in ("blocks.0.a", "blocks.0.b", "blocks.1", "blocks.2.a", "blocks.2.b", "blocks.3.a", "blocks.3.b")}
    report = ours.report()
    assert [(p.name, p.reason) for p in report.parts][:3] == [("blocks.0", "by its parts"), ("blocks.0.a", ""), ("blocks.0.b", "")]
    assert {(e.module, e.calls, e.by_parts) for e in report.eager} == {("", 5, 5), *[(f"blocks.{k}", 5, 5) for k in (0, 2, 3)]}
    assert sum("Inner: PyTorch runs forward" in r.getMessage() for r in caplog.records) == 1  # of three alike


class Outer(nn.Module):
    """What cannot be captured lies one level down (a LightningModule, a criterion around a model)."""

    def __init__(self, most: bool = True) -> None:
        super().__init__()
        self.p = Inner()
        self.rest = nn.ModuleList([Block() for _ in range(1 if most else 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.p(x)
        for block in self.rest:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("most", [True, False])
def test_most_of_a_module_is_not_kept_as_a_whole(most: bool) -> None:
    ours, eager = both(lambda: Outer(most))
    for _ in range(4):
        step(ours, eager, torch.randn(3, 5, 6).double())
    kept = [h.name for h in ours.report().host]
    if most:
        assert played(ours) == {"p.a": 4, "p.b": 4, "rest.0": 4} and not kept
    else:
        assert played(ours) == {"": 4} and kept == ["p"]


def test_hooks_in_what_is_called_as_a_whole() -> None:
    """A graph of nothing but calls between its parts has a report, too."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Sequential(nn.Linear(6, 6), Sorts())

        def forward(self, x: Tensor) -> Tensor:
            return self.p(x)  # type: ignore[no-any-return]

    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[order(x)]

    ours, eager = both(Around)
    for m in (ours, eager):
        m.p[0].register_forward_hook(lambda m, a, out: out * 2)
    for _ in range(4):
        step(ours, eager, torch.randn(3, 5, 6).double())
    assert str(ours.report())


def test_small_parts_stay_in_pytorch(caplog: Any) -> None:
    class Small(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.0), nn.Identity(), nn.Linear(6, 6)), nn.Linear(6, 6)])

    ours, eager = both(Small)
    for k in range(3):
        step(ours, eager, *batch(k))
    assert not ours.report().parts and not ours.report().graphs and ours.report().eager[0].by_parts == 0
    assert [r.getMessage() for r in caplog.records if "Small runs in PyTorch: " in r.getMessage()]


def test_what_forbids_parts() -> None:
    for option in ({"strict": True}, {"min_coverage": 0.5}, {"fallback_policy": FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE}):
        with pytest.raises(Exception, match="numpy"):
            ORTModule(Net(), **option)(*batch())
    for option in ({"memory_budget": "1 GB"}, {"fallback_policy": FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL}):
        ours = ORTModule(Net(), **option)
        for _ in range(3):
            ours(*batch()).backward()
        assert not ours.report().graphs and not ours.report().parts
    off = ORTModule(Net(), disable=True)
    off(*batch())
    off(*batch())
    assert not off.report().graphs


def test_a_tree_that_changes() -> None:
    ours, eager = both()
    for k in range(2):
        step(ours, eager, *batch(k))
    for m in (ours.module, eager):
        torch.manual_seed(5)
        m.blocks[1] = Block().double()  # the same to look at
    for k in range(2):
        step(ours, eager, *batch(k))
    for m in (ours.module, eager):
        torch.manual_seed(6)
        m.blocks.append(Block().double())
    for k in range(3):
        step(ours, eager, *batch(k))
    for m in (ours, eager):
        m.blocks[0].requires_grad_(False)
        m.blocks[1].eval()
    for k in range(3):
        step(ours, eager, *batch(k))
    counts = played(ours)
    assert counts["blocks.0"] == 10 and counts["blocks.2"] == 6, counts


def test_parts_that_were_replaced_may_go() -> None:
    ours, _ = both()
    gone = []
    for k in range(12):
        ours.module.blocks[1] = Block().double()
        gone.append(weakref.ref(ours.module.blocks[1]))
        for _ in range(2):
            ours(*batch(k)).backward()
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 6 and len(ours.report().graphs) == 2


def test_kinds_of_calls_without_end(caplog: Any) -> None:
    """Targets that are another structure at every call: after some, nothing is tried in vain."""

    class Detects(Net):
        def forward(self, ids: Tensor, targets: list[dict[str, Any]]) -> Tensor:
            x = self.middle(self.embed(ids))
            x = self.head(x[order(x)]).mean()
            return sum(x * t["area"] + t["boxes"].sum() for t in targets)  # type: ignore[return-value]

    ours, eager = both(Detects)
    for k in range(12):
        step(ours, eager, batch(k)[0], [{"area": 1.5 + k, "boxes": torch.ones(1 + i, 4), "name": f"{k}.jpg"} for i in range(1 + k % 3)])
    (told,) = ours.report().eager
    assert (told.calls, told.by_parts) == (12, 12) and sum(f.count for f in ours.report().failed) == 4
    assert played(ours)["blocks.0"] == 12 and len(ours._ortmodule.entries) == 4


def test_exceptions_leave_nothing() -> None:
    ours, eager = both()
    for k in range(2):
        step(ours, eager, *batch(k))
    for m in (ours, eager):
        with pytest.raises((IndexError, RuntimeError)):
            m(batch()[0] + 20, batch()[1])
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            m(batch()[0], batch()[1][:1])
    assert all(m.__dict__.keys() == n.__dict__.keys() for m, n in zip(ours.modules(), eager.modules()))
    step(ours, eager, *batch(1))


def test_copies_and_files() -> None:
    ours, eager = both()
    for k in range(2):
        step(ours, eager, *batch(k))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        other = copy.deepcopy(eager)
        for _ in range(2):
            step(twin, other, *batch(1))
        assert played(twin) == {"blocks.0": 2, "blocks.1": 2}
    alive = weakref.ref(ours.module)
    del ours, twin
    gc.collect()
    assert alive() is None


def test_wrapped_parts_stay_what_they_are() -> None:
    ours, eager = both()
    own = ours.module.blocks[1] = ORTModule(ours.module.blocks[1])
    for k in range(3):
        step(ours, eager, *batch(k))
    assert ours.module.blocks[1] is own and own.report().graphs[0].forwards >= 2
    assert [p.reason for p in ours.report().parts if p.name == "blocks.1"] == ["it is an ORTModule already, with a report of its own"]


def test_torchscript_inside() -> None:
    class Scripted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.middle(self.embed(ids))).flatten(0, 1), labels.flatten())

    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Scripted().double())
    ours, eager = ORTModule(made[0]), made[1]
    for k in range(3):
        step(ours, eager, *batch(k))
    assert played(ours) == {"blocks.0": 3, "blocks.1": 3}
    assert [p.reason for p in ours.report().parts] == ["", "", "it is TorchScript"]


def test_several_threads() -> None:
    """Forwards of several threads, and a part that another thread calls meanwhile."""
    ours, eager = both()
    for k in range(2):
        step(ours, eager, *batch(k))
    want = [eager(*batch(k)).detach() for k in range(4)]
    x = torch.randn(2, 5, 6).double()
    part = eager.blocks[0](x).detach()
    wrong: list[Any] = []

    def work(k: int) -> None:
        try:
            for _ in range(10):
                close(ours(*batch(k)).detach(), want[k])
                close(ours.module.blocks[0](x).detach(), part)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong, wrong
    assert all(m.__dict__.keys() == n.__dict__.keys() for m, n in zip(ours.modules(), eager.modules()))


def test_second_derivatives() -> None:
    ours, eager = both()
    for k in range(4):
        got = []
        for m in (ours, eager):
            p = [*m.parameters()]
            g = torch.autograd.grad(m(*batch(k)), p, create_graph=True)
            got.append(torch.autograd.grad(sum(x.square().sum() for x in g), p))
        for a, b in zip(*got):
            close(a, b)


def test_memory_of_a_step_and_profile() -> None:
    ours, _ = both()
    for k in range(3):
        ours(*batch(k)).backward()
    profile = ours.profile(lambda: ours(*batch()).backward(), steps=2)
    assert {row.what for row in profile.rows} and ours.memory_timeline() is not None
    with pytest.raises(CaptureError):
        ORTModule(Net(), strict="engine")(*batch())


def test_the_time_for_captures_is_shared() -> None:
    ours, eager = both(Nested, capture_seconds=1e-6)
    for k in range(4):
        step(ours, eager, *batch(k))
    assert not ours.report().graphs


def test_hidden_states_of_a_transformer() -> None:
    """Hooks by which Hugging Face's models collect hidden states reach from the outer forward into the parts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                                     max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip

    class Probing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config)
            self.blocks = nn.ModuleList([Block(16)])

        def forward(self, ids: Tensor) -> Tensor:
            out = self.bert(ids, output_hidden_states=True)
            x = sum(h * (k + 1) for k, h in enumerate(out.hidden_states))
            return self.blocks[0](x[order(x)]).square().mean() + out.pooler_output.sum()

    ours, eager = both(Probing)
    for k in range(4):
        step(ours, eager, torch.randint(0, 50, (2, 7 + k)))
    assert played(ours)["bert"] == 4
