"""Parameters that are complex numbers: the graph is given pairs of reals, and what has no rule for those runs in PyTorch
(capture/pairs.py). Beside eager in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import ranks
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

C = torch.complex128
R = torch.view_as_real


def z(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


Form = Callable[[Tensor, Tensor], Tensor]
FORMS: dict[str, tuple[Form, bool]] = {  # wholly in the engine?
    "product": (lambda x, w: R(z(x) * w), True),
    "with itself": (lambda x, w: R(z(x) * w.conj() * w), True),
    "its parts": (lambda x, w: x[..., :3] * w.real + w.imag, True),
    "detached": (lambda x, w: R(z(x) * w.detach()), True),
    "not read": (lambda x, w: x * 2, True),
    "rows of it": (lambda x, w: R(z(x) * w[torch.tensor([2, 1, 0])]), True),
    "spectrum": (lambda x, w: torch.fft.irfft(torch.fft.rfft(x)[..., :3] * w, n=6), False),
    "absolute": (lambda x, w: x[..., :3] * w.abs() + (z(x) * w).abs(), False),
    "contraction": (lambda x, w: torch.einsum("bti,i->bt", z(x), w).real, False),
    "both ways": (lambda x, w: R(z(x) * w).sum(-1) + torch.fft.irfft(torch.fft.rfft(x)[..., :3] * w, n=6)[..., :3], False),
}


class Of(nn.Module):
    def __init__(self, form: Form, w: Tensor | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=C) if w is None else w)
        self.body, self.form = nn.Linear(6, 6).double(), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(torch.tanh(self.body(x)), self.w)


def loss_of(y: Tensor) -> Tensor:
    return (R(y) if y.is_complex() else y).square().sum()


Step = Callable[[nn.Module, Tensor], list[Tensor | None]]


def plain(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    m.zero_grad()
    loss = loss_of(m(x))
    loss.backward()
    return [loss.detach(), x.grad, *[p.grad for p in m.parameters()]]


def accumulated(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    loss = loss_of(m(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, *[None if p.grad is None else p.grad.clone() for p in m.parameters()]]


def differentiated(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    m.zero_grad()
    own = [p for p in m.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss_of(m(x)), own, create_graph=True, allow_unused=True)
    sum(loss_of(g) for g in found if g is not None).backward()  # type: ignore[union-attr]
    return [*found, x.grad, *[p.grad for p in m.parameters()]]


def frozen(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    w = dict(m.named_parameters())["w"].requires_grad_(False)
    found = plain(m, x)
    w.requires_grad_(True)
    return found


def updated(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.optim.SGD(m.parameters(), 1e-2).step() if m.get_parameter([n for n, _ in m.named_parameters()][0]).grad is not None else None
    return plain(m, x)


def hooked(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    seen: list[Tensor] = []
    w = dict(m.named_parameters())["w"]
    hooks = [w.register_hook(lambda g: g * 2), w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))]
    found = plain(m, x)
    for h in hooks:
        h.remove()
    return [*found, *seen]


def called(m: nn.Module, x: Tensor) -> list[Tensor | None]:
    """With other tensors in the parameters' place."""
    plain(m, x)
    own = {n: p.detach().clone().requires_grad_() for n, p in m.named_parameters()}
    y = torch.func.functional_call(m, {n: p * 2 for n, p in own.items()}, (x,))
    return [y, *torch.autograd.grad(loss_of(y), [*own.values()], create_graph=True, allow_unused=True)]


def equal(found: list[Tensor | None], want: list[Tensor | None]) -> None:
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


WAYS = [plain, accumulated, differentiated, frozen, updated, hooked, called]


