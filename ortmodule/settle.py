"""A forward that changes its modules once: the first that is asked for hidden states installs hooks which collect them.
A capture holds for the modules as they stand before a call, so such a call could not be captured. Here forward runs
once more than it would, in PyTorch and on copies; what it has changed in modules stays, nothing else does, and the call
is captured for the modules as they are then.

That is the same call if the graph is the same: ladder.py compares it with that of the trace before. Else, and where
more has changed than can be told to be of no call (a tensor, a container, a new parameter), everything is put back, and
the call runs in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import patches
from .capture.edits import undoing
from .capture.refused import SilentProcesses
from .capture.skeleton import input_skeleton
from .capture.tracing import keep_random_state, without_warnings
from .contents import lasts
from .torch_private import HOOK_TABLES

_TABLES = ("_parameters", "_buffers", "_modules")


class Settled:
    """What one run of forward has changed in the modules of `root`. Raises what forward raises. Afterwards `whole` says
    whether that is all, and of no call."""

    def __init__(self, root: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = [(m, dict(m.__dict__), _contents(m)) for m in root.modules()]
        self.whole = False
        flags = [(p, p.requires_grad) for p in root.parameters()]
        try:
            with undoing(root) as undo:
                with (patches.scope(), keep_random_state(), without_warnings(), patches.silent(), undo,
                      SilentProcesses()):  # fmt: skip
                    given, named = _copies(root, args, kwargs)
                    run(*given, **named)
                self.whole = all(p.requires_grad == wanted for p, wanted in flags) and self._of_no_call(root)
        finally:
            if not self.whole:
                self.put_back()

    def put_back(self) -> None:
        for m, attributes, contents in self._before:
            if m.__dict__.keys() != attributes.keys() or any(m.__dict__[k] is not v for k, v in attributes.items()):
                m.__dict__.clear()
                m.__dict__.update(attributes)
            for now, old in contents:
                if not _same(now, old):
                    now.clear()
                    now.extend(old) if isinstance(now, list) else now.update(old)

    def _of_no_call(self, root: nn.Module) -> bool:
        before = {id(m) for m, _, _ in self._before}
        known = {id(t) for m, _, contents in self._before for now, old in contents
                 if now is m._parameters or now is m._buffers for t in old.values()}  # fmt: skip
        for m, attributes, contents in self._before:
            own = m.__dict__
            new = {k: v for k, v in own.items() if attributes.get(k, patches.ABSENT) is not v}
            if attributes.keys() - own.keys() or not all(map(lasts, new.values())):
                return False
            free = {id(own[k]) for k in ("_modules", *HOOK_TABLES) if k in own}
            if not all(_same(now, old) or id(now) in free and _more(now, old) for now, old in contents):
                return False
        return all(
            (id(m) in before or _bare(m))
            and all(t is None or id(t) in known for table in (m._parameters, m._buffers) for t in table.values())
            for m in root.modules()
        )


def _bare(m: nn.Module) -> bool:
    """A module that forward has made holds nothing of the call."""
    others = [v for k, v in m.__dict__.items() if k not in _TABLES and not lasts(v)]
    return not any(isinstance(v, Tensor) or isinstance(v, (list, tuple, dict, set)) and v for v in others)


def _contents(m: nn.Module) -> list[tuple[Any, Any]]:
    """Lists and dictionaries of a module, its tables among them, and copies."""
    return [(v, v.copy()) for v in m.__dict__.values() if isinstance(v, (list, dict))]


def _same(now: Any, old: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == old.keys() and all(now[k] is v for k, v in old.items())
    return len(now) == len(old) and all(a is b for a, b in zip(now, old, strict=True))


def _more(now: dict[Any, Any], old: dict[Any, Any]) -> bool:
    """Modules are there and may have others in their place; hooks have come."""
    kept = all(isinstance(v, nn.Module) or k not in old or old[k] is v for k, v in now.items())
    return kept and old.keys() <= now.keys()


def _copies(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of their own; those that are parameters or buffers stay."""
    fill, flat = input_skeleton(args, kwargs)
    own = {id(t) for t in [*root.parameters(), *root.buffers()]}
    copies = {id(t): t if id(t) in own else t.detach().clone().requires_grad_(t.requires_grad) for t in flat.tensors}
    given, named = fill([*[copies[id(t)] for t in flat.tensors], *flat.scalars])
    return given, named
