"""A rank that is killed or hangs in a step: every other rank gets an error that names it, within the time-out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, free_port, python_with

pytestmark = pytest.mark.slow
LIMIT = 8

STEPS = """
import os, signal, sys, time
from datetime import timedelta
how, where, victim, store, LIMIT = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
import torch, torch.distributed as dist
from torch import nn
from ortmodule import ORTModule
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
group = {"timeout": timedelta(seconds=LIMIT), "rank": rank, "world_size": world}
if store == "file":
    group["store"] = dist.FileStore(sys.argv[6], world)
elif store == "kept":  # by the parent, as torchrun's agent does
    group["store"] = dist.TCPStore("127.0.0.1", int(sys.argv[6]), world, False, timeout=timedelta(seconds=LIMIT))
dist.init_process_group("gloo", **group)

def leave():
    if rank == victim:
        print("gone", flush=True)
        if how == "raises":
            raise ValueError("mine")
        if how == "ends":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
    def forward(self, x):
        return self.b(self.norm(self.a(x)))
torch.manual_seed(0)
"""

DDP = """
model = nn.parallel.DistributedDataParallel(ORTModule(Net(), segment_mb=0.001), bucket_cap_mb=0.001)
opt = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(6):
        x = torch.randn(6, 8, requires_grad=step == 3 and where == "backward")
        began = time.monotonic()
        if x.requires_grad:
            x.register_hook(lambda g: leave())
        if step == 3 and where == "forward":
            leave()
        y = model(x)
        if x.requires_grad:
            y.register_hook(lambda g: leave())  # at the beginning of backward
        y.pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
        if step == 3 and where == "between":
            leave()
except RuntimeError as error:
    print(f"{time.monotonic() - began:.1f} {type(error).__name__} {error}", flush=True)
    raise SystemExit(3)
"""

SHARDED = """
from torch.distributed.fsdp import fully_shard
from ortmodule import wrap_blocks

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.b(self.a(x).relu())

model = nn.Sequential(*[Block() for _ in range(3)])
wrapped = [model.get_submodule(name) for name in wrap_blocks(model)]
for block in wrapped:
    fully_shard(block)
fully_shard(model)
opt = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(6):
        x = torch.randn(6, 8, requires_grad=True)
        began = time.monotonic()
        if step == 3 and where == "backward":
            x.register_hook(lambda g: leave())
        if step == 3 and where == "forward":  # within the step: the first block has been gathered
            wrapped[0].register_forward_hook(lambda *_: leave())
        y = model(x)
        if step == 3 and where == "backward":
            y.register_hook(lambda g: leave())
        y.pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
    raise AssertionError("nothing has failed")
except RuntimeError as error:
    assert step == 3 and not any(m.report().eager for m in wrapped)
    print(f"{time.monotonic() - began:.1f} {type(error).__name__} {error}", flush=True)
    os._exit(3)
