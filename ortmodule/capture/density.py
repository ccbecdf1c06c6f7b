"""Densities of a captured call: which share of the labels, and of the tokens of embeddings with a padding_idx, counts.

Told at INFO, in onnxruntime-training's words; nothing is decided by them. They are computed from the arguments of the
call, so a label that comes of parameters or of random numbers has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cuts import Interpreter
from .export import Exported
from .operands import bound
from .program import Node, Program

Density = tuple[str, str, float]
"""label | embedding, the module it belongs to, percent."""
_MANY = 64  # nodes between the arguments and a label


def densities(program: Program, exported: Exported, tensors: list[Tensor]) -> list[Density]:
    """tensors: of the call's arguments, by leaf; leaves behind them are numbers."""
    given = {n: tensors[s.leaf] for s, n in program.inputs if s.kind == "user" and s.leaf < len(tensors)}
    given |= {n: s.tensor for s, n in program.inputs if s.kind == "constant" and s.tensor is not None}
    found: list[Density] = []
    for n in program.nodes:
        if n.target is torch.ops.aten.cross_entropy_loss.default:
            kind, of, ignored = "label", n.args[1], bound(n)[4]
        elif n.target is torch.ops.aten.embedding.default:
            kind, of, ignored = "embedding", n.args[1], bound(n)[2]
        else:
            continue
        if isinstance(ignored, int) and not of.val.is_floating_point() and (kind == "label" or ignored >= 0):
            x = _computed(of, program, exported, given)
            if x is not None and x.numel():
                found.append((kind, n.src[0], 100 * int((x != ignored).sum()) / x.numel()))
    return found


def _computed(of: Node, program: Program, exported: Exported, given: dict[Node, Tensor]) -> Tensor | None:
    """Its value, or None when it takes more than arguments, or much."""
    inputs, rest, reached = [n for _, n in program.inputs], [of], {of}
    while rest:
        n = rest.pop()
        if n in inputs and n not in given or len(reached) > _MANY:
            return None
        if n not in inputs and torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            return None
        new = [i for i in n.inputs() if i not in reached] if n not in inputs else []
        reached.update(new)
        rest += new
    part = Program()
    part.inputs = [(s, n) for s, n in program.inputs if n in given]
    part.nodes = [n for n in program.nodes if n in reached]
    part.outputs = [of]
    player = Interpreter(part, exported.table)
    try:
        with torch.no_grad():
            return player.run([given[n] for n in player.inputs])[0][0]
    except Exception:  # noqa: BLE001  (a number that is said, and no more)
        return None
