"""ORTPipelineModule: DeepSpeed's PipelineModule whose stages run in the engine.

A rank's layers are one graph: the stage. With activation_checkpoint_interval the engine computes runs of them again
in backward, instead of DeepSpeed's function. Where layers are seeded one by one (seed_layers), or another function for
checkpoints was given, each layer is a graph of its own.

The wrappers stand beside the children: names, parameters, `state_dict` and DeepSpeed's files of layers are those of a
PipelineModule, whichever of the two has saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import DebugOptions
from ..module import ORTModule
from ..report import Report

try:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.activation_checkpointing import checkpointing
except ImportError as error:
    raise ImportError("ORTPipelineModule is a subclass of DeepSpeed's PipelineModule: pip install deepspeed") from error


_THEIRS = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint)


class _Stage(nn.Module):
    """The layers of one rank. functions: modules, and what calls modules; modules: those, for their parameters. every:
    the length of the runs that are computed again where `again` says so; 0: none."""

    def __init__(self, functions: list[Callable[[Any], Any]], modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.functions = functions
        self.every = 0
        self.again: list[bool] = []
        for name, module in modules.items():
            self.add_module(name, module)

    def run(self, begin: int, end: int, x: Any) -> Any:
        for function in self.functions[begin:end]:
            x = function(x)
        return x

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Any:
        if not self.every:
            return self.run(0, len(self.functions), x)
        for again, begin in zip(self.again, range(0, len(self.functions), self.every), strict=True):
            end = begin + self.every
            x = checkpoint(self.run, begin, end, x, use_reentrant=False) if again else self.run(begin, end, x)
        return x


class ORTPipelineModule(PipelineModule):
    """PipelineModule's arguments; debug_options and options as ORTModule's.

    Raises NotImplementedError for a PipelineModule among the layers. ZeRO-2 and ZeRO-3 are refused by DeepSpeed.
    """

    def __init__(self, layers: Any, *args: Any, debug_options: DebugOptions | None = None, **kwargs: Any) -> None:
        theirs = inspect.signature(PipelineModule.__init__).parameters
        options = {name: kwargs.pop(name) for name in [*kwargs] if name not in theirs}
        # not children, and `_build`, which is called by the constructor, needs them
        self.__dict__["_wrap"] = lambda module: ORTModule(module, debug_options, **options)
        super().__init__(layers, *args, **kwargs)

    def _build(self) -> None:
        super()._build()
        functions = list(self.forward_funcs)
        stage = _Stage(functions, {k: m for k, m in self.named_children() if k != "loss_fn"})
        self.__dict__["_stage"] = self._wrap(stage)
        self.forward_funcs[:] = [self._wrap(f) if isinstance(f, nn.Module) else f for f in functions]

    def forward(self, forward_input: Any) -> Any:
        every = self.activation_checkpoint_interval
        if self.seed_layers or (every and self.activation_checkpoint_func not in _THEIRS):
            return super().forward(forward_input)
        self.micro_offset += 1
        stage = self._stage.module
        stage.every, stage.again = every, list(self.is_checkpointable_results) if every else []
        return self._stage(forward_input)

    def train(self, mode: bool = True) -> ORTPipelineModule:
        super().train(mode)
        self._stage.training = mode
        return self

    def report(self) -> list[Report]:
        """What runs in the engine: of the stage, or of each of its layers."""
        both = [self._stage, *(f for f in self.forward_funcs if isinstance(f, ORTModule))]
        reports = [w.report() for w in both]
        return [r for r in reports if r.n_captures or r.eager] or reports[:1]
