"""Training beside eager: order and number of backwards, gradients of some inputs and outputs, state that is freed,
tensors edited in place, threads, frozen and shared parameters."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from pairs import MLP, Norm, close, nodes_in_engine, pair, same_state, step
from torch import Tensor, nn

import ortmodule

pytestmark = pytest.mark.usefixtures("seeded")


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


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
@pytest.mark.parametrize("make", [MLP, Norm])
def test_training_equals_eager(make, segment_mb):
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
    gc.collect()  # of tests before this one
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
def test_backwards_on_several_threads(segment_mb):
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
def test_second_order_gradients(segment_mb):
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


class Counted(torch.nn.Module):
    """Numbers among the results, some known when it is captured, and the same result twice."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.fc(x))
        return {"rows": x.shape[0], "h": h, "none": None, "more": [x.shape[0] * 2, h, 7, h.detach(), h.sum()]}


def test_create_graph_beside_numbers_that_vary():
    w, eager = pair(Counted)
    for rows in (5, 2, 3):
        x, both = torch.randn(rows, 4), []
        for m in (w, eager):
            m.zero_grad()
            z = x.clone().requires_grad_()
            out = m(z)
            assert out["rows"] == rows and out["more"][0] == 2 * rows
            total = (out["more"][1].sin() + out["more"][3]).sum() + out["more"][4].square()
            (gx,) = torch.autograd.grad(total, z, create_graph=True)
            gx.square().sum().backward()
            both.append([gx.detach(), z.grad, *[p.grad for p in m.parameters()]])
        for a, b in zip(*both, strict=True):
            close(a, b)
    assert len(w.report().graphs) == 2


class Edits(torch.nn.Module):
    """Forward edits a tensor that its result is made of: a buffer, an argument, an attribute."""

    def __init__(self, what="argument", rows=3):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(rows, 4)) if what == "buffer" else None
        if what == "attribute":
            self.kept = torch.ones(rows, 4)

    def forward(self, x, y=None):
        y = self.kept if y is None else y
        y.add_(1)
        return torch.tanh(self.fc(x)) * y[:3]


@pytest.mark.parametrize("what", ["argument", "buffer"])
def test_create_graph_where_forward_edits(what):
    """It is run again on what it has edited, as that was."""
    w, eager = pair(lambda: Edits(what))
    for plain in (True, False, False):
        x, both = torch.randn(3, 4), []
        for m in (w, eager):
            m.zero_grad()
            z, y = x.clone().requires_grad_(), torch.ones(3, 4)
            out = m(z, *[y] * (what == "argument"))
            (gx,) = torch.autograd.grad(out.square().sum(), z, create_graph=not plain)
            if not plain:
                gx.square().sum().backward()
            both.append([gx.detach(), y, *[p.grad for p in m.parameters() if not plain], *m.buffers()])
        for a, b in zip(*both, strict=True):
            close(a, b)


def test_create_graph_where_what_was_edited_is_gone():
    w, _ = pair(lambda: Edits("attribute"))
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"edits kept: a tensor that is no buffer"):
        torch.autograd.grad(w(x).sum(), x, create_graph=True)
    assert torch.equal(w.kept, torch.full((3, 4), 2.0))
    w, eager = pair(lambda: Edits("buffer", rows=300_000))  # no copy of that is made for each step
    for m in (w, w, eager, eager):
        m(x).sum().backward()
    with pytest.raises(RuntimeError, match="overwritten.*kept.*Run the forward again"):
        torch.autograd.grad(w(x).sum(), x, create_graph=True)
    eager(x)
    close(*[torch.autograd.grad(m(x).square().sum(), x, create_graph=True)[0] for m in (w, eager)])


def test_create_graph_with_dropout():
    """More of it: test_second_dropout.py."""
    w, _ = pair(lambda: MLP(0.5))
    x = torch.randn(13, 5, requires_grad=True)
    out = w(x)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    close(again, first)


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


@pytest.mark.parametrize("segment_mb", [1e-4, 25])
def test_an_output_that_is_not_asked_for_adds_no_zero_times_infinity(segment_mb: float):
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.b(self.a(x).relu())
            return y, (y * 0).sqrt().sum(1)

    w, eager = pair(Roots, segment_mb=segment_mb)
    x = torch.randn(13, 5)
    for _ in range(3):
        gradients = []
        for model in (w, eager):
            leaf = x.clone().requires_grad_()
            model(leaf)[0].square().sum().backward()
            gradients.append(leaf.grad)
        assert bool(gradients[0].isfinite().all())
        close(*gradients)
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


def test_the_error_of_an_edit_names_what_backward_reads():
    """Also when all is edited, as by load_state_dict between forward and backward: of the first layer the argument
    alone is read."""
    w, _ = pair(MLP)
    out = w(torch.randn(13, 5))
    w.load_state_dict({k: 2 * v for k, v in w.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"an inplace operation: second\.weight.*Backward reads it") as told:
        out.sum().backward()
    assert "other outputs" not in str(told.value)


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
