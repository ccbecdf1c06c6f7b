"""ORTModule against eager PyTorch in fp64: every scenario runs both and compares outputs, gradients and buffers at
1e-10 relative.

Sizes are different primes and output gradients are random, so that a transposed or dropped term cannot hide.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ortmodule
from ortmodule import ORTModule, config
from ortmodule.config import DebugOptions, resolve

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _seeded(fp64):
    torch.manual_seed(1)


class MLP(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.drop = nn.Dropout(p)
        self.second = nn.Linear(7, 11)
        self.third = nn.Linear(11, 3)
        self.scale = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(self.drop(F.relu(self.first(x)))))) * self.scale


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    nothing: None = None


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.unused = nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Result | Tensor:
        logits = self.body(x)
        if y is None:
            return logits
        return Result(((logits - y) ** 2).mean(), logits)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.bn = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.bn(self.first(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


class Two(nn.Module):
    """Two outputs with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.left(h), self.right(h)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    eager = make()
    return ORTModule(copy.deepcopy(eager), strict="engine", **options), eager


def close(a: Tensor | None, b: Tensor | None, what: str = "") -> None:
    if a is None or b is None:
        assert a is None and b is None, f"{what}: {a} against {b}"
        return
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    scale = b.abs().max().item() if b.numel() else 1.0
    error = (a - b).abs().max().item() if b.numel() else 0.0
    assert error <= TOLERANCE * max(scale, 1e-6), f"{what}: error {error:.3g} at scale {scale:.3g}"


def same_state(ours: nn.Module, eager: nn.Module) -> None:
    mine, theirs = dict(ours.named_parameters()), dict(eager.named_parameters())
    assert list(mine) == list(theirs)
    for name in mine:
        close(mine[name].grad, theirs[name].grad, f"gradient of {name}")
        close(mine[name].detach(), theirs[name].detach(), name)
    for (name, a), (_, b) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
        close(a, b, name) if a.is_floating_point() else None
        assert torch.equal(a, b) or a.is_floating_point(), name


def nodes_in_engine(model: Any) -> None:
    report = model.report()
    assert report.n_captures >= 1 and report.node_share == 1 and not report.eager, str(report)


# --- the object -----------------------------------------------------------------------------------


def test_identity_of_the_wrapper():
    model = MLP()
    w = ORTModule(model)
    assert isinstance(w, ORTModule) and isinstance(w, MLP) and w.module is model
    assert type(w).__name__ == "MLP" and type(w).__qualname__ == MLP.__qualname__ and type(w).__module__ == MLP.__module__
    assert inspect.signature(type(w).forward) == inspect.signature(MLP.forward)
    assert inspect.signature(w.forward) == inspect.signature(model.forward)
    assert list(w.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(w.parameters(), model.parameters(), strict=True))
    assert [n for n, _ in w.named_modules()] == [n for n, _ in model.named_modules()]
    w.scale = 4.0
    assert model.scale == 4.0
    w.eval()
    assert not model.training and not model.drop.training


def test_wrapping_what_cannot_be_wrapped():
    with pytest.raises(TypeError, match="torch.nn.Module"):
        ORTModule(lambda x: x)
    with pytest.raises(TypeError, match="already"):
        ORTModule(ORTModule(MLP()))
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ORTModule(nn.DataParallel(MLP()), strict=True)
    with pytest.raises(TypeError, match=r"before torch\.jit"):
        ORTModule(torch.jit.script(nn.Linear(2, 3)))
    with pytest.raises(TypeError, match="unknown options"):
        ORTModule(MLP(), stict=True)


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "save"])
def test_copies(way):
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    w(x).sum().backward()
    if way == "pickle":
        other = pickle.loads(pickle.dumps(w))
    elif way == "deepcopy":
        other = copy.deepcopy(w)
    else:
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, ORTModule) and isinstance(other, MLP) and other.module is not w.module
    assert other._ortmodule.settings == w._ortmodule.settings
    assert all(a is not b for a, b in zip(w.parameters(), other.parameters(), strict=True))
    close(other(x), eager(x))
    nodes_in_engine(other)


def test_methods_of_the_user_run_through_the_engine():
    class WithMethod(MLP):
        def twice(self, x: Tensor) -> Tensor:
            return self(x) + self(x)

    w, eager = pair(WithMethod)
    x = torch.randn(13, 5)
    close(w.twice(x), eager.twice(x))
    assert w.report().graphs[0].forwards == 2


def test_children_called_module_and_report():
    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(5, 3)

        def report(self) -> str:
            return "mine"

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    w, eager = pair(Awkward)
    x = torch.randn(7, 5)
    assert w.report() == "mine" and isinstance(w.module, nn.Linear)
    close(w(x), eager(x))


def test_assigned_forward():
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    original = w.forward
    w.forward = lambda x: original(x) * 2
    close(w(x), eager(x) * 2)
    del w.forward
    close(w(x), eager(x))


# --- training -------------------------------------------------------------------------------------


