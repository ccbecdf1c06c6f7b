"""Do the tests see? One thing is broken at a time (csrc/graph/sabotage.h, build/sabotage.so) and the rows that answer
for it must fail.

Operators: the rows are those of tests/ops, recorded from their calls of opcheck.check. Rows with the same backward
graph form one group; every float value of that backward graph and every gradient a rule returns is made slightly wrong
in turn, and some row of the group must notice in plain fp64. Passes, planner, segments, streams: a point of sabotage.h
and the tests that answer for it. An occurrence that changes neither the graph nor the plan (what it broke is dead) is
not counted.
"""

from __future__ import annotations

import ctypes as C
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_accumulate
import test_attention_pass
import test_bias
import test_cse
import test_fold
import test_fuse
import test_label_grads
import test_label_parts
import test_label_rows
import test_layers
import test_losses
import test_masks
import test_norm_casts
import test_padding
import test_parts
import test_patterns
import test_plan
import test_plan_update
import test_remat
import test_remat_regions
import test_rotary
import test_simplify
import torch

import engine
import opcheck

PATH = engine.ROOT / "build" / "sabotage.so"
PLAIN = engine.lib
FAMILIES = sorted(p.stem for p in (engine.ROOT / "tests" / "ops").glob("test_*.py"))


@pytest.fixture(autouse=True)
def sabotaged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """engine and _C, of this build."""
    if "sabotage" not in sys.modules:
        loader = importlib.machinery.ExtensionFileLoader("_C", str(PATH))
        spec = importlib.util.spec_from_loader("_C", loader)
        assert spec
        sys.modules["sabotage"] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules["sabotage"])
    lib = engine.load(str(PATH))
    monkeypatch.setattr(engine, "lib", lib)
    monkeypatch.setattr(test_plan, "_C", sys.modules["sabotage"])
    monkeypatch.setattr(test_parts, "_C", sys.modules["sabotage"])
    monkeypatch.setattr(test_plan_update, "_C", sys.modules["sabotage"])
    yield
    lib.om_sabotage_set(None)


def sabotage(spec: str) -> None:
    C.CDLL(str(PATH)).om_sabotage_set(spec.encode())


def reached() -> int:
    return C.CDLL(str(PATH)).om_sabotage_count()


def notices(f: Callable[[], object]) -> bool:
    """Does the test fail?"""
    try:
        f()
    except Exception:  # noqa: BLE001  (whatever shows)
        return True
    return False


# --- operators
# ---------------------------------------------------------------------------------------------------------


def calls(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Arguments of a parametrized test, one dict per row."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            axes.append([dict(zip(names, row if len(names) > 1 else (row,))) for row in mark.args[1]])
    for rows in itertools.product(*axes):
        yield {k: v for row in rows for k, v in row.items()}


def recorded(family: str) -> dict[str, list[tuple[tuple, dict]]]:
    """By operator: what the family's tests give to opcheck.check, small ones."""
    module = importlib.import_module(family)
    rows: dict[str, list[tuple[tuple, dict]]] = {}

    def record(op: str, inputs: list, ref: Callable, *args: Any, **kw: Any) -> None:
        if 0 < sum(t.numel() for t in inputs if t is not None) < 3000 and kw.get("grad", True) is not False:
            rows.setdefault(op, []).append(((op, inputs, ref, *args), {**kw, "strides": False, "low": ()}))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("check", "check_op"):
            if getattr(module, name, None) is opcheck.check:
                patch.setattr(module, name, record)
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and {"check", "check_op"} & set(test.__code__.co_names):
                for kw in calls(test):
                    try:
                        test(**kw)
                    except Exception:  # noqa: BLE001  (tests that also do other things: recorded as far as they came)
                        pass
    return rows


def backward_of(args: tuple, kw: dict) -> tuple[str, ...]:
    """Operators of the row's backward graph, in order."""
    found: list[str] = []

    class Stop(Exception):
        pass

    def run(text: str, inputs: list, wanted: list[int], dys: list | None, device: str = "") -> None:
        if dys is not None:
            joint = engine.Graph.parse(text).grad(wanted, [int(d is not None) for d in dys])
            found.extend(line.split(" = ")[1].split("(")[0] for line in joint.text().splitlines() if " backward" in line and " = " in line)
            found.append("->" + "".join(map(str, wanted)))
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", run)
        try:
            opcheck.check(*args, **kw)
        except (Stop, engine.EngineError):
            pass
    return tuple(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    unseen = []
    for op, rows in recorded(family).items():
        groups: dict[tuple[str, ...], list[tuple[tuple, dict]]] = {}
        for args, kw in sorted(rows, key=lambda r: sum(t.numel() for t in r[0][1] if t is not None)):
            sabotage("")
            key = backward_of(args, kw)
            if key:
                groups.setdefault(key, []).append((args, kw))
        for key, group in groups.items():
            for point in ("term", op):
                k = 0
                while True:
                    seen = found = False
                    for args, kw in group[::-1][:4] + group[:4]:  # the largest of the small ones say most
                        sabotage(f"{point}:{k}")
                        seen = notices(lambda args=args, kw=kw: opcheck.check(*args, **kw))
                        found |= reached() > k
                        if seen or not found:
                            break
                    if not found:
                        break
                    if not seen:
                        unseen.append(f"{op}: {point}:{k} of {key}, {len(group)} rows")
                    k += 1
    assert not unseen, "\n".join(unseen)


# --- everything else
# ---------------------------------------------------------------------------------------------------


def plans(first: int, n: int, group: bool = False) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "lib", PLAIN)  # the interpreter stays as it is
            for seed in range(first, first + n):
                test_plan.compare(seed, [0, seed % 2, 1 - seed % 2, 0] if group else None)

    return run


def gradients_in_arena() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "lib", PLAIN)
        test_parts.test_they_are_the_interpreters_and_do_not_overlap(0)


