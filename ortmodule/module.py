"""ORTModule: an object of a dynamic subclass of the user's class, sharing the user's module's state, whose forward runs
in the engine (ladder.py).

The wrapper's __dict__ IS the module's: parameters, buffers, children, modes, hooks and attributes are one and the same,
names carry no prefix. Hooks of the wrapped module itself run in __call__, around the engine. The wrapper's own state
(state.py) is in a slot.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import bypassed, deepspeed, guard
from . import torch_private as private
from .config import DebugOptions, Settings, resolve
from .debug import set_level
from .fallback import INIT, TORCH_MODEL, NotAModule, NotHere
from .ladder import call
from .precision import tell_slow, within
from .profile import Profile, profile
from .report import Report
from .state import Refused, State
from .summary import report

if TYPE_CHECKING:
    from .timeline import Timeline
    from .verify import Verification

logger = logging.getLogger("ortmodule")


class _Forward:
    """`forward` of a wrapper class: the engine's, unless another one was assigned on the wrapper. As a data descriptor
    it goes before a `forward` in the shared __dict__, which belongs to the wrapped module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is None:
            return self.function
        state: State = obj._ortmodule
        if state.override is None:
            return types.MethodType(self.function, obj)
        if sys._getframe(1).f_code in _CALLS:
            return bypassed.around(state, state.override)
        return state.override

    def __set__(self, obj: Any, value: Callable[..., Any]) -> None:
        obj._ortmodule.override = value
        obj._ortmodule.ways.pop("forward", None)

    def __delete__(self, obj: Any) -> None:
        obj._ortmodule.override = None


_CALLS = frozenset((nn.Module._call_impl.__code__,))


class _Assigned:
    """A method that was assigned on the wrapper: it takes the place of the class's method there and for the forward
    that runs for the wrapper, and leaves the wrapped module as it is."""

    def __init__(self, name: str, original: Any) -> None:
        self.name = name
        self.original = original

    def __get__(self, obj: Any, owner: type) -> Any:
        return self.original if obj is None else obj._ortmodule.assigned[self.name]

    def __set__(self, obj: Any, value: Any) -> None:
        obj._ortmodule.assign({**obj._ortmodule.assigned, self.name: value})

    def __delete__(self, obj: Any) -> None:
        delattr(type(obj), self.name)
        obj._ortmodule.assign({k: v for k, v in obj._ortmodule.assigned.items() if k != self.name})


def _is_method(cls: type, name: str) -> bool:
    static = inspect.getattr_static(cls, name, None)
    return isinstance(static, (types.FunctionType, classmethod, staticmethod, _Assigned)) and not name.startswith("__")


_OURS = ("report", "module", "unwrap", "save_for_device", "profile", "memory_timeline", "verify", "_ortmodule")


def _users(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        own = self.__dict__
        return own[name] if name in own else nn.Module.__getattr__(self, name)

    return get


def _class_of(base: type[ORTModule], module: nn.Module) -> type:
    """The class of a wrapper: that of another one of the same class, as two modules of one class have one type, unless
    something of this object alone is part of it."""
    cls, own = type(module), module.__dict__
    if any(name in of for name in ("forward", *_OURS) for of in (own, own["_modules"], own["_parameters"],
                                                                 own["_buffers"])):  # fmt: skip
        return _subclass(base, module)
    known = _classes.setdefault(cls, {})
    found, forward = known.get(base, (lambda: None, None))
    wrapper = found()
    if wrapper is None or forward is not cls.forward:
        wrapper = _subclass(base, module)
        known[base] = weakref.ref(wrapper), cls.forward
    return wrapper


def _own_class(model: ORTModule) -> type:
    """A class below the wrapper's for this object alone."""
    cls = type(model)
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__slots__": (),
            "forward": inspect.getattr_static(cls, "forward")}  # fmt: skip
    return types.new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update(body))


_classes: weakref.WeakKeyDictionary[type, dict[type, tuple[Callable[[], type | None], Any]]] = (
    weakref.WeakKeyDictionary()
)


