"""What a trace believes and a later call may not bear out: errors that only symbols raise, modules under a second name,
tensors of which two elements are one. Each beside eager, in fp64, over several calls."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ortmodule import ORTModule

F64 = torch.float64


class Asks(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.l, self.ask = nn.Linear(6, 6), ask

    def forward(self, x, y):
        try:
            return self.l(x) * self.ask(x, y)
        except Exception:  # what only a symbol raises
            return x * 3


def suppressed(x, y):
    r = 7.0
    with contextlib.suppress(Exception):
        r = {3: 2.0, 4: 5.0}[x.shape[0]]
    return r


def chunks(x, y):
    a, b = torch.cat([x, x]).split(4)
    return (a * b).sum()


def of_class(n):
    return 2.0 if type(n) is int else 3.0


NUMBERS = {
    "broadcast": lambda x, y: x + y, "chunks": chunks, "class": lambda x, y: of_class(x.shape[0]), "table": lambda x, y: {3: 2.0, 4: 5.0}[x.shape[0]], "set": lambda x, y: 2.0 if x.shape[0] in {3, 4} else 5.0,
    "made into a set": lambda x, y: float(len({x.shape[0], 4})), "hash": lambda x, y: float(hash(x.shape[0])), "suppressed": suppressed, "text": lambda x, y: len(f"{x.shape[0]:03d}") * 1.0,
    "format": lambda x, y: len(format(x.shape[0], ">5")) * 1.0, "divmod": lambda x, y: float(divmod(x.shape[0], 3)[1]), "divmod by it": lambda x, y: float(divmod(7, x.shape[0])[0]),
    "numerator": lambda x, y: float(x.shape[0].numerator), "bits": lambda x, y: float(x.shape[0].bit_length()), "bytes": lambda x, y: float(len(x.shape[0].to_bytes(4, "big"))), "real": lambda x, y: float(x.shape[0].real),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_errors_that_only_symbols_raise(name):
    torch.manual_seed(0)
    model = Asks(NUMBERS[name]).to(F64)
    wrapped = ORTModule(copy.deepcopy(model))
    for rows, other in ((4, 4), (3, 1), (4, 1), (3, 3)):
        x, y = torch.randn(rows, 6, dtype=F64), torch.randn(other, 6, dtype=F64)
        torch.testing.assert_close(wrapped(x, y), model(x, y), msg=f"{rows}, {other}")


class Many(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.ml, self.other = how, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 4)
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.c = self.ml[0]

    def forward(self, x):
        if self.how == "list":
            for layer in self.ml:
                x = layer(x).tanh()
        elif self.how == "dict":
            for key in self.named:
                x = self.named[key](x).tanh()
        elif self.how == "name":
            x = self.c(x).tanh()
        elif self.how == "length":
            x = self.other(x) * len(self.ml)
        elif hasattr(self, "extra"):
            x = self.other(x) * 2
        else:
            x = self.other(x)
        return x


CHANGES = {
    "list": (lambda m: m.ml.append(m.ml[0]), lambda m: m.ml.__delitem__(2)), "dict": (lambda m: m.named.__setitem__("b", m.named["a"]), lambda m: m.named.__delitem__("b")),
    "name": (lambda m: setattr(m, "c", m.other), lambda m: setattr(m, "c", m.ml[1])), "length": (lambda m: m.ml.append(m.other), lambda m: m.ml.__delitem__(2)),
    "attribute": (lambda m: setattr(m, "extra", m.other), lambda m: delattr(m, "extra")),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_a_module_under_another_name(how):
    torch.manual_seed(0)
    model = Many(how).to(F64)
    wrapped = ORTModule(copy.deepcopy(model))
    inner = wrapped.module if hasattr(wrapped, "module") else wrapped
    for change in (None, None, *CHANGES[how], None):
        if change is not None:
            change(model)
            change(inner)
        for _ in range(2):
            x = torch.randn(3, 4, dtype=F64)
            torch.testing.assert_close(wrapped(x), model(x))


class Edits(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.l, self.edit = nn.Linear(6, 6), edit
        self.register_buffer("held", torch.ones(3, 6, dtype=F64))

    def forward(self, x):
        self.edit(self, x)
        return self.l(x) + self.held


EDITS = {
    "row": lambda m, x: x.__setitem__(0, 0.0), "product": lambda m, x: x.mul_(2), "clamp": lambda m, x: x.clamp_(min=2), "relu": lambda m, x: nn.functional.relu(x, inplace=True), "buffer": lambda m, x: m.held.add_(1),
}  # fmt: skip
FOLDED = {"expanded": lambda: torch.arange(6, dtype=F64).view(1, 6).expand(3, 6), "unfolded": lambda: torch.arange(8, dtype=F64).unfold(0, 6, 1)}


@pytest.mark.parametrize("first", ("dense", "folded"))
@pytest.mark.parametrize("kind", FOLDED)
@pytest.mark.parametrize("name", EDITS)
def test_edits_of_elements_that_are_one(name, kind, first):
    torch.manual_seed(0)
    model = Edits(EDITS[name]).to(F64)
    wrapped = ORTModule(copy.deepcopy(model))
    for which in ("dense", "dense", "folded") if first == "dense" else ("folded", "dense", "folded"):
        both = []
        for m in (model, wrapped):
            x = FOLDED[kind]().clone() if which == "dense" or name == "buffer" else FOLDED[kind]()
            if name == "buffer":
                (m if m is model else m.module if hasattr(m, "module") else m).held = FOLDED[kind]().clone() if which == "dense" else FOLDED[kind]()
            try:
                both.append([m(x), x.clone()])
            except RuntimeError as e:
                both.append([str(e)[:40], x.clone()])
        for mine, theirs in zip(both[1], both[0], strict=True):
            if isinstance(theirs, str) or isinstance(mine, str):
                assert mine == theirs
            else:
                torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dim", (None, -1, 0, 1))
def test_weight_norm_over_all_elements(dim):
    torch.manual_seed(0)
    model = parametrizations.weight_norm(nn.Linear(8, 16), dim=dim).to(F64)
    wrapped = ORTModule(copy.deepcopy(model))
    x = torch.randn(3, 8, dtype=F64)
    a, b = wrapped(x), model(x)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(a, b)
    torch.testing.assert_close([p.grad for p in wrapped.parameters()], [p.grad for p in model.parameters()])
