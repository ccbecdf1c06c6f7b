"""A wrapped model inside of what PyTorch and Hugging Face do around modules: checkpoints, functional calls,
transforms, anomaly mode, generate, Trainer."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from pairs import MLP, close, pair, same_state
from torch import Tensor, nn

from ortmodule import ORTModule, ladder

pytestmark = pytest.mark.usefixtures("seeded")


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


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_gradients_through_steps_of_training(steps: int):
    """MAML: the weights of a call are made from the gradients of the call before."""
    w, eager = pair(MLP)
    for model in (w, eager):
        model.double()
    for i in range(3):
        x, y = torch.randn(13, 5, dtype=torch.float64), torch.randn(13, 3, dtype=torch.float64)
        for model in (w, eager):
            model.zero_grad()
            fast = dict(model.named_parameters())
            for _ in range(steps):
                loss = (torch.func.functional_call(model, fast, (x,)) - y).square().mean()
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
            before = {n: p.data_ptr() for n, p in model.named_parameters()}
            (torch.func.functional_call(model, fast, (x + i,)) - y).square().mean().backward()
            assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
            assert all(type(p) is nn.Parameter for p in model.parameters())
        same_state(w, eager)


def test_cached_parametrizations():
    from torch.nn.utils import parametrize
    from torch.nn.utils.parametrizations import spectral_norm

    w, eager = pair(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), spectral_norm(nn.Linear(7, 3))))
    x, z = torch.randn(13, 5), torch.randn(13, 5)
    for _ in range(3):
        for model in (w, eager):
            model.zero_grad()
            with parametrize.cached():
                (model(x) - model(z).detach()).square().sum().backward()
            model(x).sum().backward()
        same_state(w, eager)
    assert any("cached" in e.reason for e in w.report().eager)


def test_anomaly_mode():
    """Such a call is PyTorch's, so that the error names the operation and the warning the line of forward."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(self.layer(x) * 0).sum()

    w = ORTModule(Root())
    x = torch.randn(13, 5)
    w(x).backward()
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"), torch.autograd.detect_anomaly(check_nan=True):
        loss = w(x)
        with pytest.raises(RuntimeError, match="returned nan values"), pytest.warns(UserWarning, match=r"torch\.sqrt\(self\.layer"):
            loss.backward()
    (told,) = w.report().eager
    assert told.calls == 1 and "detect_anomaly" in told.reason and w.report().graphs[0].forwards == 1


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


