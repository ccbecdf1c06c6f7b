"""What forward writes outside of the module, and what others put in the place of what it calls: functions, classes and
modules of Python, members of an Enum, parameters that no module has. A capture does not leave its own writes there, and
what was rebound is noticed. Each beside eager, in fp64, over several calls."""

import collections
import contextvars
import copy
import csv
import enum
import functools
import hashlib
import io
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule

F64 = torch.float64
module = types.ModuleType("module")  # stands for a file of settings
sys.modules["module_of_settings"] = module


class Kind(enum.Enum):
    A = 1


class Fake(torch.autograd.Function):
    n = 0.0


def helper(x):
    helper.n += 1
    return x


def counted(f):
    @functools.wraps(f)
    def counts(*args):
        counts.n += 1
        return f(*args)

    counts.n = 0.0
    return counts


@counted
def doubled(x):
    return 2 * x


def scaled(x, by=1.0):
    return by * x


ordered, counter = collections.OrderedDict(), collections.Counter()
partial = functools.partial(scaled, by=2.0)
variable = contextvars.ContextVar("variable")
outside = torch.zeros(3, dtype=F64)
made = [types.ModuleType("made")]


def add_to_module(x):
    module.n += 1


def put_on_module(x):
    module.last = x.sum()


def note_size(x):
    module.rows = x.shape[0]


def by_import(x):
    import module_of_settings

    module_of_settings.n += 1


def set_attribute(x):
    setattr(module, "n", module.n + 1)  # noqa: B010


def add_to_member(x):
    Kind.A.n += 1


def add_to_class_of_torch(x):
    nn.Linear.n_of_test += 1


def add_to_torch(x):
    torch.n_of_test += 1


def add_to_function_of_torchs(x):
    Fake.n += 1


def add_to_ordered(x):
    ordered.n += 1


def add_to_counter(x):
    counter.n += 1


def add_to_partial(x):
    partial.n += 1


def change_partial(x):
    partial.keywords["by"] += 1


def set_variable(x):
    variable.set(variable.get() + 1)


def add_to_tensor(x):
    outside.n += 1


def append(x):
    helper.list.append(1)


def store(x):
    helper.table[len(helper.table)] = 1


def default(x):
    scaled.__defaults__ = (scaled.__defaults__[0] + 1,)


def add_to_made(x):
    made[0].n += 1


def on_function(x):
    helper.last = x.sum()


WRITES = {  # what forward does, what is there then
    "module of Python": (add_to_module, lambda: module.n), "a tensor, on a module": (put_on_module, lambda: float(module.last)), "a size, on a module": (note_size, lambda: module.rows),
    "by an import": (by_import, lambda: module.n), "setattr": (set_attribute, lambda: module.n), "function": (helper, lambda: helper.n), "decorator": (doubled, lambda: doubled.n),
    "member of an Enum": (add_to_member, lambda: Kind.A.n), "class of torch's": (add_to_class_of_torch, lambda: nn.Linear.n_of_test), "torch": (add_to_torch, lambda: torch.n_of_test),
    "autograd.Function": (add_to_function_of_torchs, lambda: Fake.n), "OrderedDict": (add_to_ordered, lambda: ordered.n), "Counter": (add_to_counter, lambda: counter.n), "partial": (add_to_partial, lambda: partial.n),
    "arguments of a partial": (change_partial, lambda: partial.keywords["by"]), "ContextVar": (set_variable, variable.get), "tensor": (add_to_tensor, lambda: outside.n), "list of a function": (append, lambda: len(helper.list)),
    "dictionary of a function": (store, lambda: len(helper.table)), "defaults": (default, lambda: scaled.__defaults__[0]), "module made by hand": (add_to_made, lambda: made[0].n), "a tensor, on a function": (on_function, lambda: float(helper.last)),
}  # fmt: skip


def begin():
    for holder in (module, helper, doubled, Kind.A, Fake, ordered, counter, partial, outside, made[0]):
        holder.n = 0.0
    nn.Linear.n_of_test = torch.n_of_test = 0.0
    module.last, module.rows, helper.last, helper.list, helper.table = None, None, None, [], {}
    variable.set(0.0)
    scaled.__defaults__, partial.keywords["by"] = (1.0,), 2.0


@pytest.fixture(autouse=True)
def _as_before():
    begin()
    yield
    del nn.Linear.n_of_test, torch.n_of_test


