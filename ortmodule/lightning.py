"""ORTModuleCallback: a LightningModule whose networks train in the engine, without a line in it.

    lightning.Trainer(callbacks=[ORTModuleCallback()], ...)

The submodules are wrapped when `fit`, `validate` or `test` sets up, which is before optimizers and the strategy are,
and once more when `fit` starts, for those that `configure_model` has built in between. They are put back when it is
over. Names carry no prefix at any time: checkpoints are those of the plain module, whichever of the two has saved.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from .blocks import blocks_of
from .bypassed import fits
from .module import ORTModule
from .report import Report

if TYPE_CHECKING:
    Callback = object
else:
    try:
        if "lightning" not in sys.modules and "pytorch_lightning" in sys.modules:
            from pytorch_lightning.callbacks import Callback
        else:
            from lightning.pytorch.callbacks import Callback
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback
        except ImportError as error:
            raise ImportError("ORTModuleCallback is a callback of Lightning's: pip install lightning") from error


class ORTModuleCallback(Callback):
    """modules: names of the submodules to wrap, "net" or "net.blocks.0". None: the direct submodules that have
    parameters to train; the repeated blocks (`ortmodule.wrap_blocks`) where parameters are sharded by
    ModelParallelStrategy or DeepSpeed's stage 3. options: ORTModule's.

    Raises RuntimeError for FSDPStrategy, whose flat parameters stand in the place of the module's; ValueError when
    there is nothing to wrap.
    """

    def __init__(self, modules: list[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.modules = modules
        self.options = options
        self._wrappers: dict[str, ORTModule] = {}
        self._away: dict[str, nn.Module] = {}

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        if type(trainer.strategy).__name__ == "FSDPStrategy":
            raise RuntimeError(
                "ORTModuleCallback and FSDPStrategy: FSDP1 puts flat parameters in the place of a module's. "
                "ModelParallelStrategy shards with fully_shard, which works"
            )
        self._wrap(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._wrap(trainer, pl_module)
        if not self._away:
            raise ValueError(
                f"ORTModuleCallback: {type(pl_module).__name__} has no submodules with a forward and parameters to "
                "train; name them: ORTModuleCallback(['net'])"
            )

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        for name, module in self._away.items():
            _put(pl_module, name, module)
        self._away.clear()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def report(self) -> dict[str, Report]:
        """What runs in the engine, by name of the submodule."""
        return {name: wrapper.report() for name, wrapper in self._wrappers.items()}

    def _wrap(self, trainer: Any, pl_module: nn.Module) -> None:
        for name in self._names(trainer.strategy, pl_module):
            module = pl_module.get_submodule(name)
            if isinstance(module, ORTModule):
                continue
            wrapper = self._wrappers.get(name)
            if wrapper is None or wrapper.module is not module:
                wrapper = ORTModule(module, **self.options)
            _put(pl_module, name, wrapper)
            self._wrappers[name] = wrapper
            self._away[name] = module

    def _names(self, strategy: Any, pl_module: nn.Module) -> list[str]:
        if self.modules is not None:
            return self.modules
        stage = (getattr(strategy, "config", None) or {}).get("zero_optimization", {}).get("stage")
        if stage == 3 or type(strategy).__name__ == "ModelParallelStrategy":
            return blocks_of(pl_module)
        return [name for name, child in pl_module.named_children() if fits(child)]


def _put(owner: nn.Module, name: str, module: nn.Module) -> None:
    """In the place of the submodule of that name, under all the names its parent has for it."""
    path, _, key = name.rpartition(".")
    children = owner.get_submodule(path)._modules
    old = children[key]
    children.update({k: module for k, m in children.items() if m is old})
