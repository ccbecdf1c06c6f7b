"""What forward can learn of its tensors besides their values: how they lie in memory, which of them are one object or
share memory, what is attached to them. An ORTModule answers as eager PyTorch does at every step, not as it was when it
was captured (docs/SEMANTICS.md)."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortmodule import ORTModule

F64 = torch.float64


class Net(nn.Module):
    """`rule(self, *args)` is forward."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)
        self.register_buffer("buf", torch.arange(16.0, dtype=F64).view(4, 4))
        self.drop = nn.Dropout(0.5)
        self.same = nn.Identity()
        self.rule = rule

    def forward(self, *args: Any) -> Any:
        return self.rule(self, *args)


def draw(step: int, *size: int) -> Tensor:
    return torch.randn(*(size or (4, 4)), dtype=F64, generator=torch.Generator().manual_seed(step))


def plain(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach().clone()
    return [plain(x) for x in out] if isinstance(out, (list, tuple)) else out


Given = Callable[[nn.Module, int], "tuple[Any, ...]"]


def outcome(m: nn.Module, given: Given, step: int) -> Any:
    """Result, arguments afterwards, gradients, which results are arguments or share their memory; or the exception."""
    m.zero_grad()
    args = given(m, step)
    known = [*[x for x in args if isinstance(x, Tensor)], *m.parameters(), *m.buffers()]
    try:
        out = m(*args)
    except Exception as e:
        return type(e).__name__
    outs = [t for t in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(t, Tensor)]
    shares = [[(t is k) + 2 * (t.data_ptr() == k.data_ptr()) for k in (*known, *outs)] for t in outs]
    found = [plain(out), [plain(x) for x in args], plain(list(m.buffers())), shares,
             [len(vars(t)) for t in outs]]
    loss = [t.sin().sum() for t in outs if t.requires_grad]
    if loss:
        sum(loss).backward()
    return [*found, [plain(p.grad) for p in m.parameters()], [plain(x.grad) for x in known if x.is_leaf]]


def beside(eager: nn.Module, given: Given, n: int = 4, **options: Any) -> ORTModule:
    """n steps beside eager."""
    ours = ORTModule(copy.deepcopy(eager), recheck=False, **options)
    for step in range(n):
        want, got = outcome(eager, given, step), outcome(ours, given, step)
        if isinstance(want, str) or isinstance(got, str):
            assert got == want, f"step {step}"
            continue
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m, s=step: f"step {s}: {m}")
    return ours


def engine(ours: ORTModule) -> bool:
    return not ours.report().eager and not ours.report().host


# --- layouts --------------------------------------------------------------------------------------


def turned(m: nn.Module, step: int) -> tuple[Any, ...]:
    """Contiguous and transposed in turn."""
    x = draw(step)
    return (x.t() if step % 2 else x,)


def offset(m: nn.Module, step: int) -> tuple[Any, ...]:
    return (draw(step, 5, 4)[step % 2 :][:4],)


