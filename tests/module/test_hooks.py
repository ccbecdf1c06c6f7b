"""Hooks on submodules, against eager PyTorch in fp64: what they see is a live part of the autograd graph, they run as
often and in the same order, and what stands between them stays in the engine."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ortmodule import ORTModule
from ortmodule.capture import marks
from ortmodule.errors import CaptureError


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Block(nn.Module):
    """A residual block: a value goes around the hooked submodules."""

    def __init__(self, n: int, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(n, n)
        self.norm = nn.LayerNorm(n)
        self.act = nn.ReLU(inplace)
        self.second = nn.Linear(n, n)

    def forward(self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
        h = self.second(self.act(self.norm(self.first(x)))) * scale
        return x + (h if bias is None else h + bias)


class Net(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.a = Block(7, inplace)
        self.b = Block(7)
        self.bn = nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        h = self.a(h, bias=h * 0.1)
        h = self.bn(self.b(h, 2.0))
        return self.out(self.b(h).tanh())  # b twice


def values(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        return [values(y) for y in x]
    return {k: values(v) for k, v in x.items()} if isinstance(x, dict) else x


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a - b).abs().max() <= 1e-10 * (1 + b.abs().max()))
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


Log = list[Any]


Use = Callable[[Any, Tensor, Tensor, Log], None]


def run(model: Any, install: Callable[[Any, Log], Any], uses: Sequence[Use], steps: int, late: bool) -> list[Any]:
    """Steps with plain SGD, uses in turn: everything that can be seen."""
    seen: list[Any] = []
    log: Log = []
    if not late:
        install(model, log)
    for step in range(steps):
        if late and step == 1:
            install(model, log)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model.zero_grad()
        log.clear()
        out = model(x)
        if late and step == 0:
            out.square().sum().backward()
        else:
            uses[step % len(uses)](model, x, out, log)
        seen.append([values(out), values(x.grad), [values(e) for e in log], [values(p.grad) for p in model.parameters()],
                     [values(b) for b in model.buffers()]])  # fmt: skip
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.02 * p.grad / (1 + p.grad.norm())
    return seen


def plain(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    out.square().sum().backward()


def check(install: Any, *uses: Use, make: Callable[[], nn.Module] = Net, steps: int = 4, late: bool = False, whole: str = "",
          **options: Any) -> Any:  # fmt: skip
    """whole: why the module must run in PyTorch; else it must not."""
    eager = make()
    ours = ORTModule(copy.deepcopy(eager), **options)
    want, got = (run(m, install, uses or [plain], steps, late) for m in (eager, ours))
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        for what, p, q in zip(("output", "gradient of x", "log", "gradients", "buffers"), a, b, strict=True):
            assert same(p, q), f"step {step} ({uses[step % len(uses)].__name__ if uses else ''}): {what}"
    report = ours.report()
    if whole:
        assert whole in str(report), str(report)
    else:
        assert not report.eager and all(h.kind == "module" for h in report.host), str(report)
        assert report.graphs[-1].forwards >= steps - 2, str(report)
    return ours


def keep(*names: str) -> Callable[[Any, Log], None]:
    """Forward hooks that append the output."""
    def install(model: Any, log: Log) -> None:
        for name in names:
            model.get_submodule(name).register_forward_hook(lambda m, args, out: log.append(out))

    return install


# --- what is done with a feature ------------------------------------------------------------------


def feature_only(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    log[-1].square().sum().backward()


def feature_and_output(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    (out.square().sum() + sum(f.square().sum() for f in log)).backward()


def grad_cam(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    feature = log[0]
    log.append(torch.autograd.grad(out.square().sum(), feature, retain_graph=True)[0])
    out.sum().backward()


def between_features(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    log.append(torch.autograd.grad(log[-1].square().sum(), log[0], retain_graph=True)[0])
    out.sum().backward()


def retain_grad(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    for f in log:
        f.retain_grad()
    out.square().sum().backward()
    log.extend([f.grad for f in log])


def tensor_hook(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    got: list[Tensor] = []
    log[0].register_hook(lambda g: (got.append(g), g * 3)[1])
    out.square().sum().backward()
    log.extend(got)


def detached(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    (out.sum() * log[0].detach().square().sum()).backward()


def second_order(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    (g,) = torch.autograd.grad(out.square().sum() + log[0].square().sum(), x, create_graph=True)
    g.square().sum().backward()


def through_feature(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    (g,) = torch.autograd.grad(out.square().sum(), log[0], create_graph=True)
    g.square().sum().backward()


def two_passes(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
    log[0].square().sum().backward(retain_graph=True)
    out.sum().backward()


USES = (feature_only, feature_and_output, grad_cam, between_features, retain_grad, tensor_hook, detached, second_order, through_feature,
        two_passes)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"segment_mb": 1e-5, "memory_opt_level": 1}], ids=["", "segments"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "later"])
def test_features_are_a_live_part_of_the_graph(late: bool, options: Any) -> None:
    """a.norm is inside of a, b is called twice."""
    check(keep("a.norm", "a", "b"), *USES, *USES, steps=2 * len(USES), late=late, **options)


# --- hooks that do something ----------------------------------------------------------------------


def replaces(model: Any, log: Log) -> None:
    model.a.register_forward_hook(lambda m, args, out: out * 2 + args[0])
    model.b.second.register_forward_hook(lambda m, args, out: (log.append(out), out.tanh())[1])


def in_place(model: Any, log: Log) -> None:
    def f(m: Any, args: Any, out: Tensor) -> None:
        log.append(out)
        out.mul_(2).add_(1)

    model.a.register_forward_hook(f)


def in_place_arguments(model: Any, log: Log) -> None:
    """The residual of the block sees the edit."""
    model.b.register_forward_pre_hook(lambda m, args: (log.append(args[0]), args[0].mul_(1.5), None)[2])


def pre_hooks(model: Any, log: Log) -> None:
    model.a.register_forward_pre_hook(lambda m, args: (log.append(args[0]), args[0] * 2)[1])
    model.a.register_forward_pre_hook(lambda m, args: (log.append(args[0]), None)[1])
    model.out.register_forward_pre_hook(lambda m, args: (args[0] + 1,))


def with_kwargs(model: Any, log: Log) -> None:
    model.a.register_forward_pre_hook(lambda m, args, kwargs: (args, {**kwargs, "bias": kwargs["bias"] * 3}), with_kwargs=True)
    model.a.register_forward_hook(lambda m, args, kwargs, out: (log.append([args, kwargs]), out + kwargs["bias"])[1], with_kwargs=True)


def many(model: Any, log: Log) -> None:
    """Order over several modules, prepend and always_call."""
    for name, m in model.named_modules():
        if name:
            m.register_forward_pre_hook(lambda m, args, n=name: log.append(f"pre {n}"))
            m.register_forward_hook(lambda m, args, out, n=name: log.append([f"post {n}", out]), always_call=True)
            m.register_forward_hook(lambda m, args, out, n=name: log.append(f"first {n}"), prepend=True)


def full_backward(model: Any, log: Log) -> None:
    for name in ("a", "b.second", "bn"):
        m = model.get_submodule(name)
        m.register_full_backward_pre_hook(lambda m, go, n=name: log.append([f"pre {n}", list(go)]))
        m.register_full_backward_hook(lambda m, gi, go, n=name: log.append([n, list(gi), list(go)]))


def changes_gradients(model: Any, log: Log) -> None:
    model.a.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
    model.b.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    model.b.register_forward_hook(lambda m, args, out: out * 2)


def detaches(model: Any, log: Log) -> None:
    model.a.register_forward_hook(lambda m, args, out: out.detach())


def computes_gradients(model: Any, log: Log) -> None:
    """The gradient of a module's output for its input, inside of the hook."""
    def f(m: Any, args: Any, out: Tensor) -> None:
        log.append(torch.autograd.grad(out.square().sum(), args[0], retain_graph=True)[0])

    model.b.register_forward_hook(f)