def updates() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "lib", PLAIN)
        for seed in range(100):
            test_plan_update.compare(seed)


def rows_of(test: Callable[..., None]) -> None:
    for kw in calls(test):
        test(**kw)


def simplify_rows() -> None:
    rows_of(test_simplify.test_what_changes_nothing_goes)


def fuse_rows() -> None:
    test_fuse.test_chain_with_gradient((7, 13), "f64")
    test_fuse.test_values_read_elsewhere_become_outputs()
    test_fuse.test_no_cycle()


def mask_rows() -> None:
    test_masks.test_random_formulas_keep_their_numbers("bool", 0)
    test_masks.test_random_formulas_keep_their_numbers("additive", 0)


def written_rows() -> None:
    for style in ("plain", "one head", "nanogpt", "bias", "weights too"):
        test_attention_pass.test_written_out_attention_becomes_one_node(style, 0.3)


def accumulate_rows() -> None:
    test_accumulate.test_the_gradient_of_a_tied_embedding_goes_into_the_heads()
    test_accumulate.test_gradients_of_a_split_are_written_side_by_side((2, 0, 1), 1, 15)
    test_accumulate.test_split_with_other_terms_and_scatters()
    test_accumulate.test_what_does_not_tile_stays("start=[3], end=[9]")
    test_accumulate.test_what_does_not_tile_stays("start=[4], end=[8]")


def rotary_rows() -> None:
    test_rotary.test_numbers_are_pytorchs()
    test_rotary.test_forward_and_backward_are_elementwise(test_rotary.MIXED)


def remat_rows() -> None:
    for name in test_remat.CASES:
        test_remat.test_backward_reads_only_what_is_dear(name)
    test_remat.test_written_inputs_are_not_read_again()
    test_remat.test_norm_is_computed_from_its_input()


def padding_rows() -> None:
    for name in ("bools", "added", "bools, causal"):
        test_padding.test_interpreted(name, "anywhere")