def step(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.detach().requires_grad_()
    out = model(x)
    out.backward(grad)
    return out.detach(), x.grad


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
@pytest.mark.parametrize("make", [MLP, Norm])
def test_training(make, segment_mb):
    w, eager = pair(make, segment_mb=segment_mb)
    ours, theirs = torch.optim.AdamW(w.parameters(), 1e-2), torch.optim.AdamW(eager.parameters(), 1e-2)
    for _ in range(5):
        x, grad = torch.randn(13, 5), torch.randn(13, 3)
        for mine, other in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(mine, other)
        same_state(w, eager)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    nodes_in_engine(w)
    if segment_mb < 1:
        assert len(next(iter(w._ortmodule.every[0].graph._current.values())).nodes) > 2


def test_accumulation_and_order_of_backwards():
    w, eager = pair(MLP)
    xs, grads = torch.randn(4, 13, 5), torch.randn(4, 13, 3)
    for model in (w, eager):
        outs = [model(x) for x in xs]
        for k in (2, 0, 3, 1):
            outs[k].backward(grads[k])
    same_state(w, eager)
    for model in (w, eager):
        ((model(xs[0]) * grads[0]).sum() + (model(xs[1]) * grads[1]).sum()).backward()
    same_state(w, eager)


def test_dropped_forward_frees_its_state():
    w, _ = pair(MLP)
    x = torch.randn(13, 5)
    w(x).sum().backward()
    out = w(x)
    step_of = weakref.ref(out.grad_fn)
    live = ortmodule._C.pool_stats()["live"]
    del out
    gc.collect()
    assert step_of() is None and ortmodule._C.pool_stats()["live"] < live


def test_state_is_freed_by_backward_while_the_output_lives():
    w, _ = pair(MLP)
    x = torch.randn(13, 5)
    out = w(x)
    held = ortmodule._C.pool_stats()["live"]
    out.sum().backward()
    w.zero_grad()
    assert ortmodule._C.pool_stats()["live"] < held


def test_gradients_are_stolen_not_copied():
    w, _ = pair(MLP)
    before = ortmodule._C.pool_stats()["live"]
    w(torch.randn(13, 5)).sum().backward()
    gc.collect()
    size = sum(p.grad.nbytes for p in w.parameters())
    assert ortmodule._C.pool_stats()["live"] - before >= size


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_optimizer_in_hooks(segment_mb):
    """A parameter changes as soon as its gradient is there, while the rest of backward still runs."""
    w, eager = pair(MLP, segment_mb=segment_mb)

    def update(p: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for model in (w, eager):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(partial(update, optimizer=torch.optim.SGD([p], 0.5)))
    for _ in range(3):
        x, grad = torch.randn(13, 5), torch.randn(13, 3)
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_threads(segment_mb):
    w, eager = pair(MLP, segment_mb=segment_mb)
    xs, grads = torch.randn(4, 13, 5), torch.randn(4, 13, 3)
    outs = [w(x) for x in xs]
    shared = w(xs[0])
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            outs[k].backward(grads[k])
            torch.autograd.grad(shared, list(w.parameters()), grads[k], retain_graph=True)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures
    for x, grad in zip(xs, grads, strict=True):
        eager(x).backward(grad)
    same_state(w, eager)


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_retain_graph_and_second_backward(segment_mb):
    w, eager = pair(MLP, segment_mb=segment_mb)
    x, grads = torch.randn(13, 5), torch.randn(3, 13, 3)
    for model in (w, eager):
        out = model(x)
        out.backward(grads[0], retain_graph=True)
        out.backward(grads[1], retain_graph=True)
        out.backward(grads[2])
        with pytest.raises(RuntimeError, match="second time"):
            out.backward(grads[0])
    same_state(w, eager)


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_create_graph(segment_mb):
    w, eager = pair(MLP, segment_mb=segment_mb)
    base, grad = torch.randn(13, 5), torch.randn(13, 3)
    inputs = []
    for model in (w, eager):
        x = base.clone().requires_grad_()
        z = x * model.first.weight.sum()  # a parameter upstream of the model as well
        out = model(z)
        (gx,) = torch.autograd.grad(out, z, grad, create_graph=True)
        ((gx**2).sum() + (out * grad).sum()).backward()
        inputs.append(x.grad)
    close(*inputs)
    same_state(w, eager)


def test_create_graph_with_dropout_is_refused():
    w, _ = pair(lambda: MLP(0.5))
    x = torch.randn(13, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="dropout"):
        torch.autograd.grad(w(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_gradients_of_some_inputs(segment_mb):
    w, eager = pair(MLP, segment_mb=segment_mb)
    base, grad = torch.randn(13, 5), torch.randn(13, 3)
    found = []
    for model in (w, eager):
        x = base.clone().requires_grad_()
        some = [model.third.bias, x, model.second.weight]
        found.append(torch.autograd.grad(model(x), some, grad))
        model(x).backward(grad, inputs=[model.second.bias])
    for a, b in zip(*found, strict=True):
        close(a, b)
    same_state(w, eager)


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_outputs_that_receive_gradients(segment_mb):
    """Loss alone (predicted), logits alone, both, one after the other; unused parameters get None each time."""
    w, eager = pair(WithLoss, segment_mb=segment_mb)
    x, y, grad = torch.randn(13, 5), torch.randn(13, 3), torch.randn(13, 3)
    for _ in range(2):
        for use in ("loss", "logits", "both", "separate"):
            for model in (w, eager):
                model.zero_grad()
                out = model(x, y)
                assert type(out) is Result and out.nothing is None
                if use == "loss":
                    out.loss.backward()
                elif use == "logits":
                    out.logits.backward(grad)
                elif use == "both":
                    (out.loss + (out.logits * grad).sum()).backward()
                else:
                    out.logits.backward(grad, retain_graph=True)
                    out.loss.backward()
            same_state(w, eager)
            assert w.unused.weight.grad is None
    nodes_in_engine(w)


def test_parameters_of_an_unused_output_get_none():
    w, eager = pair(Two)
    x, grad = torch.randn(13, 5), torch.randn(13, 2)
    for _ in range(2):
        for model in (w, eager):
            model.zero_grad()
            model(x)[1].backward(grad)
        same_state(w, eager)
        assert w.left.weight.grad is None


def test_prediction_and_batch_norm():
    """When the forward runs again for another set of gradients, running statistics move once."""

    class Both(Norm):  # the loss comes first: it alone is expected to receive a gradient
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            out = super().forward(x)
            return (out**2).mean(), out

    w, eager = pair(Both)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for _ in range(3):
        for model in (w, eager):
            model(x)[1].backward(grad)
        same_state(w, eager)
    assert w.report().graphs[0].reruns == 1


def test_modified_in_place_before_backward():
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for what in ("parameter", "input", "output"):
        w, eager = pair(MLP)
        for model in (w, eager):
            leaf = x.clone().requires_grad_()
            z = leaf * 1
            out = model(z)
            with torch.no_grad():
                (model.second.weight if what == "parameter" else z if what == "input" else out).mul_(2)
            if what == "output":  # nothing of this model's backward reads its own output
                out.backward(grad)
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.backward(grad)


def test_output_that_backward_reads_modified_in_place():
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.fc(x))

    w, eager = pair(Exp)
    x = torch.randn(7, 5)
    for model in (w, eager):
        out = model(x)
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_outputs_may_be_edited():
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for model in (w, eager):
        out = model(x)
        out.mul_(2).add_(1)
        out.backward(grad)
    same_state(w, eager)


def test_frozen_and_unfrozen():
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for frozen in (("first",), ("first", "second"), (), ("third",)):
        for model in (w, eager):
            model.zero_grad()
            for name, p in model.named_parameters():
                p.requires_grad_(name.split(".")[0] not in frozen)
            model(x).backward(grad)
        same_state(w, eager)


def test_everything_frozen():
    w, eager = pair(MLP)
    for model in (w, eager):
        model.requires_grad_(False)
    x = torch.randn(13, 5)
    out = w(x)
    assert not out.requires_grad
    close(out, eager(x))
    for a, b in zip(step(w, x, torch.ones(13, 3)), step(eager, x, torch.ones(13, 3)), strict=True):
        close(a, b)


def test_output_without_a_path_does_not_require_grad():
    w, eager = pair(Two)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for model in (w, eager):
        model.trunk.requires_grad_(False)
        model.right.requires_grad_(False)
        left, right = model(x)
        assert left.requires_grad and not right.requires_grad
        left.backward(grad)
    same_state(w, eager)


def test_tied_weights():
    for segment_mb in (25.0, 1e-5):
        w, eager = pair(Tied, segment_mb=segment_mb)
        ids, grad = torch.randint(13, (3, 11)), torch.randn(3, 11, 13)
        for model in (w, eager):
            model(ids).backward(grad)
        same_state(w, eager)
        assert w.head.weight is w.embed.weight
        nodes_in_engine(w)


def test_outputs_that_are_inputs():
    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor, note: str) -> dict[str, Any]:
            return {"x": x, "w": self.fc.weight, "y": self.fc(x), "note": note, "n": 3}

    w, eager = pair(Pass)
    base, grad = torch.randn(7, 5), torch.randn(7, 3)
    found = []
    for model in (w, eager):
        x = base.clone().requires_grad_()
        out = model(x, "hello")
        assert out["x"] is x and out["w"] is model.fc.weight and out["note"] == "hello" and out["n"] == 3
        ((out["y"] * grad).sum() + (out["x"] ** 2).sum() + (out["w"] ** 3).sum()).backward()
        assert x.is_leaf
        found.append(x.grad)
    close(*found)
    same_state(w, eager)


def test_nested_arguments_and_results():
    class Nest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, batch: dict[str, Any], *rest: Tensor, flag: bool = False) -> Any:
            y = self.fc(batch["x"][0]) + batch["x"][1] * rest[0]
            return {"out": [y, (y * 2, None)], "flag": flag, "more": {"z": y.sum() if flag else y.mean()}}

    w, eager = pair(Nest)
    a, b, c, grad = torch.randn(7, 5), torch.randn(7, 3), torch.randn(3), torch.randn(7, 3)
    for flag in (False, True, False):
        found = []
        for model in (w, eager):
            b_leaf = b.clone().requires_grad_()
            out = model({"x": (a, b_leaf), "unused": "text"}, c, flag=flag)
            assert out["flag"] is flag and out["out"][1][1] is None and type(out["out"][1]) is tuple
            ((out["out"][0] * grad).sum() + out["more"]["z"] + (out["out"][1][0] ** 2).sum()).backward()
            found.append(b_leaf.grad)
        close(*found)
        same_state(w, eager)
    assert w.report().n_captures == 2


# --- modes ----------------------------------------------------------------------------------------


def test_train_eval_no_grad_inference():
    w, eager = pair(lambda: nn.Sequential(Norm(), MLPTail()))
    x = torch.randn(13, 5)
    for mode in ("train", "eval", "train", "eval"):
        for model in (w, eager):
            getattr(model, mode)()
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                a, b = w(x), eager(x)
                assert a.requires_grad == b.requires_grad and a.is_inference() == b.is_inference()
                close(a, b)
    same_state(w, eager)
    assert w.report().n_captures == 6  # every combination once


class MLPTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(x))


