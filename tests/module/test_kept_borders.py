"""What code that stays in PyTorch does beside taking tensors and returning them: it uses what it was not given, fills
what it was given, reads and writes what the code around it writes and reads. Nothing of that may be lost."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close, same_state
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ortmodule import ORTModule


class Kept(nn.Module):
    """Keeps a log, so that it stays in PyTorch."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.log: list[int] = []
        self.body = body
        self.around: list[Any] = []

    def forward(self, *args: Any) -> Any:
        self.log.append(1)
        return self.body(self, *args)


class Net(nn.Module):
    """held: what has the kept module: nothing, or a list or sequence that forward walks through itself."""

    def __init__(self, body: Callable[..., Any], around: Callable[..., Tensor], held: Any = None) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        kept = Kept(body)
        kept.around = [self.other, self]
        self.layers = kept if held is None else held(kept)
        self.around = around

    @property
    def kept(self) -> Any:
        return self.layers if isinstance(self.layers, Kept) else self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, x)


class Skips:
    h: Tensor


def put(skips: Any, h: Tensor) -> Tensor:
    if isinstance(skips, list):
        skips.append(h)
    elif isinstance(skips, dict):
        skips["h"] = h
    else:
        skips.h = h
    return h.tanh()


def decay(p: Tensor, by: float = 0.9) -> None:
    with torch.no_grad():
        p.mul_(by)


def averaged(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.mul_(0.9).add_(x.detach().mean(0))
    return x


def filled(n: Net, x: Tensor, skips: Any, of: Callable[[Any], Tensor]) -> Tensor:
    y = n.kept(n.first(x), skips)
    return n.other(y) + of(skips)


def with_modes(n: Net, x: Tensor) -> Tensor:
    n.kept.eval()
    y = n.kept(n.first(x))
    n.kept.train()
    return y + n.kept(x)


def assigned(n: Net, x: Tensor) -> Tensor:
    n.kept.seen = x.mean(0)
    return n.kept(n.first(x))


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    # uses what it is not given as such
    "a module": (lambda k, x, f: f(k.line(x)), lambda n, x: n.kept(n.first(x), n.other)),
    "a bound method": (lambda k, x, f: f(k.line(x)), lambda n, x: n.kept(n.first(x), n.other.forward)),
    "a function": (lambda k, x, f: f(k.line(x)), lambda n, x: n.kept(n.first(x), lambda t: n.other(t))),
    "a tensor in a closure": (lambda k, x, f: f(k.line(x)), lambda n, x: (lambda h: n.kept(h, lambda t: t * h))(x)),
    "a size in a closure": (lambda k, x, f: f(k.line(x)), lambda n, x: (lambda s: n.kept(x, lambda t: t * s))(len(x))),
    "a size as a default": (lambda k, x, f: f(k.line(x)), lambda n, x: n.kept(x, lambda t, s=x.shape[0]: t / s)),
    "a partial": (lambda k, x, f: f(x) * k.scale, lambda n, x: n.kept(x, functools.partial(F.linear, weight=n.other.weight))),
    "a set": (lambda k, x, s: sum(s) * k.scale, lambda n, x: n.kept(n.first(x), {n.other(x)})),
    "a generator": (lambda k, x, g: sum(g) * k.scale, lambda n, x: n.kept(x, (t * 2 for t in [x, n.other(x)]))),
    "modules in a list": (lambda k, x, ms: sum(m(x) for m in ms), lambda n, x: n.kept(x, [n.first, n.other])),
    "a module beside it": (lambda k, x: k.around[0](k.line(x)), lambda n, x: n.kept(n.first(x)) + n.other(x)),
    "a parameter around it": (lambda k, x: k.around[1].weight * k.line(x), lambda n, x: n.kept(n.first(x))),
    "returns a function": (lambda k, x: (lambda h: lambda t: t * h)(k.line(x)), lambda n, x: n.kept(n.first(x))(x)),
    # fills what it is given
    "a list": (lambda k, x, s: put(s, k.line(x)), lambda n, x: filled(n, x, [x], lambda s: sum(s))),
    "a dictionary": (lambda k, x, s: put(s, k.line(x)), lambda n, x: filled(n, x, {"h": x}, lambda s: s["h"])),
    "an object": (lambda k, x, s: put(s, k.line(x)), lambda n, x: filled(n, x, Skips(), lambda s: s.h)),
    # writes what the code around it reads
    "its buffer, read later": (lambda k, x: averaged(k.seen, k.line(x)), lambda n, x: n.kept(x) + n.kept.seen * n.weight),
    "a buffer around it": (lambda k, x: averaged(k.around[1].mean, k.line(x)), lambda n, x: n.kept(x) + n.mean * n.weight),
    "its weight, read later": (
        lambda k, x: (decay(k.line.weight), k.line(x))[1], lambda n, x: n.kept(x) + F.linear(x, n.kept.line.weight)),
    "its parameter": (lambda k, x: (decay(k.scale), k.line(x) * k.scale)[1], lambda n, x: n.kept(n.first(x))),
    "its parameter's data": (lambda k, x: (k.scale.data.mul_(0.9), k.line(x) * k.scale)[1], lambda n, x: n.kept(x)),
    # reads what the code around it writes
    "its buffer, edited before": (lambda k, x: k.seen * k.line(x), lambda n, x: n.kept(averaged(n.kept.seen, x))),
    "its buffer, assigned before": (lambda k, x: k.seen * k.line(x), assigned),
    "a buffer, edited before": (lambda k, x: k.around[1].mean * k.line(x), lambda n, x: n.kept(averaged(n.mean, x))),
    "its parameter, edited before": (
        lambda k, x: k.line(x) * k.scale, lambda n, x: (decay(n.kept.scale), n.kept(n.first(x)))[1]),
    "a parameter it does not know": (lambda k, x: k.line(x), lambda n, x: (decay(n.weight), n.kept(x) * n.weight)[1]),
    "edited between two calls": (
        lambda k, x: averaged(k.seen, k.line(x) + k.seen.clone()), lambda n, x: (lambda y: n.kept(averaged(n.kept.seen, y)))(n.kept(x))),
    "its mode": (lambda k, x: k.line(x) * (2 if k.training else 3), with_modes),
}