class Writes(nn.Module):
    def __init__(self, write, look, reads):
        super().__init__()
        self.l, self.write, self.look, self.reads = nn.Linear(4, 4), write, look, reads

    def forward(self, x):
        self.write(x)
        return self.l(x) * (self.look() if self.reads else 1.0)


def runs(make, wrapped, steps):
    begin()
    torch.manual_seed(0)
    model = make().to(F64)
    model = ORTModule(model) if wrapped else model
    told = []
    for step in steps:
        x = torch.full((step, 4), 0.5, dtype=F64)
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        told.append((y.detach().clone(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        yield told[-1]


@pytest.mark.parametrize("reads", [False, True], ids=["only written", "read, too"])
@pytest.mark.parametrize("name", WRITES)
def test_what_forward_writes(name, reads):
    write, look = WRITES[name]
    found = []
    for wrapped in (False, True):
        found.append([(result, look()) for result in runs(lambda: Writes(write, look, reads), wrapped, (3, 3, 2, 3, 3))])
    for (ours, left), (eager, there) in zip(found[1], found[0], strict=True):
        assert left == there
        torch.testing.assert_close(ours, eager)


class Teacher(nn.Module):
    """Has a copy of its layer that nobody trains, and follows it."""

    def __init__(self, follow):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.teacher, self.follow = [copy.deepcopy(self.l).requires_grad_(False).to(F64)], follow

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher[0].parameters(), self.l.parameters(), strict=True):
                self.follow(p, q)
        return self.l(x) - self.teacher[0](x)


def product(p, q):
    p *= 0.9


FOLLOWS = {
    "mul_, add_": lambda p, q: p.mul_(0.9).add_(q, alpha=0.1), "div_": lambda p, q: p.div_(2), "add_ a number": lambda p, q: p.add_(0.25), "sub_": lambda p, q: p.sub_(0.25), "out": lambda p, q: torch.mul(p, 0.9, out=p),
    "*=": product, "lerp_": lambda p, q: p.lerp_(q, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWS)
def test_parameters_of_no_module_are_edited_once(name):
    kept, found = [], []

    def make():
        kept.append(Teacher(FOLLOWS[name]))
        return kept[-1]

    for wrapped in (False, True):
        found.append([(result, kept[-1].teacher[0].weight.clone()) for result in runs(make, wrapped, (3, 3, 2, 4, 3))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(F.relu(self.l(x)))


class Line(nn.Linear):
    pass


def thrice(self, x):
    return 3 * self.forward(x)


@pytest.mark.parametrize("holder,name,other", [(F, "relu", torch.sigmoid), (torch, "tanh", torch.sin), (Line, "__call__", thrice)],
                         ids=["torch.nn.functional", "torch", "__call__ of a class"])  # fmt: skip
def test_what_is_put_in_the_place_of_a_function(monkeypatch, holder, name, other):
    torch.manual_seed(0)
    model = Attends().to(F64)
    model.l = Line(4, 4, dtype=F64)
    ours, x = ORTModule(copy.deepcopy(model)), torch.randn(3, 4, dtype=F64)
    for step in range(6):
        with monkeypatch.context() as patch:
            if step in (2, 3, 5):
                patch.setattr(holder, name, other, raising=False)
            torch.testing.assert_close(ours(x), model(x))
    assert len(ours.report().graphs) == 2


class Through(nn.Module):
    """Hands on to what is written in C, and holds what no one can put back."""

    def __init__(self, way):
        super().__init__()
        self.l, self.way, self.file = nn.Linear(4, 4), way, io.StringIO()
        self.csv, self.sha, self.bytes = csv.writer(self.file), hashlib.sha256(), memoryview(bytearray(4))

    def forward(self, x):
        self.way(self)
        return self.l(x)


def bump(m):
    m.bytes[0] += 1


@pytest.mark.parametrize("way,look", [(lambda m: m.csv.writerow([1, 2]), lambda m: m.file.getvalue()), (lambda m: m.sha.update(b"a"), lambda m: m.sha.hexdigest()), (bump, lambda m: bytes(m.bytes))],
                         ids=["csv.writer", "hashlib", "memoryview"])  # fmt: skip
def test_what_cannot_be_put_back_happens_once(way, look):
    eager = Through(way)
    under = Through(way)
    ours = ORTModule(under)
    for _ in range(3):
        eager(torch.ones(2, 4)), ours(torch.ones(2, 4))
        assert look(under) == look(eager)