def reads_buffers(model: Any, log: Log) -> None:
    """Statistics are those of after the forward; what a hook does to them stays."""
    def f(m: Any, args: Any, out: Tensor) -> None:
        log.append(m.running_mean.clone())
        m.running_mean.data.mul_(0.5)

    model.bn.register_forward_hook(f)


def sets_attributes(model: Any, log: Log) -> None:
    def f(m: Any, args: Any, out: Tensor) -> None:
        m.feature = out
        m.calls = getattr(m, "calls", 0) + 1
        log.append(m.calls)

    model.a.register_forward_hook(f)


def without_gradients(model: Any, log: Log) -> None:
    """Frozen layers, and a hook that asks for gradients, as PEFT's does behind frozen embeddings."""
    model.b.register_forward_pre_hook(lambda m, args: log.append(torch.is_grad_enabled()))
    model.inp.requires_grad_(False)
    model.inp.register_forward_pre_hook(lambda m, args: args[0].detach())
    model.inp.register_forward_hook(lambda m, args, out: (log.append(out.requires_grad), out.requires_grad_(True))[1])
    model.a.requires_grad_(False)


SET = (replaces, in_place, in_place_arguments, pre_hooks, with_kwargs, many, full_backward, changes_gradients, detaches, computes_gradients,
       reads_buffers, sets_attributes, without_gradients)  # fmt: skip