def test_dropout_seed():
    w, _ = pair(lambda: MLP(0.5))
    x = torch.randn(101, 5)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        w.zero_grad()
        out = w(x)
        out.sum().backward()
        return [out.detach(), *[p.grad.clone() for p in w.parameters()]]

    a, b, c = run(3), run(3), run(4)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])
    torch.manual_seed(3)
    assert not torch.equal(w(x), w(x))


def test_no_random_numbers_are_drawn_without_random_nodes():
    w, _ = pair(MLP)
    w(torch.randn(13, 5))
    before = torch.get_rng_state()
    w(torch.randn(1).expand(13, 5)) if False else w(torch.ones(13, 5)).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_capture_leaves_random_state_alone():
    w, _ = pair(lambda: MLP(0.5))
    torch.manual_seed(5)
    w.eval()
    w(torch.ones(13, 5))
    a = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(a, torch.rand(()))


def test_dropout_gradient_belongs_to_its_mask():
    """out = drop(x): the gradient must be nonzero exactly where the output is."""
    w = ORTModule(nn.Sequential(nn.Dropout(0.4)), strict=True)
    x = (torch.rand(101, 7) + 1).requires_grad_()
    out = w(x)
    grad = torch.randn(101, 7)
    out.backward(grad)
    keep = out != 0
    close(out, torch.where(keep, x / 0.6, 0.0))
    close(x.grad, torch.where(keep, grad / 0.6, 0.0))
    assert 0.5 < keep.double().mean() < 0.7


