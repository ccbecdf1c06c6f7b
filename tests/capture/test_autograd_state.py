"""What forward does to autograd's state, to modules behind their back, and to what lies outside of Python; what its
caller puts around a call. Each row trains a wrapped module beside an eager one and compares all that a user can see."""

from __future__ import annotations

import array
import copy
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule import ORTModule, ranks

D = torch.float64


class Net(nn.Module):
    def __init__(self, rule: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=D)
        self.b = nn.Linear(4, 4, dtype=D)
        self.d = nn.Dropout(0.0)
        self.rule = [rule]
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.rule[0](self, x)


def look(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """All that a user can see."""
    outs = out if isinstance(out, tuple) else (out,)
    return [
        *[(t.detach().clone(), t.requires_grad, t.is_inference()) for t in outs],
        (x.requires_grad, x.grad),
        [(n, p.requires_grad, None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()],
        [(n, m.training, len(m._forward_hooks), list(m._modules)) for n, m in model.named_modules()],
        {k: v for m in model.modules() for k, v in vars(m).items() if isinstance(v, (int, float, str))},
    ]


def alike(a: Any, b: Any, what: str) -> None:
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), what
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), what
        for x, y in zip(a, b, strict=True):
            alike(x, y, what)
    else:
        assert a == b, what


