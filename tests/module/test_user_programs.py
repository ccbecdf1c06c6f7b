"""A minute's worth of random user programs (see user_programs.py), and that the comparison can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from user_programs import FEATURES, Program, fails, program

# Features that differ from eager, if there are any.
LEFT_OUT: set[str] = set()
USED = [f for f in FEATURES if f not in LEFT_OUT]


@pytest.mark.slow
def test_random_programs():
    share = [0, 0]
    for seed in range(12):
        p = program(seed, USED)
        difference = fails(p, share)
        again = f"python tests/user_programs.py {seed} {seed + 1} --without '{','.join(sorted(LEFT_OUT))}'"
        assert difference is None, f"{again}\n{difference}\n{p.text()}"
    assert share[0] > 0.6 * share[1], share  # not eager against eager


def test_programs_are_a_function_of_their_number():
    assert program(3, USED).text() == program(3, USED).text() != program(4, USED).text()


@pytest.mark.parametrize("what", ["gradient", "result", "buffer"])
def test_a_difference_is_noticed(what, monkeypatch):
    from ortmodule import chain, links

    p = Program(0, ["h = self.first(h)", "self.mean.mul_(0.9).add_(h.detach().mean(0))||self.register_buffer('mean', torch.zeros(4))"], "h",
                ["call(rows=3)"])  # fmt: skip
    assert fails(p) is None
    give, train = links._give, chain.Graph.train

    def wrong(*args: Any) -> Any:
        result = list(give(*args))
        place = max(i for i, g in enumerate(result) if g is not None)
        result[place] = None
        return tuple(result)

    def changed(self: Any, tensors: Any, *rest: Any) -> Any:
        out = train(self, tensors, *rest)
        with torch.no_grad():
            (out if what == "result" else next(t for i, t in enumerate(tensors) if i in self.writes)).mul_(1 + 1e-6)
        return out

    if what == "gradient":
        monkeypatch.setattr(links, "_give", wrong)
    else:
        monkeypatch.setattr(chain.Graph, "train", changed)
    assert what in str(fails(p))
