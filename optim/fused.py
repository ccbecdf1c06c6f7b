"""Multi-tensor optimizers: one engine call updates every parameter of a group. FusedAdam; lamb.py and sgd.py: others.

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
from .lists import DTYPES, PAIRS, reals
from .shards import PLAIN, local_shards

NEAREST, MASTER, SPLIT, STOCHASTIC = range(4)
COMPLEX = -1  # a list of its own: pairs of reals, stored as NEAREST
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


def check_adam(bias_correction: bool, betas: tuple[float, float], eps: float) -> None:
    if not isinstance(bias_correction, (bool, int)):
        raise TypeError(
            f"bias_correction={bias_correction!r} given; it must be True or False (torch's third argument is betas: "
            "write betas=...)"
        )
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0 <= float(b) < 1 for b in betas)):
        raise ValueError(f"betas={betas} given; two numbers in [0, 1) are needed")
    if not eps >= 0:
        raise ValueError(f"eps={eps} given; it must be >= 0")


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
            check_adam(group["bias_correction"], group["betas"], group["eps"])

    # --- storage ----------------------------------------------------------------------------------

    def _store_of(self, p: Tensor) -> int:
        if p.is_complex():
            return COMPLEX
        if p.dtype not in HALF:
            return NEAREST
        if self.stochastic_rounding:
            return STOCHASTIC
        if self.master_weights == "split":
            return SPLIT if p.dtype == torch.bfloat16 else MASTER
        return MASTER if self.master_weights else NEAREST

    def _moment_dtype_of(self, p: Tensor) -> torch.dtype:
        if p.dtype == torch.float64 or p.is_complex():
            return p.dtype
        return self.moment_dtype or torch.float32

    # quick for an ordinary parameter: without state (SGD) it is looked at in every step
    def _check_parameter(self, p: Tensor) -> None:
        if type(p) is not torch.nn.Parameter and private.is_wrapper(p):
            wrong = (
                f"a {type(p).__name__} parameter, a wrapper of other tensors; allowed: ordinary parameters and DTensors"
            )
        elif not (p.dtype in DTYPES and (p.is_cpu or p.is_cuda)) and not (p.dtype in PAIRS and p.is_cpu):
            wrong = (
                f"a parameter of {p.dtype} on {p.device}; allowed: float32, float64, bfloat16, float16 on cpu, cuda, "
                "complex64, complex128 on cpu"
            )
        elif self.stochastic_rounding and p.dtype == torch.float16:
            wrong = "a parameter of float16 and stochastic_rounding, which is for bfloat16: use master_weights=True"
        elif p.is_neg() or p.is_conj():
            what = "neg" if p.is_neg() else "conj"
            wrong = (
                f"a parameter of sizes {tuple(p.shape)} that is {'negated' if what == 'neg' else 'conjugated'} lazily "
                f"(is_{what}()): set p.data = p.data.resolve_{what}()"
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
            if p.is_neg() or p.is_conj():
                self._check_parameter(p)
            state = self.state[p]
            if not state:
                self._init_state(p, state)
            store = NEAREST if plain and not p.is_complex() else self._init_master(p, state)
            if store == COMPLEX:
                g = g.resolve_conj()
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
        weights = [params, grads, *([s[name] for s in states] for name in self._moments)]
        if store == COMPLEX:
            weights = [reals(x) for x in weights]
        return [*weights, self._masters(store, states), [s["step"] for s in states]]

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
        return (*lists, steps, masters, max(store, NEAREST), seed, *self._constants(group, group["lr"], inv_scale))

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
        check_adam(bias_correction, betas, eps)
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