def _subclass(base: type[ORTModule], module: nn.Module) -> type:
    """base (ORTModule, or a user's subclass of it) before the module's own class."""
    cls = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with bypassed.itself(self._ortmodule), within(self._ortmodule):
            return call(self._ortmodule, args, kwargs)

    if isinstance(cls.forward, types.FunctionType):
        forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]
    forward.__doc__ = cls.forward.__doc__
    forward.__qualname__ = f"{cls.__qualname__}.forward"
    forward.__module__ = cls.__module__
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(module.forward)
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *signature.parameters.values(),
        ]
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    # A user's own attributes of these names keep their meaning: the user's methods depend on it.
    taken: dict[str, Any] = {}
    for name in _OURS:
        theirs = (
            name in module._modules or name in module._parameters or name in module._buffers or name in module.__dict__
        )
        if name != "_ortmodule" and getattr(base, name) is getattr(ORTModule, name):
            if hasattr(cls, name):
                taken[name] = inspect.getattr_static(cls, name)
            elif theirs:
                taken[name] = property(_users(name))
        if (theirs or hasattr(cls, name)) and (cls, name) not in _collisions and cls is not nn.DataParallel:
            _collisions.add((cls, name))
            logger.warning("%s has an attribute %r of its own, which is also one of ORTModule. %s", cls.__name__, name,
                           "The wrapper's is ORTModule's; forward sees its own" if name not in taken else
                           "It keeps its meaning; ORTModule's is "
                           f"ORTModule.{name}{'.fget(model)' if name == 'module' else '(model)'}")

    def new(made: type, *args: Any, **kwargs: Any) -> Any:
        """What the user's methods mean by `self.__class__(...)` (nn.Sequential cut by a slice): their own class."""
        return cls(*args, **kwargs)

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(bypassed.steps(cls))
        namespace.update(taken)
        if base is ORTModule:
            namespace["__new__"] = new
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __slots__=(),
                         forward=_Forward(forward if base.forward is ORTModule.forward else base.forward))  # fmt: skip

    try:
        return types.new_class(cls.__name__, (base, cls), {}, body)
    except TypeError as error:
        raise TypeError(f"ORTModule cannot make a subclass of {cls.__name__} and {base.__name__}: {error}") from error


_collisions: set[tuple[type, str]] = set()
_PARALLEL = "torch.nn.DataParallel copies the module for every call; use DistributedDataParallel(ORTModule(model))"