@pytest.mark.parametrize("install", SET, ids=lambda f: f.__name__)
def test_what_hooks_do(install: Any) -> None:
    check(install)


@pytest.mark.parametrize("install", [full_backward, pre_hooks, with_kwargs], ids=lambda f: f.__name__)
def test_hooks_added_later(install: Any) -> None:
    check(install, late=True)


@pytest.mark.parametrize("names", [("a.norm",), ("a.act",), ("a.norm", "a.act", "a.second")], ids="+".join)
def test_edits_in_place_after_a_hook(names: Any) -> None:
    """ReLU(inplace=True) changes the tensor that the hook before it has kept."""
    check(keep(*names), plain, feature_and_output, retain_grad, make=lambda: Net(inplace=True), steps=6)


# --- what forward does around hooks ---------------------------------------------------------------


class Seq(nn.Module):
    """Small, so that a test is quick."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layers or (nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * 2).sin()


class NoGrad(Seq):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        with torch.no_grad():
            g = self.layers[1](h)
        return self.layers[2](h.exp() * g + g)


class Autocast(Seq):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            h = self.layers[0](x)
        return self.layers[2](self.layers[1](h))


class Branches(nn.Module):
    """Forward looks at values: this module stays in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return h * 2 if int(h.sum() > 0) else h * 3


class Pair(nn.Module):
    """A tuple, a tensor twice, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor, *, more: dict[str, Tensor]) -> Any:
        assert x is y
        h = self.lin(x + y)
        return h, [h, h * 2], {"sum": h.sum(), "more": more["x"].tanh()}


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        h, (p, q), d = self.pair(x, x, more={"x": x})
        assert h is p
        return h * q + d["sum"] + d["more"].sum()


class Stores(nn.Module):
    """Forward reads what a hook has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)
        self.kept: dict[str, Tensor] = {}
        self.first.register_forward_hook(self.keep)

    def keep(self, m: Any, args: Any, out: Tensor) -> None:
        self.kept["first"] = out

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        return h * self.kept["first"]


class Edits(Seq):
    """In-place edits around hooked submodules, of a value that has other names."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.layers[0](x))
        k = self.layers[1](h)  # Identity: k is h
        k.mul_(2)
        h = h + 1
        v = h.view(-1)
        v.add_(1)
        return self.layers[2](h + k)


def test_structures() -> None:
    def install(model: Any, log: Log) -> None:
        model.pair.register_forward_hook(lambda m, args, kwargs, out: log.append([args, kwargs, out]), with_kwargs=True)
        model.pair.register_forward_hook(lambda m, args, out: (out[0], [out[0], out[1][1] + 1], out[2]))

    check(install, make=Structured)


def test_one_of_two_places_replaced() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b.tanh()

    class Twice(Seq):
        def forward(self, x: Tensor) -> Tensor:
            h = self.layers[0](x)
            return self.layers[1](h, h).tanh()  # type: ignore[no-any-return]

    def install(model: Any, log: Log) -> None:
        model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 2, args[1]))
        model.layers[1].register_forward_hook(lambda m, args, out: log.append(list(args)))

    check(install, make=lambda: Twice(nn.Linear(5, 6), Product()))


@pytest.mark.parametrize("make", [NoGrad, Autocast], ids=lambda f: f.__name__)
def test_regions(make: Any) -> None:
    def install(model: Any, log: Log) -> None:
        for m in model.layers:
            m.register_forward_pre_hook(lambda m, args: log.append([torch.is_grad_enabled(), args[0].requires_grad, args[0]]))
            m.register_forward_hook(lambda m, args, out: log.append([torch.is_grad_enabled(), out.requires_grad, out]))

    check(install, make=make)


class Beside(Seq):
    """What is computed from a value before a hook sees that value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        beside = h.exp()
        return self.layers[2](self.layers[1](h) * beside)