def steps(rule: Callable[..., Any], n: int = 5, around: Callable[[int], Any] | None = None, clear: bool = True,
          **state: Callable[[], Any]) -> ORTModule:  # fmt: skip
    """Trains beside eager; the wrapper. state: makes attributes of the module. around: a context for every call."""
    torch.manual_seed(0)
    eager = Net(rule)
    module = copy.deepcopy(eager)
    for m in (eager, module):
        for name, make in state.items():
            setattr(m, name, make())
    ours = ORTModule(module)
    for step in range(n):
        seen = []
        for m in (eager, ours):
            torch.manual_seed(step)
            if clear:
                nn.Module.zero_grad(m)
            x = torch.randn(5, 4, dtype=D)
            if around is None:
                out = m(x)
            else:
                with around(step):
                    out = m(x)
            loss = [t.sum() for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
            if loss:
                sum(loss).backward()  # type: ignore[union-attr]
            seen.append(look(m, out, x))
        alike(*seen, f"step {step}")
    return ours


def whole(ours: ORTModule, reason: str) -> None:
    """Later calls are PyTorch's, for this reason."""
    report = ours.report()
    assert any(reason in e.reason for e in report.eager), str(report)
    assert not report.graphs, str(report)


# --- autograd's state -----------------------------------------------------------------------------


def frozen_for_a_moment(m: Any, x: Tensor) -> Tensor:
    m.b.requires_grad_(False)
    y = m.b(m.a(x))
    m.b.requires_grad_(True)
    return y


def frozen_by_assignment(m: Any, x: Tensor) -> Tensor:
    m.b.weight.requires_grad = False
    y = m.b(m.a(x))
    m.b.weight.requires_grad = True
    return y


def argument(m: Any, x: Tensor) -> Tensor:
    return m.a(x.requires_grad_(True))


def argument_by_assignment(m: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    return m.a(x)


def zero_grad(m: Any, x: Tensor) -> Tensor:
    m.zero_grad()
    return m.a(x)


def zero_grad_of_a_part(m: Any, x: Tensor) -> Tensor:
    m.a.zero_grad(set_to_none=False)
    return m.a(x)


def assigned_grad(m: Any, x: Tensor) -> Tensor:
    m.b.weight.grad = x[:4].clone()
    return m.a(x)


def deleted_grad(m: Any, x: Tensor) -> Tensor:
    del m.a.weight.grad
    return m.a(x)


def clipped(m: Any, x: Tensor) -> Tensor:
    nn.utils.clip_grad_norm_(m.a.parameters(), 0.1)
    return m.a(x)


def optimizer(m: Any, x: Tensor) -> Tensor:
    torch.optim.SGD(m.a.parameters(), 0.1).step()
    return m.a(x)


def backward(m: Any, x: Tensor) -> Tensor:
    torch.autograd.backward(m.b(x).sum())
    return m.a(x)


def functional(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * torch.autograd.functional.vjp(lambda t: m.a(t).tanh(), x, torch.ones_like(x))[1]


def inference(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        t = m.b(x).softmax(-1)
    return m.a(x) * t.clone()


@torch.inference_mode()
def decorated(m: Any, x: Tensor) -> Tensor:
    return m.a(x)


def mapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.a(row).tanh())(x)


def pushed(m: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(m.a, (x,), (x,))[1]  # type: ignore[no-any-return]


def detached_behind_a_view(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ m.a.weight
    last = h[:, -1]
    h.detach_()
    return last, m.b(h)


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


def dispatched(m: Any, x: Tensor) -> Tensor:
    with Doubled():
        return torch.tanh(m.a(x))


@pytest.mark.parametrize(("rule", "reason"), [
    (frozen_for_a_moment, "requires_grad"), (frozen_by_assignment, "requires_grad"), (argument, "requires_grad"),
    (argument_by_assignment, "requires_grad"), (zero_grad, "Tensor.grad"), (zero_grad_of_a_part, "Tensor.grad"),
    (assigned_grad, "Tensor.grad"), (deleted_grad, "Tensor.grad"), (clipped, "Tensor.grad"), (optimizer, "reads Tensor."),
    (backward, "calls backward"), (functional, "torch.autograd.grad"), (inference, "inference_mode"),
    (decorated, "inference_mode"), (dispatched, "TorchDispatchMode"),
    (mapped, "torch.vmap"), (pushed, "torch.func.jvp"), (detached_behind_a_view, "that has views")])  # fmt: skip
def test_what_a_graph_cannot_do(rule: Callable[..., Any], reason: str) -> None:
    whole(steps(rule, clear=rule not in (zero_grad, zero_grad_of_a_part, assigned_grad, clipped, optimizer)), reason)


def test_a_tensor_whose_views_nobody_reads_is_detached_in_the_engine() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ m.a.weight
        last = h[:, -1] * 2
        h.detach_()
        return last, m.b(h[1:])

    report = steps(forward).report()
    assert report.node_share == 1 and not report.eager, str(report)


def test_backward_among_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch.autograd.backward is one that looks after the other ranks, and others may have wrapped that."""
    for _ in range(2):
        monkeypatch.setattr(torch.autograd, "backward", ranks._around(torch.autograd.backward))
    whole(steps(backward), "calls backward")


def test_flags_that_are_so_already() -> None:
    """A backbone frozen in every forward: the first call changes it, the others do not."""
    def rule(m: Any, x: Tensor) -> Tensor:
        for p in m.b.parameters():
            p.requires_grad_(False)
        return m.b(m.a(x)) + torch.zeros(4, dtype=D).requires_grad_()

    report = steps(rule).report()
    assert report.graphs[-1].forwards == 4, str(report)


def test_modes_that_are_on_already() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode(), torch.no_grad():
            return m.a(x)

    ours = steps(rule, around=lambda _: torch.inference_mode())
    assert ours.report().graphs and not ours.report().eager


def test_saved_tensors_hooks_inside() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4, dtype=D)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
                return torch.tanh(self.l(x))

    torch.manual_seed(1)
    part = Part()
    report = steps(lambda m, x: m.part(m.a(x)), part=lambda: copy.deepcopy(part)).report()
    assert [h.name for h in report.host] == ["part"] and not report.eager, str(report)


# --- around a call --------------------------------------------------------------------------------


def tower(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x) + torch.ones(4, dtype=D)))


def saving(step: int) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2 if step % 2 else t)


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


@pytest.mark.parametrize(("around", "reason"), [(saving, "saved_tensors_hooks"), (lambda _: Twice(), "mode Twice")])
def test_around_the_call(around: Callable[[int], Any], reason: str) -> None:
    """From the first call on, or between others."""
    whole(steps(tower, around=around), reason)
    ours = steps(tower, around=lambda step: around(step) if step in (1, 3) else torch.enable_grad())
    assert [e.calls for e in ours.report().eager if reason in e.reason] == [2] and ours.report().graphs


def test_what_a_saving_hook_is_given() -> None:
    counts = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        model, seen = wrap(Net(tower)), []
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t, s=seen: (s.append(t.shape), t)[1], lambda t: t):
                model(torch.ones(5, 4, dtype=D)).sum().backward()
        counts.append(sorted(seen))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("around", [lambda _: torch.autograd.graph.save_on_cpu(), lambda _: torch.device("cpu")])
def test_what_changes_nothing_stays_in_the_engine(around: Callable[[int], Any]) -> None:
    report = steps(tower, around=around).report()
    assert report.graphs and not report.eager, str(report)


def test_default_device() -> None:
    model = ORTModule(Net(tower))
    x = torch.ones(5, 4, dtype=D)
    try:
        for device in ("cpu", "meta", "cpu"):
            torch.set_default_device(device)
            if device == "meta":
                with pytest.raises((RuntimeError, NotImplementedError)):
                    model(x)
            else:
                model(x).sum().backward()
    finally:
        torch.set_default_device(None)
    report = model.report()
    assert report.graphs[0].forwards == 2 and [e.calls for e in report.eager] == [1], str(report)


# --- modules --------------------------------------------------------------------------------------


def flipped(m: Any, x: Tensor) -> Tensor:
    m.train(not m.training)
    return m.a(x) * (2 if m.training else 1)


def by_dict(m: Any, x: Tensor) -> Tensor:
    m.__dict__["n"] = m.__dict__.get("n", 0) + 1
    return m.a(x) * m.n


def by_vars(m: Any, x: Tensor) -> Tensor:
    vars(m).update(n=vars(m).get("n", 0) + 1)
    return m.a(x)


def by_object(m: Any, x: Tensor) -> Tensor:
    object.__setattr__(m, "n", getattr(m, "n", 0) + 1)
    return m.a(x)


def of_a_part(m: Any, x: Tensor) -> Tensor:
    m.b.__dict__["n"] = m.b.__dict__.get("n", 0) + 1
    return m.b(m.a(x))


def of_a_part_by_name(m: Any, x: Tensor) -> Tensor:
    m.b.n = getattr(m.b, "n", 0) + 1
    return m.b(m.a(x))


def deleted(m: Any, x: Tensor) -> Tensor:
    if hasattr(m, "n"):
        del m.n
        return m.a(x)
    m.n = 1
    return m.a(x) * 2


def hooked(m: Any, x: Tensor) -> Tensor:
    m.b.register_forward_hook(lambda mod, args, out: out * 1.5)
    return m.b(m.a(x))


@pytest.mark.parametrize("rule", [flipped, by_dict, by_vars, by_object, of_a_part, of_a_part_by_name, deleted, hooked])
def test_what_changes_at_every_step(rule: Callable[..., Any]) -> None:
    assert not steps(rule, n=8).report().graphs


def grown(m: Any, x: Tensor) -> Tensor:
    if "w" not in m._parameters:
        m.register_parameter("w", nn.Parameter(torch.ones(4, dtype=D)))
    if "act" not in m._modules:
        m.add_module("act", nn.Tanh())
    return m.act(m.a(x) * m.w)


def silenced(m: Any, x: Tensor) -> Tensor:
    m.b.eval()
    m.d.training = False
    m.count = 3
    return m.b(m.d(m.a(x)))


def for_a_moment(m: Any, x: Tensor) -> Tensor:
    m.d.eval()
    y = m.d(m.a(x))
    m.d.train()
    return y


@pytest.mark.parametrize("rule", [grown, silenced, for_a_moment])
def test_what_changes_once_or_not_at_all(rule: Callable[..., Any]) -> None:
    """The call that changes something is PyTorch's, the others the engine's."""
    report = steps(rule).report()
    assert report.graphs[-1].forwards >= 4, str(report)


def test_an_attribute_that_is_assigned_what_it_is() -> None:
    """It is compared from then on."""
    def rule(m: Any, x: Tensor) -> Tensor:
        m.count = 3
        return m.a(x)

    model = ORTModule(Net(rule))
    for _ in range(4):
        model(torch.ones(5, 4, dtype=D))
    model.count = 7
    model(torch.ones(5, 4, dtype=D))
    assert model.count == 3


def test_the_module_behind_a_global() -> None:
    """Forward reaches its own module by a closure variable."""
    for wrap in (lambda m: m, ORTModule):
        made: list[Any] = []

        def rule(m: Any, x: Tensor, made: list[Any] = made) -> Tensor:
            made[0].__dict__["n"] = made[0].__dict__.get("n", 0) + 1
            return m.a(x)

        made.append(Net(rule))
        model = wrap(made[0])
        for _ in range(5):
            model(torch.ones(5, 4, dtype=D))
        assert model.n == 5


# --- what lies outside ----------------------------------------------------------------------------

LOCAL = threading.local()


def environ(m: Any, x: Tensor) -> Tensor:
    os.environ["ORTMODULE_AUDIT"] = str(int(os.environ.get("ORTMODULE_AUDIT", "0")) + 1)
    return m.a(x)


def byte_array(m: Any, x: Tensor) -> Tensor:
    m.state.append(1)
    return m.a(x) * len(m.state)


def c_array(m: Any, x: Tensor) -> Tensor:
    m.state[0] += 1
    return m.a(x) * m.state[0]


def event(m: Any, x: Tensor) -> Tensor:
    m.state.set()
    return m.a(x)


def thread_local(m: Any, x: Tensor) -> Tensor:
    LOCAL.n += 1
    return m.a(x) * LOCAL.n


def put(m: Any, x: Tensor) -> Tensor:
    m.state.put(1)
    return m.a(x) * m.state.qsize()


def semaphore(m: Any, x: Tensor) -> Tensor:
    m.state.release()
    return m.a(x)


def started(m: Any, x: Tensor) -> Tensor:
    thread = threading.Thread(target=lambda: m.state.append(1))
    thread.start()
    thread.join()
    return m.a(x)


def caught(m: Any, x: Tensor) -> Tensor:
    try:
        os.environ["ORTMODULE_AUDIT"] = str(len(m.state))
        m.state.append(1)
    except Exception:  # a user's forward may catch anything
        pass
    return m.a(x)


def count(state: Any) -> Any:
    if isinstance(state, threading.Event):
        return state.is_set()
    if isinstance(state, threading.Semaphore):
        return state._value
    if isinstance(state, (queue.SimpleQueue, queue.Queue)):
        return state.qsize()
    return (bytes(state), LOCAL.n, os.environ.get("ORTMODULE_AUDIT"))


@pytest.mark.parametrize(("rule", "make"), [
    (environ, bytearray), (byte_array, bytearray), (c_array, lambda: array.array("l", [0])), (event, threading.Event),
    (thread_local, bytearray), (put, queue.SimpleQueue), (put, queue.Queue), (semaphore, lambda: threading.Semaphore(0)),
    (started, bytearray), (caught, bytearray)])  # fmt: skip
def test_effects_happen_once_a_step(rule: Callable[..., Any], make: Callable[[], Any],
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    seen = []
    for wrap in (lambda m: m, ORTModule):
        monkeypatch.setenv("ORTMODULE_AUDIT", "0")
        LOCAL.n = 0
        torch.manual_seed(0)
        model = wrap(Net(rule))
        model.state = make()
        rows = []
        for _ in range(5):
            y = model(torch.ones(5, 4, dtype=D))
            rows.append((float(y.detach().sum()), count(model.state)))
            if isinstance(model.state, threading.Event):
                model.state.clear()
        seen.append(rows)
    assert [r[1] for r in seen[0]] == [r[1] for r in seen[1]]
    assert [r[0] for r in seen[0]] == pytest.approx([r[0] for r in seen[1]])


@pytest.mark.parametrize("how", ["open", "os.write", "held", "Path", "torch.save"])
def test_files_are_written_once_a_step(how: str, tmp_path: Path) -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        if how == "open":
            with open(m.path, "a") as file:
                file.write("x")
        elif how == "os.write":
            os.write(m.number, b"x")
        elif how == "held":
            m.file[0].write("x")
        elif how == "Path":
            Path(m.path).open("a").write("x")
        else:
            torch.save(x.shape, f"{m.path}{len(os.listdir(os.path.dirname(m.path)))}")
        return m.a(x)

    sizes = []
    for wrap, name in ((lambda m: m, "eager"), (ORTModule, "ours")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "f").write_text("")
        with open(folder / "f", "a") as file:
            model = Net(rule, path=str(folder / "f"), number=file.fileno())
            model.file = [file]
            ours = wrap(model)
            for _ in range(5):
                ours(torch.ones(5, 4, dtype=D))
        sizes.append((len(list(folder.iterdir())), (folder / "f").stat().st_size))
    assert sizes[0] == sizes[1] and ours.report().eager


def test_a_file_that_is_read(tmp_path: Path) -> None:
    """Nothing is used up by a trace: the innermost module stays in PyTorch."""
    path = tmp_path / "f"

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with open(path) as file:
                return x * len(file.read())

    model = ORTModule(nn.Sequential(nn.Linear(4, 4), Part()))
    for text in ("ab", "abc"):
        path.write_text(text)
        torch.testing.assert_close(model(torch.ones(2, 4)), model.module[0](torch.ones(2, 4)) * len(text))
    assert [h.name for h in model.report().host] == ["1"] and not model.report().eager


def test_an_event_that_is_read() -> None:
    """Another thread may set it at any moment, also while a capture runs: it is compared, never put back."""
    def rule(m: Any, x: Tensor) -> Tensor:
        return m.a(x) * (2 if stop.is_set() else 1)

    stop = threading.Event()
    model = ORTModule(Net(rule))
    x = torch.ones(5, 4, dtype=D)
    before = model(x)
    stop.set()
    torch.testing.assert_close(model(x), before * 2)
    assert stop.is_set() and len(model.report().graphs) == 2


def test_a_thread_local_is_read_on_each_thread() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        return m.a(x) * LOCAL.scale

    model = ORTModule(Net(rule))
    x, found = torch.ones(5, 4, dtype=D), []

    def use(scale: float) -> None:
        LOCAL.scale = scale
        found.append(model(x).detach() / scale)

    use(1.0)
    thread = threading.Thread(target=use, args=(3.0,))
    thread.start()
    thread.join()
    use(1.0)
    torch.testing.assert_close(found, [found[0]] * 3)


class Asking(nn.Module):
    """What a recurrent layer gives is asked for what eager's autograd knows of it."""

    def __init__(self, layer: type) -> None:
        super().__init__()
        self.layer = layer(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)[0]
        return h * (2.0 if h.requires_grad else 3.0)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_results_of_recurrent_layers_require_a_gradient(layer: type) -> None:
    torch.manual_seed(0)
    net, x = Asking(layer), torch.randn(3, 2, 4)
    model = ORTModule(copy.deepcopy(net))
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), net(x))
    assert model.report().node_share == 1


class Counting(nn.Module):
    """Edits a tensor that is no buffer, and then does what a graph cannot."""

    def __init__(self, last: Callable[[], object]) -> None:
        super().__init__()
        self.plain, self.last = torch.zeros(4), last

    def forward(self, x: Tensor) -> Tensor:
        self.plain.add_(1)
        y = x * self.plain
        self.last()
        return y


def _nothing() -> None:
    pass


def _decorated() -> None:
    @torch.inference_mode()
    def inner() -> Tensor:
        return torch.ones(2)

    inner()


def _with() -> None:
    with torch.inference_mode():
        torch.ones(2)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("last", [_nothing, _with, _decorated, lambda: torch.manual_seed(1)])
def test_first_called_in_inference_mode(around: Callable[..., Any], last: Callable[[], object]) -> None:
    """The tracer's own inference_mode(False) is not the user's; what a failed capture has edited is undone."""
    net, x = Counting(last), torch.randn(2, 4)
    model = ORTModule(copy.deepcopy(net))
    for _ in range(3):
        with around():
            torch.testing.assert_close(model(x), net(x), rtol=0, atol=0)
    if last is _nothing:
        assert model.report().node_share == 1
    if last in (_with, _decorated) and around is not torch.inference_mode:
        assert "forward enters torch.inference_mode(True)" in str(model.report())


def edited_copy(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.clone()
    with torch.no_grad():
        z.sub_(m.a.bias)
    return z, m.b(z)


def edited_view(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    z = x * 2
    z.detach()[:, 1:].mul_(m.a.bias[1:])
    return z, m.b(z * z)


def edited_result(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    z = m.a(x)
    with torch.no_grad():
        z.clamp_(min=0.1)
        z[1] = m.b.bias
    return z * 1, m.b(z * 1)


def edited_by_what_it_is(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.clone()
    with torch.no_grad():
        z.add_(m.a(z))
        z.mul_(z)
    z[:, 0] = m.b.bias[0]
    return z, z.detach() + m.b(z)


@pytest.mark.parametrize("rule", [edited_copy, edited_view, edited_result, edited_by_what_it_is])
def test_edits_that_autograd_does_not_see(rule: Callable[..., Any]) -> None:
    """The result requires a gradient if it did before."""
    ours = steps(rule)
    assert not ours.report().eager, str(ours.report())


def added_to_what_is_detached(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    z, other = h.detach(), h.detach()
    z += m.b.bias
    return (z * x + h * other,)


def detached_and_named_once(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    z = m.a(x).detach()
    z += m.b.bias
    return z, z.t(), z[:, 1:].sin()


def written_to_parts_of_what_is_detached(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    z = h.detach()
    part = z[:, ::2]
    z[:, 0] = m.b.bias[0]
    z[z > 0.5] *= m.b.bias[1]
    z[:, ::2].mul_(m.b.weight[0, :2])
    return z.cos(), part * 2, h.sin()


def detached_and_written_over(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    z = h.detach()
    z.copy_(m.b.bias.expand_as(h))
    before = z * 2
    z.zero_()
    return before, z + 1, h.exp()


def detached_then_edited_by_others(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    z = h.detach()
    z.add_(m.b.bias)
    with torch.no_grad():
        z.mul_(2)
    h.mul_(3)
    return z * x + h * 2, z.detach() + h


def detached_twice(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    z = h.detach()[1:]
    w = z.detach()
    w.add_(m.b.bias)
    u = w * 2
    z.mul_(m.a.bias)
    return (w + z * 2 + u + h[1:] * 1,)


def a_detached_parameter(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    z = m.b.weight.detach()
    z.mul_(m.b.bias)
    return z * 2, m.b.weight.sum() + m.a(x)


def a_detached_argument(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    z = x.detach()
    z.mul_(m.b.bias)
    return y * z, m.a(y)


def a_detached_buffer(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    z = m.state.detach()
    z.mul_(m.b.bias)
    m.state.add_(1)
    return z * x, m.state * m.a(x)


@pytest.mark.parametrize("rule", [
    added_to_what_is_detached, detached_and_named_once, written_to_parts_of_what_is_detached, detached_and_written_over,
    detached_then_edited_by_others, detached_twice, a_detached_parameter, a_detached_argument,
    a_detached_buffer])  # fmt: skip
def test_what_is_written_into_a_detached_tensor_has_its_gradient(rule: Callable[..., Any]) -> None:
    """What it was detached from has the new values and its old gradient: `features.detach()`, then `+= embedding`."""
    ours = steps(rule, state=lambda: torch.ones(4, dtype=D))
    assert not ours.report().eager, str(ours.report())


def detached_beside_its_source(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    z = h.detach()
    z += m.b.bias
    return h, z


def a_detached_argument_is_returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    z = x.detach()
    z.mul_(m.b.bias)
    return m.a(z), z[1:]


@pytest.mark.parametrize("rule", [detached_beside_its_source, a_detached_argument_is_returned])
def test_a_detached_tensor_with_a_gradient_over_memory_that_the_caller_has(rule: Callable[..., Any]) -> None:
    assert "a result is a detached tensor over memory of an argument or of another result" in str(steps(rule).report())
