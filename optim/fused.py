"""Multi-tensor optimizers: one engine call updates every parameter of a group.

A parameter's f32 weight is stored in one of four ways (csrc/optim/optim.h): as the parameter itself; as an f32 master
beside a 16-bit parameter (`master_weights=True`); split over a bfloat16 parameter and an int16 rest
(`master_weights="split"`, 2 bytes less); or as a bfloat16 parameter rounded stochastically (`stochastic_rounding=True`,
no second copy).

State is torch.optim's: `step`, `exp_avg`, `exp_avg_sq` (or `momentum_buffer`) per parameter, so that state dicts go
both ways; each group also carries `step`, as onnxruntime-training's FusedAdam kept it. Loss scaling is fused:
`GradScaler` hands its scale and flag over (`grad_scale`, `found_inf`), gradients are unscaled inside the kernel and
never rewritten.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ortmodule import _C
from ortmodule import torch_private as private

from . import cuda
from .lists import DTYPES
from .shards import PLAIN, is_sharded, local_shards

NEAREST, MASTER, SPLIT, STOCHASTIC = range(4)
HALF = (torch.float16, torch.bfloat16)
FOR_ALL = frozenset((
    "amsgrad", "differentiable", "decoupled_weight_decay",  # settings of torch.optim's groups
    "adam_w_mode", "use_nvlamb", "keep_grads", "set_grad_none", "master_weights", "stochastic_rounding", "moment_dtype",
))  # fmt: skip
_MASK64 = (1 << 64) - 1


class AdamWMode(enum.IntEnum):
    """How weight decay and epsilon enter. The first three are onnxruntime-training's, with its numbers."""

    ADAM_L2_REGULARIZATION = 0  # g += wd * p; eps outside the bias correction
    ADAMW_TRANSFORMERS = 1  # decay after the update, with the uncorrected lr; eps outside
    ADAMW_TORCH = 2  # torch.optim.AdamW
    ADAM_TORCH = 3  # torch.optim.Adam: L2, eps inside the bias correction

    @classmethod
    def _missing_(cls, value: object) -> AdamWMode:
        known = ", ".join(f"{mode.value} ({mode.name})" for mode in cls)
        raise ValueError(f"adam_w_mode={value!r}: it is one of {known}")


