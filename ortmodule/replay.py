"""One call once more in PyTorch, for gradients that are differentiated again (chain.Graph.backward_in_torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import patches
from .capture import FlatInputs
from .capture.pairs import as_pairs
from .capture.skeleton import skeleton
from .chain import Graph
from .state import Site, State


class ModuleCall(NamedTuple):
    """One call, so that PyTorch can repeat it (chain.Call). whole: of bound tensors that the graph takes as pairs of
    reals, the complex ones, by input."""

    state: State
    site: Site
    flat: FlatInputs
    fill: Callable[[list[Any]], Any]
    whole: dict[int, Tensor]

    def replay(self, tensors: Sequence[Tensor], clones: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        """Runs the call in PyTorch on aliases of what is no leaf, so that gradients can be taken for this use of the
        tensors alone."""
        graph = self.site.captured.graph if self.site.captured is not None else None
        assert isinstance(graph, Graph)
        bound = [self.whole.get(i, t) for i, t in enumerate(tensors)][len(graph.leaves) :]
        others = _others(self.state.module, graph.bound, bound)
        now = [(own, name, own[name]) for own, name, _ in others]
        try:
            put_back(others)
            return self._replay(graph, tensors, clones)
        finally:
            put_back(now)

    def _replay(self, graph: Graph, tensors: Sequence[Tensor],
                clones: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:  # fmt: skip
        site, state = self.site, self.state
        if state.guard.fast() != site.fast and not state.unchanged(site):
            raise RuntimeError("ortmodule: the module was changed between forward and backward(create_graph=True)")
        if own_gradient := next((op.gradient for op in graph.captured.host_ops if op.gradient), ""):
            raise RuntimeError("ortmodule: backward(create_graph=True) runs forward again in PyTorch, which does not "
                               f"know {own_gradient}: second derivatives need a torch.autograd.Function")
        first = {leaf: clones[i] for i, leaf in enumerate(graph.leaves) if i in clones}  # arguments that are edited
        twice: dict[int, Tensor] = {}  # a tensor that comes twice is one
        leaves = [twice.setdefault(id(t), t.view_as(t)) if t.requires_grad else first[i].clone() if i in first else t
                  for i, t in enumerate(self.flat.tensors)]  # fmt: skip
        halves: dict[int, Tensor] = {}  # what the graph has been given of complex ones
        for i in [graph.leaves[at] for at in graph.pairs if at < len(graph.leaves)]:
            if i not in halves and leaves[i].requires_grad:
                pair, same = as_pairs(leaves[i]), [k for k, t in enumerate(leaves) if t is leaves[i]]
                halves.update(dict.fromkeys(same, pair))
                for k in same:
                    leaves[k] = torch.view_as_complex(pair)
        args, kwargs = self.fill([*leaves, *self.flat.scalars])
        holder = _Holder(state.body)
        before = {id(tensors[i]): t for i, t in clones.items()}
        own: dict[str, Tensor] = {}
        alias: dict[int, Tensor] = {}
        whole = {id(t): torch.view_as_complex(tensors[i]) for i, t in self.whole.items() if t.requires_grad}
        # a module under two names comes once, a tensor in two modules twice
        for prefix, m in state.module.named_modules(prefix="m"):
            for name, p in m._parameters.items():
                if id(p) in whole:
                    own[f"{prefix}.{name}"] = whole[id(p)]
                elif p is not None and p.is_leaf:  # forward may ask what it is, and know it by other names
                    alias[id(p)] = p
                elif p is not None:
                    own[f"{prefix}.{name}"] = alias.setdefault(id(p), p.view_as(p))
            for name, b in m._buffers.items():
                if b is not None:
                    own[f"{prefix}.{name}"] = alias.setdefault(id(b), before.get(id(b), b).clone())
        for i in graph.writes:
            if i >= len(graph.leaves) and id(tensors[i]) not in alias:
                name = graph.captured.inputs[i].name
                raise RuntimeError(f"ortmodule: backward(create_graph=True) runs forward again, which edits {name}: a "
                                   "tensor that is no buffer has no copy for that. Give it to register_buffer")
        left = [(at, name, at.get(name, patches.ABSENT))
                for at, (_, name) in zip(site.left, graph.captured.left, strict=True)]  # fmt: skip
        left += [(at, name, at.get(name, patches.ABSENT)) for at, name in site.stored]
        try:
            out = torch.func.functional_call(holder, own, args, kwargs, tie_weights=False)
            out = (out, [at[name] for at, name in site.stored]) if site.stored else out
        finally:
            put_back(left)  # a later call may have left something else
        found: dict[int, Tensor] = {}

        def leaf(x: Any) -> int | None:
            if not isinstance(x, Tensor):
                return None
            found.setdefault(id(x), x)
            return 0

        skeleton(out, leaf)
        places = graph.captured.places
        if len(found) != len(places):
            raise RuntimeError(
                f"ortmodule: the module returned {len(found)} tensors in PyTorch, {len(places)} when captured"
            )
        outputs: list[Tensor | None] = [None] * graph.n_outputs
        for place, t in zip(places, found.values(), strict=True):
            outputs[place] = t
        given = [*leaves, *[torch.tensor(0, device="cpu")] * len(self.flat.scalars)]
        own_ones = [alias.get(id(t), t) for t in tensors[len(graph.leaves) :]]
        return outputs, [*[halves.get(i, given[i]) for i in graph.leaves], *own_ones]


def _others(module: nn.Module, bound: Sequence[Any],
            tensors: Sequence[Tensor]) -> list[tuple[dict[str, Any], str, Tensor]]:  # fmt: skip
    """Parameters and buffers that a call has run with and that are others now, as after torch.func.functional_call."""
    found: list[tuple[dict[str, Any], str, Tensor]] = []
    modules = dict(module.named_modules(remove_duplicate=False))
    for spec, t in zip(bound, tensors, strict=True):
        owner, _, name = spec.target.rpartition(".")
        m = modules.get(owner)
        for own in () if m is None else (m._parameters, m._buffers):
            now = own.get(name)
            if now is not None and now is not t:
                found.append((own, name, t))
    return found


def put_back(attributes: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
    """Attributes, parameters and buffers of modules, by their dictionary and name, as they were."""
    for own, name, old in attributes:
        own.pop(name, None) if old is patches.ABSENT else own.update({name: old})


class _Holder(nn.Module):
    """Calls a module's forward without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.m = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.m.forward(*args, **kwargs)
