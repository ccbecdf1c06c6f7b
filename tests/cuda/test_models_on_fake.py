"""Whole models through ORTModule on the fake GPU (fake_gpu.cpp, fake_blaslt.cpp; CPU tensors stand for cuda:0): BERT,
Llama, ViT, GPT-2. In f32 and under bf16 autocast, with and without dropout, three steps with an optimizer between them.

Held to: losses and gradients of eager PyTorch within twice eager's own error (fp64 eager is the truth), under dropout
those of the CPU engine, whose masks are the same. Nothing may be left to the CPU's rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule import _C

TESTS = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
pytestmark = pytest.mark.skipif(not _C.cuda_archs() or not (TESTS.parent / "build/fake/libcublasLt.so.13").exists(),
                                reason="built without CUDA kernels, or `make lib` has not run")

SOURCE = """
import sys, torch, transformers as hf
from cuda import fake
fake.late(False)  # PyTorch reads the CPU tensors that stand for the device's without waiting
from ortmodule import ORTModule, _C, cuda_engine

def ids(k, n=13):
    return torch.randint(0, 101, (2, n), generator=torch.Generator().manual_seed(k))

def bert(drop):
    config = hf.BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=101, max_position_embeddings=16,
                           hidden_dropout_prob=drop, attention_probs_dropout_prob=drop)
    def batch(k):
        mask = torch.ones(2, 13, dtype=torch.int64)
        mask[1, 9 + k:] = 0  # padded
        labels = torch.where(torch.rand(2, 13, generator=torch.Generator().manual_seed(k)) < 0.3, ids(k), -100)
        return dict(input_ids=ids(k), attention_mask=mask, labels=labels)
    return hf.BertForMaskedLM(config), batch

def llama(drop):  # grouped heads; dropout in attention alone
    config = hf.LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=101,
                            max_position_embeddings=16, attention_dropout=drop)
    return hf.LlamaForCausalLM(config), lambda k: dict(input_ids=ids(k), labels=ids(k))

def vit(drop):
    config = hf.ViTConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4, num_labels=7,
                          hidden_dropout_prob=drop, attention_probs_dropout_prob=drop)
    return hf.ViTForImageClassification(config), lambda k: dict(pixel_values=torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(k)),
                                                                labels=torch.tensor([k, 5]))

def gpt2(drop):
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=16, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop)
    return hf.GPT2LMHeadModel(config), lambda k: dict(input_ids=ids(k), labels=ids(k))

def train(make, how, dtype, drop):
    # how: cuda, cpu (engines), eager, double. Three steps; losses and gradients.
    cuda_engine.stand_in = how == "cuda"
    _C.cuda_engine_stand_in(how == "cuda")
    torch.manual_seed(0)
    model, batch = make(drop)
    model.train()
    if how == "double":
        model.double()
    run = ORTModule(model, strict=True) if how in ("cuda", "cpu") else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    found = []
    for k in range(3):
        given = {{n: t.double() if how == "double" and t.is_floating_point() else t for n, t in batch(k).items()}}
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32 and how != "double"):
            loss = run(**given).loss
        loss.backward()
        found += [loss.detach().clone()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found

def worst(a, truth):
    return max(((x.double() - t.double()).abs().max() / (1e-3 + t.double().abs().max())).item() for x, t in zip(a, truth, strict=True))

make = {make}
for dtype in (torch.float32, torch.bfloat16):
    got, truth, eager = (train(make, how, dtype, 0.0) for how in ("cuda", "double", "eager"))
    own, allowed = worst(got, truth), worst(eager, truth)
    print(dtype, "no dropout: error", own, "eager's", allowed, file=sys.stderr)
    assert own <= 2 * allowed, (dtype, own, allowed)
    got, cpu, plain = train(make, "cuda", dtype, 0.1), train(make, "cpu", dtype, 0.1), truth
    apart = worst(got, cpu)
    print(dtype, "dropout: apart from the CPU engine", apart, file=sys.stderr)
    assert apart <= 2 * allowed and worst(got, plain) > 4 * allowed, (dtype, apart, allowed)
launches, on_cpu, names, products = _C.cuda_engine_counts()
assert not names, names
assert launches > 500 and products > 200 and fake.count(fake.FAILURES) == 0, (launches, products, fake.message())
print("done")
"""


@pytest.mark.parametrize("model,seed", [("bert", 2), ("llama", 5), ("vit", 8), ("gpt2", 3)])
def test_trains(model: str, seed: int) -> None:
    res = subprocess.run([sys.executable, "-c", SOURCE.format(make=model)], capture_output=True, text=True, check=False, timeout=900,
                         env=ENV | {"OM_FAKE_SEED": str(seed)}, cwd=TESTS.parent)
    assert res.returncode == 0 and res.stdout.endswith("done\n"), res.stderr[-4000:]