NOTICED, UNSEEN, NEVER_REACHED = range(3)
# Seeds are those of test_plan.py that notice first.
POINTS: dict[str, Callable[[], None]] = {
    "grad.sum": plans(0, 25),
    "rewrite.stream": plans(0, 25),
    "rewrite.write": plans(0, 25),
    "rewrite.grad": plans(0, 25),
    "uses": lambda: (test_bias.test_an_added_vector_becomes_the_products_bias(), test_accumulate.test_the_gradient_of_a_tied_embedding_goes_into_the_heads()),
    "same_type": lambda: (simplify_rows(), test_bias.test_an_added_vector_becomes_the_products_bias()),
    "splat": simplify_rows,
    "cse.random": test_cse.test_equal_nodes_become_one,
    "fold.random": test_fold.test_constants_are_computed_once,
    "fuse.swap": fuse_rows,
    "fuse.exact": lambda: test_remat.test_computed_again_with_the_same_bits("square", "amax", "bf16"),
    "fuse.again": test_remat.test_computed_again_beside_what_was_kept,
    "masks.offset": mask_rows,
    "masks.window": mask_rows,
    "masks.rest": mask_rows,
    "attention.stream": written_rows,
    "accumulate.tiles": accumulate_rows,
    "accumulate.term": accumulate_rows,
    "remat.written": remat_rows,
    "remat.computable": remat_rows,
    "remat.region": test_remat_regions.test_inside_is_computed_again_and_what_others_ask_for_is_kept,
    "remat.nested": test_remat_regions.test_regions_within_regions_are_computed_for_the_outer_one_and_anew,
    "rotary.sign": rotary_rows,
    "rotary.back": rotary_rows,
    "norm_casts.once": lambda: test_norm_casts.test_a_result_that_others_read_stays("\n  s = sin(y)\n  output s"),
    "norm_casts.held": lambda: test_norm_casts.test_a_result_that_others_read_stays("\n  output y"),
    "norm_casts.chain": test_norm_casts.test_a_sum_of_gradients_stays_in_its_chain,
    "losses.once": test_losses.test_a_copy_that_others_read_stays,
    "padding.labels": padding_rows,
    "padding.keys": padding_rows,
    "padding.blind": padding_rows,
    "padding.bounds": padding_rows,
    "padding.end": padding_rows,
    "unseen.seen": lambda: rows_of(test_padding.test_seen),
    "layers.written": test_layers.test_a_layer_is_computed_again_from_its_input,
    "plan.view": plans(0, 50),
    "plan.dense": plans(0, 50),
    "plan.key_value": test_plan.test_every_size_is_in_the_key,
    "plan.save": plans(0, 50),
    "plan.write": plans(0, 50),
    "plan.write_order": test_plan.test_written_inputs_change_places,
    "plan.shared": plans(1072, 1, True),
    "plan.owns": plans(100, 25),
    "plan.lifetime": plans(0, 50),
    "plan.last": plans(0, 50),
    "plan.layout": plans(86, 1),
    "plan.clash": plans(86, 1),
    "plan.home": plans(0, 50),
    "plan.overlap": plans(0, 50),
    "plan.place": gradients_in_arena,
    "plan.state_until": updates,
    "plan.state_operand": updates,
    "plan.state_output": updates,
    "plan.state_write": updates,
    "plan.state_writes": updates,
    "segment": plans(1000, 50, True),
    "segment.until": plans(1000, 50, True),
}


@pytest.mark.parametrize("point", POINTS)
def test_point(point: str) -> None:
    """In a process of its own: a broken plan may write anywhere, and a crash is noticed too."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        torch.set_num_threads(1)
        sabotage(point)
        seen = notices(POINTS[point])
        os._exit(NOTICED if seen else UNSEEN if reached() else NEVER_REACHED)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == NOTICED, {UNSEEN: "unseen", NEVER_REACHED: "never reached"}[os.WEXITSTATUS(status)]


PASSES: dict[str, Callable[[], None]] = {
    "simplify": lambda: (simplify_rows(), test_simplify.test_values_stay()),
    "fold": test_fold.test_constants_are_computed_once,
    "cse": test_cse.test_equal_nodes_become_one,
    "bias": test_bias.test_an_added_vector_becomes_the_products_bias,
    "patterns": lambda: rows_of(test_patterns.test_what_is_spelled_out_becomes_one_operator),
    "accumulate": accumulate_rows,
    "losses": lambda: test_losses.test_bits_stay("bf16", "reshape", "reduction=1", ""),
    "norm_casts": lambda: test_norm_casts.test_bits_stay("bf16", "layer_norm", "views", 8),
    "remat": remat_rows,
    "rotary": rotary_rows,
    "masks": mask_rows,
    "attention": written_rows,
    "padding": lambda: test_padding.test_interpreted("added", "tokens"),
    "label_parts": lambda: test_label_parts.test_parts("in the middle"),
    "label_rows": test_label_rows.test_interpreted,
    "label_grads": test_label_grads.test_interpreted,
}


@pytest.mark.parametrize("name", PASSES)
def test_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, second, ... value that the pass puts in another's place."""
    graphs: list[str] = []
    apply = engine.Graph.apply

    def noted(self: engine.Graph, *passes: str) -> engine.Graph:
        apply(self, *passes)
        graphs.append(self.text())
        return self

    monkeypatch.setattr(engine.Graph, "apply", noted)
    PASSES[name]()
    right, unseen, k = list(graphs), [], 0
    while k < 40:
        sabotage(f"pass.{name}:{k}")
        graphs.clear()
        seen = notices(PASSES[name])
        if reached() <= k:
            break
        if not seen and graphs != right:
            unseen.append(k)
        k += 1
    assert k and not unseen, (k, unseen)


def test_every_rule_has_rows() -> None:
    """But gradients of gradients (only the host asks for them), what its family compares without opcheck (bounded sizes
    in tests/engine/test_bounded.py), and the rules that say there is no derivative."""
    own = {"dropout", "fused", "cast_all", "host", "floor_div", "trigamma", "compress", "restore", "trim"}
    lib, names = engine.lib, []
    lib.om_sabotage_rule.restype = C.c_char_p
    while name := lib.om_sabotage_rule(len(names)):
        names.append(name.decode())
    have = {op for family in FAMILIES for op in recorded(family)}
    left = {n for n in names if not n.endswith("_grad")} - have - own
    assert not left, sorted(left)
