"""Numbers in files have a point in every locale: where the decimal sign is a comma, and where it is two bytes long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import locale, sys
from pathlib import Path
import torch
from torch import nn
from ortmodule import ORTModule, api

locale.setlocale(locale.LC_ALL, sys.argv[1])
assert locale.localeconv()["decimal_point"] != "."

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.w = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.l(x)
        x = 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.25e-5) * self.w
        return nn.functional.leaky_relu(x, 0.1).square().sum()

torch.manual_seed(0)
net = Net().double()
model = ORTModule(net)
x = torch.randn(4, 8, dtype=torch.double)
assert abs(model(x).item() - net(x).item()) < 1e-13
assert "gelu_tanh" in str(model.report()), model.report()

home = Path(sys.argv[2])
model = ORTModule(Net())
model.save_for_device(home, torch.randn(4, 8), optimizer=torch.optim.AdamW(model.parameters(), lr=0.0625, eps=0.03))
state = api.CheckpointState.load_checkpoint(home / "checkpoint")
module = api.Module(home / "training_model.onnx", state, home / "eval_model.onnx")
update = api.Optimizer(home / "optimizer_model.onnx", module)
assert update.get_learning_rate() == 0.0625
update.set_learning_rate(0.001)
state.properties["third"] = 1 / 3
api.CheckpointState.save_checkpoint(state, home / "again")
again = api.CheckpointState.load_checkpoint(home / "again")
module = api.Module(home / "training_model.onnx", again, home / "eval_model.onnx")  # which it is read for
assert again.properties["third"] == 1 / 3
print("good")
"""


@pytest.mark.parametrize("name, of", [("de_DE.UTF-8", "de_DE"), ("ps_AF.UTF-8", "ps_AF")])
def test_numbers_have_a_point(name: str, of: str, tmp_path: Path) -> None:
    if not shutil.which("localedef") or not Path("/usr/share/i18n/locales", of).exists():
        pytest.skip("no localedef, or no definitions of locales")
    subprocess.run(["localedef", "-c", "-i", of, "-f", "UTF-8", str(tmp_path / name)], check=False, capture_output=True)
    env = {**os.environ, "LOCPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    (tmp_path / "home").mkdir()
    program = [sys.executable, "-P", "-c", PROGRAM, name, str(tmp_path / "home")]
    done = subprocess.run(program, env=env, capture_output=True, text=True, errors="replace")
    assert done.stdout == "good\n", done.stderr
