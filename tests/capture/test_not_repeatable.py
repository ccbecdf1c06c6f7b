"""What forward asks of PyTorch and a graph cannot repeat (capture/refused.py): the same numbers as eager over several
steps, and the reason named. Also outputs that share memory with an input or another output."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from ortmodule import ORTModule


class Net(nn.Module):
    """`rule` computes; its part that asks stands in a submodule, beside one that does not."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Inner(rule)

    def forward(self, x: Tensor) -> Any:
        return self.inner(torch.tanh(self.first(x)))


class Inner(nn.Module):
    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.rule = rule
        self.register_buffer("b", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.rule(self, x)


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for x in out for t in tensors(x)]


def steps(rule: Callable[..., Any], use: Callable[..., Any] | None = None, n: int = 3, size: int = 3) -> ORTModule:
    """Trains beside eager in fp64; the wrapper."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        eager = Net(rule).double()
    ours = ORTModule(copy.deepcopy(eager))
    given = torch.randn(size, 4, dtype=torch.float64)
    for step in range(n):
        seen = []
        for m in (eager, ours):
            torch.manual_seed(step)
            x = given.clone().requires_grad_()
            out = tensors(use(m, x) if use else m(x))
            (sum((t * (i + 1)).sin().sum() for i, t in enumerate(out) if t.requires_grad) + x.sum() * 0).backward()
            seen.append([t.detach() for t in out] + [x.grad, *[p.grad for p in m.parameters()], *[b.clone() for b in m.buffers()]])
        for a, b in zip(*seen, strict=True):
            assert (a is None) == (b is None), f"step {step}: None on one side"
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12, msg=lambda m, s=step: f"step {s}: {m}")
    return ours


def by_hook(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    h.register_hook(lambda g: -2 * g)
    return h.sin()


def by_retain(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    h.retain_grad()
    return h.sin()


def by_seed(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return m.l(x) * torch.randn(4, dtype=x.dtype)


early_seed = torch.manual_seed


def by_seed_bound_early(m: Any, x: Tensor) -> Tensor:
    early_seed(7)
    return m.l(x) * torch.randn(4, dtype=x.dtype)


def by_fork(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.random.seed()
        torch.manual_seed(3)
        noise = torch.randn(4, dtype=x.dtype)
    return m.l(x) * noise


def by_grad(m: Any, x: Tensor) -> Tensor:
    return m.l(x) * (1.0 if m.l.weight.grad is None else 2.0)


def by_version(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).relu_()
    return h * float(h._version)


def by_leaf(m: Any, x: Tensor) -> Tensor:
    return m.l(x) * (2.0 if x.is_leaf else 1.0)


@pytest.mark.parametrize(("rule", "reason"), [
    (by_hook, "register_hook"), (by_retain, "retain_grad"), (by_seed, "random generator"), (by_seed_bound_early, "random generator"),
    (by_fork, "random generator"), (by_grad, "Tensor.grad"), (by_version, "_version"), (by_leaf, "is_leaf")])
def test_the_module_that_asks_stays_in_pytorch(rule: Callable[..., Any], reason: str) -> None:
    """A submodule kept in PyTorch has tensors of its own: what asks about tensors takes the whole module with it."""
    report = steps(rule).report()
    if rule in (by_grad, by_version, by_leaf):
        assert [e.reason for e in report.eager if reason in e.reason], str(report)
    else:
        assert [h.name for h in report.host] == ["inner"] and not report.eager, str(report)
    with pytest.raises(Exception, match=reason):
        ORTModule(Net(rule), strict=True)(torch.randn(2, 4))


def test_what_may_be_asked_stays_in_the_engine() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        h = m.l(x)
        return h * (2.0 if h.requires_grad and h.grad_fn is not None else 1.0)

    assert not steps(rule).report().host


def test_forward_is_told_that_nothing_is_compiled() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        return m.l(x) * (3.0 if torch.compiler.is_compiling() or torch.compiler.is_exporting() else 1.0)

    asked = torch.compiler.is_compiling.__code__
    assert not steps(rule).report().host
    assert torch.compiler.is_compiling.__code__ is asked and not torch.compiler.is_compiling()


def test_a_triangular_system_is_solved_as_in_eager() -> None:
    """Qwen3-Next replaces the solver by a loop over 64 rows when it is exported: five times as many nodes."""
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, layer_types=["linear_attention"], mlp_only_layers=[0], use_cache=False,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = Qwen3NextForCausalLM(config).train()
    ours, ids = ORTModule(copy.deepcopy(eager)), torch.randint(1, 32, (2, 70))
    for m in (eager, ours):
        m(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)
    (graph,) = ours.report().graphs
    assert graph.nodes < 400 and "solve_triangular" in str(ours.report())


def test_the_generator_is_whole_again() -> None:
    generator = torch.random.default_generator
    steps(by_seed)
    assert torch.random.default_generator is generator
    torch.manual_seed(1)
    a = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(a, torch.rand(3))


def test_encoder_that_drops_padding_in_eval() -> None:
    torch.manual_seed(0)
    eager = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), 1)
    ours = ORTModule(copy.deepcopy(eager))
    x, pad = torch.randn(2, 5, 4), torch.tensor([[False] * 5, [False, False, True, True, True]])
    for m in (eager, ours):
        m.train()
        m(x, src_key_padding_mask=pad).sum().backward()
    assert ours.report().graphs
    with torch.no_grad():
        for _ in range(2):
            a, b = eager.eval()(x, src_key_padding_mask=pad), ours.eval()(x, src_key_padding_mask=pad)
            torch.testing.assert_close(b, a)


def test_an_encoders_kernel_under_autocast() -> None:
    """In training, and with gradients, the engine's; in eval mode without them one kernel's, whose result is bf16."""
    torch.manual_seed(0)
    eager = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), 1)
    ours, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 5, 4)
    for training, grad in ((True, True), (False, False), (False, True)):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
                a, b = eager.train(training)(x), ours.train(training)(x)
            assert a.dtype == b.dtype == (torch.float32 if grad else torch.bfloat16)
            torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)
    assert ours.report().graphs


# --- memory that outputs share --------------------------------------------------------------------


def edit_first(m: nn.Module, x: Tensor) -> list[Tensor]:
    out = tensors(m(x))
    loss = sum((t * t).sum() for t in out)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        out[0].mul_(3)
    return [t.detach() for t in out]


def edit_and_train(m: nn.Module, x: Tensor) -> list[Tensor]:
    out = tensors(m(x))
    out[0].mul_(2)
    return out


@pytest.mark.parametrize("rule", [
    lambda m, x: (lambda h: (h, h[:, 1], h.view(-1)))(m.l(x)),
    lambda m, x: (lambda h: (h.t(), h))(m.l(x)),
    lambda m, x: (lambda h: (h, h.narrow(1, 1, 2)[:2]))(m.l(x)),
    lambda m, x: (lambda h: (h, h.detach()))(m.l(x)),
    lambda m, x: (lambda h: (h, h.unfold(0, 2, 1)))(m.l(x)),
], ids=["base first", "view first", "chain", "detach", "unfold"])  # fmt: skip
@pytest.mark.parametrize("use", [edit_first, edit_and_train])
def test_outputs_share_memory_as_in_eager(rule: Callable[..., Any], use: Callable[..., Any]) -> None:
    steps(rule, use)


class Window(nn.Module):
    """Outputs that are views of an argument, of a buffer and of an argument edited in place."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("b", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        y.add_(1)
        with torch.no_grad():
            self.b += 1
        return self.l(x), x[:1], y.t()[1:], self.b[:2]