def test_the_newer_settings_of_precision() -> None:
    """They make PyTorch refuse the older question."""
    code = """
import torch
from ortmodule import ORTModule, ladder
torch.backends.cuda.matmul.fp32_precision = "tf32"
net = torch.nn.Linear(4, 4)
model, x = ORTModule(net), torch.randn(3, 4)
model(x).sum().backward()
torch.testing.assert_close(model(x), torch.nn.functional.linear(x, net.weight, net.bias))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Preempted(Exception):
    pass


def test_a_signal_during_a_capture_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler raises is not taken for a capture that has failed, and comes when that is over."""

    def handler(number: int, frame: Any) -> None:
        raise Preempted

    def climb(*args: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return climbed(*args)

    climbed = ladder.climb
    monkeypatch.setattr(ladder, "climb", climb)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        w = ORTModule(MLP())
        with pytest.raises(Preempted):
            w(torch.randn(13, 5))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not w.report().failed and not w.report().eager and len(w.report().graphs) == 1


def test_where_saved_tensors_hooks_are_forbidden() -> None:
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for k in range(4):  # at the first and second calls forward is looked at
        for model in (w, eager):
            with torch.autograd.graph.disable_saved_tensors_hooks("none here") if k < 3 else contextlib.nullcontext():
                model(x).backward(grad)
        same_state(w, eager)
    assert [g.forwards for g in w.report().graphs] == [4]


def test_conversions_by_swapping() -> None:
    """torch.utils.swap_tensors wants that nobody holds a weak reference to a parameter."""
    gc.disable()
    try:
        w, eager = pair(MLP)
        x, grad = torch.randn(13, 5), torch.randn(13, 3)
        for model in (w, eager):
            model(x).backward(grad)
            model.zero_grad()
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                model.double()
                model.load_state_dict(model.state_dict())
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
            model(x.double()).backward(grad.double())
        same_state(w, eager)
    finally:
        gc.enable()


def test_symbolic_trace() -> None:
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    w(x)
    traced = torch.fx.symbolic_trace(w)
    close(traced(x), eager(x))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["first", "drop", "second", "third"]


class Scaled(Tensor):
    """A weight whose class decides what a product with it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 0.5 if func is nn.functional.linear else out


def test_a_parameter_of_a_class_of_its_own() -> None:
    """PyTorch runs what has it, the engine the rest."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(nn.Linear(5, 5), nn.Sequential(MLP(), nn.Linear(3, 3))).double())
        made[-1][0].weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64).as_subclass(Scaled))
    ours, eager = ORTModule(made[0]), made[1]
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(3):
        for m in (ours, eager):
            m.zero_grad()
            m(x).square().sum().backward()
        for p, q in zip(ours.parameters(), eager.parameters()):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad.as_subclass(Tensor), q.grad.as_subclass(Tensor), rtol=1e-10, atol=1e-12)
    (told,) = [e for e in ours.report().eager if not e.module]
    assert "0.weight is a Scaled, a subclass of Tensor" in told.reason and told.by_parts == 3


def _given_parameter(m: nn.Module) -> None:
    m.layer.weight = nn.Parameter(m.layer.weight.detach().as_subclass(Scaled))


def _given_class(m: nn.Module) -> None:
    m.layer.weight.__class__ = Scaled


def _given_buffer(m: nn.Module) -> None:
    m.matrix = m.matrix.as_subclass(Scaled)


def _given_attribute(m: nn.Module) -> None:
    m.plain = m.plain.as_subclass(Scaled)


@pytest.mark.parametrize("edit", [_given_parameter, _given_class, _given_buffer, _given_attribute])
def test_a_tensor_that_gets_a_class_of_its_own_after_a_capture(edit: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.register_buffer("matrix", torch.randn(5, 5))
            self.plain = torch.randn(5, 5, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.linear(torch.tanh(self.layer(x)), self.matrix)
            return nn.functional.linear(y, self.plain)

    eager = Net().double()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(4, 5, dtype=torch.float64)
    for step in range(4):
        if step == 2:
            edit(ours)
            edit(eager)
        for m in (ours, eager):
            m.zero_grad()
        mine, theirs = ours(x), eager(x)
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine.as_subclass(Tensor), theirs.as_subclass(Tensor), rtol=1e-10, atol=1e-12)
        mine.square().sum().backward()
        theirs.square().sum().backward()
        for p, q in zip(ours.parameters(), eager.parameters()):
            torch.testing.assert_close(p.grad.as_subclass(Tensor), q.grad.as_subclass(Tensor), rtol=1e-10, atol=1e-12)


def test_attributes_of_parameters_in_second_derivatives() -> None:
    class Fast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.layer.weight.rate = 2.0  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(nn.functional.linear(x, self.layer.weight * self.layer.weight.rate, self.layer.bias))

    eager = Fast().double()
    ours = ORTModule(copy.deepcopy(eager))
    ours.layer.weight.rate = eager.layer.weight.rate = 2.0  # copies have none
    got = []
    x = torch.randn(4, 5, dtype=torch.float64)
    for m in (ours, eager):
        g = torch.autograd.grad(m(x).sum(), [*m.parameters()], create_graph=True)
        got.append(torch.autograd.grad(sum(t.square().sum() for t in g), [*m.parameters()]))
    for a, b in zip(*got):
        close(a, b)