# --- the guard ------------------------------------------------------------------------------------


def changes() -> dict[str, Callable[[Any], None]]:
    def dropout_off(m: Any) -> None:
        m.drop.p = 0.0

    def attribute(m: Any) -> None:
        m.scale = 2.5

    def replace_parameter(m: Any) -> None:
        m.second.weight = nn.Parameter(m.second.weight.detach() * 0.5)

    def swap_data(m: Any) -> None:
        m.second.weight.data = m.second.weight.data * 0.5

    def ema(m: Any) -> None:
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(0.9)

    def replace_submodule(m: Any) -> None:
        m.second = nn.Sequential(nn.Linear(7, 11), nn.Tanh())
        for p in m.second.parameters():
            nn.init.constant_(p, 0.3)

    def bias_removed(m: Any) -> None:
        m.third.bias = None

    def hook(m: Any) -> None:
        m.second.register_forward_hook(lambda module, args, out: out * 3)

    def full_backward_hook(m: Any) -> None:
        m.second.register_full_backward_hook(lambda module, gi, go: tuple(g * 2 for g in gi))

    def freeze(m: Any) -> None:
        m.first.requires_grad_(False)

    def eval_child(m: Any) -> None:
        m.drop.eval()

    def parametrize(m: Any) -> None:
        class Double(nn.Module):
            def forward(self, w: Tensor) -> Tensor:
                return w * 2

        nn.utils.parametrize.register_parametrization(m.second, "weight", Double())

    return {f.__name__: f for f in (dropout_off, attribute, replace_parameter, swap_data, ema, replace_submodule, bias_removed, hook,
                                    full_backward_hook, freeze, eval_child, parametrize)}  # fmt: skip


@pytest.mark.parametrize("name", list(changes()))
def test_change_after_the_first_step_takes_effect(name):
    change = changes()[name]
    p = 0.5 if name in ("dropout_off", "eval_child") else 0.0
    eager = MLP(p)
    w = ORTModule(copy.deepcopy(eager))
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for model in (w, eager):
        step(model, x, grad)
        model.zero_grad()
        change(model)
    for _ in range(2):
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    report = w.report()
    assert not report.eager, str(report)
    assert report.n_captures == (1 if name in ("replace_parameter", "swap_data", "ema") else 2), str(report)


