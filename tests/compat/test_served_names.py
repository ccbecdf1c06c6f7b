"""The familiar import names: all of them, beside an installed onnxruntime, never in the place of an installed
onnxruntime-training; an old script, unchanged."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ortmodule
import ortmodule.compat  # noqa: F401  serves the names
from ortmodule import fallback
from ortmodule.compat import build
from ortmodule.compat.names import MISSING, NAMES

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=ENV, capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "onnxruntime"])
def test_every_name_is_there(name):
    module = importlib.import_module(name)
    for attribute in NAMES[name]:
        if attribute != "__main__":
            assert getattr(module, attribute) is not None or attribute in ("ONNXRUNTIME_CUDA_VERSION", "ONNXRUNTIME_ROCM_VERSION")
    assert set(module.__all__) <= set(dir(module))


def test_names_are_one_object_everywhere():
    import torch_ort
    from onnxruntime.training import ORTModule
    from onnxruntime.training.ortmodule import options
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy

    assert ORTModule is ortmodule.ORTModule is torch_ort.ORTModule
    assert options.DebugOptions is ortmodule.DebugOptions and _FallbackPolicy is ortmodule.FallbackPolicy


@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_served_says_what_to_do(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(AttributeError, match="has no attribute") as error:
        getattr(importlib.import_module(module), attribute)
    assert MISSING[name] in str(error.value)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(name)
    assert MISSING[name] in str(error.value)
    assert not hasattr(importlib.import_module(module), attribute)
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {attribute}")
    assert MISSING[name] in str(error.value)


def test_an_unknown_name_names_the_nearest():
    import onnxruntime.training.ortmodule as module

    with pytest.raises(AttributeError, match="the nearest is 'DebugOptions'"):
        module.DebugOption  # noqa: B018
    with pytest.raises(ImportError, match="the nearest is 'ORTModule'"):
        from onnxruntime.training import ORTModul  # noqa: F401


def test_constants_are_assigned_through_the_module():
    import onnxruntime.training.ortmodule as module

    def settings():
        return ortmodule.ORTModule(torch.nn.Linear(2, 2))._ortmodule.settings

    policy = module.ORTMODULE_FALLBACK_POLICY
    try:
        module.ORTMODULE_FALLBACK_RETRY = True
        assert fallback.ORTMODULE_FALLBACK_RETRY is True and settings().fallback_retry is True
        module.ORTMODULE_FALLBACK_POLICY = fallback.FallbackPolicy.FALLBACK_DISABLE
        assert settings().strict is True
    finally:
        module.ORTMODULE_FALLBACK_RETRY = False
        module.ORTMODULE_FALLBACK_POLICY = policy
    assert settings().fallback_retry is False and settings().strict is False


def test_onnxruntime_for_inference_stays_beside():
    code = (
        "import ortmodule.compat, onnxruntime, onnxruntime.training.ortmodule as m, sys\n"
        "assert onnxruntime.InferenceSession and 'site-packages' in onnxruntime.__file__\n"
        "assert onnxruntime.__spec__.origin != 'ortmodule.compat' == m.__spec__.origin\n"
    )
    assert run("-c", code).returncode == 0


def packages(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_an_installed_onnxruntime_training_is_never_shadowed(tmp_path):
    """Nor added to: a name that it has not stays missing."""
    packages(tmp_path, {
        "onnxruntime/__init__.py": "who = 'theirs'",
        "onnxruntime/training/__init__.py": "ORTModule = 'theirs'",
        "onnxruntime/training/ortmodule.py": "ORTModule = 'theirs'",
    })  # fmt: skip
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import ortmodule.compat, onnxruntime.training\n"
        "from onnxruntime.training.ortmodule import ORTModule\n"
        "assert ORTModule == onnxruntime.training.ORTModule == 'theirs'\n"
        "try: import onnxruntime.training.utils.hooks\n"
        "except ModuleNotFoundError: print('untouched')\n"
    )
    assert run("-c", code).stdout == "untouched\n"


def test_without_any_onnxruntime():
    """A finder before all others hides the installed one."""
    code = """
