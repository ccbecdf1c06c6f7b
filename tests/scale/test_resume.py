"""ortmodule.checkpoint: a training that is killed and goes on gives the bits of one that was not.

Every kind of state runs in two fresh processes, one that saves and goes on, one that loads and goes on. The example is
killed by SIGKILL at random moments, both ranks or one of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import ROOT, launch
from safetensors.torch import load_file

from ortmodule import checkpoint

pytestmark = pytest.mark.slow

KINDS = '''
import sys, json
from contextlib import nullcontext
from pathlib import Path
import torch
from torch import nn
import torch.nn.functional as F
from ortmodule import ORTModule, checkpoint
from ortmodule.optim import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD

class Text(nn.Module):
    """Attention with dropout, a checkpoint, logits beside the loss."""
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.rest = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        self.unused = nn.Linear(3, 3)
    def attend(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return x + self.out(y.transpose(1, 2).reshape(b, t, w))
    def forward(self, ids):
        x = torch.utils.checkpoint.checkpoint(self.attend, self.tokens(ids), use_reentrant=False)
        logits = F.linear(self.rest(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()), logits

class Image(nn.Module):
    """Statistics that forward writes."""
    def __init__(self):
        super().__init__()
        self.c, self.n, self.d, self.l = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.2), nn.Linear(288, 1)
    def forward(self, x):
        return (self.l(self.d(F.relu(self.n(self.c(x)))).flatten(1)).pow(2).mean(),)

class Drawn(nn.Module):
    """What draws in PyTorch, at yield points; a branch on a value."""
    def __init__(self):
        super().__init__()
        self.a, self.b, self.r = nn.Linear(32, 32), nn.Linear(32, 1), nn.RReLU()
    def forward(self, x):
        h = self.r(self.a(x))
        kept = torch.bernoulli(torch.sigmoid(h)) * torch.randn_like(h)
        h = F.dropout(h, 0.3) + kept if h.mean() > 0.02 else torch.tanh(h) + kept
        return (self.b(h).pow(2).mean(),)

def ids(g, i):
    return torch.randint(0, 64, (2 + i % 3, 8 + 4 * (i % 2)), generator=g)
def same(g, i):
    return torch.randint(0, 64, (2, 8), generator=g)
def images(g, i):
    return torch.randn(4 + i % 2, 3, 8, 8, generator=g)
def rows(g, i):
    return torch.randn(8, 32, generator=g)

bf16, half = torch.bfloat16, torch.float16
CASES = {  # network, its data, its type, its optimizer, autocast
    "AdamW": (Text, ids, None, lambda p: torch.optim.AdamW(p, 1e-3), None),
    "AdamW autocast": (Text, ids, None, lambda p: torch.optim.AdamW(p, 1e-3), bf16),
    "AdamW GradScaler": (Text, ids, None, lambda p: torch.optim.AdamW(p, 1e-3), half),
    "FusedAdam": (Text, ids, None, lambda p: FusedAdam(p, 1e-3, weight_decay=0.01), None),
    "FusedAdam split": (Text, ids, bf16, lambda p: FusedAdam(p, 1e-3, master_weights="split"), None),
    "FusedAdam masters": (Text, ids, bf16, lambda p: FusedAdam(p, 1e-3, master_weights=True), None),
    "FusedAdam stochastic": (Text, ids, bf16, lambda p: FusedAdam(p, 1e-3, stochastic_rounding=True), None),
    "FusedLAMB": (Text, ids, None, lambda p: FusedLAMB(p, 1e-3), None),
    "FusedSGD": (Image, images, None, lambda p: FusedSGD(p, 1e-2, momentum=0.9), None),
    "Adam": (Drawn, rows, None, lambda p: torch.optim.Adam(p, 1e-2), None),
    "a hook": (Text, same, None, lambda p: torch.optim.AdamW(p, 1e-3), None),
    "FP16_Optimizer AdamW": (Text, ids, half, lambda p: FP16_Optimizer(torch.optim.AdamW(p, 1e-3)), None),
    "FP16_Optimizer FusedAdam": (Text, ids, half, lambda p: FP16_Optimizer(FusedAdam(p, 1e-3)), None),
}
folder, resumed = Path(sys.argv[1]), sys.argv[2] == "resume"
found = {}
for name, (net, data, dtype, make, cast) in CASES.items():
    torch.manual_seed(0)
    model = ORTModule(net().to(dtype))
    if name == "a hook":  # the first call of a kind runs in PyTorch: so it comes before load
        model.rest.register_forward_hook(lambda module, given, out: out * 1.5)
        if resumed:
            model(data(torch.Generator(), 0))[0].backward()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)
    g = torch.Generator().manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2, enabled=cast is half)
    torch.manual_seed(7 + resumed)
    step = 0
    if resumed:
        step = checkpoint.load(folder / name, model, optimizer, schedule=schedule, scaler=scaler)
        assert step == 4
    for _ in range(step):
        data(g, _)
    bits = []
    for i in range(step, 8):
        with torch.autocast("cpu", cast) if cast else nullcontext():
            loss = model(data(g, i))[0]
        if isinstance(getattr(optimizer, "loss_scale", None), float):
            optimizer.backward(loss)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        optimizer.zero_grad()
        bits.append(loss.item().hex())
        if i == 3 and not resumed:
            checkpoint.save(folder / name, 4, model, optimizer, schedule=schedule, scaler=scaler)
    assert model.report().graphs and not model.report().eager, model.report()
    found[name] = bits[-4:] + [p.detach().double().sum().item().hex() for p in model.parameters()] + [scaler.get_scale()]
(folder / sys.argv[2]).write_text(json.dumps(found))
print("done")
'''

SHARDED = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from tiny_gpt import batch, build
from ortmodule import ORTModule, checkpoint, wrap_blocks
from ortmodule.optim import FP16_Optimizer, FusedAdam
folder, saves = Path(sys.argv[1]), sys.argv[2] == "save"
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
for kind in ("AdamW", "FusedAdam", "masters"):
    model = build()
    if kind == "masters":
        model = model.bfloat16()
    if world > 1:
        wrap_blocks(model)
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = ORTModule(model)
    optimizer = (torch.optim.AdamW if kind == "AdamW" else FusedAdam)(model.parameters(), 1e-3)
    if kind == "masters":
        optimizer = FP16_Optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    step = 0 if saves else checkpoint.load(folder / kind, model, optimizer)
    assert step == (0 if saves else 3)
    losses = []
    for i in range(step, 6):
        # the same batch on every rank: the losses do not depend on how many there are
        loss = model(batch(torch.Generator().manual_seed(i)))
        optimizer.backward(loss) if kind == "masters" else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if saves and i == 2:
            checkpoint.save(folder / kind, 3, model, optimizer)
    file = folder / f"{kind}.losses"
    if saves:
        file.write_text(repr(losses[-3:]))
    want = eval(file.read_text())
    near = 0.0 if world == 2 else 1e-6 if kind != "masters" else 2e-3
    assert all(abs(a - b) <= near * b for a, b in zip(losses[-3:], want, strict=True)), (kind, world, losses, want)
    if world == 1:
        from safetensors.torch import save_file
        plain = checkpoint.weights(folder / kind)
        save_file(plain, folder / f"{kind}.safetensors")
        eager = build().to(next(iter(plain.values())).dtype)
        eager.load_state_dict(plain)
        assert abs(eager(batch(torch.Generator().manual_seed(3))).item() - want[0]) <= near * want[0]
print("done", flush=True)
if world > 1:
    dist.destroy_process_group()
"""