def test_frozen_batch_norm():
    w, eager = pair(Norm)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for frozen in (False, True, False):
        for model in (w, eager):
            model.bn.train(not frozen)
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)


def test_module_converted_to_another_dtype():
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    step(w, x, grad), step(eager, x, grad)
    for model in (w, eager):
        model.zero_grad()
        model.float()
    out, other = step(w, x.float(), grad.float()), step(eager, x.float(), grad.float())
    assert out[0].dtype == torch.float32
    for a, b in zip(out, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_attribute_that_forward_does_not_read_costs_no_capture():
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    for i in range(20):
        w.step_number = i
        w.notes = [torch.randn(2)]
        close(w(x), eager(x))
    assert w.report().n_captures == 1


def test_forward_that_assigns_attributes():
    class Keeps(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    eager = Keeps()
    w = ORTModule(copy.deepcopy(eager))
    x = torch.randn(13, 5)
    for _ in range(5):
        close(w(x), eager(x))
    assert w.calls == eager.calls == 5
    assert "assigns" in str(w.report())


def test_forward_that_fills_a_cache_once():
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(3, dtype=x.dtype)
            return self.fc(x) * self.table

    eager = Caches()
    w = ORTModule(copy.deepcopy(eager))
    x, grad = torch.randn(7, 5), torch.randn(7, 3)
    for _ in range(4):
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    assert sum(e.calls for e in w.report().eager) == 1 and w.report().graphs[0].forwards == 3


# --- shapes and numbers ---------------------------------------------------------------------------


def test_new_shapes_cost_one_more_capture():
    w, eager = pair(MLP)
    for rows in (13, 7, 13, 29, 1, 2, 31):
        x, grad = torch.randn(rows, 5), torch.randn(rows, 3)
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    report = w.report()
    assert report.n_captures == 2 and not report.eager, str(report)


def test_numbers_as_arguments():
    class Scaled(MLP):
        def forward(self, x: Tensor, alpha: float, n: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) * alpha + n

    w, eager = pair(Scaled)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for alpha, n in ((0.5, 2), (0.5, 2), (0.25, 2), (0.125, 3), (0.3, 5), (0.7, 7)):
        for model in (w, eager):
            model.zero_grad()
            model(x, alpha, n).backward(grad)
        close(w(x, alpha, n), eager(x, alpha, n))
        same_state(w, eager)
    assert w.report().n_captures <= 3 and not w.report().eager, str(w.report())


# --- hooks, host nodes, the ladder ----------------------------------------------------------------


def test_hooks_on_the_wrapper_run_once():
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    seen: dict[str, list[Any]] = {"w": [], "eager": []}
    for name, model in (("w", w), ("eager", eager)):
        model.register_forward_pre_hook(lambda m, args, n=name: (seen[n].append("pre"), (args[0] * 2,))[1])
        model.register_forward_hook(lambda m, args, out, n=name: (seen[n].append("post"), out * 3)[1])
        model.register_full_backward_hook(lambda m, gi, go, n=name: seen[n].append([g is None for g in gi]))
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True) if name == "eager" else ():
            close(a, b)
    same_state(w, eager)
    assert seen["w"] == seen["eager"] and len(seen["w"]) == 3


class Collects(nn.Module):
    """Returns what hooks on its layers have gathered, as feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.found: list[Any] = []
        for layer in self.layers:
            layer.register_forward_hook(lambda m, a, out: self.found.append(out))

    def forward(self, x):
        self.found.clear()
        for layer in self.layers:
            x = layer(x).tanh()
        return x, list(self.found)


def test_hooks_that_forward_reads():
    """What they gather belongs to the result: the module runs in PyTorch, and says why."""
    eager, inner = Collects(), Collects()
    inner.load_state_dict(eager.state_dict())
    ours = ORTModule(inner)
    x = torch.randn(3, 4)
    for _ in range(3):
        (a, seen), (b, got) = eager(x), ours(x)
        assert torch.equal(a, b) and len(got) == len(seen) == 3
        assert all(torch.equal(p, q) for p, q in zip(seen, got))
    assert "take part in what forward returns" in str(ours.report())


@pytest.mark.parametrize("kind", ["hidden_states", "attentions"])
def test_outputs_that_hugging_face_collects_by_hooks(kind):
    """Captured with the forward, also in later calls that do not ask for them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=37, vocab_size=101,
                                     hidden_dropout_prob=0, attention_probs_dropout_prob=0, attn_implementation="eager")
    eager = transformers.BertForMaskedLM(config).train()
    ours = ORTModule(copy.deepcopy(eager))
    ids = torch.randint(0, 101, (2, 9))
    for _ in range(3):
        want, got = (m(input_ids=ids, labels=ids, **{f"output_{kind}": True}) for m in (eager, ours))
        assert len(got[kind]) == len(want[kind]) > 0
        for a, b in zip(got[kind], want[kind]):
            torch.testing.assert_close(a, b)
        for m, out in ((eager, want), (ours, got)):
            m.zero_grad()
            (out.loss + sum(h.square().mean() for h in out[kind])).backward()
        for p, q in zip(eager.parameters(), ours.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    ours(input_ids=ids, labels=ids).loss.backward()
    assert ours.report().node_share == 1.0, str(ours.report())


def test_parameter_hooks():
    w, eager = pair(MLP, segment_mb=1e-5)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    order: dict[int, list[str]] = {0: [], 1: []}
    for k, model in enumerate((w, eager)):
        model.second.weight.register_hook(lambda g: g * 2)
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, n=name, k=k: order[k].append(n.split(".")[0]))
        step(model, x, grad)
    same_state(w, eager)
    assert list(dict.fromkeys(order[0])) == ["third", "second", "first"]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0]