import sys
import importlib.machinery
real = importlib.machinery.PathFinder
class NotThat(real):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition('.')[0] == 'onnxruntime' else real.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(real)] = NotThat
import ortmodule.compat, onnxruntime
import torch
onnxruntime.set_seed(5)
first = torch.rand(1)
onnxruntime.set_seed(5)
assert torch.equal(first, torch.rand(1))
from onnxruntime.training.optim import FusedAdam, FP16_Optimizer, AdamConfig
print(onnxruntime.__spec__.origin, onnxruntime.__version__)
"""
    done = run("-c", code)
    assert done.stdout == "ortmodule.compat 1.19.2\n", done.stderr


OLD_SCRIPT = """
import sys
import torch
import onnxruntime
from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel
from onnxruntime.training.optim import FusedAdam
from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer
from onnxruntime.training.utils.data import LoadBalancingDistributedSampler
from torch_ort import ORTModule as Same

if __name__ == "__main__":
    torch.manual_seed(0)
    onnxruntime.set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model = ORTModule(model, DebugOptions(save_onnx=True, onnx_prefix="old", save_path=sys.argv[1], log_level=LogLevel.INFO))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    data = [torch.randn(6) for _ in range(32)]
    sampler = LoadBalancingDistributedSampler(data, complexity_fn=lambda x: int(x.abs().sum() * 100), world_size=1, rank=0)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in torch.stack([data[i] for i in sampler]).split(8):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] and isinstance(model, Same)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    print("trained", sys.argv[2:])