DDP = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ortmodule import ORTModule, checkpoint
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
folder = Path(sys.argv[1])
def make():
    torch.manual_seed(0)
    model = DistributedDataParallel(ORTModule(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)
def train(model, opt, g, steps):
    found = []
    for _ in range(steps):
        loss = model(torch.randn(6, 4, generator=g)).pow(2).mean()
        loss.backward()
        opt.step(), opt.zero_grad()
        found.append(loss.item())
    return found
def fails(word, call):
    try:
        call()
    except (RuntimeError, TypeError) as error:
        assert word in str(error), error
    else:
        raise AssertionError(word)
class Broken:
    def state_dict(self):
        if rank == 1:
            raise OSError("no place left")
        return {}
class Odd:
    def state_dict(self):
        return {"f": Broken()}
if sys.argv[2] == "save":
    g = torch.Generator().manual_seed(rank)
    model, opt = make()
    torch.manual_seed(5 + rank)
    train(model, opt, g, 3)
    path = checkpoint.save(folder / "ddp", 3, model, opt, own=torch.optim.lr_scheduler.StepLR(opt, rank + 1))
    assert path.name == "step-3" and (path / "rank-1.pt").exists()
    theirs = train(model, opt, g, 3)
    again, other = make()
    own = torch.optim.lr_scheduler.StepLR(other, 1)
    torch.manual_seed(99)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        torch.randn(6, 4, generator=g)
    assert checkpoint.load(folder / "ddp", again, other, own=own) == 3 and own.step_size == rank + 1
    assert train(again, other, g, 3) == theirs
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    fails("rank 1: OSError: no place left", lambda: checkpoint.save(folder / "ddp", 4, model, opt, broken=Broken()))
    fails("weights_only", lambda: checkpoint.save(folder / "ddp", 4, model, opt, odd=Odd()))
    fails("older than step-3", lambda: checkpoint.save(folder / "ddp", 2, model, opt))
    fails("has no scaler", lambda: checkpoint.load(folder / "ddp", again, other, scaler=own))
    for step in (4, 4, 5, 6):
        checkpoint.save(folder / "ddp", step, model, opt)
    assert sorted(p.name for p in (folder / "ddp").iterdir()) == ["step-5", "step-6"]
    # each rank has weights of its own, as under post-local SGD
    alone = model.module
    with torch.no_grad():
        alone[0].weight += rank
    checkpoint.save(folder / "own", 1, alone, opt)
    before = alone[0].weight.clone()
    with torch.no_grad():
        alone[0].weight.zero_()
    assert checkpoint.load(folder / "own", alone, opt) == 1 and torch.equal(alone[0].weight, before)
    if rank == 0:
        (folder / "own" / "step-1" / "rank-1.pt").write_bytes(b"half")
    dist.barrier()
    fails("rank 1", lambda: checkpoint.load(folder / "own", alone, opt))
    dist.barrier()
else:
    model, opt = make()
    assert checkpoint.load(folder / "ddp", model, opt) == 6
    fails("only as many can go on", lambda: checkpoint.load(folder / "own", model, opt))
    dist.barrier()
print("done", flush=True)
dist.destroy_process_group()
"""

LAST = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from ortmodule import checkpoint
dist.init_process_group("gloo")
sys.setswitchinterval(100)  # nobody else runs in Python while this does
model = torch.nn.Linear(2, 2)
gather = checkpoint._all_gather
def all_gather(rows, own):
    before = [sys.getrefcount(t) for t in (*rows, own)]
    gather(rows, own)
    assert [sys.getrefcount(t) for t in (*rows, own)] == before
checkpoint._all_gather = all_gather
for i in range(200):
    assert checkpoint._gathered((dist.get_rank(), "x" * i)) == [(0, "x" * i), (1, "x" * i)]
print("done", flush=True)
checkpoint.save(Path(sys.argv[1]), 1, model)
"""

SAVES = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from ortmodule import checkpoint
folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = nn.Linear(64, 64)
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model(torch.ones(1, 64)).sum().backward()
opt.step()
def save(step):
    with torch.no_grad():
        for t in [*model.parameters(), *[s["momentum_buffer"] for s in opt.state.values()]]:
            t.fill_(step)
    checkpoint.save(folder, step, model, opt)
save(1)
last = 1
draw = random.Random(0)
for kill in range(60):
    child = os.fork()
    step = last
    while not child:
        step += step % 3 != 0 or draw.random() < 0.7  # some steps are saved again
        save(step)
    time.sleep(draw.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    step = checkpoint.load(folder, model, opt)
    assert step >= last, (kill, step, last)
    for t in [*model.parameters(), *[s["momentum_buffer"] for s in opt.state.values()]]:
        assert (t == step).all(), (kill, step, t)
    last = step
assert last > 2, last
print("done")
"""


def test_every_kind_of_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Dropout, checkpoints, sizes that change, statistics, draws in PyTorch, branches; fp32, bf16, fp16."""
    import json

    launch(KINDS, tmp_path, "whole", ranks=1)
    launch(KINDS, tmp_path, "resume", ranks=1)
    whole, resumed = (json.loads((tmp_path / name).read_text()) for name in ("whole", "resume"))
    assert len(whole) == 13
    assert not [name for name in whole if whole[name] != resumed[name]]
    del whole["FusedAdam split"]  # holds 32 bits as masters do, so the two may agree
    assert len({tuple(bits[:4]) for bits in whole.values()}) == 12  # no two cases are the same


def test_fsdp2_saved_on_two_goes_on_on_two_four_and_one(tmp_path: Path) -> None:
    launch(SHARDED, tmp_path, "save")
    launch(SHARDED, tmp_path, "load")
    launch(SHARDED, tmp_path, "load", ranks=4)
    launch(SHARDED, tmp_path, "load", ranks=1)
    assert load_file(tmp_path / "AdamW.safetensors")["blocks.0.qkv.weight"].shape == (192, 64)


def test_ddp_and_what_is_refused(tmp_path: Path) -> None:
    launch(DDP, tmp_path, "save")
    launch(DDP, tmp_path, "load", ranks=3)


def test_broken_files_and_what_is_not_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        opt = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        return model, opt

    model, opt = make()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
    for step in (4, 5):
        checkpoint.save(tmp_path, step, model, opt, schedule=schedule)
    file = tmp_path / "step-5" / "rank-0.pt"
    whole = file.read_bytes()
    at = whole.index(model.weight.detach().numpy().tobytes())
    for bad, what in (
        (whole[: len(whole) // 2], "is cut or broken"), (b"", "is cut or broken"),
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "has other bytes than were written"),
    ):  # fmt: skip
        file.write_bytes(bad)
        with pytest.raises(RuntimeError, match=f"rank-0.pt {what}.*remove .*step-5 to go on from step-4"):
            checkpoint.load(tmp_path, *make(), schedule=schedule)
    file.write_bytes(whole)
    with pytest.raises(RuntimeError, match="is a file, not the folder of checkpoints"):
        checkpoint.load(file, *make())
    assert checkpoint.load(tmp_path, *make(), schedule=schedule) == 5 and not caplog.messages
    other = make()[0]
    checkpoint.load(tmp_path, other, torch.optim.SGD(other.parameters(), 0.1, momentum=0.9))
    assert ["holds the state of AdamW, and it is loaded into SGD" in m for m in caplog.messages] == [True, False]
    assert "also holds schedule, which was not asked for and begins anew" in caplog.messages[1]


def test_a_script_may_end_right_after_a_save(tmp_path: Path) -> None:
    """No thread of gloo's holds a tensor any more: one that lets go of it while Python ends aborts the process."""
    launch(LAST, tmp_path, after="")


def test_a_kill_within_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    launch(SAVES, tmp_path / "kills", ranks=1)


def test_what_a_kill_between_two_renames_leaves(tmp_path: Path) -> None:
    """A step is saved again: first there is only the old one, then both."""
    model = torch.nn.Linear(2, 2)

    def save(value: float) -> None:
        torch.nn.init.constant_(model.weight, value)
        checkpoint.save(tmp_path, 3, model)

    save(1)
    (tmp_path / "step-3").rename(tmp_path / "step-3.old")
    assert checkpoint.load(tmp_path, model) == 3 and checkpoint.weights(tmp_path)["weight"][0, 0] == 1
    save(2)
    shutil.copytree(tmp_path / "step-3", tmp_path / "step-3.old")
    save(3)
    torch.nn.init.zeros_(model.weight)
    assert checkpoint.load(tmp_path, model) == 3 and model.weight[0, 0] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]


def start(folder: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    base = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "examples" / "resume.py"), str(folder), "--steps", "60", "--every", "3"]
    return [subprocess.Popen(command, env=base | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(2)]


def ends(running: list[subprocess.Popen[str]]) -> None:
    for process in running:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-2000:]


def lines(folder: Path) -> list[tuple[int, str]]:
    file = folder / "losses-0.txt"
    return [(int(line.split()[0]), line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_example_is_killed_at_random_moments(tmp_path: Path) -> None:
    """At most the steps since the last checkpoint are computed again, and what they and all later give are the same
    bits. When one rank is killed the other ends with an error."""
    ends(start(tmp_path / "whole"))
    want = lines(tmp_path / "whole")
    assert [step for step, _ in want] == [*range(1, 61)]
    folder, draw, ran = tmp_path / "killed", random.Random(0), [0]
    for kill in range(3):
        before = ran[-1]
        running = start(folder)
        end = time.monotonic() + 120
        while len(lines(folder)) <= before + 5 and time.monotonic() < end and running[0].poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(running[kill % 2].pid, signal.SIGKILL)
        if kill == 2:
            os.kill(running[1].pid, signal.SIGKILL)
        for process in running:
            process.communicate(timeout=60)
            assert process.returncode != 0
        ran.append(len(lines(folder)))
    ends(start(folder))
    got = lines(folder)
    assert {*got} == {*want}  # a step that was computed twice had the same bits
    lost = [got[n - 1][0] + 1 - got[n][0] for n in ran[1:]]
    assert all(0 <= n <= 4 for n in lost), lost  # three steps, and one more while saving


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", None])
def test_none_to_keep(keep: object, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path, 1, model)
    with pytest.raises(RuntimeError, match=f"rank 0: ValueError: keep={keep!r}: .*: give 1 or more"):
        checkpoint.save(tmp_path, 2, model, keep=keep)  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("step", [0, "7", 1.5])
def test_steps_that_are_none(step: object, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"rank 0: ValueError: step={step!r}: .*of one step or more"):
        checkpoint.save(tmp_path / "there", step, torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert not (tmp_path / "there").exists()