@pytest.mark.parametrize(("form", "way"), [(f, w) for f in FORMS for w in (WAYS if f in ("product", "rows of it", "both ways") else WAYS[:3:2])],
                         ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
def test_forms(seeded: None, form: str, way: Step) -> None:
    f, whole = FORMS[form]
    eager = Of(f)
    ours = ORTModule(copy.deepcopy(eager))
    for length in (4, 4, 5):
        x = torch.randn(2, length, 6, dtype=torch.float64)
        want, found = (way(m, x.clone().requires_grad_()) for m in (eager, ours))
        equal(found, want)
    report = ours.report()
    assert not report.eager and bool(report.host) != whole, str(report)


@pytest.mark.parametrize("form", ["product", "spectrum"])
@pytest.mark.parametrize("w", {
    "strided": torch.randn(3, 3, dtype=C).t(), "every other": torch.randn(3, 6, dtype=C)[:, ::2], "one": torch.randn(1, dtype=C), "a number": torch.randn((), dtype=C),
    "conjugated": torch.randn(3, dtype=C).conj()}.items(), ids=lambda item: item[0])  # fmt: skip
def test_layouts(seeded: None, form: str, w: tuple[str, Tensor]) -> None:
    eager = Of(FORMS[form][0], w[1])
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        want, found = (updated(m, x.clone().requires_grad_()) for m in (eager, ours))
        equal(found, want)
    assert not ours.report().eager


@pytest.mark.parametrize("form", ["product", "spectrum"])
def test_parameters_that_become_others(seeded: None, form: str) -> None:
    eager = Of(FORMS[form][0])
    ours = ORTModule(copy.deepcopy(eager))
    fresh = torch.randn(3, dtype=C)

    def data(m: nn.Module) -> None:
        dict(m.named_parameters())["w"].data = fresh.clone()

    def edited(m: nn.Module) -> None:
        with torch.no_grad():
            dict(m.named_parameters())["w"].mul_(1j)

    def loaded(m: nn.Module) -> None:
        m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)

    def replaced(m: nn.Module) -> None:
        of = m.module if isinstance(m, ORTModule) else m
        of.w = nn.Parameter(fresh * 3)  # type: ignore[assignment]

    for change in (lambda m: None, data, edited, loaded, replaced, copy.deepcopy):
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        eager, ours = (change(m) or m for m in (eager, ours))
        equal(plain(ours, x.clone().requires_grad_()), plain(eager, x.clone().requires_grad_()))
    assert not ours.report().eager


class Tied(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.a, self.b = Of(form), Of(form)
        self.b.w = self.a.w

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).flatten(2))


@pytest.mark.parametrize("form", ["product", "spectrum"])
def test_a_parameter_of_two_modules(seeded: None, form: str) -> None:
    eager = Tied(FORMS[form][0])
    ours = ORTModule(copy.deepcopy(eager))
    for way in (plain, accumulated, differentiated):
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        equal(way(ours, x.clone().requires_grad_()), way(eager, x.clone().requires_grad_()))
    assert not ours.report().eager


def test_arguments_of_what_has_no_rule(seeded: None) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6).double()

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return FORMS["both ways"][0](torch.tanh(self.body(x)), w)

    eager = Given()
    ours = ORTModule(copy.deepcopy(eager))
    for graded in (False, True, True):
        w = torch.randn(3, dtype=C)
        x, found = torch.randn(2, 4, 6, dtype=torch.float64), []
        for m in (ours, eager):
            own = w.clone().requires_grad_(graded)
            m.zero_grad()
            loss_of(m(x, own * 2)).backward()
            found.append([own.grad, *[p.grad for p in m.parameters()]])
        equal(*found)
    assert not ours.report().eager and ours.report().host


RANKS = '''
import copy, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from capture.test_complex_parameters import FORMS, Of, equal, plain
from ortmodule import ORTModule
dist.init_process_group("gloo")
torch.manual_seed(0)
for form in ("product", "spectrum"):
    eager = Of(FORMS[form][0])
    ours = DDP(ORTModule(copy.deepcopy(eager)))
    eager = DDP(eager)
    for _ in range(3):
        x = torch.randn(2, 4, 6, dtype=torch.float64) + dist.get_rank()
        equal(plain(ours, x.clone().requires_grad_()), plain(eager, x.clone().requires_grad_()))
    assert not ours.module.report().eager
dist.destroy_process_group()
print("done")
'''


def test_ranks() -> None:
    ranks.launch(RANKS)


def test_a_device_has_no_complex_parameters(tmp_path: object) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return R(z(x) * self.w).square().sum()

    with pytest.raises(ValueError, match="parameter w is complex.*view_as_complex"):
        ORTModule(Loss()).save_for_device(tmp_path, torch.randn(2, 6))