def test_outputs_that_are_views_of_inputs() -> None:
    eager = Window()
    ours = ORTModule(copy.deepcopy(eager))
    for n in (3, 3, 5):
        seen = []
        for m in (eager, ours):
            x, y = torch.ones(n, 4), torch.ones(n, 4)
            out = m(x, y)
            for t in out[2:]:
                t.mul_(5)
            out[0].sum().backward()
            out[1].mul_(5)
            seen.append([x, y, *out, *m.buffers()])
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(b, a)
    assert not ours.report().eager


class LossAndLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.l(x)
        return h.square().sum(), h, self.l(x + 1)


def test_looking_between_outputs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = ORTModule(LossAndLogits())
    said = "retain_grad() on an output"
    for look in (False, True, True):
        loss, logits, other = ours(torch.randn(3, 4))
        other.retain_grad()  # no other output is computed from it
        if look:
            logits.register_hook(lambda g: None)
        loss.backward()
        assert (said in caplog.text) == look
    assert caplog.text.count(said) == 1


class Draws(nn.Module):
    """Kept in PyTorch for its randomness; what it does besides is as much part of forward as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.linear(x) * random.random()


class Counted(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counted.runs += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws, self.last = Draws(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.draws(x)
        Counted.apply(x)
        return self.last(x)


def test_what_a_user_wrote_runs_whoever_reads_its_result() -> None:
    torch.manual_seed(0)
    eager = Unread()
    wrapped = ORTModule(copy.deepcopy(eager))
    for step in range(4):
        x, runs = torch.randn(2 + step, 3), []
        for m in (eager, wrapped):
            random.seed(step)
            before = Counted.runs
            m(x).sum().backward()
            runs.append((m.draws.calls, m.draws.seen.item(), Counted.runs - before, random.random()))
        assert runs[0] == runs[1]
    assert wrapped.draws.linear.weight.grad is None


class EditsPlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.plain = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.plain.add_(1)
        return h * self.plain


def test_a_capture_leaves_versions_to_a_backward_that_waits() -> None:
    """With a hook the first call runs in PyTorch and is captured behind that: its graph holds the tensors that the
    capture edits and puts back."""
    torch.manual_seed(0)
    eager = EditsPlainTensor()
    wrapped = ORTModule(copy.deepcopy(eager))
    for m in (eager, wrapped):
        m.linear.register_forward_hook(lambda module, args, out: None)
    for _ in range(3):
        x = torch.randn(2, 3)
        for m in (eager, wrapped):
            m.zero_grad()
            m(x).sum().backward()
        assert torch.equal(eager.plain, wrapped.plain)
        torch.testing.assert_close(wrapped.linear.weight.grad, eager.linear.weight.grad)


class UnreadOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(3, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.gru(x[None])
        return self.last(x)


def test_errors_of_unread_operators_are_not_raised() -> None:
    """Stated in docs/SEMANTICS.md: what is PyTorch's own and read by nobody is not computed."""
    eager = UnreadOperator()
    wrapped = ORTModule(copy.deepcopy(eager))
    wrapped(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="sequence length"):
        eager(torch.randn(0, 3))
    assert wrapped(torch.randn(0, 3)).shape == (0, 3)