class HostOps(nn.Module):
    """A custom Function and an operator that the engine does not have, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = Square.apply(self.first(x))
        values, _ = torch.topk(self.second(h), 4, dim=1)
        return self.third(values)


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_host_nodes(segment_mb):
    eager = HostOps()
    w = ORTModule(copy.deepcopy(eager), segment_mb=segment_mb)
    for rows in (13, 13, 7, 11):
        x, grad = torch.randn(rows, 5), torch.randn(rows, 3)
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    x, grads = torch.randn(13, 5), torch.randn(2, 13, 3)
    for model in (w, eager):
        one, two = model(x), model(x * 2)
        one.backward(grads[0], retain_graph=True)
        two.backward(grads[1])
        one.backward(grads[1])
    same_state(w, eager)
    with torch.no_grad():
        close(w(x), eager(x))
    report = w.report()
    names = " ".join(h.name for h in report.host)
    assert "Square" in names and "topk" in names and not report.eager, str(report)
    assert all(h.file == __file__ and h.line > 0 and h.reason for h in report.host), str(report)
    assert 0 < report.node_share < 1 and 0 < report.time_share < 1


def test_host_nodes_are_refused_by_strict():
    w = ORTModule(HostOps(), strict="engine")
    with pytest.raises(ortmodule.CaptureError, match=r"strict.*\n*"):
        w(torch.randn(13, 5))
    w = ORTModule(HostOps(), strict=True)  # as ONNX Runtime's FALLBACK_DISABLE: no submodule, not the module
    w(torch.randn(13, 5))
    assert len(w.report().host) == 2
    with pytest.raises(ortmodule.CaptureError, match="branch"):
        ORTModule(HasBranch(), strict=True)(torch.randn(13, 5))
    hooked = ORTModule(HasHook(), strict=True)  # hooks run between parts of the graph
    for _ in range(2):
        hooked(torch.randn(13, 7)).sum().backward()
    assert hooked.report().graphs


class HasHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)
        self.fc.register_full_backward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # depends on data
            return self.fc(x)
        return -self.fc(x) * 2


class HasBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.branch = Branches()
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.branch(self.first(x))))


def test_submodule_left_to_pytorch():
    eager = HasBranch()
    w = ORTModule(copy.deepcopy(eager))
    for rows in (13, 13, 7):
        for sign in (1, -1):
            x, grad = torch.randn(rows, 5) * sign + sign, torch.randn(rows, 3)
            for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
                close(a, b)
            same_state(w, eager)
    report = w.report()
    assert [h.name for h in report.host if h.kind == "module"][0] == "branch" and not report.eager, str(report)


def test_module_left_to_pytorch(caplog):
    eager = Branches()
    w = ORTModule(copy.deepcopy(eager))
    with caplog.at_level(logging.WARNING, "ortmodule"):
        for sign in (1, -1, 1):
            x, grad = torch.randn(13, 7) + 3 * sign, torch.randn(13, 7)
            for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
                close(a, b)
    same_state(w, eager)
    (entry,) = w.report().eager
    assert entry.calls == 3 and entry.file == __file__ and entry.line and entry.reason, str(w.report())
    assert len(caplog.records) == 1 and __file__ in caplog.text
    with pytest.raises(ortmodule.CaptureError):
        ORTModule(copy.deepcopy(eager), strict=True)(torch.randn(13, 7))


def test_error_of_the_user_is_the_users():
    eager = MLP()
    w = ORTModule(copy.deepcopy(eager))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        w(torch.randn(13, 6))
    x = torch.randn(13, 5)
    close(w(x), eager(x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        w(torch.randn(13, 6))
    with pytest.raises(TypeError):
        w(x, 3)
    close(w(x), eager(x))
    assert not w.report().eager, str(w.report())


def test_exception_in_the_middle():
    class Fails(torch.autograd.Function):
        armed = {"forward": False, "backward": False}

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if Fails.armed["forward"]:
                raise KeyError("forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if Fails.armed["backward"]:
                raise KeyError("backward")
            return grad * 2

    class Middle(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.third(torch.tanh(self.second(Fails.apply(self.first(x)))))

    eager = Middle()
    w = ORTModule(copy.deepcopy(eager), segment_mb=1e-5)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    step(w, x, grad), step(eager, x, grad)
    for where in ("forward", "backward"):
        Fails.armed[where] = True
        for model in (w, eager):
            model.zero_grad()
            with pytest.raises(KeyError, match=where):
                step(model, x, grad)
        Fails.armed[where] = False
        for model in (w, eager):
            model.zero_grad()
            step(model, x, grad)
        same_state(w, eager)


def test_inputs_edited_by_the_model():
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor, log: Tensor) -> Tensor:
            y = self.fc(x)
            log.add_(y.detach().mean(0))
            self.count += 1
            return y * self.count

    w, eager = pair(Edits)
    x, grad = torch.randn(7, 5), torch.randn(7, 3)
    logs = [torch.zeros(3), torch.zeros(3)]
    for _ in range(3):
        for model, log in zip((w, eager), logs, strict=True):
            version = log._version
            model(x, log).backward(grad)
            assert log._version > version
        close(*logs)
        same_state(w, eager)


# --- around ---------------------------------------------------------------------------------------


def test_checkpoint_and_saved_tensor_hooks():
    from torch.utils.checkpoint import checkpoint

    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for reentrant in (False, True):
        w, eager = pair(MLP, segment_mb=1e-5)
        for model in (w, eager):
            leaf = x.clone().requires_grad_()
            checkpoint(model, leaf, use_reentrant=reentrant).backward(grad)
        same_state(w, eager)
    w, eager = pair(MLP)
    for model in (w, eager):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            out = model(x)
        out.backward(grad)
    same_state(w, eager)


def test_prediction_stays_while_checkpoints_compute_again():
    """Which outputs receive gradients is learnt from the first backward, in which checkpoints still compute the other
    forwards again."""
    from torch.utils.checkpoint import checkpoint

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.a(x)), torch.softmax(self.b(x), -1)

    w, eager = pair(Both)
    x = torch.randn(13, 5)
    for _ in range(2):
        for model in (w, eager):
            out = x
            for _ in range(3):
                out = checkpoint(model, out, use_reentrant=False)[0]
            out.sum().backward()
        same_state(w, eager)


def test_functional_call_and_transforms():
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    own = {n: (p.detach() * 2).requires_grad_() for n, p in eager.named_parameters()}
    for _ in range(2):
        close(torch.func.functional_call(w, own, (x,)), torch.func.functional_call(eager, own, (x,)))
    a = torch.func.vmap(lambda v: w(v))(x)
    b = torch.func.vmap(lambda v: eager(v))(x)
    close(a, b)
    close(torch.func.grad(lambda v: w(v).sum())(x), torch.func.grad(lambda v: eager(v).sum())(x))
    assert any("transform" in e.reason for e in w.report().eager)


def test_anomaly_mode():
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    with torch.autograd.detect_anomaly(check_nan=True):
        for model in (w, eager):
            step(model, x, grad)
    same_state(w, eager)


def test_non_contiguous_and_expanded():
    w, eager = pair(MLP)
    x = torch.randn(5, 26).t()[::2]
    for model in (w, eager):
        model(x).sum().backward()  # an expanded gradient
    same_state(w, eager)
    for model in (w, eager):
        model.second.weight.data = torch.randn(7, 11, generator=torch.Generator().manual_seed(2)).t()
        model.zero_grad()
        model(x).backward(torch.ones(3, 13).t())
        assert model.second.weight.grad.stride() == model.second.weight.stride()
    same_state(w, eager)


def test_autocast():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        eager = MLP()
        w = ORTModule(copy.deepcopy(eager))
        x, grad = torch.randn(13, 5), torch.randn(13, 3)
        for on in (True, False, True):
            results = []
            for model in (w, eager):
                model.zero_grad()
                with torch.autocast("cpu", enabled=on):
                    out = model(x)
                out.backward(grad.to(out.dtype))
                results.append([out.detach(), *[p.grad for p in model.parameters()]])
            for a, b in zip(*results, strict=True):
                assert a.dtype == b.dtype
                assert torch.allclose(a.float(), b.float(), rtol=3e-2 if on else 1e-5, atol=3e-2 if on else 1e-6)
    finally:
        torch.set_default_dtype(before)


def test_report_and_log(caplog, tmp_path):
    w = ORTModule(MLP(), DebugOptions(save_onnx=True, onnx_prefix="mlp", save_path=str(tmp_path)))
    x = torch.randn(13, 5)
    with caplog.at_level(logging.INFO, "ortmodule"):
        for _ in range(4):
            w(x).sum().backward()
    assert len(caplog.records) == 1 and "100%" in caplog.text
    report = w.report()
    data = report.to_dict()
    assert data["n_captures"] == 1 and data["n_plans"] >= 1 and data["node_share"] == 1
    assert data["graphs"][0]["forwards"] == 4 and data["graphs"][0]["backwards"] == 4
    assert "capture" in str(report)
    assert [p.name for p in tmp_path.iterdir()] == ["mlp_MLP_0_training.onnx"]


def test_settings():
    assert resolve({"segment_mb": 3.0}, None, {}).segment_mb == 3.0
    assert resolve({"segment_mb": 3.0}, None, {"ORTMODULE_SEGMENT_MB": "5"}).segment_mb == 5.0
    assert resolve({}, None, {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"}).strict is True
    assert resolve({}, None, {"ORTMODULE_STRICT": "engine"}).strict == "engine" and resolve({}, None, {"ORTMODULE_STRICT": "1"}).strict is True
    with pytest.raises(ValueError, match="strict='some' is not allowed"):
        resolve({"strict": "some"}, None, {})
    for name, value in (("SEGMENT_MB", "-1"), ("STRICT", "maybe"), ("LOG_LEVEL", "LOUD"), ("MAX_CAPTURES", "0")):
        with pytest.raises(ValueError, match=f"ORTMODULE_{name}='{value}' is not allowed"):
            resolve({}, None, {f"ORTMODULE_{name}": value})


def test_settings_document():
    text = (Path(__file__).resolve().parent.parent / "docs" / "SETTINGS.md").read_text()
    assert text == config.doc(), "docs/SETTINGS.md is stale: python -c 'from ortmodule import config; print(config.doc(), end=\"\")'"


def test_refused_modules():
    m = MLP()
    m.first.weight.ds_id = 0
    with pytest.raises(RuntimeError, match="ZeRO-3"):
        ORTModule(m)

    class FSDPModule:
        pass

    sharded = MLP()
    sharded.first.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    with pytest.raises(RuntimeError, match="fully_shard"):
        ORTModule(sharded)


def test_disabled(monkeypatch):
    monkeypatch.setenv("ORTMODULE_DISABLE", "1")
    w = ORTModule(MLP())
    x = torch.randn(13, 5)
    assert torch.equal(w(x), w.module(x))
    assert w.report().n_captures == 0 and w.report().eager[0].calls == 1


# --- Hugging Face ---------------------------------------------------------------------------------


def gpt2(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_layer=1, n_embd=28, n_head=4, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **settings))


def test_hugging_face_output_and_generate():
    eager = gpt2().double().train()
    w = ORTModule(copy.deepcopy(eager))
    ids = torch.randint(97, (3, 13))
    outs = []
    for model in (w, eager):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        outs.append(out)
    ours, theirs = outs
    assert type(ours) is type(theirs) and list(ours.keys()) == list(theirs.keys())
    close(ours.logits.detach(), theirs.logits.detach())
    assert type(ours.past_key_values) is type(theirs.past_key_values)
    close(ours.past_key_values.layers[0].keys.detach(), theirs.past_key_values.layers[0].keys.detach())
    for (name, a), (_, b) in zip(w.named_parameters(), eager.named_parameters(), strict=True):
        # the model computes its loss in float32
        assert (a.grad - b.grad).abs().max() <= 1e-6 * b.grad.abs().max(), name
    w.eval(), eager.eval()
    settings = dict(max_new_tokens=7, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(w.generate(ids, **settings), eager.generate(ids, **settings))
    assert "cache" in w.report().eager[0].reason and w.report().n_captures == 1


@pytest.mark.slow
def test_hugging_face_trainer(tmp_path):
    """Trains, evaluates, smooths labels, saves, resumes: the same losses as without the wrapper."""
    transformers = pytest.importorskip("transformers")
    torch.set_default_dtype(torch.float32)
    random = torch.Generator().manual_seed(3)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(97, (24, 11), generator=random)]

    def run(wrap: bool, resume: bool) -> tuple[list[float], float]:
        where = tmp_path / str(wrap)
        model = ORTModule(gpt2(), strict=True) if wrap else gpt2()
        settings = transformers.TrainingArguments(
            str(where), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=6 if resume else 4, save_steps=4, logging_steps=1,
            report_to=[], use_cpu=True, label_smoothing_factor=0.1, seed=5, disable_tqdm=True)  # fmt: skip
        trainer = transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data[:8])
        trainer.train(resume_from_checkpoint=resume or None)
        trainer.save_model(str(where / "final"))
        again = transformers.GPT2LMHeadModel.from_pretrained(where / "final")
        assert list(again.state_dict()) == list(model.state_dict())
        return [h["loss"] for h in trainer.state.log_history if "loss" in h], trainer.evaluate()["eval_loss"]

    for resume in (False, True):
        (ours, our_eval), (theirs, their_eval) = run(True, resume), run(False, resume)
        assert ours == pytest.approx(theirs, rel=1e-5) and our_eval == pytest.approx(their_eval, rel=1e-5)


def test_many_captures_say_why(caplog):
    """One warning, at the sixteenth capture, with the reasons."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.scale = 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    model = ORTModule(Scaled(), max_captures=99)
    with caplog.at_level("WARNING", "ortmodule"):
        for i in range(9):
            for grad in (True, False):
                model.scale = float(i)
                model(torch.randn(4, 3, requires_grad=grad))
    said = [r.getMessage() for r in caplog.records if "captured" in r.getMessage()]
    assert len(said) == 1 and "captured 16 times" in said[0] and "changed: scale" in said[0] and "requires_grad of arguments" in said[0], said
    model(torch.randn(5, 3))
    assert [g.why for g in model.report().graphs][-1] == "changed: sizes of arguments", str(model.report())