def test_gradients_of_what_a_hook_sees_go_all_ways() -> None:
    def install(model: Any, log: Log) -> None:
        model.layers[1].register_forward_hook(lambda m, args, out: log.append(args[0]))
        model.layers[2].register_forward_pre_hook(lambda m, args: log.append(args[0]))

    check(install, grad_cam, retain_grad, between_features, make=Beside, steps=5)


def test_identity_edited_in_place() -> None:
    check(keep("layers.1"), make=lambda: Edits(nn.Linear(5, 6), nn.Identity(), nn.Linear(6, 3)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_without_grad(mode: Any) -> None:
    def install(model: Any, log: Log) -> None:
        model.eval()
        keep("a", "b.act")(model, log)

    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    logs: list[Log] = [[], []]
    for model, log in zip((eager, ours), logs, strict=True):
        install(model, log)
        for step in range(3):
            with mode():
                log.append(model(torch.ones(2, 5) * step))
    assert same([values(x) for x in logs[0]], [values(x) for x in logs[1]])
    assert [x.requires_grad for x in logs[1]] == [False] * len(logs[1]) and not ours.report().eager


def test_sizes_that_change() -> None:
    eager = Seq()
    ours = ORTModule(copy.deepcopy(eager))
    logs: list[Log] = [[], []]
    for model, log in zip((eager, ours), logs, strict=True):
        keep("layers.0", "layers.1")(model, log)
        for n in (3, 4, 5, 7, 3):
            x = torch.arange(5.0 * n).view(n, 5).requires_grad_()
            (model(x).sum() + log[-1].square().sum()).backward()
            log.append(x.grad)
    assert same([values(x) for x in logs[0]], [values(x) for x in logs[1]])
    assert [g.dynamic for g in ours.report().graphs] == [False, True], str(ours.report())


def test_submodule_that_stays_in_pytorch() -> None:
    """The ladder keeps it; hooks on it and inside of it fire there, on live tensors."""
    def use(model: Any, x: Tensor, out: Tensor, log: Log) -> None:
        (out.sum() + sum(f.square().sum() for f in log)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = check(keep("layers.1.inner", "layers.2"), use, make=lambda: Seq(nn.Linear(5, 6), Branches(), nn.Linear(6, 3)))
    assert "cut at layers.1: called in PyTorch" in str(ours.report()) and "cut at layers.2: forward hook" in str(ours.report())


def test_hooks_that_make_weights() -> None:
    """weight_norm and spectral_norm of old, and pruning, compute the weight in a pre-hook."""
    def install(model: Any, log: Log) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(model.layers[2])
            prune.l1_unstructured(model.layers[0], "weight", amount=3)

    check(install, make=Seq)


def test_layers_beside_such_hooks_stay_in_the_engine() -> None:
    """Two that cannot be captured speak for the others of their class that have hooks, not for those that have none."""
    def install(model: Any, log: Log) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in (0, 1, 3):
                nn.utils.weight_norm(model.layers[i])

    ours = check(install, make=lambda: Seq(*(nn.Linear(n, m) for n, m in ((5, 6), (6, 6), (6, 6), (6, 6), (6, 3)))))
    assert {h.name for h in ours.report().host} == {"layers.0", "layers.1", "layers.3"}


def test_old_backward_hooks() -> None:
    def install(model: Any, log: Log) -> None:
        model.layers[1].register_backward_hook(lambda m, gi, go: log.append([list(gi), list(go)]))

    check(install, make=Seq)


def test_dropout_between_hooks() -> None:
    """The mask that the forward drew is the backward's."""
    m = ORTModule(nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Tanh()))
    log: Log = []
    m[0].register_forward_hook(lambda m, args, out: log.append(out))
    m[1].register_forward_hook(lambda m, args, out: log.append(out))
    for _ in range(3):
        log.clear()
        out = m(torch.randn(4, 5))
        g = torch.autograd.grad(out.sum(), log)
        assert torch.allclose(g[1], 1 - out.square()) and torch.allclose(g[0], torch.where(log[1] == 0, 0.0, 2.0) * g[1])
        assert 0.2 < (log[1] == 0).double().mean() < 0.8
    assert m.report().graphs[-1].forwards == 2


# --- refusals and errors --------------------------------------------------------------------------


def test_other_sizes_go_to_pytorch() -> None:
    def install(model: Any, log: Log) -> None:
        model.layers[0].register_forward_hook(lambda m, args, out: (log.append(1), torch.cat([out, out]))[1])

    check(install, make=Seq, whole="a hook on layers.0 gives tensors of another structure or size")


def test_what_forward_reads_goes_to_pytorch() -> None:
    check(lambda model, log: None, make=Stores, whole="take part in what forward returns")


def test_checkpoint_runs_hooks_twice() -> None:
    class Checkpointed(Seq):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    def install(model: Any, log: Log) -> None:
        model.layers[0].register_forward_hook(lambda m, args, out: log.append(out))

    check(install, make=Checkpointed, whole="checkpoint")


def test_too_many_hooks_go_to_pytorch(monkeypatch: Any) -> None:
    monkeypatch.setattr(marks, "MOST", 2)

    def install(model: Any, log: Log) -> None:
        for m in model.layers:
            m.register_forward_hook(lambda m, args, out: log.append(out))

    check(install, make=Seq, whole="more than 2 times")


def test_a_hook_that_changes_its_mind() -> None:
    """It has run, so the call cannot begin again: an error, by name; then PyTorch."""
    m = ORTModule(Seq())
    calls: list[int] = []
    m.layers[0].register_forward_hook(lambda m, args, out: (calls.append(1), out[:2] if len(calls) == 3 else None)[1])
    x = torch.randn(4, 5)
    for _ in range(2):
        m(x).sum().backward()
    with pytest.raises(RuntimeError, match="a hook on layers.0 gives tensors of another structure or size"):
        m(x)
    want = m.module.forward(x)
    assert torch.equal(m(x), want) and len(calls) == 5 and "another structure" in str(m.report())


class Keeps(nn.Module):
    """Returns as many rows as a mask lets through, and counts its calls, so that it stays in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 4)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return self.line(x)[mask].reshape(x.shape[0], -1, 4)


class MeansOfKept(nn.Module):
    def __init__(self, hooked: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.keeps = Keeps()
        self.last = nn.Linear(4, 4)
        self.get_submodule(hooked).register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.last(self.keeps(self.first(x), mask))
        return h.tanh().sum() / h.shape[1]


@pytest.mark.parametrize("hooked", ["first", "keeps.line", "last"])
def test_a_kept_module_that_returns_other_sizes(hooked: str) -> None:
    """The rest divided by the number of rows of the capture. Behind a hook that has run it is an error, once."""
    eager = MeansOfKept(hooked)
    wrapped = ORTModule(copy.deepcopy(eager))
    said = 0
    for rows in (3, 3, 5, 2, 3):
        x, mask = torch.randn(2, 8, 5), torch.zeros(2, 8, dtype=torch.bool)
        mask[:, :rows] = True
        want = eager(x, mask)
        eager.zero_grad(), wrapped.zero_grad()
        want.backward()
        try:
            got = wrapped(x, mask)
        except RuntimeError as e:
            assert "returns other sizes" in str(e) and "Later calls run in PyTorch" in str(e)
            said += 1
            continue
        got.backward()
        torch.testing.assert_close(got, want)
        for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        assert wrapped.keeps.calls == eager.keeps.calls, "it has run once a step"
    assert said == (hooked == "first")
    assert wrapped.report().graphs


def test_a_hook_that_changes_what_forward_reads() -> None:
    """At once: the module runs in PyTorch. Later: an error, by name, for the graph has computed with the old value."""
    class Scaled(Seq):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * self.scale

    def install(model: Any, log: Log, first: int = 0) -> None:
        def f(m: Any, args: Any, out: Tensor) -> None:
            log.append(1)
            if len(log) > first:
                model.scale += 1

        model.layers[1].register_forward_hook(f)

    check(install, make=Scaled, whole="hooks on submodules change self.scale")
    m, x = ORTModule(Scaled()), torch.randn(4, 5)
    install(m, [], 2)
    m(x), m(x)
    with pytest.raises(RuntimeError, match="hooks on submodules change scale, which forward reads"):
        m(x)
    out = m(x)
    assert m.scale == 4.0 and torch.equal(out, m.module.layers(x) * 4.0)


def test_a_hook_that_raises() -> None:
    def outcome(model: Any) -> list[Any]:
        log: Log = []

        def fails(m: Any, args: Any, out: Tensor) -> None:
            log.append("fails")
            if len(log) in (1, 7):
                raise KeyError("mine")

        model.layers[1].register_forward_hook(fails)
        model.layers[1].register_forward_hook(lambda m, args, out: log.append(["always", values(out)]), always_call=True)
        for _ in range(5):
            try:
                out = model(torch.ones(2, 5))
                model.zero_grad()
                out.sum().backward()
                log.append([values(p.grad) for p in model.parameters()])
            except KeyError as e:
                log.append(str(e))
        return log

    eager = Seq()
    ours = ORTModule(copy.deepcopy(eager))
    assert same(outcome(eager), outcome(ours))
    assert not ours.report().eager


# --- captures -------------------------------------------------------------------------------------


def test_hooks_that_come_and_go() -> None:
    """Another hook in the same place needs no new capture; none at all is the graph without cuts."""
    m, x = ORTModule(Seq()), torch.randn(4, 5)
    log: Log = []
    for step in range(6):
        handle = m.layers[0].register_forward_hook(lambda m, args, out, step=step: log.append(step))
        m(x).sum().backward()
        handle.remove()
    assert log == list(range(6)) and m.report().n_captures == 1
    m(x)
    m(x)
    assert log == list(range(6)) and [len(g.cuts) for g in m.report().graphs] == [1, 0]


def test_hooks_that_come_and_go_within_a_call(caplog: Any) -> None:
    """A hook for one call removes itself: nothing can be captured of a call that has one."""

    def put(model: Any, log: Log) -> None:
        def hook(*seen: Any) -> None:
            handle.remove()
            log.append(seen[-1].sum().item())

        handle = model.layers[0].register_forward_hook(hook)

    log: tuple[Log, Log] = [], []
    eager = Seq()
    ours, x = ORTModule(copy.deepcopy(eager)), torch.randn(4, 5)
    for _ in range(3):
        for m, seen in zip((ours, eager), log):
            put(m, seen)
            m(x).sum().backward()
    assert log[0] == log[1] and len(log[0]) == 3
    (told,) = ours.report().eager
    assert (told.calls, told.reason) == (3, "hooks on submodules come or go while forward runs")
    assert [r.getMessage() for r in caplog.records] == [f"Seq runs in PyTorch: {told.reason}"]
    ours(x).sum().backward()
    assert ours.report().n_captures == 1 and told.calls == 3

    strict = ORTModule(Seq(), strict=True)
    put(strict, [])
    strict(x)  # once is no matter
    put(strict, [])
    with pytest.raises(CaptureError, match="hooks on submodules come or go while forward runs"):
        strict(x)


def test_nothing_is_kept() -> None:
    """Features die with the step, and what hooks put on modules is replaced, without the collector's help."""
    import gc
    import weakref

    m, x = ORTModule(Seq()), torch.randn(4, 5)
    refs: list[Any] = []

    def keeps(m: Any, args: Any, out: Tensor) -> None:
        m.feature = out
        refs.append(weakref.ref(out))

    m.layers[0].register_forward_hook(keeps)
    m.layers[1].register_full_backward_hook(lambda m, gi, go: None)
    m(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            m(x).sum().backward()
        assert [r() is not None for r in refs[-4:]] == [False, False, False, True]
    finally:
        gc.enable()
    assert m.report().n_captures == 1