class ORTModule(nn.Module):
    """`model = ORTModule(model)`: the same module, trained by the engine.

    module: the module to wrap; it stays usable and shares its state with the result.
    debug_options: log level and saving of the captured graphs.
    options: strict, min_coverage, fallback_policy, fallback_retry, disable, segment_mb, max_captures, capture_seconds,
    recheck, memory_opt_level, memory_opt_config, memory_budget, keep_memory, label_sparsity, padding_sparsity,
    precision, log_level, save_path
    (see config.TABLE; the environment wins).

    The result is an instance of ORTModule and of type(module), with the same parameters, names, attributes, methods and
    signature. A subclass calls `super().__init__(module, ...)`; its methods and its forward go before the module's, and
    its `super().forward(...)` is the module's in the engine.
    """

    __slots__ = ("_ortmodule",)
    _ortmodule: State
    _z3_leaf = deepspeed.Leaf()  # DeepSpeed's ZeRO-3 gathers all parameters below at its border

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not isinstance(cls.__dict__.get("forward"), _Forward):  # else a wrapper's, of which the user's is not told
            super().__init_subclass__(**kwargs)

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None, **options: Any) -> None:
        if not isinstance(module, nn.Module):
            made = isinstance(module, type)
            got = f"the class {module.__name__}: make an object of it first" if made else type(module).__name__
            raise NotAModule(f"ORTModule wraps a torch.nn.Module, got {got}")
        if isinstance(module, ORTModule):
            raise NotAModule("ORTModule got a module that is already an ORTModule: wrap it once")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise NotAModule("ORTModule must be inside: DistributedDataParallel(ORTModule(model))")
        if isinstance(module, torch.jit.ScriptModule):
            raise NotAModule(
                "ORTModule wraps the module before torch.jit.script or torch.jit.trace, not what they return"
            )
        settings = resolve(options, debug_options)
        off = private.lacks("call")
        if off is not None and (settings.asked_strict or not settings.allows(INIT)):
            raise NotHere(f"ORTModule does not work here: {off}")
        if isinstance(module, nn.DataParallel):
            off = _PARALLEL
            if settings.asked_strict or not settings.allows(TORCH_MODEL):
                raise NotAModule(f"ORTModule is not compatible with torch.nn.DataParallel: {off}")
        reason = guard.refuse(module)
        if reason is not None:
            raise Refused(f"ORTModule cannot run {type(module).__name__}: {reason}.")
        if settings.log_level is not None:
            set_level(settings.log_level)
        deepspeed.tell()
        if settings.precision is not None:
            tell_slow(type(module).__name__)
        self._wrap(module, settings)
        if off is not None:
            self._ortmodule.off = off
            logger.warning("%s runs in PyTorch: %s", type(module).__name__, off)

    def _wrap(self, module: nn.Module, settings: Settings) -> None:
        base = type(self)
        before = self.__dict__
        if _state_of(self) is not None:
            raise TypeError(f"{base.__name__}.__init__: this object is an ORTModule already")
        state = State(module, settings, base, base.forward is not ORTModule.forward)
        state.new_part = lambda child: _child(child, settings)
        state.new_way = lambda state, name: bypassed.Way(state, name, lambda child: _child(child, settings))
        wrapper = _class_of(base, module)
        module.__dict__.update(before)  # what a subclass has set before super().__init__
        # The state is the module's; nn.Module.__init__ would make another one.
        object.__setattr__(self, "__class__", wrapper)
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "_ortmodule", state)
        private.share_fsdp_state(module, self)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._ortmodule.module

    def unwrap(self) -> nn.Module:
        """The wrapped module, as `module`: the user's own class, with the parameters as they are now."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, in the engine."""
        with bypassed.itself(self._ortmodule), within(self._ortmodule):
            return call(self._ortmodule, args, kwargs)

    def report(self) -> Report:
        """What runs in the engine, what does not and why, and what capture and planning have cost."""
        return report(self._ortmodule)

    def profile(self, step: Callable[[], Any] | None = None, steps: int = 5) -> Profile:
        """Where the time of a step goes, by operator and line of the user's code (docs/LOOKING_IN.md).

        As a context, `with model.profile() as p:`, it times every step inside. With step, a function that makes one
        training step, it runs that once for the captures and then `steps` times. The result has table(), html(path),
        rows and to_dict(); times are per step.
        """
        return profile(self._ortmodule, step, steps)

    def memory_timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """What lies in memory over the largest of the steps that ran last, by class, as it is planned. Written to path
        as a picture or page: .html, .svg; .png and .pdf need matplotlib. RuntimeError before the first step."""
        from .timeline import memory_timeline

        return memory_timeline(self._ortmodule, path)

    def verify(self, batch: Any, loss: Callable[[Any], Tensor] | None = None, band: float = 2.0) -> Verification:
        """Engine and PyTorch side by side on copies of the module, in its own precision and in fp64; names the first
        module whose result or gradient is outside of the error band. The model is not touched.

        batch: what forward is called with: a tensor, a tuple of arguments or a dict of keyword arguments. loss: from
        forward's result to a number (default: the first output if it is one, else a fixed random sum of all). band: how
        many times PyTorch's own error is allowed. Takes about four times the module's memory, half of it in fp64.
        """
        from .verify import verify

        with within(self._ortmodule):
            return verify(self._ortmodule, _child, batch, loss, band)

    def save_for_device(self, directory: str | os.PathLike[str], batch: Any, *, optimizer: Any = 1,
                        eval_batch: Any = None, prefix: str = "") -> Path:  # fmt: skip
        """Writes what a device needs to go on training this module without PyTorch (docs/ON_DEVICE.md): its forward
        with the loss for training and for evaluation, the optimizer, the parameters, and one file with all of them,
        whose path is returned.

        batch: what forward is called with: a tensor, a tuple of arguments or a dict of keyword arguments; its sizes are
        the device's. optimizer: artifacts.OptimType, a torch.optim.AdamW or SGD whose settings and state are taken, or
        None.
        eval_batch: the call to evaluate and to export, when of other sizes. Submodules train in the mode that they have
        now. Raises CaptureError with the place of what needs PyTorch, as hooks do; ValueError in evaluation mode.
        """
        from .device import save_for_device

        with within(self._ortmodule):
            return save_for_device(
                self._ortmodule, directory, batch, optimizer=optimizer, eval_batch=eval_batch, prefix=prefix
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            callable(value)
            and not isinstance(value, (nn.Module, type))
            and name != "forward"
            and name not in self.__dict__
            and _is_method(type(self), name)
        ):
            state = _state_of(self)
            if state is not None:
                if name not in state.assigned:
                    if not state.assigned:
                        object.__setattr__(self, "__class__", _own_class(self))
                    setattr(type(self), name, _Assigned(name, getattr(type(self), name)))
                state.assign({**state.assigned, name: value})
                return
        super().__setattr__(name, value)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # In two steps: attributes of the module may refer to this object.
        state = self._ortmodule
        return _blank, (state.base,), (state.module, state.settings, state.override, state.assigned)

    def __setstate__(self, saved: tuple[Any, ...]) -> None:
        module, settings, override, assigned = saved
        self._wrap(module, settings)
        for name, value in assigned.items():
            setattr(self, name, value)
        self._ortmodule.override = override
        self._ortmodule.off = _PARALLEL if isinstance(module, nn.DataParallel) else private.lacks("call")

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        make, args, state = self.__reduce_ex__(2)
        result: ORTModule = make(*args)
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(state, memo))
        return result

    def __copy__(self) -> ORTModule:
        make, args, (module, *rest) = self.__reduce_ex__(2)
        result: ORTModule = make(*args)
        result.__setstate__((copy.copy(module), *rest))
        return result

    def __prepare_scriptable__(self) -> nn.Module:
        return self._ortmodule.body  # torch.jit.script compiles the user's code

    def _replicate_for_data_parallel(self) -> Any:
        logger.warning("%s: the copies that DataParallel makes run in PyTorch: %s", type(self).__name__, _PARALLEL)
        return self._ortmodule.module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]


def _child(module: nn.Module, settings: Settings) -> ORTModule:
    """A wrapper of a submodule."""
    wrapper = _blank(ORTModule)
    wrapper._wrap(module, settings)
    return wrapper


def _blank(base: type[ORTModule]) -> ORTModule:
    return object.__new__(base)


def _state_of(wrapper: ORTModule) -> State | None:
    """None: its __init__ has not run yet."""
    try:
        return object.__getattribute__(wrapper, "_ortmodule")  # type: ignore[no-any-return]
    except AttributeError:
        return None
