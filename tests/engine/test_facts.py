"""What csrc/graph/facts.h says of a graph, beside what its text says."""

from __future__ import annotations

import functools
import operator

import pytest
from graph_facts import facts, release
from graphs import random_graph

import engine

VIEWS = {"reshape", "permute", "expand", "slice", "flip"}
OUTPUT, WRITE = 1, 2


def read(text: str) -> tuple[dict[str, int], list[tuple[str, list[str], list[str]]], dict[str, int]]:
    """Values by name, nodes as (operator, operands, results), what holds a value at the end."""
    ids: dict[str, int] = {}
    nodes, held = [], {}
    for line in text.splitlines():
        word = line.strip().split(" ")
        if word[0] in ("input", "param", "buffer"):
            ids[word[1].rstrip(":")] = len(ids)
        elif word[0] == "output":
            held[word[1]] = held.get(word[1], 0) | OUTPUT
        elif word[0] == "write":
            held[word[1]] = held.get(word[1], 0) | WRITE
        elif " = " in line:
            left, right = line.split(" = ", 1)
            outs = [name.strip() for name in left.split(",")]
            for name in outs:
                ids[name] = len(ids)
            op, rest = right.split("(", 1)
            nodes.append((op, [a.strip() for a in rest.split(")")[0].split(",") if a.strip() not in ("", "_")], outs))
    return ids, nodes, held


@pytest.mark.parametrize("block", range(4))
def test_lists_say_what_the_text_says(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        text = random_graph(seed)[0]
        g = engine.Graph.parse(text)
        f, (ids, nodes, held) = facts(g), read(text)
        root = {name: name for name in ids}
        for op, ins, outs in nodes:
            if op in VIEWS:
                root[outs[0]] = root[ins[0]]
        live = [False] * len(nodes)
        needed = set(held)
        for i in range(len(nodes) - 1, -1, -1):
            live[i] = bool(needed & set(nodes[i][2]))
            needed |= set(nodes[i][1]) if live[i] else set()
        for name, v in ids.items():
            assert f.root[v] == ids[root[name]], (seed, name)
            assert f.users.of(v) == [i for i, n in enumerate(nodes) for a in n[1] if a == name], (seed, name)
            assert f.held[v] == held.get(name, 0), (seed, name)
            there = [other for other in ids if root[other] == name]
            assert f.holders.of(v) == [i for i, n in enumerate(nodes) for a in n[1] if a in there], (seed, name)
            assert f.root_held[v] == functools.reduce(operator.or_, [held.get(o, 0) for o in there], 0), (seed, name)
        assert [bool(x) for x in f.live[: len(nodes)]] == live, seed
        release(g, f)
