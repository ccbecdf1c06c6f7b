"""Trains a step with the ortmodule that is installed, beside eager; run from anywhere but a checkout."""

import sysconfig
from pathlib import Path

import torch

import ortmodule
from ortmodule import ORTModule, optim

site = Path(sysconfig.get_path("purelib")).resolve()
for module in (ortmodule, ortmodule._C, optim):
    assert module.__file__ and site in Path(module.__file__).resolve().parents, f"{module.__name__} comes from {module.__file__}, not from {site}"

torch.manual_seed(0)
eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
ours = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
ours.load_state_dict(eager.state_dict())
model = ORTModule(ours, strict=True)
pairs = [(eager, torch.optim.SGD(eager.parameters(), lr=0.1)), (model, optim.FusedSGD(model.parameters(), lr=0.1))]
x, target = torch.randn(32, 8), torch.randint(4, (32,))
for _ in range(3):
    losses = []
    for net, optimizer in pairs:
        loss = torch.nn.functional.cross_entropy(net(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5, losses
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(eager.parameters(), ours.parameters()))
print(f"{ortmodule.__file__}: three steps as eager's, loss {losses[1]:.4f}")
