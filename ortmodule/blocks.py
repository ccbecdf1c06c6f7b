"""Wrapping the repeated blocks of a model one by one: for FSDP2 and DeepSpeed's ZeRO-3, which gather a block's
parameters when it is called and free them behind it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from .module import ORTModule


def blocks_of(model: nn.Module) -> list[str]:
    """Names of the outermost submodules that stand in a row of their like: two or more children of one class, with
    parameters, of a ModuleList or Sequential."""
    found: list[str] = []
    for name, parent in model.named_modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or any(name.startswith(f"{b}.") for b in found):
            continue
        of = {k: c for k, c in parent.named_children() if next(c.parameters(), None) is not None}
        like = Counter(type(c) for c in of.values())
        found += [f"{name}.{k}" if name else k for k, c in of.items() if like[type(c)] > 1 and len(list(c.children()))]
    return found


def wrap_blocks(model: nn.Module, **options: Any) -> list[str]:
    """Puts ORTModule(block, **options) in the place of every repeated block of the model (see blocks_of).

    model: changed in place; parameters, names and state_dict stay. Call it before `deepspeed.initialize`; before
    `fully_shard` of the blocks or after. -> names of the blocks. Raises ValueError when there are none; blocks that are
    wrapped already are left alone.
    """
    names = blocks_of(model)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks (children of one class in a ModuleList or Sequential, with "
            "children of their own); wrap submodules one by one, or the whole model"
        )
    for name in names:
        owner, _, key = name.rpartition(".")
        parent = model.get_submodule(owner)
        block = parent.get_submodule(key)
        if not isinstance(block, ORTModule):
            setattr(parent, key, ORTModule(block, **options))
    return names
