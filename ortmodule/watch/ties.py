"""What forward has met under several names: a graph input stands for one object, by one name.

A parameter may also be in a list, a dictionary, a closure or another attribute (tied weights kept by hand), a submodule
in a list, a tensor under two attributes. The capture finds what it binds by the name in the tree. When one of the names
gets another object the others do not, so the capture holds no longer. Asked only when the module has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .. import contents, frames

_TABLES = ("_parameters", "_buffers", "_modules")
_GONE = object()


class Ties:
    """Pairs of what must be one object: an attribute of a module (its name, the attribute's) or an object, and the name
    by which the capture knows it."""

    def __init__(self) -> None:
        self._attributes: dict[tuple[str, str], str] = {}
        self._objects: dict[int, tuple[Any, str]] = {}

    def add(self, module: nn.Module, reads: Iterable[tuple[str, str]], met: Iterable[Any]) -> None:
        """reads: attributes that forward has read; met: objects that it has come to by other ways than the tree."""
        known = _known(module)
        modules = dict(module.named_modules(remove_duplicate=False))
        for where, name in reads:
            value = vars(modules[where]).get(name) if where in modules else None
            as_known = known.get(_key(value))
            if as_known is not None and as_known != contents.joined(where, name):
                self._attributes.setdefault((where, name), as_known)
        for value in met:
            as_known = known.get(_key(value))
            if as_known is not None:
                self._objects.setdefault(id(value), (value, as_known))

    def changed(self, module: nn.Module) -> list[str]:
        """Names that stand for other objects than those they stood for together."""
        if not self._attributes and not self._objects:
            return []
        modules = dict(module.named_modules(remove_duplicate=False))
        found = []
        for (where, name), as_known in self._attributes.items():
            if _key(vars(modules[where]).get(name) if where in modules else _GONE) != _key(_at(modules, as_known)):
                found.append(contents.joined(where, name))
        found += [name for value, name in self._objects.values() if _key(value) != _key(_at(modules, name))]
        return found


def _key(value: Any) -> Any:
    """Of a tensor or module; the tracer puts other objects over a module's dictionary."""
    if isinstance(value, nn.Module):
        return id(value.__dict__)
    return id(value) if isinstance(value, Tensor) or value is _GONE else None


def _known(module: nn.Module) -> dict[Any, str]:
    """Tensors and submodules by the name that a capture knows them by."""
    return contents.unregistered(module) | contents.registered(module) | frames.names_of(module)


def _at(modules: dict[str, nn.Module], name: str) -> Any:
    if name in modules:
        return modules[name]
    where, _, last = name.rpartition(".")
    own = vars(modules[where]) if where in modules else {}
    return own.get(last, next((own[t][last] for t in _TABLES if last in own.get(t, ())), _GONE))