"""


@pytest.mark.parametrize("way", ["by its path", "as a module", "with the import added"])
def test_an_old_script_runs_unchanged(way, tmp_path):
    (tmp_path / "old_train.py").write_text(OLD_SCRIPT)
    arguments = {
        "by its path": ["-m", "ortmodule.compat", str(tmp_path / "old_train.py")],
        "as a module": ["-m", "ortmodule.compat", "-m", "old_train"],
        "with the import added": ["-c", "import sys, ortmodule.compat, runpy; sys.argv[0] = 'old_train.py'; runpy.run_path('old_train.py', run_name='__main__')"],
    }[way]
    done = run(*arguments, str(tmp_path), "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained ['--epochs', '3']\n"
    assert (tmp_path / "old_torch_exported_training.onnx").exists()


@pytest.mark.parametrize("name", ["ortmodule.torch_cpp_extensions.install", "ortmodule.compat -m torch_ort.configure", "ortmodule.compat -m onnxruntime.training.ortmodule.torch_cpp_extensions.install"])
def test_the_install_step_is_a_check(name):
    done = run("-m", *name.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[:3]] == [["extension", "ok"], ["pytorch", "ok"], ["training", "ok"]]
    assert "100% of" in done.stdout and "nothing to build" in done.stdout


def test_the_install_step_says_what_is_wrong(monkeypatch, capsys):
    from ortmodule.torch_cpp_extensions import install, is_installed

    monkeypatch.setitem(install.CHECKS, "pytorch", lambda: 1 / 0)
    assert install.build_torch_cpp_extensions() is False
    text = capsys.readouterr().out
    assert "pytorch    failed  ZeroDivisionError: division by zero" in text and "does not work here" in text
    assert is_installed(build.ORTMODULE_TORCH_CPP_DIR) and not is_installed(ROOT / "docs")


def test_info_names_versions_and_settings():
    done = subprocess.run([sys.executable, "-m", "ortmodule.info"], env={**ENV, "ORTMODULE_SEGMENT_MB": "7"}, capture_output=True, text=True)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert ortmodule.__version__ in rows["ortmodule"] and torch.__version__ in rows["torch"]
    assert "segment_mb=7.0" in rows["settings"] and "7" in rows["ORTMODULE_SEGMENT_MB"]
    broken = subprocess.run([sys.executable, "-m", "ortmodule.info"], env={**ENV, "ORTMODULE_STRICT": "maybe"}, capture_output=True, text=True)
    assert broken.returncode == 0 and "ORTMODULE_STRICT='maybe' is not allowed" in broken.stdout


def test_tools_say_what_they_are():
    """Every module that is run lists itself in `python -m ortmodule`, takes --help and refuses what it does not know."""
    listed = run("-m", "ortmodule")
    assert listed.returncode == 0 and listed.stdout == run("-m", "ortmodule", "--help").stdout and not listed.stderr
    runs = {f"ortmodule.{'.'.join(p.relative_to(ROOT / 'ortmodule').with_suffix('').parts)}".removesuffix(".__main__")
            for p in (ROOT / "ortmodule").rglob("*.py") if '__name__ == "__main__"' in p.read_text()}  # fmt: skip
    assert {line.split()[2] for line in listed.stdout.splitlines() if line.startswith("python -m ")} == runs - {"ortmodule"}
    for name in ("ortmodule", "ortmodule.info", "ortmodule.selftest", "ortmodule.compat"):
        told, bad = run("-m", name, "--help"), run("-m", name, "--no-such-option")
        assert told.returncode == 0 and told.stdout.startswith(f"usage: python -m {name} ") and len(told.stdout) < 1500, told
        assert bad.returncode and bad.stderr.startswith(f"usage: python -m {name} ") and "Traceback" not in bad.stderr, bad


def test_functions_cannot_be_inlined_and_that_is_said_once(caplog):
    from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support

    build._told.clear()
    with caplog.at_level(logging.WARNING, "ortmodule"):
        for _ in range(2):
            enable_custom_autograd_support(True)
            enable_custom_autograd_support(False)
    assert len(caplog.records) == 1 and "has no effect here" in caplog.text


def test_a_json_file_of_settings(tmp_path, monkeypatch):
    from onnxruntime.training.ortmodule.experimental.json_config import load_from_json

    first = {
        "PropagateCastOps": {"Strategy": "FLOOD_FILL", "Level": 3, "Allow": ["ABC"]},
        "UseExternalGPUAllocator": False, "EnableCustomAutogradFunction": True, "UseStaticShape": True,
        "SkipCheck": ["SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT"], "OnnxOpsetVersion": 13,
        "DebugOptions": {"LogLevel": "ERROR", "SaveONNX": True, "ONNXPrefix": "mine", "SaveONNXPath": str(tmp_path)},
        "FallbackPolicy": ["FALLBACK_DISABLE"],
    }  # fmt: skip
    (tmp_path / "1.json").write_text(json.dumps(first))
    (tmp_path / "2.json").write_text(json.dumps({"FallbackPolicy": ["FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_ONNX_MODEL"]}))
    model = ortmodule.ORTModule(torch.nn.Linear(3, 2))
    before = logging.getLogger("ortmodule").level
    load_from_json(model, tmp_path / "1.json")
    settings = model._ortmodule.settings
    assert settings.strict is True and settings.fallback_policy == 1 and settings.save_prefix == "mine"
    model(torch.randn(4, 3)).sum().backward()
    assert (tmp_path / "mine_torch_exported_training.onnx").exists()
    assert logging.getLogger("ortmodule").level == logging.ERROR
    logging.getLogger("ortmodule").setLevel(before)
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(tmp_path / "2.json"))
    load_from_json(model, tmp_path / "1.json")
    settings = model._ortmodule.settings
    assert settings.strict is False and settings.fallback_policy == 16 | 64 and settings.save_prefix == "mine"


@pytest.mark.parametrize("data, error", [
    ({"Unknown": 1}, KeyError), ({"UseStaticShape": 1}, AssertionError), ({"FallbackPolicy": ["FALLBACK"]}, ValueError),
    ({"PropagateCastOps": {"Strategy": "ALL"}}, KeyError), ({"SkipCheck": ["ALL"]}, KeyError), ({"OnnxOpsetVersion": "9"}, AssertionError),
    ({"DebugOptions": {"LogLevel": "LOUD"}}, KeyError), (None, ValueError)])  # fmt: skip
def test_a_wrong_json_file(data, error, tmp_path, monkeypatch):
    from onnxruntime.training.ortmodule.experimental.json_config import load_from_json

    monkeypatch.delenv("ORTMODULE_JSON_CONFIG_PATH", raising=False)
    (tmp_path / "x.json").write_text(json.dumps(data))
    model = ortmodule.ORTModule(torch.nn.Linear(3, 2))
    settings = model._ortmodule.settings
    with pytest.raises(error):
        load_from_json(model, None if data is None else tmp_path / "x.json")
    assert model._ortmodule.settings == settings
