"""Two gloo ranks: DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2 (DTensors), against one process with the
whole batch."""

from __future__ import annotations

import pytest
from ranks import launch

START = """
import copy, math, torch, torch.distributed as dist
from ortmodule.optim import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_
dist.init_process_group("gloo")
rank = dist.get_rank()
half = slice(rank * 4, rank * 4 + 4)

def net(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).to(dtype)  # 13 and 5 rows: uneven shards

def loss(model, t, part=slice(None)):
    gen = torch.Generator().manual_seed(t)
    x, y = torch.randn(8, 7, generator=gen), torch.randn(8, 5, generator=gen)
    return ((model(x[part]) - y[part]) ** 2).mean()

def adam(p, **more):
    return FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=2, weight_decay=0.01, **more)

def adamw(p):
    return torch.optim.AdamW(p, 1e-2)

def sgd(p):
    return torch.optim.SGD(p, 1e-2, 0.9)
"""

FSDP = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from ortmodule.optim.lists import grad_norm, has_nonfinite
mesh = init_device_mesh("cpu", (2,))

def sharded(dtype=torch.float32):
    return fully_shard(net(dtype), mesh=mesh)

def give_gradients(model, t):
    gen = torch.Generator().manual_seed(t)
    for p in model.parameters():
        p.grad = distribute_tensor(torch.randn(p.shape, generator=gen).to(p.dtype), mesh, p.placements)

def assert_same(model, whole, exact=False):
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, **(dict(rtol=0, atol=0) if exact else dict(rtol=1e-4, atol=1e-5)))

# curves, with and without clipping
curves = (
    (adam, adamw),
    (lambda p: FusedSGD(p, 1e-2, 0.9), sgd),
    (lambda p: FP16_Optimizer(adam(p)), adamw),
    (lambda p: FP16_Optimizer(adamw(p)), adamw),
)
for ours, theirs in curves:
    for clip in (None, clip_grad_norm_, "master"):
        model, whole = sharded(), net()
        opt, oracle = ours(model.parameters()), theirs(whole.parameters())
        if clip == "master" and not hasattr(opt, "clip_master_grads"):
            continue
        for t in range(4):
            opt.zero_grad(), oracle.zero_grad()
            getattr(opt, "backward", torch.Tensor.backward)(loss(model, t, half))
            loss(whole, t).backward()
            if clip:
                want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05).item()
                if clip == "master":
                    assert abs(opt.clip_master_grads(0.05) - want) < 1e-5 * want
                else:
                    clip(model.parameters(), 0.05 * getattr(opt, "loss_scale", 1.0))
            opt.step(), oracle.step()
        assert_same(model, whole)
        assert not opt.state or all(isinstance(v, DTensor) for s in opt.state.values() for k, v in s.items() if k != "step" and v is not None)

# every storage of 16-bit weights: the bits of the unsharded optimizer; resume; checkpoint
for make in (
    adam,
    lambda p: adam(p, master_weights=True),
    lambda p: adam(p, master_weights="split"),
    lambda p: FP16_Optimizer(adam(p)),
    lambda p: FP16_Optimizer(adamw(p)),
):
    model, whole = sharded(torch.bfloat16), net(torch.bfloat16)
    opt, oracle = make(model.parameters()), make(whole.parameters())
    for t in range(3):
        give_gradients(model, t)
        for p, q in zip(model.parameters(), whole.parameters()):
            q.grad = p.grad.full_tensor()
        opt.step(), oracle.step()
    assert_same(model, whole, exact=True)
for make in (adam, lambda p: FusedSGD(p, 1e-2, 0.9)):
    model, again = sharded(), sharded()
    opt, other = make(model.parameters()), make(again.parameters())
    give_gradients(model, 0)
    opt.step()
    saved, state = get_state_dict(model, opt)
    set_state_dict(again, other, model_state_dict=saved, optim_state_dict=copy.deepcopy(state))
    for m, o in ((model, opt), (again, other)):
        give_gradients(m, 1)
        o.step()
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p.to_local(), q.to_local())
full = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
assert rank or full["state"]["0.weight"]["momentum_buffer"].shape == (13, 7)

# inf in the shard of one rank: both leave the step out
for make in (adam, adamw, sgd):
    model = sharded()
    opt = FP16_Optimizer(make(model.parameters()), model)
    before = [p.to_local().clone() for p in model.parameters()]
    opt.backward(loss(model, 0, half))
    if rank == 1:
        model[0].weight.grad.to_local()[0, 0] = math.inf
    opt.step()
    assert opt.overflow and opt.loss_scale == 2.0**15
    assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before))