def trained_alike(eager: nn.Module, sizes: tuple[int, ...] = (3, 3, 5, 4)) -> ORTModule:
    """Steps of the wrapper and of the module: outputs, gradients, and all that a state_dict holds."""
    ours = ORTModule(copy.deepcopy(eager), strict=False)
    for size in sizes:
        x = torch.randn(size, 4, dtype=torch.double)
        outputs = []
        for model in (eager, ours):
            model.zero_grad()
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
        close(outputs[1], outputs[0])
        same_state(ours, eager)
    return ours


HELD = [None, lambda kept: nn.ModuleList([kept]), nn.Sequential]
ROWS = [pytest.param(case, held, marks=[pytest.mark.full] * (held is nn.Sequential and i % 3 > 0)) for i, case in enumerate(CASES) for held in HELD]  # they take long


@pytest.mark.parametrize(("case", "held"), ROWS)
def test_nothing_is_lost_at_the_border(case: str, held: Any) -> None:
    torch.manual_seed(0)
    trained_alike(Net(*CASES[case], held).double())


def test_what_has_no_part_in_it_stays_in_the_engine() -> None:
    """A kept module with functions and edits of its own is no reason to leave the whole model to PyTorch."""
    for body, around in (
        (lambda k, x, f: f(k.line(x)), lambda n, x: n.other(n.kept(n.first(x), F.gelu))),
        (lambda k, x, f: f(k.line(x)), lambda n, x: n.other(n.kept(n.first(x), nn.ReLU()))),
        (lambda k, x: averaged(k.seen, k.line(x)), lambda n, x: n.other(n.kept(averaged(n.mean, n.first(x))))),
        CASES["its parameter"], CASES["its parameter's data"], CASES["a parameter it does not know"],
    ):
        ours = trained_alike(Net(body, around).double())
        assert "in PyTorch: layers" in str(ours.report()), ours.report()