@torch.enable_grad()
def run_closure(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
    """The closure's value. GradScaler takes no closures, so the gradients made here are not scaled and may be clipped
    here: Lightning does, and refuses optimizers that announce unscaling of their own."""
    announced = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    try:
        return closure()
    finally:
        optimizer._step_supports_amp_scaling = announced  # type: ignore[attr-defined]


class FusedOptimizer(torch.optim.Optimizer):
    """What the three optimizers share: collecting lists, storage of weights, loss scaling, state dicts."""

    # torch.amp.GradScaler sets grad_scale and found_inf instead of rewriting the gradients
    _step_supports_amp_scaling = True
    _kernel = ""  # _C has <kernel>_step and cuda_<kernel>
    _moments: tuple[str, ...] = ()
    one_launch = False  # see FusedLAMB
    # FP16_Optimizer, for the length of a step on CUDA: the table whose sums are those of these gradients
    _swept: cuda.Head | None = None
    amsgrad = differentiable = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        set_grad_none: bool,
        master_weights: bool | Literal["split"],
        stochastic_rounding: bool,
        moment_dtype: torch.dtype | None,
    ) -> None:
        if master_weights not in (False, True, "split"):
            raise ValueError(f"master_weights={master_weights!r} given; allowed: False, True, 'split'")
        if stochastic_rounding and master_weights:
            raise ValueError("stochastic_rounding replaces master weights; give one of the two")
        if moment_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"moment_dtype={moment_dtype} given; allowed: None, float32, bfloat16, float16 (float64 parameters "
                "have float64)"
            )
        lr = defaults["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("lr as a tensor must have one element")
        if not lr >= 0:
            raise ValueError(f"lr={lr} given; it must be >= 0")
        if not defaults["weight_decay"] >= 0:
            raise ValueError(f"weight_decay={defaults['weight_decay']} given; it must be >= 0")
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights
        self.stochastic_rounding = stochastic_rounding
        self.moment_dtype = moment_dtype
        self.rounding_seed = torch.initial_seed() & _MASK64 if stochastic_rounding else 0
        super().__init__(params, {**defaults, "maximize": defaults.get("maximize", False)})

    # --- groups -----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; settings of the whole optimizer in a group are refused, unless they are its own."""
        if isinstance(param_group, dict):
            self._check_group(param_group)
            self._check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """That nothing is asked of a group that a step would not do."""
        if FOR_ALL.isdisjoint(group):
            return
        for name in sorted(FOR_ALL.intersection(group)):
            given, own = group[name], getattr(self, name, None)
            if own is not None and given is not None and given != own:
                raise ValueError(
                    f"{type(self).__name__}: a parameter group has {name}={given!r}, the optimizer {name}={own!r}, "
                    "which is for all groups: take it out of the group, or give these parameters an optimizer of their "
                    "own"
                )

    def _check_numbers(self, group: dict[str, Any]) -> None:
        """That the numbers of a group are such; before anything moves, at each step."""
        if "betas" in group:
            _check_adam(group["bias_correction"], group["betas"], group["eps"])

    # --- storage ----------------------------------------------------------------------------------

    def _store_of(self, p: Tensor) -> int:
        if p.dtype not in HALF:
            return NEAREST
        if self.stochastic_rounding:
            return STOCHASTIC
        if self.master_weights == "split":
            return SPLIT if p.dtype == torch.bfloat16 else MASTER
        return MASTER if self.master_weights else NEAREST

    def _moment_dtype_of(self, p: Tensor) -> torch.dtype:
        if p.dtype == torch.float64:
            return torch.float64
        return self.moment_dtype or torch.float32

    # quick for an ordinary parameter: without state (SGD) it is looked at in every step
    def _check_parameter(self, p: Tensor) -> None:
        if type(p) is not torch.nn.Parameter and private.is_wrapper(p):
            wrong = (
                f"a {type(p).__name__} parameter, a wrapper of other tensors; allowed: ordinary parameters and DTensors"
            )
        elif p.dtype not in DTYPES or not (p.is_cpu or p.is_cuda):
            wrong = f"a parameter of {p.dtype} on {p.device}; allowed: float32, float64, bfloat16, float16 on cpu, cuda"
        elif self.stochastic_rounding and p.dtype == torch.float16:
            wrong = "a parameter of float16 and stochastic_rounding, which is for bfloat16: use master_weights=True"
        elif p.is_neg():
            wrong = (
                f"a parameter of sizes {tuple(p.shape)} that is negated lazily (is_neg()): set p.data = "
                "p.data.resolve_neg()"
            )
        elif not p.is_contiguous() and any(n > 1 and stride == 0 for n, stride in zip(p.shape, p.stride())):
            wrong = f"an expanded parameter (strides {p.stride()}); several elements share memory: clone it first"
        else:
            return
        raise ValueError(f"{type(self).__name__} got {wrong}")

    def _zeros(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p, dtype=self._moment_dtype_of(p), memory_format=torch.preserve_format)

    def _init_state(self, p: Tensor, state: dict[str, Any]) -> None:
        self._check_parameter(p)
        for moment in self._moments:
            state[moment] = self._zeros(p)
        if self._moments:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    def _init_master(self, p: Tensor, state: dict[str, Any]) -> int:
        """Makes the master that is missing; returns how p's weight is stored."""
        store = self._store_of(p)
        if store == MASTER and "master_weight" not in state:
            state["master_weight"] = p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
        elif store == SPLIT and "master_rest" not in state:
            state["master_rest"] = torch.zeros_like(p, dtype=torch.int16, memory_format=torch.preserve_format)
        return store

    def _seed(self, group_index: int, step: int) -> int:
        return (self.rounding_seed + 0x9E3779B97F4A7C15 * step + 0xD1B54A32D192ED03 * group_index) & _MASK64

    def _collect(self, group: dict[str, Any], device: int | None = None) -> dict[int, list[list[Any]]]:
        """Parameters with a gradient on one device (-1: the CPU; None: wherever they are), by storage: {store: [params,
        grads, states]}."""
        lists: dict[int, list[list[Any]]] = {}
        plain = not (self.master_weights or self.stochastic_rounding)
        index, strided = cuda.host.index, torch.strided
        for p in group["params"]:
            g = p.grad
            if g is None or (device is not None and index(p) != device):
                continue
            if g.layout is not strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients; use torch.optim.SparseAdam for those "
                    "parameters"
                )
            if g.is_neg():
                g = g.resolve_neg()
            if p.is_neg():
                self._check_parameter(p)
            state = self.state[p]
            if not state:
                self._init_state(p, state)
            store = NEAREST if plain else self._init_master(p, state)
            entry = lists.get(store)
            if entry is None:
                entry = lists[store] = [[], [], []]
            entry[0].append(p)
            entry[1].append(g)
            entry[2].append(state)
        return lists

    @staticmethod
    def _masters(store: int, states: list[dict[str, Any]]) -> list[Tensor] | None:
        if store == MASTER:
            return [s["master_weight"] for s in states]
        return [s["master_rest"] for s in states] if store == SPLIT else None

    # --- what both kernels are given --------------------------------------------------------------

    def _lists(
        self, group: dict[str, Any], store: int, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> cuda.Lists:
        """Parameters, gradients, two moments, masters, step counters."""
        moments: cuda.Lists = [[s[name] for s in states] for name in self._moments]
        return [params, grads, *moments, self._masters(store, states), [s["step"] for s in states]]

    def _constants(self, group: dict[str, Any], lr: Any, inv_scale: float) -> tuple[Any, ...]:
        """The numbers of a group, in the order of the kernels' arguments."""
        raise NotImplementedError

    # --- step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. A closure is called first, with gradients enabled; its value is returned.

        grad_scale (float or one-element tensor attribute): gradients are that many times too large. found_inf (same):
        non-zero = do nothing.
        """
        loss = None
        if closure is not None:
            loss = run_closure(self, closure)
        if not all(PLAIN.issuperset(map(type, group["params"])) for group in self.param_groups):
            self._check_shards()
            with local_shards(self):
                self._step()
        else:
            self._step()
        return loss

    def _check_shards(self) -> None:
        pass

    def _step(self) -> None:
        found = getattr(self, "found_inf", None)  # GradScaler expects both attributes to be absent between steps
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            self._check_scale(scale)
        for group in self.param_groups:
            self._check_group(group)
            self._check_numbers(group)
        index = cuda.host.index
        devices = {i for group in self.param_groups for i in map(index, group["params"])}
        if devices != {-1}:
            devices = {index(p) for group in self.param_groups for p in group["params"] if p.grad is not None}
        on_cuda = sorted(devices - {-1})
        self._check_devices(devices)
        for device in on_cuda:
            self.__dict__.setdefault("_stepper", cuda.Stepper()).step(self, device, scale, found)
        if on_cuda and -1 not in devices:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
        elif found is None or float(found) == 0:
            self._update(1.0 if scale is None else 1.0 / float(scale), -1 if on_cuda else None)

    def _check_scale(self, scale: Any) -> None:
        if isinstance(scale, Tensor) and cuda.host.index(scale) >= 0:
            return  # reading it would wait for the device
        try:
            number = float(scale)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(
                f"{type(self).__name__}: grad_scale={scale!r}; gradients are divided by it: it must be a positive "
                "finite number, or a tensor of one"
            )

    # --- on a CUDA device (see cuda.py) ------------------------------------------------------------

    def _check_devices(self, devices: set[int]) -> None:
        pass

    def _cuda_scales(
        self,
        stepper: cuda.Stepper,
        place: cuda.Place,
        params: list[Tensor],
        scale: Tensor | None,
        inv_scale: float,
        found: Tensor | None,
    ) -> tuple[list[tuple[Tensor | None, float]], Tensor | None]:
        """(divisor of the gradients on the device, factor known here) for each group, and the flag that stops the
        step."""
        return [(scale, inv_scale)] * len(self.param_groups), found

    def _cuda_launch(
        self, table: cuda.Table, head: tuple[Any, ...], group: dict[str, Any], lr: float, inv_scale: float
    ) -> None:
        getattr(_C, f"cuda_{self._kernel}")(*head, *self._constants(group, lr, inv_scale))

    # --- on the CPU --------------------------------------------------------------------------------

    def _update(self, inv_scale: float, device: int | None) -> None:
        # what is refused is refused before anything changes
        collected = [self._collect(group, device) for group in self.param_groups]
        self._part_gradients(collected)
        if self._leave_out(collected, inv_scale):
            return
        calls: list[tuple[Any, ...]] = []
        try:
            for index, (group, lists) in enumerate(zip(self.param_groups, collected)):
                sign = -inv_scale if group["maximize"] else inv_scale
                seed = self._seed(index, group.get("step", 0) + 1)
                for store, (params, grads, states) in lists.items():
                    calls.append(self._call(group, store, params, grads, states, sign, seed))
            _C.steps(self._kernel, calls)
        except (ValueError, TypeError) as error:
            lists_of_all = [entry for lists in collected for entry in lists.values()]
            self._take_back(calls, [states for _, _, states in lists_of_all])
            for params, _, states in lists_of_all:
                self._tell_converted(params, states, error)
            raise
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        if calls:
            torch.autograd.graph.increment_version([p for params, *_ in calls for p in params])

    def _part_gradients(self, collected: list[dict[int, list[list[Any]]]]) -> None:
        """A gradient of several parameters becomes one for each, where a step writes into gradients."""

    def _take_back(self, calls: list[tuple[Any, ...]], states: list[list[dict[str, Any]]]) -> None:
        """What was made for calls that are refused, if the next step would take it for an earlier step's."""

    def _tell_converted(self, params: list[Tensor], states: list[dict[str, Any]], error: Exception) -> None:
        """Whether the engine refuses a list because its parameters have been converted since the first step."""
        for p, state in zip(params, states):
            for name in (*self._moments, "momentum_buffer"):
                moment, wide = state.get(name, p), torch.float64
                if moment.shape != p.shape or (moment.dtype == wide) != (p.dtype == wide):
                    raise RuntimeError(
                        f"{type(self).__name__}: a parameter of sizes {tuple(p.shape)} is {p.dtype} now, its {name} of "
                        f"an earlier step has sizes {tuple(moment.shape)} and is {moment.dtype}. Convert the model "
                        "first and make the optimizer then; state is taken along by load_state_dict(old.state_dict())"
                    ) from error

    def _leave_out(self, collected: list[dict[int, list[list[Any]]]], inv_scale: float) -> bool:
        """Whether the gradients of the groups forbid the step."""
        return False

    def _call(
        self,
        group: dict[str, Any],
        store: int,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        inv_scale: float,
        seed: int,
    ) -> tuple[Any, ...]:
        """The arguments of _C.<kernel>_step for one list."""
        *lists, masters, steps = self._lists(group, store, params, grads, states)
        return (*lists, steps, masters, store, seed, *self._constants(group, group["lr"], inv_scale))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients become None, unless both set_grad_none (constructor) and set_to_none are False: then zero."""
        super().zero_grad(set_to_none=self.set_grad_none or set_to_none)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, plus `step` in each group, as onnxruntime-training's FusedAdam kept it."""
        # on CUDA the truth is on the device: steps that overflowed or were replayed count or not only there
        for group in self.param_groups:
            steps = [
                self.state[p]["step"]
                for p in group["params"]
                if cuda.host.index(p) >= 0 and "step" in self.state.get(p, {})
            ]
            if steps:
                group["step"] = int(max(torch.stack([s.to(steps[0].device) for s in steps]).tolist()))
        out = super().state_dict()
        if self.stochastic_rounding:
            for group in out["param_groups"]:
                group["rounding_seed"] = self.rounding_seed
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of these optimizers, of torch.optim's twin, or of onnxruntime-training's FusedAdam (step in
        the group only).

        Moments keep their precision (torch would cast them to the parameter's type) and are brought into the
        parameter's memory order. A state that does not fit raises ValueError and changes nothing.
        """
        loaded: dict[str, Any] = {}

        # runs last: sees what the user's pre-hooks made of it
        def check(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            self._check_loaded(state)
            loaded.update(state)

        before = self.register_load_state_dict_pre_hook(check)
        # the user's see the result
        after = self.register_load_state_dict_post_hook(lambda _: self._take_loaded(loaded), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            self._check_step(f"{type(self).__name__}: a saved group", saved.get("step", 0))
            if saved.get("amsgrad"):
                raise ValueError(f"the state was saved with amsgrad=True, which {type(self).__name__} does not have")
            for key, p in zip(saved["params"], group["params"]):
                state = state_dict["state"].get(key)
                if state:
                    self._check_loaded_state(f"{type(self).__name__}: the saved state of parameter {key}", state, p)

    def _check_loaded_state(self, what: str, state: dict[str, Any], p: Tensor) -> None:
        missing = [name for name in self._moments if state.get(name) is None]
        if missing:
            raise ValueError(
                f"{what} has no {', '.join(missing)}, only {', '.join(map(str, state))}: it is incomplete, or of "
                "another optimizer"
            )
        for name in (*self._moments, "momentum_buffer", "master_weight", "master_rest"):
            value = state.get(name)
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"{what} has a {name} that is a {type(value).__name__}; it must be a tensor")
            if value.shape != p.shape:
                raise ValueError(
                    f"{what} has a {name} of sizes {tuple(value.shape)}, the parameter has {tuple(p.shape)}: is it of "
                    "another model?"
                )
        self._check_step(what, state.get("step", 0))

    @staticmethod
    def _check_step(what: str, step: Any) -> None:
        if not (isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1)):
            raise ValueError(f"{what} has a step {step!r}; it must be a number or a tensor of one element")
        if not math.isfinite(step):
            raise ValueError(f"{what} has a step {step!r}; it must be finite")

    def _take_loaded(self, state_dict: dict[str, Any]) -> None:
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            self.rounding_seed = group.pop("rounding_seed", self.rounding_seed)
            steps = []
            for key, p in zip(saved["params"], group["params"]):
                source = state_dict["state"].get(key)
                if not source:
                    continue
                state = self.state[p]
                for name, value in source.items():
                    if name != "step" and isinstance(value, Tensor) and value.shape == p.shape:
                        dtype = {"master_weight": torch.float32, "master_rest": torch.int16}.get(
                            name, self._moment_dtype_of(p)
                        )
                        state[name] = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).copy_(value)
                step = source.get("step", group.get("step", 0))
                if self._moments or "step" in state:
                    state["step"] = torch.tensor(float(step), dtype=torch.float32, device=p.device)
                steps.append(int(step))
                self._load_master(p, state)
            group.setdefault("step", max(steps, default=0))

    def _load_master(self, p: Tensor, state: dict[str, Any]) -> None:
        """Master weights of the saved state in the form this optimizer keeps; made from the parameter where there was
        none."""
        store = self._store_of(p)
        if "master_rest" in state and store != SPLIT:
            bits = (p.detach().view(torch.int16).to(torch.int32) << 16) + state.pop("master_rest").to(torch.int32)
            state["master_weight"] = bits.view(torch.float32)
        if "master_weight" in state and store == SPLIT:
            bits = state.pop("master_weight").view(torch.int32)
            state["master_rest"] = (bits & 0xFFFF).to(torch.int16)
            with torch.no_grad():
                p.view(torch.int16).copy_(((bits + 0x8000) >> 16).to(torch.int16))
        if "master_weight" in state and store in (NEAREST, STOCHASTIC):
            del state["master_weight"]
        self._init_master(p, state)

    def __getstate__(self) -> dict[str, Any]:
        plain = {
            k: v for k, v in self.__dict__.items() if v is None or isinstance(v, (bool, int, float, str, torch.dtype))
        }
        return {**plain, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)


class FusedAdam(FusedOptimizer):
    """Adam and AdamW with onnxruntime-training's modes, defaults and argument order.

    Args:
        params: tensors or group dicts.
        lr: number or tensor of one element.
        bias_correction, betas, eps, weight_decay: may be given per group.
        adam_w_mode: see AdamWMode; for the whole object, not saved in state_dict.
        set_grad_none: zero_grad() sets gradients to None.
        master_weights: True = f32 masters of 16-bit parameters, "split" = bfloat16 parameter + int16 rest.
        stochastic_rounding: bfloat16 parameters without masters, rounded at random without bias.
        moment_dtype: type of the moments; default float32 (float64 for float64 parameters).
        maximize: ascend.

    The source of defaults is onnxruntime-training: eps 1e-6, mode ADAMW_TRANSFORMERS. Steps count per parameter, as in
    torch.optim.
    """

    _kernel = "adam"
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        master_weights: bool | Literal["split"] = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
        maximize: bool = False,
    ) -> None:
        self._adam_w_mode = AdamWMode(adam_w_mode)
        _check_adam(bias_correction, betas, eps)
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize
        )
        super().__init__(params, defaults, set_grad_none, master_weights, stochastic_rounding, moment_dtype)

    @property
    def adam_w_mode(self) -> AdamWMode:
        return self._adam_w_mode

    @property
    def decoupled_weight_decay(self) -> bool:
        return self._adam_w_mode in (AdamWMode.ADAMW_TRANSFORMERS, AdamWMode.ADAMW_TORCH)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        decoupled = self.decoupled_weight_decay
        for group in self.param_groups:  # torch.optim.Adam and AdamW tell each other which of them saved the state
            if group.get("decoupled_weight_decay", decoupled) != decoupled:
                if group["weight_decay"]:
                    twin = AdamWMode.ADAM_TORCH if decoupled else AdamWMode.ADAMW_TORCH
                    warnings.warn(
                        f"the state was saved by torch.optim.{'Adam' if decoupled else 'AdamW'}, whose weight decay "
                        "acts otherwise than that of "
                        f"this FusedAdam ({self._adam_w_mode.name}); for the same curve pass "
                        f"adam_w_mode=AdamWMode.{twin.name}",
                        UserWarning,
                        stacklevel=2,
                    )
                group["decoupled_weight_decay"] = decoupled

    def _constants(self, group: dict[str, Any], lr: Any, inv_scale: float) -> tuple[Any, ...]:
        decay, mode = group["weight_decay"], self._adam_w_mode
        return (lr, *group["betas"], group["eps"], decay, inv_scale, mode, group["bias_correction"])


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's direction, scaled per tensor by |weight| / |direction| (https://arxiv.org/abs/1904.00962).

    Args (as in Apex's FusedLAMB, with onnxruntime-training's clamps):
        max_grad_norm: gradients are divided by norm / max_grad_norm when their global norm exceeds it; None or 0 = no
        clipping. adam_w_mode: True = decay is part of the direction, False = L2 added to the gradient.
        grad_averaging: the gradient enters the first moment with 1 - beta1, or with 1.
        use_nvlamb: trust ratio also for groups without weight decay.
        ratio_min, ratio_max: clamp of the trust ratio; not applied when a norm is zero (then the ratio is 1).
        keep_grads: by default float32 gradients hold the direction after step(), as in Apex and onnxruntime-training;
        True keeps them, at the price of computing the direction twice.

    one_launch (attribute, may be set at any time): on CUDA both sweeps run in one launch, the second close behind the
    first while the data are in the L2 cache. False (default): a launch for each sweep.

    A step whose gradient norm is inf or NaN is left out as a whole when max_grad_norm is set; otherwise single elements
    whose direction is not finite keep weight and moments.
    """

    _kernel = "lamb"
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        keep_grads: bool = False,
        master_weights: bool | Literal["split"] = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedLAMB has no amsgrad variant")
        _check_adam(bias_correction, betas, eps)
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm} given; it must be positive, or None for no clipping")
        if not ratio_min <= ratio_max:
            raise ValueError(f"ratio_min={ratio_min} must not exceed ratio_max={ratio_max}")
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        self.keep_grads = keep_grads
        self.last_grad_norm: float | Tensor | None = None  # on CUDA a tensor there: reading it waits for the device
        defaults = dict(
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            ratio_min=ratio_min,
            ratio_max=ratio_max,
            maximize=maximize,
        )
        super().__init__(params, defaults, set_grad_none, master_weights, stochastic_rounding, moment_dtype)

    def _part_gradients(self, collected: list[dict[int, list[list[Any]]]]) -> None:
        lists = [grads for by_store in collected for _, grads, _ in by_store.values()]
        for i in _C.overlaps([g for grads in lists for g in grads]):
            for grads in lists:
                if i < len(grads):
                    grads[i] = grads[i].clone()
                    break
                i -= len(grads)

    def _leave_out(self, collected: list[dict[int, list[list[Any]]]], inv_scale: float) -> bool:
        self.last_grad_norm = None
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return False
        norm, finite = _C.norm([g for lists in collected for _, grads, _ in lists.values() for g in grads], 2.0, False)
        self.last_grad_norm = norm * inv_scale
        return not finite

    def _call(self, group, store, params, grads, states, inv_scale, seed):  # type: ignore[no-untyped-def]
        limit = group["max_grad_norm"]
        if limit and self.last_grad_norm is not None and self.last_grad_norm > limit:
            inv_scale *= limit / self.last_grad_norm
        return super()._call(group, store, params, grads, states, inv_scale, seed)

    def _constants(self, group: dict[str, Any], lr: Any, inv_scale: float) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        return (
            lr,
            beta1,
            beta2,
            group["eps"],
            decay if self.adam_w_mode else 0.0,
            0.0 if self.adam_w_mode else decay,
            1.0 - beta1 if group["grad_averaging"] else 1.0,
            group["ratio_min"],
            group["ratio_max"],
            inv_scale,
            group["bias_correction"],
            not (self.use_nvlamb or decay),
            self.keep_grads,
        )

    def _check_shards(self) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if is_sharded(p) and not all(x.is_replicate() for x in p.placements):
                raise RuntimeError(
                    f"FusedLAMB: parameter {number} of sizes {tuple(p.shape)} is a DTensor placed {p.placements}, and "
                    "LAMB needs the norm of the "
                    "whole; allowed: ordinary tensors and replicated DTensors: use FusedAdam, or "
                    "DistributedDataParallel instead of sharding"
                )

    def _check_devices(self, devices: set[int]) -> None:
        if len(devices) > 1 and any(group["max_grad_norm"] for group in self.param_groups):
            raise RuntimeError(
                f"FusedLAMB: parameters on devices {sorted(devices)} (-1: the CPU) and max_grad_norm set; their common "
                "norm needs one device: "
                "set max_grad_norm=None and clip the gradients yourself"
            )

    def _cuda_scales(
        self,
        stepper: cuda.Stepper,
        place: cuda.Place,
        params: list[Tensor],
        scale: Tensor | None,
        inv_scale: float,
        found: Tensor | None,
    ) -> tuple[list[tuple[Tensor | None, float]], Tensor | None]:
        """With max_grad_norm the norm, the clipping divisor of each group and the flag are made on the device."""
        self.last_grad_norm = None
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return super()._cuda_scales(stepper, place, params, scale, inv_scale, found)
        head = self._swept
        if head is None:
            grads = [p.grad for p in params if p.grad is not None and p.grad.layout is torch.strided]
            head, _ = stepper.table(place, "norm").refresh(
                place, "lamb", [grads, grads, None, None, None, None], NEAREST
            )
            _C.cuda_norm(*head)
        out = cuda.host.empty(2 + len(self.param_groups), torch.float32, params[0])
        for number, group in enumerate(self.param_groups):
            limit = group["max_grad_norm"] or 0.0
            _C.cuda_norm_finish(
                *head, scale, found, out[0], out[1], out[2 + number], None, 1.0 / inv_scale, limit, cuda.CLIP_LAMB
            )
        self.last_grad_norm = out[0]
        return [(out[2 + number], 1.0) for number in range(len(self.param_groups))], out[1]

    def _cuda_launch(
        self, table: cuda.Table, head: tuple[Any, ...], group: dict[str, Any], lr: float, inv_scale: float
    ) -> None:
        _C.cuda_lamb(*head, *self._constants(group, lr, inv_scale), table.order if self.one_launch else None)


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay as L2; state dicts go both ways."""

    _kernel = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        set_grad_none: bool = True,
        master_weights: bool | Literal["split"] = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        if momentum < 0:
            raise ValueError(f"momentum={momentum} given; it must be >= 0")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        super().__init__(params, defaults, set_grad_none, master_weights, stochastic_rounding, moment_dtype)

    def _constants(self, group: dict[str, Any], lr: Any, inv_scale: float) -> tuple[Any, ...]:
        names = ("momentum", "dampening", "weight_decay")
        return (lr, *[group[name] for name in names], inv_scale, group["nesterov"])

    def _make_momentum(self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]]) -> list[bool]:
        """Makes the buffers that are missing. -> which those are."""
        missing = [s.get("momentum_buffer") is None for s in states]
        for p, state, new in zip(params, states, missing):
            if new and group["momentum"] != 0:
                state["momentum_buffer"] = self._zeros(p)
        return missing

    def _call(self, group, store, params, grads, states, inv_scale, seed):  # type: ignore[no-untyped-def]
        first = self._make_momentum(group, params, states)  # these buffers become the gradient itself
        momentum = [s["momentum_buffer"] for s in states] if group["momentum"] else None
        constants = self._constants(group, group["lr"], inv_scale)
        return (params, grads, momentum, self._masters(store, states), store, seed, *constants, first)

    def _take_back(self, calls: list[tuple[Any, ...]], states: list[list[dict[str, Any]]]) -> None:
        for (*_, first), of_list in zip(calls, states):
            for new, state in zip(first, of_list):
                if new:
                    state.pop("momentum_buffer", None)

    def _lists(
        self, group: dict[str, Any], store: int, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> cuda.Lists:
        """On CUDA steps are counted on the device: the first one that is not left out has no momentum yet."""
        if group["momentum"] and len(set(map(id, params))) < len(params):
            raise ValueError(
                "FusedSGD: a parameter is twice in a group with momentum; on CUDA its first momentum cannot be "
                "torch's: list it once"
            )
        for p, state, new in zip(params, states, self._make_momentum(group, params, states)):
            if "step" not in state:
                state["step"] = torch.full((), 0.0 if new else 1.0, dtype=torch.float32, device=p.device)
        momentum = [s["momentum_buffer"] for s in states] if group["momentum"] else None
        return [params, grads, momentum, None, self._masters(store, states), [s["step"] for s in states]]


def _check_adam(bias_correction: bool, betas: tuple[float, float], eps: float) -> None:
    if not isinstance(bias_correction, (bool, int)):
        raise TypeError(
            f"bias_correction={bias_correction!r} given; it must be True or False (torch's third argument is betas: "
            "write betas=...)"
        )
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0 <= float(b) < 1 for b in betas)):
        raise ValueError(f"betas={betas} given; two numbers in [0, 1) are needed")
    if not eps >= 0:
        raise ValueError(f"eps={eps} given; it must be >= 0")
