"""Every name of PyTorch that is not public and that this package uses: where it is, and what happens without it.

The rest of the package asks here (`private.keep_graph()`): a name is looked for at its first use, probed, and kept.
What is missing, or does not do what is expected of it, is logged once and shown in `model.report()`, and
  instead   stands in its place, where there is something: more memory or time, never another result;
  need      names what cannot be without it: "call" (what a call means cannot be told: all calls stay in PyTorch),
            "capture" (nothing can be captured), "hooks" (modules with hooks on submodules stay in PyTorch), "shared"
            (those with one submodule at two places do), "parts" (no module runs by its submodules), "net" (no capture
            is compared with forward later on), "device" (save_for_device takes no optimizer of torch.optim). Whoever
            does one of these asks `lacks` first.

Not listed: paths of files in a traceback, attributes by which a name is only shown, what a hook of torch.autograd.graph
closes over (`calls_of`), and the tables `_parameters`, `_buffers` and `_modules` of a module, which every subclass of
nn.Module meets.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

logger = logging.getLogger("ortmodule")

_ABSENT = object()

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL = "_compiled_call_impl"
"""What PyTorch calls instead of an nn.Module, where that has it; it goes into no copy and no file."""
HOOK_TABLES = (*HOOKS, "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
"""Tables of an nn.Module: of hooks that a call fires, and with what is noted beside them."""
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Tables of an optimizer."""


class Row(NamedTuple):
    """One use of private names. field: what it is called here; its value is what the first name stands for, or, with
    `owner`, the object that has the first name (for what is read again at each use, or replaced)."""

    field: str
    names: tuple[str, ...]
    without: str
    instead: Any = None
    need: str = ""
    owner: bool = False
    works: Callable[[Any], bool] = lambda _: True


