"""What of a wrapped module can be seen from outside and differs from eager, and a process that is spawned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ortmodule import ORTModule

ROOT = Path(__file__).parents[2]


def test_the_node_of_autograd_is_one_of_the_engines() -> None:
    """Eager's is the last operator's (AddmmBackward0); onnxruntime-training's _ORTModuleFunctionBackward, one for the whole model."""
    layer = nn.Linear(2, 2)
    out = ORTModule(layer)(torch.ones(1, 2, requires_grad=True))
    assert out.grad_fn is not None and type(out.grad_fn).__name__ == "HeadBackward" and out.is_leaf is layer(torch.ones(1, 2)).is_leaf


SPAWNING = """
import multiprocessing
import torch
from torch import nn
from ortmodule import ORTModule


def step(model, x):
    loss = (model(x) ** 2).sum()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    return loss.item()


def child(model, x, answers):
    answers.put([step(model, x), model.report().n_captures, type(model).__name__])


if __name__ == "__main__":
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).share_memory()
    x = torch.randn(3, 4)
    model = ORTModule(eager)
    before = eager[0].weight.detach().clone()
    want = (eager(x) ** 2).sum().item()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(model, x, answers))
    process.start()
    loss, captures, name = answers.get()
    process.join()
    assert abs(loss - want) < 1e-5 and captures == 1 and name == "Sequential", (loss, want, captures, name)
    assert not torch.equal(before, eager[0].weight)  # shared memory: what the child has trained
    assert abs(step(model, x) - (eager(x) ** 2).sum().item()) < 1  # and this one goes on
    print("trained")
"""


def test_a_wrapped_model_trains_in_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    run = subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "trained", run.stderr[-2000:]
