"""Autocast and low-precision weights against fp64: the engine's error stays within twice eager's own, tensor by
tensor."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 99, (3, 21), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(21)[None] < torch.tensor([[21], [10], [17]])).long()


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    cfg = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=99, n_positions=64, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
                                  embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return transformers.GPT2LMHeadModel(cfg), {"input_ids": IDS, "labels": IDS}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    cfg = transformers.BertConfig(vocab_size=99, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80,
                                  hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return transformers.BertForMaskedLM(cfg), {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    cfg = transformers.LlamaConfig(vocab_size=99, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                                   num_key_value_heads=2)  # fmt: skip
    return transformers.LlamaForCausalLM(cfg), {"input_ids": IDS, "labels": IDS}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    cfg = transformers.T5Config(vocab_size=99, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(cfg), {"input_ids": IDS, "attention_mask": MASK, "labels": IDS[:, :7].contiguous()}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 16, 3, stride=2)
        self.c = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        return nn.functional.cross_entropy(self.c(torch.relu(self.b(x)).mean((2, 3))), labels, label_smoothing=0.1)


def conv() -> tuple[nn.Module, dict[str, Tensor]]:
    x = torch.randn(4, 3, 17, 19, generator=torch.Generator().manual_seed(2))
    return ConvNet(), {"x": x, "labels": torch.tensor([0, 4, 1, 2])}


def loss_of(out: object) -> Tensor:
    return out if isinstance(out, Tensor) else out.loss  # type: ignore[attr-defined]


def gradients(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", enabled=dtype is not None, dtype=dtype or torch.bfloat16):
        loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def compare(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    model, batch = make()
    if not autocast:
        model = model.to(dtype)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    exact = copy.deepcopy(model).double()
    _, want = gradients(exact, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}, None)
    eager_loss, eager = gradients(copy.deepcopy(model), batch, dtype if autocast else None)
    wrapped = ORTModule(copy.deepcopy(model))
    ours_loss, ours = gradients(wrapped, batch, dtype if autocast else None)
    assert (ours_loss - eager_loss).abs() <= 2**-7 * eager_loss.abs()
    assert ours.keys() == eager.keys()
    largest = max(float(g.norm()) for g in want.values())
    # A gradient that is zero but for rounding (a bias before a normalisation) is noise in both: measured against the
    # model's largest.
    for name, w in want.items():
        mine, theirs = float((ours[name] - w).norm()), float((eager[name] - w).norm())
        assert mine <= 2 * theirs + 1e-3 * torch.finfo(dtype).eps * largest, (name, mine, theirs, float(w.norm()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("make", [gpt2, bert, llama, t5, conv])
def test_errors_under_autocast_are_eagers(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], dtype: torch.dtype) -> None:
    compare(make, dtype, True)


@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_errors_of_bf16_weights_are_eagers(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    compare(make, torch.bfloat16, False)


HOST = """
import torch
from ortmodule import ORTModule
model = ORTModule(torch.nn.Linear(768, 512, bias=False, dtype=torch.bfloat16))
model(torch.randn(256, 768, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
"""


def _computes_bf16() -> bool:
    """Elsewhere PyTorch does not leave the product to oneDNN."""
    with open("/proc/cpuinfo") as f:
        return any(line.startswith("flags") and ("avx512_bf16" in line or "amx_bf16" in line) for line in f)


@pytest.mark.parametrize("provider", ["own", "host"])
def test_errors_with_either_provider_of_bf16_products(provider: str) -> None:
    """Both bf16 products, chosen by hand: the same rows as above hold, and the two really are two."""
    def run(args: list[str], forced: str, **env: str) -> str:
        env = {**os.environ, "ORTMODULE_GEMM": forced, **env}
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if provider == "host" and _computes_bf16():
        for forced, products in (("host", 3), ("own", 0)):
            log = run(["-c", HOST], forced, ONEDNN_VERBOSE="1").splitlines()
            assert sum("exec,cpu,matmul" in line and "bf16" in line for line in log) == products
    run(["-m", "pytest", "-q", "-x", __file__, "-k", "bf16 and not provider and (gpt2 or bert)", "-p", "no:cacheprovider"], provider)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rms_norms_own_epsilon(dtype: torch.dtype) -> None:
    """That of the type it computes in: float32's for halves."""
    torch.manual_seed(0)
    eager = nn.RMSNorm(6).to(dtype)
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    x = (torch.randn(4, 6) * 1e-3).to(dtype)
    got = []
    for m in (ours, eager):
        leaf = x.clone().requires_grad_()
        y = m(leaf)
        y.sum().backward()
        got.append((y.float(), leaf.grad.float()))
    for a, b in zip(*got):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-2 if dtype.itemsize == 2 else 1e-5)
