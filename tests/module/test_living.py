"""_C.living: what the collector knows of some types, while other threads fill tuples."""

from __future__ import annotations

import gc
import threading
import types

import torch
from torch import nn

from ortmodule import _C


def test_what_is_found() -> None:
    p, t = nn.Parameter(torch.ones(2)), [torch.ones(3)]
    found = _C.living((torch.Tensor, nn.Parameter))
    assert {type(x) for x in found} == {torch.Tensor, nn.Parameter}
    assert any(x is p for x in found) and any(x is t[0] for x in found)
    assert {id(x) for x in _C.living((types.FunctionType,))} == {id(x) for x in gc.get_objects() if type(x) is types.FunctionType}
    assert _C.living(()) == []


def test_tuples_that_are_being_filled() -> None:
    """A tuple grows by a call that refuses when somebody else has a reference: of a list of all objects, or of one of
    tuples."""
    inside, go_on, errors = threading.Event(), threading.Event(), list[BaseException]()

    def slow():  # noqa: ANN202
        for i in range(100):
            if i == 5:
                inside.set()
                go_on.wait()
            yield i

    def fill() -> None:
        try:
            assert tuple(slow()) == tuple(range(100))
        except BaseException as e:  # noqa: BLE001
            errors.append(e)

    for look in (lambda: _C.living((types.FunctionType,)), gc.get_objects):
        inside.clear(), go_on.clear()
        other = threading.Thread(target=fill)
        other.start()
        inside.wait()
        held = look()
        go_on.set()
        other.join()
        assert bool(errors) == (look is gc.get_objects), errors
        del held
    assert isinstance(errors[0], SystemError)