class Again(torch.autograd.Function):
    """The checkpoint of research code: a function to run, and the tensor it is run on."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(h)
        with torch.no_grad():
            return run(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        h = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(h)
        torch.autograd.backward(out, grad)
        return None, h.grad


@pytest.mark.parametrize("what", ["nothing", "a tensor", "a detached value", "a size", "a buffer", "the mode"])
def test_a_function_given_to_a_custom_function(what: str) -> None:
    def around(n: Net, x: Tensor) -> Tensor:
        h, size, fixed = n.first(x), x.shape[0], n.other(x).detach()
        if what == "a buffer":
            averaged(n.mean, h)
        if what == "the mode":
            n.other.eval()
        y: Tensor = Again.apply({
            "nothing": lambda t: n.other(t), "a tensor": lambda t: n.other(t) * x,
            "a detached value": lambda t: n.other(t) * fixed, "a size": lambda t: n.other(t) / size,
            "a buffer": lambda t: n.other(t) * n.mean, "the mode": lambda t: n.other(t) * (2 + n.other.training),
        }[what], h)  # fmt: skip
        n.other.train()
        return y

    torch.manual_seed(0)
    eager = Net(lambda k, x: x, around).double()
    eager.layers = nn.Identity()
    ours = trained_alike(eager)
    assert (len(ours.report().graphs) > 0) == (what in ("nothing", "a size")), ours.report()


def test_an_edit_before_an_exception_is_made_once() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.line = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            decay(self.weight)
            if x.shape[0] == 3:
                raise ValueError("three")
            return self.line(x) * self.weight  # type: ignore[no-any-return]

    eager = nn.Sequential(Raises())
    ours = ORTModule(copy.deepcopy(eager), strict=False)
    for size in (2, 3, 4, 3, 2, 3):
        for model in (eager, ours):
            try:
                model(torch.ones(size, 4))
            except ValueError as error:
                assert size == 3 and str(error) == "three"
        torch.testing.assert_close(ours[0].weight, eager[0].weight)


@pytest.mark.parametrize("held", [None, lambda kept: nn.ModuleList([kept]), nn.Sequential])
def test_a_hooked_module_fills_a_list(held: Any) -> None:
    torch.manual_seed(0)
    eager = Net(*CASES["a list"], held).double()
    seen = []
    eager.kept.register_forward_hook(lambda m, a, o: seen.append(o.detach()))
    trained_alike(eager)
    assert len(seen) == 8
    torch.testing.assert_close(seen[1::2], seen[::2])


def test_hooks_on_layers_that_fill_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                                      vocab_size=32)  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.LlamaForCausalLM(config)
    features: list[Tensor] = []
    eager.model.layers[0].register_forward_hook(lambda m, a, o: features.append(o.detach()))
    ours = ORTModule(copy.deepcopy(eager))
    for size in (6, 6, 7):
        ids = torch.randint(0, 32, (2, size))
        results = [model(input_ids=ids, labels=ids) for model in (eager, ours)]
        torch.testing.assert_close(results[1].loss, results[0].loss)
        caches = [[(layer.keys, layer.values) for layer in r.past_key_values.layers] for r in results]
        torch.testing.assert_close(caches[1], caches[0])
    torch.testing.assert_close(features[1::2], features[::2])
    assert len(features) == 6 and ours.report().node_share == 1


def test_other_ways_to_reach_what_is_kept() -> None:
    """A method; a function that holds itself."""

    def holds_itself(n: Net, x: Tensor) -> Tensor:
        def f(t: Tensor, again: bool = True) -> Tensor:
            return f(t, False) if again else t * 2

        return n.kept(n.first(x), f)

    torch.manual_seed(0)
    trained_alike(Net(lambda k, x, f: f(k.line(x)), holds_itself).double())
    trained_alike(Net(lambda k, x: k.line(x), lambda n, x: n.kept.forward(n.first(x))).double())


def test_a_hooked_module_is_given_what_cannot_be_read() -> None:
    torch.manual_seed(0)
    eager = Net(lambda k, x, f: f(k.line(x)), lambda n, x: n.kept(n.first(x), nn.GELU())).double()
    eager.kept.register_forward_hook(lambda m, a, o: None)
    assert "GELU" in str(trained_alike(eager).report())


def test_results_that_are_sizes() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, torch.Size, dict[str, torch.Size]]:
            y = self.line(x)
            return y, y.shape, {"rest": x.shape[1:]}

    ours = ORTModule(Sizes(), strict=False)
    for size in (2, 3, 5):
        y, shape, more = ours(torch.ones(size, 4))
        assert type(shape) is torch.Size and [*map(type, shape)] == [int, int] and more == {"rest": torch.Size([4])}
        assert torch.zeros(shape).shape == y.shape == (size, 4)


@pytest.mark.parametrize("hooked", [False, True])
def test_results_that_require_no_gradient(hooked: bool) -> None:
    """Which of a kept module's results do only its call can tell; what is computed from them requires as little."""

    def body(k: Kept, x: Tensor) -> tuple[Tensor, Tensor]:
        y = k.line(x)
        return (y.detach() if len(k.log) % 3 == 0 else y), y.detach().amax(0)

    def around(n: Net, x: Tensor) -> Any:
        h = n.first(x)
        y, top = n.kept(h)
        scale = top.exp() * 2
        return y * 2, scale, scale * n.weight, h.tanh(), scale.floor(), n.other(y) / scale

    torch.manual_seed(0)
    eager = Net(body, around).double()
    if hooked:
        eager.other.register_forward_hook(lambda m, a, o: None)
    ours = ORTModule(copy.deepcopy(eager))
    for i in range(8):
        x = torch.randn(3 + i % 2, 4, dtype=torch.float64, requires_grad=i % 3 > 0)
        y = x.detach().clone().requires_grad_(x.requires_grad)
        results = ours(x), eager(y)
        assert [t.requires_grad for t in results[0]] == [t.requires_grad for t in results[1]], i
        before = [t.detach().clone() for t in results[0]]
        for outs in results:
            sum(t.sin().sum() for t in outs if t.requires_grad).backward()
        for a, b, c in zip(*results, before, strict=True):
            close(a.detach(), b.detach())
            assert torch.equal(a, c)
        close(x.grad, y.grad)
        same_state(ours, eager)
    assert ours.report().graphs