def asked(question: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda m, x: m.a(x) if question(x) else m.b(x) * 2


LAYOUTS: dict[str, tuple[Callable[..., Any], Given]] = {
    "is_contiguous": (asked(lambda x: x.is_contiguous()), turned),
    "is_contiguous of a value": (lambda m, x: m.a(x) if (x * 2).is_contiguous() else m.b(x), turned),
    "is_contiguous of a view": (lambda m, x: m.a(x) if x.t().is_contiguous() else m.b(x), turned),
    "stride": (asked(lambda x: x.stride() == (4, 1)), turned),
    "stride of a dimension": (asked(lambda x: x.stride(0) == 4), turned),
    "stride of a sum": (asked(lambda x: (x + 1).stride(0) == 4), turned),
    "storage_offset": (asked(lambda x: x.storage_offset() == 0), offset),
    "storage_offset of a view": (lambda m, x: m.a(x) if x[0].storage_offset() == 0 else m.b(x), offset),
    "untyped_storage().nbytes": (asked(lambda x: x.untyped_storage().nbytes() == 128),
                                 lambda m, s: (draw(s, 4 + s % 2, 4)[:4],)),
    "untyped_storage().size": (asked(lambda x: x.untyped_storage().size() == 128),
                               lambda m, s: (draw(s, 4 + s % 2, 4)[:4],)),
    "storage().size": (asked(lambda x: len(x.untyped_storage()) == 128), lambda m, s: (draw(s, 4 + s % 2, 4)[:4],)),
    "data_ptr compared": (lambda m, x, y: m.a(x) if x.data_ptr() == y.data_ptr() else m.b(y),
                          lambda m, s: (x := draw(s), x if s % 2 else draw(s))),
    "dim_order": (asked(lambda x: x.dim_order() == (0, 1)), turned),
    "is_non_overlapping_and_dense": (asked(lambda x: x.is_non_overlapping_and_dense() if hasattr(
        x, "is_non_overlapping_and_dense") else x.is_contiguous()), turned),
    "of a parameter": (lambda m, x: m.a(x) if m.b.weight.is_contiguous() else m.b(x),
                       lambda m, s: (_turn(m.b.weight, s), (draw(s),))[1]),
    "torch function": (asked(lambda x: torch.Tensor.is_contiguous(x)), turned),
}


def _turn(p: Tensor, step: int) -> None:
    p.data = p.data.t().contiguous().t() if step % 2 else p.data.contiguous()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_forward_asks_for(name: str) -> None:
    rule, given = LAYOUTS[name]
    beside(Net(rule), given)


def test_memory_format() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        return x.sin() if x.is_contiguous(memory_format=torch.channels_last) else x.cos()

    def given(m: Any, step: int) -> tuple[Any, ...]:
        x = draw(step, 2, 3, 4, 5)
        return (x.to(memory_format=torch.channels_last) if step % 2 else x,)

    ours = beside(Net(rule), given)
    assert engine(ours) and len(ours.report().graphs) == 2


def test_a_layout_is_guarded_not_refused() -> None:
    """Two layouts are two captures, and new sizes are no new layout."""
    rule, given = LAYOUTS["is_contiguous"]
    ours = beside(Net(rule), given)
    assert engine(ours) and len(ours.report().graphs) == 2
    ours = beside(Net(rule), lambda m, s: (draw(s, 3 + s, 4),))
    assert engine(ours) and len(ours.report().graphs) == 2


def edits(make: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    def rule(m: Any, x: Tensor) -> Tensor:
        y = make(m, x)
        y.mul_(3)
        return m.a(x) + y.reshape(4, 4)

    return rule


ALIASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "contiguous": lambda m, x: x.contiguous(),
    "contiguous of a transpose": lambda m, x: x.t().contiguous(),
    "reshape": lambda m, x: x.reshape(16),
    "reshape in two": lambda m, x: x.reshape(2, 2, 4),
    "flatten": lambda m, x: x.flatten(),
    "ravel": lambda m, x: x.ravel(),
    "to memory_format": lambda m, x: x.to(memory_format=torch.contiguous_format),
    "reshape_as": lambda m, x: x.reshape_as(m.buf.view(2, 8)),
    "to dtype": lambda m, x: x.to(F64),
    "double": lambda m, x: x.double(),
    "type_as": lambda m, x: x.type_as(m.buf),
    "expand": lambda m, x: x.expand(4, 4),
    "expand_as": lambda m, x: x.expand_as(m.buf),
    "broadcast_to": lambda m, x: x.broadcast_to((4, 4)),
    "broadcast_tensors": lambda m, x: torch.broadcast_tensors(x, m.buf)[0],
    "einsum": lambda m, x: torch.einsum("ij->ij", x),
    "einsum that transposes": lambda m, x: torch.einsum("ij->ji", x),
    "einsum diagonal": lambda m, x: torch.einsum("ii->i", x).expand(4, 4).clone(),
    "sum_to_size": lambda m, x: x.sum_to_size(4, 4),
    "view_as": lambda m, x: x.view_as(m.buf),
    "dropout": lambda m, x: F.dropout(x, 0.5, False),
    "dropout of 0": lambda m, x: F.dropout(x, 0.0, True),
    "feature dropout": lambda m, x: F.alpha_dropout(x, 0.5, False),
    "positive": lambda m, x: +x,
    "atleast_2d": lambda m, x: torch.atleast_2d(x),
    "real": lambda m, x: torch.real(x),
    "conj": lambda m, x: x.conj(),
    "movedim": lambda m, x: x.movedim(0, 0),
    "as_tensor": lambda m, x: torch.as_tensor(x),
    "detach": lambda m, x: x.detach(),
    "data": lambda m, x: x.data,
    "chunk": lambda m, x: x.chunk(1)[0],
    "squeeze": lambda m, x: x.squeeze(),
    "meshgrid": lambda m, x: torch.meshgrid(x[0], x[1], indexing="ij")[0].clone(),
    "unflatten": lambda m, x: x.unflatten(0, (2, 2)),
    "matrix_power": lambda m, x: torch.linalg.matrix_power(x, 1),
    "pad by nothing": lambda m, x: F.pad(x, (0, 0)),
    "cat of one": lambda m, x: torch.cat([x]),
    "Identity": lambda m, x: m.same(x),
    "index of everything": lambda m, x: x[...],
    "atleast_3d": lambda m, x: torch.atleast_3d(x),
    "tensor_split": lambda m, x: x.tensor_split(1)[0],
    "nan_to_num of integers": lambda m, x: x.long().nan_to_num().double(),
    "tensordot": lambda m, x: torch.block_diag(x),
    "squeeze_": lambda m, x: x.view(1, 4, 4).squeeze_(),
}


@pytest.mark.parametrize("name", ALIASES)
def test_edits_of_what_may_be_the_argument(name: str) -> None:
    """Eager edits the caller's tensor or a copy, as the layout has it."""
    beside(Net(edits(ALIASES[name])), turned)


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("wanted", [False, True])
def test_results_that_are_the_argument(name: str, wanted: bool) -> None:
    """`out is x` and shared memory, as in eager."""
    def given(m: nn.Module, step: int) -> tuple[Any, ...]:
        (x,) = turned(m, step)
        return (x.requires_grad_(wanted),)

    def rule(m: Any, x: Tensor) -> Any:
        y = ALIASES[name](m, x)
        return y, m.a(x), y

    beside(Net(rule), given)


@pytest.mark.parametrize("rule", [lambda m, x: m.a(x.view(16).view(4, 4)), lambda m, x: m.a((x * 2).view(16).view(4, 4)),
                                  lambda m, x: m.a(x.view(2, 8).view(4, 4)), lambda m, x: x.sin().view(-1),
                                  lambda m, x: m.a(x.cos()).t().t().view(16)])
def test_a_view_that_a_layout_does_not_allow(rule: Callable[..., Any]) -> None:
    beside(Net(rule), turned)


def test_of_what_is_computed_no_layout_is_guarded() -> None:
    """What matters to nobody makes no captures."""
    ours = beside(Net(lambda m, x: m.a(x) @ x), turned)
    assert engine(ours) and len(ours.report().graphs) == 1


def test_slices_of_all_lengths_have_one_layout() -> None:
    """Strides differ from length to length, their kind does not."""
    ours = beside(Net(lambda m, x: m.a(x.view(*x.shape[:2], 2, 2).flatten(2))), lambda m, s: (draw(s, 2, 4 + s, 4)[:, 1:],))
    assert engine(ours) and len(ours.report().graphs) == 2


# --- identity -------------------------------------------------------------------------------------


def pair(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step)
    return x, (x if step % 2 else draw(step + 100))


def pair_wanted(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step).requires_grad_()
    return x, (x if step % 2 else draw(step + 100).requires_grad_())


def held(m: nn.Module, step: int) -> tuple[Any, ...]:
    return (m.buf if step % 2 else draw(step),)


def weight(m: nn.Module, step: int) -> tuple[Any, ...]:
    return (m.a.weight if step % 2 else draw(step),)


def tagged(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step)
    if step % 2:
        x.tag = step
    return (x,)


def parameter(m: nn.Module, step: int) -> tuple[Any, ...]:
    return (nn.Parameter(draw(step)) if step % 2 else draw(step).requires_grad_(),)


def made(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step).requires_grad_()
    return (x * 2 if step % 2 else x,)


def viewed(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step)
    return (x[:] if step % 2 else x,)


def shared(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step)
    return (x.share_memory_() if step % 2 else x,)


def by_key(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.a(x) * len({x: 1, y: 2})


def either(yes: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, *args: m.a(args[0]) if yes(m, *args) else m.b(args[0]) * 2


def tags(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.tag = 3
    return y


def tags_argument(m: Any, x: Tensor) -> Tensor:
    x.seen = True
    return m.a(x)


def tags_parameter(m: Any, x: Tensor) -> Tensor:
    m.a.weight.n = getattr(m.a.weight, "n", 0) + 1
    return m.a(x) * m.a.weight.n


def edits_the_other(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return m.a(y) + x


def edits_buffer(m: Any, x: Tensor) -> Tensor:
    m.buf.mul_(2)
    return m.a(x) + m.buf


def overlapping(m: nn.Module, step: int) -> tuple[Any, ...]:
    x = draw(step, 5, 4)
    return x[:4], (x[1:] if step % 2 else draw(step + 9))


def edits_or_not(m: Any, x: Tensor) -> Tensor:
    y = m.drop(x)
    return m.a(y) if y is x else m.b(y)


IDENTITY: dict[str, tuple[Callable[..., Any], Given]] = {
    "x is y": (either(lambda m, x, y: x is y), pair),
    "x is not y": (either(lambda m, x, y: x is not y), pair),
    "x is y with gradients": (either(lambda m, x, y: x is y), pair_wanted),
    "operator.is_": (either(lambda m, x, y: operator.is_(x, y)), pair),
    "x is self.buf": (either(lambda m, x: x is m.buf), held),
    "x is self.a.weight": (either(lambda m, x: x is m.a.weight), weight),
    "any(x is t)": (either(lambda m, *ts: any(ts[0] is t for t in ts[1:])), pair),
    "id": (either(lambda m, x, y: id(x) == id(y)), pair),
    "keys of a dictionary": (by_key, pair),
    "a set": (either(lambda m, x, y: len({x, y}) == 1), pair),
    "hash": (either(lambda m, x, y: hash(x) == hash(y)), pair),
    "a key of a dictionary that stays": (either(lambda m, x: x in SEEN), lambda m, s: (_remember(draw(s), s),)),
    "id in a set that stays": (either(lambda m, x: id(x) in SEEN_IDS), lambda m, s: (_remember(draw(s), s),)),
    "isinstance Parameter": (either(lambda m, x: isinstance(x, nn.Parameter)), parameter),
    "type is Tensor": (either(lambda m, x: type(x) is Tensor), parameter),
    "type == Tensor": (either(lambda m, x: type(x) == Tensor), parameter),  # noqa: E721
    "__class__": (either(lambda m, x: x.__class__ is Tensor), parameter),
    "grad_fn": (either(lambda m, x: x.grad_fn is None), made),
    "grad_fn of a value": (either(lambda m, x: m.a(x).grad_fn is None), made),
    "is_leaf": (either(lambda m, x: x.is_leaf), made),
    "_base": (either(lambda m, x: x._base is None), viewed),
    "_is_view": (either(lambda m, x: x._is_view()), viewed),
    "is_shared": (either(lambda m, x: x.is_shared()), shared),
    "output_nr": (either(lambda m, x: x.output_nr == 0), lambda m, s: (draw(s, 8, 4).requires_grad_().split(4)[s % 2],)),
    "retains_grad": (either(lambda m, x: x.retains_grad), lambda m, s: (_retain(draw(s).requires_grad_() * 2, s),)),
    "is_set_to": (either(lambda m, x, y: x.is_set_to(y)), pair),
    "is_inference": (either(lambda m, x: x.is_inference()), lambda m, s: (_inference(s),)),
    "hasattr": (either(lambda m, x: hasattr(x, "tag")), tagged),
    "getattr": (lambda m, x: m.a(x) * getattr(x, "tag", 7), tagged),
    "getattr, first with it": (lambda m, x: m.a(x) * getattr(x, "tag", 7), lambda m, s: tagged(m, s + 1)),
    "an attribute": (lambda m, x: m.a(x) * x.tag, lambda m, s: tagged(m, s + 1) if s % 2 == 0 else tagged(m, s)),
    "vars": (either(lambda m, x: "tag" in vars(x)), tagged),
    "__dict__": (either(lambda m, x: "tag" in x.__dict__), tagged),
    "dir": (either(lambda m, x: "tag" in dir(x)), tagged),
    "hasattr of a view": (either(lambda m, x: hasattr(x.contiguous(), "tag")), tagged),
    "an attribute of a parameter": (lambda m, x: m.a(x) * getattr(m.a.weight, "tag", 2),
                                    lambda m, s: (setattr(m.a.weight, "tag", s), (draw(s),))[1]),
    "hasattr of a parameter": (either(lambda m, x: hasattr(m.a.weight, "tag")),
                               lambda m, s: (_tag(m.a.weight, s), (draw(s),))[1]),
    "an attribute of a buffer": (lambda m, x: m.a(x) * getattr(m.buf, "tag", 2),
                                 lambda m, s: (setattr(m.buf, "tag", s), (draw(s),))[1]),
    "an attribute of a global tensor": (lambda m, x: m.a(x) * getattr(GLOBAL, "tag", 2),
                                        lambda m, s: (setattr(GLOBAL, "tag", s // 2), (draw(s),))[1]),
    "hasattr of a global tensor": (either(lambda m, x: hasattr(GLOBAL, "flag")),
                                   lambda m, s: (_flag(GLOBAL, s), (draw(s),))[1]),
    "setattr on a result": (tags, lambda m, s: (draw(s),)),
    "setattr on an argument": (tags_argument, lambda m, s: (draw(s),)),
    "setattr on a parameter": (tags_parameter, lambda m, s: (draw(s),)),
    "an edit of one of two that are one": (edits_the_other, pair),
    "an edit of one of two that overlap": (edits_the_other, overlapping),
    "an edit of a buffer that is the argument": (edits_buffer, held),
    "an edit of a buffer that the argument looks into": (edits_buffer, lambda m, s: (m.buf[:] if s % 2 else draw(s),)),
    "what dropout returns": (edits_or_not, lambda m, s: (m.eval(), (draw(s),))[1]),
    "what Identity returns": (either(lambda m, x: m.same(x) is x), lambda m, s: (draw(s),)),
    "what contiguous returns": (either(lambda m, x: x.contiguous() is x), turned),
    "what to returns": (either(lambda m, x: x.to(F64) is x), turned),
    "what reshape returns": (either(lambda m, x: x.reshape(4, 4) is x), turned),
    "what flatten returns": (either(lambda m, x: x[0].flatten() is x[0]), turned),
    "what detach returns": (either(lambda m, x: x.detach() is x), turned),
}

SEEN: dict[Tensor, int] = {}
SEEN_IDS: set[int] = set()
GLOBAL = torch.ones(2)


def _remember(x: Tensor, step: int) -> Tensor:
    if step % 2:
        SEEN[x] = 1
        SEEN_IDS.add(id(x))
    return x


def _retain(x: Tensor, step: int) -> Tensor:
    if step % 2:
        x.retain_grad()
    return x


def _inference(step: int) -> Tensor:
    with torch.inference_mode(step % 2 == 1):
        return draw(step)


def _tag(t: Any, step: int) -> None:
    if step % 2:
        t.tag = 1
    else:
        vars(t).pop("tag", None)


def _flag(t: Any, step: int) -> None:
    if step % 2:
        t.flag = 1
    else:
        vars(t).pop("flag", None)


@pytest.mark.parametrize("name", IDENTITY)
def test_identity(name: str) -> None:
    rule, given = IDENTITY[name]
    vars(GLOBAL).clear()
    SEEN.clear()
    SEEN_IDS.clear()
    beside(Net(rule), given)


@pytest.mark.parametrize("name", ["x is y", "x is self.buf", "hasattr", "isinstance Parameter", "what dropout returns"])
def test_identity_is_guarded(name: str) -> None:
    """A question whose answer does not change costs nothing but the question."""
    rule, given = IDENTITY[name]
    ours = beside(Net(rule), lambda m, step: given(m, 0))
    assert engine(ours) and len(ours.report().graphs) == 1


class Held(nn.Module):
    """Tensors that are no parameters, one of which forward edits when it is asked to."""

    def __init__(self, edits: bool) -> None:
        super().__init__()
        self.edits = edits
        self.layer = nn.Linear(4, 4)
        self.register_buffer("matrix", torch.randn(4, 4))
        self.plain = torch.randn(4, 4)
        self.kept = [torch.randn(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        if self.edits:
            self.matrix.add_(1)
        return self.layer(x) @ self.matrix @ self.plain @ self.kept[0]


def _held_beside_eager(edits: bool, change: Callable[[Any, int], None]) -> Any:
    torch.manual_seed(0)
    eager = Held(edits).double()
    eager.plain, eager.kept = eager.plain.double(), [eager.kept[0].double()]
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(7):
        x, seen = torch.randn(3, 4, dtype=F64), []
        for m in (ours, eager):
            change(m, step)
            m.zero_grad()
            y = m(x)
            y.square().sum().backward()
            held = (m.matrix, m.plain, m.kept[0])
            seen.append([y.detach(), *held, *(p.grad for p in m.parameters()), *(t.grad for t in held)])
        for mine, theirs in zip(*seen, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    return ours


@pytest.mark.parametrize("which", ["matrix", "plain", "kept"])
def test_requires_grad_of_what_is_no_parameter_changes_in_place(which: str) -> None:
    def change(m: Any, step: int) -> None:
        t = m.kept[0] if which == "kept" else getattr(m, which)
        t.grad = None
        t.requires_grad_(step in (2, 3, 6))

    _held_beside_eager(False, change)


def _same_object(m: Any) -> None:
    m.matrix = m.plain


def _view_of_a_tensor(m: Any) -> None:
    m.matrix = m.plain.t()


def _view_of_a_list(m: Any) -> None:
    m.matrix = m.kept[0][:]


def _data_of_a_tensor(m: Any) -> None:
    m.matrix.data = m.plain.t()


def _data_of_a_list(m: Any) -> None:
    m.kept[0].data = m.plain.data


@pytest.mark.parametrize("share", [_same_object, _view_of_a_tensor, _view_of_a_list, _data_of_a_tensor, _data_of_a_list])
def test_what_forward_edits_shares_memory_after_a_capture(share: Callable[[Any], None]) -> None:
    def change(m: Any, step: int) -> None:
        if step == 3:
            share(m)

    _held_beside_eager(True, change)


@pytest.mark.parametrize("name", ["matrix", "plain", "weight"])
def test_a_tensor_stored_negated_comes_after_a_capture(name: str) -> None:
    def change(m: Any, step: int) -> None:
        if step == 3:
            torch.manual_seed(1)
            new = torch.randn(4, 4, dtype=torch.complex128).conj().imag
            assert new.is_neg()
            if name == "weight":
                m.layer.weight = nn.Parameter(new)
            else:
                setattr(m, name, new)

    _held_beside_eager(False, change)


def _edits_a_plain_tensor(m: Any, x: Tensor) -> Tensor:
    m.plain.add_(1)
    return m.a(x) * m.plain


def _edits_the_argument(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return m.a(x) + m.plain


def _edits_the_argument_beside_a_list(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return m.a(x) + m.kept[0]


@pytest.mark.parametrize("rule", [_edits_a_plain_tensor, _edits_the_argument, _edits_the_argument_beside_a_list])
@pytest.mark.parametrize("given", [lambda m: m.plain, lambda m: m.plain[:], lambda m: m.plain.detach(), lambda m: m.kept[0]])
def test_an_argument_looks_into_a_plain_tensor(rule: Callable[..., Any], given: Callable[[Any], Tensor]) -> None:
    """A capture of separate tensors does not hold for it, where forward edits one of the two."""
    eager = Net(rule)
    eager.plain, eager.kept = draw(0), [draw(1)]
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(6):
        seen = []
        for m in (ours, eager):
            m.zero_grad()
            y = m(given(m) if step in (2, 4) else draw(step))
            y.sin().sum().backward()
            seen.append([y.detach(), m.plain, m.kept[0], m.a.weight.grad])
        for mine, theirs in zip(*seen, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    (graph,) = ours.report().graphs
    assert graph.forwards >= 4, "the calls between are the engine's"


def test_arguments_that_meet_are_named() -> None:
    def rule(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return m.a(x) * y

    eager = Net(rule)
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(4):
        seen = []
        for m in (ours, eager):
            both = draw(step, 5, 4)
            x, y = (both[1:], both[:4]) if step == 1 else (both[1:], draw(7))
            m.zero_grad()
            out = m(x, y)
            out.sin().sum().backward()
            seen.append([out.detach(), both, m.a.weight.grad])
        for mine, theirs in zip(*seen, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    (left,) = ours.report().eager
    assert left.calls == 1 and "which share memory" in left.reason and "argument" in left.reason


@pytest.mark.parametrize("kind", ["buffer", "plain"])
def test_a_tensor_that_forward_edits_becomes_expanded(kind: str) -> None:
    """Eager refuses the edit, and so it is."""

    def rule(m: Any, x: Tensor) -> Tensor:
        m.state.add_(1)
        return m.a(x) * m.state

    net = Net(rule)
    if kind == "buffer":
        net.register_buffer("state", draw(0))
    else:
        net.state = draw(0)
    ours = ORTModule(net)
    for step in range(2):
        ours(draw(step)).sum().backward()
    ours.state.data = draw(1)[:1].expand(4, 4)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        ours(draw(3))


@pytest.mark.parametrize("kind", ["argument", "buffer", "plain"])
def test_an_inference_tensor_that_forward_edits(kind: str) -> None:
    """Eager refuses the edit, but under inference_mode, and so it is."""

    def rule(m: Any, x: Tensor) -> Tensor:
        x.add_(1)
        m.buf.add_(1)
        m.plain.add_(1)
        return m.a(x) + m.buf + m.plain

    eager = Net(rule)
    eager.plain = draw(0)
    ours = ORTModule(copy.deepcopy(eager))
    for step, odd in enumerate((False, False, True, True, False, True)):
        seen: list[Any] = []
        for m in (ours, eager):
            with torch.inference_mode(odd):
                made = {name: draw(step + k) for k, name in enumerate(("argument", "buffer", "plain"))}
            given = {name: t if name == kind else t.clone() for name, t in made.items()}
            m.buf, m.plain = given["buffer"], given["plain"]
            with torch.inference_mode(step == 5):
                try:
                    seen.append(m(given["argument"]).detach())
                except RuntimeError as error:
                    seen.append(str(error))
        if step in (2, 3):
            assert seen[0] == seen[1] and "Inplace update to inference tensor" in seen[0]
        else:
            torch.testing.assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-12)
    assert ours.report().graphs[0].forwards > 2


def test_tensors_of_nothing_share_no_memory() -> None:
    def rule(m: Any, nothing: Tensor, x: Tensor) -> Tensor:
        nothing.add_(1)
        return m.a(x) + m.plain.sum() + m.other.sum() + m.third.sum()

    net = Net(rule)
    net.plain, net.other, net.third = (torch.empty(0, dtype=F64) for _ in range(3))
    ours = ORTModule(net)
    for step in range(3):
        ours(torch.empty(0, dtype=F64), draw(step)).sum().backward()
    assert engine(ours) and len(ours.report().graphs) == 1
