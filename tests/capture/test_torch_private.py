"""Names of PyTorch that are not public: without each of them the package does what the name's row says."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule, holders, ranks
from ortmodule import checkpoint as saved
from ortmodule import torch_private as private
from ortmodule.optim import FusedAdam, lists

ROWS = {row.field: row for row in private.TABLE}


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    yield
    private.forget()
    holders.holders_when_dropped.cache_clear()


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if this PyTorch did not have these names."""
    look_up = private._look_up
    monkeypatch.setattr(private, "_look_up", lambda path: (private._ABSENT, None) if path in names else look_up(path))
    private.forget()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        logits = torch.tanh(self.layers(x))
        return logits.square().mean(), logits


def alike(model: nn.Module, use: Callable[[nn.Module], Any], steps: int = 3, **options: Any) -> ORTModule:
    """Wrapped and as it is, used in the same way, it gives the same."""
    torch.manual_seed(0)
    ours = ORTModule(copy.deepcopy(model), **options)
    for _ in range(steps):
        results = []
        for m in (ours, model):
            m.zero_grad()
            results.append((use(m), [p.grad for p in m.parameters()], list(m.buffers())))
        torch.testing.assert_close(*results)
    return ours


def train(m: nn.Module, rows: int = 3) -> Any:
    loss, logits = m(torch.arange(8.0 * rows).view(rows, 8) / 40)
    loss.backward()
    return loss.detach(), logits.detach()


def in_engine(ours: ORTModule) -> None:
    assert ours.report().graphs[0].forwards and not ours.report().eager


def twice(m: nn.Module) -> None:
    loss, logits = m(torch.ones(2, 8))
    loss.backward(retain_graph=True)
    logits.sum().backward()


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).sum(), self.other(x).sum()


def either(m: nn.Module) -> None:
    for both in (True, False):
        one, other = m(torch.ones(2, 8))
        (one + other if both else other).backward()


def checkpointed(m: nn.Module) -> Tensor:
    loss = checkpoint(lambda x: m(x)[0], torch.ones(2, 8), use_reentrant=False)
    loss.backward()
    return loss.detach()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=True).sum()  # type: ignore[no-any-return]


def checkpoint_inside() -> None:
    def run(m: nn.Module) -> Tensor:
        loss = m(torch.ones(2, 8, requires_grad=True))
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    in_engine(alike(Inside(), run))


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).squeeze(0).cumsum(0)


def sizes(m: nn.Module) -> list[Any]:
    return [train(m, rows) for rows in (3, 1, 2)]


def no_batched_gradients() -> None:
    ours = ORTModule(nn.Linear(4, 4))
    y = ours(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="this PyTorch .* has no"):
        torch.autograd.grad(y, list(ours.parameters()), torch.ones(3, 2, 4), is_grads_batched=True)


def no_vmap() -> None:
    ours = ORTModule(nn.Linear(4, 4))
    y = ours(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="this PyTorch .* has no"):
        torch.func.vmap(lambda g: torch.autograd.grad(y, list(ours.parameters()), g))(torch.ones(3, 2, 4))


def zero_gradients(m: nn.Module) -> None:
    loss, logits = m(torch.ones(2, 8))
    torch.autograd.backward([loss, logits], [torch.ones(()), torch._efficientzerotensor((2, 8))])


def masked(m: nn.Module) -> Tensor:
    y: Tensor = m(torch.linspace(-1, 1, 40).view(2, 5, 4), nn.Transformer.generate_square_subsequent_mask(5))
    y.sum().backward()
    return y.detach()


def stays(ours: ORTModule) -> None:
    assert ours.report().eager or any(h.kind == "module" for h in ours.report().host)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum().item() > 0 else -self.a(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]  # type: ignore[no-any-return]


def lengths(m: nn.Module) -> list[Tensor]:
    return [m(torch.linspace(-1, 1, 8 * n).view(2, n, 4)) for n in (3, 5)]


class Ranked(nn.Module):
    """A loss that autocast computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.margin_ranking_loss(self.a(x), x, torch.ones_like(x))


def lowered(m: nn.Module) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = m(torch.linspace(-1, 1, 8).view(2, 4))
    y.backward()
    return [y, *[g for p in m.parameters() if (g := p.grad) is not None]]


class Numbers(nn.Module):
    """Its own forward cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(x * float(x.numpy().sum()))  # type: ignore[no-any-return]


