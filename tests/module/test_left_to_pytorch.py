"""What the engine does not run: hooks, host nodes, submodules and modules left to PyTorch, exceptions."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from pairs import MLP, close, pair, same_state, step
from torch import Tensor, nn

import ortmodule
from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


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


@pytest.mark.parametrize("strict", [False, True, "engine"])
@pytest.mark.parametrize("kind", ["hidden_states", "attentions"])
def test_outputs_that_hugging_face_collects_by_hooks(kind, strict):
    """Captured with the forward, also in later calls that do not ask for them; the call that installs them is no call of PyTorch's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=37, vocab_size=101,
                                     hidden_dropout_prob=0, attention_probs_dropout_prob=0, attn_implementation="eager")
    eager = transformers.BertForMaskedLM(config).train()
    ours = ORTModule(copy.deepcopy(eager), strict=strict)
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
    assert ours.report().node_share == 1.0 and not ours.report().eager, str(ours.report())


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
        values, _ = torch.cummax(self.second(h), dim=1)
        return self.third(values[:, 3:])


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
    assert "Square" in names and "cummax" in names and not report.eager, str(report)
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
        if int(x.sum() > 0):  # depends on data
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