def _foreach_norm(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    return [torch.linalg.vector_norm(t, order) for t in tensors]


def _foreach_copy(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    for d, s in zip(dst, src):
        d.copy_(s)


def _foreach_mul(dst: Sequence[Tensor], factor: float) -> None:
    for d in dst:
        d.mul_(factor)


def _all_hook_tables(cls: type[nn.Module]) -> bool:
    tables = {k for k, v in cls().__dict__.items() if isinstance(v, dict) and "hook" in k and "state_dict" not in k}
    return tables == set(HOOK_TABLES)


def _has_step_hooks(module: Any) -> bool:
    made = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)
    return all(isinstance(getattr(made, name, None), dict) for name in STEP_HOOKS)


def _call_is_asked(cls: type[nn.Module]) -> bool:
    made = cls()
    made.__dict__[CALL] = lambda: True
    return made() is True and CALL not in copy.copy(made).__dict__


def _has_code(f: Any) -> bool:
    return isinstance(f, types.FunctionType) and not f.__closure__


def _apply_is_known(cls: Any) -> bool:
    """A Python function with code of one form (up to 2.13), or one of C that calls `forward` of its class (2.14)."""
    made = cls.__dict__.get("apply")
    if isinstance(made, types.ClassMethodDescriptorType):
        return made.__objclass__.__name__ == "_FunctionBase"
    f = getattr(made, "__func__", None)
    return isinstance(f, types.FunctionType) and f.__code__.co_freevars == ("__class__",)


_C = "torch._C."
_MODULE = "torch.nn.modules.module."
_VMAP = "torch._C._functorch."
TABLE: tuple[Row, ...] = (
    # --- what kind of call is it
    Row("transforms", (_VMAP + "peek_interpreter_stack",), "a call inside of vmap or grad cannot be told", need="call"),
    Row("dispatch_modes", (_C + "_len_torch_dispatch_stack",), "a call that PyTorch traces cannot be told",
        need="call"),
    Row("tracing", (_C + "_get_tracing_state",), "torch.jit.is_tracing is asked, a little slower",
        instead=lambda: torch.jit.is_tracing()),  # type: ignore[no-untyped-call]
    Row("forward_ad", ("torch.autograd.forward_ad._current_level",), "forward-mode differentiation cannot be told",
        need="call", owner=True, works=lambda m: m._current_level >= -1),
    Row("global_hooks", (_MODULE + "_global_forward_hooks", _MODULE + "_global_forward_pre_hooks",
                         _MODULE + "_global_backward_hooks", _MODULE + "_global_backward_pre_hooks"),
        "hooks for all modules of the process cannot be told", need="call", owner=True),
    Row("parametrized", ("torch.nn.utils.parametrize._cache_enabled",), "torch.nn.utils.parametrize.cached() around "
        "calls is not seen", owner=True, works=lambda m: m._cache_enabled >= 0,
        instead=types.SimpleNamespace(_cache_enabled=0)),
    Row("hook_tables", ("torch.nn.Module",), "a module's tables of hooks are others than those that are known here",
        need="call", works=_all_hook_tables),
    Row("version", ("torch.Tensor._version",), "edits in place cannot be told", need="call"),
    Row("saved_hooks", ("torch._C._autograd._top_saved_tensors_default_hooks",), "saved_tensors_hooks of the caller "
        "cannot be told", need="call"),
    Row("hooks_allowed", ("torch._C._autograd._saved_tensors_hooks_is_enabled",), "a call inside of "
        "torch.autograd.graph.disable_saved_tensors_hooks cannot be captured", instead=lambda: True),
    Row("function_modes", (_C + "_len_torch_function_stack", _C + "_get_function_stack_at",
                           "torch.utils._device.DeviceContext"), "modes of the caller cannot be told", need="call"),
    Row("mode_stack", ("torch.utils._python_dispatch._get_current_dispatch_mode_stack",
                       "torch.utils._python_dispatch._pop_mode", "torch.utils._python_dispatch._push_mode",
                       _C + "_pop_torch_function_stack", _C + "_push_on_torch_function_stack"),
        "a capture that was interrupted may leave modes of PyTorch on", owner=True),
    # --- backward
    Row("keep_graph", ("torch._C._autograd._get_current_graph_task_keep_graph",),
        "every backward works on a copy of what its forward kept: more memory and time", instead=lambda: True),
    Row("task_id", (_C + "_current_graph_task_id",),
        "several threads in one backward, and a forward inside of a backward (checkpoint), are told by their thread",
        instead=get_ident),
    Row("storage_use_count", (_C + "_storage_Use_Count",),
        "the memory of an output is never lent to its gradient: more memory"),
    Row("vmap_nesting", (_C + "_vmapmode_increment_nesting", _C + "_vmapmode_decrement_nesting",
                         _C + "_dispatch_keys", "torch._remove_batch_dim",
                         "torch._add_batch_dim"),
        "torch.autograd.grad(is_grads_batched=True) through the module is an error"),
    Row("is_transformed", (_VMAP + "is_functorch_wrapped_tensor",),
        "a parameter or buffer that a transform of torch.func has left behind is captured in vain",
        instead=lambda _: False),
    Row("functorch", (_VMAP + "is_batchedtensor", _VMAP + "get_unwrapped", _VMAP + "maybe_get_level",
                      _VMAP + "maybe_get_bdim", _VMAP + "_add_batch_dim"),
        "torch.func.vmap over a backward through the module is an error", owner=True),
    Row("queue_callback", ("torch.autograd.Variable._execution_engine.queue_callback",),
        "what a backward has left unfinished is kept as long as its graph", instead=lambda _: None),
    Row("tensor_hooks", ("torch.Tensor._backward_hooks.__get__",),
        "a hook on an output that misses the way through another output is not warned of", instead=lambda _: None),
    Row("post_hooks", ("torch.Tensor._post_accumulate_grad_hooks.__get__",), "a post-accumulate hook is called for a "
        "gradient that has not arrived", instead=lambda _: None),
    Row("is_zero", ("torch.Tensor._is_zerotensor",), "zeros without memory are told by their address",
        instead=lambda t: t.numel() > 0 and t.layout is torch.strided and t.data_ptr() == 0),
    Row("profiler", ("torch.autograd.profiler._is_profiler_enabled",), "torch.profiler shows no ranges of the engine",
        instead=types.SimpleNamespace(_is_profiler_enabled=False), owner=True),
    # --- hooks on submodules
    Row("call_impl", ("torch.nn.Module._call_impl", "torch.nn.Module._get_backward_hooks",
                      "torch.nn.Module._get_backward_pre_hooks"),
        "hooks cannot be run as PyTorch runs them", need="hooks"),
    Row("call_of_module", ("torch.nn.Module." + CALL,), "a module whose forward cannot be captured, or whose tensors "
        "lie on several devices, is PyTorch's with all its submodules", need="parts", owner=True, works=_call_is_asked),
    # --- capture
    Row("export_map", ("torch.fx.experimental.proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT",), "what a capture "
        "has made is kept until the next, and torch.utils.swap_tensors refuses parameters", instead={}),
    Row("describer", ("torch._subclasses.meta_utils.MetaTensorDescriber",), "after a capture torch.utils.swap_tensors "
        "refuses parameters until the next garbage collection",
        works=lambda cls: hasattr(cls().lookup_tensor, "clear") and hasattr(cls().lookup_storage, "clear")),
    Row("without_modes", ("torch.utils._python_dispatch._disable_current_modes",), "tensors of the module's state "
        "cannot be read while it is traced", need="capture"),
    Row("no_python_dispatcher", (_C + "_DisablePythonDispatcher",), "a result that is an operand itself (dropout that "
        "drops nothing) cannot be told", need="capture"),
    Row("function_apply", ("torch.autograd.Function.apply",), "custom autograd.Functions would be traced "
        "through, and their backward lost", need="capture", owner=True, works=_apply_is_known),
    Row("compiler", ("torch.compiler._is_compiling_flag", "torch.compiler._is_exporting_flag"), "code that asks "
        "whether it is compiled would be answered as if by torch.compile", need="capture", owner=True,
        works=lambda m: _has_code(m.is_compiling) and _has_code(m.is_exporting)),
    Row("random", ("torch.random.default_generator",), "a seed that forward sets would not be noticed",
        need="capture", owner=True),
    Row("OpOverload", ("torch._ops.OpOverload", "torch.ops.aten.add.Tensor._schema",
                       "torch.ops.aten.add.Tensor._overloadname"),
        "operators of the trace cannot be read", need="capture"),
    Row("HigherOrderOperator", ("torch._ops.HigherOrderOperator",), "operators of the trace cannot be read",
        need="capture"),
    Row("set_grad_enabled", (_C + "_set_grad_enabled",), "torch.no_grad in forward cannot be read from the trace",
        need="capture"),
    Row("DispatchMode", ("torch.utils._python_dispatch.TorchDispatchMode",), "edits in place inside of a custom "
        "Function cannot be told", need="capture", instead=object),
    Row("autocast_nodes", ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast"),
        "torch.autocast in forward cannot be read from the trace", need="capture", owner=True),
    Row("grad_regions", ("torch._export.passes.replace_set_grad_with_hop_pass.replace_set_grad_with_hop_pass",),
        "torch.no_grad as all that torch.autocast holds would be lost", need="capture", owner=True),
    Row("autocast_regions", ("torch._export.passes.replace_autocast_with_hop_pass.replace_autocast_with_hop_pass",),
        "torch.no_grad as all that torch.autocast holds would be lost", need="capture", owner=True),
    Row("free_symbols", ("torch.fx.experimental.symbolic_shapes.free_symbols",), "sizes cannot be read",
        need="capture"),
    Row("free_unbacked_symbols", ("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols",), "sizes that "
        "depend on data cannot be read", need="capture"),
    Row("Mod", ("torch.utils._sympy.functions.Mod",), "sizes cannot be read", need="capture"),
    Row("SizePrinter", ("torch.utils._sympy.printers.PythonPrinter",), "conditions on sizes cannot be asked",
        need="capture", instead=object),
    Row("ShapeEnv", ("torch.fx.experimental.symbolic_shapes.ShapeEnv",), "what the trace took for granted about "
        "sizes cannot be read", need="capture", works=lambda cls: hasattr(cls(), "guards") and hasattr(cls, "replace")),
    Row("unbacked", ("torch.fx.experimental.symbolic_shapes.ShapeEnv.create_unbacked_symint",
                     "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_unbacked_symfloat"), "branches on numbers "
        "read from tensors, and on sizes that depend on data, are left to PyTorch", owner=True),
    Row("FakeTensor", ("torch._subclasses.fake_tensor.FakeTensor",), "what the trace took for granted about sizes "
        "cannot be read", need="capture", works=lambda cls: "fake_mode" in cls.__annotations__),
    Row("numbers", ("torch._subclasses.fake_tensor.should_allow_numbers_as_tensors",), "an edit in place of a "
        "parameter outside of the module, by a number, would be made by the trace as well", need="capture", owner=True,
        works=lambda m: m.should_allow_numbers_as_tensors(torch.ops.aten.mul_.Tensor)),
    Row("storage_address", ("torch.UntypedStorage._cdata.__get__",), "tensors that share memory cannot be told",
        need="capture"),
    Row("set_version", ("torch._C._autograd._unsafe_set_version_counter",), "a tensor that a trace has written and "
        "that is put back counts as changed: a backward that waits for it raises PyTorch's error",
        instead=lambda tensors, versions: None),
    Row("size_config", ("torch.fx.experimental._config.backed_size_oblivious",), "sizes of 0 and 1 have captures of "
        "their own", owner=True, works=lambda m: callable(m.patch)),
    Row("size_node", ("torch.fx.experimental.sym_node.SymNode.guard_bool",
                      "torch.fx.experimental.symbolic_shapes.ShapeEnv.suppress_guards"),
        "batches of 1 have captures of their own", owner=True),
    Row("or_false", ("torch.fx.experimental.symbolic_shapes.guard_or_false",), "squeeze of a size that varies and is 1 "
        "is not captured", owner=True),
    Row("surely", ("torch.fx.experimental.symbolic_shapes.statically_known_true",), "torch.div of sizes is a number "
        "that is read from a tensor"),
    Row("trace_lines", ("torch.utils._traceback._extract_symbolized_tb",), "a capture takes longer", owner=True),
    Row("graph_code", ("torch.fx.GraphModule.recompile",), "a capture takes longer", owner=True,
        works=lambda cls: "_code" in cls(nn.Module(), torch.fx.Graph()).__dict__),
    Row("known_results", ("torch._subclasses.fake_tensor.FakeTensorMode._output_from_cache_entry",
                          "torch._subclasses.fake_tensor.FakeTensorMode._get_output_info_for_cache_entry",
                          "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
                          "torch._subclasses.fake_tensor._CacheKeyState.__init__"),
        "a capture with symbols takes longer", owner=True),
    Row("checkpoint", ("torch.utils.checkpoint._checkpoint_without_reentrant_generator",
                       "torch.utils.checkpoint.noop_context_fn"), "what torch.utils.checkpoint stands around is kept "
        "for backward (but with use_reentrant=True): more memory", owner=True),
    Row("module_tracer", ("torch.fx.experimental.proxy_tensor._ModuleStackTracer",), "code that compares submodules, "
        "of which one stands at two places of the tree, would be shown others while it is captured", need="shared",
        works=lambda cls: {"getattr", "call_module"} <= vars(cls).keys()),
    Row("transformer", ("torch.nn.modules.transformer._detect_is_causal_mask",), "layers of nn.Transformer that are "
        "given a mask ask at every call whether it is causal", owner=True),
    Row("composite_kernel", ("torch._C.DispatchKey.CompositeImplicitAutograd",
                             "torch.ops.aten.lstm.input.py_kernels", "torch.ops.aten.lstm.input._dispatch_cache",
                             "torch.ops.aten.lstm.input._op_dk"),
        "LSTM, GRU and RNN are unrolled: more nodes, and a capture for each length"),
    Row("has_kernel", ("torch._C._dispatch_has_kernel_for_dispatch_key",), "some losses run in PyTorch under autocast",
        instead=lambda name, key: False,
        works=lambda f: f("aten::mse_loss", "AutocastCPU") and not f("aten::relu", "AutocastCPU")),
    Row("onnx_symbolics", ("torch.onnx._internal.torchscript_exporter.registration.registry",), "the report does not "
        "say that symbolics of torch.onnx.register_custom_op_symbolic are not read",
        works=lambda r: r.get_function_group("") is None),
    # --- the net
    Row("NoTorchFunction", (_C + "DisableTorchFunction",), "calls of torch cannot be told apart", need="net"),
    Row("makers", ("torch.utils._device._device_constructors",), "functions that make tensors cannot be told",
        need="net"),
    # --- several processes
    Row("composable", ("torch.distributed._composable_state._get_module_state",
                       "torch.distributed._composable_state._insert_module_state"), "a block that fully_shard has "
        "sharded cannot be wrapped; wrap it before", owner=True),
    Row("default_store", ("torch.distributed.distributed_c10d._get_default_store",), "no error names a rank "
        "that is gone"),
    Row("fsdp_group", ("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard",
                       "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.wait_for_unshard"),
        "a gather of fully_shard in forward names no rank that is gone, but in ranks.named()", owner=True),
    Row("backend_of", ("torch.distributed.ProcessGroup._get_backend",), "a long capture does not say how long other "
        "ranks wait for it"),
    # --- optimizers
    Row("foreach_norm", ("torch._foreach_norm",), "norms of lists are computed one by one", instead=_foreach_norm),
    Row("foreach_copy", ("torch._foreach_copy_",), "lists are copied one by one", instead=_foreach_copy),
    Row("foreach_mul", ("torch._foreach_mul_",), "lists are scaled one by one", instead=_foreach_mul),
    Row("step_hooks", ("torch.optim.optimizer._global_optimizer_pre_hooks",
                       "torch.optim.optimizer._global_optimizer_post_hooks"),
        "hooks around an optimizer's steps cannot be told", need="device", owner=True, works=_has_step_hooks),
    Row("is_wrapper", ("torch.utils._python_dispatch.is_traceable_wrapper_subclass",), "wrappers of tensors are told "
        "by __tensor_flatten__", instead=lambda t: hasattr(t, "__tensor_flatten__")),
)  # fmt: skip
_ROWS = {row.field: row for row in TABLE}
_missing: dict[str, str] = {}  # field -> which name
_here = globals()  # what has been looked for


def _look_up(path: str) -> tuple[Any, Any]:
    """What a dotted name stands for (_ABSENT: nothing), and who has it."""
    parts = path.split(".")
    at: Any = torch
    for i, part in enumerate(parts[1:], 2):
        found = getattr(at, part, _ABSENT)
        if found is _ABSENT and isinstance(at, types.ModuleType) and i < len(parts):
            with contextlib.suppress(ImportError):
                found = importlib.import_module(".".join(parts[:i]))
        if found is _ABSENT:
            return _ABSENT, at
        owner, at = at, found
    return at, owner


def __getattr__(field: str) -> Any:
    row = _ROWS.get(field)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {field!r}")
    value, lost = row.instead, ""
    found = owner = _ABSENT
    for name in reversed(row.names):
        found, owner = _look_up(name)
        if found is _ABSENT:
            lost = name
    if not lost:
        value = owner if row.owner else found
        try:
            lost = "" if row.works(value) else row.names[0]
        except Exception:
            lost = row.names[0]
        value = row.instead if lost else value
    if lost:
        _missing[field] = lost
        logger.warning("%s", _sentence(row))
    _here[field] = value
    return value


def forget() -> None:
    """Every name is looked for again at its next use."""
    for field in _ROWS:
        _here.pop(field, None)
    _missing.clear()
    _levels.cache_clear()


def _get(field: str) -> Any:
    return _here[field] if field in _here else __getattr__(field)


def has(field: str) -> bool:
    """Is there what the row stands for, and not only something in its place?"""
    if field not in _here:
        __getattr__(field)
    return field not in _missing


def _sentence(row: Row) -> str:
    kept = {"call": "all calls stay in PyTorch", "capture": "nothing is captured, all calls stay in PyTorch",
            "hooks": "modules with hooks on submodules stay in PyTorch",
            "shared": "modules with one submodule at two places stay in PyTorch",
            "parts": "nothing runs by its submodules",
            "net": "captures are not compared with forward later on",
            "device": "save_for_device takes no optimizer of torch.optim"}  # fmt: skip
    ends = f": {kept[row.need]}" if row.need else ""
    return f"this PyTorch ({torch.__version__}) has no {_missing[row.field]}, or another one: {row.without}{ends}"


def lacks(need: str) -> str | None:
    """Why this cannot be done here: the first name that it needs and that is missing."""
    return next((_sentence(row) for row in TABLE if row.need == need and not has(row.field)), None)


def missing() -> list[str]:
    """A line for each row that is missing something."""
    return [_sentence(row) for row in TABLE if not has(row.field)]


# --- several names together -----------------------------------------------------------------------


def names_of_export() -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of what torch.export, or what it calls, replaces in the process while it traces: those that
    there are."""
    found: list[tuple[Any, str, Any]] = [(nn.Module, k, vars(nn.Module)[k]) for k in ("__call__", "__getattr__")]
    for where, names in _OF_EXPORT.items():
        with contextlib.suppress(ImportError):  # a first capture will need them
            owner = sys.modules.get(where) or importlib.import_module(where)
            found += [(owner, name, vars(owner)[name]) for name in names if name in vars(owner)]
    return found


_OF_EXPORT = {
    "builtins": ("max", "min"),
    "math": ("pow",),
    "warnings": ("filters", "showwarning"),
    "torch.compiler": ("_is_compiling_flag", "_is_exporting_flag"),
    "torch._dynamo.utils": ("dict_keys_getitem",),  # the functions of torch that torch.fx.wrap was called with
    "torch.fx._symbolic_trace": ("_assert_is_none", "_is_fx_tracing_flag", "CURRENT_PATCHER"),
    "torch.fx.experimental.proxy_tensor": ("_CURRENT_MAKE_FX_TRACER",),
    "torch.export._trace": ("_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY"),
    "torch.utils._python_dispatch": ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"),
}


class Modes(NamedTuple):
    """Of this thread. autocast: by kind of device."""

    grad: bool
    autocast: dict[str, tuple[bool, torch.dtype]]
    cached: bool
    nesting: int
    function: list[Any]
    dispatch: list[Any]


def modes_of_thread() -> Modes:
    autocast = {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")}
    nesting = torch.autocast_increment_nesting() - 1  # type: ignore[no-untyped-call]
    torch.autocast_decrement_nesting()  # type: ignore[no-untyped-call]
    function: list[Any] = []
    dispatch: list[Any] = []
    if has("mode_stack") and has("function_modes"):
        function = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        dispatch = _get("mode_stack")._get_current_dispatch_mode_stack()
    return Modes(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), nesting, function, dispatch)


def put_modes(wanted: Modes) -> None:
    now = modes_of_thread()
    if [*map(id, now.function)] != [*map(id, wanted.function)]:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in wanted.function:
            torch._C._push_on_torch_function_stack(mode)
    if [*map(id, now.dispatch)] != [*map(id, wanted.dispatch)]:
        of = _get("mode_stack")
        while torch._C._len_torch_dispatch_stack():
            of._pop_mode()
        for mode in wanted.dispatch:
            of._push_mode(mode)
    if has("mode_stack") and not wanted.dispatch:  # a guard that ends late leaves their key on; the last one's end
        _get("mode_stack")._push_mode(torch.utils._python_dispatch.TorchDispatchMode())  # puts it off
        _get("mode_stack")._pop_mode()
    torch.set_grad_enabled(wanted.grad)
    for kind, (on, dtype) in wanted.autocast.items():
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(wanted.cached)
    for _ in range(now.nesting - wanted.nesting):
        torch.autocast_decrement_nesting()  # type: ignore[no-untyped-call]
    if now.nesting > wanted.nesting:
        torch.clear_autocast_cache()  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Is this thread inside of a backward? Without the name: never."""
    return has("task_id") and _get("task_id")() != -1


def modes_of_caller() -> tuple[str, list[torch.device]]:
    """A TorchFunctionMode that is on, by name; "": none but default devices. Those, but for the CPU."""
    devices: list[torch.device] = []
    for i in range(_get("function_modes")()):
        mode = torch._C._get_function_stack_at(i)
        device = getattr(mode, "device", None) if type(mode) is torch.utils._device.DeviceContext else None
        if device is None:
            return f"the mode {type(mode).__name__}", devices
        if device.type != "cpu":
            devices.append(device)
    return "", devices


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Does anything run around its steps: hooks of its own, or of all optimizers of the process?"""
    of = _get("step_hooks")
    own = any(getattr(optimizer, name) for name in STEP_HOOKS)
    return own or bool(of._global_optimizer_pre_hooks or of._global_optimizer_post_hooks)


def calls_of(hook: Any) -> dict[int, int] | None:
    """Of a hook that waits for those of other tensors (register_multi_grad_hook, mode "all"): how often these have been
    called, by graph task. None: any other."""
    if getattr(hook, "__module__", "") != "torch.autograd.graph" or not isinstance(hook, types.FunctionType):
        return None
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    counts = held["count"].cell_contents if {"count", "nb_calls"} <= held.keys() else None
    return counts if isinstance(counts, dict) else None


def fsdp_state(module: nn.Module) -> Any:
    """What fully_shard keeps for the module that it was called with; None for others."""
    if not any(c.__name__ == "FSDPModule" for c in type(module).__mro__) or not has("composable"):
        return None
    return _get("composable")._get_module_state(module)


def share_fsdp_state(module: nn.Module, wrapper: nn.Module) -> None:
    """fully_shard finds for the wrapper what it keeps for the module."""
    state = fsdp_state(module)
    if state is not None and fsdp_state(wrapper) is None:
        _get("composable")._insert_module_state(wrapper, state)


def store() -> Any:
    """The key-value store of the default process group; None where it cannot be had."""
    return _get("default_store")() if has("default_store") else None


def patience() -> float | None:
    """Seconds that other ranks wait at a collective of the default process group; None where there are none, or it
    cannot be told."""
    dist = torch.distributed
    if not has("backend_of") or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    device = torch.device("cpu" if "cpu:" in dist.get_backend_config() else "cuda")
    with contextlib.suppress(Exception):  # a backend of its own kind
        return float(_get("backend_of")(dist.group.WORLD, device).options._timeout.total_seconds())
    return None


def switches() -> list[Callable[[], Any]]:
    """Functions that tell switches of PyTorch's libraries: as many as there are."""
    ends = ("_enabled", "_tf32", "deterministic", "benchmark", "_allow_tf32")
    return [getattr(torch._C, n) for n in dir(torch._C) if n.startswith("_get_") and n.endswith(ends)]


def autocast_has(op: Any, device: torch.device) -> bool:
    """Is it an operator of which autocast has something to say on this device?"""
    overload = f".{op._overloadname}" if op._overloadname != "default" else ""
    return bool(_get("has_kernel")(op._schema.name + overload, f"Autocast{device.type.upper()}"))


def has_onnx_symbolic(operator: str) -> bool:
    """Has the script given torch.onnx a symbolic of this operator ("domain::name")?"""
    if "torch.onnx._internal.torchscript_exporter.registration" not in sys.modules or not has("onnx_symbolics"):
        return False
    group = _get("onnx_symbolics").get_function_group(operator)
    return group is not None and any(map(group._functions.overridden, group._functions))


def forget_real(fake_mode: Any) -> None:
    """A trace that is over holds no weak references to the tensors that it stood for."""
    if fake_mode is not None and has("describer"):
        describer = fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def storage_of(t: Tensor) -> int:
    """Which storage a tensor looks into; equal for tensors that share memory, also for those without values."""
    address: int = _get("storage_address")(t.untyped_storage())
    return address


def vmap_level(grads: Sequence[Tensor | None]) -> int:
    """Of the older vmap, which torch.autograd.grad(is_grads_batched=True) runs a backward under; 0 outside. grads:
    those that arrive: autograd's threads for other devices do not know the caller's level, and there one that is a
    batch says that it is 1."""
    if not has("vmap_nesting"):
        return 0
    return next(_levels())[1] or int(any([g is not None and is_old_batch(g) for g in grads]))


@functools.cache
def _levels() -> Iterator[tuple[int, int]]:
    """(level + 1, level) of the older vmap, each time: PyTorch tells the level only as it changes. One call of C does
    and undoes that, so no signal's handler can raise in between."""
    up, down = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
    return zip(iter(up, None), iter(down, None))


def is_old_batch(g: Tensor) -> bool:
    """Of the older vmap. What has an address is none: that is asked first, for dispatch keys cost thirty times as
    much."""
    try:
        g.data_ptr()
    except RuntimeError:
        return bool(torch._C._dispatch_keys(g).has("Batched"))
    return False


def batch_of(g: Tensor, level: int) -> tuple[Sequence[Tensor], Callable[[Tensor], Tensor]] | None:
    """A gradient of vmap as a batch of gradients, and how such a batch becomes one of vmap; None: it is none. level: of
    the older vmap."""
    if level and is_old_batch(g):
        return torch._remove_batch_dim(g, level, 1, 0).unbind(), lambda t: torch._add_batch_dim(t, 0, level)
    if not has("functorch"):
        return None
    vmap = torch._C._functorch
    if not vmap.is_batchedtensor(g):
        return None
    inner, own = vmap.get_unwrapped(g), vmap.maybe_get_level(g)
    return inner.unbind(vmap.maybe_get_bdim(g)), lambda t: vmap._add_batch_dim(t, 0, own)


def refuse_batches(grads: Sequence[Tensor | None]) -> None:
    """Where batches cannot be taken apart, gradients that are batches are an error by name."""
    if has("vmap_nesting") and has("functorch"):
        return
    row = _ROWS["functorch" if has("vmap_nesting") else "vmap_nesting"]
    for g in grads:
        try:
            _ = g is None or g.data_ptr()
        except RuntimeError as error:
            raise RuntimeError(f"ortmodule: {_sentence(row)}") from error