model = sharded()
opt, scaler = adam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
scaler.scale(loss(model, 0, half)).backward()
if rank == 1:
    model[0].weight.grad.to_local()[0, 0] = math.nan
scaler.step(opt), scaler.update()
assert scaler.get_scale() == 128.0 and not any(float(s["step"]) for s in opt.state.values())

# norms over two meshes, a replicated dimension, a plain tensor, and partial sums: the same on both ranks
grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "copies"))
whole = torch.arange(12.0).reshape(4, 3) - 5
pieces = [distribute_tensor(whole, grid, [Shard(0), Replicate()]), distribute_tensor(whole, mesh, [Shard(1)]), whole]
pieces.append(DTensor.from_local(whole / 2, mesh, [Partial()]))
for order in (1.0, 2.0, 3.0, math.inf):
    norm, finite = grad_norm(pieces, order)
    assert finite and abs(norm - torch.linalg.vector_norm(torch.stack([whole] * 4), order).item()) < 1e-4
pieces[1].to_local()[rank, 0] = math.nan if rank else 1.0
assert has_nonfinite(pieces) and not grad_norm(pieces)[1] and not grad_norm(pieces, math.inf)[1]

# an empty shard with a gradient placed otherwise; plain and sharded in one group; LAMB
place = lambda where: distribute_tensor(torch.ones(1, 4), mesh, [where])
p, q = torch.nn.Parameter(place(Shard(0))), torch.nn.Parameter(torch.ones(1, 4))
opt = adam([p, q])
p.grad, q.grad = place(Replicate()), torch.ones(1, 4)
opt.step()
assert torch.equal(p.full_tensor(), q)
square = p * p
opt.step()
try:
    square.sum().backward()
except RuntimeError as e:
    assert "modified by an inplace operation" in str(e), e
else:
    raise SystemExit("autograd did not see the step")
p.grad, lamb = place(Shard(0)), FusedLAMB([p])
try:
    lamb.step()
except RuntimeError as e:
    assert "use FusedAdam" in str(e), e
else:
    raise SystemExit("LAMB took a shard for the whole")
p, q = torch.nn.Parameter(place(Replicate())), torch.nn.Parameter(torch.ones(1, 4))
p.grad, q.grad = place(Replicate()), torch.ones(1, 4)
FusedLAMB([p]).step(), FusedLAMB([q]).step()
assert torch.equal(p.full_tensor(), q)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
def test_fsdp2():
    launch(START + FSDP)


DDP = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

def assert_same(model, whole):
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        both = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(both, p.detach())
        assert torch.equal(*both)

lamb = lambda p: FusedLAMB(p, 1e-2)
for make, oracle in ((adam, adamw), (lamb, lamb), (adam, None), (lamb, None), (adamw, None), (sgd, None)):
    model, whole = DistributedDataParallel(net()), net()
    opt, other = make(model.parameters()), (oracle or make)(whole.parameters())
    if oracle is None:  # FP16_Optimizer, with inf in what one rank feeds at step 2: both leave it out
        opt = FP16_Optimizer(opt, model)
    skipped = []
    for t in range(5):
        opt.zero_grad(), other.zero_grad()
        mine = loss(model, t, half)
        if oracle is None:
            opt.backward(mine * (math.inf if (t, rank) == (2, 1) else 1.0))
        else:
            mine.backward()
        opt.step()
        skipped += [t] * getattr(opt, "overflow", False)
        if t not in skipped:
            loss(whole, t).backward()
            other.step()
    assert skipped == [2] * (oracle is None) and getattr(opt, "loss_scale", 2.0**15) == 2.0**15
    assert_same(model, whole)

for kind, settings, oracle in (
    (FusedAdam, dict(lr=1e-2, eps=1e-8, adam_w_mode=2, weight_decay=0.01), adamw),
    (FusedSGD, dict(lr=1e-2, momentum=0.9), sgd),
    (FusedLAMB, dict(lr=1e-2, max_grad_norm=None), lambda p: FusedLAMB(p, 1e-2, max_grad_norm=None)),
):
    model, whole = DistributedDataParallel(net()), net()
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **settings)
    opt = oracle(whole.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (zero, opt)]
    for t in range(5):
        zero.zero_grad(), opt.zero_grad()
        loss(model, t, half).backward(), loss(whole, t).backward()
        for o in (zero, opt, *schedules):
            o.step()
    assert_same(model, whole)
    zero.consolidate_state_dict(0)
    if rank == 0:  # the whole state fits the unsharded optimizer, torch's too
        opt.load_state_dict(zero.state_dict())
        assert len(opt.state) == 4
dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
def test_ddp_and_zero_redundancy_optimizer():
    launch(START + DDP)