def whole(model: nn.Module) -> None:
    ours = alike(model, train)
    assert ours.report().eager[0].by_parts == 0 and not ours.report().graphs


def hooked() -> None:
    torch.manual_seed(0)
    model = Tower()
    seen: list[Tensor] = []
    model.layers[1].register_forward_hook(lambda _m, _x, y: seen.append(y.detach()))
    ours = alike(model, train)
    assert len(seen) == 6 and {e.reason for e in ours.report().eager} >= {private.lacks("hooks")}


def no_net() -> None:
    ours = alike(Tower(), train)
    in_engine(ours)
    assert {g.unchecked for g in ours.report().graphs} == {private.lacks("net")}


def lists_are_the_same() -> None:
    torch.manual_seed(0)
    src = [torch.randn(3, dtype=torch.complex64), torch.randn(2, 2, dtype=torch.complex64)]
    assert lists.grad_norm(src)[0] == pytest.approx(torch.cat([t.flatten() for t in src]).norm().item())
    dst = [torch.empty_like(t) for t in src]
    lists.scale_into(dst, src, 0.5)
    assert all(torch.equal(d, s * 0.5) for d, s in zip(dst, src, strict=True))


def wrapper_is_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    p = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="a wrapper of other tensors"):
        FusedAdam([p]).step()


def no_ranges() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        in_engine(alike(Tower(), train))
    assert not [e for e in seen.events() if e.name.startswith("ORTModule ")]


def sharded_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        block = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(RuntimeError, match="DTensor"):
            ORTModule(block)
    finally:
        dist.destroy_process_group()


def gone_has_no_name():
    assert private.store() is None
    assert "a rank does not answer" == saved._absent(private.store(), 1, 2, 0.0)


def gathers_name_nobody() -> None:
    from torch.distributed import fsdp  # noqa: F401

    ranks._patch()
    group = private._look_up(ROWS["fsdp_group"].names[1])[0]
    assert not hasattr(group, "_ortmodule_named")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act = nn.Tanh()
        self.layers = nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        return y.square().mean(), y