"""

ZERO = """
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_RANK"] = str(rank)
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile a kernel for minutes
whole = dist.new_group
dist.new_group = lambda *args, **kwargs: whole(*args, **{"timeout": timedelta(seconds=LIMIT), **kwargs})  # of its own groups
deepspeed.init_distributed("gloo", verbose=False)
stage = 2 if where == "step" else 1
wrapped = ORTModule(Net())
opt = torch.optim.AdamW(wrapped.parameters(), 1e-3)
config = {"train_micro_batch_size_per_gpu": 6, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
engine = deepspeed.initialize(model=wrapped, optimizer=opt, config=config)[0]
at = "step"
try:
    for step in range(6):
        x = torch.randn(6, 8)
        began = time.monotonic()
        loss = engine(x).pow(2).sum()
        at = "backward"
        engine.backward(loss)
        at = "step"
        if step == 3:
            leave()
        engine.step()
    raise AssertionError("nothing has failed")
except RuntimeError as error:
    assert step == 3 and at == "step" and not wrapped.report().eager, (step, at)
    print(f"{time.monotonic() - began:.1f} {type(error).__name__} {error}", flush=True)
    os._exit(3)
"""

OWN = """
from ortmodule import ranks
module = ORTModule(Net())
module(torch.randn(6, 8)).sum().backward()  # makes no collective

def train():
    global began
    for step in range(6):
        began = time.monotonic()
        if step == 3:
            leave()
        dist.all_reduce(torch.ones(3))

if where == "named":
    try:
        with ranks.named():
            train()
    except RuntimeError as error:
        print(f"{time.monotonic() - began:.1f} {type(error).__name__} {error}", flush=True)
        os._exit(3)
before = sys.excepthook  # the last words of a process, which nobody has caught
def last(kind, error, trace):
    before(kind, error, trace)
    print(f"{time.monotonic() - began:.1f} {kind.__name__} {error}", flush=True)
    os._exit(3)
sys.excepthook = last
train()
"""


def run(code: str, how: str, where: str, victim: int, store: str, ranks: int, tmp: Path) -> dict[int, str]:
    """-> what the others have printed, by rank."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}  # fmt: skip
    kept = None
    if store == "kept":
        import torch.distributed as dist

        kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = tmp / "store" if kept is None else kept.port
    if kept is not None:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    args = [how, where, str(victim), store, str(LIMIT), str(place)]
    running = [subprocess.Popen([sys.executable, "-c", STEPS + code, *args], env={**env, "RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for rank in range(ranks)]  # fmt: skip
    said = {}
    try:
        for rank, process in enumerate(running):
            if rank != victim:
                out, err = process.communicate(timeout=120)
                assert process.returncode == 3, f"rank {rank}, exit {process.returncode}:\n{out[-500:]}{err[-6000:]}"
                said[rank] = out
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return said


def named(said: dict[int, str], victim: int, words: str, most: float) -> None:
    for rank, text in said.items():
        assert re.search(rf"\nortmodule: rank {victim} {words}", text), (rank, text)
        assert float(text.split()[0]) < most, (rank, text)


ENDED = "has ended: no such process is there"
HANGS = "(has not failed with the others .* hangs|hangs)"


@pytest.mark.parametrize(("how", "where", "victim", "store", "ranks"), [
    ("killed", "forward", 1, "file", 2),
    ("killed", "backward", 2, "own", 4),
    ("killed", "backward", 0, "kept", 2),
    ("killed", "between", 0, "own", 2),
    ("raises", "forward", 1, "own", 2),
    ("stopped", "backward", 2, "own", 4),
    ("stopped", "forward", 0, "own", 2),
    ("stopped", "between", 0, "kept", 2),
])  # fmt: skip
def test_a_step_names_the_rank(how: str, where: str, victim: int, store: str, ranks: int, tmp_path: Path) -> None:
    said = run(DDP, how, where, victim, store, ranks, tmp_path)
    assert len(said) == ranks - 1
    named(said, victim, HANGS if how == "stopped" else ENDED, 2 * LIMIT + 2)


@pytest.mark.parametrize(("how", "where", "victim", "ranks"), [
    ("killed", "forward", 1, 2),
    ("killed", "backward", 2, 4),
    ("stopped", "forward", 0, 2),
    ("stopped", "backward", 1, 2),
])  # fmt: skip
def test_sharded_blocks_name_the_rank(how: str, where: str, victim: int, ranks: int, tmp_path: Path) -> None:
    said = run(SHARDED, how, where, victim, "own", ranks, tmp_path)
    named(said, victim, HANGS if how == "stopped" else ENDED, 2 * LIMIT + 2)


@pytest.mark.parametrize(("how", "victim", "ranks"), [("killed", 1, 2), ("stopped", 1, 2)])
def test_deepspeeds_step_names_the_rank(how: str, victim: int, ranks: int, tmp_path: Path) -> None:
    python_with("deepspeed", "0.19.8")
    said = run(ZERO, how, "step", victim, "own", ranks, tmp_path)
    named(said, victim, HANGS if how == "stopped" else ENDED, 2 * LIMIT + 2)


@pytest.mark.parametrize(("how", "where", "victim", "ranks"), [
    ("killed", "named", 1, 2),
    ("stopped", "named", 2, 4),
    ("killed", "uncaught", 0, 2),
    ("stopped", "uncaught", 1, 2),
])  # fmt: skip
def test_a_collective_of_ones_own_names_the_rank(how: str, where: str, victim: int, ranks: int, tmp_path: Path) -> None:
    """Under ranks.named(), or in what a process says at its end."""
    said = run(OWN, how, where, victim, "own", ranks, tmp_path)
    named(said, victim, HANGS if how == "stopped" else ENDED, 2 * LIMIT + 2)
