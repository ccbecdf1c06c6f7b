"""What a program may give the trainer that is wrong: it is refused with a sentence, and everything is as it was."""

from __future__ import annotations

import copy
import ctypes as C
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule, api
from ortmodule.artifacts import OptimType, optimizer_of

LIB = api._lib
NAN = float("nan")


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.i, self.drop, self.o = nn.Linear(8, 16), nn.Dropout(p), nn.Linear(16, 2)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.o(self.drop(self.i(x).relu()))
        return nn.functional.cross_entropy(y, labels), y


def made(folder: Path, p: float = 0.0) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    torch.manual_seed(0)
    ORTModule(Net(p)).save_for_device(folder, (torch.zeros(6, 8), torch.zeros(6, dtype=torch.long)))
    return again(folder)


def again(folder: Path, checkpoint: str = "checkpoint") -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(folder / checkpoint)
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, api.Optimizer(folder / "optimizer_model.onnx", module)


def batch(k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(k)
    return g.normal(size=(6, 8)).astype(np.float32), g.integers(0, 2, 6)


def train(module: api.Module, optimizer: api.Optimizer, steps: range) -> list[float]:
    losses = []
    for k in steps:
        losses.append(float(module(*batch(k))[0]))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def test_strided_inputs_in_c(tmp_path: Path) -> None:
    """A trainer of known sizes has no memory to copy them: refused before anything has happened."""
    _, module, optimizer = made(tmp_path)
    x, labels = batch()
    want = module(x, labels)[0]
    wide = np.repeat(x, 2, 1)
    given = (api._Tensor * 2)(api._tensor(wide[:, ::2], "x"), api._tensor(labels, "labels"))
    with pytest.raises(api.TrainingError, match=r"input 0 \('input_0'\) has a stride of 16 in dimension 0, where a dense tensor has 8: copy it"):
        module._t.check(LIB.om_trainer_step(module._t.p, given, None, None))
    with pytest.raises(api.TrainingError, match="no inputs were given; it takes 2"):
        module._t.check(LIB.om_trainer_step(module._t.p, None, None, None))
    given[0] = api._tensor(x, "x")
    given[0].device = 0
    with pytest.raises(api.TrainingError, match="is on device 0; -1, the CPU"):
        module._t.check(LIB.om_trainer_step(module._t.p, given, None, None))
    assert module(x, labels)[0] == want
    optimizer.step()


class FromOne(nn.Module):
    """Ids and labels from 1: zeros are none. A buffer of indices, and enough of others to fill the memory with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.randint(0, 8, (30000,)))
        self.e, self.norm, self.o = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.o(self.norm(self.e(x - 1))[:, self.ids[:8]])
        return nn.functional.cross_entropy(y, labels - 1), y


def test_zeros_need_not_be_good_inputs(tmp_path: Path) -> None:
    """What a trainer tries out when it is made knows no data: its zeros are neither ids nor labels here."""
    torch.manual_seed(0)
    net = FromOne()
    x = torch.randint(1, 11, (25,))
    ORTModule(copy.deepcopy(net)).save_for_device(tmp_path, (x, x))
    _, module, optimizer = again(tmp_path)
    loss = module(x.numpy(), x.numpy())[0]
    torch.testing.assert_close(torch.tensor(loss), net(x, x)[0].detach())
    optimizer.step()
    with pytest.raises(api.TrainingError, match="gather: index -1 at position 0 is out of range"):
        module((x * 0).numpy(), x.numpy())
    with pytest.raises(api.TrainingError, match="label -1 in row 0"):
        module(x.numpy(), (x * 0).numpy())


ZEROS = """
#include "trainer/heap.h"
int main(void) {
    om_heap h;
    if (!om_heap_open(&h, 0, 0)) return 3;
    for (int round = 0; round < 40; round++) { /* heads that were written behind all that was ever handed out */
        const size_t small = (size_t)(64 + 64 * round), large = (size_t)(200 + 900 * round);
        void *a = om_heap_alloc(&h, small), *b = om_heap_alloc(&h, small);
        om_heap_free(&h, b, small);
        om_heap_free(&h, a, small);
        unsigned char *z = om_heap_zeros(&h, large);
        for (size_t i = 0; i < large; i++)
            if (z[i]) return 1;
        for (size_t i = 0; i < large; i++) z[i] = 255;
        om_heap_free(&h, z, large);
    }
    om_heap_close(&h);
    return 0;
}
"""


def test_zeros_of_the_heap_are_zeros(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "zeros.c").write_text(ZEROS)
    build = ["cc", "-std=gnu11", f"-I{root / 'csrc'}", tmp_path / "zeros.c", root / "csrc/trainer/heap.c", "-lpthread", "-o", tmp_path / "zeros"]
    subprocess.run(build, check=True)
    assert subprocess.run([tmp_path / "zeros"]).returncode == 0


def test_indices_out_of_range(tmp_path: Path) -> None:
    state, module, _ = made(tmp_path)
    t = module._t.p
    for i in (-1, 100, 2**31 - 1):
        assert LIB.om_trainer_input(t, False, i).name == b"" and LIB.om_trainer_output(t, True, i).dtype == 0
        assert LIB.om_trainer_param_at(t, i).name == b"" and not LIB.om_trainer_param_at(t, i).value.data
        assert LIB.om_trainer_property_at(t, i).name == b""
    state.properties["epoch"] = 1
    assert LIB.om_trainer_property_at(t, 0).name == b"epoch" and LIB.om_trainer_property_at(t, 1).name == b""


NULLS = """
import ctypes as C, sys
from pathlib import Path
from ortmodule import api
L, home = api._lib, Path(sys.argv[1])
P = C.POINTER(C.c_void_p)
for name, arguments in (("load_file", [C.c_void_p, C.c_char_p, C.c_void_p, P]), ("restore_file", [C.c_void_p, C.c_char_p]),
                        ("prepare", [C.c_void_p] * 3), ("property", [C.c_void_p, C.c_char_p, C.c_void_p])):
    getattr(L, "om_trainer_" + name).argtypes = arguments
L.om_trainer_property.restype = C.c_bool
cx, out, t = L.om_ctx_new(None), C.c_void_p(), C.c_void_p()
packed = bytes(home / "model.omd")
assert L.om_trainer_load_file(cx, packed, None, t) == 0
n = L.om_trainer_elements(t, False)
names, none = (C.c_char_p * 2)(b"output_1", None), api._Bytes(None, 10)
rows = [
    ("load: files is NULL", lambda: L.om_trainer_load(cx, None, None, out)),
    ("load: out is NULL", lambda: L.om_trainer_load(cx, api._Files(), None, None)),
    ("load: out is NULL", lambda: L.om_trainer_load_file(cx, packed, None, None)),
    ("load: packed, the path, is NULL", lambda: L.om_trainer_load_file(cx, None, None, out)),
    *((f"load: files.{part} has 10 bytes at NULL", lambda part=part: L.om_trainer_load(cx, api._Files(**{part: none}), None, out))
      for part in ("packed", "train", "eval", "optimizer", "checkpoint")),
    ("no inputs were given", lambda: L.om_trainer_step(t, None, None, None)),
    ("no inputs were given", lambda: L.om_trainer_eval(t, None, None, None)),
    ("get: to is NULL", lambda: L.om_trainer_get(t, False, None, n)),
    ("set: from is NULL", lambda: L.om_trainer_set(t, False, None, n)),
    ("save: path is NULL", lambda: L.om_trainer_save(t, None, False)),
    ("restore: checkpoint has 10 bytes at NULL", lambda: L.om_trainer_restore(t, none)),
    ("restore: path is NULL", lambda: L.om_trainer_restore_file(t, None)),
    ("copy: from is NULL", lambda: L.om_trainer_copy(t, None)),
    ("set_property: p is NULL", lambda: L.om_trainer_set_property(t, None)),
    ("a property needs a name", lambda: L.om_trainer_set_property(t, api._Property(kind=b"i"))),
    ("export: path is NULL", lambda: L.om_trainer_export(t, None, names, 1)),
    ("export: outputs is NULL", lambda: L.om_trainer_export(t, bytes(home / "x"), None, 1)),
    ("export: outputs[1], a name, is NULL", lambda: L.om_trainer_export(t, bytes(home / "x"), names, 2)),
]
invalid = L.om_trainer_load(cx, api._Files(), None, out)
L.om_ctx_clear(cx)
for words, call in rows:
    print(words, flush=True)
    assert call() == invalid and words in L.om_ctx_message(cx).decode() and not out, L.om_ctx_message(cx)
    L.om_ctx_clear(cx)
assert not L.om_trainer_property(t, None, None) and not L.om_trainer_property(t, b"n", None)
L.om_trainer_set_property(t, api._Property(name=b"n", kind=b"i", i=3))
assert L.om_trainer_property(t, b"n", None)
for name, arguments in (("load", (None, None, None)), ("load_file", (packed, None, None)), ("step", (None,) * 3), ("eval", (None,) * 3),
                        ("update", ()), ("set_rate", (0.1,)), ("schedule", (0, 0, 0, 0)), ("schedule_step", ()), ("get", (False, None, 0)),
                        ("set", (False, None, 0)), ("save", (packed, True)), ("restore", (none,)), ("restore_file", (packed,)), ("copy", (t,)),
                        ("set_property", (None,)), ("export", (packed, names, 1)), ("prepare", (None, None))):
    print(name, flush=True)
    assert getattr(L, "om_trainer_" + name)(None, *arguments) == invalid, name
for name, arguments in (("inputs", (True,)), ("outputs", (False,)), ("rate", ()), ("updates", ()), ("params", ()), ("elements", (True,)),
                        ("nominal", ()), ("properties", ()), ("property", (b"n", None)), ("seed", (1,)), ("reset", ())):
    print(name, flush=True)
    assert not getattr(L, "om_trainer_" + name)(None, *arguments), name
for name, arguments in (("input", (True, 0)), ("output", (True, 0)), ("param_at", (0,)), ("property_at", (0,))):
    assert getattr(L, "om_trainer_" + name)(None, *arguments).name == b""
assert L.om_trainer_memory(None).arena == 0
assert L.om_trainer_get(t, False, (C.c_float * n)(), n) == 0
"""


def test_pointers_that_are_null(tmp_path: Path) -> None:
    made(tmp_path)
    done = subprocess.run([sys.executable, "-c", NULLS, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-200:], done.stderr)


def test_a_failed_step_draws_nothing(tmp_path: Path) -> None:
    losses = []
    for fail in (False, True):
        api.set_seed(5)
        _, module, optimizer = made(tmp_path, 0.5)
        if fail:
            for wrong in (np.full(6, 7), np.zeros(5, np.int64)):
                with pytest.raises(api.TrainingError):
                    module(batch()[0], wrong)
        losses.append(train(module, optimizer, range(3)))
    api.set_seed(0)
    assert losses[0] == losses[1]


def test_another_optimizer_goes_on(tmp_path: Path) -> None:
    """Moments, updates, rate, schedule, seed, properties."""
    runs = []
    for second in (False, True):
        api.set_seed(5)
        state, module, optimizer = made(tmp_path, 0.5)
        schedule = api.LinearLRScheduler(optimizer, 2, 20, 0.1)
        state.properties["epoch"] = 3
        losses = train(module, optimizer, range(3))
        schedule.step()
        if second:
            optimizer = api.Optimizer(tmp_path / "optimizer_model.onnx", module)
        losses += train(module, optimizer, range(3, 6))
        schedule.step()
        runs.append((losses, optimizer.get_learning_rate(), dict(state.properties), module.get_contiguous_parameters().tobytes()))
    api.set_seed(0)
    assert runs[0] == runs[1] and runs[0][1] == pytest.approx(0.1 * 14 / 18)


def test_moments_that_nobody_has_read_are_not_dropped(tmp_path: Path) -> None:
    state, module, optimizer = made(tmp_path)
    train(module, optimizer, range(2))
    api.CheckpointState.save_checkpoint(state, tmp_path / "two", include_optimizer_state=True)
    later = api.CheckpointState.load_checkpoint(tmp_path / "two")
    only = api.Module(tmp_path / "training_model.onnx", later)
    with pytest.raises(api.TrainingError, match="moments were asked for; those of the checkpoint were not read"):
        api.CheckpointState.save_checkpoint(later, tmp_path / "two", include_optimizer_state=True)
    api.CheckpointState.save_checkpoint(later, tmp_path / "weights")
    resumed = api.Optimizer(tmp_path / "optimizer_model.onnx", only)
    api.CheckpointState.save_checkpoint(later, tmp_path / "same", include_optimizer_state=True)
    assert (tmp_path / "same").read_bytes() == (tmp_path / "two").read_bytes()
    assert train(only, resumed, range(2, 5)) == train(module, optimizer, range(2, 5))


def test_a_nominal_checkpoint_is_not_restored(tmp_path: Path) -> None:
    _, module, _ = made(tmp_path)
    before = module.get_contiguous_parameters()
    data = (tmp_path / "nominal_checkpoint").read_bytes()
    with pytest.raises(api.TrainingError, match="is nominal, names without values"):
        module._t.check(LIB.om_trainer_restore(module._t.p, api._Bytes(data, len(data))))
    assert np.array_equal(module.get_contiguous_parameters(), before)


def test_two_trainers_of_different_models(tmp_path: Path) -> None:
    _, module, _ = made(tmp_path / "a")
    (tmp_path / "b").mkdir()
    ORTModule(nn.Sequential(nn.Linear(8, 1), nn.Flatten(0), nn.LayerNorm(6), nn.Linear(6, 1), nn.Flatten(0))).save_for_device(tmp_path / "b", torch.zeros(6, 8))
    _, other, _ = again(tmp_path / "b")
    with pytest.raises(api.TrainingError, match="the two trainers have different parameters"):
        module._t.check(LIB.om_trainer_copy(module._t.p, other._t.p))
    module(*batch())


def test_values(tmp_path: Path) -> None:
    state, module, optimizer = made(tmp_path)
    x, labels = batch()
    schedule = api.LinearLRScheduler
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: optimizer.set_learning_rate(NAN), api.TrainingError, "a learning rate of nan; a number from 0 up"),
        (lambda: optimizer.set_learning_rate(-0.1), api.TrainingError, "a learning rate of -0.1"),
        (lambda: schedule(optimizer, 1, 10, NAN), api.TrainingError, "schedule: a learning rate of nan"),
        (lambda: schedule(optimizer, 10, 1, 0.1), api.TrainingError, "10 steps of warm-up, 1 in all"),
        (lambda: schedule(module, 1, 10, 0.1), TypeError, "a Optimizer is expected, got Module"),
        (lambda: api.Optimizer(tmp_path / "optimizer_model.onnx", state), TypeError, "a Module is expected"),
        (lambda: api.Module(tmp_path / "training_model.onnx", tmp_path / "checkpoint"), TypeError, "a CheckpointState is expected"),
        (lambda: api.CheckpointState.save_checkpoint(module, tmp_path / "x"), TypeError, "a CheckpointState is expected"),
        (lambda: api.CheckpointState.save_checkpoint(state, f"{tmp_path}/x\0y"), ValueError, "a path has no NUL"),
        (lambda: module.export_model_for_inferencing(f"{tmp_path}/x\0y", module.output_names()), ValueError, "a path has no NUL"),
        (lambda: module.export_model_for_inferencing(tmp_path / "x", ["nothing"]), api.TrainingError, "'nothing' is no output of the evaluation graph, which has: output_0, output_1"),
        (lambda: module.export_model_for_inferencing(tmp_path / "x", "output_0"), TypeError, "a list of names"),
        (lambda: state.properties.__setitem__("n", 2**63), OverflowError, "does not fit into 64 bits"),
        (lambda: state.properties.__setitem__("n\0m", 1), ValueError, "has a NUL"),
        (lambda: state.properties.__setitem__("n", "a\0b"), ValueError, "has a NUL"),
        (lambda: state.properties.__setitem__("", 1), TypeError, "not empty"),
        (lambda: state.properties.__setitem__("n", None), TypeError, "int, float or str"),
        (lambda: module(x, None), api.TrainingError, r"input 1 \('input_1'\): an array of type object; float32"),
        (lambda: module(x[:3], labels[:3]), api.TrainingError, r"is f32 \[3, 8\]; the graph takes f32 \[6, 8\]: a size that is a number there"),
        (lambda: copy.deepcopy(module), TypeError, "a Module can be neither copied nor pickled"),
        (lambda: copy.copy(state), TypeError, "a CheckpointState can be neither"),
        (lambda: schedule(optimizer, 0, 2**64 + 10, 0.1), OverflowError, "total_step_count"),
        (lambda: schedule(optimizer, 0, 10, "a"), ValueError, "could not convert"),
        (lambda: module.export_model_for_inferencing(tmp_path / "x", [None]), TypeError, "a list of names"),
        (lambda: api.Optimizer(b"", module), api.TrainingError, "optimizer model: the bytes are empty"),
        (lambda: api.set_seed(1.5), TypeError, "float"),  # type: ignore[arg-type]
        (lambda: api.Module(tmp_path / "training_model.onnx", api.CheckpointState(b"x"), b""), api.TrainingError, "evaluation model: the bytes are empty"),
        (lambda: api.CheckpointState.save_checkpoint(state, ""), api.TrainingError, "a path is needed"),
        (lambda: pickle.dumps(optimizer), TypeError, "a Optimizer can be neither"),
    ]
    rate, before = optimizer.get_learning_rate(), module.get_contiguous_parameters()
    for call, kind, words in calls:
        with pytest.raises(kind, match=words):
            call()
    assert not (tmp_path / "x").exists() and dict(state.properties) == {} and optimizer.get_learning_rate() == rate
    assert np.array_equal(module.get_contiguous_parameters(), before)
    state.properties["n"] = -(2**63)
    assert state.properties["n"] == -(2**63)
    train(module, optimizer, range(1))


def symbolic(folder: Path) -> dict[str, bytes]:
    """Files whose batch is a symbol."""
    made(folder)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / name)
        for i in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
            for d in i.type.tensor_type.shape.dim:
                if d.dim_value == 6:
                    d.dim_param = "rows"
        (folder / name).write_bytes(model.SerializeToString())
    return {part: (folder / name).read_bytes() for part, name in (("train", "training_model.onnx"), ("eval", "eval_model.onnx"), ("optimizer", "optimizer_model.onnx"), ("checkpoint", "checkpoint"))}


def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(n)
    return g.normal(size=(n, 8)).astype(np.float32), g.integers(0, 2, n)


def prepare(t: api._Trainer, train: int, evaluation: int) -> None:
    LIB.om_trainer_prepare.restype, LIB.om_trainer_prepare.argtypes = C.c_int, [C.c_void_p, api._TENSORS, api._TENSORS]
    like = [(api._Tensor * 2)(*(api._tensor(a, "x") for a in rows(n))) for n in (train, evaluation)]
    t.check(LIB.om_trainer_prepare(t.p, *like))


def call(t: api._Trainer, n: int, evaluation: bool = False, outputs: bool = True) -> float:
    arrays = rows(n)
    given, out, loss = (api._Tensor * 2)(*(api._tensor(a, "x") for a in arrays)), (api._Tensor * 2)(), C.c_float()
    t.check((LIB.om_trainer_eval if evaluation else LIB.om_trainer_step)(t.p, given, loss, out if outputs else None))
    return loss.value


def test_sizes_that_were_not_prepared(tmp_path: Path) -> None:
    """Refused before anything has happened, and those that were prepared go on, in any order; all in the arena of then."""
    files = symbolic(tmp_path)
    t, free = api._Trainer(files), api._Trainer(files)
    for n in (6, 11, 3):
        prepare(t, n, n + 1)
    arena = LIB.om_trainer_memory(t.p).arena
    for n in (4000, 4, 7, 12):
        with pytest.raises(api.TrainingError, match=rf"is f32 \[{n}, 8\]; these sizes were not prepared .f32 \[3, 8\] was.: om_trainer_prepare"):
            call(t, n)
        with pytest.raises(api.TrainingError, match="evaluation graph: input 0.*not prepared"):
            call(t, 6, evaluation=True)
    order = np.random.default_rng(0)
    for _ in range(300):
        n, outputs = int(order.choice([6, 11, 3])), bool(order.integers(2))
        what = order.integers(4)
        if what < 2:
            assert call(t, n, outputs=outputs) == call(free, n, outputs=outputs)
        elif what == 2:
            assert call(t, n + 1, True, outputs) == call(free, n + 1, True, outputs)
        else:
            for one in (t, free):
                call(one, 6)
                one.check(LIB.om_trainer_update(one.p))
                LIB.om_trainer_reset(one.p)
    assert LIB.om_trainer_memory(t.p).arena == arena


def test_a_prepare_that_fails_leaves_what_was_prepared(tmp_path: Path) -> None:
    files = symbolic(tmp_path)
    roomy = api._Trainer(files)
    prepare(roomy, 6, 6)
    room = np.zeros(LIB.om_trainer_memory(roomy.p).arena + 64, np.uint8)
    start = -room.ctypes.data % 64
    t = api._Trainer(files, arena=room.ctypes.data + start, arena_size=room.size - 64)
    prepare(t, 6, 6)
    want = call(t, 6)
    for _ in range(3):
        with pytest.raises(api.TrainingError, match="there are gradients of a step, which it would lose"):
            prepare(t, 5000, 6)
        LIB.om_trainer_reset(t.p)
        with pytest.raises(api.TrainingError, match="out of memory: .*options.arena, of .* bytes, is too small; om_trainer_memory"):
            prepare(t, 5000, 6)
        assert call(t, 6) == want and call(t, 6, True) > 0
    LIB.om_trainer_reset(t.p)
    wrong = (api._Tensor * 2)(api._tensor(np.zeros(6, np.float32), "x"), api._tensor(rows(6)[1], "y"))
    with pytest.raises(api.TrainingError, match=r"prepare: input 0 .'input_0'. of the training graph is f32 \[6\]; the graph takes f32 \[\?, 8\]"):
        t.check(LIB.om_trainer_prepare(t.p, wrong, None))
    with pytest.raises(api.TrainingError, match=r"f32 \[6, 8\] .*expected|i64 \[5\] given, i64 \[6\] expected: its sizes contradict"):
        t.check(LIB.om_trainer_prepare(t.p, (api._Tensor * 2)(api._tensor(rows(6)[0], "x"), api._tensor(rows(5)[1], "y")), None))
    assert call(t, 6) == want


def test_copy_between_trainers(tmp_path: Path) -> None:
    """Nothing of a trainer without values; rate and schedule of the same kind of optimizer alone."""
    _, module, optimizer = made(tmp_path)
    adam = module._t
    optimizer.set_learning_rate(0.25)
    train(module, optimizer, range(2))
    files = {part: (tmp_path / name).read_bytes() for part, name in (("train", "training_model.onnx"), ("checkpoint", "nominal_checkpoint"))}
    nominal = api._Trainer(files)
    assert LIB.om_trainer_nominal(nominal.p) and not LIB.om_trainer_nominal(adam.p)
    with pytest.raises(api.TrainingError, match="the other trainer has names and sizes and no values"):
        adam.check(LIB.om_trainer_copy(adam.p, nominal.p))
    module(*batch())
    files |= {"checkpoint": (tmp_path / "checkpoint").read_bytes(), "optimizer": optimizer_of(OptimType.SGD, 23).SerializeToString()}
    sgd = api._Trainer(files)
    rate = LIB.om_trainer_rate(sgd.p)
    sgd.check(LIB.om_trainer_copy(sgd.p, adam.p))
    assert LIB.om_trainer_rate(sgd.p) == rate != 0.25 and LIB.om_trainer_updates(sgd.p) == 0
    with pytest.raises(api.TrainingError, match="there is no schedule; om_trainer_schedule makes one"):
        sgd.check(LIB.om_trainer_schedule_step(sgd.p))
    nominal.check(LIB.om_trainer_copy(nominal.p, adam.p))
    assert not LIB.om_trainer_nominal(nominal.p)
    with pytest.raises(api.TrainingError, match="moments were asked for"):
        nominal.check(LIB.om_trainer_save(nominal.p, bytes(tmp_path / "x"), True))


def test_names_are_the_files(tmp_path: Path) -> None:
    _, module, _ = made(tmp_path)
    for mode, name in ((True, "training_model.onnx"), (False, "eval_model.onnx")):
        module.train(mode)
        assert module.output_names() == [o.name for o in onnx.load(tmp_path / name).graph.output if o.name.startswith("output")]
    module.export_model_for_inferencing(tmp_path / "x.onnx", module.output_names()[1:])


def test_a_state_without_values(tmp_path: Path) -> None:
    made(tmp_path)
    state, module, _ = again(tmp_path, "nominal_checkpoint")
    with pytest.raises(api.TrainingError, match="i.weight: this state has names and sizes of parameters and no values"):
        state.parameters["i.weight"].data  # noqa: B018
    module.copy_buffer_to_parameters(np.ones(module.get_parameters_size(False)), False)
    assert (state.parameters["i.weight"].data == 1).all()


def test_address_space(tmp_path: Path) -> None:
    """What a trainer of known sizes will never use goes back when it is made."""
    made(tmp_path)
    program = """
import resource, sys
from pathlib import Path
from ortmodule import api
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
home = Path(sys.argv[1])
made = []
for _ in range(20):
    state = api.CheckpointState.load_checkpoint(home / "checkpoint")
    made.append(api.Module(home / "training_model.onnx", state))
    made.append(api.Optimizer(home / "optimizer_model.onnx", made[-1]))
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