def no_transformed_buffers() -> None:
    class Steps(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.steps = self.steps + 1
            y = super().forward(x)
            return y.square().mean(), y

    model, x = alike(Steps(), train), torch.ones(3, 8)
    in_engine(model)
    torch.func.jvp(model, (x,), (x,))
    before = int(model.steps)
    train(model)
    assert int(model.steps) > before and type(model.steps.data) is Tensor


def symbolic_for_files() -> None:
    class Inverts(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.linalg.inv(super().forward(x) + 9 * torch.eye(8))
            return y.square().mean(), y

    torch.onnx.register_custom_op_symbolic("aten::linalg_inv", lambda g, x: g.op("Inverse", x), 15)
    model = ORTModule(Inverts(8, 8))
    model(torch.eye(8))[0].backward()
    torch.onnx.unregister_custom_op_symbolic("aten::linalg_inv", 15)
    assert [h.reason for h in model.report().host] == ["no row in the operator table"]


def no_optimizer_on_a_device() -> None:
    line = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    with pytest.raises(ValueError, match="_global_optimizer_pre_hooks.*save_for_device takes no optimizer of torch.optim"):
        ORTModule(line).save_for_device("nowhere", torch.ones(1, 3), optimizer=torch.optim.SGD(line.parameters(), 0.1))



WITHOUT: dict[str, Callable[[], Any]] = {
    "parametrized": lambda: in_engine(alike(Tower(), train)),
    "tracing": lambda: in_engine(alike(Tower(), train)),
    "keep_graph": lambda: in_engine(alike(Tower(), twice)),
    "task_id": lambda: (in_engine(alike(Tower(), train, segment_mb=1e-4)), alike(Tower(), checkpointed)),
    "storage_use_count": lambda: in_engine(alike(Tower(), train)),
    "mode_stack": lambda: in_engine(alike(Tower(), train)),
    "vmap_nesting": no_batched_gradients,
    "is_transformed": no_transformed_buffers,
    "functorch": no_vmap,
    "queue_callback": lambda: in_engine(alike(Tower(), twice, segment_mb=1e-4)),
    "tensor_hooks": lambda: in_engine(alike(Tower(), train)),
    "post_hooks": lambda: in_engine(alike(Apart(), either)),
    "is_zero": lambda: in_engine(alike(Tower(), zero_gradients)),
    "profiler": no_ranges,
    "hooks_allowed": lambda: in_engine(alike(Tower(), train)),
    "call_of_module": lambda: whole(Numbers()),
    "export_map": lambda: in_engine(alike(Tower(), train)),
    "describer": lambda: in_engine(alike(Tower(), train)),
    "call_impl": hooked,
    "set_version": lambda: in_engine(alike(Tower(), train)),
    "size_config": lambda: in_engine(alike(Tower(), sizes)),
    "size_node": lambda: in_engine(alike(Tower(), sizes)),
    "or_false": lambda: alike(Squeezed(), lambda m: [m(torch.ones(rows, 4)).sum().backward() for rows in (2, 3, 1, 2)]),
    "unbacked": lambda: stays(alike(Asks(), lambda m: m(torch.ones(2, 4)).sum().backward())),
    "module_tracer": lambda: stays(alike(Shared(), train)),
    "surely": lambda: in_engine(alike(Tower(), sizes)),
    "trace_lines": lambda: in_engine(alike(Tower(), train)),
    "graph_code": lambda: in_engine(alike(Tower(), train)),
    "known_results": lambda: in_engine(alike(Tower(), sizes)),
    "checkpoint": checkpoint_inside,
    "transformer": lambda: in_engine(alike(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 1), masked)),
    "composite_kernel": lambda: alike(Recurrent(), lengths),
    "has_kernel": lambda: alike(Ranked(), lowered),
    "onnx_symbolics": symbolic_for_files,
    "NoTorchFunction": no_net,
    "makers": no_net,
    "composable": sharded_is_refused,
    "default_store": gone_has_no_name,
    "fsdp_group": gathers_name_nobody,
    "backend_of": lambda: private.patience(),
    "foreach_norm": lists_are_the_same,
    "foreach_copy": lists_are_the_same,
    "foreach_mul": lists_are_the_same,
    "step_hooks": no_optimizer_on_a_device,
    "is_wrapper": wrapper_is_refused,
}


def test_every_name_is_there():
    """With this PyTorch: a new one that lacks some is to be looked at."""
    private.forget()
    assert private.missing() == []


@pytest.mark.parametrize("field", [field for field, row in ROWS.items() if row.need not in ("call", "capture")])
def test_without_it_the_row_holds(field, monkeypatch, caplog):
    row = ROWS[field]
    hide(monkeypatch, row.names[0])
    with caplog.at_level(logging.WARNING, "ortmodule"):
        WITHOUT[field]()
        WITHOUT[field]()
    (line,) = private.missing()
    assert row.names[0] in line and row.without in line
    assert [r.getMessage() for r in caplog.records if row.names[0] in r.getMessage()][:1] == [line]
    assert sum(r.getMessage() == line for r in caplog.records) == 1
    report = ORTModule(nn.Linear(2, 2)).report()
    assert report.missing == [line] and f"  {line}" in str(report).splitlines() and report.to_dict()["missing"] == [line]


@pytest.mark.parametrize("field", [field for field, row in ROWS.items() if row.need in ("call", "capture")])
def test_what_cannot_be_without_it_is_refused_by_name(field, monkeypatch):
    row = ROWS[field]
    for name in row.names[:1] + row.names[-1:]:
        hide(monkeypatch, name)
        ours = alike(Tower(), train)
        (entry,) = ours.report().eager
        assert name in entry.reason and row.without in entry.reason and entry.calls == 3
        with pytest.raises(Exception, match=re.escape(name)):
            ORTModule(Tower(), strict=True)(torch.ones(2, 8))
        monkeypatch.undo()


def test_a_name_that_behaves_otherwise_counts_as_missing(monkeypatch):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._forward_between_hooks: dict[int, Any] = {}

    look_up = private._look_up
    monkeypatch.setattr(private, "_look_up", lambda path: (Other, torch.nn) if path == "torch.nn.Module" else look_up(path))
    private.forget()
    (line,) = private.missing()
    assert ROWS["hook_tables"].without in line


def test_the_package_can_be_imported_without_them():
    """Some names are used while modules are loaded."""
    names = [row.names[0] for row in private.TABLE]
    code = f"""
import torch
from ortmodule import torch_private as private
look_up, names = private._look_up, {names!r}
private._look_up = lambda path: (private._ABSENT, None) if path in names else look_up(path)
import ortmodule.module, ortmodule.optim
m = torch.nn.Linear(2, 2)
w = ortmodule.ORTModule(m)
x = torch.ones(1, 2)
assert torch.equal(w(x), m(x)) and len(w.report().missing) == len(names), w.report()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