def test_a_kept_module_behind_another() -> None:
    """It is given what requires a gradient where that does in eager, and nothing else."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.first = Kept(lambda k, x: (x.sin(), x.detach().cos(), x.detach() if len(k.log) % 2 else x))
            self.second = Kept(self.scaled)

        @staticmethod
        def scaled(k: Kept, *xs: Tensor) -> tuple[Tensor, ...]:
            k.around.append([x.requires_grad for x in xs])
            return xs[0] * k.scale, *[3 * x for x in xs[1:]]

        def forward(self, x: Tensor) -> Any:
            outs = self.second(*[2 * t for t in self.first(self.line(x))])
            return *outs, outs[1] + outs[2], outs[1].exp()

    torch.manual_seed(0)
    eager = Net().double()
    ours = ORTModule(copy.deepcopy(eager))
    for i in range(6):
        x = torch.randn(3 + i % 2, 4, dtype=torch.float64)
        results = ours(x), eager(x)
        assert [t.requires_grad for t in results[0]] == [t.requires_grad for t in results[1]], i
        for outs in results:
            sum(t.sin().sum() for t in outs if t.requires_grad).backward()
        for a, b in zip(*results, strict=True):
            close(a.detach(), b.detach())
        same_state(ours, eager)
    assert ours.report().graphs and ours.second.around == eager.second.around


def test_one_tensor_at_two_places_is_one_for_who_is_called() -> None:
    def around(n: Net, x: Tensor) -> Tensor:
        v = n.first(x)
        a, b, c = n.kept(v, v)
        return a + 2 * b * c  # type: ignore[no-any-return]

    torch.manual_seed(0)
    ours = trained_alike(Net(lambda k, a, b: (k.line(a) + 5 * (a is b), a, b), around).double())
    assert "in PyTorch: layers" in str(ours.report()), ours.report()


def test_an_argument_that_comes_back_under_no_grad() -> None:
    def around(n: Net, x: Tensor) -> Tensor:
        h = n.first(x)
        with torch.no_grad():
            y = n.kept(h)
        return n.other(y * h)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    trained_alike(Net(lambda k, x: x, around).double())


def test_lists_beside_forward_are_no_part_of_a_key() -> None:
    net = nn.Linear(4, 4)
    net.outputs, net.losses = [], []  # type: ignore[assignment]
    ours = ORTModule(net, strict=False)
    for i in range(6):
        ours(torch.ones(2, 4)).sum().backward()
        ours.outputs.append({"loss": i})
        ours.losses.append(float(i))
    assert len(ours.report().graphs) == 1 and len(ours._ortmodule.sites) == 1


def test_other_threads_see_the_models_own_tensors_during_a_capture() -> None:
    inner = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10)])
    ours = ORTModule(inner, strict=False)
    own, seen, stop = {*map(id, inner.parameters())}, [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(all(id(p) in own for p in inner.parameters()) and all(id(m[0].weight) in own for m in inner))
            seen.append({*map(type, inner.state_dict().values())} == {Tensor})
            seen.append(type(inner(torch.ones(1, 8))) is Tensor)

    thread = threading.Thread(target=look)
    thread.start()
    for size in (4, 5, 6):
        ours(torch.ones(size, 8)).sum().backward()
    stop.set()
    thread.join()
    assert len(seen) > 20 and all(seen)


COUNT = 0
LISTED, NAMED = [1.0], {"by": 1.0}


class Plain:
    by = 1.0


class Slotted:
    __slots__ = ("by",)


PLAIN, SLOTTED = Plain(), Slotted()


def count() -> None:
    global COUNT
    COUNT += 1


def add(holder: Any, key: Any) -> None:
    holder[key] += 1


def grow(holder: Any) -> None:
    holder.by += 1


@pytest.mark.parametrize(("does", "asks"), [
    (lambda: count(), lambda: float(COUNT)),
    (lambda: add(LISTED, 0), lambda: LISTED[0]),
    (lambda: LISTED.append(1.0), lambda: float(len(LISTED))),
    (lambda: add(NAMED, "by"), lambda: NAMED["by"]),
    (lambda: grow(PLAIN), lambda: PLAIN.by),
    (lambda: grow(Plain), lambda: Plain.by),
    (lambda: grow(SLOTTED), lambda: SLOTTED.by),
])  # fmt: skip
def test_state_that_a_kept_module_changes_and_another_reads(does: Callable[[], None], asks: Callable[[], float]) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x) * asks()  # type: ignore[no-any-return]

    global COUNT
    found = []
    for wrap in (False, True):
        COUNT, LISTED[:], NAMED["by"], Plain.by, SLOTTED.by = 0, [1.0], 1.0, 1.0, 1.0
        vars(PLAIN)["by"] = 1.0
        torch.manual_seed(0)
        net = Net(lambda k, x: (does(), k.line(x))[1], lambda n, x: n.other(n.kept(n.first(x)))).double()
        net.other = Reads().double()  # type: ignore[assignment]
        model = ORTModule(net, strict=False) if wrap else net
        found.append(torch.stack([model(torch.ones(n, 4, dtype=torch.double)).sum().detach() for n in (3, 3, 4, 4)]))
    torch.testing.assert_close(found[1], found[0])


class Masked(nn.Module):
    """Takes no mask but one of its landmarks' length, as Nystromformer's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h: Tensor = self.line(x)
        return h if mask is None else h[:, :2] + mask


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Masked()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        skip = not isinstance(mask, FakeTensor) and bool((mask == 0).all())  # transformers.utils.is_tracing
        return self.inner(self.first(x), None if skip else mask)  # type: ignore[no-any-return]


def test_code_that_gives_a_kept_module_other_tensors_under_a_trace() -> None:
    """What a call gives it counts: the code around it is PyTorch's, too."""
    torch.manual_seed(0)
    eager = Asks().double()
    ours = ORTModule(copy.deepcopy(eager))
    for n in (3, 3, 5):
        x = torch.randn(n, 4, dtype=torch.double)
        for model in (eager, ours):
            model.zero_grad()
            model(x).square().sum().backward()
        same_state(ours, eager)
    assert "other tensors by forward under a trace" in str(ours.report())
